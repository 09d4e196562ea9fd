"""client.graders: OpenAI's fine_tuning.alpha.graders, and tests of a grader on a file of cases."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai.resources.fine_tuning.alpha.graders import AsyncGraders as OpenAIAsyncGraders
from openai.resources.fine_tuning.alpha.graders import Graders as OpenAIGraders

from regraft.requests import InvalidRequestFile, Source, read_grader
from regraft.types import GraderTest

AT_ONCE = 8
CLOSE = 1e-6  # tolerance for equal rewards


@dataclass(frozen=True)
class Case:
    """A test case: an answer, its row, and the expected reward if known."""

    line: int
    sample: str
    item: dict[str, Any]
    expect: float | None


class Graders(OpenAIGraders):
    """OpenAI's `run` and `validate`, and `test`."""

    def test(self, grader: Source, cases: str | Path | Iterable[Mapping[str, Any]]) -> list[GraderTest]:
        """Grade every row of a JSONL file: {"sample": answer, "expect": reward (optional), ...fields of the row}.

        Raises:
            InvalidRequestFile: a row has no `sample`, or the file is not JSONL.
        """
        spec, rows = read_grader(grader), read_cases(cases)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return list(threads.map(lambda case: judged(case, self._report(spec, case)), rows))

    def _report(self, spec: dict[str, Any], case: Case) -> Any:
        body = {"grader": spec, "model_sample": case.sample, "item": case.item}
        return self._client.post("/fine_tuning/alpha/graders/run", body=body, cast_to=object)


class AsyncGraders(OpenAIAsyncGraders):
    """OpenAI's `run` and `validate`, and `test`."""

    async def test(self, grader: Source, cases: str | Path | Iterable[Mapping[str, Any]]) -> list[GraderTest]:
        """As Graders.test."""
        spec, rows = read_grader(grader), read_cases(cases)
        places = asyncio.Semaphore(AT_ONCE)

        async def grade(case: Case) -> GraderTest:
            body = {"grader": spec, "model_sample": case.sample, "item": case.item}
            async with places:
                report = await self._client.post("/fine_tuning/alpha/graders/run", body=body, cast_to=object)
            return judged(case, report)

        return list(await asyncio.gather(*map(grade, rows)))


def read_cases(source: str | Path | Iterable[Mapping[str, Any]]) -> list[Case]:
    if isinstance(source, str | Path):
        return [_case(number, row, f"{source}: line {number}") for number, row in _lines(Path(source))]
    return [_case(number, row, f"row {number}") for number, row in enumerate(source, start=1)]


def judged(case: Case, report: Any) -> GraderTest:
    """The server's report on a case, compared with the expectation."""
    metadata = report["metadata"]
    flags = metadata["errors"]
    errors = [name for name, up in flags.items() if up is True]
    details = {name: flags.get(f"{name}_details") for name in errors}
    right = case.expect is None or abs(report["reward"] - case.expect) <= CLOSE
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


def _lines(path: Path) -> Iterable[tuple[int, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise InvalidRequestFile(f"{path}: {cause}") from cause
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as cause:
                raise InvalidRequestFile(f"{path}: line {number}: {cause}") from cause


def _case(line: int, row: Any, where: str) -> Case:
    if not isinstance(row, Mapping) or not isinstance(row.get("sample"), str):
        raise InvalidRequestFile(f'{where}: expected an object with "sample", the answer to grade')
    expect = row.get("expect")
    if expect is not None and (isinstance(expect, bool) or not isinstance(expect, int | float)):
        raise InvalidRequestFile(f'{where}: "expect" must be a number')
    item = {key: value for key, value in row.items() if key not in ("sample", "expect")}
    return Case(line, row["sample"], item, expect)
