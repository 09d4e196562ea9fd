"""As much of a kubelet as it takes to run a rendered pod's container as a process of this machine.

Volumes are folders, Secrets and ConfigMaps are given, and the addresses of Services lead to this machine's ports.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.helm.charts import ROOT, Pod


@dataclass
class Kubelet:
    folder: Path
    secrets: Mapping[str, Mapping[str, str]]
    files: Mapping[str, str]  # the ConfigMap
    ports: Mapping[str, int]  # by component: those of this machine are shared, so they differ from the pods'
    addresses: Mapping[str, str] = field(default_factory=dict)  # host:port of a Service -> where that is here
    more: Mapping[str, str] = field(default_factory=dict)  # by component: arguments about yet other ports
    bin: Path = Path(sys.executable).parent  # what the images have on their path
    fields: Mapping[str, str] = field(default_factory=dict)  # of the pod, by their paths

    def start(self, pod: Pod) -> "subprocess.Popen[bytes]":
        (self.folder / pod.component / "tmp").mkdir(parents=True, exist_ok=True)
        self._fill(pod)
        with (self.folder / f"{pod.component}.log").open("w") as log:
            return subprocess.Popen(
                self.command(pod), env=self.environment(pod), cwd=self.folder, stdout=log, stderr=log
            )

    def command(self, pod: Pod) -> list[str]:
        """What starts the pod's container here."""
        return self.words(pod)

    def words(self, pod: Pod) -> list[str]:
        """The command of the pod's container, with the ports and folders of this machine."""
        container = pod.containers[0]
        words = [self.here(pod, word) for word in (*container["command"], *container.get("args", ()))]
        for port in container.get("ports", ()):
            if port["name"] in ("http", "server"):
                theirs, ours = str(port["containerPort"]), str(self.ports[pod.component])
                words = [re.sub(rf"\b{theirs}$", ours, word) for word in words]
        more = self.more.get(pod.component, "")
        return [*words[:-1], f"{words[-1]} {more}"] if words[:2] == ["sh", "-c"] else [*words, *more.split()]

    def environment(self, pod: Pod) -> dict[str, str]:
        """Only what the pod's image would have of its own, and what the manifest says."""
        image = {"PATH": f"{self.bin}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        return image | self.variables(pod)

    def variables(self, pod: Pod) -> dict[str, str]:
        """What the manifest says, with the addresses and folders of this machine."""
        given: dict[str, str] = {}
        for one in pod.containers[0].get("env", ()):
            if self._is_absent(one):
                continue
            value = re.sub(r"\$\((\w+)\)", lambda found: given[found[1]], self._value(pod, one))
            given[one["name"]] = self.addressed(value)
        own = {"REGRAFT_PORT": str(self.ports["api"])} if "REGRAFT_PORT" in given else {}
        return given | own

    def _is_absent(self, variable: Any) -> bool:
        """Whether the variable is from an optional entry of a Secret that has none of this name."""
        reference = variable.get("valueFrom", {}).get("secretKeyRef", {})
        return bool(reference.get("optional")) and reference["key"] not in self.secrets[reference["name"]]

    def _value(self, pod: Pod, variable: Any) -> str:
        if "value" in variable:
            return self.here(pod, variable["value"])
        if "fieldRef" in variable["valueFrom"]:
            fields = {"status.podIP": "127.0.0.1", **self.fields}
            return fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        reference = variable["valueFrom"]["secretKeyRef"]
        return self.addressed(self.secrets[reference["name"]][reference["key"]])

    def addressed(self, text: str) -> str:
        for theirs, ours in self.addresses.items():
            text = text.replace(theirs, ours)
        return text

    def here(self, pod: Pod, text: str) -> str:
        """With this machine's folders and addresses in the place of the pod's and the Services'."""
        mounts = sorted((one["mountPath"] for one in pod.containers[0]["volumeMounts"]), key=len)
        paths = "|".join(re.escape(mount) for mount in reversed(mounts))  # the longest first
        folder = self.folder / pod.component
        return re.sub(
            rf"(?<![\w./])({paths})(?=[/\s\"']|$)", lambda found: f"{folder}{found[1]}", self.addressed(text)
        )

    def folder_of(self, pod: Pod, mount: Mapping[str, Any]) -> Path:
        """The folder of this machine that stands for a mounted volume."""
        return Path(f"{self.folder / pod.component}{mount['mountPath']}")

    def _fill(self, pod: Pod) -> None:
        """Make the folders that stand for volumes, with the files of those that have some."""
        volumes = {one["name"]: one for one in pod.spec["volumes"]}
        for mount in pod.containers[0]["volumeMounts"]:
            folder = self.folder_of(pod, mount)
            folder.mkdir(parents=True, exist_ok=True)
            volume = volumes.get(mount["name"], {})
            files = self.files if "configMap" in volume else {}
            if "secret" in volume:
                secret = self.secrets[volume["secret"]["secretName"]]
                files = {item["path"]: secret[item["key"]] for item in volume["secret"]["items"]}
            for name, content in files.items():
                (folder / name).write_text(content)

    def probe(self, pod: Pod, kind: str) -> bool:
        """Whether the probe, done as the manifest says, is content."""
        probe = pod.containers[0][kind]
        if "httpGet" in probe:
            url = f"http://127.0.0.1:{self.ports[pod.component]}{probe['httpGet']['path']}"
            try:
                return httpx.get(url, timeout=5).status_code == 200
            except httpx.TransportError:
                return False
        words = self.executing(pod, [self.here(pod, word) for word in probe["exec"]["command"]])
        return subprocess.run(words, env=self.environment(pod), capture_output=True).returncode == 0

    def executing(self, pod: Pod, words: list[str]) -> list[str]:
        """What runs a command in the pod's container."""
        return words

    def wait_for(self, pod: Pod, kind: str, process: "subprocess.Popen[bytes]") -> None:
        deadline = time.monotonic() + 120
        while not self.probe(pod, kind):
            log = (self.folder / f"{pod.component}.log").read_text()[-3000:]
            assert process.poll() is None and time.monotonic() < deadline, log
            time.sleep(0.1)
