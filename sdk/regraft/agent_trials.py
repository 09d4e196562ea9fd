"""Try an agent without a job: a model of the service answers, and what an episode would count is counted.

    regraft.agent_trials.try_agent(play, "qwen3-8b", rows)

The function gets the base URL of a server on this machine, which forwards its requests to the service.
"""

import hmac
import json
import secrets
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2
import openai

from regraft._rules.conversations import Message, continued, merged, spelled, text_of
from regraft.agents import Agent, Episode, reward_of
from regraft.sync.client import Regraft

ROUTES = ("chat/completions", "responses")
TIMEOUT_S = 1800  # of an episode, as a job's
MAX_BYTES = 32 << 20  # of a request


@dataclass(frozen=True)
class Trial:
    """An episode of an agent without a job."""

    reward: float | None
    error: str  # of the function; empty: none
    turns: int  # answers of the model
    prompt_tokens: int  # that the model read, of all answers
    completion_tokens: int
    branches: int  # answers to another history than an earlier one, after the first answer
    seconds: float


@dataclass
class _Talk:
    """The requests of an episode and their answers. Several threads add to it."""

    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    branches: int = 0
    # The tools and messages of those that end with a whole answer and are not continued yet.
    _known: list[tuple[str, list[Message]]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, request: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        usage = answer.get("usage") or {}
        tools, messages = spelled(tools_in(request)), messages_in(request)
        with self._lock:
            behind = [one for one in self._known if one[0] == tools and continued(one[1], messages)]
            self.branches += self.turns > 0 and not behind
            if behind:
                self._known.remove(
                    max(behind, key=lambda one: len(one[1]))
                )  # a second continuation is a branch
            if not is_cut_off(answer):  # a request behind a cut answer continues behind the one before it
                self._known.append((tools, [*messages, answer_in(answer)]))
            self.turns += 1
            self.prompt_tokens += usage.get("prompt_tokens", usage.get("input_tokens", 0))
            self.completion_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))


def try_agent(
    function: Agent, model: str, rows: Iterable[Mapping[str, Any]], *, client: Regraft | None = None
) -> Iterator[Trial]:
    """Play an episode for each row, one after the other.

    Args:
        function: as of `regraft.agents.run`.
        model: any that the service serves.
        rows: of a file of training rows; a row without `messages` has none.
    """
    for number, row in enumerate(rows):
        yield _tried(function, model, dict(row), f"try_{number}", client or Regraft())


def _tried(function: Agent, model: str, row: dict[str, Any], id: str, client: Regraft) -> Trial:
    talk, key, reward, error = _Talk(), secrets.token_hex(16), None, ""
    begun = time.monotonic()
    with _served(talk, model, key, client) as base_url:
        deadline = int(time.time()) + TIMEOUT_S
        messages, tools = row.get("messages") or [], row.get("tools") or []
        episode = Episode(id, base_url, key, row, messages, tools, "train", id, deadline)
        try:
            reward = reward_of(function, episode)
        except Exception as cause:
            traceback.print_exc()
            error = f"{type(cause).__name__}: {cause}"
    seconds = time.monotonic() - begun
    counts = talk.turns, talk.prompt_tokens, talk.completion_tokens, talk.branches
    return Trial(reward, error, *counts, seconds)


