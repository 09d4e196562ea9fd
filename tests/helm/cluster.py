"""A Kubernetes cluster of the person who runs the tests.

Settings:
    REGRAFT_TEST_KUBECONFIG: its kubeconfig. The user must be an administrator: the tests create namespaces and CRDs.
    REGRAFT_TEST_IMAGE: `registry.example.com/regraft:0.1.0`, where its nodes pull `api` and `worker-cpu`.
    REGRAFT_TEST_CLUSTER_SECONDS: how long a test waits for one change of the cluster (default 120).
"""

import base64
import json
import os
import ssl
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import yaml

from tests.helm.charts import Manifest

KUBECONFIG = os.environ.get("REGRAFT_TEST_KUBECONFIG", "")
IMAGE = os.environ.get("REGRAFT_TEST_IMAGE", "")
SECONDS = float(os.environ.get("REGRAFT_TEST_CLUSTER_SECONDS", "120"))

APPLY = {"Content-Type": "application/apply-patch+yaml"}
MERGE = {"Content-Type": "application/merge-patch+json"}


OURS = {"app.kubernetes.io/managed-by": "regraft-tests"}  # the label of definitions that the tests add
DEFINITIONS = ("apiextensions.k8s.io/v1", "CustomResourceDefinition")


class UnusableKubeconfig(Exception):
    """The message has the remedy."""


class Refused(Exception):
    """The API server refuses a request. The message is its own."""


