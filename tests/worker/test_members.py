"""Ranks on other machines: the result is that of one process, and nobody joins who does not know the key.

The other machines are other processes here, over TCP on 127.0.0.1.
"""

import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from core.jobs.hyperparameters import Resolved
from core.registry import BaseModelEntry
from core.settings import Settings
from tests.fakes import learn
from tests.present import untyped
from tests.servers import reserve_port
from tests.worker.test_ranks import like_the_policy, sampled
from tests.worker.test_training import relative_difference
from worker.learn import members
from worker.learn.members import (
    Member,
    Members,
    MembersMissing,
    ReadAhead,
    Seat,
    Stranger,
    admit,
    join,
)
from worker.learn.rank import start
from worker.learn.ranks import Line, Model, RankLost, Ranks, Start
from worker.learn.trainer import PeftTrainer
from worker.model.policy import Policy

pytestmark = pytest.mark.slow

KEY = b"a key of the group"


@pytest.fixture(scope="module")
def port() -> int:
    return reserve_port()


@pytest.fixture(scope="module")
def member(port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    """`regraft-server member`, as an operator starts it."""
    settings = {"leader": f"127.0.0.1:{port}", "ranks_key": KEY.decode(), "data_dir": "data"}
    variables = {f"REGRAFT_{name.upper()}": value for name, value in settings.items()}
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-m", "worker.cli", "member"],
        cwd=tmp_path_factory.mktemp("member"),
        env=os.environ | variables | {"PYTHONPATH": root},
    )
    yield process
    process.terminate()
    assert process.wait(timeout=60) == 0


def coming(port: int, count: int = 1, patience: float = 60.0) -> Members:
    return Members(("127.0.0.1", port), KEY, count, patience_seconds=patience)


def the_model(folder: Path, settings: Resolved) -> Model:
    entry = BaseModelEntry(path=folder, dtype="float32", context=128)
    return Model("tiny", entry, folder, settings, 0, False, sampled=True)


def started(ranks: Ranks, folder: Path, settings: Resolved, budget: int = 64) -> None:
    ranks.start(the_model(folder, settings), device="cpu", threads=1, token_budget=budget, held_to="")
    ranks.wait()


def rank_of(member: subprocess.Popen[bytes]) -> int:
    """The process id of the only one that the member keeps."""
    files = Path(f"/proc/{member.pid}/task").glob("*/children")
    [found] = [int(pid) for file in files for pid in file.read_text().split()]
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_run_with_a_member_learns_what_one_process_does_and_ends_when_it_loses_it(
    member: subprocess.Popen[bytes], port: int, make_policy: Callable[..., Policy], tiny_model: Path
) -> None:
    settings = like_the_policy(
        {"loss": "gspo", "updates_per_batch": 2, "kl": 0.1, "reference_refresh_steps": 1}
    )
    with Ranks(2, coming(port)) as ranks:
        assert ranks.total == 3
        started(ranks, tiny_model, settings)
        alone, together = (
            PeftTrainer(make_policy(moved=True), settings, token_budget=64, helpers=helpers)
            for helpers in ((), ranks.helpers)
        )
        for one in (alone, together):
            untyped(one).optimizer.adamw = torch.optim.SGD(one.policy.trainable, lr=0.01)
        began = [parameter.detach().clone() for parameter in alone.policy.trainable]
        for step in (1, 2):
            groups = sampled(alone.policy, step)
            expected, metrics = learn(alone, groups), learn(together, groups)
            assert metrics.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
            assert metrics.trained_tokens == expected.trained_tokens
        moves = [
            [now.detach() - then for now, then in zip(one.policy.trainable, began, strict=True)]
            for one in (together, alone)
        ]
        assert relative_difference(*moves) < 1e-4

        # One that is told to go stays with its run; a machine without power does not.
        told_to_go = rank_of(member)
        os.kill(told_to_go, signal.SIGTERM)
        assert learn(together, sampled(together.policy)).trained_tokens > 0, "it goes when its run does"
        os.kill(told_to_go, signal.SIGKILL)
        with pytest.raises(RankLost, match=r"rank 2, a member at 127\.0\.0\.1:\d+, has disconnected"):
            learn(together, sampled(together.policy))


