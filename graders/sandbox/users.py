"""Users for graders: each process of the sandbox gets a separate user id if the service runs as root."""

from __future__ import annotations

import secrets
from pathlib import Path

from graders.sandbox.lockdown import NOBODY

# Ids that no system assigns; and for a container with 16-bit user ids, those that systemd assigns to services.
_UNUSED = (range(0x70000000, 0x7FFF0000), range(61184, 65520))
_COUNT = 4096


def available(maps: tuple[Path, ...] = (Path("/proc/self/uid_map"), Path("/proc/self/gid_map"))) -> range:
    """Return ids of users and groups that this process may use and that are most likely unused on this machine.

    If the user namespace maps none of them, returns only the id of the user `nobody`, whose thread limit all graders
    then share.
    """
    for unused in _UNUSED:
        if all(_is_mapped(unused, path) for path in maps):
            first = unused.start + secrets.randbelow(len(unused) // _COUNT) * _COUNT
            return range(first, first + _COUNT)
    return range(NOBODY, NOBODY + 1)


def _is_mapped(ids: range, path: Path) -> bool:
    try:
        rows = [list(map(int, line.split())) for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return False
    return any(first <= ids.start and ids.stop <= first + count for first, _, count in rows)
