"""Reads job and grader files, and converts them to the API's format.

A job file has the fields of POST /fine_tuning/jobs. With `grader` at the top level, `hyperparameters` and
`response_format` are also allowed there, and the method is 'reinforcement'; any other file is sent unchanged.
`training_file` and `validation_file` are ids, or paths to upload; `grader` and `shadow_grader` are tables, or the path
of a .py with `def grade(sample, item)`, or of a .json, .toml or .yaml, or "stored:NAME", or "stored:NAME@VERSION".
"""

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from regraft._rules.datasets import unique_keys
from regraft._rules.foreign_files import HEAD_BYTES, container_of
from regraft._rules.masking import masked_path
from regraft._rules.system_errors import file_problem

FILES = ("training_file", "validation_file")
GRADERS = ("grader", "shadow_grader")
OF_THE_METHOD = (*GRADERS, "hyperparameters", "response_format", "tools", "environment", "max_episode_steps")
PATHS = [["training_file"], ["validation_file"], *([name] for name in GRADERS)]
MAX_PROBLEMS = 20  # lines of an error
MAX_TABLE_BYTES = 1 << 20  # of a job file or of a grader file
MAX_LINES_BYTES = 64 << 20  # of a JSONL file that is read as a whole, such as cases
STORED = "stored:"  # before the name of a stored grader, in place of a file

T = TypeVar("T")
Source = str | Path | Mapping[str, Any]
"""A path, or the content of such a file."""
Locate = Callable[[Path], Path]
"""The path of a file that is read; raises to refuse it."""


class InvalidRequestFile(ValueError):
    """The file is invalid; the message has its path and the problem."""


@dataclass(frozen=True)
class JobRequest:
    """The body of POST /fine_tuning/jobs without the files to upload, which are listed by field."""

    body: dict[str, Any]
    uploads: dict[str, Path]

    @property
    def distinct_uploads(self) -> list[Path]:
        """The files to upload, each once."""
        return list(dict.fromkeys(self.uploads.values()))

    def with_ids(self, ids: Mapping[str, str]) -> dict[str, Any]:
        return self.body | dict(ids)


def read_job(source: Source, changes: Sequence[str] = (), *, locate: Locate = Path) -> JobRequest:
    """Read a job and apply `changes` such as "hyperparameters.n_epochs=2". Their paths are relative to the working
    folder.

    Args:
        locate: called with each path that is read or uploaded.

    Raises:
        InvalidRequestFile: the file is not a job. The server validates its values.
    """
    if isinstance(source, Mapping):
        fields, folder, name = deepcopy(dict(source)), Path(), "the request"
    else:
        path = locate(Path(source))
        fields, folder, name = read_table(path), path.parent, str(path)
    return _job_of(fields, folder, name, changes, locate)


def _job_of(
    fields: dict[str, Any], folder: Path, name: str, changes: Sequence[str] = (), locate: Locate = Path
) -> JobRequest:
    # A top-level grader marks the short form; any other file is the API's body, which the server validates.
    is_short = "grader" in fields or any(re.match(r"\s*grader\b", change) for change in changes)
    body = _with_method(fields, name) if is_short else fields
    for change in changes:
        set_path(body, change)
    method = body.get("method")
    inside = method.get("reinforcement") if isinstance(method, dict) else None
    for field in GRADERS:
        if isinstance(inside, dict) and isinstance(inside.get(field), str | Path):
            inside[field] = read_grader(inside[field], folder, locate=locate)
    uploads: dict[str, Path] = {}
    for field in FILES:
        value = body.get(field)
        if isinstance(value, Path) or (isinstance(value, str) and not _is_id(value)):
            uploads[field] = _existing(locate(folder / value), f"{name}: {field}")
            del body[field]
    return JobRequest(body, uploads)


