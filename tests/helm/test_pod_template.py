"""`podTemplate` adds to pods what the chart has no value for, and is merged as Kubernetes merges patches."""

from typing import Any

import pytest

from tests.helm.charts import (
    FLEET,
    JOBS,
    SERVER,
    VARIATIONS,
    Pod,
    environment,
    helm,
    job_of,
    of_kind,
    pods,
    profile,
    render,
    strings,
)
from tests.helm.test_rendering import NEWEST, kubernetes_validate

# Wishes of operators -> the patch.
WISHES: dict[str, dict[str, Any]] = {
    "annotations": {"metadata": {"annotations": {"example.com/team": "ml"}}},
    "labels": {"metadata": {"labels": {"azure.workload.identity/use": "true"}}},
    "affinity": {
        "spec": {
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [
                            {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
                        ]
                    }
                }
            }
        }
    },
    "another scheduler": {"spec": {"schedulerName": "kai-scheduler"}},
    "claims of devices": {
        "spec": {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "two-gpus"}]}
    },
    "the network of the node": {"spec": {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}},
    "a sidecar": {"spec": {"containers": [{"name": "proxy", "image": "proxy:1.2"}]}},
    "an init container": {"spec": {"initContainers": [{"name": "wait", "image": "busybox:1.36"}]}},
    "a number": {"spec": {"terminationGracePeriodSeconds": 86400}},
}
COMPONENTS = ("api", "inference", "worker", "sampler-small", "migrate")
VALUES = profile("production", samplers={"existingSecret": "samplers", "fleets": [FLEET]})


def contains(whole: Any, part: Any) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(contains(whole.get(key), value) for key, value in part.items())
    if isinstance(part, list):
        return all(any(contains(one, item) for one in whole) for item in part)
    return bool(whole == part)


@pytest.mark.parametrize("wish", WISHES)
def test_a_field_of_all_pods_can_be_set(wish: str) -> None:
    manifests = render(VALUES | {"podTemplate": WISHES[wish]})

    for component in COMPONENTS:
        for pod in pods(manifests, component):
            assert contains(pod.template, WISHES[wish]), pod.name
            owner = job_of(pod.owner) if pod.owner["kind"] == "ScaledJob" else pod.owner
            kubernetes_validate.validate(owner, NEWEST, strict=True)


def test_the_wait_for_the_schema_comes_after_the_sidecar_through_which_pods_reach_the_database() -> None:
    """Kubernetes starts init containers in their order, and the first one that does not end holds up the others."""
    sidecar = {"name": "cloud-sql-proxy", "image": "proxy:1.2", "restartPolicy": "Always"}
    patch = {
        "spec": {
            "initContainers": [
                {"name": "configure", "image": "busybox:1.36"},
                sidecar,
                {"name": "later", "image": "busybox:1.36"},
            ]
        }
    }
    manifests = render(VALUES | {"migrate": {"hooks": "none"}, "podTemplate": patch})

    for component in ("api", "worker"):
        for pod in pods(manifests, component):
            names = [one["name"] for one in pod.spec["initContainers"] if one["name"] != "doctor"]
            assert names == ["configure", "cloud-sql-proxy", "wait-for-schema", "later"], pod.name


def container(pod: Pod) -> dict[str, Any]:
    found: dict[str, Any] = pod.spec["containers"][0]
    return found


def test_items_with_names_are_merged_and_others_are_added() -> None:
    patch = {
        "spec": {
            "containers": [
                {
                    "name": "api",
                    "env": [{"name": "EXTRA", "value": "1"}, {"name": "REGRAFT_PORT", "value": "8000"}],
                    "volumeMounts": [{"name": "data", "mountPath": "/data", "subPath": "x"}],
                }
            ],
            "volumes": [{"name": "data", "emptyDir": None, "persistentVolumeClaim": {"claimName": "data"}}],
        }
    }
    [plain] = pods(render(VALUES), "api")
    [patched] = pods(render(VALUES | {"api": VALUES["api"] | {"podTemplate": patch}}), "api")

    assert container(patched)["image"] == container(plain)["image"]
    names = [one["name"] for one in container(plain)["env"]]
    assert [one["name"] for one in container(patched)["env"]] == [*names, "EXTRA"]
    assert {"name": "data", "mountPath": "/data", "subPath": "x"} in container(patched)["volumeMounts"]
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "data"}} in patched.spec["volumes"]
    assert len(patched.spec["volumes"]) == len(plain.spec["volumes"])


