"""Named graders of a project, their versions, and references to them (docs/howto/stored-graders.md).

A version is a specification under the SHA-256 of its canonical JSON, so equal content has one version.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Select, delete, func, select
from sqlalchemy.orm import Session

from core.database import pages
from core.database.engine import Work
from core.database.pages import Page
from core.database.tables import GoldenCase, GraderVersion, StoredGrader, now
from core.errors import GraderNotFound, InvalidRequest

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
# A version, or its first characters.
VERSION = r"^[0-9a-f]{8,64}$"
MAX_STORED = 1_000  # in a project
MAX_VERSIONS = 1_000  # of a grader
MAX_SPEC_BYTES = 512 << 10


def version_of(spec: Mapping[str, Any]) -> str:
    """The version of a specification as `graders.spec.dump` returns it."""
    return hashlib.sha256(_canonical(spec)).hexdigest()


def behavior_of(spec: Mapping[str, Any]) -> str:
    """The SHA-256 of a specification without the names of its graders, which have no influence on scores.

    The parser generates another name for an unnamed grader in each request.
    """
    return version_of(_nameless(spec))


def _nameless(spec: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in spec.items() if key != "name"}
    if isinstance(inner := spec.get("graders"), Mapping):
        rest["graders"] = {key: _nameless(part) for key, part in inner.items()}
    return rest


def _canonical(spec: Mapping[str, Any]) -> bytes:
    return json.dumps(spec, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def with_names(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The specification with a name for each grader that has none: the parser would generate a different one each time.

    Args:
        raw: The specification as it was sent.
        name: The name of the grader itself. Graders inside of it are named after their keys.
    """
    named = dict(raw)
    if named.get("name") is None:
        named["name"] = name
    if isinstance(inner := named.get("graders"), Mapping):
        named["graders"] = {
            key: with_names(sub, str(key) or name) if isinstance(sub, Mapping) else sub
            for key, sub in inner.items()
        }
    return named


def get(session: Session, project_id: str, name: str) -> StoredGrader:
    """Return the grader of this name, or raise GraderNotFound."""
    mine = StoredGrader.project_id == project_id, StoredGrader.name == name
    found = session.scalar(select(StoredGrader).where(*mine))
    if found is None:
        raise GraderNotFound(name)
    return found


def page(session: Session, project_id: str, *, after: str | None, limit: int) -> Page[StoredGrader]:
    """Newest first."""
    mine = select(StoredGrader).where(StoredGrader.project_id == project_id)
    return pages.newest_first(session, mine, StoredGrader, after=after, limit=limit, owner=project_id)


def version(session: Session, grader: StoredGrader, wanted: str | None = None) -> GraderVersion:
    """The version with this hash or this beginning of one; None: the current version.

    Raises:
        GraderNotFound: there is none.
        InvalidRequest: several begin like this.
    """
    hashed = grader.version if wanted is None else wanted
    if not re.fullmatch(VERSION, hashed):
        raise GraderNotFound(grader.name, hashed)
    # Two of them show that it is ambiguous.
    found = session.scalars(_versions(grader).where(GraderVersion.version.startswith(hashed)).limit(2)).all()
    if not found:
        raise GraderNotFound(grader.name, hashed)
    if len(found) > 1:
        raise InvalidRequest(
            f"Several versions of the grader '{grader.name}' begin with {hashed}: send more characters.",
            param="version",
        )
    return found[0]


def versions(session: Session, grader: StoredGrader, *, after: str | None, limit: int) -> Page[GraderVersion]:
    """List the versions by the time when their content was first saved, newest first."""
    return pages.newest_first(
        session,
        _versions(grader),
        GraderVersion,
        after=after,
        limit=limit,
        id_column=GraderVersion.version,
    )


def current(session: Session, graders: Sequence[StoredGrader]) -> dict[str, GraderVersion]:
    """The current version of each grader, by the id of the grader; one query for all of them."""
    ids = [grader.id for grader in graders]
    rows = session.scalars(
        select(GraderVersion)
        .join(StoredGrader, StoredGrader.id == GraderVersion.grader_id)
        .where(StoredGrader.id.in_(ids), StoredGrader.version == GraderVersion.version)
    )
    return {row.grader_id: row for row in rows}


def counts(
    session: Session, graders: Sequence[StoredGrader], table: type[GraderVersion | GoldenCase]
) -> dict[str, int]:
    """The number of versions or cases of each grader, by the id of the grader."""
    ids = [grader.id for grader in graders]
    rows = session.execute(
        select(table.grader_id, func.count()).where(table.grader_id.in_(ids)).group_by(table.grader_id)
    )
    return {row[0]: row[1] for row in rows}


def save(work: Work, project_id: str, name: str, spec: dict[str, Any], note: str) -> StoredGrader:
    """Make this content the current version of the grader with this name, which is created if there is none.

    The note of a version that exists is kept.

    Raises:
        InvalidRequest: the specification is too large, or there are too many graders or versions of this one.
    """
    session, content = work.session, _canonical(spec)
    if len(content) > MAX_SPEC_BYTES:
        raise InvalidRequest(
            f"The specification has {len(content):,} bytes of JSON, at most {MAX_SPEC_BYTES:,} are supported.",
            param="grader",
        )
    pages.keep_order(session, project_id)  # two requests of the same content save it once
    hashed = version_of(spec)
    grader = session.scalar(
        select(StoredGrader).where(StoredGrader.project_id == project_id, StoredGrader.name == name)
    )
    if grader is None:
        _refuse_full(session, project_id)
        grader = StoredGrader(project_id=project_id, name=name, version=hashed)
        session.add(grader)
        session.flush()
    elif grader.version == hashed:
        return grader
    if session.scalar(_versions(grader).where(GraderVersion.version == hashed)) is None:
        stored = counts(session, [grader], GraderVersion).get(grader.id, 0)
        if stored >= MAX_VERSIONS:
            raise InvalidRequest(
                f"The grader '{name}' has {stored:,} versions, the most that are supported: delete some of them.",
                param="name",
            )
        session.add(
            GraderVersion(grader_id=grader.id, version=hashed, spec=spec, note=note, bytes=len(content))
        )
    grader.version, grader.updated_at = hashed, now()
    session.flush()
    work.record("grader.saved", grader.id, {"name": name, "version": hashed})
    return grader


def _refuse_full(session: Session, project_id: str) -> None:
    mine = select(func.count()).select_from(StoredGrader).where(StoredGrader.project_id == project_id)
    stored = session.scalars(mine).one()
    if stored >= MAX_STORED:
        raise InvalidRequest(
            f"The project has {stored:,} stored graders, the most that are supported: delete some of them.",
            param="name",
        )


def remove(work: Work, grader: StoredGrader) -> None:
    """Delete a grader with its versions and cases. Jobs, evals and pipelines have copies of the versions they use."""
    for table in (GraderVersion, GoldenCase):
        work.session.execute(delete(table).where(table.grader_id == grader.id))
    pages.delete_row(work.session, grader, owner=grader.project_id)
    work.record("grader.deleted", grader.id, {"name": grader.name})


def remove_version(work: Work, grader: StoredGrader, row: GraderVersion) -> None:
    """Raises InvalidRequest: it is the current version."""
    if row.version == grader.version:
        raise InvalidRequest(
            f"This is the current version of the grader '{grader.name}': save another one first, or delete the grader.",
            param="version",
        )
    work.session.delete(row)
    work.record("grader.version_deleted", grader.id, {"name": grader.name, "version": row.version})


def _versions(grader: StoredGrader) -> Select[GraderVersion]:
    return select(GraderVersion).where(GraderVersion.grader_id == grader.id)
