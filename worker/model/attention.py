"""Attention for a group of answers that share a prompt: the prompt's keys are stored and read once.

transformers calls `_attend` for every layer (it is registered under NAME). Without a GroupCache it is PyTorch's
scaled_dot_product_attention under the mask we pass. With one, it first fills the cache with the prompts, then
decodes one token a row: each row attends to its group's prompt and to its own tail, in one softmax.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from worker.refusals import UnsupportedModel

NAME = "regraft"

# With a mask, PyTorch prefers cuDNN's attention on an H100 (torch 2.13, cuDNN above 9.15). It builds a plan for each
# new shape, and nearly every micro-batch has one: 0.4 s forward and 0.5 s backward on a B200 (FunASR #3704), where the
# arithmetic takes 0.1 to 0.25 s. The memory-efficient kernel, which comes next, needs none.
torch.backends.cuda.enable_cudnn_sdp(False)

# Arguments without effect here: worker/model/support.py checks windows, and the rest does not concern attention.
HARMLESS = frozenset(
    {"sliding_window", "position_ids", "use_cache", "is_causal", "output_attentions", "output_router_logits"}
)
# Arguments that would change the result, with the name of the feature.
FEATURES = {
    "s_aux": "attention sinks",
    "softcap": "soft-capped attention scores",
    "indices": "sparse attention",
}


class GroupCache(Cache):  # type: ignore[misc]  # transformers is not typed for us
    """Keys and values: of P prompts once, and of R rows' own tokens (Hkv heads of size d).

    Fill it with one forward over the prompts, call `expand` with the group of each row, then decode. Remove
    finished rows with `keep`, so that they are not computed.
    """

    def __init__(self, prompt_lengths_P: Tensor) -> None:
        self.prompt_mask_P = _lengths_to_mask(prompt_lengths_P)  # bool [P, Lp]
        self.prompt_keys: dict[int, Tensor] = {}  # by layer: [P, Hkv, Lp, d]
        self.prompt_values: dict[int, Tensor] = {}
        self._keys: dict[int, Tensor] = {}  # by layer: [R, Hkv, capacity, d]
        self._values: dict[int, Tensor] = {}
        self.length = 0  # tokens in every row's tail, the one being computed included
        self.group_R: Tensor | None = None
        self.slot_R: Tensor | None = None
        self.slots = 0

    @property
    def decoding(self) -> bool:
        return self.group_R is not None

    def expand(self, group_R: Tensor) -> None:
        """Start decoding R rows; row r answers prompt group_R[r]. Rows of a group must be adjacent."""
        self.group_R = group_R
        self._place()

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows (indices into the current ones, ascending)."""
        assert self.group_R is not None
        self.group_R = self.group_R[rows]
        for tails in (self._keys, self._values):
            for layer, tail in tails.items():
                tails[layer] = tail[rows]
        self._place()

    def _place(self) -> None:
        """Assign each row a slot in its group, so that the queries of a group are one block."""
        assert self.group_R is not None
        first = torch.searchsorted(self.group_R, self.group_R)
        self.slot_R = torch.arange(len(self.group_R), device=self.group_R.device) - first
        self.slots = int(self.slot_R.max()) + 1 if len(self.group_R) else 0

    def to_groups(self, rows: Tensor) -> Tensor:
        """[R, Hkv, share, n] -> [P, Hkv, slots * share, n]: the queries of each group in one block."""
        assert self.group_R is not None
        prompts, (count, heads, share, n) = len(self.prompt_mask_P), rows.shape
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
        """Extend every row's tail by one token. Call it before each decoding step."""
        self.length += 1

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model. Returns the keys and values so far: of the prompts, or of the rows' tails."""
        if not self.decoding:
            self.prompt_keys[layer_idx], self.prompt_values[layer_idx] = key, value
            return key, value
        return self._append(self._keys, layer_idx, key), self._append(self._values, layer_idx, value)

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
        return self.prompt_mask_P.shape[1] + self.length if self.decoding else 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


def no_mask(input_ids: Tensor) -> Tensor:
    """Return an empty mask for decoding, which needs none: a 4-D mask keeps transformers from creating one."""
    return torch.ones(input_ids.shape[0], 1, 1, 1, dtype=torch.bool, device=input_ids.device)


def _lengths_to_mask(lengths: Tensor) -> Tensor:
    return torch.arange(int(lengths.max()), device=lengths.device)[None] < lengths[:, None]


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    group_cache: GroupCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The signature transformers calls: query [B, Hq, T, d], key and value [B, Hkv, S, d] -> [B, T, Hq, d].

    Raises:
        UnsupportedModel: the model passes an argument that changes the result and that is not implemented.
    """
    if ignored := [name for name, value in kwargs.items() if value is not None and name not in HARMLESS]:
        features = ", ".join(
            FEATURES.get(name, f"the argument {name!r} of its attention") for name in ignored
        )
        raise UnsupportedModel(f"The model is not supported: {features} cannot be computed here.")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if group_cache is not None and group_cache.decoding:
        return _decode(group_cache, module.layer_idx, query, key, value, scale), None  # type: ignore[arg-type]
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        _repeat_heads(key, query.shape[1]),
        _repeat_heads(value, query.shape[1]),
        attn_mask=attention_mask,
        is_causal=attention_mask is None and query.shape[2] > 1,
        scale=scale,
    )
    return output.transpose(1, 2), None


def _repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def _decode(
    cache: GroupCache, layer: int, query: Tensor, tail_key: Tensor, tail_value: Tensor, scale: float
) -> Tensor:
    """One token a row: query [R, Hq, 1, d], tails [R, Hkv, t, d] -> [R, 1, Hq, d]. One softmax over both parts.

    A group's queries are stacked into one block, [P, Hkv, slots * Hq/Hkv, d], so its prompt is read once for
    all of them; heads that share a key head (grouped-query attention) are stacked the same way.
    """
    rows, query_heads, _, size = query.shape
    heads = tail_key.shape[1]
    share = query_heads // heads
    prompt_key, prompt_value = cache.prompt_keys[layer], cache.prompt_values[layer]
    prompt_length = prompt_key.shape[2]

    query = query.reshape(rows, heads, share, size) * scale
    scores = cache.to_groups(query) @ prompt_key.transpose(-1, -2)
    scores = scores.masked_fill(~cache.prompt_mask_P[:, None, None], float("-inf"))
    own = query @ tail_key.transpose(-1, -2)
    weights = (
        torch.cat([cache.to_rows(scores, share), own], dim=-1)
        .softmax(-1, dtype=torch.float32)
        .to(query.dtype)
    )

    shared = cache.to_groups(weights[..., :prompt_length]) @ prompt_value
    output = cache.to_rows(shared, share) + weights[..., prompt_length:] @ tail_value
    return output.reshape(rows, 1, query_heads, size)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
