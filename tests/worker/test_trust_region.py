"""The step trust region: what counts as too far, what is undone, and what a step of each method does."""

import copy
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.jobs.hyperparameters import Hyperparameters, resolve
from core.step_metrics import StepMetrics
from graders.types import Grade
from tests.fakes import learn
from tests.present import present, untyped
from tests.worker.test_full import MakeFull, make_full, models  # noqa: F401  # fixtures
from tests.worker.test_offline_training import conversations, labeled, pairs
from tests.worker.test_offline_training import settings as offline_settings
from tests.worker.test_offline_training import trainer as offline_trainer
from tests.worker.test_reward_models import trainer as reward_trainer
from tests.worker.test_training import asked
from tests.worker.test_updates import MIXED, sampled
from worker.history import History
from worker.model.policy import Policy
from worker.model.tree import sequence_of
from worker.recording import alerts, divergence
from worker.refusals import TrainingDiverged
from worker.training import grpo, trust_region
from worker.training.distributed import ReceiveWeights
from worker.training.loss import KlSum, beginning, learned_tokens, spread
from worker.training.optimizer import AdapterOptimizer
from worker.training.top_kl import kl_from_top, top_tokens
from worker.training.trainer import PeftTrainer
from worker.training.trust_region import StepTaken, TrustRegion
from worker.types import Group, Node, Pack, Prompt, Rollout, TrainingSequence

# Logits of three tokens before and after an update, and the tokens that were drawn before it.
BEFORE = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64).log_softmax(-1)
AFTER = torch.tensor([0.0, 0.5, -1.0], dtype=torch.float64).log_softmax(-1)
KL = 0.23940136114  # sum of p (log p - log q)


class ToyState:
    """Stands in for weights whose step at rate r has the KL `curve(r)`, exactly."""

    def __init__(self, curve: Callable[[float], float]) -> None:
        self.curve = curve
        self.position = 0.0
        self.log: list[str] = []
        self._before = 0.0

    def prepare(self, divisor: float) -> float | None:
        return None if math.isnan(divisor) else divisor

    def descend(self, steps_taken: int, rate: float) -> float:
        self.position += rate
        self.log.append(f"descend {rate:.4g}")
        return 0.1 * rate

    def keep(self) -> None:
        self._before = self.position

    def restore(self) -> None:
        self.position = self._before
        self.log.append("restore")

    def clear(self) -> None:
        self.log.append("clear")

    def measure(self) -> float:
        return self.curve(self.position - self._before)


