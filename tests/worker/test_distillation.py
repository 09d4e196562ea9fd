"""Distillation: the student samples, and the reverse KL of each token to the teacher is its negative advantage."""

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from core.registry import BaseModelEntry
from core.results.lineage import Parent
from core.settings import Settings
from graders.types import Grade
from tests.hyperparameters import in_groups
from tests.tiny import make_byte_model, make_tiny_model
from tests.worker.conftest import Bench
from tests.worker.rounding import NATS, ROUNDING
from worker.clock import Clock
from worker.model import memory, sizing
from worker.model.memory import DeviceMemory
from worker.model.policy import Policy, read_config
from worker.prepare.memory_plan import plan_memory
from worker.prepare.model import BaseModel
from worker.prepare.teachers import TeacherModel, inspect_teacher, load_teacher, read_adapter
from worker.refusals import UserMistake
from worker.rollout.distillation_rewards import TeacherRewards
from worker.sampling import Sampling, grouped
from worker.sampling.transformers import TransformersSampler
from worker.training import grpo
from worker.training.teacher import PolicyTeacher
from worker.training.trainer import PeftTrainer
from worker.types import Group, Prompt, Rollout

P = torch.tensor([1 / 2, 1 / 4, 1 / 4], dtype=torch.float64)  # student
Q = torch.tensor([1 / 8, 3 / 8, 1 / 2], dtype=torch.float64)  # teacher
PROMPTS = [Prompt(line, (8 + line, 9), {"messages": []}) for line in range(3)]

MakePolicy = Callable[..., Policy]


def test_advantages_are_those_checked_by_hand() -> None:
    found = grpo.distillation_advantages(P.log(), Q.log())

    assert found.tolist() == pytest.approx([-1.3862944, 0.4054651, 0.6931472], abs=1e-7)
    assert -(P * found).sum().item() == pytest.approx(0.4184941084, abs=1e-10)


def test_their_policy_gradient_is_that_of_the_reverse_kl() -> None:
    logits = P.log().requires_grad_()
    logp = logits.log_softmax(-1)
    expected = (logp.detach().exp() * -grpo.distillation_advantages(logp, Q.log()) * logp).sum()

    (policy_gradient,) = torch.autograd.grad(expected, logits, retain_graph=True)
    (gradient,) = torch.autograd.grad((logp.exp() * (logp - Q.log())).sum(), logits)

    assert policy_gradient.tolist() == pytest.approx([0.4839001, -0.2059898, -0.2779103], abs=1e-7)
    assert torch.allclose(policy_gradient, gradient)


def test_one_token_that_the_teacher_excludes_does_not_outweigh_the_others() -> None:
    found = grpo.distillation_advantages(torch.tensor([-1.0, -20.0]), torch.tensor([-20.0, -1.0]))

    assert found.tolist() == [-5.0, 5.0]


def moved(policy: Policy, by: float) -> list[Tensor]:
    """The weights of another adapter of the same shape."""
    drawn = torch.Generator().manual_seed(1)
    return [one.detach() + by * torch.randn(one.shape, generator=drawn) for one in policy.trainable]


def teacher(policy: Policy, by: float) -> PolicyTeacher:
    weights = moved(policy, by)
    return PolicyTeacher(policy, partial(policy.with_weights, weights), token_budget=512)


def sampled(policy: Policy) -> list[tuple[Prompt, list[Rollout]]]:
    answers = TransformersSampler(policy).answers(PROMPTS, Sampling(4, 1.0, 8, job_seed=0, step=1))
    return [
        (prompt, list(rollouts))
        for prompt, rollouts in zip(PROMPTS, grouped(answers, len(PROMPTS), 4), strict=True)
    ]


def taught(policy: Policy, by: float) -> list[Group]:
    answers_P = sampled(policy)
    found = teacher(policy, by).logprobs(answers_P, 1.0)
    return [
        Group(
            prompt,
            tuple(replace(one, teacher_T=logp) for one, logp in zip(rollouts, logp_G, strict=True)),
            (Grade(0.5),) * len(rollouts),
        )
        for (prompt, rollouts), logp_G in zip(answers_P, found, strict=True)
    ]


ADVANCED: dict[str, Any] = {
    "loss": {"type": "dapo", "advantage_scale": "none"},
    "sampling": {"group_size": 4, "max_completion_tokens": 8},
    "optimizer": {"learning_rate": 0.01},
    "evaluation": {"temperature": 1.0},
    "lora": {"rank": 4, "alpha": 8},
}


