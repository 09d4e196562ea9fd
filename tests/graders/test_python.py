import asyncio
import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from graders.build import build, missing_item_paths
from graders.builtin.python import PythonGrader
from graders.run import grade_all
from graders.sandbox.pool import Pool, SandboxLimits, SandboxUnavailable, missing_layers, probe
from graders.sandbox.sizes import cores
from graders.sandbox.source import TOO_DEEP, compiled
from graders.sandbox.syscalls import TABLES, grader_filter
from graders.sandbox.zygote import COMPILE_S, Watch
from graders.spec import InvalidGrader, dump, parse_grader
from graders.types import ErrorKind, Grade, Sample, StepScore

ROOT = Path(__file__).parents[2]
EXACT = "def grade(sample, item):\n    return sample['output_text'] == item['answer']\n"
PYTHON = {"type": "python", "name": "py", "source": EXACT}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(SandboxLimits(wall_s=30), size=2)
    yield pool
    pool.close()


@pytest.fixture
def grade(pool: Pool) -> Callable[..., Grade]:
    def grade(source: str, text: str = "42", item: dict[str, Any] | None = None) -> Grade:
        grader = PythonGrader("py", source, pool)
        return asyncio.run(grade_all(grader, [(Sample(text), item or {"answer": "42"})]))[0]

    return grade


def returns(expression: str, imports: str = "") -> str:
    return f"{imports}\ndef grade(sample, item):\n    return {expression}\n"


def refused(source: object) -> InvalidGrader:
    with pytest.raises(InvalidGrader) as caught:
        parse_grader({**PYTHON, "source": source})
    assert caught.value.param == "grader.source"
    return caught.value


def test_the_score_is_what_grade_returns(grade: Callable[..., Grade]) -> None:
    assert grade(EXACT).score == 1.0
    assert grade(EXACT, "41").score == 0.0
    assert grade(returns("0.25")).reason == "grade() returned 0.25"


@pytest.mark.parametrize(
    ("expression", "score"), [("True", 1.0), ("3", 3.0), ("-0.5", -0.5), ("len(item)", 1.0)]
)
def test_any_finite_number_is_a_score(grade: Callable[..., Grade], expression: str, score: float) -> None:
    assert grade(returns(expression)).score == score


@pytest.mark.parametrize("expression", ["1e308", "-1e16", "10 ** 18", "10 ** 400"])
def test_a_number_too_large_for_a_score_is_an_error_of_the_source(
    grade: Callable[..., Grade], expression: str
) -> None:
    result = grade(returns(expression))

    assert (result.score, result.error) == (None, ErrorKind.python_grader_runtime_error)
    assert "1e+15" in result.reason


@pytest.mark.slow
def test_a_numpy_scalar_is_a_score(grade: Callable[..., Grade]) -> None:
    pytest.importorskip("numpy")

    assert grade(returns("np.float32(0.5)", "import numpy as np")).score == 0.5
    assert grade(returns("np.mean([1, 0])", "import numpy as np")).score == 0.5
    assert "not ndarray" in grade(returns("np.ones(3)", "import numpy as np")).reason


def test_it_may_score_an_answer_step_by_step(grade: Callable[..., Grade]) -> None:
    source = (
        "def grade(sample, item):\n    text, steps, end = sample['output_text'], [], 0\n"
        "    for line in text.splitlines(keepends=True):\n        end += len(line)\n"
        "        steps.append({'end': end, 'score': 'good' in line})\n"
        "    return {'score': 0.5, 'steps': steps}"
    )

    result = grade(source, "good\nbad\n")

    assert (result.score, result.steps) == (0.5, (StepScore(1.0, 5), StepScore(0.0, 9)))
    assert grade(EXACT).steps == ()


