import itertools
import json
import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.storage.datasets import (
    MAX_LINE_BYTES,
    MAX_REPORTED,
    Example,
    InvalidDataset,
    LineError,
    count_examples,
    read_examples,
    read_rows,
)

MIB = 1 << 20
USER = {"role": "user", "content": "2 + 2?"}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLING: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "Rain."}


def row(*messages: Any, **more: Any) -> bytes:
    return json.dumps({"messages": messages or [USER], **more}).encode()


def file(*lines: bytes) -> list[bytes]:
    return [b"".join(line + b"\n" for line in lines)]


def problems(*lines: bytes) -> list[str]:
    """What is said about a file, one string per problem."""
    return [str(found) for found in read_rows(file(*lines)) if isinstance(found, LineError)]


def message_problems(**message: Any) -> list[str]:
    """What is said about one message before a good last one."""
    return problems(row(message, USER))


# Good files


def test_a_row_is_its_prompt_and_everything_graders_see() -> None:
    (example,) = read_examples(file(row(answer="4", meta={"level": 1})))

    assert example == Example(
        line=1, messages=[USER], item={"messages": [USER], "answer": "4", "meta": {"level": 1}}
    )


def test_rows_come_in_order_with_their_line_numbers() -> None:
    examples = read_examples(file(row(n=0), row(n=1), row(n=2)))

    assert [(example.line, example.item["n"]) for example in examples] == [(1, 0), (2, 1), (3, 2)]


def test_the_last_newline_may_be_missing() -> None:
    assert len(read_examples([row(), b"\n", row()])) == 2


def test_windows_line_ends_are_tolerated() -> None:
    assert len(read_examples([row() + b"\r\n" + row() + b"\r\n\r\n"])) == 2


def test_blank_lines_at_the_end_are_tolerated() -> None:
    assert len(read_examples([row() + b"\n\n  \n\n"])) == 1


def test_every_role_may_speak_before_the_user() -> None:
    roles = ["system", "developer", "user", "assistant"]
    messages = [{"role": role, "content": "x"} for role in roles]

    assert problems(row(*messages, CALLING, RESULT, USER)) == []


@pytest.mark.parametrize(
    "extra", [{"weight": 0}, {"weight": 1}, {"name": "bot"}, {"name": None}, {"name": "bot", "weight": 0}]
)
def test_an_assistant_may_have_a_weight_and_a_name(extra: dict[str, Any]) -> None:
    assert message_problems(role="assistant", content="x", **extra) == []


def test_content_may_be_text_parts() -> None:
    parts = [{"type": "text", "text": "2 +"}, {"type": "text", "text": " 2?"}]

    assert problems(row({"role": "user", "content": parts})) == []


def test_tools_may_be_null() -> None:
    assert problems(row(tools=None)) == []


def test_a_row_may_have_tools_and_end_with_the_result_of_a_call() -> None:
    (example,) = read_examples([row(USER, CALLING, RESULT, tools=[WEATHER], parallel_tool_calls=False)])

    assert example.messages == [USER, CALLING, RESULT]
    assert example.item["tools"] == [WEATHER]


def test_functions_are_a_field_of_the_users_in_rows_of_prompts() -> None:
    assert problems(row(functions=["sin"])) == []


def test_escaped_emoji_are_characters_like_any_other() -> None:
    (example,) = read_examples([json.dumps({"messages": [USER], "mood": "😀"}, ensure_ascii=True).encode()])

    assert example.item["mood"] == "😀"


