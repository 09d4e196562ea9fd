"""The kubeconfigs with which the tests reach a cluster."""

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.certificates import self_signed
from tests.helm.cluster import UnusableKubeconfig, connect


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
