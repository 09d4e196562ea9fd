"""The hardware file: what an operator says of the GPUs of each class and of their price.

It is read again when it has changed, so that another GPU class or price restarts nothing.
"""

import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from core.reloaded import Reloaded
from core.system_errors import file_problem

SamplerChoice = Literal["registry", "transformers", "vllm"]
# The bounds apply to the number, not to the field: pydantic would also compare "auto" with them and raise TypeError.
Auto = Literal["auto"]
KvCacheGib = Auto | Annotated[float, Field(gt=0, allow_inf_nan=False)]
TokenBudget = Auto | Annotated[int, Field(ge=256)]


class InvalidHardware(ValueError):
    """The hardware file cannot be read, is not TOML, or has an invalid value."""


class JobSizes(BaseModel):
    """The GPUs and nodes that a job of a class may choose (`resources`), of pods that the dispatcher starts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # On each node, and nodes, of a job that does not choose.
    gpus: int = Field(ge=1)
    nodes: int = Field(default=1, ge=1)
    max_gpus: int = Field(ge=1)
    max_nodes: int = Field(default=1, ge=1)


class GpuClass(BaseModel):
    """Hardware of the machines of one `gpu_class`, and settings that apply to them only."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Memory of one GPU: the value of nvidia-smi, rounded down, less 1 GiB for the driver (an H100 shows 79.6 GiB: 78).
    # 0: no GPU. Unset: unknown; jobs are checked when they run.
    gpu_memory_gib: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    kv_cache_gib: KvCacheGib | None = None
    train_token_budget: TokenBudget | None = None
    sampler: SamplerChoice | None = None
    # REGRAFT_RANKS of the workers of the class, for the check of a job before it is queued. Unset: as many as the
    # process has that checks, which may be of another class.
    ranks: Annotated[int, Field(ge=1)] | None = None
    # A Kubernetes Job runs each job of the class (docs/howto/kubernetes-pools.md): no worker reads its queue of the
    # broker.
    in_kubernetes_jobs: bool = False
    # Unset: all jobs of the class have the GPUs of its workers.
    sizes: JobSizes | None = None

    @property
    def sampling_gpus(self) -> int:
        """GPUs of each node that only sample, in a class whose jobs choose their GPUs; 0 in others."""
        return 0 if self.sizes is None or self.ranks is None else self.sizes.gpus - self.ranks


class Hardware(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpu_classes: dict[str, GpuClass] = Field(default_factory=dict)
    # Price of a GPU-second and its currency (ISO 4217). Unset: no costs are shown and budgets cannot be in money.
    price_per_gpu_second: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    currency: str = Field(default="USD", pattern=r"^[A-Z]{3}$")

    @classmethod
    def load(cls, file: Path) -> "Hardware":
        """Read the file.

        Raises:
            InvalidHardware: it cannot be read, is not TOML, or has an invalid value.
        """
        try:
            return cls.model_validate(tomllib.loads(file.read_text()))
        except ValidationError as invalid:
            problems = (
                f"{'.'.join(map(str, error['loc']))}: {error['msg']}"
                for error in invalid.errors(include_url=False)
            )
            raise InvalidHardware(f"{file}: {'; '.join(problems)}") from None
        except OSError as cause:
            raise InvalidHardware(file_problem(cause)) from cause
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as cause:
            raise InvalidHardware(f"{file}: {cause}") from cause

    def of(self, gpu_class: str) -> GpuClass:
        """Return what the file says of a class, and a `GpuClass` without values for any other."""
        return self.gpu_classes.get(gpu_class, GpuClass())

    @property
    def pod_classes(self) -> frozenset[str]:
        """The GPU classes for which Kubernetes starts a pod for each job: no worker waits for one."""
        return frozenset(name for name, known in self.gpu_classes.items() if known.in_kubernetes_jobs)


NO_HARDWARE = Hardware()


def hardware_of(file: Path | None) -> Hardware:
    """The content of now. None: nothing is known.

    Raises:
        InvalidHardware: at the first call. A file that becomes invalid later leaves its earlier content in force.
    """
    return NO_HARDWARE if file is None else _reloaded(file.absolute())()


@cache
def _reloaded(file: Path) -> Reloaded[Hardware]:
    return Reloaded(lambda: Hardware.load(file), [file])
