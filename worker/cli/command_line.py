"""What both command lines share: suggestions for misspelled words, and shell completion scripts.

Imports nothing but the standard library. The client has a link to this file (sdk/regraft/_rules).
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

SHELLS = ("bash", "zsh", "fish")


class Parser(argparse.ArgumentParser):
    """Names the command, choice or option that a misspelled one may mean."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = action.choices
        if choices is not None and value not in choices and (near := _near(str(value), map(str, choices))):
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; did you mean {near!r}?")
        super()._check_value(action, value)  # lists all choices

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options here, where those of the command are known. Its parent would refuse them later."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return known, unknown

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        options = [name for name in self._option_string_actions if name.startswith("--")]
        written = next((word.partition("=")[0] for word in unknown if word.startswith("--")), "")
        near = _near(written, options)
        self.error(f"unrecognized arguments: {' '.join(unknown)}{f'; did you mean {near}?' if near else ''}")


def _near(word: str, known: Iterable[str]) -> str | None:
    return next(iter(get_close_matches(word, list(known), n=1, cutoff=0.6)), None)


@dataclass(frozen=True)
class CompletionPoint:
    """The possible words after the commands in `path`."""

    path: tuple[str, ...]
    commands: Sequence[tuple[str, str]]  # name, help
    options: Sequence[tuple[str, str]]
    choices: Sequence[str]  # of positional arguments


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The completion script of the parser's program for one of SHELLS."""
    places = list(_places(parser, ()))
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](places, parser.prog)


def _places(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> Iterator[CompletionPoint]:
    commands: list[tuple[str, str]] = []
    options: list[tuple[str, str]] = []
    choices: list[str] = []
    below: list[tuple[argparse.ArgumentParser, tuple[str, ...]]] = []
    for action in parser._actions:  # argparse has no public API for this
        if isinstance(action, argparse._SubParsersAction):
            helps = {one.dest: one.help or "" for one in action._choices_actions}
            for name, sub in action.choices.items():
                commands.append((name, helps.get(name, "")))
                below.append((sub, (*path, name)))
        elif action.option_strings:
            options += [(name, action.help or "") for name in action.option_strings if name.startswith("--")]
        elif action.choices:
            choices += [str(choice) for choice in action.choices]
    yield CompletionPoint(path, commands, options, choices)
    for sub, where in below:
        yield from _places(sub, where)


def _words(place: CompletionPoint) -> str:
    names = [name for name, _ in (*place.commands, *place.options)]
    return " ".join([*names, *place.choices])


def _cases(places: Sequence[CompletionPoint]) -> str:
    return "\n".join(f'    "{" ".join(place.path)}") words="{_words(place)}" ;;' for place in places)


# Words that are known commands extend the place; all others are arguments.
_FIND = """  local place="" words="" word
  for word in "${{typed[@]}}"; do
    case "${{place:+$place }}$word" in
      {known}) place="${{place:+$place }}$word" ;;
    esac
  done
  case "$place" in
{cases}
  esac
"""


def _find(places: Sequence[CompletionPoint]) -> str:
    known = "|".join(f'"{" ".join(place.path)}"' for place in places if place.path)
    return _FIND.format(known=known, cases=_cases(places))


def _function(program: str) -> str:
    return f"_{program.replace('-', '_')}"


def _bash(places: Sequence[CompletionPoint], program: str) -> str:
    function = _function(program)
    return (
        f"# bash completion for {program}\n"
        f"{function}() {{\n"
        '  local typed=("${COMP_WORDS[@]:1:COMP_CWORD-1}") current="${COMP_WORDS[COMP_CWORD]}"\n'
        f"{_find(places)}"
        '  COMPREPLY=($(compgen -W "$words" -- "$current"))\n'
        "}\n"
        f"complete -o default -F {function} {program}\n"
    )


def _zsh(places: Sequence[CompletionPoint], program: str) -> str:
    function = _function(program)
    return (
        f"#compdef {program}\n"
        f"{function}() {{\n"
        '  local typed=("${words[@]:1:$((CURRENT-2))}")\n'
        f"{_find(places).replace(' words=', ' offers=')}"
        "  compadd -- ${=offers}\n"
        "  _files\n"
        "}\n"
        f"compdef {function} {program}\n"
    )


def _fish(places: Sequence[CompletionPoint], program: str) -> str:
    lines = [f"# fish completion for {program}"]
    for place in places:
        below = " ".join(name for name, _ in place.commands)
        seen = [f"__fish_seen_subcommand_from {name}" for name in place.path]
        if below:
            seen.append(f"not __fish_seen_subcommand_from {below}")
        condition = "; and ".join(seen) or "true"
        for name, text in place.commands:
            lines.append(f"complete -c {program} -f -n {_quoted(condition)} -a {name} -d {_quoted(text)}")
        for name, text in place.options:
            lines.append(f"complete -c {program} -n {_quoted(condition)} -l {name[2:]} -d {_quoted(text)}")
        if place.choices:
            choices = _quoted(" ".join(place.choices))
            lines.append(f"complete -c {program} -f -n {_quoted(condition)} -a {choices}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
