"""The chat template of a request, how the model reasons with it, for how long, and what cannot be enforced."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from core import chat_templates
from core.chat import InternalChat, Message
from core.model_templates import CHAT_TEMPLATE
from worker.model.json_schema import schema_problem
from worker.model.reasoning import Reasoning, detect, plan_effort
from worker.serving.engines import EngineRefused


def template_of(request: InternalChat, adapter: Path | None) -> str | None:
    """Return the template of the adapter's training, or the requested one; None: the base model's."""
    if request.served.chat_template is not None:
        return chat_templates.text_of(request.served.chat_template)
    file = None if adapter is None else adapter / CHAT_TEMPLATE
    return file.read_text() if file is not None and file.exists() else None


def refuse_experts(adapter: Path) -> None:
    """Raises EngineRefused: the adapter is on experts, which neither of the server's engines computes."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    if config.get("target_parameters"):
        raise EngineRefused(
            "The adapter is on experts, which this server does not compute: export the format 'merged', and serve "
            "that as a base model.",
            code="unsupported_model",
        )


def reasoning_of(
    request: InternalChat, tokenizer: PreTrainedTokenizerBase, template: str | None
) -> tuple[str | None, Reasoning | None]:
    """Return the template with the request's arguments as its defaults, and how the model reasons with it."""
    arguments = dict(request.served.chat_template_kwargs or {})
    reasoning = detect(tokenizer, template)
    if reasoning is not None:
        # A budget does not depend on the template, so its length does not matter here.
        arguments = {**plan_effort(reasoning, request.reasoning_effort, 0).arguments, **arguments}
    if not arguments or (template is None and tokenizer.chat_template is None):
        return template, reasoning
    template = chat_templates.with_defaults(template or tokenizer.get_chat_template(), arguments)
    return template, detect(tokenizer, template)


def messages_of(request: InternalChat) -> list[dict[str, Any]]:
    """The messages of the request as chat templates get them, with calls and their results."""
    return [_message(message) for message in request.messages]


def _message(message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    whole = message.model_dump(exclude_none=True, exclude={"name", "refusal", "content", "role"})
    # Templates have either name. vLLM takes the second and gives its templates both.
    thought = {} if message.reasoning_content is None else {"reasoning": message.reasoning_content}
    return {"role": role, "content": message.text} | whole | thought


def budget_of(request: InternalChat, reasoning: Reasoning | None, longest: int) -> int | None:
    """Return the tokens after which a thought is closed; None: unlimited, or no room for an answer after it."""
    if reasoning is None:
        return None
    budget = request.served.thinking_budget
    if budget is None:
        budget = plan_effort(reasoning, request.reasoning_effort, longest).budget
    return budget if budget is not None and budget + len(reasoning.closing_ids) < longest else None


def refuse_unenforceable(
    request: InternalChat,
    tokenizer: PreTrainedTokenizerBase,
    budget: int | None,
    *,
    forces_calls: bool = False,
) -> None:
    """Check that the tokenizer lets answers follow a schema and a budget of thoughts.

    Raises:
        EngineRefused: it does not.
    """
    if not request.response_schema and budget is None and not forces_calls:
        return
    if problem := schema_problem(tokenizer):
        raise EngineRefused(
            f"The model {request.served.base_model} cannot do this: {problem}.",
            code="unsupported_parameter",
            param="tool_choice"
            if forces_calls
            else "response_format"
            if request.response_schema
            else "reasoning_effort",
        )
