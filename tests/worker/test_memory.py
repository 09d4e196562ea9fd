"""What a job needs of memory: numbers that can be checked by hand, and what follows from them."""

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._C import dtype
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from bench.long import group
from bench.roofline import Counted, count, count_pass, llama, trainer
from core.registry import Device
from core.settings import Settings
from core.units import GIB
from graders.types import Grade
from tests.fakes import learn
from tests.families.zoo import FAMILIES
from tests.present import present, untyped
from tests.worker.test_training import asked, drawn, prompt, relative_difference, sampling
from worker import main_memory
from worker.model import attention, batch, memory, sizing
from worker.model.batch import Tensors
from worker.model.engine_sizes import EngineSizes, context_bucket
from worker.model.head import Computation, entropy, through_head
from worker.model.lora import FrozenLinear
from worker.model.model_structure import Head
from worker.model.policy import Policy
from worker.model.sizing import DoesNotFit, Machine, workload
from worker.model.value_head import ValueHead
from worker.training.policy_loss import PolicyLoss
from worker.training.trainer import PeftTrainer
from worker.types import Group, Pack, TrainingSequence

# Shapes of published models, from their config.json.
QWEN3_4B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_8B = QWEN3_4B | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
QWEN3_14B = QWEN3_8B | {
    "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40
}  # fmt: skip
QWEN3_32B = QWEN3_14B | {"intermediate_size": 25_600, "num_hidden_layers": 64, "num_attention_heads": 64}
LLAMA_70B_CONFIG = {
    "model_type": "llama", "vocab_size": 128_256, "hidden_size": 8192, "intermediate_size": 28_672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
W4A16 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
}  # fmt: skip
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
LARGE = present(sizing.shape_of_config(QWEN3_8B, 2))
H100 = Machine("cuda", 78 * GIB, "vllm")
# 8 prompts of up to 1,024 tokens, 8 answers of up to 1,024.
WORK = workload(
    rank=16, prompt=1024, completion=1024, batch=8, group=8, valid_rows=16, eval_samples=1
)  # fmt: skip


def qwen3_8b(layers: int) -> Qwen3Config:
    return Qwen3Config(**QWEN3_8B | {"num_hidden_layers": layers})


def llama_8b(layers: int) -> LlamaConfig:
    return llama(128_256, 4096, 14_336, layers, 32, 8)


def estimated(shape: sizing.Shape | None = LARGE, machine: Machine = H100, **changes: Any) -> sizing.Estimate:
    needs = {"rank": 32, "token_budget": 16_384, "cache": 10 * GIB, "checkpointed": False} | changes
    assert shape is not None
    return sizing.estimate(shape, machine=machine, **needs)


class TestPackedBases:
    # GiB of the weights in bfloat16, fp8 and 4 bits, and of a job with 8,192 tokens: with vLLM in each of these, and in
    # 4 bits without an engine. Counted by hand, for the decision to keep bases packed.
    TABLE = (
        (QWEN3_8B, (15.3, 8.8, 5.7), (43, 30, 24, 16)),
        (QWEN3_14B, (27.5, 15.2, 9.2), (70, 45, 33, 22)),
        (QWEN3_32B, (61.0, 32.0, 17.9), (142, 84, 56, 36)),
        (LLAMA_70B_CONFIG, (131, 67.7, 36.8), (291, 164, 102, 62)),
    )

    @pytest.mark.parametrize(("config", "weights", "jobs"), TABLE)
    def test_weights_and_jobs_need_what_their_formats_have_bits_for(
        self, config: dict[str, Any], weights: tuple[float, ...], jobs: tuple[float, ...]
    ) -> None:
        shapes = [
            present(sizing.shape_of_config(config | {"quantization_config": stored}, 2))
            for stored in (None, FP8, W4A16)
        ]
        needs = [sizing.least(shape, 8192, sampler="vllm") for shape in shapes]
        needs.append(sizing.least(shapes[-1], 8192, sampler="transformers"))

        assert [shape.weight_bytes / GIB for shape in shapes] == pytest.approx(weights, rel=0.01)
        assert [need.total / GIB for need in needs] == pytest.approx(jobs, rel=0.05)

    def test_packed_layers_have_no_copies_on_a_cpu(self) -> None:
        packed = present(sizing.shape_of_config(QWEN3_8B | {"quantization_config": W4A16}, 4))
        cpu = Machine("cpu", 64 * GIB, "transformers", reordered=True)

        head = 151_936 * 4096 * 4
        assert estimated(packed, cpu).weights == packed.weight_bytes + 2 * head

    def test_the_layers_that_the_config_leaves_plain_count_in_full(self) -> None:
        ignored = W4A16 | {"ignore": ["lm_head", r"re:.*down_proj"]}
        some, all_of_them = (
            present(sizing.shape_of_config(QWEN3_8B | {"quantization_config": stored}, 2))
            for stored in (ignored, W4A16)
        )

        down = 36 * 4096 * 12_288
        assert all_of_them.packed.parameters - some.packed.parameters == down
        assert some.weight_bytes - all_of_them.weight_bytes == down * 2 - down * 4.125 // 8

    def test_they_are_not_sharded_over_gpus(self) -> None:
        packed = present(sizing.shape_of_config(LLAMA_70B_CONFIG | {"quantization_config": W4A16}, 2))

        with pytest.raises(
            DoesNotFit, match=r"because they are packed: use a larger GPU, or set `sampler = .transformers"
        ):
            sizing.plan_sharded("big", packed, WORK, replace(H100, available=30 * GIB), gpus=8)


