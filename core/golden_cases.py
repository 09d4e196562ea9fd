"""Golden cases: answers with the scores that all versions of a stored grader must give them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from core.database import pages
from core.database.engine import Work
from core.database.pages import Page
from core.database.tables import GoldenCase, StoredGrader
from core.errors import GoldenCaseNotFound, InvalidRequest
from core.rewards import equal

MAX_CASES = 200  # of a grader: a check runs all of them in one request
MAX_CASE_BYTES = 256 << 10
MAX_BYTES = 8 << 20  # of all cases of a grader


@dataclass(frozen=True)
class NewCase:
    """An answer, its row, and the range of its score."""

    sample: dict[str, Any]
    item: dict[str, Any]
    min_score: float | None
    max_score: float | None
    note: str = ""
    rollout_id: str | None = None
    sha256: str = field(init=False)
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        content = json.dumps([self.sample, self.item], sort_keys=True, ensure_ascii=False).encode()
        object.__setattr__(self, "sha256", hashlib.sha256(content).hexdigest())
        object.__setattr__(self, "bytes", len(content))


def passes(case: GoldenCase, score: float | None) -> bool:
    """Whether the score is in the range of the case. An answer without a score fails."""
    if score is None:
        return False
    low, high = case.min_score, case.max_score
    is_high_enough = low is None or score >= low or equal(score, low)
    return is_high_enough and (high is None or score <= high or equal(score, high))


def add(work: Work, grader: StoredGrader, cases: Sequence[NewCase]) -> list[GoldenCase]:
    """Add the cases. One of the same sample and item replaces the expectation and the note of the earlier one.

    Raises:
        InvalidRequest: a case is too large, or the grader would have too many cases or too many bytes of them.
    """
    session = work.session
    pages.keep_order(session, grader.project_id)
    known = {row.sha256: row for row in session.scalars(_of(grader))}
    made: dict[str, GoldenCase] = {}
    for number, case in enumerate(cases):
        if case.bytes > MAX_CASE_BYTES:
            raise InvalidRequest(
                f"The sample and the item have {case.bytes:,} bytes of JSON, at most {MAX_CASE_BYTES:,} are supported.",
                param=f"cases[{number}]",
            )
        row = known.get(case.sha256)
        if row is None:
            row = GoldenCase(
                grader_id=grader.id,
                sha256=case.sha256,
                sample=case.sample,
                item=case.item,
                bytes=case.bytes,
                rollout_id=case.rollout_id,
            )
            session.add(row)
            known[case.sha256] = row
        row.min_score, row.max_score, row.note = case.min_score, case.max_score, case.note
        made[case.sha256] = row
    size = sum(row.bytes for row in known.values())
    if len(known) > MAX_CASES or size > MAX_BYTES:
        raise InvalidRequest(
            f"The grader '{grader.name}' would have {len(known)} golden cases with {size:,} bytes, and at most "
            f"{MAX_CASES} cases and {MAX_BYTES:,} bytes are supported: delete some, or add fewer.",
            param="cases",
        )
    session.flush()
    work.record("grader.cases_added", grader.id, {"name": grader.name, "cases": len(made)})
    return list(made.values())


def get(session: Session, grader: StoredGrader, case_id: str) -> GoldenCase:
    """Return the case with this id, or raise GoldenCaseNotFound."""
    found = session.scalar(_of(grader).where(GoldenCase.id == case_id))
    if found is None:
        raise GoldenCaseNotFound(case_id)
    return found


def page(session: Session, grader: StoredGrader, *, after: str | None, limit: int) -> Page[GoldenCase]:
    """Oldest first."""
    return pages.oldest_first(session, _of(grader), GoldenCase, after=after, limit=limit, owner=grader.id)


def everything(session: Session, grader: StoredGrader) -> Sequence[GoldenCase]:
    """Oldest first."""
    return session.scalars(_of(grader).order_by(GoldenCase.seq)).all()


def remove(work: Work, grader: StoredGrader, case: GoldenCase) -> None:
    pages.delete_row(work.session, case, owner=grader.id)
    work.record("grader.case_deleted", grader.id, {"name": grader.name, "case": case.id})


def _of(grader: StoredGrader) -> Select[GoldenCase]:
    return select(GoldenCase).where(GoldenCase.grader_id == grader.id)
