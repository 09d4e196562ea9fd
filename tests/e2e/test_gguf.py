"""A tuned model is exported as GGUF, and llama.cpp answers as the service does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import regraft
from openai import OpenAI

from core import passports
from tests import llama_cpp
from tests.byte_level import PRE_TOKENIZERS, byte_level_tokenizer
from tests.e2e.conftest import POLL_SECONDS, Export, Server, jsonl, patient, start_server
from tests.present import present
from tests.tiny import make_tiny_model, save_llama

pytestmark = pytest.mark.slow

QUESTIONS = [
    *("Who are you?", "What is 12 + 30?", "It's late, isn't it?", "Name  two colors.", "Hello\n\nthere"),
    *("Why?", "日本語", "1234567", "Say yes!", "Is this the last one?"),
]
ROWS = [{"messages": [{"role": "user", "content": question}], "answer": "the"} for question in QUESTIONS[:3]]
GRADER = {
    "type": "string_check",
    "name": "says",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "ilike",
}
HYPERPARAMETERS = {
    "batch_size": 3,
    "n_epochs": 2,
    "advanced": {
        "sampling": {"group_size": 8, "max_completion_tokens": 4},
        "optimizer": {"learning_rate": 0.02},
    },
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("gguf")
    tokenizer = byte_level_tokenizer(PRE_TOKENIZERS["qwen2"])
    model = save_llama(tokenizer, 600, 2, folder / "model", head_dim=32)
    server = start_server(folder / "data", model, judge=make_tiny_model(folder / "words", head_dim=32))
    yield server
    server.stop()


def trained(service: Server, model: str) -> str:
    client = service.client(timeout=120)
    files = [client.files.create(file=(n, jsonl(ROWS)), purpose="fine-tune").id for n in ("train", "valid")]
    method: Any = {
        "type": "reinforcement",
        "reinforcement": {"grader": GRADER, "hyperparameters": HYPERPARAMETERS},
    }
    job = client.fine_tuning.jobs.create(
        model=model, training_file=files[0], validation_file=files[1], seed=1, method=method
    )
    for _ in regraft.events(client, job.id, poll_seconds=POLL_SECONDS):
        pass
    done = client.fine_tuning.jobs.retrieve(job.id)
    assert done.status == "succeeded", done.error
    return job.id


def assert_signed(service: Server, folder: Path, format: str) -> None:
    """The passport in the folder is of the service's key, and of these files."""
    passport = passports.read((folder / passports.FILE).read_bytes())
    headers = {"authorization": f"Bearer {service.key}"}
    served = httpx.get(f"{service.base_url}/regraft/passport_key", headers=headers).json()
    assert passport.fingerprint == served["fingerprint"]
    assert passport.statement["export"]["format"] == format
    assert passport.statement["base_model"]["sampled_sha256"], "hashed by the run"
    assert passports.problems_of_files(passport, folder) == []


def first_token(client: OpenAI, model: str, question: str) -> dict[str, float]:
    """The log-probabilities of the five most likely first tokens of an answer."""
    messages: Any = [{"role": "user", "content": question}]
    completion = patient(client).chat.completions.create(
        model=model, messages=messages, max_completion_tokens=1, temperature=0, logprobs=True, top_logprobs=5
    )
    [token] = present(present(completion.choices[0].logprobs).content)
    return {one.token: one.logprob for one in token.top_logprobs}


def test_llama_cpp_answers_as_the_service_does(service: Server, export: Export, tmp_path: Path) -> None:
    """Ten questions in the chat template of the file, with the adapter merged into the base."""
    job = trained(service, "tiny")
    client = service.client(timeout=120)
    model = present(client.fine_tuning.jobs.retrieve(job).fine_tuned_model)
    status, errors = export(service, job, tmp_path / "merged", "--format", "gguf")
    assert status == 0, errors
    assert sorted(file.name for file in (tmp_path / "merged").iterdir()) == [
        *(
            "Modelfile",
            "README.md",
            "chat_template.jinja",
            "model-f16.gguf",
            "passport.json",
            "reproduce.json",
        )
    ]
    assert_signed(service, tmp_path / "merged", "gguf")

    tokenizer = byte_level_tokenizer(PRE_TOKENIZERS["qwen2"])
    differences = []
    with llama_cpp.loaded(tmp_path / "merged" / "model-f16.gguf") as theirs:
        for question in QUESTIONS:
            prompt = theirs.tokens(theirs.rendered([{"role": "user", "content": question}]))
            exact = first_token(client, model, question)
            found = theirs.next_token(prompt, 10)
            texts = {tokenizer.decode([token]): logprob for token, logprob in found.items()}
            # A part of a character has no text of its own.
            differences += [
                abs(texts[text] - exact[text]) for text in exact.keys() & texts.keys() - {"\ufffd"}
            ]
    assert len(differences) >= 15
    assert max(differences) < 0.02


def test_a_tokenizer_that_llama_cpp_does_not_have_is_refused_and_its_adapter_is_not(
    service: Server, export: Export, tmp_path: Path
) -> None:
    job = trained(service, "judge")

    refused, why = export(service, job, tmp_path / "merged", "--format", "gguf")
    done, errors = export(service, job, tmp_path / "adapter", "--format", "gguf-adapter")

    assert (refused, (tmp_path / "merged").exists()) == (1, False)
    assert "it is a WordLevel, and only byte-level BPE is tested" in why
    assert done == 0, errors
    assert (tmp_path / "adapter" / "adapter.gguf").exists()
    assert_signed(service, tmp_path / "adapter", "gguf-adapter")
    assert not (tmp_path / "adapter" / "Modelfile").exists()


def test_the_type_of_weights_is_refused_with_a_format_that_has_none(
    service: Server, export: Export, tmp_path: Path
) -> None:
    status, errors = export(service, "ftjob-none", tmp_path / "out", "--weight-type", "q8_0")

    assert status == 2
    assert "--weight-type is for --format gguf" in errors
