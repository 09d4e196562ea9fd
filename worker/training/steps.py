"""Map steps of answers (process supervision) from characters to tokens. Pure functions."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from graders.types import ErrorKind, Grade
from worker.types import Group


def token_ends(
    ids_T: Sequence[int], text: str, ends: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> list[int]:
    """Convert each step's end from characters of `text` to tokens of `ids_T`, counted from 1.

    A step ends at the first token that completes its text. A token that reaches into the next step belongs to the one
    that it completes. A step that ends with the text includes the stop token, which has no text.
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


def ends_in_text(ends: Sequence[int], content: str, text: str) -> list[int]:
    """Convert each step's end from characters of an answer without its calls to characters of the whole answer.

    Calls belong to the step that ends with the content.
    """
    before = max(text.find(content), 0)
    return [len(text) if end >= len(content) else before + end for end in ends]


def with_steps_only(group: Group) -> Group:
    """Return the group with grades removed from answers that were graded without steps."""
    return replace(group, grades_G=tuple(map(_with_steps, group.grades_G)))


def _with_steps(grade: Grade) -> Grade:
    if grade.score is None or grade.steps:
        return grade
    reason = "supervision is 'process' and the grader gave no steps for this answer"
    return replace(grade, score=None, reason=reason, error=ErrorKind.other_error)
