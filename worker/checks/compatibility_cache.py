"""Keep the verdict of the probe, so that a model is tried once per machine and version and not once per job."""

import hashlib
import json
import time
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import torch
from pydantic import TypeAdapter

from core import fingerprint
from core.jobs.hyperparameter_groups import LoraTargets
from core.model_checks import ModelCheck, ModelChecks, installed_versions, source_of
from core.model_templates import reasons
from core.registry import BaseModelEntry
from core.template_facts import TemplateFacts
from worker.checks import compatibility
from worker.checks.compatibility import ForwardVerdict
from worker.model.policy import Policy, configured_stops, read_tokenizer
from worker.model.template import facts_of, own_stop_ids
from worker.refusals import UnsupportedModel

WORKER = Path(__file__).parents[1]
# The code that the probe compares, and that of the probe.
COMPARED = ("model/*.py", "checks/*.py", "sampling/transformers.py")

_VERDICT = TypeAdapter(ForwardVerdict)


def probed(
    policy: Policy,
    entry: BaseModelEntry,
    model_cache: Path,
    *,
    sampled: bool,
    targets: LoraTargets = "all-linear",
    repeat: bool = False,
) -> ForwardVerdict:
    """The stored verdict of this model, else that of `compatibility.probe`, which is stored. The policy uses its route.

    A verdict is found and stored by the files as they were before the model was loaded, and only while they still are.

    Args:
        repeat: probe even if there is a verdict.

    Raises:
        UnsupportedModel, NotEnoughMemory: as `compatibility.probe`. A refusal is not stored.
    """
    checks, source, key = ModelChecks(model_cache), source_of(entry), key_of(policy, entry, targets)
    verdict = None if repeat else _found(checks.find(source, key) if key else None, policy, sampled)
    if verdict is not None:
        policy.use(verdict.route)
        return verdict
    try:
        verdict = replace(compatibility.probe(policy, sampled=sampled), checked_at=int(time.time()))
    except UnsupportedModel:
        if key:
            checks.forget(source, key)
        raise
    if key and key == key_of(policy, entry, targets):
        checks.keep(
            ModelCheck(
                key=key,
                source=source,
                dtype=entry.dtype,
                context=entry.context,
                versions=installed_versions(),
                reasons=reasons(entry, model_cache),
                template=own_facts(policy, entry),
                checked_at=verdict.checked_at,
                forward=verdict.route.forward,
                decode=verdict.route.decode if sampled else None,
                largest_difference=verdict.largest,
                **policy.coverage.as_data(),
                verdict=asdict(verdict),
            )
        )
    return verdict


def own_facts(policy: Policy, entry: BaseModelEntry) -> TemplateFacts | None:
    """The facts of the model's own chat template, which is not always that of the policy's job."""
    tokenizer = read_tokenizer(entry, policy.source)
    return facts_of(tokenizer, own_stop_ids(configured_stops(policy.causal), tokenizer))


def store_coverage(policy: Policy, entry: BaseModelEntry, model_cache: Path, targets: LoraTargets) -> None:
    """Correct the stored coverage when the sampler has said which layers it cannot adapt."""
    checks, source, key = ModelChecks(model_cache), source_of(entry), key_of(policy, entry, targets)
    stored = checks.find(source, key) if key else None
    if stored is not None:
        checks.keep(ModelCheck.model_validate(stored.model_dump() | policy.coverage.as_data()))


def _found(stored: ModelCheck | None, policy: Policy, sampled: bool) -> ForwardVerdict | None:
    """The stored verdict, if it says enough and its numbers still allow it."""
    if stored is None or (sampled and stored.decode is None):
        return None
    verdict = replace(_VERDICT.validate_python(stored.verdict.model_dump()), checked_at=stored.checked_at)
    is_allowed = not compatibility.problem_of(verdict.gaps, policy.causal.config)
    return verdict if is_allowed and _fits(verdict, sampled) else None


def _fits(verdict: ForwardVerdict, sampled: bool) -> bool:
    return not sampled or verdict.route.decode in compatibility.DECODES[verdict.route.forward]


def key_of(policy: Policy, entry: BaseModelEntry, targets: LoraTargets) -> str:
    """A hash of everything that the verdict depends on.

    Empty if the model's revision is unknown, or its files are no longer those from before it was loaded.
    """
    if isinstance(policy.source, Path):
        revision = policy.files if fingerprint.of_folder(policy.source) == policy.files else ""
    else:
        revision = getattr(policy.causal.config, "_commit_hash", None) or ""
    if not revision:
        return ""
    device = torch.cuda.get_device_name(policy.device) if policy.device.type == "cuda" else policy.device.type
    parts = [
        str(policy.source),
        revision,
        entry.dtype,
        entry.context,
        targets,
        device,
        installed_versions(),
        code_version(),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@cache
def code_version() -> str:
    """A hash of the code that computes a model."""
    files = [file for pattern in COMPARED for file in sorted(WORKER.glob(pattern))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
