"""Where metrics are sent besides: what a service gets of a run, and that no service can harm one."""

import asyncio
import threading
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from core.database.tables import Job
from core.jobs.hyperparameters import Hyperparameters, resolve
from core.settings import Settings
from core.step_metrics import StepMetrics
from tests.fakes import Notebook
from tests.present import present, untyped
from tests.worker.conftest import Bench
from worker.child import closed_at_the_end
from worker.recording import results
from worker.recording.exporters import RunInfo, choice, threads
from worker.recording.exporters.threads import ExporterThread, ExporterThreads, flat
from worker.recording.exporters.types import Exporter
from worker.refusals import UserMistake
from worker.types import Ended

RUN_INFO = RunInfo("ftjob-1", "colours", "ftjob-1", None, (), {"model": "tiny"})
STEP = StepMetrics(
    step=2,
    total_steps=4,
    train_mean_reward=0.5,
    kl=None,
    grad_norm=float("inf"),
    scores={"graders": [{"name": "exact", "type": "string_check", "train_reward_mean": 0.25}]},
    timing={"step": {"sampling": 1.5}},
)


def exporters_for(
    exporter: Exporter, told: list[str] | None = None, close_seconds: float = 30.0
) -> ExporterThreads:
    """`told`: a list that gets what the job's user hears."""
    tell = (lambda what: None) if told is None else told.append
    return ExporterThreads(
        [ExporterThread(exporter, RUN_INFO, tell, first_pause=0.0)], close_seconds=close_seconds
    )


def steps(*numbers: int) -> list[Any]:
    return [StepMetrics(step=number) for number in numbers]


@pytest.fixture(autouse=True)
def nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_LEFT_BEHIND", [])


# What is sent.


def test_a_run_is_opened_fed_and_finished_in_order(bench: Bench) -> None:
    book, run = Notebook(), bench.run()
    run.exporters = exporters_for(book)

    with closed_at_the_end(run.exporters):
        train(run)

    assert book.pages == [("start", "ftjob-1"), *(("step", n) for n in range(5)), ("finish", "succeeded")]
    assert not threads.has_abandoned_threads()


def test_metrics_have_the_names_of_the_listing_and_of_the_result_file(bench: Bench) -> None:
    book, run = Notebook(), bench.run()
    run.exporters = exporters_for(book)

    train(run)

    recorded = bench.steps()[2]
    columns = results.row(StepMetrics.load(recorded))
    assert book.metrics[2]["train_mean_reward"] == recorded["train_mean_reward"]
    assert book.metrics[2]["sampling_duration"] == columns["sampling_duration"]
    assert set(book.metrics[2]) == {
        name for name, value in {**recorded, **columns}.items() if isinstance(value, int | float)
    }


def test_what_was_not_measured_or_is_no_number_is_left_out() -> None:
    assert flat(STEP) == {
        "step": 2,
        "total_steps": 4,
        "train_mean_reward": 0.5,
        "scores/graders/string_check/exact/train_reward_mean": 0.25,
        "sampling_duration": 1.5,
    }


def test_a_run_that_resumes_sends_what_is_missing_and_nothing_twice() -> None:
    """Of the steps before the checkpoint the service has 0 to 2; 3 was recorded here and lost on its way."""
    book = Notebook(last=2)
    exporters = exporters_for(book)

    exporters.start(steps(0, 1, 2, 3))
    exporters.put(StepMetrics(step=4))
    exporters.close("succeeded")

    assert [page for page in book.pages if page[0] == "step"] == [("step", 3), ("step", 4)]


def test_an_attempt_that_another_one_goes_on_with_is_interrupted(bench: Bench) -> None:
    book, run = Notebook(), bench.run(stop_requested=lambda: True)
    run.exporters = exporters_for(book)

    with closed_at_the_end(run.exporters):
        train(run)

    assert book.pages[-1] == ("finish", "interrupted")


def test_a_mistake_of_the_user_ends_the_run_there_as_failed() -> None:
    book = Notebook()
    exporters = exporters_for(book)
    exporters.start([])

    with pytest.raises(UserMistake), closed_at_the_end(exporters):
        raise UserMistake("grader_failed", "no")

    assert book.pages[-1] == ("finish", "failed")


def test_a_run_that_fails_before_its_sinks_are_started_raises_its_own_error() -> None:
    with pytest.raises(UserMistake), closed_at_the_end(exporters_for(Notebook())):
        raise UserMistake("invalid_model", "no")


def test_a_job_that_is_somebody_elses_is_not_ended_for_them(bench: Bench) -> None:
    book, run = Notebook(), bench.run()
    run.exporters = exporters_for(book)
    bench.again()

    with pytest.raises(Exception, match="no longer holds"), closed_at_the_end(run.exporters):
        train(run)

    assert "finish" not in dict(book.pages)
    assert threads.has_abandoned_threads()


# What cannot go wrong.


def test_a_service_that_fails_is_told_once_and_gets_everything_when_it_is_back() -> None:
    told: list[str] = []
    book = Notebook(failures=3)
    exporters = exporters_for(book, told)

    exporters.start([])
    for data in steps(1, 2):
        exporters.put(data)
    book.answered.wait(30)
    exporters.close("succeeded")

    assert told == ["ConnectionError: no route"]
    assert [page for page in book.pages if page[0] == "step"] == [("step", 1), ("step", 2)]


