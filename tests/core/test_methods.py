import pytest
from pydantic import ValidationError

from core.jobs.hyperparameters import (
    _ELSEWHERE,
    Advanced,
    Hyperparameters,
    base_learning_rate,
    meant,
    resolve,
)


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
    everything = {"overlong": "soft", "kl": 0.1, "std": "sample"}

    for run in (resolved(), resolved(everything), resolved({"loss": "cispo"}), resolved({"loss": "gspo"})):
        assert "auto" not in dict(run).values()


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


@pytest.mark.parametrize(
    ("loss", "scale"),
    [
        ("grpo", "group"),
        ("dr_grpo", "none"),
        ("bnpo", "batch"),
        ("dapo", "batch"),
        ("cispo", "batch"),
        ("gspo", "group"),
    ],
)
def test_each_loss_brings_its_own_scale_of_advantages(loss, scale):
    assert resolved({"loss": loss}).advantage_scale == scale
    assert resolved({"loss": loss, "advantage_scale": "group"}).advantage_scale == "group"


@pytest.mark.parametrize(
    ("loss", "clip", "bounds"),
    [
        ("grpo", (0.2, 0.2), (0.8, 1.2)),
        ("dr_grpo", (0.2, 0.2), (0.8, 1.2)),
        ("bnpo", (0.2, 0.2), (0.8, 1.2)),
        ("dapo", (0.2, 0.28), (0.8, 1.28)),
        ("gspo", (3e-4, 4e-4), (0.9997, 1.0004)),
        ("cispo", (None, None), (0.0, 5.0)),
    ],
)
def test_each_loss_brings_its_own_clip(loss, clip, bounds):
    run = resolved({"loss": loss})

    assert (run.clip_low, run.clip_high) == clip
    assert run.ratio_bounds == pytest.approx(bounds)
    assert run.cispo_cap == (5.0 if loss == "cispo" else None)


def test_half_a_clip_leaves_the_other_half_automatic():
    run = resolved({"loss": "gspo", "clip_high": 1e-3})

    assert (run.clip_low, run.clip_high) == (3e-4, 1e-3)


def test_the_std_is_that_of_the_population_where_there_is_one():
    assert resolved().std == "population"
    assert resolved({"std": "sample"}).std == "sample"
    assert resolved({"loss": "dr_grpo"}).std is None


def test_the_kl_is_estimated_by_k3_where_there_is_one():
    assert resolved().kl_estimator is None
    assert resolved({"kl": 0.1}).kl_estimator == "k3"
    assert resolved({"kl": 0.1, "kl_estimator": "k1"}).kl_estimator == "k1"


def test_the_samplers_gap_is_corrected_up_to_twice():
    assert (resolved().importance, resolved().importance_cap) == ("truncate", 2.0)
    assert resolved({"importance": "mask", "importance_cap": 1.5}).importance_cap == 1.5
    assert resolved({"importance": "none"}).importance_cap is None


def test_the_soft_fine_begins_a_fifth_before_the_end():
    assert resolved({"overlong": "soft", "max_completion_tokens": 100}).overlong_buffer == 20
    assert resolved({"overlong": "soft", "max_completion_tokens": 1}).overlong_buffer == 1
    asked = {"overlong": "soft", "max_completion_tokens": 100, "overlong_buffer": 100}
    assert resolved(asked).overlong_buffer == 100
    assert resolved({"overlong": "mask"}).overlong_buffer is None


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
        ("updates_per_batch", 2),
        ("supervision", "process"),
        ("overlong", "mask"),
        ("importance_cap", 3.0),
    ],
)
def test_what_was_asked_for_under_advanced_is_kept(field, value):
    assert getattr(resolved({field: value}), field) == value


# Each refusal.


def test_a_null_is_the_default():
    nulls = dict.fromkeys(Hyperparameters.model_fields)

    assert Hyperparameters.model_validate(nulls) == Hyperparameters()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 0),
        ("batch_size", 257),
        ("batch_size", "8"),
        ("batch_size", True),
        ("batch_size", 8.5),
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
        ("batchsize", 8),
    ],
)
def test_a_hyperparameter_out_of_bounds_is_refused(field, value):
    with pytest.raises(ValidationError) as refused:
        ask(**{field: value})

    assert field in str(refused.value)


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
def test_a_reasoning_effort_is_kept_and_warned_about(effort):
    asked = ask(reasoning_effort=effort)

    assert asked.reasoning_effort == effort
    (warning,) = asked.warnings
    assert f"reasoning_effort '{effort}' has no effect" in warning