# What a member keeps, without what it computes with.
WAITING = """
import os, sys
from worker.learn.members import wait_for_run
line = wait_for_run(sys.argv[1], sys.argv[2].encode())
line.send(os.getpid())
try:
    line.receive()
except EOFError:
    pass
"""


def test_a_member_is_there_for_the_next_run_with_a_process_of_its_own(port: int) -> None:
    def command(gpu: int) -> list[Any]:
        assert gpu == 3
        return [sys.executable, "-c", WAITING, f"127.0.0.1:{port}", KEY.decode()]

    seat = Seat(3, command)
    seat.start()
    processes = []
    for _ in range(2):
        gathering = coming(port)
        gathering.listen()
        [helper] = gathering.gather(1)
        processes.append(helper.receive())
        helper.close()
    seat.stop()
    seat.thread.join(30)

    assert len(set(processes)) == 2
    assert not seat.thread.is_alive()


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of one over TCP: the leader's, the member's."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname())
        ours, _ = listening.accept()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def greeted(connection: tuple[socket.socket, socket.socket]) -> tuple[members.Signed, members.Signed]:
    """Both ends after the handshake."""
    ours, theirs = connection
    with ThreadPoolExecutor() as pool:
        admitted = pool.submit(admit, ours, KEY)
        return join(theirs, KEY), admitted.result()


def test_both_sides_show_that_they_know_the_key(greeted: tuple[members.Signed, members.Signed]) -> None:
    member, leader = greeted

    for number in range(3):
        leader.send(("weights", np.arange(number, dtype=np.float32)))
        word, array = member.receive()
        assert (word, array.tolist()) == ("weights", list(range(number)))
        member.send(number)
        assert leader.receive() == number


