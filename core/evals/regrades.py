"""Regrades: the stored answers of a job scored by another grader (docs/howto/rollouts.md).

A regrade is an eval run whose rows are rollouts, so a worker claims, resumes and records it as one
(core/evals/lifecycle.py). It belongs to no eval: its `eval_id` is the id of its job, and its `data_source` has the
grader. The job and its scores do not change.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from core.database.ids import new_id
from core.database.pages import Page
from core.database.tables import EvalRun, Job, RolloutPage
from core.errors import EvalNotFound, InvalidRequest
from core.evals import summary
from core.evals.items import Item
from core.evals.rows import EvalRow
from core.results import evals, rollouts, what_if
from core.results.rollout_filters import Wanted
from core.results.rollouts import Split
from core.results.what_if import Rescored
from core.rewards import equal
from core.storage.store import BlobStore

SOURCE = "regraft.rollouts"

Change = Literal["flipped", "higher", "lower", "same", "gained", "lost"]
"""flipped: passed before and not now, or the reverse. gained, lost: only one of the graders gave a score."""


@dataclass(frozen=True)
class SelectedSteps:
    """The rollouts of a job up to the newest step at the time of the request. None: both splits."""

    first_step: int
    last_step: int
    split: Split | None


def new(
    job: Job,
    grader: dict[str, Any],
    selection: SelectedSteps,
    *,
    pages: Sequence[RolloutPage],
    name: str,
    budget: Any,
) -> EvalRun:
    """A regrade of the rollouts in these pages of the job. `grader` is a specification as it is stored."""
    return EvalRun(
        id=new_id("regrade_"),
        eval_id=job.id,
        project_id=job.project_id,
        name=name,
        data_source={
            "type": SOURCE,
            **asdict(selection),
            "pages": [(page.step, page.split, page.samples) for page in pages],
            "grader": grader,
            "parse_json": job.body.get("response_format") is not None,
            "pass_threshold": evals.pass_threshold(grader),
            "pass_threshold_before": evals.pass_threshold(job.body["grader"]),
        },
        total=sum(page.samples for page in pages),
        budget=budget,
        summary=summary.empty([grader["name"]]),
    )


def is_regrade(run: EvalRun) -> bool:
    return bool(run.data_source.get("type") == SOURCE)


def get(session: Session, job: Job, regrade_id: str) -> EvalRun:
    """Raises EvalNotFound: the job has no such regrade."""
    found = session.scalar(_of(job).where(EvalRun.id == regrade_id))
    if found is None:
        raise EvalNotFound("regrade", regrade_id)
    return found


def page(session: Session, job: Job, *, after: str | None, limit: int) -> Page[EvalRun]:
    """The regrades of a job, newest first.

    Raises:
        InvalidRequest: `after` is none of them.
    """
    statement = _of(job)
    if after is not None:
        seq = session.scalar(select(EvalRun.seq).where(EvalRun.id == after, EvalRun.eval_id == job.id))
        if seq is None:
            raise InvalidRequest(f"No item with id '{after}' in this list.", param="after")
        statement = statement.where(EvalRun.seq < seq)
    found = session.scalars(statement.order_by(EvalRun.seq.desc()).limit(limit + 1)).all()
    return Page(list(found[:limit]), has_more=len(found) > limit)


def _of(job: Job) -> Select[EvalRun]:
    return select(EvalRun).where(EvalRun.eval_id == job.id, EvalRun.deleted_at.is_(None))


def pages(session: Session, run: EvalRun) -> list[tuple[int, RolloutPage]]:
    """The pages that are still there, each with the number of answers before it at the time of the request.

    So a page that retention deletes meanwhile moves no line of another one.
    """
    source = run.data_source
    found = rollouts.pages(
        session,
        run.eval_id,
        first_step=source["first_step"],
        last_step=source["last_step"],
        split=source["split"],
    )
    present = {(page.step, page.split): page for page in found}
    numbered, before = [], 0
    for step, split, samples in source["pages"]:
        if (step, split) in present:
            numbered.append((before, present[step, split]))
        before += samples
    return numbered


def rows(blobs: BlobStore, numbered: Iterable[tuple[int, RolloutPage]]) -> Iterator[EvalRow]:
    """The answers as rows, with the item that the job's grader read. Those of a page without its blob are left out."""
    for before, one in numbered:
        for number, row in enumerate(rollouts.find(blobs, [one], Wanted()), 1):
            item = {**(row["item"] or {}), "messages": row["messages"]}
            yield EvalRow(before + number, item, rollout=row)


def comparison(run: EvalRun, items: Iterable[Item]) -> dict[str, Any]:
    """The changes of a finished regrade, as `what_if.ScoreComparison` counts them."""
    answers = [_rescored(item) for item in items]
    source = run.data_source
    found = what_if.compare(
        answers, source["pass_threshold"], threshold_before=source["pass_threshold_before"]
    )
    return asdict(found)


def _rescored(item: Item) -> Rescored:
    stored = item["sample"]["rollout"]
    return Rescored((stored["step"], stored["split"], stored["group"]), stored["score"], _score(item))


def _score(item: Item) -> float | None:
    score: float | None = item["results"][0]["score"] if item["results"] else None
    return score


def changes(run: EvalRun, item: Item) -> frozenset[Change]:
    """The changes of one answer's score."""
    before, after = item["sample"]["rollout"]["score"], _score(item)
    if before is None or after is None:
        if before is after:
            return frozenset({"same"})
        return frozenset({"gained" if before is None else "lost"})
    source = run.data_source
    found: set[Change] = set()
    if (before >= source["pass_threshold_before"]) != (after >= source["pass_threshold"]):
        found.add("flipped")
    if equal(before, after):
        found.add("same")
    else:
        found.add("higher" if after > before else "lower")
    return frozenset(found)
