"""Audits of graders, on rows of a training file."""

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from api.app import create_app
from api.pipelines.driver import PipelineDriver
from core import stored_graders
from core.database.tables import Pipeline
from core.tenancy import tenants
from graders.backends import Backends
from graders.judge.judges import JudgeModel
from tests.api.conftest import POLL_SECONDS, House, advance_next
from tests.api.test_chat import served
from tests.api.test_previews import WithoutDescriptors
from tests.graders.servers import serving, verdict

AUDIT, AUDITS = "/regraft/graders/audit", "/regraft/grader_audits"
TOPICS = ("sports", "music", "law")
ROWS = [
    {
        "messages": [{"role": "user", "content": f"Is {n} about sports, music or law?"}],
        "answer": TOPICS[n % 3],
    }
    for n in range(12)
]
EQUAL = {
    "type": "string_check",
    "name": "equal",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "eq",
}
CONTAINS = EQUAL | {"operation": "like"}
JUDGE = {
    "type": "label_model",
    "name": "judge",
    "model": "judge",
    "input": [{"role": "user", "content": "{{sample.output_text}} or {{item.answer}}?"}],
    "labels": ["good", "bad"],
    "passing_labels": ["good"],
}


def jsonl(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def opened(house: House, backends: Backends | None = None, **service: Any) -> Iterator[httpx.Client]:
    settings = house.app.state.service.settings
    registry = house.app.state.service.registry
    app = create_app(
        settings, house.database, house.blobs, registry, backends or Backends.none(), lambda *wake: True
    )
    app.state.service = replace(app.state.service, **service)
    for address in served(app):
        headers = {"Authorization": f"Bearer {house.key}"}
        with httpx.Client(base_url=f"{address}/v1", headers=headers, timeout=30) as client:
            yield client


@pytest.fixture
def web(house: House) -> Iterator[httpx.Client]:
    yield from opened(house)


@pytest.fixture
def file(upload: Callable[..., str]) -> str:
    return upload(jsonl(ROWS))


def created(web: httpx.Client, **asked: Any) -> dict[str, Any]:
    answer = web.post(AUDIT, json=asked)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def ended(web: httpx.Client, made: dict[str, Any]) -> dict[str, Any]:
    while made["status"] == "in_progress":
        time.sleep(POLL_SECONDS)
        made = web.get(f"{AUDITS}/{made['id']}").json()
    return made


def audited(web: httpx.Client, **asked: Any) -> dict[str, Any]:
    made = ended(web, created(web, **asked))
    assert made["status"] == "completed", made
    return made


def test_an_audit_that_cannot_grade_for_want_of_descriptors_grades_later(house: House, file: str) -> None:
    backends = WithoutDescriptors({})

    for web in opened(house, backends):
        made = audited(web, grader=CONTAINS, training_file=file)

    assert made["progress"]["graded"] == made["progress"]["of"]
    assert backends.opened > 1


def test_an_audit_is_stored_with_its_report(web: httpx.Client, file: str) -> None:
    made = audited(web, grader=CONTAINS, training_file=file)

    report = made["report"]
    assert report["verdict"] == "stop"
    assert "all labels" in report["sentence"]
    assert report["coverage"] == {
        "rows": 12,
        "of_rows": 12,
        "with_right_answer": 12,
        "never_graded": 0,
        "most_frequent": 4,
        "is_complete": True,
    }
    assert made["progress"]["graded"] == made["progress"]["of"] == report["answers"]
    [listed] = web.get(AUDITS).json()["data"]
    assert listed == made | {"report": None}
    assert listed["verdict"] == "stop"


def test_a_strict_grader_goes(web: httpx.Client, file: str) -> None:
    report = audited(web, grader=EQUAL, training_file=file)["report"]

    assert report["verdict"] == "go"
    assert report["false_positives"]["wrong"] == report["false_negatives"]["wrong"] == 0
    assert report["sensitivity"]["correlation"] == 1
    assert report["noise"] is None


def test_a_template_says_how_right_answers_are_written(web: httpx.Client, file: str) -> None:
    source = "def grade(sample, item):\n    return float('<answer>' in sample['output_text'])\n"

    report = audited(
        web,
        grader={"type": "python", "name": "tags", "source": source},
        training_file=file,
        answer="<answer>{{item.answer}}</answer>",
        rows=4,
    )["report"]

    assert report["false_negatives"]["wrong"] == 0
    assert "other reference" in report["sentence"]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"answer": "{{sample.output_text}}"}, "answer"),
        ({"answer": "{{item.nope}}"}, "answer"),
        ({"grader": EQUAL | {"input": "{{sample.output_tools[0].function.name}}"}}, "grader"),
        ({"rows": 0}, "rows"),
        ({"training_file": "file-x"}, "training_file"),
    ],
)
def test_a_wrong_request_is_refused(web: httpx.Client, file: str, asked: dict[str, Any], param: str) -> None:
    answer = web.post(AUDIT, json={"grader": EQUAL, "training_file": file} | asked)

    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_an_audit_can_be_deleted(web: httpx.Client, file: str) -> None:
    made = audited(web, grader=EQUAL, training_file=file)

    assert web.post(f"{AUDITS}/{made['id']}/cancel").json()["status"] == "completed"
    assert web.delete(f"{AUDITS}/{made['id']}").json()["deleted"]
    assert web.get(f"{AUDITS}/{made['id']}").status_code == 404


