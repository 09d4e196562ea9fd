"""Every environment variable the service reads, typed, in one place."""

import re
import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from core.addresses import (
    HostPort,
    HttpUrl,
    HttpUrlOrEmpty,
    check_folder_or_url,
    check_is_escaped,
    check_is_meant,
    check_path,
    check_redis_url,
    plain_host,
)
from core.hardware import Auto, Hardware, KvCacheGib, SamplerChoice, TokenBudget, hardware_of
from core.inference import InferenceUrl, address_of
from core.masking import hide_secrets
from core.tenancy.limits import DEFAULT_LIMITS, Limits
from core.tenancy.single_sign_on import Rule, TrustedNetwork
from core.thresholds import Thresholds

Checksums = Literal["when_supported", "when_required"]
DeviceChoice = Literal["auto", "cpu", "cuda"]
EngineCount = Auto | Annotated[int, Field(ge=1)]
Addresses = tuple[Annotated[HttpUrl, Field(pattern=r"^https?://[^\s/@]+(/\S*)?$")], ...]

_HEADER = r"^([A-Za-z][A-Za-z0-9-]{0,63})?$"
# Headers that mean something else to HTTP or to the service.
_TAKEN = re.compile(
    "authorization|api-key|cookie|host|connection|forwarded|x-forwarded-(for|proto|host)|x-regraft-console|"
    "(content|sec|openai)-.*",
    re.IGNORECASE,
)


