"""A teacher on a server: its log-probabilities of the student's tokens, and what it is refused for."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from core.settings import Settings
from graders.calls import CallRetryPolicy
from graders.judge.judges import JudgeModel
from graders.judge.usage import TokenLedger
from graders.types import TokenUsage
from tests.echo import echoes_of
from tests.graders.servers import Time, serving
from tests.hooks import Receiver
from tests.tiny import make_byte_model, make_tiny_model
from worker.clock import Clock
from worker.model.policy import Policy
from worker.prepare.scorers import served_teacher
from worker.refusals import ModelUnavailable, TrainingDiverged, UserMistake
from worker.rollout.distillation_rewards import TeacherRewards
from worker.rollout.served_teacher import ServedTeacher, legible_tokens, top_tokens
from worker.sampling import Answer, Sampling, grouped
from worker.sampling.transformers import TransformersSampler
from worker.training.teacher import PolicyTeacher
from worker.types import Prompt, Rollout, TrainingSequence

PROMPTS = [Prompt(line, (8 + line, 9), {"messages": []}) for line in range(3)]
HOW = Sampling(4, 1.0, 8, job_seed=0, step=1)

MakePolicy = Callable[..., Policy]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    make_tiny_model(folder / "tiny")
    make_byte_model(folder / "bytes")
    return folder


def teacher(address: str, **server: Any) -> ServedTeacher:
    patience = CallRetryPolicy(retries=2, sleep=Time().sleep)
    return ServedTeacher("large", JudgeModel(f"{address}/v1", **server), patience=patience)


def served_by(url: str, settings: Settings, beat: Callable[[], None] = lambda: None) -> ServedTeacher:
    """The teacher as a run has it."""
    return served_teacher("large", JudgeModel(url), settings, beat, TokenLedger())


def sampled(policy: Policy) -> list[tuple[Prompt, list[Rollout]]]:
    answers = TransformersSampler(policy).answers(PROMPTS, HOW)
    return [
        (prompt, list(rollouts))
        for prompt, rollouts in zip(PROMPTS, grouped(answers, len(PROMPTS), 4), strict=True)
    ]


def test_it_gives_what_the_same_model_gives_in_memory(folder: Path, make_policy: MakePolicy) -> None:
    policy = make_policy()
    answers_P = sampled(policy)

    with serving(echoes_of(folder / "tiny")) as address:
        served = teacher(address, max_concurrency=3).logprobs(answers_P, 1.0)

    inside = PolicyTeacher(policy, policy.as_base, 512).logprobs(answers_P, 1.0)
    for own_G, others_G in zip(inside, served, strict=True):
        for own, others in zip(own_G, others_G, strict=True):
            assert others == pytest.approx(own, abs=1e-5)


def test_it_is_asked_under_its_name_on_the_server_with_its_key() -> None:
    seen: list[Any] = []

    def answer(path: str, asked: Any) -> tuple[int, str]:
        seen.append(asked)
        tokens = [str(token) for token in (*asked["prompt"], 0)]
        values = [None, *[-1.5] * len(asked["prompt"])]
        return 200, json.dumps({"choices": [{"logprobs": {"tokens": tokens, "token_logprobs": values}}]})

    rollout = Rollout((4, 5), (-1.0, -1.0), "ab", "stop")
    with serving(answer) as address:
        found = teacher(address, served_as="org/large").logprobs([(PROMPTS[0], [rollout])], 1.0)

    assert found == [[(-1.5, -1.5)]]
    assert seen[0]["model"] == "org/large"
    assert seen[0]["prompt"] == [8, 9, 4, 5]


def test_its_tokens_are_counted_under_its_name(folder: Path, make_policy: MakePolicy) -> None:
    policy = make_policy()
    with serving(echoes_of(folder / "tiny")) as address:
        rewards = TeacherRewards(teacher(address), temperature=1.0, paid="large")
        answers = TransformersSampler(policy).sample(PROMPTS, HOW)
        groups = asyncio.run(rewards.grade(PROMPTS, answers, 4, Clock()))

    for group in groups:
        for rollout, grade in zip(group.rollouts_G, group.grades_G, strict=True):
            assert grade.usage == {"large": TokenUsage(2 + len(rollout.output_ids_T), 1, 0)}


def test_a_teacher_with_the_students_tokens_is_accepted(folder: Path) -> None:
    with serving(echoes_of(folder / "tiny")) as address:
        teacher(address).refuse_other_tokens(AutoTokenizer.from_pretrained(folder / "tiny"))


def test_a_teacher_with_other_tokens_is_refused_by_the_first_that_differs(folder: Path) -> None:
    with serving(echoes_of(folder / "bytes")) as address, pytest.raises(UserMistake) as refused:
        teacher(address).refuse_other_tokens(AutoTokenizer.from_pretrained(folder / "tiny"))

    assert "The teacher 'large' has another tokenizer than the student: token" in refused.value.message
    assert refused.value.param == "method.distillation.teacher.model"


def test_a_server_may_name_tokens_by_their_ids(folder: Path) -> None:
    def answer(path: str, asked: Any) -> tuple[int, str]:
        tokens = [f"token_id:{token}" for token in asked["prompt"]]
        values = [None, *[-1.0] * (len(tokens) - 1)]
        return 200, json.dumps({"choices": [{"logprobs": {"tokens": tokens, "token_logprobs": values}}]})

    with serving(answer) as address:
        teacher(address).refuse_other_tokens(AutoTokenizer.from_pretrained(folder / "tiny"))


def test_the_compared_tokens_are_from_all_over_the_vocabulary(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "bytes")

    few = list(legible_tokens(tokenizer, 10))

    every = list(legible_tokens(tokenizer, 10**6))
    assert len(few) <= 10
    assert few[0] == every[0]
    assert few[-1] >= every[-1] * 0.8
    assert not set(every) & set(tokenizer.all_special_ids)


COMPLETION = {"index": 0, "text": "x"}


@pytest.mark.parametrize(
    ("status", "choice", "says"),
    [
        (404, {}, "refuses 4 tokens: HTTP 404"),
        (200, COMPLETION, "gives no log-probabilities of a prompt"),
        (200, COMPLETION | {"logprobs": None}, "gives no log-probabilities of a prompt"),
        (
            200,
            COMPLETION | {"logprobs": {"tokens": ["x"], "token_logprobs": [-1.0]}},
            r"gives no log-probabilities of a prompt \(the answer has 1 tokens of 4\)",
        ),
        (
            200,
            COMPLETION | {"logprobs": {"tokens": ["x"] * 4, "token_logprobs": [None, 1.0, -1.0, -1.0]}},
            "a log-probability is above 0",
        ),
    ],
)
def test_a_server_that_cannot_teach_fails_the_job_with_the_reason(
    status: int, choice: Any, says: str
) -> None:
    rollout = Rollout((4, 5), (-1.0, -1.0), "ab", "stop")
    with (
        serving(lambda path, asked: (status, json.dumps({"choices": [choice]}))) as address,
        pytest.raises(UserMistake, match=says) as refused,
    ):
        teacher(address).logprobs([(PROMPTS[0], [rollout])], 1.0)

    assert refused.value.code == "teacher_unusable"


def test_a_log_probability_that_is_no_float_makes_the_server_unusable() -> None:
    logprobs = {"tokens": ["x"] * 4, "token_logprobs": [None, *[-(10**400)] * 3]}
    rollout = Rollout((4, 5), (-1.0, -1.0), "ab", "stop")
    with (
        serving(lambda path, asked: (200, json.dumps({"choices": [{"logprobs": logprobs}]}))) as address,
        pytest.raises(UserMistake, match="int too large") as refused,
    ):
        teacher(address).logprobs([(PROMPTS[0], [rollout])], 1.0)

    assert refused.value.code == "teacher_unusable"


def test_a_very_low_log_probability_counts_as_vllms_lowest() -> None:
    logprobs = {"tokens": ["x"] * 4, "token_logprobs": [None, -1.0, -1e308, -2.0]}
    rollout = Rollout((4, 5), (-1.0, -1.0), "ab", "stop")
    with serving(lambda path, asked: (200, json.dumps({"choices": [{"logprobs": logprobs}]}))) as address:
        found = teacher(address).logprobs([(PROMPTS[0], [rollout])], 1.0)

    assert found == [[(-9999.0, -2.0)]]


def refused_top(answer: Callable[[str, Any], tuple[int, str]], folder: Path, top_k: int) -> UserMistake:
    tokenizer = AutoTokenizer.from_pretrained(folder / "tiny")
    with serving(answer) as address, pytest.raises(UserMistake) as refused:
        teacher(address).refuse_top(tokenizer, top_k)
    return refused.value


def test_more_likely_tokens_than_the_server_gives_are_refused_with_its_reason(folder: Path) -> None:
    refused = refused_top(echoes_of(folder / "tiny", most=20), folder, 21)

    assert "'large' does not give its 21 likeliest tokens. Choose a smaller `top_k`" in refused.message
    assert "greater than max allowed: 20" in refused.message
    assert refused.param == "method.distillation.hyperparameters.advanced.loss.top_k"
    with serving(echoes_of(folder / "tiny", most=20)) as address:
        teacher(address).refuse_top(AutoTokenizer.from_pretrained(folder / "tiny"), 20)


@pytest.mark.parametrize(
    ("top", "says"),
    [
        ({"a": -1.0, "b": -1.0}, "its tokens are not named by their ids"),
        ({"token_id:4": -1.0}, "there are not 2 likeliest tokens at each place"),
        ({"token_id:4": -1.0, "token_id:5": 0.5}, "a log-probability is above 0"),
    ],
)
def test_likely_tokens_that_cannot_be_read_are_refused_by_name(
    folder: Path, top: dict[str, float], says: str
) -> None:
    def answer(path: str, asked: Any) -> tuple[int, str]:
        count = len(asked["prompt"])
        logprobs = {"tokens": ["x"] * count, "token_logprobs": [None, *[-1.0] * (count - 1)]}
        logprobs["top_logprobs"] = [None, *[top] * (count - 1)]
        return 200, json.dumps({"choices": [{"logprobs": logprobs}]})

    assert says in refused_top(answer, folder, 2).message


def test_the_likeliest_tokens_are_those_at_learned_tokens_in_their_order() -> None:
    seen = [{1: -3.0, 2: -0.5, 9: -5.0}, {3: -0.1, 4: -2.0}, {5: -1.0, 6: -1.0, 7: -4.0}]
    answer = TrainingSequence((9, 3, 7), (0.0,) * 3, (0.0,) * 3, 1.0, learned_T=(True, False, True))

    top = top_tokens(seen, answer, 2)

    assert top.ids.tolist() == [[2, 1], [5, 6]]
    assert top.logprobs.tolist() == [[-0.5, -3.0], [-1.0, -1.0]]


@pytest.mark.parametrize(("seconds", "least"), [(0, 0), (600, 500)])
@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_an_outage_is_waited_for_as_long_as_the_operator_says(
    status: int, seconds: float, least: float
) -> None:
    waited: list[float] = []

    async def wait(pause: float) -> None:
        waited.append(pause)

    rollout = Rollout((4, 5), (-1.0, -1.0), "ab", "stop")
    with serving(lambda path, asked: (status, "{}")) as address:
        served = served_by(f"{address}/v1", Settings(patience_seconds=seconds))
        waiting = replace(served, patience=replace(served.patience, sleep=wait))
        with pytest.raises(ModelUnavailable):
            waiting.logprobs([(PROMPTS[0], [rollout])], 1.0)

    assert least <= sum(waited) <= seconds
    assert max(waited, default=0) <= 60, "the heartbeat of the run is between two waits"


async def _slept(teacher: ServedTeacher) -> None:
    await teacher.patience.sleep(0)


def test_a_run_that_waits_for_its_teacher_is_alive() -> None:
    """Otherwise it would be killed as hung in an outage longer than REGRAFT_HANG_SECONDS."""
    beats: list[None] = []
    settings = Settings(patience_seconds=600)
    waiting = served_by("http://127.0.0.1:9/v1", settings, lambda: beats.append(None))

    asyncio.run(_slept(waiting))

    assert len(beats) == 1


def test_a_student_without_probabilities_has_diverged() -> None:
    rollout = Rollout((4, 5), (math.nan, -1.0), "ab", "stop")

    async def answers() -> AsyncIterator[Answer]:
        yield Answer(0, 0, rollout)

    rewards = TeacherRewards(teacher("http://127.0.0.1:9"), temperature=1.0)
    with pytest.raises(TrainingDiverged, match="probabilities of its answers are not numbers"):
        asyncio.run(rewards.grade(PROMPTS[:1], answers(), 1, Clock()))


def test_a_server_that_is_away_is_asked_again_and_then_by_another_attempt() -> None:
    asked: list[Any] = []

    def answer(path: str, body: Any) -> tuple[int, str]:
        asked.append(body)
        return 503, "{}"

    rollout = Rollout((4, 5), (-1.0, -1.0), "ab", "stop")
    with (
        serving(answer) as address,
        pytest.raises(ModelUnavailable, match="'large' does not answer: HTTP 503"),
    ):
        teacher(address).logprobs([(PROMPTS[0], [rollout])], 1.0)

    assert len(asked) == 3


def test_another_temperature_is_never_answered_with_that_of_1(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"at temperature 1, not 0\.7"):
        teacher("http://127.0.0.1:9").logprobs([], 0.7)


def test_it_is_reached_from_within_a_running_event_loop(folder: Path) -> None:
    async def inside() -> None:
        with serving(echoes_of(folder / "tiny")) as address:
            teacher(address).refuse_other_tokens(AutoTokenizer.from_pretrained(folder / "tiny"))

    asyncio.run(inside())


def test_a_server_that_accepts_in_silence_is_given_one_more_chance_and_no_more(folder: Path) -> None:
    """Each of them takes the whole timeout, while the worker learns nothing."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "tiny")

    with Receiver([0]) as receiver:
        silent = JudgeModel(f"{receiver.url}/v1", timeout_s=0.2)
        patience = replace(served_by(receiver.url, Settings()).patience, first_wait_s=0.0)
        with pytest.raises(ModelUnavailable, match=r"no response within 0\.2 seconds"):
            ServedTeacher("large", silent, patience=patience).refuse_other_tokens(tokenizer)

        assert len(receiver.received) == 2
