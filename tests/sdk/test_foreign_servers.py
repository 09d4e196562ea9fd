"""Servers that break off, end in an error, or are none of ours: a line and an exit code, never a traceback."""

import asyncio
import http.server
import io
import json
import os
import pty
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import regraft
from regraft.cli import main

PAGE = "<html><title>Sign in</title></html>"


@dataclass
class Answer:
    """What a server says to everything that it is asked."""

    body: str = ""
    kind: str = "application/json"
    status: int = 200
    missing: int = 0  # bytes that are promised and never come
    leads_to: str = ""
    job: str = ""  # what it says of the job itself, if that is to be another answer
    asked: list[str] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Answer]:
    """A server that is not ours, where the command line looks for one."""
    answer = Answer()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            answer.asked.append(self.path)
            is_job = bool(answer.job) and self.path.endswith("/fine_tuning/jobs/ftjob-1")
            body = (answer.job if is_job else answer.body).encode()
            moved = answer.leads_to and self.path != answer.leads_to
            self.send_response(302 if moved else answer.status)
            self.send_header("location", answer.leads_to)
            self.send_header("content-type", "application/json" if is_job else answer.kind)
            self.send_header("content-length", str(len(body) + answer.missing))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    answer.url = f"http://127.0.0.1:{server.server_port}/v1"
    monkeypatch.setenv("REGRAFT_BASE_URL", answer.url)
    monkeypatch.setenv("REGRAFT_API_KEY", "rg-key")
    monkeypatch.setenv("REGRAFT_CONFIG", str(tmp_path / "config.toml"))
    yield answer
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def run(
    stranger: Answer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str]]:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # connections are made again without waiting

    def run(*argv: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("rg-key\n"))
        code = main(argv)
        return code, capsys.readouterr().err

    return run


def test_an_answer_that_ends_in_an_error_is_the_servers_failure(
    run: Callable[..., tuple[int, str]], stranger: Answer
) -> None:
    stranger.kind = "text/event-stream"
    error = {"message": "the model failed", "type": "server_error", "code": "model_failed", "param": None}
    stranger.body = "".join(
        f"data: {json.dumps(one)}\n\n"
        for one in ({"choices": [{"index": 0, "delta": {"content": "Hel"}}]}, {"error": error})
    )

    assert run("chat", "tiny", "hi") == (5, "regraft: the model failed (model_failed)\n")


def test_an_answer_that_breaks_off_is_too(run: Callable[..., tuple[int, str]], stranger: Answer) -> None:
    stranger.kind, stranger.missing = "text/event-stream", 10
    stranger.body = 'data: {"choices": [{"index": 0, "delta": {"content": "Hel"}}]}\n\n'

    code, said = run("chat", "tiny", "hi")

    assert (code, said.startswith("regraft: Cannot reach http://127.0.0.1:")) == (5, True)


def test_a_stream_of_events_that_never_ends_the_job_is_given_up(
    run: Callable[..., tuple[int, str]], stranger: Answer
) -> None:
    stranger.kind, stranger.body = "text/event-stream", ": nothing\n\n"
    stranger.job = '{"id": "ftjob-1", "object": "fine_tuning.job", "status": "running"}'

    code, said = run("jobs", "watch", "ftjob-1")

    assert (code, said) == (5, "regraft: The stream of ftjob-1 ended before the job.\n")
    assert sum("stream" in path for path in stranger.asked) == 11


@pytest.mark.parametrize("command", [["files", "download", "file-1"], ["rollouts", "ftjob-1"]])
def test_a_download_that_breaks_off_leaves_the_file_that_was_there(
    run: Callable[..., tuple[int, str]], stranger: Answer, tmp_path: Path, command: list[str]
) -> None:
    stranger.kind, stranger.body, stranger.missing = "application/octet-stream", "half", 4
    target = tmp_path / "folder" / "data"
    target.parent.mkdir()
    target.write_text("before")

    code, said = run(*command, "--to", str(target))

    assert (code, said.startswith("regraft: Cannot reach")) == (5, True)
    assert (target.read_text(), list(target.parent.iterdir())) == ("before", [target])


