"""Losses and gradients of given answers, against a plain computation with transformers; resuming; epochs."""

import asyncio
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.jobs.offline_hyperparameters import (
    DpoHyperparameters,
    ResolvedOffline,
    SupervisedHyperparameters,
    epochs,
    resolve,
)
from core.results import ledger
from core.step_metrics import StepMetrics
from graders.types import TokenUsage
from tests.present import present
from tests.worker.conftest import Bench
from tests.worker.rounding import assert_same_gradient
from worker.model.batch import micro_batches
from worker.model.policy import Policy, Route
from worker.offline.experience import RowExperience
from worker.offline.rows import TokenizedRow
from worker.offline.stream import RowStream
from worker.progress import PROGRESS
from worker.recording import alerts
from worker.recording.checkpoints import JobCheckpoints
from worker.recording.delivery import report_overfitting
from worker.recording.exporters.threads import ExporterThreads
from worker.recording.recorder import JobRecorder
from worker.refusals import TrainingDiverged
from worker.run import Run, RunOutcome
from worker.training.offline import OfflineMetrics, OfflineTrainer
from worker.training.optimizer import factor
from worker.types import Pack, TrainingSequence

ROWS = 7


def sequence(ids: Sequence[int], learned: Sequence[bool] = ()) -> TrainingSequence:
    nothing = (0.0,) * len(ids)
    return TrainingSequence(tuple(ids), nothing, nothing, 1.0, learned_T=tuple(learned))


def conversations() -> list[Pack]:
    """Rows of unequal lengths; the odd ones have an answer in the middle that is only read."""
    packs = []
    for row in range(ROWS):
        ids = [7 + (row * 5 + place * 3) % 40 for place in range(3 + 2 * row)] + [2]
        learned = [place % 3 != 1 or place == len(ids) - 1 for place in range(len(ids))] if row % 2 else []
        packs.append(Pack((3, 10 + row, 4), (sequence(ids, learned),)))
    return packs


def pairs() -> list[Pack]:
    return [
        Pack((3, 10 + row, 4), (sequence([8 + row] * (1 + row) + [2]), sequence([20, 21 + row, 2])))
        for row in range(ROWS)
    ]


def labeled() -> list[Pack]:
    """Single answers with labels, as unpaired rows of the loss kto have them."""
    return [
        Pack(pack.prompt_ids, (replace(one, scores=(float(row % 2),) * len(one.output_ids_T)),))
        for row, pack in enumerate(pairs())
        for one in pack.sequences[:1]
    ]


def settings(method: str = "supervised", **asked: Any) -> ResolvedOffline:
    kind = DpoHyperparameters if method == "dpo" else SupervisedHyperparameters
    return resolve(method, kind.model_validate(asked), rows=ROWS, parameters=1000)


def trainer(policy: Policy, resolved: ResolvedOffline, *, budget: int = 10_000) -> OfflineTrainer:
    return OfflineTrainer(policy, resolved, token_budget=budget)


