"""The choices of the command line are those of the server, or of the code that reads them."""

import argparse
from collections.abc import Iterator
from typing import get_args

from regraft import literals
from regraft._rules.command_line import SHELLS
from regraft._rules.foreign_files import Target
from regraft.cli.parser import build
from regraft.starters import KINDS

OF_THE_SERVER = {
    get_args(value) for name, value in vars(literals).items() if name[0].isupper() and get_args(value)
}
OF_THE_CLIENT = {("text", "json"), tuple(SHELLS), tuple(KINDS), get_args(Target)}


def choices(parser: argparse.ArgumentParser, command: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from choices(below, f"{command} {name}")
        elif action.choices:
            yield f"{command} {action.dest}", tuple(action.choices)


def test_no_choices_of_the_command_line_are_written_by_hand() -> None:
    offered = dict(choices(build(), "regraft"))

    assert offered["regraft rollouts finish_reason"] == ("stop", "length")
    assert {
        name: values for name, values in offered.items() if values not in OF_THE_SERVER | OF_THE_CLIENT
    } == {}
