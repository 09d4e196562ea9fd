"""Model families as tiny random models: the architectures of real ones with two layers and seventy words."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Mistral4ForCausalLM, PreTrainedModel

from tests.families.more import MORE
from tests.tiny import WORDS, tiny_tokenizer

CONTEXT = 128
WINDOW = 16  # shorter than the prompts of the probe (40) and of the tests

SHAPE: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": WORDS.index("<pad>"),
    "eos_token_id": WORDS.index("<end>"),
    "bos_token_id": None,
}
SMALL_HEADS = {"head_dim": 16}
WINDOWED = {"sliding_window": WINDOW}
ONE_OF_TWO = {"layer_types": ["sliding_attention", "full_attention"]}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
DELTA_RULE = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}


@dataclass(frozen=True, eq=False)
class Family:
    """One architecture; `options` are the fields of its config beside SHAPE."""

    title: str  # as people know it
    model_type: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        return AutoConfig.for_model(self.model_type, **{**SHAPE, **self.options})

    def model(self, seed: int = 0) -> PreTrainedModel:
        """With larger weights than usual, so that what is computed wrongly shows."""
        config = self.config()
        if self.model_type == "mistral4":  # known to the automatic class as a multimodal model only
            model = Mistral4ForCausalLM(config).float()
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "sinks" in name:
                    parameter.normal_(0.0, 1.0, generator=generator)
                elif parameter.dim() > 1:
                    parameter.normal_(0.0, 0.12, generator=generator)
        return model.eval()

    def save(self, folder: Path) -> Path:
        """The model and a tokenizer in Hugging Face format."""
        self.model().save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        return folder


FAMILIES: tuple[Family, ...] = (
    Family("Llama 2, 3", "llama"),
    Family("Qwen 2, 2.5", "qwen2"),
    Family("Qwen 2 with windows", "qwen2", {**WINDOWED, "use_sliding_window": True, "max_window_layers": 1}),
    Family("Qwen 3", "qwen3", SMALL_HEADS),
    Family("Qwen 2 MoE", "qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    Family("Qwen 3 MoE", "qwen3_moe", {**EXPERTS, **SMALL_HEADS}),
    Family("Qwen3-Next", "qwen3_next", {**DELTA_RULE, **EXPERTS, "shared_expert_intermediate_size": 32}),
    Family("Qwen 3.5", "qwen3_5_text", DELTA_RULE),
    Family(
        "Laguna",
        "laguna",
        {
            **EXPERTS,
            **SMALL_HEADS,
            "shared_expert_intermediate_size": 32,
            "layer_types": ["full_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "num_attention_heads_per_layer": [4, 4],
        },
    ),
    Family("Gemma", "gemma", SMALL_HEADS),
    Family("Gemma 2", "gemma2", {**WINDOWED, **SMALL_HEADS, "query_pre_attn_scalar": 16}),
    Family(
        "Gemma 3",
        "gemma3_text",
        {**WINDOWED, **SMALL_HEADS, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
    ),
    Family(
        "Gemma 4",
        "gemma4_text",
        {
            **ONE_OF_TWO,
            **WINDOWED,
            **SMALL_HEADS,
            "vocab_size_per_layer_input": 96,
            "hidden_size_per_layer_input": 16,
            "global_head_dim": 16,
            "num_kv_shared_layers": 0,
        },
    ),
    Family("Mistral", "mistral", SMALL_HEADS),
    Family("Mistral 7B v0.1 (windows)", "mistral", {**WINDOWED, **SMALL_HEADS}),
    Family("Ministral", "ministral", {**WINDOWED, **SMALL_HEADS}),
    Family("Mixtral", "mixtral", {**LOCAL_EXPERTS, **SMALL_HEADS}),
    Family("Phi-1, 2", "phi"),
    Family("Phi-3", "phi3", WINDOWED),
    Family("Phi-4", "phi3"),
    Family("gpt-oss", "gpt_oss", {**LOCAL_EXPERTS, **WINDOWED, **SMALL_HEADS, **ONE_OF_TWO}),
    Family("OLMo 2", "olmo2"),
    Family("OLMo 3", "olmo3", {**WINDOWED, **ONE_OF_TWO}),
    Family("OLMoE", "olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    Family("SmolLM 3", "smollm3", {"no_rope_layers": [1, 0]}),
    Family(
        "Granite 3",
        "granite",
        {
            "attention_multiplier": 0.25,
            "logits_scaling": 2.0,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
        },
    ),
    Family("Granite 3 MoE", "granitemoe", {**LOCAL_EXPERTS, "logits_scaling": 2.0}),
    Family(
        "Granite 4",
        "granitemoehybrid",
        {**LOCAL_EXPERTS, **MAMBA, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 64},
    ),
    Family(
        "DeepSeek V2",
        "deepseek_v2",
        {
            **LATENT,
            **ROUTED,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
        },
    ),
    Family(
        "DeepSeek V3, R1",
        "deepseek_v3",
        {**LATENT, **ROUTED, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    Family("GLM 4 (9B)", "glm", SMALL_HEADS),
    Family("GLM 4 0414", "glm4", SMALL_HEADS),
    Family(
        "GLM 4.5",
        "glm4_moe",
        {**ROUTED, **SMALL_HEADS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    Family("EXAONE 4", "exaone4", {**WINDOWED, "sliding_window_pattern": 2, **ONE_OF_TWO}),
    Family("Cohere Command R", "cohere", {"logit_scale": 0.25}),
    Family("Cohere Command A", "cohere2", {**ONE_OF_TWO, **WINDOWED, "logit_scale": 0.25}),
    Family("Nemotron 3, 4 (Minitron)", "nemotron"),
    Family(
        "Nemotron-H",
        "nemotron_h",
        {
            **SMALL_HEADS,
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
        },
    ),
    Family("StableLM", "stablelm"),
    Family("Seed-OSS", "seed_oss", SMALL_HEADS),
    Family("Hunyuan dense", "hunyuan_v1_dense", SMALL_HEADS),
    Family("ERNIE 4.5", "ernie4_5", SMALL_HEADS),
    Family(
        "ERNIE 4.5 MoE",
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
    ),
    Family("MiniMax-M2", "minimax_m2", {**LOCAL_EXPERTS, **SMALL_HEADS}),
    Family("MiniMax-Text-01", "minimax", {**LOCAL_EXPERTS, **SMALL_HEADS}),
    Family("LFM 2", "lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16}),
    Family(
        "Falcon-H1",
        "falcon_h1",
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    ),
    Family(
        "Llama 4",
        "llama4_text",
        {
            **SMALL_HEADS,
            "num_local_experts": 2,
            "intermediate_size_mlp": 128,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
        },
    ),
    Family("StarCoder 2", "starcoder2"),
    Family("GPT-NeoX, Pythia", "gpt_neox"),
    Family("GPT-2", "gpt2"),
    Family("OPT", "opt", {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    Family("Falcon", "falcon", {"new_decoder_architecture": False}),
    Family("BLOOM", "bloom"),
    Family("Mamba 2", "mamba2", {**SMALL_HEADS, "num_heads": 8, "state_size": 16, "n_groups": 1}),
)
FAMILIES += tuple(
    Family(title, model_type, {"num_hidden_layers": 4, **options})
    for (title, model_type), options in MORE.items()
)
