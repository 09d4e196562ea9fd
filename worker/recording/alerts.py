"""Warnings about a step as soon as it is recorded, and the steps after which the job fails."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from core.jobs.hyperparameter_places import param_of
from core.jobs.hyperparameters import Resolved
from core.jobs.params import GRADER_PARAM
from core.step_metrics import StepMetrics
from graders.types import ErrorKind, Grade
from worker.gpu_ratio import RatioMeasurement
from worker.history import History, Steps
from worker.interfaces import Recorder
from worker.recording import metrics, stopping
from worker.refusals import UserMistake
from worker.training import grpo
from worker.training.contributions import GroupSignal, training_rewards
from worker.types import Group

# Steps without signal in a row after which an event says so. An event at every step would be ignored.
STEPS_WITHOUT_SIGNAL = (1, 5, 25)


SKIPPED = "The gradient was not finite, so the weights did not change in this step."


def report(
    groups_P: Sequence[Group],
    resampled_P: Sequence[Group],
    signals_P: Sequence[GroupSignal],
    history: History,
    recorder: Recorder,
    settings: Resolved,
    failing_steps: int,
) -> None:
    """Report discarded episodes, answers that could not be graded, a skipped update, and a step without signal.

    Args:
        groups_P: of the newest step of the history, without the resampled ones.
        resampled_P: those in place of zero-variance groups.
        signals_P: of both, the resampled ones last.
        failing_steps: the job fails after this many steps in a row in which most answers could not be graded.

    Raises:
        UserMistake: that happened.
    """
    step, earlier = history.steps[-1].step, history.steps[:-1]
    if (lost := metrics.discarded(groups_P)) is not None:
        recorder.warn(lost.message, {"step": step, "reasons": lost.reasons})
    if (failures := metrics.ungraded(groups_P)) is not None:
        recorder.warn(failures.message, {"step": step, "reasons": failures.reasons})
        failed = stopping.in_a_row(history.steps, lambda one: (one.mean_unresponsive_rewards or 0.0) > 0.5)
        if failed >= failing_steps:
            message = f"In {failed} steps in a row most answers could not be graded. {failures.message}"
            raise UserMistake("grader_failed", message, GRADER_PARAM)
    report_skipped_update(history.steps, recorder)
    report_updates(history, recorder, settings.step_kl)
    report_masked(history.steps, recorder)
    if (
        settings.has_token_rewards
        and grpo.signal([r for group in groups_P for r in training_rewards(group, settings)]) == "mixed"
    ):
        return  # answers to different prompts are compared with each other
    silence = metrics.no_signal(
        [*groups_P, *resampled_P], signals_P, earlier, cause_known="collapse" in history.warned
    )
    if silence is not None:
        silent = stopping.in_a_row(history.steps, lambda one: one.has_signal is False)
        if silent in STEPS_WITHOUT_SIGNAL:
            emit = recorder.inform if silence.is_success else recorder.warn
            emit(silence.message, {"step": step, "steps_in_a_row": silent})


def report_skipped_update(steps: Steps, recorder: Recorder) -> None:
    """Warn if the newest of these steps is the first one in a row whose update was skipped."""
    if stopping.skipped_updates(steps) == 1:
        recorder.warn(SKIPPED, {"step": steps[-1].step})


MAX_MASKED = 0.5  # of the tokens of a step


def report_masked(steps: Steps, recorder: Recorder) -> None:
    """Warn if the newest of these steps is the first of the job that trains on less than half of its tokens."""
    now, *earlier = ((step.masked_fraction or 0.0) for step in reversed(steps))
    if now > MAX_MASKED >= max(earlier, default=0.0):
        recorder.warn(
            f"{now:.0%} of the step's tokens were left out of the loss by importance: the sampler's probabilities "
            "differ too much from the trainer's. Widen the bounds of importance (cap, floor, reject_low, reject_high, "
            "off_policy_threshold), or learn from answers of fewer steps ago.",
            {"step": steps[-1].step, "masked_fraction": now},
        )


RETRIES = "update_retries"  # the rule of the warning
# Of the last steps: with retries in more than half of them, the learning rate is too high for the job.
RETRY_WINDOW = 5


def report_updates(history: History, recorder: Recorder, target: float) -> None:
    """Report the first update of the job that the step trust region has undone and the first that it could not measure,
    and, once, that most of the last steps have one that was undone.

    Args:
        target: `step_kl`.
    """
    now, earlier = history.steps[-1], history.steps[:-1]
    if now.unmeasured_updates and not any(step.unmeasured_updates for step in earlier):
        recorder.inform(
            "Memory ran out while an update was measured: it was accepted, and its KL is not known.",
            {"step": now.step, "unmeasured_updates": now.unmeasured_updates},
        )
    if not now.update_retries:
        return
    if not any(step.update_retries for step in earlier):
        _report_undone(now, recorder, target)
    undone = sum(bool(step.update_retries) for step in history.steps[-RETRY_WINDOW:])
    if undone > RETRY_WINDOW // 2 and len(history.steps) >= RETRY_WINDOW and RETRIES not in history.warned:
        history.warned.add(RETRIES)
        recorder.warn(
            f"In {undone} of the last {RETRY_WINDOW} steps an update was undone because it moved the policy too far. "
            "Lower the learning rate.",
            {
                "rule": RETRIES,
                "step": now.step,
                "steps": undone,
                "target": target,
                "learning_rate": now.learning_rate,
            },
        )


def _report_undone(now: StepMetrics, recorder: Recorder, target: float) -> None:
    outcome = "skipped after the last try"
    if now.update_kl is not None:
        outcome = f"repeated with the learning rate {now.learning_rate:.3g}: {now.update_kl:.3g} nats a token"
    recorder.inform(
        f"An update moved the policy by more than twice step_kl ({target:g} nats a token). It was undone and "
        f"{outcome}. The rate returns to its schedule by a quarter a step.",
        {
            "step": now.step,
            "update_kl": now.update_kl,
            "target": target,
            "learning_rate": now.learning_rate,
            "retries": now.update_retries,
        },
    )


# The ends of tracebacks that no answer and no busy machine can cause. A KeyError can come from an answer's JSON.
_OF_THE_CODE = re.compile(r"^(?:NameError|UnboundLocalError|ImportError|ModuleNotFoundError): ")
_FIELD = re.compile(r"""\bitem\[(['"])(?P<field>[^'"]+)\1\]""")


def require_grades(valid_P: Sequence[Group]) -> None:
    """Fail the job before its first step if its grader is broken: no other answer would be graded either.

    Raises:
        UserMistake: not one validation answer could be graded, because of a name, an import or a field of the rows that
            does not exist.
    """
    grades = [(grade, group.prompt.item) for group in valid_P for grade in metrics.given_to_graders([group])]
    if grades and all(_is_broken(grade, item) for grade, item in grades):
        reason = Counter(grade.reason for grade, _ in grades).most_common(1)[0][0]
        raise UserMistake(
            "grader_failed",
            f"Not one of the {len(grades)} validation answers could be graded before the first step. Most often: "
            f"{reason}",
            GRADER_PARAM,
        )


def _is_broken(grade: Grade, item: Mapping[str, Any]) -> bool:
    if grade.score is not None or grade.error is not ErrorKind.python_grader_runtime_error:
        return False
    *_, last = grade.reason.strip().splitlines() or [""]
    if last.startswith("KeyError: "):
        return any(
            last == f"KeyError: {found['field']!r}" and found["field"] not in item
            for found in _FIELD.finditer(grade.reason)
        )
    return _OF_THE_CODE.match(last) is not None


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
