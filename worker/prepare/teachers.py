"""Load the teacher of a distillation job: an adapter on the student's base, that base itself, or a second model.

One on a server is not loaded: `worker.rollout.served_teacher`.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from core.jobs.distillation import other_base
from core.jobs.hyperparameters import Resolved
from core.jobs.offline_hyperparameters import ResolvedOffline
from core.jobs.params import TEACHER_PARAM
from core.registry import BaseModelEntry
from core.results.lineage import Parent
from core.storage.manifests import Damaged
from graders.judge.judges import JudgeModel
from worker.model import memory
from worker.model.architecture import refusing
from worker.model.parent import Adapters
from worker.model.policy import DTYPES, Policy, read_config, read_tokenizer, source_of
from worker.model.sizing import Shape
from worker.refusals import UserMistake
from worker.training.distributed import load_second
from worker.training.rank_model import Model
from worker.training.teacher import TeacherPolicy


@dataclass(frozen=True)
class TeacherModel:
    """A teacher, known from its configuration alone."""

    name: str
    adapter: Parent | None  # a tuned model on the student's base
    second: BaseModelEntry | None  # a model beside the student's base
    shape: Shape | None = None  # of `second`
    server: JudgeModel | None = None  # has it. None for all: the student's base itself

    @property
    def added_tokens(self) -> int:
        """How much longer than a prompt with its answer the sequence is that the teacher computes: a server completes
        it by a token (worker/rollout/served_teacher.py)."""
        return 0 if self.server is None else 1

    def weight_bytes(self, *, reordered: bool) -> int:
        """Memory beside that of a job without a teacher. `reordered` as in `sizing.Machine`."""
        if self.shape is None:
            return 0
        copies = 2 * self.shape.plain_linear_bytes if reordered else 0
        return self.shape.weight_bytes + copies


def inspect_teacher(
    name: str,
    base_model: str,
    parent: Parent | None,
    student: str,
    entries: dict[str, BaseModelEntry],
    cache: Path,
) -> TeacherModel:
    """Read what the teacher is, and refuse one that does not share the student's tokens.

    Args:
        base_model, parent: the teacher's name as `core.results.lineage.start_of` resolves it.
        student: the base model of the student.
        entries: of both base models, by name.

    Raises:
        UserMistake: it is a tuned model on another base, or a model with another tokenizer.
    """
    if parent is not None:
        if base_model != student:
            raise UserMistake("invalid_value", other_base(name, base_model, student), TEACHER_PARAM)
        return TeacherModel(name, parent, None)
    if base_model == student:
        return TeacherModel(name, None, None)
    entry = entries[base_model]
    source = source_of(entry, cache)
    own = read_tokenizer(entries[student], source_of(entries[student], cache))
    if read_tokenizer(entry, source).get_vocab() != own.get_vocab():
        raise UserMistake(
            "invalid_value",
            f"The teacher '{name}' has another tokenizer than '{student}': their tokens cannot be compared. A teacher "
            "needs the same vocabulary.",
            TEACHER_PARAM,
        )
    config = read_config(source)
    with refusing(config):
        return TeacherModel(name, None, entry, memory.shape_of(config, DTYPES[entry.dtype]))


def load_teacher(
    teacher: TeacherModel,
    student: Policy,
    settings: Resolved | ResolvedOffline,
    adapters: Adapters,
    cache: Path,
    beat: Callable[[], None],
) -> TeacherPolicy:
    """The policy that computes the teacher's log-probabilities.

    Raises:
        UserMistake: the files of its adapter were deleted or are damaged.
        UnsupportedModel: it is a second model whose forward pass is not right here.
    """
    if teacher.adapter is not None:
        return TeacherPolicy(student, read_adapter(teacher.adapter, student, adapters))
    if (second := second_model(teacher, settings, cache)) is None:
        return TeacherPolicy(student)
    return TeacherPolicy(load_second(second, str(student.device), beat))


def second_model(teacher: TeacherModel, settings: Resolved | ResolvedOffline, cache: Path) -> Model | None:
    """The teacher's model, if it is one beside the student's."""
    if teacher.second is None:
        return None
    changes = {
        "lora_rank": 1,
        "lora_targets": "all-linear",
        "chat_template": None,
        "chat_template_kwargs": {},
    }
    plain = settings.model_copy(update=changes)
    return Model(teacher.name, teacher.second, cache, plain, seed=0, checkpointed=False, sampled=False)


def read_adapter(parent: Parent, policy: Policy, adapters: Adapters) -> list[torch.Tensor]:
    """The weights of a tuned model's adapter, one tensor for each of the policy's `trainable`, which do not change."""
    weights = [torch.zeros_like(parameter) for parameter in policy.trainable]
    with tempfile.TemporaryDirectory() as folder:
        try:
            adapters.download(parent.blob_prefix, Path(folder))
        except Damaged as damage:
            raise UserMistake(
                "model_not_available",
                f"The adapter of '{parent.model}', which is the job's teacher, cannot be read: {damage}.",
                TEACHER_PARAM,
            ) from damage
        with policy.with_weights(weights), torch.no_grad():
            policy.load(Path(folder))
    return weights
