"""Find the forward pass that is exact for a model, by comparing log-probabilities with those of transformers.

Two things differ from transformers' own forward: training packs the answers of a group into one row under a mask, and
the transformers sampler decodes with the prompt's keys stored once for its group. `probe` runs exactly these paths
on random tokens and compares the log-probabilities with `attn_implementation="eager"` on the same weights, one plain
sequence at a time. Where a packed row is not exact (recurrent layers), the model is trained with one answer in a row
under its own mask and cache. A model that differs in this too is refused, so none is trained on a wrong likelihood.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from peft import set_peft_model_state_dict
from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from worker.model import lora, quantized, recompute
from worker.model.architecture import (
    architecture,
    has_experts,
    refusing,
    rope_limits,
    suspects,
    windows,
)
from worker.model.batch import split, tensors_of
from worker.model.decoding import Decode
from worker.model.policy import Forward, Policy, Route, Trained
from worker.model.token_logprobs import logprobs
from worker.out_of_memory import is_out_of_memory
from worker.refusals import Refusal, UnsupportedModel, first_line
from worker.sampling import Sampling
from worker.sampling.transformers import TransformersSampler
from worker.types import Pack, Prompt
from worker.types import TrainingSequence as Answer

log = logging.getLogger(__name__)

# Both sides are computed in float32 (see `in_float32`), so only the order of additions differs: at most 3e-6 on the
# families of tests/families. What is wrong there differs by 0.13 and more at its worst token.
TOLERANCE = 1e-3
# A mixture of experts may route a token to another expert because of a rounding error; this share of tokens may differ.
FLIPPED_SHARE = 0.1

# Per prompt, the lengths of the two answers to it. The last token of an answer is a stop token, so that rows leave.
LENGTHS = ((5, 14), (9, 12))
LONGEST = max(map(max, LENGTHS))
# The quickest first.
FORWARDS = (Route("packed"), Route("rows"), Route("rows", eager=True))
DECODES: Mapping[Forward, tuple[Decode, ...]] = {
    "packed": ("shared", "joined"),
    "rows": ("forked", "padded", "alone", "recomputed"),
}
SHORT_PROMPT = 40


def refuse_by_config(config: Any, context: int) -> None:
    """Refuse what the config alone shows to be unsupported, before the weights are loaded.

    Raises:
        UnsupportedModel: with the field and its value.
    """
    quantized.format_of(config)
    for rope, tokens in rope_limits(config.get_text_config()).items():
        if tokens < context:
            raise UnsupportedModel(
                f"{architecture(config)} is not supported with a context of {context} tokens: its rotary embedding "
                f"({rope}) changes for all tokens of a sequence longer than {tokens}. Set context = {tokens} or less "
                "in its entry of the model registry."
            )


@dataclass(frozen=True)
class Gap:
    """How far log-probabilities are from the reference, over all tokens compared. In nats."""

    part: str
    largest: float
    mean: float
    share: float  # of tokens beyond TOLERANCE
    prompt: int  # tokens of the longest prompt

    @staticmethod
    def between(part: str, ours_N: Tensor, reference_N: Tensor, prompt: int) -> "Gap":
        difference = (ours_N.double() - reference_N.double()).abs().nan_to_num(float("inf"))
        beyond = (difference > TOLERANCE).double().mean().item()
        return Gap(part, difference.max().item(), difference.mean().item(), beyond, prompt)


@dataclass(frozen=True)
class Probe:
    """Prompts, and two answers to each."""

    prompts_P: Sequence[tuple[int, ...]]
    answers_PG: Sequence[Sequence[tuple[int, ...]]]


@dataclass(frozen=True)
class ForwardVerdict:
    """The route that a model is computed on, and its distance from the reference."""

    route: Route
    gaps: Sequence[Gap]
    instead: str = ""  # why it is not the quickest route
    checked_at: int = 0  # in seconds since 1970; 0: now

    @property
    def largest(self) -> float:
        return max(gap.largest for gap in self.gaps)

    def described(self, trained: Trained) -> str:
        """For an event of the job."""
        how = (
            "Training computes a prompt once for all its answers"
            if self.route.forward == "packed"
            else "Training computes each answer in a separate row"
        )
        return (
            f"The model's log-probabilities are those of transformers (largest difference {self.largest:.1g} nats). "
            f"{how}. {trained.sentence}"
        )

    def as_data(self, trained: Trained) -> dict[str, Any]:
        return {
            "forward": self.route.forward,
            "decode": self.route.decode,
            "largest_difference": self.largest,
            **trained.as_data(),
            "reason": self.instead or None,
            "checked_at": self.checked_at or None,
        }


@torch.no_grad()
def probe(policy: Policy, *, sampled: bool) -> ForwardVerdict:
    """Choose the quickest forward, and with `sampled` the quickest decode, whose log-probabilities are right.

    On random tokens, in float32, with random weights in the adapter (its B is 0 at first, which would hide a wrong
    adapter). Two prompts of unequal length with two answers of unequal length each; and, where a window or a rotary
    embedding changes what later tokens see, sequences beyond the longest of these that `policy.context` lets a job
    reach. A longer one matters to no job. The policy uses the chosen route afterwards.

    Cost: some short forward passes and 14 decode steps for each route that is tried, 0.05 to 0.5 s for the models of
    tests/families. A window adds sequences of its length with attention scores of heads x length^2.

    Raises:
        UnsupportedModel: no route is right.
        NotEnoughMemory: the machine has no room for it.
    """
    config = policy.causal.config
    blocks = policy.device.type == "cuda" and has_backward_in_blocks(policy)
    with refusing(config), policy.moved(), in_float32(policy.model, list(policy.layers)):
        texts = [_draw(policy, lengths) for lengths in prompt_lengths(config, policy.context)]
        references = [_references(policy, text) for text in texts]
        _refuse_if_later_tokens_matter(policy, texts[0], references[0])
        verdict = _choose(policy, texts, references, sampled, blocks=blocks)
        if policy.has_base:
            _refuse_lossy_adapter(policy, config)
    if policy.device.type == "cuda":
        torch.cuda.empty_cache()  # another engine measures what is free
    return verdict


def _choose(
    policy: Policy,
    texts: Sequence[Probe],
    references: Sequence[Tensor],
    sampled: bool,
    *,
    blocks: bool,
) -> ForwardVerdict:
    config = policy.causal.config
    reasons: list[str] = []
    for route in (Route("packed", blocks=True), *FORWARDS) if blocks else FORWARDS:
        compare = partial(_compare, policy, texts, references, reasons)
        gaps = compare(route, "training's forward pass", _trained)
        if gaps is None:
            continue
        if not sampled:
            return ForwardVerdict(route, gaps, "".join(reasons[:1]))
        for decode in DECODES[route.forward]:
            found = compare(replace(route, decode=decode), "sampling with a cache", _sampled)
            if found is not None:
                return ForwardVerdict(policy.route, [*gaps, *found], "".join(reasons[:1]))
    raise UnsupportedModel(
        f"{architecture(config)} is not supported: {reasons[-1]} Likely because of: {suspects(config)}."
    )


def _compare(
    policy: Policy,
    texts: Sequence[Probe],
    references: Sequence[Tensor],
    reasons: list[str],
    route: Route,
    part: str,
    logprobs_of: Callable[[Policy, Probe], Tensor],
) -> list[Gap] | None:
    """The gaps of one part on a route; None, and a sentence more in `reasons`, if it fails or is wrong."""
    config = policy.causal.config
    try:
        policy.use(route)
        gaps = [
            Gap.between(part, logprobs_of(policy, text), reference, len(text.prompts_P[0]))
            for text, reference in zip(texts, references, strict=True)
        ]
    except Refusal as cause:
        problem = str(cause)
    except Exception as cause:  # whatever an architecture raises that is not built for this
        if is_out_of_memory(cause):
            raise
        problem = f"{part.capitalize()} fails with {first_line(cause)}."
    else:
        problem = problem_of(gaps, config)
    if not problem:
        return gaps
    reasons.append(problem)
    return None


def prompt_lengths(config: Any, context: int) -> list[tuple[int, ...]]:
    """The lengths of the prompts to probe with, one tuple for each comparison."""
    room = max(2, context - LONGEST)
    short = min(SHORT_PROMPT, room)
    chosen: list[tuple[int, ...]] = [(short, max(2, short * 3 // 4))]
    window = max((tokens for tokens in windows(config).values() if tokens < context), default=0)
    if window:
        chosen.append((min(room, window + max(24, window // 8)),))
    for limit in rope_limits(config.get_text_config()).values():
        if limit < context:  # one answer ends below the limit, the other beyond it
            chosen.append((max(2, limit - LENGTHS[0][0] - 2),))
    return [one for n, one in enumerate(chosen) if n == 0 or max(one) > short]


def _draw(policy: Policy, lengths: Sequence[int]) -> Probe:
    generator = torch.Generator().manual_seed(len(lengths) + sum(lengths))
    vocabulary = policy.causal.get_input_embeddings().weight.shape[0]
    stops = sorted(stop for stop in policy.stop_ids if stop < vocabulary)
    free = torch.tensor([token for token in range(min(3, vocabulary - 1), vocabulary) if token not in stops])

    def draw(length: int) -> tuple[int, ...]:
        return tuple(free[torch.randint(len(free), (length,), generator=generator)].tolist())

    def answer(length: int) -> tuple[int, ...]:
        return draw(length) if not stops else (*draw(length - 1), stops[0])

    prompts = [draw(length) for length in lengths]
    return Probe(prompts, [[answer(length) for length in LENGTHS[n]] for n in range(len(lengths))])


def _answers(text: Probe) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [
        (prompt, answer)
        for prompt, answers_G in zip(text.prompts_P, text.answers_PG, strict=True)
        for answer in answers_G
    ]


def _references(policy: Policy, text: Probe) -> Tensor:
    return torch.cat([reference_logprobs(policy, prompt, answer) for prompt, answer in _answers(text)])


def _trained(policy: Policy, text: Probe) -> Tensor:
    packs = [
        Pack(prompt, tuple(_as_trained(answer) for answer in answers_G))
        for prompt, answers_G in zip(text.prompts_P, text.answers_PG, strict=True)
    ]
    if policy.route.forward == "rows":
        packs = [part for pack in packs for part in split(pack, 0)]
    return logprobs(policy, tensors_of(packs, policy.device), 1.0)


def has_backward_in_blocks(policy: Policy) -> bool:
    """Return whether a step with FlexAttention runs: its backward kernels are compiled apart from the forward ones.

    In the precision of the weights: `in_float32` narrows a layer as soon as its forward pass is over.
    """
    text = _draw(policy, (SHORT_PROMPT,))
    try:
        policy.use(Route("packed", blocks=True))
        with torch.enable_grad():
            _trained(policy, text).sum().backward()  # type: ignore[no-untyped-call]
    except Exception as cause:
        if is_out_of_memory(cause):
            raise
        log.warning("FlexAttention is not used for this model: %s", first_line(cause))
        return False
    finally:
        for parameter in [*policy.trainable, *policy.model.parameters()]:
            parameter.grad = None
    return True


def _sampled(policy: Policy, text: Probe) -> Tensor:
    return Replay(policy, text).logprobs()


def _refuse_if_later_tokens_matter(policy: Policy, text: Probe, reference: Tensor) -> None:
    """The likelihood of an answer must not depend on what follows it, as it does with some rotary embeddings."""
    config = policy.causal.config
    later = torch.cat(
        [
            reference_logprobs(policy, prompt, (*answer, *[answer[0]] * 19))[: len(answer)]
            for prompt, answer in _answers(text)
        ]
    )
    if problem := problem_of([Gap.between("a prefix", later, reference, len(text.prompts_P[0]))], config):
        raise UnsupportedModel(
            f"{architecture(config)} is not supported: its log-probabilities change when tokens follow. {problem}"
        )


def reference_logprobs(policy: Policy, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """What transformers itself gives to the answer's tokens [T]: eager attention, no cache, PEFT's own adapter."""
    model = policy.model
    with lora.uninstalled(model), recompute.uninstalled(model), eager(policy.causal):
        ids = torch.tensor([[*prompt, *answer]], device=policy.device)
        logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return _token_logprobs(logits, answer)


@contextmanager
def eager(causal: PreTrainedModel) -> Iterator[None]:
    """With transformers' own attention, on the same weights."""
    before = causal.config._attn_implementation
    causal.set_attn_implementation("eager")
    try:
        yield
    finally:
        causal.set_attn_implementation(before)


