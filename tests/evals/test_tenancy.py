"""A second project's key must not tell a created eval of the first from one that was never there."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from openai import OpenAI
from starlette.testclient import TestClient

from tests.api.test_tenancy import BODIES
from tests.evals.conftest import CONFIG, House, completions

if TYPE_CHECKING:
    from httpx2 import Response

pytestmark = pytest.mark.both_databases

CANCEL = ("post", "/v1/evals/{eval_id}/runs/{run_id}")  # of OpenAI's specification, left out of ours


@pytest.fixture
def rows(client: OpenAI, new_eval: Callable[..., Any], house: House) -> dict[str, Any]:
    """A created eval with a finished run, by the names that ids have in paths."""
    made = new_eval()
    run = client.evals.runs.create(made.id, data_source=completions(2))
    house.work()
    [item, *_] = client.evals.runs.output_items.list(run.id, eval_id=made.id).data
    return {"eval_id": made.id, "run_id": run.id, "output_item_id": item.id}


def routes(house: House) -> list[Any]:
    paths = house.app.openapi()["paths"]
    listed = [(method, path) for path, methods in paths.items() if "{eval_id}" in path for method in methods]
    return [*listed, CANCEL]


def ask(client: TestClient, method: str, path: str, rows: dict[Any, Any]) -> "Response":
    query = "?runs={run_id},{run_id}" if path.endswith("/compare") else ""
    return client.request(method, (path + query).format(**rows), json=BODIES.get((method, path)))


def test_what_belongs_to_another_does_not_exist(house: House, rows: dict[Any, Any], client: OpenAI) -> None:
    theirs = house.client(house.other_key)

    answers = {(method, path): ask(theirs, method, path, rows) for method, path in routes(house)}

    assert len(answers) == 12
    assert {route: answer.status_code for route, answer in answers.items()} == dict.fromkeys(answers, 404)
    assert client.evals.runs.retrieve(rows["run_id"], eval_id=rows["eval_id"]).status == "completed"


def test_the_answer_is_the_same_as_for_what_never_was(house: House, rows: dict[Any, Any]) -> None:
    theirs = house.client(house.other_key)
    unknown = {name: "x" * len(value) for name, value in rows.items()}

    for method, path in routes(house):
        foreign = ask(theirs, method, path, rows).text
        for name, value in rows.items():
            foreign = foreign.replace(value, unknown[name])
        assert foreign == ask(theirs, method, path, unknown).text


def test_a_run_and_an_item_of_another_eval_of_ones_own_are_not_found(
    house: House, rows: dict[Any, Any], new_eval: Callable[..., Any]
) -> None:
    """An id under the wrong parent is an unknown one."""
    mine, elsewhere = house.client(house.key), rows | {"eval_id": new_eval().id}

    for method, path in routes(house):
        if "{run_id}" in path:
            assert ask(mine, method, path, elsewhere).status_code == 404, path
    assert ask(mine, "get", "/v1/evals/{eval_id}/runs/{run_id}", rows).status_code == 200


def test_the_same_routes_work_for_the_owner(house: House, rows: dict[Any, Any]) -> None:
    """Or the tests above would pass on a service that finds nothing at all."""
    mine = house.client(house.key)
    reading = [path for method, path in routes(house) if method == "get"]

    assert {path: ask(mine, "get", path, rows).status_code for path in reading} == dict.fromkeys(reading, 200)


def test_anothers_run_is_no_partner_of_a_comparison(
    house: House, rows: dict[Any, Any], new_eval: Callable[..., Any]
) -> None:
    theirs = house.openai(house.other_key)
    made = theirs.evals.create(data_source_config=CONFIG, testing_criteria=[_exact()])
    own = theirs.evals.runs.create(made.id, data_source=completions(1)).id

    answer = house.client(house.other_key).get(
        f"/v1/regraft/evals/{made.id}/compare", params={"runs": f"{own},{rows['run_id']}"}
    )

    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "runs")
    assert rows["eval_id"] not in answer.text


def test_anothers_rows_are_no_source_and_its_evals_no_cursor(
    house: House, rows: dict[Any, Any], client: OpenAI
) -> None:
    file = client.files.create(file=("rows.jsonl", b'{"item": {}, "sample": {}}'), purpose="evals").id
    theirs = house.client(house.other_key)
    made = theirs.post(
        "/v1/evals", json={"data_source_config": CONFIG, "testing_criteria": [_exact()]}
    ).json()
    source = {"type": "jsonl", "source": {"type": "file_id", "id": file}}

    refused = theirs.post(f"/v1/evals/{made['id']}/runs", json={"data_source": source})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "data_source.source.id")
    assert theirs.get("/v1/evals", params={"after": rows["eval_id"]}).status_code == 400
    assert theirs.get(f"/v1/evals/{made['id']}/runs", params={"after": rows["run_id"]}).status_code == 400
    assert [one["id"] for one in theirs.get("/v1/evals").json()["data"]] == [made["id"]]


def _exact() -> Any:
    return {
        "type": "string_check",
        "name": "said",
        "input": "{{sample.output_text}}",
        "reference": "x",
        "operation": "eq",
    }
