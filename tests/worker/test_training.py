"""The packed trainer and the grouped sampler against plain transformers, one sequence at a time."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.masking_utils import causal_mask_function

from core.jobs.hyperparameters import Hyperparameters, Resolved, resolve
from graders.types import ErrorKind, Grade
from tests.fakes import RecordingTrainer, learn
from tests.hyperparameters import in_groups
from tests.present import present, untyped
from tests.tiny import WORDS
from worker.model import attention, batch
from worker.model.generation import choose
from worker.model.policy import Policy, Route
from worker.sampling import Sampling, grouped
from worker.sampling.transformers import TransformersSampler, Wave, waves
from worker.training import contributions, grpo
from worker.training.objective import token_loss
from worker.training.objectives.registry import OBJECTIVES
from worker.training.trainer import PeftTrainer
from worker.types import Group, Pack, Prompt, Rollout, TrainingSequence

SETTINGS = resolve(
    Hyperparameters.model_validate(
        {"advanced": {"optimizer": {"learning_rate": 0.01}, "sampling": {"max_completion_tokens": 12}}}
    ),
    rows=8,
    parameters=1000,
    context=128,
)


def prompt(policy: Policy, text: str, line: int = 1) -> Prompt:
    return Prompt(line, tuple(policy.render([{"role": "user", "content": text}])), {"messages": []})


def sampling(**changes: Any) -> Sampling:
    return replace(
        Sampling(group_size=4, temperature=1.0, max_completion_tokens=12, job_seed=5, step=1), **changes
    )


def plain_logprobs(
    policy: Policy, prompt_ids: Any, output_ids: tuple[int, ...], temperature: float = 1.0
) -> Any:
    """What transformers itself says, with no cache, no packing and no mask of ours."""
    ids = torch.tensor([[*prompt_ids, *output_ids]])
    logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1]
    logp = (logits.float() / temperature).log_softmax(-1)
    return logp.gather(-1, torch.tensor(output_ids)[:, None])[:, 0]


def drawn(policy: Policy, prompts: list[Prompt], how: Sampling, **options: Any) -> list[tuple[Rollout, ...]]:
    answers = TransformersSampler(policy, **options).answers(prompts, how)
    return grouped(answers, len(prompts), how.group_size)


@pytest.fixture
def policy(make_policy: Callable[..., Policy]) -> Policy:
    return make_policy(moved=True)


@pytest.fixture
def prompts(policy: Policy) -> list[Any]:
    texts = ["say yes", "what colour is it now please tell me the name of the animal", "tell me a number"]
    return [prompt(policy, text, line) for line, text in enumerate(texts, start=1)]


@pytest.fixture
def groups(policy: Policy, prompts: list[Any]) -> list[Any]:
    """Graded answers of uneven length, some groups with signal, one without, one answer ungraded."""
    rewards_PG: list[list[float | None]] = [
        [1.0, 0.0, 0.5, 0.0],
        [0.25, 0.25, 0.25, 0.25],
        [0.0, 1.0, 1.0, None],
    ]
    sampled = drawn(policy, prompts, sampling())
    return [
        Group(
            one,
            rollouts,
            tuple(
                Grade(r) if r is not None else Grade(None, "broken", ErrorKind.other_error) for r in rewards
            ),
        )
        for one, rollouts, rewards in zip(prompts, sampled, rewards_PG, strict=True)
    ]


class TestSampler:
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_logprobs_are_those_of_a_plain_forward_pass(
        self, policy: Policy, prompts: list[Any], temperature: float
    ) -> None:
        sampled = drawn(policy, prompts, sampling(temperature=temperature))

        for one, rollouts in zip(prompts, sampled, strict=True):
            for rollout in rollouts:
                expected = plain_logprobs(policy, one.ids, rollout.output_ids_T, temperature)
                assert rollout.logprobs_T == pytest.approx(expected.tolist(), abs=1e-4)

    def test_an_answer_does_not_depend_on_what_else_is_in_the_batch(
        self, policy: Policy, prompts: list[Any]
    ) -> None:

        together = drawn(policy, prompts, sampling())
        alone = [drawn(policy, [one], sampling())[0] for one in prompts]

        assert [[r.output_ids_T for r in g] for g in together] == [[r.output_ids_T for r in g] for g in alone]

    @pytest.mark.slow
    def test_waves_give_what_one_batch_gives(self, policy: Policy, prompts: list[Any]) -> None:
        one_batch = drawn(policy, prompts, sampling())
        single = drawn(policy, prompts, sampling(), max_tokens_in_flight=1)

        assert [[r.text for r in g] for g in single] == [[r.text for r in g] for g in one_batch]

    def test_more_prompts_fit_where_the_copies_of_a_group_share_one(self) -> None:
        asked = [Prompt(line, (1,) * 100, {}) for line in range(8)]
        how = sampling(group_size=4, max_completion_tokens=25)

        def prompts_of_the_first(route: Route, **options: Any) -> int:
            return len(next(waves(asked, how, route, 800, **options)).prompts)

        assert prompts_of_the_first(Route("packed")) == 4
        assert prompts_of_the_first(Route("rows", "forked")) == 1
        assert prompts_of_the_first(Route("rows", "alone")) == 1

    def test_a_group_that_does_not_fit_is_sampled_in_parts(self) -> None:
        asked = [Prompt(line, (1,) * 100, {}) for line in range(2)]
        how = sampling(group_size=4, max_completion_tokens=25)
        parts = [Wave(range(at, at + 1), range(n, n + 2)) for at in (0, 1) for n in (0, 2)]

        assert list(waves(asked, how, Route("rows", "forked"), 2 * 125)) == parts
        assert list(waves(asked, how, Route("packed"), 100 + 2 * 25)) == parts
        assert list(waves(asked, how, Route("rows", "forked"), 2 * 125 + 60, row_tokens=30)) == parts
        one_each = list(waves(asked, how, Route("rows", "forked"), 1))
        assert [len(wave.members) for wave in one_each] == [1] * 8

    def test_members_of_a_group_differ_and_the_same_seed_repeats_them(
        self, policy: Policy, prompts: list[Any]
    ) -> None:
        first, again = (drawn(policy, prompts, sampling()) for _ in range(2))
        other = drawn(policy, prompts, sampling(job_seed=6))

        assert len({r.output_ids_T for r in first[0]}) > 1
        assert first == again
        assert first != other

    def test_greedy_takes_the_likeliest_token_every_time(self, policy: Policy, prompts: list[Any]) -> None:
        [rollout] = drawn(policy, prompts[:1], sampling(temperature=0, group_size=1))[0]

        ids = list(prompts[0].ids)
        for token in rollout.output_ids_T:
            best = policy.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item()
            assert token == best
            ids.append(token)

    def test_an_answer_ends_with_its_stop_token_or_says_it_was_cut(
        self, policy: Policy, prompts: list[Any]
    ) -> None:
        end = WORDS.index("<end>")
        rollouts = [r for g in drawn(policy, prompts, sampling(group_size=32)) for r in g]

        assert {r.finish_reason for r in rollouts} == {"stop", "length"}
        for rollout in rollouts:
            assert (rollout.output_ids_T[-1] == end) == (rollout.finish_reason == "stop")
            assert end not in rollout.output_ids_T[:-1]
            assert rollout.finish_reason == "stop" or len(rollout.output_ids_T) == 12

    def test_draws_follow_the_distribution(self) -> None:
        logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(100_000, 4)
        draws = torch.rand(100_000, generator=torch.Generator().manual_seed(0))

        tokens, logprobs = choose(logits, draws, temperature=1.0)

        shares = torch.bincount(tokens, minlength=4) / len(tokens)
        assert shares.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.01)
        assert logprobs[tokens == 3][0].item() == pytest.approx(math.log(0.4))

    def test_the_ends_of_the_unit_interval_land_on_a_possible_token(self) -> None:
        logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]] * 2)

        tokens, _ = choose(logits, torch.tensor([0.0, 1.0 - 2**-24]), temperature=1.0)

        assert tokens.tolist() == [1, 2]


class TestPacking:
    def test_an_answer_sees_the_prompt_and_itself_only(self) -> None:
        segment = torch.tensor([[0, 0, 1, 1, 2, -1]])

        positions = torch.tensor([[0, 1, 2, 3, 2, 0]])

        layout = attention.Layout.of_rows(positions, segment)
        mask = attention.visible(layout, causal_mask_function)[0, 0].int().tolist()

        assert mask == [
            [1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0],
            [1, 1, 1, 1, 0, 0],
            [1, 1, 0, 0, 1, 0],
            [0, 0, 0, 0, 0, 1],
        ]

    def test_packed_logprobs_equal_those_of_each_answer_alone(
        self, policy: Policy, groups: list[Any]
    ) -> None:
        trainer = PeftTrainer(policy, SETTINGS, token_budget=4096)
        packs = packs_of(groups, SETTINGS.model_copy(update={"kl": 0.1}), policy.text)

        logp = trainer.loss.logprobs(batch.tensors_of(packs))

        expected = torch.cat(
            [plain_logprobs(policy, p.prompt_ids, s.output_ids_T) for p in packs for s in p.sequences]
        )
        assert (logp - expected).abs().max() < 1e-4

    def test_a_leak_between_answers_would_be_seen(self, policy: Policy, groups: list[Any]) -> None:
        """The control of the test above: with a plain causal mask the same comparison fails."""
        trainer = PeftTrainer(policy, SETTINGS, token_budget=4096)
        packs = packs_of(groups, SETTINGS.model_copy(update={"kl": 0.1}), policy.text)
        tensors = batch.tensors_of(packs)
        causal = torch.zeros_like(tensors.segment)  # one segment, that of the prompt

        logp = trainer.loss.logprobs(replace(tensors, segment=causal))

        expected = torch.cat(
            [plain_logprobs(policy, p.prompt_ids, s.output_ids_T) for p in packs for s in p.sequences]
        )
        assert (logp - expected).abs().max() > 0.1

    def test_answers_without_advantage_are_dropped_and_the_normalisation_still_counts_them(
        self, policy: Policy, groups: list[Any]
    ) -> None:
        packs = packs_of(groups, SETTINGS, policy.text)

        kept = [(s.advantages_T, s.weight) for p in packs for s in p.sequences]
        graded = [groups[0].rollouts_G, groups[1].rollouts_G, groups[2].rollouts_G[:3]]
        tokens = sum(len(r.output_ids_T) for rollouts in graded for r in rollouts)
        assert len(packs) == 2
        assert all(all(advantages_T) for advantages_T, _ in kept)
        assert {weight for _, weight in kept} == {1 / tokens}

    def test_a_pack_over_the_budget_is_split_between_answers(self) -> None:
        answer = TrainingSequence((1, 2, 3, 4, 5), (0.0,) * 5, (1.0,) * 5, 1.0)
        pack = Pack((9,) * 10, (answer,) * 6)

        parts = [part for one in batch.micro_batches([pack], 20) for part in one]

        assert [len(part.sequences) for part in parts] == [2, 2, 2]
        assert all(part.tokens <= 20 for part in parts)

    def test_a_micro_batch_keeps_to_its_budget_with_the_padding(self) -> None:
        answer = TrainingSequence((1, 2, 3), (0.0,) * 3, (1.0,) * 3, 1.0)
        packs = [Pack((9,) * n, (answer,)) for n in (3, 18, 5, 8, 4)]

        batches = list(batch.micro_batches(packs, 20))

        assert [len(p.prompt_ids) for b in batches for p in b] == [3, 4, 5, 8, 18]
        assert all(len(b) * max(p.tokens for p in b) <= 20 for b in batches)


class TestUpdate:
    @pytest.mark.parametrize(
        "advanced",
        [
            {"loss": "grpo"},
            {"loss": "dr_grpo"},
            {"loss": "bnpo"},
            {"loss": "dapo"},
            {"loss": "cispo"},
            {"loss": "gspo"},
            {"loss": "rloo"},
            {"loss": "rloo", "kl": 0.1, "importance": "mask"},
            {"loss": "grpo", "kl": 0.1, "importance": "mask"},
            {"loss": "dapo", "kl": 0.1},
            {"loss": "dapo", "kl": 0.1, "kl_estimator": "k1", "std": "sample"},
            {"loss": "gspo", "kl": 0.1, "importance": "none"},
            {"loss": "cispo", "cispo_cap": 1.1, "importance": "none"},
            {"loss": "dapo", "importance": "none", "advantage_scale": "none"},
            {"loss": "dapo", "normalize": "signal"},
            {"loss": "dr_grpo", "normalize": "signal", "kl": 0.1},
        ],
        ids=lambda advanced: "-".join(map(str, advanced.values())),
    )
    @pytest.mark.slow
    def test_gradients_equal_a_plain_one_sequence_at_a_time_implementation(
        self, policy: Policy, groups: list[Any], advanced: dict[str, Any]
    ) -> None:
        settings = asked(advanced)
        groups = [with_gap(group, number) for number, group in enumerate(groups)]
        expected = plain_gradients(policy, groups, settings)

        ours = packed_gradients(policy, groups, settings, 24)

        assert relative_difference(ours, expected) < 1e-5

    def test_the_gradient_is_the_slope_of_the_loss(self, policy: Policy, groups: list[Any]) -> None:
        """Finite differences on a few coordinates of the adapter, in float64."""
        policy.model.double()
        packs = packs_of(groups, SETTINGS, policy.text)
        tensors = batch.tensors_of(packs)
        trainer = PeftTrainer(policy, SETTINGS, token_budget=4096)

        def loss_now() -> torch.Tensor:
            logp = trainer.loss.logprobs(tensors)
            return token_loss(
                logp,
                tensors.sampled_logp_M.double() + 0.1,
                tensors.advantage_M.double(),
                tensors.weight_M.double(),
                tensors.answer_M,
                objective=OBJECTIVES["dapo"](0.1, 10),
            )

        torch.autograd.backward(loss_now())
        parameter = policy.trainable[3]
        assert parameter.grad is not None
        gradient = parameter.grad.clone().flatten()
        for index in gradient.abs().topk(5).indices.tolist():
            with torch.no_grad():
                flat = parameter.view(-1)
                old = flat[index].item()
                flat[index] = old + 1e-4
                up = loss_now().item()
                flat[index] = old - 1e-4
                down = loss_now().item()
                flat[index] = old
            # The head works in float32 whatever the weights are, which bounds how well this can agree.
            assert (up - down) / 2e-4 == pytest.approx(gradient[index].item(), rel=2e-2)

    def test_a_step_makes_the_good_answers_likelier(self, policy: Policy, groups: list[Any]) -> None:
        trainer = PeftTrainer(policy, SETTINGS, token_budget=4096)
        good, bad = groups[0].rollouts_G[0], groups[0].rollouts_G[1]

        metrics = learn(trainer, groups)

        ids = groups[0].prompt.ids
        assert plain_logprobs(policy, ids, good.output_ids_T).sum() > sum(good.logprobs_T)
        assert plain_logprobs(policy, ids, bad.output_ids_T).sum() < sum(bad.logprobs_T)
        assert metrics.trained_sequences == 7
        assert metrics.dropped_sequences == 5
        assert metrics.logprob_gap == pytest.approx(0, abs=1e-4)
        assert metrics.clip_fraction == 0

    def test_a_step_without_signal_changes_nothing(self, policy: Policy, groups: list[Any]) -> None:
        before = [p.detach().clone() for p in policy.trainable]

        metrics = learn(PeftTrainer(policy, SETTINGS, token_budget=4096), [groups[1]])

        assert metrics.trained_tokens == 0
        assert metrics.dropped_sequences == 4
        assert all(torch.equal(a, b) for a, b in zip(before, policy.trainable, strict=True))

    def test_a_gradient_that_is_not_finite_is_not_taken(self, policy: Policy, groups: list[Any]) -> None:
        before = [p.detach().clone() for p in policy.trainable]
        rollout = replace(
            groups[0].rollouts_G[0], logprobs_T=(math.nan,) * len(groups[0].rollouts_G[0].logprobs_T)
        )
        broken = replace(groups[0], rollouts_G=(rollout, *groups[0].rollouts_G[1:]))

        metrics = learn(PeftTrainer(policy, SETTINGS, token_budget=4096), [broken])

        assert metrics.skipped
        assert all(torch.equal(a, b) for a, b in zip(before, policy.trainable, strict=True))

    def test_entropy_and_kl_are_those_of_the_definition(self, policy: Policy, groups: list[Any]) -> None:
        settings = asked({"kl": 0.1})
        graded = groups[:1]
        ids = [(graded[0].prompt.ids, r.output_ids_T) for r in graded[0].rollouts_G]
        with policy.as_base():
            ref = torch.cat([plain_logprobs(policy, *one) for one in ids])
        own = torch.cat([plain_logprobs(policy, *one) for one in ids])

        metrics = learn(PeftTrainer(policy, settings, token_budget=4096), graded)

        assert metrics.kl == pytest.approx(grpo.kl_k3(own, ref).mean().item(), rel=1e-3)
        assert 0 < present(metrics.entropy) < math.log(len(WORDS))

    @pytest.mark.slow
    def test_a_saved_trainer_goes_on_exactly_where_it_was(
        self, make_policy: Callable[..., Policy], groups: list[Any], tmp_path: Path
    ) -> None:
        first = PeftTrainer(make_policy(moved=True), SETTINGS, token_budget=4096)
        learn(first, groups)
        first.save(tmp_path)
        second = PeftTrainer(make_policy(), SETTINGS, token_budget=4096)
        second.load(tmp_path)

        for trainer in (first, second):
            learn(trainer, groups)

        for a, b in zip(first.policy.trainable, second.policy.trainable, strict=True):
            assert torch.equal(a, b)


def test_a_saved_adapter_is_one_that_peft_loads(policy: Policy, tiny_model: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy.save(tmp_path)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path)

    ids = torch.tensor([policy.render([{"role": "user", "content": "say yes"}])])
    assert torch.allclose(loaded(ids).logits, policy.model(ids).logits, atol=1e-5)
    assert str(tiny_model) not in (tmp_path / "adapter_config.json").read_text()


def test_a_fresh_adapter_is_the_base_model(make_policy: Callable[..., Policy]) -> None:
    policy = make_policy()
    ids = torch.tensor([policy.render([{"role": "user", "content": "say yes"}])])

    adapted = policy.model(ids).logits
    with policy.as_base():
        assert torch.equal(policy.model(ids).logits, adapted)


def asked(advanced: dict[str, Any], **fields: Any) -> Resolved:
    """SETTINGS with other knobs, a gradient that nothing clips, and a step that nothing undoes."""
    common = {"learning_rate": 0.01, "max_completion_tokens": 12, "max_grad_norm": 1e9, "step_kl": 0}
    hyperparameters = Hyperparameters.model_validate({"advanced": in_groups(common | advanced)} | fields)
    return resolve(hyperparameters, rows=8, parameters=1000, context=128)


def with_gap(group: Any, seed: int) -> Any:
    """As if another engine had sampled: its log-probabilities are off, some of them by more than any bound."""
    generator = torch.Generator().manual_seed(seed)
    rollouts = tuple(
        replace(
            rollout,
            logprobs_T=tuple(
                (
                    torch.tensor(rollout.logprobs_T)
                    + 0.5 * torch.randn(len(rollout.logprobs_T), generator=generator)
                ).tolist()
            ),
        )
        for rollout in group.rollouts_G
    )
    return replace(group, rollouts_G=rollouts)


def relative_difference(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> Any:
    difference = sum((a - b).double().pow(2).sum() for a, b in zip(ours, expected, strict=True))
    return untyped(difference / sum(b.double().pow(2).sum() for b in expected)).sqrt().item()


def packs_of(groups: list[Any], settings: Resolved, decode: Callable[..., Any]) -> list[Any]:
    """What a step computes, with all that it is divided by in the weights and advantages."""
    shares = [contributions.contribution_of(group, settings, decode) for group in groups]
    whole, std = contributions.divisors(shares, settings)
    return [
        Pack(
            share.pack.prompt_ids,
            tuple(
                replace(s, advantages_T=tuple(a / std for a in s.advantages_T), weight=s.weight / whole)
                for s in share.pack.sequences
            ),
        )
        for share in shares
        if share.pack is not None
    ]


def packed_gradients(
    policy: Policy, groups: list[Any], settings: Resolved, budget: int
) -> list[torch.Tensor]:
    trainer = RecordingTrainer(policy, settings, token_budget=budget)
    learn(trainer, groups)
    return trainer.gradients[-1]


def plain_gradients(
    policy: Policy, groups: list[Any], settings: Resolved, began: dict[Any, Any] | None = None
) -> list[torch.Tensor]:
    """The papers' formulas in the most obvious way: every graded answer, a forward pass each, no packing.

    `began` has what the policy that sampled says of each answer, where that is not the present one.
    """
    rewards_PG, how = [g.rewards_G for g in groups], (settings.advantage_scale, settings.std)
    advantages_PG = grpo.advantages(rewards_PG, *how, settings.normalize)
    if settings.loss == "rloo":
        factors = [len(g) - g.count(None) for g in rewards_PG]
        advantages_PG = [
            [a * n / (n - 1) if a else 0.0 for a in g] for g, n in zip(advantages_PG, factors, strict=True)
        ]
    counted = [
        (group.prompt.ids, rollout, advantage)
        for group, advantages_G in zip(groups, advantages_PG, strict=True)
        for rollout, reward, advantage in zip(group.rollouts_G, group.rewards_G, advantages_G, strict=True)
        if reward is not None and (settings.normalize == "papers" or settings.kl > 0 or any(advantages_G))
    ]
    tokens = sum(len(rollout.output_ids_T) for _, rollout, _ in counted)
    low, high = settings.ratio_bounds
    policy.model.zero_grad()
    for ids, rollout, advantage in counted:
        logp = plain_logprobs(policy, ids, rollout.output_ids_T)
        now = logp.detach() if began is None else began[rollout.output_ids_T]
        old, correction = plain_correction(now, torch.tensor(rollout.logprobs_T), settings)
        ratio = torch.exp(logp - old)
        if settings.loss == "cispo":
            objective = ratio.clamp(max=high).detach() * advantage * logp
        else:
            used = {"gspo": torch.exp((logp - old).mean()), "rloo": torch.exp((logp - old).sum())}.get(
                settings.loss, ratio
            )
            objective = torch.minimum(used * advantage, used.clamp(low, high) * advantage)
            if settings.loss == "rloo":
                objective = objective / len(logp)
        if settings.kl:
            with torch.no_grad(), policy.as_base():
                ref = plain_logprobs(policy, ids, rollout.output_ids_T)
            k3 = torch.exp(ref - logp) - (ref - logp) - 1
            estimate = k3 if settings.kl_estimator == "k3" else logp - ref
            objective = objective - settings.kl * ratio * estimate
        objective = objective * correction
        share = {
            "grpo": objective.mean() / len(counted),
            "gspo": objective.mean() / len(counted),
            "rloo": objective.sum() / len(counted),
            "dr_grpo": objective.sum() / (len(counted) * settings.max_completion_tokens),
            "bnpo": objective.sum() / tokens,
            "dapo": objective.sum() / tokens,
            "cispo": objective.sum() / tokens,
        }[settings.loss]
        (-share).backward()
    gradients = [present(p.grad).clone() for p in policy.trainable]
    policy.model.zero_grad()
    return gradients


def plain_correction(
    old: torch.Tensor, sampled: torch.Tensor, settings: Resolved
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """What the ratio is to, and the weight for the sampler's gap."""
    if settings.importance == "none":
        return sampled, 1.0
    ratio = torch.exp(old - sampled)
    cap = settings.importance_cap
    if settings.importance == "truncate":
        return old, ratio.clamp(max=cap)
    assert cap is not None
    return old, ratio * ((ratio > 1 / cap) & (ratio < cap))
