"""The chart on a real cluster, of which REGRAFT_TEST_KUBECONFIG names the kubeconfig (docs/contribute/testing.md).

Each test has what it needs in its arguments: `cluster` is an API server alone; `release` and `installed` need
kube-controller-manager, too, but no node (tests/helm/release.py). A test whose need is not met is skipped and names it.
"""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.helm import cluster as clusters
from tests.helm.charts import (
    CHART,
    FLEET,
    JOBS,
    VARIATIONS,
    Manifest,
    helm,
    job_of,
    merged,
    of_kind,
    parsed,
    profile,
    scaled,
)
from tests.helm.cluster import Cluster, Refused
from tests.helm.release import NAME, OF_RELEASE, Release, owner_of, runs, without_nodes
from tests.helm.test_rolls import BASE, FLEETS, RESTARTS
from worker.dispatch import templates

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not clusters.KUBECONFIG, reason="REGRAFT_TEST_KUBECONFIG names no cluster"),
]

APPS, BATCH, KEDA = "apps/v1", "batch/v1", "keda.sh/v1alpha1"

# What the chart creates and Kubernetes lacks. Where it is missing, the tests add a definition that accepts all fields.
CUSTOM = {
    "ScaledJob": KEDA,
    "ScaledObject": KEDA,
    "ServiceMonitor": "monitoring.coreos.com/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
}


def definition(kind: str, api_version: str) -> Manifest:
    group, version = api_version.split("/")
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    # Groups below *.k8s.io need the number of a review.
    annotations = {"api-approved.kubernetes.io": "unapproved, for tests"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            "annotations": annotations,
            "labels": clusters.OURS,
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [
                {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
            ],
        },
    }


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """An API server that knows every kind of the chart, and a namespace of it."""
    with ExitStack() as stack:
        client = stack.enter_context(clusters.connect(Path(clusters.KUBECONFIG)))
        cluster = stack.enter_context(clusters.namespace(client))
        clusters.delete_definitions(cluster)  # those that an earlier run has left
        path = cluster.collection("apiextensions.k8s.io/v1", "CustomResourceDefinition")
        cluster.wait(path, lambda items: not any("deletionTimestamp" in item["metadata"] for item in items))
        stack.callback(clusters.delete_definitions, cluster)
        for kind, api_version in CUSTOM.items():
            if not cluster.has_kind(api_version, kind):
                cluster.create(definition(kind, api_version))
                cluster.wait_for_kind(api_version, kind)
        yield cluster


@pytest.fixture(scope="module")
def controllers(cluster: Cluster) -> Cluster:
    if not clusters.has_controllers(cluster):
        pytest.skip("needs controllers: no kube-controller-manager created an account in a new namespace")
    return cluster


@pytest.fixture
def release(controllers: Cluster) -> Iterator[Release]:
    with without_nodes(controllers) as release:
        yield release


@pytest.fixture(scope="module")
def installed(controllers: Cluster) -> Iterator[Release]:
    """One release with the values of test_rolls.py for all tests of its changes."""
    with without_nodes(controllers) as release:
        release.install(BASE)
        yield release


# The API server alone.


@pytest.mark.parametrize("variation", VARIATIONS)
def test_the_api_server_accepts_every_manifest(cluster: Cluster, variation: str) -> None:
    """With all of its validation, and without a warning: of old versions of its API, or of pods with rights."""
    for manifest in rendered(cluster, VARIATIONS[variation]):
        assert cluster.validate(manifest) == [], manifest["metadata"]["name"]


@pytest.mark.parametrize("variation", VARIATIONS)
def test_the_api_server_accepts_the_jobs_of_every_pool(cluster: Cluster, variation: str) -> None:
    """Those that KEDA creates from a ScaledJob, and those of the dispatcher."""
    manifests = rendered(cluster, VARIATIONS[variation])
    jobs = [job_of(scaled_job) for scaled_job in of_kind(manifests, "ScaledJob")] + dispatched(manifests)

    for job in jobs:
        assert cluster.validate(job) == [], job["metadata"]["name"]


