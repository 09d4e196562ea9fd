"""The values of single tokens: what the trainer computed with, the texts, and of which answers they are stored."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from core.jobs.hyperparameters import Hyperparameters, Resolved, resolve
from core.results import rollouts
from graders.types import Grade
from tests.fakes import learn
from tests.hyperparameters import in_groups
from tests.present import untyped
from tests.tiny import WORDS, make_byte_model, tiny_tokenizer
from worker.model.policy import Policy
from worker.model.token_text import TokenTexts
from worker.recording.rollouts import rows_of, with_tokens
from worker.training.contributions import answer_signals
from worker.training.trainer import PeftTrainer
from worker.types import GradedStep, Group, Prompt, Rollout, TokenValues

QUESTION = Prompt(1, (3, 30, 6, 4), {"messages": []})


def settings(**advanced: Any) -> Resolved:
    asked = {
        "batch_size": 2,
        "advanced": in_groups({"group_size": 2, "max_completion_tokens": 12} | advanced),
    }
    return resolve(Hyperparameters.model_validate(asked), rows=8, parameters=1000, context=128)


def answer(*ids: int, **fields: Any) -> Rollout:
    return Rollout(ids, tuple(-0.5 - 0.25 * at for at in range(len(ids))), "yes", "stop", **fields)


def group(*scores: float, line: int = 1, length: int = 3) -> Group:
    answers = [
        answer(*range(6 + 8 * line + member, 6 + 8 * line + member + length)) for member in range(len(scores))
    ]
    return Group(replace(QUESTION, line=line), tuple(answers), tuple(map(Grade, scores)))


def spell(ids: Any) -> list[str]:
    return [f" {WORDS[id]}" for id in ids]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_the_trainer_returns_the_log_probability_and_the_advantage_of_each_token(
    make_policy: Callable[..., Policy], scale: str, overlap: bool
) -> None:
    std = None if scale == "none" else "population"
    asked = {"overlap": True} if overlap else {"kl": 0.1}
    chosen = settings(**asked).model_copy(update={"advantage_scale": scale, "std": std})
    groups = [group(1.0, 0.0, line=1), group(0.5, 0.25, line=2)]

    # With `overlap` the gradient of the first group is computed before the second one is there.
    budget = 12 if overlap else 4096
    update = learn(PeftTrainer(make_policy(), chosen, token_budget=budget, keeps_tokens=True), groups)

    gaps = []
    for one, learned_G in zip(groups, answer_signals(groups, chosen), strict=True):
        for rollout, lesson in zip(one.rollouts_G, learned_G, strict=True):
            values = update.tokens[id(rollout)]
            assert list(values.advantages_T) == pytest.approx([lesson.advantage] * 3, rel=1e-5)
            gaps += [abs(mine - own) for mine, own in zip(values.logprobs_T, rollout.logprobs_T, strict=True)]
    assert sum(gaps) / len(gaps) == pytest.approx(update.logprob_gap, rel=1e-5)
    assert max(gaps) == pytest.approx(update.logprob_gap_max, rel=1e-5)


@pytest.mark.parametrize("advanced", [{"loss": "ppo"}, {"loss": "reinforce_plus_plus", "mini_batches": 2}])
def test_with_rewards_of_tokens_each_token_has_its_advantage(
    make_policy: Callable[..., Policy], advanced: dict[str, Any]
) -> None:
    groups = [group(1.0, 0.0, line=1), group(0.5, 0.25, line=2)]

    update = learn(
        PeftTrainer(
            make_policy(moved=True), settings(kl=0.1, **advanced), token_budget=4096, keeps_tokens=True
        ),
        groups,
    )

    assert len(update.tokens) == 4
    assert all(len(set(values.advantages_T)) == 3 for values in update.tokens.values())


def test_equal_answers_have_the_advantages_of_their_own_groups_and_scores(
    make_policy: Callable[..., Policy],
) -> None:
    def scored(*scores: float, line: int) -> Group:
        """Rows may have the same prompt, and answers of one token are often equal."""
        answers = (answer(6), answer(7), answer(6))
        return Group(replace(QUESTION, line=line), answers, tuple(map(Grade, scores)))

    chosen = settings(group_size=3, kl=0.0)
    groups = [scored(1.0, 0.0, 0.25, line=1), scored(0.0, 1.0, 1.0, line=2), scored(1.0, 1.0, 1.0, line=3)]

    update = learn(PeftTrainer(make_policy(), chosen, token_budget=4096, keeps_tokens=True), groups)

    graded = GradedStep("train", groups, answer_signals(groups, chosen), tokens=update.tokens)
    stored = with_tokens(rows_of(1, graded), graded, spell, most_tokens=99, seed="")
    rows = [row for rows_G in stored for row in rows_G]
    shown = [row["tokens"][0]["advantage"] for row in rows]
    expected = [row["advantage"] for row in rows]
    assert shown == [one if one is None else pytest.approx(one, rel=1e-5) for one in expected]
    assert len({*shown}) == 6


def test_a_trainer_that_is_not_asked_returns_no_tokens(make_policy: Callable[..., Policy]) -> None:
    assert learn(PeftTrainer(make_policy(), settings(), token_budget=4096), [group(1.0, 0.0)]).tokens == {}


class TestTexts:
    @pytest.fixture
    def byte_tokenizer(self, tmp_path: Path) -> PreTrainedTokenizerBase:
        tokenizer: PreTrainedTokenizerBase = untyped(AutoTokenizer).from_pretrained(make_byte_model(tmp_path))
        return tokenizer

    def test_a_character_of_several_tokens_is_the_text_of_its_last(
        self, byte_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        ids = byte_tokenizer.encode("a\u00e9\U0001f600b", add_special_tokens=False)

        assert TokenTexts(byte_tokenizer)(ids) == ["a", "", "\u00e9", "", "", "", "\U0001f600", "b"]

    def test_a_character_that_the_answer_cuts_off_is_shown_as_unfinished(
        self, byte_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        ids = byte_tokenizer.encode("a\U0001f600", add_special_tokens=False)[:-1]

        texts = TokenTexts(byte_tokenizer)(ids)

        assert (texts[0], texts[-1][0]) == ("a", "\ufffd")
        assert "".join(texts) == byte_tokenizer.decode(ids)

    def test_words_keep_the_spaces_between_them_and_special_tokens_are_shown(self) -> None:
        tokenizer = tiny_tokenizer()
        ids = tokenizer.encode("yes yes green <end>")

        assert TokenTexts(tokenizer)(ids) == ["yes", " yes", " green", " <end>"]
        assert TokenTexts(tokenizer)([]) == []


class TestStored:
    def stored(self, groups: list[Group], most_tokens: int, **graded: Any) -> list[list[dict[str, Any]]]:
        signals = answer_signals(groups, settings(kl=0.0))
        step = GradedStep("train", groups, signals, **graded)
        return with_tokens(rows_of(1, step), step, spell, most_tokens=most_tokens, seed="a")

    def test_whole_groups_within_the_limit_are_stored_those_that_were_trained_on_first(self) -> None:
        groups = [group(1.0, 1.0, line=1), group(1.0, 0.0, line=2), group(0.5, 0.5, line=3)]

        def having(most_tokens: int) -> list[list[bool]]:
            return [[row["has_tokens"] for row in rows] for rows in self.stored(groups, most_tokens)]

        assert having(5) == [[False, False]] * 3
        assert having(6) == [[False, False], [True, True], [False, False]]
        assert sum(map(any, having(12))) == 2
        assert having(18) == [[True, True]] * 3

    def test_an_answer_that_was_computed_has_all_values_of_its_tokens(self) -> None:
        one = group(1.0, 0.0)
        [first, _] = one.rollouts_G
        values = {id(first): TokenValues((-0.5, -0.5, -1.0), (0.5, 0.25, 0.125))}

        [[good, bad]] = self.stored([one], 99, tokens=values)

        texts = spell(first.output_ids_T)
        assert good["tokens"] == [
            {"text": texts[0], "logprob": -0.5, "advantage": 0.5, "gap": 0.0},
            {"text": texts[1], "logprob": -0.75, "advantage": 0.25, "gap": 0.25},
            {"text": texts[2], "logprob": -1.0, "advantage": 0.125, "gap": 0.0},
        ]
        # The update is known by its rule: an answer of this group that the trainer did not return.
        assert {token["advantage"] for token in bad["tokens"]} == {bad["advantage"]}
        assert {token["gap"] for token in bad["tokens"]} == {None}

    def test_a_token_that_was_not_sampled_has_no_values(self) -> None:
        closed = answer(6, 7, 8, 9, grammar_start=3, forced=2)
        one = Group(QUESTION, (closed, answer(6, 7)), (Grade(1.0), Grade(0.0)))
        values = {id(closed): TokenValues((-0.5, -1.0), (0.5, 0.5))}

        [[row, _]] = self.stored([one], 99, tokens=values)

        assert [token["logprob"] for token in row["tokens"]] == [-0.5, None, None, -1.25]
        assert [token["gap"] for token in row["tokens"]] == [0.0, None, None, 0.25]
        assert [token["advantage"] for token in row["tokens"]] == [0.5, None, None, 0.5]

    def test_numbers_that_json_does_not_have_are_null_and_large_ones_are_bounded(self) -> None:
        one = group(1.0, 0.0)
        [first, _] = one.rollouts_G
        values = {id(first): TokenValues((float("nan"), -1e9, 0.0), (1e9, 0.0, 0.0))}

        [rows] = self.stored([one], 99, tokens=values)
        page = rollouts.encode(rows, 2)

        assert page
        assert [token["gap"] for token in rows[0]["tokens"]] == [None, -65504.0, 1.0]
        assert rows[0]["tokens"][0]["advantage"] == 65504.0

    def test_tokens_are_left_out_of_a_page_before_any_group_is(self) -> None:
        rows = self.stored([group(1.0, 0.0, line=line % 5, length=9) for line in range(40)], 10_000)
        whole = rollouts.fitted(rows, most_samples=99, most_bytes=1 << 20, seed="a")
        less = rollouts.fitted(rows, most_samples=99, most_bytes=len(whole.data) - 1, seed="a")

        assert whole.samples == less.samples == 80
        assert b"logprob" in whole.data
        assert b"logprob" not in less.data
        assert rows[0][0]["has_tokens"], "the caller's rows are unchanged"
