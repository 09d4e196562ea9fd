"""Calls of functions in chats of the engines that are ours, over HTTP with OpenAI's client."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from openai import BadRequestError, OpenAI
from transformers import PreTrainedTokenizerBase

from core.registry import BaseModelEntry, Registry
from core.settings import Settings
from tests.present import present
from tests.thinking import thinking_tokenizer
from tests.worker.test_serve import ScriptedBuilder, folders_in
from worker.serving.engines import Engines
from worker.serving.server import create_app

TEMPLATE = (
    "{%- for t in tools or [] -%}[{{ t.function.name }}]{%- endfor -%}"
    "{%- for m in messages -%}{{ m.role }} {{ m.content }}"
    "{%- for c in m.tool_calls or [] -%}{{ c.function.name }}/{{ c.function.arguments.values() | join }}{%- endfor -%}"
    "{%- if m.tool_call_id -%}({{ m.tool_call_id }}){%- endif -%};{%- endfor -%}"
    "{#- <tool_call> -#}"
)
USER: dict[str, Any] = {"role": "user", "content": "hi"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class House:
    """An inference server with one model, which says `script`."""

    def __init__(self, web: TestClient, builder: ScriptedBuilder) -> None:
        self.client = OpenAI(api_key="key", base_url="http://testserver/v1", http_client=web, max_retries=0)
        self._builder = builder
        self.say()
        self.engine = builder.built[-1]
        self.engine.context = 5000

    def say(self, script: str = "hi", **options: Any) -> Any:
        if self._builder.built:
            self._builder.built[-1].script = script
        return self.client.chat.completions.create(**{"model": "a", "messages": [USER]} | options)

    @property
    def prompt(self) -> str:
        return str(self.engine.tokenizer.decode(self.engine.asked[-1].prompt_ids))

    @property
    def schema(self) -> dict[str, Any]:
        """What the last answer was held to."""
        schema: dict[str, Any] = json.loads(self.engine.asked[-1].response_schema or "{}")
        schema.pop("x-guidance", None)
        return schema


def serving(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Iterator[House]:
    builder = ScriptedBuilder(tokenizer)
    registry = Registry(models={"a": BaseModelEntry(hub="a")})
    engines = Engines(Settings(), registry, {"transformers": builder}, *folders_in(tmp_path))
    with TestClient(create_app(engines, "key")) as web:
        yield House(web, builder)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = thinking_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def house(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Iterator[House]:
    yield from serving(copy.copy(tokenizer), tmp_path)


def test_an_answer_with_a_call_has_content_and_tool_calls(house: House) -> None:
    [choice] = house.say(f"Let me see. {CALL}", tools=[WEATHER]).choices

    [call] = present(choice.message.tool_calls)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see. "
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')
    assert call.id.startswith("call_")
    assert house.prompt == "[weather]user hi;"
    assert house.schema == {}


def test_an_answer_without_a_call_is_a_text(house: House) -> None:
    [choice] = house.say("It rains.", tools=[WEATHER], tool_choice="auto").choices

    assert (choice.message.content, choice.message.tool_calls) == ("It rains.", None)
    assert choice.finish_reason == "stop"


def test_a_call_that_cannot_be_read_stays_text(house: House) -> None:
    [choice] = house.say("<tool_call>weather</tool_call>", tools=[WEATHER]).choices

    assert (choice.message.content, choice.message.tool_calls) == ("<tool_call>weather</tool_call>", None)
    assert choice.finish_reason == "stop"


def test_without_a_choice_of_tools_their_calls_are_text(house: House) -> None:
    [choice] = house.say(CALL, tools=[WEATHER], tool_choice="none").choices

    assert (choice.message.content, choice.message.tool_calls) == (CALL, None)
    assert house.prompt == "[weather]user hi;"


def test_calls_and_their_results_are_in_the_prompt(house: House) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Rain."},
    ]

    house.say("It rains.", messages=messages, tools=[WEATHER])

    assert house.prompt == "[weather]user hi;assistant weather/Oslo;tool Rain.(c1);"


def test_a_call_of_an_invented_function_can_be_sent_back(house: House) -> None:
    [choice] = house.say(CALL.replace('"weather"', '"the weather!"'), tools=[WEATHER]).choices
    result = {"role": "tool", "tool_call_id": present(choice.message.tool_calls)[0].id, "content": "no such"}

    house.say(messages=[USER, choice.message, result], tools=[WEATHER])

    assert "the weather!/Oslo" in house.prompt


def test_the_thought_of_an_earlier_answer_is_given_to_the_template(house: House) -> None:
    house.engine.tokenizer.chat_template = (
        "{%- for m in messages -%}{{ m.reasoning_content or '-' }} {{ m.reasoning or '-' }};{%- endfor -%}"
    )
    earlier = {"role": "assistant", "content": "a", "reasoning_content": "hm"}

    house.say(messages=[earlier, USER | {"content": "b"}])

    assert house.prompt == "hm hm;- -;"


def test_a_named_function_is_called_with_arguments_of_its_schema(house: House) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}

    [answer] = house.say('{"city": "Oslo"}', tools=[TIME, WEATHER], tool_choice=choice).choices

    assert house.schema == CITY
    [call] = present(answer.message.tool_calls)
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')
    assert (answer.message.content, answer.finish_reason) == (None, "stop")


def test_required_calls_are_a_list_of_which_each_fits_a_function(house: House) -> None:
    text = '[{"name": "time", "parameters": {}}, {"name": "weather", "parameters": {"city": "Oslo"}}]'

    [answer] = house.say(text, tools=[TIME, WEATHER], tool_choice="required").choices

    calls = [call.function for call in present(answer.message.tool_calls)]
    assert [(call.name, call.arguments) for call in calls] == [
        ("time", "{}"),
        ("weather", '{"city": "Oslo"}'),
    ]
    assert answer.finish_reason == "tool_calls"
    assert [kind["properties"]["name"]["enum"] for kind in house.schema["items"]["anyOf"]] == [
        ["time"],
        ["weather"],
    ]
    assert house.schema["minItems"] == 1


def test_without_parallel_calls_there_is_one(house: House) -> None:
    [free] = house.say(CALL * 2, tools=[WEATHER], parallel_tool_calls=False).choices
    house.say("[]", tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)

    assert len(present(free.message.tool_calls)) == 1
    assert house.schema["maxItems"] == 1


def test_a_required_function_whose_references_cannot_be_moved_is_refused_by_its_place(house: House) -> None:
    other = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "https://x.test/y"}}}

    with pytest.raises(BadRequestError, match="only '#'") as refused:
        house.say(tools=[WEATHER, other], tool_choice="required")

    assert refused.value.param == "tools[1].function.parameters"


def test_a_streamed_call_comes_in_one_part_after_the_content(house: House) -> None:
    chunks = list(house.say(f"Hm. {CALL}", tools=[WEATHER], stream=True))

    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.content for delta in deltas if delta.content] == ["Hm. "]
    [calls] = [delta.tool_calls for delta in deltas if delta.tool_calls]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [
        (0, "weather", '{"city": "Oslo"}')
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_named_function_of_an_answer_that_was_cut_in_its_thought_is_not_called(
    tmp_path: Path,
) -> None:
    for house in serving(thinking_tokenizer(), tmp_path):
        template = house.engine.tokenizer.chat_template
        told = "{%- if tools -%}{{ tools }}{{ messages }}<tool_call>{%- endif -%}"
        house.engine.tokenizer.chat_template = told + template
        choice = {"type": "function", "function": {"name": "weather"}}

        [cut] = house.say(
            "<think>hm hm hm", tools=[WEATHER], tool_choice=choice, max_completion_tokens=9
        ).choices

        assert (cut.message.tool_calls, cut.finish_reason) == (None, "length")


def test_half_a_call_is_no_call(house: House) -> None:
    [choice] = house.say(CALL, tools=[WEATHER], max_completion_tokens=40).choices

    assert (choice.message.tool_calls, choice.finish_reason) == (None, "length")
    assert CALL.startswith(present(choice.message.content))


@pytest.mark.parametrize(
    ("template", "named"), [("{{ messages }}", "chat_template"), ("{{ tools }}{{ messages }}", "tool_parser")]
)
def test_a_model_whose_template_has_no_tools_is_refused_by_what_repairs_it(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, template: str, named: str
) -> None:
    other = copy.copy(tokenizer)
    other.chat_template = template

    for house in serving(other, tmp_path):
        with pytest.raises(BadRequestError, match=named) as refused:
            house.say(tools=[WEATHER])

        assert (refused.value.param, refused.value.code) == ("tools", "unsupported_parameter")
