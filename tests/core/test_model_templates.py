"""The chat template of a model as the API reads it: what it finds is what transformers renders."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core import chat_templates
from core.errors import NotReady
from core.fingerprint import conversion_of
from core.model_checks import ModelChecks
from core.model_templates import CHAT_TEMPLATE, files_of, is_reasoning, reasons, tools_problem
from core.registry import BaseModelEntry
from core.template_process import renderer
from tests.api.test_models import check_of
from tests.present import present
from tests.thinking import FAMILIES, HYBRID, OPENED, make_thinking_model, thinking_tokenizer
from worker.model.reasoning import detect

ROOT = Path(__file__).parents[2]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho", "reasoning_content": "Hm"}]
OFF = OPENED.replace("{{ '<think>\\n' }}", "{{ '<think>\\n</think>\\n' }}")  # the prompt closes the thought
DIALECT = (
    "{%- for m in messages if m.role == 'user' -%}{%- generation -%}{{ m.content }}{%- endgeneration -%}{%- break -%}"
    "{%- endfor -%}{{ eos_token }}{{ {'x': '<ü>'} | tojson }}{{ strftime_now('%Y') | length }}"
)


@pytest.fixture
def entry(tmp_path: Path) -> Callable[..., BaseModelEntry]:
    """The entry of a model with these files."""

    def entry(files: dict[str, Any], **fields: Any) -> BaseModelEntry:
        folder = tmp_path / "model"
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return BaseModelEntry(path=folder, **fields)

    return entry


TEMPLATES = FAMILIES | {name: chat_templates.text_of(name) for name in chat_templates.NAMES}


@pytest.mark.parametrize("template", [*TEMPLATES.values(), OFF, DIALECT], ids=[*TEMPLATES, "off", "dialect"])
@pytest.mark.slow
def test_it_finds_what_the_worker_finds(
    entry: Callable[..., BaseModelEntry], tmp_path: Path, template: str
) -> None:
    worker = detect(thinking_tokenizer(template))

    found = reasons(entry({"chat_template.jinja": template}), tmp_path)

    assert found is (worker is not None and not worker.form.off)


@pytest.mark.parametrize("template", [*TEMPLATES.values(), DIALECT], ids=[*TEMPLATES, "dialect"])
def test_it_renders_as_transformers_does(template: str) -> None:
    tokenizer = thinking_tokenizer(template)

    ours = renderer(template, tokenizer.special_tokens_map)(CHAT[1])

    chat = [{"role": "user", "content": "Question7Q"}, CHAT[1]]
    assert ours == tokenizer.apply_chat_template(chat, tokenize=False)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": HYBRID}}, True),
        ({"tokenizer_config.json": {"chat_template": [{"name": "default", "template": HYBRID}]}}, True),
        (
            {"tokenizer_config.json": {"chat_template": HYBRID}, "chat_template.jinja": "{{ messages }}"},
            False,
        ),
        ({"tokenizer_config.json": {}}, False),
        ({"tokenizer_config.json": "damaged"}, False),
        ({"chat_template.jinja": "{% broken"}, False),
        ({"chat_template.jinja": "{{ 1 / 0 }}"}, False),
    ],
)
def test_where_the_template_stands(
    entry: Callable[..., BaseModelEntry], tmp_path: Path, files: dict[str, Any], expected: bool
) -> None:
    assert reasons(entry(files), tmp_path) is expected


def test_the_template_of_the_entry_and_of_the_job_come_first(
    entry: Callable[..., BaseModelEntry], tmp_path: Path
) -> None:
    thinks = entry({"chat_template.jinja": HYBRID})

    assert not reasons(thinks.model_copy(update={"chat_template": "plain"}), tmp_path)
    assert not reasons(thinks, tmp_path, "r1_zero")
    assert reasons(BaseModelEntry(hub="some/model", chat_template=HYBRID), tmp_path)


def test_a_model_of_the_hub_is_read_where_the_hub_stores_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "chat_template.jinja").write_text(HYBRID)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")

    assert reasons(BaseModelEntry(hub="some/model"), tmp_path)
    assert reasons(BaseModelEntry(hub="other/model"), tmp_path) is None


@pytest.mark.slow
def test_a_gguf_file_is_read_where_the_worker_has_converted_it(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    entry = BaseModelEntry(path=file)
    assert reasons(entry, tmp_path) is None

    make_thinking_model(conversion_of(file, tmp_path))

    assert reasons(entry, tmp_path)
    file.write_bytes(b"GGUV")  # another model of the same size
    assert reasons(entry, tmp_path) is None


@pytest.mark.parametrize("recorded", [True, False, None])
def test_without_the_files_a_worker_has_said_it(tmp_path: Path, recorded: bool | None) -> None:
    entry = BaseModelEntry(hub="some/absent-model")
    assert not is_reasoning(entry, tmp_path)

    found: dict[str, Any] = {
        "forward": "rows",
        "decode": None,
        "largest_difference": 1e-6,
        "adapted_modules": 1,
        "adapted_share": 0.5,
        "adapted_by_kind": {},
        "checked_at": 1,
        "versions": {},
    }
    ModelChecks(tmp_path).keep(check_of(entry, found, key="a", reasons=recorded))

    assert is_reasoning(entry, tmp_path) is bool(recorded)


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 9 ** 9 ** 10 }}",
        "{{ 'a' * 10 ** 10 }}",
    ],
    ids=["loops", "a power", "memory"],
)
def test_a_template_that_does_not_end_counts_as_one_without_thoughts(
    entry: Callable[..., BaseModelEntry], tmp_path: Path, template: str
) -> None:
    assert reasons(entry({"chat_template.jinja": template}), tmp_path) is False


@pytest.mark.slow
def test_tools_are_not_refused_because_a_template_takes_too_long() -> None:
    """Its renderings fail by themselves, or take as long."""
    template = "{{ tools }}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

    assert tools_problem("m", "hermes", template) is None


def test_a_check_that_could_not_run_is_not_kept_as_a_result(
    entry: Callable[..., BaseModelEntry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that was busy or short of memory a reasoning model counted as one without thoughts for good."""
    model = entry({"chat_template.jinja": HYBRID + "{# tried twice #}"})
    with monkeypatch.context() as machine:
        machine.setenv("PYTHONHOME", str(tmp_path))  # no Python starts with it
        with pytest.raises(NotReady, match="interrupted"):
            reasons(model, tmp_path)

    assert reasons(model, tmp_path) is True


