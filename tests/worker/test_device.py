"""A GPU that is there and cannot be used is an error by name, and never a silent run on the CPU."""

import ast
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from core.settings import DeviceChoice, Settings
from worker.cli import configuration
from worker.cli.parser import UsageError
from worker.device import (
    CudaState,
    GpuUnusable,
    cuda_state,
    driver_version,
    is_too_old,
    needed_driver,
    problem_elsewhere,
    select_device,
)

ROOT = Path(__file__).parents[2]
WORKS = CudaState(True, "2.13.0", "13.0")
BROKEN = CudaState(False, "2.13.0", "13.0", "CUDA unknown error")
OF_CPUS = CudaState(False, "2.13.0+cpu", None)


def selected(
    state: CudaState,
    *,
    device: DeviceChoice = "auto",
    sign: str | None = "/dev/nvidiactl",
    driver: str | None = "580.95.05",
    environ: Mapping[str, str] | None = None,
) -> str:
    return select_device(Settings(device=device), lambda: state, lambda: sign, lambda: driver, environ or {})


@pytest.mark.parametrize(
    ("state", "driver", "environ", "said"),
    [
        (BROKEN, "570.10", {}, "needs driver 580 or later, and the driver is 570.10; update it"),
        (BROKEN, None, {}, "no driver is visible here; install it, and in a container use NVIDIA's"),
        (BROKEN, "580.95.05", {}, "the driver is 580.95.05, which fits; CUDA unknown error"),
        (OF_CPUS, "580.95.05", {}, "torch 2.13.0+cpu is a build for CPUs; install constraints/gpu.txt"),
        (WORKS, "580.95.05", {}, None),
        (BROKEN, "580.95.05", {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES hides all GPUs; unset it"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused_with_the_reason(
    state: CudaState, driver: str | None, environ: dict[str, str], said: str | None
) -> None:
    if said is None:
        assert selected(state, driver=driver, environ=environ) == "cuda"
        return
    with pytest.raises(GpuUnusable) as refused:
        selected(state, driver=driver, environ=environ)

    assert said in str(refused.value)
    assert "/dev/nvidiactl" in str(refused.value)
    assert "REGRAFT_DEVICE=cpu" in str(refused.value)
    assert "docs/howto/doctor.md" in str(refused.value)


def test_a_machine_without_a_gpu_computes_on_its_cpu() -> None:
    assert selected(OF_CPUS, sign=None) == "cpu"


def test_who_insists_on_the_cpu_or_on_a_gpu_is_heard() -> None:
    assert selected(WORKS, device="cpu") == selected(BROKEN, device="cpu") == "cpu"
    with pytest.raises(GpuUnusable, match="REGRAFT_DEVICE is cuda"):
        selected(OF_CPUS, device="cuda", sign=None)


def test_the_driver_is_read_from_the_files_of_both_kernel_modules(tmp_path: Path) -> None:
    file = tmp_path / "version"
    for line, version in [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.12  Wed Sep 20 09:35:17 UTC", "535.104.12"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95  Release Build  (dvs@build)",
            "580.95",
        ),
    ]:
        file.write_text(f"{line}\nGCC version:  gcc version 12.2.0\n")
        assert driver_version(file) == version
    assert driver_version(tmp_path / "none") is None


def test_the_needed_driver_of_the_pinned_torch_is_known() -> None:
    """constraints/gpu.txt has the runtime of CUDA 13.0."""
    pins = (ROOT / "constraints/gpu.txt").read_text()
    [runtime] = [
        line.split("==")[1] for line in pins.splitlines() if line.startswith("nvidia-cuda-runtime==")
    ]

    assert needed_driver(runtime) == 580
    assert needed_driver("99.0") is None


@pytest.mark.parametrize(
    ("driver", "runtime", "too_old"),
    [
        ("570.86.10", "13.0", True),
        ("580.95.05", "13.0", False),
        ("450.1", "99.0", False),
        ("450.1", None, False),
    ],
)
def test_a_driver_is_too_old_for_a_cuda_version_that_needs_a_later_one(
    driver: str, runtime: str | None, too_old: bool
) -> None:
    assert is_too_old(driver, runtime) == too_old


def test_a_worker_whose_gpu_cannot_be_used_does_not_start() -> None:
    with pytest.raises(UsageError, match="the driver is 570"):
        configuration.check_device(Settings(device="cuda"), lambda: "the driver is 570")
    configuration.check_device(Settings(device="cuda"), lambda: None)
    configuration.check_device(Settings(device="cpu"), lambda: "not asked")


@pytest.mark.slow
def test_another_process_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    if cuda_state().is_available:
        pytest.skip("this machine has a GPU")
    monkeypatch.setenv("REGRAFT_DEVICE", "cuda")
    assert (problem_elsewhere() or "").startswith("REGRAFT_DEVICE is cuda, and there is no GPU")

    monkeypatch.setenv("REGRAFT_DEVICE", "cpu")
    assert problem_elsewhere() is None
    assert problem_elsewhere((sys.executable, "-c", "raise SystemExit('broken')")) == "broken"


def test_a_driver_that_hangs_ends_the_start() -> None:
    problem = problem_elsewhere((sys.executable, "-c", "import signal; signal.pause()"), seconds=0.2)

    assert "the driver may hang" in (problem or "")


def test_no_other_code_chooses_a_device() -> None:
    """Others may ask whether CUDA is there, for pinned memory or a backend, but not take "cpu" without it."""
    found = {
        f"{file.relative_to(ROOT)}"
        for file in (ROOT / "worker").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.IfExp)
        and "is_available" in ast.unparse(node.test)
        and ast.unparse(node.orelse) == "'cpu'"
    }

    assert found == set()
