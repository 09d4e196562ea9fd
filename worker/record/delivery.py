"""The end of a run: select the best checkpoint, compare it with the start, and record the job's success."""

from core.jobs.hyperparameter_places import param_of
from core.jobs.hyperparameters import Resolved
from core.jobs.thresholds import Thresholds
from core.jobs.verdict import Verdict
from worker.interfaces import Checkpoints, Exporters, Recorder
from worker.record import monitors
from worker.record.history import History
from worker.record.verdict import compare
from worker.refusals import UserMistake


def deliver(
    checkpoints: Checkpoints,
    recorder: Recorder,
    exporters: Exporters,
    history: History,
    settings: Resolved,
    thresholds: Thresholds,
) -> None:
    """Make the best checkpoint the job's model.

    Raises:
        UserMistake: there is no best checkpoint, or it is not the improvement that `require_improvement` asks for.
    """
    best = checkpoints.best()
    if best is None:
        raise UserMistake(
            "invalid_grader", "Not one validation answer could be graded, so there is no best model."
        )
    verdict = judge(best, recorder, history, thresholds)
    if settings.require_improvement and (verdict is None or verdict.outcome != "improved"):
        numbers = "" if verdict is None else f" {verdict.sentence()}"
        raise UserMistake(
            "no_improvement",
            "require_improvement is set, and the validation reward is not significantly above that of "
            f"{recorder.start_name}."
            f"{numbers} The checkpoints are kept.",
            param_of(recorder.method, "require_improvement"),
        )
    # Before the job's last status: after it the supervisor may end this process.
    if settings.off_policy_steps:
        checkpoints.delete_resume_files()
    exporters.close("succeeded")
    recorder.succeed(best)


def judge(step: int, recorder: Recorder, history: History, thresholds: Thresholds) -> Verdict | None:
    """Compare the checkpoint of this step with the model that the job started from, and record the verdict.

    Returns:
        None if no validation rows can be compared. A warning says so.
    """
    base, tuned = history.base_scores, recorder.row_scores(step)
    compared = compare(base, tuned) if base is not None and tuned is not None else None
    if compared is None:
        start = recorder.start_name
        recorder.warn(
            f"The model cannot be compared with {start}: no validation row was graded for both.", {}
        )
        return None
    damage = monitors.damage(history.steps, step, thresholds)
    start = recorder.start_name
    verdict = compared.verdict(
        step,
        None if damage is None else damage[0],
        start=recorder.parent_model,
        held_out=recorder.is_held_out,
    )
    if not verdict.below_base:
        recorder.judged(verdict, verdict.sentence(), level="info", data={})
        return verdict
    cause, evidence = monitors.likely_cause(history.steps, verdict, thresholds)
    if verdict.outcome == "worse":
        finding = f"is worse than {start}"
    elif verdict.outcome == "too_few":
        finding = f"is below {start}, with too few validation rows to tell them apart"
    else:
        finding = f"is below {start}, not significantly"
    message = f"The delivered model {finding}. {verdict.sentence()} Likely cause: {evidence}"
    recorder.judged(verdict, message, level="error", data={"cause": cause})
    return verdict
