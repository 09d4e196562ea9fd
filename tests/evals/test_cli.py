"""The commands of evals against a server: what they print, and their exit codes."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from regraft.cli import main
from regraft.sync.evals import Evals

from tests.evals.conftest import CONFIG, EXACT, PROMPT, House, completions, row


@pytest.fixture
def server(house: House, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The service at an address of its own, with a worker that looks for runs."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(house.app, log_level="warning", log_config=None, lifespan="off"))
    serving = threading.Thread(target=server.run, args=[[listening]])
    serving.start()
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.1):
            house.work()

    working = threading.Thread(target=work)
    working.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    for prefix in ("REGRAFT", "OPENAI"):
        monkeypatch.setenv(f"{prefix}_BASE_URL", url)
        monkeypatch.setenv(f"{prefix}_API_KEY", house.key)
    yield
    stop.set()
    working.join()
    server.should_exit = True
    serving.join()


def test_two_models_are_run_compared_gated_and_taken_along(
    server: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = {"type": "file", "path": "rows.jsonl"}
    config = {
        "data_source_config": CONFIG,
        "testing_criteria": [EXACT],
        "data_source": {"type": "completions", "model": "tiny", "input_messages": PROMPT, "source": source},
    }
    (tmp_path / "eval.json").write_text(json.dumps(config))
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row(number)) for number in range(5)))

    run = ["evals", "run", str(tmp_path / "eval.json"), "--model", "gpt-foreign", "--model", "tiny"]
    assert main([*run, "--output", "json"]) == 0
    theirs, ours = json.loads(capsys.readouterr().out)
    assert (theirs["pass_rate"], ours["pass_rate"]) == (0.0, 1.0)
    assert main(run) == 0
    assert "1.000 ± 0.000" in capsys.readouterr().out

    eval_id = ours["eval_id"]
    assert main(["evals", "compare", eval_id, theirs["id"], ours["id"]]) == 0
    assert "+1.000 to +1.000" in capsys.readouterr().out
    gate = ["evals", "gate", eval_id]
    assert main([*gate, ours["id"], "--min-pass-rate", "0.8", "--baseline", theirs["id"]]) == 0
    assert capsys.readouterr().out == "passed\n"
    assert main([*gate, theirs["id"], "--min-pass-rate", "0.8"]) == 1
    assert "the pass rate is 0.000, and at least 0.8 is required" in capsys.readouterr().out

    # A mistake in the command is neither a yes nor a no.
    for wrong in (["--min-pass-rate", "80"], ["--min-pass-rate", "nan"], ["--allow-errors", "-1"]):
        assert main([*gate, ours["id"], *wrong]) == 2
    assert main([*gate, ours["id"], "--max-drop", "0.1"]) == 2
    assert "max_drop needs a baseline" in capsys.readouterr().err
    assert main([*gate, "evalrun_none"]) == 3
    assert main([*gate, ours["id"], "--baseline", "evalrun_none"]) == 3
    config["name"] = "another"
    (tmp_path / "other.json").write_text(json.dumps(config))
    assert main(["evals", "run", str(tmp_path / "other.json"), "--output", "json"]) == 0
    [foreign] = json.loads(capsys.readouterr().out)
    assert main([*gate, ours["id"], "--baseline", foreign["id"]]) == 2
    assert f"{foreign['id']} is a run of {foreign['eval_id']}" in capsys.readouterr().err
    assert main(["evals", "compare", eval_id, ours["id"], foreign["id"]]) == 2
    # A configuration may have a budget. A run that fails is no success, and does not pass a gate.
    (tmp_path / "small.json").write_text(json.dumps(config | {"budget": {"tokens": 10}}))
    assert main(["evals", "run", str(tmp_path / "small.json"), "--output", "json"]) == 1
    [failed] = json.loads(capsys.readouterr().out)
    assert failed["error"]["code"] == "budget_reached"
    assert main(["evals", "gate", foreign["eval_id"], failed["id"]]) == 1
    why = f"{failed['error']['message']} (budget_reached)"
    assert f"the run is failed: {why}" in capsys.readouterr().out
    assert main(["evals", "run", str(tmp_path / "small.json")]) == 1
    assert f"failed: {why}" in capsys.readouterr().out

    assert main(["migrate-from-openai", "evals", "--out", str(tmp_path / "out")]) == 0
    assert "2 evals, 7 runs, 27 items, 1 files" in capsys.readouterr().out
    assert main(["evals", "import", str(tmp_path / "out")]) == 0
    assert "Imported 2 evals, 7 runs" in capsys.readouterr().out
    assert main(["evals", "compare", eval_id, theirs["id"], "evalrun_none"]) == 3


def test_a_run_without_a_grade_makes_the_exit_code_1_and_says_why(
    server: None, house: House, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    house.foreign.fails.update({"q1", "q2"})
    rows = {"type": "file_content", "content": [row(1), row(2)]}
    config = {
        "data_source_config": CONFIG,
        "testing_criteria": [EXACT],
        "data_source": {
            "type": "completions", "model": "gpt-foreign", "input_messages": PROMPT, "source": rows,
        },
    }  # fmt: skip
    (tmp_path / "eval.json").write_text(json.dumps(config))

    assert main(["evals", "run", str(tmp_path / "eval.json"), "--output", "json"]) == 1

    said = capsys.readouterr()
    [run] = json.loads(said.out)
    assert (run["status"], run["result_counts"]["errored"]) == ("completed", 2)
    assert f"{run['id']}: no item is graded. The first one: " in said.err
    assert "it has no reason" not in said.err


def test_what_is_left_out_makes_the_exit_code_1(
    server: None, house: House, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    client, out = house.openai(), tmp_path / "out"
    made = client.evals.create(data_source_config=CONFIG, testing_criteria=[EXACT])
    run = client.evals.runs.create(made.id, data_source=completions(1))
    Evals(client).wait(made.id, run.id)
    [key] = house.blobs.list(f"projects/{house.project.id}/evals/")
    page = house.blobs.read(key)

    house.blobs.put_bytes(key, b"no page")
    assert main(["migrate-from-openai", "evals", "--out", str(out)]) == 1
    printed = capsys.readouterr()
    assert f"Left out: {run.id}: " in printed.err
    assert "1 evals, 0 runs" in printed.out
    house.blobs.put_bytes(key, page)
    assert main(["migrate-from-openai", "evals", "--out", str(out)]) == 0
    capsys.readouterr()
    [items] = out.glob("evals/*/runs/*/items.jsonl")
    items.write_text('{"no": "item"}\n')
    assert main(["evals", "import", str(out), "--output", "json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["failed"] == 1
