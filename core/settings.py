"""Every environment variable the service reads, typed, in one place."""

import re
import sys
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from core.limits import DEFAULT_LIMITS, Limits
from core.monitors import Thresholds

Checksums = Literal["when_supported", "when_required"]
SamplerChoice = Literal["registry", "transformers", "vllm"]
# Bounds stand on the number, not on the field: pydantic would compare "auto" with them, too, and raise TypeError.
Auto = Literal["auto"]
KvCacheGib = Auto | Annotated[float, Field(gt=0, allow_inf_nan=False)]
TokenBudget = Auto | Annotated[int, Field(ge=256)]


class GpuClass(BaseModel):
    """What the machines of one `gpu_class` have, and settings that hold for them only."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Memory of one GPU: what nvidia-smi shows, rounded down, less one for the driver (an H100 shows 79.6 GiB: 78).
    # 0: they have none. Unknown: jobs are checked where they run.
    gpu_memory_gib: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    kv_cache_gib: KvCacheGib | None = None
    train_token_budget: TokenBudget | None = None
    sampler: SamplerChoice | None = None


class Settings(BaseSettings):
    """Read once from REGRAFT_* and passed down; nothing else in the code looks at the environment.

    With nothing set this is the embedded default: SQLite, a folder for blobs and Celery's in-process
    broker, all under `data_dir`.
    """

    # A mistake is reported without its value, which may be a key.
    model_config = SettingsConfigDict(env_prefix="REGRAFT_", frozen=True, hide_input_in_errors=True)

    data_dir: Path = Path(".regraft")
    database_url: str = ""
    blob_url: str = ""
    s3_endpoint_url: str | None = None
    s3_region: str | None = None
    # when_required: for S3 look-alikes that stumble over checksums.
    s3_checksums: Checksums = "when_supported"
    broker_url: str = "memory://"
    models_file: Path | None = None
    # Judge models and the hosts endpoint graders may call (docs/graders.md); none without it.
    graders_file: Path | None = None
    # Where the environments of python graders are, built by `regraft-server environments build` (docs/graders.md).
    grader_environments: Path = Field(default_factory=lambda: Path(sys.prefix, "share/regraft/graders"))

    # Where chat completions of the registry's models are answered, up to and with /v1; `regraft-server up` starts that
    # itself, and `regraft-server inference` is one.
    inference_url: str = ""
    inference_key: str = Field(default="", repr=False)
    # After how long without a request the one that `up` started ends, to be started again by the next.
    inference_idle_seconds: float = Field(default=300.0, gt=0)
    # The highest rank of an adapter that vLLM serves; each of its slots is as large as that.
    inference_max_lora_rank: int = Field(default=64, ge=1, le=512)

    # The text of the first API key, which an empty service makes at its start; empty: a random one. Only its hash is
    # stored, so it is used once.
    first_key: str = Field(default="", repr=False)

    # Host names, comma separated, `*` for any run of characters: webhooks may go there although their addresses
    # are private (docs/webhooks.md).
    webhook_private_hosts: str = ""

    # Where jobs may send their metrics besides, comma separated: wandb, mlflow, trackio (docs/integrations.md).
    integrations: str = Field(
        default="", pattern=r"^( *(wandb|mlflow|trackio) *(, *(wandb|mlflow|trackio) *)*)?$"
    )

    host: str = "127.0.0.1"
    port: int = 8000
    # json: one object a line, with request, job and step ids; also a line for each request (docs/observability.md).
    log_format: Literal["text", "json"] = "text"
    # Where traces go, by OTLP over HTTP: http://collector:4318. Needs regraft-server[otel]; none without it.
    otlp_endpoint: str = Field(default="", pattern=r"^(https?://.+)?$")
    # Where Prometheus reads (docs/observability.md), without a key, so not the API's port; 0: nowhere.
    metrics_port: int = Field(default=0, ge=0, le=65535)
    max_upload_bytes: int = 512 * 1024 * 1024
    # With less room than this on the disk of the SQLite database or of the blob folder, /readyz is 503; 0: never.
    min_free_bytes: int = Field(default=256 << 20, ge=0)
    # A client that sends a request's body more slowly than this, on average over 30 s, gets 408; 0: any speed.
    min_upload_bytes_per_second: int = Field(default=1000, ge=0)
    # A file that arrives in parts (docs/storage.md).
    max_multipart_bytes: int = Field(default=8 << 30, ge=1, le=8 << 30)
    # What a project may use at most where it has no limit of its own, as JSON: {"running_jobs": 2}. A limit on requests
    # stays unless it is named: {"requests_per_minute": null}.
    default_limits: Limits = DEFAULT_LIMITS
    # How many long requests of one project an API process serves at once, and how many more may wait for their turn;
    # beyond that they get 429 (docs/tenants.md).
    grader_runs_per_project: int = Field(default=8, ge=1)
    grader_runs_waiting_per_project: int = Field(default=32, ge=0)
    uploads_per_project: int = Field(default=8, ge=1)
    uploads_waiting_per_project: int = Field(default=64, ge=0)
    streams_per_project: int = Field(default=100, ge=1)
    # Uploads in parts that are neither completed nor cancelled nor expired.
    pending_uploads_per_project: int = Field(default=100, ge=1)

    # After how many days a finished job's rollouts and unnamed checkpoints, and files, are deleted (docs/storage.md).
    keep_rollouts_days: float | None = Field(default=None, gt=0)
    keep_checkpoints_days: float | None = Field(default=None, gt=0)
    keep_files_days: float | None = Field(default=None, gt=0)
    # What a job's stored samples may take, and how many of one step's training or validation are stored at most; of
    # more, whole groups are drawn (docs/rollouts.md).
    rollout_bytes_per_job: int = Field(default=1 << 30, ge=0)
    rollouts_per_step: int = Field(default=10_000, ge=0)
    # How old a blob must be to be deleted when no row refers to it: older than any upload takes.
    orphan_hours: float = Field(default=24.0, ge=1)
    # Within so many days every file and every checkpoint is read once against its hash, a share of them each day. 0:
    # never (docs/storage.md).
    scrub_days: float = Field(default=30.0, ge=0)

    # The queue this machine's worker serves, and the one new jobs are sent to.
    gpu_class: str = Field(default="cpu", pattern=r"^[a-z0-9_-]{1,32}$")
    # A worker renews its lease every quarter of this; one that stays silent for the whole of it has lost the job.
    lease_seconds: float = Field(default=60.0, gt=0)
    reconcile_seconds: float = Field(default=2.0, gt=0)
    # How long a run that was asked to stop may take to reach its next checkpoint before it is killed.
    drain_seconds: float = Field(default=30.0, ge=0)
    # A run that got nowhere for so long (no answer, no grade, no update) is taken for hung, killed and tried again.
    hang_seconds: float = Field(default=3600.0, gt=0)
    # How long a run waits for a database, a blob store or a disk that is away, before it gives up as crashed.
    patience_seconds: float = Field(default=600.0, ge=0)
    # Crashes (not drains, not the user's mistakes) a job survives in a row: a new checkpoint starts the count anew.
    max_failures: int = Field(default=3, ge=0)
    # A job fails when more than half of the grades of this many steps in a row do.
    failing_steps: int = Field(default=3, ge=1)
    # Thresholds of the warnings of a run (docs/training.md, Warnings), as JSON:
    # {"kl_jump": 1.0, "length_factor": null}.
    warnings: Thresholds = Thresholds()
    # Processes of a run, each with the model on a GPU of its own, that share a step's gradient (docs/multi-gpu.md).
    ranks: int = Field(default=1, ge=1)
    # Machines that share a run, this one included, each with as many ranks. The others are `regraft-server member`:
    # they connect to `leader`, host:port, and both sides show that they know `ranks_key` (docs/multi-gpu.md).
    nodes: int = Field(default=1, ge=1)
    ranks_port: int = Field(default=8200, ge=1, le=65535)
    ranks_key: str = Field(default="", repr=False)
    leader: str = Field(default="", pattern=r"^(\S+:\d{1,5})?$")
    # Threads torch may use in a run; 0 leaves torch's own choice.
    torch_threads: int = Field(default=0, ge=0)
    # What samples: each model's own choice in the registry, or one for all.
    sampler: SamplerChoice = "registry"
    # A step is not taken, and its job fails, when the log-probabilities of sampler and trainer for the same tokens
    # differ by more than this on average, in nats a token. auto: 0.05 for a bfloat16 model, 0.001 for float32; 0: off.
    max_logprob_gap: Literal["auto"] | Annotated[float, Field(ge=0, allow_inf_nan=False)] = "auto"
    # Memory that vLLM takes while a job runs, all at once, for the keys and values of answers in flight. auto: what is
    # free, as far as the job can fill it (docs/training.md).
    kv_cache_gib: KvCacheGib = "auto"
    # The same for the inference server, for each model that it has loaded (docs/serving.md).
    inference_kv_cache_gib: KvCacheGib = "auto"
    # A micro-batch of training holds at most this many tokens (padding included). auto: 2048, and on a GPU what fits.
    train_token_budget: TokenBudget = "auto"
    # What is known of the machines of each gpu_class, as JSON: {"h100": {"gpu_memory_gib": 78, "kv_cache_gib": 24}}.
    # Set it to the same value for the API and all workers.
    gpu_classes: dict[str, GpuClass] = Field(default_factory=dict)

    # What a second of a GPU costs, and in which currency: without a price there are no costs to see and no budgets
    # in money. An ISO 4217 code.
    price_per_gpu_second: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    currency: str = Field(default="USD", pattern=r"^[A-Z]{3}$")

    @field_validator("first_key")
    @classmethod
    def _hard_to_guess(cls, key: str) -> str:
        if key and not re.fullmatch(r"\S{32,200}", key):
            raise PydanticCustomError("first_key", "must have 32 to 200 characters and no white space")
        return key

    @field_validator("default_limits", mode="before")
    @classmethod
    def _beside_the_default(cls, given: Any) -> Any:
        return DEFAULT_LIMITS.given() | given if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _has_a_key_for_inference(self) -> Self:
        if self.inference_url and not self.inference_key:
            raise ValueError(
                "REGRAFT_INFERENCE_URL needs REGRAFT_INFERENCE_KEY, the secret of the inference server there"
            )
        return self

    @model_validator(mode="after")
    def _has_a_key_for_its_group(self) -> Self:
        if (self.nodes > 1 or self.leader) and not self.ranks_key:
            raise ValueError(
                "REGRAFT_NODES and REGRAFT_LEADER need REGRAFT_RANKS_KEY, a secret that the machines of a group share"
            )
        return self

    def of_class(self, gpu_class: str) -> "Settings":
        """These settings with what `gpu_classes` says of one class in place of what holds for all."""
        known = self.gpu_classes.get(gpu_class, GpuClass())
        changes: dict[str, Any] = {
            name: value
            for name in ("kv_cache_gib", "train_token_budget", "sampler")
            if (value := getattr(known, name)) is not None
        }
        return self.model_copy(update=changes)

    def gpu_memory_gib(self, gpu_class: str) -> float | None:
        """Memory of one GPU of that class; 0: it has none; None: unknown."""
        return self.gpu_classes.get(gpu_class, GpuClass()).gpu_memory_gib

    @cached_property
    def database(self) -> str:
        """The SQLAlchemy URL; a plain postgresql:// gets the psycopg 3 driver we ship."""
        url = self.database_url or f"sqlite:///{(self.data_dir / 'regraft.db').resolve()}"
        return url.replace("postgresql://", "postgresql+psycopg://", 1)

    @cached_property
    def blobs(self) -> str:
        return self.blob_url or str((self.data_dir / "blobs").resolve())

    @cached_property
    def model_cache(self) -> Path:
        """Where models that must be converted first (GGUF) are kept, so that it happens once."""
        return (self.data_dir / "models").resolve()

    @cached_property
    def private_hosts(self) -> tuple[str, ...]:
        return tuple(name.strip().lower() for name in self.webhook_private_hosts.split(",") if name.strip())

    @cached_property
    def enabled_integrations(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name.strip() for name in self.integrations.split(",") if name.strip()))

    @cached_property
    def embedded(self) -> bool:
        """Everything in one process, the worker a thread of the server."""
        return self.broker_url.startswith("memory://")


def problems(invalid: ValidationError | SettingsError) -> str:
    """What is wrong with the environment, by the names of its variables."""
    if isinstance(invalid, SettingsError):
        return f"{invalid}: {invalid.__cause__}"
    return "; ".join(
        _problem(error)
        for error in invalid.errors(include_url=False)
        if error["type"] != "literal_error" or not _is_branch(error["loc"][-1])
    )


def _problem(error: ErrorDetails) -> str:
    if not error["loc"]:
        return str(error["ctx"]["error"])
    # Of a value that may also be "auto" pydantic names, at the end, which of the two it tried.
    *place, last = error["loc"]
    if _is_branch(last):
        return f"{_variable(*place)}: {error['msg']}, or 'auto'"
    return f"{_variable(*place, last)}: {error['msg']}"


def _is_branch(part: str | int) -> bool:
    return isinstance(part, str) and part.startswith(("literal[", "constrained-", "float", "int"))


def _variable(field: str | int, *inside: str | int) -> str:
    return ".".join(map(str, (f"REGRAFT_{str(field).upper()}", *inside)))
