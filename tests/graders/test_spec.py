import asyncio
import pickle
import re
from collections.abc import Mapping
from typing import Any

import pytest

from graders import complaints
from graders.build import build, item_paths, missing_item_paths, row_problems
from graders.spec import MAX_REFERENCES, InvalidGrader, MultiSpec, dump, parse_grader
from graders.types import Sample
from tests.present import untyped

EXACT = {
    "type": "string_check",
    "name": "exact",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "eq",
}
SIMILAR = {
    "type": "text_similarity",
    "name": "similar",
    "input": "{{sample.output_text}}",
    "reference": "{{item.explanations[0]}}",
    "evaluation_metric": "fuzzy_match",
}
MULTI = {
    "type": "multi",
    "name": "both",
    "graders": {"acc": EXACT, "close": SIMILAR},
    "calculate_output": "0.8*acc + 0.2*close",
}


def refused(raw: object, param: str = "grader") -> InvalidGrader:
    with pytest.raises(InvalidGrader) as caught:
        parse_grader(raw, param)
    return caught.value


def without(raw: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in raw.items() if k != key}


def with_sub(**changes: object) -> dict[str, Any]:
    return {**MULTI, "graders": {"acc": {**EXACT, **changes}}, "calculate_output": "acc"}


@pytest.mark.parametrize("raw", [EXACT, SIMILAR, MULTI])
def test_what_was_sent_is_what_is_echoed(raw: dict[str, Any]) -> None:
    assert dump(parse_grader(raw)) == raw


@pytest.mark.parametrize("raw", [EXACT, SIMILAR, {**MULTI, "invalid_grade": -1}])
def test_an_echo_parses_to_the_same_spec(raw: dict[str, Any]) -> None:
    spec = parse_grader({**raw, "pass_threshold": 0.5})

    assert parse_grader(dump(spec)) == spec


def test_an_optional_sent_as_null_counts_as_not_sent() -> None:
    assert dump(parse_grader({**EXACT, "pass_threshold": None})) == EXACT


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        untyped(parse_grader(EXACT)).name = "other"


def test_graders_may_be_a_list_and_their_names_become_the_variables() -> None:
    spec = parse_grader({**MULTI, "graders": [EXACT, SIMILAR], "calculate_output": "exact * similar"})

    assert isinstance(spec, MultiSpec)
    assert list(spec.graders) == ["exact", "similar"]


def test_the_key_in_a_map_is_the_variable_whatever_the_name_says() -> None:
    spec = parse_grader(MULTI)

    assert isinstance(spec, MultiSpec)
    assert {key: sub.name for key, sub in spec.graders.items()} == {"acc": "exact", "close": "similar"}


@pytest.mark.parametrize(
    ("raw", "param", "code", "message"),
    [
        (
            "x",
            "grader",
            "invalid_type",
            "Invalid type for 'grader': expected an object, but got a string instead.",
        ),
        (
            None,
            "grader",
            "invalid_type",
            "Invalid type for 'grader': expected an object, but got null instead.",
        ),
        ({}, "grader.type", "missing_required_parameter", "Missing required parameter: 'grader.type'."),
        (
            without(EXACT, "input"),
            "grader.input",
            "missing_required_parameter",
            "Missing required parameter: 'grader.input'.",
        ),
        ({**EXACT, "foo": 1}, "grader.foo", "unknown_parameter", "Unknown parameter: 'grader.foo'."),
        (
            {**EXACT, "invalid_grade": 0},
            "grader.invalid_grade",
            "unknown_parameter",
            "Unknown parameter: 'grader.invalid_grade'.",
        ),
        (
            {**EXACT, "input": ["a"]},
            "grader.input",
            "invalid_type",
            "Invalid type for 'grader.input': expected a string, but got an array instead.",
        ),
        (
            {**EXACT, "type": 1},
            "grader.type",
            "invalid_type",
            "Invalid type for 'grader.type': expected a string, but got an integer instead.",
        ),
        (
            {**EXACT, "type": "exact"},
            "grader.type",
            "invalid_value",
            "Invalid value: 'exact'. Supported values are: 'string_check', 'text_similarity', 'python', "
            + "'math', 'format', 'score_model', 'label_model', 'endpoint', 'reward_model', 'multi' or 'select'.",
        ),
        (
            {**EXACT, "operation": "neq"},
            "grader.operation",
            "invalid_value",
            "Invalid value: 'neq'. Did you mean 'ne'? Supported values are: 'eq', 'ne', 'like' or 'ilike'.",
        ),
        (
            {**EXACT, "operation": {}},
            "grader.operation",
            "invalid_type",
            (
                "Invalid type for 'grader.operation': expected one of 'eq', 'ne', 'like' or 'ilike', "
                "but got an object instead."
            ),
        ),
        (
            {**EXACT, "pass_threshold": "0.5"},
            "grader.pass_threshold",
            "invalid_type",
            "Invalid type for 'grader.pass_threshold': expected a number, but got a string instead.",
        ),
        (
            {**MULTI, "graders": "x"},
            "grader.graders",
            "invalid_type",
            "Invalid type for 'grader.graders': expected an object, but got a string instead.",
        ),
        (
            {**MULTI, "graders": EXACT},
            "grader.graders.type",
            "invalid_type",
            "Invalid type for 'grader.graders.type': expected an object, but got a string instead.",
        ),
        (
            with_sub(reference=3),
            "grader.graders.acc.reference",
            "invalid_type",
            "Invalid type for 'grader.graders.acc.reference': expected a string, but got an integer instead.",
        ),
    ],
)
def test_a_mistake_is_named_in_the_words_of_the_api(
    raw: str | dict[str, Any] | None, param: str, code: str, message: str
) -> None:
    error = refused(raw)

    assert (error.param, error.code, error.message) == (param, code, message)


