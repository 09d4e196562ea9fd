"""Compute the hidden states of answers token by token, in the way that the probe found to be exact for the model.

`Decoding` starts with the hidden state that predicts each answer's first token, and then takes one token per row.
worker/model/generation.py chooses the tokens.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import causal_mask_function

from worker.model import attention
from worker.model.attention import GroupCache

# The ways in which the transformers sampler decodes, the quickest first.
# shared: the prompt's keys once per group; joined: with the row's own in one tensor; forked: the model's own cache, of
# prompts padded on the left, copied for each row after the prompt; padded: each row computes its prompt, and rows that
# have ended stay in the batch; alone: the same for one prompt at a time; recomputed: without a cache.
Decode = Literal["shared", "joined", "forked", "padded", "alone", "recomputed"]


class Decoding(Protocol):
    """R = P * group_size rows, of which `keep` leaves some. Row r answers prompt r // group_size."""

    def start(self) -> Tensor:
        """Hidden states [R, h] that predict the first tokens."""
        ...

    def next(self, token_R: Tensor) -> Tensor:
        """Hidden states [R, h] that predict what follows these tokens."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Continue with these rows only (indices into the current ones, ascending)."""
        ...


class GroupDecoding:
    """With a GroupCache: each prompt is computed and stored once."""

    def __init__(
        self, decoder: Any, prompts_P: Sequence[Sequence[int]], size: int, device: torch.device, joined: bool
    ) -> None:
        self.decoder = decoder
        self.size = size
        self.device = device
        self.ids_P, lengths_P = right_padded(prompts_P, device)
        self.cache = GroupCache(lengths_P, joined=joined)

    def start(self) -> Tensor:
        hidden = self._prompts()
        group_R = torch.arange(len(hidden), device=self.device).repeat_interleave(self.size)
        self.cache.expand(group_R)
        return hidden[group_R]

    def next(self, token_R: Tensor) -> Tensor:
        self.cache.start_token()
        return self._forward(token_R[:, None])[:, 0]

    def keep(self, rows: Tensor) -> None:
        self.cache.keep(rows)

    def _prompts(self) -> Tensor:
        """Compute the prompts. Hidden states [P, h] of their last tokens."""
        hidden = self._forward(self.ids_P)
        last: Tensor = hidden[torch.arange(len(hidden), device=self.device), self.cache.lengths_P - 1]
        return last

    def _forward(self, ids: Tensor) -> Tensor:
        layout = self.cache.layout()
        with attention.laid_out(layout, self.cache):
            hidden: Tensor = self.decoder(
                input_ids=ids,
                position_ids=layout.query_position,
                attention_mask=self._mask(layout),
                past_key_values=self.cache,
                use_cache=True,
            ).last_hidden_state
        return hidden

    def _mask(self, layout: attention.Layout) -> Tensor:
        """A 2-D mask: the model makes its own for each type of layer, with the rules of attention.NAME."""
        return torch.ones_like(layout.key_position)


class CopiedDecoding(GroupDecoding):
    """With a GroupCache in which each row has a copy of its prompt: rows join and leave at any token.

    A prompt with several answers is still computed once. Row r answers prompt prompt_R[r]. For models in which all
    layers attend to all earlier tokens.
    """

    def __init__(
        self,
        decoder: Any,
        prompts_P: Sequence[Sequence[int]],
        prompt_R: Sequence[int],
        device: torch.device,
        joined: bool,
    ) -> None:
        super().__init__(decoder, prompts_P, 1, device, joined)
        self.prompt_R = torch.tensor(prompt_R, device=device)

    def start(self) -> Tensor:
        hidden = self._prompts()[self.prompt_R]
        self.cache.copy(self.prompt_R)
        return hidden

    def join(self, other: "CopiedDecoding") -> None:
        """Continue with these rows and, behind them, the other's, which have not been given a token yet."""
        self.cache.join(other.cache)

    def _mask(self, layout: attention.Layout) -> Tensor:
        """A 4-D mask, which the attention of every model takes as it is (Falcon's does not know attention.NAME)."""
        return attention.visible(layout, causal_mask_function)


