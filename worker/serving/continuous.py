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
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear

from worker.checks import compatibility
from worker.model import attention, policy
from worker.model.architecture import refuse_beyond_full_attention, refusing, suspects
from worker.model.decoding import CopiedDecoding
from worker.model.generation import DecodingBatch, RowSettings, join
from worker.model.json_schema import Vocabulary
from worker.model.lora import FrozenLinear
from worker.model.policy import Base
from worker.model.template import stop_ids_of
from worker.model.token_constraints import RequestedModel, TokenConstraints
from worker.refusals import UnsupportedModel
from worker.serving.engine import GenerationRequest, Token

log = logging.getLogger(__name__)

MAX_ROWS = 64
# Rows times the longest of them: bounds the cache, which takes up to twice that where the longest prompt and the
# longest answer are in different rows.
MAX_CACHED_TOKENS = 131_072
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


class ServedModel:
    """A base model whose linear layers apply a separate adapter to each span of rows. Used by one thread."""

    def __init__(self, base: Base) -> None:
        self.context, self.tokenizer = base.context, base.tokenizer
        self._spans: list[Span] = []
        self._joined = False  # the prompt's keys and the answer's are given to the model in one tensor
        head = base.model.get_output_embeddings()
        self._linear: set[str] = set()
        for name, module in base.model.named_modules():
            if isinstance(module, nn.Linear) and module is not head:
                self._linear.add(name)
                module.forward = self._forward_of(name, module)  # type: ignore[method-assign,assignment]
        self._decoder, self._of_head = base.parts.decoder, base.parts.logits
        base.model.set_attn_implementation(attention.NAME)
        self._head = FrozenLinear(head, trained=False, float32=True)
        self.device: torch.device = head.weight.device
        self.configured_stops = policy.configured_stops(base.model)
        self._refuse_unsupported(base)

    @torch.inference_mode()
    def _refuse_unsupported(self, base: Base) -> None:
        """Compare what reads a prompt and what writes a token with transformers' own eager attention.

        Raises:
            UnsupportedModel: they differ, or the config says that they would.
        """
        config = base.model.config
        compatibility.refuse_by_config(config, self.context)
        refuse_beyond_full_attention(config, self.context)
        with refusing(config), compatibility.in_float32(base.model, list(base.parts.layers or [])):
            try:
                gap = self._gap(base)
            except Exception:  # latent attention, which needs prompt and answer in one tensor
                gap = float("inf")
            if not gap <= compatibility.TOLERANCE:
                self._joined = True
                gap = self._gap(base)
        if not gap <= compatibility.TOLERANCE:
            raise UnsupportedModel(
                f"{type(base.model).__name__} is not supported: its log-probabilities differ from transformers' own by "
                f"{gap:.3g}. Likely because of: {suspects(config)}."
            )

    def _gap(self, base: Base) -> float:
        """The largest difference of a log-probability, in nats, in rows of unequal length of which one joins later."""
        texts = [[(i * step) % 23 + 3 for i in range(length)] for step, length in ((1, 24), (3, 11), (5, 17))]
        tokens = torch.tensor([text[-2:] for text in texts], device=self.device)
        self.use([])
        decoding, other = (
            self.decoding([text[:-3] for text in texts[:2]], [0, 1]),
            self.decoding([texts[2][:-2]], [0]),
        )
        decoding.start()
        third = torch.tensor([text[-3] for text in texts[:2]], device=self.device)
        first = torch.cat([decoding.next(third), other.start()])
        decoding.join(other)
        hidden = torch.stack([first, decoding.next(tokens[:, 0]), decoding.next(tokens[:, 1])], dim=1)
        gaps = []
        for text, ours in zip(texts, self.logits(hidden), strict=True):
            with compatibility.eager(base.model):
                whole = torch.tensor([text], device=self.device)
                reference = base.model(input_ids=whole, use_cache=False).logits[0, -3:]
            gaps.append((reference.float().log_softmax(-1) - ours.log_softmax(-1)).abs().max())
        return float(torch.stack(gaps).nan_to_num(float("inf")).max())

    @cached_property
    def vocabulary(self) -> Vocabulary:
        stops = stop_ids_of(self.configured_stops, self.tokenizer)
        return Vocabulary(self.tokenizer, int(self._head.layer.weight.shape[0]), stops)

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
        """Read an adapter.

        Raises:
            UnsupportedModel: it is on other layers than linear ones.
        """
        adapter = ServedAdapter.load(folder, self.device)
        if others := sorted(adapter.layers.keys() - self._linear):
            raise UnsupportedModel(
                f"The adapter is not served by regraft's own engine: it changes {others[0]}, which is no linear layer. "
                "Serve it with another engine, or merge it into its base model."
            )
        return adapter

    def use(self, loras: Sequence[ServedAdapter | None]) -> None:
        """Compute the rows of the next forward pass with these adapters. Equal ones are neighbours."""
        self._spans = _spans(loras)

    def decoding(self, prompts_P: Sequence[Sequence[int]], prompt_R: Sequence[int]) -> CopiedDecoding:
        """Begin answers to these prompts; row r answers prompt prompt_R[r]."""
        return CopiedDecoding(self._decoder, prompts_P, prompt_R, self.device, self._joined)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., h] -> logits [..., V] in float32."""
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


def is_steered(ask: GenerationRequest) -> bool:
    return bool(ask.response_schema) or ask.thinking_budget is not None


@dataclass(eq=False)
class DecodingRow:
    """One answer on its way."""

    ask: GenerationRequest
    lora: ServedAdapter | None
    loop: asyncio.AbstractEventLoop
    tokens: "asyncio.Queue[Token | Exception]" = field(default_factory=asyncio.Queue)
    left: bool = False  # abandoned: its tokens are no longer read

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
    """Implements worker.serving.engine.Engine with transformers. Its own thread computes whenever there is a row."""

    def __init__(
        self,
        base: Base,
        *,
        most_rows: int = MAX_ROWS,
        most_prompt_tokens: int = MAX_PROMPT_TOKENS,
        served: Callable[[Base], ServedModel] = ServedModel,
        tool_parser: str | None = None,
    ) -> None:
        self.model = served(base)
        self.tool_parser = tool_parser
        self.context, self.tokenizer = self.model.context, self.model.tokenizer
        self.most_rows, self.most_prompt_tokens = most_rows, most_prompt_tokens
        self.steps = 0  # forward passes that wrote a token
        self._loras: OrderedDict[Path, ServedAdapter] = OrderedDict()
        self._reading = threading.Lock()  # of adapters: each request asks for its own in a thread
        self._arrivals: queue.SimpleQueue[DecodingRow | None] = queue.SimpleQueue()
        self._waiting: list[DecodingRow] = []
        self._rows: list[DecodingRow] = []
        self._batch: DecodingBatch[CopiedDecoding] | None = None  # of `_rows`, in their order
        self._thread = threading.Thread(target=self._run, name="inference", daemon=True)
        self._thread.start()

    def stop_ids(self, template: str | None) -> frozenset[int]:
        return stop_ids_of(self.model.configured_stops, self.tokenizer, template)

    async def generate(self, ask: GenerationRequest) -> AsyncGenerator[Token, None]:
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
                self._drop()
                self._admit()
                if self._batch is not None:
                    self._write(self._batch)
                    self._drop()
            except Exception as cause:
                log.exception("a batch of %d failed", len(self._rows))
                failed, self._rows, self._batch = self._rows, [], None
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
        self._waiting = self._waiting[len(chosen) :]
        chosen.sort(key=lambda row: id(row.lora))
        places = {prompt: place for place, prompt in enumerate(dict.fromkeys(row.prompt for row in chosen))}
        # Moved to `_rows` at once: if this method raises, its caller passes the exception to the rows in `_rows`.
        old, batch, self._batch = self._rows, self._batch, None
        self._rows = [*old, *chosen]
        loras: dict[int, ServedAdapter | None] = {id(row.lora): row.lora for row in chosen}
        self.model.use([loras[key] for key, _ in places])
        decoding = self.model.decoding([ids for _, ids in places], [places[row.prompt] for row in chosen])
        settings = [
            RowSettings(row.ask.temperature, row.ask.max_tokens, row.ask.stop_ids, row.ask.top_p)
            for row in chosen
        ]
        fresh = DecodingBatch(self.model, decoding, settings, [self._constraints(row) for row in chosen])
        self._choose(chosen, fresh)
        chosen = _staying(chosen, fresh)
        rows = [*old, *chosen]
        if batch is None:
            batch = fresh
        elif chosen:
            join(batch, fresh)
            order = sorted(range(len(rows)), key=lambda at: id(rows[at].lora))
            if order != sorted(order):
                batch.keep(torch.tensor(order, device=self.model.device))
                rows = [rows[at] for at in order]
        self._rows, self._batch = rows, batch if rows else None

    def _constraints(self, row: DecodingRow) -> TokenConstraints | None:
        """None if every token may always come, or if its schema raises an exception, which ends this answer alone."""
        if not is_steered(row.ask):
            return None
        model = RequestedModel(self.model.vocabulary, row.ask.reasoning)
        try:
            [constraints] = TokenConstraints.of(model, row.ask, 1)
        except Exception as cause:
            _fail(row, cause)
            return None
        return constraints

    def _write(self, batch: DecodingBatch[CopiedDecoding]) -> None:
        self.steps += 1
        self.model.use([row.lora for row in self._rows])
        batch.advance()
        self._choose(self._rows, batch)

    def _choose(self, rows: Sequence[DecodingRow], batch: DecodingBatch[CopiedDecoding]) -> None:
        """Choose a token for each of these rows, hand it on, and mark those that have ended."""
        logits_RV = batch.logits()
        step = batch.step(logits_RV, torch.tensor([_draw(row.dice) for row in rows]))
        found = logprobs(logits_RV, [row.ask for row in rows], step.token_R)
        chosen = zip(rows, step.token_R.tolist(), step.last_R.tolist(), found, strict=True)
        news: dict[asyncio.AbstractEventLoop, list[tuple[DecodingRow, Token]]] = {}
        for at, (row, token_id, last, (logprob, top)) in enumerate(chosen):
            if at in step.failed:
                _fail(row, step.failed[at])
                continue
            row.left = row.left or last
            news.setdefault(row.loop, []).append((row, Token(token_id, last, logprob, top)))
        for loop, tokens in news.items():
            # One call for all of them: each wakes the loop up.
            loop.call_soon_threadsafe(_hand_on, tokens)

    def _drop(self) -> None:
        """Drop the rows that have ended, or that are no longer read."""
        if self._batch is not None:
            self._rows = _staying(self._rows, self._batch)
        if not self._rows:
            self._batch = None


def _staying(rows: Sequence[DecodingRow], batch: DecodingBatch[CopiedDecoding]) -> list[DecodingRow]:
    """The rows that have not left; the batch keeps these alone, unless there are none."""
    stay = [at for at, row in enumerate(rows) if not row.left]
    if 0 < len(stay) < len(rows):
        batch.keep(torch.tensor(stay, device=batch.model.device))
    return [rows[at] for at in stay]


def _fail(row: DecodingRow, cause: Exception) -> None:
    """End only this answer; the others of the batch continue."""
    row.left = True
    row.loop.call_soon_threadsafe(row.tokens.put_nowait, cause)


def _hand_on(tokens: Sequence[tuple[DecodingRow, Token]]) -> None:
    for row, token in tokens:
        row.tokens.put_nowait(token)


def _draw(dice: random.Random) -> float:
    return dice.getrandbits(24) / 2**24  # exact in float32, and never 1


Top = tuple[tuple[int, float], ...]


def logprobs(
    logits_RV: Tensor, asks: Sequence[GenerationRequest], chosen_R: Tensor
) -> list[tuple[float | None, Top]]:
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
