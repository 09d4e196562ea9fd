"""What Prometheus and Grafana get from the chart: it leads to pods that can be scraped and to numbers that exist."""

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from api.http import request_metrics as _requests  # noqa: F401 - it makes the API's
from core.database.engine import Database
from core.service.service_metrics import ServiceCollector, StoreCollector
from core.settings import Settings
from core.storage.disk import Disks
from core.storage.store import FolderBlobs
from core.telemetry.metrics import COUNTED
from tests import factories
from tests.helm.charts import CHART, ROOT, VARIATIONS, helm, merged, of_kind, pods, profile, render
from tests.helm.test_policy import allowed
from tests.helm.test_service import environment
from tests.present import untyped
from worker import instruments
from worker.dispatch.templates import JobTemplate
from worker.serving import serving_metrics
from worker.telemetry import Gpus, Runs, Sandbox

RULES = CHART / "files/rules.yaml"
RELEASE = "regraft"  # its name in the labels
DASHBOARD = CHART / "files/dashboard.json"
# What the library itself brings, or a rule of the chart records.
OTHERS = {"process_resident_memory_bytes", "regraft_max_pods"}


@pytest.fixture
def watched() -> list[dict[str, Any]]:
    return render(VARIATIONS["watched"])


class TwoGpus(Gpus):
    def _ask(self) -> str:
        return "0, 1, 2, 3\n1, 1, 2, 3"


@pytest.fixture
def exported(sqlite_database: Database, tmp_path: Path) -> set[Any]:
    """Every metric of API, workers and runs, by the names that it has in expressions."""
    with sqlite_database.write() as session:
        factories.job(session, factories.project(session))
    serving_metrics.Tally(0.0, "tiny", answers=1).ended("answered")
    collectors = [
        COUNTED,
        instruments.COUNTED,
        ServiceCollector(sqlite_database, patience=60),
        StoreCollector(FolderBlobs(tmp_path), patience=60),
        TwoGpus(),
        Runs("cpu"),
        Disks(Settings(data_dir=tmp_path)),
    ]
    ends = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"], "gauge": [""]}
    return {
        family.name + end
        for collector in [*collectors, Sandbox("regraft_sandbox")]
        for family in untyped(collector).collect()
        for end in ends[family.type]
    }


def expressions() -> tuple[list[Any], list[Any]]:
    rules = [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return rules, [target["expr"] for panel in panels for target in panel.get("targets", [])]


def test_alerts_and_panels_ask_for_nothing_but_what_is_exported(exported: set[Any]) -> None:
    rules, panels = expressions()
    asked = {name for one in [*rules, *panels] for name in re.findall(r"\b(?:regraft|process)_\w+", one)}

    assert len(rules) > 8 and len(panels) > 20
    assert asked - OTHERS - exported == set()


def test_the_dashboard_shows_everything_that_is_exported(exported: set[Any]) -> None:
    _, panels = expressions()
    shown = set(re.findall(r"\bregraft_\w+", " ".join(panels)))
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exported}

    assert families - {re.sub(r"_(bucket|count|sum)$", "", name) for name in shown} == set()


def test_the_chart_ships_the_dashboard_as_it_is(watched: list[dict[str, Any]]) -> None:
    [dashboard] = [one for one in of_kind(watched, "ConfigMap") if "regraft.json" in one["data"]]

    assert json.loads(dashboard["data"]["regraft.json"]) == json.loads(DASHBOARD.read_text())
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"