class RowDecoding:
    """With the model's own cache, and prompts padded on the left.

    Where rows of the cache can be selected (`forked`), each prompt is computed once, its cache is copied for each row,
    and rows that have ended leave. Elsewhere each row computes its prompt, and rows that have ended are computed to the
    end.
    """

    def __init__(
        self, decoder: Any, prompts_P: Sequence[Sequence[int]], size: int, device: torch.device, forked: bool
    ) -> None:
        self.decoder = decoder
        self.size = size
        self.forked = forked
        width = max(map(len, prompts_P))
        rows = prompts_P if forked else [prompt for prompt in prompts_P for _ in range(size)]
        self.ids = torch.zeros(len(rows), width, dtype=torch.int64, device=device)
        self.mask = torch.zeros_like(self.ids)
        for row, prompt in enumerate(rows):
            self.ids[row, width - len(prompt) :] = torch.tensor(prompt, device=device)
            self.mask[row, width - len(prompt) :] = 1
        self.padded = min(map(len, prompts_P)) < width
        self.live = torch.arange(len(rows), device=device)
        self.cache: Any = None
        self.positions = "position_ids" in inspect.signature(decoder.forward).parameters

    def start(self) -> Tensor:
        last = self._forward(self.ids, (self.mask.cumsum(-1) - 1).clamp(min=0))
        if not self.forked:
            return last
        group_R = self.live.repeat_interleave(self.size)
        self._select(group_R)
        return last[group_R]

    def next(self, token_R: Tensor) -> Tensor:
        token = torch.zeros_like(self.mask[:, 0])
        token[self.live] = token_R
        position = self.mask.sum(-1, keepdim=True)
        self.mask = torch.cat([self.mask, torch.ones_like(token)[:, None]], dim=1)
        return self._forward(token[:, None], position)

    def keep(self, rows: Tensor) -> None:
        if self.forked:
            self._select(rows)
        else:
            self.live = self.live[rows]

    def _select(self, rows: Tensor) -> None:
        select_rows(self.cache, rows)
        self.mask = self.mask[rows]
        self.live = torch.arange(len(rows), device=self.mask.device)

    def _forward(self, ids: Tensor, position: Tensor) -> Tensor:
        extra = {"attention_mask": self.mask} if self.padded else {}
        if self.positions:
            extra["position_ids"] = position
        output = self.decoder(input_ids=ids, past_key_values=self.cache, use_cache=True, **extra)
        self.cache = output.past_key_values
        hidden: Tensor = output.last_hidden_state[:, -1]
        return hidden[self.live]


def select_rows(cache: Any, rows: Tensor) -> None:
    """Replace the rows of a cache of transformers by these, some of which may be repeated.

    Raises:
        AttributeError: the cache is of another kind.
    """
    # MiniMax's cache selects its further states there. The base class's method knows no recurrent states,
    # which `reorder_cache` does.
    if type(cache).batch_select_indices is not Cache.batch_select_indices:
        cache.batch_select_indices(rows)
    else:
        cache.reorder_cache(rows)


def row_bytes(decoder: Any, device: torch.device) -> tuple[int, int]:
    """The bytes of a row in the model's own cache: of each token, and beside its tokens (recurrent states)."""
    sizes = []
    for tokens in (8, 16):  # more than a convolution looks back, fewer than a window
        decoding = RowDecoding(decoder, [[0] * tokens], 1, device, forked=False)
        with torch.inference_mode():
            decoding.start()
        tensors = {tensor.data_ptr(): tensor for tensor in _tensors(decoding.cache, set())}
        sizes.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
    each = (sizes[1] - sizes[0]) // 8
    return each, max(0, sizes[0] - 8 * each)


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors in an object, its containers and its attributes."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen and not isinstance(
        value, str | int | float | type | torch.dtype | torch.device
    ):
        seen.add(id(value))
        inside = (
            value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        )
        for one in [*inside, *getattr(value, "__dict__", {}).values()]:
            yield from _tensors(one, seen)


class RecomputedDecoding:
    """Without a cache: the whole row again for each token. For models whose cache is not one of transformers' kinds."""

    def __init__(
        self, decoder: Any, prompts_P: Sequence[Sequence[int]], size: int, device: torch.device
    ) -> None:
        self.decoder = decoder
        self.device = device
        self.rows = [list(prompt) for prompt in prompts_P for _ in range(size)]

    def start(self) -> Tensor:
        ids, lengths = right_padded(self.rows, self.device)
        hidden: Tensor = self.decoder(input_ids=ids, use_cache=False).last_hidden_state
        return hidden[torch.arange(len(ids), device=self.device), lengths - 1]

    def next(self, token_R: Tensor) -> Tensor:
        for row, token in zip(self.rows, token_R.tolist(), strict=True):
            row.append(token)
        return self.start()

    def keep(self, rows: Tensor) -> None:
        self.rows = [self.rows[row] for row in rows.tolist()]


def right_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows as one tensor [R, T], with zeros behind the shorter ones, and their lengths [R].

    A causal model never looks to the right, so no mask is needed.
    """
    lengths = torch.tensor([len(row) for row in rows], device=device)
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
    return ids.to(device), lengths
