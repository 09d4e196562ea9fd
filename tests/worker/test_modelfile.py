"""Modelfiles of Ollama: chat templates that put texts around messages are written in its language."""

import re

import pytest

from tests.byte_level import CHATML, byte_level_tokenizer, gpt2
from tests.families.templates import DEFECTS, HEALTHY
from worker.serving.modelfile import FixedTexts, Message, fixed_texts, modelfile_of, renderer

SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
)


def texts_of(template: str) -> FixedTexts | None:
    return fixed_texts(renderer(byte_level_tokenizer(gpt2(), template=template)))


def executed(go: str, texts: FixedTexts, messages: list[Message]) -> str:
    """What Ollama makes of the template, which has one loop over messages with a branch for each role."""
    found = re.fullmatch(r"\{\{ range \.Messages }}(.*)(?:\{\{ end }}){4}(.*)", go, re.DOTALL)
    assert found is not None
    cases = re.findall(r'\{\{ if eq \.Role "(\w+)" }}(.*?)(?=\{\{ else }}|\Z)', found[1], re.DOTALL)
    by_role = dict(cases)
    if texts.default_system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": texts.default_system}, *messages]
    return (
        "".join(by_role[one["role"]].replace("{{ .Content }}", one["content"]) for one in messages) + found[2]
    )


@pytest.mark.parametrize("template", [CHATML, SYSTEM + CHATML], ids=["no system message", "one by default"])
def test_a_template_that_puts_texts_around_messages_is_written(template: str) -> None:
    tokenizer = byte_level_tokenizer(gpt2(), template=template)
    texts = texts_of(template)
    assert texts is not None
    chat = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Nothing"},
    ]

    for messages in (chat[:1], chat, [{"role": "system", "content": "Be brief"}, *chat]):
        exact = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert executed(texts.as_go(), texts, messages) == exact


def test_the_file_names_weights_template_system_message_and_ends() -> None:
    text = modelfile_of(byte_level_tokenizer(gpt2(), template=SYSTEM + CHATML), "model-f16.gguf", None)

    assert text.startswith('FROM ./model-f16.gguf\nTEMPLATE """{{ range .Messages }}')
    assert text.endswith('"""\nSYSTEM """You help."""\nPARAMETER stop "<|im_end|>"\n')


def test_the_file_of_an_adapter_names_its_base_too() -> None:
    lines = modelfile_of(byte_level_tokenizer(gpt2()), "adapter.gguf", "Qwen3-4B.gguf").splitlines()

    assert lines[1:3] == ["FROM ./Qwen3-4B.gguf", "ADAPTER ./adapter.gguf"]


@pytest.mark.parametrize("name", ["system messages rejected", "the last message left out", "fails always"])
def test_a_template_that_does_more_is_left_out_and_the_file_says_so(name: str) -> None:
    tokenizer = byte_level_tokenizer(gpt2(), template=DEFECTS[name])

    text = modelfile_of(tokenizer, "model-f16.gguf", None)

    assert "TEMPLATE " not in text
    assert "# The chat template of the job (chat_template.jinja) is more than texts around messages" in text


def test_templates_that_are_written_are_those_with_fixed_texts_around_each_message() -> None:
    written = {name: texts_of(template) for name, template in (HEALTHY | DEFECTS).items()}

    assert [name for name, texts in written.items() if texts is not None] == [
        "a generation prompt",
        "roles must alternate",
        "no end of turn",
    ]
