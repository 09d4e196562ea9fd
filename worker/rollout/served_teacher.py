"""A teacher on an OpenAI-compatible server: it reads the tokens of an answer by a completion that echoes them.

`POST /completions` with the tokens as the prompt, `echo` and `logprobs` returns the log-probability of each of them.
vLLM and other servers of open models have this; OpenAI's own does not.
"""

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
from transformers import PreTrainedTokenizerBase

from core.outbound.http import trusted_client
from graders.calls import CallRetryPolicy, NoAnswer, RateLimit, Reply, post
from graders.judge.judges import JudgeModel
from graders.template import quoted
from worker.model.teachers import PARAM
from worker.refusals import ModelUnavailable, UserMistake
from worker.types import Prompt, Rollout

# Of a request that fails: about a minute in all.
RETRIES = 7

# Of an answer: about 100 bytes for each token, of which a sequence has up to 131072.
MAX_BYTES = 32_000_000

# Lower log-probabilities count as this: vLLM's stand-in for minus infinity. Sums of much larger ones overflow.
MIN_LOGPROB = -9999.0

# Tokens by whose text the two vocabularies are compared.
COMPARED = 128


@dataclass(frozen=True)
class Echo:
    """The tokens of a prompt as a server echoes them, one entry for each."""

    texts_T: tuple[str, ...]
    logprobs_T: tuple[
        float, ...
    ]  # nats, at temperature 1; that of the first token has no condition and is nan


