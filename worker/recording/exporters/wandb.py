"""Weights & Biases. Key and address are WANDB_API_KEY and WANDB_BASE_URL of the worker's environment."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.recording.exporters.types import RunInfo
from worker.types import Ended

INIT_SECONDS = 30.0


class WandbExporter:
    def __init__(self, folder: Path) -> None:
        """`folder`: for what W&B keeps on disk, unless WANDB_DIR names another one."""
        self.folder = Path(os.environ.get("WANDB_DIR") or folder)
        self._run: Any = None

    def start(self, run_info: RunInfo) -> int | None:
        import wandb

        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = self._init(run_info)
        except Exception:
            # Its helper process holds on to a run that it could not begin, and would refuse the next try for it.
            wandb.teardown()
            raise
        # 0 of a new run, and of a resumed one the step behind its last.
        return self._run.step - 1 if self._run.resumed else None

    def _init(self, run_info: RunInfo) -> Any:
        import wandb

        return wandb.init(
            project=run_info.project,
            entity=run_info.entity,
            name=run_info.name,
            tags=_tags(run_info),
            config=dict(run_info.config),
            dir=str(self.folder),
            # A run of the same id is gone on with. W&B itself takes no step that it has already.
            id=run_info.job_id,
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(
                # Nothing of this process but what it is given: no output, no code, no packages, no machine.
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                save_code=False,
                x_disable_stats=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
                init_timeout=INIT_SECONDS,
            ),
        )

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step, commit=True)

    def finish(self, ended: Ended) -> None:
        if ended == "interrupted":
            self._run.mark_preempting()
        self._run.finish(exit_code=1 if ended == "failed" else 0)


def _tags(run_info: RunInfo) -> list[str]:
    """The job's own, and those that OpenAI gives, in our name; W&B takes 64 characters."""
    ours = ("regraft/finetune", f"regraft/{run_info.config['model']}", f"regraft/{run_info.job_id}")
    return list(dict.fromkeys([*run_info.tags, *(tag[:64] for tag in ours)]))
