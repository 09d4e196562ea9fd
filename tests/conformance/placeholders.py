"""Real objects behind the names that the tests of OpenAI's client send, and a proxy that puts them into each request.

These tests are written for a mock server, which accepts any id: they retrieve the file `file_id`, and delete it three
times. The proxy replaces each such name by the id of an object of this kind, made anew where the request consumes it.
It changes nothing else, except values that stand for a valid one in the same way, such as the role `role`. Answers pass
unchanged.
"""

import hashlib
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import httpx
import uvicorn
from anyio import to_thread
from openai import APIStatusError, OpenAI
from sqlalchemy import select
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from core.database.engine import Database
from core.database.tables import TunedModel
from tests.conformance.helpers import finished, jsonl, poll

JOB = "ft-AF1WoRqd3aJAHsqc9NY7iL8F"
MODEL = "ft:gpt-4o-mini:acemeco:suffix:abc123"
CHECKPOINT = "ft:gpt-4o-mini-2024-07-18:org:weather:B7R9VjQd"
PERMISSION = "cp_zc4Q7MP6XxulcVzj4MZdwsAB"
UPLOAD = "upload_abc123"
ENDPOINT = "whe_123"
RUN = "evals/eval_id/runs/run_id"
DATA = b"Example data"
ROW: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
}


class Objects:
    """The objects of one project, made when a request first needs one.

    Nothing runs after `finish`: the limits of the project allow no job and no run, so that each object stays in the
    state in which its requests find it.
    """

    def __init__(
        self, client: OpenAI, database: Database, *, model: str, other_project: str, webhook_url: str
    ) -> None:
        self.client, self.database, self.model = client, database, model
        self.other_project, self.webhook_url = other_project, webhook_url
        self._numbers = itertools.count(1)

    def finish(self) -> None:
        """Make the objects that need a worker: a tuned model with its checkpoints, and a run with its items."""
        assert self.job.fine_tuned_model
        assert self.item

    @cached_property
    def training_file(self) -> str:
        return self.client.files.create(file=("rows.jsonl", jsonl([ROW] * 10)), purpose="fine-tune").id

    @cached_property
    def job(self) -> Any:
        method: Any = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3}}}
        job = self.client.fine_tuning.jobs.create(
            model=self.model, training_file=self.training_file, method=method
        )
        job = finished(self.client, job.id)
        assert job.status == "succeeded", job.error
        return job

    def new_job(self) -> str:
        return self.client.fine_tuning.jobs.create(model=self.model, training_file=self.training_file).id

    def queued_job(self) -> str:
        """A job that waits, since none may run."""
        jobs, made = self.client.fine_tuning.jobs, self.new_job()
        return poll(lambda: jobs.retrieve(made), lambda job: job.status == "queued").id

    def paused_job(self) -> str:
        return self.client.fine_tuning.jobs.pause(self.queued_job()).id

    def new_model(self) -> str:
        """Another name for the checkpoint of the job. Only training makes a tuned model, and takes long."""
        with self.database.write() as session:
            own = session.scalars(
                select(TunedModel).where(TunedModel.name == self.job.fine_tuned_model)
            ).one()
            made = TunedModel(
                name=f"{own.name}{next(self._numbers)}",
                project_id=own.project_id,
                job_id=own.job_id,
                checkpoint_id=own.checkpoint_id,
                base_model=own.base_model,
            )
            session.add(made)
            return made.name

    def new_permission(self) -> str:
        permissions = self.client.fine_tuning.checkpoints.permissions
        [made] = permissions.create(self.job.fine_tuned_model, project_ids=[self.other_project]).data
        return made.id

    def new_file(self) -> str:
        return self.client.files.create(file=("file.txt", DATA), purpose="assistants").id

    @cached_property
    def file(self) -> str:
        return self.new_file()

    def new_eval(self) -> str:
        criterion: Any = {
            "type": "string_check",
            "name": "exact",
            "input": "{{item.foo}}",
            "reference": "bar",
            "operation": "eq",
        }
        schema: Any = {"type": "object", "properties": {"foo": {"type": "string"}}}
        made = self.client.evals.create(
            data_source_config={"type": "custom", "item_schema": schema, "include_sample_schema": True},
            testing_criteria=[criterion],
        )
        return made.id

    @cached_property
    def eval(self) -> str:
        return self.new_eval()

    def new_run(self) -> str:
        rows: Any = [{"item": {"foo": "bar"}, "sample": {"output_text": "bar"}}]
        source: Any = {"type": "jsonl", "source": {"type": "file_content", "content": rows}}
        return self.client.evals.runs.create(self.eval, data_source=source).id

    @cached_property
    def run(self) -> str:
        runs, made = self.client.evals.runs, self.new_run()
        return poll(lambda: runs.retrieve(made, eval_id=self.eval), lambda run: run.status == "completed").id

    @cached_property
    def item(self) -> str:
        [item] = self.client.evals.runs.output_items.list(self.run, eval_id=self.eval).data
        return item.id

    @cached_property
    def batch_file(self) -> str:
        request = {
            "custom_id": "1",
            "method": "POST",
            "url": "/v1/responses",
            "body": {"model": self.model, "input": "Hi"},
        }
        return self.client.files.create(file=("batch.jsonl", jsonl([request])), purpose="batch").id

    @cached_property
    def batch(self) -> str:
        made = self.client.batches.create(
            completion_window="24h", endpoint="/v1/responses", input_file_id=self.batch_file
        )
        return made.id

    def new_upload(self) -> str:
        made = self.client.uploads.create(
            bytes=len(DATA), filename="filename", mime_type="text/plain", purpose="assistants"
        )
        return made.id

    def new_part(self, upload: str) -> str:
        return self.client.uploads.parts.create(upload, data=DATA).id

    def new_endpoint(self) -> str:
        made = self.client.webhooks.create(name="x", url=self.webhook_url, event_types=["batch.completed"])
        return made.id

    @cached_property
    def endpoint(self) -> str:
        return self.new_endpoint()

    def first_of(self, path: str) -> str | None:
        """The id of the first object of a list; None where it is empty, or no list."""
        try:
            page: Any = self.client.get(f"/{path}", cast_to=object)
        except APIStatusError:
            return None
        return page["data"][0]["id"] if page["data"] else None


