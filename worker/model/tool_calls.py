"""Answers with calls of functions: text -> content and calls. No vLLM, so that training and every engine have them.

The formats are those of vLLM's parsers hermes, qwen3_coder, mistral and llama3_json, and an answer has the calls that
vLLM 0.32 reads (vllm/tool_parsers, vllm/parser). One thing differs: the text of an answer whose calls cannot be read
stays whole, and the reason is given.

Each parser takes linear time, because a model can write any text.
"""

import json
import math
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from worker.types import Call, ParsedAnswer, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]]
"""The functions that an answer may call, in OpenAI's format."""


class UnreadableCall(ValueError):
    """The text has the mark of a call and no call that can be read."""


@dataclass(frozen=True)
class CallFormat:
    """A format of calls."""

    marks: tuple[str, ...]  # of which one is in each text with calls
    # Raises UnreadableCall, or ValueError, KeyError, TypeError or RecursionError for broken JSON.
    read: Callable[[str, Tools], tuple[str, list[Call]]]
    has_short_ids: bool = False  # as in ParsedAnswer

    def parse(self, text: str, tools: Tools, *, parallel: bool = True) -> ParsedAnswer:
        """Read the calls of an answer.

        Args:
            text: the final answer, with the tokens that mark calls and without other special tokens.
            parallel: False: only the first call counts, as in vLLM's server.
        """
        if not any(mark in text for mark in self.marks):
            return ParsedAnswer(text)
        try:
            content, calls = self.read(text, tools)
            for call in calls:
                _refuse_odd(call)
        except UnreadableCall as cause:
            return ParsedAnswer(text, error=str(cause))
        except json.JSONDecodeError as cause:
            return ParsedAnswer(
                text, error=f"a call is not JSON: {cause.msg} at character {cause.pos + 1} of it"
            )
        except KeyError as cause:
            return ParsedAnswer(text, error=f"a call has no {cause.args[0]!r}")
        except (ValueError, TypeError, RecursionError):
            return ParsedAnswer(text, error="a call is not a JSON object with a name and arguments")
        if not calls:
            return ParsedAnswer(text, error="the text has the mark of a call, and no call with a name")
        counted = tuple(calls if parallel else calls[:1])
        return ParsedAnswer(content, counted, has_short_ids=self.has_short_ids)

    def cut(self, text: str) -> ParsedAnswer:
        """An answer that ended by its length, of which no call is read: the last may be half of one."""
        has_call = any(mark in text for mark in self.marks)
        error = "the answer was cut at its limit of tokens, so its calls are not read" if has_call else ""
        return ParsedAnswer(text, error=error)


def _refuse_odd(call: Call) -> None:
    if not isinstance(call.name, str):
        raise UnreadableCall("the name of a call is not a text")
    if not isinstance(call.arguments, str):
        raise UnreadableCall("the arguments of a call are not JSON")
    try:
        f"{call.name}{call.arguments}".encode()
    except UnicodeEncodeError:
        raise UnreadableCall("a call has a lone surrogate, which is not a character") from None


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# Hermes: <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>

_CALL, _CALL_END = "<tool_call>", "</tool_call>"


def _hermes(text: str, tools: Tools) -> tuple[str, list[Call]]:
    calls = []
    for block in _between(text, _CALL, _CALL_END):
        value = json.loads(block)
        calls.append(Call(value["name"], _written(value["arguments"])))
    return text[: text.find(_CALL)], calls


def _between(text: str, start: str, end: str) -> Iterator[str]:
    """The texts between marks; the last may have no end."""
    place = text.find(start)
    while place != -1:
        first = place + len(start)
        last = text.find(end, first)
        yield text[first:] if last == -1 else text[first:last]
        place = -1 if last == -1 else text.find(start, last + len(end))


# Llama 3 JSON: {"name": "weather", "parameters": {"city": "Oslo"}}; {"name": ...}

_DECODER = json.JSONDecoder()


def _llama3_json(text: str, tools: Tools) -> tuple[str, list[Call]]:
    calls: list[Call] = []
    start = text.find("{")
    while start != -1:
        value, end = _DECODER.raw_decode(text, start)
        arguments = value["arguments"] if "arguments" in value else value["parameters"]
        calls.append(Call(value["name"], _written(arguments)))
        # As in vLLM, a call does not begin where another ends: there is a separator between them.
        start = text.find("{", end + 1)
    return "", calls


# Mistral, of tokenizers before version 11: [TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]

_BOT, _ARGS = "[TOOL_CALLS]", "[ARGS]"


