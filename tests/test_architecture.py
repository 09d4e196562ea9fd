"""Allowed imports: worker -> core, graders; api -> core, graders; graders -> what is SHARED."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from bench.closure import Imports, tree_of
from bench.codebase import PRODUCT, Codebase

ROOT = Path(__file__).parents[1]
IMPORTS = Imports(ROOT)
CODEBASE = Codebase(ROOT)
OURS = {"api", "core", "graders", "worker", "sdk", "regraft", "tests"}
HEAVY = {"torch", "transformers", "peft", "vllm"}
MAY_IMPORT = {"core": set(), "graders": set(), "api": {"core", "graders"}, "worker": {"core", "graders"}}
# One client for all requests to other people's servers, what hides secrets, and the sentences about files. They import
# nothing of ours.
SHARED = {"core.masking", "core.outages", "core.outbound.http", "core.system_errors"}
# What the client's extra "mcp" brings.
OF_AGENTS = {"mcp", "mcp_types", "jsonschema", "starlette", "uvicorn"}
# The one place that puts both halves together: the command line.
COMPOSITION_ROOT = "worker/cli/service.py"


def imports(file: Path) -> Iterator[str]:
    """Top-level names of everything the file imports, also inside functions; not of what is shared."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif (
            isinstance(node, ast.ImportFrom) and node.level == 0 and node.module and node.module not in SHARED
        ):
            yield node.module.split(".")[0]


def files_of(package: str) -> list[Path]:
    files = [f for f in (ROOT / package).rglob("*.py") if str(f.relative_to(ROOT)) != COMPOSITION_ROOT]
    assert files, f"{package} has no files: this test would prove nothing"
    return files


# What the training loop knows by protocols only.
METHODS = {"worker.model", "worker.training", "worker.rollout", "worker.offline", "worker.prepare"}
# Rooms of the worker, and what their modules never import: not directly, or not at all when they are loaded.
WALLS = [
    ("worker/supervisor", HEAVY),
    ("worker/cli", HEAVY),
    # They import these without the garbage collector (worker/process.py), and a launcher of ranks does not at all.
    ("worker/child.py", HEAVY),
    ("worker/serving/__main__.py", HEAVY),
    ("worker/recording", {"worker.rollout"}),
    ("worker/training/grpo.py", {"worker", "core.database", "core.storage", "core.settings"}),
    ("worker/run.py", {"core.database", "core.storage", "core.settings", "worker.supervisor", *METHODS}),
    ("core/database", {"core.jobs", "core.results", "core.storage", "core.outbound", "core.telemetry"}),
    ("graders/builtin", {"graders.judge", "graders.endpoint", "graders.backends"}),
]


@cache
def reached_from(module: str) -> frozenset[str]:
    """The module and all modules that are loaded with it."""
    reached: set[str] = set()
    waiting = {module}
    while waiting:
        name = waiting.pop()
        reached.add(name)
        waiting |= IMPORTS.loaded_by(name) - reached
    return frozenset(reached)


@pytest.mark.parametrize(("room", "forbidden"), WALLS, ids=[room for room, _ in WALLS])
@pytest.mark.slow
def test_the_inner_walls_stand(room: str, forbidden: set[str]) -> None:
    inside = [name for name, file in IMPORTS.modules.items() if file.relative_to(ROOT).is_relative_to(room)]
    assert inside, f"{room} has no files: this test would prove nothing"

    imported = reached_from if forbidden == HEAVY else IMPORTS.loaded_by
    wrong = {
        f"{name}: {other}"
        for name in inside
        for other in imported(name)
        if any(other == far or other.startswith(f"{far}.") for far in forbidden)
    }

    assert not wrong


@pytest.mark.parametrize("package", ["core", "graders", "worker"])
def test_no_two_modules_load_each_other(package: str) -> None:
    in_a_circle = {
        name
        for name in IMPORTS.modules
        if name.startswith(f"{package}.")
        and any(name in reached_from(other) for other in IMPORTS.loaded_by(name))
    }

    assert not in_a_circle


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_in_one_direction(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package}

    wrong = {f"{f.name}: {name}" for f in files_of(package) for name in imports(f) if name in OURS - allowed}

    assert not wrong


def test_the_client_needs_only_what_it_is_installed_with() -> None:
    """What a user installs has no server in it: the server's rules that it ships are links, and need nothing else."""
    allowed = set(sys.stdlib_module_names) | {"regraft", "openai", "httpx2", "cryptography"}
    optional = {"datasets", "huggingface_hub", "matplotlib", "pandas", "pyarrow", "yaml", *OF_AGENTS}

    wrong = {
        f"{f.name}: {name}"
        for f in files_of("sdk/regraft")
        for name in imports(f)
        if name not in allowed | optional
    }

    assert not wrong


@pytest.mark.parametrize("package", ["core", "graders", "api"])
def test_only_the_worker_touches_the_heavy_libraries(package: str) -> None:
    wrong = {f"{f.name}: {name}" for f in files_of(package) for name in imports(f) if name in HEAVY}

    assert not wrong


