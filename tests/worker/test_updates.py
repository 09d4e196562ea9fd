"""What one update does beyond its loss: several passes, the reference, the sampler's gap, what is left out."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.jobs.hyperparameters import Resolved
from graders.types import Grade
from tests.fakes import RecordingOptimizer, RecordingTrainer, learn
from tests.present import present
from tests.worker.rounding import NATS, assert_same
from tests.worker.test_training import (
    asked,
    drawn,
    packed_gradients,
    packs_of,
    plain_gradients,
    plain_logprobs,
    prompt,
    relative_difference,
    sampling,
    with_gap,
)
from worker.model import batch
from worker.model.policy import Policy
from worker.refusals import UnsupportedModel
from worker.sampling.choice import report_left_out
from worker.training import contributions
from worker.training.trainer import PeftTrainer
from worker.types import Group

LOSSES = ["grpo", "dr_grpo", "bnpo", "dapo", "cispo", "gspo"]


@pytest.fixture
def policy(make_policy: Callable[..., Policy]) -> Policy:
    return make_policy(moved=True)


def sampled(policy: Policy, rewards_PG: list[list[float]], **how: Any) -> list[Any]:
    texts = ["say yes", "what colour is it now please tell me", "tell me a number", "say cat", "name a bird"]
    prompts = [prompt(policy, text, line) for line, text in enumerate(texts[: len(rewards_PG)], start=1)]
    rollouts_PG = drawn(policy, prompts, sampling(**how))
    return [
        Group(one, rollouts, tuple(map(Grade, rewards)))
        for one, rollouts, rewards in zip(prompts, rollouts_PG, rewards_PG, strict=True)
    ]


MIXED = [[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 1.0, 0.2]]


@pytest.fixture
def groups(policy: Policy) -> list[Any]:
    return sampled(policy, MIXED)


def weights_of(policy: Policy) -> list[Any]:
    return [parameter.detach().clone() for parameter in policy.trainable]


class TestWhatCounts:
    @pytest.mark.parametrize("loss", LOSSES)
    @pytest.mark.slow
    def test_groups_that_agree_are_not_computed_and_shrink_the_step_as_in_the_papers(
        self, policy: Policy, loss: str
    ) -> None:
        all_groups = sampled(policy, [MIXED[0], [1.0] * 4, MIXED[1], [0.25] * 4])
        settings = asked({"loss": loss})

        ours = packed_gradients(policy, all_groups, settings, 4096)

        assert relative_difference(ours, plain_gradients(policy, all_groups, settings)) < 1e-5
        metrics = learn(PeftTrainer(policy, settings, token_budget=4096), all_groups)
        assert (metrics.trained_sequences, metrics.dropped_sequences) == (8, 8)

    @pytest.mark.parametrize("loss", LOSSES)
    def test_where_only_signal_counts_groups_that_agree_change_nothing(
        self, policy: Policy, loss: str
    ) -> None:
        all_groups = sampled(policy, [MIXED[0], [1.0] * 4, MIXED[1], [0.25] * 4])
        settings = asked({"loss": loss, "normalize": "signal"})

        with_them = packed_gradients(policy, all_groups, settings, 4096)
        without = packed_gradients(policy, [all_groups[0], all_groups[2]], settings, 4096)

        assert relative_difference(with_them, without) < 1e-6

    @pytest.mark.parametrize("loss", LOSSES)
    def test_a_vanishing_penalty_takes_the_same_step(self, policy: Policy, loss: str) -> None:
        all_groups = sampled(policy, [MIXED[0], [1.0] * 4, [0.25] * 4])
        without, with_it = (
            packed_gradients(policy, all_groups, asked({"loss": loss, "kl": kl}), 4096) for kl in (0.0, 1e-9)
        )

        assert relative_difference(with_it, without) < 1e-5  # float32

    @pytest.mark.parametrize("kl", [0.0, 0.1])
    @pytest.mark.parametrize("overlap", [False, True])
    def test_a_group_that_was_replaced_has_no_part_in_the_step(
        self, policy: Policy, kl: float, overlap: bool
    ) -> None:
        if kl and overlap:
            pytest.skip("overlap is refused with a KL penalty")
        silent, mixed, stand_in = sampled(policy, [[1.0] * 4, *MIXED])
        settings = asked({"kl": kl, "overlap": overlap, "resample_prompts": 2}, batch_size=2)

        ours = packed_gradients(policy, [silent, mixed, stand_in], settings, 1 if overlap else 4096)

        expected = packed_gradients(policy, [mixed, stand_in], settings, 4096)
        assert relative_difference(ours, expected) < 1e-5

    @pytest.mark.parametrize("loss", ["dapo", "gspo"])
    @pytest.mark.slow
    def test_the_gradient_does_not_depend_on_the_order_or_the_packs(self, policy: Policy, loss: str) -> None:
        groups = [with_gap(group, seed) for seed, group in enumerate(sampled(policy, [*MIXED, MIXED[0]]))]
        settings = asked({"loss": loss, "kl": 0.1})
        expected = packed_gradients(policy, groups, settings, 4096)

        for budget in (1, 20, 64):
            assert (
                relative_difference(packed_gradients(policy, groups[::-1], settings, budget), expected) < 1e-5
            )

    def test_labels_off_by_one_would_be_seen(
        self, policy: Policy, groups: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The control of every comparison of gradients: shift what is to be predicted by one and they differ."""
        settings = asked({})
        expected = plain_gradients(policy, groups, settings)
        right = batch.tensors_of

        def shifted(*args: Any) -> batch.Tensors:
            tensors = right(*args)
            return replace(tensors, target_M=tensors.target_M.roll(1))

        monkeypatch.setattr("worker.training.policy_loss.tensors_of", shifted)

        assert relative_difference(packed_gradients(policy, groups, settings, 4096), expected) > 0.1

    @pytest.mark.slow
    def test_one_seed_twice_gives_the_same_adapter_bit_by_bit(
        self, make_policy: Callable[..., Policy]
    ) -> None:
        def trained() -> list[Any]:
            policy = make_policy(moved=True)
            trainer = PeftTrainer(
                policy, asked({"loss": "gspo", "updates_per_batch": 2, "kl": 0.1}), token_budget=4096
            )
            for step in range(2):
                learn(trainer, sampled(policy, MIXED, step=step))
            return weights_of(policy)

        assert all(torch.equal(a, b) for a, b in zip(trained(), trained(), strict=True))


