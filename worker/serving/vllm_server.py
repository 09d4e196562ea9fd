"""Base models on vLLM's own OpenAI server, which has tools, penalties and completions, and many adapters in one batch.

The inference server finds the adapter's folder and passes the request on, with what the adapter was trained with: its
chat template, and how it reasons. vLLM's server is a child of this process (`VllmServer`), or it is a process of the
model's rollout fleet (fleet_model.py).

An adapter is known to vLLM by a name, a number and a path. All three are made from the hash of its manifest and never
used for another one: vLLM keeps weights by number and keys and values by name and path, so what is trained again can
meet neither the old weights nor the old cache.
"""

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import torch
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import AutoTokenizer

from core.chat import InternalChat, InternalCompletion
from core.reasoning import Format
from core.registry import BaseModelEntry
from core.tool_parsers import tool_parser_of
from worker.engine import launch
from worker.engine.client import EngineClient
from worker.engine.launch import ChildEngine
from worker.engine.names import NOTHING, THOUGHTS_FORMAT, THOUGHTS_IN_GRAMMAR
from worker.engine.options import EngineConfig, environment, server_options
from worker.model.architecture import without_weights
from worker.model.engine_sizes import slot_rank
from worker.model.policy import generation_config_of, read_config
from worker.model.reasoning import Reasoning
from worker.model.template import own_stop_ids, stop_ids_of
from worker.model.token_constraints import Bounds, UnsupportedTags, grammar_of
from worker.refusals import Refusal
from worker.serving import serving_metrics
from worker.serving.engines import EngineRefused
from worker.serving.prompting import (
    budget_of,
    messages_of,
    reasoning_of,
    refuse_unenforceable,
    template_of,
)
from worker.serving.proxy import CHAT, COMPLETIONS, Proxied, UpstreamFailed, VllmUpstream, is_stream
from worker.serving.tool_calls import refuse_unseen_tools

log = logging.getLogger(__name__)


