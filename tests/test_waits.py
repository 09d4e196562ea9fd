"""A wait that only ends early on success is long enough for a machine that is busy with something else."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
SHORTEST_S = 5.0
# Methods whose last positional argument is how long they wait.
WAITS = {"wait", "join", "result", "acquire", "wait_for", "settimeout"}
# Parts of the names of parameters that limit a wait.
LIMITS = ("timeout", "patience", "deadline", "wall_s", "hang_seconds", "lease_seconds")

# Waits that are meant to run out, or that wait for nothing, by file and function.
ALLOWED = {
    "contract/test_faults.py::store_at": "some modes of the proxy never answer",
    "core/test_figures.py::test_a_database_that_says_nothing_does_not_keep_prometheus_waiting": "it never answers",
    "core/test_figures.py::test_a_blob_store_that_says_nothing_is_not_up": "nothing answers before the test ends",
    "core/test_outgoing.py::test_who_does_not_answer_in_time_is_unreachable": "it never answers",
    "core/test_outgoing.py::test_an_answer_that_trickles_in_does_not_take_longer_than_one_that_hangs": "it never ends",
    "evals/test_interruptions.py::test_each_item_is_there_once_however_often_a_worker_was_killed.slowly.answer": (
        "a model that takes its time"
    ),
    "flaky_s3.py::FlakyS3._refuse": "reads until the client is silent",
    "graders/attacks.py::": "for attacks that never end",
    "graders/test_endpoint.py::test_a_host_that_drops_packets_is_away_and_not_slow.ask": "it never answers",
    "graders/test_python.py::test_a_grader_out_of_time_is_its_authors_to_mend": "it never ends",
    "graders/test_run.py::test_a_grader_that_takes_too_long_leaves_its_sample_ungraded": "the other never waits",
    "graders/test_run.py::test_the_deadline_reaches_into_a_multi": "it never ends",
    "sdk/conftest.py::serving.__init__": "how long connections that a test left open may hold up its end",
    "sdk/test_client.py::test_a_copy_with_other_options_is_still_ours": "an option that is only read",
    "worker/test_continuous.py::Reading.lora": "nothing happens",
    "worker/test_deliveries.py::test_an_endpoint_that_hangs_or_is_not_there_is_tried_again": "it never answers",
    "worker/test_fleet.py::TestWithoutProcesses.test_a_job_without_a_member_ends_after_its_patience": (
        "it never answers"
    ),
    "worker/test_fleet_members.py::test_members_that_only_answer_probes_are_none": "it never samples",
    "worker/test_fleet_members.py::"
    "test_samplers_of_another_release_are_left_out_and_named": "they never sample",
    "worker/test_fleet_members.py::"
    "test_a_member_that_keeps_failing_ends_nothing_while_another_one_samples.run": "it has to run out",
    "worker/test_lease.py::validate.run": "the lease has to be renewed while the test waits",
    "worker/test_forking.py::test_a_process_that_an_import_has_left_ends_without_harm": "it waits for its input",
    "worker/test_forking.py::test_it_can_be_waited_for_and_signalled": "it waits for a signal",
    "worker/test_served_teacher.py::"
    "test_a_server_that_accepts_in_silence_is_given_one_more_chance_and_no_more": "it never answers",
    "worker/test_supervisor.py::test_a_run_that_survives_its_kill_is_recorded_and_its_worker_claims_no_other_job": (
        "it never makes progress"
    ),
    "worker/test_supervisor.py::test_a_run_that_gets_nowhere_is_killed_and_tried_again": "it never makes progress",
}


def short_waits(
    tree: ast.AST, scope: tuple[str, ...] = (), *, in_loop: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield each wait with a literal limit that is too short: the function it is in, and its source."""
    for node in ast.iter_child_nodes(tree):
        inner = scope
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = (*scope, node.name)
        if isinstance(node, ast.Call | ast.BinOp) and any(map(too_short, limits_of(node, in_loop=in_loop))):
            yield ".".join(scope), ast.unparse(node)
        yield from short_waits(node, inner, in_loop=in_loop or isinstance(node, ast.While))


def limits_of(node: ast.Call | ast.BinOp, *, in_loop: bool) -> list[ast.expr]:
    """The values that limit how long this waits."""
    if isinstance(node, ast.BinOp):
        from_now = isinstance(node.right, ast.Constant) and ast.unparse(node.left).endswith("monotonic()")
        return [node.right] if from_now else []
    named = [
        keyword.value for keyword in node.keywords if any(limit in (keyword.arg or "") for limit in LIMITS)
    ]
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    # In a loop a short wait is the pause before the next look.
    return named + (node.args[-1:] if name in WAITS and not in_loop else [])


def too_short(limit: ast.expr) -> bool:
    """Whether it is a literal of some seconds. Nothing waits for zero seconds, nor for fewer."""
    match limit:
        case ast.Constant(value=float() | int() as seconds):
            return 0 < seconds < SHORTEST_S
    return False


@cache
def found() -> dict[str, list[str]]:
    waits: dict[str, list[str]] = {}
    for file in sorted(ROOT.rglob("*.py")):
        for function, source in short_waits(ast.parse(file.read_text())):
            waits.setdefault(f"{file.relative_to(ROOT).as_posix()}::{function}", []).append(source)
    return waits


@pytest.mark.slow
def test_no_wait_is_shorter_than_a_busy_machine_needs() -> None:
    assert {place: waits for place, waits in found().items() if place not in ALLOWED} == {}


def test_what_is_allowed_is_still_there() -> None:
    assert set(ALLOWED) - set(found()) == set()


@pytest.mark.parametrize(
    "source",
    ["done.wait(1)", "Limits(wall_s=0.5)", "deadline = time.monotonic() + 4", "call.result(timeout=2.5)"],
)
def test_a_short_wait_is_found_wherever_it_is(source: str) -> None:
    assert len(list(short_waits(ast.parse(f"def test():\n    {source}")))) == 1


@pytest.mark.parametrize(
    "source",
    ["done.wait(30)", "while not done.wait(0.05): pass", "', '.join(words)", "claim(lease_seconds=-1)"],
)
def test_long_waits_and_pauses_in_a_loop_are_not_too_short(source: str) -> None:
    assert list(short_waits(ast.parse(source))) == []
