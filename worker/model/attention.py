"""Attention under a model's own mask rules, for answers that are packed behind their prompt and for cached decoding.

transformers calls `_mask` for each type of layer (full, sliding window, chunks) and `_attend` for each layer; both are
registered under NAME. `_mask` evaluates the rule of that type of layer on the positions of tokens instead of on their
places, and lets an answer see its prompt and itself only, and a branch of an answer only what is on its path. So one
row can hold a prompt and its answers, and a decoded token sees what it would see if its answer stood alone, whatever
the rules of the model are.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from worker.model.sizing import kernel_tokens
from worker.refusals import UnsupportedModel

NAME = "regraft"
PROMPT, PADDING = 0, -1  # segments; the answers of a row, or their branches depth first, are 1, 2, ...
EVERY_SEGMENT = 2**62  # more than there are

# With a mask, PyTorch prefers cuDNN's attention on an H100 (torch 2.13, cuDNN above 9.15). It builds a plan for each
# new shape, and nearly every micro-batch has one: 0.4 s forward and 0.5 s backward on a B200 (FunASR #3704), where the
# arithmetic takes 0.1 to 0.25 s. The memory-efficient kernel, which comes next, needs none.
torch.backends.cuda.enable_cudnn_sdp(False)

# Arguments without effect here: `_mask` implements windows, and the rest does not concern attention.
HARMLESS = frozenset(
    {"sliding_window", "position_ids", "use_cache", "output_attentions", "output_router_logits"}
)
# Arguments that would change the result, with the name of the feature.
FEATURES = {"indices": "sparse attention", "position_bias": "relative positions"}

MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (batch, head, query, key) -> bool, broadcast


@dataclass(frozen=True)
class Layout:
    """Positions and segments of the queries and keys of a forward pass: int64 [B, Tq] and [B, Tk]."""

    query_position: Tensor
    query_segment: Tensor
    key_position: Tensor
    key_segment: Tensor
    # Of the bias that stands for the mask on devices other than a CPU; None: a bool mask.
    bias_dtype: torch.dtype | None = None
    blocks: bool = False  # masks for FlexAttention, without a tensor of T^2 elements
    # int64 [B, Tk]: a key is seen by the segments from its own up to here, exclusive. With branches, those of a subtree
    # are numbered one after the other. None: the prompt is seen by all, and an answer by itself.
    seen_until: Tensor | None = None

    @staticmethod
    def of_rows(
        position: Tensor,
        segment: Tensor,
        bias_dtype: torch.dtype | None = None,
        blocks: bool = False,
        seen_until: Tensor | None = None,
    ) -> "Layout":
        """Every token of these rows is a query and a key."""
        return Layout(position, segment, position, segment, bias_dtype, blocks, seen_until)

    @property
    def key_until(self) -> Tensor:
        if self.seen_until is not None:
            return self.seen_until
        return torch.where(self.key_segment == PROMPT, EVERY_SEGMENT, self.key_segment + 1)


_LAYOUT: ContextVar[Layout | None] = ContextVar("layout", default=None)
_DECODING: ContextVar["GroupCache | None"] = ContextVar("decoding", default=None)


@contextmanager
def laid_out(layout: Layout, cache: "GroupCache | None" = None) -> Iterator[None]:
    """Have the masks of the forward pass inside made for this layout. `cache`: the one that the pass fills or reads."""
    # A model may drop keyword arguments on the way to its attention (stablelm, nemotron), so these travel beside it.
    layouts, caches = _LAYOUT.set(layout), _DECODING.set(cache)
    try:
        yield
    finally:
        _LAYOUT.reset(layouts)
        _DECODING.reset(caches)


BIAS_ROWS = 1024  # queries whose masks are evaluated at once, to keep temporary tensors small
BLOCK = 128  # tokens on a side of FlexAttention's blocks


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskRule = causal_mask_function,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | BlockMask | None:
    """The mask [B, 1, Tq, Tk] of one type of layer, for scaled_dot_product_attention or FlexAttention.

    A bool mask on a CPU. Elsewhere a bias of 0 and -inf: SDPA converts a bool mask to such a bias in every layer, and
    autograd keeps each copy (16 GiB at 16k tokens and 32 layers).

    Raises:
        UnsupportedModel: the model has a rule that reads the places of tokens (blocks of image tokens).
    """
    layout = _LAYOUT.get()
    if layout is None:  # a plain forward pass of the model, as outside this service
        plain: Tensor | None = sdpa_mask(
            batch_size, q_length, kv_length, mask_function=mask_function, use_vmap=use_vmap, **kwargs
        )
        return plain
    if use_vmap:
        raise UnsupportedModel(
            "The model is not supported: its attention mask depends on the places of tokens."
        )
    if layout.blocks:
        return block_mask(layout, mask_function)
    if layout.bias_dtype is None:
        return visible(layout, mask_function)
    (rows, queries), keys = layout.query_position.shape, layout.key_position.shape[1]
    bias = torch.full(
        (rows, 1, queries, keys), float("-inf"), dtype=layout.bias_dtype, device=layout.query_position.device
    )
    for first in range(0, queries, BIAS_ROWS):
        seen = visible(layout, mask_function, slice(first, first + BIAS_ROWS))
        bias[:, :, first : first + BIAS_ROWS].masked_fill_(seen, 0.0)
    return bias


def visible(layout: Layout, rule: MaskRule, queries: slice = slice(None)) -> Tensor:
    """bool [B, 1, Tq, Tk]: the model's own rule on positions, and the rule of segments.

    Padding attends to itself: a fully masked query would be NaN, which spreads through the batch.
    """
    query_position = layout.query_position[:, None, queries, None]
    query_segment = layout.query_segment[:, None, queries, None]
    key_position = layout.key_position[:, None, None, :]
    key_segment = layout.key_segment[:, None, None, :]
    rows, device = len(query_position), query_position.device
    batch = torch.arange(rows, device=device).view(-1, 1, 1, 1)
    own = rule(batch, torch.zeros_like(batch[:1]), query_position, key_position)
    related = (key_segment <= query_segment) & (query_segment < layout.key_until[:, None, None, :])
    seen = own & related & (key_segment != PADDING)
    if layout.query_position is layout.key_position:
        place = torch.arange(layout.key_position.shape[1], device=device)
        seen = seen | (place[queries, None] == place)
    return seen


def block_mask(layout: Layout, rule: MaskRule) -> BlockMask:
    """`visible` as FlexAttention takes it: blocks of BLOCK x BLOCK in which nothing is seen are skipped.

    All rows are one behind the other (`_in_one_row`), so that a kernel depends on the number of tokens alone. The mask
    equals what torch's create_block_mask makes of `seen`. That evaluates all pairs of tokens at once; here BIAS_ROWS
    queries of a row are evaluated at a time.
    """
    rows, width = layout.query_position.shape
    device = layout.query_position.device
    padding = -width % BLOCK
    rowwise = Layout.of_rows(
        torch.nn.functional.pad(layout.query_position, (0, padding)),
        torch.nn.functional.pad(layout.query_segment, (0, padding), value=PADDING),
        seen_until=torch.nn.functional.pad(layout.key_until, (0, padding)),
    )
    tokens = kernel_tokens(rows * (width + padding))
    tail = tokens - rows * (width + padding)
    position = torch.nn.functional.pad(rowwise.query_position.flatten(), (0, tail))
    segment = torch.nn.functional.pad(rowwise.query_segment.flatten(), (0, tail), value=PADDING)
    until = torch.nn.functional.pad(rowwise.key_until.flatten(), (0, tail))
    # A tensor, like the others: a kernel would be compiled anew for another number.
    row = torch.nn.functional.pad(
        torch.arange(rows, device=device).repeat_interleave(width + padding), (0, tail), value=-1
    )

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = rule(batch, head, position[query], position[key])
        of_query, of_key = segment[query], segment[key]
        related = (of_key <= of_query) & (of_query < until[key])
        in_row = (row[query] == row[key]) & (of_key != PADDING)
        # Padding attends to itself: the softmax of nothing is 0/0.
        return (own & related & in_row) | (query == key)

    stripes = [
        _pairs_in_blocks(visible(rowwise, rule, slice(first, first + BIAS_ROWS)))
        for first in range(0, width + padding, BIAS_ROWS)
    ]
    of_rows = torch.cat(stripes, dim=2)[:, 0]  # [B, query blocks, key blocks]
    pairs = torch.zeros(tokens // BLOCK, tokens // BLOCK, dtype=of_rows.dtype, device=device)
    pairs.fill_diagonal_(BLOCK)  # of the padding behind the rows
    blocks = (tokens - tail) // BLOCK
    pairs[:blocks, :blocks] = torch.block_diag(*of_rows)  # type: ignore[no-untyped-call]  # torch does not annotate it
    return BlockMask.from_kv_blocks(
        *_ordered((pairs > 0) & (pairs < BLOCK**2)),
        *_ordered(pairs == BLOCK**2),
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(tokens, tokens),
    )


def _in_one_row(tensor: Tensor, tokens: int) -> Tensor:
    """[B, H, T, d] -> [1, H, tokens, d]: each row padded to whole blocks, one behind the other, then padding.

    Always with the same strides: a kernel would be compiled anew for others.
    """
    rows, heads, width, size = tensor.shape
    padding = -width % BLOCK
    by_head = tensor.transpose(0, 1)
    if padding:
        by_head = torch.nn.functional.pad(by_head, (0, 0, 0, padding))
    joined = by_head.reshape(heads, rows * (width + padding), size)
    if tail := tokens - joined.shape[1]:
        joined = torch.nn.functional.pad(joined, (0, 0, 0, tail))
    return joined.contiguous()[None]


def _in_rows(tensor: Tensor, rows: int, width: int) -> Tensor:
    """Invert `_in_one_row`, with tokens before heads: [1, H, tokens, d] -> [B, T, H, d]."""
    stride = width + -width % BLOCK
    heads, size = tensor.shape[1], tensor.shape[3]
    by_row = tensor[0, :, : rows * stride].reshape(heads, rows, stride, size)
    return by_row[:, :, :width].permute(1, 2, 0, 3)


def _pairs_in_blocks(seen: Tensor) -> Tensor:
    """How many of the pairs of each block of BLOCK queries and BLOCK keys are True in `seen` [B, 1, Tq, Tk]."""
    queries, keys = -seen.shape[2] % BLOCK, -seen.shape[3] % BLOCK
    padded = torch.nn.functional.pad(seen, (0, keys, 0, queries))
    rows, heads, queries, keys = padded.shape
    blocks = padded.view(rows, heads, queries // BLOCK, BLOCK, keys // BLOCK, BLOCK)
    return blocks.sum((3, 5), dtype=torch.int32)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block has, and the key blocks in ascending order, those that it has first.

    Args:
        blocks: bool [query blocks, key blocks].
    """
    blocks = blocks[None, None]
    numbers = blocks.sum(-1, dtype=torch.int32)
    return numbers, blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)


