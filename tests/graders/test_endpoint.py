import asyncio

import pytest

from graders.build import NotConfigured, build
from graders.calls import Patience
from graders.endpoint import Endpoints
from graders.run import grade_all
from graders.spec import InvalidGrader, dump, parse_grader
from graders.types import ErrorKind, Grade, Sample, StepScore
from tests.graders.servers import Reply, ScriptedServer, Time

RAW = {
    "type": "endpoint",
    "name": "e",
    "url": "https://example.com/grade",
    "headers": {"X-Api-Key": "secret"},
}


class Asked:
    def __init__(self, *replies: Reply, samples=("hi",), **changes: object) -> None:
        self.server, self.time = ScriptedServer(replies), Time()
        patience = Patience(sleep=self.time.sleep, jitter=lambda: 0.5, first_wait_s=1.0)
        endpoints = Endpoints(
            ("127.0.0.1", "*.example.com"), patience, new_trace_id=lambda: "trace_1", clock=self.time.clock
        )

        async def run() -> list[Grade]:
            async with self.server as url:
                grader = build(parse_grader({**RAW, "url": url + "/g", **changes}), endpoints=endpoints)
                pairs = [(Sample(text), {"a": 1}) for text in samples]
                return await grade_all(grader, pairs, concurrency=1)

        self.grade = asyncio.run(run())[0]


def test_the_endpoint_gets_sample_item_and_trace_and_says_the_score():
    asked = Asked(Reply(200, '{"score": 0.25}'))

    assert asked.grade.score == 0.25
    assert asked.server.requests == [
        {"sample": Sample("hi").as_namespace(), "item": {"a": 1}, "trace_id": "trace_1"}
    ]
    assert asked.server.headers[0]["x-api-key"] == "secret"


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (Reply(500, "boom"), ErrorKind.endpoint_grader_server_error),
        (Reply(404, "where?"), ErrorKind.endpoint_grader_server_error),
        (Reply(200, "fine"), ErrorKind.endpoint_grader_internal_error),
        (Reply(200, "{}"), ErrorKind.endpoint_grader_internal_error),
        (Reply(200, '{"score": "1"}'), ErrorKind.endpoint_grader_internal_error),
        (Reply(200, '{"score": true}'), ErrorKind.endpoint_grader_internal_error),
        (Reply(200, '{"score": NaN}'), ErrorKind.endpoint_grader_internal_error),
        (Reply(200, "[" * 50_000), ErrorKind.endpoint_grader_internal_error),
        (Reply(200, '{"score": 1, "steps": 1}'), ErrorKind.endpoint_grader_internal_error),
        (
            Reply(200, '{"score": 1, "steps": [{"end": 3, "score": 1}]}'),
            ErrorKind.endpoint_grader_internal_error,
        ),
    ],
)
def test_each_way_to_fail_has_its_flag(reply, kind):
    grade = Asked(reply).grade

    assert (grade.score, grade.error) == (None, kind)


def test_the_endpoint_may_score_an_answer_step_by_step():
    reply = '{"score": 0.5, "steps": [{"end": 1, "score": 1}, {"end": 2, "score": -0.5}]}'

    assert Asked(Reply(200, reply)).grade.steps == (StepScore(1.0, 1), StepScore(-0.5, 2))


def test_a_server_that_is_not_there_is_asked_four_times():
    asked = Asked(Reply(200, "{}"), url="http://127.0.0.1:1/")

    assert asked.grade.error is ErrorKind.endpoint_grader_server_error
    assert asked.time.slept == [1.0, 2.0, 4.0]


def test_a_passing_trouble_passes():
    assert Asked(Reply(502, ""), Reply(200, '{"score": 1}')).grade.score == 1.0


def test_a_request_larger_than_a_megabyte_is_not_sent():
    asked = Asked(Reply(200, '{"score": 1}'), samples=("x" * 600_000,))  # it is in the sample twice

    assert asked.grade.error is ErrorKind.endpoint_grader_internal_error
    assert asked.server.requests == []


def test_the_rate_limit_is_kept():
    asked = Asked(Reply(200, '{"score": 1}'), samples=("a", "b"), rate_limit=1)

    assert asked.time.slept == [1.0]


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com",
        "ftp://example.com",
        "https://",
        "example.com",
        "https://u:p@example.com",
        "http://127.0.0.1.example.com",
        "https://example.com:x",
        "https://exa mple.com",
        "",
    ],
)
def test_only_https_and_this_machine(url):
    with pytest.raises(InvalidGrader) as caught:
        parse_grader({**RAW, "url": url})

    assert caught.value.param == "grader.url"


@pytest.mark.parametrize(
    "url", ["http://localhost:1/", "http://127.0.0.1/", "http://[::1]:9/", "https://a.b/c"]
)
def test_these_are_fine(url):
    assert parse_grader({**RAW, "url": url}).url == url


@pytest.mark.parametrize("headers", [{"a b": "x"}, {"Host": "x"}, {"X": "secret\r\nY: z"}, {"X": "sécret"}])
def test_headers_that_cannot_be_sent_are_refused_without_repeating_the_value(headers):
    with pytest.raises(InvalidGrader) as caught:
        parse_grader({**RAW, "headers": headers})

    assert caught.value.param == "grader.headers"
    assert "cret" not in str(caught.value)


def test_header_values_can_be_masked_and_are_in_no_representation():
    multi = {"type": "multi", "name": "m", "graders": {"e": RAW}, "calculate_output": "e"}

    assert dump(parse_grader(RAW)) == RAW
    assert dump(parse_grader(RAW), masked=True)["headers"] == {"X-Api-Key": "***"}
    assert "secret" not in str(dump(parse_grader(multi), masked=True))
    assert "secret" not in repr(parse_grader(multi))


def test_endpoints_have_to_be_enabled():
    with pytest.raises(NotConfigured, match="not enabled"):
        build(parse_grader(RAW))
