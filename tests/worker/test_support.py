"""The check of a model at load: what it compares, what it leaves alone, and what it says of a model that differs."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3NextConfig

from core.registry import BaseModelEntry
from tests.tiny import make_tiny_model
from worker.learn.gradient import OwnGradient
from worker.model import attention, support
from worker.model.policy import Policy, load_base
from worker.refusals import NotEnoughMemory, UnsupportedModel
from worker.rollout.samplers.transformers import TransformersSampler
from worker.serve.continuous import ContinuousEngine


class TestByConfig:
    def test_a_plain_model_passes(self):
        support.refuse_by_config(LlamaConfig(), 128_000)

    def test_a_window_shorter_than_the_context_is_refused_with_what_to_change(self):
        config = MistralConfig(sliding_window=4096)

        support.refuse_by_config(config, 4096)  # no sequence exceeds it
        with pytest.raises(UnsupportedModel, match=r"sliding_window = 4096.*set context = 4096 or less"):
            support.refuse_by_config(config, 4097)

    def test_a_window_that_the_config_switches_off_is_none(self):
        support.refuse_by_config(Qwen2Config(sliding_window=4096, use_sliding_window=False), 32_768)

    def test_recurrent_layers_are_named(self):
        with pytest.raises(UnsupportedModel, match="linear_attention"):
            support.refuse_by_config(Qwen3NextConfig(), 64)

    def test_a_rotary_embedding_that_changes_with_the_length_is_refused_beyond_it(self):
        factors = [1.0] * 48
        rope = {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": 4096,
        }
        config = Phi3Config(max_position_embeddings=131_072, sliding_window=None, rope_parameters=rope)

        support.refuse_by_config(config, 4096)
        with pytest.raises(UnsupportedModel, match="longrope"):
            support.refuse_by_config(config, 8192)

    def test_of_two_lengths_that_a_rotary_embedding_names_the_shorter_counts(self):
        rope = {
            "rope_type": "dynamic",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 8192,
        }
        config = LlamaConfig(max_position_embeddings=4096, rope_parameters=rope)

        with pytest.raises(UnsupportedModel, match="longer than 4096"):
            support.refuse_by_config(config, 8192)


class TestLengths:
    def test_prompts_are_short_where_nothing_depends_on_the_length(self):
        assert support.prompt_lengths(LlamaConfig(), 128_000) == [(40, 30)]

    def test_a_window_is_exceeded_by_more_than_a_few_tokens(self):
        assert support.prompt_lengths(MistralConfig(sliding_window=4096), 8192)[-1] == (4608,)

    def test_they_never_exceed_the_context(self):
        config = MistralConfig(sliding_window=4096)

        for context in (16, 20, 64, 4100):
            lengths = support.prompt_lengths(config, context)
            assert all(length + support.LONGEST <= max(context, 16) for one in lengths for length in one)
        assert support.prompt_lengths(config, 4096) == [(40, 30)]  # no job reaches the end of the window


@pytest.fixture
def policy(make_policy):
    return make_policy(moved=True)


class TestProbe:
    def test_it_compares_training_and_sampling(self, policy):
        training, sampling = support.probe(policy, sampled=True)

        assert training.largest < 1e-5
        assert sampling.largest < 1e-5

    def test_with_another_sampler_the_cached_decode_does_not_matter(self, policy):
        assert len(support.probe(policy, sampled=False)) == 1

    def test_it_leaves_the_model_as_it_was(self, policy):
        before = [parameter.detach().clone() for parameter in policy.model.parameters()]
        forwards = [m.__dict__.get("forward") for m in policy.model.modules()]

        support.probe(policy, sampled=True)

        assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))
        assert forwards == [m.__dict__.get("forward") for m in policy.model.modules()]
        assert policy.model.get_base_model().config._attn_implementation == attention.NAME

    def test_a_bfloat16_model_is_compared_in_float32_and_keeps_its_own_weights(self, tiny_model):
        policy = bfloat16(tiny_model)
        before = [(parameter.dtype, parameter.data_ptr()) for parameter in policy.model.parameters()]

        gaps = support.probe(policy, sampled=True)

        assert max(gap.largest for gap in gaps) < 1e-5
        assert before == [(parameter.dtype, parameter.data_ptr()) for parameter in policy.model.parameters()]

    def test_it_runs_the_code_that_trains_and_the_code_that_samples(self, policy, monkeypatch):
        """A fault put into either is seen, and the message says which of the two it is."""
        update = attention.GroupCache.to_rows
        with monkeypatch.context() as patch:
            patch.setattr(attention.GroupCache, "to_rows", lambda *args: 0.9 * update(*args))
            with pytest.raises(UnsupportedModel, match="sampling with a cache differ"):
                support.probe(policy, sampled=True)
            support.probe(policy, sampled=False)
        with monkeypatch.context() as patch:
            patch.setattr("worker.learn.batch.group_mask", seen_by_siblings)
            with pytest.raises(UnsupportedModel, match="training's forward pass differ"):
                support.probe(policy, sampled=False)
        assert isinstance(OwnGradient, type) and issubclass(support.Replay, TransformersSampler)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_logits_that_the_model_caps_are_seen_in_any_precision(self, policy, tiny_model, dtype):
        """A cap of 50 moves the logits by less than a bfloat16 number can tell."""
        policy = policy if dtype == "float32" else bfloat16(tiny_model)
        causal = policy.model.get_base_model()
        causal.forward = softcapped(causal.forward, 50.0)

        with pytest.raises(UnsupportedModel, match="LlamaForCausalLM is not supported: log-probabilities"):
            support.probe(policy, sampled=True)

    def test_an_adapter_that_is_computed_wrongly_is_seen(self, policy):
        """Although a fresh one is zero."""
        layer = next(m for n, m in policy.model.named_modules() if n.endswith("layers.0.self_attn.q_proj"))
        right = layer.forward
        layer.forward = lambda x: right(x) * 1.01

        with pytest.raises(UnsupportedModel):
            support.probe(policy, sampled=False)

    def test_whatever_a_layer_raises_is_a_refusal(self, policy):
        def broken(*args, **kwargs):
            raise KeyError("conv_state")

        policy.layers[0].forward = broken

        with pytest.raises(UnsupportedModel, match="it fails with KeyError: 'conv_state'"):
            support.probe(policy, sampled=False)

    def test_having_no_room_is_not_the_models_fault(self, policy):
        def greedy(*args, **kwargs):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.")

        policy.layers[0].forward = greedy

        with pytest.raises(NotEnoughMemory, match="Tried to allocate 20 GiB"):
            support.probe(policy, sampled=False)


def bfloat16(folder):
    entry = BaseModelEntry(path=folder, dtype="bfloat16", context=128)
    return Policy(load_base("tiny", entry, folder, "cpu"), rank=4, alpha=8, seed=0)


def seen_by_siblings(segment):
    """Plain causal attention over the pack: the second answer sees the first."""
    width = segment.shape[1]
    return torch.ones(width, width, dtype=torch.bool).tril()[None, None].expand(len(segment), 1, -1, -1)


def softcapped(forward, cap):
    def capped(*args, **kwargs):
        output = forward(*args, **kwargs)
        return SimpleNamespace(logits=cap * torch.tanh(output.logits / cap))

    return capped


def test_a_few_tokens_of_a_mixture_may_go_to_another_expert():
    flipped = support.Gap.between("x", torch.tensor([0.0] * 19 + [0.05]), torch.zeros(20))
    wrong = support.Gap.between("x", torch.tensor([0.0] * 10 + [0.05] * 10), torch.zeros(20))
    mixture = SimpleNamespace(num_experts=4, model_type="m", architectures=["M"])
    mixture.get_text_config = lambda: mixture

    support._judge(flipped, mixture, 40)
    with pytest.raises(UnsupportedModel):
        support._judge(wrong, mixture, 40)
    with pytest.raises(UnsupportedModel):
        support._judge(flipped, LlamaConfig(), 40)


def test_no_number_is_a_difference():
    gap = support.Gap.between("x", torch.tensor([float("nan")]), torch.zeros(1))

    assert gap.largest == float("inf")


def test_the_engine_that_answers_compares_with_transformers_too(tmp_path, monkeypatch):
    entry = BaseModelEntry(path=make_tiny_model(tmp_path), dtype="bfloat16", context=64)
    base = load_base("tiny", entry, tmp_path, "cpu")
    base.model.config.sliding_window = 32

    with pytest.raises(UnsupportedModel, match="sliding_window = 32"):
        ContinuousEngine(base)

    base.model.config.sliding_window = None
    base.model.forward = softcapped(base.model.forward, 5.0)
    with pytest.raises(UnsupportedModel, match="differ from transformers' own"):
        ContinuousEngine(base)