class OneRank:
    """Stands in for World: one rank, which counts how often the others would receive the weights."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.transfers = 0

    def giving(self) -> AbstractContextManager[None]:
        return nullcontext()

    def give(self, orders_R: Sequence[Any]) -> None:
        self.transfers += isinstance(orders_R[0], ReceiveWeights)

    def broadcast(self, tensors: Sequence[Tensor]) -> None: ...

    def sum_gradients(self, parameters: Sequence[Any]) -> None: ...

    def gather(self, value: Any) -> list[Any]:
        return [value]


def step(region: TrustRegion, state: Any, divisor: float = 1.0) -> StepTaken:
    return region.step(state, divisor, 0, state.measure)


class TestFormulas:
    def test_the_kl_of_the_likeliest_tokens_and_the_others_as_one_is_that_of_all_if_one_is_left(self) -> None:
        ids, before = top_tokens(BEFORE[None], 64)

        [found] = kl_from_top(AFTER[None], ids, before)

        assert ids.tolist() == [[0, 1]]
        assert (BEFORE.exp() * (BEFORE - AFTER)).sum().item() == pytest.approx(KL, abs=1e-9)
        assert found.item() == pytest.approx(KL, abs=1e-9)

    def test_it_is_less_with_more_others(self) -> None:
        [found] = kl_from_top(AFTER[None], *top_tokens(BEFORE[None], 1))

        assert found.item() == pytest.approx(grpo.binary_kl(BEFORE, AFTER)[0].item(), abs=1e-9)
        assert 0 < found.item() < KL

    def test_tokens_that_the_sampler_could_not_draw_count_for_nothing(self) -> None:
        one = torch.tensor([[0.0, -torch.inf, -torch.inf, -torch.inf]])

        assert kl_from_top(one, *top_tokens(one, 2)).tolist() == [0.0]

    def test_the_binary_kl_of_any_token_is_at_most_the_kl(self) -> None:
        of_each = grpo.binary_kl(BEFORE, AFTER)

        expected = [
            p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
            for p, q in zip(BEFORE.exp().tolist(), AFTER.exp().tolist(), strict=True)
        ]
        assert of_each.tolist() == pytest.approx(expected, abs=1e-9)
        assert (of_each <= KL).all()

    def test_the_binary_kl_of_certain_and_of_equal_tokens_is_finite(self) -> None:
        logp = torch.tensor([0.0, 0.0, -1e-9, -40.0], dtype=torch.float64)
        new = torch.tensor([0.0, math.log(0.5), -1.0, -40.0], dtype=torch.float64)

        of_each = grpo.binary_kl(logp, new)

        assert of_each.tolist() == pytest.approx([0.0, math.log(2), 1.0, 0.0], abs=1e-5)

    @pytest.mark.parametrize(
        ("kl", "factor"), [(0.2, 0.5), (0.45, 1 / 3), (50.0, 0.1), (math.inf, 0.1), (math.nan, 0.1)]
    )
    def test_the_rate_is_lowered_by_the_root_of_the_ratio_and_at_most_to_a_tenth(
        self, kl: float, factor: float
    ) -> None:
        assert trust_region.factor(kl, 0.05) == pytest.approx(factor)


class TestWhereItIsMeasured:
    def answer(self, tokens: int, **fields: Any) -> TrainingSequence:
        ids = tuple(range(tokens))
        return TrainingSequence(ids, (0.0,) * tokens, (0.0,) * tokens, 1.0, **fields)

    def test_the_first_learned_tokens_of_the_answers_to_a_prompt(self) -> None:
        short, long = self.answer(3), self.answer(100)

        part = beginning(Pack((1,) * 600, (short, long, long)), 10)

        assert [len(one.output_ids_T) for one in part.sequences] == [3, 7]
        assert (len(part.prompt_ids), learned_tokens(part)) == (600, 10)

    def test_tokens_that_are_not_learned_do_not_count(self) -> None:
        learned_T = (False, False, True, False, True, True)

        [one] = beginning(Pack((1,), (self.answer(6, learned_T=learned_T),)), 2).sequences
        [forced] = beginning(Pack((1,), (self.answer(9, grammar_start=5, forced=3),)), 4).sequences
        [before] = beginning(Pack((1,), (self.answer(9, grammar_start=5, forced=3),)), 1).sequences

        assert (one.learned_T, one.trained_tokens) == (learned_T[:5], 2)
        assert (len(forced.output_ids_T), forced.forced, forced.trained_tokens) == (7, 3, 4)
        assert (len(before.output_ids_T), before.forced, before.trained_tokens) == (1, 0, 1)

    def test_an_episode_of_calls_one_after_another_is_cut_and_one_with_branches_is_whole(self) -> None:
        call = Rollout((5, 6, 7, 8), (-0.1,) * 4, "", "stop")
        chain = sequence_of(Rollout.of_nodes([Node(None, (), call), Node(0, (1,), call)]), (0.0,) * 8, 1.0)
        tree = sequence_of(Rollout.of_nodes([Node(None, (), call), Node(None, (), call)]), (0.0,) * 8, 1.0)

        parts = [beginning(Pack((1,), (episode,)), 5) for episode in (chain, tree)]

        assert [learned_tokens(part) for part in parts] == [5, 8]
        assert [len(part.sequences[0].output_ids_T) for part in parts] == [6, 8]

    def test_four_prompts_in_equal_distances_and_parts_of_one_where_there_are_fewer(self) -> None:
        packs = [Pack((prompt,), ()) for prompt in range(8)]
        parts = [Pack((0,), ()), Pack((0,), (self.answer(1),)), Pack((1,), ())]

        assert [pack.prompt_ids for pack in spread(packs, lambda pack: pack)] == [(0,), (2,), (4,), (6,)]
        assert [pack.prompt_ids for pack in spread(parts, lambda pack: pack)] == [(0,), (1,), (0,)]

    def test_the_mean_over_ranks_is_that_of_their_positions(self) -> None:
        assert KlSum.mean([KlSum(1.0, 10), KlSum(0.5, 5), KlSum()]) == pytest.approx(0.1)
        assert KlSum.mean([KlSum()]) is None


class TestBacktracking:
    def test_a_step_within_twice_the_target_is_taken_as_it_is(self) -> None:
        region, state = TrustRegion(0.05), ToyState(lambda rate: 0.1 * rate**2)

        taken = step(region, state)

        assert taken == StepTaken(1.0, 0.1, 0.1, 0)
        assert state.log == ["descend 1", "clear"]

    def test_a_step_beyond_it_is_undone_and_repeated_at_the_rate_that_meets_the_target(self) -> None:
        region, state = TrustRegion(0.05), ToyState(lambda rate: 0.8 * rate**2)

        taken = step(region, state)

        assert state.log == ["descend 1", "restore", "descend 0.25", "clear"]
        assert (taken.retries, taken.is_rejected) == (1, False)
        assert taken.kl == pytest.approx(0.05)
        assert taken.learning_rate == pytest.approx(0.025)

    def test_the_rate_returns_to_the_schedule_by_a_quarter_a_step(self) -> None:
        curvatures = iter([0.8, 0.8])
        region, state = TrustRegion(0.05), ToyState(lambda rate: next(curvatures, 0.0) * rate**2)
        step(region, state)

        rates = []
        for _ in range(8):
            rates.append(region.rate)
            step(region, state)

        assert rates == pytest.approx([min(1.0, 0.25 * 1.25**n) for n in range(1, 9)])
        assert region.rate == 1.0

    @pytest.mark.parametrize("kl", [10.0, math.nan])
    def test_after_three_repetitions_the_update_is_skipped(self, kl: float) -> None:
        region, state = TrustRegion(0.05), ToyState(lambda rate: kl)

        taken = step(region, state)

        assert [line for line in state.log if line.startswith("descend")] == [
            "descend 1", "descend 0.1", "descend 0.01", "descend 0.001",
        ]  # fmt: skip
        assert state.position == 0.0
        assert (taken.retries, taken.is_rejected, taken.norm) == (3, True, 1.0)
        assert region.rate == trust_region.LEAST_RATE

    def test_a_step_that_cannot_be_measured_is_accepted_and_says_so(self) -> None:
        region, state = TrustRegion(0.05), ToyState(lambda rate: 0.0)
        region.rate = 0.5

        taken = region.step(untyped(state), 1.0, 0, lambda: None)

        assert taken == StepTaken(1.0, 0.05, None, is_unmeasured=True)
        assert region.rate == 0.5
        assert trust_region.step_metrics([taken])["unmeasured_updates"] == 1

    def test_the_metric_is_the_largest_kl_of_the_accepted_updates_in_any_order(self) -> None:
        taken = [
            StepTaken(1.0, 0.1, 0.02),
            StepTaken(1.0, 0.1, None, 3, is_rejected=True),
            StepTaken(1.0, 0.1, 0.01),
        ]

        assert {trust_region.step_metrics(each)["update_kl"] for each in (taken, taken[::-1])} == {0.02}

    def test_a_target_of_0_measures_nothing(self) -> None:
        region, state = TrustRegion(0.0), ToyState(lambda rate: pytest.fail("measured"))

        assert step(region, state) == StepTaken(1.0, 0.1)
        assert state.log == ["descend 1", "clear"]

    def test_a_gradient_that_is_not_finite_takes_no_step(self) -> None:
        region, state = TrustRegion(0.05), ToyState(lambda rate: 0.0)

        assert step(region, state, math.nan) == StepTaken(None)
        assert not state.log


def optimizer_with_gradient(policy: Policy, steps: int, **options: Any) -> AdapterOptimizer:
    """After so many steps, with the gradient of another one."""
    chosen: dict[str, Any] = {"learning_rate": 0.01, "betas": (0.9, 0.95), "max_grad_norm": 1e9}
    chosen |= {"warmup_steps": 0} | options
    optimizer = AdapterOptimizer(policy, **chosen)
    draw = torch.Generator().manual_seed(1)
    for taken in range(steps + 1):
        for weight in policy.trainable:
            weight.grad = torch.randn(weight.shape, generator=draw)
        if taken < steps:
            optimizer.descend(taken, 1.0)
    return optimizer


def state_of(optimizer: AdapterOptimizer) -> tuple[list[Tensor], dict[str, Any]]:
    weights = [weight.detach().clone() for weight in optimizer.trained]
    return weights, copy.deepcopy(optimizer.adamw.state_dict()["state"])


class TestUndo:
    @pytest.mark.parametrize("steps", [0, 2])
    def test_an_adapter_and_its_moments_return_bit_for_bit(
        self, make_policy: Callable[..., Policy], steps: int
    ) -> None:
        optimizer = optimizer_with_gradient(make_policy(moved=True), steps, weight_decay=0.1)
        weights, state = state_of(optimizer)

        optimizer.keep()
        for rate in (1.0, 0.3):
            optimizer.descend(steps, rate)
            assert not torch.equal(optimizer.trained[0], weights[0])
            optimizer.restore()

        after, after_state = state_of(optimizer)
        assert all(torch.equal(one, before) for one, before in zip(after, weights, strict=True))
        assert after_state.keys() == state.keys()
        for number, moments in state.items():
            assert all(torch.equal(after_state[number][name], one) for name, one in moments.items())
        assert optimizer.trained[0].grad is not None

    @pytest.mark.parametrize("steps", [0, 2])
    def test_all_weights_of_a_model_return_bit_for_bit_from_a_gradient_of_any_scale(
        self,
        make_full: MakeFull,  # noqa: F811
        steps: int,
    ) -> None:
        optimizer = optimizer_with_gradient(make_full(), steps, weight_decay=0.1)
        weights, state = state_of(optimizer)
        for weight, scale in zip(optimizer.trained, itertools.cycle((1e4, 1.0, 1e-4, 1e8))):
            present(weight.grad).mul_(scale)

        optimizer.keep()
        optimizer.descend(steps, 1.0)
        optimizer.restore()

        after, after_state = state_of(optimizer)
        assert all(torch.equal(one, before) for one, before in zip(after, weights, strict=True))
        assert after_state.keys() == state.keys()
        for number, moments in state.items():
            assert all(torch.equal(after_state[number][name], one) for name, one in moments.items())


class TestSampledAnswers:
    def test_a_step_of_a_far_too_high_rate_stays_within_the_bound(
        self, make_policy: Callable[..., Policy]
    ) -> None:
        policy = make_policy(moved=True)
        settings = asked({"step_kl": 0.05, "learning_rate": 0.1, "warmup_steps": 0})
        one = PeftTrainer(policy, settings, token_budget=4096)

        steps = [learn(one, sampled(policy, MIXED)) for _ in range(3)]

        assert present(steps[0].update_retries) >= 1
        for metrics in steps:
            assert metrics.rejected_updates == 0
            assert present(metrics.update_kl) <= 0.1
            assert present(metrics.learning_rate) < 0.1

    def test_the_measured_kl_is_that_of_plain_log_probabilities(
        self, make_policy: Callable[..., Policy]
    ) -> None:
        policy = make_policy(moved=True)
        groups = sampled(policy, MIXED)
        one = PeftTrainer(policy, asked({"step_kl": 10.0, "temperature": 0.7}), token_budget=4096)

        def logprobs() -> Tensor:
            """Of all tokens [m, V] at the measured positions: those of all answers, which are short."""
            rows = [
                (len(group.prompt.ids) - 1, [*group.prompt.ids, *rollout.output_ids_T])
                for group in groups
                for rollout in group.rollouts_G
            ]
            with torch.no_grad():
                of_rows = [policy.model(torch.tensor([row])).logits[0, start:-1] for start, row in rows]
            return (torch.cat(of_rows).double() / 0.7).log_softmax(-1)

        before = logprobs()
        metrics = learn(one, groups)

        expected = (before.exp() * (before - logprobs())).sum(-1).mean().item()
        assert metrics.update_kl == pytest.approx(expected, rel=1e-3)

    def test_long_prompts_are_measured_too_and_not_one_of_them_alone(
        self, make_policy: Callable[..., Policy]
    ) -> None:
        """Four prompts of eight, in equal distances, with two answers of a token to each."""
        policy = make_policy(moved=True)
        prompts = [[1 + (line + place) % 50 for place in range(300)] for line in range(8)]
        groups = [
            Group(
                Prompt(line, tuple(ids), {}),
                tuple(Rollout((token,), (-1.0,), "", "stop") for token in (7 + line, 30 + line)),
                (Grade(1.0), Grade(0.0)),
            )
            for line, ids in enumerate(prompts)
        ]
        one = PeftTrainer(policy, asked({"step_kl": 10.0}), token_budget=700)

        def logprobs() -> Tensor:
            with torch.no_grad():
                logits: Tensor = policy.model(torch.tensor(prompts[::2])).logits
            return logits[:, -1].double().log_softmax(-1)

        before = logprobs()
        metrics = learn(one, groups)

        expected = (before.exp() * (before - logprobs())).sum(-1).mean().item()
        assert metrics.update_kl == pytest.approx(expected, rel=0.01)

    @pytest.mark.parametrize("options", [{"updates_per_batch": 2}, {"mini_batches": 2}, {"loss": "ppo"}])
    def test_each_update_of_a_step_is_measured(
        self, make_policy: Callable[..., Policy], options: dict[str, Any]
    ) -> None:
        policy = make_policy(moved=True)
        one = PeftTrainer(policy, asked({"step_kl": 0.05} | options), token_budget=24)

        metrics = learn(one, sampled(policy, MIXED))

        assert 0 < present(metrics.update_kl) <= 0.1

    def test_ranks_get_the_weights_once_for_the_gradient_and_once_for_each_update_that_is_measured(
        self, make_policy: Callable[..., Policy]
    ) -> None:
        policy, world = make_policy(moved=True), OneRank()
        settings = asked({"step_kl": 10.0, "updates_per_batch": 2})

        learn(PeftTrainer(policy, settings, token_budget=4096, world=untyped(world)), sampled(policy, MIXED))

        assert world.transfers == 4

    def test_a_resumed_job_takes_the_same_steps(
        self, make_policy: Callable[..., Policy], tmp_path: Path
    ) -> None:
        settings = asked({"step_kl": 0.05, "learning_rate": 0.5})
        policies = [make_policy(moved=True) for _ in range(2)]
        groups = sampled(policies[0], MIXED)
        whole, resumed = (PeftTrainer(policy, settings, token_budget=4096) for policy in policies)
        learn(whole, groups)
        whole.save(tmp_path)
        resumed.load(tmp_path)

        expected, metrics = (learn(one, groups) for one in (whole, resumed))

        assert whole.trust.rate == resumed.trust.rate < 1.0
        assert (metrics.learning_rate, metrics.update_kl) == (expected.learning_rate, expected.update_kl)
        for mine, own in zip(*(policy.trainable for policy in policies), strict=True):
            assert torch.equal(mine, own)

    def test_without_it_nothing_is_measured(self, make_policy: Callable[..., Policy]) -> None:
        policy = make_policy(moved=True)

        metrics = learn(PeftTrainer(policy, asked({}), token_budget=4096), sampled(policy, MIXED))

        assert (metrics.update_kl, metrics.update_retries, metrics.learning_rate) == (None, 0, 0.01)


class TestGivenAnswers:
    @pytest.mark.parametrize(
        ("method", "rows", "options"),
        [
            ("supervised", conversations, {}),
            ("dpo", pairs, {}),
            ("dpo", labeled, {"advanced": {"loss": {"type": "kto"}}}),
        ],
    )
    def test_a_step_of_a_far_too_high_rate_stays_within_the_bound(
        self,
        make_policy: Callable[..., Policy],
        method: str,
        rows: Callable[[], Any],
        options: dict[str, Any],
    ) -> None:
        settings = offline_settings(method, **options).model_copy(
            update={"learning_rate": 0.1, "step_kl": 0.05}
        )
        one = offline_trainer(make_policy(moved=True), settings)

        metrics = one.step(rows())

        assert present(metrics.update_retries) >= 1
        assert 0 < present(metrics.update_kl) <= 0.1

    def test_a_reward_model_is_measured_by_the_probability_that_the_preferred_answer_wins(
        self, make_policy: Callable[..., Policy]
    ) -> None:
        one = reward_trainer(
            make_policy(moved=True), advanced={"optimizer": {"step_kl": 1.0, "warmup_steps": 0}}
        )
        rows = one.measured[:4]

        before = one.rewards(rows)
        metrics = one.step(rows)

        after = one.rewards(rows)
        p, q = ((both[0::2] - both[1::2]).double().sigmoid() for both in (before, after))
        expected = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean().item()
        assert metrics.update_kl == pytest.approx(expected, rel=1e-2)

    @pytest.mark.parametrize("method", ["supervised", "dpo", "logits"])
    def test_it_is_off_by_default_and_then_there_is_no_warm_up(self, method: str) -> None:
        resolved = offline_settings(method)

        assert (resolved.step_kl, resolved.warmup_steps) == (0.0, 0)


def test_all_weights_are_guarded_too(make_full: MakeFull) -> None:  # noqa: F811
    settings = offline_settings(advanced={"train": "full"}).model_copy(
        update={"learning_rate": 0.1, "step_kl": 0.05}
    )
    one = offline_trainer(make_full(), settings)

    metrics = one.step(conversations())

    assert present(metrics.update_retries) >= 1
    assert present(metrics.update_kl) <= 0.1


@pytest.mark.parametrize(
    ("optimizer", "rows", "warmup_steps"),
    [
        ({}, 100, 3),
        ({}, 1, 3),
        ({"step_kl": 0}, 100, 0),
        ({"warmup_steps": 0}, 100, 0),
        ({"warmup_steps": 7}, 100, 7),
    ],
)
def test_the_automatic_warm_up_has_three_steps(
    optimizer: dict[str, Any], rows: int, warmup_steps: int
) -> None:
    chosen = Hyperparameters.model_validate({"advanced": {"optimizer": optimizer}})

    assert resolve(chosen, rows=rows, parameters=1, context=128).warmup_steps == warmup_steps


def test_the_warm_up_of_the_policy_fits_into_its_steps_after_those_of_the_values() -> None:
    advanced = {"loss": {"type": "ppo", "value_warmup_steps": 3}}
    chosen = Hyperparameters.model_validate({"n_epochs": 1, "batch_size": 1, "advanced": advanced})

    assert resolve(chosen, rows=5, parameters=1, context=128).warmup_steps == 1


def test_an_update_that_is_rejected_does_not_move_the_values(make_policy: Callable[..., Policy]) -> None:
    policy = make_policy(moved=True)
    one = PeftTrainer(policy, asked({"loss": "ppo", "step_kl": 1e-12}), token_budget=4096)

    metrics = learn(one, sampled(policy, MIXED))

    assert (metrics.rejected_updates, metrics.update_kl) == (1, None)
    assert not any(weight.any() for weight in one.loss.trainable[-2:])


class Heard:
    """A recorder that keeps the messages."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str, dict[str, Any]]] = []

    def inform(self, message: str, data: dict[str, Any]) -> None:
        self.said.append(("info", message, data))

    def warn(self, message: str, data: dict[str, Any]) -> None:
        self.said.append(("warn", message, data))


