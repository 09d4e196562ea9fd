"""Leaving OpenAI: evals are exported with the official client and imported here, with our own server as the source."""

import errno
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from httpx2._models import Request, Response
from openai import AuthenticationError, BadRequestError, InternalServerError, OpenAI, RateLimitError
from regraft.eval_archive import UnsafeArchive, export, import_folder
from starlette.testclient import TestClient

from api.resources.eval_import import refuse_too_many
from core.errors import InvalidRequest
from core.storage.store import BlobInfo, FolderBlobs
from core.tenancy import tenants
from tests.evals.conftest import EXACT, JUDGED, House, completions, row
from tests.evals.test_runs import upload
from tests.present import untyped
from tests.watched_blobs import WatchedBlobs


def contents(folder: Path) -> dict[str, Any]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def source(client: OpenAI, new_eval: Callable[..., Any], house: House) -> House:
    """A server with two evals: runs with rows in the request and in a file, items of every status, and one queued."""
    made = new_eval(EXACT, JUDGED, metadata={"team": "maps"})
    house.model.fails.add("q1")
    client.evals.runs.create(made.id, name="inline", data_source=completions(3))
    file = upload(client, row(1), row(2, "no"))
    client.evals.runs.create(
        made.id, name="file", data_source=completions(0) | {"source": {"type": "file_id", "id": file}}
    )
    new_eval(name="empty")
    house.work()
    client.evals.runs.create(made.id, name="queued", data_source=completions(1))
    return house


def test_export_import_export_is_equal(source: House, second_house: House, tmp_path: Path) -> None:
    report = export(source.openai(), tmp_path / "first")
    imported = import_folder(second_house.openai(), tmp_path / "first")
    export(second_house.openai(), tmp_path / "second")

    assert (report.evals, report.runs, report.items, report.files) == (2, 2, 5, 1)
    assert len(report.left_out) == 1  # the queued run
    assert (imported.evals, imported.runs, imported.items) == (2, 2, 5)
    first, second = contents(tmp_path / "first"), contents(tmp_path / "second")
    assert first.keys() == second.keys()
    assert first == second


def test_old_runs_are_readable_and_new_ones_can_be_created(
    source: House, second_house: House, tmp_path: Path
) -> None:
    export(source.openai(), tmp_path)
    import_folder(second_house.openai(), tmp_path)
    client = second_house.openai()

    [made] = [made for made in client.evals.list() if made.name == "geography"]
    runs = client.evals.runs.list(made.id).data
    assert [run.name for run in runs] == ["inline", "file"]
    items = client.evals.runs.output_items.list(runs[0].id, eval_id=made.id).data
    assert [item.status for item in items] == ["pass", "error", "pass"]
    [_, second, _] = items
    same = client.evals.runs.output_items.retrieve(second.id, eval_id=made.id, run_id=runs[0].id)
    assert same.to_dict() == second.to_dict()
    new = client.evals.runs.create(made.id, data_source=completions(3))
    second_house.work()
    assert client.evals.runs.retrieve(new.id, eval_id=made.id).status == "completed"
    compared: Any = client.get(f"/regraft/evals/{made.id}/compare?runs={runs[0].id},{new.id}", cast_to=object)
    assert compared["rows"] == 3


def test_an_export_can_be_repeated(source: House, tmp_path: Path) -> None:
    export(source.openai(), tmp_path)
    before = contents(tmp_path)

    again = export(source.openai(), tmp_path)

    assert contents(tmp_path) == before
    assert again.items == 0  # nothing was read again


class Broken(httpx2.BaseTransport):
    """Passes requests on, except to one path, which it answers itself."""

    def __init__(self, inner: TestClient, path: str, answer: Response) -> None:
        self.inner, self.path, self.answer = inner, path, answer

    def handle_request(self, request: Request) -> Response:
        if request.url.path.endswith(self.path):
            return self.answer
        answer = self.inner.send(request)
        return httpx2.Response(answer.status_code, headers=answer.headers, content=answer.content)


def broken(source: House, path: str, answer: Response) -> OpenAI:
    """A client of the server, for which one path has another answer."""
    http = httpx2.Client(transport=Broken(source.client(source.key), path, answer))
    return source.openai().copy(http_client=http, default_headers={"Authorization": f"Bearer {source.key}"})


UNREADABLE = [
    httpx2.Response(500, json={"error": {"message": "it is broken", "code": "server_error"}}),
    httpx2.Response(404, json={"error": {"message": "it is gone", "code": "not_found"}}),
    httpx2.Response(200, json={"object": "list", "data": [None], "has_more": False}),
    httpx2.Response(200, text="{", headers={"Content-Type": "application/json"}),
    httpx2.Response(200, text="<html>"),
]


