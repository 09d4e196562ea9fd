"""Figures of the code for its readers: sizes, long functions, imports that run up, and repeated lines.

    python -m bench.codebase [--before REVISION]

Prints one row for each figure, with those of an earlier revision beside those of the working tree, then one JSON line.
tests/test_architecture.py keeps bounds of the figures that must not grow.
"""

import argparse
import ast
import io
import json
import re
import subprocess
import tarfile
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path

from bench.closure import ROOT, Imports, tree_of

PRODUCT = ("api", "core", "graders", "migrations", "regraft_server", "sdk", "worker")
# Written by `make docs` from the asynchronous client and from openapi.json.
GENERATED = ("sdk/regraft/sync", "sdk/regraft/types.py", "sdk/regraft/literals.py")
LONG_FUNCTION = 50
REPEATED_LINES = 20
STEP_PAGE = Path("docs/contribute/index.md")
STEP_SECTION = "One step of GRPO"
# Words in identifiers that a reader has to decode. The field has another for each of them.
PRIVATE_WORDS = frozenset(
    "one found part parts place places asked held shown kept turns passed ahead silent taught".split()
)


@dataclass(frozen=True)
class LongFunction:
    place: str  # file:line name
    lines: int
    code_lines: int  # without signature and docstring


@dataclass(frozen=True)
class Codebase:
    """The Python files of a checkout. Links are not counted: their files are elsewhere in it."""

    root: Path = ROOT

    @cached_property
    def imports(self) -> Imports:
        return Imports(self.root)

    def files(self, *folders: str) -> list[Path]:
        files = (file for folder in folders for file in sorted((self.root / folder).rglob("*.py")))
        return [file for file in files if not file.is_symlink() and not file.parent.is_symlink()]

    @cached_property
    def product(self) -> list[Path]:
        """Files that are installed, without generated ones."""
        generated = [self.root / name for name in GENERATED]
        return [
            file for file in self.files(*PRODUCT) if not any(file.is_relative_to(path) for path in generated)
        ]

    def long_functions(self) -> list[LongFunction]:
        """Functions of the product with more lines than LONG_FUNCTION. A migration is one by nature."""
        functions = [
            LongFunction(
                f"{file.relative_to(self.root)}:{node.lineno} {node.name}",
                _lines(node),
                _lines(node) - (_code(node)[0].lineno - node.lineno),
            )
            for file in self.product
            if not file.is_relative_to(self.root / "migrations")
            for node in ast.walk(tree_of(file))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _lines(node) > LONG_FUNCTION
        ]
        return sorted(functions, key=lambda function: function.lines, reverse=True)

    def upward_imports(self, package: str) -> list[tuple[str, str]]:
        """The imports between the rooms of a package that run up, as (importer, imported).

        A room is a module or a folder of the package. Rooms are ordered so that as few imports as possible run up;
        none does if the rooms can be ordered at all.
        """
        imports: defaultdict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
        for module in self.imports.modules:
            for other in self.imports.loaded_by(module):
                inside = other in self.imports.modules and other.startswith(f"{package}.")
                if module.startswith(f"{package}.") and inside and _room(other) != _room(module):
                    imports[_room(module), _room(other)].append((module, other))
        weights = {rooms: len(pairs) for rooms, pairs in imports.items()}
        heights = {
            room: height
            for circle in _circles(weights)
            for height, room in enumerate(_lowest_first(circle, weights))
        }
        upward = [
            (room, other)
            for room, other in imports
            if room in _reachable(other, weights) and heights[room] < heights[other]
        ]
        return sorted(pair for rooms in upward for pair in imports[rooms])

    def private_words(self) -> Counter[str]:
        """How often each of PRIVATE_WORDS is a word of an identifier, in the service's packages."""
        return Counter(
            word
            for file in self.files("api", "core", "graders", "worker")
            for name in _identifiers(file)
            for word in _words(name)
            if word in PRIVATE_WORDS
        )

    def repeated(self, *folders: str) -> list[tuple[str, str]]:
        """Pairs of places with REPEATED_LINES equal lines of code: one for each pair of files.

        Blank lines, comments and imports are passed over.
        """
        seen: defaultdict[int, list[tuple[Path, int]]] = defaultdict(list)
        generated = [self.root / name for name in GENERATED]
        for file in self.files(*folders):
            if any(file.is_relative_to(path) for path in generated):
                continue
            lines = _code_lines(file)
            for start in range(len(lines) - REPEATED_LINES + 1):
                window = lines[start : start + REPEATED_LINES]
                seen[hash(tuple(text for _, text in window))].append((file, window[0][0]))
        pairs: dict[tuple[Path, Path], tuple[str, str]] = {}
        for places in seen.values():
            for (file, line), (other, other_line) in combinations(places, 2):
                if file != other or other_line - line >= REPEATED_LINES:
                    pairs.setdefault((file, other), (self._place(file, line), self._place(other, other_line)))
        return sorted(pairs.values())

    def step_files(self) -> list[str]:
        """The files that the contributors' page lists for one step of GRPO; none where it has no such list."""
        page = self.root / STEP_PAGE
        if not page.exists():
            return []
        [_, *section] = page.read_text().partition(f"## {STEP_SECTION}\n")[1:]
        return re.findall(r"^\d+\. `([\w/]+\.py)`", section[0].partition("\n## ")[0], flags=re.M)

    def figures(self) -> dict[str, int]:
        closure = self.imports.figures("worker.run")
        words = self.private_words()
        return {
            "product_lines": _count_lines(self.product),
            "test_lines": _count_lines(self.files("tests")),
            "bench_lines": _count_lines(self.files("bench")),
            **{f"loop_{name}": value for name, value in closure.items()},
            "functions_over_50_lines": len(self.long_functions()),
            "functions_over_50_lines_of_code": sum(
                function.code_lines > LONG_FUNCTION for function in self.long_functions()
            ),
            "files_of_one_step": len(self.step_files()),
            "private_words_in_identifiers": words.total(),
            "upward_imports_worker": len(self.upward_imports("worker")),
            "upward_imports_core": len(self.upward_imports("core")),
            "upward_imports_api": len(self.upward_imports("api")),
            "repeated_in_product": len(self.repeated(*PRODUCT)),
            "repeated_in_tests": len(self.repeated("tests")),
        }

    def _place(self, file: Path, line: int) -> str:
        return f"{file.relative_to(self.root)}:{line}"


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _code(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    """The statements of a function after its docstring, if it has others."""
    return node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body


def _count_lines(files: Sequence[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def _room(module: str) -> str:
    return module.split(".")[1]


def _reachable(start: str, weights: Mapping[tuple[str, str], int]) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        room = waiting.pop()
        below = {lower for upper, lower in weights if upper == room} - reached
        reached |= below
        waiting += below
    return reached


def _circles(weights: Mapping[tuple[str, str], int]) -> set[frozenset[str]]:
    """The groups of rooms each of which leads to all others of its group."""
    rooms = {room for pair in weights for room in pair}
    reached = {room: _reachable(room, weights) for room in rooms}
    circles = {frozenset(other for other in reached[room] if room in reached[other]) for room in rooms}
    return {circle for circle in circles if len(circle) > 1}


def _lowest_first(circle: frozenset[str], weights: Mapping[tuple[str, str], int]) -> list[str]:
    """The order of rooms, the lowest first, in which the fewest imports run up: the best one of each set of rooms.

    `costs[chosen]` is that of the best order in which the rooms of the bits `chosen` are the lowest.
    """
    rooms = sorted(circle)
    costs: dict[int, tuple[int, list[str]]] = {0: (0, [])}
    for chosen in range(2 ** len(rooms) - 1):
        cost, order = costs.pop(chosen)
        for bit, room in enumerate(rooms):
            if not chosen >> bit & 1:
                more = cost + sum(weights.get((lower, room), 0) for lower in order)
                if chosen | 1 << bit not in costs or more < costs[chosen | 1 << bit][0]:
                    costs[chosen | 1 << bit] = (more, [*order, room])
    [(_, order)] = costs.values()
    return order


def _identifiers(file: Path) -> Iterator[str]:
    with tokenize.open(file) as source:
        tokens = tokenize.generate_tokens(source.readline)
        yield from (token.string for token in tokens if token.type == tokenize.NAME)


def _words(name: str) -> list[str]:
    """The words of an identifier: of `parts_of` and of `PartsOf`."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)]


def _code_lines(file: Path) -> list[tuple[int, str]]:
    """The lines of a file with their numbers and without indentation, but no blank ones, comments and imports."""
    tree = tree_of(file)
    imported = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = [(number, line.strip()) for number, line in enumerate(file.read_text().splitlines(), start=1)]
    return [
        (number, text)
        for number, text in lines
        if re.search(r"\w", text) and not text.startswith("#") and number not in imported
    ]


def figures_of(revision: str) -> dict[str, int]:
    """Those of an earlier revision, which git has."""
    archive = subprocess.run(
        ["git", "archive", revision, "--", "*.py", "docs"], cwd=ROOT, capture_output=True, check=True
    )
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        return Codebase(Path(folder)).figures()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", metavar="REVISION", help="a revision of git for the first column")
    before = parser.parse_args().before
    columns = {"now": Codebase().figures()}
    if before:
        columns = {before: figures_of(before)} | columns
    print("".join(f"| {title} " for title in ("figure", *columns)) + "|")
    print("|---" * (1 + len(columns)) + "|")
    for name in columns["now"]:
        print("".join(f"| {cell} " for cell in (name, *(column[name] for column in columns.values()))) + "|")
    print(json.dumps({"bench": "codebase", "figures": columns["now"]}))


if __name__ == "__main__":
    main()