def test_the_api_server_accepts_the_train_jobs_of_the_dispatcher(cluster: Cluster) -> None:
    runtime = {"nodes": 2, "trainingRuntime": {"name": "regraft-busy"}}
    [job] = dispatched(rendered(cluster, dispatching(**runtime)))

    assert job["kind"] == "TrainJob"
    assert cluster.validate(job) == []


@pytest.mark.parametrize("change", RESTARTS)
def test_the_api_server_accepts_every_change(cluster: Cluster, change: str) -> None:
    apply, _ = RESTARTS[change]

    for manifest in rendered(cluster, apply(BASE)):
        assert cluster.validate(manifest) == [], manifest["metadata"]["name"]


def test_a_mistake_in_a_manifest_would_be_seen(cluster: Cluster) -> None:
    [api] = [
        manifest
        for manifest in of_kind(rendered(cluster, VARIATIONS["demo"]), "Deployment")
        if manifest["metadata"]["name"] == f"{NAME}-api"
    ]
    unknown, invalid, privileged = copy.deepcopy(api), copy.deepcopy(api), copy.deepcopy(api)
    unknown["spec"]["replicaz"] = 2
    invalid["spec"]["template"]["metadata"]["labels"] = {"another": "label"}
    privileged["spec"]["template"]["spec"]["hostNetwork"] = True

    with pytest.raises(Refused, match="replicaz"):
        cluster.validate(unknown)
    with pytest.raises(Refused, match="selector"):
        cluster.validate(invalid)
    assert [warning for warning in cluster.validate(privileged) if "PodSecurity" in warning]


def rendered(cluster: Cluster, values: Mapping[str, Any]) -> list[Manifest]:
    """The manifests as Helm renders them for the version and the objects of this cluster."""
    with helm.Config(kubeconfig_path=clusters.KUBECONFIG, namespace=cluster.namespace) as config:
        chart = helm.Chart.load(CHART)
        chart.validate_schema(dict(values))
        files = config.render(chart, dict(values), name=NAME, namespace=cluster.namespace)
    return parsed(text for file, text in files.items() if file.endswith(".yaml"))


def dispatched(manifests: list[Manifest], project: str = "proj_1") -> list[Manifest]:
    """The object of one attempt for each template of the dispatcher."""
    files = {
        name: content
        for config in of_kind(manifests, "ConfigMap")
        if config["metadata"]["name"] == f"{NAME}-dispatcher"
        for name, content in config["data"].items()
    }
    return [
        templates.JobTemplate.model_validate(json.loads(content)).manifest_of(
            f"ftjob-{number}", 0, project, None
        )
        for number, content in enumerate(files.values())
    ]


# With controllers.


@pytest.mark.parametrize("variation", VARIATIONS)
def test_an_upgrade_without_a_change_changes_nothing(release: Release, variation: str) -> None:
    release.install(VARIATIONS[variation])
    objects, pods = release.objects(), release.pods()

    release.upgrade(VARIATIONS[variation])

    assert {path: content_of(live) for path, live in release.objects().items()} == {
        path: content_of(live) for path, live in objects.items()
    }
    assert release.pods() == pods


def content_of(live: Manifest) -> Manifest:
    """What a client can change of an object, its uid, and its generation, which counts the changes of its spec."""
    metadata = {
        key: value
        for key, value in live["metadata"].items()
        if key not in ("managedFields", "resourceVersion")
    }
    return live | {"metadata": metadata, "status": None}


@pytest.mark.parametrize("change", RESTARTS)
def test_a_change_ends_the_pods_that_it_concerns(installed: Release, change: str) -> None:
    """The table of test_rolls.py, by the pods that are gone after the rollout."""
    apply, expected = RESTARTS[change]
    installed.upgrade(BASE)
    pods = installed.pods()

    installed.upgrade(apply(BASE))

    remaining = installed.pods()
    assert {owner for uid, owner in pods.items() if uid not in remaining} == expected


