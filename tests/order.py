"""The order in which tests run: files that take longest first, or a random one."""

from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import TypeVar

Test = TypeVar("Test")
ROOT = Path(__file__).parent

# A file is never split: one that takes minutes and comes last keeps one process busy after the others have finished. So
# these come first: they take half a minute or more, of services, ranks, engines of vLLM or browsers. The last five take
# longest of `make test-fast`. The files of the console follow each other, because they share a service and a browser.
LONGEST = (
    "worker/test_launch.py",
    "worker/test_vllm_sampler.py",
    "e2e/test_serving.py",
    "api/test_schema.py",
    "worker/test_distributed.py",
    "e2e/test_openai_client.py",
    "e2e/test_recipes.py",
    "families/test_families.py",
    "worker/test_vllm_server.py",
    "console/test_studio.py",
    "console/test_new_job.py",
    "console/test_management.py",
    "console/test_console.py",
    "console/test_compare.py",
    "console/test_jobs.py",
    "console/test_pipelines.py",
    "api/test_tenancy.py",
    "worker/test_vllm_engines.py",
    "worker/test_fleet.py",
    "test_bench.py",
    "test_docs_contribute.py",
    "contract/test_faults.py",
    "api/test_rollouts.py",
    "graders/test_sandbox_attacks.py",
    "packaging/test_packages.py",
    "helm/test_smoke.py",
    "worker/test_toy_learning.py",
    "worker/test_updates.py",
    "worker/test_run.py",
    "worker/test_training.py",
    "worker/test_compatibility.py",
    "worker/test_resume.py",
    "graders/test_python.py",
)


def longest_first(tests: Iterable[Test], file_of: Callable[[Test], Path]) -> list[Test]:
    """Move the tests of the files that take longest to the front. All others keep their order."""
    rank = {ROOT / name: number for number, name in enumerate(LONGEST)}
    return sorted(tests, key=lambda test: rank.get(file_of(test), len(rank)))


def part(tests: Iterable[Test], file_of: Callable[[Test], Path], number: int, parts: int) -> list[Test]:
    """One of several parts of tests that are in order, each with whole files: they are dealt out one by one."""
    ordered = list(tests)
    files = list(dict.fromkeys(map(file_of, ordered)))
    mine = set(files[number - 1 :: parts])
    return [test for test in ordered if file_of(test) in mine]


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
