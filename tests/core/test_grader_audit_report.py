"""What scores of probes say about a grader; the numbers are checked by hand."""

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest

from core.results.grader_audit_report import GraderAuditReport, ProbeGrade, is_enough, noise, parts, report
from core.statistics import interval


def grade(kind: str, score: float | None, line: int = 1, **fields: Any) -> ProbeGrade:
    is_right = kind == "right"
    made = {
        "expect": "high" if is_right else "low",
        "knows": is_right,
        "quality": {"right": 1.0, "half_right": 0.5, "other_reference": 0.0}.get(kind),
        "text": f"{kind} {line}",
        "reason": "" if score is not None else "it broke.",
    }
    return ProbeGrade(kind=kind, score=score, line=line, **made | fields)


def of(*grades: ProbeGrade, **options: Any) -> GraderAuditReport:
    return report(grades, **{"pass_threshold": 0.5, "of_rows": 100} | options)


def scored(right: float | None = 1.0, rows: int = 20, **kinds: float | None) -> list[ProbeGrade]:
    """For each row a right answer, another row's, and answers of more kinds."""
    kinds = {"right": right, "other_reference": 0.0} | kinds
    return [grade(kind, score, line) for line in range(1, rows + 1) for kind, score in kinds.items()]


class TestErrorRates:
    def test_wrong_answers_that_pass_are_false_positives(self) -> None:
        found = of(*scored(rows=4), grade("empty", 1.0), grade("empty", 0.4, 2)).false_positives

        assert (found.wrong, found.answers) == (1, 6)
        assert found.share is not None
        assert found.share["low"] < 1 / 6 == found.share["expected"] < found.share["high"]

    def test_no_error_has_a_lower_bound_of_exactly_zero(self) -> None:
        share = of(*scored()).false_positives.share

        assert share is not None
        assert share["low"] == 0.0 < share["high"]

    def test_answers_to_one_row_count_as_one_trial(self) -> None:
        """Wilson's interval of 1 of 10 rows, with 23 answers to each."""
        graded = [grade(f"k{n}", float(line == 1), line) for line in range(1, 11) for n in range(23)]

        share = of(*graded).false_positives.share

        assert share is not None
        assert share == pytest.approx(interval([1.0] + [0.0] * 9, [1] * 10))

    def test_wrong_answers_that_mention_the_reference_are_counted_apart(self) -> None:
        mentions = [grade("reference_in_wrong_sentence", 1.0, line, knows=True) for line in range(1, 21)]

        found = of(*scored(), *mentions)

        assert (found.false_positives.wrong, found.mentions.wrong) == (0, 20)

    def test_partial_credit_is_measured_by_the_right_answer_of_its_row(self) -> None:
        found = of(*scored(right=10.0, rows=1, empty=2.0, refusal=6.0))

        earned = {one.kind: one.mean_earned for one in found.kinds}
        assert earned == {"right": 1.0, "other_reference": 0.0, "empty": 0.0, "refusal": 0.5}

    def test_right_answers_that_fail_are_false_negatives(self) -> None:
        found = of(grade("right", 1.0), grade("right", 0.2, 2), grade("right", None, 3)).false_negatives

        assert (found.wrong, found.answers) == (1, 2)

    def test_answers_that_may_score_as_they_like_are_no_errors(self) -> None:
        found = of(*scored(rows=1), grade("right_in_bold", 0.0, expect="either"))

        assert (found.false_positives.wrong, found.false_negatives.wrong) == (0, 0)
        assert [one.passed for one in found.kinds] == [1, 0, 0]

    def test_a_score_below_the_threshold_by_rounding_passes(self) -> None:
        assert of(grade("empty", 0.3), pass_threshold=0.1 + 0.2).false_positives.wrong == 1

    def test_the_worst_ten_are_of_different_kinds_first(self) -> None:
        empty = [grade("empty", 1.0, line) for line in range(20)]

        worst = of(*empty, grade("refusal", 0.6), grade("right", 0.0)).worst

        assert [one.kind for one in worst[:4]] == ["empty", "refusal", "right", "empty"]
        assert len(worst) == 10


