"""Main memory of this machine or container, without torch."""

from pathlib import Path

SHARE_OF_MACHINE = 0.9  # the system and this service need the rest of main memory
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Return the free bytes: the lesser of this machine's and its container's."""
    free = _value(meminfo, "MemAvailable")
    if (most := _limit(cgroup)) is None:
        return free
    # The page cache counts as used, but the kernel reclaims it on demand.
    kept = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    return min(free, most - int((cgroup / "memory.current").read_text()) + int(kept["inactive_file"]))


def capacity(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Return the bytes for a job when no other job or server runs."""
    total, most = _value(meminfo, "MemTotal"), _limit(cgroup)
    return int((total if most is None else min(total, most)) * SHARE_OF_MACHINE)


def _value(meminfo: Path, name: str) -> int:
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def _limit(cgroup: Path) -> int | None:
    """Of the container. None: it has none."""
    limit = cgroup / "memory.max"
    text = limit.read_text().strip() if limit.exists() else "max"
    return None if text == "max" else int(text)
