"""The report of a grader audit, from the scores of probes. Pure functions.

The probes of one row are not independent, so the unit of statistics is the row (core/statistics.py, `interval`).
docs/howto/grader-audits.md explains the report.
"""

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Field

from core.jobs.verdict import counted
from core.results.preview_report import SHOWN_CHARACTERS, Grading, grading
from core.rewards import all_equal, equal
from core.statistics import ShareEstimate, interval, pearson, spearman

Expect = Literal["high", "low", "either"]
Outcome = Literal["go", "caution", "unknown", "stop"]

# Of the reward of a right answer to the same row, above that of an empty one: an answer with this share passes.
EARNS = 0.9
# Of the rows: a kind of wrong answer that passes on more of them is a hole, which a model finds. With two labels, half
# of the copied prompts pass by chance.
HOLE = 0.75
# Mean share of the reward of a right answer that a kind of wrong answer earns without knowledge.
MUCH = 0.6
# Of the right answers: those that may not pass; more than MANY_ERRORS are the fault of the grader, or of their form.
FEW_ERRORS, MANY_ERRORS = 0.05, 0.5
# Of the rows on which one and the same answer is right.
CONSTANT = 0.9
# Spearman's correlation of score and quality.
SENSITIVE, INSENSITIVE = 0.8, 0.6
# Of the answers that share one score: a part of a `multi` above it hardly tells answers apart.
INERT = 0.95
# Correlation of two parts of a `multi` above which one of them adds nothing.
REDUNDANT = 0.95
# Of two grades of one answer: a judge that decides otherwise more often is noise.
FLIPS = 0.1
GAIN = 0.05  # of the mean reward, which a run should be able to show
WORST = 10
NAMED, NAME_CHARACTERS = 3, 40
ROWS_OF_A_GATE = 20
RIGHT, EMPTY, OTHER, ONE_FIELD = "right", "empty", "other_reference", "one_field_wrong"
# Kinds that graders which read an answer out of a text pay rightly or wrongly, depending on the task.
NOTED = ("negated_reference", "thought_without_end", "json_with_extra_fields")


@dataclass(frozen=True)
class ProbeGrade:
    """A probe (graders/exploits/corpus.py) and its score; None: it could not be graded."""

    kind: str
    expect: Expect
    knows: bool
    quality: float | None
    line: int
    text: str
    score: float | None
    reason: str = ""
    parts: Mapping[str, float | None] = field(default_factory=dict)
    seconds: float = 0.0
    is_guess: bool = False


@dataclass(frozen=True)
class RowScale:
    """The scores of the right and of the empty answer to a row; without `right`, `threshold` says what passes.

    A right answer is used if it passes the threshold, or if it is no guess and earns more than an empty one.
    """

    empty: float | None
    right: float | None
    threshold: float

    def earned(self, score: float) -> float:
        """Return the share of the reward of a right answer, from 0 to 1."""
        if self.right is None:
            return float(passes(score, self.threshold))
        if self.empty is None or passes(self.empty, self.right):
            return float(passes(score, self.right))
        return min(1.0, max(0.0, (score - self.empty) / (self.right - self.empty)))


@dataclass(frozen=True)
class ErrorRate:
    """Wrong answers that pass, or right ones that do not, among the graded ones. null: none was graded."""

    wrong: int
    answers: int
    share: ShareEstimate | None


@dataclass(frozen=True)
class KindOfProbe:
    """The scores of one kind of probe. `expect`: low, high, or either, which counts as no error."""

    kind: str
    expect: Expect
    knows: Annotated[bool, Field(description="Its answers have the right values in them.")]
    answers: int
    failed: Annotated[int, Field(description="Could not be graded.")]
    passed: int
    share: Annotated[ShareEstimate | None, Field(description="That pass, of the graded answers.")]
    mean_score: float | None
    mean_earned: Annotated[
        float | None,
        Field(
            description="Mean share of the reward of a right answer to the same row, above that of an empty one."
        ),
    ]


