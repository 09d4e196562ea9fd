"""Check that our forward passes agree with transformers: by the config before the weights are loaded, and numerically
before the first step.

Two things differ from transformers' own forward: training packs the answers of a group into one row under a mask, and
the transformers sampler decodes with the prompt's keys stored once for its group. `probe` runs exactly these two paths
on random tokens and compares the log-probabilities with `attn_implementation="eager"` on the same weights, one plain
sequence at a time. A model that differs is refused, so it is never trained on a wrong likelihood.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import set_peft_model_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel

from worker.learn.batch import tensors_of
from worker.learn.gradient import logprobs
from worker.model import attention, lora
from worker.model.policy import Policy, first_line, has_experts
from worker.refusals import NotEnoughMemory, Refusal, UnsupportedModel
from worker.rollout.samplers import Sampling
from worker.rollout.samplers.transformers import TransformersSampler
from worker.types import Pack, Prompt
from worker.types import Sequence as Answer

# Both sides are computed in float32 (see `in_float32`), so only the order of additions differs: at most 3e-6 on the
# families of tests/families. What is wrong there differs by 0.13 and more at its worst token.
TOLERANCE = 1e-3
# A mixture of experts may route a token to another expert because of a rounding error; this share of tokens may differ.
FLIPPED_SHARE = 0.1

# Config fields by which layers limit what a token attends to: (q - k) < n, or the same chunk of n tokens.
WINDOWS = (
    "sliding_window",
    "attention_chunk_size",
    "sliding_window_size",
    "local_attention",
    "window_size",
    "attention_window_size",
)
# Values of `layer_types` and its like that are attention over all earlier tokens, or over a window of them.
ATTENTION = frozenset({"full_attention", "attention", "sliding_attention", "chunked_attention"})
# Rotary embeddings whose frequencies depend on the length of what is computed together.
LENGTH_DEPENDENT_ROPE = frozenset({"longrope", "dynamic"})
# Per prompt, the lengths of the two answers to it. The last token of an answer is a stop token, so that rows leave.
LENGTHS = ((5, 14), (9, 12))
LONGEST = max(map(max, LENGTHS))
SHORT_PROMPT = 40


def refuse_by_config(config: Any, context: int) -> None:
    """Refuse what the config alone shows to be unsupported, before the weights are loaded.

    A window that no sequence of `context` tokens (prompt and answer together) exceeds changes nothing.

    Raises:
        UnsupportedModel: with the field and its value.
    """
    name = _architecture(config)
    text = config.get_text_config()
    if recurrent := _recurrent_layers(text):
        raise UnsupportedModel(
            f"{name} is not supported: it has layers of type {', '.join(recurrent)}, in which the answers of a group "
            "would change each other when they are computed side by side."
        )
    for field, tokens in windows(config).items():
        if tokens < context:
            raise UnsupportedModel(
                f"{name} is not supported with a context of {context} tokens: its layers attend to a window "
                f"({field} = {tokens}), which is not implemented. It can be trained on shorter sequences: set "
                f"context = {tokens} or less in its entry of the model registry."
            )
    for rope, tokens in _rope_limits(text).items():
        if tokens < context:
            raise UnsupportedModel(
                f"{name} is not supported with a context of {context} tokens: its rotary embedding ({rope}) changes "
                f"for all tokens of a sequence longer than {tokens}. Set context = {tokens} or less in its entry of "
                "the model registry."
            )


def windows(config: Any) -> dict[str, int]:
    """The attention windows and chunks that layers of the model use, in tokens, by the config's field."""
    text = config.get_text_config()
    kinds = _layer_kinds(text)
    if kinds and not any("sliding" in kind or "chunk" in kind for kind in kinds):
        return {}
    found = {field: getattr(text, field, None) for field in WINDOWS}
    return {field: value for field, value in found.items() if isinstance(value, int) and value > 0}


def _rope_limits(text: Any) -> dict[str, int]:
    """By the type of the rotary embedding, the length beyond which it changes."""
    rope = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]  # one for each type of layer
    limits: dict[str, int] = {}
    for one in nested or [rope]:
        kind = one.get("rope_type")
        if kind in LENGTH_DEPENDENT_ROPE:
            # Which of the two counts differs between the kinds, and between versions of transformers.
            original = one.get("original_max_position_embeddings") or text.max_position_embeddings
            limits[kind] = min(original, text.max_position_embeddings)
    return limits


def _layer_kinds(text: Any) -> list[str]:
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    return [str(kind) for kind in kinds]


def _recurrent_layers(text: Any) -> list[str]:
    feed_forward = {"mlp", "moe"}
    return sorted(set(_layer_kinds(text)) - ATTENTION - feed_forward)