@dataclass(frozen=True)
class PipelineRequest:
    """The body of POST /regraft/pipelines, in which `uploads` are the local files, by their place."""

    body: dict[str, Any]
    uploads: dict[tuple[str | int, ...], Path]

    @property
    def jobs(self) -> list[JobRequest]:
        """The jobs of its stages, with their local files."""
        return [
            JobRequest(
                holder["job"], {str(way[-1]): path for way, path in self.uploads.items() if way[:-1] == place}
            )
            for number, stage in enumerate(self.body["stages"])
            for holder, place in _jobs_of(stage, number)
        ]

    def with_ids(self, ids: Mapping[tuple[str | int, ...], str]) -> dict[str, Any]:
        body = deepcopy(self.body)
        for (*way, last), file_id in ids.items():
            place: Any = body
            for key in way:
                place = place[key]
            place[last] = file_id
        return body


def read_pipeline(source: Source) -> PipelineRequest:
    """Read a pipeline: a table with `stages`, whose jobs have the form of job files. Paths are relative to the file.

    Raises:
        InvalidRequestFile: the file is not a pipeline. The server validates its values.
    """
    if isinstance(source, Mapping):
        fields, folder, name = deepcopy(dict(source)), Path(), "the request"
    else:
        path = Path(source)
        fields, folder, name = read_table(path), path.parent, str(path)
    stages = fields.get("stages")
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise InvalidRequestFile(f"{name}: 'stages' must be a list of tables")
    uploads: dict[tuple[str | int, ...], Path] = {}
    for number, stage in enumerate(stages):
        where = f"{name}: stages[{number}]"
        for holder, place in _jobs_of(stage, number):
            job = _job_of(holder["job"], folder, where)
            holder["job"] = job.body
            uploads |= {(*place, field): path for field, path in job.uploads.items()}
        for kind in ("sample", "select"):
            if isinstance(stage.get(kind), dict):
                _note_file(uploads, ("stages", number, kind), stage[kind], folder, where)
        mix = stage.get("mix")
        for index, one in enumerate(mix.get("files", ()) if isinstance(mix, dict) else ()):
            if isinstance(one, dict):
                _note_file(uploads, ("stages", number, "mix", "files", index), one, folder, where)
        sample = stage.get("sample")
        if isinstance(sample, dict) and isinstance(sample.get("grader"), str):
            sample["grader"] = read_grader(sample["grader"], folder)
    return PipelineRequest(fields, uploads)


def _jobs_of(stage: dict[str, Any], number: int) -> Iterator[tuple[dict[str, Any], tuple[str | int, ...]]]:
    """The job of a stage, or of its sweep: what has it at "job", and its place in the request."""
    for holder, way in ((stage, ()), (stage.get("sweep"), ("sweep",))):
        if isinstance(holder, dict) and isinstance(holder.get("job"), dict):
            yield holder, ("stages", number, *way, "job")


def _note_file(
    uploads: dict[tuple[str | int, ...], Path],
    way: tuple[str | int, ...],
    table: dict[str, Any],
    folder: Path,
    where: str,
) -> None:
    value = table.get("file")
    if isinstance(value, str) and not _is_id(value):
        uploads[*way, "file"] = _existing(folder / value, where)


def read_grader(
    source: Source, folder: Path = Path(), *, name: str | None = None, locate: Locate = Path
) -> dict[str, Any]:
    """Read the spec of a grader: a mapping, a .py, .json, .toml or .yaml file in `folder`, or "stored:NAME@VERSION".

    Args:
        name: of a grader that is a .py file. None: the name of the file.
        locate: called with each path that is read.
    """
    if isinstance(source, str | Path) and not str(source).startswith(STORED):
        path = locate(folder / source)
        spec = _grader_file(path, name)
        if not _is_job(spec):
            return spec
        source, folder = spec["grader"], path.parent
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, str | Path):
        raise InvalidRequestFile(f"A grader is a table or the path of a file, not {source!r}")
    if str(source).startswith(STORED):
        stored_name, _, version = str(source).removeprefix(STORED).partition("@")
        return {"type": "stored", "name": stored_name} | ({"version": version} if version else {})
    path = locate(folder / source)
    spec = _grader_file(path, name)
    if _is_job(spec):
        raise InvalidRequestFile(f"{path}: expected the file of a grader, and this is a job file")
    return spec


