"""What Helm makes of the chart is what Kubernetes takes, whatever the values."""

import itertools
import json
from typing import Any

import jsonschema
import pytest

from core.settings import Settings
from tests.helm.charts import (
    CHART,
    FLEET,
    JOBS,
    POOL,
    SERVER,
    VARIATIONS,
    Manifest,
    Pod,
    environment,
    helm,
    job_of,
    merged,
    notes,
    of_kind,
    pods,
    profile,
    render,
)

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="it brings Kubernetes' schemas")

OLDEST, NEWEST = "1.29.0", "1.37.0"

# Of resources that are not Kubernetes' own: their fields as far as the chart uses them.
_TRIGGER = {
    "type": "object",
    "required": ["type", "metadata"],
    "additionalProperties": False,
    "properties": {
        "type": {"const": "metrics-api"},
        "metadata": {
            "type": "object",
            "required": ["url", "format", "valueLocation", "targetValue"],
            "additionalProperties": {"type": "string"},
        },
    },
}


def _monitor(endpoints: str) -> dict[str, Any]:
    """Both kinds of monitor differ in this name only."""
    relabeling = {
        "type": "object",
        "additionalProperties": False,
        "properties": {"targetLabel": {"type": "string"}, "replacement": {"type": "string"}},
    }
    endpoint = {
        "type": "object",
        "required": ["port", "interval"],
        "additionalProperties": False,
        "properties": {
            "port": {"type": "string"},
            "interval": {"type": "string"},
            "relabelings": {"type": "array", "items": relabeling},
        },
    }
    return {
        "type": "object",
        "required": ["selector", endpoints],
        "additionalProperties": False,
        "properties": {
            "selector": {"type": "object", "required": ["matchLabels"]},
            "podTargetLabels": {"type": "array", "items": {"type": "string"}},
            endpoints: {"type": "array", "minItems": 1, "items": endpoint},
        },
    }


_CILIUM_PORTS = {
    "type": "object",
    "required": ["ports"],
    "additionalProperties": False,
    "properties": {
        "ports": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["port", "protocol"],
                "additionalProperties": False,
                "properties": {
                    "port": {"type": "string", "pattern": "^[0-9]+$"},
                    "protocol": {"enum": ["TCP", "ANY"]},
                },
            },
        },
        "rules": {"const": {"dns": [{"matchPattern": "*"}]}},
    },
}
# Cilium's API server checks names and patterns by these expressions.
_CILIUM_NAME = {"matchName": {"type": "string", "pattern": "^([-a-zA-Z0-9_]+[.]?)+$"}}
_CILIUM_PATTERN = {"matchPattern": {"type": "string", "pattern": "^([-a-zA-Z0-9_*]+[.]?)+$"}}
_CILIUM_RULE = {
    "type": "object",
    "required": ["toPorts"],
    "additionalProperties": False,
    "properties": {
        "toEndpoints": {"type": "array", "minItems": 1, "items": {"required": ["matchLabels"]}},
        "toEntities": {"const": ["kube-apiserver"]},
        "toFQDNs": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "minProperties": 1,
                "maxProperties": 1,
                "additionalProperties": False,
                "properties": _CILIUM_NAME | _CILIUM_PATTERN,
            },
        },
        "toPorts": {"type": "array", "minItems": 1, "items": _CILIUM_PORTS},
    },
}

