"""What Helm makes of the chart is what Kubernetes takes, whatever the values."""

import itertools
import json
from typing import Any

import jsonschema
import pytest

from tests.helm.charts import (
    CHART,
    POOL,
    VARIATIONS,
    Pod,
    helm,
    of_kind,
    pods,
    profile,
    render,
    templates,
)

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="it brings Kubernetes' schemas")

OLDEST, NEWEST = "1.29.0", "1.37.0"

# Of resources that are not Kubernetes' own: their fields as far as the chart uses them.
_TRIGGER = {
    "type": "object",
    "required": ["type", "authenticationRef", "metadata"],
    "additionalProperties": False,
    "properties": {
        "type": {"const": "postgresql"},
        "authenticationRef": {"type": "object", "required": ["name"]},
        "metadata": {
            "type": "object",
            "required": ["query", "targetQueryValue"],
            "additionalProperties": {"type": "string"},
        },
    },
}


def _monitor(endpoints: str) -> dict[str, Any]:
    """Both kinds of monitor differ in this name only."""
    endpoint = {
        "type": "object",
        "required": ["port", "interval"],
        "additionalProperties": False,
        "properties": {"port": {"type": "string"}, "interval": {"type": "string"}},
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


CUSTOM = {
    ("keda.sh/v1alpha1", "ScaledObject"): {
        "type": "object",
        "required": ["scaleTargetRef", "triggers"],
        "additionalProperties": False,
        "properties": {
            "scaleTargetRef": {"type": "object", "required": ["name"]},
            "minReplicaCount": {"type": "integer"},
            "maxReplicaCount": {"type": "integer"},
            "pollingInterval": {"type": "integer"},
            "cooldownPeriod": {"type": "integer"},
            "triggers": {"type": "array", "minItems": 1, "items": _TRIGGER},
        },
    },
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): {
        "type": "object",
        "required": ["leaderWorkerTemplate"],
        "additionalProperties": False,
        "properties": {
            "replicas": {"type": "integer", "minimum": 0},
            "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
            "rolloutStrategy": {
                "type": "object",
                "required": ["type"],
                "additionalProperties": False,
                "properties": {
                    "type": {"const": "RollingUpdate"},
                    "rollingUpdateConfiguration": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {
                            "maxSurge": {"type": "integer"},
                            "maxUnavailable": {"type": "integer", "minimum": 1},
                        },
                    },
                },
            },
            "leaderWorkerTemplate": {
                "type": "object",
                "required": ["workerTemplate"],
                "additionalProperties": False,
                "properties": {
                    "size": {"type": "integer", "minimum": 1},
                    "restartPolicy": {
                        "enum": ["None", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart"]
                    },
                    "leaderTemplate": {"type": "object", "required": ["metadata", "spec"]},
                    "workerTemplate": {"type": "object", "required": ["metadata", "spec"]},
                },
            },
        },
    },
    ("keda.sh/v1alpha1", "TriggerAuthentication"): {
        "type": "object",
        "required": ["secretTargetRef"],
        "additionalProperties": False,
        "properties": {
            "secretTargetRef": {
                "type": "array",
                "minItems": 1,
                "items": {"type": "object", "required": ["parameter", "name", "key"]},
            }
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
            for template in templates(manifest) if manifest["kind"] == "LeaderWorkerSet" else ():
                pod = {"apiVersion": "v1", "kind": "Pod"} | template
                kubernetes_validate.validate(pod, version, strict=True)
        else:
            kubernetes_validate.validate(manifest, version, strict=True)


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


def test_names_are_unique_and_short_enough_for_labels() -> None:
    longest = POOL | {"name": "a-pool-with-20-chars"}
    every = VARIATIONS["every corner"]
    values = every | {"workers": [*every["workers"], longest]}
    for name in ("regraft", "a-release-with-a-name-as-long-as-helm-lets-it-be-53ch", "regraft" * 7):
        manifests = render(values, name=name)
        names = [(one["kind"], one["metadata"]["name"]) for one in manifests]

        assert len(names) == len(set(names))
        assert all(len(one) <= 63 for _, one in names)


def test_selectors_find_the_pods_they_mean(manifests: list[dict[str, Any]]) -> None:
    for pod in pods(manifests):
        selector = pod.owner["spec"].get("selector", {}).get("matchLabels", {})
        assert selector.items() <= pod.labels.items()
        assert selector or pod.owner["kind"] in ("Job", "LeaderWorkerSet")
    for one, other in itertools.permutations(
        [p for p in pods(manifests) if p.owner["kind"] == "Deployment"], 2
    ):
        selector = one.owner["spec"]["selector"]["matchLabels"]
        assert not selector.items() <= other.labels.items(), f"{one.name} would take the pods of {other.name}"
    for service in of_kind(manifests, "Service"):
        targets = [p for p in pods(manifests) if service["spec"]["selector"].items() <= p.labels.items()]
        [port] = service["spec"]["ports"]
        assert len(targets) == 1
        assert port["targetPort"] in [p["name"] for c in targets[0].containers for p in c["ports"]]


def test_budgets_and_scalers_lead_to_a_deployment(manifests: list[dict[str, Any]]) -> None:
    deployments = {one["metadata"]["name"]: one for one in of_kind(manifests, "Deployment")}
    groups = {one["metadata"]["name"]: one for one in of_kind(manifests, "LeaderWorkerSet")}
    for scaler in of_kind(manifests, "HorizontalPodAutoscaler") + of_kind(manifests, "ScaledObject"):
        target = deployments[scaler["spec"]["scaleTargetRef"]["name"]]
        assert "replicas" not in target["spec"], "an upgrade would undo what the scaler did"
    for budget in of_kind(manifests, "PodDisruptionBudget"):
        name, selector = budget["metadata"]["name"], budget["spec"]["selector"]
        if name in groups:
            leader, member = templates(groups[name])
            assert selector["matchLabels"].items() <= leader["metadata"]["labels"].items()
            assert not selector["matchLabels"].items() <= member["metadata"]["labels"].items()
        else:
            assert selector == deployments[name]["spec"]["selector"]
    scaled_to_gpus = {one["spec"]["scaleTargetRef"]["name"] for one in of_kind(manifests, "ScaledObject")}
    budgets = {one["metadata"]["name"] for one in of_kind(manifests, "PodDisruptionBudget")}
    assert budgets == (deployments | groups).keys() - scaled_to_gpus


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


def test_pods_start_anew_when_their_files_change() -> None:
    def checksum(**changes: Any) -> Any:
        [api] = pods(render(profile("production", **changes)), "api")
        return api.template["metadata"]["annotations"]["checksum/config"]

    assert checksum() == checksum()
    assert checksum() != checksum(models={"Another": {"hub": "some/model"}})


def test_a_worker_with_several_gpus_has_a_rank_on_each() -> None:
    pools = [POOL | {"name": f"p{gpus}", "gpus": gpus, "gpuClass": f"p{gpus}"} for gpus in (0, 1, 4)]
    workers = pods(
        render(profile("production", workers=[*pools, *profile("production")["workers"]])), "worker"
    )

    ranks = {
        pod.labels["regraft.dev/pool"]: {
            one["name"]: one.get("value") for one in pod.containers[0]["env"]
        }.get("REGRAFT_RANKS")
        for pod in workers
    }

    assert {pool: ranks[pool] for pool in ("p0", "p1", "p4")} == {"p0": None, "p1": None, "p4": "4"}


def test_a_pool_on_several_nodes_is_a_group_of_a_leader_and_its_members() -> None:
    manifests = render(VARIATIONS["groups"])
    sets = {
        one["metadata"]["labels"]["regraft.dev/pool"]: one for one in of_kind(manifests, "LeaderWorkerSet")
    }
    spec = sets["group"]["spec"]
    leader, member = (pod for pod in pods(manifests) if pod.owner is sets["group"])

    assert sets.keys() == {"group", "pair"}
    assert "regraft-worker-group" not in {one["metadata"]["name"] for one in of_kind(manifests, "Deployment")}
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (3, 3)
    assert (leader.component, member.component) == ("worker", "member")
    for pod in (leader, member):
        [container] = pod.containers
        variables = {one["name"]: one for one in container["env"]}
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        assert container["image"].endswith("/worker-gpu:0.1.0")
        assert variables["REGRAFT_RANKS"]["value"] == "8"
        assert {"name": "weights", "mountPath": "/models", "readOnly": True} in container["volumeMounts"]


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
