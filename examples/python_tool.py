"""A tool whose source runs in the sandbox, and the field `tools` of its job.

    python examples/python_tool.py > tools.json

Rows need no `tools`: {"messages": [{"role": "user", "content": "..."}], "drawers": {"3": "7"}}.
"""

import json
from pathlib import Path

LOOKUP = {
    "type": "python",
    "name": "lookup",
    "description": "Look into a drawer. Each drawer opens once.",
    "parameters": {
        "type": "object",
        "properties": {"drawer": {"type": "integer"}},
        "required": ["drawer"],
    },
}


def call(arguments, item, state):  # type: ignore[no-untyped-def]
    """Return what the model reads, and the state for the next call of the episode. The first one gets None."""
    opened = state or []
    drawer = arguments["drawer"]
    if drawer in opened:
        return "the drawer is locked", opened
    digit = item["drawers"].get(str(drawer), "nothing")
    return f"in drawer {drawer} is {digit}", [*opened, drawer]


if __name__ == "__main__":
    print(json.dumps([LOOKUP | {"source": Path(__file__).read_text()}]))
