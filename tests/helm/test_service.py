"""What the chart starts is this service: its commands, its settings, its files, its tables."""

import argparse
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from core.database.engine import Database
from core.database.migrate import upgrade
from core.database.tables import Job
from core.registry import BaseModelEntry, Registry
from core.settings import Settings
from graders.backends import Backends, Inference
from helm.generate import OWN, settings_schema
from tests import factories
from tests.helm.charts import CHART, ROOT, VARIATIONS, Pod, of_kind, pods, profile, render
from tests.servers import Postgres
from worker.cli.parser import build
from worker.supervise import liveness

FLEETS = {"small": "Qwen3-4B", "large": "Qwen3-14B"}


def environment(pod: Pod, secrets: str = "secret" * 6) -> dict[str, Any]:
    """The environment of a pod's container, with the same word for all that comes from Secrets except the broker."""
    stored = {"REGRAFT_BROKER_URL": "redis://:secret@valkey:6379/0"}
    return {
        one["name"]: one.get("value", stored.get(one["name"], secrets)) for one in pod.containers[0]["env"]
    }


@pytest.fixture(params=VARIATIONS)
def ours(request: pytest.FixtureRequest) -> list[Any]:
    manifests = render(VARIATIONS[request.param])
    names = ("api", "worker", "member", "migrate", "inference", "sampler-small", "sampler-large")
    return [pod for name in names for pod in pods(manifests, name)]


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
                for variable, set_to in {"LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "gpu-0.gpu"}.items():
                    value = value.replace(f"$({variable})", set_to)
                patched.setenv(name, value)
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
    for pod in pods(render(profile("cpu-demo", settings=given)), "worker"):
        for name, value in environment(pod).items():
            monkeypatch.setenv(name, value)
    settings = Settings().model_dump(mode="json", exclude_none=True)

    assert len(given) > 15
    assert {name: settings[name] for name in given} == given
    assert known.keys() | OWN == Settings.model_fields.keys()


def parse(words: list[str]) -> argparse.Namespace:
    """A command line as the program's own parser reads it, which ends the process when it does not know it."""
    return build().parse_args(words[1:])


def test_every_command_is_one_of_the_service(ours: list[Any]) -> None:
    for pod in ours:
        words = pod.containers[0]["command"]

        assert words[0] == "regraft-server"
        assert parse(words).command == pod.component.split("-")[0]


@pytest.mark.parametrize("file", ["helm/regraft/templates/NOTES.txt", "docs/howto/kubernetes.md"])
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


def test_a_group_meets_at_its_leader() -> None:
    """The leader's name is put before these variables by LeaderWorkerSet, and into this one by Kubernetes."""
    manifests = render(VARIATIONS["groups"])
    for member in pods(manifests, "member"):
        [leader] = [
            pod for pod in pods(manifests, "worker") if pod.owner["metadata"] == member.owner["metadata"]
        ]
        variables = environment(leader)

        for name in ("REGRAFT_RENDEZVOUS", "REGRAFT_NODES", "REGRAFT_RANKS"):
            assert variables.get(name) == environment(member).get(name)
        assert variables["REGRAFT_RENDEZVOUS"].startswith("$(LWS_LEADER_ADDRESS):")
        assert variables["REGRAFT_NODES"] == str(member.owner["spec"]["leaderWorkerTemplate"]["size"])
        assert environment(member)["REGRAFT_NODE_RANK"] == "$(LWS_WORKER_INDEX)"
        assert "REGRAFT_NODE_RANK" not in variables


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
            "gpuClass": "h100",
            "chatTemplate": '{% if x > "<&>" %}\n{{ messages }} \\n{% endif %}',
        },
        "b": {"package": "ships_models", "file": "b.gguf", "chatTemplate": "plain"},
        "c": {"hub": "org/c"},
    }
    [config] = of_kind(render(profile("production", models=values, modelAliases={})), "ConfigMap")
    written = tomllib.loads(config["data"]["models.toml"])["models"]
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["models"]

    def of_service(field: str) -> str:
        return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", field)

    fields = schema["additionalProperties"]["properties"]
    assert {of_service(field) for field in fields} == set(BaseModelEntry.model_fields)
    assert {field for model in values.values() for field in model} == set(fields)
    for name, model in values.items():
        assert written[name] == {of_service(field): value for field, value in model.items()}


def test_the_scaler_counts_waiting_and_running_jobs_of_its_class(postgres: Postgres) -> None:
    """KEDA's query, on the real tables."""
    [scaler] = [
        one
        for one in of_kind(render(profile("production")), "ScaledObject")
        if one["metadata"]["name"].endswith("h100")
    ]
    query = scaler["spec"]["triggers"][0]["metadata"]["query"]
    url = postgres.new_database()
    upgrade(url)
    database = Database(url)
    with database.write() as session:
        project = factories.project(session)
        for status, gpu_class in [
            ("queued", "h100"),
            ("running", "h100"),
            ("pausing", "h100"),
            ("queued", "h200"),
            ("succeeded", "h100"),
            ("paused", "h100"),
            ("validating_files", "h100"),
        ]:
            factories.job(session, project, status=status, gpu_class=gpu_class)
    with database.read() as session:
        counted = session.scalar(text(query))
    database.close()

    assert counted == 3
    assert Job.__tablename__ in query


@pytest.mark.parametrize("component", ["api", "worker", "member", "migrate", "inference"])
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

        loads = component in ("worker", "member", "inference")
        assert token == ({"name": "hub", "key": "HF_TOKEN"} if loads else None)
        assert given["PGSSLMODE"]["value"] == "verify-full"
