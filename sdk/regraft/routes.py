"""Paths of the API's routes from ids."""

from collections.abc import Iterable
from urllib.parse import quote

from regraft._rules.command_line import NO_IDS

IN_A_SEGMENT = ":@"  # of names of models and versions


class InvalidId(ValueError):
    """An id that cannot be a segment of a path."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{text!r} is not an id or a name.")


def route(start: str, *segments: str) -> str:
    """The path of `segments` below `start`, each of which is quoted: an id leads to no other route.

    Raises:
        InvalidId: a segment is empty, "." or "..".
    """
    return "/".join([start, *(_segment(text) for text in segments)])


def listed(ids: Iterable[str]) -> str:
    """A query's value for several ids."""
    return ",".join(quote(text, safe=IN_A_SEGMENT) for text in ids)


def _segment(text: str) -> str:
    if text in NO_IDS:
        raise InvalidId(text)
    return quote(text, safe=IN_A_SEGMENT)
