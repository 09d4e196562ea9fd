"""Stored answers of a job are scored by another grader, in the background, beside the scores of the job."""

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.testclient import TestClient

from core.database.tables import Project
from core.evals import regrades
from tests import factories
from tests.evals.conftest import EXACT, JUDGED, House
from tests.rollout_pages import store_page

# Two parts, of which the job's formula reads the first: whether the answer is the row's, and how near it is.
BOTH: Any = {
    "type": "multi",
    "name": "both",
    "graders": {
        "exact": EXACT,
        "near": {
            "type": "text_similarity",
            "name": "near",
            "input": "{{sample.output_text}}",
            "reference": "{{item.answer}}",
            "evaluation_metric": "fuzzy_match",
            "pass_threshold": 0.9,
        },
    },
    "calculate_output": "exact",
}
LENIENT = BOTH | {"calculate_output": "near"}


def answer(
    step: int, split: str, group: int, member: int, text: str, score: float | None, **more: Any
) -> dict[str, Any]:
    return {
        "step": step,
        "split": split,
        "group": group,
        "member": member,
        "line": group + 1,
        "messages": json.dumps([{"role": "user", "content": "Which color?"}]),
        "item": json.dumps({"answer": "green"}),
        "output_text": text,
        "output_reasoning": "",
        "prompt_tokens": 3,
        "completion_tokens": 1,
        "reasoning_tokens": 0,
        "finish_reason": "stop",
        "score": score,
        "reason": "",
        "sub_scores": {},
        "sub_reasons": {},
        "sub_errors": {},
        "sub_outputs": {},
    } | more


def store(house: House, job_id: str, step: int, split: str, answers: Sequence[dict[str, Any]]) -> None:
    with house.database.write() as session:
        session.add(store_page(house.blobs, job_id, step, split, answers))


@pytest.fixture
def api(house: House) -> TestClient:
    return house.client(house.key)


@pytest.fixture
def job_id(house: House) -> str:
    """A job with a training step of two groups, and its validation."""
    with house.database.write() as session:
        job = factories.job(
            session,
            session.get_one(Project, house.project.id),
            status="succeeded",
            body={"grader": BOTH, "hyperparameters": {}},
        )
    store(
        house,
        job.id,
        1,
        "train",
        [
            answer(1, "train", 0, 0, "green", 1.0),
            answer(1, "train", 0, 1, "greem", 0.0),
            answer(1, "train", 1, 0, "xyz", 0.0),
            answer(1, "train", 1, 1, "green", None),
        ],
    )
    store(house, job.id, 1, "valid", [answer(1, "valid", 0, 0, "green", 1.0)])
    return str(job.id)


def regraded(house: House, api: TestClient, job_id: str, grader: Any, **more: Any) -> Any:
    made = api.post(f"/v1/regraft/jobs/{job_id}/regrade", json={"grader": grader, **more})
    assert made.status_code == 201, made.text
    house.work()
    return api.get(f"/v1/regraft/jobs/{job_id}/regrades/{made.json()['id']}").json()


@pytest.mark.both_databases
def test_the_grader_of_the_job_gives_no_flips(
    house: House, api: TestClient, job_id: str, database_kind: str
) -> None:
    done = regraded(house, api, job_id, BOTH, split="valid")

    assert done["status"] == "completed"
    assert (done["answers"], done["graded"]) == (1, 1)
    compared = done["comparison"]
    assert (compared["same"], compared["now_passed"], compared["now_failed"], compared["changed_signs"]) == (
        1,
        0,
        0,
        0,
    )


