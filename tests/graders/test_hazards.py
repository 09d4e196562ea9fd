import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graders.hazards.pool import (
    MAX_CALL,
    MAX_WAITING,
    MAX_WAITING_PER_OWNER,
    OWNER,
    HazardFailed,
    HazardPool,
    LimitExceeded,
)
from graders.hazards.table import SCHEMA, Hazard

# Any expression is a call: what it takes, and how it ends, is the test's to choose.
EVAL = Hazard("eval", "builtins:eval", cpu_s=0.5, memory=256 << 20, batch=8)
# A turn of these is one call, though a fork is given up to eight.
SHORT_TURNS = replace(EVAL, turn_s=0.0)
SLEEP = "__import__('time').sleep(60)"
LAYERS = ("namespaces", "no_new_privs", "landlock", "seccomp")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the limits are Linux's"),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[HazardPool]:
    pool = HazardPool(size=2)
    yield pool
    pool.close()


def results(pool: HazardPool, *expressions: str, hazard: Hazard = EVAL) -> list[object]:
    """What became of each call: its value, or the limit that it met."""
    calls = [pool.submit(hazard, expression) for expression in expressions]
    return [
        met.limit if isinstance(met := call.exception(60), LimitExceeded) else call.result() for call in calls
    ]


def submit_for(owner: str, pool: HazardPool, hazard: Hazard, *expressions: str) -> list[Future[Any]]:
    token = OWNER.set(owner)
    try:
        return [pool.submit(hazard, expression) for expression in expressions]
    finally:
        OWNER.reset(token)


def meet(mine: Path, other: Path) -> str:
    """An expression that returns "met" once another one that names these files the other way round is evaluated."""
    wait = f"all(__import__('time').sleep(0.01) is None for _ in iter({exists(other)}, True))"
    return f"({touch(mine)}, {wait}, 'met')[-1]"


def exists(path: Path) -> str:
    return f"__import__('pathlib').Path({str(path)!r}).exists"


def touch(path: Path) -> str:
    return f"__import__('pathlib').Path({str(path)!r}).touch()"


def test_a_call_returns_what_the_function_returns(pool: HazardPool) -> None:
    assert results(pool, "1 + 1", "{'a': [None, 'ż', '\\ud800']}") == [2, {"a": [None, "ż", "\ud800"]}]


def test_results_belong_to_their_calls_in_any_number(pool: HazardPool) -> None:
    assert results(pool, *map(str, range(1000))) == list(range(1000))


@pytest.mark.parametrize(
    ("bomb", "limit"),
    [
        ("10 ** 10 ** 9", "time"),
        ("sum(iter(int, 1))", "time"),
        ("len(bytearray(1 << 30))", "memory"),
        ("__import__('os').abort()", "crash"),
        ("__import__('os')._exit(0)", "crash"),
        ("__import__('os')._exit(3)", "crash"),
    ],
)
def test_a_call_that_breaks_a_limit_takes_no_other_call_with_it(
    pool: HazardPool, bomb: str, limit: str
) -> None:
    """Those of its batch, before and after, have their results."""
    one_batch = Hazard("one batch", EVAL.function, EVAL.cpu_s, EVAL.memory, batch=8)
    alone = HazardPool(size=1)
    try:
        met = results(alone, "0", "1", "2", bomb, "4", bomb, "6", hazard=one_batch)
    finally:
        alone.close()

    assert met == [0, 1, 2, limit, 4, limit, 6]


def test_a_call_that_gets_no_processor_is_ended_and_says_nothing_of_its_input(pool: HazardPool) -> None:
    sleeper = Hazard("sleeper", "time:sleep", cpu_s=0.1, slack_s=0.1)

    with pytest.raises(HazardFailed, match=r"no result within 0\.2 s, .*: the host is overloaded"):
        pool.submit(sleeper, 60).result(60)


def test_the_error_says_which_limit_and_how_much(pool: HazardPool) -> None:
    assert str(pool.submit(EVAL, "sum(iter(int, 1))").exception()) == "it takes more than 0.5 s"
    assert (
        str(pool.submit(EVAL, "len(bytearray(1 << 30))").exception())
        == "it takes more than 256 MiB of memory"
    )
    assert "it ended its process" in str(pool.submit(EVAL, "__import__('os').abort()").exception())


def test_a_function_that_raises_is_the_services_fault(pool: HazardPool) -> None:
    with pytest.raises(HazardFailed, match="ZeroDivisionError: division by zero"):
        pool.submit(EVAL, "1 / 0").result()


def test_nothing_is_kept_from_one_batch_to_the_next(pool: HazardPool) -> None:
    remembers = "__import__('sys').__dict__.setdefault('kept', [])"
    once = f"({remembers}.append(1), len({remembers}))[1]"

    assert [pool.submit(EVAL, once).result() for _ in range(3)] == [1, 1, 1]


