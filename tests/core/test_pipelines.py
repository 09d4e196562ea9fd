"""The graph of a pipeline, and the rows that its stages make."""

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvalidRequest
from core.pipelines import graph, rows
from core.pipelines.graph import PlannedStage, StageReference
from core.pipelines.rows import Part, Selection


def job(name: str, model: str = "tiny", file: str = "file-1", **more: Any) -> PlannedStage:
    return PlannedStage(name, "job", {"model": model, "training_file": file} | more)


R1 = [
    job("cold"),
    job("rl", model="{{stages.cold.model}}"),
    PlannedStage("answers", "sample", {"model": "{{ stages.rl.model }}", "file": "file-2"}),
    PlannedStage("best", "select", {"file": "{{stages.answers.file}}"}),
    PlannedStage("mixed", "mix", {"files": [{"file": "{{stages.best.file}}"}, {"file": "file-3"}]}),
    job("sft", file="{{stages.mixed.file}}"),
    PlannedStage("last", "job", {"model": "{{stages.sft.model}}"}, after=["rl"]),
]


def test_a_stage_needs_the_stages_that_it_refers_to_and_those_it_comes_after() -> None:
    assert [graph.needs(stage) for stage in R1] == [
        [],
        ["cold"],
        ["rl"],
        ["answers"],
        ["best"],
        ["mixed"],
        ["sft", "rl"],
    ]
    graph.check(R1)


def test_all_stages_behind_one_need_it() -> None:
    assert graph.behind(R1, "best") == {"best", "mixed", "sft", "last"}
    assert graph.behind(R1, "last") == {"last"}


def test_references_are_whole_strings_and_are_filled_in_everywhere() -> None:
    spec = {"a": ["{{stages.x.file}}", {"b": "{{stages.y.model}}"}], "text": "a {{stages.x.file}} b", "n": 1}
    results = {StageReference("x", "file"): "file-9", StageReference("y", "model"): "ft:y"}

    assert graph.filled(spec, results) == {
        "a": ["file-9", {"b": "ft:y"}],
        "text": "a {{stages.x.file}} b",
        "n": 1,
    }


@pytest.mark.parametrize(
    ("stages", "param", "words"),
    [
        ([job("a"), job("a")], "stages[0].name", "already the name"),
        ([job("a", model="{{stages.b.model}}")], "stages[0].job.model", "no stage 'b'"),
        ([job("a"), job("b", file="{{stages.a.file}}")], "stages[1].job.training_file", "has a 'model'"),
        ([PlannedStage("a", "job", {}, after=["z"])], "stages[0].after[0]", "no stage 'z'"),
        ([job("a", model="{{stages.b.model}}"), job("b", model="{{stages.a.model}}")], "stages", "circle"),
        ([job("a", model="{{stages.a.model}}")], "stages", "circle"),
        ([job("a"), job("b", suffix="x-{{stages.a.model}}")], "stages[1].job.suffix", "the whole text"),
    ],
)
def test_stages_that_cannot_run_are_refused_by_name(
    stages: list[PlannedStage], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        graph.check(stages)

    assert refused.value.param == param
    assert words in refused.value.message


def sample(prompt: int, answer: str, score: float | None = 1.0, finish: str = "stop") -> rows.Row:
    return {
        "messages": [{"role": "user", "content": f"{prompt}?"}],
        "gold": prompt,
        "sample": {"answer": answer, "score": score, "finish_reason": finish, "prompt": prompt},
    }


def answers(samples: list[rows.Row], **wanted: Any) -> list[str]:
    kept = rows.selected(samples, Selection(form="samples", **wanted))
    return [row["sample"]["answer"] for row in kept]


SAMPLES = [
    sample(1, "one two three four", 0.2),
    sample(1, "one two three five", 0.9),
    sample(1, "something else entirely here", 0.5),
    sample(1, "one  two three five", 0.9),
    sample(2, "cut", 1.0, "length"),
    sample(2, "ungraded", None),
    sample(3, "全部 中文", 1.0),
]


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        (
            {},
            [
                "one two three four",
                "one two three five",
                "something else entirely here",
                "ungraded",
                "全部 中文",
            ],
        ),
        ({"min_score": 0.5}, ["one two three five", "something else entirely here", "全部 中文"]),
        ({"max_score": 0.5}, ["one two three four", "something else entirely here"]),
        ({"best": 1}, ["one two three five", "ungraded", "全部 中文"]),
        ({"finished": False, "min_score": 1}, ["cut", "全部 中文"]),
        ({"deduplicate": False, "min_score": 0.9, "max_score": 0.9}, ["one two three five"] * 2),
        (
            {"max_pass_rate": 0.7},
            ["one two three four", "one two three five", "something else entirely here"],
        ),
        ({"min_pass_rate": 1.0, "finished": False}, ["cut", "ungraded", "全部 中文"]),
        ({"max_characters": 8}, ["ungraded", "全部 中文"]),
        ({"min_characters": 20}, ["something else entirely here"]),
        ({"script": "CJK"}, ["全部 中文"]),
        (
            {"max_similarity": 0.3, "min_score": 0.1},
            ["one two three five", "something else entirely here", "全部 中文"],
        ),
    ],
)
def test_each_condition_keeps_what_meets_it(wanted: dict[str, Any], kept: list[str]) -> None:
    found = [" ".join(one.split()) for one in answers(SAMPLES, **wanted)]

    assert found == kept