def test_another_grader_is_compared_with_the_stored_scores(
    house: House, api: TestClient, job_id: str
) -> None:
    queued = api.post(
        f"/v1/regraft/jobs/{job_id}/regrade", json={"grader": LENIENT, "name": "lenient", "split": "train"}
    ).json()
    assert (queued["object"], queued["status"]) == ("regraft.regrade", "queued")
    assert (queued["answers"], queued["graded"], queued["comparison"]) == (4, 0, None)

    house.work()

    done = api.get(f"/v1/regraft/jobs/{job_id}/regrades/{queued['id']}").json()
    assert (done["status"], done["graded"], done["name"]) == ("completed", 4, "lenient")
    near = 0.8  # four of five letters
    assert done["comparison"] == {
        "answers": 4,
        "groups": 2,
        "before": {"graded": 3, "mean": pytest.approx(1 / 3), "passed": 1}
        | {"groups_with_signal": 1, "signal_by_group_size": {"2": 1.0}},
        "after": {"graded": 4, "mean": pytest.approx((1 + near + 0 + 1) / 4), "passed": 3}
        | {"groups_with_signal": 2, "signal_by_group_size": {"2": 1.0}},
        "higher": 1,
        "lower": 0,
        "same": 2,
        "gained": 1,
        "lost": 0,
        "now_passed": 1,
        "now_failed": 0,
        "changed_signs": 0,
        # The first group was taught 0.5 either way and is taught 0.1, the second 0 and 0.5.
        "centered_cosine": pytest.approx(0.1 / math.hypot(0.1, 0.5)),
        "rank_correlation": pytest.approx(0.866, abs=1e-3),
    }


def test_the_answers_are_listed_with_both_scores_and_by_change(
    house: House, api: TestClient, job_id: str
) -> None:
    done = regraded(house, api, job_id, LENIENT)
    path = f"/v1/regraft/jobs/{job_id}/regrades/{done['id']}/answers"

    everything = api.get(path).json()["data"]
    assert [one["id"] for one in everything] == [
        "rollout_1_t_0_0",
        "rollout_1_t_0_1",
        "rollout_1_t_1_0",
        "rollout_1_t_1_1",
        "rollout_1_v_0_0",
    ]
    assert [one["changes"] for one in everything] == [
        ["same"],
        ["flipped", "higher"],
        ["same"],
        ["gained"],
        ["same"],
    ]
    [flipped] = api.get(path, params={"change": "flipped"}).json()["data"]
    assert flipped["output_text"] == "greem"
    assert (flipped["before"], flipped["after"]) == (0.0, pytest.approx(0.8))
    first = api.get(path, params={"limit": 2}).json()
    rest = api.get(path, params={"after": first["data"][-1]["id"], "limit": 100}).json()
    assert first["has_more"] and not rest["has_more"]
    assert first["data"] + rest["data"] == everything


def test_a_train_and_a_valid_answer_of_one_step_are_in_different_groups(
    house: House, api: TestClient, job_id: str
) -> None:
    done = regraded(house, api, job_id, BOTH)

    assert (done["answers"], done["comparison"]["groups"]) == (5, 2)


def test_judges_are_counted_and_their_tokens_can_be_capped(
    house: House, api: TestClient, job_id: str
) -> None:
    free = regraded(house, api, job_id, JUDGED)
    capped = regraded(house, api, job_id, JUDGED, budget={"tokens": 1})

    [usage] = free["usage"]
    assert (usage["model_name"], usage["invocation_count"]) == ("judge", 5)
    assert capped["status"] == "failed"
    assert capped["error"]["code"] == "budget_reached"
    assert 0 < capped["graded"] < 5
    assert capped["comparison"] is None


def test_graders_read_the_whole_row_and_the_reasoning(house: House, api: TestClient, job_id: str) -> None:
    """As in the job: its messages are a field of the row."""
    store(
        house, job_id, 2, "train", [answer(2, "train", 0, 0, "green", 0.0, output_reasoning="Grass, green.")]
    )
    reading = {
        "type": "string_check",
        "name": "reading",
        "input": "{{sample.output_reasoning}} {{item.messages[0].content}}",
        "reference": "Grass, green. Which color?",
        "operation": "eq",
    }

    done = regraded(house, api, job_id, reading, step_from=2)

    assert (done["step_from"], done["step_to"]) == (2, 2)
    assert done["comparison"]["now_passed"] == 1


