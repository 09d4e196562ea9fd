"""Traces from a request to a grade, as a collector gets them."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from graders.spec import parse_grader
from tests.worker.conftest import GRADER, Bench

pytest.importorskip("opentelemetry.sdk", reason="regraft-server[otel] brings it")

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from core.telemetry import tracing
from tests.fakes import ExactGrader
from worker.instruments import InstrumentedGrader


@pytest.fixture
def collector() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def of(collector: InMemorySpanExporter, name: str) -> list[Any]:
    return [one for one in collector.get_finished_spans() if one.name == name]


CALLERS = "4bf92f3577b34da6a3ce929d0e0e4736"


def test_a_job_has_a_trace_of_its_own_that_every_attempt_finds(collector: InMemorySpanExporter) -> None:
    with tracing.exported("", "test", collector):
        caller = {"traceparent": f"00-{CALLERS}-00f067aa0ba902b7-01"}
        with tracing.request("POST", caller):
            tracing.job_created("ftjob-1")
            tracing.answered("POST", "/v1/fine_tuning/jobs", 200, "req_1")
    with tracing.exported("", "another machine", again := InMemorySpanExporter()):
        for epoch in (2, 3):
            with tracing.attempt("ftjob-1", epoch), tracing.span("step"):
                pass

    [job], [request] = of(collector, "job"), of(collector, "POST /v1/fine_tuning/jobs")
    first, second = of(again, "attempt")
    assert format(request.context.trace_id, "032x") == CALLERS
    assert job.context.trace_id != request.context.trace_id
    assert job.parent is None
    assert [link.context.span_id for link in job.links] == [request.context.span_id]
    assert [link.context.trace_id for link in request.links] == [job.context.trace_id]
    for attempt in (first, second):
        assert attempt.context.trace_id == job.context.trace_id
        assert attempt.parent.span_id == job.context.span_id
    assert {step.parent.span_id for step in of(again, "step")} == {
        first.context.span_id,
        second.context.span_id,
    }
    assert request.attributes["regraft.request_id"] == "req_1"


def test_a_grade_is_part_of_its_step_and_so_are_the_phases(
    collector: InMemorySpanExporter, bench: Bench
) -> None:
    run = bench.run()
    run.experience.rewards.grader = InstrumentedGrader(ExactGrader(), parse_grader(GRADER))

    with tracing.exported("", "test", collector), tracing.attempt("ftjob-1", 1):
        asyncio.run(run.train())

    steps = {span.context.span_id: span.attributes["regraft.step"] for span in of(collector, "step")}
    grades = of(collector, "grade")
    assert sorted(steps.values()) == [0, 1, 2, 3, 4]
    validations = {span.context.span_id: span.parent.span_id for span in of(collector, "eval")}
    above = [grade.parent.span_id for grade in grades]
    assert len(grades) == 44 and {validations.get(span, span) for span in above} == steps.keys()
    for phase in ("sampling", "grading", "training", "eval"):
        assert steps.keys() & {span.parent.span_id for span in of(collector, phase)}, phase
    assert len({span.context.trace_id for span in collector.get_finished_spans()}) == 1


@pytest.mark.parametrize("share", ["0", "1"])
def test_a_job_is_sampled_as_a_whole_or_not_at_all(
    collector: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, share: str
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", share)
    with tracing.exported("", "test", collector):
        with tracing.request("POST", {}):
            tracing.job_created("ftjob-1")
        with tracing.attempt("ftjob-1", 1), tracing.span("step"):
            pass

    assert len(collector.get_finished_spans()) == 4 * int(share)


def test_another_server_goes_on_in_the_same_trace(collector: InMemorySpanExporter) -> None:
    with tracing.exported("", "test", collector):
        with tracing.request("POST", {}):
            headers = tracing.outgoing()
            tracing.answered("POST", "/v1/chat/completions", 200, "req_1")
        with tracing.request("POST", headers):
            tracing.answered("POST", "/v1/chat/completions", 503)

    ours, theirs = of(collector, "POST /v1/chat/completions")
    assert theirs.parent.span_id == ours.context.span_id
    assert theirs.context.trace_id == ours.context.trace_id
    assert not theirs.status.is_ok


def test_nothing_is_imported_or_recorded_without_an_endpoint() -> None:
    code = (
        "import sys; from core.telemetry import tracing\n"
        "with tracing.exported('', 'x'), tracing.request('GET', {}), tracing.attempt('j', 1), tracing.span('s'):\n"
        "    tracing.job_created('j'); tracing.answered('GET', '/', 200, 'r')\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
