"""The chart as Helm renders it, and the ways through what comes out."""

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hardware import written

helm = pytest.importorskip(
    "helm_python", reason="helm-python-sdk brings Helm; it has no wheel for this platform"
)

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm/regraft"
NOTES = "regraft/templates/NOTES.txt"

Manifest = dict[str, Any]
WORKLOADS = ("Deployment", "StatefulSet", "Job", "ScaledJob", "Pod")


def merged(below: Any, above: Any) -> Any:
    """As Helm merges values: maps by key, all else replaced."""
    if isinstance(below, dict) and isinstance(above, dict):
        return below | {key: merged(below.get(key), value) for key, value in above.items()}
    return above


def profile(name: str, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = merged(yaml.safe_load((CHART / f"values-{name}.yaml").read_text()), changes)
    return values


POOL = {
    "name": "a100",
    "gpus": 1,
    "gpuClass": "a100",
    "gpuResource": "nvidia.com/mig-3g.40gb",
    "mode": "warm",
    "replicas": 3,
    "resources": {"requests": {"cpu": 4, "memory": "32Gi"}, "limits": {"cpu": 8, "memory": "48Gi"}},
    "scratch": "50Gi",
    "shm": "8Gi",
    "priorityClassName": "training",
    "runtimeClassName": "nvidia",
    "kueueQueue": "research",
    "kueuePriorityClass": "batch",
}
JOBS = {name: value for name, value in POOL.items() if name != "replicas"} | {"mode": "job", "maxReplicas": 3}
GROUP = JOBS | {"name": "group", "gpus": 8, "gpuClass": "group", "gpuResource": "nvidia.com/gpu", "nodes": 3}
ANYWHERE_PUBLIC = {
    "to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8"]}}],
    "ports": [{"port": 443}],
}

# What people run, and every branch of the templates at least once.
FLEET = {
    "name": "small",
    "model": "Qwen3-4B",
    "gpus": 1,
    "replicas": 3,
    "resources": {"requests": {"cpu": "1", "memory": "8Gi"}, "limits": {"cpu": "4", "memory": "16Gi"}},
}
SERVER = {
    "name": "large",
    "model": "Qwen3-14B",
    "gpus": 2,
    "tensorParallel": 2,
    "resources": FLEET["resources"],
}
ONE_GPU = {"gpus": 1, "tensorParallel": 1}
SCALED = {"minReplicas": 1, "maxReplicas": 4}


def scaled(entry: dict[str, Any], **changes: int) -> dict[str, Any]:
    """A fleet, or a server of one model, with autoscaling."""
    return {name: value for name, value in entry.items() if name != "replicas"} | {
        "autoscaling": SCALED | changes
    }


