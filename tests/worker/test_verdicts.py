"""A model is tried once: what is stored of it, when it holds, and what happens to a damaged file."""

import os

import pytest

from core.model_checks import ModelCheck, ModelChecks
from core.registry import BaseModelEntry
from tests.tiny import make_tiny_model
from worker.model.policy import Policy, Route, load_base
from worker.model.verdicts import probed


@pytest.fixture
def folder(tmp_path):
    return make_tiny_model(tmp_path / "model")


@pytest.fixture
def model_cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def try_model(folder, model_cache):
    """Load the model and try it as a job does. Returns how many forward passes that took, and the verdict."""

    def try_model(*, sampled=True, targets="all-linear", again=False, **fields):
        entry = BaseModelEntry(path=folder, **{"dtype": "float32", "context": 128} | fields)
        base = load_base("tiny", entry, folder, "cpu")
        policy = Policy(base, rank=4, alpha=8, seed=0, targets=targets)
        passes = []
        base.parts.decoder.register_forward_hook(lambda *args: passes.append(1))
        verdict = probed(policy, entry, model_cache, sampled=sampled, targets=targets, again=again)
        assert policy.route == verdict.route
        return len(passes), verdict

    return try_model


def stored(model_cache):
    return sorted((model_cache / "checks").glob("*.json"))


def test_the_next_job_on_the_same_model_does_not_try_it_again(try_model):
    passes, first = try_model()
    none, second = try_model()

    assert passes > 10 and none == 0
    assert first == second
    assert first.route == Route("packed", "shared")
    assert first.checked_at > 0 and first.largest < 1e-4


@pytest.mark.parametrize(
    "change", [{"context": 64}, {"dtype": "bfloat16"}, {"targets": "attention"}, {"again": True}], ids=str
)
def test_what_the_verdict_depends_on_is_tried_again(try_model, change):
    try_model()

    passes, _ = try_model(**change)

    assert passes > 10


def test_other_files_are_another_model(try_model, folder):
    try_model()
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(weights.stat().st_atime_ns, weights.stat().st_mtime_ns + 1))

    passes, _ = try_model()

    assert passes > 10


def test_a_job_that_needs_the_decode_too_tries_a_model_that_was_tried_without(try_model, model_cache):
    try_model(sampled=False)
    passes, _ = try_model(sampled=True)
    none, verdict = try_model(sampled=False)

    assert passes > 10 and none == 0
    assert verdict.route.decode == "shared"
    assert len(stored(model_cache)) == 1


@pytest.mark.parametrize("damage", [b"", b"{", b'{"key": 1}', b"\xff\xfe", None])
def test_a_damaged_file_is_ignored_and_written_again(try_model, model_cache, damage):
    _, first = try_model()
    [file] = stored(model_cache)
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b'"packed"', b'"other"') if damage is None else damage)

    passes, second = try_model()

    assert passes > 10
    assert second.route == first.route
    assert try_model()[0] == 0
    assert stored(model_cache) == [file]


def test_a_cache_that_cannot_be_written_costs_a_check_only(try_model, model_cache):
    model_cache.write_text("a file")

    assert try_model()[0] == try_model()[0] > 10


def test_the_newest_result_of_a_model_is_found_by_its_entry(try_model, model_cache, folder):
    try_model()
    try_model(targets="attention")
    checks = ModelChecks(model_cache)
    entry = BaseModelEntry(path=folder, dtype="float32", context=128)

    found = checks.latest(entry)

    assert (found.forward, found.decode) == ("packed", "shared")
    assert found.adapted_by_kind["attention"]["modules"] == 8
    assert checks.latest(entry.model_copy(update={"context": 64})) is None
    assert checks.latest(BaseModelEntry(hub="some/model", context=128)) is None


def test_a_model_that_is_refused_later_leaves_no_verdict(try_model, model_cache):
    try_model()
    [path] = stored(model_cache)
    check = ModelCheck.model_validate_json(path.read_bytes())
    checks = ModelChecks(model_cache)

    checks.forget(check.source, check.key)

    assert checks.find(check.source, check.key) is None
    checks.forget(check.source, check.key)  # there is none