def test_a_rollback_restores_what_was_there(release: Release) -> None:
    apply, _ = RESTARTS["the image"]
    release.install(BASE)
    before = {path: live.get("spec") or live.get("data") for path, live in release.objects().items()}
    release.upgrade(merged(apply(BASE), {"models": {"New": {"hub": "a/b", "gpuClass": "h100"}}}))
    assert release.objects().keys() == before.keys()

    release.rollback(1)

    after = {path: live.get("spec") or live.get("data") for path, live in release.objects().items()}
    assert after == before


def test_a_change_between_fixed_replicas_and_autoscaling_ends_no_pod(release: Release) -> None:
    """The number of pods is that of the autoscaler while there is one, also below a new minimum until it sees that."""
    release.install(fixed(3))
    started = samplers(release)

    release.upgrade(autoscaled())
    assert samplers(release) == started and len(started) == 3

    scale(release, FLEET_OF_TEST, 4)
    more = samplers(release)
    release.upgrade(
        merged(autoscaled(minReplicas=5, maxReplicas=6), {"modelAliases": {"o4-mini": "Qwen3-4B"}})
    )
    assert samplers(release) == more > started and len(more) == 4

    with pytest.raises(helm.HelmError, match=r"conflict.*\.spec\.replicas"):
        release.upgrade(fixed(5))
    take_over(release, FLEET_OF_TEST)
    release.upgrade(fixed(5))
    assert samplers(release) > more and len(samplers(release)) == 5
    release.upgrade(fixed(2))
    assert len(samplers(release)) == 2


FLEET_OF_TEST = f"{NAME}-sampler-small"


def autoscaled(**changes: int) -> dict[str, Any]:
    return BASE | {"samplers": FLEETS | {"fleets": [scaled(FLEET, **changes)]}}


def fixed(replicas: int) -> dict[str, Any]:
    return BASE | {"samplers": FLEETS | {"fleets": [FLEET | {"replicas": replicas}]}}


def samplers(release: Release) -> set[str]:
    return {uid for uid, owner in release.pods().items() if owner == FLEET_OF_TEST}


def scale(release: Release, name: str, replicas: int) -> None:
    """As a HorizontalPodAutoscaler does."""
    path = f"{release.cluster.collection(APPS, 'Deployment')}/{name}/scale"
    current = release.cluster.send("GET", path)
    wanted = current | {"spec": {"replicas": replicas}}
    manager = {"fieldManager": "kube-controller-manager"}
    release.cluster.send("PUT", path, json=wanted, params=manager)
    release.settle()


def take_over(release: Release, name: str) -> None:
    """What `helm upgrade --force-conflicts` does first: the autoscaler owns the replicas no more."""
    path = f"{release.cluster.collection(APPS, 'Deployment')}/{name}"
    entries = release.cluster.send("GET", path)["metadata"]["managedFields"]
    others = [entry for entry in entries if entry.get("subresource") != "scale"]
    assert len(others) == len(entries) - 1
    release.cluster.patch(path, metadata={"managedFields": others})


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_change_of_a_pool_ends_no_busy_worker(release: Release, nodes: int) -> None:
    """Neither a smaller pool, nor other resources, nor another image: KEDA's Jobs run until they end by themselves."""
    pool = POOL_OF_JOBS | {"nodes": nodes}
    values = with_pool(pool)
    release.install(values)
    busy = start_job(release, f"{NAME}-worker-busy", nodes)

    release.upgrade(with_pool(pool | {"maxReplicas": 1, "scratch": "60Gi"}))
    release.upgrade(merged(with_pool(pool), {"image": {"tag": "9.9.9"}}))
    release.rollback(1)

    collect_garbage(release.cluster)
    assert busy.items() <= release.pods().items() and len(busy) == nodes


POOL_OF_JOBS = JOBS | {"name": "busy", "gpuClass": "busy", "gpuResource": "nvidia.com/gpu"}
del POOL_OF_JOBS["kueueQueue"]  # a Kueue of the cluster would suspend its Jobs


