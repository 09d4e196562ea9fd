"""Named graders: versions by content, golden cases, and references in place of specifications."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import event
from starlette.testclient import TestClient

from api.http.stored_graders import MAX_REFERENCES
from core import golden_cases, stored_graders
from core.database.tables import GraderVersion, StoredGrader
from graders.types import Grade, Item, Sample
from tests.api.conftest import GRADER, House
from tests.present import untyped

GRADERS = "/v1/regraft/graders"
UNNAMED = {name: value for name, value in GRADER.items() if name != "name"}
SECRET = {
    "type": "endpoint",
    "name": "mine",
    "url": "https://8.8.8.8/score",
    "headers": {"X-Api-Key": "secret"},
}


def save(
    api: TestClient, grader: dict[str, Any] = GRADER, name: str = "close", **fields: Any
) -> dict[str, Any]:
    answer = api.post(GRADERS, json={"name": name, "grader": grader} | fields)
    assert answer.status_code == 200, answer.text
    saved: dict[str, Any] = answer.json()
    return saved


def case(text: str = "4", answer: str = "4", expect: Any = 1.0, **fields: Any) -> dict[str, Any]:
    return {"sample": {"output_text": text}, "item": {"answer": answer}, "expect": expect} | fields


def add(api: TestClient, *cases: dict[str, Any], name: str = "close") -> list[dict[str, Any]]:
    answer = api.post(f"{GRADERS}/{name}/cases", json={"cases": list(cases)})
    assert answer.status_code == 201, answer.text
    added: list[dict[str, Any]] = answer.json()["data"]
    return added


def versions(api: TestClient, name: str = "close") -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = api.get(f"{GRADERS}/{name}/versions").json()["data"]
    return listed


def escaped(body: Any) -> bytes:
    """JSON in which the type of a reference is not readable as such."""
    return json.dumps(body).replace('"stored"', r'"\u0073tored"').encode()


# Versions.


@pytest.mark.both_databases
def test_other_content_is_a_new_version_and_equal_content_is_the_same(api: TestClient) -> None:
    first = save(api, note="as it was")
    second = save(api, GRADER | {"operation": "ilike"})
    again = save(api, dict(reversed(GRADER.items())))

    assert first["version"] == again["version"] != second["version"]
    assert first["version"] == stored_graders.version_of(GRADER)
    assert [one["version"] for one in versions(api)] == [second["version"], first["version"]]
    assert [one["is_current"] for one in versions(api)] == [False, True]
    assert [one["note"] for one in versions(api)] == ["", "as it was"]
    assert (again["versions"], again["grader"]) == (2, GRADER)


def test_a_grader_without_a_name_is_one_version_however_often_it_is_saved(api: TestClient) -> None:
    multi = {"type": "multi", "graders": {"a": UNNAMED}, "calculate_output": "a"}

    saved = [save(api, multi), save(api, multi)]

    assert saved[0]["versions"] == saved[1]["versions"] == 1
    assert saved[0]["grader"]["name"] == "close"
    assert saved[0]["grader"]["graders"]["a"]["name"] == "a"


@pytest.mark.both_databases
def test_a_version_is_found_by_its_first_characters(api: TestClient) -> None:
    saved = save(api)

    found = api.get(f"{GRADERS}/close/versions/{saved['version'][:8]}").json()

    assert (found["id"], found["grader"]) == (saved["version"], GRADER)
    assert api.get(f"{GRADERS}/close/versions/{saved['version'][:7]}").status_code == 404


@pytest.mark.both_databases
def test_an_ambiguous_beginning_of_a_version_is_refused(house: House, api: TestClient) -> None:
    saved = save(api)
    with house.database.write() as session:
        grader = stored_graders.get(session, house.project.id, "close")
        other = saved["version"][:10] + "x" * 54
        session.add(GraderVersion(grader_id=grader.id, version=other, spec=GRADER, bytes=1))

    answer = api.get(f"{GRADERS}/close/versions/{saved['version'][:8]}")

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "version")


@pytest.mark.both_databases
def test_a_deleted_grader_is_gone_with_its_versions_and_cases(house: House, api: TestClient) -> None:
    save(api)
    add(api, case())

    assert api.delete(f"{GRADERS}/close").json()["name"] == "close"

    assert api.get(f"{GRADERS}/close").json()["error"]["code"] == "grader_not_found"
    assert (save(api)["versions"], save(api)["cases"]) == (1, 0)


def test_a_version_can_be_deleted_unless_it_is_the_current_one(api: TestClient) -> None:
    first, second = save(api), save(api, GRADER | {"operation": "ilike"})

    refused = api.delete(f"{GRADERS}/close/versions/{second['version']}")
    assert api.delete(f"{GRADERS}/close/versions/{first['version']}").json()["id"] == first["version"]

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "version")
    assert [one["version"] for one in versions(api)] == [second["version"]]


@pytest.mark.both_databases
def test_lists_are_paged(api: TestClient) -> None:
    for name in ("a", "b", "c"):
        save(api, name=name)
    first = api.get(GRADERS, params={"limit": 2}).json()
    api.delete(f"{GRADERS}/b")

    rest = api.get(GRADERS, params={"after": first["data"][-1]["id"]}).json()

    assert ([one["name"] for one in first["data"]], first["has_more"]) == (["c", "b"], True)
    assert ([one["name"] for one in rest["data"]], rest["has_more"]) == (["a"], False)


def test_secrets_are_masked_and_a_mask_is_not_saved(house: House, api: TestClient) -> None:
    with house.database.write() as session:
        hashed = stored_graders.version_of(SECRET)
        grader = StoredGrader(project_id=house.project.id, name="mine", version=hashed)
        session.add(grader)
        session.flush()
        session.add(GraderVersion(grader_id=grader.id, version=hashed, spec=SECRET, bytes=1))
    shown = api.get(f"{GRADERS}/mine").json()["grader"]

    answer = api.post(GRADERS, json={"name": "mine", "grader": shown})

    assert shown["headers"] == {"X-Api-Key": "***"}
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "grader.headers.X-Api-Key")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "a b", "grader": GRADER}, "name"),
        ({"name": "a", "grader": GRADER | {"colour": "red"}}, "grader.colour"),
        ({"name": "a", "grader": {"type": "stored", "name": "close"}}, "grader.type"),
        ({"name": "a", "grader": GRADER, "note": "\0"}, "note"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_the_name_of_its_field(
    api: TestClient, body: dict[str, Any], param: str
) -> None:
    answer = api.post(GRADERS, json=body)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_specification_that_is_too_large_is_refused(api: TestClient) -> None:
    answer = api.post(GRADERS, json={"name": "a", "grader": GRADER | {"reference": "x" * (520 << 10)}})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "grader")


@pytest.mark.both_databases
def test_stored_graders_count_as_storage(house: House, api: TestClient) -> None:
    house.limit(storage_bytes=600)
    save(api)

    answer = api.post(f"{GRADERS}/close/cases", json={"cases": [case(text="x" * 600)]})

    assert answer.json()["error"]["code"] == "insufficient_quota"
    assert api.get(f"{GRADERS}/close/cases").json()["data"] == []


def test_each_change_is_in_the_audit_log(house: House, api: TestClient) -> None:
    first = save(api)
    save(api)
    save(api, GRADER | {"operation": "ilike"})
    [added] = add(api, case())
    api.delete(f"{GRADERS}/close/cases/{added['id']}")
    api.delete(f"{GRADERS}/close/versions/{first['version']}")
    api.delete(f"{GRADERS}/close")

    entries = api.get("/v1/organization/audit_logs", params={"limit": 7}).json()["data"]

    assert [entry["type"] for entry in reversed(entries)][1:] == [
        "grader.saved",
        "grader.saved",
        "grader.cases_added",
        "grader.case_deleted",
        "grader.version_deleted",
        "grader.deleted",
    ]
    assert entries[0]["target"] == first["id"]


# Golden cases.


@pytest.mark.both_databases
def test_a_case_of_the_same_answer_and_row_replaces_the_expectation_of_the_first(api: TestClient) -> None:
    save(api)
    [first] = add(api, case(note="right", rollout_id="rollout_1"))

    [second] = add(api, case(expect={"min": 0.5}, note="at least half"))

    assert second == first | {"expect": {"min": 0.5, "max": None}, "note": "at least half"}
    assert first["expect"] == {"min": 1.0, "max": 1.0}
    assert api.get(f"{GRADERS}/close/cases").json()["data"] == [second]


@pytest.mark.parametrize(
    ("expect", "param"),
    [
        ("1", "cases[0].expect"),
        ({}, "cases[0].expect"),
        ({"min": 1, "max": 0}, "cases[0].expect"),
        ({"least": 1}, "cases[0].expect"),
        (None, "cases[0].expect"),
    ],
)
def test_an_expectation_that_is_none_is_refused(api: TestClient, expect: Any, param: str) -> None:
    save(api)

    answer = api.post(f"{GRADERS}/close/cases", json={"cases": [case(expect=expect)]})

    assert answer.status_code == 400
    assert str(answer.json()["error"]["param"]).startswith(param)


def test_a_range_that_is_none_is_refused_with_its_own_reason(api: TestClient) -> None:
    save(api)

    answer = api.post(f"{GRADERS}/close/cases", json={"cases": [case(expect={"min": 1, "max": 0})]})

    error = answer.json()["error"]
    assert error["message"] == "Invalid value for 'cases[0].expect': min may be at most max."
    assert (error["param"], error["code"]) == ("cases[0].expect", "invalid_value")


@pytest.mark.parametrize(
    "cases",
    [
        [case(text=f"{number}") for number in range(golden_cases.MAX_CASES + 1)],
        [case(text="x" * golden_cases.MAX_CASE_BYTES)],
    ],
)
def test_too_many_and_too_large_cases_are_refused(api: TestClient, cases: list[Any]) -> None:
    save(api)

    answer = api.post(f"{GRADERS}/close/cases", json={"cases": cases})

    assert answer.status_code == 400
    assert "cases" in answer.json()["error"]["param"]


@pytest.mark.parametrize("field", ["item", "output_json", "output_tools"])
def test_a_case_that_no_answer_could_show_is_refused(api: TestClient, field: str) -> None:
    save(api)
    deep: Any = []
    for _ in range(150):
        deep = [deep]
    sample = {"output_text": "4"}
    nested = {
        "item": case() | {"item": {"a": deep}},
        "output_json": case() | {"sample": sample | {"output_json": deep}},
        "output_tools": case() | {"sample": sample | {"output_tools": [{"a": deep}]}},
    }

    answer = api.post(f"{GRADERS}/close/cases", json={"cases": [nested[field]]})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cases[0]")
    assert api.get(f"{GRADERS}/close/cases").json()["data"] == []


def test_more_cases_than_a_check_runs_are_refused(api: TestClient) -> None:
    save(api)
    add(api, *[case(text=f"{number}") for number in range(golden_cases.MAX_CASES)])

    answer = api.post(f"{GRADERS}/close/cases", json={"cases": [case(text="one more")]})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cases")
    assert api.get(f"{GRADERS}/close").json()["cases"] == golden_cases.MAX_CASES


# Checks.


@pytest.mark.both_databases
def test_a_check_says_of_each_case_whether_its_score_is_as_expected(api: TestClient) -> None:
    saved = save(api)
    cases = add(
        api,
        case(),
        case(text="5"),
        case(text="6", expect={"max": 0.5}),
        {"sample": {"output_text": "7"}, "expect": {"min": 0}},
    )

    checked = api.post(f"{GRADERS}/close/check", json={}).json()

    assert (checked["version"], checked["passed"], checked["failed"]) == (saved["version"], 2, 2)
    assert [(one["case_id"], one["score"], one["passed"]) for one in checked["results"]] == [
        (cases[0]["id"], 1.0, True),
        (cases[1]["id"], 0.0, False),
        (cases[2]["id"], 0.0, True),
        (cases[3]["id"], None, False),
    ]
    assert checked["results"][3]["errors"] == ["invalid_variable_error"]


def test_a_check_runs_an_earlier_version_or_one_that_is_not_saved(api: TestClient) -> None:
    first = save(api)
    save(api, GRADER | {"operation": "ne"})
    add(api, case())

    def passed(**body: Any) -> int:
        checked = api.post(f"{GRADERS}/close/check", json=body).json()
        return int(checked["passed"])

    assert passed() == 0
    assert passed(version=first["version"][:12]) == 1
    assert passed(grader=GRADER) == 1
    assert passed(grader={"type": "stored", "name": "close", "version": first["version"]}) == 1
    both = api.post(f"{GRADERS}/close/check", json={"grader": GRADER, "version": first["version"]})
    assert both.status_code == 400


def test_a_sample_of_a_case_may_have_json_and_tools(api: TestClient) -> None:
    save(api, GRADER | {"input": "{{sample.output_json.a}}{{sample.output_tools[0].function.name}}"})
    sample = {"output_text": "", "output_json": {"a": "4"}, "output_tools": [{"function": {"name": "!"}}]}
    add(api, {"sample": sample, "item": {"answer": "4!"}, "expect": 1})

    assert api.post(f"{GRADERS}/close/check", json={}).json()["passed"] == 1


def test_a_grader_without_cases_is_not_checked(api: TestClient) -> None:
    save(api)

    answer = api.post(f"{GRADERS}/close/check", json={})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "grader_name")


def test_a_check_ends_after_its_time_and_says_which_cases_it_did_not_reach(
    house: House, api: TestClient
) -> None:
    house.app.state.service = replace(house.app.state.service, check_seconds=0.0)
    save(api)
    add(api, case())

    [result] = api.post(f"{GRADERS}/close/check", json={}).json()["results"]

    assert (result["score"], result["passed"]) == (None, False)
    assert "took too long" in result["reason"]


# References.


def reference(**fields: Any) -> dict[str, Any]:
    return {"type": "stored", "name": "close"} | fields


def test_a_job_has_the_content_and_the_version_of_its_stored_grader(
    api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    first = save(api)
    save(api, GRADER | {"operation": "ilike"})

    job = create_job(reinforcement={"grader": reference(version=first["version"][:8])})
    api.delete(f"{GRADERS}/close")

    made = api.get(f"/v1/fine_tuning/jobs/{job['id']}").json()["method"]["reinforcement"]
    assert made["grader"] == GRADER
    assert made["stored_grader"] == {"name": "close", "version": first["version"]}
    request = api.get(f"/v1/regraft/jobs/{job['id']}/request").json()
    assert api.post("/v1/fine_tuning/jobs", json=request).status_code == 200


def test_a_reference_without_a_version_is_to_the_current_one(
    api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    save(api)
    second = save(api, GRADER | {"operation": "ilike"})

    method = create_job(reinforcement={"grader": reference()})["method"]["reinforcement"]

    assert method["stored_grader"]["version"] == second["version"]
    assert method["grader"]["operation"] == "ilike"


@pytest.mark.parametrize(
    ("grader", "status", "param"),
    [
        (reference(name="unknown"), 404, "name"),
        (reference(version="0123456789"), 404, "name"),
        (reference(version="no hash"), 400, "version"),
        (reference(grader=GRADER), 400, "grader"),
        ({"type": "stored"}, 400, "name"),
    ],
)
def test_a_reference_that_is_none_is_refused_by_the_name_of_its_field(
    api: TestClient,
    job_request: Callable[..., dict[str, Any]],
    grader: dict[str, Any],
    status: int,
    param: str,
) -> None:
    save(api)
    request = job_request(reinforcement={"grader": grader})
    bodies = {
        "/v1/fine_tuning/jobs": ("method.reinforcement.grader", request),
        "/v1/regraft/estimate": ("method.reinforcement.grader", request),
        "/v1/regraft/previews": ("method.reinforcement.grader", request),
        "/v1/regraft/jobs/validate": ("job.method.reinforcement.grader", {"job": request}),
        "/v1/fine_tuning/alpha/graders/validate": ("grader", {"grader": grader}),
        "/v1/fine_tuning/alpha/graders/run": ("grader", {"grader": grader, "model_sample": "4"}),
        "/v1/regraft/files/file-1/profile": ("grader", {"grader": grader}),
        "/v1/regraft/jobs/ftjob-1/regrade": ("grader", {"grader": grader}),
        "/v1/regraft/pipelines": (
            "stages[0].job.method.reinforcement.grader",
            {"stages": [{"name": "a", "job": request}]},
        ),
        "/v1/evals": (
            "testing_criteria[0]",
            {
                "data_source_config": {"type": "custom", "item_schema": {"type": "object"}},
                "testing_criteria": [grader],
            },
        ),
    }

    answers = {url: api.post(url, json=body) for url, (_, body) in bodies.items()}

    assert {url: (one.status_code, one.json()["error"]["param"]) for url, one in answers.items()} == {
        url: (status, f"{where}.{param}") for url, (where, _) in bodies.items()
    }


def test_another_projects_grader_is_unknown(house: House, api: TestClient) -> None:
    save(api)

    theirs = house.client(house.other_key).post(
        "/v1/fine_tuning/alpha/graders/run", json={"grader": reference(), "model_sample": "4"}
    )

    assert theirs.json()["error"]["code"] == "grader_not_found"


def test_a_stored_grader_is_run_and_validated(api: TestClient) -> None:
    save(api)

    ran = api.post(
        "/v1/fine_tuning/alpha/graders/run",
        json={"grader": reference(), "model_sample": "4", "item": {"answer": "4"}},
    )
    validated = api.post("/v1/fine_tuning/alpha/graders/validate", json={"grader": reference()})

    assert ran.json()["reward"] == 1.0
    assert validated.json() == {"grader": GRADER}


def test_an_eval_keeps_the_content_of_its_stored_criteria(api: TestClient) -> None:
    save(api)

    made = api.post(
        "/v1/evals",
        json={
            "data_source_config": {"type": "custom", "item_schema": {"type": "object"}},
            "testing_criteria": [reference(), GRADER | {"name": "other"}],
        },
    )

    assert made.json()["testing_criteria"] == [GRADER, GRADER | {"name": "other"}]


@pytest.mark.parametrize("sent", [{}, {"name": "close"}, {"name": "close", "version": "f" * 64}])
@pytest.mark.parametrize("encode", [escaped, lambda body: json.dumps(body).encode("utf-16")])
def test_no_request_says_itself_what_a_reference_stands_for(
    api: TestClient,
    job_request: Callable[..., dict[str, Any]],
    sent: dict[str, Any],
    encode: Callable[[Any], bytes],
) -> None:
    save(api)
    forged = {"type": "stored", **sent, "grader": GRADER | {"operation": "ilike"}}
    request = job_request(reinforcement={"grader": forged})

    answers = [
        api.post(path, content=encode(body), headers={"content-type": "application/json"})
        for path, body in [
            ("/v1/fine_tuning/jobs", request),
            ("/v1/regraft/estimate", request),
            ("/v1/regraft/pipelines", {"stages": [{"name": "a", "job": request}]}),
        ]
    ]

    assert [answer.status_code for answer in answers] == [400, 400, 400]


def test_a_reference_with_escapes_is_one(api: TestClient) -> None:
    save(api)

    answer = api.post(
        "/v1/fine_tuning/alpha/graders/validate",
        content=escaped({"grader": reference()}),
        headers={"content-type": "application/json"},
    )

    assert answer.json() == {"grader": GRADER}


def test_references_stand_for_no_more_than_a_request_may_have(api: TestClient) -> None:
    save(api, GRADER | {"reference": "x" * (500 << 10)})

    answer = api.post("/v1/evals", json=eval_of([reference()] * 5))

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "testing_criteria[4]")
    assert "2,097,152 bytes" in answer.json()["error"]["message"]


def test_a_request_has_a_limited_number_of_references(api: TestClient) -> None:
    save(api)

    answer = api.post("/v1/evals", json=eval_of([reference()] * (MAX_REFERENCES + 1)))

    assert (answer.status_code, answer.json()["error"]["param"]) == (
        400,
        f"testing_criteria[{MAX_REFERENCES}]",
    )
    assert "at most 200" in answer.json()["error"]["message"]


def test_a_version_that_is_named_several_times_is_read_once(house: House, api: TestClient) -> None:
    save(api)
    statements: list[str] = []
    event.listen(house.database.engine, "before_cursor_execute", lambda *call: statements.append(call[2]))

    api.post("/v1/evals", json=eval_of([reference()] * 3))

    assert sum("FROM grader_versions" in statement for statement in statements) == 1


def eval_of(criteria: list[dict[str, Any]]) -> dict[str, Any]:
    config = {"type": "custom", "item_schema": {"type": "object"}}
    return {"data_source_config": config, "testing_criteria": criteria}


def test_a_pipeline_pins_the_version_of_its_stored_graders(
    api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    saved = save(api)
    request = job_request(reinforcement={"grader": reference(), "shadow_grader": reference()})
    sample = {"model": "tiny", "file": request["training_file"], "grader": reference()}

    made = api.post(
        "/v1/regraft/pipelines",
        json={"stages": [{"name": "a", "job": request}, {"name": "b", "sample": sample}]},
    )

    job, sampled = (stage["spec"] for stage in made.json()["stages"])
    graders = [job["method"]["reinforcement"][name] for name in ("grader", "shadow_grader")]
    assert graders == [reference(version=saved["version"])] * 2
    assert sampled["grader"] == GRADER


def test_a_row_that_looks_like_a_reference_stays_as_it_is(api: TestClient) -> None:
    item = {"grader": {"type": "stored", "name": "unknown"}, "answer": '{"name":"unknown","type":"stored"}'}
    grader = GRADER | {"input": "{{item.grader}}"}

    ran = api.post(
        "/v1/fine_tuning/alpha/graders/run", json={"grader": grader, "model_sample": "4", "item": item}
    )

    assert untyped(ran.json())["metadata"]["errors"]["other_error"] is False


class Counting:
    """Graders that note how many of them, and how many runs of the service, are under way at once."""

    name, type = "counts", "string_check"

    def __init__(self, house: House) -> None:
        self.admission = house.app.state.service.admission
        self.under_way = 0
        self.seen: set[tuple[int, int]] = set()

    @asynccontextmanager
    async def open(self, spec: Any, **more: Any) -> "AsyncIterator[Counting]":
        yield self

    def check(self, spec: Any, param: str = "grader") -> None:
        pass

    async def grade(self, sample: Sample, item: Item) -> Grade:
        self.under_way += 1
        await asyncio.sleep(0)  # the others begin
        self.seen.add((self.under_way, self.admission.grader_runs.in_use))
        await asyncio.sleep(0)
        self.under_way -= 1
        return Grade(1.0)


def test_a_check_is_one_run_of_the_project_and_grades_eight_cases_at_a_time(
    house: House, api: TestClient
) -> None:
    save(api)
    add(api, *[case(text=f"{number}") for number in range(20)])
    counting = Counting(house)
    house.app.state.service = replace(house.app.state.service, all_backends=untyped(counting))

    assert api.post(f"{GRADERS}/close/check", json={}).json()["passed"] == 20

    assert max(count for count, _ in counting.seen) == 8
    assert {runs for _, runs in counting.seen} == {1}
