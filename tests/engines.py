"""An inference engine that computes nothing."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from transformers import PreTrainedTokenizerBase

from worker.serving.engine import GenerationRequest, Token

END = 1


class ScriptedEngine:
    """An engine that says `script`, a byte a token, and remembers what it was asked."""

    context = 50
    tool_parser: str | None = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.script = "hi"
        self.asked: list[GenerationRequest] = []
        self.ended, self.lost = 0, False
        self.at_close: list[Callable[[], Awaitable[None]]] = []  # called by `close`, in this order
        self.failure: Exception | None = None

    def stop_ids(self, template: str | None) -> frozenset[int]:
        return frozenset({END})

    async def generate(self, ask: GenerationRequest) -> AsyncGenerator[Token, None]:
        self.asked.append(ask)
        try:
            ids = [*self.tokenizer.encode(self.script, add_special_tokens=False), END][: ask.max_tokens]
            for place, id in enumerate(ids):
                if self.failure:
                    raise self.failure
                last = place == len(ids) - 1
                top = ((id, -0.5),) * (ask.top_logprobs or 0)
                yield Token(id, last, None if ask.top_logprobs is None else -0.5, top)
                await asyncio.sleep(0)
        finally:
            self.ended += 1

    async def close(self) -> None:
        self.lost = True
        for do in self.at_close:
            await do()
