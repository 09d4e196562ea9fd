"""The report of a grader audit, from the scores of probes. Pure functions.

The probes of one row are not independent, so the unit of statistics is the row (core/statistics.py, `interval`).
docs/howto/graders.md explains the report.
"""

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Field

from core.jobs.verdict import counted
from core.results.preview_report import Grading, spread
from core.rewards import all_equal, equal
from core.statistics import ShareEstimate, interval, pearson, spearman

Expect = Literal["high", "low", "either"]
Outcome = Literal["go", "caution", "stop"]

# Of the rows: a kind of wrong answer that scores high on more of them is a hole, which a model finds.
HOLE = 0.5
# Of all wrong answers, or of all right ones.
FEW_ERRORS = 0.05
# Spearman's correlation of score and quality.
SENSITIVE, INSENSITIVE = 0.8, 0.6
# Of the answers that share one score: a part of a `multi` above it hardly tells answers apart.
INERT = 0.95
# Correlation of two parts of a `multi` above which one of them adds nothing.
REDUNDANT = 0.95
# Of two grades of one answer: a judge that decides otherwise more often is noise.
FLIPS = 0.1
GAIN = 0.05  # of the mean reward, which a run should be able to show
WORST, SHOWN_CHARACTERS, REASONS = 10, 500, 3
RIGHT = "right"


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


@dataclass(frozen=True)
class ErrorRate:
    """Answers on the wrong side of the pass threshold, among the graded ones. null: none was graded."""

    wrong: int
    answers: int
    share: ShareEstimate | None


@dataclass(frozen=True)
class KindOfProbe:
    """The scores of one kind of probe. `expect`: low, high, or either, which counts as no error."""

    kind: str
    expect: Expect
    answers: int
    failed: Annotated[int, Field(description="Could not be graded.")]
    passed: int
    share: Annotated[ShareEstimate | None, Field(description="That pass, of the graded answers.")]
    mean_score: float | None


@dataclass(frozen=True)
class ExampleOfError:
    """An answer on the wrong side of the pass threshold; its text is cut at 500 characters."""

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
    """The scores of equal answers, each graded `repeats` times with other seeds and with its labels reversed."""

    answers: int
    repeats: int
    standard_deviation: Annotated[float, Field(description="Of the scores of one answer.")]
    flip_rate: Annotated[
        float, Field(description="Probability that two grades of an answer pass and fail it.")
    ]
    rows_hiding_gain: Annotated[
        int,
        Field(description="Validation rows up to which this noise hides a gain of 0.05 in the mean reward."),
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
    correlations: Annotated[dict[str, float | None], Field(description="With the other parts.")]
    redundant_with: list[str]


@dataclass(frozen=True)
class AuditCoverage:
    """The rows behind the report. `never_graded`: rows of which no probe could be graded."""

    rows: int
    of_rows: Annotated[int, Field(description="In the file.")]
    with_right_answer: int
    never_graded: int


@dataclass(frozen=True)
class GraderAuditReport:
    """The results of a grader audit. Shares are from 0 to 1, with 95 % confidence intervals."""

    verdict: Outcome
    sentence: str
    advice: list[str]
    pass_threshold: float
    answers: int
    false_positives: Annotated[ErrorRate, Field(description="Of the answers that should score low.")]
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
) -> GraderAuditReport:
    """Build the report.

    Args:
        grades: of all probes; at least one.
        of_rows: rows of the file.
        repeated: the scores of each answer that judges graded several times.
        tokens: of judges.
    """
    audit = GraderAuditReport(
        verdict="go",
        sentence="",
        advice=[],
        pass_threshold=pass_threshold,
        answers=len(grades),
        false_positives=error_rate(
            [one for one in grades if one.expect == "low"], pass_threshold, above=True
        ),
        false_negatives=error_rate(
            [one for one in grades if one.expect == "high"], pass_threshold, above=False
        ),
        worst=worst(grades, pass_threshold),
        kinds=kinds(grades, pass_threshold),
        sensitivity=sensitivity(grades),
        noise=noise(repeated, pass_threshold),
        parts=parts(grades),
        grading=Grading(
            seconds=spread([one.seconds for one in grades]),
            tokens=tokens,
            failed=sum(one.score is None for one in grades),
            reasons=[
                reason[:SHOWN_CHARACTERS]
                for reason, _ in Counter(one.reason for one in grades if one.score is None).most_common(
                    REASONS
                )
            ],
        ),
        coverage=coverage(grades, of_rows),
    )
    knowing = {one.kind for one in grades if one.knows}
    verdict, sentence, advice = judge(audit, knowing)
    return replace(audit, verdict=verdict, sentence=sentence, advice=advice)


def passes(score: float, threshold: float) -> bool:
    return score >= threshold or equal(score, threshold)


