"""Bases with packed weights: decoded as the formats say, computed as plain weights are, and never held expanded."""

import asyncio
import copy
import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from core.registry import BaseModelEntry
from tests.families.zoo import FAMILIES
from tests.present import present, untyped
from tests.tiny import make_tiny_model
from tests.worker.conftest import Bench
from tests.worker.packed_models import KINDS, Kind, compressed, decoded, pack
from tests.worker.test_family_jobs import train_on
from tests.worker.test_resume import Fate, crash, die, left_by, measured_in, moment, mortal
from worker.checks import compatibility
from worker.cli import main
from worker.cli.models import weights_of
from worker.model import memory, packed, quantized, sizing
from worker.model.packed import PackedLinear
from worker.model.packed_formats import format_in
from worker.model.policy import Base, Policy, load_base, read_config
from worker.refusals import InvalidModel, UnsupportedModel
from worker.serving.continuous import ServedModel
from worker.serving.export import TEXTS, merge, refuse_unmapped
from worker.sharing.image import Image, opened

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(64, 80), (48, 160)]


def layer_of(
    kind: Kind, rows: int, columns: int, dtype: torch.dtype, seed: int = 0
) -> tuple[PackedLinear, Tensor]:
    """A packed layer with random tensors, and its weight by the slow loop."""
    stored = kind.make(rows, columns, torch.Generator().manual_seed(seed))
    format = present(format_in(kind.config))
    tensors = {
        role: stored[one.name].to(dtype if one.dtype == "model" else getattr(torch, one.dtype))
        for role, one in format.tensors(rows, columns).items()
    }
    layer = PackedLinear(format, (rows, columns), tensors, None, dtype)
    return layer, decoded(kind, stored, rows, columns, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_a_weight_is_decoded_as_element_by_element(name: str, dtype: torch.dtype) -> None:
    rows, columns = (64, 96)

    layer, expected = layer_of(KINDS[name], rows, columns, dtype)

    assert torch.equal(layer.weight, expected)
    assert layer.weight.is_contiguous() and layer.weight.dtype == dtype


@pytest.mark.parametrize("columns", [20, 44])
def test_rows_that_do_not_fill_their_last_word_are_decoded(columns: int) -> None:
    layer, expected = layer_of(compressed(4, 0, symmetric=False), 12, columns, torch.bfloat16)

    assert torch.equal(layer.weight, expected)


def decompressed(kind: Kind, rows: int, columns: int) -> Tensor:
    """The weight that compressed-tensors makes of the tensors of `layer_of`, in the dtype of the scales."""
    compressors = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    [weights] = [one["weights"] for one in kind.config["config_groups"].values()]
    arguments = quantization.QuantizationArgs(**weights)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
    stored = kind.make(rows, columns, torch.Generator().manual_seed(0))
    weight: Tensor = compressors.PackedQuantizationCompressor.decompress(stored, scheme)["weight"]
    return weight


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 32), (4, 0), (8, 0)])
def test_a_weight_is_that_of_compressed_tensors_where_scales_have_the_dtype_of_the_model(
    bits: int, group: int, symmetric: bool
) -> None:
    rows, columns, dtype = 64, 256, torch.bfloat16
    kind = compressed(bits, group, symmetric=symmetric, dtype=dtype)

    theirs = decompressed(kind, rows, columns)

    layer, _ = layer_of(kind, rows, columns, dtype)
    assert theirs.dtype == dtype and torch.equal(layer.weight, theirs)


