"""Measure the start-up time of the command lines: new processes of `import regraft`, `regraft --help` and others.

    python -m bench.sdk

Milliseconds are medians of whole processes, the interpreter's own start included, which `python -c pass` shows. The
kinds take turns, so that whatever else the machine does falls on all of them alike.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.report import report
from bench.sizes import sized

ROOT = Path(__file__).parents[1]
HELP = (
    "import sys; from regraft.cli import main; sys.exit(main(['--help']))"  # as the installed command does it
)
SERVER_HELP = "import sys; from worker.cli import main; sys.exit(main(['--help']))"
KINDS = {
    "bare": "pass",
    "import": "import regraft",
    "help": HELP,
    "server_help": SERVER_HELP,
    "import_client": "from regraft import Regraft",
    "import_openai": "import openai",
}


def main(programs: Mapping[str, str] = KINDS) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=sized(15, 1))
    took = measure(programs, parser.parse_args().rounds)
    for kind, milliseconds in took.items():
        print(f"{milliseconds:7.0f} ms  {programs[kind]}")
    report("sdk", figures(took))


def measure(programs: Mapping[str, str], rounds: int) -> dict[str, float]:
    """Median milliseconds of each program, after a round that fills caches and writes byte code."""
    took: dict[str, list[float]] = {kind: [] for kind in programs}
    for number in range(rounds + 1):
        for kind, program in programs.items():
            seconds = run([sys.executable, "-c", program])
            if number:
                took[kind].append(1000 * seconds)
    return {kind: statistics.median(times) for kind, times in took.items()}


def run(command: Sequence[str]) -> float:
    """Seconds until the process has ended."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'sdk'}{os.pathsep}{ROOT}"}
    begin = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, env=environment, check=True)
    return time.perf_counter() - begin


def figures(took: Mapping[str, float]) -> dict[str, float]:
    return {
        "import_ms": took["import"],
        "help_ms": took["help"],
        "server_help_ms": took["server_help"],
        "import_client_ms": took["import_client"],
        "bare_python_ms": took["bare"],
        "import_openai_ms": took["import_openai"],
        "import_over_bare": took["import"] / took["bare"],
        "help_over_bare": took["help"] / took["bare"],
        "server_help_over_bare": took["server_help"] / took["bare"],
        "import_over_openai": took["import"] / took["import_openai"],
        "client_over_openai": took["import_client"] / took["import_openai"],
    }


if __name__ == "__main__":
    main()
