"""References to stored graders in requests: {"type": "stored", "name": "close"} in place of a specification."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from anyio import to_thread
from fastapi import Request
from pydantic import Field, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from api.http.deps import CurrentCaller, Service, ServiceDep
from api.http.validation_errors import explain
from core import stored_graders
from core.database.tables import GraderVersion
from core.errors import GraderNotFound, InvalidRequest
from core.strict import StrictModel

TYPE = "stored"
EVERY = "*"  # in a path: each entry of a list
MAX_REFERENCES = 200  # of a request; no list of graders may be longer
# Of the specifications in place of references, counted as often as they occur: a reference has a few bytes, and what it
# stands for is stored with the job, eval or pipeline. As much as the body of a request may have.
MAX_RESOLVED_BYTES = 2 << 20

StoredName = Annotated[str, Field(pattern=stored_graders.NAME)]
Version = Annotated[
    str, Field(pattern=stored_graders.VERSION, description="A hash, or at least its first 8 characters.")
]


class StoredReference(StrictModel):
    """A stored grader of the project. Without a version it is the one that was saved last."""

    type: Literal["stored"]
    name: StoredName
    version: Version | None = None


class OrStored:
    """Documents that a reference may be sent in place of a specification."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [handler(schema), handler(StoredReference.__pydantic_core_schema__)]}


class ResolvedReference(NamedTuple):
    """A reference that was resolved, and the specification that it stands for."""

    name: str
    version: str
    grader: dict[str, Any]

    @classmethod
    def of(cls, sent: Any) -> "ResolvedReference | None":
        """The reference as `ResolvesGraders` leaves it with `keep`; None: a specification, or a mistake."""
        if isinstance(sent, Mapping) and sent.get("type") == TYPE and "grader" in sent:
            return cls(sent["name"], sent["version"], sent["grader"])
        return None

    def reference(self) -> dict[str, str]:
        return {"name": self.name, "version": self.version}


class ResolvesGraders:
    """A dependency that replaces the references in a request by the specifications of the stored versions.

    It changes the parsed body, which the request keeps and FastAPI validates after the dependencies: so the types of
    all requests know specifications only.

    Args:
        paths: Where the request may have graders, such as ("testing_criteria", EVERY).
        keep: Leave the reference there, with its full version and the specification, as a ResolvedReference.
    """

    def __init__(self, *paths: tuple[str, ...], keep: bool = False) -> None:
        self.paths, self.keep = paths, keep

    async def __call__(self, request: Request, caller: CurrentCaller, service: ServiceDep) -> None:
        # Whatever the body looks like: JSON may have escapes and other encodings, and a reference that is not resolved
        # here could name any version beside any specification.
        try:
            sent = await request.json()
        except (ValueError, RecursionError):  # not JSON, so the endpoint is not called
            return
        places = [place for path in self.paths for place in _places(sent, path, ())]
        if places:
            await to_thread.run_sync(self._resolve, sent, places, caller.project.id, service)

    def _resolve(self, sent: Any, places: "list[_Place]", project_id: str, service: Service) -> None:
        if len(places) > MAX_REFERENCES:
            raise InvalidRequest(
                f"The request has {len(places):,} references to stored graders, and at most {MAX_REFERENCES} are "
                "supported.",
                param=_dotted(places[MAX_REFERENCES].way),
            )
        size = 0
        rows: dict[tuple[str, str | None], GraderVersion] = {}
        with service.database.read() as session:
            for place in places:
                asked = _parsed(sent, place)
                wanted = asked.name, asked.version
                try:
                    if wanted not in rows:
                        grader = stored_graders.get(session, project_id, asked.name)
                        rows[wanted] = stored_graders.version(session, grader, asked.version)
                except GraderNotFound as missing:
                    missing.param = f"{_dotted(place.way)}.name"
                    raise
                row = rows[wanted]
                size += row.bytes
                if size > MAX_RESOLVED_BYTES:
                    raise InvalidRequest(
                        f"The stored graders of this request have more than {MAX_RESOLVED_BYTES:,} bytes together, "
                        "which no request may have: refer to fewer of them.",
                        param=_dotted(place.way),
                    )
                found = {"type": TYPE, "name": asked.name, "version": row.version, "grader": row.spec}
                place.holder[place.key] = found if self.keep else row.spec


class _Place(NamedTuple):
    """A reference in a parsed request: holder[key], and the keys from the top to it."""

    holder: Any
    key: Any
    way: tuple[str | int, ...]


def _places(holder: Any, path: tuple[str, ...], way: tuple[str | int, ...]) -> Iterator[_Place]:
    first, *rest = path
    if first == EVERY:
        entries: list[tuple[str | int, Any]] = list(enumerate(holder)) if isinstance(holder, list) else []
    else:
        entries = [(first, holder[first])] if isinstance(holder, dict) and first in holder else []
    for key, value in entries:
        if rest:
            yield from _places(value, tuple(rest), (*way, key))
        elif isinstance(value, dict) and value.get("type") == TYPE:
            yield _Place(holder, key, (*way, key))


def _parsed(sent: Any, place: _Place) -> StoredReference:
    try:
        return StoredReference.model_validate(place.holder[place.key])
    except ValidationError as invalid:
        raise explain(
            [one | {"loc": ("body", *place.way, *one["loc"])} for one in invalid.errors()], sent
        ) from None


def _dotted(way: tuple[str | int, ...]) -> str:
    first, *rest = way
    return f"{first}" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in rest)
