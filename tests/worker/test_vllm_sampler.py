"""vLLM behind the sampler's protocol: the same function as the trainer's, and a process that may die.

One engine on a tiny model of words serves the whole file, and one on a model of bytes, which can write JSON. The tests
that kill an engine leave a fresh one behind. That on bytes is started as a job starts it, the other is forked.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.jobs.hyperparameters import Hyperparameters, resolve
from core.registry import BaseModelEntry
from core.response_format import response_schema
from core.settings import Settings
from tests.own_engines import engines_of, facts_of, with_forked_engines
from tests.present import untyped
from tests.tiny import WORDS, make_byte_model, make_tiny_model
from worker.model import memory, sizing
from worker.model.batch import tensors_of
from worker.model.policy import Policy, load_base
from worker.packages import vllm_version
from worker.progress import PROGRESS
from worker.refusals import SamplerUnusable
from worker.sampling import Sampling, choice, grouped
from worker.sampling.own import OwnEngines
from worker.sampling.transformers import TransformersSampler
from worker.sampling.vllm import VllmSampler, with_own_engines
from worker.training.trainer import PeftTrainer
from worker.types import Pack, Prompt, Rollout, TrainingSequence

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed"),
]
ROOT = Path(__file__).parents[2]
KV_CACHE_BYTES = 1 << 24


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    # vLLM's attention on a CPU starts at heads of 32.
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), head_dim=32)
    base = load_base("tiny", BaseModelEntry(path=folder, dtype="float32", context=512), folder, "cpu")
    return Policy(base, rank=4, alpha=8, seed=0)


@pytest.fixture(scope="module")
def sampler(policy: Policy) -> Iterator[VllmSampler]:
    sampler = with_forked_engines(policy, kv_cache_bytes=KV_CACHE_BYTES, threads=1)
    yield sampler
    sampler.close()


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = make_byte_model(tmp_path_factory.mktemp("bytes"))
    base = load_base("bytes", BaseModelEntry(path=folder, dtype="float32", context=256), folder, "cpu")
    return Policy(base, rank=4, alpha=8, seed=0)


@pytest.fixture(scope="module")
def continuing(writer: Policy) -> Iterator[VllmSampler]:
    with pytest.MonkeyPatch.context() as patch:
        # Without bytecode each engine would compile vLLM again.
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        sampler = with_own_engines(writer, kv_cache_bytes=KV_CACHE_BYTES, threads=1, continues=True)
        yield sampler
        sampler.close()


@pytest.fixture
def restarts(sampler: VllmSampler, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    reasons: list[Any] = []
    monkeypatch.setattr(sampler.engines, "on_restart", reasons.append)
    return reasons


@pytest.fixture
def prompts(policy: Policy) -> list[Any]:
    texts = ["say yes", "what colour is it now please tell me the name of the animal", "tell me a number"]
    return [prompt(policy, text, line) for line, text in enumerate(texts, start=1)]


@pytest.fixture
def long_prompts(policy: Policy) -> list[Any]:
    """Over 256 tokens: whole blocks of vLLM's cache, whatever its block size."""
    return [prompt(policy, "red green blue cat dog bird " * 50 + end, 1) for end in ("now", "please")]


def prompt(policy: Policy, text: str, line: int) -> Prompt:
    return Prompt(line, tuple(policy.render([{"role": "user", "content": text}])), {"messages": []})


def sampling(**changes: Any) -> Sampling:
    return replace(
        Sampling(group_size=4, temperature=1.0, max_completion_tokens=12, job_seed=5, step=1), **changes
    )


