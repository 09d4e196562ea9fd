"""The commands. Results go to stdout, everything else to stderr."""

import argparse
import getpass
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from itertools import islice
from pathlib import Path
from textwrap import indent
from typing import Any

import httpx2
import openai
from openai.types.fine_tuning import FineTuningJob
from openai.types.fine_tuning.jobs import FineTuningJobCheckpoint

from regraft import config, starters
from regraft._rules.datasets import InvalidDataset, LineError, unique_keys
from regraft._rules.foreign_files import HEAD_BYTES, JSON_ARRAY, container_of
from regraft.cli.evals import evals_compare, evals_export, evals_gate, evals_import, evals_run
from regraft.cli.graders import (
    graders_cases,
    graders_check,
    graders_delete,
    graders_diff,
    graders_list,
    graders_save,
    graders_show,
    graders_versions,
)
from regraft.cli.output import (
    answer_cell,
    duration,
    expected_costs,
    plain,
    print_json,
    print_json_line,
    say,
    shortened,
    table,
    when,
)
from regraft.cli.pipelines import (
    pipelines_cancel,
    pipelines_clone,
    pipelines_create,
    pipelines_list,
    pipelines_pause,
    pipelines_resume,
    pipelines_retry,
    pipelines_show,
    pipelines_wait,
)
from regraft.cli.service import usage, workers
from regraft.client import Regraft
from regraft.config import NotConfigured
from regraft.convert import SameFile
from regraft.convert import convert as convert_dataset
from regraft.datasets import validate as validate_dataset
from regraft.display import Waiting
from regraft.errors import DownloadCorrupt, JobFailed, NotARegraftServer, NotSupportedByServer, is_page
from regraft.jobs import grader_of
from regraft.migrate import NO_MODEL
from regraft.migrate import migrate as migrated
from regraft.progress import FINAL, Marks, axis_of, doing_now, marks_for, queued_text, sparkline
from regraft.requests import FILES, InvalidRequestFile, read_grader, read_job, read_table
from regraft.resources.checkpoints import best
from regraft.resources.evals import InvalidGate
from regraft.resources.jobs import VALIDATE, validate_local, validation
from regraft.resources.rollouts import Filters
from regraft.saving import chunks, whole
from regraft.types import (
    Alias,
    ComparedPair,
    ComparedScores,
    GraderTest,
    JobResult,
    Money,
    PreviewProgress,
    Rollout,
    result_of,
    verdict_of,
)

DONE, NO, USAGE, NOT_FOUND, AUTH, UNREACHABLE, QUOTA, INTERRUPTED = 0, 1, 2, 3, 4, 5, 6, 130
BY_STATUS = {401: AUTH, 403: AUTH, 404: NOT_FOUND, 408: UNREACHABLE, 429: QUOTA}
WIDE = 72
SLOW_START_S = 300.0  # weights of tens of gigabytes and an engine's start take minutes
JOB_FILES = (".toml", ".json", ".yaml", ".yml")


class Refused(Exception):
    """The arguments of a command are invalid."""


def run(arguments: argparse.Namespace) -> int:
    """Run the command of the arguments; errors become a line on stderr and an exit code."""
    as_json = arguments.output == "json"
    try:
        code: int = COMMANDS[arguments.run](arguments)
        sys.stdout.flush()
        return code
    except openai.APIStatusError as error:
        message = error.message.removeprefix(f"Error code: {error.status_code} - ")
        _complain(as_json, message, error.code, error.param, error.request_id)
        if error.status_code >= 500 or (error.status_code == 404 and is_page(error.response)):
            return UNREACHABLE
        return BY_STATUS.get(error.status_code, USAGE)
    except openai.APIConnectionError as error:
        server = error.request.url.copy_with(path="/", query=None)
        why = f": {error.__cause__}" if error.__cause__ else ""
        _complain(as_json, f"Cannot reach {server}{why}. Is the server running?", "connection_error")
        return UNREACHABLE
    except JobFailed as failed:
        # The last event lists all lines of the error, such as the invalid rows of a file.
        first, *_ = str(failed).splitlines()
        _complain(as_json, first, failed.code, failed.param)
        return NO
    except DownloadCorrupt as corrupt:
        _complain(as_json, str(corrupt), "download_corrupt")
        return UNREACHABLE
    except (openai.OpenAIError, httpx2.RequestError) as error:
        # Errors after the first byte: an error event in a stream, or a truncated response.
        named = getattr(error, "code", None), getattr(error, "param", None)
        _complain(as_json, str(error) or type(error).__name__, *named)
        return UNREACHABLE
    except config.NotConfigured as missing:
        _complain(as_json, str(missing), "not_configured")
        return AUTH
    except InvalidDataset as bad:
        _complain(as_json, "\n".join(_problems(_invalid("the file", bad))), "invalid_dataset")
        return NO
    except (InvalidRequestFile, InvalidGate, Refused, OSError, httpx2.InvalidURL) as wrong:
        if isinstance(wrong, BrokenPipeError):  # `| head` has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return DONE
        _complain(as_json, str(wrong), "invalid_command")
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except EOFError:  # Ctrl-D at a prompt
        say("")
        return INTERRUPTED


def _complain(
    as_json: bool, message: str, code: str | None, param: str | None = None, request_id: str | None = None
) -> None:
    if as_json:
        error = {"message": message, "code": code, "param": param, "request_id": request_id}
        say(json.dumps({"error": error}, ensure_ascii=False))
        return
    details = ", ".join(part for part in (code, param, request_id) if part)
    say(f"regraft: {message}{f' ({details})' if details else ''}")


@cache
def _client_for(environment: tuple[str | None, ...]) -> Regraft:
    return Regraft()


def _client() -> Regraft:
    # Once per command. The environment is part of the key, because a program may change it between calls of main().
    names = ("REGRAFT_BASE_URL", "REGRAFT_API_KEY", "REGRAFT_CONFIG")
    return _client_for(tuple(os.environ.get(name) for name in names))


def _answer(arguments: argparse.Namespace, value: Any, text: Callable[[], str]) -> int:
    if arguments.output == "json":
        print_json(value)
    else:
        print(text())
    return DONE


# Account and files.


def login(arguments: argparse.Namespace) -> int:
    url = arguments.base_url or os.environ.get("REGRAFT_BASE_URL")
    if url is None:
        if not sys.stdin.isatty():
            raise Refused("No server: set --base-url URL or REGRAFT_BASE_URL.")
        url = input("Server [http://127.0.0.1:8000]: ").strip() or "http://127.0.0.1:8000"
    # Never an argument: other users can read command lines.
    key = getpass.getpass("API key: ") if sys.stdin.isatty() else sys.stdin.readline()
    key = key.strip() or os.environ.get("REGRAFT_API_KEY", "")
    if not key:
        raise Refused("No API key on stdin.")
    chosen = config.Login(config.normal(url), key)
    models = _models_of(chosen)
    path = config.save(chosen)
    shown = {"base_url": chosen.base_url, "config": str(path), "models": models}
    return _answer(
        arguments, shown, lambda: f"Logged in to {chosen.base_url} ({models} models); saved in {path}"
    )