def test_the_path_starts_where_the_caller_says() -> None:
    error = refused(with_sub(input=1), param="method.reinforcement.grader")

    assert error.param == "method.reinforcement.grader.graders.acc.input"


def test_a_metric_that_needs_an_embedding_model_is_refused_with_the_reason() -> None:
    error = refused({**SIMILAR, "evaluation_metric": "cosine"})

    assert error.param == "grader.evaluation_metric"
    assert "It needs an embedding model" in str(error)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["pass_threshold", "invalid_grade"])
def test_numbers_must_be_finite(key: str, number: float) -> None:
    assert refused({**MULTI, key: number}).param == f"grader.{key}"


@pytest.mark.parametrize("value", [True, "1", [1]])
def test_nothing_but_a_number_is_a_number(value: bool | str | list[int]) -> None:
    assert refused({**MULTI, "invalid_grade": value}).code == "invalid_type"


def test_a_name_must_not_be_empty() -> None:
    assert refused({**EXACT, "name": ""}).param == "grader.name"


def test_a_bad_template_is_refused_with_its_position() -> None:
    error = refused({**EXACT, "reference": "x {{ row.answer }}"})

    assert (error.param, error.code) == ("grader.reference", "invalid_value")
    assert "unknown namespace 'row'" in error.message
    assert "(at position 5)" in error.message


@pytest.mark.parametrize(
    ("formula", "says"),
    [
        ("acc + fmt", "unknown name 'fmt', known are acc, close (at position 6)"),
        ("acc + exact", "unknown name 'exact'"),
        ("abs(acc, close)", "exactly one argument"),
        ("acc +", "got the end (at position 5)"),
        ("acc > close", "unexpected character '>'"),
        ("", "got the end (at position 0)"),
    ],
)
def test_a_bad_formula_is_refused_with_its_position(formula: str, says: str) -> None:
    error = refused({**MULTI, "calculate_output": formula})

    assert (error.param, error.code) == ("grader.calculate_output", "invalid_value")
    assert says in error.message


def test_a_multi_inside_a_multi_is_refused() -> None:
    error = refused({**MULTI, "graders": {"inner": MULTI}})

    assert error.param == "grader.graders.inner.type"
    assert "cannot contain another multi" in str(error)


@pytest.mark.parametrize("graders", [{}, []])
def test_a_multi_of_nothing_is_refused(graders: dict[Any, Any] | list[Any]) -> None:
    assert refused({**MULTI, "graders": graders}).param == "grader.graders"


def test_two_listed_graders_of_one_name_are_refused() -> None:
    error = refused({**MULTI, "graders": [EXACT, EXACT]})

    assert error.param == "grader.graders[1].name"
    assert "'exact' is already the name of another grader" in str(error)


@pytest.mark.parametrize("raw", [EXACT, SIMILAR, MULTI])
def test_a_grader_without_a_name_is_given_one_and_keeps_it(raw: dict[str, Any]) -> None:
    spec = parse_grader(without(raw, "name"))

    assert re.fullmatch(r"grader-[A-Za-z0-9]{12}", spec.name)
    assert dump(spec) == {**raw, "name": spec.name}
    assert parse_grader(dump(spec)) == spec


def test_the_graders_of_a_multi_are_given_names_too() -> None:
    spec = parse_grader({**MULTI, "graders": {"acc": without(EXACT, "name")}, "calculate_output": "acc"})

    assert isinstance(spec, MultiSpec)
    assert spec.graders["acc"].name.startswith("grader-")


