"""The OpenAPI document tells the truth: whatever is sent, the answer is one that it describes, and no crash.

What is sent is made from the document itself, valid and invalid, so every route in it is covered as it appears.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, reject, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import DrawFn, composite
from hypothesis.strategies._internal.strategies import SearchStrategy
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.errors import UnsupportedSchema
from schemathesis.generation.case import Case
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.specs.openapi.schemas import OpenApiSchema
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from api.app import MAX_JSON_BYTES, create_app
from api.http.openapi import refusals_of
from core.registry import Registry
from core.settings import Settings
from graders.backends import Backends
from tests.api.conftest import GRADER, OF_EPISODES, House
from tests.budgets import examples
from tests.present import untyped

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
ROOT = Path(__file__).parents[2]
# Read, because to make it from the code takes seconds; tests/test_docs_generated.py tells when the two differ.
DOCUMENT: dict[str, Any] = json.loads((ROOT / "sdk/openapi.json").read_text())
# For as long as the job or the server lasts: test_stream.py, test_project_stream.py.
ENDLESS = ("/v1/regraft/jobs/{job_id}/stream", "/v1/regraft/stream")
OPERATIONS = [
    (method, path) for path, found in DOCUMENT["paths"].items() for method in found if path not in ENDLESS
]
every_operation = pytest.mark.parametrize(
    ("method", "path"), OPERATIONS, ids=[f"{method} {path}" for method, path in OPERATIONS]
)


class CurrentApp(Starlette):
    """Passes requests on to the application of the running test.

    For each application schemathesis reads the source of its routes, which takes as long as the requests of a test,
    and starts a lifespan that lasts as long as the process.
    """

    app: FastAPI

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await super().__call__(scope, receive, send)
        else:
            await self.app(scope, receive, send)


@pytest.fixture(scope="module")
def schema() -> OpenApiSchema:
    # The routes need none of the parts that requests need.
    app = create_app(
        Settings(data_dir=Path()),
        untyped(None),
        untyped(None),
        Registry(models={}),
        Backends.none(),
        lambda *wake: True,
    )
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    schema.app = CurrentApp(routes=app.routes)
    return schema


@pytest.fixture
def known(house: House, create_job: Callable[..., dict[str, Any]]) -> dict[Any, Any]:
    """Values of what is there, by the names that paths, queries and bodies give them."""
    job = create_job()
    saved = house.client(house.key).post("/v1/regraft/graders", json={"name": "close", "grader": GRADER})
    body = {name: job[name] for name in ("training_file", "validation_file", "method")}
    return {
        "project_id": house.project.id,
        "job_id": job["id"],
        "file_id": job["training_file"],
        "model": "tiny",
        "grader": GRADER,
        "grader_name": "close",
        "version": saved.json()["version"],
        "metadata": None,
    } | body


@every_operation
@pytest.mark.parametrize("database_kind", ["postgres"])  # it is the stricter one
def test_every_answer_is_as_documented(
    house: House, known: dict[Any, Any], schema: OpenApiSchema, method: Any, path: Any
) -> None:
    schema.app.app = house.app
    for mode in GenerationMode:
        send_and_check(schema, house.key, known, method, path, mode)


def send_and_check(
    schema: OpenApiSchema, key: str, known: dict[Any, Any], method: Any, path: Any, mode: GenerationMode
) -> None:
    """Every case as it was made, and again with what is there in it, so that more than the first check is met."""
    headers = {"Authorization": f"Bearer {key}"}
    sent = 0

    @settings(
        max_examples=examples(2, 20),
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=drawn(schema[path][method].as_strategy(mode)))
    def check(case: Any) -> None:
        nonlocal sent
        sent += 1
        case.call_and_validate(headers=headers, checks=CHECKS, timeout=300)
        if method != "delete" and name_what_is_there(case, known):
            case.call_and_validate(headers=headers, checks=CHECKS, timeout=300)

    try:
        check()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE, "every operation can be used"
    else:
        assert sent


@composite
def drawn(draw: DrawFn, cases: SearchStrategy[Case[Any]]) -> Case[Any]:
    """What is invalid in a grader of graders of graders … cannot always be said; another draw can."""
    try:
        return draw(cases)
    except UnsupportedSchema:
        reject()


@every_operation
def test_every_refusal_that_all_such_routes_document_is_real(
    house: House, known: dict[Any, Any], method: Any, path: Any
) -> None:
    """404 is in test_tenancy.py: it asks every route for ids that are not there."""
    operation = DOCUMENT["paths"][path][method]
    url = path.format_map({name: known.get(name, "x") for name in re.findall(r"{(\w+)}", path)})
    refused = set(refusals_of(method, path, operation)) - {404}
    if "multipart/form-data" in operation.get("requestBody", {}).get("content", {}):
        refused -= {400, 413}  # read while it arrives: test_files.py and test_uploads.py
    if path.startswith(OF_EPISODES):
        refused -= {400, 413}  # the key comes first: test_episodes.py
    for status in sorted(refused, key=lambda one: one == 429):  # it leaves nothing for further requests
        if status == 401:
            answer = house.client().request(method, url)
        elif status == 403:
            answer = house.client(house.new_key("read")).request(method, url)
        elif status == 429:
            house.limit(requests_per_minute=1)
            answer = [house.client(house.key).request(method, url) for _ in range(2)][-1]
            house.limit()
        elif status == 400:
            query = {p["name"]: "\0" for p in operation.get("parameters", ()) if p["in"] == "query"}
            answer = house.client(house.key).request(method, url, params=query, json=[])
        else:
            answer = house.client(house.key).request(method, url, content=b" " * (MAX_JSON_BYTES + 1))

        assert answer.status_code == status


@pytest.mark.parametrize(
    "path",
    [
        path
        for path, found in DOCUMENT["paths"].items()
        if any(one["name"] == "limit" for one in found.get("get", {}).get("parameters", ()))
    ],
)
def test_a_limit_below_one_is_the_smallest_page(house: House, known: dict[Any, Any], path: str) -> None:
    url = path.format_map({name: known.get(name, "x") for name in re.findall(r"{(\w+)}", path)})
    client = house.client(house.key)

    answers = [client.get(url, params={"limit": limit}) for limit in (1, 0, -1)]

    assert [answer.status_code for answer in answers] == [answers[0].status_code] * 3
    assert len({answer.text for answer in answers}) == 1


def test_the_refusals_of_damaged_and_of_lost_contents_are_documented() -> None:
    """test_files.py has the answers themselves: no request that is made from the document damages the store."""
    documented = DOCUMENT["paths"]["/v1/files/{file_id}/content"]["get"]["responses"]

    assert {"404", "410", "503"} <= documented.keys()


@pytest.mark.both_databases
def test_an_id_with_a_nul_character_is_none_on_either_database(house: House) -> None:
    answer = house.client(house.key).get("/v1/fine_tuning/jobs/ftjob-%00")

    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "invalid_request_error")


def name_what_is_there(case: Any, known: dict[Any, Any]) -> bool:
    """False: the case has no place for any of it."""
    changed = False
    for place in (case.path_parameters, case.query, case.body):
        mine = {name: known[name] for name in place if name in known} if isinstance(place, dict) else {}
        if mine:
            place.update(mine)
            changed = True
    return changed
