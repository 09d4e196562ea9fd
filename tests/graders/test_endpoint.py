import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from graders.build import NotConfigured, build
from graders.calls import CallRetryPolicy, RateLimit, ServerAway, post
from graders.endpoint import Endpoints
from graders.run import grade_all
from graders.spec import InvalidGrader, dump, parse_grader
from graders.types import ErrorKind, Grade, Sample, StepScore
from tests.graders.servers import Reply, ScriptedServer, Time, serving
from tests.present import untyped

RAW = {
    "type": "endpoint",
    "name": "e",
    "url": "https://example.com/grade",
    "headers": {"X-Api-Key": "secret"},
}


class Asked:
    def __init__(
        self,
        *replies: Reply,
        samples: tuple[Any, ...] = ("hi",),
        away_seconds: float | None = None,
        **changes: object,
    ) -> None:
        self.server, self.time = ScriptedServer(replies), Time()
        patience = CallRetryPolicy(
            away_seconds=away_seconds, sleep=self.time.sleep, jitter=lambda: 0.5, first_wait_s=1.0
        )
        endpoints = Endpoints(
            ("127.0.0.1", "*.example.com"), patience, new_trace_id=lambda: "trace_1", clock=self.time.clock
        )

        async def run() -> list[Grade]:
            async with self.server as url:
                grader = build(parse_grader({**RAW, "url": url + "/g", **changes}), endpoints=endpoints)
                pairs = [(Sample(text), {"a": 1}) for text in samples]
                return await grade_all(grader, pairs, concurrency=1)

        self.grade = asyncio.run(run())[0]


def test_the_endpoint_gets_sample_item_and_trace_and_says_the_score() -> None:
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
        (Reply(200, '{"score": 1e308}'), ErrorKind.endpoint_grader_internal_error),
        (Reply(200, "[" * 50_000), ErrorKind.endpoint_grader_internal_error),
        (Reply(200, '{"score": 1, "steps": 1}'), ErrorKind.endpoint_grader_internal_error),
        (
            Reply(200, '{"score": 1, "steps": [{"end": 3, "score": 1}]}'),
            ErrorKind.endpoint_grader_internal_error,
        ),
    ],
)
def test_each_way_to_fail_has_its_flag(reply: Reply, kind: ErrorKind) -> None:
    grade = Asked(reply).grade

    assert (grade.score, grade.error) == (None, kind)


def test_the_endpoint_may_score_an_answer_step_by_step() -> None:
    reply = '{"score": 0.5, "steps": [{"end": 1, "score": 1}, {"end": 2, "score": -0.5}]}'

    assert Asked(Reply(200, reply)).grade.steps == (StepScore(1.0, 1), StepScore(-0.5, 2))


def test_a_server_that_is_not_there_is_asked_four_times() -> None:
    asked = Asked(Reply(200, "{}"), url="http://127.0.0.1:1/")

    assert asked.grade.error is ErrorKind.endpoint_grader_server_error
    assert asked.time.slept == [1.0, 2.0, 4.0]


def test_a_run_waits_for_an_endpoint_that_is_away() -> None:
    asked = Asked(*[Reply(503, "deploying")] * 12, Reply(200, '{"score": 1}'), away_seconds=600.0)

    assert asked.grade.score == 1.0

    with pytest.raises(ServerAway, match=r"The endpoint of the grader .* is unavailable"):
        Asked(Reply(200, "{}"), url="http://127.0.0.1:1/", away_seconds=600.0)


@contextmanager
def dropping() -> Iterator[str]:
    """The address of a server that takes no more connections: the system drops the packets of new ones."""
    with ExitStack() as opened:
        server = opened.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            other = opened.enter_context(socket.socket())
            other.setblocking(False)
            with suppress(BlockingIOError):
                other.connect(server.getsockname())
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"


def test_a_host_that_drops_packets_is_away_and_not_slow() -> None:
    patience = CallRetryPolicy(away_seconds=0.0)

    async def ask(url: str) -> None:
        async with httpx.AsyncClient() as client:
            await post(client, url, b"{}", {}, patience=patience, pace=RateLimit(None), timeout_s=1.0)

    with dropping() as url, pytest.raises(ServerAway):
        asyncio.run(ask(url))


def test_a_host_that_does_not_exist_is_not_waited_for() -> None:
    asked = Asked(Reply(200, "{}"), url="https://absent.example.com/", away_seconds=600.0)

    assert asked.grade.error is ErrorKind.endpoint_grader_server_error


def test_a_passing_trouble_passes() -> None:
    assert Asked(Reply(502, ""), Reply(200, '{"score": 1}')).grade.score == 1.0


def test_a_request_larger_than_a_megabyte_is_not_sent() -> None:
    asked = Asked(Reply(200, '{"score": 1}'), samples=("x" * 600_000,))  # it is in the sample twice

    assert asked.grade.error is ErrorKind.endpoint_grader_internal_error
    assert asked.server.requests == []


