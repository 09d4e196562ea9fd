"""validating_files: check every row of both files against the format and the grader, and report every bad line."""

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from core.claims import Claim, LeaseLost
from core.database.engine import Database, WakeMessage
from core.database.tables import File, Job
from core.jobs import estimates, events, lifecycle, resources, usage
from core.jobs.alarm_sizes import too_small
from core.jobs.distillation import hyperparameters_of, teacher_of
from core.jobs.full import is_full
from core.jobs.hyperparameters import Resolved
from core.jobs.job_files import BadFile, in_words
from core.jobs.methods import OFFLINE, variant
from core.jobs.params import FORMAT_PARAM, GRADER_PARAM, SHADOW_PARAM
from core.jobs.tools import has_episodes, has_tools, is_played_by_agent, tools_mismatch, with_functions
from core.jobs.verdict import NOT_HELD_OUT
from core.model_templates import files_of, is_reasoning, tools_problem
from core.outages import Resource, outage
from core.pipelines import lifecycle as pipelines
from core.registry import InvalidRegistry, Registry
from core.retry import RetryPolicy
from core.settings import Settings
from core.storage import files
from core.storage.datasets import MAX_TRAINING_ROWS, MAX_VALIDATION_ROWS, Example, InvalidDataset
from core.storage.store import BlobStore
from core.telemetry import logs, tracing
from core.tool_parsers import NO_FORMAT
from graders.backends import Backends, InvalidBackends
from graders.build import (
    EPISODE_FIELDS,
    NotConfigured,
    alarms_of,
    environments_of,
    graders_of,
    reads_sample,
    reward_model_parts,
    row_problems,
)
from graders.checks import item_schema_problem
from graders.doubts import row_doubts
from graders.environments.catalog import EnvironmentNotBuilt
from graders.judge.usage import TokenLedger
from graders.run import grade_all
from graders.spec import (
    GraderSpec,
    InvalidGrader,
    MathSpec,
    StringCheckSpec,
    TextSimilaritySpec,
    parse_grader,
)
from graders.template import Path, Reference, RenderError, Template
from graders.types import Grade, Grader, Item, Sample
from worker.attempt import report_outage
from worker.heartbeat import HeartbeatGrader
from worker.lease import LeaseKeeper
from worker.model import capacity
from worker.refusals import NotKnownYet, UserMistake, first_line, waiting_for_names
from worker.supervisor.offline_validation import fail_for, validate_offline
from worker.supervisor.probes import NoProbe, probe

log = logging.getLogger(__name__)

DRY_RUN_ROWS, DRY_RUN_SECONDS = 3, 30.0
_MISSING_MODULE = re.compile(r"^(?:ModuleNotFoundError|ImportError): ", re.MULTILINE)
_ANSWER_FIELDS = ("reference_answer", "answer", "solution", "label", "target")


class GraderCannotRun(Exception):
    """A module that the grader imports is missing, so no answer can be graded."""


