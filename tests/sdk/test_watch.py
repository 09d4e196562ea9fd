import asyncio
import io
import os
import pty
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import openai
import pytest
import regraft
from regraft import AsyncRegraft, Regraft
from regraft.display import Display, Waiting

from tests.present import present, untyped
from tests.sdk.conftest import House, Proxy


@pytest.fixture
def proxy(house: House) -> Iterator[Proxy]:
    proxy = Proxy(house.port)
    yield proxy
    proxy.close()


def test_all_events_come_in_order_and_typed(house: House, client: Regraft) -> None:
    job_id = house.job(status="running")
    house.say(job_id, "one")
    house.step(job_id, 1, 4, 0.25, full_valid_mean_reward=0.5)
    house.end(job_id, "succeeded", fine_tuned_model="ft:tiny")

    told = list(client.jobs.watch(job_id))

    assert [event.message for event in told] == ["one", "Step 1/4", "now succeeded"]
    assert told[0].metrics is None
    assert (present(told[1].metrics).step, present(told[1].metrics).full_valid_mean_reward) == (1, 0.5)


def test_a_connection_that_is_cut_is_made_again_and_nothing_is_missed(house: House, proxy: Proxy) -> None:
    job_id = house.job(status="running")
    house.say(job_id, "one")
    house.say(job_id, "two")
    client = Regraft(base_url=f"http://127.0.0.1:{proxy.port}", api_key=house.key)

    told = []
    for event in client.jobs.watch(job_id):
        told.append(event.message)
        if event.message == "two":
            proxy.cut()
            house.say(job_id, "while it was cut")
            house.end(job_id, "cancelled")

    assert told == ["one", "two", "while it was cut", "Fine-tuning job cancelled"]
    assert proxy.connections == 2


def test_the_async_client_goes_on_as_well(house: House, proxy: Proxy) -> None:
    job_id = house.job(status="running")
    house.say(job_id, "one")

    async def follow() -> list[str]:
        told = []
        async with AsyncRegraft(base_url=f"http://127.0.0.1:{proxy.port}", api_key=house.key) as client:
            async for event in client.jobs.watch(job_id):
                told.append(event.message)
                if event.message == "one":
                    proxy.cut()
                    house.end(job_id, "cancelled")
        return told

    assert asyncio.run(follow()) == ["one", "Fine-tuning job cancelled"]
    assert proxy.connections == 2


def test_events_that_are_written_meanwhile_arrive(house: House, client: Regraft) -> None:
    job_id = house.job(status="running")
    house.say(job_id, "one")

    told = []
    for event in client.jobs.watch(job_id):
        told.append(event.message)
        if event.message == "one":
            house.say(job_id, "two")
        elif event.message == "two":
            house.end(job_id, "cancelled")

    assert told == ["one", "two", "Fine-tuning job cancelled"]


def test_it_can_begin_behind_an_event(house: House, client: Regraft) -> None:
    job_id = house.job(status="running")
    one = house.say(job_id, "one")
    house.end(job_id, "cancelled")

    assert [event.message for event in client.jobs.watch(job_id, after=one)] == ["Fine-tuning job cancelled"]


def test_a_paused_job_ends_the_watching(house: House, client: Regraft) -> None:
    job_id = house.job(status="paused")

    assert list(client.jobs.watch(job_id)) == []
    assert untyped(client.jobs.wait(job_id)).status == "paused"


def test_an_unknown_job_is_not_waited_for(client: Regraft) -> None:
    with pytest.raises(regraft.JobNotFound):
        list(client.jobs.watch("ftjob-none"))


def test_leaving_early_frees_the_connection(house: House, client: Regraft) -> None:
    job_id = house.job(status="running")
    house.say(job_id, "one")

    for _ in client.jobs.watch(job_id):
        break

    assert client.jobs.cancel(job_id).status == "cancelled"  # on the same client


def test_waiting_returns_the_job_or_says_why_there_is_none(house: House, client: Regraft) -> None:
    good = house.job(status="succeeded", fine_tuned_model="ft:tiny:x::1")
    bad = house.job(
        status="failed", error={"code": "invalid_training_file", "message": "line 3: is blank", "param": "p"}
    )

    assert client.jobs.wait(good).fine_tuned_model == "ft:tiny:x::1"
    with pytest.raises(regraft.JobFailed, match="failed: line 3: is blank") as failed:
        client.jobs.wait(bad)
    assert (failed.value.code, failed.value.param, failed.value.job.id) == ("invalid_training_file", "p", bad)
    assert isinstance(failed.value, openai.OpenAIError)


def test_waiting_in_a_pipe_prints_a_line_for_everything(house: House, client: Regraft) -> None:
    job_id = house.job(status="running")
    house.say(job_id, "Fine-tuning job started")
    house.step(job_id, 1, 2, 0.25)
    house.say(job_id, "no signal", level="warn")
    house.step(job_id, 2, 2, 0.5, full_valid_mean_reward=0.75)
    house.end(job_id, "succeeded")
    out = io.StringIO()

    client.jobs.wait(job_id, progress=out)

    assert out.getvalue().splitlines() == [
        "Fine-tuning job started",
        "step 1/2  train 0.25  1.5 s",
        "warning: no signal",
        "step 2/2  train 0.50  valid 0.75  1.5 s",
        "now succeeded",
    ]