class VllmModel(ABC):
    """Converts the requests for one base model and its adapters to the format of vLLM's server."""

    upstream: VllmUpstream

    def __init__(self, name: str, entry: BaseModelEntry, source: str, *, rank: int) -> None:
        """`rank`: the highest of the adapters that the server takes."""
        self.name, self.context = name, entry.context
        self.most_rank = slot_rank(rank)
        self.tokenizer = AutoTokenizer.from_pretrained(source)
        if entry.template_text is not None:
            self.tokenizer.chat_template = entry.template_text
        self._eos = _eos_of(source)
        self._registered_parser = entry.tool_parser
        self.tool_parser = tool_parser_of(entry.tool_parser, self.tokenizer.chat_template)  # vLLM's own
        self._template = entry.template_text
        self._ranks: dict[str, int] = {}

    def prepare(self, request: InternalChat | InternalCompletion, adapter: Path | None) -> Proxied:
        """The response of vLLM's server, not yet begun.

        Raises:
            EngineRefused: the model does not have a requested feature.
        """
        if adapter is not None:
            self._refuse_rank(adapter)
        if isinstance(request, InternalCompletion):
            return Proxied(self.upstream, COMPLETIONS, self._completion(request, adapter), request)
        return Proxied(self.upstream, CHAT, self._chat(request, adapter), request)

    @abstractmethod
    def adapter_name(self, request: InternalChat | InternalCompletion, folder: Path | None) -> str:
        """Return the name by which vLLM's server knows the request's adapter, or the model without one."""

    def _refuse_rank(self, folder: Path) -> None:
        if folder.name not in self._ranks:
            config = LoraConfig.from_pretrained(str(folder))
            self._ranks[folder.name] = max([config.r, *(config.rank_pattern or {}).values()])
        rank = self._ranks[folder.name]
        if rank > self.most_rank:
            raise EngineRefused(
                f"The adapter's rank is {rank}, and this server takes {self.most_rank} at most: its operator sets "
                "REGRAFT_INFERENCE_MAX_LORA_RANK."
            )

    def _chat(self, request: InternalChat, adapter: Path | None) -> dict[str, Any]:
        template = template_of(request, adapter) or self._template
        if template is None and self.tokenizer.chat_template is None:
            raise EngineRefused(f"{self.name} has no chat template, as is usual for a base model.")
        calls = bool(request.tools) and request.tool_choice != "none"
        if calls:
            self._refuse_tools(template or self.tokenizer.chat_template)
        try:
            template, reasoning = reasoning_of(request, self.tokenizer, template)
        except Refusal as cause:
            raise EngineRefused(str(cause), code=cause.code) from cause
        longest = min(self.context, request.most_tokens or self.context)
        budget = budget_of(request, reasoning, longest)
        refuse_unenforceable(request, self.tokenizer, budget)
        if calls and budget is not None:
            raise EngineRefused(
                f"'reasoning_effort' limits the length of the thoughts of {self.name}, which is not supported together "
                "with tools.",
                code="unsupported_parameter",
                param="reasoning_effort",
            )
        try:
            grammar = "" if calls else grammar_of(reasoning, Bounds(request.response_schema, budget))
        except UnsupportedTags as cause:
            raise EngineRefused(str(cause)) from cause
        body = self._sampling(request, adapter, stop_ids_of(self._eos, self.tokenizer, template)) | {
            "messages": messages_of(request),
            "max_completion_tokens": longest,
            "logprobs": bool(request.logprobs),
            "top_logprobs": request.top_logprobs or 0,
            # A tag that is a special token would vanish from the text before it is recognized.
            "skip_special_tokens": reasoning is None or not _has_special_tags(reasoning),
        }
        if template is not None:
            body["chat_template"] = template
        if reasoning is not None:
            body["chat_template_kwargs"] = _thoughts(reasoning.form, is_in_grammar=bool(grammar))
        if grammar or request.response_schema:
            # As a grammar, so that vLLM's defaults for schemas do not change the schema.
            body["structured_outputs"] = {"grammar": grammar or f"start: %json {request.response_schema}"}
        if request.tools:
            body["tools"] = [tool.model_dump(exclude_none=True) for tool in request.tools]
            chosen = request.tool_choice or "auto"
            body["tool_choice"] = chosen if isinstance(chosen, str) else chosen.model_dump()
            body["parallel_tool_calls"] = request.parallel_tool_calls is not False
        return body

    def _refuse_tools(self, template: object) -> None:
        """Raises EngineRefused: prompts of the template cannot have tools, or vLLM was started for other calls."""
        refuse_unseen_tools(self.name, self.tool_parser, template, parsers=None)
        parser = tool_parser_of(self._registered_parser, template)
        if parser not in (None, self.tool_parser):
            reads = f"those of '{self.tool_parser}'" if self.tool_parser else "none"
            raise EngineRefused(
                f"Unsupported parameter: 'tools': the chat template of the request has calls for the tool_parser "
                f"'{parser}', and vLLM's server of {self.name} was started to read {reads}: set tool_parser in the "
                f"model's entry of the registry to '{parser}'.",
                code="unsupported_parameter",
                param="tools",
            )

    def _completion(self, request: InternalCompletion, adapter: Path | None) -> dict[str, Any]:
        body = self._sampling(request, adapter, own_stop_ids(self._eos, self.tokenizer)) | {
            "prompt": request.prompt,
            "max_tokens": 16 if request.max_tokens is None else request.max_tokens,
            "echo": bool(request.echo),
        }
        if request.logprobs is not None:
            body["logprobs"] = request.logprobs
            body["return_tokens_as_token_ids"] = request.return_tokens_as_token_ids
        return body

    def _sampling(
        self, request: InternalChat | InternalCompletion, adapter: Path | None, stop_ids: frozenset[int]
    ) -> dict[str, Any]:
        """What both kinds of requests have. Every field that changes the distribution is said."""
        return {
            "model": self.adapter_name(request, adapter),
            "n": request.n or 1,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": request.frequency_penalty or 0.0,
            "presence_penalty": request.presence_penalty or 0.0,
            "logit_bias": request.logit_bias or None,
            "seed": secrets.randbits(62) if request.seed is None else request.seed,
            "stop": [request.stop] if isinstance(request.stop, str) else request.stop or [],
            "stop_token_ids": sorted(stop_ids),
            "ignore_eos": True,  # the stop tokens above are all
            "watermarking": False,
            "stream": bool(request.stream),
            # In every part, so that an answer that is left early is counted too.
            **(
                {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
                if request.stream
                else {}
            ),
        }


class VllmServer(VllmModel):
    """A base model on a child of this process. Implements worker.serving.engine.LoadedModel, and VllmUpstream."""

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        entry: BaseModelEntry,
        adapters: Path,
        *,
        on_end: Callable[[Sequence[str]], object] = lambda errors: None,
        start_engine: Callable[..., Awaitable[ChildEngine]] = launch.start,
    ) -> None:
        """Create without an engine.

        Args:
            adapters: the folder of their folders.
            on_end: receives the errors of an engine that died after its start, in a thread, when its processes
                have ended and their memory is free.
        """
        super().__init__(name, entry, config.source, rank=config.rank)
        self._config, self._adapters = config, adapters
        self._open = AsyncExitStack()
        self._has_nothing = config.device == "cpu"
        self._on_end, self._start_engine = on_end, start_engine
        self._engine: ChildEngine | None = None
        self._client: EngineClient | None = None
        self._is_lost = False
        self.upstream = self

    async def start(self) -> None:
        """Takes as long as vLLM takes to start. Raises EngineNotStarted."""
        folder = self._open.enter_context(launch.private_folder())
        nothing: Path | None = None
        if self._has_nothing:
            # There vLLM gives a row without an adapter that of the last slot. So every row gets one; this adds 0.
            nothing = folder / NOTHING
            await asyncio.to_thread(write_nothing, self._config.source, nothing)
        try:
            self._engine = await self._start_engine(
                folder,
                server_options(self._config, self.tool_parser),
                environment(self._config, is_server=True),
                name=self.name,
                adapters=self._adapters,
                nothing=nothing,
            )
        except BaseException:
            await self._open.aclose()
            raise
        self._client = EngineClient("the engine", self._engine.client)
        self._open.push_async_callback(self._engine.close)
        self._open.enter_context(serving_metrics.of_engine(self._engine.socket))

    @property
    def lost(self) -> bool:
        if self._engine is None or self._client is None:
            return True
        return self._is_lost or self._engine.has_exited or self._client.has_hung

    async def close(self) -> None:
        errors = (
            self._engine.errors if self.lost and self._engine is not None else None
        )  # closing deletes them
        await self._open.aclose()
        if errors is not None:
            await asyncio.to_thread(self._on_end, errors)

    @asynccontextmanager
    async def open(self, path: str, body: bytes) -> AsyncIterator[httpx.Response]:
        assert self._client is not None, "it has been started"
        async with AsyncExitStack() as stack:
            try:
                response = await stack.enter_async_context(self._client.probed(path, body))
                if not is_stream(response):
                    await response.aread()
            except httpx.TransportError as cause:
                self._is_lost = True
                log.error("the engine of %s does not answer: %r", self.name, cause)
                raise UpstreamFailed(f"The engine of {self.name} has failed; retry later.") from cause
            yield response

    def adapter_name(self, request: InternalChat | InternalCompletion, folder: Path | None) -> str:
        if folder is None:
            return NOTHING if self._has_nothing else self.name
        return folder.name


