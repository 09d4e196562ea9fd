"""Answers with calls are read as vLLM reads them, in each format, broken ones too."""

import importlib
import importlib.util
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from core.model_templates import tools_problem
from core.template_messages import with_ids_for
from core.tool_parsers import PARSED, known_tool_parser
from tests.families.templates import DEFECTS, TOOLS_BASE
from tests.tiny import tiny_tokenizer
from worker.model.policy import render
from worker.model.tool_calls import CallFormat, format_of
from worker.packages import vllm_version
from worker.types import ParsedAnswer

needs_vllm = pytest.mark.skipif(vllm_version() is None, reason="compares with vLLM's parsers")
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                    "tags": {"type": "array", "items": {"type": "int"}},
                    "area": {"type": "object", "properties": {"km": {"enum": [1, 2.5]}}},
                    "odd": {"type": ["foo", 3]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "time"}},
]
# The format, vLLM's parser, and the tokens that the tokenizer has for it.
FORMATS = {
    "hermes": ("hermes", "hermes_tool_parser:Hermes2ProToolParser", ()),
    "qwen3_coder": ("qwen3_coder", "qwen3_engine_tool_parser:Qwen3EngineToolParser", ("<tool_call>",)),
    "mistral": ("mistral", "mistral_tool_parser:MistralToolParser", ("[TOOL_CALLS]",)),
    "mistral_named": ("mistral", "mistral_tool_parser:MistralToolParser", ("[TOOL_CALLS]", "[ARGS]")),
    "llama3_json": ("llama3_json", "llama_tool_parser:Llama3JsonToolParser", ("<|python_tag|>",)),
}
# Parts of texts: whole calls, and what they are made of.
PARTS = {
    "hermes": [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Os\\u00e5lo", "days": 2}}\n</tool_call>',
        '<tool_call>{"name": "time", "arguments": {}}</tool_call>\n',
        '<tool_call>{"arguments": [1, NaN], "name": "t"}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        "<tool_call>",
        "</tool_call>",
        '{"name": "time"',
        ', "arguments": {}}',
        '"\\ud83d"',
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        "<function=weather><parameter=exact>True</parameter><parameter=limit>null</parameter></function>",
        '<function=weather><parameter=tags>["1", 2]</parameter><parameter=area>{"km": "2.5"}</parameter></function>',
        "<function=time></function>",
        "<function=weather>",
        "<parameter=limit>",
        "<parameter=odd>[1e999]",
        "< parameter = days >7< / parameter >",
        "</parameter>",
        "</function>",
        "<function=",
        "<tool_call>",
        "</tool_call>",
        '{"name": "weather", "arguments": {"days": "3"}}',
        '{"name": "time", "a": 1}',
        '{"parameters": "x"}',
        "</think>",
        ">",
        "<",
        "2.50",
        "inf",
        "False",
    ],
    "mistral": [
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "time", "arguments": null}]',
        '[TOOL_CALLS]{"name": "weather", "arguments": "{}"}',
        "[TOOL_CALLS]",
        '[{"name": "time", "arguments": {}}]',
        '[{"arguments": {"a": [1]}}, 3, {"b": 1}, {"name": 4}]',
        "[{",
        "}]",
        "[]",
        "x ",
    ],
    "mistral_named": [
        '[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": "2"}',
        '[TOOL_CALLS]weather{"tags": ["3"], "exact": 1, "limit": "1.0"} and more',
        "[TOOL_CALLS]time[ARGS]",
        "[TOOL_CALLS]",
        "[ARGS]",
        "weather",
        "{",
        "}",
        '{"days": 2.0}',
        '"{',
    ],
    "llama3_json": [
        '{"name": "weather", "parameters": {"city": "Oslo"}}',
        '{"name": "time", "arguments": {}, "parameters": 3}',
        "; ",
        '{"name": "time"}',
        '{"parameters": {"a": {"b": "{"}}, "name": "f"}',
        "{",
        "}",
        '"',
        "<|python_tag|>",
    ],
}
PLAIN = ["Let me see. ", "\n", " ", "é漢", "4"]


