"""How many requests a minute a project may send; time passes when the tests say so."""

import logging
import socket
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from api.http.rate_limits import LocalRates, RedisRates, duration, open_rates
from core.settings import Settings
from core.tenancy.limits import NO_LIMITS
from tests.api.conftest import Clock, House

FILES = "/v1/files"


def test_a_limit_is_on_by_default_and_far_away(api: TestClient) -> None:
    assert api.get(FILES).headers["x-ratelimit-limit-requests"] == "6000"


def test_the_default_stays_beside_other_limits_until_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def default(limits: str) -> int | None:
        monkeypatch.setenv("REGRAFT_DEFAULT_LIMITS", limits)
        return Settings().default_limits.requests_per_minute

    assert default('{"running_jobs": 2}') == 6000
    assert default('{"requests_per_minute": 60}') == 60
    assert default('{"requests_per_minute": null}') is None


@pytest.mark.both_databases
def test_a_project_without_a_limit_hears_nothing_of_limits(house: House, api: TestClient) -> None:
    service = house.app.state.service
    settings = service.settings.model_copy(update={"default_limits": NO_LIMITS})
    house.app.state.service = replace(service, settings=settings)

    assert not [name for name in api.get(FILES).headers if name.startswith("x-ratelimit")]


def test_every_answer_of_a_limited_project_says_what_is_left(house: House, api: TestClient) -> None:
    house.limit(requests_per_minute=60)

    answers = [api.get(FILES), api.get(f"{FILES}/file-none"), api.post("/v1/fine_tuning/jobs", json={})]

    assert [answer.status_code for answer in answers] == [200, 404, 400]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["59", "58", "57"]
    assert [answer.headers["x-ratelimit-limit-requests"] for answer in answers] == ["60"] * 3
    assert [answer.headers["x-ratelimit-reset-requests"] for answer in answers] == ["1s", "2s", "3s"]


def test_one_request_too_many_is_told_when_to_come_back(house: House, api: TestClient) -> None:
    house.limit(requests_per_minute=2)
    assert [api.get(FILES).status_code for _ in range(3)] == [200, 200, 429]

    refused = api.get(FILES)

    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.headers["retry-after"] == "30"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-reset-requests"] == "1m0s"
    assert "x-should-retry" not in refused.headers  # OpenAI's client comes back by itself


def test_who_comes_back_when_told_is_let_in(house: House, api: TestClient) -> None:
    house.limit(requests_per_minute=2)
    for _ in range(3):
        last = api.get(FILES)

    house.clock.now += float(last.headers["retry-after"])

    assert [api.get(FILES).status_code for _ in range(2)] == [200, 429]


@pytest.mark.both_databases
def test_all_keys_of_a_project_share_its_limit_and_no_other_project_does(
    house: House, api: TestClient
) -> None:
    house.limit(requests_per_minute=1)
    api.get(FILES)

    assert house.client(house.new_key("read")).get(FILES).status_code == 429
    assert house.client(house.other_key).get(FILES).status_code == 200


def test_requests_without_a_right_key_take_nothing_away(house: House, api: TestClient) -> None:
    house.limit(requests_per_minute=1)
    for _ in range(3):
        house.client("rg-wrong").get(FILES)

    assert api.get(FILES).status_code == 200


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (0.2, "1s"), (59.5, "1m0s"), (360, "6m0s"), (61, "1m1s")]
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_bucket_holds_no_more_than_a_minute() -> None:
    clock = Clock()
    rates = LocalRates(clock)
    rates.take("proj", 5)

    clock.now += 3600

    assert [rates.take("proj", 5).allowed for _ in range(6)] == [True] * 5 + [False]


def test_a_lowered_limit_holds_at_once() -> None:
    rates = LocalRates(Clock())
    rates.take("proj", 100)

    assert [rates.take("proj", 1).allowed for _ in range(2)] == [True, False]


# Shared through Redis.


def test_processes_that_share_redis_share_the_limit(redis_url: str) -> None:
    here, there = open_rates(redis_url), open_rates(redis_url)
    assert isinstance(here, RedisRates)

    taken = [rates.take("proj_shared", 4) for rates in (here, there, here, there, here)]

    assert [one.allowed for one in taken] == [True] * 4 + [False]
    assert [round(one.tokens) for one in taken[:4]] == [3, 2, 1, 0]
    assert 1 <= taken[-1].retry_after <= 15


def test_tokens_in_redis_grow_back_by_its_own_clock(redis_url: str) -> None:
    rates = open_rates(redis_url)

    # A token a millisecond: two round trips apart, there is always another one.
    assert all(rates.take("proj_fast", 60_000).allowed for _ in range(50))
    assert rates.take("proj_fast", 60_000).tokens > 60_000 - 52


def test_without_redis_requests_are_let_through_and_it_is_left_alone_for_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, and never listening: connections are refused
        clock = Clock()
        rates = RedisRates.at(f"redis://127.0.0.1:{nobody.getsockname()[1]}", clock)
        with caplog.at_level(logging.WARNING):
            allowed = [rates.take("proj", 1).allowed for _ in range(5)]
            logged_at_once = len(caplog.records)
            clock.now += RedisRates.PAUSE_S
            rates.take("proj", 1)

    assert allowed == [True] * 5
    assert (logged_at_once, len(caplog.records)) == (1, 2)