class Settings(BaseSettings):
    """Read REGRAFT_* once and pass the values down; no other code reads the environment.

    With nothing set this is the embedded default: SQLite, a folder for blobs and Celery's in-process
    broker, all under `data_dir`.
    """

    # Error messages omit the value, which may be a key.
    # An empty variable is unset, as Compose writes one: an empty path would be the working directory.
    model_config = SettingsConfigDict(
        env_prefix="REGRAFT_",
        env_ignore_empty=True,
        frozen=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )

    # Folder of the embedded database, blobs and first key, and of a worker's heartbeat file and caches.
    data_dir: Path = Path(".regraft")
    # postgresql://user:password@host:5432/name, or sqlite:////folder/regraft.db. Empty: SQLite in the data folder.
    database_url: str = ""
    # s3://bucket/prefix, file:///folder or a path (docs/howto/storage.md). Empty: `blobs` in the data folder.
    blob_url: str = ""
    # https://host:port of an S3-compatible store, and its region. Unset: AWS, and the region that boto3 finds.
    s3_endpoint_url: HttpUrl | None = Field(default=None, pattern=r"^https?://[^\s/]+/?$")
    s3_region: str | None = None
    # when_required: for S3-compatible stores that do not support checksums.
    s3_checksums: Checksums = "when_supported"
    # redis://:password@host:6379/0, or rediss:// for TLS (docs/howto/operations.md#redis-with-tls), of one primary:
    # Sentinel and Cluster are not supported.
    # memory:// works only within one process, that of `up`.
    broker_url: str = Field(default="memory://", pattern=r"^(memory|rediss?)://")
    # Folder of compiled kernels: those of Triton, torch.compile, vLLM, FlashInfer and the driver. On a volume it saves
    # the first job of a new pod minutes (docs/explain/gpus.md). Unset: each library's own folder.
    compile_cache: Path | None = None
    # TOML file of the base models, instead of the included ones (docs/howto/models.md).
    models_file: Path | None = None
    # Judge models and the hosts that endpoint graders may call (docs/howto/graders.md). Unset: neither.
    graders_file: Path | None = None
    # TOML file of the GPUs of each class and their price (see The hardware file), the same for the API and all
    # workers, read again when it has changed. Unset: neither is known.
    hardware_file: Path | None = None
    # Folder of the environments of python graders (`regraft-server environments build`,
    # docs/howto/grader-packages.md).
    grader_environments: Path = Field(default_factory=lambda: Path(sys.prefix, "share/regraft/graders"))
    # The documentation site that the API serves at /docs, as `make docs` builds it; without an index.html, none.
    docs_site: Path = Field(default_factory=lambda: Path(sys.prefix, "share/regraft/docs"))
    # The built console that the API serves at /; without an index.html, one sentence instead.
    console_site: Path = Field(default_factory=lambda: Path(sys.prefix, "share/regraft/console"))
    # Host names of the console, as JSON: ["regraft.example.com"]. Addresses and localhost need no entry.
    console_hosts: tuple[str, ...] = ()

    # Single sign-on for the console (docs/howto/security.md#single-sign-on). The header in which a proxy that has
    # authenticated the user names them, such as X-Auth-Request-Email. Empty: off.
    sso_header: str = Field(default="", pattern=_HEADER)
    # The header in which the proxy names the user's groups, separated by commas. Empty: none.
    sso_groups_header: str = Field(default="", pattern=_HEADER)
    # Addresses and networks of these proxies, as JSON: ["10.0.3.7", "fd00:12::/64"]. The header of others is refused.
    sso_proxies: tuple[TrustedNetwork, ...] = ()
    # What users and groups may do, as JSON; the first rule that applies holds: [{"user": "ana@example.com", "project":
    # "proj_1", "scope": "admin"}, {"group": "ml", "project": "proj_2", "scope": "write"}]. The user "*" is every
    # user of the proxy.
    sso_rules: tuple[Rule, ...] = ()

    # Base URL, including /v1, of the inference server for chat completions of the registry's models. `regraft-server
    # up` starts one and sets this; `regraft-server inference` runs one. Several servers, as JSON: {"qwen3-4b":
    # "http://a:8100/v1", "*": "http://b:8100/v1"}, by base model; `*` stands for all others.
    inference_url: InferenceUrl = ""
    # Secret that the API and the inference server share.
    inference_key: str = Field(default="", repr=False)
    # The key before, which the inference server accepts, too, while clients that started with it still run
    # (docs/howto/operations.md#change-settings-and-rotate-secrets).
    inference_previous_key: str = Field(default="", repr=False)
    # The inference server that `up` started stops after this many seconds without a request; the next request restarts
    # it.
    inference_idle_seconds: float = Field(default=300.0, gt=0)
    # Bytes on disk for the adapters and tuned models that an inference server or a sampler has downloaded. The least
    # recently used are removed before another one is downloaded. 0: no limit but their number.
    adapter_cache_bytes: int = Field(default=0, ge=0)
    # The highest LoRA rank that vLLM serves; each adapter slot is allocated for this rank.
    inference_max_lora_rank: int = Field(default=64, ge=1, le=512)

    # Text of the first API key, created when the database is empty. Empty: a random one. Only its hash is stored, so
    # the setting is read once.
    first_key: str = Field(default="", repr=False)

    # Private key that signs the passports of models (docs/howto/passports.md): 32 bytes in base64, as `openssl rand
    # -base64 32` prints them. Empty: the file `passport_key` of the data folder, which `up` creates; without it, none.
    passport_key: str = Field(default="", repr=False)

    # Private hosts that webhooks may be sent to: host names, comma separated, `*` matches any run of characters
    # (docs/howto/webhooks.md).
    webhook_private_hosts: str = ""

    # Exporters that jobs may use, comma separated: wandb, mlflow, trackio, tensorboard (docs/howto/integrations.md).
    integrations: str = Field(
        default="",
        pattern=r"^( *(wandb|mlflow|trackio|tensorboard) *(, *(wandb|mlflow|trackio|tensorboard) *)*)?$",
    )

    # Address that the API and the metrics listen on; 0.0.0.0: all of IPv4; `::`: all.
    host: str = "127.0.0.1"
    # Port of the API.
    port: int = Field(default=8000, ge=0, le=65535)
    # Connections that one address may have open at once, at most half of the descriptors of the process; further ones
    # are closed. Proxies of FORWARDED_ALLOW_IPS and REGRAFT_SSO_PROXIES are exempt. 0: no limit.
    connections_per_address: int = Field(default=1000, ge=0)
    # Seconds that API and inference server keep an idle connection open. Must exceed the idle timeout of a proxy before
    # them, which would otherwise send requests to connections that are being closed (502).
    keep_alive_seconds: int = Field(default=75, ge=1)
    # Time that requests in flight have to complete after SIGTERM, of API and inference server; then they get 503 with
    # Retry-After. The default is the longest response that the API waits for. `up` cuts them after 5 s.
    drain_requests_seconds: int = Field(default=600, ge=0)
    # json: one object per line with request, job and step ids, and a line per request (docs/howto/observability.md).
    log_format: Literal["text", "json"] = "text"
    # OTLP endpoint for traces, over HTTP: http://collector:4318. Needs regraft-server[otel]. Empty: off.
    otlp_endpoint: HttpUrlOrEmpty = Field(default="", json_schema_extra={"pattern": r"^(https?://.+)?$"})
    # Port of the Prometheus metrics (docs/howto/observability.md). Unauthenticated, so not the API's port. 0: off.
    metrics_port: int = Field(default=0, ge=0, le=65535)
    # Maximum size of a file, except of one that is uploaded in parts, and of a file that a pipeline writes.
    max_upload_bytes: int = Field(default=512 * 1024 * 1024, ge=1)
    # /readyz returns 503 if the disk of the SQLite database or of the blob folder has less free space. 0: never.
    min_free_bytes: int = Field(default=256 << 20, ge=0)
    # A request body that arrives more slowly than this, on average over 30 s, is rejected with 408. 0: no minimum.
    min_upload_bytes_per_second: int = Field(default=1000, ge=0)
    # Maximum size of a multipart upload (docs/howto/storage.md).
    max_multipart_bytes: int = Field(default=8 << 30, ge=1, le=8 << 30)
    # Default limits of a project without its own limits, as JSON: {"running_jobs": 2}. The default request
    # rate stays in force unless it is named: {"requests_per_minute": null}.
    default_limits: Limits = DEFAULT_LIMITS
    # Concurrent long requests per project and API process, and how many more may queue; further requests get 429
    # (docs/howto/tenants.md).
    grader_runs_per_project: int = Field(default=8, ge=1)
    grader_runs_waiting_per_project: int = Field(default=32, ge=0)
    uploads_per_project: int = Field(default=8, ge=1)
    uploads_waiting_per_project: int = Field(default=64, ge=0)
    streams_per_project: int = Field(default=100, ge=1)
    # Multipart uploads that are not yet completed, cancelled or expired.
    pending_uploads_per_project: int = Field(default=100, ge=1)

    # Samples that one eval run requests from the inference server at once (docs/howto/evals.md).
    eval_concurrency: int = Field(default=64, ge=1)

    # Retention in days of the rollouts of finished jobs and items of finished eval runs, of unnamed checkpoints of
    # finished jobs, and of files (docs/howto/storage.md).
    keep_rollouts_days: float | None = Field(default=None, gt=0)
    keep_checkpoints_days: float | None = Field(default=None, gt=0)
    keep_files_days: float | None = Field(default=None, gt=0)
    # Retention in days of the entries of the audit log. 0: for ever (docs/howto/storage.md).
    keep_audit_days: float = Field(default=365.0, ge=0)
    # Maximum stored bytes of a job's samples, and maximum stored samples per step and split. Beyond either, whole
    # groups
    # are subsampled (docs/howto/rollouts.md).
    rollout_bytes_per_job: int = Field(default=1 << 30, ge=0)
    rollouts_per_step: int = Field(default=10_000, ge=0)
    # Tokens of a step's samples, and of those of a validation, whose log-probability, advantage and sampler gap are
    # stored. 0: none.
    rollout_tokens_per_step: int = Field(default=20_000, ge=0)
    # Minimum age of a blob without a row before it is deleted. Must exceed the duration of any upload.
    orphan_hours: float = Field(default=24.0, ge=1)
    # Every file and checkpoint is verified against its hash once in this many days. 0: never (docs/howto/storage.md).
    scrub_days: float = Field(default=30.0, ge=0)

    # The queue that this machine's worker serves, and the default queue of new jobs.
    gpu_class: str = Field(default="cpu", pattern=r"^[a-z0-9_-]{1,32}$")
    # The id of the only job that this worker may claim, of a pod that was started for it. Unset: any job of its class.
    claim: str = Field(default="", pattern=r"^(ftjob-[A-Za-z0-9]+)?$")
    # A worker renews its lease every quarter of this interval, and loses the job when the lease expires.
    lease_seconds: float = Field(default=60.0, gt=0)
    reconcile_seconds: float = Field(default=2.0, gt=0)
    # Time that a run has to reach its next checkpoint after a request to stop, before it is killed.
    drain_seconds: float = Field(default=30.0, ge=0)
    # A run without progress (no answer, no grade, no update) for this long is considered hung, killed and retried.
    hang_seconds: float = Field(default=3600.0, gt=0)
    # A machine of a group (REGRAFT_NODES) that does not answer for this long is lost: the attempt ends as a crash.
    lost_machine_seconds: float = Field(default=60.0, ge=1)
    # How long a run retries an unavailable database, blob store, disk or server of a grader before it fails as crashed;
    # and how long work waits for a worker that knows a model or a judge which the API has accepted before it fails.
    patience_seconds: float = Field(default=600.0, ge=0)
    # Consecutive crashes (not drains, not user errors) that a job survives; a new checkpoint resets the count.
    max_failures: int = Field(default=3, ge=0)
    # A job fails after this many consecutive steps in which more than half of the grades failed.
    failing_steps: int = Field(default=3, ge=1)
    # Thresholds of the warnings of a run (docs/howto/signal.md), as JSON:
    # {"kl_jump": 1.0, "length_factor": null}.
    warnings: Thresholds = Thresholds()
    # Ranks per machine: processes, each with the model on its own GPU, that share a step's gradient
    # (docs/howto/scale.md).
    ranks: int = Field(default=1, ge=1)
    # Machines that share a run, including this one, each with the same number of ranks. Machine 0 runs the worker, the
    # others `regraft-server member` with their `node_rank`. They meet at `rendezvous`, a host:port of machine 0 that
    # only they may reach; the port after it is used, too (docs/howto/multi-node.md).
    nodes: int = Field(default=1, ge=1)
    node_rank: int = Field(default=0, ge=0)
    rendezvous: str = Field(default="", pattern=r"^(\S+:\d{1,5})?$")
    # Address of this worker for the API, which forwards to it what the user's agent asks for (docs/howto/own-agent.md).
    # Each run listens there, on a port that the system chooses. The default is for a worker beside the API.
    episodes_host: str = "127.0.0.1"
    # Jobs that a worker with one GPU runs at once, if they are on the same base model, which is then in memory once
    # (docs/howto/shared-gpu.md).
    jobs_per_worker: int = Field(default=1, ge=1, le=16)
    # auto: the GPU, or the CPU of a machine without one. A GPU that torch cannot use is an error, unless this is `cpu`
    # (docs/howto/doctor.md).
    device: DeviceChoice = "auto"
    # Threads that torch may use in a run. 0: torch's default.
    torch_threads: int = Field(default=0, ge=0)
    # The sampler: each model's own choice in the registry, or one for all.
    sampler: SamplerChoice = "registry"
    # vLLM engines that sample for one job, each on `tensor_parallel` GPUs (docs/howto/scale.md). auto: as many as
    # the job's GPUs are enough for; 1 on a CPU.
    engines: EngineCount = "auto"
    # GPUs (on a CPU, processes) for sampling alone, besides those of the ranks. Jobs with the schedule `off_policy`
    # sample there while the ranks learn; others sample on all GPUs (docs/howto/scale.md).
    sampling_gpus: int = Field(default=0, ge=0)
    # Rollout fleets by base model, as JSON: {"qwen3-4b": ["http://sampler-qwen3-4b:8300"]}. Jobs on these models are
    # sampled there, by the processes of `regraft-server sampler` behind all addresses that the names resolve to, with
    # the key that both sides share, and the inference server answers with them (docs/howto/rollout-fleet.md). Set the
    # same value for the API, all workers and the inference server.
    samplers: dict[str, Annotated[Addresses, Field(min_length=1)]] = Field(default_factory=dict)
    samplers_key: str = Field(default="", repr=False)
    # The key before, which samplers accept, too, as `inference_previous_key`.
    samplers_previous_key: str = Field(default="", repr=False)
    # A step is not taken if the mean difference between the log-probabilities of sampler and trainer for the same
    # tokens exceeds this, in nats per token; after two such steps in a row the job fails. auto: 0.05 for bfloat16,
    # 0.001 for float32; for a mixture of experts three times the difference in the first step, up to 0.12 and 0.005.
    # 0: off.
    max_logprob_gap: Literal["auto"] | Annotated[float, Field(ge=0, allow_inf_nan=False)] = "auto"
    # GPU memory for vLLM's KV cache while a job runs, allocated up front. auto: the free memory, up to what the job can
    # use (docs/howto/speed.md#memory-planning).
    kv_cache_gib: KvCacheGib = "auto"
    # The same for the inference server, per loaded model (docs/howto/serving.md#memory-on-a-gpu).
    inference_kv_cache_gib: KvCacheGib = "auto"
    # Maximum tokens of a training micro-batch, padding included. auto: 2048; on a GPU, the number that fits.
    train_token_budget: TokenBudget = "auto"

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """The settings for a log or a debugger: without keys, and with the passwords in URLs masked."""
        return ((name, hide_secrets(value)) for name, value in super().__repr_args__())

    @field_validator("*", mode="before")
    @classmethod
    def _can_be_meant(cls, value: Any) -> Any:
        if isinstance(value, str):
            check_is_meant(value)
        return value

    @field_validator("broker_url", mode="before")
    @classmethod
    def _is_one_redis(cls, url: Any) -> Any:
        if not isinstance(url, str):
            return url
        if re.match(r"\w*\+?(sentinel|cluster)\b", url.partition("://")[0]):
            text = (
                "Redis Sentinel and Redis Cluster are not supported: name one primary, as redis://host:6379/0"
            )
            raise PydanticCustomError("broker_url", text)
        if not re.match(r"(memory|rediss?)://", url):
            raise PydanticCustomError("broker_url", "must begin with redis://, rediss:// (TLS) or memory://")
        try:
            check_is_escaped(url)
            if url != "memory://":
                check_redis_url(url)
        except ValueError as problem:
            raise PydanticCustomError("broker_url", "{problem}", {"problem": str(problem)}) from None
        return url

    @field_validator("*", mode="after")
    @classmethod
    def _check_paths(cls, value: Any, field: ValidationInfo) -> Any:
        try:
            if field.field_name == "blob_url":
                check_folder_or_url(value)
            elif field.field_name == "database_url" and value.startswith("sqlite"):
                check_path(value.partition(":///")[2])
            elif isinstance(value, Path):
                check_path(value)
        except ValueError as problem:
            raise PydanticCustomError("path", "{problem}", {"problem": str(problem)}) from None
        return value

    @field_validator("host", "episodes_host", "rendezvous", mode="after")
    @classmethod
    def _is_an_address(cls, text: str, field: ValidationInfo) -> str:
        if field.field_name == "episodes_host" and not text.strip("[].:0"):  # none, 0.0.0.0 or ::
            raise PydanticCustomError(
                "address", "must be an address of this machine that the API can connect to"
            )
        if not text:
            return text
        try:
            is_host = field.field_name != "rendezvous"
            return plain_host(text) if is_host else str(HostPort.parse(text))
        except ValueError as problem:
            raise PydanticCustomError("address", "{problem}", {"problem": str(problem)}) from None

    @field_validator("first_key")
    @classmethod
    def _hard_to_guess(cls, key: str) -> str:
        if key and not re.fullmatch(r"\S{32,200}", key):
            raise PydanticCustomError("first_key", "must have 32 to 200 characters and no white space")
        return key

    @field_validator("passport_key")
    @classmethod
    def _is_a_private_key(cls, text: str) -> str:
        if text:
            from core.passports import Signer  # `cryptography` is imported where a key is set alone

            try:
                Signer.parse(text)
            except ValueError as problem:
                raise PydanticCustomError("passport_key", "{problem}", {"problem": str(problem)}) from None
        return text.strip()

    @field_validator("sso_header", "sso_groups_header")
    @classmethod
    def _is_a_header_of_its_own(cls, name: str) -> str:
        if _TAKEN.fullmatch(name):
            raise PydanticCustomError("taken_header", "{name} has another meaning", {"name": name})
        return name

    @field_validator("default_limits", mode="before")
    @classmethod
    def _beside_the_default(cls, limits: Any) -> Any:
        return DEFAULT_LIMITS.set_limits() | limits if isinstance(limits, dict) else limits

    @model_validator(mode="after")
    def _has_a_key_for_inference(self) -> Self:
        if self.inference_url and not self.inference_key:
            raise ValueError(
                "REGRAFT_INFERENCE_URL needs REGRAFT_INFERENCE_KEY, the secret of that inference server"
            )
        return self

    @model_validator(mode="after")
    def _has_proxies_and_rules_for_single_sign_on(self) -> Self:
        if bool(self.sso_header) != bool(self.sso_proxies) or bool(self.sso_header) != bool(self.sso_rules):
            raise ValueError(
                "REGRAFT_SSO_HEADER, REGRAFT_SSO_PROXIES and REGRAFT_SSO_RULES belong together: set all three or none"
            )
        if not self.sso_groups_header and any(rule.group is not None for rule in self.sso_rules):
            raise ValueError("REGRAFT_SSO_RULES names groups, which need REGRAFT_SSO_GROUPS_HEADER")
        if self.sso_groups_header and self.sso_groups_header.lower() == self.sso_header.lower():
            raise ValueError("REGRAFT_SSO_GROUPS_HEADER and REGRAFT_SSO_HEADER must be two headers")
        return self

    @model_validator(mode="after")
    def _has_its_place_in_a_group(self) -> Self:
        if self.nodes > 1 and not self.rendezvous:
            raise ValueError("REGRAFT_NODES needs REGRAFT_RENDEZVOUS, a host:port of the machine with rank 0")
        if self.rendezvous.endswith(":65535"):
            raise ValueError("REGRAFT_RENDEZVOUS needs a port below 65535: the next port is used, too")
        if self.node_rank >= self.nodes:
            raise ValueError("REGRAFT_NODE_RANK must be below REGRAFT_NODES")
        return self

    @model_validator(mode="after")
    def _has_a_key_for_its_samplers(self) -> Self:
        if self.samplers and not self.samplers_key:
            raise ValueError("REGRAFT_SAMPLERS needs REGRAFT_SAMPLERS_KEY, the secret of these samplers")
        return self

    @property
    def hardware(self) -> Hardware:
        """The content of the hardware file of now. Raises InvalidHardware at its first reading."""
        return hardware_of(self.hardware_file)

    def inference_address(self, base_model: str) -> str:
        """The base URL of the inference server of a base model, and of the models tuned from it; empty if none."""
        return address_of(self.inference_url, base_model)

    def of_class(self, gpu_class: str, gpus: int | None = None) -> "Settings":
        """These settings with the overrides that the hardware file has for one class.

        Args:
            gpus: those of each node of a job that has as many. None: those of the class.
        """
        known = self.hardware.of(gpu_class)
        changes: dict[str, Any] = {
            name: value
            for name in ("kv_cache_gib", "train_token_budget", "sampler", "ranks")
            if (value := getattr(known, name)) is not None
        }
        if gpus is not None:
            changes["ranks"] = gpus - known.sampling_gpus
        return self.model_copy(update=changes)

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
        """Cache for models that are converted before use (GGUF)."""
        return (self.data_dir / "models").resolve()

    @cached_property
    def private_hosts(self) -> tuple[str, ...]:
        return tuple(name.strip().lower() for name in self.webhook_private_hosts.split(",") if name.strip())

    @cached_property
    def enabled_integrations(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name.strip() for name in self.integrations.split(",") if name.strip()))

    @cached_property
    def embedded(self) -> bool:
        """Whether the server runs everything in one process, with the worker as a thread."""
        return self.broker_url.startswith("memory://")


