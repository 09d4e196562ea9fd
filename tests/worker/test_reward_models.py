"""Reward models: their losses, their head in the formats of others, and their scores in the loop of a job."""

import asyncio
import copy
import json
import math
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from core.jobs.offline_hyperparameters import ResolvedOffline, RewardHyperparameters, resolve
from core.registry import BaseModelEntry
from core.results.export import loading_code
from core.results.lineage import Parent
from core.storage.offline_rows import RewardKind, reward_problems, step_ends
from graders.builtin.reward_model import RewardModel
from graders.types import Sample
from tests.tiny import make_byte_model, make_tiny_model
from tests.worker.conftest import Bench
from tests.worker.rounding import assert_same_gradient
from worker.clock import Clock
from worker.model import reward_head
from worker.model.batch import tensors_of
from worker.model.policy import Policy, Route, load_base
from worker.model.reward_head import RewardHead, Scale
from worker.offline.experience import RowExperience
from worker.offline.rows import ChatTemplate, TokenizedRow, reward_packs, scored_at_the_end
from worker.offline.stream import RowStream
from worker.offline.templates import template_of
from worker.recording.checkpoints import JobCheckpoints
from worker.recording.exporters.threads import ExporterThreads
from worker.recording.recorder import JobRecorder
from worker.refusals import UserMistake
from worker.rollout.experience import Rewards
from worker.rollout.reward_models import LoadedRewardModel, PolicyScores, Scores, read_reward_model
from worker.run import Run, RunOutcome
from worker.sampling import Answer
from worker.training.offline import RewardTrainer
from worker.training.reward import bradley_terry, cross_entropy, squared_error
from worker.types import Pack, Prompt, Rollout, TrainingSequence

MakePolicy = Callable[..., Policy]
ROWS = 7


def one(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("rewards", "margin", "centering", "loss"),
    [
        ((1, 0), 0, 0, 0.3132616875),
        ((1, 0), 0.5, 0, 0.4740769842),
        ((1, 0), 1, 0, math.log(2)),
        ((1, 0), 0, 0.01, 0.3232616875),
        ((2, 1), 0, 0.01, 0.4032616875),
    ],
)
def test_the_loss_of_a_pair_is_that_of_the_bradley_terry_model(
    rewards: tuple[float, float], margin: float, centering: float, loss: float
) -> None:
    chosen, rejected = map(one, rewards)

    found = bradley_terry(chosen, rejected, one(margin), centering=centering)

    assert found.item() == pytest.approx(loss, abs=1e-9)


def test_a_scored_answer_is_learned_by_its_squared_error() -> None:
    predicted, scores = torch.tensor([0.2, 0.9]), torch.tensor([0.0, 1.0])

    assert squared_error(predicted, scores).mean().item() == pytest.approx(0.025)


def test_a_step_is_learned_by_the_cross_entropy_of_its_label() -> None:
    rewards = torch.tensor([0.8, 0.5, 0.25], dtype=torch.float64).logit()

    found = cross_entropy(rewards, torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)).mean()

    assert found.item() == pytest.approx(0.4013242681, abs=1e-9)
    halves = torch.tensor([0.5, 0.75], dtype=torch.float64).logit()
    soft = cross_entropy(halves, torch.tensor([0.75, 0.75], dtype=torch.float64))
    assert soft.tolist() == pytest.approx([0.6931471806, 0.5623351446], abs=1e-9)


@pytest.mark.parametrize(
    ("answer", "ends"),
    [
        ("one line", [8]),
        ("a\nb", [2, 3]),
        ("a\n\nb\n", [3, 5]),
        ("\n\na\nb", [4, 5]),
        ("", [0]),
        ("\n \n", [3]),
    ],
)
def test_a_step_is_a_line_with_text(answer: str, ends: list[int]) -> None:
    assert step_ends(answer) == ends


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"step_labels": [1, 0]}, None),
        ({"step_labels": [1]}, "has 1 labels, and the answer has 2 steps: lines with text in them"),
        ({"step_labels": [1, 2]}, "must be a list of numbers from 0 to 1"),
        ({"step_labels": "yes"}, "must be a list of numbers from 0 to 1"),
        ({"score": 0.5}, None),
        ({"score": "good"}, "must be a finite number"),
        ({}, "is missing"),
    ],
)
def test_rows_of_answers_are_checked(row: dict[str, Any], problem: str | None) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a\nb"}]

    found = [told for _, told in reward_problems({"messages": messages} | row)]

    assert found == ([] if problem is None else [problem])


