"""The order in which tests run: what takes longest first, or a random one; and which tests run in one process."""

from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import TypeVar
from zlib import crc32

from xdist.scheduler import LoadFileScheduling

Test = TypeVar("Test")
ROOT = Path(__file__).parent

# A unit that takes minutes and comes last keeps one process busy after the others have finished. So these come first:
# they take half a minute or more, of services, ranks, engines of vLLM or browsers. The last five take longest of
# `make test-fast`.
LONGEST = (
    "console/test_compare.py",
    "console/test_console.py",
    "console/test_jobs.py",
    "console/test_management.py",
    "console/test_new_job.py",
    "console/test_pipelines.py",
    "console/test_studio.py",
    "worker/test_launch.py",
    "conformance/test_async.py",
    "e2e/test_openai_client.py",
    "worker/test_vllm_sampler.py",
    "worker/test_vllm_server.py",
    "worker/test_distributed.py",
    "e2e/test_recipes.py",
    "e2e/test_serving.py",
    "api/test_schema.py",
    "families/test_families.py",
    "e2e/test_cli.py",
    "helm/test_jobs.py",
    "api/test_tenancy.py",
    "worker/test_vllm_engines.py",
    "worker/test_fleet.py",
    "worker/test_vllm_full.py",
    "test_bench.py",
    "test_docs_contribute.py",
    "test_patterns.py",
    "contract/test_faults.py",
    "api/test_rollouts.py",
    "graders/test_sandbox_attacks.py",
    "packaging/test_packages.py",
    "helm/test_smoke.py",
    "helm/test_demo.py",
    "contract/test_samplers.py",
    "test_architecture.py",
    "helm/test_dispatcher.py",
    "evals/test_interruptions.py",
    "worker/test_toy_learning.py",
    "worker/test_updates.py",
    "worker/test_run.py",
    "worker/test_training.py",
    "worker/test_compatibility.py",
    "worker/test_resume.py",
    "graders/test_python.py",
)

# Files that share a service and a browser, which take as long to start as the tests that use them: one process runs
# them all. An entry is the beginning of the names of such files.
TOGETHER = (
    ("console/",),
    ("conformance/",),
    (
        "e2e/test_cli",
        "e2e/test_connections",
        "e2e/test_offline_jobs",
        "e2e/test_pipelines",
        "e2e/test_reward_models",
    ),
)
# Long files whose tests share nothing, and in how many units they are dealt out.
UNITS = {"api/test_schema.py": 3}


def unit(test: str) -> str:
    """The name of the tests that one process runs with this one, from first to last: as a rule those of its file.

    Args:
        test: its node id, such as "tests/core/test_jobs.py::test_a_job".
    """
    file, _, name = test.removeprefix("tests/").partition("::")
    for files in TOGETHER:
        if file.startswith(files):
            return files[0]
    if units := UNITS.get(file):
        return f"{file} {crc32(name.encode()) % units}"
    return file


class UnitScheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist says nothing of its types
    """Deals units out to the processes, each to the one that has least to do."""

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)


def longest_first(tests: Iterable[Test], file_of: Callable[[Test], Path]) -> list[Test]:
    """Move the tests of the files that take longest to the front. All others keep their order."""
    rank = {ROOT / name: number for number, name in enumerate(LONGEST)}
    return sorted(tests, key=lambda test: rank.get(file_of(test), len(rank)))


def part(tests: Iterable[Test], unit_of: Callable[[Test], str], number: int, parts: int) -> list[Test]:
    """One of several parts of tests that are in order, each with whole units: they are dealt out one by one."""
    ordered = list(tests)
    units = list(dict.fromkeys(map(unit_of, ordered)))
    mine = set(units[number - 1 :: parts])
    return [test for test in ordered if unit_of(test) in mine]


def shuffled(tests: Iterable[Test], file_of: Callable[[Test], Path], seed: int) -> list[Test]:
    """Shuffle the files, and the tests in each; a file stays together, because its tests share servers and models."""
    random, by_file = Random(seed), dict[Path, list[Test]]()
    for test in tests:
        by_file.setdefault(file_of(test), []).append(test)
    files = list(by_file.values())
    random.shuffle(files)
    for file in files:
        random.shuffle(file)
    return [test for file in files for test in file]