def with_pool(pool: Mapping[str, Any]) -> dict[str, Any]:
    """A pool of Jobs for the class `busy` beside the keeper."""
    keeper = [worker for worker in profile("production")["workers"] if worker["name"] == "keeper"]
    values = profile("production", workers=[dict(pool), *keeper], metrics={"enabled": True})
    values["models"] = {"other": {"path": "/models/other"}}
    return values


def start_job(release: Release, scaled_job: str, nodes: int) -> dict[str, str]:
    """A Job as KEDA creates it, with all of its pods ready. Returns these."""
    cluster = release.cluster
    owner = cluster.get("ScaledJob", scaled_job, KEDA)
    job = job_of(owner)
    reference = {key: owner["metadata"][key] for key in ("name", "uid")}
    reference |= {"apiVersion": KEDA, "kind": "ScaledJob", "controller": True, "blockOwnerDeletion": True}
    job["metadata"]["ownerReferences"] = [reference]
    cluster.create(job)
    return wait_for_pods(release, job["metadata"]["name"], nodes)


def wait_for_pods(release: Release, job: str, number: int) -> dict[str, str]:
    """So many running pods of the Job, as Release.pods returns them."""
    path = release.cluster.collection("v1", "Pod")
    release.cluster.wait(path, lambda pods: [owner_of(pod) for pod in pods if runs(pod)].count(job) == number)
    return {uid: owner for uid, owner in release.pods().items() if owner == job}


def collect_garbage(cluster: Cluster) -> None:
    """Wait until the garbage collector has deleted an object without owner: it has seen earlier changes, too."""
    path = cluster.collection("v1", "ConfigMap")
    owner = cluster.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}})
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    owned = {"name": "owned", "ownerReferences": [reference]}
    cluster.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": owned})
    cluster.send("DELETE", f"{path}/owner")
    cluster.wait(path, lambda items: "owned" not in {item["metadata"]["name"] for item in items})