@pytest.mark.slow
def test_the_server_process_starts_without_torch() -> None:
    """The parent of every run must stay free of torch and CUDA: it forks, and it has to start in a second."""
    import subprocess

    code = (
        "import sys, worker.cli.service; print(sorted({'torch', 'transformers', 'peft'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)

    assert done.stdout.strip() == "[]"


def test_the_check_sees_a_wrong_import(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f():\n    from worker import run\n    import torch.nn\n")

    assert set(imports(tmp_path / "bad.py")) == {"worker", "torch"}


# Two classes may share a name if nobody would take one for the other.
SHARED_NAMES = {
    "Attempt": "the row of the database, and the worker's access to it",
    "PromptTemplate": "the messages of a grader's specification, and the same compiled",
    "Reasoning": "the field of a request to /v1/responses, and how a model writes thoughts",
    "Sampling": "the group of hyperparameters, and what the samplers get of it",
    "SamplingParams": "OpenAI's name, in eval runs and in graders",
    "Group": "of answers to one prompt; of machines that share a run",
    "Thresholds": "those of an alarm's request, and those that are stored",
}


def test_a_name_stands_for_one_class() -> None:
    found = Counter(
        node.name
        for folder in ("api", "core", "graders", "worker")
        for file in (ROOT / folder).rglob("*.py")
        for node in tree_of(file).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )

    assert {name for name, number in found.items() if number > 1} == SHARED_NAMES.keys()


# Bounds of what is loaded with a module: figures as they were when they were set, or a little above them.
CLOSURES = {
    # A reader can learn all of it. Raise a bound only with the reason in an ADR.
    "worker.run": {"files": 20, "lines": 3_000, "classes": 60},
    # What the loop's protocols stand for, and the process of an attempt: no reader learns all of it, but each further
    # module delays the start of a job. Raise a bound with the reason in the commit.
    "worker.assemble": {"files": 358, "lines": 60_700, "classes": 875},
    "worker.child": {"files": 140, "lines": 22_900, "classes": 445},
}


@pytest.mark.parametrize("module", CLOSURES)
def test_what_is_loaded_with_a_module_does_not_grow_unseen(module: str) -> None:
    figures = IMPORTS.figures(module)

    assert {name: figures[name] for name, bound in CLOSURES[module].items() if figures[name] > bound} == {}


def test_few_functions_are_longer_than_a_screen() -> None:
    """Those that are left are little but a signature and its documentation. Do not raise the bounds: split."""
    functions = CODEBASE.long_functions()

    assert len(functions) <= 18, functions
    assert [function.place for function in functions if function.code_lines > 50] == []


@pytest.mark.slow
@pytest.mark.parametrize("package", ["api", "core", "graders", "worker"])
def test_no_import_runs_up_between_rooms(package: str) -> None:
    """Move what both rooms need below both."""
    assert CODEBASE.upward_imports(package) == []


@pytest.mark.slow
def test_no_long_run_of_lines_stands_twice() -> None:
    assert CODEBASE.repeated(*PRODUCT) == []
    assert CODEBASE.repeated("tests") == []


def test_the_lines_of_a_checkout_are_compared(tmp_path: Path) -> None:
    body = "".join(f"    value_{number} = {number}\n" for number in range(25))
    (tmp_path / "core").mkdir()
    (tmp_path / "core/first.py").write_text(f"import json\n\n\ndef first():\n{body}")
    (tmp_path / "core/second.py").write_text(f"def second():\n    # a comment\n\n{body}")

    assert Codebase(tmp_path).repeated("core") == [("core/first.py:5", "core/second.py:4")]


def test_an_import_that_runs_up_is_the_rarer_one_of_a_circle(tmp_path: Path) -> None:
    (tmp_path / "core/high").mkdir(parents=True)
    (tmp_path / "core/high/a.py").write_text("from core import low\n")
    (tmp_path / "core/high/b.py").write_text("from core import low\n")
    (tmp_path / "core/low.py").write_text("from core.high import a\n")

    assert Codebase(tmp_path).upward_imports("core") == [("core.low", "core.high.a")]


def test_a_server_leaves_the_levels_of_logs_alone() -> None:
    """uvicorn's own configuration sets them for the whole process, also while another server starts beside it."""
    calls = [
        (str(file.relative_to(ROOT)), ast.unparse(node))
        for folder in ("api", "worker", "tests")
        for file in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "uvicorn.Config"
    ]

    assert len(calls) >= 10
    assert [call for call in calls if "log_config=None" not in call[1]] == []


def test_no_request_waits_for_the_database_of_another_in_the_event_loop() -> None:
    """A coroutine of the API opens its session in a thread: in the event loop it would hold up all requests."""
    opened = [
        f"{file.relative_to(ROOT)}:{call.lineno}"
        for file in files_of("api")
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.AsyncFunctionDef)
        for call in called_in_place(node)
        if OPENS_SESSION.search(ast.unparse(call.func))
    ]

    assert opened == []


OPENS_SESSION = re.compile(r"(\bdatabase\.(read|write)|\b(unit_of_work|uow|once))$")


def called_in_place(function: ast.AsyncFunctionDef) -> Iterator[ast.Call]:
    """The calls of a coroutine itself, without those of functions inside it, which may run in threads."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call):
            yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))
