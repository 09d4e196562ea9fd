import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pyarrow.parquet as pq
import pytest
import regraft
from regraft import AsyncRegraft

from tests.present import untyped
from tests.sdk.conftest import House

STEPS = (1, 2, 3)


@pytest.fixture
def job_id(house: House) -> str:
    """Two answers a step, the second of which could not be graded."""
    job_id = house.job(status="running")
    for step in STEPS:
        answer = {"step": step, "split": "train", "line": 3, "messages": [], "finish_reason": "stop"}
        answer |= {"completion_tokens": 1, "sub_scores": {"says": step / 4}}
        good = answer | {"member": 0, "output_text": "4", "score": step / 4}
        bad = answer | {"member": 1, "output_text": "?", "score": None, "error": "model_grader_server_error"}
        house.rollouts(job_id, step, [good, bad])
    return job_id


def test_an_answer_has_every_field_of_the_server(client: regraft.Regraft, job_id: str) -> None:
    shown = untyped(client.get(f"/regraft/jobs/{job_id}/rollouts?step=1", cast_to=object))["data"][1]

    good, bad = client.rollouts.list(job_id, step=1)

    assert (good.id, good.group, good.member, good.line, good.score) == ("rollout_1_t_0_0", 0, 0, 3, 0.25)
    assert (bad.score, bad.error, bad.sub_scores) == (None, "model_grader_server_error", {"says": 0.25})
    assert set(regraft.Rollout.model_fields) == set(shown)


def test_a_list_goes_on_over_all_its_pages(
    client: regraft.Regraft, make_async: Callable[[], AsyncRegraft], job_id: str
) -> None:
    async def walk() -> list[Any]:
        async with make_async() as remote:
            return [one.id async for one in remote.rollouts.list(job_id, limit=2)]

    page = client.rollouts.list(job_id, limit=2)

    assert (len(page.data), page.has_more) == (2, True)
    expected = [f"rollout_{step}_t_0_{member}" for step in STEPS for member in (0, 1)]
    assert [one.id for one in page] == expected
    assert [one.id for one in client.rollouts.list(job_id, limit=4, order="desc")] == expected[::-1]
    assert asyncio.run(walk()) == expected


def test_filters_hold_on_every_page(client: regraft.Regraft, job_id: str) -> None:
    expected: list[tuple[dict[str, Any], list[str]]] = [
        ({"step": 2}, ["2_t_0_0", "2_t_0_1"]),
        ({"step_from": 2, "graded": True}, ["2_t_0_0", "3_t_0_0"]),
        ({"step_to": 2, "graded": False}, ["1_t_0_1", "2_t_0_1"]),
        ({"min_score": 0.5, "max_score": 0.6}, ["2_t_0_0"]),
        ({"grader": "says", "min_score": 0.75}, ["3_t_0_0", "3_t_0_1"]),
        ({"error": "model_grader_server_error", "step_from": 3}, ["3_t_0_1"]),
        ({"split": "valid"}, []),
        ({"line": 4}, []),
        ({"finish_reason": "length"}, []),
        ({"step": 1, "split": None, "line": None}, ["1_t_0_0", "1_t_0_1"]),
        ({"group": 0, "step_to": 1}, ["1_t_0_0", "1_t_0_1"]),
        ({"q": "?", "step_from": 2}, ["2_t_0_1", "3_t_0_1"]),
        ({"sort": "score", "order": "desc", "step_from": 2}, ["3_t_0_0", "2_t_0_0", "2_t_0_1", "3_t_0_1"]),
    ]

    for filters, places in expected:
        listed = client.rollouts.list(job_id, limit=1, **filters)
        assert [one.id for one in listed] == [f"rollout_{place}" for place in places], filters


