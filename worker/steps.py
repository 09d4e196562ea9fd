"""Answers that were judged step by step: where their steps end in tokens, and what it means to have none. Pure."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from graders.types import ErrorKind, Grade
from worker.types import Group


def token_ends(
    ids_T: Sequence[int], text: str, ends: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> list[int]:
    """Where a step ends in tokens, counted from 1, for each end in characters of `text`, which `ids_T` decode to.

    It is the first token with which the tokens so far spell out all of the step. A token that reaches into the next
    step belongs to the one that it completes. A step that ends with the text ends with the answer: the stop token,
    which no text shows, is its last.
    """
    found: list[int] = []
    for end in ends:
        if end >= len(text):
            found.append(len(ids_T))
            continue

        def spelt(tokens: int, wanted: str = text[:end]) -> bool:
            # Half a character decodes to U+FFFD, so a prefix of the right length may still be a wrong one.
            return decode(ids_T[:tokens]).startswith(wanted)

        first = found[-1] if found else 1  # two steps may end within one token
        found.append(first + bisect_left(range(first, len(ids_T)), True, key=spelt))
    return found


def with_steps_only(group: Group) -> Group:
    """The same group, in which an answer that was judged without steps counts as not judged."""
    return replace(group, grades_G=tuple(map(_with_steps, group.grades_G)))


def _with_steps(grade: Grade) -> Grade:
    if grade.score is None or grade.steps:
        return grade
    reason = "supervision is 'process' and the grader gave no steps for this answer"
    return replace(grade, score=None, reason=reason, error=ErrorKind.other_error)
