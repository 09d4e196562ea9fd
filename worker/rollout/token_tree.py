"""The tokens of an episode that a client plays: each path of its calls once, in a tree that grows."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from worker.types import NEW_ROOT, NO_ANSWER, Node, Rollout

Parent = int | None
"""The number of a place; None: the prompt of the row; NEW_ROOT: nothing."""


@dataclass(frozen=True)
class TreePlace:
    """Consecutive tokens on a path: those of an answer, or context."""

    parent: Parent
    ids: tuple[int, ...]
    answer: Rollout | None  # None: context


class TokenTree:
    """Grows by one answer at a time. Answers to the same tokens are siblings behind one context."""

    def __init__(self, prompt_ids: tuple[int, ...]) -> None:
        self._prompt_ids = prompt_ids
        self._places: list[TreePlace] = []

    def path(self, place: Parent) -> tuple[int, ...]:
        """All tokens up to the end of a place."""
        pieces: list[tuple[int, ...]] = []
        while place is not None and place != NEW_ROOT:
            pieces.append(self._places[place].ids)
            place = self._places[place].parent
        if place is None:
            pieces.append(self._prompt_ids)
        return tuple(token for piece in reversed(pieces) for token in piece)

    def deepest(self, ids: Sequence[int]) -> tuple[Parent, tuple[int, ...]]:
        """The place with the longest path that these tokens begin with, and the tokens behind it."""
        deepest: Parent = NEW_ROOT
        length = 0
        found: list[tuple[Parent, int]] = [(NEW_ROOT, 0)]
        if tuple(ids[: len(self._prompt_ids)]) == self._prompt_ids:
            found.append((None, len(self._prompt_ids)))
        while found:
            parent, read = found.pop()
            if read > length:
                deepest, length = parent, read
            for number, place in enumerate(self._places):
                until = read + len(place.ids)
                if place.parent == parent and tuple(ids[read:until]) == place.ids:
                    found.append((number, until))
        return deepest, tuple(ids[length:])

    def add(self, parent: Parent, context: tuple[int, ...], answer: Rollout) -> int:
        """Add an answer behind a context, which is there once. Returns the answer's place."""
        if context:
            parent = self._context(parent, context)
        self._places.append(TreePlace(parent, answer.output_ids_T, answer))
        return len(self._places) - 1

    def _context(self, parent: Parent, context: tuple[int, ...]) -> int:
        wanted = TreePlace(parent, context, None)
        if wanted not in self._places:
            self._places.append(wanted)
        return self._places.index(wanted)

    def nodes(self) -> list[Node]:
        """The tree as a Rollout has it: a context that one call follows belongs to the node of the call."""
        followers = Counter(place.parent for place in self._places)
        number_of: dict[int, int] = {}  # of the node, by place
        nodes: list[Node] = []
        for number, place in enumerate(self._places):
            if place.answer is None and followers[number] == 1:
                continue
            parent, context = place.parent, place.ids if place.answer is None else ()
            while parent is not None and parent >= 0 and parent not in number_of:
                context = self._places[parent].ids + context
                parent = self._places[parent].parent
            known = number_of[parent] if parent is not None and parent >= 0 else parent
            number_of[number] = len(nodes)
            nodes.append(Node(known, context, place.answer or NO_ANSWER))
        return nodes
