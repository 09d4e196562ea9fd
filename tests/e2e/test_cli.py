"""The `regraft` command in a terminal, from the first login to a talk with the tuned model, on a live server. And what
the documents show of it and of the library, run there in their order."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from core.database.audit import operator_of
from core.database.engine import Database, Work
from core.database.tables import Organization, Project
from core.settings import Settings
from core.tenancy import keys
from tests.e2e.conftest import ROOT, Server, jsonl
from tests.e2e.documents import DOCS, ID, alike, entered, lay_out, run_examples, shown_commands
from tests.e2e.test_openai_client import GRADER, TRAIN, VALID
from tests.present import present

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
sampling = { group_size = 16, max_completion_tokens = 3 }
optimizer = { learning_rate = 0.02, step_kl = 0 }
lora = { rank = 8 }
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what somebody begins with."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "train.jsonl").write_bytes(jsonl(TRAIN))
    (folder / "valid.jsonl").write_bytes(jsonl(VALID))
    (folder / "grader.json").write_text(json.dumps(GRADER))
    (folder / "job.toml").write_text(JOB)
    return folder


@pytest.fixture(scope="module")
def terminal(server: Server, desk: Path) -> Callable[..., list[str]]:
    """Type a command in the folder, and to each prompt an answer. Returns the lines that are left to be seen."""

    def run(*argv: str, answers: Sequence[tuple[str, str]] = (), code: int = 0) -> list[str]:
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
        assert process.wait() == code, written.decode()
        return [line.split("\r\x1b[K")[-1] for line in written.decode().split("\r\n")]

    run("login", "--base-url", server.base_url, answers=[(ASKED_FOR_KEY, server.key + "\n")])
    return run


@pytest.fixture(scope="module")
def watched(terminal: Callable[..., list[str]]) -> list[str]:
    """What a job leaves on the screen once it is done."""
    return terminal("jobs", "create", "-f", "job.toml", "--watch")


@pytest.fixture(scope="module")
def job_id(watched: list[str]) -> str:
    return next(found[0] for line in watched if (found := re.search(r"ftjob-\w+", line)))


@pytest.fixture(scope="module")
def model(watched: list[str]) -> str:
    return next(found[0] for line in watched if (found := re.search(r"ft:tiny:\S+", line)))


def test_the_key_is_kept_for_its_owner_only_and_never_seen(
    terminal: Callable[..., list[str]], desk: Path, server: Server
) -> None:
    shown = terminal("login", "--base-url", server.base_url, answers=[(ASKED_FOR_KEY, server.key + "\n")])

    assert not any(server.key in line for line in shown)
    assert any("Logged in" in line for line in shown)
    assert (desk / "config.toml").stat().st_mode & 0o777 == 0o600


def test_ctrl_d_at_a_question_is_an_interruption(terminal: Callable[..., list[str]], server: Server) -> None:
    shown = terminal("login", "--base-url", server.base_url, answers=[(ASKED_FOR_KEY, "\x04")], code=130)

    assert "Traceback" not in "".join(shown)


def test_data_is_checked_before_it_is_sent(terminal: Callable[..., list[str]]) -> None:
    shown = terminal("validate", "train.jsonl", "valid.jsonl", "--grader", "grader.json")

    assert [line.split(":")[0] for line in shown if "rows" in line] == ["train.jsonl", "valid.jsonl"]


def test_a_job_is_one_live_line_that_ends_with_its_rewards(watched: list[str]) -> None:
    [line] = [line for line in watched if line.startswith("succeeded")]

    done, steps = present(re.search(r"step +(\d+)/(\d+) █+ ", line)).groups()
    sparkline = re.search(r"  ([▁▂▃▄▅▆▇█]+)  train \d\.\d\d  groups", line)
    assert done == steps
    assert sparkline is not None
    assert len(sparkline[1]) > 4
    assert sparkline[1][-1] > sparkline[1][0], "the rewards rose"


def test_a_job_that_is_done_is_watched_as_one_line_too(
    terminal: Callable[..., list[str]], job_id: str, model: str
) -> None:
    done, verdict, name, rest = terminal("jobs", "watch", job_id)

    assert re.match(r"succeeded  step +12/12 █+  [▁▂▃▄▅▆▇█]+  train", done)
    assert verdict.startswith("too few rows to compare with the base model: 0.")
    assert (name, rest) == (model, "")


def test_a_preview_asks_and_what_it_makes_can_be_cancelled(terminal: Callable[..., list[str]]) -> None:
    """The one command that takes an answer from a person before it spends anything."""
    preview = ("jobs", "create", "-f", "job.toml", "--preview", "--rows", "2", "--samples", "2")
    question = "Create the job? [y/N] "

    shown = terminal(*preview, answers=[(question, "y\n")])

    assert "2 rows sampled, 4 answers" in shown
    job = shown[-2]
    assert terminal("jobs", "cancel", job)[0] == f"{job} is cancelled"


def test_the_job_its_answers_and_its_checkpoints_can_be_looked_at(
    terminal: Callable[..., list[str]], job_id: str, model: str
) -> None:
    shown = "\n".join(terminal("jobs", "show", job_id))
    answers = terminal("rollouts", job_id, "--worst", "--limit", "3")
    checkpoints = "\n".join(terminal("checkpoints", "list", job_id))

    assert "succeeded" in shown and model in shown
    assert "3 of 64 answers" in answers[-2]
    assert "best" in checkpoints and f"{model}:ckpt-step-" in checkpoints


def test_the_adapter_is_taken_home(terminal: Callable[..., list[str]], job_id: str, desk: Path) -> None:
    terminal("checkpoints", "download", job_id, "-o", "adapter")

    assert json.loads((desk / "adapter" / "adapter_config.json").read_text())["peft_type"] == "LORA"
    assert (desk / "adapter" / "adapter_model.safetensors").stat().st_size > 1000


def test_the_tuned_model_is_talked_to(terminal: Callable[..., list[str]], model: str) -> None:
    """One question as an argument, and a conversation that ends with Ctrl-D."""
    asked = terminal("chat", model, "say it", "--temperature", "0", "--max-tokens", "3")
    talked = terminal(
        "chat", model, "--temperature", "0", "--max-tokens", "3", answers=[("> ", "say it\n"), ("> ", "\x04")]
    )

    assert "yes" in asked[0]
    assert any("yes" in line for line in talked)


@pytest.fixture
def key(server: Server) -> str:
    """One of a new project: what is listed is what the document's own commands made."""
    database = Database(Settings(data_dir=server.folder).database)
    with database.write() as session:
        project = Project(organization_id=session.query(Organization).one().id, name="documents")
        session.add(project)
        session.flush()
        token = keys.create_key(Work(session, operator_of(project)), project, "documents").token
    database.close()
    return token


