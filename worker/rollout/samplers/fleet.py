"""Sampling with a fleet: processes of `regraft-server sampler` that serve all jobs on one base model.

A member of the fleet (fleet_server.py) is vLLM's own HTTP server. This sampler stores the policy's adapter in the blob
store under a name with the hash of its content, and posts each answer as one request, with its own seed, the tokens of
its prompt and the sampling parameters of a job's own engine (engine.py). So schemas, thoughts and log-probabilities
are the same there, and an answer depends neither on the member nor on other jobs.
"""

import asyncio
import hashlib
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from core.chat import Adapter
from core.storage.manifests import MANIFEST
from worker.attempt import Attempt
from worker.model.policy import Policy
from worker.model.unloaded import UnloadedPolicy
from worker.refusals import first_error
from worker.rollout.samplers import Answer, Sampling, dealing
from worker.rollout.samplers.fleet_members import Fleet, FleetConfig
from worker.rollout.samplers.requests import (
    adapter_of,
    group_of,
    is_fresh,
    leave_out,
    same,
)
from worker.rollout.samplers.steering import rollout_of
from worker.rollout.samplers.wire import AdapterBytes, Finished, Request
from worker.types import Prompt

_DIGEST = 64  # characters of a SHA-256


NOTHING = "regraft-no-adapter"  # a member's name for an adapter that adds 0


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
        "bias": "none",
    }


class FleetSampler:
    """Implements worker.rollout.samplers.Sampler over a Policy, one `sample` at a time."""

    def __init__(
        self,
        policy: Policy,
        config: FleetConfig,
        store: AdapterStore,
        *,
        on_lost: Callable[[str], None] = lambda reason: None,
        on_left_out: Callable[[Policy, Sequence[str]], None] = lambda policy, modules: None,
    ) -> None:
        """Connect to nothing yet.

        Args:
            policy: an UnloadedPolicy samples the base model, until `use` has a loaded one.
            on_left_out: receives a loaded policy, before it learns, and its layers without an adapter.
        """
        self.policy = policy
        self.config = config
        self.store = store
        self.on_lost = on_lost
        self.on_left_out = on_left_out
        self._left_out: Sequence[str] = ()  # adapter tensors that the members ignore
        self._tensors: Mapping[str, Tensor] = {}  # as last stored
        self._stored: Adapter | None = None
        self._lock = threading.Lock()  # a policy may be loaded while answers are sampled

    def use(self, policy: Policy) -> None:
        """Sample from this policy, which has been loaded meanwhile and has not learned yet. In any thread."""
        with self._lock:
            self.policy = policy
            self._leave_out()

    def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
        """Yield the answers.

        Raises:
            NoMember: no member has answered for too long.
            SamplerUnusable: the fleet does not do what the job needs.
        """
        # Read here and not in the iterator: the trainer may be changing the adapter by its first `next`.
        return self._answers(self.policy.adapter(), prompts_P, sampling)

    async def _answers(
        self, tensors: Mapping[str, Tensor], prompts_P: Sequence[Prompt], sampling: Sampling
    ) -> AsyncGenerator[Answer, None]:
        answers: asyncio.Queue[Answer | None] = asyncio.Queue()

        async def work() -> None:
            try:
                await self._sample(tensors, prompts_P, sampling, answers.put)
            except BaseExceptionGroup as several:
                raise first_error(several) from None
            finally:
                await answers.put(None)

        working = asyncio.create_task(work())
        try:
            while (answer := await answers.get()) is not None:
                yield answer
            await working
        finally:
            working.cancel()  # this closes the connections, and the members abort the requests
            await asyncio.wait([working])

    async def _sample(
        self,
        tensors: Mapping[str, Tensor],
        prompts_P: Sequence[Prompt],
        sampling: Sampling,
        put: Callable[[Answer], Awaitable[None]],
    ) -> None:
        async def put_answer(request: Request, finished: Finished) -> None:
            rollout = rollout_of(self.policy, finished.output_ids_T, finished.logprobs_T, sampling)
            await put(Answer(request.prompt, request.member, rollout))

        groups = [group_of(self.policy, *placed, sampling) for placed in enumerate(prompts_P)]
        async with (
            Fleet(self.config, tuple(tensors), self.on_lost) as fleet,
            asyncio.TaskGroup() as watching,
        ):
            watch = watching.create_task(fleet.watch())
            left_out = await fleet.left_out()
            adapter = name_of(await asyncio.to_thread(self._publish, tensors, left_out))
            async with asyncio.TaskGroup() as sampled:
                # The largest first, so that the loads end up even.
                for group in sorted(groups, key=dealing.tokens, reverse=True):
                    sampled.create_task(fleet.sample(group, adapter, put_answer))
            watch.cancel()

    def _publish(self, tensors: Mapping[str, Tensor], left_out: Sequence[str]) -> Adapter | None:
        """Store the adapter. Returns None for one that has not learned: it adds 0, so nothing is stored."""
        with self._lock:
            self._left_out = left_out
            self._leave_out()
        if is_fresh(tensors):
            return None
        if self._stored is None or not same(self._tensors, tensors):
            self._stored = self.store.put(adapter_of(self.policy, tensors, ""))
            self._tensors = tensors
        return self._stored

    def _leave_out(self) -> None:
        if not self._left_out:
            return
        policy, own = self.policy, self.policy.adapter()
        # Without weights it is not known which layers have a gradient, so an UnloadedPolicy may have more.
        tensors = [name for name in self._left_out if name in own]
        is_loaded = not isinstance(policy, UnloadedPolicy)
        leave_out(policy, tensors, partial(self.on_left_out, policy) if is_loaded else lambda modules: None)
