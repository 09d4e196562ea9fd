"""The sampler of a job whose episodes the user's own agent plays."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from graders.tools.protocol import ToolsFail
from worker.rollout.agent_episodes import Board, Game, Rendering
from worker.rollout.episodes import EpisodeLimits, ReadCalls, trace_of
from worker.sampling import Answer, Sampling, TurnSampler
from worker.types import Prompt, Rollout

WAIT_S = 5.0  # between two looks at whether the job is still wanted


@dataclass(frozen=True)
class AgentRules:
    """The rules of a job's episodes, which follow from the job and its model."""

    job: str  # its id
    read_calls: ReadCalls
    rendering: Rendering
    limits: EpisodeLimits  # `seconds`: of a lease
    tools_problem: str = ""  # as in Game


@dataclass(frozen=True)
class AgentLink:
    """The connection between the run and the agent."""

    serve: Callable[[Board], AbstractAsyncContextManager[None]]  # the board to the agent, in the context
    new_id: Callable[[], str]  # of a lease
    # Called while episodes are played; gets whether no agent plays. Raises PausedWhileWaiting.
    waiting: Callable[[bool], Awaitable[None]]
    on_ignored: Callable[[Mapping[str, Any]], Awaitable[None]]  # as in Game, of the first one only


class AgentSampler:
    """Implements worker.sampling.Sampler: each answer is an episode."""

    def __init__(
        self, sampler: TurnSampler, rules: AgentRules, link: AgentLink, wait_s: float = WAIT_S
    ) -> None:
        self._sampler, self._rules, self._link, self._wait_s = sampler, rules, link, wait_s
        self._has_reported = False

    async def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
        """Yield the episodes as they end.

        Raises:
            ToolsFail: most of these episodes were discarded.
            PausedWhileWaiting: no agent plays, and the user has paused the job.
        """
        rules, link = self._rules, self._link
        async with self._sampler.turns(sampling) as calls:
            game = Game(
                calls,
                sampling,
                rules.read_calls,
                rules.rendering,
                rules.limits,
                rules.tools_problem,
                self._report_once,
            )
            board = Board(game, link.new_id, rules.limits.seconds)
            async with link.serve(board):
                places = {
                    asyncio.create_task(
                        board.play(prompt, member, trace_of(rules.job, sampling.batch, prompt, member))
                    ): (number, member)
                    for number, prompt in enumerate(prompts_P)
                    for member in range(sampling.group_size)
                }
                try:
                    async for answer in self._answers(board, places):
                        yield answer
                finally:
                    for task in places:
                        task.cancel()
                    await asyncio.gather(*places, return_exceptions=True)

    async def _report_once(self, ignored: Mapping[str, Any]) -> None:
        if not self._has_reported:
            self._has_reported = True
            await self._link.on_ignored(ignored)

    async def _answers(
        self, board: Board, places: "Mapping[asyncio.Task[Rollout], tuple[int, int]]"
    ) -> AsyncIterator[Answer]:
        failures: list[str] = []
        playing = set(places)
        while playing:
            ended, playing = await asyncio.wait(
                playing, timeout=self._wait_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in sorted(ended, key=lambda one: places[one]):
                rollout = task.result()
                if rollout.is_discarded and rollout.episode is not None:
                    failures.append(rollout.episode.problem)
                yield Answer(*places[task], rollout)
            if not ended:
                await self._link.waiting(board.is_idle)
        if 2 * len(failures) > len(places):
            raise ToolsFail.of_agent(len(places), failures)
