"""What one request, or one user, must not be able to do to everybody else.

`contained` holds what is claimed of each: the server answers meanwhile, lives, works and gives its memory back.
"""

import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.database.tables import File
from tests.attacks.conftest import GRADER, STORAGE_BYTES, Attacked
from tests.present import untyped

MATH = {"type": "math", "name": "m", "input": "{{sample.output_text}}", "reference": "{{item.answer}}"}
RUN = "/fine_tuning/alpha/graders/run"


def python(source: str) -> dict[str, str]:
    return {"type": "python", "name": "p", "source": source}


def job(**reinforcement: Any) -> dict[str, Any]:
    """Its files do not exist: what is wrong with the method is found first."""
    return {
        "model": "tiny",
        "training_file": "file-train",
        "validation_file": "file-valid",
        "method": {"type": "reinforcement", "reinforcement": {"grader": GRADER} | reinforcement},
    }


def response_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE_SCHEMAS = {
    "minItems 1e9": {"type": "array", "items": {"type": "object"}, "minItems": 1_000_000_000},
    "minItems 1e8": {"type": "array", "items": {"type": "object"}, "minItems": 100_000_000},
    "maxLength 1e9": {"type": "string", "minLength": 999_999_999, "maxLength": 1_000_000_000},
    "pattern": {"type": "string", "pattern": "^(a{1000}){1000}{1000}$"},
    "minItems in minItems": {
        "type": "array",
        "minItems": 30_000,
        "items": {"type": "array", "minItems": 30_000, "items": {"type": "string", "minLength": 30_000}},
    },
    "depth": nested(300),
}


@pytest.mark.parametrize(
    "route", ["/fine_tuning/jobs", "/regraft/estimate", "/regraft/previews", "/chat/completions"]
)
def test_a_schema_that_asks_for_gigabytes_is_refused(contained: Attacked, route: str) -> None:
    for name, schema in HOSTILE_SCHEMAS.items():
        form = response_format(untyped(schema))
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "response_format": form}
        body = chat if route == "/chat/completions" else job(response_format=form)
        with contained.client() as client:
            answer = client.post(route, json=body)

        assert answer.status_code == 400, name
        if name.startswith("minItems"):
            assert "minItems" in answer.json()["error"]["message"]


def test_a_source_of_nested_finally_blocks_is_answered_at_once(contained: Attacked) -> None:
    """CPython compiles a finally block once for each way out of its try: 19 in one another are 3 ** 19 copies."""
    lines = ["def grade(sample, item):"]
    for depth in range(19):
        pad = " " * (depth + 1)
        lines += [
            f"{pad}try:",
            *(f"{pad} if item.get({way}): return {way}" for way in range(3)),
            f"{pad}finally:",
        ]
    lines.append(" " * 21 + "return 1")

    with contained.client(contained.read_key) as client:
        answer = client.post("/fine_tuning/alpha/graders/validate", json={"grader": python("\n".join(lines))})

    assert answer.status_code < 500


def test_a_hundred_thousand_labels_are_refused(contained: Attacked) -> None:
    labels = [f"{number}" for number in range(100_000)]
    message = {"role": "user", "content": "{{sample.output_text}}"}
    label_model = {
        "type": "label_model", "name": "l", "model": "broken", "input": [message], "labels": labels,
        "passing_labels": labels,
    }  # fmt: skip
    grader = {"type": "multi", "name": "m", "graders": {"l": label_model}, "calculate_output": "l"}
    with contained.client(contained.read_key) as client:
        answer = client.post("/fine_tuning/alpha/graders/validate", json={"grader": grader})

    assert answer.status_code == 400, answer.text


