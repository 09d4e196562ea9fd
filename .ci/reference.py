"""Write docs/reference/, docs/adr/index.md, sdk/openapi.json, sdk/regraft/types.py and literals.py from the code.

    python .ci/reference.py

`make docs` runs it; tests/test_docs_generated.py fails when a committed page is older than the code.
"""

import argparse
import ast
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any, get_args

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / ".ci")]

import client_literals
import client_types
import schemas
import sync_client
from pydantic.fields import FieldInfo
from regraft.cli import parser as client_cli
from regraft.mcp.tools import READ, WRITE, Argument

from api.http.openapi import REFUSALS
from core import errors, hardware, settings, step_metrics
from core.jobs import (
    distillation,
    hyperparameter_groups,
    hyperparameter_places,
    hyperparameters,
    offline_hyperparameters,
)
from core.registry import SamplerName
from worker.cli import parser as server_cli
from worker.model import sizing
from worker.model.forecast import GPUS

# Where metrics are defined. Read and not imported: some of them import torch.
METRIC_MODULES = {
    "API": ["api.http.request_metrics"],
    "database (read by the API)": ["core.service.service_metrics"],
    "disk (API and worker)": ["core.storage.disk"],
    "worker": ["worker.telemetry"],
    "run": ["worker.instruments"],
    "inference": ["worker.serving.serving_metrics"],
}
# What the code completes a metric's name from.
PREFIXES = {"regraft_gpu_": ["regraft_gpu_"], "_": ["regraft_sandbox_", "regraft_run_sandbox_"]}
METRIC_TYPES = {
    "Counter": "counter", "CounterMetricFamily": "counter", "_results": "counter", "Gauge": "gauge",
    "GaugeMetricFamily": "gauge", "Histogram": "histogram",
}  # fmt: skip
# Packages whose source names error codes.
CODE_FOLDERS = ("api", "core", "graders", "worker")

Page = list[str]


def main() -> None:
    for path, text in generated().items():
        path.write_text(text)


def generated() -> dict[Path, str]:
    """What each generated file should hold."""
    document = schemas.document()
    pages = {
        "reference/settings.md": settings_page(),
        "reference/hyperparameters.md": hyperparameters_page(),
        "reference/metrics.md": metrics_page(),
        "reference/step-metrics.md": step_metrics_page(),
        "reference/events.md": events_page(),
        "reference/errors.md": errors_page(),
        "reference/cli.md": cli_page(),
        "reference/tools.md": tools_page(),
        "reference/api.md": api_page(document),
        "reference/chart.md": chart_page(),
        "reference/memory.md": memory_page(),
        "adr/index.md": decisions_page(),
    }
    written = {ROOT / "docs" / name: "\n".join(lines).rstrip() + "\n" for name, lines in pages.items()}
    return (
        written
        | {
            schemas.COMMITTED: schemas.text_of(document) + "\n",
            client_types.GENERATED: client_types.generated(document),
            client_literals.GENERATED: client_literals.generated(document),
        }
        | sync_client.generated()
    )


def head(title: str, *text: str) -> Page:
    return ["<!-- Written by .ci/reference.py; do not edit. -->", "", f"# {title}", "", *text, ""]


def cell(text: str) -> str:
    """Text for a table: one line, without what would end the cell."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


def code(text: str) -> str:
    return f"`{cell(text)}`" if text else ""


# Settings and hyperparameters: a field, its default and the comment at it.


def fields_of(cls: type) -> Iterator[tuple[str, str, str, str]]:
    """(field, type, default, comment) of a class, without those of its bases, as its source has them."""
    source = inspect.getsource(sys.modules[cls.__module__])
    lines = source.splitlines()
    [found] = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == cls.__name__]
    for node in found.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if node.target.id != "model_config":
            yield node.target.id, kind_of(node), default_of(node.value), comment_at(lines, node)


def comment_at(lines: list[str], node: ast.stmt) -> str:
    """The comment lines right above a statement, and the one behind it."""
    above: list[str] = []
    for line in reversed(lines[: node.lineno - 1]):
        if not line.strip().startswith("#"):
            break
        above.insert(0, line.strip().lstrip("# "))
    assert node.end_lineno is not None
    behind = lines[node.end_lineno - 1][node.end_col_offset :].partition("#")[2].strip()
    text = " ".join(filter(None, [*above, behind]))
    return re.sub(r"docs/(howto|explain)/([\w-]+)\.md(#[\w-]+)?", r"[\2](../\1/\2.md\3)", text)


def kind_of(node: ast.AnnAssign) -> str:
    """The type and its bounds."""
    text = ast.unparse(node.annotation)
    bounds = ""
    if isinstance(node.value, ast.Call):
        bounds = _bounds(node.value)
    return f"{_with_bounds(text)} {bounds}".strip().replace("Auto", "'auto'")


def _with_bounds(annotation: str) -> str:
    return re.sub(
        r"Annotated\[(\w+), (Field\(.*?\))\]",
        lambda part: f"{part[1]} {_bounds(ast.parse(part[2], mode='eval').body)}".strip(),
        annotation,
    )


def _bounds(call: ast.expr) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    assert isinstance(call, ast.Call)
    return ", ".join(
        f"{signs[k.arg]} {ast.unparse(k.value)}"
        for k in call.keywords
        if k.arg is not None and k.arg in signs
    )


def default_of(value: ast.expr | None) -> str:
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field":
        given = {k.arg: k.value for k in value.keywords}
        chosen = given.get("default", given.get("default_factory"))
        if chosen is None:
            return ""
        if isinstance(chosen, ast.Lambda):
            return ast.unparse(chosen.body)
        return ast.unparse(chosen)
    return "" if value is None else ast.unparse(value)


def settings_page() -> Page:
    lines = head(
        "Settings",
        "Environment variables of `regraft-server`. The service validates all of them at start-up.",
        "",
        "| variable | type | default | |",
        "|---|---|---|---|",
    )
    lines.pop()
    for name, kind, default, comment in fields_of(settings.Settings):
        lines.append(f"| `REGRAFT_{name.upper()}` | {code(kind)} | {code(default)} | {cell(comment)} |")
    lines += [
        "",
        "## The hardware file",
        "",
        f"{hardware.__doc__}".split("\n\n")[1].strip().replace("\n", " "),
        "",
    ]
    lines += ["```toml", HARDWARE_FILE.strip(), "```"]
    for title, of in HARDWARE.items():
        lines += ["", title, "", "| field | type | default | |", "|---|---|---|---|"]
        for name, kind, default, comment in fields_of(of):
            lines.append(f"| `{name}` | {code(kind)} | {code(default)} | {cell(comment)} |")
    return lines


HARDWARE_FILE = """
price_per_gpu_second = 0.0006
currency = "EUR"

