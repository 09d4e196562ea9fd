"""Pipelines: what is refused at once, and how stages start, end, fail, and start again."""

import errno
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio
import pytest
from botocore.exceptions import EndpointConnectionError
from sqlalchemy import select, update
from starlette.testclient import TestClient

from api.http.deps import Service
from api.pipelines.driver import AT_ONCE, PER_PROJECT, PipelineDriver
from api.pipelines.stages import MAX_ERRORS, MAX_RESTARTS, Advance
from api.resources.pipelines import shown_spec
from core.claims import Claim, LeaseLost
from core.database.engine import Work
from core.database.tables import Job, Pipeline, Project
from core.errors import NotReady, ServiceError, TooManyAtOnce
from core.pipelines import lifecycle
from core.registry import BaseModelEntry, Registry
from core.storage.store import BlobWriter, FolderBlobs
from graders.backends import Backends
from graders.judge.judges import JudgeModel
from tests.api.conftest import House, advance_next

PIPELINES = "/v1/regraft/pipelines"
Upload = Callable[..., str]


def learned(n: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": str(n)}]}


def sampled(n: int, score: float) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{n}?"}]
    return {
        "messages": messages,
        "sample": {"answer": f"{score}", "score": score, "finish_reason": "stop", "prompt": n},
    }


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def supervised(file: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "training_file": file, "method": {"type": "supervised"}} | fields


def end_job(house: House, job_id: str, status: str = "succeeded", model: str | None = "tiny") -> None:
    """As a worker ends it."""
    with house.database.write() as session:
        job = session.scalars(select(Job).where(Job.id == job_id)).one()
        job.status, job.fine_tuned_model = status, model
        if status == "failed":
            job.error = {"code": "invalid_training_file", "message": "no rows", "param": None}


def stages(api: TestClient, pipeline_id: str) -> dict[str, dict[str, Any]]:
    return {stage["name"]: stage for stage in api.get(f"{PIPELINES}/{pipeline_id}").json()["stages"]}


def three(upload: Upload) -> list[dict[str, Any]]:
    """A selection of samples, a job on it, and a job that trains the first one's model further."""
    samples = upload(lines(*(sampled(n, n % 2) for n in range(20))), name="samples.jsonl")
    return [
        {"name": "best", "select": {"file": samples, "min_score": 1}},
        {"name": "sft", "job": supervised("{{stages.best.file}}", suffix="s")},
        {"name": "more", "job": supervised("{{stages.best.file}}", model="{{stages.sft.model}}")},
    ]


@pytest.mark.both_databases
def test_stages_run_one_after_the_other_on_each_others_results(
    api: TestClient, house: House, upload: Upload, advance: Callable[[], None]
) -> None:
    made = api.post(PIPELINES, json={"name": "r", "metadata": {"a": "b"}, "stages": three(upload)})
    assert made.status_code == 201, made.text
    pipeline = made.json()
    assert [stage["needs"] for stage in pipeline["stages"]] == [[], ["best"], ["sft", "best"]]

    advance()
    now = stages(api, pipeline["id"])
    assert (now["best"]["status"], now["best"]["rows"]) == ("succeeded", 10)
    kept = api.get(f"/v1/files/{now['best']['file']}/content").text.splitlines()
    assert json.loads(kept[0]) == {
        "messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}]
    }
    advance()
    now = stages(api, pipeline["id"])
    assert (now["sft"]["status"], now["more"]["status"]) == ("running", "waiting")
    job = api.get(f"/v1/fine_tuning/jobs/{now['sft']['job_id']}").json()
    assert job["training_file"] == now["best"]["file"]
    assert job["metadata"] == {"pipeline": pipeline["id"], "stage": "sft"}
    advance()
    assert len(api.get("/v1/fine_tuning/jobs").json()["data"]) == 1

    end_job(house, job["id"])
    advance()
    now = stages(api, pipeline["id"])
    assert (now["sft"]["status"], now["sft"]["model"], now["more"]["status"]) == (
        "succeeded",
        "tiny",
        "running",
    )
    end_job(house, now["more"]["job_id"])
    advance()
    ended = api.get(f"{PIPELINES}/{pipeline['id']}").json()
    assert (ended["status"], ended["name"], ended["metadata"]) == ("succeeded", "r", {"a": "b"})
    assert ended["finished_at"] is not None


def test_a_failed_stage_ends_the_pipeline_and_is_tried_again_on_request(
    api: TestClient, house: House, upload: Upload, advance: Callable[[], None]
) -> None:
    pipeline = api.post(PIPELINES, json={"stages": three(upload)}).json()
    advance()
    advance()
    first = stages(api, pipeline["id"])["sft"]["job_id"]
    end_job(house, first, "failed", None)
    advance()
    failed = api.get(f"{PIPELINES}/{pipeline['id']}").json()
    assert failed["status"] == "failed"
    assert failed["stages"][1]["error"] == {"code": "invalid_training_file", "message": "no rows"}
    assert failed["stages"][2]["status"] == "waiting"

    assert api.post(f"{PIPELINES}/{pipeline['id']}/retry").json()["status"] == "running"
    advance()
    now = stages(api, pipeline["id"])
    assert now["sft"]["status"] == "running"
    assert now["sft"]["earlier"] == [first] != [now["sft"]["job_id"]]
    assert now["best"]["file"] == failed["stages"][0]["file"]


def test_a_clone_keeps_the_results_before_the_stage_that_it_starts_from(
    api: TestClient, house: House, upload: Upload, advance: Callable[[], None]
) -> None:
    pipeline = api.post(PIPELINES, json={"stages": three(upload)}).json()
    clone = f"{PIPELINES}/{pipeline['id']}/clone"
    refused = api.post(clone, json={"from": "sft"}).json()["error"]
    assert refused["message"] == "The stages best have no results that a clone from 'sft' on could use."
    advance()

    made = api.post(clone, json={"from": "sft", "name": "again"}).json()

    assert (made["cloned_from"], made["name"]) == (pipeline["id"], "again")
    assert [stage["status"] for stage in made["stages"]] == ["succeeded", "waiting", "waiting"]
    assert made["stages"][0]["reused_from"] == pipeline["id"]
    assert api.post(clone, json={"from": "none"}).json()["error"]["param"] == "from"
    assert {stage["status"] for stage in api.post(clone, json={}).json()["stages"]} == {"waiting"}


def test_cancelling_ends_the_running_jobs_and_starts_no_other(
    api: TestClient, upload: Upload, advance: Callable[[], None]
) -> None:
    pipeline = api.post(PIPELINES, json={"stages": three(upload)}).json()
    advance()
    advance()
    path = f"{PIPELINES}/{pipeline['id']}"

    cancelled = api.post(f"{path}/cancel").json()

    assert (cancelled["status"], api.post(f"{path}/cancel").json()["status"]) == ("cancelled", "cancelled")
    assert [stage["status"] for stage in cancelled["stages"]] == ["succeeded", "cancelled", "waiting"]
    assert cancelled["stages"][1]["job_status"] == "cancelled"
    advance()
    assert len(api.get("/v1/fine_tuning/jobs").json()["data"]) == 1


def test_a_paused_pipeline_waits_with_its_jobs(
    api: TestClient, house: House, upload: Upload, advance: Callable[[], None]
) -> None:
    pipeline = api.post(PIPELINES, json={"stages": three(upload)}).json()
    path = f"{PIPELINES}/{pipeline['id']}"
    assert api.post(f"{path}/pause").json()["status"] == "paused"
    advance()
    assert stages(api, pipeline["id"])["best"]["status"] == "waiting"
    assert api.post(f"{path}/retry").json()["error"]["code"] == "invalid_job_state"
    assert api.post(f"{path}/resume").json()["status"] == "running"
    advance()
    advance()
    job_id = stages(api, pipeline["id"])["sft"]["job_id"]
    end_job(house, job_id, "queued", None)  # its files are validated

    assert api.post(f"{path}/pause").json()["stages"][1]["job_status"] == "paused"
    assert api.post(f"{path}/resume").json()["stages"][1]["job_status"] == "queued"


def test_a_job_that_is_validated_while_its_pipeline_is_paused_is_paused_as_well(
    api: TestClient, house: House, upload: Upload, advance: Callable[[], None]
) -> None:
    pipeline = api.post(PIPELINES, json={"stages": three(upload)}).json()
    advance()
    advance()
    job_id = stages(api, pipeline["id"])["sft"]["job_id"]
    assert (
        api.post(f"{PIPELINES}/{pipeline['id']}/pause").json()["stages"][1]["job_status"]
        == "validating_files"
    )
    with house.database.write() as session:
        assert lifecycle.validated(session, session.query(Job).where(Job.id == job_id).one()) == []

    assert stages(api, pipeline["id"])["sft"]["job_status"] == "paused"
    assert api.post(f"{PIPELINES}/{pipeline['id']}/resume").json()["stages"][1]["job_status"] == "queued"


def test_a_pipeline_resumes_a_job_that_was_held_back_since_it_was_read(
    api: TestClient, house: House, upload: Upload, advance: Callable[[], None]
) -> None:
    pipeline = api.post(PIPELINES, json={"stages": three(upload)}).json()
    advance()
    advance()
    job_id = stages(api, pipeline["id"])["sft"]["job_id"]
    api.post(f"{PIPELINES}/{pipeline['id']}/pause")
    with house.database.write() as session:
        job = session.scalars(select(Job).where(Job.id == job_id)).one()
        assert job.status == "validating_files"
        held_back = update(Job).where(Job.id == job_id).values(status="paused")
        session.execute(held_back.execution_options(synchronize_session=False))

        lifecycle.resume(Work(session), session.scalars(select(Pipeline)).one())

        assert job.status == "queued"


def test_a_mixture_is_a_file_of_the_project(
    api: TestClient, upload: Upload, advance: Callable[[], None]
) -> None:
    a, b = upload(lines(*map(learned, range(10)))), upload(lines(*map(learned, range(100, 120))))
    files = [{"file": a}, {"file": b, "weight": 0.5}]
    pipeline = api.post(PIPELINES, json={"stages": [{"name": "m", "mix": {"files": files}}]}).json()

    advance()

    made = stages(api, pipeline["id"])["m"]
    assert (made["status"], made["rows"]) == ("succeeded", 20)
    assert api.get(f"/v1/files/{made['file']}").json()["purpose"] == "fine-tune"
    assert api.get(f"{PIPELINES}/{pipeline['id']}").json()["status"] == "succeeded"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lines(learned(1)), "is not the file of a sample stage"),
        (lines(sampled(1, 0.0)), "No row is left"),
        (b"{\n", "line 1"),
    ],
)
def test_a_file_that_gives_no_rows_fails_its_stage(
    api: TestClient, upload: Upload, advance: Callable[[], None], content: bytes, words: str
) -> None:
    one = {"name": "s", "select": {"file": upload(content), "min_score": 1}}
    pipeline = api.post(PIPELINES, json={"stages": [one]}).json()

    advance()

    failed = stages(api, pipeline["id"])["s"]
    assert failed["status"] == "failed"
    assert words in failed["error"]["message"]
    assert len(api.get("/v1/files").json()["data"]) == 1


