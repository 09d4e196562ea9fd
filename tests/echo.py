"""A server of a real model that echoes prompts with log-probabilities, as vLLM's `/v1/completions` does."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def echoes_of(folder: Path) -> Callable[[str, Any], tuple[int, str]]:
    """For `tests.graders.servers.serving`: the completions of the model in a folder, which writes one more token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    one_at_a_time = threading.Lock()

    def answer(path: str, asked: Any) -> tuple[int, str]:
        assert path == "/v1/completions"
        assert asked["echo"] is True and asked["max_tokens"] == 1
        ids = torch.tensor([asked["prompt"]])
        with one_at_a_time, torch.no_grad():
            logp = model(input_ids=ids).logits.float().log_softmax(-1)[0]
        tokens = [*asked["prompt"], int(logp[-1].argmax())]
        values = [None, *(logp[at, token].item() for at, token in enumerate(tokens[1:]))]
        logprobs = {"tokens": [tokenizer.decode([token]) for token in tokens], "token_logprobs": values}
        return 200, json.dumps({"choices": [{"index": 0, "text": "", "logprobs": logprobs}]})

    return answer