def error_rate(grades: Sequence[ProbeGrade], threshold: float, *, above: bool) -> ErrorRate:
    """The share of graded answers that pass (`above`), or that do not."""
    lines: dict[int, list[bool]] = defaultdict(list)
    for one in grades:
        if one.score is not None:
            lines[one.line].append(passes(one.score, threshold) == above)
    answers = sum(map(len, lines.values()))
    wrong = sum(map(sum, lines.values()))
    share = interval([sum(hits) for hits in lines.values()], [*map(len, lines.values())]) if answers else None
    return ErrorRate(wrong, answers, share)


def kinds(grades: Sequence[ProbeGrade], threshold: float) -> list[KindOfProbe]:
    by_kind: dict[str, list[ProbeGrade]] = defaultdict(list)
    for one in grades:
        by_kind[one.kind].append(one)
    return [_kind(kind, of_kind, threshold) for kind, of_kind in by_kind.items()]


def _kind(kind: str, of_kind: Sequence[ProbeGrade], threshold: float) -> KindOfProbe:
    scores = [one.score for one in of_kind if one.score is not None]
    passed = error_rate(of_kind, threshold, above=True)
    return KindOfProbe(
        kind=kind,
        expect=of_kind[0].expect,
        answers=len(of_kind),
        failed=len(of_kind) - len(scores),
        passed=passed.wrong,
        share=passed.share,
        mean_score=statistics.fmean(scores) if scores else None,
    )


def worst(grades: Sequence[ProbeGrade], threshold: float) -> list[ExampleOfError]:
    """The answers that are furthest on the wrong side: first one of each kind, then the second ones, ..."""
    by_kind: dict[str, list[ProbeGrade]] = defaultdict(list)
    for one in sorted(grades, key=lambda one: -_error(one, threshold)):
        if _error(one, threshold) >= 0:
            by_kind[one.kind].append(one)
    ranked = [
        (rank, -_error(one, threshold), one)
        for of_kind in by_kind.values()
        for rank, one in enumerate(of_kind)
    ]
    ranked.sort(key=lambda entry: entry[:2])
    return [
        ExampleOfError(
            one.kind,
            one.expect,
            one.line,
            one.text[:SHOWN_CHARACTERS],
            one.score,
            one.reason[:SHOWN_CHARACTERS],
        )
        for _, _, one in ranked[:WORST]
        if one.score is not None
    ]


def _error(probe: ProbeGrade, threshold: float) -> float:
    """How far a score is on the wrong side of the threshold; -1: it is on the right side, or there is nprobe."""
    if (
        probe.score is None
        or probe.expect == "either"
        or passes(probe.score, threshold) == (probe.expect == "high")
    ):
        return -1.0
    return abs(probe.score - threshold)


def sensitivity(grades: Sequence[ProbeGrade]) -> Sensitivity:
    """Spearman's correlation of score and planted quality. A score that does not move correlates with nothing: 0."""
    pairs = [(one.quality, one.score) for one in grades if one.quality is not None and one.score is not None]
    qualities = [quality for quality, _ in pairs]
    if all_equal(qualities):
        return Sensitivity(None, len(pairs))
    return Sensitivity(spearman(qualities, [score for _, score in pairs]) or 0.0, len(pairs))


