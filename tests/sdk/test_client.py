import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
import regraft
from fastapi import FastAPI
from fastapi import Request as Asked
from fastapi.responses import JSONResponse
from openai.types.fine_tuning import FineTuningJob
from regraft import AsyncRegraft, Regraft

from tests.present import present, untyped
from tests.sdk.conftest import GRADER, ROWS, House, serving

if TYPE_CHECKING:
    from httpx2 import Request


def test_it_is_openais_client(house: House, client: Regraft) -> None:
    made = client.files.create(file=("train.jsonl", b"{}"), purpose="fine-tune")

    assert isinstance(client, openai.OpenAI)
    assert [file.id for file in client.files.list()] == [made.id]
    assert [model.id for model in client.models.list()] == ["tiny", "o4-mini-2025-04-16"]


def test_a_copy_with_other_options_is_still_ours(client: Regraft) -> None:
    copy = client.with_options(timeout=3)

    assert isinstance(copy, Regraft)
    assert [model.id for model in copy.models.list()] == ["tiny", "o4-mini-2025-04-16"]


def test_where_the_server_is_comes_from_the_environment(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGRAFT_BASE_URL", house.base_url.removesuffix("/v1"))
    monkeypatch.setenv("REGRAFT_API_KEY", house.key)

    assert [model.id for model in Regraft().models.list()] == ["tiny", "o4-mini-2025-04-16"]


def test_nothing_of_openais_own_service_is_used(
    house: House, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REGRAFT_CONFIG", str(tmp_path / "none.toml"))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-theirs")
    monkeypatch.setenv("OPENAI_BASE_URL", house.base_url)
    monkeypatch.setenv("OPENAI_ORG_ID", "org-theirs")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj_theirs")

    with pytest.raises(regraft.NotConfigured, match="regraft login"):
        Regraft()
    with pytest.raises(regraft.NotConfigured, match="REGRAFT_API_KEY"):
        Regraft(base_url=house.base_url)
    assert list(Regraft(base_url=house.base_url, api_key=house.key).models.list())  # no foreign organization


def test_a_saved_key_is_for_the_server_it_was_saved_for(
    house: House, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REGRAFT_CONFIG", str(tmp_path / "config.toml"))
    path = regraft.config.save(regraft.config.Login(house.base_url, house.key))

    assert path.stat().st_mode & 0o777 == 0o600
    assert list(Regraft().models.list())
    with pytest.raises(regraft.NotConfigured, match="elsewhere"):
        Regraft(base_url="http://elsewhere:8000")


@pytest.mark.parametrize(
    ("ask", "ours", "openais"),
    [
        (lambda c: c.jobs.retrieve("ftjob-none"), regraft.JobNotFound, openai.NotFoundError),
        (lambda c: c.files.retrieve("file-none"), regraft.FileNotFound, openai.NotFoundError),
        (lambda c: c.models.retrieve("none"), regraft.ModelNotFound, openai.NotFoundError),
        (
            lambda c: c.moderations.create(input=""),
            regraft.NotSupportedByServer,
            openai.NotFoundError,
        ),
        (
            lambda c: c.graders.run(grader={"type": "none"}, model_sample=""),
            regraft.InvalidGrader,
            openai.BadRequestError,
        ),
        (
            lambda c: c.with_options(api_key="rg-wrong").models.list(),
            regraft.InvalidApiKey,
            openai.AuthenticationError,
        ),
    ],
)
def test_errors_have_names_of_their_own_and_openais(
    client: Regraft, ask: Callable[..., Any], ours: type[Any], openais: type[Any]
) -> None:
    with pytest.raises(ours) as caught:
        ask(client)

    assert isinstance(caught.value, openais)
    assert caught.value.request_id.startswith("req_")


def test_a_job_that_has_ended_cannot_be_resumed(house: House, client: Regraft) -> None:
    job_id = house.job(status="succeeded")

    with pytest.raises(regraft.InvalidJobState, match="already completed"):
        client.jobs.resume(job_id)


def test_a_job_file_is_submitted_with_its_files_and_grader(client: Regraft, job_file: Path) -> None:
    job = client.jobs.submit(job_file, set=["hyperparameters.n_epochs=2", "suffix=mine"])

    shown = untyped(job.to_dict()["method"])["reinforcement"]
    assert (job.model, job.seed, job.status) == ("tiny", 7, "validating_files")
    assert (shown["grader"], shown["hyperparameters"]["n_epochs"]) == (GRADER, 2)
    assert client.files.content(job.training_file).text == (job_file.parent / "train.jsonl").read_text()


def test_a_clone_asks_for_what_was_asked_for(client: Regraft, job_file: Path) -> None:
    job = client.jobs.submit(job_file)

    clone = client.jobs.clone(job.id, set=["hyperparameters.batch_size=4", 'metadata={"try": "2"}'])

    first, second = (untyped(one.to_dict()["method"])["reinforcement"] for one in (job, clone))
    assert clone.id != job.id
    assert (clone.training_file, clone.seed, clone.metadata) == (job.training_file, 7, {"try": "2"})
    assert second["hyperparameters"] == first["hyperparameters"] | {"batch_size": 4}


def test_a_clone_never_sends_a_mask_for_a_secret(house: House, client: Regraft) -> None:
    secret = {
        "type": "endpoint",
        "name": "e",
        "url": "https://graders.example/",
        "headers": {"key": "secret"},
    }
    job_id = house.job(body={"grader": secret, "hyperparameters": {}})

    with pytest.raises(regraft.InvalidRequestFile, match=r"does not show grader\.headers\.key"):
        client.jobs.clone(job_id)


def test_metrics_are_rows_without_pandas(house: House, client: Regraft) -> None:
    job_id = house.job(status="running")
    house.step(job_id, 1, 2, 0.25)

    assert [step["train_mean_reward"] for step in client.jobs.metrics(job_id, frame=False)] == [0.25]


def test_metrics_are_a_frame_where_pandas_is(
    house: House, client: Regraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for pandas: all that is asked of it."""

    class Frame:
        def __init__(self, rows: Any) -> None:
            self.rows = rows
            self.index: list[Any] | None = None

        def set_index(self, name: str) -> Any:
            self.index = [row[name] for row in self.rows]
            return self

    monkeypatch.setitem(sys.modules, "pandas", type("pandas", (), {"json_normalize": Frame}))
    job_id = house.job(status="running")
    house.step(job_id, 1, 2, 0.25)

    assert client.jobs.metrics(job_id).index == [1]


def test_a_grader_is_tested_with_what_is_expected_of_it(client: Regraft, tmp_path: Path) -> None:
    cases = tmp_path / "cases.jsonl"
    rows = [
        {"sample": "4", "answer": "4", "expect": 1},
        {"sample": "5", "answer": "4", "expect": 1},
        {"sample": "5"},
    ]
    cases.write_text("".join(json.dumps(row) + "\n" for row in rows))

    right, wrong, broken = client.graders.test(GRADER, cases)

    assert (right.passed, right.reward) == (True, 1.0)
    assert (wrong.passed, wrong.reward, wrong.errors) == (False, 0.0, [])
    assert (broken.passed, broken.errors, broken.line) == (False, ["invalid_variable_error"], 3)


def test_a_server_that_is_too_old_is_told_apart(client: Regraft, job_file: Path) -> None:
    class Old(Regraft):
        """As a server without the URL answers."""

        def post(self, path: Any, **options: Any) -> Any:
            return super().post("/regraft/none" if path.startswith("/regraft/") else path, **options)

    old = Old(base_url=client.base_url, api_key=client.api_key)

    with pytest.raises(regraft.NotSupportedByServer, match="cannot estimate jobs: it is older than"):
        old.estimate(job_file)
    with pytest.raises(regraft.NotSupportedByServer, match="cannot preview jobs: it is older than"):
        old.preview(job_file)
    with pytest.raises(regraft.NotSupportedByServer, match="cannot profile files: it is older than"):
        old.profile("file-1")


def test_an_estimate_says_how_large_a_job_would_be_and_creates_none(client: Regraft, job_file: Path) -> None:
    estimate = client.estimate(job_file)

    assert (estimate.training_rows, estimate.validation_rows, estimate.n_epochs) == (4, 4, 3)
    assert estimate.estimate is None and estimate.reason  # nothing has run here yet
    assert list(client.jobs.list()) == []


def test_a_file_is_profiled(client: Regraft, make_async: Callable[[], AsyncRegraft], job_file: Path) -> None:
    body = client.jobs.prepare(job_file)
    file_id, grader = body["training_file"], body["method"]["reinforcement"]["grader"]

    async def use(client: AsyncRegraft) -> regraft.FileProfile:
        async with client:
            return await client.profile(file_id, validation_file=body["validation_file"], grader=grader)

    for profile in (
        client.profile(file_id, validation_file=body["validation_file"], grader=grader),
        asyncio.run(use(make_async())),
    ):
        assert (profile.method, profile.rows, profile.duplicates.rows) == ("reinforcement", 4, 0)
        assert profile.overlap is not None and (profile.overlap.rows, profile.overlap.shared) == (4, 4)
        assert profile.grader is not None
        assert [(read.path, read.missing.rows) for read in profile.grader.paths] == [("item.answer", 0)]
        assert [field.name for field in profile.fields] == ["messages", "answer"]


def test_a_preview_has_the_models_answers_and_creates_none(
    client: Regraft, make_async: Callable[[], AsyncRegraft], job_file: Path, model: None
) -> None:
    async def use(client: AsyncRegraft) -> regraft.PreviewReport:
        async with client:
            return await client.preview(job_file, rows=2, samples=2)

    told: list[str] = []

    async def use_with_progress(client: AsyncRegraft) -> Any:
        async with client:
            return await client.preview(
                job_file, rows=2, samples=2, progress=lambda now: told.append(now.phase)
            )

    previews = (
        client.preview(job_file, rows=2, samples=2),
        asyncio.run(use(make_async())),
        client.preview(job_file, rows=2, samples=2, progress=lambda now: told.append(now.phase)),
        asyncio.run(use_with_progress(make_async())),
    )
    assert told.count("loading") >= 2
    for preview in previews:
        assert (preview.answers, preview.passed, preview.training_rows) == (4, 2, 4)
        assert preview.pass_rate is not None
        assert preview.pass_rate.low < preview.pass_rate.expected == 0.5 < preview.pass_rate.high
        assert sorted(present(reward) for reward in preview.prompts[0].rewards) == [0.0, 1.0]
        assert [one.group_size for one in preview.signal if not one.at_least] == [2]
        assert preview.verdict == "good" and preview.recommendation
    assert client.preview(job_file).answers == 32  # all four rows, eight samples each
    assert list(client.jobs.list()) == []


def test_stored_previews_are_listed_read_and_deleted(
    client: Regraft, make_async: Callable[[], AsyncRegraft], job_file: Path, model: None
) -> None:
    body = client.jobs.prepare(job_file)
    made = client.previews.wait(client.previews.create(body, rows=2, samples=2).id)

    async def use(client: AsyncRegraft) -> regraft.Preview:
        async with client:
            again = await client.previews.wait((await client.previews.create(body, rows=2, samples=2)).id)
            assert [one.id async for one in client.previews.list(limit=1)] == [again.id, made.id]
            assert len([one async for one in client.previews.answers(again.id, limit=3)]) == 4
            assert (await client.previews.cancel(again.id)).status == "completed"
            await client.previews.delete(again.id)
            return again

    again = asyncio.run(use(make_async()))

    assert (made.status, made.progress.of, made.answers_of) == ("completed", 4, None)
    assert again.answers_of == made.id  # nothing but its id is new, so no answer is sampled twice
    assert [one.id for one in client.previews.list()] == [made.id]
    answers = list(client.previews.answers(made.id, limit=3))
    assert [(one.line, one.member) for one in answers][:2] == [(answers[0].line, 0), (answers[0].line, 1)]
    assert sorted(present(one.score) for one in answers) == [0.0, 0.0, 1.0, 1.0]
    assert client.previews.cancel(made.id).status == "completed"
    client.previews.delete(made.id)
    assert list(client.previews.list()) == []


def test_a_preview_that_fails_raises_the_error_that_a_response_would(
    client: Regraft, make_async: Callable[[], AsyncRegraft], job_file: Path, house: House
) -> None:
    async def refused(request: Asked) -> JSONResponse:
        return JSONResponse(
            {"error": {"message": "too long", "type": "x", "param": None, "code": "long"}}, 400
        )

    app = FastAPI()
    app.get("/healthz")(lambda: {"status": "ok"})
    app.post("/v1/chat/completions")(refused)

    async def use(client: AsyncRegraft) -> None:
        async with client:
            await client.preview(job_file)

    with serving(app) as port:
        house.upstream.url = f"http://127.0.0.1:{port}/v1"
        with pytest.raises(openai.BadRequestError, match="line 1: too long"):
            client.preview(job_file)
        with pytest.raises(openai.BadRequestError, match="line 1: too long"):
            asyncio.run(use(make_async()))


def test_the_async_client_can_do_the_same(
    house: House, make_async: Callable[[], AsyncRegraft], job_file: Path
) -> None:
    async def use(client: AsyncRegraft) -> tuple[FineTuningJob, FineTuningJob, float]:
        async with client:
            job = await client.jobs.submit(job_file, set=["seed=9"])
            clone = await client.jobs.clone(job.id)
            (test,) = await client.graders.test(GRADER, [{"sample": "4", "answer": "4"}])
            with pytest.raises(regraft.JobNotFound):
                await client.jobs.retrieve("ftjob-none")
            return job, clone, test.reward

    job, clone, reward = asyncio.run(use(make_async()))

    assert (job.seed, clone.seed, clone.training_file) == (9, 9, job.training_file)
    assert reward == 1.0


def test_a_create_that_is_sent_again_says_so(house: House, job_file: Path) -> None:
    """The server needs the same key on both to make one job."""
    keys = []

    class Noting(Regraft):
        def _prepare_request(self, request: "Request") -> None:
            if request.url.path.endswith("/fine_tuning/jobs"):
                keys.append(request.headers["idempotency-key"])

    for _ in range(2):
        Noting(base_url=house.base_url, api_key=house.key).jobs.submit(job_file)

    assert len(set(keys)) == 2  # one each, made anew


def test_importing_it_imports_nothing_heavy() -> None:
    import subprocess

    code = "import sys, regraft; print(sorted({'openai', 'pydantic', 'httpx2'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_its_types_are_there_without_another_import() -> None:
    import subprocess

    code = "import regraft; print(regraft.types.Verdict is regraft.Verdict)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "True\n"


def test_everything_it_promises_is_there() -> None:
    for name in regraft.__all__:
        assert getattr(regraft, name) is not None
    assert set(dir(regraft)) == set(regraft.__all__)
    assert len(ROWS) == 4


def test_the_asynchronous_client_has_ledgers(make_async: Callable[[], AsyncRegraft], house: House) -> None:
    job_id = house.job()
    house.step(job_id, 1, 2, 0.5, learned_tokens=8)

    async def read() -> tuple[int, str]:
        async with make_async() as client:
            found = await client.jobs.ledger(job_id)
            return found.tokens, await client.jobs.ledger_csv(job_id)

    assert asyncio.run(read()) == (8, "step,bucket,tokens,gpu_seconds,cost,currency\n1,learned,8,0.0,,\n")


def test_the_asynchronous_client_has_pipelines(make_async: Callable[[], AsyncRegraft]) -> None:
    async def use() -> None:
        async with make_async() as client:
            rows = (
                b'{"messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}]}\n'
            )
            file = await client.files.create(file=("rows.jsonl", rows), purpose="fine-tune")
            stages = [{"name": "m", "mix": {"files": [{"file": file.id}]}}]
            made = await client.pipelines.create(stages=stages, name="one")
            submitted = await client.pipelines.submit({"stages": stages})

            assert (await client.pipelines.retrieve(made.id)).name == "one"
            assert [one.id async for one in client.pipelines.list()] == [submitted.id, made.id]
            assert (await client.pipelines.pause(made.id)).status == "paused"
            assert (await client.pipelines.wait(made.id)).status == "paused"
            assert (await client.pipelines.resume(made.id)).status == "running"
            assert (await client.pipelines.cancel(made.id)).status == "cancelled"
            assert (await client.pipelines.retry(made.id)).status == "running"
            assert (await client.pipelines.clone(made.id, name="two")).cloned_from == made.id

    asyncio.run(use())


def two_files(folder: Path, model: str) -> dict[str, Any]:
    """A pipeline of two local files and a stage that samples `model`."""
    rows = [{"messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}]}]
    for name in ("one.jsonl", "two.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixed = {"files": [{"file": str(folder / name)} for name in ("one.jsonl", "two.jsonl")]}
    stages: list[dict[str, Any]] = [{"name": "m", "mix": mixed}]
    if model:
        stages.append({"name": "s", "sample": {"model": model, "file": "{{stages.m.file}}"}})
    return {"stages": stages}


def test_a_refused_pipeline_leaves_none_of_its_files_behind(client: Regraft, tmp_path: Path) -> None:
    with pytest.raises(regraft.ModelNotFound):
        client.pipelines.submit(two_files(tmp_path, model="missing"))

    assert list(client.files.list()) == []


def test_a_pipeline_whose_second_file_is_not_uploaded_leaves_none_behind(
    house: House, tmp_path: Path
) -> None:
    sent: list[str] = []

    class Broken(Regraft):
        def _prepare_request(self, request: "Request") -> None:
            if request.method == "POST":
                sent.append(request.url.path)
            if len(sent) == 2:
                sent.append("reported")
                raise openai.APIConnectionError(request=request)

    broken = Broken(base_url=house.base_url, api_key=house.key, max_retries=0)

    with pytest.raises(openai.APIConnectionError):
        broken.pipelines.submit(two_files(tmp_path, model=""))

    assert sent == ["/v1/files", "/v1/files", "reported"]
    assert list(broken.files.list()) == []


def test_a_created_pipeline_keeps_its_files(client: Regraft, tmp_path: Path) -> None:
    client.pipelines.submit(two_files(tmp_path, model=""))

    assert len(list(client.files.list())) == 2


def test_an_outage_on_creation_deletes_no_file_of_a_pipeline_that_may_exist(
    house: House, tmp_path: Path
) -> None:
    class Broken(Regraft):
        def _prepare_request(self, request: "Request") -> None:
            if request.url.path.endswith("/pipelines"):
                raise openai.APIConnectionError(request=request)

    broken = Broken(base_url=house.base_url, api_key=house.key, max_retries=0)

    with pytest.raises(openai.APIConnectionError):
        broken.pipelines.submit(two_files(tmp_path, model=""))

    assert len(list(broken.files.list())) == 2


def test_the_asynchronous_client_deletes_the_files_of_a_refused_pipeline(
    make_async: Callable[[], AsyncRegraft], tmp_path: Path
) -> None:
    async def use() -> list[str]:
        async with make_async() as client:
            with pytest.raises(regraft.ModelNotFound):
                await client.pipelines.submit(two_files(tmp_path, model="missing"))
            return [file.id async for file in client.files.list()]

    assert asyncio.run(use()) == []
