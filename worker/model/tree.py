"""Episodes with branches: from nodes to the tokens that are trained on, and parts of them. Pure functions.

An episode without branches is one sequence in which context is not learned. With branches it is a tree, and a row of
the trainer has each token once:

    p p p a a a b b c d      the answer a, then its tool result b and the answer c; beside them another answer d
    0 1 2 3 4 5 6 7 8 3      positions follow the path, and each token attends to those on its path only
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import TypeVar

from worker.branches import AnswerPiece, Branch
from worker.types import NEW_ROOT, Node, Rollout, TrainingSequence, input_tokens

Value = TypeVar("Value")


def sequence_of(
    rollout: Rollout, advantages_T: Sequence[float], weight: float, *, learns_forced: bool = False
) -> TrainingSequence:
    """Return what is trained of an answer or an episode.

    Args:
        advantages_T: one for each of `rollout.output_ids_T`.
        learns_forced: train on forced tokens too.

    Raises:
        ValueError: an episode has not as many tokens.
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
    for node in rollout.nodes:
        answer, context = node.answer, len(node.context_ids)
        output = len(answer.output_ids_T)
        ids += (*node.context_ids, *answer.output_ids_T)
        is_output += (*(False,) * context, *(True,) * output)
        learned += (*(False,) * context, *((True,) * output if learns_forced else answer.is_sampled_T))

    return TrainingSequence(
        tuple(ids),
        _spread(rollout.logprobs_T, is_output),
        _spread(advantages_T, is_output),
        weight,
        learned_T=tuple(learned),
        teacher_T=_spread(rollout.teacher_T, is_output) if rollout.teacher_T else (),
        key=id(rollout),
        branches=_branches(rollout.nodes),
    )


def _spread(values_T: Sequence[float], is_output: Sequence[bool]) -> tuple[float, ...]:
    """The values at the tokens of calls, and 0 at context."""
    if len(values_T) != sum(is_output):
        raise ValueError(f"there are {len(values_T)} values for {sum(is_output)} tokens")
    values = iter(values_T)
    return tuple(next(values) if own else 0.0 for own in is_output)


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
    # The input of the sequence that precedes it on its path; None: none, or the prompt's last.
    before: int | None
    # Segments are numbered depth first, so that those of a subtree follow one another, without the prompt last.
    number: int
    until: int  # the number after those of its subtree, which see it


def placed(sequence: TrainingSequence) -> list[PlacedBranch]:
    """Return the branches of a sequence in the order of its tokens."""
    branches = sequence.branches or (Branch(None, len(sequence.output_ids_T)),)
    number, until = _depth_first(branches)
    found: list[PlacedBranch] = []
    last: list[int | None] = []  # of each branch, the last input on its path
    token, read = 0, 0
    for at, (branch, own) in enumerate(zip(branches, input_tokens(branches), strict=True)):
        inputs = range(token, token + own)
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
    """Return a sequence for each path to a leaf on which a token is learned. Each token is learned in one of them.

    Their branches are a chain. Only those of a path of NEW_ROOT are named, which does not see the prompt.
    """
    if not sequence.branches:
        return [sequence]
    return _pieces(sequence, _leaf_paths(sequence.branches))


def parts(sequence: TrainingSequence, room: int) -> list[TrainingSequence]:
    """Cut an episode between subtrees, if it has more than `room` inputs. Each part has the whole paths to its tokens.

    Each token is learned in one part. A part has at most `room` inputs, or one path.
    """
    if not sequence.branches or sequence.read_tokens <= room:
        return [sequence]
    return _pieces(sequence, _filled(sequence.branches, room))


def row_tokens(sequence: TrainingSequence, prompt: int) -> int:
    """Return the inputs of the rows of `paths`, with the prompt of as many tokens in each row that sees it."""
    if not sequence.branches:
        return prompt + sequence.read_tokens
    branches = sequence.branches
    trained = [len(numbers) for _, numbers in _spans(sequence)]
    seen: set[int] = set()
    count = 0
    for path in _leaf_paths(branches):
        if any(trained[at] for at in path if at not in seen):
            sees_prompt = branches[path[0]].parent is None
            count += (prompt if sees_prompt else 0) + sum(branches[at].tokens for at in path) - 1
        seen.update(path)
    return count


