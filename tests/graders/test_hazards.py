import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from graders.hazards.pool import MAX_CALL, MAX_WAITING, OWNER, HazardFailed, HazardPool, LimitExceeded
from graders.hazards.table import SCHEMA, Hazard

# Any expression is a call: what it takes, and how it ends, is the test's to choose.
EVAL = Hazard("eval", "builtins:eval", cpu_s=0.5, memory=256 << 20, batch=8)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limits are Linux's")


@pytest.fixture(scope="module")
def pool():
    pool = HazardPool(size=2)
    yield pool
    pool.close()


def results(pool: HazardPool, *expressions: str, hazard: Hazard = EVAL) -> list[object]:
    """What became of each call: its value, or the limit that it met."""
    calls = [pool.submit(hazard, expression) for expression in expressions]
    return [
        met.limit if isinstance(met := call.exception(60), LimitExceeded) else call.result() for call in calls
    ]


def test_a_call_returns_what_the_function_returns(pool):
    assert results(pool, "1 + 1", "{'a': [None, 'ż', '\\ud800']}") == [2, {"a": [None, "ż", "\ud800"]}]


def test_results_belong_to_their_calls_in_any_number(pool):
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
def test_a_call_that_breaks_a_limit_takes_no_other_call_with_it(pool, bomb, limit):
    """Those of its batch, before and after, have their results."""
    one_batch = Hazard("one batch", EVAL.function, EVAL.cpu_s, EVAL.memory, batch=8)
    alone = HazardPool(size=1)
    try:
        met = results(alone, "0", "1", "2", bomb, "4", bomb, "6", hazard=one_batch)
    finally:
        alone.close()

    assert met == [0, 1, 2, limit, 4, limit, 6]


def test_a_call_that_gets_no_processor_is_ended_and_says_nothing_of_its_input(pool):
    sleeper = Hazard("sleeper", "time:sleep", cpu_s=0.1, slack_s=0.1)

    with pytest.raises(HazardFailed, match=r"no result within 0\.2 s, .*: the host is overloaded"):
        pool.submit(sleeper, 60).result(60)


def test_the_error_says_which_limit_and_how_much(pool):
    assert str(pool.submit(EVAL, "sum(iter(int, 1))").exception()) == "it takes more than 0.5 s"
    assert (
        str(pool.submit(EVAL, "len(bytearray(1 << 30))").exception())
        == "it takes more than 256 MiB of memory"
    )
    assert "it ended its process" in str(pool.submit(EVAL, "__import__('os').abort()").exception())


def test_a_function_that_raises_is_the_services_fault(pool):
    with pytest.raises(HazardFailed, match="ZeroDivisionError: division by zero"):
        pool.submit(EVAL, "1 / 0").result()


def test_nothing_is_kept_from_one_batch_to_the_next(pool):
    remembers = "__import__('sys').__dict__.setdefault('kept', [])"
    once = f"({remembers}.append(1), len({remembers}))[1]"

    assert [pool.submit(EVAL, once).result() for _ in range(3)] == [1, 1, 1]


def test_a_process_that_dies_is_replaced_and_its_calls_are_made_again(pool):
    parent = "__import__('os').getppid()"
    before = pool.submit(EVAL, parent).result()
    os.kill(before, signal.SIGKILL)

    assert pool.submit(EVAL, "7").result() == 7
    assert pool.submit(EVAL, parent).result() != before


def test_its_processes_are_the_first_to_be_killed_when_memory_runs_out(pool):
    zygote = pool.submit(EVAL, "__import__('os').getppid()").result()

    assert Path(f"/proc/{zygote}/oom_score_adj").read_text().strip() == "1000"


def test_it_runs_without_any_layer_of_the_sandbox():
    bare = HazardPool(size=1, without=("namespaces", "no_new_privs", "landlock", "seccomp"))
    try:
        assert results(bare, "1", "sum(iter(int, 1))", "2") == [1, "time", 2]
    finally:
        bare.close()


def test_calls_do_not_reach_the_hosts_files_processes_or_network(pool):
    attempts = ("open('/etc/passwd')", "__import__('socket').socket()", "__import__('os').fork()")

    for attempt in attempts:
        with pytest.raises(HazardFailed, match=r"PermissionError|FileNotFoundError"):
            pool.submit(EVAL, attempt).result()


def test_a_coroutine_waits_for_a_result_without_a_thread(pool):
    async def ask() -> list[int]:
        calls = (asyncio.wrap_future(pool.submit(EVAL, str(number))) for number in range(200))
        return await asyncio.gather(*calls)

    assert asyncio.run(ask()) == list(range(200))


def test_a_call_that_nobody_waits_for_is_not_made():
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


def test_a_closed_pool_fails_the_calls_it_has_and_takes_no_more():
    closing = HazardPool(size=1)
    assert closing.submit(EVAL, "1").result() == 1
    waiting = closing.submit(Hazard("sleeper", "time:sleep"), 60)
    closing.close()

    assert isinstance(waiting.exception(), HazardFailed)
    with pytest.raises(HazardFailed, match="closed"):
        closing.submit(EVAL, "1")


def test_a_schema_that_makes_llguidance_abort_ends_one_call(pool):
    counts = [{"type": "array", "items": {"type": "object"}, "minItems": count} for count in (10**9, 1)]
    calls = [pool.submit(SCHEMA, json.dumps(schema)) for schema in counts]

    assert isinstance(calls[0].exception(), LimitExceeded)
    assert calls[1].result() == ""


def test_owners_take_turns_and_a_bomb_ends_a_turn():
    alone = HazardPool(size=1)
    try:
        for owner, expressions in (("a", ["sum(iter(int, 1))"] * 4), ("b", ["2"])):
            token = OWNER.set(owner)
            calls = [alone.submit(EVAL, expression) for expression in expressions]
            OWNER.reset(token)
            if owner == "a":
                bombs = calls

        assert calls[0].result(60) == 2
        assert not bombs[-1].done()
        assert [type(bomb.exception(60)) for bomb in bombs] == [LimitExceeded] * 4
    finally:
        alone.close()


def test_a_call_that_is_too_large_is_not_made(pool):
    assert "its input is more than" in str(pool.submit(EVAL, " " * MAX_CALL).exception())


def test_calls_that_wait_are_bounded_by_their_size():
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
