"""validating_files: what a user reads when a file is wrong."""

import asyncio
import errno
import io
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from core.database.engine import WakeMessage, Work
from core.database.tables import Attempt, Checkpoint, File, Job
from core.hardware import GpuClass
from core.jobs import lifecycle
from core.registry import Registry
from core.results import export
from core.settings import Settings
from core.storage.datasets import Example
from core.storage.store import CHUNK_BYTES, FolderBlobs, StoreEmpty
from core.telemetry import logs, tracing
from core.tenancy import tenants
from graders.backends import Backends
from graders.judge.judges import JudgeModel
from graders.spec import parse_grader
from graders.types import Grade, Item, Sample
from tests.fakes import NeverGrades
from tests.graders.servers import serving, verdict
from tests.hardware import hardware_file
from tests.present import present
from tests.worker.conftest import GRADER, Bench
from tests.worker.test_memory import QWEN3_14B
from worker.rollout.rows import read_rows
from worker.supervisor.validation import dry_run, validate_next

GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "say red"}], "answer": "red"}

HELD_OUT = {"messages": [{"role": "user", "content": "say blue"}], "answer": "red"}


@pytest.fixture
def validate(bench: Bench, tmp_path: Path) -> Callable[..., tuple[Job, list[WakeMessage] | None]]:
    """Validate a job over two files made of the given lines; returns the job and whom to wake."""

    def run(
        train: Any,
        valid: tuple[dict[str, Sequence[Any]]] = (HELD_OUT,),
        grader: Mapping[str, Any] = GRADER,
        blobs: FolderBlobs = bench.blobs,
        backends: Backends = Backends.none(),
        response_format: Any = None,
        tools: Sequence[str] = (),
        shadow: Mapping[str, Any] | None = None,
        stopping: threading.Event | None = None,
        **changes: Any,
    ) -> tuple[Job, list[WakeMessage] | None]:
        with bench.database.write() as session:
            ids = []
            for name, lines in (("train", train), ("valid", valid)):
                text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
                info = bench.blobs.put_bytes(f"files/{name}", text.encode())
                file = File(
                    project_id=bench.project.id,
                    filename=f"{name}.jsonl",
                    purpose="fine-tune",
                    bytes=info.size,
                    sha256=info.sha256,
                    blob_key=info.key,
                )
                session.add(file)
                session.flush()
                ids.append(file.id)
            job = session.get_one(Job, bench.job().seq)
            job.training_file, job.validation_file = ids
            job.status, job.lease_expires_at = "validating_files", None
            job.body = {**job.body, "grader": dict(grader), "response_format": response_format}
            if shadow is not None:
                job.body |= {"shadow_grader": dict(shadow)}
            if tools:
                job.body |= {"tools": [{"name": name, "server_url": "https://t.example"} for name in tools]}
        settings = Settings(data_dir=tmp_path, **changes)
        wakes = validate_next(settings, bench.database, blobs, backends, "tester", stopping=stopping)
        return bench.job(), wakes

    return run


def test_good_files_queue_the_job_and_wake_its_workers(
    bench: Bench, validate: Callable[..., tuple[Any, list[WakeMessage] | None]]
) -> None:
    job, wakes = validate([GOOD, GOOD])

    assert job.status == "queued"
    assert wakes == [("regraft.run_next", "gpu.cpu", job.id)]
    assert "Files validated, moving job to queued state" in bench.events()


def test_bad_lines_fail_the_job_and_are_named(
    validate: Callable[..., tuple[Any, list[WakeMessage] | None]],
) -> None:
    job, wakes = validate([GOOD, "{oops", GOOD, {"messages": []}])

    assert (job.status, wakes) == ("failed", [])
    assert job.error["code"] == "invalid_training_file"
    assert job.error["param"] == "training_file"
    assert job.training_file in job.error["message"]
    assert "line 2" in job.error["message"]
    assert "line 4" in job.error["message"]


CALLS = {
    "type": "string_check",
    "name": "calls",
    "operation": "eq",
    "input": "{{sample.output_tools[0].function.name}}",
    "reference": "{{item.answer}}",
}
TOOLS = {"tools": [{"type": "function", "function": {"name": "red"}}]}
OTHER = {"tools": [{"type": "function", "function": {"name": "blue"}}]}


