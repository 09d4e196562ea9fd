"""Which pods a change of values restarts: those whose template differs. A pool of Jobs never restarts a running one."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.helm.charts import FLEET, JOBS, ONE_GPU, POOL, SERVER, Pod, merged, pods, profile, render, scaled

GPU_POOL = POOL | {"gpuResource": "nvidia.com/gpu"}
FLEETS = {"existingSecret": "samplers", "fleets": [FLEET]}
BASE = profile(
    "production", samplers=FLEETS, inference={"models": [SERVER | ONE_GPU]}, metrics={"enabled": True}
)
BASE["workers"] = [GPU_POOL, *BASE["workers"]]

API, INFERENCE, SERVER_OF_ONE, KEEPER, SAMPLER, WARM = (
    f"regraft-{name}"
    for name in ("api", "inference", "inference-large", "worker-keeper", "sampler-small", "worker-a100")
)
EVERY = {API, INFERENCE, SERVER_OF_ONE, KEEPER, SAMPLER, WARM}

Change = Callable[[dict[str, Any]], dict[str, Any]]


def values(**changes: Any) -> Change:
    return lambda base: merged(base, changes)


def pool(name: str, **changes: Any) -> Change:
    return lambda base: (
        base | {"workers": [one | changes if one["name"] == name else one for one in base["workers"]]}
    )


# Change -> the Deployments that it restarts.
RESTARTS: dict[str, tuple[Change, set[str]]] = {
    "a model": (values(models={"New": {"hub": "a/b", "gpuClass": "h100"}}), set()),
    "the context of a model": (values(models={"Qwen3-14B": {"context": 4096}}), set()),
    "the context of a fleet's model": (values(models={"Qwen3-4B": {"context": 4096}}), {SAMPLER}),
    "an alias": (values(modelAliases={"o4-mini": "Qwen3-4B"}), set()),
    "a judge": (values(graders={"judges": {"j": {"model": "Qwen3-4B"}}}), set()),
    "a host of endpoint graders": (values(graders={"endpointHosts": ["graders.example.com"]}), set()),
    "keys of judges": (values(graders={"existingSecret": "judge-keys"}), {API, KEEPER, WARM}),
    "alerts and monitors": (
        values(metrics={"rules": {"enabled": True}, "monitors": {"enabled": True}}),
        set(),
    ),
    "retention": (values(settings={"keep_rollouts_days": 30}), {KEEPER, WARM}),
    "the drain of runs": (values(settings={"drain_seconds": 300}), {KEEPER, WARM}),
    "a price": (values(price={"perGpuSecond": 0.001}), set()),
    "the memory of a pool's GPUs": (pool("h100", gpuMemoryGiB=70), set()),
    "the cache of a Deployment's jobs": (pool("a100", kvCacheGiB=12), set()),
    "one more pool": (
        lambda base: base | {"workers": [*base["workers"], GPU_POOL | {"name": "l40s", "gpuClass": "l40s"}]},
        set(),
    ),
    # The addresses of fleets and servers are variables of their clients.
    "one more fleet": (
        values(samplers=FLEETS | {"fleets": [FLEET, FLEET | {"name": "large", "model": "Qwen3-14B"}]}),
        {API, INFERENCE, KEEPER, WARM},
    ),
    "one more server": (
        values(
            inference={"models": [SERVER | ONE_GPU, SERVER | ONE_GPU | {"name": "more", "model": "Qwen3-4B"}]}
        ),
        {API, KEEPER, WARM},
    ),
    "the size of uploads": (values(settings={"max_upload_bytes": 1 << 30}), {API}),
    "the size of a pool of Jobs": (pool("h100", maxReplicas=9), set()),
    "the resources of a pool of Jobs": (pool("h100", resources=JOBS["resources"]), set()),
    "the size of a Deployment": (pool("a100", replicas=4), set()),
    "the resources of a Deployment": (pool("a100", scratch="60Gi"), {WARM}),
    "settings of a pool": (pool("a100", settings={"hang_seconds": 60}), {WARM}),
    "an address of the API's clients": (values(ingress={"hosts": ["other.example.com"]}), {API}),
    "replicas of a fleet": (values(samplers=FLEETS | {"fleets": [FLEET | {"replicas": 5}]}), set()),
    "autoscaling of a fleet": (values(samplers=FLEETS | {"fleets": [scaled(FLEET)]}), set()),
    "autoscaling of a server": (values(inference={"models": [scaled(SERVER | ONE_GPU)]}), set()),
    "the cache of a server": (
        values(inference={"models": [SERVER | ONE_GPU | {"kvCacheGiB": 20}]}),
        {SERVER_OF_ONE},
    ),
    "the image": (values(image={"tag": "9.9.9"}), EVERY),
    "the format of logs": (values(settings={"log_format": "text"}), EVERY),
}


def templates(given: dict[str, Any]) -> dict[str, Any]:
    deployments = [pod for pod in pods(render(given)) if pod.owner["kind"] == "Deployment"]
    return {pod.owner["metadata"]["name"]: pod.template for pod in deployments}


@pytest.mark.parametrize("change", RESTARTS)
def test_a_change_restarts_the_pods_that_it_concerns(change: str) -> None:
    apply, expected = RESTARTS[change]
    before, after = templates(BASE), templates(apply(BASE))

    assert before.keys() == EVERY
    assert {name for name in EVERY if before[name] != after[name]} == expected


def has_version(pod: Pod) -> bool:
    labels = pod.template["metadata"]["labels"]
    return bool({"helm.sh/chart", "app.kubernetes.io/version"} & labels.keys())


@pytest.mark.parametrize("name", ["production", "cpu-demo"])
def test_a_new_version_of_the_chart_alone_restarts_nothing(name: str) -> None:
    """Pods name neither its version nor its checksum; the image has a tag of its own."""
    for pod in pods(render(profile(name))):
        assert pod.owner["kind"] in ("Job", "Pod") or not has_version(pod), pod.name