@dataclass(frozen=True)
class ExampleOfError:
    """A wrong answer that passes, or a right one that does not; its text is cut at 500 characters."""

    kind: str
    expect: Expect
    line: int
    text: str
    score: float
    reason: str


@dataclass(frozen=True)
class Sensitivity:
    """Whether the score moves with the quality of planted right, half right and wrong answers."""

    correlation: Annotated[float | None, Field(description="Spearman's; null: no right answer is known.")]
    answers: int


@dataclass(frozen=True)
class JudgeNoise:
    """The scores of equal answers, each graded `repeats` times with other seeds and with its labels reversed.

    They are scores of the whole grader, so the noise of several judges counts together.
    """

    answers: int
    repeats: int
    standard_deviation: Annotated[float, Field(description="Of the scores of one answer.")]
    flip_rate: Annotated[
        float, Field(description="Probability that two grades of an answer pass and fail it.")
    ]
    rows_hiding_gain: Annotated[
        int,
        Field(
            description="Validation rows up to which this noise hides a gain of 5 % of a right answer's reward."
        ),
    ]


@dataclass(frozen=True)
class PartOfGrader:
    """The scores of one part of a multi grader over all probes."""

    name: str
    graded: int
    failed: int
    mean: float | None
    standard_deviation: float | None
    correlation: Annotated[
        float | None, Field(description="With the whole score; null: one of both is constant.")
    ]
    inert: Annotated[bool, Field(description="95 % of the answers have the same score.")]
    correlations: Annotated[dict[str, float | None], Field(description="With the parts after it.")]
    redundant_with: list[str]


@dataclass(frozen=True)
class AuditCoverage:
    """The rows behind the report. `never_graded`: rows of which no probe could be graded."""

    rows: int
    of_rows: Annotated[int, Field(description="In the file.")]
    with_right_answer: int
    never_graded: int
    most_frequent: Annotated[
        int, Field(description="Rows with the same right answer: what a constant earns.")
    ]
    is_complete: Annotated[bool, Field(description="false: the budget was used up before all were graded.")]


@dataclass(frozen=True)
class GraderAuditReport:
    """The results of a grader audit. Shares are from 0 to 1, with 95 % confidence intervals."""

    verdict: Outcome
    sentence: str
    advice: list[str]
    notes: Annotated[list[str], Field(description="Kinds that pass, which may be right or wrong.")]
    pass_threshold: float
    answers: int
    false_positives: Annotated[
        ErrorRate, Field(description="Of the wrong answers that need no knowledge of the right one.")
    ]
    mentions: Annotated[ErrorRate, Field(description="Of the wrong answers that mention the right one.")]
    false_negatives: Annotated[ErrorRate, Field(description="Of the right answers.")]
    worst: list[ExampleOfError]
    kinds: list[KindOfProbe]
    sensitivity: Sensitivity
    noise: Annotated[JudgeNoise | None, Field(description="null: no judge, or no answer was graded twice.")]
    parts: list[PartOfGrader]
    grading: Grading
    coverage: AuditCoverage


def report(
    grades: Sequence[ProbeGrade],
    *,
    pass_threshold: float,
    of_rows: int,
    repeated: Sequence[Sequence[float | None]] = (),
    tokens: int = 0,
    is_complete: bool = True,
) -> GraderAuditReport:
    """Build the report.

    Args:
        grades: of all probes; at least one.
        of_rows: rows of the file.
        repeated: the scores of each answer that judges graded several times.
        tokens: of judges.
        is_complete: whether the budget sufficed.
    """
    lines = scales(grades, pass_threshold)
    if is_unclear(grades, lines):
        grades = [replace(one, quality=None, expect=_no_longer_high(one.expect)) for one in grades]
    low = [one for one in grades if one.expect == "low"]
    audit = GraderAuditReport(
        verdict="go",
        sentence="",
        advice=[],
        notes=[],
        pass_threshold=pass_threshold,
        answers=len(grades),
        false_positives=error_rate([one for one in low if not one.knows], lines),
        mentions=error_rate([one for one in low if one.knows], lines),
        false_negatives=error_rate([one for one in grades if one.expect == "high"], lines),
        worst=worst(grades, lines),
        kinds=kinds(grades, lines),
        sensitivity=sensitivity(grades),
        noise=noise(repeated, pass_threshold, reward_range(lines)),
        parts=parts(grades),
        grading=grading(
            [one.reason for one in grades if one.score is None], [one.seconds for one in grades], tokens
        ),
        coverage=coverage(grades, of_rows, is_complete=is_complete),
    )
    verdict, sentence, advice = judge(audit)
    return replace(audit, verdict=verdict, sentence=sentence, advice=advice, notes=_notes(audit))


