"""`regraft-server inference` with vLLM, really: a process, adapters from a blob store, requests side by side."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from httpx._client import AsyncClient
from transformers import AutoTokenizer

from core.jobs.methods import LOGITS
from core.jobs.offline_hyperparameters import LogitsHyperparameters, resolve
from core.registry import BaseModelEntry
from core.storage.store import FolderBlobs
from graders.judge.judges import JudgeModel
from tests.present import present, untyped
from tests.servers import reserve_ports
from tests.thinking import FAMILIES, make_thinking_model
from tests.tiny import WORDS, make_tiny_model
from worker.engine.launch import EngineNotStarted
from worker.engine.options import EngineConfig
from worker.model.engine_sizes import EngineSizes
from worker.model.full import FullPolicy
from worker.model.policy import Policy, load_base, render
from worker.packages import vllm_version
from worker.refusals import UserMistake
from worker.rollout.served_teacher import ServedTeacher
from worker.serving.vllm_server import VllmServer
from worker.training.offline import SoftTargetTrainer
from worker.training.teacher import PolicyTeacher, TeacherPolicy
from worker.types import Pack, Prompt, Rollout, TrainingSequence

# As Qwen's: tools are told to the model, and it writes its calls between tags.
CALLER = (
    "{%- if tools -%}{{ 'calls in <tool_call>' + (tools | length | string) }}{%- endif -%}"
    "{%- for m in messages -%}{{ m.role + m.content }}"
    "{%- for c in m.tool_calls or [] -%}{{ c.function.name }} {{ c.function.arguments.values() | join }}{%- endfor -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '>' }}{%- endif -%}"
)
ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    make_tiny_model(folder / "model", head_dim=32)  # no kernel of vLLM's for a CPU takes 16
    make_thinking_model(folder / "thinker", FAMILIES["distill"])
    (folder / "caller.jinja").write_text(CALLER)
    entries = [("tiny", "model", ""), ("thinker", "thinker", ""), ("caller", "thinker", "caller.jinja")]
    (folder / "models.toml").write_text(
        "".join(
            f'[models.{name}]\npath = "{path}"\ndtype = "float32"\ncontext = 128\n'
            + (f'chat_template = "{template}"\n' if template else "")
            for name, path, template in entries
        )
    )
    return folder


def policy_of(folder: Path, seed: int) -> Policy:
    entry = BaseModelEntry(path=folder / "model", dtype="float32", context=128)
    policy = Policy(load_base("tiny", entry, folder, "cpu"), rank=4, alpha=8, seed=seed)
    torch.manual_seed(seed + 1)
    for parameter in policy.trainable:
        torch.nn.init.normal_(parameter, std=0.2)
    return policy


def publish(folder: Path, policy: Policy, prefix: str) -> dict[str, Any]:
    """As worker/recording/checkpoints.py does. Returns how the API names the weights."""
    saved = folder / "saved" / prefix
    saved.mkdir(parents=True, exist_ok=True)
    policy.save(saved)
    blobs, files = FolderBlobs(folder / "blobs"), []
    for path in sorted(saved.iterdir()):
        info = blobs.put_file(f"{prefix}/{path.name}", path)
        files.append({"name": path.name, "bytes": info.size, "sha256": info.sha256})
    manifest = json.dumps({"format": 1, "files": files}).encode()
    blobs.put_bytes(f"{prefix}/manifest.json", manifest)
    return {"prefix": prefix, "manifest_sha256": hashlib.sha256(manifest).hexdigest()}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    port, metrics_port = reserve_ports(2)
    environment = os.environ | {
        "REGRAFT_DATA_DIR": str(folder),
        "REGRAFT_MODELS_FILE": str(folder / "models.toml"),
        "REGRAFT_INFERENCE_KEY": "key",
        "REGRAFT_METRICS_PORT": str(metrics_port),
        "REGRAFT_SAMPLER": "vllm",
        "REGRAFT_INFERENCE_KV_CACHE_GIB": "0.1",
        "REGRAFT_TORCH_THREADS": "1",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "worker.cli", "inference", "--port", str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 120
    while True:
        try:
            httpx.get(f"{url}/healthz").raise_for_status()
            break
        except httpx.TransportError:
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.2)
    (folder / "pid").write_text(str(process.pid))
    (folder / "metrics").write_text(f"http://127.0.0.1:{metrics_port}/metrics")
    yield url
    children = list(descendants(process.pid))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, (folder / "log").read_text()[-3000:]
    assert children, "vLLM ran in no process of its own: the next line would prove nothing"
    deadline = time.monotonic() + 60  # the last of them ends when it notices that the others have
    while left := [name for child in children if (name := command_of(child))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def command_of(pid: int) -> str:
    """ "" if it has ended, also if nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def descendants(pid: int) -> Iterator[Any]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):  # of each thread
        for child in children.read_text().split():
            yield int(child)
            yield from descendants(int(child))


