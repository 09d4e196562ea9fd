"""The policy: frozen base weights, a LoRA adapter on linear layers, a tokenizer. full.py has one without an adapter.

Sampler and trainer read the same weights in the same process, so a step's update is what the next step samples
from, with nothing copied and nothing rounded. This file and worker/model/attention.py are where transformers' own
conventions are met.
"""

import errno
import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from huggingface_hub.constants import HF_HUB_CACHE
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from core import chat_templates, fingerprint
from core.jobs.hyperparameter_groups import LoraTargets
from core.outages import Resource, outage
from core.registry import BaseModelEntry
from core.scratch import scratch_folder
from core.special_tokens import Chat, Tools
from core.storage.disk import NoRoom
from core.template_facts import TemplateFacts
from core.template_messages import messages_for
from worker.model import (
    attention,
    expert_files,
    experts,
    lora,
    memory,
    packed,
    quantized,
    reasoning,
    recompute,
)
from worker.model.adapters import adaptable_layers, adapter_targets, expert_targets, fused_experts
from worker.model.architecture import architecture, refusing
from worker.model.chat_tokens import content_tokens
from worker.model.decoding import (
    Decode,
    Decoding,
    GroupDecoding,
    RecomputedDecoding,
    RowDecoding,
    row_bytes,
)
from worker.model.head import HeadProduct
from worker.model.json_schema import Vocabulary
from worker.model.model_structure import Head, Parts, parts_of
from worker.model.reasoning import Reasoning
from worker.model.sizing import Shape
from worker.model.targets import KINDS, Kind
from worker.model.template import facts_of, own_stop_ids, stop_ids_of
from worker.out_of_memory import is_out_of_memory, memory_named
from worker.refusals import (
    ChatTemplateFailed,
    InvalidModel,
    ModelUnavailable,
    NoChatTemplate,
    NotEnoughMemory,
    Refusal,
    UnsupportedModel,
    first_line,
)

# The name of a reward model's head beside its adapter: as PEFT saves that of a sequence classifier.
REWARD_HEAD = "base_model.model.score.weight"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


# packed: a prompt and its answers in one row under a mask of ours; rows: one answer a row, as transformers computes it.
Forward = Literal["packed", "rows"]


@dataclass(frozen=True)
class Route:
    """The computation of a model in training and in the transformers sampler."""

    forward: Forward = "packed"
    decode: Decode = "shared"
    blocks: bool = False  # packed with FlexAttention, which skips what no token sees; on GPUs
    eager: bool = False  # rows under transformers' plainest attention: SDPA leaves out soft caps (Gemma 2)


@dataclass(frozen=True)
class KindCoverage:
    """The layers of one kind that have an adapter."""

    kind: Kind
    modules: int
    share: float  # of the base model's parameters


@dataclass(frozen=True)
class Coverage:
    """The layers of the model that have an adapter, by kind."""

    kinds: Sequence[KindCoverage]
    experts: float = 0.0  # share of the base model's parameters in fused experts that have no adapter

    @property
    def modules(self) -> int:
        return sum(one.modules for one in self.kinds)

    @property
    def share(self) -> float:
        """Of the base model's parameters."""
        return sum(one.share for one in self.kinds)

    def __str__(self) -> str:
        kinds = ", ".join(f"{one.kind} {one.modules} layers, {one.share:.0%}" for one in self.kinds)
        left_out = f"; experts, {self.experts:.0%} of the parameters, have none" if self.experts else ""
        layers = "layers" if any(one.kind == "experts" for one in self.kinds) else "linear layers"
        return f"{self.modules} {layers} with {self.share:.0%} of the parameters ({kinds}{left_out})"

    @property
    def sentence(self) -> str:
        """For an event of the job."""
        return f"The adapter is on {self}."

    def as_data(self) -> dict[str, Any]:
        return {
            "adapted_modules": self.modules,
            "adapted_share": self.share,
            "adapted_by_kind": {one.kind: {"modules": one.modules, "share": one.share} for one in self.kinds},
        }


