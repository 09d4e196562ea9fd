"""The packages of python graders: those of an environment of their own, and none of the service's."""

import ast
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from graders.build import build, environments_of
from graders.environments import build as building
from graders.environments import catalog
from graders.environments.build import BuildFailed
from graders.environments.catalog import (
    DEFAULT,
    EnvironmentNotBuilt,
    UnknownEnvironment,
    default_folder,
    find,
)
from graders.report import run_report
from graders.sandbox import scratch
from graders.sandbox.pool import GradeOutcome, Pool, SandboxLimits
from graders.sandbox.source import named_modules
from graders.spec import InvalidGrader, parse_grader
from graders.types import Sample
from tests.graders.packages import SOURCE, USES
from tests.present import present, untyped

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's"),
]

PYTHON = {"type": "python", "name": "py", "source": "def grade(sample, item):\n    return 1"}
# OpenAI's versions (reference of its graders guide). scikit-bio 0.6.3 has no wheels.
VERSIONS = {
    "numpy": "2.2.4",
    "scipy": "1.15.2",
    "sympy": "1.13.3",
    "pandas": "2.2.3",
    "rapidfuzz": "3.10.1",
    "scikit-learn": "1.6.1",
    "rouge-score": "0.1.2",
    "deepdiff": "8.4.2",
    "jsonschema": "4.23.0",
    "pydantic": "2.10.6",
    "pyyaml": "6.0.2",
    "nltk": "3.9.1",
    "sqlparse": "0.5.3",
    "rdkit": "2024.9.6",
    "scikit-bio": "0.7.0",
    "ast-grep-py": "0.36.2",
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with_one = Pool(size=1)
    yield with_one
    with_one.close()


def graded(pool: Pool, body: str, **item: object) -> GradeOutcome:
    """What a grader with this body came to."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return pool.submit(f"def grade(sample, item):\n{lines}", {}, item).result()


# What can be imported, and what not


@pytest.mark.parametrize("name", USES)
def test_every_package_of_openais_image_works_in_the_sandbox(pool: Pool, name: str) -> None:
    outcome = pool.submit(SOURCE, {}, {"package": name}).result()

    assert (outcome.score, outcome.reason) == (1.0, "")


def test_the_pins_are_openais_versions_and_name_everything_that_is_installed() -> None:
    lines = [line for line in catalog.pins(DEFAULT).read_text().splitlines() if not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    installed = {
        re.sub(r"[-_.]+", "-", folder.name.partition("-")[0]).lower()
        for folder in Path(present(find(default_folder()).packages)).glob("*.dist-info")
    }

    assert pinned | VERSIONS == pinned
    assert installed == set(pinned)


@pytest.mark.parametrize(
    "name", ["fastapi", "sqlalchemy", "httpx2", "graders", "graders.types", "core", "worker"]
)
def test_nothing_of_the_service_can_be_imported(pool: Pool, name: str) -> None:
    assert find_spec(name) is not None
    # Where the service's packages and its own source lie.
    folders = [sysconfig.get_paths()["purelib"], str(Path(__file__).parents[2])]
    body = f"import sys, importlib\nsys.path += item['folders']\nimportlib.import_module({name!r})\nreturn 1"

    outcome = graded(pool, body, folders=folders)

    assert outcome.kind == "user_error"
    assert f"No module named '{name.partition('.')[0]}" in outcome.reason


def test_nothing_of_the_service_can_be_read(pool: Pool) -> None:
    import fastapi

    outcome = graded(pool, "return len(open(item['file']).read())", file=fastapi.__file__)

    assert "No such file" in outcome.reason or "Permission denied" in outcome.reason


def test_packages_in_the_pythons_own_library_are_no_part_of_it(tmp_path: Path) -> None:
    """As in an image that has the service installed into its Python."""
    library = tmp_path / "lib/python3.11"
    (library / "site-packages/service").mkdir(parents=True)
    (library / "json").mkdir()
    (library / "os.py").touch()

    from graders.sandbox.pool import entries_without

    assert sorted(entries_without(str(library), ("site-packages",))) == [
        str(library / "json"),
        str(library / "os.py"),
    ]


@pytest.mark.parametrize(
    ("line", "modules"),
    [
        ("import numpy as np, os", ["numpy"]),
        ("from sklearn.metrics import f1_score", ["sklearn.metrics", "sklearn.metrics.f1_score"]),
        ("def f():\n    import pandas", ["pandas"]),
        ("from nltk import *", ["nltk"]),
        ("from . import numpy", []),
        ("import secrets, idlelib", []),
    ],
)
def test_packages_that_a_source_names_are_loaded_before_its_grades(line: str, modules: list[str]) -> None:
    assert named_modules(ast.parse(line)) == modules


# The scratch folder


def test_temporary_files_and_folders_work_and_are_gone_for_the_next_grade(pool: Pool) -> None:
    body = (
        "import os, tempfile\nhome = os.environ['HOME']\nleft = os.listdir(home)\n"
        "with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile() as file:\n"
        "    open(os.path.join(folder, 'x'), 'w').write('x')\n    file.write(b'x' * 1000)\n"
        "    file.flush()\n    assert os.path.getsize(file.name) == 1000 and file.name.startswith(home)\n"
        "os.makedirs(os.path.join(home, 'a/b/c'))\nos.mkdir('shut', 0)\n"
        "open(os.path.join(home, 'left'), 'w').write('x')\nreturn len(left)"
    )

    assert [graded(pool, body).score for _ in range(3)] == [0, 0, 0]


def test_a_full_scratch_folder_is_an_error_that_names_its_size(pool: Pool) -> None:
    outcome = graded(pool, "with open('x', 'wb') as file:\n    while True: file.write(bytes(1 << 20))")

    assert outcome.kind in ("user_error", "scratch_limit")
    assert "256 MiB" in outcome.reason


def test_a_folder_of_the_hosts_is_counted_in_bytes_and_in_entries(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/file").write_bytes(bytes(100_000))

    assert not scratch.is_over(str(tmp_path), 200_000)
    assert scratch.is_over(str(tmp_path), 50_000)
    for number in range(scratch.MAX_ENTRIES):
        (tmp_path / str(number)).touch()
    assert scratch.is_over(str(tmp_path), 200_000)


def test_a_folder_is_emptied_however_deep_it_is(tmp_path: Path) -> None:
    inside, folder = tmp_path, os.open(tmp_path, os.O_RDONLY)
    (inside / ".moved-1-0").mkdir()
    for _ in range(1000):  # longer than any path may be
        os.mkdir("deep", dir_fd=folder)
        deeper = os.open("deep", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = deeper
    os.close(folder)

    scratch.empty(str(tmp_path))

    assert list(tmp_path.iterdir()) == []


def test_each_pool_removes_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pool = Pool(SandboxLimits(), size=1)
    pool.submit(PYTHON["source"], {}, {}).result()
    [folder] = tmp_path.iterdir()
    # With a private root, scratch is in memory.
    assert len(list(folder.iterdir())) == (0 if not pool.layers()["namespaces"] else 1)

    pool.close()

    assert list(tmp_path.iterdir()) == []


# Finding and building


def test_a_grader_without_an_image_tag_has_the_default_environment() -> None:
    grader = untyped(build(parse_grader(PYTHON)))

    assert grader.environment == untyped(build(parse_grader({**PYTHON, "image_tag": DEFAULT}))).environment
    assert grader.environment.tag == DEFAULT


def test_the_environment_is_named_in_the_answer() -> None:
    multi = {"type": "multi", "graders": {"a": PYTHON}, "calculate_output": "a"}
    text = {"type": "string_check", "input": "a", "reference": "a", "operation": "eq"}

    for raw, named in ((PYTHON, DEFAULT), (multi, DEFAULT), (text, None)):
        spec = parse_grader(raw)
        grade = asyncio.run(build(spec).grade(Sample(""), {}))
        assert run_report(spec, grade)["metadata"]["environment"] == named
        assert environments_of(spec) == ([named] if named else [])


def test_an_unknown_image_tag_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidGrader, match=f"no environment '2099'; there is '{DEFAULT}'") as caught:
        parse_grader({**PYTHON, "image_tag": "2099"})

    assert (caught.value.param, caught.value.code) == ("grader.image_tag", "invalid_value")
    with pytest.raises(UnknownEnvironment):
        find(default_folder(), "2099")


def test_an_environment_that_is_not_built_is_refused_with_the_command_that_builds_it(tmp_path: Path) -> None:
    command = f"`regraft-server environments build {DEFAULT}`"
    multi = {"type": "multi", "graders": {"a": PYTHON}, "calculate_output": "a"}

    with pytest.raises(EnvironmentNotBuilt, match=f"is not built on this server.*{command}"):
        build(parse_grader(multi), environments=tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pins": "0" * 64}, "for another version of it"),
        ({"format": 0}, "for another version of it"),
        ({"python": "/nowhere/python3"}, "a Python that is no longer there"),
        ({"standard": None}, "is not built"),
    ],
)
def test_an_environment_that_cannot_be_trusted_is_as_good_as_none(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    marker = json.loads((default_folder() / DEFAULT / catalog.MARKER).read_text())
    (tmp_path / DEFAULT).mkdir()
    (tmp_path / DEFAULT / catalog.MARKER).write_text(json.dumps(marker | change))

    with pytest.raises(EnvironmentNotBuilt, match=says):
        find(tmp_path)


class Installer:
    """Stands in for uv and pip: makes the target, with the folders that a package of NLTK data would bring."""

    def __init__(self, fails_at: int = 0) -> None:
        self.targets: list[Path] = []
        self.fails_at = fails_at

    def __call__(self, target: Path, what: list[str]) -> None:
        self.targets.append(target)
        if len(self.targets) == self.fails_at:
            raise BuildFailed("no room")
        data = target / catalog.corpora_source(DEFAULT)[1] / "corpora"
        data.mkdir(parents=True)
        (data / "stopwords").mkdir()
        (data / "stopwords.zip").touch()


@pytest.fixture
def installer() -> Installer:
    return Installer()


def test_a_build_is_found_and_not_done_twice(tmp_path: Path, installer: Installer) -> None:
    environment, built = building.build(tmp_path, install=installer)
    again, built_again = building.build(tmp_path, install=installer)

    assert (built, built_again) == (True, False)
    assert environment == again == find(tmp_path)
    assert environment.corpora is not None
    assert [path.name for path in Path(environment.corpora, "corpora").iterdir()] == ["stopwords"]
    assert len(installer.targets) == 2  # the packages and the data


def test_an_interrupted_build_is_no_environment_and_the_next_one_ends_it(
    tmp_path: Path, installer: Installer
) -> None:
    installer.fails_at = 2
    with pytest.raises(BuildFailed):
        building.build(tmp_path, install=installer)
    with pytest.raises(EnvironmentNotBuilt):
        find(tmp_path)

    assert building.build(tmp_path, install=installer)[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", DEFAULT]


def test_a_failed_build_leaves_the_environment_that_there_was(tmp_path: Path, installer: Installer) -> None:
    environment, _ = building.build(tmp_path, install=installer)
    installer.fails_at = 3

    with pytest.raises(BuildFailed):
        building.build(tmp_path, corpora=tmp_path, install=installer)

    assert find(tmp_path) == environment


def test_data_for_nltk_can_be_added(tmp_path: Path, installer: Installer) -> None:
    names = tmp_path / "mine/corpora/names"
    names.mkdir(parents=True)
    (names / "female.txt").write_text("Ada\n")

    environment, built = building.build(tmp_path / "built", corpora=tmp_path / "mine", install=installer)

    assert built
    assert environment.corpora is not None
    assert sorted(path.name for path in Path(environment.corpora, "corpora").iterdir()) == [
        "names",
        "stopwords",
    ]


def test_a_corpus_that_was_added_is_found_and_one_that_is_missing_is_named(
    pool: Pool, tmp_path: Path
) -> None:
    real = find(default_folder())
    added = replace(real, folder=tmp_path)
    assert added.corpora is not None
    names = Path(added.corpora, "corpora/names")
    names.mkdir(parents=True)
    (names / "female.txt").write_text("Ada\n")
    assert real.packages is not None
    shutil.copytree(real.packages, present(added.packages), copy_function=os.link)
    source = "from nltk.corpus import {0}\ndef grade(sample, item):\n    return len({0}.{1})"

    found = pool.submit(source.format("names", "words('female.txt')"), {}, {}, added).result()
    missing = pool.submit(source.format("wordnet", "synsets('dog')"), {}, {}).result()

    assert found.score == 1
    assert re.search(r"Resource.*wordnet.* not found", missing.reason)


def test_the_command_names_what_it_does_not_know() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "regraft-server", "environments", "build", "2099"],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 2
    assert f"there is no environment '2099'; there is '{DEFAULT}'" in done.stderr


def test_the_command_says_that_there_is_nothing_to_do() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "regraft-server", "environments", "build"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == f"{default_folder() / DEFAULT}: up to date\n"
