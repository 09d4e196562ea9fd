"""Write what follows from other files: the chart's table of values, and which settings its schema knows.

    python helm/generate.py

tests/helm/test_generated.py fails when it is due.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
CHART = ROOT / "helm/regraft"

# What the chart itself says to the service; the rest of core/settings.py is for `settings`.
OWN = {
    "data_dir", "database_url", "broker_url", "blob_url", "s3_endpoint_url", "s3_region", "models_file",
    "graders_file", "inference_url", "inference_key", "host", "port", "gpu_class", "metrics_port", "ranks",
    "nodes", "ranks_port", "ranks_key", "leader", "gpu_classes", "inference_kv_cache_gib", "first_key",
}  # fmt: skip


def main() -> None:
    for path, content in generated().items():
        path.write_text(content)


def generated() -> dict[Path, str]:
    """What each file should hold."""
    schema_file, readme = CHART / "values.schema.json", CHART / "README.md"
    schema = json.loads(schema_file.read_text())
    schema["properties"]["settings"] = settings_schema()
    tables = {"values": values_table(), "workers": workers_table(schema)}
    text = readme.read_text()
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = before + begin + table + end + rest.split(end)[1]
    return {schema_file: json.dumps(schema, indent=2, ensure_ascii=False) + "\n", readme: text}


def settings_schema() -> dict[str, Any]:
    """The part of values.schema.json on `settings`, from the types of core/settings.py."""
    from core.settings import Settings

    whole = Settings.model_json_schema()
    known = {name: _flat(of, whole) for name, of in whole["properties"].items() if name not in OWN}
    return {"type": "object", "additionalProperties": False, "properties": known}


def _flat(schema: Any, whole: dict[str, Any]) -> Any:
    """Without references, titles and defaults; an absent value is one that is not given, so never null."""
    if isinstance(schema, list):
        return [_flat(one, whole) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _flat(whole["$defs"][schema["$ref"].rsplit("/", 1)[1]], whole)
    if "anyOf" in schema:
        given = [one for one in schema["anyOf"] if one != {"type": "null"}]
        return {"anyOf": _flat(given, whole)} if len(given) > 1 else _flat(given[0], whole)
    kept = {key: value for key, value in schema.items() if key not in ("title", "default", "format")}
    if "properties" in kept:  # names there are names, not keywords
        return kept | {"properties": {key: _flat(value, whole) for key, value in kept["properties"].items()}}
    return {key: _flat(value, whole) for key, value in kept.items()}


def values_table() -> str:
    """One row for each comment of values.yaml that begins with `--`, with the default below it."""
    lines = (CHART / "values.yaml").read_text().splitlines()
    values = yaml.safe_load("\n".join(lines))
    rows = ["| value | default | |", "|---|---|---|"]
    for path, comment in documented(lines):
        value: Any = values
        for key in path:
            value = value[key]
        shown = "a pool of one CPU worker" if path == ["workers"] else f"`{json.dumps(value)}`"
        rows.append(f"| `{'.'.join(path)}` | {shown} | {_cell(comment)} |")
    return "\n".join(rows) + "\n"


def documented(lines: list[str]) -> Iterator[tuple[list[str], str]]:
    """Each documented key's path and its comment. Comments are one line long, and levels two spaces wide."""
    path: list[str] = []
    comment = ""
    for line in lines:
        if found := re.match(r"\s*# -- (.*)", line):
            comment = found[1]
        elif found := re.match(r"((?:  )*)([A-Za-z]+):", line):
            path = [*path[: len(found[1]) // 2], found[2]]
            if comment:
                yield list(path), comment
            comment = ""


def workers_table(schema: dict[str, Any]) -> str:
    pool = schema["properties"]["workers"]["items"]
    rows = ["| of a pool | | |", "|---|---|---|"]
    for name, of in pool["properties"].items():
        needed = "required" if name in pool["required"] else ""
        rows.append(f"| `{name}` | {needed} | {_cell(of['description'])} |")
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