class TestOverlong:
    @pytest.fixture
    def cut(self, policy: Policy) -> list[Any]:
        """Groups in which the second answer of the first was cut off."""
        first, second = sampled(policy, MIXED)
        short = first.rollouts_G[0]
        rollouts = (short, replace(first.rollouts_G[1], finish_reason="length"), *first.rollouts_G[2:])
        rollouts = tuple(replace(r, finish_reason="stop") if i != 1 else r for i, r in enumerate(rollouts))
        second = replace(
            second, rollouts_G=tuple(replace(r, finish_reason="stop") for r in second.rollouts_G)
        )
        return [replace(first, rollouts_G=rollouts), second]

    def kept(self, policy: Policy, groups: list[Any], **advanced: Any) -> list[Any]:
        packs = packs_of(groups, asked(advanced), policy.text)
        return [(answer.advantages_T[0], answer.weight) for pack in packs for answer in pack.sequences]

    @pytest.mark.parametrize("kl", [0.0, 0.1])
    def test_a_masked_answer_is_in_the_baseline_and_not_in_the_loss(
        self, policy: Policy, cut: list[Any], kl: float
    ) -> None:
        scored, masked = (self.kept(policy, cut, overlong=how, kl=kl) for how in ("score", "mask"))

        left = [r for g in cut for r in g.rollouts_G if r.finish_reason == "stop"]
        assert [advantage for advantage, _ in masked] == [a for n, (a, _) in enumerate(scored) if n != 1]
        assert {weight for _, weight in masked} == {1 / sum(len(r.output_ids_T) for r in left)}

    def test_the_soft_fine_moves_the_advantage_and_not_the_reported_reward(
        self, policy: Policy, groups: list[Any]
    ) -> None:
        group = groups[0]
        full = replace(group.rollouts_G[0], output_ids_T=(3,) * 12, logprobs_T=(-1.0,) * 12)
        edge = replace(group.rollouts_G[0], output_ids_T=(3,) * 10, logprobs_T=(-1.0,) * 10)
        near = replace(group.rollouts_G[0], output_ids_T=(3,) * 8, logprobs_T=(-1.0,) * 8)
        equal = Group(group.prompt, (full, edge, near), (Grade(1.0),) * 3)

        kept = self.kept(policy, [equal], overlong="soft", overlong_buffer=4, loss="dr_grpo")

        assert [advantage for advantage, _ in kept] == pytest.approx(
            [-0.5, 0.5]
        )  # and 0: at the mean, dropped
        assert equal.rewards_G == [1.0] * 3