def _models_of(login: config.Login) -> int:
    """The number of models. Login verifies with this request that the server is a regraft server."""
    try:
        listed = Regraft(base_url=login.base_url, api_key=login.api_key).models.list()
    except openai.NotFoundError as error:
        raise NotARegraftServer(
            f"{login.base_url} does not answer as a regraft server: it has no models"
        ) from error
    if listed.object != "list":
        raise NotARegraftServer(f"{login.base_url} does not answer as a regraft server: it lists no models")
    return len(listed.data)


def files_upload(arguments: argparse.Namespace) -> int:
    made = []
    for path in arguments.paths:
        if not path.is_file():
            raise Refused(f"No such file: {path}")
        made.append(_client().files.create(file=path, purpose="fine-tune"))
    return _answer(arguments, made, lambda: _files(made))


def files_list(arguments: argparse.Namespace) -> int:
    listed = list(_client().files.list())
    return _answer(arguments, listed, lambda: _files(listed))


def files_show(arguments: argparse.Namespace) -> int:
    file = _client().files.retrieve(arguments.file_id)
    return _answer(arguments, file, lambda: _fields(file))


def files_download(arguments: argparse.Namespace) -> int:
    with _client().files.with_streaming_response.content(arguments.file_id) as content:
        if arguments.to is None and arguments.output == "text":
            for chunk in chunks(content.http_response):
                sys.stdout.buffer.write(chunk)
            return DONE
        if arguments.to is None:
            raise Refused("--output json needs --to FILE: the contents are not JSON.")
        with whole(arguments.to) as file:
            for chunk in chunks(content.http_response):
                file.write(chunk)
    size = arguments.to.stat().st_size
    shown = {"id": arguments.file_id, "path": str(arguments.to), "bytes": size}
    return _answer(arguments, shown, lambda: f"{arguments.to}: {size} bytes")


def files_delete(arguments: argparse.Namespace) -> int:
    deleted = _client().files.delete(arguments.file_id)
    return _answer(arguments, deleted, lambda: f"Deleted {deleted.id}")


def files_profile(arguments: argparse.Namespace) -> int:
    profile = _client().profile(
        arguments.file_id,
        model=arguments.model,
        method=arguments.method,
        validation_file=arguments.validation_file,
        grader=arguments.grader,
        max_completion_tokens=arguments.max_completion_tokens,
    )
    return _answer(arguments, profile, lambda: profile_text(plain(profile)))


def profile_text(profile: dict[str, Any]) -> str:
    """The findings, what a job would stumble over first, and the fields as a table."""
    whole = "" if profile["is_whole"] else "the first "
    lines = [
        f"{whole}{profile['rows']} rows of a {profile['method']} job, {profile['invalid']} invalid lines"
    ]
    if profile["foreign_format"] is not None:
        lines.append(profile["foreign_format"])
    else:
        lines += [f"  {LineError(**problem)}" for problem in profile["problems"]]
    if (tokens := profile["tokens"]) is None:
        lines.append(f"tokens: not counted, {profile['tokens_reason']}")
    else:
        counted = "" if tokens["rows"] == profile["rows"] else f" of {tokens['rows']} rows"
        lines.append(f"tokens{counted}: {_lengths(tokens)}; room for {tokens['room']}")
        lines += _lines_of("rows do not fit", tokens["too_long"])
        lines += _lines_of("rows are rejected by the chat template", tokens["not_rendered"])
        special = "rows contain the text of a special token, which the model reads as text"
        lines += _lines_of(special, tokens["special_texts"])
    if profile["characters"] is not None:
        lines.append(f"characters: {_lengths(profile['characters'])}")
    same = profile["duplicates"]
    lines.append(f"{same['rows']} rows repeat an earlier prompt, {same['identical']} of them an earlier row")
    lines += [f"  lines {', '.join(map(str, found))}" for found in same["lines"]]
    if (overlap := profile["overlap"]) is not None:
        lines.append(
            f"{overlap['shared']} of {overlap['rows']} rows of {overlap['file']} have a prompt of this file"
        )
        lines += [f"  its line {theirs} is line {own} here" for theirs, own in overlap["lines"]]
    if (reads := profile["grader"]) is not None:
        for read in reads["paths"]:
            lines.append(f"the grader reads {read['path']}: {read['missing']['rows']} rows lack it")
            lines += _lines_of("rows lack it", read["missing"])[1:]
        if reads["no_grader"] is not None:
            lines += _lines_of("rows choose no grader", reads["no_grader"])
        if reads["not_listed"]:
            lines.append("its code or its endpoint may read other fields as well")
    fields = [
        [
            field["name"],
            field["missing"],
            ", ".join(field["types"]),
            "more than 1000" if field["distinct"] is None else field["distinct"],
            shortened(field["example"], 40),
        ]
        for field in profile["fields"]
    ]
    return "\n".join([*lines, "", table(["field", "missing", "type", "different", "first value"], fields)])


def _lengths(found: dict[str, Any]) -> str:
    middle = f"{found['p50']:.0f} in the middle, {found['p99']:.0f} at 99 %"
    return f"{found['min']} to {found['max']}, {middle}"


def _lines_of(what: str, found: dict[str, Any]) -> list[str]:
    """A finding and its lines; nothing if there are none."""
    if not found["rows"]:
        return []
    more = ", ..." if found["rows"] > len(found["lines"]) else ""
    return [f"{found['rows']} {what}", f"  lines {', '.join(map(str, found['lines']))}{more}"]


def _files(files: list[Any]) -> str:
    rows = [[file.id, file.bytes, when(file.created_at), file.purpose, file.filename] for file in files]
    return table(["id", "bytes", "created", "purpose", "name"], rows)


def validate(arguments: argparse.Namespace) -> int:
    """Validate all files, so that one run reports all errors."""
    reports = [*_validated_grader(arguments), *(_validated(path, arguments) for path in arguments.files)]
    if arguments.output == "json":
        print_json(reports)
    else:
        for report in reports:
            if report["ok"]:
                if "rows" not in report:
                    print(f"{report['file']}: valid")
                    continue
                fields = f", each with {', '.join(report['fields'])}" if report["fields"] else ""
                print(f"{report['file']}: {report['rows']} rows{fields}")
                continue
            print("\n".join(_problems(report)))
    return DONE if all(report["ok"] for report in reports) else NO


def _invalid(path: Path | str, bad: InvalidDataset) -> dict[str, Any]:
    """Report a file with invalid rows: the one that the error names, else `path`."""
    return {
        "file": bad.file or str(path),
        "ok": False,
        "errors": [asdict(error) for error in bad.errors],
        "more": bad.more,
    }


def _problems(report: Mapping[str, Any]) -> list[str]:
    """The errors of a report in the format of compilers, which editors can parse."""
    file = report["file"]
    errors = [LineError(**error) for error in report["errors"]]
    lines = [f"{file}{f':{error.line}' if error.line else ''}: {error.text}" for error in errors]
    return lines + ([f"{file}: and {report['more']} more line(s) with problems"] if report["more"] else [])


