"""What a job needs of memory: numbers that can be checked by hand, and what follows from them."""

import pytest
import torch
from transformers import LlamaConfig

from graders.types import Grade
from tests.fakes import learn
from tests.worker.test_training import asked, drawn, prompt, relative_difference, sampling
from worker import memory
from worker.memory import DoesNotFit, Needs, Shape
from worker.trainer import PeftTrainer
from worker.types import Group

# An 8 B model: 36 layers of 4096, gate and up of 12288, 8 key heads of 128, 152 k words, bfloat16.
LARGE = Shape(8_190_000_000, 7_568_000_000, 36, 4096, 12288, 2 * 8 * 128, 151_936, 2)
NEEDS = Needs(rank=32, token_budget=16_384, cache_bytes=10 * 2**30, packed=False, copies=1)


def test_the_parts_of_an_estimate_are_those_of_the_formulas():
    plain = memory.estimate(LARGE, NEEDS, checkpointed=False)

    assert plain.weights == 2 * 8_190_000_000
    assert plain.adapter == 16 * 36 * 32 * (4 * 4096 + 2 * 4096 + 2048 + 3 * (4096 + 12288))
    assert plain.activations == 16_384 * 36 * 4 * (14 * 4096 + 5 * 12288 + 7 * 32)
    assert plain.head == 512 * 151_936 * 16
    assert plain.cache == 10 * 2**30
    assert plain.total > plain.weights + plain.adapter + plain.activations + plain.head + plain.cache


def test_checkpointing_keeps_a_layers_input_and_one_layer():
    checkpointed = memory.estimate(LARGE, NEEDS, checkpointed=True)

    assert checkpointed.activations == 16_384 * 4 * (36 * 4096 + 14 * 4096 + 5 * 12288 + 7 * 32)


def test_activations_are_kept_where_they_fit_checkpointed_where_they_do_not_and_else_the_job_is_refused():
    plain, checkpointed = (memory.estimate(LARGE, NEEDS, flag).total for flag in (False, True))

    assert memory.plan(LARGE, NEEDS, plain) is False
    assert memory.plan(LARGE, NEEDS, plain - 1) is True
    assert memory.plan(LARGE, NEEDS, checkpointed) is True
    with pytest.raises(
        DoesNotFit, match=r"needs about [\d.]+ GiB \(weights 15.3.*19.5 GiB are free. Choose a smaller"
    ):
        memory.plan(LARGE, NEEDS, int(19.5 * 2**30))


def test_the_shape_is_read_from_a_config_without_making_the_weights():
    config = LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip

    shape = memory.shape_of(config, torch.bfloat16)

    linear = 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128)
    assert shape.linear_parameters == linear + 64 * 100
    assert shape.parameters == linear + 64 * 100 + 3 * 2 * 64 + 64
    assert (shape.layers, shape.hidden, shape.intermediate, shape.vocabulary) == (3, 64, 128, 100)
    assert shape.token_cache_bytes == 3 * 2 * 2 * 16 * 2


def test_the_adapter_is_counted_as_it_is(make_policy):
    policy = make_policy()
    shape = memory.shape_of(policy.model.get_base_model().config, torch.float32)

    assert memory.adapter_parameters(shape, 4) == sum(parameter.numel() for parameter in policy.trainable)


def test_what_is_free_is_the_least_of_machine_and_container(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    assert memory.available("cpu", meminfo, tmp_path) == 4000 * 1024

    (tmp_path / "memory.current").write_text("1500000\n")
    (tmp_path / "memory.stat").write_text("anon 900000\ninactive_file 500000\nactive_file 100000\n")
    for limit, free in (("max", 4000 * 1024), ("3000000", 2_000_000), ("900000000", 4000 * 1024)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert memory.available("cpu", meminfo, tmp_path) == free


def test_checkpointed_layers_give_the_same_gradients_and_the_same_samples(make_policy):
    found = []
    for checkpointed in (False, True):
        policy = make_policy(moved=True)
        layers = policy._decoder.layers
        calls = []
        layers[0].input_layernorm.register_forward_hook(
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
