"""From a claimed job to its Run, for every method: plan, policy, recorder, experience.

The parts are in worker/prepare/. Each decides by itself what the job needs of it: a fleet, a shared base model, answers
while the weights load, engines that sleep. The plan refuses what cannot succeed before the weights are loaded, which
may take minutes. Importing this module imports torch, peft and transformers, which takes seconds: worker/child.py does
it before it waits for its job.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from core.settings import Settings
from graders.spec import GraderSpec
from graders.types import Grader
from worker.attempt import Attempt
from worker.clock import Clock
from worker.device import select_device
from worker.heartbeat import Beat
from worker.interfaces import Experience
from worker.model.memory import later_if_memory_is_taken
from worker.prepare.file_rows import row_experience
from worker.prepare.loaded import LoadedPolicy, start_of
from worker.prepare.rollouts import rollout_experience
from worker.prepare.row_task import RowTask
from worker.prepare.start_report import record_start
from worker.prepare.training_plan import plan_training
from worker.recording.exporters.choice import exporters_of
from worker.run import Run
from worker.sharing.memory_request import MemoryRequest
from worker.training.world import World


def assemble(
    attempt: Attempt,
    spec: GraderSpec | None,
    grader: Grader | None,
    settings: Settings,
    scratch: Path,
    stop_requested: Callable[[], bool],
    beat: Beat,
    world: World | None = None,
) -> Run:
    """Build the Run of a claimed job. Only jobs whose answers are graded have a grader.

    Raises:
        UserMistake, Refusal: the job cannot succeed as it is, on any worker.
        ModelUnavailable: the model could not be fetched. Another attempt may succeed.
        MemoryTaken, RunsAlone: the job does not fit beside other processes or jobs.
    """
    if settings.torch_threads:
        torch.set_num_threads(settings.torch_threads)
    ask = MemoryRequest.of(settings).make
    with later_if_memory_is_taken(select_device(settings), beside_others=attempt.shared is not None, ask=ask):
        plan = plan_training(attempt, spec, settings, scratch, beat, world)
        beat()
        start = start_of(plan)
        recorder = record_start(plan, start)
        task = plan.task
        experience: Experience[Any, Any]
        if isinstance(task, RowTask):
            assert isinstance(start, LoadedPolicy), "no fleet samples for it"
            experience = row_experience(plan, task, start, recorder)
        else:
            experience = rollout_experience(plan, task, start, recorder, spec, grader)
        exporters = exporters_of(plan.job, task.settings, plan.settings, recorder.warn)
        clock = Clock if attempt.shared is None else attempt.shared.clock
        return Run(experience, recorder, plan.checkpoints, exporters, stop_requested, clock)
