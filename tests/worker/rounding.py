"""Equality of metrics that were computed in another order: as near as float32 lets them be on any CPU."""

import math
from collections.abc import Collection

import pytest
import torch
from torch import Tensor

from tests.tiny import WORDS

NATS = math.log(len(WORDS))
"""The magnitude of a token's log-probability under the tiny model, which hardly prefers a word."""

# A log-probability of the tests' models ends a chain of about this many float32 operations, each of which rounds to
# 2**-24 of its result. Which way depends on the kernel, and so on the CPU.
OPERATIONS = 64
ROUNDING = OPERATIONS * 2**-24


def assert_same(metrics: object, expected: object, *, terms: float, but: Collection[str] = ()) -> None:
    """Compare all fields: floats up to rounding, everything else exactly.

    Args:
        terms: the magnitude of what a metric adds up. Its terms may cancel, but their rounding does not: a difference
            of 1e-3 between sums of 8 nats is known to 1 %.
        but: names of fields that may differ.
    """
    for name, value in vars(expected).items():
        if name not in but:
            near = pytest.approx(value, rel=1e-4, abs=ROUNDING * terms) if isinstance(value, float) else value
            assert getattr(metrics, name) == near, name


def assert_same_gradient(found: Tensor | None, expected: Tensor | None) -> None:
    """Compare the gradients of one weight: terms of the size of the largest component are added up for each of them."""
    assert found is not None and expected is not None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
