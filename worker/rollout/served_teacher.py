"""A teacher on an OpenAI-compatible server: it reads the tokens of an answer by a completion that echoes them.

`POST /completions` with the tokens as the prompt, `echo` and `logprobs` returns the log-probability of each of them,
and at each place those of the likeliest tokens. vLLM and other servers of open models have this; OpenAI's own does not.
"""

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import httpx
import torch
from transformers import PreTrainedTokenizerBase

from core.jobs.hyperparameter_places import param_at
from core.jobs.params import TEACHER_PARAM
from core.outbound.http import is_passing, trusted_client
from graders.calls import CallRetryPolicy, NoAnswer, RateLimit, Reply, ServerAway, post, quoted_reply
from graders.judge.judges import JudgeModel
from graders.judge.usage import TokenLedger
from graders.template import quoted
from graders.types import TokenUsage
from worker.model.batch import ids_of, rows_read
from worker.refusals import ModelUnavailable, UserMistake
from worker.types import Pack, Prompt, Rollout, TopTokens, TrainingSequence

# Of a request that fails although the server is there: they take about a minute in all.
RETRIES = 7

# Of an answer: about 100 bytes for each token, of which a sequence has up to 131072, and 40 for each likely one.
MAX_BYTES = 32_000_000
TOP_BYTES = 64

# Lower log-probabilities count as this: vLLM's stand-in for minus infinity. Sums of much larger ones overflow.
MIN_LOGPROB = -9999.0

# Before the id of a token that a server does not name by its text.
TOKEN_ID = "token_id:"

# Tokens by whose text the two vocabularies are compared.
COMPARED = 128


@dataclass(frozen=True)
class Echo:
    """The tokens of a prompt as a server echoes them, one entry for each."""

    texts_T: tuple[str, ...]
    logprobs_T: tuple[
        float, ...
    ]  # nats, at temperature 1; that of the first token has no condition and is nan
    # The likeliest tokens in place of each, by their ids; empty at the first, and unless they were requested.
    top_T: tuple[Mapping[int, float], ...] = ()


