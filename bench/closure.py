"""How much a reader of worker/run.py could be led to: the files of ours that are loaded with it.

    python -m bench.closure [MODULE]

Prints each module with one that loads it, then one JSON line. What only a type checker or a function imports is not
counted: a module is loaded without it.
"""

import ast
import json
import sys
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("api", "core", "graders", "worker")


@cache
def modules() -> dict[str, Path]:
    """All modules of the service by their dotted names; a package has its own, without `__init__`."""
    files = (file for room in ROOMS for file in (ROOT / room).rglob("*.py"))
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for file in files
    }


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def loaded_by(module: str) -> frozenset[str]:
    """The modules that a module imports when it is loaded: not inside functions, and not for types alone."""
    file = modules().get(module)
    if file is None:
        return frozenset()
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]

    def visit(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                above = package[: len(package) + 1 - child.level] if child.level else []
                source = ".".join([*above, *filter(None, [child.module])])
                full = [f"{source}.{alias.name}" for alias in child.names]
                yield from (name if name in modules() else source for name in full)
            yield from visit(child)

    return frozenset(visit(tree_of(file)))


def loaders(start: str) -> dict[str, str]:
    """All modules of ours that are loaded with `start`, each with one that loads it; "" for the start.

    Packages are loaded before the modules in them; those without content are left out.
    """
    found, waiting = {start: ""}, deque([start])
    while waiting:
        module = waiting.popleft()
        for name in sorted(loaded_by(module)):
            parts = name.split(".")
            for one in (".".join(parts[:length]) for length in range(len(parts), 0, -1)):
                if one in modules() and one not in found and tree_of(modules()[one]).body:
                    found[one] = module
                    waiting.append(one)
    return found


def figures(start: str) -> dict[str, int]:
    files = [modules()[module] for module in loaders(start)]
    return {
        "files": len(files),
        "lines": sum(len(file.read_text().splitlines()) for file in files),
        "classes": sum(isinstance(node, ast.ClassDef) for file in files for node in ast.walk(tree_of(file))),
    }


def main() -> None:
    start = sys.argv[1] if len(sys.argv) > 1 else "worker.run"
    for module, loader in loaders(start).items():
        print(f"{module:45} {loader}")
    print(json.dumps({"bench": "closure", "figures": figures(start)}))


if __name__ == "__main__":
    main()
