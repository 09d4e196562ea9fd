"""Waiting for the end of something on the server, which may be restarted meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import httpx2
import openai

from regraft.types import GraderAudit, Preview

if TYPE_CHECKING:
    from regraft.client import AsyncRegraft
    from regraft.sync.client import Regraft

T = TypeVar("T")

MAX_FAILURES = 10  # in a row: about three minutes, longer than the start of a server


def retry_in(error: openai.OpenAIError, failures: int) -> float:
    """Seconds until the next try after this number of failures in a row; raises the error if it is permanent."""
    if not is_temporary(error) or failures > MAX_FAILURES:
        raise error
    # The first retry is immediate: most connections break because a proxy or a server was restarted.
    return 0.0 if failures == 1 else float(min(2 ** (failures - 2), 30))


def is_temporary(error: openai.OpenAIError) -> bool:
    """Whether a retry may succeed: the server is not there, or has too much to do."""
    if isinstance(error, openai.APIStatusError):
        return error.status_code in (408, 429) or error.status_code >= 500
    return isinstance(error, openai.APIConnectionError) or not isinstance(error, openai.APIError)


class AsyncWaiting:
    def __init__(
        self, every_seconds: float, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._every_seconds, self._sleep = every_seconds, sleep

    async def until(
        self, has_ended: Callable[[T], bool], read: Callable[[], Awaitable[T]], progress: Callable[[T], None]
    ) -> T:
        """Return what `read` returns once it has ended; `progress` gets it until then.

        Raises:
            openai.APIError: it cannot be read, or not for about three minutes.
        """
        failures = 0
        while True:
            try:
                found = await read()
            except openai.APIError as error:
                failures += 1
                await self._sleep(retry_in(error, failures))
                continue
            failures = 0
            if has_ended(found):
                return found
            progress(found)
            await self._sleep(self._every_seconds)


def refuse_failed(client: "Regraft | AsyncRegraft", ended: Preview | GraderAudit, path: str) -> None:
    """Raise the error of a failed preview or audit as a response of its creation with this status would.

    Args:
        path: where it was created.

    Raises:
        openai.APIStatusError: it failed.
        openai.OpenAIError: it was canceled.
    """
    error = ended.error
    if error is not None:
        request = httpx2.Request("POST", f"{str(client.base_url).rstrip('/')}{path}")
        response = httpx2.Response(error.status, request=request)
        raise client._make_status_error(error.message, body=error.to_dict(), response=response)
    if ended.report is None:
        raise openai.OpenAIError(f"{ended.id} was canceled.")
