"""The end of a run: select its checkpoint, compare it with the start, and warn of what is wrong with it."""

from core.jobs.hyperparameter_places import param_of
from core.jobs.hyperparameters import Resolved
from core.jobs.offline_hyperparameters import ResolvedOffline
from core.jobs.verdict import Verdict, counted
from core.thresholds import Thresholds
from worker.history import History, Steps
from worker.interfaces import Checkpoints, Recorder
from worker.recording import monitors, shadow
from worker.recording.verdict import compare
from worker.refusals import UserMistake

# The end of training is clearly worse than its best epoch if its validation loss is higher by this share.
OVERFIT = 0.02


def best_checkpoint(
    checkpoints: Checkpoints,
    recorder: Recorder,
    history: History,
    settings: Resolved,
    thresholds: Thresholds,
) -> int:
    """Return the step of the best checkpoint, once its verdict is recorded.

    Raises:
        UserMistake: there is none, or it is not the improvement that `require_improvement` asks for.
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
    return best


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
    verdict = shadow.with_shadow(verdict, history.steps)
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


def report_overfitting(steps: Steps, recorder: Recorder, settings: ResolvedOffline) -> None:
    """Warn if the delivered model has a clearly higher validation loss than the start or an earlier epoch."""
    losses = {one.step: one.full_valid_loss for one in steps if one.full_valid_loss is not None}
    last = losses.get(settings.total_steps)
    if last is None:
        return
    best = min(losses, key=losses.__getitem__)
    if last <= losses[best] * (1 + OVERFIT):
        return
    data = {"step": settings.total_steps, "full_valid_loss": last, "lowest_at_step": best}
    if best == 0:
        recorder.warn(
            f"The validation loss is {last:.3f}, and that of {recorder.start_name} was {losses[0]:.3f}: training made "
            "the model worse on these rows. A lower learning_rate_multiplier or fewer epochs may help.",
            data,
        )
        return
    epochs = best // settings.steps_per_epoch
    recorder.warn(
        f"The model overfits: its validation loss is {last:.3f}, and was {losses[best]:.3f} at step {best}. The "
        f"checkpoint of step {best} is better if it is still kept; else train for {counted(epochs, 'epoch')}.",
        data,
    )
