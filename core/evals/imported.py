"""Ids that imported evals and runs keep from their own service.

Such an id belongs to the project that imported it: each project may import the same one, and none can find out whether
another has it. The row's id, which is unique in the database, ends in a part of the project's id; the API shows it
without that.
"""

import re

_MARK = "@"  # in no id of this or of another service that an import keeps
_TAG_LENGTH = 12  # of the 28 random characters of a project's id
# With the tag at most 64 characters, the length of the columns.
_KEPT = {kind: re.compile(rf"{kind}_[\w-]{{8,40}}", re.ASCII) for kind in ("eval", "evalrun")}


def row_id_of(kind: str, sent: str, project_id: str) -> str | None:
    """The id of the row that keeps the id `sent` of this kind (eval, evalrun); None: it is not well-formed."""
    return f"{sent}{_MARK}{project_id[-_TAG_LENGTH:]}" if _KEPT[kind].fullmatch(sent) else None


def public_id(row_id: str) -> str:
    """The id of a row as the API shows it."""
    return row_id.partition(_MARK)[0]


def row_ids_of(public: str, project_id: str) -> tuple[str, str]:
    """The ids that the row of the project with this public id may have."""
    return public, f"{public}{_MARK}{project_id[-_TAG_LENGTH:]}"
