"""The shape of the client's commands (regraft.cli.parser), from which the parsers are made."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from regraft._rules import command_line
from regraft._rules.command_line import Argument, Exclusive, arg

METHODS = {"show": "retrieve"}


def output(default: str) -> Argument:
    return arg(
        "--output", help="text (default) or one JSON document", choices=("text", "json"), default=default
    )


# SUPPRESS: a default here would override an --output given before the command.
OUTPUT = output(argparse.SUPPRESS)


class Command(command_line.Command):
    """A command. With `columns` or `text` it calls a method of the client with the positional arguments; otherwise it
    has a function in regraft.cli with its name, such as `jobs_create`.

    Args:
        arguments: a text is the id or name of a resource.
        columns: of the list that the method returns: the cells of a row by title, as attributes or functions of an
            item. An attribute whose name ends with `_at` is a time.
        text: of what the method returns: a template of its fields, or the name of a function in
            regraft.cli.commands.TEXTS.
        call: the method, if it is not named as the command: `jobs pause` is `jobs.pause`, `show` is `retrieve`.
        limit: the items of a page, if not the server's default; an option `--limit` counts the items of all pages.
    """

    def __init__(
        self,
        name: str,
        summary: str,
        *arguments: Argument | Exclusive | str,
        example: str = "",
        columns: Mapping[str, str | Callable[[Any], object]] | None = None,
        text: str = "",
        call: str = "",
        limit: int | None = None,
    ) -> None:
        super().__init__(
            name, summary, OUTPUT, *arguments, epilog=f"example:\n  {example}" if example else None
        )
        self.call, self.columns, self.text, self.limit = call, columns, text, limit
        self.run = name.replace("-", "_")

    @property
    def ids(self) -> Iterator[str]:
        """The names of the positional arguments."""
        for one in self.arguments:
            if isinstance(one, Argument) and not one.flags[0].startswith("-"):
                yield one.flags[0]

    def add_to(self, commands: Any) -> Any:
        parser = super().add_to(commands)
        parser.set_defaults(run=self.run, command=self)
        return parser


class Group(command_line.Group):
    """Commands on one level, which call the methods of the client's attribute with the group's name."""

    commands: tuple[Command, ...]

    def __init__(self, name: str, summary: str, *commands: Command) -> None:
        super().__init__(name, summary, *commands)
        for command in commands:
            command.run = f"{name}_{command.run}"
            command.call = command.call or f"{name}.{METHODS.get(command.name, command.name)}"
