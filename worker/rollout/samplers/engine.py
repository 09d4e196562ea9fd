"""The process in which vLLM runs; worker/rollout/samplers/vllm.py starts it.

vLLM's engine is one object here, driven step by step (VLLM_ENABLE_V1_MULTIPROCESSING=0): an adapter is then a plain
call, and after every step a message goes to the run, which is how it tells an engine that works from one that hangs.

The calls into what vLLM does not promise to keep are in `put_adapter`, `tensors_without_layer`, `one_adapter_linear`
and `SamplingEngine`; tests/worker/vllm_contract.py names each of them, so that a new version fails there first.
"""

import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from worker import process
from worker.rollout.samplers.wire import (
    Abort,
    AdapterBytes,
    EngineConfig,
    EngineReady,
    Failed,
    Finished,
    NotApplied,
    Request,
    SampleBatch,
    Stepped,
    WhichApply,
)

ADAPTER_ID = 1
# How vLLM says that it does not know a model, lacks a kernel for it here, or has too small a cache.
LASTING = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    NotImplementedError,
    ImportError,
    AssertionError,
)
# vLLM's LoRA buffers come in these heights; a rank between two of them is padded with zeros.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def environment(config: EngineConfig) -> dict[str, str]:
    """The environment of the engine's process: it has to be right before the first import."""
    fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    threads = {"OMP_NUM_THREADS": str(config.threads)} if config.threads else {}
    return {"VLLM_LOGGING_LEVEL": "WARNING"} | dict(os.environ) | fixed | threads


def engine_options(config: EngineConfig) -> dict[str, Any]:
    """vLLM's EngineArgs."""
    return {
        "model": config.source,
        "dtype": config.dtype,
        "max_model_len": config.context,
        "max_num_seqs": 256,
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in RANKS if rank >= config.rank),
        # The exact size, because the trainer uses the same device. vLLM then uses the share only to check at start-up
        # that this much memory is free, so it is close to 0.
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "gpu_memory_utilization": 0.01,
        # A model's own generation_config would change what we sample from, unseen by the trainer.
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        # By the same library as the trainer and the other sampler, so that all three allow the same tokens.
        "structured_outputs_config": {"backend": "guidance"},
        "disable_log_stats": True,
        **(_cpu_options(config) if config.device == "cpu" else {}),
    }


def _cpu_options(config: EngineConfig) -> dict[str, Any]:
    return {
        # Only whole blocks are shared in a group. Left to itself vLLM takes 128 here, more than most prompts have.
        "block_size": 32,
        "enforce_eager": True,  # compiling takes longer than it saves
        # A prompt cut in two discards a sampled token, and vLLM then turns the request's generator back, which a
        # generator on a CPU refuses ("CPU Generator does not use offset"). So a prompt has to fit into one step.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(config.context, 2048),
    }


def sampling_options(request: Request) -> dict[str, Any]:
    """vLLM's SamplingParams. Every field that changes the distribution is said, whatever its default.

    The engine reports a greedy answer's log-probabilities at temperature 1, as the transformers sampler does.
    """
    return {
        "n": 1,
        "seed": request.seed,
        "temperature": request.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": None,
        "repetition_detection": None,
        "thinking_token_budget": None,
        "watermarking": False,
        # The policy's own stop tokens, and no others; they stay in the answer, so that ending is learned too.
        "stop": None,
        "stop_token_ids": list(request.stop_ids),
        "ignore_eos": True,
        "min_tokens": 0,
        "max_tokens": request.max_tokens,
        "logprobs": 0,  # of the sampled token alone
        "flat_logprobs": True,
        "detokenize": False,
    }


class SamplingEngine:
    """vLLM's engine with one adapter slot. Every request uses it: on a CPU a row without an adapter gets it anyway."""

    def __init__(self, config: EngineConfig) -> None:
        from vllm import EngineArgs, SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
        from vllm.v1.engine.llm_engine import LLMEngine

        if config.device == "cpu":
            from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

            PunicaWrapperCPU.add_lora_linear = one_adapter_linear
        self._params = SamplingParams
        self._final_only = RequestOutputKind.FINAL_ONLY
        self._held_to = StructuredOutputsParams
        self._lora_request = LoRARequest
        self.vllm = LLMEngine.from_engine_args(EngineArgs(**engine_options(config)))
        self.namespace = ""

    @property
    def busy(self) -> bool:
        return bool(self.vllm.has_unfinished_requests())

    def start(self, batch: SampleBatch) -> None:
        if batch.adapter is not None:
            adapter = batch.adapter
            self.vllm.collective_rpc(lambda worker: put_adapter(worker, adapter))
            self.namespace = adapter.namespace
        # The path is never opened, since the id is registered; it is there for the prefix cache's key.
        adapter_of_request = self._lora_request("policy", ADAPTER_ID, self.namespace)
        for request in batch.requests:
            params = self._params(
                **sampling_options(request),
                output_kind=self._final_only,
                structured_outputs=self._structured(request),
            )
            prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
            self.vllm.add_request(request.id, prompt, params, lora_request=adapter_of_request)

    def _structured(self, request: Request) -> Any:
        if request.grammar:
            return self._held_to(grammar=request.grammar)
        return self._held_to(json=request.held_to) if request.held_to else None

    def not_applied(self, asked: WhichApply) -> NotApplied:
        [names] = self.vllm.collective_rpc(lambda worker: tensors_without_layer(worker, asked.tensors))
        return NotApplied(tuple(names))

    def step(self) -> Stepped:
        return Stepped(tuple(_finished(output) for output in self.vllm.step() if output.finished))

    def abort(self) -> None:
        self.vllm.abort_request(list(self.vllm.output_processor.request_states), internal=True)