def move(policy: Policy, seed: int) -> None:
    """Give the adapter other weights, in place, as an optimizer does."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable:
            parameter.normal_(std=0.2)


def drawn(
    sampler: VllmSampler | TransformersSampler, prompts: list[Prompt], how: Sampling
) -> list[tuple[Rollout, ...]]:
    return grouped(sampler.answers(prompts, how), len(prompts), how.group_size)


def gaps(
    policy: Policy,
    prompts: list[Prompt],
    groups: list[tuple[Rollout, ...]],
    temperature: float = 1.0,
    under: Callable[[], contextlib.AbstractContextManager[None]]
    | type[contextlib.nullcontext[None]] = contextlib.nullcontext,
) -> torch.Tensor:
    """|sampler - trainer| of every token's log-probability, [M]."""
    settings = resolve(
        Hyperparameters.model_validate({"advanced": {"sampling": {"temperature": temperature}}}),
        rows=8,
        parameters=1000,
        context=512,
    )
    trainer = PeftTrainer(policy, settings, token_budget=4096)
    packs = [
        Pack(
            one.ids,
            tuple(
                TrainingSequence(r.output_ids_T, r.logprobs_T, (1.0,) * len(r.output_ids_T), 1.0)
                for r in rollouts
            ),
        )
        for one, rollouts in zip(prompts, groups, strict=True)
    ]
    batch = tensors_of(packs, policy.device)
    with torch.no_grad(), under():
        return (trainer.loss.logprobs(batch) - batch.sampled_logp_M).abs()


