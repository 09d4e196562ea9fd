"""The models of every profile fit on the GPUs of their pools, by the functions that the service uses."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.hardware import Hardware
from core.jobs.hyperparameters import Hyperparameters
from core.registry import BaseModelEntry, Registry, sampler_of
from core.settings import Settings
from core.units import GIB
from tests.helm.charts import (
    CHART,
    VARIATIONS,
    Pod,
    config_of,
    environment,
    hardware_file_of,
    helm,
    merged,
    pods,
    profile,
    render,
)
from tests.present import present
from worker.model import capacity, sizing
from worker.model.forecast import StepSize, cluster_of, forecast

PROFILES = sorted(path.stem.removeprefix("values-") for path in CHART.glob("values-*.yaml"))

# From the config.json of each model that a profile names.
CONFIGS = {
    "Qwen3-4B": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "Qwen3-14B": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 17408,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
BYTES = {"bfloat16": 2, "float32": 4}
# Of the GPU that the profile's inference selects: the pods there measure it themselves.
GPU_OF_INFERENCE = {"NVIDIA-H100-80GB-HBM3": 78}


def registry_of(manifests: list[dict[str, Any]]) -> Registry:
    return Registry.model_validate({"models": {}} | tomllib.loads(config_of(manifests, "models.toml")))


def settings_of(manifests: list[dict[str, Any]], pod: Pod, folder: Path) -> Settings:
    """What the service in a pod reads of its environment and of its hardware file."""
    names = {"GPU_CLASS": "gpu_class", "SAMPLER": "sampler", "KV_CACHE_GIB": "kv_cache_gib"}
    told = environment(pod)
    given = {of: told[f"REGRAFT_{name}"] for name, of in names.items() if f"REGRAFT_{name}" in told}
    return Settings(hardware_file=hardware_file_of(manifests, folder), **given)


def needs(
    manifests: list[dict[str, Any]], folder: Path
) -> Iterator[tuple[str, sizing.Shape | None, sizing.Workload, sizing.MemoryPlan]]:
    """For each model that a profile trains: its plan for prompts and answers as long as its context."""
    [api] = pods(manifests, "api")
    settings = settings_of(manifests, api, folder)
    for name, entry in registry_of(manifests).models.items():
        gpu_class = entry.gpu_class or settings.gpu_class
        memory = settings.hardware.of(gpu_class).gpu_memory_gib
        assert memory is not None, f"the profile does not say what memory a GPU of {gpu_class} has"
        of_class = settings.of_class(gpu_class)
        shape = sizing.shape_of_config(CONFIGS[name], BYTES[entry.dtype])
        prompt = 1024
        work = sizing.workload(
            rank=16, prompt=prompt, completion=entry.context - prompt, batch=8, group=8, valid_rows=100,
            eval_samples=1,
        )  # fmt: skip
        sampler = sampler_of(entry, of_class.sampler, "cuda")
        assert sampler is not None
        machine = sizing.machine(of_class, "cuda", int(memory * GIB), sampler, gpu_class=gpu_class)
        assert shape is not None
        yield name, shape, work, sizing.plan(name, shape, work, machine)


@pytest.mark.parametrize("name", PROFILES)
def test_every_model_of_a_profile_can_be_trained_at_its_whole_context(name: str, tmp_path: Path) -> None:
    for _, shape, work, plan in needs(render(profile(name)), tmp_path):
        assert shape is not None
        assert plan.cache_bytes // (shape.token_cache_bytes * work.longest) >= 16


def test_the_production_profile_has_models_to_check(tmp_path: Path) -> None:
    assert {name for name, *_ in needs(render(profile("production")), tmp_path)} == set(CONFIGS)


@pytest.mark.parametrize("name", PROFILES)
def test_every_model_of_a_profile_can_be_served_and_all_at_once(name: str) -> None:
    manifests = render(profile(name))
    found = pods(manifests, "inference")
    if not found:
        return
    [pod] = found
    product = pod.spec.get("nodeSelector", {}).get("nvidia.com/gpu.product")
    if product is None:
        return  # on CPUs
    assert environment(pod)["REGRAFT_INFERENCE_KV_CACHE_GIB"] == "auto"
    free = GPU_OF_INFERENCE[product] * GIB
    models = [
        (sizing.shape_of_config(CONFIGS[name], BYTES[entry.dtype]), entry.context)
        for name, entry in registry_of(manifests).models.items()
    ]
    least = [sizing.serving(present(shape), context=context, slots=8, rank=64) for shape, context in models]
    assert sum(need.least for need in least) <= free, [str(need) for need in least]
    for (shape, context), need in zip(models, least, strict=True):
        others = [other.least for other in least if other is not need]
        assert shape is not None
        cache = sizing.serving_cache(shape, need, context=context, free=free, others=others)
        assert cache // shape.cache_bytes(context) >= 8


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kvCacheGiB": 1}, r"at 8192 tokens needs a KV cache of 1\.\d\d GiB for one sequence"),
        ({"gpuMemoryGiB": 24}, r"at 8192 tokens needs [\d.]+ GiB: weights 2 x [\d.]+.*class `h100` has 24\.0"),
    ],
)  # fmt: skip
def test_a_profile_whose_models_do_not_fit_would_be_seen_with_numbers(
    changes: dict[str, int], said: str, tmp_path: Path
) -> None:
    """The first is what the service's default was."""
    values = profile("production")
    values["workers"] = [pool | changes if pool["gpuClass"] == "h100" else pool for pool in values["workers"]]

    with pytest.raises(sizing.DoesNotFit, match=said):
        list(needs(render(values), tmp_path))