def test_a_volume_with_another_source_replaces_the_one_of_its_name() -> None:
    """A volume with two sources is invalid."""
    claim = {"name": "tmp", "persistentVolumeClaim": {"claimName": "fast"}}
    patch = {"spec": {"volumes": [claim]}}

    [api] = pods(render(VALUES | {"podTemplate": patch}), "api")

    assert [volume for volume in api.spec["volumes"] if volume["name"] == "tmp"] == [claim]


def test_null_removes_a_key() -> None:
    patch = {"spec": {"securityContext": {"runAsUser": None, "fsGroup": None}}}
    for pod in pods(render(VALUES | {"podTemplate": patch})):
        assert not {"runAsUser", "fsGroup"} & pod.spec["securityContext"].keys(), pod.name
        assert pod.spec["securityContext"]["runAsNonRoot"] is True


def test_the_patch_of_a_component_and_of_a_pool_is_the_last() -> None:
    def scheduler(name: str) -> dict[str, Any]:
        return {"spec": {"schedulerName": name}}

    values = VALUES | {
        "podTemplate": scheduler("of-all"),
        "inference": VALUES["inference"]
        | {
            "podTemplate": scheduler("of-inference"),
            "models": [SERVER | {"podTemplate": scheduler("of-the-server")}],
        },
        "workers": [JOBS | {"podTemplate": scheduler("of-the-pool")}, *VALUES["workers"]],
    }
    named = {pod.owner["metadata"]["name"]: pod.spec["schedulerName"] for pod in pods(render(values))}

    assert named.pop("regraft-inference") == "of-inference"
    assert named.pop("regraft-inference-large") == "of-the-server"
    assert named.pop("regraft-worker-a100") == "of-the-pool"
    assert set(named.values()) == {"of-all"}


def test_labels_of_resources_annotations_of_the_service_and_other_manifests() -> None:
    values = VALUES | {
        "commonLabels": {"team": "ml"},
        "api": VALUES["api"] | {"service": {"annotations": {"example.com/internal": "true"}}},
        "extraObjects": [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-extra"}}
        ],
    }
    manifests = render(values)
    extra = [one for one in manifests if one["metadata"]["name"] == "regraft-extra"]
    [service] = [one for one in of_kind(manifests, "Service") if one["metadata"]["name"] == "regraft-api"]

    assert len(extra) == 1
    assert service["metadata"]["annotations"] == {"example.com/internal": "true"}
    for one in manifests:
        assert one in extra or one["metadata"]["labels"]["team"] == "ml", one["kind"]
    for pod in pods(manifests):
        assert "team" not in pod.labels or pod.owner["kind"] in ("Job", "Pod")


def test_annotations_of_deployments_are_those_of_all_of_them_and_of_nothing_else() -> None:
    reloader = {"secret.reloader.stakater.com/auto": "true"}
    manifests = render(VALUES | {"deploymentAnnotations": reloader})

    annotated = [
        one for one in manifests if reloader.items() <= one["metadata"].get("annotations", {}).items()
    ]
    assert annotated == of_kind(manifests, "Deployment")
    assert len(annotated) > 3


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("imageRegistry", r"image\.registry"),
        ("imagePullSecrets", r"image\.pullSecrets"),
        ("storageClass", "bundled"),
    ],
)
def test_a_global_value_that_would_have_no_effect_is_refused(name: str, instead: str) -> None:
    with pytest.raises(helm.HelmRenderError, match=rf"global\.{name}: the chart uses no .* set {instead}"):
        render(VALUES | {"global": {name: "x"}})


def test_global_values_of_a_chart_around_this_one_are_its_own() -> None:
    assert render(VALUES | {"global": {"domain": "example.com"}}) == render(VALUES)


