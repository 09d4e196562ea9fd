"""Shell completion scripts, generated from the parser."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """The possible words after the commands in `path`."""

    path: tuple[str, ...]
    commands: Sequence[tuple[str, str]]  # name, help
    options: Sequence[tuple[str, str]]
    choices: Sequence[str]  # of positional arguments


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    places = list(_places(parser, ()))
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](places)


def _places(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> Iterator[Place]:
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
    yield Place(path, commands, options, choices)
    for sub, where in below:
        yield from _places(sub, where)


def _words(place: Place) -> str:
    names = [name for name, _ in (*place.commands, *place.options)]
    return " ".join([*names, *place.choices])


def _cases(places: Sequence[Place]) -> str:
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


def _find(places: Sequence[Place]) -> str:
    known = "|".join(f'"{" ".join(place.path)}"' for place in places if place.path)
    return _FIND.format(known=known, cases=_cases(places))


def _bash(places: Sequence[Place]) -> str:
    return (
        "# bash completion for regraft\n"
        "_regraft() {\n"
        '  local typed=("${COMP_WORDS[@]:1:COMP_CWORD-1}") current="${COMP_WORDS[COMP_CWORD]}"\n'
        f"{_find(places)}"
        '  COMPREPLY=($(compgen -W "$words" -- "$current"))\n'
        "}\n"
        "complete -o default -F _regraft regraft\n"
    )


def _zsh(places: Sequence[Place]) -> str:
    return (
        "#compdef regraft\n"
        "_regraft() {\n"
        '  local typed=("${words[@]:1:$((CURRENT-2))}")\n'
        f"{_find(places).replace(' words=', ' offers=')}"
        "  compadd -- ${=offers}\n"
        "  _files\n"
        "}\n"
        "compdef _regraft regraft\n"
    )


def _fish(places: Sequence[Place]) -> str:
    lines = ["# fish completion for regraft"]
    for place in places:
        below = " ".join(name for name, _ in place.commands)
        seen = [f"__fish_seen_subcommand_from {name}" for name in place.path]
        if below:
            seen.append(f"not __fish_seen_subcommand_from {below}")
        condition = "; and ".join(seen) or "true"
        for name, text in place.commands:
            lines.append(f"complete -c regraft -f -n {_quoted(condition)} -a {name} -d {_quoted(text)}")
        for name, text in place.options:
            lines.append(f"complete -c regraft -n {_quoted(condition)} -l {name[2:]} -d {_quoted(text)}")
        if place.choices:
            choices = _quoted(" ".join(place.choices))
            lines.append(f"complete -c regraft -f -n {_quoted(condition)} -a {choices}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
