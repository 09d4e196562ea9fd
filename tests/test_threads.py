"""No thread ends by an error and leaves its work undone: each is watched, or is listed with the reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

from bench.closure import tree_of

ROOT = Path(__file__).parents[1]
WATCHED = "the process ends when it has ended (core/service/liveness.py: touch_while_alive)"
ASYNC = "an event loop, which no callback's error ends"
HANDED_ON = "its error is handed to whoever waits for the result"
CAUGHT = "it catches and logs any error of a round"
# Each place that makes a thread: its file and what the thread runs; and what follows when that raises.
THREADS = {
    ("api/http/grader_loop.py", "_run"): ASYNC,
    ("core/jobs/queue.py", "self._run"): CAUGHT + ", and the reconciler sends it again",
    ("core/refreshed.py", "work"): HANDED_ON,
    ("core/telemetry/metrics.py", "server.run"): ASYNC,
    (
        "graders/hazards/pool.py",
        "self._run",
    ): "it catches any error and hands it to whoever waits for a result",
    (
        "graders/sandbox/pool.py",
        "self.expire",
    ): "processes stay idle for longer; the next one starts another timer",
    (
        "sdk/regraft/agent_trials.py",
        "server.serve_forever",
    ): "the agent's request fails, and so does the trial",
    (
        "sdk/regraft/display.py",
        "self._keep_saying",
    ): "the terminal cannot be written, which the command meets, too",
    (
        "sdk/regraft/display.py",
        "self._keep_ticking",
    ): "the terminal cannot be written, which the command meets, too",
    ("worker/cli/service.py", "passes.run_until"): WATCHED,
    ("worker/compile_caches.py", "pruning"): CAUGHT,
    ("worker/engine/child.py", "server.run"): ASYNC,
    ("worker/evals/runner.py", "self._work"): CAUGHT + ", and the reconciler starts another",
    ("worker/lease.py", "self._run"): CAUGHT,
    ("worker/members/gathering.py", "self._serve"): "a run notices itself that a machine is missing",
    ("worker/members/member.py", "self._keep"): WATCHED,
    ("worker/progress.py", "work"): "without progress the run counts as hung, and is killed and tried again",
    ("worker/recording/exporters/threads.py", "self._deliver"): CAUGHT,
    ("worker/sampling/vllm.py", "self._loop.run_forever"): ASYNC,
    ("worker/serving/continuous.py", "self._run"): "the engine is lost, and is loaded again",
    ("worker/serving/launcher.py", "self._keep"): "it retries what can fail, which is to start a process",
    ("worker/sharing/base.py", "self._end_with_base"): "its only work is to end the process",
    ("worker/sharing/holder.py", "accept"): "it retries; a job that cannot connect is tried again",
    ("worker/sharing/holder.py", "give"): "of one job, which fails to connect and is tried again",
    ("worker/supervisor/app.py", "self.reporter.run_until"): CAUGHT,
    ("worker/supervisor/app.py", "target"): WATCHED,
    ("worker/supervisor/live_log.py", "self._follow"): "the end of the run stores the whole log",
    ("worker/supervisor/one_shot.py", "status.append"): WATCHED,
    ("worker/supervisor/one_shot.py", "liveness.touch_while_alive"): "the file grows old, which ends the pod",
    ("worker/supervisor/one_shot.py", "self.reporter.run_until"): CAUGHT,
    ("worker/supervisor/supervisor.py", "self._run_beside"): CAUGHT,
    (
        "worker/supervisor/turn_server.py",
        "self._serve",
    ): "it closes all connections, which ends the jobs that wait",
    ("worker/training/loading.py", "self._load"): HANDED_ON,
    (
        "worker/training/peer_watchdog.py",
        "target",
    ): "the other machines miss its counter, and end the attempt",
    ("worker/training/world.py", "give"): "the next order meets the same error",
    ("worker/training/world.py", "watch"): "the operation of all ranks ends at its limit",
}


def files() -> Iterator[Path]:
    for folder in ("api", "core", "graders", "regraft_server", "sdk/regraft", "worker"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def run_by(call: ast.Call) -> str:
    """What a thread or a timer runs, without the arguments of a lambda or a partial."""
    target = next((one.value for one in call.keywords if one.arg == "target"), None) or call.args[-1]
    if isinstance(target, ast.Lambda):
        assert isinstance(target.body, ast.Call)
        target = target.body.func
    elif isinstance(target, ast.Call):
        target = target.args[0]
    return ast.unparse(target)


def made() -> Iterator[tuple[str, str]]:
    """The file, and what the thread runs, of each thread of the product."""
    for file in files():
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("Thread", "Timer"):
                yield str(file.relative_to(ROOT)), run_by(node)


def test_each_thread_is_watched_or_has_the_reason_why_it_need_not_be() -> None:
    assert sorted(made()) == sorted(THREADS)


def test_no_class_is_a_thread() -> None:
    """Or the list above would miss it."""
    bases = {
        ast.unparse(base).split(".")[-1]
        for file in files()
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    }

    assert not bases & {"Thread", "Timer"}


def catches(file: Path, target: str) -> bool:
    """Whether the function that a thread runs, or one of the same file that it calls, catches any exception.

    Args:
        target: as `run_by` gives it. `self.reporter.run_until` is in reporter.py beside the file.
    """
    *owner, name = target.removeprefix("self.").split(".")
    tree = tree_of(file.with_name(f"{owner[-1]}.py") if owner else file)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    called = {
        ast.unparse(node.func).removeprefix("self.")
        for node in ast.walk(functions[name])
        if isinstance(node, ast.Call)
    }
    return any(
        isinstance(node, ast.ExceptHandler) and node.type is not None and ast.unparse(node.type) == caught
        for one in {name, *called} & functions.keys()
        for node in ast.walk(functions[one])
        for caught in ("Exception", "BaseException")
    )


def test_what_is_said_to_catch_any_error_does() -> None:
    said = [place for place, reason in THREADS.items() if reason.startswith("it catches")]

    assert len(said) >= 8
    assert [(file, target) for file, target in said if not catches(ROOT / file, target)] == []


def test_a_thread_that_catches_few_errors_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "class A:\n"
        "    def _all(self):\n        self._once()\n"
        "    def _once(self):\n        try:\n            work()\n        except Exception:\n            pass\n"
        "    def _few(self):\n        try:\n            work()\n        except OSError:\n            pass\n"
    )

    assert catches(file, "self._all")
    assert not catches(file, "self._few")
