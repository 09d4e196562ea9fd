"""An episode of several calls is one Rollout, with the sums of its nodes."""

from dataclasses import replace

import pytest

from worker.model.tree import sequence_of
from worker.types import NEW_ROOT, NO_ANSWER, Node, ParsedAnswer, Rollout

FIRST = Rollout(
    (5, 6, 7, 2), (-0.1, -0.2, -0.3, -0.4), "call", "stop", reasoning="5", reasoning_tokens=1, policy_step=3
)
LAST = Rollout((8, 9, 2), (-0.5, -0.6, -0.7), "42", "stop", grammar_start=1, policy_step=4)


def episode(first: Rollout = FIRST, last: Rollout = LAST, *, is_truncated: bool = False) -> Rollout:
    return Rollout.of_nodes([Node(None, (), first), Node(0, (30, 31), last)], is_truncated=is_truncated)


def test_an_episode_has_the_sampled_tokens_of_its_calls_and_the_text_of_the_last() -> None:
    assert episode().output_ids_T == (5, 6, 7, 2, 8, 9, 2)
    assert episode().logprobs_T == (-0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -0.7)
    assert (episode().text, episode().reasoning, episode().reasoning_tokens) == ("42", "", 1)
    assert episode().output_ids_T[episode().grammar_start :] == (9, 2)


def test_an_episode_of_one_call_says_what_the_call_says() -> None:
    assert replace(Rollout.of_nodes([Node(None, (), FIRST)]), nodes=()) == FIRST


def test_an_episode_is_truncated_by_a_limit_of_its_own_or_of_one_call() -> None:
    assert not episode().is_truncated
    assert episode(is_truncated=True).is_truncated
    assert episode(first=replace(FIRST, finish_reason="length")).is_truncated


def test_an_episode_is_as_old_as_the_oldest_of_its_calls() -> None:
    assert episode().oldest_policy_step == episode().policy_step == 3
    assert episode().policy_steps_T == (3, 3, 3, 3, 4, 4, 4)
    assert episode(last=replace(LAST, policy_step=3)).policy_steps_T == ()
    assert episode(last=replace(LAST, policy_steps_T=(2, 4, 4))).oldest_policy_step == 2
    assert Rollout((5,), (0.0,), "", "stop").oldest_policy_step is None


def test_forced_tokens_of_every_call_were_not_sampled() -> None:
    whole = episode(replace(FIRST, grammar_start=2, forced=1), replace(LAST, forced=1))

    assert whole.is_sampled_T == (True, False, True, True, False, True, True)
    assert whole.sampled_tokens == 5
    assert whole.sampled_logprobs == (-0.1, -0.3, -0.4, -0.6, -0.7)


def test_context_that_two_calls_share_adds_no_sampled_tokens() -> None:
    nodes = [Node(None, (30, 31), NO_ANSWER), Node(0, (), FIRST), Node(0, (), LAST)]

    assert Rollout.of_nodes(nodes).output_ids_T == (*FIRST.output_ids_T, *LAST.output_ids_T)


def test_an_episode_that_ends_with_context_has_the_text_of_its_last_call() -> None:
    read = replace(LAST, parsed=ParsedAnswer("42"), reasoning="8")
    whole = Rollout.of_nodes([Node(None, (), FIRST), Node(0, (30,), read), Node(1, (31,), NO_ANSWER)])

    assert (whole.text, whole.reasoning, whole.parsed) == ("42", "8", ParsedAnswer("42"))
    assert whole.output_ids_T[whole.grammar_start :] == (9, 2)
    assert whole.last_call is read
    assert FIRST.last_call is FIRST


@pytest.mark.parametrize(
    ("nodes", "problem"),
    [
        ([], "at least one node"),
        ([Node(1, (30,), FIRST), Node(None, (), LAST)], "node 0 has the parent 1"),
        ([Node(0, (30,), FIRST)], "node 0 has the parent 0"),
        ([Node(None, (), FIRST), Node(-2, (30,), LAST)], "node 1 has the parent -2"),
        ([Node(NEW_ROOT, (), FIRST)], "node 0 has no context"),
        ([Node(None, (), episode())], "the answer of node 0 is an episode"),
    ],
)
def test_nodes_that_are_no_tree_are_refused(nodes: list[Node], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Rollout.of_nodes(nodes)


@pytest.mark.parametrize("count", [6, 8])
def test_values_of_another_number_of_tokens_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"there are {count} values for 7 tokens"):
        sequence_of(episode(), (0.5,) * count, 1.0)
