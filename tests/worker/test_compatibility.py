"""The check of a model at load: what it compares, what it leaves alone, and what it says of a model that differs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3NextConfig
from transformers.masking_utils import causal_mask_function

from core.registry import BaseModelEntry
from tests.families.zoo import CONTEXT, FAMILIES
from tests.present import untyped
from tests.tiny import make_tiny_model
from worker.checks import compatibility
from worker.model import attention
from worker.model.architecture import refuse_beyond_full_attention
from worker.model.batch import tensors_of
from worker.model.decoding import Decoding
from worker.model.policy import Base, Policy, Route, load_base
from worker.model.token_logprobs import logprobs
from worker.refusals import NotEnoughMemory, UnsupportedModel
from worker.serving.continuous import ContinuousEngine
from worker.types import Pack, TrainingSequence


class TestByConfig:
    def test_a_plain_model_passes(self) -> None:
        compatibility.refuse_by_config(LlamaConfig(), 128_000)

    def test_windows_and_recurrent_layers_are_trained(self) -> None:
        compatibility.refuse_by_config(MistralConfig(sliding_window=4096), 4097)
        compatibility.refuse_by_config(Qwen3NextConfig(), 64)

    def test_the_own_engine_serves_a_window_within_the_context_only(self) -> None:
        config = MistralConfig(sliding_window=4096)

        refuse_beyond_full_attention(config, 4096)  # no sequence exceeds it
        with pytest.raises(UnsupportedModel, match=r"sliding_window = 4096.*set context = 4096 or less"):
            refuse_beyond_full_attention(config, 4097)

    def test_a_window_that_the_config_switches_off_is_none(self) -> None:
        refuse_beyond_full_attention(Qwen2Config(sliding_window=4096, use_sliding_window=False), 32_768)

    def test_recurrent_layers_are_named(self) -> None:
        with pytest.raises(UnsupportedModel, match="linear_attention"):
            refuse_beyond_full_attention(Qwen3NextConfig(), 64)

    def test_a_rotary_embedding_that_changes_with_the_length_is_refused_beyond_it(self) -> None:
        factors = [1.0] * 48
        rope = {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": 4096,
        }
        config = Phi3Config(max_position_embeddings=131_072, sliding_window=None, rope_parameters=rope)

        compatibility.refuse_by_config(config, 4096)
        with pytest.raises(UnsupportedModel, match="longrope"):
            compatibility.refuse_by_config(config, 8192)

    def test_of_two_lengths_that_a_rotary_embedding_names_the_shorter_counts(self) -> None:
        rope = {
            "rope_type": "dynamic",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 8192,
        }
        config = LlamaConfig(max_position_embeddings=4096, rope_parameters=rope)

        with pytest.raises(UnsupportedModel, match="longer than 4096"):
            compatibility.refuse_by_config(config, 8192)


class TestLengths:
    def test_prompts_are_short_where_nothing_depends_on_the_length(self) -> None:
        assert compatibility.prompt_lengths(LlamaConfig(), 128_000) == [(40, 30)]

    def test_a_window_is_exceeded_by_more_than_a_few_tokens(self) -> None:
        assert compatibility.prompt_lengths(MistralConfig(sliding_window=4096), 8192)[-1] == (4608,)

    def test_they_never_exceed_the_context(self) -> None:
        config = MistralConfig(sliding_window=4096)

        for context in (16, 20, 64, 4100):
            lengths = compatibility.prompt_lengths(config, context)
            assert all(
                length + compatibility.LONGEST <= max(context, 16) for one in lengths for length in one
            )
        assert compatibility.prompt_lengths(config, 4096) == [
            (40, 30)
        ]  # no job reaches the end of the window


@pytest.fixture
def policy(make_policy: Callable[..., Policy]) -> Policy:
    return make_policy(moved=True)


class TestProbe:
    def test_it_compares_training_and_sampling(self, policy: Policy) -> None:
        verdict = compatibility.probe(policy, sampled=True)

        assert verdict.route == policy.route == Route("packed", "shared")
        assert [gap.part for gap in verdict.gaps] == ["training's forward pass", "sampling with a cache"]
        assert max(gap.largest for gap in verdict.gaps) < 1e-5

    def test_with_another_sampler_the_cached_decode_does_not_matter(self, policy: Policy) -> None:
        assert len(compatibility.probe(policy, sampled=False).gaps) == 1

    def test_it_leaves_the_model_as_it_was(self, policy: Policy) -> None:
        before = [parameter.detach().clone() for parameter in policy.model.parameters()]
        forwards = [m.__dict__.get("forward") for m in policy.model.modules()]

        compatibility.probe(policy, sampled=True)

        assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))
        assert forwards == [m.__dict__.get("forward") for m in policy.model.modules()]
        assert policy.model.get_base_model().config._attn_implementation == attention.NAME

    def test_a_bfloat16_model_is_compared_in_float32_and_keeps_its_own_weights(
        self, tiny_model: Path
    ) -> None:
        policy = bfloat16(tiny_model)
        before = [(parameter.dtype, parameter.data_ptr()) for parameter in policy.model.parameters()]

        verdict = compatibility.probe(policy, sampled=True)

        assert max(gap.largest for gap in verdict.gaps) < 1e-5
        assert before == [(parameter.dtype, parameter.data_ptr()) for parameter in policy.model.parameters()]

    @pytest.mark.parametrize(
        ("family", "fault"),
        [("Llama 2, 3", "siblings"), ("Gemma 3", "windows"), ("Gemma 2", "caps"), ("gpt-oss", "sinks")],
    )
    @pytest.mark.slow
    def test_a_fault_in_the_packed_forward_is_seen_and_rows_are_used(
        self, family: str, fault: str, tmp_path: Path
    ) -> None:
        policy = FaultyPolicy(base_of(family, tmp_path), fault)

        verdict = compatibility.probe(policy, sampled=True)

        assert verdict.route.forward == "rows"
        assert "training's forward pass differ" in verdict.instead

    @pytest.mark.parametrize("family", ["Llama 2, 3", "Gemma 3", "Gemma 2", "gpt-oss"])
    def test_without_the_fault_the_same_models_are_packed(self, family: str, tmp_path: Path) -> None:
        verdict = compatibility.probe(FaultyPolicy(base_of(family, tmp_path), "none"), sampled=True)

        assert verdict.route == Route("packed", "shared")

    @pytest.mark.slow
    @pytest.mark.parametrize("family", ["Llama 2, 3", "Gemma 3", "Gemma 2", "gpt-oss", "Llama 4"])
    def test_attention_in_blocks_computes_the_same_as_with_a_dense_mask(
        self, family: str, tmp_path: Path
    ) -> None:
        """As on a GPU, but not compiled: windows, chunks, soft caps, sinks and grouped heads."""
        policy = Policy(base_of(family, tmp_path), rank=4, alpha=8, seed=0)
        prompt, answer = (
            tuple(range(3, 43)),
            TrainingSequence((5, 6, 7, 8, 9, 2), (0.0,) * 6, (1.0,) * 6, 1.0),
        )
        other = TrainingSequence((9, 8, 7), (0.0,) * 3, (1.0,) * 3, 1.0)
        packs = [Pack(prompt, (answer, other)), Pack(prompt[:30], (other,))]
        found = {}
        for blocks in (False, True):
            policy.use(Route("packed", blocks=blocks))
            with torch.no_grad():
                found[blocks] = logprobs(policy, tensors_of(packs), 1.0)

        assert (found[True] - found[False]).abs().max() < 1e-5

    @pytest.mark.slow
    def test_a_fault_in_the_shared_decode_is_seen_and_another_is_used(self, tmp_path: Path) -> None:
        verdict = compatibility.probe(FaultyPolicy(base_of("Llama 2, 3", tmp_path), "decode"), sampled=True)

        assert verdict.route == Route("packed", "joined")
        assert "sampling with a cache differ" in verdict.instead

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_cap_of_the_logits_is_applied_in_any_precision(self, tiny_model: Path, dtype: str) -> None:
        """A cap of 50 moves the logits by less than a bfloat16 number can tell."""
        entry = BaseModelEntry(path=tiny_model, dtype=dtype, context=128)
        base = load_base("tiny", entry, tiny_model, "cpu")
        base.model.forward = softcapped(base.model.forward, 50.0)
        policy = Policy(base, rank=4, alpha=8, seed=0)

        verdict = compatibility.probe(policy, sampled=True)

        assert base.parts.logits.cap == pytest.approx(50.0, rel=1e-3)
        assert verdict.route == Route("packed", "shared")

    def test_logits_that_are_not_a_function_of_the_head_are_refused(self, tiny_model: Path) -> None:
        base = load_base(
            "tiny", BaseModelEntry(path=tiny_model, dtype="float32", context=128), tiny_model, "cpu"
        )
        forward = base.model.forward

        def shifted(*args: Any, **kwargs: Any) -> SimpleNamespace:
            return SimpleNamespace(logits=forward(*args, **kwargs).logits.roll(1, -1))

        base.model.forward = shifted

        with pytest.raises(UnsupportedModel, match="its logits are not the output of its head"):
            Policy(base, rank=4, alpha=8, seed=0)

    def test_an_adapter_that_is_computed_wrongly_is_seen(self, policy: Policy) -> None:
        """Although a fresh one is zero."""
        layer = next(m for n, m in policy.model.named_modules() if n.endswith("layers.0.self_attn.q_proj"))
        right = layer.forward
        layer.forward = lambda x: right(x) * 1.01

        with pytest.raises(UnsupportedModel):
            compatibility.probe(policy, sampled=False)

    def test_whatever_a_layer_raises_is_a_refusal(self, policy: Policy) -> None:
        def broken(*args: Any, **kwargs: Any) -> NoReturn:
            raise KeyError("conv_state")

        policy.layers[0].forward = broken

        with pytest.raises(UnsupportedModel, match="it fails with KeyError: 'conv_state'"):
            compatibility.probe(policy, sampled=False)

    def test_having_no_room_is_not_the_models_fault(self, policy: Policy) -> None:
        def greedy(*args: Any, **kwargs: Any) -> NoReturn:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.")

        policy.layers[0].forward = greedy

        with pytest.raises(NotEnoughMemory, match="Tried to allocate 20 GiB"):
            compatibility.probe(policy, sampled=False)


def bfloat16(folder: Path) -> Policy:
    entry = BaseModelEntry(path=folder, dtype="bfloat16", context=128)
    return Policy(load_base("tiny", entry, folder, "cpu"), rank=4, alpha=8, seed=0)


def base_of(title: str, folder: Path) -> Base:
    family = next(one for one in FAMILIES if one.title == title)
    return load_base(
        title, BaseModelEntry(path=family.save(folder), dtype="float32", context=CONTEXT), folder, "cpu"
    )


class FaultyPolicy(Policy):
    """With a mistake put into its packed forward, or into its shared decode."""

    def __init__(self, base: Base, fault: str) -> None:
        super().__init__(base, rank=4, alpha=8, seed=0)
        self.fault = fault
        self.causal = base.model
        self.decoder = base.parts.decoder

    def hidden(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        segment: torch.Tensor,
        seen_until: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert seen_until is None, "the probe has no branches"
        if self.route.forward == "rows":
            return super().hidden(input_ids, position_ids, segment)
        if self.fault == "siblings":
            return super().hidden(input_ids, position_ids, segment.clamp(max=1))
        if self.fault == "windows":
            layout = attention.Layout.of_rows(position_ids, segment)
            mask = attention.visible(layout, causal_mask_function)  # 4-D: transformers adds no rule to it
            hidden: torch.Tensor = self.decoder(
                input_ids=input_ids, position_ids=position_ids, attention_mask=mask, use_cache=False
            ).last_hidden_state
            return hidden
        with changed(self.causal, self.fault):
            return super().hidden(input_ids, position_ids, segment)

    def decoding(self, prompts_P: Sequence[Sequence[int]], size: int) -> Decoding:
        decoding = super().decoding(prompts_P, size)
        if self.fault == "decode" and self.route.decode == "shared":
            shared = untyped(decoding)
            shared.cache = WrongCache(shared.cache.lengths_P)
        return decoding


class WrongCache(attention.GroupCache):
    def to_rows(self, groups: torch.Tensor, share: int) -> torch.Tensor:
        return 0.9 * super().to_rows(groups, share)


@contextmanager
def changed(causal: Any, fault: str) -> Iterator[None]:
    """Without the sinks, or without the soft cap of the scores, that the model's layers have."""
    before = []
    for module in causal.modules():
        if fault == "sinks" and getattr(module, "sinks", None) is not None:
            before.append((module.sinks, module.sinks.data))
            module.sinks.data = torch.full_like(module.sinks.data, float("-inf"))
        if fault == "caps" and getattr(module, "attn_logit_softcapping", None) is not None:
            before.append((module, module.attn_logit_softcapping))
            module.attn_logit_softcapping = None
    yield
    for owner, value in before:
        if fault == "sinks":
            owner.data = value
        else:
            owner.attn_logit_softcapping = value


