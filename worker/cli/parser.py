"""Every command of `regraft-server` and its arguments.

Imports nothing but the standard library, so that `--help` is instant. The module of a command is imported once that
command has been chosen.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from textwrap import fill
from typing import Any

from worker.cli.command_line import SHELLS, Parser, script


class UsageError(Exception):
    """The command cannot run with these arguments or settings. Printed below the usage line; the exit status is 2."""


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    pass


@dataclass(frozen=True)
class Command:
    """One line of `regraft-server --help`.

    `handler` is "module:function". The function takes the parsed arguments and returns the exit status; it raises
    UsageError for arguments or settings that it cannot work with. A command with sub-commands adds them in `arguments`.
    `settings`: of a service, the fields of core.settings.Settings that it reads.
    """

    name: str
    summary: str
    handler: str
    arguments: Callable[[argparse.ArgumentParser], None] = _no_arguments
    settings: tuple[str, ...] = ()


class Version(argparse.Action):
    """`--version`. Reads the version of the installed package only when the option is used."""

    def __init__(self, option_strings: list[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        from importlib.metadata import version  # 30 ms, which would slow down --help

        print(f"regraft-server {version('regraft-server')}")
        parser.exit()


def build() -> argparse.ArgumentParser:
    parser = Parser(prog="regraft-server", description="Self-hosted reinforcement fine-tuning.")
    parser.add_argument("--version", action=Version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        added = commands.add_parser(
            command.name,
            help=command.summary,
            description=f"{command.summary}.",
            epilog=_listed(command.settings),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(handler=command.handler, starts=bool(command.settings))
        command.arguments(added)
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


def _worker(parser: argparse.ArgumentParser) -> None:
    """Add options in place of environment variables, which `service.configured` reads."""
    for option, metavar, text in (
        ("--host", "ADDRESS", "listen on this address (default: REGRAFT_HOST, else 127.0.0.1)"),
        ("--metrics-port", "PORT", "of the Prometheus metrics (default: REGRAFT_METRICS_PORT, else none)"),
        ("--data-dir", "FOLDER", "of data and caches (default: REGRAFT_DATA_DIR, else .regraft)"),
    ):
        _in_place_of_a_variable(parser, option, metavar, text)


def _api(parser: argparse.ArgumentParser) -> None:
    _in_place_of_a_variable(
        parser, "--port", "PORT", "of the API and the console (default: REGRAFT_PORT, else 8000)"
    )
    _worker(parser)


def _in_place_of_a_variable(parser: argparse.ArgumentParser, option: str, metavar: str, text: str) -> None:
    variable = "REGRAFT_" + option.removeprefix("--").replace("-", "_").upper()
    parser.add_argument(option, dest=variable, metavar=metavar, help=text)


def _inference(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=8100)
    _worker(parser)


def _sampler(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="base model of the registry")
    parser.add_argument("--port", type=int, default=8300)
    _worker(parser)


def _completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)


def completion(arguments: argparse.Namespace) -> int:
    print(script(build(), arguments.shell), end="")
    return 0


def _migrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--schema-only", action="store_true", help="migrate only; the API creates the first key on start-up"
    )


def _export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="checkpoint id, tuned model name, or job id")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, help="output folder; must be empty or not exist"
    )
    parser.add_argument("--merged", action="store_true", help="write the merged model instead of the adapter")


def _environments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    build = actions.add_parser(
        "build", help="install an environment in REGRAFT_GRADER_ENVIRONMENTS, unless it is up to date"
    )
    build.add_argument(
        "tag", nargs="?", help="image_tag of the environment (default: the default image_tag of graders)"
    )
    build.add_argument(
        "--nltk-data", type=Path, metavar="FOLDER", help="folder of NLTK data to add, in NLTK's own layout"
    )


def _models(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    check = actions.add_parser("check", help="load models of the registry and compare them with transformers")
    check.add_argument("names", nargs="*", help="models (default: all)")
    check.add_argument("--json", action="store_true", help="print one JSON object a model")
    add = actions.add_parser("add", help="try a model and append it to REGRAFT_MODELS_FILE")
    add.add_argument("source", help="folder with the model's files, or its hub id")
    add.add_argument("--name", help="its name here (default: the last part of the source)")
    add.add_argument(
        "--context", type=int, help="tokens of prompt and answer (default: 4096 or the model's limit)"
    )
    add.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")


def _plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a model of the registry, or a folder with its config.json")
    parser.add_argument(
        "--gpus", required=True, help="such as H200-141, 8xH100-80, or 2x8xH100-80 for two machines"
    )
    parser.add_argument("--batch-size", type=int, default=8, metavar="PROMPTS", help="of a step (default: 8)")
    parser.add_argument(
        "--group-size", type=int, default=8, metavar="ANSWERS", help="to each prompt (default: 8)"
    )
    parser.add_argument(
        "--prompt", type=int, default=512, metavar="TOKENS", help="of a prompt (default: 512)"
    )
    parser.add_argument(
        "--max-completion-tokens", type=int, default=2048, metavar="TOKENS", help="(default: 2048)"
    )
    parser.add_argument(
        "--answer", type=int, metavar="TOKENS", help="mean of an answer (default: half of the most)"
    )
    parser.add_argument("--lora-rank", type=int, help="(default: 16)")
    parser.add_argument(
        "--off-policy-steps",
        type=int,
        choices=range(5),
        default=0,
        metavar="STEPS",
        help="1 to 4: some GPUs sample this number of steps ahead while others learn (default: 0, each does both)",
    )
    parser.add_argument(
        "--sampling-gpus",
        type=int,
        metavar="GPUS",
        help="with --off-policy-steps: how many GPUs sample (default: those with the shortest step)",
    )
    parser.add_argument(
        "--train", choices=["lora", "full"], default="lora", help="an adapter, or all weights (default: lora)"
    )
    parser.add_argument(
        "--kl",
        action="store_true",
        help="with --train full: keep a copy of the first weights for a KL penalty",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _sweep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--older-than-hours", type=float, help="minimum age; at least 1 (default: REGRAFT_ORPHAN_HOURS)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the blobs without deleting them")


def _fsck(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object per finding")


def _admin(parser: argparse.ArgumentParser) -> None:
    """Add each noun and its verbs; worker/cli/admin.py implements them."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON")
    one_project = argparse.ArgumentParser(add_help=False)
    one_project.add_argument(
        "--project", metavar="ID", help="default: the only one; required if there are several"
    )
    nouns = parser.add_subparsers(dest="noun", required=True)

    def verbs(noun: str, help: str) -> Callable[..., argparse.ArgumentParser]:
        parsers = nouns.add_parser(noun, help=help).add_subparsers(dest="verb", required=True)

        def add(name: str, help: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
            added: argparse.ArgumentParser = parsers.add_parser(name, help=help, parents=[common, *parents])
            return added

        return add

    org = verbs("org", "manage organizations")
    org("create", "create an organization").add_argument("name")
    org("list", "list all organizations")
    rename = org("rename", "rename an organization; existing model names do not change")
    rename.add_argument("id")
    rename.add_argument("name")

    project = verbs("project", "manage projects")
    create = project("create", "create a project")
    create.add_argument("name")
    create.add_argument("--org", metavar="ID", help="default: the only one; required if there are several")
    project("list", "list all projects").add_argument("--org", metavar="ID")
    rename = project("rename", "rename a project")
    rename.add_argument("id")
    rename.add_argument("name")
    project("archive", "archive a project: reject its keys and cancel its jobs").add_argument("id")
    limits = project("limits", "show or change the limits of a project")
    limits.add_argument("id")
    limits.add_argument(
        "--set",
        metavar="NAME=VALUE",
        nargs="+",
        default=[],
        help="limits to set; shows the current limits if omitted",
    )
    limits.add_argument("--unset", metavar="NAME", nargs="+", default=[], help="revert to the default")

    key = verbs("key", "manage API keys")
    create = key("create", "create a key; the key itself is printed only once", one_project)
    create.add_argument("--name", default="cli")
    create.add_argument("--scope", choices=SCOPES, default="admin")
    create.add_argument("--owner", default="", help="person who uses the key")
    create.add_argument("--expires-in-days", type=_days, metavar="DAYS")
    key("list", "list the keys of a project, including revoked and expired ones", one_project)
    rotate = key("rotate", "replace a key with a new one")
    rotate.add_argument("id")
    rotate.add_argument(
        "--grace-hours", type=float, default=0, metavar="HOURS", help="keep the old key valid for HOURS"
    )
    key("revoke", "revoke a key").add_argument("id")

    nouns.add_parser("usage", help="show the usage and limits of a project", parents=[common, one_project])
    log = nouns.add_parser("audit", help="show the audit log, newest entries first", parents=[common])
    log.add_argument("--project", metavar="ID", help="show only this project (default: all)")
    log.add_argument("--limit", type=int, default=50)


def _days(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of days of at least 1")
    return int(text)


SCOPES = (
    "read",
    "write",
    "admin",
    "operator",
)  # equal to core.tenancy.keys.SCOPES (by a test), which would import SQLAlchemy

# Fields of core.settings.Settings, which would import pydantic. A test compares them with those that the code reads.
_EVERY_SERVER = tuple(
    """
    host metrics_port data_dir blob_url s3_endpoint_url s3_region s3_checksums models_file inference_url samplers
    samplers_key connections_per_address keep_alive_seconds log_format
    """.split()
)
_API_AND_WORKER = tuple(
    """
    database_url broker_url graders_file grader_environments inference_key integrations gpu_class gpu_classes
    default_limits sampler ranks nodes jobs_per_worker engines sampling_gpus kv_cache_gib train_token_budget
    reconcile_seconds patience_seconds price_per_gpu_second currency webhook_private_hosts min_free_bytes otlp_endpoint
    """.split()
)
_API = tuple(
    """
    port first_key console_site console_hosts docs_site sso_header sso_groups_header sso_proxies sso_rules
    max_upload_bytes max_multipart_bytes min_upload_bytes_per_second grader_runs_per_project
    grader_runs_waiting_per_project uploads_per_project uploads_waiting_per_project streams_per_project
    pending_uploads_per_project
    """.split()
)
_WORKER = tuple(
    """
    node_rank rendezvous lease_seconds drain_seconds hang_seconds lost_machine_seconds max_failures
    failing_steps warnings max_logprob_gap torch_threads eval_concurrency rollout_bytes_per_job rollouts_per_step
    rollout_tokens_per_step keep_rollouts_days keep_checkpoints_days keep_files_days keep_audit_days orphan_hours
    scrub_days inference_max_lora_rank
    """.split()
)
_INFERENCE = tuple(
    "inference_key inference_max_lora_rank inference_kv_cache_gib sampler torch_threads otlp_endpoint".split()
)
_SAMPLER = ("kv_cache_gib", "inference_max_lora_rank", "torch_threads")
_MEMBER = tuple(
    """
    ranks nodes node_rank rendezvous data_dir hang_seconds lost_machine_seconds patience_seconds log_format
    """.split()
)

COMMANDS = (
    Command(
        "up",
        "run the API, a worker and the reconciler in one process",
        "worker.cli.service:up",
        _api,
        (
            *_EVERY_SERVER,
            *_API_AND_WORKER,
            *_API,
            *_WORKER,
            "inference_idle_seconds",
            "inference_kv_cache_gib",
        ),
    ),
    Command(
        "api",
        "run the HTTP API alone (needs REGRAFT_BROKER_URL)",
        "worker.cli.service:api",
        _api,
        (*_EVERY_SERVER, *_API_AND_WORKER, *_API),
    ),
    Command(
        "worker",
        "run a worker and its reconciler (needs REGRAFT_BROKER_URL)",
        "worker.cli.service:worker",
        _worker,
        (*_EVERY_SERVER, *_API_AND_WORKER, *_WORKER),
    ),
    Command(
        "member",
        "run ranks for the worker of another machine (needs REGRAFT_RENDEZVOUS)",
        "worker.cli.service:member",
        settings=_MEMBER,
    ),
    Command(
        "migrate",
        "migrate the database to this version and create the first API key",
        "worker.cli.service:migrate",
        _migrate,
    ),
    Command(
        "inference",
        "run the inference server alone (needs REGRAFT_INFERENCE_KEY)",
        "worker.cli.service:inference",
        _inference,
        (*_EVERY_SERVER, *_INFERENCE),
    ),
    Command(
        "sampler",
        "sample for all jobs on one base model (needs REGRAFT_SAMPLERS_KEY)",
        "worker.cli.service:sampler",
        _sampler,
        (*_EVERY_SERVER, *_SAMPLER),
    ),
    Command("export", "write a checkpoint to a folder", "worker.cli.service:export", _export),
    Command(
        "admin",
        "manage organizations, projects, API keys and limits; show usage and the audit log",
        "worker.cli.admin:main",
        _admin,
    ),
    Command(
        "environments",
        "install the packages of python graders (docs/howto/graders.md)",
        "worker.cli.environments:main",
        _environments,
    ),
    Command(
        "models",
        "try a model as a job would load it; add it to the registry",
        "worker.cli.models:main",
        _models,
    ),
    Command(
        "plan",
        "predict placement, memory and seconds of a step on GPUs that are not here",
        "worker.cli.plan:main",
        _plan,
    ),
    Command(
        "fsck",
        "verify the hash of every blob (docs/howto/storage.md)",
        "worker.cli.service:check_blobs",
        _fsck,
    ),
    Command("sweep", "delete orphaned blobs (docs/howto/storage.md)", "worker.cli.service:sweep", _sweep),
    Command("completion", "print a shell completion script", "worker.cli.parser:completion", _completion),
)
