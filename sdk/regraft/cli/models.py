"""The commands of models and aliases, and chat."""

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from regraft._rules.datasets import LineError, read_objects
from regraft.cli.output import answer, print_json, say, table, when
from regraft.cli.shared import DONE, Refused, connect
from regraft.display import Waiting
from regraft.types import Alias


def models_promote(arguments: argparse.Namespace) -> int:
    alias = connect().aliases.promote(arguments.model, arguments.alias)
    return answer(arguments, alias, lambda: alias_text(alias))


def alias_text(alias: Alias) -> str:
    before = f"; before: {alias.previous_model}" if alias.previous_model else ""
    return f"{alias.name}: {alias.model} answers now{before}"


def models_aliases(arguments: argparse.Namespace) -> int:
    client = connect()
    for name in arguments.delete:
        client.aliases.delete(name)
    listed = list(client.aliases.list(limit=100))
    rows = [
        [
            f"{one.name} (hidden by a model of the registry)" if one.hidden else one.name,
            one.model,
            one.previous_model or "-",
            when(one.updated_at),
        ]
        for one in listed
    ]
    return answer(arguments, listed, lambda: table(["alias", "model", "previous", "changed"], rows))


def chat(arguments: argparse.Namespace) -> int:
    if arguments.system and arguments.like:
        raise Refused("--system and --like exclude each other: a row has its own messages.")
    messages: list[Any] = [{"role": "system", "content": arguments.system}] if arguments.system else []
    asked = None
    if arguments.like:
        *messages, asked = _messages_of_row(arguments.like)
    options: dict[str, Any] = {"model": arguments.model}
    if arguments.temperature is not None:
        options["temperature"] = arguments.temperature
    if arguments.max_tokens is not None:
        options["max_completion_tokens"] = arguments.max_tokens
    own = [asked["content"]] if asked is not None and arguments.prompt is None else None
    for prompt in own or _prompts(arguments):
        messages.append({"role": "user", "content": prompt})
        if arguments.output == "json":
            print_json(connect().chat.completions.create(messages=messages, **options))
            return DONE
        messages.append({"role": "assistant", "content": _spoken(messages, options)})
    return DONE


def _messages_of_row(place: str) -> list[Any]:
    """The messages of a row up to its last one of the user.

    Args:
        place: a file of rows, with or without `:LINE`; the first row without.
    """
    name, _, line = place.rpartition(":")
    path, number = (Path(name), int(line)) if name and line.isdecimal() else (Path(place), None)
    with path.open("rb") as file:
        for row in read_objects(iter(lambda: file.read(1 << 18), b"")):
            at = row.line if isinstance(row, LineError) else row[0]
            if number not in (None, at):
                continue
            if isinstance(row, LineError):
                raise Refused(f"{path}: {row}")
            return _prompt_of(row[1], f"{path}:{at}")
    raise Refused(f"{path} has no row {number or 1}.")


def _prompt_of(row: Mapping[str, Any], place: str) -> list[Any]:
    given = row.get("input")
    found = given.get("messages") if isinstance(given, Mapping) else row.get("messages")
    messages = [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []
    while messages and messages[-1].get("role") != "user":
        messages.pop()
    if not messages:
        raise Refused(f"{place} has no messages with one of the user.")
    return messages


def _prompts(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.prompt is not None:
        yield arguments.prompt
    elif sys.stdin.isatty():
        say("Ctrl-D ends the conversation.")
        while True:
            try:
                prompt = input("> ")
            except EOFError:
                return
            if prompt.strip():
                yield prompt
    else:
        prompt = sys.stdin.read()
        if not prompt.strip():
            raise Refused("No prompt: pass a text or use stdin.")
        yield prompt


def _spoken(messages: list[Any], options: dict[str, Any]) -> str:
    said = ""
    model = f"{options['model']}, which the server may have to load"
    with (
        Waiting(sys.stderr, model) as waiting,
        connect().chat.completions.create(messages=messages, stream=True, **options) as stream,
    ):
        try:
            for chunk in stream:
                waiting.end()
                piece = (chunk.choices[0].delta.content or "") if chunk.choices else ""
                said += piece
                print(piece, end="", flush=True)
        finally:
            print()  # also on errors, which are printed on their own line
    return said
