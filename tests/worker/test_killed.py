"""What is said of a run that was killed, by what the kernel's files say."""

import os
import shutil
from pathlib import Path

import pytest

from tests.present import present
from tests.worker.kernel import GIB, FakeKernel
from worker.supervisor.killed import KernelMemory, Kills

PEAK = int(8.8 * GIB)


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return FakeKernel(tmp_path)


def test_a_kill_in_our_group_is_out_of_memory_with_its_peak_and_limit(kernel: FakeKernel) -> None:
    memory = kernel.memory()
    before = memory.kills()
    kernel.write(events="oom 1\noom_kill 2\n")

    assert before == Kills(group=0, machine=3)
    assert memory.explain(before, None) == (
        "out of memory: the kernel killed the run; peak 9.50 GiB of 10.00 GiB"
    )
    assert memory.explain(before, PEAK).endswith("of 10.00 GiB, its own peak 8.80 GiB")


def test_the_limit_may_be_that_of_a_group_above(kernel: FakeKernel) -> None:
    memory = kernel.memory()
    kernel.write(events="oom_kill 1\n", max="max\n", peak=str(GIB))
    (kernel.group.parent / "memory.max").write_text(f"{4 * GIB}\n")
    (kernel.group.parent / "memory.peak").write_text(f"{4 * GIB}\n")

    assert memory.explain(Kills(0, 3), None).endswith("; peak 4.00 GiB of 4.00 GiB")


def test_a_group_without_a_limit_shares_the_machine(kernel: FakeKernel) -> None:
    memory = kernel.memory()
    kernel.write(events="oom_kill 1\n", max="max\n")

    assert memory.explain(Kills(0, 3), PEAK) == (
        "out of memory: the kernel killed the run: peak 8.80 GiB of 16.00 GiB"
    )


def test_a_kernel_that_keeps_no_peak_of_a_group_has_the_limit_and_the_peak_of_the_run(
    kernel: FakeKernel,
) -> None:
    """memory.peak came with Linux 5.19."""
    memory = kernel.memory()
    (kernel.group / "memory.peak").unlink()
    kernel.write(events="oom_kill 1\n")

    assert memory.explain(Kills(0, 3), PEAK) == (
        "out of memory: the kernel killed the run; limit 10.00 GiB, its own peak 8.80 GiB"
    )


def test_a_kill_somewhere_on_the_machine_makes_it_likely(kernel: FakeKernel) -> None:
    memory = kernel.memory()
    (kernel.proc / "vmstat").write_text("oom_kill 4\n")

    assert memory.explain(Kills(0, 3), PEAK) == (
        "killed (SIGKILL), most likely out of memory: peak 8.80 GiB of 16.00 GiB"
    )


def test_without_evidence_nothing_is_claimed(kernel: FakeKernel, tmp_path: Path) -> None:
    assert kernel.memory().explain(Kills(0, 3), PEAK) == (
        "killed (SIGKILL), peak 8.80 GiB; the kernel reports no lack of memory"
    )

    elsewhere = KernelMemory(tmp_path / "no proc", tmp_path / "no cgroup")
    assert elsewhere.kills() == Kills(None, None)
    assert elsewhere.explain(Kills(None, None), None) == "killed (SIGKILL)"


def test_version_1_of_control_groups_is_read_as_well(kernel: FakeKernel) -> None:
    shutil.rmtree(kernel.cgroup)
    group = kernel.cgroup / "memory/docker/1"
    group.mkdir(parents=True)
    for folder in (group, group.parent, group.parent.parent):
        (folder / "memory.oom_control").write_text("under_oom 0\noom_kill 0\n")
        (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (kernel.proc / "self/cgroup").write_text("5:devices:/x\n4:cpu,memory:/docker/1\n0::/\n")
    memory = kernel.memory()
    before = memory.kills()
    (group / "memory.oom_control").write_text("under_oom 0\noom_kill 1\n")

    unlimited = memory.explain(before, PEAK)
    (group / "memory.limit_in_bytes").write_text(str(10 * GIB))
    (group / "memory.max_usage_in_bytes").write_text(str(10 * GIB))

    assert unlimited.endswith("the run: peak 8.80 GiB of 16.00 GiB")
    assert memory.explain(before, None).endswith("; peak 10.00 GiB of 10.00 GiB")


def test_in_a_container_the_group_is_where_the_mount_begins(kernel: FakeKernel) -> None:
    """Its name in /proc is then the host's, or one that leads out of what can be seen."""
    shutil.rmtree(kernel.cgroup)
    kernel.cgroup.mkdir()
    (kernel.cgroup / "memory.events").write_text("oom_kill 7\n")
    (kernel.proc / "self/cgroup").write_text("0::/kubepods/pod1/../worker\n")

    assert kernel.memory().kills().group == 7


def test_the_peak_of_a_process_is_read_while_it_lives(tmp_path: Path) -> None:
    memory = KernelMemory()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)

    assert present(memory.peak_of(os.getpid())) > 2**20
    assert memory.peak_of(child) is None


def test_the_memory_in_use_is_that_of_the_group_with_a_limit(kernel: FakeKernel) -> None:
    (kernel.group / "memory.current").write_text(f"{3 * GIB}\n")

    assert kernel.memory().use() == (3 * GIB, 10 * GIB)


def test_without_a_limit_the_memory_in_use_is_that_of_the_machine(kernel: FakeKernel, tmp_path: Path) -> None:
    kernel.write(max="max\n")
    kibibytes = 16 * GIB // 1024
    (kernel.proc / "meminfo").write_text(f"MemTotal: {kibibytes} kB\nMemAvailable: {kibibytes // 4} kB\n")

    assert kernel.memory().use() == (12 * GIB, 16 * GIB)
    assert KernelMemory(tmp_path / "no proc", tmp_path / "no cgroup").use() == (None, None)