def test_a_grader_of_calls_needs_a_row_that_has_tools(
    validate: Callable[..., tuple[Any, list[WakeMessage] | None]],
) -> None:
    job, wakes = validate([GOOD], grader=CALLS)

    assert (job.status, wakes) == ("failed", [])
    assert (job.error["code"], job.error["param"]) == ("invalid_grader", "method.reinforcement.grader")
    assert "no row of the training file has tools" in job.error["message"]


def test_a_shadow_grader_is_checked_as_the_grader_and_named_by_its_own_path(
    bench: Bench, validate: Callable[..., tuple[Any, list[WakeMessage] | None]]
) -> None:
    job, _ = validate([GOOD], shadow=CALLS)

    assert (job.error["code"], job.error["param"]) == ("invalid_grader", "method.reinforcement.shadow_grader")


def test_a_shadow_grader_that_reads_a_field_no_validation_row_has_fails_the_job(
    validate: Callable[..., tuple[Any, list[WakeMessage] | None]],
) -> None:
    job, _ = validate([GOOD], shadow=GRADER | {"reference": "{{item.anwser}}"})

    assert (job.error["code"], job.error["param"]) == ("invalid_grader", "method.reinforcement.shadow_grader")
    assert job.error["message"].startswith("Line 1 of the validation file: the grader reads {{item.anwser}}")


def test_a_shadow_grader_that_scores_all_replies_alike_warns(
    bench: Bench, validate: Callable[..., tuple[Any, list[WakeMessage] | None]]
) -> None:
    validate([GOOD], shadow=GRADER | {"input": "same", "reference": "same"})

    assert any(message.startswith("Shadow grader: ") for message in bench.events("warn"))


def test_a_grader_of_episodes_needs_a_job_with_tools(
    validate: Callable[..., tuple[Any, list[WakeMessage] | None]],
) -> None:
    grader = CALLS | {"input": "{{sample.stop}}"}

    job, _ = validate([GOOD | TOOLS], grader=grader)

    assert job.error["message"].endswith(
        "reads sample.stop, which is null in a job without 'tools' or 'environment'."
    )


def test_replies_to_rows_with_tools_warn_of_nothing_because_the_right_calls_are_not_known(
    bench: Bench, validate: Callable[..., tuple[Any, list[WakeMessage] | None]]
) -> None:
    job, _ = validate([GOOD | TOOLS], grader=CALLS)

    assert job.status == "queued"
    assert bench.events("warn") == []


def test_rows_with_the_messages_of_a_training_row_and_other_tools_are_held_out(
    bench: Bench, validate: Callable[..., tuple[Any, list[WakeMessage] | None]]
) -> None:
    validate([GOOD], [GOOD | TOOLS])

    assert bench.events("warn") == []


@pytest.mark.parametrize(
    ("train", "valid", "similar"),
    [
        ("What is 2.5 - 1?", "what  is 2.5 - 1", True),
        ('Say "no", please.', "Say no please", True),
        ("Who was Édith Piaf?", "who was édith piaf", True),
        ("Read\tthis:\r\nStop!", "Read this stop", True),
        ("What is 2.5 - 1?", "What is 25 - 1?", False),
        ("What is 4 * 2?", "What is 4 / 2?", False),
    ],
)
def test_validation_rows_that_repeat_a_training_row_in_other_letters_are_counted(
    bench: Bench,
    validate: Callable[..., tuple[Any, list[WakeMessage] | None]],
    train: str,
    valid: str,
    similar: bool,
) -> None:
    rows = [[{"messages": [{"role": "user", "content": text}], "answer": "a"}] for text in (train, valid)]

    validate(*rows)

    warned = [one for one in bench.events("warn") if "and 1 more differ from one only in case, spaces" in one]
    assert bool(warned) is similar


