import sys

import pytest

from tests.memory import LARGE, Memory, resident


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say what a process has")
def test_what_a_file_leaves_behind_is_given_back() -> None:
    memory, before = Memory(), resident()
    cycle: list[object] = [b"x" * (2 * LARGE)]
    cycle.append(cycle)
    del cycle
    assert resident() > before + LARGE

    memory.give_back()

    assert resident() < before + LARGE