def ask_all(url: str, wanted: list[Any]) -> list[Any]:
    """Answers to (name, adapter, text) triples that are asked at once. A model that loads is asked for again."""

    async def ask(client: AsyncClient, model: Any, adapter: Any, text: str) -> Any:
        body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0}
        body |= {"max_tokens": 10, "logprobs": True, "top_logprobs": 2}
        body |= {"regraft": {"base_model": "tiny", "adapter": adapter}}
        while True:
            answer = await client.post(f"{url}/v1/chat/completions", json=body)
            if answer.status_code != 503:
                return answer.json()
            assert answer.headers["retry-after"]
            await asyncio.sleep(0.5)

    async def everyone() -> list[Any]:
        headers = {"authorization": "Bearer key"}
        async with httpx.AsyncClient(headers=headers, timeout=300) as client:
            return await asyncio.gather(*(ask(client, *one) for one in wanted))

    return asyncio.run(everyone())


def expected(policy: Policy, text: str) -> list[Any]:
    """The greedy answer's tokens and log-probabilities, of plain transformers and PEFT."""
    ids = torch.tensor([policy.render([{"role": "user", "content": text}])])
    with torch.no_grad():
        whole = policy.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=10,
            do_sample=False,
            pad_token_id=0,
        )
        logprobs = policy.model(whole, use_cache=False).logits[0].log_softmax(-1)
    return [
        (policy.tokenizer.decode([token]), logprobs[ids.shape[1] - 1 + at, token].item())
        for at, token in enumerate(whole[0, ids.shape[1] :].tolist())
        if token not in policy.stop_ids
    ]


def said(answer: Any) -> list[Any]:
    assert "choices" in answer, answer
    return [(one["token"], one["logprob"]) for one in answer["choices"][0]["logprobs"]["content"]]


def assert_same(answer: Any, policy: Policy, text: str, base: bool = False) -> None:
    if base:
        with policy.as_base():
            right = expected(policy, text)
    else:
        right = expected(policy, text)
    assert [token for token, _ in said(answer)] == [token for token, _ in right]
    assert [value for _, value in said(answer)] == pytest.approx([value for _, value in right], abs=1e-3)


def test_base_model_and_more_adapters_than_fit_at_once_each_give_their_own_answers(
    server: str, folder: Path
) -> None:
    """Side by side, in batches that vLLM mixes as it likes; on a CPU a row without an adapter would get another's."""
    policies = [policy_of(folder, seed) for seed in range(10)]
    adapters = [publish(folder, policy, f"job/{number}") for number, policy in enumerate(policies)]
    texts = [f"say {word}" for word in WORDS[6:18]]
    wanted: list[tuple[str, Any, str]] = [("tiny", None, text) for text in texts]
    wanted += [("ft", adapters[n % 10], text) for n, text in enumerate(texts)]

    answers = ask_all(server, wanted)

    for answer, text in zip(answers[:12], texts, strict=True):
        assert_same(answer, policies[0], text, base=True)
    for number, (answer, text) in enumerate(zip(answers[12:], texts, strict=True)):
        assert_same(answer, policies[number % 10], text)
    first = {
        tuple(token for token, _ in said(answer))
        for answer in ask_all(server, [("ft", adapter, texts[0]) for adapter in adapters[:4]])
    }
    assert len(first) > 1, "the adapters all say the same: the test would prove nothing"


