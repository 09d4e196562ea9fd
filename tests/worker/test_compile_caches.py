"""One folder for all that libraries compile."""

from pathlib import Path

import pytest

from worker.compile_caches import CACHES, place
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