def test_steps_may_be_numpy_scalars(grade: Callable[..., Grade]) -> None:
    pytest.importorskip("numpy")
    steps = "{'score': np.float64(1), 'steps': [{'end': np.int64(2), 'score': np.float32(0.5)}]}"

    assert grade(returns(steps, "import numpy as np")).steps == (StepScore(0.5, 2),)


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ("[{'end': 3, 'score': 1}]", "step 0 must end after the one before and within the 2 characters"),
        ("[{'end': 1, 'score': 1}, {'end': 1, 'score': 1}]", "step 1 must end after"),
        ("[{'end': 0, 'score': 1}]", "step 0 must end"),
        ("[{'end': 1.0, 'score': 1}]", "step 0 must end"),
        ("[{'end': True, 'score': 1}]", "step 0 must end"),
        ("[{'end': 1, 'score': float('nan')}]", "the score of step 0 must be a finite number"),
        ("[{'end': 1, 'score': 10 ** 400}]", "the score of step 0 must be a finite number"),
        ("[{'end': 1, 'score': '1'}]", "the score of step 0 must be a finite number"),
        ("[{'end': 1}]", "step 0 must be an object with 'end' and 'score'"),
        ("[{'end': 1, 'score': 1, 'why': ''}]", "step 0 must be an object"),
        ("[1]", "step 0 must be an object"),
        ("({'end': 1, 'score': 1},)", "'steps' must be a list of at most 256"),
    ],
)
def test_steps_that_cannot_be_used_are_its_authors_to_mend(
    grade: Callable[..., Grade], steps: str, says: str
) -> None:
    result = grade(returns(f"{{'score': 1.0, 'steps': {steps}}}"))

    assert (result.score, result.error) == (None, ErrorKind.python_grader_runtime_error)
    assert says in result.reason


@pytest.mark.parametrize("value", ["{'score': 1}", "{}", "{'score': 1, 'steps': [], 'note': ''}"])
def test_a_dict_has_a_score_and_steps_and_nothing_else(grade: Callable[..., Grade], value: str) -> None:
    assert "must have 'score' and 'steps'" in grade(returns(value)).reason


def test_the_sample_has_what_a_template_can_name(grade: Callable[..., Grade]) -> None:
    keys = "sorted(sample) == sorted(item['keys'])"

    assert grade(returns(keys), item={"keys": list(Sample("").as_namespace())}).score == 1.0


def test_text_outside_ascii_arrives_and_leaves_as_it_is(grade: Callable[..., Grade]) -> None:
    result = grade("def grade(sample, item):\n    print(sample['output_text'])\n    return 1", "żółć 🦊")

    assert result.output == "żółć 🦊\n"


def test_what_it_prints_comes_back_with_the_grade_cut_to_size(grade: Callable[..., Grade]) -> None:
    result = grade("def grade(sample, item):\n    print('a' * 100_000)\n    return 1")

    assert result.score == 1.0
    assert result.output == "a" * 16384 + "\n... cut: the first 16,384 of 100,001 bytes are shown"


def test_what_it_printed_before_it_failed_comes_back_too(grade: Callable[..., Grade]) -> None:
    result = grade("def grade(sample, item):\n    print('so far')\n    return 1 / 0")

    assert result.output == "so far\n"


def test_an_exception_becomes_a_reason_with_the_authors_own_lines(grade: Callable[..., Grade]) -> None:
    result = grade("def grade(sample, item):\n    return item['absent']\n")

    assert (result.score, result.error) == (None, ErrorKind.python_grader_runtime_error)
    assert 'File "grader.py", line 2, in grade' in result.reason
    assert "return item['absent']" in result.reason
    assert "KeyError: 'absent'" in result.reason
    assert "zygote" not in result.reason


@pytest.mark.slow
def test_a_grader_out_of_time_is_its_authors_to_mend() -> None:
    pool = Pool(SandboxLimits(wall_s=0.2), size=1)
    try:
        result = asyncio.run(
            PythonGrader("py", "def grade(s, i):\n    while 1: pass", pool).grade(Sample(""), {})
        )
    finally:
        pool.close()

    assert result.error is ErrorKind.python_grader_runtime_error
    assert result.reason == "no grade within 0.2 s"