@pytest.mark.parametrize("answer", UNREADABLE, ids=["500", "404", "null item", "not JSON", "a page"])
def test_a_run_that_cannot_be_read_is_left_out_and_named(
    source: House, tmp_path: Path, answer: Response
) -> None:
    client = source.openai()
    [made] = [made for made in client.evals.list() if made.name == "geography"]
    first, second, _ = client.evals.runs.list(made.id).data
    lines: list[str] = []

    path = f"/{first.id}/output_items"
    report = export(broken(source, path, answer), tmp_path, report_line=lines.append)

    assert (report.evals, report.runs, report.items, report.failed) == (2, 1, 2, 1)
    [index] = json.loads((tmp_path / "unreadable.json").read_text())
    assert (index["eval"], index["name"]) == (made.id, first.id)
    assert f"Left out: {first.id}: {index['error']}" in lines
    order = tmp_path / "evals" / made.id / "runs" / "order.json"
    assert json.loads(order.read_text()) == [second.id]

    # The next export reads it.
    again = export(client, tmp_path)
    assert (again.failed, again.items) == (0, 3)
    assert json.loads(order.read_text()) == [first.id, second.id]
    assert not (tmp_path / "unreadable.json").exists()


def test_an_eval_that_cannot_be_read_is_left_out_and_the_others_are_written(
    source: House, tmp_path: Path
) -> None:
    made = [one.to_dict() for one in source.openai().evals.list()]
    nothing = httpx2.Response(200, json={"object": "list", "data": [None, *made], "has_more": False})

    report = export(broken(source, "/v1/evals", nothing), tmp_path)

    assert (report.evals, report.failed) == (2, 1)
    assert "an eval of the list: the server sent 'None' instead of an object" in report.left_out
    assert json.loads((tmp_path / "evals" / "order.json").read_text()) == [one["id"] for one in made]


@pytest.mark.parametrize("answer", UNREADABLE[3:], ids=["not JSON", "a page"])
def test_a_list_of_evals_that_cannot_be_read_is_named(
    source: House, tmp_path: Path, answer: Response
) -> None:
    report = export(broken(source, "/v1/evals", answer), tmp_path)

    assert (report.evals, report.failed) == (0, 1)
    assert report.left_out[0].startswith("the rest of the list of evals: ")


def test_an_eval_whose_runs_cannot_be_listed_does_not_stop_the_export(source: House, tmp_path: Path) -> None:
    [made] = [made for made in source.openai().evals.list() if made.name == "geography"]

    report = export(broken(source, f"/{made.id}/runs", UNREADABLE[0]), tmp_path)

    assert (report.evals, report.failed) == (2, 1)
    assert f"{made.id}: the list of its runs: " in report.left_out[0]


def test_an_export_whose_key_is_refused_ends(source: House, tmp_path: Path) -> None:
    """Otherwise each run would be named, and the reason lost among them."""
    [made] = [made for made in source.openai().evals.list() if made.name == "geography"]
    refused = httpx2.Response(401, json={"error": {"message": "no", "code": "invalid_api_key"}})

    with pytest.raises(AuthenticationError):
        export(broken(source, f"/{made.id}/runs", refused), tmp_path)


def test_ids_that_are_in_use_become_new_ones(source: House, tmp_path: Path) -> None:
    export(source.openai(), tmp_path)
    client = source.openai()
    import_folder(client, tmp_path)

    assert len({made.id for made in client.evals.list()}) == 4


def test_a_bad_import_creates_nothing(house: House) -> None:
    client = house.openai()
    file = client.files.create(file=("items.jsonl", b'{"no": "item"}\n'), purpose="evals").id
    made = {"data_source_config": {"type": "custom", "item_schema": {}}, "testing_criteria": [EXACT]}
    run = {"status": "completed", "data_source": {"type": "jsonl"}}

    for runs, words in (
        ([{"run": run, "items_file": file}], "line 1: is not an output item"),
        ([{"run": run, "items_file": "file-none"}], "file-none"),
        ([{"run": run | {"status": "queued"}, "items_file": file}], "only finished runs"),
    ):
        with pytest.raises(BadRequestError, match=words):
            client.post("/regraft/evals/import", body={"eval": made, "runs": runs}, cast_to=object)

    assert client.evals.list().data == []


def test_an_openai_eval_with_an_unknown_judge_is_imported_but_not_run(house: House) -> None:
    client = house.openai()
    made: dict[str, Any] = {
        "id": "eval_68" + "0" * 30,
        "name": "theirs",
        "created_at": 1700000000,
        "data_source_config": {"type": "custom", "schema": {"type": "object", "properties": {"item": {}}}},
        "testing_criteria": [JUDGED | {"model": "gpt-4o", "name": "polite-1234"}],
    }
    created: Any = client.post(
        "/regraft/evals/import", body={"eval": json.loads(json.dumps(made))}, cast_to=object
    )

    assert created["eval"]["id"] == made["id"]
    assert (
        client.evals.retrieve(made["id"]).data_source_config.schema_ == made["data_source_config"]["schema"]
    )
    with pytest.raises(BadRequestError, match="gpt-4o"):
        client.evals.runs.create(made["id"], data_source=completions(1))