# Bad lines, each with its number


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"messages": ', "is not JSON: Expecting value at column 14"),
        (row() + row(), "is not JSON: Extra data at column 54"),
        (
            b'{"a": "\xff"}',
            "is not UTF-8: byte 8 is 0xff; save the file as UTF-8, or name its encoding: "
            "regraft convert --encoding cp1252",
        ),
        (b"[1]", "must be a JSON object, not a list"),
        (b"null", "must be a JSON object, not null"),
        (b"true", "must be a JSON object, not a boolean"),
        (b'"x"', "must be a JSON object, not a string"),
        (b"1.5", "must be a JSON object, not a number"),
        (b'{"a": NaN}', "has NaN, which is not JSON; use null or leave the key out"),
        (b'{"a": -Infinity}', "has -Infinity, which is not JSON; use null or leave the key out"),
        (b'{"a": 1e999}', "has a number too large for a 64-bit float"),
        (b'{"a": ' + b"9" * 5000 + b"}", "has a number of more than 400 digits"),
        (b'{"a": ' + b"[" * 100_000, "is nested too deeply"),
        (b'{"a": 1, "a": 1}', "has the key 'a' twice in one object; keep one of them"),
        (
            b'{"m": [{"r": {"\xc3\xa9": 1, "b": 2, "\xc3\xa9": 3}}]}',
            "has the key 'é' twice in one object; keep one of them",
        ),
        (rb'{"a": "\ud83d"}', r"contains a lone surrogate (such as \ud83d), which is not a character"),
        (
            b"\xef\xbb\xbf" + row(),
            "starts with a byte order mark, which is allowed only in the first line of a file",
        ),
        (b"", "is blank; remove it"),
        (b" \t\r", "is blank; remove it"),
        (b'{"prompt": "x"}', "messages: is missing"),
        (b'{"messages": "x"}', "messages: must be a list of at least one message"),
        (b'{"messages": []}', "messages: must be a list of at least one message"),
        (row("x"), "messages[0]: must be an object, not a string"),
        (
            row(tools=[{"type": "function"}]),
            'tools[0]: must be {"type": "function", "function": {"name": "...", ...}}',
        ),
        (row(tools={"weather": {}}), "tools: must be a list of functions, not an object"),
        (row(tools=[WEATHER, WEATHER]), "tools[1].function.name: the tool 'weather' is already in the list"),
        (
            row(tools=[{"type": "function", "function": {"name": "f", "parameters": "x"}}]),
            "tools[0].function.parameters: must be a JSON schema",
        ),
        (
            row(tools=[{"type": "function", "function": {"name": "my.tool"}}]),
            "tools[0].function.name: must be 1 to 64 letters, digits, '_' or '-'",
        ),
        (
            row(tools=[{"type": "function", "function": {"name": "f", "returns": {}}}]),
            "tools[0].function.returns: is not a key of functions, which have description, name, parameters, strict",
        ),
        (
            row(tools=[{"type": "function", "function": {"name": "f", "description": 1}}]),
            "tools[0].function.description: must be a string, not a number",
        ),
        (
            row(tools=[{"type": "function", "function": {"name": "f", "strict": "no"}}]),
            "tools[0].function.strict: must be true or false",
        ),
        (
            row(tools=[{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]),
            "tools: has 129 functions, and at most 128 are supported",
        ),
        (row(parallel_tool_calls="no"), "parallel_tool_calls: must be true or false"),
        (
            row(USER, RESULT),
            "messages[1].tool_call_id: 'call_1' is no call of the assistant's message before it that still has no "
            "result",
        ),
        (
            row(USER, CALLING, RESULT, RESULT),
            "messages[3].tool_call_id: 'call_1' is no call of the assistant's message before it that still has no "
            "result",
        ),
        (
            row(USER, CALLING, USER, RESULT),
            "messages[3].tool_call_id: 'call_1' is no call of the assistant's message before it that still has no "
            "result",
        ),
        (
            row(USER, CALLING | {"tool_calls": [*CALLING["tool_calls"], *CALLING["tool_calls"]]}, RESULT),
            "messages[1].tool_calls[1].id: 'call_1' is the id of another call of this message; give each its own",
        ),
        (
            row(USER, {"role": "assistant", "content": "4"}),
            "messages[1].role: the last message must be from the user or a tool, not assistant",
        ),
    ],
)
def test_a_bad_line_is_named_by_its_number(line: bytes, problem: str) -> None:
    assert problems(row(), line, row()) == [f"line 2: {problem}"]


def test_calls_of_two_turns_may_have_one_id() -> None:
    """The result of each is after it, so which is whose is certain."""
    assert problems(row(USER, CALLING, RESULT, CALLING, RESULT)) == []


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"content": "x"}, "role: must be one of system, developer, user, assistant, tool"),
        ({"role": "bot", "content": "x"}, "role: must be one of system, developer, user, assistant, tool"),
        ({"role": ["user"], "content": "x"}, "role: must be one of system, developer, user, assistant, tool"),
        ({"role": "user"}, "content: is missing"),
        ({"role": "user", "content": None}, "content: is missing"),
        ({"role": "user", "content": []}, "content: must be a string or a list of text parts"),
        ({"role": "user", "content": ["x"]}, "content[0]: must be an object, not a string"),
        ({"role": "user", "content": [{"text": "x"}]}, 'content[0].type: must be "text"'),
        (
            {"role": "user", "content": [{"type": "text"}]},
            'content[0]: must be {"type": "text", "text": "..."}',
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": 1}]},
            'content[0]: must be {"type": "text", "text": "..."}',
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "content[0]: images are not supported by this version",
        ),
        ({"role": "user", "content": "x", "name": 1}, "name: must be a string, not a number"),
        ({"role": "user", "content": "x", "weight": 1}, "weight: is only for messages of the assistant"),
        ({"role": "assistant", "content": "x", "weight": 0.5}, "weight: must be 0 or 1"),
        ({"role": "assistant", "content": "x", "weight": True}, "weight: must be 0 or 1"),
        (
            {"role": "tool", "content": "x"},
            "tool_call_id: is missing: the id of the call whose result this is",
        ),
        (
            {"role": "user", "content": "x", "tool_call_id": "1"},
            "tool_call_id: is only for messages of a tool",
        ),
        (
            {"role": "user", "content": "x", "tool_calls": CALLING["tool_calls"]},
            "tool_calls: is only for messages of the assistant",
        ),
        ({"role": "assistant", "tool_calls": {"id": "1"}}, "tool_calls: must be a list of at least one call"),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]},
            'tool_calls[0]: must be {"id": "...", "type": "function", "function": {"name": "...", ...}}',
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}}}]},
            "tool_calls[0].function.arguments: must be a string of JSON",
        ),
    ],
)
def test_a_bad_message_is_named_by_its_path(message: dict[str, Any], problem: str) -> None:
    assert message_problems(**message) == [f"line 1: messages[0].{problem}"]


