import asyncio
import hashlib
import io
import json
import tarfile
from _io import BytesIO
from collections.abc import Callable
from pathlib import Path
from socket import socket
from typing import Any

import openai
import pytest
import regraft
from regraft import AsyncRegraft
from regraft.resources.checkpoints import unpack

from tests.sdk.conftest import House, Proxy

FILES = {"adapter_config.json": b'{"r": 16}', "adapter_model.safetensors": bytes(range(256)) * 20_000}


@pytest.fixture
def job_id(house: House) -> str:
    """A job with three checkpoints, the best in the middle, and as good as the one behind it."""
    job_id = house.job(status="succeeded")
    for step, reward in ((1, 0.1), (2, 0.7), (3, 0.7)):
        house.checkpoint(job_id, step, reward, FILES | {"step": str(step).encode()})
    return job_id


def test_the_best_one_is_downloaded_unless_another_is_asked_for(
    client: regraft.Regraft, job_id: str, tmp_path: Path
) -> None:
    newest = client.checkpoints.list(job_id)[0]

    best = client.checkpoints.download(job_id, to=tmp_path / "best")
    asked = client.checkpoints.download(job_id, newest.id, to=tmp_path / "asked")

    assert {name: (best / name).read_bytes() for name in FILES} == FILES
    assert (best / "step").read_bytes() == b"2"
    assert (asked / "step").read_bytes() == b"3"
    assert json.loads((best / "reproduce.json").read_text())["checkpoint"]["step"] == 2


def test_the_async_client_downloads_it_too(
    make_async: Callable[[], AsyncRegraft], job_id: str, tmp_path: Path
) -> None:
    async def download() -> Path:
        async with make_async() as client:
            return await client.checkpoints.download(job_id, to=tmp_path / "best")

    folder = asyncio.run(download())

    assert (folder / "adapter_model.safetensors").read_bytes() == FILES["adapter_model.safetensors"]


def test_a_folder_that_is_there_is_left_alone(client: regraft.Regraft, job_id: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()

    with pytest.raises(FileExistsError):
        client.checkpoints.download(job_id, to=tmp_path / "mine")


def test_a_job_without_checkpoints_and_an_unknown_one(
    house: House, client: regraft.Regraft, job_id: str, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint yet"):
        client.checkpoints.download(house.job(), to=tmp_path / "x")
    with pytest.raises(regraft.CheckpointNotFound):
        client.checkpoints.download(job_id, "ftckpt_none", to=tmp_path / "x")


def test_a_download_that_breaks_off_leaves_nothing(house: House, job_id: str, tmp_path: Path) -> None:
    class Short(Proxy):
        """Cuts when a megabyte has come."""

        passed = 0

        def _copy(self, source: socket, sink: socket) -> None:
            if sink not in self.open[::2]:
                return super()._copy(source, sink)
            while self.passed < 1_000_000 and (data := source.recv(65536)):
                self.passed += len(data)
                sink.sendall(data)
            self.cut()

    proxy = Short(house.port)
    client = regraft.Regraft(base_url=f"http://127.0.0.1:{proxy.port}", api_key=house.key, max_retries=0)

    with pytest.raises(openai.APIConnectionError):
        client.checkpoints.download(job_id, to=tmp_path / "out" / "best")
    proxy.close()
    assert not (tmp_path / "out").exists()


def archive(files: dict[Any, Any], manifest: dict[str, Any] | None = None) -> BytesIO:
    out = io.BytesIO()
    listed = [
        {"name": name, "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()
    ]
    checkpoint = {"checkpoint": manifest or {"files": listed}}
    files = {"job-step-1/reproduce.json": json.dumps(checkpoint).encode()} | {
        f"job-step-1/{name}": content for name, content in files.items()
    }
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    out.seek(0)
    return out


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (archive({"a": b"1"}, {"files": [{"name": "a", "sha256": "0" * 64}]}), "a does not have the sha256"),
        (archive({}, {"files": [{"name": "a", "sha256": "0" * 64}]}), "a is missing"),
        (archive({"../escaped": b"1"}), "not a plain file"),
        (archive({"a": b"1"}, {"wrong": 1}), "no usable reproduce.json"),
        (io.BytesIO(b"not a tar at all"), "cannot be read"),
    ],
)
def test_what_is_not_right_is_not_kept(tmp_path: Path, sent: BytesIO, problem: str) -> None:
    with pytest.raises(regraft.DownloadCorrupt, match=problem):
        unpack(sent, tmp_path / "deep" / "target")

    assert list((tmp_path / "deep").iterdir()) == []
    assert not (tmp_path / "escaped").exists()
