"""Guide "Reinforcement fine-tuning", section on pausing and resuming; reference, cancel a job."""

from typing import Any

import pytest
from openai import OpenAI
from openai.types.fine_tuning.jobs import FineTuningJobCheckpoint

from tests.conformance.data import SIMILAR, TEST, TRAIN
from tests.conformance.helpers import CHECKPOINT, JOB, NEW_JOB, NUMBER, assert_documented, poll, started


def paused(client: OpenAI, job_id: str) -> Any:
    """The job, whose status `paused` the client's type lacks."""
    return poll(
        lambda: client.fine_tuning.jobs.retrieve(job_id), lambda job: job.status not in ("pausing", "running")
    )


def paused_with_checkpoint(client: OpenAI, job_id: str) -> FineTuningJobCheckpoint:
    """The newest checkpoint of a paused job. If a busy machine interrupted its run before that, it pauses again."""
    jobs = client.fine_tuning.jobs
    while not (found := jobs.checkpoints.list(job_id).data):
        told = [event.message for event in jobs.list_events(job_id, limit=100)]
        assert any("interrupted" in message for message in told), told
        jobs.resume(job_id)
        poll(lambda: jobs.retrieve(job_id), lambda job: job.status == "running")
        jobs.pause(job_id)
        assert str(paused(client, job_id).status) == "paused"  # a status of our own
    return found[0]


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

    assert_documented(paused(client, job.id), JOB | {"status": "paused", "finished_at": None})
    checkpoint = paused_with_checkpoint(client, job.id)
    assert_documented(checkpoint, CHECKPOINT | {"metrics": {"step": NUMBER, "train_mean_reward": NUMBER}})
    assert client.models.retrieve(checkpoint.fine_tuned_model_checkpoint).object == "model"

    resumed = client.fine_tuning.jobs.resume(job.id)
    assert_documented(resumed, JOB | {"status": "queued"})
    poll(lambda: client.fine_tuning.jobs.retrieve(job.id), lambda job: job.status == "running")

    cancelled = client.fine_tuning.jobs.cancel(job.id)
    assert_documented(cancelled, JOB | {"status": "cancelled"})