@dataclass
class ServedTeacher:
    """Implements Teacher by a model on a server. Its log-probabilities are those at temperature 1."""

    name: str
    server: JudgeModel
    beat: Callable[[], None] = lambda: None
    # A server that accepts requests in silence would hold the worker for an hour if each retry waited for it.
    patience: CallRetryPolicy = field(
        default_factory=lambda: CallRetryPolicy(retries=RETRIES, retries_after_silence=1)
    )

    def logprobs(
        self, answers_P: Sequence[tuple[Prompt, Sequence[Rollout]]], temperature: float
    ) -> list[list[tuple[float, ...]]]:
        """See Teacher.

        Raises:
            ValueError: the temperature is not 1.
            ModelUnavailable: the server does not answer.
            UserMistake: it refuses a sequence, or its answer has no log-probabilities of the prompt.
        """
        if temperature != 1:
            raise ValueError(f"a server gives log-probabilities at temperature 1, not {temperature}")
        sequences = [
            (*prompt.ids, *rollout.output_ids_T) for prompt, rollouts_G in answers_P for rollout in rollouts_G
        ]
        echoes = iter(self._read_all(sequences))
        return [
            [next(echoes).logprobs_T[len(prompt.ids) :] for _ in rollouts_G]
            for prompt, rollouts_G in answers_P
        ]

    def refuse_other_tokens(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Compare the texts of tokens from all over the student's vocabulary with those that the server gives them.

        Raises:
            UserMistake: they differ, or the server gives no log-probabilities of a prompt.
            ModelUnavailable: the server does not answer.
        """
        expected = legible_tokens(tokenizer, COMPARED)
        [echo] = self._read_all([tuple(expected)])
        for (token, own), theirs in zip(expected.items(), echo.texts_T, strict=True):
            # A server names a token by its id if it was started so; and tokenizers differ in what they do with the
            # space before a word when they decode it alone.
            if theirs.strip() not in (own.strip(), f"token_id:{token}"):
                raise UserMistake(
                    "invalid_value",
                    f"The teacher '{self.name}' has another tokenizer than the student: token {token} is {quoted(own)} "
                    f"to the student and {quoted(theirs)} to the teacher. A teacher needs the same vocabulary.",
                    PARAM,
                )

    def _read_all(self, sequences: Sequence[tuple[int, ...]]) -> list[Echo]:
        # In a thread, because the caller's may have a running event loop.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self._echoes(sequences)).result()

    async def _echoes(self, sequences: Sequence[tuple[int, ...]]) -> list[Echo]:
        slots = asyncio.Semaphore(self.server.max_concurrency)
        pace = RateLimit(self.server.requests_per_second, self.patience.sleep, time.monotonic)

        async def ask(client: httpx.AsyncClient, ids_T: tuple[int, ...]) -> Echo:
            async with slots:
                echo = await self._echo(client, pace, ids_T)
            self.beat()
            return echo

        async with trusted_client() as client:
            asking = [asyncio.ensure_future(ask(client, ids_T)) for ids_T in sequences]
            try:
                return list(await asyncio.gather(*asking))
            finally:
                for one in asking:
                    one.cancel()
                await asyncio.gather(*asking, return_exceptions=True)

    async def _echo(self, client: httpx.AsyncClient, pace: RateLimit, ids_T: tuple[int, ...]) -> Echo:
        server = self.server
        asked = {
            "model": server.served_as or self.name,
            "prompt": list(ids_T),
            "echo": True,
            "logprobs": 1,
            "max_tokens": 1,  # not every server takes 0
            "temperature": 0,
        }
        headers = {"authorization": f"Bearer {server.api_key}"} if server.api_key else {}
        try:
            reply = await post(
                client,
                server.base_url.rstrip("/") + "/completions",
                json.dumps(asked).encode(),
                headers,
                patience=self.patience,
                pace=pace,
                timeout_s=server.timeout_s,
                max_bytes=MAX_BYTES,
            )
        except NoAnswer as silence:
            raise ModelUnavailable(f"The teacher '{self.name}' does not answer: {silence}") from None
        if reply.status == 429 or reply.status >= 500:
            raise ModelUnavailable(f"The teacher '{self.name}' does not answer: {_said(reply)}")
        if not reply.ok:
            raise UserMistake(
                "teacher_unusable",
                f"The server of the teacher '{self.name}' refuses {len(ids_T)} tokens: {_said(reply)}",
                PARAM,
            )
        try:
            return _read(json.loads(reply.text), len(ids_T))
        except (ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError) as cause:
            raise UserMistake(
                "teacher_unusable",
                f"The server of the teacher '{self.name}' gives no log-probabilities of a prompt ({cause}). A teacher "
                "needs a server whose POST /completions takes tokens with `echo` and `logprobs`, as vLLM's does.",
                PARAM,
            ) from cause


def legible_tokens(tokenizer: PreTrainedTokenizerBase, most: int) -> dict[int, str]:
    """Up to `most` tokens that are plain text alone, evenly spaced over the vocabulary, with their texts."""
    special = set(tokenizer.all_special_ids)
    texts = {
        token: text
        for token in sorted(tokenizer.get_vocab().values())
        if token not in special
        and (text := tokenizer.decode([token])).isascii()
        and text.isprintable()
        and text.strip()
    }
    tokens = list(texts)
    apart = max(1, math.ceil(len(tokens) / most))
    return {token: texts[token] for token in tokens[::apart]}


def _read(completion: Any, count: int) -> Echo:
    """The first `count` tokens, which are the prompt. Raises ValueError and others if they are not there."""
    found = completion["choices"][0]["logprobs"]
    texts, values = found["tokens"][:count], found["token_logprobs"][:count]
    if len(texts) < count or len(values) < count:
        raise ValueError(f"the answer has {min(len(texts), len(values))} tokens of {count}")
    logprobs_T = (math.nan, *(float(value) for value in values[1:]))
    if not all(value <= 0.001 and math.isfinite(value) for value in logprobs_T[1:]):
        raise ValueError("a log-probability is above 0 or not finite")
    return Echo(tuple(str(text) for text in texts), tuple(max(value, MIN_LOGPROB) for value in logprobs_T))


def _said(reply: Reply) -> str:
    return f"HTTP {reply.status}: {quoted(reply.text, 300)}"
