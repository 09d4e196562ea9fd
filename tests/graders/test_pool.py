"""The pool of python graders: turns, cancelling, idle processes, folders, users, and what a crowded host changes."""

import asyncio
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from core.outages import outage
from graders.builtin.python import PythonGrader
from graders.sandbox import folders, users
from graders.sandbox.pool import LayersProbe, Pool, SandboxBusy, SandboxFailed, SandboxLimits
from graders.sandbox.turns import Turns
from graders.types import Sample
from tests.present import present

ROOT = Path(__file__).parents[2]
ONE = "def grade(sample, item):\n    return 1\n"
SPINS = "def grade(sample, item):\n    while True: pass\n"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(SandboxLimits(wall_s=60), size=1)
    yield pool
    pool.close()


def begun(pool: Pool) -> None:
    """Wait until a grade is under way."""
    while not any(zygote.served or zygote.layers for zygote in pool.zygotes):
        os.sched_yield()


def test_owners_take_turns_however_many_items_one_of_them_has() -> None:
    turns: Turns[int] = Turns()
    for owner, item in [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5)]:
        turns.put(owner, item)

    taken = [turns.take() for _ in range(6)]

    assert taken == [("a", 1), ("b", 4), ("c", 5), ("a", 2), ("a", 3), None]


def test_an_owner_whose_turn_ends_is_behind_those_that_came_meanwhile() -> None:
    turns: Turns[int] = Turns(most=1)
    for item in (1, 2, 3):
        turns.put("a", item)
    turns.take()
    turns.put("b", 4)
    turns.end("a")

    assert turns.take() == ("b", 4)


def test_no_owner_has_more_than_its_share_under_way_but_for_the_one_without_a_name() -> None:
    turns: Turns[int] = Turns(most=1)
    for owner, item in [("a", 1), ("a", 2), ("b", 3), ("", 4), ("", 5)]:
        turns.put(owner, item)

    assert [turns.take() for _ in range(5)] == [("a", 1), ("b", 3), ("", 4), ("", 5), None]

    turns.end("a")
    assert turns.take() == ("a", 2)


def test_the_next_item_is_of_the_owner_with_the_fewest_under_way() -> None:
    turns: Turns[int] = Turns()
    for owner, item in [("a", 1), ("a", 2), ("a", 3)]:
        turns.put(owner, item)
    turns.take()
    turns.take()
    turns.put("b", 4)
    assert turns.take() == ("b", 4)
    turns.end("b")
    turns.put("b", 5)

    assert turns.take() == ("b", 5)


@pytest.mark.slow
def test_a_grade_of_another_project_does_not_wait_for_all_of_the_first() -> None:
    pool = Pool(SandboxLimits(wall_s=60), size=1)
    ended: list[str] = []
    try:
        calls = [pool.submit(ONE, {}, {}, owner=owner) for owner in ("first",) * 6 + ("second",)]
        for call, name in zip(calls, ["first"] * 6 + ["second"], strict=True):
            call.add_done_callback(partial(lambda name, done: ended.append(name), name))
        for call in calls:
            call.result()
    finally:
        pool.close()

    assert "second" in ended[:3]


def test_a_grade_that_was_cancelled_in_line_keeps_nothing_of_its_input_in_memory() -> None:
    class Item(dict[str, str]):
        """Can be referred to weakly, as a dict cannot."""

    pool = Pool(SandboxLimits(wall_s=60), size=1)
    try:
        running = pool.submit(SPINS, {}, {}, owner="a")
        begun(pool)
        item = Item(text="x" * 1000)
        in_line, alive = pool.submit(ONE, {}, item, owner="a"), weakref.ref(item)
        del item

        assert in_line.cancel()
        assert alive() is None
        running.cancel()
    finally:
        pool.close()


@pytest.mark.slow
def test_a_grade_that_runs_ends_when_it_is_cancelled(pool: Pool) -> None:
    call = pool.submit(SPINS, {}, {})
    begun(pool)

    assert call.cancel()
    with pytest.raises(SandboxFailed):
        call.result(timeout=30)
    assert pool.submit(ONE, {}, {}).result().score == 1


@pytest.mark.slow
def test_code_that_stops_waiting_for_a_grade_ends_it(pool: Pool) -> None:
    async def leave() -> None:
        task = asyncio.create_task(PythonGrader("py", SPINS, pool).grade(Sample(""), {}))
        await asyncio.to_thread(begun, pool)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(leave())

    assert pool.submit(ONE, {}, {}).result(timeout=30).score == 1


def test_a_grade_that_waits_is_cancelled_without_a_process(pool: Pool) -> None:
    running = pool.submit(SPINS, {}, {})
    begun(pool)
    waiting = pool.submit(ONE, {}, {})

    assert waiting.cancel() and waiting.cancelled()
    assert running.cancel()
    assert pool.load().grades <= 1


def test_its_processes_are_the_first_to_be_killed_when_memory_runs_out(pool: Pool) -> None:
    pool.submit(ONE, {}, {}).result()

    [zygote] = pool.zygotes
    assert Path(f"/proc/{zygote.process.pid}/oom_score_adj").read_text().strip() == "1000"


@pytest.mark.slow
def test_idle_processes_end_after_their_time() -> None:
    now = [0.0]
    pool = Pool(size=1, idle_s=600, clock=lambda: now[0])
    try:
        pool.submit(ONE, {}, {}).result()
        now[0] = 599.0
        pool.expire()
        assert pool.load().processes == 1
        now[0] = 600.0
        pool.expire()
        assert pool.load().processes == 0
        assert pool.submit(ONE, {}, {}).result().score == 1
    finally:
        pool.close()