def in_a_terminal(columns: int, encoding: str, use: Callable[[Any], object]) -> str:
    """What `use`, given the terminal as a file, writes to one of that many columns."""
    primary, secondary = pty.openpty()
    written = bytearray()

    def read() -> None:
        try:
            while chunk := os.read(primary, 65536):
                written.extend(chunk)
        except OSError:
            pass  # the other end was closed

    reader = threading.Thread(target=read)
    reader.start()
    os.environ["COLUMNS"], before = str(columns), os.environ.get("COLUMNS")
    with os.fdopen(secondary, "w", encoding=encoding) as terminal:
        use(terminal)
    reader.join()
    os.close(primary)
    os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    return written.decode(encoding)


def test_a_job_in_the_queue_shows_its_place_its_reason_and_a_running_clock(
    house: House, client: Regraft
) -> None:
    job_id = house.job()  # no worker reports itself

    class Ends(io.StringIO):
        """A pipe whose reader ends the job once it has read its place."""

        def write(self, text: str) -> int:
            if "position 1" in text:
                house.end(job_id, "succeeded")
            return super().write(text)

    printed = Ends()
    client.jobs.wait(job_id, progress=printed)

    assert printed.getvalue().splitlines()[0] == "queued: position 1, no worker of class cpu reports itself"


def test_the_clock_of_a_queued_job_runs_in_a_terminal() -> None:
    time, queue = [10.0], {"position": 2, "reason": "no worker reports itself"}

    def use(out: TextIO) -> None:
        display = Display(out, clock=lambda: time[0])
        display.status("queued")
        display.queued(queue)
        time[0] += 75
        display.tick()
        display.status("running")
        display.close()

    text = in_a_terminal(100, "utf-8", use)

    lines = text.split("\r\x1b[K")
    assert "queued  position 2, no worker reports itself  0 s" in lines
    assert "queued  position 2, no worker reports itself  75 s" in lines
    assert lines[-1].strip() == "running"


@pytest.fixture
def learning(house: House) -> str:
    """A job that learned, with a warning in the middle."""
    job_id = house.job(status="running")
    for step, reward in enumerate((0.1, 0.2, 0.4, 0.8), start=1):
        house.step(job_id, step, 4, reward)
        if step == 2:
            house.say(job_id, "no signal", level="warn")
    house.end(job_id, "succeeded")
    return job_id


def test_a_terminal_has_one_live_line_with_the_rewards(client: Regraft, learning: str) -> None:
    text = in_a_terminal(100, "utf-8", lambda out: client.jobs.wait(learning, progress=out))

    shown = [line.split("\r\x1b[K")[-1] for line in text.split("\r\n")]
    assert shown == [
        "warning: no signal",
        "succeeded  step 4/4 ████████████████████  ▂▂▄▇  train 0.80  1.5 s",
        "",
    ]


def test_a_narrow_terminal_and_one_without_blocks(client: Regraft, learning: str) -> None:
    text = in_a_terminal(40, "ascii", lambda out: client.jobs.wait(learning, progress=out))

    assert all(len(line) < 40 for line in text.replace("\r\x1b[K", "\n").splitlines())
    assert "step 4/4 ##########" in text


def test_ctrl_c_stops_the_waiting_and_not_the_job(house: House, client: Regraft) -> None:
    job_id = house.job(status="running")
    house.say(job_id, "one")

    class Impatient(io.StringIO):
        def write(self, text: str) -> int:
            if "one" in text:
                raise KeyboardInterrupt
            return super().write(text)

    out = Impatient()
    with pytest.raises(KeyboardInterrupt):
        client.jobs.wait(job_id, progress=out)

    assert f"regraft jobs watch {job_id}" in out.getvalue()
    assert client.jobs.retrieve(job_id).status == "running"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_wait_is_said_from_the_first_second_and_called_unusual_after_a_minute() -> None:
    pipe, terminal, seconds = io.StringIO(), Terminal(), [0.0]
    waits = [Waiting(out, "desk", clock=lambda: seconds[0]) for out in (pipe, terminal)]
    for now in (1.0, 2.0, 61.0, 62.0):
        seconds[0] = now
        for wait in waits:
            wait.tick()
    for wait in waits:
        wait.end()

    unusual = "unusually long; the server's log may say why"
    assert pipe.getvalue().splitlines() == ["waiting for desk, 1 s", f"waiting for desk, 61 s: {unusual}"]
    lines = terminal.getvalue().split("\r\x1b[K")
    assert lines[1:3] == ["waiting for desk, 1 s", "waiting for desk, 2 s"]
    assert lines[-1] == "", "nothing of it stays in the terminal"


def test_news_of_the_server_begin_a_wait_anew() -> None:
    out, seconds = io.StringIO(), [0.0]
    wait = Waiting(out, "the preview", clock=lambda: seconds[0])

    wait.say("loading the model")
    for now in (1.0, 59.0, 60.0):
        seconds[0] = now
        wait.tick()

    assert out.getvalue().splitlines()[0] == "loading the model"
    assert len(out.getvalue().splitlines()) == 2