def noise(repeated: Sequence[Sequence[float | None]], threshold: float) -> JudgeNoise | None:
    """The noise of grading one answer again; answers with fewer than two scores do not count.

    The variance is pooled over the answers. With one grade for each row, the difference of two mean rewards over n rows
    has the standard error sd * sqrt(2 / n) from this noise alone, and hides a gain below 1.96 of these.
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
        rows_hiding_gain=math.ceil(2 * (1.96 * deviation / GAIN) ** 2),
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
    correlations = {
        other: _correlation([(one.parts.get(name), one.parts.get(other)) for one in grades])
        for other in names
        if other != name
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
            other for other, value in correlations.items() if value is not None and abs(value) >= REDUNDANT
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


def coverage(grades: Sequence[ProbeGrade], of_rows: int) -> AuditCoverage:
    lines = {one.line for one in grades}
    return AuditCoverage(
        rows=len(lines),
        of_rows=of_rows,
        with_right_answer=len({one.line for one in grades if one.kind == RIGHT}),
        never_graded=len(lines - {one.line for one in grades if one.score is not None}),
    )


def judge(audit: GraderAuditReport, knowing: set[str]) -> tuple[Outcome, str, list[str]]:
    """The verdict, one sentence of it, and what to change, most important first.

    Args:
        knowing: kinds whose answers have the right values in them. A model earns nothing for free with these.
    """
    stops, cautions = _stops(audit, knowing), _cautions(audit, knowing)
    outcome: Outcome = "stop" if stops else "caution" if cautions else "go"
    word = {
        "stop": "Do not train with this grader",
        "caution": "Train with caution",
        "go": "This grader can train",
    }[outcome]
    first = (stops or cautions or [(_summary(audit), "")])[0][0]
    more = len(stops) + len(cautions) - 1
    others = f" There {'is' if more == 1 else 'are'} {counted(more, 'further finding')}." if more > 0 else ""
    return outcome, f"{word}: {first}.{others}", [advice for _, advice in (*stops, *cautions)]


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


def _stops(audit: GraderAuditReport, knowing: set[str]) -> list[Finding]:
    findings: list[Finding] = []
    # Of right answers, if any are known: wrong ones may have another form than the grader reads, such as JSON.
    asked = next((one for one in audit.kinds if one.kind == RIGHT), None)
    failed, answers = (asked.failed, asked.answers) if asked else (audit.grading.failed, audit.answers)
    if failed > answers / 2:
        findings.append(
            (
                f"{failed} of {answers} {'right ' if asked else ''}answers could not be graded",
                f"Most often: {audit.grading.reasons[0]} If right answers have another form, send it as 'answer'.",
            )
        )
    missed = audit.false_negatives
    if missed.share is not None and missed.share["expected"] > HOLE:
        findings.append(
            (
                f"{missed.wrong} of {missed.answers} right answers do not pass",
                "Send 'answer', a template of a right answer in the form that the grader reads. If it has that form "
                "already, repair the grader or its pass_threshold.",
            )
        )
    if free := _holes(audit, lambda kind: kind not in knowing):
        findings.append(
            (
                f"a model can earn its reward without an answer ({', '.join(free)})",
                f"Score these answers low, and add them as golden cases: {', '.join(free)}.",
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


def _cautions(audit: GraderAuditReport, knowing: set[str]) -> list[Finding]:
    findings: list[Finding] = []
    if fooled := _holes(audit, lambda kind: kind in knowing):
        findings.append(
            (
                f"wrong answers that mention the reference pass ({', '.join(fooled)})",
                "Compare the whole answer, or the text between tags that the prompt asks for, instead of looking for "
                "the reference anywhere in it.",
            )
        )
    rate = audit.false_positives.share
    if rate is not None and rate["expected"] > FEW_ERRORS and not fooled:
        findings.append(
            (
                f"{audit.false_positives.wrong} of {audit.false_positives.answers} wrong answers pass",
                "Look at the worst examples, and raise pass_threshold or tighten the comparison.",
            )
        )
    missed = audit.false_negatives
    if missed.share is not None and FEW_ERRORS < missed.share["expected"] <= HOLE:
        findings.append(
            (
                f"{missed.wrong} of {missed.answers} right answers do not pass",
                "Look at these rows among the worst examples: their references may be in another form.",
            )
        )
    correlation = audit.sensitivity.correlation
    if correlation is None:
        findings.append(
            (
                "no right answer is known, so it is not tested with any",
                "Send 'answer', a template such as {{item.answer}}.",
            )
        )
    elif INSENSITIVE <= correlation < SENSITIVE:
        findings.append(
            (
                f"the score follows the quality of answers loosely (Spearman {correlation:.2f}, below {SENSITIVE})",
                "Give partial credit, or a judge a scale with examples.",
            )
        )
    if audit.grading.failed > FEW_ERRORS * audit.answers:
        findings.append(
            (
                f"{audit.grading.failed} of {audit.answers} answers could not be graded, which trains nothing",
                f"Make the grader score any text. Most often: {audit.grading.reasons[0]}",
            )
        )
    return [*findings, *_of_judges(audit), *_of_parts(audit)]


def _of_judges(audit: GraderAuditReport) -> list[Finding]:
    measured = audit.noise
    if measured is None or measured.flip_rate <= FLIPS:
        return []
    return [
        (
            f"two grades of the same answer disagree in {100 * measured.flip_rate:.0f} % of the cases",
            f"Ask for less at once, set temperature 0, or average several judges. Below {measured.rows_hiding_gain} "
            f"validation rows the noise hides a gain of {GAIN}.",
        )
    ]


def _of_parts(audit: GraderAuditReport) -> list[Finding]:
    findings: list[Finding] = []
    if inert := [part.name for part in audit.parts if part.inert]:
        findings.append(
            (
                f"of its parts, {', '.join(inert)} gave almost all answers the same score",
                f"Remove or repair {', '.join(inert)}: such a part adds no signal.",
            )
        )
    pairs = {tuple(sorted((part.name, other))) for part in audit.parts for other in part.redundant_with}
    if pairs:
        shown = "; ".join(" and ".join(pair) for pair in sorted(pairs))
        findings.append((f"parts say the same ({shown})", f"Leave one of them out: {shown}."))
    return findings


def _holes(audit: GraderAuditReport, counts: Callable[[str], bool]) -> list[str]:
    """Kinds of wrong answers that pass on most rows."""
    return [
        one.kind
        for one in audit.kinds
        if one.expect == "low" and counts(one.kind) and one.share is not None and one.share["expected"] > HOLE
    ]