def test_a_limit_delays_a_stage_instead_of_failing_it(
    api: TestClient, house: House, upload: Upload, advance: Callable[[], None]
) -> None:
    file = upload(lines(*map(learned, range(10))))
    house.limit(queued_jobs=1)
    waiting = api.post("/v1/fine_tuning/jobs", json=supervised(file)).json()
    pipeline = api.post(PIPELINES, json={"stages": [{"name": "a", "job": supervised(file)}]}).json()

    advance()
    held = stages(api, pipeline["id"])["a"]
    assert held["status"] == "waiting"
    assert "queued_jobs" in held["note"]
    end_job(house, waiting["id"])
    advance()
    now = stages(api, pipeline["id"])["a"]
    assert (now["status"], now["note"]) == ("running", None)


def test_a_job_that_no_longer_exists_as_requested_fails_its_stage_by_name(
    api: TestClient, upload: Upload, advance: Callable[[], None]
) -> None:
    file = upload(lines(*map(learned, range(10))))
    pipeline = api.post(PIPELINES, json={"stages": [{"name": "a", "job": supervised(file)}]}).json()
    api.delete(f"/v1/files/{file}")

    advance()

    failed = api.get(f"{PIPELINES}/{pipeline['id']}").json()
    assert failed["status"] == "failed"
    assert file in failed["stages"][0]["error"]["message"]


