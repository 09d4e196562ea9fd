"""A POST under one `Idempotency-Key` is executed once; a repetition returns the first response.

The key is taken in the transaction of the creation, before its other writes. A concurrent request with the same key
therefore waits for that commit and returns its response, or does the work itself if the first one failed.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from core.database.engine import earliest_now
from core.database.tables import IdempotentRequest
from core.errors import InvalidRequest

RETENTION_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Keyed:
    """A request with a key. Two requests are the same if their fingerprints match."""

    project_id: str
    key: str
    fingerprint: str


@dataclass(frozen=True)
class StoredResponse:
    status_code: int
    body: dict[str, Any]


def fingerprint(method: str, path: str, sent: Any) -> str:
    """SHA-256 of the request. `sent` is JSON; spaces and the order of keys do not matter."""
    canonical = json.dumps([method, path, sent], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def take(session: Session, request: Keyed) -> StoredResponse | None:
    """Take the key in this transaction, or return the stored response if it was used.

    Raises:
        InvalidRequest: the key was used for another request.
    """
    place = IdempotentRequest(
        project_id=request.project_id,
        key=request.key,
        fingerprint=request.fingerprint,
        status_code=0,  # `keep` fills in both; the row is invisible before the commit
        answer={},
    )
    try:
        with session.begin_nested():
            session.add(place)
    except IntegrityError:
        earlier = session.get_one(IdempotentRequest, (request.project_id, request.key))
    else:
        return None
    return _response(earlier, request)


def find(session: Session, request: Keyed) -> StoredResponse | None:
    """Return the stored response of an earlier request with the key, or None.

    Raises:
        InvalidRequest: the key was used for another request.
    """
    earlier = session.get(IdempotentRequest, (request.project_id, request.key))
    return None if earlier is None else _response(earlier, request)


def answer_of(session: Session, project_id: str, key: str) -> dict[str, Any] | None:
    """The first answer under the key, whose request may be another; None: the key is unused."""
    earlier = session.get(IdempotentRequest, (project_id, key))
    return None if earlier is None else earlier.answer


def reused(key: str) -> InvalidRequest:
    """The error for another request under a used key."""
    return InvalidRequest(
        f"The Idempotency-Key '{key}' was used for another request; use a new key for a new request.",
        code="idempotency_key_reused",
    )


def _response(earlier: IdempotentRequest, request: Keyed) -> StoredResponse:
    if earlier.fingerprint != request.fingerprint:
        raise reused(request.key)
    return StoredResponse(earlier.status_code, earlier.answer)


def keep(session: Session, request: Keyed, answer: StoredResponse) -> None:
    """Store the response for repetitions. Call it in the transaction that took the key."""
    place = session.get_one(IdempotentRequest, (request.project_id, request.key))
    place.status_code, place.answer = answer.status_code, answer.body


def forget(session: Session) -> None:
    """Delete expired responses; their keys may be reused."""
    before = earliest_now(session) - RETENTION_SECONDS
    session.execute(delete(IdempotentRequest).where(IdempotentRequest.created_at < before))
