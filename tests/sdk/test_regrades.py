"""client.regrades against the service and a worker that takes its runs."""

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest
import regraft
from regraft import AsyncRegraft, Regraft

from tests.present import untyped
from tests.sdk.conftest import GRADER
from worker.evals.runner import EvalRunner

LENIENT = GRADER | {"operation": "ilike"}


def test_stored_answers_are_regraded_and_compared(
    client: Regraft, graded_job: str, runner: EvalRunner, make_async: Callable[[], AsyncRegraft]
) -> None:
    seen: list[str] = []

    def work(seconds: float) -> None:
        runner.run_waiting()

    made = client.regrades.create(graded_job, LENIENT, name="lenient", split="train")

    done = client.regrades.wait(
        graded_job,
        made.id,
        progress=lambda one: seen.append(one.status),
        sleep=work,
    )

    assert (made.status, done.status, seen) == ("queued", "completed", ["queued"])
    assert done.comparison is not None
    assert (done.comparison.before.mean, done.comparison.after.mean) == (0.5, 1.0)
    assert [one.id for one in client.regrades.list(graded_job)] == [made.id]
    [flipped] = client.regrades.answers(graded_job, made.id, change="flipped")
    assert (flipped.output_text, flipped.before, flipped.after) == ("4!", 0.0, 1.0)

    async def read() -> tuple[Any, list[str]]:
        async with make_async() as other:
            answers = [one.id async for one in other.regrades.answers(graded_job, made.id)]
            return await other.regrades.retrieve(graded_job, made.id), answers

    assert asyncio.run(read()) == (done, ["rollout_1_t_0_0", "rollout_1_t_0_1"])
    shown: Any = untyped(client.get(f"/regraft/jobs/{graded_job}/regrades/{made.id}", cast_to=object))
    assert set(regraft.Regrade.model_fields) == set(shown)
    answer: Any = untyped(
        client.get(f"/regraft/jobs/{graded_job}/regrades/{made.id}/answers", cast_to=object)
    )
    assert set(regraft.RegradedAnswer.model_fields) == set(answer["data"][0])
    client.regrades.delete(graded_job, made.id)
    with pytest.raises(openai.NotFoundError):
        client.regrades.retrieve(graded_job, made.id)


def test_the_asynchronous_client_creates_waits_and_cancels(
    client: Regraft, graded_job: str, runner: EvalRunner, make_async: Callable[[], AsyncRegraft]
) -> None:
    async def work(seconds: float) -> None:
        await asyncio.to_thread(runner.run_waiting)

    async def both() -> tuple[str, str, list[str]]:
        async with make_async() as other:
            cancelled = await other.regrades.cancel(
                graded_job, (await other.regrades.create(graded_job, GRADER)).id
            )
            made = await other.regrades.create(graded_job, GRADER, step_from=1, step_to=1, max_tokens=5)
            done = await other.regrades.wait(graded_job, made.id, sleep=work)
            listed = [one.id async for one in other.regrades.list(graded_job, limit=1)]
            await other.regrades.delete(graded_job, cancelled.id)
            assert listed == [made.id, cancelled.id]
            return cancelled.status, done.status, [one.id async for one in other.regrades.list(graded_job)]

    cancelled, done, left = asyncio.run(both())

    assert (cancelled, done) == ("canceled", "completed")
    assert len(left) == 1
