"""vLLM's reasoning parser for every model: by the tags that core/reasoning.py finds in the request's chat template.

vLLM's own parsers belong to families of models; here an adapter may be trained with another template than its base
model, so the tags are part of the request. They travel in `chat_template_kwargs`, which vLLM gives to its parsers in
both of its processes; templates do not see a name that they do not use.

vLLM imports it by the name that plugin.py registers, in processes that must not import what loads models.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.reasoning.abs_reasoning_parsers import ReasoningParser

from core.reasoning import Format, Switches
from worker.engine.names import THOUGHTS_FORMAT, THOUGHTS_IN_GRAMMAR
from worker.model.reasoning import Reasoning, TextParts, split_text

_TAG_WINDOW = 64  # tokens


class TaggedThoughts(ReasoningParser):  # type: ignore[misc]  # vLLM has no types
    """One request's."""

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        given = kwargs.get("chat_template_kwargs") or {}
        form = given.get(THOUGHTS_FORMAT)
        self.form = None if form is None else Format(**form)
        self.is_in_grammar = bool(given.get(THOUGHTS_IN_GRAMMAR))
        self._sent = TextParts("", "", False)

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether all that follows these tokens, a prompt's, is the answer."""
        return self.form is None or self.form.off

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        if self.form is None or self._sent.is_answering:
            return True
        new = len(list(delta_ids))
        last = list(input_ids)[-(_TAG_WINDOW + new) :]
        text = str(self.model_tokenizer.decode(last, skip_special_tokens=False))
        before = str(self.model_tokenizer.decode(last[: len(last) - new], skip_special_tokens=False))
        return text.count(self.form.end) > before.count(self.form.end)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        return input_ids

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        parts = split_text(self.form, model_output, is_whole=True)
        return parts.thought or None, parts.answer

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        parts, sent = split_text(self.form, current_text, is_whole=False), self._sent
        self._sent = parts
        thought, answer = parts.thought[len(sent.thought) :], parts.answer[len(sent.answer) :]
        return DeltaMessage(reasoning=thought or None, content=answer or None) if thought or answer else None

    def get_streaming_fallback_content(self, previous_text: str, request: Any) -> str | None:
        """The text that was held back when the answer ended."""
        return self._sent.pending or None

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        if self.form is None:
            return 0
        return Reasoning(self.form, Switches(), self.model_tokenizer).split(token_ids).thought_tokens

    def adjust_request(self, request: Any) -> Any:
        if self.is_in_grammar:
            # vLLM's name for a grammar that has the thought in it, which its own parsers set here too.
            request._grammar_from_parser = True
        return request