[gpu_classes.h100]
gpu_memory_gib = 78
kv_cache_gib = 24
"""
HARDWARE = {
    "Its fields:": hardware.Hardware,
    "The fields of a table `gpu_classes.NAME`:": hardware.GpuClass,
    "The fields of `sizes`, in a class whose jobs choose their GPUs:": hardware.JobSizes,
}


def hyperparameters_page() -> Page:
    lines = head(
        "Hyperparameters",
        "Fields of `method.reinforcement.hyperparameters`. [Training](../howto/training.md) says when to change them.",
    )
    lines += ["## OpenAI's", "", *_fields_table(hyperparameters.Hyperparameters), ""]
    lines += [
        "## advanced",
        "",
        "Groups of regraft's own fields, all optional. The `type` of a group selects its variant, which has only the "
        "fields that it reads; it is required where the group is given.",
        "",
        "```json",
        '{"advanced": {"loss": {"type": "cispo", "cap": 5.0}, "kl": {"weight": 0.01}, "lora": {"rank": 32}}}',
        "```",
        "",
    ]
    groups = hyperparameter_places.GROUPS
    lines += [
        "These fields are in no group:",
        "",
        *_fields_table(hyperparameters.Advanced, without=groups),
        "",
    ]
    for name, field in hyperparameters.Advanced.model_fields.items():
        if name in groups:
            lines += _group_section(name, field)
    lines += ["## Choices", "", "| type | values |", "|---|---|"]
    for name in ("Scale", "Std", "Normalize", "Supervision", "KlEstimator"):
        values = getattr(hyperparameter_groups, name).__args__
        lines.append(f"| `{name}` | {', '.join(f'`{value}`' for value in values)} |")
    return [
        *lines,
        "",
        *_offline_section(),
        *_reward_model_section(),
        *_distillation_section(),
        *_refused_combinations(),
    ]


# Groups of jobs that learn from a file, which have tables of their own.
OFFLINE_GROUPS = ("optimizer", "lora", "template")


def _offline_section() -> Page:
    """The hyperparameters of supervised and dpo jobs."""
    return [
        "## Supervised and dpo jobs",
        "",
        "Fields of `method.supervised.hyperparameters` and `method.dpo.hyperparameters`, all optional. "
        "[Supervised and preference jobs](../howto/supervised.md) says what they do.",
        "",
        *_fields_table(offline_hyperparameters.DpoHyperparameters),
        "",
        "`beta` is for dpo only.",
        "",
        *(
            "### advanced",
            "",
            *_fields_table(offline_hyperparameters.OfflineAdvanced, without=OFFLINE_GROUPS),
            "",
        ),
        *("### advanced.optimizer", "", *_fields_table(offline_hyperparameters.OfflineOptimizer), ""),
        *("### advanced.lora", "", "As above.", ""),
        *("### advanced.template", "", *_fields_table(hyperparameter_groups.TemplateChoice), ""),
        *(
            "### advanced.loss",
            "",
            "For dpo only.",
            "",
            *_fields_table(offline_hyperparameters.Preference),
            "- `type`: `sigmoid`, `ipo`, `simpo`, `orpo` or `kto`.",
            "",
        ),
    ]


def _reward_model_section() -> Page:
    """The hyperparameters of reward_model jobs."""
    return [
        "## Reward model jobs",
        "",
        "Fields of `method.reward_model.hyperparameters`, all optional: those of supervised jobs, and one more. "
        "[Reward models](../howto/reward-models.md) says what they do.",
        "",
        *(
            "### advanced",
            "",
            *_fields_table(offline_hyperparameters.RewardAdvanced, without=OFFLINE_GROUPS),
            "",
        ),
    ]


def _distillation_section() -> Page:
    """The hyperparameters of distillation jobs."""
    return [
        "## Distillation jobs",
        "",
        "Fields of `method.distillation.hyperparameters`, all optional, and its groups of `advanced`. "
        "[Distillation](../howto/distillation.md) says what they do.",
        "",
        "In the mode `on_policy`:",
        "",
        *_fields_table(distillation.DistillationHyperparameters),
        "",
        *("### advanced.stopping", "", *_fields_table(hyperparameter_groups.AnyStopping), ""),
        *("### advanced.evaluation", "", *_fields_table(hyperparameter_groups.AnyEvaluation), ""),
        "`advanced.importance`, `advanced.optimizer`, `advanced.lora` and `advanced.sampling` are those above. "
        "`group_size` is 4 if it is automatic, and there is no `thinking_budget`.",
        "",
        "In the mode `logits` they are those of supervised jobs, and one more group:",
        "",
        *("### advanced.loss", "", *_fields_table(offline_hyperparameters.SoftTargets), ""),
    ]


def _fields_table(cls: type, without: Sequence[str] = ()) -> Page:
    """The fields of a class and its bases but `type`, `advanced` and `without`, each with the comment nearest to it."""
    rows: dict[str, tuple[str, str, str]] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("core.jobs."):
            for field, kind, default, comment in fields_of(base):
                bounded = _bounded(sys.modules[base.__module__], kind)
                rows[field] = (bounded, default, comment or rows.get(field, ("", "", ""))[2])
    lines = ["| field | type | default | |", "|---|---|---|---|"]
    for field, (kind, default, comment) in rows.items():
        if field not in ("type", "advanced", *without) and not field.startswith("_"):
            lines.append(f"| `{field}` | {code(kind)} | {code(default)} | {cell(comment)} |")
    return lines


def _bounded(module: ModuleType, kind: str) -> str:
    """The type, with the bounds of an alias such as `ClipLow`."""
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == kind:
            alias = ast.unparse(node.value)
            if "AfterValidator" in alias:  # a check, and no bound
                alias = alias.removeprefix("Annotated[").rpartition(", AfterValidator")[0]
            return _with_bounds(alias) if alias.startswith("Annotated[") else kind
    return kind


def _group_section(name: str, field: FieldInfo) -> Page:
    """A group of `advanced`: a table for each of its variants."""
    lines = [f"### advanced.{name}", ""]
    [comment] = [row[3] for row in fields_of(hyperparameters.Advanced) if row[0] == name]
    lines += [comment, ""] if comment else []
    variants = hyperparameter_places.VARIANTS.get(name, {})
    for variant in variants.values() or get_args(field.annotation) or [field.annotation]:
        if variant is NoneType:
            continue
        kind = variant.model_fields["type"].default if variants else None
        text = cell(variant.__doc__ or "")
        default = ", the default" if kind is not None and kind == getattr(field.default, "type", None) else ""
        lines += [f"`{kind}`{default}: {text}" if kind else text, ""]
        table = _fields_table(variant)
        lines += [*table, ""] if len(table) > 2 else []
    return lines


def _refused_combinations() -> Page:
    """Messages of rules that groups do not make impossible."""
    lines = ["## Refused combinations", ""]
    for module in (hyperparameters, hyperparameter_groups):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if (
                isinstance(node, ast.Raise)
                and isinstance(node.exc, ast.Call)
                and ast.unparse(node.exc.func) == "ValueError"
            ):
                lines.append(f"- {said(node.exc.args[0])}")
    return lines


# Memory

# Sizes of published models, written down from their model cards; the rest of each config is in `memory_page`.
QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128}
LLAMA = {"model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8, "head_dim": 128}
SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "tie_word_embeddings",
)
MODELS: dict[str, tuple[Mapping[str, Any], tuple[Any, ...]]] = {
    "Qwen3-0.6B": (QWEN3, (28, 1024, 3072, 16, True)),
    "Qwen3-1.7B": (QWEN3, (28, 2048, 6144, 16, True)),
    "Llama-3.2-3B": (LLAMA, (28, 3072, 8192, 24, True)),
    "Qwen3-4B": (QWEN3, (36, 2560, 9728, 32, True)),
    "Llama-3.1-8B": (LLAMA, (32, 4096, 14_336, 32, False)),
    "Qwen3-8B": (QWEN3, (36, 4096, 12_288, 32, False)),
    "Qwen3-14B": (QWEN3, (40, 5120, 17_408, 40, False)),
    "Qwen3-32B": (QWEN3, (64, 5120, 25_600, 64, False)),
    "Llama-3.3-70B": (LLAMA, (80, 8192, 28_672, 64, False)),
}
CONTEXTS = (2048, 8192, 16_384, 32_768)
SAMPLERS: Mapping[SamplerName, str] = {
    "vllm": "The engine of vLLM has a second copy of the weights.",
    "transformers": "Sampling uses the weights of the trainer.",
}


def memory_page() -> Page:
    lines = head(
        "Memory by size and context",
        "The least memory in GiB that a job needs on one GPU, by tokens of prompt and answer together: bfloat16 "
        "weights, an adapter of rank 16 on all linear layers, a KV cache for one sequence, activations of one "
        "sequence computed twice, and a margin. Computed by the estimate that guards jobs "
        "(`worker/model/sizing.py`); the trainer stayed below its plan on [one H200](../measured/h200.md), and no "
        "checkpoint was downloaded for it. More memory makes a job faster: "
        "[memory planning](../howto/speed.md#memory-planning).",
        "",
        "`regraft-server models check` prints the same for a model of your registry. Models of the same size and shape "
        "need about as much. All experts of a mixture count.",
    )
    for sampler, text in SAMPLERS.items():
        lines += [f"## Sampled with {'vLLM' if sampler == 'vllm' else sampler}", "", text, ""]
        lines += ["| model | " + " | ".join(f"{tokens:,} tokens" for tokens in CONTEXTS) + " |"]
        lines += ["|---" * (1 + len(CONTEXTS)) + "|"]
        for name in MODELS:
            needs = [sizing.least(shape_of(name), tokens, sampler=sampler).total for tokens in CONTEXTS]
            lines.append(f"| {name} | " + " | ".join(f"{need / sizing.GIB:.0f}" for need in needs) + " |")
        lines.append("")
    return lines + packed_bases() + plans()


def shape_of(name: str, quantization: Mapping[str, Any] | None = None) -> sizing.Shape:
    common, sizes = MODELS[name]
    config = {**common, **dict(zip(SIZES, sizes, strict=True)), "quantization_config": quantization}
    shape = sizing.shape_of_config(config, bytes_each=2)
    assert shape is not None
    return shape


# The files that are in use most: groups of 128 in 4 bits, and blocks of 128 x 128 in 8 bits.
PACKED_FORMATS: Mapping[str, Mapping[str, Any] | None] = {
    "bf16": None,
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}
        },
    },
}
PACKED_TOKENS = 8192


def packed_bases() -> list[str]:
    """Memory of bases with packed weights."""
    lines = [
        "## Packed bases",
        "",
        "Bases whose files have [packed weights](../howto/models.md#quantized-models): the memory of the weights in "
        f"GiB, and the least that a job needs with {PACKED_TOKENS:,} tokens. int4: 4 bits in groups of 128, such as "
        "W4A16 of compressed-tensors; fp8: blocks of 128 x 128. Embeddings and head are in bfloat16.",
        "",
        "| model | "
        + " | ".join(f"weights {name}" for name in PACKED_FORMATS)
        + " | "
        + " | ".join(f"vLLM, {name}" for name in PACKED_FORMATS)
        + " | transformers, int4 |",
        "|---" * (2 + 2 * len(PACKED_FORMATS)) + "|",
    ]
    for model in MODELS:
        shapes = [shape_of(model, quantization) for quantization in PACKED_FORMATS.values()]
        weights = [f"{shape.weight_bytes / sizing.GIB:.1f}" for shape in shapes]
        needs = [sizing.least(shape, PACKED_TOKENS, sampler="vllm").total for shape in shapes]
        needs.append(sizing.least(shapes[-1], PACKED_TOKENS, sampler="transformers").total)
        lines.append(
            f"| {model} | " + " | ".join([*weights, *(f"{need / sizing.GIB:.0f}" for need in needs)]) + " |"
        )
    return [*lines, ""]


# GiB that a job finds free on an empty GPU, by its size in GB.
PLANNED_GPUS = {24: 22} | {
    int(name.partition("-")[2]): GPUS[name].memory_gib for name in ("L40S-48", "H100-80", "H200-141")
}
PLANNED = ("Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B")
PLANNED_WORK = sizing.workload(
    rank=16, prompt=512, completion=4096, batch=16, group=16, valid_rows=64, eval_samples=1, limit=32_768
)


def plans() -> list[str]:
    lines = [
        "## Plans",
        "",
        "What a job plans on one empty GPU with vLLM: 16 prompts of up to 512 tokens a step, 16 answers of up to 4,096 "
        "tokens each, an adapter of rank 16. Slack is what no part of the plan uses, at least "
        f"{sizing.SAFETY_SHARE:.0%} of the GPU; the margin, a part of the plan, is for what no formula counts. "
        "Sequences, tokens and context are [vLLM's options](../explain/engines.md#options-of-vllm).",
        "",
        "| model | GPU | cache: whole sequences | at once | tokens of a step | context | micro-batches | activations | "
        "vLLM sleeps | planned GiB | of these margin | slack GiB |",
        "|---" * 12 + "|",
    ]
    return [*lines, *(plan_row(name, gpu) for name in PLANNED for gpu in PLANNED_GPUS), ""]


def plan_row(name: str, gpu: int) -> str:
    shape = shape_of(name)
    free = PLANNED_GPUS[gpu] * sizing.GIB
    machine = sizing.Machine("cuda", free, "vllm", sizing.spared("cuda", free), may_sleep=True)
    try:
        plan = sizing.plan_sharded(name, shape, PLANNED_WORK, machine, gpus=1)
    except sizing.DoesNotFit:
        return f"| {name} | {gpu} GB | does not fit |" + " |" * 9
    assert plan.engine is not None
    total = plan.estimate.total
    cells = [
        f"{plan.cache_bytes // shape.cache_bytes(PLANNED_WORK.longest)}",
        f"{plan.engine.sequences:,}",
        f"{plan.engine.batched_tokens:,}",
        f"{plan.engine.context:,}",
        f"{plan.token_budget:,}",
        "twice" if plan.checkpointed else "once",
        "yes" if plan.sleeps else "no",
        f"{total / sizing.GIB:.1f}",
        f"{plan.estimate.margin / sizing.GIB:.1f}",
        f"{(free - total) / sizing.GIB:.1f}",
    ]
    return f"| {name} | {gpu} GB | " + " | ".join(cells) + " |"


# Metrics


def source_of(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    return Path(spec.origin).read_text()


def step_metrics_page() -> Page:
    lines = head(
        "Step metrics",
        "Each step records these in its event `metrics`, in `GET /v1/regraft/jobs/{id}/metrics` and, where marked, in "
        "the result CSV. A metric that a step did not measure is absent or null; in the CSV it is blank. "
        "[Verdict and metrics](../howto/verdict.md#metrics) says which values are healthy.",
    )
    lines += ["| metric | unit | CSV | |", "|---|---|---|---|"]
    for metric in step_metrics.METRICS:
        inside = f" In the event: `{'.'.join(metric.path)}`." if metric.path[1:] else ""
        csv = "yes" if metric.in_csv else ""
        lines.append(f"| `{metric.name}` | {metric.unit} | {csv} | {cell(metric.description)}{inside} |")
    lines += ["", "## Sections", "", "| section | |", "|---|---|"]
    lines += [f"| `{name}` | {cell(text)} |" for name, text in step_metrics.SECTIONS.items()]
    return lines


def metrics_page() -> Page:
    lines = head(
        "Metrics",
        "Prometheus metrics at `REGRAFT_METRICS_PORT`. [Monitoring](../howto/observability.md) has the alerts.",
    )
    for where, modules in METRIC_MODULES.items():
        rows = [row for module in modules for row in metrics_of(source_of(module))]
        lines += [
            f"## {where[0].upper()}{where[1:]}",
            "",
            "| metric | type | labels | |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| `{n}` | {kind} | {', '.join(f'`{v}`' for v in labels)} | {cell(h)} |"
            for n, kind, labels, h in rows
        ]
        lines.append("")
    return lines


def metrics_of(source: str) -> Iterator[tuple[str, str, list[str], str]]:
    """(name, type, labels, help) of each metric that a module defines."""
    tree = ast.parse(source)
    for function in ast.walk(tree):
        if not isinstance(function, ast.Call) or len(function.args) < 2:
            continue
        called = (
            function.func.attr
            if isinstance(function.func, ast.Attribute)
            else getattr(function.func, "id", "")
        )
        kind, name = METRIC_TYPES.get(called), function.args[0]
        if kind is None:
            continue
        if isinstance(name, ast.Constant) and isinstance(function.args[1], ast.Constant):
            total = "_total" if kind == "counter" else ""
            yield f"{name.value}{total}", kind, labels_of(function, called), str(function.args[1].value)
        elif isinstance(name, ast.JoinedStr):
            literal = "".join(str(part.value) for part in name.values if isinstance(part, ast.Constant))
            for prefix in PREFIXES[literal]:
                for part, text in completions(tree, function):
                    yield f"{prefix}{part}", kind, labels_of(function, called), text


def labels_of(call: ast.Call, called: str) -> list[str]:
    if called == "_results":
        return ["result"]
    given = next((k.value for k in call.keywords if k.arg in ("labels", "labelnames")), None)
    given = given or (call.args[2] if len(call.args) > 2 else None)
    if not isinstance(given, ast.Tuple | ast.List):
        return []
    return [str(one.value) for one in given.elts if isinstance(one, ast.Constant)]


def completions(tree: ast.Module, call: ast.Call) -> Iterator[tuple[str, str]]:
    """The (name, help) pairs over which the function around a call goes."""
    around = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and call in ast.walk(n)][-1]
    for node in ast.walk(around):
        if isinstance(node, ast.Tuple) and len(node.elts) >= 2:
            first, second = node.elts[:2]
            if isinstance(first, ast.Constant) and isinstance(second, ast.Constant):
                yield str(first.value), str(second.value)


# Events

# Where events are written with a message of their own, and where the sentences of warnings and stops are made.
EVENT_FOLDERS = ("core/jobs", "worker/recording", "worker/supervisor", "worker/sampling", "worker")
SENTENCES = {
    "Warnings of the monitors": ("worker/recording/monitors.py", "warn", ("step", "rule", "threshold")),
    "Gaming and overfitting": (
        "worker/recording/gaming.py",
        "warn",
        ("step", "rule", "threshold"),
    ),
    "Early stops": ("worker/recording/stopping.py", "info", ("step",)),
    "Alarms that a job is too small for": ("core/jobs/alarm_sizes.py", "warn", ()),
    "Pauses at an alarm": ("worker/recording/exploits.py", "warn", ()),
}
# Data that an event has from elsewhere, and the file whose variables `data` it is.
SPREAD = {"rollback.data": "worker/recording/rollback.py"}


def events_page() -> Page:
    lines = head(
        "Events",
        "`GET /v1/fine_tuning/jobs/{id}/events` lists a job's events. Each has "
        "`type`, `level` (`info`, `warn` or `error`), `message` and `data`. Messages as the code has them; … stands "
        "for what is filled in.",
    )
    lines += [
        "## Type metrics",
        "",
        "Level `info`, one for each step. Message: `Step 3/10 , train mean reward=0.52`, or of a "
        "distillation job `Step 3/10 , KL to the teacher=0.31`.",
    ]
    lines += ["`data` has the [step metrics](step-metrics.md).", "", "## Type message", ""]
    lines += ["| level | message | keys of `data` |", "|---|---|---|"]
    rows = {
        row for folder in EVENT_FOLDERS for file in (ROOT / folder).glob("*.py") for row in events_of(file)
    }
    lines += [
        f"| {level} | {cell(text)} | {', '.join(f'`{k}`' for k in keys)} |"
        for level, text, keys in sorted(rows)
    ]
    for title, (file, level, common) in SENTENCES.items():
        lines += ["", f"## {title}", "", f"Level `{level}`.", "", "| message | keys of `data` |", "|---|---|"]
        lines += [
            f"| {cell(text)} | {', '.join(f'`{k}`' for k in (*common, *keys))} |"
            for text, keys in sentences_of(ast.parse((ROOT / file).read_text()))
        ]
    return lines


def events_of(file: Path) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(level, message, keys of the data) of each event that a module writes with a message of its own."""
    module = ast.parse(file.read_text())
    for function in ast.walk(module):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for call in ast.walk(function):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute | ast.Name):
                continue
            name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id
            given = {k.arg: k.value for k in call.keywords}
            if ast.unparse(call.func) == "events.append" and len(call.args) > 2:
                level = (
                    ast.literal_eval(given["level"])
                    if isinstance(given.get("level"), ast.Constant)
                    else "info"
                )
                message, data = call.args[2], given.get("data")
            elif (
                # A method of the recorder, or one that was passed as `warn`.
                name in ("inform", "warn")
                and (isinstance(call.func, ast.Name) or "recorder" in ast.unparse(call.func.value))
                and len(call.args) > 1
            ):
                level, message, data = "info" if name == "inform" else "warn", call.args[0], call.args[1]
            else:
                continue
            for text in texts_of([*ast.walk(function), *module.body], message):
                yield level, text, keys_of(data)