def test_the_folder_of_a_killed_service_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import os, pathlib, signal\nfrom graders.sandbox.folders import Folder, make\n"
        "left = Folder.claim()\npathlib.Path(make(left.path), 'x').write_text('x')\n"
        "print(left.path, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert list(tmp_path.iterdir()) == [Path(done.stdout.strip())]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    mine = folders.Folder.claim()
    beside = folders.Folder.claim()

    assert set(tmp_path.iterdir()) == {Path(mine.path), Path(beside.path)}
    mine.remove()
    beside.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_private_folder_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\nfrom graders.sandbox import folders\n"
        "with folders.private('run-', sys.argv[1]) as left:\n"
        "    (left / 'checkpoint').write_text('x')\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT)
    assert len(list(tmp_path.glob("run-*/*/checkpoint"))) == 1

    with folders.private("run-", str(tmp_path)) as mine:
        assert mine.stat().st_mode & 0o077 == 0
        assert [*tmp_path.iterdir()] == [mine.parent], "those of others are gone"
        with folders.private("run-", str(tmp_path)):
            assert mine.exists(), "a folder in use stays"

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mapped", "first", "last"),
    [
        ("0 0 4294967295", 0x70000000, 0x7FFF0000),
        ("0 100000 65536", 61184, 65520),
        ("0 1000 1", 65534, 65535),
    ],
)
def test_users_of_graders_are_ones_that_the_container_has_and_nobody_uses(
    tmp_path: Path, mapped: str, first: int, last: int
) -> None:
    (tmp_path / "map").write_text(mapped)

    found = users.available((tmp_path / "map",))

    assert first <= found.start and found.stop <= last


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is root's to take")
@pytest.mark.slow
def test_as_root_each_process_has_a_user_of_its_own(pool: Pool) -> None:
    who = "import os\ndef grade(sample, item):\n    return os.getuid()\n"

    mine, others = pool.submit(who, {}, {}).result().score, pool.submit(who, {}, {}, owner="b").result().score

    assert mine != others
    assert not {mine, others} & {0.0, float(os.geteuid())}


def test_the_next_grade_finds_nothing_of_the_one_before_in_memory(pool: Pool) -> None:
    source = (
        "import gc, sys\n"
        "def grade(sample, item):\n"
        "    print(sample['output_text'])\n"
        "    seen, frame = [], sys._getframe()\n"
        "    while frame:\n        values = frame.f_locals.values()\n"
        "        seen += [repr(v) for v in values if type(v) in (bytes, bytearray, dict)]\n"
        "        frame = frame.f_back\n"
        "    seen += [repr(o) for o in gc.get_objects() if type(o) is dict and 'output_text' in o]\n"
        "    return sum('secret' + '-of-the-first' in text for text in seen)\n"
    )

    scores = [
        pool.submit(source, {"output_text": text}, {}).result().score
        for text in ("secret-of-the-first", "second", "third")
    ]

    assert present(scores[0]) > 0
    assert scores[1:] == [0, 0]


CROWDED = """
import json, os, sys, threading
from graders.sandbox.pool import SandboxLimits, Pool
from tests.graders.attacks import drop_rights
if os.geteuid() == 0 and sys.argv[1] == "unprivileged":
    drop_rights("/usr/lib")
wait = threading.Event()
for _ in range(300):
    threading.Thread(target=wait.wait, daemon=True).start()
pool = Pool(SandboxLimits(wall_s=60), size=1)
numpy = "import numpy as np\\ndef grade(s, i):\\n    return float((np.ones((400, 400)) @ np.ones((400, 400)))[0, 0])"
threads = ("from concurrent.futures import ThreadPoolExecutor\\ndef grade(s, i):\\n"
    "    with ThreadPoolExecutor(8) as some:\\n        return sum(some.map(float, range(5)))")
bomb = ("import threading\\ndef grade(s, i):\\n    go = threading.Event()\\n    threading.stack_size(65536)\\n"
    "    while True:\\n        threading.Thread(target=go.wait, daemon=True).start()")
ends = [pool.submit(source, {}, {}).result() for source in (numpy, threads, bomb, numpy)]
print(json.dumps([[end.kind, end.score, end.reason] for end in ends]))
pool.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("rights", ["as we are", "unprivileged"])
def test_threads_of_the_service_do_not_count_against_those_of_a_grade(rights: str) -> None:
    """With a service of 300 threads numpy works, and a bomb of threads is still contained."""
    program = [sys.executable, "-c", CROWDED, rights]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr

    numpy, threads, bomb, again = json.loads(done.stdout)

    assert numpy[:2] == again[:2] == ["ok", 400.0]
    assert threads[:2] == ["ok", 10.0]
    assert bomb[0] in ("user_error", "thread_limit"), bomb
    assert "new thread" in bomb[2] or "more than 128 threads" in bomb[2]


LAYERS = dict.fromkeys(("namespaces", "uid", "no_new_privs", "landlock", "rlimits", "seccomp"), "")
BUSY = LAYERS | {"seccomp": "[Errno 11] Resource temporarily unavailable"}
FORBIDDEN = LAYERS | {"seccomp": "[Errno 1] Operation not permitted"}


def test_a_layer_that_was_missing_for_a_moment_is_probed_again() -> None:
    found = [BUSY, LAYERS]
    probe = LayersProbe(lambda: found.pop(0))

    with pytest.raises(SandboxBusy, match="at the moment") as caught:
        probe.refusal()
    assert outage(caught.value) is not None, "a job waits for it"

    assert probe.refusal() == probe.refusal() == ""


def test_a_layer_that_the_host_does_not_have_is_probed_once() -> None:
    found = [FORBIDDEN]
    probe = LayersProbe(lambda: found.pop(0))

    assert probe.refusal() == probe.refusal() == "seccomp is missing ([Errno 1] Operation not permitted)"
