"""Process supervision: from the steps that a grader names to the advantages of tokens."""

from collections.abc import Sequence
from typing import Any

import pytest

from core.jobs.hyperparameters import Hyperparameters, Resolved, resolve
from graders.types import ErrorKind, Grade, StepScore
from tests.hyperparameters import in_groups
from tests.worker.test_training import packs_of
from worker.training import grpo
from worker.training.contributions import signal
from worker.training.steps import ends_in_text, token_ends, with_steps_only
from worker.types import Group, Prompt, Rollout

# Pieces of text as tokens; the last one is a stop token that no text shows.
PIECES = [b"one", b" st", b"ep\n", b"caf", b"\xc3", b"\xa9", b"\ntwo", b" \xe2\x82", b"\xac", b""]
TEXT = "one step\ncafé\ntwo €"


def decode(ids_T: range | tuple[int, ...] | Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in ids_T).decode("utf-8", "replace")


def ends(*wanted: int) -> list[int]:
    return token_ends(range(len(PIECES)), TEXT, wanted, decode)


def test_steps_of_an_answer_with_calls_are_places_in_its_content() -> None:
    text = "  one. two.<call>"

    assert ends_in_text([4, 9], "one. two.", text) == [6, len(text)]
    assert ends_in_text([4, 17], text, text) == [4, len(text)]


def test_the_pieces_make_the_text() -> None:
    assert decode(range(len(PIECES))) == TEXT


def test_a_step_ends_with_the_token_that_completes_it() -> None:
    assert ends(TEXT.index("caf")) == [3]
    assert ends(TEXT.index("step") + 2) == [2]


def test_a_step_that_ends_within_a_token_takes_all_of_it() -> None:
    assert ends(TEXT.index("step") + 3) == [3]


def test_half_a_character_is_not_a_character() -> None:
    assert ends(TEXT.index("é")) == [4]
    assert ends(TEXT.index("é") + 1) == [6]


def test_the_last_step_takes_the_stop_token_with_it() -> None:
    assert ends(len(TEXT)) == [len(PIECES)]
    assert ends(len(TEXT) - 1) == [8]


def test_steps_may_end_within_one_token() -> None:
    assert ends(1, 2, 3, 9) == [1, 1, 1, 3]


def test_every_end_is_the_first_token_that_spells_the_step_out() -> None:
    for end in range(1, len(TEXT)):
        spelt = [n for n in range(1, len(PIECES)) if decode(range(n)).startswith(TEXT[:end])]
        assert ends(end) == [spelt[0]]


def test_an_empty_answer_has_one_step_and_its_stop_token() -> None:
    assert token_ends([9], "", [0], decode) == [1]


# The papers' numbers.


def test_steps_are_normalised_over_all_steps_of_the_group() -> None:
    [[first, second]] = grpo.step_advantages([[[1.0, 0.0], [1.0, 0.0]]], "group")

    assert first == second == [1.0, -1.0]


def test_step_rewards_of_uneven_answers_share_one_mean_and_std() -> None:
    [[long, short, none]] = grpo.step_advantages([[[1.0, 0.0, 0.5], [0.5], []]], "group")

    std = (0.5 / 4) ** 0.5
    assert long == pytest.approx([0.5 / std, -0.5 / std, 0.0])
    assert (short, none) == ([0.0], [])


def test_one_step_alone_teaches_nothing() -> None:
    assert grpo.step_advantages([[[0.7], []]], "group") == [[[0.0], []]]


def test_a_step_within_the_token_of_another_counts_there_too() -> None:
    assert grpo.process_advantages([0.5, 0.25], [2, 2], length=3) == [0.75, 0.75, 0.0]


# What the trainer is given.


def settings(**advanced: Any) -> Resolved:
    asked = {"advanced": in_groups({"loss": "grpo", "supervision": "process"} | advanced)}
    return resolve(Hyperparameters.model_validate(asked), rows=8, parameters=1000, context=128)


def rollout(*ids: int) -> Rollout:
    return Rollout(ids, (-0.5,) * len(ids), decode(ids), "stop")


def graded(*steps: tuple[float, int]) -> Grade:
    return Grade(0.5, steps=tuple(StepScore(score, end) for score, end in steps))


@pytest.fixture
def group() -> Group:
    """One answer in two steps, a good and a bad one, and one answer in a single bad step."""
    answers = (rollout(0, 1, 2, 6, 9), rollout(0, 9))
    return Group(Prompt(1, (1, 2), {}), answers, (graded((1.0, 9), (0.0, 13)), graded((0.0, 3))))


def test_every_token_is_credited_with_the_steps_that_end_at_it_or_later(group: Group) -> None:
    [pack] = packs_of([group], settings(), decode)

    mean, std = 1 / 3, (2 / 9) ** 0.5
    good, bad = (1 - mean) / std, -mean / std
    first, second = (answer.advantages_T for answer in pack.sequences)
    assert first == pytest.approx([good + bad] * 3 + [bad] * 2)
    assert second == pytest.approx([bad] * 2)


def test_with_outcome_the_steps_have_no_say(group: Group) -> None:
    assert packs_of([group], settings(supervision="outcome"), decode) == []


def test_equal_scores_with_different_steps_are_signal_for_process_only(group: Group) -> None:
    assert signal(group, settings()) == "mixed"
    assert signal(group, settings(supervision="outcome")) == "equal"


def test_an_answer_without_steps_counts_as_ungraded_and_says_why(group: Group) -> None:
    steps, bare, failed = graded((1.0, 3)), Grade(1.0), Grade(None, "broken", ErrorKind.other_error)
    mixed = Group(group.prompt, (rollout(0),) * 3, (steps, bare, failed))

    result = with_steps_only(mixed)

    assert result.rewards_G == [0.5, None, None]
    assert "gave no steps" in result.grades_G[1].reason
    assert result.grades_G[2] == failed