def test_a_download_makes_no_folder_and_replaces_what_a_link_leads_to_but_no_device(
    run: Callable[..., tuple[int, str]], stranger: Answer, tmp_path: Path
) -> None:
    stranger.kind, stranger.body = "application/octet-stream", "whole"
    (tmp_path / "link").symlink_to(tmp_path / "target")
    primary, secondary = pty.openpty()

    assert run("files", "download", "file-1", "--to", str(tmp_path / "none" / "x")) == (
        2,
        f"regraft: No such folder: {tmp_path / 'none'} (invalid_command)\n",
    )
    assert run("files", "download", "file-1", "--to", str(tmp_path / "link"))[0] == 0
    assert run("files", "download", "file-1", "--to", os.ttyname(secondary))[0] == 0

    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "whole"
    assert os.read(primary, 5) == b"whole"
    os.close(primary)
    os.close(secondary)


@pytest.mark.parametrize(
    "foreign",
    [
        {"body": PAGE, "kind": "text/html; charset=utf-8"},
        {"body": PAGE, "kind": "text/html", "status": 404},
        {"body": PAGE, "kind": "text/html", "leads_to": "/sign-in"},
        {"body": "It works!", "kind": "text/plain"},
        {"body": '{"detail": "Not Found"}', "status": 404},
        {"body": '{"hello": "world"}'},
        {"body": "{not json"},
    ],
    ids=["page", "page-404", "sign-in", "text", "json-404", "json", "no-json"],
)
def test_a_login_to_something_else_says_so_and_keeps_no_key(
    run: Callable[..., tuple[int, str]], stranger: Answer, tmp_path: Path, foreign: dict[str, Any]
) -> None:
    for name, value in foreign.items():
        setattr(stranger, name, value)

    code, said = run("login", "--base-url", stranger.url)

    assert code == 5
    assert f"regraft: {stranger.url}" in said and "does not answer as a regraft server" in said
    assert "<html>" not in said
    assert not (tmp_path / "config.toml").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["jobs", "show", "ftjob-1"],
        ["jobs", "list"],
        ["jobs", "watch", "ftjob-1"],
        ["rollouts", "ftjob-1"],
        ["rollouts", "ftjob-1", "--to", "x"],
        ["files", "list"],
        ["files", "download", "file-1"],
        ["checkpoints", "download", "ftjob-1", "ftckpt_1", "-o", "x"],
        ["chat", "tiny", "hi"],
    ],
    ids=" ".join,
)
def test_no_command_takes_a_page_for_an_answer(
    run: Callable[..., tuple[int, str]],
    stranger: Answer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    stranger.kind, stranger.body = "text/html", PAGE

    code, said = run(*command)

    assert (code, "does not answer as a regraft server: it sends text/html" in said) == (5, True)
    assert not (tmp_path / "x").exists()


def test_the_library_says_it_with_a_class(stranger: Answer) -> None:
    stranger.kind, stranger.body, stranger.leads_to = "text/html", PAGE, "/sign-in"

    async def ask() -> None:
        async with regraft.AsyncRegraft() as client:
            await client.jobs.retrieve("ftjob-1")

    with pytest.raises(
        regraft.NotARegraftServer, match=r"it redirects to http://\S+/sign-in, which sends text/html"
    ):
        regraft.Regraft().jobs.retrieve("ftjob-1")
    with pytest.raises(regraft.NotARegraftServer):
        asyncio.run(ask())


def test_an_address_that_is_none_is_the_commands_mistake(run: Callable[..., tuple[int, str]]) -> None:
    code, said = run("login", "--base-url", "http://127.0.0.1:port")

    assert (code, said.startswith("regraft: Invalid port")) == (2, True)
