"""/v1/regraft/jobs/{id}/episodes and /v1/regraft/episodes: the user's own agent plays the episodes of a job.

The agent leases an episode, points a client of OpenAI's API at its base URL, and completes it. The run of the job
answers (worker/rollout/agent_episodes.py); the API checks requests and forwards them.
"""

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import httpx
from anyio import to_thread
from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from api.http.deps import CurrentEpisode, CurrentProject, EpisodeAccess, ServiceDep
from api.http.json_responses import JSON, encode
from api.http.openapi import FOR_KEY_OF_EPISODE, refusals
from api.http.shapes import Body
from api.resources.chat import ANSWERS, TIMEOUT, ChatCreate
from core.asgi import END_OF_EVENTS, UNBUFFERED, sent_event, until_gone
from core.chat import Message, Text
from core.database.states import JOB
from core.database.tables import Job
from core.errors import EpisodeOver, EpisodeRefused, InvalidJobState, InvalidParameter, NotReady
from core.jobs import episode_servers, lifecycle
from core.jobs.episode_servers import EpisodeRun
from core.jobs.tools import is_played_by_agent
from core.outbound.http import trusted_client
from core.telemetry import tracing
from graders.types import MAX_SCORE, is_score

log = logging.getLogger(__name__)
router = APIRouter(prefix="/regraft", tags=["regraft"])

MAX_LEASES = 256
MAX_WAIT_S = 60.0
MAX_KEY = 255
MAX_WAITING = 64  # requests of one API process for episodes of a run
RETRY_AFTER = 2  # seconds
# Parameters that would change what is sampled, and that no value of has the same meaning as none.
_REFUSED = ("logit_bias", "stop", "logprobs", "top_logprobs")
_SAMPLING = ("temperature", "top_p", "seed", "max_tokens", "max_completion_tokens", "reasoning_effort")


class EpisodeRuns:
    """The connections of one API process to the runs of jobs. Belongs to one event loop.

    An answer takes minutes, and a step has hundreds of episodes: none waits for the connection of another.
    """

    def __init__(self, timeout: httpx.Timeout = TIMEOUT) -> None:
        self._timeout = timeout
        self._client: httpx.AsyncClient | None = None
        self._waiting: Counter[str] = Counter()  # requests for episodes, by the run's URL

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def lease(self, run: EpisodeRun, most: int, wait_s: float) -> Any:
        """Lease episodes, as `post`. At most MAX_WAITING requests wait at a run; others get what there is."""
        wait_s = wait_s if self._waiting[run.url] < MAX_WAITING else 0.0
        self._waiting[run.url] += 1
        try:
            return await self.post(run, "/lease", {"max": most, "wait_s": wait_s})
        finally:
            self._waiting[run.url] -= 1
            self._waiting += Counter()  # without those of runs that have ended

    async def post(self, run: EpisodeRun, path: str, body: Mapping[str, Any]) -> Any:
        """Send a request to a run, and return its answer.

        Raises:
            NotReady: the run does not answer.
            EpisodeRefused: the run refuses it.
        """
        if self._client is None:
            self._client = trusted_client()
        headers = {"authorization": f"Bearer {run.secret}", **tracing.outgoing()}
        try:
            answer = await self._client.post(
                f"{run.url}{path}", content=encode(body), headers=headers, timeout=self._timeout
            )
        except httpx.TransportError as cause:
            message = "The run of the job does not answer."
            if isinstance(cause, httpx.ConnectError | httpx.ConnectTimeout):
                message += (
                    " If this lasts, its worker is on another machine: REGRAFT_EPISODES_HOST is set there."
                )
            raise NotReady(message, retry_after=RETRY_AFTER) from cause
        if answer.status_code in (400, 409):
            error = answer.json()["error"]
            raise EpisodeRefused(
                answer.status_code, error["message"], param=error["param"], code=error["code"]
            )
        if answer.status_code == 503:
            raise NotReady("The run of the job has ended; try again.", retry_after=RETRY_AFTER)
        if answer.status_code != 200:
            log.error("the run at %s answered %s with the status %s", run.url, path, answer.status_code)
            message = "The run of the job cannot answer; the log of the service has its status."
            raise NotReady(message, retry_after=RETRY_AFTER)
        return answer.json()


async def _runs(request: Request) -> EpisodeRuns:
    runs: EpisodeRuns = request.app.state.runs
    return runs


JobRuns = Annotated[EpisodeRuns, Depends(_runs)]


