"""As much of the Kubernetes API as the dispatcher meets: TLS, tokens, RBAC by the rendered Role, Jobs, and Kueue.

A real HTTP server. It validates each Job by Kubernetes' schemas, and remembers which rights were used.
"""

import json
import re
import ssl
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.certificates import self_signed
from tests.helm.charts import Manifest, of_kind

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="it brings Kubernetes' schemas")

PATH = re.compile(r"/apis/([^/]+)/([^/]+)/namespaces/([^/]+)/([a-z]+)(?:/([^/]+))?")
VERBS = {
    ("GET", False): "list",
    ("GET", True): "get",
    ("POST", False): "create",
    ("DELETE", True): "delete",
    ("DELETE", False): "deletecollection",
    ("PUT", True): "update",
    ("PATCH", True): "patch",
}
NAMESPACE = "training"  # of the rendered release
Right = tuple[str, str, str]  # group, resource, verb


class ApiServer:
    """Args:
    manifests: with the Role and the RoleBinding.
    folder: for the certificate, and what a pod has of its ServiceAccount.
    """

    def __init__(self, manifests: list[Manifest], folder: Path) -> None:
        self.manifests = manifests
        self.account = folder / "serviceaccount"
        self.account.mkdir()
        self.objects: dict[str, Manifest] = {}
        self.used: set[Right] = set()
        self.lists = 0  # requests for one
        self.created: list[str] = []
        self.quota = 100  # of Jobs
        self.refused_queue = ""  # Jobs in it are refused
        self.loses_next_answer_to = ""  # a verb
        self.lists_nothing = False
        self.port = 0
        certificate = self_signed(folder / "api.pem", "localhost")
        (self.account / "ca.crt").write_bytes(certificate.read_bytes())
        (self.account / "namespace").write_text(NAMESPACE)
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(certificate)
        self.rotate_token()

    @property
    def address(self) -> str:
        return f"https://localhost:{self.port}"

    def rotate_token(self) -> None:
        """As kubelet does; the earlier token is not valid any more."""
        self.token = uuid.uuid4().hex
        (self.account / "token").write_text(self.token)

    @property
    def granted(self) -> set[Right]:
        """The rights of the account of the pod with a token."""
        [binding] = of_kind(self.manifests, "RoleBinding")
        [role] = of_kind(self.manifests, "Role")
        [deployment] = [
            one
            for one in of_kind(self.manifests, "Deployment")
            if one["spec"]["template"]["spec"]["automountServiceAccountToken"]
        ]
        account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}]
        return {
            (group, resource, verb)
            for rule in role["rules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }

    # The rest of the cluster.

    def admit(self, name: str) -> None:
        """Kueue has quota for it."""
        self.objects[name]["spec"]["suspend"] = False

    def preempt(self, name: str) -> None:
        """Kueue takes the quota back: the controller sends SIGTERM to the pods."""
        self.objects[name]["spec"]["suspend"] = True

    def end(self, name: str, kind: str = "Complete") -> None:
        at = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        condition = {"type": kind, "status": "True", "lastTransitionTime": at}
        self.objects[name]["status"] = {"conditions": [condition]}

    # Requests. Each returns a status and a body.

    def answer(self, method: str, target: str, token: str, body: Any) -> tuple[int, Any]:
        url = urlsplit(target)
        if (found := PATH.fullmatch(url.path)) is None:
            return _status(404, "the server could not find the requested resource")
        group, _, namespace, resource, name = found.groups()
        if token != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        verb = VERBS[(method, name is not None)]
        right = (group, resource, verb)
        if right not in self.granted or namespace != NAMESPACE:
            return _status(403, f'{resource} is forbidden: cannot {verb} resource in API group "{group}"')
        self.used.add(right)
        if verb == "list":
            return self._list(resource, parse_qs(url.query).get("labelSelector", [""])[0])
        return self._create(body) if verb == "create" else self._delete(name, body)

    def _list(self, resource: str, selector: str) -> tuple[int, Any]:
        self.lists += 1
        wanted = dict(part.split("=") for part in selector.split(","))
        items = [
            one
            for one in self.objects.values()
            if f"{one['kind'].lower()}s" == resource and wanted.items() <= one["metadata"]["labels"].items()
        ]
        return 200, {"items": [] if self.lists_nothing else items}

    def _create(self, sent: Manifest) -> tuple[int, Any]:
        name = sent["metadata"]["name"]
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name):
            return _status(422, f"{name} is no DNS label")
        if sent["kind"] == "Job":
            try:
                kubernetes_validate.validate(sent, "1.37.0", strict=True)
            except kubernetes_validate.ValidationError as invalid:
                return _status(422, str(invalid))
        if name in self.objects:
            return _status(409, f'jobs.batch "{name}" already exists')
        if len(self.objects) >= self.quota or self.refused_queue in sent["metadata"]["labels"].values():
            return _status(403, f'jobs.batch "{name}" is forbidden: exceeded quota')
        self.created.append(name)
        self.objects[name] = sent
        sent["metadata"]["uid"] = str(uuid.uuid4())
        return 201, sent

    def _delete(self, name: str, options: Any) -> tuple[int, Any]:
        assert options["propagationPolicy"] == "Background", "the default leaves the pods behind"
        if name not in self.objects:
            return _status(404, f'jobs.batch "{name}" not found')
        if self.objects[name]["metadata"]["uid"] != options["preconditions"]["uid"]:
            return _status(409, "the UID in the precondition does not match")
        return 200, self.objects.pop(name)


def _status(code: int, message: str) -> tuple[int, Any]:
    return code, {"kind": "Status", "apiVersion": "v1", "code": code, "message": message}


@contextmanager
def serving(server: ApiServer) -> Iterator[ApiServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.loads(content) if content else None
            token = self.headers.get("Authorization", "")
            status, answer = server.answer(self.command, self.path, token, body)
            if server.loses_next_answer_to == self.command:
                server.loses_next_answer_to = ""
                self.close_connection = True
                return
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_DELETE = do_PUT = do_PATCH = answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.socket = server.tls.wrap_socket(http.socket, server_side=True)
    server.port = http.server_address[1]
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