class MistralTokens(Enum):
    """The marks of mistral_common, which vLLM's parsers import and this environment may lack."""

    tool_calls = "[TOOL_CALLS]"
    args = "[ARGS]"
    begin_think = "[THINK]"
    end_think = "[/THINK]"


class Unused:
    """Stands in for a class that the parsers import and do not use to read a whole text."""


class Missing(ModuleType):
    """Stands in for a package that vLLM imports and that is not installed here."""

    SpecialTokens = MistralTokens

    @staticmethod
    def coroutine(function: Any) -> Any:
        return function

    @staticmethod
    def parse_coro(function: Any) -> None:
        """Of streams, which are not compared."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return Unused


MISSING = [
    name
    for name in (
        "ijson",
        "mistral_common.protocol.instruct.tool_calls",
        "mistral_common.tokens.tokenizers.base",
    )
    if importlib.util.find_spec(name.partition(".")[0]) is None
]


@contextmanager
def stand_ins() -> Iterator[None]:
    """The parsers of 0.32 import each other, and with them two packages that only Mistral's servers need."""
    parts = [name.split(".") for name in MISSING]
    modules = {".".join(part[:end]) for part in parts for end in range(1, len(part) + 1)}
    sys.modules.update({name: Missing(name) for name in modules})
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


class Tokenizer:
    """The part of a tokenizer that vLLM's parsers read."""

    all_special_tokens: Sequence[str] = ()
    all_special_ids: Sequence[int] = ()

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}


@lru_cache
def vllm_parser(name: str) -> Callable[[str], tuple[str, list[tuple[str, str]]] | None]:
    """vLLM's reading of a text: its content and calls; None if it has no calls, or vLLM fails."""
    module, kind = FORMATS[name][1].split(":")
    # First, because transformers looks for the packages too, and would use them.
    protocol = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
    with stand_ins():
        made = getattr(importlib.import_module(f"vllm.tool_parsers.{module}"), kind)
    tools = [protocol.ChatCompletionToolsParam.model_validate(tool) for tool in TOOLS]
    request = SimpleNamespace(tools=tools, tool_choice="auto")

    def read(text: str) -> tuple[str, list[tuple[str, str]]] | None:
        try:
            # A new one for each text, because they have state.
            found = made(Tokenizer(FORMATS[name][2]), tools).extract_tool_calls(text, request)
        except Exception:
            return None
        calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
        return (found.content or "", calls) if found.tools_called else None

    return read


def reader(name: str) -> CallFormat:
    parser, _, tokens = FORMATS[name]
    return format_of(parser, Tokenizer(tokens).get_vocab())


def text_of(name: str, draw: random.Random) -> str:
    """A text of whole calls and of their parts, sometimes cut at both ends, or with a character removed."""
    parts = draw.choices([*PARTS[name], *PLAIN], k=draw.randint(1, 6))
    if draw.random() < 0.5:  # a well-formed answer
        parts = [draw.choice(["", "Let me see. "]), *draw.choices(PARTS[name][:2], k=draw.randint(1, 3))]
    text = "".join(parts)
    if draw.random() < 0.3:
        place = draw.randrange(len(text) + 1)
        text = draw.choice([text[:place], text[place:], text[:place] + text[place + 1 :]])
    return text


def compare(name: str, count: int) -> tuple[int, int]:
    """Compare both readings of some texts. Returns the numbers of those with and without calls."""
    draw, mine, theirs = random.Random(name), reader(name), vllm_parser(name)
    called = 0
    for _ in range(count):
        text = text_of(name, draw)
        found, expected = mine.parse(text, TOOLS), theirs(text)
        if expected is None:
            assert (found.content, found.calls) == (text, ()), text
        else:
            assert (found.content, [tuple(call) for call in found.calls]) == expected, text
            called += 1
    return called, count - called