def test_scales_in_float16_are_rounded_to_the_dtype_of_the_model_before_they_multiply() -> None:
    """compressed-tensors multiplies in float16 and rounds last, which is not what vLLM computes with."""
    kind = compressed(4, 32)
    theirs = decompressed(kind, 64, 96)

    layer, _ = layer_of(kind, 64, 96, torch.bfloat16)

    differing = (layer.weight != theirs.to(torch.bfloat16)).float().mean()
    assert 0.02 < differing < 0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_outputs_and_gradients_are_those_of_the_decoded_layer(name: str, dtype: torch.dtype) -> None:
    layer, weight = layer_of(KINDS[name], 64, 96, dtype)
    layer.bias = nn.Parameter(torch.randn(64).to(dtype), requires_grad=False)
    ours, theirs = (
        torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(1)).to(dtype) for _ in range(2)
    )

    output = layer(ours.requires_grad_())
    expected = nn.functional.linear(theirs.requires_grad_(), weight, layer.bias)
    for one in (output, expected):
        one.square().sum().backward()

    assert torch.equal(output, expected)
    assert torch.equal(present(ours.grad), present(theirs.grad))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Mapping[str, Tensor]]]:
    """A tiny model of a kind, and the values of its packed weights, made once."""
    made: dict[str, tuple[Path, Mapping[str, Tensor]]] = {}

    def make(name: str) -> tuple[Path, Mapping[str, Tensor]]:
        if name not in made:
            folder = make_tiny_model(tmp_path_factory.mktemp("packed"))
            made[name] = folder, pack(folder, name)
        return made[name]

    return make


def base_of(folder: Path, dtype: str = "float32") -> Base:
    return load_base(
        "tiny", BaseModelEntry.model_validate({"path": folder, "dtype": dtype, "context": 128}), folder, "cpu"
    )


def plain_base(folder: Path, dtype: str = "float32") -> Base:
    """The same weights, expanded."""
    base = base_of(folder, dtype)
    packed.expand(base.model, base.model.dtype)
    return base


@pytest.mark.parametrize("name", KINDS)
def test_a_model_is_loaded_with_its_layers_packed(folders: Any, name: str) -> None:
    folder, values = folders(name)

    base = base_of(folder)

    layers = {name: one for name, one in base.model.named_modules() if isinstance(one, PackedLinear)}
    assert {f"{name}.weight" for name in layers} == set(values)
    assert all(torch.equal(layer.weight, values[f"{name}.weight"]) for name, layer in layers.items())
    shape = memory.shape_of(read_config(folder), torch.float32)
    assert shape.parameters == base.parameters
    held = sum(tensor.nbytes for tensor in base.model.state_dict().values())
    assert shape.weight_bytes == held
    assert shape.weight_bytes < 0.5 * shape.parameters * 4


def test_scales_have_the_dtype_of_the_model(folders: Any) -> None:
    folder, _ = folders("awq")

    base = base_of(folder, "bfloat16")

    kinds = {
        (one.scale.dtype, one.packed.dtype) for one in base.model.modules() if isinstance(one, PackedLinear)
    }
    assert kinds == {(torch.bfloat16, torch.int32)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["W4A16", "fp8 with blocks that are cut off"])
def test_the_gradient_of_an_adapter_is_that_on_the_decoded_model(folders: Any, name: str, dtype: str) -> None:
    folder, _ = folders(name)
    ids = torch.arange(3, 23)[None]

    def step(base: Base) -> list[Tensor]:
        policy = Policy(base, rank=4, alpha=8, seed=0)
        with policy.moved():
            logits = policy.model(input_ids=ids, use_cache=False).logits
            logits.float().logsumexp(-1).sum().backward()
        return [logits, *(present(one.grad) for one in policy.trainable)]

    ours, theirs = step(base_of(folder, dtype)), step(plain_base(folder, dtype))

    assert all(gradient.any() for gradient in ours)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that operations make, while they live; not those of a model's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        own = [*model.parameters(), *model.buffers()]
        self._own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._own:
                    self._made[untyped(StorageWeakRef)(storage)] = storage.nbytes()
        self._made = {made: size for made, size in self._made.items() if not untyped(made).expired()}
        self.peak = max(self.peak, sum(self._made.values()))
        return output


