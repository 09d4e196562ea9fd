"""The policy: frozen base weights, a LoRA adapter on all linear layers, a tokenizer.

Sampler and trainer read the same weights in the same process, so a step's update is what the next step samples
from, with nothing copied and nothing rounded. This file and worker/model/attention.py are where transformers' own
conventions are met.
"""

import errno
import json
import pickle
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from core import chat_templates
from core.registry import BaseModelEntry
from worker.model import attention, lora, memory
from worker.model.sizing import Shape
from worker.refusals import (
    ChatTemplateFailed,
    InvalidModel,
    ModelUnavailable,
    NoChatTemplate,
    NotEnoughMemory,
    Refusal,
    UnsupportedModel,
)
from worker.rollout.samplers.json_schema import Vocabulary

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def load_base(
    name: str, entry: BaseModelEntry, cache: Path, device: str, chat_template: str | None = None
) -> Base:
    """Load a base model by its registry entry; a GGUF file is converted into `cache` the first time.

    Args:
        chat_template: a name of core/chat_templates.py, in place of the entry's own template.

    Raises:
        UnsupportedModel: transformers, or our attention, does not know the architecture.
        InvalidModel: files are missing or damaged.
        NotEnoughMemory: the weights do not fit.
        ModelUnavailable: the hub is unreachable; the job may be retried.
    """
    source = source_of(entry, cache)
    with _reading(source, "weights"):
        model, loading = AutoModelForCausalLM.from_pretrained(
            source, dtype=DTYPES[entry.dtype], attn_implementation=attention.NAME, output_loading_info=True
        )
    # transformers only warns, and draws them at random.
    if missing := sorted(loading["missing_keys"]):
        raise InvalidModel(
            f"The model's files lack {len(missing)} weights, the first is {missing[0]}: the folder is "
            "incomplete, or its config.json belongs to another model."
        )
    tokenizer = read_tokenizer(entry, source, chat_template)
    model.requires_grad_(False)
    with _reading(source, "weights"):
        model = model.to(device)
    # eval() for good: dropout would make the trainer disagree with what was sampled.
    return Base(name, source, model.eval(), tokenizer, entry.context)


def source_of(entry: BaseModelEntry, cache: Path) -> Path | str:
    """A folder that transformers loads, or a hub id. Raises as `load_base` does."""
    try:
        source = entry.locate()
    except FileNotFoundError as cause:
        raise InvalidModel(f"The model's files are missing: {cause}.") from cause
    if isinstance(source, Path) and source.suffix == ".gguf":
        with _reading(source, "GGUF file"):
            return convert_gguf(source, cache)
    return source


def read_config(source: Path | str) -> Any:
    """The model's transformers config. Raises as `load_base` does."""
    if isinstance(source, Path) and not (source / "config.json").is_file():
        raise InvalidModel("The model's folder has no config.json.")
    with _reading(source, "config"):
        return AutoConfig.from_pretrained(source)


def read_shape(entry: BaseModelEntry, cache: Path) -> Shape:
    """Return the model's shape from its config. Raises as `load_base` does."""
    source = source_of(entry, cache)
    config = read_config(source)
    with _reading(source, "config"):
        return memory.shape_of(config, DTYPES[entry.dtype])