@pytest.mark.parametrize(("margin", "told"), [(0.5, []), (-1, ["margin"]), ("x", ["margin"])])
def test_a_margin_is_not_negative(margin: Any, told: list[str]) -> None:
    assert [path for path, _ in reward_problems(pair(0) | {"margin": margin})] == told


def test_a_scale_gives_its_rewards_the_mean_0_and_the_deviation_1() -> None:
    scale = Scale.of(torch.tensor([0.5, 1.5, 2.5, 3.5]))

    scores = [scale.score(reward) for reward in (0.5, 1.5, 2.5, 3.5)]
    assert scores == pytest.approx([-1.3416408, -0.4472136, 0.4472136, 1.3416408])
    assert Scale.of(torch.zeros(4)).score(0.0) == 0.0
    assert Scale.undoing(3.0, 2.0).score((5.0 - 3.0) / 2.0) == pytest.approx(5.0)


def sequence(ids: Sequence[int]) -> TrainingSequence:
    nothing = (0.0,) * len(ids)
    return TrainingSequence(tuple(ids), nothing, nothing, 1.0)


def pairs() -> list[Pack]:
    return [
        scored_at_the_end(
            Pack((3, 10 + row, 4), (sequence([8 + row] * (1 + row) + [2]), sequence([20, 21 + row, 2]))),
            0.1 * row,
        )
        for row in range(ROWS)
    ]


def scored() -> list[Pack]:
    return [
        scored_at_the_end(Pack((3, 10 + row, 4), (sequence([8 + row] * (1 + row) + [2]),)), row - 3.0)
        for row in range(ROWS)
    ]


def stepwise() -> list[Pack]:
    """Answers whose rewards are read at every second token and at the end."""
    packs = []
    for row in range(ROWS):
        ids = (*[8 + row, 20] * (1 + row % 3), 2, 2)
        learned = tuple((place % 2 == 0 and place > 0) or place == len(ids) - 1 for place in range(len(ids)))
        labels = tuple(float((row + number) % 2) for number in range(sum(learned)))
        nothing = (0.0,) * len(ids)
        one = TrainingSequence(ids, nothing, nothing, 1.0, learned_T=learned, scores=labels)
        packs.append(Pack((3, 10 + row, 4), (one,)))
    return packs


PACKS = {"pairs": pairs, "scores": scored, "steps": stepwise}


def settings(kind: RewardKind = "pairs", **asked: Any) -> ResolvedOffline:
    chosen = RewardHyperparameters.model_validate({"batch_size": 3, "n_epochs": 4} | asked)
    return resolve("reward_model", chosen, rows=ROWS, parameters=1000, reward_kind=kind)


def head_of(policy: Policy, *, moved: bool = False) -> RewardHead:
    head = RewardHead(policy.hidden_size, policy.device)
    if moved:
        drawn = torch.Generator().manual_seed(2)
        with torch.no_grad():
            head.weight.copy_(torch.randn(policy.hidden_size, generator=drawn))
    return head


def trainer(
    policy: Policy,
    kind: RewardKind = "pairs",
    *,
    head: RewardHead | None = None,
    budget: int = 10_000,
    **asked: Any,
) -> RewardTrainer:
    return RewardTrainer(
        policy,
        head or head_of(policy),
        settings(kind, **asked),
        token_budget=budget,
        scale={"pairs": None, "scores": Scale.undoing(0.0, 2.0), "steps": Scale.of_steps()}[kind],
        measured=pairs(),
    )


def plain_reward(policy: Policy, head: RewardHead, ids: Sequence[int]) -> Tensor:
    """As transformers computes the last hidden state of this row alone."""
    causal = policy.model.get_base_model()
    hidden = causal.model(input_ids=torch.tensor([list(ids)]), use_cache=False).last_hidden_state
    reward: Tensor = hidden[0, -1].float() @ head.weight
    return reward


def of_pack(policy: Policy, head: RewardHead, pack: Pack) -> list[Tensor]:
    return [
        plain_reward(policy, head, [*pack.prompt_ids, *each.output_ids_T[:place]])
        for each in pack.sequences
        for place, learned in enumerate(each.learned_T)
        if learned
    ]


