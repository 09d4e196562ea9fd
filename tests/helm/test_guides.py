"""The values of the guides that docs/howto/kubernetes.md lists render, and do what the guides say."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.charts import CHART, environment, merged, of_kind, pods, profile, render
from tests.helm.test_policy import allowed

HOWTO = Path(__file__).parents[2] / "docs/howto"
GUIDES = re.findall(
    r"^\| .* \| \[.+\]\((kubernetes-[\w-]+\.md)(?:#[a-z-]+)?\) \|$",
    (HOWTO / "kubernetes.md").read_text().split("## Parts of the chart")[0],
    re.MULTILINE,
)


def guide(name: str) -> str:
    return (HOWTO / f"kubernetes-{name}.md").read_text()


def blocks(name: str) -> list[list[dict[str, Any]]]:
    """The YAML documents of each block of a guide."""
    texts = re.findall(r"^```yaml\n(.*?)^```", guide(name), re.MULTILINE | re.DOTALL)
    return [list(yaml.safe_load_all(text)) for text in texts]


def test_there_is_a_guide_for_each_kind_of_cluster() -> None:
    assert len(GUIDES) == 7
    for page in GUIDES:
        assert (HOWTO / page).exists()


def test_one_gpu_node_has_a_worker_that_waits_with_its_gpu_and_reaches_the_hub() -> None:
    [[values]] = blocks("one-gpu")

    manifests = render(values)

    [worker] = pods(manifests, "worker")
    assert worker.owner["kind"] == "Deployment"
    assert worker.containers[0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert not [one for one in manifests if one["apiVersion"].startswith("keda.sh")]
    hub = allowed(manifests, "worker")["egress"][-1]
    assert (hub["to"][0]["ipBlock"]["cidr"], hub["ports"][0]["port"]) == ("0.0.0.0/0", 443)


def test_the_jobs_of_two_nodes_wait_in_a_queue_of_kueue_whose_quota_has_room_for_them() -> None:
    quota, [pool] = blocks("kueue")
    [flavor, cluster, local] = quota
    production = profile("production")
    workers = [*pool["workers"], *production["workers"]]

    manifests = render(
        merged(production, {"workers": workers, "models": {"Qwen3-14B": {"gpuClass": "h100x16"}}})
    )

    [job] = [one for one in of_kind(manifests, "ScaledJob") if one["metadata"]["name"].endswith("-h100x16")]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == local["metadata"]["name"]
    assert local["spec"]["clusterQueue"] == cluster["metadata"]["name"]
    [group] = cluster["spec"]["resourceGroups"]
    [given] = group["flavors"]
    assert given["name"] == flavor["metadata"]["name"]
    spec = job["spec"]["jobTargetRef"]
    [container] = spec["template"]["spec"]["containers"]
    gpus = {resource["name"]: resource["nominalQuota"] for resource in given["resources"]}["nvidia.com/gpu"]
    assert spec["completions"] * container["resources"]["limits"]["nvidia.com/gpu"] == int(gpus)


def test_openshift_assigns_users() -> None:
    [[values]] = blocks("openshift")

    manifests = render(merged(profile("production"), values))

    assert not [pod for pod in pods(manifests) if "runAsUser" in pod.spec["securityContext"]]
    rules = allowed(manifests, "api")
    [dns, *_] = rules["egress"]
    assert 5353 in {port["port"] for port in dns["ports"]}
    peers = [peer for rule in rules["ingress"] for peer in rule["from"]]
    labels = [peer["namespaceSelector"]["matchLabels"] for peer in peers if "namespaceSelector" in peer]
    assert {"network.openshift.io/policy-group": "ingress"} in labels
    for namespace in ("openshift-monitoring", "openshift-user-workload-monitoring", "openshift-keda"):
        assert {"kubernetes.io/metadata.name": namespace} in labels
    assert not {"ingress-nginx", "monitoring", "keda"} & {name for one in labels for name in one.values()}
    [ingress] = of_kind(manifests, "Ingress")
    assert ingress["spec"]["ingressClassName"] == "openshift-default"
    [api] = pods(manifests, "api")
    assert environment(api)["FORWARDED_ALLOW_IPS"] == "10.128.0.0/14"


def test_the_backup_of_a_cluster_has_the_stores_of_the_api() -> None:
    text = (HOWTO / "restore.md").read_text()
    [values] = [
        yaml.safe_load(one) for one in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ]

    manifests = render(profile("production", **values))

    [backup] = of_kind(manifests, "CronJob")
    [container] = backup["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    [api] = pods(manifests, "api")
    own = {one["name"]: one for one in api.containers[0]["env"]}
    for variable in container["env"]:
        if variable["name"] != "REGRAFT_DATA_DIR":
            assert variable == own[variable["name"]]
    [keys] = container["envFrom"]
    assert own["AWS_ACCESS_KEY_ID"]["valueFrom"]["secretKeyRef"]["name"] == keys["secretRef"]["name"]
    assert "regraft-server backup" in container["command"][-1]


@pytest.mark.parametrize("value", ["apiFrom", "metricsFrom", "kedaFrom"])
def test_the_guide_of_production_names_who_may_connect(value: str) -> None:
    assert f"networkPolicy.{value}" in guide("production")


def commands_with_selectors() -> list[str]:
    """Every command of kubectl in the documentation that selects by labels."""
    pages = [*HOWTO.parent.rglob("*.md"), CHART / "templates/NOTES.txt"]
    texts = [page.read_text() for page in pages if "reference" not in page.parts]
    return [found for text in texts for found in re.findall(r"kubectl [^\n`]* -l [^\n`]*", text)]


def test_a_command_by_labels_names_its_namespace_and_release() -> None:
    """Without them it would change or show other releases of the cluster."""
    commands = commands_with_selectors()

    assert len(commands) > 8
    for command in commands:
        assert " -n " in command, command
        assert "app.kubernetes.io/instance=" in command, command


def test_the_application_of_argo_cd_names_this_chart_and_a_rendering_without_a_cluster_has_no_secret() -> (
    None
):
    [[application]] = blocks("gitops")
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    source = application["spec"]["source"]
    manifests = render(profile("production", **source["helm"]["valuesObject"]))

    assert (source["chart"], source["targetRevision"]) == (chart["name"], chart["version"])
    assert of_kind(manifests, "Secret") == []
    [migrate] = of_kind(manifests, "Job")
    assert migrate["metadata"]["annotations"]["argocd.argoproj.io/hook"] == "PreSync"
    [api] = [pod.owner for pod in pods(manifests, "api")]
    assert "replicas" not in api["spec"]


def test_the_secret_of_the_demos_servers_has_what_the_chart_would_draw() -> None:
    [made] = of_kind(render(profile("cpu-demo")), "Secret")
    [command] = re.findall(
        r"create secret generic regraft-demo(.*?)^```", guide("gitops"), re.MULTILINE | re.DOTALL
    )

    assert set(re.findall(r"--from-literal=([\w.-]+)=", command)) == set(made["stringData"])
    for key in ("database-url", "broker-url"):
        [given] = re.findall(rf"{key}=(\S+)", command)
        assert re.sub(r"\$\w+", "", given) == re.sub(r"(?<=:)\w{32}(?=@)", "", made["stringData"][key])


def test_cilium_replaces_the_rules_for_all_public_addresses() -> None:
    [[values]] = blocks("network")

    manifests = render(merged(profile("production"), values))

    assert "0.0.0.0/0" not in str(of_kind(manifests, "NetworkPolicy"))
    assert len(of_kind(manifests, "CiliumNetworkPolicy")) == 3


@pytest.mark.parametrize("argument", ["BASE", "APT_MIRROR", "NETRC", "NPMRC", "APT_AUTH"])
def test_the_guide_of_mirrors_names_what_make_images_takes(argument: str) -> None:
    assert argument in guide("images")
