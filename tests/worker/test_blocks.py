"""FlexAttention over rows that stand one behind the other: torch's own mask, the same gradients, and few kernels."""

import copy
import math
from collections.abc import Callable, Sequence
from random import Random
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.present import present, untyped
from tests.worker.test_training import asked, relative_difference
from worker.model import attention
from worker.model.attention import PADDING, PROMPT, Layout, block_mask, visible
from worker.model.batch import RowCost, micro_batches, padded_tokens, row_width, tensors_of
from worker.model.policy import Base, Policy, Route
from worker.model.sizing import kernel_tokens
from worker.model.token_logprobs import logprobs
from worker.progress import PROGRESS
from worker.training.gradient import LocalGradient
from worker.training.loss import StepValues
from worker.training.policy_loss import PolicyLoss
from worker.types import Pack, TrainingSequence


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


RULES = pytest.mark.parametrize(
    "rule",
    [causal_mask_function, sliding_window_causal_mask_function(64), chunks],
    ids=["full", "window", "chunks"],
)


@RULES
@pytest.mark.parametrize(
    "layout",
    [packed(700, (260, 200, 30, 200), (300, 40, 3)), packed(128, (10, 20)), packed(1, (1,))],
    ids=["several blocks", "one block", "one token"],
)
def test_the_mask_is_that_of_torch(rule: Any, layout: Layout) -> None:
    ours = block_mask(layout, rule)

    [tokens] = set(ours.seq_lengths)
    theirs = create_block_mask(ours.mask_mod, 1, None, tokens, tokens, device="cpu")
    torch.testing.assert_close(ours.to_dense(), theirs.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for numbers, indices in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        used = torch.arange(ours.kv_indices.shape[-1]) < getattr(ours, numbers)[..., None]
        assert torch.equal(getattr(ours, indices)[used], getattr(theirs, indices)[used])


@RULES
def test_a_token_sees_in_one_long_row_what_it_sees_in_its_own(rule: Any) -> None:
    layout, width = packed(300, (100, 80, 90), (120, 40, 3), (300,)), 300

    mask = block_mask(layout, rule)

    place = torch.arange(mask.seq_lengths[0])
    seen = mask.mask_mod(torch.tensor(0), torch.tensor(0), place[:, None], place)
    expected = torch.eye(len(place), dtype=torch.bool)  # padding sees itself
    for row, alone in enumerate(visible(layout, rule)[:, 0]):
        own = slice(row * 384, row * 384 + width)  # whole blocks
        expected[own, own] = alone
    assert torch.equal(seen, expected)


def dense_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score_mod: Callable[..., Tensor] | None,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
    return_aux: Any,
) -> tuple[Tensor, Any]:
    """FlexAttention by its definition, with a backward pass, which torch's has on GPUs only."""
    repeats = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ keys.transpose(-1, -2) * scale
    place, first = torch.arange(query.shape[2]), torch.tensor(0)
    if score_mod is not None:
        scores = score_mod(scores, first, first, place[:, None], place)
    scores = scores.masked_fill(~block_mask.mask_mod(first, first, place[:, None], place), float("-inf"))
    return scores.softmax(-1) @ values, SimpleNamespace(lse=scores.logsumexp(-1))


@pytest.mark.parametrize(
    "more",
    [{}, {"softcap": 2.0}, {"s_aux": torch.tensor([0.3, -1.0, 0.0, 2.0])}],
    ids=["plain", "soft cap", "sinks"],
)
@pytest.mark.parametrize("width", [200, 256])
def test_rows_have_the_outputs_and_gradients_that_they_have_under_a_dense_mask(
    more: dict[str, Any], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "flex_attention", dense_flex)
    attend = ALL_ATTENTION_FUNCTIONS[attention.NAME]
    layout = packed(width, (50, 60, 40), (90, 100), (30, 20, 10))
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(3, heads, width, 16, generator=generator) for heads in (4, 2, 2)]
    toward = torch.randn(3, width, 4, 16, generator=generator)
    found = []
    for mask in (block_mask(layout, causal_mask_function), visible(layout, causal_mask_function)):
        query, key, value = leaves = [one.clone().requires_grad_() for one in inputs]
        output, _ = attend(torch.nn.Module(), query, key, value, mask, **more)
        found.append([output.detach(), *torch.autograd.grad((output * toward).sum(), leaves)])

    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def answer(tokens: int, first: int = 5) -> TrainingSequence:
    ids = tuple(first + number % 20 for number in range(tokens))
    return TrainingSequence(ids, (0.0,) * tokens, (1.0,) * tokens, 1.0)