@needs_vllm
@pytest.mark.slow  # imports vLLM
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_has_the_calls_that_vllm_reads_in_it(name: str, count: int) -> None:
    called, others = compare(name, count)

    assert called > count / 8
    assert others > count / 10


@pytest.mark.parametrize("name", FORMATS)
def test_a_text_without_marks_is_its_content(name: str) -> None:
    assert reader(name).parse("  It rains.\n", TOOLS) == ParsedAnswer("  It rains.\n")


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        (
            "hermes",
            'Hm. <tool_call>{"name": "time"</tool_call>',
            "a call is not JSON: Expecting ',' delimiter at character 16 of it",
        ),
        ("hermes", '<tool_call>{"name": "time"}</tool_call>', "a call has no 'arguments'"),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "the name of a call is not a text"),
        (
            "hermes",
            "<tool_call>[1]</tool_call>",
            "a call is not a JSON object with a name and arguments",
        ),
        (
            "hermes",
            r'<tool_call>{"name": "time", "arguments": {"a": "\ud83d"}}</tool_call>',
            "a call has a lone surrogate, which is not a character",
        ),
        (
            "hermes",
            "<tool_call>" + '{"a":' * 100_000,
            "a call is not a JSON object with a name and arguments",
        ),
        (
            "qwen3_coder",
            "<tool_call>time</tool_call>",
            "the text has the mark of a call, and no call with a name",
        ),
        ("mistral", "[TOOL_CALLS][]", "the text has the mark of a call, and no call with a name"),
        ("llama3_json", '{"name": "time"}', "a call has no 'parameters'"),
    ],
)
def test_a_call_that_cannot_be_read_leaves_the_text_whole_and_says_why(
    name: str, text: str, error: str
) -> None:
    assert reader(name).parse(text, TOOLS) == ParsedAnswer(text, (), error)


def test_without_parallel_calls_only_the_first_counts() -> None:
    text = "".join(PARTS["hermes"][:2])

    found = reader("hermes").parse(text, TOOLS, parallel=False)

    assert [call.name for call in found.calls] == ["weather"]


def test_no_call_is_read_in_an_answer_that_was_cut() -> None:
    text = PARTS["hermes"][0]

    assert reader("hermes").cut(text).calls == ()
    assert "cut at its limit of tokens" in reader("hermes").cut(text).error
    assert reader("hermes").cut("It rains.") == ParsedAnswer("It rains.")


def test_calls_have_the_shape_of_openai_and_ids_of_their_own() -> None:
    found = reader("hermes").parse("".join(PARTS["hermes"][:2]), TOOLS)

    first, second = found.tool_calls("seed")

    assert first == {
        "id": first["id"],
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Osålo", "days": 2}'},
    }
    assert first["id"] != second["id"]
    assert found.tool_calls("seed") == (first, second)


@pytest.mark.parametrize("name", ["mistral", "mistral_named"])
def test_ids_of_calls_are_those_that_templates_of_mistral_accept(name: str) -> None:
    calls = reader(name).parse(PARTS[name][0], TOOLS).tool_calls("seed")

    assert calls
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", call["id"]) for call in calls)


