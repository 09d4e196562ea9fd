"""Our routes beside those of vLLM's server, and their messages.

All engines have `FACTS` and `SAMPLE`; a job's own engine also has those that change its weights and have it sleep.

`SAMPLE` takes one `GroupRequest` and returns frames, each after its length in four bytes: an `AnswerFrame` for each
answer as it ends, an `AliveFrame` where none ends, and at last an `EndFrame` or an `ErrorFrame`. Token ids travel as
int32 and log-probabilities as float32, so they arrive exactly as sampled.
"""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from pydantic import BaseModel

FACTS = "/regraft/v1/facts"
SAMPLE = "/regraft/v1/sample"
ADAPTER = "/regraft/v1/adapter"
WEIGHTS = "/regraft/v1/weights"
SLEEP = "/regraft/v1/sleep"
WAKE = "/regraft/v1/wake"
HEALTH = "/health"  # vLLM's
# Raised by each change of these messages, or of what inference servers send to vLLM's own routes, that an engine of the
# release before does not know. Clients of a rollout fleet send theirs in the header, and a sampler with another number
# answers with this status, so that an upgrade, which replaces both, mixes no releases.
PROTOCOL = 1
PROTOCOL_HEADER = "x-regraft-protocol"
OTHER_PROTOCOL = 421  # Misdirected Request
MSGPACK = "application/msgpack"
_PREFIX = 4  # bytes of a frame's length
_ID_BYTES = 4
# Version of the weights, and the first token that was sampled from it.
VersionStart = tuple[int, int]


class FactsQuestion(BaseModel):
    """The question of a job before it samples."""

    tensors: list[str]  # of its adapter, by PEFT's names


class ServerInfo(BaseModel):
    """The model and the limits of an engine, as it reports them."""

    model: str
    dtype: str
    context: int
    max_lora_rank: int
    logprobs_mode: str
    vllm: str  # its version
    left_out: list[str]  # of the adapter tensors in the question: those without a layer


class AdapterBytes(msgspec.Struct, frozen=True):
    """LoRA weights: safetensors bytes under PEFT's names, and the PEFT config's scale."""

    # Keys the prefix cache: a new one for new weights, or vLLM reads keys and values of the old ones.
    namespace: str
    tensors: bytes
    rank: int
    alpha: float
    modules: tuple[str, ...]
    # PEFT's `rank_pattern`: ranks of layers that have another one, by the ends of their names as expressions.
    ranks: dict[str, int] = {}


class AdapterRequest(msgspec.Struct, frozen=True):
    """Replace the adapter of an engine. Answers in flight continue with it."""

    version: int
    adapter: AdapterBytes


class WeightsRequest(msgspec.Struct, frozen=True):
    """Abort all answers, and replace the weights of the model by those of safetensors files."""

    version: int
    files: tuple[str, ...]


class Failure(BaseModel):
    """The reason for which an engine has failed to do what a request wanted."""

    error: str
    lasting: bool  # of a kind that another start would repeat: not memory, a device or the network


class AnswerRequest(msgspec.Struct, frozen=True):
    """One answer of a group."""

    id: str
    seed: int
    max_tokens: int


class GroupRequest(msgspec.Struct, frozen=True):
    """Answers to one prompt."""

    adapter: str  # the engine's name for it
    prompt: bytes  # token ids
    answers: tuple[AnswerRequest, ...]
    temperature: float
    stop_ids: tuple[int, ...]
    grammar: str = ""  # llguidance's, of a whole answer with its thought

    @property
    def tokens(self) -> int:
        """The largest number of tokens that the prompt and its answers have."""
        return len(self.prompt) // _ID_BYTES + sum(answer.max_tokens for answer in self.answers)


class AnswerFrame(msgspec.Struct, frozen=True, tag="answer"):
    """A finished answer."""

    id: str
    ids: bytes
    logprobs: bytes
    finish: str  # vLLM's reason
    versions: tuple[VersionStart, ...] = ()


class AliveFrame(msgspec.Struct, frozen=True, tag="alive"):
    """The engine and all of its workers have answered since the last frame."""


class EndFrame(msgspec.Struct, frozen=True, tag="end"):
    """All answers have been sent."""


class ErrorFrame(msgspec.Struct, frozen=True, tag="error"):
    """No further answer follows."""

    error: str
    lasting: bool  # any other engine of the kind would refuse, too


Frame = AnswerFrame | AliveFrame | EndFrame | ErrorFrame
_DECODER: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def pack_ids(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, "<i4").tobytes()


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(packed, "<i4").tolist())


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    return np.asarray(logprobs, "<f4").tobytes()


def unpack_logprobs(packed: bytes) -> tuple[float, ...]:
    return tuple(np.frombuffer(packed, "<f4").tolist())


def pack(frame: Frame) -> bytes:
    body = msgspec.msgpack.encode(frame)
    return len(body).to_bytes(_PREFIX, "big") + body


class FrameReader:
    """Reads frames from the parts of a body, which end anywhere."""

    def __init__(self) -> None:
        self._unread = b""

    def feed(self, part: bytes) -> Iterator[Frame]:
        """Yield the frames that this part completes. Raises msgspec.DecodeError if they are none."""
        self._unread += part
        while len(self._unread) >= _PREFIX:
            end = _PREFIX + int.from_bytes(self._unread[:_PREFIX], "big")
            if len(self._unread) < end:
                return
            body, self._unread = self._unread[_PREFIX:end], self._unread[end:]
            yield _DECODER.decode(body)
