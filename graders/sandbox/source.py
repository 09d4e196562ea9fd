"""Compile a grader's untrusted source in a process with limits. Runs inside the sandbox."""

from __future__ import annotations

import ast
import marshal
from dataclasses import dataclass

from graders.sandbox.entries import GRADE, SandboxEntry

FILE = "grader.py"
# Packages of an environment that the sandbox imports before the first grade if the source imports them.
INSTALLED = frozenset(
    {
        "ast_grep_py", "deepdiff", "jsonschema", "nltk", "numpy", "pandas", "pydantic", "rapidfuzz", "rdkit",
        "rouge_score", "scipy", "skbio", "sklearn", "sqlparse", "sympy", "yaml",
    }
)  # fmt: skip
MAX_MODULES = 64
TOO_DEEP = "the source is nested too deeply, or too large to compile"


@dataclass(frozen=True)
class Compiled:
    """A valid source, compiled, and the modules of INSTALLED packages that it imports at any level."""

    code: bytes  # marshalled
    modules: list[str]


def compiled(source: str, entry: SandboxEntry = GRADE) -> Compiled:
    """Compile the source and check the signature of the function that is called.

    Raises:
        ValueError: The source is not valid. The message names the line if it is known.
    """
    try:
        tree = ast.parse(source)
        # Compiling finds errors that parsing does not, such as a `return` outside a function.
        code = compile(source, FILE, "exec", dont_inherit=True)
        _check_signature(tree, entry)
        return Compiled(marshal.dumps(code), named_modules(tree))
    except SyntaxError as cause:
        raise ValueError(f"line {cause.lineno}: {cause.msg}") from cause
    except (RecursionError, MemoryError) as cause:
        raise ValueError(TOO_DEEP) from cause


def named_modules(tree: ast.Module) -> list[str]:
    names = dict.fromkeys(name for node in ast.walk(tree) for name in _imported(node))
    return [name for name in names if name.partition(".")[0] in INSTALLED][:MAX_MODULES]


def _imported(node: ast.AST) -> list[str]:
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(module=str(module), level=0):
            # Each name may be a submodule or an attribute of the module; importing it tells which.
            return [module, *(f"{module}.{alias.name}" for alias in node.names if alias.name != "*")]
    return []


def _check_signature(tree: ast.Module, entry: SandboxEntry) -> None:
    functions = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    entries = [node for node in functions if node.name == entry.name]
    signature = f"{entry.name}({', '.join(entry.parameters)})"
    if not entries:
        raise ValueError(f"the source defines no function {signature} at its top level")
    function = entries[-1]  # the last definition takes effect
    if isinstance(function, ast.AsyncFunctionDef):
        raise ValueError(f"line {function.lineno}: {entry.name} must be a plain function, not async")
    count = len(entry.parameters)
    if not _takes(function.args, count):
        raise ValueError(
            f"line {function.lineno}: {entry.name} must be callable as {signature}: {_WORDS[count]} positional "
            "parameters, any further ones with defaults"
        )


_WORDS = {2: "two", 3: "three"}


def _takes(has: ast.arguments, count: int) -> bool:
    """Return whether a function with these parameters can be called with exactly `count` positional arguments."""
    positional = len(has.posonlyargs) + len(has.args)
    enough = positional >= count or has.vararg is not None
    return enough and positional - len(has.defaults) <= count and None not in has.kw_defaults