def test_weights_that_were_trained_again_are_never_the_old_ones(server: str, folder: Path) -> None:
    """Same model name, same prefix, long prompt that the prefix cache knows."""
    text = "say the word " * 12
    for seed in (20, 21):
        policy = policy_of(folder, seed)
        adapter = publish(folder, policy, "job/again")
        [answer] = ask_all(server, [("ft:same", adapter, text)])
        assert_same(answer, policy, text)


def test_a_model_all_of_whose_weights_were_trained_answers_beside_its_base_model(
    server: str, folder: Path
) -> None:
    entry = BaseModelEntry(path=folder / "model", dtype="float32", context=128)
    whole = FullPolicy(load_base("tiny", entry, folder, "cpu"))
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in whole.trainable:
            weight.add_(0.1 * torch.randn_like(weight))
    adapted = policy_of(folder, 0)
    weights = publish(folder, whole, "job/whole") | {"is_whole": True}
    asked = [("ft:whole", weights), ("tiny", None), ("ft", publish(folder, adapted, "job/beside"))]

    own, base, adapter = ask_all(server, [(name, one, "say it") for name, one in asked])

    assert_same(own, whole, "say it")
    assert_same(base, adapted, "say it", base=True)
    assert_same(adapter, adapted, "say it")
    assert said(own) != said(base)


def test_an_engine_that_died_is_started_again_by_the_next_request(server: str, folder: Path) -> None:
    """The kernel ends the processes below it, which would keep the memory of the device."""
    asked: list[tuple[Any, Any, str]] = [("tiny", None, "say it")]
    [before] = ask_all(server, asked)
    engines = [
        pid for pid in descendants(int((folder / "pid").read_text())) if "worker.engine" in command_of(pid)
    ]
    below = [pid for engine in engines for pid in descendants(engine)]
    for engine in engines:
        os.kill(engine, signal.SIGKILL)

    [after] = ask_all(server, asked)

    assert said(after) == said(before)
    assert len(below) >= len(engines)
    deadline = time.monotonic() + 60
    while any(map(command_of, below)):
        assert time.monotonic() < deadline, "a process outlives its engine"
        time.sleep(0.1)


def test_the_reason_of_a_start_that_failed_is_known_to_the_server(folder: Path) -> None:
    """It is in the log of a process below the one that exits: here, a cache that holds no sequence."""
    entry = BaseModelEntry(path=folder / "model", dtype="float32", context=128)
    sizes = EngineSizes(entry.context)
    config = EngineConfig(
        str(folder / "model"), "float32", "cpu", sizes, rank=8, kv_cache_bytes=1 << 14, threads=1
    )
    failing = VllmServer("tiny", config, entry, folder / "adapters")

    with pytest.raises(EngineNotStarted) as failed:
        asyncio.run(failing.start())

    assert any("No available memory for the cache blocks" in error for error in failed.value.errors)


def test_an_adapter_of_too_high_a_rank_is_refused_with_what_to_do(server: str, folder: Path) -> None:
    entry = BaseModelEntry(path=folder / "model", dtype="float32", context=128)
    policy = Policy(load_base("tiny", entry, folder, "cpu"), rank=128, alpha=8, seed=0)
    [answer] = ask_all(server, [("ft", publish(folder, policy, "job/high"), "say it")])

    assert "REGRAFT_INFERENCE_MAX_LORA_RANK" in answer["error"]["message"]


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Oslo", "Rome"]}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
ASKED = {"messages": [{"role": "user", "content": "?"}], "seed": 1}


@pytest.fixture(scope="module")
def client(server: str) -> openai.OpenAI:
    return openai.OpenAI(api_key="key", base_url=f"{server}/v1", max_retries=8)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_required_tool_is_called_with_arguments_of_its_schema(client: openai.OpenAI, choice: Any) -> None:
    asked: Any = ASKED | {"model": "caller", "tools": [WEATHER], "tool_choice": choice}
    asked["parallel_tool_calls"] = False  # or noise would be calls without an end
    [choice_of_answer] = client.chat.completions.create(**asked).choices

    [call] = choice_of_answer.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["place"] in ("Oslo", "Rome")
    assert choice_of_answer.message.content in (None, "")

    with client.chat.completions.stream(**asked) as events:
        streamed = events.get_final_completion().choices[0]
    assert json.loads(present(streamed.message.tool_calls)[0].function.arguments) == json.loads(
        call.function.arguments
    )


