"""Sizes of vLLM's engines that its options and the memory plan share. Pure.

Each has few values: vLLM compiles a model anew for another rank, context, or number of sequences or tokens, and finds
its compiled code for the same ones in a cache (worker/compile_caches.py).
"""

from dataclasses import dataclass, replace
from typing import Self

# vLLM's LoRA buffers come in these heights; a rank between two of them is padded with zeros.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
SEQUENCES = (256, 512, 1024)  # decoded side by side, at most
# Of an engine whose cache has states of so few sequences.
FEW_SEQUENCES = (1, 8, 32, 64, 128)
BATCHED_TOKENS = (2048, 8192)  # of one step
SMALLEST_CONTEXT = 1024


@dataclass(frozen=True)
class EngineSizes:
    """The sizes of an engine beside its cache, as its options have them."""

    context: int  # tokens of one sequence, at most
    sequences: int = SEQUENCES[0]
    batched_tokens: int = BATCHED_TOKENS[0]
    longest: int = 0  # tokens of the longest sequence, if the context was rounded up from it
    # Of one block of the cache of a model with recurrent states, at most; 0: it has none.
    state_block_bytes: int = 0

    @property
    def smallest(self) -> Self:
        """The sizes with which the engine needs the least memory beside its cache."""
        return replace(
            self,
            context=self.longest or self.context,
            sequences=min(self.sequences, SEQUENCES[0]),
            batched_tokens=BATCHED_TOKENS[0],
        )

    def within(self, cache_bytes: int) -> Self:
        """The sizes with no more sequences than the cache has blocks for their recurrent states.

        vLLM refuses to capture its graphs for more sequences than blocks.
        """
        if not self.state_block_bytes:
            return self
        most = min(self.sequences, max(1, cache_bytes // self.state_block_bytes))
        return replace(self, sequences=max(size for size in (*FEW_SEQUENCES, *SEQUENCES) if size <= most))


@dataclass(frozen=True)
class EngineShare:
    """The memory of an engine that can be lowered: its cache, and the sizes that its buffers depend on."""

    cache_bytes: int  # of each of its processes
    sizes: EngineSizes


# The largest first: what an engine can be given beside the smallest sizes, for which the margin of a plan has room.
LARGER = (
    *((sequences, BATCHED_TOKENS[-1]) for sequences in reversed(SEQUENCES)),
    (SEQUENCES[0], BATCHED_TOKENS[0]),
)


def slot_rank(rank: int) -> int:
    """The rank of the buffer for an adapter of this rank, up to 512."""
    return next(height for height in RANKS if height >= rank)


def context_bucket(tokens: int) -> int:
    """The context of an engine for sequences of up to these tokens: a power of two, or one and a half of it.

    These are eleven up to 32,768. From 1,024 on, a sequence of it needs at most half as much again of the cache; below,
    it needs that of 1,024 tokens.
    """
    size = SMALLEST_CONTEXT
    while size < tokens:
        is_power = size & (size - 1) == 0
        size += size // 2 if is_power else size // 3
    return size


def is_useful(sequences: int, side_by_side: int) -> bool:
    """Whether an engine has more answers at once than the next smaller number of sequences allows."""
    smaller = [size for size in SEQUENCES if size < sequences]
    return not smaller or side_by_side > smaller[-1]
