"""Our attention function in a plain forward pass, outside `laid_out`: transformers' own masks, caps and sinks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.families.zoo import FAMILIES, WINDOW
from worker.model import attention

TITLES = ("Gemma 2", "gpt-oss", "Llama 2, 3")
SHORT, LONG = 7, 2 * WINDOW + 5  # below and beyond the window


@pytest.fixture(params=TITLES)
def compared(request: pytest.FixtureRequest) -> Callable[..., Iterator[Any]]:
    """Compute with one model under our attention, then under eager attention; returns both results."""
    model = next(family for family in FAMILIES if family.title == request.param).model()

    def compared(compute: Callable[[Any], Any]) -> Iterator[Any]:
        for implementation in (attention.NAME, "eager"):
            model.set_attn_implementation(implementation)
            yield compute(model)

    return compared


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, 70, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("length", [SHORT, LONG])
@torch.no_grad()
def test_a_plain_pass_is_that_of_eager_attention(compared: Callable[..., Iterator[Any]], length: int) -> None:
    ours, theirs = compared(lambda model: model(tokens(2, length)).logits)

    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_padded_pass_is_that_of_eager_attention(compared: Callable[..., Iterator[Any]]) -> None:
    mask = torch.ones(2, LONG, dtype=torch.int64)
    mask[0, SHORT:] = 0

    ours, theirs = compared(lambda model: model(tokens(2, LONG), attention_mask=mask).logits)

    torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [SHORT, LONG])
def test_transformers_generates_the_same_with_its_own_cache(
    compared: Callable[..., Iterator[Any]], length: int
) -> None:
    options = {
        "max_new_tokens": 12,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }

    ours, theirs = compared(lambda model: model.generate(tokens(1, length), **options))

    assert ours.sequences.tolist() == theirs.sequences.tolist()
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)


def test_a_module_that_looks_both_ways_keeps_doing_so() -> None:
    module = torch.nn.Module()
    setattr(module, "is_causal", False)  # noqa: B010  # torch types every attribute as a tensor or a module
    query, key, value = torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(0)).unbind()

    for extra in ({}, {"softcap": 1e6}):
        output, _ = ALL_ATTENTION_FUNCTIONS[attention.NAME](module, query, key, value, None, **extra)

        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        torch.testing.assert_close(output.transpose(1, 2), expected, rtol=1e-4, atol=1e-4)
