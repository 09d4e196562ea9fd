"""The commands of files: datasets and job files."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import openai

from regraft import starters
from regraft._rules.datasets import InvalidDataset, LineError
from regraft._rules.foreign_files import HEAD_BYTES, JSON_ARRAY, PRETTY_JSON, container_of
from regraft.cli import evals
from regraft.cli.output import answer, plain, print_json, say, shortened, table, when
from regraft.cli.shared import DONE, NO, Refused, connect
from regraft.config import NotConfigured
from regraft.convert import SameFile, UnknownEncoding, uncompressed_name
from regraft.convert import convert as convert_dataset
from regraft.datasets import validate as validate_dataset
from regraft.errors import NotSupportedByServer
from regraft.migrate import NO_MODEL
from regraft.migrate import migrate as migrated
from regraft.requests import FILES, read_grader, read_job, read_table
from regraft.resources.jobs import VALIDATE, validate_local, validation
from regraft.saving import atomic_file, chunks
from regraft.tables import HUB, HubTable, from_hub

JOB_FILES = (".toml", ".json", ".yaml", ".yml")


def files_upload(arguments: argparse.Namespace) -> int:
    made = []
    for path in arguments.paths:
        if path.is_dir():
            raise Refused(f"{path} is a folder; name a file")
        if not path.is_file():
            raise Refused(f"No such file: {path}")
        made.append(connect().files.create(file=path, purpose="fine-tune"))
    return answer(arguments, made, lambda: _files(made))


def files_download(arguments: argparse.Namespace) -> int:
    with connect().files.with_streaming_response.content(arguments.file_id) as content:
        if arguments.to is None and arguments.output == "text":
            for chunk in chunks(content.http_response):
                sys.stdout.buffer.write(chunk)
            return DONE
        if arguments.to is None:
            raise Refused("--output json needs --to FILE: the contents are not JSON.")
        with atomic_file(arguments.to) as file:
            for chunk in chunks(content.http_response):
                file.write(chunk)
    size = arguments.to.stat().st_size
    shown = {"id": arguments.file_id, "path": str(arguments.to), "bytes": size}
    return answer(arguments, shown, lambda: f"{arguments.to}: {size} bytes")


def files_profile(arguments: argparse.Namespace) -> int:
    profile = connect().profile(
        arguments.file_id,
        model=arguments.model,
        method=arguments.method,
        validation_file=arguments.validation_file,
        grader=arguments.grader,
        max_completion_tokens=arguments.max_completion_tokens,
    )
    return answer(arguments, profile, lambda: profile_text(plain(profile)))


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
    lines += _token_lines(profile)
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
    if profile["grader"] is not None:
        lines += _grader_lines(profile["grader"])
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


def _token_lines(profile: dict[str, Any]) -> list[str]:
    tokens = profile["tokens"]
    if tokens is None:
        return [f"tokens: not counted, {profile['tokens_reason']}"]
    counted = "" if tokens["rows"] == profile["rows"] else f" of {tokens['rows']} rows"
    special = "rows contain the text of a special token, which the model reads as text"
    return [
        f"tokens{counted}: {_lengths(tokens)}; room for {tokens['room']}",
        *_lines_of("rows do not fit", tokens["too_long"]),
        *_lines_of("rows are rejected by the chat template", tokens["not_rendered"]),
        *_lines_of(special, tokens["special_texts"]),
    ]


def _grader_lines(reads: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for read in reads["paths"]:
        lines.append(f"the grader reads {read['path']}: {read['missing']['rows']} rows lack it")
        lines += _lines_of("rows lack it", read["missing"])[1:]
    if reads["no_grader"] is not None:
        lines += _lines_of("rows choose no grader", reads["no_grader"])
    no_word = "rows have a reference without a word to compare, and a job rejects them"
    lines += _lines_of(no_word, reads["no_word"])
    for doubt in reads["doubts"]:
        lines += _lines_of(f"rows are doubtful: each {doubt['message']}", doubt["found"])
    if reads["not_listed"]:
        lines.append("its code or its endpoint may read other fields as well")
    return lines


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
                    print(
                        "".join(f"{report['file']}: warning: {one}\n" for one in report["warnings"]), end=""
                    )
                    continue
                fields = f", each with {', '.join(report['fields'])}" if report["fields"] else ""
                print(f"{report['file']}: {report['rows']} rows{fields}")
                continue
            print("\n".join(problem_lines(report)))
    return DONE if all(report["ok"] for report in reports) else NO


def invalid_report(path: Path | str, bad: InvalidDataset) -> dict[str, Any]:
    """Report a file with invalid rows: the one that the error names, else `path`."""
    return {
        "file": bad.file or str(path),
        "ok": False,
        "errors": [asdict(error) for error in bad.errors],
        "more": bad.more,
    }


def problem_lines(report: Mapping[str, Any]) -> list[str]:
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
    refusal, _ = _check_at_server("/fine_tuning/alpha/graders/validate", body, str(arguments.grader))
    return [] if refusal is None else [_refused(arguments.grader, refusal)]


def _validated_job(path: Path) -> dict[str, Any]:
    """Validate a job file with the server, then its local files by the rules for rows."""
    job = read_job(path)
    refusal, warnings = _check_at_server(VALIDATE, validation(job), str(path))
    if refusal is not None:
        return _refused(path, refusal)
    try:
        validate_local(job)
    except InvalidDataset as bad:
        return invalid_report(path, bad)
    return {"file": str(path), "ok": True, "warnings": warnings}


def _check_at_server(
    path: str, body: dict[str, Any], what: str
) -> tuple[openai.APIStatusError | None, list[str]]:
    """The server's rejection of a body on validation, and its warnings.

    If the server is unavailable, a note on stderr says so.
    """
    try:
        found: Any = connect().post(path, body=body, cast_to=object)
        return None, list(found.get("warnings", ()))
    except (NotConfigured, openai.APIConnectionError, NotSupportedByServer):
        say(f"{what}: the server is unavailable, so only local rules were checked")
    except (openai.BadRequestError, openai.NotFoundError) as refusal:
        return refusal, []
    return None, []


def _refused(path: Path, refusal: openai.APIStatusError) -> dict[str, Any]:
    message = refusal.message.removeprefix(f"Error code: {refusal.status_code} - ")
    error = LineError(0, message, refusal.param or "")
    return invalid_report(path, InvalidDataset([error]))


def _is_dataset(path: Path) -> bool:
    """Whether a file that is named like a job file has rows: it is no text of JSON, or one without a key of a job."""
    with path.open("rb") as file:
        container = container_of(file.read(HEAD_BYTES), path.name)
    if path.suffix.lower() != ".json" or container not in (None, PRETTY_JSON):
        return container is JSON_ARRAY or path.suffix.lower() == ".json"
    try:
        text = path.read_text("utf-8-sig").lstrip()
        first, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    has_more_objects = text[end:].lstrip().startswith("{")
    is_job = isinstance(first, dict) and not first.keys().isdisjoint({"model", "method", *FILES, "grader"})
    return has_more_objects or not is_job


def _validated(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    if path.suffix.lower() in JOB_FILES and not _is_dataset(path):
        return _validated_job(path)
    try:
        good = validate_dataset(path, grader=arguments.grader, split=arguments.split, method=arguments.method)
    except InvalidDataset as bad:
        return invalid_report(path, bad)
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

    return answer(arguments, {"folder": str(folder), "files": [str(path) for path in paths]}, text)


def convert(arguments: argparse.Namespace) -> int:
    """Convert a file of another format, or a dataset of the hub, to a dataset."""
    names = _fields_by_name(arguments.names)
    source, stem = _source(arguments)
    path = arguments.out or Path(f"{stem}.{arguments.target}.jsonl")
    is_source = isinstance(source, Path) and path.is_file() and path.samefile(source)
    if path.is_file() and not is_source and not arguments.force:
        raise Refused(f"{path} already exists: choose another name with -o, or replace it with --force.")
    try:
        table = source if isinstance(source, Path) else source()
        made = convert_dataset(table, arguments.target, path, names=names, encoding=arguments.encoding)
    except SameFile as same:
        raise Refused(f"{same} with -o") from None
    except UnknownEncoding as unknown:
        raise Refused(f"--encoding: {unknown}") from None
    except InvalidDataset as bad:
        bad.file = str(arguments.source)
        raise
    shown = {
        "path": str(made.path),
        "rows": made.rows,
        "left_out": dict(made.left_out),
        "dropped_fields": list(made.dropped_fields),
        "notes": list(made.notes),
    }

    def text() -> str:
        said = [f"{made.path}: {made.rows} rows"]
        said += [f"left out: {rows} row(s) {why}" for why, rows in made.left_out.items()]
        if made.dropped_fields:
            said.append(f"dropped fields: {', '.join(made.dropped_fields)}")
        said += [f"note: {note}" for note in made.notes]
        return "\n".join(said)

    return answer(arguments, shown, text)


def _fields_by_name(assignments: Sequence[str]) -> dict[str, str]:
    """The field of the source for each name of --map."""
    names: dict[str, str] = {}
    for assignment in assignments:
        name, equals, field = assignment.partition("=")
        if not (name and equals and field):
            raise Refused(f"--map {assignment}: write it as NAME=FIELD, such as answer=label")
        if name in names:
            raise Refused(f"--map {assignment}: {name} is given twice, also as {names[name]}")
        names[name] = field
    return names


def _source(arguments: argparse.Namespace) -> tuple[Path | Callable[[], HubTable], str]:
    """The file to convert, or the download of a dataset of the hub; and the stem of the converted file's name."""
    source: Path = arguments.source
    if str(source).startswith(HUB):
        if arguments.encoding:
            raise Refused("--encoding is of text files: a dataset of the hub has none.")
        name, split = str(source).removeprefix(HUB), arguments.split or "train"
        return partial(from_hub, name, config=arguments.config, split=split), source.name
    if arguments.config or arguments.split:
        raise Refused(f"--config and --split are of datasets of the hub, such as {HUB}openai/gsm8k.")
    if source.is_dir():
        inside = sorted(
            one for one in source.rglob("*") if one.suffix in (".arrow", ".parquet", ".jsonl", ".csv")
        )
        example = f", such as {inside[0]}" if inside else ""
        raise Refused(f"{source} is a folder, and each of its files is converted on its own{example}.")
    # train.csv.gz becomes train.rft.jsonl.
    return source, Path(uncompressed_name(source).name).stem


