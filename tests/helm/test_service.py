"""What the chart starts is this service: its commands, its settings, its files, its tables."""

import argparse
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import prometheus_client
import pytest

from core.database.engine import Database
from core.registry import BaseModelEntry, Registry
from core.service.service_metrics import FRESH_SECONDS
from core.settings import Settings
from graders.backends import Backends, Inference
from helm.generate import OF_POOLS, OWN, settings_schema
from tests.helm.charts import (
    CHART,
    POOL,
    ROOT,
    VARIATIONS,
    Pod,
    hardware_file_of,
    of_kind,
    pods,
    profile,
    render,
)
from tests.present import untyped
from worker.cli.parser import build
from worker.cli.service import service_collectors
from worker.supervisor import liveness
from worker.supervisor.one_shot import claimed_file

BUNDLED = {"postgresql", "valkey", "seaweedfs"}
FLEETS = {"small": "Qwen3-4B", "large": "Qwen3-14B"}


def environment(pod: Pod, secrets: str = "secret" * 6) -> dict[str, Any]:
    """The environment of a pod's container, with the same word for all that comes from Secrets except the broker."""
    stored = {
        "REGRAFT_BROKER_URL": "redis://:secret@valkey:6379/0",
        # Of the second pod of a Job.
        "JOB_NAME": "regraft-worker-group-x7k2p",
        "REGRAFT_NODE_RANK": "1",
    }
    return {
        one["name"]: one.get("value", stored.get(one["name"], secrets)) for one in pod.containers[0]["env"]
    }


@pytest.fixture(params=VARIATIONS)
def ours(request: pytest.FixtureRequest) -> list[Any]:
    manifests = render(VARIATIONS[request.param])
    return [pod for pod in pods(manifests) if pod.component not in BUNDLED | {"test"}]


def test_every_variable_is_one_that_the_service_reads(ours: list[Any]) -> None:
    for pod in ours:
        names = [one["name"] for one in pod.containers[0]["env"]]
        assert len(names) == len(set(names)), pod.name
        unknown = {n for n in names if n.startswith("REGRAFT_")} - {
            f"REGRAFT_{f.upper()}" for f in Settings.model_fields
        }
        assert not unknown, pod.name