@dataclass
class ServedTeacher:
    """Implements Teacher and TopTeacher by a model on a server. Its log-probabilities are those at temperature 1."""

    name: str
    server: JudgeModel
    beat: Callable[[], None] = lambda: None
    patience: CallRetryPolicy = field(default_factory=CallRetryPolicy)
    ledger: TokenLedger = field(default_factory=TokenLedger)
    _usage: TokenUsage = field(default=TokenUsage(), init=False)

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
        rows_PG = [
            [rows_read(prompt.ids, rollout) for rollout in rollouts_G] for prompt, rollouts_G in answers_P
        ]
        rows = [row for rows_G in rows_PG for rows_of_one in rows_G for row in rows_of_one]
        echoes = iter(self._read_all([ids_of(row) for row in rows]))
        return [[_of_rows(rows, [next(echoes) for _ in rows]) for rows in rows_G] for rows_G in rows_PG]

    def with_top(self, packs: Sequence[Pack], top_k: int) -> list[Pack]:
        """See TopTeacher. Raises as `logprobs` does."""
        sequences = [(*pack.prompt_ids, *one.output_ids_T) for pack in packs for one in pack.sequences]
        echoes = iter(self._read_all(sequences, top_k))
        self._usage += TokenUsage(sum(map(len, sequences)), len(sequences))
        return [
            replace(
                pack,
                sequences=tuple(
                    replace(one, top=top_tokens(next(echoes).top_T[len(pack.prompt_ids) :], one, top_k))
                    for one in pack.sequences
                ),
            )
            for pack in packs
        ]

    def usage(self) -> TokenUsage:
        """See TopTeacher."""
        used, self._usage = self._usage, TokenUsage()
        return used

    def refuse_top(self, tokenizer: PreTrainedTokenizerBase, top_k: int) -> None:
        """Request `top_k` tokens at each place of a short prompt.

        Raises:
            UserMistake: the server gives fewer, or not by their ids.
            ModelUnavailable: the server does not answer.
        """
        try:
            self._read_all([tuple(legible_tokens(tokenizer, 2))], top_k)
        except UserMistake as refused:
            raise UserMistake(
                "teacher_unusable",
                f"The teacher '{self.name}' does not give its {top_k} likeliest tokens. Choose a smaller `top_k` (vLLM "
                f"gives 20 unless it was started with --max-logprobs). {refused.message}",
                param_at("distillation", "loss.top_k"),
            ) from refused

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
            if theirs.strip() not in (own.strip(), f"{TOKEN_ID}{token}"):
                raise UserMistake(
                    "invalid_value",
                    f"The teacher '{self.name}' has another tokenizer than the student: token {token} is {quoted(own)} "
                    f"to the student and {quoted(theirs)} to the teacher. A teacher needs the same vocabulary.",
                    TEACHER_PARAM,
                )

    def _read_all(self, sequences: Sequence[tuple[int, ...]], top_k: int = 0) -> list[Echo]:
        # In a thread, because the caller's may have a running event loop.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self._echoes(sequences, top_k)).result()

    async def _echoes(self, sequences: Sequence[tuple[int, ...]], top_k: int) -> list[Echo]:
        slots = asyncio.Semaphore(self.server.max_concurrency)
        pace = RateLimit(self.server.requests_per_second, self.patience.sleep, time.monotonic)

        async def ask(client: httpx.AsyncClient, ids_T: tuple[int, ...]) -> Echo:
            async with slots:
                echo = await self._echo(client, pace, ids_T, top_k)
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

    async def _echo(
        self, client: httpx.AsyncClient, pace: RateLimit, ids_T: tuple[int, ...], top_k: int
    ) -> Echo:
        server = self.server
        asked: dict[str, Any] = {
            "model": server.served_as or self.name,
            "prompt": list(ids_T),
            "echo": True,
            "logprobs": max(1, top_k),
            "max_tokens": 1,  # not every server takes 0
            "temperature": 0,
        }
        if top_k:
            asked["return_tokens_as_token_ids"] = True  # several tokens may have one text
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
                max_bytes=MAX_BYTES + TOP_BYTES * top_k * len(ids_T),
            )
        except (NoAnswer, ServerAway) as silence:
            raise ModelUnavailable(f"The teacher '{self.name}' does not answer: {silence}") from None
        if is_passing(reply.status):
            raise ModelUnavailable(f"The teacher '{self.name}' does not answer: {_problem_of(reply)}")
        if not reply.ok:
            raise UserMistake(
                "teacher_unusable",
                f"The server of the teacher '{self.name}' refuses {len(ids_T)} tokens: {_problem_of(reply)}",
                TEACHER_PARAM,
            )
        self.ledger.add(self.name, TokenUsage(len(ids_T), 1))
        try:
            return _read(json.loads(reply.text), len(ids_T), top_k)
        except (ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError) as cause:
            raise UserMistake(
                "teacher_unusable",
                f"The server of the teacher '{self.name}' gives no log-probabilities of a prompt ({cause}). A teacher "
                "needs a server whose POST /completions takes tokens with `echo` and `logprobs`, as vLLM's does.",
                TEACHER_PARAM,
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


def _of_rows(rows: Sequence[Pack], echoes: Sequence[Echo]) -> tuple[float, ...]:
    """The log-probabilities of an answer's tokens, each from the row of its path where it is learned."""
    found: dict[int, float] = {}
    for row, echo in zip(rows, echoes, strict=True):
        [path] = row.sequences
        values = compress(echo.logprobs_T[len(row.prompt_ids) :], path.is_trained_T)
        places = range(path.trained_tokens) if path.piece is None else path.piece.places
        found |= zip(places, values, strict=True)
    return tuple(found[place] for place in sorted(found))


def top_tokens(top_T: Sequence[Mapping[int, float]], answer: TrainingSequence, top_k: int) -> TopTokens:
    """The likeliest tokens at the learned ones of an answer, from those at all of its tokens."""
    best = [
        sorted(top.items(), key=lambda one: (-one[1], one[0]))[:top_k]
        for top in compress(top_T, answer.is_trained_T)
    ]
    return TopTokens(
        torch.tensor([[token for token, _ in tops] for tops in best], dtype=torch.int64),
        torch.tensor([[logprob for _, logprob in tops] for tops in best], dtype=torch.float32),
    )


def _read(completion: Any, count: int, top_k: int) -> Echo:
    """The first `count` tokens, which are the prompt. Raises ValueError and others if they are not there."""
    found = completion["choices"][0]["logprobs"]
    texts, values = found["tokens"][:count], found["token_logprobs"][:count]
    if len(texts) < count or len(values) < count:
        raise ValueError(f"the answer has {min(len(texts), len(values))} tokens of {count}")
    logprobs_T = (math.nan, *(_logprob(value) for value in values[1:]))
    if not top_k:
        return Echo(tuple(str(text) for text in texts), logprobs_T)
    top_T = [_by_id(top) for top in found["top_logprobs"][1:count]]
    if len(top_T) < count - 1 or any(len(top) < top_k for top in top_T):
        raise ValueError(f"there are not {top_k} likeliest tokens at each place")
    return Echo(tuple(str(text) for text in texts), logprobs_T, ({}, *top_T))


def _by_id(top: Mapping[str, Any]) -> dict[int, float]:
    """Raises ValueError if tokens are named by their texts, which several may share."""
    if not all(name.startswith(TOKEN_ID) for name in top):
        raise ValueError("its tokens are not named by their ids, as `return_tokens_as_token_ids` asks")
    return {int(name.removeprefix(TOKEN_ID)): _logprob(value) for name, value in top.items()}


def _logprob(value: Any) -> float:
    """Raises ValueError and others if it is none."""
    logprob = float(value)
    if not (logprob <= 0.001 and math.isfinite(logprob)):
        raise ValueError("a log-probability is above 0 or not finite")
    return max(logprob, MIN_LOGPROB)


def _problem_of(reply: Reply) -> str:
    return f"HTTP {reply.status}: {quoted_reply(reply.text)}"
