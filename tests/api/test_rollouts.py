"""/v1/regraft/jobs/{id}/rollouts, over pages as the worker writes them."""

import io
import json
from collections.abc import Callable
from typing import Any

import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from api.resources.rollouts import RolloutOut
from core.database.tables import Job
from core.jobs import lifecycle, run_logs
from core.jobs.verdict import Verdict
from core.results import rollouts
from tests import many_rollouts
from tests.api.conftest import GRADER, House
from tests.present import untyped
from tests.rollout_pages import sample, store_page


def row(step: int, split: str, group: int, member: int, **fields: Any) -> dict[str, Any]:
    """A sample whose score is a tenth of its member's number; the last of a group of four was cut off, ungraded."""
    cut = member == 3
    defaults = {
        "step": step,
        "split": split,
        "group": group,
        "member": member,
        "line": group + 1,
        "messages": json.dumps([{"role": "user", "content": "2+2?"}]),
        "item": json.dumps({"answer": "4"}),
        "output_text": f"answer {step} {group} {member}",
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "reasoning_tokens": 0,
        "finish_reason": "length" if cut else "stop",
        "score": None if cut else member / 10,
        "reason": "cut off" if cut else "",
        "error": "other_error" if cut else None,
        "output": "",
        "sub_scores": {"close": 1 - member / 10},
        "sub_reasons": {"close": "near"},
        "sub_errors": {},
        "sub_outputs": {},
        "centered_reward": 0.25,
        "advantage": None if cut else member / 10 - 0.1,
        "trained": not cut,
        "replacement": False,
        "steps": [],
    }
    return defaults | fields


def store(
    house: House,
    job_id: str,
    step: int,
    split: str = "train",
    groups: int = 2,
    total: int | None = None,
    rows: Any = None,
    **fields: Any,
) -> None:
    rows = rows or [row(step, split, group, member) for group in range(groups) for member in range(4)]
    page = store_page(house.blobs, job_id, step, split, rows, total)
    for name, value in fields.items():
        setattr(page, name, value)
    with house.database.write() as session:
        session.add(page)


@pytest.fixture
def job_id(house: House, create_job: Callable[..., dict[str, Any]]) -> Any:
    """A job with three steps of eight samples, and a validation of four before and after."""
    job_id = create_job()["id"]
    for step in (1, 2, 3):
        store(house, job_id, step)
    for step in (0, 3):
        store(house, job_id, step, "valid", groups=1)
    return job_id


@pytest.fixture
def listed(api: TestClient, job_id: str) -> Callable[..., Any]:
    def listed(**params: Any) -> Any:
        answer = api.get(f"/v1/regraft/jobs/{job_id}/rollouts", params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return listed


def ids(answer: Any) -> list[Any]:
    return [one["id"] for one in answer["data"]]


@pytest.mark.both_databases
def test_every_sample_of_a_step_comes_at_once(listed: Callable[..., Any]) -> None:
    answer = listed(step=3)

    assert ids(answer) == [f"rollout_3_t_{group}_{member}" for group in (0, 1) for member in range(4)]
    assert (answer["has_more"], answer["total"], answer["stored"]) == (False, 8, 8)


def test_a_sample_shows_what_it_was_asked_said_and_was_worth(listed: Callable[..., Any]) -> None:
    third = listed(step=3)["data"][2]

    assert third == row(3, "train", 0, 2) | {
        "conversation": None,
        "stop": None,
        "trace_id": None,
        "id": "rollout_3_t_0_2",
        "messages": [{"role": "user", "content": "2+2?"}],
        "item": {"answer": "4"},
        "output_reasoning": None,
        "output_tools": None,
        "output_tools_error": None,
        "grammar_start": None,
        "policy_step": None,
        "has_tokens": None,
    }
    assert third.keys() == RolloutOut.model_fields.keys(), "what the OpenAPI document says"


def test_without_a_step_all_come_in_order(listed: Callable[..., Any]) -> None:
    answer = listed(limit=1000)

    assert len(answer["data"]) == 32
    assert [(one["step"], one["split"]) for one in answer["data"][::4]] == [
        (0, "valid"),
        (1, "train"),
        (1, "train"),
        (2, "train"),
        (2, "train"),
        (3, "train"),
        (3, "train"),
        (3, "valid"),
    ]


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 3, 8, 50])
@pytest.mark.parametrize("filters", [{}, {"min_score": 0.1}, {"step_from": 2, "split": "train"}])
def test_pages_put_together_are_the_whole(
    listed: Callable[..., Any], order: str, limit: int, filters: dict[str, Any]
) -> None:
    whole = ids(listed(limit=1000, **filters))
    seen: list[str] = []
    params: dict[str, Any] = {}
    for _ in range(40):
        answer = listed(limit=limit, order=order, **filters, **params)
        seen += ids(answer)
        if not answer["has_more"]:
            break
        params = {"after": seen[-1]}

    assert len(whole) >= 16
    assert seen == (whole if order == "asc" else whole[::-1])


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"line": 2}, [4, 5, 6, 7]),
        ({"group": 0}, [0, 1, 2, 3]),
        ({"group": 1, "graded": "false"}, [7]),
        ({"q": "ANSWER 1 1"}, [4, 5, 6, 7]),
        ({"q": "answer 1 0", "min_score": 0.1}, [1, 2]),
        ({"q": "cut OFF"}, [3, 7]),
        ({"q": "2+2"}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"q": "content"}, []),  # a key of the stored JSON
        ({"q": "user"}, []),
        ({"q": "answer", "line": 3}, []),
        ({"min_score": 0.1}, [1, 2, 5, 6]),
        ({"max_score": 0.1}, [0, 1, 4, 5]),
        ({"min_score": 0.1, "max_score": 0.1}, [1, 5]),
        ({"graded": "true"}, [0, 1, 2, 4, 5, 6]),
        ({"graded": "false"}, [3, 7]),
        ({"finish_reason": "length"}, [3, 7]),
        ({"error": "other_error", "line": 1}, [3]),
        ({"error": "sample_parse_error"}, []),
        ({"grader": "close", "max_score": 0.85}, [2, 3, 6, 7]),
        ({"grader": "close", "graded": "true"}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"grader": "nobody"}, []),
    ],
)
def test_filters_let_through_what_they_say(
    listed: Callable[..., Any], filters: dict[str, Any], expected: list[int]
) -> None:
    everything = ids(listed(step=1))

    assert ids(listed(step=1, **filters)) == [everything[place] for place in expected]


