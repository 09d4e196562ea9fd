"""The files by which Linux tells of memory, in a folder of the test's own."""

from pathlib import Path

from worker.supervisor.killed import KernelMemory

GIB = 2**30


class FakeKernel:
    """A machine of 16 GiB with a control group of version 2 that is limited to 10, until the test changes a file."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroup = folder / "proc", folder / "cgroup"
        self.group = self.cgroup / "pod/worker"
        for made in (self.proc / "self", self.group):
            made.mkdir(parents=True)
        (self.proc / "self/cgroup").write_text("0::/pod/worker\n")
        (self.proc / "meminfo").write_text(f"MemTotal:       {16 * 2**20} kB\nMemFree: 1 kB\n")
        (self.proc / "vmstat").write_text("nr_free_pages 1\noom_kill 3\n")
        (self.group.parent / "memory.events").write_text("oom 0\noom_kill 0\n")
        self.write(events="low 0\noom 0\noom_kill 0\n", peak=str(int(9.5 * GIB)), max=str(10 * GIB))

    def write(self, **files: str) -> None:
        """Of the group, by the end of their names."""
        for name, text in files.items():
            (self.group / f"memory.{name}").write_text(text)

    def memory(self) -> KernelMemory:
        return KernelMemory(self.proc, self.cgroup)