def _mistral_list(text: str, tools: Tools) -> tuple[str, list[Call]]:
    content, *segments = text.split(_BOT)
    body = next((part.strip() for part in segments if part.strip()), "")
    try:
        value, _ = _DECODER.raw_decode(body)
    except json.JSONDecodeError:
        first, last = body.find("[{"), body.rfind("}]")
        if first == -1 or last < first + 2:
            raise
        value = json.loads(body[first : last + 2])
    return content if content.strip() else "", list(_listed(value))


def _listed(value: Any) -> Iterator[Call]:
    for entry in [value] if isinstance(value, dict) else value if isinstance(value, list) else []:
        if isinstance(entry, dict) and not entry.keys().isdisjoint({"name", "arguments"}):
            name, arguments = entry.get("name"), entry.get("arguments")
            written = "{}" if arguments is None else arguments
            yield Call(
                name if isinstance(name, str) else "",
                written if isinstance(written, str) else _written(written),
            )


# The formats below are read mark by mark. A call is open until the next one begins or its end mark comes.


@dataclass
class _OpenCall:
    """A call as it is read: texts of its name and of its arguments."""

    name_parts: list[str] = field(default_factory=list)
    body_parts: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "".join(self.name_parts)

    @property
    def body(self) -> str:
        return "".join(self.body_parts)


# Mistral, since version 11: [TOOL_CALLS]weather[ARGS]{"city": "Oslo"}, with or without [ARGS].

_MISTRAL_MARKS = re.compile(r"(\[TOOL_CALLS\]|\[ARGS\]|\{)")


def _mistral_named(text: str, tools: Tools) -> tuple[str, list[Call]]:
    before, opened = list[str](), list[_OpenCall]()
    state = "content"
    for part in _MISTRAL_MARKS.split(text):
        if part == _BOT and state != "name":
            opened.append(_OpenCall())
            state = "name"
        elif state == "content":
            before.append(part)
        elif state == "name" and part in (_ARGS, "{"):
            opened[-1].body_parts += [part] if part == "{" else []
            state = "arguments"
        elif state == "name":
            opened[-1].name_parts.append(part)
        else:
            opened[-1].body_parts.append(part)
    calls = [
        Call(name, _with_types(_first_json(one.body), name, tools))
        for one in opened
        if one.name or one.body
        for name in [one.name.strip()]
    ]
    return "".join(before).strip(), calls


def _first_json(body: str) -> str:
    """The first JSON value of a text; the text where it does not begin with one."""
    body = body.strip()
    if not body:
        return "{}"
    try:
        _, end = _DECODER.raw_decode(body)
    except json.JSONDecodeError:
        return body
    return body[:end]


# Qwen3-Coder: <tool_call><function=weather><parameter=city>Oslo</parameter></function></tool_call>

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_QWEN_MARKS = re.compile(r"(</?tool_call>|<function=|</function>|<parameter=|</parameter>|</?think>|>)")
_NAMED = re.compile(r'"name"\s*:\s*"([^"]*)"')
_PARAMETER_MARKS = re.compile(r"<\s*(?:parameter\s*=|/\s*parameter\s*>)")
# (state, mark) -> state. Other marks are text.
_QWEN_STATES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("content", _CALL): "preamble",
        ("content", _FUNCTION): "name",
        ("content", "</think>"): "content",
        ("preamble", _CALL_END): "content",
        ("preamble", _FUNCTION): "name",
        ("name", ">"): "arguments",
        ("name", _FUNCTION_END): "between",
        ("arguments", _FUNCTION_END): "between",
        ("between", _CALL_END): "content",
        ("between", _CALL): "preamble",
        ("between", _FUNCTION): "name",
    }
)


def _qwen3_coder(text: str, tools: Tools) -> tuple[str, list[Call]]:
    before, opened = list[str](), list[_OpenCall]()
    state = "content"
    for part in _QWEN_MARKS.split(text):
        following = _QWEN_STATES.get((state, part))
        if following is None:
            if state == "content" and not opened:
                before.append(part)
            elif state in ("name", "arguments"):
                (opened[-1].name_parts if state == "name" else opened[-1].body_parts).append(part)
            continue
        if state in ("content", "between") and following in ("preamble", "name"):
            opened.append(_OpenCall())
        state = following
    calls = [call for one in opened if (call := _qwen_call(one, tools)) is not None]
    return "".join(before).strip(), calls


