"""Guide "Reinforcement fine-tuning", section on pausing and resuming; reference, cancel a job."""

import pytest
from openai import OpenAI

from tests.conformance.data import SIMILAR, TEST, TRAIN
from tests.conformance.helpers import CHECKPOINT, JOB, NEW_JOB, NUMBER, assert_documented, poll, started


@pytest.mark.slow
def test_a_job_is_paused_with_a_model_resumed_and_cancelled() -> None:
    client = OpenAI()
    train = client.files.create(file=("train.jsonl", TRAIN), purpose="fine-tune")
    test = client.files.create(file=("test.jsonl", TEST), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model="o4-mini-2025-04-16",
        training_file=train.id,
        validation_file=test.id,
        method={
            "type": "reinforcement",
            "reinforcement": {"grader": SIMILAR, "hyperparameters": {"n_epochs": 50, "batch_size": 1}},
        },
    )
    assert_documented(job, NEW_JOB)
    started(client, job.id)

    pausing = client.fine_tuning.jobs.pause(job.id)
    assert_documented(pausing, JOB | {"status": lambda value: value in ("pausing", "paused")})

    paused = poll(
        lambda: client.fine_tuning.jobs.retrieve(job.id), lambda job: job.status not in ("pausing", "running")
    )
    assert_documented(paused, JOB | {"status": "paused", "finished_at": None})
    checkpoint = next(iter(client.fine_tuning.jobs.checkpoints.list(job.id)))
    assert_documented(checkpoint, CHECKPOINT | {"metrics": {"step": NUMBER, "train_mean_reward": NUMBER}})
    assert client.models.retrieve(checkpoint.fine_tuned_model_checkpoint).object == "model"

    resumed = client.fine_tuning.jobs.resume(job.id)
    assert_documented(resumed, JOB | {"status": "queued"})
    poll(lambda: client.fine_tuning.jobs.retrieve(job.id), lambda job: job.status == "running")

    cancelled = client.fine_tuning.jobs.cancel(job.id)
    assert_documented(cancelled, JOB | {"status": "cancelled"})
