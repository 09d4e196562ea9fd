"""The signed statement about a job's model, over HTTP and in its archive."""

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from core import passports
from core.database.tables import Checkpoint, GraderAudit, Job, TunedModel
from core.jobs import events
from core.passports import Signer
from core.results import background
from core.results.passport import KEY_FILE, SAMPLES, SHOWN_CHARACTERS
from core.stored_graders import behavior_of
from tests import factories
from tests.api.conftest import GRADER, House
from tests.api.test_rollouts import row, store

WEIGHTS = b"weights"
FILE = {"name": "adapter_model.safetensors", "bytes": 7, "sha256": hashlib.sha256(WEIGHTS).hexdigest()}
VERDICT = {
    "outcome": "improved", "base_reward": 0.25, "tuned_reward": 0.5, "difference": 0.25, "ci_low": 0.1, "ci_high": 0.4,
    "wins": 6, "losses": 1, "ties": 1, "rows": 8, "ungraded": 0, "step": 2,
}  # fmt: skip

pytestmark = pytest.mark.both_databases


@pytest.fixture
def signer(house: House) -> Signer:
    """The key of the deployment."""
    text = passports.new_key()
    (house.folder / KEY_FILE).write_text(text + "\n")
    return Signer.parse(text)


@pytest.fixture
def job_id(house: House, create_job: Callable[..., dict[str, Any]]) -> str:
    """A job that has delivered the checkpoint of step 2."""
    job_id = str(create_job(suffix="desk")["id"])
    deliver(house, job_id)
    return job_id


def deliver(house: House, job_id: str, **fields: Any) -> str:
    """Returns the id of the checkpoint."""
    prefix = f"{job_id}/step-2"
    house.blobs.put_bytes(f"{prefix}/{FILE['name']}", WEIGHTS)
    house.blobs.put_bytes(f"{prefix}/manifest.json", json.dumps({"format": 1, "files": [FILE]}).encode())
    with house.database.write() as session:
        job = session.query(Job).where(Job.id == job_id).one()
        job.status, job.fine_tuned_model, job.verdict = "succeeded", f"ft:tiny:{job_id}", VERDICT
        job.usage, job.gpu_seconds = {"gpu_seconds": 3.5, "training_seconds": 3.0}, 3.5
        for name, value in fields.items():
            setattr(job, name, value)
        checkpoint = Checkpoint(job_id=job_id, step=2, epoch=1, blob_prefix=prefix, valid_reward=0.5)
        session.add(checkpoint)
        session.flush()
        model = {"organization_id": job.organization_id, "project_id": job.project_id, "base_model": "tiny"}
        columns = TunedModel.__table__.columns.keys()
        session.add(
            TunedModel(
                name=f"ft:tiny:{job_id}",
                job_id=job_id,
                checkpoint_id=checkpoint.id,
                **{name: value for name, value in model.items() if name in columns},
            )
        )
        return checkpoint.id


def passport_of(api: TestClient, job_id: str, **params: str) -> Any:
    return api.get(f"/v1/regraft/jobs/{job_id}/passport", params=params)


def statement_of(api: TestClient, job_id: str) -> Any:
    answer = passport_of(api, job_id)
    assert answer.status_code == 200, answer.text
    return passports.read(answer.content).statement


def test_the_statement_has_the_hashes_the_verdict_and_the_costs(
    api: TestClient, job_id: str, signer: Signer
) -> None:
    statement = statement_of(api, job_id)

    assert statement["model"] == f"ft:tiny:{job_id}"
    assert statement["data"]["training_file"]["sha256"] == hashlib.sha256(b'{"messages": []}\n').hexdigest()
    assert statement["graders"] == {"grader": passports.digest(GRADER)}
    assert statement["base_model"]["hub"] == "regraft/tiny"
    assert statement["verdict"] == VERDICT
    assert (statement["usage"]["gpu_seconds"], statement["cost"]) == (3.5, None)
    assert (statement["audit"], statement["alarms"], statement["lineage"]) == (None, [], [])
    assert statement["checkpoint"]["files"] == [FILE]


