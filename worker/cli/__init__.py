"""`regraft-server`, the commands that an operator runs."""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `regraft-server --help` lists them."""
    from worker.cli.parser import build, run

    parser = build()
    return run(parser, parser.parse_args(sys.argv[1:] if argv is None else argv))