class TestPasses:
    @pytest.mark.parametrize(
        "advanced", [{"loss": "dapo", "kl": 0.1}, {"loss": "gspo"}, {"importance": "none"}]
    )
    @pytest.mark.slow
    def test_the_second_pass_is_clipped_against_the_policy_the_batch_began_with(
        self, policy: Policy, groups: list[Any], advanced: dict[str, Any]
    ) -> None:
        settings = asked(advanced | {"updates_per_batch": 2})
        groups = [with_gap(group, number) for number, group in enumerate(groups)]
        began = {
            r.output_ids_T: plain_logprobs(policy, g.prompt.ids, r.output_ids_T).detach()
            for g in groups
            for r in g.rollouts_G
        }

        class SignDescent(RecordingOptimizer):
            def descend(self, steps_taken: int, rate: float) -> float:
                learning_rate = super().descend(steps_taken, rate)
                with torch.no_grad():
                    for p in policy.trainable:
                        assert p.grad is not None
                        p.add_(0.02 * p.grad.sign())
                return learning_rate

        trainer = RecordingTrainer(policy, settings, token_budget=24, kind=SignDescent)
        seen = trainer.gradients
        start = weights_of(policy)
        learn(trainer, groups)
        with torch.no_grad():
            for p, value, gradient in zip(policy.trainable, start, seen[0], strict=True):
                p.copy_(value + 0.02 * gradient.sign())
        expected = plain_gradients(policy, groups, settings, began)

        assert len(seen) == 2
        assert relative_difference(seen[1], expected) < 1e-5
        assert relative_difference(seen[1], seen[0]) > 1e-2

    def test_each_pass_is_a_step_of_the_optimizer_and_a_step_of_the_run_has_one_learning_rate(
        self, policy: Policy, groups: list[Any]
    ) -> None:
        trainer = PeftTrainer(policy, asked({"updates_per_batch": 3, "warmup_steps": 4}), token_budget=4096)
        once = learn(PeftTrainer(policy, asked({}), token_budget=4096), groups)

        metrics = learn(trainer, groups)

        assert trainer.optimizer.adamw.state[policy.trainable[0]]["step"].item() == 3
        assert trainer.optimizer.adamw.param_groups[0]["lr"] == pytest.approx(0.01 / 4)
        assert metrics.trained_tokens == 3 * once.trained_tokens
        assert metrics.trained_sequences == once.trained_sequences

    def test_the_learning_rate_goes_down_to_the_end_of_the_job(
        self, policy: Policy, groups: list[Any]
    ) -> None:
        settings = asked({"learning_rate_schedule": "linear", "warmup_steps": 1})
        trainer = PeftTrainer(policy, settings.model_copy(update={"total_steps": 5}), token_budget=4096)

        rates = []
        for _ in range(5):
            learn(trainer, groups)
            rates.append(trainer.optimizer.adamw.param_groups[0]["lr"] / settings.learning_rate)

        assert rates == pytest.approx([1, 1, 0.75, 0.5, 0.25])

    def test_each_step_records_the_weight_of_the_kl_penalty_also_without_an_update(
        self, policy: Policy, groups: list[Any]
    ) -> None:
        trainer = PeftTrainer(policy, asked({"kl": 0.4, "kl_warmup_steps": 4}), token_budget=4096)

        weights = [
            learn(trainer, groups).kl_weight,
            trainer.step().kl_weight,
            learn(trainer, groups).kl_weight,
        ]

        assert weights == pytest.approx([0.1, 0.2, 0.3])
        assert learn(PeftTrainer(policy, asked({}), token_budget=4096), groups).kl_weight is None

    def test_steps_without_an_update_count_for_the_schedule(self, policy: Policy, groups: list[Any]) -> None:
        settings = asked({"learning_rate_schedule": "linear"})
        trainer = PeftTrainer(policy, settings.model_copy(update={"total_steps": 4}), token_budget=4096)

        trainer.step()
        trainer.step()
        learn(trainer, groups)

        assert trainer.optimizer.adamw.param_groups[0]["lr"] == pytest.approx(settings.learning_rate / 2)

    def test_the_clip_acts_in_later_passes_only(self, policy: Policy, groups: list[Any]) -> None:
        settings = {"clip_low": 1e-4, "clip_high": 1e-4}
        one, two = (asked(settings | {"updates_per_batch": n}) for n in (1, 2))

        assert learn(PeftTrainer(policy, one, token_budget=4096), groups).clip_fraction == 0
        assert present(learn(PeftTrainer(policy, two, token_budget=4096), groups).clip_fraction) > 0.2