def test_the_ledger_has_the_sums_of_all_steps_by_bucket(
    house: House, api: TestClient, create_job: Callable[..., dict[str, Any]], signer: Signer
) -> None:
    job_id = str(create_job()["id"])
    deliver(house, job_id, usage={"unused_tokens": 20})
    with house.database.write() as session:
        job = session.query(Job).where(Job.id == job_id).one()
        for step, learned in ((1, 60), (2, 80)):
            timing = {"step": {"sampling": 6.0, "training": 2.0, "eval": 0.5}}
            tokens = {"learned_tokens": learned, "zero_variance_tokens": 20}
            factories.step(session, job, step, tokens=learned + 20, timing=timing, **tokens)

    assert statement_of(api, job_id)["ledger"] == {
        "tokens": {"learned": 140, "zero_variance": 40, "unused": 20},
        "gpu_seconds": {"learned": 13.3, "zero_variance": 2.7, "validation": 1.0},
    }


def test_the_archive_has_the_same_passport_and_the_files_that_it_lists(
    house: House, api: TestClient, job_id: str, signer: Signer, tmp_path: Any
) -> None:
    answer = passport_of(api, job_id)
    checkpoint_id = answer.json()["statement"]["checkpoint"]["id"]
    archive = api.get(f"/v1/regraft/checkpoints/{checkpoint_id}/archive").content
    folder = tmp_path / "export"
    folder.mkdir()
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            (folder / member.name.split("/")[1]).write_bytes(tar.extractfile(member).read())  # type: ignore[union-attr]

    content = (folder / passports.FILE).read_bytes()
    passport = passports.read(content)
    assert json.loads(content) == answer.json()
    assert passport.fingerprint == signer.fingerprint
    assert {file.name for file in passport.files} == {FILE["name"], "README.md", "reproduce.json"}
    assert passports.problems_of_files(passport, folder) == []


def test_the_same_state_has_the_same_passport(api: TestClient, job_id: str, signer: Signer) -> None:
    assert passport_of(api, job_id).content == passport_of(api, job_id).content


def test_samples_are_drawn_by_their_hash_and_long_texts_are_cut(
    house: House, api: TestClient, job_id: str, signer: Signer
) -> None:
    rows = [row(2, "valid", group, 0, output_text=f"{group} " + "x" * 3000) for group in range(300)]
    store(house, job_id, 2, "valid", rows=rows)

    samples = statement_of(api, job_id)["samples"]

    assert len(samples) == SAMPLES
    assert samples == statement_of(api, job_id)["samples"]
    assert len({sample["id"] for sample in samples}) == SAMPLES
    assert {len(sample["answer"]) for sample in samples} == {SHOWN_CHARACTERS}
    assert max(sample["line"] for sample in samples) > SAMPLES, "not the first ones"
    first = samples[0]
    stored = rows[first["line"] - 1]
    whole = {"messages": json.loads(stored["messages"]), "item": json.loads(stored["item"])}
    whole |= {"output_text": stored["output_text"], "score": stored["score"]}
    assert first["sha256"] == passports.digest(whole)


@pytest.mark.parametrize("text", ["a\ud83db", "nul\0", "\u202e", "é\N{GRINNING FACE}"])
def test_a_statement_with_any_text_arrives_as_it_was_signed(
    house: House, api: TestClient, job_id: str, signer: Signer, text: str
) -> None:
    store(house, job_id, 2, "valid", rows=[row(2, "valid", 0, 0, output_text=text, score=1e16)])
    with house.database.write() as session:
        events.append(session, job_id, text, level="warn", data={"rule": "kl_jump", text: text}, step=1)

    statement = statement_of(api, job_id)

    assert statement["samples"][0]["score"] == 1e16


def test_alarms_are_those_up_to_the_checkpoint(
    house: House, api: TestClient, job_id: str, signer: Signer
) -> None:
    with house.database.write() as session:
        for step in (1, 2, 3):
            data = {"rule": f"rule_{step}"}
            events.append(session, job_id, f"Alarm {step}", level="warn", data=data, step=step)
        events.append(session, job_id, "A warning without a rule", level="warn", step=1)

    alarms = statement_of(api, job_id)["alarms"]

    assert alarms == [{"rule": f"rule_{step}", "step": step, "message": f"Alarm {step}"} for step in (1, 2)]


