"""Previews over real connections, with an inference server that answers as it is told."""

import asyncio
import errno
import hashlib
import json
import threading
import time
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
from sqlalchemy import event, select, update
from sqlalchemy.exc import OperationalError

from api.app import create_app
from core.database.tables import Preview
from core.registry import BaseModelEntry, Registry
from core.results import background
from core.settings import Settings
from core.storage.datasets import Example
from core.tenancy import tenants
from graders.backends import Backends
from graders.calls import CallRetryPolicy
from graders.endpoint import Endpoints
from graders.hazards.pool import OWNER
from graders.judge.judges import JudgeModel
from graders.judge.usage import TokenLedger
from graders.spec import GraderSpec
from graders.types import Grader
from tests.api.conftest import GRADER, POLL_SECONDS, House
from tests.api.test_chat import served
from tests.api.test_full import tuned
from tests.graders.servers import serving, verdict
from tests.hyperparameters import in_groups
from tests.present import untyped
from tests.thinking import HYBRID, make_thinking_model
from worker.prepare.task import prepare_task

ROWS = [{"messages": [{"role": "user", "content": f"row {n}"}], "answer": "yes"} for n in range(12)]
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}}
PREVIEW = "/regraft/previews"
STORED = pytest.mark.both_databases
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
    load_seconds: float = 0.0,
    entry: BaseModelEntry | None = None,
    **settings: Any,
) -> Iterator[httpx.Client]:
    """`places`: previews at once; `seconds`: how long one may take, `load_seconds`: and wait for its model."""
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
    app.state.service = replace(app.state.service, preview_load_seconds=load_seconds)
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


def created(web: httpx.Client, asked: dict[str, Any]) -> dict[str, Any]:
    answer = web.post(PREVIEW, json=asked)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def ended(web: httpx.Client, made: dict[str, Any]) -> dict[str, Any]:
    while made["status"] == "in_progress":
        time.sleep(POLL_SECONDS)
        made = web.get(f"{PREVIEW}/{made['id']}").json()
    return made


def report(web: httpx.Client, asked: dict[str, Any]) -> dict[str, Any]:
    """Of a preview that ends well."""
    made = ended(web, created(web, asked))
    assert made["status"] == "completed", made["error"]
    found: dict[str, Any] = made["report"]
    return found


def failed(web: httpx.Client, asked: dict[str, Any], status: int) -> dict[str, Any]:
    """The error of a preview that begins, and fails with this status."""
    made = ended(web, created(web, asked))
    assert (made["status"], made["error"]["status"]) == ("failed", status)
    found: dict[str, Any] = made["error"]
    return found


def error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()["error"]
    return found


def test_a_preview_reports_what_the_base_model_makes_of_a_few_rows(
    web: httpx.Client, body: Callable[..., dict[str, Any]]
) -> None:
    found = report(web, body(rows=[*ROWS]))

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


def test_a_preview_of_a_stored_grader_is_that_of_its_specification(
    web: httpx.Client, body: Callable[..., dict[str, Any]]
) -> None:
    asked = body() | {"rows": 2, "samples": 2}
    grader = asked["method"]["reinforcement"]["grader"]
    web.post("/regraft/graders", json={"name": "close", "grader": grader})
    method = asked["method"]["reinforcement"] | {"grader": {"type": "stored", "name": "close"}}
    by_name = asked | {"method": {"type": "reinforcement", "reinforcement": method}}

    made = [ended(web, created(web, one)) for one in (asked, by_name)]

    assert [one["status"] for one in made] == ["completed", "completed"]
    assert made[1]["request"] == made[0]["request"]


