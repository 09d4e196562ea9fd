import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graders import template
from graders.template import (
    MAX_KEPT,
    MAX_REFERENCE,
    MAX_REFERENCES,
    MAX_RENDERED,
    MissingPath,
    RenderedTooLarge,
    SampleNotJson,
    Template,
    TemplateSyntaxError,
    dotted,
    resolve,
)
from graders.types import ErrorKind, Sample

ROW = {
    "answer": "42",
    "tags": ["a", {"b": "c"}],
    "n": 3,
    "half": 0.5,
    "ok": True,
    "none": None,
    "größe-1": "L",
}


HI = Sample("hi")


def render(text: str, sample: Sample = HI, row: dict[str, Any] = ROW) -> str:
    return Template.parse(text).render(sample, row)


def syntax_error(text: str) -> TemplateSyntaxError:
    with pytest.raises(TemplateSyntaxError) as caught:
        Template.parse(text)
    return caught.value


def test_text_without_references_renders_as_itself() -> None:
    assert render("no { braces } to }} speak of") == "no { braces } to }} speak of"


def test_a_reference_is_replaced_and_the_text_around_it_kept() -> None:
    assert render("<{{item.answer}}|{{sample.output_text}}>") == "<42|hi>"


def test_spaces_inside_the_braces_do_not_matter() -> None:
    assert render("{{  item.answer\t}}") == "42"


def test_paths_reach_into_objects_and_arrays() -> None:
    assert render("{{item.tags[1].b}}") == "c"


def test_keys_may_hold_hyphens_and_letters_of_any_language() -> None:
    assert render("{{item.größe-1}}") == "L"


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("{{item.n}}", "3"),
        ("{{item.half}}", "0.5"),
        ("{{item.ok}}", "true"),
        ("{{item.none}}", "null"),
        ("{{item.tags}}", '["a",{"b":"c"}]'),
    ],
)
def test_values_that_are_not_strings_become_compact_json(text: str, rendered: str) -> None:
    assert render(text) == rendered


def test_json_keeps_letters_of_every_language_readable() -> None:
    assert render("{{item.words}}", row={"words": ["żółw"]}) == '["żółw"]'


def test_a_namespace_alone_is_the_whole_row() -> None:
    assert json.loads(render("{{item}}")) == ROW


def test_a_reference_may_stand_inside_json_braces() -> None:
    assert render('{"a":{{item.n}}}') == '{"a":3}'


def test_rendered_values_are_not_rendered_again() -> None:
    assert render("{{sample.output_text}}", Sample("{{item.answer}}")) == "{{item.answer}}"


def test_every_field_of_the_sample_can_be_named() -> None:
    tool = {"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    sample = Sample("hi", output_tools=(tool,), finish_reason="length")

    assert render("{{sample.choices[0].message.content}}", sample) == "hi"
    assert render("{{sample.choices[0].finish_reason}}", sample) == "length"
    assert render("{{sample.output_tools[0].function.name}}", sample) == "f"
    assert render("{{sample.output_reasoning_summary}}", sample) == "null"


def test_output_json_is_reached_by_path() -> None:
    sample = Sample.from_text('{"a": {"b": [1, 2]}}', parse_json=True)

    assert render("{{sample.output_json.a.b[1]}} {{sample.output_json.a}}", sample) == '2 {"b":[1,2]}'


@pytest.mark.parametrize("text", ["{{sample.output_json}}", "{{sample.output_json.a}}"])
def test_reading_json_from_an_output_that_is_not_json_is_its_own_failure(text: str) -> None:
    with pytest.raises(SampleNotJson) as caught:
        render(text, Sample.from_text("not json", parse_json=True))

    assert caught.value.kind is ErrorKind.sample_parse_error


@pytest.mark.parametrize(
    "path",
    [
        "item.nope",
        "item.answer.deeper",
        "item.tags[2]",
        "item.tags.b",
        "item.n[0]",
        "item[0]",
        "item.answer[0]",
    ],
)
def test_a_path_that_leads_nowhere_is_named_in_full(path: str) -> None:
    with pytest.raises(MissingPath) as caught:
        render(f"{{{{{path}}}}}")

    assert caught.value.path == path
    assert caught.value.kind is ErrorKind.invalid_variable_error


def test_a_path_missing_from_the_sample_is_named_with_its_namespace() -> None:
    with pytest.raises(MissingPath, match=r"sample\.output_tools\[0\]\.id is missing"):
        render("{{sample.output_tools[0].id}}")


def test_a_missing_key_of_output_json_is_a_missing_path_and_not_a_parse_error() -> None:
    with pytest.raises(MissingPath, match=r"sample\.output_json\.b"):
        render("{{sample.output_json.b}}", Sample("{}", output_json={"a": 1}))


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("ab {{item.a", 3),
        ("{{}}", 2),
        ("{{ foo.a }}", 3),
        ("{{items.a}}", 2),
        ("{{item.}}", 6),
        ("{{item..a}}", 6),
        ("{{item.a b}}", 9),
        ("{{item.a | upper}}", 9),
        ("{{item.a()}}", 8),
        ("{{item[-1]}}", 6),
        ("{{item['a']}}", 6),
        ("{{1 + 1}}", 2),
        ("{{sample.output_txt}}", 2),
        ("{{{item.a}}}", 2),
    ],
)
def test_a_mistake_is_refused_with_its_position(text: str, position: int) -> None:
    assert syntax_error(text).position == position