def test_prompts_have_their_mean_rewards_and_the_page_what_all_come_to(
    client: regraft.Regraft, make_async: Callable[[], AsyncRegraft], house: House, job_id: str
) -> None:
    async def walk() -> list[Any]:
        async with make_async() as remote:
            return [one.id async for one in remote.rollouts.prompts(job_id, split="train", limit=1)]

    answer = {"split": "train", "member": 0, "messages": [], "finish_reason": "stop", "completion_tokens": 1}
    house.rollouts(job_id, 4, [answer | {"line": 8, "output_text": "?", "score": 0.0}])

    page = client.rollouts.prompts(job_id, split="train", limit=1)
    shown = untyped(client.get(f"/regraft/jobs/{job_id}/rollouts/prompts?split=train", cast_to=object))

    [third] = page.data
    assert (third.line, third.outcome, third.change) == (3, "learned", 0.5)
    assert (third.steps, third.mean_rewards, third.samples) == ([1, 2, 3], [0.25, 0.5, 0.75], [2, 2, 2])
    assert (page.steps, page.pass_threshold, page.stored) == ([1, 2, 3, 4], 0.5, 7)
    assert page.outcomes == {"learned": 1, "kept": 0, "forgotten": 0, "stuck": 1, "ungraded": 0}
    assert [one.id for one in page] == ["prompt_3", "prompt_8"] == asyncio.run(walk())
    assert [one.line for one in client.rollouts.prompts(job_id, split="train", outcome="stuck")] == [8]
    assert [one.line for one in client.rollouts.prompts(job_id, split="train", line=3)] == [3]
    assert [
        one.line for one in client.rollouts.prompts(job_id, split="train", sort="change", order="desc")
    ] == [3, 8]
    lenient = client.rollouts.prompts(job_id, split="train", outcome="kept", pass_threshold=0.25)
    assert ([one.line for one in lenient], lenient.pass_threshold) == ([3], 0.25)
    assert client.rollouts.prompts(job_id).data == []
    assert set(regraft.PromptHistory.model_fields) == set(shown["data"][0])


def test_a_filter_that_there_is_not_is_refused_before_anything_is_sent(
    client: regraft.Regraft, job_id: str
) -> None:
    with pytest.raises(TypeError, match=r"no filter 'max_scores'; available: step, .*, q\."):
        untyped(client.rollouts).list(job_id, max_scores=0.5)


def test_all_that_is_wanted_is_downloaded_as_one_file(
    client: regraft.Regraft, make_async: Callable[[], AsyncRegraft], job_id: str, tmp_path: Path
) -> None:
    async def download() -> Path:
        async with make_async() as remote:
            return await remote.rollouts.download(job_id, tmp_path / "async.jsonl", graded=False)

    lines = client.rollouts.download(job_id, tmp_path / "all.jsonl")
    table = client.rollouts.download(
        job_id, tmp_path / "some.parquet", format="parquet", step_from=2, graded=True
    )
    ungraded = asyncio.run(download())

    assert [json.loads(line)["step"] for line in lines.read_text().splitlines()] == [1, 1, 2, 2, 3, 3]
    assert pq.read_table(table)["score"].to_pylist() == [0.5, 0.75]
    assert len(ungraded.read_text().splitlines()) == 3


def test_what_cannot_be_downloaded_leaves_no_file(
    client: regraft.Regraft, job_id: str, tmp_path: Path
) -> None:
    with pytest.raises(regraft.JobNotFound):
        client.rollouts.download("ftjob-none", tmp_path / "x.jsonl")

    assert list(tmp_path.glob("*x.jsonl*")) == []