def test_a_near_miss_hears_what_was_probably_meant() -> None:
    judge = {"type": "score_model", "model": "m", "input": [{"role": "user", "content": "x"}]}

    assert "Did you mean 'ne'?" in str(refused({**EXACT, "operation": "neq"}))
    assert str(refused({**judge, "sampling_parameters": {}})) == (
        "Unknown parameter: 'grader.sampling_parameters'. Did you mean 'sampling_params'?"
    )
    assert "Did you mean" not in str(refused({**EXACT, "colour": "red"}))


@pytest.mark.parametrize("raw", [EXACT, SIMILAR, MULTI])
def test_a_name_sent_as_null_counts_as_not_sent(raw: dict[str, Any]) -> None:
    spec = parse_grader({**raw, "name": None})

    assert re.fullmatch(r"grader-[A-Za-z0-9]{12}", spec.name)
    assert dump(spec) == {**raw, "name": spec.name}


def test_a_null_name_inside_a_multi_counts_as_not_sent() -> None:
    spec = parse_grader(with_sub(name=None))

    assert isinstance(spec, MultiSpec)
    assert spec.graders["acc"].name.startswith("grader-")


@pytest.mark.parametrize("unnamed", [without(SIMILAR, "name"), {**SIMILAR, "name": None}])
def test_listed_graders_need_names_because_the_formula_mentions_them(unnamed: dict[str, Any]) -> None:
    error = refused({**MULTI, "graders": [EXACT, unnamed]})

    assert (error.param, error.code) == ("grader.graders[1].name", "missing_required_parameter")


def test_a_mistake_in_a_listed_grader_is_found_by_its_index() -> None:
    assert (
        refused({**MULTI, "graders": [EXACT, without(SIMILAR, "input")]}).param == "grader.graders[1].input"
    )


@pytest.mark.parametrize("key", ["a b", "a-b", "1a", ""])
def test_a_key_that_no_formula_can_mention_is_refused(key: str) -> None:
    assert "cannot be a variable" in str(refused({**MULTI, "graders": {key: EXACT}}))


def test_a_pass_threshold_inside_a_multi_is_kept_and_leaves_the_score_alone() -> None:
    raw = with_sub(pass_threshold=2.0)

    spec = parse_grader(raw)

    assert dump(spec) == raw
    assert asyncio.run(build(spec).grade(Sample("a"), {"answer": "a"})).score == 1.0


def test_the_error_survives_a_process_border() -> None:
    error = pickle.loads(pickle.dumps(refused({})))

    assert (str(error), error.param) == ("Missing required parameter: 'grader.type'.", "grader.type")


@pytest.mark.parametrize("raw", [EXACT, SIMILAR, MULTI])
def test_what_parses_can_be_built(raw: dict[str, Any]) -> None:
    grader = build(parse_grader(raw))

    assert (grader.name, grader.type) == (raw["name"], raw["type"])


def test_a_spec_knows_what_it_reads_from_a_row() -> None:
    assert item_paths(parse_grader(MULTI)) == [("answer",), ("explanations", 0)]


def test_what_a_row_lacks_is_named_as_in_the_template() -> None:
    spec = parse_grader(MULTI)

    assert missing_item_paths(spec, {"explanations": []}) == ["item.answer", "item.explanations[0]"]
    assert missing_item_paths(spec, {"answer": None, "explanations": ["because"]}) == []


ROUGE = SIMILAR | {"evaluation_metric": "rouge_l", "reference": "{{item.answer}}"}


@pytest.mark.parametrize("grader", [ROUGE, MULTI | {"graders": {"acc": ROUGE}, "calculate_output": "acc"}])
def test_a_reference_without_a_word_is_a_problem_of_its_row(grader: dict[str, Any]) -> None:
    [problem] = row_problems(parse_grader(grader), {"answer": "Добрый день"})

    assert "'Добрый день' of 'similar' has no word of a-z and 0-9" in problem
    assert '"tokenizer": "unicode"' in problem
    assert row_problems(parse_grader(grader), {"answer": ""}) == [
        "the reference of 'similar' is empty, so rouge_l would score every answer with words 0. Use another reference"
    ]
    assert row_problems(parse_grader(grader), {"answer": "Öl 5"}) == []


def test_a_reference_that_the_answer_makes_is_no_problem_of_the_row() -> None:
    spec = parse_grader(ROUGE | {"input": "{{item.answer}}", "reference": "{{sample.output_text}}"})

    assert row_problems(spec, {"answer": "x"}) == []


