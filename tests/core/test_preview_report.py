"""What a handful of graded answers says about a job; the numbers are checked by hand."""

import subprocess
import sys
from itertools import combinations
from typing import Any

import pytest

from core.jobs.estimates import PastJobs, after_preview, before_start, sizes
from core.jobs.hyperparameter_groups import Sampling
from core.jobs.hyperparameters import Advanced, Hyperparameters
from core.results.preview_report import (
    PreviewAnswer,
    PreviewPrompt,
    PreviewReport,
    grading,
    report,
    signal,
    with_signal,
)
from core.statistics import interval

RIGHT, WRONG, UNGRADED = (1.0,), (0.0,), ()


def prompts(*scores_P: list[Any], cut_off: bool = False, tokens: int = 10, text: str = "four") -> list[Any]:
    """A prompt for each list of scores; None could not be graded."""
    return [
        PreviewPrompt(
            line,
            tokens,
            tuple(
                PreviewAnswer(
                    text, 20, cut_off, one, "" if one is not None else "it broke.", 0.5, training_rewards(one)
                )
                for one in scores
            ),
        )
        for line, scores in enumerate(scores_P, start=1)
    ]


def training_rewards(score: Any) -> tuple[Any, ...]:
    return () if score is None else (score,)


def of(some: list[Any], **options: Any) -> PreviewReport:
    asked = {
        "group_size": 8,
        "max_completion_tokens": 50,
        "context": 100,
        "pass_threshold": 0.5,
        "sampling_seconds": 4.0,
    }
    return report(some, **asked | options)


class TestGroupsWithSignal:
    def test_two_of_eight_right_mix_in_twelve_of_twenty_eight_pairs(self) -> None:
        """28 pairs; 1 of two right answers, 15 of two wrong ones. With 2/8 plugged in for p it would be 0.375."""
        assert with_signal([RIGHT] * 2 + [WRONG] * 6, 2) == pytest.approx(12 / 28)

    def test_one_of_four_right_is_in_three_of_four_triples(self) -> None:
        assert with_signal([RIGHT] + [WRONG] * 3, 3) == pytest.approx(3 / 4)

    def test_a_group_of_all_samples_has_signal_or_not(self) -> None:
        assert with_signal([RIGHT] + [WRONG] * 7, 8) == 1.0
        assert with_signal([WRONG] * 8, 8) == 0.0

    def test_an_ungraded_answer_makes_no_difference_to_its_group(self) -> None:
        """Of 28 pairs only the 3 x 3 of a right and a wrong one differ."""
        assert with_signal([UNGRADED] * 2 + [WRONG] * 3 + [RIGHT] * 3, 2) == pytest.approx(9 / 28)
        assert with_signal([UNGRADED] * 4, 2) == 0.0

    def test_rewards_between_0_and_1_count_as_they_are(self) -> None:
        """Pairs of 0.2, 0.2, 0.3: two of three differ. What differs by rounding alone is equal, as to the trainer."""
        assert with_signal([(0.2,), (0.2,), (0.3,)], 2) == pytest.approx(2 / 3)
        assert with_signal([(0.2,), (0.2 + 1e-12,)], 2) == 0.0

    def test_an_answer_whose_steps_differ_has_signal_by_itself(self) -> None:
        """Of three pairs only that of the two answers without a step right has none."""
        assert with_signal([(0.0, 0.0), (0.0,), (0.0, 1.0)], 2) == pytest.approx(2 / 3)

    @pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
    @pytest.mark.parametrize("size", [2, 3, 5])
    def test_its_expectation_is_the_chance_itself(self, chance: float, size: int) -> None:
        """Over all 2^5 outcomes of five samples, each weighed by how likely it is: no bias, to the last digit."""
        expected = 0.0
        for right in range(6):
            for places in combinations(range(5), right):
                taught = [RIGHT if place in places else WRONG for place in range(5)]
                weight = chance**right * (1 - chance) ** (5 - right)
                expected += weight * with_signal(taught, size)

        assert expected == pytest.approx(1 - chance**size - (1 - chance) ** size)

    def test_the_share_is_a_mean_over_prompts(self) -> None:
        found = signal(prompts([1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]), 2)

        assert (found.share["expected"], found.at_least) == (0.25, False)

    def test_of_groups_larger_than_the_samples_it_says_no_more_than_at_least(self) -> None:
        found = signal(prompts([1.0, 0.0], [0.0, 0.0]), 16)

        assert (found.group_size, found.share["expected"], found.at_least) == (16, 0.5, True)


class TestIntervals:
    def test_prompts_that_are_all_alike_count_every_answer(self) -> None:
        """4 of 8 right for every prompt: Wilson with n = 64 and t(7) = 2.365 is 0.5 -+ 0.1417."""
        found = interval([4] * 8, [8] * 8)

        assert found == pytest.approx({"low": 0.3583, "expected": 0.5, "high": 0.6417}, abs=2e-4)

    def test_prompts_that_are_solved_always_or_never_count_once_each(self) -> None:
        """Eight of 16 prompts: Wilson with n = 16 and t(15) = 2.131 is 0.5 -+ 0.2352, whatever the samples are."""
        assert interval([8] * 8 + [0] * 8, [8] * 16) == interval([80] * 8 + [0] * 8, [80] * 16)
        assert interval([8] * 8 + [0] * 8, [8] * 16)["low"] == pytest.approx(0.5 - 0.2352, abs=2e-4)

    def test_no_success_at_all_leaves_room_for_prompts_that_were_not_tried(self) -> None:
        """Rule: z^2 / (n + z^2) with n = 8 prompts and z = t(7)."""
        found = interval([0] * 8, [8] * 8)

        assert (found["low"], found["expected"]) == (0.0, 0.0)
        assert found["high"] == pytest.approx(2.365**2 / (8 + 2.365**2), abs=1e-3)

    def test_one_prompt_says_next_to_nothing(self) -> None:
        assert interval([4], [8])["high"] - interval([4], [8])["low"] > 0.9

    @pytest.mark.slow  # starts a process
    def test_importing_it_does_not_import_scipy(self) -> None:
        """The API imports this module when it starts."""
        code = "import sys, core.results.preview_report; print('scipy' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

        assert done.stdout.strip() == "False"


