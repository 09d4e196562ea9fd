import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from core.outages import outage
from graders.build import NotConfigured, build
from graders.calls import CallRetryPolicy, ServerAway
from graders.judge.judges import HttpJudges, JudgeModel
from graders.judge.model_graders import MAX_SHOWN
from graders.report import run_report
from graders.run import grade_all
from graders.spec import InvalidGrader, dump, parse_grader
from graders.types import ErrorKind, Grade, Sample, TokenUsage
from tests.graders.servers import ODD_COUNTS, Reply, ScriptedServer, Time, chat, verdict, with_usage

T = TypeVar("T")

SCORE = {
    "type": "score_model",
    "name": "judge",
    "model": "j",
    "input": [
        {"role": "developer", "content": "Rate the answer."},
        {"role": "user", "content": "{{item.q}}: {{sample.output_text}}"},
    ],
}
LABEL = {
    "type": "label_model",
    "name": "label",
    "model": "j",
    "input": [{"role": "user", "content": "{{sample.output_text}}"}],
    "labels": ["good", "bad"],
    "passing_labels": ["good"],
}


def multi_of(calculate_output: str, **graders: dict[str, Any]) -> dict[str, Any]:
    return {"type": "multi", "name": "all", "graders": graders, "calculate_output": calculate_output}


class Asked:
    """What came of grading some samples with a judge on a scripted server."""

    def __init__(
        self,
        raw: dict[str, Any],
        *replies: Reply,
        samples: tuple[Any, ...] = ("hi",),
        concurrency: int = 1,
        hold: int = 1,
        away_seconds: float | None = None,
        **served: Any,
    ) -> None:
        self.server, self.time = ScriptedServer(replies, hold), Time()
        self.spec = parse_grader(raw)
        patience = CallRetryPolicy(
            away_seconds=away_seconds,
            sleep=self.time.sleep,
            jitter=lambda: 0.5,
            first_wait_s=1.0,
            wall_clock=self.time.clock,
        )

        async def run() -> list[Grade]:
            async with self.server as url:
                config = {"j": JudgeModel(**{"base_url": f"{url}/v1", **served})}
                async with HttpJudges(config, patience=patience, clock=self.time.clock) as judges:
                    pairs = [(Sample(text), {"q": "Q"}) for text in samples]
                    grades = await grade_all(build(self.spec, judges), pairs, concurrency=concurrency)
                    self.ledger = judges.ledger.used
                    return grades

        self.grades = asyncio.run(run())
        self.grade = self.grades[0]


def test_the_number_is_the_score_and_the_reason_has_the_conclusion() -> None:
    asked = Asked(SCORE, verdict(0.75))

    assert asked.grade.score == 0.75
    assert asked.grade.reason == "j says 0.75: 'fine'"


def test_a_grade_keeps_a_bounded_part_of_the_prompt_and_no_images() -> None:
    image = {"type": "input_image", "image_url": "{{item.q}}"}
    user = {"role": "user", "content": [image, {"type": "input_text", "text": "{{sample.output_text}}"}]}
    asked = Asked(SCORE | {"input": [user]}, verdict(1), samples=("a" * MAX_SHOWN,))

    assert asked.grade.judge is not None
    [message] = asked.grade.judge.messages
    assert message["content"].startswith("[image_url]\naaa")
    assert message["content"].endswith("a… (12 more characters)")


def test_the_request_is_a_chat_completion_under_a_schema() -> None:
    sampling = {"seed": 1, "temperature": 0, "max_completions_tokens": 64, "reasoning_effort": "low"}
    asked = Asked({**SCORE, "sampling_params": sampling}, verdict(1), api_key="k", served_as="tiny")

    body = asked.server.requests[0]
    form = body.pop("response_format")
    assert body == {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "Rate the answer."},
            {"role": "user", "content": "Q: hi"},
        ],
        "seed": 1,
        "temperature": 0.0,
        "max_completion_tokens": 64,
        "reasoning_effort": "low",
    }
    assert form["type"] == "json_schema"
    assert form["json_schema"]["schema"]["required"] == ["steps", "result"]
    assert asked.server.paths == ["/v1/chat/completions"]
    assert asked.server.headers[0]["authorization"] == "Bearer k"