def test_the_gradient_of_a_policy_is_that_under_a_dense_mask(
    make_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "flex_attention", dense_flex)
    policy = make_policy(moved=True)
    packs = [Pack((3, 4, 5, 6), (answer(9), answer(4, 9))), Pack((7, 8), (answer(20, 6),))]
    found = []
    for blocks in (True, False):
        policy.use(Route("packed", blocks=blocks))
        logprobs(policy, tensors_of(packs), 1.0).sum().backward()  # type: ignore[no-untyped-call]
        found.append([present(one.grad).clone() for one in policy.trainable])
        for one in policy.trainable:
            one.grad = None

    assert relative_difference(*found) < 1e-5


def test_a_kernel_is_compiled_for_a_number_of_tokens_and_not_for_each_shape(
    make_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's own tracing, which guards sizes, strides, and what a mask reads."""
    graphs: list[int] = []

    def note(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(next(one.shape[2] for one in inputs if isinstance(one, Tensor) and one.dim() == 4))
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(flex_attention, backend=note, dynamic=False)
    monkeypatch.setattr(attention, "flex_attention", compiled)
    policy = make_policy(moved=True)
    policy.use(Route("packed", blocks=True))
    with torch.no_grad():
        for lengths in ([20] * 4, [200, 150], [400]):
            packs = [Pack((3, 4, 5, 6), (answer(length),)) for length in lengths]
            logprobs(policy, tensors_of(packs), 1.0)

    assert graphs == [512], "of 4 x 128, 2 x 256 and 1 x 512 tokens"


class OnGpu(Policy):
    """Says that its attention is compiled."""

    compiles_attention = True


def test_the_progress_counts_the_kernels_that_a_step_compiles(tiny_base: Base) -> None:
    policy = OnGpu(copy.deepcopy(tiny_base), rank=4, alpha=8, seed=0)
    local = LocalGradient(PolicyLoss(policy, asked({"loss": "grpo"})), token_budget=400)
    packs = [Pack((3, 4, 5, 6), (answer(length),)) for length in (80, 90, 150, 200, 330)]
    seen: list[tuple[Any, ...]] = []

    def note(*arguments: Any) -> None:
        now = PROGRESS.now()
        seen.append((now["phase"], now["done"], now["of"]))

    policy.causal.get_input_embeddings().register_forward_pre_hook(note)
    with PROGRESS.phase("training"):
        local.add(packs, StepValues())
        local.repeat(StepValues())

    once = [("compiling", 0, 2), ("compiling", 1, 2)]
    assert [one for one in seen if one[0] == "compiling"] == once
    again = seen[len(seen) // 2 :]
    assert again == [("training", None, None)] * len(again), "the second pass"


def reasoning_job(seed: int, longest: int) -> list[Pack]:
    """16 prompts with 16 answers each, whose lengths differ as those of a reasoning model: by their prompt and much."""
    random = Random(seed)
    packs = []
    for _ in range(16):
        usual = random.gauss(math.log(1500), 0.4)
        lengths = [max(2, min(longest, int(random.lognormvariate(usual, 0.8)))) for _ in range(16)]
        packs.append(Pack((1,) * random.randint(100, 400), tuple(map(answer, lengths))))
    return packs


EIGHT_BILLION = RowCost(token=6 * 8_000_000_000, pair=12 * 32 * 4096)


@pytest.mark.parametrize("cost", [None, EIGHT_BILLION], ids=["packed", "cheapest parts"])
@pytest.mark.parametrize(
    ("longest", "budget"), [(4096, 4608), (4096, 8192), (8192, 8704), (16_384, 16_896)], ids=str
)
def test_the_first_step_of_a_reasoning_job_compiles_at_most_8_kernels(
    longest: int, budget: int, cost: RowCost | None
) -> None:
    shapes, kernels, added = set(), set(), []
    batches = list(micro_batches(reasoning_job(0, longest), budget, "cuda", cost=cost))
    for batch in batches:
        shapes.add((len(batch), row_width(max(pack.tokens for pack in batch), "cuda")))
        tokens = padded_tokens(batch, "cuda")
        kernels.add(kernel_tokens(tokens))
        added.append(kernel_tokens(tokens) / tokens)

    assert len(kernels) <= 8 < len(shapes)
    assert mean(added) < 1.12, "of attention's tensors; nothing is computed of it"


@given(st.integers(1, 100_000))
def test_the_sizes_of_kernels_suffice_are_few_and_waste_little(tokens: int) -> None:
    size = kernel_tokens(tokens)

    assert size >= tokens and size % attention.BLOCK == 0
    assert kernel_tokens(size) == size
    assert tokens <= 128 or size < 2 * tokens
    assert tokens <= 1024 or size < 1.25 * tokens


def test_the_sizes_up_to_32k_are_24() -> None:
    assert len({kernel_tokens(tokens) for tokens in range(1, 2**15 + 1)}) == 4 + 4 * 5


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
