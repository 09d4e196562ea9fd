"""Reference, checkpoint permissions: a checkpoint is shared with another project."""

import json
import os
import subprocess
import sys
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.fine_tuning.fine_tuning_job import FineTuningJob

from tests.conformance.helpers import PERMISSION, assert_documented
from tests.e2e.conftest import ROOT, Server


@pytest.fixture
def checkpoint(trained: FineTuningJob) -> str:
    [*_, first] = OpenAI().fine_tuning.jobs.checkpoints.list(trained.id)
    return first.fine_tuned_model_checkpoint


@pytest.fixture(scope="module")
def projects(service: Server) -> list[Any]:
    """Other projects of the organization, as its operator makes them."""

    def create(name: str) -> Any:
        command = [sys.executable, "-m", "worker.cli", "admin", "project", "create", name, "--json"]
        environment = os.environ | {"REGRAFT_DATA_DIR": str(service.folder)}
        return json.loads(subprocess.check_output(command, cwd=ROOT, env=environment))["id"]

    return [create(name) for name in ("one", "two")]


@pytest.mark.slow
def test_a_checkpoint_is_shared_listed_and_taken_back(checkpoint: str, projects: list[Any]) -> None:
    permissions = OpenAI().fine_tuning.checkpoints.permissions

    created = permissions.create(checkpoint, project_ids=projects)
    assert_documented(created, {"object": "list", "data": [PERMISSION], "has_more": False})
    assert {one.project_id for one in created.data} == set(projects)

    page = permissions.list(checkpoint)
    assert_documented(
        page,
        {
            "object": "list",
            "data": [PERMISSION],
            "has_more": False,
            "first_id": page.data[0].id,
            "last_id": page.data[-1].id,
        },
    )
    everything = {one.id for one in created.data}
    assert {one.id for one in permissions.list(checkpoint, limit=1)} == everything  # two pages
    upwards = [one.id for one in permissions.list(checkpoint, order="ascending")]
    assert upwards == [one.id for one in reversed(page.data)]
    [of_one] = permissions.list(checkpoint, project_id=projects[0]).data
    assert of_one.project_id == projects[0]

    deleted = permissions.delete(of_one.id, fine_tuned_model_checkpoint=checkpoint)
    assert_documented(deleted, {"id": of_one.id, "object": "checkpoint.permission", "deleted": True})
    assert [one.project_id for one in permissions.list(checkpoint)] == [projects[1]]


def test_an_unknown_checkpoint_is_not_found() -> None:
    with pytest.raises(openai.NotFoundError):
        OpenAI().fine_tuning.checkpoints.permissions.list("ft:o4-mini-2025-04-16:org::abcdefgh:ckpt-step-1")