def test_the_rate_limit_is_kept() -> None:
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
        "https://xn--/",
        "https://xn--a.example.com/",
        "",
    ],
)
def test_only_https_and_this_machine(url: str) -> None:
    with pytest.raises(InvalidGrader) as caught:
        parse_grader({**RAW, "url": url})

    assert caught.value.param == "grader.url"


@pytest.mark.parametrize(
    "url", ["http://localhost:1/", "http://127.0.0.1/", "http://[::1]:9/", "https://a.b/c"]
)
def test_these_are_fine(url: str) -> None:
    assert untyped(parse_grader({**RAW, "url": url})).url == url


@pytest.mark.parametrize("headers", [{"a b": "x"}, {"Host": "x"}, {"X": "secret\r\nY: z"}, {"X": "sécret"}])
def test_headers_that_cannot_be_sent_are_refused_without_repeating_the_value(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidGrader) as caught:
        parse_grader({**RAW, "headers": headers})

    assert caught.value.param == "grader.headers"
    assert "cret" not in str(caught.value)


def test_header_values_can_be_masked_and_are_in_no_representation() -> None:
    multi = {"type": "multi", "name": "m", "graders": {"e": RAW}, "calculate_output": "e"}

    assert dump(parse_grader(RAW)) == RAW
    assert dump(parse_grader(RAW), masked=True)["headers"] == {"X-Api-Key": "***"}
    assert "secret" not in str(dump(parse_grader(multi), masked=True))
    assert "secret" not in repr(parse_grader(multi))
    assert "secret" not in repr(parse_grader({**RAW, "url": "https://example.com/?token=secret"}))


@pytest.mark.parametrize("reply", [Reply(401, "{}"), Reply(200, "{}")], ids=["refused", "no score"])
def test_a_reason_has_no_secret_that_the_server_repeats(reply: Reply) -> None:
    said = "no access: Authorization: Bearer other-secret, X-Api-Key was first-secret, see https://a.example?page=2"

    grade = Asked(replace(reply, body=said), headers={"X-Api-Key": "first-secret"}).grade

    assert "secret" not in grade.reason
    assert "X-Api-Key was ***, see https://a.example?page=2" in grade.reason


def graded_by(url: str, endpoints: Endpoints) -> Grade:
    grader = build(parse_grader({**RAW, "url": url}), endpoints=endpoints)
    return asyncio.run(grader.grade(Sample("hi"), {}))


def test_a_name_that_the_operator_lists_must_not_lead_to_a_private_address() -> None:
    """Whoever has the name decides where it leads, and that need not be the operator."""
    for hosts in [("graders.example.com",), ("*.example.com",), ("*",)]:
        inward = Endpoints(hosts, resolve=lambda host: ["127.0.0.1"])

        grade = graded_by("https://graders.example.com/", inward)

        assert (grade.score, grade.error) == (None, ErrorKind.endpoint_grader_server_error)
        assert "not on the public internet" in grade.reason


def test_a_private_name_is_called_where_the_operator_says_that_it_is_private() -> None:
    async def status(endpoints: Endpoints, url: str) -> int:
        async with endpoints.connect() as client:
            return (await client.post(url, content=b"{}")).status_code

    private = Endpoints(("*.internal",), private_hosts=("*.internal",), resolve=lambda host: ["127.0.0.1"])
    with serving(lambda path, body: (200, '{"score": 1}')) as url:
        assert asyncio.run(status(private, url.replace("127.0.0.1", "graders.internal"))) == 200


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/", "https://10.0.0.1/", "https://[::ffff:169.254.169.254]/"]
)
def test_a_pattern_does_not_list_private_addresses(url: str) -> None:
    with pytest.raises(NotConfigured):
        build(parse_grader({**RAW, "url": url}), endpoints=Endpoints(("*",)))


def test_nothing_of_the_environment_is_sent_to_an_endpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")

    asked = Asked(Reply(200, '{"score": 1}'))

    assert asked.grade.score == 1.0
    assert "authorization" not in asked.server.headers[0]


def test_a_redirect_is_not_followed() -> None:
    asked = Asked(Reply(307, "", {"location": "http://127.0.0.1:1/"}), Reply(200, '{"score": 1}'))

    assert asked.grade.error is ErrorKind.endpoint_grader_server_error
    assert len(asked.server.requests) == 1


def test_a_compressed_answer_is_not_unpacked() -> None:
    asked = Asked(Reply(200, '{"score": 1}', {"content-encoding": "gzip"}))

    assert asked.grade.error is ErrorKind.endpoint_grader_server_error
    assert "compressed" in asked.grade.reason


@pytest.mark.parametrize("url", ["https://xn--bcher-kva.example.com/", "https://b\xfccher.example.com/"])
def test_an_international_name_is_a_host_like_others(url: str) -> None:
    assert untyped(parse_grader({**RAW, "url": url})).url == url
    assert Endpoints(("*.example.com",)).allow(url)


def test_endpoints_have_to_be_enabled() -> None:
    with pytest.raises(NotConfigured, match="not enabled"):
        build(parse_grader(RAW))