def test_a_member_with_another_key_is_not_admitted(connection: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = connection
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(join, theirs, b"another key")
        with pytest.raises(Stranger, match="REGRAFT_RANKS_KEY"):
            admit(ours, KEY)
        ours.close()

        assert isinstance(joined.exception(), EOFError | ConnectionError)


def test_a_member_does_not_join_a_leader_that_only_repeats_what_it_hears(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    """Who does not know the key may send back the member's own proof, or anything else."""
    ours, theirs = connection
    ours.sendall(b"n" * members.NONCE)
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(join, theirs, KEY)
        heard = members.read_exactly(ours, members.NONCE + members.SEAL)
        ours.sendall(heard[-members.SEAL :])

        with pytest.raises(Stranger, match="leader's REGRAFT_RANKS_KEY or version differs"):
            joined.result()


class Touches:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self.path,)


def test_nothing_of_a_stranger_is_unpickled(
    tmp_path: Path, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    trace = tmp_path / "trace"
    pickle.loads(pickle.dumps(Touches(trace)))
    assert trace.exists(), "it would leave a trace"
    trace.unlink()
    # Long enough to reject the stranger. Another key than that of other tests, whose members may still try this port.
    gathering = Members(("127.0.0.1", port), b"a key of this test", 1, patience_seconds=5)
    gathering.listen()
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        Line(stranger).send(Touches(trace))
        Line(stranger).send([Touches(trace)] * 8)

        with pytest.raises(MembersMissing, match=r"^0 of 1 members have connected .*REGRAFT_LEADER"):
            gathering.gather(1)

    assert "as a member of this run" in caplog.text
    assert not trace.exists()


@pytest.mark.parametrize("change", ["put in", "repeated", "sent back"])
def test_a_message_that_was_not_sent_by_the_other_side_is_not_unpickled(
    greeted: tuple[members.Signed, members.Signed],
    connection: tuple[socket.socket, socket.socket],
    tmp_path: Path,
    change: str,
) -> None:
    member, leader = greeted
    ours, theirs = connection
    trace = tmp_path / "trace"
    if change == "put in":
        Line(theirs).send(Touches(trace))
        theirs.sendall(bytes(members.SEAL))
        reader = leader
    else:
        recorded = Recorded(theirs)
        member.end = untyped(recorded)
        member.send(Touches(trace))
        member.end = theirs
        reader = leader if change == "repeated" else member
        if change == "repeated":
            leader.receive()
            trace.unlink()
        (theirs if change == "repeated" else ours).sendall(recorded.sent)

    with pytest.raises(Stranger, match="altered or injected"):
        reader.receive()
    assert not trace.exists()


class Recorded:
    """A socket that remembers what was sent."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.sent = b""

    def sendall(self, data: bytes) -> None:
        self.sent += bytes(data)
        self._end.sendall(data)


def test_what_is_read_ahead_stays_as_it_was_sent(greeted: tuple[members.Signed, members.Signed]) -> None:
    member, leader = greeted
    ended = threading.Event()
    ahead = ReadAhead(member, lambda cause: ended.set())
    for number in (1.0, 2.0, 3.0):
        leader.send(np.full(4, number, dtype=np.float32))
    leader.close()
    assert ended.wait(30), "the end of the run is noticed although nobody asks for it"

    assert [ahead.receive().tolist() for _ in range(3)] == [[n] * 4 for n in (1.0, 2.0, 3.0)]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such settings of a connection")
def test_a_machine_that_vanishes_is_noticed_within_a_minute(port: int) -> None:
    gathering = coming(port, patience=5)
    gathering.listen()
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(members.wait_for_run, f"127.0.0.1:{port}", KEY)
        [helper] = gathering.gather(1)
        joined.result().close()
    tcp, end = socket.IPPROTO_TCP, helper.line.end
    idle, interval, count = (
        end.getsockopt(tcp, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )

    assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert idle + interval * count <= 60
    assert end.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 60_000
    with pytest.raises(RankLost):
        helper.receive()


def test_a_port_is_free_again_when_all_have_come(port: int) -> None:
    """A process that is started anew finds the next run, not the end of this one."""
    gathering = coming(port, count=2, patience=5)
    gathering.listen()
    with ThreadPoolExecutor() as pool:
        joined = [pool.submit(members.wait_for_run, f"127.0.0.1:{port}", KEY) for _ in range(2)]
        found = gathering.gather(3)
        lines = [one.result() for one in joined]

    assert [one.rank for one in found] == [3, 4]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    for one in [*found, *lines]:
        untyped(one).close()


@pytest.mark.parametrize("name", ["nodes", "leader"])
def test_a_group_needs_a_key(name: str) -> None:
    value: Any = {"nodes": 2, "leader": "leader:8200"}[name]

    with pytest.raises(ValidationError, match=re.escape("REGRAFT_RANKS_KEY")):
        Settings(**{name: value})
    assert KEY.decode() not in repr(Settings(**{name: value}, ranks_key=KEY.decode()))


def test_a_run_waits_for_all_ranks_of_the_other_machines() -> None:
    told = Settings(nodes=3, ranks=4, ranks_key="x", host="127.0.0.1", ranks_port=8201, patience_seconds=7)
    whom = members.members_of(told)

    assert whom is not None
    assert (whom.count, whom.address, whom.patience_seconds) == (8, ("127.0.0.1", 8201), 7)
    assert members.members_of(Settings(ranks=4)) is None


def test_each_rank_has_a_gpu_of_its_own_machine(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    """The leader numbers its own; a member goes by the number of its process there."""
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(Model, "load_checked", lambda model, device: chosen.append(device))
    with socket.socket() as end:
        told = Member(5, Line(end), "gpu-2:1").own("cuda")
    start(Start(the_model(tiny_model, like_the_policy({})), told, 0, 64, ""), gpu=1)

    assert chosen == ["cuda:1", "cuda:1"]
    with Ranks(2) as ranks:
        assert ranks.helpers[0].own("cuda") == "cuda:1"
        assert ranks.helpers[0].own("cpu") == "cpu"
