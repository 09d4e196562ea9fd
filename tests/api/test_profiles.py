"""Profiles of files over the API; tests/core/test_profiles.py has the numbers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from core.registry import BaseModelEntry, Registry
from tests.api.conftest import GRADER, House
from tests.tiny import TEMPLATE, tiny_tokenizer


def jsonl(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def prompt(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def profiled(api: TestClient, file_id: str, **body: Any) -> dict[str, Any]:
    answer = api.post(f"/v1/regraft/files/{file_id}/profile", json=body)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


@pytest.fixture
def tiny(house: House, tmp_path: Path) -> House:
    """A service whose model is on its machine."""
    folder = tmp_path / "model"
    tiny_tokenizer().save_pretrained(folder)
    registry = Registry(models={"tiny": BaseModelEntry(path=folder, context=32, chat_template=TEMPLATE)})
    house.app.state.service = replace(house.app.state.service, registries=registry)
    return house


def test_a_file_is_profiled_without_a_model_and_a_grader(api: TestClient, upload: Callable[..., str]) -> None:
    file_id = upload(jsonl(prompt("a", answer="1"), prompt("a", answer="1"), prompt("b")))

    made = profiled(api, file_id)

    assert (made["object"], made["file_id"], made["method"]) == (
        "regraft.file_profile",
        file_id,
        "reinforcement",
    )
    assert (made["rows"], made["duplicates"]["identical"]) == (3, 1)
    assert [field["name"] for field in made["fields"]] == ["messages", "answer"]
    assert (made["tokens"], made["tokens_reason"]) == (None, "no model is given")
    assert (made["grader"], made["overlap"]) == (None, None)


def test_rows_that_the_grader_cannot_grade_are_listed(api: TestClient, upload: Callable[..., str]) -> None:
    file_id = upload(jsonl(prompt("a", answer="1"), prompt("b")))

    grader = profiled(api, file_id, grader=GRADER)["grader"]

    assert grader == {
        "paths": [{"path": "item.answer", "missing": {"rows": 1, "lines": [2]}}],
        "not_listed": False,
        "no_grader": None,
        "no_word": {"rows": 0, "lines": []},
        "doubts": [],
    }


def test_rows_whose_answers_all_score_alike_are_listed_as_a_job_would_warn_of_them(
    api: TestClient, upload: Callable[..., str]
) -> None:
    file_id = upload(jsonl(*(prompt(text, answer=text) for text in ("", "blue", "light blue", "red"))))
    rouge = GRADER | {"type": "text_similarity", "evaluation_metric": "rouge_2"}
    rouge.pop("operation")

    grader = profiled(api, file_id, grader=rouge)["grader"]

    assert grader["no_word"] == {"rows": 1, "lines": [1]}
    [doubt] = grader["doubts"]
    assert doubt["message"].endswith("has 1 of the 2 words that rouge_2 compares: all answers score 0")
    assert doubt["found"] == {"rows": 2, "lines": [2, 4]}


def test_a_select_grader_tells_which_rows_choose_none(api: TestClient, upload: Callable[..., str]) -> None:
    file_id = upload(jsonl(prompt("a", kind="say", answer="1"), prompt("b", kind="other"), prompt("c")))
    select = {"type": "select", "name": "by kind", "key": "{{item.kind}}", "graders": {"say": GRADER}}

    grader = profiled(api, file_id, grader=select)["grader"]

    assert grader["no_grader"] == {"rows": 1, "lines": [2]}
    assert {read["path"]: read["missing"]["lines"] for read in grader["paths"]} == {
        "item.kind": [3],
        "item.answer": [],
    }


def test_a_python_grader_may_read_fields_that_are_not_listed(
    api: TestClient, upload: Callable[..., str]
) -> None:
    source = "def grade(sample, item):\n    return 1.0\n"

    grader = profiled(api, upload(), grader={"type": "python", "name": "p", "source": source})["grader"]

    assert (grader["paths"], grader["not_listed"]) == ([], True)


def test_the_overlap_with_a_validation_file_is_counted(api: TestClient, upload: Callable[..., str]) -> None:
    file_id = upload(jsonl(prompt("a"), prompt("b")))
    validation = upload(jsonl(prompt("b"), prompt("c")), name="valid.jsonl")

    overlap = profiled(api, file_id, validation_file=validation)["overlap"]

    assert overlap == {"file": validation, "rows": 2, "shared": 1, "lines": [[1, 2]]}


@pytest.mark.slow
def test_rows_that_leave_no_room_for_an_answer_are_listed(tiny: House, upload: Callable[..., str]) -> None:
    file_id = upload(jsonl(prompt("cat"), prompt("cat " * 20)))

    tokens = profiled(tiny.client(tiny.key), file_id, model="tiny", max_completion_tokens=12)["tokens"]

    assert (tokens["min"], tokens["max"], tokens["room"]) == (3, 22, 20)
    assert tokens["too_long"] == {"rows": 1, "lines": [2]}


def test_the_rows_of_another_method_are_detected(api: TestClient, upload: Callable[..., str]) -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}

    made = profiled(api, upload(jsonl(row)))
    forced = profiled(api, upload(jsonl(row)), method="reinforcement")

    assert (made["method"], made["rows"], made["invalid"]) == ("supervised", 1, 0)
    assert (forced["rows"], forced["invalid"]) == (0, 1)
    assert "last message must be from the user" in forced["problems"][0]["message"]


def test_a_model_whose_files_are_elsewhere_has_no_tokens(api: TestClient, upload: Callable[..., str]) -> None:
    made = profiled(api, upload(jsonl(prompt("a"))), model="tiny")

    assert made["tokens"] is None
    assert "not on this machine" in made["tokens_reason"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "unknown"}, "model"),
        ({"validation_file": "file-none"}, "validation_file"),
        ({"grader": {"type": "none"}}, "grader.type"),
        ({"method": "distillation"}, "method"),
    ],
)
def test_an_invalid_request_is_refused_by_the_name_of_its_field(
    api: TestClient, upload: Callable[..., str], body: dict[str, Any], param: str
) -> None:
    answer = api.post(f"/v1/regraft/files/{upload()}/profile", json=body)

    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_a_lost_content_is_reported_as_by_a_download(
    house: House, api: TestClient, upload: Callable[..., str]
) -> None:
    file_id, _ = upload(jsonl(prompt("a"))), upload(jsonl(prompt("b")), name="other.jsonl")
    house.blobs.delete(f"projects/{house.project.id}/files/{file_id}")

    answer = api.post(f"/v1/regraft/files/{file_id}/profile", json={})

    assert answer.status_code == 410
