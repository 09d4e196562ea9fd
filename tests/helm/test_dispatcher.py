"""The dispatcher with the rendered Role and templates, against a Kubernetes API that enforces both."""

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from core.claims import Claim
from core.database.engine import Database, Work
from core.database.migrate import upgrade
from core.database.tables import Job
from core.jobs import fairness, lifecycle
from core.tenancy.limits import NO_LIMITS
from tests import factories
from tests.helm.api_server import ApiServer, serving
from tests.helm.charts import GROUP, JOBS, ROOT, VARIATIONS, Manifest, of_kind, pods, profile, render
from tests.helm.kubelet import Kubelet
from tests.present import present
from tests.servers import Postgres, reserve_port
from worker.dispatch import templates
from worker.dispatch.dispatcher import RETRY_SECONDS, Dispatcher
from worker.dispatch.kubernetes import KubernetesApi

CLASS = "a100"
PENDING, MOST = 2, 3


def values(**changes: Any) -> dict[str, Any]:
    """Of a pool of the class CLASS, whose Jobs are in the LocalQueue `research`."""
    pool = JOBS | {"maxReplicas": MOST} | changes
    keeper = [one for one in profile("production")["workers"] if one["name"] == "keeper"]
    given = profile(
        "production",
        dispatcher={"enabled": True, "maxPending": PENDING},
        workers=[pool, *keeper],
        networkPolicy={"kubernetesApi": {"to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}], "port": 6443}},
    )
    given["models"] = {"other": {"path": "/models/other"}}
    return given


def templates_of(manifests: list[Manifest]) -> dict[str, str]:
    """The files of the dispatcher."""
    [config] = [one for one in of_kind(manifests, "ConfigMap") if f"{CLASS}.json" in one["data"]]
    files: dict[str, str] = config["data"]
    return files


def write_templates(manifests: list[Manifest], folder: Path) -> None:
    folder.mkdir()
    for name, content in templates_of(manifests).items():
        (folder / name).write_text(content)


@dataclass
class Bench:
    api: ApiServer
    database: Database
    folder: Path
    now: float = field(default_factory=time.time)

    def dispatcher(self) -> Dispatcher:
        """A new one, as after a restart."""
        load = lambda: templates.load(self.folder / "templates")  # noqa: E731
        kubernetes = KubernetesApi(self.api.address, self.api.account)
        return Dispatcher(self.database, kubernetes, load, defaults=NO_LIMITS, clock=lambda: self.now)

    def queue(self, jobs: int, gpu_class: str = CLASS, **project: Any) -> list[str]:
        """So many jobs of a new project."""
        with self.database.write() as session:
            owner = factories.project(session, **project)
            return [factories.job(session, owner, gpu_class=gpu_class).id for _ in range(jobs)]

    def change(self, job_id: str, change: Callable[[Work, Job], None]) -> None:
        with self.database.write() as session:
            change(Work(session), session.scalars(select(Job).where(Job.id == job_id)).one())

    def claim(self, job_id: str) -> Claim:
        """As the worker of its pod."""
        with self.database.write() as session:
            return present(
                lifecycle.claim(session, gpu_class=CLASS, owner="pod", lease_seconds=60, job_id=job_id)
            )

    def drain(self, claim: Claim) -> None:
        """As a worker after SIGTERM."""
        with lifecycle.fenced(self.database, claim) as (session, job):
            lifecycle.release(session, job)

    def reason(self, job_id: str) -> str:
        with self.database.read() as session:
            job = session.scalars(select(Job).where(Job.id == job_id)).one()
            return fairness.places(session, [job], pod_classes={CLASS})[job_id].reason


def named(job_id: str, epoch: int = 0) -> str:
    return f"ft-{job_id.removeprefix('ftjob-').lower()}-{epoch}"


@pytest.fixture
def bench(sqlite_database: Database, tmp_path: Path) -> Iterator[Bench]:
    manifests = render(values())
    write_templates(manifests, tmp_path / "templates")
    with serving(ApiServer(manifests, tmp_path)) as api:
        yield Bench(api, sqlite_database, tmp_path)


def test_jobs_get_their_kubernetes_jobs_in_fair_order_up_to_the_most_that_may_wait(bench: Bench) -> None:
    greedy, modest = bench.queue(4), bench.queue(1)
    dispatcher = bench.dispatcher()

    dispatcher.run_once()
    dispatcher.run_once()
    assert bench.api.created == [named(greedy[0]), named(modest[0])]

    for job_id in (greedy[0], modest[0]):
        bench.api.admit(named(job_id))
        bench.claim(job_id)
    dispatcher.run_once()
    assert bench.api.created[2:] == [named(greedy[1])], "the pool runs three at once"


def test_a_project_without_quota_holds_up_no_other(bench: Bench) -> None:
    stuck = bench.queue(6, kueue={"queue": "mistyped"})
    others = bench.queue(6, kueue={"queue": "team-a"}), bench.queue(6)
    dispatcher = bench.dispatcher()

    dispatcher.run_once()
    first = {named(one) for jobs in (stuck, *others) for one in jobs[:PENDING]}
    assert set(bench.api.created) == first, "each queue has as many as may wait"

    for jobs in others:
        bench.api.admit(named(jobs[0]))
        bench.claim(jobs[0])
    dispatcher.run_once()
    dispatcher.run_once()
    assert len(bench.api.created) == len(first), "two run and one waits in each queue, of three at once"

    bench.api.end(named(others[0][0]))
    dispatcher.run_once()
    assert bench.api.created[len(first) :] == [named(others[0][2]), named(others[1][2])]


def test_no_pod_is_started_for_jobs_beyond_the_limit_of_their_project(bench: Bench) -> None:
    first, _ = bench.queue(2, limits={"running_jobs": 1})

    bench.dispatcher().run_once()

    assert bench.api.created == [named(first)]


def test_a_worker_claims_the_job_that_its_pod_was_started_for(bench: Bench) -> None:
    [job_id] = bench.queue(1)
    bench.dispatcher().run_once()

    job = bench.api.objects[named(job_id)]
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert {"name": "REGRAFT_CLAIM", "value": job_id} in container["env"]
    assert container["command"][:4] == ["regraft-server", "worker", "--jobs", "1"]


def test_a_dispatcher_that_dies_before_it_sees_the_answer_starts_no_second_job(bench: Bench) -> None:
    [job_id] = bench.queue(1)
    bench.api.loses_next_answer_to = "POST"
    bench.dispatcher().run_once()
    assert bench.reason(job_id) == "a pod of class a100 will be started for it"

    bench.dispatcher().run_once()

    assert bench.api.created == [named(job_id)]
    assert bench.reason(job_id) == "waits for quota of research"


def test_a_job_that_another_dispatcher_has_created_meanwhile_is_a_success(bench: Bench) -> None:
    [job_id] = bench.queue(1)
    bench.dispatcher().run_once()
    bench.api.lists_nothing = True

    bench.dispatcher().run_once()

    assert bench.api.created == [named(job_id)]
    assert bench.reason(job_id) == "waits for quota of research"


def test_a_job_waits_for_the_quota_of_its_project_and_then_for_its_pod(bench: Bench) -> None:
    [mine] = bench.queue(1, kueue={"queue": "team-a", "priority_class": "urgent"})
    plain, *_, last = bench.queue(3)
    dispatcher = bench.dispatcher()

    dispatcher.run_once()
    labels = bench.api.objects[named(plain)]["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "research"
    assert labels["kueue.x-k8s.io/priority-class"] == "batch"
    labels = bench.api.objects[named(mine)]["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "team-a"
    assert labels["kueue.x-k8s.io/priority-class"] == "urgent"
    assert bench.api.objects[named(mine)]["spec"]["suspend"] is True
    assert bench.reason(mine) == "waits for quota of team-a"
    assert bench.reason(last).startswith("a pod of class a100 will be started for it")

    bench.api.admit(named(mine))
    dispatcher.run_once()
    assert bench.reason(mine) == "a pod of class a100 is starting for it"


@pytest.mark.parametrize("change", [lifecycle.cancel, lifecycle.pause])
def test_a_job_that_is_cancelled_or_paused_loses_its_kubernetes_job(
    bench: Bench, change: Callable[[Work, Job], None]
) -> None:
    job_id, other = bench.queue(2)
    dispatcher = bench.dispatcher()
    dispatcher.run_once()

    bench.change(job_id, change)
    dispatcher.run_once()

    assert list(bench.api.objects) == [named(other)]


def test_a_job_that_is_cancelled_while_it_runs_loses_its_kubernetes_job(bench: Bench) -> None:
    [job_id] = bench.queue(1)
    dispatcher = bench.dispatcher()
    dispatcher.run_once()
    bench.claim(job_id)

    bench.change(job_id, lifecycle.cancel)
    dispatcher.run_once()

    assert bench.api.objects == {}


def test_a_resumed_job_is_started_again(bench: Bench) -> None:
    [job_id] = bench.queue(1)
    dispatcher = bench.dispatcher()
    dispatcher.run_once()
    bench.change(job_id, lifecycle.pause)
    dispatcher.run_once()

    bench.change(job_id, lifecycle.resume)
    dispatcher.run_once()

    assert bench.api.created == [named(job_id)] * 2


def test_a_preempted_job_drains_and_waits_for_the_quota_of_the_same_kubernetes_job(bench: Bench) -> None:
    [job_id] = bench.queue(1)
    dispatcher = bench.dispatcher()
    dispatcher.run_once()
    bench.api.admit(named(job_id))
    claim = bench.claim(job_id)

    bench.api.preempt(named(job_id))
    bench.drain(claim)
    dispatcher.run_once()
    assert bench.api.created == [named(job_id)]
    assert bench.reason(job_id) == "waits for quota of research"

    bench.api.admit(named(job_id))
    assert bench.claim(job_id).epoch == 2


def test_a_job_whose_pod_has_drained_gets_another_kubernetes_job(bench: Bench) -> None:
    [job_id] = bench.queue(1)
    dispatcher = bench.dispatcher()
    dispatcher.run_once()
    bench.drain(bench.claim(job_id))
    bench.api.end(named(job_id))

    dispatcher.run_once()

    assert bench.api.created == [named(job_id), named(job_id, epoch=1)]


def test_a_pod_that_ended_before_its_worker_claimed_the_job_is_started_again_after_a_while(
    bench: Bench,
) -> None:
    [job_id] = bench.queue(1)
    dispatcher = bench.dispatcher()
    dispatcher.run_once()
    bench.api.end(named(job_id), "Failed")

    dispatcher.run_once()
    assert bench.api.created == [named(job_id)]
    assert "ended before it claimed the job" in bench.reason(job_id)

    bench.now += RETRY_SECONDS + 5
    dispatcher.run_once()  # deletes it
    dispatcher.run_once()
    assert bench.api.created == [named(job_id)] * 2


def test_a_job_that_kubernetes_refuses_says_so_and_lets_others_go_first(bench: Bench) -> None:
    [mine] = bench.queue(1, kueue={"queue": "closed"})
    others = bench.queue(2)
    bench.api.refused_queue = "closed"
    dispatcher = bench.dispatcher()

    dispatcher.run_once()
    dispatcher.run_once()

    assert bench.api.created == [named(one) for one in others]
    assert bench.reason(mine).startswith("Kubernetes refuses to start a pod for it")
    bench.api.refused_queue = "another"
    for one in others:
        bench.claim(one)
    bench.now += 60
    dispatcher.run_once()
    assert bench.api.created[2:] == [named(mine)]


def test_a_token_that_kubelet_has_replaced_is_read_anew(bench: Bench) -> None:
    [job_id] = bench.queue(1)
    dispatcher = bench.dispatcher()
    dispatcher.run_once()
    bench.api.rotate_token()

    bench.change(job_id, lifecycle.cancel)
    dispatcher.run_once()

    assert bench.api.objects == {}


def test_without_the_list_of_jobs_nothing_is_started(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.queue(1)
    dispatcher = bench.dispatcher()
    (bench.api.account / "token").write_text("of another cluster")

    dispatcher.run_once()

    assert bench.api.created == []
    assert "jobs of class a100 were not dispatched" in caplog.text
    assert "status 401: Unauthorized" in caplog.text


@pytest.mark.parametrize(
    "runtime", [{}, {"trainingRuntime": {"name": "regraft-a100"}}], ids=["Job", "TrainJob"]
)
def test_the_role_has_every_verb_that_the_dispatcher_uses_and_no_other(
    sqlite_database: Database, tmp_path: Path, runtime: dict[str, Any]
) -> None:
    manifests = render(values(nodes=2, **runtime))
    write_templates(manifests, tmp_path / "templates")
    with serving(ApiServer(manifests, tmp_path)) as api:
        bench = Bench(api, sqlite_database, tmp_path)
        [job_id] = bench.queue(1)
        dispatcher = bench.dispatcher()
        dispatcher.run_once()
        assert bench.reason(job_id) == "waits for quota of research"
        bench.change(job_id, lifecycle.cancel)
        dispatcher.run_once()

        assert api.created and not api.objects
        assert api.used == api.granted


def test_a_train_job_names_its_runtime_and_the_job_that_it_claims() -> None:
    manifests = render(values(gpus=8, nodes=2, trainingRuntime={"name": "regraft-a100"}))
    template = templates.JobTemplate.model_validate_json(templates_of(manifests)[f"{CLASS}.json"])

    made = template.manifest_of("ftjob-Ab1", 3, "proj_1", None)

    assert (made["kind"], made["metadata"]["name"]) == ("TrainJob", "ft-ab1-3")
    assert made["spec"]["runtimeRef"] == {"name": "regraft-a100"}
    trainer = made["spec"]["trainer"]
    assert trainer["numNodes"] == 2
    assert trainer["resourcesPerNode"]["limits"][JOBS["gpuResource"]] == 8
    environment = {one["name"]: one.get("value") for one in trainer["env"]}
    assert environment["REGRAFT_CLAIM"] == "ftjob-Ab1"
    assert environment["REGRAFT_RENDEZVOUS"] == "$(JOB_NAME)-0.$(JOB_SET):29400"


SIZED = {"gpuResource": "nvidia.com/gpu", "maxGpus": 8, "maxNodes": 4, "samplingGpus": 1, "gpus": 2}


def choose(job: Job, *, gpus: int, nodes: int) -> None:
    job.gpus, job.nodes = gpus, nodes


def shape(found: Manifest) -> dict[str, Any]:
    """What depends on the GPUs and nodes of a job."""
    spec = found["spec"]
    if found["kind"] == "TrainJob":
        trainer = spec["trainer"]
        environment, resources, nodes = trainer["env"], [trainer["resourcesPerNode"]], trainer["numNodes"]
    else:
        pod = spec["template"]["spec"]
        assert spec["parallelism"] == spec["completions"]
        environment, nodes = pod["containers"][0]["env"], spec["completions"]
        resources = [one["resources"] for one in (*pod["initContainers"], *pod["containers"])]
    variables = {one["name"]: one.get("value") for one in environment}
    assert all(one == resources[0] for one in resources), "the doctor sees the GPUs of the worker"
    limits = resources[0]["limits"]
    return {
        "gpus": limits["nvidia.com/gpu"],
        "cpu": resources[0]["requests"]["cpu"],
        "memory": limits["memory"],
        "nodes": nodes,
        "REGRAFT_NODES": variables["REGRAFT_NODES"],
        "REGRAFT_RANKS": variables["REGRAFT_RANKS"],
    }


@pytest.mark.parametrize(
    "runtime", [{}, {"trainingRuntime": {"name": "regraft-a100"}}], ids=["Job", "TrainJob"]
)
def test_a_job_gets_the_gpus_and_nodes_that_it_chose(
    sqlite_database: Database, tmp_path: Path, runtime: dict[str, Any]
) -> None:
    manifests = render(values(**SIZED | runtime))
    write_templates(manifests, tmp_path / "templates")
    with serving(ApiServer(manifests, tmp_path)) as api:
        bench = Bench(api, sqlite_database, tmp_path)
        [plain], [large] = bench.queue(1), bench.queue(1, kueue={"queue": "large"})
        bench.change(large, lambda work, job: choose(job, gpus=8, nodes=2))
        bench.dispatcher().run_once()

    assert shape(api.objects[named(plain)]) == {
        "gpus": 2, "cpu": 4, "memory": "48Gi", "nodes": 1, "REGRAFT_NODES": "1", "REGRAFT_RANKS": "1",
    }  # fmt: skip
    assert shape(api.objects[named(large)]) == {
        "gpus": 8, "cpu": "16", "memory": "192Gi", "nodes": 2, "REGRAFT_NODES": "2", "REGRAFT_RANKS": "7",
    }  # fmt: skip


@pytest.mark.parametrize("lowered", [{"maxGpus": 2}, {"maxNodes": 1}, {"maxGpus": None, "maxNodes": None}])
def test_a_job_that_chose_more_than_its_pool_allows_now_says_so(
    bench: Bench, lowered: dict[str, Any]
) -> None:
    [large], [other] = bench.queue(1), bench.queue(1)
    bench.change(large, lambda work, job: choose(job, gpus=8, nodes=2))
    changes = {name: value for name, value in (SIZED | lowered).items() if value is not None}
    (bench.folder / f"templates/{CLASS}.json").write_text(
        templates_of(render(values(**changes)))[f"{CLASS}.json"]
    )

    bench.dispatcher().run_once()

    assert bench.api.created == [named(other)]
    assert bench.reason(large) == "it chose more gpus or nodes than jobs of class a100 may have now"


def test_cpu_and_memory_of_a_pod_are_scaled_with_its_gpus_in_any_unit() -> None:
    manifest = json.loads(templates_of(render(values(**SIZED)))[f"{CLASS}.json"])
    [worker] = manifest["manifest"]["spec"]["template"]["spec"]["containers"]
    worker["resources"] = {
        "requests": {"cpu": "500m", "memory": "68719476737"},
        "limits": {"cpu": 1.5, "memory": "10Gi", "rdma/hca": 1, "nvidia.com/gpu": 2},
    }
    template = templates.JobTemplate.model_validate(manifest)

    sized = template.manifest_of("ftjob-a", 0, "proj_1", None, gpus=3)

    [worker] = sized["spec"]["template"]["spec"]["containers"]
    assert worker["resources"] == {
        "requests": {"cpu": "750m", "memory": "98305Mi"},
        "limits": {"cpu": "2250m", "memory": "15Gi", "rdma/hca": 1, "nvidia.com/gpu": 3},
    }


@pytest.mark.parametrize(
    ("given", "scaled"),
    [
        ({"cpu": "500m", "memory": "64Gi"}, {"cpu": "667m", "memory": "87382Mi"}),
        ({"cpu": "4", "memory": "10G"}, {"cpu": "5334m", "memory": "12716Mi"}),
        ({"cpu": "3", "memory": "96Gi"}, {"cpu": "4", "memory": "128Gi"}),
    ],
)
def test_scaled_amounts_are_rounded_up_to_what_kubernetes_stores(
    given: dict[str, str], scaled: dict[str, str]
) -> None:
    sizes = SIZED | {"gpus": 3}
    manifest = json.loads(templates_of(render(values(**sizes)))[f"{CLASS}.json"])
    [worker] = manifest["manifest"]["spec"]["template"]["spec"]["containers"]
    worker["resources"] = {"requests": given, "limits": {"nvidia.com/gpu": 3}}

    sized = templates.JobTemplate.model_validate(manifest).manifest_of("ftjob-a", 0, "proj_1", None, gpus=4)

    [worker] = sized["spec"]["template"]["spec"]["containers"]
    assert worker["resources"]["requests"] == scaled


def test_a_pool_whose_gpus_are_in_a_claim_of_devices_has_jobs_with_its_own_gpus_only() -> None:
    """A ResourceClaimTemplate has a fixed number of devices."""
    limits = {"resources": {"limits": {"nvidia.com/gpu": None}}}
    spec = {"containers": [{"name": "worker"} | limits], "initContainers": [{"name": "doctor"} | limits]}
    text = templates_of(render(values(**SIZED, podTemplate={"spec": spec})))[f"{CLASS}.json"]
    template = templates.JobTemplate.model_validate_json(text)

    template.manifest_of("ftjob-a", 0, "proj_1", None, gpus=2, nodes=2)
    with pytest.raises(templates.SizeNotAllowed, match=r"no container has nvidia\.com/gpu"):
        template.manifest_of("ftjob-a", 0, "proj_1", None, gpus=8)


def test_the_page_of_a_restore_stops_all_that_starts_pods() -> None:
    page = (ROOT / "docs/howto/restore.md").read_text().replace("RELEASE", "regraft")
    lines = re.findall(r"^kubectl -n NAMESPACE (?:annotate|delete|scale) (\S+) -l (\S+)", page, re.MULTILINE)
    jobs, train_jobs = (
        render(values(**changes)) for changes in ({}, {"trainingRuntime": {"name": "regraft-a100"}})
    )
    dispatched = [json.loads(templates_of(one)[f"{CLASS}.json"])["manifest"] for one in (jobs, train_jobs)]
    rendered = render(VARIATIONS["scaled"] | {"api": {"autoscaling": {"enabled": True}}}) + jobs
    kinds = {"Deployment", "ScaledJob", "ScaledObject", "HorizontalPodAutoscaler"}
    starters = [one for one in rendered if one["kind"] in kinds] + dispatched

    assert {one["kind"] for one in starters} == kinds | {"Job", "TrainJob"}
    for one in starters:
        kind = one["kind"].lower().replace("horizontalpodautoscaler", "hpa")
        own = one["metadata"]["labels"]
        selectors = own.keys() | {f"{name}={value}" for name, value in own.items()}
        selected = [which for which, names in lines if set(names.split(",")) <= selectors]
        assert kind in selected, one["metadata"]


def test_a_pool_that_is_renamed_keeps_its_jobs(bench: Bench) -> None:
    job_id, other = bench.queue(2)
    bench.dispatcher().run_once()
    file = bench.folder / f"templates/{CLASS}.json"
    file.write_text(templates_of(render(values(name="renamed")))[file.name])
    bench.change(job_id, lifecycle.cancel)

    bench.dispatcher().run_once()

    assert list(bench.api.objects) == [named(other)]
    assert bench.api.created == [named(job_id), named(other)]


def test_classes_have_their_own_room_and_one_that_is_removed_leaves_no_jobs(bench: Bench) -> None:
    jobs = bench.queue(PENDING + 1)
    [other] = bench.queue(1, gpu_class="other")
    file = bench.folder / "templates/other.json"
    file.write_text((bench.folder / f"templates/{CLASS}.json").read_text())
    dispatcher = bench.dispatcher()

    dispatcher.run_once()
    assert bench.api.lists == 1
    dispatcher.run_once()
    assert bench.api.created == [*map(named, jobs[:PENDING]), named(other)]

    file.unlink()
    bench.change(other, lifecycle.cancel)
    dispatcher.run_once()
    assert list(bench.api.objects) == [named(one) for one in jobs[:PENDING]]


def test_templates_that_are_invalid_stop_no_other_class_and_no_dispatcher(bench: Bench) -> None:
    [job_id] = bench.queue(1)
    dispatcher = bench.dispatcher()
    other = bench.folder / "templates/other.json"
    other.write_text("{")
    dispatcher.run_once()
    assert bench.api.created == []

    train_job = json.loads((bench.folder / f"templates/{CLASS}.json").read_text())
    train_job["manifest"] |= {"kind": "TrainJob", "spec": {"trainer": {"env": []}}}
    other.write_text(json.dumps(train_job))  # a kind that the Role does not name
    (bench.folder / "templates/a.json").write_text(json.dumps(train_job))
    dispatcher.run_once()
    assert bench.api.created == [named(job_id)]


def test_templates_without_a_place_for_the_claim_are_refused(tmp_path: Path) -> None:
    manifest = {"kind": "Job", "metadata": {"labels": {"a": "b"}}, "spec": {"template": {"spec": {}}}}
    content = {"max_jobs": 1, "max_pending": 1, "manifest": manifest}
    (tmp_path / "a100.json").write_text(json.dumps(content))

    with pytest.raises(templates.InvalidTemplates, match=r"a100\.json: .*a container 'worker' with env"):
        templates.load(tmp_path)


def test_with_the_dispatcher_keda_has_no_part_in_it_and_one_pod_has_a_token() -> None:
    manifests = render(values())

    assert not of_kind(manifests, "ScaledJob")
    assert "keda" not in json.dumps(manifests)
    holders = [pod.component for pod in pods(manifests) if pod.spec["automountServiceAccountToken"]]
    assert holders == ["dispatcher"]


def test_the_pods_of_a_group_find_each_other_as_with_keda() -> None:
    changes = {"gpuClass": CLASS, "name": "a100"}
    manifests = render(values(**GROUP | changes))
    job = json.loads(templates_of(manifests)[f"{CLASS}.json"])["manifest"]
    [service] = [one for one in of_kind(manifests, "Service") if one["metadata"]["name"].endswith("-a100")]

    assert job["spec"]["completions"] == GROUP["nodes"]
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]


@pytest.mark.slow
def test_the_rendered_dispatcher_starts_jobs_until_it_is_stopped(postgres: Postgres, tmp_path: Path) -> None:
    manifests = render(values())
    url = postgres.new_database()
    upgrade(url)
    database = Database(url)
    with serving(ApiServer(manifests, tmp_path)) as api:
        bench = Bench(api, database, tmp_path)
        [job_id] = bench.queue(1)
        [pod] = pods(manifests, "dispatcher")
        port = reserve_port()
        kubelet = Kubelet(
            tmp_path,
            {"regraft-database": {"url": url}},
            templates_of(manifests),
            {"dispatcher": port, "api": port},
            more={"dispatcher": f"--api {api.address} --account {api.account} --metrics-port {port}"},
        )
        process = kubelet.start(pod)
        try:
            kubelet.wait_for(pod, "livenessProbe", process)
            deadline = time.monotonic() + 60
            while not api.created:
                assert time.monotonic() < deadline, (tmp_path / "dispatcher.log").read_text()
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
        assert api.created == [named(job_id)]
    database.close()
