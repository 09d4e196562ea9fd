"""One folder for all that libraries compile."""

import os
import threading
from pathlib import Path

import pytest

from core.units import GIB
from worker.compile_caches import CACHES, place, prune, prune_in_background
from worker.engine.options import EngineConfig, environment
from worker.model.engine_sizes import EngineSizes


def test_every_library_compiles_into_its_part_of_one_folder(tmp_path: Path) -> None:
    environ: dict[str, str] = {}

    place(tmp_path, environ)

    assert {Path(value).parent for value in environ.values()} == {tmp_path}
    assert len(set(environ.values())) == len(CACHES)
    assert environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")


def test_a_library_whose_folder_is_chosen_keeps_it(tmp_path: Path) -> None:
    environ = {"VLLM_CACHE_ROOT": "/elsewhere"}

    place(tmp_path, environ)

    assert environ["VLLM_CACHE_ROOT"] == "/elsewhere"


def test_without_a_folder_the_libraries_have_their_own() -> None:
    environ: dict[str, str] = {}

    place(None, environ)

    assert environ == {}


def test_an_engine_compiles_into_the_folder_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, folder in CACHES.items():
        monkeypatch.setenv(name, str(tmp_path / folder))

    told = environment(EngineConfig("folder", "float32", "cuda", EngineSizes(128), 8, 1 << 20, 0))

    assert {name: told[name] for name in CACHES} == {
        name: str(tmp_path / folder) for name, folder in CACHES.items()
    }


NOW = 10_000_000.0
DAY = 24 * 3600.0


def compiled(folder: Path, name: str, days_ago: float, *, kib: int = 4) -> Path:
    """A file that a library wrote, and that was last used then."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"x" * (kib << 10))
    used = NOW - days_ago * DAY
    for path in (file, *(one for one in file.parents if one.is_relative_to(folder))):
        os.utime(path, (used, used))
    return file


@pytest.mark.parametrize(
    "name",
    [
        "triton/KEY/kernel.cubin",
        "inductor/fxgraph/ab/key/entry",
        "inductor/ab/code.py",
        "vllm/torch_compile_cache/hash/rank_0_0/backbone/artifact",
        "vllm/torch_compile_cache/torch_aot_compile/hash/rank_0_0/model",
    ],
)
def test_kernels_that_nobody_used_for_a_month_are_deleted(tmp_path: Path, name: str) -> None:
    old = compiled(tmp_path, name.replace("KEY", "old").replace("hash", "old").replace("ab", "ol"), 31)
    new = compiled(tmp_path, name, 29)

    prune(tmp_path, now=NOW)

    assert (old.exists(), new.exists()) == (False, True)
    assert not list(tmp_path.rglob(".gone-*"))


def test_the_least_recently_used_are_deleted_beyond_the_limit(tmp_path: Path) -> None:
    kernels = [compiled(tmp_path, f"triton/{days}/kernel", days, kib=64) for days in (3, 2, 1)]

    prune(tmp_path, max_bytes=150 << 10, now=NOW)

    assert [kernel.exists() for kernel in kernels] == [False, True, True]


def test_what_was_just_used_is_spared_whatever_the_limit(tmp_path: Path) -> None:
    kernel = compiled(tmp_path, "triton/key/kernel", 0.01)

    prune(tmp_path, max_bytes=0, now=NOW)

    assert kernel.exists()


@pytest.mark.parametrize("name", ["triton/.gone-1/kernel", "triton/.gone-1", "inductor/ab/.gone-1/code.py"])
def test_what_a_killed_process_was_deleting_is_deleted(tmp_path: Path, name: str) -> None:
    left, kernel = compiled(tmp_path, name, 0.5), compiled(tmp_path, "triton/key/kernel", 0.5)

    prune(tmp_path, now=NOW)

    assert (left.exists(), kernel.exists()) == (False, True)


def test_a_process_that_starts_does_not_wait_for_a_slow_volume(tmp_path: Path) -> None:
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()
    calls: list[Path | None] = []

    def slow(folder: Path | None) -> None:
        calls.append(folder)
        began.set()
        may_end.wait(60)
        ended.set()

    prune_in_background(tmp_path, slow)
    assert began.wait(60)
    prune_in_background(tmp_path, slow)
    is_alone = len(calls) == 1 and not ended.is_set()
    may_end.set()

    assert is_alone and ended.wait(60)
    assert calls == [tmp_path]


def test_what_is_no_compiled_kernel_stays(tmp_path: Path) -> None:
    """vLLM writes down what it finds out about models, and the driver limits its own cache."""
    others = [
        compiled(tmp_path, name, 400)
        for name in ("vllm/modelinfos/a.json", "cuda/a/b", "flashinfer/0.7/op.so")
    ]

    prune(tmp_path, now=NOW, max_bytes=GIB)

    assert all(other.exists() for other in others)


def test_nothing_is_deleted_without_a_folder_of_ours(tmp_path: Path) -> None:
    prune(None)
    prune(tmp_path / "absent")

    assert not (tmp_path / "absent").exists()