def test_parts_are_sent_as_the_chat_api_has_them() -> None:
    parts = [
        {"type": "input_text", "text": "{{sample.output_text}}"},
        {"type": "input_image", "image_url": "{{item.q}}", "detail": "low"},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
    ]
    asked = Asked({**SCORE, "input": [{"role": "user", "content": parts, "type": "message"}]}, verdict(1))

    assert asked.server.requests[0]["messages"][0]["content"] == [
        {"type": "text", "text": "hi"},
        {"type": "image_url", "image_url": {"url": "Q", "detail": "low"}},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
    ]


@pytest.mark.parametrize(("said", "score"), [(7, 5), (-3, 1), (2.5, 2.5)])
def test_a_result_is_clamped_into_the_range(said: float, score: float) -> None:
    assert Asked({**SCORE, "range": [1, 5]}, verdict(said)).grade.score == score


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (verdict("high"), ErrorKind.model_grader_parse_error),
        (verdict(True), ErrorKind.model_grader_parse_error),
        (verdict(None), ErrorKind.model_grader_parse_error),
        (chat("I would say 0.5"), ErrorKind.model_grader_parse_error),
        (chat('{"result": NaN}'), ErrorKind.model_grader_parse_error),
        (chat('{"result": 1' + "0" * 400 + "}"), ErrorKind.model_grader_parse_error),
        (chat("[" * 50_000), ErrorKind.model_grader_parse_error),
        (chat("", refusal="no"), ErrorKind.model_grader_refusal_error),
        (chat('{"steps": [', "length"), ErrorKind.model_grader_exceeded_max_tokens_error),
        (Reply(500, "boom"), ErrorKind.model_grader_server_error),
        (Reply(400, "prompt too long"), ErrorKind.model_grader_server_error),
        (Reply(302, "", {"location": "http://127.0.0.1:1"}), ErrorKind.model_grader_server_error),
        (Reply(200, "<html>"), ErrorKind.model_grader_server_error),
        (Reply(200, "[]"), ErrorKind.model_grader_server_error),
        (Reply(200, " " * 1_000_001), ErrorKind.model_grader_server_error),
    ],
)
def test_each_way_to_fail_has_its_flag(reply: Reply, kind: ErrorKind) -> None:
    grade = Asked(SCORE, reply).grade

    assert (grade.score, grade.error) == (None, kind)


def test_a_busy_server_is_asked_again_when_it_says() -> None:
    asked = Asked(SCORE, Reply(429, "", {"retry-after": "7"}), Reply(503, ""), verdict(1))

    assert asked.grade.score == 1.0
    assert asked.time.slept == [7.0, 2.0]


def test_a_date_to_retry_after_is_waited_for() -> None:
    asked = Asked(SCORE, Reply(429, "", {"retry-after": "Thu, 01 Jan 1970 00:00:09 GMT"}), verdict(1))

    assert asked.time.slept == [9.0]


@pytest.mark.parametrize(
    "nonsense", ["soon", "nan", "1e99", f"1 Jan {'9' * 20} 00:00:00 GMT", f"1 Jan 2026 00:00:00 +{'9' * 14}"]
)
def test_what_makes_no_sense_to_wait_for_is_not_waited_for(nonsense: str) -> None:
    asked = Asked(SCORE, Reply(429, "", {"retry-after": nonsense}), verdict(1))

    assert asked.grade.score == 1.0
    assert asked.time.slept[0] <= 60.0


def test_after_four_attempts_the_last_answer_counts() -> None:
    asked = Asked(SCORE, Reply(500, "boom"))

    assert len(asked.server.requests) == 4
    assert asked.grade.reason == "j: HTTP 500: 'boom'"


def test_a_request_that_is_wrong_is_not_repeated() -> None:
    assert len(Asked(SCORE, Reply(400, "bad")).server.requests) == 1


def test_the_same_prompt_is_asked_once_and_paid_once() -> None:
    asked = Asked(SCORE, verdict(0.5), verdict(0.9), samples=("a", "a", "b"))

    assert [grade.score for grade in asked.grades] == [0.5, 0.5, 0.9]
    assert [grade.usage["j"] for grade in asked.grades] == [
        TokenUsage(10, 5, 4),
        TokenUsage(),
        TokenUsage(10, 5, 4),
    ]
    assert asked.ledger == {"j": TokenUsage(20, 10, 8)}


