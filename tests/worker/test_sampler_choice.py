"""Which sampler a job gets, and what happens where it is not installed."""

from pathlib import Path
from typing import Any

import pytest

from core.registry import BaseModelEntry, Device, SamplerName, sampler_of
from core.settings import Settings
from worker.packages import missing_vllm, vllm_version
from worker.prepare.model import inspect_model
from worker.refusals import UserMistake
from worker.sampling import choice
from worker.sampling.placement import NotPlaceable


@pytest.mark.parametrize(
    ("of_model", "setting", "chosen"),
    [
        ("transformers", "registry", "transformers"),
        ("vllm", "registry", "vllm"),
        ("transformers", "vllm", "vllm"),
        ("vllm", "transformers", "transformers"),
    ],
)
def test_the_setting_overrides_the_models_entry(of_model: str, setting: str, chosen: str) -> None:
    entry = BaseModelEntry(path=Path("x"), sampler=of_model)

    for device in ("cpu", "cuda"):
        assert choice.choose(entry, Settings(sampler=setting), device, lambda: "0.32.0")[0] == chosen


@pytest.mark.parametrize(
    ("device", "installed", "chosen"),
    [
        ("cuda", "0.32.0", "vllm"),
        ("cuda", None, "transformers"),
        ("cpu", "0.32.0", "transformers"),
        ("cpu", None, "transformers"),
    ],
)
def test_where_nobody_names_one_a_gpu_gets_vllm_if_it_is_installed(
    device: Device, installed: str | None, chosen: str
) -> None:
    entry = BaseModelEntry(path=Path("x"))

    assert choice.choose(entry, Settings(), device, lambda: installed)[0] == chosen


@pytest.mark.parametrize(
    ("device", "adapters", "chosen"),
    [("cuda", True, "transformers"), ("cuda", False, "vllm"), ("cpu", True, "transformers")],
)
def test_adapters_of_a_model_in_float32_are_not_sampled_with_vllm_on_a_gpu(
    device: Device, adapters: bool, chosen: str
) -> None:
    """Its kernels assert 16 bits when the engine starts."""
    entry = BaseModelEntry(path=Path("x"), dtype="float32")

    assert choice.choose(entry, Settings(), device, lambda: "0.32.0", adapters=adapters)[0] == chosen
    assert sampler_of(entry, "registry", device, adapters=adapters) == chosen


def test_vllm_is_refused_on_a_gpu_for_adapters_of_a_model_in_float32() -> None:
    entry = BaseModelEntry(path=Path("x"), dtype="float32")
    asked = Settings(sampler="vllm")

    with pytest.raises(
        choice.SamplerMissing, match=r'Set `dtype = "bfloat16"` there, or sample with transform'
    ):
        choice.choose(entry, asked, "cuda", lambda: "0.32.0")
    assert choice.choose(entry, asked, "cuda", lambda: "0.32.0", adapters=False)[0] == "vllm"
    assert choice.choose(entry, asked, "cpu", lambda: "0.32.0")[0] == "vllm"
    assert choice.choose(entry, Settings(), "cuda", lambda: "0.32.0", fleet=True)[0] == "vllm"


def test_a_model_whose_sampler_is_not_installed_is_refused() -> None:
    with pytest.raises(choice.SamplerMissing, match="vLLM, which is not installed on the worker"):
        choice.choose(BaseModelEntry(path=Path("x"), sampler="vllm"), Settings(), "cpu", lambda: None)


@pytest.mark.parametrize(
    ("sampler", "setting", "device", "chosen", "warns"),
    [
        (None, "registry", "cuda", "transformers", True),
        (None, "registry", "cuda", "vllm", False),
        (None, "registry", "cpu", "transformers", False),
        (None, "transformers", "cuda", "transformers", False),
        ("transformers", "registry", "cuda", "transformers", False),
    ],
)
def test_a_gpu_that_samples_with_transformers_for_lack_of_vllm_is_a_warning(
    sampler: Any, setting: Any, device: Device, chosen: SamplerName, warns: bool
) -> None:
    entry = BaseModelEntry(path=Path("x"), sampler=sampler)

    warning = missing_vllm(device, sampler_of(entry, setting, device), chosen)

    assert ("pip install 'regraft-server[vllm]'" in (warning or "")) == warns