@pytest.mark.parametrize(
    ("train", "valid", "tools", "param", "problem"),
    [
        ([GOOD, GOOD | TOOLS], [HELD_OUT], ["blue"], "training_file", "Line 2 has the function 'red'"),
        ([GOOD | TOOLS], [HELD_OUT | OTHER], ["red"], "validation_file", "Line 1 has the function 'blue'"),
        (
            [GOOD | TOOLS],
            [HELD_OUT],
            ["red", "blue"],
            "method.reinforcement.tools[1].name",
            "The job has the tool 'blue', and no row",
        ),
    ],
)
def test_the_tools_of_a_job_are_the_functions_of_its_rows(
    validate: Callable[..., tuple[Any, list[WakeMessage] | None]],
    train: list[Any],
    valid: list[Any],
    tools: list[str],
    param: str,
    problem: str,
) -> None:
    job, _ = validate(train, valid, tools=tools)

    assert (job.status, job.error["param"]) == ("failed", param)
    assert job.error["message"].startswith(problem)


@pytest.mark.parametrize("schema", [{"type": "dict"}, {"properties": {"x": {"pattern": "\\p{L}+"}}}])
def test_the_functions_of_a_job_with_tools_need_schemas_that_can_be_applied(
    validate: Callable[..., tuple[Any, list[WakeMessage] | None]], schema: dict[str, Any]
) -> None:
    job, _ = validate([GOOD | TOOLS, GOOD | _red(schema)], tools=["red"])

    assert job.error["param"] == "training_file"
    assert job.error["message"].startswith("Line 2: tools[0].function.parameters is not a JSON schema: ")


def test_a_schema_that_no_call_is_checked_with_may_be_of_any_kind(
    validate: Callable[..., tuple[Any, list[WakeMessage] | None]],
) -> None:
    job, _ = validate([GOOD | _red({"type": "dict"})])

    assert job.error is None


def _red(schema: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "red", "parameters": schema}}]}


@pytest.mark.parametrize("file", ["training_file", "validation_file"])
def test_answers_to_rows_with_tools_cannot_have_a_response_format(
    validate: Callable[..., tuple[Any, list[WakeMessage] | None]], file: str
) -> None:
    with_tools = [COMPLIANT, COMPLIANT | TOOLS]
    files = (with_tools, [HELD_OUT]) if file == "training_file" else ([COMPLIANT], with_tools)

    job, _ = validate(*files, response_format=YES_OR_NO)

    assert (job.status, job.error["param"]) == ("failed", "method.reinforcement.response_format")
    assert job.error["message"].startswith(f"Line 2 of the {file} has tools")


@pytest.mark.parametrize("file", ["training_file", "validation_file"])
def test_tools_need_a_chat_template_that_has_a_place_for_them(
    validate: Callable[..., tuple[Any, list[WakeMessage] | None]],
    tiny_model: Path,
    tmp_path: Path,
    file: str,
) -> None:
    models = tmp_path / "models.toml"
    models.write_text(f'[models.tiny]\npath = "{tiny_model}"\n')
    train, valid = [GOOD, GOOD | TOOLS], [HELD_OUT, HELD_OUT | TOOLS]

    job, wakes = (
        validate(train, models_file=models)
        if file == "training_file"
        else validate([GOOD], valid, models_file=models)
    )

    assert (job.status, wakes) == ("failed", [])
    assert job.error["param"] == file
    assert job.error["message"].startswith("Line 2 has tools, and the chat template of tiny has no place")
    assert "chat_template" in job.error["message"]
    assert "tool_parser" in job.error["message"]


def test_a_file_that_is_missing_from_an_empty_store_fails_no_job(
    bench: Bench, validate: Callable[..., tuple[Any, list[WakeMessage] | None]], tmp_path: Path
) -> None:
    """The store is another one, or is not mounted: the validation, or the run, tries again later."""
    empty = FolderBlobs(tmp_path / "not mounted")

    job, wakes = validate([GOOD], blobs=empty, patience_seconds=0.0)

    assert (job.status, job.lease_expires_at, job.failures, wakes) == ("validating_files", None, 1, [])
    assert "interrupted: the blob store was unavailable for 0 s" in bench.events("warn")[-1]
    with pytest.raises(StoreEmpty):
        read_rows(bench.attempt(blobs=empty))


class AwayBlobs(FolderBlobs):
    """Fails with each of some errors, and then works."""

    def __init__(self, root: Path, *errors: Exception) -> None:
        super().__init__(root)
        self.errors = list(errors)

    def open(self, key: str, *, chunk_size: int = CHUNK_BYTES) -> Iterator[bytes]:
        if self.errors:
            raise self.errors.pop()
        return super().open(key, chunk_size=chunk_size)