def validate_next(
    settings: Settings,
    database: Database,
    blobs: BlobStore,
    backends: Backends,
    owner: str,
    *,
    stopping: threading.Event | None = None,
) -> list[WakeMessage] | None:
    """Validate the oldest job in status validating_files.

    Returns the wake-ups to send: one if the files are valid, else none. None: there was no such job. If `stopping` is
    set during an outage, the job is released for another worker.
    """
    with database.write() as session:
        claim = lifecycle.claim_validation(session, owner=owner, lease_seconds=settings.lease_seconds)
    if claim is None:
        return None
    with (
        logs.bound(job_id=claim.job_id, attempt=claim.epoch),
        tracing.attempt(claim.job_id, claim.epoch),
        tracing.span("validation"),
    ):
        try:
            told = partial(report_outage, database, claim)
            wait = time.sleep if stopping is None else stopping.wait
            retry = RetryPolicy(settings.patience_seconds, told, wait=wait, during=partial(_waiting, told))
            with LeaseKeeper(database, claim, settings.lease_seconds) as lease:

                def validate() -> list[WakeMessage]:
                    lease.progressed()
                    return _validate(settings, database, blobs, backends, claim, lease)

                return retry(validate)
        except LeaseLost:
            log.info("%s was cancelled or claimed by another worker during file validation", claim.job_id)
            return []
        except (InvalidRegistry, InvalidBackends) as mistake:  # the operator's
            with suppress(LeaseLost), lifecycle.fenced(database, claim) as (session, job):
                lifecycle.put_off(session, job, reason=str(mistake))
            return []
        except Exception as cause:
            resource = outage(cause)
            if resource is Resource.DATABASE:
                raise
            reason = f"the {resource} was unavailable for {settings.patience_seconds:g} s: {cause}"
            if resource is None:
                log.exception("the validation of %s failed", claim.job_id)
                reason = f"the validation failed: {first_line(cause)}"
            with suppress(LeaseLost), lifecycle.fenced(database, claim) as (session, job):
                if stopping is not None and stopping.is_set():
                    lifecycle.release(session, job)
                else:
                    lifecycle.crashed(session, job, reason=reason, max_failures=settings.max_failures)
            return []


@contextmanager
def _waiting(notify: Callable[[str], None], resource: Resource) -> Iterator[None]:
    """Say what the job waits for. Without the database nothing can be said."""
    if resource is not Resource.DATABASE:
        notify(f"The validation waits for the {resource}.")
    yield


def _wait_for_name(
    database: Database, claim: Claim, missing: NotKnownYet, patience_seconds: float
) -> list[WakeMessage]:
    """Put off a job that names what the files of this machine do not have; fail it if they do not get it soon."""
    with lifecycle.fenced(database, claim) as (session, job):
        if lifecycle.put_off_for(session, job.id, NotKnownYet.PREFIX) < patience_seconds:
            lifecycle.put_off(session, job, reason=str(missing))
            return []
    return fail_for(database, claim, missing.mistake)


@dataclass(frozen=True)
class CheckedJob:
    """The valid files of a job, and warnings about them and the grader."""

    spec: GraderSpec | None  # None: the job distills a teacher
    rows: Sequence[Example]
    valid_rows: Sequence[Example]
    warnings: Sequence[str]


def _validate(
    settings: Settings,
    database: Database,
    blobs: BlobStore,
    backends: Backends,
    claim: Claim,
    lease: LeaseKeeper,
) -> list[WakeMessage]:
    with database.read() as session:
        job = session.query(Job).where(Job.id == claim.job_id).one()
        stored = {file.id: file for file in session.query(File).where(File.project_id == job.project_id)}
    try:
        _refuse_too_large(settings, job)
        if variant(job.method, job.body) in OFFLINE:
            return validate_offline(database, blobs, claim, job, stored, lease.progressed)
        with waiting_for_names():
            checked = _checked(settings, database, blobs, backends, job, stored, lease)
    except (BadFile, UserMistake) as mistake:
        return fail_for(database, claim, mistake)
    except EnvironmentNotBuilt as missing:
        with lifecycle.fenced(database, claim) as (session, job):
            lifecycle.put_off(session, job, reason=str(missing))
        return []
    except NotKnownYet as missing:
        return _wait_for_name(database, claim, missing, settings.patience_seconds)
    sizes = _sizes(settings, job, len(checked.rows))
    estimate = _estimate(settings, database, job, sizes, len(checked.rows), len(checked.valid_rows))
    warnings = [*checked.warnings, *_too_small(settings, job, checked, sizes)]
    with lifecycle.fenced(database, claim) as (session, job):
        if estimate is not None:
            job.usage = {"estimate": estimate}
        for warning in warnings:
            events.append(session, job.id, warning, level="warn")
        if checked.spec is not None and (environments := environments_of(checked.spec)):
            message = f"Python graders run in the environment {', '.join(environments)}"
            events.append(session, job.id, message, data={"grader_environments": environments})
        return pipelines.validated(session, job)


