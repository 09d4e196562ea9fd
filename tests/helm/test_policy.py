"""What no values can make the chart do."""

import json
import re
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest

from core.storage.store import s3_client
from tests.graders.attacks import ATTACKS
from tests.helm.charts import VARIATIONS, helm, merged, of_kind, pods, profile, render, strings


@pytest.fixture(params=VARIATIONS)
def manifests(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return render(VARIATIONS[request.param])


def test_no_container_has_rights(manifests: list[dict[str, Any]]) -> None:
    for pod in pods(manifests):
        security = pod.spec["securityContext"]
        assert security["runAsNonRoot"] is True and security["runAsUser"] > 0, pod.name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, pod.name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys(), pod.name
        assert not [volume for volume in pod.spec["volumes"] if "hostPath" in volume], pod.name
        for container in pod.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, pod.name


def test_a_cluster_may_assign_users_and_groups() -> None:
    """As OpenShift's restricted-v2 does, which refuses pods that name their own."""
    for pod in pods(render(profile("production", fixedUser=False))):
        contexts = [pod.spec["securityContext"], *(one["securityContext"] for one in pod.containers)]
        named = {key for context in contexts for key in context}
        assert not named & {"runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy"}, pod.name
        assert pod.spec["securityContext"]["runAsNonRoot"] is True, pod.name
        for container in pod.containers:
            names = {variable["name"] for variable in container.get("env", [])}
            assert ("HOME" in names) == ("USER" in names), pod.name


def test_nothing_but_the_dispatcher_holds_a_token_of_kubernetes(manifests: list[dict[str, Any]]) -> None:
    for pod in pods(manifests):
        assert pod.spec["automountServiceAccountToken"] is (pod.component == "dispatcher"), pod.name
    for account in of_kind(manifests, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
    rights = [one for one in manifests if one["kind"].endswith(("Role", "RoleBinding"))]
    assert {one["metadata"]["name"] for one in rights} <= {"regraft-dispatcher"}
    assert not [one for one in rights if one["kind"].startswith("Cluster")]


def test_every_container_says_what_it_needs_and_how_far_it_may_go(manifests: list[dict[str, Any]]) -> None:
    for pod in pods(manifests):
        for container in pod.containers:
            for bound in ("requests", "limits"):
                assert {"cpu", "memory"} <= container["resources"][bound].keys(), pod.name


def test_folders_reserve_no_disk(manifests: list[dict[str, Any]]) -> None:
    """Their size limits bound a fault. As requests, those of the demo would need 97 GiB of a node."""
    for pod in pods(manifests):
        for container in pod.containers:
            assert "ephemeral-storage" not in container["resources"]["requests"], pod.name


def test_folders_reserve_disk_by_choice() -> None:
    manifests = render(profile("production", diskRequests=True))
    requests = {
        pod.name: pod.spec["containers"][0]["resources"]["requests"].get("ephemeral-storage")
        for pod in pods(manifests)
    }

    # /data, /tmp and the cache, of 1, 20 and 20 GiB; shared memory is memory.
    assert requests["ScaledJob/regraft-worker-h100"] == "44024M"
    assert requests["Deployment/regraft-api"] == "11812M"


@pytest.mark.parametrize("choice", [False, True])
def test_a_request_for_disk_that_is_named_is_kept(choice: bool) -> None:
    resources = {
        "requests": {"cpu": 1, "memory": "1Gi", "ephemeral-storage": "5Gi"},
        "limits": {"cpu": 1, "memory": "1Gi"},
    }
    values = profile("production", api={"resources": resources}, diskRequests=choice)
    [api] = pods(render(values), "api")

    assert api.containers[0]["resources"]["requests"]["ephemeral-storage"] == "5Gi"


def test_no_disk_is_requested_above_the_limit_of_the_container() -> None:
    """Kubernetes would refuse the pod. Without a request, it takes the limit."""
    resources = {
        "requests": {"cpu": 1, "memory": "1Gi"},
        "limits": {"cpu": 1, "memory": "1Gi", "ephemeral-storage": "5Gi"},
    }
    [api] = pods(render(profile("production", api={"resources": resources}, diskRequests=True)), "api")

    assert "ephemeral-storage" not in api.containers[0]["resources"]["requests"]


def test_every_container_that_stays_is_probed(manifests: list[dict[str, Any]]) -> None:
    for pod in pods(manifests):
        for container in pod.spec["containers"] if pod.owner["kind"] not in ("Job", "Pod") else ():
            assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys(), pod.name


def test_every_folder_in_a_pod_has_a_bound(manifests: list[dict[str, Any]]) -> None:
    for pod in pods(manifests):
        for volume in pod.spec["volumes"]:
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""}), f"{pod.name} {volume['name']}"