def test_an_outage_during_the_validation_is_waited_for_and_an_event(
    bench: Bench, validate: Callable[..., tuple[Any, list[tuple[str, str]] | None]]
) -> None:
    away = AwayBlobs(bench.tmp_path / "blobs", ConnectionResetError("cut"), OSError(errno.EMFILE, "Too many"))

    job, _ = validate([GOOD], blobs=away)

    assert (job.status, job.failures, away.errors) == ("queued", 0, [])
    assert bench.events("warn")[-2] == "The validation waits for the file descriptors."
    assert "The network was unavailable" in bench.events("warn")[-1]


def test_a_worker_that_stops_during_an_outage_leaves_the_job_to_another_one(
    bench: Bench, validate: Callable[..., tuple[Any, list[WakeMessage] | None]], tmp_path: Path
) -> None:
    stopping = threading.Event()
    stopping.set()

    job, wakes = validate([GOOD], blobs=FolderBlobs(tmp_path / "not mounted"), stopping=stopping)

    assert (job.status, job.lease_expires_at, job.failures, wakes) == ("validating_files", None, 0, [])
    assert bench.events()[-1] == "Validation interrupted, it will start over"


def test_a_models_file_that_the_operator_has_broken_puts_the_job_off(
    bench: Bench, validate: Callable[..., tuple[Job, list[tuple[str, str]] | None]], tmp_path: Path
) -> None:
    """The API keeps the earlier content, so the job was accepted."""
    models = tmp_path / "models.toml"
    models.write_text("[models.tiny\n")

    job, wakes = validate([GOOD], models_file=models)

    assert (job.status, job.lease_expires_at, job.failures, wakes) == ("validating_files", None, 0, [])
    assert f"Fine-tuning job waits: {models}" in bench.events("warn")[-1]


def test_a_validation_that_fails_for_an_unknown_reason_ends_its_attempt_with_that_reason(
    bench: Bench, validate: Callable[..., tuple[Job, list[tuple[str, str]] | None]]
) -> None:
    """Otherwise its lease would expire, and the reason would be that the worker stopped answering."""
    faulty = AwayBlobs(bench.tmp_path / "blobs", KeyError("answer"))

    job, wakes = validate([GOOD], blobs=faulty)

    assert (job.status, job.lease_expires_at, job.failures, wakes) == ("validating_files", None, 1, [])
    assert "the validation failed: KeyError: 'answer'" in bench.events("warn")[-1]


def test_a_file_that_is_missing_from_a_store_with_others_fails_the_job(
    bench: Bench, validate: Callable[..., tuple[Any, list[WakeMessage] | None]], tmp_path: Path
) -> None:
    store = FolderBlobs(tmp_path / "another copy")
    store.put_bytes("projects/p/files/other", b"x")

    job, _ = validate([GOOD], blobs=store)

    assert (job.status, job.error["code"]) == ("failed", "invalid_training_file")


def test_the_validation_file_is_named_when_it_is_the_bad_one(
    validate: Callable[..., tuple[Any, list[WakeMessage] | None]],
) -> None:
    job, _ = validate([GOOD], [{"messages": [{"role": "assistant", "content": "red"}], "answer": "red"}])

    assert job.error["param"] == "validation_file"
    assert "line 1" in job.error["message"]


def test_a_field_that_the_grader_reads_must_be_in_every_row(
    validate: Callable[..., tuple[Any, list[WakeMessage] | None]],
) -> None:
    job, _ = validate([GOOD, {"messages": GOOD["messages"]}])

    assert "line 2: the grader reads {{item.answer}}, which this row does not have" in job.error["message"]


def test_a_judge_that_this_machine_does_not_know_yet_is_waited_for_and_then_fails_the_job_with_the_reason(
    bench: Bench, validate: Callable[..., tuple[Any, list[WakeMessage] | None]]
) -> None:
    """The API's copy of the graders file may be newer."""
    judge = {"type": "score_model", "name": "j", "model": "m", "input": [{"role": "user", "content": "?"}]}

    job, wakes = validate([GOOD], grader=judge)
    assert (job.status, job.failures, wakes) == ("validating_files", 0, [])
    assert "REGRAFT_GRADERS_FILE" in bench.events("warn")[-1]
    with bench.database.write() as session:
        session.execute(update(Attempt).values(started_at=Attempt.started_at - Settings().patience_seconds))
        session.execute(update(Job).values(next_run_at=0))
    job, wakes = validate([GOOD], grader=judge)

    assert (job.status, job.error["code"], wakes) == ("failed", "invalid_grader", [])
    assert "REGRAFT_GRADERS_FILE" in job.error["message"]