def test_a_selection_has_the_form_that_the_next_stage_reads() -> None:
    def shaped(form: rows.Form) -> list[rows.Row]:
        return list(rows.selected(SAMPLES[:3], Selection(form=form)))

    prompt = [{"role": "user", "content": "1?"}]

    def answer(text: str) -> dict[str, str]:
        return {"role": "assistant", "content": text}

    assert shaped("supervised")[1] == {"messages": [*prompt, answer("one two three five")]}
    assert shaped("dpo") == [
        {
            "input": {"messages": prompt},
            "preferred_output": [answer("one two three five")],
            "non_preferred_output": [answer("one two three four")],
        }
    ]
    [row] = shaped("prompts")
    assert row == {"messages": prompt, "gold": 1, "pass_rate": pytest.approx(1.6 / 3)}


def test_answers_of_one_score_are_no_preference() -> None:
    equal = [sample(1, "a"), sample(1, "b")]

    assert list(rows.selected(equal, Selection(form="dpo"))) == []


def test_a_prompt_is_asked_up_to_its_last_question() -> None:
    asked = {"role": "user", "content": "?"}
    learned = [asked, {"role": "assistant", "content": "!"}]

    found = list(rows.prompts([{"messages": learned, "gold": 1}], 2))

    assert found == [{"item": {"messages": [asked], "gold": 1}}] * 2


@pytest.mark.parametrize(
    "row", [{}, {"messages": "text"}, {"messages": [{"role": "assistant", "content": "!"}]}]
)
def test_a_row_without_a_question_is_refused_by_its_line(row: rows.Row) -> None:
    with pytest.raises(ValueError, match="line 1 has no"):
        list(rows.prompts([row], 1))


def test_an_item_becomes_a_sample_of_its_prompt() -> None:
    item = {
        "line": 5,
        "datasource_item": {"messages": [], "gold": 2},
        "results": [{"score": 0.5}],
        "sample": {"output": [{"role": "assistant", "content": "!"}], "finish_reason": "stop"},
    }

    assert rows.answered(item, samples=4) == {
        "messages": [],
        "gold": 2,
        "sample": {"answer": "!", "score": 0.5, "finish_reason": "stop", "prompt": 2},
    }
    assert rows.answered(item | {"sample": {"output": [], "finish_reason": "stop"}}, samples=4) is None


def test_a_prompt_with_more_answers_than_are_compared_is_refused() -> None:
    many = [sample(1, str(n)) for n in range(rows.MAX_ANSWERS + 1)]

    assert len(answers(many[:-1])) == rows.MAX_ANSWERS
    with pytest.raises(ValueError, match="more than 256 answers"):
        answers(many)


def test_answers_to_a_prompt_are_compared_in_little_memory() -> None:
    """A list of empty lists has 20 times the bytes of its JSON."""
    bomb = json.dumps([[]] * 20_000)

    def samples() -> Iterator[rows.Row]:
        for number in range(16):
            yield sample(1, str(number)) | {"x": json.loads(bomb)}

    tracemalloc.start()
    try:
        kept = sum(1 for _ in rows.selected(samples(), Selection(form="samples")))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert kept == 16
    assert peak < 10 << 20


