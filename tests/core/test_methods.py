import json
import operator
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from core.jobs import hyperparameter_groups as groups
from core.jobs.hyperparameter_groups import Sampling, TemplateChoice
from core.jobs.hyperparameter_places import (
    GROUPS,
    PLACES,
    VARIANTS,
    OtherPath,
    param_at,
    param_of,
    with_values,
)
from core.jobs.hyperparameters import (
    ELSEWHERE,
    Advanced,
    Hyperparameters,
    Resolved,
    base_learning_rate,
    resolve,
    similar_hyperparameter,
)
from core.jobs.offline_hyperparameters import LogitsAdvanced, OfflineAdvanced
from tests.hyperparameters import in_groups
from tests.present import untyped


def ask(advanced: dict[str, Any] | None = None, **fields: Any) -> Hyperparameters:
    return Hyperparameters.model_validate(fields | {"advanced": in_groups(advanced or {})})


def resolved(
    advanced: Any = None, rows: int = 100, parameters: int = 500_000_000, context: int = 4096, **fields: Any
) -> Resolved:
    return resolve(ask(advanced, **fields), rows=rows, parameters=parameters, context=context)


def test_nothing_asked_is_everything_automatic() -> None:
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


def test_no_auto_is_left_when_resolved() -> None:
    everything = {"overlong": "soft", "kl": 0.1, "std": "sample"}

    for run in (resolved(), resolved(everything), resolved({"loss": "cispo"}), resolved({"loss": "gspo"})):
        assert "auto" not in dict(run).values()


# Each "auto".


def test_a_batch_is_eight_prompts() -> None:
    assert resolved().batch_size == 8


def test_a_batch_is_never_more_than_the_file() -> None:
    assert resolved(rows=3).batch_size == 3
    assert resolved(rows=3, batch_size=64).batch_size == 3


@pytest.mark.parametrize(("rows", "epochs"), [(1000, 1), (160, 1), (159, 2), (32, 5), (8, 10), (1, 10)])
def test_a_small_file_is_read_until_there_were_twenty_steps_but_ten_times_at_most(
    rows: int, epochs: int
) -> None:
    assert resolved(rows=rows).n_epochs == epochs


def test_a_step_takes_one_batch_and_the_last_may_be_smaller() -> None:
    assert resolved(rows=10, batch_size=4, n_epochs=1).total_steps == 3
    assert resolved(rows=10, batch_size=4, n_epochs=2).total_steps == 5


@pytest.mark.parametrize(("steps", "interval"), [(1, 1), (10, 1), (11, 2), (100, 10)])
def test_validation_happens_about_ten_times(steps: int, interval: int) -> None:
    run = resolved(rows=steps, batch_size=1, n_epochs=1)

    assert (run.total_steps, run.eval_interval) == (steps, interval)


def test_validation_takes_one_greedy_answer() -> None:
    run = resolved()

    assert (run.eval_samples, run.eval_temperature) == (1, 0.0)


def test_several_validation_answers_are_sampled_like_those_of_training() -> None:
    assert resolved({"temperature": 0.7}, eval_samples=4).eval_temperature == 0.7


def test_a_group_is_eight_answers_times_the_compute() -> None:
    assert resolved().group_size == 8
    assert resolved(compute_multiplier=2.0).group_size == 16
    assert resolved(compute_multiplier=0.001).group_size == 2


def test_smaller_models_learn_faster() -> None:
    rates = [base_learning_rate(int(billions * 1e9)) for billions in (0.135, 1, 8, 70)]

    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == 4


def test_the_multiplier_scales_the_automatic_learning_rate() -> None:
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
        ("dppo", "none"),
    ],
)
def test_each_loss_brings_its_own_scale_of_advantages(loss: str, scale: str) -> None:
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
def test_each_loss_brings_its_own_clip(loss: str, clip: tuple[Any, ...], bounds: tuple[float, float]) -> None:
    run = resolved({"loss": loss})

    assert (run.clip_low, run.clip_high) == clip
    assert run.ratio_bounds == pytest.approx(bounds)
    assert run.cispo_cap == (5.0 if loss == "cispo" else None)