def passes(score: float, threshold: float) -> bool:
    return score >= threshold or equal(score, threshold)


def scales(grades: Sequence[ProbeGrade], threshold: float) -> dict[int, RowScale]:
    """The scale of each row. Without a graded empty answer, the lowest score of a wrong one takes its place."""
    by_line: dict[int, list[ProbeGrade]] = defaultdict(list)
    for one in grades:
        by_line[one.line].append(one)
    return {line: _scale(of_line, threshold) for line, of_line in by_line.items()}


def _scale(of_line: Sequence[ProbeGrade], threshold: float) -> RowScale:
    low = {one.kind: one.score for one in of_line if one.expect == "low" and one.score is not None}
    empty = low.get(EMPTY, min(low.values(), default=None))
    right = next((one for one in of_line if one.kind == RIGHT and one.score is not None), None)
    if right is None or right.score is None:
        return RowScale(empty, None, threshold)
    earns = empty is not None and not right.is_guess and not passes(empty, right.score)
    return RowScale(empty, right.score if earns or passes(right.score, threshold) else None, threshold)


def is_unclear(grades: Sequence[ProbeGrade], lines: Mapping[int, RowScale]) -> bool:
    """Whether right answers are guesses of which most do not pass: then their form is not known."""
    guessed = [one for one in grades if one.kind == RIGHT and one.is_guess]
    return sum(lines[one.line].right is None for one in guessed) > MANY_ERRORS * len(guessed)


def _no_longer_high(expect: Expect) -> Expect:
    return "either" if expect == "high" else expect


def reward_range(lines: Mapping[int, RowScale]) -> float:
    """The mean score of right answers above that of empty ones; 1 where none is known."""
    ranges = [
        scale.right - scale.empty
        for scale in lines.values()
        if scale.right is not None and scale.empty is not None
    ]
    return max(0.0, statistics.fmean(ranges)) if ranges else 1.0


def passed(probe: ProbeGrade, lines: Mapping[int, RowScale]) -> bool:
    """Whether a graded answer passes: a right one if it sets the scale of its row, another by what it earns."""
    scale = lines[probe.line]
    if probe.kind == RIGHT:
        return scale.right is not None
    return probe.score is not None and scale.earned(probe.score) >= EARNS


def error_rate(grades: Sequence[ProbeGrade], lines: Mapping[int, RowScale]) -> ErrorRate:
    """The share of graded answers on the wrong side."""
    graded = [one for one in grades if one.score is not None]
    wrong = sum(passed(one, lines) != (one.expect == "high") for one in graded)
    return ErrorRate(wrong, len(graded), _share(wrong, graded))


def _share(hits: int, graded: Sequence[ProbeGrade]) -> ShareEstimate | None:
    """The share of hits. Answers to one row are alike, so no more trials count than there are rows."""
    if not graded:
        return None
    rows, share = len({one.line for one in graded}), hits / len(graded)
    estimate = interval([share] * rows, [1] * rows)
    return {
        "low": estimate["low"] if hits else 0.0,
        "expected": share,
        "high": estimate["high"] if hits < len(graded) else 1.0,
    }