def logprobs(policy: Policy, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Of each token of the answer, [T], as transformers computes them for this row alone."""
    ids = torch.tensor([[*prompt, *answer]])
    logits: Tensor = policy.model(input_ids=ids, use_cache=False).logits.float()
    logp = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    of_answer: Tensor = logp.gather(-1, torch.tensor(answer)[:, None])[:, 0]
    return of_answer


def supervised_loss(policy: Policy, packs: Sequence[Pack]) -> Tensor:
    learned = []
    for pack in packs:
        [one] = pack.sequences
        logp = logprobs(policy, pack.prompt_ids, one.output_ids_T)
        learned.append(logp[torch.tensor(one.learned_T)] if one.learned_T else logp)
    return -torch.cat(learned).mean()


def dpo_loss(policy: Policy, packs: Sequence[Pack], beta: float) -> Tensor:
    losses = []
    for pack in packs:
        h = []
        for one in pack.sequences:
            with torch.no_grad(), policy.as_base():
                reference = logprobs(policy, pack.prompt_ids, one.output_ids_T).sum()
            h.append(logprobs(policy, pack.prompt_ids, one.output_ids_T).sum() - reference)
        losses.append(-torch.nn.functional.logsigmoid(beta * (h[0] - h[1])))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("budget", [10_000, 30])
def test_the_rows_of_an_update_and_of_a_validation_are_counted(
    make_policy: Callable[..., Policy], budget: int
) -> None:
    learner = trainer(make_policy(), settings(), budget=budget)

    for act, name in ((learner.step, "training"), (learner.measure, "validation")):
        with PROGRESS.phase(name, ROWS):
            assert (PROGRESS.now()["done"], PROGRESS.now()["of"]) == (0, ROWS)
            act(conversations())
            assert (PROGRESS.now()["phase"], PROGRESS.now()["done"]) == (name, ROWS)


def kto_loss(policy: Policy, reference: Sequence[Tensor], packs: Sequence[Pack], beta: float) -> Tensor:
    """As the paper has it, row by row: z0 from the answers of the next row to each prompt."""

    def ratio(prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        with torch.no_grad(), policy.with_weights(reference):
            of_reference = logprobs(policy, prompt, answer).sum()
        return logprobs(policy, prompt, answer).sum() - of_reference

    with torch.no_grad():
        mismatched = [
            ratio(pack.prompt_ids, other.output_ids_T)
            for number, pack in enumerate(packs)
            for other in packs[(number + 1) % len(packs)].sequences
        ]
    z0 = max(0.0, float(torch.stack(mismatched).mean()))
    losses = []
    for pack in packs:
        for number, one in enumerate(pack.sequences):
            h = ratio(pack.prompt_ids, one.output_ids_T)
            is_desirable = one.scores[0] == 1.0 if one.scores else number == 0
            value = torch.sigmoid(beta * (h - z0)) if is_desirable else torch.sigmoid(beta * (z0 - h))
            losses.append((1.0 if is_desirable else 1.5) * (1 - value))
    return torch.stack(losses).mean()


def gradient(policy: Policy) -> Tensor:
    found = [parameter.grad for parameter in policy.trainable]
    for parameter in policy.trainable:
        parameter.grad = None
    return torch.cat([one.flatten() for one in found if one is not None])


@pytest.mark.parametrize("forward", ["packed", "rows"])
@pytest.mark.parametrize("budget", [10_000, 24], ids=["one micro-batch", "several"])
@pytest.mark.parametrize("method", ["supervised", "dpo"])
def test_loss_and_gradient_are_those_of_single_rows(
    make_policy: Callable[..., Policy], method: str, budget: int, forward: Any
) -> None:
    policy = make_policy(moved=True)
    packs = pairs() if method == "dpo" else conversations()
    policy.use(Route("packed"))
    plain = copy.copy(policy)
    resolved = settings(method, **({"beta": 0.5} if method == "dpo" else {}))
    policy.use(Route("rows"))
    expected = dpo_loss(plain, packs, 0.5) if method == "dpo" else supervised_loss(plain, packs)
    expected.backward()  # type: ignore[no-untyped-call]
    wanted = gradient(policy)

    policy.use(Route(forward))
    one = trainer(policy, resolved, budget=budget)
    totals = one.add(packs)

    counted = totals.pairs or totals.tokens
    assert totals.loss / counted == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradient(gradient(policy) / counted, wanted)


@pytest.mark.parametrize("forward", ["packed", "rows"])
@pytest.mark.parametrize("budget", [10_000, 24], ids=["one micro-batch", "several"])
@pytest.mark.parametrize("rows", [pairs, labeled])
def test_kto_compares_with_the_answers_of_the_whole_step(
    make_policy: Callable[..., Policy], rows: Callable[[], list[Pack]], budget: int, forward: Any
) -> None:
    policy = make_policy(moved=True)
    drawn = torch.Generator().manual_seed(4)
    reference = [one.detach() + 0.5 * torch.randn(one.shape, generator=drawn) for one in policy.trainable]
    packs = rows()
    policy.use(Route("rows"))
    expected = kto_loss(policy, reference, packs, 0.5)
    expected.backward()  # type: ignore[no-untyped-call]
    wanted = gradient(policy)
    weighted = {"loss": {"type": "kto", "undesirable_weight": 1.5}}

    policy.use(Route(forward))
    one = trainer(policy, settings("dpo", beta=0.5, advanced=weighted), budget=budget)
    one.loss.reference = reference
    totals = one.add(packs)

    counted = sum(len(pack.sequences) for pack in packs)
    assert totals.counted == counted
    assert totals.loss / counted == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradient(gradient(policy) / counted, wanted)


def test_rows_with_labels_have_rewards_and_no_accuracy(make_policy: Callable[..., Policy]) -> None:
    policy = make_policy(moved=True)
    one = trainer(policy, settings("dpo", advanced={"loss": {"type": "kto"}}))

    found, of_pairs = one.measure(labeled()), one.measure(pairs())

    assert found.chosen_reward is not None and found.rejected_reward is not None
    assert found.reward_accuracy is None and found.token_accuracy is None
    assert of_pairs.reward_accuracy is not None and of_pairs.reward_margin is not None


def test_accuracy_is_a_share_of_the_learned_tokens(make_policy: Callable[..., Policy]) -> None:
    policy = make_policy(moved=True)
    packs = conversations()
    right = []
    for pack in packs:
        [one] = pack.sequences
        ids = torch.tensor([[*pack.prompt_ids, *one.output_ids_T]])
        top = policy.model(input_ids=ids, use_cache=False).logits[0, len(pack.prompt_ids) - 1 : -1].argmax(-1)
        hit = top == torch.tensor(one.output_ids_T)
        right.append(hit[torch.tensor(one.learned_T)] if one.learned_T else hit)

    measured = trainer(policy, settings()).measure(packs)

    assert measured.tokens == len(torch.cat(right)) > len(packs)
    assert measured.token_accuracy == pytest.approx(torch.cat(right).float().mean().item())


def test_a_skipped_step_counts_for_the_schedule(make_policy: Callable[..., Policy]) -> None:
    policy = make_policy()
    one = trainer(
        policy, settings().model_copy(update={"schedule": "linear", "total_steps": 4, "warmup_steps": 0})
    )
    first = policy.trainable[0].detach().clone()
    with torch.no_grad():
        policy.trainable[0].fill_(float("inf"))

    assert one.step(conversations()).skipped
    with torch.no_grad():
        policy.trainable[0].copy_(first)
    assert not one.step(conversations()).skipped

    assert one.optimizer.adamw.param_groups[0]["lr"] == pytest.approx(settings().learning_rate * 0.75)


def test_the_reference_of_dpo_is_the_base_bit_for_bit(make_policy: Callable[..., Policy]) -> None:
    policy = make_policy()

    first = trainer(policy, settings("dpo")).step(pairs())

    assert first.loss == pytest.approx(0.6931471806, abs=1e-6)
    assert (first.reward_accuracy, first.reward_margin) == (0.0, 0.0)


def test_a_job_that_continues_an_adapter_has_it_for_its_reference(make_policy: Callable[..., Policy]) -> None:
    policy = make_policy(moved=True)
    one = trainer(policy, settings("dpo"))

    against_base = one.measure(pairs())
    one.start_from_policy()
    against_start = one.measure(pairs())

    assert against_base.reward_margin != 0.0
    assert against_start.reward_margin == 0.0


def test_a_measurement_changes_nothing(make_policy: Callable[..., Policy]) -> None:
    policy = make_policy(moved=True)
    one = trainer(policy, settings())
    before = policy.adapter()

    assert one.measure(conversations()) == one.measure(conversations())
    assert all(torch.equal(value, before[name]) for name, value in policy.adapter().items())


def test_pairs_are_never_divided_between_micro_batches() -> None:
    packs = pairs()

    in_rows = list(micro_batches(packs, 8, rows=True, couples_answers=True))

    assert all(len(batch) % 2 == 0 for batch in in_rows)
    assert sum(len(batch) for batch in in_rows) == 2 * len(packs)
    for batch in in_rows:
        for chosen, rejected in zip(batch[::2], batch[1::2], strict=True):
            [original] = [pack for pack in packs if pack.prompt_ids == chosen.prompt_ids]
            assert (*chosen.sequences, *rejected.sequences) == original.sequences


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.75, 0.5, 0.25]),
        ("cosine", [1.0, 0.868198, 0.55, 0.231802]),
    ],
)
def test_schedules_go_down_from_the_first_step(schedule: Any, expected: list[float]) -> None:
    assert [factor(step, 0, schedule, 4) for step in range(4)] == pytest.approx(expected, abs=1e-6)


def test_warm_up_comes_before_the_schedule() -> None:
    assert [factor(step, 2, "linear", 4) for step in range(4)] == pytest.approx([0.5, 1.0, 1.0, 0.5])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (10, 10),
        (12, 8),
        (33, 3),
        (34, 3),
        (100, 3),
        (5_000, 3),
        (8_333, 3),
        (8_334, 2),
        (10_000, 2),
        (20_000, 1),
    ],
)
def test_automatic_epochs_are_openais(rows: int, expected: int) -> None:
    assert epochs(rows) == expected


# Whole runs.


def run(bench: Bench, policy: Policy, *, method: str = "supervised", stop_at: int = 0, **asked: Any) -> Any:
    if method == "kto":
        method, asked = "dpo", asked | {"advanced": {"loss": {"type": "kto"}}}
    resolved = settings(method, **({"batch_size": 3, "n_epochs": 4} | asked))
    packs = pairs() if method == "dpo" else conversations()
    rows = [TokenizedRow(line, (pack,)) for line, pack in enumerate(packs, start=1)]
    attempt = bench.attempt()
    one = trainer(policy, resolved)
    stream = RowStream(rows, batch_size=resolved.batch_size, steps_per_epoch=resolved.steps_per_epoch, seed=3)
    return Run(
        RowExperience(resolved, seed=3, train_rows=stream, valid_rows=rows[:3], trainer=one),
        recorder=JobRecorder(attempt),
        checkpoints=JobCheckpoints(attempt, bench.tmp_path),
        exporters=ExporterThreads(),
        stop_requested=lambda: one.steps_taken == stop_at,
    )


def numbers(bench: Bench) -> list[dict[str, Any]]:
    timed = ("timing", "training_tokens_per_second")
    return [{name: value for name, value in step.items() if name not in timed} for step in bench.steps()]


def test_every_row_is_learned_once_in_each_epoch() -> None:
    rows = [TokenizedRow(line, (pack,)) for line, pack in enumerate(conversations(), start=1)]
    stream = RowStream(rows, batch_size=3, steps_per_epoch=3, seed=1)

    first, second = (
        [pack for step in steps for pack in stream.batch(step)] for steps in ((1, 2, 3), (4, 5, 6))
    )

    assert sorted(map(hash, first)) == sorted(map(hash, second)) == sorted(map(hash, conversations()))
    assert first != second
    assert [len(stream.batch(step)) for step in (1, 2, 3)] == [3, 3, 1]


def test_the_last_three_epochs_are_kept_and_the_last_one_is_the_model(
    bench: Bench, make_policy: Callable[..., Policy]
) -> None:
    outcome = asyncio.run(run(bench, make_policy()).train())

    job = bench.job()
    assert outcome is RunOutcome.DONE
    assert [one.step for one in bench.checkpoints()] == [6, 9, 12]
    assert job.status == "succeeded" and job.fine_tuned_model is not None
    told = [message for message in bench.events() if message.startswith("Checkpoint created")]
    assert [message.split(" with")[0].split()[-1] for message in told] == ["3", "6", "9"]
    losses = [step["full_valid_loss"] for step in numbers(bench) if "full_valid_loss" in step]
    assert len(losses) == 5 and losses[-1] < losses[0]


@pytest.mark.parametrize("method", ["supervised", "dpo", "kto"])
@pytest.mark.parametrize("stop_at", [1, 3, 8])
def test_a_run_that_is_stopped_and_resumed_ends_as_if_it_had_not_been(
    bench: Bench, make_policy: Callable[..., Policy], tmp_path: Path, method: str, stop_at: int
) -> None:
    policy = make_policy()
    stopped = asyncio.run(run(bench, policy, method=method, stop_at=stop_at).train())
    assert stopped is RunOutcome.INTERRUPTED
    bench.again()
    resumed = make_policy(seed=9)  # whatever its adapter is: the checkpoint has the job's

    asyncio.run(run(bench, resumed, method=method).train())

    whole = make_policy()
    stream = run(bench, whole, method=method).experience
    metrics: list[OfflineMetrics] = []
    for step in range(1, stream.settings.total_steps + 1):
        metrics.append(stream.trainer.step(stream.train_rows.batch(step)))
    recorded = [step["train_loss"] for step in numbers(bench) if "train_loss" in step]
    assert recorded == [one.loss for one in metrics]
    ended = resumed.adapter()
    assert all(torch.equal(value, ended[name]) for name, value in whole.adapter().items())


def losses(losses_by_step: dict[int, float]) -> list[StepMetrics]:
    """The recorded steps of a run with these validation losses."""
    return [StepMetrics(step=step, full_valid_loss=loss) for step, loss in losses_by_step.items()]


def test_a_run_warns_of_a_model_that_overfits(bench: Bench) -> None:
    steps = [*losses({0: 2.0, 3: 1.0}), StepMetrics(step=4), *losses({12: 1.5})]

    report_overfitting(steps, JobRecorder(bench.attempt()), settings(batch_size=3, n_epochs=4))

    assert bench.events("warn") == [
        "The model overfits: its validation loss is 1.500, and was 1.000 at step 3. The checkpoint of step 3 is better "
        "if it is still kept; else train for 1 epoch."
    ]


def test_a_run_warns_of_a_model_that_is_worse_than_its_start(bench: Bench) -> None:
    steps = losses({0: 1.0, 3: 1.2, 12: 1.5})

    report_overfitting(steps, JobRecorder(bench.attempt()), settings(batch_size=3, n_epochs=4))

    [warning] = bench.events("warn")
    assert warning.startswith("The validation loss is 1.500, and that of the base model was 1.000")


def test_a_warm_up_that_is_longer_than_the_job_is_warned_of_once(bench: Bench) -> None:
    long = settings(advanced={"optimizer": {"warmup_steps": 1000, "learning_rate": 0.001}})
    recorder = JobRecorder(bench.attempt())

    recorder.resolved(long)
    recorder.resolved(long)

    assert bench.events("warn") == [
        f"The learning rate never reaches 0.001: the job has {long.total_steps} steps, and warmup_steps is 1000."
    ]


class RuinedAtTheEnd(OfflineTrainer):
    """Stands in for a learning rate far too high in the last step."""

    def step(self, packs: Sequence[Pack]) -> OfflineMetrics:
        metrics = super().step(packs)
        if self.steps_taken == self.loss.settings.total_steps:
            with torch.no_grad():
                self.policy.trainable[0].fill_(math.nan)
        return metrics


class NeverFinite(OfflineTrainer):
    """Stands in for gradients that always overflow."""

    def step(self, packs: Sequence[Pack]) -> OfflineMetrics:
        return replace(super().step(packs), skipped=True, grad_norm=None)


class Overflowing(OfflineTrainer):
    """Stands in for a batch whose loss is not a number, so that its update is skipped."""

    def step(self, packs: Sequence[Pack]) -> OfflineMetrics:
        metrics = super().step(packs)
        broken = replace(metrics, loss=math.nan, skipped=True, grad_norm=None, learning_rate=None)
        return broken if self.steps_taken == 2 else metrics


def test_a_step_whose_loss_is_no_number_is_recorded_without_one(
    bench: Bench, make_policy: Callable[..., Policy]
) -> None:
    one = run(bench, policy := make_policy())
    one.experience.trainer = Overflowing(policy, one.experience.settings, token_budget=4096)
    one.stop_requested = lambda: False

    asyncio.run(one.train())

    losses = {step["step"]: step["train_loss"] for step in bench.steps() if "train_loss" in step}
    assert [step for step, loss in losses.items() if loss is None] == [2]


def test_the_ledger_has_the_rows_that_were_learned_and_those_of_a_skipped_update(
    bench: Bench, make_policy: Callable[..., Policy]
) -> None:
    one = run(bench, policy := make_policy())
    one.experience.trainer = Overflowing(policy, one.experience.settings, token_budget=4096)
    one.stop_requested = lambda: False

    asyncio.run(one.train())

    with bench.database.read() as session:
        found = ledger.of_job(session, bench.job())
    skipped = [step.step for step in found.steps if step.tokens.get("not_updated")]
    used = {bucket for bucket, time in found.gpu_time.items() if time}
    assert skipped == [2]
    assert used == {"learned", "not_updated", "validation"}
    assert sum(found.tokens.values()) == present(bench.job().usage)["trained_tokens"]
    assert sum(found.gpu_time.values()) / 1e6 == pytest.approx(bench.job().gpu_seconds, abs=1e-4)


@pytest.mark.parametrize("validated", [True, False])
def test_a_run_whose_model_has_no_loss_fails_before_it_is_delivered(
    bench: Bench, make_policy: Callable[..., Policy], validated: bool
) -> None:
    one = run(bench, policy := make_policy())
    one.experience.trainer = RuinedAtTheEnd(policy, one.experience.settings, token_budget=4096)
    one.stop_requested = lambda: False
    if not validated:
        one.experience.valid_rows = ()

    with pytest.raises(TrainingDiverged, match="The loss of the model is nan"):
        asyncio.run(one.train())

    assert bench.job().fine_tuned_model is None


def test_a_run_whose_gradient_is_never_finite_fails(bench: Bench, make_policy: Callable[..., Policy]) -> None:
    one = run(bench, policy := make_policy())
    one.experience.trainer = NeverFinite(policy, one.experience.settings, token_budget=4096)
    one.stop_requested = lambda: False

    with pytest.raises(TrainingDiverged, match="In 3 steps in a row"):
        asyncio.run(one.train())

    assert bench.events("warn").count(alerts.SKIPPED) == 1


class ReadByTeacher(OfflineTrainer):
    """Stands in for a teacher on a server that reads 10 tokens a step, and 7 of each measurement."""

    def step(self, packs: Sequence[Pack]) -> OfflineMetrics:
        return replace(super().step(packs), teacher_usage=TokenUsage(10, 1))

    def measure(self, packs: Sequence[Pack]) -> OfflineMetrics:
        return replace(super().measure(packs), teacher_usage=TokenUsage(7, 2))


def test_the_tokens_of_a_teacher_on_a_server_are_counted_under_its_name(
    bench: Bench, make_policy: Callable[..., Policy]
) -> None:
    one = run(bench, policy := make_policy(), n_epochs=1)
    trainer = ReadByTeacher(policy, one.experience.settings, token_budget=4096)
    one.experience = replace(one.experience, trainer=trainer, teacher="large")
    one.stop_requested = lambda: False

    asyncio.run(one.train())

    step = bench.steps()[-1]["model_graders_token_usage"]["large"]
    assert (step["train_prompt_tokens"], step["train_completion_tokens"]) == (10, 1)
    assert (step["eval_prompt_tokens"], step["eval_completion_tokens"]) == (14, 4), "some rows, then all"
    steps = one.experience.settings.total_steps
    measured = 1 + steps + 1  # the base model, some rows at each step, all rows at the end of the epoch
    assert present(bench.job().usage)["model_grader_tokens"]["large"] == {
        "prompt_tokens": 10 * steps + 7 * measured,
        "cached_tokens": 0,
        "completion_tokens": steps + 2 * measured,
    }


def flipped(pack: Pack, place: int) -> Pack:
    """The pack with one token learned that was only read, or the other way round."""
    [one] = pack.sequences
    learned = list(one.learned_T or [True] * len(one.output_ids_T))
    learned[place] = not learned[place]
    return replace(pack, sequences=(replace(one, learned_T=tuple(learned)),))


def test_every_single_error_of_the_mask_is_seen_in_the_loss(make_policy: Callable[..., Policy]) -> None:
    """The control of the comparison with single rows: it is as good as its tolerance only if mutations exceed that."""
    policy = make_policy(moved=True)
    rows = conversations()
    one = trainer(policy, settings(), budget=30)
    with torch.no_grad():
        right = supervised_loss(policy, rows).item()

    assert one.measure(rows).loss == pytest.approx(right, rel=1e-5)
    for number, pack in enumerate(rows[:4]):
        for place in range(len(pack.sequences[0].output_ids_T)):
            mutated = [*rows[:number], flipped(pack, place), *rows[number + 1 :]]
            assert one.measure(mutated).loss != pytest.approx(right, rel=1e-4), (number, place)
