"""The format in which a model writes calls of functions: vLLM's name for it, by registry entry or chat template.

No torch and no transformers: the API refuses tools of a model whose format is unknown.
"""

from collections.abc import Mapping

# vLLM's parsers of calls, by texts in chat templates; the first that fits.
# GLM since 4.5 writes <tool_call>name<arg_key>...</arg_key>: this service does not read it.
_MARKS = (
    ("<arg_key>", None),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
)
# Those that this service parses itself (worker/model/tool_calls.py), which training and the transformers engine need.
PARSED = tuple(name for _, name in _MARKS if name is not None)


NO_FORMAT = "an answer that a response_format constrains cannot have calls; leave out the one or the other."


def known_tool_parser(template: object) -> str | None:
    """vLLM's parser of the calls that a model writes, by its chat template. None: unknown, or it has no tools."""
    template = template_for_tools(template)
    if not isinstance(template, str) or "tools" not in template:
        return None
    return next((name for mark, name in _MARKS if mark in template), None)


def tool_parser_of(registered: str | None, template: object) -> str | None:
    """`tool_parser` of the model's registry entry, or that of its chat template."""
    return registered or known_tool_parser(template)


def template_for_tools(template: object) -> object:
    """The chat template of prompts with tools, where a tokenizer has several by name, as transformers chooses it."""
    if not isinstance(template, Mapping):
        return template
    return template.get("tool_use", template.get("default"))