def test_two_processes_do_not_advance_one_pipeline_at_a_time(
    api: TestClient, house: House, upload: Upload
) -> None:
    api.post(PIPELINES, json={"stages": three(upload)})
    one, two = PipelineDriver(house.app.state.service), PipelineDriver(house.app.state.service)

    assert house.portal.call(advance_next, one)
    assert not house.portal.call(advance_next, two)


def test_a_process_that_lost_the_pipeline_starts_nothing(
    api: TestClient, house: House, upload: Upload
) -> None:
    file = upload(lines(*map(learned, range(10))))
    pipeline = api.post(PIPELINES, json={"stages": [{"name": "a", "job": supervised(file)}]}).json()
    with house.database.write() as session:
        claim = lifecycle.claim(session, "slow")
    assert claim is not None
    api.post(f"{PIPELINES}/{pipeline['id']}/pause")
    api.post(f"{PIPELINES}/{pipeline['id']}/resume")

    with pytest.raises(LeaseLost):
        house.portal.call(Advance(house.app.state.service, claim).run)

    assert api.get("/v1/fine_tuning/jobs").json()["data"] == []
    assert stages(api, pipeline["id"])["a"]["status"] == "waiting"


def test_a_file_whose_process_was_killed_is_made_by_the_next_one(
    api: TestClient, house: House, upload: Upload, advance: Callable[[], None]
) -> None:
    file = upload(lines(*map(learned, range(10))))
    one = {"name": "m", "mix": {"files": [{"file": file}]}}
    pipeline = api.post(PIPELINES, json={"stages": [one]}).json()
    with house.database.write() as session:
        lifecycle.started(session.scalars(select(Pipeline)).one(), "m")

    advance()

    assert stages(api, pipeline["id"])["m"]["status"] == "succeeded"
    with house.database.read() as session:
        assert session.scalars(select(Pipeline)).one().stages[0]["restarts"] == 1


