"""Choose the prompts of each step from the seed and the step number alone, so that no cursor has to be stored."""

import random
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from core.jobs.hyperparameter_groups import PromptOrder
from core.storage.datasets import Example
from worker.refusals import ChatTemplateFailed
from worker.types import Prompt


class PromptTooLong(ValueError):
    """Some rows leave no room for an answer in the model's context."""


class NoPassRate(ValueError):
    """A row has no `pass_rate` to order it by."""


def _failure_rate(prompt: Prompt) -> float:
    rate = prompt.item.get("pass_rate")
    if not isinstance(rate, int | float) or isinstance(rate, bool):
        raise NoPassRate(
            f"The order 'easiest_first' needs a number `pass_rate` in every row, and line {prompt.line} has none. "
            "A select stage of a pipeline with the form 'prompts' writes them."
        )
    return -rate


class PromptStream:
    """The training prompts, epoch after epoch, in the same order or shuffled anew in each epoch."""

    def __init__(
        self, prompts: Sequence[Prompt], *, batch_size: int, seed: int, order: PromptOrder = "shuffled"
    ) -> None:
        """Raises NoPassRate if the order is easiest_first and a row has none."""
        self.prompts = sorted(prompts, key=_failure_rate) if order == "easiest_first" else prompts
        self.is_shuffled = order == "shuffled"
        self.batch_size = batch_size
        self.seed = seed
        self._orders: dict[int, array[int]] = {}  # by epoch; see `order`

    def batch(self, step: int) -> list[Prompt]:
        """The prompts of step 1, 2, ...; a batch may straddle the end of an epoch, and have a row twice then."""
        first = (step - 1) * self.batch_size
        seen: Counter[int] = Counter()
        batch: list[Prompt] = []
        for place in range(first, first + self.batch_size):
            prompt = self._at(place)
            batch.append(replace(prompt, repeat=seen[prompt.line]) if seen[prompt.line] else prompt)
            seen[prompt.line] += 1
        return batch

    def others(self, step: int) -> list[Prompt]:
        """Return all prompts outside the batch of this step, in the order of resampling.

        Takes about 30 ms for 50,000 prompts, so do not call it on an event loop.
        """
        lines = {prompt.line for prompt in self.batch(step)}
        order = [prompt for prompt in self.prompts if prompt.line not in lines]
        random.Random(f"{self.seed}/others/{step}").shuffle(order)
        return order

    def _at(self, place: int) -> Prompt:
        epoch, index = divmod(place, len(self.prompts))
        return self.prompts[self.order(epoch)[index]]

    def order(self, epoch: int) -> "array[int]":
        """The permutation of an epoch. At most two are kept, 8 bytes a prompt: a batch may straddle two epochs."""
        order = self._orders.get(epoch)
        if order is None:
            order = array("q", range(len(self.prompts)))
            if self.is_shuffled:
                random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._orders = {one: kept for one, kept in self._orders.items() if one == epoch - 1} | {
                epoch: order
            }
        return order


def tokenize(
    examples: Sequence[Example],
    render: Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], list[int]],
    *,
    file: str,
    context: int,
    max_completion_tokens: int,
    added: int = 0,
) -> list[Prompt]:
    """Convert rows to prompts.

    Args:
        context: of the model, in tokens.
        render: renders messages and tools.
        added: tokens that the server of a teacher adds to each answer.

    Raises:
        PromptTooLong: names the lines (up to 20) whose prompt and longest answer exceed the context.
        ChatTemplateFailed: names the line whose messages the chat template rejects.
    """
    prompts = [Prompt(one.line, _rendered(one, render, file), one.item) for one in examples]
    room = context - max_completion_tokens - added
    long = [f"line {prompt.line}: {len(prompt.ids)} tokens" for prompt in prompts if len(prompt.ids) > room]
    if long:
        raise PromptTooLong(
            f"{len(long)} prompts of {file} are longer than {room} tokens, the model's context of {context} "
            f"less max_completion_tokens {max_completion_tokens}{_and_added(added)}: {'; '.join(long[:20])}"
        )
    return prompts


def _and_added(tokens: int) -> str:
    return f" and {tokens} that the teacher's server adds" if tokens else ""


def _rendered(
    row: Example,
    render: Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], list[int]],
    file: str,
) -> tuple[int, ...]:
    try:
        return tuple(render(row.messages, row.tools))
    except ChatTemplateFailed as cause:
        raise ChatTemplateFailed(f"Line {row.line} of {file}: {cause}") from cause
