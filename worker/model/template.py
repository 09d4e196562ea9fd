"""The chat template of a loaded tokenizer: its facts, and the tokens that end answers."""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from core import chat_templates
from core.jobs.hyperparameters import Resolved
from core.jobs.offline_hyperparameters import ResolvedOffline
from core.template_facts import TemplateFacts, find_facts
from core.template_tools import RenderChat, lost_of_tools
from core.tool_parsers import template_for_tools
from worker.model.chat_tokens import special_tokens
from worker.model.reasoning import detect

Settings = TypeVar("Settings", Resolved, ResolvedOffline)
_EPOCH = datetime.fromtimestamp(0, UTC).isoformat()


def stop_ids_of(
    configured: int | Sequence[int] | None, tokenizer: PreTrainedTokenizerBase, template: str | None = None
) -> frozenset[int]:
    """The tokens that end an answer: the model's own, the tokenizer's, and the one that follows it in the template.

    Args:
        configured: `eos_token_id` of the model's generation config.
        template: Jinja text in place of the tokenizer's own.
    """
    own = own_stop_ids(configured, tokenizer)
    facts = facts_of(tokenizer, own, template)
    if facts is None or not facts.end_of_turn_added:
        return own
    return own | {tokenizer.convert_tokens_to_ids(facts.end_of_turn)}


def own_stop_ids(
    configured: int | Sequence[int] | None, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """The end tokens of the model and of its tokenizer, whatever the chat template is."""
    many = configured if isinstance(configured, Sequence) else [configured]
    return frozenset(token for token in [*many, tokenizer.eos_token_id] if token is not None)


def facts_of(
    tokenizer: PreTrainedTokenizerBase, own_stops: frozenset[int], template: str | None = None
) -> TemplateFacts | None:
    """The facts of the chat template; None: there is none.

    Args:
        own_stops: the end tokens of the model and its tokenizer.
        template: Jinja text in place of the tokenizer's own.
    """
    if template is None and tokenizer.chat_template is None:
        return None
    for_tools = str(template_for_tools(template or tokenizer.chat_template))
    return _facts(tokenizer, own_stops, template or tokenizer.get_chat_template(), for_tools)


def with_fixed_clock(settings: Settings, tokenizer: PreTrainedTokenizerBase, created_at: int) -> Settings:
    """The settings of a job whose prompts have its own time, if its chat template shows the time.

    A run that resumes on another day then renders the same prompts, and its tuned model is served with them.

    Args:
        tokenizer: with the chat template of the job.
        created_at: of the job, in seconds since 1970.
    """
    arguments = settings.chat_template_kwargs
    if tokenizer.chat_template is None or chat_templates.CLOCK in arguments:
        return settings
    if not chat_templates.reads_clock(tokenizer.get_chat_template()):
        return settings
    clock = {chat_templates.CLOCK: datetime.fromtimestamp(created_at, UTC).isoformat()}
    return settings.model_copy(update={"chat_template_kwargs": {**arguments, **clock}})


@lru_cache(maxsize=64)
def _facts(
    tokenizer: PreTrainedTokenizerBase, own_stops: frozenset[int], template: str, for_tools: str
) -> TemplateFacts:
    reasoning = detect(tokenizer, template)
    return find_facts(
        _renderer(tokenizer, template),
        template,
        special=special_tokens(tokenizer).flagged,
        stops=frozenset(map(str, tokenizer.convert_ids_to_tokens(sorted(own_stops)))),
        form=None if reasoning is None else reasoning.form,
        lost=lost_of_tools(_renderer(tokenizer, for_tools)),
    )


def _renderer(tokenizer: PreTrainedTokenizerBase, template: str) -> RenderChat:
    # Two renderings of one conversation would differ by the second between them. Jinja takes 0.2 s for this macro.
    clock = {chat_templates.CLOCK: _EPOCH} if chat_templates.reads_clock(template) else {}
    fixed = chat_templates.with_defaults(template, clock)

    def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, prompt: bool) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=fixed, add_generation_prompt=prompt, tokenize=False
            )
        )

    return render