def test_a_file_that_stops_the_service_again_and_again_fails_its_stage(
    api: TestClient, house: House, upload: Upload, advance: Callable[[], None]
) -> None:
    one = {"name": "m", "mix": {"files": [{"file": upload(lines(learned(1)))}]}}
    pipeline = api.post(PIPELINES, json={"stages": [one]}).json()
    with house.database.write() as session:
        row = session.scalars(select(Pipeline)).one()
        lifecycle.started(row, "m")
        lifecycle.update_stage(row, "m", restarts=MAX_RESTARTS)

    advance()

    failed = stages(api, pipeline["id"])["m"]
    assert failed["status"] == "failed"
    assert "stopped repeatedly" in failed["error"]["message"]


class FailingBlobs(FolderBlobs):
    """Fails with an error until that is taken away."""

    error: Exception | None = None

    def writer(self, key: str, *, if_absent: bool = False) -> BlobWriter:
        if self.error is not None:
            raise self.error
        return super().writer(key, if_absent=if_absent)


def looks_until(
    house: House, driver: PipelineDriver, has_ended: Callable[[], bool], most: int = 50
) -> list[float]:
    """Advance the only pipeline until it has ended, at most `most` times; return the seconds until each next look."""
    pauses: list[float] = []
    while len(pauses) < most and not has_ended():
        looked = time.time()
        house.portal.call(advance_next, driver)
        with house.database.write() as session:
            pauses.append(session.scalars(select(Pipeline.next_run_at)).one() - looked)
            session.execute(update(Pipeline).values(next_run_at=0.0))
    return pauses


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "disk"),
        (OSError(errno.EMFILE, "Too many open files"), "file descriptors"),
        (EndpointConnectionError(endpoint_url="s3"), "blob store"),
    ],
    ids=str,
)
def test_a_stage_waits_for_the_end_of_an_outage_with_a_note(
    api: TestClient, house: House, upload: Upload, error: Exception, named: str
) -> None:
    blobs = FailingBlobs(house.folder / "blobs")
    driver = PipelineDriver(replace(house.app.state.service, blobs=blobs))
    one = {"name": "m", "mix": {"files": [{"file": upload(lines(learned(1)))}]}}
    pipeline = api.post(PIPELINES, json={"stages": [one]}).json()
    blobs.error = error
    pauses = looks_until(house, driver, lambda: False, most=MAX_ERRORS + MAX_RESTARTS + 2)
    waiting = stages(api, pipeline["id"])["m"]

    blobs.error = None
    house.portal.call(advance_next, driver)

    assert waiting["status"] == "running"
    assert waiting["note"] == f"The stage waits for the {named}."
    assert pauses[3] > 2 * pauses[0]
    done = stages(api, pipeline["id"])["m"]
    assert (done["status"], done["note"]) == ("succeeded", None)


