"""What a log line says beside its message."""

import asyncio
import io
import json
import logging
from _io import StringIO

import pytest

from core.telemetry import logs


@pytest.fixture
def written(request: pytest.FixtureRequest) -> tuple[logging.Logger, dict[str, StringIO]]:
    """What was logged as text and as JSON, to a logger of the test's own."""
    log, streams = logging.getLogger(f"test.{request.node.name}"), {}
    log.setLevel(logging.INFO)
    log.propagate = False
    for format in ("text", "json"):
        streams[format] = io.StringIO()
        log.addHandler(logs.handler(format, streams[format]))
    return log, streams


def test_every_line_says_what_it_is_about_until_that_is_over(
    written: tuple[logging.Logger, dict[str, StringIO]],
) -> None:
    log, streams = written
    with logs.bound(job_id="ftjob-1", attempt=2), logs.bound(step=3):
        log.warning("slow\nindeed", extra=logs.extra(seconds=1.5))
    log.info("over")

    said, after = map(json.loads, streams["json"].getvalue().splitlines())
    assert said.items() >= {"job_id": "ftjob-1", "attempt": 2, "step": 3, "seconds": 1.5}.items()
    assert (said["level"], said["message"]) == ("warning", "slow\nindeed")
    assert said["time"].endswith("+00:00")
    assert after.keys() == {"time", "level", "logger", "message"}
    assert "slow\nindeed [job_id=ftjob-1 attempt=2 step=3 seconds=1.5]\n" in streams["text"].getvalue()
    assert streams["text"].getvalue().endswith(": over\n")


def test_threads_and_tasks_that_are_started_meanwhile_belong_to_it(
    written: tuple[logging.Logger, dict[str, StringIO]],
) -> None:
    log, streams = written

    async def one(number: int) -> None:
        with logs.bound(step=number):
            await asyncio.sleep(0)
            await asyncio.to_thread(log.info, "in a thread")

    async def both() -> None:
        await asyncio.gather(one(1), one(2))

    asyncio.run(both())

    assert sorted(json.loads(line)["step"] for line in streams["json"].getvalue().splitlines()) == [1, 2]


def test_an_exception_is_part_of_its_line(written: tuple[logging.Logger, dict[str, StringIO]]) -> None:
    log, streams = written
    try:
        raise ValueError("what went wrong")
    except ValueError:
        log.exception("failed")

    [line] = streams["json"].getvalue().splitlines()
    assert "ValueError: what went wrong" in json.loads(line)["exception"]


def test_a_line_that_was_redrawn_is_its_last_version_without_colors() -> None:
    text = "\rLoading:  10%|#\rLoading: 100%|##########\r\n\x1b[32mgreen\x1b[0m\x1b]8;;http://x\x07link\nplain\r\n"

    assert logs.cleaned(text) == "Loading: 100%|##########\ngreenlink\nplain\n"


GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "a.py", line 1, in <module>
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "a.py", line 3, in step
    | RuntimeError: the grader is gone
    +------------------------------------
"""


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", ""),
        ("starting\n 10%|#\r 90%|#########\n\n", "90%|#########"),
        ("Traceback (most recent call last):\n  File\n    f()\nKeyError: 'a'\nmore of it\n", "KeyError: 'a'"),
        ("Traceback (most recent call last):\n  x\nKeyError\n\nDuring\n\n 9%|#Traceback (most recent call last):\n"
         "  y\nOSError: b\n", "OSError: b"),
        (GROUP, "RuntimeError: the grader is gone"),
        ("Traceback (most recent call last):\n  File", ""),
    ],
    ids=["nothing", "no traceback", "message of two lines", "second of two", "group", "cut off"],
)  # fmt: skip
def test_the_headline_of_a_log_is_its_last_exception_or_its_last_line(log: str, line: str) -> None:
    assert logs.headline(log) == line