class TestEstimate:
    def test_a_narrow_head_on_a_cpu_has_copies_in_float32(self) -> None:
        """Its products are of float32 copies: of the weights, and of the gradients of a chunk's logits."""
        on_cpu, on_gpu = (estimated(machine=replace(H100, device=device)).head for device in ("cpu", "cuda"))

        assert on_cpu - on_gpu == 4 * (151_936 * 4096 + 512 * 151_936)
        wide = present(sizing.shape_of_config(QWEN3_8B, 4))
        assert estimated(wide, replace(H100, device="cpu")).head == on_gpu

    def test_the_copies_are_what_the_real_head_allocates(self) -> None:
        """The peak of a chunk's forward and backward pass, as torch's allocator counts it."""
        vocabulary, hidden, tokens = 8000, 256, sizing.HEAD_CHUNK
        layer = nn.Linear(hidden, vocabulary, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        computation = Computation(FrozenLinear(layer, float32=True), Head(), 1.0, entropy)
        states = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        target_M = torch.randint(0, vocabulary, (tokens,))

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            logp_M, _ = through_head(computation, states, target_M, None)
            logp_M.sum().backward()  # type: ignore[no-untyped-call]

        sizes = [
            one.nbytes()
            for one in untyped(profiled).profiler.kineto_results.events()
            if one.name() == "[memory]"
        ]
        peak = max(itertools.accumulate(sizes))
        shape = replace(LARGE, vocabulary=vocabulary, hidden=hidden)
        planned = estimated(shape, replace(H100, device="cpu")).head
        # The gradient of each log-probability is in the plan of the activations.
        assert 0.97 * planned < peak - 4 * tokens * hidden < 1.02 * planned

    def test_an_engine_that_sleeps_keeps_the_slots_of_each_of_its_processes_in_main_memory(self) -> None:
        """Of each adapted layer, the matrix on the side of the hidden states is whole in each process."""
        alone, shared = (sizing.pinned_bytes(LARGE, WORK, 1, parallel) for parallel in (1, 2))

        assert shared - alone == 2 * (
            2 * sizing.slot_bytes(LARGE, 16, tensor_parallel=2) - sizing.slot_bytes(LARGE, 16)
        )
        assert shared > alone

    @pytest.mark.parametrize("title", ["Gemma 2", "gpt-oss"])
    def test_soft_caps_and_sinks_keep_the_scores_of_each_head(self, title: str) -> None:
        [family] = [one for one in FAMILIES if one.title == title]
        shape = memory.shape_of(family.config(), torch.float32)

        assert shape.keeps_scores
        fused = estimated(replace(shape, keeps_scores=False), token_budget=1000).attention
        scores = 2 * 4 * 1000**2 * shape.heads * shape.layers
        assert estimated(shape, token_budget=1000).attention == fused + scores

    def test_the_parts_are_those_of_the_formulas(self) -> None:
        plain = estimated()

        assert (plain.copies, plain.weights) == (2, 2 * LARGE.parameters)
        assert plain.adapter == 16 * 36 * 32 * (4 * 4096 + 2 * 4096 + 2048 + 3 * (4096 + 12288))
        assert plain.attention == 2 * 16_384**2  # one bfloat16 bias for all layers
        assert plain.head == 512 * 151_936 * 10
        assert plain.cache == 10 * GIB
        assert plain.total == 2 * plain.weights + plain.slots + plain.parts + plain.cache + plain.margin

    def test_an_engine_has_a_buffer_for_an_adapter_on_all_layers_whatever_the_job_adapts(self) -> None:
        """In the precision of the weights, with the next rank that vLLM has."""
        on_all = 36 * (4 * 4096 + 2 * 4096 + 2048 + 3 * (4096 + 12288)) * 2

        assert estimated(rank=20).slots == 32 * on_all
        assert estimated(rank=20, targets="attention").slots == 32 * on_all
        assert estimated().engine == estimated().weights + estimated().slots
        assert "slots 0.2, " in str(estimated())
        assert estimated(machine=replace(H100, sampler="transformers")).slots == 0
        assert estimated(full=True).slots == 0

    def test_checkpointing_keeps_the_layers_inputs_and_one_layer(self) -> None:
        one_layer = sizing.saved_bytes_per_token(LARGE, 32)
        plain, checkpointed = estimated(), estimated(checkpointed=True)

        assert plain.activations - checkpointed.activations == 16_384 * (35 * one_layer - 36 * 2 * 4096)

    def test_a_cpu_keeps_a_bias_of_each_layer(self) -> None:
        there = Machine("cpu", 0, "transformers")

        assert estimated(machine=there, token_budget=1000).attention == 1000**2 * (1 + 4 * 36)
        assert estimated(machine=there, token_budget=1000, checkpointed=True).attention == 1000**2 * 5

    @pytest.mark.parametrize(
        ("tokens", "checkpointed", "gib"), [(1016, False, 3.9), (2040, False, 6.3), (2040, True, 3.1)]
    )
    def test_it_is_above_the_peaks_that_were_measured_on_a_cpu(
        self, tokens: int, checkpointed: bool, gib: float
    ) -> None:
        """SmolLM2-135M in float32, rank 16: the whole process while it trained."""
        config = {
            "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
            "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        }  # fmt: skip
        there = Machine("cpu", 0, "transformers", reordered=True)

        found = estimated(
            sizing.shape_of_config(config, 4),
            there,
            rank=16,
            token_budget=tokens,
            cache=0,
            checkpointed=checkpointed,
        )

        assert gib * GIB <= found.total <= 1.35 * gib * GIB

    def test_all_weights_take_18_bytes_a_parameter_in_bfloat16_and_16_in_float32(self) -> None:
        """Of Qwen3-8B: weights of 2 bytes, a float32 copy, a float32 gradient and two moments."""
        parameters = 8_190_735_360
        narrow, wide = (estimated(replace(LARGE, bytes_each=each), full=True) for each in (2, 4))

        assert narrow.weights * narrow.copies + narrow.optimizer == parameters * (2 * 2 + 4 + 4 + 8)
        assert wide.optimizer == parameters * (4 + 8)
        # Ranks exchange weights and gradients in one float32 vector.
        several = estimated(machine=replace(H100, ranks=2), full=True)
        assert several.optimizer - narrow.optimizer == 4 * parameters
        assert (narrow.adapter, narrow.reference) == (0, 0)
        assert estimated(full=True, references=2).reference == 2 * 2 * parameters
        # Of the head's 151,936 x 4,096 weights, the sum of the gradients of all chunks.
        assert narrow.head - estimated().head == 2 * 151_936 * 4096

    def test_copies_in_another_layout_are_not_kept_of_weights_that_change(self) -> None:
        cpu = Machine("cpu", 64 * GIB, "transformers", reordered=True)

        assert (
            estimated(machine=cpu, full=True).weights == LARGE.weight_bytes < estimated(machine=cpu).weights
        )

    def test_it_reads_as_a_sum(self) -> None:
        shown = str(estimated())

        total, _, parts = shown.partition(" GiB: ")
        assert parts.startswith("weights 2 x 15.3, adapter 1.3, slots 0.2, activations")
        numbers = [float(part.split()[-1]) for part in parts.split(", ")]
        assert abs(sum(numbers) + 15.26 - float(total)) < 0.5

    @pytest.mark.parametrize(
        ("config", "dtype", "checkpointed"),
        [
            pytest.param(qwen3_8b(4), torch.bfloat16, False, id="Qwen3"),
            pytest.param(qwen3_8b(4), torch.bfloat16, True, id="Qwen3, checkpointed"),
            pytest.param(llama_8b(4), torch.bfloat16, False, id="Llama"),
            pytest.param(llama_8b(4), torch.bfloat16, True, id="Llama, checkpointed"),
            pytest.param(qwen3_8b(4), torch.float32, False, id="Qwen3 in float32"),
        ],
    )
    @pytest.mark.parametrize("answer", [225, 993])  # 2,048 and 8,192 tokens
    @pytest.mark.slow
    def test_it_is_at_most_15_percent_above_what_the_real_code_keeps(
        self, config: Any, dtype: dtype, checkpointed: bool, answer: int
    ) -> None:
        """The trainer's own forward and backward pass of four layers of an 8 B model, on tensors without data."""
        shape = memory.shape_of(config, dtype)
        gradient, found = trainer(config, "packed", checkpointed=checkpointed, dtype=dtype), Counted()

        count(gradient, [group(answer)], found)

        tokens = found.tokens
        assert tokens in (2048, 8192)
        planned = sizing.estimate(
            shape,
            rank=16,
            token_budget=tokens,
            cache=0,
            checkpointed=checkpointed,
            machine=Machine("cuda", 0, "vllm"),
        ).activations
        # Alive beside what is saved: gradients of a layer, and of a checkpointed layer what is computed again.
        planned -= tokens * 4 * (2 * shape.intermediate + 4 * shape.hidden)
        planned -= tokens * sizing.saved_bytes_per_token(shape, 16) if checkpointed else 0
        assert found.saved <= planned <= 1.15 * found.saved

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("config", [qwen3_8b(4), llama_8b(4)], ids=["Qwen3", "Llama"])
    @pytest.mark.slow
    def test_with_all_weights_trained_it_is_at_most_15_percent_above_what_the_real_code_keeps(
        self, config: Any, dtype: dtype
    ) -> None:
        shape, found = memory.shape_of(config, dtype), Counted()

        count(trainer(config, "packed", dtype=dtype, full=True), [group(225)], found)

        planned = estimated(shape, token_budget=2048, rank=0, full=True).activations
        planned -= 2048 * 4 * (2 * shape.intermediate + 4 * shape.hidden)  # gradients of a layer
        assert found.tokens == 2048
        assert found.saved <= planned <= 1.15 * found.saved

    @pytest.mark.parametrize(
        ("kind", "sizes"),
        [
            ("gemma3_text", {"head_dim": 256, "sliding_window": 1024}),  # four norms in a layer
            ("olmo2", {}),  # norms after the products
            ("phi3", {"pad_token_id": 0}),  # gate and up in one product
            ("starcoder2", {}),  # no gate
            ("nemotron", {}),
            ("cohere", {}),  # one norm in a layer
            ("qwen3_moe", {"moe_intermediate_size": 1792, "num_experts": 16, "num_experts_per_tok": 8}),
        ],
    )
    @pytest.mark.slow
    def test_it_is_at_most_20_percent_above_what_other_families_keep(
        self, kind: str, sizes: dict[str, Any]
    ) -> None:
        common = {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "vocab_size": 32000,
        }
        config = AutoConfig.for_model(kind, num_hidden_layers=3, num_key_value_heads=8, **common | sizes)
        shape, found = memory.shape_of(config, torch.bfloat16), Counted()

        count(trainer(config, "packed", checkpointed=False, dtype=torch.bfloat16), [group(225)], found)

        # With the input of the last norm, and the gradient of the head in float32.
        planned = 3 * sizing.saved_bytes_per_token(shape, 16) + (2 + 4) * shape.hidden
        assert 0.99 * found.saved <= found.tokens * planned <= 1.2 * found.saved

    @pytest.mark.parametrize("adapter_weight", [0.1, 1.0])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.slow
    def test_the_hidden_states_of_a_value_head_are_in_the_plan(
        self, dtype: dtype, adapter_weight: float
    ) -> None:
        config = qwen3_8b(1)
        saved = []
        for has_values in (False, True):
            gradient, found = trainer(config, "packed", dtype=dtype), Counted()
            if has_values:
                gradient.value_head = ValueHead(4096, "meta", adapter_weight=adapter_weight)

            def numbers(tensors: Tensors, loss: PolicyLoss = gradient) -> Tensor:
                logp_M, _, value_M = loss.forward(tensors)
                return logp_M if value_M is None else logp_M + value_M

            count_pass(gradient, [group(225)], found, numbers)
            saved.append(found.saved)

        shape = memory.shape_of(config, dtype)
        without, planned = (
            estimated(shape, token_budget=2048, has_values=one).activations for one in (False, True)
        )
        kept = saved[1] - saved[0]
        assert kept > 0.8 * 4 * 4096 * 2048, "of the trained tokens; the rest are prompts"
        assert kept <= planned - without

    @pytest.mark.slow
    def test_llama_3_8b_keeps_at_most_10_gib_for_2048_tokens(self) -> None:
        """Counted in 4 of its 32 layers."""
        found = Counted()

        count(trainer(llama_8b(4), "packed"), [group(225)], found)

        assert found.tokens == 2048
        assert 8 * found.saved <= 10 * GIB


class TestPlan:
    def test_8b_at_2048_tokens_keeps_its_activations_on_an_80_gib_gpu(self) -> None:
        made = sizing.plan("Qwen3-8B", LARGE, WORK, H100)

        assert not made.checkpointed
        assert made.token_budget >= 2048
        assert made.cache_bytes == 64 * LARGE.cache_bytes(2048) or made.estimate.total <= 78 * GIB

    @given(
        st.integers(1, 2000), st.integers(1, 6000), st.integers(1, 64), st.integers(2, 32),
        st.sampled_from([24, 40, 78, 139]), st.sampled_from(["vllm", "transformers"]),
        st.sampled_from([QWEN3_4B, QWEN3_8B, QWEN3_14B]),
    )  # fmt: skip
    @pytest.mark.slow
    def test_what_is_planned_fits_and_is_enough(
        self, prompt: Any, completion: Any, batch: Any, group: Any, gib: Any, sampler: Any, config: Any
    ) -> None:
        shape = sizing.shape_of_config(config, 2)
        work = workload(
            rank=16,
            prompt=prompt,
            completion=completion,
            batch=batch,
            group=group,
            valid_rows=8,
            eval_samples=1,
        )
        there = Machine("cuda", gib * GIB, sampler)
        try:
            assert shape is not None
            made = sizing.plan("m", shape, work, there)
        except DoesNotFit as refused:
            assert shape is not None
            smallest = sizing.estimate(
                shape, rank=16, token_budget=sizing.bucket(work.longest),
                cache=min(sizing.least_cache(shape, work, there), sizing.wanted_cache(shape, work, there)),
                checkpointed=True, machine=there,
            )  # fmt: skip
            assert smallest.total > there.available
            assert f"m at {prompt + completion} tokens needs " in str(refused)
            return
        assert made.estimate.total <= there.available
        assert made.token_budget == sizing.bucket(made.token_budget) >= work.longest
        assert shape is not None
        assert made.cache_bytes <= sizing.wanted_cache(shape, work, there)
        one = shape.cache_bytes(work.longest) if sampler == "vllm" else shape.token_cache_bytes * work.longest
        assert made.cache_bytes >= one

    def test_the_cache_comes_before_kept_activations_up_to_32_sequences(self) -> None:
        """14 B twice leaves 23 GiB of 78: activations are computed twice, and the cache gets the rest."""
        shape = sizing.shape_of_config(QWEN3_14B, 2)

        assert shape is not None
        made = sizing.plan("Qwen3-14B", shape, WORK, H100)

        assert made.checkpointed
        assert made.cache_bytes >= 32 * shape.cache_bytes(2048)

    def test_more_than_the_job_can_fill_is_not_taken(self) -> None:
        shape = sizing.shape_of_config(QWEN3_4B, 2)
        small = workload(rank=16, prompt=100, completion=100, batch=2, group=2, valid_rows=1, eval_samples=1)

        assert shape is not None
        made = sizing.plan("m", shape, small, H100)

        assert made.cache_bytes == max(600 * shape.token_cache_bytes, shape.cache_bytes(200))
        assert made.token_budget == sizing.bucket(made.token_budget) >= 4096

    def test_what_the_operator_sets_is_taken_as_it_is(self) -> None:
        made = sizing.plan("m", LARGE, WORK, replace(H100, kv_cache_bytes=3 * GIB, token_budget=4096))

        assert made.cache_bytes == 3 * GIB
        assert made.token_budget == 4096

    def test_a_cache_that_holds_no_sequence_is_refused_by_the_settings_name(self) -> None:
        at_8192 = replace(WORK, prompt=4096, completion=4096)

        with pytest.raises(
            DoesNotFit,
            match=r"m at 8192 tokens needs a KV cache of 1\.14 GiB for one sequence, and REGRAFT_KV_CACHE_GIB is 1\.",
        ):
            sizing.plan("m", LARGE, at_8192, replace(H100, kv_cache_bytes=GIB))

    def test_all_weights_that_do_not_fit_are_refused_with_numbers(self) -> None:
        work, alone = replace(WORK, full=True, references=1), replace(H100, sampler="transformers")

        with pytest.raises(DoesNotFit, match=r"weights 15.3, optimizer 122.1, reference 15.3") as refused:
            sizing.plan("Qwen3-8B", LARGE, work, alone)
        with pytest.raises(DoesNotFit, match=r"optimizer 152.6"):
            sizing.plan_sharded("Qwen3-8B", LARGE, work, alone, gpus=8)
        assert "Choose train 'lora', a smaller model or" in str(refused.value)

    def test_vllm_has_a_copy_of_all_weights_and_sleeps_beside_what_the_optimizer_keeps(self) -> None:
        """Of 200 GiB: 15.3 of weights twice, 122.1 of the optimizer. What is computed comes in addition."""
        work, there = replace(WORK, full=True), replace(H100, available=200 * GIB, may_sleep=True)

        awake = sizing.plan_sharded("Qwen3-8B", LARGE, work, there, gpus=1)
        assert (awake.sleeps, awake.estimate.copies, awake.degree) == (False, 2, 1)
        found = sizing.plan("Qwen3-8B", LARGE, work, replace(there, sleeps=True)).estimate
        assert found.sampling == 2 * found.weights + found.optimizer + found.buffers + found.cache + 4 * GIB
        assert found.learning == found.weights + found.parts + found.margin
        tried = r"Tried with the weights sharded over 1, 2 GPUs, and with vLLM asleep while the job learns\.$"
        with pytest.raises(DoesNotFit, match=tried):
            sizing.plan_sharded("Qwen3-8B", LARGE, work, replace(there, available=78 * GIB), gpus=2)

    def test_what_does_not_fit_is_refused_with_numbers(self) -> None:
        shape = sizing.shape_of_config(QWEN3_14B, 2)
        there = Machine("cuda", 40 * GIB, "vllm", gpu_class="l40s")

        assert shape is not None
        with pytest.raises(DoesNotFit) as refused:
            sizing.plan("Qwen3-14B", shape, replace(WORK, prompt=4096, completion=4096), there)

        said = str(refused.value)
        assert said.startswith("Qwen3-14B at 8192 tokens needs ")
        assert "weights 2 x 27.5, " in said
        assert "; the GPU class `l40s` has 40.0 GiB. Choose a smaller" in said

    def test_an_engine_on_several_gpus_has_a_part_of_the_weights_and_of_the_heads_on_each(self) -> None:
        one = estimated()
        four = estimated(machine=replace(H100, tensor_parallel=4))

        assert one.total - four.total == one.weights * 3 // 4 + one.slots - four.slots
        assert one.slots / 4 < four.slots < one.slots, "one matrix of each layer is whole on every GPU"
        assert f"weights {one.weights / GIB:.1f} + {one.weights / 4 / GIB:.1f}, " in str(four)
        assert LARGE.divided(4).token_cache_bytes * 4 == LARGE.token_cache_bytes
        assert LARGE.divided(16).token_cache_bytes * 8 == LARGE.token_cache_bytes  # of 8 heads, each twice

    def test_each_engine_has_room_for_its_part_of_the_answers(self) -> None:
        there = replace(H100, available=1000 * GIB)
        one = sizing.wanted_cache(LARGE, WORK, there)

        assert sizing.wanted_cache(LARGE, WORK, replace(there, engines=2)) == one // 2

    def test_a_job_with_a_fleet_has_the_whole_gpu_for_learning(self) -> None:
        there = replace(H100, engines=0, kv_cache_bytes=1)
        made = sizing.plan("m", LARGE, WORK, there)

        assert (made.cache_bytes, made.estimate.copies) == (0, 1)
        assert made.token_budget >= sizing.plan("m", LARGE, WORK, H100).token_budget
        assert "KV cache holds" not in made.described(LARGE, WORK)

    def test_split_an_engine_has_the_room_that_the_trainer_needs_elsewhere(self) -> None:
        colocated = sizing.plan("m", LARGE, WORK, H100)
        split = sizing.plan("m", LARGE, WORK, replace(H100, split=True))

        assert split.estimate.copies == 1
        assert split.cache_bytes >= colocated.cache_bytes
        assert split.token_budget > colocated.token_budget
        assert "sequences of" in split.described(LARGE, WORK)

    def test_split_a_cache_without_room_for_one_sequence_is_refused(self) -> None:
        with pytest.raises(DoesNotFit, match="GPUs that only sample"):
            sizing.plan("m", LARGE, WORK, replace(H100, split=True, kv_cache_bytes=1))

    def test_a_cpu_keeps_2048_tokens_and_a_bounded_cache(self) -> None:
        there = Machine("cpu", 64 * GIB, "vllm")

        made = sizing.plan("m", LARGE, WORK, there)

        assert made.token_budget == 2048
        assert made.cache_bytes == GIB
        long = replace(WORK, prompt=4096, completion=4096)
        assert sizing.plan(
            "m", LARGE, long, replace(there, available=400 * GIB)
        ).cache_bytes == LARGE.cache_bytes(8192)

    def test_the_transformers_sampler_on_a_cpu_has_the_cache_of_its_whole_step(self) -> None:
        made = sizing.plan("m", LARGE, WORK, Machine("cpu", 200 * GIB, "transformers"))

        assert made.cache_bytes == LARGE.token_cache_bytes * 8 * (1024 + 8 * 1024)
        many = replace(WORK, in_flight=10**6)
        made = sizing.plan("m", LARGE, many, Machine("cpu", 200 * GIB, "transformers"))
        assert made.cache_bytes == LARGE.token_cache_bytes * 131_072

    # Qwen 3 8B, rank 16: a row and a column for the seven linear layers of each of 36 layers.
    ADAPTER = 16 * 36 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12_288))

    def test_adapters_of_earlier_policies_are_counted_in_the_memory_of_a_cpu(self) -> None:
        """Two steps off-policy: two earlier adapters and two of this step at the trainer, and two batches at vLLM."""
        on_policy, off_policy = (
            sizing.plan(
                "m",
                LARGE,
                replace(WORK, adapter_copies=sizing.adapter_copies(steps)),
                Machine("cpu", 64 * GIB, "vllm"),
            )
            for steps in (0, 2)
        )

        assert on_policy.estimate.adapter == 16 * self.ADAPTER
        assert off_policy.estimate.adapter - on_policy.estimate.adapter == 6 * 4 * self.ADAPTER
        assert (on_policy.main_memory, off_policy.main_memory) == (0, 0)

    def test_beside_gpus_they_are_counted_in_main_memory(self) -> None:
        job: dict[str, Any] = {"rank": 16, "prompt": 1024, "completion": 1024, "batch": 8, "group": 8}
        work = workload(**job, valid_rows=16, eval_samples=1, off_policy_steps=4)

        made = sizing.plan("m", LARGE, work, H100)

        assert made.estimate == sizing.plan("m", LARGE, WORK, H100).estimate
        assert made.main_memory == 10 * 4 * self.ADAPTER
        assert "Adapters of earlier policies take 1.6 GiB of main memory." in made.described(LARGE, work)
        with pytest.raises(DoesNotFit, match=r"m needs 1\.6 GiB of main memory .* and 1\.0 GiB are free"):
            sizing.plan("m", LARGE, work, replace(H100, main_memory=GIB))

    def test_copies_for_updates_that_are_undone_are_counted(self) -> None:
        """12 bytes a weight: float32, with two moments."""
        cpu = Machine("cpu", 512 * GIB, "transformers")
        for work, weights in ((WORK, self.ADAPTER), (replace(WORK, full=True), LARGE.parameters)):
            undoes = replace(work, undoes=True)
            plain, kept = (sizing.plan("m", LARGE, one, cpu).estimate for one in (work, undoes))

            assert kept.total - plain.total >= 12 * weights
            assert kept.adapter + kept.optimizer - plain.adapter - plain.optimizer == 12 * weights

    def test_beside_gpus_copies_for_updates_are_in_main_memory(self) -> None:
        work, gpu = replace(WORK, full=True, undoes=True), replace(H100, available=400 * GIB)

        made = sizing.plan("m", LARGE, work, gpu)

        assert made.estimate == sizing.plan("m", LARGE, replace(work, undoes=False), gpu).estimate
        assert made.undo == 12 * LARGE.parameters
        assert "Copies for updates that step_kl undoes take" in made.described(LARGE, work)
        with pytest.raises(
            DoesNotFit, match=r"to undo updates .* 8\.0 GiB are free. Set optimizer.step_kl to 0"
        ):
            sizing.plan("m", LARGE, work, replace(gpu, main_memory=8 * GIB))


