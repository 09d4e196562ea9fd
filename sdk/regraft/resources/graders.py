"""client.graders: OpenAI's fine_tuning.alpha.graders, tests of a grader on a file of cases, and stored graders."""

import asyncio
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openai.pagination import AsyncCursorPage, SyncCursorPage
from openai.resources.fine_tuning.alpha.graders import AsyncGraders as OpenAIAsyncGraders
from openai.resources.fine_tuning.alpha.graders import Graders as OpenAIGraders

from regraft._rules.rewards import equal
from regraft.requests import InvalidRequestFile, Source, read_grader, read_lines
from regraft.resources import stored_graders
from regraft.resources.stored_graders import PATH, golden_cases, listed, what_to_check
from regraft.types import GoldenCase, GraderCheck, GraderTest, GraderVersion, StoredGrader

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


class Graders(OpenAIGraders):
    """OpenAI's `run` and `validate`, `test`, and the graders that are stored under a name."""

    def test(
        self, grader: Source, cases: str | Path | Iterable[Mapping[str, Any]]
    ) -> "builtins.list[GraderTest]":
        """Grade every row of a JSONL file: {"sample": answer, "expect": reward (optional), ...fields of the row}.

        Raises:
            InvalidRequestFile: a row has no `sample`, or the file is not JSONL.
        """
        spec, rows = read_grader(grader), read_cases(cases)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return [*threads.map(lambda case: judged(case, self._report(spec, case)), rows)]

    def save(self, name: str, grader: Source, *, note: str = "") -> StoredGrader:
        """Make this content the current version of the grader with this name. Equal content is the same version."""
        return self._client.post(PATH, body=stored_graders.body_of(name, grader, note), cast_to=StoredGrader)

    def list(self, *, after: str | None = None, limit: int = 20) -> SyncCursorPage[StoredGrader]:
        """Newest first."""
        return self._client.get_api_list(
            PATH, page=SyncCursorPage[StoredGrader], model=StoredGrader, options=listed(after, limit)
        )

    def retrieve(self, name: str) -> StoredGrader:
        """Raises regraft.GraderNotFound."""
        return self._client.get(f"{PATH}/{name}", cast_to=StoredGrader)

    def delete(self, name: str) -> None:
        """Delete a grader, its versions and its golden cases. Jobs that were created with it keep its content."""
        self._client.delete(f"{PATH}/{name}", cast_to=object)

    def versions(
        self, name: str, *, after: str | None = None, limit: int = 20
    ) -> SyncCursorPage[GraderVersion]:
        """Newest first."""
        return self._client.get_api_list(
            f"{PATH}/{name}/versions",
            page=SyncCursorPage[GraderVersion],
            model=GraderVersion,
            options=listed(after, limit),
        )

    def version(self, name: str, version: str) -> GraderVersion:
        """One version by its hash, or by at least 8 characters of it."""
        return self._client.get(f"{PATH}/{name}/versions/{version}", cast_to=GraderVersion)

    def delete_version(self, name: str, version: str) -> None:
        """Delete a version that is not the current one."""
        self._client.delete(f"{PATH}/{name}/versions/{version}", cast_to=object)

    def add_cases(
        self, name: str, cases: str | Path | Iterable[Mapping[str, Any]]
    ) -> "builtins.list[GoldenCase]":
        """Add golden cases. One of the same sample and row replaces the expectation of an earlier one.

        Args:
            cases: A JSONL file or rows: {"sample": answer, "expect": score or {"min", "max"}, ...fields of the row}, or
                cases as `cases` returns them.
        """
        body = {"cases": golden_cases(cases)}
        page: Any = self._client.post(f"{PATH}/{name}/cases", body=body, cast_to=object)
        return [GoldenCase.construct(**one) for one in page["data"]]

    def cases(self, name: str, *, after: str | None = None, limit: int = 100) -> SyncCursorPage[GoldenCase]:
        """The golden cases, oldest first."""
        return self._client.get_api_list(
            f"{PATH}/{name}/cases",
            page=SyncCursorPage[GoldenCase],
            model=GoldenCase,
            options=listed(after, limit),
        )

    def delete_case(self, name: str, case_id: str) -> None:
        self._client.delete(f"{PATH}/{name}/cases/{case_id}", cast_to=object)

    def check(self, name: str, *, grader: Source | None = None, version: str | None = None) -> GraderCheck:
        """Run all golden cases: with a grader that is not saved, with a version, or with the current version."""
        return self._client.post(
            f"{PATH}/{name}/check", body=what_to_check(name, grader, version), cast_to=GraderCheck
        )

    def _report(self, spec: dict[str, Any], case: Case) -> Any:
        body = {"grader": spec, "model_sample": case.sample, "item": case.item}
        return self._client.post("/fine_tuning/alpha/graders/run", body=body, cast_to=object)


