"""What reproduce.json takes from the job's events."""

import json
from pathlib import Path
from typing import Any

import pytest

from core.database.engine import Database
from core.database.tables import Checkpoint
from core.jobs import events
from core.registry import Registry
from core.results import export
from core.storage.store import FolderBlobs
from tests import factories

pytestmark = pytest.mark.both_databases


def test_the_sampler_and_the_grader_environments_are_those_that_the_newest_event_names(
    database: Database, tmp_path: Path
) -> None:
    """By the keys of its data, whatever its message says."""
    with database.write() as session:
        job = factories.job(session, factories.project(session)).id
        events.append(session, job, "Sampling with nothing")
        events.append(session, job, "Graders", data={"grader_environments": ["2025-05-08"]})
        events.append(session, job, "Before a restart", data={"sampler": "transformers"})
        events.append(session, job, "After it", data={"sampler": "vllm"})
        events.append(session, job, "Step 1/2", type="metrics", data={"step": 1, "sampler": 0})
        events.append(session, "ftjob-other", "Another job's", data={"sampler": "none"})

    recipe = reproduce(database, tmp_path, job)

    assert (recipe["sampler"], recipe["grader_environments"]) == ("vllm", ["2025-05-08"])


def test_without_such_events_there_is_no_sampler_and_no_grader_environment(
    database: Database, tmp_path: Path
) -> None:
    with database.write() as session:
        job = factories.job(session, factories.project(session)).id
        events.append(session, job, "Created")

    recipe = reproduce(database, tmp_path, job)

    assert (recipe["sampler"], recipe["grader_environments"]) == (None, [])


def reproduce(database: Database, folder: Path, job_id: str) -> Any:
    blobs = FolderBlobs(folder / "blobs")
    blobs.put_bytes("step-1/manifest.json", b'{"format": 1, "files": []}')
    with database.write() as session:
        checkpoint = Checkpoint(job_id=job_id, step=1, epoch=1, blob_prefix="step-1")
        session.add(checkpoint)
        session.flush()
    home = export.gather(database, blobs, Registry.load(None), checkpoint, dict)
    return json.loads(home.texts["reproduce.json"])