def test_a_teacher_like_the_student_teaches_nothing(bench: Bench, make_policy: MakePolicy) -> None:
    policy = make_policy()
    trainer = PeftTrainer(policy, bench.run(advanced=ADVANCED).experience.settings, token_budget=512)
    groups = taught(policy, by=0.0)

    for group in groups:
        for rollout in group.rollouts_G:
            assert rollout.teacher_T == pytest.approx(rollout.logprobs_T, abs=ROUNDING * NATS)
        trainer.add(group)
    update = trainer.step()

    assert update.loss == pytest.approx(0.0, abs=ROUNDING * NATS)
    assert update.dropped_sequences == 0


def test_answers_with_equal_scores_are_all_learned_from(bench: Bench, make_policy: MakePolicy) -> None:
    """At the first update the ratio is 1, so the loss is the mean of the negative advantages."""
    policy = make_policy()
    trainer = PeftTrainer(policy, bench.run(advanced=ADVANCED).experience.settings, token_budget=512)
    groups = taught(policy, by=0.3)
    gaps = [
        max(-5.0, min(5.0, teaches - own))
        for group in groups
        for one in group.rollouts_G
        for teaches, own in zip(one.teacher_T, one.logprobs_T, strict=True)
    ]

    for group in groups:
        trainer.add(group)
    update = trainer.step()

    assert update.loss == pytest.approx(-sum(gaps) / len(gaps), rel=1e-4)
    assert update.trained_sequences == 12


def test_the_micro_batches_of_a_teacher_change_nothing(make_policy: MakePolicy) -> None:
    policy = make_policy()
    answers_P = sampled(policy)
    whole, parts = (replace(teacher(policy, 0.3), token_budget=budget) for budget in (512, 12))

    for many, few in zip(whole.logprobs(answers_P, 0.7), parts.logprobs(answers_P, 0.7), strict=True):
        for one, other in zip(many, few, strict=True):
            assert one == pytest.approx(other, abs=ROUNDING * NATS)


def distilling(
    bench: Bench, make_policy: MakePolicy, *, epochs: int, student: Policy | None = None, **parts: Any
) -> Any:
    policy = student or make_policy()
    chosen: dict[str, Any] = {"advanced": in_groups(ADVANCED), "eval_interval": 4, "eval_samples": 8} | parts
    run = bench.run(n_epochs=epochs, **chosen)
    trainer = PeftTrainer(policy, run.experience.settings, token_budget=512)
    weights = moved(make_policy(), 0.3)
    teaching = PolicyTeacher(policy, partial(policy.with_weights, weights), token_budget=512)
    rewards = TeacherRewards(teaching, temperature=1.0)
    sampler = TransformersSampler(policy)
    run.experience = replace(run.experience, graders=(), rewards=rewards, sampler=sampler, trainer=trainer)
    return run


@pytest.fixture
def job(bench: Bench) -> Bench:
    """A job without a grader."""
    with bench.database.write() as session:
        job = bench.job()
        job.method, job.body = "distillation", {"teacher": {"model": "ft:teacher"}, "hyperparameters": {}}
        session.merge(job)
    return bench


def test_a_student_approaches_its_teacher(job: Bench, make_policy: MakePolicy) -> None:
    more = ADVANCED | {
        "sampling": {"group_size": 16, "max_completion_tokens": 8},
        "optimizer": {"learning_rate": 0.01},
    }
    asyncio.run(distilling(job, make_policy, epochs=40, batch_size=8, advanced=more).train())

    curve = [step["full_valid_teacher_kl"] for step in job.steps() if "full_valid_teacher_kl" in step]
    assert curve[-1] < curve[0] / 2, curve
    assert {"teacher_kl", "train_mean_reward", "kl"} <= job.steps()[1].keys()
    assert "groups_mixed_share" not in job.steps()[1]
    assert not [one for one in job.events("warn") if "signal" in one]
    assert job.job().status == "succeeded"


def test_a_job_that_is_stopped_and_resumed_ends_as_if_it_had_not_been(
    job: Bench, make_policy: MakePolicy
) -> None:
    asked = iter([False, True])
    asyncio.run(distilling(job, make_policy, epochs=2, stop_requested=lambda: next(asked)).train())
    job.again()
    resumed, whole = make_policy(seed=9), make_policy()

    asyncio.run(distilling(job, make_policy, epochs=2, student=resumed).train())

    run = distilling(job, make_policy, epochs=2, student=whole)
    for step in range(1, run.experience.settings.total_steps + 1):
        asyncio.run(run.experience.collector.collect(step, Clock()))
        run.experience.trainer.step()
    assert len(job.steps()) == run.experience.settings.total_steps + 1
    for own, other in zip(whole.trainable, resumed.trainable, strict=True):
        assert torch.equal(own, other)


