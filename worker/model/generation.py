"""The decode loop over transformers: choose a token for each row, end the rows that are complete, compute the others.

The sampler of rollouts (worker/sampling/transformers.py) and the inference server (worker/serving/continuous.py)
both decode with a `DecodingBatch`. They differ in where rows come from: a sampler's begin together and share the prompt
of their group, a server's join and leave at any token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from worker.model.decoding import CopiedDecoding, Decoding
from worker.model.token_constraints import TokenConstraints, constrain, take

DecodingT = TypeVar("DecodingT", bound=Decoding)


class Decodable(Protocol):
    """A policy or a served model, as the loop uses it."""

    @property
    def device(self) -> torch.device: ...
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., h] -> logits [..., V] in float32."""
        ...


@dataclass(frozen=True)
class RowSettings:
    """The sampling parameters of one answer."""

    temperature: float  # 0 is greedy
    max_tokens: int
    stop_ids: frozenset[int]
    top_p: float = 1.0


@dataclass(frozen=True)
class Step:
    """A token for each row, but for the rows in `failed`, whose schema raised this exception."""

    token_R: Tensor
    logprob_R: Tensor  # under the distribution that it was drawn from, but for top_p
    last_R: Tensor  # bool: it is a stop token, or number `max_tokens` of its row
    failed: Mapping[int, Exception]


