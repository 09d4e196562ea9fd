"""The operations of a GPU's update, counted on tensors without data (bench/roofline.py)."""

import pytest

from bench.long import PROMPT, group
from bench.roofline import (
    MODELS,
    PUBLISHED,
    RANK,
    Counted,
    count,
    count_head,
    executed_pairs,
    llama,
    necessary,
    trainer,
)

GIB = 2**30
TINY = llama(vocabulary=1000, hidden=256, intermediate=512, layers=2, heads=4, key_heads=2)
# Two layers of Llama 3 8B: what grows with the answers grows as in all 32.
SHALLOW = llama(vocabulary=128_256, hidden=4096, intermediate=14_336, layers=2, heads=32, key_heads=8)


def counted(config: object, forward: str, length: int, answers: int = 1) -> Counted:
    found = Counted()
    gradient = trainer(config, forward)
    packs = [group(length, answers)] if forward == "packed" else [group(length, answers=1)] * answers
    count(gradient, packs, found)
    return found


@pytest.mark.slow
def test_the_products_are_those_of_the_formula() -> None:
    gradient, found = trainer(TINY, "packed"), Counted()

    count(gradient, [group(769)], found)

    tokens = found.tokens  # with padding
    head, adapters = 256 * 1000, sum(one.numel() for one in gradient.policy.trainable)
    base = sum(one.numel() for one in gradient.policy.model.parameters()) - adapters - 2 * head
    norms = 5 * 256
    # The first layer's input needs no gradient; the head is computed once forward, and its gradient with it.
    first = 2 * (256 * 256 + 2 * 256 * 128) * tokens + 2 * RANK * 3 * 256 * tokens
    expected = 4 * (base - norms) * tokens + 6 * adapters * tokens + 4 * head * 8 * 769 - first
    assert found.flops["products"] == pytest.approx(expected, rel=1e-3)


def test_the_head_writes_its_logits_less_than_four_times() -> None:
    """Among others once as logits, once as probabilities, once for the entropy, and half as much for the gradient."""
    gradient, found = trainer(TINY, "packed"), Counted()
    answers = group(769)

    count_head(gradient, [answers], found)

    logits = 4 * 8 * 769 * 1000
    hidden = (
        256 * (4 + 2) * 8 * 769
    )  # the gradient of the hidden states, and its product with that of the loss
    assert found.written < 3.6 * logits + 2 * hidden


@pytest.mark.slow
def test_half_of_the_blocks_of_one_answer_are_computed_and_fewer_of_many() -> None:
    one, many = group(3841, answers=1), group(481, answers=8)  # 4,096 tokens each

    assert executed_pairs([one]) == 32 * 33 // 2 * 128**2
    assert executed_pairs([many]) < executed_pairs([one]) / 2


@pytest.mark.slow
@pytest.mark.parametrize("forward", ["packed", "rows"])
def test_a_long_answer_costs_little_more_than_necessary(forward: str) -> None:
    gradient, found = trainer(MODELS["8b"], forward), Counted()

    count(gradient, [group(32_768, answers=1)], found)

    assert found.squared == 0
    assert found.largest < 33_024**2 / 2
    assert found.total <= 1.15 * necessary(gradient, PROMPT, [32_768])


@pytest.mark.slow
def test_what_is_kept_of_a_token_does_not_grow_with_the_answer() -> None:
    short, long = (counted(SHALLOW, "packed", length) for length in (1792, 16_128))

    assert long.saved / long.tokens == pytest.approx(short.saved / short.tokens, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_necessary_products_take_45_percent_of_the_least_time_of_an_update(name: str) -> None:
    """8B also keeps at most 10 GiB. Without tensors of the square of the tokens, whatever the model's size."""
    gradient, found = trainer(MODELS[name], "packed"), Counted()

    count(gradient, [group(225)], found)

    assert found.tokens == 2048
    assert necessary(gradient, PROMPT, [225] * 8) / found.seconds >= 0.45 * PUBLISHED.bf16
    assert name != "8b" or found.saved <= 10 * GIB
