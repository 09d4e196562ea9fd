"""The sampler of a job with tools, or with the user's own agent: its answers are episodes."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any

from sqlalchemy.orm import Session

from core.jobs import episode_servers, lifecycle
from core.jobs import tools as job_tools
from core.jobs.params import TOOLS_PARAM
from core.model_templates import tools_problem
from core.tool_parsers import tool_parser_of
from graders.build import NotConfigured
from graders.endpoint import url_problem
from graders.sandbox.pool import refusal
from graders.tools.kinds import ToolServices, ToolSet
from worker.backends import open_backends
from worker.heartbeat import HeartbeatTools
from worker.model.policy import Policy
from worker.model.suffixes import TemplateConversations, TemplateSuffixes
from worker.model.tool_calls import CallReader
from worker.prepare.task import PromptTask
from worker.prepare.training_plan import TrainingPlan
from worker.recording.recorder import JobRecorder
from worker.refusals import PausedWhileWaiting
from worker.rollout.agent_episodes import Board
from worker.rollout.agent_sampler import AgentLink, AgentRules, AgentSampler
from worker.rollout.episode_server import listener, served, url_of
from worker.rollout.episodes import EpisodeSampler
from worker.sampling import Sampler, TurnSampler
from worker.types import Rollout


def sampler_of_episodes(
    plan: TrainingPlan, task: PromptTask, policy: Policy, sampler: TurnSampler, recorder: JobRecorder
) -> Sampler:
    """Sample episodes with the sampler: as `sampler_of_tools`, or by the user's agent."""
    if job_tools.is_played_by_agent(plan.job.body):
        return sampler_of_agent(plan, task, policy, sampler, recorder)
    return sampler_of_tools(plan, task, policy, sampler)


def sampler_of_tools(plan: TrainingPlan, task: PromptTask, policy: Policy, sampler: TurnSampler) -> Sampler:
    """Sample episodes whose tools are executed.

    Raises:
        NoSuffix: the chat template does not continue behind an answer.
        NotConfigured: this machine does not call a tool's server. Its graders file may be older than the API's.
    """
    assert task.episodes is not None, "the job has tools"
    assert task.tool_parser is not None, "its rows have tools"
    backends = open_backends(plan.settings)
    rows = plan.job.body["tools"]
    for number, row in enumerate(rows):
        url = row.get("server_url")
        if url is not None and (problem := url_problem(url, backends.endpoints, "Tools")):
            raise NotConfigured(problem, f"{TOOLS_PARAM}[{number}].server_url", "invalid_value")
        if url is None and (problem := refusal()):
            raise NotConfigured(problem, f"{TOOLS_PARAM}[{number}].type", "invalid_value")
    tools = ToolSet.of(rows, ToolServices(backends.endpoints, backends.environments, plan.job.project_id))
    return EpisodeSampler(
        sampler,
        HeartbeatTools(tools, plan.beat),
        CallReader.of(task.tool_parser, policy.tokenizer).parsed,
        TemplateSuffixes.of(policy.tokenizer, policy.stop_ids),
        task.episodes,
        plan.job.id,
    )


def sampler_of_agent(
    plan: TrainingPlan, task: PromptTask, policy: Policy, sampler: TurnSampler, recorder: JobRecorder
) -> Sampler:
    """Sample episodes that the user's agent plays, through the API."""
    assert task.episodes is not None, "the job has episodes"
    job, entry, template = plan.job, plan.base.entry, policy.tokenizer.chat_template
    parser = tool_parser_of(entry.tool_parser, template)
    problem = tools_problem(job.model, entry.tool_parser, template)
    rules = AgentRules(
        job.id,
        _as_it_is
        if problem is not None or parser is None
        else CallReader.of(parser, policy.tokenizer).parsed,
        TemplateConversations.of(policy.tokenizer, policy.stop_ids),
        task.episodes,
        problem or "",
    )
    numbers = count(1)
    link = AgentLink(
        partial(published, plan),
        lambda: episode_servers.episode_id(job.id, plan.attempt.claim.epoch, next(numbers)),
        partial(still_wanted, plan),
        partial(report_ignored, recorder),
    )
    if plan.is_first:
        recorder.inform(f"The job waits for its agent: regraft agents run {job.id} MODULE:FUNCTION", {})
    return AgentSampler(sampler, rules, link)


def _as_it_is(answer: Rollout, row: Mapping[str, Any]) -> Rollout:
    """An answer of a model that has no tools."""
    return answer


@asynccontextmanager
async def published(plan: TrainingPlan, board: Board) -> AsyncIterator[None]:
    """Serve the board in the context, at an address that the API finds."""
    with listener(plan.settings.episodes_host) as listening:
        secret = await _publish(plan, url_of(listening))
        try:
            async with served(board, listening, secret, plan.settings):
                yield
        finally:
            await _publish(plan, "")


async def _publish(plan: TrainingPlan, url: str) -> str:
    """Note where the run listens, and return the secret of its job."""
    return await asyncio.to_thread(plan.attempt.write, partial(episode_servers.publish, url=url))


async def still_wanted(plan: TrainingPlan, is_idle: bool) -> None:
    """Raise PausedWhileWaiting if the user has paused the job, and no agent plays."""
    plan.beat()

    def status(session: Session) -> str:
        return lifecycle.get(session, plan.job.project_id, plan.job.id).status

    if is_idle and await asyncio.to_thread(plan.attempt.read, status) == "pausing":
        raise PausedWhileWaiting


async def report_ignored(recorder: JobRecorder, sampling: Mapping[str, Any]) -> None:
    """Record once that the agent asks for other sampling parameters than it gets."""
    asked = ", ".join(f"{name} {value}" for name, value in sampling.items())
    message = f"The agent asks for {asked}, which has no effect: the job's own sampling parameters count."
    await asyncio.to_thread(recorder.warn, message, {"asked": dict(sampling)})