class TestSensitivity:
    def test_a_score_that_follows_quality_correlates_fully(self) -> None:
        graded = [
            *scored(right=0.9),
            *(grade("half_right", 0.4, line, expect="either") for line in range(1, 21)),
        ]

        assert of(*graded).sensitivity.correlation == pytest.approx(1.0)

    def test_a_score_that_does_not_move_correlates_with_nothing(self) -> None:
        assert of(*scored(right=1.0, other_reference=1.0)).sensitivity.correlation == 0

    def test_without_right_answers_there_is_none(self) -> None:
        assert of(grade("empty", 0.0)).sensitivity.correlation is None


class TestJudgeNoise:
    def test_is_the_pooled_deviation_of_equal_answers(self) -> None:
        repeated: list[list[float | None]] = [[0.2, 0.4, 0.6], [0.9, 0.9, None], [None, 1.0, None]]

        found = noise(repeated, 0.5)

        assert found is not None
        assert (found.answers, found.repeats) == (2, 3)
        assert found.standard_deviation == pytest.approx(
            math.sqrt((2 * statistics.variance([0.2, 0.4, 0.6])) / 3)
        )
        # Of the three pairs of the first answer two disagree, and none of the second.
        assert found.flip_rate == pytest.approx((2 / 3 + 0) / 2)

    def test_hides_a_gain_up_to_a_number_of_rows(self) -> None:
        """With a deviation of 0.1, 1.96 * 0.1 * sqrt(2 / 31) = 0.0498 is the first below 0.05."""
        grades = [0.5 - 0.1 / math.sqrt(2), 0.5 + 0.1 / math.sqrt(2)]

        found, wider = noise([grades], 0.5), noise([[10 * one for one in grades]], 5.0, full_reward=10.0)

        assert found is not None
        assert wider is not None
        assert found.standard_deviation == pytest.approx(0.1)
        assert found.rows_hiding_gain == wider.rows_hiding_gain == 31

    def test_there_is_none_of_answers_that_were_graded_once(self) -> None:
        assert noise([[1.0], [None]], 0.5) is None


class TestParts:
    def test_a_part_that_gives_all_answers_one_score_is_inert(self) -> None:
        some = [
            grade(
                kind,
                1.0,
                line,
                parts={"strict": float(kind == "right"), "blind": 1.0, "form": float(kind != "empty")},
            )
            for line in range(40)
            for kind in ("right", "other_reference", "empty", "refusal", *map(str, range(40)))
        ]

        assert {part.name: part.inert for part in parts(some)} == {
            "strict": False,
            "blind": True,
            "form": True,
        }

    def test_parts_that_say_the_same_are_redundant(self) -> None:
        some = [
            grade("empty", one, line, parts={"a": one, "b": 1 + 2 * one, "c": (7 * line) % 5, "d": None})
            for line, one in enumerate([0.0, 0.3, 0.1, 0.9, 0.7, 0.2])
        ]

        found = {part.name: part for part in parts(some)}

        assert (found["a"].redundant_with, found["c"].redundant_with) == (["b"], [])
        assert found["a"].correlations["b"] == pytest.approx(1)
        assert found["a"].correlation == pytest.approx(1)
        assert (found["d"].graded, found["d"].failed, found["d"].inert) == (0, 6, False)


