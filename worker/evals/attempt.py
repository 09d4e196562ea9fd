"""One attempt at a run: sample and grade the items that no earlier attempt has finished."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.claims import Claim, LeaseLost
from core.database.engine import Database
from core.database.ids import new_id
from core.database.tables import Eval, EvalRun, File, now
from core.errors import BudgetReached, ModelNotFound, ServiceError
from core.evals import batches, budgets, items, lifecycle, regrades, rows, summary, targets
from core.evals.batches import Prepare
from core.evals.rows import EvalRow
from core.inference import not_served
from core.registry import Registry
from core.retry import RetryPolicy
from core.settings import Settings
from core.storage import files
from core.storage.datasets import LineError
from core.storage.store import BlobStore
from graders.backends import Backends
from graders.build import build
from graders.calls import CallRetryPolicy, ServerAway
from graders.hazards.pool import OWNER
from graders.judge.judges import HttpJudges, JudgeModel
from graders.prompts import (
    InvalidTrajectory,
    Message,
    PromptTemplate,
    parse_input_messages,
    sample_of,
)
from graders.run import grade_within
from graders.spec import GraderSpec, InvalidGrader, parse_grader, parts_of
from graders.template import RenderError
from graders.types import Grader, Sample, TokenUsage
from worker.evals.grading import Result, result_of, status_of
from worker.evals.record import Entry, PaidCall, QuotaReached, Record
from worker.evals.sampling import (
    ChatSampler,
    GraderUnavailable,
    ItemAnswer,
    ItemSampler,
    ServerUnavailable,
    chat_fields,
)
from worker.evals.spending import Calls, ItemCost, Spending
from worker.refusals import NotKnownYet, not_known_yet, waiting_for_names
from worker.telemetry import EVAL_ITEMS, EVAL_SECONDS

log = logging.getLogger(__name__)

WRITE_SECONDS = 0.2
CANCEL_SECONDS = 0.5  # until a worker sees that its run was cancelled
GRADE_SECONDS = 600.0
# With the servers of judges and endpoints; then the run waits, as for the inference server.
PATIENCE = CallRetryPolicy(away_seconds=60.0)
ROWS_AT_ONCE = 64  # per read of the source in a thread


class RunFailed(Exception):
    """The run cannot be completed. `code` and the message are shown to the user."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


@dataclass(frozen=True)
class RunPlan:
    """What an attempt does with each row."""

    run: EvalRun
    criteria: Sequence[GraderSpec]
    graders: Sequence[Grader]
    sampler: ItemSampler | None  # None: rows have their samples
    metered: bool  # samples are from a model that the operator pays for
    prompt: PromptTemplate | None
    parse_json: bool
    spending: Spending
    is_batch: bool

    @property
    def judged(self) -> list[int]:
        """The criteria that call a judge, by index."""
        return [index for index, spec in enumerate(self.criteria) if _calls_a_judge(spec)]

    def calls(self, entry: Entry) -> Calls:
        """The calls that an item may still make."""
        if entry.sample is not None and entry.sample["error"] is not None:
            return Calls()
        samples = entry.sample is None and self.sampler is not None
        return Calls(samples=samples, judges=sum(index not in entry.grades for index in self.judged))


