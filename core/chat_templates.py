"""Chat templates for models without one: Jinja text by name, by path or inline.

transformers renders a template in Jinja's sandbox (Python attributes are unreachable). Only the operator supplies
Jinja text, in the model registry; a job selects one of NAMES, and gives r1_zero the words of its prompt.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Literal, get_args

Name = Literal["plain", "r1_zero"]
NAMES: tuple[Name, ...] = get_args(Name)
MAX_CHARACTERS = 64 * 1024
Arguments = Mapping[str, bool | int | float | str]
# The function of templates that returns the present time. As an argument of a template it is a fixed time.
CLOCK = "strftime_now"
_DIRECTIVES = "aAbBcdeHIjklmMpSuUVwWxXyYZzfFDGTn%"

# A conversation as plain text:
#
#     Be brief.
#
#     User: What is 6 x 7?
#     Assistant: 42
#     User: And 6 x 8?
#     Assistant:
#
# No trailing space: the first token of an answer usually starts with one.
_TURNS = """\
{%- for message in messages -%}
{%- if message.role == "system" -%}{{ message.content }}

{% elif message.role == "user" -%}User: {{ message.content }}
{% else -%}Assistant: {{ message.content }}{{ eos_token or "" }}
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}Assistant:{%- endif -%}"""

_PLAIN = "{{- bos_token or '' -}}\n" + _TURNS

# The setup of R1-Zero (arXiv 2501.12948, table 1) in our own words: reason first, then answer, each in its tags. With
# the argument `prompt` a job gives another text, such as that of the paper, in which "{prompt}" is the question.
_R1_ZERO = (
    """\
{{- bos_token or '' -}}
{%- if prompt is defined -%}
{%- if "{prompt}" not in prompt -%}
{{- raise_exception("chat_template_kwargs.prompt has no {prompt}, which stands for the question") -}}
{%- endif -%}
{%- if messages | map(attribute="role") | join(" ") not in ("user", "user assistant") -%}
{{- raise_exception("chat_template_kwargs.prompt has room for one question: a row may have one user message only") -}}
{%- endif -%}
{{- prompt | replace("{prompt}", messages[0].content) -}}
{%- for message in messages[1:] -%}{{- " " + message.content + (eos_token or "") -}}{%- endfor -%}
{%- else -%}
"""
    "{{- 'The user asks and the assistant solves. The assistant first reasons step by step between <think> and "
    "</think>, and then gives the user the final answer between <answer> and </answer>.\\n\\n' -}}\n"
    + _TURNS
    + "{%- endif -%}"
)

_TEXTS: dict[str, str] = {"plain": _PLAIN, "r1_zero": _R1_ZERO}


# The arguments that each reads, besides CLOCK.
_ARGUMENTS: dict[str, frozenset[str]] = {"plain": frozenset(), "r1_zero": frozenset({"prompt"})}


def check_arguments(name: str, arguments: Arguments) -> None:
    """Raise ValueError if a template of NAMES does not read an argument, or cannot use its value."""
    unread = sorted(arguments.keys() - _ARGUMENTS[name] - {CLOCK})
    if unread:
        known = ", ".join(map(repr, sorted({*_ARGUMENTS[name], CLOCK})))
        raise ValueError(f"the chat template {name!r} has no argument {unread[0]!r}; it has {known}")
    if "{prompt}" not in str(arguments.get("prompt", "{prompt}")):
        raise ValueError("'prompt' has no {prompt}, which stands for the question")


def text_of(template: str, folder: Path = Path()) -> str:
    """The Jinja text of a template given by name, as text, or as a path (relative to `folder`).

    Raises:
        ValueError: none of these, or too long.
    """
    if template in _TEXTS:
        return _TEXTS[template]
    if "{{" not in template and "{%" not in template:
        path = folder / template
        if not path.is_file():
            names = ", ".join(map(repr, NAMES))
            raise ValueError(
                f"chat_template is {names}, a path to a Jinja file, or Jinja text; there is no file {path}"
            )
        template = path.read_text()
    if len(template) > MAX_CHARACTERS:
        raise ValueError(
            f"chat_template has {len(template)} characters; at most {MAX_CHARACTERS} are allowed"
        )
    return template


def reads_clock(template: str) -> bool:
    """Whether prompts may depend on the time at which they are rendered. In Jinja's sandbox no other name gives it."""
    return CLOCK in template


def with_defaults(template: str, arguments: Arguments) -> str:
    """The template with other defaults of its arguments, so that every renderer uses them.

    Raises:
        ValueError: CLOCK is no date in ISO 8601.
    """
    if not arguments:
        return template
    set_ = "".join(_default(name, value) for name, value in sorted(arguments.items()))
    # trim_blocks, which transformers sets, removes this line end; `-%}` would also remove white space of the template.
    return f"{set_.removesuffix('-%}')}%}}\n{template}"


def _default(name: str, value: bool | int | float | str) -> str:
    if name == CLOCK:
        return _clock(datetime.fromisoformat(str(value)))
    # JSON's true, false, numbers and strings are Jinja's.
    return f"{{%- if {name} is not defined -%}}{{%- set {name} = {json.dumps(value)} -%}}{{%- endif -%}}"


def _clock(time: datetime) -> str:
    """A macro in place of the function, so that engines and exported models render the same without code of ours."""
    directives = [f"%{flag}{letter}" for flag in ("", "-") for letter in _DIRECTIVES]
    replaced = "".join(f"|replace({json.dumps(one)},{json.dumps(time.strftime(one))})" for one in directives)
    return f"{{%- macro {CLOCK}(format) -%}}{{{{- format{replaced} -}}}}{{%- endmacro -%}}"
