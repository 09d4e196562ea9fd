"""The data types of a run. Each is frozen, created by one stage and read by the next.

Axes: `_P` prompts of the step, `_G` members of a group (answers to one prompt), `_T` tokens of one answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import chain, compress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from numpy.typing import NDArray

from core.jobs.remaining import RemainingSteps
from graders.types import Grade

if TYPE_CHECKING:  # the processes beside a run have no torch
    from torch import Tensor

    from graders.tools.episode import Episode
    from worker.branches import AnswerPiece, Branch

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """One row of the dataset: the model's prompt, and the fields for the grader."""

    line: int
    ids: tuple[int, ...]
    item: Mapping[str, Any]
    repeat: int = 0  # how often the batch of its step has the row before it, at the end of an epoch
    ask: int = 0  # the earlier requests of the user's agent for an answer to these tokens, in its episode


class Call(NamedTuple):
    name: str
    arguments: str  # JSON, unless the model has written something else


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer in OpenAI's terms. Without calls, `content` is the whole text."""

    content: str
    calls: tuple[Call, ...] = ()
    error: str = ""  # the reason why the calls in the text cannot be read
    has_short_ids: bool = False  # 9 letters and digits, which chat templates of Mistral require
    ids_seed: str = ""  # of the ids of calls in an episode; "": their seed is the answer

    def tool_calls(self, seed: str) -> tuple[dict[str, Any], ...]:
        """The calls in OpenAI's format, with ids that depend on `ids_seed`, or else `seed`, and the call's place."""
        prefix, size = ("", 9) if self.has_short_ids else ("call_", 24)
        return tuple(
            {
                "id": prefix + sha256(f"{self.ids_seed or seed}/{number}".encode()).hexdigest()[:size],
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(self.calls)
        )


@dataclass(frozen=True)
class Rollout:
    """One answer to one prompt, with the data for training: of one call of the policy, or of an episode of calls.

    With `nodes` it is an episode: `Rollout.of_nodes` makes it. Then the fields `_T` have the tokens of all calls, in
    the order of `nodes`; `forced` and `reasoning_tokens` are sums; `policy_step` is the oldest; and `text`,
    `reasoning`, `cut_thought`, `parsed` and the token that `grammar_start` counts to are those of the last call that
    has tokens.
    """

    output_ids_T: tuple[int, ...]  # ends with the stop token unless it was truncated
    logprobs_T: tuple[float, ...]  # of each sampled token, after temperature: the denominator of the ratio
    text: str  # of the final answer, without special tokens
    finish_reason: FinishReason  # of an episode: "length" if it was truncated
    reasoning: str = ""  # what a reasoning model wrote before its answer
    reasoning_tokens: int = 0
    # The index of the answer's first token. A response schema applies from here on, in sampling and in training.
    grammar_start: int = 0
    cut_thought: bool = False  # the thought has no end, so there is no answer
    # Tokens before `grammar_start` that closed a thought at its budget: they were not sampled.
    forced: int = 0
    teacher_T: tuple[float, ...] = ()  # log-probabilities under a teacher, in jobs that have one
    # With `off_policy_steps`: the steps that the policy had learned from when its batch was started.
    policy_step: int | None = None
    # With `continue_in_flight`, for each token: the steps that the policy which sampled it had learned from.
    policy_steps_T: tuple[int, ...] = ()
    parsed: ParsedAnswer | None = None  # `text` as content and calls, if the row has tools
    episode: "Episode | None" = None  # None: one call of the policy, without executed tools
    nodes: "tuple[Node, ...]" = ()  # the calls of an episode in the order of sampling; empty: one call

    @classmethod
    def of_nodes(cls, nodes: "Sequence[Node]", *, is_truncated: bool = False) -> "Rollout":
        """The episode of these calls, which are in the order of sampling.

        Args:
            is_truncated: a limit of the episode (its calls, tokens, time, or the context) ended it. An episode is also
                truncated if one of its calls is.

        Raises:
            ValueError: there is no node, or one has a parent or context that `Node` excludes.
        """
        refuse_nodes(nodes)
        answers = [node.answer for node in nodes]
        last = _last_call(nodes)
        truncated = is_truncated or any(answer.is_truncated for answer in answers)
        known = [step for answer in answers if (step := answer.oldest_policy_step) is not None]
        steps_T = tuple(chain.from_iterable(answer.known_policy_steps_T for answer in answers))
        output_ids_T = tuple(chain.from_iterable(answer.output_ids_T for answer in answers))
        before = len(output_ids_T) - len(last.output_ids_T)
        differ = len(set(steps_T)) > 1 or any(answer.policy_steps_T for answer in answers)
        return replace(
            last,
            output_ids_T=output_ids_T,
            logprobs_T=tuple(chain.from_iterable(answer.logprobs_T for answer in answers)),
            finish_reason="length" if truncated else "stop",
            reasoning_tokens=sum(answer.reasoning_tokens for answer in answers),
            grammar_start=before + last.grammar_start,
            forced=sum(answer.forced for answer in answers),
            teacher_T=tuple(chain.from_iterable(answer.teacher_T for answer in answers)),
            policy_step=min(known, default=None),
            policy_steps_T=steps_T if differ and len(steps_T) == len(output_ids_T) else (),
            nodes=tuple(nodes),
        )

    @property
    def content(self) -> str:
        """The text of the final answer without its calls, which graders read and steps refer to."""
        return self.text if self.parsed is None else self.parsed.content

    @property
    def tool_calls(self) -> tuple[dict[str, Any], ...]:
        """The calls in OpenAI's format, of an episode with their outputs."""
        if self.episode is not None:
            return tuple(use.as_row() for use in self.episode.uses)
        return () if self.parsed is None else self.parsed.tool_calls(self.text)

    @property
    def last_call(self) -> "Rollout":
        """The call that `text` is of: of an episode the last one with tokens, else the answer itself."""
        return _last_call(self.nodes) if self.nodes else self

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def is_discarded(self) -> bool:
        """Whether it is an episode in which a tool or the agent failed, so that no grader gets it."""
        return self.episode is not None and self.episode.stop == "discarded"

    @property
    def is_sampled_T(self) -> tuple[bool, ...]:
        """Which tokens of `output_ids_T` were sampled: all but the forced ones."""
        if self.nodes:
            return tuple(chain.from_iterable(node.answer.is_sampled_T for node in self.nodes))
        return _sampled_T(len(self.output_ids_T), self.grammar_start, self.forced)

    @property
    def sampled_tokens(self) -> int:
        return len(self.output_ids_T) - self.forced

    @property
    def sampled_logprobs(self) -> tuple[float, ...]:
        return tuple(compress(self.logprobs_T, self.is_sampled_T))

    @property
    def oldest_policy_step(self) -> int | None:
        """The steps that the oldest policy which sampled a token had learned from. None: not known."""
        return min(self.policy_steps_T, default=self.policy_step)

    @property
    def known_policy_steps_T(self) -> tuple[int, ...]:
        """For each token, the steps that its policy had learned from; empty if they are not known."""
        if self.policy_step is None:
            return self.policy_steps_T
        return self.policy_steps_T or (self.policy_step,) * len(self.output_ids_T)


def _sampled_T(tokens: int, grammar_start: int, forced: int) -> tuple[bool, ...]:
    """All tokens but the `forced` ones before `grammar_start`."""
    if not forced:
        return (True,) * tokens
    return (True,) * (grammar_start - forced) + (False,) * forced + (True,) * (tokens - grammar_start)


# `Node.parent` of a call that sees nothing of the prompt: another conversation, with other tools or another system
# prompt. Its `context_ids` are the whole prompt of the call.
NEW_ROOT = -1


@dataclass(frozen=True)
class Node:
    """One call of the policy in an episode, and its place in the episode's tree of tokens.

    The model has read exactly these tokens before the call: the prompt (`Prompt.ids`); then, of each node on the path
    from the prompt to the parent, `context_ids` and `answer.output_ids_T`; then the `context_ids` of this node.

        prompt ─┬─ 0 (parent None): answer "call f"  ─── 1 (parent 0): context = result of f, answer "done"
                └─ 2 (parent None): another answer to the prompt, which sees neither 0 nor 1

    `context_ids` were not sampled: the stop token of an answer that was cut, the rest of its message, tool results, the
    user's messages and the start of the next answer. They have no part in losses, lengths, entropy or KL.
    `answer` is the call alone, as a sampler returns it: log-probabilities, finish reason, thought, `grammar_start`,
    forced tokens and policy steps. All of it counts from the call's first token, and its own `nodes` are empty.

    An episode without branches is a chain: the parent of node k is k - 1, and that of node 0 is None. Two calls after
    the same context need a node for that context, so that it is there once: its answer is NO_ANSWER.
    """

    parent: int | None  # the index of an earlier node in `Rollout.nodes`; None: the prompt; NEW_ROOT: nothing
    context_ids: tuple[int, ...]
    answer: Rollout


NO_ANSWER = Rollout((), (), "", "stop")


def _last_call(nodes: Sequence[Node]) -> Rollout:
    """The newest answer with tokens: nodes of context alone have no text."""
    return next((node.answer for node in reversed(nodes) if node.answer.output_ids_T), nodes[-1].answer)


def refuse_nodes(nodes: Sequence[Node]) -> None:
    """Raise ValueError for nodes that are not an episode."""
    if not nodes:
        raise ValueError("an episode has at least one node")
    for number, node in enumerate(nodes):
        if node.parent not in (None, NEW_ROOT) and not 0 <= node.parent < number:
            raise ValueError(
                f"node {number} has the parent {node.parent}: it must be None, NEW_ROOT or an earlier node"
            )
        if node.parent == NEW_ROOT and not node.context_ids:
            raise ValueError(f"node {number} has no context: that of a node of NEW_ROOT is its whole prompt")
        if node.answer.nodes:
            raise ValueError(f"the answer of node {number} is an episode: it must be one call")


@dataclass(frozen=True)
class GraderPart:
    """A grader that the metrics show by name: one inside a multi or a select, or the job's only one."""

    key: str | None  # in the sub-grades of a grade; None: the grade itself
    name: str
    type: str
    model: str | None = None  # of a judge
    compares_numbers: bool = False  # final answers as mathematics, itself or a grader inside
    weight: float | None = None  # in the weighted sum of a multi; None: the score is no weighted sum


@dataclass(frozen=True)
class Group:
    """The graded answers to one prompt. A reward of None means an ungraded answer without a gradient."""

    prompt: Prompt
    rollouts_G: tuple[Rollout, ...]
    grades_G: tuple[Grade, ...]
    shadow_G: tuple[Grade, ...] = ()  # of a validation, if the job has a shadow grader

    @property
    def rewards_G(self) -> list[float | None]:
        return [grade.score for grade in self.grades_G]

    @property
    def has_teacher(self) -> bool:
        """Whether its tokens learn from a teacher, and not from the differences of the rewards."""
        return any(rollout.teacher_T for rollout in self.rollouts_G)


@dataclass(frozen=True, eq=False)
class TopTokens:
    """The tokens that a teacher finds likeliest at each trained token of an answer, and their log-probabilities."""

    ids: "Tensor"  # int64 [T, k]
    logprobs: "Tensor"  # float32 [T, k], at temperature 1


def input_tokens(branches: Sequence["Branch"]) -> list[int]:
    """Of each branch, the tokens that are inputs: all but the last one of a path, which predicts nothing."""
    parents = {branch.parent for branch in branches}
    return [max(branch.tokens - (number not in parents), 0) for number, branch in enumerate(branches)]


@dataclass(frozen=True)
class TrainingSequence:
    """One answer as the trainer sees it: its tokens, their advantages, its weight in the loss.

    The tokens of an episode are those of its nodes one behind the other, context and sampled ones. Context is not in
    `learned_T`, and its numbers are 0.
    """

    output_ids_T: tuple[int, ...]
    logprobs_T: tuple[float, ...]
    advantages_T: tuple[float, ...]  # with rewards of tokens: the answer's reward, at each token
    weight: float  # of each token; the weights of a step contain the whole normalisation of its loss
    grammar_start: int = 0  # as in Rollout
    forced: int = 0  # as in Rollout: these tokens are not trained on
    learned_T: tuple[bool, ...] = ()  # which tokens are trained on; empty: all but the forced ones
    # As in Rollout. Their advantages follow from it, not from `advantages_T`.
    teacher_T: tuple[float, ...] = ()
    # Of rows of a reward model, for each trained token: the score, the label of the step, or the margin of the pair.
    scores: tuple[float, ...] = ()
    top: TopTokens | None = None  # of a teacher on a server, from which the answer learns probabilities
    key: "AnswerKey" = field(default=0, compare=False)  # of the Rollout
    branches: "tuple[Branch, ...]" = ()  # of an episode with branches; empty: each token sees all before it
    piece: "AnswerPiece | None" = field(default=None, compare=False)  # None: it is whole

    @property
    def is_trained_T(self) -> tuple[bool, ...]:
        """Which tokens are trained on."""
        return self.learned_T or _sampled_T(len(self.output_ids_T), self.grammar_start, self.forced)

    @property
    def trained_tokens(self) -> int:
        return sum(self.learned_T) if self.learned_T else len(self.output_ids_T) - self.forced

    @property
    def read_tokens(self) -> int:
        """Its tokens that are inputs: see `input_tokens`."""
        if not self.branches:
            return max(len(self.output_ids_T) - 1, 0)
        return sum(input_tokens(self.branches))


@dataclass(frozen=True)
class Pack:
    """A prompt, and its answers with signal."""

    prompt_ids: tuple[int, ...]
    sequences: tuple[TrainingSequence, ...]

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + sum(answer.read_tokens for answer in self.sequences)


@dataclass(frozen=True)
class TokenValues:
    """Log-probabilities and advantages that the trainer computed with, for each sampled token of an answer.

    `logprobs_T` is of the policy before the update, where the sampler's are compared with them.
    """

    logprobs_T: Sequence[float] | NDArray[Any]
    advantages_T: Sequence[float] | NDArray[Any]


AnswerKey = int
"""The `id` of a Rollout. Equal answers have other advantages if the grader or the rest of the group differs."""


@dataclass(frozen=True)
class UpdateMetrics:
    """Statistics of one update. Means are over the trained tokens; None if no token was trained.

    With several updates a batch, `loss`, `grad_norm`, `clip_fraction` and `kl` are means over them, and `entropy`
    and the gap are those of the policy that sampled.
    """

    loss: float
    trained_sequences: int
    trained_tokens: int  # once for each update
    dropped_sequences: int  # carried no signal, so they were not computed
    grad_norm: float | None
    clip_fraction: float | None
    kl: float | None  # k3 to the reference
    entropy: float | None  # nats
    # How far the sampler's log-probabilities are from the trainer's, for the same weights.
    logprob_gap: float | None  # mean |difference|
    logprob_gap_max: float | None = None  # largest |difference|
    logprob_gap_k1: float | None = None  # KL(sampler || trainer), by both estimators
    logprob_gap_k3: float | None = None
    # The effective sample size of the weights pi_trainer / pi_sampler, 1 at best.
    logprob_gap_ess: float | None = None
    masked_fraction: float | None = None  # of the tokens, by `importance`
    teaching_masked_fraction: float | None = None  # of those with an advantage
    kl_weight: float | None = None  # of the penalty in this step; None: there is none
    value_loss: float | None = None  # with a value head, like the next
    explained_variance: float | None = None  # of the returns by the values before the update
    skipped: bool = False  # a gradient was not finite, so the step was not taken
    # Of the step trust region (worker/training/trust_region.py); None: the weights took no step.
    learning_rate: float | None = None  # of the last update
    # The largest KL(before || after) of an accepted update; None: not measured.
    update_kl: float | None = None
    update_retries: int | None = None
    rejected_updates: int | None = None
    unmeasured_updates: int | None = None
    # Of the answers that were computed; empty unless the trainer keeps them. Not a metric.
    tokens: Mapping[AnswerKey, TokenValues] = field(default_factory=dict)


@dataclass(frozen=True)
class AnswerSignal:
    """The training signal of one answer."""

    # Of its first token; with outcome rewards of all tokens; under a teacher their mean. None: not trained on, or each
    # token has its own, which depends on the policy's log-probabilities.
    advantage: float | None
    steps_J: tuple[float, ...]  # under process supervision: of the tokens of each step
    is_trained: bool


@dataclass(frozen=True)
class GradedStep:
    """One split of one step, ready to be stored."""

    split: Literal["train", "valid"]
    groups_P: Sequence[Group]
    signals_PG: Sequence[Sequence[AnswerSignal]] | None = (
        None  # what the update learned from; None: no update
    )
    own: int | None = None  # groups from this index on were resampled; None: none were
    tokens: Mapping[AnswerKey, TokenValues] = field(default_factory=dict)  # what the update computed with


RowScores = Sequence[float | None]
"""One score for each row of the validation file, in its order; None: no answer to the row could be graded."""


@dataclass(frozen=True)
class Finding:
    """A rule that applies to the recorded steps, with the message to the user and its numbers."""

    rule: str
    message: str
    data: Mapping[str, Any]

    def event_data(self, step: int) -> dict[str, Any]:
        return {"step": step, "rule": self.rule, **self.data}


@dataclass(frozen=True)
class Stop:
    """A reason to stop early: a sentence and its numbers."""

    message: str
    evidence: Mapping[str, Any]


@dataclass(frozen=True)
class Pause:
    """A pause because of an alarm: a sentence for the user, and its data."""

    message: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Rollback:
    """The return of a job to an earlier checkpoint, after a collapse or an alarm, with the message to the user."""

    step: int  # of the checkpoint; 0: the model that the job started from
    share: str  # of the learning rate, in words
    learning_rates: Mapping[str, float]  # by hyperparameter
    evidence: str  # a sentence for the user
    data: Mapping[str, Any]  # its numbers, and the step at which it was found
    rule: str  # in its event: a job is returned once for each


# How an attempt ended. interrupted: another attempt resumes the same run.
Ended = Literal["succeeded", "failed", "interrupted"]


@dataclass(frozen=True)
class Schedule:
    """The steps after which a run validates its policy and saves a checkpoint. The last step has both."""

    total_steps: int
    validate_every: int | None  # on all validation rows; None: there are none
    partial_every: int | None = None  # on some of them, with a checkpoint; None: never
    epoch_steps: int | None = None  # the checkpoint of each epoch is published; None: epochs do not matter

    def is_validated(self, step: int) -> bool:
        every = self.validate_every
        return every is not None and (step % every == 0 or step == self.total_steps)

    def is_partly_validated(self, step: int) -> bool:
        every = self.partial_every
        if self.validate_every is None or every is None or step == 0:
            return False
        return step % every == 0 or step == self.total_steps

    def is_measured(self, step: int) -> bool:
        return self.is_validated(step) or self.is_partly_validated(step)

    def ends_epoch(self, step: int) -> bool:
        return self.epoch_steps is not None and step % self.epoch_steps == 0

    def is_saved(self, step: int) -> bool:
        every = self.partial_every
        return self.is_validated(step) or self.ends_epoch(step) or (every is not None and step % every == 0)

    def remaining(self, step: int, *, is_last: bool = False) -> RemainingSteps:
        """Count the steps after this one, with and without a validation of all rows."""
        if is_last:
            return RemainingSteps(0, 0, False)
        left = range(step + 1, self.total_steps + 1)
        validated = sum(map(self.is_validated, left))
        return RemainingSteps(len(left) - validated, validated, self.is_validated(step + 1))
