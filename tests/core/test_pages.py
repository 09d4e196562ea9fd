import re
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from sqlalchemy.sql.selectable import Select

from core.database.engine import Database, Work
from core.database.pages import Page, fitting, newest_first, oldest_first
from core.database.tables import File, Project, TunedModel
from core.errors import InvalidRequest
from core.jobs import lifecycle
from core.storage import files
from tests import factories

pytestmark = pytest.mark.both_databases


def add_files(session: Session, project: Project, *ids: str) -> None:
    for id in ids:
        factories.file(session, project, id=id)


def files_of(project: Project) -> Select[File]:
    return select(File).where(File.project_id == project.id)


def ids(page: Page[File]) -> list[Any]:
    return [file.id for file in page.items]


@pytest.mark.parametrize(
    ("sizes", "number"), [([], 0), ([4, 6], 2), ([4, 7], 1), ([11, 1], 1), ([0, 10, 0, 1, 0], 3)]
)
def test_a_page_ends_before_the_item_that_exceeds_its_bytes(sizes: list[int], number: int) -> None:
    assert fitting(iter(sizes), 10) == number


def test_the_newest_rows_come_first(session: Session, project: Project) -> None:
    add_files(session, project, "a", "b", "c")

    page = newest_first(session, files_of(project), File, limit=2)

    assert (ids(page), page.has_more) == (["c", "b"], True)


def test_the_next_page_begins_behind_the_last_row_of_this_one(session: Session, project: Project) -> None:
    add_files(session, project, "a", "b", "c", "d")

    page = newest_first(session, files_of(project), File, after="c", limit=2)

    assert (ids(page), page.has_more) == (["b", "a"], False)


def test_behind_the_last_row_is_an_empty_page(session: Session, project: Project) -> None:
    add_files(session, project, "a")

    page = newest_first(session, files_of(project), File, after="a", limit=2)

    assert (ids(page), page.has_more) == ([], False)


def test_the_same_list_can_be_read_from_its_oldest_end(session: Session, project: Project) -> None:
    add_files(session, project, "a", "b", "c", "d")

    page = oldest_first(session, files_of(project), File, after="a", limit=2)

    assert (ids(page), page.has_more) == (["b", "c"], True)


def test_rows_inserted_while_somebody_reads_move_no_other_row_to_another_page(
    session: Session, project: Project
) -> None:
    add_files(session, project, "a", "b", "c", "d")
    first = newest_first(session, files_of(project), File, limit=2)
    add_files(session, project, "e", "f", "g")

    second = newest_first(session, files_of(project), File, after=first.items[-1].id, limit=2)

    assert ids(first) + ids(second) == ["d", "c", "b", "a"]


@pytest.mark.parametrize("read", [newest_first, oldest_first])
def test_an_unknown_id_is_the_callers_mistake(
    session: Session, project: Project, read: Callable[..., Page[Any]]
) -> None:
    with pytest.raises(InvalidRequest, match="nothing") as refused:
        read(session, files_of(project), File, after="nothing", limit=2)

    assert refused.value.param == "after"


def test_an_id_that_the_filters_leave_out_is_as_unknown_as_any(session: Session, project: Project) -> None:
    add_files(session, factories.project(session), "theirs")

    with pytest.raises(InvalidRequest):
        newest_first(session, files_of(project), File, after="theirs", limit=2)


def test_a_table_may_call_its_id_by_another_name(session: Session, project: Project) -> None:
    for name in ("ft:one", "ft:two"):
        model = {"job_id": "ftjob-1", "checkpoint_id": "ftckpt_1", "base_model": "tiny"}
        session.add(TunedModel(name=name, project_id=project.id, **model))
        session.flush()

    models = newest_first(
        session, select(TunedModel), TunedModel, after="ft:two", limit=2, id_column=TunedModel.name
    )

    assert [model.name for model in models.items] == ["ft:one"]


def test_a_page_deep_in_the_list_is_found_through_an_index(database: Database) -> None:
    """Neither reading the table from its start nor sorting it: the cost does not grow with the position."""
    with database.write() as session:
        # On PostgreSQL any index will do for a few rows: here the one without the project reads 300 rows in vain.
        add_files(session, factories.project(session), *(f"other-{n}" for n in range(300)))
        project = factories.project(session)
        add_files(session, project, "a", "b", "c")
    with database.write() as session:
        session.execute(text("analyze"))

    plan = explain(
        database, lambda session: newest_first(session, files_of(project), File, after="b", limit=1)
    )

    assert not re.search(r"SCAN|TEMP B-TREE|Seq Scan|Sort", plan), plan
    assert re.search(r"project_id=\? AND seq<\?|Index Cond: .*project_id.* AND .*seq < ", plan), plan


