"""Two jobs sample with a fleet of two processes: each answer is the one that the job's own engine gives."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from sqlalchemy import select
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from core.chat import Adapter
from core.database.tables import Job
from core.jobs.hyperparameters import Hyperparameters, resolve
from core.registry import BaseModelEntry, Registry
from core.response_format import response_schema
from core.settings import Settings
from core.storage.manifests import MANIFEST
from core.storage.store import FolderBlobs
from graders.spec import parse_grader
from tests.fakes import EverySecond
from tests.families.zoo import FAMILIES
from tests.hyperparameters import in_groups
from tests.own_engines import with_forked_engines
from tests.present import untyped
from tests.servers import reserve_port
from tests.worker.conftest import GRADER, Bench
from tests.worker.test_token_constraints import LETTER, load_thinking
from tests.worker.test_vllm_engines import has_ended
from tests.worker.test_vllm_server import descendants, publish, said
from tests.worker.test_vllm_server import expected as expected_of
from worker.assemble import assemble
from worker.engine.protocol import FACTS, OTHER_PROTOCOL, PROTOCOL, PROTOCOL_HEADER, AdapterBytes
from worker.engine.routes import RequestsOnDisk, RequiresKey
from worker.model.meta_policy import unloaded_policy
from worker.model.policy import Policy, load_base
from worker.packages import vllm_version
from worker.refusals import NoMember, SamplerUnusable, UserMistake
from worker.sampling import Answer, Sampling, grouped
from worker.sampling.fleet import FleetConfig, FleetEngines
from worker.sampling.vllm import VllmSampler, group_of, with_fleet
from worker.sampling.weights import BlobAdapters, adapter_named, name_of
from worker.serving.adapters import AdapterFolders
from worker.serving.engines import Engines
from worker.serving.fleet_model import FleetBuilder
from worker.serving.proxy import CHAT
from worker.serving.server import create_app
from worker.types import Prompt, Rollout

with_vllm = [
    pytest.mark.slow,
    pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed"),
]
ROOT = Path(__file__).parents[2]
KEY = "the-secret-of-this-fleet"
HOW = Sampling(group_size=3, temperature=1.0, max_completion_tokens=40, job_seed=5, step=1)
HELD = replace(HOW, response_schema=response_schema(LETTER), thinking_budget=8)
LONG = replace(HOW, max_completion_tokens=400)
Groups = list[tuple[Rollout, ...]]


@dataclass
class Process:
    address: str
    child: subprocess.Popen[bytes]


@dataclass
class RunningFleet:
    processes: list[Process]
    folder: Path

    @property
    def blobs(self) -> FolderBlobs:
        return FolderBlobs(self.folder / "blobs")

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(process.address for process in self.processes)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """Of a model that thinks before it answers, in bytes."""
    return on_the_same_base(load_thinking("distill", tmp_path_factory.mktemp("distill")), 1)


def on_the_same_base(policy: Policy, seed: int) -> Policy:
    """That of another job."""
    assert isinstance(policy.source, Path)
    entry = BaseModelEntry(path=policy.source, dtype="float32", context=policy.context)
    other = Policy(load_base("tiny", entry, policy.source, "cpu"), rank=4, alpha=8, seed=0)
    move(other, seed)
    return other


@pytest.fixture(scope="module")
def fleet(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "models.toml").write_text(registry(policy))
    processes = [start(folder, number) for number in range(2)]
    for process in processes:
        wait_until_ready(process)
    yield RunningFleet(processes, folder)
    for process in processes:
        process.child.terminate()
    for process in processes:
        process.child.wait()


def registry(policy: Policy) -> str:
    return f'[models.tiny]\npath = "{policy.source}"\ndtype = "float32"\ncontext = {policy.context}\n'


def start(folder: Path, number: int) -> Process:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    port = reserve_port()
    child = subprocess.Popen(
        [sys.executable, "-m", "worker.cli", "sampler", "--model", "tiny", "--port", str(port)],
        cwd=ROOT,
        env=environment
        | {
            "REGRAFT_DATA_DIR": str(folder / f"data-{number}"),
            "REGRAFT_BLOB_URL": str(folder / "blobs"),
            "REGRAFT_MODELS_FILE": str(folder / "models.toml"),
            "REGRAFT_SAMPLERS_KEY": KEY,
            "REGRAFT_KV_CACHE_GIB": "0.05",
            "REGRAFT_INFERENCE_MAX_LORA_RANK": "8",
            "REGRAFT_TORCH_THREADS": "1",
        },
    )
    return Process(f"http://127.0.0.1:{port}", child)


def wait_until_ready(process: Process) -> None:
    while process.child.poll() is None:
        try:
            httpx.get(f"{process.address}/health", trust_env=False)
            return
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError("a sampler has failed; its error is above")


def move(policy: Policy, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable:
            parameter.normal_(std=0.05)


def prompts(policy: Policy) -> list[Prompt]:
    texts = ["?", "what is the letter of the day, and why", "a or b", "no"]
    return [
        Prompt(line, tuple(policy.render([{"role": "user", "content": text}])), {})
        for line, text in enumerate(texts, start=1)
    ]


def config(policy: Policy, addresses: tuple[str, ...]) -> FleetConfig:
    return FleetConfig(
        model="tiny",
        dtype="float32",
        context=policy.context,
        rank=4,
        addresses=addresses,
        key=KEY,
        patience=600.0,
        probe_interval=0.2,
    )


def sampler_of(
    policy: Policy, fleet: RunningFleet, bench: Bench, on_lost: Callable[[str], None] = lambda reason: None
) -> VllmSampler:
    store = BlobAdapters(bench.attempt(blobs=fleet.blobs))
    return with_fleet(policy, config(policy, fleet.addresses), store, on_lost=on_lost)


def change(sampler: VllmSampler, **changes: Any) -> None:
    """Have the job need something else."""
    assert isinstance(sampler.engines, FleetEngines)
    sampler.engines.config = replace(sampler.engines.config, **changes)


async def answers_of(sampler: VllmSampler, how: Sampling) -> list[Answer]:
    return [answer async for answer in sampler.sample(prompts(sampler.policy), how)]


def settings_of(fleet: RunningFleet, policy: Policy, folder: Path) -> Settings:
    (folder / "models.toml").write_text(registry(policy))
    return Settings(
        models_file=folder / "models.toml",
        data_dir=folder,
        samplers={"tiny": fleet.addresses},
        samplers_key=KEY,
    )


@contextmanager
def inference(settings: Settings, fleet: RunningFleet) -> Iterator[TestClient]:
    """An inference server that can start no engine of its own."""
    caches = [AdapterFolders(fleet.blobs, settings.data_dir / name) for name in ("adapters", "tuned-models")]
    engines = Engines(
        settings, Registry.load(settings.models_file), {"fleet": FleetBuilder(settings)}, *caches
    )
    with TestClient(create_app(engines, "key"), headers={"authorization": "Bearer key"}) as client:
        yield client


def chat(text: str, *, adapter: Any, **changes: Any) -> dict[str, Any]:
    asked = {"model": "ft", "messages": [{"role": "user", "content": text}], "temperature": 0}
    asked |= {"max_tokens": 10, "logprobs": True, "top_logprobs": 2}
    return asked | {"regraft": {"base_model": "tiny", "adapter": adapter}} | changes


def values(said: list[Any]) -> list[float]:
    return [value for _, value in said]


def logprobs_of(choice: dict[str, Any]) -> list[dict[str, Any]]:
    return (choice.get("logprobs") or {}).get("content") or []


def as_groups(answers: list[Answer], how: Sampling) -> Groups:
    return grouped(answers, len({answer.prompt for answer in answers}), how.group_size)


@pytest.fixture(scope="module")
def expected(policy: Policy) -> dict[str, Groups]:
    """The answers of a job's own engine."""
    sampler = with_forked_engines(policy, kv_cache_bytes=1 << 25, threads=1)

    def answers(how: Sampling) -> Groups:
        return as_groups([*sampler.answers(prompts(policy), how)], how)

    try:
        found = {name: answers(how) for name, how in (("free", HOW), ("held", HELD), ("long", LONG))}
        with policy.with_adapter({name: torch.zeros_like(one) for name, one in policy.adapter().items()}):
            return found | {"of the base": answers(HOW)}
    finally:
        sampler.close()


