"""Scripts written for OpenAI or Azure: the clients of the `openai` package, unchanged but for host and key."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncAzureOpenAI, AsyncOpenAI, AzureOpenAI, OpenAI

from core.database.engine import Work
from core.database.tables import Organization, TunedModel
from core.registry import Registry
from core.tenancy import tenants
from graders.backends import Backends, Inference
from tests.e2e.documents import run_examples
from tests.present import untyped
from tests.sdk.conftest import GRADER, ROWS, House

LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
DOCS = Path(__file__).parents[2] / "docs"
METHOD: Any = {"type": "reinforcement", "reinforcement": {"grader": GRADER}}
OPENAIS = "o4-mini-2025-04-16"
VERSION = "2025-04-01-preview"
QUESTION: Any = [{"role": "user", "content": "1 + 1?"}]


@pytest.fixture
def openai_client(house: House) -> Iterator[OpenAI]:
    with OpenAI(base_url=house.base_url, api_key=house.key, max_retries=0) as client:
        yield client


@pytest.fixture
def origin(house: House) -> str:
    return house.base_url.removesuffix("/v1")


@pytest.fixture
def azure_client(house: House, origin: str) -> Iterator[AzureOpenAI]:
    with AzureOpenAI(azure_endpoint=origin, api_version=VERSION, api_key=house.key, max_retries=0) as client:
        yield client


def uploaded(client: OpenAI | AzureOpenAI) -> list[Any]:
    return [client.files.create(file=(f"{n}.jsonl", LINES), purpose="fine-tune").id for n in "ab"]


def test_openais_supervised_quickstart_is_a_job(openai_client: OpenAI) -> None:
    train, _ = uploaded(openai_client)

    job = openai_client.fine_tuning.jobs.create(training_file=train, model=OPENAIS)

    assert untyped(job.method).type == "supervised"
    assert job.hyperparameters.n_epochs == "auto"


def test_an_alias_is_answered_with_the_model_it_leads_to(openai_client: OpenAI) -> None:
    train, valid = uploaded(openai_client)

    job = openai_client.fine_tuning.jobs.create(
        model=OPENAIS, training_file=train, validation_file=valid, method=METHOD
    )

    assert job.model == "tiny"
    assert untyped(openai_client.models.retrieve(OPENAIS)).root == "tiny"
    assert OPENAIS in [model.id for model in openai_client.models.list()]


def test_the_environments_organization_and_project_are_ignored(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org-of-openai")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj_of_openai")

    with OpenAI(base_url=house.base_url, api_key=house.key) as client:
        assert client.organization == "org-of-openai"
        assert client.files.list().data == []


def test_an_organization_of_this_service_is_still_enforced(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    with house.database.write() as session:
        other = Organization(name="other")
        session.add(other)
        session.flush()
        monkeypatch.setenv("OPENAI_ORG_ID", other.id)

    with (
        OpenAI(base_url=house.base_url, api_key=house.key, max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        client.files.list()
    assert refused.value.code == "mismatched_organization"


def test_azures_client_trains(azure_client: AzureOpenAI, house: House) -> None:
    train, valid = uploaded(azure_client)

    job = azure_client.fine_tuning.jobs.create(
        model=OPENAIS,
        training_file=train,
        validation_file=valid,
        suffix="desk v1.2",
        method=untyped(
            {
                "type": "reinforcement",
                "reinforcement": {
                    "grader": GRADER,
                    "hyperparameters": {"reasoning_effort": "medium"},
                    "tools": [],
                    "max_episode_steps": None,
                },
            }
        ),
        extra_body={"trainingType": "globalStandard"},
    )

    assert (job.model, untyped(job).user_provided_suffix) == ("tiny", "desk v1.2")
    jobs = azure_client.fine_tuning.jobs
    assert [one.id for one in jobs.list()] == [job.id]
    assert jobs.retrieve(job.id).status == "validating_files"
    assert list(jobs.checkpoints.list(job.id)) == []
    assert jobs.cancel(job.id).status == "cancelled"
    assert azure_client.files.content(train).content == LINES
    assert {file.id for file in azure_client.files.list()} == {train, valid}
    assert azure_client.files.delete(train).deleted
    assert azure_client.models.list().data[0].id == "tiny"
    assert azure_client.fine_tuning.alpha.graders.validate(grader=GRADER).grader is not None


def test_azures_client_chats_by_deployment(
    azure_client: AzureOpenAI, house: House, origin: str, model: None
) -> None:
    answer = azure_client.chat.completions.create(model=OPENAIS, messages=QUESTION)
    with AzureOpenAI(
        azure_endpoint=origin, azure_deployment="tiny", api_version=VERSION, api_key=house.key
    ) as deployed:
        same = deployed.chat.completions.create(model="anything", messages=QUESTION)
        assert deployed.files.list().data == []

    assert {answer.choices[0].message.content, same.choices[0].message.content} == {"no", "2"}


def test_azures_v1_urls_work_with_openais_client(house: House, origin: str) -> None:
    with OpenAI(base_url=f"{origin}/openai/v1/", api_key=house.key) as client:
        assert client.files.with_raw_response.list().status_code == 200
        assert client.models.retrieve("tiny").id == "tiny"


def test_a_wrong_key_of_azures_is_refused_as_any(origin: str) -> None:
    with (
        AzureOpenAI(azure_endpoint=origin, api_version=VERSION, api_key="nobody", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        client.files.list()
    assert refused.value.code == "invalid_api_key"


def test_what_is_not_there_is_not_there_below_azures_path_either(azure_client: AzureOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        azure_client.fine_tuning.jobs.retrieve("ftjob-none")
    with pytest.raises(openai.NotFoundError) as refused:
        azure_client.get("/nothing", cast_to=object)
    assert refused.value.code == "unknown_url"


def test_the_asynchronous_clients_do_the_same(house: House, origin: str, model: None) -> None:
    async def ask() -> tuple[str | None, str, list[str]]:
        async with AsyncAzureOpenAI(azure_endpoint=origin, api_version=VERSION, api_key=house.key) as azure:
            said = await azure.chat.completions.create(model="tiny", messages=QUESTION)
            file = await azure.files.create(file=("a.jsonl", LINES), purpose="fine-tune")
        async with AsyncOpenAI(base_url=house.base_url, api_key=house.key) as client:
            listed = [one.id async for one in client.files.list()]
        return said.choices[0].message.content, file.id, listed

    content, file_id, listed = asyncio.run(ask())

    assert content in ("no", "2")
    assert listed == [file_id]


def test_what_the_document_shows_runs(
    house: House,
    origin: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the variables that it sets, and this server's address and key in the place of those it prints."""
    document = (DOCS / "howto/migrating.md").read_text()
    here = document.replace("http://127.0.0.1:8000", origin).replace("rg-...", house.key)
    (tmp_path / "migrating.md").write_text(here)
    monkeypatch.chdir(tmp_path)
    for name, value in re.findall(r"^export (\w+)=(.*)$", here, flags=re.M):
        monkeypatch.setenv(name, value)
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").write_bytes(LINES)

    assert run_examples(tmp_path / "migrating.md", {}) == 2
    created, listed = capsys.readouterr().out.splitlines()
    assert created.endswith(" tiny")
    assert listed == f"{created.split()[0]} validating_files"


