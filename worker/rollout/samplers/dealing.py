"""Which engine samples which groups. Pure.

A group goes to one engine as a whole, which computes its prompt once. The load of an engine is the tokens that it may
still have to compute.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby

from worker.rollout.samplers.wire import Request

RequestGroup = tuple[Request, ...]  # with the same prompt


def grouped(requests: Iterable[Request]) -> list[RequestGroup]:
    """The requests by prompt. Those of one prompt follow each other."""
    return [tuple(group) for _, group in groupby(requests, key=lambda request: request.prompt)]


def tokens(requests: Iterable[Request]) -> int:
    """The largest number of tokens that these answers and their prompts have, with a shared prompt counted once."""
    return sum(
        len(group[0].prompt_ids) + sum(request.max_tokens for request in group) for group in grouped(requests)
    )


def deal(tokens_P: Sequence[int], load_E: Sequence[int], engines: int) -> list[int | None]:
    """Choose an engine for each group in order: the least loaded. None: the group waits.

    Args:
        load_E: of the engines that take groups now.
        engines: how many will take groups, with those that are still starting: a group waits for one of them if all
            others have their share.
    """
    loads = list(load_E)
    share = (sum(tokens_P) + sum(loads)) / max(1, engines)
    chosen: list[int | None] = []
    for size in tokens_P:
        least = min(range(len(loads)), key=loads.__getitem__, default=None)
        if least is None or loads[least] >= share:
            chosen.append(None)
            continue
        loads[least] += size
        chosen.append(least)
    return chosen