def _grader_file(path: Path, name: str | None) -> dict[str, Any]:
    """The spec in a file; a job if it is a job file, which stands for its grader."""
    if path.suffix == ".py":
        return {"type": "python", "name": name or path.stem, "source": _text(path, MAX_TABLE_BYTES)}
    return read_table(path)


def _is_job(spec: Mapping[str, Any]) -> bool:
    return "grader" in spec and "type" not in spec


def read_table(path: Path) -> dict[str, Any]:
    """Read a JSON, TOML or YAML file with a table at the top level.

    Raises:
        InvalidRequestFile: it is another file, has other content, or has more than MAX_TABLE_BYTES.
    """
    parse = _parsers(path)
    text = _text(path, MAX_TABLE_BYTES)
    try:
        value = parse(text)
    except Exception as cause:  # each parser has its own exceptions
        raise InvalidRequestFile(f"{path}: {cause}") from cause
    if not isinstance(value, dict):
        raise InvalidRequestFile(f"{path}: expected a table of fields at the top")
    return value


def read_each(source: str | Path | Iterable[Any], read: Callable[[int, Any, str], T]) -> list[T]:
    """What `read` makes of each line of a JSONL file, or of each row.

    Args:
        read: receives the number, the value and the place for an error. Raises InvalidRequestFile.

    Raises:
        InvalidRequestFile: with all invalid lines, or the format that the file seems to have, if it is not JSONL.
    """
    is_file = isinstance(source, str | Path)
    numbered = read_lines(Path(source)) if isinstance(source, str | Path) else enumerate(source, start=1)
    made, problems = [], []
    for number, value in numbered:
        where = f"{source}: line {number}" if is_file else f"row {number}"
        try:
            if isinstance(value, ValueError):
                raise InvalidRequestFile(f"{where}: {value}") from value
            made.append(read(number, value, where))
        except InvalidRequestFile as problem:
            problems.append(str(problem))
    if problems:
        more = len(problems) - MAX_PROBLEMS
        raise InvalidRequestFile(
            "\n".join(problems[:MAX_PROBLEMS] + ([f"and {more} more"] if more > 0 else []))
        )
    return made


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The values of a JSONL file with the numbers of their lines, which count from 1; empty lines have none.

    The value of a line that is not JSON is the ValueError.

    Raises:
        InvalidRequestFile: with the format that the file seems to have, if it is not JSONL.
    """
    with path.open("rb") if path.is_file() else BytesIO() as file:
        foreign = container_of(file.read(HEAD_BYTES), path.name)
    if foreign is not None:
        raise InvalidRequestFile(f"{path} is not JSONL: {foreign.seen}; {foreign.remedy}")
    for number, line in enumerate(_text(path, MAX_LINES_BYTES).split("\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line, object_pairs_hook=unique_keys)
            except ValueError as cause:
                yield number, cause


def set_path(body: dict[str, Any], assignment: str) -> None:
    """Apply an assignment such as `hyperparameters.n_epochs=2`. Values are JSON, or else text.

    `grader`, `hyperparameters` and `response_format` are those of the job's method. `hyperparameters` of a job
    without `method`, which is supervised, stay at the top level, as in OpenAI's earlier API.
    """
    name, equals, text = assignment.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise InvalidRequestFile(f"--set {assignment}: write it as field=value, such as seed=1")
    try:
        value = json.loads(text)
    except ValueError:
        is_path = keys in PATHS and not _is_id(text) and not text.startswith(STORED)
        value = Path(text).absolute() if is_path else text
    if keys[0] in OF_THE_METHOD:
        keys = [*_place_of(keys[0], body.get("method")), *keys]
    table = body
    for depth, key in enumerate(keys[:-1]):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise InvalidRequestFile(f"--set {assignment}: {'.'.join(keys[: depth + 1])} is not a table")
    table[keys[-1]] = value


def _place_of(field: str, method: Any) -> list[str]:
    """The tables around a field of the method."""
    if method is None and field == "hyperparameters":
        return []
    kind = method.get("type") if isinstance(method, dict) else None
    return ["method", kind if isinstance(kind, str) else "reinforcement"]


def refuse_masked(body: Mapping[str, Any]) -> None:
    """Reject masked secrets: a request that was read from a job would use the masks as secrets."""
    if (where := masked_path(body, "")) is not None:
        where = where.removeprefix(".").removeprefix("method.reinforcement.")
        raise InvalidRequestFile(f"The server does not show {where}: set it again, or pass a grader.")


def _with_method(fields: dict[str, Any], name: str) -> dict[str, Any]:
    body = {key: value for key, value in fields.items() if key not in OF_THE_METHOD}
    method = {"type": "reinforcement"} if body.get("method") is None else body["method"]
    if not isinstance(method, dict):
        raise InvalidRequestFile(f"{name}: method must be a table")
    inside = dict(method.get("reinforcement") or {})
    for key in OF_THE_METHOD:
        if key in fields and key in inside:
            raise InvalidRequestFile(f"{name}: {key} is given at the top level and in the method")
        if key in fields:
            inside[key] = fields[key]
    kind = method.get("type", "reinforcement")
    return body | {"method": method | {"type": kind} | ({"reinforcement": inside} if inside else {})}


def _is_id(value: str) -> bool:
    """Whether it is the id of a file, or a reference to the result of a pipeline's stage."""
    if value.strip().startswith("{{"):
        return True
    return value.startswith("file-") and "." not in value and "/" not in value