def test_an_answer_in_json_is_read_as_in_the_job(house: House, api: TestClient) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "color", "schema": {"type": "object"}}}
    reading = EXACT | {"input": "{{sample.output_json.color}}"}
    with house.database.write() as session:
        job = factories.job(
            session,
            session.get_one(Project, house.project.id),
            status="succeeded",
            body={"grader": EXACT, "hyperparameters": {}, "response_format": form},
        )
    store(house, job.id, 1, "train", [answer(1, "train", 0, 0, '{"color": "green"}', 0.0)])

    assert regraded(house, api, job.id, reading)["comparison"]["now_passed"] == 1


def test_a_cancelled_regrade_keeps_its_answers_and_a_deleted_one_is_gone(
    house: House, api: TestClient, job_id: str
) -> None:
    path = f"/v1/regraft/jobs/{job_id}"
    made = api.post(f"{path}/regrade", json={"grader": BOTH}).json()

    cancelled = api.post(f"{path}/regrades/{made['id']}/cancel").json()

    assert (cancelled["status"], house.work()) == ("canceled", 0)
    done = regraded(house, api, job_id, BOTH)
    assert [one["id"] for one in api.get(f"{path}/regrades").json()["data"]] == [done["id"], made["id"]]
    newest = api.get(f"{path}/regrades", params={"limit": 1}).json()
    assert newest["has_more"]
    older = api.get(f"{path}/regrades", params={"after": newest["data"][0]["id"]}).json()
    assert [one["id"] for one in older["data"]] == [made["id"]]
    assert api.delete(f"{path}/regrades/{done['id']}").json() == {
        "object": "regraft.regrade.deleted",
        "deleted": True,
        "id": done["id"],
    }
    assert api.get(f"{path}/regrades/{done['id']}").status_code == 404


def test_a_regrade_is_no_eval(house: House, api: TestClient, job_id: str) -> None:
    done = regraded(house, api, job_id, BOTH)

    of_evals = [one["id"] for one in api.get("/v1/evals").json()["data"]]

    assert all(api.get(f"/v1/evals/{one}/runs/{done['id']}").status_code == 404 for one in of_evals)
    assert api.get(f"/v1/evals/{job_id}/runs").status_code == 404


@pytest.mark.parametrize(
    ("sent", "param", "says"),
    [
        ({"step_from": 7}, "job_id", "no stored answers"),
        ({"step_from": 2, "step_to": 1}, None, "step_from may be at most step_to"),
        ({"grader": EXACT | {"reference": "{{item.color}}"}}, "grader", "{{item.color}}"),
        ({"grader": {"type": "reward_model", "name": "r", "model": "ft:x"}}, "grader.type", "only"),
        ({"budget": {"judge_calls": 3}}, "budget.tokens", "budget.tokens"),
    ],
)
def test_what_cannot_be_regraded_is_refused(
    api: TestClient, job_id: str, sent: Any, param: str | None, says: str
) -> None:
    refused = api.post(f"/v1/regraft/jobs/{job_id}/regrade", json={"grader": BOTH} | sent)

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert says in refused.json()["error"]["message"]


def test_a_page_that_retention_deletes_meanwhile_moves_no_other_line(
    house: House, api: TestClient, job_id: str
) -> None:
    made = api.post(f"/v1/regraft/jobs/{job_id}/regrade", json={"grader": BOTH}).json()
    run = house.row(made["id"])
    with house.database.read() as session:
        pages = regrades.pages(session, run)

    whole = {row.line: row.rollout for row in regrades.rows(house.blobs, pages)}
    house.blobs.delete(pages[0][1].blob_key)
    left = {row.line: row.rollout for row in regrades.rows(house.blobs, pages)}
    with house.database.write() as session:
        session.delete(session.merge(pages[0][1]))
    with house.database.read() as session:  # as the next attempt does
        later = {row.line: row.rollout for row in regrades.rows(house.blobs, regrades.pages(session, run))}

    assert (list(whole), list(left), list(later)) == ([1, 2, 3, 4, 5], [5], [5])
    assert later[5] == left[5] == whole[5]
