"""Whether the kernel killed a run for lack of memory: its counters before the run and after it, and the peak.

Linux, with either version of control groups. Files that do not exist count as "unknown"; on other systems all do.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from core.units import GIB


class Names(NamedTuple):
    """The files of a control group. The first has the counter `oom_kill`; the others are in bytes."""

    events: str
    peak: str
    limit: str
    use: str


VERSION_2 = Names("memory.events", "memory.peak", "memory.max", "memory.current")
VERSION_1 = Names(
    "memory.oom_control", "memory.max_usage_in_bytes", "memory.limit_in_bytes", "memory.usage_in_bytes"
)


@dataclass(frozen=True)
class Kills:
    """How many processes the kernel has killed for lack of memory so far. None: unknown."""

    group: int | None  # of our control group
    machine: int | None


class KernelMemory:
    """Reads the counters of this machine and of the control group that this process and its children are in."""

    def __init__(self, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._groups = list(_groups(proc / "self/cgroup", cgroup))

    def kills(self) -> Kills:
        group = None
        if self._groups:
            folder, names = self._groups[0]
            group = _value(folder / names.events, "oom_kill")
        return Kills(group, _value(self._proc / "vmstat", "oom_kill"))

    def peak_of(self, pid: int) -> int | None:
        """The most memory that a process has had, in bytes. None once it has ended."""
        kilobytes = _value(self._proc / str(pid) / "status", "VmHWM:")
        return None if kilobytes is None else 1024 * kilobytes

    def explain(self, before: Kills, run_peak: int | None) -> str:
        """Explain in one line why a run was killed by SIGKILL. `run_peak` is the peak of its process in bytes."""
        after = self.kills()
        own = None if run_peak is None else _gib(run_peak)
        if _rose(before.group, after.group):
            peak, limit = self._group_peak_and_limit()
            if limit is not None:
                parts = (
                    [f"peak {_gib(peak)} of {_gib(limit)}"] if peak is not None else [f"limit {_gib(limit)}"]
                )
                parts += [f"its own peak {own}"] if own else []
                return f"out of memory: the kernel killed the run; {', '.join(parts)}"
            return f"out of memory: the kernel killed the run{self._of_machine(own)}"
        if _rose(before.machine, after.machine):
            return f"killed (SIGKILL), most likely out of memory{self._of_machine(own)}"
        unknown = after.group is None and after.machine is None
        evidence = "" if unknown else "; the kernel reports no lack of memory"
        return "killed (SIGKILL)" + (f", peak {own}" if own else "") + evidence

    def use(self) -> tuple[int | None, int | None]:
        """Bytes in use and in total, of the nearest control group with a limit, else of the machine. None: unknown."""
        if (limited := self._limited()) is not None:
            folder, names, limit = limited
            return _number(folder / names.use), limit
        total, free = (_value(self._proc / "meminfo", f"Mem{name}:") for name in ("Total", "Available"))
        if total is None or free is None:
            return None, None
        return 1024 * (total - free), 1024 * total

    def _of_machine(self, own: str | None) -> str:
        total = _value(self._proc / "meminfo", "MemTotal:")
        if own is None or total is None:
            return ""
        return f": peak {own} of {_gib(1024 * total)}"

    def _group_peak_and_limit(self) -> tuple[int | None, int | None]:
        """Of the nearest group that has a limit: ours, or one that it is part of."""
        limited = self._limited()
        if limited is None:
            return None, None
        folder, names, limit = limited
        return _number(folder / names.peak), limit

    def _limited(self) -> tuple[Path, Names, int] | None:
        total = _value(self._proc / "meminfo", "MemTotal:")
        for folder, names in self._groups:
            limit = _number(folder / names.limit)
            # Without a limit version 2 says "max", and version 1 a number that no machine has.
            if limit is not None and (total is None or limit < 1024 * total):
                return folder, names, limit
        return None


def _groups(membership: Path, mount: Path) -> Iterator[tuple[Path, Names]]:
    """Our control group and those that it is part of, nearest first, as far as they can be seen from here."""
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = mount, VERSION_2
        elif "memory" in controllers.split(","):
            root, names = mount / "memory", VERSION_1
        else:
            continue
        folder = root / path.lstrip("/")
        # In a container the path may be the host's, while the mount begins at our group.
        folder = folder if (folder / names.events).exists() else root
        while (folder / names.events).exists():
            yield folder, names
            if folder == root:
                break
            folder = folder.parent


def _value(file: Path, name: str) -> int | None:
    """Of a file of lines of a name and a number."""
    for line in _text(file).splitlines():
        if line.split()[:1] == [name]:
            return int(line.split()[1])
    return None


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # no such file, or no process with this number anymore
        return ""


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _rose(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before