def _thoughts(form: Format, *, is_in_grammar: bool) -> dict[str, Any]:
    """What thoughts.py reads of `chat_template_kwargs`."""
    return {THOUGHTS_FORMAT: asdict(form), THOUGHTS_IN_GRAMMAR: is_in_grammar}


def _has_special_tags(reasoning: Reasoning) -> bool:
    special = set(reasoning.tokenizer.all_special_ids)
    return bool(special & {*reasoning.start_ids, *reasoning.end_ids})


def write_nothing(source: str, folder: Path) -> None:
    """An adapter of one layer whose matrices are 0."""
    model = without_weights(read_config(_place(source)))
    head = model.get_output_embeddings()
    name, layer = next(
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    )
    LoraConfig(
        r=1, lora_alpha=1, target_modules=[name.rsplit(".", 1)[-1]], task_type="CAUSAL_LM"
    ).save_pretrained(str(folder))
    tensors = {
        f"base_model.model.{name}.lora_A.weight": torch.zeros(1, layer.in_features),
        f"base_model.model.{name}.lora_B.weight": torch.zeros(layer.out_features, 1),
    }
    save_file(tensors, folder / "adapter_model.safetensors")


def _eos_of(source: str) -> Any:
    where = _place(source)
    return (generation_config_of(where) or read_config(where)).eos_token_id


def _place(source: str) -> Path | str:
    """A folder if there is one of that name, and else a hub id, as transformers reads it."""
    folder = Path(source)
    return folder if folder.is_dir() else source
