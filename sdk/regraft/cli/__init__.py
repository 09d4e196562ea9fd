"""`regraft`, the command line."""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; see `regraft --help`."""
    from regraft.cli.parser import build

    arguments = build().parse_args(argv)
    from regraft.cli.commands import run  # after help, versions and completion, which need none of the client

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
