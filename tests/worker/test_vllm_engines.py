"""Several vLLM engines for one job, and one of several processes: each answer is the one that a single engine gives."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from core.database.tables import Job
from core.registry import BaseModelEntry
from core.settings import Settings
from core.storage.store import FolderBlobs
from graders.spec import parse_grader
from tests.fakes import EverySecond, Skill, SkillTrainer
from tests.hyperparameters import in_groups
from tests.own_engines import engines_of, with_forked_engines
from tests.tiny import make_tiny_model
from tests.worker import vllm_parallel
from tests.worker.conftest import GRADER, Bench
from worker.assemble import assemble
from worker.model.policy import Policy, load_base
from worker.packages import vllm_version
from worker.prepare.rollouts import coordinated
from worker.prepare.run_memory import Resizable
from worker.sampling import Answer, Sampling, grouped
from worker.sampling.placement import Placement
from worker.sampling.vllm import VllmSampler
from worker.sampling.weights import same
from worker.types import Prompt, Rollout

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed"),
]
ROOT = Path(__file__).parents[2]
HOW = Sampling(group_size=3, temperature=1.0, max_completion_tokens=60, job_seed=5, step=1)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), head_dim=32)
    base = load_base("tiny", BaseModelEntry(path=folder, dtype="float32", context=512), folder, "cpu")
    policy = Policy(base, rank=4, alpha=8, seed=0)
    move(policy, 1)
    return policy


@pytest.fixture(scope="module")
def prompts(policy: Policy) -> list[Prompt]:
    texts = [
        "say yes",
        "what colour is it now please tell me the name of the animal",
        "tell me a number",
        "no",
    ]
    return [
        Prompt(line, tuple(policy.render([{"role": "user", "content": text}])), {})
        for line, text in enumerate(texts, start=1)
    ]


@pytest.fixture(scope="module")
def lost() -> list[str]:
    """Why engines were restarted."""
    return []


@pytest.fixture(scope="module")
def two(policy: Policy, lost: list[str]) -> Iterator[VllmSampler]:
    placement = Placement(tensor_parallel=1, gpus_E=((), ()))
    sampler = with_forked_engines(
        policy, placement=placement, kv_cache_bytes=1 << 24, threads=1, on_restart=lost.append
    )
    yield sampler
    sampler.close()


def move(policy: Policy, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable:
            parameter.normal_(std=0.2)


def ids(groups: list[tuple[Rollout, ...]]) -> list[list[tuple[int, ...]]]:
    return [[rollout.output_ids_T for rollout in group] for group in groups]


def drawn(sampler: VllmSampler, prompts: list[Prompt], how: Sampling = HOW) -> list[list[tuple[int, ...]]]:
    return ids(grouped(sampler.answers(prompts, how), len(prompts), how.group_size))


def one_after_the_other(sampler: VllmSampler, prompts: list[Prompt]) -> list[list[tuple[int, ...]]]:
    """Each group alone, so all on the first engine."""
    return [drawn(sampler, [prompt])[0] for prompt in prompts]


def has_ended(pid: int) -> bool:
    """Wait for it, up to a minute."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 60.0)[0])
    finally:
        os.close(process)


def test_two_engines_share_the_groups_and_give_the_answers_that_one_gives(
    two: VllmSampler, prompts: list[Prompt]
) -> None:
    answers = two.answers(prompts, HOW)
    first = next(answers)
    groups_E = [{id.split("/")[0] for id in engine.unfinished} for engine in engines_of(two).values()]
    together = grouped([first, *answers], len(prompts), HOW.group_size)

    assert all(groups_E), "an engine had nothing to do"
    assert not groups_E[0] & groups_E[1]
    assert ids(together) == one_after_the_other(two, prompts)


def test_a_batch_that_waits_for_another_is_sampled_from_the_adapter_at_its_call(
    two: VllmSampler, policy: Policy, prompts: list[Prompt]
) -> None:
    now, before, earlier = policy.adapter(), drawn(two, prompts), another_adapter(policy, 3)
    with policy.with_adapter(earlier):
        waiting = two.answers(prompts, HOW)
        of_earlier = drawn(two, prompts)

    assert drawn(two, prompts) == before
    assert ids(grouped(waiting, len(prompts), HOW.group_size)) == of_earlier != before
    assert same(policy.adapter(), now)


def another_adapter(policy: Policy, seed: int) -> dict[str, torch.Tensor]:
    """Another adapter of the policy, which keeps its own."""
    with policy.with_adapter(policy.adapter()):
        move(policy, seed)
        return policy.adapter()


def test_all_engines_sample_from_the_adapter_after_an_update(
    two: VllmSampler, policy: Policy, prompts: list[Prompt]
) -> None:
    before = drawn(two, prompts)
    move(policy, 2)
    try:
        after = drawn(two, prompts)
        assert after != before
        assert after == one_after_the_other(two, prompts)
    finally:
        move(policy, 1)