def _qwen_call(opened: _OpenCall, tools: Tools) -> Call | None:
    """The call, or None if it has no name."""
    name, body = opened.name, opened.body
    if not name and (match := _NAMED.search(body)):
        name = match[1]
    name = name.strip()
    if not body.strip():
        return Call(name, "{}") if name else None
    if name:
        return Call(name, _with_types(_written(dict(_parameters(body))), name, tools))
    value = _object_of(body.strip())
    name = value.get("name", "")
    key = next((key for key in ("arguments", "parameters") if key in value), None)
    given = {other: inner for other, inner in value.items() if other != "name"} if key is None else value[key]
    written = given if isinstance(given, str) and key is not None else _written(given)
    return Call(name, _with_types(written, name, tools)) if name else None


def _object_of(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _parameters(body: str) -> Iterator[tuple[str, str]]:
    """The names and values of `<parameter=NAME>VALUE</parameter>`. A value also ends where the next one begins."""
    marks = list(_PARAMETER_MARKS.finditer(body))
    number = 0
    while number < len(marks):
        start = marks[number]
        number += 1
        if start[0].endswith(">"):
            continue  # an end without a beginning
        named = body.find(">", start.end())
        while number < len(marks) and marks[number].start() <= named:  # in the name
            number += 1
        if named == -1 or number == len(marks):
            return
        end = marks[number]
        value = body[named + 1 : end.start()].removeprefix("\n").removesuffix("\n")
        yield body[start.end() : named].lstrip(), value
        number += end[0].endswith(">")


# Types of arguments, which vLLM corrects by the schema of the function.

_TYPES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
        **dict.fromkeys(
            ("int", "int32", "int64", "uint", "uint32", "uint64", "long", "short", "unsigned"), "integer"
        ),
        **dict.fromkeys(("float", "float32", "float64", "double"), "number"),
        "bool": "boolean",
        "dict": "object",
        **dict.fromkeys(("arr", "list", "sequence"), "array"),
    }
)
_JSON_TYPES = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)


def _with_types(arguments: str, name: str, tools: Tools) -> str:
    """The arguments with the types of the function's schema, where their texts can be read as such."""
    properties = _properties(tools, name) if name else {}
    if not properties:
        return arguments
    try:
        values = json.loads(arguments)
    except ValueError:
        return arguments
    if not isinstance(values, dict):
        return arguments
    typed = _typed_object(values, properties)
    return arguments if _is_same(typed, values) else _written(typed)


def _properties(tools: Tools, name: str) -> Mapping[str, Any]:
    for tool in tools:
        function = tool["function"]
        if function["name"] == name:
            found = (function.get("parameters") or {}).get("properties", {})
            return found if isinstance(found, Mapping) else {}
    return {}


def _typed_object(values: dict[str, Any], properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _typed(value, schema) if isinstance(schema := properties.get(key), Mapping) else value
        for key, value in values.items()
    }


