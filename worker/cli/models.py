"""`regraft-server models`: try a model as a job would load it, and write its entry of the registry."""

import argparse
import json
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from core.jobs.hyperparameter_groups import Lora
from core.registry import DEFAULT_FILE, BaseModelEntry, Device, InvalidRegistry, Registry
from core.settings import Settings
from core.template_facts import TemplateFacts
from core.units import GIB
from worker import compile_caches
from worker.cli.configuration import read_settings
from worker.cli.parser import UsageError
from worker.device import GpuUnusable, select_device
from worker.model import sizing
from worker.model.sizing import Machine, Shape, Workload
from worker.refusals import Refusal

ADAPTER = Lora()  # the one that is tried: that of a job by default
DEFAULT_CONTEXT = 4096
CONTEXTS = (2048, 8192, 32_768)


@dataclass(frozen=True)
class ModelReport:
    """What trying a model showed."""

    name: str
    architecture: str
    context: int
    forward: str
    decode: str
    serving: str
    largest_difference: float  # in nats, between our log-probabilities and those of transformers
    adapted_modules: int
    adapted_share: float  # of the parameters
    adapted_by_kind: dict[str, Any]
    parameters: int
    weights: str  # their format and memory, and what vLLM has in common with training
    memory: dict[int, str]  # by tokens of prompt and answer together: what a job needs
    instead: str  # why the forward is not the quickest one
    template: TemplateFacts | None  # None: it has no chat template

    @property
    def kinds(self) -> str:
        return ", ".join(
            f"{kind} {one['modules']} layers, {one['share']:.0%}"
            for kind, one in self.adapted_by_kind.items()
        )

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {self.architecture}, {self.parameters / 1e6:,.0f} million parameters",
            f"  weights        {self.weights}",
            f"  forward        {self.forward}" + (f" ({self.instead})" if self.instead else ""),
            f"  decode         {self.decode} (the transformers sampler)",
            f"  serving        {self.serving}",
            f"  difference     {self.largest_difference:.1g} nats at most from transformers",
            f"  adapter        {self.adapted_modules} linear layers, {self.adapted_share:.0%} of the parameters"
            f" ({self.kinds})",
        ]
        lines.append(f"  template       {self.template or 'none: jobs need chat_template'}")
        if self.template is not None:
            lines += [f"  warning        {warning}" for warning in self.template.warnings]
        lines += [f"  memory         {tokens:>6} tokens: {needed}" for tokens, needed in self.memory.items()]
        return "\n".join(lines)


def main(arguments: argparse.Namespace) -> int:
    """Raises UsageError for a model that does not exist or is not supported."""
    settings = read_settings()
    compile_caches.place(settings.compile_cache, os.environ)
    try:
        return check(arguments, settings) if arguments.action == "check" else add(arguments, settings)
    except GpuUnusable as cause:
        raise UsageError(str(cause)) from cause


def check(arguments: argparse.Namespace, settings: Settings) -> int:
    try:
        registry = Registry.load(settings.models_file)
    except InvalidRegistry as invalid:
        raise UsageError(str(invalid)) from invalid
    names = arguments.names or list(registry.models)
    if unknown := [name for name in names if name not in registry.models]:
        raise UsageError(f"no model {unknown[0]!r} in {settings.models_file or DEFAULT_FILE}")
    refused = 0
    for name in names:
        try:
            report = inspect(name, registry.models[name], settings)
        except Refusal as refusal:
            refused += 1
            print(f"{name}: refused. {refusal}")
            continue
        print(json.dumps(report.__dict__, default=TemplateFacts.model_dump) if arguments.json else report)
    return 1 if refused else 0


def add(arguments: argparse.Namespace, settings: Settings) -> int:
    """Try a model, then append its entry to the models file."""
    file: Path | None = settings.models_file
    if file is None:
        raise UsageError("REGRAFT_MODELS_FILE is not set: set it to the file that gets the entry")
    registry = Registry.load(file) if file.exists() else Registry.load(None)
    name: str = arguments.name or arguments.source.rsplit("/", 1)[-1]
    if file.exists() and (name in registry.models or name in registry.aliases):
        raise UsageError(f"{file} has {name!r} already: choose another --name")
    is_path = Path(arguments.source).exists()
    entry = BaseModelEntry(
        path=Path(arguments.source).resolve() if is_path else None,
        hub=None if is_path else arguments.source,
        dtype=arguments.dtype,
        context=arguments.context or DEFAULT_CONTEXT,
    )
    try:
        entry = within_limit(entry, settings, is_explicit=arguments.context is not None)
        report = inspect(name, entry, settings)
    except Refusal as refusal:
        raise UsageError(f"not added. {refusal}") from refusal
    print(report)
    text = file.read_text() if file.exists() else ""
    fields = tomllib.loads(text)
    # A file of aliases has the included models, which a first entry would otherwise replace.
    kept = registry.models if "aliases" in fields and "models" not in fields else {}
    addition = "".join(as_toml(*one) for one in [*kept.items(), (name, entry)])
    tomllib.loads(text + addition)
    file.write_text(text + addition)
    print(f"added to {file}")
    return 0