def kinds(grades: Sequence[ProbeGrade], lines: Mapping[int, RowScale]) -> list[KindOfProbe]:
    by_kind: dict[str, list[ProbeGrade]] = defaultdict(list)
    for one in grades:
        by_kind[one.kind].append(one)
    return [_kind(kind, of_kind, lines) for kind, of_kind in by_kind.items()]


def _kind(kind: str, of_kind: Sequence[ProbeGrade], lines: Mapping[int, RowScale]) -> KindOfProbe:
    graded = [one for one in of_kind if one.score is not None]
    scores = [one.score for one in graded if one.score is not None]
    hits = sum(passed(one, lines) for one in graded)
    earned = [lines[one.line].earned(one.score) for one in graded if one.score is not None]
    return KindOfProbe(
        kind=kind,
        expect=of_kind[0].expect,
        knows=of_kind[0].knows,
        answers=len(of_kind),
        failed=len(of_kind) - len(scores),
        passed=hits,
        share=_share(hits, graded),
        mean_score=statistics.fmean(scores) if scores else None,
        mean_earned=statistics.fmean(earned) if earned else None,
    )


def worst(grades: Sequence[ProbeGrade], lines: Mapping[int, RowScale]) -> list[ExampleOfError]:
    """Answers on the wrong side: first one of each kind, then the second ones, ..."""
    by_kind: dict[str, list[ProbeGrade]] = defaultdict(list)
    for one in grades:
        if one.score is not None and one.expect != "either" and passed(one, lines) != (one.expect == "high"):
            by_kind[one.kind].append(one)
    ranked = sorted(
        ((rank, one) for of_kind in by_kind.values() for rank, one in enumerate(of_kind)),
        key=lambda entry: entry[0],
    )
    return [
        ExampleOfError(
            one.kind,
            one.expect,
            one.line,
            one.text[:SHOWN_CHARACTERS],
            one.score,
            one.reason[:SHOWN_CHARACTERS],
        )
        for _, one in ranked[:WORST]
        if one.score is not None
    ]


def sensitivity(grades: Sequence[ProbeGrade]) -> Sensitivity:
    """Spearman's correlation of score and planted quality. A score that does not move correlates with nothing: 0."""
    pairs = [(one.quality, one.score) for one in grades if one.quality is not None and one.score is not None]
    qualities = [quality for quality, _ in pairs]
    if all_equal(qualities):
        return Sensitivity(None, len(pairs))
    return Sensitivity(spearman(qualities, [score for _, score in pairs]) or 0.0, len(pairs))


def noise(
    repeated: Sequence[Sequence[float | None]], threshold: float, full_reward: float = 1.0
) -> JudgeNoise | None:
    """The noise of grading one answer again; answers with fewer than two scores do not count.

    The variance is pooled over the answers. With one grade for each row, the difference of two mean rewards over n rows
    has the standard error sd * sqrt(2 / n) from this noise alone, and hides a gain below 1.96 of these.

    Args:
        full_reward: of right above empty answers. Without one, a gain is that of scores from 0 to 1.
    """
    graded = [[score for score in scores if score is not None] for scores in repeated]
    graded = [scores for scores in graded if len(scores) > 1]
    if not graded:
        return None
    squares = sum(statistics.variance(scores) * (len(scores) - 1) for scores in graded)
    deviation = math.sqrt(squares / sum(len(scores) - 1 for scores in graded))
    return JudgeNoise(
        answers=len(graded),
        repeats=max(map(len, graded)),
        standard_deviation=deviation,
        flip_rate=statistics.fmean(_flips(scores, threshold) for scores in graded),
        rows_hiding_gain=math.ceil(2 * (1.96 * deviation / (GAIN * (full_reward or 1.0))) ** 2),
    )


def _flips(scores: Sequence[float], threshold: float) -> float:
    """The share of pairs of grades of one answer of which one passes and one does not."""
    passed = sum(passes(score, threshold) for score in scores)
    return passed * (len(scores) - passed) / math.comb(len(scores), 2)