def entries(tmp_path: Path) -> dict[str, BaseModelEntry]:
    make_tiny_model(tmp_path / "tiny")
    make_tiny_model(tmp_path / "larger", layers=3, seed=5)
    make_byte_model(tmp_path / "bytes")
    return {
        name: BaseModelEntry(path=tmp_path / name, dtype="float32", context=128)
        for name in ("tiny", "larger", "bytes")
    }


def test_a_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserMistake, match="The teacher 'bytes' has another tokenizer than 'tiny'") as refused:
        inspect_teacher("bytes", "bytes", None, "tiny", entries(tmp_path), tmp_path)

    assert refused.value.param == "method.distillation.teacher.model"


def test_a_tuned_model_on_another_base_is_refused(tmp_path: Path) -> None:
    tuned = Parent("ft:larger:x", "ftjob-1", 3, "ckpt-1", "somewhere", {})
    with pytest.raises(UserMistake, match="is a tuned model on 'larger'"):
        inspect_teacher("ft:larger:x", "larger", tuned, "tiny", entries(tmp_path), tmp_path)


def test_the_memory_plan_counts_a_second_model(tmp_path: Path) -> None:
    models = entries(tmp_path)
    shape = memory.shape_of(read_config(tmp_path / "tiny"), torch.float32)
    base = BaseModel(models["tiny"], tmp_path / "tiny", shape, "cpu", "transformers", "5")
    work = sizing.Workload(rank=4, prompt=2, completion=8, in_flight=120)
    second = inspect_teacher("larger", "larger", None, "tiny", models, tmp_path)
    free = [0.0]

    def all_free(device: str) -> int:
        return int(free[0])

    def fits(free_bytes: float, teacher: TeacherModel | None) -> bool:
        free[0] = free_bytes
        try:
            plan_memory("tiny", base, work, Settings(), 1, teacher, memory=DeviceMemory(all_free, all_free))
        except UserMistake as refused:
            assert refused.code == "not_enough_memory"
            return False
        return True

    low, high = 0, 1 << 40
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle, None) else (middle, high)
    more = second.weight_bytes(reordered=True)
    assert more > 4 * 3 * 1000
    assert not fits(high + more - 1, second)
    assert fits(high + more, second)


class Folder:
    """Adapters that lie in a folder."""

    is_empty = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def download(self, prefix: str, folder: Path) -> None:
        shutil.copytree(self.folder / prefix, folder, dirs_exist_ok=True)


def test_a_second_model_teaches_with_its_own_weights(
    bench: Bench, make_policy: MakePolicy, tmp_path: Path
) -> None:
    found = inspect_teacher("larger", "larger", None, "tiny", entries(tmp_path), tmp_path)
    student = make_policy()
    settings = bench.run(advanced=ADVANCED).experience.settings

    teacher = load_teacher(found, student, settings, Folder(tmp_path), tmp_path, lambda: None)
    policy = teacher.policy

    assert found.weight_bytes(reordered=False) == 4 * sum(
        one.numel() for name, one in policy.model.named_parameters() if ".lora_" not in name
    )
    assert policy is not student and not policy.trainable
    answers_P = sampled(student)
    [[first, *_], *_] = PolicyTeacher(policy, teacher.teaching, 512).logprobs(answers_P, 1.0)
    prompt, [rollout, *_] = answers_P[0]
    ids = torch.tensor([[*prompt.ids, *rollout.output_ids_T]])
    with torch.no_grad():
        plain = LlamaForCausalLM.from_pretrained(tmp_path / "larger")
        logp = plain(ids).logits.double().log_softmax(-1)[0]
    at = len(prompt.ids) - 1
    expected = [logp[at + n, token].item() for n, token in enumerate(rollout.output_ids_T)]
    assert first == pytest.approx(expected, abs=1e-5)


def test_an_adapter_that_teaches_leaves_the_student_as_it_was(
    make_policy: MakePolicy, tmp_path: Path
) -> None:
    other, student = make_policy(), make_policy()
    weights = moved(other, 0.3)
    with other.with_weights(weights):
        other.save(tmp_path / "adapter")
    before = [one.detach().clone() for one in student.trainable]
    tuned = Parent("ft:tiny:x", "ftjob-1", 3, "ckpt-1", "adapter", {})

    read = read_adapter(tuned, student, Folder(tmp_path))

    assert all(torch.equal(one, own) for one, own in zip(before, student.trainable, strict=True))
    assert all(torch.equal(one, own) for one, own in zip(weights, read, strict=True))
