"""Engines over vLLM: paged attention, and many adapters in one batch, loaded and evicted by vLLM itself.

An adapter is known to vLLM by a name, a number and a path. All three are made from the hash of its manifest and never
used for another one: vLLM keeps weights by number and keys and values by name and path, so what is trained again can
meet neither the old weights nor the old cache.
"""

import asyncio
import itertools
import logging
import os
import tempfile
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import AutoTokenizer, GenerationConfig

from core.registry import BaseModelEntry, Device, Registry
from core.settings import Settings
from worker.model import capacity, memory, sizing
from worker.model.architecture import without_weights
from worker.model.policy import read_config, read_shape, source_of, stop_ids_of
from worker.model.sizing import GIB, Serving, Shape
from worker.rollout.samplers.engine import RANKS, engine_options
from worker.rollout.samplers.steering import UnsupportedTags, grammar_of
from worker.rollout.samplers.wire import EngineConfig
from worker.serve.engine import Ask, Engine, Token
from worker.serve.engines import EngineRefused

log = logging.getLogger(__name__)

ADAPTERS_AT_ONCE = 8  # in one batch, each in a slot of the device's memory
ADAPTERS_IN_MEMORY = 64  # of the machine
EMBEDDED_SEQUENCES = 16  # of the model's whole context, beside jobs on the same GPU


def serving_options(config: EngineConfig) -> dict[str, Any]:
    """vLLM's EngineArgs: the sampler's, with many adapters and without the trainer's restrictions."""
    return engine_options(config) | {
        "max_loras": ADAPTERS_AT_ONCE,
        "max_cpu_loras": ADAPTERS_IN_MEMORY,
        # The model's own log-probabilities, before temperature and the rest: what both engines report.
        "logprobs_mode": "raw_logprobs",
    }