def _checked(
    settings: Settings,
    database: Database,
    blobs: BlobStore,
    backends: Backends,
    job: Job,
    stored: Mapping[str, File],
    lease: LeaseKeeper,
) -> CheckedJob:
    """Check the grader, both files and the memory, then run the grader on a few rows.

    Raises:
        BadFile, UserMistake: the job fails.
        EnvironmentNotBuilt: the job is put off.
        NotConfigured: this machine may know the grader's judge or endpoint later.
    """

    def check(name: str, file: File | None, most: int) -> list[Example]:
        return check_file(blobs, file, spec, name, most, lease.progressed)

    spec: GraderSpec | None = None
    warnings: list[str | None] = []
    try:
        if teacher_of(job) is None:
            spec = parse_grader(job.body["grader"])
            backends.check(spec)  # checked by the API, but this machine may be configured differently
        rows = check("training_file", stored.get(job.training_file), MAX_TRAINING_ROWS)
        valid_rows = check("validation_file", stored.get(job.validation_file or ""), MAX_VALIDATION_ROWS)
        _refuse_mismatch(job, rows, valid_rows)
        rows, valid_rows = with_functions(job.body, rows), with_functions(job.body, valid_rows)
        _refuse_tools(settings, job, spec, rows, valid_rows)
        shadow = _checked_shadow(backends, job, rows, valid_rows, lease.progressed)
        if (problem := _does_not_fit(settings, job, len(rows), len(valid_rows))) is not None:
            raise UserMistake("not_enough_memory", problem, "model")
        if spec is not None:
            with _booked(settings, database, job) as ledger:
                warnings += asyncio.run(_dry_runs(backends, job, spec, shadow, rows, lease, ledger))
    except NotConfigured:
        raise
    except (InvalidGrader, GraderCannotRun) as refused:
        raise UserMistake("invalid_grader", str(refused), GRADER_PARAM) from refused
    if spec is not None:
        for name, examples in (("training", rows), ("validation", valid_rows)):
            warnings += _row_doubts(spec, name, examples, lease.progressed)
    warnings.append(_not_held_out(job, rows, valid_rows))
    return CheckedJob(spec, rows, valid_rows, [warning for warning in warnings if warning])


def _checked_shadow(
    backends: Backends,
    job: Job,
    rows: Sequence[Example],
    valid_rows: Sequence[Example],
    progressed: Callable[[], None],
) -> GraderSpec | None:
    """The specification of the job's shadow grader; None without one.

    Raises:
        UserMistake: this machine cannot run it, it reads what no row has, or it cannot grade a validation row.
        NotConfigured, EnvironmentNotBuilt: as the grader itself.
    """
    if job.body.get("shadow_grader") is None:
        return None
    with _shadow_refused():
        spec = parse_grader(job.body["shadow_grader"], SHADOW_PARAM)
        backends.check(spec, SHADOW_PARAM)
    _refuse_reads(job, spec, SHADOW_PARAM, rows)
    _refuse_shadowed(spec, valid_rows, progressed)
    return spec


async def _dry_runs(
    backends: Backends,
    job: Job,
    spec: GraderSpec,
    shadow: GraderSpec | None,
    rows: Sequence[Example],
    lease: LeaseKeeper,
    ledger: TokenLedger,
) -> list[str | None]:
    """The warnings of the dry runs of the grader and of the shadow grader on the first rows."""
    form = job.body["response_format"]
    schema = None if form is None else form["json_schema"]["schema"]
    dry = partial(_doubt, owner=job.project_id, rows=rows[:DRY_RUN_ROWS], schema=schema)
    doubts = [await dry(backends, spec, lease=lease, ledger=ledger)]
    if shadow is not None:
        with _shadow_refused():
            doubt = await dry(backends, shadow, lease=lease, ledger=ledger)
        doubts.append(None if doubt is None else f"Shadow grader: {doubt}")
    return doubts


