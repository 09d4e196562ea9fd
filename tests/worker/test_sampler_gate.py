"""A step whose answers come from something other than the policy is not taken."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from core.settings import Settings
from graders.types import Grade
from tests.fakes import learn
from tests.present import present, untyped
from tests.worker.test_training import asked, drawn, prompt, sampling
from worker.model.policy import Policy
from worker.refusals import SamplerMismatch
from worker.training.sampler_gate import SamplerGap, SamplerGate
from worker.training.trainer import PeftTrainer
from worker.types import Group

GATE = SamplerGate(1e-3, "transformers 5", "float32")


@pytest.fixture
def policy(make_policy: Callable[..., Policy]) -> Policy:
    return make_policy(moved=True)


def groups(policy: Policy, *, off_by: float = 0.0) -> list[Group]:
    """Two groups with signal; the sampler says of every token that it is `off_by` likelier than it is."""
    prompts = [prompt(policy, text, line) for line, text in enumerate(("say yes", "name a bird"), start=1)]
    made = []
    for one, rollouts in zip(prompts, drawn(policy, prompts, sampling()), strict=True):
        moved = tuple(
            replace(r, logprobs_T=tuple(logprob + off_by for logprob in r.logprobs_T)) for r in rollouts
        )
        made.append(Group(one, moved, tuple(Grade(float(n % 2)) for n in range(len(moved)))))
    return made


def weights(policy: Policy) -> list[Any]:
    return [parameter.detach().clone() for parameter in policy.trainable]


def trainer_on(policy: Policy, gate: SamplerGate | None = GATE, **advanced: Any) -> PeftTrainer:
    return PeftTrainer(policy, asked(advanced), token_budget=4096, gate=gate)


def test_a_sampler_that_agrees_is_learned_from(policy: Policy) -> None:
    before = weights(policy)

    learn(trainer_on(policy), groups(policy))

    assert not all(map(torch.equal, before, weights(policy)))


@pytest.mark.parametrize("advanced", [{}, {"updates_per_batch": 3}, {"kl": 0.1}, {"importance": "none"}])
def test_one_that_does_not_leaves_the_adapter_as_it_was_and_is_told_of_with_numbers(
    policy: Policy, advanced: dict[str, Any]
) -> None:
    before, trainer = weights(policy), trainer_on(policy, **advanced)
    update = learn(trainer, groups(policy, off_by=0.25))
    assert (update.trained_sequences, update.grad_norm) == (0, None)
    assert present(update.logprob_gap) == pytest.approx(0.25, abs=1e-3)

    with pytest.raises(SamplerMismatch) as refused:
        learn(trainer, groups(policy, off_by=0.25))

    assert all(map(torch.equal, before, weights(policy)))
    assert trainer.steps_taken == 1
    assert not trainer.optimizer.adamw.state
    assert all(parameter.grad is None for parameter in policy.trainable)
    message = str(refused.value)
    assert "differ by 0.25 nats a token on average and 0.25 at most" in message
    assert "transformers 5" in message and "float32" in message and "REGRAFT_MAX_LOGPROB_GAP" in message


def test_without_a_gate_the_correction_is_all_there_is(policy: Policy) -> None:
    assert present(learn(trainer_on(policy, gate=None), groups(policy, off_by=0.25)).logprob_gap) > 0.2


def stale(trainer: PeftTrainer, *, off_by: float = 0.0) -> list[Group]:
    """As `groups`, sampled by the policy that samples the next step with `off_policy_steps`."""
    with trainer.policy_before(trainer.settings.off_policy_steps):
        return groups(trainer.policy, off_by=off_by)


@pytest.mark.parametrize("steps", [1, 2])
def test_answers_of_an_earlier_policy_are_judged_under_it_until_one_that_has_learned_is(
    policy: Policy, steps: int
) -> None:
    """Of a new job, step `steps` + 2 is the first that an updated adapter has sampled."""
    trainer = trainer_on(policy, off_policy_steps=steps)
    for _ in range(steps + 1):
        gap = present(learn(trainer, stale(trainer)).logprob_gap)
    assert gap > GATE.bound, "the current policy is another one"
    before = weights(policy)

    assert learn(trainer, stale(trainer, off_by=0.25)).grad_norm is None

    assert all(map(torch.equal, before, weights(policy)))
    learn(trainer, stale(trainer))
    assert learn(trainer, stale(trainer, off_by=0.25)).grad_norm, "later steps cost no further pass"
    assert trainer.steps_taken == steps + 4


def test_answers_in_flight_are_not_judged_because_an_update_may_be_in_the_middle_of_them(
    policy: Policy,
) -> None:
    trainer = trainer_on(policy, off_policy_steps=1, continue_in_flight=True)
    learn(trainer, groups(policy))

    learn(trainer, stale(trainer, off_by=0.25))

    assert trainer.steps_taken == 2


def test_the_first_step_of_an_attempt_is_judged_with_off_policy_steps_too(policy: Policy) -> None:
    trainer = trainer_on(policy, off_policy_steps=1)

    assert learn(trainer, groups(policy, off_by=0.25)).grad_norm is None


@pytest.mark.parametrize("advanced", [{}, {"continue_in_flight": True}, {"mini_batches": 2}])
def test_the_first_step_after_a_restart_is_judged_under_the_earlier_policy_that_samples_it(
    policy: Policy, make_policy: Callable[..., Policy], tmp_path: Path, advanced: dict[str, Any]
) -> None:
    trainer = trainer_on(policy, off_policy_steps=1, **advanced)
    learn(trainer, groups(policy))
    trainer.save(tmp_path)
    again = trainer_on(make_policy(), off_policy_steps=1, **advanced)
    again.load(tmp_path)
    before = weights(again.policy)

    assert learn(again, stale(again, off_by=0.25)).grad_norm is None

    assert all(map(torch.equal, before, weights(again.policy)))
    again.load(tmp_path)
    assert present(learn(again, stale(again)).logprob_gap) > GATE.bound
    assert again.steps_taken == 2


def test_judging_an_earlier_policy_changes_no_bit_of_a_resumed_run(
    policy: Policy, make_policy: Callable[..., Policy], tmp_path: Path
) -> None:
    trainer = trainer_on(policy, off_policy_steps=2)
    learn(trainer, groups(policy))
    trainer.save(tmp_path)
    judged, other = (
        trainer_on(make_policy(), gate=gate, off_policy_steps=2, kl=0.1) for gate in (GATE, None)
    )

    for one in (judged, other):
        one.load(tmp_path)
        for _ in range(3):
            learn(one, stale(one))

    assert all(map(torch.equal, weights(judged.policy), weights(other.policy)))


def test_a_step_after_one_without_an_update_is_judged_with_off_policy_steps_too(policy: Policy) -> None:
    trainer = trainer_on(policy, off_policy_steps=1)
    learn(trainer, [])

    assert learn(trainer, groups(policy, off_by=0.25)).grad_norm is None


class Reports:
    """Keeps the events of a job."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, dict[str, Any]]] = []

    def inform(self, message: str, data: dict[str, Any]) -> None:
        self.events.append(("info", message, data))

    def warn(self, message: str, data: dict[str, Any]) -> None:
        self.events.append(("warn", message, data))