CUSTOM = {
    ("keda.sh/v1alpha1", "ScaledJob"): {
        "type": "object",
        "required": ["jobTargetRef", "triggers"],
        "additionalProperties": False,
        "properties": {
            "rollout": {"type": "object", "properties": {"strategy": {"enum": ["default", "gradual"]}}},
            "pollingInterval": {"type": "integer"},
            "maxReplicaCount": {"type": "integer"},
            "successfulJobsHistoryLimit": {"type": "integer"},
            "failedJobsHistoryLimit": {"type": "integer"},
            "scalingStrategy": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "strategy": {"enum": ["default", "custom", "accurate", "eager"]},
                    "pendingPodConditions": {"type": "array", "items": {"type": "string"}},
                },
            },
            "triggers": {"type": "array", "minItems": 1, "items": _TRIGGER},
            "jobTargetRef": {"type": "object"},
        },
    },
    ("keda.sh/v1alpha1", "ScaledObject"): {
        "type": "object",
        "required": ["scaleTargetRef", "triggers"],
        "additionalProperties": False,
        "properties": {
            "scaleTargetRef": {"type": "object", "required": ["name"]},
            "pollingInterval": {"type": "integer"},
            "minReplicaCount": {"type": "integer"},
            "maxReplicaCount": {"type": "integer"},
            "cooldownPeriod": {"type": "integer"},
            "advanced": {"type": "object"},
            "triggers": {"type": "array", "minItems": 1, "items": _TRIGGER},
        },
    },
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _monitor("endpoints"),
    ("monitoring.coreos.com/v1", "PodMonitor"): _monitor("podMetricsEndpoints"),
    ("monitoring.coreos.com/v1", "PrometheusRule"): {
        "type": "object",
        "required": ["groups"],
        "additionalProperties": False,
        "properties": {"groups": {"type": "array", "minItems": 1, "items": {"required": ["name", "rules"]}}},
    },
    ("cilium.io/v2", "CiliumNetworkPolicy"): {
        "type": "object",
        "required": ["endpointSelector", "egress"],
        "additionalProperties": False,
        "properties": {
            "endpointSelector": {"type": "object", "required": ["matchLabels"]},
            "egress": {"type": "array", "minItems": 1, "items": _CILIUM_RULE},
        },
    },
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): {
        "type": "object",
        "required": ["parentRefs", "rules"],
        "additionalProperties": False,
        "properties": {
            "parentRefs": {"type": "array", "minItems": 1},
            "hostnames": {"type": "array", "items": {"type": "string"}},
            "rules": {"type": "array", "minItems": 1},
        },
    },
}


