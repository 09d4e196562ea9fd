"""Every command of `regraft-server` and its arguments, in one table.

Imports nothing but the standard library, so that `--help` is instant. The module of a command is imported once that
command has been chosen.
"""

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from textwrap import fill
from typing import Any

from worker.cli.command_line import (
    Argument,
    Command,
    Exclusive,
    Group,
    Parser,
    add_all,
    arg,
    completion_of,
    either,
    version_of,
)


class UsageError(Exception):
    """The command cannot run with these arguments or settings. Printed below the usage line; the exit status is 2."""


class ServerCommand(Command):
    """A command that a function runs.

    Args:
        handler: "module:function". The function takes the parsed arguments and returns the exit status; it raises
            UsageError for arguments or settings that it cannot work with.
        settings: of a service, the fields of core.settings.Settings that it reads.
    """

    def __init__(
        self,
        name: str,
        summary: str,
        handler: str,
        *arguments: Argument | Exclusive | str,
        settings: tuple[str, ...] = (),
    ) -> None:
        super().__init__(name, summary, *arguments, epilog=_listed(settings))
        self.handler, self.settings = handler, settings

    def add_to(self, commands: Any) -> Any:
        parser = super().add_to(commands)
        parser.set_defaults(handler=self.handler, starts=bool(self.settings))
        return parser


class ServerGroup(Group):
    """Commands that one function runs: the attribute `dest` of its arguments names the chosen one."""

    settings: tuple[str, ...] = ()

    def __init__(self, name: str, summary: str, handler: str, *commands: Command, dest: str) -> None:
        super().__init__(name, summary, *commands, dest=dest)
        self.handler = handler

    def add_to(self, commands: Any) -> Any:
        parser = super().add_to(commands)
        parser.set_defaults(handler=self.handler, starts=False)
        return parser


def build() -> argparse.ArgumentParser:
    parser = Parser(prog="regraft-server", description="Self-hosted reinforcement fine-tuning.")
    parser.add_argument("--version", action=version_of("regraft-server"))
    add_all(parser, (*COMMANDS, completion_of("regraft-server", build)), dest="command")
    return parser


def _listed(settings: tuple[str, ...]) -> str | None:
    if not settings:
        return None
    names = fill(", ".join(f"REGRAFT_{name.upper()}" for name in settings), 98, break_long_words=False)
    lines = "\n".join(f"  {line}" for line in names.splitlines())
    return f"environment variables that it reads (docs/reference/settings.md describes each):\n{lines}"


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Import the chosen command's handler and call it. Returns the exit status."""
    if (
        arguments.starts and sys.stderr.isatty()
    ):  # the imports alone take seconds; a log begins with the first event
        print(f"Starting `regraft-server {arguments.command}` ...", file=sys.stderr, flush=True)
    module, function = arguments.handler.split(":")
    handler: Callable[[argparse.Namespace], int] = getattr(import_module(module), function)
    try:
        return handler(arguments)
    except UsageError as wrong:
        parser.error(str(wrong))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _port(text: str) -> str:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: a whole number from 0 to 65535")
    return text


def _port_number(text: str) -> int:
    return int(_port(text))


def variable(option: str, metavar: str, help: str, kind: Callable[[str], str] = str) -> Argument:
    """An option in place of an environment variable, which `service.configured` reads."""
    name = "REGRAFT_" + option.removeprefix("--").replace("-", "_").upper()
    return arg(option, metavar, help, dest=name, type=kind)


SCOPES = (
    "read",
    "write",
    "admin",
    "operator",
)  # equal to core.tenancy.keys.SCOPES (by a test), which would import SQLAlchemy