class TestFleet:
    def test_a_model_with_a_fleet_is_sampled_there_where_vllm_is_not_installed(
        self, tiny_model: Path
    ) -> None:
        models = tiny_model / "fleet.toml"
        models.write_text(
            f'[models.tiny]\npath = "{tiny_model}"\ndtype = "float32"\ncontext = 128\ntensor_parallel = 2\n'
            '[aliases]\nsmall = "tiny"\n'
        )
        settings = Settings(
            models_file=models,
            data_dir=tiny_model,
            samplers={"tiny": ("http://sampler:8300",)},
            samplers_key="secret",
        )

        base = inspect_model("small", settings, 1)

        assert (base.sampler, base.fleet, base.engines.engines) == ("vllm", ("http://sampler:8300",), 0)

    def test_a_model_with_a_fleet_and_another_sampler_is_refused(self) -> None:
        entry = BaseModelEntry(path=Path("x"), sampler="transformers")

        with pytest.raises(choice.SamplerMissing, match=r"REGRAFT_SAMPLERS.* sampled with transformers"):
            choice.choose(entry, Settings(), "cpu", lambda: None, fleet=True)


class TestEngines:
    def test_a_divided_model_is_refused_where_transformers_samples_it(self) -> None:
        entry = BaseModelEntry(path=Path("x"), tensor_parallel=2)

        with pytest.raises(
            NotPlaceable, match=r"`tensor_parallel = 2`, which is for vLLM.*REGRAFT_SAMPLER=vllm"
        ):
            choice.place("transformers", entry, Settings(), "cpu", 1)

    def test_gpus_for_sampling_are_refused_where_transformers_samples(self) -> None:
        with pytest.raises(NotPlaceable, match="REGRAFT_SAMPLING_GPUS is 1, which is for vLLM"):
            choice.place("transformers", BaseModelEntry(path=Path("x")), Settings(sampling_gpus=1), "cpu", 1)

    def test_the_transformers_sampler_has_no_engines_on_other_gpus(self) -> None:
        entry = BaseModelEntry(path=Path("x"))

        assert choice.place("transformers", entry, Settings(), "cuda", 4).processes == 1

    def test_the_entry_and_the_settings_say_how_many_engines_there_are_and_how_large(self) -> None:
        entry = BaseModelEntry(path=Path("x"), tensor_parallel=2)

        placement = choice.place("vllm", entry, Settings(engines=3), "cpu", 1)

        assert (placement.engines, placement.tensor_parallel) == (3, 2)

    @pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed")
    def test_the_job_learns_of_its_engines_before_its_weights_are_loaded(self, tiny_model: Path) -> None:
        models = tiny_model / "models.toml"
        models.write_text(f'[models.tiny]\npath = "{tiny_model}"\ndtype = "float32"\ncontext = 128\n')
        settings = Settings(models_file=models, data_dir=tiny_model, sampler="vllm", engines=2)

        base = inspect_model("tiny", settings, 1)

        assert base.engines.engines == 2

    @pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed")
    def test_heads_that_cannot_be_divided_are_refused_before_the_weights_are_loaded(
        self, tiny_model: Path
    ) -> None:
        models = tiny_model / "divided.toml"
        models.write_text(f'[models.tiny]\npath = "{tiny_model}"\ncontext = 128\ntensor_parallel = 7\n')
        settings = Settings(models_file=models, data_dir=tiny_model, sampler="vllm")

        with pytest.raises(
            UserMistake, match=r"`tensor_parallel = 7`.* does not divide its \d attention heads"
        ):
            inspect_model("tiny", settings, 1)
