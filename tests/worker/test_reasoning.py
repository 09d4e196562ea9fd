"""Answers with a thought: their formats are found by rendering, and their parts by the tokens."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from core import chat_templates
from core.reasoning import Format, Switches
from tests.present import present
from tests.thinking import DISTILL, FAMILIES, HYBRID, thinking_tokenizer
from tests.tiny import TEMPLATE
from worker.model import reasoning
from worker.model.reasoning import Effort, detect, split_text


def found(template: str | None) -> reasoning.Reasoning | None:
    return detect(thinking_tokenizer(template))


def split(template: str, answer: str, **options: Any) -> reasoning.Split:
    tokenizer = thinking_tokenizer(template)
    return present(detect(tokenizer)).split(tokenizer.encode(answer), **options)


THINK = ("<think>", "</think>", "</think>")
HARMONY = (
    "<|channel|>analysis<|message|>",
    "<|channel|>final<|message|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
)
GEMMA = ("<|channel>thought", "<channel|>", "<channel|>")


@pytest.mark.parametrize(
    ("family", "tags", "opened"),
    [
        ("hybrid", THINK, False),
        ("opened", THINK, True),
        ("distill", THINK, True),
        ("kept", THINK, False),
        ("lfm", THINK, False),
        ("harmony", HARMONY, True),
        ("gemma", GEMMA, False),
    ],
)
def test_the_tags_of_a_family_are_found_by_rendering(
    family: str, tags: tuple[str, str, str], opened: bool
) -> None:
    assert present(found(FAMILIES[family])).form == Format(*tags, opened)


@pytest.mark.parametrize("template", [TEMPLATE, None, *map(chat_templates.text_of, chat_templates.NAMES)])
def test_a_template_without_thoughts_has_no_format(template: str | None) -> None:
    """r1_zero asks for tags, which its graders reward: they are part of the output."""
    assert found(template) is None


@pytest.mark.parametrize(
    ("family", "toggle", "efforts"),
    [
        ("hybrid", "enable_thinking", ()),
        ("opened", "enable_thinking", ()),
        ("distill", None, ()),
        ("harmony", None, ("low", "medium", "high", "xhigh")),
        ("gemma", "enable_thinking", ()),
    ],
)
def test_switches_are_those_that_change_the_prompt(
    family: str, toggle: str | None, efforts: tuple[Any, ...]
) -> None:
    assert present(found(FAMILIES[family])).switches == Switches(toggle, efforts)


def test_a_tagged_answer_has_a_thought_and_a_text() -> None:
    parts = split(HYBRID, "<think>6*7=42</think>\n\n42<end>")

    assert (parts.thought, parts.text) == ("6*7=42", "42")
    assert parts.answer_start == parts.thought_tokens == 8
    assert not parts.is_cut


def test_an_answer_without_tags_is_all_text() -> None:
    parts = split(HYBRID, "42<end>")

    assert (parts.thought, parts.text, parts.answer_start, parts.is_cut) == ("", "42", 0, False)


def test_where_the_prompt_opened_the_thought_the_answer_begins_within_it() -> None:
    parts = split(DISTILL, "6*7=42\n</think>\n\n42<end>")

    assert (parts.thought, parts.text, parts.thought_tokens) == ("6*7=42", "42", 8)


@pytest.mark.parametrize(("template", "answer"), [(HYBRID, "<think>6*7"), (DISTILL, "6*7")])
def test_a_cut_thought_has_no_text(template: str, answer: str) -> None:
    parts = split(template, answer)

    assert (parts.thought, parts.text, parts.is_cut) == ("6*7", "", True)
    assert parts.answer_start == parts.thought_tokens == len(thinking_tokenizer(template).encode(answer))


def test_an_empty_thought_is_no_thought() -> None:
    assert split(HYBRID, "<think>\n\n</think>\n\n42").thought == ""
    assert split(DISTILL, "</think>42").text == "42"


def test_later_tags_belong_to_the_answer_and_only_leading_newlines_are_removed() -> None:
    parts = split(HYBRID, "<think>a</think>\n\n  b \n<tag> c\n")

    assert parts.text == "  b \n<tag> c\n"


def test_the_channels_of_an_answer_are_a_thought_and_a_text() -> None:
    answer = (
        "<|channel|>analysis<|message|>6*7=42<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>"
    )
    parts = split(FAMILIES["harmony"], answer)

    assert (parts.thought, parts.text) == ("6*7=42", "42")


def test_a_final_channel_alone_is_an_answer_without_a_thought() -> None:
    parts = split(FAMILIES["harmony"], "<|channel|>final<|message|>42<|return|>")

    assert (parts.thought, parts.text, parts.is_cut) == ("", "42", False)


def test_a_cut_analysis_is_a_cut_thought() -> None:
    parts = split(FAMILIES["harmony"], "<|channel|>analysis<|message|>6*7")

    assert (parts.thought, parts.text, parts.is_cut) == ("6*7", "", True)


@pytest.mark.parametrize("answer", ["<think>abc</think>4", "<think>ab>c</think>4 <think>"])
def test_tags_that_are_not_single_tokens_are_found_in_the_text(answer: str) -> None:
    tokenizer = thinking_tokenizer(HYBRID, special=False)
    parts = present(detect(tokenizer)).split(tokenizer.encode(answer))

    assert parts.text == answer.partition("</think>")[2]
    assert parts.thought == answer.partition("</think>")[0].removeprefix("<think>")


def test_the_tokens_that_a_spent_budget_forced_are_counted() -> None:
    """A thought that its budget closed is as long as the budget; one that ended earlier was closed by the model."""
    assert split(HYBRID, "<think>abc</think>4", budget=3).forced == 1
    assert split(HYBRID, "<think>ab</think>4", budget=3).forced == 0
    assert split(DISTILL, "abc</think>4", budget=3).forced == 1
    assert split(DISTILL, "abc</think>4").forced == 0


@pytest.mark.parametrize(
    ("family", "effort", "arguments", "budget"),
    [
        ("hybrid", "default", {}, None),
        ("hybrid", "none", {"enable_thinking": False}, None),
        ("hybrid", "low", {"enable_thinking": True}, 250),
        ("hybrid", "medium", {"enable_thinking": True}, 500),
        ("hybrid", "high", {"enable_thinking": True}, None),
        ("distill", "low", {}, 250),
        ("distill", "none", {}, 0),
        ("harmony", "low", {"reasoning_effort": "low"}, None),
        ("harmony", "none", {"reasoning_effort": "low"}, None),
        ("harmony", "minimal", {"reasoning_effort": "low"}, None),
    ],
)
def test_an_effort_is_the_models_own_switch_or_a_budget(
    family: str, effort: Effort, arguments: dict[str, Any], budget: int | None
) -> None:
    assert reasoning.plan_effort(present(found(FAMILIES[family])), effort, 1000) == reasoning.EffortPlan(
        arguments, budget
    )


def test_arguments_become_defaults_of_the_template() -> None:
    template = chat_templates.with_defaults(HYBRID, {"enable_thinking": False, "name": 'a "b"'})
    tokenizer = thinking_tokenizer(template)
    chat = [{"role": "user", "content": "a"}]

    def prompt(**arguments: Any) -> Any:
        return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **arguments)

    assert prompt().endswith("<think>\n\n</think>\n\n")
    assert prompt(enable_thinking=True) == thinking_tokenizer(HYBRID).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )


def test_behind_a_closed_thought_all_is_answer() -> None:
    """Thinking is switched off, so a schema applies from the first token."""
    template = chat_templates.with_defaults(HYBRID, {"enable_thinking": False})

    assert present(found(template)).form.off
    assert present(found(template)).switches.toggle == "enable_thinking"
    assert split(template, "42<end>").text == "42"
    assert not split(template, "<think>a").is_cut


@pytest.mark.parametrize(
    ("template", "answer", "thought", "text"),
    [
        (HYBRID, "<think>\nab c\n</think>\n\n42", "ab c", "42"),
        (HYBRID, "<think>a < b </ c</think>4<2", "a < b </ c", "4<2"),
        (HYBRID, "42", "", "42"),
        (HYBRID, "  42", "", "  42"),
        (HYBRID, "<th", "", "<th"),
        (DISTILL, "ab\n</think>\n42", "ab", "42"),
        (DISTILL, "</think>42", "", "42"),
        (DISTILL, "ab c", "ab c", ""),
    ],
)
def test_a_text_is_divided_whole_and_as_it_grows(template: str, answer: str, thought: str, text: str) -> None:
    form = present(detect(thinking_tokenizer(template))).form

    whole = split_text(form, answer, is_whole=True)
    assert (whole.thought, whole.answer) == (thought, text)
    grown = [split_text(form, answer[:length], is_whole=False) for length in range(len(answer) + 1)]
    for earlier, later in pairwise([*grown, whole]):
        assert later.thought.startswith(earlier.thought)
        assert later.answer.startswith(earlier.answer)
    assert grown[-1].answer + grown[-1].pending == text


def test_without_thoughts_all_is_the_answer() -> None:
    for form in (None, replace(present(detect(thinking_tokenizer(HYBRID))).form, off=True)):
        assert split_text(form, "<think>a</think>b", is_whole=False).answer == "<think>a</think>b"
