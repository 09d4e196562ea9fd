"""Ending at once what would go on for as long as its client listens."""

import socket

import uvicorn
from anyio import Event, move_on_after


class Shutdown:
    """Whether the server ends, and a sleep that is over when it does. Everything of it runs in the event loop."""

    def __init__(self) -> None:
        self.begun = False
        self._sleepers: set[Event] = set()

    def begin(self) -> None:
        self.begun = True
        for sleeper in self._sleepers:
            sleeper.set()

    async def sleep(self, seconds: float) -> None:
        """For so long, or until the server ends."""
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
    """uvicorn's, which otherwise waits for open streams as long as it may, and tells the application only then."""

    def __init__(self, config: uvicorn.Config, ending: Shutdown) -> None:
        super().__init__(config)
        self.ending = ending

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.ending.begin()
        await super().shutdown(sockets)
