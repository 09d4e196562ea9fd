"""What docs/howto/evals.md shows works."""

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from regraft.cli import parser
from regraft.resources.evals import read_config
from regraft.sync.evals import Evals

from graders.backends import Backends
from tests.evals.conftest import House

PAGE = (Path(__file__).parents[2] / "docs/howto/evals.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.S)


def test_the_python_blocks_run_one_after_another(client: OpenAI, house: House) -> None:
    create, read = blocks("python")
    names: dict[str, Any] = {"client": client}

    exec(create, names)
    house.work()
    exec(read, names)

    run = client.evals.runs.retrieve(names["run"].id, eval_id=names["made"].id)
    assert (run.status, run.result_counts.total) == ("completed", 1)


def test_the_configuration_runs_and_its_eval_is_used_again(
    client: OpenAI, house: House, tmp_path: Path
) -> None:
    [config] = blocks("json")
    (tmp_path / "capitals.json").write_text(config)
    rows = [{"item": {"question": "The capital of Peru? Lima", "answer": "Lima"}}]
    (tmp_path / "capitals.jsonl").write_text("\n".join(map(json.dumps, rows)))
    evals = Evals(client)

    runs = [evals.run_config(read_config(tmp_path / "capitals.json"), name=name) for name in ("a", "b")]
    house.work()

    assert runs[0].eval_id == runs[1].eval_id
    done = evals.wait(runs[0].eval_id, runs[0].id)
    assert done.result_counts.passed == 1
    assert evals.gate(done.eval_id, done.id, min_pass_rate=0.8, baseline=runs[1].id).passed


def test_the_models_file_is_valid(tmp_path: Path) -> None:
    [models] = blocks("toml")
    (tmp_path / "graders.toml").write_text(models)

    backends = Backends.load(tmp_path / "graders.toml", environment={"OPENAI_API_KEY": "k"})

    assert backends.models.keys() == tomllib.loads(models)["models"].keys()


@pytest.mark.parametrize(
    "command", re.findall(r"^(?:\$ |[- ]*run: | +)(?:\w+=\S+ )?(regraft .*)$", PAGE, flags=re.M)
)
def test_its_commands_exist(command: Any) -> None:
    words = shlex.split(command.split(">")[0])

    assert parser.build().parse_args(words[1:])