def run_files(folder: Path) -> tuple[Path, Path]:
    """The run.json of each run that has rows in a file, and of each that has them in the request."""
    found = sorted(folder.glob("evals/*/runs/*/run.json"))
    by_kind = {json.loads(path.read_text())["data_source"]["source"]["type"]: path for path in found}
    return by_kind["file_id"], by_kind["file_content"]


def change_source(path: Path, **fields: Any) -> None:
    run = json.loads(path.read_text())
    run["data_source"]["source"].update(fields)
    path.write_text(json.dumps(run))


@pytest.mark.parametrize("name", ["files/../../secret.jsonl", "/etc/hostname", "files/rows.jsonl"])
def test_only_files_of_the_export_are_uploaded(
    source: House, second_house: House, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "export"
    export(source.openai(), folder)
    (tmp_path / "secret.jsonl").write_text("{}")
    change_source(run_files(folder)[0], id=name)

    report = import_folder(second_house.openai(), folder)

    assert report.evals == 1  # the other one
    assert [name in why for why in report.left_out] == [True]
    assert second_house.openai().files.list().data == []


def test_a_link_out_of_the_folder_is_not_followed(source: House, second_house: House, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    export(source.openai(), folder)
    outside = tmp_path / "outside.jsonl"
    outside.write_text("{}")
    items = run_files(folder)[1].with_name("items.jsonl")
    items.unlink()
    items.symlink_to(outside)

    report = import_folder(second_house.openai(), folder)

    assert "leads out of" in report.left_out[0]


@pytest.mark.parametrize("name", ["../evals", ".hidden", "", "a/b", 3])
def test_names_in_the_order_are_plain(tmp_path: Path, client: OpenAI, name: str | int) -> None:
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals" / "order.json").write_text(json.dumps([name]))

    with pytest.raises(UnsafeArchive):
        import_folder(client, tmp_path)


def test_rows_that_do_not_fit_a_request_are_uploaded_as_a_file(
    source: House, second_house: House, tmp_path: Path
) -> None:
    export(source.openai(), tmp_path)
    rows = [{"item": {"question": "q" * 1000, "answer": "a"}}] * 3000
    change_source(run_files(tmp_path)[1], content=rows)

    report = import_folder(second_house.openai(), tmp_path)

    assert (report.evals, report.left_out) == (2, [])
    client = second_house.openai()
    [made] = [made for made in client.evals.list() if made.name == "geography"]
    [inline] = [run for run in client.evals.runs.list(made.id) if run.name == "inline"]
    content = client.files.content(untyped(inline.data_source.source).id).text
    assert len(content.splitlines()) == 3000


def test_one_bad_eval_does_not_stop_the_others(source: House, second_house: House, tmp_path: Path) -> None:
    export(source.openai(), tmp_path)
    run_files(tmp_path)[0].with_name("items.jsonl").write_text('{"no": "item"}\n')

    report = import_folder(second_house.openai(), tmp_path)

    assert report.evals == 1
    assert "line 1" in report.left_out[0]
    assert [made.name for made in second_house.openai().evals.list()] == ["empty"]


@pytest.mark.parametrize("content", [b"", b"\n", None])
def test_a_run_without_items_is_imported_with_the_others(
    source: House, second_house: House, tmp_path: Path, content: bytes | None
) -> None:
    """Such as a run that failed before its first item. The server refuses to store an empty file."""
    export(source.openai(), tmp_path)
    items = run_files(tmp_path)[0].with_name("items.jsonl")
    items.unlink()
    if content is not None:
        items.write_bytes(content)

    report = import_folder(second_house.openai(), tmp_path)

    assert (report.evals, report.runs, report.items) == (2, 2, 3)
    name = f"the items of {items.parent.name}: it has no file items.jsonl"
    assert report.left_out == ([name] if content is None else [])
    client = second_house.openai()
    [made] = [made for made in client.evals.list() if made.name == "geography"]
    inline, file = client.evals.runs.list(made.id).data
    assert file.result_counts.total == 2  # as exported
    assert client.evals.runs.output_items.list(file.id, eval_id=made.id).data == []
    assert len(client.evals.runs.output_items.list(inline.id, eval_id=made.id).data) == 3


def test_a_run_whose_file_of_rows_is_empty_is_imported(
    source: House, second_house: House, tmp_path: Path
) -> None:
    export(source.openai(), tmp_path)
    [rows] = (tmp_path / "files").iterdir()
    rows.write_bytes(b"")

    report = import_folder(second_house.openai(), tmp_path)

    assert (report.evals, report.runs) == (2, 2)
    [why] = report.left_out
    assert "their file is empty" in why


@pytest.mark.parametrize(
    ("fields", "words"), [({"status": "queued"}, "only finished runs"), ({"metadata": 3}, "metadata")]
)
def test_a_run_that_is_refused_is_named(
    source: House, second_house: House, tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    export(source.openai(), tmp_path)
    path = run_files(tmp_path)[0]
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    [why] = import_folder(second_house.openai(), tmp_path).left_out

    assert f"{path.parent.name}: " in why
    assert words in why


def test_a_run_whose_items_are_refused_is_named(source: House, second_house: House, tmp_path: Path) -> None:
    export(source.openai(), tmp_path)
    items = run_files(tmp_path)[0].with_name("items.jsonl")
    items.write_text('{"no": "item"}\n')

    [why] = import_folder(second_house.openai(), tmp_path).left_out

    assert f"{items.parent.name}: " in why
    assert "line 1" in why


def test_a_run_that_is_not_json_is_named(source: House, second_house: House, tmp_path: Path) -> None:
    export(source.openai(), tmp_path)
    path = run_files(tmp_path)[0]
    path.write_text("{")

    [why] = import_folder(second_house.openai(), tmp_path).left_out

    assert f"{path.parent.name}: " in why


def test_imported_items_are_found_whatever_their_numbers_say(house: House) -> None:
    client = house.openai()
    run_id = "evalrun_" + "a" * 24
    lines = [
        {"id": f"outputitem_{'a' * 24}_{200 - number}", "status": "pass", "created_at": 1,
         "datasource_item": {"n": number}, "results": []}
        for number in range(200)
    ]  # fmt: skip
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("items.jsonl", content), purpose="evals").id
    run = {"id": run_id, "status": "completed", "data_source": {"type": "jsonl"}}
    made = {"data_source_config": {"type": "custom", "item_schema": {}}, "testing_criteria": [EXACT]}
    body = {"eval": made, "runs": [{"run": run, "items_file": file}]}
    created: Any = client.post("/regraft/evals/import", body=body, cast_to=object)

    for number in (0, 199):
        item = client.evals.runs.output_items.retrieve(
            untyped(lines[number]["id"]), eval_id=created["eval"]["id"], run_id=run_id
        )
        assert item.datasource_item == {"n": number}


MADE = {"data_source_config": {"type": "custom", "item_schema": {}}, "testing_criteria": [EXACT]}
RUN = {"status": "completed", "data_source": {"type": "jsonl"}}
ITEM = {"id": "outputitem_1", "status": "pass", "datasource_item": {}, "results": []}


def send(
    client: OpenAI,
    made: dict[str, Any] = MADE,
    runs: list[Any] | tuple[()] = (),
    lines: list[Any] | tuple[dict[str, Any]] = (ITEM,),
) -> Any:
    content = "\n".join(map(json.dumps, lines)).encode()
    sent = [
        {"run": run, "items_file": client.files.create(file=("items.jsonl", content), purpose="evals").id}
        for run in runs
    ]
    return client.post("/regraft/evals/import", body={"eval": made, "runs": sent}, cast_to=object)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"result_counts": {"total": "3"}}, "result_counts"),
        ({"result_counts": {"total": 1, "passed": 1, "failed": 0, "errored": 0, "more": "x"}}, "more"),
        ({"per_model_usage": [3]}, "per_model_usage"),
        ({"per_testing_criteria_results": {"a": 1}}, "per_testing_criteria_results"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": [1]}, "metadata"),
        ({"created_at": 2**60}, "created_at"),
        ({"created_at": -1}, "created_at"),
        ({"created_at": True}, "created_at"),
        ({"data_source": {"type": "jsonl", "source": 3}}, "source"),
        ({"data_source": {"type": "jsonl", "source": {"type": "file_content", "content": "x"}}}, "content"),
        ({"model": 3}, "model"),
        ({"error": "no"}, "error"),
    ],
)
def test_a_run_of_another_shape_is_refused_by_name(
    client: OpenAI, house: House, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequestError) as refused:
        send(client, runs=[RUN | fields])

    assert refused.value.param is not None
    assert refused.value.param.startswith("runs[0].run.")
    assert param in refused.value.param
    assert client.evals.list().data == []
    assert not list(house.blobs.list(f"projects/{house.project.id}/evals/"))


