"""Whether answers can be held to a `response_format`: its schema is compiled in the hazard pool, as samplers will."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from core.errors import InvalidRequest, NotReady, ServiceError
from core.response_format import ResponseFormat, held_to
from graders import complaints
from graders.hazards import table
from graders.hazards.pool import HazardFailed, LimitExceeded, shared

# Each waits in one of the 40 threads that answer everybody: the rest of these are for others.
CHECKS_AT_ONCE = 12
_checks = threading.BoundedSemaphore(CHECKS_AT_ONCE)


def refuse_unusable_schema(form: ResponseFormat | None, param: str) -> None:
    """Refuse a schema that does not compile, or not within the limits of the hazard pool. Not in an event loop.

    Raises:
        InvalidRequest: answers cannot be held to it.
        NotReady: too many schemas are checked already.
        ServiceError: the pool broke.
    """
    if form is None:
        return
    with checks_at_once():
        _check(form, param)


@contextmanager
def checks_at_once() -> Iterator[None]:
    """A place for a check that waits for the hazard pool. Raises NotReady where all are taken."""
    if not _checks.acquire(blocking=False):
        raise NotReady("Too many schemas and graders are checked at once; ask again.", retry_after=2)
    try:
        yield
    finally:
        _checks.release()


def _check(form: ResponseFormat, param: str) -> None:
    try:
        why = shared().submit(table.SCHEMA, held_to(form.json_schema.schema_)).result()
    except LimitExceeded as exceeded:
        why = f"the schema is too expensive to compile: {exceeded}"
    except HazardFailed as broken:
        raise ServiceError(f"The schema could not be checked: {broken}") from broken
    if why:
        mistake = complaints.invalid_value(f"{param}.json_schema.schema", f"{why}.")
        raise InvalidRequest(mistake.message, param=mistake.param, code=mistake.code)
