"""OpenTelemetry traces: a request, the job that it created, its attempts, steps, phases and grades.

Without `exported` nothing is recorded, and OpenTelemetry is not imported. A job has its own trace, whose ids are
derived
from the job's, so attempts on any machine join it without communication. The request that created the job and the job's
trace are linked to each other.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.sdk.trace.sampling import Sampler
    from opentelemetry.trace import Span, SpanContext, Tracer

_tracer: "Tracer | None" = None
_sampler: "Sampler | None" = None
# The ids of the next span, where they are not random.
_ids: ContextVar[tuple[int, int] | None] = ContextVar("ids", default=None)


@contextmanager
def exported(endpoint: str, service: str, exporter: "SpanExporter | None" = None) -> Iterator[None]:
    """Export spans to an OTLP/HTTP endpoint during the block, and flush at the end. "": off.

    OpenTelemetry's own variables configure sampling, headers etc.: OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS.
    """
    global _tracer, _sampler
    if not endpoint and exporter is None:
        yield
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    except ImportError as cause:
        raise RuntimeError(
            "REGRAFT_OTLP_ENDPOINT needs OpenTelemetry: install regraft-server[otel]"
        ) from cause

    class Ids(RandomIdGenerator):
        def generate_trace_id(self) -> int:
            return ids[0] if (ids := _ids.get()) else super().generate_trace_id()

        def generate_span_id(self) -> int:
            return ids[1] if (ids := _ids.get()) else super().generate_span_id()

    resource = Resource.create({"service.name": service})
    provider = TracerProvider(resource=resource, id_generator=Ids())
    sender = exporter or OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(sender))
    _tracer, _sampler = provider.get_tracer("regraft"), provider.sampler
    try:
        yield
    finally:
        _tracer = _sampler = None
        provider.shutdown()


@contextmanager
def span(name: str, **attributes: Any) -> Iterator[None]:
    """A span around the block; tasks started from it are its children."""
    if _tracer is None:
        yield
        return
    with _tracer.start_as_current_span(name, attributes=attributes):
        yield


@contextmanager
def request(method: str, headers: Mapping[str, str]) -> Iterator[None]:
    """The span of a request, as part of its caller's trace if it sent one."""
    if _tracer is None:
        yield
        return
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    caller = TraceContextTextMapPropagator().extract(dict(headers))
    with _tracer.start_as_current_span(method, caller, SpanKind.SERVER):
        yield


def answered(method: str, route: str, status: int, request_id: str = "") -> None:
    """Record the outcome of the current request."""
    if _tracer is None:
        return
    from opentelemetry.trace import Status, StatusCode

    current = _current()
    current.update_name(f"{method} {route}")
    current.set_attributes(
        {"http.request.method": method, "http.route": route, "http.response.status_code": status}
    )
    if request_id:
        current.set_attribute("regraft.request_id", request_id)
    if status >= 500:
        current.set_status(Status(StatusCode.ERROR))


def outgoing() -> dict[str, str]:
    """The headers that propagate this trace to another server."""
    headers: dict[str, str] = {}
    if _tracer is not None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(headers)
    return headers


def job_created(job_id: str) -> None:
    """Start the job's trace, and link it with the current request."""
    if _tracer is None:
        return
    from opentelemetry.context import Context
    from opentelemetry.trace import Link

    root = _root(job_id)
    token = _ids.set((root.trace_id, root.span_id))
    try:
        links = [Link(_current().get_span_context())]
        _tracer.start_span("job", Context(), attributes={"regraft.job_id": job_id}, links=links).end()
    finally:
        _ids.reset(token)
    _current().add_link(root)


@contextmanager
def attempt(job_id: str, epoch: int) -> Iterator[None]:
    """The span of an attempt, in the job's trace."""
    if _tracer is None:
        yield
        return
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context

    job = set_span_in_context(NonRecordingSpan(_root(job_id)))
    attributes: dict[str, Any] = {"regraft.job_id": job_id, "regraft.attempt": epoch}
    with _tracer.start_as_current_span("attempt", job, attributes=attributes):
        yield


def _current() -> "Span":
    from opentelemetry.trace import get_current_span

    return get_current_span()


def _root(job_id: str) -> "SpanContext":
    from opentelemetry.sdk.trace.sampling import Decision
    from opentelemetry.trace import SpanContext, TraceFlags

    assert _sampler is not None, "called only inside `exported`"
    digest = hashlib.sha256(job_id.encode()).digest()
    trace_id, span_id = int.from_bytes(digest[:16]), int.from_bytes(digest[16:24])
    # Sampling depends on the job's id, so the decision is the same as at its creation.
    chosen = _sampler.should_sample(None, trace_id, "job").decision is Decision.RECORD_AND_SAMPLE
    flags = TraceFlags(TraceFlags.SAMPLED if chosen else TraceFlags.DEFAULT)
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)