def texts_of(scope: list[ast.AST], message: ast.expr) -> Iterator[str]:
    """The texts that a message may be: written there, or assigned to its name in the function or the module."""
    if text := said(message):
        yield text
    elif isinstance(message, ast.Name):
        assigned_to = [
            n for n in scope if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == message.id
        ]
        yield from filter(None, (said(node.value) for node in assigned_to))


def sentences_of(tree: ast.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(sentence, keys of the data) of each `return sentence, {...}`, `return [sentence]`, `Stop(sentence, {...})` and
    `Pause(sentence, {...})`."""
    for node in ast.walk(tree):
        parts: list[ast.expr] = []
        if isinstance(node, ast.Return) and isinstance(node.value, ast.List) and len(node.value.elts) == 1:
            parts = [*node.value.elts, ast.Dict([], [])]
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            parts = node.value.elts
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("Stop", "Pause"):
            parts = node.args
        if len(parts) == 2 and isinstance(parts[1], ast.Dict) and (text := said(parts[0])):
            yield text, keys_of(parts[1])


def keys_of(data: ast.expr | None) -> tuple[str, ...]:
    if not isinstance(data, ast.Dict):
        return ()
    keys: list[str] = []
    for key, value in zip(data.keys, data.values, strict=True):
        if isinstance(key, ast.Constant):
            keys.append(str(key.value))
        elif key is None and (file := SPREAD.get(ast.unparse(value))):
            keys += spread_keys(ast.parse((ROOT / file).read_text()))
    return tuple(keys)


def spread_keys(module: ast.Module) -> Iterator[str]:
    """The keys of the literals that are assigned to `data`."""
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "data":
            yield from keys_of(node.value)


# Error codes


def said(node: ast.expr) -> str:
    """A message as the source has it, with the name of a hyperparameter and … for all else that is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(said, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return said(node.left) + said(node.right)
    if isinstance(node, ast.FormattedValue):
        filled = node.value
        is_path = (
            isinstance(filled, ast.Call)
            and isinstance(filled.func, ast.Attribute)
            and filled.func.attr == "path"
        )
        return said(filled.args[0]) if is_path and isinstance(filled, ast.Call) else "…"
    return ""


def errors_page() -> Page:
    lines = head(
        "Error codes",
        'Every error has the body `{"error": {"message", "type", "param", "code"}}`. A failed job has them in `error`.',
        "[Troubleshooting](../howto/troubleshooting.md) says what to do about the common ones.",
    )
    lines += ["## Status codes", "", "| status | |", "|---|---|"]
    lines += [f"| {status} | {cell(text)} |" for status, text in sorted(REFUSALS.items())]
    lines += ["", "## Errors of the API", "", "| status | `type` | `code` | |", "|---|---|---|---|"]
    for kind in sorted(subclasses(errors.ServiceError), key=lambda one: (one.status_code, one.__name__)):
        own = kind.__dict__.get("__doc__") or ""
        text = own.strip().split("\n\n")[0] or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__).lower()
        lines.append(f"| {kind.status_code} | `{kind.type}` | {code(kind.code or '')} | {cell(text)} |")
    lines += ["", "## All codes", "", "Messages as the code has them; … stands for what is filled in.", ""]
    lines += ["| `code` | in | message |", "|---|---|---|"]
    for name, (places, message) in sorted(codes().items()):
        lines.append(f"| `{name}` | {', '.join(sorted(places))} | {cell(message)} |")
    return lines


def subclasses(kind: type[errors.ServiceError]) -> Iterator[type[errors.ServiceError]]:
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield child
        yield from subclasses(child)


def codes() -> dict[str, tuple[set[str], str]]:
    """By code: the packages that answer with it, and the first message found with it."""
    found: dict[str, tuple[set[str], str]] = {}
    for folder in CODE_FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for name, message in codes_of(ast.parse(file.read_text())):
                places, before = found.setdefault(name, (set(), ""))
                places.add(folder)
                found[name] = (places, before or message)
    return found


def codes_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            given = next((k.value for k in node.keywords if k.arg == "code"), None)
            if called == "UserMistake" and node.args:
                given = node.args[0]
            if isinstance(given, ast.Constant) and isinstance(given.value, str):
                texts = [
                    said(one) for one in [*node.args, *(k.value for k in node.keywords)] if one is not given
                ]
                yield given.value, next((text for text in texts if " " in text), "")
        elif isinstance(node, ast.ClassDef):
            for line in node.body:
                for target, value in assigned(line):
                    if target == "code" and isinstance(value, ast.Constant) and isinstance(value.value, str):
                        yield value.value, (ast.get_docstring(node) or "").split("\n\n")[0]


def assigned(line: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """The names that an assignment gives a value, also `a, b = 1, 2`."""
    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value is not None:
        yield line.target.id, line.value
    if isinstance(line, ast.Assign):
        target, value = line.targets[0], line.value
        if isinstance(target, ast.Name):
            yield target.id, value
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            yield from (
                (t.id, v) for t, v in zip(target.elts, value.elts, strict=True) if isinstance(t, ast.Name)
            )


# Command lines


def cli_page() -> Page:
    lines = head(
        "Command lines",
        "`regraft` ([guide](../howto/cli.md)) and `regraft-server` ([guide](../howto/operations.md)).",
    )
    for built in (client_cli.build(), server_cli.build()):
        lines += [f"## {built.prog}", "", cell(built.description or ""), ""]
        lines += commands(built, built.prog)
    return lines


def tools_page() -> Page:
    lines = head(
        "Tools for coding agents",
        "Tools of `regraft mcp` ([guide](../howto/coding-agents.md)). Arguments in bold are required.",
    )
    for title, tools in (("Without --write", READ), ("With --write", WRITE)):
        lines += [f"## {title}", ""]
        for tool in tools:
            lines += [f"### {tool.name}", "", cell(tool.description), ""]
            if tool.arguments:
                lines += ["| argument | |", "|---|---|", *map(argument_row, tool.arguments.items()), ""]
    return lines


def argument_row(argument: tuple[str, Argument]) -> str:
    name, given = argument
    schema = given.schema
    text = schema["description"]
    if "enum" in schema:
        text += f" One of {', '.join(code(value) for value in schema['enum'])}."
    if "default" in schema:
        text += f" Default: {json.dumps(schema['default'])}."
    return f"| {'**' * given.required}{code(name)}{'**' * given.required} | {cell(text)} |"


def commands(parser: argparse.ArgumentParser, name: str) -> Iterator[str]:
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    options = [
        a for a in parser._actions if a not in groups and a.help != argparse.SUPPRESS and a.dest != "help"
    ]
    if not groups or " " not in name:
        if " " in name:
            yield from (f"### {name}", "", cell(parser.description or ""), "")
        if options:
            yield from ("| option | |", "|---|---|")
            yield from (f"| {code(option(a))} | {cell(described(a))} |" for a in options)
            yield ""
    for group in groups:
        for child, below in group.choices.items():
            yield from commands(below, f"{name} {child}")


def option(action: argparse.Action) -> str:
    value = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    )
    value = " ".join(value) if isinstance(value, tuple) else value
    if not action.option_strings:
        return action.metavar if isinstance(action.metavar, str) else action.dest
    return ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}")