class Requests:
    """Requests of the tests, with real objects in place of placeholders."""

    def __init__(self, objects: Objects) -> None:
        made = self.objects = objects
        self._shared: dict[str, Callable[[], str]] = {
            JOB: lambda: made.job.id,
            CHECKPOINT: lambda: made.job.fine_tuned_model,
            "gpt-6-astra": lambda: made.model,
            "file_id": lambda: made.file,
            "eval_id": lambda: made.eval,
            "run_id": lambda: made.run,
            "output_item_id": lambda: made.item,
            "batch_id": lambda: made.batch,
            ENDPOINT: lambda: made.endpoint,
        }
        # Requests after which the object is another one, or gone.
        self._fresh: dict[tuple[str, str], tuple[str, Callable[[], str]]] = {
            ("POST", f"fine_tuning/jobs/{JOB}/cancel"): (JOB, made.new_job),
            ("POST", f"fine_tuning/jobs/{JOB}/pause"): (JOB, made.queued_job),
            ("POST", f"fine_tuning/jobs/{JOB}/resume"): (JOB, made.paused_job),
            ("GET", f"fine_tuning/checkpoints/{JOB}/permissions"): (JOB, lambda: made.job.fine_tuned_model),
            ("DELETE", f"fine_tuning/checkpoints/{CHECKPOINT}/permissions/{PERMISSION}"): (
                PERMISSION,
                made.new_permission,
            ),
            ("DELETE", "files/file_id"): ("file_id", made.new_file),
            ("DELETE", f"models/{MODEL}"): (MODEL, made.new_model),
            ("DELETE", "evals/eval_id"): ("eval_id", made.new_eval),
            ("DELETE", RUN): ("run_id", made.new_run),
            ("POST", f"{RUN}/cancel"): ("run_id", made.new_run),
            ("POST", f"uploads/{UPLOAD}/parts"): (UPLOAD, made.new_upload),
            ("POST", f"uploads/{UPLOAD}/cancel"): (UPLOAD, made.new_upload),
            ("POST", f"uploads/{UPLOAD}/complete"): (UPLOAD, made.new_upload),
            ("DELETE", f"webhook_endpoints/{ENDPOINT}"): (ENDPOINT, made.new_endpoint),
        }

        self._values: dict[tuple[str, str], Callable[[], str]] = {
            ("training_file", "file-abc123"): lambda: made.training_file,
            ("validation_file", "file-abc123"): lambda: made.training_file,
            ("input_file_id", "input_file_id"): lambda: made.batch_file,
            ("model", "gpt-4o-mini"): lambda: made.model,
            ("model", "gpt-6-astra"): lambda: made.model,
            ("model", "gpt-3.5-turbo-instruct"): lambda: made.model,
            ("model", "model"): lambda: made.model,
            ("project_ids", "string"): lambda: made.other_project,
            ("project_id", "project_id"): lambda: made.other_project,
            ("purpose", "purpose"): lambda: "assistants",
            ("role", "role"): lambda: "user",
            ("url", "https://"): lambda: made.webhook_url,
            ("md5", "md5"): lambda: hashlib.md5(DATA).hexdigest(),
        }

    def path(self, method: str, path: str) -> str:
        name, new = self._fresh.get((method, path), ("", str))
        return "/".join(new() if part == name else self._real(part) for part in path.split("/"))

    def _real(self, part: str) -> str:
        return self._shared[part]() if part in self._shared else part

    def after(self, method: str, path: str) -> None:
        """Cancel a job that was paused or resumed: lists are to have no paused jobs in them, and nothing is to run."""
        match (method, *path.split("/")):
            case "POST", "fine_tuning", "jobs", job, "pause" | "resume":
                self.objects.client.fine_tuning.jobs.cancel(job)

    def body(self, path: str, sent: Any) -> Any:
        """The JSON body. `path` has real ids already."""
        match path.split("/"):
            case "responses", *rest if rest in ([], ["input_tokens"]):
                sent = {
                    "model": self.objects.model,
                    "input": "Hi",
                } | sent  # these bodies are empty, or nearly
            case ["uploads"]:
                sent = sent | {"bytes": len(DATA)}  # these uploads have 0 bytes
            case "uploads", upload, "complete":
                sent = sent | {"part_ids": [self.objects.new_part(upload)]}
        return self._replaced("", sent)

    def query(self, path: str, sent: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        """The query, with the first object of the same list as its cursor."""
        pairs = [(name, self._replaced(name, value)) for name, value in sent if name != "after"]
        if len(pairs) < len(sent) and (first := self.objects.first_of(path)) is not None:
            pairs.append(("after", first))
        return tuple(pairs)

    def _replaced(self, key: str, value: Any) -> Any:
        match value:
            case dict():
                return {name: self._replaced(name, below) for name, below in value.items()}
            case list():
                return [self._replaced(key, below) for below in value]
            case str() if (key, value) in self._values:
                return self._values[key, value]()
        return value


@contextmanager
def proxy(objects: Objects, address: str, key: str) -> Iterator[str]:
    """Serve the API at `address` for tests that send placeholders, and any key. Yields the base URL."""
    requests = Requests(objects)

    def forwarded(request: Request, body: bytes) -> Response:
        path = requests.path(request.method, request.path_params["path"])
        content_type = request.headers.get("content-type", "")
        if content_type == "application/json" and body:
            body = json.dumps(requests.body(path, json.loads(body))).encode()
        answer = upstream.request(
            request.method,
            path,
            params=requests.query(path, request.query_params.multi_items()),
            content=body,
            headers={"content-type": content_type} if content_type else {},
        )
        requests.after(request.method, path)
        kept = {
            name: answer.headers[name] for name in ("content-type", "x-request-id") if name in answer.headers
        }
        return Response(answer.content, answer.status_code, kept)

    async def forward(request: Request) -> Response:
        return await to_thread.run_sync(forwarded, request, await request.body())

    methods = ["GET", "POST", "DELETE"]
    app = Starlette(routes=[Route("/{path:path}", forward, methods=methods)])
    upstream = httpx.Client(base_url=address, headers={"authorization": f"Bearer {key}"}, timeout=120)
    with upstream, socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", log_config=None, lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
