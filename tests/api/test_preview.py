"""Previews over real connections, with an inference server that answers as it is told."""

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from api.http.app import create_app
from core.registry import BaseModelEntry, Registry
from core.settings import Settings
from core.storage.datasets import Example
from core.tenancy import tenants
from graders.backends import Backends
from graders.hazards.pool import OWNER
from graders.judge.judges import JudgeModel
from graders.spec import GraderSpec
from graders.types import Grader
from tests.api.conftest import GRADER, House
from tests.api.test_chat import served
from tests.graders.servers import serving, verdict
from tests.present import untyped
from tests.thinking import HYBRID, make_thinking_model
from worker.assemble import prepare_task

ROWS = [{"messages": [{"role": "user", "content": f"row {n}"}], "answer": "yes"} for n in range(12)]
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}}
PREVIEW = "/regraft/preview"
WITHOUT_THOUGHTS = "{%- for m in messages -%}{{ m.content }}{%- endfor -%}"
NO_JSON = (
    "The inference server answered with status 500 and not in OpenAI's format: "
    "REGRAFT_INFERENCE_URL may point to another server, or lack /v1."
)


def jsonl(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@dataclass
class Model:
    """An inference server: what it was asked for, and how it answers."""

    answer: Callable[[dict[str, Any]], Response]
    asked: list[dict[str, Any]] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    hangs: bool = False

    def __post_init__(self) -> None:
        self.go.set()

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/healthz")
        async def healthy() -> dict[str, str]:
            return {"status": "ok"}

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            asked = await request.json()
            self.asked.append(asked)
            self.begun.set()
            if self.hangs:
                while (await request.receive())["type"] != "http.disconnect":
                    pass
                self.left.set()
            await asyncio.to_thread(self.go.wait, 10)
            return self.answer(asked)

        return app

    @property
    def sampled(self) -> list[dict[str, Any]]:
        """Without the one token that loads the model."""
        return self.asked[1:]


def says(text: str, *, finish: str = "stop", read: int = 10, wrote: int = 4) -> Response:
    message = {"role": "assistant", "content": text}
    body = {
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": read, "completion_tokens": wrote},
    }
    return JSONResponse(body)


def refuses(status: int, message: str, code: str | None = None, **headers: str) -> Response:
    error = {"message": message, "type": "x", "param": None, "code": code}
    return JSONResponse({"error": error}, status, headers)


@pytest.fixture
def model() -> Model:
    """It is right every second time that it is asked the same for the same number of tokens."""
    turns: Counter[str] = Counter()

    def answer(asked: dict[str, Any]) -> Response:
        question = str((asked["messages"], asked["max_completion_tokens"]))
        turns[question] += 1
        return says("no" if turns[question] % 2 else "yes")

    return Model(answer)


@pytest.fixture
def inference(model: Model) -> Iterator[str]:
    yield from served(model.app())


def opened(
    house: House,
    url: str,
    backends: Backends | None = None,
    *,
    places: int | None = None,
    seconds: float | None = None,
    entry: BaseModelEntry | None = None,
    **settings: Any,
) -> Iterator[httpx.Client]:
    """`places`: previews at once; `seconds`: how long one may take."""
    asked: dict[str, Any] = {
        "data_dir": house.folder,
        "inference_url": url and f"{url}/v1",
        "inference_key": "k",
    } | settings
    app = create_app(
        Settings(**asked),
        house.database,
        house.blobs,
        Registry(models={"tiny": entry or BaseModelEntry(hub="regraft/tiny", context=128)}),
        backends or Backends.none(),
        lambda *wake: True,
    )
    if places is not None:
        app.state.service.admission.previews.places = places
    if seconds is not None:
        app.state.service = replace(app.state.service, preview_seconds=seconds)
    for address in served(app):
        headers = {"Authorization": f"Bearer {house.key}"}
        with httpx.Client(base_url=f"{address}/v1", headers=headers, timeout=30) as client:
            yield client


@pytest.fixture
def web(house: House, inference: str) -> Iterator[httpx.Client]:
    yield from opened(house, inference)


@pytest.fixture
def body(
    upload: Callable[..., str], job_request: Callable[..., dict[str, Any]]
) -> Callable[..., dict[str, Any]]:
    """What creates a job, over twelve rows."""

    def body(rows: list[Any] = ROWS, hyperparameters: Any = None, **fields: Any) -> dict[str, Any]:
        more = {"response_format": fields.pop("response_format")} if "response_format" in fields else {}
        asked = {"hyperparameters": hyperparameters or {}, "grader": fields.pop("grader", GRADER)} | more
        files = {"training_file": upload(jsonl(rows)), "validation_file": upload(jsonl(rows), name="v.jsonl")}
        return job_request(reinforcement=asked, **files, **fields)

    return body


def error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()["error"]
    return found


def test_a_preview_reports_what_the_base_model_makes_of_a_few_rows(
    web: httpx.Client, body: Callable[..., dict[str, Any]]
) -> None:
    found = web.post(PREVIEW, json=body(rows=[*ROWS])).json()

    assert found["object"] == "regraft.preview"
    assert (found["training_rows"], found["group_size"], found["max_completion_tokens"]) == (12, 8, 64)
    assert (found["answers"], found["passed"], found["pass_threshold"]) == (64, 32, 0.5)
    assert found["pass_rate"]["low"] < found["pass_rate"]["expected"] == 0.5 < found["pass_rate"]["high"]
    assert found["signal"][2]["group_size"] == 8
    assert (found["signal"][2]["share"]["expected"], found["signal"][2]["at_least"]) == (1.0, False)
    assert found["signal"][3]["at_least"]
    assert (found["completion_tokens"]["mean"], found["prompt_tokens"]["max"], found["cut_off"]) == (4, 10, 0)
    assert len(found["prompts"]) == 8
    assert Counter(found["prompts"][0]["rewards"]) == {0.0: 4, 1.0: 4}
    assert found["grading"]["failed"] == 0
    assert found["sampling"]["tokens_per_second"] > 0
    assert found["estimate"]["remaining_seconds"]["low"] > 0
    assert found["reason"] is None
    assert found["verdict"] == "good"
    assert "32 of 64 answers pass" in found["recommendation"]


def streamed(web: httpx.Client, asked: dict[str, Any]) -> list[tuple[str, Any]]:
    """The names and data of the events of a preview that tells its progress."""
    answer = web.post(PREVIEW, json=asked | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    told = []
    for block in answer.text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        data = fields["data"]
        told.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return told


def test_a_preview_tells_how_far_it_is_and_ends_with_its_report(
    web: httpx.Client, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    asked = body() | {"rows": 2, "samples": 2}

    told = streamed(web, asked)
    plain = web.post(PREVIEW, json=asked).json()

    *progress, (name, report), (_, done) = told
    assert progress[0] == (
        "progress",
        {"object": "regraft.preview.progress", "phase": "loading", "of": 4, "sampled": 0, "graded": 0},
    )
    assert {kind for kind, _ in progress} == {"progress"}
    assert (name, done) == ("preview", "[DONE]")
    assert report.keys() == plain.keys()
    assert (report["answers"], report["passed"]) == (plain["answers"], plain["passed"])


def test_a_preview_that_waits_for_its_model_says_so_meanwhile(
    web: httpx.Client, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    asked = body() | {"rows": 1, "samples": 2, "stream": True}
    model.go.clear()

    with web.stream("POST", PREVIEW, json=asked) as answer:
        lines = answer.iter_lines()
        first = [next(lines), next(lines)]
        model.go.set()
        rest = "\n".join(lines)

    assert first[0] == "event: progress"
    assert '"phase": "loading"' in first[1]
    assert "event: preview" in rest


def test_an_error_after_the_stream_began_is_its_last_event(
    house: House, web: httpx.Client, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    model.answer = lambda asked: refuses(400, "too long", "context_length_exceeded")

    told = streamed(web, body() | {"rows": 1, "samples": 2})

    assert [name for name, _ in told[-2:]] == ["error", ""]
    assert told[-2][1]["error"]["code"] == "context_length_exceeded"
    assert told[-2][1]["error"]["message"].startswith("line ")
    assert told[-2][1]["error"]["status"] == 400


def test_what_can_be_refused_before_the_stream_has_a_status(
    web: httpx.Client, body: Callable[..., dict[str, Any]]
) -> None:
    refused = web.post(PREVIEW, json=body() | {"model": "none", "stream": True})

    assert error(refused, 404)["code"] == "model_not_found"


def test_a_client_that_leaves_a_stream_ends_the_sampling_and_its_place_is_free(
    house: House, inference: str, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    model.hangs = True
    for web in opened(house, inference, places=1):
        with web.stream("POST", PREVIEW, json=body() | {"rows": 1, "samples": 2, "stream": True}) as answer:
            lines = answer.iter_lines()  # its end would be the end of the response
            next(lines)
            assert model.begun.wait(10)
        assert model.left.wait(10)
        model.hangs = False

        assert streamed(web, body() | {"rows": 1, "samples": 2})[-2][0] == "preview"


@pytest.mark.parametrize(
    ("template", "chosen", "room"),
    [(HYBRID, "auto", 2048), (HYBRID, "plain", 512), (WITHOUT_THOUGHTS, "auto", 512)],
)
def test_estimate_preview_and_worker_give_answers_the_same_room(
    house: House,
    inference: str,
    model: Model,
    body: Callable[..., dict[str, Any]],
    tmp_path: Path,
    template: str,
    chosen: str,
    room: int,
) -> None:
    entry = BaseModelEntry(path=make_thinking_model(tmp_path / "model", template), context=8192)
    hyperparameters = {"advanced": {"sampling": {"chat_template": chosen}}}
    asked = body(hyperparameters=hyperparameters)

    for web in opened(house, inference, entry=entry):
        estimate = web.post("/regraft/estimate", json=asked).json()
        preview = web.post(PREVIEW, json=asked | {"rows": 1, "samples": 2}).json()

    job = SimpleNamespace(
        training_file="file-a",
        validation_file="file-b",
        parent=None,
        method="reinforcement",
        body={"hyperparameters": hyperparameters, "response_format": None},
        resolved=None,
    )
    shape = SimpleNamespace(parameters=1000)
    base = SimpleNamespace(entry=entry, source=entry.path, shape=shape, sampler="transformers", rows=False)
    rows = SimpleNamespace(train=(some := [Example(1, cast(Any, ROWS[0]["messages"]), {})]), valid=some)
    task = prepare_task(cast(Any, SimpleNamespace(job=job)), cast(Any, rows), cast(Any, base))
    assert task.settings.max_completion_tokens == room
    assert estimate["max_completion_tokens"] == preview["max_completion_tokens"] == room
    assert {one["max_completion_tokens"] for one in model.sampled} == {room}


def test_thoughts_that_the_limit_cuts_are_counted(
    web: httpx.Client, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    def thinks(asked: Any) -> JSONResponse:
        cut = says("", finish="length")
        said = json.loads(bytes(cut.body))
        said["choices"][0]["message"]["reasoning_content"] = "hm"
        return JSONResponse(said)

    model.answer = thinks

    found = web.post(PREVIEW, json=body() | {"rows": 2, "samples": 3}).json()

    assert (found["answers"], found["cut_off"], found["cut_thoughts"]) == (6, 6, 6)
    assert "6 of them within their thought" in found["recommendation"]


def test_it_creates_nothing(web: httpx.Client, body: Callable[..., dict[str, Any]]) -> None:
    web.post(PREVIEW, json=body())

    assert web.get("/fine_tuning/jobs").json()["data"] == []


def test_the_answers_are_sampled_as_the_job_would(
    web: httpx.Client, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    advanced = {"temperature": 0.75, "max_completion_tokens": 33}
    message = {"role": "assistant", "content": "hello", "weight": 0}
    rows = [ROWS[0] | {"messages": [message, *ROWS[0]["messages"]]}]
    asked = body(rows=rows, hyperparameters={"advanced": advanced}, response_format=FORMAT)
    web.post(PREVIEW, json=asked | {"samples": 3})

    assert len(model.sampled) == 3
    assert len({one.pop("seed") for one in model.sampled}) == 3
    for one in model.sampled:
        assert one == {
            "model": "tiny",
            "messages": [{"role": "assistant", "content": "hello"}, *ROWS[0]["messages"]],
            "temperature": 0.75,
            "max_completion_tokens": 33,
            "response_format": FORMAT,
            "regraft": {"base_model": "tiny", "adapter": None},
        }


def test_one_seed_draws_the_same_rows_and_answers_and_another_draws_others(
    web: httpx.Client, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    asked = body() | {"rows": 4, "samples": 2}

    def drawn(**seed: int) -> list[tuple[str, int]]:
        model.asked.clear()
        assert web.post(PREVIEW, json=asked | seed).status_code == 200
        return sorted((one["messages"][0]["content"], one["seed"]) for one in model.sampled)

    first = drawn(seed=1)
    assert len(first) == 8
    assert drawn(seed=1) == first
    assert drawn(seed=2) != first


def test_a_file_with_fewer_rows_is_tried_as_a_whole(
    web: httpx.Client, body: Callable[..., dict[str, Any]]
) -> None:
    found = web.post(PREVIEW, json=body(rows=ROWS[:3]) | {"samples": 2}).json()

    assert [one["line"] for one in found["prompts"]] == [1, 2, 3]


def test_json_answers_reach_the_grader_as_json(
    web: httpx.Client, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    model.answer = lambda asked: says('{"word": "yes"}')
    grader = GRADER | {"input": "{{sample.output_json.word}}"}

    found = web.post(PREVIEW, json=body(grader=grader, response_format=FORMAT) | {"rows": 2}).json()

    assert (found["passed"], found["verdict"]) == (16, "too_easy")


def test_answers_that_are_cut_off_are_counted(
    web: httpx.Client, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    model.answer = lambda asked: says("I think", finish="length", wrote=64)

    found = web.post(PREVIEW, json=body() | {"rows": 2}).json()

    assert (found["cut_off"], found["verdict"]) == (16, "cut_off")


def test_the_threshold_is_the_graders_own(web: httpx.Client, body: Callable[..., dict[str, Any]]) -> None:
    grader = {
        "type": "text_similarity",
        "name": "close",
        "input": "{{sample.output_text}}",
        "reference": "{{item.answer}}",
        "evaluation_metric": "fuzzy_match",
        "pass_threshold": 0,
    }

    assert web.post(PREVIEW, json=body(grader=grader)).json()["passed"] == 64


def test_an_answer_that_cannot_be_graded_is_no_wrong_one(
    web: httpx.Client, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    turns = iter(range(1000))
    model.answer = lambda asked: says(('{"word": "yes"}', "{", '{"word": "no"}')[next(turns) % 3])
    grader = GRADER | {"input": "{{sample.output_json.word}}"}

    found = web.post(PREVIEW, json=body(grader=grader, response_format=FORMAT) | {"rows": 3}).json()

    assert found["grading"]["failed"] == 8
    assert len(found["grading"]["reasons"]) == 1
    assert found["pass_rate"]["expected"] == 0.5
    assert sum(one["rewards"].count(None) for one in found["prompts"]) == 8


def test_what_judges_read_and_write_counts_and_ends_with_the_projects_limit(
    house: House, inference: str, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    texts = iter(range(1000))
    model.answer = lambda asked: says(f"answer {next(texts)}")  # the same one again would not be judged again
    judge = {
        "type": "score_model",
        "name": "j",
        "model": "judge",
        "input": [{"role": "user", "content": "?"}],
    }
    untyped(judge["input"][0])["content"] = "{{sample.output_text}}"
    with serving(lambda path, asked: (200, verdict(1.0).body)) as url:
        backends = Backends({"judge": JudgeModel(f"{url}/v1")})
        for web in opened(house, inference, backends):
            asked = body(grader=judge) | {"rows": 2, "samples": 2}
            found = web.post(PREVIEW, json=asked).json()
            with house.database.read() as session:
                used = tenants.usage_since(session, house.project.id)
            house.limit(grader_tokens_per_30_days=used.grader_tokens)
            refused = error(web.post(PREVIEW, json=asked), 429)

    assert found["grading"]["tokens"] == used.grader_tokens == 4 * 15
    assert (refused["code"], len(model.sampled)) == ("insufficient_quota", 4)


def test_what_no_job_could_be_or_is_too_much_is_refused_before_anything_is_sampled(
    web: httpx.Client, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    asked = body()

    for fields, param in (
        ({"rows": 0}, "rows"),
        ({"rows": 33}, "rows"),
        ({"samples": 1}, "samples"),
        ({"rows": 32, "samples": 32}, None),
        ({"budget": {"amount": 5.0, "currency": "EUR"}}, "budget.amount"),
        ({"training_file": "file-none"}, "training_file"),
    ):
        assert error(web.post(PREVIEW, json=asked | fields), 400)["param"] == param
    assert model.asked == []


def test_a_bad_row_is_named(
    web: httpx.Client, model: Model, body: Callable[..., dict[str, Any]], upload: Callable[..., str]
) -> None:
    asked, user = body(), {"role": "user", "content": "x"}

    for row, named in (
        ({"messages": []}, "line 2"),
        ({"messages": [user]}, "line 2: the grader reads {{item.answer}}"),
        (
            {"messages": [{"role": "tool", "content": "x"}, user], "answer": "y"},
            "line 2 cannot be previewed: messages.0: a reinforcement job has no tools",
        ),
    ):
        file = upload(jsonl([ROWS[0], row]))
        refused = error(web.post(PREVIEW, json=asked | {"training_file": file}), 400)
        assert refused["param"] == "training_file"
        assert named in refused["message"]
    assert model.asked == []


def test_what_the_inference_server_refuses_is_told(
    web: httpx.Client, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    asked = body()

    for answer, status, code, message in (
        (
            refuses(400, "too long", "context_length_exceeded"),
            400,
            "context_length_exceeded",
            "line 1: too long",
        ),
        (
            refuses(404, "none such", "model_not_found"),
            400,
            "model_not_found",
            "The inference server: none such",
        ),
        (refuses(503, "still loading", "loading", **{"retry-after": "5"}), 503, "loading", "still loading"),
        (HTMLResponse("<h1>Oops</h1>", 500), 500, "internal_error", NO_JSON),
        (refuses(500, "the model failed"), 500, "internal_error", "the model failed"),
    ):
        model.asked.clear()
        model.answer = partial(lambda answer, asked: answer, answer)
        refused = web.post(PREVIEW, json=asked | {"rows": 12})
        assert error(refused, status)["code"] == code
        assert refused.json()["error"]["message"] == message
        assert refused.headers.get("retry-after") == answer.headers.get("retry-after")
        assert len(model.asked) == 1


def test_an_error_among_many_answers_is_the_previews(
    web: httpx.Client, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    turns = iter(range(1000))
    model.answer = lambda asked: says("yes") if next(turns) < 5 else refuses(500, "out of memory")

    assert error(web.post(PREVIEW, json=body()), 500)["message"] == "out of memory"


def test_without_an_inference_server_the_refusal_says_what_to_do(
    house: House, body: Callable[..., dict[str, Any]]
) -> None:
    for web in opened(house, ""):
        refused = error(web.post(PREVIEW, json=body()), 400)

    assert refused["code"] == "serving_not_configured"


def test_an_inference_server_that_is_not_there_is_503(
    house: House, body: Callable[..., dict[str, Any]]
) -> None:
    for web in opened(house, "http://127.0.0.1:9"):
        refused = web.post(PREVIEW, json=body())

    assert error(refused, 503)["code"] == "not_ready"
    assert refused.headers["retry-after"] == "5"


def test_a_client_that_leaves_ends_the_sampling(
    house: House, inference: str, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    model.hangs = True
    for web in opened(house, inference):
        request = web.build_request("POST", PREVIEW, json=body())
        head = [f"POST {request.url.path} HTTP/1.1", *(": ".join(pair) for pair in request.headers.items())]
        with socket.create_connection((request.url.host, request.url.port)) as client:
            client.sendall("\r\n".join([*head, "", ""]).encode() + request.content)
            assert model.begun.wait(30)
        assert model.left.wait(30)


def test_no_more_than_a_few_run_at_once(
    house: House, inference: str, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    model.go.clear()
    asked, answers = body() | {"rows": 1}, []

    def ask(web: httpx.Client) -> None:
        answers.append(web.post(PREVIEW, json=asked))

    for web in opened(house, inference, places=1):
        first = threading.Thread(target=ask, args=[web])
        first.start()
        assert model.begun.wait(30)
        refused = web.post(PREVIEW, json=asked)
        model.go.set()
        first.join()
        ask(web)

    assert error(refused, 503)["code"] == "not_ready"
    assert refused.headers["retry-after"] == "10"
    assert [answer.status_code for answer in answers] == [200, 200]


def test_one_that_takes_too_long_is_refused_in_a_way_that_no_client_repeats(
    house: House, inference: str, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    model.go.clear()
    for web in opened(house, inference, seconds=0.2):
        refused = error(web.post(PREVIEW, json=body()), 400)

    model.go.set()
    assert refused["code"] == "preview_too_slow"
    assert "fewer rows or samples" in refused["message"]


def test_a_preview_that_nobody_waits_for_keeps_its_place_until_its_grader_has_ended(
    house: House, inference: str, body: Callable[..., dict[str, Any]]
) -> None:
    """A thread cannot be stopped: let go, its place would be taken again and again, until there is no thread left."""
    go = threading.Event()
    judge: dict[str, Any] = {"type": "score_model", "name": "j", "model": "judge"}
    judge |= {"input": [{"role": "user", "content": "{{sample.output_text}}"}]}
    with serving(lambda path, asked: (200, verdict(float(go.wait(30))).body)) as url:
        backends = Backends({"judge": JudgeModel(f"{url}/v1")})
        for web in opened(house, inference, backends, places=1, seconds=1.0):
            asked = body(grader=judge) | {"rows": 1, "samples": 2}
            slow, meanwhile = web.post(PREVIEW, json=asked), web.post(PREVIEW, json=asked)
            go.set()
            while (later := web.post(PREVIEW, json=asked)).status_code == 503:
                pass

    assert error(slow, 400)["code"] == "preview_too_slow"
    assert error(meanwhile, 503)["message"] == "Other previews are still running; try again."
    assert later.json()["grading"]["failed"] == 0


@dataclass(frozen=True)
class Noting(Backends):
    """Notes whose line of the hazard pool each grader would wait in."""

    owners: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def open(
        self, spec: GraderSpec, *, owner: str = "", trace_id: str | None = None
    ) -> AsyncIterator[Grader]:
        self.owners.append(OWNER.get())
        async with super().open(spec, owner=owner, trace_id=trace_id) as grader:
            yield grader


def test_what_its_grader_asks_of_the_hazard_pool_has_its_project_for_an_owner(
    house: House, inference: str, body: Callable[..., dict[str, Any]]
) -> None:
    backends = Noting({})
    for web in opened(house, inference, backends):
        assert web.post(PREVIEW, json=body() | {"rows": 1}).status_code == 200

    assert backends.owners == [house.project.id]
