"""Evals as a folder: written from OpenAI's service or ours with the official client, and imported here.

    DIR/unreadable.json                    what could not be read, with the errors; absent if there is nothing
    DIR/files/SHA256.jsonl                 rows of runs
    DIR/evals/order.json                   ids in the order of the list; also in each folder of runs
    DIR/evals/EVAL/eval.json
    DIR/evals/EVAL/runs/RUN/run.json       refers to a file as files/SHA256.jsonl
    DIR/evals/EVAL/runs/RUN/items.jsonl

An export has the documented fields only, in a fixed order, so that exports of equal evals are equal.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from regraft._rules.states import EVAL_RUN
from regraft._rules.system_errors import file_problem
from regraft.saving import atomic_file

EVAL_FIELDS = ("id", "name", "created_at", "metadata", "data_source_config", "testing_criteria")
RUN_FIELDS = (
    "id", "name", "created_at", "metadata", "status", "model", "data_source", "error", "result_counts",
    "per_model_usage", "per_testing_criteria_results",
)  # fmt: skip
ITEM_FIELDS = ("id", "created_at", "status", "datasource_item_id", "datasource_item", "results", "sample")
FILES, ORDER, UNREADABLE = "files", "order.json", "unreadable.json"
IMPORT = "/regraft/evals/import"
INLINE_BYTES = (
    1_000_000  # of the rows in one request, which may have 2 MB; further rows are uploaded as a file
)
_REFUSED = (400, 404, 409, 413, 422)  # of one eval, after which the next one can succeed
# The last three: the client does not check what a server sends, and fails on it in its own code.
_UNREADABLE = (
    openai.APIStatusError,
    openai.APIResponseValidationError,
    ValueError,
    AttributeError,
    TypeError,
)
_RUN_NUMBER = re.compile(r"runs\[(\d{1,6})\]")
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_ROWS = re.compile(rf"{FILES}/[0-9a-f]{{64}}\.jsonl")


class UnsafeArchive(ValueError):
    """A name in a folder, or an id of a server, that could lead out of the folder."""


@dataclass
class Report:
    """Counts of exported or imported objects, and the omissions with their reasons."""

    evals: int = 0
    runs: int = 0
    items: int = 0
    files: int = 0
    left_out: list[str] = field(default_factory=list)
    failed: int = 0  # objects that the source could not send, or that the server refused


def export(
    client: openai.OpenAI, folder: Path, *, report_line: Callable[[str], None] = lambda text: None
) -> Report:
    """Write all evals of the client's project. Runs that are complete in the folder are not read again.

    An eval or a run that cannot be read is left out, and written when the export is repeated.

    Raises:
        openai.APIConnectionError, openai.AuthenticationError, openai.RateLimitError: nothing more can be read.
        UnsafeArchive: an id of the server is not a plain name.
    """
    report = Report()
    evals = []
    unreadable: list[dict[str, str]] = []

    def leave_out(eval_id: str, name: str, why: str) -> None:
        unreadable.append({"eval": eval_id, "name": name, "error": why})
        report.failed += 1
        report.left_out.append(f"{name}: {why}")
        report_line(f"Left out: {name}: {why}")

    try:
        for listed in client.evals.list(limit=100):
            eval_id = ""
            try:
                made = _plain(listed)
                eval_id = _plain_name(made.get("id"))
                place = folder / "evals" / eval_id
                _write(place / "eval.json", _selected_fields(made, EVAL_FIELDS))
            except _UNREADABLE as cause:
                leave_out(eval_id, f"eval {eval_id}" if eval_id else "an eval of the list", _reason(cause))
                continue
            evals.append(eval_id)
            report.evals += 1
            report_line(f"{eval_id} {made.get('name')}")
            for name, why in _export_runs(client, folder, place, eval_id, report):
                leave_out(eval_id, name, why)
    except (AttributeError, TypeError, ValueError) as cause:  # of the client's code, for a page
        leave_out("", "the rest of the list of evals", _reason(cause))
    else:
        _write(folder / "evals" / ORDER, evals)
    if unreadable:
        _write(folder / UNREADABLE, unreadable)
    else:
        (folder / UNREADABLE).unlink(missing_ok=True)
    return report


def _export_runs(
    client: openai.OpenAI, folder: Path, place: Path, eval_id: str, report: Report
) -> Iterator[tuple[str, str]]:
    """Write the runs of an eval, and yield the name of each one that cannot be read, and the reason."""
    runs: list[str] = []
    try:
        for listed in client.evals.runs.list(eval_id, limit=100):
            name = f"a run of {eval_id}"
            try:
                run = _plain(listed)
                name = _plain_name(run.get("id"))
                if run.get("status") not in EVAL_RUN.final:
                    report.left_out.append(f"{name} is {run.get('status')}")
                    continue
                _export_run(client, folder, place / "runs" / name, eval_id, name, report)
                runs.append(name)
            except _UNREADABLE as cause:
                yield name, _reason(cause)
    except _UNREADABLE as cause:
        yield f"{eval_id}: the list of its runs", _reason(cause)
    _write(place / "runs" / ORDER, runs)


def _export_run(
    client: openai.OpenAI, folder: Path, place: Path, eval_id: str, run_id: str, report: Report
) -> None:
    items = 0
    if not (place / "run.json").exists():  # written last
        place.mkdir(parents=True, exist_ok=True)
        with atomic_file(place / "items.jsonl") as file:
            for item in client.evals.runs.output_items.list(run_id, eval_id=eval_id, limit=100):
                file.write(_line(_selected_fields(_plain(item), ITEM_FIELDS)))
                items += 1
        run = _selected_fields(_plain(client.evals.runs.retrieve(run_id, eval_id=eval_id)), RUN_FIELDS)
        source = _source(run)
        if source.get("type") == "file_id":
            try:
                source["id"] = _save_file(client, folder, source["id"], report)
            except (openai.NotFoundError, openai.BadRequestError) as gone:
                report.left_out.append(f"{run_id}: its file {source['id']}: {gone.message}")
        _write(place / "run.json", run)
    report.runs += 1
    report.items += items


def _reason(cause: Exception) -> str:
    """The reason why an object cannot be read.

    Raises:
        UnsafeArchive: from `cause`, as the others.
        openai.APIStatusError: no other object can be read either: the key is refused, or its quota is used up.
    """
    if isinstance(cause, UnsafeArchive | openai.AuthenticationError | openai.RateLimitError):
        raise cause
    return cause.message if isinstance(cause, openai.APIStatusError) else str(cause)


def _save_file(client: openai.OpenAI, folder: Path, file_id: str, report: Report) -> str:
    content = client.files.content(file_id).read()
    name = f"{FILES}/{hashlib.sha256(content).hexdigest()}.jsonl"
    path = folder / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(content)
        report.files += 1
    return name


def import_folder(
    client: openai.OpenAI, folder: Path, *, report_line: Callable[[str], None] = lambda text: None
) -> Report:
    """Create the evals of an export, each with its runs in one request. One that is refused is left out.

    Raises:
        FileNotFoundError: the folder has no complete export.
        UnsafeArchive: the list of evals has a name that is not plain.
    """
    if not (folder / "evals" / ORDER).exists():
        raise FileNotFoundError(f"{folder} is not an export of evals: it has no evals/{ORDER}")
    report = Report()
    uploaded: dict[str, str] = {}
    for place in _listed(folder, folder / "evals"):
        try:
            created = _import_eval(client, folder, place, uploaded, report)
        except (OSError, ValueError) as cause:
            report.left_out.append(f"{place.name}: {file_problem(cause)}")
            report.failed += 1
            continue
        except openai.APIStatusError as refused:
            if refused.status_code not in _REFUSED:
                raise
            report.left_out.append(f"{place.name}: {refused.message}")
            report.failed += 1
            continue
        report.evals += 1
        report_line(created)
    return report


def _import_eval(
    client: openai.OpenAI, folder: Path, place: Path, uploaded: dict[str, str], report: Report
) -> str:
    """Create one eval, and return its new id and its name."""
    made = _object(folder, place / "eval.json")
    runs: list[dict[str, Any]] = []
    names: list[str] = []
    files: list[str] = []
    inline = items = 0
    try:
        for run_place in _listed(folder, place / "runs"):
            with _named(run_place.name):
                run = _object(folder, run_place / "run.json")
                _upload_rows(client, folder, run, uploaded, report)
                inline = _upload_inline(client, run, inline, report)
                content = _items(folder, run_place, report)
                runs.append({"run": run})
                names.append(run_place.name)
                if content:  # the server refuses an empty file
                    files.append(client.files.create(file=("items.jsonl", content), purpose="evals").id)
                    runs[-1]["items_file"] = files[-1]
                items += content.count(b"\n")
        body = {"eval": _without_nulls(made), "runs": runs}
        created: Any = client.post(IMPORT, body=body, cast_to=object)
    except openai.BadRequestError as refused:
        raise ValueError(_with_run(refused, names)) from refused
    finally:
        for file_id in files:
            client.files.delete(file_id)
    report.runs += len(runs)
    report.items += items
    return f"{created['eval']['id']} {made.get('name')}"


@contextmanager
def _named(run: str) -> Iterator[None]:
    """Prefix an error with the name of the run."""
    try:
        yield
    except (OSError, ValueError) as cause:
        raise ValueError(f"{run}: {file_problem(cause)}") from cause
    except openai.APIStatusError as refused:
        if refused.status_code not in _REFUSED:
            raise
        raise ValueError(f"{run}: {refused.message}") from refused


def _with_run(refused: openai.APIStatusError, names: Sequence[str]) -> str:
    """The message of a refused import, and the name of the run that its parameter counts."""
    number = _RUN_NUMBER.match(refused.param or "")
    if number is None or int(number[1]) >= len(names):
        return refused.message
    return f"{names[int(number[1])]}: {refused.message}"


def _items(folder: Path, place: Path, report: Report) -> bytes:
    """The items of a run, as JSONL; empty if it has no file of them."""
    path = _inside(folder, place / "items.jsonl")
    if path.exists():
        content = path.read_bytes()
        return content if content.strip() else b""
    report.left_out.append(f"the items of {place.name}: it has no file {path.name}")
    return b""


def _listed(folder: Path, place: Path) -> list[Path]:
    """The folders that order.json lists, in its order."""
    names = json.loads(_inside(folder, place / ORDER).read_text())
    if not isinstance(names, list):
        raise UnsafeArchive(f"{place / ORDER} is not a list of names")
    return [place / _plain_name(name) for name in names]


def _plain_name(name: object) -> str:
    if not isinstance(name, str) or not _PLAIN.fullmatch(name):
        raise UnsafeArchive(f"{name!r} is not a plain name")
    return name


def _inside(folder: Path, path: Path) -> Path:
    """The path, unless a symbolic link leads it out of the folder."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise UnsafeArchive(f"{path} leads out of {folder}")
    return path


