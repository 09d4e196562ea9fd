"""`python -m core.template_process`: render a chat template in a process of limited time and memory.

A template is a program, and may never end. Only what rendering needs is imported, because each question of
model_templates.py about a template starts a process.
"""

import json
import logging
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Const, Filter, Name, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from core.reasoning import QUESTION, Format, Render, find_format
from core.template_tools import lost_of_tools

log = logging.getLogger(__name__)

CPU_SECONDS, MEMORY_BYTES = 5, 1 << 30  # of rendering a template


def main() -> None:
    """Answer a question of QUESTIONS about the template on stdin, in JSON."""
    # The kernel sends SIGXCPU at the first limit and SIGKILL, as for other reasons, at the second.
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    question, template, special_tokens = json.load(sys.stdin)
    json.dump(QUESTIONS[question](template, dict(special_tokens)), sys.stdout)


def _reasons(template: str, special_tokens: Mapping[str, str]) -> bool:
    form = format_of(template, special_tokens)
    return form is not None and not form.off


def _lost_of_tools(template: str, special_tokens: Mapping[str, str]) -> list[str]:
    try:
        render = chat_renderer(template, special_tokens)
    except TemplateError:  # no prompt at all, which is refused by its own name
        return []
    return lost_of_tools(lambda messages, tools, prompt: render(messages, tools, prompt=prompt))


# Whether prompts let the model write a thought; what prompts with tools lack.
QUESTIONS: Mapping[str, Callable[[str, Mapping[str, str]], bool | list[str]]] = {
    "reasons": _reasons,
    "lost_of_tools": _lost_of_tools,
}


def format_of(template: str, special_tokens: Mapping[str, str]) -> Format | None:
    """Find the format of thoughts in a template; None: the model writes none, or the template fails.

    Only for a process of limited time and memory.
    """
    try:
        return find_format(renderer(template, special_tokens), template)
    except (TemplateError, ValueError, TypeError):
        return None  # as in worker/model/reasoning.py
    except Exception as cause:  # a template is a program
        log.warning(
            "a chat template cannot be rendered, so its model counts as one without thoughts: %s", cause
        )
        return None


def renderer(template: str, special_tokens: Mapping[str, str]) -> Render:
    """Render conversations that begin with a question of ours."""
    render_chat = chat_renderer(template, special_tokens)

    def render(*messages: dict[str, str], prompt: bool = False, **arguments: Any) -> str:
        return render_chat([{"role": "user", "content": QUESTION}, *messages], prompt=prompt, **arguments)

    return render


def chat_renderer(template: str, special_tokens: Mapping[str, str]) -> Callable[..., str]:
    """Render messages with a template in Jinja's sandbox: `render(messages, tools, prompt=True)`.

    Source: `_compile_jinja_template` of transformers/utils/chat_template_utils.py.
    """
    compiled = _jinja().from_string(template)

    def render(
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        prompt: bool = False,
        **arguments: Any,
    ) -> str:
        return compiled.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=prompt,
            **{**special_tokens, **arguments},
        )

    return render


def draws_at_random(template: str) -> bool:
    """Whether renderings of one conversation may differ by chance: by Jinja's filter `random`, or by `lipsum`."""
    try:
        parsed = _jinja().parse(template)
    except TemplateError:
        return False
    return any(
        one.name == "random" or (one.name == "map" and Const("random") in one.args)
        for one in parsed.find_all(Filter)
    ) or any(one.name == "lipsum" for one in parsed.find_all(Name))


def _jinja() -> ImmutableSandboxedEnvironment:
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    jinja.filters["tojson"] = _to_json
    jinja.globals |= {"raise_exception": _raise, "strftime_now": datetime.now().strftime}
    return jinja


class _Generation(Extension):
    """The tag around an assistant's tokens, which changes nothing of the text."""

    tags = {"generation"}  # as Jinja declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


if __name__ == "__main__":
    main()
