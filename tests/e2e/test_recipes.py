"""The recipes of examples/recipes run to their end on a tiny model with small budgets."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import regraft
from regraft.requests import read_pipeline, read_table

from tests.e2e.conftest import ROOT, Server, launch
from tests.tiny import make_byte_model

FOLDER = ROOT / "examples" / "recipes"
RECIPES = sorted(path.name for path in FOLDER.glob("*.toml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows and graders that recipes name."""
    folder = tmp_path_factory.mktemp("examples") / "recipes"
    folder.mkdir()
    shutil.copytree(FOLDER.parent / "support_desk", folder.parent / "support_desk")
    command = [sys.executable, str(FOLDER / "make.py"), "--to", str(folder), "--rows", "12"]
    subprocess.run(command, check=True)
    for grader in FOLDER.glob("*.json"):
        (folder / grader.name).write_text(grader.read_text())
    return folder


@pytest.fixture(scope="module")
def bytes_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_byte_model(tmp_path_factory.mktemp("bytes"))
    registry = f'[models.tiny]\npath = "{model}"\ndtype = "float32"\ncontext = 1024\n'
    server = launch(tmp_path_factory.mktemp("server"), registry)
    yield server
    server.stop()


def small(recipe: dict[str, Any]) -> dict[str, Any]:
    """The same stages with a budget of seconds. Answers are noise, so that none is right: selections keep any."""
    for stage in recipe["stages"]:
        if "job" in stage:
            job = stage["job"]
            if not job["model"].startswith("{{"):
                job["model"] = "tiny"
            if "hyperparameters" in job:
                job["hyperparameters"] |= {"batch_size": 4, "eval_interval": 2, "n_epochs": 1}
                advanced = job["hyperparameters"]["advanced"]
                advanced["sampling"] |= {"group_size": 2, "max_completion_tokens": 40}
            else:
                [hyperparameters] = [job["method"][job["method"]["type"]]["hyperparameters"]]
                hyperparameters |= {"n_epochs": 1}
        if "sample" in stage:
            if not stage["sample"]["model"].startswith("{{"):
                stage["sample"]["model"] = "tiny"
            stage["sample"] |= {"n": 2, "sampling_params": {"max_completion_tokens": 8}}
            stage["sample"]["grader"] = "length.json"
        if "select" in stage:
            stage["select"] = {
                name: stage["select"][name] for name in ("file", "form") if name in stage["select"]
            }
            stage["select"]["finished"] = False
    return recipe


# The others have the stages and the losses of these, in other orders.
ALWAYS = {"dapo.toml", "dpo.toml", "r1.toml", "rft_support_desk.toml", "rlhf.toml"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.thorough, id=name) for name in RECIPES],
)
def test_a_recipe_runs_to_its_end(
    name: str, folder: Path, bytes_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A score that differs from answer to answer, as pairs need.
    length = (
        "def grade(sample, item):\n    text = sample['output_text'].encode()\n    return sum(text) / 1e5\n"
    )
    (folder / "length.json").write_text(json.dumps({"type": "python", "name": "length", "source": length}))
    monkeypatch.chdir(folder)
    client = regraft.Regraft(base_url=bytes_server.base_url, api_key=bytes_server.key)

    made = client.pipelines.submit(small(read_table(FOLDER / name)))
    done = client.pipelines.wait(made.id)

    assert done.name == name.removesuffix(".toml")
    assert done.status == "succeeded", [(stage.name, stage.error) for stage in done.stages]
    models = [stage.model for stage in done.stages if stage.kind == "job"]
    assert all(model and model.startswith("ft:tiny") for model in models)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_read_as_it_is_printed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)

    asked = read_pipeline(read_table(FOLDER / name))

    assert all(path.exists() for path in asked.uploads.values())
    for stage in asked.body["stages"]:
        if "job" in stage and "reinforcement" in stage["job"]["method"]:
            assert isinstance(stage["job"]["method"]["reinforcement"]["grader"], dict)
