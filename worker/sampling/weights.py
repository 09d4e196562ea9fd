"""The current weights of a policy, and their way to the engines that sample from it.

The trainer does not publish weights. Each `sample` reads the policy's and sends them to engines that have others, so
answers are always sampled from the current policy.
"""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from safetensors.torch import save
from torch import Tensor

from core.chat import Adapter
from core.storage.manifests import MANIFEST
from worker.attempt import Attempt
from worker.engine.client import EngineClient
from worker.engine.launch import LOADING_SECONDS
from worker.engine.names import NOTHING
from worker.engine.protocol import ADAPTER, WEIGHTS, AdapterBytes, AdapterRequest, WeightsRequest
from worker.model.full import FullPolicy
from worker.model.policy import Policy
from worker.sampling.published import PublishedWeights

Tensors = Mapping[str, Tensor]
_DIGEST = 64  # characters of a SHA-256


class Weights(Protocol):
    """The weights that engines sample from: those of the policy when `publish` was last called."""

    @property
    def version(self) -> int:
        """Of what is published."""
        return 0

    def current(self, policy: Policy) -> Tensors:
        """The adapter of the policy as it is at this call."""
        return policy.adapter()

    @abstractmethod
    def publish(self, policy: Policy, tensors: Tensors) -> None:
        """Have `deliver` send what `current` has returned, unless that is what it sends. Blocks."""

    @abstractmethod
    async def deliver(self, engine: EngineClient) -> str:
        """Have the engine sample from what is published. Returns its name in requests."""

    def close(self) -> None:
        """Remove what is published."""
        return


class SentAdapter(Weights):
    """An adapter for a job's own engines: in requests, without a file."""

    def __init__(self) -> None:
        self._tensors: Tensors = {}
        self._published: AdapterRequest | None = None

    @property
    def version(self) -> int:
        return 0 if self._published is None else self._published.version

    def publish(self, policy: Policy, tensors: Tensors) -> None:
        if not same(self._tensors, tensors):
            self.replace(policy, tensors)

    def replace(self, policy: Policy, tensors: Tensors) -> None:
        """Publish it as a new version."""
        version = self.version + 1
        adapter = adapter_of(policy, tensors, self.namespace(version))
        self._tensors, self._published = tensors, AdapterRequest(version, adapter)

    def namespace(self, version: int) -> str:
        """The prefix cache's key of the adapter of this version."""
        return f"mem://policy/v{version}"

    async def deliver(self, engine: EngineClient) -> str:
        request = self._published
        assert request is not None, "it was published"
        if engine.version != request.version:
            await engine.put(ADAPTER, request, engine.silence)
            engine.version = request.version
        return ""


class WeightFiles(Weights):
    """All weights of a policy, for a job's own engines.

    The weights are written once after each change, before the first answer, and never while the trainer computes with
    answers: an engine that is restarted meanwhile loads the same files.
    """

    def __init__(self, policy: FullPolicy, files: PublishedWeights) -> None:
        self._policy, self._files = policy, files
        self._expected = 0

    @property
    def version(self) -> int:
        return self._files.version

    def current(self, policy: Policy) -> Tensors:
        """Unlike an adapter, the weights are not copied at this call: they must not change before the first answer."""
        self._expected = self._policy.weights_version
        return {}

    def publish(self, policy: Policy, tensors: Tensors) -> None:
        assert self._policy.weights_version == self._expected, (
            "the weights have changed since `answers` was called"
        )
        self._files.publish()

    async def deliver(self, engine: EngineClient) -> str:
        if engine.version != self.version:
            request = WeightsRequest(self.version, self._files.paths)
            await engine.put(WEIGHTS, request, LOADING_SECONDS)
            engine.version = request.version
        return ""

    def close(self) -> None:
        self._files.close()


