"""Two steps of a job on twenty families, and the adapter that it delivers in plain PEFT."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from sqlalchemy import select

from core.database.tables import Job
from core.registry import Registry
from core.results import export
from core.settings import Settings
from tests.families.conftest import policy_on
from tests.families.zoo import CONTEXT, FAMILIES
from tests.worker.conftest import Bench
from worker.checks.compatibility import reference_logprobs
from worker.model.architecture import class_of
from worker.model.policy import read_config

TITLES = (
    "Llama 2, 3",
    "Qwen 3",
    "Qwen 3 MoE",
    "Qwen3-Next",
    "Qwen 3.5",
    "Gemma 2",
    "Gemma 3",
    "Gemma 4",
    "Mistral 7B v0.1 (windows)",
    "Mistral 4",
    "Phi-3",
    "gpt-oss",
    "OLMo 3",
    "SmolLM 3",
    "DeepSeek V4",
    "Granite MoE with windows",
    "LFM 2",
    "Mamba 2",
    "StableLM",
    "Jamba",
)
ROWS = [{"messages": [{"role": "user", "content": text}]} for text in ("red", "blue", "cat", "dog")]
GRADER = {
    "type": "text_similarity",
    "name": "close",
    "input": "{{sample.output_text}}",
    "reference": "red cat",
    "evaluation_metric": "fuzzy_match",
}


@pytest.mark.slow
@pytest.mark.parametrize("title", TITLES)
def test_a_job_succeeds_and_its_adapter_is_the_same_in_plain_peft(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, title: str
) -> None:
    [family] = [one for one in FAMILIES if one.title == title]
    folder = family.save(tmp_path / "model")

    registry = train_on(bench, folder, monkeypatch)

    assert bench.job().status == "succeeded", bench.events()
    steps = bench.steps()
    assert [step["step"] for step in steps] == [0, 1, 2]
    trained = [step for step in steps if step["step"]]
    assert all(step["grad_norm"] > 0 and step["logprob_gap"] < 1e-3 for step in trained)

    home = export.gather(bench.database, bench.blobs, Registry.load(registry), bench.checkpoints()[-1], None)
    home.write(bench.blobs, tmp_path / "adapter")
    policy = policy_on(folder, rank=16, alpha=32)
    prompt, answer = tuple(range(5, 30)), tuple(range(40, 50))
    untrained = reference_logprobs(policy, prompt, answer)
    policy.load(tmp_path / "adapter")
    ours = reference_logprobs(policy, prompt, answer)

    base = class_of(read_config(folder)).from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",  # SDPA would leave out the soft caps of Gemma 2
    )
    plain = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[
            0, len(prompt) - 1 : -1
        ]
    theirs = logits.float().log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert not torch.equal(ours, untrained)


def train_on(bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run the job of `bench` with two steps on the model in a folder. Returns the models' file."""
    registry = set_up(bench, folder, monkeypatch)
    bench.run_job(Settings())
    return registry


def set_up(bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the job of `bench` the model in a folder, ROWS and two steps. Returns the models' file."""
    registry = bench.tmp_path / "models.toml"
    registry.write_text(
        f'[models.tiny]\npath = {json.dumps(str(folder))}\ndtype = "float32"\ncontext = {CONTEXT}\n'
    )
    monkeypatch.setenv("REGRAFT_MODELS_FILE", str(registry))
    monkeypatch.setenv("REGRAFT_DATA_DIR", str(bench.tmp_path / "data"))
    with bench.database.write() as session:
        bench.add_files(session, bench.blobs, ROWS)
        job = session.scalars(select(Job)).one()
        hyperparameters = {
            "batch_size": 2,
            "n_epochs": 1,
            "eval_interval": 2,
            "advanced": {
                "sampling": {"group_size": 4, "max_completion_tokens": 12},
                "optimizer": {"learning_rate": 0.01},
            },
        }
        job.body = {"grader": GRADER, "hyperparameters": hyperparameters, "response_format": None}
    return registry