def test_every_image_is_pinned(manifests: list[dict[str, Any]]) -> None:
    for pod in pods(manifests):
        for container in pod.containers:
            name, _, tag = container["image"].rpartition(":")
            assert name and tag not in ("", "latest") and "/" not in tag, container["image"]


SECRET = ("KEY", "PASSWORD", "TOKEN", "SECRET", "DATABASE_URL", "BROKER_URL")


def test_no_secret_is_written_into_a_pod(manifests: list[dict[str, Any]]) -> None:
    seen = 0
    for pod in pods(manifests):
        for variable in (one for container in pod.containers for one in container.get("env", [])):
            if any(word in variable["name"] for word in SECRET):
                assert "value" not in variable, f"{pod.name} {variable['name']}"
                seen += 1
    assert seen >= 4


def test_the_passwords_that_the_chart_makes_are_nowhere_but_in_their_secret() -> None:
    manifests = render(profile("cpu-demo"))
    [secret] = of_kind(manifests, "Secret")
    made = [
        secret["stringData"][key]
        for key in ("postgres-password", "valkey-password", "AWS_SECRET_ACCESS_KEY", "first-key")
    ]
    elsewhere = [text for one in manifests if one is not secret for text in strings(one)]

    assert all(len(password) == 32 for password in made) and len(set(made)) == 4
    assert not [text for text in elsewhere for password in made if password in text]
    assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


@pytest.mark.parametrize("name", ["cpu-demo", "production"])
def test_only_the_api_has_the_first_key_and_only_from_a_secret(name: str) -> None:
    manifests = render(profile(name))
    holders = {
        one["metadata"]["name"] for one in manifests for text in strings(one) if text == "REGRAFT_FIRST_KEY"
    }

    assert holders == {"regraft-api"}


def test_the_migration_makes_no_key_and_leaves_no_job_behind() -> None:
    [job] = of_kind(render(profile("production")), "Job")

    assert job["spec"]["template"]["spec"]["containers"][0]["command"] == [
        "regraft-server",
        "migrate",
        "--schema-only",
    ]
    assert job["metadata"]["annotations"]["helm.sh/hook-delete-policy"].split(",") == [
        "before-hook-creation",
        "hook-succeeded",
    ]
    assert job["spec"]["ttlSecondsAfterFinished"] <= 3600


def test_with_servers_of_your_own_the_chart_makes_no_secret() -> None:
    assert of_kind(render(profile("production")), "Secret") == []


def allowed(manifests: list[dict[str, Any]], component: str) -> Any:
    """The one policy of all of a component's pods."""
    [policy] = [
        one
        for one in of_kind(manifests, "NetworkPolicy")
        if one["spec"]["podSelector"]["matchLabels"].get("app.kubernetes.io/component") == component
        and "regraft.dev/pool" not in one["spec"]["podSelector"]["matchLabels"]
    ]
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    return policy["spec"]


