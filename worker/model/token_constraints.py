"""Which tokens may come next: a response schema after the thought, and a budget of the thought.

Within a thought every token may come. The schema applies from the first token of the answer, so that a job with a
schema does not teach the model to stop reasoning. A model that opens its thoughts itself may begin with its start tag
or with what the schema allows. A thought that has used up its budget is closed by force: these tokens were not
sampled, so the trainer leaves them out.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from llguidance import LLMatcher
from torch import Tensor

from worker.model.json_schema import Vocabulary, check, every_token, fill, masked
from worker.model.json_schema import take as take_token
from worker.model.reasoning import AnswerPart, Reasoning
from worker.types import FinishReason, Rollout, TrainingSequence

if TYPE_CHECKING:
    from worker.model.policy import Policy


class AnswerLimits(Protocol):
    """What answers are limited to."""

    @property
    def response_schema(self) -> str: ...
    @property
    def thinking_budget(self) -> int | None: ...


@dataclass(frozen=True)
class Bounds:
    """Implements Limits."""

    response_schema: str
    thinking_budget: int | None


class UnsupportedTags(ValueError):
    """The sampler does not support a schema or a budget with the tags of this model."""


class SteeredModel(Protocol):
    """The properties of a policy or a served model on which the constraints depend."""

    @property
    def vocabulary(self) -> Vocabulary: ...
    @property
    def reasoning(self) -> Reasoning | None: ...


@dataclass(frozen=True)
class RequestedModel:
    """A served model: the chat template, and so the reasoning, may differ by request."""

    vocabulary: Vocabulary
    reasoning: Reasoning | None


class TokenConstraints:
    """What may come next in one answer."""

    def __init__(self, model: SteeredModel, budget: int | None, matcher: LLMatcher | None) -> None:
        self.words = model.vocabulary.size
        self._budget, self._matcher = budget, matcher
        self._place = None if model.reasoning is None else AnswerPart(model.reasoning)

    @classmethod
    def of(cls, model: SteeredModel, limits: AnswerLimits, rows: int) -> Sequence[TokenConstraints | None]:
        """For each of `rows` answers: None if every token may always come."""
        budget = limits.thinking_budget
        if not limits.response_schema and (budget is None or model.reasoning is None):
            return [None] * rows
        first = model.vocabulary.start(limits.response_schema) if limits.response_schema else None
        matchers = [first, *(None if first is None else first.deep_copy() for _ in range(rows - 1))]
        return [cls(model, budget, matcher) for matcher in matchers]

    def limit(self, words: Tensor, at: int) -> bool:
        """Forbid in row `at` of the words what must not come next. Returns whether that is anything.

        Raises:
            SchemaTooLarge: that cannot be said.
        """
        place = self._place
        if place is not None and place.at == "thought":
            if self._budget is None or place.thinking < self._budget:
                return False
            only(words, at, place.reasoning.closing_ids[place.thinking - self._budget])
            return True
        if self._matcher is None:
            return False
        if place is not None and place.at == "undecided" and place.ids:
            only(words, at, place.reasoning.start_ids[len(place.ids)])
            return True
        fill(words, at, self._matcher)
        check(self._matcher)
        if place is not None and place.at == "undecided":
            add(words, at, place.reasoning.start_ids[0])
        return True

    def take(self, token: int) -> None:
        """The answer continues with a token that `limit` left it. Raises SchemaTooLarge."""
        place = self._place
        before = place.at if place is not None else "answer"
        if place is not None:
            place.take(token)
        # An answer without a thought begins with its first token.
        begins = before == "undecided" and place is not None and place.at == "answer"
        if self._matcher is not None and (before == "answer" or begins):
            take_token(self._matcher, token)


def constrain(
    logits_RV: Tensor, constraints_R: Sequence[TokenConstraints | None]
) -> tuple[Tensor, dict[int, Exception]]:
    """The logits with every token that must not come next at -inf, and the rows of which that cannot be said."""
    constrained = [(at, row) for at, row in enumerate(constraints_R) if row is not None]
    failed: dict[int, Exception] = {}
    if not constrained:
        return logits_RV, failed
    words = every_token(len(logits_RV), constrained[0][1].words)
    limited = False
    for at, row in constrained:
        try:
            limited = row.limit(words, at) or limited
        except Exception as cause:
            failed[at] = cause
            words[at] = -1
    return masked(logits_RV, words.to(logits_RV.device)) if limited else logits_RV, failed


def take(
    constraints_R: Sequence[TokenConstraints | None], token_R: Tensor, but: Container[int]
) -> dict[int, Exception]:
    """Continue each answer with its token, apart from the rows in `but`. Returns the rows that fail."""
    constrained = [(at, one) for at, one in enumerate(constraints_R) if one is not None and at not in but]
    failed: dict[int, Exception] = {}
    tokens = token_R.tolist() if constrained else []
    for at, row in constrained:
        try:
            row.take(tokens[at])
        except Exception as cause:
            failed[at] = cause
    return failed


def only(words: Tensor, at: int, token: int) -> None:
    """Allow this token alone."""
    words[at] = 0
    add(words, at, token)


def add(words: Tensor, at: int, token: int) -> None:
    bit = 1 << (token % 32)
    words[at, token // 32] |= bit - (1 << 32) if bit >> 31 else bit  # the words are signed


def allowed(model: SteeredModel, response_schema: str, answer: TrainingSequence) -> Tensor:
    """Bits [trained tokens, words] of the tokens that could have stood in place of each trained token, as
    `TokenConstraints` masks them, of an answer that is one call: jobs with tools have no response format.

    Raises:
        SchemaTooLarge: as the sampler did, or should have.
    """
    ids, start, reasoning = answer.output_ids_T, answer.grammar_start, model.reasoning
    words = every_token(len(ids), model.vocabulary.size)
    if start < len(ids):
        words[start:] = model.vocabulary.allowed(response_schema, ids[start:])
    if reasoning is not None and not (reasoning.form.opened or reasoning.form.off):
        if start:
            words[:1] = model.vocabulary.first(response_schema)
            for at, token in enumerate(reasoning.start_ids[1:start], start=1):
                only(words, at, token)
        add(words, 0, reasoning.start_ids[0])
    return words[torch.tensor(answer.is_trained_T)]


def rollout_of(
    policy: Policy, ids_T: Sequence[int], logprobs_T: Sequence[float], limits: AnswerLimits
) -> Rollout:
    """The rollout of a sampled answer."""
    reason: FinishReason = "stop" if ids_T[-1] in policy.stop_ids else "length"
    if policy.reasoning is None:
        return Rollout(tuple(ids_T), tuple(logprobs_T), policy.text(ids_T), reason)
    parts = policy.reasoning.split(ids_T, budget=limits.thinking_budget)
    return Rollout(
        tuple(ids_T),
        tuple(logprobs_T),
        parts.text,
        reason,
        reasoning=parts.thought,
        reasoning_tokens=parts.thought_tokens,
        grammar_start=parts.answer_start,
        cut_thought=parts.is_cut,
        forced=parts.forced,
    )


def grammar_of(reasoning: Reasoning | None, limits: AnswerLimits) -> str:
    """The same limits as a grammar for vLLM's llguidance backend; "" if its own JSON schema mode, or nothing, does.

    vLLM's reasoning parsers would wait for an end tag in answers without a thought, and never apply the schema.

    Raises:
        UnsupportedTags: the end tag is not one token of the tokenizer.
    """
    budget = limits.thinking_budget
    if reasoning is None or reasoning.form.off or not (limits.response_schema or budget is not None):
        return ""
    if len(reasoning.end_ids) != 1 or reasoning.closing_ids != reasoning.end_ids:
        raise UnsupportedTags(
            f"vLLM cannot apply response_format or thinking_budget after '{reasoning.form.end}', because it is not "
            "one token of this model's tokenizer. Use the transformers sampler."
        )
    [end] = reasoning.end_ids
    # In llguidance's syntax: any token but the end tag.
    thought = f"<[^{end}]>" + ("*" if budget is None else f"{{0,{budget}}}") + f" <[{end}]>"
    answer = f"%json {limits.response_schema}" if limits.response_schema else "<[*]>*"
    if reasoning.form.opened:
        return f"start: {thought} answer\nanswer: {answer}"
    start = " ".join(f"<[{token}]>" for token in reasoning.start_ids)
    if limits.response_schema:
        return f"start: ({start} {thought})? answer\nanswer: {answer}"
    return f"start: {start} {thought} answer | <[^{reasoning.start_ids[0]}]> answer\nanswer: {answer}"
