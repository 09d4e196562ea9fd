"""Which sampler a job gets, and what happens where it is not installed."""

from pathlib import Path

import pytest

from core.registry import BaseModelEntry, Device
from core.settings import Settings
from worker.rollout.samplers import choice


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


def test_a_model_whose_sampler_is_not_installed_is_refused() -> None:
    with pytest.raises(choice.SamplerMissing, match="vLLM, which is not installed on the worker"):
        choice.choose(BaseModelEntry(path=Path("x"), sampler="vllm"), Settings(), "cpu", lambda: None)
