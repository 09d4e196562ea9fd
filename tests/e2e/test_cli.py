"""The `regraft` command in a terminal, from the first login to a talk with the tuned model, on a live server."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.e2e.conftest import ROOT, Server, jsonl
from tests.e2e.test_openai_client import GRADER, TRAIN, VALID

ASKED_FOR_KEY = "API key: "
JOB = """
model = "tiny"
training_file = "train.jsonl"
validation_file = "valid.jsonl"
suffix = "terminal"
seed = 1
grader = "grader.json"

[hyperparameters]
n_epochs = 6
batch_size = 4
eval_interval = 4

[hyperparameters.advanced]
group_size = 16
learning_rate = 0.02
max_completion_tokens = 3
lora_rank = 8
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with what somebody begins with."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "train.jsonl").write_bytes(jsonl(TRAIN))
    (folder / "valid.jsonl").write_bytes(jsonl(VALID))
    (folder / "grader.json").write_text(json.dumps(GRADER))
    (folder / "job.toml").write_text(JOB)
    return folder


@pytest.fixture(scope="module")
def terminal(server: Server, desk):
    """Type a command in the folder, and to each prompt an answer. Returns the lines that are left to be seen."""

    def run(*argv: str, answers: Sequence[tuple[str, str]] = ()) -> list[str]:
        primary, secondary = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "regraft", *argv],
            cwd=desk,
            env=os.environ
            | {
                "PYTHONPATH": str(ROOT / "sdk"),
                "REGRAFT_CONFIG": str(desk / "config.toml"),
                "COLUMNS": "120",
                "TERM": "xterm",
            },
            stdin=secondary,
            stdout=secondary,
            stderr=secondary,
            start_new_session=True,
        )
        os.close(secondary)
        written, waiting = bytearray(), list(answers)
        try:
            while chunk := os.read(primary, 65536):
                written += chunk
                # Not before: whoever asks for a secret throws away what was typed until then.
                if waiting and written.endswith(waiting[0][0].encode()):
                    os.write(primary, waiting.pop(0)[1].encode())
        except OSError:
            pass  # everybody has closed the terminal
        os.close(primary)
        assert process.wait() == 0, written.decode()
        return [line.split("\r\x1b[K")[-1] for line in written.decode().split("\r\n")]

    run("login", "--base-url", server.base_url, answers=[(ASKED_FOR_KEY, server.key + "\n")])
    return run


@pytest.fixture(scope="module")
def watched(terminal):
    """What a job leaves on the screen once it is done."""
    return terminal("jobs", "create", "-f", "job.toml", "--watch")


@pytest.fixture(scope="module")
def job_id(watched):
    return next(found[0] for line in watched if (found := re.search(r"ftjob-\w+", line)))


@pytest.fixture(scope="module")
def model(watched):
    return next(found[0] for line in watched if (found := re.search(r"ft:tiny:\S+", line)))


def test_the_key_is_kept_for_its_owner_only_and_never_seen(terminal, desk, server):
    shown = terminal("login", "--base-url", server.base_url, answers=[(ASKED_FOR_KEY, server.key + "\n")])

    assert not any(server.key in line for line in shown)
    assert any("Logged in" in line for line in shown)
    assert (desk / "config.toml").stat().st_mode & 0o777 == 0o600


def test_data_is_checked_before_it_is_sent(terminal):
    shown = terminal("validate", "train.jsonl", "valid.jsonl", "--grader", "grader.json")

    assert [line.split(":")[0] for line in shown if "rows" in line] == ["train.jsonl", "valid.jsonl"]


def test_a_job_is_one_live_line_that_ends_with_its_rewards(watched):
    [line] = [line for line in watched if line.startswith("succeeded")]

    done, steps = re.search(r"step +(\d+)/(\d+) █+ ", line).groups()
    sparkline = re.search(r"  ([▁▂▃▄▅▆▇█]+)  train \d\.\d\d  valid \d\.\d\d", line)
    assert done == steps
    assert len(sparkline[1]) > 4
    assert sparkline[1][-1] in "▆▇█", "the rewards rose"


def test_the_job_its_answers_and_its_checkpoints_can_be_looked_at(terminal, job_id, model):
    shown = "\n".join(terminal("jobs", "show", job_id))
    answers = terminal("rollouts", job_id, "--worst", "--limit", "3")
    checkpoints = "\n".join(terminal("checkpoints", "list", job_id))

    assert "succeeded" in shown and model in shown
    assert "3 of 64 answers" in answers[-2]
    assert "best" in checkpoints and f"{model}:ckpt-step-" in checkpoints


def test_the_adapter_is_taken_home(terminal, job_id, desk):
    terminal("checkpoints", "download", job_id, "-o", "adapter")

    assert json.loads((desk / "adapter" / "adapter_config.json").read_text())["peft_type"] == "LORA"
    assert (desk / "adapter" / "adapter_model.safetensors").stat().st_size > 1000


def test_the_tuned_model_is_talked_to(terminal, model):
    """One question as an argument, and a conversation that ends with Ctrl-D."""
    asked = terminal("chat", model, "say it", "--temperature", "0", "--max-tokens", "3")
    talked = terminal(
        "chat", model, "--temperature", "0", "--max-tokens", "3", answers=[("> ", "say it\n"), ("> ", "\x04")]
    )

    assert "yes" in asked[0]
    assert any("yes" in line for line in talked)