def dispatching(**pool: Any) -> dict[str, Any]:
    values = with_pool(POOL_OF_JOBS | {"kueueQueue": "research"} | pool)
    api = {"to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}], "port": 6443}
    changes = {"dispatcher": {"enabled": True}, "networkPolicy": {"kubernetesApi": api}}
    given: dict[str, Any] = merged(values, changes)
    return given


def test_a_preempted_worker_is_stopped_and_its_job_continues_when_it_is_admitted_again(
    release: Release,
) -> None:
    """Kueue admits a Job of the dispatcher by `suspend: false`, and preempts it by `suspend: true`."""
    release.install(dispatching())
    [job] = dispatched(list(release.objects().values()))
    assert job["spec"]["suspend"] and job["metadata"]["labels"].pop(templates.QUEUE_LABEL) == "research"
    name, jobs = job["metadata"]["name"], release.cluster.collection(BATCH, "Job")

    release.cluster.create(job)
    release.cluster.wait(jobs, lambda items: "Suspended" in conditions(items, name))
    assert name not in release.pods().values()

    release.cluster.patch(f"{jobs}/{name}", spec={"suspend": False})
    [worker] = wait_for_pods(release, name, 1)
    release.cluster.patch(f"{jobs}/{name}", spec={"suspend": True})
    release.wait_for_end(worker)
    release.cluster.wait(jobs, lambda items: conditions(items, name) == {"Suspended"})

    release.cluster.patch(f"{jobs}/{name}", spec={"suspend": False})
    [another] = wait_for_pods(release, name, 1)
    assert another != worker
    release.statuses.end(name_of(release.cluster, another))
    release.cluster.wait(jobs, lambda items: "Complete" in conditions(items, name))


def test_an_evicted_worker_is_started_again_and_its_job_does_not_fail(release: Release) -> None:
    """As `kubectl drain` evicts it, and killed before it has drained. The Job has no retries, but a rule for that."""
    release.install(with_pool(POOL_OF_JOBS))
    [worker] = start_job(release, f"{NAME}-worker-busy", 1)
    [job] = {owner for uid, owner in release.pods().items() if uid == worker}
    release.statuses.ends_as = "Failed"

    evict(release.cluster, worker)
    release.wait_for_end(worker)

    [replacement] = wait_for_pods(release, job, 1)
    assert replacement != worker
    jobs = release.cluster.objects("Job", BATCH)
    assert conditions(jobs, job) == set()


def name_of(cluster: Cluster, uid: str) -> str:
    [name] = [pod["metadata"]["name"] for pod in cluster.objects("Pod") if pod["metadata"]["uid"] == uid]
    return str(name)


def evict(cluster: Cluster, uid: str) -> None:
    name = name_of(cluster, uid)
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    cluster.send("POST", f"{cluster.collection('v1', 'Pod')}/{name}/eviction", json=eviction)


def test_the_end_of_the_first_pod_of_a_group_ends_its_job_and_the_others(release: Release) -> None:
    """The run is in the pod with the index 0."""
    release.install(with_pool(POOL_OF_JOBS | {"nodes": 3}))
    workers = start_job(release, f"{NAME}-worker-busy", 3)
    [job] = set(workers.values())
    [first] = release.cluster.objects(
        "Pod", labels=f"batch.kubernetes.io/job-completion-index=0,{OF_RELEASE}"
    )

    release.statuses.end(first["metadata"]["name"])

    for uid in workers.keys() - {first["metadata"]["uid"]}:
        release.wait_for_end(uid)
    jobs = release.cluster.collection(BATCH, "Job")
    after = release.cluster.wait(jobs, lambda items: "Complete" in conditions(items, job))
    assert "Failed" not in conditions(after, job)


def conditions(jobs: Sequence[Manifest], name: str) -> set[str]:
    [status] = [job.get("status", {}) for job in jobs if job["metadata"]["name"] == name]
    return {one["type"] for one in status.get("conditions", ()) if one["status"] == "True"}


CLAIMS = {
    f"PersistentVolumeClaim/store-{NAME}-{server}-0" for server in ("postgresql", "seaweedfs", "valkey")
}
# Variation -> what an uninstalled release leaves.
LEFT: dict[str, set[str]] = {
    "demo": CLAIMS | {f"Secret/{NAME}-bundled"},
    "every corner": set(),
    "scaled": set(),
    "watched": set(),
}


@pytest.mark.parametrize("variation", LEFT)
def test_an_uninstalled_release_leaves_what_its_notes_name(release: Release, variation: str) -> None:
    release.install(VARIATIONS[variation])

    notes = release.uninstall()

    assert release.wait_for_rest(LEFT[variation]) == LEFT[variation]
    assert [name for name in LEFT[variation] if name.split("/")[1] not in notes] == []
    assert ("helm uninstall keeps" in notes) == bool(LEFT[variation])


def test_an_uninstalled_release_ends_the_jobs_of_its_pools(release: Release) -> None:
    """KEDA's have an owner. Those of the dispatcher have none, and the notes have the command that deletes them."""
    release.install(with_pool(POOL_OF_JOBS))
    start_job(release, f"{NAME}-worker-busy", 1)
    assert "delete jobs" not in release.uninstall()
    assert release.wait_for_rest(set()) == set()

    release.install(dispatching())
    [job] = dispatched(list(release.objects().values()))
    release.cluster.create(job)
    left = {f"Job/{job['metadata']['name']}"}
    notes = release.uninstall()
    assert release.wait_for_rest(left) == left
    assert f"kubectl -n {release.cluster.namespace} delete jobs -l {selector_of(job)}" in notes


def selector_of(job: Manifest) -> str:
    labels = job["metadata"]["labels"]
    return ",".join(
        f"app.kubernetes.io/{name}={labels[f'app.kubernetes.io/{name}']}"
        for name in ("instance", "component")
    )
