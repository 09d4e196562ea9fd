"""The sizes of a bench: full ones for figures, and with `--tiny` the least that runs all of its code.

Figures of a tiny run say nothing: tests/test_bench.py runs the benches so.
"""

import sys
from typing import TypeVar

T = TypeVar("T")
TINY = "--tiny" in sys.argv
if TINY:  # the parsers of the benches need not know it
    sys.argv.remove("--tiny")
FORWARDED = ["--tiny"] * TINY  # to the processes that a bench starts of itself


def sized(full: T, tiny: T) -> T:
    """`full`, or `tiny` after `--tiny`."""
    return tiny if TINY else full