def test_half_a_clip_leaves_the_other_half_automatic() -> None:
    run = resolved({"loss": "gspo", "clip_high": 1e-3})

    assert (run.clip_low, run.clip_high) == (3e-4, 1e-3)


def test_the_std_is_that_of_the_population_where_there_is_one() -> None:
    assert resolved().std == "population"
    assert resolved({"std": "sample"}).std == "sample"
    assert resolved({"loss": "dr_grpo"}).std is None


def test_the_kl_is_estimated_by_k3_where_there_is_one() -> None:
    assert resolved().kl_estimator is None
    assert resolved({"kl": 0.1}).kl_estimator == "k3"
    assert resolved({"kl": 0.1, "kl_estimator": "k1"}).kl_estimator == "k1"


def test_the_kl_in_a_reward_is_estimated_by_k1() -> None:
    loss = {"loss": "reinforce_plus_plus"}

    assert resolved(loss).kl_estimator is None
    assert resolved(loss | {"kl": 0.1}).kl_estimator == "k1"
    assert resolved(loss | {"kl": 0.1, "kl_estimator": "k1"}).kl_estimator == "k1"


def test_ppo_has_a_value_head_that_learns_as_fast_as_the_adapter() -> None:
    run = resolved({"loss": "ppo", "learning_rate": 0.01})

    assert (run.gae_lambda, run.gamma, run.value_clip, run.value_weight) == (0.95, 1.0, 0.2, 0.1)
    assert run.value_learning_rate == 0.01
    assert resolved({"loss": "ppo"}).value_learning_rate == resolved().learning_rate
    assert resolved({"loss": "ppo", "value_learning_rate": 0.5}).value_learning_rate == 0.5
    assert (run.ratio_bounds, run.advantage_scale, run.supervision) == ((0.8, 1.2), "batch", "outcome")


@pytest.mark.parametrize(
    "name",
    ["gae_lambda", "gamma", "value_clip", "value_weight", "value_learning_rate", "value_warmup_steps"],
)
def test_other_losses_have_no_value_head(name: str) -> None:
    assert getattr(resolved(), name) is None
    with pytest.raises(ValidationError, match=rf"{PLACES[name]}\n  Extra inputs"):
        ask({"loss": "reinforce_plus_plus", name: 0.5})


@pytest.mark.parametrize("loss", ["reinforce_plus_plus", "ppo"])
@pytest.mark.parametrize(
    ("advanced", "says"),
    [
        ({"off_policy_steps": 1}, "schedule.steps cannot be combined with loss '{}'"),
        ({"overlap": True}, "schedule.overlap cannot be combined with loss '{}'"),
        ({"resample_prompts": 8}, "schedule.resample_prompts cannot be combined with loss '{}'"),
        ({"stop_after_silent_steps": 2}, "stopping.after_silent_steps cannot be combined with loss '{}'"),
        ({"fail_below_signal": 0.1}, "stopping.fail_below_signal cannot be combined with loss '{}'"),
        ({"kl": 0.1, "kl_estimator": "k3"}, "kl.estimator 'k3' cannot be combined with loss '{}'"),
        ({"supervision": "process"}, "loss.supervision\n  Extra inputs"),
        ({"normalize": "signal"}, "normalize"),
        ({"advantage_scale": "group"}, "advantage_scale"),
    ],
)
def test_rewards_of_tokens_refuse_what_they_cannot_be_combined_with(
    loss: str, advanced: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValidationError, match=says.format(loss)):
        ask({"loss": loss} | advanced)