def test_steps_can_be_bounded(listed: Callable[..., Any]) -> None:
    answer = listed(step_from=2, step_to=3, split="train")

    assert {one["step"] for one in answer["data"]} == {2, 3}
    assert (answer["total"], answer["stored"]) == (16, 16)


TEXTS = {
    "messages": json.dumps(
        [{"role": "user", "content": [{"type": "text", "text": 'Wie groß ist "Ödipus"?\\n'}]}]
    ),
    "item": json.dumps({"answer": {"parts": ["Ja", 7.25]}}),
    "output_text": "Die Lösung (2.)",
    "output_reasoning": "Hmm, 50% sure",
    "output": "printed",
}


@pytest.mark.parametrize("size", ["in memory", "from disk"])
@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("LÖSUNG (2.)", True),
        ("GROß IST", True),
        ("ödipus", True),
        ('"Öd', True),
        ("ja", True),
        ("7.25", True),
        ("Printed", True),
        ("50%", True),
        ("l.sung", False),
        ("5_% sure", False),
        ("parts", False),
        ("type", False),
        ("u00d6", False),  # as JSON writes it
    ],
)
def test_texts_are_found_wherever_they_are_and_in_any_case(
    house: House, listed: Callable[..., Any], job_id: str, text: str, matches: bool, size: str
) -> None:
    rows = [row(4, "train", 0, 0, **TEXTS), row(4, "train", 1, 0)]
    fields: dict[str, Any] = {} if size == "in memory" else {"bytes": 0}
    store(house, job_id, 4, rows=rows, **fields)

    assert ids(listed(step=4, q=text)) == (["rollout_4_t_0_0"] if matches else [])


def places(answer: Any) -> list[tuple[int, int, int]]:
    return [(one["step"], one["group"], one["member"]) for one in answer["data"]]


@pytest.mark.both_databases
def test_answers_are_sorted_over_all_steps_and_those_without_the_value_come_last(
    listed: Callable[..., Any],
) -> None:
    best_first = listed(split="train", sort="advantage", order="desc", limit=1000)["data"]
    worst_first = listed(split="train", sort="advantage", limit=1000)["data"]

    for rows, descending in ((best_first, True), (worst_first, False)):
        assert len(rows) == 24
        values = [one["advantage"] for one in rows if one["advantage"] is not None]
        assert values == sorted(values, reverse=descending)
        assert [one["advantage"] for one in rows[18:]] == [None] * 6
        assert [one["id"] for one in rows[18:]] == [f"rollout_{s}_t_{g}_3" for s in (1, 2, 3) for g in (0, 1)]


def test_a_sorted_list_has_filters_and_pages(listed: Callable[..., Any]) -> None:
    params: dict[str, Any] = {
        "sort": "score",
        "order": "desc",
        "graded": "true",
        "split": "train",
        "q": "answer",
    }
    whole = places(listed(limit=1000, **params))
    seen: list[tuple[int, int, int]] = []
    after: dict[str, Any] = {}
    for _ in range(10):
        answer = listed(limit=4, **params, **after)
        seen += places(answer)
        if not answer["has_more"]:
            break
        after = {"after": answer["data"][-1]["id"]}

    assert seen == whole
    assert whole[:6] == [(step, group, 2) for step in (1, 2, 3) for group in (0, 1)]
    assert len(whole) == 18


def test_a_sorted_step_comes_whole(house: House, listed: Callable[..., Any], job_id: str) -> None:
    store(house, job_id, 4, groups=300)
    store(house, job_id, 7, rows=[sample(0, n, score=score) for n, score in enumerate((1.0, None, 0.0))])

    assert [one["member"] for one in listed(step=4, sort="score")["data"]] == [
        member for member in range(4) for _ in range(300)
    ]
    assert [one["score"] for one in listed(step=7, sort="score")["data"]] == [0.0, 1.0, None]
    assert listed(step_from=8, sort="score")["data"] == []


@pytest.fixture
def solved(house: House, create_job: Callable[..., dict[str, Any]]) -> str:
    """A job with three validations of five prompts, with two answers each. The grader's threshold is one half."""
    by_line: dict[int, list[list[float | None]]] = {
        1: [[0.0, 0.2], [1.0, 0.0], [1.0, 1.0]],
        2: [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]],
        3: [[0.0, 0.0], [0.0, None], [0.0, 0.4]],
        4: [[1.0, 0.5], [0.0, 0.0], [1.0, 1.0]],
        5: [[None, None], [None, None], [None, None]],
    }
    job_id: str = create_job()["id"]
    for step, number in ((0, 0), (5, 1), (10, 2)):
        rows = [
            row(step, "valid", line - 1, member, line=line, score=score, advantage=None)
            for line, steps in by_line.items()
            for member, score in enumerate(steps[number])
        ]
        store(house, job_id, step, "valid", rows=rows)
    return job_id