class TestRows:
    """With the transformers sampler in rows mode, each answer has a copy of its prompt in the cache."""

    HOW: dict[str, Any] = {
        "rank": 16,
        "prompt": 900,
        "completion": 100,
        "batch": 4,
        "group": 8,
        "valid_rows": 6,
        "eval_samples": 2,
    }

    def test_each_answer_counts_its_prompt(self) -> None:
        rows, packed = (workload(**self.HOW, copied=copied) for copied in (True, False))

        assert rows.in_flight == 4 * 8 * (900 + 100)
        assert packed.in_flight == max(4 * (900 + 8 * 100), 6 * (900 + 2 * 100))
        assert rows.longest == packed.longest == 1000
        made = sizing.plan("m", LARGE, rows, Machine("cuda", 139 * GIB, "transformers"))
        assert made.cache_bytes == LARGE.own_token_bytes * 32_000

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_what_fits_one_answer_at_a_time_is_not_refused(self, device: Device) -> None:
        work = workload(**self.HOW, copied=True)
        shape = sizing.shape_of_config(QWEN3_4B, 2)

        def planned(gib: int) -> sizing.MemoryPlan:
            assert shape is not None
            return sizing.plan("m", shape, work, Machine(device, gib * GIB, "transformers"))

        roomy = planned(100)
        tight = next(found for gib in range(1, 60) if (found := fitting(planned, gib)) is not None)
        assert shape is not None
        assert shape.own_token_bytes * 1000 <= tight.cache_bytes < roomy.cache_bytes
        for gib in (20, 24, 40):
            made = fitting(planned, gib)
            assert made is None or made.estimate.total <= gib * GIB

    def test_recurrent_layers_have_no_keys_in_the_cache_of_the_transformers_sampler(self) -> None:
        """Of Qwen 3.5, three layers of four."""
        hybrid = replace(LARGE, recurrent_layers=27)

        assert hybrid is not None
        assert hybrid.own_token_bytes == LARGE.own_token_bytes // 4
        assert hybrid.token_cache_bytes == LARGE.token_cache_bytes  # vLLM has pages for every layer
        assert replace(LARGE, recurrent_layers=36).own_token_bytes > 0