def test_the_samplers_gap_is_corrected_up_to_twice() -> None:
    assert (resolved().importance, resolved().importance_cap) == ("truncate", 2.0)
    assert resolved({"importance": "mask", "importance_cap": 1.5}).importance_cap == 1.5
    assert resolved({"importance": "mask", "importance_cap": 1.5}).importance_floor == 1 / 1.5
    assert resolved({"importance": "none"}).importance_cap is None


def test_the_soft_fine_begins_a_fifth_before_the_end() -> None:
    assert resolved({"overlong": "soft", "max_completion_tokens": 100}).overlong_buffer == 20
    assert resolved({"overlong": "soft", "max_completion_tokens": 1}).overlong_buffer == 1
    asked = {"overlong": "soft", "max_completion_tokens": 100, "overlong_buffer": 100}
    assert resolved(asked).overlong_buffer == 100
    assert resolved({"overlong": "mask"}).overlong_buffer is None


@pytest.mark.parametrize(("context", "tokens"), [(4096, 512), (1024, 512), (128, 64)])
def test_an_answer_has_half_the_context_and_512_tokens_at_most(context: int, tokens: int) -> None:
    assert resolved(context=context).max_completion_tokens == tokens


@pytest.mark.parametrize(
    ("field", "value"),
    [("batch_size", 4), ("n_epochs", 3), ("eval_interval", 5), ("eval_samples", 2)],
)
def test_what_was_asked_for_is_kept(field: str, value: int) -> None:
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
        ("step_kl", 0.02),
        ("updates_per_batch", 2),
        ("mini_batches", 2),
        ("supervision", "process"),
        ("overlong", "mask"),
        ("importance_cap", 3.0),
    ],
)
def test_what_was_asked_for_under_advanced_is_kept(field: str, value: float | str) -> None:
    assert getattr(resolved({field: value}), field) == value


# Each refusal.


def test_a_null_is_the_default() -> None:
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
def test_a_hyperparameter_out_of_bounds_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        ask(**{field: value})

    assert field in str(refused.value)


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
def test_a_reasoning_effort_is_kept_and_warned_about(effort: str) -> None:
    asked = ask(reasoning_effort=effort)

    assert asked.reasoning_effort == effort
    (warning,) = asked.warnings
    assert f"reasoning_effort '{effort}' has no effect" in warning


def test_the_default_reasoning_effort_warns_of_nothing() -> None:
    assert ask(reasoning_effort="default").warnings == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("loss", "trpo"),
        ("gae_lambda", 1.1),
        ("gae_lambda", -0.1),
        ("gamma", 0),
        ("value_clip", 0),
        ("value_weight", -0.1),
        ("value_learning_rate", 0),
        ("value_warmup_steps", -1),
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
        ("step_kl", -0.1),
        ("updates_per_batch", 0),
        ("mini_batches", 0),
        ("mini_batches", 65),
        ("updates_per_batch", 17),
        ("std", "biased"),
        ("supervision", "steps"),
        ("kl_estimator", "k4"),
        ("importance", "token"),
        ("importance_cap", 1),
        ("cispo_cap", 0.2),
        ("overlong", "drop"),
        ("overlong_buffer", 0),
        ("reference_refresh_steps", -1),
        ("kl_warmup_steps", -1),
        ("eval_temperature", -0.1),
        ("eval_temperature", 2.1),
        ("learningrate", 0.1),
    ],
)
def test_an_advanced_hyperparameter_out_of_bounds_is_refused(field: str, value: str | float) -> None:
    with pytest.raises(ValidationError) as refused:
        ask(NEEDS.get(field, {}) | untyped({field: value}))

    assert str(PLACES.get(field, field)) in str(refused.value)


