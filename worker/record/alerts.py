"""Warnings about a step as soon as it is recorded, and the steps after which the job fails."""

from collections.abc import Sequence

from core.jobs.hyperparameter_places import param_of
from core.jobs.hyperparameters import Resolved
from core.results.step_metrics import StepMetrics
from worker.interfaces import Recorder
from worker.learn import grpo
from worker.record import metrics, stopping
from worker.record.gpu_ratio import RatioMeasurement
from worker.record.history import History
from worker.refusals import UserMistake
from worker.types import Group

# Steps without signal in a row after which an event says so. An event at every step would be ignored.
SILENT_STEPS = (1, 5, 25)


SKIPPED = "The gradient was not finite, so the weights did not change in this step."


def report(
    groups_P: Sequence[Group],
    history: History,
    recorder: Recorder,
    settings: Resolved,
    failing_steps: int,
) -> None:
    """Report answers that could not be graded, a skipped update, and a step without signal.

    Args:
        groups_P: of the newest step of the history.
        failing_steps: the job fails after this many steps in a row in which most answers could not be graded.

    Raises:
        UserMistake: that happened.
    """
    step, earlier = history.steps[-1].step, history.steps[:-1]
    if (failures := metrics.ungraded(groups_P)) is not None:
        recorder.warn(failures.message, {"step": step, "reasons": failures.reasons})
        failed = stopping.in_a_row(history.steps, lambda one: (one.mean_unresponsive_rewards or 0.0) > 0.5)
        if failed >= failing_steps:
            message = f"In {failed} steps in a row most answers could not be graded. {failures.message}"
            raise UserMistake("grader_failed", message, "method.reinforcement.grader")
    if history.steps[-1].skipped_updates == 1 and not (earlier and earlier[-1].skipped_updates == 1):
        recorder.warn(SKIPPED, {"step": step})
    if (
        settings.has_token_rewards
        and grpo.signal([r for group in groups_P for r in group.rewards_G]) == "mixed"
    ):
        return  # answers to different prompts are compared with each other
    silence = metrics.no_signal(
        groups_P, settings.supervision, earlier, cause_known="collapse" in history.warned
    )
    if silence is not None:
        silent = stopping.in_a_row(history.steps, lambda one: one.groups_mixed_share == 0.0)
        if silent in SILENT_STEPS:
            emit = recorder.inform if silence.is_success else recorder.warn
            emit(silence.message, {"step": step, "steps_in_a_row": silent})


def require_signal(step: StepMetrics, recorder: Recorder, settings: Resolved) -> None:
    """Fail the job after its first step if fewer groups had signal than `fail_below_signal` requires.

    Raises:
        UserMistake: with the code `no_signal`.
    """
    share, bound = step.groups_mixed_share, settings.fail_below_signal
    if step.step == 1 and share is not None and share < bound:
        raise UserMistake(
            "no_signal",
            f"In the first step {share:.0%} of the groups had signal, less than fail_below_signal ({bound:.0%}). A "
            "preview (POST /v1/regraft/previews) says what to do about it.",
            param_of(recorder.method, "fail_below_signal"),
        )


def report_ratio(
    measurement: RatioMeasurement | None, data: StepMetrics, learning_seconds: float, recorder: Recorder
) -> None:
    """Report once which ratio of GPUs for sampling and learning would be faster, if the GPUs of the job are split."""
    if measurement is None:
        return
    ratio = measurement.add(data.ahead_seconds, learning_seconds)
    if ratio is not None:
        recorder.inform(ratio.message, ratio.data)