def test_all_problems_of_a_line_are_told() -> None:
    assert problems(row({"role": "bot", "content": 1}, tools=[1])) == [
        'line 1: tools[0]: must be {"type": "function", "function": {"name": "...", ...}}',
        "line 1: messages[0].role: must be one of system, developer, user, assistant, tool",
        "line 1: messages[0].content: must be a string or a list of text parts",
    ]


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_a_byte_order_mark_at_the_beginning_of_a_file_is_skipped(size: int) -> None:
    content = b"\xef\xbb\xbf" + row() + b"\n"
    chunks = [content[start : start + size] for start in range(0, len(content), size)]

    assert [example.messages for example in read_examples(chunks)] == [[USER]]


def test_a_file_of_nothing_but_a_byte_order_mark_is_empty() -> None:
    with pytest.raises(InvalidDataset, match="the file is empty"):
        read_examples([b"\xef\xbb\xbf"])


EMPTY: dict[str, Any] = {
    "refusal": None,
    "tool_calls": None,
    "tool_call_id": None,
    "function_call": None,
    "audio": None,
    "annotations": [],
    "name": None,
}


def test_keys_of_a_copied_answer_that_say_nothing_are_accepted_and_not_rendered() -> None:
    answer = {"role": "assistant", "content": "4"}
    sent = {"messages": [USER, answer | EMPTY, USER | {"name": None, "tool_calls": []}], "tools": []}

    (example,) = read_examples([json.dumps(sent | {"parallel_tool_calls": True}).encode()])

    assert example.messages == [USER, answer, USER]
    assert example.item == sent | {"parallel_tool_calls": True}


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ({"refusal": "no"}, "is not a message key that this version supports"),
        ({"function_call": {"name": "f"}}, "is deprecated and not supported by this version; use tool_calls"),
    ],
)
def test_the_same_keys_with_something_in_them_are_refused_by_name(key: dict[str, Any], problem: str) -> None:
    (name,) = key
    assert message_problems(role="assistant", content="x", **key)[0] == (
        f"line 1: messages[0].{name}: {problem}"
    )


def test_each_blank_line_in_the_middle_is_an_error() -> None:
    assert problems(b"", row(), b"", b"\r", row(), b"") == [
        "line 1: is blank; remove it",
        "line 3: is blank; remove it",
        "line 4: is blank; remove it",
    ]


# Long lines


def test_a_line_of_exactly_the_limit_is_fine_and_one_byte_more_is_not() -> None:
    lines = file(row(), row() + b" ", row())

    _, wrong, _ = read_rows(lines, max_line_bytes=len(row()))

    assert str(wrong) == f"line 2: is longer than {len(row())} bytes"


def test_an_endless_line_does_not_fill_the_memory() -> None:
    chunks = itertools.chain(itertools.repeat(b"x" * MIB, 64), [b"\n" + row()])
    tracemalloc.start()
    try:
        found = list(read_rows(chunks))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert str(found[0]) == "line 1: is longer than 4194304 bytes"
    assert isinstance(found[1], Example)
    assert peak < 16 * MIB


# Chunks


LINES = st.sampled_from(
    [row(), row(answer="größe 数"), b"\r", b"", b"\xef\xbb\xbf", b"\xff", b"{", b"x" * 300, b"[1]"]
)
FILES = st.one_of(st.lists(LINES).map(b"\n".join), st.binary(max_size=50))