def rules_of(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    [rule] = of_kind(manifests, "PrometheusRule")
    return [one for group in rule["spec"]["groups"] for one in group["rules"] if "alert" in one]


def test_alerts_know_how_many_pods_each_pool_of_jobs_may_have(watched: list[dict[str, Any]]) -> None:
    [rule] = of_kind(watched, "PrometheusRule")
    pools = [pool for pool in VARIATIONS["watched"]["workers"] if "maxReplicas" in pool]

    [recorded] = [group["rules"] for group in rule["spec"]["groups"] if group["name"] == "regraft-pools"]
    assert recorded == [
        {
            "record": "regraft_max_pods",
            "expr": f"vector({pool['maxReplicas']})",
            "labels": {
                "namespace": "training",
                "regraft_release": RELEASE,
                "gpu_class": pool["gpuClass"],
            },
        }
        for pool in pools
    ]


def test_a_pool_of_the_dispatcher_whose_projects_have_used_up_their_quotas_is_no_outage() -> None:
    dispatched = {name: VARIATIONS["dispatched"][name] for name in ("dispatcher", "networkPolicy")}
    [rule] = of_kind(render(VARIATIONS["watched"] | dispatched), "PrometheusRule")

    assert "record" not in {key for group in rule["spec"]["groups"] for one in group["rules"] for key in one}


def selected(expression: str, of: str = "regraft") -> set[str]:
    """What each metric is selected by."""
    return set(re.findall(rf"\b(?:{of})_(?!release)\w+({{[^}}]*}}?)?", expression))


def test_two_releases_page_once_each_also_in_one_namespace(watched: list[dict[str, Any]]) -> None:
    by_release = f'{{namespace="training",regraft_release="{RELEASE}"'
    monitors = of_kind(watched, "ServiceMonitor") + of_kind(watched, "PodMonitor")
    endpoints = [
        one for monitor in monitors for key in monitor["spec"] if key.lower().endswith("endpoints")
        for one in monitor["spec"][key]
    ]  # fmt: skip

    assert all(
        one["relabelings"] == [{"targetLabel": "regraft_release", "replacement": RELEASE}]
        for one in endpoints
    )
    assert len(endpoints) == len(monitors)
    for rule in rules_of(watched):
        assert all(one.startswith(by_release) for one in selected(rule["expr"])), rule["alert"]
        others = selected(rule["expr"], of="kube|keda")  # exported by others, who know no release
        assert all(re.match(r'{namespace="training"[,}]', one) for one in others), rule["alert"]
        assert others or selected(rule["expr"]), rule["alert"]


def test_without_monitors_alerts_are_about_the_metrics_of_their_namespace() -> None:
    rules = rules_of(render(profile("production", metrics={"enabled": True, "rules": {"enabled": True}})))

    for rule in rules:
        assert all(re.match(r'{namespace="training"[,}]', one) for one in selected(rule["expr"])), rule[
            "alert"
        ]
        assert "regraft_release" not in rule["expr"]


def test_each_alert_names_its_runbook(watched: list[dict[str, Any]]) -> None:
    rules = rules_of(watched)

    assert [one["alert"] for one in rules] == [
        one["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for one in group["rules"]
    ]
    for one in rules:
        assert (
            one["annotations"]["runbook_url"]
            == "https://regraft.example.com/docs/howto/observability.html#alerts"
        )
        assert f"`{one['alert']}`" in (ROOT / "docs/howto/observability.md").read_text()


def changed(alerts: dict[str, Any], **values: Any) -> dict[str, dict[str, Any]]:
    """The alerts of a release with these changes, by name."""
    given = profile("production", metrics={"rules": {"enabled": True, "alerts": alerts}}, **values)
    return {one["alert"]: one for one in rules_of(render(given))}


def test_the_runbook_is_at_the_host_of_the_gateway() -> None:
    metrics = {"enabled": True, "rules": {"enabled": True}}
    alerts = [
        rule
        for rule in rules_of(render(merged(VARIATIONS["gateway"], {"metrics": metrics})))
        if "alert" in rule
    ]

    assert alerts
    for rule in alerts:
        address = "https://regraft.example.com/docs/howto/observability.html#alerts"
        assert rule["annotations"]["runbook_url"] == address


@pytest.mark.parametrize(
    ("pod", "own"),
    [
        ("regraft-api-6c9f-x2", True),
        ("regraft-worker-h100-x7k2p-0-abc", True),
        ("regraft-postgresql-0", True),
        ("regraft-b-api-6c9f-x2", False),
        ("regraft-staging-worker-h100-x7k2p-abc", False),
    ],
)
def test_pods_of_another_release_whose_name_begins_alike_page_nobody(
    watched: list[dict[str, Any]], pod: str, own: bool
) -> None:
    [rule] = [one for one in rules_of(watched) if one.get("alert") == "RegraftPodPending"]
    [pattern] = re.findall(r'pod=~"(.*?)"', rule["expr"])

    assert bool(re.fullmatch(pattern, pod)) == own


def test_values_change_the_threshold_the_time_and_the_severity_of_an_alert() -> None:
    before = changed({})
    after = changed({"RegraftApiErrors": {"threshold": 0.2, "for": "1h", "severity": "page"}})

    rule = after["RegraftApiErrors"]
    assert (rule["for"], rule["labels"]["severity"]) == ("1h", "page")
    assert before["RegraftApiErrors"]["expr"].replace("0.072", "0.2") == rule["expr"]
    assert {name for name in before if before[name] != after[name]} == {"RegraftApiErrors"}


def test_values_leave_an_alert_out() -> None:
    assert changed({}).keys() - changed({"RegraftWorkerIdle": {"enabled": False}}).keys() == {
        "RegraftWorkerIdle"
    }


@pytest.mark.parametrize(
    ("alerts", "message"),
    [
        ({"RegraftQueueOdl": {"threshold": 1}}, "no alert is named RegraftQueueOdl"),
        ({"RegraftNoWorker": {"threshold": 1}}, "RegraftNoWorker.threshold: this alert has no threshold"),
    ],
)
def test_a_change_of_no_alert_or_of_no_threshold_is_refused(alerts: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError, match=message):
        changed(alerts)


def test_a_group_without_alerts_is_left_out() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    [cluster] = [group["rules"] for group in groups if group["name"] == "regraft-cluster"]
    alerts = {rule["alert"]: {"enabled": False} for rule in cluster}
    given = profile("production", metrics={"rules": {"enabled": True, "alerts": alerts}})

    [rule] = of_kind(render(given), "PrometheusRule")

    assert "regraft-cluster" not in [group["name"] for group in rule["spec"]["groups"]]
    assert all(group["rules"] for group in rule["spec"]["groups"])


def names_of(manifests: list[dict[str, Any]]) -> dict[str, set[str]]:
    """The names of the release's objects, by the labels that kube-state-metrics gives them."""
    jobs = dispatched(manifests)
    owners = {pod.owner["metadata"]["name"] for pod in pods(manifests) if pod.component != "test"}
    owners |= {job["metadata"]["name"] for job in jobs}
    return {
        "pod": {f"{name}-x7k2p" for name in owners},
        "job_name": {job["metadata"]["name"] for job in of_kind(manifests, "Job")},
    }


def dispatched(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A Job of the dispatcher for each of its templates."""
    texts = [
        text
        for config in of_kind(manifests, "ConfigMap")
        if config["metadata"]["name"].endswith("-dispatcher")
        for text in config["data"].values()
    ]
    return [
        JobTemplate.model_validate_json(text).manifest_of("ftjob-Ab1", 0, "proj_1", None) for text in texts
    ]


@pytest.mark.parametrize("variation", ["watched", "dispatched"])
@pytest.mark.parametrize("name", ["regraft", "trainer"])
def test_every_name_in_an_alert_is_that_of_an_object_of_the_release(variation: str, name: str) -> None:
    rules = {"metrics": {"rules": {"enabled": True}}, "fullnameOverride": name}
    manifests = render(merged(VARIATIONS[variation], rules))
    names = names_of(manifests)
    patterns = {
        (label, pattern)
        for rule in rules_of(manifests)
        for label, pattern in re.findall(r'(pod|job_name|deployment|scaledObject)=~?"([^"]*)"', rule["expr"])
    }

    assert {label for label, _ in patterns} == {"pod", "job_name"}
    assert bool(dispatched(manifests)) == (variation == "dispatched")
    for label, pattern in patterns:
        assert all(re.fullmatch(pattern, one) for one in names[label]), (pattern, names[label])
        assert not re.fullmatch(pattern, "other-x7k2p")


def test_monitors_lead_to_a_port_at_which_the_service_listens(watched: list[dict[str, Any]]) -> None:
    [monitor], pod_monitors = of_kind(watched, "ServiceMonitor"), of_kind(watched, "PodMonitor")
    [service] = [
        one
        for one in of_kind(watched, "Service")
        if monitor["spec"]["selector"]["matchLabels"].items() <= one["metadata"]["labels"].items()
    ]
    apis = [pod for pod in pods(watched) if service["spec"]["selector"].items() <= pod.labels.items()]
    others = [
        pod
        for pod in pods(watched)
        for one in pod_monitors
        if one["spec"]["selector"]["matchLabels"].items() <= pod.labels.items()
    ]

    assert [pod.component for pod in apis] == ["api"]
    assert Counter(pod.component for pod in others) == {"worker": 3, "inference": 1}
    for pod in apis + others:
        [port] = [one for one in pod.containers[0]["ports"] if one["name"] == "metrics"]
        variables = environment(pod)
        assert str(port["containerPort"]) == variables["REGRAFT_METRICS_PORT"] == "9200"
        assert variables["REGRAFT_HOST"] == "0.0.0.0"
    for one in (monitor, *pod_monitors, *of_kind(watched, "PrometheusRule")):
        assert one["metadata"]["labels"]["release"] == "prometheus"


@pytest.mark.parametrize("component", ["api", "worker", "inference"])
def test_prometheus_is_let_in_and_nobody_else(watched: list[dict[str, Any]], component: str) -> None:
    [rule, *others] = [
        one for one in allowed(watched, component)["ingress"] if one["ports"][0]["port"] == 9200
    ]

    assert rule["from"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    ]
    assert len(others) == (component == "api"), "KEDA reads the queues there"


def test_by_default_there_is_no_such_port() -> None:
    manifests = render(profile("cpu-demo"))

    assert not [one for one in manifests if one["apiVersion"].startswith("monitoring.coreos.com")]
    for pod in pods(manifests, "api") + pods(manifests, "worker") + pods(manifests, "inference"):
        assert "REGRAFT_METRICS_PORT" not in environment(pod)
        assert "metrics" not in [port["name"] for port in pod.containers[0].get("ports", [])]


PROMTOOL = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool comes with Prometheus (apt-get install prometheus)"
)


def promtool(*words: str, **options: Any) -> Any:
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@PROMTOOL
def test_promtool_takes_the_alerts_and_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    assert f"{len(expressions()[0])} rules found" in promtool("check", "rules", str(RULES))

    panels = []
    for one in expressions()[1]:
        for variable, value in (("$__rate_interval", "2m"), ("$namespace", ".*"), ("$gpu_class", ".*")):
            one = one.replace(variable, value)
        panels.append(one)
    recorded = [{"record": f"panel:{n}", "expr": one} for n, one in enumerate(panels)]
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    assert f"{len(panels)} rules found" in promtool("check", "rules", str(file))


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_route_that_generates_is_not_called_slow(route: str) -> None:
    [slow] = [rule for rule in expressions()[0] if "histogram_quantile" in rule]
    [excluded] = re.findall(r'route!~"([^"]+)"', slow)

    assert re.fullmatch(excluded, route)
    assert not re.fullmatch(excluded, "/v1/fine_tuning/jobs")


@PROMTOOL
def test_promtool_takes_the_alerts_of_a_release(watched: list[dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "release", "rules": rules_of(watched)}]}))

    assert f"{len(rules_of(watched))} rules found" in promtool("check", "rules", str(file))


@PROMTOOL
def test_alerts_fire_when_they_should_and_not_before() -> None:
    promtool("test", "rules", "tests/helm/alerts.yaml", cwd=CHART.parents[1])