def within_limit(entry: BaseModelEntry, settings: Settings, *, is_explicit: bool) -> BaseModelEntry:
    """The entry with a context that the model's positions have room for.

    Raises:
        UsageError: the context is above the model's limit, and was `given`.
        Refusal: the model's config cannot be read.
    """
    from worker.model.policy import read_config, source_of

    text = read_config(source_of(entry, settings.model_cache)).get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or entry.context <= limit:
        return entry
    if is_explicit:
        raise UsageError(
            f"not added. The model has {limit} positions (max_position_embeddings): lower --context"
        )
    return entry.model_copy(update={"context": limit})


def served_by(config: Any, context: int) -> str:
    """Which engine serves the model; vLLM is not tried."""
    from worker.model.architecture import refuse_beyond_full_attention

    try:
        refuse_beyond_full_attention(config, context)
    except Refusal as refusal:
        return f"by vLLM only. {refusal}"
    return "by regraft's own engine, or by vLLM"


def as_toml(name: str, entry: BaseModelEntry) -> str:
    """The entry as a table of the models file."""
    key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)
    if entry.package:
        source = f"package = {json.dumps(entry.package)}\nfile = {json.dumps(entry.file)}"
    else:
        source = f"path = {json.dumps(str(entry.path))}" if entry.path else f"hub = {json.dumps(entry.hub)}"
    return f'\n[models.{key}]\n{source}\ndtype = "{entry.dtype}"\ncontext = {entry.context}\n'


def inspect(name: str, entry: BaseModelEntry, settings: Settings) -> ModelReport:
    """Load the model and try it as a job does.

    Raises:
        Refusal: it is not supported, damaged, too large for this machine, or cannot be downloaded.
    """
    from worker.checks import compatibility, compatibility_cache
    from worker.model.architecture import architecture
    from worker.model.memory import shape_of
    from worker.model.policy import DTYPES, Policy, load_base, read_config, source_of

    device = select_device(settings)
    config = read_config(source_of(entry, settings.model_cache))
    compatibility.refuse_by_config(config, entry.context)
    base = load_base(name, entry, settings.model_cache, device)
    policy = Policy(base, rank=ADAPTER.rank, alpha=ADAPTER.alpha, seed=0)
    verdict = compatibility_cache.probed(policy, entry, settings.model_cache, sampled=True, repeat=True)
    shape = shape_of(config, DTYPES[entry.dtype])
    return ModelReport(
        name=name,
        architecture=architecture(config),
        context=entry.context,
        forward=verdict.route.forward,
        decode=verdict.route.decode,
        serving=served_by(config, entry.context),
        largest_difference=verdict.largest,
        **policy.coverage.as_data(),
        parameters=shape.parameters,
        weights=weights_of(config, shape, entry.dtype, device),
        memory={
            tokens: needed(shape, tokens, device)
            for tokens in sorted({*(t for t in CONTEXTS if t < entry.context), entry.context})
        },
        instead=verdict.instead,
        template=compatibility_cache.own_facts(policy, entry),
    )


def weights_of(config: Any, shape: Shape, dtype: str, device: Device) -> str:
    """The format of the weights, their memory, and for quantized ones how close vLLM is to them, or why it is not."""
    from worker.model import quantized

    size = f"{shape.weight_bytes / GIB:.2g} GiB"
    name = quantized.format_of(config)
    if not name:
        return f"{dtype}, {size}"
    kept = "packed" if shape.packed.parameters else f"converted to {dtype}"
    missing = quantized.no_kernel(config, dtype, device)
    vllm = (
        f"vLLM cannot sample it: it has no kernel for {missing}" if missing else quantized.agreement(config)
    )
    return f"{name}, {kept}, {size}; {vllm}"


def needed(shape: Shape, tokens: int, device: Device) -> str:
    """The least memory that a job needs: one answer of half the context in flight."""
    sampler: Literal["vllm", "transformers"] = "vllm" if device == "cuda" else "transformers"
    work = Workload(ADAPTER.rank, tokens // 2, tokens - tokens // 2, tokens)
    machine = Machine(device, 1 << 50, sampler)
    found: Any = sizing.estimate(
        shape,
        rank=ADAPTER.rank,
        token_budget=work.longest,
        cache=shape.cache_bytes(work.longest),
        checkpointed=True,
        machine=machine,
    )
    return f"{found.total / GIB:.1f} GiB ({found})"