class TestVerdict:
    def test_a_grader_that_tells_right_from_wrong_goes(self) -> None:
        found = of(*scored(empty=0.0))

        assert found.verdict == "go"
        assert found.sentence == (
            "This grader can train: 0 of 40 wrong answers pass, and 20 of 20 right ones; score and quality correlate "
            "by 1.00."
        )
        assert found.advice == []

    def test_reward_without_an_answer_stops(self) -> None:
        found = of(*scored(empty=1.0, refusal=1.0))

        assert found.verdict == "stop"
        assert "a model can earn its reward without an answer (empty, refusal)" in found.sentence

    def test_a_mention_of_the_reference_that_passes_is_a_caution(self) -> None:
        thought = [grade("right_only_in_thought", 1.0, line, knows=True) for line in range(1, 21)]

        found = of(*scored(), *thought)

        assert found.verdict == "caution"
        assert "right only in thought" in found.sentence

    def test_what_most_graders_pay_is_a_note(self) -> None:
        negated = [
            grade("negated_reference", 1.0, line, knows=True, expect="either") for line in range(1, 21)
        ]

        found = of(*scored(), *negated)

        assert found.verdict == "go"
        assert "negated reference pass on 20 of 20 rows" in found.notes[0]

    def test_right_answers_that_fail_stop(self) -> None:
        assert "20 of 20 right answers do not pass" in of(*scored(right=0.0)).sentence

    def test_right_answers_that_cannot_be_graded_stop(self) -> None:
        found = of(*scored(right=None))

        assert found.verdict == "stop"
        assert "20 of 20 right answers could not be graded" in found.sentence
        assert "it broke." in found.advice[0]

    def test_wrong_answers_that_cannot_be_graded_do_no_harm(self) -> None:
        assert of(*scored(empty=None)).verdict == "go"

    def test_without_any_grade_it_is_unknown(self) -> None:
        found = of(grade("empty", None), grade("refusal", None))

        assert found.verdict == "unknown"
        assert "none of 2 answers could be graded" in found.sentence

    def test_guessed_right_answers_that_fail_are_of_another_form(self) -> None:
        graded = [replace(one, is_guess=True) for one in scored(right=0.0)]

        found = of(*graded)

        assert found.verdict == "unknown"
        assert (found.false_negatives.answers, found.sensitivity.correlation) == (0, None)

    @pytest.mark.parametrize(("wrong", "verdict"), [(4, "go"), (6, "caution"), (12, "stop")])
    def test_a_score_that_ignores_quality_stops(self, wrong: int, verdict: str) -> None:
        """Of 20 wrong answers so many get the score of the right ones: Spearman 0.82, 0.73 and 0.50."""
        graded = [grade("right", 1.0, line) for line in range(20)]
        graded += [grade("other_reference", float(line < wrong), line) for line in range(20)]
        graded += [grade("empty", 0.0, line, text=str(n)) for line in range(20) for n in range(12)]

        assert of(*graded).verdict == verdict

    def test_a_judge_that_changes_its_mind_is_a_caution(self) -> None:
        found = of(*scored(), repeated=[[0.0, 1.0]] * 5)

        assert found.verdict == "caution"
        assert "disagree in 100 % of the cases" in found.sentence

    def test_an_inert_part_is_a_caution(self) -> None:
        graded = [
            grade(one.kind, one.score, one.line, parts={"strict": one.score, "blind": 1.0})
            for one in scored()
        ]

        assert "blind gave almost all answers the same score" in of(*graded).sentence

    def test_without_right_answers_it_asks_for_them(self) -> None:
        found = of(grade("empty", 0.0))

        assert found.verdict == "unknown"
        assert "Send 'answer'" in found.advice[0]


def test_coverage_counts_rows() -> None:
    found = of(*scored(rows=3), grade("empty", None, 7)).coverage

    assert (found.rows, found.of_rows, found.with_right_answer, found.never_graded) == (4, 100, 3, 1)
    assert (found.most_frequent, found.is_complete) == (1, True)


def test_a_gate_needs_twenty_rows_or_all() -> None:
    assert not is_enough(of(*scored(rows=19)).coverage)
    assert is_enough(of(*scored(rows=20)).coverage)
    assert is_enough(of(*scored(rows=5), of_rows=5).coverage)
    assert not is_enough(of(*scored(rows=20), is_complete=False).coverage)