class TestMiniBatches:
    FOUR = ([1.0, 0.0, 0.5, 0.0], [1.0] * 4, [0.0, 1.0, 1.0, 0.2], [0.0, 0.0, 1.0, 0.0])

    def test_each_part_is_a_step_clipped_against_the_policy_that_sampled(self, policy: Policy) -> None:
        settings = asked({"loss": "grpo", "kl": 0.1, "mini_batches": 2, "updates_per_batch": 2})
        groups = [with_gap(group, n) for n, group in enumerate(sampled(policy, list(self.FOUR)))]
        shares = [contributions.contribution_of(group, settings, policy.text) for group in groups]
        parts = [
            [group for group in groups if group.prompt.line in {share.line for share in part}]
            for part in contributions.in_mini_batches(shares, 2, seed=0)
        ]
        began = {
            r.output_ids_T: plain_logprobs(policy, g.prompt.ids, r.output_ids_T).detach()
            for g in groups
            for r in g.rollouts_G
        }
        expected: list[list[torch.Tensor]] = []

        class SignDescent(RecordingOptimizer):
            def descend(self, steps_taken: int, rate: float) -> float:
                learning_rate = super().descend(steps_taken, rate)
                taken = [parameter.grad for parameter in policy.trainable]
                expected.append(plain_gradients(policy, parts[len(expected) % 2], settings, began))
                with torch.no_grad():
                    for parameter, gradient in zip(policy.trainable, taken, strict=True):
                        parameter.add_(0.01 * present(gradient).sign())
                return learning_rate

        trainer = RecordingTrainer(policy, settings, token_budget=24, kind=SignDescent)
        learn(trainer, groups)

        assert [len(part) for part in parts] == [2, 2]
        assert len(trainer.gradients) == len(expected) == 4
        for ours, plain in zip(trainer.gradients, expected, strict=True):
            assert relative_difference(ours, plain) < 1e-5

    def test_their_gradients_at_one_policy_add_up_to_that_of_the_whole_step(self, policy: Policy) -> None:
        groups = sampled(policy, list(self.FOUR))
        one, three = (
            asked({"loss": "dr_grpo", "advantage_scale": "batch", "mini_batches": n}) for n in (1, 3)
        )
        whole, divided = (RecordingTrainer(policy, how, token_budget=4096) for how in (one, three))

        learn(whole, groups[::-1])
        metrics = learn(divided, groups)

        shares = [contributions.contribution_of(group, three, policy.text) for group in groups]
        parts = contributions.in_mini_batches(shares, 3, seed=0)
        weights = [sum(len(share.lengths) for share in part) / 16 for part in parts]
        assert 1 < len(parts) == len(divided.gradients)
        total = [
            sum((weight * one for weight, one in zip(weights, values, strict=True)), torch.zeros(()))
            for values in zip(*divided.gradients, strict=True)
        ]
        assert relative_difference(total, whole.gradients[0]) < 1e-5
        assert metrics.trained_sequences == 12

    def test_the_division_depends_on_the_lines_and_the_seed_alone(self, policy: Policy) -> None:
        settings = asked({})
        shares = [
            contributions.contribution_of(group, settings, policy.text)
            for group in sampled(policy, list(self.FOUR))
        ]

        def lines(order: list[Any], seed: int) -> list[set[int]]:
            return [{one.line for one in part} for part in contributions.in_mini_batches(order, 2, seed=seed)]

        assert lines(shares, 1) == lines(shares[::-1], 1)
        assert len({tuple(map(frozenset, lines(shares, seed))) for seed in range(9)}) > 1