@contextmanager
def _shadow_refused() -> Iterator[None]:
    """Name the shadow grader's parameter in the error for a grader that cannot run."""
    try:
        yield
    except NotConfigured:
        raise
    except (InvalidGrader, GraderCannotRun) as refused:
        raise UserMistake("invalid_grader", str(refused), SHADOW_PARAM) from refused


def _refuse_shadowed(spec: GraderSpec, valid_rows: Sequence[Example], progressed: Callable[[], None]) -> None:
    """Raise UserMistake for the first validation row that the shadow grader cannot grade."""
    for row in valid_rows:
        progressed()
        if problems := row_problems(spec, row.item):
            message = f"Line {row.line} of the validation file: {'; '.join(problems)}."
            raise UserMistake("invalid_grader", message, SHADOW_PARAM)


def _refuse_mismatch(job: Job, *files: Sequence[Example]) -> None:
    """Raise UserMistake for functions of rows and tools of the job that do not go together."""
    of_rows = ([(row.line, row.tools) for row in rows] for rows in files)
    if (mismatch := tools_mismatch(job.body, *of_rows)) is not None:
        param, problem = mismatch
        raise UserMistake("invalid_value", problem, param)


def _refuse_tools(
    settings: Settings,
    job: Job,
    spec: GraderSpec | None,
    rows: Sequence[Example],
    valid_rows: Sequence[Example],
) -> None:
    """Raise UserMistake for tools that the model cannot have, or whose schemas cannot be applied to calls, and for a
    grader of calls that no row can have.
    """
    files = (("training_file", rows), ("validation_file", valid_rows))
    for param, many in files:
        line = next((row.line for row in many if row.tools), None)
        if line is not None and (problem := _tools_problem(settings, job)) is not None:
            raise UserMistake("invalid_value", f"Line {line} has tools, and {problem}", param)
        if line is not None and job.body["response_format"] is not None:
            raise UserMistake(
                "invalid_value", f"Line {line} of the {param} has tools: {NO_FORMAT}", FORMAT_PARAM
            )
    if has_tools(job.body):
        _refuse_schemas(files)
    if spec is not None:
        _refuse_reads(job, spec, GRADER_PARAM, rows)


def _refuse_reads(job: Job, spec: GraderSpec, param: str, rows: Sequence[Example]) -> None:
    """Raise UserMistake for a grader that reads what the job's answers never have."""
    if not has_episodes(job.body) and (read := reads_sample(spec, param, EPISODE_FIELDS)) is not None:
        where, name = read
        message = f"'{where}' reads sample.{name}, which is null in a job without 'tools' or 'environment'."
        raise UserMistake("invalid_grader", message, where)
    if is_played_by_agent(job.body):
        return  # the agent has its own tools
    if (read := reads_sample(spec, param, ("output_tools",))) and not any(row.tools for row in rows):
        where, name = read
        message = f"'{where}' reads sample.{name}, and no row of the training file has tools."
        raise UserMistake("invalid_grader", message, where)


def _refuse_schemas(files: Iterable[tuple[str, Sequence[Example]]]) -> None:
    """Raise UserMistake for the first function whose `parameters` are not a JSON schema: no call could be checked."""
    checked = set[str]()
    for param, rows in files:
        for row in rows:
            for number, tool in enumerate(row.tools):
                schema = tool["function"].get("parameters") or {}
                if (text := json.dumps(schema)) in checked:
                    continue
                checked.add(text)
                if problem := item_schema_problem(schema):
                    where = f"tools[{number}].function.parameters"
                    message = f"Line {row.line}: {where} {problem}"
                    raise UserMistake("invalid_value", message, param)


def _tools_problem(settings: Settings, job: Job) -> str | None:
    """None also if the template is not on this machine: the run checks it again."""
    entry = Registry.load(settings.models_file).models.get(job.model)
    if entry is None:
        return None
    files = files_of(entry, settings.model_cache, hyperparameters_of(job).advanced.sampling.chat_template)
    return None if files is None else tools_problem(job.model, entry.tool_parser, files.template_for_tools)