@pytest.mark.parametrize("name", [name for name in VARIATIONS if "without policies" not in name])
def test_every_pod_is_under_a_policy_that_names_whom_it_reaches(name: Any) -> None:
    manifests = render(VARIATIONS[name])
    for component in {pod.component for pod in pods(manifests)}:
        for rule in allowed(manifests, component).get("egress", ()):
            assert rule.get("to"), f"{component} may reach everybody"
            assert rule.get("ports"), f"{component} may use every port"


def reached(policy: dict[str, Any]) -> list[Any]:
    """Every door that a policy leaves open: a part of the chart or an address, and the port."""
    return [
        (
            peer["ipBlock"]["cidr"]
            if "ipBlock" in peer
            else peer["podSelector"]["matchLabels"].get("app.kubernetes.io/component", "dns"),
            rule["ports"][0]["port"],
        )
        for rule in policy["egress"]
        for peer in rule["to"]
    ]


# A python grader is a process in these pods: when it is validated or trained with, and when somebody tries it out.
GRADING = ["worker", "api"]


@pytest.mark.parametrize("component", GRADING)
def test_pods_where_graders_run_reach_database_broker_store_and_names_only(component: str) -> None:
    assert reached(allowed(render(profile("cpu-demo")), component)) == [
        ("dns", 53),
        ("postgresql", 5432),
        ("valkey", 6379),
        ("inference", 8100),
        ("seaweedfs", 8333),
        *([("worker", 32768)] if component == "api" else []),
    ]


@pytest.mark.parametrize("component", GRADING)
def test_in_production_they_reach_the_servers_that_the_operator_named_and_what_they_let_out(
    component: str,
) -> None:
    more = {"to": [{"ipBlock": {"cidr": "10.9.9.9/32"}}], "ports": [{"port": 8443}]}
    values = profile("production", networkPolicy={f"{component}Egress": [more]})

    assert reached(allowed(render(values), component)) == [
        ("dns", 53),
        ("10.0.3.0/24", 5432),
        ("10.0.4.0/24", 6379),
        ("inference", 8100),
        ("10.0.5.0/24", 443),
        *([("worker", 32768)] if component == "api" else []),
        ("10.9.9.9/32", 8443),
    ]


def test_only_workers_and_inference_reach_a_sampler_and_it_reaches_the_store() -> None:
    manifests = render(VARIATIONS["fleets"])
    policy = allowed(manifests, "sampler-small")

    [port] = [rule for rule in policy["ingress"] if rule["ports"][0]["port"] == 8300]
    peers = [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in port["from"]]
    assert peers == ["worker", "inference"]
    assert reached(policy) == [("dns", 53), ("10.0.5.0/24", 443)]
    for client in peers:
        assert {("sampler-small", 8300), ("sampler-large", 8300)} <= set(reached(allowed(manifests, client)))
    assert not any(port == 8300 for _, port in reached(allowed(manifests, "api")))


def test_dns_is_open_on_the_ports_of_its_pods_which_network_policies_see() -> None:
    """OpenShift's Service maps 53 to 5353."""
    for policy in of_kind(render(profile("production")), "NetworkPolicy"):
        asked = {(one["port"], one["protocol"]) for one in policy["spec"]["egress"][0]["ports"]}
        assert asked == {(port, protocol) for port in (53, 5353) for protocol in ("UDP", "TCP")}


def names_of(manifests: list[dict[str, Any]], component: str) -> dict[str, list[str]]:
    """The names that Cilium lets a component reach, by port. It also reads the answers of DNS for them."""
    [policy] = [
        one
        for one in of_kind(manifests, "CiliumNetworkPolicy")
        if one["spec"]["endpointSelector"]["matchLabels"]["app.kubernetes.io/component"] == component
    ]
    dns, *rules = policy["spec"]["egress"]
    assert dns["toEndpoints"][0]["matchLabels"]["k8s:k8s-app"] == "kube-dns"
    assert dns["toPorts"][0]["rules"] == {"dns": [{"matchPattern": "*"}]}
    return {
        port["port"]: [next(iter(name.values())) for name in rule["toFQDNs"]]
        for rule in rules
        for ports in rule["toPorts"]
        for port in ports["ports"]
    }


