"""All benches, one after the other, as one table with the goals beside the figures.

A missed goal is shown and is no failure: the machine may be busy. A bench that does not run is one.
"""

import argparse
import json
import operator
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

BENCHES = (
    "group_prefix",
    "scaling",
    "merge_rounding",
    "long",
    "update",
    "deal",
    "swap",
    "scale",
    "engine",
    "api",
    "queue",
    "graders",
    "grading_overlap",
    "overlap",
    "data",
    "serve",
    "sdk",
    "console",
    "grpo_vs_trl",
    "sft_vs_trl",
    "dpo_vs_trl",
    "sparse",
)
# The slowest takes a few minutes on two cores that do nothing else.
PATIENCE = 1800
COMPARE: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le}
GOALS: dict[str, tuple[str, float]] = {
    # the trainer
    "sample_speedup": (">=", 3),
    "train_speedup": (">=", 3),
    "logprob_difference": ("<=", 1e-3),
    "gradient_difference": ("<=", 1e-4),
    "prompt_cost_group_16_over_2": ("<=", 1.5),
    "ratio_long_prompt": (">=", 3),
    "ratio_long_completion": (">=", 1.5),
    "ratio_seconds_to_reward": (">=", 1),
    "memory_ratio_long_prompt": ("<=", 1),
    "ratio": (">=", 1.5),
    "memory_ratio": ("<=", 1),
    "memory_ratio_long_completion": ("<=", 1),
    # not below TRL: the upper end of the interval of the difference reaches zero
    "difference_high": (">=", 0),
    "seconds_per_step_50k": ("<=", 0.05),
    **{
        f"flop_overhead_{way}_{tokens}": ("<=", 1.15)
        for way in ("packed", "rows")
        for tokens in (2048, 8192, 32_768)
    },
    "squared_tensors": ("<=", 0),
    "busy_8": (">=", 0.9),
    "saved_gib_8b": ("<=", 10),
    "peak_share_8b": (">=", 0.45),
    "head_written_gib": ("<=", 3.1),
    # the sync to the sampler
    "captured_step_1": (">=", 0.99),
    "captured_step_10": (">=", 0.99),
    "swap_seconds_rank_8": ("<=", 0.25),
    "swap_seconds_rank_32": ("<=", 0.25),
    "files_written": ("<=", 0),
    "wire_us_per_token": ("<=", 1),
    # several engines
    "answers_equal": (">=", 1),
    "answers_equal_after_loss": (">=", 1),
    "adapter_difference": ("<=", 1e-4),
    # graders
    "string_checks_per_second": (">=", 20_000),
    "multi_per_second": (">=", 20_000),
    "python_overhead_ms": ("<=", 5),
    "python_grades_per_second": (">=", 200),
    "fresh_process_ratio": (">=", 10),
    "step_lengthened_by_waiting": ("<=", 0.05),
    # the service
    "last_page_over_first_page": ("<=", 1.5),
    "p99_ratio": ("<=", 1.5),
    "create_to_first_sample_seconds": ("<=", 2),
    # serving
    "throughput_ratio_32": (">=", 3),
    "cold_adapter_seconds": ("<=", 2),
    # the console
    "filter_score_ms": ("<=", 200),
    "filter_line_ms": ("<=", 200),
    "filter_grader_ms": ("<=", 200),
    "search_once_ms": ("<=", 200),
    "search_nothing_ms": ("<=", 200),
    "sort_advantage_ms": ("<=", 200),
    "prompts_ms": ("<=", 200),
    "job_page_draw_ms": ("<=", 300),
    "first_load_kb": ("<=", 150),
    # the command lines
    "import_ms": ("<=", 300),
    "server_help_ms": ("<=", 300),
    "help_ms": ("<=", 400),
}


@dataclass(frozen=True)
class Row:
    bench: str
    figure: str
    value: float

    @property
    def goal(self) -> str:
        return "{} {:g}".format(*GOALS[self.figure]) if self.figure in GOALS else ""

    @property
    def met(self) -> bool | None:
        """None: there is no goal."""
        if self.figure not in GOALS:
            return None
        compare, bound = GOALS[self.figure]
        return COMPARE[compare](self.value, bound)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "benches", nargs="*", metavar="bench", help=f"of {', '.join(BENCHES)}; all without any"
    )
    asked = parser.parse_args().benches or BENCHES
    if unknown := sorted(set(asked) - set(BENCHES)):
        parser.error(f"no such bench: {', '.join(unknown)}")
    rows: list[Row] = []
    failed: list[str] = []
    for name in asked:
        print(f"running {name}", file=sys.stderr, flush=True)
        found = run([sys.executable, "-m", f"bench.{name}"])
        if found is None:
            failed.append(name)
        else:
            rows += [Row(name, figure, value) for figure, value in found.items()]
    print(f"# {machine()}, {date.today().isoformat()}")
    for line in table(rows, failed):
        print(line)
    missed = [row.figure for row in rows if row.met is False]
    figures = {f"{row.bench}.{row.figure}": row.value for row in rows}
    print(
        json.dumps(
            {"bench": "table", "figures": figures, "missed": missed, "failed": failed, "machine": machine()}
        )
    )
    return 1 if failed else 0


def machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor, the features on which the figures depend most, and the number of cores of this process."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    fields = dict(line.split("\t", 1) for line in lines if "\t" in line)
    fields = {name.strip(): value.strip(" :\t") for name, value in fields.items()}
    flags = fields.get("flags", "").split()
    name = fields.get("model name", platform.processor() or platform.machine())
    kind = next((flag for flag in ("avx512f", "avx2") if flag in flags), "neither AVX2 nor AVX-512")
    return f"{name} ({kind}), {len(os.sched_getaffinity(0))} cores"


def run(command: Sequence[str]) -> Mapping[str, float] | None:
    """The figures of the last line that the bench prints; None if it failed, hung or printed something else."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=True)
        figures: Mapping[str, float] = json.loads(done.stdout.splitlines()[-1])["figures"]
    except (subprocess.SubprocessError, ValueError, LookupError, TypeError) as cause:
        print(f"{command[-1]}: {cause!r}", file=sys.stderr)
        return None
    return figures


def table(rows: Sequence[Row], failed: Sequence[str]) -> Iterator[str]:
    cells = [("bench", "figure", "value", "goal", "met")]
    said = {True: "yes", False: "NO", None: ""}
    cells += [(row.bench, row.figure, f"{row.value:.4g}", row.goal, said[row.met]) for row in rows]
    cells += [(name, "", "", "", "did not run") for name in failed]
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    for row in cells:
        yield " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


if __name__ == "__main__":
    sys.exit(main())