def described(action: argparse.Action) -> str:
    text = action.help or ""
    if action.default not in (None, False, argparse.SUPPRESS, []) and "default" not in text:
        text = f"{text} (default: {action.default})".strip()
    return text % vars(action) if "%(" in text else text


# API operations


def api_page(document: Mapping[str, Any]) -> Page:
    lines = head(
        "API operations",
        "From the OpenAPI document, which a server has at `/openapi.json`. `$URL` is the server and `$KEY` an API key.",
        "Request bodies show the required fields.",
    )
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            lines += operation_lines(document, method, path, operation)
    return lines


def operation_lines(
    document: Mapping[str, Any], method: str, path: str, operation: Mapping[str, Any]
) -> Page:
    lines = [f"## {method.upper()} {path.replace('{', '&#123;').replace('}', '&#125;')}", ""]
    text = operation.get("description") or operation.get("summary") or ""
    lines += [cell(text.split("\n\n")[0]), ""]
    parameters = [p for p in operation.get("parameters", ()) if p["in"] == "query"]
    if parameters:
        lines += ["| query parameter | type | default |", "|---|---|---|"]
        for one in parameters:
            default = json.dumps(one["schema"]["default"]) if "default" in one["schema"] else ""
            lines.append(f"| `{one['name']}` | {code(type_of(one['schema']))} | {code(default)} |")
        lines.append("")
    lines += ["```bash", *example(document, method, path, operation), "```", ""]
    lines += [f"Status codes: {', '.join(operation['responses'])}", ""]
    return lines