class VllmBuilder:
    """Implements worker.engines.Builder."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.cache = settings.inference_kv_cache_gib
        self.device: Device = "cuda" if torch.cuda.is_available() else "cpu"
        # Right before the first import of vLLM, as in worker/rollout/samplers/engine.py; here vLLM starts its process
        # itself.
        os.environ |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        if settings.torch_threads:
            os.environ["OMP_NUM_THREADS"] = str(settings.torch_threads)

    def bytes_needed(self, entry: BaseModelEntry) -> int:
        shape, need = self.need(entry)
        return need.without_cache + self.least_cache(shape, need)

    def bytes_free(self) -> int:
        return memory.available(self.device)

    def least_cache(self, shape: Shape, need: Serving) -> int:
        """Return the minimum KV cache in bytes: the operator's setting, or the minimum of vLLM.

        Raises:
            Refused: what is set does not hold one sequence of the model's context.
        """
        if self.cache == "auto":
            on_cpu = self.device == "cpu"
            return max(need.least_cache, sizing.CPU_CACHE_BYTES) if on_cpu else need.least_cache
        if self.cache * GIB < need.least_cache:
            raise EngineRefused(
                f"A sequence of the model's whole context needs a KV cache of {need.least_cache / GIB:.2f} GiB, and "
                f"REGRAFT_INFERENCE_KV_CACHE_GIB is {self.cache:g}: the operator must raise or unset it.",
                503,
                code="not_enough_memory",
            )
        return int(self.cache * GIB)

    def cache_bytes(
        self, shape: Shape, need: Serving, context: int, free: int, others: Sequence[BaseModelEntry]
    ) -> int:
        """Return the KV cache in bytes of a model to be loaded, if `free` bytes are left."""
        if self.cache != "auto" or self.device == "cpu":
            return self.least_cache(shape, need)
        known = [
            (entry.context, found) for entry in others if (found := capacity.shape_of(entry)) is not None
        ]
        rest = [self._serving(found, its_context).least for its_context, found in known]
        cache = sizing.serving_cache(shape, need, context=context, free=free, others=rest)
        # `regraft-server up` shares the GPU with jobs, which take what they find free when they start.
        most = EMBEDDED_SEQUENCES * shape.cache_bytes(context)
        return min(cache, most) if self.settings.embedded else cache

    def problems(self, registry: Registry) -> Iterator[str]:
        """Yield a sentence for each model of the registry that does not fit on the GPU of this machine."""
        if self.device != "cuda":
            return
        total = torch.cuda.mem_get_info()[1]
        for name, entry in registry.models.items():
            shape = capacity.shape_of(entry)
            if shape is not None and (need := self._serving(shape, entry.context)).least > total:
                yield f"{name} at {entry.context} tokens needs {need}; this GPU has {total / GIB:.1f} GiB."

    def need(self, entry: BaseModelEntry) -> tuple[Shape, Serving]:
        shape = read_shape(entry, self.settings.model_cache)
        return shape, self._serving(shape, entry.context)

    def _serving(self, shape: Shape, context: int) -> Serving:
        rank = next(rank for rank in RANKS if rank >= self.settings.inference_max_lora_rank)
        return sizing.serving(shape, context=context, slots=ADAPTERS_AT_ONCE, rank=rank, device=self.device)

    async def build(self, name: str, entry: BaseModelEntry, others: Sequence[BaseModelEntry]) -> Engine:
        source = await asyncio.to_thread(source_of, entry, self.settings.model_cache)
        shape, need = await asyncio.to_thread(self.need, entry)
        config = EngineConfig(
            source=str(source),
            dtype=entry.dtype,
            device=self.device,
            context=entry.context,
            rank=self.settings.inference_max_lora_rank,
            kv_cache_bytes=self.cache_bytes(shape, need, entry.context, self.bytes_free(), others),
            threads=self.settings.torch_threads,
        )
        log.info("%s: a KV cache of %.1f GiB", name, config.kv_cache_bytes / GIB)
        engine = await asyncio.to_thread(VllmEngine, config)
        if entry.template_text is not None:
            engine.tokenizer.chat_template = entry.template_text
        return engine


class VllmEngine:
    """Implements worker.engine.Engine."""

    def __init__(self, config: EngineConfig) -> None:
        """Blocks for as long as vLLM takes to start."""
        from vllm import SamplingParams
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
        from vllm.v1.engine.async_llm import AsyncLLM

        self._params, self._lora_request = SamplingParams, LoRARequest
        self._deltas, self._held_to = RequestOutputKind.DELTA, StructuredOutputsParams
        self.context = config.context
        self.most_rank = next(rank for rank in RANKS if rank >= config.rank)
        self.tokenizer = AutoTokenizer.from_pretrained(config.source)
        self.stop_ids = stop_ids_of(_eos_of(config.source), self.tokenizer)
        self._numbers = itertools.count(1)
        self._requests: dict[str, Any] = {}  # by the name of the folder, which is a hash
        self._nothing: tempfile.TemporaryDirectory[str] | None = None
        if config.device == "cpu":
            # There vLLM gives a row without an adapter that of the last slot. So every row gets one; this adds 0.
            self._nothing = tempfile.TemporaryDirectory(prefix="regraft-")
            write_nothing(config.source, Path(self._nothing.name))
        self.vllm = AsyncLLM.from_engine_args(AsyncEngineArgs(**serving_options(config)))

    async def generate(self, ask: Ask) -> AsyncGenerator[Token, None]:
        lora = self._adapter(ask.adapter)
        params = self._params(
            seed=ask.seed,
            temperature=ask.temperature,
            top_p=ask.top_p,
            top_k=0,
            min_p=0.0,
            max_tokens=ask.max_tokens,
            stop_token_ids=sorted(self.stop_ids),
            ignore_eos=True,
            logprobs=ask.top_logprobs,
            detokenize=False,
            output_kind=self._deltas,
            structured_outputs=self._structured(ask),
            watermarking=False,
        )
        prompt = {"type": "token", "prompt_token_ids": list(ask.prompt_ids)}
        written = 0
        outputs = self.vllm.generate(prompt, params, uuid.uuid4().hex, lora_request=lora)
        try:
            async for output in outputs:
                [answer] = output.outputs
                for place, token_id in enumerate(answer.token_ids):
                    written += 1
                    last = token_id in self.stop_ids or written == ask.max_tokens
                    logprobs = answer.logprobs[place] if answer.logprobs else None
                    yield _token(token_id, last, logprobs, ask.top_logprobs or 0)
        finally:
            await outputs.aclose()  # has vLLM forget the request, if it has not ended

    def _structured(self, ask: Ask) -> Any:
        try:
            grammar = grammar_of(ask.reasoning, ask)
        except UnsupportedTags as cause:
            raise EngineRefused(str(cause)) from cause
        if grammar:
            return self._held_to(grammar=grammar)
        return self._held_to(json=ask.held_to) if ask.held_to else None

    @property
    def lost(self) -> bool:
        return bool(self.vllm.errored)

    async def close(self) -> None:
        # vLLM's processes exit slowly and have no state to save, so they are killed after a short timeout.
        await asyncio.to_thread(self.vllm.shutdown, timeout=2.0)
        if self._nothing is not None:
            self._nothing.cleanup()

    def _adapter(self, folder: Path | None) -> Any:
        if folder is None:
            if self._nothing is None:
                return None
            folder = Path(self._nothing.name)
        if folder.name not in self._requests:
            rank = LoraConfig.from_pretrained(str(folder)).r
            if rank > self.most_rank:
                raise EngineRefused(
                    f"The adapter's rank is {rank}, and this server takes {self.most_rank} at most: its operator sets "
                    "REGRAFT_INFERENCE_MAX_LORA_RANK."
                )
            number = next(self._numbers)
            self._requests[folder.name] = self._lora_request(folder.name, number, str(folder))
        return self._requests[folder.name]


def _token(id: int, last: bool, logprobs: Any, top: int) -> Token:
    """`logprobs` are vLLM's of one place: by token id, the chosen one and the `top` likeliest."""
    if logprobs is None:
        return Token(id, last)
    likeliest = sorted((one.rank, other, one.logprob) for other, one in logprobs.items() if one.rank <= top)
    return Token(id, last, logprobs[id].logprob, tuple((other, value) for _, other, value in likeliest))


def write_nothing(source: str, folder: Path) -> None:
    """An adapter of one layer whose matrices are 0."""
    model = without_weights(_config_of(source))
    head = model.get_output_embeddings()
    name, layer = next(
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    )
    LoraConfig(
        r=1, lora_alpha=1, target_modules=[name.rsplit(".", 1)[-1]], task_type="CAUSAL_LM"
    ).save_pretrained(str(folder))
    tensors = {
        f"base_model.model.{name}.lora_A.weight": torch.zeros(1, layer.in_features),
        f"base_model.model.{name}.lora_B.weight": torch.zeros(layer.out_features, 1),
    }
    save_file(tensors, folder / "adapter_model.safetensors")


def _eos_of(source: str) -> Any:
    try:
        return GenerationConfig.from_pretrained(source).eos_token_id
    except OSError:  # a model without that file has it in its config
        return _config_of(source).eos_token_id


def _config_of(source: str) -> Any:
    """`source` is a folder if there is one of that name, and else a hub id, as transformers reads it."""
    folder = Path(source)
    return read_config(folder if folder.is_dir() else source)
