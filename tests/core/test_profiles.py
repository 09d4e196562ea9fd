"""Profiles of datasets: rows as they are, and token counts as the worker has them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from core.model_templates import TemplateFiles
from core.prompt_tokens import CannotCount, ChatTokens, TokenCounter
from core.storage import profiles
from core.storage.profiles import Profile, Reader, SomeLines, TokenRoom
from tests.thinking import HYBRID, thinking_tokenizer
from tests.tiny import TEMPLATE, tiny_tokenizer
from worker.model.policy import render


def prompt(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def lines(rows: list[Any]) -> Iterator[bytes]:
    for row in rows:
        yield (row if isinstance(row, str) else json.dumps(row)).encode() + b"\n"


def profiled(rows: list[Any], **how: Any) -> Profile:
    return profiles.profile(lines(rows), **{"method": "reinforcement", "room": None} | how)


@pytest.fixture
def files(tmp_path: Path) -> TemplateFiles:
    """A tokenizer of words."""
    tiny_tokenizer().save_pretrained(tmp_path)
    return TemplateFiles(TEMPLATE, {"eos_token": "<end>"}, tmp_path)


def test_rows_and_fields_are_counted() -> None:
    made = profiled([prompt("a", answer="1"), prompt("b", answer=2), prompt("ccc")])

    assert (made.rows, made.invalid, made.is_whole) == (3, 0, True)
    answer = next(field for field in made.fields if field.name == "answer")
    assert (answer.rows, answer.missing, answer.distinct) == (2, 1, 2)
    assert answer.types == {"string": 1, "number": 1}
    assert answer.example == '"1"'
    assert made.characters is not None
    assert (made.characters.min, made.characters.p50, made.characters.max) == (1, 1, 3)


def test_the_bins_hold_each_row_once() -> None:
    made = profiles.lengths([*range(100), 99])

    assert sum(found.rows for found in made.bins) == 101
    assert (made.bins[0].low, made.bins[-1].rows) == (0, 6)
    assert len(profiles.lengths([7, 7]).bins) == 1


def test_bad_lines_are_named_and_left_out() -> None:
    made = profiled([prompt("a"), "{", {"messages": []}, prompt("b")])

    assert (made.rows, made.invalid) == (2, 2)
    assert [problem.line for problem in made.problems] == [2, 3]
    assert made.problems[1].path == "messages"


def test_a_prompt_that_occurs_twice_is_a_duplicate_and_identical_only_with_the_same_fields() -> None:
    rows = [
        prompt("a", answer="1"),
        prompt("b"),
        prompt("a", answer="2"),
        prompt("b"),
        prompt("a", answer="1"),
    ]

    found = profiled(rows).duplicates

    assert (found.rows, found.identical, found.prompts) == (3, 2, 2)
    assert found.lines == [[1, 3, 5], [2, 4]]


def test_text_parts_and_plain_text_are_one_prompt() -> None:
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}

    assert profiled([prompt("a"), parts]).duplicates.rows == 1


def test_the_answers_of_supervised_rows_are_no_part_of_their_prompt() -> None:
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]}
        for answer in "xy"
    ]

    found = profiled(rows, method="supervised").duplicates

    assert (found.rows, found.identical) == (1, 0)


def test_rows_of_the_validation_file_that_are_in_this_one_are_paired() -> None:
    other = [prompt("new"), prompt("b", answer="other"), "{", prompt("a")]

    found = profiled([prompt("a"), prompt("b")], validation=("file-2", lines(other))).overlap

    assert found is not None
    assert (found.file, found.rows, found.shared) == ("file-2", 3, 2)
    assert found.lines == [[2, 2], [4, 1]]


def test_rows_that_lack_a_field_of_the_grader_are_listed() -> None:
    reader = Reader(
        ["item.answer"],
        missing=lambda row: [] if "answer" in row else ["item.answer"],
        lacks_word=lambda row: False,
        doubts=lambda row: [],
        not_listed=False,
    )

    found = profiled([prompt("a", answer="1"), prompt("b"), prompt("c")], reader=reader).grader

    assert found is not None
    assert [(read.path, read.missing.rows, read.missing.lines) for read in found.paths] == [
        ("item.answer", 2, [2, 3])
    ]
    assert (found.not_listed, found.no_grader) == (False, None)


def test_only_so_many_rows_are_read() -> None:
    made = profiled([prompt(str(number)) for number in range(9)], max_rows=5)

    assert (made.rows, made.is_whole) == (5, False)


def test_more_fields_and_values_than_are_shown_are_not_kept() -> None:
    rows = [prompt("a", **{f"key{number}": 1 for number in range(200)}) | {"many": n} for n in range(3)]
    many = [prompt("a", value=number) for number in range(profiles.MAX_DISTINCT + 1)]

    assert len(profiled(rows).fields) == profiles.MAX_FIELDS
    assert profiled(many).fields[1].distinct is None


@pytest.mark.slow
def test_names_and_paths_of_megabytes_are_not_repeated() -> None:
    long = "k" * 100_000

    made = profiled([prompt("a", **{long: 1}), {"messages": [{"role": "user", "content": "b", long: 1}]}])

    assert [found.name for found in made.fields] == ["messages"]
    assert [len(problem.path) for problem in made.problems] == [profiles.MAX_NAME + 1]


def test_long_rows_are_counted_in_small_batches(files: TemplateFiles) -> None:
    class Watched(TokenCounter):
        batches: ClassVar[list[int]] = []

        def count(self, chats: Sequence[Mapping[str, Any]]) -> list[ChatTokens | None]:
            self.batches.append(len(chats))
            return [ChatTokens(1, special_texts=False) for _ in chats]

    half = "x" * (profiles.BATCH_CHARACTERS // 2)
    with Watched(files) as counter:
        made = profiled([prompt("a"), *[prompt(half) for _ in range(5)]], room=TokenRoom(counter, 3))

    assert Watched.batches == [3, 2, 1]
    assert made.tokens is not None
    assert made.tokens.rows == 6


def test_tokens_are_those_of_the_worker_and_rows_that_do_not_fit_are_listed(files: TemplateFiles) -> None:
    rows = [
        prompt("say the word"),
        {
            "messages": [
                {"role": "developer", "content": "say it"},
                {"role": "user", "content": "cat dog bird one two"},
            ]
        },
    ]
    expected = [len(render(tiny_tokenizer(), row["messages"])) for row in rows]

    with TokenCounter(files) as counter:
        made = profiled(rows, room=TokenRoom(counter, expected[0]))

    assert made.tokens is not None
    assert (made.tokens.rows, made.tokens.min, made.tokens.max) == (2, min(expected), max(expected))
    assert (made.tokens.room, made.tokens.too_long.lines) == (expected[0], [2])


OF_CALLS = "{% for call in message.tool_calls or [] %} {{ call.function.arguments OF }}{% endfor %}"


@pytest.mark.slow
@pytest.mark.parametrize("of", ["| items | list | length", "| tojson"])
def test_tokens_of_calls_are_those_of_the_worker(files: TemplateFiles, of: str) -> None:
    for_tools = (
        f"{{% for message in messages %}}{{{{ message.content }}}}{OF_CALLS.replace('OF', of)}{{% endfor %}}"
    )
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": for_tools}
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"word": "cat"}'}}
    row = prompt("say") | {"tools": [{"type": "function", "function": {"name": "find", "parameters": {}}}]}
    row["messages"] += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "dog"},
    ]
    expected = len(render(tokenizer, row["messages"], tools=row["tools"]))

    with TokenCounter(replace(files, tool_use=for_tools)) as counter:
        made = profiled([row], room=TokenRoom(counter, 100))

    assert made.tokens is not None
    assert (made.tokens.rows, made.tokens.max) == (1, expected)


@pytest.mark.slow
def test_the_longest_answer_counts_for_pairs(files: TemplateFiles) -> None:
    row = {
        "input": {"messages": [{"role": "user", "content": "say"}]},
        "preferred_output": [{"role": "assistant", "content": "cat"}],
        "non_preferred_output": [{"role": "assistant", "content": "cat dog bird"}],
    }

    with TokenCounter(files) as counter:
        made = profiled([row], method="dpo", room=TokenRoom(counter, 100))

    assert made.tokens is not None
    assert made.tokens.max == len("<user> say <assistant> cat dog bird".split())


@pytest.mark.slow
def test_of_many_rows_a_uniform_sample_is_counted(files: TemplateFiles) -> None:
    rows = [prompt("cat " * (1 + number % 4)) for number in range(2000)]

    with TokenCounter(files) as counter:
        made = profiled(rows, room=TokenRoom(counter, 100), max_counted=500)

    assert made.tokens is not None
    assert made.rows == 2000
    assert 150 < made.tokens.rows <= 500
    assert made.tokens.mean == pytest.approx(2 + 2.5, abs=0.2)


@pytest.mark.slow
def test_a_row_that_the_template_rejects_is_listed(files: TemplateFiles) -> None:
    template = TEMPLATE + "{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}"
    two = {"messages": [{"role": "system", "content": "say"}, {"role": "user", "content": "cat"}]}

    with TokenCounter(TemplateFiles(template, {}, files.folder)) as counter:
        made = profiled([prompt("cat"), two], room=TokenRoom(counter, 100))

    assert made.tokens is not None
    assert (made.tokens.rows, made.tokens.not_rendered.lines) == (1, [2])


@pytest.mark.slow
def test_a_template_that_never_ends_costs_the_tokens_and_nothing_else(files: TemplateFiles) -> None:
    endless = TemplateFiles("{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4, {}, files.folder)

    with TokenCounter(endless, cpu_seconds=1) as counter:
        made = profiled([prompt("cat")], room=TokenRoom(counter, 100))

    assert made.rows == 1
    assert made.tokens is None
    assert made.tokens_reason is not None
    assert "too much time or memory" in made.tokens_reason


def test_a_model_without_a_fast_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(CannotCount, match=r"tokenizer\.json"):
        TokenCounter(TemplateFiles(TEMPLATE, {}, tmp_path))


@pytest.mark.slow
def test_special_tokens_of_the_template_are_one_token_each(tmp_path: Path) -> None:
    tokenizer = thinking_tokenizer(HYBRID)
    tokenizer.save_pretrained(tmp_path)
    row = prompt("Hi")

    with TokenCounter(TemplateFiles(HYBRID, {}, tmp_path)) as counter:
        [count] = counter.count([{"messages": row["messages"], "tools": None, "prompt": True}])

    assert count == ChatTokens(len(render(tokenizer, row["messages"])), special_texts=False)


@pytest.mark.slow
def test_rows_with_the_text_of_a_special_token_are_counted_as_the_worker_renders_them(tmp_path: Path) -> None:
    tokenizer = thinking_tokenizer(HYBRID)
    tokenizer.save_pretrained(tmp_path)
    rows = [prompt("Hi"), prompt("Ho <|end|><user>")]

    with TokenCounter(TemplateFiles(HYBRID, {}, tmp_path)) as counter:
        made = profiled(rows, room=TokenRoom(counter, 100))

    assert made.tokens is not None
    assert made.tokens.max == len(render(tokenizer, rows[1]["messages"]))
    assert made.tokens.special_texts == SomeLines(1, [2])
