"""/v1/regraft/checkpoints: download a checkpoint."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from api.http.deps import CurrentProject, ServiceDep
from api.http.openapi import refusals
from api.http.ranges import ByteRange, ranged_response, requested_part
from core.results import export
from core.results.passport import Issuer

router = APIRouter(prefix="/regraft/checkpoints", tags=["regraft"])


ARCHIVE: dict[int | str, dict[str, Any]] = {
    200: {"description": "An uncompressed tar.", "content": {"application/x-tar": {}}}
}


@router.get("/{checkpoint_id}/archive", response_class=StreamingResponse, responses=ARCHIVE | refusals(416))
async def download_checkpoint(
    checkpoint_id: str, request: Request, project: CurrentProject, service: ServiceDep
) -> StreamingResponse:
    """Download the adapter in PEFT format with its tokenizer, model card, reproduce.json and passport, as a tar.

    `Range` requests a part of it, and `If-Range` with the `etag` of an earlier answer the whole of an archive that
    changed since, as its model card does with the name of the model. Of the store, a part reads the files that it has
    some bytes of.
    """
    asked = request.headers

    def gather() -> tuple[export.TakeHome, ByteRange | None, Sequence[export.StoredFile]]:
        with service.database.read() as session:
            checkpoint = export.of_project(session, project.id, checkpoint_id)
        issuer = Issuer.of(service.settings)
        home = export.gather(service.database, service.blobs, service.registry, checkpoint, issuer)
        part = requested_part(
            asked.get("range"), home.tar_bytes, if_range=asked.get("if-range"), etag=f'"{home.sha256}"'
        )
        files = home.files if part is None else home.files_in(part.start, part.end)
        export.check(files, service.blobs, checkpoint_id)
        return home, part, files

    # It reads whole files, and no project may take all threads with that.
    home, part, files = await service.admission.file_reads.in_thread(project.id, gather)
    return ranged_response(
        home.tar(service.blobs, files),
        part,
        size=home.tar_bytes,
        etag=f'"{home.sha256}"',
        media_type="application/x-tar",
        disposition=f'attachment; filename="{home.folder}.tar"',
    )
