"""The model that learns: frozen base weights, a LoRA adapter on all linear layers, a tokenizer.

Sampler and trainer read the same weights in the same process, so a step's update is what the next step samples
from, with nothing copied and nothing rounded. This file and worker/attention.py are where transformers' own
conventions are met.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from core.registry import BaseModelEntry
from worker import attention, lora, memory
from worker.samplers.json_schema import Vocabulary

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class UnsupportedModel(Exception):
    """The model computes something that our packed forward pass does not."""


@dataclass(frozen=True)
class Base:
    """A base model as loaded, before an adapter is put on it."""

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


def load_base(name: str, entry: BaseModelEntry, cache: Path, device: str) -> Base:
    """Load a base model by its registry entry; a GGUF file is converted into `cache` the first time."""
    source = source_of(entry, cache)
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=DTYPES[entry.dtype], attn_implementation=attention.NAME
    )
    tokenizer = AutoTokenizer.from_pretrained(source)
    model.requires_grad_(False)
    # eval() for good: dropout would make the trainer disagree with what was sampled.
    return Base(name, source, model.to(device).eval(), tokenizer, entry.context)


def source_of(entry: BaseModelEntry, cache: Path) -> Path | str:
    """A folder that transformers loads, or a hub id."""
    source = entry.locate()
    if isinstance(source, Path) and source.suffix == ".gguf":
        return convert_gguf(source, cache)
    return source


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
    except OSError:  # another process was first; its folder is as good
        shutil.rmtree(scratch)
    return target


class Policy:
    """The base model with a trainable adapter, and the two halves of its forward pass."""

    def __init__(self, base: Base, *, rank: int, alpha: int, seed: int) -> None:
        """A fresh adapter: its B is zero, so the policy starts as the base model exactly."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model: PeftModel = get_peft_model(
                base.model,
                LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM"),
            )
        self.model.eval()
        lora.install(self.model)
        # What people take home names the base as the hub does, or as the registry: never by this machine's path.
        self.model.peft_config["default"].base_model_name_or_path = (
            base.source if isinstance(base.source, str) else base.name
        )
        self.source = base.source
        self.tokenizer = base.tokenizer
        self.context = base.context
        causal = self.model.get_base_model()
        self._decoder = getattr(causal, causal.base_model_prefix)
        self._head = causal.get_output_embeddings()
        self._frozen_head = lora.FrozenLinear(self._head)
        self.stop_ids = stop_ids(causal, base.tokenizer)
        self.refuse_unsupported()

    @property
    def device(self) -> torch.device:
        device: torch.device = self._head.weight.device
        return device

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What answers under a schema are made of. The head's size, which may be more than the tokenizer knows."""
        return Vocabulary(self.tokenizer, int(self._head.weight.shape[0]), self.stop_ids)

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
        """Keep less of a forward pass, and compute it again in the backward pass."""
        memory.checkpoint_layers(self._decoder.layers)

    @contextmanager
    def as_base(self) -> Iterator[None]:
        """With the adapter switched off: the reference of the KL."""
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
        """A copy of the adapter as it is now, in main memory, under the names that `save` writes."""
        tensors = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}

    def save(self, folder: Path) -> None:
        """Write the adapter as PEFT does (adapter_model.safetensors and adapter_config.json), and its tokenizer."""
        self.model.save_pretrained(folder, save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card; core/export.py writes one
        self.tokenizer.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        """Take over a saved adapter of the same shape."""
        from peft import load_peft_weights, set_peft_model_state_dict

        set_peft_model_state_dict(self.model, load_peft_weights(str(folder), device=str(self.device)))

    @torch.no_grad()
    def refuse_unsupported(self) -> None:
        """Compare our two-part forward with the model's own on one short text.

        Soft-capped logits, scaled heads, attention that is not plain causal: whatever an architecture does
        beyond what we compute shows up here as a difference, before anything is trained on it.

        Raises:
            UnsupportedModel: the log-probabilities differ by more than rounding explains.
        """
        ids = torch.tensor([[i % 97 + 3 for i in range(24)]], device=self.device)
        own = self.model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        width = ids.shape[1]
        mask = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()[None, None]
        positions = torch.arange(width, device=self.device)[None]
        ours = self.logits(self.hidden(ids, positions, mask))[0].log_softmax(-1)
        gap = (own - ours).abs().max().item()
        tolerance = 1e-3 if own.dtype == torch.float32 and self._head.weight.dtype == torch.float32 else 0.25
        if not gap <= tolerance:
            name = type(self.model.get_base_model()).__name__
            raise UnsupportedModel(
                f"{name} is not supported: its log-probabilities differ from ours by {gap:.3g}"
            )


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """A chat to token ids, ready for the model to answer. `developer` is spelled `system` for templates."""
    chat = [
        {
            **message,
            "role": "system" if message["role"] == "developer" else message["role"],
            "content": _text(message),
        }
        for message in messages
    ]
    return list(
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    )


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