class TestReport:
    def test_it_counts_what_was_tried(self) -> None:
        made = of(prompts([1.0, 0.0, None], [0.5, 0.0, 0.0]), group_size=3)

        assert (made.answers, made.passed, made.mean_reward) == (6, 2, 0.3)
        assert made.pass_rate is not None and made.pass_rate["expected"] == pytest.approx(2 / 5)
        assert made.prompts[0].rewards == [1.0, 0.0, None]
        assert (made.grading.failed, made.grading.reasons, made.grading.seconds.mean) == (
            1,
            ["it broke."],
            0.5,
        )
        assert (made.completion_tokens.max, made.sampling.tokens_per_second) == (20, 30.0)
        assert [one.group_size for one in made.signal] == [2, 3, 4, 8, 16, 32]
        assert [one.at_least for one in made.signal] == [False, False, True, True, True, True]

    def test_reasons_are_three_and_short(self) -> None:
        made = grading(["a" * 600, "b", "b", "c", "c", "d"], [1.0, 3.0], tokens=7)

        assert [len(reason) for reason in made.reasons] == [1, 1, 500]
        assert (made.failed, made.seconds.mean, made.tokens) == (6, 2.0, 7)

    def test_what_cannot_be_graded_has_no_pass_rate(self) -> None:
        made = of(prompts([None, None], [None, None]))

        assert (made.pass_rate, made.mean_reward, made.verdict) == (None, None, "grader_fails")
        assert "it broke." in made.recommendation

    @pytest.mark.parametrize(
        ("scores_P", "verdict", "says"),
        [
            (
                [[0.0] * 7 + [1.0]] * 8,
                "good",
                "8 of 64 answers pass, and 100 % of the groups of 8 have signal",
            ),
            ([[0.0] * 8] * 8, "too_hard", "put an example into the prompt"),
            ([[1.0] * 8] * 8, "too_easy", "64 of 64 answers pass"),
            ([[1.0] * 8] * 4 + [[0.0] * 8] * 4, "uneven", "always or never"),
            ([[0.0] * 7 + [1.0]] + [[0.0] * 8] * 7, "little_signal", "12 % of the groups of 8"),
            ([[None] * 6 + [1.0, 0.0]] * 8, "grader_fails", "48 of 64"),
            # Rewards that differ are signal although none of the answers passes.
            ([[0.1, 0.2] * 4] * 8, "good", "0 of 64 answers pass"),
        ],
    )
    def test_the_recommendation_is_plain(
        self, scores_P: list[list[float | None]], verdict: str, says: str
    ) -> None:
        made = of(prompts(*scores_P))

        assert made.verdict == verdict
        assert says in made.recommendation

    def test_answers_that_are_cut_off_are_the_first_thing_to_mend(self) -> None:
        made = of(prompts([0.0] * 8, cut_off=True))

        assert (made.verdict, made.cut_off) == ("cut_off", 8)
        assert "max_completion_tokens" in made.recommendation

    def test_prompts_that_would_fail_the_job_are_named(self) -> None:
        made = of(prompts([1.0, 0.0], tokens=51), max_completion_tokens=50, context=100)

        assert made.verdict == "does_not_fit"
        assert "line 1 has 51" in made.recommendation

    def test_groups_larger_than_the_samples_are_told_as_at_least(self) -> None:
        assert "at least 100 % of the groups of 8" in of(prompts([1.0, 0.0])).recommendation


class TestEstimate:
    SETTINGS = sizes(
        Hyperparameters(
            n_epochs=1, batch_size=4, eval_interval=1, advanced=Advanced(sampling=Sampling(group_size=2))
        ),
        rows=4,
        context=200,
    )

    def test_without_history_it_is_the_samplings_time_and_a_guess_of_the_rest(self) -> None:
        """8 answers and 2 validations of 4 are 16 answers of 10 tokens, 20 a second: 8 s; of 100 tokens 80 s."""
        known = after_preview(
            None, self.SETTINGS, lengths=[10.0] * 4, tokens_per_second=20.0, train_rows=4, valid_rows=4
        )

        assert known["remaining_seconds"] == {"low": 8.0, "expected": 16.0, "high": 320.0}
        assert "no job of this model has run here yet" in known["based_on"]
        assert f"all {self.SETTINGS.max_completion_tokens} tokens" in known["upper_end"]
        assert "hyperparameters.advanced.sampling.max_completion_tokens" in known["upper_end"]

    def test_with_history_its_speed_counts_and_the_previews_lengths(self) -> None:
        past = PastJobs(1, [5.0, 5.0], [90.0, 90.0])
        rows = {"train_rows": 4, "valid_rows": 4}
        known = after_preview(past, self.SETTINGS, lengths=[10.0] * 4, tokens_per_second=20.0, **rows)

        assert known["remaining_seconds"]["expected"] == 16 * 10 / 5
        assert (
            known["remaining_seconds"]["high"]
            == before_start(past, self.SETTINGS, **rows)["remaining_seconds"]["high"]
        )
        assert known["based_on"] == "the preview's answers and 2 steps of 1 earlier job"
        assert known["upper_end"] == before_start(past, self.SETTINGS, **rows)["upper_end"]
