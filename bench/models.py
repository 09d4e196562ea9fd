"""The real model that most benches run on, loaded the way a run loads it."""

from pathlib import Path

from core.jobs.hyperparameters import Hyperparameters, Resolved, resolve
from core.registry import Registry
from core.settings import Settings
from worker.model.policy import Base, convert_gguf, load_base

SMOLLM2 = "SmolLM2-135M-Instruct"


def smollm2() -> Base:
    return load_base(SMOLLM2, Registry.load(None).get(SMOLLM2), Settings().model_cache, "cpu")


def smollm2_folder() -> Path:
    """The same model as a folder that transformers loads."""
    source = Registry.load(None).get(SMOLLM2).locate()
    assert isinstance(source, Path)
    return convert_gguf(source, Settings().model_cache)


def settings_for(base: Base, **advanced: object) -> Resolved:
    """A job's settings with these of its advanced hyperparameters said, and all others automatic."""
    asked = Hyperparameters.model_validate({"advanced": advanced})
    return resolve(asked, rows=8, parameters=base.parameters, context=base.context)
