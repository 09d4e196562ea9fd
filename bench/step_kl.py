"""Measure what the step trust region changes: the same seeds with it and without, on the demo's task.

Without it (`step_kl` 0, no warm-up), one of ten seeds collapses at the automatic learning rate. Each run is a file in
`--keep`, and a run whose file exists is not repeated, so the bench can be interrupted and continued, also with more
seeds, targets or learning rates. A seed is healthy if no rule reports `collapse` or `kl_jump` and the verdict is not
`worse`; its area is its mean validation reward after step 0. `area_difference` is the mean area of all seeds with the
trust region, less that of the healthy seeds without it. With `--tiny` the task is that of bench/sparse.py, of which the
rewards of all steps are the curve.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import monitors, sparse
from bench.report import report
from bench.sizes import TINY, sized
from core.jobs.hyperparameter_groups import Optimizer

STEP_KL = Optimizer().step_kl  # the default
RULES = {"collapse", "kl_jump"}


@dataclass(frozen=True)
class Measured:
    """One run."""

    curve: list[float]  # validation rewards, the base model's first
    is_healthy: bool
    largest_step_kl: float | None  # before any was undone: not measured without the trust region
    retries: int
    wall_seconds: float
    cpu_seconds: float

    @property
    def area(self) -> float:
        return statistics.fmean(self.curve[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=sized(list(range(1, 31)), [1]))
    parser.add_argument("--targets", type=float, nargs="*", default=[0.0, STEP_KL])
    parser.add_argument(
        "--learning-rates", type=float, nargs="*", default=[], help="default: the automatic one"
    )
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--eval-interval", type=int, default=6)
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        keep = args.keep or Path(scratch)
        keep.mkdir(parents=True, exist_ok=True)
        for rate in args.learning_rates or [None]:
            runs = {
                target: {seed: read_or_run(keep, seed, optimizer(target, rate), args) for seed in args.seeds}
                for target in args.targets
            }
            report("step_kl" if rate is None else f"step_kl at {rate:g}", figures(runs))


def optimizer(target: float, rate: float | None) -> dict[str, Any]:
    """The hyperparameters of the optimizer with this target; those of before the trust region for 0."""
    requested: dict[str, Any] = {"step_kl": target}
    if not target:
        requested["warmup_steps"] = 0
    return requested if rate is None else requested | {"learning_rate": rate}


def read_or_run(folder: Path, seed: int, requested: Mapping[str, Any], args: argparse.Namespace) -> Measured:
    """Read a run, or run it and keep it."""
    rate = requested.get("learning_rate", "auto")
    file = folder / f"{requested['step_kl']:g}-{rate}-{args.epochs}-{seed}.json"
    if not file.exists():
        began, cpu = time.monotonic(), time.process_time()
        run = tiny(seed, requested) if TINY else demo(seed, requested, args)
        seconds = {"wall_seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - cpu}
        file.write_text(json.dumps(run | seconds))
        print(f"{file.stem}: {run}", flush=True)
    return Measured(**json.loads(file.read_text()))


def demo(seed: int, requested: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    changes = {"n_epochs": args.epochs, "eval_interval": args.eval_interval}
    run = monitors.train(seed, monitors.with_optimizer(requested) | changes)
    found = {finding.rule for _, finding in monitors.warnings(run.steps)}
    return {
        "curve": [value for step in run.steps if (value := step.get("full_valid_mean_reward")) is not None],
        "is_healthy": not found & RULES and run.outcome != "worse",
        "largest_step_kl": max((step.get("update_kl") or 0.0 for step in run.steps), default=None),
        "retries": sum(step.get("update_retries") or 0 for step in run.steps),
    }


def tiny(seed: int, requested: Mapping[str, Any]) -> dict[str, Any]:
    curve = sparse.ours(seed, requested)
    is_healthy = sparse.quarters(curve)[-1] >= sparse.quarters(curve)[0]
    return {"curve": curve, "is_healthy": is_healthy, "largest_step_kl": None, "retries": 0}


def figures(runs: Mapping[float, Mapping[int, Measured]]) -> dict[str, float]:
    found: dict[str, float] = {}
    without = list(runs[0.0].values()) if 0.0 in runs else []
    if without:
        found |= {"seeds_off": len(without), "healthy_seeds_off": sum(run.is_healthy for run in without)}
    for target, by_seed in runs.items():
        if target:
            with_it = list(by_seed.values())
            name = "" if target == STEP_KL else f"_{target:g}"
            found |= {f"{key}{name}": value for key, value in compared(with_it, without).items()}
    return found


def compared(with_it: Sequence[Measured], without: Sequence[Measured]) -> dict[str, float]:
    """The figures of one target."""
    found: dict[str, float] = {
        "seeds": len(with_it),
        "healthy_seeds": sum(run.is_healthy for run in with_it),
        "area": statistics.fmean(run.area for run in with_it),
        "retries": sum(run.retries for run in with_it),
    }
    if healthy := [run.area for run in without if run.is_healthy]:
        found["area_difference"] = found["area"] - statistics.fmean(healthy)
    if without:
        found["wall_ratio"] = _ratio(
            [one.wall_seconds for one in with_it], [one.wall_seconds for one in without]
        )
        found["cpu_ratio"] = _ratio(
            [one.cpu_seconds for one in with_it], [one.cpu_seconds for one in without]
        )
    return found


def _ratio(values: Sequence[float], base: Sequence[float]) -> float:
    return statistics.fmean(values) / statistics.fmean(base)


if __name__ == "__main__":
    main()