def test_an_adapter_on_some_layers_is_the_same_in_the_engine(
    sampler: VllmSampler, policy: Policy, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = BaseModelEntry(path=policy.source, dtype="float32", context=512)
    base = load_base("tiny", entry, Path(policy.source), "cpu")
    attention = Policy(base, rank=4, alpha=8, seed=0, targets="attention")
    move(attention, 1)
    monkeypatch.setattr(sampler, "policy", attention)

    groups = drawn(sampler, prompts, sampling())

    assert attention.coverage.modules == 8
    assert gaps(attention, prompts, groups).max() < 1e-4
    assert gaps(attention, prompts, groups, under=attention.as_base).max() > 1e-2


SCHEMA = {
    "type": "object",
    "properties": {
        "letter": {"enum": ["a", "b", "c", "d"]},
        "numbers": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["letter", "numbers"],
    "additionalProperties": False,
}


def test_answers_are_held_to_the_schema_and_the_trainer_has_the_same_probabilities(
    continuing: VllmSampler, writer: Policy
) -> None:
    move(writer, 1)
    prompts = [prompt(writer, "?" * n, n) for n in (1, 2)]
    how = sampling(max_completion_tokens=48, response_schema=response_schema(SCHEMA))
    groups = drawn(continuing, prompts, how)
    trainer = PeftTrainer(writer, resolve(Hyperparameters(), rows=8, parameters=1000, context=256),
                          token_budget=4096, response_schema=how.response_schema)  # fmt: skip
    answers = [
        [TrainingSequence(r.output_ids_T, r.logprobs_T, (1.0,) * len(r.output_ids_T), 1.0) for r in g]
        for g in groups
    ]
    packs = [Pack(one.ids, tuple(group)) for one, group in zip(prompts, answers, strict=True)]
    batch = trainer.loss.tensors(packs)
    with torch.no_grad():
        gap = (trainer.loss.logprobs(batch) - batch.sampled_logp_M).abs()

    finished = [json.loads(r.text) for group in groups for r in group if r.finish_reason == "stop"]
    assert len(finished) >= 4
    assert all(set(one) == {"letter", "numbers"} and one["letter"] in "abcd" for one in finished)
    assert gap.mean() <= 1e-4 and gap.max() <= 1e-3


class TestSameFunction:
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_sampled_logprobs_are_the_trainers(
        self, sampler: VllmSampler, policy: Policy, prompts: list[Any], temperature: float
    ) -> None:
        move(policy, 1)
        groups = drawn(sampler, prompts, sampling(temperature=temperature, group_size=16))
        gap = gaps(policy, prompts, groups, temperature)
        move(policy, 2)
        control = gaps(policy, prompts, groups, temperature)

        assert gap.mean() <= 1e-4 and gap.max() <= 1e-3
        assert control.mean() >= 1e-2

    def test_what_is_sampled_is_the_policy_at_the_call_however_late_it_is_read(
        self, sampler: VllmSampler, policy: Policy, prompts: list[Any]
    ) -> None:
        """One step off-policy rests on it: the trainer continues while the answers are being drawn."""
        move(policy, 1)
        answers = sampler.answers(prompts, sampling())
        move(policy, 2)
        groups = grouped(answers, len(prompts), 4)
        after = gaps(policy, prompts, groups)
        move(policy, 1)

        assert gaps(policy, prompts, groups).mean() <= 1e-4
        assert after.mean() >= 1e-2

    def test_a_fresh_adapter_samples_from_the_base_model(
        self, sampler: VllmSampler, policy: Policy, prompts: list[Any]
    ) -> None:
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if "lora_B" in name:
                    parameter.zero_()
        groups = drawn(sampler, prompts, sampling())

        assert gaps(policy, prompts, groups, under=policy.as_base).max() <= 1e-3

    def test_every_sample_draws_from_the_policy_as_it_is_then(
        self, sampler: VllmSampler, policy: Policy, long_prompts: list[Any]
    ) -> None:
        """Nobody tells the sampler about an update, and what it cached under the old weights is not read."""
        for seed in (1, 2):
            move(policy, seed)
            groups = drawn(sampler, long_prompts, sampling())
            assert gaps(policy, long_prompts, groups).mean() <= 1e-4

    def test_one_cache_key_for_all_adapters_would_be_seen(
        self, sampler: VllmSampler, policy: Policy, long_prompts: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The control of the test above: with the same key the second adapter reads the first one's cache."""
        monkeypatch.setattr(sampler.weights, "namespace", lambda published: "mem://same")
        for seed in (3, 4):
            move(policy, seed)
            groups = drawn(sampler, long_prompts, sampling())

        assert gaps(policy, long_prompts, groups).mean() >= 1e-2

    def test_sending_the_same_adapter_again_changes_nothing(
        self, sampler: VllmSampler, policy: Policy, prompts: list[Any]
    ) -> None:
        move(policy, 5)
        first = drawn(sampler, prompts, sampling())
        for _ in range(2):
            engines_of(sampler)[0].version = 0  # it no longer knows what the engine has
            again = drawn(sampler, prompts, sampling())
            assert [[r.output_ids_T for r in g] for g in again] == [
                [r.output_ids_T for r in g] for g in first
            ]
            assert gaps(policy, prompts, again).max() <= 1e-3

    def test_an_adapter_that_did_not_change_is_not_sent(
        self, sampler: VllmSampler, policy: Policy, prompts: list[Any]
    ) -> None:
        move(policy, 6)
        drawn(sampler, prompts, sampling())
        sent = sampler.weights.version
        drawn(sampler, prompts, sampling(step=2))

        assert sampler.weights.version == sent

    def test_greedy_answers_and_their_logprobs_are_the_transformers_samplers(
        self, sampler: VllmSampler, policy: Policy, prompts: list[Any]
    ) -> None:
        move(policy, 1)
        how = sampling(temperature=0, group_size=1)
        ours, theirs = drawn(sampler, prompts, how), drawn(TransformersSampler(policy), prompts, how)

        for (mine,), (other,) in zip(ours, theirs, strict=True):
            assert mine.output_ids_T == other.output_ids_T
            assert mine.logprobs_T == pytest.approx(other.logprobs_T, abs=1e-4)


class TestInFlight:
    """Answers that continue with the adapter of an update."""

    HOW = sampling(group_size=12, max_completion_tokens=200, policy_steps=3)

    def updated(self, sampler: VllmSampler, how: Sampling) -> tuple[list[Prompt], list[tuple[Rollout, ...]]]:
        """Sample from adapter 1, and from adapter 2 as soon as the first answer has ended."""
        prompts = [prompt(sampler.policy, "?" * n, n) for n in (40, 41)]
        move(sampler.policy, 1)
        answers = sampler.answers(prompts, how)
        first = next(answers)
        move(sampler.policy, 2)
        sampler.update_in_flight()
        return prompts, grouped([first, *answers], len(prompts), how.group_size)

    def test_tokens_before_the_update_have_the_old_adapters_probabilities_and_those_after_it_the_new_ones(
        self, continuing: VllmSampler, writer: Policy
    ) -> None:
        prompts, groups = self.updated(continuing, self.HOW)

        rollouts = [rollout for group in groups for rollout in group]
        steps_T = torch.tensor([step for rollout in rollouts for step in rollout.policy_steps_T])
        continued = [one for one in rollouts if len(set(one.policy_steps_T)) == 2]
        new = gaps(writer, prompts, groups)
        move(writer, 1)
        old = gaps(writer, prompts, groups)
        assert len(continued) >= 4
        assert all(list(one.policy_steps_T) == sorted(one.policy_steps_T) for one in rollouts)
        assert all(len(one.policy_steps_T) == len(one.output_ids_T) for one in rollouts)
        assert set(steps_T.tolist()) == {3, 4}
        assert old[steps_T == 3].max() <= 1e-3 and new[steps_T == 4].max() <= 1e-3
        assert old[steps_T == 4].mean() >= 1e-2 and new[steps_T == 3].mean() >= 1e-2

    def test_an_answer_that_continues_still_has_the_form_of_its_schema(
        self, continuing: VllmSampler, writer: Policy
    ) -> None:
        _, groups = self.updated(continuing, replace(self.HOW, response_schema=response_schema(SCHEMA)))

        continued = [one for group in groups for one in group if len(set(one.policy_steps_T)) == 2]
        finished = [json.loads(one.text) for one in continued if one.finish_reason == "stop"]
        assert finished
        assert all(set(one) == {"letter", "numbers"} for one in finished)

    def test_what_is_sampled_after_it_begins_with_the_new_adapter_alone(
        self, continuing: VllmSampler, writer: Policy
    ) -> None:
        prompts, _ = self.updated(continuing, self.HOW)
        groups = drawn(continuing, prompts, replace(self.HOW, policy_steps=4))

        assert {step for group in groups for one in group for step in one.policy_steps_T} == {4}
        assert gaps(writer, prompts, groups).max() <= 1e-3

    def test_answers_of_a_lost_engine_begin_again_with_the_new_adapter(
        self, continuing: VllmSampler, writer: Policy
    ) -> None:
        prompts = [prompt(writer, "?" * n, n) for n in (40, 41)]
        move(writer, 1)
        answers = continuing.answers(prompts, self.HOW)
        first = next(answers)
        move(writer, 2)
        continuing.update_in_flight()
        os.kill(engines_of(continuing)[0].child.pid, signal.SIGKILL)
        rest = [*answers]

        again = [one for one in rest if set(one.rollout.policy_steps_T) == {4}]
        assert first not in again and again
        groups = [tuple(one.rollout for one in again if one.prompt == place) for place in range(2)]
        assert gaps(writer, prompts, groups).max() <= 1e-3

    def test_validations_have_no_steps(self, continuing: VllmSampler, writer: Policy) -> None:
        [group] = drawn(continuing, [prompt(writer, "?", 1)], sampling(group_size=1))

        assert group[0].policy_steps_T == ()


class TestAnswers:
    def test_members_of_a_group_differ_and_the_same_seeds_repeat_them(
        self, sampler: VllmSampler, policy: Policy, prompts: list[Any]
    ) -> None:
        move(policy, 1)
        first, again = (drawn(sampler, prompts, sampling()) for _ in range(2))
        other = drawn(sampler, prompts, sampling(job_seed=6))

        assert all(len({r.output_ids_T for r in group}) == 4 for group in first)
        assert [[r.output_ids_T for r in g] for g in again] == [[r.output_ids_T for r in g] for g in first]
        assert [[r.output_ids_T for r in g] for g in other] != [[r.output_ids_T for r in g] for g in first]

    def test_an_answer_does_not_depend_on_what_else_is_in_the_batch(
        self, sampler: VllmSampler, policy: Policy, prompts: list[Any]
    ) -> None:
        move(policy, 1)
        together = drawn(sampler, prompts, sampling())
        alone = [drawn(sampler, [one], sampling())[0] for one in prompts]

        assert [[r.output_ids_T for r in g] for g in together] == [[r.output_ids_T for r in g] for g in alone]

    def test_more_prompts_than_fit_in_one_step_are_sampled(
        self, sampler: VllmSampler, policy: Policy
    ) -> None:
        """vLLM would cut a prompt in two there, which with seeds it cannot do on a CPU."""
        move(policy, 1)
        words = WORDS[6:50]
        many = [prompt(policy, " ".join((words[n:] + words[:n]) * 8), n) for n in range(20)]
        groups = drawn(sampler, many, sampling(group_size=2))

        assert gaps(policy, many, groups).max() <= 1e-3

    def test_an_answer_ends_with_its_stop_token_or_says_it_was_cut(
        self, sampler: VllmSampler, policy: Policy, prompts: list[Any]
    ) -> None:
        move(policy, 1)
        end = WORDS.index("<end>")
        rollouts = [r for g in drawn(sampler, prompts, sampling(group_size=32)) for r in g]

        assert {r.finish_reason for r in rollouts} == {"stop", "length"}
        for rollout in rollouts:
            assert (rollout.output_ids_T[-1] == end) == (rollout.finish_reason == "stop")
            assert end not in rollout.output_ids_T[:-1]
            assert rollout.finish_reason == "stop" or len(rollout.output_ids_T) == 12
            assert len(rollout.logprobs_T) == len(rollout.output_ids_T)
            assert rollout.text == policy.text(rollout.output_ids_T)

    def test_a_reader_that_leaves_early_does_not_disturb_the_next(
        self, sampler: VllmSampler, policy: Policy, prompts: list[Any], restarts: list[Any]
    ) -> None:
        move(policy, 1)
        expected = drawn(sampler, prompts, sampling())

        async def first_only() -> None:
            stream = sampler.sample(prompts, sampling(max_completion_tokens=300, group_size=8))
            async for _ in stream:
                await untyped(stream).aclose()
                return

        asyncio.run(first_only())
        assert not engines_of(sampler)[0].unfinished

        found = drawn(sampler, prompts, sampling())
        assert [[r.output_ids_T for r in g] for g in found] == [[r.output_ids_T for r in g] for g in expected]
        assert restarts == []


class TestLostEngine:
    @pytest.mark.parametrize(
        ("blow", "said"),
        [
            # By day test_vllm_engines.py kills one of two engines, and TestInFlight the only one.
            pytest.param(signal.SIGKILL, "SIGKILL", marks=pytest.mark.thorough),
            (signal.SIGSTOP, "sent no heartbeat for 5 s"),
        ],
    )
    def test_only_the_missing_answers_are_sampled_again(
        self,
        sampler: VllmSampler,
        policy: Policy,
        prompts: list[Any],
        restarts: list[Any],
        monkeypatch: pytest.MonkeyPatch,
        blow: signal.Signals,
        said: str,
    ) -> None:
        """Killed, or stopped so that it hangs: each answer still comes exactly once, and is the same."""
        move(policy, 1)
        how = sampling(max_completion_tokens=400)
        expected = drawn(sampler, prompts, how)
        if blow == signal.SIGSTOP:
            monkeypatch.setattr(
                engines_of(sampler)[0], "silence", 5
            )  # and not of its successor, which has to start first
        answers: list[Any] = []
        for answer in sampler.answers(prompts, how):
            if not answers:
                os.kill(engines_of(sampler)[0].child.pid, blow)
            answers.append(answer)

        assert Counter((a.prompt, a.member) for a in answers) == Counter(
            (p, m) for p in range(3) for m in range(4)
        )
        assert [said in reason for reason in restarts] == [True]
        found = grouped(answers, 3, 4)
        assert [[r.output_ids_T for r in g] for g in found] == [[r.output_ids_T for r in g] for g in expected]
        assert gaps(policy, prompts, found).max() <= 1e-3

    def test_an_engine_that_cannot_start_says_why(
        self, policy: Policy, prompts: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["Unknown"]}')
        monkeypatch.setattr(policy, "source", tmp_path)
        restarts: list[Any] = []
        sampler = with_forked_engines(policy, kv_cache_bytes=KV_CACHE_BYTES, on_restart=restarts.append)

        with pytest.raises(
            SamplerUnusable, match=r"does not compute this model.*Unknown.*`sampler = \"transformers\"`"
        ):
            drawn(sampler, prompts, sampling())
        sampler.close()
        assert restarts == []  # it would not start the next time either


class TestCache:
    """With the keys and values of Qwen3-4B and 8B at a context of 8,192 tokens: 36 layers, 8 heads of 128."""

    @pytest.fixture(scope="class")
    def deep(self, tmp_path_factory: pytest.TempPathFactory) -> Policy:
        folder = make_tiny_model(tmp_path_factory.mktemp("deep"), layers=36, head_dim=128, key_heads=8)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
        base = load_base("deep", BaseModelEntry(path=folder, context=8192), folder, "cpu")
        return Policy(base, rank=4, alpha=8, seed=0)

    def sampler_of(
        self,
        policy: Policy,
        kv_cache_gib: float | str,
        monkeypatch: pytest.MonkeyPatch,
        completion: int = 7168,
    ) -> VllmSampler:
        monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        shape = memory.shape_of(policy.model.get_base_model().config, torch.bfloat16)
        work = sizing.workload(
            rank=4,
            prompt=8192 - completion,
            completion=completion,
            batch=8,
            group=8,
            valid_rows=8,
            eval_samples=1,
        )
        settings = Settings(kv_cache_gib=kv_cache_gib, torch_threads=1)
        machine = sizing.machine(settings, "cpu", 64 << 30, "vllm")
        plan = sizing.plan("deep", shape, work, machine)
        built = untyped(choice.build)("vllm", policy, settings, None, shape=shape, plan=plan, store=None)
        assert isinstance(built, VllmSampler)
        return built

    def test_1_gib_is_refused_before_vllm_is_started(
        self, deep: Policy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(sizing.DoesNotFit, match=r"at 8192 tokens needs a KV cache of 1\.14 GiB"):
            self.sampler_of(deep, 1.0, monkeypatch)

    @pytest.mark.thorough  # of vLLM's own arithmetic; the test above is of ours
    def test_and_vllm_refuses_it_too(self, deep: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
        """What the default was, and every job of the production profile met."""
        sampler = with_forked_engines(deep, kv_cache_bytes=1 << 30, threads=1)

        with pytest.raises(SamplerUnusable, match=r"1\.12 GiB KV cache is needed"):
            drawn(sampler, [prompt(deep, "say yes", 1)], sampling())
        sampler.close()

    def test_the_automatic_cache_starts(self, deep: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
        with PROGRESS.phase("training"):
            sampler = self.sampler_of(deep, "auto", monkeypatch)
        assert isinstance(sampler.engines, OwnEngines) and sampler.engines.config.sizes.context == 8192
        try:
            [group] = drawn(sampler, [prompt(deep, "say yes", 1)], sampling())
        finally:
            sampler.close()

        assert PROGRESS.now()["phase"] == "starting the sampler", "which the first answers waited for"
        assert len(group) == 4


class TestProcess:
    def test_close_ends_the_engine(self, policy: Policy) -> None:
        sampler = with_own_engines(policy, kv_cache_bytes=KV_CACHE_BYTES)
        child = engines_of(sampler)[0].child.pid
        sampler.close()

        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)

    def test_the_engine_dies_with_the_run(self, policy: Policy) -> None:
        code = f"""
import os
from core.registry import BaseModelEntry
from pathlib import Path
from tests.own_engines import engines_of
from worker.model.policy import Policy, load_base
from worker.sampling.vllm import with_own_engines
entry = BaseModelEntry(path=Path({str(policy.source)!r}), dtype="float32", context=512)
sampler = with_own_engines(Policy(load_base("tiny", entry, entry.path, "cpu"), rank=4, alpha=8, seed=0))
print(engines_of(sampler)[0].child.pid, flush=True)
os._exit(1)
"""
        run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)

        deadline = time.monotonic() + 60
        while is_running(int(run.stdout)):
            assert time.monotonic() < deadline, "the engine outlives the run"
            time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False


def test_the_engine_has_no_buffers_for_embeddings_and_head(sampler: VllmSampler) -> None:
    """No adapter has them, and the memory plan does not count them."""
    names = ("model.embed_tokens", "lm_head", "model.layers.0.self_attn.q_proj")
    tensors = [f"base_model.model.{name}.lora_A.weight" for name in names]

    assert facts_of(sampler, tensors).left_out == tensors[:2]


def test_vllm_still_has_what_we_use_of_it() -> None:
    """Fails first, and names the part, when a new version of vLLM has moved something that we depend on."""
    contract = subprocess.run(
        [sys.executable, "-m", "tests.worker.vllm_contract"], cwd=ROOT, capture_output=True, text=True
    )

    assert contract.returncode == 0, contract.stderr
    assert contract.stdout == ""