def _object(folder: Path, path: Path) -> dict[str, Any]:
    value = json.loads(_inside(folder, path).read_text())
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value


def _source(run: Mapping[str, Any]) -> dict[str, Any]:
    """The source of the run's rows; empty if there is none."""
    outer = run.get("data_source")
    source = outer.get("source") if isinstance(outer, dict) else None
    return source if isinstance(source, dict) else {}


def _upload_rows(
    client: openai.OpenAI, folder: Path, run: dict[str, Any], uploaded: dict[str, str], report: Report
) -> None:
    """Replace the name of a file in the folder by the id of the uploaded file."""
    source = _source(run)
    name = source.get("id")
    if source.get("type") != "file_id" or not isinstance(name, str) or "/" not in name:
        return
    if not _ROWS.fullmatch(name):
        raise UnsafeArchive(f"{name!r} is not a file of an export")
    if name not in uploaded:
        path = _inside(folder, folder / name)
        if not path.stat().st_size:  # the server refuses an empty file; such a run has failed
            report.left_out.append(f"the rows of {run.get('id')}: their file is empty")
            return
        uploaded[name] = client.files.create(file=path, purpose="evals").id
        report.files += 1
    source["id"] = uploaded[name]


def _upload_inline(client: openai.OpenAI, run: dict[str, Any], inline: int, report: Report) -> int:
    """Upload rows that no longer fit the request. Returns the bytes of rows in the request so far."""
    source = _source(run)
    content = source.get("content")
    if not isinstance(content, list):
        return inline
    lines = b"".join(map(_line, content))
    if inline + len(lines) <= INLINE_BYTES:
        return inline + len(lines)
    file = client.files.create(file=("rows.jsonl", lines), purpose="evals")
    report.files += 1
    source.clear()
    source.update(type="file_id", id=file.id)
    return inline


def _plain(value: Any) -> dict[str, Any]:
    if not isinstance(value, openai.BaseModel):  # the client passes on what it cannot parse
        raise ValueError(f"the server sent {str(value)[:80]!r} instead of an object")
    plain: dict[str, Any] = json.loads(
        value.model_dump_json(by_alias=True, exclude_unset=True, warnings=False)
    )
    return plain


def _selected_fields(value: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    return {name: value[name] for name in fields if name in value}


def _without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: inner for name, inner in value.items() if inner is not None}


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True).encode() + b"\n")


def _line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, sort_keys=True).encode() + b"\n"