@pytest.mark.parametrize(
    "criterion",
    [
        {"type": "python"},
        {"name": "x"},
        3,
        {"type": "endpoint", "name": "x", "headers": [{}]},
        {"type": "multi", "name": "x", "graders": {"a": 3}},
    ],
)
def test_criteria_of_another_shape_are_refused_by_name(
    client: OpenAI, criterion: dict[str, Any] | int
) -> None:
    with pytest.raises(BadRequestError) as refused:
        send(client, MADE | {"testing_criteria": [criterion]})

    assert refused.value.param is not None
    assert "testing_criteria[0]" in refused.value.param


@pytest.mark.parametrize(
    "fields",
    [
        {"created_at": 2**60},
        {"created_at": "now"},
        {"datasource_item_id": 2**63},
        {"results": [3]},
        {"results": {}},
        {"results": [None]},
        {"results": [{}]},
        {"results": [{"name": None}]},
        {"datasource_item": None},
        {"datasource_item": []},
        {"sample": []},
        {"results": [{"name": 3}]},
        {"results": [{"name": "a", "score": "high"}]},
        {"results": [{"name": "a", "score": 10**350}]},
        {"results": [{"name": "a", "passed": 1}]},
        {"sample": "text"},
    ],
)
def test_an_item_of_another_shape_is_refused_by_its_line(
    client: OpenAI, house: House, fields: dict[str, Any]
) -> None:
    with pytest.raises(BadRequestError, match="line 2: is not an output item") as refused:
        send(client, runs=[RUN, RUN], lines=[ITEM, ITEM | {"id": "b"} | fields])

    assert refused.value.param == "runs[0].items_file"
    assert not list(house.blobs.list(f"projects/{house.project.id}/evals/"))