def test_with_cilium_pods_reach_by_name_what_the_values_name() -> None:
    manifests = render(VARIATIONS["names"])
    store = ["example-regraft.s3.eu-central-1.amazonaws.com", "s3.eu-central-1.amazonaws.com"]
    hub = ["huggingface.co", "*.huggingface.co", "*.hf.co", "*.*.hf.co", "*.*.*.hf.co"]
    graders = ["judge.example.com", "*.graders.example.com"]

    found = {component: names_of(manifests, component) for component in ("api", "worker", "inference")}
    for ports in found.values():
        ports["443"].sort()
    assert found == {
        "api": {"443": sorted([*store, *graders])},
        "worker": {
            "443": sorted([*store, *graders, *hub, "hooks.example.com"]),
            "8443": ["*.hooks.example.com"],
        },
        "inference": {"443": sorted([*store, *hub])},
    }


def test_with_cilium_no_rule_without_names_lets_answers_of_dns_pass_unread_or_opens_the_store_to_all() -> (
    None
):
    manifests = render(VARIATIONS["names"])
    for component in ("api", "worker", "inference"):
        rules = allowed(manifests, component).get("egress", [])
        ports = {port["port"] for rule in rules for port in rule["ports"]}
        inside = {"api": {5432, 6379, 8100, 32768}, "worker": {5432, 6379, 8100}, "inference": set[int]()}
        assert ports == inside[component], component
    assert "dns" in [peer for peer, _ in reached(allowed(manifests, "migrate"))]


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"objectStore": {"existingSecret": ""}}, "sts.eu-central-1.amazonaws.com"),
        ({"objectStore": {"endpointUrl": "https://s3.example.com:9000"}}, "s3.example.com"),
        ({"extraEnv": {"HF_ENDPOINT": "https://hub.example.com"}}, "hub.example.com"),
        ({"settings": {"otlp_endpoint": "http://traces.example.com:4318"}}, "traces.example.com"),
        ({"extraEnv": {"HTTPS_PROXY": "http://proxy.example.com:3128"}}, "proxy.example.com"),
        (
            {"inference": {"enabled": False, "url": "https://models.example.com/v1"}},
            "models.example.com",
        ),
    ],
)
def test_with_cilium_a_name_follows_the_value_that_uses_it(values: dict[str, Any], names: str) -> None:
    before, after = (names_of(render(merged(VARIATIONS["names"], one)), "worker") for one in ({}, values))

    assert names not in [one for ports in before.values() for one in ports]
    assert names in [one for ports in after.values() for one in ports]


def test_the_store_needs_its_addresses_or_a_name() -> None:
    values = merged(VARIATIONS["names"], {"objectStore": {"region": ""}})
    with pytest.raises(helm.HelmError, match=r"networkPolicy\.objectStore\.to: list its peers"):
        render(values)
    with pytest.raises(helm.HelmError, match=r"networkPolicy\.cilium\.enabled"):
        render(merged(VARIATIONS["names"], {"networkPolicy": {"enabled": False}}))


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://minio.storage.svc.cluster.local:9000",
        "http://minio.storage.svc",
        "http://minio:9000",
        "http://10.1.2.3:9000",
    ],
)
def test_a_store_in_the_cluster_needs_its_peers_also_with_cilium(endpoint: str) -> None:
    with pytest.raises(helm.HelmError, match=r"networkPolicy\.objectStore\.to: list its peers"):
        render(merged(VARIATIONS["names"], {"objectStore": {"endpointUrl": endpoint}}))


class Sent(Exception):
    """A request that a client would have sent."""


