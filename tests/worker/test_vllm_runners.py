"""What we use of vLLM's model runners, in the sources of both: CPUs run the first version, and GPUs the second.

The sources are read and not imported, because the second version imports on machines with Triton only.
tests/worker/vllm_contract.py has the rest of what we use, which is the same for both.
"""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from worker.engine.errors import FATAL
from worker.packages import vllm_version

pytestmark = pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed")
ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints"
RUNNERS = {"first": "v1/worker/gpu_model_runner.py", "second": "v1/worker/gpu/model_runner.py"}
SAMPLERS = {"first": "v1/sample/sampler.py", "second": "v1/worker/gpu/sample/sampler.py"}


@cache
def package_folder() -> Path:
    package = importlib.util.find_spec("vllm")
    assert package is not None and package.submodule_search_locations is not None
    return Path(package.submodule_search_locations[0])


def source(file: str) -> str:
    return (package_folder() / file).read_text()


@cache
def class_of(file: str, name: str) -> ast.ClassDef:
    [found] = [
        node for node in ast.parse(source(file)).body if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return found


def _function_of(file: str, name: str, method: str) -> ast.FunctionDef:
    [found] = [
        node
        for node in class_of(file, name).body
        if isinstance(node, ast.FunctionDef) and node.name == method
    ]
    return found


def parameters(file: str, name: str, method: str) -> list[str]:
    arguments = _function_of(file, name, method).args
    return [argument.arg for argument in [*arguments.args, *arguments.kwonlyargs]]


def method(file: str, name: str, method: str) -> str:
    return ast.unparse(_function_of(file, name, method))


def test_the_sources_are_those_of_the_version_that_gpus_run() -> None:
    pinned = {
        match[1]
        for file in ("gpu.txt", "vllm.txt")
        if (match := re.search(r"^vllm(?:-cpu)?==([\d.]+)", (CONSTRAINTS / file).read_text(), re.MULTILINE))
    }

    assert pinned == {vllm_version()}


@pytest.mark.parametrize("version", RUNNERS)
class TestModelRunner:
    def test_it_has_the_manager_of_adapters_that_ours_are_written_into(self, version: str) -> None:
        runner = class_of(RUNNERS[version], "GPUModelRunner")
        manager = source("lora/worker_manager.py")

        assert "LoRAModelRunnerMixin" in [ast.unparse(base) for base in runner.bases]
        assert "self.load_lora_model(" in ast.unparse(runner)
        assert "self.lora_manager = LRUCacheWorkerLoRAManager(" in source(
            "v1/worker/lora_model_runner_mixin.py"
        )
        assert "self._adapter_manager" in manager and "self.vocab_size" in manager

    def test_it_loads_whole_weights_in_place_and_forgets_what_it_made_of_the_old_ones(
        self, version: str
    ) -> None:
        runner = ast.unparse(class_of(RUNNERS[version], "GPUModelRunner"))

        assert "weights_iterator" in parameters(RUNNERS[version], "GPUModelRunner", "reload_weights")
        assert parameters(RUNNERS[version], "GPUModelRunner", "get_model") == ["self"]
        assert "self.model = " in runner
        for method in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
            assert f"self.{method}()" in runner

    def test_it_is_told_which_log_probabilities_to_report(self, version: str) -> None:
        runner = ast.unparse(class_of(RUNNERS[version], "GPUModelRunner"))

        assert "logprobs_mode=self.model_config.logprobs_mode" in runner
        assert "logprobs_mode" in parameters(SAMPLERS[version], "Sampler", "__init__")
        assert "processed_log" in source(SAMPLERS[version]) or "PROCESSED_LOGPROBS_MODES" in source(
            SAMPLERS[version]
        )

    def test_a_seed_of_a_request_is_used_for_its_tokens_alone(self, version: str) -> None:
        if version == "first":
            assert "generator.manual_seed(sampling_params.seed)" in source(RUNNERS[version])
            return
        states = source("v1/worker/gpu/sample/states.py")
        assert "self.seeds = UvaBackedTensor(max_num_reqs, dtype=torch.int64)" in states, "63 bits fit"
        assert "self.seeds.np[req_idx] = seed" in states


def test_engines_of_one_size_share_what_vllm_compiles() -> None:
    """Its key has the sizes of worker/model/engine_sizes.py, and nothing that differs between two starts."""
    environment = source("envs.py").partition("ignored_factors: set[str] = {")[2].partition("}")[0]
    cache = source("config/cache.py").partition("ignored_factors = {")[2].partition("}")[0]
    model = source("config/model.py").partition("ignored_factors = {")[2].partition("}")[0]
    scheduler = ast.unparse(class_of("config/scheduler.py", "SchedulerConfig"))

    # The key of an engine, its folder, its processor and its GPUs.
    names = (
        "VLLM_API_KEY",
        "VLLM_RPC_BASE_PATH",
        "VLLM_CACHE_ROOT",
        "CUDA_VISIBLE_DEVICES",
        "VLLM_LOGGING_LEVEL",
    )
    assert all(f'"{name}"' in environment for name in names)
    assert '"kv_cache_memory_bytes"' in cache and '"gpu_memory_utilization"' in cache
    assert '"max_model_len"' not in model, "so its values have to be few"
    assert "factors.append(self.max_num_batched_tokens)" in scheduler
    assert "factors.append(self.max_num_seqs)" in scheduler


def test_workers_are_patched_before_they_load_the_model() -> None:
    """By either executor: the class that worker/engine/worker_class.py patches with is imported in `init_worker`."""
    wrapper = method("v1/worker/worker_base.py", "WorkerWrapperBase", "init_worker")
    assert "parallel_config.worker_extension_cls" in wrapper
    for file, name, starts in (
        ("v1/executor/uniproc_executor.py", "UniProcExecutor", "_init_executor"),
        ("v1/executor/multiproc_executor.py", "WorkerProc", "__init__"),
    ):
        _, begins, after = method(file, name, starts).partition(".init_worker(")
        assert begins and ".load_model()" in after, name
        assert ".load_model()" not in method(file, name, starts).partition(".init_worker(")[0], name


def test_the_plugin_imports_nothing_that_only_workers_need() -> None:
    """vLLM loads it in each of its processes, also in the HTTP server, which computes nothing."""
    tree = ast.parse((ROOT / "worker/engine/plugin.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}

    assert modules == {"vllm.reasoning", "worker", "worker.engine", "worker.engine.names"}


def test_the_only_kernel_that_needs_adapters_of_experts_is_the_refused_one() -> None:
    """Adapters being on, vLLM takes a kernel that can have adapters; ours have none of experts."""
    folder = "model_executor/layers/fused_moe/experts"
    needing = {
        node.name
        for file in sorted(package_folder().joinpath(folder).glob("*.py"))
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
        and re.search(r"assert \w*(_lora_context|lora_context|lora_ctx|ctx) is not None", ast.unparse(node))
    }

    assert needing == {"_TrtLlmLoRAExpertsBase"}
    assert set(
        re.findall(r"^class (\w+)\(_TrtLlmLoRAExpertsBase", source(f"{folder}/trtllm_lora_moe.py"), re.M)
    ) == {"TrtLlmBf16LoRAExperts"}
    users = {
        str(file.relative_to(package_folder()))
        for file in package_folder().joinpath("model_executor").rglob("*.py")
        if "TrtLlmBf16LoRAExperts" in file.read_text() and file.name != "trtllm_lora_moe.py"
    }
    assert users == {"model_executor/layers/fused_moe/oracle/unquantized.py"}


def test_the_processes_of_an_engine_log_the_error_that_ends_them() -> None:
    """Our plugin reads it there, since a server says only that its engine failed."""
    logging = source("v1/engine/core.py") + source("v1/executor/multiproc_executor.py")
    assert {message for message in FATAL if f'logger.exception("{message}")' not in logging} == set()
    assert "Worker failed with error '{result}'" in source("v1/executor/multiproc_executor.py")
    kv_cache = source("v1/core/kv_cache_utils.py")
    assert "No available memory for the cache blocks" in kv_cache
    assert "which is larger than the available KV cache " in kv_cache
    assert "load_general_plugins()" in source("v1/engine/core.py")
    assert "load_general_plugins()" in source("v1/worker/worker_base.py")


def test_flashinfers_sampler_is_never_asked_for_a_request_with_a_seed() -> None:
    """So that nothing is lost by VLLM_USE_FLASHINFER_SAMPLER=0, which both versions obey."""
    assert "or self.sampling_states.any_explicit_seed(" in source(SAMPLERS["second"])
    assert "flashinfer_sampler_supported()" in source(SAMPLERS["second"])
    assert "if not envs.VLLM_USE_FLASHINFER_SAMPLER:" in source("v1/sample/ops/topk_topp_sampler.py")
    assert "generators" in ast.unparse(class_of("v1/sample/ops/topk_topp_sampler.py", "TopKTopPSampler"))


def test_the_allocator_of_engines_that_sleep_has_what_keeps_their_weights() -> None:
    """worker/engine/kept_weights.py replaces `sleep` of the one instance, for copies that `wake_up` reads."""
    file = "device_allocator/cumem.py"
    woken = ast.unparse(class_of(file, "CuMemAllocator"))

    assert parameters(file, "CuMemAllocator", "sleep") == ["self", "offload_tags"]
    assert "self.pointer_to_data: dict[int, AllocationData] = {}" in woken
    assert "data.cpu_backup_tensor = None" in woken
    assert "if data.is_asleep:" in woken
    fields = ast.unparse(class_of("device_allocator/__init__.py", "AllocationData"))
    assert all(name in fields for name in ("handle", "tag", "cpu_backup_tensor", "is_asleep"))
    assert "def unmap_and_release(allocation_handle: HandleType)" in source(file)
    backend = source("device_allocator/sleep_mode_backend.py")
    assert "allocator.sleep(offload_tags=offload_tags)" in backend
    assert 'offload_tags: tuple[str, ...] = ("runtime", "cudagraph")' in backend
    assert 'offload_tags = ("weights", *offload_tags)' in backend
    assert '_maybe_get_memory_pool_context(tag="weights")' in source("v1/worker/gpu_worker.py")


def test_both_workers_take_our_extension_and_sleep_by_the_same_names() -> None:
    worker = source("v1/worker/gpu_worker.py")

    assert "self.use_v2_model_runner = vllm_config.use_v2_model_runner" in worker
    assert "self.model_runner.reload_weights(*args, **kwargs)" in worker
    assert parameters("v1/worker/gpu_worker.py", "Worker", "sleep") == ["self", "level"]
    assert "worker_extension_cls" in source("v1/worker/worker_base.py")


def test_an_asynchronous_scheduler_drops_the_tokens_of_an_adapter_that_was_replaced() -> None:
    """Or the count of tokens before the replacement would be too low by those of the step in flight."""
    scheduler = source("v1/core/sched/scheduler.py")

    assert "self._preempt_request(request, timestamp, drop_stale_output=True)" in scheduler
    assert "output_is_stale and request.drop_stale_output" in scheduler


def test_the_defaults_that_depend_on_who_starts_the_engine_are_those_that_we_set() -> None:
    """vLLM's own list of them."""
    arguments = source("engine/arg_utils.py")

    assert set(re.findall(r"default_(max_num_\w+): dict\[UsageContext", arguments)) == {
        "max_num_batched_tokens",
        "max_num_seqs",
    }