@pytest.mark.parametrize(
    "fields",
    [
        {"results": None, "sample": None},
        {"results": [{"name": "a"}, {"name": "a", "score": None, "passed": None, "more": [{}]}]},
        {"results": [{"name": "a\0", "score": 1e300}], "sample": {"input": {}, "output": None}},
        {"datasource_item": {"a": [None, "\0"]}, "status": "odd", "datasource_item_id": None},
    ],
)
@pytest.mark.both_databases
def test_an_odd_item_that_is_imported_is_listed_and_compared(
    client: OpenAI, fields: dict[str, Any], database_kind: str
) -> None:
    created = send(client, runs=[RUN], lines=[ITEM | fields, ITEM | {"id": "b"}])
    eval_id, [run] = created["eval"]["id"], created["runs"]

    [first, _] = client.get(f"/evals/{eval_id}/runs/{run}/output_items", cast_to=dict[str, Any])["data"]
    assert first["results"] == (fields.get("results") or [])
    assert first["sample"] == (fields.get("sample") or {})
    compared = client.get(f"/regraft/evals/{eval_id}/compare?runs={run},{run}", cast_to=dict[str, Any])
    assert compared["rows"] == 2


def test_an_import_has_no_id_twice(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="two runs have the same id"):
        send(client, runs=[RUN | {"id": "evalrun_12345678"}] * 2)
    with pytest.raises(BadRequestError, match="line 2: has the id of an earlier item"):
        send(client, runs=[RUN], lines=[ITEM, ITEM])


@pytest.mark.both_databases
def test_imports_at_the_same_time_get_different_ids(client: OpenAI, house: House, database_kind: str) -> None:
    made = MADE | {"id": "eval_12345678"}
    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(send, client, made, [RUN | {"id": "evalrun_12345678"}]) for _ in range(4)]
        created = [one.result() for one in sent]

    assert len({one["eval"]["id"] for one in created}) == 4
    for one in created:
        [run] = one["runs"]
        items = client.evals.runs.output_items.list(run, eval_id=one["eval"]["id"]).data
        assert [item.id for item in items] == ["outputitem_1"]


