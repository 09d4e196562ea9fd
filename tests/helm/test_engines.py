"""The Deployments of vLLM's engines, of rollout fleets and of inference: what they serve, and their scalers."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import prometheus_client
import pytest

from core.database.engine import Database
from core.settings import Settings
from tests.helm.charts import (
    FLEET,
    ONE_GPU,
    ROOT,
    SERVER,
    VARIATIONS,
    Manifest,
    environment,
    hardware_file_of,
    helm,
    of_kind,
    pods,
    profile,
    render,
    scaled,
)
from tests.present import present, untyped
from worker.cli import parser
from worker.cli.service import service_collectors


def triggers(manifests: list[Manifest], name: str) -> list[dict[str, str]]:
    [found] = [one for one in of_kind(manifests, "ScaledObject") if one["metadata"]["name"] == name]
    return [trigger["metadata"] for trigger in found["spec"]["triggers"]]


def test_an_entry_is_a_deployment_that_serves_one_model_once_it_is_loaded() -> None:
    [server] = pods(render(VARIATIONS["scaled"]), "inference-large")
    container = server.spec["containers"][0]

    words = parser.build().parse_args(container["command"][1:])
    assert (words.model, words.tensor_parallel, words.port) == ("Qwen3-14B", 2, 8100)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe")} == {
        "/readyz"
    }
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert "REGRAFT_SAMPLERS" not in environment(server), "it answers with its own engine"
    claims = {one["name"]: one.get("persistentVolumeClaim") for one in server.spec["volumes"]}
    assert claims["cache"] == {"claimName": "weights-14b"}
    assert server.owner["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


@pytest.mark.parametrize(
    ("inference", "servers"),
    [
        (
            {"models": [SERVER]},
            {"*": "http://regraft-inference:8100/v1", "Qwen3-14B": "http://regraft-inference-large:8100/v1"},
        ),
        (
            {"enabled": False, "models": [SERVER]},
            {"Qwen3-14B": "http://regraft-inference-large:8100/v1"},
        ),
        (
            {"enabled": False, "url": "http://own:8000/v1", "models": [SERVER]},
            {"*": "http://own:8000/v1", "Qwen3-14B": "http://regraft-inference-large:8100/v1"},
        ),
        (
            {"enabled": False, "url": {"Qwen3-4B": "http://own:8000/v1"}, "models": [SERVER]},
            {"Qwen3-4B": "http://own:8000/v1", "Qwen3-14B": "http://regraft-inference-large:8100/v1"},
        ),
    ],
)  # fmt: skip
def test_the_api_and_workers_know_the_server_of_each_model(
    inference: dict[str, Any], servers: dict[str, str]
) -> None:
    manifests = render(profile("production", inference=inference))
    ports = {
        f"http://{one['metadata']['name']}:{port['port']}/v1"
        for one in of_kind(manifests, "Service")
        for port in one["spec"]["ports"]
    }

    for pod in pods(manifests, "api") + pods(manifests, "worker"):
        assert json.loads(environment(pod)["REGRAFT_INFERENCE_URL"]) == servers
    assert {address for address in servers.values() if "own" not in address} <= ports


def test_a_fleet_and_a_server_may_be_switched_off() -> None:
    off = {"replicas": 0}
    values = profile(
        "production",
        inference={"models": [SERVER | off]},
        samplers={"existingSecret": "samplers", "fleets": [FLEET | off]},
    )
    manifests = render(values)

    for component in ("inference-large", "sampler-small"):
        [pod] = pods(manifests, component)
        assert pod.owner["spec"]["replicas"] == 0


def test_every_metric_of_vllm_that_keda_reads_is_one_of_the_pinned_version() -> None:
    package = importlib.util.find_spec("vllm")
    if package is None:
        pytest.skip("vLLM is not installed")
    source = (Path(present(package.origin)).parent / "v1/metrics/loggers.py").read_text()
    pins = [(ROOT / "constraints" / name).read_text() for name in ("gpu.txt", "vllm.txt")]
    [on_gpus], [on_cpus] = (re.findall(r"^vllm(?:-cpu)?==(.*)$", text, re.M) for text in pins)
    manifests = render(VARIATIONS["scaled"])

    read = {
        metadata["valueLocation"]
        for name in ("regraft-inference-large", "regraft-sampler-small")
        for metadata in triggers(manifests, name)
        if metadata["valueLocation"].startswith("vllm:")
    }

    assert read == {"vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}
    assert all(f'name="{name}",' in source for name in read)
    assert on_gpus == on_cpus, "the source above is that of CPUs"


def test_keda_reads_the_metrics_of_all_pods_and_may_connect_to_them() -> None:
    manifests = render(VARIATIONS["scaled"])
    for component in ("inference-large", "sampler-small"):
        name = f"regraft-{component}"
        [pod] = pods(manifests, component)
        [service] = [one for one in of_kind(manifests, "Service") if one["metadata"]["name"] == name]
        [policy] = [one for one in of_kind(manifests, "NetworkPolicy") if one["metadata"]["name"] == name]
        of_pods = [one for one in triggers(manifests, name) if one["valueLocation"].startswith("vllm:")]

        assert {one["url"] for one in of_pods} == {f"http://{name}.training.svc:9200/metrics"}
        assert all(
            (one["aggregateFromKubeServiceEndpoints"], one["aggregationType"]) == ("true", "sum")
            for one in of_pods
        )
        assert {"name": "metrics", "port": 9200, "targetPort": "metrics"} in service["spec"]["ports"]
        assert {"name": "metrics", "containerPort": 9200} in pod.containers[0]["ports"]
        keda = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}
        assert any(
            keda in rule.get("from", []) and {"port": 9200, "protocol": "TCP"} in rule["ports"]
            for rule in policy["spec"]["ingress"]
        )


def test_a_fleet_is_scaled_by_a_series_of_the_api_that_is_there_before_the_first_job(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    manifests = render(VARIATIONS["scaled"])
    [api] = pods(manifests, "api")
    here = dict.fromkeys(("REGRAFT_INFERENCE_KEY", "REGRAFT_SAMPLERS_KEY"), "key")
    here["REGRAFT_HARDWARE_FILE"] = str(hardware_file_of(manifests, tmp_path))
    for name, value in (environment(api) | here).items():
        if value is not None:
            monkeypatch.setenv(name, value)
    registry = prometheus_client.CollectorRegistry()
    registry.register(untyped(service_collectors(Settings(), sqlite_database)[0]))

    [trigger] = [one for one in triggers(manifests, "regraft-sampler-small") if "api-metrics" in one["url"]]

    text = prometheus_client.generate_latest(registry).decode()
    assert f"{trigger['valueLocation']} 0.0" in text.splitlines()
    assert trigger["url"] == "http://regraft-api-metrics.training.svc:9200/metrics"


def test_a_fleet_may_have_no_pod_if_users_have_another_server() -> None:
    fleets = {"existingSecret": "samplers", "fleets": [scaled(FLEET, minReplicas=0)]}
    given = profile("production", samplers=fleets, metrics={"enabled": True})
    with pytest.raises(helm.HelmRenderError, match=r"small answers requests of users .* has minReplicas 0"):
        render(given)

    own = SERVER | ONE_GPU | {"model": "Qwen3-4B"}
    manifests = render(given | {"inference": given["inference"] | {"models": [own]}})
    [scaler] = of_kind(manifests, "ScaledObject")
    assert scaler["spec"]["minReplicaCount"] == 0
