"""Exports in GGUF: llama.cpp computes and tokenizes as transformers does, or they are refused by name."""

import json
import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tests import llama_cpp
from tests.byte_level import PRE_TOKENIZERS, byte_level_tokenizer, gpt2
from worker.refusals import InvalidModel, UnsupportedModel
from worker.serving.export import WeightType
from worker.serving.gguf_architectures import FAMILIES, Architecture
from worker.serving.gguf_files import Origin, Pair, read_pairs, write_adapter, write_model, written
from worker.serving.gguf_vocabulary import pre_tokenizer_of

SIZE = 600
SHAPE: Mapping[str, Any] = {
    "vocab_size": SIZE + 8,  # more rows than tokens, as Qwen has
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "sliding_window": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 32}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "smollm3": ("smollm3", {}),
}
ORIGIN = Origin("tuned", "tiny", "someone/tiny")
LARGEST_DIFFERENCE = 0.02  # of a log-probability, in nats


def config_of(name: str, **options: Any) -> Any:
    model_type, own = MODELS[name]
    return AutoConfig.for_model(model_type, **{**SHAPE, **own, **options})


def make_model(folder: Path, config: Any) -> PreTrainedModel:
    """Random weights that are larger than usual, so that what is computed wrongly shows, and biases that are not 0."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.1 * noise if parameter.dim() > 1 else parameter + 0.2 * noise)
    model.save_pretrained(folder)
    return model.eval()


def make_adapter(model: PreTrainedModel, folder: Path, **options: Any) -> PeftModel:
    """An adapter with a scale that is not alpha / r alone, and that is not the same in all layers."""
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        alpha_pattern={"q_proj": 3},
        rank_pattern={"down_proj": 2},
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        **options,
    )
    adapted: Any = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(folder)
    return adapted.eval()


def largest_difference(file: llama_cpp.LlamaCpp, model: Any, prompts: Sequence[list[int]]) -> float:
    """Between the log-probabilities of the ten most likely tokens after each prompt, in nats."""
    differences: list[float] = []
    for prompt in prompts:
        with torch.no_grad():
            exact = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        found = file.next_token(prompt, 10)
        differences += [abs(logprob - exact[token].item()) for token, logprob in found.items()]
    assert len(differences) >= 30
    return max(differences)


def write(
    folder: Path, config: Any, tokenizer: PreTrainedTokenizerFast, weight_type: WeightType, pairs: Any
) -> Path:
    tokenizer.save_pretrained(folder)
    file = folder / f"{weight_type}-{len(pairs)}.gguf"
    write_model(file, weight_type, folder, config, folder, tokenizer, pairs, ORIGIN)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_what_transformers_does_with_the_adapter_beside_the_base_and_merged_into_it(
    name: str, tmp_path: Path
) -> None:
    config, tokenizer = config_of(name), byte_level_tokenizer(PRE_TOKENIZERS["qwen2"], size=SIZE)
    adapted = make_adapter(make_model(tmp_path, config), tmp_path / "adapter")
    pairs = read_pairs(tmp_path / "adapter")
    base = write(tmp_path, config, tokenizer, "f16", {})
    merged = write(tmp_path, config, tokenizer, "f16", pairs)
    write_adapter(tmp_path / "adapter.gguf", config, pairs, ORIGIN)
    draw = random.Random(0)
    prompts = [[draw.randrange(3, SIZE) for _ in range(length)] for length in (2, 5, 9, 17, 33, 40, 65, 90)]

    for file, adapter in ((base, tmp_path / "adapter.gguf"), (merged, None)):
        with llama_cpp.loaded(file, adapter) as theirs:
            assert largest_difference(theirs, adapted, prompts) < LARGEST_DIFFERENCE
    with llama_cpp.loaded(base) as theirs:
        assert largest_difference(theirs, adapted, prompts) > 10 * LARGEST_DIFFERENCE  # without the adapter
        with adapted.disable_adapter():
            assert largest_difference(theirs, adapted, prompts) < LARGEST_DIFFERENCE


def test_every_family_is_among_those_that_are_compared() -> None:
    assert {model_type for model_type, _ in MODELS.values()} == set(FAMILIES)


PIECES = [
    *"Hello world HELLO it's IT'S we'll don't 'twas x'Y naïve Größe 日本語 テスト мир 🙂🙃 ½ ٣٤ 1 12 123 1234567 3.14 "
    "<think> <|im_end|> foo_bar (a+b)=c; $5 ... !? -- https://a.b/c?d=e&f#g \u200b \xa0".split(" "),
    *(" ", "  ", "   ", "\n", "\n\n", " \n", "\t", "\r\n"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_llama_cpp_tokenizes_as_the_tokenizer_does(name: str, tmp_path: Path) -> None:
    config = config_of("llama", num_hidden_layers=1)
    tokenizer = byte_level_tokenizer(PRE_TOKENIZERS[name], ignore_merges=name == "llama-bpe")
    make_model(tmp_path, config)
    file = write(tmp_path, config, tokenizer, "f16", {})
    draw = random.Random(0)
    texts = ["".join(draw.choices(PIECES, k=draw.randint(1, 12))) for _ in range(300)]

    with llama_cpp.loaded(file) as theirs:
        assert [theirs.tokens(text) for text in texts] == [tokenizer.encode(text) for text in texts]
        chat = [{"role": "user", "content": "It's 12"}]
        assert theirs.rendered(chat) == tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
    field = gguf.GGUFReader(file).get_field(gguf.Keys.Tokenizer.PRE)
    assert field is not None and field.contents() == name


@pytest.mark.slow
def test_in_8_bits_each_weight_is_within_half_a_step_of_its_block(tmp_path: Path) -> None:
    config, tokenizer = config_of("qwen3"), byte_level_tokenizer(PRE_TOKENIZERS["qwen2"], size=SIZE)
    make_model(tmp_path, config)
    file = write(tmp_path, config, tokenizer, "q8_0", {})

    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    found = stored["blk.0.ffn_up.weight"]
    assert (found.tensor_type.name, stored["blk.0.attn_norm.weight"].tensor_type.name) == ("Q8_0", "F32")
    values = gguf.dequantize(found.data, found.tensor_type)
    exact = load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].numpy()
    steps = np.abs(exact.reshape(-1, 32)).max(1, keepdims=True) / 127
    # The step itself is rounded to 16 bits.
    assert (np.abs((values - exact).reshape(-1, 32)) <= 0.56 * steps).all()


def test_the_scale_of_each_layer_is_that_of_peft(tmp_path: Path) -> None:
    """With rank-stabilized scales, and with another alpha and rank in some layers."""
    config = config_of("llama")
    adapted = make_adapter(make_model(tmp_path, config), tmp_path / "adapter")

    pairs = read_pairs(tmp_path / "adapter")

    for name, pair in pairs.items():
        layer: Any = adapted.get_submodule(f"base_model.model.{name.removesuffix('.weight')}")
        torch.testing.assert_close(pair.added_to(torch.zeros(())), layer.get_delta_weight("default"))
    assert len({pair.scale for pair in pairs.values()}) == 3


def test_an_architecture_without_a_tested_mapping_is_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedModel, match=r"gemma2: its tensors .* no tested mapping .* llama, mistral, qwen2"
    ):
        Architecture(AutoConfig.for_model("gemma2"))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "type 'linear'"),
        ({"hidden_act": "gelu"}, "activation is gelu"),
    ],
)
def test_an_option_without_a_tested_mapping_is_refused_by_name(options: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        Architecture(config_of("llama", **options))


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("qwen2", {"rope_parameters": LLAMA3_ROPE}, "type 'llama3', and not 'default'"),
        ("qwen3", {"rope_parameters": LLAMA3_ROPE}, "type 'llama3', and not 'default'"),
        ("smollm3", {"rope_parameters": LLAMA3_ROPE}, "type 'llama3', and not 'default'"),
        ("qwen3", {"attention_bias": True}, r"biases \(attention_bias\)"),
        ("smollm3", {"attention_bias": True}, r"biases \(attention_bias\)"),
        ("smollm3", {"mlp_bias": True}, r"biases \(mlp_bias\)"),
    ],
)
def test_an_option_that_llama_cpp_reads_for_other_architectures_only_is_refused(
    name: str, options: Any, reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        Architecture(config_of(name, **options))


def test_an_adapter_of_a_head_that_is_tied_to_the_embeddings_is_refused(tmp_path: Path) -> None:
    config = config_of("llama")
    make_model(tmp_path, config)
    tokenizer = byte_level_tokenizer(PRE_TOKENIZERS["qwen2"], size=SIZE)
    pairs = {"lm_head.weight": Pair(torch.zeros(4, 64), torch.zeros(SIZE + 8, 4), 1.0)}

    with pytest.raises(UnsupportedModel, match=r"changes lm_head\.weight, which the model shares"):
        write_adapter(tmp_path / "adapter.gguf", config, pairs, ORIGIN)
    with pytest.raises(UnsupportedModel, match=r"changes lm_head\.weight, which the model shares"):
        write(tmp_path, config, tokenizer, "f16", pairs)


@pytest.mark.parametrize("layer", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_refused_by_name(layer: str, value: float, tmp_path: Path) -> None:
    config = config_of("qwen3", num_hidden_layers=1)
    model = make_model(tmp_path, config)
    model.state_dict()[layer].view(-1)[0] = value
    model.save_pretrained(tmp_path)

    with pytest.raises(InvalidModel, match=rf"weight {layer} has values that are not finite"):
        write(tmp_path, config, byte_level_tokenizer(PRE_TOKENIZERS["qwen2"], size=SIZE), "q8_0", {})


def test_an_adapter_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    pairs = {name: Pair(torch.zeros(4, 64), torch.full((96, 4), torch.nan), 1.0)}

    with pytest.raises(InvalidModel, match=f"weight {name} has values that are not finite"):
        write_adapter(tmp_path / "adapter.gguf", config_of("llama"), pairs, ORIGIN)


@pytest.mark.parametrize(("weight_type", "is_written"), [("f16", False), ("q8_0", True)])
def test_the_largest_value_is_that_of_the_type_in_the_file(
    weight_type: WeightType, is_written: bool, tmp_path: Path
) -> None:
    """8-bit blocks have a scale in 16 bits, and values up to 127 times as large."""
    config = config_of("qwen3", num_hidden_layers=1)
    model = make_model(tmp_path, config)
    model.state_dict()["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e5
    model.save_pretrained(tmp_path)
    tokenizer = byte_level_tokenizer(PRE_TOKENIZERS["qwen2"], size=SIZE)

    with nullcontext() if is_written else pytest.raises(InvalidModel, match="F16 of GGUF cannot hold"):
        assert write(tmp_path, config, tokenizer, weight_type, {}).exists()


def test_the_file_names_itself_and_its_base_model(tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter.gguf", config_of("llama"), {}, ORIGIN)

    fields = gguf.GGUFReader(tmp_path / "adapter.gguf").fields
    found = [
        fields[f"general.{key}"].contents() for key in ("name", "base_model.0.name", "base_model.0.repo_url")
    ]
    assert found == ["tuned", "tiny", "https://huggingface.co/someone/tiny"]


def test_attention_with_windows_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="qwen2: its attention has a window"):
        Architecture(config_of("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1))


def test_a_pattern_of_layers_without_rotary_embedding_that_llama_cpp_does_not_have_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="every fourth"):
        Architecture(config_of("smollm3", no_rope_layers=[1, 0, 1, 0]))


def described(tokenizer: PreTrainedTokenizerFast) -> Any:
    return json.loads(tokenizer.backend_tokenizer.to_str())


def test_an_unknown_pre_tokenizer_is_refused_with_its_steps() -> None:
    with pytest.raises(
        UnsupportedModel, match=r'"Whitespace".* not one of .* \(gpt-2, smollm, qwen2, llama-bpe\)'
    ):
        pre_tokenizer_of(described(byte_level_tokenizer(Whitespace())))


def test_merges_that_are_taken_otherwise_make_another_pre_tokenizer() -> None:
    with pytest.raises(UnsupportedModel, match="ignore_merges true"):
        pre_tokenizer_of(described(byte_level_tokenizer(gpt2(), ignore_merges=True)))


def test_a_tokenizer_of_whole_words_or_with_a_normalizer_is_refused() -> None:
    tokenizer = byte_level_tokenizer(gpt2())
    tokenizer.backend_tokenizer.normalizer = Lowercase()
    with pytest.raises(UnsupportedModel, match="normalizer is Lowercase"):
        pre_tokenizer_of(described(tokenizer))
    tokenizer.backend_tokenizer.model = WordLevel({"a": 0}, unk_token="a")
    with pytest.raises(UnsupportedModel, match=r"WordLevel.*gguf-adapter"):
        pre_tokenizer_of(described(tokenizer))


@pytest.mark.parametrize("option", ["lstrip", "rstrip", "single_word"])
def test_an_added_token_that_takes_spaces_or_whole_words_is_refused_by_name(option: str) -> None:
    tokenizer = byte_level_tokenizer(gpt2())
    tokenizer.backend_tokenizer.add_tokens([AddedToken("<s>", **{option: True})])

    with pytest.raises(UnsupportedModel, match=f"its token <s> has the option {option}"):
        pre_tokenizer_of(described(tokenizer))


@pytest.mark.parametrize(
    ("option", "value"),
    [("continuing_subword_prefix", "##"), ("end_of_word_suffix", "</w>"), ("dropout", 0.1)],
)
def test_an_option_of_bpe_that_gguf_has_no_field_for_is_refused_by_name(option: str, value: Any) -> None:
    description = described(byte_level_tokenizer(gpt2()))
    description["model"][option] = value

    with pytest.raises(UnsupportedModel, match=f"its BPE has the option {option}"):
        pre_tokenizer_of(description)


def test_a_token_of_unknown_text_is_refused_where_bytes_are_missing() -> None:
    description = described(byte_level_tokenizer(gpt2()))
    description["model"]["unk_token"] = "<|endoftext|>"
    assert pre_tokenizer_of(description) == "gpt-2"

    del description["model"]["vocab"]["a"]

    with pytest.raises(UnsupportedModel, match="its BPE has the option unk_token"):
        pre_tokenizer_of(description)


def test_of_several_named_templates_the_file_has_the_one_for_chats_without_tools(tmp_path: Path) -> None:
    config, tokenizer = config_of("qwen3", num_hidden_layers=1), byte_level_tokenizer(gpt2(), size=SIZE)
    tokenizer.chat_template = {"default": "chat", "tool_use": "tools"}
    make_model(tmp_path, config)

    file = write(tmp_path, config, tokenizer, "f16", {})

    assert gguf.GGUFReader(file).fields["tokenizer.chat_template"].contents() == "chat"


def test_an_adapter_that_is_more_than_pairs_of_matrices_is_refused(tmp_path: Path) -> None:
    make_adapter(make_model(tmp_path, config_of("llama")), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({**load_file(file), "base_model.model.score.weight": torch.zeros(1, 64)}, file)

    with pytest.raises(UnsupportedModel, match=r"such as base_model\.model\.score\.weight.*'peft'"):
        read_pairs(tmp_path / "adapter")


def fail_while_writing(file: Path) -> None:
    with written(file) as partial:
        partial.touch()
        raise OSError("no space")


def test_a_file_that_could_not_be_finished_is_deleted(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no space"):
        fail_while_writing(tmp_path / "model.gguf")

    assert list(tmp_path.iterdir()) == []
