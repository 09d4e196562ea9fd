"""llama.cpp itself, which loads what an export has written (the package xllamacpp has it compiled)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx


class LlamaCpp:
    """A model in llama.cpp's own server, in this process."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def tokens(self, text: str, *, add_special: bool = False) -> list[int]:
        body = {"content": text, "parse_special": True, "add_special": add_special}
        tokens: list[int] = self._post("/tokenize", body)["tokens"]
        return tokens

    def answer(self, prompt: Sequence[int] | str, size: int) -> tuple[list[int], list[float]]:
        """The most likely tokens one after the other, at most `size`, and the log-probability of each."""
        body = {"prompt": prompt, "n_predict": size, "temperature": 0, "n_probs": 1, "cache_prompt": False}
        found = self._post("/completion", {**body, "top_k": 1})["completion_probabilities"]
        return [one["id"] for one in found], [one["logprob"] for one in found]

    def next_token(self, prompt: Sequence[int], count: int) -> dict[int, float]:
        """The log-probabilities of the `count` most likely tokens after a prompt.

        Of none where the first of them ends the answer or is a part of a character: those are not reported.
        """
        body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": count, "cache_prompt": False}
        steps = self._post("/completion", body).get("completion_probabilities", [])
        return {one["id"]: one["logprob"] for step in steps for one in step["top_logprobs"]}

    def chat(self, messages: Sequence[dict[str, str]], size: int) -> str:
        """The most likely answer, with the chat template of the file."""
        body = {"messages": messages, "max_tokens": size, "temperature": 0, "top_k": 1}
        text: str = self._post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
        return text

    def rendered(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt of a chat."""
        text: str = self._post("/apply-template", {"messages": messages})["prompt"]
        return text

    def _post(self, path: str, body: Any) -> Any:
        response = self._client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()


@contextmanager
def loaded(model: Path, adapter: Path | None = None) -> Iterator[LlamaCpp]:
    """A GGUF file in llama.cpp, with an adapter at its whole strength."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx, params.n_parallel, params.warmup, params.fit_params = 512, 1, False, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.verbosity = 1  # errors only
    # Its fast kernels round keys and values to 16 bits.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    if adapter is not None:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
    server = xllamacpp.Server(params)
    try:
        with httpx.Client(base_url=server.listening_address, timeout=120, trust_env=False) as client:
            yield LlamaCpp(client)
    finally:
        del server
