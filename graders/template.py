"""Parse and render templates such as `{{item.x}}` and `{{sample.output_text}}`. Templates run no code.

    template  = text with any number of "{{" reference "}}"
    reference = ("item" | "sample") ("." key | "[" index "]")*      spaces allowed around it

A string is inserted as it is, everything else as compact JSON: `true`, not `True`. There are no filters,
no expressions, and no escape for a literal "{{".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from .types import ErrorKind, Item, Sample  # relative, because the client ships this file in its own package

Path = tuple[str | int, ...]
"""Steps below the namespace: `item.tags[0]` has the path `("tags", 0)`."""

# Bounds the cost of copying, comparing and sending a row, which may have 4 MB.
MAX_RENDERED = 2_000_000
# Parsing takes microseconds for each reference, and longer for a long path.
MAX_REFERENCES = 1_000  # of one template
MAX_REFERENCE = 1_000  # characters between the braces
# Characters of a template whose parsed form is cached: the parsed form takes ten times the memory of the text.
MAX_KEPT = 4_000

_NAMESPACE = re.compile(r"\s*(\w*)")
_STEP = re.compile(r"\.(?P<key>[\w-]+)|\[(?P<index>[0-9]{1,9})\]")
_SAMPLE_FIELDS = tuple(Sample("").as_namespace())
# `default=dict`: a row may be any Mapping, and the encoder knows only dict.
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=dict).encode


class TemplateSyntaxError(ValueError):
    """The template is invalid. `position` is the 0-based offset of the error."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message, position)
        self.message, self.position = message, position

    def __str__(self) -> str:
        return f"{self.message} (at position {self.position})"


class RenderError(Exception):
    """The sample or row lacks a referenced value. `kind` is the error of the grade."""

    kind: ClassVar[ErrorKind]


class MissingPath(RenderError):
    """There is no value at `path`, in template syntax: `item.tags[0]`."""

    kind = ErrorKind.invalid_variable_error

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path} is missing"


class SampleNotJson(RenderError):
    """The template reads `sample.output_json`, and the output was not JSON."""

    kind = ErrorKind.sample_parse_error

    def __str__(self) -> str:
        return "sample.output_json is empty: the output is not a JSON object"


class RenderedTooLarge(RenderError):
    """The rendered text is too large."""

    kind = ErrorKind.other_error

    def __str__(self) -> str:
        return f"the rendered template has more than {MAX_RENDERED} characters"


@dataclass(frozen=True)
class Reference:
    """One `{{...}}`, split into its namespace and the path below it."""

    namespace: str
    path: Path

    def text(self, sample: Sample, item: Item) -> str:
        value = resolve(item, self.path) if self.namespace == "item" else _resolve_sample(sample, self.path)
        return value if isinstance(value, str) else _to_json(value)


