"""client.graders: those that are stored under a name."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import regraft
from regraft import AsyncRegraft, Regraft
from regraft.requests import InvalidRequestFile, read_grader, read_job

from tests.present import untyped
from tests.sdk.conftest import GRADER

LENIENT = GRADER | {"operation": "ilike"}
ROWS: list[dict[str, Any]] = [
    {"sample": "4", "expect": 1, "answer": "4"},
    {"sample": "4!", "expect": {"max": 0.5}, "answer": "4"},
]


def test_a_grader_is_saved_checked_and_deleted(client: Regraft) -> None:
    first = client.graders.save("close", GRADER, note="strict")
    added = client.graders.add_cases("close", ROWS)
    second = client.graders.save("close", LENIENT)

    assert [one.version for one in client.graders.versions("close")] == [second.version, first.version]
    assert client.graders.version("close", first.version[:8]).note == "strict"
    assert [str(one.expect) for one in client.graders.cases("close", limit=1)] == ["1", "to 0.5"]
    assert [one.passed for one in client.graders.check("close").results] == [True, False]
    assert client.graders.check("close", version=first.version).failed == 0
    assert client.graders.check("close", grader=GRADER).version == first.version
    for case in added:
        client.graders.delete_case("close", case.id)
    client.graders.delete_version("close", first.version)
    assert [(one.name, one.versions, one.cases) for one in client.graders.list()] == [("close", 1, 0)]
    client.graders.delete("close")
    with pytest.raises(regraft.GraderNotFound):
        client.graders.retrieve("close")


def test_the_asynchronous_client_does_the_same(
    make_async: Callable[[], AsyncRegraft], tmp_path: Path
) -> None:
    file = tmp_path / "cases.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    async def all_of_it() -> tuple[Any, ...]:
        async with make_async() as client:
            first = await client.graders.save("close", GRADER)
            second = await client.graders.save("close", LENIENT)
            [case, _] = await client.graders.add_cases("close", file)
            checked = await client.graders.check("close", version=first.version)
            versions = [one.version async for one in client.graders.versions("close")]
            cases = [one.id async for one in client.graders.cases("close")]
            named = [one.name async for one in client.graders.list()]
            assert (await client.graders.version("close", second.version)).is_current
            await client.graders.delete_case("close", case.id)
            await client.graders.delete_version("close", first.version)
            left = await client.graders.retrieve("close")
            await client.graders.delete("close")
            return checked.passed, versions == [second.version, first.version], len(cases), named, left.cases

    assert asyncio.run(all_of_it()) == (2, True, 2, ["close"], 1)


def test_code_has_the_name_that_it_is_stored_under_whatever_its_file_is_called(
    client: Regraft, tmp_path: Path
) -> None:
    for file in ("grader.py", "renamed.py"):
        (tmp_path / file).write_text("def grade(sample, item):\n    return 1.0\n")

    saved = [client.graders.save("close", tmp_path / file) for file in ("grader.py", "renamed.py")]

    assert saved[1].versions == 1
    assert saved[1].grader["name"] == "close"
    client.graders.add_cases("close", ROWS[:1])
    assert client.graders.check("close", grader=tmp_path / "renamed.py").version == saved[0].version


def test_the_types_have_the_fields_of_the_server(client: Regraft) -> None:
    client.graders.save("close", GRADER)
    client.graders.add_cases("close", ROWS)

    def shown(path: str) -> Any:
        return untyped(client.get(f"/regraft/graders/close{path}", cast_to=object))

    checked: Any = untyped(client.post("/regraft/graders/close/check", body={}, cast_to=object))
    for kind, value in (
        (regraft.StoredGrader, shown("")),
        (regraft.GraderVersion, shown("/versions")["data"][0]),
        (regraft.GoldenCase, shown("/cases")["data"][0]),
        (regraft.GraderCheck, checked),
        (regraft.types.CheckedCase, checked["results"][0]),
    ):
        assert set(kind.model_fields) == set(value)


def test_cases_of_one_grader_are_added_to_another(client: Regraft) -> None:
    client.graders.save("close", GRADER)
    client.graders.save("other", LENIENT)
    cases = client.graders.add_cases("close", ROWS)

    copies = client.graders.add_cases("other", [case.to_dict() for case in cases])

    assert [(one.sample, one.item) for one in copies] == [(one.sample, one.item) for one in cases]


@pytest.mark.parametrize("row", [{"sample": "4"}, {"expect": 1}, {"sample": 4, "expect": 1}, "4"])
def test_a_case_without_an_answer_or_an_expectation_is_named_by_its_row(client: Regraft, row: Any) -> None:
    with pytest.raises(InvalidRequestFile, match="row 1: expected an object"):
        client.graders.add_cases("close", [row])


def test_a_stored_grader_is_named_in_place_of_a_file(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('model = "tiny"\ngrader = "stored:close"\n')

    assert read_grader("stored:close") == {"type": "stored", "name": "close"}
    assert read_grader(Path("stored:close@0123abcd"))["version"] == "0123abcd"
    assert read_job(job).body["method"]["reinforcement"]["grader"] == {"type": "stored", "name": "close"}
    changed = read_job(job, ["grader=stored:other"]).body
    assert changed["method"]["reinforcement"]["grader"]["name"] == "other"