def test_a_process_that_dies_is_replaced_and_its_calls_are_made_again(pool: HazardPool) -> None:
    parent = "__import__('os').getppid()"
    before = pool.submit(EVAL, parent).result()
    os.kill(before, signal.SIGKILL)

    assert pool.submit(EVAL, "7").result() == 7
    assert pool.submit(EVAL, parent).result() != before


def test_its_processes_are_the_first_to_be_killed_when_memory_runs_out(pool: HazardPool) -> None:
    zygote = pool.submit(EVAL, "__import__('os').getppid()").result()

    assert Path(f"/proc/{zygote}/oom_score_adj").read_text().strip() == "1000"


def test_it_runs_without_any_layer_of_the_sandbox() -> None:
    bare = HazardPool(size=1, without=LAYERS)
    try:
        assert results(bare, "1", "sum(iter(int, 1))", "2") == [1, "time", 2]
    finally:
        bare.close()


def test_calls_do_not_reach_the_hosts_files_processes_or_network(pool: HazardPool) -> None:
    attempts = ("open('/etc/passwd')", "__import__('socket').socket()", "__import__('os').fork()")

    for attempt in attempts:
        with pytest.raises(HazardFailed, match=r"PermissionError|FileNotFoundError"):
            pool.submit(EVAL, attempt).result()


def test_a_coroutine_waits_for_a_result_without_a_thread(pool: HazardPool) -> None:
    async def ask() -> list[int]:
        calls = (asyncio.wrap_future(pool.submit(EVAL, str(number))) for number in range(200))
        return list(await asyncio.gather(*calls))

    assert asyncio.run(ask()) == list(range(200))


def test_a_call_that_nobody_waits_for_is_not_made() -> None:
    alone = HazardPool(size=1)
    try:
        one_a_batch = Hazard("one a batch", EVAL.function, EVAL.cpu_s, EVAL.memory, batch=1)
        busy = alone.submit(one_a_batch, "sum(iter(int, 1))")
        waiting = alone.submit(one_a_batch, "1")

        assert waiting.cancel()
        assert isinstance(busy.exception(), LimitExceeded)
        assert alone.submit(one_a_batch, "2").result() == 2
    finally:
        alone.close()


def test_a_closed_pool_fails_the_calls_it_has_and_takes_no_more() -> None:
    closing = HazardPool(size=1)
    assert closing.submit(EVAL, "1").result() == 1
    waiting = closing.submit(Hazard("sleeper", "time:sleep"), 60)
    closing.close()

    assert isinstance(waiting.exception(), HazardFailed)
    with pytest.raises(HazardFailed, match="closed"):
        closing.submit(EVAL, "1")


def test_a_schema_that_makes_llguidance_abort_ends_one_call(pool: HazardPool) -> None:
    counts = [{"type": "array", "items": {"type": "object"}, "minItems": count} for count in (10**9, 1)]
    calls = [pool.submit(SCHEMA, json.dumps(schema)) for schema in counts]

    assert isinstance(calls[0].exception(), LimitExceeded)
    assert calls[1].result() == ""


def test_owners_take_turns_and_a_bomb_ends_a_turn() -> None:
    alone = HazardPool(size=1)
    try:
        bombs = submit_for("a", alone, EVAL, *["sum(iter(int, 1))"] * 4)
        [call] = submit_for("b", alone, EVAL, "2")

        assert call.result(60) == 2
        assert not bombs[-1].done()
        assert [type(bomb.exception(60)) for bomb in bombs] == [LimitExceeded] * 4
    finally:
        alone.close()


def test_a_turn_that_has_lasted_long_enough_ends_before_the_batch_does() -> None:
    alone, order = HazardPool(size=1), []
    try:
        calls = submit_for("a", alone, SHORT_TURNS, "'a0'", "'a1'", "'a2'")
        calls += submit_for("b", alone, SHORT_TURNS, "'b0'", "'b1'")
        for call in calls:
            call.add_done_callback(lambda call: order.append(call.result()))

        assert [call.result(60) for call in calls] == ["a0", "a1", "a2", "b0", "b1"]
    finally:
        alone.close()

    assert order == ["a0", "b0", "a1", "b1", "a2"]


def test_what_is_left_of_a_turn_goes_behind_the_owners_that_came_during_it() -> None:
    alone, order = HazardPool(size=1), []
    late: list[Future[Any]] = []

    def note(call: Future[Any]) -> None:
        order.append(call.result())
        if call.result() == "a0":
            late.extend(submit_for("b", alone, pairs, "'b0'"))
            late[0].add_done_callback(note)

    pairs = replace(SHORT_TURNS, batch=2)  # so that others of the first owner wait while a batch runs
    try:
        calls = submit_for("a", alone, pairs, "'a0'", "'a1'", "'a2'", "'a3'")
        for call in calls:
            call.add_done_callback(note)

        assert [call.result(60) for call in calls] == ["a0", "a1", "a2", "a3"]
    finally:
        alone.close()

    assert order == ["a0", "b0", "a1", "a2", "a3"]


