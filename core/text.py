"""Text that users, models, graders and other services send, made storable."""

import json
import re
from typing import Any

_UNSTORABLE = re.compile(r"[\0\ud800-\udfff]")
# The same in ASCII-escaped JSON, and a few that only look like it.
_ESCAPED = re.compile(r"\\u(?:0000|d[89a-f])")


def storable(text: str) -> str:
    """Replace NUL and lone surrogates with U+FFFD.

    JSON can carry both, but PostgreSQL stores no NUL, and UTF-8 cannot encode a lone surrogate.
    """
    return _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def storable_json(value: Any) -> Any:
    """The same JSON value with all its texts storable."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, dict):
        return {storable_json(key): storable_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [storable_json(inner) for inner in value]
    return value


def to_json(value: Any) -> str:
    """Serialize a value as compact ASCII JSON in which all texts are storable.

    Raises:
        ValueError: a number is not finite. PostgreSQL refuses it too, but SQLite would store it.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    # A copy of every value would double the time for values without such text, which are nearly all.
    return json.dumps(storable_json(value), separators=(",", ":")) if _ESCAPED.search(text) else text