def test_devices_that_a_pod_claims_are_those_of_its_check() -> None:
    """The init container would wait for a GPU of the device plugin, of which a cluster with DRA has none."""
    claimed = {
        "name": "worker",
        "resources": {"claims": [{"name": "gpu"}], "limits": {"nvidia.com/gpu": None}},
    }
    patch = {
        "spec": {
            "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "a"}],
            "containers": [claimed],
        }
    }
    [gpus, *others] = VALUES["workers"]
    manifests = render(VALUES | {"workers": [gpus | {"podTemplate": patch}, *others]})

    [pod] = [one for one in pods(manifests, "worker") if one.name.endswith("h100")]
    [doctor] = [one for one in pod.spec["initContainers"] if one["name"] == "doctor"]
    assert doctor["resources"] == container(pod)["resources"]
    assert doctor["resources"]["claims"] == [{"name": "gpu"}]
    assert "nvidia.com/gpu" not in doctor["resources"]["limits"]


def pool_of(**changes: Any) -> Pod:
    [gpus, *others] = profile("production")["workers"]
    manifests = render(profile("production", workers=[gpus | changes, *others]))
    [pod] = [one for one in pods(manifests, "worker") if one.name.endswith("h100")]
    return pod


def volume(pod: Pod, name: str) -> dict[str, Any]:
    [found] = [one for one in pod.spec["volumes"] if one["name"] == name]
    return dict(found)


def test_a_pool_has_a_cache_of_its_own() -> None:
    assert volume(pool_of(cache={"size": "90Gi"}), "cache")["emptyDir"] == {"sizeLimit": "90Gi"}
    claim = volume(pool_of(cache={"existingClaim": "weights"}), "cache")["persistentVolumeClaim"]
    assert claim == {"claimName": "weights"}


@pytest.mark.parametrize(("gpus", "size"), [(1, "1Gi"), (2, "8Gi"), (16, "8Gi")])
def test_processes_on_several_gpus_have_more_shared_memory(gpus: int, size: str) -> None:
    assert volume(pool_of(gpus=gpus), "shm")["emptyDir"]["sizeLimit"] == size