def _architecture(config: Any) -> str:
    """The class's name where the config has it, otherwise its model type."""
    names = getattr(config, "architectures", None) or [config.model_type]
    return str(names[0])


@dataclass(frozen=True)
class Gap:
    """How far log-probabilities are from the reference, over all tokens compared. In nats."""

    part: str
    largest: float
    mean: float
    share: float  # of tokens beyond TOLERANCE

    @staticmethod
    def between(part: str, ours_N: Tensor, reference_N: Tensor) -> "Gap":
        difference = (ours_N.double() - reference_N.double()).abs().nan_to_num(float("inf"))
        beyond = (difference > TOLERANCE).double().mean().item()
        return Gap(part, difference.max().item(), difference.mean().item(), beyond)


@torch.no_grad()
def probe(policy: Policy, *, sampled: bool) -> list[Gap]:
    """Compare training's forward pass, and with `sampled` the cached decode of the transformers sampler, with eager.

    On random tokens, in float32, with random weights in the adapter (its B is 0 at first, which would hide a wrong
    adapter). Two prompts of unequal length with two answers of unequal length each; and, where a window or a rotary
    embedding changes what later tokens see, sequences beyond the longest of these that `policy.context` lets a job
    reach. A longer one matters to no job.

    Cost: a few short forward passes and 14 decode steps, 0.02 to 0.2 s for the models of tests/families. A window would
    add sequences of its length with attention scores of heads x length^2; `refuse_by_config` turns those models away.

    Raises:
        UnsupportedModel: they differ, or a part fails.
        NotEnoughMemory: the machine has no room for it.
    """
    config = policy.model.get_base_model().config
    gaps: list[Gap] = []
    with refusing(config), _random_adapter(policy), in_float32(policy.model, list(policy.layers)):
        for lengths in prompt_lengths(config, policy.context):
            for gap in _compare(policy, _draw(policy, lengths), sampled):
                gaps.append(gap)
                _judge(gap, config, lengths[0])
        _refuse_lossy_adapter(policy, config)
    if policy.device.type == "cuda":
        torch.cuda.empty_cache()  # another engine measures what is free
    return gaps