VARIATIONS: dict[str, dict[str, Any]] = {
    "demo": profile("cpu-demo"),
    "production": profile("production"),
    "demo without policies": profile("cpu-demo", networkPolicy={"enabled": False}),
    "demo database, own bucket": profile(
        "cpu-demo",
        bundled={"seaweedfs": {"enabled": False}},
        objectStore={"bucket": "mine", "prefix": "", "endpointUrl": "https://s3.example.com:9000"},
        networkPolicy={"objectStore": {"to": [{"ipBlock": {"cidr": "10.1.2.3/32"}}], "port": 9000}},
    ),
    "own database, demo bucket": profile(
        "production", bundled={"seaweedfs": {"enabled": True}, "valkey": {"enabled": True}}
    ),
    "a role instead of keys": profile(
        "production",
        objectStore={"existingSecret": ""},
        worker={"serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/w"}}},
        api={"serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/a"}}},
    ),
    "gateway": profile(
        "production",
        ingress={"enabled": False},
        gateway={
            "enabled": True,
            "parentRefs": [{"name": "public", "namespace": "gateways"}],
            "hostnames": ["regraft.example.com"],
        },
    ),
    "every corner": profile(
        "production",
        image={"tag": "1.2.3", "pullSecrets": ["registry"]},
        workers=[POOL, *profile("production")["workers"]],
        models={"Qwen3-14B": {"sampler": "vllm"}},
        cache={"existingClaim": "cache"},
        extraEnv={"HF_HUB_OFFLINE": "1", "AWS_CA_BUNDLE": "/etc/our-ca/ca.crt"},
        extraVolumes=[
            {"name": "ca", "configMap": {"name": "our-ca"}},
            {"name": "more", "secret": {"secretName": "more", "items": [{"key": "a", "path": "a"}]}},
        ],
        extraVolumeMounts=[
            {"name": "ca", "mountPath": "/etc/our-ca", "readOnly": True},
            {"name": "more", "mountPath": "/etc/more/a", "subPath": "a"},
        ],
        graders={
            "judges": {
                "big": {
                    "baseUrl": "https://judge.example.com/v1",
                    "apiKeyEnv": "JUDGE_KEY",
                    "servedAs": "j-70b",
                },
                "small": {
                    "model": "Qwen3-4B",
                    "explains": False,
                    "maxConcurrency": 4,
                    "requestsPerSecond": 2,
                    "timeoutSeconds": 30.5,
                },
            },
            "endpointHosts": ["*.graders.example.com", "graders.internal"],
            "endpointPrivateHosts": ["graders.internal"],
            "existingSecret": "judge-keys",
        },
        inference={"enabled": False, "url": "http://inference:8000/v1", "existingSecret": "inference"},
        weights={"hubSecret": "hub"},
        api={
            "nodeSelector": {"pool": "web"},
            "tolerations": [{"key": "web", "operator": "Exists"}],
            "service": {"type": "LoadBalancer"},
        },
        networkPolicy={"workerEgress": [ANYWHERE_PUBLIC]},
    ),
    "watched": profile(
        "production",
        metrics={
            "enabled": True,
            "port": 9200,
            "labels": {"release": "prometheus"},
            "monitors": {"enabled": True, "interval": "15s"},
            "rules": {"enabled": True},
            "dashboard": {"enabled": True},
        },
    ),
    "groups": profile(
        "production",
        workers=[
            GROUP,
            JOBS | {"name": "pair", "gpus": 0, "gpuClass": "pair", "nodes": 2},
            POOL,
        ],
        models={"Qwen3-4B": {"gpuClass": "a100"}, "Qwen3-14B": {"gpuClass": "group"}},
        metrics={"enabled": True},
    ),
    "dispatched": profile(
        "production",
        dispatcher={"enabled": True},
        networkPolicy={"kubernetesApi": {"to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}], "port": 6443}},
        metrics={"enabled": True, "monitors": {"enabled": True}},
    ),
    "fleets": profile(
        "production",
        models={"Qwen3-14B": {"tensorParallel": 2, "toolParser": "hermes"}},
        samplers={
            "existingSecret": "samplers",
            "fleets": [FLEET, FLEET | {"name": "large", "model": "Qwen3-14B", "gpus": 2, "kvCacheGiB": 20}],
        },
        inference={"models": [SERVER]},
        metrics={"enabled": True, "monitors": {"enabled": True}},
    ),
    "scaled": profile(
        "production",
        samplers={"existingSecret": "samplers", "fleets": [scaled(FLEET)]},
        inference={
            "enabled": False,
            "models": [scaled(SERVER) | {"cache": {"existingClaim": "weights-14b"}, "surge": 1}],
        },
        metrics={"enabled": True, "port": 9200},
    ),
    "demo by kubectl": profile(
        "cpu-demo", migrate={"hooks": "none"}, bundled={"existingSecret": "demo-passwords"}
    ),
    "names": profile(
        "production",
        migrate={"hooks": "argocd"},
        models={"Qwen3-8B": {"hub": "Qwen/Qwen3-8B", "gpuClass": "h100"}},
        graders={
            "judges": {
                "outside": {"baseUrl": "https://judge.example.com/v1"},
                "beside": {"baseUrl": "http://judge.models.svc.cluster.local:8000/v1"},
            },
            "endpointHosts": ["*.graders.example.com"],
        },
        networkPolicy={
            "cilium": {"enabled": True, "workerNames": ["hooks.example.com", "*.hooks.example.com:8443"]},
            "objectStore": {"to": []},
            "workerEgress": [],
            "apiEgress": [],
        },
    ),
    "measured": profile("cpu-demo", metrics={"enabled": True}),
}


def job_of(scaled: Manifest) -> Manifest:
    """A Job as KEDA makes it."""
    name = f"{scaled['metadata']['name']}-x7k2p"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": scaled["metadata"]["labels"]},
        "spec": scaled["spec"]["jobTargetRef"],
    }


