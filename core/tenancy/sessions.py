"""Sessions of the console in a browser. Each has the rights of an API key, and ends with it.

A session's token has 256 random bits and is in an HttpOnly cookie; only its SHA-256 is stored. A login token is given
to a person once, in an address, and exchanged for a session.
"""

import hashlib
import secrets

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from core.database.engine import Work, earliest_now
from core.database.tables import ApiKey, ConsoleSession, Project, now
from core.errors import InvalidApiKey
from core.tenancy import keys

SESSION_SECONDS = 12 * 3600
LOGIN_SECONDS = 15 * 60
MAX_SESSIONS = 20  # of a key; a new one ends the oldest beyond these
ENDED = "The session has ended. Log in again."


def begin(work: Work, key: ApiKey) -> tuple[ConsoleSession, str]:
    """Create a session of a key, and return it with its token, which is not stored.

    The oldest sessions of the key beyond MAX_SESSIONS end.
    """
    mine = ConsoleSession.key_id == key.id, ConsoleSession.kind == "session"
    newest = ConsoleSession.created_at.desc(), ConsoleSession.created_ns.desc()
    ids = select(ConsoleSession.id).where(*mine).order_by(*newest)
    beyond = work.session.scalars(ids.offset(MAX_SESSIONS - 1)).all()
    work.session.execute(delete(ConsoleSession).where(ConsoleSession.id.in_(beyond)))
    made = _new(work.session, key, "session", SESSION_SECONDS)
    work.record("session.created", made[0].id, {"key": key.id})
    return made


def invite(session: Session, key: ApiKey) -> str:
    """Create a login token of a key, for `exchange`."""
    return _new(session, key, "login", LOGIN_SECONDS)[1]


def key_of_login(session: Session, token: str, *, use_up: bool) -> tuple[ApiKey, Project]:
    """Return the key of a login token and its project. With `use_up`, the token works only this once.

    Raises:
        InvalidApiKey: the token does not exist, has expired, or was used.
    """
    row = _found(session, token, "login", lock=use_up)
    if row is None:
        raise InvalidApiKey("This login address was used already or has expired. Log in with an API key.")
    if use_up:
        session.delete(row)
    return keys.usable(session, ApiKey.id == row.key_id, "of this login address")


def authenticate(session: Session, token: str) -> tuple[ApiKey, Project]:
    """Return the key and the project of a session.

    Raises:
        InvalidApiKey: the session has ended, or its key is no longer usable.
    """
    row = _found(session, token, "session")
    if row is None:
        raise InvalidApiKey(ENDED)
    return keys.usable(session, ApiKey.id == row.key_id, "of this session")


def end(work: Work, token: str) -> None:
    """End a session. Idempotent."""
    row = _found(work.session, token, "session")
    if row is not None:
        work.session.delete(row)
        work.record("session.ended", row.id, {"key": row.key_id})


def _new(session: Session, key: ApiKey, kind: str, seconds: int) -> tuple[ConsoleSession, str]:
    session.execute(delete(ConsoleSession).where(ConsoleSession.expires_at <= earliest_now(session)))
    token = secrets.token_urlsafe(32)
    expires_at = now() + seconds if key.expires_at is None else min(now() + seconds, key.expires_at)
    row = ConsoleSession(kind=kind, sha256=_sha256(token), key_id=key.id, expires_at=expires_at)
    session.add(row)
    session.flush()
    return row, token


def _found(session: Session, token: str, kind: str, *, lock: bool = False) -> ConsoleSession | None:
    row = select(ConsoleSession).where(
        ConsoleSession.sha256 == _sha256(token),
        ConsoleSession.kind == kind,
        ConsoleSession.expires_at > now(),
    )
    return session.scalar(row.with_for_update() if lock else row)


def _sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
