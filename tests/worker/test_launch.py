"""A job on several ranks, from the supervisor on: it learns, drains, and loses a rank, and leaves no process behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from select import poll
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import select

from core.database.tables import Job
from core.jobs import lifecycle
from core.jobs.offline_hyperparameters import SupervisedHyperparameters
from core.settings import Settings
from tests.hyperparameters import in_groups
from tests.servers import reserve_port
from tests.tiny import make_tiny_model
from tests.worker.conftest import Bench
from worker.members.member import Member
from worker.packages import vllm_version
from worker.supervisor.supervisor import Supervisor
from worker.training.world import forget_launcher

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]

TEXTS = ["say yes", "what colour is it now please tell me the name", "tell me a number", "say cat"]


@pytest.fixture
def queued(
    bench: Bench, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Supervisor]:
    """A supervisor of a worker with two ranks, and a queued job of two steps."""

    def make(
        event: str, model: Path = tiny_model, *, supervised: bool = False, train: str = "lora", **changes: Any
    ) -> Supervisor:
        registry = tmp_path / "models.toml"
        registry.write_text(f'[models.tiny]\npath = "{model}"\ndtype = "float32"\ncontext = 128\n')
        rows: list[Any] = [
            {"messages": [{"role": "user", "content": text}], "answer": "yes no"} for text in TEXTS
        ]
        if supervised:
            for row in rows:
                row["messages"].append({"role": "assistant", "content": row.pop("answer")})
        with bench.database.write() as session:
            bench.add_files(session, bench.blobs, rows)
            job = session.scalars(select(Job)).one()
            grader = {"type": "text_similarity", "name": "near", "input": "{{sample.output_text}}"}
            grader |= {"reference": "{{item.answer}}", "evaluation_metric": "fuzzy_match"}
            advanced = {"group_size": 8, "max_completion_tokens": 8, "train": train}
            asked = {"batch_size": 4, "n_epochs": 2, "eval_interval": 1, "advanced": in_groups(advanced)}
            job.body = {"grader": grader, "hyperparameters": asked, "response_format": None}
            if supervised:
                learned = {"batch_size": 4, "n_epochs": 2, "advanced": {"train": train}}
                job.method = "supervised"
                job.body = {"hyperparameters": SupervisedHyperparameters.model_validate(learned).model_dump()}
        with lifecycle.fenced(bench.database, bench.claim) as (session, job):
            lifecycle.release(session, job)
        environment = {
            "models_file": registry,
            "data_dir": tmp_path,
            "ranks": 2,
            "torch_threads": 1,
        } | changes
        for name, value in environment.items():
            monkeypatch.setenv(f"REGRAFT_{name.upper()}", str(value))

        def command(progress: Path) -> list[str]:
            program = [sys.executable, "-m", "tests.worker.eventful_child", event]
            return [*program, str(os.getpid()), str(progress)]

        return Supervisor(Settings(), bench.database, bench.blobs, command)

    return make


def wait_for_processes(folder: Path) -> None:
    """Wait for the end of all processes whose data folder it is, but for the fork server of this one."""
    sessions = set((folder / "sessions").read_text().split()) if (folder / "sessions").exists() else set()
    mark = f"REGRAFT_DATA_DIR={folder}\0".encode()
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if not process.name.isdecimal():
                continue
            _, parent, _, session, *_ = (process / "stat").read_text().rpartition(")")[2].split()
            marked = mark in (process / "environ").read_bytes()
            if session in sessions or (marked and int(parent) != os.getpid()):
                ended = os.pidfd_open(int(process.name))
                waiting = poll()
                waiting.register(ended)
                assert waiting.poll(30_000), f"process {process.name} is left over"
                os.close(ended)


def test_nothing_of_the_launcher_is_left_in_the_environment_of_a_run() -> None:
    """TORCHELASTIC_USE_AGENT_STORE turns the store of vLLM's own process group into a client without a server."""
    environment = {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": "1", "HOME": "/"}

    forget_launcher(environment)

    assert environment == {"HOME": "/"}


def test_a_drained_run_resumes_on_all_ranks(
    queued: Callable[..., Supervisor], bench: Bench, tmp_path: Path
) -> None:
    """Each attempt is told to stop in its first step."""
    queued("drain").run_waiting()

    job = bench.job()
    assert (job.status, job.failures) == ("succeeded", 0), bench.events()
    assert [step["step"] for step in bench.steps()] == [0, 1, 2]
    assert all(step["trained_tokens"] > 0 for step in bench.steps()[1:])
    wait_for_processes(tmp_path)


def test_a_job_that_learns_all_weights_from_its_file_does_so_in_parts_on_all_ranks_and_resumes(
    queued: Callable[..., Supervisor], bench: Bench, tmp_path: Path
) -> None:
    queued("shard", supervised=True, train="full").run_waiting()

    job = bench.job()
    assert (job.status, job.failures) == ("succeeded", 0), bench.events()
    assert [step["step"] for step in bench.steps()] == [0, 1, 2]
    assert bench.steps()[2]["full_valid_loss"] < bench.steps()[0]["full_valid_loss"]
    assert len(list(tmp_path.glob("sharded-*"))) == 2 * 2, "each rank of each of two attempts"
    wait_for_processes(tmp_path)


@pytest.mark.parametrize(
    ("event", "changes"),
    [
        ("SIGKILL", {}),
        ("SIGSTOP", {"hang_seconds": 40}),
    ],
)
def test_a_lost_rank_ends_the_attempt_as_a_crash(
    queued: Callable[..., Supervisor], bench: Bench, tmp_path: Path, event: str, changes: dict[str, Any]
) -> None:
    queued(event, **changes).run_waiting()

    job = bench.job()
    assert (job.status, job.failures) == ("queued", 1), bench.events()
    assert re.search(
        "rank 1 was killed by SIGKILL|another rank of this run|no progress", " ".join(bench.events())
    )
    assert [step["step"] for step in bench.steps()] == [0, 1]
    wait_for_processes(tmp_path)


@pytest.mark.skipif(not vllm_version(), reason="no vLLM")
@pytest.mark.parametrize(
    ("event", "train", "attempts"),
    [
        # The tests above resume by day.
        ("share", "lora", 1),
        pytest.param("shard", "lora", 2, marks=pytest.mark.thorough),
        pytest.param("shard", "full", 2, marks=pytest.mark.thorough),
    ],
)
def test_a_job_whose_model_is_shared_by_its_ranks_is_sampled_by_vllm(
    queued: Callable[..., Supervisor], bench: Bench, tmp_path: Path, event: str, train: str, attempts: int
) -> None:
    """The whole way, on gloo. The gate compares what vLLM sampled with the log-probabilities of the sharded trainer."""
    model = make_tiny_model(tmp_path / "model", head_dim=32)
    queued(event, model=model, train=train, sampler="vllm").run_waiting()

    job = bench.job()
    assert (job.status, job.failures) == ("succeeded", 0), bench.events()
    assert [step["step"] for step in bench.steps()] == [0, 1, 2]
    assert all(step["trained_tokens"] > 0 for step in bench.steps()[1:])
    assert all(step["logprob_gap_max"] < 1e-3 for step in bench.steps()[1:])
    assert len(list(tmp_path.glob("sharded-*"))) == 2 * attempts, "each rank of each attempt"
    wait_for_processes(tmp_path)


def test_a_model_that_no_rank_can_load_is_reported_by_rank_0(
    queued: Callable[..., Supervisor], bench: Bench, tiny_model: Path, tmp_path: Path
) -> None:
    """The other rank must not end the attempt as a crash before that."""
    broken = shutil.copytree(tiny_model, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"nothing")

    queued("none", model=broken).run_waiting()

    job = bench.job()
    assert job.status == "failed", bench.events()
    assert "cannot be read" in str(job.error)


class Machine:
    """The second machine of a group, here with 127.0.0.1 as its network: `regraft-server member` and its launcher."""

    def __init__(self, event: str, folder: Path, limit_seconds: float = 600.0) -> None:
        def command(progress: Path) -> list[str]:
            program = [sys.executable, "-m", "tests.worker.eventful_child", event, "member"]
            return ["env", "REGRAFT_NODE_RANK=1", *program, str(os.getpid()), str(progress)]

        self.member = Member(limit_seconds, command)
        self.folder = folder

    def power_off(self) -> None:
        for process in Path("/proc").iterdir():
            with suppress(OSError):
                marks = (b"REGRAFT_NODE_RANK=1\0", f"REGRAFT_DATA_DIR={self.folder}\0".encode())
                if process.name.isdecimal() and all(
                    mark in (process / "environ").read_bytes() for mark in marks
                ):
                    os.kill(int(process.name), signal.SIGKILL)

    def __enter__(self) -> "Machine":
        self.member.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.member.stop()
        self.member.thread.join(30)
        assert not self.member.thread.is_alive()
        wait_for_processes(self.folder)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return {
        "nodes": 2,
        "ranks": 1,
        "rendezvous": f"127.0.0.1:{reserve_port()}",
        "patience_seconds": 60,
    }


def test_two_machines_train_a_job_and_a_drained_run_resumes_on_both(
    queued: Callable[..., Supervisor], bench: Bench, tmp_path: Path, group: dict[str, Any]
) -> None:
    """The member's launcher is replaced after each attempt."""
    supervisor = queued("drain", **group)
    with Machine("none", tmp_path):
        supervisor.run_waiting()

    job = bench.job()
    assert (job.status, job.failures) == ("succeeded", 0), bench.events()
    assert [step["step"] for step in bench.steps()] == [0, 1, 2]
    assert all(step["trained_tokens"] > 0 for step in bench.steps()[1:])


def test_a_lost_rank_of_another_machine_ends_the_attempt_as_a_crash(
    queued: Callable[..., Supervisor], bench: Bench, tmp_path: Path, group: dict[str, Any]
) -> None:
    supervisor = queued("none", **group)
    with Machine("SIGKILL", tmp_path):
        supervisor.run_waiting()

    job = bench.job()
    assert (job.status, job.failures) == ("queued", 1), bench.events()
    assert "another rank of this run" in " ".join(bench.events())
    assert [step["step"] for step in bench.steps()] == [0, 1]


def test_a_machine_that_vanishes_is_noticed_although_its_connections_stay_open(
    queued: Callable[..., Supervisor], bench: Bench, tmp_path: Path, group: dict[str, Any]
) -> None:
    """Its rank stops and answers nothing."""
    supervisor = queued("none", **group, lost_machine_seconds=2)
    with Machine("SIGSTOP", tmp_path) as machine:
        supervisor.run_waiting()
        machine.power_off()

    job = bench.job()
    assert (job.status, job.failures) == ("queued", 1), bench.events()
    assert "machine 1 of the run has not answered for 2 s" in " ".join(bench.events())
    assert [step["step"] for step in bench.steps()] == [0, 1]


def test_a_run_without_the_other_machines_says_how_to_start_them(
    queued: Callable[..., Supervisor], bench: Bench, tmp_path: Path, group: dict[str, Any]
) -> None:
    queued("none", **group | {"patience_seconds": 1}).run_waiting()

    assert (bench.job().status, bench.job().failures) == ("queued", 0)
    assert "job waits: its worker cannot start it: not all of 2 machines came to 127" in " ".join(
        bench.events()
    )
    wait_for_processes(tmp_path)


def test_a_member_without_a_run_stops_at_once(group: dict[str, Any], tmp_path: Path) -> None:
    settings = {f"REGRAFT_{name.upper()}": str(value) for name, value in group.items()}
    environment = os.environ | settings | {"REGRAFT_NODE_RANK": "1", "REGRAFT_DATA_DIR": str(tmp_path)}
    command = [str(Path(sys.executable).with_name("regraft-server")), "member"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as member:
        assert member.stdout is not None
        for line in member.stdout:
            if "no run at" in line:
                break
        member.terminate()

        assert member.wait(30) == 0
    wait_for_processes(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nodes": 2}, "REGRAFT_RENDEZVOUS"),
        ({"nodes": 2, "node_rank": 2, "rendezvous": "a:1"}, "REGRAFT_NODE_RANK must be below"),
        ({"node_rank": 1}, "REGRAFT_NODE_RANK must be below"),
        ({"nodes": 2, "rendezvous": "a:65535"}, "REGRAFT_RENDEZVOUS needs a port below 65535"),
    ],
)
def test_a_machine_needs_its_place_in_a_group(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Settings(**wrong)
