"""The client library's synchronous classes, sdk/regraft/sync/, from the asynchronous ones. `make docs` writes them.

A class Async... of regraft.client or regraft.resources becomes one without `async` and `await`, which imports the rest
of its module. unasync rewrites whole files, so each error and dataclass beside a class would exist twice.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from schemas import ROOT

PACKAGE = ROOT / "sdk"
HEAD = '"""Written by .ci/sync_client.py from {module}; do not edit."""\n\n'
RULES = {
    r"await asyncio\.to_thread\(\s*([\w.]+), ": r"\1(",
    r'"?AsyncPaginator\[\w+, (\w+(?:\[\w+\])?)\]"?': r"\1",
    r"Callable\[\[(\w*)\], Awaitable\[(\w+)\]\]": r"Callable[[\1], \2]",
    r"AsyncGenerator\[(\w+), None\]": r"Generator[\1, None, None]",
    r"\basyncio\.sleep\b": "time.sleep",
    r"\basyncio\.CancelledError\b": "KeyboardInterrupt",
    r"\bAsyncCursorPage\b": "SyncCursorPage",
    r"(?<![\w)])\(await ((?:[^()]|\((?:[^()]|\([^()]*\))*\))+)\)": r"\1",
    r"\bawait |\basync (?=def|for|with)": "",
    r"\basync_(?=\w)|\ba(?=closing\b|close\b)": "",
    r"(?<=\bOpenAI)Async(?=[A-Z])|\bAsync(?=[A-Z])": "",
}


def generated() -> dict[Path, str]:
    sources = [PACKAGE / "regraft/client.py", *sorted((PACKAGE / "regraft/resources").glob("*.py"))]
    made = {PACKAGE / "regraft/sync" / path.name: sync_module(path) for path in sources}
    head = '"""The synchronous client. Written by .ci/sync_client.py; do not edit."""\n'
    return {path: text for path, text in made.items() if text} | {PACKAGE / "regraft/sync/__init__.py": head}


def sync_module(path: Path) -> str:
    """The synchronous classes of a module; empty if it has none."""
    source = path.read_text()
    tree = ast.parse(source)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("Async")]
    if not classes:
        return ""
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    lines = source.splitlines()
    texts = [sync("\n".join(lines[node.lineno - 1 : node.end_lineno])) for node in classes]
    shared = f"from {module} import {', '.join(sorted(defined(tree) - {node.name for node in classes}))}\n"
    code = formatted(
        "\n\n".join([HEAD.format(module=module) + shared + "".join(imports(tree)), *texts]), path
    )
    assert "asyncio" not in code, f"RULES do not cover all of {module}"
    return code


def sync(code: str) -> str:
    for pattern, replacement in RULES.items():
        code = re.sub(pattern, replacement, code)
    return code


def defined(tree: ast.Module) -> set[str]:
    """The names that a module defines; unused imports of them are removed."""
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets += [node.target] if isinstance(node, ast.AnnAssign) else []
        names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return names


def imports(tree: ast.Module) -> Iterator[str]:
    yield "import time\n"
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported(node)
        elif isinstance(node, ast.If):  # TYPE_CHECKING
            yield "if TYPE_CHECKING:\n"
            for below in node.body:
                yield from (f"    {line}" for line in imported(below))


def imported(node: ast.stmt) -> Iterator[str]:
    if not isinstance(node, ast.ImportFrom):
        yield ast.unparse(node) + "\n"
        return
    for name in node.names:
        module = node.module or ""
        if name.name.startswith("Async") and module.startswith("regraft."):
            module = f"regraft.sync.{module.rpartition('.')[2]}"
        alone = ast.ImportFrom(module, [name], 0)
        yield sync(ast.unparse(alone)) + "\n"


def formatted(code: str, path: Path) -> str:
    ruff = [sys.executable, "-m", "ruff"]
    name = ["--stdin-filename", str(PACKAGE / "regraft/sync" / path.name), "-"]
    for command in (
        ["check", "--quiet", "--fix", "--exit-zero", "--select", "F401,F811,TC005,I"],
        ["format"],
    ):
        run = subprocess.run([*ruff, *command, *name], input=code, text=True, capture_output=True, check=True)
        code = run.stdout
    return code