def test_an_empty_file_says_so(
    validate: Callable[..., tuple[Any, list[WakeMessage] | None]],
) -> None:
    job, _ = validate([])

    assert "empty" in job.error["message"]


def test_a_file_deleted_in_between_fails_the_job(
    bench: Bench, validate: Callable[..., tuple[Any, list[WakeMessage] | None]]
) -> None:
    with bench.database.write() as session:
        job = session.get_one(Job, bench.job().seq)
        job.status, job.lease_expires_at = "validating_files", None

    validate_next(Settings(data_dir=bench.tmp_path), bench.database, bench.blobs, Backends.none(), "tester")

    assert "was deleted before it could be read" in present(bench.job().error)["message"]


class Slow(FolderBlobs):
    """Reads for so long that the job is cancelled meanwhile."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench.tmp_path / "blobs")
        self.bench = bench

    def open(self, key: str, *, chunk_size: int = CHUNK_BYTES) -> Iterator[bytes]:
        with self.bench.database.write() as session:
            lifecycle.cancel(Work(session), session.get_one(Job, self.bench.job().seq))
        return super().open(key, chunk_size=chunk_size)


def test_what_is_logged_meanwhile_says_of_which_job(
    bench: Bench, validate: Callable[..., tuple[Any, list[WakeMessage] | None]]
) -> None:
    stream = io.StringIO()
    handler = logs.handler("json", stream)
    log = logging.getLogger("worker.supervisor.validation")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        _, wakes = validate([GOOD], blobs=Slow(bench))
    finally:
        log.removeHandler(handler)

    [line] = map(json.loads, stream.getvalue().splitlines())
    assert wakes == []
    assert line["message"].endswith("was cancelled or claimed by another worker during file validation")
    assert line["job_id"] == bench.claim.job_id
    assert line["attempt"] == bench.claim.epoch + 1


def test_it_is_an_attempt_in_the_jobs_trace(
    bench: Bench, validate: Callable[..., tuple[Any, list[WakeMessage] | None]]
) -> None:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    with tracing.exported("", "test", collector := memory.InMemorySpanExporter()):
        validate([GOOD])
    validation, attempt = collector.get_finished_spans()

    assert (validation.name, attempt.name) == ("validation", "attempt")
    assert validation.parent.span_id == attempt.context.span_id
    assert attempt.attributes["regraft.job_id"] == bench.claim.job_id


def test_nothing_to_validate_is_no_work(bench: Bench) -> None:
    assert (
        validate_next(
            Settings(data_dir=bench.tmp_path), bench.database, bench.blobs, Backends.none(), "tester"
        )
        is None
    )


def test_a_grader_that_cannot_tell_a_right_reply_from_an_empty_one_is_warned_of(
    bench: Bench, validate: Callable[..., tuple[Any, list[WakeMessage] | None]]
) -> None:
    # A slip: it compares the row's answer with itself.
    job, wakes = validate([GOOD, GOOD], grader=GRADER | {"input": "{{item.answer}}"})

    assert job.status == "queued"
    assert wakes
    [warning] = bench.events("warn")
    assert "the same score (1)" in warning


def test_a_grader_that_can_is_not(
    bench: Bench, validate: Callable[..., tuple[Any, list[WakeMessage] | None]]
) -> None:
    validate([GOOD, GOOD])

    assert bench.events("warn") == []


def test_rows_that_pass_every_answer_are_one_warning_with_their_number(
    bench: Bench, validate: Callable[..., tuple[Any, list[tuple[str, str]] | None]]
) -> None:
    empty = GOOD | {"answer": ""}

    job, _ = validate([GOOD, empty, GOOD, empty], grader=GRADER | {"operation": "like"})

    assert job.status == "queued"
    [warning] = bench.events("warn")
    assert warning.startswith("2 of 4 training rows are doubtful. The first, line 2, has an empty reference")


def test_a_row_whose_reference_has_no_word_for_the_metric_fails_the_file(
    validate: Callable[..., tuple[Any, list[tuple[str, str]] | None]],
) -> None:
    similar = {
        "type": "text_similarity",
        "name": "close",
        "input": "{{sample.output_text}}",
        "reference": "{{item.answer}}",
        "evaluation_metric": "rouge_l",
    }

    job, _ = validate([GOOD, GOOD | {"answer": "你好"}], grader=similar)
    again, _ = validate([GOOD, GOOD | {"answer": "你好"}], grader=similar | {"tokenizer": "unicode"})

    assert job.error["code"] == "invalid_training_file"
    assert "line 2: the reference '你好' of 'close' has no word of a-z and 0-9" in job.error["message"]
    assert again.status == "queued"


def test_a_part_of_a_multi_that_scores_all_test_replies_alike_is_warned_of_by_name(
    bench: Bench, validate: Callable[..., tuple[Any, list[tuple[str, str]] | None]]
) -> None:
    inert = GRADER | {"name": "inert", "input": "{{item.answer}}"}
    multi = {"type": "multi", "name": "m", "graders": {"right": GRADER, "inert": inert}}

    job, _ = validate([GOOD, GOOD], grader=multi | {"calculate_output": "right + inert"})

    assert job.status == "queued"
    [warning] = bench.events("warn")
    assert warning.startswith("Parts of the grader gave all 4 test replies") and "'inert' (1)" in warning
    assert "'right'" not in warning


def test_what_the_judge_of_the_test_replies_uses_counts(
    bench: Bench, validate: Callable[..., tuple[Any, list[tuple[str, str]] | None]]
) -> None:
    judge = {"type": "score_model", "name": "j", "model": "wise"}
    message = {"role": "user", "content": "{{sample.output_text}}"}
    with serving(lambda path, asked: (200, verdict(1.0).body)) as url:
        backends = Backends({"wise": JudgeModel(f"{url}/v1")})
        job, _ = validate([GOOD], grader={**judge, "input": [message]}, backends=backends)

    assert job.status == "queued"
    with bench.database.read() as session:
        used = tenants.usage_since(session, bench.project.id).grader_tokens
    assert used > 0 and used % 15 == 0


def test_a_grader_that_fails_on_its_own_reference_is_warned_of() -> None:
    rows = [Example(1, GOOD["messages"], GOOD)]

    warning = asyncio.run(dry_run(NeverGrades(), parse_grader(GRADER), rows))

    assert warning == "The grader failed on 2 of 2 test replies. no opinion"


@pytest.mark.slow
def test_a_grader_whose_package_is_not_there_fails_the_job_before_it_is_queued(
    validate: Callable[..., tuple[Any, list[WakeMessage] | None]],
) -> None:
    source = "import torch\ndef grade(sample, item):\n    return 1.0\n"

    job, wakes = validate([GOOD], grader={"type": "python", "name": "p", "source": source})

    assert (job.status, wakes) == ("failed", [])
    assert (job.error["code"], job.error["param"]) == ("invalid_grader", "method.reinforcement.grader")
    assert "The grader cannot run" in job.error["message"]
    assert "No module named 'torch'" in job.error["message"]


def test_validation_rows_that_are_trained_on_are_warned_of(
    bench: Bench, validate: Callable[..., tuple[Any, list[WakeMessage] | None]]
) -> None:
    other = {"messages": [{"role": "user", "content": "say green"}], "answer": "blue"}

    validate(
        [GOOD, other],
        valid=[
            GOOD,
            {**other, "answer": "green"},
            {**GOOD, "messages": [{"role": "user", "content": "say pink"}]},
        ],
    )

    assert (
        "2 of 3 validation rows have the messages of a training row. "
        "Their rewards do not measure generalization to new prompts." in bench.events()
    )


def test_a_job_that_validates_on_its_training_file_is_warned(
    bench: Bench, validate: Callable[..., tuple[Any, list[tuple[str, str]] | None]]
) -> None:
    job, _ = validate([GOOD])
    with bench.database.write() as session:
        job = session.get_one(Job, job.seq)
        job.validation_file = job.training_file
        job.status, job.lease_expires_at = "validating_files", None

    wakes = validate_next(Settings(), bench.database, bench.blobs, Backends.none(), "tester")

    assert wakes
    assert (
        "The validation file is the training file, so validation proves nothing about new prompts."
        in bench.events()
    )


@pytest.mark.parametrize("method", ["reinforcement", "supervised"])
def test_a_model_above_8b_parameters_is_refused_before_all_its_weights_are_trained(
    bench: Bench,
    validate: Callable[..., tuple[Any, list[WakeMessage] | None]],
    tmp_path: Path,
    method: str,
) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps(QWEN3_14B))
    file = tmp_path / "models.toml"
    file.write_text(f'[models."{bench.job().model}"]\npath = "large"\ncontext = 8192\n')
    with bench.database.write() as session:
        job = session.get_one(Job, bench.job().seq)
        job.method, job.body = method, job.body | {"hyperparameters": {"advanced": {"train": "full"}}}

    job, _ = validate([GOOD], models_file=file)

    assert (job.status, job.error["code"], job.error["param"]) == ("failed", "unsupported_model", "model")
    assert job.error["message"].startswith("train 'full' is for models of at most 8B parameters")


def test_a_job_that_is_too_small_for_an_alarm_is_queued_with_a_warning(
    bench: Bench, validate: Callable[..., tuple[Any, list[WakeMessage] | None]], tmp_path: Path
) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(QWEN3_14B))
    file = tmp_path / "models.toml"
    file.write_text(f'[models."{bench.job().model}"]\npath = "small"\ncontext = 8192\n')

    with bench.database.write() as session:
        job = session.get_one(Job, bench.job().seq)
        asked = {"advanced": {"stopping": {"on_alarm": "pause"}}}
        job.body = job.body | {"hyperparameters": asked}

    job, _ = validate([GOOD], models_file=file)

    assert job.status == "queued"
    [warning] = bench.events("warn")
    assert warning.startswith(
        "The job is too small for some alarms, which cannot fire. validation_falls needs "
    )
    assert warning.endswith(" and there are 1.")


def test_a_job_that_fits_on_no_gpu_of_its_class_fails_before_it_is_queued(
    bench: Bench, validate: Callable[..., tuple[Any, list[WakeMessage] | None]], tmp_path: Path
) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps(QWEN3_14B))
    file = tmp_path / "models.toml"
    file.write_text(f'[models."{bench.job().model}"]\npath = "large"\ncontext = 8192\n')
    hardware = hardware_file(tmp_path, {"cpu": GpuClass(gpu_memory_gib=40)})

    job, wakes = validate([GOOD], models_file=file, hardware_file=hardware)

    assert (job.status, job.error["code"], job.error["param"]) == ("failed", "not_enough_memory", "model")
    assert "weights 2 x 27.5" in job.error["message"]
    assert "the GPU class `cpu` has 40.0 GiB" in job.error["message"]
    assert wakes == []


@pytest.mark.slow
def test_an_event_names_the_environment_of_python_graders(
    bench: Bench, validate: Callable[..., tuple[Any, list[WakeMessage] | None]]
) -> None:
    python = {
        "type": "python",
        "name": "py",
        "source": "def grade(sample, item):\n    return len(sample['output_text'])",
    }

    validate([GOOD, GOOD], grader=python)

    assert "Python graders run in the environment 2025-05-08" in bench.events("info")
    assert bench.events("warn") == []
    assert reproduce(bench)["grader_environments"] == ["2025-05-08"]


def reproduce(bench: Bench) -> Any:
    """reproduce.json of a checkpoint of the job."""
    bench.blobs.put_bytes("step-1/manifest.json", b'{"format": 1, "files": []}')
    with bench.database.write() as session:
        checkpoint = Checkpoint(job_id=bench.job().id, step=1, epoch=1, blob_prefix="step-1")
        session.add(checkpoint)
        session.flush()
    home = export.gather(bench.database, bench.blobs, Registry.load(None), checkpoint, None)
    return json.loads(home.texts["reproduce.json"])


@pytest.mark.slow
def test_there_is_no_such_event_without_python_graders(
    bench: Bench, validate: Callable[..., tuple[Any, list[WakeMessage] | None]]
) -> None:
    validate([GOOD, GOOD])

    assert not any("environment" in message for message in bench.events("info"))


def test_a_job_waits_for_a_machine_that_has_its_environment_and_an_event_says_so(
    bench: Bench, validate: Callable[..., tuple[Any, list[WakeMessage] | None]], tmp_path: Path
) -> None:
    python = {"type": "python", "name": "py", "source": "def grade(sample, item):\n    return 1"}

    job, wakes = validate([GOOD, GOOD], grader=python, backends=Backends({}, environments=tmp_path))

    assert (job.status, job.error, job.failures, wakes) == ("validating_files", None, 0, [])
    assert job.lease_owner is None
    [event] = [message for message in bench.events("warn") if "environment" in message]
    assert event.startswith(
        "Fine-tuning job waits: The environment '2025-05-08' of python graders is not built"
    )
    assert "regraft-server environments build 2025-05-08" in event


def verdicts(**properties: Any) -> dict[str, Any]:
    """A job's response_format in which an answer has these properties."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}