def test_evals_and_the_rows_and_items_of_runs_count_as_stored(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    def stored() -> int:
        with house.database.read() as session:
            return tenants.stored_bytes(session, house.project.id)

    made = new_eval()
    alone = stored()
    run = client.evals.runs.create(made.id, data_source=completions(2))
    queued = stored()
    house.work()

    assert 0 < alone < queued < stored()
    house.limit(storage_bytes=stored() + 10)
    with pytest.raises(RateLimitError, match="storage_bytes"):
        client.evals.runs.create(made.id, data_source=completions(2))
    client.evals.runs.delete(run.id, eval_id=made.id)
    assert stored() == alone
    client.evals.delete(made.id)
    assert stored() == 0


def test_items_of_an_import_are_not_written_beyond_the_quota(client: OpenAI, house: House) -> None:
    """Each page is checked before it is written, and none stays."""
    content = "\n".join(json.dumps(ITEM | {"id": f"item{line}"}) for line in range(1000)).encode()
    file = client.files.create(file=("items.jsonl", content), purpose="evals").id
    watching = WatchedBlobs(house.settings.data_dir / "blobs")
    house.app.state.service = replace(house.app.state.service, blobs=watching)
    sent = {"eval": MADE, "runs": [{"run": RUN, "items_file": file}]}

    house.limit(storage_bytes=len(content))
    with pytest.raises(RateLimitError, match="storage_bytes"):
        client.post("/regraft/evals/import", body=sent, cast_to=object)
    assert watching.begun == watching.opened == []

    house.limit(storage_bytes=len(content) + 5000)
    with pytest.raises(RateLimitError, match="storage_bytes"):
        client.post("/regraft/evals/import", body=sent, cast_to=object)
    assert 0 < sum(watching.written) <= 5000
    assert not list(house.blobs.list(f"projects/{house.project.id}/evals/"))
    assert client.evals.list().data == []


def test_the_items_of_a_file_are_stored_once(client: OpenAI) -> None:
    file = client.files.create(file=("items.jsonl", json.dumps(ITEM).encode()), purpose="evals").id
    sent = {"eval": MADE, "runs": [{"run": RUN, "items_file": file}] * 2}

    with pytest.raises(BadRequestError, match="two runs have the same items_file"):
        client.post("/regraft/evals/import", body=sent, cast_to=object)


def test_the_items_of_all_runs_together_are_bounded() -> None:
    refuse_too_many(["runs[0].items_file"] * 2 + ["runs[1].items_file"], 3)

    with pytest.raises(InvalidRequest, match="at most 2 items") as refused:
        refuse_too_many(["runs[0].items_file"] * 2 + ["runs[1].items_file"], 2)
    assert refused.value.param == "runs[1].items_file"


def test_a_failure_between_two_pages_leaves_none(client: OpenAI, house: House) -> None:
    """The second run has an item whose blob cannot be stored."""
    blobs = FullAfterOne(house.settings.data_dir / "blobs")
    house.app.state.service = replace(house.app.state.service, blobs=blobs)

    with pytest.raises(InternalServerError, match="storage"):
        send(client, runs=[RUN, RUN])

    assert not list(house.blobs.list(f"projects/{house.project.id}/evals/"))


class FullAfterOne(FolderBlobs):
    """A store with room for the page of one run of an eval."""

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> BlobInfo:
        if "/evals/" in key and any("/evals/" in stored for stored in self.list("projects/")):
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().put_bytes(key, data, if_absent=if_absent)


IDS = {"eval": "eval_" + "a" * 32, "run": "evalrun_" + "b" * 32}


@pytest.mark.both_databases
def test_ids_of_an_import_belong_to_its_project(client: OpenAI, house: House, database_kind: str) -> None:
    """Whether another project has an eval, a run or a job with the id makes no difference, and none can take it."""
    other = house.openai(house.other_key)

    for owner in (client, other):
        created = send(owner, MADE | {"id": IDS["eval"]}, [RUN | {"id": IDS["run"]}])

        assert (created["eval"]["id"], created["runs"]) == (IDS["eval"], [IDS["run"]])
        assert owner.evals.retrieve(IDS["eval"]).id == IDS["eval"]
        [run] = owner.evals.runs.list(IDS["eval"]).data
        assert (run.id, run.eval_id) == (IDS["run"], IDS["eval"])
        assert f"/evals/{IDS['eval']}/runs/{IDS['run']}/" in run.report_url
        [item] = owner.evals.runs.output_items.list(IDS["run"], eval_id=IDS["eval"]).data
        assert (item.run_id, item.eval_id) == (IDS["run"], IDS["eval"])
    again = send(client, MADE | {"id": IDS["eval"]}, [RUN | {"id": IDS["run"]}])
    assert again["eval"]["id"] != IDS["eval"]
    assert again["runs"] != [IDS["run"]]
    other.evals.runs.delete(IDS["run"], eval_id=IDS["eval"])
    other.evals.delete(IDS["eval"])
    assert client.evals.runs.retrieve(IDS["run"], eval_id=IDS["eval"]).status == "completed"


def test_new_runs_of_an_imported_eval_are_shown_under_its_id(client: OpenAI, house: House) -> None:
    send(client, MADE | {"id": IDS["eval"]}, [RUN | {"id": IDS["run"]}])

    run = client.evals.runs.create(IDS["eval"], data_source=completions(1))
    house.work()

    assert run.eval_id == IDS["eval"]
    runs = [one.id for one in client.evals.runs.list(IDS["eval"])]
    assert runs == [IDS["run"], run.id]
    assert [one.id for one in client.evals.runs.list(IDS["eval"], after=IDS["run"])] == [run.id]
    assert client.evals.runs.retrieve(run.id, eval_id=IDS["eval"]).status == "completed"
    audit: Any = client.get("/organization/audit_logs", cast_to=object)
    assert "@" not in json.dumps(audit)


SECRET = "not-for-readers"
ITEM_SCHEMA = {"properties": {"headers": {"type": "string"}}}  # no secret
LEAKS: list[dict[str, Any]] = [
    {"type": "endpoint", "url": "https://a.example", "headers": {"Authorization": SECRET}},
    {"type": "multi", "graders": {"a": {"type": "endpoint", "headers": {"x": SECRET}}}},
    {"type": "multi", "grader": {"type": "endpoint", "headers": {"x": SECRET}}},
    {"type": "endpoint", "Headers": {"x": SECRET}},
    {"type": "endpoint", "request": {"HEADERS": [{"name": "x", "value": SECRET}]}},
    {"type": "endpoint", "url": f"https://user:{SECRET}@a.example/path"},
    {"type": "endpoint", "targets": [{"href": f"wss://{SECRET}@a.example"}]},
    {"type": "unheard of", "part": {"headers": f"x: {SECRET}"}},
    {"type": "score_model", "api_key": SECRET},
    {"type": "score_model", "client": {"Authorization": SECRET, "password": SECRET}},
    {"type": "endpoint", "url": f"https://a.example/grade?v=1&api_key={SECRET}"},
    {"type": "endpoint", "url": f"https://a.example/grade?X-Amz-Signature={SECRET}#token={SECRET}"},
    {"type": "endpoint", "bearer_token": SECRET, "X-Hub-Signature": SECRET, "hfToken": SECRET},
    {"type": "endpoint", "extra_headers": {"x": SECRET}},
]


LEAKS += [
    {"type": "endpoint", name: SECRET} for name in ("auth_header", "bearer", "jwt", "github_pat", "x-jwt")
]
LEAKS += [
    {"type": "unheard of", "key": SECRET},
    {"type": "unheard of", "note": f"curl -H 'Authorization: Bearer {SECRET}' https://a.example"},
    {"type": "unheard of", "note": f"with sk-proj-{SECRET} only"},
    {"type": "unheard of", "notify": f"https://hooks.slack.com/services/T0/B0/{SECRET}"},
    {"type": "endpoint", "url": f"https://discord.com/api/webhooks/1/{SECRET}"},
    {"type": "score_model", "key": SECRET, "client": {"key": SECRET}},
    {"type": "score_model", "note": f"401 for Bearer {SECRET}"},
]
LEAKS += [
    {"type": "unheard of", name: SECRET}
    for name in ("auth", "openai_key", "pwd", "pass", "basicAuth", "API key")
]
LEAKS += [
    {"type": "unheard of", "auth": ["u", SECRET]},
    {
        "type": "unheard of",
        "token": {"value": SECRET},
        "openai_key": [{"text": SECRET}],
        "api_keys": [SECRET],
    },
    {"type": "unheard of", "env_vars": [{"name": "OPENAI_API_KEY", "value": SECRET}]},
    {"type": "unheard of", "env": [{"key": "Authorization", "Value": {"text": SECRET}}]},
    {"type": "unheard of", "note": f"run --api-key {SECRET} or --api-key '{SECRET}'"},
    {"type": "unheard of", "command": "npx", "args": ["-y", "server", "--api-key", SECRET]},
    {"type": "unheard of", "note": f"with github_pat_11{SECRET}"},
    {"type": "unheard of", "note": f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.{SECRET}"},
    {
        "type": "unheard of",
        "note": f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
    },
    {"type": "unheard of", "note": f"private_key: -----BEGIN PRIVATE KEY-----\\n{SECRET}"},
]
CONFIGS = {
    "schema": {"type": "custom", "schema": {"properties": {"item": {}}}},
    "item_schema": {"type": "custom", "item_schema": {"type": "object"}},
    "empty schemas": {"type": "custom", "schema": None, "item_schema": None},
    "none": {"type": "logs"},
}
METADATA = {"api_key": SECRET, "token": SECRET, "key": SECRET, "hook": f"https://a.example?token={SECRET}"}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_secrets_in_the_metadata_of_an_import_are_masked_and_the_rest_is_kept(
    client: OpenAI, config: dict[str, Any]
) -> None:
    metadata = METADATA | {"team": "maps"}
    made = MADE | {"data_source_config": config, "metadata": metadata}

    created = send(client, made, [RUN | {"metadata": metadata}])

    eval_id, [run_id] = created["eval"]["id"], created["runs"]
    shown: list[Any] = [
        client.get(path, cast_to=object) for path in (f"/evals/{eval_id}", f"/evals/{eval_id}/runs/{run_id}")
    ]
    assert SECRET not in json.dumps([created, *shown])
    assert [one["metadata"]["team"] for one in shown] == ["maps", "maps"]


def test_an_imported_eval_with_the_schema_of_its_items_shows_it_and_checks_new_runs_by_it(
    client: OpenAI,
) -> None:
    """As it is: its keys are the names of fields, also where they look like those of secrets."""
    text = {"type": "string", "default": f"sk-proj-{SECRET}"}
    items = {"type": "object", "properties": {"a": text, "api_key": text}, "required": ["a"]}
    made = MADE | {"data_source_config": {"type": "custom", "item_schema": items}}

    created = send(client, made)["eval"]

    schema = created["data_source_config"]["schema"]
    assert schema == {"type": "object", "properties": {"item": items}}
    with pytest.raises(BadRequestError, match="'a' is a required property"):
        client.evals.runs.create(created["id"], data_source=completions(1))


def test_the_metadata_of_an_eval_of_this_service_is_shown_as_it_was_sent(
    client: OpenAI, new_eval: Callable[..., Any]
) -> None:
    assert new_eval(metadata={"token": "cl100k"}).metadata == {"token": "cl100k"}


@pytest.mark.parametrize("leak", LEAKS, ids=range(len(LEAKS)))
def test_secrets_of_an_imported_eval_are_masked_wherever_they_stand(
    client: OpenAI, leak: dict[str, Any]
) -> None:
    schema = {"properties": {"item": ITEM_SCHEMA}}
    config = {"type": "custom", "schema": schema, "more": leak}
    said = f"401 for Bearer {SECRET}"
    run = RUN | {
        "name": said,
        "model": f"https://me:{SECRET}@a.example/v1",
        "data_source": {"type": "jsonl", "source": leak | {"type": "file_id"}, "more": leak},
        "error": {"code": "a", "message": "b", "more": leak},
    }
    criteria = [
        leak | {"name": "a"},
        {
            "type": "multi",
            "name": "b",
            "graders": {"key": leak, "own": {"type": "multi", "graders": {"a": leak}}},
        },
        {"type": "unheard of", "name": "c", "graders": {"a": leak}},
    ]
    made = {"name": said, "data_source_config": config, "testing_criteria": criteria}
    sample = {"errors": [said], "request": leak, "error": leak}
    result = {"name": "a", "message": said, "key": SECRET, "details": leak, "sample": sample}

    created = send(client, made, [run], [ITEM | {"results": [leak | result], "sample": sample}])

    eval_id, [run_id] = created["eval"]["id"], created["runs"]
    of_run = f"/evals/{eval_id}/runs/{run_id}"
    paths = [f"/evals/{eval_id}", "/evals", f"/evals/{eval_id}/runs", of_run, f"{of_run}/output_items"]
    paths += ["/organization/audit_logs"]
    shown = [created, *(client.get(path, cast_to=object) for path in paths)]
    assert SECRET not in json.dumps(shown)
    assert leak["type"] in json.dumps(shown)
    assert created["eval"]["data_source_config"]["schema"] == {"properties": {"item": ITEM_SCHEMA}}


def test_what_models_said_and_what_graders_run_is_shown_as_it_was_imported(client: OpenAI) -> None:
    """A new eval made of an exported one grades as that did, and no answer is changed."""
    said = [{"role": "assistant", "content": "password: correct-horse"}]
    code = "def grade(sample, item):\n    return float(sample['output_text'] == 'token: unexpected')\n"
    python = {"type": "python", "name": "code", "source": code}
    exact = EXACT | {"reference": "password: correct-horse"}
    multi = {
        "type": "multi",
        "name": "both",
        "graders": {"a": python, "b": exact},
        "calculate_output": "a + b",
    }
    judged = JUDGED | {"input": said}
    sample = {"input": said, "output": said, "error": None}
    results = [
        {"name": "exact", "score": 1.0, "passed": True, "output": said[0]["content"], "sample": sample}
    ]
    made = MADE | {"testing_criteria": [python, multi, judged]}

    created = send(client, made, [RUN], [ITEM | {"results": results, "sample": sample}])

    eval_id, [run_id] = created["eval"]["id"], created["runs"]
    [item] = client.evals.runs.output_items.list(run_id, eval_id=eval_id).data
    assert created["eval"]["testing_criteria"] == [python, multi, judged]
    assert [result.to_dict() for result in item.results] == results
    assert item.sample.to_dict() == sample


def test_a_masked_criterion_is_run_with_what_was_imported(client: OpenAI, house: House) -> None:
    """The mask is of what is shown, and of nothing that is stored."""
    exact = EXACT | {"name": "for Bearer q123456", "reference": "Bearer q123456"}
    created = send(client, MADE | {"testing_criteria": [exact]})["eval"]

    run = client.evals.runs.create(
        created["id"],
        data_source={
            "type": "jsonl",
            "source": {
                "type": "file_content",
                "content": [{"item": {}, "sample": {"output_text": "Bearer q123456"}}],
            },
        },
    )
    house.work()

    assert created["testing_criteria"][0]["name"] == "for Bearer ***"
    assert client.evals.runs.retrieve(run.id, eval_id=created["id"]).result_counts.passed == 1


@pytest.mark.parametrize(
    "message",
    [
        f"Incorrect API key provided: sk-proj-{SECRET}.",
        f"401 of https://a.example/v1?token={SECRET} and https://me:{SECRET}@a.example",
        f'the request had {{"Authorization": "Bearer {SECRET}"}}',
        f"curl -H 'X-Api-Key: {SECRET}'",
        f"password={SECRET}",
    ],
)
def test_secrets_in_the_errors_of_an_import_are_masked(client: OpenAI, message: str) -> None:
    error = {"code": "server_error", "message": message}
    item = ITEM | {"sample": {"error": error}, "results": [{"name": "a", "error": message}]}

    created = send(client, MADE, [RUN | {"status": "failed", "error": error}], [item])

    eval_id, [run_id] = created["eval"]["id"], created["runs"]
    path = f"/evals/{eval_id}/runs/{run_id}"
    shown = [client.get(at, cast_to=object) for at in (path, f"{path}/output_items")]
    assert SECRET not in json.dumps(shown)
    assert json.dumps(shown).count("***") >= 3, "of the run, of the sample and of the result"