@pytest.mark.parametrize(
    ("advanced", "says"),
    [
        ({"loss": "dr_grpo", "std": "sample"}, "std has no effect"),
        ({"advantage_scale": "none", "std": "population"}, "std has no effect"),
        ({"supervision": "process", "overlong": "soft"}, "overlong 'soft' needs supervision"),
        ({"overlap": True, "mini_batches": 2}, "schedule.overlap needs optimizer.mini_batches 1"),
        ({"overlong": "soft", "overlong_buffer": 10}, "needs a sampling.max_completion_tokens"),
        ({"overlong": "soft", "overlong_buffer": 11, "max_completion_tokens": 10}, "at least as large"),
        (
            {"loss": "dppo", "importance": "truncate"},
            "importance 'truncate' cannot be combined with loss 'dppo'",
        ),
        ({"loss": "dppo", "ratio_max": 3.0}, "Extra inputs are not permitted"),
        ({"ratio_max": 1.28}, "ratio_max must be above 1 \\+ clip_high, which is 1.28"),
        ({"off_policy_threshold": 0.5}, "off_policy_threshold needs schedule 'off_policy'"),
        (
            {"importance_level": "answer", "off_policy_steps": 1, "continue_in_flight": True},
            "importance.level 'answer' needs importance.cap with schedule 'off_policy'",
        ),
        ({"reject_high": 1.1}, "reject_low and reject_high need reject"),
        ({"importance_reject": "k3"}, "reject 'k3' needs reject_high"),
        ({"importance_reject": "k3", "reject_low": 0.1, "reject_high": 0.1}, "reject_low has no effect"),
        ({"importance_reject": "geometric", "reject_high": 0.9}, "reject_high must be above 1"),
        (
            {"importance_reject": "geometric", "off_policy_steps": 1},
            "needs reject_low and reject_high with schedule 'off_policy'",
        ),
        ({"importance": "none", "importance_level": "answer"}, "Extra inputs are not permitted"),
        ({"importance": "truncate", "importance_floor": 0.5}, "Extra inputs are not permitted"),
        ({"length_weight": 0.25, "supervision": "process"}, "length needs supervision 'outcome'"),
        ({"advantage_scale": "mean", "std": "sample"}, "std has no effect with advantage_scale 'mean'"),
        ({"advantage_scale": "mean", "overlong": "soft"}, "'mean' cannot be combined with overlong 'soft'"),
        ({"advantage_scale": "each", "length_weight": 0.25}, "'each' cannot be combined with length"),
        ({"advantage_scale": "each", "supervision": "process"}, "'each' cannot be combined with supervision"),
    ],
)
def test_a_knob_that_would_do_nothing_is_refused(advanced: dict[str, Any], says: str) -> None:
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
        {
            "loss": "dppo",
            "divergence": "kl",
            "importance": "none",
            "off_policy_threshold": 0.5,
            "off_policy_steps": 1,
        },
        {"importance": "mask", "importance_level": "answer", "importance_cap": 3.0, "importance_floor": 0.0},
        {"importance_reject": "k3", "reject_high": 0.01, "length_weight": 0.25, "rollback": False},
        {"overlap": True, "loss": "dppo"},
        {"overlap": True, "loss": "dppo", "advantage_scale": "batch", "log_ratio_penalty": 0.0},
    ],
)
def test_what_a_job_keeps_is_accepted_again_when_it_runs(advanced: dict[str, Any]) -> None:
    asked = ask(advanced)

    assert Hyperparameters.model_validate(asked.model_dump(mode="json")) == asked


def test_the_bounds_of_answers_are_wider_than_those_of_tokens() -> None:
    for kind in ("truncate", "mask"):
        run = resolved({"importance": kind, "importance_level": "answer"})
        assert run.importance_cap == 3.0
    assert run.importance_floor == 0.0
    assert resolved({"importance": "mask"}).importance_floor == 0.5
    assert ask({"importance_level": "answer", "importance_cap": 5.0, "off_policy_steps": 1})


