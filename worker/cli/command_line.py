"""What both command lines share: how commands are declared, suggestions for misspelled words, and shell completion.

Imports nothing but the standard library. The client has a link to this file (sdk/regraft/_rules).
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

SHELLS = ("bash", "zsh", "fish")
# No ids or names: a path of the API would drop them.
NO_IDS = ("", ".", "..")


def id_type(text: str) -> str:
    """The id or name of a resource.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if text in NO_IDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not an id or a name.")
    return text


# The type of a value by its placeholder; other values are text.
TYPES: Mapping[str, Callable[[str], Any]] = {
    "N": int,
    **dict.fromkeys(("X", "T", "RATE", "HOURS"), float),
    **dict.fromkeys(("FILE", "FOLDER", "DIR", "JOB", "CASES", "PIPELINE"), Path),
    **dict.fromkeys(("ID", "FILE_ID", "CHECKPOINT", "RUN", "CASE", "ALIAS"), id_type),
    **dict.fromkeys(("NAME[@VERSION]", "VERSION", "FIRST", "SECOND", "OTHER"), id_type),
}


@dataclass(frozen=True)
class Argument:
    flags: Sequence[str]
    options: Mapping[str, Any]

    def add_to(self, parser: Any) -> None:
        parser.add_argument(*self.flags, **self.options)


@dataclass(frozen=True)
class Exclusive:
    """Options of which at most one can be given."""

    arguments: Sequence[Argument]

    def add_to(self, parser: Any) -> None:
        group = parser.add_mutually_exclusive_group()
        for argument in self.arguments:
            argument.add_to(group)


def arg(flags: str, metavar: str | None = None, help: str | None = None, **more: Any) -> Argument:
    """`-f --file`, or the name of a positional argument; without a metavar one of `choices`, or a switch."""
    assert metavar or "choices" in more or flags.startswith("-"), f"{flags} would be a switch without a flag"
    if metavar is None and "choices" not in more:
        more = {"action": "store_true"} | more
    elif metavar and metavar in TYPES:
        more = {"type": TYPES[metavar]} | more
    return Argument(flags.split(), more | {"help": help} | ({} if metavar is None else {"metavar": metavar}))


def id_of(name: str) -> Argument:
    """The id or name of a resource."""
    return Argument([name], {"metavar": name.removesuffix("_id").upper(), "type": id_type})


def either(*arguments: Argument) -> Exclusive:
    return Exclusive(arguments)


class Command:
    """A command with its arguments; a text is the id or name of a resource."""

    def __init__(
        self, name: str, summary: str, *arguments: Argument | Exclusive | str, epilog: str | None = None
    ) -> None:
        self.name, self.summary, self.epilog = name, summary, epilog
        self.arguments = [id_of(one) if isinstance(one, str) else one for one in arguments]

    def add_to(self, commands: Any) -> Any:
        """Add the command's parser, and return it."""
        parser = commands.add_parser(
            self.name,
            help=self.summary,
            description=self.summary[0].upper() + self.summary[1:] + ".",
            epilog=self.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for argument in self.arguments:
            argument.add_to(parser)
        return parser


class Group(Command):
    """Commands below a name. The arguments' attribute `dest` is the name of the chosen one."""

    def __init__(self, name: str, summary: str, *commands: Command, dest: str | None = None) -> None:
        super().__init__(name, summary)
        self.commands: Sequence[Command] = commands
        self.dest = dest

    def add_to(self, commands: Any) -> Any:
        parser = super().add_to(commands)
        add_all(parser, self.commands, self.dest)
        return parser


def add_all(parser: argparse.ArgumentParser, commands: Iterable[Command], dest: str | None = None) -> None:
    # Without a dest in its options, argparse would set an attribute of another name.
    below = parser.add_subparsers(
        metavar="COMMAND", required=True, **({} if dest is None else {"dest": dest})
    )
    for command in commands:
        command.add_to(below)


def version_of(distribution: str) -> type[argparse.Action]:
    """The action of `--version`. It reads the version of the installed package only when the option is used."""

    class Version(argparse.Action):
        def __init__(self, option_strings: list[str], dest: str) -> None:
            super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

        def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
            from importlib.metadata import version  # takes 30 ms, which would slow down --help

            print(f"{distribution} {version(distribution)}")
            parser.exit()

    return Version


def completion_of(program: str, build: Callable[[], argparse.ArgumentParser]) -> Command:
    """The command that prints a completion script for the parser that `build` returns."""

    class Completion(argparse.Action):
        def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, *args: Any) -> None:
            print(script(build(), values), end="")
            parser.exit()

    path = f"~/.local/share/bash-completion/completions/{program}"
    return Command(
        "completion",
        "print a shell completion script",
        arg("shell", choices=SHELLS, action=Completion),
        epilog=f"example:\n  {program} completion bash > {path}",
    )


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
    known = list(known)
    begun = [name for name in known if len(word) >= 3 and name.startswith(word)]
    if len(begun) == 1:  # the first word of a longer name, such as `migrate`
        return begun[0]
    # One wrong letter is half of a word of two, such as `uo`.
    return next(iter(get_close_matches(word, known, n=1, cutoff=0.5 if len(word) <= 2 else 0.6)), None)


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
