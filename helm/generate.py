"""Generate the chart's tables of values, pools and fleets, and the settings in its schema, from other files.

    python helm/generate.py

tests/helm/test_generated.py fails if the generated files are out of date.
"""

import json
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
CHART = ROOT / "helm/regraft"

# Settings of core/settings.py that the chart's templates set. All others can be set in `settings`.
OWN = {
    "compile_cache", "data_dir", "database_url", "broker_url", "blob_url", "s3_endpoint_url", "s3_region",
    "models_file", "graders_file", "hardware_file",
    "inference_url", "inference_key", "inference_previous_key", "host", "port", "gpu_class", "metrics_port", "ranks",
    "nodes", "node_rank", "rendezvous", "adapter_cache_bytes", "inference_kv_cache_gib", "first_key",
    "passport_key",
    "samplers", "samplers_key", "samplers_previous_key", "sampling_gpus", "console_hosts", "claim", "episodes_host",
    "inference_idle_seconds",  # of `up`, which the chart does not run
}  # fmt: skip
# Settings that a pool of the chart may override: only the worker and its runs read them.
OF_POOLS = (
    "drain_seconds", "engines", "hang_seconds", "jobs_per_worker", "lost_machine_seconds", "max_logprob_gap",
    "patience_seconds", "torch_threads",
)  # fmt: skip


def main() -> None:
    for path, content in generated().items():
        path.write_text(content)


def generated() -> dict[Path, str]:
    """Return the expected content of each generated file."""
    schema_file, readme = CHART / "values.schema.json", CHART / "README.md"
    schema = json.loads(schema_file.read_text())
    schema["properties"]["settings"] = settings_schema()
    properties = schema["properties"]
    properties["workers"]["items"]["properties"]["settings"] = settings_schema(OF_POOLS) | {
        "description": "Settings for this pool only, before those of `settings`: "
        + ", ".join(f"`{name}`" for name in OF_POOLS)
    }
    tables = {
        "values": values_table(),
        "workers": items_table("pool", properties["workers"]["items"]),
        "inference": items_table(
            "Deployment of one model", properties["inference"]["properties"]["models"]["items"]
        ),
        "samplers": items_table("fleet", properties["samplers"]["properties"]["fleets"]["items"]),
    }
    text = readme.read_text()
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = before + begin + table + end + rest.split(end)[1]
    return {
        schema_file: json.dumps(schema, indent=2, ensure_ascii=False) + "\n",
        readme: text,
        CHART / "files/settings.json": json.dumps(settings_of_components(), indent=2) + "\n",
    }


def settings_of_components() -> dict[str, list[str]]:
    """The settings that each component reads. Its pods have no others, so a change restarts only their readers."""
    from worker.cli.parser import COMMANDS

    read = {command.name: command.settings for command in COMMANDS}
    names = settings_schema()["properties"]
    return {
        component: [name for name in names if name in read[component]]
        for component in ("api", "worker", "inference", "sampler", "dispatcher")
    }


def settings_schema(names: Collection[str] | None = None) -> dict[str, Any]:
    """Build the schema of `settings` in values.schema.json from the types of core/settings.py.

    Args:
        names: of the settings. None: all that the chart does not make itself.
    """
    from core.settings import Settings

    whole = Settings.model_json_schema()
    wanted = whole["properties"].keys() - OWN if names is None else set(names)
    known = {name: _flat(of, whole) for name, of in whole["properties"].items() if name in wanted}
    return {"type": "object", "additionalProperties": False, "properties": known}


def _flat(schema: Any, root: dict[str, Any]) -> Any:
    """Inline references, drop titles and defaults, and disallow null, because an unset value is absent."""
    if isinstance(schema, list):
        return [_flat(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _flat(root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root)
    if "anyOf" in schema:
        flat = [_flat(one, root) for one in schema["anyOf"] if one != {"type": "null"}]
        given = [one for number, one in enumerate(flat) if one not in flat[:number]]
        return {"anyOf": given} if len(given) > 1 else given[0]
    kept = {key: value for key, value in schema.items() if key not in ("title", "default", "format")}
    if "properties" in kept:  # names there are names, not keywords
        return kept | {"properties": {key: _flat(value, root) for key, value in kept["properties"].items()}}
    return {key: _flat(value, root) for key, value in kept.items()}


def values_table() -> str:
    """Build a table with one row for each comment of values.yaml that starts with `--`, and the default below it."""
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
    """Yield the path and comment of each documented key. Expects comments of one line and two spaces per level."""
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


def items_table(kind: str, schema: dict[str, Any]) -> str:
    rows = [f"| of a {kind} | | |", "|---|---|---|"]
    for name, of in schema["properties"].items():
        needed = "required" if name in schema["required"] else ""
        rows.append(f"| `{name}` | {needed} | {_cell(of['description'])} |")
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
