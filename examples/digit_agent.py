"""An agent in your own process that trains a model: it asks, calls its tool itself, and gives the reward.

    python examples/digit_tool.py rows > rows.jsonl       rows whose digit only the tool knows
    regraft agents run ftjob-... digit_agent:play         in this folder, until the job has ended

The job has `"environment": {"type": "client"}` (docs/howto/own-agent.md). A framework that takes a base URL and a key
can replace the loop in `play`.
"""

from typing import Any

from digit_tool import output_of
from regraft.agents import Episode

MAX_CALLS = 4


def play(episode: Episode) -> float:
    """Answer the question of the row with the tool `lookup`. The reward is 1 for the right digit."""
    client, messages = episode.openai(), list[Any](episode.messages)
    for _ in range(MAX_CALLS):
        answer = client.chat.completions.create(
            model="policy",
            messages=messages,
            tools=list[Any](episode.tools),
        )
        message = answer.choices[0].message
        messages.append(message.to_dict())
        if not message.tool_calls:
            return float((message.content or "").strip() == episode.item["digit"])
        messages += [result_of(call.to_dict()) for call in message.tool_calls]
    return 0.0


def result_of(call: dict[str, Any]) -> dict[str, Any]:
    """The result of a call as a message. The model may write any arguments."""
    try:
        output = output_of(call["function"])
    except (ValueError, TypeError, KeyError) as cause:
        output = f"error: {cause}"
    return {"role": "tool", "tool_call_id": call["id"], "content": output}
