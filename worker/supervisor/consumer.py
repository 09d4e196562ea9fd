"""Celery's consumer of wake-ups, replaced whenever it ends."""

import logging
import threading
import time
from collections.abc import Sequence

from celery import Celery
from celery.worker import WorkController, state

log = logging.getLogger(__name__)

FIRST_PAUSE, MAX_PAUSE = 1.0, 30.0


class Consumer:
    """Receives messages until `stop`.

    Celery reconnects after a lost connection, but an error reply of Redis ends its consumer: UNBLOCKED when a primary
    becomes a replica, MISCONF when it cannot save its snapshot, NOPERM, MOVED. Each of them passes, so a new consumer
    follows, with a back-off.

    The tasks must return at once: Celery waits for them before it ends, and runs them in the consumer's thread.
    """

    def __init__(
        self,
        celery: Celery,
        queues: Sequence[str],
        *,
        first_pause: float = FIRST_PAUSE,
        max_pause: float = MAX_PAUSE,
    ) -> None:
        self.celery, self.queues = celery, queues
        self.first_pause, self.max_pause = first_pause, max_pause
        self._stopping = threading.Event()
        self._controller: WorkController | None = None

    def run(self) -> None:
        """Receive messages in this thread until `stop`."""
        self.celery.set_current()  # tasks are looked up by name in the current app of the thread
        pause = self.first_pause
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                self._controller = self._new()
                self._controller.start()  # logs what ended it
            except Exception:
                log.exception("the consumer of wake-ups could not be started")
            if time.monotonic() - began > self.max_pause:  # it worked for a while
                pause = self.first_pause
            if not self._stopping.is_set():
                log.warning(
                    "the consumer of wake-ups has ended; a new one starts in %.3g s, and until then queued jobs start "
                    "without a message",
                    pause,
                )
            self._stopping.wait(pause)
            pause = min(2 * pause, self.max_pause)

    def stop(self) -> None:
        """Have `run` return within seconds. Without effect if it has."""
        self._stopping.set()
        # The consumer's own thread checks this flag every second or two and stops itself, also while it reconnects to
        # the broker. With Redis, `stop` must not be called from here: closing the connection reads the reply that the
        # other thread is about to read, and waits for it forever if that one was faster.
        state.should_stop = 0
        if self._controller is not None and not self._controller.use_eventloop:
            self._controller.stop()

    def stopped(self) -> None:
        """To be called when `run` has returned: the flag of `stop` is one for all consumers of the process."""
        state.should_stop = None

    def _new(self) -> WorkController:
        return self.celery.WorkController(
            pool="solo",
            concurrency=1,
            queues=list(self.queues),
            without_gossip=True,
            without_mingle=True,
            without_heartbeat=True,
            loglevel="WARNING",
        )