def heard(
    steps: Iterable[dict[str, Any]], warned: Collection[str] = ()
) -> list[tuple[str, str, dict[str, Any]]]:
    """The level, message and data of each event of a job with such steps."""
    recorder, history = Heard(), History.of([], warned=warned)
    for number, fields in enumerate(steps, start=1):
        history.add(StepMetrics.load({"step": number, "update_kl": 0.07, "learning_rate": 1e-4} | fields))
        alerts.report_updates(history, recorder, 0.05)  # type: ignore[arg-type]
    return recorder.said


def undone(*retries: int, warned: Collection[str] = ()) -> list[tuple[str, int]]:
    events = heard([{"update_retries": count} for count in retries], warned)
    return [(level, data["step"]) for level, _, data in events]


def test_the_first_update_that_was_undone_is_an_event_and_most_of_five_steps_are_one_warning() -> None:
    assert undone(0, 1, 0, 0, 1, 0, 0, 0, 1) == [("info", 2)]
    assert undone(0, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1) == [("info", 2), ("warn", 5)]
    assert undone(1, 1, 1, 1, 1) == [("info", 1), ("warn", 5)]
    assert undone(1, 1, 1, 1, 1, warned={alerts.RETRIES}) == [("info", 1)]
    assert undone(0, 0, 0) == []


def test_the_event_of_an_update_that_was_skipped_has_no_kl() -> None:
    [(_, message, data)] = heard([{"update_kl": None, "update_retries": 3, "rejected_updates": 1}])

    assert "skipped after the last try" in message
    assert data["update_kl"] is None


def test_an_update_that_could_not_be_measured_is_an_event_once() -> None:
    events = heard([{"update_kl": None, "unmeasured_updates": 1}] * 2)

    assert [message for _, message, _ in events] == [
        "Memory ran out while an update was measured: it was accepted, and its KL is not known."
    ]


def test_a_job_fails_after_three_steps_in_a_row_whose_updates_are_all_rejected() -> None:
    rejected: dict[str, Any] = {"update_kl": None, "update_retries": 3, "rejected_updates": 1}
    fields = [rejected, rejected, rejected | {"update_kl": 0.01}, rejected, rejected, rejected]
    steps = [StepMetrics.load({"step": number, **each}) for number, each in enumerate(fields, start=1)]

    divergence.check_updates(steps[:5], 10)
    with pytest.raises(TrainingDiverged, match="In 3 steps in a row every update"):
        divergence.check_updates(steps, 10)
