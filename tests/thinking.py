"""Reasoning models made tiny: chat templates in the manner of the families, and a byte model that has their tags."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from tests.tiny import save_llama

_TAGS = """
    <think> </think> <|start|> <|end|> <|channel|> <|message|> <|return|> <|channel> <channel|> <user> <assistant>
""".split()

_USER = "{%- if m.role != 'assistant' -%}{{ '<user>' + m.content }}"

# As Qwen3: the model opens the thought itself, and the prompt holds an empty one if thinking is off.
HYBRID = (
    "{%- for m in messages -%}" + _USER + "{%- else -%}{{ '<assistant>' }}"
    "{%- if loop.last -%}{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{%- endif -%}"
    "{{ m.content }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<assistant>' }}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}{%- endif -%}"
)
# As Qwen3.5: the prompt opens the thought.
OPENED = HYBRID.replace(
    "{%- endif -%}{%- endif -%}", "{%- else -%}{{ '<think>\\n' }}{%- endif -%}{%- endif -%}"
)
# As the distills of DeepSeek-R1: thoughts are removed from earlier answers and never rendered.
DISTILL = (
    "{%- for m in messages -%}"
    + _USER
    + "{%- else -%}{{ '<assistant>' + m.content.split('</think>')[-1] }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<assistant><think>\\n' }}{%- endif -%}"
)
# As Qwen3.8: earlier thoughts are kept.
KEPT = (
    "{%- for m in messages -%}" + _USER + "{%- else -%}{{ '<assistant>' }}{%- if m.reasoning_content -%}"
    "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif -%}{{ m.content }}"
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<assistant>' }}{%- endif -%}"
)
# As LFM2.5: the template only removes thoughts, and the model opens them.
LFM = DISTILL.replace("<assistant><think>\\n", "<assistant>")
# As gpt-oss: channels, and the effort in the header.
HARMONY = (
    "{{- 'Reasoning: ' + (reasoning_effort or 'medium') -}}{%- for m in messages -%}"
    "{%- if m.role != 'assistant' -%}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}"
    "{%- else -%}{%- if m.thinking and loop.last -%}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif -%}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}"
)
# As Gemma 4: thinking is off unless it is switched on.
GEMMA = (
    "{%- if enable_thinking -%}{{ 'think' }}{%- endif -%}{%- for m in messages -%}"
    + _USER
    + "{%- else -%}{{ '<assistant>' }}{%- if m.reasoning and enable_thinking -%}"
    "{{ '<|channel>thought\\n' + m.reasoning + '\\n<channel|>' }}{%- endif -%}{{ m.content }}"
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<assistant>' }}{%- endif -%}"
)
FAMILIES = {
    "hybrid": HYBRID,
    "opened": OPENED,
    "distill": DISTILL,
    "kept": KEPT,
    "lfm": LFM,
    "harmony": HARMONY,
    "gemma": GEMMA,
}


def thinking_tokenizer(template: str | None = HYBRID, *, special: bool = True) -> PreTrainedTokenizerFast:
    """One byte, one token; with `special` each tag is one too."""
    letters = sorted(ByteLevel.alphabet())
    tokens = Tokenizer(BPE({token: i for i, token in enumerate(["<pad>", "<end>", *letters])}, []))
    tokens.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokens.decoder = ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<end>", chat_template=template
    )
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": _TAGS})
    return tokenizer


def make_thinking_model(folder: Path, template: str = HYBRID, *, seed: int = 0) -> Path:
    """A model that writes noise, with the tags in its vocabulary."""
    torch.manual_seed(seed)
    tokenizer = thinking_tokenizer(template)
    return save_llama(tokenizer, len(tokenizer), 2, folder, head_dim=32)
