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

# Without a defect: its answers end with the EOS.
BASE = CHATML.replace("<|im_end|>", "<end>")
CLOSES = "+ '<end>\\n' }}"
CALLS = "(m.tool_calls | tojson if m.tool_calls else '')"
TOOLS_BASE = TOOLS.replace("<|im_end|>", "<end>") + BASE.replace("m.content", f"m.content + {CALLS}")


def base_with(part: str, other: str, base: str = BASE) -> str:
    """A template in which one part is another."""
    assert base.count(part) == 1
    return base.replace(part, other)


# By the defect: the template, and words of what is said of it in its facts or in the refusal of a prompt.
NAMED_DEFECTS = {
    "an end of turn that is no EOS": (CHATML, "Answers also end at '<|im_end|>'"),
    "no generation prompt": (base_with(HEADER, ""), "writes nothing before an answer"),
    "system messages left out": (
        base_with("messages -%}", "messages if m.role != 'system' -%}"),
        "leaves out system messages",
    ),
    "system messages rejected": (REFUSES_SYSTEM + BASE, "system messages rejected"),
    "roles must alternate": (ALTERNATES + BASE, "strict alternation of roles"),
    "no end of turn": (base_with("<end>", ""), "writes no special token after an answer"),
    "closed only before a question": (
        base_with(CLOSES, "}}{%- if not loop.last -%}{{ '<end>\\n' }}{%- endif -%}"),
        "ends the user's message only if an answer follows it",
    ),
    "the question closed only before an answer": (
        base_with(CLOSES, "}}{%- if not (loop.last and m.role == 'user') -%}{{ '<end>\\n' }}{%- endif -%}"),
        "ends the user's message only if an answer follows it",
    ),
    "the date": ("{{- 'Today is ' + strftime_now('%d %b %Y') + '\\n' -}}" + BASE, "the date"),
    "the second": ("{{- strftime_now('%H:%M:%S') -}}" + BASE, "the date"),
    "fails always": ("{{ 1 // 0 }}", "division"),
    "the user's message left out": (
        base_with("messages -%}", "messages if m.role != 'user' -%}"),
        "the user's message is not in the prompt",
    ),
    "the last message left out": (base_with("in messages", "in messages[:-1]"), "is not in the prompt"),
    "another header than answers have": (
        base_with(HEADER, HEADER.replace("assistant", "user")),
        "ends prompts with another text",
    ),
    "an EOS after the generation prompt": (
        base_with("assistant\\n", "assistant\\n<end>"),
        "ends prompts with another text",
    ),
    "an end of turn after the generation prompt": (
        base_with("assistant\\n", "assistant\\n<|im_end|>", CHATML),
        "ends prompts with another text",
    ),
    "earlier turns left out": (base_with("in messages", "in messages[-2:]"), "leaves out messages"),
    "turns before the last two left out": (
        base_with("in messages", "in messages[-4:]"),
        "leaves out messages",
    ),
    "all but the last six messages left out": (
        base_with("in messages", "in messages[-6:]"),
        "leaves out messages",
    ),
    "all but the last twenty messages left out": (
        base_with("in messages", "in messages[-20:]"),
        "leaves out messages",
    ),
    "messages in reverse": (base_with("in messages", "in messages | reverse"), "in another order"),
    "earlier messages in reverse": (
        base_with("in messages", "in (messages[:-1] | reverse | list) + messages[-1:]"),
        "in another order",
    ),
    "earlier messages twice": (base_with("in messages", "in messages[:-1] + messages"), "several times"),
    "content that is a list": (
        base_with("m.content", "(m.content | selectattr('text') | join)"),
        "answers are not in the conversation",
    ),
    "the first line of content only": (
        base_with("m.content", "m.content.split('\\n')[0]"),
        "leaves out parts of long messages",
    ),
    "the last line of content only": (
        base_with("m.content", "m.content.split('\\n')[-1]"),
        "leaves out parts of long messages",
    ),
    "content cut at 200 characters": (
        base_with("m.content", "m.content[:200]"),
        "leaves out parts of long messages",
    ),
    "content cut at 4,000 characters": (
        base_with("m.content", "m.content[:4000]"),
        "leaves out parts of long messages",
    ),
    "system messages cut": (
        base_with("m.content", "(m.content[:99] if m.role == 'system' else m.content)"),
        "leaves out parts of long messages",
    ),
    "a word by chance": ("{{ ['Hi', 'Hello'] | random }}" + BASE, "writes text that differs each time"),
    "a seldom word": (
        "{% if (range(99999) | random) + (range(99999) | random) == 0 %}Hi{% endif %}" + BASE,
        "writes text that differs each time",
    ),
    "words by chance": (
        base_with("m.content", "m.content + lipsum(1)"),
        "writes text that differs each time",
    ),
    "the address of an object": (
        base_with("m.content", "m.content + m.items | string"),
        "writes text that differs each time",
    ),
    "calls left out": (base_with(CALLS, "''", TOOLS_BASE), "leaves out calls of functions"),
    "arguments of calls left out": (
        base_with(CALLS, "(m.tool_calls[0].function.name if m.tool_calls else '')", TOOLS_BASE),
        "leaves out calls of functions",
    ),
    "results left out": (
        base_with("messages -%}", "messages if m.role != 'tool' -%}", TOOLS_BASE),
        "leaves out results of functions",
    ),
    "results cut": (
        base_with("m.content", "(m.content[:99] if m.role == 'tool' else m.content)", TOOLS_BASE),
        "leaves out results of functions",
    ),
    "calls and results left out": (
        TOOLS.replace("<|im_end|>", "<end>") + base_with("messages -%}", "messages if m.role != 'tool' -%}"),
        "leaves out calls and results of functions",
    ),
    "the names of tools only": (
        base_with("tools | tojson", "tools | map(attribute='function.name') | join", TOOLS_BASE),
        "leaves out parts of the definitions of functions",
    ),
    "the first tool only": (
        base_with("tools | tojson", "tools[:1] | tojson", TOOLS_BASE),
        "leaves out parts of the definitions of functions",
    ),
    "names of calls left out": (
        base_with(CALLS, "(m.tool_calls[0].function.arguments | tojson if m.tool_calls else '')", TOOLS_BASE),
        "leaves out calls of functions",
    ),
    "the first of several calls only": (
        base_with(CALLS, "(m.tool_calls[:1] | tojson if m.tool_calls else '')", TOOLS_BASE),
        "leaves out calls of an answer that has several",
    ),
    "the last of several calls only": (
        base_with(CALLS, "(m.tool_calls[-1:] | tojson if m.tool_calls else '')", TOOLS_BASE),
        "leaves out calls of an answer that has several",
    ),
    "the first of several results only": (
        base_with(
            "m.content",
            "('' if m.role == 'tool' and loop.previtem.role == 'tool' else m.content)",
            TOOLS_BASE,
        ),
        "leaves out calls of an answer that has several, or their results",
    ),
    "text beside calls left out": (
        base_with("m.content +", "('' if m.tool_calls else m.content) +", TOOLS_BASE),
        "leaves out the text that an answer has beside its calls",
    ),
    "system messages left out where there are tools": (
        base_with("messages -%}", "messages if not (tools and m.role == 'system') -%}", TOOLS_BASE),
        "leaves out messages of a conversation that has tools",
    ),
    "the user's message left out where there are tools": (
        base_with("messages -%}", "messages if not (tools and m.role == 'user') -%}", TOOLS_BASE),
        "leaves out messages of a conversation that has tools",
    ),
    "all but the last twenty messages left out where there are tools": (
        base_with("in messages", "in (messages[-20:] if tools else messages)", TOOLS_BASE),
        "leaves out messages of a conversation that has tools",
    ),
}
DEFECTS = {defect: template for defect, (template, _) in NAMED_DEFECTS.items()}

_NO_HEADER = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ m.content + '<end>' }}{%- else -%}"
    "{{ '<|im_start|>' + m.content + ' [/INST]' }}{%- endif -%}{%- endfor -%}"
)
# By the manner.
HEALTHY = {
    "a generation prompt": BASE,
    "a header that is always written": base_with(HEADER, "{{ '<|im_start|>assistant\\n' }}"),
    "the header ends the question": _NO_HEADER,  # as Mistral's
    "a space after the header": _NO_HEADER.replace("{{ m.content +", "{{ ' ' + m.content +"),  # as Llama 2's
    "a system message required": (
        "{%- if messages[0].role != 'system' -%}{{ raise_exception('system first') }}{%- endif -%}" + BASE
    ),
    "the system message before the last question": (  # as Mistral's
        "{%- for m in messages if m.role != 'system' -%}"
        "{%- if loop.last and messages[0].role == 'system' -%}{{ messages[0].content }}{%- endif -%}"
        + TURN.replace("<|im_end|>", "<end>")
        + "{%- endfor -%}"
        + HEADER
    ),
    "tools, calls and results": TOOLS_BASE,
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