def prompt_lengths(config: Any, context: int) -> list[tuple[int, ...]]:
    """The lengths of the prompts to probe with, one tuple for each comparison."""
    room = max(2, context - LONGEST)
    short = min(SHORT_PROMPT, room)
    chosen: list[tuple[int, ...]] = [(short, max(2, short * 3 // 4))]
    window = max((tokens for tokens in windows(config).values() if tokens < context), default=0)
    if window:
        chosen.append((min(room, window + max(24, window // 8)),))
    for limit in _rope_limits(config.get_text_config()).values():
        if limit < context:  # one answer ends below the limit, the other beyond it
            chosen.append((max(2, limit - LENGTHS[0][0] - 2),))
    return [one for n, one in enumerate(chosen) if n == 0 or max(one) > short]


@dataclass(frozen=True)
class Probe:
    """Prompts, and two answers to each."""

    prompts_P: Sequence[tuple[int, ...]]
    answers_PG: Sequence[Sequence[tuple[int, ...]]]


def _draw(policy: Policy, lengths: Sequence[int]) -> Probe:
    generator = torch.Generator().manual_seed(len(lengths) + sum(lengths))
    vocabulary = policy.model.get_base_model().get_input_embeddings().weight.shape[0]
    stops = sorted(stop for stop in policy.stop_ids if stop < vocabulary)
    free = torch.tensor([token for token in range(min(3, vocabulary - 1), vocabulary) if token not in stops])

    def draw(length: int) -> tuple[int, ...]:
        return tuple(free[torch.randint(len(free), (length,), generator=generator)].tolist())

    def answer(length: int) -> tuple[int, ...]:
        return draw(length) if not stops else (*draw(length - 1), stops[0])

    prompts = [draw(length) for length in lengths]
    return Probe(prompts, [[answer(length) for length in LENGTHS[n]] for n in range(len(lengths))])


def _compare(policy: Policy, tokens: Probe, sampled: bool) -> Iterator[Gap]:
    answers = [
        (prompt, answer)
        for prompt, answers_G in zip(tokens.prompts_P, tokens.answers_PG, strict=True)
        for answer in answers_G
    ]
    reference = torch.cat([reference_logprobs(policy, prompt, answer) for prompt, answer in answers])
    packs = [
        Pack(prompt, tuple(_as_trained(answer) for answer in answers_G))
        for prompt, answers_G in zip(tokens.prompts_P, tokens.answers_PG, strict=True)
    ]
    trained, _ = logprobs(policy, tensors_of(packs, policy.device), 1.0)
    yield Gap.between("training's forward pass", trained, reference)
    if sampled:
        yield Gap.between("sampling with a cache", Replay(policy, tokens).logprobs(), reference)


def reference_logprobs(policy: Policy, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """What transformers itself gives to the answer's tokens [T]: eager attention, no cache, PEFT's own adapter."""
    with lora.uninstalled(policy.model), eager(policy.model.get_base_model()):
        ids = torch.tensor([[*prompt, *answer]], device=policy.device)
        logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return _taken(logits, answer)


@contextmanager
def eager(causal: PreTrainedModel) -> Iterator[None]:
    """With transformers' own attention, on the same weights."""
    causal.set_attn_implementation("eager")
    try:
        yield
    finally:
        causal.set_attn_implementation(attention.NAME)


def _taken(logits_TV: Tensor, tokens_T: Sequence[int]) -> Tensor:
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

    def _choose(
        self, logits_RV: Tensor, row_R: Tensor, t: int, draws_RT: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        token_R = self._tokens_RT[row_R, t]
        return token_R, logits_RV.log_softmax(-1).gather(-1, token_R[:, None])[:, 0]

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


def _judge(gap: Gap, config: Any, tokens: int) -> None:
    flipped = has_experts(config) and gap.share <= FLIPPED_SHARE and math.isfinite(gap.largest)
    right = gap.largest <= TOLERANCE or flipped
    if not right:
        raise UnsupportedModel(
            f"{_architecture(config)} is not supported: log-probabilities of {gap.part} differ from transformers' own "
            f"by {gap.mean:.2g} nats a token on average and {gap.largest:.2g} at most (allowed: {TOLERANCE:g}), after "
            f"a prompt of {tokens} tokens. Likely because of: {suspects(config)}."
        )


def _refuse_lossy_adapter(policy: Policy, config: Any) -> None:
    """PEFT's loader must take back every tensor that is saved, or an exported adapter would be another model.

    It applies transformers' renaming of checkpoints to the adapter's names, and drops without a word what then has no
    place (Laguna's shared experts: 0.25 nats a token between the trained model and the exported one).
    """
    saved = {name: tensor + 1 for name, tensor in policy.adapter().items()}
    set_peft_model_state_dict(policy.model, dict(saved))
    lost = [name for name, tensor in policy.adapter().items() if not torch.equal(tensor, saved[name])]
    if lost:
        raise UnsupportedModel(
            f"{_architecture(config)} is not supported: PEFT loses {len(lost)} of the adapter's {len(saved)} tensors "
            f"when it loads them, the first being {lost[0]}."
        )


def suspects(config: Any) -> str:
    """List features of the config that this service does not implement, for a message."""
    text = config.get_text_config()
    reasons = [f"layers of type {kind}" for kind in _recurrent_layers(text)]
    reasons += [f"a window of {tokens} tokens ({field})" for field, tokens in windows(config).items()]
    reasons += [f"a rotary embedding of type {kind}" for kind in _rope_limits(text)]
    if getattr(text, "kv_lora_rank", None):
        reasons.append(f"latent attention (kv_lora_rank = {text.kv_lora_rank})")
    reasons += [
        f"{field} = {getattr(text, field)}"
        for field in (
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "logits_scaling",
            "logit_scale",
            "lm_head_multiplier",
        )
        if getattr(text, field, None) not in (None, 1, 1.0)
    ]
    return "; ".join(reasons) or "a part of the architecture that is not in its config"


@contextmanager
def refusing(config: Any) -> Iterator[None]:
    """Convert errors inside the context to refusals of the model."""
    try:
        yield
    except Refusal:
        raise
    except (MemoryError, torch.OutOfMemoryError) as cause:
        raise NotEnoughMemory(
            f"Not enough memory to check {_architecture(config)} on this machine: {first_line(cause)}"
        ) from cause
    except Exception as cause:
        raise UnsupportedModel(
            f"{_architecture(config)} is not supported: it fails with {first_line(cause)}. Likely "
            f"because of: {suspects(config)}."
        ) from cause


@contextmanager
def _random_adapter(policy: Policy) -> Iterator[None]:
    """With an adapter that moves the hidden states by some per cent."""
    generator = torch.Generator().manual_seed(0)
    weights = [
        (0.02 * torch.randn(parameter.shape, generator=generator)).to(parameter.device, parameter.dtype)
        for parameter in policy.trainable
    ]
    with policy.wearing(weights):
        yield


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
