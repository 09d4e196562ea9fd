"""The sampler of a job with tools: its answers are episodes."""

from core.jobs.params import TOOLS_PARAM
from graders.build import NotConfigured
from graders.endpoint import url_problem
from worker.backends import open_backends
from worker.heartbeat import HeartbeatTools
from worker.model.policy import Policy
from worker.model.suffixes import TemplateSuffixes
from worker.model.tool_calls import CallReader
from worker.prepare.task import PromptTask
from worker.prepare.training_plan import TrainingPlan
from worker.rollout.episodes import EpisodeSampler
from worker.rollout.tools import HttpTool, HttpTools
from worker.sampling import Sampler, TurnSampler


def sampler_of_episodes(
    plan: TrainingPlan, task: PromptTask, policy: Policy, sampler: TurnSampler
) -> Sampler:
    """Sample episodes with the sampler.

    Raises:
        NoSuffix: the chat template does not continue behind an answer.
        NotConfigured: this machine does not call a tool's server. Its graders file may be older than the API's.
    """
    assert task.episodes is not None, "the job has tools"
    assert task.tool_parser is not None, "its rows have tools"
    endpoints = open_backends(plan.settings).endpoints
    tools = [HttpTool.of(tool) for tool in plan.job.body["tools"]]
    for number, tool in enumerate(tools):
        if problem := url_problem(tool.server_url, endpoints, "Tools"):
            raise NotConfigured(problem, f"{TOOLS_PARAM}[{number}].server_url", "invalid_value")
    assert endpoints is not None, "or there was a problem"
    return EpisodeSampler(
        sampler,
        HeartbeatTools(HttpTools(tools, endpoints), plan.beat),
        CallReader.of(task.tool_parser, policy.tokenizer).parsed,
        TemplateSuffixes.of(policy.tokenizer, policy.stop_ids),
        task.episodes,
        plan.job.id,
    )
