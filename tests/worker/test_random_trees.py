"""Episodes with random branches: what each token reads follows from the nodes alone, in any layout."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from math import nan
from typing import Any

import pytest
from transformers.masking_utils import causal_mask_function

from graders.types import TokenUsage
from tests.worker.test_trees import MakePolicy, answer, branched, chain, shared_context
from worker.clock import Clock
from worker.model import tree
from worker.model.attention import Layout, visible
from worker.model.batch import in_rows, micro_batches, tensors_of
from worker.model.policy import Route
from worker.rollout.distillation_rewards import TeacherRewards
from worker.rollout.served_teacher import Echo, ServedTeacher
from worker.sampling import Answer
from worker.training.partition import deal
from worker.training.teacher import PolicyTeacher
from worker.types import NEW_ROOT, NO_ANSWER, Node, Pack, Prompt, Rollout

PROMPT = (10, 11, 12)
Read = list[tuple[int, tuple[int, ...]]]
"""Each trained token, and the tokens that the model has read before it."""

# A path of one token and one without tokens have no inputs after the prompt.
SMALLEST = (
    [Node(None, (), answer(20)), Node(None, (), answer(21))],
    [Node(None, (), answer(20, 22)), Node(None, (), NO_ANSWER)],
    [Node(None, (30,), NO_ANSWER), Node(0, (), answer(20)), Node(0, (), NO_ANSWER)],
    [Node(None, (), answer(20)), Node(None, (), answer(21)), Node(None, (31,), answer(22))],
    [Node(NEW_ROOT, (30,), answer(20)), Node(NEW_ROOT, (31,), NO_ANSWER)],
)


def before(nodes: Sequence[Node], node: Node) -> tuple[int, ...]:
    """The tokens that the model has read before the call of this node."""
    if node.parent is None:
        return (*PROMPT, *node.context_ids)
    if node.parent == NEW_ROOT:
        return node.context_ids
    parent = nodes[node.parent]
    return (*before(nodes, parent), *parent.answer.output_ids_T, *node.context_ids)


def expected(episode: Rollout) -> Read:
    return [
        (token, (*before(episode.nodes, node), *node.answer.output_ids_T[:place]))
        for node in episode.nodes
        for place, token in enumerate(node.answer.output_ids_T)
        if node.answer.is_sampled_T[place]
    ]


def read(packs: Sequence[Pack]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Each trained token of a micro-batch, and what the position that predicts it sees, by positions."""
    tensors = tensors_of(packs)
    layout = Layout.of_rows(tensors.position_ids, tensors.segment, seen_until=tensors.seen_until)
    seen = visible(layout, causal_mask_function)[:, 0]
    for row, column, target in zip(tensors.row_M, tensors.column_M, tensors.target_M, strict=True):
        keys = seen[row, column].nonzero().flatten()
        found = sorted(
            zip(tensors.position_ids[row, keys].tolist(), tensors.input_ids[row, keys].tolist(), strict=True)
        )
        assert [position for position, _ in found] == list(range(len(found)))
        yield int(target), tuple(token for _, token in found)


def episodes() -> Iterator[Rollout]:
    yield from map(Rollout.of_nodes, SMALLEST)
    for seed in range(60):
        yield random_episode(random.Random(seed))


def random_episode(draw: random.Random) -> Rollout:
    """Of up to seven nodes, with answers and context of no or few tokens. No token is there twice."""
    ids = count(100)

    def some(most: int, least: int = 0) -> tuple[int, ...]:
        return tuple(next(ids) for _ in range(draw.randint(least, most)))

    nodes: list[Node] = [Node(None, (), answer(next(ids)))] if draw.random() < 0.5 else []
    for number in range(len(nodes), draw.randint(len(nodes) + 1, 7)):
        parent = draw.choice([None, NEW_ROOT, *range(number), *range(number)])
        context, sampled = some(2, parent == NEW_ROOT), some(3)
        forced = draw.randint(0, max(len(sampled) - 1, 0)) if draw.random() < 0.3 else 0
        fields = {"forced": forced, "grammar_start": forced}
        nodes.append(Node(parent, context, answer(*sampled, **fields) if sampled else NO_ANSWER))
    return Rollout.of_nodes(nodes)


def pack_of(episode: Rollout) -> Pack:
    return Pack(PROMPT, (tree.sequence_of(episode, episode.logprobs_T, 1.0),))


def test_each_token_reads_its_path_in_one_row_of_all_paths() -> None:
    for episode in episodes():
        assert list(read([pack_of(episode)])) == expected(episode)


def test_each_token_is_read_once_behind_its_path_in_a_row_for_each_path() -> None:
    for episode in episodes():
        rows = in_rows(pack_of(episode))
        alone = [one for row in rows for one in read([row])]

        assert sorted(alone) == sorted(expected(episode))
        assert not any(row.sequences[0].branches for row in rows)
        if rows:
            assert list(read(rows)) == expected(episode)


@pytest.mark.parametrize("budget", [1, 6, 9, 14])
def test_each_token_is_read_once_behind_its_path_in_parts_of_an_episode(budget: int) -> None:
    for episode in (episode for episode in episodes() if episode.sampled_tokens):
        divided = list(micro_batches([pack_of(episode)], budget, couples_calls=False))

        assert sorted(one for packs in divided for one in read(packs)) == sorted(expected(episode))
        # A part of a conversation with another prompt has the prompt too.
        longest = len(PROMPT) + max(
            len(before(episode.nodes, node)) + len(node.answer.output_ids_T) for node in episode.nodes
        )
        assert all(pack.tokens <= max(budget, longest) for packs in divided for pack in packs)


