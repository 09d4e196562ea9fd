"""/v1/regraft/evals/import: an eval of another service, with its finished runs (docs/howto/evals.md)."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from sqlalchemy.exc import IntegrityError

from api.http.deps import CurrentProject, Service, ServiceDep
from api.http.idempotency import Once
from api.http.openapi import refusals
from api.http.shapes import Body
from api.resources.estimates import in_reader
from api.resources.eval_requests import MAX_CRITERIA, Metadata, Name
from api.resources.eval_shapes import EvalOut
from core.database.engine import Work
from core.database.ids import new_id
from core.database.states import EVAL_RUN
from core.database.tables import Eval, EvalPage, EvalRun, File, Project, now
from core.errors import ContentDamaged, FileNotFound, InvalidRequest
from core.evals import catalog, imported, lifecycle, summary
from core.evals.items import BLOCK_ROWS, MAX_ROWS, Item, blob_key, encode
from core.masking import hide_in_foreign
from core.storage import files
from core.storage.datasets import LineError, read_objects
from core.storage.uncommitted import Uncommitted
from core.strict import StrictModel
from core.tenancy import tenants
from core.text import to_json

router = APIRouter(prefix="/regraft/evals/import", tags=["regraft"])

MAX_RUNS = 1000
MAX_ITEMS = 10 * MAX_ROWS  # of all runs of an import


Count = Annotated[int, Field(ge=0, le=2**53)]
Score = Annotated[float, Field(ge=-1e300, le=1e300)]


class _Exported(BaseModel):
    """An object of an export: what is read from it is checked, and all of it is kept and shown."""

    model_config = ConfigDict(extra="allow", strict=True)


class ImportedConfig(_Exported):
    type: str
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    item_schema: dict[str, Any] | None = None


class ImportedGrader(_Exported):
    """A criterion, or a part of a `multi` grader, which may have its name in the key."""

    type: str
    headers: dict[str, Any] = {}
    graders: dict[str, "ImportedGrader"] = {}


class ImportedCriterion(ImportedGrader):
    name: str


class ImportedEval(StrictModel):
    """An eval as it was exported; its id is kept where it is free."""

    id: str = ""
    name: Name | None = None
    created_at: Count | None = None
    metadata: Metadata = None
    data_source_config: ImportedConfig
    testing_criteria: Annotated[list[ImportedCriterion], Field(max_length=MAX_CRITERIA)]


class ImportedCounts(_Exported):
    __pydantic_extra__: dict[str, Count]
    total: Count
    passed: Count
    failed: Count
    errored: Count


class ImportedModelUsage(_Exported):
    model_name: str
    invocation_count: Count = 0
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    cached_tokens: Count = 0
    total_tokens: Count = 0


class ImportedCriterionResults(_Exported):
    testing_criteria: str
    passed: Count
    failed: Count


class ImportedRowSource(_Exported):
    type: str
    id: str | None = None
    content: Annotated[list[dict[str, Any]], Field(max_length=MAX_ROWS)] | None = None


class ImportedDataSource(_Exported):
    type: str
    source: ImportedRowSource | None = None


class ImportedRunError(_Exported):
    code: str | None = None
    message: str | None = None


class RunExport(_Exported):
    id: str = ""
    name: str | None = None
    created_at: Count | None = None
    metadata: Metadata = None
    status: str
    model: str | None = None
    data_source: ImportedDataSource
    error: ImportedRunError | None = None
    result_counts: ImportedCounts | None = None
    per_model_usage: list[ImportedModelUsage] | None = None
    per_testing_criteria_results: list[ImportedCriterionResults] | None = None

    @field_validator("status")
    @classmethod
    def _is_final(cls, status: str) -> str:
        if status not in EVAL_RUN.final:
            raise ValueError("only finished runs can be imported")
        return status


class _Result(_Exported):
    name: str
    score: Score | None = None
    passed: bool | None = None


class _Item(_Exported):
    """An output item, as a line of the file."""

    id: Annotated[str, Field(max_length=256)] | None = None
    created_at: Count | None = None
    status: Annotated[str, Field(max_length=64)] | None = None
    datasource_item_id: Annotated[int, Field(ge=-(2**53), le=2**53)] | None = None
    datasource_item: dict[str, Any]
    results: list[_Result] | None = None  # an item that could not be sampled may have none
    sample: dict[str, Any] | None = None


class ImportedRun(StrictModel):
    """A run as it was exported, and the JSONL file of its output items; None: it has none."""

    run: RunExport
    items_file: str | None = None


class EvalImport(Body):
    eval: ImportedEval
    runs: Annotated[list[ImportedRun], Field(max_length=MAX_RUNS)] = []

    @field_validator("runs")
    @classmethod
    def _are_distinct(cls, runs: list[ImportedRun]) -> list[ImportedRun]:
        ids = [sent.run.id for sent in runs if sent.run.id]
        if len(set(ids)) < len(ids):
            raise ValueError("two runs have the same id")
        items = [sent.items_file for sent in runs if sent.items_file is not None]
        if len(set(items)) < len(items):  # the items of a file are stored once
            raise ValueError("two runs have the same items_file; upload a file for each run")
        return runs


class Imported(BaseModel):
    eval: EvalOut
    runs: list[str]


@dataclass(frozen=True)
class _Stored:
    """The fields of a page whose blob is stored."""

    number: int
    blob_key: str
    items: int
    bytes: int
    sha256: str


class _Pages:
    """Writes the pages of imported runs to the blob store, within the storage limit of the project."""

    def __init__(self, service: Service, project: Project) -> None:
        self._service, self._project = service, project
        self.limits = tenants.limits(project, service.settings.default_limits)
        self.uncommitted = Uncommitted(service.blobs)
        self._bytes, self._free = 0, 0

    def check(self) -> None:
        """Raise QuotaExceeded if the project has less storage left than the pages so far, or none."""
        with self._service.database.read() as session:
            free = tenants.free_storage(session, self._project.id, self.limits, needed=max(1, self._bytes))
        self._free = sys.maxsize if free is None else free

    def write(self, items: Iterator[Item]) -> list[_Stored]:
        """Write the pages of one run.

        Raises:
            QuotaExceeded: the next page would exceed the limit. It is not written.
        """
        folder = EvalRun(id=new_id("evalrun_"), project_id=self._project.id)  # not the id that the run gets
        pages: list[_Stored] = []
        line = 0
        while block := list(islice(items, BLOCK_ROWS)):
            for item in block:
                line += 1
                item["line"] = line
            page = encode(block)
            key = blob_key(folder, len(pages), 0)
            self._bytes += len(page.data)
            if self._bytes > self._free:
                self.check()
            self.uncommitted.add(key)
            self._service.blobs.put_bytes(key, page.data)
            pages.append(_Stored(len(pages), key, len(block), len(page.data), page.sha256))
        return pages


@router.post("", status_code=201, response_model=Imported, responses=refusals(404))
async def import_eval(
    body: EvalImport, project: CurrentProject, service: ServiceDep, once: Once
) -> Imported | JSONResponse:
    """Create an eval with runs that another service has finished, readable as runs of this one.

    Its criteria are checked when a new run is created.
    """

    pages = _Pages(service, project)

    def store() -> list[list[_Stored]]:
        pages.check()  # before anything is read
        params = [f"runs[{number}].items_file" for number in range(len(body.runs))]
        found = [
            None if sent.items_file is None else _file(service, project, sent.items_file, param)
            for sent, param in zip(body.runs, params, strict=True)
        ]
        sources = list(zip(found, params, strict=True))
        # All of them, before anything is stored.
        refuse_too_many((param for file, param in sources for _ in _items(service, file, param)), MAX_ITEMS)
        return [pages.write(_items(service, file, param)) for file, param in sources]

    def create(work: Work, stored: list[list[_Stored]]) -> Imported:
        made = _create(work, body, project, stored)
        tenants.refuse_stored_beyond(work.session, project.id, pages.limits)
        pages.uncommitted.keep_all()
        return made

    def run() -> Imported | JSONResponse:
        with pages.uncommitted:
            return once(partial(create, stored=store()))

    return await in_reader(service, project, run)


def refuse_too_many(params: Iterable[str], most: int) -> None:
    """Raise InvalidRequest if there are more than `most` items. `params` has the parameter of each item's file."""
    for count, param in enumerate(params, 1):
        if count > most:
            raise InvalidRequest(
                f"The runs of one import have at most {most:,} items. Import some of the runs as another eval.",
                param=param,
            )