class RunAttempt:
    """Owned by one event loop."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        blobs: BlobStore,
        backends: Backends,
        claim: Claim,
        retry: RetryPolicy,
        prepare: Prepare,
    ) -> None:
        self.prepare = prepare
        self.settings, self.database, self.blobs, self.backends = settings, database, blobs, backends
        self.claim = claim
        self.record = Record(database, blobs, claim, settings.default_limits, retry)
        self.moved: Callable[[], None] = lambda: None
        self._judges: HttpJudges | None = None
        self._judge_usage: dict[str, TokenUsage] = {}  # of grades, by model

    async def run(self) -> None:
        """Finish the run. Cancel it to drain: what was paid for is recorded before it ends.

        Raises:
            LeaseLost: the run was cancelled, or claimed by another worker.
            RunFailed: the user has to change something.
            NotKnownYet: the operator's files here, or those of the inference server, lack a name that the run has.
            EnvironmentNotBuilt: the worker cannot grade this run until the operator has built an environment.
            an outage (core/outages.py): call `run` of another attempt later.
        """
        with self.database.read() as session:
            run = session.scalars(select(EvalRun).where(EvalRun.id == self.claim.job_id)).one()
            # A retry after its end would find none of the items that its files have replaced.
            if not lifecycle.is_current(session, self.claim):
                raise LeaseLost(f"{self.claim.owner} no longer holds {self.claim.job_id}")
            sent = _criteria(session, run)
            content = run.content
            file = session.scalar(select(File).where(File.id == run.file_id)) if run.file_id else None
            pages = regrades.pages(session, run) if regrades.is_regrade(run) else None
            self.record.load(session, run)
        OWNER.set(run.project_id)
        source = (
            partial(self._rows, run, content, file)
            if pages is None
            else partial(regrades.rows, self.blobs, pages)
        )
        async with AsyncExitStack() as stack:
            plan = await self._plan(run, sent, stack)
            await self._all(plan, source)
        compared = None if pages is None else await asyncio.to_thread(self._compared, run)
        with lifecycle.fenced(self.database, self.claim) as (_, run):
            if compared is not None:
                run.summary = {**run.summary, "comparison": compared}
            lifecycle.complete(run)
            is_batch = run.output_due
        if is_batch:
            await asyncio.to_thread(batches.write_files, self.database, self.blobs, run.id)

    def _compared(self, run: EvalRun) -> dict[str, Any]:
        with self.database.read() as session:
            stored = items.items_of_run(session, run.id)
        return regrades.comparison(run, items.find(self.blobs, stored))

    async def _plan(
        self, run: EvalRun, sent: Sequence[tuple[str, dict[str, Any]]], stack: AsyncExitStack
    ) -> RunPlan:
        """`sent`: the criteria as they are stored, each with its parameter."""
        try:
            criteria = [parse_grader(one, param) for param, one in sent]
            # One client for all criteria, so that the limits of a judge model hold for the run.
            judges = HttpJudges(self.backends.judges, patience=PATIENCE)
            self._judges = await stack.enter_async_context(judges)
            with waiting_for_names():
                graders = [
                    build(
                        spec,
                        judges,
                        self.backends.patient(PATIENCE).endpoints,
                        self.backends.environments,
                        owner=run.project_id,
                    )
                    for spec in criteria
                ]
        except InvalidGrader as cause:
            raise RunFailed("invalid_grader", cause.message) from cause
        sampler: ChatSampler | None = None
        prompt = None
        fields = chat_fields(run.data_source)
        is_batch = batches.is_batch(run)
        if run.model is not None:
            sampler = self._sampler(run, fields)
            stack.push_async_callback(sampler.close)
        if run.model is not None and not is_batch:
            prompt = parse_input_messages(run.data_source["input_messages"], "data_source.input_messages")
        wants_json = fields.get("response_format", {}).get("type") in ("json_schema", "json_object")
        if regrades.is_regrade(run):
            wants_json = run.data_source["parse_json"]
        metered = sampler is not None and not sampler.ours
        kept = run.summary
        spending = Spending(run.budget, budgets.used(kept), summary.paid_items(kept))
        return RunPlan(run, criteria, graders, sampler, metered, prompt, wants_json, spending, is_batch)

    def _sampler(self, run: EvalRun, fields: dict[str, Any]) -> ChatSampler:
        assert run.model is not None
        registry = Registry.load(self.settings.models_file)
        with self.database.read() as session:
            served = targets.served(session, self.blobs, registry, run.project_id, run.model)
        if served is not None:
            settings = self.settings
            address = settings.inference_address(served.base_model)
            if not address:
                raise not_known_yet(not_served(served.base_model))
            ours = JudgeModel(
                address,
                settings.inference_key,
                max_concurrency=settings.eval_concurrency,
                timeout_s=600.0,
            )
            request = {**fields, "model": run.model, "regraft": served.to_wire()}
            return ChatSampler(ours, request, ours=True)
        theirs = self.backends.models.get(run.model)
        if theirs is None:
            gone = RunFailed("model_not_found", f"The model '{run.model}' does not exist any more.")
            is_tuned = run.model.startswith("ft:")  # so the database would have it
            raise gone if is_tuned else not_known_yet(ModelNotFound(run.model, registry.names))
        return ChatSampler(theirs, {**fields, "model": theirs.served_as or run.model}, ours=False)

    def _rows(
        self, run: EvalRun, content: list[Any] | None, file: File | None
    ) -> Iterator[EvalRow | LineError]:
        if content is not None:
            return rows.of_content(content)
        if file is None:
            raise RunFailed("file_deleted", "The file of the run was deleted before it could be read.")
        read = files.read_content(self.blobs, file)
        return (
            batches.requests(read, run.data_source["endpoint"])
            if batches.is_batch(run)
            else rows.of_file(read)
        )

    async def _all(self, plan: RunPlan, source: Callable[[], Iterator[EvalRow | LineError]]) -> None:
        """Work on all unfinished rows, some at a time, while the record is written."""
        queue = self._unfinished(source)
        advance = asyncio.Lock()

        async def work() -> None:
            while True:
                async with advance:  # an async generator serves one caller at a time
                    row = await anext(queue, None)
                if row is None:
                    return
                entry = self.record.entries.pop(row.line, Entry())
                try:
                    async with plan.spending.item(plan.calls(entry), entry.tokens) as cost:
                        await self._run_row(plan, row, entry, cost)
                except BudgetReached as reached:
                    raise RunFailed(BudgetReached.code, reached.message) from reached
                self.moved()

        async def all_of_them() -> None:
            # Twice as many as are sampled at once: the others are being graded.
            async with asyncio.TaskGroup() as workers:
                for _ in range(2 * self.settings.eval_concurrency):
                    workers.create_task(work())

        working = asyncio.create_task(all_of_them())
        beside = [
            asyncio.create_task(self.record.keep_writing(WRITE_SECONDS)),
            asyncio.create_task(self._until_lost()),
        ]
        try:
            await asyncio.wait([working, *beside], return_when=asyncio.FIRST_COMPLETED)
            for task in beside:
                if task.done():
                    task.result()
            try:
                await working
            except BaseExceptionGroup as several:
                raise _first(several) from None
        finally:
            for task in (working, *beside):
                task.cancel()
            await asyncio.gather(working, *beside, return_exceptions=True)
            self._pay_for_lost_grades()
            with suppress(LeaseLost):
                await self._flush()

    async def _flush(self) -> None:
        try:
            await self.record.flush()
        except QuotaReached as reached:
            raise RunFailed("insufficient_quota", str(reached)) from reached

    async def _until_lost(self) -> None:
        """Raise LeaseLost soon after the run was cancelled."""
        while True:
            await asyncio.sleep(CANCEL_SECONDS)
            if not await asyncio.to_thread(self._is_current):
                raise LeaseLost(f"{self.claim.owner} no longer holds {self.claim.job_id}")

    def _is_current(self) -> bool:
        with self.database.read() as session:
            return lifecycle.is_current(session, self.claim)

    async def _unfinished(
        self, source: Callable[[], Iterator[EvalRow | LineError]]
    ) -> AsyncIterator[EvalRow]:
        """The rows to work on: first those that an earlier attempt has started, so that it has not paid in vain."""
        started = frozenset(self.record.entries)
        if started:
            async for row in self._all_rows(source):
                if row.line in started:
                    yield row
        async for row in self._all_rows(source):
            if row.line not in started and not self.record.is_done(row.line):
                yield row

    async def _all_rows(self, source: Callable[[], Iterator[EvalRow | LineError]]) -> AsyncIterator[EvalRow]:
        found = iter(await asyncio.to_thread(source))

        def next_rows() -> list[EvalRow | LineError]:
            return [row for _, row in zip(range(ROWS_AT_ONCE), found, strict=False)]

        try:
            while batch := await asyncio.to_thread(next_rows):
                for row in batch:
                    if isinstance(row, LineError):  # checked when the run was created
                        raise RunFailed("invalid_rows", str(row))
                    yield row
        except files.FileDamaged as damaged:
            raise RunFailed("file_damaged", str(damaged)) from damaged

    async def _run_row(self, plan: RunPlan, row: EvalRow, entry: Entry, cost: ItemCost) -> None:
        """Sample and grade one row, skipping what an earlier attempt has paid for."""
        if plan.is_batch:
            await self._answer(plan, row, cost)
            return
        if (stored := entry.sample) is None:
            with nullcontext() if plan.sampler is None else _timed("sampling"):
                stored = await self._sampled(plan, row, cost)
            if plan.sampler is not None:
                self.record.sampled(row.line, stored, cost.all_tokens)
        grades, numbers = entry.grades, range(len(plan.criteria))
        if stored["error"] is None:
            missing = [index for index in numbers if index not in grades]
            with _timed("grading"):
                found = await asyncio.gather(
                    *(self._graded(plan, row, stored, index, cost) for index in missing)
                )
            grades = grades | dict(zip(missing, found, strict=True))
        results = [grades[index] for index in numbers if index in grades]
        status = status_of(stored, results)
        EVAL_ITEMS.labels(status).inc()
        self.record.finish(
            {
                "id": items.item_id(plan.run.id, row.line),
                "line": row.line,
                "datasource_item_id": row.line,
                "status": status,
                "created_at": now(),
                "datasource_item": row.item,
                "results": results,
                "sample": {name: value for name, value in stored.items() if name != "graded"},
            },
            cost.all_tokens,
        )

    async def _answer(self, plan: RunPlan, row: EvalRow, cost: ItemCost) -> None:
        """Answer one request of a batch. Its error is an answer, too."""
        assert plan.sampler is not None
        try:
            prepared = self.prepare(plan.run.data_source["endpoint"], row.item["body"])
            with _timed("sampling"):
                completion, usage = await plan.sampler.complete(prepared.chat)
            self._pay(PaidCall(plan.run.model or "", usage, metered=False), cost)
            status_code, body = 200, prepared.response(completion)
        except ServiceError as refused:
            status_code, body = refused.status_code, refused.envelope()
        status = "pass" if status_code == 200 else "error"
        EVAL_ITEMS.labels(status).inc()
        self.record.finish(
            {
                "id": batches.request_id(plan.run, row.line),
                "line": row.line,
                "datasource_item_id": row.line,
                "status": status,
                "created_at": now(),
                "datasource_item": {"custom_id": row.item["custom_id"]},
                "results": [],
                "sample": {"status_code": status_code, "request_id": new_id("req_"), "body": body},
            },
            cost.all_tokens,
        )

    async def _sampled(self, plan: RunPlan, row: EvalRow, cost: ItemCost) -> dict[str, Any]:
        if row.rollout is not None:
            return _stored_sample(row.rollout)
        if plan.sampler is None or plan.prompt is None:
            sample = Sample("") if row.sample is None else sample_of(row.sample)
            model = (row.sample or {}).get("model")
            answer = ItemAnswer(sample.output_text, sample.output_tools, sample.finish_reason)
            return _sample({}, [], answer, model, row.sample or {})
        model, messages = plan.run.model or "", list[Message]()
        try:
            messages = plan.prompt.render(row.item)
            answer = await plan.sampler.sample(messages)
        except (RenderError, InvalidTrajectory) as cause:
            answer = ItemAnswer(error={"code": "invalid_prompt", "message": str(cause)})
        if answer.error is None:
            self._pay(PaidCall(model, answer.usage, metered=plan.metered), cost)
        return _sample(chat_fields(plan.run.data_source), messages, answer, model, None)

    async def _graded(
        self, plan: RunPlan, row: EvalRow, stored: dict[str, Any], index: int, cost: ItemCost
    ) -> Result:
        """The grade of a sample by one criterion."""
        spec, grader = plan.criteria[index], plan.graders[index]
        sample = _for_graders(stored, plan)
        try:
            grade = await grade_within(GRADE_SECONDS, grader, sample, row.item)
        except ServerAway as away:
            raise GraderUnavailable(str(away)) from away
        for model, tokens in grade.usage.items():
            self._judge_usage[model] = self._judge_usage.get(model, TokenUsage()) + tokens
            self._pay(_judge_call(model, tokens), cost)
        result = result_of(spec, grade, plan.criteria)
        if grade.usage:  # other grades cost nothing to repeat
            self.record.graded(row.line, index, result, cost.all_tokens)
        return result

    def _pay_for_lost_grades(self) -> None:
        """Record the tokens of replies whose grades were cancelled, or were cut at their deadline."""
        for model, used in {} if self._judges is None else self._judges.ledger.used.items():
            lost = used - self._judge_usage.get(model, TokenUsage())
            if lost != TokenUsage():
                self.record.paid(_judge_call(model, lost))

    def _pay(self, call: PaidCall, cost: ItemCost) -> None:
        self.record.paid(call)
        cost.add(call)


def _judge_call(model: str, tokens: TokenUsage) -> PaidCall:
    return PaidCall(model, asdict(tokens), metered=True, judge=True)


def _calls_a_judge(spec: GraderSpec) -> bool:
    return spec.type in budgets.JUDGES or any(_calls_a_judge(part) for part in parts_of(spec).values())


@contextmanager
def _timed(phase: str) -> Iterator[None]:
    """Observe the duration of a phase of an item that ends without an exception."""
    started = time.perf_counter()
    yield
    EVAL_SECONDS.labels(phase).observe(time.perf_counter() - started)


def _sample(
    fields: dict[str, Any],
    messages: Sequence[Message],
    answer: ItemAnswer,
    model: str | None,
    graded: dict[str, Any] | None,
) -> dict[str, Any]:
    """The `sample` of an output item. `graded` is what graders read of a sample that the row brought along."""
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0, **answer.usage}
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.tool_calls:
        message["tool_calls"] = list(answer.tool_calls)
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    shown = {
        "input": [{**one, "content": _text(one["content"])} for one in messages],
        "output": [] if answer.error is not None else [message],
        "finish_reason": answer.finish_reason,
        "model": model,
        "usage": usage | {"total_tokens": usage["prompt_tokens"] + usage["completion_tokens"]},
        "error": answer.error,
        "temperature": fields.get("temperature"),
        "max_completion_tokens": fields.get("max_completion_tokens"),
        "top_p": fields.get("top_p"),
        "seed": fields.get("seed"),
    }
    return shown if graded is None else shown | {"graded": graded}


def _criteria(session: Session, run: EvalRun) -> list[tuple[str, dict[str, Any]]]:
    """The graders of a run as they are stored, each with its parameter. Raises LeaseLost: their eval was deleted."""
    if regrades.is_regrade(run):
        return [("grader", run.data_source["grader"])]
    if batches.is_batch(run):
        return []
    made = session.scalar(select(Eval).where(Eval.id == run.eval_id))
    if made is None:
        raise LeaseLost(f"{run.eval_id} was deleted")
    return [(f"testing_criteria[{number}]", one) for number, one in enumerate(made.testing_criteria)]


def _stored_sample(rollout: dict[str, Any]) -> dict[str, Any]:
    """The `sample` of a regraded answer: what graders read of it, and its place and score in the job."""
    kept = (
        "id",
        "step",
        "split",
        "group",
        "member",
        "line",
        "score",
        "output_reasoning",
        "output_tools_error",
        "conversation",
        "stop",
    )
    calls = rollout["output_tools"]
    return {
        "output": [
            {"role": "assistant", "content": rollout["output_text"]}
            | ({"tool_calls": calls} if calls else {})
        ],
        "finish_reason": rollout["finish_reason"],
        "error": None,
        "rollout": {name: rollout[name] for name in kept},
    }


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _for_graders(stored: dict[str, Any], plan: RunPlan) -> Sample:
    if "graded" in stored:
        return sample_of(stored["graded"]) if stored["graded"] else Sample("")
    [message] = stored["output"]
    rollout = stored.get("rollout")
    reasoning = message.get("reasoning_content") if rollout is None else rollout.get("output_reasoning")
    text = Sample.from_text(
        message["content"], stored["finish_reason"], parse_json=plan.parse_json, reasoning=reasoning or ""
    )
    return replace(
        text,
        output_tools=tuple(message.get("tool_calls", ())),
        output_tools_error=(rollout or {}).get("output_tools_error") or "",
        messages=tuple((rollout or {}).get("conversation") or ()),
        stop=(rollout or {}).get("stop") or "",
    )


def _first(several: BaseExceptionGroup[BaseException]) -> BaseException:
    """The most telling of the errors of a task group."""
    flat: list[BaseException] = []
    waiting: list[BaseException] = [several]
    while waiting:
        one = waiting.pop()
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
        else:
            flat.append(one)
    known = (RunFailed, NotKnownYet, ServerUnavailable, GraderUnavailable, LeaseLost)
    return next((one for one in flat if isinstance(one, known)), flat[0])