async def finished(addresses: Sequence[str]) -> float:
    """Wait until the engines are idle. Returns how many answers they have finished so far."""
    async with httpx.AsyncClient(trust_env=False) as client:

        async def count(name: str) -> float:
            texts = [(await client.get(f"{address}/metrics")).text for address in addresses]
            lines = [line for text in texts for line in text.splitlines() if line.startswith(name)]
            assert lines, f"vLLM has no {name}"
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

        while await count("vllm:num_requests_running{") + await count("vllm:num_requests_waiting{"):
            await asyncio.sleep(0.05)
        return await count("vllm:request_success_total{")


def assert_same(found: Groups, expected: Groups) -> None:
    tokens = [[rollout.output_ids_T for rollout in group] for group in found]
    assert tokens == [[rollout.output_ids_T for rollout in group] for group in expected]
    for group, others in zip(found, expected, strict=True):
        for rollout, other in zip(group, others, strict=True):
            assert rollout.logprobs_T == pytest.approx(other.logprobs_T, abs=1e-4)
            assert replace(rollout, logprobs_T=()) == replace(other, logprobs_T=())


@pytest.mark.parametrize(
    ("advanced", "field", "message"),
    [
        (
            {"off_policy_steps": 1, "continue_in_flight": True},
            "schedule.continue_in_flight",
            "sampled by a fleet",
        ),
        ({"lora_targets": ["attention", "experts"]}, "lora.targets", "no slots for them"),
    ],
    ids=["continued answers", "experts"],
)
def test_a_fleet_refuses_what_it_does_not_do(
    bench: Bench, tmp_path: Path, advanced: dict[str, Any], field: str, message: str
) -> None:
    """The API refuses it too, unless it does not know of the fleet."""
    [mixture] = [one for one in FAMILIES if one.title == "Qwen 3 MoE"]
    folder = mixture.save(tmp_path / "base")
    (tmp_path / "models.toml").write_text(
        f'[models.tiny]\npath = "{folder}"\ndtype = "float32"\ncontext = 512\n'
    )
    with bench.database.write() as session:
        bench.add_files(session, bench.blobs)
        job = session.scalars(select(Job)).one()
        job.model = "tiny"
        asked = in_groups(advanced | {"max_completion_tokens": 64})
        job.body = job.body | {"hyperparameters": {"advanced": asked}}
    settings = Settings(
        models_file=tmp_path / "models.toml",
        data_dir=tmp_path,
        samplers={"tiny": ("http://127.0.0.1:1",)},
        samplers_key=KEY,
    )

    with pytest.raises(UserMistake, match=message) as refused:
        assemble(
            bench.attempt(),
            parse_grader(GRADER),
            EverySecond(),
            settings,
            tmp_path,
            lambda: False,
            lambda: None,
        )
    assert refused.value.param == f"method.reinforcement.hyperparameters.advanced.{field}"


