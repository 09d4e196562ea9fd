"""The requests of the dispatcher to the Kubernetes API: list, create and delete of Jobs in its own namespace.

Plain HTTP: the official client is 74 MB of generated code (version 37), too much for three requests.
"""

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

TIMEOUT_SECONDS = 15.0

Manifest = Mapping[str, Any]


class KubernetesUnavailable(Exception):
    """The Kubernetes API did not answer, or refuses this account. Another request would meet the same."""


class ManifestRefused(Exception):
    """The Kubernetes API refuses this object: it is invalid, or beyond a ResourceQuota."""


@dataclass(frozen=True)
class ObjectKind:
    """A kind of object that runs an attempt."""

    name: str
    api_version: str
    plural: str


JOB = ObjectKind("Job", "batch/v1", "jobs")
TRAIN_JOB = ObjectKind("TrainJob", "trainer.kubeflow.org/v1alpha1", "trainjobs")
KINDS = MappingProxyType({kind.name: kind for kind in (JOB, TRAIN_JOB)})


class KubernetesApi:
    """The Kubernetes API, as the ServiceAccount of this pod.

    Args:
        address: URL of the API.
        account: folder with `token`, `ca.crt` and `namespace`. kubelet replaces the token before it expires, so each
            request reads it anew.

    Raises:
        OSError: the folder has no readable certificate or namespace.
    """

    def __init__(self, address: str, account: Path) -> None:
        self.namespace = (account / "namespace").read_text().strip()
        self._token = account / "token"
        tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
        self._client = httpx.Client(
            base_url=address, verify=tls, trust_env=False, follow_redirects=False, timeout=TIMEOUT_SECONDS
        )

    def close(self) -> None:
        self._client.close()

    def list(self, kind: ObjectKind, labels: Mapping[str, str]) -> Sequence[Manifest]:
        """The objects with these labels.

        Raises:
            KubernetesUnavailable: there is no list. An empty one would start every job again.
        """
        selector = ",".join(f"{name}={value}" for name, value in labels.items())
        response = self._send("GET", self._path(kind), params={"labelSelector": selector})
        if response.status_code != 200:
            raise _unavailable(response)
        items: Sequence[Manifest] = response.json()["items"]
        return items

    def create(self, kind: ObjectKind, manifest: Manifest) -> bool:
        """Create the object. Returns False if one of its name exists.

        Raises:
            ManifestRefused: by its content.
            KubernetesUnavailable: it may have been created nevertheless.
        """
        response = self._send("POST", self._path(kind), json=manifest)
        if response.status_code in (200, 201, 202):
            return True
        if response.status_code == 409:
            return False
        # 403: a quota, an admission policy, or the Role. They concern one object only, except the last.
        if response.status_code in (400, 403, 413, 422):
            raise ManifestRefused(_message(response))
        raise _unavailable(response)

    def delete(self, kind: ObjectKind, name: str, uid: str) -> None:
        """Delete the object and its pods, which get SIGTERM. Without effect if it is gone, or another has its name.

        Raises:
            KubernetesUnavailable: it may still exist.
        """
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            # The default of batch/v1 leaves the pods behind.
            "propagationPolicy": "Background",
        }
        response = self._send("DELETE", f"{self._path(kind)}/{name}", json=options)
        if response.status_code not in (200, 202, 404, 409):
            raise _unavailable(response)

    def _path(self, kind: ObjectKind) -> str:
        return f"/apis/{kind.api_version}/namespaces/{self.namespace}/{kind.plural}"

    def _send(self, method: str, path: str, **content: Any) -> httpx.Response:
        try:
            headers = {"Authorization": f"Bearer {self._token.read_text().strip()}"}
            return self._client.request(method, path, headers=headers, **content)
        except (httpx.HTTPError, OSError) as cause:
            raise KubernetesUnavailable(f"the Kubernetes API did not answer: {cause!r}") from cause


def _unavailable(response: httpx.Response) -> KubernetesUnavailable:
    request = f"{response.request.method} {response.request.url.path}"
    return KubernetesUnavailable(f"{request}: status {response.status_code}: {_message(response)}")


def _message(response: httpx.Response) -> str:
    """The message of an object of the kind Status; a proxy before the API may answer with anything."""
    try:
        return str(response.json()["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