def test_modules_of_the_standard_library_can_be_used(grade: Callable[..., Grade]) -> None:
    modules = "ast bisect base64 collections contextlib copy csv dataclasses datetime decimal difflib enum fractions"
    modules += (
        " functools hashlib heapq html io itertools json math operator pathlib random re statistics string"
    )
    modules += " tempfile textwrap threading time traceback typing unicodedata urllib.parse uuid xml.etree.ElementTree"

    assert grade(returns("1", f"import {', '.join(modules.split())}")).score == 1.0


def test_threads_work(grade: Callable[..., Grade]) -> None:
    source = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def grade(sample, item):\n"
        "    with ThreadPoolExecutor(2) as pool:\n        return sum(pool.map(float, range(4)))"
    )

    assert grade(source).score == 6.0


def test_nothing_is_kept_from_one_grade_to_the_next(grade: Callable[..., Grade]) -> None:
    source = "calls = []\ndef grade(sample, item):\n    calls.append(1)\n    return len(calls)"

    assert [grade(source).score for _ in range(3)] == [1, 1, 1]


@pytest.mark.slow
def test_many_grades_at_once_each_get_their_own_answer(pool: Pool) -> None:
    grader = PythonGrader("py", returns("float(sample['output_text'])"), pool)

    grades = asyncio.run(grade_all(grader, [(Sample(str(n)), {}) for n in range(40)]))

    assert [grade.score for grade in grades] == list(range(40))


def test_a_python_grader_works_inside_a_multi() -> None:
    spec = parse_grader(
        {
            "type": "multi",
            "name": "both",
            "graders": {"py": PYTHON, "half": {**PYTHON, "source": returns("0.5")}},
            "calculate_output": "py + half",
        }
    )

    assert asyncio.run(grade_all(build(spec), [(Sample("42"), {"answer": "42"})]))[0].score == 1.5
    assert missing_item_paths(spec, {}) == []


# the spec


def test_what_was_sent_is_what_is_echoed() -> None:
    raw = {**PYTHON, "image_tag": "2025-05-08", "pass_threshold": 0.5}

    assert dump(parse_grader(raw)) == raw
    assert dump(parse_grader(PYTHON)) == PYTHON


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (EXACT + "\n# \0", "line 4: the source holds a NUL character"),
        (EXACT + "\n# \ud800", "lone surrogate"),
        (EXACT + "#" * 256_000, "must have less than 256000"),
        (EXACT + "#" + "é" * 128_000, "must have less than 256000"),
    ],
)
def test_a_source_that_can_never_grade_is_refused_with_its_line(source: str, says: str) -> None:
    assert says in refused(source).message


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("", "the source defines no function grade(sample, item) at its top level"),
        ("grade = 1", "defines no function grade(sample, item)"),
        ("class A:\n    def grade(sample, item): return 1", "defines no function grade(sample, item)"),
        ("x = 1\ndef grade(sample): return 1", "line 2: grade must be callable as grade(sample, item)"),
        ("def grade(): return 1", "line 1: grade must be callable as grade(sample, item)"),
        ("def grade(a, b, c): return 1", "any further ones with defaults"),
        ("def grade(a, b, c, d=1): return 1", "any further ones with defaults"),
        ("def grade(a, b, *, c): return 1", "any further ones with defaults"),
        ("def grade(a, *, b=1): return 1", "two positional parameters"),
        ("async def grade(sample, item): return 1", "line 1: grade must be a plain function, not async"),
        ("def grade(a): return 1\n" + EXACT, ""),
        (EXACT + "def grade(a): return 1\n", "line 3: grade must be callable"),
        (EXACT + "return 1", "line 3: 'return' outside function"),
        ("def grade(sample, item):\n  return (", "line 2: '(' was never closed"),
        (EXACT + "x = " + "(" * 5000 + ")" * 5000, "nested"),
        (EXACT + "x = " + "-" * 100_000 + "1", "nested too deeply"),
    ],
)
def test_a_source_of_which_no_grader_can_be_made_is_refused_with_its_line(source: str, says: str) -> None:
    assert says in compile_error(source)
    assert bool(says) == bool(compile_error(source))