class TestTwoProcesses:
    pytestmark = with_vllm

    def test_two_jobs_at_once_have_the_answers_of_their_own_engines(
        self,
        fleet: RunningFleet,
        policy: Policy,
        expected: dict[str, Groups],
        bench: Bench,
    ) -> None:
        one, other = (sampler_of(each, fleet, bench) for each in (policy, on_the_same_base(policy, 2)))

        async def both() -> tuple[list[Answer], list[Answer]]:
            return await asyncio.gather(answers_of(one, HOW), answers_of(other, HOW))

        ours, others = asyncio.run(both())

        assert_same(as_groups(ours, HOW), expected["free"])
        assert as_groups(others, HOW) != as_groups(ours, HOW)
        assert_same(as_groups(asyncio.run(answers_of(one, HOW)), HOW), expected["free"])

    def test_a_job_whose_base_is_not_loaded_has_the_answers_of_the_base_beside_another_jobs(
        self, fleet: RunningFleet, policy: Policy, expected: dict[str, Groups], bench: Bench
    ) -> None:
        entry = BaseModelEntry(path=policy.source, dtype="float32", context=policy.context)
        settings = resolve(Hyperparameters(), rows=8, parameters=1000, context=128)
        assert isinstance(policy.source, Path)
        unloaded = unloaded_policy("tiny", entry, policy.source, settings)
        one, other = (sampler_of(each, fleet, bench) for each in (unloaded, policy))

        async def both() -> tuple[list[Answer], list[Answer]]:
            return await asyncio.gather(answers_of(one, HOW), answers_of(other, HOW))

        of_the_base, trained = asyncio.run(both())

        assert_same(as_groups(of_the_base, HOW), expected["of the base"])
        assert_same(as_groups(trained, HOW), expected["free"])

    def test_thoughts_have_their_budget_and_answers_their_schema(
        self, fleet: RunningFleet, policy: Policy, expected: dict[str, Groups], bench: Bench
    ) -> None:
        found = as_groups(asyncio.run(answers_of(sampler_of(policy, fleet, bench), HELD)), HELD)

        assert any(rollout.forced for group in found for rollout in group)
        assert_same(found, expected["held"])

    def test_the_next_answers_are_those_of_an_updated_adapter_and_the_last_one_is_deleted(
        self, fleet: RunningFleet, policy: Policy, expected: dict[str, Groups], bench: Bench
    ) -> None:
        changed = on_the_same_base(policy, 2)
        sampler = sampler_of(changed, fleet, bench)
        before = as_groups(asyncio.run(answers_of(sampler, HOW)), HOW)
        move(changed, 1)

        after = as_groups(asyncio.run(answers_of(sampler, HOW)), HOW)

        assert before != after
        assert_same(after, expected["free"])
        stored = [entry.key for entry in fleet.blobs.entries(bench.attempt().prefix)]
        assert sum(key.endswith(MANIFEST) for key in stored) == 1

    def test_a_job_learns_from_its_fleets_answers(
        self, fleet: RunningFleet, policy: Policy, bench: Bench, tmp_path: Path
    ) -> None:
        """A step is refused if the trainer does not give their tokens the same probabilities."""
        with bench.database.write() as session:
            bench.add_files(session, fleet.blobs)
            job = session.scalars(select(Job)).one()
            job.model = "tiny"
            job.resolved = {
                "lora_rank": 4,
                "total_steps": 1,
                "group_size": 4,
                "max_completion_tokens": 24,
            }
        settings = settings_of(fleet, policy, tmp_path)

        run = assemble(
            bench.attempt(blobs=fleet.blobs),
            parse_grader(GRADER),
            EverySecond(),
            settings,
            tmp_path,
            lambda: False,
            lambda: None,
        )
        asyncio.run(run.train())

        assert f"Answers are sampled by the fleet at {', '.join(fleet.addresses)}." in bench.events()
        assert "Sampling with vllm fleet" in bench.events()
        assert bench.steps()[-1]["trained_tokens"] > 0

    def test_a_schema_holds_for_a_model_that_does_not_think(
        self, fleet: RunningFleet, policy: Policy, bench: Bench
    ) -> None:
        """As a grammar, because the members have options for the schemas of tools."""
        assert isinstance(policy.source, Path)
        entry = BaseModelEntry(path=policy.source, dtype="float32", context=policy.context)
        settings = resolve(Hyperparameters(), rows=8, parameters=1000, context=128)
        plain = settings.model_copy(update={"chat_template": "plain"})
        sampler = sampler_of(unloaded_policy("tiny", entry, policy.source, plain), fleet, bench)
        held = replace(HOW, response_schema=response_schema(LETTER))

        answers = asyncio.run(answers_of(sampler, held))

        whole = [answer.rollout.text for answer in answers if answer.rollout.finish_reason == "stop"]
        assert whole and all(json.loads(text).keys() == {"letter"} for text in whole)

    def test_the_inference_server_answers_with_the_fleet_and_starts_no_engine(
        self, fleet: RunningFleet, policy: Policy, tmp_path: Path
    ) -> None:
        adapter = publish(fleet.folder, policy, "projects/p/jobs/j/attempts/1/steps/1")
        settings = settings_of(fleet, policy, tmp_path)
        with inference(settings, fleet) as client:
            of_base, of_adapter, refused = (
                client.post(CHAT, json=chat("a or b", adapter=weights, **changes)).json()
                for weights, changes in ((None, {}), (adapter, {}), (adapter, {"temperature": 0.5}))
            )
            events = client.post(CHAT, json=chat("a or b", adapter=adapter, stream=True)).text

        # Their texts are half characters, which vLLM spells in its own way.
        with policy.as_base():
            assert values(said(of_base)) == pytest.approx(values(expected_of(policy, "a or b")), abs=1e-3)
        assert values(said(of_adapter)) == pytest.approx(values(expected_of(policy, "a or b")), abs=1e-3)
        assert values(said(of_base)) != pytest.approx(values(said(of_adapter)), abs=1e-3)
        assert of_adapter["usage"]["completion_tokens"] == 10
        assert (refused["error"]["code"], refused["error"]["param"]) == ("unsupported_parameter", "logprobs")
        parts = [json.loads(one.removeprefix("data: ")) for one in events.split("\n\n") if "{" in one]
        streamed = [token for part in parts for choice in part["choices"] for token in logprobs_of(choice)]
        assert [(token["token"], token["logprob"]) for token in streamed] == said(of_adapter)
        assert events.endswith("data: [DONE]\n\n")

    def test_answers_that_nobody_reads_are_aborted(
        self, fleet: RunningFleet, policy: Policy, bench: Bench
    ) -> None:
        sampler = sampler_of(policy, fleet, bench)
        before = asyncio.run(finished(fleet.addresses))

        async def leave() -> None:
            answers = sampler.sample(prompts(policy), replace(LONG, group_size=32))
            async with aclosing(untyped(answers)):
                await anext(answers)

        asyncio.run(leave())

        assert asyncio.run(finished(fleet.addresses)) < before + 4 * 32

    def test_a_key_that_no_member_accepts_is_named_once_the_patience_is_over(
        self, fleet: RunningFleet, policy: Policy, bench: Bench
    ) -> None:
        sampler = sampler_of(policy, fleet, bench)
        change(sampler, key="another", patience=0.0)

        with pytest.raises(NoMember, match="REGRAFT_SAMPLERS_KEY differs"):
            asyncio.run(answers_of(sampler, HOW))

    def test_no_route_but_health_and_metrics_answers_without_the_key(self, fleet: RunningFleet) -> None:
        """vLLM leaves /invocations, /tokenize and /scale_elastic_ep open beside its guarded routes."""
        address = fleet.addresses[0]
        with httpx.Client(base_url=address, trust_env=False) as client:
            document = client.get("/openapi.json", headers={"authorization": f"Bearer {KEY}"}).json()
            paths = {path: list(methods) for path, methods in document["paths"].items()}
            statuses = {
                path: client.request(methods[0], path, json={}).status_code for path, methods in paths.items()
            }

        assert "/invocations" in statuses
        assert {path for path, status in statuses.items() if status != 401} <= {"/health", "/metrics"}

    def test_a_fleet_of_another_precision_or_a_smaller_context_is_refused(
        self, fleet: RunningFleet, policy: Policy, bench: Bench
    ) -> None:
        sampler = sampler_of(policy, fleet, bench)
        change(sampler, dtype="bfloat16", context=100_000)

        with pytest.raises(
            SamplerUnusable, match=r"float32, and the job needs bfloat16; a context of .*needs 100000"
        ):
            asyncio.run(answers_of(sampler, HOW))

    def test_a_killed_member_costs_only_its_unfinished_answers(
        self, fleet: RunningFleet, policy: Policy, expected: dict[str, Groups], bench: Bench
    ) -> None:
        """And no process of it outlives it. Last, because it leaves one member."""
        lost: list[str] = []
        below = list(descendants(fleet.processes[0].child.pid))
        sampler = sampler_of(policy, fleet, bench, lost.append)

        async def killing() -> list[Answer]:
            answers: list[Answer] = []
            async for answer in sampler.sample(prompts(policy), LONG):
                if not answers:
                    os.kill(fleet.processes[0].child.pid, signal.SIGKILL)
                answers.append(answer)
            return answers

        answers = asyncio.run(killing())

        assert len(lost) == 1 and fleet.processes[0].address.removeprefix("http://") in lost[0]
        assert set(Counter((answer.prompt, answer.member) for answer in answers).values()) == {1}
        assert_same(as_groups(answers, LONG), expected["long"])
        assert len(below) >= 2
        for pid in below:
            assert has_ended(pid), "a process outlives its sampler"


