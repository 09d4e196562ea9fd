"""The chat template of a model, as rows of given answers are rendered with it."""

from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerBase

from worker.model.policy import render
from worker.model.template import stop_ids_of
from worker.offline.rows import ChatTemplate
from worker.refusals import UserMistake


def template_of(source: Path | str, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """The chat template and the tokens that end its answers.

    Raises:
        UserMistake: no token ends an answer, so the model could not learn where to stop.
    """
    try:
        configured = GenerationConfig.from_pretrained(source).eos_token_id
    except OSError:  # many models have no generation_config.json
        configured = None
    stops = stop_ids_of(configured, tokenizer)
    if not stops:
        raise UserMistake("invalid_model", "The model's tokenizer has no token that ends an answer.", "model")
    eos = tokenizer.eos_token_id

    return ChatTemplate(
        render=lambda messages, tools, generation_prompt: render(
            tokenizer, messages, generation_prompt=generation_prompt, tools=tools
        ),
        stop_ids=stops,
        eos_id=min(stops) if eos is None else int(eos),
        decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
    )
