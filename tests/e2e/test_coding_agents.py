"""A coding agent takes a CSV to a promoted model: with the tools of `regraft mcp`, and with the skill's commands."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Any

import pytest
from mcp import Client
from regraft.cli import main
from regraft.skill import SKILL

from tests.agent_sessions import call, environment, over_stdio
from tests.e2e.conftest import Server
from tests.e2e.documents import QUICKLY
from tests.e2e.test_openai_client import GRADER, TRAIN, VALID
from tests.present import present

TEXT = SKILL.read_text()
NAMES = {"prompt": "question", "answer": "label"}
HYPERPARAMETERS = {
    "n_epochs": 2,
    "batch_size": 4,
    "advanced": {
        "sampling": {"group_size": 16, "max_completion_tokens": 3},
        "optimizer": {"learning_rate": 0.02, "step_kl": 0},
        "lora": {"rank": 8},
    },
}


def lay_out_tables(folder: Path) -> None:
    splits: dict[str, list[dict[str, Any]]] = {"train": [*TRAIN], "valid": [*VALID]}
    for name, rows in splits.items():
        lines = [f"{row['messages'][0]['content']},{row['answer']}\n" for row in rows]
        (folder / f"{name}.csv").write_text("question,label\n" + "".join(lines))


async def until_ended(client: Client, tool: str, found: Any, **ids: str) -> Any:
    """A preview or an audit after its end, as an agent waits that is patient."""
    for _ in range(1000):
        if found["data"]["status"] != "in_progress":
            return found["data"]
        found = await call(client, tool, **ids)
    raise AssertionError(f"{tool}: {found}")


async def prepared(client: Client) -> dict[str, Any]:
    """From CSV files to a job: rows, a grader that was tested and audited, and a preview."""
    status = await call(client, "service_status")
    assert "tiny" in status["models"]
    ids = {}
    for split, field in (("train", "training_file"), ("valid", "validation_file")):
        rows = f"{split}.jsonl"
        await call(client, "convert_file", source=f"{split}.csv", to="rft", out=rows, names=NAMES)
        checked = await call(client, "validate_file", path=rows, grader=GRADER, split=split)
        assert checked["data"]["ok"]
        ids[field] = (await call(client, "upload_file", path=rows))["id"]
    case = {"sample": "yes", "answer": "yes", "expect": 1}
    tested = await call(client, "test_grader", grader=GRADER, cases=[case])
    assert tested["data"]["failed"] == 0
    audit = await call(
        client, "audit_grader", grader=GRADER, training_file=ids["training_file"], answer="{{item.answer}}"
    )
    audit = await until_ended(client, "get_grader_audit", audit, audit_id=audit["data"]["id"])
    assert audit["report"]["sentence"]
    job = {"model": "tiny", **ids, "grader": GRADER, "seed": 1, "hyperparameters": HYPERPARAMETERS}
    assert (await call(client, "estimate_job", job=job))["data"]["total_steps"] > 0
    preview = await call(client, "preview_job", job=job, rows=2, samples=4)
    preview = await until_ended(client, "get_preview", preview, preview_id=preview["data"]["id"])
    assert preview["report"]["answers"] == 8
    return job


async def until_reached(client: Client, **arguments: str) -> Any:
    """What watch_job says once the job is there, after calls of at most 50 seconds."""
    for _ in range(6):
        watched = await call(client, "watch_job", seconds=50, **arguments)
        if watched["data"]["reached"]:
            break
    return watched


async def trained(client: Client) -> Any:
    """From CSV files to a model that an alias names, with tools only."""
    made = await call(client, "create_job", job=await prepared(client))
    job_id = made["data"]["id"]
    watched = await until_reached(client, job_id=job_id, until="running")
    assert watched["data"]["reached"]
    watched = await until_reached(client, job_id=job_id)
    assert watched["data"]["job"]["status"] == "succeeded"
    model = watched["data"]["job"]["fine_tuned_model"]
    verdict = await call(client, "get_verdict", job_id=job_id)
    rollouts = await call(client, "list_rollouts", job_id=job_id, step=1, limit=3)
    await call(client, "promote_alias", model=model, alias="agents-choice")
    said = await call(
        client, "chat", model="agents-choice", prompt="Is the sky blue?", max_completion_tokens=3
    )
    return model, watched["data"]["job"]["result"], verdict, rollouts, said


def test_an_agent_takes_a_csv_to_a_promoted_model_with_tools_only(server: Server, tmp_path: Path) -> None:
    lay_out_tables(tmp_path)

    model, result, verdict, rollouts, said = over_stdio(
        server.base_url, server.key, tmp_path, trained, "--write"
    )

    assert model.startswith("ft:tiny:")
    assert result["value"] >= result["start"]
    assert verdict["verdict"]["outcome"] in ("improved", "no_difference", "too_few")
    assert len(rollouts["data"]["data"]) == 3
    assert said["data"]["choices"][0]["message"]["content"]


def commands_of(text: str) -> Iterator[str]:
    for block in re.findall(r"```console\n(.*?)```", text, flags=re.S):
        yield from re.findall(r"^\$ (.*)$", block, flags=re.M)


def lay_out_skill(folder: Path) -> None:
    """The files that the skill shows, with a job that a tiny model ends quickly."""
    lay_out_tables(folder)
    for name, language in (("grader.py", "python"), ("cases.jsonl", "json"), ("job.toml", "toml")):
        (folder / name).write_text(present(re.search(rf"```{language}\n(.*?)```", TEXT, flags=re.S))[1])
    job = (folder / "job.toml").read_text().replace("SmolLM2-135M-Instruct", "tiny")
    (folder / "job.toml").write_text(job + QUICKLY)


@pytest.mark.timeout(600)
def test_every_command_of_the_skill_does_what_it_is_there_for(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lay_out_skill(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, value in environment(server.base_url, server.key, tmp_path).items():
        monkeypatch.setenv(name, value)
    values: dict[str, str] = {}
    ran = 0

    for command in commands_of(TEXT):
        words = [Template(word).safe_substitute(values) for word in shlex.split(command)]
        code = main(words[1:])
        printed = capsys.readouterr()
        assert code == 0, (command, printed.out[-2000:], printed.err)
        values |= learned_from(words, [json.loads(line) for line in documents(printed.out, words)][-1])
        ran += 1

    assert ran > 20
    assert values["MODEL"] != values["OTHER_MODEL"]


def documents(stdout: str, words: list[str]) -> list[str]:
    """`jobs watch` prints a document a line, all other commands one."""
    return stdout.splitlines() if words[1:3] == ["jobs", "watch"] else [stdout]


def learned_from(words: list[str], answer: Any) -> dict[str, str]:
    """The variables of later commands that an answer has the value of."""
    match words[1:3]:
        case ["files", "upload"]:
            return {"FILE": answer[0]["id"]}
        case ["jobs", "create"] if "id" in answer:
            return {"JOB": answer["id"]}
        case ["jobs", "clone"]:
            return {"OTHER": answer["id"]}
        case ["jobs", "watch"]:
            return {"OTHER_MODEL": answer["fine_tuned_model"]}
        case ["jobs", "show"]:
            return {"MODEL": answer["fine_tuned_model"]}
    return {}
