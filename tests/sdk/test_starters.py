"""What `regraft init` writes works as it is."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from regraft.cli import main
from regraft.starters import KINDS, write

from api.app import create_app
from core.database.engine import Database
from core.registry import Registry
from core.settings import Settings
from core.storage.store import FolderBlobs
from core.tenancy import keys
from graders.backends import Backends
from graders.judge.judges import JudgeModel
from tests.graders import servers
from tests.sdk.conftest import serving


@pytest.fixture
def server(sqlite_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A service with the included models and the judge of the starter, which finds every answer half clear."""
    settings = Settings(data_dir=tmp_path)
    database, blobs = sqlite_database, FolderBlobs(tmp_path / "blobs")
    with database.write() as session:
        key = keys.bootstrap(session)
    reply = servers.verdict(0.5)
    with servers.serving(lambda path, body: (reply.status, reply.body)) as url:
        backends = Backends({"small": JudgeModel(f"{url}/v1")})
        app = create_app(settings, database, blobs, Registry.load(None), backends, lambda *wake: True)
        with serving(app) as port:
            monkeypatch.setenv("REGRAFT_BASE_URL", f"http://127.0.0.1:{port}/v1")
            monkeypatch.setenv("REGRAFT_API_KEY", str(key))
            yield


@pytest.mark.parametrize("kind", KINDS)
def test_what_init_writes_is_valid_and_its_golden_cases_pass(
    kind: str, server: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "task"
    assert main(["init", kind, "--to", str(folder)]) == 0
    said = capsys.readouterr().out
    commands = [line.split()[1:] for line in said.splitlines() if line.startswith("  regraft ")]

    validated, cases = (main(command) for command in commands[:2])

    captured = capsys.readouterr()
    assert (validated, cases) == (0, 0), captured
    assert "only local rules" not in captured.err
    assert commands[2][:2] == ["jobs", "create"]
    rows = {name: (folder / f"{name}.jsonl").read_text().splitlines() for name in ("train", "valid")}
    assert len(rows["train"]) >= 24 and len(rows["valid"]) >= 12
    prompts = [json.loads(row)["messages"][-1]["content"] for split in rows.values() for row in split]
    assert len(set(prompts)) == len(prompts)  # no row of one file is in the other


def test_init_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.toml").write_text("mine")

    assert main(["init", "math", "--to", str(tmp_path)]) == 2
    assert "job.toml already exists: choose another folder with --to" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]
    with pytest.raises(FileExistsError):
        write("math", tmp_path)