class TestWithoutProcesses:
    def test_a_job_without_a_member_ends_after_its_patience(self, make_policy: Callable[..., Policy]) -> None:
        policy = make_policy()
        with socket.socket() as closed:  # bound and not listening: connections are refused
            closed.bind(("127.0.0.1", 0))
            address = f"http://localhost:{closed.getsockname()[1]}"
            waiting = replace(config(policy, (address,)), patience=0.01, probe_interval=0.01)
            sampler = with_fleet(policy, waiting, Unused())

            with pytest.raises(
                NoMember, match=rf"No sampler of tiny at {address} has answered.*ConnectError"
            ):
                asyncio.run(answers_of(sampler, HOW))

    def test_only_requests_with_the_key_reach_the_server(self) -> None:
        server = Starlette(routes=[Route("/{path:path}", lambda request: PlainTextResponse("answered"))])
        server.add_middleware(RequiresKey)
        server.state.args = Namespace(api_key=[KEY])
        client = TestClient(server)

        def status(path: str, authorization: bytes) -> int:
            return client.get(path, headers={b"authorization": authorization}).status_code

        assert [
            status("/invocations", given) for given in (b"", KEY.encode(), b"Bearer x", b"Bearer \xe9")
        ] == [401] * 4
        assert status("/invocations", f"Bearer {KEY}".encode()) == 200
        assert status("/health", b"") == status("/metrics", b"") == 200

    def test_only_clients_of_the_same_protocol_reach_the_server(self) -> None:
        server = Starlette(routes=[Route("/{path:path}", lambda request: PlainTextResponse("answered"))])
        server.add_middleware(RequiresKey)
        server.state.args = Namespace(api_key=[KEY])
        client = TestClient(server, headers={"authorization": f"Bearer {KEY}"})

        def status(path: str, **headers: str) -> int:
            return client.get(path, headers=headers).status_code

        other = {PROTOCOL_HEADER: str(PROTOCOL + 1)}
        assert status(FACTS, **{PROTOCOL_HEADER: str(PROTOCOL)}) == status(FACTS) == 200
        assert status(FACTS, **other) == OTHER_PROTOCOL
        assert status("/health", **other) == 200

    def test_an_adapter_is_found_by_its_name(self) -> None:
        adapter = Adapter(prefix="projects/p/jobs/j/attempts/1/sampling/x", manifest_sha256="0f" * 32)

        assert adapter_named(name_of(adapter)) == adapter
        assert adapter_named(name_of(None)) is None
        assert adapter_named("tiny") is None
        assert adapter_named(f"{'0f' * 32}/../secrets") is None

    def test_a_schema_is_sent_as_a_grammar(self, make_policy: Callable[..., Policy]) -> None:
        def grammar(how: Sampling) -> str:
            return group_of(make_policy(), how, Prompt(1, (7, 8), {}), ()).grammar

        assert grammar(HOW) == ""
        assert grammar(replace(HOW, response_schema="{}")) == "start: %json {}"


class Unused:
    """An AdapterStore that no adapter reaches."""

    def put(self, adapter: AdapterBytes) -> Adapter:
        raise AssertionError("no member has answered")


def test_an_adapter_whose_folder_was_evicted_is_resolved_again(tmp_path: Path) -> None:
    requests = RequestsOnDisk()
    requests["here"], requests["gone"] = (Namespace(lora_path=str(tmp_path / name)) for name in ("a", "b"))
    (tmp_path / "a").mkdir()
    os.utime(tmp_path / "a", ns=(0, 0))

    assert [name in requests for name in ("here", "gone", "unknown")] == [True, False, False]
    assert (tmp_path / "a").stat().st_mtime_ns > 0, "it is the last one to be evicted"
