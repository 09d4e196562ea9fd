"""Searches the product's regular expressions for those that take more than linear time.

    python -m tests.patterns    prints a JSON list with a sentence for each such pattern

The attacks on a pattern come from its own parts: each run of neighboring parts is spelled out and repeated, after what
the parts before it match. A pattern is slow if one takes more than three times as long when it is twice as long.
"""

import ast
import importlib
import json
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import regex

# The standard library has no public parser of patterns.
codes: Any = importlib.import_module("re._constants")
parser: Any = importlib.import_module("re._parser")
compiler: Any = importlib.import_module("re._compiler")

ROOT = Path(__file__).parents[1]
PACKAGES = ("api", "core", "graders", "worker", "sdk/regraft")
FUNCTIONS = {"match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer"}
ANCHORED = {"match", "fullmatch"}
# Characters that classes of patterns contain or exclude.
SIGNS = "aZé7_ \n\t\r-.,:;=<>[](){}\"'/\\@&?#*|+%!\x1b"
LENGTH = 12_000  # of the shortest attack
SUSPICIOUS_S = 0.004  # of that; most patterns take a tenth
LIMIT_S = 0.3  # of processor time

_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)

AnyPattern: TypeAlias = re.Pattern[Any] | regex.Pattern[Any]


@dataclass(frozen=True)
class Used:
    """A pattern, where it is written, and the functions that it is used with."""

    place: str
    pattern: AnyPattern
    functions: frozenset[str]

    @property
    def runs(self) -> Sequence[Callable[[str], object]]:
        if self.functions <= ANCHORED:
            return [getattr(self.pattern, name) for name in sorted(self.functions)]
        return [lambda text: sum(1 for _ in self.pattern.finditer(text))]


def product_files() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (file for file in sorted((ROOT / package).rglob("*.py")) if not file.is_symlink())


def collect() -> tuple[list[Used], list[str]]:
    """The patterns of the product, and the places of those that are made only when they are used."""
    found: dict[tuple[str, int], Used] = {}
    made_later: list[str] = []
    for file in product_files():
        tree = ast.parse(file.read_text())
        place = str(file.relative_to(ROOT))
        for name, pattern in _of_module(file, tree):
            functions = {one.attr for one in _attributes(tree) if ast.unparse(one.value) == name}
            _add(found, Used(f"{place}: {name}", pattern, frozenset(functions & FUNCTIONS)))
        for call in _calls(tree, FUNCTIONS | {"compile"}):
            literal = call.args[0]
            if isinstance(literal, ast.Constant):
                flags = [ast.unparse(one) for one in (*call.args, *(word.value for word in call.keywords))]
                given = "|".join(one for one in flags if re.fullmatch(r"re(gex)?\.[A-Z]+(\|.*)?", one)) or "0"
                module, function = ast.unparse(call.func).split(".")
                pattern = {"re": re, "regex": regex}[module].compile(literal.value, eval(given))
                names = {function} - {"compile"}
                _add(found, Used(f"{place}:{call.lineno}", pattern, frozenset(names)))
            elif not _is_global(tree, call):
                made_later.append(f"{place}: {ast.unparse(literal)}")
    return list(found.values()), made_later


def _add(found: dict[tuple[str, int], Used], used: Used) -> None:
    """A pattern of a module is found by its name first, with its functions, and then as a literal."""
    found.setdefault((used.pattern.pattern, used.pattern.flags), used)


def _of_module(file: Path, tree: ast.Module) -> Iterator[tuple[str, AnyPattern]]:
    """The patterns among the global names of a module, also inside of tuples and mappings."""
    if not any(_is_global(tree, call) for call in _calls(tree, {"compile"})):
        return
    parts = file.relative_to(ROOT).with_suffix("").parts
    module = importlib.import_module(".".join(parts).removeprefix("sdk.").removesuffix(".__init__"))
    for name, value in vars(module).items():
        yield from ((name, pattern) for pattern in _patterns(value))


def _patterns(value: object) -> Iterator[AnyPattern]:
    if isinstance(value, re.Pattern | regex.Pattern):
        yield value
    elif isinstance(value, tuple | list | Mapping):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _patterns(part)


def _calls(tree: ast.AST, names: set[str]) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        if node.func.attr in names and ast.unparse(node.func.value) in ("re", "regex"):
            yield node


def _is_global(tree: ast.Module, call: ast.Call) -> bool:
    return any(
        call is node
        for statement in tree.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for node in ast.walk(statement)
    )