def _validated_grader(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Report an invalid grader. Without a server only the rows can be checked."""
    if arguments.grader is None:
        return []
    body = {"grader": read_grader(arguments.grader)}
    refusal = _refused_by_server("/fine_tuning/alpha/graders/validate", body, str(arguments.grader))
    return [] if refusal is None else [_refused(arguments.grader, refusal)]


def _validated_job(path: Path) -> dict[str, Any]:
    """Validate a job file with the server, then its local files by the rules for rows."""
    job = read_job(path)
    refusal = _refused_by_server(VALIDATE, validation(job), str(path))
    if refusal is not None:
        return _refused(path, refusal)
    try:
        validate_local(job)
    except InvalidDataset as bad:
        return _invalid(path, bad)
    return {"file": str(path), "ok": True}


def _refused_by_server(path: str, body: dict[str, Any], what: str) -> openai.APIStatusError | None:
    """The server's rejection of a body on validation; if the server is unavailable, a note on stderr."""
    try:
        _client().post(path, body=body, cast_to=object)
    except (NotConfigured, openai.APIConnectionError, NotSupportedByServer):
        say(f"{what}: the server is unavailable, so only local rules were checked")
    except (openai.BadRequestError, openai.NotFoundError) as refusal:
        return refusal
    return None


def _refused(path: Path, refusal: openai.APIStatusError) -> dict[str, Any]:
    message = refusal.message.removeprefix(f"Error code: {refusal.status_code} - ")
    error = LineError(0, message, refusal.param or "")
    return _invalid(path, InvalidDataset([error]))


def _is_dataset(path: Path) -> bool:
    """Whether a file that is named like a job file has rows: an array, or JSON without a key of a job."""
    with path.open("rb") as file:
        if container_of(file.read(HEAD_BYTES)) is JSON_ARRAY:
            return True
    if path.suffix.lower() != ".json":
        return False
    try:
        first, _ = json.JSONDecoder().raw_decode(path.read_text("utf-8-sig").lstrip())
    except (ValueError, RecursionError):
        return False
    return not isinstance(first, dict) or first.keys().isdisjoint({"model", "method", *FILES, "grader"})


def _validated(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    if path.suffix.lower() in JOB_FILES and not _is_dataset(path):
        return _validated_job(path)
    try:
        good = validate_dataset(path, grader=arguments.grader, split=arguments.split, method=arguments.method)
    except InvalidDataset as bad:
        return _invalid(path, bad)
    return {"file": str(path), "ok": True, "rows": good.rows, "fields": list(good.fields)}


def init(arguments: argparse.Namespace) -> int:
    """Write the files of a small task, and say the next commands."""
    folder = arguments.to or Path(arguments.kind)
    paths = starters.write(arguments.kind, folder)

    def text() -> str:
        grader = next(path for path in paths if path.stem == "grader")
        judged = [path for path in paths if path.name == "graders.toml"]
        return "\n".join(
            [
                *(f"Wrote {path}" for path in paths),
                "Next:",
                *(f"  REGRAFT_GRADERS_FILE={path} regraft-server up" for path in judged),
                f"  regraft validate {folder / 'job.toml'}",
                f"  regraft graders run --grader {grader} {folder / 'cases.jsonl'}",
                f"  regraft jobs create -f {folder / 'job.toml'} --watch",
            ]
        )

    return _answer(arguments, {"folder": str(folder), "files": [str(path) for path in paths]}, text)


def convert(arguments: argparse.Namespace) -> int:
    """Convert a file of another format to a dataset."""
    names: dict[str, str] = {}
    for assignment in arguments.names:
        name, equals, field = assignment.partition("=")
        if not (name and equals and field):
            raise Refused(f"--map {assignment}: write it as NAME=FIELD, such as answer=label")
        names[name] = field
    source: Path = arguments.source
    # train.csv.gz becomes train.rft.jsonl.
    stem = Path(source.name.removesuffix(".gz")).stem
    path = arguments.out or Path(f"{stem}.{arguments.target}.jsonl")
    try:
        made = convert_dataset(source, arguments.target, path, names=names)
    except SameFile as same:
        raise Refused(f"{same} with -o") from None
    except InvalidDataset as bad:
        bad.file = str(source)
        raise
    shown = {
        "path": str(made.path),
        "rows": made.rows,
        "left_out": dict(made.left_out),
        "dropped_fields": list(made.dropped_fields),
    }

    def text() -> str:
        said = [f"{made.path}: {made.rows} rows"]
        said += [f"left out: {rows} row(s) {why}" for why, rows in made.left_out.items()]
        if made.dropped_fields:
            said.append(f"dropped fields: {', '.join(made.dropped_fields)}")
        return "\n".join(said)

    return _answer(arguments, shown, text)


# Graders.


def graders_validate(arguments: argparse.Namespace) -> int:
    asked = {"grader": read_grader(arguments.grader)}
    # Not with the SDK's types: their union lacks our grader types.
    answer: Any = _client().post("/fine_tuning/alpha/graders/validate", body=asked, cast_to=object)
    grader = answer["grader"]
    return _answer(arguments, answer, lambda: f"{grader['name']} ({grader['type']}): valid")


def graders_run(arguments: argparse.Namespace) -> int:
    if (arguments.sample is None) == (arguments.cases is None):
        raise Refused("Pass either --sample TEXT or a JSONL file of cases.")
    if arguments.cases is not None:
        cases: Any = arguments.cases
    else:
        cases = [{**_item(arguments.item), "sample": arguments.sample}]
    tests = _client().graders.test(arguments.grader, cases)
    failed = sum(not test.passed for test in tests)
    if arguments.output == "json":
        print_json(tests)
    else:
        rows = [
            [
                test.line,
                float(test.reward),
                test.expect if test.expect is None else float(test.expect),
                "ok" if test.passed else ", ".join(test.errors) or "not as expected",
                shortened(_headline(test.reason), WIDE),
            ]
            for test in tests
        ]
        print(table(["line", "reward", "expect", "", "reason"], rows))
        for test in tests:
            for title, text in _details(test):
                print(f"\nline {test.line}, {title}:\n{indent(text.rstrip(), '  ')}")
        say(f"{len(tests) - failed} passed, {failed} failed")
    return NO if failed else DONE


def _headline(reason: str) -> str:
    """The line of a reason for the table: the last one of a traceback, which names the exception."""
    return next((line for line in reversed(reason.splitlines()) if line.strip()), "")


def _details(test: GraderTest) -> Iterator[tuple[str, str]]:
    """Texts that do not fit into the table, with titles: printed output, and full reasons."""
    if test.output:
        yield "printed", test.output
    reason = test.reason.strip()
    if reason != shortened(reason, WIDE):
        yield ", ".join(test.errors) or "reason", reason
    for name, text in test.error_details.items():
        # A detail of a multi grader reads "key: text", and the reason often includes the text already.
        if text.strip() not in reason and text.partition(": ")[2].strip() not in reason:
            yield name, text


def _item(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        item = json.loads(text, object_pairs_hook=unique_keys)
    except ValueError as cause:
        raise Refused(f"--item: {cause}") from cause
    if not isinstance(item, dict):
        raise Refused("--item must be a JSON object.")
    return item


# Jobs.


def jobs_create(arguments: argparse.Namespace) -> int:
    if not arguments.preview and (arguments.yes or arguments.rows or arguments.samples):
        raise Refused("--rows, --samples and --yes require --preview.")
    client = _client()
    body = client.jobs.prepare(arguments.file, set=arguments.changes)
    if arguments.estimate:
        estimate = client.estimate(body)
        return _answer(arguments, estimate, lambda: estimate_text(plain(estimate)))
    if arguments.preview:
        return _previewed(arguments, client, body)
    return _created(arguments, client.jobs.submit(body))


def _previewed(arguments: argparse.Namespace, client: Regraft, body: dict[str, Any]) -> int:
    """Show the preview, and create the job after confirmation or with --yes."""
    with Waiting(sys.stderr, "the preview") as waiting:
        preview = client.preview(
            body,
            rows=arguments.rows,
            samples=arguments.samples,
            progress=_preview_progress(waiting.say),
        )
    if arguments.output == "json":
        if arguments.yes and arguments.watch:
            print_json_line(preview)
            return _watch(arguments, client.jobs.submit(body).id)
        print_json({"preview": preview, "job": client.jobs.submit(body) if arguments.yes else None})
        return DONE
    if arguments.yes:
        say(_preview(plain(preview)))  # stdout is reserved for the id of the job
    else:
        print(_preview(plain(preview)))
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            say("Nothing was created; pass --yes to create the job.")
            return DONE
        if input("Create the job? [y/N] ").strip().lower() not in ("y", "yes"):
            return DONE
    return _created(arguments, client.jobs.submit(body))


def previews_list(arguments: argparse.Namespace) -> int:
    listed = list(islice(_client().previews.list(limit=min(arguments.limit, 100)), arguments.limit))
    rows = [
        [
            one.id,
            when(one.created_at),
            one.status,
            one.request["model"],
            "-" if one.report is None or one.report.mean_reward is None else f"{one.report.mean_reward:.2f}",
            "-" if one.report is None else one.report.verdict,
        ]
        for one in listed
    ]
    head = ["id", "created", "status", "model", "mean reward", "verdict"]
    return _answer(arguments, listed, lambda: table(head, rows))


def previews_show(arguments: argparse.Namespace) -> int:
    preview = _client().previews.retrieve(arguments.preview_id)

    def shown() -> str:
        if preview.report is not None:
            return _preview(plain(preview.report))
        if preview.error is not None:
            return f"failed: {preview.error.message}"
        return f"{preview.status}: {_doing(preview.progress)}"

    return _answer(arguments, preview, shown)


def previews_answers(arguments: argparse.Namespace) -> int:
    answers = list(_client().previews.answers(arguments.preview_id))
    rows = [
        [
            one.line,
            "none" if one.score is None else f"{one.score:.2f}",
            answer_cell(one.output_text, 60, sys.stdout.encoding),
        ]
        for one in answers
    ]
    return _answer(arguments, answers, lambda: table(["line", "score", "answer"], rows))


def previews_cancel(arguments: argparse.Namespace) -> int:
    preview = _client().previews.cancel(arguments.preview_id)
    return _answer(arguments, preview, lambda: f"{preview.id} is {preview.status}")


def previews_delete(arguments: argparse.Namespace) -> int:
    _client().previews.delete(arguments.preview_id)
    shown = {"id": arguments.preview_id, "deleted": True}
    return _answer(arguments, shown, lambda: f"Deleted {arguments.preview_id}")


def _doing(now: PreviewProgress) -> str:
    done = now.graded if now.phase == "grading" else now.sampled
    doing = {"loading": "loading the model", "sampling": "sampling", "grading": "grading"}[now.phase]
    return doing if now.phase == "loading" else f"{doing}: {done} of {now.of} answers"


def _preview_progress(say: Callable[[str], None]) -> Callable[[PreviewProgress], None]:
    """Say each phase when it begins, and each quarter of its answers."""
    said: set[tuple[str, int]] = set()

    def tell(now: PreviewProgress) -> None:
        done = now.graded if now.phase == "grading" else now.sampled
        quarter = (now.phase, 4 * done // now.of)
        if quarter not in said:
            said.add(quarter)
            say(_doing(now))

    return tell


def jobs_clone(arguments: argparse.Namespace) -> int:
    job = _client().jobs.clone(arguments.job_id, set=arguments.changes, grader=arguments.grader)
    return _created(arguments, job)


def _created(arguments: argparse.Namespace, job: FineTuningJob) -> int:
    if arguments.watch:
        say(f"{job.id}: {job.model}")
        return _watch(arguments, job.id)
    return _answer(arguments, job, lambda: job.id)


def jobs_list(arguments: argparse.Namespace) -> int:
    listed: list[FineTuningJob] = []
    for job in _client().fine_tuning.jobs.list(limit=min(max(arguments.limit, 1), 100)):
        if len(listed) >= arguments.limit:
            break
        listed.append(job)
    rows = [
        [
            job.id,
            job.status,
            _now(job),
            str(result_of(job) or "-"),
            when(job.created_at),
            job.model,
            job.fine_tuned_model or "-",
        ]
        for job in listed
    ]
    head = ["id", "status", "now", "result", "created", "model", "tuned model"]
    return _answer(arguments, listed, lambda: table(head, rows))


def _now(job: FineTuningJob) -> str:
    """The work of a running job inside of its step, or the place and reason of a waiting one, in a few words."""
    if (queue := getattr(job, "queue", None)) is not None:
        return queued_text(queue)
    now = getattr(job, "progress", None)
    return "-" if now is None else doing_now(now)


def jobs_show(arguments: argparse.Namespace) -> int:
    client = _client()
    job = client.jobs.retrieve(arguments.job_id)
    return _answer(arguments, job, lambda: _job(job, client.jobs.metrics(job.id, frame=False)))


def jobs_watch(arguments: argparse.Namespace) -> int:
    return _watch(arguments, arguments.job_id)


def _watch(arguments: argparse.Namespace, job_id: str) -> int:
    """With JSON output every event is one line, and the job is the last one."""
    client = _client()
    if arguments.output == "json":
        for event in client.jobs.watch(job_id):
            print_json_line(event)
        job = client.jobs.retrieve(job_id)
        print_json_line(job)
        return NO if job.status in ("failed", "cancelled") or _is_worse(job) else DONE
    job = client.jobs.wait(job_id, progress=sys.stdout)
    if job.status in FINAL:
        if (found := verdict_of(job) or result_of(job)) is not None:
            say(str(found))
        print(job.fine_tuned_model)
    else:
        say(f"The job is {job.status}; `regraft jobs resume {job.id}` resumes it.")
    return NO if _is_worse(job) else DONE


def _is_worse(job: FineTuningJob) -> bool:
    verdict = verdict_of(job)
    return verdict is not None and verdict.outcome == "worse"


def jobs_pause(arguments: argparse.Namespace) -> int:
    return _moved(arguments, _client().jobs.pause(arguments.job_id))


def jobs_resume(arguments: argparse.Namespace) -> int:
    return _moved(arguments, _client().jobs.resume(arguments.job_id))


def jobs_cancel(arguments: argparse.Namespace) -> int:
    return _moved(arguments, _client().jobs.cancel(arguments.job_id))


def jobs_compare(arguments: argparse.Namespace) -> int:
    found = _client().jobs.compare(arguments.first, *arguments.others)

    def text() -> str:
        jobs: list[list[object]] = [
            [one.job_id, one.model, one.step, duration(one.gpu_seconds), _money(one.cost)]
            for one in found.jobs
        ]
        parts = [table(["job", "model", "validated at step", "GPU time", "cost"], jobs)]
        missing = {one.job_id for one in found.jobs if one.step is None}
        parts += [line for pair in found.pairs for line in _pair(found.jobs[0].job_id, pair, missing)]
        if found.config:
            changed = [[one.field, *map(_value, one.values)] for one in found.config]
            parts.append(table(["field", *(one.job_id for one in found.jobs)], changed))
        return "\n".join(parts)

    return _answer(arguments, found, text)


def _pair(first: str, pair: ComparedPair, missing: Collection[str]) -> list[str]:
    """Sentences about a pair. `missing`: the jobs without a stored validation."""
    one = pair.reward
    if one is None:
        lacking = [name for name in (first, pair.job_id) if name in missing]
        return [f"{' and '.join(lacking)} {'has' if len(lacking) == 1 else 'have'} no stored validation."]
    interval = "" if one.ci_low is None else f" ({one.ci_low:+.3f} to {_signed(one.ci_high)})"
    lines = [
        f"{pair.job_id} against {first}, {pair.prompts} prompts in both: {_number(one.second)} and "
        f"{_number(one.first)}, difference {_signed(one.difference)}{interval}; better on {one.wins}, worse on "
        f"{one.losses}, equal on {one.ties}"
    ]
    if pair.unpaired:
        lines.append(f"{pair.unpaired} prompts are in one of them only.")
    if not pair.same_grader:
        lines.append("Their graders differ, so the rewards may not be on one scale.")
    return lines


def _money(cost: Money | None) -> str:
    return "-" if cost is None else f"{cost.amount:.2f} {cost.currency}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return "-" if value is None else shortened(text, WIDE)


def jobs_attempts(arguments: argparse.Namespace) -> int:
    answer: Any = _client().get(f"/regraft/jobs/{arguments.job_id}/attempts", cast_to=object)

    def text() -> str:
        rows: list[list[object]] = []
        for one in answer["data"]:
            end = one["ended_at"]
            lasted = "-" if end is None else duration(end - one["started_at"])
            start, outcome = when(int(one["started_at"])), one["outcome"] or "running"
            why = shortened(one["reason"] or "", WIDE)
            rows.append([one["number"], one["kind"], start, lasted, outcome, one["resumed_from_step"], why])
        head = ["attempt", "kind", "started", "lasted", "outcome", "resumed from step", "reason"]
        return table(head, rows)

    return _answer(arguments, answer["data"], text)


def jobs_logs(arguments: argparse.Namespace) -> int:
    log = _client().get(f"/regraft/jobs/{arguments.job_id}/logs", cast_to=str)
    return _answer(arguments, {"log": log}, lambda: log.rstrip("\n"))


def jobs_budget(arguments: argparse.Namespace) -> int:
    client, asked = _client(), None
    if (arguments.amount is None) != (arguments.currency is None):
        raise Refused("--amount and --currency belong together.")
    if arguments.gpu_hours is not None:
        asked = {"gpu_seconds": 3600 * arguments.gpu_hours}
    elif arguments.amount is not None:
        asked = {"amount": arguments.amount, "currency": arguments.currency}
    job: Any
    if asked is None and not arguments.none:
        job = client.jobs.retrieve(arguments.job_id)
    else:
        path = f"/fine_tuning/jobs/{arguments.job_id}/budget"
        job = client.post(path, body={"budget": asked}, cast_to=FineTuningJob)

    def text() -> str:
        budget = getattr(job, "budget", None)
        if budget is None:
            return f"{job.id} has no budget."
        names = ("used_gpu_seconds", "remaining_gpu_seconds", "gpu_seconds")
        used, left, cap = (duration(budget[name]) for name in names)
        return f"{job.id}: {used} of GPU time used, {left} left of {cap}"

    return _answer(arguments, job, text)


def _moved(arguments: argparse.Namespace, job: FineTuningJob) -> int:
    return _answer(arguments, job, lambda: f"{job.id} is {job.status}")


# Of jobs that learn from the answers in a file, and of those that learn from a teacher.
COURSES = (
    ("train loss", "train_loss"),
    ("valid loss", "full_valid_loss"),
    ("train accuracy", "train_mean_reward_accuracy"),
    ("valid accuracy", "full_valid_mean_reward_accuracy"),
    ("train margin", "train_mean_reward_margin"),
    ("valid margin", "full_valid_mean_reward_margin"),
    ("train KL to the teacher", "teacher_kl"),
    ("valid KL to the teacher", "full_valid_teacher_kl"),
)


def _lasting(now: Mapping[str, Any], seconds: float) -> str:
    """Describe the work of a run and how long it has lasted."""
    slow = now["phase"] in ("loading", "starting the sampler") and seconds >= SLOW_START_S
    unusual = ": unusually long; `regraft jobs logs` may say why" if slow else ""
    return f"{doing_now(now)}, for {duration(seconds)}{unusual}"


def _job(job: FineTuningJob, steps: list[dict[str, Any]]) -> str:
    shown = {
        "id": job.id,
        "status": job.status,
        "model": job.model,
        "tuned model": job.fine_tuned_model or "-",
        "created": when(job.created_at),
        "finished": when(job.finished_at),
        "method": _method(job),
        "files": ", ".join(filter(None, (job.training_file, job.validation_file))),
        "seed": str(job.seed),
    }
    if queue := getattr(job, "queue", None):
        shown["queue"] = queued_text(queue)
    if job.error and job.error.message:
        shown["error"] = f"{job.error.message} ({job.error.code})"
    if steps:
        shown["step"] = f"{steps[-1]['step']} of {steps[-1]['total_steps']}"
    if now := getattr(job, "progress", None):
        shown["now"] = _lasting(now, max(0.0, time.time() - now["since"]))
    estimate = getattr(job, "estimate", None)
    if estimate and job.estimated_finish is not None and job.status not in FINAL:
        shown |= expected_costs(estimate, job.estimated_finish, time.time())
    elif used := getattr(job, "usage_metrics", None):
        shown["GPU time"] = duration(used["gpu_seconds"])
        if cost := used.get("cost"):
            shown["cost"] = f"{cost['amount']:.2f} {cost['currency']}"
    if (result := result_of(job)) is not None:
        shown["result"] = str(result)
        steps = _until(steps, result)
    marks, axis = marks_for(sys.stdout.encoding), axis_of(grader_of(job))
    for name, key in (("train reward", "train_mean_reward"), ("valid reward", "full_valid_mean_reward")):
        values = [step[key] for step in steps if step.get(key) is not None]
        if values:
            shown[name] = _course(values, marks, axis)
    for name, key in COURSES:
        values = [step[key] for step in steps if step.get(key) is not None]
        if values:
            top = 1.0 if key.endswith("accuracy") else max(values)
            shown[name] = _course(values, marks, (min(0.0, *values), top or 1.0))
    errors = [step["full_valid_stderr"] for step in steps if step.get("full_valid_stderr") is not None]
    if errors and "valid reward" in shown:
        shown["valid reward"] += f" {marks.plus_minus}{errors[-1]:.2f}"
    if (verdict := verdict_of(job)) is not None:
        shown["verdict"] = str(verdict)
    width = max(map(len, shown))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in shown.items())


def _until(steps: Sequence[dict[str, Any]], result: JobResult) -> list[dict[str, Any]]:
    """The steps without the validations after the delivered checkpoint, whose validation has the result's number."""
    shown: list[dict[str, Any]] = []
    for step in steps:
        if step["step"] > result.step:
            step = {name: value for name, value in step.items() if not name.startswith("full_valid_")}
        elif step["step"] == result.step:
            step = step | {result.metric: result.value}
        shown.append(step)
    return shown


def _method(job: FineTuningJob) -> str:
    return "supervised" if job.method is None else str(job.method.type)


def _course(values: list[float], marks: Marks, axis: tuple[float, float]) -> str:
    """`0.20 ▂▃▅▆ 0.71`; a single value without the sparkline."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{values[0]:.2f} {sparkline(values, 40, marks.blocks, axis)} {values[-1]:.2f}"


def estimate_text(estimate: dict[str, Any]) -> str:
    group_size = estimate["group_size"]
    of_a_step = (
        f"{estimate['batch_size']} rows per step"
        if group_size is None
        else f"{estimate['batch_size']} prompts per step, {group_size} answers per prompt"
    )
    lines = [
        f"{estimate['training_rows']} training rows, {estimate['validation_rows']} validation rows",
        f"{estimate['total_steps']} steps: {estimate['n_epochs']} epochs, {of_a_step}",
    ]
    known = estimate.get("estimate")
    if not known:
        return "\n".join([*lines, f"time and cost are unknown: {estimate.get('reason')}"])
    seconds = known["remaining_seconds"]
    lines.append(
        f"{duration(seconds['expected'])}, between {duration(seconds['low'])} and {duration(seconds['high'])}"
        + (f", based on {known['based_on']}" if known.get("based_on") else "")
    )
    if upper_end := known.get("upper_end"):
        lines.append(upper_end)
    if cost := known.get("cost"):
        amounts = f"{cost['expected']:.2f}, between {cost['low']:.2f} and {cost['high']:.2f}"
        lines.append(f"{amounts} {cost['currency']}")
    return "\n".join(lines)


def _preview(preview: dict[str, Any]) -> str:
    """The results, the estimate of the job, and the advice."""
    lines = [f"{len(preview['prompts'])} rows sampled, {preview['answers']} answers"]
    if rate := preview["pass_rate"]:
        lines.append(
            f"{preview['passed']} pass (reward {preview['pass_threshold']:g} or more): {_between(rate)}; "
            f"mean reward {preview['mean_reward']:.2f}"
        )
    groups = [
        [
            str(row["group_size"]) + (" (the job's)" if row["group_size"] == preview["group_size"] else ""),
            ("at least " if row["at_least"] else "") + _between(row["share"]),
        ]
        for row in preview["signal"]
    ]
    lines.append(table(["answers per prompt", "groups with signal"], groups))
    tokens, room = preview["completion_tokens"], preview["max_completion_tokens"]
    lines.append(
        f"{tokens['mean']:.0f} tokens per answer, at most {tokens['max']:.0f}; {preview['cut_off']} cut off at {room}"
    )
    grading = preview["grading"]
    lines.append(
        f"{grading['failed']} could not be graded; a grade takes {grading['seconds']['mean']:.3f} s"
        + (f" and {grading['tokens']} tokens of judges were used" if grading["tokens"] else "")
    )
    return "\n".join([*lines, "", estimate_text(preview), "", preview["recommendation"]])


def _between(share: dict[str, float]) -> str:
    expected, low, high = (f"{100 * share[name]:.0f} %" for name in ("expected", "low", "high"))
    return f"{expected}, between {low} and {high}"


# Results of a job.


def rollouts(arguments: argparse.Namespace) -> int:
    if arguments.to is not None:
        return _rollouts_file(arguments)
    if arguments.format is not None:
        raise Refused("--format requires --to FILE.")
    client = _client()
    asked = {name: getattr(arguments, name) for name in Filters.__annotations__}
    over_steps = asked["step_from"] is not None or asked["step_to"] is not None
    if not over_steps:
        asked["split"] = asked["split"] or "train"
        if asked["step"] is None:
            asked["step"] = _last_step(client, arguments.job_id, asked["split"])
    limit = 20 if arguments.limit is None else arguments.limit
    in_full = not over_steps or arguments.worst or limit == 0 or arguments.output == "json"
    sorting: Any = {} if arguments.sort is None else {"sort": arguments.sort, "order": "desc"}
    listed = client.rollouts.list(arguments.job_id, limit=1000 if over_steps else None, **sorting, **asked)
    answers = list(listed if in_full else islice(listed, limit + 1))
    if arguments.worst:
        # Ungraded answers sort last, but must not be hidden by the limit.
        answers.sort(key=lambda one: (one.score is not None, one.score or 0.0))
    if arguments.output == "json":
        print_json(answers)
        return DONE
    shown = answers[:limit] if limit else answers
    if arguments.full:
        print("\n\n".join(_in_full(one) for one in shown))
        return DONE
    places = [[one.step, one.split] if over_steps else [] for one in shown]
    sorted_by = [arguments.sort] if arguments.sort not in (None, "score") else []
    rows = [
        [
            *place,
            one.line,
            one.member,
            one.score if one.score is None else float(one.score),
            *(getattr(one, name) for name in sorted_by),
            one.finish_reason,
            answer_cell(one.output_text, WIDE, sys.stdout.encoding),
            shortened("; ".join(filter(None, (_sub_scores(one), one.reason))), WIDE),
        ]
        for place, one in zip(places, shown, strict=True)
    ]
    head = ["line", "member", "reward", *sorted_by, "finish", "answer", "why"]
    print(table(["step", "split", *head] if over_steps else head, rows))
    # Each prompt once: a judgment of the scores needs the question and the expected answer.
    asked_by_line = {one.line: [one.line, shortened(_question(one), WIDE), _expected(one)] for one in shown}
    if asked_by_line:
        print()
        print(
            table(["line", "question", "expected"], [asked_by_line[line] for line in sorted(asked_by_line)])
        )
    if in_full or len(answers) <= limit:
        where = "" if over_steps else f"step {asked['step']}, {asked['split']}: "
        say(f"{where}{len(shown)} of {len(answers)} answers")
    else:
        say(f"the first {limit} answers; --limit 0 shows all")
    return DONE


def _question(rollout: Rollout) -> str:
    """The text of the last message."""
    content = rollout.messages[-1].get("content") if rollout.messages else None
    if isinstance(content, list):
        return " ".join(part["text"] for part in content if isinstance(part.get("text"), str))
    return content or ""


def _expected(rollout: Rollout) -> str:
    """The other fields of the row: without its name if there is only one."""
    fields = {name: _value(value) for name, value in (rollout.item or {}).items() if name != "messages"}
    if len(fields) == 1:
        return next(iter(fields.values()))
    return shortened(", ".join(f"{name}: {value}" for name, value in fields.items()), WIDE)


def _sub_scores(rollout: Rollout) -> str:
    """Such as `format 1.000, answer 0.500`; empty without a multi grader."""
    return ", ".join(f"{name} {_number(score)}" for name, score in (rollout.sub_scores or {}).items())


def _in_full(rollout: Rollout) -> str:
    """The whole prompt, row, answer and grade."""
    fields = {name: value for name, value in (rollout.item or {}).items() if name != "messages"}
    parts = [
        *((str(one.get("role")), _text(one.get("content"))) for one in rollout.messages),
        *((name, _text(value)) for name, value in fields.items()),
        ("thought", rollout.output_reasoning),
        ("answer", rollout.output_text),
        ("reward", _number(rollout.score)),
        ("sub-scores", _sub_scores(rollout)),
        ("reason", rollout.reason),
        *((f"reason of {name}", text) for name, text in (rollout.sub_reasons or {}).items()),
        ("printed", rollout.output),
        *((f"printed by {name}", text) for name, text in (rollout.sub_outputs or {}).items()),
    ]
    place = f"step {rollout.step}, {rollout.split}, line {rollout.line}, member {rollout.member}"
    lines = [f"{place}, {rollout.finish_reason}, {rollout.completion_tokens} tokens"]
    lines += [f"{title}:\n{indent(text.rstrip(), '  ')}" for title, text in parts if text]
    return "\n".join(lines)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _last_step(client: Regraft, job_id: str, split: str) -> int:
    steps = client.jobs.metrics(job_id, frame=False)
    key = "train_mean_reward" if split == "train" else "full_valid_mean_reward"
    with_answers: list[int] = [one["step"] for one in steps if one.get(key) is not None]
    if not with_answers:
        job = client.fine_tuning.jobs.retrieve(job_id)
        if job.status in FINAL:
            raise Refused(
                f"The job has ended without {split} rollouts. Only jobs that sample answers have them, and its "
                f"method is '{_method(job)}'."
            )
        raise Refused(f"The job has no {split} rollouts yet.")
    return with_answers[-1]


def _rollouts_file(arguments: argparse.Namespace) -> int:
    if arguments.worst or arguments.full or arguments.sort is not None or arguments.limit is not None:
        raise Refused(
            "--worst, --full, --sort and --limit are for the table; a file has all matching answers by step."
        )
    asked: Any = {name: getattr(arguments, name) for name in Filters.__annotations__}
    form: Any = arguments.format or "jsonl"
    path = _client().rollouts.download(arguments.job_id, arguments.to, format=form, **asked)
    size = path.stat().st_size
    return _answer(arguments, {"path": str(path), "bytes": size}, lambda: f"{path}: {size} bytes")


def prompts(arguments: argparse.Namespace) -> int:
    limit = arguments.limit
    page = _client().rollouts.prompts(
        arguments.job_id,
        split=arguments.split,
        step_from=arguments.step_from,
        step_to=arguments.step_to,
        line=arguments.line,
        outcome=arguments.outcome,
        pass_threshold=arguments.pass_threshold,
        sort=arguments.sort,
        limit=min(limit, 1000) if limit else 1000,
    )
    listed = list(islice(page, limit) if limit else page)

    def text() -> str:
        rows = [
            [
                one.line,
                one.outcome,
                one.first_mean,
                one.last_mean,
                _signed(one.change),
                len(one.steps),
                shortened(one.text or "", WIDE),
            ]
            for one in listed
        ]
        return table(["line", "outcome", "first", "last", "change", "steps", "prompt"], rows)

    done = _answer(arguments, listed, text)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in page.outcomes.items() if count)
    say(f"{counts or 'no prompts'}; a prompt is solved from a mean reward of {page.pass_threshold:g}")
    return done


def what_if(arguments: argparse.Namespace) -> int:
    found = _client().rollouts.what_if(
        arguments.job_id,
        arguments.formula,
        pass_threshold=arguments.pass_threshold,
        advantage_scale=arguments.advantage_scale,
        split=arguments.split,
        step_from=arguments.step_from,
        step_to=arguments.step_to,
    )
    before, after = found.advantages_before, found.advantages_after
    sizes: list[list[object]] = [
        [f"mean size of advantages, scale {found.advantage_scale}", before.mean, after.mean],
        ["largest advantage", before.largest, after.largest],
    ]

    return _answer(
        arguments,
        found,
        lambda: _compared(found, "with the formula", f"passed, from {found.pass_threshold:g}", sizes),
    )


def _compared(found: ComparedScores, new: str, passed: str, more: Iterable[list[object]] = ()) -> str:
    """The stored scores beside the new ones; `new` and `passed` name a column and a row, `more` are further rows."""
    before, after = found.before, found.after
    rows: list[list[object]] = [
        ["mean reward", before.mean, after.mean],
        ["graded answers", before.graded, after.graded],
        [passed, before.passed, after.passed],
        [f"groups with signal, of {found.groups}", before.groups_with_signal, after.groups_with_signal],
        *more,
    ]
    correlation = "" if found.rank_correlation is None else f", rank correlation {found.rank_correlation:.3f}"
    return (
        table([f"{found.answers} answers", "stored", new], rows)
        + f"\n{found.higher} higher, {found.lower} lower, {found.same} the same; {found.now_passed} now pass, "
        f"{found.now_failed} now fail; {found.changed_signs} would be learned the other way{correlation}"
    )


def regrade(arguments: argparse.Namespace) -> int:
    """Exit code 1: it did not complete."""
    client = _client()
    made = client.regrades.create(
        arguments.job_id,
        arguments.grader,
        split=arguments.split,
        step_from=arguments.step_from,
        step_to=arguments.step_to,
        name=arguments.name,
        max_tokens=arguments.max_tokens,
    )
    if arguments.no_wait:
        return _answer(arguments, made, lambda: made.id)
    say(f"{made.id}: {made.answers} answers")
    ended = client.regrades.wait(
        made.job_id, made.id, progress=lambda one: say(f"{one.status}: {one.graded} of {one.answers} graded")
    )

    def text() -> str:
        if ended.comparison is None:
            why = f": {ended.error['message']}" if ended.error else ""
            return f"{ended.status} after {ended.graded} of {ended.answers} answers{why}"
        return _compared(ended.comparison, "with the grader", "passed")

    _answer(arguments, ended, text)
    return DONE if ended.status == "completed" else NO


def regrades(arguments: argparse.Namespace) -> int:
    listed = list(_client().regrades.list(arguments.job_id))

    def text() -> str:
        rows: list[list[object]] = [
            [
                one.id,
                shortened(one.name, WIDE),
                one.status,
                f"{one.graded} of {one.answers}",
                one.comparison and one.comparison.before.mean,
                one.comparison and one.comparison.after.mean,
                one.comparison and one.comparison.now_passed + one.comparison.now_failed,
            ]
            for one in listed
        ]
        return table(["regrade", "name", "status", "graded", "stored", "new", "flipped"], rows)

    return _answer(arguments, listed, text)


def checkpoints_list(arguments: argparse.Namespace) -> int:
    listed = _client().checkpoints.list(arguments.job_id)

    def text() -> str:
        chosen = best(listed, arguments.job_id).id if listed else ""
        rows = [
            [
                one.id,
                one.step_number,
                getattr(one.metrics, "full_valid_mean_reward", None),
                _signed(_difference(one)),
                _mark(one) if one.id == chosen else "",
                one.fine_tuned_model_checkpoint or "-",
            ]
            for one in listed
        ]
        if all(reward is None for _, _, reward, *_ in rows):  # of a supervised or dpo job
            losses = [getattr(one.metrics, "full_valid_loss", None) for one in listed]
            named = [[row[0], row[1], loss, row[5]] for row, loss in zip(rows, losses, strict=True)]
            return table(["id", "step", "valid loss", "model"], named)
        return table(["id", "step", "valid reward", "vs base", "", "model"], rows)

    return _answer(arguments, listed, text)


def _difference(checkpoint: FineTuningJobCheckpoint) -> float | None:
    """Validation reward minus the base model's, paired by row; None if they were not compared."""
    return getattr(checkpoint.metrics, "full_valid_difference", None)


def _signed(difference: float | None) -> str:
    return "-" if difference is None else f"{difference:+.3f}"


def _mark(best: FineTuningJobCheckpoint) -> str:
    return "best, below base" if (_difference(best) or 0.0) < 0 else "best"


def checkpoints_download(arguments: argparse.Namespace) -> int:
    folder = _client().checkpoints.download(arguments.job_id, arguments.checkpoint_id, to=arguments.to)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    shown = {"folder": str(folder), "files": files}
    return _answer(
        arguments,
        shown,
        lambda: table(["bytes", "file"], [[size, folder / name] for name, size in files.items()]),
    )


# Models.


def models_list(arguments: argparse.Namespace) -> int:
    listed = list(_client().models.list())
    rows = [[one.id, *_origin(one), when(one.created or None)] for one in listed]
    return _answer(arguments, listed, lambda: table(["id", "tuned from", "base", "created"], rows))


def _origin(model: Any) -> tuple[str, str]:
    """The model that it was trained from, and its base model, or the target of an alias."""
    parent, root = (getattr(model, name, None) for name in ("parent", "root"))
    if parent is None and root not in (None, model.id):
        return "-", f"{root} (alias)"
    return parent or "-", root if parent and root else "-"


def models_delete(arguments: argparse.Namespace) -> int:
    deleted = _client().models.delete(arguments.model)
    return _answer(arguments, deleted, lambda: f"Deleted {deleted.id}")


def models_promote(arguments: argparse.Namespace) -> int:
    alias = _client().aliases.promote(arguments.model, arguments.alias)
    return _answer(arguments, alias, lambda: _pointed(alias))


def models_rollback(arguments: argparse.Namespace) -> int:
    alias = _client().aliases.rollback(arguments.alias)
    return _answer(arguments, alias, lambda: _pointed(alias))


def _pointed(alias: Alias) -> str:
    before = f"; before: {alias.previous_model}" if alias.previous_model else ""
    return f"{alias.name}: {alias.model} answers now{before}"


def models_history(arguments: argparse.Namespace) -> int:
    listed = list(_client().aliases.history(arguments.alias, limit=100))
    rows = [
        [when(one.changed_at), one.previous_model or "-", one.model or "deleted", one.changed_by]
        for one in listed
    ]
    return _answer(arguments, listed, lambda: table(["changed", "from", "to", "by"], rows))


def models_aliases(arguments: argparse.Namespace) -> int:
    client = _client()
    for name in arguments.delete:
        client.aliases.delete(name)
    listed = list(client.aliases.list(limit=100))
    rows = [
        [
            f"{one.name} (hidden by a model of the registry)" if one.hidden else one.name,
            one.model,
            one.previous_model or "-",
            when(one.updated_at),
        ]
        for one in listed
    ]
    return _answer(arguments, listed, lambda: table(["alias", "model", "previous", "changed"], rows))


def chat(arguments: argparse.Namespace) -> int:
    messages: list[Any] = [{"role": "system", "content": arguments.system}] if arguments.system else []
    options: dict[str, Any] = {"model": arguments.model}
    if arguments.temperature is not None:
        options["temperature"] = arguments.temperature
    if arguments.max_tokens is not None:
        options["max_completion_tokens"] = arguments.max_tokens
    for prompt in _prompts(arguments):
        messages.append({"role": "user", "content": prompt})
        if arguments.output == "json":
            print_json(_client().chat.completions.create(messages=messages, **options))
            return DONE
        messages.append({"role": "assistant", "content": _spoken(messages, options)})
    return DONE


def _prompts(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.prompt is not None:
        yield arguments.prompt
    elif sys.stdin.isatty():
        say("Ctrl-D ends the conversation.")
        while True:
            try:
                prompt = input("> ")
            except EOFError:
                return
            if prompt.strip():
                yield prompt
    else:
        prompt = sys.stdin.read()
        if not prompt.strip():
            raise Refused("No prompt: pass a text or use stdin.")
        yield prompt


def _spoken(messages: list[Any], options: dict[str, Any]) -> str:
    said = ""
    model = f"{options['model']}, which the server may have to load"
    with (
        Waiting(sys.stderr, model) as waiting,
        _client().chat.completions.create(messages=messages, stream=True, **options) as stream,
    ):
        try:
            for chunk in stream:
                waiting.end()
                piece = (chunk.choices[0].delta.content or "") if chunk.choices else ""
                said += piece
                print(piece, end="", flush=True)
        finally:
            print()  # also on errors, which are printed on their own line
    return said


def migrate(arguments: argparse.Namespace) -> int:
    if arguments.job == Path("evals"):
        return evals_export(arguments, arguments.to)
    if arguments.to.exists():
        raise Refused(f"{arguments.to} already exists.")
    params = read_table(arguments.job)
    result = migrated(params, model=arguments.model or _known_model(params))
    with whole(arguments.to) as file:
        file.write(result.text.encode())
    refusal = None
    if result.body["model"] != NO_MODEL:  # otherwise the missing model is the first thing to do
        refusal = _refused_by_server(
            VALIDATE, {"job": result.body, "local_files": [*FILES]}, str(arguments.to)
        )
    refused = None if refusal is None else _refused(arguments.to, refusal)["errors"][0]["message"]
    shown = {"file": str(arguments.to), "to_do": result.to_do, "differs": result.differs, "refused": refused}

    def text() -> str:
        to_do = ["To do:", *(f"  - {one}" for one in result.to_do)] if result.to_do else []
        differs = ["What differs:", *(f"  - {one}" for one in result.differs)]
        no = [f"The server would reject it: {refused}"] if refused else []
        return "\n".join([f"Wrote {arguments.to}", *to_do, *differs, *no])

    _answer(arguments, shown, text)
    return NO if refused else DONE


def _known_model(params: dict[str, Any]) -> str | None:
    """The job's own model, if the server knows the name, such as an alias."""
    try:
        return str(_client().models.retrieve(params["model"]).id)
    except (KeyError, NotConfigured, openai.APIConnectionError, openai.NotFoundError):
        return None


def _fields(value: Any) -> str:
    shown = {key: one for key, one in plain(value).items() if one is not None}
    width = max(map(len, shown))
    return "\n".join(f"{key:<{width}}  {one}" for key, one in shown.items())


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    command.__name__: command
    for command in (
        login,
        files_upload,
        files_list,
        files_show,
        files_download,
        files_delete,
        files_profile,
        previews_list,
        previews_show,
        previews_answers,
        previews_cancel,
        previews_delete,
        validate,
        graders_validate,
        graders_run,
        graders_save,
        graders_list,
        graders_show,
        graders_versions,
        graders_diff,
        graders_delete,
        graders_cases,
        graders_check,
        jobs_create,
        jobs_clone,
        jobs_list,
        jobs_show,
        jobs_watch,
        jobs_pause,
        jobs_resume,
        jobs_cancel,
        jobs_compare,
        jobs_attempts,
        jobs_logs,
        jobs_budget,
        usage,
        rollouts,
        prompts,
        what_if,
        regrade,
        regrades,
        checkpoints_list,
        checkpoints_download,
        models_list,
        models_delete,
        models_promote,
        models_rollback,
        models_history,
        models_aliases,
        chat,
        migrate,
        init,
        convert,
        evals_run,
        evals_compare,
        evals_gate,
        evals_import,
        pipelines_create,
        pipelines_list,
        workers,
        pipelines_show,
        pipelines_wait,
        pipelines_pause,
        pipelines_resume,
        pipelines_cancel,
        pipelines_retry,
        pipelines_clone,
    )
}