@STORED
def test_a_preview_is_stored_with_its_progress_and_its_answers(
    web: httpx.Client, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    asked = body() | {"rows": 2, "samples": 2}
    model.go.clear()

    made = created(web, asked)
    model.go.set()
    done = ended(web, made)

    assert (made["status"], made["report"], made["finished_at"]) == ("in_progress", None, None)
    idle = {"of": 4, "waiting_for": None}
    assert made["progress"] == idle | {"phase": "loading", "sampled": 0, "graded": 0}
    assert (made["request"]["rows"], made["request"]["samples"]) == (2, 2)
    assert (done["status"], done["error"]) == ("completed", None)
    assert done["progress"] == idle | {"phase": "grading", "sampled": 4, "graded": 4}
    assert web.get(PREVIEW).json()["data"] == [done]
    answers = web.get(f"{PREVIEW}/{made['id']}/answers").json()["data"]
    assert [(one["line"], one["member"]) for one in answers] == [
        (prompt["line"], member) for prompt in done["report"]["prompts"] for member in range(2)
    ]
    assert Counter((one["output_text"], one["score"]) for one in answers) == {("yes", 1.0): 2, ("no", 0.0): 2}
    assert {one["item"]["answer"] for one in answers} == {"yes"}
    assert all(one["item"]["messages"] for one in answers)


def test_answers_are_paged(web: httpx.Client, body: Callable[..., dict[str, Any]]) -> None:
    path = f"{PREVIEW}/{ended(web, created(web, body() | {'rows': 2, 'samples': 2}))['id']}/answers"

    first = web.get(path, params={"limit": 3}).json()
    rest = web.get(path, params={"limit": 3, "after": first["data"][-1]["id"]}).json()

    assert (len(first["data"]), first["has_more"]) == (3, True)
    assert (len(rest["data"]), rest["has_more"]) == (1, False)
    assert error(web.get(path, params={"after": "previewanswer_9"}), 400)["param"] == "after"


def test_a_page_of_answers_with_large_rows_ends_early_and_the_next_one_goes_on(
    web: httpx.Client, house: House, body: Callable[..., dict[str, Any]]
) -> None:
    """Three megabytes in a row, which each of its answers repeats: two fit into a page, and one always does."""
    made = ended(web, created(web, body() | {"rows": 2, "samples": 2}))["id"]
    with house.database.write() as session:
        row = session.scalars(select(Preview).where(Preview.id == made)).one()
        large = {"messages": [], "answer": "yes", "text": "x" * (3 << 20)}
        row.answers = [one | {"item": large} if "item" in one else one for one in row.answers or []]
    path = f"{PREVIEW}/{made}/answers"

    first = web.get(path).json()
    rest = web.get(path, params={"after": first["data"][-1]["id"]}).json()

    assert (len(first["data"]), first["has_more"]) == (2, True)
    assert (len(rest["data"]), rest["has_more"]) == (2, False)
    assert all(one["item"] == large for one in first["data"] + rest["data"])


def test_headers_of_graders_are_not_shown(
    house: House, inference: str, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    model.answer = lambda asked: refuses(500, "not now")  # so that nothing is graded
    grader = {"type": "endpoint", "name": "e", "url": "https://grader.example/", "headers": {"key": "secret"}}
    for web in opened(house, inference, Backends({}, endpoints=Endpoints(("grader.example",)))):
        shown = created(web, body(grader=grader) | {"rows": 1, "samples": 2})["request"]

    assert shown["method"]["reinforcement"]["grader"]["headers"] == {"key": "***"}


def test_a_canceled_preview_stops_sampling_and_its_place_is_free(
    house: House, inference: str, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    model.hangs = True
    for web in opened(house, inference, places=1):
        asked = body() | {"rows": 1, "samples": 2}
        made = created(web, asked)
        assert model.begun.wait(10)
        canceled = web.post(f"{PREVIEW}/{made['id']}/cancel").json()
        assert model.left.wait(30)
        model.hangs = False
        while (later := web.post(PREVIEW, json=asked)).status_code == 503:
            time.sleep(POLL_SECONDS)

        assert (canceled["status"], canceled["report"]) == ("canceled", None)
        assert web.post(f"{PREVIEW}/{made['id']}/cancel").json() == canceled
        assert ended(web, later.json())["status"] == "completed"


@STORED
def test_a_deleted_preview_is_gone_and_stays_a_cursor(
    web: httpx.Client, body: Callable[..., dict[str, Any]]
) -> None:
    asked = body() | {"rows": 1, "samples": 2}
    older, newer = (ended(web, created(web, asked | {"seed": seed}))["id"] for seed in (1, 2))

    assert web.delete(f"{PREVIEW}/{newer}").json()["deleted"]

    assert error(web.get(f"{PREVIEW}/{newer}"), 404)["param"] == "preview_id"
    assert [one["id"] for one in web.get(PREVIEW, params={"after": newer}).json()["data"]] == [older]


def test_a_preview_whose_process_was_stopped_has_failed(
    house: House, web: httpx.Client, body: Callable[..., dict[str, Any]]
) -> None:
    preview_id = ended(web, created(web, body() | {"rows": 1, "samples": 2}))["id"]
    with house.database.write() as session:
        session.execute(
            update(Preview).values(status="in_progress", report=None, finished_at=None, lease_expires_at=1.0)
        )

    lost = web.get(f"{PREVIEW}/{preview_id}").json()

    assert (lost["status"], lost["error"]["code"], lost["error"]["status"]) == ("failed", "interrupted", 503)


@STORED
def test_another_grader_grades_the_answers_that_are_there(
    web: httpx.Client, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    asked = body() | {"rows": 2, "samples": 4}
    first = ended(web, created(web, asked))
    model.asked.clear()
    method = json.loads(json.dumps(asked["method"]))
    method["reinforcement"]["grader"]["reference"] = "no"

    second = ended(web, created(web, asked | {"method": method}))
    sampled_before = list(model.asked)
    method["reinforcement"]["hyperparameters"] = {"advanced": {"sampling": {"temperature": 0.5}}}
    third = ended(web, created(web, asked | {"method": method}))

    assert (first["answers_of"], second["answers_of"], third["answers_of"]) == (None, first["id"], None)
    assert sampled_before == []
    assert model.asked != []
    assert second["report"]["sampling"]["seconds"] == first["report"]["sampling"]["seconds"]
    before, after = (
        [
            (one["output_text"], one["score"])
            for one in web.get(f"{PREVIEW}/{made['id']}/answers").json()["data"]
        ]
        for made in (first, second)
    )
    assert after == [(text, 1.0 - score) for text, score in before]


def test_only_the_answers_that_are_graded_again_are_read(
    house: House, web: httpx.Client, body: Callable[..., dict[str, Any]]
) -> None:
    asked = body() | {"rows": 1, "samples": 2}
    first = ended(web, created(web, asked))
    ended(web, created(web, asked | {"seed": 1}))
    wide: list[str] = []

    def note(*call: Any) -> None:
        if "previews.answers" in call[2].partition("FROM")[0]:
            wide.append(call[2])

    event.listen(house.database.engine, "before_cursor_execute", note)
    again = created(web, asked)
    event.remove(house.database.engine, "before_cursor_execute", note)

    assert again["answers_of"] == first["id"]
    assert ["previews.seq =" in one.partition("WHERE")[2] for one in wide] == [True]


@STORED
def test_an_estimate_names_the_alarms_that_cannot_fire(
    house: House, inference: str, body: Callable[..., dict[str, Any]]
) -> None:
    pausing = {"stopping": {"on_alarm": "pause"}}
    often = {"n_epochs": 50, "batch_size": 1, "eval_interval": 1, "advanced": pausing}

    for web in opened(house, inference):
        estimate = web.post("/regraft/estimate", json=body(hyperparameters=often)).json()

    assert "validation_falls needs" in estimate["warnings"][-1]


def test_a_job_and_an_estimate_show_the_preview_of_their_request(
    web: httpx.Client, body: Callable[..., dict[str, Any]]
) -> None:
    asked = body()
    unknown = web.post("/regraft/estimate", json=asked).json()
    preview = ended(web, created(web, asked | {"rows": 2, "samples": 4, "seed": 7}))

    estimate = web.post("/regraft/estimate", json=asked).json()
    job = web.post("/fine_tuning/jobs", json=asked | {"suffix": "a"}).json()
    named = web.post("/fine_tuning/jobs", json=asked | {"preview": preview["id"]}).json()

    assert (unknown["estimate"], unknown["preview"]) == (None, None)
    assert estimate["estimate"]["remaining_seconds"] == preview["report"]["estimate"]["remaining_seconds"]
    assert estimate["preview"] == job["preview"] == named["preview"]
    assert job["preview"] == {
        "id": preview["id"],
        "created_at": preview["created_at"],
        "answers": 8,
        "passed": 4,
        "mean_reward": 0.5,
        "signal": preview["report"]["signal"][2]["share"]["expected"],
        "verdict": "good",
    }
    events = web.get(f"/fine_tuning/jobs/{job['id']}/events").json()["data"]
    assert any(
        f"The preview {preview['id']} of this request: 4 of 8 answers pass" in one["message"]
        for one in events
    )


def test_a_job_whose_grader_has_no_name_shows_the_preview_of_its_request(
    web: httpx.Client, body: Callable[..., dict[str, Any]]
) -> None:
    asked = body(grader={key: value for key, value in GRADER.items() if key != "name"})
    preview = ended(web, created(web, asked | {"rows": 1, "samples": 2}))

    job = web.post("/fine_tuning/jobs", json=asked).json()

    assert job["preview"]["id"] == preview["id"]


def test_a_job_of_another_request_does_not_show_the_preview_and_may_not_name_it(
    web: httpx.Client, body: Callable[..., dict[str, Any]], upload: Callable[..., str]
) -> None:
    asked = body()
    preview = ended(web, created(web, asked | {"rows": 1, "samples": 2}))
    other = json.loads(json.dumps(asked))
    other["method"]["reinforcement"]["grader"]["reference"] = "no"
    other["training_file"] = upload(jsonl(ROWS[:5]))

    refused = error(web.post("/fine_tuning/jobs", json=other | {"preview": preview["id"]}), 400)

    assert web.post("/fine_tuning/jobs", json=other).json()["preview"] is None
    assert refused["param"] == "preview"
    assert "it differs in training file, grader." in refused["message"]
    unknown = error(web.post("/fine_tuning/jobs", json=asked | {"preview": "prev_none"}), 400)
    assert unknown["param"] == "preview"
    supervised = {"model": "tiny", "training_file": asked["training_file"], "preview": preview["id"]}
    assert "only reinforcement" in error(web.post("/fine_tuning/jobs", json=supervised), 400)["message"]


def test_only_the_newest_previews_of_a_project_are_kept(
    house: House, web: httpx.Client, body: Callable[..., dict[str, Any]]
) -> None:
    asked = body() | {"rows": 1, "samples": 2}
    first = ended(web, created(web, asked))
    with house.database.write() as session:
        row = session.scalars(select(Preview)).one()
        columns = {
            column.name: getattr(row, column.name)
            for column in Preview.__table__.columns
            if column.name not in ("seq", "id")
        }
        session.add_all([Preview(**columns) for _ in range(background.MAX_KEPT - 1)])

    created(web, asked)

    assert error(web.get(f"{PREVIEW}/{first['id']}"), 404)["param"] == "preview_id"


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
        preview = report(web, asked | {"rows": 1, "samples": 2})

    job = SimpleNamespace(
        training_file="file-a",
        validation_file="file-b",
        parent=None,
        method="reinforcement",
        body={"hyperparameters": hyperparameters, "response_format": None},
        resolved=None,
        created_at=0,
        seed=0,
    )
    shape = SimpleNamespace(parameters=1000)
    base = SimpleNamespace(
        entry=entry,
        source=entry.path,
        shape=shape,
        sampler="transformers",
        fleet=(),
        rows=False,
        quantizes_activations=False,
    )
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

    found = report(web, body() | {"rows": 2, "samples": 3})

    assert (found["answers"], found["cut_off"], found["cut_thoughts"]) == (6, 6, 6)
    assert "6 of them within their thought" in found["recommendation"]


def test_it_creates_nothing(web: httpx.Client, body: Callable[..., dict[str, Any]]) -> None:
    report(web, body())

    assert web.get("/fine_tuning/jobs").json()["data"] == []


def test_the_answers_are_sampled_as_the_job_would(
    web: httpx.Client, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    advanced = {"temperature": 0.75, "max_completion_tokens": 33}
    message = {"role": "assistant", "content": "hello", "weight": 0}
    rows = [ROWS[0] | {"messages": [message, *ROWS[0]["messages"]]}]
    asked = body(rows=rows, hyperparameters={"advanced": in_groups(advanced)}, response_format=FORMAT)
    report(web, asked | {"samples": 3})

    assert len(model.sampled) == 3
    assert len({one.pop("seed") for one in model.sampled}) == 3
    for one in model.sampled:
        assert one == {
            "model": "tiny",
            "messages": [{"role": "assistant", "content": "hello"}, *ROWS[0]["messages"]],
            "temperature": 0.75,
            "max_completion_tokens": 33,
            "response_format": FORMAT,
            "regraft": {"base_model": "tiny"},
        }


def test_a_tuned_model_that_a_job_would_train_further_answers_itself(
    web: httpx.Client, house: House, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    name, manifest = "ft:tiny:o::1", b'{"format": 1, "files": []}'
    tuned(house, name, {})
    asked = body(model=name)

    # Its files are deleted with its checkpoint.
    assert error(web.post(PREVIEW, json=asked), 400)["code"] == "model_not_available"

    house.blobs.put_bytes("checkpoints/4/manifest.json", manifest)
    report(web, asked)
    adapter = {"prefix": "checkpoints/4", "manifest_sha256": hashlib.sha256(manifest).hexdigest()}
    assert [one["model"] for one in model.asked] == [name] * len(model.asked)
    assert [one["regraft"] for one in model.asked] == [{"base_model": "tiny", "adapter": adapter}] * len(
        model.asked
    )


def test_one_seed_draws_the_same_rows_and_answers_and_another_draws_others(
    web: httpx.Client, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    asked = body() | {"rows": 4, "samples": 2}

    def drawn(**seed: int) -> list[tuple[str, int]]:
        model.asked.clear()
        web.delete(f"{PREVIEW}/{ended(web, created(web, asked | seed))['id']}")
        return sorted((one["messages"][0]["content"], one["seed"]) for one in model.sampled)

    first = drawn(seed=1)
    assert len(first) == 8
    assert drawn(seed=1) == first
    assert drawn(seed=2) != first


def test_a_file_with_fewer_rows_is_tried_as_a_whole(
    web: httpx.Client, body: Callable[..., dict[str, Any]]
) -> None:
    found = report(web, body(rows=ROWS[:3]) | {"samples": 2})

    assert [one["line"] for one in found["prompts"]] == [1, 2, 3]


def test_json_answers_reach_the_grader_as_json(
    web: httpx.Client, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    model.answer = lambda asked: says('{"word": "yes"}')
    grader = GRADER | {"input": "{{sample.output_json.word}}"}

    found = report(web, body(grader=grader, response_format=FORMAT) | {"rows": 2})

    assert (found["passed"], found["verdict"]) == (16, "too_easy")


def test_answers_that_are_cut_off_are_counted(
    web: httpx.Client, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    model.answer = lambda asked: says("I think", finish="length", wrote=64)

    found = report(web, body() | {"rows": 2})

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

    assert report(web, body(grader=grader))["passed"] == 64


def test_an_answer_that_cannot_be_graded_is_no_wrong_one(
    web: httpx.Client, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    turns = iter(range(1000))
    model.answer = lambda asked: says(('{"word": "yes"}', "{", '{"word": "no"}')[next(turns) % 3])
    grader = GRADER | {"input": "{{sample.output_json.word}}"}

    found = report(web, body(grader=grader, response_format=FORMAT) | {"rows": 3})

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
            found = report(web, asked)
            with house.database.read() as session:
                used = tenants.usage_since(session, house.project.id)
            house.limit(grader_tokens_per_30_days=used.grader_tokens)
            refused = error(web.post(PREVIEW, json=asked), 429)

    assert found["grading"]["tokens"] == used.grader_tokens == 4 * 15
    assert (refused["code"], len(model.sampled)) == ("insufficient_quota", 4)


def test_a_database_that_is_away_for_a_moment_after_the_judges_costs_no_preview(
    house: House, inference: str, body: Callable[..., dict[str, Any]]
) -> None:
    """Its answers are paid for by then."""
    judge = {"type": "score_model", "name": "j", "model": "judge"}
    message = {"role": "user", "content": "{{sample.output_text}}"}
    away = [OperationalError("INSERT", {}, ConnectionRefusedError("connection refused"))]

    @event.listens_for(house.database.engine, "before_cursor_execute")
    def on_statement(connection: Any, cursor: Any, statement: str, *more: Any) -> None:
        if statement.startswith("INSERT INTO project_usage") and away:
            raise away.pop()

    with serving(lambda path, asked: (200, verdict(1.0).body)) as url:
        for web in opened(house, inference, Backends({"judge": JudgeModel(f"{url}/v1")})):
            found = report(web, body(grader={**judge, "input": [message]}) | {"rows": 1, "samples": 2})
    with house.database.read() as session:
        used = tenants.usage_since(session, house.project.id)

    assert away == []
    assert found["grading"]["tokens"] == used.grader_tokens == 2 * 15


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
            "line 2: messages[0].tool_call_id: is missing",
        ),
    ):
        file = upload(jsonl([ROWS[0], row]))
        refused = error(web.post(PREVIEW, json=asked | {"training_file": file}), 400)
        assert refused["param"] == "training_file"
        assert named in refused["message"]
    assert model.asked == []


FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "find", "arguments": "{}"}}


def test_rows_with_tools_are_sampled_with_them_and_graders_read_the_calls(
    web: httpx.Client, model: Model, body: Callable[..., dict[str, Any]], upload: Callable[..., str]
) -> None:
    def answer(asked: dict[str, Any]) -> Response:
        message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        return JSONResponse({"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 2}})

    model.answer = answer
    user = {"role": "user", "content": "x"}
    messages = [
        user,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "no", "tool_call_id": "c"},
    ]
    row = {"messages": messages, "tools": [FIND], "parallel_tool_calls": False, "answer": "find"}
    grader = {
        "type": "string_check",
        "name": "calls",
        "operation": "eq",
        "input": "{{sample.output_tools[0].function.name}}",
        "reference": "{{item.answer}}",
    }
    made = ended(
        web,
        created(
            web,
            body(grader=grader)
            | {"rows": 1, "samples": 2, "training_file": upload(jsonl([row, row]), name="tools.jsonl")},
        ),
    )

    assert made["status"] == "completed", made["error"]
    asked = model.asked[-1]
    assert [message["role"] for message in asked["messages"]] == ["user", "assistant", "tool"]
    assert (asked["tools"], asked["parallel_tool_calls"]) == ([FIND], False)
    answers = web.get(f"{PREVIEW}/{made['id']}/answers").json()["data"]
    assert [(one["output_text"], one["output_tools"], one["score"]) for one in answers] == [
        ("", [CALL], 1.0)
    ] * 2


def test_answers_to_rows_with_tools_cannot_have_a_response_format(
    web: httpx.Client, body: Callable[..., dict[str, Any]], upload: Callable[..., str]
) -> None:
    file = upload(jsonl([ROWS[0] | {"tools": [FIND]}]), name="tools.jsonl")

    refused = error(web.post(PREVIEW, json=body(response_format=FORMAT) | {"training_file": file}), 400)

    assert refused["param"] == "method.reinforcement.response_format"
    assert refused["message"].startswith("line 1 of the training_file has tools")


def test_tools_need_a_chat_template_that_has_a_place_for_them(
    house: House,
    inference: str,
    body: Callable[..., dict[str, Any]],
    upload: Callable[..., str],
    tmp_path: Path,
) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    row = ROWS[0] | {"tools": [FIND]}
    entry = BaseModelEntry(path=tmp_path, context=128)
    for web in opened(house, inference, entry=entry):
        asked = body() | {"training_file": upload(jsonl([ROWS[0], row]), name="tools.jsonl")}

        refused = error(web.post(PREVIEW, json=asked), 400)

        assert refused["param"] == "training_file"
        assert refused["message"].startswith("line 2 has tools, and the chat template of tiny has no place")
        assert "chat_template" in refused["message"]
        assert "tool_parser" in refused["message"]


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
        refused = failed(web, asked | {"rows": 12}, status)
        assert (refused["code"], refused["message"]) == (code, message)
        assert len(model.asked) == 1


def test_a_preview_waits_for_a_model_that_is_loading(
    house: House, inference: str, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    turns = iter(range(1000))
    loading = refuses(503, "still loading", "loading", **{"retry-after": "1"})
    model.answer = lambda asked: loading if next(turns) == 0 else says("yes")

    for web in opened(house, inference, load_seconds=60.0):
        assert report(web, body() | {"rows": 1, "samples": 2})["passed"] == 2
    assert len(model.asked) == 4


def test_a_preview_waits_for_a_model_that_the_inference_server_does_not_know_yet(
    house: House, inference: str, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    turns = iter(range(1000))
    unknown = refuses(404, "none such", "model_not_found")
    model.answer = lambda asked: unknown if next(turns) == 0 else says("yes")

    for web in opened(house, inference, load_seconds=60.0):
        assert report(web, body() | {"rows": 1, "samples": 2})["passed"] == 2
    assert len(model.asked) == 4


def test_a_preview_waits_for_an_inference_server_that_goes_away_and_says_so(
    house: House, inference: str, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    """Any 503, with Retry-After or without, in the middle of the sampling."""
    turns = iter(range(1000))
    is_back = threading.Event()

    def answer(asked: dict[str, Any]) -> Response:
        is_away = next(turns) > 0 and not is_back.is_set()
        return refuses(503, "no server behind this proxy") if is_away else says("yes")

    model.answer = answer
    for web in opened(house, inference, load_seconds=60.0):
        made = created(web, body() | {"rows": 1, "samples": 2})
        while (now := web.get(f"{PREVIEW}/{made['id']}").json()["progress"])["waiting_for"] is None:
            time.sleep(POLL_SECONDS)
        is_back.set()
        done = ended(web, made)

    assert (now["phase"], now["waiting_for"]) == ("sampling", "inference server")
    assert (done["status"], done["report"]["passed"]) == ("completed", 2)
    assert done["progress"]["waiting_for"] is None


class WithoutDescriptors(Backends):
    """Has no free file descriptor when it opens its first grader."""

    opened = 0

    def open(self, *arguments: Any, **more: Any) -> Any:
        self.opened += 1
        if self.opened == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().open(*arguments, **more)


def test_a_preview_that_cannot_grade_for_want_of_descriptors_grades_later(
    house: House, inference: str, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    model.answer = lambda asked: says("yes")
    backends = WithoutDescriptors({})

    for web in opened(house, inference, backends, load_seconds=60.0):
        assert report(web, body() | {"rows": 1, "samples": 2})["passed"] == 2

    assert backends.opened == 2


def test_an_error_among_many_answers_is_the_previews(
    web: httpx.Client, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    turns = iter(range(1000))
    model.answer = lambda asked: says("yes") if next(turns) < 5 else refuses(500, "out of memory")

    assert failed(web, body(), 500)["message"] == "out of memory"


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
        assert failed(web, body(), 503)["code"] == "not_ready"


def test_no_more_than_a_few_run_at_once(
    house: House, inference: str, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    model.go.clear()
    asked = body() | {"rows": 1}

    for web in opened(house, inference, places=1):
        first = created(web, asked)
        assert model.begun.wait(30)
        refused = web.post(PREVIEW, json=asked)
        model.go.set()
        assert ended(web, first)["status"] == "completed"
        while (later := web.post(PREVIEW, json=asked)).status_code == 503:
            time.sleep(POLL_SECONDS)
        assert ended(web, later.json())["status"] == "completed"

    assert error(refused, 503)["code"] == "not_ready"
    assert refused.headers["retry-after"] == "10"


def test_one_that_takes_too_long_is_refused_in_a_way_that_no_client_repeats(
    house: House, inference: str, model: Model, body: Callable[..., dict[str, Any]]
) -> None:
    model.go.clear()
    for web in opened(house, inference, seconds=0.2):
        refused = failed(web, body(), 400)

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
            slow = failed(web, asked, 400)
            meanwhile = web.post(PREVIEW, json=asked)
            go.set()
            while (again := web.post(PREVIEW, json=asked)).status_code == 503:
                time.sleep(POLL_SECONDS)
            later = ended(web, again.json())

    assert slow["code"] == "preview_too_slow"
    assert error(meanwhile, 503)["message"] == "Other previews or audits are still running; try again."
    assert later["report"]["grading"]["failed"] == 0


@dataclass(frozen=True)
class Noting(Backends):
    """Notes whose line of the hazard pool each grader would wait in."""

    owners: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def open(
        self,
        spec: GraderSpec,
        *,
        owner: str = "",
        trace_id: str | None = None,
        patience: CallRetryPolicy | None = None,
        ledger: TokenLedger | None = None,
    ) -> AsyncIterator[Grader]:
        self.owners.append(OWNER.get())
        async with super().open(
            spec, owner=owner, trace_id=trace_id, patience=patience, ledger=ledger
        ) as grader:
            yield grader


def test_what_its_grader_asks_of_the_hazard_pool_has_its_project_for_an_owner(
    house: House, inference: str, body: Callable[..., dict[str, Any]]
) -> None:
    backends = Noting({})
    for web in opened(house, inference, backends):
        report(web, body() | {"rows": 1})

    assert backends.owners == [house.project.id]