class TestGap:
    def test_it_is_reported_by_its_definitions(self, policy: Policy, groups: list[Any]) -> None:
        groups = [with_gap(group, number) for number, group in enumerate(groups)]
        pairs = [
            (plain_logprobs(policy, g.prompt.ids, r.output_ids_T).detach(), torch.tensor(r.logprobs_T))
            for g in groups
            for r in g.rollouts_G
        ]
        gap = torch.cat([own - theirs for own, theirs in pairs]).double()

        metrics = learn(PeftTrainer(policy, asked({"kl": 0.1}), token_budget=24), groups)

        w = gap.exp()
        assert metrics.logprob_gap == pytest.approx(gap.abs().mean().item(), rel=1e-4)
        assert metrics.logprob_gap_max == pytest.approx(gap.abs().max().item(), rel=1e-4)
        assert metrics.logprob_gap_k1 == pytest.approx(-gap.mean().item(), rel=1e-3)
        assert metrics.logprob_gap_k3 == pytest.approx((w - 1 - gap).mean().item(), rel=1e-3)
        assert metrics.logprob_gap_ess == pytest.approx(
            (w.sum() ** 2 / len(w) / (w**2).sum()).item(), rel=1e-4
        )

    def test_without_one_the_sample_is_worth_its_size(self, policy: Policy, groups: list[Any]) -> None:
        metrics = learn(PeftTrainer(policy, asked({}), token_budget=4096), groups)

        assert present(metrics.logprob_gap_max) < 1e-4
        assert metrics.logprob_gap_ess == pytest.approx(1.0, abs=1e-6)

    def test_a_sampler_that_was_sure_of_nothing_cannot_blow_up_the_step(
        self, policy: Policy, groups: list[Any]
    ) -> None:
        broken = [
            replace(
                g, rollouts_G=tuple(replace(r, logprobs_T=(-1e9,) * len(r.logprobs_T)) for r in g.rollouts_G)
            )
            for g in groups
        ]

        metrics = learn(PeftTrainer(policy, asked({}), token_budget=4096), broken)

        assert not metrics.skipped
        assert metrics.logprob_gap_ess is not None
        assert not math.isfinite(metrics.logprob_gap_ess)