def test_an_outage_that_outlasts_the_patience_fails_the_stage(
    api: TestClient, house: House, upload: Upload
) -> None:
    blobs = FailingBlobs(house.folder / "blobs")
    service = house.app.state.service
    impatient = service.settings.model_copy(update={"patience_seconds": 0.0})
    driver = PipelineDriver(replace(service, blobs=blobs, settings=impatient))
    one = {"name": "m", "mix": {"files": [{"file": upload(lines(learned(1)))}]}}
    pipeline = api.post(PIPELINES, json={"stages": [one]}).json()
    blobs.error = OSError(errno.ENOSPC, "No space left on device")

    looks_until(house, driver, lambda: False, most=MAX_ERRORS + 1)

    assert stages(api, pipeline["id"])["m"]["error"]["code"] == "internal_error"


@pytest.mark.parametrize(
    "refusal",
    [
        NotReady("The model is loading.", retry_after=5),
        TooManyAtOnce("checks", running=1, waiting=1),
    ],
    ids=lambda refusal: type(refusal).__name__,
)
def test_a_stage_that_the_service_refuses_for_now_waits_as_in_any_outage(
    api: TestClient, house: House, upload: Upload, refusal: ServiceError
) -> None:
    """With a note and a back-off while the patience lasts; then the stage fails with the reason."""
    blobs = FailingBlobs(house.folder / "blobs")
    service = house.app.state.service
    one = {"name": "m", "mix": {"files": [{"file": upload(lines(learned(1)))}]}}
    pipeline = api.post(PIPELINES, json={"stages": [one]}).json()
    blobs.error = refusal

    def has_ended() -> bool:
        return bool(stages(api, pipeline["id"])["m"]["status"] == "failed")

    patient = PipelineDriver(replace(service, blobs=blobs))
    pauses = looks_until(house, patient, has_ended, most=MAX_ERRORS + MAX_RESTARTS + 2)
    waiting = stages(api, pipeline["id"])["m"]
    impatient = service.settings.model_copy(update={"patience_seconds": 0.0})
    looks_until(house, PipelineDriver(replace(service, blobs=blobs, settings=impatient)), has_ended)

    assert (waiting["status"], waiting["note"]) == ("running", refusal.message)
    assert pauses[3] > 2 * pauses[0]
    failed = stages(api, pipeline["id"])["m"]
    assert failed["error"] == {"code": refusal.code, "message": refusal.message}


JUDGED = {
    "type": "score_model",
    "name": "j",
    "model": "judge",
    "input": [{"role": "user", "content": "?"}],
}


@pytest.mark.parametrize("lacks", ["model", "judge"])
def test_a_stage_waits_for_a_name_that_this_api_does_not_know_yet(
    api: TestClient, house: House, upload: Upload, lacks: str
) -> None:
    """Another API, with newer files of the operator, has accepted the pipeline."""
    service = house.app.state.service
    judges = replace(Backends.none(), judges={"judge": JudgeModel("http://127.0.0.1:1/v1")})
    newer = replace(service, all_backends=judges)
    older = (
        replace(newer, registries=Registry(models={"other": BaseModelEntry(hub="o/o")}))
        if lacks == "model"
        else service
    )
    rows = upload(lines({"messages": [{"role": "user", "content": "?"}]}), name="rows.jsonl")
    job = supervised(
        rows,
        validation_file=rows,
        method={"type": "reinforcement", "reinforcement": {"grader": JUDGED}},
    )
    house.app.state.service = newer
    pipeline = api.post(PIPELINES, json={"stages": [{"name": "a", "job": job}]}).json()

    looks_until(house, PipelineDriver(older), lambda: False, most=MAX_ERRORS + 2)
    waiting = stages(api, pipeline["id"])["a"]
    house.portal.call(advance_next, PipelineDriver(newer))

    assert (waiting["status"], waiting["error"]) == ("waiting", None)
    assert f"{'tiny' if lacks == 'model' else 'judge'}" in waiting["note"]
    assert stages(api, pipeline["id"])["a"]["status"] == "running"


