"""A job that was begun by another version of the code resumes under this one, or says why it cannot.

What the other version left is written out here, file by file, so that it does not change with the code that writes it.
"""

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sqlalchemy import select

from core.database.tables import Checkpoint, Job
from core.jobs.hyperparameters import Hyperparameters, Resolved, resolve, with_first_values
from core.results.lineage import Parent
from core.settings import Settings
from graders.spec import parse_grader
from tests.fakes import ExactGrader
from tests.present import present
from tests.worker.conftest import Bench
from worker.assemble import assemble
from worker.model.parent import continuing
from worker.model.policy import Policy
from worker.recording.checkpoints import FORMAT, JobCheckpoints, UnknownFormat
from worker.rollout.experience import RolloutExperience
from worker.training.trainer import PeftTrainer

pytestmark = pytest.mark.slow  # runs whole jobs

GRADER = {"type": "string_check", "name": "g", "input": "a", "reference": "b", "operation": "eq"}

STEP = 6
# In the order of the optimizer's state. The tiny model's sizes; a rank of 4.
SHAPES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (64, 32),
    "self_attn.v_proj": (64, 32),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (64, 128),
    "mlp.up_proj": (64, 128),
    "mlp.down_proj": (128, 64),
}
ADAPTER = {
    f"base_model.model.model.layers.{layer}.{module}.lora_{half}.weight": shape
    for layer in range(2)
    for module, (inner, outer) in SHAPES.items()
    for half, shape in (("A", (4, inner)), ("B", (outer, 4)))
}
CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": [module.rpartition(".")[2] for module in SHAPES],
}
GROUP = {
    "lr": 0.001,
    "betas": (0.9, 0.95),
    "eps": 1e-08,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
    "params": list(range(len(ADAPTER))),
}
# `jobs.resolved` of a job of 0.1.0.
RESOLVED: dict[str, Any] = {
    "batch_size": 4,
    "learning_rate": 0.0005,
    "n_epochs": 3,
    "total_steps": 30,
    "eval_interval": 3,
    "eval_samples": 1,
    "eval_temperature": 0.0,
    "loss": "grpo",
    "advantage_scale": "group",
    "std": "population",
    "supervision": "outcome",
    "fail_below_signal": 0.0,
    "group_size": 6,
    "lora_rank": 4,
    "lora_alpha": 8,
    "temperature": 1.0,
    "max_completion_tokens": 64,
    "overlong": "score",
    "overlong_buffer": None,
    "updates_per_batch": 1,
    "overlap": False,
    "resample_prompts": 0,
    "off_policy_steps": 0,
    "stop_after_flat_evals": 0,
    "stop_after_silent_steps": 0,
    "stop_above_kl": 0.0,
    "stop_below_entropy": 0.0,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "cispo_cap": None,
    "importance": "truncate",
    "importance_cap": 2.0,
    "kl": 0.0,
    "kl_estimator": None,
    "reference_refresh_steps": 0,
    "max_grad_norm": 1.0,
    "warmup_steps": 0,
    "step_kl": 0.0,
    "rollback": True,
    "on_alarm": "inform",
    "ratio_max": None,
    "divergence": None,
    "log_ratio_penalty": 0.0,
    "importance_floor": None,
    "importance_level": "token",
    "importance_reject": None,
    "reject_low": None,
    "reject_high": None,
    "off_policy_threshold": 0.0,
    "length_weight": 0.0,
    "part_weights": None,
    "part_invalid_grade": None,
    "normalize": "papers",
    "require_improvement": False,
    "chat_template": None,
    "chat_template_kwargs": {},
    "thinking_budget": None,
    "lora_targets": "all-linear",
    "learning_rate_schedule": "constant",
    "eval_pass_score": 1.0,
    "mini_batches": 1,
    "continue_in_flight": False,
    "kl_warmup_steps": 0,
    "max_episode_tokens": None,
    "train": "lora",
    "prompt_order": "shuffled",
    **dict.fromkeys(
        ("gae_lambda", "gamma", "value_clip", "value_weight", "value_learning_rate", "value_warmup_steps")
    ),
}