def _create(work: Work, body: EvalImport, project: Project, stored: list[list[_Stored]]) -> Imported:
    try:
        with work.session.begin_nested():
            return _rows(work, body, project, stored, keep_ids=True)
    except IntegrityError:  # a concurrent import has taken one of the ids
        return _rows(work, body, project, stored, keep_ids=False)


def _rows(
    work: Work, body: EvalImport, project: Project, stored: list[list[_Stored]], *, keep_ids: bool
) -> Imported:
    sent = body.eval
    made = Eval(
        id=catalog.free_eval_id(work.session, project.id, sent.id if keep_ids else ""),
        project_id=project.id,
        name=hide_in_foreign(sent.name or ""),  # before it is stored: the audit log has it, too
        metadata_=sent.metadata,
        data_source_config=_config(_sent_fields(sent.data_source_config)),
        testing_criteria=[_sent_fields(spec) for spec in sent.testing_criteria],
    )
    made.created_at = made.updated_at = now() if sent.created_at is None else sent.created_at
    catalog.create(work, made)
    ids = []
    for one, pages in zip(body.runs, stored, strict=True):
        run = _run(one.run, project, sum(page.items for page in pages))
        run.id = catalog.free_run_id(work.session, project.id, one.run.id if keep_ids else "")
        run.eval_id = made.id
        lifecycle.create(work, run)
        work.session.add_all(EvalPage(run_id=run.id, **asdict(page)) for page in pages)
        ids.append(imported.public_id(run.id))
    work.session.flush()
    return Imported(eval=EvalOut.of(made), runs=ids)


