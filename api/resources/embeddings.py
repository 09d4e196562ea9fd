"""/v1/embeddings: answers which model is missing, as OpenAI's clients expect. No model of this service can embed."""

from typing import Any

from fastapi import APIRouter

from api.http.deps import CurrentCaller
from api.http.shapes import Body
from core.errors import NoEmbeddingModel

router = APIRouter(prefix="/embeddings", include_in_schema=False)


class EmbeddingCreate(Body, extra="ignore"):
    model: str
    input: Any = None


@router.post("")
async def create_embedding(body: EmbeddingCreate, caller: CurrentCaller) -> None:
    """Reject the request."""
    raise NoEmbeddingModel(body.model)