def test_the_plain_log_ratio_is_accepted_with_a_warning() -> None:
    [warning] = ask({"kl": 0.1, "kl_estimator": "k1_plain"}).warnings

    assert "the mean of its gradient is zero" in warning
    assert ask({"kl": 0.1, "kl_estimator": "k2"}).warnings == []


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("r1_zero", {"promt": "Q: {prompt}"}, "has no argument 'promt'; it has 'prompt', 'strftime_now'"),
        ("r1_zero", {"prompt": "no placeholder"}, "has no {prompt}"),
        ("r1_zero", {"prompt": True}, "has no {prompt}"),
        ("plain", {"prompt": "Q: {prompt}"}, "has no argument 'prompt'"),
    ],
)
def test_an_argument_that_the_named_template_does_not_read_is_refused(
    name: str, arguments: dict[str, Any], says: str
) -> None:
    choice = {"chat_template": name, "chat_template_kwargs": arguments}

    for group in (Sampling, TemplateChoice):
        with pytest.raises(ValidationError, match=says):
            group.model_validate(choice)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("r1_zero", {"prompt": "Q: {prompt}", "strftime_now": "2026-11-26"}),
        ("plain", {}),
        ("auto", {"enable_thinking": False}),
    ],
)
def test_an_argument_that_a_template_may_read_is_accepted(name: str, arguments: dict[str, Any]) -> None:
    choice = {"chat_template": name, "chat_template_kwargs": arguments}

    assert TemplateChoice.model_validate(choice).chat_template_kwargs == arguments


def test_several_greedy_answers_would_all_be_the_same() -> None:
    with pytest.raises(ValidationError, match="greedy"):
        ask({"eval_temperature": 0}, eval_samples=2)
    ask({"eval_temperature": 0}, eval_samples=1)
    ask({"eval_temperature": 0.1}, eval_samples=2)


def test_a_factor_and_the_number_it_scales_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match=r"give only one of it and optimizer\.learning_rate"):
        ask({"learning_rate": 0.1}, learning_rate_multiplier=2.0)
    with pytest.raises(ValidationError, match=r"give only one of it and sampling\.group_size"):
        ask({"group_size": 4}, compute_multiplier=2.0)
    ask({"learning_rate": 0.1, "group_size": 4}, learning_rate_multiplier=1.0, compute_multiplier=1.0)


@pytest.mark.parametrize("rule", ["papers", "signal"])
def test_what_a_step_is_a_mean_over_is_asked_for_and_shown(rule: str) -> None:
    assert resolved().normalize == "papers"
    assert resolved({"normalize": rule}).normalize == rule


def test_every_group_is_recognised_one_level_too_high() -> None:
    for name in Advanced.model_fields:
        assert (
            similar_hyperparameter(f"method.reinforcement.hyperparameters.{name}")
            == f"hyperparameters.advanced.{name}"
        )


@pytest.mark.parametrize("level", ["hyperparameters", "hyperparameters.advanced"])
def test_every_name_of_a_resolved_value_means_its_field(level: str) -> None:
    for name in PLACES.keys() - GROUPS:
        assert (
            similar_hyperparameter(f"method.reinforcement.{level}.{name}")
            == f"hyperparameters.advanced.{PLACES[name]}"
        )


def test_every_name_of_another_trainer_means_one_that_exists() -> None:
    known = Hyperparameters.model_fields.keys() | PLACES.keys() | {"train"}

    assert set(ELSEWHERE.values()) <= known
    assert not ELSEWHERE.keys() & known


# The groups.