def test_a_hostile_grader_stays_in_the_sandbox(web: httpx.Client, file: str) -> None:
    source = "import os\ndef grade(sample, item):\n    os._exit(1)\n"

    report = audited(
        web, grader={"type": "python", "name": "p", "source": source}, training_file=file, rows=1
    )["report"]

    assert report["verdict"] == "unknown"
    assert report["grading"]["failed"] == report["answers"]


def test_an_audit_that_takes_too_long_fails(house: House, file: str) -> None:
    for web in opened(house, preview_seconds=0.0):
        made = ended(web, created(web, grader=EQUAL, training_file=file))

        assert made["error"]["code"] == "audit_too_slow"


class TestStoredGraders:
    def test_a_version_keeps_the_result_of_its_newest_audit(self, web: httpx.Client, file: str) -> None:
        web.post("/regraft/graders", json={"name": "topic", "grader": CONTAINS})
        version = web.post("/regraft/graders", json={"name": "topic", "grader": EQUAL}).json()["version"]

        made = audited(web, grader={"type": "stored", "name": "topic"}, training_file=file)
        web.delete(f"{AUDITS}/{made['id']}")

        kept = {
            one["version"]: one["audit"] for one in web.get("/regraft/graders/topic/versions").json()["data"]
        }
        assert kept[version]["verdict"] == "go"
        assert kept[version]["id"] == made["id"]
        assert [audit for hashed, audit in kept.items() if hashed != version] == [None]

    def test_a_grader_of_another_project_is_not_touched(
        self, house: House, web: httpx.Client, file: str
    ) -> None:
        other = house.client(house.other_key)
        other.post("/v1/regraft/graders", json={"name": "topic", "grader": EQUAL})

        audited(web, grader=EQUAL, training_file=file)

        assert other.get("/v1/regraft/graders/topic/versions").json()["data"][0]["audit"] is None


