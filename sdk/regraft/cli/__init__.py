"""`regraft`, the command line."""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; see `regraft --help`."""
    from regraft.cli.parser import build

    arguments = build().parse_args(argv)
    if arguments.run == "completion":  # shells may run this on startup
        from regraft._rules.command_line import script

        print(script(build(), arguments.shell), end="")
        return 0
    from regraft.cli.commands import run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