# A value for each name in `Resolved` that is not its default.
OTHER_VALUES = {
    "loss": "dapo",
    "advantage_scale": "group",
    "std": "sample",
    "normalize": "signal",
    "supervision": "process",
    "group_size": 4,
    "learning_rate": 0.01,
    "lora_rank": 4,
    "lora_alpha": 8,
    "lora_targets": ["q_proj", "v_proj"],
    "temperature": 0.5,
    "max_completion_tokens": 200,
    "overlong": "mask",
    "overlong_buffer": 20,
    "resample_prompts": 3,
    "off_policy_steps": 1,
    "continue_in_flight": True,
    "stop_after_flat_evals": 1,
    "stop_after_silent_steps": 2,
    "stop_above_kl": 0.5,
    "stop_below_entropy": 0.1,
    "on_alarm": "pause",
    "fail_below_signal": 0.2,
    "require_improvement": True,
    "updates_per_batch": 2,
    "mini_batches": 3,
    "prompt_order": "file",
    "clip_low": 0.1,
    "clip_high": 0.5,
    "cispo_cap": 3.0,
    "ratio_max": 3.0,
    "divergence": "kl",
    "log_ratio_penalty": 0.01,
    "gae_lambda": 0.9,
    "gamma": 0.99,
    "value_clip": 0.5,
    "value_weight": 1.0,
    "value_learning_rate": 0.002,
    "value_warmup_steps": 5,
    "overlap": True,
    "importance": "mask",
    "importance_cap": 1.5,
    "importance_floor": 0.0,
    "importance_level": "answer",
    "importance_reject": "geometric",
    "reject_low": 0.9,
    "reject_high": 1.1,
    "off_policy_threshold": 0.5,
    "length_weight": 0.5,
    "kl": 0.1,
    "kl_estimator": "k1",
    "kl_warmup_steps": 4,
    "reference_refresh_steps": 5,
    "max_grad_norm": 2.0,
    "warmup_steps": 5,
    "step_kl": 0.02,
    "rollback": False,
    "learning_rate_schedule": "cosine",
    "chat_template": "plain",
    "chat_template_kwargs": {"enable_thinking": False},
    "thinking_budget": 64,
    "eval_temperature": 0.7,
    "eval_pass_score": 0.5,
}
# What it needs beside it.
NEEDS = {
    "overlong_buffer": {"overlong": "soft", "max_completion_tokens": 200},
    "cispo_cap": {"loss": "cispo"},
    "divergence": {"loss": "dppo"},
    "log_ratio_penalty": {"loss": "dppo"},
    "importance_floor": {"importance": "mask"},
    "reject_low": {"importance_reject": "geometric"},
    "reject_high": {"importance_reject": "geometric"},
    "off_policy_threshold": {"updates_per_batch": 2},
    "continue_in_flight": {"off_policy_steps": 1},
    "gae_lambda": {"loss": "ppo"},
    "gamma": {"loss": "ppo"},
    "value_clip": {"loss": "ppo"},
    "value_weight": {"loss": "ppo"},
    "value_learning_rate": {"loss": "ppo"},
    "value_warmup_steps": {"loss": "ppo"},
    "kl_estimator": {"kl": 0.1},
    "kl_warmup_steps": {"kl": 0.1},
    "reference_refresh_steps": {"kl": 0.1},
}

choices = {
    "loss": st.sampled_from(
        ["grpo", "dr_grpo", "bnpo", "dapo", "dppo", "cispo", "gspo", "rloo", "reinforce_plus_plus", "ppo"]
    ),
    "overlong": st.sampled_from(["score", "mask", "soft"]),
    "importance": st.sampled_from(["truncate", "mask", "none"]),
    "kl": st.sampled_from([0.0, 0.1]),
    "off_policy_steps": st.sampled_from([0, 1, 4]),
}
requests = st.fixed_dictionaries(
    {}, optional={name: choices.get(name, st.just(value)) for name, value in OTHER_VALUES.items()}
)


def accepted(advanced: Any) -> Hyperparameters | None:
    try:
        return ask(advanced)
    except ValidationError:
        return None


@pytest.mark.parametrize("name", PLACES)
def test_each_value_of_a_run_is_that_of_its_field(name: str) -> None:
    run = resolved(NEEDS.get(name, {}) | untyped({name: OTHER_VALUES[name]}))

    assert getattr(run, name) == OTHER_VALUES[name]
    assert name == "loss" or run != resolved(NEEDS.get(name))