def test_a_step_that_disagrees_alone_is_a_warning_and_the_next_prompts_decide(policy: Policy) -> None:
    reports = Reports()
    trainer = PeftTrainer(policy, asked({}), token_budget=4096, gate=GATE, reports=reports)

    for off_by in (0.0, 0.25, 0.0, 0.25):
        learn(trainer, groups(policy, off_by=off_by))

    assert [level for level, *_ in reports.events] == ["info", "warn", "warn"]
    first, doubt, _ = reports.events
    assert "differ by" in first[1] and "0.001 are allowed (dense model, float32)" in first[1]
    assert doubt[1].endswith("The step was not taken. If the next one disagrees too, the job fails.")
    assert doubt[2]["logprob_gap"] == pytest.approx(0.25, abs=1e-3)
    with pytest.raises(SamplerMismatch, match="The same holds for the step before"):
        learn(trainer, groups(policy, off_by=0.25))


@pytest.mark.parametrize(("first", "bound"), [(0.006, 0.05), (0.03, 0.09), (0.1, 0.12)])
def test_the_bound_of_a_mixture_is_measured_in_the_first_step(first: float, bound: float) -> None:
    gate = present(SamplerGate.of("auto", sampler="vllm", precision="bfloat16", architecture="mixture"))

    measured = gate.measured(SamplerGap(first, 1.0, 100))

    assert gate.bound == 0.12
    assert measured.bound == pytest.approx(bound)
    assert measured.measured(SamplerGap(0.001, 1.0, 100)) == measured
    assert f"{bound:.3g} are allowed (mixture model, bfloat16)" in measured.described(
        SamplerGap(first, 1.0, 100)
    )


def test_the_bound_is_by_precision_unless_the_operator_sets_one() -> None:
    def gate(setting: str | float, precision: str) -> SamplerGate | None:
        return SamplerGate.of(untyped(setting), sampler="vllm", precision=precision)

    assert present(gate("auto", "bfloat16")).bound == 0.05
    assert present(gate("auto", "float32")).bound == 1e-3
    assert present(gate(0.2, "bfloat16")).bound == 0.2
    assert gate(0.0, "bfloat16") is None


def test_a_sampler_that_may_quantize_activations_is_named_with_the_remedy() -> None:
    gate = present(SamplerGate.of("auto", sampler="vllm", precision="bfloat16", quantization="fp8"))
    gap = SamplerGap(mean=0.1, largest=1.0, tokens=8)

    problem = present(gate.problem(gap))

    assert (
        "may quantize activations with the fp8 weights of this model: use the model's files in bf" in problem
    )
    assert problem.endswith('`sampler = "transformers"` in its entry. The step was not taken.')


def test_a_mean_that_is_no_number_is_left_to_the_rule_for_gradients() -> None:
    assert GATE.problem(SamplerGap(mean=float("nan"), largest=float("nan"), tokens=1)) is None


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("0", 0.0), ("0.1", 0.1)])
def test_it_is_a_setting(monkeypatch: pytest.MonkeyPatch, text: str, value: str | float) -> None:
    monkeypatch.setenv("REGRAFT_MAX_LOGPROB_GAP", text)

    assert Settings().max_logprob_gap == value


def test_a_bound_below_zero_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGRAFT_MAX_LOGPROB_GAP", "-1")

    with pytest.raises(ValidationError):
        Settings()