@pytest.mark.parametrize("forward", ["packed", "rows"])
@pytest.mark.parametrize("budget", [10_000, 24], ids=["one micro-batch", "several"])
@pytest.mark.parametrize("kind", ["pairs", "scores", "steps"])
def test_loss_and_gradient_are_those_of_single_rows(
    make_policy: MakePolicy, kind: RewardKind, budget: int, forward: Any
) -> None:
    policy = make_policy(moved=True)
    head = head_of(policy, moved=True)
    packs = PACKS[kind]()
    policy.use(Route("rows"))
    rewards = [of_pack(policy, head, pack) for pack in packs]
    if kind == "pairs":
        losses = [
            -torch.nn.functional.logsigmoid(first - second - pack.sequences[0].scores[0])
            + 0.01 * (first + second) ** 2
            for (first, second), pack in zip(rewards, packs, strict=True)
        ]
    elif kind == "scores":
        losses = [
            (reward - pack.sequences[0].scores[0]) ** 2 for [reward], pack in zip(rewards, packs, strict=True)
        ]
    else:
        losses = [
            -torch.nn.functional.logsigmoid(reward if label else -reward)
            for rewards_J, pack in zip(rewards, packs, strict=True)
            for reward, label in zip(rewards_J, pack.sequences[0].scores, strict=True)
        ]
    wanted = torch.stack(losses).mean()
    weights = [*policy.trainable, head.weight]
    gradients = torch.autograd.grad(wanted, weights)

    policy.use(Route(forward))
    totals = trainer(policy, kind, head=head, budget=budget).add(packs)

    counted = totals.pairs or totals.tokens
    assert totals.loss / counted == pytest.approx(wanted.item(), rel=1e-5)
    assert counted == len(losses)
    for weight, expected in zip(weights, gradients, strict=True):
        assert weight.grad is not None
        assert_same_gradient(weight.grad / counted, expected)


def test_the_first_loss_of_pairs_without_a_margin_is_ln_2(make_policy: MakePolicy) -> None:
    packs = [scored_at_the_end(pack) for pack in ([Pack((3,), (sequence([8, 2]), sequence([9, 2])))])]

    assert trainer(make_policy()).measure(packs).loss == pytest.approx(math.log(2), abs=1e-7)


def test_a_saved_model_is_a_sequence_classifier_of_transformers(
    make_policy: MakePolicy, tmp_path: Path
) -> None:
    policy = make_policy(moved=True)
    head = head_of(policy, moved=True)
    make_tiny_model(tmp_path / "base")
    ending = pairs()[0].sequences[0].output_ids_T[-1]
    pads_with_it = json.loads((tmp_path / "base/config.json").read_text()) | {"pad_token_id": ending}
    (tmp_path / "base/config.json").write_text(json.dumps(pads_with_it))

    trainer(policy, head=head).save(tmp_path / "adapter")

    code = loading_code(str(tmp_path / "base"), "reward_model")
    loaded: dict[str, Any] = {}
    exec(code.replace("THIS FOLDER", str(tmp_path / "adapter")), loaded)
    theirs = loaded["model"]
    rewards = trainer(policy, head=head).rewards(pairs()[:1])
    with torch.no_grad():
        found = [
            theirs(input_ids=torch.tensor([[*pack.prompt_ids, *each.output_ids_T[:-1]]])).logits[0, 0].item()
            for pack in pairs()[:1]
            for each in pack.sequences
        ]
    assert rewards.tolist() == pytest.approx(found, rel=1e-5, abs=1e-5)


def run(bench: Bench, policy: Policy, kind: RewardKind, *, stop_at: int = 0) -> Any:
    packs = PACKS[kind]()
    rows = [TokenizedRow(line, (pack,)) for line, pack in enumerate(packs, start=1)]
    attempt = bench.attempt()
    own = trainer(policy, kind)
    stream = RowStream(rows, batch_size=3, steps_per_epoch=3, seed=3)
    return Run(
        RowExperience(own.loss.settings, seed=3, train_rows=stream, valid_rows=rows[:3], trainer=own),
        recorder=JobRecorder(attempt),
        checkpoints=JobCheckpoints(attempt, bench.tmp_path),
        exporters=ExporterThreads(),
        stop_requested=lambda: own.steps_taken == stop_at,
    )


