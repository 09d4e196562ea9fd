"""/v1/regraft/checkpoints: download a checkpoint."""

from typing import Any

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from api.http.deps import CurrentProject, ServiceDep
from core.results import export

router = APIRouter(prefix="/regraft/checkpoints", tags=["regraft"])


ARCHIVE: dict[int | str, dict[str, Any]] = {
    200: {"description": "An uncompressed tar.", "content": {"application/x-tar": {}}}
}


@router.get("/{checkpoint_id}/archive", response_class=StreamingResponse, responses=ARCHIVE)
async def download_checkpoint(
    checkpoint_id: str, project: CurrentProject, service: ServiceDep
) -> StreamingResponse:
    """Download the adapter in PEFT format, its tokenizer, a model card and reproduce.json, as an uncompressed tar."""

    def gather() -> export.TakeHome:
        with service.database.read() as session:
            checkpoint = export.of_project(session, project.id, checkpoint_id)
        home = export.gather(service.database, service.blobs, service.registry, checkpoint)
        export.check(home, service.blobs, checkpoint_id)
        return home

    # It reads the whole checkpoint, and no project may take all threads with that.
    home = await service.admission.file_reads.in_thread(project.id, gather)
    chunks = home.tar(service.blobs)
    headers = {
        "content-length": str(home.tar_bytes),
        "content-disposition": f'attachment; filename="{home.folder}.tar"',
    }
    return StreamingResponse(chunks, media_type="application/x-tar", headers=headers)
