import http.server
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from regraft import Regraft
from regraft.cli import main
from regraft.cli.evals import run_progress
from regraft.cli.output import amount, answer_cell, expected_costs
from regraft.cli.pipelines import text_of
from regraft.requests import read_pipeline
from regraft.types import Pipeline

from core.database.tables import Attempt, Job
from core.jobs.usage import add_usage
from core.service import workers
from tests import factories
from tests.core.test_workers import REPORT
from tests.present import present
from tests.sdk.conftest import GRADER, ROWS, House, working
from worker.evals.runner import EvalRunner

SDK = Path(__file__).parents[2] / "sdk"


ASK, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}


@pytest.fixture
def regraft(
    house: House, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Run the command line, logged in; returns its exit code, stdout and stderr."""
    monkeypatch.setenv("REGRAFT_BASE_URL", house.base_url)
    monkeypatch.setenv("REGRAFT_API_KEY", house.key)
    monkeypatch.setenv("REGRAFT_CONFIG", str(tmp_path / "config.toml"))

    def run(*argv: str) -> tuple[int, str, str]:
        try:
            code = main(argv)
        except SystemExit as exit:  # argparse
            code = int(exit.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def in_json(regraft: Callable[..., tuple[int, str, str]]) -> Callable[..., Any]:
    """The one document that a command prints."""

    def run(*argv: str) -> Any:
        code, out, err = regraft(*argv, "--output", "json")
        assert code == 0, err
        return json.loads(out)

    return run


@pytest.fixture
def learned(house: House) -> str:
    """A job that is done, with rewards, answers and a checkpoint."""
    job_id = house.job(status="running")
    house.say(job_id, "Fine-tuning job started")
    for step, reward in enumerate((0.25, 0.5, 0.75), start=1):
        house.step(job_id, step, 3, reward)
    answer = {"step": 3, "split": "train", "member": 0, "messages": [], "finish_reason": "stop"}
    lines = [(1, "four", 1.0, ""), (2, "five\nsix", 0.0, ""), (3, "?", None, "the judge is asleep")]
    house.rollouts(
        job_id,
        3,
        [answer | {"line": n, "output_text": t, "score": s, "reason": r} for n, t, s, r in lines],
    )
    house.checkpoint(job_id, 3, 0.75, {"adapter_config.json": b"{}"})
    house.end(job_id, "succeeded", fine_tuned_model="ft:tiny:default::1a2b3c4d", finished_at=1_700_000_000)
    return job_id


def pipeline_file(folder: Path) -> Path:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "grader.json").write_text(json.dumps(GRADER))
    stages = [
        {"name": "more", "mix": {"files": [{"file": "train.jsonl", "weight": 2}]}},
        {
            "name": "learn",
            "job": {
                "model": "tiny",
                "training_file": "{{stages.more.file}}",
                "validation_file": "train.jsonl",
                "grader": "grader.json",
            },
        },
    ]
    path = folder / "pipeline.json"
    path.write_text(json.dumps({"name": "two", "stages": stages}))
    return path


def test_a_pipeline_is_created_from_a_file_shown_paused_resumed_cloned_and_cancelled(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], tmp_path: Path
) -> None:
    made = in_json("pipelines", "create", "-f", str(pipeline_file(tmp_path)))

    assert [stage["status"] for stage in made["stages"]] == ["waiting", "waiting"]
    assert made["stages"][1]["spec"]["method"]["reinforcement"]["grader"]["name"] == "exact"
    _, shown, _ = regraft("pipelines", "show", made["id"])
    assert re.search(r"learn +job +waiting +more", shown)
    assert in_json("pipelines", "pause", made["id"])["status"] == "paused"
    code, waited, _ = regraft("pipelines", "wait", made["id"])
    assert (code, "paused (two)" in waited) == (0, True)
    assert in_json("pipelines", "resume", made["id"])["status"] == "running"
    clone = in_json("pipelines", "clone", made["id"])
    assert clone["cloned_from"] == made["id"]
    assert in_json("pipelines", "cancel", made["id"])["status"] == "cancelled"
    assert regraft("pipelines", "wait", made["id"])[0] == 1
    assert in_json("pipelines", "retry", made["id"])["status"] == "running"
    _, listed, _ = regraft("pipelines", "list")
    assert listed.index(clone["id"]) < listed.index(made["id"])
    assert "0 of 2" in listed
    code, _, refused = regraft("pipelines", "clone", made["id"], "--from", "learn")
    assert (code, "no results" in refused) == (2, True)


def test_a_sweep_is_created_from_a_job_file_and_shown_with_its_settings(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    files = {"training_file": "train.jsonl", "validation_file": "train.jsonl"}
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"model": "tiny", "grader": GRADER} | files))

    made = in_json(
        "sweep", str(path), "--over", "learning_rate=1e-5,3e-5", "--over", "seed=1", "--budget", "0.5"
    )

    [stage] = made["stages"]
    assert stage["kind"] == "sweep"
    assert stage["spec"]["over"] == {"learning_rate": [1e-5, 3e-5], "seed": [1]}
    assert stage["spec"]["budget"] == {"gpu_seconds": 1800.0}
    assert stage["spec"]["job"]["training_file"].startswith("file-")
    code, _, refused = regraft("sweep", str(path), "--over", "learning_rate")
    assert (code, "write it as name=value,value" in refused) == (2, True)


def test_the_jobs_of_a_sweep_are_shown_with_the_reason_why_they_were_stopped() -> None:
    jobs = [
        {"settings": {"seed": 1}, "job_id": "ftjob-1", "job_status": "succeeded", "reward": 0.5},
        {"settings": {"seed": 2}, "job_id": "ftjob-2", "job_status": "cancelled", "stopped": "it lost"},
    ]
    stage = {"name": "s", "kind": "sweep", "status": "succeeded", "needs": [], "spec": None, "jobs": jobs}
    fields = {"id": "ftpipe-1", "created_at": 1, "finished_at": 2, "name": None, "status": "succeeded"}
    pipeline = Pipeline.model_validate(
        fields
        | {"metadata": None, "cloned_from": None, "stages": [stage | {"conclusion": "seed 1 is best."}]}
    )

    text = text_of(pipeline)

    assert re.search(r"seed=1 +ftjob-1 +succeeded +0\.500 +-", text)
    assert re.search(r"seed=2 +ftjob-2 +cancelled +- +it lost", text)
    assert text.endswith("s: seed 1 is best.")


def test_a_pipeline_file_of_a_sweep_is_read_with_the_local_files_of_its_job(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    job = {"model": "tiny", "training_file": "train.jsonl", "grader": GRADER}
    path = tmp_path / "pipeline.json"
    path.write_text(json.dumps({"stages": [{"name": "s", "sweep": {"job": job, "over": {"seed": [1, 2]}}}]}))

    request = read_pipeline(path)

    assert request.uploads == {("stages", 0, "sweep", "job", "training_file"): tmp_path / "train.jsonl"}
    [local] = request.jobs
    assert local.uploads == {"training_file": tmp_path / "train.jsonl"}
    assert local.body["method"]["reinforcement"]["grader"] == GRADER


def test_a_pipeline_file_without_stages_is_refused(
    regraft: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    path = tmp_path / "p.toml"
    path.write_text('stages = "none"\n')

    code, _, refused = regraft("pipelines", "create", "-f", str(path))

    assert (code, "'stages' must be a list of tables" in refused) == (2, True)


def test_files_are_uploaded_listed_shown_downloaded_and_deleted(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("{}\n")

    (made,) = in_json("files", "upload", str(path))
    _, listed, _ = regraft("files", "list")
    _, content, _ = regraft("files", "download", made["id"])
    saved = in_json("files", "download", made["id"], "--to", str(tmp_path / "copy"))

    assert re.search(rf"{made['id']} +3 +\d{{4}}-.* fine-tune +train\.jsonl", listed)
    assert (content, saved["bytes"], (tmp_path / "copy").read_text()) == ("{}\n", 3, "{}\n")
    assert in_json("files", "show", made["id"])["filename"] == "train.jsonl"
    assert regraft("files", "delete", made["id"])[:2] == (0, f"Deleted {made['id']}\n")
    assert regraft("files", "show", made["id"])[0] == 3


@pytest.mark.parametrize(
    ("row", "given", "fitting"),
    [
        ({"messages": [ASK, ANSWER]}, "reinforcement", "supervised"),
        ({"messages": [ASK]}, "supervised", "reinforcement"),
        (
            {"input": {"messages": [ASK]}, "preferred_output": [ANSWER], "non_preferred_output": []},
            "supervised",
            "dpo",
        ),
    ],
)
def test_validate_names_the_method_that_the_rows_seem_to_be_for(
    row: dict[str, Any],
    given: str,
    fitting: str,
    regraft: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(row)] * 12))

    code, out, _ = regraft("validate", str(path), "--method", given)

    hint = f"the rows are made for method '{fitting}', and were read as rows for '{given}'. Use method '{fitting}' for "
    assert code == 1
    assert out.startswith(f"{path}: {hint}")


def test_validate_names_lines_as_compilers_do(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], tmp_path: Path
) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    bad.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n{"messages": 1}\n')
    grader = tmp_path / "grader.json"
    grader.write_text(json.dumps(GRADER))

    code, out, _ = regraft("validate", str(good), str(bad), "--grader", str(grader))

    assert code == 1
    assert out.splitlines() == [
        f"{good}: 4 rows, each with answer",
        f"{bad}:1: the grader reads {{{{item.answer}}}}, which this row does not have",
        f"{bad}:2: messages: must be a list of at least one message",
    ]
    assert in_json("validate", str(good)) == [
        {"file": str(good), "ok": True, "rows": 4, "fields": ["answer"]}
    ]


def test_a_job_is_created_from_a_file_and_steered(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], job_file: Path
) -> None:
    code, out, _ = regraft("jobs", "create", "-f", str(job_file), "--set", "seed=11")
    job_id = out.strip()

    assert code == 0
    assert in_json("jobs", "show", job_id)["seed"] == 11
    assert in_json("jobs", "clone", job_id, "--set", "hyperparameters.n_epochs=2")["seed"] == 11
    assert [job["id"] for job in in_json("jobs", "list", "--limit", "5")][1] == job_id
    assert "position 1, no worker reports itself" in regraft("jobs", "show", job_id)[1]
    assert "position 1, no worker reports itself" in regraft("jobs", "list")[1]
    assert regraft("jobs", "pause", job_id)[0] == 2  # its files are still being validated
    assert regraft("jobs", "cancel", job_id)[1] == f"{job_id} is cancelled\n"
    assert regraft("jobs", "resume", job_id)[0] == 2


def test_an_estimate_creates_nothing(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], job_file: Path
) -> None:
    code, out, _ = regraft("jobs", "create", "-f", str(job_file), "--estimate")

    assert code == 0
    assert out.splitlines() == [
        "4 training rows, 4 validation rows",
        "3 steps: 3 epochs, 4 prompts per step, 8 answers per prompt",
        "time and cost are unknown: no job of this model has run here yet",
    ]
    assert in_json("jobs", "list") == []


def test_a_file_is_profiled(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], tmp_path: Path
) -> None:
    rows = [{"messages": [{"role": "user", "content": text}], "answer": "1"} for text in ("a", "bb", "a")]
    file, grader = tmp_path / "train.jsonl", tmp_path / "grader.json"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"messages": []}]))
    grader.write_text(json.dumps(GRADER | {"reference": "{{item.label}}"}))
    [uploaded] = in_json("files", "upload", str(file))

    code, out, _ = regraft(
        *("files", "profile", uploaded["id"], "--grader", str(grader), "--validation-file", uploaded["id"])
    )

    assert code == 0
    assert out.splitlines() == [
        "3 rows of a reinforcement job, 1 invalid lines",
        "  line 4: messages: must be a list of at least one message",
        "tokens: not counted, no model is given",
        "characters: 1 to 2, 1 in the middle, 2 at 99 %",
        "1 rows repeat an earlier prompt, 1 of them an earlier row",
        "  lines 1, 3",
        f"3 of 3 rows of {uploaded['id']} have a prompt of this file",
        "  its line 1 is line 1 here",
        "  its line 2 is line 2 here",
        "  its line 3 is line 1 here",
        "the grader reads item.label: 3 rows lack it",
        "  lines 1, 2, 3",
        "",
        "field     missing  type    different  first value",
        'messages        0  array           2  [{"role": "user", "content": "a"}]',
        'answer          0  string          1  "1"',
    ]
    assert in_json("files", "profile", uploaded["id"])["grader"] is None


def test_a_profile_names_the_rows_whose_answers_all_score_alike(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], tmp_path: Path
) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}], "answer": answer} for answer in ("", "a", "")]
    file, grader = tmp_path / "train.jsonl", tmp_path / "grader.json"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    grader.write_text(json.dumps(GRADER | {"operation": "like"}))
    [uploaded] = in_json("files", "upload", str(file))

    _, out, _ = regraft("files", "profile", uploaded["id"], "--grader", str(grader))

    name = GRADER["name"]
    doubt = f"an empty reference for '{name}', and every answer contains an empty text: 'like' scores all answers 1"
    assert f"2 rows are doubtful: each has {doubt}\n  lines 1, 3\n" in out


def test_a_preview_in_a_pipe_creates_nothing(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], job_file: Path, model: None
) -> None:
    asked = ("jobs", "create", "-f", str(job_file), "--preview", "--rows", "2", "--samples", "2")
    code, out, err = regraft(*asked)

    assert code == 0, err
    assert err.startswith("loading the model\n")
    assert err.endswith("\nNothing was created; pass --yes to create the job.\n")
    lines = out.splitlines()
    assert lines[0] == "2 rows sampled, 4 answers"
    assert lines[1].startswith("2 pass (reward 0.5 or more): 50 %, between ")
    assert lines[2] == "answers per prompt  groups with signal"
    assert lines[3].startswith("2                   100 %, between ")
    assert lines[5].startswith("8 (the job's)       at least 100 %, between ")
    assert "3 tokens per answer, at most 3; 0 cut off at 512" in lines
    assert "4 training rows, 4 validation rows" in lines
    assert any("based on the preview's answers and their speed" in line for line in lines)
    assert lines[-1].startswith("2 of 4 answers pass, and at least 100 % of the groups of 8 have signal: ")
    found = in_json(*asked)
    assert (found["preview"]["verdict"], found["job"]) == ("good", None)
    newest, first = in_json("previews", "list")
    assert regraft("previews", "list")[1].splitlines()[1].endswith("0.50         good")
    assert regraft("previews", "show", first["id"])[1].splitlines()[:8] == lines[:8]
    assert regraft("previews", "answers", first["id"])[1].splitlines()[0] == "line  score  answer"
    assert len(in_json("previews", "answers", first["id"])) == 4
    assert regraft("previews", "cancel", first["id"])[1] == f"{first['id']} is completed\n"
    assert regraft("previews", "delete", newest["id"])[1] == f"Deleted {newest['id']}\n"
    assert [one["id"] for one in in_json("previews", "list")] == [first["id"]]
    assert in_json("jobs", "list") == []


def test_yes_creates_the_job_after_the_preview(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], job_file: Path, model: None
) -> None:
    asked = ("jobs", "create", "-f", str(job_file), "--preview", "--yes", "--rows", "2", "--samples", "2")
    code, out, err = regraft(*asked)
    found = in_json(*asked)

    assert code == 0
    assert err.startswith("loading the model\n")
    assert "2 rows sampled, 4 answers\n" in err
    assert [job["id"] for job in in_json("jobs", "list")] == [found["job"]["id"], out.strip()]


@pytest.mark.slow  # each starts a process, in a second; so do the others in this file that have this mark
@pytest.mark.parametrize(("said", "code", "created"), [(b"y\n", 0, 1), (b"\n", 0, 0), (b"\x04", 130, 0)])
def test_in_a_terminal_a_preview_asks(
    house: House, client: Regraft, job_file: Path, model: None, said: bytes, code: int, created: int
) -> None:
    primary, secondary = pty.openpty()
    ends = {"stdout": secondary, "stderr": secondary, "stdin": secondary}
    process = command(house, "jobs", "create", "-f", str(job_file), "--preview", **ends)
    os.close(secondary)
    written = b""
    while not written.endswith(b"Create the job? [y/N] "):
        written += os.read(primary, 65536)
    os.write(primary, said)
    try:
        while chunk := os.read(primary, 65536):
            written += chunk
    except OSError:
        pass  # it is done

    assert process.wait() == code, written
    os.close(primary)
    assert b"groups with signal" in written and b"Traceback" not in written
    assert len(list(client.jobs.list())) == created


def test_what_belongs_to_a_preview_is_refused_without_one(
    regraft: Callable[..., tuple[int, str, str]], job_file: Path
) -> None:
    code, _, err = regraft("jobs", "create", "-f", str(job_file), "--yes")

    assert (code, "require --preview" in err) == (2, True)


def test_a_preview_without_an_inference_server_says_what_is_missing(
    regraft: Callable[..., tuple[int, str, str]], job_file: Path
) -> None:
    code, _, err = regraft("jobs", "create", "-f", str(job_file), "--preview")

    assert (code, "REGRAFT_INFERENCE_URL" in err) == (2, True)


def test_what_is_known_of_time_and_cost_is_a_range() -> None:
    from regraft.cli.jobs import estimate_text

    size = {"training_rows": 1, "validation_rows": 1, "total_steps": 2, "n_epochs": 1, "batch_size": 1}
    known = {
        "remaining_seconds": {"low": 50.0, "expected": 90.0, "high": 7260.0},
        "based_on": "20 steps of 1 earlier job",
        "upper_end": "the upper end assumes that every answer uses all 512 tokens",
        "cost": {"low": 0.5, "expected": 1.0, "high": 20.0, "currency": "USD"},
    }

    assert estimate_text(size | {"group_size": 8, "estimate": known}).splitlines()[2:] == [
        "1 min 30 s, between 50 s and 2 h 01 min, based on 20 steps of 1 earlier job",
        "the upper end assumes that every answer uses all 512 tokens",
        "1.00, between 0.5000 and 20.00 USD",
    ]


def test_a_job_is_shown_with_the_course_of_its_rewards(
    regraft: Callable[..., tuple[int, str, str]], learned: str
) -> None:
    _, out, _ = regraft("jobs", "show", learned)

    lines = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines())
    assert lines["status"] == "succeeded"
    assert lines["step"] == "3 of 3"
    assert lines["train reward"] == "0.25 ▃▅▆ 0.75"
    assert lines["finished"] == "2023-11-14 22:13 UTC"


def test_a_job_that_ended_is_shown_with_what_it_used(
    regraft: Callable[..., tuple[int, str, str]], house: House
) -> None:
    job_id = house.job(status="succeeded", usage={"gpu_seconds": 5430.0}, gpu_seconds=5430.0)

    assert re.search("^GPU time +1 h 30 min$", regraft("jobs", "show", job_id)[1], re.MULTILINE)


def test_a_supervised_job_is_shown_with_the_course_of_its_losses(
    regraft: Callable[..., tuple[int, str, str]], house: House
) -> None:
    asked = {"hyperparameters": {"n_epochs": 3}}
    job_id = house.job(method="supervised", body=asked, validation_file=None, status="succeeded")
    with house.database.write() as session:
        job = session.query(Job).where(Job.id == job_id).one()
        for number, loss in ((1, 4.0), (2, 3.0), (3, 1.0)):
            factories.step(session, job, number, train_loss=loss, total_steps=3)

    _, out, _ = regraft("jobs", "show", job_id)

    lines = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines())
    assert lines["method"] == "supervised"
    assert lines["files"] == "file-train"
    assert lines["train loss"] == "4.00 █▆▃ 1.00"


def test_a_preference_job_is_shown_with_its_accuracy_and_margin(
    regraft: Callable[..., tuple[int, str, str]], house: House
) -> None:
    job_id = house.job(method="dpo", body={"hyperparameters": {}}, status="succeeded")
    measured: dict[str, Any] = {
        "train_loss": 0.5,
        "train_mean_reward_accuracy": 0.25,
        "train_mean_reward_margin": -1.0,
    }
    with house.database.write() as session:
        job = session.query(Job).where(Job.id == job_id).one()
        factories.step(
            session,
            job,
            0,
            total_steps=2,
            full_valid_mean_reward_accuracy=0.0,
            full_valid_mean_reward_margin=0.0,
        )
        factories.step(session, job, 1, total_steps=2, **measured)
        measured |= {"train_mean_reward_accuracy": 0.75, "train_mean_reward_margin": 3.0}
        factories.step(session, job, 2, total_steps=2, **measured, full_valid_mean_reward_accuracy=0.5)

    _, out, _ = regraft("jobs", "show", job_id)

    lines = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines())
    assert lines["train accuracy"] == "0.25 ▃▆ 0.75"
    assert lines["valid accuracy"] == "0.00 ▁▅ 0.50"
    assert lines["train margin"] == "-1.00 ▁█ 3.00"
    assert lines["valid margin"] == "0.00"


def test_a_distillation_job_is_shown_with_its_kl_to_the_teacher(
    regraft: Callable[..., tuple[int, str, str]], house: House
) -> None:
    body = {"teacher": {"model": "tiny"}, "hyperparameters": {}}
    job_id = house.job(method="distillation", body=body, status="succeeded")
    with house.database.write() as session:
        job = session.query(Job).where(Job.id == job_id).one()
        for number, kl in ((1, 2.0), (2, 1.0)):
            factories.step(session, job, number, total_steps=2, teacher_kl=kl)

    _, out, _ = regraft("jobs", "show", job_id)

    assert re.search("^train KL to the teacher +2.00 █▅ 1.00$", out, re.MULTILINE)


def test_watching_in_a_pipe_prints_lines_and_then_the_model(
    regraft: Callable[..., tuple[int, str, str]], learned: str
) -> None:
    code, out, _ = regraft("jobs", "watch", learned)

    assert code == 0
    assert out.splitlines() == [
        "Fine-tuning job started",
        "step 1/3  train 0.25  1.5 s",
        "step 2/3  train 0.50  1.5 s",
        "step 3/3  train 0.75  1.5 s",
        "now succeeded",
        "ft:tiny:default::1a2b3c4d",
    ]


def test_watching_in_json_is_a_document_a_line_the_job_last(
    regraft: Callable[..., tuple[int, str, str]], learned: str
) -> None:
    code, out, _ = regraft("jobs", "watch", learned, "--output", "json")

    *told, job = map(json.loads, out.splitlines())
    assert code == 0
    assert [event["type"] for event in told] == ["message", "metrics", "metrics", "metrics", "message"]
    assert (job["id"], job["status"]) == (learned, "succeeded")


VERDICT = {
    "outcome": "worse",
    "base_reward": 0.59,
    "tuned_reward": 0.0,
    "difference": -0.59,
    "ci_low": -0.8,
    "ci_high": -0.38,
    "wins": 0,
    "losses": 6,
    "ties": 0,
    "rows": 6,
    "ungraded": 0,
    "step": 2,
    "ground": None,
    "start": None,
    "held_out": True,
    "shadow_difference": None,
    "shadow_ci_low": None,
    "shadow_ci_high": None,
}
WORSE = (
    "worse than the base model: 0.59 -> 0.00 "
    "(difference -0.59, 95 % interval -0.80 to -0.38; 0 wins, 6 losses, 0 ties in 6 rows)"
)


def test_watching_a_job_that_ends_worse_than_its_base_says_so_and_is_exit_code_1(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], house: House
) -> None:
    job_id = house.job()
    house.end(job_id, "succeeded", fine_tuned_model="ft:tiny:acme:worse:1", verdict=VERDICT)

    code, out, err = regraft("jobs", "watch", job_id)
    json_code, documents, _ = regraft("jobs", "watch", job_id, "--output", "json")
    _, shown, _ = regraft("jobs", "show", job_id)

    assert (code, json_code) == (1, 1)
    assert out.splitlines()[-1] == "ft:tiny:acme:worse:1"
    assert err == f"{WORSE}\n"
    assert json.loads(documents.splitlines()[-1])["verdict"] == VERDICT
    assert f"verdict      {WORSE}\n" in shown


def test_the_list_of_jobs_says_why_one_failed_and_that_there_are_more(
    regraft: Callable[..., tuple[int, str, str]], house: House
) -> None:
    error = {"code": "invalid_training_file", "message": "Row 3 has no answer.", "param": "training_file"}
    house.end(house.job(), "failed", error=error)

    _, listed, said = regraft("jobs", "list", "--limit", "1")
    assert "Row 3 has no answer." in listed
    assert said == ""

    house.job()
    _, listed, said = regraft("jobs", "list", "--limit", "1")
    assert "Row 3 has no answer." not in listed
    assert said == "The newest 1 jobs; --limit N lists more.\n"


def test_a_job_has_the_numbers_of_its_delivered_checkpoint_in_every_command(
    regraft: Callable[..., tuple[int, str, str]], house: House
) -> None:
    job_id, better = house.job(), {"outcome": "improved", "base_reward": 0.4, "tuned_reward": 0.94, "step": 2}
    for step, valid in enumerate((0.4, None, 0.94, 0.83)):
        house.step(job_id, step, 3, 0.5, full_valid_mean_reward=valid)
    house.end(job_id, "succeeded", fine_tuned_model="ft:tiny:acme::1", verdict=VERDICT | better)

    _, shown, _ = regraft("jobs", "show", job_id)
    _, listed, _ = regraft("jobs", "list")
    _, watched, said = regraft("jobs", "watch", job_id)

    lines = dict(re.split(r"  +", line, maxsplit=1) for line in shown.splitlines())
    assert lines["result"] == "0.40 -> 0.94 at step 2"
    assert lines["valid reward"].startswith("0.40 ") and lines["valid reward"].endswith(" 0.94")
    assert "0.40 -> 0.94 at step 2" in listed
    assert "0.40 -> 0.94" in said
    assert "valid 0.83" in watched.splitlines()[3]  # of the step


def test_a_damaged_model_with_too_few_rows_for_an_interval_is_exit_code_1(
    regraft: Callable[..., tuple[int, str, str]], house: House
) -> None:
    job_id, changes = house.job(), {"ci_low": None, "ci_high": None, "ground": "kl_jump"}
    house.end(job_id, "succeeded", fine_tuned_model="ft:tiny:acme:worse:1", verdict=VERDICT | changes)

    code, _, err = regraft("jobs", "watch", job_id)

    assert code == 1
    assert err.startswith(
        "worse than the base model, damaged (kl jump): 0.59 -> 0.00 (difference -0.59; 0 wins"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"outcome": "improved", "difference": 0.15}, "better than the base model: "),
        ({"outcome": "no_difference", "difference": 0.0}, "no difference to the base model: "),
        (
            {"outcome": "no_difference", "difference": -0.03},
            "not significantly different from the base model: ",
        ),
        (
            {"outcome": "too_few", "difference": 0.1, "ci_low": None, "ci_high": None},
            "too few rows to compare with the base model: ",
        ),
    ],
)
def test_any_other_verdict_is_said_and_is_exit_code_0(
    regraft: Callable[..., tuple[int, str, str]],
    client: Regraft,
    house: House,
    changes: dict[str, Any],
    said: str,
) -> None:
    job_id = house.job()
    house.end(job_id, "succeeded", fine_tuned_model="ft:tiny:acme::1", verdict=VERDICT | changes)

    code, _, err = regraft("jobs", "watch", job_id)

    assert code == 0
    assert said in err
    assert present(client.jobs.verdict(job_id)).outcome == changes["outcome"]


def test_a_best_checkpoint_below_the_base_is_marked_so(
    regraft: Callable[..., tuple[int, str, str]], house: House
) -> None:
    job_id = house.job()
    house.checkpoint(job_id, 2, 0.25, {}, full_valid_difference=-0.25)
    house.checkpoint(job_id, 1, 0.20, {}, full_valid_difference=-0.3)

    _, out, _ = regraft("checkpoints", "list", job_id)

    assert re.search(r" 2 +0\.250 +-0\.250 +best, below base +-", out)
    assert re.search(r" 1 +0\.200 +-0\.300 +-", out)


def test_a_job_that_failed_is_exit_code_1_with_the_servers_reason(
    regraft: Callable[..., tuple[int, str, str]], house: House
) -> None:
    job_id = house.job(status="failed", error={"code": "invalid_grader", "message": "no", "param": None})

    code, _, err = regraft("jobs", "watch", job_id)

    assert (code, err) == (1, f"regraft: The job {job_id} failed: no (invalid_grader)\n")
    assert regraft("jobs", "watch", job_id, "--output", "json")[0] == 1


def test_a_list_of_bad_lines_is_told_by_the_event_and_not_again(
    regraft: Callable[..., tuple[int, str, str]], house: House
) -> None:
    message = "Training file file-x: line 1: is blank\nline 2: is blank"
    job_id = house.job(status="failed", error={"code": "invalid_file", "message": message, "param": None})

    _, _, err = regraft("jobs", "watch", job_id)

    assert err == f"regraft: The job {job_id} failed: Training file file-x: line 1: is blank (invalid_file)\n"


@pytest.mark.parametrize(
    ("answer", "encoding", "shown"),
    [
        ("four", "utf-8", "four"),
        ("  four five\n", "utf-8", "··four five\\n"),
        (" four\n", "ascii", "_four\\n"),
        ("\n\tfour", None, "\\n\\tfour"),
        (" ", "utf-8", "·"),
        (" " * 20 + "four", "utf-8", "·" * 8 + "…four"),
        ("", "utf-8", ""),
        ("four\n  five", "utf-8", "four five"),
    ],
)
def test_blanks_at_the_ends_of_an_answer_show_in_a_table(
    answer: str, encoding: str | None, shown: str
) -> None:
    assert answer_cell(answer, 40, encoding) == shown


def test_an_answer_with_a_leading_blank_is_marked_in_the_table_and_not_in_json(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], house: House
) -> None:
    job_id = house.job(status="running")
    house.step(job_id, 1, 2, 0.5)
    answer = {"step": 1, "split": "train", "line": 1, "member": 0, "messages": [], "finish_reason": "stop"}
    house.rollouts(job_id, 1, [answer | {"output_text": " four", "score": 1.0, "reason": ""}])

    _, out, _ = regraft("rollouts", job_id)

    assert "·four" in out
    assert in_json("rollouts", job_id)[0]["output_text"] == " four"


def test_answers_of_the_last_step_are_a_table(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], learned: str
) -> None:
    _, out, err = regraft("rollouts", learned, "--worst")

    rows = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    assert rows[1:4] == [
        ["3", "0", "-", "stop", "?", "the judge is asleep"],
        ["2", "0", "0.000", "stop", "five six"],
        ["1", "0", "1.000", "stop", "four"],
    ]
    assert err == "step 3, train: 3 of 3 answers\n"
    assert [one["line"] for one in in_json("rollouts", learned, "--step", "3")] == [1, 2, 3]
    assert in_json("rollouts", learned, "--ungraded")[0]["reason"] == "the judge is asleep"


def test_answers_come_with_their_question_expected_answer_sub_scores_and_reason(
    regraft: Callable[..., tuple[int, str, str]], house: House
) -> None:
    job_id = house.job(status="running")
    house.step(job_id, 1, 2, 0.5)
    answer = {
        "step": 1,
        "split": "train",
        "line": 43,
        "messages": [{"role": "user", "content": "A room for ten?\nWhich desk?"}],
        "item": json.dumps({"answer": "room booking"}),
        "finish_reason": "stop",
        "completion_tokens": 3,
        "score": 0.5,
        "reason": "close",
        "sub_scores": {"exact": 0.0, "similar": 1.0},
    }
    house.rollouts(job_id, 1, [answer | {"member": n, "output_text": f"{'desk ' * 30}{n}"} for n in (0, 1)])

    _, out, _ = regraft("rollouts", job_id)
    _, full, _ = regraft("rollouts", job_id, "--full")

    assert out.count("exact 0.000, similar 1.000; close") == 2
    rows = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    assert rows[-2:] == [
        ["line", "question", "expected"],
        ["43", "A room for ten? Which desk?", "room booking"],
    ]
    assert "user:\n  A room for ten?\n  Which desk?\nanswer:\n  room booking\n" in full
    assert f"{'desk ' * 30}1" in full
    assert full.count("sub-scores:\n  exact 0.000, similar 1.000\nreason:\n  close") == 2


def test_a_job_that_ended_without_answers_is_not_worth_waiting_for(
    regraft: Callable[..., tuple[int, str, str]], house: House
) -> None:
    running, failed = house.job(status="running"), house.job(status="running")
    house.end(failed, "failed")

    assert "no train rollouts yet" in regraft("rollouts", running)[2]
    assert "ended without train rollouts" in regraft("rollouts", failed)[2]


def test_answers_of_several_steps_are_a_table_or_a_file(
    regraft: Callable[..., tuple[int, str, str]], house: House, learned: str, tmp_path: Path
) -> None:
    answer = {"split": "train", "member": 0, "messages": [], "finish_reason": "stop", "reason": ""}
    house.rollouts(learned, 2, [answer | {"step": 2, "line": 1, "output_text": "vier", "score": 0.25}])

    ranged = ("rollouts", learned, "--step-from", "1", "--max-score", "0.5")
    _, out, err = regraft(*ranged)
    _, first, more = regraft(*ranged, "--limit", "1")
    code, said, _ = regraft("rollouts", learned, "--graded", "--to", str(tmp_path / "answers.jsonl"))

    assert [line.split()[:4] for line in out.splitlines()[1:3]] == [
        ["2", "train", "1", "0"],
        ["3", "train", "2", "0"],
    ]
    assert err == "2 of 2 answers\n"
    assert [line.split() for line in first.splitlines()[:2]] == [
        line.split() for line in out.splitlines()[:2]
    ]
    assert more == "the first 1 answers; --limit 0 shows all\n"
    saved = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [one["output_text"] for one in saved] == ["vier", "four", "five\nsix"]
    assert (code, said) == (
        0,
        f"{tmp_path}/answers.jsonl: {(tmp_path / 'answers.jsonl').stat().st_size} bytes\n",
    )


def test_answers_are_searched_and_sorted(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], learned: str
) -> None:
    assert [one["line"] for one in in_json("rollouts", learned, "--search", "FIVE")] == [2]
    assert [one["line"] for one in in_json("rollouts", learned, "--group", "0", "--step", "3")] == [1]
    assert [one["line"] for one in in_json("rollouts", learned, "--sort", "score")] == [1, 2, 3]
    _, out, _ = regraft("rollouts", learned, "--sort", "advantage")
    assert out.split()[:4] == ["line", "member", "reward", "advantage"]


def test_prompts_are_a_table_of_what_was_learned(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], house: House, learned: str
) -> None:
    answer = {"split": "train", "member": 0, "finish_reason": "stop", "reason": ""}
    answer["messages"] = [{"role": "user", "content": "2 + 2\n?"}]
    house.rollouts(learned, 2, [answer | {"step": 2, "line": 1, "output_text": "vier", "score": 0.25}])

    _, out, err = regraft("prompts", learned, "--split", "train")

    rows = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    assert rows[1:] == [
        ["1", "learned", "0.250", "1.000", "+0.750", "2", "2 + 2 ?"],
        ["2", "stuck", "0.000", "0.000", "+0.000", "1"],
        ["3", "ungraded", "-", "-", "-", "1"],
    ]
    assert err == "1 learned, 1 stuck, 1 ungraded; a prompt is solved from a mean reward of 0.5\n"
    chosen = ("prompts", learned, "--split", "train", "--sort", "last_mean", "--limit", "1")
    assert [one["line"] for one in in_json(*chosen)] == [2]
    assert [one["steps"] for one in in_json("prompts", learned, "--split", "train", "--line", "1")] == [
        [2, 3]
    ]
    assert regraft("prompts", learned)[1:] == (
        "line  outcome  first  last  change  steps  prompt\n",
        "no prompts; a prompt is solved from a mean reward of 0.5\n",
    )


def test_another_formula_is_shown_beside_the_stored_scores(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], house: House
) -> None:
    parts = {name: GRADER | {"name": name} for name in ("says", "close")}
    grader = {"type": "multi", "name": "both", "graders": parts, "calculate_output": "says"}
    job_id = house.job(status="running", body={"grader": grader})
    answer = {"step": 1, "split": "train", "line": 1, "messages": [], "finish_reason": "stop"}
    scores = [(0.0, 1.0), (1.0, 0.5)]
    house.rollouts(
        job_id,
        1,
        [
            answer | {"member": n, "output_text": "4", "score": a, "sub_scores": {"says": a, "close": b}}
            for n, (a, b) in enumerate(scores)
        ],
    )

    _, out, _ = regraft("what-if", job_id, "close", "--split", "train", "--advantage-scale", "group")

    lines = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    assert lines[:8] == [
        ["2 answers", "stored", "with the formula"],
        ["mean reward", "0.500", "0.750"],
        ["graded answers", "2", "2"],
        ["passed, from 0.5", "1", "2"],
        ["groups with signal, of 1", "1", "1"],
        ["expected with signal, of groups of 2", "100%", "100%"],
        ["mean size of advantages, scale group", "1.000", "1.000"],
        ["largest advantage", "1.000", "1.000"],
    ]
    assert out.splitlines()[8] == (
        "1 higher, 1 lower, 0 the same; 1 now pass, 0 now fail; 2 would be learned the other way, "
        "cosine with the stored ones -1.000, rank correlation -1.000"
    )
    assert in_json("what-if", job_id, "close", "--step-from", "2")["answers"] == 0


def test_an_update_is_attributed_to_prompts_and_parts_in_two_tables(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], house: House
) -> None:
    parts = {name: GRADER | {"name": name} for name in ("says", "close")}
    grader = {"type": "multi", "name": "both", "graders": parts, "calculate_output": "says + close"}
    job_id = house.job(status="running", body={"grader": grader})
    message = {"role": "user", "content": "2 + 2 ?"}
    answer = {"step": 1, "split": "train", "line": 1, "messages": [message], "finish_reason": "stop"}
    house.rollouts(
        job_id,
        1,
        [
            answer
            | {
                "member": member,
                "output_text": "4",
                "completion_tokens": 3,
                "score": score,
                "sub_scores": {"says": score, "close": 0.0},
                "advantage": score - 0.5,
                "trained": True,
            }
            for member, score in enumerate((0.0, 1.0))
        ],
    )

    _, out, _ = regraft("attribution", job_id, "--step", "1")

    assert [re.split(r"  +", line.strip()) for line in out.splitlines()] == [
        ["step", "group", "line", "share", "with advantage", "mean", "prompt"],
        ["1", "0", "1", "100.0%", "2 of 2", "0.500", "2 + 2 ?"],
        [""],
        ["part of the grader", "share"],
        ["says", "100.0%"],
        ["close", "0.0%"],
        [""],
        ["2 of 2 answers have an advantage; 1 of 1 groups make half of the updates"],
    ]
    assert in_json("attribution", job_id, "--step", "1")["groups_of_half"] == 1


def test_stored_answers_are_regraded_by_a_command_that_waits_and_shows_what_changed(
    regraft: Callable[..., tuple[int, str, str]],
    in_json: Callable[..., Any],
    graded_job: str,
    runner: EvalRunner,
    tmp_path: Path,
) -> None:
    file = tmp_path / "lenient.json"
    file.write_text(json.dumps(GRADER | {"operation": "ilike"}))

    with working(runner):
        code, out, err = regraft("regrade", graded_job, "--grader", str(file), "--name", "lenient")

    lines = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    assert code == 0
    assert re.match(r"regrade_\w+: 2 answers\n", err)
    assert lines[:6] == [
        ["2 answers", "stored", "with the grader"],
        ["mean reward", "0.500", "1.000"],
        ["graded answers", "2", "2"],
        ["passed", "1", "2"],
        ["groups with signal, of 1", "1", "0"],
        ["expected with signal, of groups of 2", "100%", "0%"],
    ]
    assert lines[6][0].startswith("1 higher, 0 lower, 1 the same; 1 now pass, 0 now fail")
    _, listed, _ = regraft("regrades", graded_job)
    assert re.search(r"regrade_\w+ +lenient +completed +2 of 2 +0\.500 +1\.000 +1", listed)
    waiting = in_json("regrade", graded_job, "--grader", str(file), "--no-wait")
    assert waiting["status"] == "queued"
    assert regraft("regrade", graded_job, "--grader", str(file), "--step-from", "9")[0] == 2


def test_jobs_are_compared_prompt_by_prompt_and_by_their_requests(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], house: House, client: Regraft
) -> None:
    first = house.job(seed=1)
    second = house.job(seed=2, body={"grader": GRADER, "hyperparameters": {"n_epochs": 2, "advanced": {}}})
    answer = {
        "split": "valid",
        "member": 0,
        "finish_reason": "stop",
        "completion_tokens": 1,
        "output_text": "4",
    }
    for job_id, scores in ((first, [0.0, 0.5, 0.0]), (second, [1.0, 0.5, 0.5])):
        lines = [
            answer | {"messages": [{"role": "user", "content": str(n)}], "line": n + 1, "score": score}
            for n, score in enumerate(scores)
        ]
        house.rollouts(job_id, 3, lines, split="valid")

    third = house.job(seed=1)

    _, out, _ = regraft("jobs", "compare", first, second, third)

    found = client.jobs.compare(first, second, third)
    pair = found.pairs[0]
    assert pair.reward is not None
    assert (pair.prompts, pair.unpaired, pair.same_grader) == (3, 0, True)
    assert pair.reward.difference == pytest.approx(0.5)
    assert [(one.step, one.model, one.cost) for one in found.jobs[:2]] == [(3, "tiny", None)] * 2
    assert (
        f"{second} against {first}, 3 prompts in both: 0.667 and 0.167, difference +0.500 (-0.742 to +1.742)"
        in out
    )
    assert "better on 2, worse on 0, equal on 1" in out
    assert f"\n{third} has no stored validation." in out
    twice = regraft("jobs", "compare", first, second, first)
    assert (twice[0], f"the job '{first}' is named twice" in twice[2]) == (2, True)
    nothing = regraft("jobs", "compare", third, house.job(seed=1))[1]
    assert f"\n{third} and ftjob-" in nothing and " have no stored validation." in nothing
    assert re.search(r"hyperparameters\.n_epochs +1 +2 +1", out)
    assert re.search(r"^seed +1 +2 +1", out, re.MULTILINE)
    fields = [one["field"] for one in in_json("jobs", "compare", first, second)["config"]]
    assert fields == ["hyperparameters.n_epochs", "seed"]


def test_the_ledger_of_a_job_is_shown_downloaded_and_compared(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], house: House, client: Regraft
) -> None:
    first, second = house.job(seed=1), house.job(seed=2)
    timing = {"step": {"sampling": 120.0, "training": 15.0, "full_iteration": 135.0}}
    house.step(first, 1, 2, 0.5, learned_tokens=3000, zero_variance_tokens=1000, timing=timing)

    _, out, _ = regraft("jobs", "ledger", first)

    assert re.search(r"Learned +3000 +75\.0 % +1 min 45 s +77\.8 % +-", out), out
    assert re.search(r"Zero-variance groups +1000 +25\.0 % +30 s +22\.2 % +-", out), out
    assert re.search(r"All +4000 +100\.0 % +2 min 15 s +100\.0 % +-", out), out
    assert "Ungraded" not in out
    assert regraft("jobs", "ledger", second)[1] == "No step is recorded yet.\n"
    assert in_json("jobs", "ledger", first)["steps"][0]["tokens"] == {"learned": 3000, "zero_variance": 1000}
    _, csv, _ = regraft("jobs", "ledger", first, "--csv")
    assert csv == client.jobs.ledger_csv(first)
    assert csv.splitlines()[1] == "1,learned,3000,105.0,,"
    assert regraft("jobs", "ledger", first, "--csv", "--output", "json")[0] == 2
    _, compared, _ = regraft("jobs", "compare", first, second)
    assert re.search(r"Learned +75\.0 % / 77\.8 % +0\.0 % / 0\.0 %", compared), compared
    assert "Learned" not in regraft("jobs", "compare", second, house.job(seed=3))[1]


def test_attempts_and_logs_of_a_job_are_shown(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], house: House
) -> None:
    job_id = house.job()
    with house.database.write() as session:
        attempt = Attempt(job_id=job_id, epoch=1, kind="run", worker="w", started_at=1_750_000_000.0)
        attempt.ended_at, attempt.outcome, attempt.reason = 1_750_000_090.0, "crashed", "out of memory"
        attempt.resumed_from = 3
        session.add(attempt)

    _, out, _ = regraft("jobs", "attempts", job_id)

    assert re.search(r"1 +run +\S+ \S+ UTC +1 min 30 s +crashed +3 +out of memory", out), out
    assert in_json("jobs", "attempts", job_id)[0]["resumed_from_step"] == 3
    assert "--- attempt 1: crashed" in regraft("jobs", "logs", job_id)[1]
    assert "attempt 1" in in_json("jobs", "logs", job_id)["log"]


def test_a_budget_is_shown_changed_and_removed(
    regraft: Callable[..., tuple[int, str, str]], house: House
) -> None:
    job_id = house.job(gpu_seconds=600.0)

    assert regraft("jobs", "budget", job_id)[1] == f"{job_id} has no budget.\n"
    _, out, _ = regraft("jobs", "budget", job_id, "--gpu-hours", "0.5")
    assert out == f"{job_id}: 10 min 00 s of GPU time used, 20 min 00 s left of 30 min 00 s\n"
    assert regraft("jobs", "budget", job_id)[1] == out
    assert regraft("jobs", "budget", job_id, "--none")[1] == f"{job_id} has no budget.\n"
    assert regraft("jobs", "budget", job_id, "--amount", "5")[0] == 2


def test_usage_is_summed_by_day_model_and_project(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], house: House, client: Regraft
) -> None:
    with house.database.write() as session:
        for model, seconds in (("tiny", 90.0), ("large", 10.0)):
            add_usage(session, house.project.id, model=model, gpu_seconds=seconds, trained_tokens=10)

    _, out, _ = regraft("usage", "--by", "day,model")

    today = time.strftime("%Y-%m-%d", time.gmtime())
    assert re.search(rf"^{today} +tiny +1 min 30 s +0 +0 +10 +0 +-$", out, re.MULTILINE), out
    assert in_json("usage", "--all-projects", "--by", "project")["data"][0]["gpu_seconds"] == 100.0
    assert [row.model for row in client.service.usage(by="model", days=1).data] == ["tiny", "large"]
    assert regraft("usage", "--by", "hour")[0] == 2


def test_the_validations_of_jobs_are_short_curves(house: House, client: Regraft) -> None:
    job_id = house.job()
    house.step(job_id, 0, 4, 0.25, full_valid_mean_reward=0.5)

    [curve] = client.jobs.curves([job_id])

    assert (curve.metric, curve.values, curve.total_steps) == ("full_valid_mean_reward", [0.5], 4)


def test_workers_and_queues_are_listed(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], house: House, client: Regraft
) -> None:
    progress = {"epoch": 1, "step": 3, "phase": "sampling", "done": 37, "of": 64, "since": 0}
    running = house.job(status="running", lease_owner="a/1", progress=progress)
    house.job(gpu_class="h200")
    with house.database.write() as session:
        workers.begin(session, REPORT)

    _, out, _ = regraft("workers")

    assert re.search(
        rf"^a/1 +cpu +busy +1.0/140.0 GiB +0.0/0.0 GiB +not run +{running} 3: sampling 37/64 +20\S+ \S+ UTC +0.1.0$",
        out,
        re.MULTILINE,
    ), out
    assert re.search(
        r"^h200 +1 +\d+ s +0 +0 +0 +no worker of class h200 reports itself$", out, re.MULTILINE
    ), out
    shown = in_json("workers")
    assert [queue["gpu_class"] for queue in shown["queues"]] == ["cpu", "h200", None, None]
    assert shown["workers"][0]["gpus"][0]["name"] == "NVIDIA H200"
    assert client.service.workers()[0].tasks[0].id == running
    assert client.service.queues()[1].length == 1


def test_what_belongs_to_a_file_of_answers_and_what_to_a_table(
    regraft: Callable[..., tuple[int, str, str]], learned: str
) -> None:
    for wrong in (
        ["--format", "parquet"],
        ["--to", "x", "--worst"],
        ["--to", "x", "--sort", "score"],
        ["--to", "x", "--limit", "1"],
    ):
        assert regraft("rollouts", learned, *wrong)[0] == 2


def test_checkpoints_are_listed_and_downloaded(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], learned: str, tmp_path: Path
) -> None:
    _, out, _ = regraft("checkpoints", "list", learned)
    made = in_json("checkpoints", "download", learned, "-o", str(tmp_path / "adapter"))

    assert re.search(r"ftckpt_\w+ +3 +0\.750 +- +best +-", out)
    assert sorted(made["files"]) == ["README.md", "adapter_config.json", "reproduce.json"]
    assert regraft("checkpoints", "download", learned, "-o", str(tmp_path / "adapter"))[0] == 2


def test_a_grader_is_validated_and_run(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], tmp_path: Path
) -> None:
    grader, cases = tmp_path / "grader.json", tmp_path / "cases.jsonl"
    grader.write_text(json.dumps(GRADER))
    cases.write_text(
        '{"sample": "4", "answer": "4", "expect": 1}\n{"sample": "5", "answer": "4", "expect": 1}\n'
    )
    one = ("graders", "run", "--grader", str(grader), "--sample", "4", "--item", '{"answer": "4"}')

    code, out, err = regraft("graders", "run", "--grader", str(grader), str(cases))

    assert regraft("graders", "validate", str(grader))[1] == "exact (string_check): valid\n"
    assert in_json(*one)[0]["reward"] == 1.0
    assert code == 1
    assert [line.split()[:4] for line in out.splitlines()[1:]] == [
        ["1", "1.000", "1.000", "ok"],
        ["2", "0.000", "1.000", "not"],
    ]
    assert err == "1 passed, 1 failed\n"


RAISES = """
def grade(sample, item):
    print("line one\\nline two")
    return item["nope"]
"""


def test_what_a_grader_prints_and_its_whole_traceback_are_shown(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], tmp_path: Path
) -> None:
    grader = tmp_path / "grader.py"
    grader.write_text(RAISES)
    command = ("graders", "run", "--grader", str(grader), "--sample", "4", "--item", '{"answer": "4"}')

    code, out, err = regraft(*command)
    (test,) = json.loads(regraft(*command, "--output", "json")[1])

    summary, details = out.split("\n\n", 1)
    assert (code, err) == (1, "0 passed, 1 failed\n")
    assert summary.splitlines()[1].endswith("python_grader_runtime_error  KeyError: 'nope'")
    assert "line 1, printed:\n  line one\n  line two\n" in details
    assert "  Traceback (most recent call last):\n" in details
    assert '    return item["nope"]\n' in details
    assert details.splitlines()[-1] == "  KeyError: 'nope'"
    assert test["output"] == "line one\nline two\n"
    assert test["reason"].rstrip().endswith("KeyError: 'nope'")
    assert test["error_details"] == {"python_grader_runtime_error": test["reason"]}


def test_the_failure_of_a_sub_grader_is_shown_once_and_also_where_a_score_stands_in_for_it(
    regraft: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    grader = tmp_path / "grader.json"
    python = {"type": "python", "name": "p", "source": RAISES}
    multi = {"type": "multi", "name": "m", "calculate_output": "p + e", "graders": {"p": python, "e": GRADER}}
    command = ("graders", "run", "--grader", str(grader), "--sample", "4", "--item", '{"answer": "4"}')

    for covered in ({}, {"invalid_grade": 0.0}):
        grader.write_text(json.dumps(multi | covered))
        _, out, _ = regraft(*command)

        assert out.count("Traceback (most recent call last)") == 1
        assert out.count("p: line one\n") == 1


def test_models(regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any]) -> None:
    assert [model["id"] for model in in_json("models", "list")] == ["tiny", "o4-mini-2025-04-16"]
    rows = [line.split() for line in regraft("models", "list")[1].splitlines()]
    assert rows == [
        ["id", "tuned", "from", "base", "created"],
        ["tiny", "-", "-", "-"],
        ["o4-mini-2025-04-16", "-", "tiny", "(alias)", "-"],
    ]
    assert regraft("models", "delete", "tiny")[0] == 2


def test_a_model_is_promoted_and_an_alias_rolled_back(
    house: House, regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any]
) -> None:
    house.tuned("ft:tiny:acme::1")

    first = regraft("models", "promote", "tiny", "--as", "production")[1]
    second = regraft("models", "promote", "ft:tiny:acme::1", "--as", "production")[1]
    listed = regraft("models", "aliases")[1].splitlines()[1].split()

    assert first == "production: tiny answers now\n"
    assert second == "production: ft:tiny:acme::1 answers now; before: tiny\n"
    assert listed[:3] == ["production", "ft:tiny:acme::1", "tiny"]
    assert in_json("models", "rollback", "production")["model"] == "tiny"
    assert in_json("models", "aliases", "--delete", "production") == []
    history = [line.split()[3:5] for line in regraft("models", "history", "production")[1].splitlines()[1:]]
    assert history == [
        ["tiny", "deleted"],
        ["ft:tiny:acme::1", "tiny"],
        ["tiny", "ft:tiny:acme::1"],
        ["-", "tiny"],
    ]
    assert regraft("models", "history", "none")[0] == 3
    assert regraft("models", "rollback", "production")[0] == 3


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["jobs", "show", "ftjob-none"], 3, "Could not find fine tune: ftjob-none (fine_tune_not_found"),
        (["jobs", "create", "-f", "none.toml"], 2, "none.toml does not exist; check the path"),
        (["jobs"], 2, "required: COMMAND"),
        (["graders", "run", "--grader", "g.py"], 2, "Pass either --sample TEXT"),
        (["files", "upload", "none.jsonl"], 2, "No such file: none.jsonl"),
        (["files", "upload", "."], 2, ". is a folder; name a file"),
    ],
)
def test_what_goes_wrong_has_a_line_and_a_code(
    regraft: Callable[..., tuple[int, str, str]], argv: list[str], code: int, said: str
) -> None:
    got, out, err = regraft(*argv)

    assert (got, out) == (code, "")
    assert said in err


def test_the_version_is_that_of_the_installed_package(regraft: Callable[..., tuple[int, str, str]]) -> None:
    assert regraft("--version") == (0, f"regraft {version('regraft')}\n", "")


def test_the_output_may_be_chosen_in_front_of_the_command(
    regraft: Callable[..., tuple[int, str, str]],
) -> None:
    assert json.loads(regraft("--output", "json", "models", "list")[1])[0]["id"] == "tiny"
    assert regraft("--output", "json", "models", "list", "--output", "text")[1].startswith("id ")


def test_errors_are_json_too(regraft: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = regraft("jobs", "show", "ftjob-none", "--output", "json")

    error = json.loads(err)["error"]
    assert (code, out) == (3, "")
    assert (error["code"], error["param"]) == ("fine_tune_not_found", "fine_tune_id")
    assert error["request_id"].startswith("req_")


def test_who_is_refused_and_what_cannot_be_reached(
    regraft: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGRAFT_API_KEY", "rg-wrong")
    assert regraft("models", "list")[0] == 4
    monkeypatch.setenv("REGRAFT_BASE_URL", "http://127.0.0.1:9")
    code, _, err = regraft("models", "list")
    assert (code, err.startswith("regraft: Cannot reach http://127.0.0.1:9/: ")) == (5, True)
    assert "Is the server running?" in err
    monkeypatch.delenv("REGRAFT_BASE_URL")
    assert regraft("models", "list")[0] == 4


def test_logging_in_tries_the_key_before_it_is_kept(
    regraft: Callable[..., tuple[int, str, str]],
    house: House,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("REGRAFT_API_KEY")
    monkeypatch.setattr(sys, "stdin", io.StringIO("rg-wrong\n"))
    assert regraft("login", "--base-url", house.base_url)[0] == 4
    assert not (tmp_path / "config.toml").exists()

    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{house.key}\n"))
    code, out, _ = regraft("login", "--base-url", house.base_url.removesuffix("/v1"))
    monkeypatch.delenv("REGRAFT_BASE_URL")

    assert (code, "Logged in to" in out, house.key in out) == (0, True, False)
    assert regraft("models", "list")[0] == 0


class Speaker(http.server.BaseHTTPRequestHandler):
    """A chat endpoint that says "Hello, <the last message>", in pieces when it is asked to."""

    heard: list[Any] = []
    may_answer = threading.Event()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.heard.append(body)
        self.may_answer.wait(60)
        pieces = ["Hello", ", ", body["messages"][-1]["content"]]
        self.send_response(200)
        if body.get("stream"):
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            chunks = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
            for chunk in [*chunks, {"choices": [], "usage": {}}]:
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")
        else:
            answer = {"id": "c", "choices": [{"index": 0, "message": {"content": "".join(pieces)}}]}
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def speaker(
    regraft: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Speaker)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("REGRAFT_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    Speaker.heard = []
    Speaker.may_answer.set()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_chatting_says_that_it_waits_for_the_model(
    regraft: Callable[..., tuple[int, str, str]],
    speaker: ThreadingHTTPServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            Speaker.may_answer.set()
            return super().write(text)

    Speaker.may_answer.clear()
    monkeypatch.setattr(sys, "stderr", screen := Screen())

    code, out, _ = regraft("chat", "ft:tiny", "you")

    assert (code, out) == (0, "Hello, you\n")
    assert screen.getvalue().startswith("waiting for ft:tiny, which the server may have to load, ")


def test_chatting_streams_the_answer(
    regraft: Callable[..., tuple[int, str, str]], in_json: Callable[..., Any], speaker: ThreadingHTTPServer
) -> None:
    code, out, _ = regraft("chat", "ft:tiny", "you", "--system", "Be kind.", "--max-tokens", "9")

    assert (code, out) == (0, "Hello, you\n")
    assert Speaker.heard[0]["messages"][0] == {"role": "system", "content": "Be kind."}
    assert Speaker.heard[0]["max_completion_tokens"] == 9
    assert in_json("chat", "ft:tiny", "you")["choices"][0]["message"]["content"] == "Hello, you"


def test_a_tuned_model_is_asked_with_the_messages_of_a_row(
    regraft: Callable[..., tuple[int, str, str]],
    speaker: ThreadingHTTPServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    shots = [
        {"role": "system", "content": "Sort."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "A"},
    ]
    answered = {"messages": [*shots, {"role": "user", "content": "b"}, {"role": "assistant", "content": "B"}]}
    pair = {"input": {"messages": [{"role": "user", "content": "c"}]}, "preferred_output": []}
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (answered, pair, {"text": "d"})))

    assert regraft("chat", "ft:tiny", "you", "--like", "rows.jsonl")[1] == "Hello, you\n"
    assert regraft("chat", "ft:tiny", "--like", "rows.jsonl:1")[1] == "Hello, b\n"
    assert regraft("chat", "ft:tiny", "--like", "rows.jsonl:2")[1] == "Hello, c\n"

    first, second, _ = (heard["messages"] for heard in Speaker.heard)
    assert first == [*shots, {"role": "user", "content": "you"}]
    assert second == answered["messages"][:-1]
    for place, words in (
        ("rows.jsonl:3", "rows.jsonl:3 has no messages with one of the user"),
        ("rows.jsonl:4", "rows.jsonl has no row 4"),
        ("none.jsonl", "none.jsonl does not exist"),
    ):
        code, _, err = regraft("chat", "ft:tiny", "you", "--like", place)
        assert code == 2
        assert words in err
    assert regraft("chat", "ft:tiny", "you", "--like", "rows.jsonl", "--system", "x")[0] == 2


def test_the_progress_of_an_evals_run_is_printed_when_it_changes(capsys: pytest.CaptureFixture[str]) -> None:
    show = run_progress()
    for status, done in (("queued", 0), ("queued", 0), ("in_progress", 1), ("in_progress", 1)):
        show(SimpleNamespace(id="evalrun_1", status=status, progress={"finished": done, "total": 2}))

    assert capsys.readouterr().err.splitlines() == [
        "evalrun_1 queued: 0 of 2; it waits for a worker",
        "evalrun_1 in_progress: 1 of 2",
    ]


def test_a_pipe_is_one_message(
    regraft: Callable[..., tuple[int, str, str]],
    speaker: ThreadingHTTPServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("all of this"))

    assert regraft("chat", "ft:tiny")[1] == "Hello, all of this\n"


def command(house: House, *argv: str, **options: Any) -> subprocess.Popen[Any]:
    environment = os.environ | {
        "REGRAFT_BASE_URL": house.base_url,
        "REGRAFT_API_KEY": house.key,
        "PYTHONPATH": str(SDK),
        "COLUMNS": "100",
    }
    return subprocess.Popen([sys.executable, "-m", "regraft", *argv], env=environment, **options)


@pytest.mark.slow
def test_in_a_terminal_there_is_a_live_line(house: House, learned: str) -> None:
    primary, secondary = pty.openpty()
    process = command(house, "jobs", "watch", learned, stdout=secondary, stderr=secondary, stdin=secondary)
    os.close(secondary)
    written = bytearray()
    try:
        while chunk := os.read(primary, 65536):
            written += chunk
    except OSError:
        pass  # it is done
    os.close(primary)

    assert process.wait() == 0
    shown = [line.split("\r\x1b[K")[-1] for line in written.decode().split("\r\n")]
    assert shown == [
        "succeeded  step 3/3 ████████████████████  ▃▅▆  train 0.75  1.5 s",
        "ft:tiny:default::1a2b3c4d",
        "",
    ]


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error(house: House, learned: str) -> None:
    process = command(house, "jobs", "watch", learned, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()

    assert process.wait() == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


def test_help_and_completion_need_nothing_of_the_client() -> None:
    code = (
        "import sys\nfrom regraft.cli import main\n"
        "for words in ['--help'], ['completion', 'fish']:\n    try: main(words)\n    except SystemExit: pass\n"
        "print(sorted({'openai', 'pydantic', 'httpx2'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(SDK)},
    )

    assert done.stdout.splitlines()[-1] == "[]"


def completions(shell_script: str, words: list[str]) -> list[str]:
    """What bash offers for the last of the words."""
    quoted = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _regraft; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(
        ["bash", "-c", f"{shell_script}\n{ask}"], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_bash_completes_commands_options_and_choices(regraft: Callable[..., tuple[int, str, str]]) -> None:
    script = regraft("completion", "bash")[1]

    assert completions(script, ["regraft", "jo"]) == ["jobs"]
    assert completions(script, ["regraft", "jobs", "c"]) == ["create", "cancel", "compare", "clone"]
    assert completions(script, ["regraft", "jobs", "create", "-f", "job.toml", "--w"]) == ["--watch"]
    assert completions(script, ["regraft", "completion", ""])[-3:] == ["bash", "zsh", "fish"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_scripts_are_whole(regraft: Callable[..., tuple[int, str, str]], shell: str) -> None:
    script = regraft("completion", shell)[1]

    assert "jobs" in script and "migrate-from-openai" in script
    if shutil.which(shell):
        done = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["job"], "'jobs'"),
        (["jobs", "lst"], "'list'"),
        (["jobs", "list", "--limt", "3"], "--limit"),
        (["migrate"], "'migrate-from-openai'"),
    ],
)
def test_a_misspelled_command_or_option_gets_the_one_that_it_may_mean(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)

    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_every_command_has_its_function() -> None:
    from regraft.cli.commands import function_of
    from regraft.cli.parser import TABLE
    from regraft.cli.table import Command

    commands = [
        command for entry in TABLE for command in ((entry,) if isinstance(entry, Command) else entry.commands)
    ]

    assert len(commands) > 60
    assert all(callable(function_of(command)) for command in commands)


def test_the_show_of_a_running_job_has_ranges_of_time_and_gpu_time(
    regraft: Callable[..., tuple[int, str, str]], house: House
) -> None:
    left = {"low": 3600.0, "expected": 7200.0, "high": 10800.0}
    estimate = {"remaining_seconds": left, "based_on": "this job's steps", "gpus": 2}
    job_id = house.job(
        status="running",
        usage={"estimate": estimate},
        gpu_seconds=600.0,
        estimated_finish=4_000_000_000,
    )

    _, out, _ = regraft("jobs", "show", job_id)

    lines = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines())
    assert lines["time left"].endswith("done at 2096-10-02 07:06 UTC")
    assert lines["GPU time"] == "4 h 10 min in all, between 2 h 10 min and 6 h 10 min"
    assert "cost" not in lines


def test_the_show_of_a_job_that_starts_says_for_how_long(
    regraft: Callable[..., tuple[int, str, str]], house: House
) -> None:
    started = {"epoch": 1, "step": None, "phase": "starting the sampler", "done": None, "of": None}
    soon, late = (
        house.job(
            status="running", lease_owner="a/1", progress=started | {"since": int(time.time()) - seconds}
        )
        for seconds in (100, 1000)
    )

    assert re.search(
        r"^now +starting the sampler, for 1 min \d\d s$", regraft("jobs", "show", soon)[1], re.MULTILINE
    )
    assert re.search(
        r"^now +starting the sampler, for 16 min \d\d s: unusually long; `regraft jobs logs` may say why$",
        regraft("jobs", "show", late)[1],
        re.MULTILINE,
    )


def test_an_estimate_ages_until_the_next_step() -> None:
    seconds = {"low": 60.0, "expected": 120.0, "high": 240.0}
    cost = {"low": 1.0, "expected": 2.0, "high": 4.0, "currency": "USD"}
    estimate = {"remaining_seconds": seconds, "total_gpu_seconds": seconds, "cost": cost}

    shown = expected_costs(estimate, finish=1120, now=1090.0)

    assert shown == {
        "time left": "30 s, between 0 s and 2 min 30 s; done at 1970-01-01 00:18 UTC",
        "GPU time": "2 min 00 s in all, between 1 min 00 s and 4 min 00 s",
        "cost": "2.00 USD in all, between 1.00 and 4.00",
    }


def test_stored_graders_are_saved_compared_and_checked(
    regraft: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    files = {"strict.json": GRADER, "lenient.json": GRADER | {"operation": "ilike"}}
    rows = [
        {"sample": "4", "expect": 1, "answer": "4"},
        {"sample": "4!", "expect": {"max": 0.5}, "answer": "4"},
    ]
    for name, spec in files.items():
        (tmp_path / name).write_text(json.dumps(spec))
    (tmp_path / "cases.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    strict, lenient = (str(tmp_path / name) for name in files)

    saved = json.loads(regraft("--output", "json", "graders", "save", "close", "--grader", strict)[1])
    regraft("graders", "save", "close", "--grader", lenient, "--note", "in any case")
    code, out, err = regraft("graders", "cases", "close", "--add", str(tmp_path / "cases.jsonl"))
    assert (code, err) == (0, "2 added\n")
    assert "to 0.5" in out

    code, out, err = regraft("graders", "check", "close")
    assert (code, err.split(", with")[0]) == (1, "1 passed, 1 failed")
    assert "not as expected" in out
    assert regraft("graders", "check", f"close@{saved['version'][:12]}")[0] == 0
    assert regraft("graders", "check", "close", "--grader", strict)[0] == 0
    assert regraft("graders", "check", "close", "--grader", f"stored:close@{saved['version']}")[0] == 0
    assert "in any case" in regraft("graders", "versions", "close")[1]
    assert "close  string_check" in regraft("graders", "list")[1]
    assert json.loads(regraft("graders", "show", f"close@{saved['version'][:8]}")[1]) == GRADER
    code, out, _ = regraft("graders", "diff", "close", saved["version"][:8])
    assert (code, '-  "operation": "eq",' in out, '+  "operation": "ilike",' in out) == (1, True, True)
    assert regraft("graders", "diff", "close", saved["version"], saved["version"])[0] == 0

    case = json.loads(regraft("--output", "json", "graders", "cases", "close")[1])[0]["id"]
    assert case not in regraft("graders", "cases", "close", "--delete", case)[1]
    assert regraft("graders", "delete", f"close@{saved['version']}")[0] == 0
    assert regraft("graders", "delete", "close")[1] == "deleted close\n"
    assert regraft("graders", "show", "close")[0] == 3


@pytest.fixture
def uploaded(in_json: Callable[..., Any], tmp_path: Path) -> str:
    """The id of an uploaded file with ROWS."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    [file] = in_json("files", "upload", str(tmp_path / "rows.jsonl"))
    file_id: str = file["id"]
    return file_id


def test_an_audit_says_its_id_and_its_rates_and_exits_by_its_verdict(
    regraft: Callable[..., tuple[int, str, str]], uploaded: str, tmp_path: Path
) -> None:
    strict, lenient = tmp_path / "strict.json", tmp_path / "lenient.json"
    strict.write_text(json.dumps(GRADER))
    lenient.write_text(json.dumps(GRADER | {"operation": "like"}))

    code, out, err = regraft("graders", "audit", uploaded, "--grader", str(strict))

    assert code == 0, err
    assert regraft("graders", "audit", uploaded, "--grader", str(lenient))[0] == 1
    assert re.match(r"graderaudit_\w+: 0 of \d+ answers graded\n", err)
    assert "0 of 4 right answers do not pass" in out


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00"),
        (0.00004, "< 0.0001"),
        (0.0123, "0.0123"),
        (0.994, "0.9940"),
        (0.996, "1.00"),
        (12345.678, "12,345.68"),
    ],
)
def test_small_amounts_of_money_have_more_digits(value: float, text: str) -> None:
    """As `amountOf` of console/src/lib/format.ts writes them."""
    assert amount(value) == text