@pytest.fixture
def prompts(api: TestClient, solved: str) -> Callable[..., Any]:
    def prompts(**params: Any) -> Any:
        answer = api.get(f"/v1/regraft/jobs/{solved}/rollouts/prompts", params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return prompts


@pytest.mark.both_databases
def test_the_rewards_of_each_prompt_say_what_became_of_it(prompts: Callable[..., Any]) -> None:
    answer = prompts()

    assert [(one["line"], one["outcome"], one["mean_rewards"]) for one in answer["data"]] == [
        (1, "learned", [0.1, 0.5, 1.0]),
        (2, "forgotten", [1.0, 1.0, 0.0]),
        (3, "stuck", [0.0, 0.0, 0.2]),
        (4, "kept", [0.75, 0.0, 1.0]),
        (5, "ungraded", [None, None, None]),
    ]
    assert answer["outcomes"] == {"learned": 1, "kept": 1, "forgotten": 1, "stuck": 1, "ungraded": 1}
    assert (answer["steps"], answer["pass_threshold"], answer["stored"]) == ([0, 5, 10], 0.5, 30)
    first = answer["data"][0]
    assert (first["text"], first["first_mean"], first["last_mean"], first["change"]) == (
        "2+2?",
        0.1,
        1.0,
        0.9,
    )
    assert (first["steps"], first["samples"]) == ([0, 5, 10], [2, 2, 2])


@pytest.mark.parametrize(
    ("by_step", "outcome", "reason"),
    [
        ([[(0, "stop"), (0, "length")]], "stuck", "cut"),
        ([[(0, "stop"), (0, "stop"), (0, "stop")], [(0.2, "stop"), (0.2, "stop")]], "stuck", "no_signal"),
        ([[(0, "stop"), (0.1, "stop")], [(0.1, "stop"), (0.4, "stop")]], "stuck", "rising"),
        ([[(0.1, "stop"), (0.4, "stop")], [(0, "stop"), (0.1, "stop")]], "stuck", None),
        ([[(0, "stop")], [(0, "stop")]], "stuck", None),  # one answer at each step has no signal to have
        ([[(1, "stop"), (1, "stop")], [(0, "length"), (None, "length")]], "forgotten", "cut"),
        ([[(0.2, "stop"), (0, "stop")], [(1, "stop")], [(0.3, "stop"), (0.2, "stop")]], "forgotten", None),
        ([[(1, "length"), (1, "length")]], "kept", None),
        ([[(None, "length")]], "ungraded", None),
    ],
)
def test_a_prompt_says_why_it_is_not_solved(
    house: House,
    api: TestClient,
    create_job: Callable[..., dict[str, Any]],
    by_step: list[list[tuple[float | None, str]]],
    outcome: str,
    reason: str | None,
) -> None:
    job_id = create_job()["id"]
    for step, answers in enumerate(by_step, start=1):
        store(
            house,
            job_id,
            step,
            rows=[
                row(step, "train", 0, member, score=score, finish_reason=ended)
                for member, (score, ended) in enumerate(answers)
            ],
        )

    [prompt] = api.get(f"/v1/regraft/jobs/{job_id}/rollouts/prompts", params={"split": "train"}).json()[
        "data"
    ]

    assert (prompt["outcome"], prompt["reason"]) == (outcome, reason)


def test_outcomes_of_validations_are_those_of_the_delivered_checkpoint(
    house: House, solved: str, prompts: Callable[..., Any]
) -> None:
    verdict = Verdict("improved", 0.4, 0.6, 0.2, None, None, 1, 0, 4, 5, 0, step=5)
    with house.database.write() as session:
        session.query(Job).where(Job.id == solved).one().verdict = verdict.to_row()

    answer, in_a_range = prompts(), prompts(step_to=10)

    assert [one["outcome"] for one in answer["data"]] == ["learned", "kept", "stuck", "forgotten", "ungraded"]
    assert [one["last_mean"] for one in answer["data"]] == [0.5, 1.0, 0.0, 0.0, None]
    assert (answer["counted_step"], answer["steps"]) == (5, [0, 5, 10])
    assert (in_a_range["counted_step"], in_a_range["data"][1]["outcome"]) == (10, "forgotten")


@pytest.mark.parametrize(
    ("params", "lines"),
    [
        ({"outcome": "stuck"}, [3]),
        ({"line": 4}, [4]),
        ({"line": 4, "outcome": "stuck"}, []),
        ({"sort": "change"}, [2, 3, 4, 1, 5]),
        ({"sort": "change", "order": "desc"}, [1, 4, 3, 2, 5]),
        ({"sort": "last_mean"}, [2, 3, 1, 4, 5]),
        ({"order": "desc"}, [5, 4, 3, 2, 1]),
        ({"limit": 2, "after": "prompt_2"}, [3, 4]),
        ({"step_to": 5, "outcome": "learned"}, [1]),
        ({"step_to": 5, "outcome": "forgotten"}, [4]),
        ({"split": "train"}, []),
        ({"outcome": "learned", "pass_threshold": 0.15}, [1, 3]),
        ({"outcome": "stuck", "pass_threshold": -1}, []),
    ],
)
def test_prompts_are_filtered_sorted_and_paged(
    prompts: Callable[..., Any], params: dict[str, Any], lines: list[int]
) -> None:
    assert [one["line"] for one in prompts(**params)["data"]] == lines


def test_prompts_of_a_step_range_have_its_steps_only(prompts: Callable[..., Any]) -> None:
    answer = prompts(step_from=5, step_to=5, limit=1)

    assert (answer["steps"], answer["has_more"], answer["data"][0]["steps"]) == ([5], True, [5])


def test_a_prompt_is_listed_with_the_steps_that_retention_has_left(
    house: House, solved: str, prompts: Callable[..., Any]
) -> None:
    house.blobs.delete(f"projects/p/jobs/{solved}/valid-000000.parquet")

    assert prompts()["steps"] == [5, 10]


@pytest.mark.slow
def test_a_hundred_thousand_samples_are_searched_sorted_and_summed_up(
    house: House, api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    with house.database.write() as session:
        session.add_all(many_rollouts.pages(house.blobs, job_id, steps=100, groups=125))
    path = f"/v1/regraft/jobs/{job_id}/rollouts"

    found = api.get(path, params={"q": many_rollouts.NEEDLE.upper()}).json()
    first, second = (
        api.get(path, params={"sort": "advantage", "order": "desc", "limit": "5"} | after).json()["data"]
        for after in ({}, {"after": found["data"][0]["id"]})
    )
    prompts = api.get(f"{path}/prompts", params={"split": "train"})

    assert (ids(found), found["stored"]) == (["rollout_50_t_62_0"], 100_000)
    advantages = [one["advantage"] for one in first]
    assert advantages == sorted(advantages, reverse=True)
    assert all(one["advantage"] <= found["data"][0]["advantage"] for one in second)
    assert prompts.json()["stored"] == 100_000
    assert sum(prompts.json()["outcomes"].values()) > 1900
    assert len(prompts.json()["steps"]) == 100
    assert len(prompts.content) < 200_000, "a hundred prompts, and not their answers"


def test_prompts_have_no_cursor_of_another_list(api: TestClient, solved: str) -> None:
    answer = api.get(
        f"/v1/regraft/jobs/{solved}/rollouts/prompts", params={"outcome": "stuck", "after": "prompt_1"}
    )

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


@pytest.mark.both_databases
def test_a_hundred_come_at_a_time_unless_more_are_asked_for(
    house: House, listed: Callable[..., Any], job_id: str
) -> None:
    store(house, job_id, 4, groups=300)

    assert len(listed(step_from=4)["data"]) == 100
    assert len(listed(step_from=4, limit=100_000)["data"]) == 1000
    assert len(listed(step=4)["data"]) == 1200  # one step comes whole, as it always did


def test_a_filter_finds_what_is_far_down_in_a_long_page(
    house: House, listed: Callable[..., Any], job_id: str
) -> None:
    """Beyond the first row group, in both directions."""
    store(house, job_id, 4, groups=300)

    for order in ("asc", "desc"):
        assert ids(listed(step_from=4, line=251, order=order)) == [
            f"rollout_4_t_250_{member}" for member in (range(4) if order == "asc" else range(3, -1, -1))
        ]


def test_it_is_told_how_many_were_left_out(house: House, listed: Callable[..., Any], job_id: str) -> None:
    store(house, job_id, 5, total=80)

    assert {key: listed(step=5)[key] for key in ("total", "stored")} == {"total": 80, "stored": 8}


def test_a_step_without_samples_is_a_404(api: TestClient, job_id: str) -> None:
    for params in ({"step": 4}, {"step": 1, "split": "valid"}):
        answer = api.get(f"/v1/regraft/jobs/{job_id}/rollouts", params=untyped(params))
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "step")


@pytest.mark.both_databases
def test_a_step_whose_samples_retention_has_taken_is_a_404_and_others_are_listed(
    house: House, api: TestClient, listed: Callable[..., Any], job_id: str
) -> None:
    house.blobs.delete(f"projects/p/jobs/{job_id}/train-000002.parquet")

    assert api.get(f"/v1/regraft/jobs/{job_id}/rollouts", params={"step": 2}).status_code == 404
    assert {one["step"] for one in listed(split="train")["data"]} == {1, 3}


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"step": -1}, "step"),
        ({"sort": "best"}, "sort"),
        ({"sort": "score", "after": "rollout_9_t_0_0"}, "after"),
        ({"q": ""}, "q"),
        ({"group": -1}, "group"),
        ({"step": 10**10}, "step"),
        ({"step": 1, "split": "test"}, "split"),
        ({"step": 1, "step_to": 2}, "step"),
        ({"after": "file-123"}, "after"),
        ({"min_score": "nan"}, "min_score"),
        ({"order": "best"}, "order"),
        ({"limit": "many"}, "limit"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    api: TestClient, job_id: str, params: dict[str, Any], param: str
) -> None:
    answer = api.get(f"/v1/regraft/jobs/{job_id}/rollouts", params=params)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.both_databases
