"""A tool server for a job with executed tools, and the rows that go with it (docs/howto/agents.md).

    python examples/digit_tool.py rows > rows.jsonl     rows whose digit only the tool knows
    python examples/digit_tool.py serve                 the tool `lookup`, at http://127.0.0.1:8900/lookup

The job has `"tools": [{"name": "lookup", "server_url": "http://127.0.0.1:8900/lookup"}]`, and the operator allows the
host 127.0.0.1 under [endpoints] in REGRAFT_GRADERS_FILE.
"""

import json
import sys
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PORT = 8900
SECRET = "change me: a model could learn a digit that follows from the drawer"
QUESTION = "Which digit is in drawer {}? Answer with the digit alone."
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look into a drawer.",
        "parameters": {
            "type": "object",
            "properties": {"drawer": {"type": "integer"}},
            "required": ["drawer"],
        },
    },
}


def digit_in(drawer: int) -> str:
    return str(sha256(f"{SECRET}/{drawer}".encode()).digest()[0] % 10)


def rows() -> list[dict[str, Any]]:
    return [
        {
            "messages": [{"role": "user", "content": QUESTION.format(drawer)}],
            "tools": [LOOKUP],
            "digit": digit_in(drawer),
        }
        for drawer in range(100)
    ]


def output_of(call: dict[str, Any]) -> str:
    """Return the text that the model reads after its call. The row is in `call["item"]`."""
    drawer = int(json.loads(call["arguments"])["drawer"])  # 2.0 is an integer of JSON schemas, too
    return f"The digit in drawer {drawer} is {digit_in(drawer)}."


class Lookup(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        call = json.loads(self.rfile.read(int(self.headers["content-length"])))
        output = {
            "type": "function_call_output",
            "call_id": call["call_id"],
            "id": call["id"],
            "output": output_of(call),
        }
        body = json.dumps(output).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    if sys.argv[1:] == ["rows"]:
        for row in rows():
            sys.stdout.write(json.dumps(row) + "\n")
    elif sys.argv[1:] != ["serve"]:
        sys.exit(__doc__)
    else:
        ThreadingHTTPServer(("127.0.0.1", PORT), Lookup).serve_forever()
