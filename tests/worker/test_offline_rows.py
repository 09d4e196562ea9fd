"""Which tokens of a row are learned, by what the chat template makes of it."""

import random
import tracemalloc
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from core.storage.datasets import Example
from tests.tiny import TEMPLATE, tiny_tokenizer
from worker.model.policy import render
from worker.offline.rows import ChatTemplate, TokenizedRow, preference_packs, supervised_packs, tokenize
from worker.prepare.start_report import report_lost_text
from worker.refusals import ChatTemplateFailed, UserMistake
from worker.types import Pack

# Turns end with a stop token and a newline's worth of padding, as those of SmolLM2 do.
CLOSED = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> <pad> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
# Earlier answers are shortened once others follow, as those of reasoning models lose their thoughts.
FORGETFUL = (
    "{% for m in messages %}<{{ m['role'] }}> "
    "{% if m['role'] == 'assistant' and not loop.last %}it{% else %}{{ m['content'] }}{% endif %} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
# The count of messages comes first, so that nothing is stable.
UNSTABLE = "{{ ['one', 'two', 'three'][messages | length] }} " + CLOSED
WITH_TOOLS = (
    "{% for t in tools or [] %}tool {{ t['function']['name'] }} {% endfor %}"
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %} {{ c['function']['name'] }} {{ c['function']['arguments']['word'] }}"
    "{% endfor %}"
    " <end> {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def template(text: str | None = CLOSED) -> tuple[ChatTemplate, PreTrainedTokenizerFast]:
    tokenizer = tiny_tokenizer(text)
    end = tokenizer.eos_token_id
    assert isinstance(end, int)

    def rendered(
        messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], generation_prompt: bool
    ) -> list[int]:
        return render(tokenizer, messages, generation_prompt=generation_prompt, tools=tools)

    def decoded(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    return ChatTemplate(rendered, frozenset({end}), end, decoded), tokenizer


def said(*turns: str, **weights: int) -> list[dict[str, Any]]:
    """Messages of user and assistant in turn; `weights` by the number of the message, `m1=0`."""
    roles = ("user", "assistant")
    messages: list[dict[str, Any]] = [
        {"role": roles[number % 2], "content": text} for number, text in enumerate(turns)
    ]
    for name, weight in weights.items():
        messages[int(name[1:])]["weight"] = weight
    return messages


def learned(pack: Pack, tokenizer: PreTrainedTokenizerFast) -> str:
    """The learned tokens of a pack's only sequence, as text."""
    [sequence] = pack.sequences
    mask = sequence.learned_T or (True,) * len(sequence.output_ids_T)
    kept = [token for token, is_learned in zip(sequence.output_ids_T, mask, strict=True) if is_learned]
    return str(tokenizer.decode(kept))


def whole(pack: Pack, tokenizer: PreTrainedTokenizerFast) -> str:
    return str(tokenizer.decode([*pack.prompt_ids, *pack.sequences[0].output_ids_T]))


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (said("say it", "yes"), "yes <end>"),
        ([{"role": "system", "content": "please"}, *said("say it", "no")], "no <end>"),
        (said("say it", "yes", "again", "no"), "yes <end> no <end>"),
        (said("say it", "yes", "again", "no", m1=0), "no <end>"),
        (said("say it", "yes", "again", "no", m3=0), "yes <end>"),
        (said("say it", "yes", "again", "no", m1=1, m3=1), "yes <end> no <end>"),
        (said("say it", "yes", "again"), "yes <end>"),
        ([{"role": "assistant", "content": "red"}, *said("again")], "red <end>"),
    ],
)
def test_the_answers_are_learned_through_the_token_that_ends_them(
    messages: list[dict[str, Any]], expected: str
) -> None:
    form, tokenizer = template()

    [pack] = supervised_packs({"messages": messages}, form)

    assert learned(pack, tokenizer) == expected


def test_nothing_behind_the_last_learned_answer_is_computed() -> None:
    form, tokenizer = template()

    [pack] = supervised_packs({"messages": said("say it", "yes", "again", "no", m3=0)}, form)

    assert whole(pack, tokenizer) == "<user> say it <end> <pad> <assistant> yes <end>"


def test_an_answer_that_the_template_does_not_end_gets_an_end() -> None:
    form, tokenizer = template(TEMPLATE)

    packs = supervised_packs({"messages": said("say it", "yes", "again", "no")}, form)

    # Each ends where it is the last message, so there is a rendering for each.
    assert [learned(pack, tokenizer) for pack in packs] == ["yes <end>", "no <end>"]
    assert whole(packs[1], tokenizer) == "<user> say it <assistant> yes <user> again <assistant> no <end>"


def test_answers_that_are_rendered_differently_later_are_learned_one_by_one() -> None:
    form, tokenizer = template(FORGETFUL)

    packs = supervised_packs({"messages": said("say the word", "red", "again", "blue")}, form)

    assert [whole(pack, tokenizer) for pack in packs] == [
        "<user> say the word <end> <assistant> red <end>",
        "<user> say the word <end> <assistant> it <end> <user> again <end> <assistant> blue <end>",
    ]
    assert [learned(pack, tokenizer) for pack in packs] == ["red <end>", "blue <end>"]


