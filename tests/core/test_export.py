"""What reproduce.json takes from the job's events."""

import json
from pathlib import Path
from typing import Any

import pytest

from core.database.engine import Database
from core.database.tables import Checkpoint
from core.jobs import events
from core.registry import BaseModelEntry, Registry
from core.results import export
from core.results.export import TakeHome
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


@pytest.mark.parametrize(
    ("entry", "loaded", "said"),
    [
        (BaseModelEntry(hub="Qwen/Qwen3-4B"), "Qwen/Qwen3-4B", None),
        (BaseModelEntry(path=Path("/secret/place/qwen")), "FOLDER OF THE BASE MODEL", "a local model"),
        (
            BaseModelEntry(package="llm_small", file="small.gguf"),
            "FOLDER OF THE BASE MODEL",
            "the file `small.gguf` of the Python package `llm_small`",
        ),
    ],
    ids=["hub", "path", "package"],
)
def test_the_readme_loads_the_base_from_the_hub_or_says_whose_name_it_is(
    entry: BaseModelEntry, loaded: str, said: str | None, database: Database, tmp_path: Path
) -> None:
    with database.write() as session:
        job = factories.job(session, factories.project(session)).id

    home = exported(database, tmp_path, job, Registry(models={"tiny": entry}))

    card = home.texts["README.md"].decode()
    assert f'from_pretrained("{loaded}")' in card
    assert ("is the name of" in card, f'base_model: "{loaded}"' in card) == (said is not None, said is None)
    assert said is None or f"`tiny` is the name of {said} in the registry of the service" in card
    assert b"/secret/place" not in b"".join(home.texts.values())


def test_the_readme_names_the_format_of_quantized_weights(database: Database, tmp_path: Path) -> None:
    with database.write() as session:
        project = factories.project(session)
        plain, packed = (factories.job(session, project).id for _ in range(2))
        events.append(session, packed, "The model's files hold ...", data={"quantization": "awq W4A16"})

    homes = [exported(database, tmp_path / job, job, Registry.load(None)) for job in (plain, packed)]

    cards = [home.texts["README.md"].decode() for home in homes]
    bases = [json.loads(home.texts["reproduce.json"])["base_model"] for home in homes]
    assert ["The files of the base hold awq W4A16 weights" in card for card in cards] == [False, True]
    assert [base.get("quantization") for base in bases] == [None, "awq W4A16"]


def reproduce(database: Database, folder: Path, job_id: str) -> Any:
    return json.loads(exported(database, folder, job_id, Registry.load(None)).texts["reproduce.json"])


def exported(database: Database, folder: Path, job_id: str, registry: Registry) -> TakeHome:
    blobs = FolderBlobs(folder / "blobs")
    blobs.put_bytes("step-1/manifest.json", b'{"format": 1, "files": []}')
    with database.write() as session:
        checkpoint = Checkpoint(job_id=job_id, step=1, epoch=1, blob_prefix="step-1")
        session.add(checkpoint)
        session.flush()
    return export.gather(database, blobs, registry, checkpoint)
