"""LiteLLM's documentation, *Batches API*: the package as it is published, in an environment of its own."""

import json
import os
import subprocess
import venv
from pathlib import Path

import pytest

from tests.conformance.conftest import MODELS
from tests.conformance.helpers import FILE, assert_documented

PACKAGE = "litellm==1.106.12"
SCRIPT = Path(__file__).parent / "litellm_batches.py"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has LiteLLM only."""
    folder = tmp_path_factory.mktemp("litellm")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", PACKAGE]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=600)
    if installed.returncode:
        pytest.skip(f"pip cannot install {PACKAGE}: {installed.stderr.strip()[-200:]}")
    return python


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_batches_work_with_litellm(python: Path, inference: None) -> None:
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it would fetch prices
    command = [str(python), str(SCRIPT), MODELS[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)

    assert_documented(answers["file"], FILE)
    created, ended, cancelled = answers["created"], answers["ended"], answers["cancelled"]
    assert (created["object"], created["metadata"]) == ("batch", {"team": "search"})
    assert (ended["id"], ended["status"], ended["error_file_id"]) == (created["id"], "completed", None)
    assert ended["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert [line["custom_id"] for line in answers["lines"]] == ["row-0", "row-1", "row-2"]
    assert {line["response"]["status_code"] for line in answers["lines"]} == {200}
    assert answers["cancelling"]["status"] in ("cancelling", "cancelled")
    assert cancelled["status"] == "cancelled"
    assert answers["listed"] == [cancelled["id"], ended["id"]]