class TestReference:
    def settings(self, **advanced: Any) -> Resolved:
        return asked({"kl": 0.1, "reference_refresh_steps": 2, "learning_rate": 0.003} | advanced)

    def test_it_is_the_base_until_it_becomes_the_policy(self, policy: Policy, groups: list[Any]) -> None:
        trainer = PeftTrainer(policy, self.settings(), token_budget=4096)
        kls = [present(learn(trainer, groups).kl) for _ in range(4)]

        assert kls[0] > 0.01
        assert kls[1] > 0.01
        assert kls[2] == 0.0  # the first step after the refresh starts at its reference
        assert 0 < kls[3] < kls[1]

    @pytest.mark.parametrize("loss", ["grpo", "reinforce_plus_plus", "ppo"])
    @pytest.mark.parametrize(("steps_taken", "weight"), [(0, 0.1), (1, 0.2), (3, 0.4), (9, 0.4)])
    def test_its_weight_rises_in_a_line_until_the_end_of_the_warm_up(
        self,
        make_policy: Callable[..., Policy],
        groups: list[Any],
        loss: str,
        steps_taken: int,
        weight: float,
    ) -> None:
        """As after a resume, which restores `steps_taken`."""
        common = {"loss": loss, "mini_batches": 2, "updates_per_batch": 2}
        warming, plain = (
            PeftTrainer(make_policy(moved=True), asked(common | kl), token_budget=48)
            for kl in ({"kl": 0.4, "kl_warmup_steps": 4}, {"kl": weight})
        )
        warming.steps_taken = plain.steps_taken = steps_taken

        learn(warming, groups)
        learn(plain, groups)

        for ours, theirs in zip(warming.policy.trainable, plain.policy.trainable, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)

    @pytest.mark.slow
    def test_it_survives_a_checkpoint(
        self, make_policy: Callable[..., Policy], groups: list[Any], tmp_path: Path
    ) -> None:
        first = PeftTrainer(make_policy(moved=True), self.settings(), token_budget=4096)
        for _ in range(3):
            learn(first, groups)
        first.save(tmp_path)
        second = PeftTrainer(make_policy(), self.settings(), token_budget=4096)
        second.load(tmp_path)

        metrics = [learn(trainer, groups) for trainer in (first, second)]

        assert metrics[0] == metrics[1]
        assert second.loss.reference is not None
        assert first.loss.reference is not None
        assert all(
            torch.equal(a, b) for a, b in zip(first.loss.reference, second.loss.reference, strict=True)
        )
        assert all(
            torch.equal(a, b)
            for a, b in zip(weights_of(first.policy), weights_of(second.policy), strict=True)
        )

    def test_wearing_other_weights_leaves_the_own_as_they_were(self, policy: Policy) -> None:
        before = weights_of(policy)
        with policy.with_weights([torch.zeros_like(weight) for weight in before]):
            assert all(not parameter.any() for parameter in policy.trainable)

        assert all(torch.equal(a, b) for a, b in zip(before, policy.trainable, strict=True))


def test_process_supervision_credits_the_tokens_of_each_step(policy: Policy, groups: list[Any]) -> None:
    from graders.types import StepScore

    [group] = groups[:1]
    two = next(r for r in group.rollouts_G if len(r.text.split()) >= 3)
    words = two.text.split()
    first_end = len(words[0])
    graded = Group(
        group.prompt,
        (two, two),
        (
            Grade(1.0, steps=(StepScore(1.0, first_end), StepScore(0.0, len(two.text)))),
            Grade(0.0, steps=(StepScore(0.0, len(two.text)),)),
        ),
    )
    settings = asked({"supervision": "process", "loss": "dr_grpo"})

    [pack] = packs_of([graded], settings, policy.text)

    n = len(two.output_ids_T)
    assert pack.sequences[0].advantages_T == pytest.approx([2 / 3 - 1 / 3] + [-1 / 3] * (n - 1))
    assert pack.sequences[1].advantages_T == pytest.approx([-1 / 3] * n)
    assert learn(PeftTrainer(policy, settings, token_budget=4096), [graded]).trained_tokens == 2 * n