def read_tokenizer(
    entry: BaseModelEntry, source: Path | str, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer with the chat template of the job or else of the registry's entry. Raises as `load_base` does."""
    with _reading(source, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    template = chat_templates.text_of(chat_template) if chat_template else entry.template_text
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


_DAMAGED = (SafetensorError, json.JSONDecodeError, UnicodeDecodeError, EOFError, pickle.UnpicklingError)


@contextmanager
def _reading(source: Path | str, what: str) -> Iterator[None]:
    """Convert errors of the model inside the context to refusals with a message. Transient errors propagate unchanged.

    `what` is read of `source`, which is a local folder or file, or a hub id.
    """
    where = f"the model '{source}'" if isinstance(source, str) else "the model's folder"
    try:
        yield
    except Refusal:
        raise
    except (MemoryError, torch.OutOfMemoryError) as cause:
        raise NotEnoughMemory(f"Not enough memory for the model's {what}: {first_line(cause)}") from cause
    except _DAMAGED as cause:
        raise InvalidModel(f"The {what} of {where} cannot be read: {first_line(cause)}") from cause
    except OSError as cause:
        if isinstance(source, str) and not _is_unknown(cause):
            raise ModelUnavailable(
                f"The {what} of {where} could not be downloaded from the hub: {first_line(cause)}"
            ) from cause
        if cause.errno not in (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
            raise  # the disk's fault
        raise InvalidModel(f"The {what} of {where} cannot be read: {first_line(cause)}") from cause
    except RuntimeError as cause:
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


def first_line(cause: BaseException) -> str:
    """An exception for a message: its type and its first line, shortened."""
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0][:300]}" if lines else type(cause).__name__


def convert_gguf(source: Path, cache: Path) -> Path:
    """The GGUF file's weights, dequantised once, as a folder that loads in a second. Safe to race.

    Returns the folder; it is made beside its final place and moved there whole.
    """
    target = cache / f"{source.stem}-{source.stat().st_size}"
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

    scratch = cache / f".{target.name}-{id(plain)}"
    plain.save_pretrained(scratch)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(scratch)
    try:
        scratch.rename(target)
    except OSError:  # another process has written the same folder
        shutil.rmtree(scratch)
    return target


# By the last part of a module's name: what sends tokens to experts, or chooses which keys are looked at. vLLM puts no
# adapter there, and what they choose has no gradient.
ROUTERS = frozenset(
    {"gate", "router", "wg", "classifier", "shared_expert_gate", "wq_b", "weights_proj", "index_qk_proj"}
)


def adapter_targets(model: PreTrainedModel) -> str | list[str]:
    """The layers that get an adapter: every plain linear layer but the head and what routes.

    PEFT's own "all-linear" is that for a dense model. For a mixture of experts it may add the experts' fused weights
    and the router, or the attention alone, by the model's type; there the layers are listed by name.

    Raises:
        UnsupportedModel: there are none.
    """
    head = model.get_output_embeddings()
    linear = {
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    }
    plain = sorted(
        name
        for name in linear
        if type(model.get_submodule(name)) is nn.Linear and name.rsplit(".", 1)[-1] not in ROUTERS
    )
    if not plain:
        raise UnsupportedModel(
            f"{type(model).__name__} is not supported: it has no plain linear layers for an adapter."
        )
    if len(plain) == len(linear) and not has_experts(model.config):
        return "all-linear"
    return plain


def has_experts(config: Any) -> bool:
    """Whether the model is a mixture of experts."""
    text = config.get_text_config()
    fields = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any(getattr(text, field, None) for field in fields)


def decoder_of(causal: PreTrainedModel) -> Any:
    """The part of a causal model that gives hidden states. Raises UnsupportedModel where it is not as we know it."""
    decoder = getattr(causal, causal.base_model_prefix, None)
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise UnsupportedModel(
            f"{type(causal).__name__} is not supported: its decoder and layers are not at the attributes of "
            "current transformers models."
        )
    return decoder


class Policy:
    """The base model with a trainable adapter, and the two halves of its forward pass."""

    def __init__(self, base: Base, *, rank: int, alpha: int, seed: int) -> None:
        """A fresh adapter: its B is zero, so the policy starts as the base model exactly.

        Raises:
            UnsupportedModel: the model has no layers for an adapter, or is not built as we know it. Whether it is
                computed rightly is for `worker.model.support.probe` to say.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = LoraConfig(
                r=rank,
                lora_alpha=alpha,
                target_modules=adapter_targets(base.model),
                task_type="CAUSAL_LM",
            )
            try:
                self.model: PeftModel = get_peft_model(base.model, config)
            except (ValueError, TypeError) as cause:  # PEFT names layers that it cannot adapt
                raise UnsupportedModel(
                    f"{type(base.model).__name__} is not supported: {first_line(cause)}"
                ) from cause
        self.model.eval()
        lora.install(self.model)
        # Exported adapters name the base by its hub id or registry name, never by a path of this machine.
        self.model.peft_config["default"].base_model_name_or_path = (
            base.source if isinstance(base.source, str) else base.name
        )
        self.source = base.source
        self.tokenizer = base.tokenizer
        self.context = base.context
        causal = self.model.get_base_model()
        self._decoder = decoder_of(causal)
        self._head = causal.get_output_embeddings()
        self._frozen_head = lora.FrozenLinear(self._head)
        self.stop_ids = stop_ids(causal, base.tokenizer)

    @property
    def device(self) -> torch.device:
        device: torch.device = self._head.weight.device
        return device

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Build the grammar vocabulary. Uses the head's size, which may exceed the tokenizer's."""
        return Vocabulary(self.tokenizer, int(self._head.weight.shape[0]), self.stop_ids)

    @property
    def layers(self) -> torch.nn.ModuleList:
        layers: torch.nn.ModuleList = self._decoder.layers
        return layers

    @property
    def trainable(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def hidden(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor | None,
        cache: attention.GroupCache | None = None,
    ) -> Tensor:
        """Hidden states [B, T, h] before the head. `mask` is bool [B, 1, T, T], or None when `cache` decodes."""
        # use_cache=False matters: with it on, transformers makes a cache and may take its own view of the mask
        # (measured by others: logits off by 36 when packed answers see each other).
        output = self._decoder(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=mask if mask is not None else attention.no_mask(input_ids),
            past_key_values=cache,
            use_cache=cache is not None,
            group_cache=cache,
        )
        last: Tensor = output.last_hidden_state
        return last

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., h] -> logits [..., V] in float32, whatever the precision of the weights."""
        return self._frozen_head(hidden).float()

    def checkpoint_layers(self) -> None:
        """Enable activation checkpointing."""
        memory.checkpoint_layers(self.layers)

    @contextmanager
    def as_base(self) -> Iterator[None]:
        """Disable the adapter during the context: the reference of the KL."""
        with self.model.disable_adapter():
            yield

    @contextmanager
    def wearing(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """With other weights in the adapter, one tensor for each of `trainable`."""
        own = [parameter.data for parameter in self.trainable]
        for parameter, other in zip(self.trainable, weights, strict=True):
            parameter.data = other
        try:
            yield
        finally:
            for parameter, weight in zip(self.trainable, own, strict=True):
                parameter.data = weight

    def render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return render(self.tokenizer, messages)

    def text(self, output_ids_T: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(output_ids_T), skip_special_tokens=True))

    def adapter(self) -> dict[str, Tensor]:
        """Copy the current adapter to main memory, under the names that `save` writes."""
        tensors = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}

    def save(self, folder: Path) -> None:
        """Write the adapter as PEFT does (adapter_model.safetensors and adapter_config.json), and its tokenizer."""
        self.model.save_pretrained(folder, save_embedding_layers=False)
        (folder / "README.md").unlink(
            missing_ok=True
        )  # PEFT's empty model card; core/results/export.py writes one
        self.tokenizer.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        """Load a saved adapter of the same shape.

        Raises:
            InvalidModel: its file is damaged, or it is an adapter on other layers or of another rank.
        """
        from peft import load_peft_weights

        own = get_peft_model_state_dict(
            self.model, save_embedding_layers=False
        )  # the parameters' own storage
        try:
            weights = load_peft_weights(str(folder), device=str(self.device))
        except SafetensorError as cause:
            raise InvalidModel(f"The adapter cannot be read: {first_line(cause)}") from cause
        shapes = {name: tensor.shape for name, tensor in own.items()}
        if {name: tensor.shape for name, tensor in weights.items()} != shapes:
            raise InvalidModel(
                "The saved adapter does not fit the model: it was made for other layers or with another lora_rank."
            )
        # By name, and not by PEFT's own loader, which renames layers of some models and drops what it then misses.
        for name, tensor in own.items():
            tensor.copy_(weights[name])


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    chat_template: str | None = None,
) -> list[int]:
    """Render a chat to token ids with a generation prompt. Passes `developer` as `system` to templates.

    Args:
        chat_template: Jinja text in place of the tokenizer's own.

    Raises:
        NoChatTemplate: the model has none.
        ChatTemplateFailed: the template rejects these messages.
    """
    if chat_template is None and tokenizer.chat_template is None:
        raise NoChatTemplate(
            "The model has no chat template, as is usual for a base model. Set chat_template = "
            '"plain" (or "r1_zero", or a path to a Jinja file) in its entry of the model registry, or '
            'hyperparameters.advanced.chat_template = "plain" in the job.'
        )
    chat = [
        {
            **message,
            "role": "system" if message["role"] == "developer" else message["role"],
            "content": _text(message),
        }
        for message in messages
    ]
    try:
        ids = tokenizer.apply_chat_template(
            chat,
            chat_template=chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
    except (TemplateError, ValueError, TypeError) as cause:
        # Templates are programs, and some reject an order of roles.
        raise ChatTemplateFailed(
            f"The model's chat template rejects these messages: {first_line(cause)}"
        ) from cause
    return list(ids)


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    return stop_ids_of(getattr(model.generation_config, "eos_token_id", None), tokenizer)


def stop_ids_of(configured: int | list[int] | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end an answer: the model's own and the tokenizer's."""
    many = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in [*many, tokenizer.eos_token_id] if token is not None)


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""