class GroupCache(Cache):  # type: ignore[misc]  # transformers is not typed for us
    """Keys and values: of P prompts once, and of R rows' own tokens (Hkv heads of size d).

    Fill it with one forward over the prompts, call `expand` with the group of each row, then decode. Remove
    finished rows with `keep`, so that they are not computed. Rows that each have a copy of their prompt (`copy`) can be
    put in another order, and rows of another such cache can join them. All rows write the same column of the tails, so
    those that joined later have padding before their own tokens.
    """

    def __init__(self, prompt_lengths_P: Tensor, *, joined: bool = False) -> None:
        """`joined`: give the model prompt and tail in one tensor per row.

        Models whose attention changes keys after they were cached (latent attention keeps a compressed vector) need
        that. The others read the prompt once for all rows of its group.
        """
        self.joined = joined
        self.lengths_P = prompt_lengths_P
        self.prompt_keys: dict[int, Tensor] = {}  # by layer: [P, Hkv, Lp, d]
        self.prompt_values: dict[int, Tensor] = {}
        self._keys: dict[int, Tensor] = {}  # by layer: [R, Hkv, capacity, d]
        self._values: dict[int, Tensor] = {}
        self.layers: list[Any] = []  # transformers' own storage, unused
        self.length = 0  # columns of the tails, the one being computed included
        self.group_R: Tensor | None = None
        self.start_R: Tensor | None = None  # the column of each row's first own token
        self.copied = False
        self.slot_R: Tensor | None = None
        self.slots = 0
        self._width = int(prompt_lengths_P.max())

    @property
    def decoding(self) -> bool:
        return self.group_R is not None

    @property
    def is_sliding(self) -> list[bool]:
        return []

    def expand(self, group_R: Tensor) -> None:
        """Start decoding R rows; row r answers prompt group_R[r]. Rows of a group must be adjacent."""
        self.group_R, self.start_R = group_R, torch.zeros_like(group_R)
        self._place()

    def copy(self, prompt_R: Tensor) -> None:
        """Start decoding R rows, each with its own copy of prompt prompt_R[r]."""
        self._select_prompts(prompt_R)
        self.copied = True
        self.expand(torch.arange(len(prompt_R), device=prompt_R.device))

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows (indices into the current ones): ascending, or in any order after `copy`."""
        assert self.group_R is not None and self.start_R is not None
        self.start_R = self.start_R[rows]
        first = 0
        if self.copied:
            self._select_prompts(rows)
            self.group_R = torch.arange(len(rows), device=rows.device)
            first = int(self.start_R.min())  # no row has a token before this column
            self.start_R, self.length = self.start_R - first, self.length - first
        else:
            self.group_R = self.group_R[rows]
        for tails in (self._keys, self._values):
            for layer, tail in tails.items():
                tails[layer] = tail[:, :, first:][rows]
        self._place()

    def join(self, other: "GroupCache") -> None:
        """Append the rows of another cache, whose tails are still empty. Both have copied prompts."""
        assert self.start_R is not None and self.copied and other.copied and other.length == 0
        joining, width = len(other.lengths_P), max(self._width, other._width)
        self.start_R = torch.cat([self.start_R, self.start_R.new_full((joining,), self.length)])
        for mine, theirs in (
            (self.prompt_keys, other.prompt_keys),
            (self.prompt_values, other.prompt_values),
        ):
            for layer in mine:
                mine[layer] = torch.cat([_widened(mine[layer], width), _widened(theirs[layer], width)])
        for tails in (self._keys, self._values):
            for layer, tail in tails.items():
                # Zeros, not what is in memory: padding has a weight of 0, and 0 times NaN is NaN.
                tails[layer] = torch.cat([tail, tail.new_zeros(joining, *tail.shape[1:])])
        self.lengths_P, self._width = torch.cat([self.lengths_P, other.lengths_P]), width
        self.group_R = torch.arange(len(self.lengths_P), device=self.lengths_P.device)
        self._place()

    def _select_prompts(self, rows: Tensor) -> None:
        self.lengths_P = self.lengths_P[rows]
        self._width = int(self.lengths_P.max())
        for tensors in (self.prompt_keys, self.prompt_values):
            for layer, tensor in tensors.items():
                tensors[layer] = tensor[:, :, : self._width][rows]

    def _place(self) -> None:
        """Assign each row a slot in its group, so that the queries of a group are one block."""
        assert self.group_R is not None
        first = torch.searchsorted(self.group_R, self.group_R)
        self.slot_R = torch.arange(len(self.group_R), device=self.group_R.device) - first
        self.slots = int(self.slot_R.max()) + 1 if len(self.group_R) else 0

    def layout(self) -> Layout:
        """Of the next forward pass: over the prompts, or of one token a row after `start_token`."""
        place = torch.arange(self._width, device=self.lengths_P.device)
        padding = place >= self.lengths_P[:, None]
        if self.group_R is None:
            position = place.expand(len(self.lengths_P), -1)
            return Layout.of_rows(position, torch.where(padding, PADDING, PROMPT))
        assert self.start_R is not None
        length_R = self.lengths_P[self.group_R][:, None]
        tail = torch.arange(self.length, device=place.device) - self.start_R[:, None]
        position = torch.cat([place.expand(len(length_R), -1), length_R + tail], dim=1)
        own = torch.where(tail < 0, PADDING, 1)
        segment = torch.cat([torch.where(padding, PADDING, PROMPT)[self.group_R], own], dim=1)
        return Layout(position[:, -1:], torch.ones_like(length_R), position, segment)

    def to_groups(self, rows: Tensor) -> Tensor:
        """[R, Hkv, share, n] -> [P, Hkv, slots * share, n]: the queries of each group in one block."""
        assert self.group_R is not None
        prompts, (count, heads, share, n) = len(self.lengths_P), rows.shape
        if count == prompts * self.slots:  # no row was removed, so the layout is already right
            block = rows.view(prompts, self.slots, heads, share, n)
        else:
            block = rows.new_zeros(prompts, self.slots, heads, share, n)
            block[self.group_R, self.slot_R] = rows
        return block.transpose(1, 2).reshape(prompts, heads, self.slots * share, n)

    def to_rows(self, groups: Tensor, share: int) -> Tensor:
        """Invert `to_groups`: [P, Hkv, slots * share, n] -> [R, Hkv, share, n]."""
        assert self.group_R is not None
        prompts, heads, _, n = groups.shape
        block = groups.view(prompts, heads, self.slots, share, n).transpose(1, 2)
        if len(self.group_R) == prompts * self.slots:
            return block.reshape(-1, heads, share, n)
        return block[self.group_R, self.slot_R]

    def start_token(self) -> None:
        """Extend the tails by one token of each row. Call it before each decoding step."""
        self.length += 1

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model. Returns the keys and values of the prompts; of tails; or of both, joined."""
        if self.group_R is None:
            self.prompt_keys[layer_idx], self.prompt_values[layer_idx] = key, value
            return key, value
        tail = self._append(self._keys, layer_idx, key), self._append(self._values, layer_idx, value)
        if not self.joined:
            return tail
        prompt = self.prompt_keys[layer_idx], self.prompt_values[layer_idx]
        keys, values = (
            torch.cat([shared if self.copied else shared[self.group_R], own], dim=2)
            for shared, own in zip(prompt, tail, strict=True)
        )
        return keys, values

    def _append(self, tails: dict[int, Tensor], layer: int, new: Tensor) -> Tensor:
        tail = tails.get(layer)
        if tail is None or tail.shape[2] < self.length:
            # Grow by doubling: appending with cat would copy the whole cache for every token.
            grown = new.new_empty(new.shape[0], new.shape[1], max(16, 2 * (self.length - 1)), new.shape[3])
            if tail is not None:
                grown[:, :, : self.length - 1] = tail[:, :, : self.length - 1]
            tails[layer] = tail = grown
        tail[:, :, self.length - 1] = new[:, :, 0]
        return tail[:, :, : self.length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._width + self.length - 1 if self.decoding else 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


def _widened(tensor: Tensor, width: int) -> Tensor:
    """[P, Hkv, T, d] with zeros behind, up to `width`: padding has a weight of 0, and 0 times NaN is NaN."""
    return torch.nn.functional.pad(tensor, (0, 0, 0, width - tensor.shape[2]))


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The signature transformers calls: query [B, Hq, T, d], key and value [B, Hkv, S, d] -> [B, T, Hq, d].

    Args:
        attention_mask: None if `is_causal` says what is seen: `sdpa_mask` makes no mask then.
        softcap: scores become softcap * tanh(score / softcap) before the mask (Gemma 2).
        s_aux: one logit per head [Hq] that takes part in the softmax and has no value: an attention sink (gpt-oss).
        is_causal: None: as the module says.

    Raises:
        UnsupportedModel: the model passes an argument that changes the result and that is not implemented.
    """
    if ignored := [name for name, value in kwargs.items() if value is not None and name not in HARMLESS]:
        features = ", ".join(
            FEATURES.get(name, f"the argument {name!r} of its attention") for name in ignored
        )
        raise UnsupportedModel(f"The model is not supported: {features} cannot be computed here.")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if isinstance(attention_mask, BlockMask):
        return _in_blocks(query, key, value, attention_mask, scale, softcap, s_aux), None
    cache = _DECODING.get()
    if cache is not None and cache.decoding and not cache.joined:
        layer: int = module.layer_idx  # type: ignore[assignment]
        return _decode(cache, layer, query, key, value, attention_mask, scale, softcap, s_aux), None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and attention_mask is None and query.shape[2] > 1
    if softcap is not None or s_aux is not None:
        if causal:
            attention_mask = _causal(query.shape[2], key.shape[2], query.device)
        return _explicit(query, key, value, attention_mask, scale, softcap, s_aux), None
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        _repeat_heads(key, query.shape[1]),
        _repeat_heads(value, query.shape[1]),
        attn_mask=attention_mask,
        is_causal=causal,
        scale=scale,
    )
    return output.transpose(1, 2), None


def _in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """FlexAttention: [B, Hq, T, d] -> [B, T, Hq, dv], with all rows in one. Key heads are not repeated in memory.

    A sink is one more term in the softmax's denominator: with the logarithm of the denominator without it, `lse`, each
    output is multiplied by exp(lse) / (exp(lse) + exp(sink)).
    """

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    rows, heads, width, _ = query.shape
    tokens = mask.seq_lengths[0]
    attend = _compiled() if query.is_cuda else flex_attention
    output, rest = attend(
        *(_in_one_row(tensor, tokens) for tensor in (query, key, value)),
        score_mod=None if softcap is None else capped,
        block_mask=mask,
        scale=scale,
        enable_gqa=heads != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if sinks is not None:
        # In float32: the share of a sink is rounded away in bfloat16.
        share = torch.sigmoid(rest.lse.float() - sinks.float().view(1, -1, 1))
        output = (output.float() * share[..., None]).to(output.dtype)
    return _in_rows(output, rows, width)


@cache
def _compiled() -> Any:
    """FlexAttention as a kernel: uncompiled, it computes T^2 scores. One for each size of `kernel_tokens`."""
    torch._dynamo.config.recompile_limit = max(256, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_attention, dynamic=False)


def _repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def _causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """The mask that `is_causal` of SDPA stands for: bool [T, S], aligned at the first query and the first key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril()


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with soft-capped scores or sinks, which SDPA does not have: [B, Hq, T, d] -> [B, T, Hq, dv]."""
    heads = query.shape[1]
    scores = (query * scale) @ _repeat_heads(key, heads).transpose(-1, -2)
    weights = _weights(scores, mask, softcap, None if sinks is None else sinks.view(1, heads, 1, 1))
    output: Tensor = weights @ _repeat_heads(value, heads)
    return output.transpose(1, 2)


def _weights(scores: Tensor, mask: Tensor | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """The softmax over keys, in float32, of scores [..., T, S] in the dtype that they have.

    Args:
        mask: bool or bias, broadcast to the scores.
        sinks: broadcast to [..., T, 1].
    """
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        # The least number as in eager attention, not -inf: with -inf, a query that sees nothing (padding in a plain
        # forward pass) is NaN, which the next layer spreads to its whole row.
        least = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, least) if mask.dtype == torch.bool else scores + mask
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
    with_sink = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    return with_sink.softmax(-1, dtype=torch.float32)[..., :-1].to(scores.dtype)


def _decode(
    cache: GroupCache,
    layer: int,
    query: Tensor,
    tail_key: Tensor,
    tail_value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One token a row: query [R, Hq, 1, d], tails [R, Hkv, t, d] -> [R, 1, Hq, dv]. One softmax over both parts.

    A group's queries are stacked into one block, [P, Hkv, slots * Hq/Hkv, d], so its prompt is read once for
    all of them; heads that share a key head (grouped-query attention) are stacked the same way.
    """
    rows, query_heads, _, size = query.shape
    heads = tail_key.shape[1]
    share = query_heads // heads
    prompt_key, prompt_value = cache.prompt_keys[layer], cache.prompt_values[layer]
    prompt_length = prompt_key.shape[2]

    query = query.reshape(rows, heads, share, size) * scale
    shared_scores = cache.to_rows(cache.to_groups(query) @ prompt_key.transpose(-1, -2), share)
    own_scores = query @ tail_key.transpose(-1, -2)
    weights = _weights(
        torch.cat([shared_scores, own_scores], dim=-1),
        mask,  # [R, 1, 1, Lp + t]
        softcap,
        None if sinks is None else sinks.view(1, heads, share, 1),
    )

    shared = cache.to_groups(weights[..., :prompt_length]) @ prompt_value
    output = cache.to_rows(shared, share) + weights[..., prompt_length:] @ tail_value
    return output.reshape(rows, 1, query_heads, -1)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)