def test_calls_and_their_results_are_part_of_the_conversation(client: openai.OpenAI) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Oslo"}'}}
    messages: Any = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sun", "tool_call_id": "1"},
    ]
    answer = client.chat.completions.create(model="caller", messages=messages, tools=[WEATHER], max_tokens=1)  # type: ignore[list-item]

    prompt = "calls in <tool_call>1" + "user?" + "assistantweather Oslo" + "toolsun" + ">"
    assert present(answer.usage).prompt_tokens == len(prompt)


def test_a_model_whose_calls_are_unknown_refuses_tools_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_parser") as refused:
        client.chat.completions.create(**ASKED, model="thinker", tools=[WEATHER])  # type: ignore[call-overload]

    assert (refused.value.param, refused.value.code) == ("tools", "unsupported_parameter")


def test_a_bias_and_penalties_change_what_is_said(client: openai.OpenAI) -> None:
    def say(**changes: Any) -> str:
        asked: Any = ASKED | {"model": "caller", "temperature": 0, "max_tokens": 12} | changes
        return str(client.chat.completions.create(**asked).choices[0].message.content)

    forced = say(logit_bias={"40": 100})
    assert len(forced) == 12
    assert len(set(forced)) == 1
    assert len(set(say(logit_bias={"40": 50}, frequency_penalty=2))) <= 2
    plain = {say(presence_penalty=penalty) for penalty in (-2, 2)}
    assert len(plain) == 2


def test_a_completion_has_no_chat_template(client: openai.OpenAI, folder: Path) -> None:
    policy = policy_of(folder, 0)
    ids = torch.tensor([policy.tokenizer.encode("say it", add_special_tokens=False)])
    with torch.no_grad(), policy.as_base():
        whole = policy.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=6,
            do_sample=False,
            pad_token_id=0,
        )
    right = policy.tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)

    for prompt in ("say it", ids[0].tolist(), ["say it", "say it"]):
        answer = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=6)
        assert {choice.text.strip() for choice in answer.choices} == {right}
        assert answer.model == "tiny"
    parts = client.completions.create(model="tiny", prompt="say it", temperature=0, max_tokens=6, stream=True)
    assert "".join(part.choices[0].text for part in parts).strip() == right


# On a CPU and with adapters, two prompts with log-probabilities in one batch end vLLM's process (punica_cpu.py).
ONE_AT_A_TIME = partial(JudgeModel, max_concurrency=1)


def test_a_model_on_it_teaches_as_in_the_trainers_memory(server: str, folder: Path) -> None:
    policy = policy_of(folder, 0)
    prompt = Prompt(0, tuple(policy.tokenizer.encode("say it", add_special_tokens=False)), {"messages": []})
    rollouts = [Rollout(ids, (-1.0,) * len(ids), "", "stop") for ids in ((9, 8, 7, 6, 5), (12, 13))]
    teacher = ServedTeacher("base", ONE_AT_A_TIME(f"{server}/v1", "key", "tiny"))

    teacher.refuse_other_tokens(policy.tokenizer)
    [served_G] = teacher.logprobs([(prompt, rollouts)], 1.0)

    [own_G] = PolicyTeacher(policy, policy.as_base, 512).logprobs([(prompt, rollouts)], 1.0)
    for served, own in zip(served_G, own_G, strict=True):
        assert served == pytest.approx(own, abs=1e-4)