def test_a_template_of_mistral_gets_ids_of_nine_letters_and_digits_and_equal_for_equal_ones() -> None:
    tokenizer = tiny_tokenizer(
        "{% for m in messages %}{% for c in m.tool_calls or [m] %}{% set id = c.id or c.tool_call_id %}"
        "{% if id and id|length != 9 %}{{ raise_exception('length 9!') }}{% endif %}"
        "{{ 'yes ' if loop.first and id == 'abcdefgh9' else 'no ' }}{% endfor %}{% endfor %}"
        "{# tools [TOOL_CALLS] #}"
    )
    calls = [
        {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for call_id in ("abcdefgh9", "call_0123456789")
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": ""} for call in calls]

    ids = render(tokenizer, [{"role": "assistant", "tool_calls": calls}, *results])

    assert tokenizer.decode(ids).split() == ["yes", "no", "yes", "no"]
    said, *answered = with_ids_for(tokenizer.chat_template, [{"tool_calls": calls}, *results])
    assert [call["id"] for call in said["tool_calls"]] == [one["tool_call_id"] for one in answered]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [20_000])
def test_long_texts_of_marks_are_read_in_linear_time(name: str, size: int) -> None:
    """No assertion of time: a quadratic reading of these texts would take minutes."""
    for part in [*PARTS[name], *PLAIN, "<parameter=", "< "]:
        reader(name).parse(PARTS[name][0] + part * (size // len(part)), TOOLS)


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{{ tools }}<function=example>", "qwen3_coder"),
        ("{{ tools }}<tool_call>", "hermes"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}<|python_tag|>", "llama3_json"),
        ("{{ tools }}", None),
        # GLM 4.5, 4.6 and 4.7 Flash: not JSON, as in Hermes' format.
        ("{{ tools }}<tool_call>{name}<arg_key>{key}</arg_key><arg_value>", None),
        ("<tool_call>", None),
        (None, None),
    ],
)
def test_the_format_of_calls_follows_from_the_chat_template(template: str | None, parser: str | None) -> None:
    assert known_tool_parser(template) == parser


@pytest.mark.parametrize(
    ("template", "tool_parser", "named"),
    [
        (None, None, ("chat_template", "tool_parser")),
        ("{{ messages }}", "hermes", ("chat_template", "tool_parser")),
        ("{{ messages }}{# tools #}", "hermes", ("no place for tools", "chat_template", "tool_parser")),
        ("{{ tools }}{{ messages }}", None, ("chat_template", "tool_parser")),
        ("{{ tools }}{{ messages }}", "pythonic", ("chat_template", "tool_parser", "pythonic")),
        ("{{ tools }}{{ messages }}", "hermes", ()),
        ({"default": "{{ messages }}", "tool_use": "{{ tools }}{{ messages }}<tool_call>"}, None, ()),
        ({"default": "{{ messages }}"}, "hermes", ("chat_template", "tool_parser")),
        ("{{ tools }}{{ messages }}<tool_call>", None, ()),
        ("{{ tools }}<tool_call>", None, ("leaves calls and results of functions out", "chat_template")),
        (DEFECTS["calls left out"], "hermes", ("leaves calls of functions out", "chat_template")),
        (DEFECTS["results left out"], "hermes", ("leaves results of functions out", "chat_template")),
        (DEFECTS["results cut"], "hermes", ("leaves results of functions out", "chat_template")),
        (DEFECTS["names of calls left out"], "hermes", ("leaves calls of functions out", "chat_template")),
        # Jobs are warned of these, and rows that lose calls are refused.
        (DEFECTS["the first tool only"], "hermes", ()),
        (DEFECTS["the first of several calls only"], "hermes", ()),
        (DEFECTS["text beside calls left out"], "hermes", ()),
        (TOOLS_BASE, "hermes", ()),
        ("{% if messages[0].role != 'system' %}{{ 1 // 0 }}{% endif %}" + TOOLS_BASE, "hermes", ()),
        ("{% if eos_token + '' and tools %}{{ 1 // 0 }}{% endif %}", "hermes", ("no place for tools",)),
        # It refuses rows and requests with tools in its own words, as it does all others.
        ("{{ tools }}{{ 1 // 0 }}", "hermes", ()),
        ("{{ tools }}{% broken", "hermes", ()),
    ],
)
def test_a_model_that_cannot_see_or_have_calls_is_refused_by_what_repairs_it(
    template: object, tool_parser: str | None, named: tuple[str, ...]
) -> None:
    problem = tools_problem("m", tool_parser, template)

    assert (problem is None) == (not named)
    assert all(name in (problem or "") for name in named)


def test_each_format_that_is_detected_is_read() -> None:
    assert {parser for parser, _, _ in FORMATS.values()} == set(PARSED)