@pytest.mark.parametrize(
    "region",
    [
        "us-east-1",
        "us-west-2",
        "eu-central-1",
        "cn-north-1",
        "us-gov-west-1",
        "eusc-de-east-1",
    ],
)
def test_with_cilium_pods_reach_the_hosts_to_which_our_client_of_the_store_connects(
    region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")

    def refuse(request: Any, **_: Any) -> None:
        raise Sent(request.url)

    def host_of(bucket: str) -> str | None:
        client = s3_client(None, region, "when_required")
        client.meta.events.register("before-send.s3", refuse)
        with pytest.raises(Sent) as sent:
            client.put_object(Bucket=bucket, Key="key", Body=b"")
        return urlsplit(str(sent.value)).hostname

    roles = boto3.Session().client("sts", region_name=region).meta.endpoint_url
    for bucket in ("mine", "mine.with.dots"):
        values = {"objectStore": {"bucket": bucket, "region": region, "existingSecret": ""}}
        names = names_of(render(merged(VARIATIONS["names"], values)), "inference")["443"]
        assert {host_of(bucket), urlsplit(roles).hostname} <= set(names)


def test_with_cilium_pods_reach_the_servers_from_which_the_hub_sends_weights() -> None:
    names = names_of(render(VARIATIONS["names"]), "worker")["443"]
    # Cilium's `*` stands for no dot.
    patterns = [name.replace(".", "[.]").replace("*", "[-a-zA-Z0-9_]*") for name in names]
    for host in (
        "huggingface.co",
        "cdn-lfs.huggingface.co",
        "cdn-lfs-us-1.hf.co",
        "transfer.xethub.hf.co",
        "cas-server.xethub.hf.co",
        "us.aws.cdn.hf.co",
    ):
        assert any(re.fullmatch(pattern, host) for pattern in patterns), host


def test_with_cilium_other_labels_of_dns_replace_the_default() -> None:
    labels = {"k8s:io.kubernetes.pod.namespace": "openshift-dns"}
    values = merged(VARIATIONS["names"], {"networkPolicy": {"cilium": {"dns": [labels]}}})

    for policy in of_kind(render(values), "CiliumNetworkPolicy"):
        assert policy["spec"]["egress"][0]["toEndpoints"] == [{"matchLabels": labels}]


def test_with_cilium_samplers_reach_no_collector_because_they_have_no_traces() -> None:
    cilium = {"networkPolicy": {"cilium": {"enabled": True}}}
    traces = {
        "settings": {"otlp_endpoint": "https://traces.example.com"},
        "objectStore": {"region": "eu-central-1"},
    }
    manifests = render(merged(merged(VARIATIONS["fleets"], cilium), traces))

    assert "traces.example.com" in names_of(manifests, "inference")["443"]
    assert "traces.example.com" not in names_of(manifests, "sampler-small")["443"]


def test_with_cilium_the_dispatcher_reaches_the_kubernetes_api_which_no_rule_for_addresses_opens() -> None:
    values = merged(
        VARIATIONS["dispatched"],
        {"networkPolicy": {"cilium": {"enabled": True}, "kubernetesApi": {"to": [], "port": 8443}}},
    )
    manifests = render(values)
    [policy] = [
        one
        for one in of_kind(manifests, "CiliumNetworkPolicy")
        if one["metadata"]["name"].endswith("-dispatcher")
    ]

    [rule] = policy["spec"]["egress"]
    assert rule["toEntities"] == ["kube-apiserver"]
    assert [one["port"] for one in rule["toPorts"][0]["ports"]] == ["443", "6443", "8443"]
    assert [port for _, port in reached(allowed(manifests, "dispatcher"))] == [53, 5432]


NAMED = {"apiNames": "networkPolicy.cilium.apiNames", "workerNames": "networkPolicy.cilium.workerNames"}


@pytest.mark.parametrize(
    "name",
    [
        "a..b.com",
        "g?.example.com",
        "[a-z].example.com",
        "hooks.example.com:0",
        "hooks.example.com:99999",
        "10.2.3.4:443",
        "a.svc",
        "a.models.svc.cluster.local",
        "localhost",
    ],
)
@pytest.mark.parametrize("value", NAMED)
def test_names_that_cilium_does_not_match_are_refused(value: str, name: str) -> None:
    values = merged(VARIATIONS["names"], {"networkPolicy": {"cilium": {value: [name]}}})
    with pytest.raises(helm.HelmError, match=re.escape(f"{NAMED[value]}: {name} ")):
        render(values)


@pytest.mark.parametrize("host", ["*", "g?.example.com", "[a-z].example.com"])
def test_hosts_of_graders_that_cilium_does_not_match_are_refused_with_it(host: str) -> None:
    values = merged(VARIATIONS["names"], {"graders": {"endpointHosts": [host]}})
    with pytest.raises(helm.HelmError, match=re.escape(f"graders.endpointHosts: {host} ")):
        render(values)
    render(merged(profile("production"), {"graders": {"endpointHosts": [host]}}))


def test_a_name_with_svc_within_it_is_outside_the_cluster() -> None:
    names = {"workerNames": ["a.svc.example.com"]}
    values = merged(VARIATIONS["names"], {"networkPolicy": {"cilium": names}})

    assert "a.svc.example.com" in names_of(render(values), "worker")["443"]


def test_names_without_cilium_are_refused() -> None:
    values = profile("production", networkPolicy={"cilium": {"workerNames": ["hooks.example.com"]}})
    with pytest.raises(helm.HelmError, match=r"workerNames: .* set networkPolicy\.cilium\.enabled"):
        render(values)


@pytest.mark.parametrize("component", ["api", "worker", "inference", "samplers"])
def test_annotations_for_an_account_that_the_chart_does_not_create_are_refused(component: str) -> None:
    account = {"name": "ours", "annotations": {"eks.amazonaws.com/role-arn": "arn"}}
    with pytest.raises(helm.HelmError, match=rf"{component}\.serviceAccount\.annotations: .* ours"):
        render(profile("production", **{component: {"serviceAccount": account}}))


def test_only_the_api_reaches_a_worker_at_the_port_that_a_run_chose() -> None:
    manifests = render(profile("cpu-demo"))
    chosen = [{"port": 32768, "endPort": 60999, "protocol": "TCP"}]
    [entry] = allowed(manifests, "worker")["ingress"]
    ways = [rule for rule in allowed(manifests, "api")["egress"] if rule["ports"] == chosen]
    [api], [worker, *_] = pods(manifests, "api"), pods(manifests, "worker")

    assert entry["ports"] == chosen
    [caller], [[called]] = entry["from"], [way["to"] for way in ways]
    assert caller["podSelector"]["matchLabels"].items() <= api.labels.items()
    assert called["podSelector"]["matchLabels"].items() <= worker.labels.items()
    [host] = [one for one in worker.containers[0]["env"] if one["name"] == "REGRAFT_EPISODES_HOST"]
    assert host["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_what_a_policy_would_let_through_a_grader_is_refused_by_itself() -> None:
    """The pod has to reach its database, so the first fence is another: tests/graders/test_sandbox_attacks.py."""
    assert {"open a socket", "send a datagram", "open a socket by its number"} <= ATTACKS.keys()


def test_the_pods_of_a_pool_with_groups_reach_each_other_and_are_reached_by_no_others() -> None:
    manifests = render(VARIATIONS["groups"])
    policies = [
        one["spec"]
        for one in of_kind(manifests, "NetworkPolicy")
        if "regraft.dev/pool" in one["spec"]["podSelector"]["matchLabels"]
    ]

    assert [one["podSelector"]["matchLabels"]["regraft.dev/pool"] for one in policies] == ["group", "pair"]
    for policy in policies:
        ours = policy["podSelector"]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        assert policy["ingress"] == [{"from": [{"podSelector": ours}]}]
        assert policy["egress"] == [{"to": [{"podSelector": ours}]}]
        [pod] = [pod for pod in pods(manifests) if ours["matchLabels"].items() <= pod.labels.items()]
        assert pod.owner["kind"] == "ScaledJob"


def test_keda_reads_the_metrics_of_the_api_and_no_database() -> None:
    manifests = render(profile("production"))
    [rule] = [one for one in allowed(manifests, "api")["ingress"] if "keda" in json.dumps(one)]
    [api] = pods(manifests, "api")
    [port] = [one for one in api.containers[0]["ports"] if one["name"] == "metrics"]

    assert [one["port"] for one in rule["ports"]] == [port["containerPort"]]
    demo = render(profile("cpu-demo"))
    assert not [text for one in demo for text in strings(one) if text == "keda"]


def test_the_migration_reaches_the_database_only() -> None:
    policy = allowed(render(profile("production")), "migrate")

    assert [rule["ports"][0]["port"] for rule in policy["egress"]] == [53, 5432]


@pytest.mark.parametrize("name", ["cpu-demo", "production"])
def test_the_policy_of_the_migration_is_there_before_it(name: str) -> None:
    manifests = render(profile(name))
    [job] = of_kind(manifests, "Job")
    [policy] = [
        one for one in of_kind(manifests, "NetworkPolicy") if one["metadata"]["name"].endswith("-migrate")
    ]
    ours, its = policy["metadata"]["annotations"], job["metadata"]["annotations"]

    assert ours["helm.sh/hook"] == its["helm.sh/hook"]
    assert int(ours["helm.sh/hook-weight"]) < 0
    assert ours["helm.sh/hook-delete-policy"] == its["helm.sh/hook-delete-policy"]


@pytest.mark.parametrize("name", ["cpu-demo", "production"])
def test_helm_test_creates_a_pod_and_its_policy_which_no_installation_has(name: str) -> None:
    ours = [one for one in render(profile(name)) if one["metadata"]["name"] == "regraft-test"]

    assert sorted(one["kind"] for one in ours) == ["NetworkPolicy", "Pod"]
    for one in ours:
        annotations = one["metadata"]["annotations"]
        assert annotations["helm.sh/hook"] == "test"
        assert annotations["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"


def test_the_pod_of_helm_test_reaches_the_api_only_which_lets_it_in() -> None:
    manifests = render(profile("production"))
    [pod] = pods(manifests, "test")
    [port] = [rule for rule in allowed(manifests, "api")["ingress"] if rule["ports"][0]["port"] == 8000]
    peers = [peer["podSelector"]["matchLabels"] for peer in port["from"] if "podSelector" in peer]

    assert reached(allowed(manifests, "test")) == [("dns", 53), ("api", 8000)]
    assert "ingress" not in allowed(manifests, "test")  # so that nothing reaches it
    assert [peer.items() <= pod.labels.items() for peer in peers] == [True]


def test_servers_of_the_demo_reach_nobody_and_are_reached_by_the_service_only() -> None:
    manifests = render(profile("cpu-demo"))
    for component in ("postgresql", "valkey", "seaweedfs"):
        policy = allowed(manifests, component)
        assert "egress" not in policy
        assert all(rule["from"] for rule in policy["ingress"])


def test_what_production_lets_out_leads_to_no_private_address() -> None:
    rules = allowed(render(profile("production")), "worker")["egress"]
    wide = [
        peer["ipBlock"]
        for rule in rules
        for peer in rule["to"]
        if peer.get("ipBlock", {}).get("cidr") == "0.0.0.0/0"
    ]

    assert len(wide) == 1
    assert {"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"} <= set(wide[0]["except"])


def test_only_the_api_has_the_key_of_passports_and_only_if_a_secret_is_named() -> None:
    def holders(**values: Any) -> set[str]:
        manifests = render(profile("production", **values))
        return {
            one["metadata"]["name"]
            for one in manifests
            for text in strings(one)
            if text == "REGRAFT_PASSPORT_KEY"
        }

    assert holders() == set()
    assert holders(passportKey={"existingSecret": "regraft-passport-key"}) == {"regraft-api"}
