"""Modelfiles of Ollama: chat templates that put texts around messages are written in its language."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from tests.byte_level import CHATML, byte_level_tokenizer, gpt2
from tests.families.templates import DEFECTS, HEALTHY
from tests.go_templates import executed
from worker.serving.gguf_vocabulary import chat_template_of
from worker.serving.modelfile import (
    TOOLS_DESCRIBED,
    FixedTexts,
    Message,
    Modelfile,
    NotWritten,
    fixed_texts,
    modelfile_of,
    renderer,
)

SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
)
EMPTY_SYSTEM = SYSTEM.replace("You help.", "")
OPENS_A_THOUGHT = CHATML.replace("assistant\n'", "assistant\n<think>\n\n</think>\n\n'")
CHAT: list[Message] = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": " Nothing\n"},
    {"role": "tool", "content": "3"},
]


def texts_of(template: str) -> FixedTexts:
    return fixed_texts(renderer(byte_level_tokenizer(gpt2(), template=template)))


def modelfile(template: str | None) -> Modelfile:
    tokenizer = byte_level_tokenizer(gpt2(), template=template)
    return modelfile_of(tokenizer, "model-f16.gguf", context=2048, temperature=0.7)


@pytest.mark.parametrize(
    "template",
    [CHATML, SYSTEM + CHATML, EMPTY_SYSTEM + CHATML, OPENS_A_THOUGHT],
    ids=["no system message", "one by default", "an empty one by default", "a thought in the opening alone"],
)
@pytest.mark.parametrize("length", [1, 3, 4])
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief"}]], ids=["", "system"])
def test_go_makes_the_same_prompt_of_a_template_that_puts_texts_around_messages(
    template: str, length: int, system: list[Message], tmp_path: Path
) -> None:
    chat = [*system, *CHAT[:length]]
    tokenizer = byte_level_tokenizer(gpt2(), template=template)

    text = executed(texts_of(template).as_go(), chat, tmp_path)

    assert text == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def test_the_file_names_weights_template_ends_context_and_temperature() -> None:
    made = modelfile(SYSTEM + CHATML)

    assert made.text.startswith(
        'FROM ./model-f16.gguf\nTEMPLATE """{{ if ne (index .Messages 0).Role "system" }}'
    )
    assert made.text.endswith(
        '"""\nPARAMETER stop "<|im_end|>"\nPARAMETER num_ctx 2048\nPARAMETER temperature 0.7\n'
    )
    assert made.missing_template == ""


KEEPS_ANSWERS_ALONE = CHATML.replace("m['content']", "m['content'].split('</think>')[-1]")
DESCRIBES_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
WRITES_CALLS = CHATML.replace(
    "m['content']", "m['content'] + (m.tool_calls | tojson if m.tool_calls else '')"
)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "the model has no chat template"),
        (DEFECTS["system messages rejected"], "rejects a chat of system, user"),
        (DEFECTS["the last message left out"], "leaves out, repeats or moves messages"),
        (DEFECTS["fails always"], "rejects a chat of user (ZeroDivisionError"),
        (KEEPS_ANSWERS_ALONE, "changes earlier thoughts"),
        (
            CHATML.replace("m['content']", "m['content'] + (m.reasoning_content or '')"),
            "changes earlier thoughts",
        ),
        (DESCRIBES_TOOLS, TOOLS_DESCRIBED),
        (WRITES_CALLS, TOOLS_DESCRIBED),
        (CHATML.replace("m['content']", "m['content'].lstrip()"), "changes the text of messages"),
        (CHATML.replace("<|im_start|>", "{{"), "syntax in Ollama's language"),
        (CHATML.replace("'\n' + m['content']", "'{' + m['content']"), "syntax in Ollama's language"),
        (CHATML.replace("'<|im_start|>assistant\n'", "'\"'"), "syntax in Ollama's language"),
    ],
    ids=lambda value: value if isinstance(value, str) and "{" not in value else "",
)
def test_a_template_that_does_more_is_left_out_with_the_reason(template: str | None, reason: str) -> None:
    made = modelfile(template)

    assert "TEMPLATE " not in made.text
    assert reason in made.missing_template
    assert (
        f"# No TEMPLATE: {made.missing_template}.\n# Ollama may send the raw text of messages." in made.text
    )
    assert "llama-server --jinja" in made.text


def test_a_template_that_removes_spaces_is_written_and_the_file_says_that_spaces_stay() -> None:
    trimming = CHATML.replace("m['content']", "m['content'] | trim")

    assert texts_of(trimming) == replace(texts_of(CHATML), trims=True)
    assert "removes spaces around messages. This one does not.\nTEMPLATE " in modelfile(trimming).text


def is_written(template: str) -> bool:
    try:
        texts_of(template)
    except NotWritten:
        return False
    return True


def test_templates_that_are_written_are_those_with_fixed_texts_around_each_message() -> None:
    assert [name for name, template in (HEALTHY | DEFECTS).items() if is_written(template)] == [
        "a generation prompt",
        "the header ends the question",
        "a space after the header",
        "an end of turn that is no EOS",
        "no generation prompt",
        "roles must alternate",
        "no end of turn",
        "the question closed only before an answer",
        "another header than answers have",
        "an EOS after the generation prompt",
        "an end of turn after the generation prompt",
        # What these lose of long chats or write by chance, a template of fixed texts does not.
        "all but the last six messages left out",
        "all but the last twenty messages left out",
        "content cut at 200 characters",
        "content cut at 4,000 characters",
        "system messages cut",
        "a seldom word",
    ]


# Of the families that an export supports, as TRL ships them.
REAL = {
    "llama3": "",
    "llama3_1": TOOLS_DESCRIBED,
    "llama3_2": "the chat template writes the present time",
    "qwen2_5": TOOLS_DESCRIBED,
    "qwen3": TOOLS_DESCRIBED,
    "qwen3_instruct_2507": TOOLS_DESCRIBED,
}


@pytest.mark.parametrize("name", REAL)
def test_of_real_templates_those_with_tools_or_thoughts_are_left_out(name: str) -> None:
    trl = find_spec("trl")
    if trl is None or trl.origin is None:
        pytest.skip("TRL, which ships the templates, is not installed")
    template = (Path(trl.origin).parent / f"chat_templates/{name}.jinja").read_text()
    tokenizer = byte_level_tokenizer(gpt2(), template=template)
    tokenizer.add_special_tokens({"bos_token": "<|begin_of_text|>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", tokenizer.bos_token_id)]
    )

    made = modelfile_of(tokenizer, "model-f16.gguf", context=2048, temperature=1.0)

    assert made.missing_template == REAL[name]
    assert ("{{ range .Messages }}" in made.text) == (REAL[name] == "")


def test_of_several_named_templates_the_one_for_chats_without_tools_is_read() -> None:
    tokenizer = byte_level_tokenizer(gpt2())
    tokenizer.chat_template = {"default": CHATML, "tool_use": WRITES_CALLS + "{{ tools | tojson }}"}

    made = modelfile_of(tokenizer, "model-f16.gguf", context=2048, temperature=1.0)

    assert made.missing_template == TOOLS_DESCRIBED
    assert chat_template_of(tokenizer) == CHATML