def test_the_files_that_the_document_shows_are_valid(tmp_path: Path) -> None:
    models, graders = re.findall(r"```toml\n(.*?)```", (DOCS / "howto/migrating.md").read_text(), flags=re.S)
    (tmp_path / "models.toml").write_text(models)
    (tmp_path / "graders.toml").write_text(graders)

    registry = Registry.load(tmp_path / "models.toml")
    backends = Backends.load(tmp_path / "graders.toml", Inference(lambda model: "http://127.0.0.1:1/v1"))

    assert {registry.resolve(alias) for alias in registry.aliases} == {"Qwen3-4B"}
    assert backends.registry_models == {"Qwen3-4B"}


def test_permissions_of_a_checkpoint_are_created_listed_and_deleted(
    openai_client: OpenAI, house: House
) -> None:
    name = "ft:tiny:default::12345678:ckpt-step-2"
    with house.database.write() as session:
        row = TunedModel(name=name, project_id=house.project.id, job_id="ftjob-1", base_model="tiny")
        row.checkpoint_id = "ftckpt_1"
        session.add(row)
        organization = session.get_one(Organization, house.project.organization_id)
        projects = [tenants.create_project(Work(session), organization, n).id for n in "abc"]
    permissions = openai_client.fine_tuning.checkpoints.permissions

    made = permissions.create(name, project_ids=projects)

    assert [one.project_id for one in made] == projects
    assert [one.project_id for one in permissions.list(name, limit=2)] == projects[::-1]  # over two pages
    gone = permissions.delete(made.data[0].id, fine_tuned_model_checkpoint=name)
    assert (gone.deleted, gone.object) == (True, "checkpoint.permission")
    assert [one.project_id for one in permissions.list(name, order="ascending")] == projects[1:]