class TestJudges:
    """A judge that is right, except about half of the answers that it is asked again."""

    @pytest.fixture
    def asked(self) -> list[dict[str, Any]]:
        return []

    @pytest.fixture
    def judged(self, house: House, asked: list[dict[str, Any]]) -> Iterator[httpx.Client]:
        draw = random.Random(0)

        def answer(path: str, sent: Any) -> tuple[int, str | bytes]:
            asked.append(sent)
            first, _, second = sent["messages"][0]["content"].removesuffix("?").rpartition(" or ")
            is_good = first == second if sent.get("seed") is None else draw.random() < 0.5
            return 200, verdict("good" if is_good else "bad").body

        with serving(answer) as url:
            yield from opened(house, Backends({"judge": JudgeModel(f"{url}/v1")}))

    def test_are_asked_again_with_other_seeds_and_reversed_labels(
        self, judged: httpx.Client, asked: list[dict[str, Any]], file: str
    ) -> None:
        report = audited(judged, grader=JUDGE, training_file=file, rows=4, repeats=2)["report"]

        again = [sent for sent in asked if "seed" in sent]
        labels = {
            sent["seed"]: sent["response_format"]["json_schema"]["schema"]["properties"]["result"]["enum"]
            for sent in again
        }
        assert labels == {0: ["good", "bad"], 1: ["bad", "good"]}
        assert (report["noise"]["answers"], report["noise"]["repeats"]) == (8, 2)
        assert 0 < report["noise"]["flip_rate"] < 1
        assert report["grading"]["tokens"] > 0

    def test_keep_to_the_budget(self, judged: httpx.Client, asked: list[dict[str, Any]], file: str) -> None:
        whole = audited(judged, grader=JUDGE, training_file=file)["report"]
        budget = whole["grading"]["tokens"] // 8

        report = audited(judged, grader=JUDGE | {"name": "j"}, training_file=file, budget={"tokens": budget})[
            "report"
        ]

        # Requests in flight complete: at most eight, each below a hundredth of the whole.
        assert report["grading"]["tokens"] < 2 * budget
        assert 0 < report["answers"] < whole["answers"]

    def test_count_towards_the_limit_of_the_project(
        self, house: House, judged: httpx.Client, file: str
    ) -> None:
        used = audited(judged, grader=JUDGE, training_file=file, rows=1)["report"]["grading"]["tokens"]
        with house.database.read() as session:
            booked = tenants.usage_since(session, house.project.id).grader_tokens
        house.limit(grader_tokens_per_30_days=used)

        refused = judged.post(AUDIT, json={"grader": JUDGE, "training_file": file})

        assert booked == used
        assert refused.status_code == 429


