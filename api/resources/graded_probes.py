"""Grades the probes of an audit."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from api.http.deps import Service
from api.http.judge_usage import booked_judges
from api.resources.graders import TIMEOUT_S
from core.errors import InvalidRequest
from core.results import evals, grader_audit_report
from core.results.grader_audit_report import GraderAuditReport, ProbeGrade
from graders.build import calls_servers, judge_parts
from graders.exploits.corpus import AuditedRow, GraderProbe, probes
from graders.exploits.repeats import repeated
from graders.judge.usage import TokenLedger
from graders.run import grade_all
from graders.spec import GraderSpec, dump
from graders.types import ErrorKind, Grade, GraderWrapper, Item, Sample

AT_ONCE, AT_ONCE_OF_SERVERS = 64, 8
REPEATED_ROWS = 10  # whose right and wrong answers judges grade several times
REPEATED_KINDS = ("right", "half_right", "other_reference")
BUDGET_USED = "the budget of the audit is used up"


@dataclass(frozen=True)
class AuditInputs:
    """The rows of an audit, and how it grades."""

    spec: GraderSpec
    rows: Sequence[AuditedRow]
    of_rows: int
    seed: int = 0
    repeats: int = 0  # of the answers that judges grade several times; 0: none
    max_tokens: int | None = None  # of judges

    def probes(self) -> list[GraderProbe]:
        return list(probes(self.rows, self.seed))

    def repeated_probes(self, probes_N: Sequence[GraderProbe]) -> list[GraderProbe]:
        """The probes that judges grade several times."""
        if not self.repeats or not any(judge_parts(self.spec)):
            return []
        number = min(REPEATED_ROWS, len(self.rows))
        lines = {row.line for row in random.Random(self.seed).sample(list(self.rows), number)}
        return [probe for probe in probes_N if probe.kind in REPEATED_KINDS and probe.line in lines]


async def audit(
    inputs: AuditInputs,
    service: Service,
    project_id: str,
    *,
    begun: Callable[[int], None],
    graded: Callable[[], None],
) -> GraderAuditReport:
    """Grade all probes, and those that judges repeat.

    Calls `begun` with the number of grades once the probes are made, and `graded` after each grade.

    Raises:
        InvalidRequest: the budget was used up before the first grade.
    """
    probes_N = inputs.probes()
    repeated_N = inputs.repeated_probes(probes_N)
    begun(len(probes_N) + inputs.repeats * len(repeated_N))
    async with booked_judges(service, project_id, None) as ledger:
        grade = partial(_grades, inputs, service, project_id, ledger, graded)
        grades = await grade(inputs.spec, probes_N)
        repeats = [
            await grade(repeated(inputs.spec, number), repeated_N)
            for number in range(inputs.repeats if repeated_N else 0)
        ]
        tokens = ledger.total
    pairs = [(probe, one) for probe, one in zip(probes_N, grades, strict=True) if one is not None]
    if not pairs:
        raise InvalidRequest(f"No answer was graded: {BUDGET_USED}.", param="budget", code="budget_exceeded")
    return grader_audit_report.report(
        [probe_grade(*pair) for pair in pairs],
        pass_threshold=evals.pass_threshold(dump(inputs.spec)),
        of_rows=inputs.of_rows,
        repeated=[
            [one.score for one in grades_R if one is not None] for grades_R in zip(*repeats, strict=True)
        ],
        tokens=tokens,
        is_complete=len(pairs) == len(probes_N),
    )


async def _grades(
    inputs: AuditInputs,
    service: Service,
    project_id: str,
    ledger: TokenLedger,
    graded: Callable[[], None],
    spec: GraderSpec,
    probes_N: Sequence[GraderProbe],
) -> list[Grade | None]:
    """Grade the probes; None for those that the budget leaves out."""
    pairs = [(Sample.from_text(probe.text, parse_json=True), probe.item) for probe in probes_N]
    async with service.backends.open(spec, owner=project_id, ledger=ledger) as grader:
        within = _WithinBudget(grader, ledger, inputs.max_tokens)
        at_once = AT_ONCE_OF_SERVERS if calls_servers(spec) else AT_ONCE
        grades = await grade_all(within, pairs, concurrency=at_once, timeout_s=TIMEOUT_S, graded=graded)
    left_out = set(map(id, within.left_out))
    return [
        None if id(sample) in left_out else grade for (sample, _), grade in zip(pairs, grades, strict=True)
    ]


@dataclass(frozen=True)
class _WithinBudget(GraderWrapper):
    """A grader that leaves out answers once judges have used `max_tokens`; requests in flight complete."""

    ledger: TokenLedger
    max_tokens: int | None
    left_out: list[Sample] = field(default_factory=list)

    async def grade(self, sample: Sample, item: Item) -> Grade:
        if self.max_tokens is not None and self.ledger.total >= self.max_tokens:
            self.left_out.append(sample)
            return Grade(None, BUDGET_USED, ErrorKind.other_error)
        return await self.grader.grade(sample, item)


def probe_grade(probe: GraderProbe, grade: Grade) -> ProbeGrade:
    """The grade of a probe as the report reads it."""
    return ProbeGrade(
        kind=probe.kind,
        expect=probe.expect,
        knows=probe.knows,
        quality=probe.quality,
        line=probe.line,
        text=probe.text,
        score=grade.score,
        reason=grade.reason,
        parts={name: part.score for name, part in grade.sub_grades.items()},
        seconds=grade.seconds,
        is_guess=probe.is_guess,
    )
