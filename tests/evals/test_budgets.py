"""Budgets of runs: caps on tokens and on the calls of judges. Each call of the test's models takes 15 tokens."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from openai.types.evals.run_create_response import RunCreateResponse
from openai.types.evals.run_retrieve_response import RunRetrieveResponse

from core.errors import BudgetReached
from core.evals import budgets
from core.evals.summary import PaidItems
from graders.backends import Backends
from graders.judge.judges import JudgeModel
from tests.evals.conftest import EXACT, JUDGED, House, completions, row
from tests.evals.servers import chat_server, verdict
from tests.evals.test_interruptions import expire
from tests.present import untyped
from worker.evals.record import PaidCall
from worker.evals.spending import Calls, Spending


def start(
    client: OpenAI, made: Any, budget: dict[str, Any], count: int = 100, **more: Any
) -> RunCreateResponse:
    return client.evals.runs.create(
        made.id, data_source=completions(count, **more), extra_body={"budget": budget}
    )


def tokens(count: int) -> dict[Any, Any]:
    """`usage` of a call that took this many tokens."""
    return {"prompt_tokens": 1, "completion_tokens": count - 1, "total_tokens": count}


def ended(client: OpenAI, run: RunCreateResponse) -> RunRetrieveResponse:
    return client.evals.runs.retrieve(run.id, eval_id=run.eval_id)


@pytest.mark.both_databases
def test_a_run_stops_before_it_would_exceed_its_tokens_and_keeps_its_items(
    client: OpenAI, new_eval: Callable[..., Any], house: House, database_kind: str
) -> None:
    made = new_eval()
    run = start(client, made, {"tokens": 100})
    house.work()

    failed = ended(client, run)
    assert (failed.status, failed.error.code) == ("failed", "budget_reached")
    assert "90 of 100 tokens are used, and the next item would take about 15 more" in failed.error.message
    assert untyped(failed).budget == {"tokens": 100, "used_tokens": 90, "remaining_tokens": 10}
    assert failed.result_counts.passed == 6 == len(house.model.requests)
    items = client.evals.runs.output_items.list(run.id, eval_id=made.id).data
    assert len(items) == 6


def test_the_cap_on_judge_calls_is_exact(client: OpenAI, new_eval: Callable[..., Any], house: House) -> None:
    kind = JUDGED | {
        "name": "kind",
        "input": [{"role": "user", "content": "Is {{sample.output_text}} kind?"}],
    }
    made = new_eval(EXACT, JUDGED, kind)
    run = start(client, made, {"judge_calls": 9})
    house.work()

    failed = ended(client, run)
    assert (failed.status, failed.error.code) == ("failed", "budget_reached")
    assert "8 of 9 judge calls are made, and the next item needs 2" in failed.error.message
    assert untyped(failed).budget == {"judge_calls": 9, "used_judge_calls": 8, "remaining_judge_calls": 1}
    assert len(house.judge.requests) == 8
    assert failed.result_counts.passed == 4


def test_both_caps_hold_at_once(client: OpenAI, new_eval: Callable[..., Any], house: House) -> None:
    made = new_eval(JUDGED)
    run = start(client, made, {"tokens": 10_000, "judge_calls": 3})
    house.work()

    assert untyped(ended(client, run)).budget == {
        "tokens": 10_000,
        "used_tokens": 90,
        "remaining_tokens": 9910,
        "judge_calls": 3,
        "used_judge_calls": 3,
        "remaining_judge_calls": 0,
    }


def test_a_run_that_just_fits_its_budget_completes(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval(JUDGED)
    run = start(client, made, {"tokens": 300, "judge_calls": 10}, count=10)
    house.work()

    done = ended(client, run)
    assert done.status == "completed"
    assert (untyped(done).budget["remaining_tokens"], untyped(done).budget["remaining_judge_calls"]) == (0, 0)


def test_a_budget_counts_what_earlier_attempts_have_used(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval(JUDGED)
    run = start(client, made, {"judge_calls": 30})
    runner = house.runner()
    thread = threading.Thread(target=runner.run, args=[runner.claim()])
    pause = threading.Event()
    thread.start()
    while len(house.judge.requests) < 5:
        pause.wait(0.01)
    runner.stop()
    thread.join()
    house.work()

    failed = ended(client, run)
    assert (failed.status, failed.error.code) == ("failed", "budget_reached")
    assert untyped(failed).budget["used_judge_calls"] == 30
    # A reply that arrives as the worker stops is counted, although its grade is lost.
    in_progress = 2 * house.settings.eval_concurrency
    assert 30 - in_progress <= failed.result_counts.passed <= 30


def test_a_killed_run_pays_for_its_unfinished_items_only_what_they_still_need(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    """Their samples are recorded: two judge calls of 15 tokens fit, two more items of 30 tokens would not."""
    made = new_eval(JUDGED)
    run = start(client, made, {"tokens": 90, "judge_calls": 3}, count=3)
    revive, pause = threading.Event(), threading.Event()

    def slow(body: dict[str, Any]) -> dict[str, Any]:
        if len(judge.requests) > 1:
            revive.wait(30)
        return verdict("yes")

    with chat_server(slow) as judge:
        stuck = replace(house, backends=Backends(judges={"judge": JudgeModel(judge.url)})).runner()
        thread = threading.Thread(target=stuck.run, args=[stuck.claim()])
        thread.start()
        while budgets.used(house.row(run.id).summary) != {"tokens": 60, "judge_calls": 1}:
            pause.wait(0.01)
        expire(house.database)
        thread.join()
        revive.set()
    house.work()

    done = ended(client, run)
    assert (done.status, done.result_counts.passed) == ("completed", 3)
    assert (untyped(done).budget["remaining_tokens"], untyped(done).budget["remaining_judge_calls"]) == (0, 0)
    assert house.model.asked.total() == 3


def test_samples_without_an_answer_cost_nothing(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval(JUDGED)
    house.foreign.fails.update(f"q{number}" for number in range(20))
    run = start(client, made, {"judge_calls": 2, "tokens": 30}, count=20, model="gpt-foreign")
    house.work()

    done = ended(client, run)
    assert (done.status, done.result_counts.errored) == ("completed", 20)
    assert untyped(done).budget["used_tokens"] == 0


def test_a_run_without_a_budget_shows_none(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    run = client.evals.runs.create(new_eval().id, data_source=completions(1))
    house.work()

    assert untyped(ended(client, run)).budget is None


def test_the_usage_of_runs_of_an_earlier_version_is_read() -> None:
    assert budgets.used({}) == {"tokens": 0, "judge_calls": 0}


BAD = [
    ({}, "budget", "tokens, judge_calls or both"),
    ({"tokens": 0}, "budget.tokens", "0"),
    ({"tokens": "many"}, "budget.tokens", ""),
    ({"judge_calls": 1.5}, "budget.judge_calls", ""),
    ({"tokens": 2**60}, "budget.tokens", "<= 9007199254740992,"),
    ({"gpu_seconds": 3600}, "budget.gpu_seconds", "a budget of jobs"),
    ({"amount": 1, "currency": "EUR"}, "budget.amount", "a budget of jobs"),
    ({"euros": 1}, "budget.euros", "Unknown"),
]


@pytest.mark.parametrize(("budget", "param", "words"), BAD, ids=[str(case[0]) for case in BAD])
def test_a_bad_budget_is_refused_by_name(
    client: OpenAI, new_eval: Callable[..., Any], budget: dict[str, Any], param: str, words: str
) -> None:
    made = new_eval()

    with pytest.raises(BadRequestError) as refused:
        start(client, made, budget)

    assert refused.value.param == param
    assert words in str(refused.value)
    assert client.evals.runs.list(made.id).data == []


def test_a_budget_of_fewer_judge_calls_than_one_item_needs_is_refused(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    kind = JUDGED | {"name": "kind"}
    made = new_eval(EXACT, JUDGED, kind)

    with pytest.raises(BadRequestError, match="too small to finish one item: the eval has 2 cri") as refused:
        start(client, made, {"judge_calls": 1})

    assert refused.value.param == "budget.judge_calls"
    assert client.evals.runs.list(made.id).data == []
    start(client, made, {"judge_calls": 2}, count=1)
    house.work()
    assert client.evals.runs.list(made.id).data[0].status == "completed"


def test_items_take_turns_until_the_cost_of_one_is_known(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    """Or as many as are in progress at once would exceed a small budget together."""
    run = start(client, new_eval(), {"tokens": 10})
    house.work()

    assert ended(client, run).result_counts.total == 1
    assert len(house.model.requests) == 1


def test_a_cheap_first_item_lets_few_expensive_ones_start(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    """Two beside each other, which exceed the cap by no more than what they cost beyond the first one."""
    house.model.usages = {f"q{number}": tokens(1000 if number else 2) for number in range(100)}
    run = start(client, new_eval(), {"tokens": 1100})
    house.work()

    failed = ended(client, run)
    assert (failed.error.code, failed.result_counts.total) == ("budget_reached", 3)
    assert untyped(failed).budget["used_tokens"] == 2002 <= 1100 + 2 * 998


def test_a_failed_first_item_is_no_evidence_of_the_cost_of_others(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    house.model.fails.add("q0")
    house.model.usages = {f"q{number}": tokens(1000) for number in range(100)}
    run = start(client, new_eval(), {"tokens": 1500})
    house.work()

    failed = ended(client, run)
    assert (failed.error.code, untyped(failed).budget["used_tokens"]) == ("budget_reached", 1000)
    assert (failed.result_counts.errored, failed.result_counts.passed) == (1, 1)


def test_one_expensive_item_does_not_end_a_run_whose_budget_suffices(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    """At the end 620 tokens are used, and the last item would fit at the mean of 69, but not at 500."""
    house.model.usages = {"q3": tokens(500)}
    run = start(client, new_eval(), {"tokens": 695}, count=10)
    house.work()

    assert ended(client, run).status == "completed"


def in_progress_by_round(costs: list[int], cap: int) -> tuple[list[int], int]:
    """How many items each round starts if the items of a round end together, and the tokens used in all."""

    async def run() -> tuple[list[int], int]:
        spending = Spending({"tokens": cap}, {"tokens": 0, "judge_calls": 0}, PaidItems())
        waiting, rounds, used = list(costs), [], 0
        while waiting:
            async with AsyncExitStack() as items:
                started = 0
                for tokens in waiting:
                    try:
                        async with asyncio.timeout(0):
                            cost = await items.enter_async_context(spending.item(Calls(samples=True)))
                    except (TimeoutError, BudgetReached):
                        break
                    started += 1
                    items.callback(cost.add, call(tokens))
                    used += tokens
            if not started:
                break
            rounds.append(started)
            waiting = waiting[started:]
        return rounds, used

    return asyncio.run(run())


def call(tokens: int) -> PaidCall:
    return PaidCall("m", {"completion_tokens": tokens}, metered=False)


def test_the_number_of_items_in_progress_at_most_doubles_with_each_round() -> None:
    assert in_progress_by_round([10] * 63, 10_000) == ([1, 2, 4, 8, 16, 32], 630)


def test_the_largest_item_so_far_decides_how_many_start_together() -> None:
    """380 tokens are left after the first three: room for three of 100 together. Then one alone, at the mean of 70."""
    rounds, used = in_progress_by_round([10, 10, 100] + [100] * 20, 500)

    assert rounds == [1, 2, 3, 1]
    assert used == 520


def test_rows_that_are_graded_as_they_are_cost_nothing(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    content = [row(number) | {"sample": {"output_text": f"q{number}"}} for number in range(10)]
    source: Any = {"type": "jsonl", "source": {"type": "file_content", "content": content}}
    run = client.evals.runs.create(new_eval().id, data_source=source, extra_body={"budget": {"tokens": 1}})
    house.work()

    assert ended(client, run).status == "completed"