def type_of(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "anyOf" in schema:
        return " | ".join(type_of(one) for one in schema["anyOf"] if one.get("type") != "null")
    return str(schema.get("type", schema.get("$ref", "any").rsplit("/", 1)[-1]))


def example(document: Mapping[str, Any], method: str, path: str, operation: Mapping[str, Any]) -> Page:
    """A curl command with placeholders for ids."""
    path = re.sub(r"\{(\w+)(?::\w+)?\}", lambda name: f"${name[1].upper()}", path)
    words = ["curl"]
    if "security" in operation:
        words.append('-H "Authorization: Bearer $KEY"')
    if method != "get":
        words.append(f"-X {method.upper()}")
    content = operation.get("requestBody", {}).get("content", {})
    if "application/json" in content:
        body = sample(document, content["application/json"].get("schema", {}))
        words.append(f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'")
    elif "multipart/form-data" in content:
        fields = resolved(document, content["multipart/form-data"].get("schema", {})).get("properties", {})
        words += [
            f"-F {name}={'@train.jsonl' if name in ('file', 'data') else 'fine-tune'}"
            for name in fields
            if name in ("file", "data", "purpose")
        ]
    return [f'{" ".join(words)} "$URL{path}"']


def resolved(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return schema


def sample(document: Mapping[str, Any], schema: Mapping[str, Any], depth: int = 0) -> Any:
    """A value of the schema's type, with its required fields only."""
    schema = resolved(document, schema)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return sample(document, schema[key][0], depth)
    kind = schema.get("type")
    if kind == "object" or "properties" in schema:
        if depth > 4:
            return {}
        properties = schema.get("properties", {})
        return {
            name: sample(document, properties[name], depth + 1)
            for name in schema.get("required", ())
            if name in properties
        }
    if kind == "array":
        return [sample(document, schema.get("items", {}), depth + 1)] if depth <= 4 else []
    return {"string": "...", "integer": 1, "number": 1.0, "boolean": True}.get(str(kind), {})


# Other pages


def chart_page() -> Page:
    text = (ROOT / "helm/regraft/README.md").read_text()
    text = text.replace("](../../docs/", "](../")
    body = text.partition("\n")[2]
    return [
        *head("Helm chart values"),
        *re.sub(r"\]\((?!\.\./|https?:|#)[^)]*\)", "]", body).strip().splitlines(),
    ]


def decisions_page() -> Page:
    lines = head(
        "Architecture decisions", "One page a decision: the problem, what was chosen, and what it costs."
    )
    for file in sorted((ROOT / "docs/adr").glob("[0-9]*.md")):
        lines.append(f"- [{file.read_text().splitlines()[0].lstrip('# ')}]({file.name})")
    return lines


if __name__ == "__main__":
    main()
