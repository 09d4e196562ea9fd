"""Tokens of judges in a run: they count when they are used, whatever becomes of the grades."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import pytest
from sqlalchemy.exc import OperationalError

from core.database.engine import Database
from core.database.tables import ModelUsage
from core.settings import Settings
from core.tenancy import tenants
from graders.judge.usage import TokenLedger
from graders.types import Grade, Item, Sample, TokenUsage
from tests.fakes import GuessingSampler, Skill
from tests.present import present
from tests.worker.conftest import Bench
from worker.child import booked_at_the_end
from worker.run import RunOutcome
from worker.sampling import Answer, Sampling
from worker.types import Prompt

A_REPLY = TokenUsage(10, 5)


class PaidGrader:
    """Asks a judge for each grade, and loses some of the grades."""

    name, type = "paid", "score_model"

    def __init__(self, ledger: TokenLedger) -> None:
        self.ledger, self.replies = ledger, 0

    async def grade(self, sample: Sample, item: Item) -> Grade:
        self.replies += 1
        self.ledger.add("wise", A_REPLY)
        if self.replies % 5 == 0:
            raise TimeoutError
        return Grade(float(self.replies % 2), usage={"wise": A_REPLY})


class Away(Database):
    """A database that accepts no transaction."""

    def write(self) -> NoReturn:
        raise OperationalError("BEGIN", {}, ConnectionRefusedError("connection refused"))


def counted(bench: Bench) -> int:
    with bench.database.read() as session:
        return tenants.usage_since(session, bench.project.id).grader_tokens


@pytest.mark.parametrize("advanced", [{}, {"off_policy_steps": 2}], ids=["on policy", "asynchronous batches"])
def test_a_run_that_is_paused_has_counted_every_reply(advanced: dict[str, Any], bench: Bench) -> None:
    """Batches that were graded ahead of their step are graded anew after the pause."""
    attempt = bench.attempt()
    grader = PaidGrader(attempt.ledger)
    run = bench.run(
        grader, attempt=attempt, stop_requested=lambda: True, advanced={"group_size": 4, **advanced}
    )

    async def train() -> RunOutcome:
        with booked_at_the_end(attempt):
            outcome: RunOutcome = await run.train()
            return outcome

    assert asyncio.run(train()) is RunOutcome.INTERRUPTED
    assert counted(bench) == attempt.ledger.total == 15 * grader.replies


def used_tokens(bench: Bench) -> tuple[int, int]:
    """The sampled and the unused tokens of the project."""
    with bench.database.read() as session:
        row = session.query(ModelUsage).one()
        return row.sampled_tokens, row.unused_tokens


class CountedSampler(GuessingSampler):
    """Counts the tokens of its answers to training prompts."""

    tokens = 0

    async def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
        async for answer in super().sample(prompts_P, sampling):
            if sampling.step:  # a validation has 0
                self.tokens += len(answer.rollout.output_ids_T)
            yield answer


ASYNC: dict[str, Any] = {"group_size": 4, "off_policy_steps": 2}


def trained(bench: Bench, sampler: CountedSampler, **options: Any) -> RunOutcome:
    attempt = bench.attempt()
    run = bench.run(attempt=attempt, sampler=sampler, advanced=ASYNC, **options)

    async def train() -> RunOutcome:
        with booked_at_the_end(attempt):
            outcome: RunOutcome = await run.train()
            return outcome

    return asyncio.run(train())


def test_batches_that_were_sampled_ahead_in_vain_are_sampled_and_unused_tokens(bench: Bench) -> None:
    """Each attempt samples them anew, and the GPU was used for both."""
    sampler = CountedSampler(Skill())

    assert trained(bench, sampler, stop_requested=lambda: True) is RunOutcome.INTERRUPTED
    sampled, unused = used_tokens(bench)
    bench.again()
    assert trained(bench, sampler) is RunOutcome.DONE

    used = present(bench.job().usage)
    assert 0 < unused < sampled
    assert used_tokens(bench) == (sampler.tokens, unused)
    assert (used["sampled_tokens"], used["unused_tokens"]) == (sampler.tokens, unused)


def test_what_a_killed_attempt_had_sampled_ahead_is_counted_by_the_next_one(bench: Bench) -> None:
    sampler = CountedSampler(Skill())
    run = bench.run(attempt=bench.attempt(), sampler=sampler, advanced=ASYNC, stop_requested=lambda: True)
    asyncio.run(run.train())  # and nothing is booked at its end
    pending = present(bench.job().usage)["pending"]["tokens"]
    assert used_tokens(bench)[1] == 0 < pending

    bench.again()
    assert trained(bench, sampler) is RunOutcome.DONE

    assert used_tokens(bench)[1] == present(bench.job().usage)["unused_tokens"] == pending


def test_a_step_counts_the_replies_so_far_once(bench: Bench) -> None:
    attempt = bench.attempt()
    grader = PaidGrader(attempt.ledger)

    bench.train(grader, attempt=attempt)

    assert counted(bench) == 15 * grader.replies
    assert attempt.ledger.unbooked == 0


def test_a_run_that_ends_with_an_error_counts_what_its_judges_used(bench: Bench) -> None:
    attempt = bench.attempt()

    def assemble(*parts: Any) -> NoReturn:
        attempt.ledger.add("large", A_REPLY)  # such as a teacher's, whose tokens are compared
        raise ZeroDivisionError

    with bench.database.write() as session:
        job = session.merge(attempt.job)
        job.body = {name: value for name, value in job.body.items() if name != "grader"}
    attempt = replace(attempt, job=bench.job())
    with pytest.raises(ZeroDivisionError):
        bench.run_job(Settings(), assemble, attempt)

    assert counted(bench) == 15


def test_an_error_is_not_hidden_by_a_database_that_is_away(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = bench.attempt(database=Away(str(bench.database.engine.url)))
    attempt.ledger.add("wise", A_REPLY)

    with pytest.raises(ZeroDivisionError), booked_at_the_end(attempt):
        raise ZeroDivisionError
    assert "15 tokens of judges could not be counted" in caplog.text