def test_the_audit_is_that_of_this_grader_on_this_file(
    house: House, api: TestClient, job_id: str, signer: Signer
) -> None:
    report = {
        "verdict": "go", "sentence": "Fine.", "false_positives": 0, "mentions": 0, "false_negatives": 0,
        "sensitivity": {"correlation": 1.0},
    }  # fmt: skip
    with house.database.write() as session:
        session.add(
            GraderAudit(
                project_id=house.project.id,
                request={},
                training_sha256=hashlib.sha256(b'{"messages": []}\n').hexdigest(),
                behavior_sha256=behavior_of(GRADER),
                version="v",
                status=background.COMPLETED,
                progress={},
                report=report,
                lease_expires_at=0.0,
            )
        )

    assert statement_of(api, job_id)["audit"]["sentence"] == "Fine."


def test_the_lineage_names_all_ancestors(
    house: House, api: TestClient, create_job: Callable[..., dict[str, Any]], signer: Signer
) -> None:
    names = [str(create_job()["id"]) for _ in range(3)]
    parent: dict[str, Any] | None = None
    for name in names:
        checkpoint = deliver(house, name, parent=parent)
        parent = {
            "model": f"ft:tiny:{name}", "job_id": name, "step": 2, "checkpoint_id": checkpoint,
            "blob_prefix": "p", "settings": {},
        }  # fmt: skip

    lineage = statement_of(api, names[2])["lineage"]

    assert [(one["job_id"], one["step"]) for one in lineage] == [(names[1], 2), (names[0], 2)]
    assert {one["training_file_sha256"] for one in lineage} == {
        hashlib.sha256(b'{"messages": []}\n').hexdigest()
    }


def test_the_public_key_is_served(api: TestClient, job_id: str, signer: Signer) -> None:
    served = api.get("/v1/regraft/passport_key").json()

    assert (served["public_key"], served["fingerprint"]) == (signer.public_key, signer.fingerprint)
    assert served["public_key"] == passport_of(api, job_id).json()["public_key"]


def test_without_a_key_nothing_is_signed_and_the_setting_is_named(api: TestClient, job_id: str) -> None:
    for url in (f"/v1/regraft/jobs/{job_id}/passport", "/v1/regraft/passport_key"):
        refused = api.get(url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "no_passport_key")
        assert "REGRAFT_PASSPORT_KEY" in refused.json()["error"]["message"]


def test_without_a_key_the_archive_has_no_passport(house: House, api: TestClient, job_id: str) -> None:
    with house.database.read() as session:
        checkpoint_id = session.query(Checkpoint.id).scalar()

    archive = api.get(f"/v1/regraft/checkpoints/{checkpoint_id}/archive")

    assert archive.status_code == 200
    assert b"passport.json" not in archive.content


def test_a_damaged_key_is_said_without_its_text(house: House, api: TestClient, job_id: str) -> None:
    (house.folder / KEY_FILE).write_text("half-a-secret")

    refused = passport_of(api, job_id)

    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "no_passport_key")
    assert "32 bytes in base64" in refused.json()["error"]["message"]
    assert "half-a-secret" not in refused.text


def test_a_job_without_a_model_has_no_passport(
    api: TestClient, create_job: Callable[..., dict[str, Any]], signer: Signer
) -> None:
    refused = passport_of(api, create_job()["id"])

    assert refused.status_code == 404
    assert "has no fine-tuned model" in refused.json()["error"]["message"]


def test_a_checkpoint_of_another_job_is_refused(
    house: House, api: TestClient, job_id: str, create_job: Callable[..., dict[str, Any]], signer: Signer
) -> None:
    other = deliver(house, str(create_job()["id"]))

    refused = passport_of(api, job_id, checkpoint_id=other)

    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "checkpoint_not_found")
