"""What reproduce.json takes from the job's events."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
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


@pytest.mark.parametrize(
    ("config", "rank"),
    [
        ({"r": 8, "target_parameters": ["mlp.experts.down_proj"], "rank_pattern": {"gate_up_proj": 16}}, 16),
        ({"r": 8, "target_parameters": ["mlp.experts.down_proj"], "rank_pattern": {"gate_up_proj": 4}}, 8),
        ({"r": 8, "target_parameters": None, "rank_pattern": {}}, None),
    ],
    ids=["twice the rank for PEFT", "less than the job's", "a model without experts"],
)
def test_the_readme_of_an_adapter_on_experts_names_the_rank_that_engines_need(
    config: dict[str, Any], rank: int | None, database: Database, tmp_path: Path
) -> None:
    with database.write() as session:
        job = factories.job(session, factories.project(session))
        job.resolved = {"lora_targets": ["attention", "experts"], "lora_rank": 8}

    home = exported(database, tmp_path, job.id, Registry.load(None), {"adapter_config.json": config})

    card = home.texts["README.md"].decode()
    assert ("`--max-lora-rank`" in card) == (rank is not None)
    assert rank is None or f"its highest rank is {rank}: start vLLM with" in card


def reproduce(database: Database, folder: Path, job_id: str) -> Any:
    return json.loads(exported(database, folder, job_id, Registry.load(None)).texts["reproduce.json"])


def exported(
    database: Database,
    folder: Path,
    job_id: str,
    registry: Registry,
    files: Mapping[str, Any] = MappingProxyType({}),
) -> TakeHome:
    """Args: `files`: those of the checkpoint, as JSON."""
    blobs, listed = FolderBlobs(folder / "blobs"), []
    for name, value in files.items():
        data = json.dumps(value).encode()
        blobs.put_bytes(f"step-1/{name}", data)
        listed.append({"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    blobs.put_bytes("step-1/manifest.json", json.dumps({"format": 1, "files": listed}).encode())
    with database.write() as session:
        checkpoint = Checkpoint(job_id=job_id, step=1, epoch=1, blob_prefix="step-1")
        session.add(checkpoint)
        session.flush()
    return export.gather(database, blobs, registry, checkpoint, None)
