import openai
import pytest
from sqlalchemy import update
from starlette.testclient import TestClient

from core.models import File, now

ROW = b'{"messages": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}\n'


def post(api: TestClient, content: bytes = ROW, name: str = "train.jsonl", **fields: str):
    return api.post("/v1/files", data={"purpose": "fine-tune"} | fields, files={"file": (name, content)})


def stored(house) -> list[str]:
    return list(house.blobs.list(""))


def test_an_uploaded_file_is_processed_at_once(api):
    answer = post(api)

    file = answer.json()
    assert answer.status_code == 200
    assert file == {
        "id": file["id"],
        "object": "file",
        "bytes": len(ROW),
        "created_at": pytest.approx(now(), abs=5),
        "expires_at": None,
        "filename": "train.jsonl",
        "purpose": "fine-tune",
        "status": "processed",
        "status_details": None,
    }
    assert file["id"].startswith("file-")


def test_its_content_comes_back_byte_for_byte(api):
    content = bytes(range(256)) * 1000 + b"\r\n--not-the-boundary\r\n" + ROW
    file_id = post(api, content).json()["id"]

    answer = api.get(f"/v1/files/{file_id}/content")

    assert answer.content == content
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-length"] == str(len(content))


def test_results_come_back_as_csv(api, house):
    file_id = post(api).json()["id"]
    with house.database.write() as session:
        session.execute(update(File).values(purpose="fine-tune-results"))

    assert api.get(f"/v1/files/{file_id}/content").headers["content-type"].startswith("text/csv")


def test_fields_may_come_after_the_file(api):
    body = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}\n\r\n'
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--b--\r\n'
    )

    answer = api.post("/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=b"})

    assert answer.json()["bytes"] == len(b"{}\n")


@pytest.mark.parametrize("path", ["../../etc/train.jsonl", r"C:\data\train.jsonl"])
def test_of_a_path_only_the_file_name_is_kept(api, path):
    assert post(api, name=path).json()["filename"] == "train.jsonl"


def test_a_name_in_any_script_survives(api):
    file_id = post(api, name="données 数据.jsonl").json()["id"]

    assert api.get(f"/v1/files/{file_id}").json()["filename"] == "données 数据.jsonl"
    assert "%E6%95%B0" in api.get(f"/v1/files/{file_id}/content").headers["content-disposition"]


def test_a_file_larger_than_allowed_leaves_nothing_behind(api, house):
    answer = post(api, b"x" * ((1 << 20) + 1))

    assert answer.status_code == 413
    assert answer.json()["error"]["param"] == "file"
    assert stored(house) == []
    assert api.get("/v1/files").json()["data"] == []


def test_a_file_exactly_as_large_as_allowed_is_fine(api):
    assert post(api, b"x" * (1 << 20)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"purpose": "nonsense"}, "purpose", "invalid_value"),
        ({"expires_after[anchor]": "created_at"}, "expires_after.seconds", "missing_required_parameter"),
        ({"expires_after[anchor]": "now"}, "expires_after.anchor", "invalid_value"),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"},
            "expires_after.seconds",
            "integer_below_min_value",
        ),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "soon"},
            "expires_after.seconds",
            "invalid_type",
        ),
        ({"colour": "red"}, "colour", "unknown_parameter"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_and_leaves_nothing_behind(api, house, fields, param, code):
    answer = post(api, **fields)

    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert stored(house) == []


@pytest.mark.parametrize("purpose", ["assistants", "batch", "evals", "user_data", "vision"])
def test_files_of_openais_other_purposes_are_kept_for_their_owner(api, upload, purpose):
    upload()
    made = post(api, b"anything", purpose=purpose).json()

    assert made["purpose"] == purpose
    listed = api.get("/v1/files", params={"purpose": purpose}).json()["data"]
    assert [file["id"] for file in listed] == [made["id"]]
    assert api.get(f"/v1/files/{made['id']}/content").content == b"anything"
    assert api.delete(f"/v1/files/{made['id']}").json()["deleted"] is True


def test_another_purpose_is_told_which_there_are(api):
    message = post(api, purpose="fine-tune-results").json()["error"]["message"]

    assert message == (
        "Invalid value: 'fine-tune-results'. Supported values are: "
        "'assistants', 'batch', 'evals', 'fine-tune', 'user_data' or 'vision'."
    )


def test_an_empty_file_is_refused(api, house):
    answer = post(api, b"")

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")
    assert stored(house) == []


def test_a_form_without_a_file_is_refused(api):
    answer = api.post("/v1/files", data={"purpose": "fine-tune"}, files={"other": b"x"})

    assert answer.status_code == 400


HALF = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nhalf a fi'


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=b", b""),
        ("multipart/form-data; boundary=b", b"not a form"),
        ("multipart/form-data; boundary=b", HALF),
        ("multipart/form-data; boundary=b", b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--\r\n"),
        ("multipart/form-data; boundary=" + "b" * 500, b"--b"),
    ],
)  # fmt: skip
def test_what_is_no_form_or_only_half_of_one_is_refused(api, house, content_type, body):
    answer = api.post("/v1/files", content=body, headers={"content-type": content_type})

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert stored(house) == []