@pytest.mark.timeout(
    600
)  # three processes import vLLM: 45 seconds of a core, of which a busy machine gives few
def test_an_engine_of_two_processes_gives_the_same_answers_with_the_adapter_from_disk_or_in_memory(
    two: VllmSampler, policy: Policy, prompts: list[Prompt], tmp_path: Path
) -> None:
    """And no process of it outlives the engine: a worker that waits for another would keep its GPU."""
    policy.save(tmp_path)
    task = vllm_parallel.Task(
        source=str(policy.source),
        adapter=str(tmp_path),
        prompts=[
            (list(prompt.ids), HOW.seed(prompt, member))
            for prompt in prompts
            for member in range(HOW.group_size)
        ],
        max_tokens=HOW.max_completion_tokens,
        stop_ids=sorted(policy.stop_ids),
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.worker.vllm_parallel"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as engine:
        assert engine.stdin is not None and engine.stdout is not None
        engine.stdin.write(json.dumps(task) + "\n")
        engine.stdin.flush()
        line = next(
            (line for line in engine.stdout if line.startswith("{")), ""
        )  # vLLM writes its log there, too
        engine.kill()
    assert line, "the engine failed; its error is above"
    result: vllm_parallel.Result = json.loads(line)

    expected = [list(answer) for group in drawn(two, prompts) for answer in group]
    assert result["in_memory"] == expected
    assert result["from_disk"] == expected
    assert len(result["workers"]) == vllm_parallel.TENSOR_PARALLEL
    for worker in result["workers"]:
        assert has_ended(worker), "a worker outlives its engine"


class Asleep:
    """A plan with which the engines sleep during each step."""

    def use(self, sampler: Resizable) -> None:
        self._sampler = sampler

    def before_step(self) -> None:
        self._sampler.sleep()


def test_engines_that_slept_while_the_job_learned_have_its_new_adapter_and_give_the_same_answers(
    two: VllmSampler, policy: Policy, prompts: list[Prompt]
) -> None:
    """On a CPU vLLM pauses and drops what its cache holds; its memory is not released there."""
    before = drawn(two, prompts)
    trainer = coordinated(SkillTrainer(Skill()), two, Asleep(), continues=False)

    trainer.step()
    trainer.step()  # changes nothing
    asleep = [engine.is_asleep for engine in engines_of(two).values()]
    move(policy, 3)
    moved = drawn(two, prompts)
    trainer.step()
    move(policy, 1)

    assert asleep == [True, True]
    assert drawn(two, prompts) == before != moved
    assert not any(engine.is_asleep for engine in engines_of(two).values())


def test_engines_that_still_sample_for_a_reader_that_left_sleep_all_the_same(
    two: VllmSampler, prompts: list[Prompt]
) -> None:
    before = drawn(two, prompts)
    next(two.answers(prompts, HOW))

    two.sleep()

    assert not any(engine.unfinished for engine in engines_of(two).values())
    assert drawn(two, prompts) == before


def test_a_killed_engine_costs_only_its_unfinished_answers_which_the_other_engine_samples_again(
    two: VllmSampler, prompts: list[Prompt], lost: list[str]
) -> None:
    how = Sampling(group_size=3, temperature=1.0, max_completion_tokens=400, job_seed=5, step=1)
    expected = drawn(two, prompts, how)
    answers: list[Answer] = []
    for answer in two.answers(prompts, how):
        if not answers:
            victim = max(engines_of(two).values(), key=lambda engine: len(engine.unfinished))
            os.kill(victim.child.pid, signal.SIGKILL)
        answers.append(answer)

    assert ["SIGKILL" in reason for reason in lost] == [True]
    assert set(Counter((answer.prompt, answer.member) for answer in answers).values()) == {1}
    assert ids(grouped(answers, len(prompts), how.group_size)) == expected


def test_an_engine_that_dies_asleep_is_restarted_for_the_next_sample(
    two: VllmSampler, prompts: list[Prompt], lost: list[str]
) -> None:
    before = drawn(two, prompts)
    lost.clear()
    two.sleep()
    pid = engines_of(two)[0].child.pid
    os.kill(pid, signal.SIGKILL)
    assert has_ended(pid)

    assert drawn(two, prompts) == before
    assert lost == ["the vLLM engine's process exited: SIGKILL"]


def test_a_split_job_continues_its_answers_with_each_update_and_measures_its_ratio(
    policy: Policy, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is an own process beside the trainer, which is what a GPU of its own is on a GPU."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    blobs = FolderBlobs(tmp_path / "blobs")
    with bench.database.write() as session:
        bench.add_files(session, blobs)
        job = session.query(Job).one()
        job.model = "tiny"
        ahead = {"off_policy_steps": 1, "continue_in_flight": True, "max_completion_tokens": 64}
        job.body = job.body | {
            "hyperparameters": {"n_epochs": 4, "eval_interval": 4, "advanced": in_groups(ahead)}
        }
    (tmp_path / "models.toml").write_text(
        f'[models.tiny]\npath = "{policy.source}"\ndtype = "float32"\ncontext = 512\nsampler = "vllm"\n'
    )
    settings = Settings(
        models_file=tmp_path / "models.toml", data_dir=tmp_path, sampling_gpus=1, torch_threads=1
    )

    run = assemble(
        bench.attempt(blobs=blobs),
        parse_grader(GRADER),
        EverySecond(),
        settings,
        tmp_path,
        lambda: False,
        lambda: None,
    )
    asyncio.run(run.train())

    events = bench.events()
    assert "Placement: split. Answers are sampled by 1 vLLM engine." in events
    assert any(event.startswith("Measured in 3 steps: sampling takes") for event in events)
    shares = [step["stale_tokens_share"] for step in bench.steps()[1:]]
    assert shares[0] == 0 and all(0 <= share <= 1 for share in shares)
    assert all(step["ahead_seconds"] > 0 for step in bench.steps()[2:])
