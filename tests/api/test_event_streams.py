"""What proxies do to responses."""

import ast
from pathlib import Path

import pytest

from core.asgi import UNBUFFERED
from tests.api.conftest import House

ROOT = Path(__file__).parents[2]


def event_streams() -> list[tuple[str, ast.Call]]:
    """Each call in the service that makes a response of server-sent events."""
    return [
        (f"{file.relative_to(ROOT)}:{node.lineno}", node)
        for folder in ("api", "worker")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        for option in node.keywords
        if option.arg == "media_type"
        and isinstance(option.value, ast.Constant)
        and option.value.value == "text/event-stream"
    ]


def test_no_event_stream_is_buffered_by_a_proxy() -> None:
    streams = event_streams()
    headers = {
        place: [ast.unparse(of.value) for of in call.keywords if of.arg == "headers"]
        for place, call in streams
    }

    assert UNBUFFERED["x-accel-buffering"] == "no"
    assert len(streams) >= 3
    assert [place for place, given in headers.items() if given != ["UNBUFFERED"]] == []


@pytest.mark.parametrize(
    ("path", "headers"),
    [("/regraft/v1/models", {}), ("/anything", {"x-forwarded-prefix": "/regraft"})],
)
def test_a_proxy_that_serves_the_service_below_a_path_is_named(
    house: House, path: str, headers: dict[str, str]
) -> None:
    response = house.client(house.key).get(path, headers=headers)

    assert response.status_code == 404
    assert "a separate host name" in response.json()["error"]["message"]


def test_another_address_that_does_not_exist_says_nothing_of_proxies(house: House) -> None:
    response = house.client(house.key).get("/v1/nothing")

    assert response.status_code == 404
    assert "proxy" not in response.json()["error"]["message"]
