"""Validation of schemas and patterns: the hazard pool compiles user input while a thread waits."""

from collections.abc import Callable, Sequence
from functools import partial

from api.http.deps import Service
from api.http.large_bodies import body_is_read
from core.database.tables import Project
from core.errors import InvalidRequest, ServiceError
from core.response_format import ResponseFormat, response_schema
from graders import complaints
from graders.hazards import table
from graders.hazards.pool import OWNER, HazardFailed, LimitExceeded, shared


async def refuse_unusable_schema(
    form: ResponseFormat | None, param: str, service: Service, project: Project
) -> None:
    """As `refuse_unusable_schemas`, for the schema of a response format, if there is one."""
    if form is not None:
        schema = (f"{param}.json_schema.schema", response_schema(form.json_schema.schema_))
        await refuse_unusable_schemas((schema,), service, project)


async def refuse_unusable_schemas(
    schemas: Sequence[tuple[str, str]], service: Service, project: Project
) -> None:
    """Reject schemas that do not compile within the limits of the hazard pool.

    Args:
        schemas: Each with its parameter, in the format of the samplers (core/response_format.py).

    Raises:
        InvalidRequest: one cannot be enforced.
        TooManyAtOnce: the project's queue for checks is full.
        ServiceError: the pool failed.
    """
    for param, schema in schemas:
        await in_turn(partial(_check, schema, param), service, project)


async def in_turn(check: Callable[[], None], service: Service, project: Project) -> None:
    """Run a check that waits for the hazard pool in a thread, within the project's concurrency limit.

    Raises:
        TooManyAtOnce: the project's queue for checks is full.
    """
    body_is_read()
    OWNER.set(project.id)  # the thread has a copy of this context
    await service.admission.checks.in_thread(project.id, check)


def _check(schema: str, param: str) -> None:
    try:
        why = shared().submit(table.SCHEMA, schema).result()
    except LimitExceeded as exceeded:
        why = f"the schema is too expensive to compile: {exceeded}"
    except HazardFailed as broken:
        raise ServiceError(f"The schema could not be checked: {broken}") from broken
    if why:
        mistake = complaints.invalid_value(param, f"{why}.")
        raise InvalidRequest(mistake.message, param=mistake.param, code=mistake.code)
