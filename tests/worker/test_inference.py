"""The inference process as a command starts it: what it writes into its log."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from worker.serving.launcher import InferenceServer

pytestmark = pytest.mark.slow  # each test starts a server that loads torch and a model

ROOT = Path(__file__).parents[2]
KEY = "key"
BAR = "Loading weights"


@pytest.fixture
def registry(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a service with one tiny model."""
    models = tmp_path / "models.toml"
    models.write_text(f'[models.tiny]\npath = "{tiny_model}"\ndtype = "float32"\ncontext = 128\n')
    settings = {
        "DATA_DIR": tmp_path / "data",
        "MODELS_FILE": models,
        "INFERENCE_KEY": KEY,
        "TORCH_THREADS": 1,
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"REGRAFT_{name}", str(value))
    for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.delenv(name, raising=False)


def load_model(port: int) -> None:
    """By a chat."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "say yes"}],
        "max_completion_tokens": 1,
    }
    answer = httpx.post(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json=body,
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.usefixtures("registry")
def test_the_inference_process_of_up_draws_no_progress_bars(capfd: pytest.CaptureFixture[str]) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    server = InferenceServer(listening)
    server.start()
    try:
        load_model(port)
    finally:
        server.stop()

    assert BAR not in capfd.readouterr().err


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("bars", [False, True])
def test_an_inference_server_draws_progress_bars_only_if_the_operator_asks_for_them(
    bars: bool, tmp_path: Path
) -> None:
    asked = {"TQDM_DISABLE": "", "HF_HUB_DISABLE_PROGRESS_BARS": "0"} if bars else {}
    command = [sys.executable, "-m", "worker.cli", "inference", "--port", "0"]
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | asked, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stderr is not None
            address = next(
                found for line in server.stderr if (found := re.search(r"http://[\d.]+:(\d+)", line))
            )
            load_model(int(address[1]))
            server.send_signal(signal.SIGTERM)
            _, said = server.communicate(timeout=60)
        finally:
            server.kill()

    assert (BAR in said) == bars
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
