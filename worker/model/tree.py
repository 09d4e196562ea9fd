"""Episodes with branches: from nodes to the tokens that are trained on, and parts of them. Pure functions.

An episode without branches is one sequence in which context is not learned. With branches it is a tree, and a row of
the trainer has each token once:

    p p p a a a b b c d      the answer a, then its tool result b and the answer c; beside them another answer d
    0 1 2 3 4 5 6 7 8 3      positions follow the path, and each token attends to those on its path only
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress

from worker.types import NEW_ROOT, AnswerPiece, Branch, CallTokens, Node, Rollout, TrainingSequence


def sequence_of(
    rollout: Rollout, advantages_T: Sequence[float], weight: float, *, learns_forced: bool = False
) -> TrainingSequence:
    """Return what is trained of an answer or an episode.

    Args:
        advantages_T: one for each of `rollout.output_ids_T`.
        learns_forced: train on forced tokens too.
    """
    if not rollout.nodes:
        return TrainingSequence(
            rollout.output_ids_T,
            rollout.logprobs_T,
            tuple(advantages_T),
            weight,
            rollout.grammar_start,
            0 if learns_forced else rollout.forced,
            teacher_T=rollout.teacher_T,
            key=id(rollout),
        )
    ids: list[int] = []
    is_output: list[bool] = []
    learned: list[bool] = []
    calls: list[CallTokens] = []
    for node in rollout.nodes:
        answer, context = node.answer, len(node.context_ids)
        output = len(answer.output_ids_T)
        ids += (*node.context_ids, *answer.output_ids_T)
        is_output += (*(False,) * context, *(True,) * output)
        learned += (*(False,) * context, *((True,) * output if learns_forced else answer.is_sampled_T))
        calls.append(CallTokens(len(ids) - output, len(ids), answer.grammar_start))

    def spread(values_T: Sequence[float]) -> tuple[float, ...]:
        values = iter(values_T)
        return tuple(next(values) if own else 0.0 for own in is_output)

    return TrainingSequence(
        tuple(ids),
        spread(rollout.logprobs_T),
        spread(advantages_T),
        weight,
        learned_T=tuple(learned),
        teacher_T=spread(rollout.teacher_T) if rollout.teacher_T else (),
        key=id(rollout),
        branches=_branches(rollout.nodes),
        calls=tuple(calls),
    )


def read_sequence(rollout: Rollout) -> TrainingSequence:
    """Return what a teacher reads of an answer: it finds log-probabilities of all tokens, of forced ones too."""
    return sequence_of(replace(rollout, teacher_T=()), rollout.logprobs_T, 0.0, learns_forced=True)


def _branches(nodes: Sequence[Node]) -> tuple[Branch, ...]:
    branches = [Branch(node.parent, len(node.context_ids) + len(node.answer.output_ids_T)) for node in nodes]
    return () if _is_chain(branches) else tuple(branches)


def _is_chain(branches: Sequence[Branch]) -> bool:
    return [branch.parent for branch in branches] == [None, *range(len(branches) - 1)]


@dataclass(frozen=True)
class PlacedBranch:
    """A branch in a row of the trainer. Of a sequence without branches there is one."""

    tokens: int
    inputs: range  # its tokens in the sequence, without the last of a path, which predicts nothing
    sees_prompt: bool
    position: int  # of the first token, counted from the end of the prompt if it sees the prompt
    before: (
        int | None
    )  # the input of the sequence that precedes it on its path; None: none, or the prompt's last
    # Segments are numbered depth first, so that those of a subtree follow one another, without the prompt last.
    number: int
    until: int  # the number after those of its subtree, which see it


def placed(sequence: TrainingSequence) -> list[PlacedBranch]:
    """Return the branches of a sequence in the order of its tokens."""
    branches = sequence.branches or (Branch(None, len(sequence.output_ids_T)),)
    number, until = _depth_first(branches)
    parents = {branch.parent for branch in branches}
    found: list[PlacedBranch] = []
    last: list[int | None] = []  # of each branch, the last input on its path
    token, read = 0, 0
    for at, branch in enumerate(branches):
        inputs = range(token, token + max(branch.tokens - (at not in parents), 0))
        sees_prompt, position, before = branch.parent is None, 0, None
        if branch.parent is not None and branch.parent != NEW_ROOT:
            parent = found[branch.parent]
            sees_prompt, position = parent.sees_prompt, parent.position + parent.tokens
            before = last[branch.parent]
        last.append(read + len(inputs) - 1 if inputs else before)
        found.append(
            PlacedBranch(branch.tokens, inputs, sees_prompt, position, before, number[at], until[at])
        )
        token, read = token + branch.tokens, read + len(inputs)
    return found


def _depth_first(branches: Sequence[Branch]) -> tuple[list[int], list[int]]:
    """Return for each branch its number, and the number after those of its subtree."""
    children: dict[int | None, list[int]] = {}
    for at, branch in enumerate(branches):
        children.setdefault(branch.parent, []).append(at)
    number, until, given = [0] * len(branches), [0] * len(branches), 0
    # Without recursion: an episode may have more calls than Python has frames.
    left = [*reversed(children.get(NEW_ROOT, [])), *reversed(children.get(None, []))]
    while left:
        at = left.pop()
        if at < 0:  # its subtree is numbered
            until[~at] = given
            continue
        number[at], given = given, given + 1
        left += [~at, *reversed(children.get(at, []))]
    return number, until


def paths(sequence: TrainingSequence) -> list[TrainingSequence]:
    """Return a sequence without branches for each path from the prompt to a leaf. Each token is learned in one of them.

    Paths that do not see the prompt have one branch, of NEW_ROOT.
    """
    return parts(sequence, 0)


def parts(sequence: TrainingSequence, room: int) -> list[TrainingSequence]:
    """Cut an episode between subtrees, if it has more than `room` tokens. Each part has the whole paths to its tokens.

    Each token is learned in one part. A part has at most `room` tokens, or one path.
    """
    if not sequence.branches or sequence.read_tokens <= room:
        return [sequence]
    return [piece for piece in _pieces(sequence, room) if any(piece.learned_T)]


def _pieces(sequence: TrainingSequence, room: int) -> Iterator[TrainingSequence]:
    branches = sequence.branches
    number, _ = _depth_first(branches)
    parents = {branch.parent for branch in branches}
    leaves = sorted((at for at in range(len(branches)) if at not in parents), key=lambda at: number[at])
    learned: set[int] = set()  # the branches of the pieces before
    included: set[int] = set()  # the branches of this piece, which has `ends` leaves
    ends = 0
    for leaf in leaves:
        path = {leaf, *_ancestors(branches, leaf)}
        if included and sum(branches[at].tokens for at in included | path) - ends - 1 > room:
            yield _piece(sequence, included, learned)
            learned |= included
            included, ends = set(), 0
        included, ends = included | path, ends + 1
    yield _piece(sequence, included, learned)


def _ancestors(branches: Sequence[Branch], at: int) -> Iterator[int]:
    while (parent := branches[at].parent) is not None and parent != NEW_ROOT:
        yield parent
        at = parent


def _piece(sequence: TrainingSequence, included: set[int], learned: set[int]) -> TrainingSequence:
    """The tokens of the branches `included`. Those of the branches `learned` are learned in another piece."""
    kept = sorted(included)
    renumbered = {at: number for number, at in enumerate(kept)}
    branches = tuple(
        Branch(renumbered.get(parent, parent), tokens)  # type: ignore[arg-type]  # None and NEW_ROOT stay
        for parent, tokens in ((sequence.branches[at].parent, sequence.branches[at].tokens) for at in kept)
    )
    ends = list(accumulate(branch.tokens for branch in sequence.branches))
    of_whole = [
        (place, at in learned)
        for at in kept
        for place in range(ends[at] - sequence.branches[at].tokens, ends[at])
    ]
    is_trained_T = sequence.is_trained_T
    numbers = list(accumulate(is_trained_T, initial=0))
    learned_T = tuple(is_trained_T[place] and not elsewhere for place, elsewhere in of_whole)
    places = tuple(numbers[place] for place in compress((place for place, _ in of_whole), learned_T))
    outer = sequence.piece
    return replace(
        sequence,
        output_ids_T=tuple(sequence.output_ids_T[place] for place, _ in of_whole),
        logprobs_T=tuple(sequence.logprobs_T[place] for place, _ in of_whole),
        advantages_T=tuple(sequence.advantages_T[place] for place, _ in of_whole),
        teacher_T=tuple(sequence.teacher_T[place] for place, _ in of_whole) if sequence.teacher_T else (),
        learned_T=learned_T,
        branches=() if _is_chain(branches) else branches,
        calls=(),
        piece=AnswerPiece(sequence, places)
        if outer is None
        else AnswerPiece(outer.undivided, tuple(outer.places[place] for place in places)),
    )