def test_rows_that_a_loss_couples_are_not_divided_again() -> None:
    pack = pack_of(branched())
    [rows] = micro_batches([pack], 1, rows=True)

    assert len(rows) == 3
    assert list(micro_batches(rows, 1, rows=True)) == [rows]


def test_the_cost_of_an_episode_in_rows_is_that_of_its_rows() -> None:
    for episode in episodes():
        pack = pack_of(episode)

        rows = sum(row.tokens for row in in_rows(pack))
        assert tree.row_tokens(pack.sequences[0], len(PROMPT)) == rows


def test_ranks_that_compute_rows_share_what_paths_repeat() -> None:
    """One episode of 31 + 10 x 2 tokens costs as much in rows as six chains of 60."""
    fork = [Node(None, (), answer(*range(20, 50)))]
    fork += [Node(0, (30,), answer(24, 25)) for _ in range(10)]
    long = answer(*range(60))
    plain = [Pack(PROMPT, (tree.sequence_of(long, long.logprobs_T, 1.0),)) for _ in range(5)]

    shares = deal([pack_of(Rollout.of_nodes(fork)), *plain], 2, rows=True)

    costs = [sum(row.tokens for pack in share for row in in_rows(pack)) for share in shares]
    assert sorted(costs) == [5 * 62, 10 * 35]


def test_ranks_count_a_tree_by_its_tokens_and_not_by_all_of_its_paths() -> None:
    fork = [Node(None, (), answer(*range(20, 50)))]
    fork += [Node(0, (30,), answer(24, 25)) for _ in range(10)]
    alone = [answer(*range(count)) for count in (51, 26, 26)]
    plain = [Pack(PROMPT, (tree.sequence_of(one, one.logprobs_T, 1.0),)) for one in alone]

    shares = deal([pack_of(Rollout.of_nodes(fork)), *plain], 2)

    assert [sum(pack.tokens for pack in share) for share in shares] == [53 + 28, 53 + 28]


@dataclass
class PathTeacher(ServedTeacher):
    """As a server whose log-probability of a token depends on all tokens before it."""

    def _read_all(self, sequences: Sequence[tuple[int, ...]], top_k: int = 0) -> list[Echo]:
        return [
            Echo(
                tuple(map(str, ids)),
                (nan, *(logprob(ids[:place], ids[place]) for place in range(1, len(ids)))),
            )
            for ids in sequences
        ]


def logprob(path: tuple[int, ...], token: int) -> float:
    return -random.Random(repr((path, token))).random()


def test_a_teacher_on_a_server_reads_the_path_of_each_token() -> None:
    teacher = PathTeacher("large", None)  # type: ignore[arg-type]  # no server is asked
    for episode in episodes():
        [[found_T]] = teacher.logprobs([(Prompt(1, PROMPT, {}), [episode])], 1.0)

        assert found_T == tuple(
            logprob((*before(episode.nodes, node), *node.answer.output_ids_T[:place]), token)
            for node in episode.nodes
            for place, token in enumerate(node.answer.output_ids_T)
        )


@pytest.mark.parametrize("forward", ["packed", "rows"])
def test_a_teacher_finds_of_an_episode_what_it_finds_of_its_calls(
    make_policy: MakePolicy, forward: Any
) -> None:
    policy = make_policy(moved=True)
    policy.use(Route(forward, "padded"))
    teacher = PolicyTeacher(policy, nullcontext, 4096)
    for episode in (branched(), shared_context(), chain(), *map(Rollout.of_nodes, SMALLEST)):
        calls = [
            (Prompt(1, before(episode.nodes, node), {}), [node.answer])
            for node in episode.nodes
            if node.answer.output_ids_T
        ]

        alone = [value for [values_T] in teacher.logprobs(calls, 1.0) for value in values_T]
        [[found_T]] = teacher.logprobs([(Prompt(1, PROMPT, {}), [episode])], 1.0)

        assert found_T == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize("nodes", [[Node(None, (), NO_ANSWER)], [Node(None, (30,), NO_ANSWER)] * 2])
def test_a_teacher_finds_nothing_of_an_episode_without_tokens(
    make_policy: MakePolicy, nodes: list[Node]
) -> None:
    nothing = Rollout.of_nodes(nodes)
    asked = [(Prompt(1, PROMPT, {}), [nothing, answer(20, 21)]), (Prompt(2, PROMPT, {}), [nothing])]

    for teacher in (
        PolicyTeacher(make_policy(), nullcontext, 4096),
        PathTeacher("large", None),  # type: ignore[arg-type]
    ):
        [[first_T, second_T], [third_T]] = teacher.logprobs(asked, 1.0)

        assert (first_T, len(second_T), third_T) == ((), 2, ())


def test_the_tokens_of_a_teacher_are_those_of_all_rows_that_it_reads() -> None:
    rewards = TeacherRewards(PathTeacher("large", None), temperature=1.0, paid="large")  # type: ignore[arg-type]
    nothing = Rollout.of_nodes([Node(None, (), NO_ANSWER)])
    rollouts = [branched(), answer(20, 21), nothing]

    async def answers() -> AsyncIterator[Answer]:
        for member, rollout in enumerate(rollouts):
            yield Answer(0, member, rollout)

    [group] = asyncio.run(rewards.grade([Prompt(1, PROMPT, {})], answers(), 3, Clock()))

    paths = (3 + 3 + 4) + (3 + 3 + 6 + 3) + (3 + 3)
    assert group.grades_G[0].usage == {"large": TokenUsage(paths, 3)}
    assert group.grades_G[1].usage == {"large": TokenUsage(3 + 2, 1)}
    assert group.grades_G[2].score is None
