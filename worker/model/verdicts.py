"""Keep the verdict of the probe, so that a model is tried once per machine and version and not once per job."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError

from core.jobs.hyperparameter_groups import LoraTargets
from core.model_checks import ModelCheck, ModelChecks, source_of
from core.registry import BaseModelEntry
from worker.model import support
from worker.model.policy import Policy
from worker.model.support import Verdict
from worker.refusals import UnsupportedModel

WORKER = Path(__file__).parents[1]
# The code that the probe compares, beside this folder.
COMPARED = ("learn/batch.py", "learn/gradient.py", "rollout/samplers/transformers.py")

# Those whose kernels transformers uses wherever they are installed, too.
LIBRARIES = (
    *("torch", "transformers", "peft", "triton"),
    *("flash-linear-attention", "fla-core", "causal-conv1d", "mamba-ssm", "kernels"),
)

_VERDICT = TypeAdapter(Verdict)


def probed(
    policy: Policy,
    entry: BaseModelEntry,
    model_cache: Path,
    *,
    sampled: bool,
    targets: LoraTargets = "all-linear",
    again: bool = False,
) -> Verdict:
    """The stored verdict of this model, else that of `support.probe`, which is stored. The policy uses its route.

    Args:
        again: probe even if there is a verdict.

    Raises:
        UnsupportedModel, NotEnoughMemory: as `support.probe`. A refusal is not stored.
    """
    checks, source, key = ModelChecks(model_cache), source_of(entry), key_of(policy, entry, targets)
    stored = checks.find(source, key) if key and not again else None
    if stored is not None and (stored.decode is not None or not sampled):
        try:
            verdict = replace(_VERDICT.validate_python(stored.verdict), checked_at=stored.checked_at)
        except ValidationError:
            pass  # damaged: it is written again
        else:
            policy.use(verdict.route)
            return verdict
    try:
        verdict = replace(support.probe(policy, sampled=sampled), checked_at=int(time.time()))
    except UnsupportedModel:
        if key:
            checks.forget(source, key)
        raise
    if key:
        checks.keep(
            ModelCheck(
                key=key,
                source=source,
                dtype=entry.dtype,
                context=entry.context,
                checked_at=verdict.checked_at,
                forward=verdict.route.forward,
                decode=verdict.route.decode if sampled else None,
                largest_difference=verdict.largest,
                **policy.coverage.as_data(),
                verdict=asdict(verdict),
            )
        )
    return verdict


def key_of(policy: Policy, entry: BaseModelEntry, targets: LoraTargets) -> str:
    """A hash of everything that the verdict depends on; empty if the model's revision is unknown."""
    if isinstance(policy.source, Path):
        revision: object = files_of(policy.source)
    else:
        revision = getattr(policy.model.get_base_model().config, "_commit_hash", None)
    if not revision:
        return ""
    device = torch.cuda.get_device_name(policy.device) if policy.device.type == "cuda" else policy.device.type
    libraries = {name: _version(name) for name in LIBRARIES}
    parts = [
        str(policy.source),
        revision,
        entry.dtype,
        entry.context,
        targets,
        device,
        libraries,
        code_version(),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def files_of(folder: Path) -> Sequence[tuple[str, int, int]]:
    """Name, size and time of modification (ns) of each file in a folder."""
    found = ((path, path.stat()) for path in sorted(folder.iterdir()) if path.is_file())
    return [(path.name, stat.st_size, stat.st_mtime_ns) for path, stat in found]


@cache
def code_version() -> str:
    """A hash of the code that computes a model."""
    files = [*sorted((WORKER / "model").glob("*.py")), *(WORKER / name for name in COMPARED)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
