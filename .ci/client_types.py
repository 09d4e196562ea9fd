"""The types of the client library, sdk/regraft/types.py, from sdk/openapi.json. `make docs` writes them.

datamodel-code-generator makes twice the lines of the same document: a Field with a title at each field, a root model
for each bounded string, and names such as Datum for schemas inside of others.
"""

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from schemas import ROOT, Document, name_of, references

GENERATED = ROOT / "sdk/regraft/types.py"
HEAD = '''"""Responses of the server beyond OpenAI's. Unknown keys are kept as attributes.

Written by .ci/client_types.py from the OpenAPI document; do not edit.
"""

from typing import Any, Literal

from openai import BaseModel

'''
# Schemas that the client's methods return. Those that they refer to come with them. A class has the name of its schema
# without "Out", except for these.
RETURNED = (
    "AliasChangeOut AliasOut AttributionOut Comparison CurveOut EstimateOut GoldenCaseOut GraderAuditOut "
    "GraderCheckOut GraderVersionOut JobComparison JobLedger PipelineOut PreviewAnswerOut PreviewOut ProfileOut "
    "PromptOut RegradeOut RegradedOut ResultOut RolloutOut RolloutTokens StepMetrics StoredGraderOut UsageReport "
    "VerdictOut WhatIfOut WorkQueueOut WorkerOut"
).split()
RENAMED = {
    "Comparison": "EvalComparison",
    "Difference": "EvalDifference",
    "ExpectOut": "ScoreRange",
    "GpuUse": "WorkerGpu",
    "ProfileOut": "FileProfile",
    "PromptOut": "PromptHistory",
    "RegradedOut": "RegradedAnswer",
    "ResultOut": "JobResult",
    "ShareEstimate": "Share",
    "StageOut": "PipelineStage",
    "TokenOut": "RolloutToken",
    "WorkQueueOut": "Queue",
}
# Classes with a text, from regraft/texts.py.
TEXTS = {"JobResult": "JobResultText", "ScoreRange": "ScoreRangeText", "Verdict": "VerdictText"}
SCALARS = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
WIDTH = 100


def generated(document: Document) -> str:
    schemas = deepcopy(document["components"]["schemas"])
    for schema in list(schemas.values()):
        schemas |= inner_schemas(schema.get("properties"))
    classes = [class_of(name, schemas[name]) for name in in_order(schemas)]
    texts = f"from regraft.texts import {', '.join(TEXTS.values())}\n"
    return formatted("\n\n".join([HEAD + texts, *classes]))


def inner_schemas(schema: Any) -> dict[str, Any]:
    """Named objects inside of another schema, which leaves references to them."""
    found = {}
    for key, below in list(schema.items() if isinstance(schema, dict) else enumerate(schema or ())):
        if not isinstance(below, dict | list):
            continue
        found |= inner_schemas(below)
        if isinstance(below, dict) and "properties" in below and "title" in below:
            found[below["title"]] = below
            schema[key] = {"$ref": f"#/components/schemas/{below['title']}"}
    return found


def in_order(schemas: Mapping[str, Any]) -> list[str]:
    """The returned schemas, each behind those that it refers to."""
    order: dict[str, None] = {}

    def add(name: str) -> None:
        if name not in order:
            for below in references(schemas[name]):
                add(below)
            order[name] = None

    for name in RETURNED:
        add(name)
    return list(order)


def class_name(schema: str) -> str:
    return RENAMED.get(schema, schema.removesuffix("Out"))


def class_of(name: str, schema: Mapping[str, Any]) -> str:
    name = class_name(name)
    bases = f"{TEXTS[name]}, BaseModel" if name in TEXTS else "BaseModel"
    lines = [f"class {name}({bases}):", *docstring(schema.get("description", "")), ""]
    for field, below in schema["properties"].items():
        lines += [
            f"    {field}: {type_of(below)}{default_of(below)}",
            *docstring(below.get("description", "")),
        ]
    return "\n".join(lines) + "\n"


def type_of(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return class_name(name_of(schema["$ref"]))
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(map(type_of, schema["anyOf"])))
    if "enum" in schema or "const" in schema:
        return f"Literal[{', '.join(map(repr, schema.get('enum') or [schema['const']]))}]"
    match schema.get("type"):
        case "array":
            return f"list[{type_of(schema['items'])}]"
        case "object":
            values = schema.get("additionalProperties")
            return f"dict[str, {type_of(values) if isinstance(values, dict) else 'Any'}]"
        case kind:
            return SCALARS[kind] if kind else "Any"


def default_of(schema: Mapping[str, Any]) -> str:
    # None also where a server does not send the key.
    if {"type": "null"} in schema.get("anyOf", ()):
        return " = None"
    default = schema.get("default")
    return f" = {default!r}" if "default" in schema and not isinstance(default, dict) else ""


def docstring(description: str) -> Iterator[str]:
    text = re.sub(r"\b[Nn]ull\b", "None", " ".join(description.split()))
    if text:
        first, *rest = textwrap.wrap(text, WIDTH, break_on_hyphens=False)
        yield f'    """{first}' + ("" if rest else '"""')
        yield from (f"    {line}" for line in rest)
        if rest:
            yield '    """'


def formatted(code: str) -> str:
    ruff = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(GENERATED), "-"]
    return subprocess.run(ruff, input=code, text=True, capture_output=True, check=True).stdout