def test_a_rollout_that_waits_for_the_old_pod_and_the_start_of_the_new_one_is_not_called_failed() -> None:
    """Kubernetes counts both, and calls a Deployment failed after 600 s by default."""
    values = merged(VARIATIONS["fleets"], {"settings": {"drain_seconds": 1800}})
    deployments = of_kind(render(values), "Deployment")
    slow = [one for one in deployments if one["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0]

    assert len(slow) == 5  # inference, that of one model, two fleets, the keeper
    for one in slow:
        pod = one["spec"]["template"]["spec"]
        probe = pod["containers"][0]["startupProbe"]
        lasts = pod["terminationGracePeriodSeconds"] + probe["periodSeconds"] * probe["failureThreshold"]
        assert one["spec"]["progressDeadlineSeconds"] >= lasts + 600, one["metadata"]["name"]


def test_every_pod_can_pull_its_image_from_a_registry_with_credentials() -> None:
    for pod in pods(render(profile("cpu-demo", image={"pullSecrets": ["mine"]}))):
        assert pod.spec["imagePullSecrets"] == [{"name": "mine"}], pod.name


def test_keepers_are_on_different_nodes_where_there_are_some() -> None:
    [keeper] = [pod for pod in pods(render(profile("production")), "worker") if pod.name.endswith("-keeper")]

    [spread] = keeper.spec["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert spread["labelSelector"]["matchLabels"].items() <= keeper.labels.items()


@pytest.fixture(params=VARIATIONS)
def manifests(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return render(VARIATIONS[request.param])


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_manifest_is_one_that_kubernetes_takes(version: str) -> None:
    every = [one for values in VARIATIONS.values() for one in render(values)]
    different = {json.dumps(one): one for one in every}.values()  # most are the same in many variations

    assert len(different) > 50
    for manifest in different:
        if schema := CUSTOM.get((manifest["apiVersion"], manifest["kind"])):
            jsonschema.validate(manifest["spec"], schema)
            if manifest["kind"] == "ScaledJob":
                kubernetes_validate.validate(job_of(manifest), NEWEST, strict=True)
        else:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_no_manifest_has_an_empty_list(manifests: list[dict[str, Any]]) -> None:
    """Kubernetes stores none, so Helm 4 would change the object at each upgrade."""
    assert [manifest["metadata"]["name"] for manifest in manifests if has_empty_list(manifest)] == []


def has_empty_list(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(has_empty_list, value.values()))
    return isinstance(value, list) and (not value or any(map(has_empty_list, value)))


def test_a_mistake_in_a_manifest_would_be_seen() -> None:
    [api] = pods(render(profile("cpu-demo")), "api")
    api.owner["spec"]["replicaz"] = 2

    with pytest.raises(kubernetes_validate.ValidationError, match="replicaz"):
        kubernetes_validate.validate(api.owner, NEWEST, strict=True)


@pytest.mark.parametrize("name", ["cpu-demo", "production"])
def test_lint_has_nothing_to_say(name: str) -> None:
    report = helm.lint(CHART, profile(name), strict=True, kube_version=f"v{OLDEST}")

    assert [m for m in report["messages"] if m["severity"] > 1 or "icon" not in m["error"]] == []
    assert report["total_charts_linted"] == 1


def test_the_notes_name_what_an_uninstallation_keeps() -> None:
    claims = " ".join(f"store-regraft-{server}-0" for server in ("postgresql", "seaweedfs", "valkey"))
    jobs = "app.kubernetes.io/instance=regraft,app.kubernetes.io/component=worker"

    demo = notes(VARIATIONS["demo"])
    assert f"kubectl -n training delete pvc {claims}\n" in demo
    assert "kubectl -n training delete secret regraft-bundled" in demo
    assert f"kubectl -n training delete jobs -l {jobs}" in notes(VARIATIONS["dispatched"])
    assert "helm uninstall" not in notes(VARIATIONS["production"])


def test_the_notes_delete_the_objects_of_the_dispatcher_by_the_kinds_of_its_pools() -> None:
    dispatched = VARIATIONS["dispatched"]
    runtime = {"trainingRuntime": {"name": "regraft"}}
    train_jobs = [pool | runtime if pool["gpus"] else pool for pool in dispatched["workers"]]
    both = [*dispatched["workers"], JOBS | {"name": "train", "gpuClass": "train"} | runtime]

    assert "delete trainjobs -l" in notes(dispatched | {"workers": train_jobs})
    assert "delete jobs,trainjobs -l" in notes(dispatched | {"workers": both})


def test_names_are_unique_and_short_enough_for_labels() -> None:
    longest = POOL | {"name": "a-pool-with-20-chars"}
    every = VARIATIONS["every corner"]
    servers = every["inference"] | {"models": [SERVER | {"name": "a-server-of-18-chr"}]}
    values = every | {"workers": [*every["workers"], longest], "inference": servers}
    for name in ("regraft", "a-release-with-a-name-as-long-as-helm-lets-it-be-53ch", "regraft" * 7):
        manifests = render(values, name=name)
        names = [(one["kind"], one["metadata"]["name"]) for one in manifests]

        assert len(names) == len(set(names))
        assert all(len(one) <= 63 for _, one in names)


def test_selectors_find_the_pods_they_mean(manifests: list[dict[str, Any]]) -> None:
    for pod in pods(manifests):
        selector = pod.owner["spec"].get("selector", {}).get("matchLabels", {})
        assert selector.items() <= pod.labels.items()
        assert selector or pod.owner["kind"] in ("Job", "ScaledJob", "Pod")
    for one, other in itertools.permutations(
        [p for p in pods(manifests) if p.owner["kind"] == "Deployment"], 2
    ):
        selector = one.owner["spec"]["selector"]["matchLabels"]
        assert not selector.items() <= other.labels.items(), f"{one.name} would take the pods of {other.name}"
    for service in of_kind(manifests, "Service"):
        targets = [p for p in pods(manifests) if service["spec"]["selector"].items() <= p.labels.items()]
        assert len(targets) == 1
        named = {p["name"] for c in targets[0].spec["containers"] for p in c["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= named


@pytest.mark.parametrize(
    ("live", "account", "replicas"),
    [
        ('(dict "spec" (dict "replicas" 6))', '(dict "kind" "ServiceAccount")', "replicas: 6"),
        ('(dict "spec" (dict "replicas" 1))', '(dict "kind" "ServiceAccount")', "replicas: 1"),
        ('(dict "spec" (dict "replicas" 0))', '(dict "kind" "ServiceAccount")', "replicas: 2"),
        ("dict", '(dict "kind" "ServiceAccount")', "replicas: 2"),
        ("dict", "dict", ""),
    ],
)
def test_an_autoscaled_deployment_keeps_its_replicas_at_an_upgrade_and_begins_with_the_minimum(
    live: str, account: str, replicas: str
) -> None:
    """Helm's `lookup` finds nothing without a cluster, so the helper gets what it would find."""
    call = f'{{{{ include "regraft.scaledReplicas" (dict "live" {live} "account" {account} "least" 2) }}}}'
    shown = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "shown"},
        "data": {"replicas": call},
    }
    manifests = render(profile("production", extraObjects=[shown]))

    [found] = [one for one in of_kind(manifests, "ConfigMap") if one["metadata"]["name"] == "shown"]
    assert found["data"]["replicas"] == replicas


def test_budgets_and_scalers_lead_to_a_deployment(manifests: list[dict[str, Any]]) -> None:
    deployments = {one["metadata"]["name"]: one for one in of_kind(manifests, "Deployment")}
    for scaler in of_kind(manifests, "HorizontalPodAutoscaler") + of_kind(manifests, "ScaledObject"):
        target = deployments[scaler["spec"]["scaleTargetRef"]["name"]]
        assert "replicas" not in target["spec"], "an upgrade would undo what the scaler did"
    for budget in of_kind(manifests, "PodDisruptionBudget"):
        assert budget["spec"]["selector"] == deployments[budget["metadata"]["name"]]["spec"]["selector"]
    budgets = {one["metadata"]["name"] for one in of_kind(manifests, "PodDisruptionBudget")}
    # The dispatcher may be evicted: another one starts within seconds, and nothing ends meanwhile.
    assert budgets == deployments.keys() - {"regraft-dispatcher"}


def test_every_volume_that_is_mounted_is_there(manifests: list[dict[str, Any]]) -> None:
    for pod in pods(manifests):
        claims = [one["metadata"]["name"] for one in pod.owner["spec"].get("volumeClaimTemplates", [])]
        there = {one["name"] for one in pod.spec.get("volumes", [])} | set(claims)
        mounted = {mount["name"] for container in pod.containers for mount in container["volumeMounts"]}
        assert mounted == there


def test_a_file_of_the_operators_is_in_every_pod_of_the_service_and_in_no_other() -> None:
    """Such as the certificate of whoever signs for their database, the migration's included."""
    given = {
        "extraVolumes": [{"name": "ca", "configMap": {"name": "our-ca"}}],
        "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/our-ca", "readOnly": True}],
    }
    has_it = {
        (pod.component, mount["mountPath"])
        for pod in pods(render(profile("cpu-demo", **given)))
        for volume in pod.spec["volumes"]
        if volume.get("configMap", {}).get("name") == "our-ca"
        for mount in pod.containers[0]["volumeMounts"]
        if mount["name"] == volume["name"]
    }

    assert has_it == {(name, "/etc/our-ca") for name in ("api", "worker", "inference", "migrate")}


def test_the_files_that_pods_mount_are_in_the_config_map(manifests: list[dict[str, Any]]) -> None:
    [config] = [one for one in of_kind(manifests, "ConfigMap") if "models.toml" in one["data"]]
    for pod in pods(manifests, "worker") + pods(manifests, "api"):
        [volume] = [one for one in pod.spec["volumes"] if one["name"] == "config"]
        assert volume["configMap"]["name"] == config["metadata"]["name"]
        files = {e["value"] for e in pod.containers[0]["env"] if e["name"].endswith("_FILE")}
        assert files <= {f"/etc/regraft/{name}" for name in config["data"]}


def test_a_worker_with_several_gpus_has_a_rank_on_each() -> None:
    pools = [JOBS | {"name": f"p{gpus}", "gpus": gpus, "gpuClass": f"p{gpus}"} for gpus in (0, 1, 4)]
    workers = pods(
        render(profile("production", workers=[*pools, *profile("production")["workers"]])), "worker"
    )

    ranks = {pod.labels["regraft.dev/pool"]: environment(pod).get("REGRAFT_RANKS") for pod in workers}

    assert {pool: ranks[pool] for pool in ("p0", "p1", "p4")} == {"p0": None, "p1": None, "p4": "4"}


def test_a_pool_with_gpus_starts_a_job_for_each_job_and_ends_none() -> None:
    scaled = {one["metadata"]["labels"]["regraft.dev/pool"]: one["spec"] for one in scaled_jobs("production")}

    assert scaled.keys() == {"h100", "h200"}
    assert {one["metadata"]["name"] for one in of_kind(render(profile("production")), "Deployment")} == {
        "regraft-api",
        "regraft-inference",
        "regraft-worker-keeper",
    }
    for spec in scaled.values():
        job = spec["jobTargetRef"]
        assert spec["rollout"] == {"strategy": "gradual"}
        assert spec["scalingStrategy"] == {"strategy": "accurate", "pendingPodConditions": ["Ready"]}
        assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (1, 1, 0)
        assert job["template"]["spec"]["restartPolicy"] == "Never"
        assert "successPolicy" not in job


def test_kueue_finds_the_queue_and_the_priority_of_a_pool_at_its_jobs_and_its_deployment() -> None:
    pools = [one for one in render(VARIATIONS["groups"]) if "regraft.dev/pool" in one["metadata"]["labels"]]
    found = {
        (one["kind"], labels["kueue.x-k8s.io/queue-name"], labels["kueue.x-k8s.io/priority-class"])
        for one in pools
        if "kueue.x-k8s.io/queue-name" in (labels := one["metadata"]["labels"])
    }

    assert found == {("ScaledJob", "research", "batch"), ("Deployment", "research", "batch")}


def scaled_jobs(variation: str) -> list[dict[str, Any]]:
    return of_kind(render(VARIATIONS[variation]), "ScaledJob")


def test_a_pool_on_several_nodes_is_an_indexed_job_whose_first_pod_has_the_run() -> None:
    manifests = render(VARIATIONS["groups"])
    sets = {one["metadata"]["labels"]["regraft.dev/pool"]: one for one in of_kind(manifests, "ScaledJob")}
    job = sets["group"]["spec"]["jobTargetRef"]
    [pod] = [pod for pod in pods(manifests) if pod.owner is sets["group"]]
    [service] = [one for one in of_kind(manifests, "Service") if one["metadata"]["name"].endswith("-group")]

    assert sets.keys() == {"group", "pair"}
    assert (job["completionMode"], job["parallelism"], job["completions"]) == ("Indexed", 3, 3)
    assert job["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert pod.spec["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    container = pod.containers[0]
    variables = {one["name"]: one for one in container["env"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert variables["REGRAFT_RANKS"]["value"] == "8"
    assert variables["REGRAFT_RENDEZVOUS"]["value"] == "$(JOB_NAME)-0.regraft-worker-group:29400"
    paths = {
        name: variables[name]["valueFrom"]["fieldRef"]["fieldPath"]
        for name in ("JOB_NAME", "REGRAFT_NODE_RANK")
    }
    assert paths == {
        "JOB_NAME": "metadata.labels['batch.kubernetes.io/job-name']",
        "REGRAFT_NODE_RANK": "metadata.labels['batch.kubernetes.io/job-completion-index']",
    }


def test_the_scaler_counts_as_many_jobs_for_a_pod_as_that_runs() -> None:
    pool = JOBS | {"settings": {"jobs_per_worker": 4}}
    manifests = render(profile("production", workers=[pool, *profile("production")["workers"]]))
    [scaled] = [one for one in of_kind(manifests, "ScaledJob") if one["metadata"]["name"].endswith("a100")]
    [pod] = [pod for pod in pods(manifests) if pod.owner is scaled]

    assert scaled["spec"]["triggers"][0]["metadata"]["targetValue"] == "4"
    assert pod.containers[0]["command"][2:4] == ["--jobs", "4"]
    assert scaled["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"


def test_a_gpu_pool_gets_its_gpu_and_the_image_that_can_use_it() -> None:
    workers = {
        pod.labels["regraft.dev/pool"]: pod for pod in pods(render(VARIATIONS["every corner"]), "worker")
    }

    def gpus(pod: Pod) -> dict[str, Any]:
        limits = pod.containers[0]["resources"]["limits"]
        return {name: number for name, number in limits.items() if name.startswith("nvidia.com/")}

    assert gpus(workers["h100"]) == {"nvidia.com/gpu": 1}
    assert gpus(workers["a100"]) == {"nvidia.com/mig-3g.40gb": 1}
    assert gpus(workers["keeper"]) == {}
    assert workers["h100"].containers[0]["image"] == "registry.example.com/regraft/worker-gpu:1.2.3"
    assert workers["keeper"].containers[0]["image"] == "registry.example.com/regraft/worker-cpu:1.2.3"
    assert workers["a100"].owner["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"


@pytest.mark.parametrize(
    ("claim", "volume"),
    [("cache", {"persistentVolumeClaim": {"claimName": "cache"}}), ("", {"emptyDir": {"sizeLimit": "20Gi"}})],
)
def test_compiled_kernels_are_on_the_cache_volume_of_every_pod_that_computes(
    claim: str, volume: dict[str, Any]
) -> None:
    """The pods' group owns the volume, so what one has compiled the next may read and replace."""
    found = set()
    for values in (
        profile("production", cache={"existingClaim": claim}, inference={"gpus": 1}),
        VARIATIONS["groups"] | {"cache": {"existingClaim": claim}},
        VARIATIONS["fleets"] | {"cache": {"existingClaim": claim}},
    ):
        for pod in pods(render(values)):
            if not any("/worker-" in container["image"] for container in pod.containers):
                continue
            container = pod.containers[0]
            found.add(pod.component)
            variables = environment(pod)
            mounts = {one["mountPath"]: one for one in container["volumeMounts"]}
            assert variables["REGRAFT_COMPILE_CACHE"] == "/cache/compiled"
            assert mounts["/cache/compiled"] == {
                "name": "cache",
                "mountPath": "/cache/compiled",
                "subPath": "compiled",
            }
            assert {"name": "cache"} | volume in pod.spec["volumes"]
            assert (pod.spec["securityContext"]["runAsUser"], pod.spec["securityContext"]["fsGroup"]) == (
                10001,
                10001,
            )

    assert {"worker", "inference"} <= found
    assert any(component.startswith("sampler-") for component in found)


def test_the_gpus_of_a_pod_are_checked_before_it_starts() -> None:
    """With the GPUs, folders and rights of the container that starts then, and no credentials."""
    checked, plain = set(), set()
    for values in (profile("production", inference={"gpus": 1}), VARIATIONS["groups"], VARIATIONS["fleets"]):
        for pod in pods(render(values)):
            main, *doctor = pod.containers
            if not doctor:
                plain.add(pod.component)
                assert not main["image"].split(":")[0].endswith("worker-gpu")
                continue
            checked.add(pod.component)
            assert doctor[0]["command"][:3] == ["regraft-server", "doctor", "--only"]
            assert main["image"].split(":")[0].endswith("worker-gpu")
            for field in ("image", "securityContext", "volumeMounts"):
                assert doctor[0][field] == main[field]
            assert doctor[0]["resources"]["limits"] == main["resources"]["limits"]
            assert not [one for one in doctor[0]["env"] if "valueFrom" in one]

    assert {"worker", "inference"} <= checked and "api" in plain
    off = render(profile("production", doctor={"enabled": False}))
    assert not [pod for pod in pods(off, "worker") if "initContainers" in pod.spec]


def test_pods_use_the_service_accounts_that_are_given_and_the_chart_creates_the_others() -> None:
    values = merged(
        VARIATIONS["fleets"],
        {"worker": {"serviceAccount": {"name": "ours"}}, "samplers": {"serviceAccount": {"name": "theirs"}}},
    )
    manifests = render(values)

    accounts = {pod.component: pod.spec["serviceAccountName"] for pod in pods(manifests)}
    assert (accounts["worker"], accounts["sampler-small"]) == ("ours", "theirs")
    created = {one["metadata"]["name"] for one in of_kind(manifests, "ServiceAccount")}
    assert created == {accounts["api"], accounts["inference"]} == {"regraft-api", "regraft-inference"}


def test_a_fleet_may_have_a_cache_and_shared_memory_of_its_own() -> None:
    def rendered(**fleet: Any) -> dict[str, Any]:
        values = profile("production", samplers={"existingSecret": "samplers", "fleets": [FLEET | fleet]})
        values["models"]["Qwen3-4B"] = {"hub": "Qwen/Qwen3-4B", "gpuClass": "h100"}
        [pod] = pods(render(values), "sampler-small")
        return {one["name"]: one for one in pod.spec["volumes"]}

    volumes = rendered(cache={"existingClaim": "weights-4b"}, shm="16Gi")
    assert volumes["cache"]["persistentVolumeClaim"] == {"claimName": "weights-4b"}
    assert volumes["shm"]["emptyDir"]["sizeLimit"] == "16Gi"
    assert rendered()["shm"]["emptyDir"]["sizeLimit"] == "8Gi"
    with pytest.raises(helm.HelmError, match=r"samplers\.fleets: the cache of small, 2Gi, has no room"):
        rendered(cache={"size": "2Gi"})


def test_pools_and_inference_each_have_the_priority_that_they_were_given() -> None:
    values = profile("cpu-demo", workers=[POOL], inference={"priorityClassName": "serving"})

    given = {pod.component: pod.spec.get("priorityClassName") for pod in pods(render(values))}
    assert {name: one for name, one in given.items() if one} == {"worker": "training", "inference": "serving"}


def test_the_migration_comes_before_the_pods_unless_the_database_comes_with_them() -> None:
    def hook(name: str) -> Any:
        [job] = of_kind(render(profile(name)), "Job")
        return job["metadata"]["annotations"]["helm.sh/hook"]

    assert hook("production") == "pre-install,pre-upgrade"
    assert hook("cpu-demo") == "post-install,pre-upgrade"


def without_hooks(name: str, hooks: str = "none", **changes: Any) -> list[Manifest]:
    """A profile as Argo CD or `kubectl apply` gets it."""
    given = {"bundled": {"existingSecret": "demo-passwords"}} if name == "cpu-demo" else {}
    return render(profile(name, migrate={"hooks": hooks}, **given, **changes))


@pytest.mark.parametrize("name", ["production", "cpu-demo"])
@pytest.mark.parametrize("hooks", ["argocd", "none"])
def test_without_helm_each_pod_that_uses_the_database_waits_for_its_schema(name: str, hooks: str) -> None:
    waiting = set()
    for pod in pods(without_hooks(name, hooks, dispatcher={"enabled": False})):
        variables = {one["name"] for one in pod.spec["containers"][0].get("env", [])}
        first = (pod.spec.get("initContainers") or [{"name": ""}])[0]
        if pod.component == "migrate" or "REGRAFT_DATABASE_URL" not in variables:
            assert first["name"] != "wait-for-schema", pod.name
            continue
        waiting.add(pod.component)
        assert first["command"][:3] == ["regraft-server", "migrate", "--wait"], pod.name
        assert first["image"] == pod.spec["containers"][0]["image"], (
            "it waits for the schema of its own version"
        )
        [url] = [one for one in first["env"] if one["name"] == "REGRAFT_DATABASE_URL"]
        assert url in pod.spec["containers"][0]["env"]

    assert waiting == {"api", "worker"}


def test_the_dispatcher_waits_for_the_schema_and_so_do_its_jobs() -> None:
    manifests = render(VARIATIONS["dispatched"] | {"migrate": {"hooks": "none"}})

    [dispatcher] = pods(manifests, "dispatcher")
    assert [one["name"] for one in dispatcher.spec["initContainers"]] == ["wait-for-schema"]
    [config] = [
        one for one in of_kind(manifests, "ConfigMap") if one["metadata"]["name"].endswith("-dispatcher")
    ]
    for text in config["data"].values():
        spec = json.loads(text)["manifest"]["spec"]["template"]["spec"]
        assert [one["name"] for one in spec["initContainers"]] == ["wait-for-schema", "doctor"]


@pytest.mark.parametrize("hooks", ["helm", "none"])
def test_a_rollout_that_waits_for_the_schema_is_not_called_failed(hooks: str) -> None:
    def deadlines(hooks: str) -> dict[str, int]:
        manifests = render(VARIATIONS["dispatched"] | {"migrate": {"hooks": hooks}})
        return {
            pod.name: pod.owner["spec"]["progressDeadlineSeconds"]
            for pod in pods(manifests)
            if pod.owner["kind"] == "Deployment" and pod.component in ("api", "worker", "dispatcher")
        }

    waits = 0 if hooks == "helm" else 1800
    assert deadlines(hooks) == {name: seconds + waits for name, seconds in deadlines("helm").items()}
    assert len(deadlines(hooks)) == 3 and min(deadlines(hooks).values()) == 600 + waits


def test_with_helm_no_pod_waits_because_the_demo_migrates_after_its_pods_are_ready() -> None:
    for name in ("production", "cpu-demo"):
        for pod in pods(render(profile(name))):
            assert "wait-for-schema" not in [one["name"] for one in pod.spec.get("initContainers", [])]


@pytest.mark.parametrize(("name", "phase"), [("production", "PreSync"), ("cpu-demo", "Sync")])
def test_argo_cd_migrates_before_the_pods_and_beside_a_database_that_comes_with_them(
    name: str, phase: str
) -> None:
    manifests = without_hooks(name, "argocd")
    [job] = of_kind(manifests, "Job")
    [policy] = [
        one
        for one in of_kind(manifests, "NetworkPolicy")
        if one["metadata"]["name"] == job["metadata"]["name"]
    ]

    for one in (job, policy):
        annotations = one["metadata"]["annotations"]
        assert annotations["argocd.argoproj.io/hook"] == phase
        assert not [key for key in annotations if key.startswith("helm.sh")]
    assert int(policy["metadata"]["annotations"]["argocd.argoproj.io/sync-wave"]) < 0


def test_without_hooks_each_change_of_the_migrations_pod_is_a_job_of_its_own() -> None:
    """Kubernetes refuses to change a Job, and a finished Job that was removed would be created again."""

    def job(**changes: Any) -> Manifest:
        [found] = of_kind(without_hooks("production", **changes), "Job")
        return found

    first, same, newer = job(), job(api={"replicas": 7}), job(image={"tag": "9.9.9"})
    assert first == same and first["metadata"]["name"] != newer["metadata"]["name"]
    assert "annotations" not in first["metadata"] and "ttlSecondsAfterFinished" not in first["spec"]


def test_the_demos_passwords_come_from_a_secret_that_is_given() -> None:
    manifests = without_hooks("cpu-demo")
    made = of_kind(render(profile("cpu-demo")), "Secret")[0]

    def secrets(found: list[Manifest]) -> set[tuple[str, str]]:
        """The entries of Secrets that pods read, or mount."""
        names = set()
        for pod in pods(found):
            for container in pod.containers:
                references = [
                    one.get("valueFrom", {}).get("secretKeyRef") for one in container.get("env", [])
                ]
                names |= {(one["name"], one["key"]) for one in references if one and not one.get("optional")}
            for volume in pod.spec["volumes"]:
                items = volume.get("secret", {}).get("items", [])
                names |= {(volume["secret"]["secretName"], one["key"]) for one in items}
        return names

    assert of_kind(manifests, "Secret") == []
    assert manifests == without_hooks("cpu-demo"), "two renderings are equal"
    assert secrets(manifests) == {("demo-passwords", key) for key in made["stringData"]}
    assert secrets(render(profile("cpu-demo"))) == {
        (made["metadata"]["name"], key) for key in made["stringData"]
    }


@pytest.mark.parametrize("hooks", ["argocd", "none"])
def test_without_helm_the_chart_draws_no_passwords(hooks: str) -> None:
    with pytest.raises(helm.HelmError, match=r"bundled\.existingSecret: name the Secret"):
        render(profile("cpu-demo", migrate={"hooks": hooks}))


def test_the_migration_needs_nothing_that_the_chart_makes_later() -> None:
    """Of what it refers to, only the Secret with the database's URL exists before the chart."""
    [job] = pods(render(profile("production")), "migrate")

    assert job.spec["serviceAccountName"] == "default"
    assert all("emptyDir" in volume for volume in job.spec["volumes"])
    secrets = [e["valueFrom"]["secretKeyRef"]["name"] for e in job.containers[0]["env"] if "valueFrom" in e]
    assert secrets == ["regraft-database"]


def test_a_worker_has_longer_than_its_drain_before_it_is_killed() -> None:
    for seconds in (0, 0.5, 600):
        manifests = render(profile("production", settings={"drain_seconds": seconds}))
        for worker in pods(manifests, "worker"):
            assert worker.spec["terminationGracePeriodSeconds"] >= seconds + 30


@pytest.mark.parametrize("settings", [{}, {"drain_requests_seconds": 0}, {"drain_requests_seconds": 1800}])
def test_api_and_inference_have_longer_than_their_requests_before_they_are_killed(
    settings: dict[str, int],
) -> None:
    manifests = render(profile("production", settings=settings))
    seconds = settings.get("drain_requests_seconds", Settings.model_fields["drain_requests_seconds"].default)

    for pod in pods(manifests, "api") + pods(manifests, "inference"):
        [container] = pod.spec["containers"]
        before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pod.spec["terminationGracePeriodSeconds"] == seconds + before + 10
