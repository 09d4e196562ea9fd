"""The tests that OpenAI's Python client has itself, of the installed version, against the service.

They come with the source distribution, which pip downloads; nothing of it is kept. docs/howto/api.md lists those that
fail.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from queue import Queue
from typing import Any
from xml.etree import ElementTree

import openai
import pytest

from core.database.engine import Database
from tests.conformance.conftest import MODELS
from tests.conformance.placeholders import Objects, proxy
from tests.conformance.test_webhooks import receiver
from tests.e2e.conftest import ROOT, Server

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(3600)]

PLUGIN = "pytest-asyncio==1.4.1"
PAGE = ROOT / "docs" / "howto" / "api.md"
# Of the resources that the service has.
FILES = (
    "chat/completions/test_messages.py",
    "chat/test_completions.py",
    "evals/runs/test_output_items.py",
    "evals/test_runs.py",
    "fine_tuning/alpha/test_graders.py",
    "fine_tuning/checkpoints/test_permissions.py",
    "fine_tuning/jobs/test_checkpoints.py",
    "fine_tuning/test_jobs.py",
    "responses/test_input_items.py",
    "responses/test_input_tokens.py",
    "test_batches.py",
    "test_completions.py",
    "test_embeddings.py",
    "test_evals.py",
    "test_files.py",
    "test_models.py",
    "test_responses.py",
    "test_uploads.py",
    "test_webhooks.py",
    "uploads/test_parts.py",
    "webhooks/test_event_types.py",
)


@dataclass(frozen=True, order=True)
class Case:
    """One test of the suite: a method of the class for the synchronous or for the asynchronous client."""

    file: str
    group: str
    name: str


@dataclass(frozen=True)
class Row:
    """A row of the table in the documentation: tests that fail with both clients."""

    file: str
    names: tuple[str, ...]

    def lists(self, case: Case, name: str) -> bool:
        return case.file == self.file and fnmatchcase(case.name, name)


def rows(page: str) -> list[Row]:
    """The rows of the table of failing tests."""
    found = re.findall(r"^\| `([\w/]+\.py)` \| (.+?) \| .+ \|$", page, re.MULTILINE)
    return [Row(file, tuple(re.findall("`(.+?)`", names))) for file, names in found]


def run_pip(*arguments: str) -> None:
    """Skip the test where no index has the package."""
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"pip {arguments[0]} {arguments[-1]} failed: {done.stderr.strip()[-200:]}")


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution, with pytest's plugin for its asynchronous tests beside it."""
    folder = tmp_path_factory.mktemp("suite")
    version = openai.__version__
    sources = ("--no-deps", "--no-binary", "openai", "--dest", str(folder), f"openai=={version}")
    run_pip("download", *sources)
    run_pip("install", "--no-deps", "--target", str(folder / "plugins"), PLUGIN)
    with tarfile.open(folder / f"openai-{version}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def admin(service: Server, *arguments: str) -> Any:
    command = [sys.executable, "-m", "worker.cli", "admin", *arguments, "--json"]
    environment = os.environ | {"REGRAFT_DATA_DIR": str(service.folder)}
    return json.loads(subprocess.check_output(command, cwd=ROOT, env=environment))


@pytest.fixture(scope="module")
def base_url(suite: Path, service: Server, inference: None) -> Iterator[str]:
    """The proxy before a project of its own, in which only what the tests create is listed."""
    project, other = (admin(service, "project", "create", name)["id"] for name in ("suite", "other"))
    key = admin(service, "key", "create", "--project", project, "--name", "suite", "--scope", "admin")["key"]
    database = Database(f"sqlite:///{service.folder}/regraft.db")
    with closing(database), receiver(Queue()) as url, service.client(api_key=key) as client:
        objects = Objects(client, database, model=MODELS[0], other_project=other, webhook_url=url)
        objects.finish()
        admin(service, "project", "limits", project, "--set", "running_jobs=0", "running_eval_runs=0")
        with proxy(objects, service.base_url, key) as address:
            yield address


@pytest.fixture(scope="module")
def outcomes(suite: Path, base_url: str) -> dict[Case, str]:
    """For each test that ran, the first line of its failure, or nothing."""
    report = suite / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "pytest_asyncio.plugin", "--override-ini", "addopts="]
    # The loose clients and the third HTTP library repeat each request; tests of path parameters send none.
    command += ["-q", "-k", "strict and not path_params", "--junit-xml", str(report)]
    command += [f"tests/api_resources/{file}" for file in FILES]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "OPENAI_"))}
    environment = kept | {
        "TEST_API_BASE_URL": base_url,
        "PYTHONPATH": str(suite / "plugins"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # the plugins of our own tests
    }
    folder = suite / f"openai-{openai.__version__}"
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=3000)
    assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-3000:]
    return dict(map(outcome, ElementTree.parse(report).iter("testcase")))


def outcome(element: ElementTree.Element) -> tuple[Case, str]:
    *path, group = element.attrib["classname"].removeprefix("tests.api_resources.").split(".")
    name = element.attrib["name"].removeprefix("test_").removesuffix("[strict]")
    problem = next((one for one in element if one.tag in ("failure", "error")), None)
    text = "" if problem is None else problem.attrib["message"].partition("\n")[0] or problem.tag
    return Case("/".join(path) + ".py", group, name), text


def test_no_test_fails_that_the_documentation_does_not_list(outcomes: dict[Case, str]) -> None:
    listed = rows(PAGE.read_text())

    unlisted = {
        case: problem
        for case, problem in sorted(outcomes.items())
        if problem and not any(row.lists(case, name) for row in listed for name in row.names)
    }
    assert unlisted == {}
    assert {case.file for case in outcomes} == set(FILES)


def test_each_test_that_the_documentation_lists_fails(outcomes: dict[Case, str]) -> None:
    for row in rows(PAGE.read_text()):
        for name in row.names:
            matching = {case: problem for case, problem in outcomes.items() if row.lists(case, name)}

            assert matching, f"no test of {row.file} is named {name}"
            assert [case for case, problem in matching.items() if not problem] == [], "these pass now"