def _leaf_paths(branches: Sequence[Branch]) -> Iterator[list[int]]:
    """Yield for each leaf, depth first, the branches from the root to it."""
    number, _ = _depth_first(branches)
    parents = {branch.parent for branch in branches}
    for leaf in sorted((at for at in range(len(branches)) if at not in parents), key=number.__getitem__):
        yield [*reversed([leaf, *_ancestors(branches, leaf)])]


def _filled(branches: Sequence[Branch], room: int) -> Iterator[list[int]]:
    """Yield the branches of each part: those of as many paths as have at most `room` inputs, or of one path."""
    tokens = input_tokens(branches)
    included: set[int] = set()
    used = 0
    for path in _leaf_paths(branches):
        added = [at for at in path if at not in included]
        more = sum(tokens[at] for at in added)
        if included and used + more > room:
            yield sorted(included)
            included, used = set(), 0
            added, more = path, sum(tokens[at] for at in path)
        included.update(added)
        used += more
    yield sorted(included)


def _ancestors(branches: Sequence[Branch], at: int) -> Iterator[int]:
    while (parent := branches[at].parent) is not None and parent != NEW_ROOT:
        yield parent
        at = parent


def _spans(sequence: TrainingSequence) -> list[tuple[slice, range]]:
    """Return for each branch its tokens, and their places among the trained tokens of the sequence."""
    ends = list(accumulate((branch.tokens for branch in sequence.branches), initial=0))
    numbers = list(accumulate(sequence.is_trained_T, initial=0))
    return [(slice(first, end), range(numbers[first], numbers[end])) for first, end in pairwise(ends)]


def _pieces(sequence: TrainingSequence, divided: Iterable[Sequence[int]]) -> list[TrainingSequence]:
    """Return for each selection of branches a sequence with their tokens, without those that learn no token.

    A branch is learned in the first piece that has it.
    """
    spans, is_trained_T, outer = _spans(sequence), sequence.is_trained_T, sequence.piece
    seen: set[int] = set()
    pieces = []
    for included in divided:
        new = [at for at in included if at not in seen]
        seen.update(new)
        places = tuple(chain.from_iterable(spans[at][1] for at in new))
        if not places:
            continue
        if outer is not None:
            places = tuple(outer.places[place] for place in places)
        undivided = sequence if outer is None else outer.undivided
        learned = set(new)
        piece = _selected(sequence, included, [spans[at][0] for at in included])
        learned_T = (
            is_trained_T[spans[at][0]] if at in learned else (False,) * sequence.branches[at].tokens
            for at in included
        )
        pieces.append(
            replace(
                piece,
                learned_T=tuple(chain.from_iterable(learned_T)),
                piece=AnswerPiece(undivided, places),
            )
        )
    return pieces


def _selected(
    sequence: TrainingSequence, included: Sequence[int], spans: Sequence[slice]
) -> TrainingSequence:
    """The tokens of the branches `included`, which are `spans` of those of the sequence."""
    renumbered = {at: number for number, at in enumerate(included)}
    branches = tuple(
        Branch(renumbered.get(parent, parent), tokens)  # type: ignore[arg-type]  # None and NEW_ROOT stay
        for parent, tokens in (
            (sequence.branches[at].parent, sequence.branches[at].tokens) for at in included
        )
    )

    def selected(values_T: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(chain.from_iterable(values_T[span] for span in spans)) if values_T else ()

    return replace(
        sequence,
        output_ids_T=selected(sequence.output_ids_T),
        logprobs_T=selected(sequence.logprobs_T),
        advantages_T=selected(sequence.advantages_T),
        teacher_T=selected(sequence.teacher_T),
        branches=() if _is_chain(branches) else branches,
    )