@pytest.mark.parametrize("kind", ["pairs", "scores", "steps"])
@pytest.mark.parametrize("stop_at", [1, 3, 8])
def test_a_run_that_is_stopped_and_resumed_ends_as_if_it_had_not_been(
    bench: Bench, make_policy: MakePolicy, kind: RewardKind, stop_at: int
) -> None:
    assert asyncio.run(run(bench, make_policy(), kind, stop_at=stop_at).train()) is RunOutcome.INTERRUPTED
    bench.again()
    resumed = run(bench, make_policy(seed=9), kind)

    asyncio.run(resumed.train())

    whole = run(bench, make_policy(), kind).experience
    for step in range(1, 13):
        whole.trainer.step(whole.train_rows.batch(step))
    ended, expected = resumed.experience.trainer, whole.trainer
    assert isinstance(ended, RewardTrainer) and isinstance(expected, RewardTrainer)
    assert torch.equal(ended.head.weight, expected.head.weight) and expected.head.weight.any()
    theirs = ended.policy.adapter()
    assert all(torch.equal(value, theirs[name]) for name, value in expected.policy.adapter().items())


def test_a_run_of_pairs_reports_accuracies_and_rewards(bench: Bench, make_policy: MakePolicy) -> None:
    asyncio.run(run(bench, make_policy(), "pairs").train())

    last = bench.steps()[-1]
    assert bench.job().status == "succeeded"
    assert 0.0 <= last["full_valid_mean_reward_accuracy"] <= 1.0
    margin = last["full_valid_mean_chosen_reward"] - last["full_valid_mean_rejected_reward"]
    assert last["full_valid_mean_reward_margin"] == pytest.approx(margin)
    assert last["full_valid_loss"] < bench.steps()[0]["full_valid_loss"]


# Words are tokens of the tiny model; the planted preference is for answers with a season in place of a number.
SAID = ["red", "green", "blue", "cat", "dog", "bird", "bread", "milk", "salt", "sugar", "water", "fire"]
GOOD, BAD = ["spring", "summer", "autumn", "winter"], ["one", "two", "three", "four", "five"]


def template(policy: Policy) -> ChatTemplate:
    return template_of(policy.source, policy.tokenizer)


def conversation(number: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"say {SAID[number % 12]} {SAID[number // 12 % 12]}"}]}


def pair(number: int) -> dict[str, Any]:
    good, bad, tail = GOOD[number % 4], BAD[3 * number % 5], SAID[7 * number % 12]
    return {
        "input": conversation(number),
        "preferred_output": [{"role": "assistant", "content": f"{good} {tail}"}],
        "non_preferred_output": [{"role": "assistant", "content": f"{bad} {tail}"}],
    }