class TestOverlap:
    @pytest.mark.slow
    @pytest.mark.parametrize("loss", LOSSES)
    @pytest.mark.parametrize("scale", ["group", "batch", "none"])
    def test_groups_computed_one_by_one_give_the_gradient_of_all_at_once(
        self, policy: Policy, loss: str, scale: str
    ) -> None:
        groups = [
            with_gap(group, n)
            for n, group in enumerate(sampled(policy, [*MIXED, [1.0] * 4, [0.2, 0.9, 0.9, 0.1]]))
        ]
        asked_for = {"loss": loss, "advantage_scale": scale}

        at_once = packed_gradients(policy, groups, asked(asked_for | {"overlap": False}), 64)
        one_by_one = packed_gradients(policy, groups, asked(asked_for | {"overlap": True}), 1)

        assert relative_difference(one_by_one, at_once) < 1e-5

    def test_the_metrics_are_the_same_too(self, policy: Policy, groups: list[Any]) -> None:
        groups = [with_gap(group, n) for n, group in enumerate(groups)]
        one_by_one, at_once = (
            learn(
                PeftTrainer(policy, asked({"overlap": overlap, "learning_rate": 1e-12}), token_budget=budget),
                groups,
            )
            for overlap, budget in ((True, 1), (False, 4096))
        )

        # KL is only watched, on the first pack, which is another one here.
        assert_same(one_by_one, at_once, terms=NATS, but=("kl",))

    def test_a_group_is_computed_while_others_are_still_sampled(self, policy: Policy) -> None:
        """The first group's gradient is there before the last is sampled, and the step's is that of all at once."""
        groups = sampled(policy, MIXED)
        settings = asked({"overlap": True})
        expected = packed_gradients(policy, groups, settings, 4096)
        trainer = RecordingTrainer(policy, settings, token_budget=1)

        trainer.add(groups[0])
        early = sum(p.grad.abs().sum().item() for p in policy.trainable if p.grad is not None)
        again = drawn(policy, [group.prompt for group in groups], sampling())
        trainer.add(groups[1])
        trainer.step()

        assert early > 0
        assert [g.rollouts_G for g in groups] == [tuple(rollouts) for rollouts in again]  # undisturbed
        assert relative_difference(trainer.gradients[-1], expected) < 1e-5

    def test_a_step_leaves_nothing_to_the_next(self, policy: Policy, groups: list[Any]) -> None:
        trainer = PeftTrainer(policy, asked({"learning_rate": 1e-12}), token_budget=1)

        first, second = learn(trainer, groups), learn(trainer, groups)

        assert first.trained_tokens == second.trained_tokens
        assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-4)


class TestLeavingOut:
    def test_layers_that_the_sampler_does_not_adapt_stay_as_they_are_and_all_others_learn(
        self, make_policy: Callable[..., Policy]
    ) -> None:
        policy = make_policy()
        names = sorted({name.rpartition(".lora_")[0] for name in policy.adapter()})
        down = [name for name in names if name.endswith("down_proj")]
        policy.leave_out(down)

        learn(PeftTrainer(policy, asked({"learning_rate": 0.01}), token_budget=4096), sampled(policy, MIXED))

        learned = {
            name.rpartition(".lora_")[0]
            for name, tensor in policy.adapter().items()
            if ".lora_B" in name and tensor.any()
        }
        assert learned == set(names) - set(down)

    def test_the_coverage_is_of_the_layers_that_learn(self, make_policy: Callable[..., Policy]) -> None:
        policy, reported = make_policy(), []
        whole = policy.coverage
        names = sorted({name.rpartition(".lora_")[0] for name in policy.adapter()})
        down = [name for name in names if name.endswith("down_proj")]

        policy.leave_out(down)
        report_left_out(lambda *event: reported.append(event), lambda policy: None, policy, down)

        assert policy.coverage.modules == whole.modules - len(down) == len(names) - len(down)
        assert 0 < policy.coverage.share < whole.share
        [(message, data)] = reported
        assert str(policy.coverage) in message
        assert data["adapted_modules"] == len(names) - len(down) and data["modules"] == down

    def test_a_layer_that_was_trained_elsewhere_cannot_be_left_out(self, policy: Policy) -> None:
        [name, *_] = sorted({name.rpartition(".lora_")[0] for name in policy.adapter()})

        with pytest.raises(UnsupportedModel, match="the sampler that it was trained with"):
            policy.leave_out([name])

    def test_a_sampler_that_adapts_no_layer_is_refused(self, make_policy: Callable[..., Policy]) -> None:
        policy = make_policy()

        with pytest.raises(UnsupportedModel, match="puts no adapter on any of its layers"):
            policy.leave_out(sorted({name.rpartition(".lora_")[0] for name in policy.adapter()}))