def rng() -> torch.Tensor:
    return torch.Generator().manual_seed(7).get_state()


def format_1(folder: Path) -> None:
    """The files of a checkpoint of format 1: each tensor is full of a number of its own."""
    save_file(
        {name: torch.full(shape, 0.01 * n) for n, (name, shape) in enumerate(ADAPTER.items())},
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    moments = {
        n: {
            "step": torch.tensor(5.0),
            "exp_avg": torch.full(shape, 0.1 * n),
            "exp_avg_sq": torch.full(shape, 0.2 * n),
        }
        for n, shape in enumerate(ADAPTER.values())
    }
    state = {
        "optimizer": {"state": moments, "param_groups": [GROUP]},
        "steps_taken": 5,
        "step_rate": 1.0,
        "reference": [torch.full(shape, 0.3) for shape in ADAPTER.values()],
        "torch_rng": rng(),
    }
    torch.save(state, folder / "trainer.pt")


@pytest.fixture
def left(bench: Bench, tmp_path: Path) -> Callable[..., None]:
    """Puts what another version left at step 6 into the store, with a manifest of this `format`."""

    def left(format: int = 1, **more: Any) -> None:
        folder, prefix = tmp_path / "left", "projects/p/jobs/j/attempts/1/checkpoints/step-000006"
        folder.mkdir()
        format_1(folder)
        files = []
        for path in sorted(folder.iterdir()):
            bench.blobs.put_file(f"{prefix}/{path.name}", path)
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            files.append({"name": path.name, "bytes": len(content), "sha256": digest})
        manifest = {
            "format": format,
            "job": "j",
            "base_model": "tiny",
            "step": STEP,
            "epoch": 1,
            "files": files,
        }
        bench.blobs.put_bytes(f"{prefix}/manifest.json", json.dumps(manifest | more).encode())
        row = {"job_id": bench.claim.job_id, "step": STEP, "epoch": 1, "blob_prefix": prefix}
        with bench.database.write() as session:
            session.add(Checkpoint(**row))

    return left


@pytest.fixture
def checkpoints(bench: Bench) -> JobCheckpoints:
    return JobCheckpoints(bench.attempt(), bench.tmp_path)


@pytest.fixture
def trainer(make_policy: Callable[..., Policy]) -> PeftTrainer:
    settings = with_first_values(resolve(Hyperparameters(), rows=40, parameters=1000, context=128), RESOLVED)
    return PeftTrainer(make_policy(), settings, token_budget=512)


def full_of(tensors: Sequence[torch.Tensor] | None, number: Callable[..., Any]) -> bool:
    assert tensors is not None
    return all(bool((tensor == torch.full_like(tensor, number(n))).all()) for n, tensor in enumerate(tensors))


def test_a_checkpoint_of_format_1_is_continued_to_the_last_bit(
    left: Callable[..., None], checkpoints: JobCheckpoints, trainer: PeftTrainer
) -> None:
    """Whoever changes what a checkpoint holds must still read this one; then raise FORMAT."""
    left()

    assert checkpoints.restore(trainer) == STEP

    assert full_of(trainer.policy.trainable, lambda n: 0.01 * n)
    moments = [trainer.optimizer.adamw.state[parameter] for parameter in trainer.policy.trainable]
    assert full_of([one["exp_avg"] for one in moments], lambda n: 0.1 * n)
    assert full_of([one["exp_avg_sq"] for one in moments], lambda n: 0.2 * n)
    assert {one["step"].item() for one in moments} == {5.0}
    assert trainer.steps_taken == 5
    assert full_of(trainer.loss.reference, lambda n: 0.3)
    assert torch.equal(torch.get_rng_state(), rng())


def test_a_manifest_may_say_more_than_this_version_knows(
    left: Callable[..., None], checkpoints: JobCheckpoints, trainer: PeftTrainer
) -> None:
    left(colour="red")

    assert checkpoints.restore(trainer) == STEP


def test_a_checkpoint_of_a_later_format_is_refused_before_anything_is_touched(
    bench: Bench, left: Callable[..., None], checkpoints: JobCheckpoints, trainer: PeftTrainer
) -> None:
    left(format=FORMAT + 1)
    said = bench.events()

    with pytest.raises(UnknownFormat, match=f"has format {FORMAT + 1}.*reads formats up to {FORMAT}"):
        checkpoints.restore(trainer)

    assert trainer.steps_taken == 0
    assert bench.events() == said


def test_the_format_that_is_written_is_the_one_that_is_said(
    bench: Bench, checkpoints: JobCheckpoints, trainer: PeftTrainer
) -> None:
    checkpoints.save(trainer, step=1, valid_reward=None, metrics={})

    [row] = bench.checkpoints()
    manifest = json.loads(bench.blobs.read(f"{row.blob_prefix}/manifest.json"))
    assert manifest["format"] == FORMAT == 1, "add a test with what the format before looked like"
    assert {"trainer.pt", "adapter_model.safetensors"} <= {file["name"] for file in manifest["files"]}
    content = bench.blobs.read(f"{row.blob_prefix}/trainer.pt")
    written = torch.load(io.BytesIO(content), weights_only=True)
    assert written.keys() == {"optimizer", "steps_taken", "step_rate", "reference", "torch_rng"}


# The hyperparameters.


def automatic(**changes: Any) -> Resolved:
    return resolve(Hyperparameters(), rows=8, parameters=1000, context=128).model_copy(update=changes)


def test_a_job_keeps_the_hyperparameters_that_it_was_begun_with() -> None:
    """A version that chooses another rank, or another number of steps, must not do so in the middle of a job."""
    assert with_first_values(automatic(lora_rank=64, total_steps=7), RESOLVED).model_dump() == RESOLVED


def test_a_hyperparameter_that_is_new_has_its_automatic_value() -> None:
    older = {name: value for name, value in RESOLVED.items() if name != "warmup_steps"}

    assert with_first_values(automatic(warmup_steps=3), older).warmup_steps == 3


def test_a_job_keeps_the_longest_episode_in_a_resume_and_in_a_job_that_continues_it() -> None:
    """The divisor of dr_grpo depends on it."""
    first = automatic(max_episode_tokens=80)
    template = {"chat_template": None, "chat_template_kwargs": None}
    parent = Parent("ft:tiny", "ftjob-1", 1, "jobs/1/checkpoints/1", "tiny", template, train="full")

    assert with_first_values(automatic(), first.model_dump()).longest_answer == 80
    assert continuing(first, parent).longest_answer == 80


def test_a_hyperparameter_that_is_gone_is_forgotten() -> None:
    assert with_first_values(automatic(), RESOLVED | {"colour": "red"}).model_dump() == RESOLVED


def test_a_job_that_begins_now_has_what_this_version_chooses() -> None:
    assert with_first_values(automatic(lora_rank=64), None) == automatic(lora_rank=64)


def test_a_run_that_is_loaded_again_has_the_hyperparameters_of_the_first(
    bench: Bench, tiny_model: Path, tmp_path: Path
) -> None:
    registry = tmp_path / "models.toml"
    registry.write_text(f'[models.tiny]\npath = "{tiny_model}"\ndtype = "float32"\ncontext = 128\n')
    row = {"messages": [{"role": "user", "content": "say yes"}], "answer": "yes"}
    with bench.database.write() as session:
        bench.add_files(session, bench.blobs, [row])
        job = session.scalars(select(Job)).one()
        job.resolved = {"lora_rank": 2, "total_steps": 77}

    settings = Settings(models_file=registry, data_dir=tmp_path)
    run = assemble(
        bench.attempt(),
        parse_grader(GRADER),
        ExactGrader(),
        settings,
        tmp_path,
        lambda: False,
        lambda: None,
    )

    experience = run.experience
    assert isinstance(experience, RolloutExperience)
    assert (experience.settings.lora_rank, experience.settings.total_steps) == (2, 77)
    assert (present(bench.job().resolved)["lora_rank"], present(bench.job().resolved)["group_size"]) == (
        2,
        experience.settings.group_size,
    )