# Variables of the client library and of the sandbox of python graders (docs/howto/sandbox.md).
_OTHERS = {"REGRAFT_API_KEY", "REGRAFT_BASE_URL", "REGRAFT_CONFIG", "REGRAFT_PYTHON_GRADERS"}
# Kubernetes sets these in every pod for a Service whose name is or begins with regraft.
_SERVICE_LINK = re.compile(r"(^|_)SERVICE_(HOST|PORT)|(^|_)PORT_\d+_")


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Describe the REGRAFT_* variables that no code reads, with the setting that each may be a misspelling of."""
    settings = [name.upper() for name in Settings.model_fields]
    lines = []
    for variable, value in sorted(environment.items()):
        name = variable.removeprefix("REGRAFT_")
        if name == variable or variable in _OTHERS or name.upper() in settings:
            continue
        if _SERVICE_LINK.search(name) or value.startswith("tcp://"):
            continue
        meant = get_close_matches(name, settings, n=1, cutoff=0.8)
        hint = f"; did you mean REGRAFT_{meant[0]}?" if meant else ""
        lines.append(f"{variable} is not a setting and has no effect{hint}")
    return lines


def problems(invalid: ValidationError | SettingsError) -> str:
    """Describe the invalid environment variables by name."""
    if isinstance(invalid, SettingsError):  # a value that must be JSON and is not
        field = re.search(r'field "(\w+)"', str(invalid))
        name = _variable(field[1]) if field else str(invalid)
        return f"{name}: is not JSON: {invalid.__cause__}"
    return "; ".join(
        _problem(error)
        for error in invalid.errors(include_url=False)
        if error["type"] != "literal_error" or not _is_branch(error["loc"][-1])
    )


def _problem(error: ErrorDetails) -> str:
    if not error["loc"]:
        return str(error["ctx"]["error"])
    # For a value that may also be "auto", pydantic appends the attempted branch to the location.
    *place, last = error["loc"]
    if place and _is_branch(last):
        return f"{_variable(*place)}: {error['msg']}, or 'auto'"
    return f"{_variable(*place, last)}: {error['msg']}"


def _is_branch(part: str | int) -> bool:
    return isinstance(part, str) and part.startswith(("literal[", "constrained-", "float", "int"))


def _variable(field: str | int, *inside: str | int) -> str:
    return ".".join(map(str, (f"REGRAFT_{str(field).upper()}", *inside)))
