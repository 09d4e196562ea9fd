"""A control group for python graders, with the CPU weight of half a thread for all of them together.

It complements the low priority of each process (lockdown.py), which a grader could offset with more threads. A lower
weight would make grades time out. The layer is optional: most containers mount control groups read-only.

On cgroup v2 a group that contains processes cannot distribute resources to subgroups. The graders' group is therefore
created in the root group, or as a sibling of the service's group if systemd has delegated the parent group
(`Delegate=cpu`, `DelegateSubgroup=service`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

NAME = "regraft-graders"
SHARES, WEIGHT = "512", "50"  # cpu.shares of cgroup v1, default 1,024, and cpu.weight of v2, default 100
PROC = Path("/proc/self")


def join(pid: int) -> str:
    """Move a process, and so its future children, into the group. Returns "" or the reason of a failure."""
    folder, why = group()
    if folder is None:
        return why
    try:
        (folder / "cgroup.procs").write_text(str(pid))
    except OSError as cause:
        return cause.strerror or str(cause)
    return ""


_made: dict[Path, Path] = {}


def group(proc: Path = PROC) -> tuple[Path | None, str]:
    """Return the group of this host's graders, creating it if needed; None and the reason on failure.

    A failure is not kept, because the next process may find a control group.
    """
    if proc in _made:
        return _made[proc], ""
    try:
        memberships, mounts = (proc / "cgroup").read_text(), (proc / "mounts").read_text()
    except OSError as cause:
        return None, f"{proc} cannot be read: {cause.strerror}"
    made, why = make(memberships, mounts)
    if made is not None:
        _made[proc] = made
    return made, why


def make(memberships: str, mounts: str) -> tuple[Path | None, str]:
    """Implement `group`. The arguments are the contents of /proc/self/cgroup and /proc/self/mounts."""
    why = "no control group for processor time is mounted"
    for folder, is_v2 in _places(memberships, mounts):
        ours = folder / NAME
        try:
            ours.mkdir(exist_ok=True)
        except OSError as cause:
            why = cause.strerror or str(cause)
            continue
        try:
            if is_v2 and "cpu" not in (folder / "cgroup.subtree_control").read_text().split():
                (folder / "cgroup.subtree_control").write_text("+cpu")
            file, value = ("cpu.weight", WEIGHT) if is_v2 else ("cpu.shares", SHARES)
            (ours / file).write_text(value)
        except OSError as cause:
            why = cause.strerror or str(cause)
            with suppress(OSError):
                ours.rmdir()
            continue
        return ours, ""
    return None, why


def _places(memberships: str, mounts: str) -> Iterator[tuple[Path, bool]]:
    """Yield each group in which the graders' group may be created, and whether it is of cgroup v2."""
    mounted = [line.split()[1:4] for line in mounts.splitlines()]
    groups = [line.split(":", 2) for line in memberships.splitlines()]
    for where, kind, options in mounted:
        for _, controllers, path in groups:
            own = Path(where, path.lstrip("/"))
            if kind == "cgroup" and "cpu" in controllers.split(",") and "cpu" in options.split(","):
                yield own, False
            elif kind == "cgroup2" and not controllers and (own / "cgroup.controllers").exists():
                for folder in (own, own.parent) if _is_delegated(own.parent) else (own,):
                    if "cpu" in (folder / "cgroup.controllers").read_text().split():
                        yield folder, True


def _is_delegated(folder: Path) -> bool:
    """Return whether systemd has delegated this group to the service, according to its extended attributes."""
    for name in ("user.delegate", "trusted.delegate"):
        with suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return True
    return False