class StoredAdapter(Weights):
    """An adapter for a fleet: in the blob store, under a name with the hash of its content."""

    def __init__(self, store: "AdapterStore") -> None:
        self._store = store
        self._tensors: Tensors = {}
        self._stored: Adapter | None = None
        self._name = NOTHING

    def publish(self, policy: Policy, tensors: Tensors) -> None:
        """Store nothing for an adapter that has not learned: it adds 0."""
        if is_fresh(tensors):
            self._name = NOTHING
            return
        if self._stored is None or not same(self._tensors, tensors):
            self._stored, self._tensors = self._store.put(adapter_of(policy, tensors, "")), tensors
        self._name = name_of(self._stored)

    async def deliver(self, engine: EngineClient) -> str:
        return self._name


def name_of(adapter: Adapter | None) -> str:
    """The name by which a member knows an adapter; None: the base model. No other adapter ever has it."""
    return NOTHING if adapter is None else f"{adapter.manifest_sha256}/{adapter.prefix}"


def adapter_named(name: str) -> Adapter | None:
    """Invert `name_of`. None: it is not the name of an adapter."""
    digest, _, prefix = name.partition("/")
    if len(digest) != _DIGEST or not prefix.startswith("projects/"):
        return None
    return Adapter(prefix=prefix, manifest_sha256=digest)


class AdapterStore(Protocol):
    """Stores the adapter of a job for the fleet."""

    def put(self, adapter: AdapterBytes) -> Adapter:
        """Store it in place of the one before. Blocks."""
        ...


class BlobAdapters:
    """Implements AdapterStore in the attempt's folder of the blob store. The sweep of orphans deletes the last one."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._last = ""

    def put(self, adapter: AdapterBytes) -> Adapter:
        files = {
            "adapter_config.json": json.dumps(peft_config(adapter)).encode(),
            "adapter_model.safetensors": adapter.tensors,
        }
        listed = [
            {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in files.items()
        ]
        manifest = json.dumps({"format": 1, "files": listed}).encode()
        digest = hashlib.sha256(manifest).hexdigest()
        prefix = f"{self._attempt.prefix}/sampling/{digest}"
        for name, content in (files | {MANIFEST: manifest}).items():  # the manifest last
            self._attempt.put(f"{prefix}/{name}", content)
        last, self._last = self._last, prefix
        if last not in ("", prefix):
            self._attempt.blobs.discard_prefix(f"{last}/")
        return Adapter(prefix=prefix, manifest_sha256=digest)


def peft_config(adapter: AdapterBytes) -> dict[str, Any]:
    """The fields of PEFT's adapter_config.json that vLLM reads."""
    return {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": list(adapter.modules),
        "rank_pattern": adapter.ranks,
        "bias": "none",
    }


def adapter_of(policy: Policy, tensors: Tensors, namespace: str) -> AdapterBytes:
    """The adapter without the layers that vLLM leaves out: it ignores some of these, and fails at others."""
    config = policy.model.peft_config["default"]
    left_out = set(policy.left_out)
    applied = {
        name: tensor for name, tensor in tensors.items() if name.rpartition(".lora_")[0] not in left_out
    }
    return AdapterBytes(
        namespace=namespace,
        tensors=save(applied),
        rank=config.r,
        alpha=config.lora_alpha,
        modules=tuple(sorted(config.target_modules)),
        ranks=policy.ranks_in_file,
    )


def leave_out(policy: Policy, tensors: Sequence[str], on_left_out: Callable[[Sequence[str]], None]) -> None:
    """Do not train the layers of these adapter tensors, and report them unless the policy knows."""
    modules = sorted({name.rpartition(".lora_")[0] for name in tensors})
    if modules and modules != policy.left_out:
        policy.leave_out(modules)
        on_left_out(modules)


def is_fresh(tensors: Tensors) -> bool:
    """Whether an adapter adds nothing, as before the first update: all of its B are zero."""
    return not any(tensor.any() for name, tensor in tensors.items() if ".lora_B." in name)


def same(have: Tensors, want: Tensors) -> bool:
    return have.keys() == want.keys() and all(
        torch.equal(have[name], tensor) for name, tensor in want.items()
    )