def test_the_service_takes_the_environment_as_it_is(ours: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for pod in ours:
        with monkeypatch.context() as patched:
            for name in [one for one in os.environ if one.startswith("REGRAFT_")]:
                patched.delenv(name)
            for name, value in environment(pod).items():
                patched.setenv(name, value.replace("$(JOB_NAME)", environment(pod).get("JOB_NAME", "")))
            assert Settings().data_dir.as_posix() == "/data"


def example(schema: Any) -> Any:
    """A value that the schema of one setting takes, as large as it may be: large numbers are where YAML goes wrong."""
    if "enum" in schema:
        return schema["enum"][-1]
    if "anyOf" in schema:
        return example(schema["anyOf"][-1])
    if schema["type"] == "integer":
        return schema.get("maximum", 123_456_789_012)
    if schema["type"] == "number":
        return min(86400.5, schema.get("maximum", 86400.5))
    if schema["type"] == "array":
        return [example(schema["items"])]
    if schema["type"] == "object":
        return {name: example(of) for name, of in schema["properties"].items()}
    texts = ("text", "EUR", "http://collector:4318", "wandb, trackio")
    return next(text for text in texts if re.search(schema.get("pattern", ""), text))


# Settings whose values have more rules than a JSON schema says.
EXAMPLES: dict[str, Any] = {
    "sso_groups_header": "X-Groups",
    "sso_proxies": ["10.0.0.0/8"],
    "sso_rules": [{"group": "ml", "project": "proj_1", "scope": "operator"}],
}


def test_every_setting_can_be_given_and_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    known = settings_schema()["properties"]
    given = {name: EXAMPLES.get(name) or example(of) for name, of in known.items()}
    proxy = {"apiFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}
    manifests = render(profile("cpu-demo", settings=given, networkPolicy=proxy))
    for component in ("inference", "worker", "api"):
        [pod] = pods(manifests, component)
        for name, value in environment(pod).items():
            monkeypatch.setenv(name, value)
    settings = Settings().model_dump(mode="json", exclude_none=True)

    assert len(given) > 15
    assert {name: settings[name] for name in given} == given
    assert known.keys() | OWN == Settings.model_fields.keys()


def test_a_pool_has_settings_before_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    of_all = {"drain_seconds": 60, "hang_seconds": 50}
    given = {name: example(of) for name, of in settings_schema(OF_POOLS)["properties"].items()}
    pool = POOL | {"settings": given | {"engines": 1}}
    values = profile("cpu-demo", settings=of_all, workers=[pool, *profile("cpu-demo")["workers"]])

    own, other = pods(render(values), "worker")

    assert {name: environment(own)[f"REGRAFT_{name.upper()}"] for name in given}.keys() == set(OF_POOLS)
    assert environment(own)["REGRAFT_HANG_SECONDS"] == "86400.5"
    assert environment(other)["REGRAFT_HANG_SECONDS"] == "50"
    assert own.spec["terminationGracePeriodSeconds"] == 86431
    assert other.spec["terminationGracePeriodSeconds"] == 90


def test_gpus_of_a_pool_that_only_sample_have_no_rank() -> None:
    pool = POOL | {"gpuResource": "nvidia.com/gpu", "gpus": 8, "samplingGpus": 3, "settings": {"engines": 3}}
    values = profile("cpu-demo", workers=[pool, *profile("cpu-demo")["workers"]])

    [split, _] = pods(render(values), "worker")

    variables = environment(split)
    placed = {name: variables[f"REGRAFT_{name}"] for name in ("RANKS", "SAMPLING_GPUS", "ENGINES")}
    assert placed == {"RANKS": "5", "SAMPLING_GPUS": "3", "ENGINES": "3"}
    assert split.containers[0]["resources"]["limits"]["nvidia.com/gpu"] == 8


def parse(words: list[str]) -> argparse.Namespace:
    """A command line as the program's own parser reads it, which ends the process when it does not know it."""
    return build().parse_args(words[1:])


def test_every_command_is_one_of_the_service(ours: list[Any]) -> None:
    for pod in ours:
        words = pod.containers[0]["command"]

        assert words[0] == "regraft-server"
        assert parse(words).command == pod.component.split("-")[0]


@pytest.mark.parametrize(
    "file",
    [
        "helm/regraft/templates/NOTES.txt",
        "docs/howto/kubernetes-laptop.md",
        "docs/howto/kubernetes-production.md",
    ],
)
def test_what_operators_are_told_to_type_are_commands_of_the_service(file: str) -> None:
    lines = re.findall(r"-- (regraft-server .*)", (ROOT / file).read_text())

    assert lines
    for line in lines:
        assert parse(line.split()).command == "admin"


def test_the_api_listens_where_probes_and_service_look() -> None:
    [api] = pods(render(profile("cpu-demo")), "api")
    variables = environment(api)

    assert variables["REGRAFT_HOST"] == "0.0.0.0"
    assert variables["REGRAFT_PORT"] == str(api.containers[0]["ports"][0]["containerPort"])


def test_the_probe_of_a_worker_looks_at_the_file_that_it_writes() -> None:
    [worker] = pods(render(profile("cpu-demo")), "worker")
    folder = environment(worker)["REGRAFT_DATA_DIR"]

    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        command = worker.containers[0][probe]["exec"]["command"]
        assert f'"{liveness.file_in(Path(folder))}"' in command[-1]
    assert 4 * liveness.EVERY_SECONDS < 60


def test_the_readiness_of_a_job_is_the_file_that_the_worker_creates() -> None:
    [worker, *_] = [
        pod for pod in pods(render(profile("production")), "worker") if pod.owner["kind"] == "ScaledJob"
    ]
    [container] = worker.spec["containers"]

    file = claimed_file(Path(environment(worker)["REGRAFT_DATA_DIR"]))
    probe = container["readinessProbe"]
    assert probe["exec"]["command"] == ["test", "-f", str(file)]
    after_the_claim = probe["periodSeconds"] * (probe["successThreshold"] - 1)
    assert after_the_claim > FRESH_SECONDS, "KEDA may read a length of before the claim"
    arguments = parse(container["command"])
    assert (arguments.jobs, arguments.exit_when_idle) == (1, 60)
    assert "REGRAFT_BROKER_URL" not in environment(worker), "the worker of a Job uses none"


def test_keda_reads_a_series_of_the_api_that_is_there_before_the_first_job(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    manifests = render(profile("production"))
    [api], scaled = pods(manifests, "api"), of_kind(manifests, "ScaledJob")
    file = str(hardware_file_of(manifests, tmp_path))
    for name, value in (environment(api) | {"REGRAFT_HARDWARE_FILE": file}).items():
        monkeypatch.setenv(name, value)
    registry = prometheus_client.CollectorRegistry()
    registry.register(untyped(service_collectors(Settings(), sqlite_database)[0]))
    text = prometheus_client.generate_latest(registry).decode()

    for one in scaled:
        trigger = one["spec"]["triggers"][0]["metadata"]
        assert f"{trigger['valueLocation']} 0.0" in text.splitlines()
        address, port = re.fullmatch(r"http://([^:]+):(\d+)/metrics", trigger["url"]).groups()  # type: ignore[union-attr]
        [service] = [
            s for s in of_kind(manifests, "Service") if f"{s['metadata']['name']}.training.svc" == address
        ]
        assert service["spec"]["selector"].items() <= api.labels.items()
        assert str(service["spec"]["ports"][0]["port"]) == port == environment(api)["REGRAFT_METRICS_PORT"]


def test_new_jobs_go_to_the_first_pool() -> None:
    manifests = render(VARIATIONS["every corner"])
    [api] = pods(manifests, "api")

    assert environment(api)["REGRAFT_GPU_CLASS"] == VARIATIONS["every corner"]["workers"][0]["gpuClass"]
    classes = {
        p.labels["regraft.dev/pool"]: environment(p)["REGRAFT_GPU_CLASS"] for p in pods(manifests, "worker")
    }
    assert classes == {"a100": "a100", "h100": "h100", "h200": "h200", "keeper": "keeper"}


def test_jobs_and_requests_find_the_samplers_of_their_base_model() -> None:
    manifests = render(VARIATIONS["fleets"])
    fleets = {model: [f"http://regraft-sampler-{name}:8300"] for name, model in FLEETS.items()}

    for component in ("worker", "api", "inference"):
        for pod in pods(manifests, component):
            assert json.loads(environment(pod)["REGRAFT_SAMPLERS"]) == fleets
            assert "REGRAFT_SAMPLERS_KEY" in environment(pod)
    for name, model in FLEETS.items():
        [pod] = pods(manifests, f"sampler-{name}")
        [service] = [
            one
            for one in of_kind(manifests, "Service")
            if one["metadata"]["name"] == f"regraft-sampler-{name}"
        ]
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"].items() <= pod.labels.items()
        arguments = build().parse_args(pod.containers[0]["command"][1:])
        assert (arguments.model, arguments.port) == (model, 8300)
        assert "REGRAFT_DATABASE_URL" not in environment(pod)
    [large] = pods(manifests, "sampler-large")
    assert large.containers[0]["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert environment(large)["REGRAFT_KV_CACHE_GIB"] == "20"


def test_only_servers_have_the_key_before_and_only_while_their_secret_has_it() -> None:
    found = {
        (pod.component, one["name"]): one["valueFrom"]["secretKeyRef"]
        for pod in pods(render(VARIATIONS["fleets"]))
        for one in pod.spec["containers"][0]["env"]
        if one["name"].endswith("_PREVIOUS_KEY")
    }

    assert {name for _, name in found} == {"REGRAFT_INFERENCE_PREVIOUS_KEY", "REGRAFT_SAMPLERS_PREVIOUS_KEY"}
    assert {component for component, _ in found} == {
        "inference",
        "inference-large",
        *(f"sampler-{name}" for name in FLEETS),
    }
    assert all(key["key"] == "key-previous" and key["optional"] for key in found.values())


def test_the_service_reads_inference_servers_by_base_model() -> None:
    servers = {"m": "http://other/v1", "*": "http://inference:8100/v1"}
    values = profile(
        "cpu-demo",
        models={"m": {"hub": "a/b"}},
        inference={"enabled": False, "url": servers, "existingSecret": "inference"},
    )

    for component in ("api", "worker"):
        [pod, *_] = pods(render(values), component)
        assert json.loads(environment(pod)["REGRAFT_INFERENCE_URL"]) == servers


def test_the_service_reads_the_models_and_judges_that_were_asked_for(tmp_path: Path) -> None:
    [config] = of_kind(render(VARIATIONS["every corner"]), "ConfigMap")
    for name, content in config["data"].items():
        (tmp_path / name).write_text(content)

    registry = Registry.load(tmp_path / "models.toml")
    backends = Backends.load(
        tmp_path / "graders.toml",
        Inference(lambda model: "http://inference:8000/v1"),
        {"JUDGE_KEY": "secret"},
    )

    model = registry.get("Qwen3-14B")
    assert (str(model.path), model.context, model.sampler, model.gpu_class) == (
        "/models/Qwen3-14B",
        8192,
        "vllm",
        "h200",
    )
    assert backends.judges["big"].base_url == "https://judge.example.com/v1"
    assert backends.judges["small"].requests_per_second == 2.0
    assert backends.judges["small"].timeout_s == 30.5
    assert backends.endpoints is not None
    assert backends.endpoints.hosts == ("*.graders.example.com", "graders.internal")
    assert backends.endpoints.private_hosts == ("graders.internal",)


def test_a_model_of_the_chart_has_every_field_of_the_registry(tmp_path: Path) -> None:
    values: dict[str, dict[str, Any]] = {
        "a": {
            "path": "/models/a",
            "dtype": "float32",
            "context": 512,
            "sampler": "vllm",
            "tensorParallel": 2,
            "toolParser": "hermes",
            "gpuClass": "keeper",
            "chatTemplate": '{% if x > "<&>" %}\n{{ messages }} \\n{% endif %}',
        },
        "b": {"package": "ships_models", "file": "b.gguf", "chatTemplate": "plain"},
        "c": {"hub": "org/c"},
    }
    elsewhere = {"enabled": False, "url": "http://inference:8000/v1", "existingSecret": "inference"}
    given = profile("production", models=values, modelAliases={}, inference=elsewhere)
    [config] = of_kind(render(given), "ConfigMap")
    written = tomllib.loads(config["data"]["models.toml"])["models"]
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["models"]

    def of_service(field: str) -> str:
        return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", field)

    fields = schema["additionalProperties"]["properties"]
    assert {of_service(field) for field in fields} == set(BaseModelEntry.model_fields)
    assert {field for model in values.values() for field in model} == set(fields)
    for name, model in values.items():
        assert written[name] == {of_service(field): value for field, value in model.items()}


@pytest.mark.parametrize("component", ["api", "worker", "migrate", "inference"])
def test_the_hubs_token_is_known_to_what_loads_models_and_to_nobody_else(component: str) -> None:
    pair = VARIATIONS["groups"]["workers"][1]
    values = profile(
        "production",
        weights={"hubSecret": "hub"},
        extraEnv={"PGSSLMODE": "verify-full"},
        workers=[pair, *profile("production")["workers"]],
    )
    found = pods(render(values), component)
    assert found
    for pod in found:
        given = {one["name"]: one for one in pod.containers[0]["env"]}
        token = given.get("HF_TOKEN", {}).get("valueFrom", {}).get("secretKeyRef")

        loads = component in ("worker", "inference")
        assert token == ({"name": "hub", "key": "HF_TOKEN"} if loads else None)
        assert given["PGSSLMODE"]["value"] == "verify-full"
