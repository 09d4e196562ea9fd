"""Chat templates in the manner of the families, each with one defect, and a byte model that has their tokens."""

from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast

from tests.thinking import thinking_tokenizer
from tests.tiny import save_llama

TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
HEADER = "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
CHATML = "{%- for m in messages -%}" + TURN + "{%- endfor -%}" + HEADER
REFUSES_SYSTEM = "{%- if messages[0].role == 'system' -%}{{ raise_exception('no system role') }}{%- endif -%}"
ALTERNATES = (
    "{%- for m in messages -%}{%- if loop.index0 > 0 and m.role == messages[loop.index0 - 1].role -%}"
    "{{ raise_exception('roles alternate') }}{%- endif -%}{%- endfor -%}"
)
TOOLS = "{%- if tools -%}{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif -%}"

# By the defect.
DEFECTS = {
    "no generation prompt": CHATML.removesuffix(HEADER),
    "system messages left out": CHATML.replace("messages -%}", "messages if m.role != 'system' -%}", 1),
    "system messages rejected": REFUSES_SYSTEM + CHATML,
    "roles must alternate": ALTERNATES + CHATML,
    "no end of turn": CHATML.replace("<|im_end|>", ""),
    "closed only before a question": CHATML.replace(
        "+ '<|im_end|>\\n' }}", "}}{%- if not loop.last -%}{{ '<|im_end|>\\n' }}{%- endif -%}", 1
    ),
    "the question closed only before an answer": CHATML.replace(
        "+ '<|im_end|>\\n' }}",
        "}}{%- if not (loop.last and m.role == 'user') -%}{{ '<|im_end|>\\n' }}{%- endif -%}",
        1,
    ),
    "the date": "{{- 'Today is ' + strftime_now('%d %b %Y') + '\\n' -}}" + CHATML,
    "the second": "{{- strftime_now('%H:%M:%S') -}}" + CHATML,
    "fails always": "{{ 1 // 0 }}",
    "the user's message left out": CHATML.replace("messages -%}", "messages if m.role != 'user' -%}", 1),
    "the last message left out": CHATML.replace("in messages", "in messages[:-1]", 1),
    "another header than answers have": CHATML.replace(HEADER, HEADER.replace("assistant", "user")),
    "earlier turns left out": CHATML.replace("in messages", "in messages[-2:]", 1),
    "turns before the last two left out": CHATML.replace("in messages", "in messages[-4:]", 1),
    "content that is a list": CHATML.replace("m.content", "(m.content | selectattr('text') | join)", 1),
}

_NO_HEADER = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ m.content + '<end>' }}{%- else -%}"
    "{{ '<|im_start|>' + m.content + ' [/INST]' }}{%- endif -%}{%- endfor -%}"
)
# By the manner.
HEALTHY = {
    "a generation prompt": CHATML.replace("<|im_end|>", "<end>"),
    "a header that is always written": CHATML.replace(HEADER, "{{ '<|im_start|>assistant\\n' }}").replace(
        "<|im_end|>", "<end>"
    ),
    "the header ends the question": _NO_HEADER,  # as Mistral's
    "a space after the header": _NO_HEADER.replace("{{ m.content +", "{{ ' ' + m.content +"),  # as Llama 2's
    "a system message required": (
        "{%- if messages[0].role != 'system' -%}{{ raise_exception('system first') }}{%- endif -%}"
        + CHATML.replace("<|im_end|>", "<end>")
    ),
}


def turn_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """One byte, one token; `<|im_start|>` and `<|im_end|>` are special tokens and `<end>` is the EOS."""
    tokenizer = thinking_tokenizer(template)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    return tokenizer


def make_turn_model(folder: Path, template: str = CHATML, *, eos: tuple[str, ...] = ("<end>",)) -> Path:
    """A model that writes noise; equal weights for any template and `eos`, the end tokens of its generation config."""
    torch.manual_seed(0)
    tokenizer = turn_tokenizer(template)
    save_llama(tokenizer, len(tokenizer), 2, folder, head_dim=32)
    GenerationConfig(eos_token_id=[tokenizer.convert_tokens_to_ids(one) for one in eos]).save_pretrained(
        folder
    )
    return folder