@given(request=requests)
def test_what_a_job_shows_is_accepted_again(request: Any) -> None:
    asked = accepted(request)
    if asked is None:
        return
    shown = asked.model_dump(mode="json")["advanced"]

    assert list(shown) == list(Advanced.model_fields)
    assert ask(shown) == asked


@given(request=requests)
def test_what_a_run_resolved_is_accepted_again(request: Any) -> None:
    asked = accepted(request)
    if asked is None:
        return
    run = resolve(asked, rows=100, parameters=500_000_000, context=4096)
    again = ask(with_values(asked.model_dump(mode="json")["advanced"], dict(run)))

    assert resolve(again, rows=100, parameters=500_000_000, context=4096).model_dump(
        include=set(PLACES)
    ) == run.model_dump(include=set(PLACES))


@pytest.mark.parametrize(
    "chosen",
    [{group: {"type": name}} for group, variants in VARIANTS.items() for name in variants],
    ids=str,
)
def test_each_variant_of_a_group_is_chosen_by_its_type(chosen: Any) -> None:
    [(group, variant)] = chosen.items()
    asked = ask(chosen)

    assert asked.model_dump(mode="json")["advanced"][group]["type"] == variant["type"]
    assert resolve(asked, rows=100, parameters=500_000_000, context=4096)


def test_a_loss_has_only_the_fields_that_it_reads() -> None:
    for loss in ({"type": "cispo", "clip_low": 0.1}, {"type": "dapo", "cap": 5.0}):
        with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
            ask({"loss": loss})
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        ask({"loss": {"type": "gspo", "supervision": "process"}})
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        ask({"schedule": {"type": "off_policy", "overlap": True}})