def _finished(output: Any) -> Finished:
    [answer] = output.outputs
    return Finished(output.request_id, tuple(answer.token_ids), tuple(answer.logprobs.logprobs))


def tensors_without_layer(worker: Any, tensors: tuple[str, ...]) -> list[str]:
    """The adapter tensors for which vLLM's model has no layer. It would ignore them. Runs in vLLM's worker."""
    from vllm.lora.layers import MergedColumnParallelLinearVariableSliceWithLoRA as AnySlices
    from vllm.lora.utils import parse_fine_tuned_lora_name

    manager = worker.model_runner.lora_manager._adapter_manager
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    mapper = mapper.get_rename_mapper() if mapper is not None else None
    whole = {name for name, layer in manager.modules.items() if isinstance(layer, AnySlices)}
    layers = adaptable(manager.modules, manager.packed_modules, whole)
    return [name for name in tensors if parse_fine_tuned_lora_name(name, mapper)[0] not in layers]


def adaptable(
    modules: Iterable[str], packed: Mapping[str, Sequence[str]], whole: Collection[str]
) -> set[str]:
    """The names under which vLLM takes an adapter.

    It fails for an adapter of a module that it expects in parts: the files of GLM 4 have `gate_up_proj`, and vLLM
    expects `gate_proj` and `up_proj`.

    Args:
        modules: vLLM's own, by name.
        packed: for modules that are made of several layers, the names of these.
        whole: modules that also take one adapter for all their parts.
    """
    parts = {part for names in packed.values() for part in names}
    return {name for name in modules if name not in packed or name in whole} | parts


def put_adapter(worker: Any, adapter: AdapterBytes) -> None:
    """Write the adapter into its slot in place of the one before. Runs in vLLM's worker."""
    from safetensors.torch import load
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    lora = worker.model_runner.lora_manager
    manager = lora._adapter_manager
    config = {"r": adapter.rank, "lora_alpha": adapter.alpha, "target_modules": list(adapter.modules)}
    peft = PEFTHelper.from_dict(config)
    peft.validate_legal(lora.lora_config)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    model = LoRAModel.from_lora_tensors(
        ADAPTER_ID,
        # Freshly unpacked and ours alone: vLLM multiplies the scale into B in place.
        load(adapter.tensors),
        peft,
        device="cpu",
        dtype=lora.lora_config.lora_dtype,
        model_vocab_size=lora.vocab_size,
        weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
    )
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(model)
    manager.activate_adapter(ADAPTER_ID)
    manager.pin_adapter(ADAPTER_ID)


def one_adapter_linear(
    self: Any,
    y: Any,
    x: Any,
    lora_a_stacked: tuple[Any, ...],
    lora_b_stacked: tuple[Any, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **unused: Any,
) -> None:
    """y += scale * x A^T B^T, in place of PunicaWrapperCPU.add_lora_linear, where every row has adapter 0.

    vLLM's own gathers A and B once per token, which is three quarters of the time of a step.

    Shapes: x [T, in], y [T, sum(output_slices)], A [1, 1, rank, in], B [1, 1, out, rank] for each slice.
    """
    first = 0
    for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
        low = x @ a[0, 0].T
        y[:, first : first + width].addmm_(low, b[0, 0].T, alpha=scale)
        first += width


def lasts(cause: Exception) -> bool:
    """Whether another start would fail in the same way. Memory that another process holds is freed."""
    return isinstance(cause, LASTING) and "Free memory on device" not in str(cause)


def serve(run: Connection, engine: SamplingEngine) -> None:
    """Sample the requests of the run and report every step, until the run closes the connection."""
    run.send(EngineReady())
    while True:
        if engine.busy and not run.poll():
            run.send(engine.step())
            continue
        message = run.recv()
        if isinstance(message, WhichApply):
            run.send(engine.not_applied(message))
        elif isinstance(message, Abort):
            engine.abort()
            run.send(EngineReady())
        else:
            engine.start(message)


def main(descriptor: int, parent: int) -> int:
    process.die_with_parent(parent)
    run = Connection(descriptor)
    try:
        serve(run, SamplingEngine(run.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # the run has closed its end
    except Exception as cause:
        run.send(Failed(f"{type(cause).__name__}: {cause}", lasts(cause)))
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