def test_its_likeliest_tokens_are_those_of_the_same_model_in_memory(server: str, folder: Path) -> None:
    """As a job in the mode `logits` reads them: its own loss of a row is that of a teacher in memory."""
    policy = policy_of(folder, 0)
    asked = {"advanced": {"loss": {"top_k": 20}, "lora": {"rank": 4, "alpha": 8}}}
    resolved = resolve(LOGITS, LogitsHyperparameters.model_validate(asked), rows=1, parameters=1000)
    learned = TrainingSequence(
        (9, 8, 7, 6, 5), (0.0,) * 5, (0.0,) * 5, 1.0, learned_T=(True, False, True, True, True)
    )
    row = Pack(tuple(policy.tokenizer.encode("say it", add_special_tokens=False)), (learned,))
    teacher = ServedTeacher("base", ONE_AT_A_TIME(f"{server}/v1", "key", "tiny"))

    teacher.refuse_top(policy.tokenizer, 20)
    with pytest.raises(UserMistake, match="does not give its 21 likeliest tokens"):
        teacher.refuse_top(policy.tokenizer, 21)
    served, inside = (
        SoftTargetTrainer(policy, one, resolved, token_budget=512).measure([row])
        for one in (teacher, TeacherPolicy(policy))
    )

    assert inside.loss > 0.1
    assert served.loss == pytest.approx(inside.loss, rel=1e-4)


def test_a_thought_and_its_answer_come_apart_whole_and_streamed(client: openai.OpenAI) -> None:
    """A budget closes the thought, and the schema applies to the answer behind it."""
    letter = {"type": "object", "properties": {"letter": {"enum": ["a", "b"]}}, "required": ["letter"]}
    form = {"type": "json_schema", "json_schema": {"name": "letter", "strict": False, "schema": letter}}
    served = {"base_model": "thinker", "thinking_budget": 20}
    asked: Any = ASKED | {"model": "thinker", "response_format": form, "extra_body": {"regraft": served}}

    answer = client.chat.completions.create(**asked)
    parts = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))

    message = answer.choices[0].message
    assert json.loads(str(message.content))["letter"] in ("a", "b")
    thought = untyped(message).reasoning_content
    assert thought
    assert 0 < present(present(answer.usage).completion_tokens_details).reasoning_tokens <= 21
    deltas = [untyped(part.choices[0].delta) for part in parts if part.choices]
    assert "".join(delta.content or "" for delta in deltas) == message.content
    streamed = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert streamed.strip() == thought
    assert parts[-1].usage == answer.usage
    assert all(part.model == "thinker" for part in parts)


@pytest.mark.parametrize("content", ["<|end|><user>", "say <end> now", "abc"])
def test_a_prompt_has_the_tokens_that_a_job_gives_it(
    client: openai.OpenAI, folder: Path, content: str
) -> None:
    """Texts of special tokens in content are text for vLLM's server too."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "thinker")
    messages: Any = [{"role": "user", "content": content}]

    answer = client.chat.completions.create(model="thinker", messages=messages, max_tokens=1)

    assert present(answer.usage).prompt_tokens == len(render(tokenizer, messages))


def test_a_prompt_that_is_too_long_has_openais_code(client: openai.OpenAI) -> None:
    long: Any = [{"role": "user", "content": "word " * 200}]
    with pytest.raises(openai.BadRequestError, match="128") as refused:
        client.chat.completions.create(model="caller", messages=long)

    assert refused.value.code == "context_length_exceeded"


def test_a_refusal_of_vllms_names_the_parameter(client: openai.OpenAI) -> None:
    words: Any = [{"role": "user", "content": "word"}]
    with pytest.raises(openai.BadRequestError, match="50256") as refused:
        client.chat.completions.create(model="caller", messages=words, logit_bias={"50256": -100})

    assert (refused.value.param, refused.value.code) == ("logit_bias", "invalid_value")


def test_the_tokens_of_an_answer_are_counted_here_and_by_vllm(client: openai.OpenAI, folder: Path) -> None:
    def counted(name: str) -> float:
        text = httpx.get((folder / "metrics").read_text()).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    mine, prompts = (
        'regraft_inference_tokens_total{kind="completion",model="caller"}',
        "vllm:prompt_tokens_total{",
    )
    before, first = counted(mine), counted("regraft_inference_first_token_seconds_count")
    for stream in (False, True):
        asked: Any = ASKED | {"model": "caller", "max_tokens": 3, "logit_bias": {"40": 100}, "stream": stream}
        answer = client.chat.completions.create(**asked)
        if stream:
            list(answer)
    assert counted(mine) == before + 6
    assert counted("regraft_inference_first_token_seconds_count") == first + 2
    assert counted("regraft_inference_answers") == 0
    assert counted(prompts) > 0