class LeaseBody(Body):
    max: Annotated[int, Field(ge=1, le=MAX_LEASES)] = 1
    wait_s: Annotated[
        float, Field(ge=0, le=MAX_WAIT_S, description="How long to wait for an episode, if there is none.")
    ] = 0.0


class LeasedEpisode(BaseModel):
    id: str
    base_url: Annotated[str, Field(description="For a client of OpenAI's API.")]
    api_key: Annotated[str, Field(description="Good for this episode only, and for nothing else.")]
    trace_id: Annotated[str, Field(description="As in the rollout and for graders.")]
    split: Annotated[str, Field(description="`train` or `valid`.")]
    item: Annotated[dict[str, Any], Field(description="The row of the file.")]
    messages: Annotated[list[dict[str, Any]], Field(description="Of the row.")]
    tools: Annotated[list[dict[str, Any]], Field(description="Of the row.")]
    deadline: Annotated[int, Field(description="Unix time at which the lease ends.")]


class LeasedEpisodes(BaseModel):
    object: Literal["list"] = "list"
    data: list[LeasedEpisode]
    job_status: str


@router.post("/jobs/{job_id}/episodes/lease", responses=refusals(404, 503))
async def lease_episodes(
    request: Request,
    job_id: str,
    body: LeaseBody,
    project: CurrentProject,
    service: ServiceDep,
    runs: JobRuns,
) -> LeasedEpisodes:
    """Lease episodes of a job with the environment `client`, for an agent that plays them."""

    def find() -> tuple[Job, EpisodeRun | None]:
        with service.database.read() as session:
            job = lifecycle.get(session, project.id, job_id)
            return job, episode_servers.of_job(session, job)

    job, run = await to_thread.run_sync(find)
    if not is_played_by_agent(job.body):
        raise InvalidJobState(
            'The job has no environment {"type": "client"}, so no agent plays its episodes.'
        )
    if run is None or not run.url:
        return LeasedEpisodes(data=[], job_status=job.status)
    leased = await until_gone(request.receive, runs.lease(run, body.max, body.wait_s))
    data = [] if leased is None else leased["data"]
    return LeasedEpisodes(data=[_leased(request, run, one) for one in data], job_status=job.status)


def _leased(request: Request, run: EpisodeRun, leased: Mapping[str, Any]) -> LeasedEpisode:
    id = leased["id"]
    base_url = f"{request.base_url}v1/regraft/episodes/{id}/v1"
    return LeasedEpisode(base_url=base_url, api_key=episode_servers.key_of(run.secret, id), **leased)


def refuse_in_episode(parameters: Sequence[str]) -> None:
    """Raise InvalidParameter for the first of these parameters."""
    for name in parameters:
        message = f"Unsupported parameter: '{name}' is not supported in an episode; leave it out."
        raise InvalidParameter(message, param=name, code="unsupported_parameter")


class EpisodeChat(ChatCreate):
    """A request for an answer in an episode. Its own sampling parameters have no effect."""

    @model_validator(mode="after")
    def _can_be_trained(self) -> "EpisodeChat":
        """Refuse what would change the distribution that answers are drawn from."""
        refused = [name for name in _REFUSED if getattr(self, name) not in (None, False, [], {})]
        refused += ["n"] if self.answers > 1 else []
        refused += [name for name in ("frequency_penalty", "presence_penalty") if getattr(self, name)]
        refused += ["response_format"] if not isinstance(self.response_format, Text | None) else []
        refused += ["tool_choice"] if self.tool_choice not in (None, "auto") else []
        refuse_in_episode(refused)
        return self

    def to_run(self, key: str, *, is_retry: bool) -> dict[str, Any]:
        """The request as the run reads it: ChatRequest in worker/rollout/agent_episodes.py."""
        asked = {name: getattr(self, name) for name in _SAMPLING}
        return {
            "messages": [_message(message) for message in self.messages],
            "tools": [tool.model_dump(mode="json", exclude_none=True) for tool in self.tools or ()],
            "parallel": self.parallel_tool_calls is not False,
            "key": key,
            "is_retry": is_retry,
            "sampling": {name: value for name, value in asked.items() if value is not None},
        }


def _message(message: Message) -> dict[str, Any]:
    kept = message.model_dump(mode="json", exclude_none=True, exclude={"content", "refusal"})
    return kept | {"content": message.text}


def _count(text: Any) -> int:
    """The number of a header; 0: it has none."""
    return int(text) if str(text).isdecimal() else 0


# Not of those that the API remembers: the run replays its answer until the episode ends.
IdempotencyKey = Annotated[str, Header(alias="Idempotency-Key", max_length=MAX_KEY, include_in_schema=False)]
RetryCount = Annotated[
    int, BeforeValidator(_count), Header(alias="X-Stainless-Retry-Count", include_in_schema=False)
]