def peak_of(base: Base) -> int:
    """Bytes of a forward and a backward pass through a model with an adapter."""
    policy = Policy(base, rank=4, alpha=8, seed=0)
    with LiveBytes(policy.model) as live:
        policy.model(input_ids=torch.arange(3, 8)[None], use_cache=False).logits.float().sum().backward()
    peak: int = live.peak
    return peak


def test_a_step_needs_the_memory_of_one_decoded_layer_beside_that_on_plain_weights(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, layers=6)
    values = pack(folder, "W4A16")
    config = read_config(folder)
    shape = memory.shape_of(config, torch.bfloat16)

    more = peak_of(base_of(folder, "bfloat16")) - peak_of(plain_base(folder, "bfloat16"))

    decoded_layer = sizing.decoded_bytes(shape, reordered=False)
    assert 0 < more <= decoded_layer < 0.1 * sum(2 * value.numel() for value in values.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_autograd_keeps_no_decoded_weight(folders: Any, dtype: str) -> None:
    folder, values = folders("W4A16")
    policy = Policy(base_of(folder, dtype), rank=4, alpha=8, seed=0)
    sizes = {weight.numel() for weight in values.values()}
    saved: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        policy.model(input_ids=torch.arange(3, 8)[None], use_cache=False)

    assert saved and not sizes & set(saved)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", KINDS)
def test_the_forward_and_the_sampler_are_exact_and_all_layers_get_adapters(
    folders: Any, name: str, dtype: str
) -> None:
    folder, _ = folders(name)
    policy = Policy(base_of(folder, dtype), rank=4, alpha=8, seed=0)

    verdict = compatibility.probe(policy, sampled=True)

    assert (verdict.route.forward, verdict.route.decode) == ("packed", "shared")
    assert policy.coverage.modules == 14
    assert policy.coverage.share == pytest.approx(
        Policy(plain_base(folder), rank=4, alpha=8, seed=0).coverage.share
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_own_engine_serves_the_packed_model_as_the_decoded_one(folders: Any, dtype: str) -> None:
    folder, _ = folders("awq")

    def logits(base: Base) -> Tensor:
        served = ServedModel(base)
        served.use([])
        return served.logits(served.decoding([[5, 6, 7, 8]], [0]).start())

    assert torch.equal(logits(base_of(folder, dtype)), logits(plain_base(folder, dtype)))


@torch.no_grad()
def test_a_packed_base_is_shared_by_processes(folders: Any) -> None:
    folder, _ = folders("fp8 with blocks that are cut off")
    ids = torch.arange(3, 13)[None]
    expected = base_of(folder).model(input_ids=ids).logits

    image = Image(base_of(folder).model)
    shared = opened(pickle.loads(pickle.dumps(image.describe())), image.file)

    assert sum(isinstance(one, PackedLinear) for one in shared.modules()) == 14
    assert torch.equal(shared(input_ids=ids).logits, expected)


def test_a_check_of_the_model_shows_the_format_and_the_memory_of_its_weights(
    folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = folders("W4A16")
    models_file = tmp_path / "models.toml"
    models_file.write_text(f'[models.tiny]\npath = "{folder}"\ndtype = "bfloat16"\ncontext = 128\n')
    monkeypatch.setenv("REGRAFT_MODELS_FILE", str(models_file))
    monkeypatch.setenv("REGRAFT_DATA_DIR", str(tmp_path / "data"))

    assert main(["models", "check"]) == 0

    said = capsys.readouterr().out
    assert "weights        compressed-tensors W4A16, packed, " in said
    assert "weight-only: vLLM is meant to compute with the same weights" in said


def test_a_check_of_the_model_says_that_vllm_cannot_sample_it_here(folders: Any) -> None:
    folder, _ = folders("W8A16")
    config = read_config(folder)

    said = weights_of(config, memory.shape_of(config, torch.bfloat16), "bfloat16", "cpu")

    assert said.endswith("vLLM cannot sample it: it has no kernel for 8 bits on a CPU")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lm_head.weight_packed": 8, "lm_head.weight_scale": 2}, r"its head \(lm_head\) is packed"),
        ({"model.layers.0.self_attn.q_proj.weight_zero_point": 2}, "the tensor .*q_proj.weight_zero_point"),
        ({"model.layers.0.self_attn.q_proj.transform.weight": 2}, "the tensor .*q_proj.transform.weight"),
        ({"model.layers.0.mixer.weight_scale": 2}, "model.layers.0.mixer, which is no linear layer"),
    ],
)
def test_files_that_do_not_fit_the_format_are_refused(
    tmp_path: Path, change: Mapping[str, int], said: str
) -> None:
    folder = make_tiny_model(tmp_path)
    pack(folder, "W4A16")
    file = folder / "model.safetensors"
    added = {name: torch.zeros(64, columns, dtype=torch.int32) for name, columns in change.items()}
    save_file(load_file(file) | added, file, metadata={"format": "pt"})

    with pytest.raises(UnsupportedModel, match=said):
        base_of(folder)


@pytest.mark.parametrize("layer", ["mtp.layers.0.mlp.up_proj", "model.visual.blocks.0.mlp.linear_fc1"])
def test_packed_layers_that_transformers_leaves_out_are_left_out(tmp_path: Path, layer: str) -> None:
    [family] = [one for one in FAMILIES if one.title == "Qwen 3.5"]
    family.save(tmp_path)
    name = "fp8 with blocks that are cut off"
    pack(tmp_path, name)
    file = tmp_path / "model.safetensors"
    added = KINDS[name].make(128, 64, torch.Generator().manual_seed(0))
    stored = load_file(file) | {f"{layer}.{own}": tensor for own, tensor in added.items()}
    save_file(stored, file, metadata={"format": "pt"})

    base = base_of(tmp_path)

    assert any(isinstance(one, PackedLinear) for one in base.model.modules())


# With these changes of its config only the feed-forward layers are packed, some with the names of multimodal models.
PARTLY: Mapping[str, Mapping[str, Any]] = {
    "W4A16": {"ignore": ["re:model.language_model.layers.*self_attn.*", "lm_head"]},
    "awq": {"modules_to_not_convert": ["self_attn"]},
    "gptq": {"modules_in_block_to_quantize": [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]},
    "fp8 with blocks that are cut off": {
        "modules_to_not_convert": [
            f"language_model.model.layers.{layer}.self_attn.{part}_proj"
            for layer in (0, 1)
            for part in "qkvo"
        ]
    },
}


@pytest.mark.parametrize("name", PARTLY)
def test_layers_that_the_config_leaves_plain_are_counted_as_plain(tmp_path: Path, name: str) -> None:
    folder = make_tiny_model(tmp_path)
    pack(folder, name, only="mlp")
    change_config(folder, PARTLY[name])

    assert_memory_is_that_of_the_loaded_model(folder)


def test_only_the_targets_of_a_scheme_are_counted_as_packed(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    pack(folder, "W4A16", only="mlp")
    [group] = KINDS["W4A16"].config["config_groups"].values()
    change_config(folder, {"config_groups": {"group_0": group | {"targets": ["re:.*mlp.*"]}}})

    assert_memory_is_that_of_the_loaded_model(folder)


def change_config(folder: Path, change: Mapping[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))


def assert_memory_is_that_of_the_loaded_model(folder: Path) -> None:
    base = base_of(folder)

    held = sum(tensor.nbytes for tensor in base.model.state_dict().values())
    assert memory.shape_of(read_config(folder), torch.float32).weight_bytes == held
    counted = present(sizing.shape_of_config(json.loads((folder / "config.json").read_text()), 4))
    assert counted.weight_bytes == held


def test_a_bias_that_the_model_does_not_have_is_refused_unless_it_is_zero(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    pack(folder, "gptq")  # with zeros
    base_of(folder)
    file = folder / "model.safetensors"
    name = "model.layers.0.mlp.up_proj.bias"
    save_file(load_file(file) | {name: torch.ones(128).half()}, file, metadata={"format": "pt"})

    with pytest.raises(UnsupportedModel, match=f"the bias {name}, which the model does not have"):
        base_of(folder)


def test_a_layer_without_whole_groups_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    pack(folder, "W4A16")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 48
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(
        UnsupportedModel, match="down_proj cannot be decoded: its 128 inputs are not whole groups of 48"
    ):
        base_of(folder)


def test_a_model_that_lacks_a_part_of_a_packed_layer_is_invalid(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    pack(folder, "W4A16")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight_packed"]
    save_file(tensors, file, metadata={"format": "pt"})

    with pytest.raises(InvalidModel, match=r"lack 1 weights.*up_proj\.weight_packed"):
        base_of(folder)


def test_a_gguf_file_of_the_whole_model_is_refused_before_a_folder_is_made(
    folders: Any, tmp_path: Path
) -> None:
    folder, _ = folders("awq")
    entry = BaseModelEntry(path=folder, dtype="float32", context=128)

    refuse_unmapped(entry, tmp_path, tmp_path, with_model=False)
    with pytest.raises(UnsupportedModel, match=r"GGUF is not supported for quantized weights \(awq W4A16\)"):
        refuse_unmapped(entry, tmp_path, tmp_path, with_model=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_job_resumes_bit_for_bit_and_is_that_on_the_decoded_model(
    bench: Bench, folders: Any, migrated_sqlite: Path, tmp_path: Path, name: str
) -> None:
    """Rollouts, rewards, metrics, adapters and the optimizer's state, in float32."""
    folder, _ = folders(name)
    base, plain = base_of(folder), plain_base(folder)

    def on_packed() -> Policy:
        return Policy(copy.deepcopy(base), rank=4, alpha=8, seed=0)

    def on_plain() -> Policy:
        return Policy(copy.deepcopy(plain), rank=4, alpha=8, seed=0)

    (tmp_path / "plain").mkdir()
    (tmp_path / "packed").mkdir()
    expected = measured_in(tmp_path / "plain", migrated_sqlite, on_plain)
    whole = measured_in(tmp_path / "packed", migrated_sqlite, on_packed)
    die(mortal(bench, on_packed, Fate(moment(whole, "before the update", 2))))
    crash(bench)
    asyncio.run(mortal(bench, on_packed, Fate()).train())

    assert whole.left["status"] == "succeeded"
    assert left_by(bench) == whole.left
    assert whole.left == expected.left


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_job_from_files_says_that_weights_are_packed_and_its_adapter_is_merged_into_their_values(
    bench: Bench, folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder, values = folders(name)
    config = read_config(folder)

    train_on(bench, folder, monkeypatch)

    assert bench.job().status == "succeeded", bench.events()
    said = f"The model's files hold {quantized.format_of(config)} weights. Training computes with their values in "
    assert any(f"{said}float32, and decodes one layer at a time" in event for event in bench.events())
    entry = BaseModelEntry(path=folder, dtype="float32", context=128)
    policy = Policy(base_of(folder), rank=4, alpha=8, seed=0)
    with policy.moved():
        policy.save(tmp_path / "adapter")
        deltas = {
            name: one.get_delta_weight("default")
            for name, one in policy.causal.named_modules()
            if hasattr(one, "get_delta_weight")
        }
    for text in TEXTS:
        (tmp_path / "adapter" / text).touch()
    merge(entry, tmp_path, tmp_path / "adapter", tmp_path / "merged")
    merged = base_of(tmp_path / "merged").model.state_dict()
    assert quantized.format_of(read_config(tmp_path / "merged")) == ""
    for weight, value in values.items():
        assert torch.equal(merged[weight], value + deltas[weight.removesuffix(".weight")])