def test_answers_to_a_prompt_that_are_too_large_to_compare_are_refused() -> None:
    large = "x" * (rows.MAX_BYTES_OF_A_PROMPT // 64)
    samples = [sample(1, f"{number}{large}") for number in range(64)]

    with pytest.raises(ValueError, match="more than 67,108,864 bytes"):
        answers(samples)
    assert len(answers([sample(n, large) for n in range(64)])) == 64


def test_scores_whose_sum_is_no_float_are_refused() -> None:
    with pytest.raises(ValueError, match="a 'sample' needs"):
        rows.checked(sample(1, "a", 1.7e308))
    assert rows.pass_rate([rows.MAX_SCORE] * rows.MAX_ANSWERS) == pytest.approx(rows.MAX_SCORE)


def test_a_mixture_holds_no_file_in_memory() -> None:
    line = b"x" * 1_000_000

    def large() -> Iterator[bytes]:
        for number in range(60):
            yield line + b"%d" % number

    tracemalloc.start()
    try:
        size = sum(len(found) for found in rows.mixed([Part(large, 1), Part(large, 0.5)], 0))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert size > 90 * len(line)
    assert peak < 10 << 20


@pytest.mark.parametrize(
    "changed",
    [
        {"answer": None},
        {"score": "1"},
        {"score": True},
        {"score": float("nan")},
        {"score": -(10**390)},
        {"finish_reason": None},
        {"prompt": "1"},
    ],
)
def test_a_row_that_no_sample_stage_made_is_refused(changed: dict[str, Any]) -> None:
    row = sample(1, "a")
    assert rows.checked(row) == row

    with pytest.raises(ValueError, match="a 'sample' needs"):
        rows.checked(row | {"sample": row["sample"] | changed})
    with pytest.raises(ValueError, match="no 'sample' and 'messages'"):
        rows.checked(row | {"messages": None})


def test_a_mixture_of_too_many_lines_is_refused_before_it_is_made() -> None:
    parts = [part([b"1"] * 60, 1), part([b"2"] * 50, 0.8)]

    assert len(list(rows.mixed(parts, 0, most=100))) == 100
    with pytest.raises(ValueError, match="more than 99 lines"):
        list(rows.mixed(parts, 0, most=99))


def test_a_file_of_too_many_lines_is_not_read_to_its_end() -> None:
    read = 0

    def endless() -> Iterator[bytes]:
        nonlocal read
        while True:
            read += 1
            yield b"{}"

    with pytest.raises(ValueError, match="file of the mixture has more than 100 lines"):
        list(rows.mixed([Part(endless, 0.001)], 0, most=100))
    assert read == 101


def test_a_mixture_of_too_many_bytes_reads_no_further_file() -> None:
    def unread() -> Iterator[bytes]:
        raise AssertionError("the file was read")

    parts = [part([b"12345"] * 10, 2.5), Part(unread, 1)]

    with pytest.raises(ValueError, match="larger than 120 bytes"):
        list(rows.mixed(parts, 0, most_bytes=120))
    assert len(list(rows.mixed(parts[:1], 0, most_bytes=125))) == 25


def test_lines_that_are_sorted_in_parts_have_the_same_order() -> None:
    parts = [part([b"%d" % n for n in range(40)], 1.5)]

    assert list(rows.mixed(parts, 0, sorted_at_once=7)) == list(rows.mixed(parts, 0))


def part(lines: list[bytes], weight: float) -> Part:
    def read() -> Iterator[bytes]:
        yield from lines

    return Part(read, weight)


def test_a_mixture_takes_each_file_as_often_as_its_weight() -> None:
    a, b = ([b'{"%s": %d}' % (name, n) for n in range(20)] for name in (b"a", b"b"))

    found = list(rows.mixed([part(a, 1), part(b, 2.5)], seed=0))

    counts = {line: found.count(line + b"\n") for line in (*a, *b)}
    assert [counts[line] for line in a] == [1] * 20
    assert sorted(counts[line] for line in b) == [2] * 10 + [3] * 10
    assert all(isinstance(json.loads(line), dict) for line in found)
    assert found != sorted(found)


@given(seed=st.integers(0, 5), weight=st.floats(0.01, 3))
def test_a_mixture_is_the_same_each_time_and_another_with_another_seed(seed: int, weight: float) -> None:
    lines = [b"%d" % n for n in range(40)]

    def mixed(number: int) -> list[bytes]:
        return list(rows.mixed([part(lines, weight)], number))

    assert mixed(seed) == mixed(seed)
    assert len(mixed(seed)) == round(40 * (weight % 1)) + 40 * int(weight)
    if len(mixed(seed)) > 10:
        assert mixed(seed) != mixed(seed + 1)