@dataclass(frozen=True)
class Template:
    """A parsed template: literal text and references, in order."""

    parts: tuple[str | Reference, ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Parse a template. Raises TemplateSyntaxError for bad syntax and for fields that no sample has."""
        return parse_and_keep(text) if len(text) <= MAX_KEPT else _parse(text)

    @property
    def item_paths(self) -> tuple[Path, ...]:
        """Return the distinct paths that this template reads from the row, in order of first use."""
        found = (p.path for p in self.parts if isinstance(p, Reference) and p.namespace == "item")
        return tuple(dict.fromkeys(found))

    def render(self, sample: Sample, item: Item) -> str:
        """Render the template.

        Raises:
            MissingPath: The sample or row lacks a referenced value.
            SampleNotJson: The sample has no JSON.
            RenderedTooLarge: The rendered text has more than MAX_RENDERED characters.
        """
        texts: list[str] = []
        room = MAX_RENDERED
        encoded: dict[Reference, str] = {}  # encode repeated references once
        for part in self.parts:
            if isinstance(part, Reference):
                text = encoded[part] if part in encoded else encoded.setdefault(part, part.text(sample, item))
            else:
                text = part
            room -= len(text)
            if room < 0:
                raise RenderedTooLarge
            texts.append(text)
        return "".join(texts)


def resolve(namespace_value: Any, path: Path, namespace: str = "item") -> Any:
    """Return the value at `path`, which may be null. Raises MissingPath if there is none."""
    value = namespace_value
    for step in path:
        if isinstance(step, str):
            present = isinstance(value, Mapping) and step in value
        else:
            present = isinstance(value, (list, tuple)) and step < len(value)
        if not present:
            raise MissingPath(dotted(namespace, path))
        value = value[step]
    return value


def dotted(namespace: str, path: Path) -> str:
    """Format a path in template syntax: `item.tags[0]`."""
    return namespace + "".join(f".{step}" if isinstance(step, str) else f"[{step}]" for step in path)


def quoted(text: str, limit: int = 120) -> str:
    """Format a text for a reason: quoted, on one line, truncated."""
    return repr(text) if len(text) <= limit else f"{text[:limit]!r}..."


def unknown_choice(chosen: str, graders: Iterable[str]) -> str:
    """Explain why a row cannot be graded that chooses none of these graders."""
    return f"the row chooses the grader {quoted(chosen)}, which is none of {', '.join(map(repr, graders))}"


def _resolve_sample(sample: Sample, path: Path) -> Any:
    # Fast path: most templates read only the text or the JSON, which do not need the whole namespace.
    match path:
        case ("output_text", *rest):
            return resolve(sample.output_text, path, "sample") if rest else sample.output_text
        case ("output_json", *rest):
            if sample.output_json is None:
                raise SampleNotJson
            return (
                resolve({"output_json": sample.output_json}, path, "sample") if rest else sample.output_json
            )
        case _:
            return resolve(sample.as_namespace(), path, "sample")


@lru_cache(maxsize=256)  # the dataset check parses the same few templates for each row
def parse_and_keep(text: str) -> Template:
    return _parse(text)


def _parse(text: str) -> Template:
    if text.count("{{") > MAX_REFERENCES:
        raise TemplateSyntaxError(f"a template may have at most {MAX_REFERENCES} references", 0)
    parts: list[str | Reference] = []
    at = 0
    while (start := text.find("{{", at)) >= 0:
        end = text.find("}}", start)
        if end < 0:
            raise TemplateSyntaxError("'{{' is never closed", start)
        if end - start > MAX_REFERENCE:
            raise TemplateSyntaxError(f"a reference may have at most {MAX_REFERENCE} characters", start)
        parts += [text[at:start], _reference(text, start + 2, end)]
        at = end + 2
    parts.append(text[at:])
    return Template(tuple(part for part in parts if part != ""))


def _reference(text: str, start: int, end: int) -> Reference:
    head = _NAMESPACE.match(text, start, end)
    assert head is not None  # the pattern matches the empty string
    namespace, at = head[1], head.end()
    if namespace not in ("item", "sample"):
        shown = f"unknown namespace {quoted(namespace)}" if namespace else "no name"
        raise TemplateSyntaxError(f"{shown} in '{{{{...}}}}', expected 'item' or 'sample'", head.start(1))
    path: list[str | int] = []
    while step := _STEP.match(text, at, end):
        path.append(step["key"] if step["key"] is not None else int(step["index"]))
        at = step.end()
    if trailing := text[at:end].lstrip():
        position = end - len(trailing)
        raise TemplateSyntaxError(f"expected '.key', '[0]' or '}}}}', got {quoted(trailing, 20)}", position)
    if namespace == "sample" and path and path[0] not in _SAMPLE_FIELDS:
        known = ", ".join(_SAMPLE_FIELDS)
        raise TemplateSyntaxError(f"sample has no {str(path[0])!r}, only {known}", head.start(1))
    return Reference(namespace, tuple(path))
