"""/v1/regraft/files/{id}/profile: lengths, duplicates, overlap and fields of a dataset, before a job reads it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from api.http.deps import ReadProject, Service, ServiceDep
from api.http.openapi import FOR_ANY_KEY, refusals
from api.http.shapes import Body
from api.resources.estimates import in_reader
from api.resources.files import refuse_missing
from api.resources.graders import TAKES_GRADER, Grader
from core import chat_templates
from core.asgi import until_gone
from core.database.tables import File, Project
from core.errors import ContentDamaged
from core.jobs import estimates
from core.jobs.hyperparameters import Hyperparameters
from core.model_templates import files_of, is_reasoning
from core.prompt_tokens import CannotCount, TokenCounter
from core.registry import BaseModelEntry
from core.results import lineage
from core.storage import files, foreign_files, profiles
from core.storage.profiles import (
    Duplicates,
    GraderReads,
    Lengths,
    Method,
    Overlap,
    ProfiledField,
    Reader,
    RowProblem,
    TokenLengths,
    TokenRoom,
)
from core.storage.store import BlobNotFound
from graders.build import for_row, item_paths, missing_item_paths, reads_more, unusable_references
from graders.doubts import row_doubts
from graders.spec import GraderSpec, SelectSpec
from graders.template import dotted

router = APIRouter(prefix="/regraft/files/{file_id}", tags=["regraft"])

NO_MODEL = "no model is given"
NOT_HERE = "the tokenizer or the chat template of the model is not on this machine"


class ProfileCreate(Body):
    """The use of the rows. Every field may be left out."""

    method: Annotated[
        Method | None, Field(description="Whose rows the file has; null: by the format of its first row.")
    ] = None
    model: Annotated[
        str | None, Field(description="Counts tokens with the tokenizer and chat template of this model.")
    ] = None
    chat_template: Annotated[
        Literal["auto"] | chat_templates.Name, Field(description="As in the hyperparameters of a job.")
    ] = "auto"
    max_completion_tokens: Annotated[
        int | None,
        Field(
            ge=1,
            description="Room for an answer of a reinforcement job beside its prompt; null: that of 'auto'.",
        ),
    ] = None
    validation_file: str | None = None
    grader: Grader | None = None


class ProfileOut(BaseModel):
    """The profile of a file. core/storage/profiles.py documents each number."""

    object: Literal["regraft.file_profile"] = "regraft.file_profile"
    file_id: str
    model: str | None
    method: Method
    rows: Annotated[int, Field(description="Valid rows.")]
    is_whole: Annotated[bool, Field(description="False: only the first million rows were read.")]
    invalid: Annotated[int, Field(description="Lines with problems, which a job would reject.")]
    problems: Annotated[list[RowProblem], Field(description="The first 20 different ones.")]
    foreign_format: Annotated[
        str | None,
        Field(
            description="Names the format of a file that no job reads, and says what to do; null: it has none."
        ),
    ] = None
    characters: Annotated[Lengths | None, Field(description="Of the text of a prompt.")]
    tokens: TokenLengths | None
    tokens_reason: Annotated[str | None, Field(description="The reason if tokens are not counted.")]
    duplicates: Duplicates
    overlap: Overlap | None
    fields: list[ProfiledField]
    grader: GraderReads | None


@router.post(
    "/profile",
    response_model=ProfileOut,
    responses=refusals(410, 503),
    openapi_extra=FOR_ANY_KEY,
    dependencies=TAKES_GRADER,
)
async def profile_file(
    request: Request, file_id: str, body: ProfileCreate, project: ReadProject, service: ServiceDep
) -> ProfileOut | Response:
    """Read a dataset once and report lengths, duplicates, overlap and fields. Nothing is created.

    At most a million rows are read. Tokens of at most 50,000 rows are counted: of a larger file, of a uniform sample.
    """
    work = in_reader(service, project, partial(_profile, file_id, body, project, service))
    made = await until_gone(request.receive, work)
    return Response(status_code=499) if made is None else made


def _profile(file_id: str, body: ProfileCreate, project: Project, service: Service) -> ProfileOut:
    """Read the files and build the profile. Runs in a thread, because it reads the database and the store."""
    with service.database.read() as session:
        file = files.get(session, project.id, file_id)
        validation = None
        if body.validation_file is not None:
            validation = files.get_dataset(session, project.id, body.validation_file, param="validation_file")
        base, parent = None, None
        if body.model is not None:
            base, parent = lineage.start_of(
                session, project.id, body.model, service.registry, reward_model=True
            )
    with ExitStack() as stack:
        content = partial(_content, service, project)
        method = body.method or profiles.detect(stack.enter_context(content(file)))
        room: TokenRoom | None = None
        reason: str | None = NO_MODEL
        if base is not None:
            inherited = None if parent is None else parent.settings["chat_template"]
            template = body.chat_template if body.chat_template != "auto" else (inherited or "auto")
            entry = service.registry.get(base)
            room, reason = _room(entry, template, method, body.max_completion_tokens, service)
        if room is not None:
            stack.enter_context(room.counter)
        other = None if validation is None else (validation.id, stack.enter_context(content(validation)))
        made = profiles.profile(
            stack.enter_context(content(file)),
            method=method,
            room=room,
            tokens_reason=reason,
            reader=None if body.grader is None else _reader(body.grader),
            validation=other,
        )
        foreign = (
            foreign_files.detect(stack.enter_context(content(file)), file.filename) if made.invalid else None
        )
    sentence = None if foreign is None else foreign.sentence(body.method)
    return ProfileOut(file_id=file.id, model=body.model, foreign_format=sentence, **vars(made))


def _room(
    entry: BaseModelEntry, template: str, method: Method, max_completion_tokens: int | None, service: Service
) -> tuple[TokenRoom | None, str | None]:
    """How to count tokens, or the reason why they cannot be counted."""
    cache = service.settings.model_cache
    found = files_of(entry, cache, template)
    if found is None:
        return None, NOT_HERE
    tokens = entry.context
    if method == "reinforcement":
        reasons = is_reasoning(entry, cache, template)
        settings = estimates.sizes(Hyperparameters(), rows=1, context=entry.context, reasons=reasons)
        tokens -= max_completion_tokens or settings.max_completion_tokens
    try:
        return TokenRoom(TokenCounter(found), tokens), None
    except CannotCount as cause:
        return None, str(cause)


@contextmanager
def _content(service: Service, project: Project, file: File) -> Iterator[Iterator[bytes]]:
    """The content of a file. Damage and absence are errors as of a download."""
    try:
        yield files.read_content(service.blobs, file)
    except BlobNotFound:
        raise refuse_missing(service, project, file.id) from None
    except files.FileDamaged as damage:
        raise ContentDamaged(str(damage)) from None


def _reader(spec: GraderSpec) -> Reader:
    def missing(row: dict[str, Any]) -> list[str]:
        return missing_item_paths(spec, row)

    def chooses(row: dict[str, Any]) -> bool:
        return for_row(spec, row) is not None

    return Reader(
        paths=[dotted("item", path) for path in item_paths(spec)],
        missing=missing,
        lacks_word=lambda row: bool(unusable_references(spec, row)),
        doubts=partial(row_doubts, spec),
        not_listed=reads_more(spec),
        chooses=chooses if isinstance(spec, SelectSpec) else None,
    )
