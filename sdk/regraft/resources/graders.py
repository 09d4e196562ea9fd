"""client.graders: OpenAI's fine_tuning.alpha.graders, tests of a grader on a file of cases, and stored graders."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openai import BaseModel
from openai.pagination import AsyncCursorPage
from openai.resources.fine_tuning.alpha.graders import AsyncGraders as OpenAIAsyncGraders

from regraft._rules.rewards import equal
from regraft.concurrency import async_each
from regraft.requests import InvalidRequestFile, Source, read_each, read_grader
from regraft.resources import stored_graders
from regraft.resources.stored_graders import PATH, golden_cases, listed, what_to_check
from regraft.routes import route
from regraft.types import GoldenCase, GraderCheck, GraderVersion, StoredGrader

if TYPE_CHECKING:
    import builtins

    from openai._base_client import AsyncPaginator

AT_ONCE = 8


@dataclass(frozen=True)
class Case:
    """A test case: an answer, its row, and the expected reward if known."""

    line: int
    sample: str
    item: dict[str, Any]
    expect: float | None


class GraderTest(BaseModel):
    """The result of one test case of a grader."""

    line: int
    reward: float
    expect: float | None = None
    passed: bool  # no error, and the expected reward if given
    reason: str = ""  # for a python grader that raised: the whole traceback, the exception last
    errors: list[str] = []  # the set flags, such as "sample_parse_error"
    error_details: dict[str, str] = {}  # by flag, if the server explains it
    output: str = ""  # printed by python graders
    execution_time: float | None = None  # seconds
    sub_rewards: dict[str, float] = {}


class AsyncGraders(OpenAIAsyncGraders):
    """OpenAI's `run` and `validate`, `test`, and the graders that are stored under a name."""

    async def test(
        self, grader: Source, cases: str | Path | Iterable[Mapping[str, Any]]
    ) -> "builtins.list[GraderTest]":
        """Grade every row of a JSONL file: {"sample": answer, "expect": reward (optional), ...fields of the row}.

        Raises:
            InvalidRequestFile: a row has no `sample`, or the file is not JSONL.
        """
        spec = await asyncio.to_thread(read_grader, grader)
        rows = await asyncio.to_thread(read_cases, cases)

        async def grade(case: Case) -> GraderTest:
            body = {"grader": spec, "model_sample": case.sample, "item": case.item}
            report = await self._client.post("/fine_tuning/alpha/graders/run", body=body, cast_to=object)
            return judged(case, report)

        return await async_each(grade, rows, AT_ONCE)

    async def save(self, name: str, grader: Source, *, note: str = "") -> StoredGrader:
        """Make this content the current version of the grader with this name. Equal content is the same version."""
        body = await asyncio.to_thread(stored_graders.body_of, name, grader, note)
        return await self._client.post(PATH, body=body, cast_to=StoredGrader)

    def list(
        self, *, after: str | None = None, limit: int = 20
    ) -> "AsyncPaginator[StoredGrader, AsyncCursorPage[StoredGrader]]":
        """Newest first."""
        return self._client.get_api_list(
            PATH, page=AsyncCursorPage[StoredGrader], model=StoredGrader, options=listed(after, limit)
        )

    async def retrieve(self, name: str) -> StoredGrader:
        """Raises regraft.GraderNotFound."""
        return await self._client.get(route(PATH, name), cast_to=StoredGrader)

    async def delete(self, name: str) -> None:
        """Delete a grader, its versions and its golden cases. Jobs that were created with it keep its content."""
        await self._client.delete(route(PATH, name), cast_to=object)

    def versions(
        self, name: str, *, after: str | None = None, limit: int = 20
    ) -> "AsyncPaginator[GraderVersion, AsyncCursorPage[GraderVersion]]":
        """Newest first."""
        return self._client.get_api_list(
            route(PATH, name, "versions"),
            page=AsyncCursorPage[GraderVersion],
            model=GraderVersion,
            options=listed(after, limit),
        )

    async def version(self, name: str, version: str) -> GraderVersion:
        """One version by its hash, or by at least 8 characters of it."""
        return await self._client.get(route(PATH, name, "versions", version), cast_to=GraderVersion)

    async def delete_version(self, name: str, version: str) -> None:
        """Delete a version that is not the current one."""
        await self._client.delete(route(PATH, name, "versions", version), cast_to=object)

    async def add_cases(
        self, name: str, cases: str | Path | Iterable[Mapping[str, Any]]
    ) -> "builtins.list[GoldenCase]":
        """Add golden cases. One of the same sample and row replaces the expectation of an earlier one.

        Args:
            cases: A JSONL file or rows: {"sample": answer, "expect": score or {"min", "max"}, ...fields of the row}, or
                cases as `cases` returns them.
        """
        body = {"cases": await asyncio.to_thread(golden_cases, cases)}
        page: Any = await self._client.post(route(PATH, name, "cases"), body=body, cast_to=object)
        return [GoldenCase.construct(**one) for one in page["data"]]

    def cases(
        self, name: str, *, after: str | None = None, limit: int = 100
    ) -> "AsyncPaginator[GoldenCase, AsyncCursorPage[GoldenCase]]":
        """The golden cases, oldest first."""
        return self._client.get_api_list(
            route(PATH, name, "cases"),
            page=AsyncCursorPage[GoldenCase],
            model=GoldenCase,
            options=listed(after, limit),
        )

    async def delete_case(self, name: str, case_id: str) -> None:
        await self._client.delete(route(PATH, name, "cases", case_id), cast_to=object)

    async def check(
        self, name: str, *, grader: Source | None = None, version: str | None = None
    ) -> GraderCheck:
        """Run all golden cases: with a grader that is not saved, with a version, or with the current version."""
        body = await asyncio.to_thread(what_to_check, name, grader, version)
        return await self._client.post(route(PATH, name, "check"), body=body, cast_to=GraderCheck)


def read_cases(source: str | Path | Iterable[Mapping[str, Any]]) -> list[Case]:
    """Raises InvalidRequestFile with all lines that are no case."""
    return read_each(source, _case)


def judged(case: Case, report: Any) -> GraderTest:
    """The server's report on a case, compared with the expectation."""
    metadata = report["metadata"]
    flags = metadata["errors"]
    errors = [name for name, up in flags.items() if up is True]
    details = {name: flags.get(f"{name}_details") for name in errors}
    right = case.expect is None or equal(report["reward"], case.expect)
    return GraderTest.construct(
        line=case.line,
        reward=report["reward"],
        expect=case.expect,
        passed=right and not errors,
        reason=metadata.get("reason") or "",
        errors=errors,
        error_details={name: text for name, text in details.items() if text},
        output=metadata.get("output") or "",
        execution_time=metadata.get("execution_time"),
        sub_rewards=report.get("sub_rewards") or {},
    )


def _case(line: int, row: Any, where: str) -> Case:
    if not isinstance(row, Mapping) or not isinstance(row.get("sample"), str):
        raise InvalidRequestFile(f'{where}: expected an object with "sample", the answer to grade')
    expect = row.get("expect")
    if expect is not None and (isinstance(expect, bool) or not isinstance(expect, int | float)):
        raise InvalidRequestFile(f'{where}: "expect" must be a number')
    item = {key: value for key, value in row.items() if key not in ("sample", "expect")}
    return Case(line, row["sample"], item, expect)