@contextmanager
def _served(talk: _Talk, model: str, key: str, client: Regraft) -> Iterator[str]:
    """Answer an agent on this machine, and yield the base URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            listed = {
                "object": "list",
                "data": [{"id": model, "object": "model", "created": 0, "owned_by": ""}],
            }
            self._respond(
                *_error(404, "There is no such page.") if self.path != "/v1/models" else _json(200, listed)
            )

        def do_POST(self) -> None:
            sent = (self.headers.get("authorization") or "").encode()
            length = self.headers.get("content-length") or ""
            if not hmac.compare_digest(sent, f"Bearer {key}".encode()):
                self._respond(*_error(401, "This is not the key of the episode."))
            elif not length.isdecimal():
                self._respond(*_error(411, "Send the body with a Content-Length."))
            elif int(length) > MAX_BYTES:
                self._respond(*_error(413, f"The body has more than {MAX_BYTES:,} bytes."))
            else:
                body = self.rfile.read(int(length))
                self._respond(*forwarded(client, talk, self.path.removeprefix("/v1/"), body, model))

        def _respond(self, status: int, kind: str, content: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()


Response = tuple[int, str, bytes]
"""Status, media type and body."""


def forwarded(client: Regraft, talk: _Talk, route: str, body: bytes, model: str) -> Response:
    """The answer of the service to a request of the agent. Streams arrive whole, as those of episodes."""
    if route not in ROUTES:
        return _error(404, f"An episode has {', '.join(ROUTES)} and models.")
    try:
        request = json.loads(body)
        asked = request | {"model": model}
    except (ValueError, TypeError, RecursionError):
        return _error(400, "The body is not a JSON object.")
    options = request.get("stream_options") or {}
    has_usage = isinstance(options, dict) and bool(options.get("include_usage"))
    counts_stream = bool(request.get("stream")) and route == ROUTES[0]
    if counts_stream and isinstance(options, dict):
        asked["stream_options"] = options | {"include_usage": True}
    try:
        answer = client.post(f"/{route}", body=asked, cast_to=httpx2.Response)
    except openai.APIStatusError as refused:
        return _of(refused.response)
    except openai.APIConnectionError as cause:
        return _error(502, f"The service does not answer: {cause}")
    if not request.get("stream"):
        talk.add(request, answer.json())
        return _of(answer)
    events = list(events_of(answer.text))
    if not any(event.get("error") or event.get("type") in FAILED for event in events):
        talk.add(request, joined_answer(events))
    if counts_stream and not has_usage:
        content = "".join(f"data: {json.dumps(one)}\n\n" for one in events if one.get("choices") != [])
        return 200, "text/event-stream", f"{content}data: [DONE]\n\n".encode()
    return _of(answer)


FAILED = ("response.failed", "error")  # events of Responses


def _of(answer: httpx2.Response) -> Response:
    return answer.status_code, answer.headers.get("content-type", "application/json"), answer.content


def _json(status: int, content: Any) -> Response:
    return status, "application/json", json.dumps(content).encode()


def _error(status: int, message: str) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return _json(status, {"error": error})


def events_of(text: str) -> Iterator[dict[str, Any]]:
    """The JSON of server-sent events."""
    for line in text.split("\n"):
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def joined_answer(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The answer of a stream, as far as it is counted: a response, or a chat completion."""
    response: Mapping[str, Any] | None = None
    usage, cause = None, None
    content, thought, calls = "", "", dict[int, Any]()
    for event in events:
        response = event.get("response") or response  # the last one is whole
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            cause = choice.get("finish_reason") or cause
            content += choice["delta"].get("content") or ""
            thought += choice["delta"].get("reasoning_content") or ""
            for call in choice["delta"].get("tool_calls") or ():
                known = calls.setdefault(call["index"], {"function": {"arguments": ""}})
                function = call.get("function") or {}
                known["id"] = call.get("id") or known.get("id")
                known["function"]["name"] = function.get("name") or known["function"].get("name")
                known["function"]["arguments"] += function.get("arguments") or ""
    if response is not None:
        return response
    message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": thought,
        "tool_calls": [calls[at] for at in sorted(calls)],
    }
    return {"choices": [{"message": message, "finish_reason": cause}], "usage": usage}


def is_cut_off(answer: Mapping[str, Any]) -> bool:
    """Whether an answer ended at its limit of tokens."""
    causes = [choice.get("finish_reason") for choice in answer.get("choices") or ()]
    return "length" in causes or answer.get("status") == "incomplete"


def tools_in(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The functions of a request, as a chat has them and the service reads them: without absent fields."""
    functions = [tool.get("function", tool) for tool in request.get("tools") or ()]
    return [
        {
            "type": "function",
            "function": {name: value for name, value in one.items() if name != "type" and value is not None},
        }
        for one in functions
    ]


def messages_in(request: Mapping[str, Any]) -> list[Message]:
    """The messages of a request, as the service reads them."""
    if "messages" in request:
        return [_with_text(message) for message in request["messages"]]
    system = [{"role": "system", "content": text} for text in [request.get("instructions")] if text]
    listed = request.get("input") or ()
    items = [{"role": "user", "content": listed}] if isinstance(listed, str) else listed
    return [_with_text(message) for message in [*system, *merged(map(_of_item, items))]]


def answer_in(answer: Mapping[str, Any]) -> Message:
    """The message of a chat completion or a response."""
    for choice in answer.get("choices") or ():
        return {"role": "assistant", **_with_text(choice["message"])}
    said = merged(_of_item(item) for item in answer.get("output") or ())
    return said[0] if said else {"role": "assistant", "content": ""}


def _with_text(message: Message) -> Message:
    return {**message, "content": text_of(message.get("content"))}


def _of_item(item: Mapping[str, Any]) -> dict[str, Any] | None:
    """An item of Responses as a message of a chat; None: a chat does not have it."""
    kind = item.get("type")
    if kind == "reasoning":
        return None
    if kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "content": text_of(item["output"]), "tool_call_id": item["call_id"]}
    return {"role": item["role"], "content": text_of(item["content"])}
