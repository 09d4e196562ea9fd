"""A server of a real model that echoes prompts with log-probabilities, as vLLM's `/v1/completions` does."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def echoes_of(folder: Path, most: int = 20) -> Callable[[str, Any], tuple[int, str]]:
    """For `tests.graders.servers.serving`: the completions of the model in a folder, which writes one more token.

    Gives up to `most` likely tokens at each place, by their ids if asked so, and the token itself where it is none of
    them.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    one_at_a_time = threading.Lock()

    def answer(path: str, asked: Any) -> tuple[int, str]:
        assert path == "/v1/completions"
        assert asked["echo"] is True and asked["max_tokens"] == 1
        if asked["logprobs"] > most:
            return 400, json.dumps({"error": {"message": f"logprobs is greater than max allowed: {most}"}})
        ids = torch.tensor([asked["prompt"]])
        with one_at_a_time, torch.no_grad():
            logp = model(input_ids=ids).logits.float().log_softmax(-1)[0]
        tokens = [*asked["prompt"], int(logp[-1].argmax())]
        values = [None, *(logp[at, token].item() for at, token in enumerate(tokens[1:]))]
        by_id = asked.get("return_tokens_as_token_ids", False)
        names = [f"token_id:{token}" if by_id else tokenizer.decode([token]) for token in tokens]

        def top(at: int) -> dict[str, float]:
            likely = [*logp[at].topk(asked["logprobs"]).indices.tolist(), tokens[at + 1]]
            texts = [f"token_id:{token}" if by_id else tokenizer.decode([token]) for token in likely]
            return {text: logp[at, token].item() for text, token in zip(texts, likely, strict=True)}

        logprobs = {"tokens": names, "token_logprobs": values}
        logprobs["top_logprobs"] = [None, *map(top, range(len(tokens) - 1))]
        return 200, json.dumps({"choices": [{"index": 0, "text": "", "logprobs": logprobs}]})

    return answer
