"""Validation of dataset files on this machine, by the server's own rules."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regraft._rules import datasets as rules
from regraft._rules import offline_rows
from regraft._rules.datasets import Example
from regraft._rules.template import (
    MissingPath,
    RenderError,
    Template,
    TemplateSyntaxError,
    dotted,
    resolve,
    unknown_choice,
)
from regraft._rules.types import Sample
from regraft.literals import Method, Split
from regraft.requests import Source, read_grader

# The limits of OpenAI and of the server for reinforcement jobs.
MAX_ROWS: Mapping[str, int] = {"train": 50_000, "valid": 1_000}


@dataclass(frozen=True)
class Summary:
    """A valid file."""

    path: Path
    rows: int
    fields: tuple[str, ...]  # fields of every row that graders can read, without `messages`


def validate(
    file: str | Path,
    *,
    grader: Source | None = None,
    split: Split = "train",
    method: Method = "reinforcement",
) -> Summary:
    """Validate every row of a JSONL file; with a `grader`, also the fields that its templates read.

    Works without the server. The fields that a python grader or an endpoint reads are not checked.

    Args:
        method: of the job that is to learn from the file; its rows have another format for each.

    Raises:
        InvalidDataset: with the first invalid lines, with the server's messages.
    """
    path = Path(file)
    spec = None if grader is None else read_grader(grader)
    paths = [] if spec is None else item_paths(spec)

    def lacks(row: Example) -> Iterator[str]:
        wanted_here = paths
        if spec is not None and spec.get("type") == "select":
            part, problem = _chosen(spec, row)
            wanted_here = [*item_paths({"input": spec.get("key")}), *item_paths(part)]
            if problem:
                yield problem
        for wanted in wanted_here:
            try:
                resolve(row.item, wanted)
            except MissingPath:
                yield f"the grader reads {{{{{dotted('item', wanted)}}}}}, which this row does not have"

    common: set[str] | None = None
    form, most, least = None, MAX_ROWS[split], 1
    if method in offline_rows.FORMS:
        form, most = offline_rows.FORMS[method], offline_rows.MAX_ROWS
        least = offline_rows.MIN_ROWS if split == "train" else 1
    try:
        examples = rules.read_examples(
            _chunks(path), form=form, check=lacks if paths else None, max_rows=most, min_rows=least
        )
    except rules.InvalidDataset as invalid:
        raise offline_rows.explained(invalid, lambda: _chunks(path), method, path.name) from None
    for example in examples:
        common = set(example.item) if common is None else common & set(example.item)
    return Summary(path, len(examples), tuple(sorted((common or set()) - {"messages"})))


def _chosen(spec: Mapping[str, Any], row: Example) -> tuple[Mapping[str, Any], str]:
    """The grader of a select for this row; empty, with the problem if the row has a key, if it chooses none."""
    graders = spec.get("graders")
    if not isinstance(graders, Mapping):
        return {}, ""
    try:
        chosen = Template.parse(str(spec.get("key"))).render(Sample(""), row.item)
    except (TemplateSyntaxError, RenderError):
        return {}, ""
    part = graders.get(chosen)
    return (part, "") if isinstance(part, Mapping) else ({}, unknown_choice(chosen, graders))


def item_paths(spec: Mapping[str, Any]) -> list[tuple[str | int, ...]]:
    """Every path that the templates of a grader read from a row, without duplicates.

    Templates with syntax errors are ignored here; the server reports them.
    """
    found: dict[tuple[str | int, ...], None] = {}
    for text in _templates(spec):
        try:
            found |= dict.fromkeys(Template.parse(text).item_paths)
        except TemplateSyntaxError:
            continue
    return list(found)


def _templates(spec: Mapping[str, Any]) -> Iterator[str]:
    graders = spec.get("graders")
    subs = graders.values() if isinstance(graders, Mapping) else graders if isinstance(graders, list) else []
    for sub in subs:
        if isinstance(sub, Mapping):
            yield from _templates(sub)
    if spec.get("type") in ("python", "endpoint", "multi"):
        return
    for key in ("input", "reference"):
        yield from _texts(spec.get(key))


def _texts(value: Any) -> Iterator[str]:
    """The templates of an input: a text, or messages with texts or parts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, Mapping):
        for key in ("content", "text", "image_url", "input_audio", "data"):
            yield from _texts(value.get(key))


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            yield chunk