def test_what_a_pool_says_reaches_the_api_and_every_worker() -> None:
    values = profile("production")
    values["workers"][0] |= {"kvCacheGiB": 30, "trainTokenBudget": 4096, "sampler": "vllm"}
    values["price"] = {"perGpuSecond": 0.0006, "currency": "EUR"}
    manifests = render(values)

    told = [
        environment(pod)["REGRAFT_HARDWARE_FILE"]
        for pod in pods(manifests)
        if pod.component in ("api", "worker")
    ]

    jobs = {"in_kubernetes_jobs": True, "ranks": 1}
    assert told == ["/etc/regraft/hardware.toml"] * 4
    assert Hardware.model_validate(
        tomllib.loads(config_of(manifests, "hardware.toml"))
    ) == Hardware.model_validate(
        {
            "gpu_classes": {
                "h100": jobs
                | {"gpu_memory_gib": 78, "kv_cache_gib": 30, "train_token_budget": 4096, "sampler": "vllm"},
                "h200": jobs | {"gpu_memory_gib": 139},
                "keeper": {"gpu_memory_gib": 0},
            },
            "price_per_gpu_second": 0.0006,
            "currency": "EUR",
        }
    )


def test_a_worker_without_gpus_checks_a_job_with_those_of_its_pool(tmp_path: Path) -> None:
    """The keeper validates every file. 48 GiB have no room for the weights of 14B twice; four GPUs share a copy."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Qwen3-14B"]))
    entry = BaseModelEntry(path=tmp_path, context=4096)

    def problem(**pool: int) -> str | None:
        values = profile("production")
        values["workers"][0] |= {"gpuMemoryGiB": 48} | pool
        manifests = render(values)
        [keeper] = [pod for pod in pods(manifests, "worker") if pod.name.endswith("-keeper")]
        job = Hyperparameters.model_validate({"advanced": {"sampling": {"max_completion_tokens": 1024}}})
        return capacity.job_problem(
            settings_of(manifests, keeper, tmp_path),
            "Qwen3-14B",
            entry,
            gpu_class="h100",
            requested=job,
            rows=100,
            valid_rows=16,
        )

    assert "GPU class `h100` has 48.0 GiB" in present(problem())
    assert problem(gpus=4) is None
    assert "GPU class `h100` has 48.0 GiB" in present(problem(gpus=4, samplingGpus=3))


def test_downloaded_adapters_have_four_fifths_of_their_volume() -> None:
    manifests = render(merged(VARIATIONS["fleets"], {"inference": {"adapterCache": "50Gi"}}))

    for component, size in (("inference", "50Gi"), ("sampler-large", "20Gi")):
        [pod] = pods(manifests, component)
        [data] = [volume for volume in pod.spec["volumes"] if volume["name"] == "data"]
        assert data["emptyDir"]["sizeLimit"] == size
        assert int(environment(pod)["REGRAFT_ADAPTER_CACHE_BYTES"]) == int(0.8 * int(size[:2]) * GIB)


def test_inference_has_settings_of_its_own() -> None:
    values = profile(
        "production", settings={"sampler": "vllm"}, inference={"kvCacheGiB": 12.5, "sampler": "registry"}
    )

    [pod] = pods(render(values), "inference")
    [api] = pods(render(values), "api")

    assert environment(pod)["REGRAFT_INFERENCE_KV_CACHE_GIB"] == "12.5"
    assert environment(pod)["REGRAFT_SAMPLER"] == "registry"
    assert environment(api)["REGRAFT_SAMPLER"] == "vllm"
    names = [one["name"] for one in pod.spec["containers"][0]["env"]]
    assert len(names) == len(set(names))


def test_pools_of_one_class_that_differ_are_refused() -> None:
    pool = profile("production")["workers"][0]
    other = pool | {"name": "other", "gpuMemoryGiB": 140}

    with pytest.raises(
        helm.HelmRenderError, match="the pool other and another of the gpuClass h100 differ in mode"
    ):
        render(profile("production", workers=[*profile("production")["workers"], other]))


def test_the_sizes_of_the_guides_are_those_that_the_plan_command_computes() -> None:
    page = (CHART.parents[1] / "docs/howto/kubernetes.md").read_text()
    rows = re.findall(r"^\| (Qwen3-\S+)" + 4 * r" \| ([^|]+)" + r" \|$", page, re.MULTILINE)
    size = StepSize(prompts=8, group=8, prompt=512, completion=2048, answer=1024, rank=16)

    assert len(rows) >= 4
    for name, gpus, engines, gib, seconds in rows:
        model = present(sizing.shape_of_config(CONFIGS[name], 2))
        planned = forecast(name, model, size, cluster_of(gpus.replace(" ", "")))
        assert engines == f"{planned.engines} x {planned.tensor_parallel}"
        assert (gib, seconds) == (f"{planned.plan.estimate.total / GIB:.0f}", f"{planned.seconds:.0f}"), name
