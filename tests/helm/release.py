"""A release of the chart whose pods need no node.

They name a scheduler that does not exist, so on any cluster no node runs them and no image is pulled; a thread reports
their status. What Kubernetes does with them is real: rollouts, Jobs, garbage collection, and the waits of Helm.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from tests.helm.charts import CHART, Manifest, helm, merged, parsed
from tests.helm.cluster import KUBECONFIG, SECONDS, Cluster, Refused, has_controllers, namespace

NAME = "regraft"
OF_RELEASE = f"app.kubernetes.io/instance={NAME}"
SCHEDULER = "regraft-test"  # there is none, so these pods stay without a node, and no kubelet starts them
# Without classes that the cluster may lack: it refuses pods that name one.
WITHOUT_NODE = {"schedulerName": SCHEDULER, "priorityClassName": None, "runtimeClassName": None}


class PodsWithoutNode(threading.Thread):
    """Reports the status of pods that no node runs, as a kubelet would whose containers start at once.

    The pods of a migration end at once. All others run until they are deleted.

    Args:
        ends_as: the phase of a pod that was deleted: a worker that drains exits with 0.
    """

    def __init__(self, cluster: Cluster, ends_as: str = "Succeeded") -> None:
        super().__init__(daemon=True, name="pods")
        self.cluster = cluster
        self.ends_as = ends_as
        self.path = cluster.collection("v1", "Pod")
        self.errors: list[Exception] = []
        self._ends = threading.Event()

    def run(self) -> None:
        while not self._ends.is_set():
            try:
                listed = self.cluster.send("GET", self.path)
                for pod in listed["items"]:
                    self._report(pod)
                version = listed["metadata"]["resourceVersion"]
                for _, pod in self.cluster.watch(self.path, version, seconds=1):
                    self._report(pod)
            except (httpx.HTTPError, Refused) as error:
                if self._ends.wait(0.2):  # the namespace is being deleted
                    return
                self.errors.append(error)

    def _report(self, pod: Manifest) -> None:
        if "nodeName" in pod["spec"] or pod["spec"]["schedulerName"] != SCHEDULER:
            return
        meta, phase = pod["metadata"], pod["status"].get("phase")
        if phase in ("Succeeded", "Failed"):
            return
        migrates = meta["labels"].get("app.kubernetes.io/component") == "migrate"
        if "deletionTimestamp" in meta:
            self.end(meta["name"], self.ends_as)
        elif migrates:
            self.end(meta["name"])
        elif phase == "Pending":
            self._set(meta["name"], {"phase": "Running", "conditions": _conditions("True")})

    def end(self, name: str, phase: str = "Succeeded") -> None:
        """The pod's container exits."""
        self._set(name, {"phase": phase, "conditions": _conditions("False")})

    def _set(self, name: str, status: Mapping[str, Any]) -> None:
        """It may be gone by now: a pod without a node and without finalizers is deleted at once."""
        path = f"{self.path}/{name}/status"
        # It merges conditions by type: that of an eviction must stay.
        strategic = {"Content-Type": "application/strategic-merge-patch+json"}
        response = self.cluster.client.patch(path, json={"status": status}, headers=strategic)
        if response.is_error and response.status_code not in (404, 409):
            raise Refused(f"{path}: {response.status_code}: {response.text[:500]}")

    def close(self) -> None:
        self._ends.set()
        self.join(30)


def _conditions(ready: str) -> list[Manifest]:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return [
        {"type": kind, "status": ready, "lastTransitionTime": now} for kind in ("ContainersReady", "Ready")
    ]