COMPLIANT = GOOD | {"compliant": "no", "explanation": "Doors must be locked."}
YES_OR_NO = verdicts(compliant={"type": "string", "enum": ["yes", "no"]}, explanation={"type": "string"})
STRUCTURED = {
    "type": "multi",
    "graders": {
        "explanation": {
            "type": "text_similarity",
            "input": "{{sample.output_json.explanation}}",
            "reference": "{{item.explanation}}",
            "evaluation_metric": "fuzzy_match",
        },
        "compliant": GRADER
        | {"input": "{{sample.output_json.compliant}}", "reference": "{{item.compliant}}"},
    },
    "calculate_output": "0.5 * compliant + 0.5 * explanation",
}
EXPLAINED = "def grade(sample, item):\n    return len(sample['output_json']['explanation']) / 100"


@pytest.mark.parametrize(
    "grader", [STRUCTURED, {"type": "python", "source": EXPLAINED}], ids=["multi", "python"]
)
@pytest.mark.slow
def test_a_grader_of_structured_answers_is_tried_on_answers_of_their_schema(
    bench: Bench,
    validate: Callable[..., tuple[Any, list[WakeMessage] | None]],
    grader: dict[str, Any],
) -> None:
    job, _ = validate(
        [COMPLIANT] * 3,
        valid=[COMPLIANT | {"messages": HELD_OUT["messages"]}],
        grader=grader,
        response_format=YES_OR_NO,
    )

    assert job.status == "queued"
    assert bench.events("warn") == []