def compile_error(source: str) -> str:
    try:
        compiled(source)
    except ValueError as cause:
        return str(cause)
    return ""


def test_the_sandbox_compiles_and_a_grade_of_what_does_not_compile_says_the_same(pool: Pool) -> None:
    source = "def grade(sample, item):\n  return ("

    assert pool.compile_error(source).result() == "line 2: '(' was never closed"
    outcome = pool.submit(source, {}, {}).result()
    assert (outcome.kind, outcome.reason) == ("user_error", "line 2: '(' was never closed")
    assert pool.compile_error(EXACT).result() == ""


def nested_finally(depth: int) -> str:
    """The compiler copies the body of a `finally` for each way out of its `try`: more with each level."""
    lines = ["def grade(a, b):"]
    for level in range(1, depth + 1):
        lines += [" " * level + "try:", *(" " * (level + 1) + f"if a: return {n}" for n in range(3))]
        lines += [" " * level + "finally:"]
    return "\n".join([*lines, " " * (depth + 1) + "b()"])


@pytest.mark.slow
def test_a_source_that_takes_gigabytes_to_compile_is_its_authors_to_mend(pool: Pool) -> None:
    assert pool.compile_error("def grade(a, b): return 1").result() == ""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    refused = pool.compile_error(nested_finally(19)).result()

    assert refused in (TOO_DEEP, f"compiling the source took more than {COMPILE_S} s")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    assert pool.submit(EXACT, {"output_text": ""}, {"answer": ""}).result().score == 1


def test_a_source_has_to_be_a_string() -> None:
    assert refused(1).code == "invalid_type"


@pytest.mark.parametrize(
    "parameters",
    [
        "sample, item, /",
        "sample, item, tolerance=0.5",
        "sample, item=None",
        "sample, item, *, tolerance=0.5",
        "sample, item, *rest, **options",
        "sample, *rest",
        "*both",
    ],
)
def test_further_parameters_are_fine_if_they_need_no_value(pool: Pool, parameters: str) -> None:
    source = f"def grade({parameters}): return 1"
    parse_grader({**PYTHON, "source": source})

    assert pool.submit(source, {}, {}).result().score == 1.0


# the sandbox


