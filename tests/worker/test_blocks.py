"""The mask of FlexAttention: the same as torch's own, found without a tensor of all pairs of tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from tests.present import untyped
from worker.model.attention import PADDING, PROMPT, Layout, block_mask


def chunks(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Llama 4's: a token sees those of its own chunk of 100 positions."""
    return (query >= key) & (query // 100 == key // 100)


def packed(width: int, *lengths_of_rows: tuple[Any, ...]) -> Layout:
    """Rows of a prompt, its answers and padding up to `width`."""
    positions, segments = [], []
    for prompt, *answers in lengths_of_rows:
        position, segment = list(range(prompt)), [PROMPT] * prompt
        for number, length in enumerate(answers, start=1):
            position += range(prompt, prompt + length)
            segment += [number] * length
        padding = width - len(position)
        positions.append(position + [0] * padding)
        segments.append(segment + [PADDING] * padding)
    return Layout.of_rows(torch.tensor(positions), torch.tensor(segments), blocks=True)


@pytest.mark.parametrize(
    "rule",
    [causal_mask_function, sliding_window_causal_mask_function(64), chunks],
    ids=["full", "window", "chunks"],
)
@pytest.mark.parametrize(
    "layout",
    [packed(1300, (260, 500, 130, 400), (500, 40, 3)), packed(128, (10, 20)), packed(1, (1,))],
    ids=["several blocks", "one block", "one token"],
)
def test_the_mask_is_that_of_torch(rule: Any, layout: Layout) -> None:
    rows, width = layout.query_position.shape

    ours = block_mask(layout, rule)

    theirs = create_block_mask(ours.mask_mod, rows, None, width, width, device="cpu")
    torch.testing.assert_close(ours.to_dense(), theirs.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for numbers, indices in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        used = torch.arange(ours.kv_indices.shape[-1]) < getattr(ours, numbers)[..., None]
        assert torch.equal(getattr(ours, indices)[used], getattr(theirs, indices)[used])


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[()] = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() >= tensor.nbytes:
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.slow
def test_a_long_row_needs_no_tensor_of_all_pairs() -> None:
    layout = packed(8192, (192, 4000, 4000))

    with untyped(LargestTensor)() as largest:
        mask = block_mask(layout, causal_mask_function)

    assert largest.elements <= 8192**2 / 8
    # Two answers that do not see each other: their blocks are skipped.
    assert mask.sparsity() > 70