MISTAKES = {
    "unknown event types": (
        "/webhook_endpoints",
        {"name": "w", "url": "https://example.com/", "event_types": ["z"] * 400_000},
    ),
    "messages of empty parts": (
        "/chat/completions",
        {"model": "tiny", "messages": [{"role": "user", "content": [{}] * 256}] * 1_800},
    ),
    "inputs of empty parts": (
        "/responses",
        {"model": "tiny", "input": [{"role": "user", "content": [{}] * 256}] * 1_800},
    ),
    "includes": ("/responses", {"model": "tiny", "input": "hi", "include": ["z"] * 400_000}),
    "unknown keys": ("/fine_tuning/jobs", job() | {f"{number:x}": 1 for number in range(180_000)}),
    "numbers in metadata": (
        "/chat/completions",
        {"model": "tiny", "messages": [], "metadata": {f"{number:x}": 1 for number in range(180_000)}},
    ),
    "unknown keys of a grader": (
        "/fine_tuning/alpha/graders/validate",
        {"grader": GRADER | {f"{number:x}": 1 for number in range(180_000)}},
    ),
    "references": (
        "/fine_tuning/alpha/graders/validate",
        {"grader": GRADER | {"input": "{{item}}" * 240_000}},
    ),
}


@pytest.mark.parametrize("mistakes", MISTAKES)
def test_a_body_full_of_mistakes_is_refused_for_the_first(contained: Attacked, mistakes: str) -> None:
    """A complaint of pydantic is a kilobyte, so that 2 MB of mistakes took gigabytes, and ended the process."""
    route, body = MISTAKES[mistakes]
    content = json.dumps(body, separators=(",", ":"))
    assert len(content) <= 2 << 20
    before = contained.process.cpu_times()
    with contained.client() as client:
        answer = client.post(route, content=content, headers={"Content-Type": "application/json"})

    after = contained.process.cpu_times()
    assert answer.status_code == 400
    assert after.user + after.system - before.user - before.system < 1.5


def test_a_reference_of_a_million_marks_is_checked_at_once(contained: Attacked) -> None:
    """CPython orders combining marks by insertion, and holds the lock of the interpreter for half an hour."""
    grader = {
        "type": "text_similarity",
        "name": "marks",
        "input": "{{sample.output_text}}",
        "reference": "a" + "\u0301\u0316" * 500_000,
        "evaluation_metric": "rouge_1",
        "tokenizer": "unicode",
    }
    content = json.dumps({"grader": grader}, ensure_ascii=False).encode()
    with contained.client(contained.read_key) as client:
        answer = client.post(
            "/fine_tuning/alpha/graders/validate",
            content=content,
            headers={"Content-Type": "application/json"},
        )

    assert answer.status_code == 200


def test_templates_of_many_graders_are_given_back(contained: Attacked) -> None:
    with contained.client(contained.read_key) as client:
        for number in range(60):
            text = f"{{{{item.a{number}}}}}" * 900 + "x" * 1_900_000
            answer = client.post(
                "/fine_tuning/alpha/graders/validate", json={"grader": GRADER | {"input": text}}
            )
            assert answer.status_code == 200


ANSWERS = {
    "root": r"\boxed{\sqrt[10^{-9}]{7}}",
    "small root": r"\boxed{\sqrt[\frac{1}{9999999}]{9}}",
    "exponent": "10E99999999",
    "matrix": r"\boxed{\begin{pmatrix}a&b&c\\d&e&f\\g&h&i\end{pmatrix}^{12}}",
    "product": r"\boxed{" + "(a+b+c+d)" * 13 + "}",
}


def test_no_answer_in_mathematics_stops_the_server(contained: Attacked) -> None:
    """Policies that explore write such answers by themselves."""
    with ThreadPoolExecutor(len(ANSWERS)) as threads:
        runs = {
            name: threads.submit(contained.run, MATH, answer, item={"answer": "1"})
            for name, answer in ANSWERS.items()
        }
        honest = contained.run(MATH, r"\boxed{\frac{1}{2}}", item={"answer": "0.5"})
        reports = {name: run.result() for name, run in runs.items()}

    assert (honest[0], honest[1]["reward"]) == (200, 1.0)
    for name, (status, report) in reports.items():
        assert (status, report["reward"]) == (200, 0.0), name
    assert any(reports["root"][1]["metadata"]["errors"].values()), "an answer out of time is no wrong answer"