def test_a_template_that_changes_the_messages_before_is_refused_with_the_line() -> None:
    form, _ = template(UNSTABLE)
    row = Example(7, [], {"messages": said("say it", "yes")})

    with pytest.raises(ChatTemplateFailed, match="Line 7 of file-1: the chat template renders earlier"):
        tokenize("supervised", [row], form, file="file-1", field="training_file", context=100)


def test_what_the_template_writes_before_a_first_answer_is_not_learned() -> None:
    form, tokenizer = template("<system> please " + CLOSED)

    [pack] = supervised_packs({"messages": [{"role": "assistant", "content": "red"}, *said("again")]}, form)

    assert whole(pack, tokenizer) == "<system> please <assistant> red <end>"
    assert learned(pack, tokenizer) == "red <end>"


@pytest.mark.parametrize("name", ["preferred_output", "non_preferred_output"])
def test_calls_in_either_answer_of_a_pair_need_a_place_in_the_template(name: str) -> None:
    form, _ = template()
    call = {"id": "1", "type": "function", "function": {"name": "say", "arguments": "{}"}}
    row: dict[str, Any] = {
        "input": {"messages": said("say it")},
        "preferred_output": [{"role": "assistant", "content": "yes"}],
        "non_preferred_output": [{"role": "assistant", "content": "no"}],
    }
    row[name] = [{"role": "assistant", "content": "", "tool_calls": [call]}]

    with pytest.raises(ChatTemplateFailed, match="has no place for tool calls"):
        preference_packs(row, form)


def test_calls_of_tools_are_learned() -> None:
    form, tokenizer = template(WITH_TOOLS)
    call = {"id": "1", "type": "function", "function": {"name": "say", "arguments": '{"word": "red"}'}}
    tools = [{"type": "function", "function": {"name": "say", "parameters": {}}}]
    messages = [
        {"role": "user", "content": "please"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]

    [pack] = supervised_packs({"messages": messages, "tools": tools}, form)

    assert learned(pack, tokenizer) == "say red <end>"


@pytest.mark.parametrize("key", ["tools", "tool calls", "results of tools"])
def test_what_the_template_would_leave_out_of_tools_is_refused(key: str) -> None:
    form, _ = template(CLOSED.replace("in messages", "in messages if m.role != 'tool'"))
    call = {"id": "1", "type": "function", "function": {"name": "say", "arguments": "{}"}}
    messages: list[dict[str, Any]] = said("please", "yes")
    row: dict[str, Any] = {"messages": messages}
    if key == "tools":
        row["tools"] = [{"type": "function", "function": {"name": "say"}}]
    elif key == "tool calls":
        messages[1]["tool_calls"] = [call]
    else:
        messages.insert(1, {"role": "tool", "tool_call_id": "1", "content": "red"})

    with pytest.raises(ChatTemplateFailed, match=f"has no place for {key}:"):
        supervised_packs(row, form)


def calls_of(*words: str) -> list[dict[str, Any]]:
    return [
        {"id": word, "type": "function", "function": {"name": "say", "arguments": f'{{"word": "{word}"}}'}}
        for word in words
    ]


TWO_CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "please"},
    {"role": "assistant", "content": "", "tool_calls": calls_of("red", "blue")},
    {"role": "tool", "tool_call_id": "red", "content": "yes"},
    {"role": "tool", "tool_call_id": "blue", "content": "no"},
    {"role": "assistant", "content": "again"},
]


@pytest.mark.parametrize(
    ("part", "other", "lost"),
    [
        ("m['tool_calls'] or []", "(m['tool_calls'] or [])[:1]", "several tool calls"),  # as gpt-oss'
        ("m['tool_calls'] or []", "(m['tool_calls'] or [])[1:]", "tool calls"),
        ("{{ c['function']['arguments']['word'] }}", "", "tool calls"),
        ("{{ c['function']['name'] }} ", "", "tool calls"),
        ("in messages", "in messages if m.role != 'tool' or m.tool_call_id == 'red'", "results of tools"),
    ],
)
def test_a_row_that_loses_one_of_several_calls_or_results_is_refused(
    part: str, other: str, lost: str
) -> None:
    form, _ = template(WITH_TOOLS.replace(part, other))
    row = {"messages": TWO_CALLS}

    with pytest.raises(ChatTemplateFailed, match=f"Line 3 of f: .*has no place for {lost}:"):
        tokenize("supervised", [Example(3, [], row)], form, file="f", field="training_file", context=512)


def test_parallel_calls_and_their_results_are_learned_where_the_template_has_them() -> None:
    form, tokenizer = template(WITH_TOOLS)

    [pack] = supervised_packs({"messages": TWO_CALLS}, form)

    assert learned(pack, tokenizer) == "say red say blue <end> again <end>"


