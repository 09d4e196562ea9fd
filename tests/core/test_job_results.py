"""The result of a job is that of its delivered checkpoint, wherever it is shown."""

from typing import Any

import pytest
from sqlalchemy.orm import Session

from core.database.tables import Checkpoint, Job, TunedModel
from core.jobs.verdict import Verdict
from core.results.job_results import JobResult, delivered_steps, results
from tests import factories

pytestmark = pytest.mark.both_databases

VERDICT = Verdict("improved", 0.4, 0.94, 0.54, 0.3, 0.7, 11, 0, 5, 16, 0, step=2)


def job(session: Session, *steps: dict[str, Any], delivers: int | None = None, **fields: Any) -> Job:
    """A job with the metrics of its steps from 0 on, whose model is the checkpoint of the step `delivers`."""
    project = factories.project(session)
    made = factories.job(session, project, **fields)
    for number, metrics in enumerate(steps):
        factories.step(session, made, number, **metrics)
    if delivers is not None:
        point = Checkpoint(job_id=made.id, step=delivers, epoch=1, blob_prefix="p")
        session.add(point)
        session.flush()
        made.fine_tuned_model = f"ft:tiny:acme::{made.id}"
        session.add(
            TunedModel(
                name=made.fine_tuned_model,
                project_id=project.id,
                job_id=made.id,
                base_model="tiny",
                checkpoint_id=point.id,
            )
        )
    session.flush()
    return made


def rewards(*values: float) -> list[dict[str, Any]]:
    return [{"full_valid_mean_reward": value} for value in values]


def test_a_result_is_that_of_the_delivered_checkpoint_not_of_the_last_validation(session: Session) -> None:
    judged = job(session, *rewards(0.4, 0.6, 0.9, 0.83), delivers=2, verdict=VERDICT.to_row())
    unjudged = job(session, *rewards(0.25, 0.75, 0.5), delivers=1)
    losses = job(session, {}, {"full_valid_loss": 2.0}, {"full_valid_loss": 3.0}, delivers=1)

    found = results(session, [judged, unjudged, losses])

    assert found == {
        judged.id: JobResult(2, "full_valid_mean_reward", 0.4, 0.94),
        unjudged.id: JobResult(1, "full_valid_mean_reward", 0.25, 0.75),
        losses.id: JobResult(1, "full_valid_loss", None, 2.0),
    }
    assert delivered_steps(session, [judged, unjudged, losses]) == {
        judged.id: 2,
        unjudged.id: 1,
        losses.id: 1,
    }


def test_a_job_that_delivered_nothing_has_no_result(session: Session) -> None:
    running = job(session, *rewards(0.4, 0.6), status="running")

    assert results(session, [running]) == {}
    assert results(session, []) == {}
