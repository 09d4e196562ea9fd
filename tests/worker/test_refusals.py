"""What cannot succeed fails once, by name; what may pass by itself is tried again, and said in words."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import safetensors.torch
import torch
from sqlalchemy import select
from torch._C import OutOfMemoryError
from transformers import AutoTokenizer, LlamaForCausalLM

from core.database.tables import File, Job
from core.jobs import lifecycle, run_logs
from core.settings import Settings
from core.storage.store import BlobInfo, BlobNotFound, FolderBlobs
from tests.families.zoo import FAMILIES, Family
from tests.hyperparameters import in_groups
from tests.tiny import tiny_tokenizer
from tests.worker.conftest import Bench
from worker.assemble import assemble
from worker.child import run_attempt
from worker.model.policy import Base, Policy, load_base
from worker.refusals import (
    InvalidModel,
    ModelUnavailable,
    NotEnoughMemory,
    Refusal,
    UserMistake,
    failing_once,
)
from worker.supervise.supervisor import Supervisor

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
        *, rows: list[dict[str, Sequence[Any]]] = ROWS, hyperparameters: Any = None, **entry: Any
    ) -> Settings:
        text = "".join(f"{name} = {json.dumps(str(value))}\n" for name, value in entry.items())
        registry = tmp_path / "models.toml"
        registry.write_text(f'[models.tiny]\n{text}dtype = "float32"\ncontext = 128\n')
        info = bench.blobs.put_bytes("files/rows", "".join(json.dumps(row) + "\n" for row in rows).encode())
        with bench.database.write() as session:
            about = {
                "filename": "a",
                "purpose": "fine-tune",
                "bytes": 1,
                "sha256": info.sha256,
                "blob_key": "files/rows",
            }
            for name in ("file-a", "file-b"):
                session.add(File(id=name, project_id=bench.project.id, **about))
            job = session.scalars(select(Job)).one()
            short = {"group_size": 4, "max_completion_tokens": 4} | (hyperparameters or {})
            asked = {"batch_size": 2, "n_epochs": 1, "eval_interval": 2, "advanced": in_groups(short)}
            job.body = {"grader": GRADER, "hyperparameters": asked, "response_format": None}
        environment = {"models_file": registry, "data_dir": tmp_path / "data", "torch_threads": 1}
        for name, value in environment.items():
            monkeypatch.setenv(f"REGRAFT_{name.upper()}", str(value))
        return Settings()

    return make


@pytest.fixture
def refused(bench: Bench, queued: Callable[..., Settings], tmp_path: Path) -> Callable[..., UserMistake]:
    """The error with which one attempt at the job ends, in this process."""

    def run(**options: Any) -> UserMistake:
        settings = queued(**options)
        with pytest.raises(UserMistake) as mistake:
            asyncio.run(
                run_attempt(
                    bench.attempt(),
                    settings,
                    assemble,
                    scratch=tmp_path,
                    stop_requested=lambda: False,
                    beat=lambda: None,
                )
            )
        return mistake.value

    return run


def without_template(folder: Path) -> Path:
    tiny_tokenizer(chat_template=None).save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert AutoTokenizer.from_pretrained(folder).chat_template is None
    return folder


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