def choose(
    logits_RV: Tensor, draw_R: Tensor, temperature: float | Tensor, top_p_R: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The next token [R] and its log-probability [R] under the distribution it was drawn from, but for top_p.

    By inversion: the first token at which the cumulative probability passes the draw. Greedy (temperature 0)
    takes the best one and reports its log-probability at temperature 1.

    Args:
        temperature: of all rows, or of each [R].
        top_p_R: draw from the most likely tokens that together reach it; None: from all.
    """
    logp_RV = _over(logits_RV, temperature).log_softmax(-1)
    if isinstance(temperature, Tensor):
        token_R = torch.where(temperature == 0, logits_RV.argmax(-1), _drawn(logp_RV, draw_R, top_p_R))
    else:
        token_R = logits_RV.argmax(-1) if temperature == 0 else _drawn(logp_RV, draw_R, top_p_R)
    return token_R, logp_RV.gather(-1, token_R[:, None])[:, 0]


def _over(logits_RV: Tensor, temperature: float | Tensor) -> Tensor:
    if isinstance(temperature, Tensor):
        return logits_RV / torch.where(temperature == 0, 1.0, temperature)[:, None]
    # By a number, not a tensor: a GPU multiplies by its reciprocal, and the last bit may differ.
    return logits_RV if temperature in (0, 1) else logits_RV / temperature


def _drawn(logp_RV: Tensor, draw_R: Tensor, top_p_R: Tensor | None) -> Tensor:
    # In place: a CPU spends more time on new pages for a tensor of [R, V] than on the additions.
    cumulative = _probabilities(logp_RV, top_p_R).cumsum_(-1)
    # Scaled by the last entry, because a rounded sum may stop short of 1 and leave a draw nowhere to land.
    token_R = torch.searchsorted(cumulative, (draw_R * cumulative[:, -1])[:, None], right=True)[:, 0]
    return token_R.clamp(max=logp_RV.shape[-1] - 1)


def _probabilities(logp_RV: Tensor, top_p_R: Tensor | None) -> Tensor:
    probability_RV = logp_RV.exp()
    if top_p_R is not None:
        narrow = (top_p_R < 1).nonzero()[:, 0]
        probability_RV[narrow] = _nucleus(probability_RV[narrow], top_p_R[narrow, None])
    return probability_RV


def _nucleus(probability_RV: Tensor, top_p_R1: Tensor) -> Tensor:
    """The most likely tokens that together reach top_p (always the first one), the others at 0."""
    ordered, index = probability_RV.sort(-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= top_p_R1
    outside[:, 0] = False
    return torch.zeros_like(probability_RV).scatter(-1, index, ordered.masked_fill(outside, 0.0))


Choose = Callable[[Tensor, Tensor, float | Tensor, Tensor | None], tuple[Tensor, Tensor]]


class DecodingBatch(Generic[DecodingT]):
    """R rows that are decoded together. After each `step`: `keep` those that have not ended, then `advance`."""

    def __init__(
        self,
        model: Decodable,
        decoding: DecodingT,
        settings_R: Sequence[RowSettings],
        constraints_R: Sequence[TokenConstraints | None],
        choose: Choose = choose,
    ) -> None:
        """Compute the prompts of `decoding`. `choose`: another one for a caller that knows the tokens (Replay)."""
        self.model, self.decoding, self._choose = model, decoding, choose
        self._settings_R, self._constraints_R = list(settings_R), list(constraints_R)
        self._stops: list[frozenset[int]] = []
        with torch.inference_mode():
            self._hidden = decoding.start()
            self._left_R = torch.tensor([row.max_tokens for row in settings_R], device=model.device)
            self._newest_R = torch.zeros_like(self._left_R)
            self._common()

    @torch.inference_mode()
    def logits(self) -> Tensor:
        """The model's own logits [R, V] of the next tokens, before a schema, temperature and top_p."""
        return self.model.logits(self._hidden)

    @torch.inference_mode()
    def step(self, logits_RV: Tensor, draw_R: Tensor) -> Step:
        """Choose a token for each row by its logits and its number in [0, 1)."""
        constrained, failed = constrain(logits_RV, self._constraints_R)
        token_R, logprob_R = self._choose(
            constrained, draw_R.to(constrained.device), self._temperature, self._top_p_R
        )
        failed |= take(self._constraints_R, token_R, but=failed)
        self._newest_R, self._left_R = token_R, self._left_R - 1
        last_R = (token_R[:, None] == self._stop_RS).any(-1) | (self._left_R == 0)
        return Step(token_R, logprob_R, last_R, failed)

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        """Continue with these rows (indices into the current ones, ascending or as `decoding` allows)."""
        self.decoding.keep(rows)
        self._left_R, self._newest_R = self._left_R[rows], self._newest_R[rows]
        kept = rows.tolist()
        self._settings_R = [self._settings_R[row] for row in kept]
        self._constraints_R = [self._constraints_R[row] for row in kept]
        self._common()

    @torch.inference_mode()
    def advance(self) -> None:
        """Compute what follows each row's newest token."""
        self._hidden = self.decoding.next(self._newest_R)

    def _common(self) -> None:
        """The temperature, top_p and stop tokens of all rows: those of one row where they agree."""
        stops = [row.stop_ids for row in self._settings_R]
        self._stop_with(stops[:1] if len(set(stops)) == 1 else stops)
        device = self.model.device
        temperatures = [row.temperature for row in self._settings_R]
        top_ps = [row.top_p for row in self._settings_R]
        self._temperature: float | Tensor = (
            temperatures[0] if len(set(temperatures)) == 1 else torch.tensor(temperatures, device=device)
        )
        self._top_p_R = torch.tensor(top_ps, device=device) if min(top_ps) < 1 else None

    def _stop_with(self, stops: list[frozenset[int]]) -> None:
        """The stop tokens [R or 1, S], padded with -1."""
        if stops == self._stops:
            return
        most = max(map(len, stops))
        padded = [[*sorted(one), *[-1] * (most - len(one))] for one in stops]
        self._stops = stops
        self._stop_RS = torch.tensor(padded, dtype=torch.int64, device=self.model.device)


@torch.inference_mode()
def join(batch: DecodingBatch[CopiedDecoding], other: DecodingBatch[CopiedDecoding]) -> None:
    """Append the rows of `other`, which have chosen their first token, to those of `batch`."""
    batch.decoding.join(other.decoding)
    batch._left_R = torch.cat([batch._left_R, other._left_R])
    batch._newest_R = torch.cat([batch._newest_R, other._newest_R])
    batch._settings_R += other._settings_R
    batch._constraints_R += other._constraints_R
    batch._common()