def explain(database: Database, read: Callable[..., Page[File]]) -> str:
    """How the database executes what `read` asks it."""
    asked = []
    event.listen(
        database.engine,
        "before_cursor_execute",
        lambda c, cursor, sql, values, *_: asked.append((sql, values)),
    )
    with database.read() as session:
        read(session)
    statements = [(sql, values) for sql, values in asked if sql.startswith("SELECT")]
    lines = []
    with database.engine.connect() as connection:
        sqlite = connection.dialect.name == "sqlite"
        if not sqlite:  # it prefers scans and sorts for a table of three rows
            for way in ("seqscan", "bitmapscan", "sort"):
                connection.exec_driver_sql(f"set enable_{way} = off")
        for sql, values in statements:
            rows = connection.exec_driver_sql(f"EXPLAIN {'QUERY PLAN ' if sqlite else ''}{sql}", values)
            lines += [str(row[-1]) for row in rows]
        connection.invalidate()  # with the settings made above
    return "\n".join(lines)


# On PostgreSQL a sequence counts at the insert and a row appears at the commit: 8 may be there before 7.


def test_a_list_read_newest_first_shows_what_was_there_once_however_others_commit(
    postgres_database: Database,
) -> None:
    """A row that appears late may be missed, as one that is added after the reading began; nothing else changes."""
    database = postgres_database
    with database.write() as session:
        project = factories.project(session)
        add_files(session, project, "a", "b", "c")
    with database.write() as late:
        factories.file(late, project, id="late")
        with database.write() as session:
            add_files(session, project, "d")
        first = read_page(database, project, newest_first, after=None)
    rest = read_page(database, project, newest_first, after=first[-1])

    assert first + rest == ["d", "c", "b", "a"]
    assert read_page(database, project, newest_first, after=None, limit=9) == ["d", "late", "c", "b", "a"]


def test_without_a_lock_a_row_can_appear_behind_a_reader(postgres_database: Database) -> None:
    """Why `keep_order` is there: whoever reads on from the newest row that it knows never sees the late one."""
    database = postgres_database
    with database.write() as session:
        project = factories.project(session)
    with database.write() as late:
        factories.file(late, project, id="late")
        with database.write() as session:
            add_files(session, project, "d")
        seen = read_page(database, project, oldest_first, after=None)

    assert seen == ["d"]
    assert read_page(database, project, oldest_first, after="d") == []


def test_files_and_jobs_of_a_project_appear_in_the_order_of_their_numbers(
    postgres_database: Database,
) -> None:
    """The second of two that are added at once waits for the commit of the first; another project does not."""
    database = postgres_database
    with database.write() as session:
        project, other = factories.project(session), factories.project(session)
        train = factories.file(session, project)
        theirs = factories.file(session, other)

    for hold in (add_file, add_job):
        for add in (add_file, add_job):
            with database.write() as first:
                hold(first, project, train)
                without_waiting(database, add, other, theirs)
                with pytest.raises(OperationalError, match="lock timeout"):
                    without_waiting(database, add, project, train)


def without_waiting(database: Database, add: Callable[..., Any], project: Project, train: File) -> None:
    with database.write() as session:
        session.execute(text("set local lock_timeout = '50ms'"))
        add(session, project, train)


def add_file(session: Session, project: Project, train: File) -> None:
    columns = {"filename": "x", "purpose": "fine-tune", "bytes": 1, "sha256": "", "blob_key": "x"}
    files.add(Work(session), File(project_id=project.id, **columns))


def add_job(session: Session, project: Project, train: Any) -> None:
    asked: dict[str, Any] = {
        "validation_file": None,
        "suffix": None,
        "seed": 1,
        "metadata": None,
        "body": {},
    }
    lifecycle.create(
        Work(session), project=project, model="tiny", training_file=train, gpu_class="cpu", **asked
    )


def read_page(
    database: Database, project: Project, read: Callable[..., Page[Any]], *, after: str | None, limit: int = 2
) -> list[Any]:
    with database.read() as session:
        return ids(read(session, files_of(project), File, after=after, limit=limit))
