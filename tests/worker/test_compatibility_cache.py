"""A model is tried once: what is stored of it, when it holds, and what happens to a damaged file."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core import fingerprint
from core.jobs.hyperparameter_groups import LoraTargets
from core.model_checks import ModelCheck, ModelChecks, differ, installed_versions
from core.registry import BaseModelEntry
from tests.present import present
from tests.tiny import make_tiny_model
from worker.checks.compatibility import ForwardVerdict
from worker.checks.compatibility_cache import probed, store_coverage
from worker.model.policy import Policy, Route, load_base


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


@pytest.fixture
def model_cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def try_model(folder: Path, model_cache: Path) -> Callable[..., tuple[int, ForwardVerdict]]:
    """Load the model and try it as a job does. Returns how many forward passes that took, and the verdict.

    `meanwhile` is called when the files have been read.
    """

    def try_model(
        *,
        sampled: bool = True,
        targets: LoraTargets = "all-linear",
        again: bool = False,
        meanwhile: Callable[[], object] = lambda: None,
        **fields: Any,
    ) -> tuple[int, ForwardVerdict]:
        entry = BaseModelEntry(path=folder, **{"dtype": "float32", "context": 128} | fields)
        base = load_base("tiny", entry, folder, "cpu")
        meanwhile()
        policy = Policy(base, rank=4, alpha=8, seed=0, targets=targets)
        passes = []
        base.parts.decoder.register_forward_hook(lambda *args: passes.append(1))
        verdict = probed(policy, entry, model_cache, sampled=sampled, targets=targets, repeat=again)
        assert policy.route == verdict.route
        return len(passes), verdict

    return try_model


def stored(model_cache: Path) -> list[Any]:
    return sorted((model_cache / "checks").glob("*.json"))


@pytest.mark.slow
def test_the_next_job_on_the_same_model_does_not_try_it_again(
    try_model: Callable[..., tuple[int, ForwardVerdict]],
) -> None:
    passes, first = try_model()
    none, second = try_model()

    assert passes > 10 and none == 0
    assert first == second
    assert first.route == Route("packed", "shared")
    assert first.checked_at > 0 and first.largest < 1e-4


@pytest.mark.parametrize(
    "change", [{"context": 64}, {"dtype": "bfloat16"}, {"targets": "attention"}, {"again": True}], ids=str
)
@pytest.mark.slow
def test_what_the_verdict_depends_on_is_tried_again(
    try_model: Callable[..., tuple[int, ForwardVerdict]], change: dict[str, Any]
) -> None:
    try_model()

    passes, _ = try_model(**change)

    assert passes > 10


@pytest.mark.slow
def test_other_files_are_another_model(
    try_model: Callable[..., tuple[int, ForwardVerdict]], folder: Path
) -> None:
    try_model()
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(weights.stat().st_atime_ns, weights.stat().st_mtime_ns + 1))

    passes, _ = try_model()

    assert passes > 10


@pytest.mark.slow
def test_weights_that_are_changed_in_place_are_another_model_though_their_times_are_set_back(
    try_model: Callable[..., tuple[int, ForwardVerdict]], folder: Path
) -> None:
    try_model()
    weights = folder / "model.safetensors"
    stat, content = weights.stat(), bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    passes, _ = try_model()

    assert passes > 10 and weights.stat().st_size == stat.st_size


@pytest.mark.parametrize("position", [0, 5 << 20, (10 << 20) - 1])
def test_a_large_file_is_told_apart_by_blocks_of_it(tmp_path: Path, position: int) -> None:
    file = tmp_path / "weights"
    content = bytearray(10 << 20)
    file.write_bytes(content)
    before = fingerprint.of_contents(file)

    content[position] ^= 1
    file.write_bytes(content)

    # What lies between blocks is left to the time of the last change.
    assert (fingerprint.of_contents(file) != before) is (position != 5 << 20)
    assert fingerprint.of_folder(tmp_path) and not fingerprint.of_folder(tmp_path / "absent")


@pytest.mark.slow
def test_files_that_change_during_the_load_give_no_verdict_for_later(
    try_model: Callable[..., tuple[int, ForwardVerdict]], folder: Path, model_cache: Path
) -> None:
    """The verdict is of a mixture, or of files that are gone."""
    weights = folder / "model.safetensors"

    passes, _ = try_model(meanwhile=lambda: os.utime(weights, ns=(1, 1)))

    assert passes > 10 and stored(model_cache) == []
    assert try_model()[0] > 10
    assert try_model()[0] == 0


@pytest.mark.slow
def test_a_verdict_of_files_that_were_swapped_during_the_load_is_not_used(
    try_model: Callable[..., tuple[int, ForwardVerdict]], folder: Path
) -> None:
    try_model()
    config = folder / "config.json"

    passes, _ = try_model(meanwhile=lambda: config.write_text(config.read_text() + " "))

    assert passes > 10


@pytest.mark.slow
def test_a_job_that_needs_the_decode_too_tries_a_model_that_was_tried_without(
    try_model: Callable[..., tuple[int, ForwardVerdict]], model_cache: Path
) -> None:
    try_model(sampled=False)
    passes, _ = try_model(sampled=True)
    none, verdict = try_model(sampled=False)

    assert passes > 10 and none == 0
    assert verdict.route.decode == "shared"
    assert len(stored(model_cache)) == 1


@pytest.mark.parametrize("damage", [b"", b"{", b'{"key": 1}', b"\xff\xfe", None])
@pytest.mark.slow
def test_a_damaged_file_is_ignored_and_written_again(
    try_model: Callable[..., tuple[int, ForwardVerdict]], model_cache: Path, damage: bytes | None
) -> None:
    _, first = try_model()
    [file] = stored(model_cache)
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b'"packed"', b'"other"') if damage is None else damage)

    passes, second = try_model()

    assert passes > 10
    assert second.route == first.route
    assert try_model()[0] == 0
    assert stored(model_cache) == [file]


EDITS = {
    "no gaps": lambda check: check["verdict"].update(gaps=[]),
    "beyond what is allowed": lambda check: (
        check["verdict"]["gaps"][0].update(largest=0.5),
        check.update(largest_difference=0.5),
    ),
    "not a number": lambda check: check["verdict"]["gaps"][0].update(largest=float("nan")),
    "below zero": lambda check: check.update(adapted_share=-1),
    "another route at its top": lambda check: check.update(forward="rows"),
    "another difference at its top": lambda check: check.update(largest_difference=0.0),
    "a decode that packed answers do not have": lambda check: (
        check["verdict"]["route"].update(decode="forked"),
        check.update(decode="forked"),
    ),
    "a field too many": lambda check: check["verdict"].update(other=1),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.slow
def test_an_edited_file_is_not_trusted(
    try_model: Callable[..., tuple[int, ForwardVerdict]], model_cache: Path, edit: Callable[..., Any]
) -> None:
    _, first = try_model()
    [file] = stored(model_cache)
    check = json.loads(file.read_bytes())
    edit(check)
    file.write_text(json.dumps(check))

    passes, second = try_model()

    assert passes > 10 and second.route == first.route
    assert try_model()[0] == 0


def test_an_ignored_file_is_logged_once(
    try_model: Callable[..., tuple[int, ForwardVerdict]],
    model_cache: Path,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    try_model()
    [file] = stored(model_cache)
    file.write_text("{}")
    checks, entry = ModelChecks(model_cache), BaseModelEntry(path=folder, dtype="float32", context=128)

    found = [checks.latest(entry) for _ in range(3)]

    assert found == [None] * 3
    assert [file.name in record.message for record in caplog.records] == [True]


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_costs_a_check_only(
    try_model: Callable[..., tuple[int, ForwardVerdict]], model_cache: Path
) -> None:
    model_cache.write_text("a file")

    assert try_model()[0] == try_model()[0] > 10


@pytest.mark.slow
def test_the_newest_result_of_a_model_is_found_by_its_entry(
    try_model: Callable[..., tuple[int, ForwardVerdict]], model_cache: Path, folder: Path
) -> None:
    try_model()
    try_model(targets="attention")
    checks = ModelChecks(model_cache)
    entry = BaseModelEntry(path=folder, dtype="float32", context=128)

    found = checks.latest(entry)

    assert found is not None
    assert (found.forward, found.decode) == ("packed", "shared")
    assert found.adapted_by_kind["attention"].modules == 8
    assert checks.latest(entry.model_copy(update={"context": 64})) is None
    assert checks.latest(BaseModelEntry(hub="some/model", context=128)) is None


def test_a_result_of_other_libraries_is_found_as_such_or_not_at_all(
    try_model: Callable[..., tuple[int, ForwardVerdict]], model_cache: Path, folder: Path
) -> None:
    try_model()
    checks, entry = ModelChecks(model_cache), BaseModelEntry(path=folder, dtype="float32", context=128)
    here = installed_versions()

    assert checks.latest(entry, here) == checks.latest(entry)
    assert checks.latest(entry, here | {"torch": "9.9"}) is None
    assert present(checks.latest(entry)).versions == here and "torch" in here


@pytest.mark.parametrize(
    ("made", "outdated"),
    [
        ({"torch": "9.9+cu130"}, False),  # a build for another device
        ({"torch": "9.8+cpu"}, True),
        ({"peft": "1"}, False),  # not installed beside the API
    ],
)
def test_a_result_is_outdated_by_what_is_installed_here(made: dict[str, str], outdated: bool) -> None:
    assert differ(made, {"torch": "9.9+cpu"}) is outdated


@pytest.mark.slow
def test_layers_that_the_sampler_cannot_adapt_are_not_in_the_stored_coverage(
    try_model: Callable[..., tuple[int, ForwardVerdict]], model_cache: Path, folder: Path
) -> None:
    _, verdict = try_model()
    checks, entry = ModelChecks(model_cache), BaseModelEntry(path=folder, dtype="float32", context=128)
    whole = checks.latest(entry)
    policy = Policy(load_base("tiny", entry, folder, "cpu"), rank=4, alpha=8, seed=0)
    policy.leave_out(
        sorted({name.rpartition(".lora_")[0] for name in policy.adapter() if "down_proj" in name})
    )

    store_coverage(policy, entry, model_cache, "all-linear")

    assert (
        present(checks.latest(entry)).adapted_modules
        == policy.coverage.modules
        < present(whole).adapted_modules
    )
    assert try_model() == (0, verdict)


def test_a_model_that_is_refused_later_leaves_no_verdict(
    try_model: Callable[..., tuple[int, ForwardVerdict]], model_cache: Path
) -> None:
    try_model()
    [path] = stored(model_cache)
    check = ModelCheck.model_validate_json(path.read_bytes())
    checks = ModelChecks(model_cache)

    checks.forget(check.source, check.key)

    assert checks.find(check.source, check.key) is None
    checks.forget(check.source, check.key)  # there is none
