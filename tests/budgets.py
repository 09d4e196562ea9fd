"""What runs only where REGRAFT_THOROUGH is set, as every night (.github/workflows/nightly.yml)."""

import os
from collections.abc import Iterable

import pytest

THOROUGH = os.environ.get("REGRAFT_THOROUGH") == "1"


def examples(few: int, many: int) -> int:
    """How many examples a property test draws."""
    return many if THOROUGH else few


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests that do not run here."""
    return [] if THOROUGH else [item for item in items if item.get_closest_marker("thorough")]