@pytest.fixture(scope="module")
def learned(make_policy: MakePolicy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved reward model that learned the planted preference from 200 pairs."""
    policy = make_policy()
    rows = [reward_packs(pair(number), template(policy))[0] for number in range(200)]
    asked = RewardHyperparameters.model_validate(
        {"batch_size": 10, "n_epochs": 4, "advanced": {"optimizer": {"learning_rate": 0.01}}}
    )
    resolved = resolve("reward_model", asked, rows=200, parameters=1000)
    own = RewardTrainer(policy, head_of(policy), resolved, token_budget=4096, scale=None, measured=rows[:100])
    stream = RowStream(
        [TokenizedRow(line, (pack,)) for line, pack in enumerate(rows, start=1)],
        batch_size=10,
        steps_per_epoch=20,
        seed=1,
    )
    for step in range(1, resolved.total_steps + 1):
        own.step(stream.batch(step))
    held_out = [reward_packs(pair(number), template(policy))[0] for number in range(200, 300)]
    accuracy = own.measure(held_out).reward_accuracy
    assert accuracy is not None and accuracy > 0.95
    folder = tmp_path_factory.mktemp("learned")
    own.save(folder / "adapter")
    return folder


class Folder:
    """Adapters that lie in a folder."""

    is_empty = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def download(self, prefix: str, folder: Path) -> None:
        shutil.copytree(self.folder / prefix, folder, dirs_exist_ok=True)


def read(
    folder: Path,
    policy: Policy,
    *,
    kind: RewardKind = "pairs",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> LoadedRewardModel:
    shape = {"lora_rank": 4, "lora_alpha": 8, "lora_targets": "all-linear"}
    rendering: dict[str, Any] = {"chat_template": None, "chat_template_kwargs": {}}
    parent = Parent("ft:tiny:rm", "ftjob-1", 9, "ckpt-1", "adapter", shape | rendering, kind)
    return read_reward_model(parent, policy, tokenizer or policy.tokenizer, template(policy), Folder(folder))


def prompts(count: int) -> list[Prompt]:
    return [Prompt(number, (5, 6), conversation(number)) for number in range(count)]


def scores(
    policy: Policy, model: LoadedRewardModel, texts: Sequence[str], *, budget: int = 4096
) -> list[Any]:
    found = asyncio.run(PolicyScores(policy, [model], budget).score([(prompts(1)[0], texts)]))
    return [each["ft:tiny:rm"] for each in found[0]]


def test_a_reward_model_scores_answers_and_leaves_the_policy_as_it_was(
    learned: Path, make_policy: MakePolicy
) -> None:
    policy = make_policy(moved=True)
    before = [parameter.detach().clone() for parameter in policy.trainable]

    good, bad = scores(policy, read(learned, policy), ["winter red", "two red"])

    assert good > 0.5 and bad < -0.5
    assert all(torch.equal(own, then) for own, then in zip(policy.trainable, before, strict=True))


def test_a_score_does_not_depend_on_what_is_scored_beside_it(learned: Path, make_policy: MakePolicy) -> None:
    policy = make_policy()
    model = read(learned, policy)
    texts = ["winter", "two three red dog", "summer red", "one one one one one one"]

    together, apart = scores(policy, model, texts), [scores(policy, model, [text])[0] for text in texts]

    assert together == pytest.approx(apart, abs=1e-4)
    assert scores(policy, model, texts, budget=10) == pytest.approx(apart, abs=1e-4)


def test_equal_answers_are_computed_once_and_have_the_same_score(
    learned: Path, make_policy: MakePolicy
) -> None:
    """In batches of one answer each. The first two prompts have the same conversation."""
    policy, batches = make_policy(), []
    texts, (here, there) = ["winter", "two three red dog", "winter"], prompts(2)

    scorer = PolicyScores(policy, [read(learned, policy)], 1, lambda: batches.append(1))
    first, again, other = asyncio.run(scorer.score([(here, texts), (prompts(1)[0], texts), (there, texts)]))

    assert first == again
    assert first[0] == first[2] != first[1]
    assert other[0] == other[2] != first[0]
    assert len(batches) == 4


def test_an_adapter_of_another_rank_scores_alike(
    learned: Path, make_policy: MakePolicy, tiny_base: Any
) -> None:
    narrow = Policy(copy.deepcopy(tiny_base), rank=2, alpha=32, seed=3)

    assert scores(narrow, read(learned, narrow), ["winter red", "two red"]) == pytest.approx(
        scores(make_policy(), read(learned, make_policy()), ["winter red", "two red"]), abs=1e-4
    )


def test_a_model_on_layers_that_the_job_does_not_adapt_is_refused(learned: Path, tiny_base: Any) -> None:
    few = Policy(copy.deepcopy(tiny_base), rank=4, alpha=8, seed=0, targets=["q_proj"])

    with pytest.raises(UserMistake, match="has an adapter on layers where this job has none"):
        read(learned, few)


def test_a_model_that_learned_with_another_chat_template_is_refused(
    learned: Path, make_policy: MakePolicy
) -> None:
    policy = make_policy()
    changed = copy.deepcopy(policy.tokenizer)
    changed.chat_template = "{{ messages }}"

    with pytest.raises(UserMistake, match="learned with another chat template"):
        read(learned, policy, tokenizer=changed)


def test_an_answer_that_does_not_fit_is_ungraded_with_a_reason(
    learned: Path, make_policy: MakePolicy
) -> None:
    policy = make_policy()

    good, long = scores(policy, read(learned, policy), ["winter red", "red " * (policy.context + 1)])

    assert good > 0.5
    grade = asyncio.run(
        RewardModel("rm", "ft:tiny:rm").grade(Sample("a", model_scores={"ft:tiny:rm": long}), {})
    )
    assert grade.score is None and "more than the model's context" in grade.reason


def test_outside_of_a_job_there_is_no_score() -> None:
    grade = asyncio.run(RewardModel("rm", "ft:tiny:rm").grade(Sample("a"), {}))

    assert grade.score is None and "in reinforcement jobs only" in grade.reason


class Lengths:
    """Scores answers by their length, and records when it was asked."""

    def __init__(self, sampled: list[str]) -> None:
        self.sampled = sampled
        self.seen: list[int] = []

    async def score(self, answers_P: Sequence[tuple[Prompt, Sequence[str]]]) -> list[list[Scores]]:
        self.seen.append(len(self.sampled))
        return [[{"ft:rm": float(len(text))} for text in texts] for _, texts in answers_P]


def test_answers_are_scored_together_once_all_of_them_are_sampled() -> None:
    sampled: list[str] = []

    async def answers() -> AsyncIterator[Answer]:
        for prompt, member, text in ((1, 0, "aaa"), (0, 0, "a"), (1, 1, "aaaa"), (0, 1, "aa")):
            sampled.append(text)
            yield Answer(prompt, member, Rollout((5,), (-1.0,), text, "stop"))

    models = Lengths(sampled)
    rewards = Rewards(RewardModel("rm", "ft:rm"), models=models)
    groups = asyncio.run(rewards.grade(prompts(2), answers(), 2, Clock()))

    assert models.seen == [4]
    assert [group.rewards_G for group in groups] == [[1.0, 2.0], [3.0, 4.0]]


def test_the_reward_is_read_at_the_token_that_ends_the_answer(make_policy: MakePolicy) -> None:
    policy = make_policy(moved=True)
    [pack] = reward_packs(pair(0), template(policy))

    tensors = tensors_of([pack])

    ends = tensors.input_ids[tensors.row_M, tensors.column_M].tolist()
    assert set(ends) <= policy.stop_ids and len(ends) == 2
    head = head_of(policy, moved=True)
    policy.use(Route("rows"))
    plain = [each.item() for each in of_pack(policy, head, pack)]
    policy.use(Route("packed"))
    assert reward_head.rewards(policy, head, tensors).tolist() == pytest.approx(plain, abs=1e-5)


SUMS = ["1 + 1 = 2", "2 + 3 = 5", "4 + 4 = 8", "3 + 6 = 9"]
WRONG = ["1 + 1 = x", "2 + 3 = x", "4 + 4 = x", "3 + 6 = x"]


def stepwise_row(number: int) -> dict[str, Any]:
    """Lines of sums; those that end in x are wrong."""
    right = [(number >> bit) % 2 == 0 for bit in range(3)]
    lines = [(SUMS if good else WRONG)[(number + place) % 4] for place, good in enumerate(right)]
    answer = {"role": "assistant", "content": "\n".join(lines)}
    asked = {"role": "user", "content": f"Add {number}."}
    return {"messages": [asked, answer], "step_labels": [int(good) for good in right]}


@pytest.fixture(scope="module")
def bytes_policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = make_byte_model(tmp_path_factory.mktemp("bytes"))
    base = load_base("bytes", BaseModelEntry(path=folder, dtype="float32", context=256), folder, "cpu")
    return Policy(base, rank=4, alpha=8, seed=0)


def test_a_process_reward_model_tells_the_wrong_step(bytes_policy: Policy, tmp_path: Path) -> None:
    policy = bytes_policy
    rows = [reward_packs(stepwise_row(number), template(policy))[0] for number in range(48)]
    fast = {"optimizer": {"learning_rate": 0.01}}
    asked = RewardHyperparameters.model_validate({"batch_size": 8, "n_epochs": 8, "advanced": fast})
    resolved = resolve("reward_model", asked, rows=48, parameters=1000, reward_kind="steps")
    own = RewardTrainer(
        policy, head_of(policy), resolved, token_budget=4096, scale=Scale.of_steps(), measured=[]
    )
    for step in range(resolved.total_steps):
        own.step(rows[step % 6 * 8 :][:8])
    assert own.measure(rows).reward_accuracy == 1.0
    own.save(tmp_path / "adapter")
    for parameter in policy.trainable:
        torch.nn.init.zeros_(parameter)

    model = read(tmp_path, policy, kind="steps")
    text = "4 + 4 = 8\n\n3 + 6 = x\n2 + 3 = 5"
    [[scores]] = asyncio.run(PolicyScores(policy, [model], 4096).score([(prompts(1)[0], [text])]))
    grade = asyncio.run(RewardModel("rm", "ft:tiny:rm").grade(Sample(text, model_scores=scores), {}))

    first, second, third = grade.steps
    assert [step.end for step in grade.steps] == step_ends(text)
    assert second.score < 0.2 and first.score > 0.8 and third.score > 0.5
    assert grade.score == second.score


def test_a_step_ends_at_the_token_that_completes_its_line(bytes_policy: Policy) -> None:
    row = stepwise_row(0)
    [pack] = reward_packs(row, template(bytes_policy))

    tensors = tensors_of([pack])

    read_at = tensors.column_M.tolist()
    spelt = [bytes_policy.tokenizer.decode(tensors.input_ids[0, : end + 1]) for end in read_at]
    answer = row["messages"][-1]["content"]
    first, second, _ = step_ends(answer)
    assert spelt[0].endswith(answer[:first]) and spelt[1].endswith(answer[:second])
    assert tensors.input_ids[0, read_at[2]].item() in bytes_policy.stop_ids