def migrate_from_openai(arguments: argparse.Namespace) -> int:
    if arguments.job == Path("evals"):
        return evals.evals_export(arguments, arguments.to)
    if arguments.to.exists():
        raise Refused(f"{arguments.to} already exists.")
    params = read_table(arguments.job)
    result = migrated(params, model=arguments.model or _known_model(params))
    with atomic_file(arguments.to) as file:
        file.write(result.text.encode())
    refusal, warnings = None, list[str]()
    if result.body["model"] != NO_MODEL:  # otherwise the missing model is the first thing to do
        refusal, warnings = _check_at_server(
            VALIDATE, {"job": result.body, "local_files": [*FILES]}, str(arguments.to)
        )
    refused = None if refusal is None else _refused(arguments.to, refusal)["errors"][0]["message"]
    shown = {
        "file": str(arguments.to),
        "to_do": result.to_do,
        "differs": result.differs,
        "warnings": warnings,
        "refused": refused,
    }

    def text() -> str:
        to_do = ["To do:", *(f"  - {one}" for one in result.to_do)] if result.to_do else []
        differs = ["What differs:", *(f"  - {one}" for one in result.differs)]
        no = [f"The server would reject it: {refused}"] if refused else []
        warned = [f"Warning: {one}" for one in warnings]
        return "\n".join([f"Wrote {arguments.to}", *to_do, *differs, *warned, *no])

    answer(arguments, shown, text)
    return NO if refused else DONE


def _known_model(params: dict[str, Any]) -> str | None:
    """The job's own model, if the server knows the name, such as an alias."""
    try:
        return str(connect().models.retrieve(params["model"]).id)
    except (KeyError, NotConfigured, openai.APIConnectionError, openai.NotFoundError):
        return None
