"""Tools in the sandbox: outputs, the state of an episode, limits, and attacks."""

import asyncio
import json
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graders.sandbox.entries import CALL
from graders.sandbox.pool import Pool, call_result
from graders.tools.protocol import WINDOW, ToolFailed, ToolRequest, ToolResult, ToolsFail
from graders.tools.python import PythonTools
from tests.graders.attacks import LIMITS, SHORT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")

COUNTER = """
def call(arguments, item, state):
    state = (state or 0) + arguments["n"]
    return f"{item['who']}: {state}", state
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(LIMITS, size=1)
    yield made
    made.close()


def call(name: str = "count", trace: str = "trace_1", **arguments: Any) -> ToolRequest:
    return ToolRequest("c", "key", name, json.dumps(arguments), trace, {"who": "a"})


def tools(pool: Pool, **sources: str) -> PythonTools:
    return PythonTools([{"name": name, "source": source} for name, source in sources.items()], pool=pool)


def outcome(pool: Pool, source: str) -> Any:
    """What becomes of a call of the source."""
    [one] = asyncio.run(results(tools(pool, count=source), call()))
    return one


async def results(python: PythonTools, *calls: ToolRequest) -> list[Any]:
    return [(await asyncio.gather(python.call(one), return_exceptions=True))[0] for one in calls]


FORGED_LISTS = """
import os
def call(arguments, item, state):
    os.write(3, b'{"output": [' + b"[]," * 10_000 + b'0], "state": "null"}')
    os._exit(0)
"""


def returning(value: str) -> str:
    return f"def call(arguments, item, state):\n    return {value}\n"


def test_a_state_is_kept_in_an_episode_and_shared_by_its_tools(pool: Pool) -> None:
    python = tools(pool, count=COUNTER, show="def call(arguments, item, state):\n    return state, state\n")
    one, two, shown, other = asyncio.run(
        results(python, call(n=2), call(n=3), call("show"), call(trace="trace_2", n=4))
    )

    assert [result.output for result in (one, two, shown, other)] == ["a: 2", "a: 5", "5", "a: 4"]


def test_an_ended_episode_leaves_no_state(pool: Pool) -> None:
    async def run() -> ToolResult:
        python = tools(pool, count=COUNTER)
        await python.call(call(n=2))
        await python.end("trace_1")
        return await python.call(call(n=2))

    assert asyncio.run(run()).output == "a: 2"


def test_calls_of_one_answer_run_one_after_the_other(pool: Pool) -> None:
    async def run() -> list[ToolResult]:
        python = tools(pool, count=COUNTER)
        return list(await asyncio.gather(*(python.call(call(n=1)) for _ in range(4))))

    assert sorted(result.output for result in asyncio.run(run())) == ["a: 1", "a: 2", "a: 3", "a: 4"]


def test_an_output_that_is_no_text_is_read_as_json(pool: Pool) -> None:
    assert outcome(pool, returning("{'a': [1, None]}, None")).output == '{"a": [1, null]}'
    assert outcome(pool, returning("['ä'], None")).output == '["ä"]'


def test_a_state_is_counted_in_utf8(pool: Pool) -> None:
    assert outcome(pool, returning("'x', 'ä' * 499_999")).output == "x"


def test_a_forged_result_is_not_parsed_into_many_objects() -> None:
    forged = '{"output": [' + "[]," * 1_000_000 + '0], "state": "null"}'
    call_result(forged[:100])  # what is imported at the first call does not count
    tracemalloc.start()
    try:
        outcome = call_result(forged)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert outcome.kind == "bad_result"
    assert peak < len(forged)


@pytest.mark.parametrize(
    "forged",
    [
        '{"output": "a"}',
        '{"output": "a", "state": "b", "more": 1}',
        '{"output": "a", "state": 1}',
        '{"output": "a", "state": "b',
        '{"output": "a\\", "state": "b"}',
    ],
)
def test_a_result_of_another_form_is_refused(forged: str) -> None:
    assert call_result(forged).kind == "bad_result"


def test_a_megabyte_of_output_and_of_state_is_the_most(pool: Pool) -> None:
    fits = outcome(pool, returning("'x' * 1_000_000, 'y' * 999_998"))
    long = outcome(pool, returning("'x' * 1_000_001, None"))
    kept = outcome(pool, returning("'x', 'y' * 999_999"))

    assert len(fits.output) == 1_000_000
    assert json.loads(long.output)["error"]["code"] == 413
    assert isinstance(kept, ToolFailed)
    assert "the state is 1000001 bytes" in str(kept)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (returning("1 / 0"), "ZeroDivisionError"),
        (returning("'only the output'"), r"call\(\) must return a tuple"),
        (returning("'a', 'b', 'c'"), r"call\(\) must return a tuple"),
        (returning("'a', object()"), "must be JSON"),
        (returning("'a', float('nan')"), "must be JSON"),
        (returning("__import__('os')._exit(0)"), "it ended without an output"),
        (returning("__import__('os').abort()"), "killed by signal"),
        (returning("'x' * (40 << 20), None"), "too much output|out of memory"),
        (returning("bytearray(1 << 30), None"), "memory"),
        (returning("print('x' * (2 << 20)), None"), "too much output"),
        (returning("open('/etc/passwd').read(), None"), "No such file|Permission denied"),
        (
            returning("__import__('socket').create_connection(('127.0.0.1', 80)), None"),
            "not permitted|denied",
        ),
        (returning("__import__('subprocess').run(['/bin/ls']), None"), "not permitted|denied|No such file"),
        (
            returning("open('/scratch/f', 'w').write('x' * (8 << 20)), None"),
            "File too large|No space|MiB|such",
        ),
        (
            returning(
                "__import__('os').write(3, b'{\"output\": 1, \"state\": \"1\"}') and __import__('os')._exit(0)"
            ),
            "its result is not one that call",
        ),
        (FORGED_LISTS, "its result is not one that call"),
    ],
)
def test_a_source_that_fails_or_attacks_discards_its_episode_and_the_next_call_is_right(
    pool: Pool, source: str, reason: str
) -> None:
    python = tools(pool, bad=source, count=COUNTER)
    failed, right = asyncio.run(results(python, call("bad"), call(n=2)))

    assert isinstance(failed, ToolFailed)
    with pytest.raises(ToolFailed, match=reason):
        raise failed
    assert right.output == "a: 2"


def test_a_source_that_hangs_is_stopped() -> None:
    pool = Pool(SHORT, size=1)
    try:
        failed = outcome(pool, "def call(arguments, item, state):\n    while True:\n        pass\n")
    finally:
        pool.close()

    assert isinstance(failed, ToolFailed)
    assert "no output within 1 s" in str(failed)


def test_a_call_sees_nothing_of_another_but_the_state(pool: Pool) -> None:
    source = """