@pytest.mark.parametrize("field", ["messages", "preferred_output", "non_preferred_output"])
def test_rows_are_marked_whose_text_beside_calls_is_lost(field: str) -> None:
    """As Llama 3.1's: the text would neither be read nor learned."""
    answer = [{"role": "assistant", "content": "yes", "tool_calls": calls_of("red")}]
    plain = [{"role": "assistant", "content": "no"}]
    row: dict[str, Any] = {"messages": [*said("please"), *answer]}
    if field != "messages":
        pair = {"preferred_output": plain, "non_preferred_output": plain, field: answer}
        row = {"input": {"messages": said("please")}, **pair}

    def marked(text: str) -> bool:
        form, _ = template(text)
        variant = "supervised" if field == "messages" else "dpo"
        [one] = tokenize(variant, [Example(1, [], row)], form, file="f", field="training_file", context=512)
        return one.loses_text

    assert marked(WITH_TOOLS.replace("{{ m['content'] }}", "{{ '' if m['tool_calls'] else m['content'] }}"))
    assert not marked(WITH_TOOLS)


def test_a_job_is_warned_once_of_all_rows_of_a_file_whose_text_beside_calls_is_lost() -> None:
    warnings: list[tuple[str, Mapping[str, Any]]] = []
    rows = [TokenizedRow(line, (), loses_text=line != 2) for line in (1, 2, 3)]

    report_lost_text(lambda *said: warnings.append(said), "file-1", rows)
    report_lost_text(lambda *said: warnings.append(said), "file-2", rows[1:2])

    [(text, data)] = warnings
    assert "2 rows of file-1 have text beside calls of functions (lines 1, 3)" in text
    assert data == {"file": "file-1", "lost_text_rows": 2}


def test_a_result_that_the_template_accepts_only_after_a_call_is_no_reason_to_refuse_a_row() -> None:
    """As Mistral's: without the call the roles would not alternate."""
    strict = (
        "{% if messages[2:] and not messages[1].tool_calls %}{{ raise_exception('alternate') }}{% endif %}"
    )
    form, tokenizer = template(strict + WITH_TOOLS)
    call = {"id": "1", "type": "function", "function": {"name": "say", "arguments": '{"word": "red"}'}}
    tools = [{"type": "function", "function": {"name": "say", "parameters": {}}}]
    messages = [
        *said("please"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "blue"},
        {"role": "assistant", "content": "green"},
    ]

    [pack] = supervised_packs({"messages": messages, "tools": tools}, form)

    assert learned(pack, tokenizer).split()[-2:] == ["green", "<end>"]


def test_a_pair_is_one_pack_with_the_preferred_answer_first() -> None:
    form, tokenizer = template()
    row = {
        "input": {"messages": said("say it")},
        "preferred_output": [{"role": "assistant", "content": "yes please"}],
        "non_preferred_output": [{"role": "assistant", "content": "no"}],
    }

    [pack] = preference_packs(row, form)

    assert tokenizer.decode(pack.prompt_ids) == "<user> say it <end> <pad> <assistant>"
    assert [tokenizer.decode(one.output_ids_T) for one in pack.sequences] == ["yes please <end>", "no <end>"]


def test_rows_beyond_the_context_are_named_by_line() -> None:
    form, _ = template()
    rows = [
        Example(1, [], {"messages": said("say it", "yes")}),
        Example(2, [], {"messages": said("say it", "yes " * 20)}),
    ]

    with pytest.raises(
        UserMistake, match=r"1 rows of file-1 .* context of 16 tokens: line 2: 27 tokens"
    ) as long:
        tokenize("supervised", rows, form, file="file-1", field="validation_file", context=16)

    assert (long.value.code, long.value.param) == ("example_too_long", "validation_file")


def test_a_row_that_fills_the_context_is_too_long_for_a_server_that_completes_it() -> None:
    form, _ = template()
    rows = [Example(1, [], {"messages": said("say it", "yes " * 20)})]
    tokens = partial(tokenize, "supervised", rows, form, file="file-1", field="training_file", context=27)

    assert len(tokens()) == 1
    with pytest.raises(
        UserMistake, match="27 tokens, less 1 that the teacher's server adds: line 1: 27 tokens"
    ):
        tokens(added=1)


def test_the_rows_of_a_large_file_take_little_memory() -> None:
    """A pointer for each token and a mark whether it is learned, and not an object of its own."""
    draw = random.Random(0)

    def render(
        messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], generation_prompt: bool
    ) -> list[int]:
        return [int(token, 36) for message in messages for token in message["content"].split()]

    def text() -> str:
        return " ".join(str(draw.randrange(300, 5000)) for _ in range(200))

    form = ChatTemplate(render, frozenset({2}), 2, str)
    talks = [said(text(), text()) for _ in range(300)]
    examples = [Example(line, talk, {"messages": talk}) for line, talk in enumerate(talks)]
    tracemalloc.start()

    rows = tokenize("supervised", examples, form, file="file-a", field="training_file", context=1000)

    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept / sum(len(pack.prompt_ids) + 201 for row in rows for pack in row.packs) < 16
