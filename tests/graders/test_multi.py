import asyncio

from graders.builtin.multi import Multi
from graders.formula import Formula
from graders.types import ErrorKind, Grade, Item, Sample


class Returns:
    """A grader with its answer ready: a grade, or an exception to raise."""

    type = "string_check"

    def __init__(self, answer: Grade | Exception) -> None:
        self.name, self.answer = "ready", answer

    async def grade(self, sample: Sample, item: Item) -> Grade:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


BLIND = Grade(None, "item.answer is missing", ErrorKind.invalid_variable_error)


def grade(formula: str, *, invalid_grade: float | None = None, **answers: Grade | Exception | float) -> Grade:
    graders = {
        key: Returns(Grade(answer) if isinstance(answer, (int, float)) else answer)
        for key, answer in answers.items()
    }
    multi = Multi("multi", graders, Formula.parse(formula, graders), invalid_grade)
    return asyncio.run(multi.grade(Sample("text"), {}))


def test_the_score_is_the_formula_over_the_scores() -> None:
    combined = grade("0.8*acc + 0.2*fmt", acc=1.0, fmt=0.5)

    assert combined.score == 0.9
    assert combined.reason == "0.8*acc + 0.2*fmt with acc=1, fmt=0.5"


def test_sub_grades_are_kept_by_key() -> None:
    combined = grade("acc", acc=1.0, extra=0.25)

    assert {key: sub.score for key, sub in combined.sub_grades.items()} == {"acc": 1.0, "extra": 0.25}


def test_one_sub_grader_that_cannot_judge_leaves_the_whole_ungraded() -> None:
    combined = grade("acc + fmt", acc=BLIND, fmt=1.0)

    assert combined.score is None
    assert combined.error is ErrorKind.invalid_variable_error
    assert combined.reason == "acc could not be judged: item.answer is missing"
    assert combined.sub_grades["fmt"].score == 1.0


def test_every_sub_grader_that_cannot_judge_is_named() -> None:
    assert grade("a + b", a=BLIND, b=BLIND).reason.count("could not be judged") == 2


def test_a_sub_grader_the_formula_does_not_use_still_has_to_judge() -> None:
    assert grade("acc", acc=1.0, unused=BLIND).score is None


def test_an_invalid_grade_stands_in_and_the_failure_stays_visible() -> None:
    combined = grade("acc + fmt", invalid_grade=-1.0, acc=BLIND, fmt=0.5)

    assert (combined.score, combined.error) == (-0.5, None)
    assert combined.sub_grades["acc"].error is ErrorKind.invalid_variable_error


def test_an_invalid_grade_of_zero_is_a_value_like_any_other() -> None:
    assert grade("acc", invalid_grade=0.0, acc=BLIND).score == 0.0


def test_a_sub_grader_that_raises_could_not_judge() -> None:
    combined = grade("acc", acc=ZeroDivisionError("boom"))

    assert combined.error is ErrorKind.other_error
    assert "acc could not be judged: ready: ZeroDivisionError('boom')" in combined.reason


def test_a_formula_without_a_value_for_these_scores_leaves_the_sample_ungraded() -> None:
    combined = grade("1 / acc", acc=0.0)

    assert (combined.score, combined.error) == (None, ErrorKind.other_error)
    assert combined.reason == "calculate_output: 1 / 0 has no finite value"
    assert combined.sub_grades["acc"].score == 0.0


def test_sub_graders_are_asked_at_the_same_time() -> None:
    """Each waits for the other to have started: asked in turn, they would never finish."""
    barrier = asyncio.Barrier(2)

    class Meets:
        name, type = "meets", "string_check"

        async def grade(self, sample: Sample, item: Item) -> Grade:
            await barrier.wait()
            return Grade(1.0)

    multi = Multi("multi", {"a": Meets(), "b": Meets()}, Formula.parse("a + b", ["a", "b"]))

    async def grade() -> Grade:
        return await asyncio.wait_for(multi.grade(Sample(""), {}), 30)

    assert asyncio.run(grade()).score == 2.0
