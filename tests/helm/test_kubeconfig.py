"""The kubeconfigs with which the tests reach a cluster, and what they delete there."""

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.certificates import self_signed
from tests.helm.charts import Manifest
from tests.helm.cluster import OURS, Cluster, UnusableKubeconfig, connect, delete_definitions


def kubeconfig(folder: Path, user: dict[str, Any], **cluster: Any) -> Path:
    """Of a context beside another one, as `kind` writes it."""
    server = {"server": "https://127.0.0.1:6443"} | cluster
    file = folder / "config"
    content = {
        "clusters": [{"name": "other", "cluster": {}}, {"name": "kind", "cluster": server}],
        "users": [{"name": "other", "user": {}}, {"name": "admin", "user": user}],
        "contexts": [
            {"name": "other", "context": {"cluster": "other", "user": "other"}},
            {"name": "mine", "context": {"cluster": "kind", "user": "admin"}},
        ],
        "current-context": "mine",
    }
    file.write_text(yaml.safe_dump(content))
    return file


def test_a_user_may_have_a_token(tmp_path: Path) -> None:
    with connect(kubeconfig(tmp_path, {"token": "a-token"})) as client:
        assert client.headers["Authorization"] == "Bearer a-token"
        assert str(client.base_url).rstrip("/") == "https://127.0.0.1:6443"


def test_a_user_may_have_a_client_certificate_in_the_file_or_beside_it(tmp_path: Path) -> None:
    pem = self_signed(tmp_path / "both.pem", "localhost")
    data = base64.b64encode(pem.read_bytes()).decode()
    inside = {"client-certificate-data": data, "client-key-data": data}
    beside = {"client-certificate": "both.pem", "client-key": "both.pem"}

    for user in (inside, beside):
        with connect(kubeconfig(tmp_path, user, **{"certificate-authority-data": data})) as client:
            assert "Authorization" not in client.headers


def test_a_user_of_a_plugin_is_refused_with_the_remedy(tmp_path: Path) -> None:
    plugin = {"exec": {"command": "gke-gcloud-auth-plugin"}}

    with pytest.raises(UnusableKubeconfig, match="kubectl create token"):
        connect(kubeconfig(tmp_path, plugin))


class Definitions:
    """As much of an API server as has definitions of kinds."""

    def __init__(self, items: list[Manifest]) -> None:
        self.items = items
        self.deleted: list[tuple[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "DELETE":
            self.deleted.append((request.url.path.rpartition("/")[2], json.loads(request.content)))
            return httpx.Response(200, json={})
        if request.url.path.endswith("/customresourcedefinitions"):
            selector = request.url.params["labelSelector"]
            found = [item for item in self.items if selector in labels_of(item)]
            return httpx.Response(200, json={"items": found})
        kind = {"kind": "CustomResourceDefinition", "name": "customresourcedefinitions", "namespaced": False}
        return httpx.Response(200, json={"resources": [kind]})


def labels_of(item: Manifest) -> set[str]:
    return {f"{label}={value}" for label, value in item["metadata"]["labels"].items()}


def added(name: str, **metadata: Any) -> Manifest:
    own = {"name": name, "uid": f"uid-{name}", "resourceVersion": "7", "generation": 1, "labels": OURS}
    return {"metadata": own | metadata}


def test_the_tests_delete_only_definitions_that_they_added_and_nobody_changed() -> None:
    server = Definitions(
        [
            added("unchanged"),
            added("of-an-installation", labels={"app": "keda"}),
            added("installed-since", generation=2),
            added("being-deleted", deletionTimestamp="2026-01-01T00:00:00Z"),
        ]
    )
    with httpx.Client(transport=httpx.MockTransport(server), base_url="https://cluster") as client:
        delete_definitions(Cluster(client, "tests"))

    same = {"uid": "uid-unchanged", "resourceVersion": "7"}
    assert server.deleted == [("unchanged", {"preconditions": same})]