def _existing(path: Path, where: str) -> Path:
    if path.is_dir():
        raise InvalidRequestFile(f"{where}: {path} is a folder; name a file")
    if not path.is_file():
        raise InvalidRequestFile(f"{where}: no such file: {path}")
    return path


def _text(path: Path, most: int) -> str:
    """The text of a file of at most `most` bytes, which is not read if it has more."""
    try:
        if path.stat().st_size > most:
            raise InvalidRequestFile(f"{path}: has more than {most >> 20} MiB")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as cause:
        is_system = isinstance(cause, OSError)
        raise InvalidRequestFile(file_problem(cause) if is_system else f"{path}: it is not UTF-8") from cause


def _parsers(path: Path) -> Any:
    match path.suffix.lower():
        case ".json":
            return partial(json.loads, object_pairs_hook=unique_keys)
        case ".toml":
            return tomllib.loads
        case ".yaml" | ".yml":
            try:
                import yaml
            except ImportError:
                raise InvalidRequestFile(
                    f"{path}: YAML files need `pip install pyyaml`; TOML and JSON files do not"
                ) from None
            return partial(yaml.load, Loader=_unique_keys_of(yaml.SafeLoader))
        case _:
            raise InvalidRequestFile(f"{path}: expected a file that ends in .toml, .json or .yaml")


def _unique_keys_of(loader: Any) -> Any:
    """The YAML loader with an error for a key that a mapping has twice; a key beside a merged one replaces it.

    Aliases of aliases repeat a text exponentially: the repeated text has the limit of the file.
    """

    class UniqueKeys(loader):  # type: ignore[misc]
        def get_single_node(self) -> Any:
            node = super().get_single_node()
            if _repeated_size(node, {}) > MAX_TABLE_BYTES:
                raise InvalidRequestFile("its aliases repeat too much, or contain themselves")
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            unique_keys([(key.value, None) for key, _ in node.value if not key.tag.endswith(":merge")])
            return super().construct_mapping(node, deep)

    return UniqueKeys


def _repeated_size(node: Any, sizes: dict[int, float]) -> float:
    """The values and characters below a YAML node, an alias counted as what it repeats; infinite if it contains itself.

    Args:
        sizes: of the nodes that are known.
    """
    if id(node) not in sizes:
        sizes[id(node)] = inf
        value = () if node is None else node.value
        parts = [part for one in value for part in (one if isinstance(one, tuple) else (one,))]
        sizes[id(node)] = 1 + (
            len(value) if isinstance(value, str) else sum(_repeated_size(part, sizes) for part in parts)
        )
    return sizes[id(node)]
