"""What cannot succeed fails once, by name; what may pass by itself is tried again, and said in words."""

import errno
import json
import os
import queue
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest
import safetensors.torch
import torch
from sqlalchemy import select
from torch._C import OutOfMemoryError
from torch._C._distributed_c10d import FileStore
from transformers import AutoTokenizer, LlamaForCausalLM

from core.database.tables import Attempt, Job, TunedModel
from core.errors import ModelNotFound
from core.jobs import lifecycle, run_logs
from core.registry import InvalidRegistry
from core.response_format import SchemaTooLarge
from core.settings import Settings
from core.storage.disk import NoRoom
from core.storage.store import BlobInfo, BlobNotFound, FolderBlobs
from graders.backends import InvalidBackends
from graders.calls import ServerAway
from graders.environments.catalog import EnvironmentNotBuilt
from graders.sandbox.pool import SandboxBusy
from graders.spec import parse_grader
from graders.tools.episode import Episode
from graders.types import ErrorKind, Grade
from tests.families.zoo import FAMILIES, Family
from tests.hyperparameters import in_groups
from tests.present import present
from tests.tiny import tiny_tokenizer
from tests.worker.conftest import Bench
from worker import process
from worker.assemble import assemble
from worker.child import followed, run_claim, status_of
from worker.device import GpuUnusable
from worker.model.policy import Base, Policy, load_base
from worker.prepare.scorers import reward_models, teacher_model
from worker.recording import metrics
from worker.recording.alerts import require_grades
from worker.refusals import (
    InvalidModel,
    MachineLacks,
    MemoryTaken,
    ModelUnavailable,
    NoMember,
    NotEnoughMemory,
    NotKnownYet,
    Refusal,
    UnsupportedModel,
    UserMistake,
    failing_once,
    waiting_for_names,
)
from worker.supervisor.supervisor import Supervisor
from worker.training.world import World
from worker.types import Group, Prompt, Rollout

