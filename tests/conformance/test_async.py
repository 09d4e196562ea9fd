"""README of the client, async usage: the whole flow with `AsyncOpenAI`."""

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.conformance.data import SIMILAR, TEST, TRAIN
from tests.conformance.helpers import (
    CHECKPOINT,
    EVENT,
    FINISHED_JOB,
    GRADER_RUN,
    MODEL,
    NEW_JOB,
    assert_documented,
)


@pytest.mark.slow
def test_the_async_client_does_everything() -> None:
    async def main() -> None:
        async with AsyncOpenAI() as client:
            train = await client.files.create(file=("train.jsonl", TRAIN), purpose="fine-tune")
            test = await client.files.create(file=("test.jsonl", TEST), purpose="fine-tune")
            assert (await client.files.wait_for_processing(train.id)).status == "processed"
            run = await client.fine_tuning.alpha.graders.run(
                grader=SIMILAR, item={"reference_answer": "red"}, model_sample="red"
            )
            assert_documented(run, GRADER_RUN)
            job = await client.fine_tuning.jobs.create(
                model="o4-mini-2025-04-16",
                training_file=train.id,
                validation_file=test.id,
                method={
                    "type": "reinforcement",
                    "reinforcement": {"grader": SIMILAR, "hyperparameters": {"n_epochs": 1}},
                },
            )
            assert_documented(job, NEW_JOB)
            async with asyncio.timeout(240):
                while job.status not in ("succeeded", "failed", "cancelled"):
                    await asyncio.sleep(0.2)
                    job = await client.fine_tuning.jobs.retrieve(job.id)
            assert_documented(job, FINISHED_JOB)
            async for event in client.fine_tuning.jobs.list_events(job.id, limit=3):
                assert_documented(event, EVENT)
            async for checkpoint in client.fine_tuning.jobs.checkpoints.list(job.id):
                assert_documented(checkpoint, CHECKPOINT)
            async for model in client.models.list():
                assert_documented(model, MODEL)
            assert "step" in (await client.files.content(job.result_files[0])).text
            assert job.fine_tuned_model is not None
            deleted = await client.models.delete(job.fine_tuned_model)
            assert_documented(deleted, {"id": job.fine_tuned_model, "object": "model", "deleted": True})

    asyncio.run(main())


def test_requests_run_beside_each_other() -> None:
    async def main() -> list[Any]:
        async with AsyncOpenAI() as client:
            run = client.fine_tuning.alpha.graders.run
            return await asyncio.gather(
                *(run(grader=SIMILAR, item={"reference_answer": "red"}, model_sample="red") for _ in range(8))
            )

    assert {run.reward for run in asyncio.run(main())} == {1.0}