def test_a_download_has_what_the_list_has(api: TestClient, listed: Callable[..., Any], job_id: str) -> None:
    url = f"/v1/regraft/jobs/{job_id}/rollouts/download"

    answer = api.get(url, params={"graded": "true"})

    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines == listed(graded="true", limit=1000)["data"]
    assert len(lines) == 24
    assert answer.headers["content-disposition"] == f'attachment; filename="{job_id}-rollouts.jsonl"'


def test_a_parquet_download_is_one_file_of_all_pages(house: House, api: TestClient, job_id: str) -> None:
    store(house, job_id, 7, rows=[sample(0, 0), sample(0, 1), sample(1, 0)])

    answer = api.get(
        f"/v1/regraft/jobs/{job_id}/rollouts/download", params={"format": "parquet", "split": "train"}
    )

    table = pq.read_table(io.BytesIO(answer.content))
    assert table.schema.names == rollouts.SCHEMA.names
    assert table["step"].to_pylist() == [1] * 8 + [2] * 8 + [3] * 8 + [7] * 3
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_parquet_download_of_nothing_is_still_a_table(api: TestClient, job_id: str) -> None:
    answer = api.get(
        f"/v1/regraft/jobs/{job_id}/rollouts/download", params={"format": "parquet", "error": "none such"}
    )

    assert pq.read_table(io.BytesIO(answer.content)).num_rows == 0