def test_the_default_reasoning_effort_warns_of_nothing():
    assert ask(reasoning_effort="default").warnings == []


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
        ("updates_per_batch", 0),
        ("updates_per_batch", 17),
        ("std", "biased"),
        ("supervision", "steps"),
        ("kl_estimator", "k2"),
        ("importance", "token"),
        ("importance_cap", 1),
        ("cispo_cap", 0.2),
        ("overlong", "drop"),
        ("overlong_buffer", 0),
        ("reference_refresh_steps", -1),
        ("eval_temperature", -0.1),
        ("eval_temperature", 2.1),
        ("learningrate", 0.1),
    ],
)
def test_an_advanced_hyperparameter_out_of_bounds_is_refused(field, value):
    with pytest.raises(ValidationError) as refused:
        ask({field: value})

    assert field in str(refused.value)


@pytest.mark.parametrize(
    ("advanced", "says"),
    [
        ({"loss": "cispo", "clip_low": 0.1}, "use cispo_cap"),
        ({"loss": "cispo", "clip_high": 0.1}, "use cispo_cap"),
        ({"cispo_cap": 5.0}, "cispo_cap is only for loss 'cispo'"),
        ({"loss": "dr_grpo", "std": "sample"}, "std has no effect"),
        ({"advantage_scale": "none", "std": "population"}, "std has no effect"),
        ({"importance": "none", "importance_cap": 2.0}, "importance_cap has no effect"),
        ({"kl_estimator": "k3"}, "have no effect with kl 0"),
        ({"reference_refresh_steps": 5}, "have no effect with kl 0"),
        ({"supervision": "process", "loss": "gspo"}, "one ratio per answer"),
        ({"supervision": "process", "overlong": "soft"}, "overlong 'soft' needs supervision"),
        ({"overlong_buffer": 10}, "overlong_buffer needs overlong 'soft'"),
        (
            {"overlong": "mask", "overlong_buffer": 10, "max_completion_tokens": 100},
            "overlong_buffer needs overlong 'soft'",
        ),
        ({"overlong": "soft", "overlong_buffer": 10}, "needs a max_completion_tokens"),
        ({"overlong": "soft", "overlong_buffer": 11, "max_completion_tokens": 10}, "at least as large"),
    ],
)
def test_a_knob_that_would_do_nothing_is_refused(advanced, says):
    with pytest.raises(ValidationError, match=says):
        ask(advanced)


@pytest.mark.parametrize(
    "advanced",
    [
        {"loss": "cispo", "cispo_cap": 3.0, "updates_per_batch": 4},
        {"loss": "dr_grpo", "advantage_scale": "group", "std": "sample"},
        {"kl": 0.1, "kl_estimator": "k1", "reference_refresh_steps": 5},
        {"supervision": "process", "overlong": "mask"},
        {"overlong": "soft", "overlong_buffer": 10, "max_completion_tokens": 10},
    ],
)
def test_what_a_job_keeps_is_accepted_again_when_it_runs(advanced):
    asked = ask(advanced)

    assert Hyperparameters.model_validate(asked.model_dump(mode="json")) == asked


def test_several_greedy_answers_would_all_be_the_same():
    with pytest.raises(ValidationError, match="greedy"):
        ask({"eval_temperature": 0}, eval_samples=2)
    ask({"eval_temperature": 0}, eval_samples=1)
    ask({"eval_temperature": 0.1}, eval_samples=2)


def test_a_factor_and_the_number_it_scales_exclude_each_other():
    with pytest.raises(ValidationError, match="give only one of it and learning_rate"):
        ask({"learning_rate": 0.1}, learning_rate_multiplier=2.0)
    with pytest.raises(ValidationError, match="give only one of it and group_size"):
        ask({"group_size": 4}, compute_multiplier=2.0)


@pytest.mark.parametrize("rule", ["papers", "signal"])
def test_what_a_step_is_a_mean_over_is_asked_for_and_shown(rule):
    assert resolved().normalize == "papers"
    assert resolved({"normalize": rule}).normalize == rule


def test_every_advanced_name_is_recognised_one_level_too_high():
    for name in Advanced.model_fields:
        assert meant(f"method.reinforcement.hyperparameters.{name}") == f"hyperparameters.advanced.{name}"


def test_every_name_of_another_trainer_means_one_that_exists():
    known = Hyperparameters.model_fields.keys() | Advanced.model_fields.keys()

    assert set(_ELSEWHERE.values()) <= known
    assert not _ELSEWHERE.keys() & known
