"""A worker that a test kills: it imports once, and forks a child that runs evals for each line that it reads.

    python -m tests.evals.killed_worker DATA_DIR MODEL_URL JUDGE_URL

It prints the child's process id, and "ended" once no run is left.
"""

import os
import sys
from pathlib import Path

from api.resources.batch_requests import prepare_request
from core.database.engine import Database
from core.settings import Settings
from core.storage.store import FolderBlobs
from graders.backends import Backends
from graders.judge.judges import JudgeModel
from worker.evals.runner import EvalRunner


def work(folder: Path, model: str, judge: str) -> None:
    settings = Settings(
        data_dir=folder,
        models_file=folder / "models.toml",
        inference_url=model,
        inference_key="secret",
        eval_concurrency=4,
    )
    database = Database(f"sqlite:///{folder / 'regraft.db'}")
    backends = Backends({"judge": JudgeModel(judge)})
    runner = EvalRunner(
        settings, database, FolderBlobs(folder / "blobs"), backends, f"worker/{os.getpid()}", prepare_request
    )
    while (claim := runner.claim()) is not None:
        runner.run(claim)


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def main() -> None:
    folder, model, judge = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    say("ready")
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            work(folder, model, judge)
            os._exit(0)
        say(child)
        _, status = os.waitpid(child, 0)
        say("ended" if os.WIFEXITED(status) else "killed")


if __name__ == "__main__":
    main()