GRADER = {
    "type": "string_check",
    "name": "exact",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "eq",
}
ROWS = [
    {"messages": [{"role": "user", "content": text}], "answer": "yes"}
    for text in ("say yes", "tell me a number", "say cat", "name a bird")
]


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy, for a test to damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def queued(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    """The bench's job, waiting, on a model of the registry with these fields and hyperparameters."""

    def make(
        *,
        rows: list[dict[str, Sequence[Any]]] = ROWS,
        hyperparameters: Any = None,
        grader: Any = GRADER,
        **entry: Any,
    ) -> Settings:
        text = "".join(f"{name} = {json.dumps(str(value))}\n" for name, value in entry.items())
        registry = tmp_path / "models.toml"
        registry.write_text(f'[models.tiny]\n{text}dtype = "float32"\ncontext = 128\n')
        with bench.database.write() as session:
            bench.add_files(session, bench.blobs, rows)
            job = session.scalars(select(Job)).one()
            short = {"group_size": 4, "max_completion_tokens": 4} | (hyperparameters or {})
            asked = {"batch_size": 2, "n_epochs": 1, "eval_interval": 2, "advanced": in_groups(short)}
            job.body = {"grader": grader, "hyperparameters": asked, "response_format": None}
        environment = {"models_file": registry, "data_dir": tmp_path / "data", "torch_threads": 1}
        for name, value in environment.items():
            monkeypatch.setenv(f"REGRAFT_{name.upper()}", str(value))
        return Settings()

    return make


@pytest.fixture
def refused(bench: Bench, queued: Callable[..., Settings]) -> Callable[..., UserMistake]:
    """The error with which one attempt at the job ends, in this process."""

    def run(**options: Any) -> UserMistake:
        settings = queued(**options)
        with pytest.raises(UserMistake) as mistake:
            bench.run_job(settings)
        return mistake.value

    return run


def without_template(folder: Path) -> Path:
    tiny_tokenizer(chat_template=None).save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert AutoTokenizer.from_pretrained(folder).chat_template is None
    return folder


def test_a_full_disk_while_a_run_starts_is_no_failure_of_the_job(
    bench: Bench, queued: Callable[..., Settings], model: Path
) -> None:
    def assemble_on_a_full_disk(*parts: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(MachineLacks, match="the disk cannot be used: see the log of the worker"):
        bench.run_job(queued(path=model), assemble_on_a_full_disk)


def test_a_fleet_that_is_not_there_puts_the_job_off(
    bench: Bench, queued: Callable[..., Settings], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade may take longer than REGRAFT_PATIENCE_SECONDS, and a job has few failures."""
    queued(path=model)
    monkeypatch.setenv("REGRAFT_DATABASE_URL", str(bench.database.engine.url))
    monkeypatch.setenv("REGRAFT_BLOB_URL", str(bench.tmp_path / "blobs"))
    (bench.tmp_path / "progress").touch()

    def assemble(*parts: Any) -> NoReturn:
        raise NoMember("No sampler of tiny has answered for 600 s: it is no sampler of this version")

    line = f"{bench.claim.job_id} {bench.claim.epoch}"
    exit_status = run_claim(line, Settings(), assemble, bench.tmp_path / "progress", lambda: False)

    assert exit_status == process.PUT_OFF
    assert (bench.job().status, bench.job().failures) == ("queued", 0)
    assert "job waits: No sampler of tiny has answered for 600 s: it is no sampler" in " ".join(
        bench.events()
    )


@pytest.mark.parametrize(("hours", "status"), [(23, "running"), (25, "failed")])
def test_a_job_whose_start_no_disk_has_room_for_fails_after_a_day_with_the_sizes_and_the_setting(
    bench: Bench,
    queued: Callable[..., Settings],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    hours: int,
    status: str,
) -> None:
    queued(path=model)
    monkeypatch.setenv("REGRAFT_DATABASE_URL", str(bench.database.engine.url))
    monkeypatch.setenv("REGRAFT_BLOB_URL", str(bench.tmp_path / "blobs"))
    monkeypatch.setenv("REGRAFT_PATIENCE_SECONDS", "1")

    def assemble_on_a_full_disk(*parts: Any) -> NoReturn:
        raise NoRoom(OSError(errno.ENOSPC, "No space left on device"), model, "TMPDIR", 1 << 30)

    with bench.database.write() as session:
        [now] = lifecycle.attempts(session, bench.claim.job_id)
        reason = "its worker cannot start it: the disk cannot be used: see the log of the worker"
        for epoch, ago in ((-3, 100.0), (-2, hours), (-1, 1.0)):
            started = now.started_at - ago * 3600
            outcome = "put_off" if ago < 100 else "crashed"
            about = {"kind": "run", "worker": "w", "outcome": outcome, "reason": reason}
            session.add(
                Attempt(job_id=now.job_id, epoch=epoch, started_at=started, ended_at=started + 1, **about)
            )

    (bench.tmp_path / "progress").touch()
    line = f"{bench.claim.job_id} {bench.claim.epoch}"
    exit_status = run_claim(
        line, Settings(), assemble_on_a_full_disk, bench.tmp_path / "progress", lambda: False
    )

    job = bench.job()
    assert job.status == status
    if status == "running":
        assert exit_status == process.UNSTARTED
    else:
        assert exit_status == process.USER_MISTAKE
        assert job.error is not None and job.error["code"] == "not_enough_disk"
        assert (
            "No worker had room on its disk for 24 hours. Files of 1.0 GiB do not fit" in job.error["message"]
        )
        assert "set TMPDIR to a larger disk" in job.error["message"]


@pytest.fixture
def run_here(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], int]:
    """Run the bench's queued job in this process with this assembly. Returns the exit status."""

    def run(assembly: Any) -> int:
        monkeypatch.setenv("REGRAFT_DATABASE_URL", str(bench.database.engine.url))
        monkeypatch.setenv("REGRAFT_BLOB_URL", str(bench.tmp_path / "blobs"))
        monkeypatch.setenv("REGRAFT_PATIENCE_SECONDS", "1")
        (bench.tmp_path / "progress").touch()
        line = f"{bench.claim.job_id} {bench.claim.epoch}"
        return run_claim(line, Settings(), assembly, bench.tmp_path / "progress", lambda: False)

    return run


@pytest.fixture
def claimed(
    run_here: Callable[[Any], int], queued: Callable[..., Settings], model: Path
) -> Callable[[Exception], int]:
    """Run the bench's job in this process on a machine where the start fails. Returns the exit status."""

    def run(cause: Exception) -> int:
        def assemble_here(*parts: Any) -> NoReturn:
            raise cause

        queued(path=model)
        return run_here(assemble_here)

    return run


def test_a_run_whose_judge_stays_away_is_tried_again(
    bench: Bench, claimed: Callable[[Exception], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed job is the user's mistake, and no later attempt would be made."""
    status = claimed(ServerAway("The judge j is unavailable: HTTP 502"))

    assert (status, bench.job().status) == (process.FAILED, "running")
    assert "The judge j is unavailable: HTTP 502" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cause", "status"),
    [
        (GpuUnusable("torch finds no GPU"), process.GPU_UNUSABLE),
        (MemoryTaken("cuda"), process.RESTS),
        (InvalidRegistry("models.toml: [models.tiny]: no source"), process.RESTS),
        (InvalidBackends("graders.toml: no model 'judge' in the registry"), process.RESTS),
        (EnvironmentNotBuilt("the environment math is not built"), process.PUT_OFF),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_job_that_its_machine_cannot_run_waits_for_another_with_the_reason(
    bench: Bench, claimed: Callable[[Exception], int], cause: Exception, status: int
) -> None:
    assert claimed(cause) == status

    assert (bench.job().status, bench.job().failures) == ("queued", 0)
    assert bench.events("warn") == [f"Fine-tuning job waits: {cause}"]


class TestOfANameThatThisWorkerDoesNotKnowYet:
    """The API's copy of a file of the operator may be newer."""

    JUDGE: ClassVar = {
        "type": "score_model",
        "name": "j",
        "model": "new judge",
        "input": [{"role": "user", "content": "?"}],
    }

    @pytest.fixture(params=["model", "judge"])
    def named(
        self, request: pytest.FixtureRequest, queued: Callable[..., Settings], model: Path, tmp_path: Path
    ) -> tuple[str, str]:
        """The error that the job has at last, and the parameter of its name."""
        if request.param == "judge":
            queued(path=model, grader=self.JUDGE)
            return "invalid_grader", "method.reinforcement.grader"
        queued(path=model)
        (tmp_path / "models.toml").write_text(f'[models.old]\npath = "{model}"\n')
        return "model_not_found", "model"

    @pytest.mark.usefixtures("named")
    def test_the_job_waits_for_another_worker(self, bench: Bench, run_here: Callable[[Any], int]) -> None:
        assert run_here(assemble) == process.PUT_OFF

        assert (bench.job().status, bench.job().failures) == ("queued", 0)
        assert "a file of the operator may be older here than at the API" in bench.events("warn")[-1]

    def test_a_job_that_has_waited_for_too_long_fails_by_name(
        self, bench: Bench, run_here: Callable[[Any], int], named: tuple[str, str]
    ) -> None:
        """Also if the workers before it lacked other names."""
        with bench.database.write() as session:
            [now] = lifecycle.attempts(session, bench.claim.job_id)
            session.add(
                Attempt(
                    job_id=now.job_id,
                    epoch=-1,
                    kind="run",
                    worker="w",
                    started_at=now.started_at - 2,
                    ended_at=now.started_at - 1,
                    outcome="put_off",
                    reason=f"{NotKnownYet.PREFIX}: another name",
                )
            )

        assert run_here(assemble) == process.USER_MISTAKE

        error = present(bench.job().error)
        assert (bench.job().status, error["code"], error["param"]) == ("failed", *named)


@pytest.mark.parametrize(
    ("name", "error"), [("new-teacher", ModelNotFound), ("ft:tiny:org::abcd", UserMistake)]
)
def test_a_teacher_that_the_files_do_not_have_is_waited_for_and_a_deleted_one_is_not(
    bench: Bench, queued: Callable[..., Settings], model: Path, name: str, error: type[Exception]
) -> None:
    settings = queued(path=model)
    with bench.database.write() as session:
        job = session.scalars(select(Job)).one()
        job.method, job.body = "distillation", {**job.body, "teacher": {"model": name}}

    with pytest.raises(error, match=name):
        teacher_model(bench.attempt(), settings, lambda: None)


def test_the_base_model_of_a_reward_model_is_waited_for(
    bench: Bench, queued: Callable[..., Settings], model: Path, tmp_path: Path
) -> None:
    settings = queued(path=model)
    (tmp_path / "models.toml").write_text(f'[models.old]\npath = "{model}"\n')
    with bench.database.write() as session:
        job = session.scalars(select(Job)).one()
        session.add(
            TunedModel(
                name="ft:tiny:org::judge",
                project_id=job.project_id,
                job_id=job.id,
                checkpoint_id="ckpt",
                base_model="tiny",
            )
        )
    spec = parse_grader({"type": "reward_model", "name": "r", "model": "ft:tiny:org::judge"})

    with pytest.raises(NotKnownYet, match="tiny"), waiting_for_names():
        reward_models(bench.attempt(), spec, settings)


class FullDisk:
    """The folder of temporary files, on a disk without room for another one."""

    def __fspath__(self) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_job_waits_if_the_disk_has_no_room_for_its_folder_of_temporary_files(
    claimed: Callable[[Exception], int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", FullDisk())

    assert claimed(AssertionError("it starts")) == process.UNSTARTED
    assert "the disk cannot be used" in capsys.readouterr().err


PYTHON = {"type": "python", "name": "one", "source": "def grade(sample, item):\n    return 1.0\n"}


def test_a_job_waits_if_the_machine_has_no_process_for_the_sandbox_of_its_grader(
    bench: Bench,
    queued: Callable[..., Settings],
    model: Path,
    run_here: Callable[[Any], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def busy() -> NoReturn:
        raise SandboxBusy(errno.EAGAIN, "the sandbox of python graders cannot be set up at the moment")

    monkeypatch.setattr("graders.build.refusal", busy)
    queued(path=model, grader=PYTHON)

    status = run_here(assemble)

    assert (status, bench.job().failures) == (process.UNSTARTED, 0)
    assert "the main memory cannot be used: see the log of the worker" in capsys.readouterr().err


def test_a_job_whose_memory_others_have_taken_for_a_day_fails(
    bench: Bench, claimed: Callable[[Exception], int]
) -> None:
    cause = MemoryTaken("cuda")
    with bench.database.write() as session:
        [now] = lifecycle.attempts(session, bench.claim.job_id)
        about = {"kind": "run", "worker": "w", "outcome": "put_off", "reason": str(cause)}
        for epoch, ago in ((-2, 25), (-1, 1)):
            started = now.started_at - ago * 3600.0
            session.add(
                Attempt(job_id=now.job_id, epoch=epoch, started_at=started, ended_at=started + 1, **about)
            )

    assert claimed(cause) == process.USER_MISTAKE

    job = bench.job()
    assert job.status == "failed" and job.error is not None
    assert job.error["code"] == "not_enough_memory"
    assert "No worker had enough free memory for 24 hours: other processes use" in job.error["message"]


class RefusingOrder(World):
    """A world whose order this rank cannot carry out."""

    def __init__(self, cause: Exception, store: Path) -> None:
        super().__init__(1, 2, 1, 0, FileStore(str(store), 2))
        self.cause = cause

    def receive(self) -> NoReturn:
        raise self.cause


@pytest.mark.parametrize(
    ("cause", "code"),
    [
        (UnsupportedModel("no forward pass is right"), "unsupported_model"),
        (SchemaTooLarge("the schema has too many states"), "schema_too_large"),
    ],
)
def test_a_rank_that_alone_cannot_compute_the_job_fails_it_for_the_reason(
    bench: Bench, cause: Exception, code: str
) -> None:
    """On any machine. Rank 0 waits for it in a collective operation."""
    store = bench.tmp_path / "store"
    heard: queue.Queue[UserMistake] = queue.Queue()
    World(0, 2, 1, 0, FileStore(str(store), 2)).watch_ranks(lambda shortage: None, heard.put)

    followed(RefusingOrder(cause, store))
    mistake = heard.get(timeout=60)

    def run() -> NoReturn:
        raise mistake

    statuses = [status_of(bench.attempt(), run) for _ in range(2)]
    assert statuses == [process.USER_MISTAKE, process.LOST]
    assert bench.job().status == "failed"
    assert bench.job().error == {
        "code": code,
        "message": str(cause),
        "param": present(bench.job().error)["param"],
    }


def test_a_grader_that_breaks_on_every_validation_answer_fails_the_job_before_its_first_step(
    refused: Callable[..., UserMistake], model: Path, bench: Bench
) -> None:
    broken = "def grade(sample, item):\n    return item['anser']\n"

    error = refused(path=model, grader={"type": "python", "name": "mine", "source": broken})

    assert error.code == "grader_failed"
    assert "validation answers could be graded before the first step" in error.message
    assert "KeyError: 'anser'" in error.message
    assert [step["step"] for step in bench.steps()] == [0]


@pytest.mark.parametrize(
    ("reason", "is_broken"),
    [
        ("  File 'grader.py', line 2\n    return item['anser']\nKeyError: 'anser'\n", True),
        ("NameError: name 'foo' is not defined", True),
        ("ModuleNotFoundError: No module named 'numpyy'", True),
        ("    return sample['output_json']['x']\nKeyError: 'x'\n", False),
        ("    return table[item['answer']]\nKeyError: 'answer'\n", False),  # the row has it
        ("json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)", False),
        ("TypeError: 'NoneType' object is not subscriptable", False),
        ("no grade within 30 s", False),
    ],
)
def test_only_a_fault_of_the_grader_itself_ends_a_job_before_its_first_step(
    reason: str, is_broken: bool
) -> None:
    failed = Grade(None, reason, ErrorKind.python_grader_runtime_error)
    group = Group(Prompt(1, (1,), {"answer": "a"}), (Rollout((1,), (0.0,), "", "stop"),), (failed,))

    with pytest.raises(UserMistake) if is_broken else nullcontext():
        require_grades([group])


class TestOfAModel:
    def test_no_chat_template_says_what_to_do(self, refused: Callable[..., UserMistake], model: Path) -> None:
        error = refused(path=without_template(model))

        assert error.code == "no_chat_template"
        assert 'chat_template = "plain"' in error.message

    def test_messages_that_the_template_does_not_take_are_named_by_their_line(
        self, refused: Callable[..., UserMistake], model: Path
    ) -> None:
        template = "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}x"
        tiny_tokenizer(chat_template=template).save_pretrained(model)
        long = {**ROWS[0], "messages": [{"role": "system", "content": "x"}, *ROWS[0]["messages"]]}

        error = refused(path=model, rows=[*ROWS, long])

        assert error.code == "chat_template_failed"
        assert error.message.startswith("Line 5 of file-a: ")
        assert "one message only" in error.message

    def test_an_architecture_that_the_config_shows_to_be_unsupported(
        self, refused: Callable[..., UserMistake], tmp_path: Path
    ) -> None:
        rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        short = Family("Llama", "llama", {"max_position_embeddings": 64, "rope_parameters": rope})
        short.save(tmp_path / "short")
        (tmp_path / "short" / "model.safetensors").unlink()  # it does not come to the weights

        error = refused(path=tmp_path / "short")

        assert (error.code, error.param) == ("unsupported_model", "model")
        assert "its rotary embedding (dynamic) changes" in error.message

    def test_one_that_only_its_numbers_show_is_refused_before_any_step(
        self, bench: Bench, refused: Callable[..., UserMistake], tmp_path: Path
    ) -> None:
        [decoder] = [family for family in FAMILIES if family.title == "ModernBERT decoder"]

        error = refused(path=decoder.save(tmp_path / "decoder"))

        assert error.code == "unsupported_model"
        assert "its logits are not the output of its head" in error.message
        assert bench.steps() == []

    def test_one_that_transformers_does_not_know(
        self, refused: Callable[..., UserMistake], model: Path
    ) -> None:
        changed(model / "config.json", model_type="of_tomorrow")

        error = refused(path=model)

        assert error.code == "unsupported_model"
        assert "of_tomorrow" in error.message

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
    def test_a_damaged_file(self, refused: Callable[..., UserMistake], model: Path, name: str) -> None:
        (model / name).write_bytes(b"\x00" * 64)

        assert refused(path=model).code == "invalid_model"

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
    def test_a_missing_file(self, refused: Callable[..., UserMistake], model: Path, name: str) -> None:
        (model / name).unlink()

        assert refused(path=model).code == "invalid_model"

    def test_a_missing_folder(self, refused: Callable[..., UserMistake], tmp_path: Path) -> None:
        error = refused(path=tmp_path / "nowhere")

        assert error.code == "invalid_model"
        assert "no model at" in error.message

    def test_weights_that_are_not_there_are_not_drawn_at_random(
        self, refused: Callable[..., UserMistake], model: Path
    ) -> None:
        weights = safetensors.torch.load_file(model / "model.safetensors")
        del weights["model.layers.1.mlp.up_proj.weight"]
        safetensors.torch.save_file(weights, model / "model.safetensors", metadata={"format": "pt"})

        error = refused(path=model)

        assert error.code == "invalid_model"
        assert "model.layers.1.mlp.up_proj.weight" in error.message

    def test_weights_of_another_shape(self, refused: Callable[..., UserMistake], model: Path) -> None:
        changed(model / "config.json", intermediate_size=256)

        error = refused(path=model)

        assert error.code == "invalid_model"
        assert "config.json" in error.message


def changed(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


class TestOfItsSurroundings:
    def load(
        self, model: Path, monkeypatch: pytest.MonkeyPatch, cause: OutOfMemoryError | OSError | RuntimeError
    ) -> Base:
        def fails(*args: Any, **kwargs: Any) -> NoReturn:
            raise cause

        monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", fails)
        from core.registry import BaseModelEntry

        return load_base("tiny", BaseModelEntry(path=model, dtype="float32"), model, "cpu")

    def test_no_room_for_the_weights(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(NotEnoughMemory, match="Not enough memory for the model's weights"):
            self.load(model, monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))

    @pytest.mark.parametrize(
        "cause", [OSError(5, "Input/output error"), RuntimeError("CUDA error: an illegal memory access")]
    )
    def test_a_fault_of_the_machine_is_tried_again(
        self, model: Path, monkeypatch: pytest.MonkeyPatch, cause: OSError | RuntimeError
    ) -> None:
        with pytest.raises(type(cause)) as raised:
            self.load(model, monkeypatch, cause)
        assert not isinstance(raised.value, Refusal)

    def test_a_hub_that_does_not_answer_is_tried_again_and_told_of_in_words(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from core.registry import BaseModelEntry
        from worker.model import policy

        def fails(*args: Any, **kwargs: Any) -> NoReturn:
            raise OSError("We couldn't connect to 'https://huggingface.co' to load the files.")

        monkeypatch.setattr(policy.AutoConfig, "from_pretrained", fails)  # type: ignore[attr-defined]  # not its own
        with pytest.raises(
            ModelUnavailable, match=r"config of the model 'a/b' could not be downloaded from the hub"
        ):
            policy.read_config(policy.source_of(BaseModelEntry(hub="a/b"), Path()))


class TestOfACheckpoint:
    def test_an_adapter_that_cannot_be_read(self, make_policy: Callable[..., Policy], tmp_path: Path) -> None:
        policy = make_policy()
        policy.save(tmp_path)
        (tmp_path / "adapter_model.safetensors").write_bytes(b"\x00" * 64)

        with pytest.raises(InvalidModel, match="The adapter cannot be read"):
            policy.load(tmp_path)

    def test_an_adapter_for_other_layers(self, make_policy: Callable[..., Policy], tmp_path: Path) -> None:
        policy = make_policy()
        policy.save(tmp_path)
        weights = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
        weights.pop(next(iter(weights)))
        safetensors.torch.save_file(weights, tmp_path / "adapter_model.safetensors")

        with pytest.raises(InvalidModel, match="does not fit the model"):
            policy.load(tmp_path)


class TestOfTheFiles:
    @pytest.mark.parametrize(
        "change", [None, lambda data: data.replace(b"yes", b"yet"), lambda data: data[:-20]]
    )
    def test_a_missing_or_damaged_file_is_named(
        self,
        bench: Bench,
        refused: Callable[..., UserMistake],
        model: Path,
        change: Callable[..., Any] | None,
    ) -> None:
        """Its job fails once: another attempt would find the same."""

        class Damaging(FolderBlobs):
            def put_bytes(self, key: str, data: bytes, **options: bool) -> BlobInfo:
                info = super().put_bytes(key, data, **options)
                if key == "files/rows":
                    super().put_bytes("files/other", b"")  # a store with no blobs at all is waited for
                    self.delete(key) if change is None else super().put_bytes(key, change(data))
                return info

        bench.blobs = Damaging(bench.tmp_path / "blobs")
        error = refused(path=model)

        assert (error.code, error.param) == ("invalid_training_file", "training_file")
        assert "file-a (a)" in error.message and "Upload the file again" in error.message


@pytest.mark.parametrize("kind", Refusal.__subclasses__())
def test_every_refusal_has_a_code_of_its_own_and_is_the_jobs_error(kind: type[Refusal]) -> None:
    with pytest.raises(UserMistake) as mistake, failing_once():
        raise kind("why")

    assert (mistake.value.code, mistake.value.message) == (kind.code, "why")
    assert [other.code for other in Refusal.__subclasses__()].count(kind.code) == 1


@pytest.mark.slow  # its child process loads torch; all refusals themselves are tested above, in this process
def test_a_job_that_cannot_succeed_has_one_attempt_and_no_traceback(
    bench: Bench, queued: Callable[..., Settings], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole of it: supervisor, child process, job."""
    queued(path=without_template(model))
    monkeypatch.setenv("REGRAFT_DATABASE_URL", str(bench.database.engine.url))
    monkeypatch.setenv("REGRAFT_BLOB_URL", str(bench.tmp_path / "blobs"))
    with lifecycle.fenced(bench.database, bench.claim) as (session, job):
        lifecycle.release(session, job)

    def command(progress: Path) -> list[Any]:
        return [sys.executable, "-m", "worker.child", str(os.getpid()), str(progress)]

    Supervisor(Settings(), bench.database, bench.blobs, command).run_waiting()

    job = bench.job()
    with bench.database.read() as session:
        runs = [one for one in lifecycle.attempts(session, job.id) if one.epoch > bench.claim.epoch]
    assert job.error is not None
    assert (job.status, job.error["code"], job.failures) == ("failed", "no_chat_template", 0)
    assert len(runs) == 1
    assert "Traceback" not in job.error["message"]
    assert len(job.error["message"]) < 400
    with pytest.raises(BlobNotFound):  # the run had nothing else to say
        bench.blobs.read(run_logs.key(bench.project.id, job.id, runs[0].epoch))


def test_discarded_episodes_are_no_failures_of_the_grader() -> None:
    """A tool or the agent failed: the share of ungraded answers, by which a job fails, is of the others."""
    lost = Episode((), (), "discarded", "trace_1", "HTTP 500")
    episode = replace(Rollout((1,), (-1.0,), "", "stop"), episode=lost)
    whole = Rollout((1,), (-1.0,), "", "stop")
    no_grade = Grade(None, "the episode was discarded: HTTP 500", ErrorKind.other_error)
    group = Group(Prompt(1, (1,), {}), (episode, episode, whole), (no_grade, no_grade, Grade(1.0)))

    assert metrics.ungraded([group]) is None
    discarded = metrics.discarded([group])
    assert discarded is not None
    assert discarded.message == "2 of 3 episodes were discarded. Most often: HTTP 500"