class TestGateOfAJob:
    @pytest.fixture
    def job(self, job_request: Callable[..., dict[str, Any]], file: str) -> Callable[..., dict[str, Any]]:
        def job(grader: dict[str, Any], block_above: float) -> dict[str, Any]:
            return job_request(
                reinforcement={"grader": grader}, training_file=file, audit={"block_above": block_above}
            )

        return job

    def test_needs_an_audit_of_this_grader_on_this_file(
        self, web: httpx.Client, file: str, upload: Callable[..., str], job: Callable[..., dict[str, Any]]
    ) -> None:
        audited(web, grader=CONTAINS, training_file=file)
        audited(web, grader=EQUAL, training_file=upload(jsonl(ROWS[:5])))

        answer = web.post("/fine_tuning/jobs", json=job(EQUAL, 0.5))

        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "grader_not_audited"

    def test_refuses_a_grader_that_lets_wrong_answers_pass(
        self, web: httpx.Client, file: str, job: Callable[..., dict[str, Any]]
    ) -> None:
        source = "def grade(sample, item):\n    return float(sample['output_text'].split()[-1:] == [item['answer']])\n"
        last_word = {"type": "python", "name": "last_word", "source": source}
        kinds = audited(web, grader=last_word, training_file=file)["report"]["kinds"]
        [share] = [one["share"]["expected"] for one in kinds if one["kind"] == "all_labels"]

        refused = web.post("/fine_tuning/jobs", json=job(last_word, share - 0.01))
        made = web.post("/fine_tuning/jobs", json=job(last_word, share + 0.01))

        assert refused.json()["error"]["code"] == "grader_blocked"
        assert "answers of the kind all_labels pass the grader" in refused.json()["error"]["message"]
        assert made.status_code == 200, made.text

    def test_refuses_a_grader_whose_audit_stops(
        self, web: httpx.Client, file: str, job: Callable[..., dict[str, Any]]
    ) -> None:
        audited(web, grader=CONTAINS, training_file=file)

        answer = web.post("/fine_tuning/jobs", json=job(CONTAINS, 1.0))

        assert answer.json()["error"]["code"] == "grader_blocked"
        assert "Do not train" in answer.json()["error"]["message"]

    def test_refuses_an_audit_without_a_grade_or_of_few_rows(
        self, web: httpx.Client, file: str, job: Callable[..., dict[str, Any]]
    ) -> None:
        broken = {"type": "python", "name": "p", "source": "def grade(sample, item):\n    raise ValueError\n"}
        audited(web, grader=broken, training_file=file)
        audited(web, grader=EQUAL, training_file=file, rows=5)

        answers = [web.post("/fine_tuning/jobs", json=job(one, 1.0)) for one in (broken, EQUAL)]

        assert [one.json()["error"]["code"] for one in answers] == ["grader_not_audited"] * 2
        assert "at least 12 are needed" in answers[1].json()["error"]["message"]

    def test_a_job_has_an_event_about_the_audit(
        self, web: httpx.Client, file: str, job: Callable[..., dict[str, Any]]
    ) -> None:
        made = audited(web, grader=EQUAL, training_file=file)

        job_id = web.post("/fine_tuning/jobs", json=job(EQUAL | {"name": "other"}, 0.05)).json()["id"]

        messages = [one["message"] for one in web.get(f"/fine_tuning/jobs/{job_id}/events").json()["data"]]
        assert any(made["id"] in message and "can train" in message for message in messages)

    def test_is_not_for_a_file_that_is_not_uploaded_yet(
        self, web: httpx.Client, job: Callable[..., dict[str, Any]]
    ) -> None:
        asked = job(EQUAL, 0.5)

        stored = web.post("/regraft/jobs/validate", json={"job": asked})
        local = web.post(
            "/regraft/jobs/validate", json={"job": asked, "local_files": ["training_file", "validation_file"]}
        )

        assert stored.json()["error"]["code"] == "grader_not_audited"
        assert local.status_code == 200, local.text

    def test_refuses_a_stage_whose_file_is_known_with_its_pipeline(
        self, web: httpx.Client, job: Callable[..., dict[str, Any]]
    ) -> None:
        refused = web.post("/regraft/pipelines", json={"stages": [{"name": "rft", "job": job(EQUAL, 0.5)}]})

        assert refused.json()["error"]["code"] == "grader_not_audited"
        assert refused.json()["error"]["param"] == "stages[0].job.audit"

    def test_refuses_a_stage_whose_file_is_a_result_when_it_starts(
        self, house: House, web: httpx.Client, file: str, job: Callable[..., dict[str, Any]]
    ) -> None:
        asked = job(EQUAL, 0.5) | {"training_file": "{{stages.all.file}}"}
        stages = [{"name": "all", "mix": {"files": [{"file": file}]}}, {"name": "rft", "job": asked}]
        driver = PipelineDriver(house.app.state.service)

        made = web.post("/regraft/pipelines", json={"stages": stages})
        assert made.status_code == 201, made.text
        for _ in stages:
            with house.database.write() as session:
                session.execute(update(Pipeline).values(next_run_at=0.0))
            house.portal.call(advance_next, driver)

        shown = web.get(f"/regraft/pipelines/{made.json()['id']}").json()["stages"]
        assert [stage["status"] for stage in shown] == ["succeeded", "failed"]
        assert shown[1]["error"]["code"] == "grader_not_audited"


def test_names_do_not_change_the_behavior_of_a_grader() -> None:
    def multi(name: str) -> dict[str, Any]:
        return {
            "type": "multi",
            "name": name,
            "graders": {"a": EQUAL | {"name": name}},
            "calculate_output": "a",
        }

    assert stored_graders.behavior_of(multi("x")) == stored_graders.behavior_of(multi("y"))
    assert stored_graders.behavior_of(EQUAL) != stored_graders.behavior_of(CONTAINS)
