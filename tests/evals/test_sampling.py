"""Requests of runs to chat servers: when they are repeated, and what becomes of errors."""

import asyncio
import json

import pytest

from graders.calls import CallRetryPolicy
from graders.judge.judges import JudgeModel
from tests.graders.servers import ODD_COUNTS, Reply, ScriptedServer, chat, with_usage
from worker.evals.sampling import ChatSampler, ItemAnswer, ServerUnavailable, chat_fields

PROMPT = [{"role": "user", "content": "hi"}]
LOADING = Reply(503, "loading", {"retry-after": "5"})


def sampled(
    replies: list[Reply], *, ours: bool, retries: int = 2, loading: int | None = None
) -> tuple[ItemAnswer, ScriptedServer]:
    async def run() -> tuple[ItemAnswer, ScriptedServer]:
        server = ScriptedServer(replies)
        async with server as url:
            at_once = CallRetryPolicy(
                retries=retries, retries_while_loading=loading, sleep=lambda seconds: asyncio.sleep(0)
            )
            sampler = ChatSampler(JudgeModel(f"{url}/v1"), {"model": "m"}, ours=ours, patience=at_once)
            try:
                return await sampler.sample(PROMPT), server
            finally:
                await sampler.close()

    return asyncio.run(run())


def test_a_server_that_is_loading_is_asked_again() -> None:
    answer, server = sampled([LOADING, LOADING, chat("hello")], ours=True)

    assert (answer.text, answer.error) == ("hello", None)
    assert len(server.requests) == 3
    assert answer.usage["prompt_tokens"] == 10


def test_our_own_server_that_stays_away_interrupts_the_run() -> None:
    with pytest.raises(ServerUnavailable, match="503"):
        sampled([LOADING], ours=True)


def test_loading_is_waited_for_longer_than_a_failure() -> None:
    answer, server = sampled([LOADING] * 5 + [chat("hello")], ours=True, loading=9)
    assert (answer.text, len(server.requests)) == ("hello", 6)

    answer, server = sampled([Reply(500, "broken")], ours=True, loading=9)
    assert answer.error is not None
    assert (answer.error["code"], len(server.requests)) == ("http_500", 3)


def test_a_503_of_our_own_server_without_a_time_to_wait_is_an_error_of_the_item() -> None:
    """Such as that of a model which is too large for the GPU."""
    refusal = Reply(503, '{"error": {"message": "too large", "code": "not_enough_memory"}}')
    answer, server = sampled([refusal], ours=True, loading=9)

    assert answer.error is not None
    assert (answer.error["code"], len(server.requests)) == ("not_enough_memory", 3)


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_proxy_that_does_not_reach_our_own_server_interrupts_the_run(status: int) -> None:
    with pytest.raises(ServerUnavailable, match=str(status)):
        sampled([Reply(status, "<html>bad gateway</html>")], ours=True)


def test_our_own_server_with_another_key_interrupts_the_run_and_a_foreign_one_is_an_error() -> None:
    with pytest.raises(ServerUnavailable, match="REGRAFT_INFERENCE_KEY"):
        sampled([Reply(401, "{}")], ours=True)
    answer, _ = sampled([Reply(401, "{}")], ours=False)

    assert answer.error is not None
    assert answer.error["code"] == "http_401"


def test_a_foreign_server_that_stays_away_is_an_error_of_the_item() -> None:
    answer, _ = sampled([Reply(500, "no")], ours=False)

    assert answer.error is not None
    assert answer.error["code"] == "http_500"


def test_a_refused_request_is_an_error_with_its_code_and_is_not_repeated() -> None:
    refusal = Reply(400, '{"error": {"message": "too long", "code": "context_length_exceeded"}}')
    answer, server = sampled([refusal], ours=True)

    assert answer.error == {"code": "context_length_exceeded", "message": "too long"}
    assert len(server.requests) == 1


def test_an_answer_of_something_else_is_an_error() -> None:
    answer, _ = sampled([Reply(200, "<html>")], ours=False)

    assert answer.error is not None
    assert "not a chat completion" in answer.error["message"]


@pytest.mark.parametrize("count", ODD_COUNTS, ids=lambda count: count[:12])
def test_a_count_of_tokens_that_is_none_is_estimated_from_the_text(count: str) -> None:
    """One token for four bytes: the answer has 8, and the request has about 60."""
    usage = f'{{"prompt_tokens": {count}, "completion_tokens": {count}, "prompt_tokens_details": {count}}}'
    answer, server = sampled([with_usage(chat("12345678"), usage)], ours=False)

    prompt_tokens = -(-len(json.dumps(server.requests[0])) // 4)
    assert (answer.text, answer.error) == ("12345678", None)
    assert answer.usage == {"prompt_tokens": prompt_tokens, "completion_tokens": 2, "cached_tokens": 0}


@pytest.mark.parametrize("usage", ["null", "[]", "{}", '"much"', "7", "NaN"])
def test_usage_that_is_absent_is_estimated(usage: str) -> None:
    answer, _ = sampled([with_usage(chat("12345678"), usage)], ours=False)

    assert answer.usage["prompt_tokens"] > 0
    assert answer.usage["completion_tokens"] == 2


def test_tokens_are_not_free_because_a_server_reports_zero() -> None:
    zero = '{"prompt_tokens": 0, "completion_tokens": 0}'
    answer, _ = sampled([with_usage(chat("12345678"), zero)], ours=False)
    silent, _ = sampled([with_usage(chat(""), zero)], ours=False)

    assert answer.usage["completion_tokens"] == 2
    assert silent.usage["completion_tokens"] == 0
    assert silent.usage["prompt_tokens"] > 0


@pytest.mark.parametrize(("cached", "counted"), [("4", 4), ("11", 0), ("-1", 0), ("1e400", 0)])
def test_no_more_tokens_are_cached_than_the_prompt_has(cached: str, counted: int) -> None:
    details = f'{{"cached_tokens": {cached}}}'
    usage = f'{{"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {details}}}'
    answer, _ = sampled([with_usage(chat("hi"), usage)], ours=False)

    assert answer.usage == {"prompt_tokens": 10, "completion_tokens": 5, "cached_tokens": counted}


def test_the_text_format_of_responses_becomes_a_response_format() -> None:
    fields = chat_fields(
        {"sampling_params": {"seed": 1, "top_p": None, "text": {"format": {"type": "text"}}}}
    )

    assert fields == {"seed": 1, "response_format": {"type": "text"}}
