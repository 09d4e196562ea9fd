"""Tools that need more than one call of the client, or a file."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import openai

from regraft._rules.datasets import InvalidDataset
from regraft._rules.foreign_files import Target
from regraft._rules.states import JOB
from regraft.cli.files import invalid_report
from regraft.cli.output import plain
from regraft.cli.shared import Refused
from regraft.convert import SameFile, UnknownEncoding
from regraft.convert import convert as convert_dataset
from regraft.datasets import validate as validate_dataset
from regraft.literals import Method, Split
from regraft.mcp.workspace import Root, Workspace, content
from regraft.requests import Source, read_each
from regraft.resources.waiting import AsyncWaiting

T = TypeVar("T")
JOB_FIELDS = (
    "id", "status", "model", "fine_tuned_model", "created_at", "finished_at", "estimated_finish", "result", "error",
    "queue", "progress",
)  # fmt: skip
POLL_SECONDS = 0.5
MAX_CASES = 200


async def page(listed: Awaitable[Any], fields: Sequence[str] = ()) -> dict[str, Any]:
    """One page of a list, of its items all fields or these."""
    found = await listed
    items = [plain(one) for one in found.data]
    if fields:
        items = [{name: one[name] for name in fields if one.get(name) is not None} for one in items]
    return {"data": items, "has_more": bool(found.has_more)}


async def within(seconds: float, ended: Awaitable[T], now: Callable[[], Awaitable[T]]) -> T:
    """Return what is awaited, or after this time what `now` returns."""
    try:
        async with asyncio.timeout(seconds):
            return await ended
    except TimeoutError:
        return await now()


async def service_status(work: Workspace) -> dict[str, Any]:
    """Each part of the service, or the error that it answers with."""
    client = work.client
    server = client.base_url.copy_with(path="/")
    asked: Mapping[str, Awaitable[Any]] = {
        "ready": client.get(f"{server}readyz", cast_to=object),
        "models": client.models.list(),
        "workers": client.service.workers(),
        "queues": client.service.queues(),
    }
    parts = {name: await _or_its_error(work, call) for name, call in asked.items()}
    if "data" in parts["models"]:
        parts["models"] = [model["id"] for model in parts["models"]["data"]]
    return parts if work.is_remote else {"server": str(server), **parts}


async def _or_its_error(work: Workspace, call: Awaitable[Any]) -> Any:
    try:
        return plain(await call)
    except openai.OpenAIError as error:
        failure = work.failure_of(error)
        assert failure is not None, "every error of the client has a message"
        return {"error": failure.message}


async def watch_job(
    work: Workspace, job_id: str, until: str | None = None, seconds: float = 30
) -> dict[str, Any]:
    """The job once it has this status, has ended or is paused, or after this time."""
    wanted = JOB.stopped if until is None else JOB.stopped | {until}

    def read() -> Awaitable[Any]:
        return work.client.jobs.retrieve(job_id)

    waiting = AsyncWaiting(POLL_SECONDS).until(lambda job: job.status in wanted, read, lambda job: None)
    job = plain(await within(seconds, waiting, read))
    return {
        "reached": job["status"] in wanted,
        "job": {name: job[name] for name in JOB_FIELDS if job.get(name) is not None},
    }


async def get_metrics(
    work: Workspace, job_id: str, names: Sequence[str] = (), last: int = 5
) -> dict[str, Any]:
    steps = await work.client.jobs.metrics(job_id, frame=False, names=names)
    return {"steps": len(steps), "data": steps[-last:]}


async def get_verdict(work: Workspace, job_id: str) -> dict[str, Any]:
    verdict = await work.client.jobs.verdict(job_id)
    sentence = "The job has not ended, or has no comparison." if verdict is None else str(verdict)
    return {"sentence": sentence, "verdict": plain(verdict)}


async def validate_file(
    work: Workspace,
    path: str,
    grader: Source | None = None,
    split: Split = "train",
    method: Method = "reinforcement",
) -> dict[str, Any]:
    file, spec = work.root.file(path), None if grader is None else await work.grader(grader)
    try:
        valid = await asyncio.to_thread(validate_dataset, file, grader=spec, split=split, method=method)
    except InvalidDataset as bad:
        return invalid_report(path, bad)
    return {"file": path, "ok": True, "rows": valid.rows, "fields": list(valid.fields)}


async def convert_file(
    work: Workspace,
    source: str,
    to: Target,
    out: str,
    names: Mapping[str, str] | None = None,
    encoding: str | None = None,
    replace: bool = False,
) -> dict[str, Any]:
    read, written = work.root.file(source), work.root.path(out)
    if written.suffix != ".jsonl":
        raise Refused(f"{out}: the name of a dataset ends in .jsonl")
    if written.exists() and not replace:
        raise Refused(f"{out} already exists: choose another name, or set replace.")
    try:
        made = await asyncio.to_thread(convert_dataset, read, to, written, names=names, encoding=encoding)
    except (SameFile, UnknownEncoding) as wrong:
        raise Refused(str(wrong)) from wrong
    return vars(made) | {"path": work.root.relative(made.path)}


async def test_grader(
    work: Workspace, grader: Source, cases: str | Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    spec, rows = await work.grader(grader), await asyncio.to_thread(_cases, work.root, cases)
    tests = await work.client.graders.test(spec, rows)
    return {"failed": sum(not test.passed for test in tests), "data": plain(tests)}


def _cases(root: Root, source: str | Iterable[Mapping[str, Any]]) -> Any:
    """
    Raises:
        InvalidRequestFile: a line is not JSON.
        Refused: they are more than MAX_CASES.
    """
    found = content(source)
    cases = root.file(found) if isinstance(found, str) else [*found]
    rows = read_each(cases, lambda number, row, where: row)
    if len(rows) > MAX_CASES:
        raise Refused(f"There are {len(rows)} cases. Test at most {MAX_CASES} at a time.")
    return rows


async def validate_job(work: Workspace, job: Source) -> Any:
    return await work.client.jobs.validate(await work.job(job))


async def estimate_job(work: Workspace, job: Source) -> Any:
    return await work.client.estimate(await work.job(job))


async def create_job(work: Workspace, job: Source) -> Any:
    return await work.client.jobs.submit(await work.job(job))


async def preview_job(
    work: Workspace,
    job: Source,
    rows: int | None = None,
    samples: int | None = None,
    seconds: float = 30,
) -> Any:
    previews = work.client.previews
    made = await previews.create(await work.job(job), rows=rows, samples=samples)
    return await within(seconds, previews.wait(made.id), lambda: previews.retrieve(made.id))


async def audit_grader(
    work: Workspace, grader: Source, training_file: str, seconds: float = 30, **options: Any
) -> Any:
    audits = work.client.grader_audits
    made = await audits.create(await work.grader(grader), training_file, **options)
    return await within(seconds, audits.wait(made.id), lambda: audits.retrieve(made.id))


async def chat(work: Workspace, model: str, prompt: str, system: str | None = None, **options: Any) -> Any:
    messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": prompt})
    return await work.client.chat.completions.create(model=model, messages=messages, **options)
