"""`regraft jobs passport` and `regraft verify`."""

import json
from pathlib import Path
from typing import Any

import pytest
import regraft
from regraft.cli import main

from core import passports
from core.passports import Signer
from core.results.passport import KEY_FILE
from tests.sdk.conftest import House

FILES = {"adapter_config.json": b'{"r": 16}', "adapter_model.safetensors": b"weights"}


@pytest.fixture
def signer(tmp_path: Path, house: House) -> Signer:
    text = passports.new_key()
    (tmp_path / KEY_FILE).write_text(text)
    return Signer.parse(text)


@pytest.fixture
def folder(house: House, signer: Signer, client: regraft.Regraft, tmp_path: Path) -> Path:
    """A downloaded checkpoint with its passport."""
    job_id = house.job(status="succeeded")
    house.checkpoint(job_id, 1, 0.5, FILES)
    return client.checkpoints.download(job_id, to=tmp_path / "adapter")


@pytest.fixture(autouse=True)
def _offline_unless_asked(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGRAFT_BASE_URL", house.base_url)
    monkeypatch.setenv("REGRAFT_API_KEY", house.key)


def test_a_download_is_verified_with_all_its_files_and_without_a_server(
    folder: Path, signer: Signer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REGRAFT_BASE_URL", "http://127.0.0.1:1/v1")

    assert main(["verify", str(folder), "--key", signer.fingerprint.upper()]) == 0

    said = capsys.readouterr()
    assert "valid" in said.out and "4 files checked" in said.out
    assert signer.fingerprint in said.out
    assert "not that it is true" in said.err
    assert "not pinned" not in said.err


def test_without_a_pinned_key_it_is_said_that_anyone_may_have_signed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(folder / "passport.json")]) == 0
    assert "anyone can sign" in capsys.readouterr().err


def test_another_key_than_the_pinned_one_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder), "--key", "0" * 64]) == 1
    assert "signed by another key" in capsys.readouterr().out


def test_a_key_that_is_no_fingerprint_is_a_mistake_of_the_command(folder: Path) -> None:
    assert main(["verify", str(folder), "--key", "abc"]) == 2


@pytest.mark.parametrize("name", [*FILES, "README.md", "reproduce.json"])
def test_a_changed_file_is_found(
    folder: Path, signer: Signer, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes() + b" ")

    assert main(["verify", str(folder), "--key", signer.fingerprint]) == 1
    assert f"{name} does not have the content that was signed." in capsys.readouterr().out


def test_a_file_that_was_added_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A loader would take a chat template that lies there."""
    (folder / "chat_template.jinja").write_text("")

    assert main(["verify", str(folder)]) == 1
    assert "chat_template.jinja is not in the passport" in capsys.readouterr().out


def test_other_files_in_place_of_all_that_were_signed_are_found(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in folder.iterdir():
        if path.name != "passport.json":
            path.rename(folder / f"other-{path.name}")

    assert main(["verify", str(folder)]) == 1
    assert "adapter_model.safetensors is missing." in capsys.readouterr().out


def test_a_changed_passport_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "passport.json"
    path.write_text(path.read_text().replace('"valid_reward": 0.5', '"valid_reward": 0.9'))

    assert main(["verify", str(folder), "--output", "json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["valid"], answer["problems"]) == (
        False,
        ["The signature does not match: the statement, the key or the signature was changed."],
    )


def test_a_strangers_passport_cannot_write_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    statement: Any = {
        "type": "regraft.passport",
        "version": 1,
        "model": "\x1b[2Jmine\ud83d",
        "export": {"files": []},
    }
    path = tmp_path / "passport.json"
    path.write_bytes(passports.render(Signer.parse(passports.new_key()).sign(statement)))

    assert main(["verify", str(path)]) == 0
    assert "\\u001b[2Jmine\\ud83d" in capsys.readouterr().out


def test_a_missing_file_is_a_mistake_of_the_command(tmp_path: Path) -> None:
    assert main(["verify", str(tmp_path / "none.json")]) == 2


def test_the_passport_of_a_job_is_written_and_verified(
    house: House, folder: Path, client: regraft.Regraft, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = json.loads((folder / "passport.json").read_text())
    job_id, checkpoint_id = stored["statement"]["job"], stored["statement"]["checkpoint"]["id"]
    path = tmp_path / "alone.json"

    assert main(["jobs", "passport", job_id, "--checkpoint", checkpoint_id, "--to", str(path)]) == 0
    assert main(["verify", str(path)]) == 0

    assert "No files were checked" in capsys.readouterr().err
    assert json.loads(path.read_text()) == stored == client.jobs.passport(job_id, checkpoint_id=checkpoint_id)


def test_a_server_without_a_key_is_named(
    house: House, client: regraft.Regraft, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = house.job(status="succeeded")
    checkpoint = house.checkpoint(job_id, 1, 0.5, FILES)

    assert main(["jobs", "passport", job_id, "--checkpoint", checkpoint]) == 3
    assert "REGRAFT_PASSPORT_KEY" in capsys.readouterr().err