def test_a_service_that_never_answers_stops_no_run(bench: Bench) -> None:
    """It hangs in its first call, for ever, and the job succeeds with all its steps."""
    hung, run = Hung(), bench.run()
    told: list[str] = []
    run.exporters = exporters_for(hung, told, close_seconds=0.0)

    with closed_at_the_end(run.exporters):
        train(run)

    assert bench.job().status == "succeeded"
    assert len(bench.steps()) == 5
    assert told == ["TimeoutError: the service did not respond before the run ended"]
    assert threads.has_abandoned_threads()
    hung.freed.set()


def test_one_that_fails_to_the_end_is_given_up() -> None:
    told: list[str] = []
    exporters = exporters_for(Notebook(failures=10**9), told)

    exporters.start(steps(0))
    exporters.close("succeeded")

    assert threads.has_abandoned_threads()
    assert len(told) == 1


def test_what_waits_is_bounded() -> None:
    book = Notebook(last=0)
    exporters = ExporterThreads(
        [ExporterThread(book, RUN_INFO, lambda what: None, first_pause=0.0, most_waiting=2)]
    )

    for data in steps(1, 2, 3):
        exporters.put(data)
    exporters.start([])
    exporters.close("succeeded")

    assert book.pages == [("start", "ftjob-1"), ("step", 1), ("step", 2), ("finish", "succeeded")]


def test_who_cannot_be_told_does_not_end_the_thread() -> None:
    def deaf(what: str) -> None:
        raise RuntimeError("the job is no longer ours")

    book = Notebook(failures=1)
    exporters = ExporterThreads([ExporterThread(book, RUN_INFO, deaf, first_pause=0.0)])

    exporters.start([])
    book.answered.wait(30)
    exporters.close("failed")

    assert book.pages[-1] == ("finish", "failed")


class Hung:
    """Accepts connections and says nothing."""

    def __init__(self) -> None:
        self.freed = threading.Event()

    def start(self, run_info: Any) -> None:
        self.freed.wait()

    def step(self, step: int, metrics: Any) -> NoReturn:
        raise AssertionError("it was never opened")

    def finish(self, ended: Ended) -> NoReturn:
        raise AssertionError("it was never opened")


# Which ones.


def job(*integrations: dict[str, Any]) -> Job:
    return Job(
        id="ftjob-1",
        model="tiny",
        training_file="file-a",
        seed=3,
        body={"grader": {"type": "string_check"}, "integrations": list(integrations)},
    )


WANDB = {"type": "wandb", "wandb": {"project": "colours", "name": None, "tags": ["a"], "entity": "acme"}}
RESOLVED = resolve(Hyperparameters(), rows=8, parameters=1000, context=128)
ON = Settings(integrations="wandb, mlflow,trackio, tensorboard")


def test_a_job_has_the_sinks_that_it_asks_for() -> None:
    made = []

    exporters = choice.exporters_of(
        job(WANDB), RESOLVED, ON, lambda *_: None, untyped(lambda kind, _: made.append(kind))
    )

    [only] = exporters.threads
    assert made == ["wandb"]
    assert replace(only.run_info, config={}) == RunInfo("ftjob-1", "colours", "ftjob-1", "acme", ("a",), {})
    assert (only.run_info.config["batch_size"], only.run_info.config["grader"]) == (8, "string_check")


def test_a_worker_on_which_it_is_not_enabled_says_so_and_goes_on() -> None:
    said = []

    exporters = choice.exporters_of(
        job(WANDB), RESOLVED, Settings(), lambda message, data: said.append((message, data))
    )

    assert exporters.threads == []
    assert said[0][0].startswith("Weights & Biases is not enabled on the worker")
    assert said[0][1] == {"integration": "wandb"}


def test_a_failure_is_a_warning_that_names_the_service_and_keeps_its_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    said: list[str] = []
    [only] = choice.exporters_of(
        job(WANDB), RESOLVED, ON, lambda message, data: said.append(message), lambda *_: Notebook()
    ).threads

    only.on_failure("Refused: https://me:pw@host/x with 0123456789abcdef\nTraceback")

    assert said[0].startswith("Weights & Biases rejects this job's metrics. The export is retried")
    assert said[0].endswith("Refused: https://***@host/x with ***")


@pytest.mark.parametrize(
    ("integrations", "environment", "installed", "says"),
    [
        ("wandb", {"WANDB_API_KEY": "k"}, False, "pip install 'regraft-server[wandb]'"),
        ("wandb", {}, True, "set WANDB_API_KEY"),
        ("mlflow", {}, True, "set MLFLOW_TRACKING_URI"),
        ("wandb", {"WANDB_MODE": "offline"}, True, None),
        ("wandb,trackio", {"WANDB_API_KEY": "k"}, True, None),
        ("tensorboard", {}, False, None),
        ("", {}, False, None),
    ],
)
def test_a_worker_says_what_is_missing_before_it_starts(
    integrations: str, environment: dict[str, Any], installed: bool, says: str | None
) -> None:
    found = choice.problem(Settings(integrations=integrations), environment, lambda package: installed)

    assert (found is None) if says is None else says in present(found)


def test_only_services_that_there_are_can_be_enabled() -> None:
    with pytest.raises(ValueError, match="integrations"):
        Settings(integrations="wandb,neptune")


def train(run: Any) -> None:
    asyncio.run(run.train())