def test_a_call_that_ends_its_process_as_a_turn_ends_is_not_made_for_ever(pool: HazardPool) -> None:
    assert results(pool, "1", "__import__('os')._exit(101)", "2") == [1, "crash", 2]


def test_one_slot_is_kept_for_other_owners() -> None:
    two = HazardPool(size=2)
    one_a_batch = replace(EVAL, batch=1)
    late: list[Future[Any]] = []
    try:
        first, *sleepers = submit_for("a", two, one_a_batch, "1", SLEEP, SLEEP, SLEEP)
        first.add_done_callback(lambda _: late.extend(submit_for("b", two, one_a_batch, "2")))

        assert first.result(60) == 1
        assert submit_for("b", two, one_a_batch, "3")[0].result(60) == 3
        assert late[0].result(60) == 2
        assert submit_for("b", two, one_a_batch, "4")[0].result(60) == 4
        assert not any(sleeper.done() for sleeper in sleepers)
    finally:
        two.close()


@pytest.mark.parametrize(("owner", "size"), [("", 2), ("a", 3)])
def test_an_owner_may_have_all_other_slots_and_the_process_of_one_job_every_slot(
    owner: str, size: int, tmp_path: Path
) -> None:
    slots = HazardPool(size=size, without=LAYERS)
    one, other = tmp_path / "one", tmp_path / "other"
    try:
        calls = submit_for(owner, slots, replace(EVAL, batch=1), meet(one, other), meet(other, one))

        assert [call.result(60) for call in calls] == ["met", "met"]
    finally:
        slots.close()


def test_a_call_that_is_cancelled_while_its_batch_runs_is_not_made(tmp_path: Path) -> None:
    alone = HazardPool(size=1, without=LAYERS)
    made, cancelled = tmp_path / "made", []
    try:
        first, second, third = submit_for("a", alone, SHORT_TURNS, "1", touch(made), "3")
        first.add_done_callback(lambda _: cancelled.append(second.cancel()))

        assert third.result(60) == 3
    finally:
        alone.close()

    assert cancelled == [True]
    assert not made.exists()


def test_a_result_that_nobody_waits_for_any_more_is_dropped() -> None:
    alone = HazardPool(size=1)
    try:
        first, second, third = submit_for("a", alone, EVAL, "1", "2", "3")
        first.add_done_callback(lambda _: second.cancel())

        assert third.result(60) == 3
        assert alone.submit(EVAL, "4").result(60) == 4
    finally:
        alone.close()


def test_a_call_that_is_too_large_is_not_made(pool: HazardPool) -> None:
    assert "its input is more than" in str(pool.submit(EVAL, " " * MAX_CALL).exception())


def test_calls_that_wait_are_bounded_by_their_size() -> None:
    alone = HazardPool(size=1)
    try:
        large = "1" + " " * (MAX_CALL - 10)
        most = MAX_WAITING // MAX_CALL + EVAL.batch  # those that it makes at the moment wait no longer

        def submit_many() -> None:
            for _ in range(2 * most):
                alone.submit(EVAL, large)

        with pytest.raises(HazardFailed, match="too many calls wait"):
            submit_many()
    finally:
        alone.close()


def test_an_owner_whose_calls_fill_its_room_leaves_room_to_others() -> None:
    alone = HazardPool(size=1)
    try:
        large = "1" + " " * (MAX_CALL - 10)
        submit_for("a", alone, EVAL, SLEEP)

        with pytest.raises(HazardFailed, match="too many calls wait"):
            submit_for("a", alone, EVAL, *[large] * (2 * MAX_WAITING_PER_OWNER // MAX_CALL))
        [waiting] = submit_for("b", alone, EVAL, large)
        assert not waiting.done()
    finally:
        alone.close()


def test_a_cancelled_call_leaves_its_room_to_others() -> None:
    alone = HazardPool(size=1)
    one_a_batch = replace(EVAL, batch=1)
    large = "1" + " " * (MAX_CALL - 10)
    try:
        sleeper = alone.submit(one_a_batch, SLEEP)
        small = alone.submit(one_a_batch, "1")
        cancelled = [alone.submit(one_a_batch, large).cancel() for _ in range(2 * MAX_WAITING // MAX_CALL)]

        assert all(cancelled)
        assert not sleeper.done() and not small.done()
    finally:
        alone.close()