@given(FILES, st.data())
def test_how_a_file_is_cut_into_chunks_makes_no_difference(whole: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    chunks = [whole[start:end] for start, end in itertools.pairwise([0, *cuts, len(whole)])]

    assert list(read_rows(chunks, 200)) == list(read_rows([whole], 200))


@given(st.binary())
def test_no_bytes_make_it_fail_in_any_other_way(whole: bytes) -> None:
    for found in read_rows([whole]):
        assert isinstance(found, Example | LineError)


# Whole files


def invalid(chunks: Any, **options: Any) -> InvalidDataset:
    with pytest.raises(InvalidDataset) as caught:
        read_examples(chunks, **options)
    return caught.value


@pytest.mark.parametrize("chunks", [[], [b""], [b"\n \r\n"]])
def test_an_empty_file_is_said_to_be_empty(chunks: list[bytes]) -> None:
    assert str(invalid(chunks)) == "the file is empty"


def test_too_few_rows_are_counted() -> None:
    error = invalid(file(row(), row()), min_rows=10)

    assert str(error) == "the file has 2 example(s), but must have at least 10 examples"


def test_a_file_of_exactly_the_limits_is_fine() -> None:
    assert len(read_examples(file(row(), row()), min_rows=2, max_rows=2)) == 2


def test_one_row_too_many_ends_the_reading() -> None:
    def chunks() -> Iterator[bytes]:
        yield from file(row(), b"{", row())
        raise AssertionError("read on")

    assert str(invalid(chunks(), max_rows=2)) == "line 3: the file must have at most 2 examples"


def test_two_problems_in_one_line_are_still_one_row() -> None:
    bad = row({"role": "bot", "content": 1})

    assert len(invalid(file(bad, row()), max_rows=2).errors) == 2


def test_one_bad_line_refuses_the_file_and_names_itself() -> None:
    error = invalid(file(row(), b"{}", row()))

    assert error.errors == [LineError(2, "is missing", "messages")]
    assert str(error) == "line 2: messages: is missing"


def test_one_problem_of_many_lines_is_reported_once_with_its_lines() -> None:
    error = invalid(file(*[b"{}"] * 25, row(), b"{}"))

    assert str(error) == "line 1: messages: is missing (and in 25 more lines: 2, 3, 4, 5, …)"
    assert str(invalid(file(b"{}", row(), b"{}"))) == "line 1: messages: is missing (and in 1 more line: 3)"


def test_twenty_different_problems_are_reported_and_the_further_lines_counted() -> None:
    lines = [b'{"messages": [], "%d"}' % 10**n for n in range(26)]  # the column of each error differs

    error = invalid(file(*lines))

    assert [found.line for found in error.errors] == list(range(1, MAX_REPORTED + 1))
    assert error.more == 6
    assert str(error).endswith("\nand 6 more line(s) with problems")


def test_lines_are_counted_once_however_many_problems_they_have() -> None:
    good, bad = {"role": "user", "content": "hi"}, {"role": "bot", "content": 1}
    # 16 problems of each line, whose paths differ from those of the others; the second line is told in part.
    error = invalid(file(*[row(*[good] * at, *[bad] * 8) for at in (0, 8, 16, 24)]))

    assert len(error.errors) == MAX_REPORTED
    assert error.more == 2


def test_the_parsers_words_are_english() -> None:
    """Python's parser writes "Invalid control character at", and "Unterminated string starting at"."""
    for line in (b'{"a": "b\tc"}', b'{"a": "b'):
        assert " at at " not in str(invalid(file(line)))
    assert (
        str(invalid(file(b'{"a": "b\tc"}'))) == "line 1: is not JSON: Invalid control character at column 9"
    )


def test_a_check_adds_problems_of_its_own() -> None:
    def check(example: Example) -> Iterator[str]:
        if "answer" not in example.item:
            yield "the grader uses item.answer, which this row does not have"

    assert len(read_examples(file(row(answer="4")), check=check)) == 1
    assert str(invalid(file(row(answer="4"), row()), check=check)) == (
        "line 2: the grader uses item.answer, which this row does not have"
    )


def test_the_error_survives_a_process_boundary() -> None:
    error = pickle.loads(pickle.dumps(InvalidDataset([LineError(7, "is blank")], more=3)))

    assert str(error) == "line 7: is blank\nand 3 more line(s) with problems"


@pytest.mark.parametrize(
    "content",
    [
        row() + b"\n" + row() + b"\n",
        b"",
        row() + b"\n{}\n",
        row() + b"\n" + b"x" * (MAX_LINE_BYTES + 1) + b"\n",
        b"\n".join([row()] * 4),
    ],
)
def test_counting_rows_comes_to_what_reading_them_does(content: bytes) -> None:
    def outcome(read: Callable[..., int]) -> int | str:
        try:
            return read([content], max_rows=3)
        except InvalidDataset as invalid:
            return str(invalid)

    assert outcome(count_examples) == outcome(lambda chunks, **more: len(read_examples(chunks, **more)))