def test_devices_of_rdma_are_limits_beside_the_gpus_and_bring_the_right_to_lock_memory() -> None:
    worker = container(pool_of(gpus=8, rdma={"rdma/hca": 4}))

    assert worker["resources"]["limits"]["rdma/hca"] == 4
    assert worker["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert container(pool_of())["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("how", ["required", "preferred"])
def test_kueue_places_the_pods_of_a_pool_by_its_topology(how: str) -> None:
    pod = pool_of(kueueQueue="research", kueueTopology={how: "example.com/rack"})

    assert (
        pod.template["metadata"]["annotations"][f"kueue.x-k8s.io/podset-{how}-topology"] == "example.com/rack"
    )


def test_only_workers_that_run_jobs_keep_their_node_from_being_removed() -> None:
    kept = {
        pod.owner["metadata"]["name"]
        for pod in pods(render(VALUES))
        if "cluster-autoscaler.kubernetes.io/safe-to-evict" in pod.template["metadata"].get("annotations", {})
    }

    assert kept == {"regraft-worker-h100", "regraft-worker-h200"}


@pytest.mark.parametrize("server", ["postgresql", "valkey", "seaweedfs"])
def test_each_server_of_the_demo_has_a_patch_of_its_own(server: str) -> None:
    """Also of its container, which the other servers do not have."""
    zone = {"name": "TZ", "value": "UTC"}
    patch = {"spec": {"containers": [{"name": server, "env": [zone]}]}}
    manifests = render(profile("cpu-demo", bundled={server: {"podTemplate": patch}}))

    assert [pod.component for pod in pods(manifests) if zone in pod.containers[0].get("env", [])] == [server]


@pytest.mark.parametrize("name", ["cpu-demo", "production"])
def test_all_images_come_from_the_registry_that_is_named(name: str) -> None:
    manifests = render(profile(name, image={"registry": "mirror.example.com:5000", "repository": "regraft"}))

    images = [one["image"] for pod in pods(manifests) for one in pod.containers]
    assert all(one.startswith("mirror.example.com:5000/") for one in images)


def test_old_replicasets_are_kept_as_often_as_said() -> None:
    deployments = of_kind(render(VALUES | {"revisionHistoryLimit": 2}), "Deployment")

    assert {one["spec"]["revisionHistoryLimit"] for one in deployments} == {2}


def test_pods_listen_on_addresses_of_ipv6() -> None:
    values = VARIATIONS["fleets"] | {"listenOn": "::"}
    hosts = {
        pod.component: environment(pod)["REGRAFT_HOST"]
        for pod in pods(render(values))
        if "REGRAFT_HOST" in environment(pod)
    }

    assert {"api", "inference", "inference-large", "sampler-small", "worker"} <= hosts.keys()
    assert set(hosts.values()) == {"::"}


def test_an_ingress_may_leave_paths_out() -> None:
    [ingress] = of_kind(render(profile("production", ingress={"paths": ["/v1", "/readyz"]})), "Ingress")
    [rule] = ingress["spec"]["rules"]

    assert [(one["path"], one["pathType"]) for one in rule["http"]["paths"]] == [
        ("/v1", "Prefix"),
        ("/readyz", "Prefix"),
    ]


@pytest.mark.parametrize(
    ("account", "used", "created"),
    [
        ({}, "regraft-api", True),
        ({"name": "ours"}, "ours", False),
        ({"create": True, "name": "ours"}, "ours", True),
        ({"create": False, "name": "ours"}, "ours", False),
        ({"create": False}, "default", False),
    ],
)
def test_an_account_is_created_or_given(account: dict[str, Any], used: str, created: bool) -> None:
    manifests = render(profile("production", api={"serviceAccount": account}))
    [pod] = pods(manifests, "api")

    assert pod.spec["serviceAccountName"] == used
    names = {one["metadata"]["name"] for one in of_kind(manifests, "ServiceAccount")}
    assert (used in names) == created


def test_the_dispatcher_has_the_account_that_is_named_with_its_rights() -> None:
    values = VARIATIONS["dispatched"]
    named = values["dispatcher"] | {"serviceAccount": {"name": "ours"}}
    manifests = render(values | {"dispatcher": named})
    [pod] = pods(manifests, "dispatcher")
    [binding] = of_kind(manifests, "RoleBinding")

    assert pod.spec["serviceAccountName"] == "ours"
    assert [one["name"] for one in binding["subjects"]] == ["ours"]


def test_the_volumes_of_the_demo_have_the_storage_class_that_is_named() -> None:
    named = {name: {"storageClass": f"of-{name}"} for name in ("postgresql", "valkey", "seaweedfs")}
    sets = of_kind(render(profile("cpu-demo", bundled=named)), "StatefulSet")
    classes = {one["spec"]["volumeClaimTemplates"][0]["spec"].get("storageClassName") for one in sets}
    [claim, *_] = of_kind(render(profile("cpu-demo")), "StatefulSet")

    assert classes == {"of-postgresql", "of-valkey", "of-seaweedfs"}
    assert "storageClassName" not in claim["spec"]["volumeClaimTemplates"][0]["spec"]


def test_an_image_is_named_by_its_digest_where_there_is_one() -> None:
    digest = f"sha256:{'0' * 64}"
    values = profile("production", image={"digests": {"worker-gpu": digest}})
    images = {container(pod)["image"] for pod in pods(render(values))}

    assert images == {
        f"registry.example.com/regraft/worker-gpu@{digest}",
        "registry.example.com/regraft/worker-cpu:0.1.0",
        "registry.example.com/regraft/api:0.1.0",
    }


def test_the_resources_have_the_name_that_is_given() -> None:
    manifests = render(profile("production", fullnameOverride="ml"), name="regraft")

    assert all(one["metadata"]["name"].startswith("ml-") for one in manifests if one["kind"] != "ConfigMap")
    assert not [
        text for one in of_kind(manifests, "ScaledJob") for text in strings(one) if "regraft-api" in text
    ]
