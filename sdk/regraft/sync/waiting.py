"""Written by .ci/sync_client.py from regraft.resources.waiting; do not edit."""

import time
from collections.abc import Callable

import openai

from regraft.resources.waiting import T, retry_in


class Waiting:
    def __init__(self, every_seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
        self._every_seconds, self._sleep = every_seconds, sleep

    def until(
        self, has_ended: Callable[[T], bool], read: Callable[[], T], progress: Callable[[T], None]
    ) -> T:
        """Return what `read` returns once it has ended; `progress` gets it until then.

        Raises:
            openai.APIError: it cannot be read, or not for about three minutes.
        """
        failures = 0
        while True:
            try:
                found = read()
            except openai.APIError as error:
                failures += 1
                self._sleep(retry_in(error, failures))
                continue
            failures = 0
            if has_ended(found):
                return found
            progress(found)
            self._sleep(self._every_seconds)
