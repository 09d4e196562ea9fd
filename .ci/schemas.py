"""The OpenAPI document and the schemas in it, for the generators of this folder."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

COMMITTED = ROOT / "sdk/openapi.json"

WIDTH = 120

Document = dict[str, Any]


def document() -> Document:
    """The document of the code, as a server has it at /openapi.json."""
    from api.app import DESCRIPTION, all_routes
    from api.http import openapi

    app = openapi.Documented(title="regraft", description=DESCRIPTION)
    app.router.routes.extend(all_routes())
    return app.openapi()


def committed() -> Document:
    """The document in the repository; tests/test_docs_generated.py fails when it is older than the code."""
    document: Document = json.loads(COMMITTED.read_text())
    return document


def text_of(value: Any, depth: int = 0) -> str:
    """JSON with what fits in a line on one: a field is then a line of a diff."""
    flat = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or depth + len(flat) <= WIDTH:
        return flat
    if isinstance(value, dict):
        inner = [f"{json.dumps(key)}: {text_of(below, depth + 1)}" for key, below in value.items()]
    else:
        inner = [text_of(below, depth + 1) for below in value]
    start, end = "{}" if isinstance(value, dict) else "[]"
    body = "".join(f"{' ' * (depth + 1)}{part},\n" for part in inner).removesuffix(",\n")
    return f"{start}\n{body}\n{' ' * depth}{end}"


def reachable(schemas: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """These schemas, and those that they refer to."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += references(schemas[name])
    return found


def references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield name_of(schema["$ref"])
        for below in schema.values():
            yield from references(below)
    elif isinstance(schema, list):
        for below in schema:
            yield from references(below)


def name_of(reference: str) -> str:
    return reference.rpartition("/")[2]
