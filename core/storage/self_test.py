"""The self-test of the blob store: the service's requests, on one object."""

import hashlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from core.refreshed import Refreshed, in_thread
from core.settings import Settings
from core.storage import store
from core.storage.store import SELF_TEST, BlobCorrupt, BlobStore, NotDeleted

log = logging.getLogger(__name__)

BETWEEN_SECONDS = 60.0


@dataclass(frozen=True)
class Result:
    """The first action that failed, as "puts", with its cause, and the cause if the object cannot be deleted."""

    action: str | None = None
    cause: Exception | None = None
    undeleted: Exception | None = None

    def setting(self, settings: Settings) -> str | None:
        """The setting to change. None: the store works, or does not respond, which passes."""
        return None if self.cause is None else store.setting_of(self.cause, settings)


def self_test(blobs: BlobStore, key: str) -> Result:
    """Put, get, head and delete one object."""
    return _tested(blobs, key, b"self-test")


def _deleted(blobs: BlobStore, key: str) -> Result:
    try:
        blobs.delete_many([key])
    except NotDeleted as kept:
        return Result(undeleted=kept.first)
    except Exception as cause:
        return Result(undeleted=cause)
    return Result()


def in_parts(blobs: BlobStore, key: str) -> Result:
    """The same with an object that S3 takes in two parts."""
    return _tested(blobs, key, secrets.token_bytes(1 << 20) * (store.PART_BYTES // (1 << 20)) + b"end")


def _tested(blobs: BlobStore, key: str, data: bytes) -> Result:
    action = "puts"
    try:
        sent = blobs.put_bytes(key, data)
        action = "gets"
        if hashlib.sha256(blobs.read(key)).hexdigest() != sent.sha256:
            raise BlobCorrupt(key)
        action = "heads"
        blobs.size(key)
    except Exception as cause:  # of any store's library
        return Result(action, cause)
    return _deleted(blobs, key)


def new_key() -> str:
    """A key that no other self-test uses."""
    return f"{SELF_TEST}/{secrets.token_hex(8)}"


class RepeatedSelfTest:
    """Repeats the self-test at most every BETWEEN_SECONDS. A store that does not respond delays no caller."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        run: Callable[[Callable[[], None]], None] = in_thread,
    ) -> None:
        # One key, so that a store that refuses to delete keeps one object.
        self._key = new_key()
        self._refreshed: Refreshed[str | None] = Refreshed(BETWEEN_SECONDS, clock, run)
        self._problem: str | None = None

    def problem(self, settings: Settings, blobs: BlobStore) -> str | None:
        """The request that the store refused in the last test, without its address; begins another test if that is old.

        An outage is no problem: it passes, and requests that need the store receive 503.
        """
        tested = self._refreshed.latest(lambda: self._refusal(settings, blobs))
        if tested.done() and tested.exception() is None:
            self._problem = tested.result()
        return self._problem

    def _refusal(self, settings: Settings, blobs: BlobStore) -> str | None:
        result = self_test(blobs, self._key)
        if (setting := result.setting(settings)) is None:
            return None
        log.warning("the blob store refuses the service (%s): %s", setting, result.cause)
        return f"The blob store refuses the service, which {result.action} an object: see {setting}."
