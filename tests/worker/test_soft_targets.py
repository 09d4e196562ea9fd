"""Distillation from a file: the forward KL to a teacher, against a plain computation; learning; resuming."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.jobs.methods import LOGITS
from core.jobs.offline_hyperparameters import LogitsHyperparameters, ResolvedOffline, resolve
from graders.judge.judges import JudgeModel
from graders.types import TokenUsage
from tests.echo import echoes_of
from tests.graders.servers import serving
from tests.present import present
from tests.worker.rounding import assert_same_gradient
from worker.model.policy import Policy
from worker.rollout.served_teacher import ServedTeacher
from worker.training.offline import SoftTargetTrainer
from worker.training.soft_targets import forward_kl
from worker.training.teacher import TeacherPolicy
from worker.training.top_kl import forward_kl_to_top
from worker.types import Pack, TrainingSequence

MakePolicy = Callable[..., Policy]
ROWS = 7
STUDENT = torch.tensor([[1 / 2, 1 / 4, 1 / 4]], dtype=torch.float64).log()
TEACHER = torch.tensor([[1 / 8, 3 / 8, 1 / 2]], dtype=torch.float64).log()
exactly = partial(forward_kl, top_k=None, temperature=1.0)


@pytest.mark.parametrize("top_k", [None, 2, 3])
def test_the_loss_and_its_gradient_are_those_checked_by_hand(top_k: int | None) -> None:
    """One token is left when two are compared, so the others' sum is that token."""
    student = STUDENT.clone().requires_grad_()

    [loss] = forward_kl(student, TEACHER, top_k=top_k, temperature=1.0)
    loss.backward()

    assert loss.item() == pytest.approx(0.3253362107, abs=1e-9)
    assert student.grad is not None
    assert student.grad[0].tolist() == pytest.approx([0.375, -0.125, -0.25], abs=1e-9)


def test_tokens_beyond_the_top_count_as_one() -> None:
    """The KL of (0.4, 0.3 + 0.3) to (0.5, 0.4 + 0.1), and less than that of all tokens."""
    teacher = torch.tensor([[0.4, 0.3, 0.3]], dtype=torch.float64).log()
    student = torch.tensor([[0.5, 0.4, 0.1]], dtype=torch.float64).log()

    [coarse] = forward_kl(student, teacher, top_k=1, temperature=1.0)

    assert coarse.item() == pytest.approx(0.4 * math.log(0.8) + 0.6 * math.log(1.2), abs=1e-9)
    assert 0 < coarse < exactly(student, teacher)[0]


@pytest.mark.parametrize("top_k", [None, 1, 5])
def test_equal_models_have_no_loss_and_no_gradient(top_k: int | None) -> None:
    student = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    teacher = student.clone() + 3.0  # a constant changes no probability
    student.requires_grad_()

    losses = forward_kl(student, teacher, top_k=top_k, temperature=0.7)
    losses.sum().backward()  # type: ignore[no-untyped-call]

    assert losses.tolist() == pytest.approx([0.0] * 4, abs=1e-12)
    assert student.grad is not None
    assert student.grad.abs().max() < 1e-12


def test_a_temperature_divides_the_logits_and_its_square_multiplies_the_loss() -> None:
    [loss] = forward_kl(STUDENT, TEACHER, top_k=None, temperature=2.0)

    assert loss.item() == pytest.approx(4 * exactly(STUDENT / 2, TEACHER / 2).item(), abs=1e-12)