def _row_doubts(
    spec: GraderSpec, file: str, rows: Sequence[Example], progressed: Callable[[], None]
) -> Iterator[str]:
    """Yield a warning for each doubt about rows of a file (graders/doubts.py), with their number."""
    lines: dict[str, list[int]] = {}
    for row in rows:
        progressed()
        for doubt in row_doubts(spec, row.item):
            lines.setdefault(doubt, []).append(row.line)
    for doubt, of_rows in lines.items():
        are = "is" if len(of_rows) == 1 else "are"
        yield f"{len(of_rows)} of {len(rows)} {file} rows {are} doubtful. The first, line {of_rows[0]}, {doubt}."


def _not_held_out(job: Job, rows: Sequence[Example], valid_rows: Sequence[Example]) -> str | None:
    """Return a warning if prompts are in both files."""
    if job.validation_file == job.training_file:
        return NOT_HELD_OUT
    learned = set(map(_prompt_of, rows))
    shared = sum(_prompt_of(row) in learned for row in valid_rows)
    known = {_normalized(row) for row in rows}
    similar = sum(_normalized(row) in known for row in valid_rows) - shared
    if not shared and not similar:
        return None
    near = f", and {similar} more differ from one only in case, spaces or punctuation" if similar else ""
    return (
        f"{shared} of {len(valid_rows)} validation rows have the messages of a training row{near}. Their rewards do "
        "not measure generalization to new prompts."
    )


def _normalized(row: Example) -> str:
    """The messages and tools of a row without case, repeated spaces and the punctuation that is not inside numbers."""
    text = json.dumps([row.messages, row.tools], sort_keys=True, ensure_ascii=False).casefold()
    return " ".join(re.sub(r"[?!'\"\\]|[.,:;](?!\d)", "", re.sub(r"\\[ntr]", " ", text)).split())


def _prompt_of(row: Example) -> str:
    """The messages and tools of a row."""
    return json.dumps([row.messages, row.tools], sort_keys=True)


def _refuse_too_large(settings: Settings, job: Job) -> None:
    """Raise UserMistake if the job is to train all weights of a model that is too large for that."""
    entry = Registry.load(settings.models_file).models.get(job.model)
    problem = capacity.too_large_for_full(entry) if is_full(job) and entry is not None else None
    if problem is not None:
        raise UserMistake("unsupported_model", problem, "model")


def _does_not_fit(settings: Settings, job: Job, rows: int, valid_rows: int) -> str | None:
    entry = Registry.load(settings.models_file).models.get(job.model)
    if entry is None:  # the run reports it
        return None
    asked = hyperparameters_of(job)
    return capacity.job_problem(
        settings,
        job.model,
        entry,
        gpu_class=job.gpu_class,
        gpus=job.gpus,
        requested=asked,
        rows=rows,
        valid_rows=valid_rows,
    )


def _sizes(settings: Settings, job: Job, train_rows: int) -> Resolved | None:
    """The job's hyperparameters for this number of training rows; None: its model is in no registry of this machine."""
    entry = Registry.load(settings.models_file).models.get(job.model)
    if entry is None:
        return None
    asked = hyperparameters_of(job)
    reasons = is_reasoning(entry, settings.model_cache, asked.advanced.sampling.chat_template)
    return estimates.sizes(asked, rows=train_rows, context=entry.context, reasons=reasons)


def _too_small(settings: Settings, job: Job, checked: CheckedJob, sizes: Resolved | None) -> list[str]:
    """The warning that alarms cannot fire in a job of this size."""
    if sizes is None or checked.spec is None:
        return []
    alarms = alarms_of(checked.spec, has_shadow=job.body.get("shadow_grader") is not None)
    return too_small(sizes, settings.warnings, alarms, len(checked.valid_rows))