def connect(file: Path) -> httpx.Client:
    """A client of the kubeconfig's current context.

    Raises:
        UnusableKubeconfig: its user has neither a token nor a client certificate.
    """
    config = yaml.safe_load(file.read_text())

    def entry(kind: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(item for item in config[f"{kind}s"] if item["name"] == name)[kind]
        return found

    context = entry("context", config["current-context"])
    cluster, user = entry("cluster", context["cluster"]), entry("user", context["user"])
    if not user.keys() & {"token", "client-certificate", "client-certificate-data"}:
        raise UnusableKubeconfig(
            f"{file}: the user of the current context has no token and no client certificate; plugins are not run. "
            "Give it the token that `kubectl create token` prints for an account with the ClusterRole cluster-admin."
        )
    headers = {"Authorization": f"Bearer {user['token']}"} if "token" in user else {}
    return httpx.Client(
        base_url=cluster["server"],
        verify=_tls(file.parent, cluster, user),
        headers=headers,
        trust_env=False,
        timeout=SECONDS,
    )


def _tls(folder: Path, cluster: Mapping[str, str], user: Mapping[str, str]) -> ssl.SSLContext:
    with TemporaryDirectory() as scratch:

        def path_of(entry: Mapping[str, str], name: str) -> str | None:
            if encoded := entry.get(f"{name}-data"):
                copied = Path(scratch) / name
                copied.write_bytes(base64.b64decode(encoded))
                return str(copied)
            return str(folder / entry[name]) if name in entry else None

        tls = ssl.create_default_context(cafile=path_of(cluster, "certificate-authority"))
        if certificate := path_of(user, "client-certificate"):
            tls.load_cert_chain(certificate, path_of(user, "client-key"))
    # The certificates that some distributions create lack what Python 3.13 requires of them.
    tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return tls


class Cluster:
    """Requests to the API server in one namespace."""

    def __init__(self, client: httpx.Client, namespace: str) -> None:
        self.client = client
        self.namespace = namespace
        self._resources: dict[str, list[Manifest]] = {}

    # Resources.

    def resources(self, api_version: str) -> list[Manifest]:
        """Those that the server has of this version; none if it does not know it."""
        if api_version not in self._resources:
            root = "/api" if "/" not in api_version else "/apis"
            response = self.client.get(f"{root}/{api_version}")
            self._resources[api_version] = response.json()["resources"] if response.status_code == 200 else []
        return self._resources[api_version]

    def collection(self, api_version: str, kind: str) -> str:
        """The path of the objects of a kind in the namespace.

        Raises:
            LookupError: the server does not know the kind.
        """
        for resource in self.resources(api_version):
            if resource["kind"] == kind and "/" not in resource["name"]:
                root = "/api" if "/" not in api_version else "/apis"
                scope = f"/namespaces/{self.namespace}" if resource["namespaced"] else ""
                return f"{root}/{api_version}{scope}/{resource['name']}"
        raise LookupError(f"the cluster has no {kind} of {api_version}")

    def path_of(self, manifest: Manifest) -> str:
        return f"{self.collection(manifest['apiVersion'], manifest['kind'])}/{manifest['metadata']['name']}"

    def has_kind(self, api_version: str, kind: str) -> bool:
        return kind in {resource["kind"] for resource in self.resources(api_version)}

    def wait_for_kind(self, api_version: str, kind: str) -> None:
        """Wait until the server stores a kind that was just defined. Its definition cannot be deleted before.

        Raises:
            TimeoutError: it does not in time.
        """
        deadline = time.monotonic() + SECONDS
        while not (
            self.has_kind(api_version, kind)
            and self.client.get(self.collection(api_version, kind)).is_success
        ):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the cluster has no {kind} of {api_version} after {SECONDS:.0f} s")
            self._resources.pop(api_version)
            time.sleep(0.1)

    # Requests.

    def send(self, method: str, path: str, **content: Any) -> Any:
        """The JSON of the answer.

        Raises:
            Refused: its status is an error.
        """
        response = self.client.request(method, path, **content)
        if response.is_error:
            raise Refused(f"{method} {path}: {response.status_code}: {response.text[:2000]}")
        return response.json()

    def get(self, kind: str, name: str, api_version: str = "v1") -> Manifest:
        manifest: Manifest = self.send("GET", f"{self.collection(api_version, kind)}/{name}")
        return manifest

    def objects(self, kind: str, api_version: str = "v1", labels: str = "") -> list[Manifest]:
        parameters = {"labelSelector": labels}
        items: list[Manifest] = self.send("GET", self.collection(api_version, kind), params=parameters)[
            "items"
        ]
        return items

    def create(self, manifest: Manifest) -> Manifest:
        path = self.collection(manifest["apiVersion"], manifest["kind"])
        created: Manifest = self.send("POST", path, json=manifest)
        return created

    def patch(self, path: str, **change: Any) -> Manifest:
        patched: Manifest = self.send("PATCH", path, json=change, headers=MERGE)
        return patched

    def everything(self) -> Sequence[tuple[str, Manifest]]:
        """Kind and content of each object of the namespace, but not of events."""
        versions = [self.send("GET", "/api")["versions"][0]]
        groups = self.send("GET", "/apis")["groups"]
        versions += [group["preferredVersion"]["groupVersion"] for group in groups]
        return [
            (resource["kind"], item)
            for version in versions
            for resource in self.resources(version)
            if resource["namespaced"]
            and {"list", "delete"} <= {*resource["verbs"]}
            and resource["kind"] != "Event"
            for item in self.objects(resource["kind"], version)
        ]

    def validate(self, manifest: Manifest) -> Sequence[str]:
        """Send the object without storing it, and return the server's warnings.

        Raises:
            Refused: it is invalid, or has a field that the server does not know.
        """
        parameters = {
            "dryRun": "All",
            "fieldManager": "regraft-test",
            "fieldValidation": "Strict",
            "force": "true",
        }
        path = self.path_of(manifest)
        response = self.client.patch(path, content=json.dumps(manifest), params=parameters, headers=APPLY)
        if response.is_error:
            raise Refused(f"{path}: {response.status_code}: {response.json()['message']}")
        return response.headers.get_list("Warning")

    # Waits.

    def wait(self, path: str, is_done: Callable[[list[Manifest]], bool], labels: str = "") -> list[Manifest]:
        """The objects of a collection once they satisfy the condition.

        Raises:
            TimeoutError: they did not in time. The message has their last state.
        """
        deadline = time.monotonic() + SECONDS
        objects: dict[str, Manifest] = {}
        while True:
            listed = self.send("GET", path, params={"labelSelector": labels})
            objects = {item["metadata"]["uid"]: item for item in listed["items"]}
            if is_done(list(objects.values())):
                return list(objects.values())
            for kind, changed in self.watch(
                path, listed["metadata"]["resourceVersion"], deadline - time.monotonic(), labels
            ):
                if kind == "DELETED":
                    objects.pop(changed["metadata"]["uid"], None)
                else:
                    objects[changed["metadata"]["uid"]] = changed
                if is_done(list(objects.values())):
                    return list(objects.values())
            if time.monotonic() >= deadline:
                state = json.dumps([_summary(item) for item in objects.values()], indent=1)
                raise TimeoutError(f"{path} after {SECONDS:.0f} s: {state}")

    def watch(
        self, path: str, version: str, seconds: float, labels: str = ""
    ) -> Iterator[tuple[str, Manifest]]:
        """Each change after this version, for so many seconds or until the server has no more of its history."""
        whole = max(1, int(seconds))
        parameters = {
            "watch": "1",
            "resourceVersion": version,
            "timeoutSeconds": str(whole),
            "labelSelector": labels,
        }
        with self.client.stream("GET", path, params=parameters, timeout=whole + 30) as lines:
            for line in lines.iter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                yield event["type"], event["object"]


def _summary(item: Manifest) -> Manifest:
    meta = item["metadata"]
    return {
        "name": meta["name"],
        "deleted": meta.get("deletionTimestamp"),
        "generation": meta.get("generation"),
        "status": item.get("status"),
    }


@contextmanager
def namespace(client: httpx.Client) -> Iterator[Cluster]:
    """A new namespace, deleted in the end. The server warns of pods in it that the restricted standard refuses."""
    name = f"regraft-test-{uuid.uuid4().hex[:8]}"
    labels = {"pod-security.kubernetes.io/warn": "restricted"}
    cluster = Cluster(client, name)
    cluster.send("POST", "/api/v1/namespaces", json={"metadata": {"name": name, "labels": labels}})
    try:
        yield cluster
    finally:
        cluster.send("DELETE", f"/api/v1/namespaces/{name}")


def delete_definitions(cluster: Cluster) -> None:
    """Delete the definitions that tests have added, and with them all objects of their kinds in the cluster.

    Those whose spec was changed since stay: someone has installed the software that brings the kind.
    """
    [(label, value)] = OURS.items()
    api_version, kind = DEFINITIONS
    for item in cluster.objects(kind, api_version, f"{label}={value}"):
        metadata = item["metadata"]
        # The server counts the changes of a spec.
        if metadata["generation"] == 1 and "deletionTimestamp" not in metadata:
            same = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
            path = f"{cluster.collection(api_version, kind)}/{metadata['name']}"
            cluster.send("DELETE", path, json={"preconditions": same})


def has_controllers(cluster: Cluster) -> bool:
    """Whether a controller manager looks after a new namespace: it creates an account there."""
    try:
        cluster.wait(cluster.collection("v1", "ServiceAccount"), bool)
    except TimeoutError:
        return False
    return True