def test_a_job_without_samples_has_an_empty_list(
    api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    answer = api.get(f"/v1/regraft/jobs/{create_job()['id']}/rollouts")

    assert answer.json() == {"object": "list", "data": [], "has_more": False, "total": 0, "stored": 0}


def test_only_the_pages_that_are_needed_are_fetched(
    house: House, listed: Callable[..., Any], job_id: str
) -> None:
    house.blobs.opened.clear()  # an upload reads an earlier file with the same content

    listed(limit=3, split="train")

    assert [key.rsplit("/", 1)[1] for key in house.blobs.opened] == ["train-000001.parquet"]


@pytest.mark.both_databases
def test_the_attempts_at_a_job_say_when_from_where_and_how_they_ended(
    house: House, api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    with house.database.write() as session:
        lifecycle.claim_validation(session, owner="first", lease_seconds=60)
        job = lifecycle.get(session, house.project.id, job_id)
        lifecycle.validated(session, job)
        claim = lifecycle.claim(session, gpu_class="cpu", owner="second", lease_seconds=60)
        assert claim is not None
        lifecycle.resumed_from(session, claim, 0)
        lifecycle.crashed(session, job, reason="out of memory", max_failures=3)

    attempts = api.get(f"/v1/regraft/jobs/{job_id}/attempts").json()["data"]

    told = [(one["number"], one["kind"], one["outcome"], one["resumed_from_step"]) for one in attempts]
    assert told == [(1, "validation", "validated", None), (2, "run", "crashed", 0)]
    assert attempts[1]["reason"] == "out of memory"


@pytest.mark.both_databases
def test_the_logs_of_runs_can_be_read_and_so_far_that_of_one_under_way(
    house: House, api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    with house.database.write() as session:
        lifecycle.claim_validation(session, owner="first", lease_seconds=60)
        job = lifecycle.get(session, house.project.id, job_id)
        lifecycle.validated(session, job)
        for ended in ("crashed", "expired", None):
            job.next_run_at = 0.0
            session.flush()
            claim = lifecycle.claim(session, gpu_class="cpu", owner="second", lease_seconds=60)
            if ended:
                lifecycle.crashed(session, job, reason="out of memory", max_failures=3, outcome=ended)
            if ended != "expired":
                assert claim is not None
                key = run_logs.key(house.project.id, job_id, claim.epoch)
                house.blobs.put_bytes(key, "Schritt für Schritt\n".encode())

    answer = api.get(f"/v1/regraft/jobs/{job_id}/logs")

    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text.splitlines() == [
        "--- attempt 2: crashed",
        "Schritt für Schritt",
        "--- attempt 3: expired",
        "(no log: it wrote nothing, its machine was lost, or it has only just ended)",
        "--- attempt 4: running; its log is up to 30 s behind",
        "Schritt für Schritt",
    ]


BOTH = {
    "type": "multi",
    "name": "both",
    "graders": {"says": GRADER | {"name": "says"}, "close": GRADER | {"name": "close"}},
    "calculate_output": "says",
}


def scored(step: int, group: int, member: int, says: float | None, close: float) -> dict[str, Any]:
    sub_scores = {"says": says, "close": close}
    return row(step, "train", group, member, score=says, sub_scores=sub_scores)


@pytest.fixture
def graded_twice(
    house: House, create_job: Callable[..., dict[str, Any]], job_request: Callable[..., Any]
) -> str:
    """A job whose grader has two parts and returns the first: two groups of three answers."""
    job_id: str = create_job(reinforcement={"grader": BOTH})["id"]
    rows = [
        *(
            scored(1, 0, member, says, close)
            for member, (says, close) in enumerate([(1, 0), (0, 1), (0, 0.4)])
        ),
        *(
            scored(1, 1, member, says, close)
            for member, (says, close) in enumerate([(1, 0.5), (1, 0.25), (None, 1)])
        ),
    ]
    store(house, job_id, 1, rows=rows)
    return job_id


def test_a_formula_over_both_splits_keeps_their_groups_apart(
    house: House, api: TestClient, graded_twice: str
) -> None:
    store(house, graded_twice, 1, "valid", rows=[scored(1, 0, 0, 1, 0) | {"split": "valid"}])

    found = api.get(f"/v1/regraft/jobs/{graded_twice}/rollouts/what-if", params={"formula": "says"}).json()

    assert (found["answers"], found["groups"], found["changed_signs"]) == (7, 2, 0)


def test_another_formula_says_what_it_would_have_changed(api: TestClient, graded_twice: str) -> None:
    path = f"/v1/regraft/jobs/{graded_twice}/rollouts/what-if"

    found = api.get(path, params={"formula": "close", "pass_threshold": 0.5})

    assert found.status_code == 200, found.text
    assert found.json() == {
        "object": "regraft.what_if",
        "formula": "close",
        "pass_threshold": 0.5,
        "answers": 6,
        "groups": 2,
        "before": {
            "graded": 5,
            "mean": 0.6,
            "passed": 3,
            "groups_with_signal": 1,
            "signal_by_group_size": {"2": pytest.approx(2 / 3), "3": 1.0},
        },
        "after": {
            "graded": 5,
            "mean": pytest.approx(0.43),
            "passed": 2,
            "groups_with_signal": 2,
            "signal_by_group_size": {"2": 1.0, "3": 1.0},
        },
        "higher": 2,
        "lower": 3,
        "same": 0,
        "gained": 0,
        "lost": 0,
        "now_passed": 1,
        "now_failed": 2,
        # In the first group all but the last: its 0.4 is below the mean of 0.467, as its 0 was below 0.333.
        "changed_signs": 2,
        # (0.667, -0.333, -0.333) and (-0.467, 0.533, -0.067); in the second group 0 and (0.125, -0.125).
        "centered_cosine": pytest.approx(-0.779, abs=1e-3),
        "rank_correlation": pytest.approx(-0.577, abs=1e-3),
        "advantage_scale": "none",
        "advantages_before": {
            "mean": pytest.approx(0.267, abs=1e-3),
            "largest": pytest.approx(0.667, abs=1e-3),
        },
        "advantages_after": {
            "mean": pytest.approx(0.263, abs=1e-3),
            "largest": pytest.approx(0.533, abs=1e-3),
        },
    }


@pytest.fixture
def learned(house: House, create_job: Callable[..., dict[str, Any]]) -> str:
    """A job whose grader has two parts: of its two groups one has three quarters of the tokens that were trained on."""
    grader = BOTH | {"calculate_output": "0.5 * says + 0.5 * close"}
    job_id: str = create_job(reinforcement={"grader": grader})["id"]
    resolve(house, job_id, loss="dapo", advantage_scale="batch", supervision="outcome")
    rows = [
        scored(step, group, member, says, close)
        | {"advantage": advantage, "trained": advantage is not None, "completion_tokens": tokens}
        for step, group, member, says, close, advantage, tokens in [
            (1, 0, 0, 1.0, 0.5, 0.5, 30),
            (1, 0, 1, 0.0, 0.5, -0.5, 30),
            (1, 1, 0, 1.0, 0.0, 0.5, 10),
            (1, 1, 1, 0.0, 0.0, -0.5, 10),
            (1, 2, 0, 1.0, 1.0, None, 90),
        ]
    ]
    store(house, job_id, 1, rows=rows)
    return job_id


def resolve(house: House, job_id: str, **values: Any) -> None:
    with house.database.write() as session:
        session.query(Job).where(Job.id == job_id).one().resolved = values


def test_an_update_is_attributed_to_prompts_and_to_parts_of_the_grader(api: TestClient, learned: str) -> None:
    found = api.get(f"/v1/regraft/jobs/{learned}/rollouts/attribution", params={"step": 1, "limit": 1})

    assert found.status_code == 200, found.text
    assert found.json() == {
        "object": "regraft.attribution",
        "weight": "token",
        "answers": 5,
        "with_advantage": 4,
        "groups": 3,
        "groups_of_half": 1,
        "largest": [
            {
                "step": 1,
                "group": 0,
                "line": 1,
                "text": "2+2?",
                "share": 0.75,
                "answers": 2,
                "with_advantage": 2,
                "mean_reward": 0.5,
            }
        ],
        "parts": [{"name": "says", "share": 1.0}, {"name": "close", "share": 0.0}],
    }


def test_answers_weigh_alike_where_the_loss_averages_over_them(
    house: House, api: TestClient, learned: str
) -> None:
    resolve(house, learned, loss="grpo", advantage_scale="group", supervision="outcome")

    found = api.get(f"/v1/regraft/jobs/{learned}/rollouts/attribution").json()

    assert (found["weight"], [one["share"] for one in found["largest"]]) == ("answer", [0.5, 0.5])


@pytest.mark.parametrize(
    "resolved", [{"advantage_scale": "each"}, {"overlong": "soft"}, {"length_weight": 0.5}], ids=str
)
def test_parts_have_no_shares_where_advantages_follow_more_than_the_score(
    house: House, api: TestClient, learned: str, resolved: dict[str, Any]
) -> None:
    resolve(
        house, learned, **{"loss": "dapo", "advantage_scale": "batch", "supervision": "outcome"} | resolved
    )

    assert api.get(f"/v1/regraft/jobs/{learned}/rollouts/attribution").json()["parts"] is None


@pytest.mark.parametrize(
    ("resolved", "reason"),
    [
        ({"loss": "ppo"}, "with the loss 'ppo' tokens have different advantages"),
        ({"loss": "grpo", "supervision": "process"}, "the steps of an answer have different advantages"),
    ],
)
def test_answers_without_one_advantage_are_not_attributed(
    house: House, api: TestClient, learned: str, resolved: dict[str, str], reason: str
) -> None:
    resolve(house, learned, **resolved)

    refused = api.get(f"/v1/regraft/jobs/{learned}/rollouts/attribution")

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "job_id")
    assert reason in refused.json()["error"]["message"]


@pytest.mark.parametrize(("names", "has_shares"), [("abcdefgh", True), ("abcdefghi", False)])
def test_parts_of_a_formula_that_takes_too_long_have_no_shares(
    house: House, api: TestClient, create_job: Callable[..., dict[str, Any]], names: str, has_shares: bool
) -> None:
    """A weighted sum has shares of any number of parts; the time of a product doubles with each."""
    for formula, expected in ((" + ".join(names), True), (" * ".join(names), has_shares)):
        parts = {name: GRADER | {"name": name} for name in names}
        job_id = create_job(reinforcement={"grader": BOTH | {"graders": parts, "calculate_output": formula}})[
            "id"
        ]
        resolve(house, job_id, loss="grpo", advantage_scale="group", supervision="outcome")
        rows = [
            row(1, "train", 0, member, advantage=member - 0.5, trained=True)
            | {"sub_scores": dict.fromkeys(names, 1.0) | {"a": float(member)}}
            for member in (0, 1)
        ]
        store(house, job_id, 1, rows=rows)

        shares = api.get(f"/v1/regraft/jobs/{job_id}/rollouts/attribution").json()["parts"]

        assert (shares is not None) == expected
        assert shares is None or {one["name"]: one["share"] for one in shares}["a"] == pytest.approx(1.0)


def test_more_answers_than_are_attributed_at_once_are_refused(
    house: House, api: TestClient, learned: str
) -> None:
    store(house, learned, 2, samples=100_000)

    refused = api.get(f"/v1/regraft/jobs/{learned}/rollouts/attribution")
    fewer = api.get(f"/v1/regraft/jobs/{learned}/rollouts/attribution", params={"step_to": 1})

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "step_from")
    assert "select fewer steps" in refused.json()["error"]["message"]
    assert fewer.json()["answers"] == 5


@pytest.mark.parametrize(
    ("scale", "mean", "largest"),
    # Centered: 2/3, -1/3, -1/3, and 0, 0. The std of the first group is 0.471, that of all five scores 0.490.
    [("none", 0.267, 0.667), ("group", 0.566, 1.414), ("batch", 0.544, 1.361)],
)
def test_advantages_are_divided_as_by_a_loss(
    api: TestClient, graded_twice: str, scale: str, mean: float, largest: float
) -> None:
    path = f"/v1/regraft/jobs/{graded_twice}/rollouts/what-if"

    found = api.get(path, params={"formula": "says", "advantage_scale": scale}).json()

    assert found["advantages_before"] == {
        "mean": pytest.approx(mean, abs=1e-3),
        "largest": pytest.approx(largest, abs=1e-3),
    }
    assert found["advantages_after"] == found["advantages_before"]


def test_the_jobs_own_formula_changes_nothing(api: TestClient, graded_twice: str) -> None:
    path = f"/v1/regraft/jobs/{graded_twice}/rollouts/what-if"

    found = api.get(path, params={"formula": "says"}).json()

    assert found["before"] == found["after"]
    assert (found["same"], found["higher"], found["lower"], found["changed_signs"]) == (5, 0, 0, 0)
    assert found["rank_correlation"] == pytest.approx(1)


def test_a_formula_with_huge_values_gives_no_scores(api: TestClient, graded_twice: str) -> None:
    found = api.get(f"/v1/regraft/jobs/{graded_twice}/rollouts/what-if", params={"formula": "1e308 + says"})

    assert found.status_code == 200, found.text
    assert (found.json()["lost"], found.json()["after"]["mean"]) == (5, None)


def test_an_answer_whose_parts_have_no_score_or_value_loses_its_own(
    api: TestClient, graded_twice: str
) -> None:
    found = api.get(
        f"/v1/regraft/jobs/{graded_twice}/rollouts/what-if", params={"formula": "says / (close - 1)"}
    ).json()

    assert found["lost"] == 1  # the one with close = 1; the other one had no score before either
    assert found["after"]["graded"] == 4


@pytest.mark.parametrize(
    ("formula", "says"),
    [
        ("says +", "Invalid formula"),
        ("says + length", "Its names are says, close"),
        ("__import__('os')", "Invalid formula"),
    ],
)
def test_an_invalid_formula_is_refused_with_the_names_that_there_are(
    api: TestClient, graded_twice: str, formula: str, says: str
) -> None:
    refused = api.get(f"/v1/regraft/jobs/{graded_twice}/rollouts/what-if", params={"formula": formula})

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "formula"
    assert says in refused.json()["error"]["message"]


def test_a_job_with_one_grader_has_no_parts_for_a_formula(api: TestClient, job_id: str) -> None:
    refused = api.get(f"/v1/regraft/jobs/{job_id}/rollouts/what-if", params={"formula": "close"})

    assert refused.status_code == 400
    assert "has no multi grader" in refused.json()["error"]["message"]


def test_too_many_answers_at_once_are_refused_with_how_to_select_fewer(
    api: TestClient, house: House, graded_twice: str
) -> None:
    store(house, graded_twice, 2, samples=100_000)

    refused = api.get(f"/v1/regraft/jobs/{graded_twice}/rollouts/what-if", params={"formula": "says"})
    fewer = api.get(
        f"/v1/regraft/jobs/{graded_twice}/rollouts/what-if", params={"formula": "says", "step_to": 1}
    )

    long = api.get(
        f"/v1/regraft/jobs/{graded_twice}/rollouts/what-if", params={"formula": " + ".join(["says"] * 500)}
    )

    assert refused.status_code == long.status_code == 400
    assert "100006 answers are selected, and at most 100000" in refused.json()["error"]["message"]
    assert (
        "at most 2859 are scored at once by a formula of 3497 characters" in long.json()["error"]["message"]
    )
    assert fewer.json()["answers"] == 6


def test_jobs_are_compared_with_the_first_on_the_prompts_that_both_validated(
    house: House, api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    """Prompts pair by their content; a secret of a grader is shown in neither."""
    endpoint = {"type": "endpoint", "name": "mine", "url": "https://8.8.8.8/", "headers": {"x-key": "secret"}}
    first, second, third = (create_job(seed=seed)["id"] for seed in (1, 7, 1))
    with house.database.write() as session:
        other = session.query(Job).where(Job.id == second).one()
        other.body = other.body | {"grader": endpoint}
        other.gpu_seconds = 90.0

    def prompt(text: str, score: float | None, member: int = 0) -> dict[str, Any]:
        content = json.dumps([{"role": "user", "content": text}])
        return row(4, "valid", 0, member, messages=content, score=score)

    store(house, first, 4, "valid", rows=[prompt("a", 0.0), prompt("a", 1.0, 1), prompt("b", 0.25)])
    store(house, second, 4, "valid", rows=[prompt("c", 1.0), prompt("b", 0.75), prompt("a", 0.5)])
    store(house, third, 2, "valid", rows=[prompt("a", 0.5)])

    found = api.get(f"/v1/regraft/jobs/{first}/compare", params={"other": f"{second}, {third}"})

    assert found.status_code == 200, found.text
    compared = found.json()
    assert [one["job_id"] for one in compared["jobs"]] == [first, second, third]
    assert [one["step"] for one in compared["jobs"]] == [4, 4, 2]
    assert compared["jobs"][1]["gpu_seconds"] == 90.0 and compared["jobs"][1]["cost"] is None
    pair, other_pair = compared["pairs"]
    assert (pair["job_id"], pair["prompts"], pair["unpaired"], pair["same_grader"]) == (second, 2, 1, False)
    reward = pair["reward"]
    assert (reward["first"], reward["second"], reward["difference"]) == (0.375, 0.625, 0.25)
    assert (reward["wins"], reward["losses"], reward["ties"]) == (1, 0, 1)
    assert (other_pair["prompts"], other_pair["unpaired"], other_pair["same_grader"]) == (1, 1, True)
    assert other_pair["reward"]["ties"] == 1
    config = {one["field"]: one["values"] for one in compared["config"]}
    assert config["seed"] == [1, 7, 1] and "grader" in config
    assert "secret" not in found.text


def test_jobs_without_a_stored_validation_are_compared_by_their_requests(
    api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    first, second = create_job(seed=1)["id"], create_job(seed=2)["id"]

    compared = api.get(f"/v1/regraft/jobs/{first}/compare", params={"other": second}).json()

    assert (compared["pairs"][0]["reward"], compared["jobs"][0]["step"]) == (None, None)
    assert {"field": "seed", "values": [1, 2]} in compared["config"]
    assert api.get(f"/v1/regraft/jobs/{first}/compare", params={"other": "ftjob-x"}).status_code == 404
    assert api.get(f"/v1/regraft/jobs/{first}/compare").status_code == 400


@pytest.mark.parametrize("others", ["", "{0},", ",".join(["{0}"] * 6)], ids=["none", "empty", "six"])
def test_one_to_five_other_jobs_are_compared(
    api: TestClient, create_job: Callable[..., dict[str, Any]], others: str
) -> None:
    job = create_job()["id"]

    refused = api.get(f"/v1/regraft/jobs/{job}/compare", params={"other": others.format(job)})

    assert refused.status_code == 400
    assert "expected 1 to 5 ids of jobs" in refused.json()["error"]["message"]


@pytest.mark.parametrize("data", [b"", b"PAR1" + bytes(3000) + b"PAR1"], ids=["empty", "altered"])
@pytest.mark.parametrize(
    "path", ["rollouts", "rollouts/what-if?formula=close", "rollouts/download?format=parquet"]
)
def test_a_damaged_page_is_named(
    api: TestClient, house: House, graded_twice: str, path: str, data: bytes
) -> None:
    house.blobs.put_bytes(f"projects/p/jobs/{graded_twice}/train-000001.parquet", data)

    refused = api.get(f"/v1/regraft/jobs/{graded_twice}/{path}")

    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "file_damaged")
    assert "The stored train rollouts of step 1 are damaged" in refused.json()["error"]["message"]


@pytest.fixture
def with_tokens(house: House, create_job: Callable[..., dict[str, Any]]) -> str:
    """A job whose first sample has the values of its two tokens, and whose second has not; nor has its next page."""
    job_id: str = create_job()["id"]
    tokens = [
        {"text": "an", "logprob": -0.5, "advantage": 1.5, "gap": -0.25},
        {"text": "<end>", "logprob": None, "advantage": None, "gap": None},
    ]
    rows = [row(1, "train", 0, 0, has_tokens=True, tokens=tokens), row(1, "train", 0, 1, has_tokens=False)]
    store(house, job_id, 1, rows=rows)
    store(house, job_id, 2, rows=[sample(0, 0)])
    return job_id


def test_the_values_of_the_tokens_of_a_sample_are_read(api: TestClient, with_tokens: str) -> None:
    answer = api.get(f"/v1/regraft/jobs/{with_tokens}/rollouts/rollout_1_t_0_0/tokens")

    assert answer.status_code == 200
    assert answer.json() == {
        "object": "regraft.rollout_tokens",
        "rollout_id": "rollout_1_t_0_0",
        "tokens": [
            {"text": "an", "logprob": -0.5, "advantage": 1.5, "gap": -0.25},
            {"text": "<end>", "logprob": None, "advantage": None, "gap": None},
        ],
    }


@pytest.mark.parametrize(
    "rollout_id",
    [
        "rollout_1_t_0_1",  # stored without them
        "rollout_1_t_7_0",
        "rollout_2_t_0_0",  # on a page without any
        "rollout_9_t_0_0",
        "rollout",
    ],
)
def test_tokens_that_are_not_stored_are_404(api: TestClient, with_tokens: str, rollout_id: str) -> None:
    answer = api.get(f"/v1/regraft/jobs/{with_tokens}/rollouts/{rollout_id}/tokens")

    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == (
        f"The tokens of '{rollout_id}' are not stored. Rollouts that have them are listed with has_tokens=true."
    )


def test_samples_with_tokens_are_listed_and_downloaded_without_them(
    api: TestClient, with_tokens: str
) -> None:
    path = f"/v1/regraft/jobs/{with_tokens}/rollouts"

    having = api.get(path, params={"has_tokens": True}).json()
    lacking = api.get(path, params={"has_tokens": False}).json()
    downloaded = api.get(f"{path}/download", params={"has_tokens": True}).json()

    assert ids(having) == ["rollout_1_t_0_0"]
    assert ids(lacking) == ["rollout_1_t_0_1", "rollout_2_t_0_0"]
    assert "tokens" not in having["data"][0]
    assert downloaded == having["data"][0]
