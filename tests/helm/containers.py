"""A kubelet that starts containers: the images of `make images`, with the rights that the chart gives its pods."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.helm.charts import Pod
from tests.helm.kubelet import Kubelet


@dataclass
class Containers(Kubelet):
    """Containers share the network of this machine, where the tests start database, broker and store."""

    engine: str = "podman"  # or docker, which takes the same options

    def start(self, pod: Pod) -> "subprocess.Popen[bytes]":
        self.remove(pod)
        return super().start(pod)

    def command(self, pod: Pod) -> list[str]:
        container = pod.containers[0]
        options = [*self._rights(pod), *self._volumes(pod)]
        for name, value in self.variables(pod).items():
            options += ["--env", f"{name}={value}"]
        program, *arguments = self.words(pod)
        run = [self.engine, "run", "--rm", "--pull", "never", "--network", "host", "--name", self.name(pod)]
        return [*run, *options, "--entrypoint", program, container["image"], *arguments]

    def environment(self, pod: Pod) -> dict[str, str]:
        """That of the engine's client. Only `--env` reaches the container."""
        return dict(os.environ)

    def executing(self, pod: Pod, words: list[str]) -> list[str]:
        return [self.engine, "exec", self.name(pod), *words]

    def here(self, pod: Pod, text: str) -> str:
        """Folders are those of the container, so only addresses change."""
        return self.addressed(text)

    def name(self, pod: Pod) -> str:
        return f"regraft-test-{os.getpid()}-{pod.component}"

    def stop(self, pod: Pod) -> None:
        """Send SIGTERM to the command, as Kubernetes does."""
        subprocess.run(
            [self.engine, "kill", "--signal", "TERM", self.name(pod)], check=True, capture_output=True
        )

    def remove(self, pod: Pod) -> None:
        subprocess.run([self.engine, "rm", "--force", self.name(pod)], capture_output=True)

    def _rights(self, pod: Pod) -> list[str]:
        security, own = pod.spec["securityContext"], pod.containers[0]["securityContext"]
        options = ["--user", f"{security['runAsUser']}:{security['runAsGroup']}"]
        for capability in own["capabilities"]["drop"]:
            options += ["--cap-drop", capability]
        if own["readOnlyRootFilesystem"]:
            options += ["--read-only"]
        if not own["allowPrivilegeEscalation"]:
            options += ["--security-opt", "no-new-privileges"]
        return options

    def _volumes(self, pod: Pod) -> list[str]:
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        return [
            word
            for mount in pod.containers[0]["volumeMounts"]
            for word in self._volume(pod, mount, volumes[mount["name"]])
        ]

    def _volume(self, pod: Pod, mount: Mapping[str, Any], volume: Mapping[str, Any]) -> list[str]:
        folder = self.folder_of(pod, mount)
        if "emptyDir" in volume:
            folder.chmod(0o777)  # Kubernetes gives it to the pod's group
            return ["--volume", f"{folder}:{mount['mountPath']}"]
        return ["--volume", f"{folder}:{mount['mountPath']}:ro"]