def softcapped(forward: Any, cap: float) -> Callable[..., Any]:
    def capped(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = cap * torch.tanh(output.logits / cap)
        return output

    return capped


def test_a_few_tokens_of_a_mixture_may_go_to_another_expert() -> None:
    flipped = gap_of([0.0] * 19 + [0.05])
    wrong = gap_of([0.0] * 10 + [0.05] * 10)
    mixture = SimpleNamespace(num_experts=4, model_type="m", architectures=["M"])
    mixture.get_text_config = lambda: mixture

    assert compatibility.problem_of([flipped], mixture) == ""
    assert "differ from transformers' own" in compatibility.problem_of([wrong], mixture)
    assert "differ from transformers' own" in compatibility.problem_of([flipped], LlamaConfig())


def gap_of(differences: list[float]) -> compatibility.Gap:
    ours = torch.tensor(differences)
    return compatibility.Gap.between("x", ours, torch.zeros_like(ours), 40)


def test_no_number_is_a_difference() -> None:
    gap = gap_of([float("nan")])

    assert gap.largest == float("inf")


def test_a_backward_pass_in_blocks_that_fails_leaves_no_gradient_behind(tmp_path: Path) -> None:
    """A CPU has no kernels for it."""
    folder = make_tiny_model(tmp_path)
    entry = BaseModelEntry(path=folder, dtype="float32", context=CONTEXT)
    policy = Policy(load_base("tiny", entry, folder, "cpu"), rank=2, alpha=2, seed=0)

    assert not compatibility.has_backward_in_blocks(policy)
    assert all(parameter.grad is None for parameter in policy.trainable)


def test_the_engine_that_answers_compares_with_transformers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = BaseModelEntry(path=make_tiny_model(tmp_path), dtype="bfloat16", context=64)
    base = load_base("tiny", entry, tmp_path, "cpu")
    base.model.config.sliding_window = 32

    with pytest.raises(UnsupportedModel, match="sliding_window = 32"):
        ContinuousEngine(base)

    base.model.config.sliding_window = None
    base.model.forward = softcapped(base.model.forward, 5.0)
    with pytest.raises(UnsupportedModel, match="differ from transformers' own"):
        ContinuousEngine(base)