@pytest.mark.parametrize(
    ("limit", "most"), [("max 100000", 1 << 20), ("100000 100000", 1), ("150000 100000", 2)]
)
def test_as_many_grades_go_on_as_the_container_has_cores(tmp_path: Path, limit: str, most: int) -> None:
    assert cores(tmp_path) == len(os.sched_getaffinity(0))
    (tmp_path / "cpu.max").write_text(limit + "\n")

    assert cores(tmp_path) == min(most, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize("layer", ["no_new_privs", "seccomp", "rlimits"])
def test_without_a_layer_python_graders_are_refused_by_its_name(layer: str) -> None:
    pool = Pool(without=[layer], size=1)
    try:
        with pytest.raises(SandboxUnavailable, match=f"{layer} is missing"):
            pool.submit(EXACT, {}, {}).result()
        result = asyncio.run(PythonGrader("py", EXACT, pool).grade(Sample(""), {}))
    finally:
        pool.close()

    assert result.error is ErrorKind.python_grader_server_error
    assert f"{layer} is missing" in result.reason


def test_landlock_or_a_user_and_a_root_of_its_own_are_enough_and_less_is_not() -> None:
    held = dict.fromkeys(["no_new_privs", "seccomp", "rlimits", "landlock", "uid", "namespaces"], "")

    assert missing_layers(held) == missing_layers({**held, "landlock": "old kernel"}) == []
    assert missing_layers({**held, "uid": "not root", "namespaces": "needs root"}) == []
    assert "old kernel" in missing_layers({**held, "uid": "not root", "landlock": "old kernel"})[0]
    [only_a_user] = missing_layers({**held, "namespaces": "not allowed", "landlock": "old kernel"})
    assert "landlock (old kernel) and namespaces (not allowed) are missing" in only_a_user


def test_a_user_that_all_graders_share_does_not_keep_them_out_of_each_others_scratch() -> None:
    pool = Pool(without=["namespaces", "landlock"], size=1)
    try:
        with pytest.raises(SandboxUnavailable, match=r"both landlock .* and namespaces .* are missing"):
            pool.submit(EXACT, {}, {}).result()
    finally:
        pool.close()


def test_who_insists_may_run_without_a_layer() -> None:
    pool = Pool(without=["seccomp"], size=1, insecure=True)
    try:
        outcome = pool.submit(returns("1"), {}, {}).result()
    finally:
        pool.close()

    assert outcome.score == 1.0


def test_the_probe_names_every_layer() -> None:
    assert set(probe()) == {
        "cgroup", "pid_namespace", "namespaces", "uid", "no_new_privs", "landlock", "signal_scope", "rlimits",
        "seccomp",
    }  # fmt: skip


@pytest.mark.parametrize("machine", TABLES)
def test_there_is_a_filter_for_every_machine_we_have_a_table_for(machine: str) -> None:
    program = grader_filter(machine)

    assert len(program) % 8 == 0
    assert len(program) // 8 < 4096  # the kernel's limit


def test_a_machine_without_a_table_has_no_filter() -> None:
    with pytest.raises(OSError, match="mips"):
        grader_filter("mips")


@pytest.mark.parametrize(("used_s", "status"), [(11.5, "cpu_limit"), (1.0, "memory")])
def test_why_the_kernel_ended_a_grade_shows_in_the_processor_time_it_used(used_s: float, status: str) -> None:
    watch = Watch(0, 0, 0, {"output": 1, "wall_s": 5, "entry": "grade"})

    assert watch.why_killed(signal.SIGKILL, used_s) == status


def test_a_zygote_killed_from_outside_is_replaced(pool: Pool) -> None:
    source = returns("1") + "# killed\n"
    pool.submit(source, {}, {}).result()
    victim = pool.idle[-1]
    assert victim.served == 1
    os.kill(victim.process.pid, signal.SIGKILL)
    victim.process.wait()

    assert pool.submit(source, {}, {}).result().score == 1.0


def test_closing_ends_all_processes_and_refuses_further_work() -> None:
    pool = Pool(size=1)
    pool.submit(EXACT, {"output_text": ""}, {"answer": ""}).result()
    [zygote] = pool.zygotes
    pool.close()

    assert zygote.process.returncode == -signal.SIGKILL
    with pytest.raises(RuntimeError):
        pool.submit(EXACT, {}, {})


@pytest.mark.slow
def test_old_zygotes_make_room_for_new_sources() -> None:
    pool = Pool(size=1)
    try:
        for n in range(4):
            pool.submit(returns(str(n)), {}, {}).result()
        assert len(pool.zygotes) == len(pool.idle) == 2
    finally:
        pool.close()


def test_zygotes_die_with_the_service() -> None:
    program = (
        "import os, signal\nfrom graders.sandbox.pool import Pool\npool = Pool(size=1)\n"
        "pool.submit('def grade(s, i): return 1', {}, {}).result()\n"
        "print(next(iter(pool.zygotes)).process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)

    deadline = time.monotonic() + 30
    while _lives(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _lives(int(done.stdout))


@pytest.mark.slow
def test_grading_leaves_no_descriptors_open(pool: Pool) -> None:
    source = returns("1") + "# descriptors\n"
    pool.submit(source, {}, {}).result()
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        pool.submit(source, {}, {}).result()

    assert len(list(Path("/proc/self/fd").iterdir())) == before


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
