"""The end of a run: select the best checkpoint, compare it with the base model, and record the job's success."""

from core.jobs.hyperparameters import Resolved
from core.jobs.thresholds import Thresholds
from core.jobs.verdict import Verdict
from worker.record import monitors
from worker.record.checkpoints import Checkpoints
from worker.record.exporters.feed import Feeds
from worker.record.history import History
from worker.record.recorder import Recorder
from worker.record.verdict import compare
from worker.refusals import UserMistake


def deliver(
    checkpoints: Checkpoints,
    recorder: Recorder,
    feeds: Feeds,
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
    verdict = judge(best.step, recorder, history, thresholds)
    if settings.require_improvement and (verdict is None or verdict.outcome != "improved"):
        numbers = "" if verdict is None else f" {verdict.sentence()}"
        raise UserMistake(
            "no_improvement",
            "require_improvement is set, and the validation reward is not significantly above the base model's."
            f"{numbers} The checkpoints are kept.",
            "method.reinforcement.hyperparameters.advanced.require_improvement",
        )
    # Before the job's last status: after it the supervisor may end this process.
    feeds.close("succeeded")
    recorder.succeed(best)


def judge(step: int, recorder: Recorder, history: History, thresholds: Thresholds) -> Verdict | None:
    """Compare the checkpoint of this step with the base model, and record the verdict.

    Returns:
        None if no validation rows can be compared. A warning says so.
    """
    base, tuned = history.base_scores, recorder.row_scores(step)
    compared = compare(base, tuned) if base is not None and tuned is not None else None
    if compared is None:
        known = base is not None and tuned is not None
        reason = (
            "no validation row was graded for both"
            if known
            else "an earlier version of the service recorded their validations without the scores of the rows"
        )
        recorder.warn(f"The model cannot be compared with its base model: {reason}.", {})
        return None
    damage = monitors.damage(history.steps, step, thresholds)
    verdict = compared.verdict(step, None if damage is None else damage[0])
    if not verdict.below_base:
        recorder.judged(verdict, verdict.sentence(), level="info", data={})
        return verdict
    cause, evidence = monitors.likely_cause(history.steps, verdict, thresholds)
    if verdict.outcome == "worse":
        finding = "is worse than the base model"
    elif verdict.ci_low is None:
        finding = "is below the base model, with too few validation rows to tell them apart"
    else:
        finding = "is below the base model, not significantly"
    message = f"The delivered model {finding}. {verdict.sentence()} Likely cause: {evidence}"
    recorder.judged(verdict, message, level="error", data={"cause": cause})
    return verdict
