"""Users for graders: each process of the sandbox gets one that nobody else has, if the service is root."""

from __future__ import annotations

import secrets
from pathlib import Path

from graders.sandbox.lockdown import NOBODY

# Without a name on any system; and for a container that has 16 bits of users, those that systemd hands out to services.
_UNUSED = (range(0x70000000, 0x7FFF0000), range(61184, 65520))
_COUNT = 4096


def available(maps: tuple[Path, ...] = (Path("/proc/self/uid_map"), Path("/proc/self/gid_map"))) -> range:
    """Ids of users and groups that this process may use, elsewhere on this machine most likely used by nobody.

    Where the user namespace has none of them it is nobody alone, and all graders share its limit of threads.
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
