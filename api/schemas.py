"""Checks of schemas and patterns: the hazard pool compiles what a user wrote, and a thread waits for it."""

from collections.abc import Callable
from functools import partial

from api.deps import Service
from api.large_bodies import body_is_read
from core.errors import InvalidRequest, ServiceError
from core.models import Project
from core.response_format import ResponseFormat, held_to
from graders import complaints
from graders.hazards import table
from graders.hazards.pool import OWNER, HazardFailed, LimitExceeded, shared


async def refuse_unusable_schema(
    form: ResponseFormat | None, param: str, service: Service, project: Project
) -> None:
    """Refuse a schema that does not compile, or not within the limits of the hazard pool.

    Raises:
        InvalidRequest: answers cannot be held to it.
        TooManyAtOnce: as many checks of this project as may wait do so already.
        ServiceError: the pool broke.
    """
    if form is not None:
        await in_turn(partial(_check, form, param), service, project)


async def in_turn(check: Callable[[], None], service: Service, project: Project) -> None:
    """Run a check that waits for the hazard pool, in a thread, when it is the project's turn.

    Raises:
        TooManyAtOnce: as many checks of this project as may wait do so already.
    """
    body_is_read()
    OWNER.set(project.id)  # the thread has a copy of this context
    await service.admission.checks.in_thread(project.id, check)


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