# Fields of core.settings.Settings, which would import pydantic. A test compares them with those that the code reads.
_EVERY_SERVER = tuple(
    """
    host metrics_port data_dir device compile_cache blob_url s3_endpoint_url s3_region s3_checksums models_file
    inference_url samplers samplers_key connections_per_address keep_alive_seconds log_format
    """.split()
)
_API_AND_WORKER = tuple(
    """
    database_url broker_url graders_file hardware_file grader_environments inference_key integrations gpu_class
    default_limits sampler ranks nodes jobs_per_worker engines sampling_gpus kv_cache_gib train_token_budget
    reconcile_seconds patience_seconds webhook_private_hosts min_free_bytes otlp_endpoint warnings
    """.split()
)
_API = tuple(
    """
    port first_key passport_key console_site console_hosts docs_site sso_header sso_groups_header sso_proxies sso_rules
    drain_requests_seconds max_upload_bytes max_multipart_bytes min_upload_bytes_per_second grader_runs_per_project
    grader_runs_waiting_per_project uploads_per_project uploads_waiting_per_project streams_per_project
    pending_uploads_per_project
    """.split()
)
_WORKER = tuple(
    """
    claim episodes_host node_rank rendezvous lease_seconds drain_seconds hang_seconds lost_machine_seconds max_failures
    failing_steps max_logprob_gap torch_threads eval_concurrency rollout_bytes_per_job rollouts_per_step
    rollout_tokens_per_step keep_rollouts_days keep_checkpoints_days keep_files_days keep_audit_days orphan_hours
    scrub_days inference_max_lora_rank
    """.split()
)
_INFERENCE = tuple(
    """
    adapter_cache_bytes drain_requests_seconds inference_key inference_previous_key inference_max_lora_rank
    inference_kv_cache_gib sampler torch_threads otlp_endpoint min_upload_bytes_per_second
    """.split()
)
_SAMPLER = (
    "adapter_cache_bytes",
    "samplers_previous_key",
    "kv_cache_gib",
    "inference_max_lora_rank",
    "torch_threads",
)
_MEMBER = tuple(
    """
    ranks nodes node_rank rendezvous data_dir device compile_cache hang_seconds lost_machine_seconds patience_seconds
    log_format
    """.split()
)

_DISPATCHER = tuple(
    "host metrics_port data_dir database_url log_format reconcile_seconds default_limits".split()
)

JSON = arg("--json", help="print JSON")
SERVER = (
    variable("--host", "ADDRESS", "listen on this address (default: REGRAFT_HOST, else 127.0.0.1)"),
    variable(
        "--metrics-port",
        "PORT",
        "of the Prometheus metrics (default: REGRAFT_METRICS_PORT, else none)",
        _port,
    ),
    variable("--data-dir", "FOLDER", "of data and caches (default: REGRAFT_DATA_DIR, else .regraft)"),
)
API = (
    variable("--port", "PORT", "of the API and the console (default: REGRAFT_PORT, else 8000)", _port),
    *SERVER,
)
PROJECT = arg("--project", "ID", "default: the only one; required if there are several")

# Of admin; worker/cli/admin.py implements them.
ORG = Group(
    "org",
    "manage organizations",
    Command("create", "create an organization", "name", JSON),
    Command("list", "list all organizations", JSON),
    Command("rename", "rename an organization; existing model names do not change", "id", "name", JSON),
    dest="verb",
)
ADMIN_PROJECT = Group(
    "project",
    "manage projects",
    Command(
        "create",
        "create a project",
        "name",
        arg("--org", "ID", "default: the only one; required if there are several"),
        JSON,
    ),
    Command("list", "list all projects", arg("--org", "ID"), JSON),
    Command("rename", "rename a project", "id", "name", JSON),
    Command("archive", "archive a project: reject its keys and cancel its jobs", "id", JSON),
    Command(
        "limits",
        "show or change the limits of a project",
        "id",
        arg(
            "--set",
            "NAME=VALUE",
            "limits to set; shows the current limits if omitted",
            nargs="+",
            default=[],
        ),
        arg("--unset", "NAME", "revert to the default", nargs="+", default=[]),
        JSON,
    ),
    Command(
        "kueue",
        "show or change the queue and the priority that the dispatcher gives the Kubernetes Jobs of a project",
        "id",
        arg("--queue", "NAME", "LocalQueue of Kueue; empty: that of the pool"),
        arg("--priority-class", "NAME", "WorkloadPriorityClass of Kueue; empty: the default of Kueue"),
        JSON,
    ),
    dest="verb",
)
KEY = Group(
    "key",
    "manage API keys",
    Command(
        "create",
        "create a key; the key itself is printed only once",
        arg("--name", "NAME", default="cli"),
        arg("--scope", choices=SCOPES, default="admin"),
        arg("--owner", "OWNER", "person who uses the key", default=""),
        arg("--expires-in-days", "DAYS", type=_positive),
        PROJECT,
        JSON,
    ),
    Command("list", "list the keys of a project, including revoked and expired ones", PROJECT, JSON),
    Command(
        "rotate",
        "replace a key with a new one",
        "id",
        arg("--grace-hours", "HOURS", "keep the old key valid for HOURS", default=0),
        JSON,
    ),
    Command("revoke", "revoke a key", "id", JSON),
    dest="verb",
)
USAGE = Command("usage", "show the usage and limits of a project", PROJECT, JSON)
AUDIT = Command(
    "audit",
    "show the audit log, newest entries first",
    arg("--project", "ID", "show only this project (default: all)"),
    arg("--limit", "N", default=50),
    JSON,
)

