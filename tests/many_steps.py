"""A job with many steps, as workers record them: metrics with their sections by grader, events, checkpoints."""

import math
import random
from typing import Any

from sqlalchemy.orm import Session

from core.database.tables import Attempt, Checkpoint, Job, StepMetric
from core.jobs import events

_ERRORS = (
    "sample_parse_error",
    "invalid_variable_error",
    "other_error",
    "python_grader_server_error",
    "python_grader_runtime_error",
    "model_grader_server_error",
)
_GRADERS = {"correct": "python", "format": "string_check", "short": "string_check"}


def record(session: Session, job: Job, steps: int, *, every: int = 50) -> None:
    """Record so many steps, a validation and a checkpoint after each `every` of them, and two attempts."""
    drawn = random.Random(steps)
    for step in range(steps + 1):
        data = _metrics(drawn, step, steps, every)
        session.add(StepMetric(job_id=job.id, step=step, epoch=1, data=data))
        message = f"Step {step}/{steps}"
        events.append(session, job.id, message, type="metrics", data=data, step=step)
        if step % every == 0 and step:
            reward = data["full_valid_mean_reward"]
            session.add(
                Checkpoint(
                    job_id=job.id,
                    step=step,
                    epoch=1,
                    blob_prefix=f"many/{job.id}/{step}",
                    valid_reward=reward,
                    metrics={"full_valid_mean_reward": reward},
                )
            )
    at = steps // 3
    warning = {"rule": "truncation", "share": 0.24, "step": at}
    events.append(session, job.id, "24 % of the answers are cut off.", level="warn", data=warning, step=at)
    started = 1_790_000_000.0
    for epoch, outcome, reason in ((1, "crashed", "The worker was killed."), (2, "succeeded", None)):
        session.add(
            Attempt(
                job_id=job.id,
                epoch=epoch,
                kind="run",
                worker=f"worker-{epoch}",
                started_at=started + 3600 * epoch,
                ended_at=started + 3600 * epoch + 3000,
                outcome=outcome,
                reason=reason,
                resumed_from=0 if epoch == 1 else steps // 2 // every * every,
            )
        )


def _metrics(drawn: random.Random, step: int, steps: int, every: int) -> dict[str, Any]:
    """Rewards that rise and saturate, with noise."""
    learned = 1 - math.exp(-3 * step / steps)
    noise = drawn.gauss(0, 0.03)
    data: dict[str, Any] = {"step": step, "total_steps": steps}
    validated = step % every == 0
    if validated:
        reward = 0.35 + 0.45 * learned + noise / 2
        data |= {
            "full_valid_mean_reward": reward,
            "valid_reward_mean": reward,
            "full_valid_stderr": 0.02,
            "valid_truncated_share": 0.05,
            "valid_completion_tokens_mean": 140.0,
        }
    if step == 0:
        return data | _sections(drawn, ("valid",), learned)
    mixed = 0.75 - 0.4 * learned + abs(noise)
    return (
        data
        | {
            "train_mean_reward": 0.3 + 0.5 * learned + 2 * noise,
            "train_reward_mean": 0.3 + 0.5 * learned + 2 * noise,
            "train_reward_std": 0.3,
            "completion_tokens_mean": 150 + 60 * learned + 100 * noise,
            "completion_tokens_max": 400 + drawn.randrange(100),
            "truncated_share": abs(noise) * 2,
            "mean_unresponsive_rewards": 0.0,
            "groups_mixed_share": mixed,
            "groups_all_zero_share": (1 - mixed) * (1 - learned),
            "groups_all_one_share": (1 - mixed) * learned,
            "loss": noise,
            "kl": 0.2 * learned + abs(noise) / 5,
            "entropy": 1.4 - 0.9 * learned + noise,
            "sampling_entropy": 1.3 - 0.9 * learned + noise,
            "clip_fraction": 0.0,
            "grad_norm": 0.5 + abs(noise) * 5,
            "logprob_gap": 0.004 + abs(noise) / 50,
            "logprob_gap_max": 0.2,
            "logprob_gap_k1": 1e-4,
            "logprob_gap_k3": 1e-4,
            "logprob_gap_ess": 0.99,
            "trained_sequences": 400,
            "trained_tokens": 60_000,
            "sampled_tokens": 80_000,
        }
        | _sections(drawn, ("train", "valid") if validated else ("train",), learned)
    )


def _sections(drawn: random.Random, splits: tuple[str, ...], learned: float) -> dict[str, Any]:
    def by_grader(fields: Any) -> list[dict[str, Any]]:
        return [
            {"name": name, "type": kind}
            | {key: value for split in splits for key, value in fields(split).items()}
            for name, kind in _GRADERS.items()
        ]

    seconds = {"sampling": 12 + drawn.random(), "grading": 2 + drawn.random(), "training": 9.0, "eval": 0.0}
    return {
        "scores": {
            "graders": by_grader(lambda split: {f"{split}_reward_mean": 0.4 + learned * drawn.random() / 2})
        },
        "errors": {
            "graders": by_grader(
                lambda split: {
                    f"{split}_{kind}_{what}": 0.0 for kind in _ERRORS for what in ("count", "mean")
                }
            )
        },
        "timing": {
            "step": seconds | {"full_iteration": sum(seconds.values())},
            "graders": by_grader(lambda split: {f"{split}_execution_latency_mean": drawn.random()}),
        },
    }
