"""A pool of Jobs as KEDA would run it: the rendered command as processes, with real PostgreSQL and S3.

The loop has the rules of KEDA's strategy `accurate`: a Job whose pod is not ready counts against the length of the
queue. The jobs are of a model that the registry lacks, so that each ends soon after its run has started.
"""

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from sqlalchemy import select

from core.database.engine import Database
from core.database.migrate import upgrade
from core.database.states import JOB
from core.database.tables import Attempt, Job
from core.jobs import lifecycle
from core.service import queues
from core.tenancy.limits import NO_LIMITS
from tests import factories
from tests.budgets import examples
from tests.helm.charts import JOBS, Pod, of_kind, pods, profile, render
from tests.helm.kubelet import Kubelet
from tests.servers import Postgres, SeaweedFS, reserve_port

pytestmark = pytest.mark.slow

# Each costs a start of Python with torch, and so does each signal: ten seconds of a core.
NUMBER = examples(2, 20)
# Unfinished jobs: a pod starts a Python with torch, and twenty at once would be minutes without a claim.
AT_ONCE = 5
# In turn, to pods with a running job.
SIGNALS = [signal.SIGTERM, signal.SIGKILL] * examples(1, 4)
LEASE_SECONDS = 8


@dataclass
class Started:
    kubelet: Kubelet
    process: "Popen[bytes]"
    is_signalled: bool = False
    is_killed: bool = False


@dataclass
class Pool:
    """A ScaledJob and its pods, each with a folder of its own."""

    pod: Pod
    most: int
    database: Database
    new_kubelet: Callable[[int], Kubelet]
    queue: Callable[[int], None]
    started: list[Started] = field(default_factory=list)

    def is_ready(self, one: Started) -> bool:
        return one.kubelet.probe(self.pod, "readinessProbe")

    def running(self) -> list[Started]:
        return [one for one in self.started if one.process.poll() is None]

    def poll(self) -> None:
        """One look of KEDA. The pods come first: a row that is claimed between the two reads starts no pod then."""
        running = self.running()
        pending = [one for one in running if not self.is_ready(one)]
        with self.database.read() as session:
            queued = len(queues.waiting_jobs(session, NO_LIMITS).get("jobs", []))
        wanted = min(queued, self.most)
        new = self.most - len(running) if wanted + len(running) > self.most else wanted - len(pending)
        for _ in range(min(new, queued)):
            kubelet = self.new_kubelet(len(self.started))
            self.started.append(Started(kubelet, kubelet.start(self.pod)))

    def signal(self, number: int) -> bool:
        """Send a signal to a pod whose job runs, if there is one. SIGKILL ends also its run, as a node that fails."""
        with self.database.read() as session:
            running = session.scalars(select(Attempt.worker).where(Attempt.ended_at.is_(None))).all()
        pids = {int(worker.rpartition("/")[2]) for worker in running}
        for one in self.running():
            if one.process.pid in pids and not one.is_signalled:
                one.is_signalled, one.is_killed = True, number == signal.SIGKILL
                one.process.send_signal(number)
                return True
        return False

    def logs(self) -> str:
        return "\n".join((one.kubelet.folder / "worker.log").read_text()[-2000:] for one in self.started)


class Cluster:
    """PostgreSQL, S3, and a ScaledJob of the class `jobs`."""

    def __init__(self, postgres: Postgres, seaweed: SeaweedFS, folder: Path, **changes: Any) -> None:
        values = profile(
            "production",
            objectStore={
                "bucket": seaweed.new_bucket(),
                "endpointUrl": seaweed.endpoint,
                "region": "us-east-1",
            },
            settings={"torch_threads": 1, "reconcile_seconds": 0.5, "lease_seconds": LEASE_SECONDS},
            extraEnv={"GLOO_SOCKET_IFNAME": "lo"},
            workers=[
                JOBS | {"name": "jobs", "gpus": 0, "gpuClass": "jobs", "maxReplicas": 100} | changes,
                *[one for one in profile("production")["workers"] if one["name"] == "keeper"],
            ],
        )
        values["models"] = {"other": {"path": "/models/other"}}
        manifests = render(values)
        [self.scaled] = of_kind(manifests, "ScaledJob")
        [self.pod] = [one for one in pods(manifests, "worker") if one.owner is self.scaled]
        [config] = [one for one in of_kind(manifests, "ConfigMap") if "models.toml" in one["data"]]
        self.files = config["data"]
        url = postgres.new_database()
        upgrade(url)
        self.database = Database(url)
        self.secrets = {
            "regraft-database": {"url": url},
            "regraft-inference": {"key": "a-key-of-our-choice"},
            "regraft-s3": {
                "AWS_ACCESS_KEY_ID": SeaweedFS.access_key,
                "AWS_SECRET_ACCESS_KEY": SeaweedFS.secret_key,
            },
        }
        self.folder = folder

    def queue(self, jobs: int) -> None:
        with self.database.write() as session:
            project = factories.project(session)
            for _ in range(jobs):
                factories.job(session, project, gpu_class="jobs", model="missing")

    def kubelet(self, number: int, **more: Any) -> Kubelet:
        """For the next pod, which serves its metrics at a port of its own."""
        folder = self.folder / str(number)
        folder.mkdir()
        port = reserve_port()
        container = self.pod.containers[0]
        container["env"] = [
            one if one["name"] != "REGRAFT_METRICS_PORT" else {"name": one["name"], "value": str(port)}
            for one in container["env"]
        ]
        return Kubelet(folder, self.secrets, self.files, {"worker": port, "api": port}, **more)