@pytest.mark.parametrize(
    "config", [[], 3, {"chat_template": [{}]}, {"chat_template": ["x"]}, {"chat_template": {"a": 1}}], ids=str
)
def test_a_malformed_file_has_no_template(
    entry: Callable[..., BaseModelEntry], tmp_path: Path, config: object
) -> None:
    assert reasons(entry({"tokenizer_config.json": config}), tmp_path) is False


@pytest.mark.parametrize("in_config", [True, False])
def test_a_model_may_have_another_template_for_prompts_with_tools(
    entry: Callable[..., BaseModelEntry], tmp_path: Path, in_config: bool
) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    model = entry({"tokenizer_config.json": {"chat_template": named}} if in_config else {CHAT_TEMPLATE: "a"})
    if not in_config:
        (tmp_path / "model" / "additional_chat_templates").mkdir()
        (tmp_path / "model" / "additional_chat_templates" / "tool_use.jinja").write_text("b")

    files = present(files_of(model, tmp_path))

    assert (files.template, files.template_for_tools) == ("a", "b")
    plain = present(files_of(model, tmp_path, "plain"))
    assert plain.template_for_tools == plain.template


def test_the_process_that_renders_a_template_imports_little() -> None:
    """One is started for each question about a model's template."""
    code = "import sys, core.prompt_tokens, core.template_process; print({'pydantic', 'sqlalchemy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout == "set()\n"
