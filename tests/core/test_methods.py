import pytest
from pydantic import ValidationError

from core.methods import Hyperparameters, Resolved, base_learning_rate, resolve


def ask(advanced=None, **fields):
    return Hyperparameters.model_validate(fields | {"advanced": advanced or {}})


def resolved(advanced=None, rows=100, parameters=500_000_000, context=4096, **fields):
    return resolve(ask(advanced, **fields), rows=rows, parameters=parameters, context=context)


def test_nothing_asked_is_everything_automatic():
    asked = Hyperparameters()

    automatic = {name for name, value in asked if value == "auto"}
    assert automatic == {
        "batch_size",
        "learning_rate_multiplier",
        "n_epochs",
        "compute_multiplier",
        "eval_interval",
        "eval_samples",
    }


def test_no_auto_is_left_when_resolved():
    assert set(Resolved.model_fields) - {"loss", "advantage_scale"} == {
        name for name, value in resolved() if isinstance(value, int | float)
    }


# Each "auto".


def test_a_batch_is_eight_prompts():
    assert resolved().batch_size == 8


def test_a_batch_is_never_more_than_the_file():
    assert resolved(rows=3).batch_size == 3
    assert resolved(rows=3, batch_size=64).batch_size == 3


@pytest.mark.parametrize(("rows", "epochs"), [(1000, 1), (160, 1), (159, 2), (32, 5), (8, 10), (1, 10)])
def test_a_small_file_is_read_until_there_were_twenty_steps_but_ten_times_at_most(rows, epochs):
    assert resolved(rows=rows).n_epochs == epochs


def test_a_step_takes_one_batch_and_the_last_may_be_smaller():
    assert resolved(rows=10, batch_size=4, n_epochs=1).total_steps == 3
    assert resolved(rows=10, batch_size=4, n_epochs=2).total_steps == 5


@pytest.mark.parametrize(("steps", "interval"), [(1, 1), (10, 1), (11, 2), (100, 10)])
def test_validation_happens_about_ten_times(steps, interval):
    run = resolved(rows=steps, batch_size=1, n_epochs=1)

    assert (run.total_steps, run.eval_interval) == (steps, interval)


def test_validation_takes_one_greedy_answer():
    run = resolved()

    assert (run.eval_samples, run.eval_temperature) == (1, 0.0)


def test_several_validation_answers_are_sampled_like_those_of_training():
    assert resolved({"temperature": 0.7}, eval_samples=4).eval_temperature == 0.7


def test_a_group_is_eight_answers_times_the_compute():
    assert resolved().group_size == 8
    assert resolved(compute_multiplier=2.0).group_size == 16
    assert resolved(compute_multiplier=0.001).group_size == 2


def test_smaller_models_learn_faster():
    rates = [base_learning_rate(int(billions * 1e9)) for billions in (0.135, 1, 8, 70)]

    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == 4


def test_the_multiplier_scales_the_automatic_learning_rate():
    assert resolved(learning_rate_multiplier=0.5).learning_rate == resolved().learning_rate / 2


@pytest.mark.parametrize(("loss", "scale"), [("grpo", "group"), ("dr_grpo", "none"), ("dapo", "batch")])
def test_each_loss_brings_its_own_scale_of_advantages(loss, scale):
    assert resolved({"loss": loss}).advantage_scale == scale
    assert resolved({"loss": loss, "advantage_scale": "group"}).advantage_scale == "group"


@pytest.mark.parametrize(("context", "tokens"), [(4096, 512), (1024, 512), (128, 64)])
def test_an_answer_has_half_the_context_and_512_tokens_at_most(context, tokens):
    assert resolved(context=context).max_completion_tokens == tokens


@pytest.mark.parametrize(
    ("field", "value"),
    [("batch_size", 4), ("n_epochs", 3), ("eval_interval", 5), ("eval_samples", 2)],
)
def test_what_was_asked_for_is_kept(field, value):
    assert getattr(resolved(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("group_size", 4),
        ("learning_rate", 0.01),
        ("eval_temperature", 0.5),
        ("max_completion_tokens", 2000),
        ("lora_rank", 4),
        ("lora_alpha", 4),
        ("temperature", 0.5),
        ("clip_low", 0.1),
        ("clip_high", 0.5),
        ("kl", 0.1),
        ("max_grad_norm", 2.0),
        ("warmup_steps", 3),
    ],
)
def test_what_was_asked_for_under_advanced_is_kept(field, value):
    assert getattr(resolved({field: value}), field) == value


# Each refusal.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 0),
        ("batch_size", 257),
        ("batch_size", "8"),
        ("batch_size", True),
        ("batch_size", 8.5),
        ("batch_size", None),
        ("batch_size", "automatic"),
        ("learning_rate_multiplier", 0),
        ("learning_rate_multiplier", float("nan")),
        ("learning_rate_multiplier", float("inf")),
        ("n_epochs", 0),
        ("n_epochs", 51),
        ("compute_multiplier", 0.00001),
        ("compute_multiplier", 10.1),
        ("eval_interval", 0),
        ("eval_samples", 0),
        ("eval_samples", 65),
        ("reasoning_effort", "extreme"),
        ("reasoning_effort", "high"),
        ("batchsize", 8),
    ],
)
def test_a_hyperparameter_out_of_bounds_is_refused(field, value):
    with pytest.raises(ValidationError) as refused:
        ask(**{field: value})

    assert field in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("loss", "ppo"),
        ("advantage_scale", "token"),
        ("group_size", 1),
        ("group_size", 257),
        ("learning_rate", 0),
        ("learning_rate", 1.5),
        ("lora_rank", 0),
        ("lora_rank", 257),
        ("lora_alpha", 0),
        ("temperature", 0),
        ("temperature", 2.1),
        ("max_completion_tokens", 0),
        ("clip_low", 0),
        ("clip_low", 1),
        ("clip_high", 0),
        ("kl", -0.1),
        ("kl", float("inf")),
        ("max_grad_norm", 0),
        ("warmup_steps", -1),
        ("eval_temperature", -0.1),
        ("eval_temperature", 2.1),
        ("learningrate", 0.1),
    ],
)
def test_an_advanced_hyperparameter_out_of_bounds_is_refused(field, value):
    with pytest.raises(ValidationError) as refused:
        ask({field: value})

    assert field in str(refused.value)


def test_several_greedy_answers_would_all_be_the_same():
    with pytest.raises(ValidationError, match="greedy"):
        ask({"eval_temperature": 0}, eval_samples=2)
    ask({"eval_temperature": 0}, eval_samples=1)
    ask({"eval_temperature": 0.1}, eval_samples=2)


def test_a_factor_and_the_number_it_scales_exclude_each_other():
    with pytest.raises(ValidationError, match="give it or learning_rate"):
        ask({"learning_rate": 0.1}, learning_rate_multiplier=2.0)
    with pytest.raises(ValidationError, match="give it or group_size"):
        ask({"group_size": 4}, compute_multiplier=2.0)
