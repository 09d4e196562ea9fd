"""Passports: signed statements about tuned models, and the public key that verifies them."""

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from api.http.deps import CurrentProject, ServiceDep
from api.http.openapi import refusals
from api.resources.estimates import in_reader
from core.errors import CheckpointNotFound, NoPassportKey
from core.jobs import lifecycle
from core.passports import FILE
from core.results import export
from core.results.passport import Issuer, signer_of

router = APIRouter(prefix="/regraft", tags=["regraft"])


class PassportOut(BaseModel):
    """`signature` is of the canonical JSON of `statement`, as `regraft verify` computes it."""

    statement: Annotated[
        dict[str, Any], Field(description="The facts about the model (docs/howto/passports.md).")
    ]
    public_key: Annotated[str, Field(description="Ed25519, 32 bytes in base64.")]
    signature: Annotated[str, Field(description="64 bytes in base64.")]


class PassportKeyOut(BaseModel):
    """The public key of the deployment."""

    object: Literal["regraft.passport_key"] = "regraft.passport_key"
    algorithm: Literal["ed25519"] = "ed25519"
    public_key: Annotated[str, Field(description="32 bytes in base64.")]
    fingerprint: Annotated[str, Field(description="SHA-256 of these bytes, for `regraft verify --key`.")]


@router.get("/jobs/{job_id}/passport")
async def retrieve_passport(
    job_id: str,
    project: CurrentProject,
    service: ServiceDep,
    checkpoint_id: Annotated[
        str | None,
        Query(pattern=r"^[^\x00]*$", description="Default: the checkpoint that the job delivered."),
    ] = None,
) -> PassportOut:
    """Return the signed statement about a job's model: the same as in its archive."""

    def signed() -> PassportOut:
        issuer = Issuer.of(service.settings)
        with service.database.read() as session:
            job = lifecycle.get(session, project.id, job_id)
            if checkpoint_id is None:
                checkpoint = export.delivered(session, job)
            else:
                checkpoint = export.of_project(session, project.id, checkpoint_id)
                if checkpoint.job_id != job.id:
                    raise CheckpointNotFound(checkpoint_id)
        if issuer is None:
            raise NoPassportKey()
        home = export.gather(service.database, service.blobs, service.registry, checkpoint, issuer)
        return PassportOut(**json.loads(home.texts[FILE]))

    return await in_reader(service, project, signed)


@router.get("/passport_key", responses=refusals(404))
def retrieve_passport_key(project: CurrentProject, service: ServiceDep) -> PassportKeyOut:
    """Return the public key that verifies the passports of this deployment."""
    signer = signer_of(service.settings)
    if signer is None:
        raise NoPassportKey()
    return PassportKeyOut(public_key=signer.public_key, fingerprint=signer.fingerprint)
