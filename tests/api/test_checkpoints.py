import hashlib
import io
import json
import tarfile

import pytest

from core.models import Checkpoint

FILES = {"adapter_config.json": b'{"r": 16}', "adapter_model.safetensors": bytes(range(256)) * 5000}


@pytest.fixture
def checkpoint(house, create_job):
    """A kept checkpoint of a job, as a worker leaves it, and the job's id."""
    job_id = create_job()["id"]
    prefix = f"projects/{house.project.id}/jobs/{job_id}/attempts/1/checkpoints/step-000004"
    stored = FILES | {"trainer.pt": b"optimizer"}
    for name, content in stored.items():
        house.blobs.put_bytes(f"{prefix}/{name}", content)
    files = [
        {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in stored.items()
    ]
    manifest = {"format": 1, "job": job_id, "base_model": "tiny", "step": 4, "epoch": 1, "files": files}
    house.blobs.put_bytes(f"{prefix}/manifest.json", json.dumps(manifest).encode())
    with house.database.write() as session:
        row = Checkpoint(job_id=job_id, step=4, epoch=1, blob_prefix=prefix, valid_reward=0.5)
        session.add(row)
        session.flush()
        return row.id, job_id


def url(checkpoint) -> str:
    checkpoint_id, job_id = checkpoint
    return f"/v1/regraft/jobs/{job_id}/checkpoints/{checkpoint_id}/download"


def test_the_adapter_comes_as_a_tar_with_its_manifest(api, checkpoint):
    answer = api.get(url(checkpoint))

    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        unpacked = {one.name: tar.extractfile(one).read() for one in tar}
    manifest = json.loads(unpacked.pop("manifest.json"))
    assert unpacked == FILES
    assert {file["name"]: file["sha256"] for file in manifest["files"]} == {
        name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()
    }
    assert manifest["base_model"] == "tiny"


def test_its_length_is_known_beforehand(api, checkpoint):
    answer = api.get(url(checkpoint))

    assert int(answer.headers["content-length"]) == len(answer.content)
    assert "step-4.tar" in answer.headers["content-disposition"]


def test_a_checkpoint_of_another_job_or_none_is_a_404(api, checkpoint, create_job):
    checkpoint_id, job_id = checkpoint

    for pair in ((checkpoint_id, create_job()["id"]), ("ftckpt_none", job_id)):
        answer = api.get(url(pair))
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "checkpoint_not_found")


def test_a_checkpoint_that_was_just_replaced_is_a_404(api, house, checkpoint):
    house.blobs.delete_prefix(f"projects/{house.project.id}/")

    answer = api.get(url(checkpoint))

    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "checkpoint_id")