class AsyncGraders(OpenAIAsyncGraders):
    """The asynchronous Graders."""

    async def test(
        self, grader: Source, cases: str | Path | Iterable[Mapping[str, Any]]
    ) -> "builtins.list[GraderTest]":
        """As Graders.test."""
        spec, rows = read_grader(grader), read_cases(cases)
        places = asyncio.Semaphore(AT_ONCE)

        async def grade(case: Case) -> GraderTest:
            body = {"grader": spec, "model_sample": case.sample, "item": case.item}
            async with places:
                report = await self._client.post("/fine_tuning/alpha/graders/run", body=body, cast_to=object)
            return judged(case, report)

        return [*await asyncio.gather(*map(grade, rows))]

    async def save(self, name: str, grader: Source, *, note: str = "") -> StoredGrader:
        body = await asyncio.to_thread(stored_graders.body_of, name, grader, note)
        return await self._client.post(PATH, body=body, cast_to=StoredGrader)

    def list(
        self, *, after: str | None = None, limit: int = 20
    ) -> "AsyncPaginator[StoredGrader, AsyncCursorPage[StoredGrader]]":
        return self._client.get_api_list(
            PATH, page=AsyncCursorPage[StoredGrader], model=StoredGrader, options=listed(after, limit)
        )

    async def retrieve(self, name: str) -> StoredGrader:
        return await self._client.get(f"{PATH}/{name}", cast_to=StoredGrader)

    async def delete(self, name: str) -> None:
        await self._client.delete(f"{PATH}/{name}", cast_to=object)

    def versions(
        self, name: str, *, after: str | None = None, limit: int = 20
    ) -> "AsyncPaginator[GraderVersion, AsyncCursorPage[GraderVersion]]":
        return self._client.get_api_list(
            f"{PATH}/{name}/versions",
            page=AsyncCursorPage[GraderVersion],
            model=GraderVersion,
            options=listed(after, limit),
        )

    async def version(self, name: str, version: str) -> GraderVersion:
        return await self._client.get(f"{PATH}/{name}/versions/{version}", cast_to=GraderVersion)

    async def delete_version(self, name: str, version: str) -> None:
        await self._client.delete(f"{PATH}/{name}/versions/{version}", cast_to=object)

    async def add_cases(
        self, name: str, cases: str | Path | Iterable[Mapping[str, Any]]
    ) -> "builtins.list[GoldenCase]":
        body = {"cases": await asyncio.to_thread(golden_cases, cases)}
        page: Any = await self._client.post(f"{PATH}/{name}/cases", body=body, cast_to=object)
        return [GoldenCase.construct(**one) for one in page["data"]]

    def cases(
        self, name: str, *, after: str | None = None, limit: int = 100
    ) -> "AsyncPaginator[GoldenCase, AsyncCursorPage[GoldenCase]]":
        return self._client.get_api_list(
            f"{PATH}/{name}/cases",
            page=AsyncCursorPage[GoldenCase],
            model=GoldenCase,
            options=listed(after, limit),
        )

    async def delete_case(self, name: str, case_id: str) -> None:
        await self._client.delete(f"{PATH}/{name}/cases/{case_id}", cast_to=object)

    async def check(
        self, name: str, *, grader: Source | None = None, version: str | None = None
    ) -> GraderCheck:
        body = await asyncio.to_thread(what_to_check, name, grader, version)
        return await self._client.post(f"{PATH}/{name}/check", body=body, cast_to=GraderCheck)


def read_cases(source: str | Path | Iterable[Mapping[str, Any]]) -> list[Case]:
    if isinstance(source, str | Path):
        return [_case(number, row, f"{source}: line {number}") for number, row in read_lines(Path(source))]
    return [_case(number, row, f"row {number}") for number, row in enumerate(source, start=1)]


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
