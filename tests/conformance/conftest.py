"""One live service for all scripts: the real API, worker and inference server, on a tiny model, with OpenAI's names.

The scripts find it as they would find OpenAI: through OPENAI_BASE_URL and OPENAI_API_KEY.
"""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.fine_tuning import FineTuningJob

from tests.conformance.data import EXACT, SIMILAR, TEST, TRAIN
from tests.conformance.helpers import finished, poll
from tests.conformance.model import make_writing_model
from tests.e2e.conftest import Server, launch
from tests.graders.servers import serving
from tests.present import untyped

# The names that the guides print, of models to tune and of judges.
MODELS = ("o4-mini-2025-04-16", "o4-mini", "gpt-4.1-nano-2025-04-14", "gpt-4o-mini-2024-07-18")
JUDGES = (
    "gpt-4.1-2025-04-14",
    "gpt-4o-2024-08-06",
    "o3-mini",
    "o3-mini-2024-01-31",  # as the graders guide has it
    "o3-mini-2025-01-31",
    "o4-mini-2025-04-16",
)


@dataclass
class Judge:
    """Answers for all judge models, in the schema that it is asked for; the score comes from the prompt's length."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path: str, asked: dict[str, Any]) -> tuple[int, str]:
        with self.lock:
            self.requests.append(asked)
        result = asked["response_format"]["json_schema"]["schema"]["properties"]["result"]
        length = len(asked["messages"][-1]["content"])
        verdict = result["enum"][length % len(result["enum"])] if "enum" in result else length % 5 / 4
        content = json.dumps({"steps": [{"description": "read", "conclusion": "clear"}], "result": verdict})
        message = {"role": "assistant", "content": content, "refusal": None}
        usage = {"prompt_tokens": 20, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 0}}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return 200, json.dumps({"choices": [choice], "usage": usage})


@pytest.fixture(scope="package")
def judge() -> Iterator[Judge]:
    judge = Judge()
    with serving(judge.answer) as address:
        judge.url = address
        yield judge


@pytest.fixture(scope="package")
def service(tmp_path_factory: pytest.TempPathFactory, judge: Judge) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("conformance")
    model = make_writing_model(folder / "model")
    graders = folder / "graders.toml"
    graders.write_text("".join(f'[judges."{name}"]\nbase_url = "{judge.url}/v1"\n' for name in JUDGES))
    server = launch(
        folder / "data",
        registry(model),
        REGRAFT_GRADERS_FILE=str(graders),
        REGRAFT_WEBHOOK_PRIVATE_HOSTS="127.0.0.1",
        REGRAFT_INFERENCE_IDLE_SECONDS="3600",
    )
    yield server
    server.stop()


def registry(model: Path) -> str:
    """One model, under all of OpenAI's names."""
    aliases = "".join(f'"{name}" = "writer"\n' for name in MODELS)
    return f'[models.writer]\npath = "{model}"\ndtype = "float32"\ncontext = 256\n\n[aliases]\n{aliases}'


@pytest.fixture(scope="module", autouse=True)
def environment(service: Server) -> Iterator[None]:
    """What a user changes to come here, and nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_WEBHOOK_SECRET", "AZURE_OPENAI_API_KEY"):
            patch.delenv(name, raising=False)
        patch.setenv("OPENAI_BASE_URL", service.base_url)
        patch.setenv("OPENAI_API_KEY", service.key)
        yield


@pytest.fixture(scope="module")
def inference(service: Server) -> None:
    """The inference server, which the first request starts: it answers 503 with `retry-after` until it has loaded."""

    def answers() -> bool:
        try:
            service.client(timeout=60).chat.completions.create(
                model=MODELS[0], messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=1
            )
        except openai.InternalServerError:
            return False
        return True

    poll(answers, bool)


@pytest.fixture(scope="package")
def trained(service: Server) -> FineTuningJob:
    """A job that has succeeded, validated three times by two graders: for scripts about what a job leaves."""
    client = service.client()
    files = [client.files.create(file=("rows.jsonl", rows), purpose="fine-tune").id for rows in (TRAIN, TEST)]
    grader = {
        "type": "multi",
        "name": "both",
        "graders": {"exact": EXACT, "similar": SIMILAR},
        "calculate_output": "0.5 * exact + 0.5 * similar",
        "pass_threshold": 0.05,
    }
    job = client.fine_tuning.jobs.create(
        model="o4-mini-2025-04-16",
        training_file=files[0],
        validation_file=files[1],
        method=untyped(
            {
                "type": "reinforcement",
                "reinforcement": {"grader": grader, "hyperparameters": {"n_epochs": 2, "eval_interval": 1}},
            }
        ),
    )
    job = finished(client, job.id)
    assert isinstance(job, FineTuningJob)
    assert job.status == "succeeded", job.error
    return job
