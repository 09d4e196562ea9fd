"""Find what a chat template leaves out of tools, their calls and their results, by rendering a conversation."""

from collections.abc import Callable
from typing import Any

# (messages, tools, with a generation prompt) -> the text of the conversation
RenderChat = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, bool], str]

# Parts of the conversation, as core/template_messages.py passes it to templates. None looks for these words.
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "tool7q",
        "description": "Tool7Q",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
_SYSTEM = {"role": "system", "content": "System7Q"}
_USER = {"role": "user", "content": "Question7Q"}
_PLACES = ("Place7Q1", "Place7Q2")  # arguments of the first and of the second call
# [call][line]: as long as the page of a search
_RESULTS = [[f"Result7Q{number} line {line:03}" for line in range(200)] for number in (1, 2)]


def lost_of_tools(render: RenderChat) -> list[str]:
    """Find what prompts lack: of "tools", "calls" and "results".

    A template that rejects the conversation loses nothing: rows and requests with tools are refused in its own words.
    """

    def rendered(*messages: dict[str, Any], tools: list[dict[str, Any]] | None) -> str | None:
        for first in ((), (_SYSTEM,)):  # some templates require it
            try:
                return render([*first, *messages], tools, True)
            except Exception:  # a template is a program
                continue
        return None

    plain, asked = rendered(_USER, tools=None), rendered(_USER, tools=[_TOOL])
    if asked in (None, plain):
        return [] if plain is None else ["tools", "calls", "results"]
    steps = [message for number in (0, 1) for message in _step(number)]
    answered = rendered(_USER, *steps, tools=[_TOOL])
    if answered is None:
        return []
    is_kept = {
        "calls": all(place in answered for place in _PLACES),
        "results": all(line in answered for lines in _RESULTS for line in lines),
    }
    return [name for name, kept in is_kept.items() if not kept]


def _step(number: int) -> list[dict[str, Any]]:
    """A call and its result."""
    call_id = f"call7q12{number}"  # 9 letters and digits, as Mistral's templates require
    function = {"name": "tool7q", "arguments": {"place": _PLACES[number]}}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "\n".join(_RESULTS[number])},
    ]