def _token_logprobs(logits_TV: Tensor, tokens_T: Sequence[int]) -> Tensor:
    chosen = torch.tensor(tokens_T, device=logits_TV.device)[:, None]
    taken: Tensor = logits_TV.float().log_softmax(-1).gather(-1, chosen)[:, 0]
    return taken


def _as_trained(answer: tuple[int, ...]) -> Answer:
    return Answer(answer, (0.0,) * len(answer), (1.0,) * len(answer), 1.0)


class Replay(TransformersSampler):
    """The sampler, made to "draw" given answers: its prefill, its cache, its rows that leave when they have ended."""

    def __init__(self, policy: Policy, tokens: Probe) -> None:
        super().__init__(policy)
        self.tokens = tokens
        rows = [answer for answers_G in tokens.answers_PG for answer in answers_G]
        self._rows = rows
        self._tokens_RT = torch.zeros(len(rows), LONGEST, dtype=torch.int64)
        for row, answer in enumerate(rows):
            self._tokens_RT[row, : len(answer)] = torch.tensor(answer)
        self._tokens_RT = self._tokens_RT.to(policy.device)

    def _draws(self, seeds: Sequence[int], tokens: int) -> Tensor:
        """The given tokens [R, T], where a sampler has random numbers."""
        return self._tokens_RT

    @staticmethod
    def _choose(
        logits_RV: Tensor, draw_R: Tensor, temperature: float | Tensor, top_p_R: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return draw_R, logits_RV.log_softmax(-1).gather(-1, draw_R[:, None])[:, 0]

    def logprobs(self) -> Tensor:
        """Of all answers' tokens, in order."""
        size = len(self.tokens.answers_PG[0])
        prompts = [Prompt(line, ids, {}) for line, ids in enumerate(self.tokens.prompts_P)]
        sampling = Sampling(
            group_size=size, temperature=1.0, max_completion_tokens=LONGEST, job_seed=0, step=0
        )
        found: dict[int, Sequence[float]] = {}
        for answer in self.answers(prompts, sampling):
            found[answer.prompt * size + answer.member] = answer.rollout.logprobs_T
        kept = [torch.tensor(found[row][: len(answer)]) for row, answer in enumerate(self._rows)]
        return torch.cat(kept).to(self.policy.device)


def problem_of(gaps: Sequence[Gap], config: Any) -> str:
    """Return the problem as a sentence; empty if there is none."""
    for gap in gaps:
        flipped = has_experts(config) and gap.share <= FLIPPED_SHARE and math.isfinite(gap.largest)
        if gap.largest > TOLERANCE and not flipped:
            return (
                f"Log-probabilities of {gap.part} differ from transformers' own by {gap.mean:.2g} nats a token on "
                f"average and {gap.largest:.2g} at most (allowed: {TOLERANCE:g}), after a prompt of {gap.prompt} "
                "tokens."
            )
    return ""


def _refuse_lossy_adapter(policy: Policy, config: Any) -> None:
    """PEFT's loader must take back every tensor that is saved, or an exported adapter would be another model.

    It applies transformers' renaming of checkpoints to the adapter's names, and drops without a word what then has no
    place (Laguna's shared experts: 0.25 nats a token between the trained model and the exported one).
    """
    # Each with another number, so that nothing that was exchanged or taken for equal goes unseen.
    saved = {name: tensor + number for number, (name, tensor) in enumerate(policy.adapter().items(), start=1)}
    expected = policy.in_peft(saved)
    loaded = _loaded_by_peft(policy, saved)
    lost = [
        name
        for name, tensor in expected.items()
        if name not in loaded or not torch.equal(loaded[name], tensor)
    ]
    if lost:
        raise UnsupportedModel(
            f"{architecture(config)} is not supported: PEFT loses {len(lost)} of the adapter's {len(expected)} "
            f"tensors when it loads them, the first being {lost[0]}."
        )


def _loaded_by_peft(policy: Policy, saved: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors of an adapter's file as PEFT's model has them after loading.

    With adapters on experts, only the conversion that its loader makes: its result may have twice the rank of the
    policy's, which changes nothing in what it computes (worker/model/expert_files.py).
    """
    if policy.expert_rank:
        config = policy.model.peft_config["default"]
        converted: Mapping[str, Tensor] = convert_peft_adapter_state_dict_for_transformers(
            policy.model, config, dict(saved)
        )
        return converted
    set_peft_model_state_dict(policy.model, dict(saved))
    return policy.adapter()


@contextmanager
def in_float32(model: nn.Module, layers: Sequence[nn.Module]) -> Iterator[None]:
    """Compute in float32 whatever the precision of the weights, so that a small difference is not lost in rounding.

    In bfloat16 an exact forward differs from another order of additions by 0.2 nats (SmolLM2-135M), which would hide a
    soft cap of 50. A decoder layer is widened when it is entered and gets its own weights back when it is left, so
    that the extra memory is that of one layer, the embeddings and the head.
    """
    handles = []
    inside = {id(tensor) for layer in layers for tensor in _tensors(layer)}
    others = [tensor for tensor in _tensors(model) if id(tensor) not in inside]
    narrow: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def widen(layer: nn.Module, args: Any) -> None:
        narrow[id(layer)] = _widened(_tensors(layer))

    def restore(layer: nn.Module, args: Any, output: Any) -> None:
        _restore(narrow.pop(id(layer), []))

    kept = _widened(others)
    try:
        if any(_is_narrow(tensor) for layer in layers for tensor in _tensors(layer)):
            for layer in layers:
                handles.append(layer.register_forward_pre_hook(widen))
                handles.append(layer.register_forward_hook(restore, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for pairs in narrow.values():
            _restore(pairs)
        _restore(kept)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype in (torch.bfloat16, torch.float16)


def _widened(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Replace the data of narrow tensors; returns each with the data that it had."""
    pairs = []
    with torch.inference_mode(False), torch.no_grad():
        for tensor in tensors:
            if _is_narrow(tensor):
                pairs.append((tensor, tensor.data))
                tensor.data = tensor.data.float()
    return pairs


def _restore(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for tensor, data in pairs:
        tensor.data = data