def test_a_file_expires_when_asked_to(api, house):
    file = post(api, **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}).json()
    assert file["expires_at"] == file["created_at"] + 3600
    assert api.get(f"/v1/files/{file['id']}").status_code == 200

    with house.database.write() as session:
        session.execute(update(File).values(expires_at=now() - 1))

    assert api.get(f"/v1/files/{file['id']}").status_code == 404


def test_a_deleted_file_is_gone_for_its_owner(api):
    file_id = post(api).json()["id"]

    assert api.delete(f"/v1/files/{file_id}").json() == {"id": file_id, "object": "file", "deleted": True}
    for url in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
        assert api.get(url).status_code == 404
    assert api.delete(f"/v1/files/{file_id}").status_code == 404
    assert api.get("/v1/files").json()["data"] == []


def test_an_unknown_file_has_openais_error(api):
    answer = api.get("/v1/files/file-abc123")

    assert answer.json()["error"] == {
        "message": "No such File object: file-abc123",
        "type": "invalid_request_error",
        "param": "id",
        "code": None,
    }


def test_files_are_listed_newest_first_page_by_page(api):
    ids = [post(api, name=f"{number}.jsonl").json()["id"] for number in range(5)]

    first = api.get("/v1/files", params={"limit": 2}).json()
    second = api.get("/v1/files", params={"limit": 2, "after": first["last_id"]}).json()
    last = api.get("/v1/files", params={"limit": 2, "after": second["last_id"]}).json()

    seen = [file["id"] for page in (first, second, last) for file in page["data"]]
    assert seen == ids[::-1]
    assert [page["has_more"] for page in (first, second, last)] == [True, True, False]
    assert (first["first_id"], first["last_id"]) == (ids[4], ids[3])


def test_files_can_be_listed_oldest_first(api):
    ids = [post(api).json()["id"] for _ in range(3)]

    listed = api.get("/v1/files", params={"order": "asc", "after": ids[0]}).json()

    assert [file["id"] for file in listed["data"]] == ids[1:]


def test_files_can_be_listed_by_purpose(api, upload):
    upload()

    assert api.get("/v1/files", params={"purpose": "fine-tune-results"}).json()["data"] == []
    assert len(api.get("/v1/files", params={"purpose": "fine-tune"}).json()["data"]) == 1


def test_a_page_has_no_more_than_a_thousand_files_and_openais_client_reads_on(house, api, monkeypatch):
    monkeypatch.setattr("api.files.MOST_FILES_A_PAGE", 2)
    ids = [post(api).json()["id"] for _ in range(5)]

    page = api.get("/v1/files", params={"limit": 10000}).json()
    http = house.client()
    client = openai.OpenAI(api_key=house.key, base_url="http://testserver/v1", http_client=http)

    assert (len(page["data"]), page["has_more"]) == (2, True)
    assert [file.id for file in client.files.list(limit=10000)] == ids[::-1]
    http.close()


@pytest.mark.parametrize(
    ("limit", "code"), [("0", "integer_below_min_value"), ("10001", "integer_above_max_value")]
)
def test_a_limit_out_of_range_is_refused(api, limit, code):
    error = api.get("/v1/files", params={"limit": limit}).json()["error"]

    assert (error["param"], error["code"]) == ("limit", code)


def test_an_empty_list_has_no_ends(api):
    assert api.get("/v1/files").json() == {
        "object": "list",
        "data": [],
        "has_more": False,
        "first_id": None,
        "last_id": None,
    }
