"""Every grader type and every error flag, as OpenAI's own client sees them."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from openai.types.fine_tuning.alpha import GraderRunResponse
from starlette.testclient import TestClient

from api.app import create_app
from core.database.engine import Database
from core.registry import Registry
from core.settings import Settings
from core.storage.store import FolderBlobs
from core.tenancy import keys
from graders.backends import Backends
from graders.sandbox.pool import SandboxFailed
from graders.types import Item, Sample
from tests.graders.servers import chat, serving, verdict

ITEM = {"answer": "42", "question": "6 * 7?"}
TEXT = "{{sample.output_text}}"

# What the judge model of this name does.
JUDGES = {
    "wise": verdict(0.75),
    "kind": verdict("good"),
    "coy": chat("", refusal="I would rather not."),
    "vague": chat("quite good"),
    "wordy": chat('{"steps": [', finish_reason="length"),
    "broken": None,
}


def answer(path: str, asked: Any) -> tuple[int, str]:
    """An OpenAI-compatible server, and at /score an endpoint; where the path asks for trouble, it makes some."""
    match path:
        case "/v1/chat/completions":
            reply = JUDGES[asked["model"]]
            return (reply.status, reply.body) if reply else (400, "out of order")
        case "/score":
            return 200, json.dumps({"score": 0.25 if asked["trace_id"] == "trace_mine" else 0.5})
        case "/prose":
            return 200, "very good"
        case _:
            return 404, "no such grader"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(answer) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str, tmp_path_factory: pytest.TempPathFactory, migrated_sqlite: Path) -> Iterator[OpenAI]:
    folder = tmp_path_factory.mktemp("service")
    judges = "".join(f'[judges.{name}]\nbase_url = "{address}/v1"\n' for name in JUDGES)
    (folder / "graders.toml").write_text(f'{judges}[endpoints]\nhosts = ["127.0.0.1"]\n')
    settings = Settings(data_dir=folder)
    shutil.copy(migrated_sqlite, folder / "regraft.db")
    database = Database(settings.database)
    with database.write() as session:
        key = keys.bootstrap(session)
    backends = Backends.load(folder / "graders.toml")
    blobs = FolderBlobs(folder / "blobs")
    app = create_app(
        settings, database, blobs, Registry(models={}), backends, lambda task, queue, about="": True
    )
    with TestClient(app) as web:
        yield OpenAI(api_key=key, base_url="http://testserver/v1", http_client=web, max_retries=0)
    database.close()
    shutil.rmtree(folder)


def string_check(**fields: Any) -> dict[str, Any]:
    named = {"type": "string_check", "name": "exact", "operation": "like"}
    return named | {"input": TEXT, "reference": "{{item.answer}}"} | fields


def python(source: str) -> dict[str, Any]:
    return {"type": "python", "name": "code", "source": source}


def judged(model: str, **fields: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"How good is this? {TEXT}"}]
    return {"type": "score_model", "name": "judge", "model": model, "input": prompt} | fields


def labelled(model: str) -> dict[str, Any]:
    label = judged(model) | {"type": "label_model", "labels": ["good", "bad"], "passing_labels": ["good"]}
    return multi("label", label=label)


def endpoint(url: str) -> Any:
    return {"type": "endpoint", "name": "mine", "url": url, "headers": {"X-Api-Key": "secret"}}


def multi(formula: str, **graders: Any) -> dict[str, Any]:
    return {"type": "multi", "name": "both", "graders": graders, "calculate_output": formula}


def run(client: OpenAI, grader: Any, sample: str = "It is 42.", **fields: Any) -> GraderRunResponse:
    body = {"item": ITEM} | fields
    return client.fine_tuning.alpha.graders.run(grader=grader, model_sample=sample, extra_body=body)


@pytest.mark.parametrize(
    ("grader", "reward"),
    [
        (string_check(), 1.0),
        ({"type": "text_similarity", "name": "t", "input": TEXT, "reference": "It is 41.",
          "evaluation_metric": "rouge_1"}, 2 / 3),
        ({"type": "math", "name": "m", "input": TEXT, "reference": "84/2"}, 1.0),
        ({"type": "format", "name": "f", "input": TEXT, "pattern": ".*\\."}, 1.0),
        (python("def grade(sample, item):\n    return len(item['answer']) / 4"), 0.5),
        (judged("wise"), 0.75),
        (judged("wise", range=[0, 0.6]), 0.6),
        (labelled("kind"), 1.0),
        (multi("0.5 * a + 0.5 * b", a=string_check(), b=judged("wise")), 0.875),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_each_type_earns_its_reward(client: OpenAI, grader: dict[str, Any], reward: float) -> None:
    report = run(client, grader)

    assert report.reward == pytest.approx(reward)
    assert report.metadata.type == grader["type"]
    assert not any(report.metadata.errors.model_dump().values())


def test_an_endpoint_gets_the_trace_id_of_the_request(client: OpenAI, address: str) -> None:
    assert run(client, endpoint(f"{address}/score"), trace_id="trace_mine").reward == 0.25
    assert run(client, endpoint(f"{address}/score")).reward == 0.5


@pytest.mark.parametrize(
    ("flag", "grader"),
    [
        ("sample_parse_error", string_check(input="{{sample.output_json.answer}}")),
        ("invalid_variable_error", string_check(reference="{{item.absent}}")),
        ("other_error", multi("log(a - 1)", a=string_check())),
        ("python_grader_runtime_error", python("def grade(sample, item):\n    return item['absent']")),
        ("model_grader_server_error", judged("broken")),
        ("model_grader_refusal_error", judged("coy")),
        ("model_grader_parse_error", judged("vague")),
        ("model_grader_exceeded_max_tokens_error", judged("wordy")),
        ("endpoint_grader_server_error", endpoint("{address}/absent")),
        ("endpoint_grader_internal_error", endpoint("{address}/prose")),
    ],
)
def test_a_failure_raises_its_own_flag_and_no_other(
    client: OpenAI, address: str, flag: str, grader: dict[str, Any]
) -> None:
    if "url" in grader:
        grader["url"] = grader["url"].format(address=address)

    report = run(client, grader)
    errors = raw_errors(report)

    assert report.reward == 0.0
    assert {name for name, value in errors.items() if value is True} == {flag}
    assert {name for name, value in errors.items() if isinstance(value, str)} <= {f"{flag}_details"}
    if f"{flag}_details" in errors:
        assert errors[f"{flag}_details"]


def raw_errors(report: GraderRunResponse) -> dict[str, Any]:
    """Under the names of the wire: the client renames what begins with model_, and does not know endpoint_."""
    errors: dict[str, Any] = report.metadata.errors.model_dump(by_alias=True)
    return errors


def test_a_sandbox_that_breaks_is_the_servers_fault(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    from graders.sandbox.pool import ZygoteProcess

    def broken(self: ZygoteProcess, sample: Sample, item: Item) -> None:
        raise SandboxFailed("it went away")

    monkeypatch.setattr(ZygoteProcess, "grade", broken)

    errors = run(client, python("def grade(sample, item):\n    return 1.0")).metadata.errors

    assert errors.python_grader_server_error
    assert not errors.python_grader_runtime_error


def test_there_are_twenty_four_flags_and_details_and_the_client_reads_them(client: OpenAI) -> None:
    report = run(client, judged("vague"))

    assert len(raw_errors(report)) == 24
    assert report.metadata.errors.api_model_grader_parse_error is True


def test_what_a_judge_read_and_wrote_is_counted(client: OpenAI) -> None:
    report = run(client, multi("a + b", a=judged("wise"), b=judged("wise", range=[0, 0.5])))
    once = {"prompt_tokens": 10, "total_tokens": 15, "completion_tokens": 5, "cached_tokens": 4}

    assert report.api_model_grader_token_usage_per_model == {
        "wise": once
    }  # the second asked the same question
    assert report.metadata.token_usage is not None
    assert report.metadata.sampled_model_name == "wise"


def test_what_a_python_grader_prints_comes_back_and_so_does_its_traceback(client: OpenAI) -> None:
    source = "def grade(sample, item):\n    print('looking at', item['answer'])\n    raise ValueError('hm')"

    report = run(client, python(source))

    assert report.metadata.model_extra is not None
    assert report.metadata.model_extra["output"] == "looking at 42\n"
    assert report.metadata.errors.python_grader_runtime_error_details is not None
    assert "line 3, in grade" in report.metadata.errors.python_grader_runtime_error_details
    assert "ValueError: hm" in report.metadata.errors.python_grader_runtime_error_details


@pytest.mark.parametrize(
    ("grader", "param"),
    [
        (judged("nobody"), "grader.model"),
        (multi("a", a=judged("nobody")), "grader.graders.a.model"),
        (endpoint("https://evil.org/g"), "grader.url"),
        (python("def grade(sample):\n    return 1.0"), "grader.source"),
        (python("def grade(sample, item)\n    return 1.0"), "grader.source"),
        (multi("a +", a=string_check()), "grader.calculate_output"),
        (multi("a + b", a=string_check()), "grader.calculate_output"),
        (string_check(input="{{env.HOME}}"), "grader.input"),
    ],
)
def test_what_cannot_work_is_refused_before_it_runs(
    client: OpenAI, grader: dict[str, Any], param: str
) -> None:
    for call in (run, lambda client, grader: client.fine_tuning.alpha.graders.validate(grader=grader)):
        with pytest.raises(BadRequestError) as refused:
            call(client, grader)
        assert refused.value.param == param


def test_validate_gives_the_grader_back_with_its_secrets_masked(client: OpenAI, address: str) -> None:
    validate = client.fine_tuning.alpha.graders.with_raw_response.validate

    answer = validate(grader=endpoint(f"{address}/score")).text

    assert "secret" not in answer
    assert json.loads(answer)["grader"]["headers"] == {"X-Api-Key": "***"}


def test_every_flag_that_we_can_raise_is_tested_here() -> None:
    """The rest have no cause in this service, and stay false."""
    source = Path(__file__).read_text()
    never = {"formula_parse_error", "truncated_observation_error", "unresponsive_reward_error",
             "endpoint_grader_safety_check_error"}  # fmt: skip
    from graders.types import ErrorKind

    assert {kind.value for kind in ErrorKind if f'"{kind}"' not in source} <= {"python_grader_server_error"}
    root = Path(__file__).parents[2] / "graders"
    raised = "".join(file.read_text() for file in root.rglob("*.py"))
    assert not [flag for flag in never if f"ErrorKind.{flag}" in raised]
