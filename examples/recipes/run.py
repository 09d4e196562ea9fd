"""Run a recipe on this machine, and print what each stage made and measured.

    .venv/bin/python examples/recipes/make.py [--gsm8k PATH]
    .venv/bin/python examples/recipes/run.py r1

The last line is JSON: for each job the first and the last figures of its validation.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import regraft

sys.path.insert(0, str(Path(__file__).parents[1]))
from service import local_service

FIGURES = ("full_valid_mean_reward", "full_valid_loss", "full_valid_mean_token_accuracy", "train_loss")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="the name of a .toml file in this folder")
    parser.add_argument("--data-dir", type=Path, default=Path(".regraft"), help="the service's own data")
    args = parser.parse_args()
    with local_service(args.data_dir.resolve()) as openai:
        client = regraft.Regraft(base_url=openai.base_url, api_key=openai.api_key)
        made = client.pipelines.submit(Path(__file__).with_name(args.recipe).with_suffix(".toml"))
        done = client.pipelines.wait(made.id, progress=StagePrinter())
        summary = {stage.name: measured(client, stage) for stage in done.stages}
    print(json.dumps({"status": done.status, "stages": summary}))
    return 0 if done.status == "succeeded" else 1


class StagePrinter:
    """Prints a stage when its state changes."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}

    def __call__(self, pipeline: Any) -> None:
        for stage in pipeline.stages:
            if self._states.get(stage.name) != stage.status:
                self._states[stage.name] = stage.status
                print(f"{stage.name}: {stage.status}", flush=True)


def measured(client: regraft.Regraft, stage: Any) -> dict[str, Any]:
    if stage.job_id is None:
        return {"rows": stage.rows}
    steps = regraft.metrics(client, stage.job_id)
    found = {name: [step[name] for step in steps if step.get(name) is not None] for name in FIGURES}
    shown: dict[str, Any] = {name: [values[0], values[-1]] for name, values in found.items() if values}
    return shown | {"steps": steps[-1]["step"] if steps else 0}


if __name__ == "__main__":
    sys.exit(main())