@pytest.fixture
def home(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the documents are about, of somebody for whom no server is configured yet."""
    lay_out(tmp_path)
    (tmp_path / ".regraft").mkdir()
    (tmp_path / ".regraft" / "api_key").write_text(key)
    for name in ("REGRAFT_BASE_URL", "REGRAFT_API_KEY", "REGRAFT_CONFIG", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_librarys_examples_run_one_after_the_other(
    home: Path, server: Server, key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the server and the key from the environment; those of rollouts.md are of the same job."""
    monkeypatch.setenv("REGRAFT_BASE_URL", server.base_url)
    monkeypatch.setenv("REGRAFT_API_KEY", key)
    names: dict[str, Any] = {}

    ran = run_examples(DOCS / "howto/sdk.md", names) + run_examples(DOCS / "howto/rollouts.md", names)

    assert ran >= 9
    assert names["job"].status == "succeeded"
    assert len(names["last"]) == 4 * 16
    assert (home / "newest" / "adapter_model.safetensors").exists()
    assert "Could not find fine tune: ftjob-none" in capsys.readouterr().out


def test_the_commands_print_what_the_document_shows(
    home: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Line by line, but for ids, numbers and what a model says."""
    ids: dict[str, str] = {}
    failing = {
        "regraft validate bad.jsonl --grader grader.json",
        "regraft graders run --grader grader.json cases.jsonl",
        'regraft graders run --grader broken.py --sample yes --item \'{"answer": "yes"}\'',
    }
    said = []

    for command, expected in shown_commands():
        real = ID.sub(partial(lambda ids, found: ids[found[0]], ids), command)
        code, lines = entered(real.replace("http://127.0.0.1:8000", server.base_url), monkeypatch)

        assert code == (command in failing), (command, lines)
        if not expected or command.startswith("regraft chat"):
            continue
        said.append(command.split()[1])
        ids |= dict(zip(ID.findall("\n".join(expected)), ID.findall("\n".join(lines)), strict=True))
        got, want = [alike(line, home) for line in lines], [alike(line, home) for line in expected]
        assert got == want, command

    assert len(said) > 15
    assert (home / ".zfunc" / "_regraft").read_text().startswith("#compdef")
