"""The chat template of a model, as rows of given answers are rendered with it."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from worker.model.policy import generation_config_of, render
from worker.model.template import facts_of, own_stop_ids, stop_ids_of
from worker.offline.rows import ChatTemplate
from worker.refusals import UserMistake


def template_of(source: Path | str, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """The chat template and the tokens that end its answers.

    Raises:
        UserMistake: no token ends an answer, so the model could not learn where to stop.
    """
    config = generation_config_of(source)
    configured = None if config is None else config.eos_token_id
    stops = stop_ids_of(configured, tokenizer)
    if not stops:
        raise UserMistake("invalid_model", "The model's tokenizer has no token that ends an answer.", "model")
    facts = facts_of(tokenizer, own_stop_ids(configured, tokenizer))
    end = tokenizer.eos_token_id
    if facts is not None and facts.end_of_turn is not None:
        end = tokenizer.convert_tokens_to_ids(facts.end_of_turn)

    return ChatTemplate(
        render=lambda messages, tools, generation_prompt: render(
            tokenizer, messages, generation_prompt=generation_prompt, tools=tools
        ),
        stop_ids=stops,
        end_id=min(stops) if end is None else int(end),
        decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
    )