@router.post(
    "/episodes/{episode_id}/v1/chat/completions",
    responses=ANSWERS | refusals(409, 503),
    openapi_extra=FOR_KEY_OF_EPISODE,
)
async def answer_in_episode(
    request: Request,
    episode_id: str,
    body: EpisodeChat,
    episode: CurrentEpisode,
    runs: JobRuns,
    key: IdempotencyKey = "",
    retries: RetryCount = 0,
) -> Response:
    """Create a chat completion with the model that is trained. A repeated request gets the first answer."""
    asked = body.to_run(key, is_retry=retries > 0)
    answer = await until_gone(request.receive, to_run(runs, episode, "chat", asked))
    if answer is None:
        return Response(status_code=499)
    completion = answer | {"model": body.model}
    if not body.stream:
        return JSON(completion)
    with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return StreamingResponse(
        _events(completion, with_usage=with_usage), media_type="text/event-stream", headers=UNBUFFERED
    )


async def to_run(runs: EpisodeRuns, episode: EpisodeAccess, route: str, body: Mapping[str, Any]) -> Any:
    """The answer of the run to a request about an episode.

    Raises:
        EpisodeOver: the job has ended, or the step of the episode.
    """
    job = episode.job
    if job.status not in JOB.running:
        raise EpisodeOver(f"The job {job.id} is {job.status}, so its episodes are over.")
    if not episode.run.url:  # a step ends after all its episodes
        raise EpisodeOver(f"The step of the episode {episode.id} has ended.")
    return await runs.post(episode.run, f"/episodes/{episode.id}/{route}", body)


async def _events(completion: dict[str, Any], *, with_usage: bool) -> AsyncIterator[bytes]:
    """A chat completion as server-sent events."""
    for chunk in chunks_of(completion):
        if chunk["choices"] or with_usage:
            yield sent_event(encode(chunk))
    yield END_OF_EVENTS


def chunks_of(completion: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A chat completion, which is whole, as chunks: each field of the message is one, and the last has the usage."""
    [choice] = completion["choices"]
    frame = {name: completion[name] for name in ("id", "created", "model")}
    frame["object"] = "chat.completion.chunk"
    ends = [(delta, None) for delta in _deltas(choice["message"])] + [({}, choice["finish_reason"])]
    for delta, reason in ends:
        piece = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        yield frame | {"choices": [piece]}
    yield frame | {"choices": [], "usage": completion["usage"]}


def _deltas(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
    if message.get("tool_calls"):
        deltas.append(
            {"tool_calls": [{"index": number} | call for number, call in enumerate(message["tool_calls"])]}
        )
    return deltas


class EpisodeModel(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "regraft"


class EpisodeModels(BaseModel):
    object: Literal["list"] = "list"
    data: list[EpisodeModel]


@router.get("/episodes/{episode_id}/v1/models", openapi_extra=FOR_KEY_OF_EPISODE)
async def list_models_of_episode(episode_id: str, episode: CurrentEpisode) -> EpisodeModels:
    """List the model of the job, which answers under any name."""
    job = episode.job
    return EpisodeModels(data=[EpisodeModel(id=job.model, created=job.created_at)])


def _a_score(reward: float) -> float:
    if not is_score(reward):
        raise ValueError(f"must be a finite number of at most {MAX_SCORE:g}")
    return reward


class CompleteBody(Body):
    status: Literal["ready", "failed"] = "ready"
    reward: Annotated[
        Annotated[float, AfterValidator(_a_score)] | None,
        Field(description="In place of the grader's score. Null: the job's grader scores the episode."),
    ] = None

    @model_validator(mode="after")
    def _failed_has_none(self) -> "CompleteBody":
        if self.status == "failed" and self.reward is not None:
            raise ValueError("an episode that failed has no reward")
        return self


class CompletedEpisode(BaseModel):
    id: str
    status: Literal["ready", "failed"]
    completed_at: int


@router.post(
    "/episodes/{episode_id}/complete", responses=refusals(409, 503), openapi_extra=FOR_KEY_OF_EPISODE
)
async def complete_episode(
    episode_id: str, body: CompleteBody, episode: CurrentEpisode, runs: JobRuns
) -> CompletedEpisode:
    """End an episode: `ready` to be graded, or `failed` to be leased once more."""
    await to_run(runs, episode, "complete", body.model_dump())
    return CompletedEpisode(id=episode_id, status=body.status, completed_at=int(time.time()))