def parts(grades: Sequence[ProbeGrade]) -> list[PartOfGrader]:
    """The parts of a multi grader; empty for any other."""
    names = list(dict.fromkeys(name for one in grades for name in one.parts))
    return [_part(name, names, grades) for name in names]


def _part(name: str, names: Sequence[str], grades: Sequence[ProbeGrade]) -> PartOfGrader:
    scores = [score for one in grades if (score := one.parts.get(name)) is not None]
    # Where an answer has several fields, all other kinds change them together, so that parts agree by construction.
    apart = [one for one in grades if one.kind == ONE_FIELD] or grades
    correlations = {
        other: _correlation([(one.parts.get(name), one.parts.get(other)) for one in apart])
        for other in names[names.index(name) + 1 :]
    }
    return PartOfGrader(
        name=name,
        graded=len(scores),
        failed=sum(name in one.parts and one.parts[name] is None for one in grades),
        mean=statistics.fmean(scores) if scores else None,
        standard_deviation=statistics.stdev(scores) if len(scores) > 1 else None,
        correlation=_correlation([(one.parts.get(name), one.score) for one in grades]),
        inert=_is_inert(name, grades),
        correlations=correlations,
        redundant_with=[
            other for other, value in correlations.items() if value is not None and value >= REDUNDANT
        ],
    )