def test_another_formula_is_compared_with_the_stored_scores(
    client: regraft.Regraft, make_async: Callable[[], AsyncRegraft], house: House
) -> None:
    parts = {
        name: {"type": "string_check", "name": name, "input": "a", "reference": "a", "operation": "eq"}
        for name in ("says", "close")
    }
    grader = {"type": "multi", "name": "both", "graders": parts, "calculate_output": "says"}
    job_id = house.job(status="running", body={"grader": grader})
    answer = {
        "step": 1,
        "split": "train",
        "line": 3,
        "messages": [],
        "finish_reason": "stop",
        "completion_tokens": 1,
    }
    scores = [(0.0, 1.0), (1.0, 0.5)]
    house.rollouts(
        job_id,
        1,
        [
            answer
            | {
                "member": member,
                "output_text": "4",
                "score": says,
                "sub_scores": {"says": says, "close": close},
            }
            for member, (says, close) in enumerate(scores)
        ],
    )

    async def asked() -> regraft.WhatIf:
        async with make_async() as remote:
            return await remote.rollouts.what_if(
                job_id, "close", pass_threshold=0.75, advantage_scale="group", split="train"
            )

    found = client.rollouts.what_if(
        job_id, "close", pass_threshold=0.75, advantage_scale="group", split="train"
    )

    assert (found.before.mean, found.after.mean, found.changed_signs) == (0.5, 0.75, 2)
    assert (found.now_passed, found.now_failed) == (1, 1)
    assert (found.advantages_before.mean, found.advantages_after.largest) == pytest.approx((1, 1))
    assert found.rank_correlation == pytest.approx(-1)
    assert asyncio.run(asked()) == found
    assert client.rollouts.what_if(job_id, "close", step_from=2).answers == 0
    shown = untyped(client.get(f"/regraft/jobs/{job_id}/rollouts/what-if?formula=close", cast_to=object))
    assert set(regraft.WhatIf.model_fields) == set(shown)
    with pytest.raises(openai.BadRequestError, match="Its names are says, close"):
        client.rollouts.what_if(job_id, "length")


def test_an_update_is_attributed_to_its_prompts(
    client: regraft.Regraft, make_async: Callable[[], AsyncRegraft], house: House
) -> None:
    job_id = house.job(status="running")
    answer = {
        "step": 1,
        "split": "train",
        "line": 3,
        "messages": [],
        "finish_reason": "stop",
        "completion_tokens": 1,
        "output_text": "4",
        "score": 1.0,
    }
    house.rollouts(
        job_id,
        1,
        [answer | {"member": member, "advantage": 1.0 - 2 * member, "trained": True} for member in (0, 1)],
    )

    async def asked() -> regraft.Attribution:
        async with make_async() as own:
            return await own.rollouts.attribution(job_id, step=1)

    found = client.rollouts.attribution(job_id, step=1)

    assert (found.with_advantage, found.groups_of_half, found.parts) == (2, 1, None)
    assert [one.share for one in found.largest] == [1.0]
    assert asyncio.run(asked()) == found
    assert client.rollouts.attribution(job_id, step_from=2).answers == 0


def test_the_values_of_the_tokens_of_an_answer_are_read(
    client: regraft.Regraft, make_async: Callable[[], AsyncRegraft], house: House, job_id: str
) -> None:
    async def read() -> regraft.RolloutTokens:
        async with make_async() as remote:
            return await remote.rollouts.tokens(job_id, "rollout_9_t_0_0")

    token = {"text": "4", "logprob": -0.5, "advantage": 1.5, "gap": 0.25}
    answer = {"step": 9, "split": "train", "group": 0, "member": 0, "line": 3, "messages": "[]", "score": 1.0}
    answer |= {"finish_reason": "stop", "completion_tokens": 1, "output_text": "4", "has_tokens": True}
    house.rollouts(job_id, 9, [answer | {"tokens": [token]}])

    [rollout] = client.rollouts.list(job_id, has_tokens=True)
    found = client.rollouts.tokens(job_id, rollout.id)

    assert found.rollout_id == rollout.id == "rollout_9_t_0_0"
    assert [one.model_dump() for one in found.tokens] == [token]
    assert asyncio.run(read()) == found
    with pytest.raises(openai.NotFoundError, match="are not stored"):
        client.rollouts.tokens(job_id, "rollout_1_t_0_0")
