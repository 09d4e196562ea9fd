"""Ends streams on shutdown, which would otherwise last as long as their clients."""

import socket

import uvicorn
from anyio import Event, move_on_after


class Shutdown:
    """The shutdown flag, and a sleep that it interrupts. Everything runs in the event loop."""

    def __init__(self) -> None:
        self.begun = False
        self._sleepers: set[Event] = set()

    def begin(self) -> None:
        self.begun = True
        for sleeper in self._sleepers:
            sleeper.set()

    async def sleep(self, seconds: float) -> None:
        """Sleep for this time, or until shutdown begins."""
        if self.begun:
            return
        sleeper = Event()
        self._sleepers.add(sleeper)
        try:
            with move_on_after(seconds):
                await sleeper.wait()
        finally:
            self._sleepers.discard(sleeper)


class Server(uvicorn.Server):
    """uvicorn's server, which otherwise waits for open streams until its timeout before it notifies the application."""

    def __init__(self, config: uvicorn.Config, ending: Shutdown) -> None:
        super().__init__(config)
        self.ending = ending

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.ending.begin()
        await super().shutdown(sockets)
