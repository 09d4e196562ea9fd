"""Messages between the run (vllm.py) and its vLLM engines (engine.py), sent over a `multiprocessing.connection`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    """The configuration of the engine. `source` is the folder (or hub id) of the trainer's weights."""

    source: str
    dtype: str
    device: str  # cpu | cuda
    context: int
    rank: int  # of the adapter; 0: there is none, and weights come from files
    kv_cache_bytes: int  # of each process
    threads: int  # of torch, on a CPU; 0 leaves torch's own choice
    tensor_parallel: int = 1  # processes that share each layer
    gpus: tuple[str, ...] = ()  # their GPUs, as in CUDA_VISIBLE_DEVICES; () leaves it as it is
    sleeps: bool = False  # between sampling; a CPU has no memory to release
    continues: bool = False  # answers in flight may continue with another adapter


@dataclass(frozen=True)
class AdapterBytes:
    """LoRA weights on their way to the engine: safetensors bytes under PEFT's names, and the PEFT config's scale."""

    namespace: (
        str  # keys the prefix cache: a new one for new weights, or vLLM reads keys and values of the old ones
    )
    tensors: bytes
    rank: int
    alpha: float
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """One answer to be sampled: member `member` of the group of prompt number `prompt`."""

    prompt: int
    member: int
    prompt_ids: tuple[int, ...]
    seed: int
    temperature: float
    max_tokens: int
    stop_ids: tuple[int, ...]
    held_to: str  # a JSON schema, or ""
    grammar: str = ""  # llguidance's, of a whole answer with its thought, in place of `held_to`

    @property
    def id(self) -> str:
        return f"{self.prompt}/{self.member}"


@dataclass(frozen=True)
class SampleBatch:
    """Answers to sample, all from this adapter; None: from the current adapter or weights."""

    adapter: AdapterBytes | None
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class ReplaceAdapter:
    """Answers in flight continue with this adapter: what they have so far is computed anew with it."""

    adapter: AdapterBytes


@dataclass(frozen=True)
class LoadWeights:
    """Replace the weights of the model by those of safetensors files; the engine replies EngineReady."""

    files: tuple[str, ...]


@dataclass(frozen=True)
class WhichApply:
    """Ask which adapter tensors the engine's model applies; the engine replies NotApplied."""

    tensors: tuple[str, ...]  # PEFT's names


@dataclass(frozen=True)
class NotApplied:
    """Those of WhichApply that vLLM would ignore without an error."""

    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Abort:
    """Abort all requests; the engine replies EngineReady."""


@dataclass(frozen=True)
class FallAsleep:
    """Abort all requests, move the weights to main memory and drop the cache; the engine replies Asleep."""


@dataclass(frozen=True)
class Asleep:
    """The engine uses as little of its GPUs as it can."""


@dataclass(frozen=True)
class WakeUp:
    """Move the weights back; the engine replies EngineReady."""


@dataclass(frozen=True)
class EngineReady:
    """The engine is idle, after its start, new weights, aborting its requests or its sleep."""


@dataclass(frozen=True)
class Finished:
    """One answer. Log-probabilities are those of the tokens, as sampled, after temperature."""

    id: str
    output_ids_T: tuple[int, ...]
    logprobs_T: tuple[float, ...]
    replaced_at: tuple[int, ...] = ()  # how many tokens it had whenever the adapter was replaced


@dataclass(frozen=True)
class Stepped:
    """A step has completed: a heartbeat, with the answers that ended in it."""

    finished: tuple[Finished, ...]


@dataclass(frozen=True)
class Failed:
    """The engine raised an error, and its process exits."""

    reason: str
    lasting: bool = False  # of a kind that another start would repeat: not memory, a device or the network