def test_the_right_structured_answer_has_what_the_grader_compares_with() -> None:
    rows = [Example(1, GOOD["messages"], GOOD)]
    schema = verdicts(colour={"type": "string"})["json_schema"]["schema"]
    seen = Remembers()

    spec = parse_grader(GRADER | {"input": "{{sample.output_json.colour}}"})
    asyncio.run(dry_run(seen, spec, rows, schema=schema))

    assert [sample.output_json["colour"] for sample in seen.samples] == ["red", "text"]


def test_a_grader_that_reads_what_no_structured_answer_has_is_still_warned_of(
    bench: Bench, validate: Callable[..., tuple[Any, list[WakeMessage] | None]]
) -> None:
    validate(
        [COMPLIANT],
        valid=[COMPLIANT | {"messages": HELD_OUT["messages"]}],
        grader=GRADER | {"input": "{{sample.output_json.colour}}"},
        response_format=YES_OR_NO,
    )

    [warning] = bench.events("warn")
    assert warning.startswith("The grader failed on 2 of 2 test replies. sample.output_json.colour")


def test_a_schema_that_no_answer_is_found_for_is_no_reason_for_a_warning(
    bench: Bench, validate: Callable[..., tuple[Any, list[WakeMessage] | None]]
) -> None:
    form = verdicts(code={"type": "string", "pattern": "^only this 12345$"})

    job, _ = validate([GOOD], grader=GRADER | {"input": "{{sample.output_json.code}}"}, response_format=form)

    assert job.status == "queued"
    assert bench.events("warn") == []


class Remembers:
    """A grader that keeps what it was given."""

    name, type = "remembers", "fake"

    def __init__(self) -> None:
        self.samples: list[Any] = []

    async def grade(self, sample: Sample, item: Item) -> Grade:
        self.samples.append(sample)
        return Grade(float(len(self.samples)))