import os
seen = []
def call(arguments, item, state):
    seen.append(item["who"])
    left = os.listdir(".")
    open("left", "w").write("x")
    return [len(seen), left, "PATH" in os.environ], state
"""
    python = tools(pool, count=source)
    both = asyncio.run(results(python, call(), call()))

    assert [json.loads(one.output) for one in both] == [[1, [], False], [1, [], False]]


def test_a_tool_that_fails_more_often_than_not_pauses_the_job(pool: Pool) -> None:
    python = tools(pool, count=returning("1 / 0"))
    failures = asyncio.run(results(python, *[call()] * (WINDOW // 2 + 1)))

    assert isinstance(failures[-2], ToolFailed)
    assert isinstance(failures[-1], ToolsFail)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("def grade(sample, item): return 1", r"no function call\(arguments, item, state\)"),
        ("def call(arguments, item): return 1", "three positional parameters"),
        ("async def call(arguments, item, state): pass", "must be a plain function"),
        ("def call(", "line 1"),
    ],
)
def test_a_source_is_compiled_as_a_tool(pool: Pool, source: str, error: str) -> None:
    found = pool.compile_error(source, entry=CALL).result()

    assert re.search(error, found), found


def test_the_example_is_a_tool_that_keeps_a_state(pool: Pool) -> None:
    example = Path(__file__).parents[2] / "examples/python_tool.py"
    [tool] = json.loads(subprocess.check_output([sys.executable, str(example)]))
    item = {"drawers": {"3": "7"}}
    twice = [ToolRequest("c", "key", "lookup", '{"drawer": 3}', "trace_1", item)] * 2

    outputs = [one.output for one in asyncio.run(results(PythonTools([tool], pool=pool), *twice))]

    assert outputs == ["in drawer 3 is 7", "the drawer is locked"]