def _sent_fields(checked: _Exported) -> dict[str, Any]:
    """The object as it was sent."""
    return checked.model_dump(mode="json", by_alias=True, exclude_unset=True)


def _config(sent: dict[str, Any]) -> dict[str, Any]:
    """The config with the schema of a whole row, and of its items, by which the rows of new runs are checked.

    The first marks an imported config: those of this service are stored without it.
    """
    schema = sent.get("schema")
    if not isinstance(schema, dict):
        item = sent.get("item_schema")
        fields = {"properties": {"item": item}} if isinstance(item, dict) else {}
        return sent | {"schema": {"type": "object"} | fields}
    properties = schema.get("properties")
    item = properties.get("item") if isinstance(properties, dict) else None
    return sent | {"item_schema": item} if isinstance(item, dict) else sent


def _run(sent: RunExport, project: Project, total: int) -> EvalRun:
    plain = _sent_fields(sent)
    source = plain["data_source"]
    content = None
    if isinstance(inner := source.get("source"), dict) and "content" in inner:
        content = inner.pop("content")
    shown = {
        name: plain[name]
        for name in ("result_counts", "per_model_usage", "per_testing_criteria_results")
        if plain.get(name)
    }
    return EvalRun(
        project_id=project.id,
        created_at=now() if sent.created_at is None else sent.created_at,
        name=hide_in_foreign(sent.name or "")[:256],
        metadata_=sent.metadata,
        model=hide_in_foreign(sent.model)[:512] if sent.model else None,
        data_source=source,
        content=content,
        content_bytes=0 if content is None else len(to_json(content)),
        status=sent.status,
        finished_at=now(),  # of the import: the retention of its items begins
        error=plain.get("error"),
        total=total,
        summary=summary.empty([]) | {"imported": shown},
    )


def _file(service: Service, project: Project, file_id: str, param: str) -> File:
    with service.database.read() as session:
        try:
            return files.get(session, project.id, file_id)
        except FileNotFound as missing:
            raise InvalidRequest(missing.message, param=param) from None


def _items(service: Service, file: File | None, param: str) -> Iterator[Item]:
    """The output items of a JSONL file.

    Raises:
        InvalidRequest: names the line that is none.
    """
    if file is None:
        return
    seen: set[str] = set()
    try:
        for row in read_objects(files.read_content(service.blobs, file)):
            if isinstance(row, LineError):
                raise InvalidRequest(f"Invalid items in '{param}': {row}", param=param, code="invalid_rows")
            line, sent = row
            if line > MAX_ROWS:
                raise _invalid_item(param, line, f"a run has at most {MAX_ROWS} items")
            try:
                item = _Item.model_validate(sent)
            except ValidationError as invalid:
                first = invalid.errors()[0]
                where = ".".join(map(str, first["loc"]))
                raise _invalid_item(param, line, f"is not an output item: {where}: {first['msg']}") from None
            if item.id is not None and item.id in seen:
                raise _invalid_item(param, line, "has the id of an earlier item")
            if item.id:
                seen.add(item.id)
            yield {
                "id": item.id or new_id("outputitem_"),
                "datasource_item_id": item.datasource_item_id,
                "status": item.status or "error",
                "created_at": now() if item.created_at is None else item.created_at,
                "datasource_item": item.datasource_item,
                "results": sent.get("results") or [],
                "sample": item.sample or {},
            }
    except files.FileDamaged as damaged:
        raise ContentDamaged(str(damaged)) from None


def _invalid_item(param: str, line: int, why: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid items in '{param}': line {line}: {why}", param=param, code="invalid_rows")
