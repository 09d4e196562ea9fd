"""Play the episodes of a training job with your own agent.

    import regraft

    def play(episode: regraft.agents.Episode) -> float | None:
        client = episode.openai()           # OpenAI's client, which talks to the model that is trained
        answer = client.chat.completions.create(model="policy", messages=episode.messages)
        return 1.0 if answer.choices[0].message.content == episode.item["answer"] else 0.0

    regraft.agents.run("ftjob-...", play)

The job has `"environment": {"type": "client"}`. Any program that takes a base URL and a key can be the agent.
"""

import asyncio
import inspect
import logging
import math
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import openai
from openai import AsyncOpenAI, BaseModel, OpenAI

from regraft._rules.states import JOB
from regraft.resources.waiting import is_temporary
from regraft.routes import route
from regraft.sync.client import Regraft

log = logging.getLogger(__name__)

MAX_LEASES = 256  # of one request, which the server allows
WAIT_S = 10.0  # of one request for episodes
PAUSE_S = 1.0  # after a request that found none, as while the job learns
PATIENCE_S = 600.0  # with a server that does not answer


@dataclass(frozen=True)
class Episode:
    """An episode to play: the row, and where the model answers."""

    id: str
    base_url: str
    api_key: str = field(repr=False)  # good for this episode only
    item: dict[str, Any]  # the row of the file
    messages: list[dict[str, Any]]  # of the row
    tools: list[dict[str, Any]]  # of the row
    split: str  # train or valid
    trace_id: str  # as in the rollout
    deadline: int  # Unix time

    def openai(self, **options: Any) -> OpenAI:
        """OpenAI's client for this episode, with these options."""
        return OpenAI(base_url=self.base_url, api_key=self.api_key, **options)

    def async_openai(self, **options: Any) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, **options)


Agent = Callable[[Episode], float | Awaitable[float | None] | None]
"""Plays an episode. Returns its reward; None: the job's grader scores it.

An error gives the episode back, once; after a limit, such as max_episode_steps, the grader scores what was sampled.
"""


@dataclass(frozen=True)
class Played:
    """What an agent has done until its job ended."""

    ready: int
    failed: int
    job_status: str


class _Leased(BaseModel):
    id: str
    api_key: str
    item: dict[str, Any]
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    split: str
    trace_id: str
    deadline: int


class _Leases(BaseModel):
    data: list[_Leased]
    job_status: str


def run(
    job: str,
    function: Agent,
    concurrency: int = 32,
    *,
    client: Regraft | None = None,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Played:
    """Play the episodes of a job until it has ended or is paused.

    Args:
        job: its id.
        function: plays one episode; a coroutine function gets its own event loop. It is called in several threads
            at once.
        concurrency: episodes at once.

    Raises:
        openai.APIError: the job has no agents, or the server has not answered for ten minutes.
    """
    player = _Player(client or Regraft(), job, function, concurrency, pause, clock)
    return player.play()


class _Player:
    def __init__(
        self,
        client: Regraft,
        job: str,
        function: Agent,
        concurrency: int,
        pause: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self._client, self._job, self._function = client, job, function
        self._concurrency, self._pause, self._clock = concurrency, pause, clock
        self._failing_since: float | None = None

    def play(self) -> Played:
        playing: set[Future[bool]] = set()
        results: list[bool] = []
        with ThreadPoolExecutor(self._concurrency, "episode") as threads:
            while True:
                if len(playing) == self._concurrency:
                    wait(playing, return_when=FIRST_COMPLETED)
                ended = {one for one in playing if one.done()}
                playing -= ended
                results += [one.result() for one in ended]
                leases = self._lease(self._concurrency - len(playing))
                if leases is not None and leases.job_status in JOB.stopped:
                    break
                if leases is None or not leases.data:
                    self._pause(PAUSE_S)
                    continue
                playing |= {threads.submit(self._play, self._episode(one)) for one in leases.data}
        results += [one.result() for one in playing]
        return Played(sum(results), len(results) - sum(results), leases.job_status)

    def _lease(self, most: int) -> _Leases | None:
        """Lease episodes; None: the server is not there."""
        try:
            leases = self._client.post(
                route("/regraft/jobs", self._job, "episodes", "lease"),
                body={"max": min(most, MAX_LEASES), "wait_s": WAIT_S},
                cast_to=_Leases,
            )
        except openai.APIError as error:
            if not is_temporary(error):
                raise
            now = self._clock()
            self._failing_since = now if self._failing_since is None else self._failing_since
            if now - self._failing_since > PATIENCE_S:
                raise
            return None
        self._failing_since = None
        return leases

    def _episode(self, leased: _Leased) -> Episode:
        base_url = f"{self._client.base_url}regraft/episodes/{leased.id}/v1"
        names = ("id", "api_key", "item", "messages", "tools", "split", "trace_id", "deadline")
        return Episode(base_url=base_url, **{name: getattr(leased, name) for name in names})

    def _play(self, episode: Episode) -> bool:
        """Play and complete an episode. Returns whether the agent did not fail."""
        try:
            body = {"status": "ready", "reward": reward_of(self._function, episode)}
        except Exception:
            log.warning("the agent failed in the episode %s", episode.id, exc_info=True)
            self._complete(episode, {"status": "failed"})
            return False
        except BaseException:  # the program ends
            self._complete(episode, {"status": "failed"})
            raise
        if self._complete(episode, body):
            return True
        self._complete(episode, {"status": "failed"})
        return False

    def _complete(self, episode: Episode, body: dict[str, Any]) -> bool:
        """Complete an episode. Returns whether the server does not refuse it."""
        headers = {"Authorization": f"Bearer {episode.api_key}"}
        try:
            self._client.post(
                route("/regraft/episodes", episode.id, "complete"),
                body=body,
                cast_to=object,
                options={"headers": headers},
            )
        except openai.ConflictError:  # it is over: its deadline has passed, or its step or the job has ended
            return True
        except openai.APIError as error:
            log.warning("the episode %s is not completed: %s", episode.id, error)
            return is_temporary(error)
        return True


def reward_of(function: Agent, episode: Episode) -> float | None:
    """The reward of an episode that the function plays now. Raises what it raises, and as `_number`."""
    reward = function(episode)
    if inspect.isawaitable(reward):
        reward = asyncio.run(_awaited(reward))
    return _number(reward)


def _number(reward: float | None) -> float | None:
    """A reward that JSON has. Raises ValueError or TypeError: it is no finite number."""
    if reward is None:
        return None
    number = float(reward)
    if not math.isfinite(number):
        raise ValueError(f"the reward {number} is not finite")
    return number


async def _awaited(reward: Awaitable[float | None]) -> float | None:
    return await reward
