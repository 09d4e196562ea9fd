"""Written by .ci/sync_client.py from regraft.resources.graders; do not edit."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openai.pagination import SyncCursorPage
from openai.resources.fine_tuning.alpha.graders import Graders as OpenAIGraders

from regraft.concurrency import each
from regraft.requests import Source, read_grader
from regraft.resources import stored_graders
from regraft.resources.graders import AT_ONCE, Case, GraderTest, judged, read_cases
from regraft.resources.stored_graders import PATH, golden_cases, listed, what_to_check
from regraft.routes import route
from regraft.types import GoldenCase, GraderCheck, GraderVersion, StoredGrader

if TYPE_CHECKING:
    import builtins


class Graders(OpenAIGraders):
    """OpenAI's `run` and `validate`, `test`, and the graders that are stored under a name."""

    def test(
        self, grader: Source, cases: str | Path | Iterable[Mapping[str, Any]]
    ) -> "builtins.list[GraderTest]":
        """Grade every row of a JSONL file: {"sample": answer, "expect": reward (optional), ...fields of the row}.

        Raises:
            InvalidRequestFile: a row has no `sample`, or the file is not JSONL.
        """
        spec = read_grader(grader)
        rows = read_cases(cases)

        def grade(case: Case) -> GraderTest:
            body = {"grader": spec, "model_sample": case.sample, "item": case.item}
            report = self._client.post("/fine_tuning/alpha/graders/run", body=body, cast_to=object)
            return judged(case, report)

        return each(grade, rows, AT_ONCE)

    def save(self, name: str, grader: Source, *, note: str = "") -> StoredGrader:
        """Make this content the current version of the grader with this name. Equal content is the same version."""
        body = stored_graders.body_of(name, grader, note)
        return self._client.post(PATH, body=body, cast_to=StoredGrader)

    def list(self, *, after: str | None = None, limit: int = 20) -> SyncCursorPage[StoredGrader]:
        """Newest first."""
        return self._client.get_api_list(
            PATH, page=SyncCursorPage[StoredGrader], model=StoredGrader, options=listed(after, limit)
        )

    def retrieve(self, name: str) -> StoredGrader:
        """Raises regraft.GraderNotFound."""
        return self._client.get(route(PATH, name), cast_to=StoredGrader)

    def delete(self, name: str) -> None:
        """Delete a grader, its versions and its golden cases. Jobs that were created with it keep its content."""
        self._client.delete(route(PATH, name), cast_to=object)

    def versions(
        self, name: str, *, after: str | None = None, limit: int = 20
    ) -> SyncCursorPage[GraderVersion]:
        """Newest first."""
        return self._client.get_api_list(
            route(PATH, name, "versions"),
            page=SyncCursorPage[GraderVersion],
            model=GraderVersion,
            options=listed(after, limit),
        )

    def version(self, name: str, version: str) -> GraderVersion:
        """One version by its hash, or by at least 8 characters of it."""
        return self._client.get(route(PATH, name, "versions", version), cast_to=GraderVersion)

    def delete_version(self, name: str, version: str) -> None:
        """Delete a version that is not the current one."""
        self._client.delete(route(PATH, name, "versions", version), cast_to=object)

    def add_cases(
        self, name: str, cases: str | Path | Iterable[Mapping[str, Any]]
    ) -> "builtins.list[GoldenCase]":
        """Add golden cases. One of the same sample and row replaces the expectation of an earlier one.

        Args:
            cases: A JSONL file or rows: {"sample": answer, "expect": score or {"min", "max"}, ...fields of the row}, or
                cases as `cases` returns them.
        """
        body = {"cases": golden_cases(cases)}
        page: Any = self._client.post(route(PATH, name, "cases"), body=body, cast_to=object)
        return [GoldenCase.construct(**one) for one in page["data"]]

    def cases(self, name: str, *, after: str | None = None, limit: int = 100) -> SyncCursorPage[GoldenCase]:
        """The golden cases, oldest first."""
        return self._client.get_api_list(
            route(PATH, name, "cases"),
            page=SyncCursorPage[GoldenCase],
            model=GoldenCase,
            options=listed(after, limit),
        )

    def delete_case(self, name: str, case_id: str) -> None:
        self._client.delete(route(PATH, name, "cases", case_id), cast_to=object)

    def check(self, name: str, *, grader: Source | None = None, version: str | None = None) -> GraderCheck:
        """Run all golden cases: with a grader that is not saved, with a version, or with the current version."""
        body = what_to_check(name, grader, version)
        return self._client.post(route(PATH, name, "check"), body=body, cast_to=GraderCheck)