def _attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def slow_attack(used: Used) -> str | None:
    """A sentence about an attack that takes more than linear time; None: there is none."""
    for prefix, part, suffix in attacks(used.pattern):
        for run in used.runs:

            def seconds(length: int, prefix: str = prefix, part: str = part, suffix: str = suffix) -> float:
                return _seconds(run, prefix + part * (length // len(part)) + suffix)  # noqa: B023

            if (once := seconds(LENGTH)) < SUSPICIOUS_S or (twice := seconds(2 * LENGTH)) < _slow(once):
                continue
            if (longest := seconds(4 * LENGTH)) >= _slow(twice):
                return (
                    f"{used.place}: {used.pattern.pattern!r} takes {longest:.2f} s for {4 * LENGTH:,} characters: "
                    f"{prefix!r}, then {part!r} again and again, then {suffix!r}"
                )
    return None


def _slow(half: float) -> float:
    """The seconds for a text that is too slow, given those for its half."""
    return min(3 * half, LIMIT_S)


def attacks(pattern: AnyPattern) -> list[tuple[str, str, str]]:
    """Texts to begin with, to repeat, and to end with."""
    found = {("", sign, end) for sign in SIGNS for end in ("", "\0")}
    if isinstance(pattern, regex.Pattern):  # whose syntax only that package reads
        return sorted(found | {("", one + other, "") for one in SIGNS for other in SIGNS})
    parsed = list(parser.parse(pattern.pattern, pattern.flags))
    spell = _Speller(parsed)
    for before, items in spell.sequences(parsed, ""):
        words = _words(items)
        for number, start in enumerate(words[:-1]):
            prefix = before + spell(items[:start])
            for end in words[number + 1 : number + 6]:
                for _ in range(6):
                    part = spell(items[start:end])
                    found |= {("", part, ""), ("", part, "\0"), (prefix, part, "\0")}
            if start < len(items):
                found |= {(prefix, sign, "\0") for sign in _signs(items[start])}
    return sorted(case for case in found if case[1])


class _Speller:
    """Spells out parts of one pattern: a text that they match, with few repeats."""

    def __init__(self, parsed: Sequence[Any]) -> None:
        self._chance = random.Random(0)
        self._own: set[str] = set()  # the pattern's own characters, which are more often where they matter
        self._own = {
            sign
            for _, items in self.sequences(parsed, "")
            for code, value in items
            if code in (codes.LITERAL, codes.NOT_LITERAL)
            for sign in chr(value)
        }

    def sequences(self, items: Sequence[Any], before: str) -> Iterator[tuple[str, Sequence[Any]]]:
        """Each sequence of parts in a pattern, with a text that the pattern matches before it."""
        yield before, items
        for number, (code, value) in enumerate(items):
            for inner in _inner(code, value):
                yield from self.sequences(list(inner), before + self(items[:number]))

    def __call__(self, items: Sequence[Any]) -> str:
        return "".join(self._one(code, value) for code, value in items)

    def _one(self, code: Any, value: Any) -> str:
        if signs := _signs((code, value)):
            own = [sign for sign in signs if sign in self._own]
            return self._chance.choice(own if own and self._chance.random() < 0.5 else signs)
        inner = _inner(code, value)
        if not inner or code in (codes.ASSERT, codes.ASSERT_NOT):
            return ""
        times = 1
        if code in _REPEATS:
            times = min(value[0] + self._chance.choice((0, 1)), 50, int(value[1]))
        return "".join(self(self._chance.choice(inner)) for _ in range(times))


def _words(items: Sequence[Any]) -> list[int]:
    """Where the parts begin if a run of plain characters is one, and the end."""
    is_plain = [code is codes.LITERAL for code, _ in items]
    inside = [both == (True, True) for both in pairwise(is_plain)]
    return [0, *(number for number, same in enumerate(inside, 1) if not same), len(items)]


def _inner(code: Any, value: Any) -> Sequence[Any]:
    if code in _REPEATS:
        return [value[2]]
    if code is codes.SUBPATTERN:
        return [value[3]]
    if code is codes.ATOMIC_GROUP:
        return [value]
    if code is codes.BRANCH:
        return list(value[1])
    return [value[1]] if code in (codes.ASSERT, codes.ASSERT_NOT) else []


def _signs(item: Any) -> list[str]:
    """Characters that a part of one character matches; none: it is a longer part."""
    code, value = item
    if code is codes.LITERAL:
        return [chr(value)]
    if code not in (codes.NOT_LITERAL, codes.ANY, codes.IN):
        return []
    if code is codes.ANY:
        return list(SIGNS)
    if code is codes.NOT_LITERAL:
        return [sign for sign in SIGNS if ord(sign) != value]
    own = {chr(one) for kind, one in value if kind is codes.LITERAL}
    own |= {chr(end) for kind, one in value if kind is codes.RANGE for end in one}
    tree = parser.SubPattern(parser.State(), [item])
    matches = compiler.compile(tree).fullmatch
    return sorted(sign for sign in own | set(SIGNS) if matches(sign))


class _OutOfTime(Exception):
    pass


def _stop(number: int, frame: FrameType | None) -> None:
    raise _OutOfTime


def _seconds(run: Callable[[str], object], text: str) -> float:
    """Processor time of one call, at most LIMIT_S: both engines look for signals while they search."""
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    start = time.process_time()
    try:
        run(text)
    except _OutOfTime:
        return LIMIT_S
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return time.process_time() - start


def slow_among(patterns: Sequence[Used]) -> list[str]:
    signal.signal(signal.SIGVTALRM, _stop)
    return [attack for used in patterns if (attack := slow_attack(used)) is not None]


def main() -> None:
    patterns, made_later = collect()
    json.dump({"slow": slow_among(patterns), "made_later": made_later, "count": len(patterns)}, sys.stdout)


if __name__ == "__main__":
    main()
