"""Start an engine as a child of this process, which reaches it over a socket in a private folder.

The kernel kills a child when the *thread* that has started it ends, so that thread has to live as long as the child.
"""

import asyncio
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from graders.sandbox import folders
from worker.engine import errors
from worker.engine import options as engine_settings
from worker.engine.options import EngineConfig
from worker.engine.protocol import HEALTH
from worker.process import KILLED_SECONDS

LOADING_SECONDS = 1800.0  # of a large model from a slow disk
POLL_SECONDS = 0.1
BACKLOG = 2048  # connections before the child accepts them: one for each group
EXIT_SECONDS = 5.0  # between the signal to exit and the one that cannot be ignored


class Process(Protocol):
    """A process that has been started, such as an `asyncio.subprocess.Process`."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    def kill(self) -> None: ...
    def terminate(self) -> None: ...


StartProcess = Callable[..., Awaitable[Process]]  # with the arguments of asyncio.create_subprocess_exec


class EngineNotStarted(Exception):
    """An engine has exited before it was ready, or has taken too long. The log says why.

    `errors`: those of its processes, oldest first.
    """

    def __init__(self, message: str, errors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.errors = errors


@dataclass(frozen=True)
class EngineStart:
    """What `python -m worker.engine` reads from the file of its name."""

    options: Mapping[str, Any]  # vLLM's
    name: str  # of the model in requests
    socket: str
    parent: int  # process id
    adapters: str  # a folder with a folder for each adapter
    nothing: str | None  # a folder with an adapter that adds 0


class ChildEngine:
    """The process of an engine and the client for it."""

    def __init__(self, folder: Path, process: Process, client: httpx.AsyncClient) -> None:
        self.folder, self.client = folder, client
        self._process = process

    @property
    def socket(self) -> Path:
        return socket_in(self.folder)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_exited(self) -> bool:
        return self._process.returncode is not None

    @property
    def errors(self) -> Sequence[str]:
        """Those that its processes have logged, oldest first."""
        return list(errors.read(self.folder))

    async def kill(self) -> int:
        """End it at once. Returns its exit status, which is that of `subprocess`."""
        if not self.has_exited:
            with suppress(ProcessLookupError):
                self._process.kill()
        return await self._process.wait()

    async def exit_status(self, seconds: float) -> int | None:
        """Wait for it to exit. None: it has not."""
        try:
            return await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            return None

    async def close(self) -> None:
        """End its processes, which have no state to save."""
        await self.client.aclose()
        if not self.has_exited:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), EXIT_SECONDS)
            except TimeoutError:
                with suppress(TimeoutError):  # a process inside a hung driver ends at no signal
                    await asyncio.wait_for(self.kill(), KILLED_SECONDS)

    async def wait_until_ready(self) -> None:
        """Raises EngineNotStarted."""
        deadline = time.monotonic() + LOADING_SECONDS
        while not await self._is_healthy():
            if self.has_exited:
                raise EngineNotStarted(
                    f"its engine exited with status {self._process.returncode}", self.errors
                )
            if time.monotonic() > deadline:
                raise EngineNotStarted(f"its engine was not ready after {LOADING_SECONDS:.0f} s", self.errors)
            await asyncio.sleep(POLL_SECONDS)

    async def _is_healthy(self) -> bool:
        try:
            return (await self.client.get(HEALTH)).status_code == 200
        except httpx.TransportError:
            return False


def socket_in(folder: Path) -> Path:
    return folder / "engine"


async def start_of_job(
    folder: Path, config: EngineConfig, start_process: StartProcess = asyncio.create_subprocess_exec
) -> ChildEngine:
    """Start a job's own engine without waiting for it: it answers requests when it has loaded the model.

    Args:
        folder: private and empty; `private_folder` makes one.
    """
    with socket.socket(socket.AF_UNIX) as listening:  # the child's alone, so that requests fail when it exits
        listening.bind(str(socket_in(folder)))
        listening.listen(BACKLOG)
        descriptor = listening.fileno()
        made = {"config": asdict(config), "parent": os.getpid(), "listening": descriptor}
        return await _spawned(
            folder,
            "worker.engine.child",
            made,
            engine_settings.environment(config),
            start_process,
            pass_fds=[descriptor],
        )


async def start(
    folder: Path,
    options: Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    name: str,
    adapters: Path,
    nothing: Path | None,
) -> ChildEngine:
    """Start an engine.

    Args:
        folder: private and empty; `private_folder` makes one.

    Raises:
        EngineNotStarted: it has failed, and no process of it is left.
    """
    made = EngineStart(
        options=options,
        name=name,
        socket=str(socket_in(folder)),
        parent=os.getpid(),
        adapters=str(adapters),
        nothing=None if nothing is None else str(nothing),
    )
    engine = await _spawned(
        folder,
        "worker.engine",
        asdict(made),
        environment,
        start_new_session=True,  # Ctrl-C in a terminal is for its parent, which lets requests in flight end
    )
    try:
        await engine.wait_until_ready()
    except BaseException:
        await engine.close()
        raise
    return engine


async def _spawned(
    folder: Path,
    module: str,
    start: Mapping[str, Any],
    environment: Mapping[str, str],
    start_process: StartProcess = asyncio.create_subprocess_exec,
    **options: Any,
) -> ChildEngine:
    """`options`: of subprocess.Popen."""
    key = secrets.token_urlsafe(24)
    file = folder / "start.json"
    file.write_text(json.dumps(start))
    own = {"VLLM_API_KEY": key, "VLLM_RPC_BASE_PATH": str(folder), errors.FILE: str(errors.file_in(folder))}
    command = [sys.executable, "-m", module, str(file)]
    process = await start_process(*command, env={**environment, **own}, **options)
    client = httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(uds=str(socket_in(folder)), limits=httpx.Limits()),
        base_url="http://engine",
        headers={"authorization": f"Bearer {key}"},
        timeout=None,
    )
    return ChildEngine(folder, process, client)


def private_folder() -> AbstractContextManager[Path]:
    """A folder for an engine that only this user can open. Its path is short, as that of a socket has to be."""
    return folders.private("regraft-engine-")