def test_a_stage_waits_for_a_limit_with_a_back_off_and_never_fails_by_it(
    api: TestClient, house: House, upload: Upload
) -> None:
    one = {"name": "m", "mix": {"files": [{"file": upload(lines(learned(1)))}]}}
    pipeline = api.post(PIPELINES, json={"stages": [one]}).json()
    house.limit(storage_bytes=1)
    service = house.app.state.service
    impatient = service.settings.model_copy(update={"patience_seconds": 0.0})
    driver = PipelineDriver(replace(service, settings=impatient))

    pauses = looks_until(house, driver, lambda: False, most=MAX_RESTARTS + 2)

    waiting = stages(api, pipeline["id"])["m"]
    assert (waiting["status"], "storage_bytes" in waiting["note"]) == ("running", True)
    assert pauses[3] > 2 * pauses[0]


class CountingDriver(PipelineDriver):
    """A driver that counts how often it looks, and finds nothing."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.queries = 0

    async def claim_next(self) -> tuple[Claim, str] | None:
        self.queries += 1
        return None


def test_one_task_of_a_process_looks_for_due_pipelines(house: House) -> None:
    driver = CountingDriver(house.app.state.service)

    async def run() -> None:
        with anyio.move_on_after(1):
            await driver.run()

    house.portal.call(run)

    assert driver.queries == 1


@pytest.mark.both_databases
def test_a_project_with_many_pipelines_keeps_no_other_project_waiting(
    api: TestClient, house: House, upload: Upload
) -> None:
    one = {"name": "m", "mix": {"files": [{"file": upload(lines(learned(1)))}]}}
    for _ in range(AT_ONCE):
        api.post(PIPELINES, json={"stages": [one]})
    others = house.client(house.other_key)
    file = others.post(
        "/v1/files", files={"file": ("a.jsonl", lines(learned(1)))}, data={"purpose": "fine-tune"}
    )
    mix = {"name": "m", "mix": {"files": [{"file": file.json()["id"]}]}}
    assert others.post(PIPELINES, json={"stages": [mix]}).status_code == 201
    driver = PipelineDriver(house.app.state.service)

    claimed = [house.portal.call(driver.claim_next) for _ in range(PER_PROJECT + 2)]

    projects = [None if one is None else one[1] for one in claimed]
    assert projects[:PER_PROJECT] == [house.project.id] * PER_PROJECT
    assert projects[PER_PROJECT] not in (house.project.id, None)
    assert projects[PER_PROJECT + 1] is None


def test_a_project_has_a_number_of_unfinished_pipelines(api: TestClient, upload: Upload) -> None:
    one = {"name": "m", "mix": {"files": [{"file": upload(lines(learned(1)))}]}}
    made = [api.post(PIPELINES, json={"stages": [one]}).json() for _ in range(lifecycle.MAX_UNFINISHED)]

    refused = api.post(PIPELINES, json={"stages": [one]})

    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    api.post(f"{PIPELINES}/{made[0]['id']}/cancel")
    assert api.post(PIPELINES, json={"stages": [one]}).status_code == 201
    assert api.post(f"{PIPELINES}/{made[0]['id']}/retry").status_code == 429


def test_a_list_leaves_out_what_was_requested(api: TestClient, upload: Upload) -> None:
    one = {"name": "m", "mix": {"files": [{"file": upload(lines(learned(1)))}]}}
    made = api.post(PIPELINES, json={"stages": [one]}).json()

    assert made["stages"][0]["spec"] == one["mix"]
    assert api.get(PIPELINES).json()["data"][0]["stages"][0]["spec"] is None


def test_stages_beyond_half_a_megabyte_are_refused(api: TestClient) -> None:
    job = supervised("{{stages.b.file}}", metadata={"a": "x" * 512})
    many = [{"name": f"s{n}", "job": job | {"suffix": "x" * 60, "note": "x" * 9000}} for n in range(64)]

    refused = api.post(PIPELINES, json={"stages": many})

    assert refused.status_code == 400
    assert "524,288" in refused.json()["error"]["message"]


def test_an_error_of_the_service_is_tried_again_and_then_fails_the_stage(
    api: TestClient, house: House, upload: Upload, advance: Callable[[], None]
) -> None:
    one = {"name": "m", "mix": {"files": [{"file": upload(lines(learned(1)))}]}}
    pipeline = api.post(PIPELINES, json={"stages": [one]}).json()
    house.blobs.writable = False

    advance()
    waiting = stages(api, pipeline["id"])["m"]
    for _ in range(5):
        advance()

    assert (waiting["status"], "tried again" in waiting["note"]) == ("running", True)
    failed = stages(api, pipeline["id"])["m"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "internal_error")
    house.blobs.writable = True
    api.post(f"{PIPELINES}/{pipeline['id']}/retry")
    advance()
    assert stages(api, pipeline["id"])["m"]["status"] == "succeeded"


def test_an_archived_project_has_no_running_pipeline(
    api: TestClient, house: House, upload: Upload, advance: Callable[[], None]
) -> None:
    one = {"name": "m", "mix": {"files": [{"file": upload(lines(learned(1)))}]}}
    api.post(PIPELINES, json={"stages": [one]})
    with house.database.write() as session:
        session.get_one(Project, house.project.id).archived_at = 1

    advance()

    with house.database.read() as session:
        assert session.scalars(select(Pipeline.status)).one() == "cancelled"


def test_another_project_sees_no_pipeline(api: TestClient, house: House, upload: Upload) -> None:
    pipeline = api.post(PIPELINES, json={"stages": three(upload)}).json()
    others = house.client(house.other_key)

    assert others.get(PIPELINES).json()["data"] == []
    for method, path in (("get", ""), ("post", "/cancel"), ("post", "/retry"), ("post", "/clone")):
        answer = others.request(method, f"{PIPELINES}/{pipeline['id']}{path}", json={})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "pipeline_id")
    [mine] = api.get(PIPELINES).json()["data"]
    assert mine["id"] == pipeline["id"]


@pytest.mark.parametrize(
    ("stage", "param"),
    [
        ({"name": "a"}, "stages[0]"),
        ({"name": "a b", "mix": {"files": [{"file": "f"}]}}, "stages[0].name"),
        ({"name": "a", "job": {"model": "tiny"}}, "stages[0].job.training_file"),
        ({"name": "a", "job": supervised("file-none")}, "stages[0].job.training_file"),
        ({"name": "a", "job": supervised("file-none", model="unknown")}, "stages[0].job.model"),
        ({"name": "a", "job": supervised("f", method={"type": "magic"})}, "stages[0].job.method.type"),
        ({"name": "a", "select": {"file": "file-none"}}, "stages[0].select.file"),
        ({"name": "a", "mix": {"files": [{"file": "file-none"}]}}, "stages[0].mix.files[0].file"),
        ({"name": "a", "mix": {"files": [{"file": "{{stages.b.file}}"}]}}, "stages[0].mix.files[0].file"),
        ({"name": "a", "select": {"file": "f", "form": "poem"}}, "stages[0].select.form"),
        ({"name": "a", "sample": {"model": "unknown", "file": "{{stages.a.file}}"}}, "stages"),
        ({"name": "a", "sample": {"model": "unknown", "file": "f"}}, "stages[0].sample.file"),
        (
            {"name": "a", "sample": {"model": "m", "file": "f", "grader": {"type": "x"}}},
            "stages[0].sample.grader.type",
        ),
    ],
)
def test_a_stage_that_cannot_work_is_refused_before_anything_starts(
    api: TestClient, stage: dict[str, Any], param: str
) -> None:
    answer = api.post(PIPELINES, json={"stages": [stage]})

    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param
    assert api.get(PIPELINES).json()["data"] == []


def distilled(upload: Upload, teacher: str) -> dict[str, Any]:
    prompts = [{"messages": [{"role": "user", "content": f"{n}?"}]} for n in range(12)]
    method = {"type": "distillation", "distillation": {"teacher": {"model": teacher}}}
    return {
        "model": "tiny",
        "training_file": upload(lines(*prompts), name="prompts.jsonl"),
        "validation_file": upload(lines(*prompts[:3]), name="valid.jsonl"),
        "method": method,
    }


@pytest.mark.both_databases
def test_a_stage_teaches_a_later_one(
    api: TestClient, house: House, upload: Upload, advance: Callable[[], None]
) -> None:
    body = [
        {"name": "sft", "job": supervised(upload(lines(*map(learned, range(12)))))},
        {"name": "student", "job": distilled(upload, "{{stages.sft.model}}")},
    ]

    made = api.post(PIPELINES, json={"name": "p", "stages": body}).json()
    advance()
    end_job(house, stages(api, made["id"])["sft"]["job_id"], model="org/large")
    advance()

    job_id = stages(api, made["id"])["student"]["job_id"]
    job = api.get(f"/v1/fine_tuning/jobs/{job_id}").json()
    assert job["method"]["distillation"]["teacher"] == {"model": "org/large"}


def test_an_unknown_teacher_of_a_stage_is_refused_at_its_place(api: TestClient, upload: Upload) -> None:
    refused = api.post(
        PIPELINES, json={"name": "p", "stages": [{"name": "student", "job": distilled(upload, "none")}]}
    )

    assert refused.status_code == 404
    assert refused.json()["error"]["param"] == "stages[0].job.method.distillation.teacher.model"


def test_headers_of_endpoint_graders_are_masked() -> None:
    grader = {"type": "endpoint", "name": "e", "url": "https://x", "headers": {"authorization": "secret"}}

    of_job = shown_spec(
        {"model": "m", "method": {"type": "reinforcement", "reinforcement": {"grader": grader}}}
    )
    of_sample = shown_spec({"model": "m", "grader": grader})

    assert "secret" not in json.dumps([of_job, of_sample])
    assert of_sample["grader"]["headers"].keys() == {"authorization"}


def test_secrets_of_tools_are_masked() -> None:
    tool = {
        "name": "search",
        "server_url": "https://x/search?api_key=in-the-url",
        "headers": {"authorization": "in-a-header"},
    }
    inner = {"grader": {"type": "string_check", "name": "s"}, "tools": [tool], "max_episode_steps": 4}

    shown = shown_spec({"model": "m", "method": {"type": "reinforcement", "reinforcement": inner}})

    [masked] = shown["method"]["reinforcement"]["tools"]
    assert "in-" not in json.dumps(shown)
    assert masked["headers"].keys() == {"authorization"}
    assert shown["method"]["reinforcement"] == inner | {"tools": [masked]}


def test_graders_of_a_job_are_masked_in_every_form_that_a_request_may_have() -> None:
    endpoint = {"type": "endpoint", "name": "e", "url": "https://x", "headers": {"authorization": "secret"}}
    multi = {"type": "multi", "name": "m", "graders": [endpoint, endpoint | {"headers": None}]}

    shown = shown_spec({"method": {"type": "reinforcement", "reinforcement": {"grader": multi}}})

    first, second = shown["method"]["reinforcement"]["grader"]["graders"]
    assert "secret" not in json.dumps(shown)
    assert first["headers"].keys() == {"authorization"}
    assert second["headers"] is None


def test_the_metadata_of_a_job_leaves_room_for_the_names_of_its_pipeline_and_stage(
    api: TestClient, upload: Upload, advance: Callable[[], None]
) -> None:
    file = upload(lines(*map(learned, range(10))))

    def create(entries: int) -> Any:
        job = supervised(file, metadata={f"k{n}": "v" for n in range(entries)})
        return api.post(PIPELINES, json={"stages": [{"name": "a", "job": job}]})

    refused, made = create(15), create(14)

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "stages[0].job.metadata"
    advance()
    assert stages(api, made.json()["id"])["a"]["status"] == "running"


def test_a_deleted_file_is_not_called_an_error_of_the_service(
    api: TestClient, upload: Upload, advance: Callable[[], None]
) -> None:
    file = upload(lines({}))
    pipeline = api.post(
        PIPELINES, json={"stages": [{"name": "m", "mix": {"files": [{"file": file}]}}]}
    ).json()
    api.delete(f"/v1/files/{file}")

    advance()

    error = stages(api, pipeline["id"])["m"]["error"]
    assert error["code"] == "invalid_stage"
    assert file in error["message"]
