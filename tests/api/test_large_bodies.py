"""Large JSON bodies: read only for a valid key, and parsed a few at a time."""

import asyncio
import re
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.requests import Request

from api.app import SMALL_JSON_BYTES
from api.http.admission import Admission, ConcurrencyLimit
from api.http.large_bodies import BodyRejected, LargeBodies, body_is_read
from core.database.engine import Database
from core.errors import InvalidApiKey
from core.settings import Settings
from core.tenancy import keys
from tests.api.conftest import House

URL = "/v1/fine_tuning/alpha/graders/validate"
JSON = {"content-type": "application/json"}
# FastAPI answers 400 once it has tried to parse this.
NOT_JSON = b"[" * (SMALL_JSON_BYTES + 1)


def told(answer: httpx2.Response) -> tuple[int, str, dict[str, str]]:
    """All of an answer but what differs between any two requests."""
    headers = dict(answer.headers)
    del headers["x-request-id"], headers["openai-processing-ms"]
    return answer.status_code, answer.text, headers


@pytest.mark.parametrize("key", [None, "sk-that-opens-nothing"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_without_a_valid_key_is_not_parsed_and_refused_like_a_small_one(
    house: House, key: str | None, chunked: bool
) -> None:
    stranger = house.client(key)

    large = stranger.post(URL, content=iter([NOT_JSON]) if chunked else NOT_JSON, headers=JSON)

    assert large.status_code == 401
    assert told(large) == told(stranger.post(URL, content=b"{}", headers=JSON))


def test_a_large_body_for_another_tenant_is_not_parsed_either(house: House) -> None:
    with house.database.read() as session:
        other = keys.authenticate(session, house.other_key)[1].id

    large = house.client(house.key).post(URL, content=NOT_JSON, headers=JSON | {"OpenAI-Project": other})

    assert large.json()["error"]["code"] == "mismatched_project"


@pytest.mark.both_databases
def test_a_revoked_key_opens_no_large_body(house: House) -> None:
    with house.database.write() as session:
        keys.get(session, house.key_id()).revoked_at = 1

    assert "was revoked" in house.client(house.key).post(URL, content=NOT_JSON, headers=JSON).text


@pytest.mark.parametrize("path", ["/openai/responses", "/openai/deployments/tiny/chat/completions"])
def test_azures_paths_are_no_way_around(house: House, path: str) -> None:
    answer = house.client("sk-that-opens-nothing").post(path, content=NOT_JSON, headers=JSON)

    assert answer.status_code == 401


@pytest.mark.parametrize("key", ["first", "azure"])
@pytest.mark.both_databases
def test_a_large_body_with_a_key_is_parsed_and_its_places_are_free_afterwards(house: House, key: str) -> None:
    headers = {"Authorization": f"Bearer {house.key}"} if key == "first" else {"api-key": house.key}

    answer = house.client().post(URL, content=NOT_JSON, headers=JSON | headers)

    admission = house.app.state.service.admission
    assert answer.status_code == 400
    assert (admission.arriving_bodies.in_use, admission.parsed_bodies.in_use) == (0, 0)


def test_a_database_that_is_away_is_a_503_for_a_large_body_too(house: House) -> None:
    away = Database("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    house.app.state.service = replace(house.app.state.service, database=away)

    answer = house.client(house.key).post(URL, content=NOT_JSON, headers=JSON)

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")


def test_a_url_that_does_not_exist_is_still_404_without_a_key(house: House) -> None:
    assert house.client().post("/v1/nothing", content=NOT_JSON, headers=JSON).status_code == 404


async def owner(request: Request) -> str:
    """The key of these requests is the name of their project."""
    name = request.headers.get("authorization", "")
    if not name:
        raise InvalidApiKey("No key.")
    return name


class Endpoint:
    """Reads its body, does as `then` says, and answers when it may."""

    def __init__(self, then: str = "work") -> None:
        self.then = then
        self.parsed: list[str] = []
        self.may_answer = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            more = message.get("more_body", False)
        if message["type"] == "http.disconnect":
            return
        self.parsed.append(dict(scope["headers"])[b"authorization"].decode())
        if self.then == "watch for a disconnect":
            await receive()
        if self.then == "say so":
            body_is_read()
        if self.then == "stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await self.may_answer.wait()
        if self.then == "crash":
            raise RuntimeError("on purpose")


class Client:
    """Sends a body piece by piece, and counts what is read of it."""

    def __init__(self, *pieces: bytes, key: str = "a", announced: bool = True, whole: bool = True) -> None:
        self.pieces, self.whole = list(pieces), whole
        self.read = 0
        self.gone = asyncio.Event()
        length = [(b"content-length", b"%d" % sum(map(len, pieces)))] if announced else []
        headers = [(b"authorization", key.encode()), *length]
        self.scope = {"type": "http", "method": "POST", "path": "/v1/responses", "headers": headers}

    async def receive(self) -> dict[str, Any]:
        if not self.pieces:
            await self.gone.wait()
            return {"type": "http.disconnect"}
        self.read += 1
        body = self.pieces.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(self.pieces) or not self.whole}


async def ignored(message: Any) -> None:
    pass


def limited(endpoint: Endpoint, arriving: ConcurrencyLimit, parsed: ConcurrencyLimit) -> LargeBodies:
    streamed = re.compile("/v1/files")
    return LargeBodies(endpoint, small=100, streamed=streamed, owner=owner, arriving=arriving, parsed=parsed)


def share(places: int) -> ConcurrencyLimit:
    return ConcurrencyLimit("large request bodies", places=places, per_project=places, waiting=10)


def in_a_loop(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scene())


async def settled() -> None:
    """Everything that can go on without anybody's doing has done so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def ask(app: LargeBodies, *clients: Client) -> list[asyncio.Task[None]]:
    asked = [asyncio.create_task(app(client.scope, client.receive, ignored)) for client in clients]
    await settled()
    return asked


async def end(endpoint: Endpoint, asked: list[asyncio.Task[None]]) -> None:
    endpoint.may_answer.set()
    await asyncio.gather(*asked, return_exceptions=True)


@pytest.mark.parametrize(("announced", "read"), [(True, 0), (False, 3)])
def test_nothing_is_read_beyond_what_a_small_body_has_without_a_key(announced: bool, read: int) -> None:
    """A chunked body is known to be large when more than 100 bytes have arrived."""

    async def scene() -> None:
        client = Client(*[b"x" * 40] * 50, key="", announced=announced)
        with pytest.raises(BodyRejected) as refused:
            await limited(Endpoint(), share(1), share(1))(client.scope, client.receive, ignored)

        assert isinstance(refused.value.cause, InvalidApiKey)
        assert client.read == read

    in_a_loop(scene)


def test_a_small_body_is_read_without_a_key_and_does_not_wait() -> None:
    async def scene() -> None:
        endpoint = Endpoint()
        app = limited(endpoint, share(1), share(1))
        asked = await ask(app, Client(b"x" * 101), *[Client(b"x" * 100, key="") for _ in range(3)])

        assert endpoint.parsed == ["a", "", "", ""]
        await end(endpoint, asked)

    in_a_loop(scene)


def test_eight_large_bodies_are_parsed_at_once_and_four_of_a_project(tmp_path: Path) -> None:
    async def scene() -> None:
        endpoint = Endpoint()
        admission = Admission(Settings(data_dir=tmp_path))
        app = limited(endpoint, admission.arriving_bodies, admission.parsed_bodies)
        asked = await ask(app, *[Client(b"x" * 101, key=key) for key in "aaaaabbbbbc"])
        assert endpoint.parsed == list("aaaabbbb")

        asked[0].cancel()
        await settled()
        assert endpoint.parsed == list("aaaabbbbc")

        await end(endpoint, asked)
        assert sorted(endpoint.parsed) == list("aaaaabbbbbc")
        assert (admission.arriving_bodies.in_use, admission.parsed_bodies.in_use) == (0, 0)

    in_a_loop(scene)


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_is_not_read_on_until_it_has_a_place(announced: bool) -> None:
    async def scene() -> None:
        endpoint = Endpoint()
        slow, waiting = Client(b"x" * 101, whole=False), Client(b"x" * 101, b"x", announced=announced)
        asked = await ask(limited(endpoint, share(1), share(1)), slow, waiting)
        assert waiting.read == (0 if announced else 1)

        slow.gone.set()
        await settled()
        assert endpoint.parsed == ["a"]
        assert waiting.read == 2

        await end(endpoint, asked)

    in_a_loop(scene)


def test_bodies_that_arrive_slowly_keep_no_other_from_being_parsed() -> None:
    async def scene() -> None:
        endpoint = Endpoint()
        slow = [Client(b"x" * 101, key="s", whole=False) for _ in range(3)]
        app = limited(endpoint, share(4), share(1))
        asked = await ask(app, *slow, Client(b"x" * 101, key="a"))

        assert endpoint.parsed == ["a"]
        for client in slow:
            client.gone.set()
        await end(endpoint, asked)

    in_a_loop(scene)


@pytest.mark.parametrize("then", ["watch for a disconnect", "say so", "stream"])
def test_a_request_that_goes_on_for_minutes_holds_no_place(then: str) -> None:
    async def scene() -> None:
        endpoint = Endpoint(then)
        arriving, parsed = share(1), share(1)
        asked = await ask(limited(endpoint, arriving, parsed), *[Client(b"x" * 101) for _ in range(3)])

        assert endpoint.parsed == ["a"] * 3
        assert (arriving.in_use, parsed.in_use) == (0, 0)
        for task in asked:
            task.cancel()
        await end(endpoint, asked)

    in_a_loop(scene)


def test_a_request_that_crashes_leaves_its_places() -> None:
    async def scene() -> None:
        endpoint = Endpoint("crash")
        arriving, parsed = share(1), share(1)
        await end(endpoint, await ask(limited(endpoint, arriving, parsed), Client(b"x" * 101)))

        assert (arriving.in_use, parsed.in_use) == (0, 0)

    in_a_loop(scene)
