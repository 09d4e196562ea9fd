"""A POST that creates is done once under one `Idempotency-Key`; asked again, it gets the first answer.

The key is taken in the transaction that creates, before anything else in it. So whoever comes second with the same
key waits for the first one's commit and then finds its answer, or, if that failed, does the work itself.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from core.errors import InvalidRequest
from core.models import IdempotentRequest, now

KEPT_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Keyed:
    """A request under a key. Two are the same if their fingerprints are; see `fingerprint`."""

    project_id: str
    key: str
    fingerprint: str


@dataclass(frozen=True)
class Answer:
    status_code: int
    body: dict[str, Any]


def fingerprint(method: str, path: str, sent: Any) -> str:
    """SHA-256 of what was asked. `sent` is JSON; neither spaces nor the order of keys in it count."""
    canonical = json.dumps([method, path, sent], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def take(session: Session, request: Keyed) -> Answer | None:
    """Make the key this transaction's; or, if it was used, say what was answered then.

    Raises:
        InvalidRequest: the key was used for another request.
    """
    place = IdempotentRequest(
        project_id=request.project_id,
        key=request.key,
        fingerprint=request.fingerprint,
        status_code=0,  # `keep` fills in both; nobody sees the row before the commit
        answer={},
    )
    try:
        with session.begin_nested():
            session.add(place)
    except IntegrityError:
        earlier = session.get_one(IdempotentRequest, (request.project_id, request.key))
    else:
        return None
    if earlier.fingerprint != request.fingerprint:
        raise InvalidRequest(
            f"The Idempotency-Key '{request.key}' was used for another request; use a new key for a new request.",
            code="idempotency_key_reused",
        )
    return Answer(earlier.status_code, earlier.answer)


def keep(session: Session, request: Keyed, answer: Answer) -> None:
    """What everybody who comes with this key again is told. Call it in the transaction that took the key."""
    place = session.get_one(IdempotentRequest, (request.project_id, request.key))
    place.status_code, place.answer = answer.status_code, answer.body


def forget(session: Session) -> None:
    """Remove the answers that were kept long enough; their keys may be used anew."""
    session.execute(delete(IdempotentRequest).where(IdempotentRequest.created_at < now() - KEPT_SECONDS))
