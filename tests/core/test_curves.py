"""The validations of many jobs as short curves."""

from typing import Any

import pytest
from sqlalchemy.orm import Session

from core.database.tables import Job
from core.results.curves import MAX_POINTS, curves
from tests import factories

pytestmark = pytest.mark.both_databases


def job(session: Session, *steps: dict[str, Any], **fields: Any) -> Job:
    made = factories.job(session, factories.project(session), **fields)
    for number, metrics in enumerate(steps):
        factories.step(session, made, number, total_steps=10, **metrics)
    session.flush()
    return made


def test_a_curve_has_the_validations_and_the_last_step(session: Session) -> None:
    rewards = [0.25, None, 0.5]
    one = job(session, *({"full_valid_mean_reward": reward, "full_valid_loss": None} for reward in rewards))
    losses = job(session, {"train_loss": 3.0}, {"full_valid_loss": 2.0}, method="supervised")
    none = job(session)

    found = curves(session, [losses, one, none])

    assert [curve.job_id for curve in found] == [losses.id, one.id, none.id]
    assert [curve.metric for curve in found] == ["full_valid_loss", "full_valid_mean_reward", None]
    assert [list(curve.points) for curve in found] == [[(1, 2.0)], [(0, 0.25), (2, 0.5)], []]
    assert [(curve.step, curve.total_steps) for curve in found] == [(1, 10), (2, 10), (None, None)]


def test_a_long_curve_is_thinned_and_keeps_its_ends(session: Session) -> None:
    made = job(session, *({"full_valid_mean_reward": float(number)} for number in range(200)))

    [curve] = curves(session, [made])

    assert len(curve.points) == MAX_POINTS
    assert (curve.points[0], curve.points[-1]) == ((0, 0.0), (199, 199.0))
    steps = [step for step, _ in curve.points]
    assert steps == sorted(set(steps))