@contextmanager
def abandoned(attacked: Attacked, requests: int, head: str, body: bytes) -> Iterator[None]:
    """Connections with a request on each, whose answers nobody reads; closed at the end."""
    with ExitStack() as stack:
        for _ in range(requests):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", attacked.server.port)))
            text = f"{head} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {attacked.key}\r\n"
            connection.sendall(text.encode() + body)
        yield


def test_sleeping_graders_keep_nobody_else_waiting(contained: Attacked) -> None:
    source = "import time\ndef grade(sample, item):\n    time.sleep(100)\n    return 1"
    content = json.dumps({"grader": python(source), "model_sample": "x"}).encode()
    request = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
    with abandoned(contained, 45, f"POST /v1{RUN}", request), contained.client(timeout=20) as client:
        assert client.get("/files").status_code == 200
        assert client.get("/models").status_code == 200
        assert (
            contained.run(python("def grade(sample, item): return 1"), key=contained.other_key)[1]["reward"]
            == 1
        )
    # Its own next run, too, as soon as they have hung up: `contained` asks for one.


def test_a_grader_of_four_hundred_graders_is_refused(contained: Attacked) -> None:
    parts = {f"g{number}": python("def grade(sample, item): return 1") for number in range(400)}
    grader = {"type": "multi", "name": "m", "graders": parts, "calculate_output": " + ".join(parts)}

    assert contained.run(grader)[0] == 400


def test_uploads_that_stand_still_keep_nobody_else_waiting(contained: Attacked) -> None:
    kind = "Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 9000000\r\n\r\n"
    part = '--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{'
    with (
        abandoned(contained, 34, "POST /v1/files", (kind + part).encode()),
        contained.client(contained.other_key, timeout=20) as client,
    ):
        assert upload(client, b'{"messages": []}\n').status_code == 200


def upload(client: httpx.Client, content: bytes) -> httpx.Response:
    return client.post("/files", data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", content)})


def test_graders_with_a_hundred_spinning_threads_leave_the_server_its_share(contained: Attacked) -> None:
    source = (
        "import threading, time\n"
        "def spin():\n    end = time.monotonic() + 3\n    while time.monotonic() < end: pass\n"
        "def grade(sample, item):\n"
        "    threads = [threading.Thread(target=spin) for _ in range(100)]\n"
        "    for one in threads: one.start()\n    for one in threads: one.join()\n    return 1"
    )
    body = {"grader": python(source), "model_sample": "yes"}
    # One of each project: both cores are theirs. Last in line for the processor, they may take long.
    with ExitStack() as stack:
        clients = [
            stack.enter_context(contained.client(key, 240)) for key in (contained.key, contained.other_key)
        ]
        with ThreadPoolExecutor(2) as threads:
            answers = list(threads.map(lambda client: client.post(RUN, json=body), clients))

    assert [answer.status_code for answer in answers] == [200, 200]


def test_a_template_that_renders_gigabytes_is_a_failed_grade(contained: Attacked) -> None:
    grader = GRADER | {"input": "{{item.a}}" * 3000}

    status, report = contained.run(grader, item={"a": "x" * 1_000_000})

    assert status == 400 or any(report["metadata"]["errors"].values())


def test_ten_thousand_files_are_listed_beside_everything_else(contained: Attacked) -> None:
    with contained.database.write() as session:
        rows = (
            {
                "project_id": contained.project_id, "filename": f"{number}.jsonl", "purpose": "fine-tune",
                "bytes": 0, "sha256": "0" * 64, "blob_key": f"files/{number}",
            }
            for number in range(10_000)
        )  # fmt: skip
        session.bulk_insert_mappings(File, list(rows))
    with contained.client() as client:
        for _ in range(3):
            answer = client.get("/files")

            assert answer.status_code == 200
            assert answer.json()["data"]
    with contained.database.write() as session:
        session.query(File).filter(File.blob_key.like("files/%")).delete()


def test_parts_count_by_what_they_hold_and_not_by_what_was_announced(contained: Attacked, disk: Path) -> None:
    announced = {"bytes": 1, "filename": "a.jsonl", "mime_type": "text/jsonl", "purpose": "fine-tune"}
    before = stored(disk)
    refusals = 0
    with contained.client() as client:
        for _ in range(8):
            begun = client.post("/uploads", json=announced)
            if begun.status_code == 200:
                part = client.post(f"/uploads/{begun.json()['id']}/parts", files={"data": b"x" * (8 << 20)})
                refusals += part.status_code >= 400
            else:
                refusals += 1

    assert refusals
    assert stored(disk) - before <= STORAGE_BYTES


def stored(folder: Path) -> int:
    return sum(file.stat().st_size for file in (folder / "blobs").rglob("*") if file.is_file())


def test_a_full_disk_is_called_by_its_name_and_passes(contained: Attacked, disk: Path) -> None:
    if not os.path.ismount(disk):
        pytest.skip("a disk of its own cannot be mounted here")
    # Nothing is committed to a database on a full disk, so `contained` must find room again.
    with contained.client() as client:
        with full(disk):
            refused = upload(client, b'{"messages": []}\n' * 10_000)
        allowed = upload(client, b'{"messages": []}\n')

    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "insufficient_storage")
    assert allowed.status_code == 200


