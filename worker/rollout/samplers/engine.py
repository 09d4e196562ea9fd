"""The process in which vLLM runs; worker/rollout/samplers/engine_process.py starts it.

vLLM's engine is one object here, driven step by step (VLLM_ENABLE_V1_MULTIPROCESSING=0): an adapter is then a plain
call, and after every step a message goes to the run, which is how it tells an engine that works from one that hangs.

With tensor parallelism vLLM starts a process for each GPU below this one. What runs in vLLM's workers, in one process
or several, is in extension.py.

The calls into what vLLM does not promise to keep are in `SamplingEngine` and extension.py;
tests/worker/vllm_contract.py names each of them, so that a new version fails there first.
"""

import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from worker import process
from worker.rollout.samplers.extension import ADAPTER_ID, SamplingWorker
from worker.rollout.samplers.wire import (
    Abort,
    AdapterBytes,
    Asleep,
    EngineConfig,
    EngineReady,
    Failed,
    FallAsleep,
    Finished,
    LoadWeights,
    NotApplied,
    ReplaceAdapter,
    Request,
    SampleBatch,
    Stepped,
    WakeUp,
    WhichApply,
)

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
    # A forked worker would keep this process's socket open, and the run would not see that the engine has ended.
    fixed |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if config.device == "cpu":
        # Left to itself vLLM wants a NUMA node for each worker, and binds several engines to the same cores.
        fixed |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    threads = {"OMP_NUM_THREADS": str(config.threads)} if config.threads else {}
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(config.gpus)} if config.gpus else {}
    return {"VLLM_LOGGING_LEVEL": "WARNING"} | dict(os.environ) | fixed | threads | gpus


def engine_options(config: EngineConfig) -> dict[str, Any]:
    """vLLM's EngineArgs."""
    return {
        "model": config.source,
        "dtype": config.dtype,
        "max_model_len": config.context,
        "max_num_seqs": 256,
        **(_adapter_options(config) if config.rank else {}),
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
        **(_cpu_options(config) if config.device == "cpu" else {"enable_sleep_mode": config.sleeps}),
    }


def _adapter_options(config: EngineConfig) -> dict[str, Any]:
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in RANKS if rank >= config.rank),
    }


def worker_options(config: EngineConfig) -> dict[str, Any]:
    """vLLM's EngineArgs about its workers: our methods in them, and a process for each if there are several."""
    return {
        "worker_extension_cls": f"{SamplingWorker.__module__}.{SamplingWorker.__qualname__}",
        "tensor_parallel_size": config.tensor_parallel,
        **({"distributed_executor_backend": "mp"} if config.tensor_parallel > 1 else {}),
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
    """vLLM's engine with one adapter slot, or none, and whole weights from files.

    Every request uses the slot: on a CPU a row without an adapter gets it anyway.
    """

    def __init__(self, config: EngineConfig) -> None:
        with process.importing():
            from vllm import EngineArgs, SamplingParams
            from vllm.lora.request import LoRARequest
            from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
            from vllm.v1.engine.llm_engine import LLMEngine

        self._params = SamplingParams
        # The engine has to know how many tokens an answer has when the adapter is replaced.
        self._kind = RequestOutputKind.CUMULATIVE if config.continues else RequestOutputKind.FINAL_ONLY
        self._held_to = StructuredOutputsParams
        self._lora_request = LoRARequest
        self.vllm = LLMEngine.from_engine_args(EngineArgs(**engine_options(config), **worker_options(config)))
        self._has_adapter = config.rank > 0
        if config.device == "cpu" and self._has_adapter:
            self.vllm.collective_rpc("use_one_adapter_linear")
        self.namespace = ""
        self._tokens: dict[str, int] = {}  # of each answer in flight so far, if it may continue
        self._replaced_at: dict[str, tuple[int, ...]] = {}

    @property
    def busy(self) -> bool:
        return bool(self.vllm.has_unfinished_requests())

    def start(self, batch: SampleBatch) -> None:
        if batch.adapter is not None:
            self._put(batch.adapter)
        # The path is never opened, since the id is registered; it is there for the prefix cache's key.
        adapter_of_request = None
        if self._has_adapter:
            adapter_of_request = self._lora_request("policy", ADAPTER_ID, self.namespace)
        for request in batch.requests:
            params = self._params(
                **sampling_options(request),
                output_kind=self._kind,
                structured_outputs=self._structured(request),
            )
            prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
            self.vllm.add_request(request.id, prompt, params, lora_request=adapter_of_request)
            self._tokens[request.id] = 0

    def load(self, weights: LoadWeights) -> None:
        """Load other weights while there are no requests."""
        self.vllm.collective_rpc("load_policy_weights", args=(weights.files,))
        if not self.vllm.reset_prefix_cache():  # its keys are the tokens alone
            raise RuntimeError("vLLM keeps the keys and values of the weights before these")

    def replace(self, adapter: AdapterBytes) -> None:
        """Have answers in flight continue with this adapter.

        Keys and values of the old one are dropped, so that vLLM computes prompts and tokens anew: the next tokens
        have the probabilities that the new adapter alone gives them.
        """
        self._put(adapter)
        self.vllm.reset_prefix_cache(reset_running_requests=True)
        for id, tokens in self._tokens.items():
            self._replaced_at[id] = (*self._replaced_at.get(id, ()), tokens)

    def _put(self, adapter: AdapterBytes) -> None:
        self.vllm.collective_rpc("put_policy_adapter", args=(adapter,))
        self.namespace = adapter.namespace

    def _structured(self, request: Request) -> Any:
        if request.grammar:
            return self._held_to(grammar=request.grammar)
        return self._held_to(json=request.held_to) if request.held_to else None

    def not_applied(self, asked: WhichApply) -> NotApplied:
        names, *_ = self.vllm.collective_rpc("policy_tensors_without_layer", args=(asked.tensors,))
        return NotApplied(tuple(names))  # the same in all workers

    def step(self) -> Stepped:
        return Stepped(tuple(filter(None, map(self._stepped, self.vllm.step()))))

    def _stepped(self, output: Any) -> Finished | None:
        """The answer, if it has ended."""
        [answer] = output.outputs
        if not output.finished:
            self._tokens[output.request_id] = len(answer.token_ids)
            return None
        self._tokens.pop(output.request_id, None)
        return Finished(
            output.request_id,
            tuple(answer.token_ids),
            tuple(answer.logprobs.logprobs),
            self._replaced_at.pop(output.request_id, ()),
        )

    def abort(self) -> None:
        self._tokens.clear()
        self._replaced_at.clear()
        self.vllm.abort_request(list(self.vllm.output_processor.request_states), internal=True)

    def sleep(self) -> None:
        self.abort()
        self.vllm.sleep(level=1)

    def wake_up(self) -> None:
        self.vllm.wake_up()


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
        elif isinstance(message, ReplaceAdapter):
            engine.replace(message.adapter)
        elif isinstance(message, LoadWeights):
            engine.load(message)
            run.send(EngineReady())
        elif isinstance(message, Abort):
            engine.abort()
            run.send(EngineReady())
        elif isinstance(message, FallAsleep):
            engine.sleep()
            run.send(Asleep())
        elif isinstance(message, WakeUp):
            engine.wake_up()
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