def test_an_unreadable_answer_is_not_remembered() -> None:
    asked = Asked(SCORE, chat("what?"), verdict(1), samples=("a", "a"))

    assert [grade.score for grade in asked.grades] == [None, 1.0]
    assert asked.ledger["j"].prompt_tokens == 20


def test_no_more_questions_at_once_than_the_model_takes() -> None:
    bounded, free = (
        Asked(SCORE, verdict(1), samples=tuple("abcdefgh"), concurrency=8, hold=2, max_concurrency=most)
        for most in (2, 8)
    )

    assert len(bounded.server.requests) == len(free.server.requests) == 8
    assert bounded.server.most_open == 2
    assert free.server.most_open > 2


def test_equal_answers_that_come_at_once_are_judged_once() -> None:
    asked = Asked(SCORE, verdict(0.5), verdict(0.9), samples=("a",) * 8, concurrency=8)

    assert [grade.score for grade in asked.grades] == [0.5] * 8
    assert len(asked.server.requests) == 1
    assert asked.ledger == {"j": TokenUsage(10, 5, 4)}


def test_what_befalls_the_one_who_asks_befalls_all_who_wait() -> None:
    asked = Asked(SCORE, Reply(400, "bad"), verdict(0.9), samples=("a",) * 8, concurrency=8)

    assert {grade.error for grade in asked.grades} == {ErrorKind.model_grader_server_error}
    assert len(asked.server.requests) == 1


@pytest.mark.parametrize("away", [Reply(502, "<html>"), Reply(503, ""), Reply(504, ""), Reply(429, "slowly")])
def test_a_run_waits_for_a_judge_that_is_away(away: Reply) -> None:
    asked = Asked(SCORE, *[away] * 12, verdict(1), away_seconds=600.0)

    assert asked.grade.score == 1.0
    assert 300 < sum(asked.time.slept) <= 600


@pytest.mark.parametrize("served", [{}, {"base_url": "http://127.0.0.1:1/v1"}], ids=["proxy", "connection"])
def test_a_judge_that_stays_away_is_no_fault_of_the_answers(served: dict[str, Any]) -> None:
    with pytest.raises(ServerAway, match="The judge j is unavailable") as caught:
        Asked(multi_of("s + l", s=SCORE, l=LABEL), Reply(502, ""), away_seconds=600.0, **served)

    assert outage(caught.value) is not None


def test_a_run_waits_while_the_key_of_our_own_server_is_rotated_and_not_for_that_of_another() -> None:
    refused = Reply(401, "who?")
    ours = Asked(SCORE, *[refused] * 9, verdict(1), away_seconds=600.0, is_of_registry=True)
    other = Asked(SCORE, refused, verdict(1), away_seconds=600.0)

    assert ours.grade.score == 1.0
    assert other.grade.error is ErrorKind.model_grader_server_error


def test_a_run_waits_while_our_own_server_does_not_know_a_judge_that_it_is_about_to_get() -> None:
    """The models file of the inference server may be older than that of the worker."""
    unknown = Reply(404, json.dumps({"error": {"message": "no model 'j'", "code": "model_not_found"}}))
    ours = Asked(SCORE, *[unknown] * 9, verdict(1), away_seconds=600.0, is_of_registry=True)
    other = Asked(SCORE, unknown, verdict(1), away_seconds=600.0)

    assert ours.grade.score == 1.0
    assert other.grade.error is ErrorKind.model_grader_server_error
    with pytest.raises(ServerAway, match="no model 'j'"):
        Asked(SCORE, unknown, away_seconds=600.0, is_of_registry=True)


def test_a_judge_that_fails_on_a_prompt_is_not_waited_for() -> None:
    asked = Asked(SCORE, Reply(500, "boom"), away_seconds=600.0)

    assert asked.grade.error is ErrorKind.model_grader_server_error
    assert len(asked.server.requests) == 4