def test_a_token_that_the_teacher_excludes_costs_nothing() -> None:
    teacher = torch.tensor([[0.0, 0.0, -1e4]], dtype=torch.float64)
    student = torch.tensor([[0.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)

    [loss] = exactly(student, teacher)
    loss.backward()

    assert loss.item() == pytest.approx(math.log(1.5), abs=1e-9)
    assert student.grad is not None
    assert student.grad[0].tolist() == pytest.approx([-1 / 6, -1 / 6, 1 / 3])


def test_ids_that_only_one_of_the_models_has_are_no_tokens() -> None:
    """Models of a family fill their vocabularies up to different widths."""
    filled = torch.cat([TEACHER, torch.tensor([[-3.0, 8.0]], dtype=torch.float64)], -1)
    assert exactly(STUDENT, filled).item() == pytest.approx(0.3253362107, abs=1e-9)

    wider = torch.cat([STUDENT, torch.tensor([[0.0]], dtype=torch.float64)], -1)  # as likely as all others
    expected = 0.3253362107 + math.log(2.0)
    assert exactly(wider, TEACHER).item() == pytest.approx(expected, abs=1e-9)


def test_the_likeliest_tokens_alone_give_the_loss_and_the_gradient_of_all_logits() -> None:
    draw = torch.Generator().manual_seed(3)
    student, teacher = (3 * torch.randn(5, 30, dtype=torch.float64, generator=draw) for _ in range(2))
    top = teacher.log_softmax(-1).topk(4)
    whole, part = student.clone().requires_grad_(), student.clone().requires_grad_()

    expected = forward_kl(whole, teacher, top_k=4, temperature=1.0)
    found = forward_kl_to_top(part, top.indices, top.values)
    for losses in (expected, found):
        losses.sum().backward()  # type: ignore[no-untyped-call]

    torch.testing.assert_close(found, expected)
    assert whole.grad is not None
    torch.testing.assert_close(part.grad, whole.grad)


def test_likely_ids_that_the_student_does_not_have_are_no_tokens() -> None:
    torch.manual_seed(0)
    student = torch.randn(2, 5).requires_grad_()
    ids, probabilities = torch.tensor([[3, 6, 1], [5, 0, 2]]), torch.tensor([[0.5, 0.2, 0.1]] * 2)
    known = [[0, 2], [1, 2]]  # places of the tokens that the student has
    tokens = torch.stack([row[places] for row, places in zip(ids, known, strict=True)])
    expected = forward_kl_to_top(
        student,
        tokens,
        torch.stack([row[places] for row, places in zip(probabilities, known, strict=True)]).log(),
    )

    found = forward_kl_to_top(student, ids, probabilities.log())

    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    gradients = [torch.autograd.grad(one.sum(), student)[0] for one in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_likely_tokens_whose_rounded_probabilities_exceed_1_leave_nothing_for_others() -> None:
    student = torch.zeros(1, 3, requires_grad=True)

    [loss] = forward_kl_to_top(student, torch.tensor([[0, 1]]), torch.tensor([[-0.6931, -0.6931]]))
    loss.backward()

    assert loss.item() == pytest.approx(math.log(1.5), abs=1e-3)
    assert student.grad is not None and student.grad.isfinite().all()


def conversations() -> list[Pack]:
    """Rows of unequal lengths; of the odd ones only some tokens are learned."""
    packs = []
    for row in range(ROWS):
        ids = tuple(7 + (row * 5 + place * 3) % 40 for place in range(3 + 2 * row))
        learned = tuple(place % 3 != 1 for place in range(len(ids))) if row % 2 else ()
        nothing = (0.0,) * len(ids)
        packs.append(
            Pack((3, 10 + row, 4), (TrainingSequence(ids, nothing, nothing, 1.0, learned_T=learned),))
        )
    return packs


def settings(**loss: Any) -> ResolvedOffline:
    asked = {
        "batch_size": ROWS,
        "n_epochs": 50,
        "advanced": {
            "loss": loss,
            "lora": {"rank": 4, "alpha": 8},
            "optimizer": {"learning_rate": 0.03, "schedule": "constant"},
        },
    }
    return resolve(LOGITS, LogitsHyperparameters.model_validate(asked), rows=ROWS, parameters=1000)


def taught(policy: Policy, teacher: Policy, *, budget: int = 10_000, **loss: Any) -> SoftTargetTrainer:
    """A student whose teacher is another adapter on its base model."""
    weights = [one.detach().clone() for one in teacher.trainable]
    teaching = TeacherPolicy(policy, weights)
    return SoftTargetTrainer(policy, teaching, settings(**loss), token_budget=budget)


def plain_loss(student: Policy, teacher: Policy, temperature: float) -> Tensor:
    """As transformers and the definition have it, row by row."""
    losses = []
    for pack in conversations():
        [one] = pack.sequences
        ids = torch.tensor([[*pack.prompt_ids, *one.output_ids_T]])
        with torch.no_grad():
            q = (teacher.model(input_ids=ids, use_cache=False).logits / temperature).log_softmax(-1)
        p = (student.model(input_ids=ids, use_cache=False).logits / temperature).log_softmax(-1)
        each = (q.exp() * (q - p)).sum(-1)[0, len(pack.prompt_ids) - 1 : -1]
        losses.append(each[torch.tensor(one.learned_T)] if one.learned_T else each)
    return temperature**2 * torch.cat(losses).mean()


@pytest.mark.parametrize(("budget", "chunk"), [(10_000, 256), (40, 256), (10_000, 3)])
def test_a_step_has_the_loss_and_the_gradient_of_a_plain_computation(
    make_policy: MakePolicy, budget: int, chunk: int
) -> None:
    student, plain, teacher = make_policy(), make_policy(), make_policy(moved=True)
    trainer = taught(student, teacher, budget=budget, temperature=1.5)
    trainer.soft_targets.chunk = chunk

    totals = trainer.add(conversations())
    loss = plain_loss(plain, teacher, 1.5)
    loss.backward()  # type: ignore[no-untyped-call]

    assert totals.loss / totals.counted == pytest.approx(loss.item(), rel=1e-5)
    for own, other in zip(student.trainable, plain.trainable, strict=True):
        assert own.grad is not None
        assert_same_gradient(own.grad / totals.counted, other.grad)


def test_a_teacher_on_a_server_teaches_as_in_the_trainers_memory(
    make_policy: MakePolicy, tiny_model: Path
) -> None:
    """Also where a row has several micro-batches, and only some of its tokens are learned."""
    first, second = make_policy(moved=True), make_policy(moved=True)
    resolved = settings(top_k=5)
    inside = SoftTargetTrainer(first, TeacherPolicy(first), resolved, token_budget=40)
    with serving(echoes_of(tiny_model)) as address:
        teacher = ServedTeacher("large", JudgeModel(f"{address}/v1"))
        served = SoftTargetTrainer(second, teacher, resolved, token_budget=40)
        for _ in range(2):
            expected, metrics = (one.step(conversations()) for one in (inside, served))
        measured = served.measure(conversations()[:2])

    assert metrics.loss == pytest.approx(expected.loss, rel=1e-4)
    assert metrics.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    assert metrics.token_accuracy == expected.token_accuracy
    rows = [len(pack.prompt_ids) + len(pack.sequences[0].output_ids_T) for pack in conversations()]
    assert metrics.teacher_usage == TokenUsage(sum(rows), len(rows))
    assert measured.teacher_usage == TokenUsage(sum(rows[:2]), 2)


class Undecided:
    """A policy to which all tokens are equally likely."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden.new_zeros(len(hidden), 60)


def test_a_target_that_shares_the_highest_logit_counts_as_predicted(make_policy: MakePolicy) -> None:
    """As in supervised jobs. In bfloat16 such ties are common."""
    student: Any = Undecided(make_policy())

    measured = taught(student, make_policy(moved=True)).measure(conversations())

    assert measured.token_accuracy == 1.0


def test_a_student_learns_its_teacher(make_policy: MakePolicy) -> None:
    trainer = taught(make_policy(), make_policy(moved=True))
    before = trainer.measure(conversations())

    for _ in range(150):
        trainer.step(conversations())

    after = trainer.measure(conversations())
    assert after.loss < before.loss / 10, (before.loss, after.loss)
    assert after.token_accuracy is not None


def test_the_teacher_stays_as_it_is(make_policy: MakePolicy) -> None:
    """Both are adapters on one base model."""
    student, teacher = make_policy(), make_policy(moved=True)
    trainer = taught(student, teacher)
    start = [one.detach().clone() for one in student.trainable]

    trainer.measure(conversations())
    assert all(torch.equal(own, other) for own, other in zip(student.trainable, start, strict=True))

    trainer.step(conversations())
    with present(trainer.soft_targets.teacher).teaching():
        assert all(
            torch.equal(own, other) for own, other in zip(student.trainable, teacher.trainable, strict=True)
        )


def test_a_resumed_student_ends_as_if_it_had_not_stopped(make_policy: MakePolicy, tmp_path: Path) -> None:
    teacher = make_policy(moved=True)
    whole, stopped, resumed = (taught(make_policy(seed=seed), teacher) for seed in (0, 0, 9))
    for _ in range(4):
        whole.step(conversations())
    for _ in range(2):
        stopped.step(conversations())
    stopped.save(tmp_path)

    resumed.load(tmp_path)
    for _ in range(2):
        resumed.step(conversations())

    for own, other in zip(whole.policy.trainable, resumed.policy.trainable, strict=True):
        assert torch.equal(own, other)


def test_everything_automatic_compares_every_token_at_the_temperature_1() -> None:
    resolved = settings()

    assert (resolved.top_k, resolved.soft_temperature) == (None, 1.0)
    assert (settings(top_k=20).top_k, settings(temperature=2.0).soft_temperature) == (20, 2.0)
