"""Find what a chat template leaves out where there are tools, by rendering conversations."""

from collections.abc import Callable, Collection
from typing import Any

# (messages, tools, with a generation prompt) -> the text of the conversation
RenderChat = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, bool], str]

# What prompts may lack.
TOOLS = "tools"
DEFINITIONS = "parts of the definitions"
CALLS = "calls"
RESULTS = "results"
PARALLEL = "parallel calls"  # of several in an answer, some or their results
TEXT = "text beside calls"
MESSAGES = "messages"  # which prompts without tools have
# Without these the model cannot use tools. It can without parts of definitions: one that was trained on some tools may
# know them by their names.
NEEDED = (CALLS, RESULTS)
_OF_TOOLS = (TOOLS, DEFINITIONS, *NEEDED, PARALLEL, TEXT)

# Parts of the conversation, as core/template_messages.py passes it to templates. None looks for these words.
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": f"tool7q{number}",
            "description": f"Tool7Q{number}",
            "parameters": {"type": "object", "properties": {f"place7q{number}": {"type": "string"}}},
        },
    }
    for number in (0, 1)
]
_DEFINED = [f"{word}{number}" for number in (0, 1) for word in ("tool7q", "Tool7Q", "place7q")]
# Questions and their answers, and the question that calls follow.
_ASKED: list[dict[str, Any]] = [
    {"role": "assistant" if number % 2 else "user", "content": f"Message7Q{number:02}"}
    for number in range(25)
]
_STARTS = ([{"role": "system", "content": "System7Q"}, *_ASKED], _ASKED)  # some templates reject one of them
_LINES = 200  # of a result: as long as the page of a search


def lost_of_tools(render: RenderChat) -> list[str]:
    """Find what prompts lack where there are tools.

    A template that rejects a conversation loses nothing: rows and requests with it are refused in its own words.
    """

    def rendered(*messages: dict[str, Any], tools: list[dict[str, Any]] | None = _TOOLS) -> str | None:
        try:
            return render(list(messages), tools, True)
        except Exception:  # a template is a program
            return None

    given = next((one for one in _STARTS if rendered(*one) is not None), None)
    if given is None:
        return [*_OF_TOOLS] if any(rendered(*one, tools=None) is not None for one in _STARTS) else []
    plain, asked = rendered(*given, tools=None), rendered(*given) or ""
    if asked == plain:
        return [*_OF_TOOLS]
    lost = {DEFINITIONS} if _lacks(asked, _DEFINED) else set()
    texts = [asked]
    for calls in (1, 2):  # of an answer
        for steps in (_steps(calls, "Beside7Q"), _steps(calls, "")):
            answered = rendered(*given, *steps)
            if answered is not None:
                texts.append(answered)
                lost |= _lost_of_steps(answered, asked, steps, lost)
                break
    kept = asked if plain is None else plain
    seen = [message["content"] for message in given if message["content"] in kept]
    if any(_lacks(text, seen) for text in texts):
        lost.add(MESSAGES)
    if _ASKED[1]["content"] not in kept:
        lost.discard(TEXT)  # that of all answers is lost
    return [part for part in (*_OF_TOOLS, MESSAGES) if part in lost]


def _steps(calls: int, beside: str) -> list[dict[str, Any]]:
    """Two answers with text beside their calls, and the results.

    Args:
        calls: their number in an answer.
    """
    return [message for number in (0, 1) for message in _step(number, calls, beside)]


def _step(number: int, calls: int, beside: str) -> list[dict[str, Any]]:
    """An answer with text beside its calls, and their results."""
    ids = [
        f"call7q1{number}{one}" for one in range(calls)
    ]  # 9 letters and digits, as Mistral's templates require
    asked = [
        {"name": f"tool7q{one}", "arguments": {f"place7q{one}": f"Place7Q{number}{one}"}}
        for one in range(calls)
    ]
    called = [
        {"id": call_id, "type": "function", "function": function}
        for call_id, function in zip(ids, asked, strict=True)
    ]
    return [
        {"role": "assistant", "content": beside and f"{beside}{number}", "tool_calls": called},
        *({"role": "tool", "tool_call_id": call_id, "content": _result(call_id)} for call_id in ids),
    ]


def _result(call_id: str) -> str:
    return "\n".join(f"Result {call_id} line {line:03}" for line in range(_LINES))


def _lost_of_steps(text: str, before: str, steps: list[dict[str, Any]], lost: Collection[str]) -> set[str]:
    """Name what a text lacks of steps.

    Args:
        before: the text without them.
        lost: what it lacks where an answer has one call.
    """
    calls = [call["function"] for message in steps for call in message.get("tool_calls", [])]
    words = {
        CALLS: [place for call in calls for place in call["arguments"].values()],
        RESULTS: [line for one in steps if one["role"] == "tool" for line in one["content"].splitlines()],
        TEXT: [one["content"] for one in steps if "tool_calls" in one],
    }
    found = {part for part in words if _lacks(text, words[part])}
    if any(text.count(call["name"]) == before.count(call["name"]) for call in calls):
        found.add(CALLS)
    if len(calls) == 2:  # one in each answer
        return found
    more = (found - {*lost}) & {CALLS, RESULTS}
    return found - {CALLS, RESULTS} | ({PARALLEL} if more else set())


def _lacks(text: str, words: list[str]) -> bool:
    return any(word not in text for word in words)
