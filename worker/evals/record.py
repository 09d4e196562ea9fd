"""The durable record of a run in progress: a journal of what was paid for, and pages of complete blocks.

Every write is fenced by the claim. Entries of several items are committed together, a few times a second: a worker that
is killed loses the requests in flight and the last commit interval, and nothing else.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from core.claims import Claim, LeaseLost
from core.database.engine import Database
from core.database.tables import EvalJournal, EvalPage, EvalRun, Project
from core.errors import QuotaExceeded
from core.evals import items, lifecycle, summary
from core.evals.items import BLOCK_ROWS, Item, block_of
from core.jobs import usage
from core.retry import RetryPolicy
from core.storage.store import BlobStore
from core.tenancy import tenants
from core.tenancy.limits import Limits
from core.text import storable_json
from worker.evals.grading import Result

log = logging.getLogger(__name__)

Part = dict[str, Any]
"""A row of the journal: {"sample", "tokens"} or {"grade", "tokens"}, or {"item"} once the item is finished. `tokens` is
the usage of the calls of the item until then."""


@dataclass
class Entry:
    """What earlier attempts have recorded of an unfinished item. Each part was written once."""

    sample: dict[str, Any] | None = None  # None: it has no sample yet, or one that costs nothing
    grades: dict[int, Result] = field(default_factory=dict)  # by the index of their criterion
    tokens: int = 0

    def add(self, number: int, part: Part) -> None:
        if number == 0:
            self.sample = part["sample"]
        else:
            self.grades[number - 1] = part["grade"]
        self.tokens = max(self.tokens, part["tokens"])


class QuotaReached(Exception):
    """The project has used up its grader tokens, GPU time or storage."""


@dataclass(frozen=True)
class PaidCall:
    """A call of a model that was answered, with its tokens by kind."""

    model: str
    usage: Mapping[str, int]
    metered: bool  # counts toward the project's limit of grader tokens
    judge: bool = False

    @property
    def tokens(self) -> int:
        return self.usage.get("prompt_tokens", 0) + self.usage.get("completion_tokens", 0)


@dataclass
class _Pending:
    """The content of the next commit."""

    parts: dict[tuple[int, int], Part] = field(default_factory=dict)  # by line and number
    finished: list[Item] = field(default_factory=list)
    item_tokens: list[int] = field(default_factory=list)  # of finished items
    calls: list[PaidCall] = field(default_factory=list)


class Record:
    """The items of one attempt at a run."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        claim: Claim,
        defaults: Limits,
        retry: RetryPolicy,
    ) -> None:
        self.database, self.blobs, self.claim, self.defaults = database, blobs, claim, defaults
        self._pending = _Pending()
        self._unwritten: list[_Pending] = []  # in order; several after a commit that failed
        self._changed = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None
        self._writes = 0  # commits of this run so far: a repeated one is recognized
        self._retry = retry
        self._blocks: dict[int, list[Item]] = defaultdict(list)
        self._total = 0
        self.done: set[int] = set()
        self.entries: dict[int, Entry] = defaultdict(Entry)
        self._graded: set[int] = set()  # lines with grades in the journal
        self.pages: set[int] = set()

    def load(self, session: Session, run: EvalRun) -> None:
        """Read what earlier attempts recorded."""
        self._total = run.total
        self._writes = run.summary.get("writes", 0)
        self.pages = set(session.scalars(select(EvalPage.number).where(EvalPage.run_id == run.id)))
        for row in session.scalars(select(EvalJournal).where(EvalJournal.run_id == run.id)):
            if "item" in row.data:
                self.done.add(row.line)
                self._blocks[block_of(row.line)].append(row.data["item"])
            else:
                self.entries[row.line].add(row.part, row.data)
                self._graded.add(row.line)

    def is_done(self, line: int) -> bool:
        return line in self.done or block_of(line) in self.pages

    # Called by the items; nothing here waits.

    def paid(self, call: PaidCall) -> None:
        self._pending.calls.append(call)

    def sampled(self, line: int, sample: dict[str, Any], tokens: int) -> None:
        """Keep the sample of an item that has used this number of tokens so far."""
        self._note(line, 0, {"sample": sample, "tokens": tokens})

    def graded(self, line: int, index: int, grade: Result, tokens: int) -> None:
        """Keep the grade of the criterion with this index."""
        self._graded.add(line)
        self._note(line, index + 1, {"grade": grade, "tokens": tokens})

    def _note(self, line: int, number: int, part: Part) -> None:
        self._pending.parts[line, number] = storable_json(part)
        self._changed.set()

    def finish(self, item: Item, tokens: int) -> None:
        """Keep a finished item that used this number of tokens over all attempts."""
        item = storable_json(item)
        line = item["line"]
        self._pending.parts[line, 0] = {"item": item}
        self._pending.finished.append(item)
        self._pending.item_tokens.append(tokens)
        self.done.add(line)
        self._blocks[block_of(line)].append(item)
        self._changed.set()

    # Called by the attempt.

    async def keep_writing(self, interval: float) -> None:
        """Commit what was noted every `interval` seconds, until cancelled.

        Raises:
            LeaseLost, QuotaReached
        """
        while True:
            await asyncio.sleep(interval)
            if self._changed.is_set():
                await self.flush()

    async def flush(self) -> None:
        """Commit what was noted, and store the blocks that are complete.

        Raises:
            LeaseLost, QuotaReached
        """
        # A thread cannot be cancelled: a commit in progress ends before the next one begins.
        while self._writing is not None and not self._writing.done():
            await asyncio.wait([self._writing])
        self._writing = asyncio.create_task(self._flush())
        await asyncio.shield(self._writing)

    async def _flush(self) -> None:
        self._changed.clear()
        self._unwritten.append(self._pending)
        self._pending = _Pending()
        complete = [block for block, done in self._blocks.items() if len(done) == self._size(block)]
        beyond = None
        try:
            # One that fails is tried again by the next flush, with its number: it may have been committed.
            while self._unwritten:
                beyond = await asyncio.to_thread(self._retry, partial(self._write, self._unwritten[0]))
                self._written()
        except LeaseLost:
            while self._unwritten:
                calls = self._unwritten[0].calls
                await asyncio.to_thread(self._retry, partial(self._write_calls, calls))
                self._written()
            raise
        for block in complete:
            full = await asyncio.to_thread(self._retry, partial(self._store, block))
            beyond = beyond or full
        if beyond is not None and len(self.pages) * BLOCK_ROWS < self._total:
            raise QuotaReached(beyond.message)

    def _written(self) -> None:
        self._unwritten.pop(0)
        self._writes += 1

    def _size(self, block: int) -> int:
        return min(BLOCK_ROWS, self._total - block * BLOCK_ROWS)

    def _write(self, pending: _Pending) -> QuotaExceeded | None:
        with lifecycle.fenced(self.database, self.claim) as (session, run):
            if run.summary.get("writes", 0) > self._writes:  # the connection was lost after the commit
                return tenants.used_up(session, run.project_id, self._limits(session, run))
            counts = deepcopy(run.summary)
            counts["writes"] = self._writes + 1
            for item in pending.finished:
                summary.add_item(counts, item)
            for tokens in pending.item_tokens:
                summary.add_item_tokens(counts, tokens)
            _add_calls(session, run, counts, pending.calls)
            run.summary = counts
            if pending.parts:
                lifecycle.progressed(run)
                self._write_parts(session, run.id, pending)
            return tenants.used_up(session, run.project_id, self._limits(session, run))

    def _write_parts(self, session: Session, run_id: str, pending: _Pending) -> None:
        """Append the new parts. Those of a finished item are in it, so it replaces them."""
        finished = {item["line"] for item in pending.finished}
        parts = {
            (line, number): part
            for (line, number), part in pending.parts.items()
            if number == 0 or line not in finished
        }
        _upsert(session, run_id, parts)
        if graded := [line for line in finished if line in self._graded]:
            grades = EvalJournal.line.in_(graded), EvalJournal.part > 0
            session.execute(delete(EvalJournal).where(EvalJournal.run_id == run_id, *grades))

    def _write_calls(self, calls: Sequence[PaidCall]) -> None:
        """Count what the calls of a canceled run have used; their items are dropped."""
        with self.database.write() as session:
            run = lifecycle.canceled_from(session, self.claim)
            if run is None or run.summary.get("writes", 0) > self._writes:
                return
            counts = deepcopy(run.summary)
            counts["writes"] = self._writes + 1
            _add_calls(session, run, counts, calls)
            run.summary = counts

    def _limits(self, session: Session, run: EvalRun) -> Limits:
        return tenants.limits(session.get_one(Project, run.project_id), self.defaults)

    def _store(self, block: int) -> QuotaExceeded | None:
        """Replace the journal of a block by a page: first the blob, then its row. Returns the limit that it reaches."""
        done = sorted(self._blocks[block], key=lambda item: int(item["line"]))
        page = items.encode(done)
        with self.database.read() as session:
            run = session.scalars(select(EvalRun).where(EvalRun.id == self.claim.job_id)).one()
        key = items.blob_key(run, block, self.claim.epoch)
        self.blobs.put_bytes(key, page.data)
        lines = EvalJournal.line.between(block * BLOCK_ROWS + 1, (block + 1) * BLOCK_ROWS)
        with lifecycle.fenced(self.database, self.claim) as (session, run):
            session.merge(
                EvalPage(
                    run_id=run.id,
                    number=block,
                    blob_key=key,
                    items=len(done),
                    bytes=len(page.data),
                    sha256=page.sha256,
                )
            )
            session.execute(delete(EvalJournal).where(EvalJournal.run_id == run.id, lines))
            session.flush()
            full = tenants.storage_used_up(session, run.project_id, self._limits(session, run))
        self.pages.add(block)
        self._blocks.pop(block, None)
        return full


def _add_calls(session: Session, run: EvalRun, counts: summary.Summary, calls: Sequence[PaidCall]) -> None:
    """Add the calls to the counts of the run and to the usage of its project."""
    for call in calls:
        summary.add_usage(counts, call.model, call.usage, judge=call.judge)
    metered = sum(call.tokens for call in calls if call.metered)
    if metered:
        usage.add_usage(session, run.project_id, model=run.model, grader_tokens=metered)


def _upsert(session: Session, run_id: str, parts: Mapping[tuple[int, int], Part]) -> None:
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    rows = [
        {"run_id": run_id, "line": line, "part": number, "data": part}
        for (line, number), part in sorted(parts.items())
    ]
    written = insert(EvalJournal).values(rows)
    session.execute(
        written.on_conflict_do_update(
            index_elements=["run_id", "line", "part"], set_={"data": written.excluded.data}
        )
    )
