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
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("api", "core", "graders", "worker")


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@dataclass(frozen=True)
class Imports:
    """The modules of the service in a checkout, and what each of them imports."""

    root: Path = ROOT

    @cached_property
    def modules(self) -> dict[str, Path]:
        """All modules by their dotted names; a package has its own, without `__init__`."""
        files = (file for package in PACKAGES for file in (self.root / package).rglob("*.py"))
        return {
            ".".join(file.relative_to(self.root).with_suffix("").parts).removesuffix(".__init__"): file
            for file in files
        }

    @cached_property
    def _loaded(self) -> dict[str, frozenset[str]]:
        return {module: frozenset(self._imports(module)) for module in self.modules}

    def loaded_by(self, module: str) -> frozenset[str]:
        """The modules that a module imports when it is loaded: not inside functions, and not for types alone."""
        return self._loaded.get(module, frozenset())

    def _imports(self, module: str) -> Iterator[str]:
        file = self.modules[module]
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
                    yield from (name if name in self.modules else source for name in full)
                yield from visit(child)

        return visit(tree_of(file))

    def loaders(self, start: str) -> dict[str, str]:
        """All modules of ours that are loaded with `start`, each with one that loads it; "" for the start.

        Packages are loaded before the modules in them; those without content are left out.
        """
        loader_of, waiting = {start: ""}, deque([start])
        while waiting:
            module = waiting.popleft()
            for name in sorted(self.loaded_by(module)):
                parts = name.split(".")
                for loaded in (".".join(parts[:length]) for length in range(len(parts), 0, -1)):
                    file = self.modules.get(loaded)
                    if file is not None and loaded not in loader_of and tree_of(file).body:
                        loader_of[loaded] = module
                        waiting.append(loaded)
        return loader_of

    def figures(self, start: str) -> dict[str, int]:
        files = [self.modules[module] for module in self.loaders(start)]
        return {
            "files": len(files),
            "lines": sum(len(file.read_text().splitlines()) for file in files),
            "classes": sum(
                isinstance(node, ast.ClassDef) for file in files for node in ast.walk(tree_of(file))
            ),
        }


def main() -> None:
    start = sys.argv[1] if len(sys.argv) > 1 else "worker.run"
    imports = Imports()
    for module, loader in imports.loaders(start).items():
        print(f"{module:45} {loader}")
    print(json.dumps({"bench": "closure", "figures": imports.figures(start)}))


if __name__ == "__main__":
    main()