def _correlation(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    return pearson([a for a, _ in both], [b for _, b in both])


def _is_inert(name: str, grades: Sequence[ProbeGrade]) -> bool:
    """Whether a part gives one score to almost all probes, and to almost all of those that differ in quality only.

    Few probes are right, so the first alone would hold for a strict comparison; the second alone for a check of the
    format, in which right and wrong answers agree.
    """
    graded = [(score, one.quality) for one in grades if (score := one.parts.get(name)) is not None]
    planted = [score for score, quality in graded if quality is not None]
    return bool(graded) and _is_flat([score for score, _ in graded]) and (not planted or _is_flat(planted))


def _is_flat(scores: Sequence[float]) -> bool:
    ordered = sorted(scores)
    most = run = 1
    for before, after in itertools.pairwise(ordered):
        run = run + 1 if equal(before, after) else 1
        most = max(most, run)
    return most >= INERT * len(ordered)


def coverage(grades: Sequence[ProbeGrade], of_rows: int, *, is_complete: bool) -> AuditCoverage:
    lines = {one.line for one in grades}
    right = Counter(one.text for one in grades if one.kind == RIGHT)
    return AuditCoverage(
        rows=len(lines),
        of_rows=of_rows,
        with_right_answer=len({one.line for one in grades if one.kind == RIGHT}),
        never_graded=len(lines - {one.line for one in grades if one.score is not None}),
        most_frequent=max(right.values(), default=0),
        is_complete=is_complete,
    )


def judge(audit: GraderAuditReport) -> tuple[Outcome, str, list[str]]:
    """The verdict, one sentence of it, and what to change, most important first."""
    stops, unknown, cautions = _stops(audit), _unknown(audit), _cautions(audit)
    outcome: Outcome = "stop" if stops else "unknown" if unknown else "caution" if cautions else "go"
    word = {
        "stop": "Do not train with this grader",
        "unknown": "Unknown",
        "caution": "Train with caution",
        "go": "This grader can train",
    }[outcome]
    findings = [*stops, *unknown, *cautions]
    first = (findings or [(_summary(audit), "")])[0][0]
    more = len(findings) - 1
    others = f" There {'is' if more == 1 else 'are'} {counted(more, 'further finding')}." if more > 0 else ""
    return outcome, f"{word}: {first}.{others}", [advice for _, advice in findings]


def enough_rows(coverage: AuditCoverage) -> int:
    """The rows that an audit needs to decide about a job: 20, or all."""
    return min(ROWS_OF_A_GATE, coverage.of_rows)


def is_enough(coverage: AuditCoverage) -> bool:
    graded = coverage.rows - coverage.never_graded
    return coverage.is_complete and graded >= enough_rows(coverage)


def worst_kind(kinds: Sequence[KindOfProbe]) -> KindOfProbe | None:
    """The kind of wrong answers without knowledge that passes most often; None: none was graded."""
    free = [(one.share["expected"], one) for one in kinds if _is_free(one) and one.share is not None]
    return max(free, key=lambda pair: pair[0])[1] if free else None


def _is_free(kind: KindOfProbe) -> bool:
    return kind.expect == "low" and not kind.knows


def named(names: Sequence[str]) -> str:
    """At most three of the names, each cut, and how many there are beside them."""
    shown = ", ".join(name[:NAME_CHARACTERS] for name in names[:NAMED])
    return f"{shown} and {len(names) - NAMED} more" if len(names) > NAMED else shown


def _summary(audit: GraderAuditReport) -> str:
    wrong = audit.false_positives
    text = f"{wrong.wrong} of {wrong.answers} wrong answers pass"
    if audit.false_negatives.answers:
        right = audit.false_negatives
        text += f", and {right.answers - right.wrong} of {right.answers} right ones"
    if audit.sensitivity.correlation is not None:
        text += f"; score and quality correlate by {audit.sensitivity.correlation:.2f}"
    return text


Finding = tuple[str, str]


def _right(audit: GraderAuditReport) -> KindOfProbe | None:
    """The right answers in a form that is known."""
    return next((one for one in audit.kinds if one.kind == RIGHT and one.expect == "high"), None)


def _stops(audit: GraderAuditReport) -> list[Finding]:
    findings: list[Finding] = []
    right = _right(audit)
    if right is not None and right.failed > MANY_ERRORS * right.answers:
        findings.append(
            (
                f"{right.failed} of {right.answers} right answers could not be graded",
                f"Most often: {audit.grading.reasons[0]} If right answers have another form, send it as 'answer'.",
            )
        )
    missed = audit.false_negatives
    if missed.share is not None and missed.share["expected"] > MANY_ERRORS:
        findings.append(
            (
                f"{missed.wrong} of {missed.answers} right answers do not pass",
                "Send 'answer', a template of a right answer in the form that the grader reads. If it has that form "
                "already, repair the grader or its pass_threshold.",
            )
        )
    if free := _holes(audit, knows=False):
        findings.append(
            (
                f"a model can earn its reward without an answer ({named(free)})",
                f"Score these answers low, and add them as golden cases: {named(free)}.",
            )
        )
    correlation = audit.sensitivity.correlation
    if correlation is not None and correlation < INSENSITIVE:
        findings.append(
            (
                f"the score does not follow the quality of answers (Spearman {correlation:.2f}, below {INSENSITIVE})",
                "Compare with the reference of the row, or give the judge the reference and a scale with examples.",
            )
        )
    return findings


def _unknown(audit: GraderAuditReport) -> list[Finding]:
    if audit.grading.failed == audit.answers:
        return [
            (
                f"none of {audit.answers} answers could be graded",
                f"Most often: {audit.grading.reasons[0]} If answers have another form, send 'answer'.",
            )
        ]
    if _right(audit) is not None:
        return []
    if audit.coverage.with_right_answer:
        return [
            (
                "the form of a right answer is not known; send `answer`, such as <answer>{{item.answer}}</answer>",
                "Send 'answer', a template of a right answer in the form that the grader reads.",
            )
        ]
    return [
        (
            "no right answer is known, so it is not tested with any",
            "Send 'answer', a template such as {{item.answer}}, if the rows have a reference.",
        )
    ]


def _cautions(audit: GraderAuditReport) -> list[Finding]:
    findings: list[Finding] = []
    rows, constant = audit.coverage.with_right_answer, audit.coverage.most_frequent
    if _right(audit) is not None and rows > 1 and constant >= CONSTANT * rows:
        findings.append(
            (
                f"one answer is right on {constant} of {rows} rows, so a constant earns their reward",
                "Compare with a field of the row, or balance the rows.",
            )
        )
    if much := [
        _words(one.kind)
        for one in audit.kinds
        if _is_free(one) and one.kind != OTHER and one.mean_earned is not None and one.mean_earned > MUCH
    ]:
        findings.append(
            (
                f"answers without knowledge earn most of the reward of right ones ({named(much)})",
                f"Score these answers lower: {named(much)}.",
            )
        )
    if fooled := _holes(audit, knows=True):
        findings.append(
            (
                f"wrong answers that mention the reference pass ({named(fooled)})",
                "Compare the whole answer, or the text between tags that the prompt asks for, instead of looking for "
                "the reference anywhere in it.",
            )
        )
    return [*findings, *_of_right_answers(audit), *_of_judges(audit), *_of_parts(audit)]


def _of_right_answers(audit: GraderAuditReport) -> list[Finding]:
    findings: list[Finding] = []
    missed, right = audit.false_negatives, _right(audit)
    if missed.share is not None and FEW_ERRORS < missed.share["expected"] <= MANY_ERRORS:
        findings.append(
            (
                f"{missed.wrong} of {missed.answers} right answers do not pass",
                "Look at these rows among the worst examples: their references may be in another form.",
            )
        )
    correlation = audit.sensitivity.correlation
    if correlation is not None and INSENSITIVE <= correlation < SENSITIVE:
        findings.append(
            (
                f"the score follows the quality of answers loosely (Spearman {correlation:.2f}, below {SENSITIVE})",
                "Give partial credit, or a judge a scale with examples.",
            )
        )
    # Wrong answers of a form that the grader does not read, such as text where it reads JSON, do no harm ungraded.
    if right is not None and FEW_ERRORS * right.answers < right.failed <= MANY_ERRORS * right.answers:
        findings.append(
            (
                f"{right.failed} of {right.answers} right answers could not be graded, which trains nothing",
                f"Most often: {audit.grading.reasons[0]}",
            )
        )
    return findings


def _of_judges(audit: GraderAuditReport) -> list[Finding]:
    measured = audit.noise
    if measured is None or measured.flip_rate <= FLIPS:
        return []
    return [
        (
            f"two grades of the same answer disagree in {100 * measured.flip_rate:.0f} % of the cases",
            f"Ask for less at once, set temperature 0, or average several judges. Below {measured.rows_hiding_gain} "
            f"validation rows the noise hides a gain of {100 * GAIN:.0f} %.",
        )
    ]


def _of_parts(audit: GraderAuditReport) -> list[Finding]:
    findings: list[Finding] = []
    if inert := [part.name for part in audit.parts if part.inert]:
        findings.append(
            (
                f"of its parts, {named(inert)} gave almost all answers the same score",
                f"Remove or repair {named(inert)}: such a part adds no signal.",
            )
        )
    pairs = [
        f"{part.name[:NAME_CHARACTERS]} with {other[:NAME_CHARACTERS]}"
        for part in audit.parts
        for other in part.redundant_with
    ]
    if pairs:
        shown = "; ".join(pairs[:NAMED]) + (f" and {len(pairs) - NAMED} more" if len(pairs) > NAMED else "")
        findings.append((f"parts agree on these answers ({shown})", f"Leave one of them out: {shown}."))
    return findings


def _notes(audit: GraderAuditReport) -> list[str]:
    return [
        f"Answers of the kind {_words(one.kind)} pass on {one.passed} of {one.answers} rows, as with most graders that "
        "read an answer out of a text."
        for one in audit.kinds
        if one.kind in NOTED and one.share is not None and one.share["expected"] > HOLE
    ]


def _holes(audit: GraderAuditReport, *, knows: bool) -> list[str]:
    """Kinds of wrong answers that pass on most rows, in words."""
    return [
        _words(one.kind)
        for one in audit.kinds
        if one.expect == "low"
        and one.knows == knows
        and one.share is not None
        and one.share["expected"] > HOLE
    ]


def _words(kind: str) -> str:
    """A kind of probe in a sentence: its name has underscores."""
    return kind.replace("_", " ")
