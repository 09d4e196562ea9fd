from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from core.database.audit import OPERATOR
from core.database.engine import Work
from core.database.tables import ApiKey, AuditEntry, Project, now
from core.errors import InsufficientPermissions, InvalidApiKey, InvalidRequest, KeyNotFound
from core.tenancy import keys
from core.tenancy.keys import Scope
from tests import factories


def make(work: Work, project: Project, **fields: Any) -> keys.NewKey:
    return keys.create_key(work, project, "ci", **fields)


def actions(session: Session) -> list[Any]:
    return list(session.scalars(select(AuditEntry.action).order_by(AuditEntry.seq)))


@pytest.mark.both_databases
def test_a_key_opens_its_project_and_says_what_it_was_made_for(work: Work, project: Project) -> None:
    made = make(work, project, scope="read", owner="ana@example.org", expires_at=now() + 60)

    key, opened = keys.authenticate(work.session, made.token)

    assert (opened.id, key.id) == (project.id, made.key.id)
    assert (key.scope, key.owner, key.name) == ("read", "ana@example.org", "ci")


@pytest.mark.both_databases
def test_nothing_stored_contains_the_key(work: Work, project: Project) -> None:
    made = make(work, project)

    stored = [str(getattr(made.key, column.name)) for column in ApiKey.__table__.columns]
    logged = work.session.scalars(select(AuditEntry)).one()

    assert not any(made.token in value for value in [*stored, str(logged.data), logged.target])


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"revoked_at": 1}, "invalid_api_key", "was revoked"),
        ({"expires_at": 1}, "expired_api_key", "has expired"),
    ],
)
def test_a_dead_key_is_refused_and_says_why_without_showing_itself(
    work: Work, project: Project, fields: dict[str, int], code: str, words: str
) -> None:
    made = make(work, project)
    for name, value in fields.items():
        setattr(made.key, name, value)
    work.session.flush()

    with pytest.raises(InvalidApiKey, match=words) as refused:
        keys.authenticate(work.session, made.token)

    assert refused.value.code == code
    assert made.token not in refused.value.message


def test_the_keys_of_an_archived_project_are_refused(work: Work, project: Project) -> None:
    made = make(work, project)
    project.archived_at = now()
    work.session.flush()

    with pytest.raises(InvalidApiKey, match="is archived"):
        keys.authenticate(work.session, made.token)


def test_a_rotated_key_dies_at_once_and_its_successor_may_do_the_same(work: Work, project: Project) -> None:
    old = make(work, project, scope="write", owner="ana")

    new = keys.rotate(work, old.key)

    assert (new.key.scope, new.key.owner, new.key.name) == ("write", "ana", "ci")
    assert keys.authenticate(work.session, new.token)[1].id == project.id
    with pytest.raises(InvalidApiKey, match="was revoked"):
        keys.authenticate(work.session, old.token)


@pytest.mark.both_databases
def test_a_rotated_key_may_live_on_for_some_hours_but_never_longer_than_it_would_have(
    work: Work, project: Project
) -> None:
    endless, ending = make(work, project), make(work, project, expires_at=now() + 600)

    keys.rotate(work, endless.key, grace_hours=2)
    keys.rotate(work, ending.key, grace_hours=2)

    assert endless.key.expires_at == pytest.approx(now() + 7200, abs=5)
    assert ending.key.expires_at == pytest.approx(now() + 600, abs=5)
    assert keys.authenticate(work.session, endless.token)


def test_the_successor_of_a_key_for_a_time_gets_as_long_again(work: Work, project: Project) -> None:
    old = make(work, project, expires_at=now() + 1000)
    old.key.created_at -= 500

    new = keys.rotate(work, old.key)

    assert new.key.expires_at == pytest.approx(now() + 1500, abs=5)


def test_a_dead_key_cannot_be_rotated_back_to_life(work: Work, project: Project) -> None:
    made = make(work, project)
    keys.revoke(work, made.key)

    with pytest.raises(InvalidRequest, match="is revoked"):
        keys.rotate(work, made.key)


def test_a_second_revocation_changes_nothing(work: Work, project: Project) -> None:
    made = make(work, project)
    keys.revoke(work, made.key)
    made.key.revoked_at = 123

    keys.revoke(work, made.key)

    assert made.key.revoked_at == 123
    assert actions(work.session) == ["api_key.created", "api_key.revoked"]


@pytest.mark.parametrize("scope", keys.SCOPES)
@pytest.mark.parametrize("needed", keys.SCOPES)
def test_each_scope_reaches_as_far_as_those_before_it(
    work: Work, project: Project, scope: str, needed: Scope
) -> None:
    key = make(work, project, scope=scope).key

    if keys.SCOPES.index(scope) >= keys.SCOPES.index(needed):
        keys.require(key, needed)
    else:
        with pytest.raises(InsufficientPermissions, match=f"scope '{needed}'"):
            keys.require(key, needed)


@pytest.mark.both_databases
def test_a_key_is_found_in_its_project_only(work: Work, project: Project) -> None:
    key, other = make(work, project).key, factories.project(work.session)

    assert keys.get(work.session, key.id, project.id) is key
    with pytest.raises(KeyNotFound):
        keys.get(work.session, key.id, other.id)


@pytest.mark.both_databases
def test_the_last_use_is_noted_once_a_minute(work: Work, project: Project) -> None:
    key = make(work, project).key

    noted = []
    for last in (None, now() - 30, now() - 61):
        key.last_used_at = last
        work.session.flush()
        news = keys.use_is_news(key)
        keys.note_use(work.session, key.id)
        work.session.refresh(key)
        noted.append((news, key.last_used_at != last))

    assert noted == [(True, True), (False, False), (True, True)]


@pytest.mark.both_databases
def test_the_first_key_of_a_service_is_the_operators_doing(session: Session) -> None:
    keys.bootstrap(session)

    entry = session.scalars(select(AuditEntry)).one()
    assert (entry.action, entry.actor) == ("api_key.created", OPERATOR.id)
    assert entry.project_id is not None