@pytest.mark.parametrize("value", ["dapo", 0.1, True])
@pytest.mark.parametrize("group", GROUPS)
def test_a_plain_value_for_a_group_is_refused_with_the_shape_of_the_group(group: str, value: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        Hyperparameters.model_validate({"advanced": {group: value}})

    [error] = refused.value.errors()
    assert error["loc"] == ("advanced", group)
    _, _, example = error["msg"].partition("expected an object such as ")
    assert Hyperparameters.model_validate({"advanced": {group: json.loads(example)}})


def test_a_null_in_a_group_and_for_a_group_is_the_default() -> None:
    nulls = dict.fromkeys(GROUPS) | {"sampling": {"temperature": None}}

    assert Hyperparameters.model_validate({"advanced": nulls}) == Hyperparameters()


def test_a_penalty_of_zero_is_no_group() -> None:
    with pytest.raises(ValidationError, match=r"expected an object such as .*, or none"):
        Hyperparameters.model_validate({"advanced": {"kl": 0}})


def test_python_code_may_build_the_groups() -> None:
    asked = Hyperparameters(advanced=Advanced(loss=groups.Cispo(cap=3.0), lora=groups.Lora(rank=4)))

    assert asked == ask({"loss": {"type": "cispo", "cap": 3.0}, "lora": {"rank": 4}})


@pytest.mark.parametrize(
    ("advanced", "place"),
    [
        ({"lora": {"rank": 0}}, ("lora", "rank")),
        ({"evaluation": {"temperature": 9.0}}, ("evaluation", "temperature")),
        ({"loss": {"type": "trpo"}}, ("loss", "type")),
        ({"loss": {"cap": 5.0}}, ("loss", "type")),
        ({"loss": {"type": "cispo", "cap": 0.5}}, ("loss", "cap")),
        ({"kl": {"weight": 0}}, ("kl", "weight")),
        ({"kl": {}}, ("kl", "weight")),
        ({"schedule": {"type": "off_policy", "steps": 5}}, ("schedule", "steps")),
        ({"schedule": {"type": "off_policy", "steps": 0}}, ("schedule", "steps")),
        ({"lora_rank": 4}, ("lora_rank",)),
        ({"loss": {"type": "dr_grpo", "std": "sample"}}, ("loss",)),
    ],
    ids=str,
)
def test_an_error_is_at_the_path_that_was_sent(advanced: dict[str, Any], place: tuple[Any, ...]) -> None:
    with pytest.raises(ValidationError) as refused:
        Hyperparameters.model_validate({"advanced": advanced})

    loc = refused.value.errors()[0]["loc"]
    assert [step for step in loc if "auto" not in str(step)] == ["advanced", *place]


@pytest.mark.parametrize(
    ("advanced", "says"),
    [
        ({"off_policy_steps": 1, "importance": "none"}, "schedule.steps needs importance"),
        (
            {"off_policy_steps": 2, "continue_in_flight": True},
            "schedule.continue_in_flight needs schedule.steps 1",
        ),
        ({"overlap": True, "kl": 0.1}, "schedule.overlap cannot be combined with kl"),
        (
            {"overlap": True, "loss": "dppo", "advantage_scale": "batch"},
            "schedule.overlap cannot be combined with loss.log_ratio_penalty and advantage_scale 'batch'",
        ),
        (
            {"overlap": True, "loss": "dppo", "advantage_scale": "each"},
            "set log_ratio_penalty to 0, or choose the scale",
        ),
        (
            {"overlong": "soft", "overlong_buffer": 9},
            "overlong.buffer needs a sampling.max_completion_tokens",
        ),
    ],
)
def test_a_rule_between_groups_names_both_fields(advanced: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=f"{says}"):
        ask(advanced)


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("lora.r", "lora.rank"),
        ("lora.rnak", "lora.rank"),
        ("kl.beta", "kl.weight"),
        ("kl.warmup_step", "kl.warmup_steps"),
        ("optimizer.warmup_step", "optimizer.warmup_steps"),
        ("loss.epsilon", "loss.clip_low"),
        ("stopping.stop_above_kl", "stopping.above_kl"),
        ("sampling.max_new_tokens", "sampling.max_completion_tokens"),
        ("loss.clip_low", None),  # it exists, and this loss does not have it
        ("colours.rank", None),
    ],
)
def test_an_unknown_name_in_a_group_means_a_field_of_a_group(written: str, hint: str | None) -> None:
    path = f"method.reinforcement.hyperparameters.advanced.{written}"

    assert similar_hyperparameter(path) == (hint and f"hyperparameters.advanced.{hint}")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.floats()
    | st.sampled_from(["auto", "none", "dapo", "soft"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["type", "cap", "steps", "weight", "rank", "std"]), inner, max_size=3
        )
    ),
    max_leaves=5,
)


@given(
    advanced=st.dictionaries(
        st.sampled_from([*GROUPS, "train", "lora_rank", "colour"]), json_values, max_size=6
    )
)
@pytest.mark.slow
def test_any_json_is_accepted_or_refused_inside_of_advanced(advanced: Any) -> None:
    try:
        asked = Hyperparameters.model_validate({"advanced": advanced})
    except ValidationError as refused:
        assert all(error["loc"][0] == "advanced" for error in refused.errors())
    else:
        assert ask(asked.model_dump(mode="json")["advanced"]) == asked


def test_a_refusal_names_a_path_that_requests_have() -> None:
    named = {"train": OfflineAdvanced(), "loss.top_k": LogitsAdvanced(), "loss.temperature": LogitsAdvanced()}

    assert named.keys() == set(get_args(OtherPath))
    for path, advanced in named.items():
        operator.attrgetter(path)(advanced)
    assert param_of("dpo", "lora_rank") == "method.dpo.hyperparameters.advanced.lora.rank"
    assert param_at("dpo", "train") == "method.dpo.hyperparameters.advanced.train"


@pytest.mark.parametrize("name", ["train", "lora.rank", "learning_rte"])
def test_what_is_no_value_of_a_run_has_no_path_of_one(name: str) -> None:
    with pytest.raises(KeyError):
        param_of("reinforcement", name)
    if name != "train":
        with pytest.raises(KeyError):
            param_at("reinforcement", untyped(name))
