"""Answers of one base model and many adapters in one batch that requests join and leave at any token.

A request is computed alone once, for its prompt; from then on it is a row of the batch. Rows lie sorted by adapter, so
that each layer computes the base for all of them together and each adapter for the rows that have it.
"""

import asyncio
import logging
import queue
import random
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.cache_utils import Cache

from worker.model import attention, policy, support
from worker.model.architecture import refuse_beyond_full_attention, refusing, suspects
from worker.model.decoding import right_padded
from worker.model.lora import FrozenLinear
from worker.model.policy import Base
from worker.refusals import UnsupportedModel
from worker.rollout.samplers.json_schema import Vocabulary
from worker.rollout.samplers.steering import RequestedModel, Steering
from worker.serve.engine import Ask, Token

log = logging.getLogger(__name__)

MAX_ROWS = 64
MAX_CACHED_TOKENS = 131_072  # rows times the longest of them: bounds the cache
MAX_PROMPT_TOKENS = (
    8192  # read at once, padding included, so that the rows which are being written do not wait for long
)
ADAPTERS_IN_MEMORY = 32


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter's two matrices for each layer that has one, by the layer's name; output += scale * B(A(x))."""

    layers: dict[str, tuple[Tensor, Tensor, float]]

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> "ServedAdapter":
        """Read what `Policy.save` writes."""
        config = LoraConfig.from_pretrained(str(folder))
        scale = config.lora_alpha / config.r
        tensors = load_file(folder / "adapter_model.safetensors", device=str(device))
        names = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
        return cls(
            {
                name.removeprefix("base_model.model."): (
                    tensors[f"{name}.lora_A.weight"],
                    tensors[f"{name}.lora_B.weight"],
                    scale,
                )
                for name in names
            }
        )


@dataclass(frozen=True)
class Span:
    """Rows `first` up to `end` of a batch, which share an adapter."""

    lora: ServedAdapter
    first: int
    end: int


class RowCache(Cache):  # type: ignore[misc]  # transformers is not typed for us
    """Keys and values of rows of different lengths: by layer [R, Hkv, capacity, d]; row r has `lengths[r]` tokens."""

    def __init__(self, lengths_R: Tensor) -> None:
        self.lengths = lengths_R
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.reading = True  # prompts; afterwards each forward adds one token a row

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def width(self) -> int:
        """Tokens of the longest row, the one that is being computed included."""
        return int(self.lengths.max()) + (0 if self.reading else 1)

    @property
    def mask(self) -> Tensor:
        """What each row's next token sees: bool [R, 1, 1, width]."""
        columns = torch.arange(self.width, device=self.lengths.device)
        return (columns[None] <= self.lengths[:, None])[:, None, None]

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model. Returns all keys and values so far."""
        if self.reading:
            self.keys[layer_idx], self.values[layer_idx] = key, value
            return key, value
        return self._append(self.keys, layer_idx, key), self._append(self.values, layer_idx, value)

    def _append(self, tensors: dict[int, Tensor], layer: int, new: Tensor) -> Tensor:
        width = self.width
        if tensors[layer].shape[2] < width:
            # By a quarter at a time: appending with cat would copy the whole cache for every token.
            tensors[layer] = _padded(tensors[layer], width + max(32, width // 4))
        rows = torch.arange(self.rows, device=self.lengths.device)
        tensors[layer][rows, :, self.lengths] = new[:, :, 0]
        return tensors[layer][:, :, :width]

    def take(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; one may be named more than once."""
        index = torch.tensor(rows, device=self.lengths.device)
        self.lengths = self.lengths[index]
        width = int(self.lengths.max())
        for tensors in (self.keys, self.values):
            for layer, tensor in tensors.items():
                tensors[layer] = tensor[:, :, :width][index]

    def join(self, other: "RowCache") -> None:
        """Have the other's rows behind our own."""
        width = max(int(self.lengths.max()), int(other.lengths.max()))
        self.lengths = torch.cat([self.lengths, other.lengths])
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for layer in mine:
                mine[layer] = torch.cat(
                    [_padded(mine[layer], width)[:, :, :width], _padded(theirs[layer], width)[:, :, :width]]
                )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.reading else self.width - 1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


