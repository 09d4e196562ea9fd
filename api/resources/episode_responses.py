"""/v1/regraft/episodes/{id}/v1/responses: answers in an episode, in the shapes of OpenAI's Responses API.

A request is converted to a chat completion of the episode (api/resources/episodes.py), which has the same tokens.
"""

from collections.abc import AsyncIterator
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import model_validator

from api.http.deps import CurrentEpisode
from api.http.json_responses import JSON
from api.http.openapi import FOR_KEY_OF_EPISODE, refusals
from api.resources.episodes import (
    EpisodeChat,
    IdempotencyKey,
    JobRuns,
    RetryCount,
    chunks_of,
    refuse_in_episode,
    to_run,
)
from api.resources.responses import (
    ANSWERS,
    LOGPROBS,
    ResponseCreate,
    ResponseInProgress,
    events,
    response_of,
)
from core.asgi import UNBUFFERED, until_gone
from core.chat import Text

router = APIRouter(prefix="/regraft/episodes", tags=["regraft"])


class EpisodeResponse(ResponseCreate):
    """A request for an answer in an episode. Its own sampling parameters have no effect."""

    @model_validator(mode="after")
    def _can_be_trained(self) -> "EpisodeResponse":
        """Refuse what a chat completion of the episode refuses, by its name in this API."""
        refused = {
            "tool_choice": self.tool_choice not in (None, "auto"),
            "text.format": self.text is not None and not isinstance(self.text.format, Text | None),
            "top_logprobs": bool(self.top_logprobs),
            "include": LOGPROBS in (self.include or ()),
        }
        refuse_in_episode([name for name, is_refused in refused.items() if is_refused])
        return self

    def to_run(self, key: str, *, is_retry: bool) -> dict[str, Any]:
        """The request as the run reads it."""
        return EpisodeChat.model_validate(self.chat_parameters()).to_run(key, is_retry=is_retry)


@router.post(
    "/{episode_id}/v1/responses",
    responses=ANSWERS | refusals(409, 503),
    openapi_extra=FOR_KEY_OF_EPISODE,
)
async def respond_in_episode(
    request: Request,
    episode_id: str,
    body: EpisodeResponse,
    episode: CurrentEpisode,
    runs: JobRuns,
    key: IdempotencyKey = "",
    retries: RetryCount = 0,
) -> Response:
    """Create a response with the model that is trained. A repeated request gets the first answer."""
    asked = await to_thread.run_sync(lambda: body.to_run(key, is_retry=retries > 0))
    completion = await until_gone(request.receive, to_run(runs, episode, "chat", asked))
    if completion is None:
        return Response(status_code=499)
    id, created = completion["id"].removeprefix("chatcmpl-"), completion["created"]
    answer = ResponseInProgress(body, body.model, id, created)
    if not body.stream:
        return JSON(response_of(answer, completion))
    return StreamingResponse(
        events(answer, _streamed(completion | {"model": body.model})),
        media_type="text/event-stream",
        headers=UNBUFFERED,
    )


async def _streamed(completion: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    for chunk in chunks_of(completion):
        yield chunk