def fitting(planned: Callable[..., sizing.MemoryPlan], gib: int) -> sizing.MemoryPlan | None:
    try:
        return planned(gib)
    except DoesNotFit:
        return None


class TestEngine:
    """What the plan chooses of vLLM's options beside the cache."""

    SMALL = present(sizing.shape_of_config(QWEN3_4B | {"num_hidden_layers": 12}, 2))

    @staticmethod
    def work(answers: int, tokens: int = 256, **changes: Any) -> sizing.Workload:
        shares: dict[str, Any] = {
            "prompt": tokens // 2,
            "completion": tokens // 2,
            "valid_rows": 1,
            "eval_samples": 1,
        }
        return workload(rank=16, batch=answers // 8, group=8, **shares | changes)

    def planned(
        self, work: sizing.Workload, machine: Machine = H100, shape: sizing.Shape = SMALL
    ) -> tuple[sizing.MemoryPlan, EngineSizes]:
        made = sizing.plan("m", shape, work, machine)
        return made, present(made.engine)

    @pytest.mark.parametrize(
        ("answers", "sequences"), [(64, 256), (256, 256), (264, 512), (600, 1024), (4000, 1024)]
    )
    def test_it_decodes_as_many_answers_side_by_side_as_the_job_has(
        self, answers: int, sequences: int
    ) -> None:
        made, engine = self.planned(self.work(answers))

        assert (engine.sequences, engine.batched_tokens) == (sequences, 8192)
        assert made.estimate.total <= H100.available

    @pytest.mark.parametrize("split", [False, True])
    def test_more_memory_never_means_fewer_sequences(self, split: bool) -> None:
        """As long as activations are computed as often: that they are not computed twice comes before a large cache."""
        sequences: dict[bool, list[int]] = {False: [], True: []}
        for quarters in range(4 * 24, 4 * 140, 2):
            there = replace(H100, available=quarters * GIB // 4, split=split)
            with suppress(DoesNotFit):
                made, engine = self.planned(self.work(1200), there, LARGE)
                sequences[made.checkpointed].append(engine.sequences)

        assert sequences[False][-1] == 1024
        assert all(found == sorted(found) for found in sequences.values())

    def test_the_margin_of_an_engine_without_a_trainer_has_room_for_the_largest_step(self) -> None:
        split = replace(H100, available=24 * GIB, split=True)
        planned = sizing.cache_without_trainer("m", LARGE, self.work(4000, 4608), split)
        free = split.usable - sizing.without_trainer(LARGE, self.work(4000, 4608), split)

        assert planned == (free, EngineSizes(4608, 256, 8192, longest=4608))

    def test_two_engines_have_half_of_the_answers_each(self) -> None:
        assert self.planned(self.work(600), replace(H100, engines=2))[1].sequences == 512

    def test_a_cache_for_few_answers_has_no_buffers_for_many(self) -> None:
        """8B at 4,608 tokens: of 4,000 answers the cache holds less than 256."""
        made, engine = self.planned(self.work(4000, 4608), shape=LARGE)

        assert made.cache_bytes < 128 * LARGE.cache_bytes(4608)
        assert engine.sequences == 256

    def test_the_buffers_are_counted(self) -> None:
        plain, larger = (
            sizing.buffer_bytes(LARGE, EngineSizes(0, *sizes)) for sizes in ((256, 2048), (1024, 8192))
        )

        assert plain == 0
        logits, tokens = 768 * 151_936 * (2 + 4 + 4), 6144 * 2 * (4 * 4096 + 2 * 4096 + 2 * 2048 + 3 * 12_288)
        assert larger == logits + tokens
        made, engine = self.planned(self.work(600))
        assert made.estimate.buffers == sizing.buffer_bytes(self.SMALL, engine) > 0
        assert made.estimate.engine == made.estimate.weights + made.estimate.slots + made.estimate.buffers

    def test_a_tight_cache_is_not_made_smaller_for_larger_steps(self) -> None:
        least = sizing.plan("m", LARGE, WORK, H100).estimate.total
        for gib in range(30, least // GIB):
            with suppress(DoesNotFit):
                made, _ = self.planned(WORK, replace(H100, available=gib * GIB), LARGE)
                assert made.estimate.buffers == 0 or made.cache_bytes >= 32 * LARGE.cache_bytes(2048)
                assert made.estimate.total <= gib * GIB

    @pytest.mark.parametrize("gib", [0.05, 0.1, 0.5, 2, 10, 40])
    def test_a_cache_has_a_block_for_the_recurrent_state_of_each_sequence(self, gib: float) -> None:
        """As Qwen3-Next: three of four layers have states, 2 MiB each, and keys and values of 2 KiB a token."""
        hybrid = replace(self.SMALL, layers=48, recurrent_layers=36, state_bytes=2 << 20, key_values=1024)
        page = (2 << 20) + 128 * 2048  # no larger than a state and the tokens that it is rounded up by
        cache = int(gib * GIB)
        _, engine = self.planned(self.work(4000, 256), replace(H100, kv_cache_bytes=cache), hybrid)

        assert engine.sequences in (1, 8, 32, 64, 128, 256, 512, 1024)
        assert engine.sequences == 1 or engine.sequences * 12 * page <= cache
        assert engine == engine.within(cache)
        served, sizes = sizing.serving_sizes(
            hybrid, sizing.serving(hybrid, context=256, slots=8, rank=64), 256, cache, is_automatic=True
        )
        assert sizes == sizes.within(served)

    def test_engines_on_a_cpu_have_the_smallest_sizes(self) -> None:
        _, engine = self.planned(self.work(600, limit=8192), Machine("cpu", 300 * GIB, "vllm"))

        assert engine == EngineSizes(256, longest=256)

    @pytest.mark.parametrize("there", [{"engines": 0}, {"sampler": "transformers"}])
    def test_without_an_engine_there_are_no_sizes(self, there: dict[str, Any]) -> None:
        assert sizing.plan("m", LARGE, WORK, replace(H100, **there)).engine is None

    def test_engines_without_a_trainer_have_sizes_too(self) -> None:
        _, engine = self.planned(self.work(600), replace(H100, split=True))

        assert (engine.sequences, engine.batched_tokens) == (1024, 8192)

    @pytest.mark.parametrize(
        ("tokens", "limit", "context"),
        [(200, 8192, 1024), (1030, 8192, 1536), (3000, 8192, 3072), (3100, 8192, 4096), (3100, 3500, 3500)],
    )
    def test_its_context_is_rounded_up_to_one_of_few(self, tokens: int, limit: int, context: int) -> None:
        assert self.planned(self.work(64, tokens, limit=limit))[1].context == context

    def test_its_context_stays_exact_where_the_model_has_no_longer_one_or_the_cache_does_not_hold_it(
        self,
    ) -> None:
        tight = replace(H100, kv_cache_bytes=self.SMALL.cache_bytes(3200))

        assert self.planned(self.work(64, 3100))[1].context == 3100
        assert self.planned(self.work(64, 3100, limit=8192), tight)[1].context == 3100

    def test_there_are_few_contexts(self) -> None:
        found = {context_bucket(tokens) for tokens in range(1, 32_769)}

        assert len(found) == 11
        assert all(
            tokens <= context_bucket(tokens) <= max(1024, 1.5 * tokens) for tokens in range(1, 32_769, 61)
        )


def test_the_table_of_the_document_is_what_is_planned() -> None:
    """8 prompts of 512 tokens, 8 answers each, 100 validation rows."""
    document = (Path(__file__).parents[2] / "docs/howto/speed.md").read_text()
    work = workload(rank=16, prompt=512, completion=512, batch=8, group=8, valid_rows=100, eval_samples=1)
    for name, config in (("4B", QWEN3_4B), ("8B", QWEN3_8B), ("14B", QWEN3_14B)):
        shape = present(sizing.shape_of_config(config, 2))
        plan = sizing.plan(name, shape, work, H100)
        sequences = plan.cache_bytes // (shape.token_cache_bytes * work.longest)
        shown = "100 (all)" if sequences == 100 else str(sequences)
        activations = "computed again" if plan.checkpointed else "kept"
        row = f"| {plan.cache_bytes / GIB:.1f} GiB | {shown} | {plan.token_budget:,} | {activations} |"

        assert f"| Qwen3-{name} | 512 {row}" in document


class TestWidths:
    def test_they_are_multiples_of_128_with_at_most_an_eighth_of_padding(self) -> None:
        for tokens in range(1, 32_769, 61):
            width = sizing.bucket(tokens)
            assert width % 128 == 0 and width >= tokens
            assert width - tokens < max(128, tokens / (8 if tokens <= 8192 else 32))

    def test_there_are_few(self) -> None:
        found = {sizing.bucket(tokens) for tokens in range(1, 32_769)}

        assert found == set(sizing.widths(0, 32_768))
        assert len(found) == 96
        assert {2048, 4096, 8192, 16_384} <= found


class TestServing:
    SHAPE = sizing.shape_of_config(QWEN3_4B, 2)

    def need(self, shape: sizing.Shape | None = SHAPE) -> sizing.Serving:
        assert shape is not None
        return sizing.serving(shape, context=8192, slots=8, rank=64)

    def test_a_model_alone_takes_what_is_left(self) -> None:
        need = self.need()

        assert self.SHAPE is not None
        cache = sizing.serving_cache(self.SHAPE, need, context=8192, free=40 * GIB)

        assert cache == 40 * GIB - need.without_cache

    def test_models_that_fit_together_share(self) -> None:
        """Whichever is loaded first, the other one fits beside it."""
        both = [sizing.shape_of_config(config, 2) for config in (QWEN3_4B, QWEN3_14B)]
        needs = [self.need(shape) for shape in both]
        for first, second in ((0, 1), (1, 0)):
            cache = sizing.serving_cache(
                present(both[first]), needs[first], context=8192, free=78 * GIB, others=[needs[second].least]
            )
            left = 78 * GIB - needs[first].without_cache - cache
            assert cache > 4 * needs[first].least_cache
            assert left > needs[second].least + 4 * needs[second].least_cache

    def test_models_that_do_not_fit_together_take_turns(self) -> None:
        need = self.need()

        assert self.SHAPE is not None
        cache = sizing.serving_cache(self.SHAPE, need, context=8192, free=24 * GIB, others=[60 * GIB])

        assert cache == 24 * GIB - need.without_cache

    def test_there_is_always_one_sequence(self) -> None:
        need = self.need()

        assert self.SHAPE is not None
        assert sizing.serving_cache(self.SHAPE, need, context=8192, free=GIB) == self.SHAPE.cache_bytes(8192)

    @pytest.mark.parametrize(
        ("gib", "is_automatic", "sequences"),
        [(8, True, 256), (40, True, 512), (120, True, 1024), (120, False, 256)],
    )
    def test_an_automatic_cache_for_many_chats_gives_them_their_buffers(
        self, gib: int, is_automatic: bool, sequences: int
    ) -> None:
        shape, cache = present(self.SHAPE), gib * GIB
        rest, sizes = sizing.serving_sizes(shape, self.need(), 8192, cache, is_automatic=is_automatic)

        assert sizes == EngineSizes(8192, sequences, 8192)
        assert rest == cache - sizing.buffer_bytes(shape, EngineSizes(0, sequences))


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (Qwen3Config, {}),
        (Qwen3Config, {"tie_word_embeddings": True}),
        (LlamaConfig, {}),
        (MistralConfig, {}),
        (Qwen2Config, {}),
        (Gemma3TextConfig, {}),
        (Qwen3MoeConfig, {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
    ],
)
def test_the_shape_computed_from_a_config_is_what_transformers_makes_of_it(
    config: Any, changes: dict[str, Any]
) -> None:
    made = config(
        vocab_size=1000, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, **{"tie_word_embeddings": False} | changes,
    )  # fmt: skip
    exact = memory.shape_of(made, torch.bfloat16)

    computed = sizing.shape_of_config(made.to_dict(), 2)

    assert computed is not None
    assert computed.parameters == pytest.approx(exact.parameters, rel=0.01)
    same = "layers hidden queries heads key_values vocabulary bytes_each head_norms layer_norms gated".split()
    same += ["recomputes_norms", "recomputes_gates"]
    assert [getattr(computed, name) for name in same] == [getattr(exact, name) for name in same]


def test_a_config_of_another_kind_has_no_shape() -> None:
    assert sizing.shape_of_config({"model_type": "mamba", "d_model": 64}, 2) is None


class TestLongMicroBatches:
    @pytest.fixture
    def sizes(self) -> Any:
        """The elements of every tensor that is made on the CPU while `recording`."""

        class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
            largest = 0

            def __torch_dispatch__(
                self, function: Any, types: Any, args: tuple[()] = (), kwargs: Any = None
            ) -> Any:
                made = function(*args, **(kwargs or {}))
                for tensor in tree_leaves(made):
                    if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                        self.largest = max(self.largest, tensor.numel())
                return made

        return untyped(Sizes)()

    def test_nothing_with_the_square_of_the_tokens_is_made_on_the_cpu_for_another_device(
        self, sizes: Any
    ) -> None:
        with sizes:
            tensors = batch.tensors_of([pack_of(tokens=8000)], "meta")
            mask = mask_of(tensors, torch.bfloat16)

        assert 0 < sizes.largest <= 8192
        assert tensors.input_ids.shape == (1, sizing.bucket(8000))
        assert mask.device.type == "meta"
        assert mask.shape == (1, 1, sizing.bucket(8000), sizing.bucket(8000))

    def test_on_the_cpu_it_would_be_seen(self, sizes: Any) -> None:
        with sizes:
            mask_of(batch.tensors_of([pack_of(tokens=1000)], "cpu"), None)

        assert sizes.largest == 1000**2

    def test_cudnn_builds_no_plan_for_each_width(self) -> None:
        assert not untyped(torch.backends.cuda).cudnn_sdp_enabled()

    def test_the_bias_of_another_device_allows_what_the_mask_of_the_cpu_does(self) -> None:
        packs = [pack_of(tokens=1300), pack_of(tokens=1210, answers=3)]  # more than BIAS_ROWS
        tensors = batch.tensors_of(packs)

        bias, mask = mask_of(tensors, torch.bfloat16), mask_of(tensors, None)

        assert bias.dtype == torch.bfloat16
        assert torch.equal(bias == 0, mask)
        assert torch.equal(bias == float("-inf"), ~mask)

    def test_micro_batches_keep_to_the_budget_with_their_padding(self) -> None:
        packs = [pack_of(tokens=n, prompt=10, answers=2) for n in (130, 140, 150, 400)]

        rows = list(batch.micro_batches(packs, 512, "cuda"))

        assert [[part.tokens for part in one] for one in rows] == [[130, 140], [150], [400]]
        assert all(len(one) * sizing.bucket(max(part.tokens for part in one)) <= 512 for one in rows)


def mask_of(tensors: batch.Tensors, bias_dtype: dtype | None) -> Any:
    """As transformers asks for it, for layers with full attention."""
    layout = attention.Layout.of_rows(tensors.position_ids, tensors.segment, bias_dtype)
    make = AttentionMaskInterface()[attention.NAME]
    rows, width = tensors.input_ids.shape
    with attention.laid_out(layout):
        return make(rows, width, width, mask_function=causal_mask_function)


def pack_of(*, tokens: int, prompt: int = 100, answers: int = 8) -> Pack:
    """One that is `tokens` wide, or a little less."""
    each = (tokens - prompt) // answers
    rest = tokens - prompt - each * answers
    lengths = [each + 1 + (n < rest) for n in range(answers)]
    return Pack(
        (5,) * prompt,
        tuple(TrainingSequence((5,) * n, (0.0,) * n, (1.0,) * n, 1.0) for n in lengths),
    )


def test_the_shape_is_read_from_a_config_without_making_the_weights() -> None:
    config = LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip

    shape = memory.shape_of(config, torch.bfloat16)

    linear = 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128)
    assert shape.linear_parameters == linear + 64 * 100
    assert shape.parameters == linear + 64 * 100 + 3 * 2 * 64 + 64
    assert (shape.layers, shape.hidden, shape.intermediate, shape.vocabulary) == (3, 64, 128, 100)
    assert (shape.heads, shape.queries, shape.key_values) == (4, 64, 64)
    assert shape.token_cache_bytes == 3 * 2 * 2 * 16 * 2


def test_the_adapter_is_counted_as_it_is(make_policy: Callable[..., Policy]) -> None:
    policy = make_policy()
    shape = memory.shape_of(policy.model.get_base_model().config, torch.float32)

    assert sizing.adapter_parameters(shape, 4) == sum(parameter.numel() for parameter in policy.trainable)


def test_what_is_free_is_the_least_of_machine_and_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    assert main_memory.available(meminfo, tmp_path) == 4000 * 1024

    (tmp_path / "memory.current").write_text("1500000\n")
    (tmp_path / "memory.stat").write_text("anon 900000\ninactive_file 500000\nactive_file 100000\n")
    for limit, free in (("max", 4000 * 1024), ("3000000", 2_000_000), ("900000000", 4000 * 1024)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert main_memory.available(meminfo, tmp_path) == free


def test_checkpointed_layers_give_the_same_gradients_and_the_same_samples(
    make_policy: Callable[..., Policy],
) -> None:
    found = []
    for checkpointed in (False, True):
        policy = make_policy(moved=True)
        layers = policy.layers
        calls: list[Any] = []
        untyped(layers[0]).input_layernorm.register_forward_hook(
            lambda *args, calls=calls: calls.append(torch.is_grad_enabled())
        )
        if checkpointed:
            policy.checkpoint_layers()
        one = prompt(policy, "say yes")
        rollouts = drawn(policy, [one], sampling())[0]
        assert not any(calls)
        calls.clear()
        trainer = PeftTrainer(policy, asked({"learning_rate": 1e-3}), token_budget=4096)
        learn(trainer, [Group(one, rollouts, tuple(map(Grade, (1.0, 0.0, 0.5, 0.0))))])
        found.append((rollouts, [p.detach().clone() for p in policy.trainable], calls.count(True)))

    (plain_rollouts, plain, once), (rollouts, recomputed, twice) = found
    assert rollouts == plain_rollouts
    assert relative_difference(recomputed, plain) < 1e-6
    assert twice == 2 * once > 0


@cache
def llama_shape(layers: int, hidden: int, intermediate: int, heads: int) -> sizing.Shape:
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    return memory.shape_of(config, torch.bfloat16)


LLAMA_8B = (32, 4096, 14336, 32)
LIKE_32B = (64, 5120, 27648, 40)
LLAMA_70B = (80, 8192, 28672, 64)


@pytest.mark.parametrize("sizes", [LLAMA_8B, LIKE_32B, LLAMA_70B])
def test_a_shard_is_the_ends_a_part_of_the_layers_and_two_whole_layers(
    sizes: tuple[int, int, int, int],
) -> None:
    shape = llama_shape(*sizes)
    layers = shape.parameters - 2 * shape.vocabulary * shape.hidden

    assert shape.shard_bytes(8) == pytest.approx(
        2 * (2 * shape.vocabulary * shape.hidden + layers / 8 + 2 * layers / shape.layers), rel=1e-6
    )


@pytest.mark.parametrize(
    ("sizes", "gib", "degree"), [(LLAMA_8B, 78, 1), (LIKE_32B, 110, 2), (LLAMA_70B, 190, 4)]
)
def test_the_smallest_degree_that_fits_is_chosen(
    sizes: tuple[int, int, int, int], gib: int, degree: int
) -> None:
    found = sizing.plan_sharded("m", llama_shape(*sizes), WORK, replace(H100, available=gib * GIB), 8)

    assert found.degree == degree
    assert found.estimate.total <= gib * GIB
    if degree > 1:
        assert f"sharded over {degree} GPUs" in str(found.estimate)


def test_a_refusal_names_the_degrees_that_were_tried() -> None:
    with pytest.raises(DoesNotFit, match="sharded over 1, 2, 4 GPUs"):
        sizing.plan_sharded("m", llama_shape(*LLAMA_70B), WORK, H100, 12)


def test_all_weights_of_an_8b_model_are_trained_in_parts_where_they_do_not_fit_whole() -> None:
    """Llama 3 8B by hand: 128,256 x 4,096 weights each in embeddings and head, and 218,112,000 in each of 32 layers."""
    ends, layer = 2 * 128_256 * 4096, 218_112_000
    inside = 32 * layer + 4096  # the last norm
    work, shape = replace(WORK, full=True, references=1), llama_shape(*LLAMA_8B)

    found = sizing.plan_sharded("m", shape, work, replace(H100, may_sleep=True), 8)

    [eighth, two] = inside / 8, 2 * -(-inside // 32)
    estimate = found.estimate
    assert found.degree == 8 and "sharded over 8 GPUs" in str(estimate)
    assert estimate.shard == (ends + two) * 2
    # Masters, gradients and moments; of the ends also a vector of all gradients; gradients that are being added up.
    assert estimate.optimizer == 16 * eighth + 20 * ends + two * (2 + 4)
    # The reference, and the own parts while it computes.
    assert estimate.reference == eighth * (2 + 4) + 2 * ends * 2
    fits = {
        (gib, gpus): sizing.plan_sharded("m", shape, replace(work, references=0), there, gpus).degree
        for gib, gpus in ((78, 4), (78, 8), (139, 2), (178, 1), (178, 2))
        for there in [replace(H100, available=gib * GIB, may_sleep=True)]
    }
    assert fits == {(78, 4): 4, (78, 8): 8, (139, 2): 2, (178, 1): 1, (178, 2): 2}
    for gib, gpus in ((78, 2), (139, 1)):
        with pytest.raises(DoesNotFit):
            sizing.plan_sharded("m", shape, work, replace(H100, available=gib * GIB, may_sleep=True), gpus)


@pytest.mark.parametrize(("gib", "gpus", "degree"), [(150, 8, 8), (78, 6, 6), (210, 8, 1)])
def test_the_ranks_that_train_all_weights_have_a_copy_each_or_share_one(
    gib: int, gpus: int, degree: int
) -> None:
    """With a half of 8 GPUs for each copy, the two copies would have to be kept equal."""
    work, there = replace(WORK, full=True), replace(H100, available=gib * GIB, may_sleep=True)

    assert sizing.plan_sharded("m", llama_shape(*LLAMA_8B), work, there, gpus).degree == degree


def test_the_sampler_that_uses_the_weights_of_training_is_not_sharded() -> None:
    with pytest.raises(DoesNotFit, match="because the sampler `transformers` uses them: use `vllm`"):
        sizing.plan_sharded("m", llama_shape(*LLAMA_70B), WORK, replace(H100, sampler="transformers"), 8)


def test_a_job_that_samples_nothing_has_one_copy_of_the_weights_that_its_gpus_share() -> None:
    """As worker/prepare/memory_plan.py plans."""
    nothing_sampled = replace(H100, engines=0)

    found = sizing.plan_sharded("m", llama_shape(*LLAMA_70B), WORK, nothing_sampled, 8)

    assert (found.degree, found.cache_bytes, found.estimate.copies) == (4, 0, 1)
    assert sizing.plan_sharded("m", llama_shape(*LLAMA_8B), WORK, nothing_sampled, 8).degree == 1


class TestSleep:
    """Llama 3 8B (15 GiB) at 16,384 tokens on 44 GiB: vLLM's copy and the activations do not fit at once."""

    LONG = replace(WORK, prompt=1024, completion=15_360, in_flight=8 * (1024 + 8 * 15_360))
    L40S = Machine("cuda", 44 * GIB, "vllm", may_sleep=True, main_memory=64 * GIB)

    def planned(self, **changes: Any) -> sizing.MemoryPlan:
        return sizing.plan_sharded("m", llama_shape(*LLAMA_8B), self.LONG, replace(self.L40S, **changes), 1)

    def test_it_is_planned_only_where_the_job_would_be_refused_without_it(self) -> None:
        assert self.planned().sleeps
        assert not self.planned(available=60 * GIB).sleeps
        with pytest.raises(DoesNotFit, match=r"m at 16384 tokens needs 4\d\.\d GiB"):
            self.planned(may_sleep=False)

    def test_the_peak_is_that_of_sampling_or_of_learning(self) -> None:
        found = self.planned().estimate
        weights = llama_shape(*LLAMA_8B).weight_bytes

        engine = weights + found.slots + found.buffers + found.cache
        assert found.sampling == weights + found.adapter + engine + 4 * GIB
        assert found.learning == weights + found.parts + found.margin
        assert found.total == max(found.sampling, found.learning) <= self.L40S.available
        assert found.sampling + found.parts > self.L40S.available
        assert (
            f"({found.sampling / GIB:.1f} while sampling, {found.learning / GIB:.1f} while learning)"
            in str(found)
        )

    def test_the_cache_takes_what_sampling_leaves_and_learning_is_not_made_smaller_for_it(self) -> None:
        made = self.planned()

        assert made.estimate.sampling == self.L40S.available
        assert made.cache_bytes > 3 * llama_shape(*LLAMA_8B).cache_bytes(16_384)

    def test_nothing_is_refused_that_fits(self) -> None:
        """One byte less than the larger of the least needs is refused, and that much is not."""
        shape = llama_shape(*LLAMA_8B)
        least = sizing.estimate(
            shape, rank=16, token_budget=16_384, cache=shape.cache_bytes(16_384), checkpointed=True,
            machine=replace(self.L40S, sleeps=True),
        ).total  # fmt: skip

        assert self.planned(available=least).estimate.total == least
        with pytest.raises(DoesNotFit, match="Tried with vLLM asleep while the job learns"):
            self.planned(available=least - 1)

    @pytest.mark.parametrize(
        ("learned", "main_memory", "sleeps"),
        [(8 * 9 * 4608, 64, True), (4608, 64, False), (0, 64, False), (8 * 9 * 4608, 16, False)],
        ids=["gains much", "gains little", "unknown", "has no room for the weights"],
    )
    def test_it_is_chosen_where_it_costs_less_than_recomputation_and_small_micro_batches(
        self, learned: int, main_memory: int, sleeps: bool
    ) -> None:
        """On 77 GiB, 8B recomputes beside vLLM at 512 + 4,096 tokens, and does not while that sleeps."""
        shape = llama_shape(*LLAMA_8B)
        machine = replace(H100, available=77 * GIB, may_sleep=True, main_memory=main_memory * GIB)
        work = replace(WORK, prompt=512, completion=4096, in_flight=8 * (512 + 16 * 4096), learned=learned)

        made = sizing.plan_sharded("m", shape, work, machine, 1)

        assert (made.sleeps, made.checkpointed) == (sleeps, not sleeps)
        if sleeps:
            assert "because this saves about" in made.described(shape, work)

    def test_the_main_memory_for_the_weights_is_planned_too(self) -> None:
        """PyTorch rounds pinned memory up to a power of two, so up to twice the weights and the adapter's slot."""
        weights = llama_shape(*LLAMA_8B).weight_bytes + self.planned().estimate.slots

        assert self.planned(engines=3, main_memory=6 * weights).main_memory == 6 * weights
        assert self.planned(main_memory=None).sleeps  # unknown
        with pytest.raises(
            DoesNotFit, match=r"in main memory: 90\.2 GiB for engines x 3, and 90\.2 GiB are free"
        ):
            self.planned(engines=3, main_memory=6 * weights - 1)

    def test_sharding_comes_first(self) -> None:
        found = sizing.plan_sharded("m", llama_shape(*LLAMA_8B), self.LONG, self.L40S, 2)

        assert (found.degree, found.sleeps) == (2, False)

    @pytest.mark.parametrize("there", [{"sampler": "transformers"}, {"engines": 0}, {"device": "cpu"}])
    def test_only_engines_on_gpus_sleep(self, there: dict[str, Any]) -> None:
        found = sizing.plan_sharded(
            "m", llama_shape(*LLAMA_8B), WORK, replace(self.L40S, available=300 * GIB, **there), 1
        )

        assert not found.sleeps
        with pytest.raises(DoesNotFit) as refused:
            self.planned(available=12 * GIB, **there)
        assert "asleep" not in str(refused.value)

    def test_the_owner_of_the_job_reads_of_it(self) -> None:
        made = self.planned()

        assert "vLLM sleeps while the job learns" in made.described(llama_shape(*LLAMA_8B), self.LONG)
        assert "30.1 GiB of main memory" in made.sleep_sentence


def test_a_plan_spares_a_share_of_all_that_is_free_also_beside_a_teacher() -> None:
    found = sizing.machine(Settings(), "cuda", 100 * GIB, "vllm", teacher_bytes=40 * GIB)

    assert (found.available, found.spared) == (60 * GIB, 5 * GIB)


@pytest.mark.parametrize(
    ("dense", "sparse"),
    [
        ({"first_k_dense_replace": 2}, (2, 3)),
        ({"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}, (2, 3)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"moe_layer_interval": 2}, (1, 3)),
    ],
)
def test_dense_layers_of_a_mixture_are_counted_without_experts(
    dense: dict[str, Any], sparse: tuple[int, int]
) -> None:
    fields = {
        **{"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 100},
        **{"intermediate_size": 128, "moe_intermediate_size": 32, "n_routed_experts": 8},
        **{"num_experts_per_tok": 2},
    }

    every, shape = (present(sizing.shape_of_config(config, 2)) for config in (fields, fields | dense))

    experts = [layer.name for layer in shape.adaptable if layer.experts]
    assert experts == [f"model.layers.{number}.mlp.experts" for number in sparse]
    of_experts, of_dense = 8 * 3 * 64 * 32 + 8 * 64, 3 * 64 * 128
    assert every.parameters - shape.parameters == 2 * (of_experts - of_dense)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_the_experts_of_a_config_count_under_each_of_their_names(name: str) -> None:
    dense = present(sizing.shape_of_config(QWEN3_4B, 2))

    mixture = present(sizing.shape_of_config(QWEN3_4B | {name: 16, "moe_intermediate_size": 1024}, 2))

    grown = mixture.parameters - dense.parameters
    config: dict[str, Any] = QWEN3_4B
    layers, hidden, inside = (
        config[field] for field in ("num_hidden_layers", "hidden_size", "intermediate_size")
    )
    assert grown == layers * (16 * (3 * hidden * 1024 + hidden) - 3 * hidden * inside)
