from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import SecurityError, TemplateError
from pydantic import ValidationError

from core import chat_templates
from core.jobs.hyperparameters import Hyperparameters, resolve
from core.registry import BaseModelEntry, Registry
from core.results.lineage import Parent
from tests.hyperparameters import in_groups
from tests.tiny import tiny_tokenizer
from worker.model.parent import continuing
from worker.model.policy import render

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 6 x 7?"},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "And 6 x 8?"},
]


def rendered(template: str, messages: list[dict[str, str]] = CHAT) -> Any:
    tokenizer = tiny_tokenizer(chat_template=chat_templates.text_of(template))
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def test_plain_is_a_conversation_in_plain_text() -> None:
    assert rendered("plain") == (
        "Be brief.\n\nUser: What is 6 x 7?\nAssistant: 42<end>\nUser: And 6 x 8?\nAssistant:"
    )


def test_r1_zero_asks_for_reasoning_and_an_answer_in_tags() -> None:
    text = rendered("r1_zero", CHAT[1:2])

    assert "</think>" in text and "</answer>" in text
    assert text.endswith("\n\nUser: What is 6 x 7?\nAssistant:")


WORDS = "Think, then answer. {% raw %} User: {prompt}. Assistant:"


def with_words(messages: list[dict[str, str]], words: str = WORDS) -> Any:
    """As a job with `chat_template_kwargs` renders them."""
    template = chat_templates.with_defaults(chat_templates.text_of("r1_zero"), {"prompt": words})
    return tiny_tokenizer(chat_template=template).apply_chat_template(messages, tokenize=False)


def test_r1_zero_takes_the_words_of_the_prompt_from_the_job() -> None:
    question = CHAT[1:2]

    assert with_words(question) == "Think, then answer. {% raw %} User: What is 6 x 7?. Assistant:"
    assert with_words(CHAT[1:3]) == with_words(question) + " 42<end>"


@pytest.mark.parametrize(
    ("messages", "words", "says"),
    [
        (CHAT[1:2], "Think, then answer.", "has no {prompt}"),
        (CHAT[:2], WORDS, "one user message only"),
        (CHAT, WORDS, "one user message only"),
    ],
)
def test_a_conversation_that_the_words_have_no_room_for_is_refused(
    messages: list[dict[str, str]], words: str, says: str
) -> None:
    with pytest.raises(TemplateError, match=says):
        with_words(messages, words)


def test_the_first_token_of_the_model_comes_first_where_it_has_one() -> None:
    tokenizer = tiny_tokenizer(chat_template=chat_templates.text_of("plain"))
    tokenizer.bos_token = "<user>"

    assert tokenizer.apply_chat_template(CHAT[1:2], tokenize=False).startswith("<user>User: What")


def test_a_template_may_be_a_file_beside_the_registry(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    file = tmp_path / "models.toml"
    file.write_text('[models.a]\nhub = "a/b"\nchat_template = "mine.jinja"\n')

    assert Registry.load(file).get("a").template_text == "{{ messages[0].content }}"


@pytest.mark.parametrize("text", ["nothing.jinja", "{{ x }}" + " " * chat_templates.MAX_CHARACTERS])
def test_what_is_no_template_is_refused_when_the_registry_is_read(tmp_path: Path, text: str) -> None:
    file = tmp_path / "models.toml"
    file.write_text(f'[models.a]\nhub = "a/b"\nchat_template = "{text}"\n')

    with pytest.raises(ValueError, match="chat_template"):
        Registry.load(file)


def test_a_job_names_one_and_brings_none_of_its_own() -> None:
    asked = Hyperparameters.model_validate({"advanced": {"sampling": {"chat_template": "r1_zero"}}})

    assert asked.advanced.sampling.chat_template == "r1_zero"
    for other in ("{{ messages }}", "/etc/passwd"):
        with pytest.raises(ValidationError, match="chat_template"):
            Hyperparameters.model_validate({"advanced": {"sampling": {"chat_template": other}}})


def test_a_job_may_choose_the_time_that_its_prompts_have() -> None:
    def asked(time: str) -> Hyperparameters:
        return Hyperparameters.model_validate(
            {"advanced": {"sampling": {"chat_template_kwargs": {"strftime_now": time}}}}
        )

    assert asked("2026-11-26").advanced.sampling.chat_template_kwargs == {"strftime_now": "2026-11-26"}
    with pytest.raises(ValidationError, match="must be a date in ISO 8601"):
        asked("soon")


@pytest.mark.parametrize(
    ("advanced", "kept"),
    [
        ({}, {"strftime_now": "2026-01-02", "thoughts": False}),
        ({"chat_template_kwargs": {"thoughts": True}}, {"strftime_now": "2026-01-02", "thoughts": True}),
        ({"chat_template_kwargs": {"strftime_now": "2027-01-01"}}, {"strftime_now": "2027-01-01"}),
        ({"chat_template": "plain"}, {}),
    ],
)
def test_a_job_that_trains_a_model_further_keeps_the_time_of_its_prompts(
    advanced: dict[str, Any], kept: dict[str, Any]
) -> None:
    """With other arguments of the template too, unless it names the time itself or renders another template."""
    shape = {"lora_rank": 4, "lora_alpha": 8, "lora_targets": "all-linear"}
    rendering = {
        "chat_template": None,
        "chat_template_kwargs": {"strftime_now": "2026-01-02", "thoughts": False},
    }
    parent = Parent("ft:tiny:x", "ftjob-1", 3, "ckpt-1", "adapter", shape | rendering)
    asked = Hyperparameters.model_validate({"advanced": in_groups(advanced)})

    resolved = continuing(resolve(asked, rows=8, parameters=1000, context=64), parent)

    assert resolved.chat_template_kwargs == kept


def test_templates_are_rendered_in_a_sandbox() -> None:
    reach_out = "{{ messages.__class__.__mro__[1].__subclasses__() }}"

    with pytest.raises(SecurityError):
        rendered(reach_out)


def test_a_model_without_a_chat_template_gets_that_of_its_entry(tmp_path: Path) -> None:
    from tests.tiny import make_tiny_model
    from worker.model.policy import load_base

    make_tiny_model(tmp_path)
    tiny_tokenizer(chat_template=None).save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    entry = BaseModelEntry(path=tmp_path, dtype="float32", context=64, chat_template="plain")

    own = load_base("a", entry, tmp_path, "cpu").tokenizer
    jobs_choice = load_base("a", entry, tmp_path, "cpu", "r1_zero").tokenizer

    assert own.chat_template == chat_templates.text_of("plain")
    assert jobs_choice.chat_template == chat_templates.text_of("r1_zero")
    assert len(render(jobs_choice, CHAT)) > len(render(own, CHAT))