def _estimate(
    settings: Settings, database: Database, job: Job, sizes: Resolved | None, train_rows: int, valid_rows: int
) -> dict[str, Any] | None:
    """Estimate the job's cost from earlier jobs with its model; the run's own steps refine the estimate."""
    with database.read() as session:
        chosen = resources.resources_of(settings, job.gpu_class, job.gpus, job.nodes)
        as_many = resources.with_as_many(settings, job.gpu_class, chosen)
        past = estimates.history(session, model=job.model, gpu_class=job.gpu_class, where=as_many)
    if sizes is None or past is None:
        return None
    return estimates.before_start(past, sizes, train_rows=train_rows, valid_rows=valid_rows)


@contextmanager
def _booked(settings: Settings, database: Database, job: Job) -> Iterator[TokenLedger]:
    """Count what judges use during the context as usage of the job's project, however it ends."""
    ledger = TokenLedger()
    try:
        yield ledger
    finally:
        retry = RetryPolicy(settings.patience_seconds, log.warning)
        tokens = ledger.unbooked
        usage.book_grader_tokens(database, job.project_id, job.model, tokens=tokens, retry=retry)


async def _doubt(
    backends: Backends,
    spec: GraderSpec,
    owner: str,
    rows: Sequence[Example],
    schema: Mapping[str, Any] | None,
    lease: LeaseKeeper,
    ledger: TokenLedger,
) -> str | None:
    """Return the dry run's warning. A lost lease aborts it at once, even during a grade.

    Raises:
        LeaseLost
    """
    loop, running = asyncio.get_running_loop(), asyncio.current_task()
    assert running is not None
    lease.when_lost(lambda: loop.call_soon_threadsafe(running.cancel))
    try:
        async with backends.open(spec, owner=owner, ledger=ledger) as grader:
            return await dry_run(HeartbeatGrader(grader, lease.moved), spec, rows, schema=schema)
    except asyncio.CancelledError:
        lease.progressed()
        raise
    finally:
        lease.when_lost(lambda: None)


def check_file(
    blobs: BlobStore,
    file: File | None,
    spec: GraderSpec | None,
    param: str,
    max_rows: int,
    progressed: Callable[[], None] = lambda: None,
) -> list[Example]:
    """Return the rows of a valid file. Raises BadFile with the file's id and the numbers of its bad lines.

    Args:
        spec: the grader; None: the job distills a teacher.
        progressed: called for each row; may raise, to stop.
    """
    method = "distillation" if spec is None else "reinforcement"
    if file is None:
        raise BadFile(param, f"The {param.replace('_', ' ')} was deleted before it could be read.")

    def problems_of(row: Example) -> list[str]:
        progressed()
        return [] if spec is None else row_problems(spec, row.item)

    try:
        return files.read_rows(blobs, file, check=problems_of, max_rows=max_rows)
    except InvalidDataset as cause:
        raise BadFile(param, in_words(cause, blobs, file, method, param)) from cause
    except files.FileDamaged as damage:
        raise BadFile(param, str(damage)) from damage


async def dry_run(
    grader: Grader, spec: GraderSpec, rows: Sequence[Example], *, schema: Mapping[str, Any] | None = None
) -> str | None:
    """Grade a correct and an empty reply to a few rows. Returns a warning if the grader fails or scores all alike.

    So does a part of a multi or of a select that scores all alike. There is no warning of replies to rows with tools:
    which calls are right is not known.

    The correct reply is the grader's own reference, if its spec has one. It is a guess, so a failure is a warning, with
    one exception. Under a `schema` both replies satisfy it, as every answer of the job will: the correct one has the
    row's values.

    Raises:
        GraderCannotRun: every reply failed because of a missing module.
    """
    try:
        replies = [(reply, row) for row in rows for reply in _replies(spec, row.item, schema)]
    except NoProbe as cause:
        log.info("no dry run of the grader: %s", cause)
        return None
    # The weights of reward models are not loaded here, so their scores are made up, and differ.
    models = [part.model for _, part in reward_model_parts(spec)]
    pairs = [
        (
            replace(
                Sample.from_text(reply, parse_json=schema is not None),
                model_scores=dict.fromkeys(models, float(number)),
            ),
            row.item,
        )
        for number, (reply, row) in enumerate(replies)
    ]
    # Sequential, because the deadline of a grade must not include queueing.
    grades = await grade_all(grader, pairs, concurrency=1, timeout_s=DRY_RUN_SECONDS)
    reasons = [grade.reason for grade in grades if grade.score is None]
    if len(reasons) == len(grades) and all(_MISSING_MODULE.search(reason) for reason in reasons):
        raise GraderCannotRun(f"The grader cannot run: {reasons[0]}")
    judged = [(grade, reply) for grade, (reply, row) in zip(grades, replies, strict=True) if not row.tools]
    return _warning([grade for grade, _ in judged], [reply for _, reply in judged])