# libyaml's takes a tenth of the time, and each test reads the manifests anew, because it may change them.
YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@functools.cache
def _rendered(values: str, name: str) -> tuple[str, ...]:
    chart = helm.Chart.load(CHART)
    checked = json.loads(values)
    chart.validate_schema(checked)  # as `helm install` does, and `render` alone does not
    files = chart.render(checked, name=name, namespace="training")
    return tuple(text for file, text in files.items() if file.endswith(".yaml"))


def render(values: Mapping[str, Any], name: str = "regraft") -> list[Manifest]:
    """Every manifest. Raises helm.HelmError for values that are refused."""
    return parsed(_rendered(json.dumps(values), name))


def notes(values: dict[str, Any]) -> str:
    """What `helm install` prints."""
    text: str = helm.Chart.load(CHART).render(values, name="regraft", namespace="training")[NOTES]
    return text


def parsed(texts: Iterable[str]) -> list[Manifest]:
    return [one for text in texts for one in yaml.load_all(text, YAML) if one]


@dataclass(frozen=True)
class Pod:
    """A workload and what it starts."""

    owner: Manifest
    template: Manifest

    @property
    def name(self) -> str:
        return f"{self.owner['kind']}/{self.owner['metadata']['name']}"

    @property
    def spec(self) -> Manifest:
        spec: Manifest = self.template["spec"]
        return spec

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.template["metadata"]["labels"]
        return labels

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def containers(self) -> list[Manifest]:
        """Those that run, then those of its start."""
        containers: list[Manifest] = self.spec["containers"] + self.spec.get("initContainers", [])
        return containers


def environment(pod: Pod) -> dict[str, Any]:
    """The variables of a pod's first container; None for those that Kubernetes fills in."""
    return {variable["name"]: variable.get("value") for variable in pod.containers[0]["env"]}


def config_of(manifests: list[Manifest], name: str) -> str:
    """A file of the ConfigMap that the pods mount."""
    [config] = [one for one in of_kind(manifests, "ConfigMap") if name in one["data"]]
    text: str = config["data"][name]
    return text


def hardware_file_of(manifests: list[Manifest], folder: Path) -> Path:
    """The hardware file of the pods, at another place."""
    return written(folder, config_of(manifests, "hardware.toml"))


def pods(manifests: list[Manifest], component: str | None = None) -> list[Pod]:
    found = [Pod(one, template(one)) for one in manifests if one["kind"] in WORKLOADS]
    return [pod for pod in found if component in (None, pod.component)]


def template(workload: Manifest) -> Manifest:
    if workload["kind"] == "Pod":
        return workload
    spec = workload["spec"]
    pod: Manifest = (spec["jobTargetRef"] if workload["kind"] == "ScaledJob" else spec)["template"]
    return pod


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [one for one in manifests if one["kind"] == kind]


def strings(value: Any) -> Iterator[str]:
    """Every text in a manifest."""
    if isinstance(value, dict):
        for one in value.values():
            yield from strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from strings(one)
    elif isinstance(value, str):
        yield value