def _typed(value: Any, schema: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        return _as_type(value, _types_of(schema))
    if isinstance(value, dict):
        inner = schema.get("properties")
        return _typed_object(value, inner) if isinstance(inner, Mapping) else value
    if isinstance(value, list):
        items = schema.get("items")
        return [_typed(item, items) for item in value] if isinstance(items, Mapping) else value
    return _as_type(_written(value), _types_of(schema))


def _is_same(value: Any, other: Any) -> bool:
    """Whether two JSON values are equal in their types too: 1 is neither True nor 1.0."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_is_same(part, other[key]) for key, part in value.items())
    if isinstance(value, list):
        return len(value) == len(other) and all(map(_is_same, value, other))
    return bool(value == other)


def _types_of(schema: Any) -> set[str]:
    """All types that a value of the schema may have; a text if it says nothing."""
    if not isinstance(schema, Mapping):
        return {"string"}
    given = schema.get("type")
    types = {one for one in ([given] if isinstance(given, str) else given or []) if isinstance(one, str)}
    choices = schema.get("enum")
    for choice in choices if isinstance(choices, list) else []:
        types.add(
            "null" if choice is None else next(name for kind, name in _JSON_TYPES if isinstance(choice, kind))
        )
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        for part in parts if isinstance(parts, list) else []:
            types |= _types_of(part)
    return types or {"string"}


def _as_type(text: str, types: set[str]) -> Any:
    """The text as the first of these types that it can be read as, in the order of vLLM; else as JSON or a text."""
    wanted = {_TYPES.get(name, name) for name in (one.strip().lower() for one in types)}
    if "null" in wanted and text.lower() == "null":
        return None
    for name, read in _READERS:
        if name in wanted:
            try:
                return read(text)
            except (ValueError, TypeError):
                continue
    try:
        return _finite_json(text)
    except ValueError:
        return text


def _number(text: str) -> int | float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return int(value) if value == int(value) else value


def _boolean(text: str) -> bool:
    word = text.lower().strip()
    if word not in ("true", "1", "false", "0"):
        raise ValueError(text)
    return word in ("true", "1")


def _finite_json(text: str) -> Any:
    value = json.loads(text)
    json.dumps(value, allow_nan=False)  # raises ValueError for invalid JSON, such as the number 1e999
    return value


_READERS: Sequence[tuple[str, Callable[[str], Any]]] = (
    ("integer", int),
    ("number", _number),
    ("boolean", _boolean),
    ("object", _finite_json),
    ("array", _finite_json),
    ("string", str),
)

_FORMATS: Mapping[str, CallFormat] = MappingProxyType(
    {
        "hermes": CallFormat((_CALL,), _hermes),
        "qwen3_coder": CallFormat((_CALL, _FUNCTION), _qwen3_coder),
        "llama3_json": CallFormat(("{",), _llama3_json),
        "mistral": CallFormat((_BOT,), _mistral_list, has_short_ids=True),
    }
)
_MISTRAL_NAMED = CallFormat((_BOT,), _mistral_named, has_short_ids=True)


def format_of(parser: str, vocabulary: Container[str]) -> CallFormat:
    """The format of one of core.tool_parsers.PARSED.

    Args:
        vocabulary: of the tokenizer; its marks of calls show the version of Mistral's format.
    """
    return _MISTRAL_NAMED if parser == "mistral" and _ARGS in vocabulary else _FORMATS[parser]


@dataclass(frozen=True)
class CallReader:
    """Reads the calls in sampled answers of one model."""

    form: CallFormat
    tokenizer: "PreTrainedTokenizerBase"
    marks: frozenset[int]  # tokens of calls that are special, so that texts of answers are without them
    left_out: frozenset[int]  # the other special tokens

    @classmethod
    def of(cls, parser: str, tokenizer: "PreTrainedTokenizerBase") -> "CallReader":
        """`parser`: one of core.tool_parsers.PARSED."""
        # Not get_vocab(), which copies the whole vocabulary: 0.5 s for 150,000 tokens, and each chat has a reader.
        found = {text: _token_of(text, tokenizer) for text in _TOKENS}
        known = {text: token for text, token in found.items() if token is not None}
        added = tokenizer.added_tokens_decoder.items()
        special = {*tokenizer.all_special_ids, *(token for token, entry in added if entry.special)}
        marks = frozenset(known.values()) & special
        return cls(format_of(parser, known), tokenizer, marks, frozenset(special - marks))

    def parsed(self, rollout: Rollout, row: Mapping[str, Any]) -> Rollout:
        """The rollout with the content and the calls of its answer, if the row has tools."""
        ids_T, is_cut = rollout.output_ids_T[rollout.grammar_start :], rollout.is_truncated
        read = self.read(rollout.text, ids_T, row, is_cut=is_cut)
        return rollout if read is None else replace(rollout, parsed=read)

    def read(
        self,
        text: str,
        ids_T: Sequence[int],
        row: Mapping[str, Any],
        *,
        is_cut: bool,
        stops: Sequence[str] = (),
    ) -> ParsedAnswer | None:
        """The content and the calls of an answer; None if the row has no tools.

        Args:
            text: the final answer without special tokens.
            ids_T: its tokens.
            is_cut: it ended by its length.
            stops: texts of which the first ends the answer, and already ends `text`.
        """
        if not (tools := row.get("tools")):
            return None
        if not self.marks.isdisjoint(ids_T):
            shown = [token for token in ids_T if token not in self.left_out]
            text = _until(str(self.tokenizer.decode(shown, skip_special_tokens=False)), stops)
        if is_cut:
            return self.form.cut(text)
        return self.form.parse(text, tools, parallel=row.get("parallel_tool_calls") is not False)


def _token_of(text: str, tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """The token that is this text; None: it has several."""
    token = tokenizer.convert_tokens_to_ids(text)  # that of unknown texts, if it has several
    return token if isinstance(token, int) and tokenizer.convert_ids_to_tokens(token) == text else None


def _until(text: str, stops: Sequence[str]) -> str:
    return text[: min((at for stop in stops if (at := text.find(stop)) != -1), default=len(text))]


_TOKENS = (_CALL, _CALL_END, _FUNCTION, _FUNCTION_END, _BOT, _ARGS)
