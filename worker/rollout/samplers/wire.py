"""Messages between the run (vllm.py) and its vLLM engine (engine.py), and their transport."""

import pickle
import select
import socket
import struct
from dataclasses import dataclass
from typing import Any

_HEADER = struct.Struct("!Q")


@dataclass(frozen=True)
class EngineConfig:
    """The configuration of the engine. `source` is the folder (or hub id) of the trainer's weights."""

    source: str
    dtype: str
    device: str  # cpu | cuda
    context: int
    rank: int
    kv_cache_bytes: int
    threads: int  # of torch, on a CPU; 0 leaves torch's own choice


@dataclass(frozen=True)
class Adapter:
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
    """One answer to be sampled."""

    id: str
    prompt_ids: tuple[int, ...]
    seed: int
    temperature: float
    max_tokens: int
    stop_ids: tuple[int, ...]
    held_to: str  # a JSON schema, or ""


@dataclass(frozen=True)
class Batch:
    """Answers to sample, all from this adapter; None: from the current one."""

    adapter: Adapter | None
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Abort:
    """Abort all requests; the engine replies Ready."""


@dataclass(frozen=True)
class Ready:
    """The engine is idle, after its start or after aborting its requests."""


@dataclass(frozen=True)
class Finished:
    """One answer. Log-probabilities are those of the tokens, as sampled, after temperature."""

    id: str
    output_ids_T: tuple[int, ...]
    logprobs_T: tuple[float, ...]


@dataclass(frozen=True)
class Stepped:
    """A step has completed: a heartbeat, with the answers that ended in it."""

    finished: tuple[Finished, ...]


@dataclass(frozen=True)
class Failed:
    """The engine raised an error, and its process exits."""

    reason: str


class Channel:
    """Pickled messages over a socket pair, with a deadline for either direction.

    Raises:
        EOFError, OSError: the other side is gone.
        TimeoutError: it did not read or send within the deadline.
    """

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    def send(self, message: object, patience: float | None = None) -> None:
        self.end.settimeout(patience)
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self.end.sendall(_HEADER.pack(len(data)) + data)

    def receive(self, patience: float | None = None) -> Any:
        self.end.settimeout(patience)
        (size,) = _HEADER.unpack(self._exactly(_HEADER.size))
        return pickle.loads(self._exactly(size))

    def waiting(self) -> bool:
        """Whether a message (or the end) is there to be received."""
        return bool(select.select([self.end], [], [], 0)[0])

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self.end.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError("the other side closed the connection")
            data += part
        return bytes(data)