def test_an_unknown_namespace_is_named() -> None:
    assert "unknown namespace 'foo'" in str(syntax_error("{{foo.a}}"))


def test_a_field_that_no_sample_has_is_refused_before_any_sample_is_seen() -> None:
    assert "sample has no 'output_txt'" in str(syntax_error("{{sample.output_txt}}"))


def test_item_paths_lists_what_is_read_from_the_row_once_each() -> None:
    template = Template.parse("{{item.b[0]}} {{sample.output_text}} {{item.a.c}} {{item.b[0]}}")

    assert template.item_paths == (("b", 0), ("a", "c"))


def test_resolve_finds_a_null_and_does_not_call_it_missing() -> None:
    assert resolve({"a": None}, ("a",)) is None


def test_dotted_spells_a_path_as_the_template_does() -> None:
    assert dotted("item", ("a", 0, "b")) == "item.a[0].b"


@given(st.text(alphabet="{}item.sapleoutx_[]0 |", max_size=30))
def test_any_text_is_either_a_template_or_a_syntax_error_within_it(text: str) -> None:
    try:
        Template.parse(text)
    except TemplateSyntaxError as error:
        assert 0 <= error.position <= len(text)


@given(st.text())
def test_a_string_is_inserted_unchanged(value: Any) -> None:
    assert render("[{{item.x}}]", row={"x": value}) == f"[{value}]"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False), st.lists, max_leaves=8
    )
)
def test_what_is_rendered_as_json_reads_back_as_the_same_value(value: Any) -> None:
    assert json.loads(render("{{item.x}}", row={"x": value})) == value


def test_a_rendered_text_has_a_size_limit_which_is_kept_while_it_is_built() -> None:
    """3 kB of template over a row of 1 MB would be 300 MB."""
    row = {"a": "x" * 1_000_000}

    assert len(Template.parse("{{item.a}}" * 2).render(Sample(""), row)) == MAX_RENDERED
    with pytest.raises(RenderedTooLarge, match="more than 2000000 characters"):
        Template.parse("{{item.a}}" * 300).render(Sample(""), row)
    with pytest.raises(RenderedTooLarge):
        Template.parse("{{item}}" * 300).render(Sample(""), row)


@pytest.mark.parametrize(
    "text", ["{{item}}" * (MAX_REFERENCES + 1), "{{item" + ".a" * MAX_REFERENCE + "}}"], ids=["many", "long"]
)
def test_a_template_that_takes_long_to_parse_is_refused(text: str) -> None:
    with pytest.raises(TemplateSyntaxError, match=r"at most 1000 (references|characters)"):
        Template.parse(text)


def test_references_up_to_the_limit_are_parsed() -> None:
    assert Template.parse("{{item.n}}" * MAX_REFERENCES).render(HI, ROW) == "3" * MAX_REFERENCES


def test_large_templates_are_not_kept_in_memory() -> None:
    before = template.parse_and_keep.cache_info().misses

    Template.parse("x" * (MAX_KEPT + 1))
    assert template.parse_and_keep.cache_info().misses == before

    Template.parse("y" * MAX_KEPT)
    assert template.parse_and_keep.cache_info().misses == before + 1