def _warning(grades: Sequence[Grade], replies: Sequence[str]) -> str | None:
    """The warning of the dry run, by the grades of its replies."""
    failed = [grade.reason for grade in grades if grade.score is None]
    if failed:
        return f"The grader failed on {len(failed)} of {len(grades)} test replies. {failed[0]}"
    scores = {grade.score for grade in grades}
    if len(scores) == 1 and len(set(replies)) > 1:
        return (
            f"The grader gave {len(grades)} different test replies, correct and empty ones, the same score "
            f"({scores.pop():g}). If it scores all answers alike, the job has nothing to learn."
        )
    return _constant_part(grades, replies)


def _constant_part(grades: Sequence[Grade], replies: Sequence[str]) -> str | None:
    """Return a warning if some parts of the grader gave different replies the same score, each part its own."""
    constant = []
    for key in dict.fromkeys(key for grade in grades for key in grade.sub_grades):
        graded = [
            (reply, grade.sub_grades[key].score)
            for reply, grade in zip(replies, grades, strict=True)
            if key in grade.sub_grades
        ]
        different, scores = {reply for reply, _ in graded}, {score for _, score in graded}
        if len(different) > 1 and len(scores) == 1 and (score := scores.pop()) is not None:
            constant.append(f"'{key}' ({score:g})")
    if not constant:
        return None
    return (
        f"Parts of the grader gave all {len(grades)} test replies, correct and empty ones, the same score: "
        f"{', '.join(constant)}. A part that scores all answers alike has no signal."
    )


def _replies(spec: GraderSpec, item: Item, schema: Mapping[str, Any] | None) -> list[str]:
    if schema is None:
        return [*reference_answers(spec, item), ""]
    right, empty = probe(schema, item, dict(_placed(spec, item))), probe(schema)
    return [json.dumps(right, ensure_ascii=False), json.dumps(empty, ensure_ascii=False)]


def _placed(spec: GraderSpec, item: Item) -> Iterator[tuple[Path, str]]:
    """Return the paths of a JSON answer that the grader compares with values of the row, and these values."""
    for part in graders_of(spec, item):
        if isinstance(part, StringCheckSpec | TextSimilaritySpec | MathSpec):
            read, reference = Template.parse(part.input).parts, Template.parse(part.reference)
            match read:
                case (Reference("sample", ("output_json", *path)),) if reference.item_paths:
                    with suppress(RenderError):  # it may read the answer as well
                        yield tuple(path), reference.render(Sample.from_text(""), item)


def reference_answers(spec: GraderSpec, item: Item) -> list[str]:
    """Return the grader's reference for this row; if its spec has none, a field whose name suggests it."""
    references = [getattr(part, "reference", None) for part in graders_of(spec, item)]
    templates = [Template.parse(text) for text in references if isinstance(text, str)]
    named = [template.render(Sample.from_text(""), item) for template in templates if template.item_paths]
    guessed = [item[key] for key in _ANSWER_FIELDS if isinstance(item.get(key), str)]
    return list(dict.fromkeys(named or guessed[:1]))
