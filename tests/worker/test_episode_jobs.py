"""Whole jobs with tools on a server, on a tiny model that a schema makes write calls."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from sqlalchemy import select

from core.database.tables import Event, Job
from core.results import rollouts
from core.results.rollout_filters import Wanted
from core.settings import Settings
from graders.tools.protocol import ToolsFail
from tests.families.templates import make_turn_model
from tests.graders.mcp_servers import Drawers, serving_mcp
from tests.graders.servers import serving
from tests.hyperparameters import in_groups
from tests.worker.conftest import Bench
from tests.worker.test_tool_jobs import ASK, FORMAT, ROWS, TEMPLATE, calling
from worker import process
from worker.child import status_of

GRADER = {
    "type": "string_check",
    "name": "letter",
    "input": "{{sample.stop}} {{sample.turns}} {{sample.messages[1].content}}",
    "reference": "max_steps 2 right",
    "operation": "eq",
}


class Server:
    """A tool that finds the letter a right. It writes down what it gets."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.failing = False  # the last of each three calls

    def answer(self, path: str, body: Any) -> tuple[int, str]:
        self.calls.append(body)
        letter = json.loads(body["arguments"])["letter"]
        output = {"type": "function_call_output", "call_id": body["call_id"], "id": body["id"]}
        status = 302 if self.failing and len(self.calls) % 3 == 0 else 200
        return status, json.dumps(output | {"output": "right" if letter == "a" else "wrong"})


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    with serving(server.answer) as url:
        yield url


@pytest.fixture
def run(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> Callable[..., list[Mapping[str, Any]]]:
    """Run a job with the tool, or others, in this process, and return its rollouts."""

    def work(
        rows: Sequence[Mapping[str, Any]] = ROWS,
        tools: Sequence[Mapping[str, Any]] = ({"name": "pick", "server_url": url},),
        form: Mapping[str, Any] = FORMAT,
    ) -> list[Mapping[str, Any]]:
        model = make_turn_model(tmp_path / "model", TEMPLATE)
        registry, graders = tmp_path / "models.toml", tmp_path / "graders.toml"
        registry.write_text(
            f'[models.tiny]\npath = {json.dumps(str(model))}\ndtype = "float32"\ncontext = 512\n'
            'tool_parser = "llama3_json"\n'
        )
        graders.write_text('[endpoints]\nhosts = ["127.0.0.1"]\n')
        monkeypatch.setenv("REGRAFT_MODELS_FILE", str(registry))
        monkeypatch.setenv("REGRAFT_GRADERS_FILE", str(graders))
        monkeypatch.setenv("REGRAFT_DATA_DIR", str(tmp_path / "data"))
        with bench.database.write() as session:
            bench.add_files(session, bench.blobs, rows)
            job = session.scalars(select(Job)).one()
            asked = {
                "batch_size": 2,
                "n_epochs": 1,
                "advanced": in_groups({"group_size": 4, "max_completion_tokens": 96}),
            }
            job.body = {
                "grader": GRADER,
                "hyperparameters": asked,
                # Only here, so that noise is a call: the API refuses it with tools.
                "response_format": form,
                "tools": list(tools),
                "max_episode_steps": 2,
            }
        bench.run_job(Settings())
        with bench.database.read() as session:
            pages = rollouts.pages(session, job.id, split="train")
        return list(rollouts.find(bench.blobs, pages, Wanted()))

    return work


@pytest.mark.slow
def test_a_job_learns_from_episodes_whose_tools_were_executed(
    run: Callable[..., list[Mapping[str, Any]]], bench: Bench, server: Server
) -> None:
    rows = run()

    assert bench.job().status == "succeeded"
    whole = [row for row in rows if row["stop"] == "max_steps"]
    assert len(whole) > len(rows) / 2
    for row in whole:
        _, result, last = row["conversation"]
        [executed, left] = row["output_tools"]
        letter = json.loads(executed["function"]["arguments"])["letter"]
        assert result["content"] == executed["output"] == ("right" if letter == "a" else "wrong")
        assert left["output"] is None
        assert last["tool_calls"][0]["id"] == left["id"]
        assert row["score"] == float(letter == "a")
    measured = bench.steps()[1]
    assert measured["stop_max_steps_share"] == len(whole) / len(rows)
    assert measured["stop_max_steps_share"] + measured["stop_tokens_share"] == 1
    assert 1 < measured["episode_turns_mean"] <= 2
    assert measured["tool_errors_share"] == 0  # the calls of the last answers were not executed
    assert 0 < measured["tool_seconds_p50"] <= measured["tool_seconds_p95"]
    assert measured["episode_context_tokens_mean"] > len("tool right")
    sent = {(call["trace_id"], call["call_id"]) for call in server.calls}
    assert len(sent) == len(server.calls)
    assert {row["trace_id"] for row in whole} <= {trace for trace, _ in sent}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
def test_a_job_executes_tools_of_an_mcp_server_and_of_python_code(
    run: Callable[..., list[Mapping[str, Any]]], bench: Bench
) -> None:
    schema = {"type": "object", "properties": {"letter": {}}}
    function = {"name": "pick", "description": "pick of a drawer", "parameters": schema}
    source = "def call(arguments, item, state):\n    return item['letter'] + arguments['letter'], state\n"
    look = {"type": "python", "name": "look", "parameters": schema, "source": source}
    with serving_mcp(Drawers({"pick": schema})) as (server_url, _):
        functions = [{"type": "function", "function": function}]
        pick = {"type": "mcp", "server_label": "drawers", "server_url": server_url, "functions": functions}
        rows = run([{"messages": [ASK], "letter": "a"}] * 2, [pick, look], calling("pick", "look"))

    assert bench.job().status == "succeeded"
    executed = [(row, row["output_tools"][0]) for row in rows if row["stop"] == "max_steps"]
    assert {use["function"]["name"] for _, use in executed} == {"pick", "look"}
    for row, use in executed:
        letter = json.loads(use["function"]["arguments"])["letter"]
        of_name = {"pick": row["trace_id"], "look": f"a{letter}"}
        assert use["output"] == of_name[use["function"]["name"]]


@pytest.mark.slow
def test_an_episode_whose_tool_fails_has_no_reward(
    run: Callable[..., list[Mapping[str, Any]]], bench: Bench, server: Server
) -> None:
    server.failing = True

    run()

    with bench.database.read() as session:
        pages = rollouts.pages(session, bench.job().id)
    discarded = [row for row in rollouts.find(bench.blobs, pages, Wanted()) if row["stop"] == "discarded"]
    assert {(row["score"], row["error"]) for row in discarded} == {(None, "other_error")}
    assert all(row["reason"].startswith("the episode was discarded: HTTP 302") for row in discarded)


def test_a_job_of_which_a_tool_fails_most_calls_pauses_with_its_evidence(bench: Bench) -> None:
    def run() -> NoReturn:
        raise ToolsFail.of_calls("pick", 64, ["HTTP 500: 'boom'"] * 33)

    assert status_of(bench.attempt(), run) == process.DRAINED
    assert bench.job().status == "pausing"
    with bench.database.read() as session:
        event = session.scalars(select(Event).where(Event.level == "warn")).one()
    assert event.message.startswith("33 of the newest 64 calls of the tool 'pick' failed")
    assert event.data == {
        "tool": "pick", "calls": 64, "failed": 33, "reasons": ["HTTP 500: 'boom'"] * 8
    }  # fmt: skip