MEMORY = Group(
    "memory",
    "show or forget the sizes that out-of-memory errors lowered for a model's jobs",
    Command("list", "list the lowered sizes that further jobs begin with", JSON),
    Command(
        "forget",
        "forget the lowered sizes of a model; running jobs keep theirs",
        "model",
        arg("--device", "NAME", "the kind of GPU as `list` shows it (default: all)"),
        JSON,
    ),
    dest="verb",
)

COMMANDS = (
    ServerCommand(
        "up",
        "run the API, a worker and the reconciler in one process",
        "worker.cli.service:up",
        *API,
        settings=(
            *_EVERY_SERVER,
            *_API_AND_WORKER,
            *_API,
            *_WORKER,
            "inference_idle_seconds",
            "inference_previous_key",
            "samplers_previous_key",
            "adapter_cache_bytes",
            "inference_kv_cache_gib",
        ),
    ),
    ServerCommand(
        "api",
        "run the HTTP API alone (needs REGRAFT_BROKER_URL)",
        "worker.cli.service:api",
        *API,
        settings=(*_EVERY_SERVER, *_API_AND_WORKER, *_API),
    ),
    ServerCommand(
        "worker",
        "run a worker and its reconciler (needs REGRAFT_BROKER_URL)",
        "worker.cli.service:worker",
        *SERVER,
        arg(
            "--jobs",
            "N",
            "run N jobs and exit, without a broker; another worker validates files, runs evals and reconciles",
            type=_positive,
        ),
        arg(
            "--exit-when-idle",
            "SECONDS",
            "with --jobs: exit if there is no job to claim for this time (default: 60)",
            type=_positive,
            default=60,
        ),
        settings=(*_EVERY_SERVER, *_API_AND_WORKER, *_WORKER),
    ),
    ServerCommand(
        "member",
        "run ranks for the worker of another machine (needs REGRAFT_RENDEZVOUS)",
        "worker.cli.service:member",
        settings=_MEMBER,
    ),
    ServerCommand(
        "migrate",
        "migrate the database to this version and create the first API key",
        "worker.cli.service:migrate",
        either(
            arg("--schema-only", help="migrate only; the API creates the first key on start-up"),
            arg(
                "--wait",
                "SECONDS",
                "do not migrate; wait until another process has, and exit with status 1 if none has in this time",
                type=_positive,
            ),
        ),
    ),
    ServerCommand(
        "inference",
        "run the inference server alone (needs REGRAFT_INFERENCE_KEY)",
        "worker.cli.service:inference",
        arg(
            "--model",
            "MODEL",
            "serve this base model and its tuned models only; /readyz answers 200 once it is loaded",
        ),
        arg(
            "--tensor-parallel",
            "GPUS",
            "with --model: GPUs that share each of its layers (default: tensor_parallel of its entry)",
            type=_positive,
        ),
        arg("--port", "PORT", type=_port_number, default=8100),
        *SERVER,
        settings=(*_EVERY_SERVER, *_INFERENCE),
    ),
    ServerCommand(
        "sampler",
        "sample for all jobs on one base model (needs REGRAFT_SAMPLERS_KEY)",
        "worker.cli.service:sampler",
        arg("--model", "MODEL", "base model of the registry", required=True),
        arg("--port", "PORT", type=_port_number, default=8300),
        *SERVER,
        settings=(*_EVERY_SERVER, *_SAMPLER),
    ),
    ServerCommand(
        "dispatcher",
        "start a Kubernetes Job for each queued job (docs/howto/kubernetes-pools.md)",
        "worker.cli.service:dispatcher",
        arg("--templates", "FOLDER", "of the templates, <gpu class>.json", required=True),
        arg("--api", "URL", "of the Kubernetes API", default="https://kubernetes.default.svc"),
        arg(
            "--account",
            "FOLDER",
            "with the files token, ca.crt and namespace of a ServiceAccount",
            default="/var/run/secrets/kubernetes.io/serviceaccount",
        ),
        *SERVER,
        settings=_DISPATCHER,
    ),
    ServerCommand(
        "export",
        "write a checkpoint to a folder",
        "worker.cli.service:export",
        arg("name", "NAME", "checkpoint id, tuned model name, or job id"),
        arg("-o --output", "FOLDER", "must be empty or not exist", required=True),
        arg(
            "--format",
            help="an adapter as PEFT writes it; the merged model in safetensors; the merged model as GGUF with a "
            "Modelfile; the adapter as GGUF (default: peft)",
            choices=["peft", "merged", "gguf", "gguf-adapter"],
            default="peft",
        ),
        arg(
            "--weight-type",
            help="with --format gguf: 16-bit floats, or 8-bit blocks (default: f16)",
            choices=["f16", "q8_0"],
        ),
    ),
    ServerGroup(
        "admin",
        "manage organizations, projects, API keys and limits; show usage, the audit log and lowered memory sizes",
        "worker.cli.admin:main",
        ORG,
        ADMIN_PROJECT,
        KEY,
        USAGE,
        AUDIT,
        MEMORY,
        dest="noun",
    ),
    ServerGroup(
        "environments",
        "install the packages of python graders (docs/howto/grader-packages.md)",
        "worker.cli.environments:main",
        Command(
            "build",
            "install an environment in REGRAFT_GRADER_ENVIRONMENTS, unless it is up to date",
            arg(
                "tag",
                "TAG",
                "image_tag of the environment (default: the default image_tag of graders)",
                nargs="?",
            ),
            arg("--nltk-data", "FOLDER", "folder of NLTK data to add, in NLTK's own layout"),
        ),
        dest="action",
    ),
    ServerGroup(
        "models",
        "try a model as a job would load it; add it to the registry",
        "worker.cli.models:main",
        Command(
            "check",
            "load models of the registry and compare them with transformers",
            arg("names", "MODEL", "models (default: all)", nargs="*"),
            arg("--json", help="print one JSON object a model"),
        ),
        Command(
            "add",
            "try a model and append it to REGRAFT_MODELS_FILE",
            arg("source", "SOURCE", "folder with the model's files, or its hub id"),
            arg("--name", "NAME", "its name here (default: the last part of the source)"),
            arg("--context", "N", "tokens of prompt and answer (default: 4096 or the model's limit)"),
            arg("--dtype", choices=["bfloat16", "float32"], default="bfloat16"),
        ),
        dest="action",
    ),
    ServerCommand(
        "plan",
        "predict placement, memory and seconds of a step on GPUs that are not here",
        "worker.cli.plan:main",
        arg("model", "MODEL", "a model of the registry, or a folder with its config.json"),
        arg("--gpus", "GPUS", "such as H200-141, 8xH100-80, or 2x8xH100-80 for two machines", required=True),
        arg("--batch-size", "PROMPTS", "of a step (default: 8)", type=int, default=8),
        arg("--group-size", "ANSWERS", "to each prompt (default: 8)", type=int, default=8),
        arg("--prompt", "TOKENS", "of a prompt (default: 512)", type=int, default=512),
        arg("--max-completion-tokens", "TOKENS", "(default: 2048)", type=int, default=2048),
        arg("--answer", "TOKENS", "mean of an answer (default: half of the most)", type=int),
        arg("--lora-rank", "N", "(default: 16)"),
        arg(
            "--off-policy-steps",
            "STEPS",
            "1 to 4: some GPUs sample this number of steps ahead while others learn (default: 0, each does both)",
            type=int,
            choices=range(5),
            default=0,
        ),
        arg(
            "--sampling-gpus",
            "GPUS",
            "with --off-policy-steps: how many GPUs sample (default: those with the shortest step)",
            type=int,
        ),
        arg(
            "--train",
            help="an adapter, or all weights (default: lora)",
            choices=["lora", "full"],
            default="lora",
        ),
        arg("--kl", help="with --train full: keep a copy of the first weights for a KL penalty"),
        arg("--json", help="print one JSON object"),
    ),
    ServerCommand(
        "doctor",
        "check this machine: GPU, packages, memory, disks, sandbox, database, broker, blob store",
        "worker.cli.doctor:main",
        arg("--json", help="print one JSON object"),
        arg(
            "--only",
            "NAME",
            "checks, or groups of them: gpu, compute, machine, services (default: all)",
            nargs="+",
            default=[],
        ),
    ),
    ServerCommand(
        "backup",
        "copy the database and the blobs into a folder (docs/howto/restore.md)",
        "worker.cli.backup:back_up",
        arg("folder", "FOLDER", "a new or empty folder"),
    ),
    ServerCommand(
        "restore",
        "copy a backup into an empty database and an empty store (docs/howto/restore.md)",
        "worker.cli.backup:restore",
        arg("folder", "FOLDER", "the folder of the backup"),
        arg("--verify", help="then compare the numbers of rows and blobs, and verify the hash of every blob"),
    ),
    ServerCommand(
        "fsck",
        "verify the hash of every blob (docs/howto/storage.md)",
        "worker.cli.service:check_blobs",
        arg("--json", help="print one JSON object per finding"),
    ),
    ServerCommand(
        "sweep",
        "delete orphaned blobs (docs/howto/storage.md)",
        "worker.cli.service:sweep",
        arg("--older-than-hours", "HOURS", "minimum age; at least 1 (default: REGRAFT_ORPHAN_HOURS)"),
        arg("--dry-run", help="print the blobs without deleting them"),
    ),
)