@contextmanager
def full(folder: Path) -> Iterator[None]:
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError as cause:
            assert cause.errno == errno.ENOSPC
    try:
        yield
    finally:
        ballast.unlink()


@pytest.mark.parametrize(
    "host",
    [
        "xn--",
        "xn--a",
        "168.63.129.16",
        "192.0.0.192",
        "[::127.0.0.1]",
        "[::ffff:0:7f00:1]",
        "[64:ff9b:1::7f00:1]",
        "[fec0::1]",
        "[5f00::1]",
        "192.88.99.1",
    ],
)
def test_a_webhook_to_a_host_that_is_none_or_not_public_is_a_400(contained: Attacked, host: str) -> None:
    body = {"name": "w", "url": f"https://{host}/", "event_types": ["fine_tuning.job.succeeded"]}
    with contained.client() as client:
        assert client.post("/webhook_endpoints", json=body).status_code == 400


def test_a_broker_that_is_away_delays_no_answer(contained: Attacked) -> None:
    """The best of three: the machine may be busy. The broker's client used to try for six seconds."""
    with contained.client() as client:
        row = b'{"messages": [{"role": "user", "content": "hi"}]}\n'
        training, validation = (upload(client, row * rows).json()["id"] for rows in (2, 1))
        body = job() | {"training_file": training, "validation_file": validation}
        seconds = []
        for _ in range(3):
            start = time.monotonic()
            answer = client.post("/fine_tuning/jobs", json=body)
            assert answer.status_code == 200, answer.text
            seconds.append(time.monotonic() - start)

    assert min(seconds) < 1


def test_an_estimate_refuses_the_line_that_the_job_would(contained: Attacked) -> None:
    line = json.dumps({"messages": [{"role": "user", "content": "x" * (5 << 20)}]}).encode() + b"\n"
    with contained.client() as client:
        training = upload(client, line).json()["id"]
        validation = upload(client, b'{"messages": [{"role": "user", "content": "hi"}]}\n').json()["id"]
        answer = client.post(
            "/regraft/estimate", json=job() | {"training_file": training, "validation_file": validation}
        )

    assert answer.status_code == 400, answer.text


def test_a_judge_that_fails_is_an_error_and_no_score(contained: Attacked) -> None:
    message = {"role": "user", "content": "{{sample.output_text}}"}
    judge = {"type": "score_model", "name": "j", "model": "broken", "input": [message]}

    status, report = contained.run(judge)

    assert status == 200
    assert report["metadata"]["errors"]["model_grader_server_error"] is True
    assert report["metadata"]["scores"] == {}
