"""What a machine without a GPU knows of a model and of a GPU class: refusals with numbers, before the queue."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.hardware import GpuClass, JobSizes
from core.jobs.hyperparameters import Hyperparameters
from core.model_memory import ModelMemories
from core.outages import Resource, outage
from core.registry import BaseModelEntry, Registry
from core.settings import Settings
from core.units import GIB
from tests.hardware import hardware_file
from tests.hyperparameters import in_groups
from tests.present import present, untyped
from tests.worker.test_memory import QWEN3_4B, QWEN3_14B
from worker.engine.options import ADAPTERS_AT_ONCE
from worker.model import capacity, sizing
from worker.model.memory import DeviceMemory, later_if_memory_is_taken
from worker.model.sizing import MemoryPlan
from worker.out_of_memory import OutOfMainMemory
from worker.prepare.memory_plan import plan_within
from worker.prepare.training_plan import settings_of_run
from worker.refusals import MemoryTaken, NotEnoughMemory, UserMistake
from worker.serving.engines import EngineRefused
from worker.serving.vllm_builder import VllmBuilder
from worker.sharing.base import RunsAlone
from worker.sharing.memory_request import MemoryRequest, MemoryRequests


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models without weights."""
    for name, config in (("4b", QWEN3_4B), ("14b", QWEN3_14B)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path


def settings(folder: Path, **of_class: Any) -> Settings:
    return Settings(gpu_class="gpu", hardware_file=hardware_file(folder, {"gpu": GpuClass(**of_class)}))


def entry(folder: Path, name: str = "14b", **changes: Any) -> BaseModelEntry:
    return BaseModelEntry(path=folder / name, **{"context": 8192} | changes)


def problem(of: Settings, model: BaseModelEntry, gpus: int | None = None, **advanced: Any) -> str | None:
    asked = Hyperparameters.model_validate({"advanced": in_groups(advanced)})
    return capacity.job_problem(
        of, "Qwen3-14B", model, gpu_class="gpu", gpus=gpus, requested=asked, rows=100, valid_rows=16
    )


class TestJobs:
    def test_one_that_cannot_fit_is_named_with_its_numbers_and_those_of_the_gpu(self, folder: Path) -> None:
        said = problem(settings(folder, gpu_memory_gib=48), entry(folder), max_completion_tokens=4096)

        assert said is not None
        assert said.startswith("Qwen3-14B at 4097 tokens needs ")
        assert "weights 2 x 27.5" in said
        assert "the GPU class `gpu` has 48.0 GiB" in said
        assert "sampler `transformers`" in said

    def test_one_that_trains_all_weights_is_counted_with_them_and_those_of_vllm(self, folder: Path) -> None:
        said = present(
            problem(settings(folder, gpu_memory_gib=78), entry(folder, "4b"), train="full", kl=0.1)
        )
        alone = settings(folder, gpu_memory_gib=78, sampler="transformers")

        assert "weights 2 x 7.5, optimizer 59.9, reference 7.5" in said
        assert "weights 7.5, optimizer 59.9" in present(
            problem(alone, entry(folder, "4b"), train="full", kl=0.1)
        )
        assert (
            problem(settings(folder, gpu_memory_gib=139), entry(folder, "4b"), train="full", kl=0.1) is None
        )

    def test_a_model_above_8b_parameters_is_too_large_for_training_all_weights(self, folder: Path) -> None:
        assert capacity.too_large_for_full(entry(folder, "4b")) is None
        assert "this one has 14.8B" in present(capacity.too_large_for_full(entry(folder, "14b")))
        assert capacity.too_large_for_full(entry(folder, "absent")) is None

    def test_the_same_job_fits_on_a_larger_gpu_and_with_one_copy_of_the_weights(self, folder: Path) -> None:
        assert problem(settings(folder, gpu_memory_gib=78), entry(folder), max_completion_tokens=4096) is None
        assert problem(settings(folder, gpu_memory_gib=48, sampler="transformers"), entry(folder)) is None

    def test_one_that_fits_only_while_vllm_sleeps_is_not_refused_unless_it_samples_while_it_learns(
        self, folder: Path
    ) -> None:
        of, model = settings(folder, gpu_memory_gib=66), entry(folder, context=32_768)

        assert problem(of, model, max_completion_tokens=16_000) is None
        for schedule in ({"overlap": True}, {"off_policy_steps": 1}):
            said = present(problem(of, model, max_completion_tokens=16_000, **schedule))
            assert "GPU class `gpu` has 66.0 GiB" in said

    def test_what_is_set_for_the_class_counts(self, folder: Path) -> None:
        of = settings(folder, gpu_memory_gib=139, kv_cache_gib=0.5)

        assert "REGRAFT_KV_CACHE_GIB is 0.5" in present(
            problem(of, entry(folder), max_completion_tokens=8000)
        )

    def test_more_gpus_that_a_job_chose_share_the_weights(self, folder: Path) -> None:
        of = settings(folder, gpu_memory_gib=48, ranks=1, sizes=JobSizes(gpus=1, max_gpus=8))

        assert problem(of, entry(folder), max_completion_tokens=4096) is not None
        assert problem(of, entry(folder), gpus=8, max_completion_tokens=4096) is None

    def test_a_run_has_the_ranks_of_its_machine_whatever_its_class_has(self, folder: Path) -> None:
        """The pod of a job that chose its GPUs."""
        configured = settings(folder, ranks=1, kv_cache_gib=2.0).model_copy(update={"ranks": 8})

        of_run = settings_of_run(configured, samples=True)

        assert (of_run.ranks, of_run.kv_cache_gib) == (8, 2.0)

    def test_nothing_is_said_of_what_is_not_known(self, folder: Path, tmp_path: Path) -> None:
        of = settings(folder, gpu_memory_gib=8)

        assert problem(settings(folder), entry(folder)) is None  # no memory is stated
        assert problem(settings(folder, gpu_memory_gib=0), entry(folder)) is None  # no GPU
        assert problem(of, BaseModelEntry(path=tmp_path / "gone")) is None
        assert problem(of, BaseModelEntry(hub="nobody/has-this-cached")) is None


def test_models_of_the_registry_that_do_not_fit_are_named_when_a_worker_starts(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "models.toml").write_text(
        '[models.small]\npath = "4b"\ncontext = 8192\n[models.large]\npath = "14b"\ncontext = 8192\n'
    )
    of = settings(folder, gpu_memory_gib=40).model_copy(update={"models_file": folder / "models.toml"})

    capacity.note(of)

    [said] = [record.message for record in caplog.records]
    assert said.startswith("large at 8192 tokens needs ")
    assert said.endswith("Jobs with shorter prompts and answers may fit.")
    assert list(capacity.problems(settings(folder), Registry.load(folder / "models.toml"))) == []


def test_the_needs_of_the_models_are_stored_for_the_api(folder: Path) -> None:
    (folder / "models.toml").write_text(
        '[models.small]\npath = "4b"\ncontext = 8192\n[models.large]\npath = "14b"\ncontext = 8192\n'
    )
    update = {"models_file": folder / "models.toml", "data_dir": folder}
    of = settings(folder, gpu_memory_gib=40).model_copy(update=update)

    capacity.note(of)

    stored = ModelMemories(of.model_cache)
    registry = Registry.load(folder / "models.toml")
    small, large = (present(stored.find(registry.get(name), "gpu")) for name in ("small", "large"))
    assert (small.gpu_gib, small.problem) == (40.0, None)
    assert 16.0 < present(small.needed_gib) <= 40.0  # at least two copies of the weights of 7.5 GiB
    assert large.needed_gib is None
    assert present(large.problem).startswith("large at 8192 tokens needs ")
    assert stored.find(registry.get("small"), "another") is None


class TestServing:
    """The inference server's builder, as it is on a GPU of 78 GiB; nothing is loaded."""

    @pytest.fixture
    def builder(self) -> Callable[..., VllmBuilder]:
        def builder(*, shares_device: bool = False, **changes: Any) -> VllmBuilder:
            made = VllmBuilder(Settings(**changes), shares_device=shares_device)
            made.device = "cuda"
            return made

        return builder

    @pytest.mark.slow
    def test_only_a_server_beside_jobs_leaves_memory_for_them(
        self, folder: Path, builder: Callable[..., VllmBuilder]
    ) -> None:
        one = entry(folder, "4b")
        shape, _ = builder().need(one)

        beside, alone = (self.cache(builder(shares_device=shares), one, []) for shares in (True, False))

        assert beside == 16 * shape.cache_bytes(one.context)
        assert alone > 2 * beside

    def test_a_part_of_a_gpu_stays_free_beside_the_models_and_their_cache(
        self, builder: Callable[..., VllmBuilder], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As beside a job: the allocator of torch, and what compiles later, need some of it."""
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (20 * GIB, 24 * GIB))

        assert builder().bytes_free() == 19 * GIB

    def test_a_slot_for_each_adapter_of_a_batch_is_counted(
        self, folder: Path, builder: Callable[..., VllmBuilder]
    ) -> None:
        """Of linear layers only: our plugin has vLLM allocate none for embeddings and head."""
        shape, need = builder().need(entry(folder, "4b"))

        layers = ADAPTERS_AT_ONCE * sizing.adapter_parameters(shape, 64) * shape.bytes_each
        assert need.adapters == layers

    def cache(self, made: VllmBuilder, one: BaseModelEntry, others: list[Any], free: int = 78 * GIB) -> int:
        shape, need = made.need(one)
        return made.cache_bytes(shape, need, one.context, free, others)

    @pytest.mark.slow
    def test_two_models_that_fit_beside_each_other_leave_room_for_each_other(
        self, folder: Path, builder: Callable[..., VllmBuilder]
    ) -> None:
        small, large = entry(folder, "4b"), entry(folder, "14b")
        made = builder()

        first = self.cache(made, large, [small])

        taken = made.need(large)[1].without_cache + first
        second = self.cache(made, small, [], free=78 * GIB - taken)
        assert 78 * GIB - taken >= made.bytes_needed(small)
        assert abs(first - second) < 0.2 * GIB
        assert first > 12 * GIB

    @pytest.mark.slow
    def test_a_number_is_taken_as_it_is(self, folder: Path, builder: Callable[..., VllmBuilder]) -> None:
        assert self.cache(builder(inference_kv_cache_gib=3), entry(folder), []) == 3 * GIB

    @pytest.mark.slow
    def test_a_number_that_holds_no_sequence_is_refused_before_anything_is_unloaded(
        self, folder: Path, builder: Callable[..., VllmBuilder]
    ) -> None:
        with pytest.raises(
            EngineRefused, match=r"a KV cache of 1\.27 GiB, and REGRAFT_INFERENCE_KV_CACHE_GIB is 1:"
        ) as no:
            builder(inference_kv_cache_gib=1).bytes_needed(entry(folder))

        assert (no.value.status, no.value.code) == (503, "not_enough_memory")

    def test_a_model_too_large_for_the_gpu_is_named_at_the_start(
        self, folder: Path, builder: Callable[..., VllmBuilder], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (20 * GIB, 24 * GIB))
        registry = Registry(models={"small": entry(folder, "4b"), "large": entry(folder, "14b")})

        [said] = builder().problems(registry)

        assert said.startswith(
            "large at 8192 tokens needs 35.6 GiB: weights 27.5, adapters 3.8, KV cache 1.3"
        )
        assert said.endswith("this GPU has 24.0 GiB, of which 22.8 are for models.")
        fleet = builder(samplers={"large": ("http://sampler:8300",)}, samplers_key="secret")
        assert list(fleet.problems(registry)) == [], "its fleet has it"

    @pytest.mark.slow
    def test_gpus_that_share_a_models_layers_share_its_weights_and_its_cache(
        self, folder: Path, builder: Callable[..., VllmBuilder]
    ) -> None:
        made, alone, divided = builder(), entry(folder), entry(folder, tensor_parallel=2)
        made.gpus = 2
        (_, whole), (_, half) = made.need(alone), made.need(divided)

        assert (half.weights, half.least_cache) == (whole.weights // 2, whole.least_cache // 2)
        assert whole.adapters / 2 < half.adapters < whole.adapters, "vLLM has one matrix of each on every GPU"
        assert self.cache(made, divided, [], free=24 * GIB) > 0
        with pytest.raises(EngineRefused, match=r"uses 4 GPUs \(tensor_parallel\), and this server has 2"):
            made.bytes_needed(entry(folder, tensor_parallel=4))

    @pytest.mark.slow
    def test_on_a_cpu_the_cache_is_bounded(self, folder: Path, builder: Callable[..., VllmBuilder]) -> None:
        made = builder()
        made.device = "cpu"

        assert self.cache(made, entry(folder, context=1024), []) == GIB
        assert self.cache(made, entry(folder), []) == present(capacity.shape_of(entry(folder))).cache_bytes(
            8192
        )


PLAN: MemoryPlan = untyped("the plan")


def refuse_to_wait(seconds: float) -> None:
    raise AssertionError("nothing can pass")


class TestMemoryOfOthers:
    """A plan within what other processes leave."""

    @staticmethod
    def needing(bytes_needed: int) -> Callable[[Callable[[str], int]], MemoryPlan]:
        def plan(bytes_of: Callable[[str], int]) -> MemoryPlan:
            if bytes_of("cuda") < bytes_needed:
                raise sizing.DoesNotFit(f"needs {bytes_needed}, of {bytes_of('cuda')}")
            return PLAN

        return plan

    def test_memory_that_is_taken_for_a_moment_is_waited_for(self) -> None:
        free = [20, 20, 80]
        memory = DeviceMemory(lambda device: free[0], lambda device: 80)

        def wait(seconds: float) -> None:
            free.pop(0)

        plan = plan_within(self.needing(60), "cuda", memory, patience_seconds=600.0, wait=wait)

        assert (plan, free) == (PLAN, [80])

    def test_a_job_that_fits_on_the_free_device_is_no_mistake_of_its_user(self) -> None:
        memory = DeviceMemory(lambda device: 20, lambda device: 80)

        with pytest.raises(
            MemoryTaken, match="other processes use memory of the GPU that the job needs"
        ) as taken:
            plan_within(self.needing(60), "cuda", memory, patience_seconds=0.0)

        assert outage(taken.value) is Resource.MEMORY

    def test_memory_that_idle_models_have_is_asked_for_before_a_job_waits(self, tmp_path: Path) -> None:
        request = MemoryRequest.of(Settings(data_dir=tmp_path))
        inference, late = MemoryRequests(request), [20]
        memory = DeviceMemory(lambda device: late[0], lambda device: 80)

        def wait(seconds: float) -> None:
            if inference.is_new():
                late[0] = 80

        plan = plan_within(
            self.needing(60), "cuda", memory, patience_seconds=600.0, ask=request.make, wait=wait
        )

        assert (plan, inference.is_new()) == (PLAN, False)
        assert not MemoryRequests(request).is_new(), "it was made before this one began to read"
        assert MemoryRequest.of(Settings(data_dir=tmp_path), "another").last() == 0

    def test_a_job_that_fits_on_no_device_is_refused_at_once_with_the_numbers_of_the_device(self) -> None:
        memory = DeviceMemory(lambda device: 20, lambda device: 80)

        with pytest.raises(UserMistake, match="needs 100, of 80") as refused:
            plan_within(self.needing(100), "cuda", memory, patience_seconds=600.0, wait=refuse_to_wait)

        assert refused.value.code == "not_enough_memory"

    @pytest.mark.parametrize("cause", [NotEnoughMemory("for the weights"), torch.OutOfMemoryError("CUDA")])
    def test_memory_that_others_take_while_a_model_loads_is_waited_for(
        self, cause: NotEnoughMemory | torch.OutOfMemoryError
    ) -> None:
        memory = DeviceMemory(lambda device: 20, lambda device: 80, lambda device: 50)

        with pytest.raises(MemoryTaken), later_if_memory_is_taken("cuda", beside_others=False, memory=memory):
            raise cause

    @pytest.mark.parametrize("cause", [NotEnoughMemory("for the weights"), torch.OutOfMemoryError("CUDA")])
    def test_a_model_that_a_free_device_has_no_memory_for_is_refused(
        self, cause: NotEnoughMemory | torch.OutOfMemoryError
    ) -> None:
        memory = DeviceMemory(lambda device: 20, lambda device: 80, lambda device: 60)

        with pytest.raises(type(cause)), later_if_memory_is_taken("cuda", beside_others=False, memory=memory):
            raise cause

    @pytest.mark.parametrize(
        ("own", "answer", "words"),
        [
            (0, MemoryTaken, "other processes use main memory"),
            (40, OutOfMainMemory, "Out of main memory, not of the GPU's"),
        ],
    )
    def test_main_memory_that_lacks_while_a_gpu_loads_a_model_is_named(
        self, own: int, answer: type[Exception], words: str
    ) -> None:
        memory = DeviceMemory(
            lambda device: 40 if device == "cpu" else 0, lambda device: 80, lambda device: own
        )

        with (
            pytest.raises(answer, match=words),
            later_if_memory_is_taken("cuda", beside_others=False, memory=memory),
        ):
            raise MemoryError

    def test_a_job_that_runs_out_of_memory_beside_other_jobs_runs_alone(self) -> None:
        with (
            pytest.raises(RunsAlone, match="for the weights"),
            later_if_memory_is_taken("cuda", beside_others=True),
        ):
            raise NotEnoughMemory("for the weights")