class Trained(Protocol):
    """Describes the trained weights of a policy."""

    @property
    def sentence(self) -> str: ...

    def as_data(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Base:
    """A loaded base model without an adapter."""

    name: str  # the registry's id of it
    source: (
        Path | str
    )  # the folder, or the hub's id, that it was loaded from: another engine can load the same
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context: int  # tokens of prompt and answer together
    files: str = ""  # a hash of the folder's files from before they were loaded
    logits: Head | None = None  # known beforehand, for a model without weights

    @cached_property
    def parts(self) -> Parts:
        """Raises UnsupportedModel where its parts are not found."""
        with refusing(self.model.config):
            found = parts_of(self.model)
            return found if self.logits is None else replace(found, logits=self.logits)

    @property
    def parameters(self) -> int:
        plain: int = sum(parameter.numel() for parameter in self.model.parameters())
        return plain + packed.packed_elements(self.model)


def load_base(
    name: str,
    entry: BaseModelEntry,
    cache: Path,
    device: str,
    chat_template: str | None = None,
    template_arguments: chat_templates.Arguments | None = None,
    *,
    weights: Path | None = None,
    shared: Callable[[], PreTrainedModel] | None = None,
) -> Base:
    """Load a base model by its registry entry; a GGUF file is converted into `cache` the first time.

    Args:
        chat_template: a name of core/chat_templates.py, in place of the entry's own template.
        template_arguments: new defaults of the template's arguments.
        weights: a folder with other weights of the same model, which a job has trained.
        shared: get the model from here, as `load_weights` has loaded it elsewhere.

    Raises:
        UnsupportedModel: transformers, or our attention, does not know the architecture.
        InvalidModel: files are missing or damaged.
        NotEnoughMemory: the weights do not fit.
        ModelUnavailable: the hub is unreachable; the job may be retried.
    """
    source = source_of(entry, cache)
    files = fingerprint.of_folder(source) if isinstance(source, Path) else ""
    model = load_weights(entry, weights or source, device) if shared is None else shared()
    tokenizer = read_tokenizer(entry, source, chat_template, template_arguments)
    return Base(name, source, model, tokenizer, entry.context, files)


def load_weights(entry: BaseModelEntry, source: Path | str, device: str) -> PreTrainedModel:
    """Load the frozen model alone. Raises as `load_base` does."""
    config, dtype = read_config(source), DTYPES[entry.dtype]
    with reading(source, "weights"):
        model, loading = quantized.load(config, source, dtype)
    # transformers only warns, and draws them at random.
    if missing := sorted(loading["missing_keys"]):
        raise InvalidModel(
            f"The model's files lack {len(missing)} weights, the first is {missing[0]}: the folder is "
            "incomplete, or its config.json belongs to another model."
        )
    model.requires_grad_(False)
    with reading(source, "weights"):
        model = model.to(device)
    # eval() for good: dropout would make the trainer disagree with what was sampled.
    loaded: PreTrainedModel = model.eval()
    return loaded


def source_of(entry: BaseModelEntry, cache: Path) -> Path | str:
    """A folder that transformers loads, or a hub id. Raises as `load_base` does."""
    try:
        source = entry.locate()
    except FileNotFoundError as cause:
        raise InvalidModel(f"The model's files are missing: {cause}.") from cause
    if isinstance(source, Path) and source.suffix == ".gguf":
        with reading(source, "GGUF file"):
            return convert_gguf(source, cache)
    return source


def read_config(source: Path | str) -> Any:
    """The model's transformers config. Raises as `load_base` does."""
    if isinstance(source, Path) and not (source / "config.json").is_file():
        raise InvalidModel("The model's folder has no config.json.")
    with reading(source, "config"):
        return AutoConfig.from_pretrained(source)


def read_shape(entry: BaseModelEntry, cache: Path) -> Shape:
    """Return the model's shape from its config. Raises as `load_base` does."""
    source = source_of(entry, cache)
    config = read_config(source)
    with reading(source, "config"):
        return memory.shape_of(config, DTYPES[entry.dtype])


def read_tokenizer(
    entry: BaseModelEntry,
    source: Path | str,
    chat_template: str | None = None,
    template_arguments: chat_templates.Arguments | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer with the chat template of the job or else of the registry's entry. Raises as `load_base` does."""
    with reading(source, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    template = chat_templates.text_of(chat_template) if chat_template else entry.template_text
    if template is not None:
        tokenizer.chat_template = template
    set_arguments(tokenizer, template_arguments or {})
    return tokenizer


def set_arguments(tokenizer: PreTrainedTokenizerBase, arguments: chat_templates.Arguments) -> None:
    """Write new defaults of the arguments into the chat template.

    So the exported adapter and the inference server render prompts as the job does.
    """
    if arguments and tokenizer.chat_template is not None:
        tokenizer.chat_template = chat_templates.with_defaults(tokenizer.get_chat_template(), arguments)


_DAMAGED = (SafetensorError, json.JSONDecodeError, UnicodeDecodeError, EOFError, pickle.UnpicklingError)


@contextmanager
def _with_memory_for(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as cause:
        if isinstance(cause, Refusal) or not is_out_of_memory(cause):
            raise
        raise NotEnoughMemory(
            f"Not enough {memory_named(cause)} for the model's {what}: {first_line(cause)}"
        ) from cause


@contextmanager
def reading(source: Path | str, what: str) -> Iterator[None]:
    """Convert errors of the model inside the context to refusals with a message. Transient errors propagate unchanged.

    `what` is read of `source`, which is a local folder or file, or a hub id.
    """
    where = f"the model '{source}'" if isinstance(source, str) else "the model's folder"
    try:
        with _with_memory_for(what):
            yield
    except Refusal:
        raise
    except _DAMAGED as cause:
        if outage(cause) is not None:  # of the disk, whatever the file
            raise
        raise InvalidModel(f"The {what} of {where} cannot be read: {first_line(cause)}") from cause
    except OSError as cause:
        lacking = outage(cause)
        if lacking is Resource.DISK and isinstance(source, str):
            raise NoRoom(cause, Path(HF_HUB_CACHE), "HF_HOME", None) from cause
        if isinstance(source, str) and not _is_unknown(cause):
            raise ModelUnavailable(
                f"The {what} of {where} could not be downloaded from the hub: {first_line(cause)}"
            ) from cause
        if lacking is not None or cause.errno not in (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
            raise  # the machine's fault
        raise InvalidModel(f"The {what} of {where} cannot be read: {first_line(cause)}") from cause
    except RuntimeError as cause:
        if "automatic conversion of the weights" in str(cause):
            raise InvalidModel(
                f"transformers cannot convert the {what} of {where}; its log has the reason."
            ) from cause
        if "mismatched" not in str(cause):
            raise  # of the device, perhaps
        raise InvalidModel(
            f"The {what} of {where} do not have the shapes of its config.json: the files belong to different models."
        ) from cause
    except (
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        ArithmeticError,
        NotImplementedError,
        ImportError,
    ) as cause:
        if what == "tokenizer":
            raise InvalidModel(f"The tokenizer of {where} cannot be read: {first_line(cause)}") from cause
        raise UnsupportedModel(
            f"The model is not supported: its architecture cannot be loaded ({first_line(cause)})."
        ) from cause


def _is_unknown(cause: BaseException) -> bool:
    """Return whether the hub replied that the model does not exist."""
    return type(cause.__cause__).__name__ in ("RepositoryNotFoundError", "EntryNotFoundError")


def convert_gguf(source: Path, cache: Path) -> Path:
    """The GGUF file's weights, dequantised once, as a folder that loads in a second. Safe to race.

    Returns the folder; it is made beside its final place and moved there whole.
    """
    target = fingerprint.conversion_of(source, cache)
    if target.exists():
        return target
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # The loader marks the model as quantised although its weights are plain by now; transformers then refuses to
    # save it. The same weights in a fresh model carry no such mark.
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(config), dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config

    with scratch_folder(cache) as scratch:
        scratch.chmod(0o755)  # the cache may be shared
        plain.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(scratch)
        try:
            scratch.rename(target)
        except OSError:
            if not target.exists():  # another process may have written the same folder
                raise
    return target


class Policy:
    """The base model with a trainable adapter, and the two halves of its forward pass."""

    expert_rank = 0  # of the adapters on experts; 0: there are none
    _layout: expert_files.PerExpert | None = None  # of the adapter's file; None: PEFT's own names

    def __init__(
        self, base: Base, *, rank: int, alpha: int, seed: int, targets: LoraTargets = "all-linear"
    ) -> None:
        """A fresh adapter: its B is zero, so the policy starts as the base model exactly.

        Raises:
            InvalidTargets: `targets` names layers that do not exist, or that cannot have an adapter.
            UnsupportedModel: the model has no layers for an adapter, or is not built as we know it. Whether it is
                computed rightly is for `worker.checks.compatibility.probe` to say.
        """
        self._kinds = {layer.name: layer.kind for layer in adaptable_layers(base.model)}
        self._experts = of_experts = expert_targets(base.model, targets)
        # Experts have one rank: all layers of a mixture send a token to as many of them.
        self.expert_rank = max((layer.rank(rank) for layer in of_experts), default=0)
        self._layout = _layout_of(base) if of_experts else None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = LoraConfig(
                r=rank,
                lora_alpha=alpha,
                target_modules=adapter_targets(base.model, targets),
                target_parameters=[
                    f"{layer.name}.{projection}" for layer in of_experts for projection in experts.PROJECTIONS
                ]
                or None,
                rank_pattern=experts.rank_pattern(self.expert_rank),
                task_type="CAUSAL_LM",
            )
            try:
                adapted: PeftModel = get_peft_model(base.model, config)
            except (ValueError, TypeError) as cause:  # PEFT names layers that it cannot adapt
                raise UnsupportedModel(
                    f"{type(base.model).__name__} is not supported: {first_line(cause)}"
                ) from cause
        self.model: PeftModel = adapted.eval()
        lora.install(self.model)
        if base.parts.head.weight.dtype != torch.float32:  # on a CPU, in float32, time is scarcer than memory
            recompute.install(self.model)
        # Exported adapters name the base by its hub id or registry name, never by a path of this machine.
        self.model.peft_config["default"].base_model_name_or_path = (
            base.source if isinstance(base.source, str) else base.name
        )
        self._compute_as(base, lora.FrozenLinear(base.parts.head, float32=True))

    def _compute_as(self, base: Base, head: HeadProduct) -> None:
        """Take over what both kinds of policies have."""
        self._parts = base.parts
        self.causal: PreTrainedModel = base.model
        self.source, self.files = base.source, base.files
        self.tokenizer = base.tokenizer
        self.context = base.context
        self._head = base.parts.head
        self.head_product = head
        self._own_attention: str = self.causal.config._attn_implementation
        self.use(Route())
        self.stop_ids = stop_ids_of(configured_stops(self.causal), base.tokenizer)
        self.left_out: list[str] = []
        # The first rows of each A and columns of each B that are not trained: the adapter of a parent.
        self.frozen_rank = 0

    @property
    def device(self) -> torch.device:
        device: torch.device = self._head.weight.device
        return device

    @property
    def hidden_size(self) -> int:
        """The width of the hidden states that the head reads."""
        return self._head.in_features

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Build the grammar vocabulary. Uses the head's size, which may exceed the tokenizer's."""
        return Vocabulary(self.tokenizer, int(self._head.weight.shape[0]), self.stop_ids)

    @property
    def head_logits(self) -> Head:
        """The function from the product of the head to logits."""
        return self._parts.logits

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder's layers; none where they are not in one list."""
        return list(self._parts.layers or [])

    @property
    def is_sharded(self) -> bool:
        """Whether a forward or backward pass is a collective operation of several ranks."""
        return isinstance(self._parts.decoder, FSDPModule)

    @property
    def compiles_attention(self) -> bool:
        """Whether attention compiles a kernel for each size of `kernel_tokens`, of forward and of training passes."""
        return self.route.blocks and self.device.type == "cuda"

    @property
    def text_decoder(self) -> nn.Module:
        """The module that gives hidden states."""
        decoder: nn.Module = self._parts.decoder
        return decoder

    @property
    def outside_of_layers(self) -> list[nn.Parameter]:
        """The parameters of the head and of the embeddings, which may be the same."""
        embeddings = self.causal.get_input_embeddings()
        return [*self._head.parameters(), *embeddings.parameters()]

    @property
    def trained(self) -> Trained:
        """For the job's owner: what is trained."""
        return self.coverage

    @property
    def coverage(self) -> Coverage:
        """The layers that are trained, without those that the sampler cannot adapt (`leave_out`)."""
        left_out = {self.model.get_submodule(name) for name in self._left_out_modules()}
        frozen = sum(
            parameter.numel() for parameter in self.model.parameters() if not parameter.requires_grad
        ) + packed.packed_elements(self.model)
        weights: dict[Kind, list[int]] = {kind: [] for kind in KINDS}
        for name, module in self.causal.named_modules():
            if name in self._kinds and isinstance(module, LoraLayer) and module not in left_out:
                weights[self._kinds[name]].append(_adapted_weights(module))
        kinds = [
            KindCoverage(kind, len(found), sum(found) / frozen) for kind, found in weights.items() if found
        ]
        of_experts = sum(weight.numel() for weight in fused_experts(self.causal).values())
        return Coverage(kinds, (of_experts - sum(weights["experts"])) / frozen)

    @property
    def trainable(self) -> list[torch.nn.Parameter]:
        """The weights that the optimizer changes, in the order of `with_weights`."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def computing(self) -> list[torch.nn.Parameter]:
        """The weights that the model computes with, one for each of `trainable`."""
        return self.trainable

    @property
    def led(self) -> list[torch.nn.Parameter]:
        """Of `trainable`: those that the first of several ranks updates for all of them."""
        return self.trainable

    @property
    def trained_head(self) -> list[torch.nn.Parameter]:
        """The weights of the head that have a gradient."""
        return []

    def follow_trainable(self) -> None:
        """Have the model compute with the current `trainable`, after they were changed."""

    def leave_out(self, modules: Sequence[str]) -> None:
        """Do not train the adapter of these layers: their gradients are dropped, so that it stays zero.

        `modules`: names of `adapter()` up to `.lora_`.

        Raises:
            UnsupportedModel: one of them has been trained already, or there are no others.
        """
        own = self.adapter()
        adapted = {name.rpartition(".lora_")[0] for name in own}
        if adapted <= set(modules):
            raise UnsupportedModel(
                "The model is not supported: the sampler puts no adapter on any of its layers."
            )
        for name in modules:
            if own[f"{name}.lora_B.weight"].any():
                raise UnsupportedModel(
                    f"The adapter cannot be sampled: it changes {name}, and this sampler puts no adapter there. Use "
                    "the sampler that it was trained with."
                )
        self.left_out = sorted(modules)

    def drop_left_out(self) -> None:
        """Drop the gradients of the layers that are left out."""
        for name in self._left_out_modules():
            layer = self.model.get_submodule(name)
            for parameter in layer.parameters():
                parameter.grad = None

    def _left_out_modules(self) -> set[str]:
        layout = self._layout
        return {name if layout is None else layout.module_of(name) for name in self.left_out}

    def use(self, route: Route) -> None:
        """Compute from now on as `worker.checks.compatibility.probe` found to be right."""
        own = "eager" if route.eager else self._own_attention
        self.causal.set_attn_implementation(attention.NAME if route.forward == "packed" else own)
        self.route = route

    def hidden(
        self, input_ids: Tensor, position_ids: Tensor, segment: Tensor, seen_until: Tensor | None = None
    ) -> Tensor:
        """Hidden states [B, T, h] before the head, of rows as `worker.model.batch.Tensors` lays them out.

        Args:
            segment: int64 [B, T], 0 for the prompt, 1.. for its answers, -1 for padding. With the forward "rows" there
                is one answer in a row, and the model computes it under its own rules: padding on the right is never
                seen.
            seen_until: int64 [B, T], of rows with branches.
        """
        if self.route.forward == "rows":
            output = self._parts.decoder(input_ids=input_ids, use_cache=False)
        else:
            bias = None if self.device.type == "cpu" else self.model.dtype
            layout = attention.Layout.of_rows(position_ids, segment, bias, self.route.blocks, seen_until)
            with attention.laid_out(layout):
                # A 2-D mask: without one, transformers takes jumps of the positions for borders of documents; a 4-D
                # mask would replace the model's own rules, so windows would be lost. use_cache=False: a cache would
                # take its own view of the mask.
                output = self._parts.decoder(
                    input_ids=input_ids,
                    position_ids=position_ids,
                    attention_mask=torch.ones_like(input_ids),
                    use_cache=False,
                )
        last: Tensor = output.last_hidden_state
        return last

    def decoding(self, prompts_P: Sequence[Sequence[int]], size: int) -> Decoding:
        """Begin `size` answers to each prompt. With the decode "alone", one prompt at a time."""
        decoder = self._parts.decoder
        match self.route.decode:
            case "shared" | "joined" as kind:
                return GroupDecoding(decoder, prompts_P, size, self.device, kind == "joined")
            case "forked" | "padded" | "alone" as kind:
                return RowDecoding(decoder, prompts_P, size, self.device, kind == "forked")
            case "recomputed":
                return RecomputedDecoding(decoder, prompts_P, size, self.device)

    def row_bytes(self) -> tuple[int, int]:
        """With the forward "rows": the bytes of a row in the cache, of each token and beside its tokens."""
        has_cache = self.route.decode != "recomputed"
        return row_bytes(self._parts.decoder, self.device) if has_cache else (0, 0)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., h] -> logits [..., V] in float32, whatever the precision of the weights."""
        return self._parts.logits(self.head_product(hidden).float())

    def checkpoint_layers(self) -> None:
        """Enable activation checkpointing.

        Raises:
            UnsupportedModel: the layers are not in one list.
        """
        if not self.layers:
            raise UnsupportedModel(
                f"{type(self.causal).__name__} does not fit: its activations cannot be computed twice "
                "to save memory, because its layers are not in one list."
            )
        memory.checkpoint_layers(self.layers)

    @property
    def has_base(self) -> bool:
        """Whether `as_base` computes the model that the adapter is on."""
        return True

    @contextmanager
    def as_base(self) -> Iterator[None]:
        """Disable the adapter during the context: the reference of the KL."""
        with self.model.disable_adapter():
            yield

    @contextmanager
    def moved(self) -> Iterator[None]:
        """With an adapter that moves the hidden states by some per cent, where a fresh one is zero."""
        generator = torch.Generator().manual_seed(0)
        weights = [
            (0.02 * torch.randn(parameter.shape, generator=generator)).to(parameter.device, parameter.dtype)
            for parameter in self.trainable
        ]
        with self.with_weights(weights):
            yield

    def snapshot(self) -> list[Tensor]:
        """Copies of the weights that compute, for `with_weights`."""
        return [parameter.detach().clone() for parameter in self.computing]

    @contextmanager
    def with_weights(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """With other weights of the same precision, one tensor for each of `trainable`."""
        computing = self.computing
        own = [parameter.data for parameter in computing]
        for parameter, other in zip(computing, weights, strict=True):
            parameter.data = other
        try:
            yield
        finally:
            for parameter, weight in zip(computing, own, strict=True):
                parameter.data = weight

    def fitted(self, tensors: Mapping[str, Tensor], *, rank: int, alpha: float) -> list[Tensor]:
        """The weights of another adapter on the same base, for `with_weights`: one tensor for each of `trainable`.

        Its rank may differ: the layers compute with any. Layers that it leaves out get none.

        Args:
            tensors: by the names of `adapter`.
            rank, alpha: of its job.

        Raises:
            InvalidModel: it is on layers that have no adapter here.
        """
        own = self._parameters()
        tensors = self.in_peft(tensors)
        if missing := sorted(tensors.keys() - own.keys()):
            raise InvalidModel(f"has an adapter on layers where this job has none, such as {missing[0]}")
        fitted = []
        for (name, mine), parameter in zip(own.items(), self.trainable, strict=True):
            if mine.data_ptr() != parameter.data_ptr():
                raise AssertionError("PEFT lists the adapter's weights in another order than the model")
            other = tensors.get(name)
            if other is None:
                fitted.append(torch.zeros_like(parameter))
            else:
                rescaled = self._rescaled(name, rank, alpha) if ".lora_B." in name else 1.0
                fitted.append(other.to(parameter) * rescaled)
        return fitted

    def _rescaled(self, name: str, rank: int, alpha: float) -> float:
        """The factor for a B of another job's adapter, so that its product is the same at the scale of this job."""
        config = self.model.peft_config["default"]
        own = config.r
        if experts.is_of_experts(name):
            own, rank = self.expert_rank, self._experts[0].rank(rank)
        return float((alpha / rank) / (config.lora_alpha / own))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return render(self.tokenizer, messages)

    @cached_property
    def reasoning(self) -> Reasoning | None:
        """The model's format of reasoning; None if it does not reason."""
        return reasoning.detect(self.tokenizer)

    @property
    def template_facts(self) -> TemplateFacts | None:
        """The facts of the chat template; None: the model has none."""
        return facts_of(self.tokenizer, own_stop_ids(configured_stops(self.causal), self.tokenizer))

    def text(self, output_ids_T: Sequence[int]) -> str:
        """The text of the final answer."""
        if self.reasoning is not None:
            return self.reasoning.split(output_ids_T).text
        return str(self.tokenizer.decode(list(output_ids_T), skip_special_tokens=True))

    def adapter(self) -> dict[str, Tensor]:
        """Copy the current adapter to main memory, under the names that `save` writes."""
        return self._to_file(
            {
                name: tensor.detach().to("cpu", copy=True).contiguous()
                for name, tensor in self._parameters().items()
            }
        )

    def _parameters(self) -> dict[str, Tensor]:
        """The adapter's own storage, by PEFT's names."""
        tensors: dict[str, Tensor] = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        return tensors

    def _to_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert an adapter by PEFT's names to the layout of files."""
        return tensors if self._layout is None else self._layout.to_file(tensors)

    @property
    def ranks_in_file(self) -> dict[str, int]:
        """PEFT's `rank_pattern` for the tensors of `adapter`."""
        if self._layout is None:
            return experts.rank_pattern(self.expert_rank)
        return self._layout.ranks(self.expert_rank)

    def in_peft(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors of a file, or of `adapter`, by PEFT's names."""
        return tensors if self._layout is None else self._layout.from_file(tensors)

    @contextmanager
    def with_adapter(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace the adapter by an earlier one of this policy in the context, as `adapter` copied it."""
        own = self.adapter()
        self._put(tensors)
        try:
            yield
        finally:
            self._put(own)

    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        tensors = self.in_peft(tensors)
        for name, tensor in self._parameters().items():
            tensor.copy_(tensors[name])

    def save(self, folder: Path) -> None:
        """Write the adapter as PEFT does (adapter_model.safetensors and adapter_config.json), and its tokenizer."""
        self.model.save_pretrained(folder, save_embedding_layers=False)
        if self._layout is not None:
            expert_files.rewrite(folder, self._layout, self.expert_rank)
        (folder / "README.md").unlink(
            missing_ok=True
        )  # PEFT's empty model card; core/results/export.py writes one
        self.tokenizer.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        """Load a saved adapter of the same shape.

        Raises:
            InvalidModel: its file is damaged, or it is an adapter on other layers or of another rank.
        """
        self._copy(folder, self._parameters())

    def load_frozen(self, folder: Path) -> None:
        """Load a saved adapter of the rank `frozen_rank` into the part that is not trained.

        The rest computes nothing yet: its B is zero.

        Raises:
            InvalidModel: its file is damaged, or it is an adapter on other layers or of another rank.
        """
        if self.expert_rank:
            raise InvalidModel(
                "An adapter on experts cannot be trained further with a larger rank. Leave out lora.rank, so that the "
                "job has that of the model that it starts from."
            )
        own = self._parameters()
        self._copy(folder, {name: frozen_part(name, one, self.frozen_rank) for name, one in own.items()})

    def _copy(self, folder: Path, own: Mapping[str, Tensor]) -> None:
        """Copy the saved adapter into these parts of the parameters."""
        from peft import load_peft_weights

        try:
            weights = load_peft_weights(str(folder), device=str(self.device))
        except SafetensorError as cause:
            if outage(cause) is not None:
                raise
            raise InvalidModel(f"The adapter cannot be read: {first_line(cause)}") from cause
        weights.pop(REWARD_HEAD, None)  # the adapter of a reward model is one like any other
        weights = self.in_peft(weights)
        shapes = {name: tensor.shape for name, tensor in own.items()}
        if {name: tensor.shape for name, tensor in weights.items()} != shapes:
            raise InvalidModel(
                "The saved adapter does not fit the model: it was made for other layers or with another lora_rank."
            )
        # By name, and not by PEFT's own loader, which renames layers of some models and drops what it then misses.
        for name, tensor in own.items():
            tensor.copy_(weights[name])

    def frozen_parts(self, of: Callable[[torch.nn.Parameter], Tensor | None]) -> list[Tensor]:
        """Views of the part that is not trained, of each parameter's weight or gradient; empty if all is trained."""
        if not self.frozen_rank:
            return []
        named = [(name, of(one)) for name, one in self.model.named_parameters() if one.requires_grad]
        return [frozen_part(name, one, self.frozen_rank) for name, one in named if one is not None]


def _layout_of(base: Base) -> expert_files.PerExpert | None:
    return expert_files.layout_of(base.model, architecture(read_config(base.source)))


def _adapted_weights(layer: LoraLayer) -> int:
    """The weights of the base model that an adapter changes: those of a linear layer, or of all experts of a layer."""
    base = layer.get_base_layer()
    if isinstance(layer, ParamWrapper):
        return sum(getattr(base, name).numel() for name in experts.wrappers_of(layer))
    return int(base.in_features * base.out_features)


def frozen_part(name: str, weight: Tensor, rank: int) -> Tensor:
    """The first `rank` rows of an A [R, in], or columns of a B [out, R], as a view."""
    return weight[:rank] if ".lora_A." in name else weight[:, :rank]


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    chat_template: str | None = None,
    *,
    generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Render a chat to token ids. Passes `developer` as `system` to templates.

    Texts of special tokens inside content are text (chat_tokens.py).

    Args:
        chat_template: Jinja text in place of the tokenizer's own.
        generation_prompt: end with the beginning of an answer.
        tools: JSON schemas of functions, in OpenAI's format.

    Raises:
        NoChatTemplate: the model has none.
        ChatTemplateFailed: the template rejects these messages.
    """
    if chat_template is None and tokenizer.chat_template is None:
        raise NoChatTemplate(
            "The model has no chat template, as is usual for a base model. Set chat_template = "
            '"plain" (or "r1_zero", or a path to a Jinja file) in its entry of the model registry, or '
            'hyperparameters.advanced.sampling.chat_template = "plain" in the job.'
        )
    chat = messages_for(chat_template or tokenizer.chat_template, messages)
    arguments: dict[str, Any] = {
        "chat_template": chat_template,
        "add_generation_prompt": generation_prompt,
        "return_dict": False,
    }

    def text(chat: Chat, tools: Tools) -> str:
        return str(tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, **arguments))

    given = list(tools) or None
    try:
        ids = content_tokens(tokenizer, chat_template, chat, given, text)
        if ids is None:
            ids = tokenizer.apply_chat_template(chat, tools=given, tokenize=True, **arguments)
    except (MemoryError, OSError):
        raise  # the machine's
    except Exception as cause:
        # Templates are programs: some reject an order of roles, others divide by zero.
        raise ChatTemplateFailed(
            f"The model's chat template rejects these messages: {first_line(cause)}"
        ) from cause
    return list(ids)


def generation_config_of(source: Path | str) -> GenerationConfig | None:
    """The model's generation_config.json. None: it has none, as many models.

    Raises:
        OSError: this machine cannot read it now, so whether there is one is not known.
    """
    try:
        return GenerationConfig.from_pretrained(source)
    except OSError as cause:
        # A hub that is out of reach has given the model's other files to this machine, and would have given this one.
        if outage(cause) in (None, Resource.NETWORK, Resource.NAMES):
            return None
        raise


def read_generation_config(model: PreTrainedModel, source: Path | str) -> None:
    """Give a model without weights the generation config of its source, as a loaded one has it."""
    if (config := generation_config_of(source)) is not None:  # else transformers makes one of the config
        model.generation_config = config


def configured_stops(model: PreTrainedModel) -> int | list[int] | None:
    """`eos_token_id` of the model's generation config."""
    configured: int | list[int] | None = getattr(model.generation_config, "eos_token_id", None)
    return configured