def _padded(tensor: Tensor, width: int) -> Tensor:
    """With zeros, not with whatever is in memory: a weight of 0 times NaN is NaN."""
    return nn.functional.pad(tensor, (0, 0, 0, max(0, width - tensor.shape[2])))


class ServedModel:
    """A base model whose linear layers apply a separate adapter to each span of rows. Used by one thread."""

    def __init__(self, base: Base) -> None:
        self.context, self.tokenizer = base.context, base.tokenizer
        self._spans: list[Span] = []
        head = base.model.get_output_embeddings()
        for name, module in base.model.named_modules():
            if isinstance(module, nn.Linear) and module is not head:
                module.forward = self._forward_of(name, module)  # type: ignore[method-assign,assignment]
        self._decoder, self._of_head = base.parts.decoder, base.parts.logits
        base.model.set_attn_implementation(attention.NAME)
        self._head = FrozenLinear(head, trained=False, float32=True)
        self.device: torch.device = head.weight.device
        self.stop_ids = policy.stop_ids(base.model, base.tokenizer)
        self._refuse_unsupported(base)

    @torch.inference_mode()
    def _refuse_unsupported(self, base: Base) -> None:
        """Compare what reads a prompt and what writes a token with transformers' own eager attention.

        Raises:
            UnsupportedModel: they differ, or the config says that they would.
        """
        config, ids = base.model.config, [i % 67 + 3 for i in range(24)]
        support.refuse_by_config(config, self.context)
        refuse_beyond_full_attention(config, self.context)
        layers = list(base.parts.layers or [])
        with refusing(config), support.in_float32(base.model, layers):
            with support.eager(base.model):
                whole = torch.tensor([ids], device=self.device)
                reference = base.model(input_ids=whole, use_cache=False).logits[0, -2:]
            cache, read = self.read([ids[:-1]], [None])
            cache.take([0])
            ours = torch.cat([read, self.write(ids[-1:], cache, [None])])
        gap = (reference.float().log_softmax(-1) - ours.log_softmax(-1)).abs().max().item()
        if not gap <= support.TOLERANCE:
            raise UnsupportedModel(
                f"{type(base.model).__name__} is not supported: its log-probabilities differ from transformers' own by "
                f"{gap:.3g}. Likely because of: {suspects(config)}."
            )

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokenizer, int(self._head.layer.weight.shape[0]), self.stop_ids)

    def _forward_of(self, name: str, layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        frozen = FrozenLinear(layer, trained=False)

        def forward(x: Tensor) -> Tensor:
            output = frozen(x)
            for span in self._spans:
                if (matrices := span.lora.layers.get(name)) is not None:
                    a, b, scale = matrices
                    low = linear(x[span.first : span.end], a.to(x.dtype))  # as worker/model/lora.py
                    output[span.first : span.end].add_(linear(low, b.to(x.dtype)), alpha=scale)
            return output

        return forward

    @torch.inference_mode()
    def lora(self, folder: Path) -> ServedAdapter:
        return ServedAdapter.load(folder, self.device)

    def read(
        self, prompts: Sequence[Sequence[int]], loras: Sequence[ServedAdapter | None]
    ) -> tuple[RowCache, Tensor]:
        """The prompts' keys and values, and the logits [P, V] of each first token. Equal adapters are neighbours."""
        input_ids, lengths = right_padded(prompts, self.device)
        width = input_ids.shape[1]
        mask = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()[None, None]
        positions = torch.arange(width, device=self.device)[None].expand(len(prompts), -1)
        cache = RowCache(lengths)
        hidden = self._hidden(input_ids, positions, mask.expand(len(prompts), 1, -1, -1), cache, loras)
        cache.reading = False
        return cache, self._logits(hidden[torch.arange(len(prompts), device=self.device), lengths - 1])

    @torch.inference_mode()
    def write(self, tokens: Sequence[int], cache: RowCache, loras: Sequence[ServedAdapter | None]) -> Tensor:
        """The logits [R, V] of what follows each row's newest token."""
        input_ids = torch.tensor(tokens, device=self.device)[:, None]
        hidden = self._hidden(input_ids, cache.lengths[:, None], cache.mask, cache, loras)
        cache.lengths = cache.lengths + 1
        return self._logits(hidden[:, 0])

    def _hidden(
        self,
        input_ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: RowCache,
        loras: Sequence[ServedAdapter | None],
    ) -> Tensor:
        self._spans = _spans(loras)
        output = self._decoder(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        )
        last: Tensor = output.last_hidden_state
        return last

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._of_head(self._head(hidden).float())


def _spans(loras: Sequence[ServedAdapter | None]) -> list[Span]:
    spans: list[Span] = []
    for row, lora in enumerate(loras):
        if lora is None:
            continue
        if spans and spans[-1].lora is lora and spans[-1].end == row:
            spans[-1] = Span(lora, spans[-1].first, row + 1)
        else:
            spans.append(Span(lora, row, row + 1))
    return spans


def is_steered(ask: Ask) -> bool:
    return bool(ask.held_to) or ask.thinking_budget is not None


@dataclass(eq=False)
class DecodingRow:
    """One answer on its way."""

    ask: Ask
    lora: ServedAdapter | None
    loop: asyncio.AbstractEventLoop
    tokens: "asyncio.Queue[Token | Exception]" = field(default_factory=asyncio.Queue)
    left: bool = False  # abandoned: its tokens are no longer read
    written: int = 0
    newest: int = 0
    steering: Steering | None = None

    def __post_init__(self) -> None:
        self.dice = random.Random(self.ask.seed)

    @property
    def prompt(self) -> tuple[int, tuple[int, ...]]:
        """Equal for rows whose prompts have the same keys and values."""
        return id(self.lora), self.ask.prompt_ids

    @property
    def most(self) -> int:
        """Tokens of prompt and answer together, at most."""
        return len(self.ask.prompt_ids) + self.ask.max_tokens


class ContinuousEngine:
    """Implements worker.serve.engine.Engine with transformers. Its own thread computes whenever there is a row."""

    def __init__(
        self,
        base: Base,
        *,
        most_rows: int = MAX_ROWS,
        most_prompt_tokens: int = MAX_PROMPT_TOKENS,
        served: Callable[[Base], ServedModel] = ServedModel,
    ) -> None:
        self.model = served(base)
        self.context, self.tokenizer, self.stop_ids = (
            self.model.context,
            self.model.tokenizer,
            self.model.stop_ids,
        )
        self.most_rows, self.most_prompt_tokens = most_rows, most_prompt_tokens
        self.steps = 0  # forward passes that wrote a token
        self._loras: OrderedDict[Path, ServedAdapter] = OrderedDict()
        self._reading = threading.Lock()  # of adapters: each request asks for its own in a thread
        self._arrivals: queue.SimpleQueue[DecodingRow | None] = queue.SimpleQueue()
        self._waiting: list[DecodingRow] = []
        self._rows: list[DecodingRow] = []
        self._cache: RowCache | None = None
        self._thread = threading.Thread(target=self._run, name="inference", daemon=True)
        self._thread.start()

    async def generate(self, ask: Ask) -> AsyncGenerator[Token, None]:
        lora = None if ask.adapter is None else await asyncio.to_thread(self._lora, ask.adapter)
        if is_steered(ask):
            await asyncio.to_thread(lambda: self.model.vocabulary)
        row = DecodingRow(ask, lora, asyncio.get_running_loop())
        self._arrivals.put(row)
        try:
            while True:
                token = await row.tokens.get()
                if isinstance(token, Exception):
                    raise token
                yield token
                if token.last:
                    return
        finally:
            row.left = True

    @property
    def arriving(self) -> int:
        """Requests that no step has looked at yet."""
        return self._arrivals.qsize()

    @property
    def lost(self) -> bool:
        return not self._thread.is_alive()

    async def close(self) -> None:
        self._arrivals.put(None)
        await asyncio.to_thread(self._thread.join)

    def _lora(self, folder: Path) -> ServedAdapter:
        """Rows keep what they were given; what is forgotten here is only read again for the next one."""
        with self._reading:
            lora = self._loras.get(folder)
            if lora is None:
                lora = self._loras[folder] = self.model.lora(folder)
            self._loras.move_to_end(folder)
            while len(self._loras) > ADAPTERS_IN_MEMORY:
                self._loras.popitem(last=False)
            return lora

    def _run(self) -> None:
        while self._arrive():
            try:
                self._drop(lambda row: row.left)
                self._admit()
                if self._rows:
                    self._write()
            except Exception as cause:
                log.exception("a batch of %d failed", len(self._rows))
                failed, self._rows, self._cache = self._rows, [], None
                if not failed:  # or it would be tried for ever
                    failed, self._waiting = self._waiting, []
                for row in failed:
                    row.loop.call_soon_threadsafe(row.tokens.put_nowait, cause)

    def _arrive(self) -> bool:
        """Take in what has come; wait for something if there is nothing to do. False: the engine is to end."""
        block = not self._rows and not self._waiting
        while True:
            try:
                row = self._arrivals.get(block)
            except queue.Empty:
                return True
            if row is None:
                return False
            self._waiting.append(row)
            block = False

    def _admit(self) -> None:
        """Read the prompts of those that fit, in the order in which they came."""
        self._waiting = [row for row in self._waiting if not row.left]
        chosen: list[DecodingRow] = []
        longest = max((row.most for row in self._rows), default=0)
        prompts: set[tuple[int, tuple[int, ...]]] = (
            set()
        )  # an n of 8 is eight rows with one prompt, read once
        width = 0  # all of them are padded to the longest
        for row in self._waiting:
            longest = max(longest, row.most)
            count = len(self._rows) + len(chosen) + 1
            if count > 1 and (count > self.most_rows or count * longest > MAX_CACHED_TOKENS):
                break
            width = max(width, len(row.ask.prompt_ids))
            if chosen and (len(prompts) + (row.prompt not in prompts)) * width > self.most_prompt_tokens:
                break
            prompts.add(row.prompt)
            chosen.append(row)
        if not chosen:
            return
        # Moved to `_rows` at once: if this method raises, its caller passes the exception to the rows in `_rows`.
        self._waiting = self._waiting[len(chosen) :]
        chosen.sort(key=lambda row: id(row.lora))
        old, cache, self._cache = self._rows, self._cache, None
        self._rows = [*old, *chosen]
        places = {prompt: place for place, prompt in enumerate(dict.fromkeys(row.prompt for row in chosen))}
        loras: dict[int, ServedAdapter | None] = {id(row.lora): row.lora for row in chosen}
        read, logits = self.model.read([ids for _, ids in places], [loras[key] for key, _ in places])
        prompt_of = [places[row.prompt] for row in chosen]
        read.take(prompt_of)
        for row in chosen:
            if is_steered(row.ask):
                with self._own_fault(row):
                    row.steering = Steering.of(
                        RequestedModel(self.model.vocabulary, row.ask.reasoning), row.ask, 1
                    )
        if cache is None:
            cache = read
        else:
            cache.join(read)
            order = sorted(range(len(self._rows)), key=lambda at: id(self._rows[at].lora))
            cache.take(order)
        self._cache = cache
        first = dict(zip(map(id, chosen), logits[prompt_of], strict=True))
        self._rows.sort(key=lambda row: id(row.lora))
        fresh = [row for row in self._rows if id(row) in first]
        self._next(fresh, torch.stack([first[id(row)] for row in fresh]))

    def _write(self) -> None:
        assert self._cache is not None
        self.steps += 1
        logits = self.model.write(
            [row.newest for row in self._rows], self._cache, [row.lora for row in self._rows]
        )
        self._next(list(self._rows), logits)

    def _next(self, rows: Sequence[DecodingRow], logits_RV: Tensor) -> None:
        """Choose a token for each of these rows, hand it on, and let those go that have ended."""
        free = logits_RV
        if any(row.steering for row in rows):
            logits_RV = logits_RV.clone()
            for at, row in enumerate(rows):
                if row.steering is not None:
                    with self._own_fault(row):
                        logits_RV[at] = row.steering.masked(logits_RV[at : at + 1], [0])[0]
        chosen = sample(logits_RV, [row.ask for row in rows], [_draw(row.dice) for row in rows])
        found = logprobs(free, [row.ask for row in rows], chosen)
        news: dict[asyncio.AbstractEventLoop, list[tuple[DecodingRow, Token]]] = {}
        for row, token_id, (logprob, top) in zip(rows, chosen.tolist(), found, strict=True):
            if row.steering is not None and not row.left:
                with self._own_fault(row):
                    row.steering.take([0], [token_id])
            row.newest, row.written = token_id, row.written + 1
            last = token_id in self.stop_ids or row.written == row.ask.max_tokens
            row.left = row.left or last
            news.setdefault(row.loop, []).append((row, Token(token_id, last, logprob, top)))
        for loop, tokens in news.items():
            # One call for all of them: each wakes the loop up.
            loop.call_soon_threadsafe(_hand_on, tokens)
        self._drop(lambda row: row.left)

    @contextmanager
    def _own_fault(self, row: DecodingRow) -> Iterator[None]:
        """End only this answer if its schema raises an exception; the other answers of the batch continue."""
        try:
            yield
        except Exception as cause:
            row.left = True
            row.loop.call_soon_threadsafe(row.tokens.put_nowait, cause)

    def _drop(self, gone: Callable[[DecodingRow], bool]) -> None:
        stay = [at for at, row in enumerate(self._rows) if not gone(row)]
        if len(stay) == len(self._rows):
            return
        self._rows = [self._rows[at] for at in stay]
        if not stay:
            self._cache = None
        elif self._cache is not None:
            self._cache.take(stay)


def _hand_on(tokens: Sequence[tuple[DecodingRow, Token]]) -> None:
    for row, token in tokens:
        row.tokens.put_nowait(token)


def _draw(dice: random.Random) -> float:
    return dice.getrandbits(24) / 2**24  # exact in float32, and never 1


def sample(logits_RV: Tensor, asks: Sequence[Ask], draws: Sequence[float]) -> Tensor:
    """A token [R] for each row, by inversion: the first one at which the cumulative probability passes the draw."""
    greedy = logits_RV.argmax(-1)
    if all(ask.temperature == 0 for ask in asks):
        return greedy
    device = logits_RV.device
    temperature = torch.tensor([ask.temperature for ask in asks], device=device)
    scaled = logits_RV / torch.where(temperature == 0, 1.0, temperature)[:, None]
    probabilities = scaled.softmax(-1)
    if narrow := [at for at, ask in enumerate(asks) if ask.top_p < 1]:
        top_p = torch.tensor([asks[at].top_p for at in narrow], device=device)[:, None]
        probabilities[narrow] = _nucleus(probabilities[narrow], top_p)
    cumulative = probabilities.cumsum(-1)
    # Scaled by the last entry, because a rounded sum may stop short of 1 and leave a draw nowhere to land.
    draw = torch.tensor(draws, device=device)[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, draw, right=True)[:, 0].clamp(max=logits_RV.shape[-1] - 1)
    return torch.where(temperature == 0, greedy, drawn)


def _nucleus(probabilities_RV: Tensor, top_p_R1: Tensor) -> Tensor:
    """The most likely tokens that together reach top_p (always the first one), the others at 0."""
    ordered, index = probabilities_RV.sort(-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= top_p_R1
    outside[:, 0] = False
    return torch.zeros_like(probabilities_RV).scatter(-1, index, ordered.masked_fill(outside, 0.0))


Top = tuple[tuple[int, float], ...]


def logprobs(logits_RV: Tensor, asks: Sequence[Ask], chosen_R: Tensor) -> list[tuple[float | None, Top]]:
    """Log-probabilities of the chosen and of the most likely tokens, before temperature, top_p and schema."""
    found: list[tuple[float | None, Top]] = [(None, ())] * len(asks)
    wanted = [at for at, ask in enumerate(asks) if ask.top_logprobs is not None]
    if not wanted:
        return found
    logp = logits_RV[wanted].log_softmax(-1)
    own = logp.gather(-1, chosen_R[wanted][:, None])[:, 0].tolist()
    best = logp.topk(max(1, max(asks[at].top_logprobs or 0 for at in wanted)))
    for place, at in enumerate(wanted):
        most = asks[at].top_logprobs or 0
        ids, values = best.indices[place, :most].tolist(), best.values[place, :most].tolist()
        found[at] = own[place], tuple(zip(ids, values, strict=True))
    return found