@pytest.fixture
def pool(postgres: Postgres, seaweed: SeaweedFS, tmp_path: Path) -> Iterator[Pool]:
    cluster = Cluster(postgres, seaweed, tmp_path)
    most = cluster.scaled["spec"]["maxReplicaCount"]
    pool = Pool(cluster.pod, most, cluster.database, cluster.kubelet, cluster.queue)
    try:
        yield pool
    finally:
        for one in pool.running():
            one.process.kill()
            one.process.wait()
        cluster.database.close()


def all_ended(pool: Pool) -> bool:
    """Whether all NUMBER jobs have; queues the next ones."""
    with pool.database.write() as session:
        lifecycle.expire_leases(session, max_failures=3)  # as the keeper does
        jobs = session.query(Job).count()
        unfinished = session.query(Job).filter(Job.status.not_in(JOB.final)).count()
    new = min(NUMBER - jobs, AT_ONCE - unfinished)
    if new:
        pool.queue(new)
    return not unfinished and not new


@pytest.mark.timeout(120 * NUMBER)
def test_each_claimed_row_has_one_pod_and_no_pod_is_started_for_a_claimed_row(pool: Pool) -> None:
    signals = SIGNALS.copy()
    deadline = time.monotonic() + 100 * NUMBER
    while not (all_ended(pool) and not pool.running()):
        assert time.monotonic() < deadline, pool.logs()
        pool.poll()
        if signals and pool.signal(signals[0]):
            signals.pop(0)
        time.sleep(0.5)

    with pool.database.read() as session:
        attempts = session.query(Attempt).all()
    workers = Counter(one.worker for one in attempts)
    assert set(workers.values()) == {1}, "a pod has one job"
    assert len(pool.started) == len(attempts), "each pod has claimed a job"
    for job_id in {one.job_id for one in attempts}:
        its = sorted((one for one in attempts if one.job_id == job_id), key=lambda one: one.epoch)
        for earlier, later in pairwise(its):
            assert earlier.ended_at is not None
            assert earlier.ended_at <= later.started_at, "a row is claimed by one worker at a time"
    outcomes = Counter(one.outcome for one in attempts)
    assert outcomes["failed"] == NUMBER
    assert not signals
    assert outcomes["expired"] == SIGNALS.count(signal.SIGKILL), outcomes
    for one in pool.started:
        assert one.process.returncode == (-signal.SIGKILL if one.is_killed else 0)


def test_the_pods_of_a_job_on_two_nodes_meet_and_end_with_the_first(
    postgres: Postgres, seaweed: SeaweedFS, tmp_path: Path
) -> None:
    cluster = Cluster(postgres, seaweed, tmp_path, nodes=2)
    cluster.queue(1)
    here = {"regraft-worker-jobs-x7k2p-0.regraft-worker-jobs:29400": f"127.0.0.1:{reserve_port()}"}
    label = "metadata.labels['batch.kubernetes.io/job-{}']"
    started = []
    for index in (0, 1):
        fields = {
            label.format("name"): "regraft-worker-jobs-x7k2p",
            label.format("completion-index"): str(index),
        }
        kubelet = cluster.kubelet(index, fields=fields, addresses=here)
        started.append(Started(kubelet, kubelet.start(cluster.pod)))
    first, second = started
    try:
        assert first.process.wait(300) == 0
        assert not second.kubelet.probe(cluster.pod, "readinessProbe"), "KEDA wants one ready pod of a Job"
        second.process.terminate()  # the success policy
        assert second.process.wait(60) == 0
    finally:
        for one in started:
            one.process.kill()
            one.process.wait()
    with cluster.database.read() as session:
        [attempt] = session.query(Attempt).all()
    cluster.database.close()
    logs = [(one.kubelet.folder / "worker.log").read_text() for one in started]
    assert attempt.outcome == "failed", logs
    assert "joining the run" in logs[1]
