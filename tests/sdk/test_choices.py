"""The choices of the command line are those of the server, or of the code that reads them."""

import argparse
from collections.abc import Iterator
from typing import get_args

import pytest
from regraft import literals
from regraft._rules.command_line import NO_IDS, SHELLS, id_type
from regraft._rules.foreign_files import Target
from regraft.cli.parser import build
from regraft.starters import KINDS

OF_THE_SERVER = {
    get_args(value) for name, value in vars(literals).items() if name[0].isupper() and get_args(value)
}
OF_THE_CLIENT = {("text", "json"), tuple(SHELLS), tuple(KINDS), get_args(Target)}


# Arguments that are no part of a path: those of files are paths of this machine.
NO_ID = {"model", "prompt", "function", "formula", "text"}
# Placeholders of the values of options that are no part of a path. Of models and graders: part of a body or a query.
NO_IDS_OF_OPTIONS = {
    *("TEXT", "TEMPLATE", "JSON", "URL", "HOST:PORT", "FILE[:LINE]", "WHAT", "KIND", "CODE", "STAGE"),
    *("NAME", "MODEL", "FIELD=VALUE", "NAME=FIELD", "NAME=VALUES", "FINGERPRINT"),
}


def arguments(parser: argparse.ArgumentParser, command: str) -> Iterator[tuple[str, argparse.Action]]:
    """The arguments of all commands that take a value but have no choices, each as `regraft jobs show job_id`."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from arguments(below, f"{command} {name}")
        elif not action.choices and action.nargs != 0:
            yield f"{command} {action.dest}", action


def test_ids_of_all_commands_are_checked_before_a_path_is_made_of_them() -> None:
    """openai's client raises a ValueError without a remedy for an id such as "..", and for an empty one."""
    texts = {name: one for name, one in arguments(build(), "regraft") if one.type in (None, id_type)}

    unchecked = {name: one for name, one in texts.items() if one.type is not id_type}

    assert {name.rpartition(" ")[2] for name, one in unchecked.items() if not one.option_strings} <= NO_ID
    assert {one.metavar for one in unchecked.values() if one.option_strings} <= NO_IDS_OF_OPTIONS
    assert len(texts) - len(unchecked) > 45


@pytest.mark.parametrize(
    "words",
    [
        ["evals", "gate", "eval_1", "evalrun_1", "--baseline", ".."],
        ["files", "profile", "file-abc", "--validation-file", ".."],
        ["models", "promote", "ft:tiny", "--as", ".."],
        ["models", "aliases", "--delete", ".."],
        ["graders", "cases", "close", "--delete", ".."],
    ],
)
def test_what_is_no_id_is_refused_in_an_option_too(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        build().parse_args(words)

    assert "'..' is not an id or a name." in capsys.readouterr().err


@pytest.mark.parametrize("text", NO_IDS)
def test_what_is_no_id_is_refused_with_a_sentence(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        build().parse_args(["jobs", "show", text])

    assert ended.value.code == 2
    assert f"argument JOB: {text!r} is not an id or a name." in capsys.readouterr().err


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
