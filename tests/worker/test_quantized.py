"""Models whose files hold quantized weights: their values are trained, or they are refused by name.

test_packed.py has the formats that stay packed.
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from core.database.tables import Job
from core.jobs.hyperparameters import Hyperparameters, resolve
from core.registry import BaseModelEntry, Device, SamplerName
from core.settings import Settings
from tests.families.zoo import CONTEXT, FAMILIES
from tests.present import present
from tests.worker.test_family_jobs import train_on
from worker.checks.compatibility import refuse_by_config
from worker.model import capacity, memory, quantized
from worker.model.policy import Policy, load_base, read_config
from worker.packages import vllm_version
from worker.prepare.model import inspect_model
from worker.prepare.task import refuse_uncorrected
from worker.refusals import UnsupportedModel, UserMistake
from worker.serving.export import TEXTS, merge

BLOCK = 32
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

Weights = dict[str, Tensor]


def in_blocks(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    return weight.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)


def fp8(weights: Weights) -> tuple[Weights, Weights]:
    """Blocks of e4m3 numbers with a scale each, as in the files of DeepSeek V3: what is stored, and its values."""
    stored, values = Weights(), Weights()
    for name, weight in weights.items():
        stored[name] = values[name] = weight
        if name.endswith("proj.weight"):
            blocks = in_blocks(weight)
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            stored[name] = (blocks / scale).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
            stored[name.replace("weight", "weight_scale_inv")] = scale[:, 0, :, 0].contiguous()
            values[name] = (in_blocks(stored[name].float()) * scale).flatten(2).flatten(0, 1)
    return stored, values


def mxfp4(weights: Weights) -> tuple[Weights, Weights]:
    """The experts as 4-bit numbers, two in a byte, with a power of two for each 32, as in the files of gpt-oss."""
    stored, values, random = Weights(), Weights(), torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = values[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        shape = (experts, outputs, inputs // BLOCK)
        codes = torch.randint(0, 16, (*shape, BLOCK), dtype=torch.uint8, generator=random)
        powers = torch.randint(121, 125, shape, dtype=torch.uint8, generator=random)
        stored[f"{name}_blocks"] = codes[..., 0::2] | (codes[..., 1::2] << 4)
        stored[f"{name}_scales"] = powers
        numbers = FP4[codes.long()] * torch.exp2(powers.float() - 127)[..., None]
        values[name] = numbers.flatten(2).transpose(1, 2)
    return stored, values


MADE: dict[str, tuple[str, Callable[[Weights], tuple[Weights, Weights]], dict[str, Any]]] = {
    "fp8": ("Llama 2, 3", fp8, {"activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}),
    "mxfp4": ("gpt-oss", mxfp4, {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}),
}


def save(folder: Path, name: str, family_title: str = "") -> Weights:
    """A tiny model with weights in this format, of another family than usual if it is given. Returns their values."""
    title, convert, options = MADE[name]
    title = family_title or title
    [family] = [one for one in FAMILIES if one.title == title]
    family.save(folder)
    stored, values = convert(load_file(folder / "model.safetensors"))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    mark(folder, {"quant_method": name, **options})
    return values


def mark(folder: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def entry(folder: Path) -> BaseModelEntry:
    return BaseModelEntry(path=folder, dtype="float32", context=CONTEXT)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.slow
def test_its_values_are_loaded_and_an_adapter_is_merged_into_them(tmp_path: Path, name: str) -> None:
    values = save(tmp_path / "model", name)

    base = load_base("tiny", entry(tmp_path / "model"), tmp_path, "cpu")

    assert memory.shape_of(read_config(tmp_path / "model"), torch.float32).parameters == base.parameters
    loaded = quantized.load_wide(
        read_config(tmp_path / "model"), tmp_path / "model", torch.float32
    ).state_dict()
    assert {weight.dtype for weight in loaded.values()} == {torch.float32}
    assert all(torch.equal(loaded[weight], value) for weight, value in values.items())

    Policy(base, rank=4, alpha=8, seed=0).save(tmp_path / "adapter")
    for text in TEXTS:
        (tmp_path / "adapter" / text).touch()
    merge(entry(tmp_path / "model"), tmp_path, tmp_path / "adapter", tmp_path / "merged")
    assert quantized.format_of(read_config(tmp_path / "merged")) == ""
    merged = load_base("merged", entry(tmp_path / "merged"), tmp_path, "cpu").model.state_dict()
    assert all(torch.equal(merged[weight], value) for weight, value in values.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_a_job_trains_it_and_says_in_which_precision(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    save(tmp_path / "model", name)

    train_on(bench, tmp_path / "model", monkeypatch)

    assert bench.job().status == "succeeded", bench.events()
    said = f"The model's files hold {name} weights. Training computes with their values in float32"
    assert any(said in event for event in bench.events())


W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def compressed(format: str = "pack-quantized", activations: Any = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": W4 | weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


def compressed_with(**more: Any) -> dict[str, Any]:
    return compressed() | more


def two_groups() -> dict[str, Any]:
    one = compressed()
    return one | {"config_groups": one["config_groups"] | {"group_1": {"weights": W4 | {"group_size": 64}}}}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
# Each with what the message says of it.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"\(bitsandbytes\).*W4A16 by llmcompressor"),
    ({"quant_method": "torchao"}, r"\(torchao\).*bfloat16 model that it was made from"),
    (compressed("int-quantized", {"num_bits": 8}), "format int-quantized.*only pack-quantized"),
    (compressed("nvfp4-pack-quantized"), "only pack-quantized"),
    (compressed(activations={"num_bits": 8}), "activations are quantized"),
    (compressed(actorder="group"), "act-order"),
    (compressed(num_bits=3), "4 and 8 bits"),
    (compressed(type="float", num_bits=8), "not float8"),
    (compressed(strategy="tensor"), "scales by tensor"),
    (compressed(strategy=None, group_size=None), "scales by tensor"),
    (compressed(group_size="32"), "group_size is '32', which is no number"),
    (compressed_with(config_groups={}), "config_groups are empty"),
    (compressed_with(config_groups=None), "config_groups are empty"),
    (compressed_with(config_groups={"group_0": {"weights": None}}), "says nothing of the weights"),
    (compressed_with(kv_cache_scheme={"num_bits": 8, "type": "float"}), "keys and values.*kv_cache_scheme"),
    (compressed_with(transform_config={"config_groups": {"R1": {"type": "hadamard"}}}), "transform_config"),
    (compressed_with(sparsity_config={"format": "sparse-24-bitmask"}), "sparse"),
    (two_groups(), "more than one way"),
    (AWQ | {"version": "gemv"}, "version gemv.*version gemm"),
    (AWQ | {"zero_point": False}, "zero points"),
    (AWQ | {"bits": 8}, "only 4 bits"),
    (GPTQ | {"desc_act": True}, r"it has act-order \(desc_act\), which is not computed here\. Use"),
    (GPTQ | {"group_size": "128"}, "group_size is '128', which is no number"),
    (GPTQ | {"is_marlin_format": True}, "is_marlin_format in its config"),
    (AWQ | {"rotation": "R1"}, "rotation in its config"),
    (GPTQ | {"sym": False}, "symmetric"),
    (GPTQ | {"bits": 3}, "4 and 8 bits"),
    (GPTQ | {"dynamic": {"-:lm_head": {}}}, "more than one way"),
    (GPTQ | {"checkpoint_format": "marlin"}, "layout marlin"),
]


@pytest.mark.parametrize(("stored", "said"), REFUSED)
def test_another_format_is_refused_by_name_before_the_weights_are_loaded(
    tmp_path: Path, stored: dict[str, Any], said: str
) -> None:
    [family] = [one for one in FAMILIES if one.title == "Llama 2, 3"]
    family.save(tmp_path)
    mark(tmp_path, stored)

    with pytest.raises(UnsupportedModel, match=said) as refused:
        refuse_by_config(read_config(tmp_path), CONTEXT)
    assert "weights are quantized (" in str(refused.value)
    with pytest.raises(UnsupportedModel, match=said):
        load_base("tiny", entry(tmp_path), tmp_path, "cpu")


def test_the_memory_of_a_format_that_is_refused_is_unknown_to_the_service(tmp_path: Path) -> None:
    [family] = [one for one in FAMILIES if one.title == "Llama 2, 3"]
    family.save(tmp_path)
    mark(tmp_path, GPTQ | {"desc_act": True})

    assert capacity.shape_of(entry(tmp_path)) is None


def test_experts_that_are_packed_are_refused(tmp_path: Path) -> None:
    [family] = [one for one in FAMILIES if one.title == "Qwen 3 MoE"]
    family.save(tmp_path)
    mark(tmp_path, AWQ)

    with pytest.raises(UnsupportedModel, match=r"awq W4A16\), and it is a mixture of experts.*bfloat16"):
        refuse_by_config(read_config(tmp_path), CONTEXT)


def test_groups_without_a_strategy_have_that_of_their_size() -> None:
    config = PretrainedConfig(quantization_config=compressed(strategy=None))

    assert present(quantized.packed_format_of(config)).tensors(8, 64)["scale"].shape == (8, 2)


def test_what_says_nothing_of_the_numbers_is_accepted() -> None:
    more = {"kv_cache_scheme": None, "transform_config": {}, "sparsity_config": {"format": "dense"}}
    config = PretrainedConfig(quantization_config=compressed() | more | {"version": "0.14.0"})

    assert quantized.format_of(config) == "compressed-tensors W4A16"


def test_a_config_with_the_former_name_of_the_quantization_is_refused_with_the_new_one() -> None:
    config = PretrainedConfig(compression_config=compressed())

    with pytest.raises(UnsupportedModel, match=r"compression_config.*Rename it to quantization_config"):
        quantized.format_of(config)


def test_act_order_changes_nothing_where_a_row_has_one_scale() -> None:
    config = PretrainedConfig(quantization_config=GPTQ | {"desc_act": True, "group_size": -1})

    assert quantized.format_of(config) == "gptq W4A16"


@pytest.mark.parametrize(
    ("shape", "scales", "block", "refused"),
    [
        ((256, 128), (2, 1), (128, 128), False),
        ((96, 128), (1, 1), (128, 128), False),  # less than a block
        ((512, 64), (512, 4), (128, 128), False),  # experts in another format, with blocks of 1 x 16 bytes
        ((256, 128), (), (128, 128), False),  # one scale
        ((192, 128), (2, 1), (128, 128), True),  # would be divided into blocks of 96
        ((576, 7168), (5, 56), (128, 128), True),  # as in DeepSeek V3: cannot be divided
        ((128, 192), (1, 2), (128, 128), True),
    ],
)
def test_fp8_weights_that_are_converted_have_no_block_that_is_cut_off(
    shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int], refused: bool
) -> None:
    shapes = {"a.weight": shape, "a.weight_scale_inv": scales, "b.weight": (7, 9)}

    with pytest.raises(UnsupportedModel, match=r"a.weight .* fp8 blocks") if refused else nullcontext():
        quantized.refuse_uneven_blocks(shapes, block)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_mixture_with_a_block_that_is_cut_off_is_refused_before_it_is_loaded(
    tmp_path: Path, shards: int
) -> None:
    """transformers converts all weights of a mixture, whose experts have no packed layer."""
    save(tmp_path, "fp8", "Qwen 3 MoE")
    if shards > 1:
        split(tmp_path)
    mark(tmp_path, {"quant_method": "fp8", "weight_block_size": [BLOCK + 16, BLOCK]})

    with pytest.raises(UnsupportedModel, match=r"proj.weight .*Use the model's files in bfloat16"):
        load_base("tiny", entry(tmp_path), tmp_path, "cpu")


def split(folder: Path) -> None:
    """The model's weights in two files with an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{1 + (number % 2)}.safetensors" for number, name in enumerate(sorted(weights))}
    for file in set(files.values()):
        part = {name: weights[name] for name in weights if files[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_the_format_of_a_multimodal_models_text_part_counts() -> None:
    text = SimpleNamespace(quantization_config={"quant_method": "awq"})

    with pytest.raises(UnsupportedModel, match="awq"):
        quantized.format_of(SimpleNamespace(quantization_config=None, get_text_config=lambda: text))


FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}


@pytest.mark.parametrize(
    ("stored", "device", "dtype", "said"),
    [
        (compressed(), "cpu", "bfloat16", ""),
        (compressed(num_bits=8), "cuda", "bfloat16", ""),
        (compressed(num_bits=8), "cpu", "bfloat16", "8 bits on a CPU"),
        (compressed(num_bits=8, symmetric=False), "cuda", "bfloat16", "8 bits with zero points"),
        (compressed(group_size=16), "cuda", "bfloat16", "groups of 16 inputs on a GPU"),
        (compressed(group_size=16), "cpu", "bfloat16", ""),
        (compressed(group_size=256), "cuda", "bfloat16", ""),
        (compressed(num_bits=8, group_size=256), "cuda", "bfloat16", "groups of 256 inputs on a GPU"),
        (AWQ, "cpu", "bfloat16", ""),
        (AWQ, "cpu", "float32", "awq with `dtype` float32"),
        (GPTQ, "cpu", "float32", "gptq with `dtype` float32"),
        (GPTQ | {"bits": 8}, "cpu", "bfloat16", "8 bits on a CPU"),
        (GPTQ | {"group_size": 256}, "cuda", "bfloat16", "groups of 256 inputs on a GPU"),
        (FP8, "cuda", "bfloat16", ""),
        (FP8, "cpu", "float32", "fp8 with `dtype` float32"),
        (FP8 | {"activation_scheme": "static"}, "cuda", "bfloat16", "fixed scales of activations"),
    ],
)
def test_weights_for_which_vllm_has_no_kernel_are_refused_with_it(
    stored: dict[str, Any], device: Device, dtype: str, said: str
) -> None:
    config = PretrainedConfig(quantization_config=stored)

    with (
        pytest.raises(UnsupportedModel, match=f'{said}.*sampler = "transformers"') if said else nullcontext()
    ):
        quantized.refuse_without_kernel(config, dtype, device)


@pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed")
@pytest.mark.parametrize(("sampler", "refused"), [("vllm", True), ("transformers", False)])
def test_a_job_that_vllm_cannot_sample_is_refused_by_its_config(
    tmp_path: Path, sampler: SamplerName, refused: bool
) -> None:
    [family] = [one for one in FAMILIES if one.title == "Llama 2, 3"]
    family.save(tmp_path)
    mark(tmp_path, AWQ)
    models = tmp_path / "models.toml"
    models.write_text(f'[models.tiny]\npath = "{tmp_path}"\ndtype = "float32"\ncontext = {CONTEXT}\n')
    settings = Settings(models_file=models, data_dir=tmp_path, sampler=sampler)

    with pytest.raises(UnsupportedModel, match="awq with `dtype` float32") if refused else nullcontext():
        inspect_model("tiny", settings, 1)


@pytest.mark.parametrize(
    ("sampler", "stored", "advanced", "refused"),
    [
        ("vllm", FP8, {"importance": {"type": "none"}}, True),
        ("vllm", FP8, {}, False),
        ("vllm", FP8, {"loss": {"type": "dppo"}}, False),
        ("vllm", AWQ, {"importance": {"type": "none"}}, False),
        ("transformers", FP8, {"importance": {"type": "none"}}, False),
    ],
)
def test_quantized_activations_require_importance_weights(
    tmp_path: Path,
    sampler: SamplerName,
    stored: dict[str, Any],
    advanced: dict[str, Any],
    refused: bool,
) -> None:
    [family] = [one for one in FAMILIES if one.title == "Llama 2, 3"]
    family.save(tmp_path)
    mark(tmp_path, stored)
    models = tmp_path / "models.toml"
    models.write_text(f'[models.tiny]\npath = "{tmp_path}"\ndtype = "bfloat16"\ncontext = {CONTEXT}\n')
    fleet = {"tiny": ("http://sampler:8300",)} if sampler == "vllm" else {}
    settings = Settings(models_file=models, data_dir=tmp_path, samplers=fleet, samplers_key="secret")
    base = inspect_model("tiny", settings, 1)
    asked = Hyperparameters.model_validate({"advanced": advanced})
    resolved = resolve(asked, rows=8, parameters=1000, context=CONTEXT)
    job = Job(method="reinforcement", body={})

    with (
        pytest.raises(UserMistake, match=r"with the fp8 weights.*Use importance 'truncate'")
        if refused
        else nullcontext()
    ):
        refuse_uncorrected(job, base, resolved)


def test_a_larger_gap_is_announced_if_the_sampler_computes_with_the_quantized_weights(tmp_path: Path) -> None:
    save(tmp_path, "fp8")
    config = read_config(tmp_path)

    assert "activations too: vLLM with fp8" in quantized.described(config, torch.bfloat16, "vllm")
    assert "vLLM" not in quantized.described(config, torch.bfloat16, "transformers")