class Jumping(asyncio.SelectorEventLoop):
    """An event loop whose time a test sets forward."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead

    async def jump(self, seconds: float) -> None:
        """Let all tasks do what they can, before and afterwards."""
        for ahead in (0.0, seconds):
            self.ahead += ahead
            for _ in range(100):
                await asyncio.sleep(0)


def jumping(run: Callable[[Jumping], Coroutine[Any, Any, T]]) -> T:
    loop = Jumping()
    try:
        return loop.run_until_complete(run(loop))
    finally:
        loop.close()


def test_the_time_for_a_grade_does_not_include_the_wait_for_the_judge() -> None:
    """Another call has the judge for longer than a grade may take."""

    async def run(loop: Jumping) -> tuple[list[Grade], TokenUsage]:
        is_free = asyncio.Event()

        async def answer(request: httpx.Request) -> httpx.Response:
            await is_free.wait()
            return httpx.Response(200, content=parts(verdict(1).body.encode()))

        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            judges = HttpJudges({"j": JudgeModel("http://x/v1", max_concurrency=1)}, client=client)
            other = asyncio.create_task(judges.complete("j", [], schema=SCHEMA, sampling={}))
            grader = build(parse_grader(multi_of("s + l", s=SCORE, l=LABEL)), judges)
            grades = asyncio.create_task(grade_all(grader, [(Sample("a"), {"q": "Q"})], timeout_s=60.0))
            await loop.jump(100.0)
            is_free.set()
            await other
            return await grades, judges.ledger.used["j"]

    [grade], used = jumping(run)

    assert grade.sub_grades["s"].score == 1.0
    assert grade.usage["j"] + TokenUsage(10, 5, 4) == used


SCHEMA: dict[str, Any] = {"properties": {}, "required": []}


async def parts(body: bytes) -> AsyncIterator[bytes]:
    yield body


def test_a_question_that_nobody_waits_for_any_more_is_not_asked() -> None:
    class Silent(httpx.AsyncBaseTransport):
        cancelled = 0

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            raise AssertionError

    silent = Silent()

    async def run(loop: Jumping) -> list[Grade]:
        async with httpx.AsyncClient(transport=silent) as client:
            judges = HttpJudges({"j": JudgeModel("http://x/v1")}, client=client)
            grader = build(parse_grader(SCORE), judges)
            pairs = [(Sample("a"), {"q": "Q"})] * 2
            grades = asyncio.create_task(grade_all(grader, pairs, timeout_s=60.0))
            await loop.jump(100.0)
            return await grades

    assert [grade.error for grade in jumping(run)] == [ErrorKind.other_error] * 2
    assert silent.cancelled == 1


def test_questions_are_spaced_as_the_model_wants() -> None:
    asked = Asked(SCORE, verdict(1), samples=tuple("abc"), requests_per_second=2.0)

    assert asked.time.slept == [0.5, 0.5]


@pytest.mark.parametrize(("said", "score"), [("good", 1.0), ("bad", 0.0), ("else", None)])
def test_a_label_scores_by_whether_it_passes(said: str, score: float | None) -> None:
    asked = Asked(multi_of("l", l=LABEL), verdict(said))

    assert asked.grade.score == score
    schema = asked.server.requests[0]["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["result"] == {"type": "string", "enum": ["good", "bad"]}


def test_tokens_are_summed_over_a_multi_and_reported_by_model() -> None:
    asked = Asked(multi_of("s + l", s=SCORE, l=LABEL), verdict(0.5), verdict("good"))
    body = run_report(asked.spec, asked.grade)

    tokens = {"prompt_tokens": 20, "total_tokens": 30, "completion_tokens": 10, "cached_tokens": 8}
    assert body["model_grader_token_usage_per_model"] == {"j": tokens}
    assert body["metadata"]["token_usage"] == tokens
    assert body["metadata"]["sampled_model_name"] == "j"
    assert json.loads(json.dumps(body)) == body


def test_a_verdict_that_failed_has_cost_tokens_too() -> None:
    assert Asked(SCORE, chat("what?")).grade.usage == {"j": TokenUsage(10, 5, 4)}


@pytest.mark.parametrize("count", ODD_COUNTS, ids=lambda count: count[:12])
def test_a_count_of_tokens_that_is_none_is_estimated(count: str) -> None:
    usage = f'{{"prompt_tokens": {count}, "completion_tokens": {count}}}'
    asked = Asked(SCORE, with_usage(chat('{"steps": [], "result": 1}'), usage))

    body = json.dumps(asked.server.requests[0])
    assert asked.grade.score == 1.0
    assert asked.grade.usage == {"j": TokenUsage(-(-len(body) // 4), 7, 0)}


def test_an_api_key_is_in_no_message_and_no_representation() -> None:
    assert "secret" not in repr(JudgeModel("http://127.0.0.1/v1", api_key="secret"))
    assert "secret" not in Asked(SCORE, Reply(401, "who?"), api_key="secret").grade.reason


def test_nothing_of_the_environment_is_sent_to_a_judge(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")

    asked = Asked(SCORE, verdict(1))

    assert asked.grade.score == 1.0
    assert "authorization" not in asked.server.headers[0]


def test_without_judges_a_model_grader_cannot_be_built() -> None:
    with pytest.raises(NotConfigured, match="No judge model is configured") as caught:
        build(parse_grader(multi_of("s", s=SCORE)), param="grader")

    assert caught.value.param == "grader.graders.s.model"


def test_a_model_that_is_not_configured_is_answered_with_those_that_are() -> None:
    judges = HttpJudges({"a": JudgeModel("http://127.0.0.1/v1")})

    with pytest.raises(NotConfigured, match="configured on this server are: 'a'"):
        build(parse_grader(SCORE), judges)


MESSAGE = SCORE["input"][0]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": "x"}, "grader.input"),
        ({"input": []}, "grader.input"),
        ({"input": [MESSAGE, {"role": "tool", "content": "x"}]}, "grader.input[1].role"),
        ({"input": [{"role": "user", "content": 1}]}, "grader.input[0].content"),
        ({"input": [{"role": "user", "content": "{{x}}"}]}, "grader.input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 1}]}]},
            "grader.input[0].content[0].text",
        ),
        ({"range": [1, 0]}, "grader.range"),
        ({"range": [0]}, "grader.range"),
        ({"sampling_params": {"max_completion_tokens": 1}}, "grader.sampling_params.max_completion_tokens"),
        ({"sampling_params": {"max_completions_tokens": 0}}, "grader.sampling_params.max_completions_tokens"),
        ({"sampling_params": {"reasoning_effort": "huge"}}, "grader.sampling_params.reasoning_effort"),
        ({"sampling_params": {"seed": 1.5}}, "grader.sampling_params.seed"),
    ],
)
def test_a_mistake_in_a_score_model_is_named_by_its_path(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidGrader) as caught:
        parse_grader({**SCORE, **changes})

    assert caught.value.param == param


def test_what_was_sent_is_what_is_echoed() -> None:
    part = {"type": "output_text", "text": "x"}
    raw = {**SCORE, "input": [{"role": "user", "content": part}], "range": [0, 2]}

    assert dump(parse_grader(raw)) == raw


@pytest.mark.parametrize(("label", "score"), [("good", 1.0), ("bad", 0.0)])
def test_a_label_model_may_stand_alone(label: str, score: float) -> None:
    asked = Asked(LABEL, verdict(label))

    assert dump(asked.spec) == LABEL
    assert asked.grade.score == score


def test_the_limit_of_a_judges_answer_may_be_spelled_max_tokens() -> None:
    asked = Asked({**LABEL, "sampling_params": {"max_tokens": 64}}, verdict("good"))

    assert asked.server.requests[0]["max_completion_tokens"] == 64
    assert "max_tokens" not in asked.server.requests[0]


def test_two_limits_of_a_judges_answer_are_one_too_many() -> None:
    with pytest.raises(InvalidGrader, match="which mean the same") as caught:
        parse_grader({**LABEL, "sampling_params": {"max_tokens": 64, "max_completions_tokens": 64}})

    assert caught.value.param == "grader.sampling_params"


def test_a_passing_label_must_be_a_label() -> None:
    with pytest.raises(InvalidGrader, match="'great' is not among 'labels'"):
        parse_grader(multi_of("l", l={**LABEL, "passing_labels": ["great"]}))
