"""score_model and label_model: prompt a judge model with a response schema and parse its verdict."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from graders.judge.judges import Judge, JudgeFailed, JudgeReply, Message
from graders.template import RenderError, Template, quoted
from graders.types import ErrorKind, Grade, Item, JudgeSample, Sample, is_score

_STEPS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"description": {"type": "string"}, "conclusion": {"type": "string"}},
        "required": ["description", "conclusion"],
        "additionalProperties": False,
    },
}

# Characters of the prompt, and of the reply, that a grade keeps. A prompt may have millions, most of which are those of
# the item and its sample.
MAX_SHOWN = 64_000
_LEFT_OUT = re.compile(r"… \((\d+) more characters\)\Z")


@dataclass(frozen=True)
class TemplatePart:
    """One part of a message: a template, and the format of the rendered text in the request."""

    template: Template
    shape: Callable[[str], Any]


@dataclass(frozen=True)
class PromptTemplate:
    """A list of messages that contain templates."""

    messages: tuple[tuple[str, tuple[TemplatePart, ...]], ...]

    def render(self, sample: Sample, item: Item) -> list[Message]:
        """Render the messages. Raises RenderError if a referenced value is missing."""
        rendered: list[Message] = []
        for role, parts in self.messages:
            content = [part.shape(part.template.render(sample, item)) for part in parts]
            text = content[0].get("text") if len(content) == 1 else None
            # Some servers reject "developer", and others treat it as "system".
            role = "system" if role == "developer" else role
            rendered.append({"role": role, "content": content if text is None else text})
        return rendered


@dataclass(frozen=True)
class ScoreModel:
    """The score is the judge model's number, clamped to the range."""

    name: str
    judge: Judge
    model: str
    prompt: PromptTemplate
    sampling: Mapping[str, Any]
    low: float = 0.0
    high: float = 1.0
    type: ClassVar[str] = "score_model"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        return await _ask(self, {"type": "number"}, self._verdict, sample, item)

    def _verdict(self, result: Any) -> float | None:
        if isinstance(result, bool) or not isinstance(result, (int, float)):
            return None
        try:
            number = float(result)
        except OverflowError:
            return None
        if not math.isfinite(number):
            return None
        score = min(self.high, max(self.low, number))
        return score if is_score(score) else None


@dataclass(frozen=True)
class LabelModel:
    """The score is 1 if the judge model's label is a passing one, else 0. Unknown labels leave the sample ungraded."""

    name: str
    judge: Judge
    model: str
    prompt: PromptTemplate
    sampling: Mapping[str, Any]
    labels: Sequence[str]
    passing: frozenset[str]
    type: ClassVar[str] = "label_model"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        return await _ask(self, {"type": "string", "enum": list(self.labels)}, self._verdict, sample, item)

    def _verdict(self, result: Any) -> float | None:
        return float(result in self.passing) if isinstance(result, str) and result in self.labels else None


async def _ask(
    grader: ScoreModel | LabelModel,
    result: Mapping[str, Any],
    verdict: Callable[[Any], float | None],
    sample: Sample,
    item: Item,
) -> Grade:
    schema = {
        "type": "object",
        "properties": {
            "steps": _STEPS,
            "result": result,
        },  # steps first, so that the model reasons before the verdict
        "required": ["steps", "result"],
        "additionalProperties": False,
    }
    try:
        messages = grader.prompt.render(sample, item)
    except RenderError as absent:
        return Grade(None, str(absent), absent.kind)
    asked = JudgeSample(grader.model, _clipped_messages(messages), grader.sampling)
    try:
        reply = await grader.judge.complete(grader.model, messages, schema=schema, sampling=grader.sampling)
    except JudgeFailed as failed:
        return Grade(None, str(failed), failed.kind, judge=replace(asked, error=str(failed)))
    output = clipped(reply.text if reply.refusal is None else reply.refusal, MAX_SHOWN)
    answered = replace(asked, output=output, finish_reason=reply.finish_reason, usage=reply.usage)
    return replace(_read(grader.model, reply, verdict), usage={grader.model: reply.usage}, judge=answered)


def _clipped_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """The texts of the messages. Images and audio, which may have megabytes, are named only."""
    share = MAX_SHOWN // max(1, len(messages))
    shown: list[dict[str, str]] = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        texts = (part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in parts)
        shown.append({"role": message["role"], "content": clipped("\n".join(texts), share)})
    return shown


def clipped(text: str, most: int) -> str:
    """The first `most` characters, and how many more there were, including those that were left out before."""
    before = _LEFT_OUT.search(text)
    shown, left_out = (text[: before.start()], int(before[1])) if before else (text, 0)
    if len(shown) <= most:
        return text
    return f"{shown[:most]}… ({len(shown) - most + left_out} more characters)"


def _read(model: str, reply: JudgeReply, verdict: Callable[[Any], float | None]) -> Grade:
    if reply.refusal is not None:
        return Grade(None, f"{model} refused: {quoted(reply.refusal)}", ErrorKind.model_grader_refusal_error)
    if reply.finish_reason == "length":
        reason = f"{model} ran out of tokens before its verdict"
        return Grade(None, reason, ErrorKind.model_grader_exceeded_max_tokens_error)
    try:
        answer = json.loads(reply.text)
    except (ValueError, RecursionError):
        answer = None
    said = answer.get("result") if isinstance(answer, dict) else None
    score = verdict(said)
    if score is None:
        reason = f"no verdict in the answer of {model}: {quoted(reply.text)}"
        return Grade(None, reason, ErrorKind.model_grader_parse_error)
    return Grade(score, f"{model} says {said!r}{_last_conclusion(answer)}")


def _last_conclusion(answer: Mapping[str, Any]) -> str:
    steps = answer.get("steps")
    last = steps[-1] if isinstance(steps, list) and steps else None
    conclusion = last.get("conclusion") if isinstance(last, dict) else None
    return f": {quoted(conclusion)}" if isinstance(conclusion, str) else ""
