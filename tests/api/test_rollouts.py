import json

from core import jobs
from core.models import RolloutPage

LINES = [{"output_text": "4", "score": 1.0}, {"output_text": "Zeile\u2028zwei", "score": None}]


def store(house, job_id: str, **where) -> None:
    key = f"jobs/{job_id}/rollouts.jsonl"
    house.blobs.put_bytes(
        key, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in LINES).encode()
    )
    with house.database.write() as session:
        session.add(RolloutPage(job_id=job_id, epoch=1, blob_key=key, samples=2, **where))


def test_every_sample_of_a_step_is_shown(api, house, create_job):
    job_id = create_job()["id"]
    store(house, job_id, step=3, split="train")

    answer = api.get(f"/v1/regraft/jobs/{job_id}/rollouts", params={"step": 3})

    assert answer.json() == {"object": "list", "data": LINES, "has_more": False}


def test_a_step_without_samples_is_a_404(api, house, create_job):
    job_id = create_job()["id"]
    store(house, job_id, step=3, split="train")

    for params in ({"step": 4}, {"step": 3, "split": "valid"}):
        answer = api.get(f"/v1/regraft/jobs/{job_id}/rollouts", params=params)
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "step")


def test_the_step_must_be_a_number_and_the_split_one_of_two(api, create_job):
    url = f"/v1/regraft/jobs/{create_job()['id']}/rollouts"

    for params, param in (({}, "step"), ({"step": 2**31}, "step"), ({"step": 1, "split": "test"}, "split")):
        answer = api.get(url, params=params)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_the_attempts_at_a_job_say_when_from_where_and_how_they_ended(house, api, create_job):
    job_id = create_job()["id"]
    with house.database.write() as session:
        jobs.claim_validation(session, owner="first", lease_seconds=60)
        job = jobs.get(session, house.project.id, job_id)
        jobs.validated(session, job)
        claim = jobs.claim(session, gpu_class="cpu", owner="second", lease_seconds=60)
        jobs.resumed_from(session, claim, 0)
        jobs.crashed(session, job, reason="out of memory", max_failures=3)

    attempts = api.get(f"/v1/regraft/jobs/{job_id}/attempts").json()["data"]

    told = [(one["number"], one["kind"], one["outcome"], one["resumed_from_step"]) for one in attempts]
    assert told == [(1, "validation", "validated", None), (2, "run", "crashed", 0)]
    assert attempts[1]["reason"] == "out of memory"