class Release:
    """A release of the chart in its own namespace.

    Args:
        statuses: reports the status of its pods, which no node runs.
        empty: another namespace, with what the cluster itself creates in each.
    """

    def __init__(self, cluster: Cluster, statuses: PodsWithoutNode, empty: Cluster) -> None:
        self.cluster = cluster
        self.empty = empty
        self.statuses = statuses
        self.config = helm.Config(kubeconfig_path=KUBECONFIG, namespace=cluster.namespace)
        self.timeout = int(SECONDS)

    def values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        given: dict[str, Any] = merged(dict(values), {"podTemplate": {"spec": WITHOUT_NODE}})
        return given

    def install(self, values: Mapping[str, Any]) -> None:
        self.config.install(
            CHART, NAME, self.values(values), namespace=self.cluster.namespace, timeout=self.timeout
        )
        self.settle()

    def upgrade(self, values: Mapping[str, Any]) -> None:
        self.config.upgrade(
            CHART, NAME, self.values(values), namespace=self.cluster.namespace, timeout=self.timeout
        )
        self.settle()

    def rollback(self, revision: int) -> None:
        self.config.rollback(NAME, version=revision, timeout=self.timeout)
        self.settle()

    def settle(self) -> None:
        """Wait for the rollouts."""
        self.cluster.wait(
            self.cluster.collection("apps/v1", "Deployment"), lambda items: all(map(is_settled, items))
        )

    def objects(self) -> dict[str, Manifest]:
        """The live objects of the release, by their paths."""
        manifests = parsed([self.config.status(NAME)["manifest"]])
        paths = [self.cluster.path_of(manifest) for manifest in manifests]
        return {path: self.cluster.send("GET", path) for path in paths}

    def uninstall(self) -> str:
        """Returns the notes of the installation."""
        notes: str = self.config.status(NAME)["notes"]
        self.config.uninstall(NAME, timeout=self.timeout)
        return notes

    def wait_for_rest(self, expected: set[str]) -> set[str]:
        """Kind and name of what is left without an owner, once that is expected or the time is over."""
        deadline = time.monotonic() + SECONDS
        while True:
            names = names_of(self.cluster) - names_of(self.empty)
            if names == expected or time.monotonic() > deadline:
                return names
            time.sleep(0.2)

    def wait_for_end(self, pod: str) -> None:
        """Wait until the pod with this uid has ended or is gone."""

        def has_ended(pods: list[Manifest]) -> bool:
            phases = [item["status"].get("phase") for item in pods if item["metadata"]["uid"] == pod]
            return "Running" not in phases

        self.cluster.wait(self.cluster.collection("v1", "Pod"), has_ended)

    def pods(self) -> dict[str, str]:
        """The uid of each pod, with the name of what created it: a Deployment or a Job."""
        pods = self.cluster.objects("Pod", labels=OF_RELEASE)
        return {
            pod["metadata"]["uid"]: owner_of(pod)
            for pod in pods
            if "deletionTimestamp" not in pod["metadata"]
        }


def names_of(cluster: Cluster) -> set[str]:
    """Kind and name of each object without an owner."""
    return {
        f"{kind}/{item['metadata']['name']}"
        for kind, item in cluster.everything()
        if "ownerReferences" not in item["metadata"]
    }


def runs(pod: Manifest) -> bool:
    return pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]


def owner_of(pod: Manifest) -> str:
    owner: str = pod["metadata"]["ownerReferences"][0]["name"]
    return owner.removesuffix("-" + pod["metadata"]["labels"].get("pod-template-hash", ""))


def is_settled(deployment: Manifest) -> bool:
    wanted, status = deployment["spec"]["replicas"], deployment.get("status", {})
    counts = [status.get(name, 0) for name in ("replicas", "updatedReplicas", "availableReplicas")]
    return status.get("observedGeneration") == deployment["metadata"]["generation"] and counts == [wanted] * 3


@contextmanager
def without_nodes(empty: Cluster) -> Iterator[Release]:
    """A Release in a namespace of its own, whose pods no node runs."""
    with namespace(empty.client) as cluster:
        assert has_controllers(cluster)
        pods = PodsWithoutNode(cluster)
        pods.start()
        try:
            yield Release(cluster, pods, empty)
        finally:
            pods.close()
        assert pods.errors == []
