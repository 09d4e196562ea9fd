"""What the API tells Prometheus of its requests."""

import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client.samples import Sample
from starlette.responses import JSONResponse
from starlette.testclient import TestClient

from api.http.request_metrics import Measured
from core.telemetry import logs
from core.telemetry.metrics import COUNTED
from tests.api.conftest import House


def counts(**labels: str) -> list[Sample]:
    """The numbers of requests whose labels are these, and whatever else."""
    return [
        sample
        for family in COUNTED.collect()
        for sample in family.samples
        if sample.name == "regraft_http_request_seconds_count" and labels.items() <= sample.labels.items()
    ]


def total(**labels: str) -> float:
    return sum(sample.value for sample in counts(**labels))


def test_requests_are_counted_by_the_template_of_their_route(
    api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    route = {"route": "/v1/fine_tuning/jobs/{job_id}", "method": "GET", "status": "2xx"}
    before, jobs = total(**route), [create_job()["id"] for _ in range(2)]

    for job_id in jobs:
        assert api.get(f"/v1/fine_tuning/jobs/{job_id}").status_code == 200

    assert total(**route) == before + 2
    assert len(counts(**route)) == 1


def test_no_label_holds_what_a_caller_chose(api: TestClient) -> None:
    api.get("/nowhere/zebra-path")
    api.get("/v1/files/zebra-file")
    api.request("ZEBRA", "/v1/files")

    assert total(route="none", status="4xx") >= 1
    assert total(route="/v1/files/{file_id}", status="4xx") >= 1
    assert total(method="other") >= 1
    said = {value for sample in counts() for value in sample.labels.values()}
    assert not [value for value in said if "zebra" in value.lower()]


def test_a_crash_counts_as_a_5xx(house: House) -> None:
    crashed = {"route": "/readyz", "status": "5xx"}
    before = total(**crashed)
    house.app.state.service = None

    assert house.client().get("/readyz").status_code == 500
    assert total(**crashed) == before + 1


@pytest.mark.parametrize(("headers", "status"), [({"retry-after": "5"}, "later"), ({}, "5xx")])
def test_a_503_that_says_when_to_try_again_is_no_error_of_the_service(
    headers: dict[str, str], status: str
) -> None:
    before = total(route="none", status=status)

    TestClient(Measured(JSONResponse({}, 503, headers))).get("/")

    assert total(route="none", status=status) == before + 1


def test_metrics_are_not_where_users_are(api: TestClient) -> None:
    assert api.get("/metrics").status_code == 404
    assert "/metrics" not in api.get("/openapi.json").json()["paths"]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[Any]]]:
    """What the requests so far have logged, a line each."""
    caplog.set_level("INFO", logger="api.http.request_metrics")
    stream = io.StringIO()
    handler = logs.handler("json", stream)
    logging.getLogger("api.http.request_metrics").addHandler(handler)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logging.getLogger("api.http.request_metrics").removeHandler(handler)


def test_each_request_has_a_line_with_its_id_and_probes_have_none(
    api: TestClient, lines: Callable[[], list[Any]]
) -> None:
    api.get("/healthz")
    api.get("/v1/files/file-1", headers={"x-request-id": "mine"})

    [line] = lines()
    assert line["message"] == "GET /v1/files/file-1"
    assert (line["request_id"], line["status"], line["route"]) == ("mine", 404, "/v1/files/{file_id}")


def test_a_request_that_crashed_has_such_a_line_too(house: House, lines: Callable[[], list[Any]]) -> None:
    client = house.client(house.key)
    house.app.state.service = None

    assert client.get("/v1/files", headers={"x-request-id": "mine"}).status_code == 500

    [line] = lines()
    assert (line["request_id"], line["status"]) == ("mine", 500)