def test_with_the_unicode_tokenizer_a_reference_needs_a_letter_or_digit_of_any_script() -> None:
    spec = parse_grader(ROUGE | {"tokenizer": "unicode"})

    assert row_problems(spec, {"answer": "Добрый день"}) == []
    assert "has no letter or digit" in row_problems(spec, {"answer": "…!"})[0]


def test_a_constant_reference_without_a_word_is_refused() -> None:
    error = refused(ROUGE | {"reference": "你好"})

    assert (error.param, error.code) == ("grader", "invalid_value")
    assert "every answer 0" in error.message


def test_a_tokenizer_is_only_for_metrics_of_words() -> None:
    assert refused(SIMILAR | {"tokenizer": "unicode"}).param == "grader.tokenizer"
    assert refused(ROUGE | {"tokenizer": "words"}).param == "grader.tokenizer"


def judge_of(**fields: object) -> dict[str, Any]:
    message = {"role": "user", "content": "{{item.a}}"}
    return {"type": "label_model", "name": "l", "model": "m", "input": [message], **fields}


MANY = [str(number) for number in range(100_000)]


@pytest.mark.parametrize(
    ("raw", "param", "most"),
    [
        (judge_of(labels=MANY, passing_labels=MANY), "grader.labels", 1000),
        (judge_of(labels=["a"], passing_labels=["a"] * 1001), "grader.passing_labels", 1000),
        (
            judge_of(labels=["a"], passing_labels=["a"])
            | {"input": [{"role": "user", "content": "a"}] * 101},
            "grader.input",
            100,
        ),
        (
            judge_of(labels=["a"], passing_labels=["a"])
            | {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 101}]},
            "grader.input[0].content",
            100,
        ),
        (
            {
                "type": "endpoint",
                "name": "e",
                "url": "https://a.b/c",
                "headers": {f"a{n}": "b" for n in range(51)},
            },
            "grader.headers",
            50,
        ),
        (
            {
                "type": "multi",
                "name": "m",
                "graders": {f"a{n}": {} for n in range(101)},
                "calculate_output": "a1",
            },
            "grader.graders",
            100,
        ),
    ],
)
def test_every_list_has_a_maximum_which_the_error_names(raw: dict[str, Any], param: str, most: int) -> None:
    with pytest.raises(InvalidGrader) as caught:
        parse_grader(raw)

    assert caught.value.param == param
    assert f"at most {most}" in caught.value.message


def test_labels_are_looked_up_and_not_searched(counting: Any) -> None:
    """As many comparisons as there are labels, and not their square."""
    labels = [counting(str(number)) for number in range(1000)]
    parse_grader(judge_of(labels=labels, passing_labels=labels[::-1]))

    assert counting.comparisons < 10_000


@pytest.fixture
def counting() -> Any:
    class Counting(str):
        comparisons = 0

        def __eq__(self, other: object) -> bool:
            Counting.comparisons += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    return Counting


def test_the_references_of_all_templates_of_a_grader_are_bounded() -> None:
    """Each template may have a thousand, a judge's message a hundred templates, and a judge a hundred messages."""
    parts = [{"type": "input_text", "text": "{{item.a}}" * 900} for _ in range(MAX_REFERENCES // 900 + 1)]
    judge = {"type": "score_model", "name": "j", "model": "m", "input": [{"role": "user", "content": parts}]}

    assert "at most 20000 references" in refused(judge).message


@pytest.mark.parametrize(
    "grader",
    [
        EXACT | {f"k{number}": 1 for number in range(1000)},
        {"type": "score_model", "name": "j", "model": "m", "input": [{"role": "user", "content": [{}] * 100}] * 100},
        {"type": "score_model", "name": "j", "model": "m", "input": [{"role": "user"}] * 100},
        {
            "type": "score_model", "name": "j", "model": "m",
            "input": [{"role": "user", "content": [{"type": "input_text"}] * 100}] * 100,
        },
    ],
    ids=["unknown keys", "parts", "messages", "texts"],
)  # fmt: skip
def test_a_grader_with_thousands_of_mistakes_is_refused_for_the_first(
    grader: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each complaint of pydantic takes a kilobyte and some microseconds, in the event loop of the API."""
    counts = []
    first_of = complaints.first_of

    def counted(all_of_them: Any, *more: Any) -> tuple[str, list[Mapping[str, Any]]]:
        counts.append(len(all_of_them))
        return first_of(all_of_them, *more)

    monkeypatch.setattr(complaints, "first_of", counted)

    refused(grader)

    assert counts[0] <= 2


def test_the_first_unknown_field_is_named() -> None:
    assert refused(EXACT | {"first": 1, "second": 2}).param == "grader.first"
