"""Every command and its options, in one table. Does not import the client, so `--help` and completion are instant.

A command with `call` needs no code beside its row.
"""

import argparse
from typing import Any, get_args

from regraft import literals
from regraft._rules.command_line import Parser, add_all, arg, completion_of, either, version_of
from regraft.cli.output import shortened, when
from regraft.cli.table import Command, Group, output
from regraft.starters import KINDS

EXIT_CODES = """exit codes:
  0  done; a job that was waited for has succeeded or is paused
  1  no: a job failed, was cancelled or is worse than its base; rows are bad; a test or eval failed; evals are left out
  2  the command, a file it names or the request is wrong
  3  there is no such job, file, model, checkpoint, grader, eval or run
  4  no server or key is configured, or the key is refused
  5  the server cannot be reached, or has an error
  6  a quota is used up, or there are too many requests
130  interrupted; a watched job keeps running
"""

MOVED = "{id} is {status}"
DELETED = "Deleted {id}"
STEPS = (arg("--step-from", "N", "first step of a range"), arg("--step-to", "N", "last step of a range"))
GRADER = ".py, .json, .toml, .yaml, a job file, or stored:NAME@VERSION"
REQUIRED_GRADER = arg("--grader", "FILE", GRADER, required=True)
SET = arg(
    "--set",
    "FIELD=VALUE",
    "override a field, such as hyperparameters.n_epochs=2; repeatable",
    action="append",
    default=[],
    dest="changes",
)
WATCH = arg("--watch", help="watch the job until it ends")
NAME_OR_VERSION = arg("name", "NAME[@VERSION]")
ALIAS = arg("alias", "ALIAS")
LIMIT = arg("--limit", "N", default=20)

LOGIN = Command(
    "login",
    "save a server's URL and API key after verifying them",
    arg("--base-url", "URL", "default: REGRAFT_BASE_URL, else a prompt"),
    example="regraft login --base-url http://127.0.0.1:8000 < key.txt",
)

INIT = Command(
    "init",
    "write a small task to begin with: rows, a grader, golden cases and a job file",
    arg("kind", "KIND", "%(choices)s", choices=KINDS),
    arg("--to", "FOLDER", "default: a folder with the name of the kind"),
    example="regraft init classify --to first-job",
)

FILES = Group(
    "files",
    "upload, list, download and delete files",
    Command("upload", "upload files to train on", arg("paths", "FILE", nargs="+")),
    Command(
        "list",
        "list the project's files, newest first",
        columns={
            "id": "id",
            "bytes": "bytes",
            "created": "created_at",
            "purpose": "purpose",
            "name": "filename",
        },
    ),
    Command("show", "describe a file", "file_id", text="fields"),
    Command("download", "write a file's contents to stdout or to a file", "file_id", arg("-o --to", "FILE")),
    Command("delete", "delete a file", "file_id", text=DELETED),
    Command(
        "profile",
        "describe the rows of a dataset: token lengths, duplicates, fields, overlap with a validation file",
        "file_id",
        arg("--model", "MODEL", "count tokens with the tokenizer of this model"),
        arg("--grader", "FILE", "list the rows that lack a field that this grader reads"),
        arg("--validation-file", "ID", "count its prompts that this file has as well"),
        arg(
            "--method",
            help="which method's rows the file has (default: by its first row)",
            choices=get_args(literals.FileMethod),
        ),
        arg("--max-completion-tokens", "N", "room for an answer (default: as a job's)"),
        example="regraft files profile file-abc --model SmolLM2-135M-Instruct --grader grader.json "
        "--validation-file file-def",
    ),
)

VALIDATE = Command(
    "validate",
    "validate datasets and job files as the server does on job creation",
    arg("files", "FILE", nargs="+"),
    arg("--grader", "FILE", "also check the fields that this grader reads"),
    arg(
        "--split",
        help="which split to validate against (sets the row limit)",
        choices=get_args(literals.Split),
        default="train",
    ),
    arg(
        "--method",
        help="which method's rows the files have (default: reinforcement; a job without a method is supervised)",
        choices=get_args(literals.Method),
        default="reinforcement",
    ),
    example="regraft validate train.jsonl --grader grader.json",
)

VERIFY = Command(
    "verify",
    "verify the passport of a model, and the files of a folder with one, without a server",
    arg("file", "FILE", "a passport, or the folder of an export that has one"),
    arg(
        "--key",
        "FINGERPRINT",
        "of the deployment that must have signed it; without it, anyone may have",
    ),
    example="regraft verify adapter --key 3f2a91c0...",
)

CONVERT = Command(
    "convert",
    "convert a file in another format to a dataset: JSON, CSV, Parquet, Arrow; Alpaca, ShareGPT, TRL and others",
    arg("source", "FILE", "a file, or hub:OWNER/NAME: a dataset of the Hugging Face hub (requires datasets)"),
    arg(
        "--to",
        help="rows for reinforcement (rft), supervised (sft) or preference jobs (dpo)",
        choices=("rft", "sft", "dpo"),
        dest="target",
        required=True,
    ),
    arg(
        "--map",
        "NAME=FIELD",
        "the field of the file that becomes NAME: prompt, answer, chosen, rejected, system or another field",
        dest="names",
        action="append",
        default=[],
    ),
    arg(
        "--encoding",
        "NAME",
        "of a text file, such as cp1252, gbk or shift_jis (default: UTF-8, UTF-16 or UTF-32, by its start)",
    ),
    arg("--config", "NAME", "of a dataset of the hub that has several parts, such as main"),
    arg("--split", "NAME", "of a dataset of the hub (default: train)"),
    arg("-o --out", "FILE", "default: FILE.TARGET.jsonl, such as questions.rft.jsonl"),
    arg("--force", help="replace the output file if it exists", action="store_true"),
    example="regraft convert questions.csv --to rft --map prompt=question --map answer=label\n"
    "  regraft convert hub:openai/gsm8k --config main --split test --to rft",
)

GRADERS = Group(
    "graders",
    "test graders, and store them with versions and golden cases",
    Command("validate", "validate a grader without running it", arg("grader", "FILE", GRADER)),
    Command(
        "run",
        "grade one answer, or every row of a JSONL file",
        REQUIRED_GRADER,
        arg("--sample", "TEXT", "the answer to grade"),
        arg("--item", "JSON", "the dataset row that it answers"),
        arg(
            "cases",
            "CASES",
            'JSONL: {"sample": answer, "expect": reward (optional), ...fields of the row}',
            nargs="?",
        ),
        example='regraft graders run --grader grader.py --sample "42" --item \'{"answer": "42"}\'\n'
        "  regraft graders run --grader grader.py cases.jsonl",
    ),
    Command(
        "save",
        "store a grader under a name; other content than before is a new version",
        "name",
        REQUIRED_GRADER,
        arg("--note", "TEXT", "what this version changes", default=""),
        example='regraft graders save close --grader grader.py --note "partial credit for the unit"',
    ),
    Command(
        "list",
        "list the stored graders, newest first",
        limit=100,
        columns={
            "name": "name",
            "type": lambda stored: stored.grader["type"],
            "version": lambda stored: stored.version[:12],
            "versions": "versions",
            "cases": "cases",
            "saved": "updated_at",
        },
    ),
    Command(
        "show",
        "print the specification of a stored grader as JSON",
        NAME_OR_VERSION,
        example="regraft graders show close@3f2a91c0 > grader.json",
    ),
    Command(
        "versions",
        "list the versions of a stored grader, newest first",
        "name",
        limit=100,
        columns={
            "version": lambda version: version.version[:12],
            "": lambda version: "current" if version.is_current else "",
            "saved": "created_at",
            "note": lambda version: shortened(version.note, 60),
        },
    ),
    Command(
        "diff",
        "show the differences between two versions of a stored grader",
        "name",
        arg("version", "VERSION"),
        arg("other", "OTHER", "default: the current version", nargs="?"),
    ),
    Command("delete", "delete a stored grader, or one version of it", NAME_OR_VERSION),
    Command(
        "cases",
        "list the golden cases of a stored grader, after adding or deleting some",
        "name",
        arg(
            "--add",
            "CASES",
            'JSONL: {"sample": answer, "expect": score or {"min": ..., "max": ...}, ...fields of the row}',
        ),
        arg("--delete", "CASE", "may be repeated", action="append", default=[]),
        example="regraft graders cases close --add cases.jsonl",
    ),
    Command(
        "check",
        "run a stored grader, or a file in its place, on its golden cases",
        NAME_OR_VERSION,
        arg("--grader", "FILE", "a grader that is not saved"),
        example="regraft graders check close --grader grader.py",
    ),
    Command(
        "audit",
        "try a grader on right answers and on exploits made from the rows of an uploaded file",
        REQUIRED_GRADER,
        arg("training_file", "FILE_ID", "of an uploaded file with the rows of a job"),
        arg("--answer", "TEMPLATE", "of a right answer, such as <answer>{{item.answer}}</answer>"),
        arg("--rows", "N", "default: 200, or 20 of a grader that calls a server"),
        arg("--max-tokens", "N", "most tokens of judges"),
        example="regraft graders audit file-... --grader grader.py",
    ),
)

JOBS = Group(
    "jobs",
    "create, watch and control jobs",
    Command(
        "create",
        "create a job from a job file and upload its local files",
        arg("-f --file", "JOB", ".toml, .json or .yaml", required=True),
        SET,
        either(
            arg("--estimate", help="only estimate time and cost"),
            arg(
                "--preview",
                help="sample a few rows with the model, then ask for confirmation (without a terminal: --yes)",
            ),
        ),
        arg("--rows", "N", "rows of the preview (default: 8)"),
        arg("--samples", "N", "answers per row of the preview (default: 8)"),
        arg("--yes", help="create the job after the preview without confirmation"),
        WATCH,
        example="regraft jobs create -f job.toml --set seed=1 --watch",
    ),
    Command("list", "list jobs, newest first", LIMIT),
    Command("show", "describe a job", "job_id"),
    Command("watch", "watch a job until it ends or is paused", "job_id"),
    Command("pause", "pause a job at its next checkpoint", "job_id", text=MOVED),
    Command("resume", "resume a paused job", "job_id", text=MOVED),
    Command("cancel", "cancel a job permanently", "job_id", text=MOVED),
    Command(
        "compare",
        "compare the validated rewards of jobs prompt by prompt with those of the first, what their tokens taught, and "
        "their requests",
        arg("first", "FIRST"),
        arg("others", "OTHER", nargs="+"),
        example="regraft jobs compare ftjob-1 ftjob-2 ftjob-3",
    ),
    Command(
        "ledger",
        "show what the tokens and the GPU time of a job taught",
        "job_id",
        arg("--csv", help="print CSV with a row for each step and bucket"),
        example="regraft jobs ledger ftjob-... --csv > ledger.csv",
    ),
    Command(
        "passport",
        "print the signed statement about a job's model, or write it to a file",
        "job_id",
        arg("--checkpoint", "ID", "default: the checkpoint that the job delivered", dest="checkpoint_id"),
        arg("-o --to", "FILE"),
        example="regraft jobs passport ftjob-... --to passport.json",
    ),
    Command("attempts", "list the attempts of a job, oldest first", "job_id"),
    Command("logs", "print the logs of a job's runs", "job_id"),
    Command(
        "budget",
        "show or change the budget of a job",
        "job_id",
        either(
            arg("--gpu-hours", "N", "pause the job when it has used these", type=float),
            arg("--amount", "X", "the same in money, at the server's price"),
            arg("--none", help="remove the budget"),
        ),
        arg("--currency", "CODE", "of the amount, such as EUR"),
        example="regraft jobs budget ftjob-... --gpu-hours 2\n"
        "  regraft jobs budget ftjob-... --amount 10 --currency EUR",
    ),
    Command(
        "clone",
        "create a copy of a job, with changes",
        "job_id",
        SET,
        arg("--grader", "FILE", "replace the grader"),
        WATCH,
        example="regraft jobs clone ftjob-... --set hyperparameters.n_epochs=2",
    ),
)

PREVIEWS = Group(
    "previews",
    "show the previews of jobs (regraft jobs create --preview makes one)",
    Command(
        "list",
        "list previews, newest first",
        LIMIT,
        columns={
            "id": "id",
            "created": "created_at",
            "status": "status",
            "model": lambda preview: preview.request["model"],
            "mean reward": lambda preview: _mean_reward(preview.report),
            "verdict": lambda preview: "-" if preview.report is None else preview.report.verdict,
        },
    ),
    Command("show", "show the report of a preview", "preview_id", text="preview"),
    Command("answers", "print the answers and grades of a preview", "preview_id"),
    Command("cancel", "cancel a preview", "preview_id", text=MOVED),
    Command("delete", "delete a preview and its answers", "preview_id", text=DELETED),
)


def _mean_reward(report: Any) -> str:
    return "-" if report is None or report.mean_reward is None else f"{report.mean_reward:.2f}"


ROLLOUTS = Command(
    "rollouts",
    "show graded answers, or write them to a file",
    "job_id",
    arg("--step", "N", "default: latest step (all steps with --to)"),
    *STEPS,
    arg("--split", help="default: train for a single step, otherwise both", choices=get_args(literals.Split)),
    arg("--line", "N", "line of the dataset file"),
    arg("--group", "N", "index of the prompt in its step"),
    arg("--finish-reason", choices=get_args(literals.FinishReason)),
    either(
        arg("--graded", help="only answers with a score", default=None),
        arg(
            "--ungraded",
            help="only answers without a score",
            action="store_false",
            dest="graded",
            default=None,
        ),
    ),
    arg("--error", "KIND", "kind of the grading error"),
    arg("--grader", "NAME", "part of a multi grader whose scores are filtered"),
    arg("--min-score", "X"),
    arg("--max-score", "X"),
    arg(
        "--has-tokens", help="only answers with the log-probability and advantage of each token", default=None
    ),
    arg(
        "--search",
        "TEXT",
        "text in the prompt, the dataset row, the answer or the grader's output, in any case",
        dest="q",
    ),
    either(
        arg("--worst", help="sort by reward, lowest first, ungraded answers before"),
        arg(
            "--sort",
            help="sort by a field, highest first, answers without it last",
            choices=get_args(literals.Sort),
        ),
    ),
    arg("--limit", "N", "default: 20; 0: all. JSON output always has all"),
    arg("--full", help="print the whole prompt, row, answer and grade of each instead of a table"),
    arg("-o --to", "FILE", "write all matching answers to a file"),
    arg("--format", help="format of the file (default: jsonl)", choices=get_args(literals.Format)),
    example="regraft rollouts ftjob-... --step 10 --worst\n"
    "  regraft rollouts ftjob-... --step-from 5 --max-score 0.2\n"
    "  regraft rollouts ftjob-... --to rollouts.parquet --format parquet",
)

PROMPTS = Command(
    "prompts",
    "show the mean reward of each prompt over the steps",
    "job_id",
    arg("--split", choices=get_args(literals.Split), default="valid"),
    *STEPS,
    arg("--line", "N", "line of the dataset file"),
    arg("--outcome", choices=get_args(literals.Outcome)),
    arg("--pass-threshold", "X", "mean reward of a solved prompt; default: as in evals"),
    arg("--sort", help="lowest first (default: line)", choices=get_args(literals.PromptSort), default="line"),
    arg("--limit", "N", "default: 20; 0: all", default=20),
    example="regraft prompts ftjob-... --outcome forgotten\n"
    "  regraft prompts ftjob-... --split train --sort change --step-from 10",
)

ATTRIBUTION = Command(
    "attribution",
    "show which prompts, and which parts of a multi grader, the updates of training steps came from",
    "job_id",
    arg("--step", "N", "one step; default: all"),
    *STEPS,
    arg("--limit", "N", "number of groups", default=10),
    example="regraft attribution ftjob-... --step 12",
)

WHAT_IF = Command(
    "what-if",
    "score stored answers by another formula over the parts of the job's multi grader",
    "job_id",
    arg("formula", "FORMULA", "as calculate_output of a multi grader"),
    arg("--pass-threshold", "X", "default: as in evals of the job"),
    arg(
        "--advantage-scale",
        help="divide advantages by the std of the group or of the step, as losses do (default: none)",
        choices=get_args(literals.AdvantageScale),
    ),
    arg("--split", choices=get_args(literals.Split)),
    *STEPS,
    example='regraft what-if ftjob-... "0.8 * correct + 0.2 * format"',
)

USAGE = Command(
    "usage",
    "sum GPU time, tokens and cost by day, model or project",
    arg("--by", "WHAT", "day, model, project, or several, separated by commas (default: day)", default="day"),
    arg("--days", "N", "today and the days before (default: 30)", default=30),
    arg("--all-projects", help="of all projects; requires an operator's key"),
    example="regraft usage --by day,model --days 7",
)

WORKERS = Command("workers", "list the workers and queues of the service; requires an operator's key")

REGRADE = Command(
    "regrade",
    "score stored answers of a job by another grader, and show what changes",
    "job_id",
    REQUIRED_GRADER,
    arg("--name", "NAME", "shown in lists"),
    arg("--split", choices=get_args(literals.Split)),
    *STEPS,
    arg("--max-tokens", "N", "tokens of judges before it fails"),
    arg("--no-wait", help="print its id and return"),
    example="regraft regrade ftjob-... --grader grader.py --split valid\n"
    "  regraft regrade ftjob-... --grader judge.json --step-from 90 --max-tokens 200000",
)

REGRADES = Command(
    "regrades",
    "list the regrades of a job, newest first",
    "job_id",
    call="regrades.list",
    columns={
        "regrade": "id",
        "name": lambda regrade: shortened(regrade.name, 72),
        "status": "status",
        "graded": lambda regrade: f"{regrade.graded} of {regrade.answers}",
        "stored": lambda regrade: regrade.comparison and regrade.comparison.before.mean,
        "new": lambda regrade: regrade.comparison and regrade.comparison.after.mean,
        "flipped": lambda regrade: (
            regrade.comparison and regrade.comparison.now_passed + regrade.comparison.now_failed
        ),
    },
)

CHECKPOINTS = Group(
    "checkpoints",
    "list and download the checkpoints of a job",
    Command("list", "list the checkpoints of a job, newest first", "job_id"),
    Command(
        "download",
        "download an adapter or a whole model",
        "job_id",
        arg("checkpoint_id", "CHECKPOINT", "default: the best checkpoint", nargs="?"),
        arg("-o --to", "FOLDER", "folder to create", required=True),
    ),
)

MODELS = Group(
    "models",
    "list and delete models, and give them aliases",
    Command(
        "list",
        "list base models and tuned models",
        columns={
            "id": "id",
            "tuned from": lambda model: _origin(model)[0],
            "base": lambda model: _origin(model)[1],
            "created": lambda model: when(model.created or None),
        },
    ),
    Command("delete", "delete a tuned model", "model", text=DELETED),
    Command(
        "promote",
        "point an alias at a model, which answers requests for the alias from then on",
        "model",
        arg("--as", "ALIAS", "created if it does not exist", dest="alias", required=True),
        example="regraft models promote ft:tiny:default::1a2b3c4d --as production",
    ),
    Command(
        "rollback", "point an alias at its previous model again", ALIAS, call="aliases.rollback", text="alias"
    ),
    Command(
        "history",
        "list the changes of an alias, newest first",
        ALIAS,
        call="aliases.history",
        limit=100,
        columns={
            "changed": "changed_at",
            "from": "previous_model",
            "to": lambda change: change.model or "deleted",
            "by": "changed_by",
        },
    ),
    Command(
        "aliases",
        "list the aliases, newest first, after deleting some",
        arg("--delete", "ALIAS", "may be repeated", action="append", default=[]),
    ),
)


def _origin(model: Any) -> tuple[str, str]:
    """The model that it was trained from, and its base model, or the target of an alias."""
    parent, root = (getattr(model, name, None) for name in ("parent", "root"))
    if parent is None and root not in (None, model.id):
        return "-", f"{root} (alias)"
    return parent or "-", root if parent and root else "-"


CHAT = Command(
    "chat",
    "chat with a model",
    arg("model", "MODEL"),
    arg("prompt", "TEXT", "default: stdin, or a conversation in a terminal", nargs="?"),
    arg("--system", "TEXT"),
    arg(
        "--like",
        "FILE[:LINE]",
        "send the messages of this row of a dataset (default: the first), with TEXT as the last one of the user",
    ),
    arg("--temperature", "T"),
    arg("--max-tokens", "N"),
    example='regraft chat ft:tiny:default::1a2b3c4d "Hello" --like train.jsonl',
)

EVALS = Group(
    "evals",
    "run evals, compare runs, and decide whether a model is good enough",
    Command(
        "run",
        "run an eval from a configuration file, and wait for it",
        arg("config", "FILE", "a JSON, TOML or YAML file"),
        arg(
            "--model",
            "NAME",
            "the model to sample from; repeatable: each one is compared with the first",
            action="append",
            default=[],
            dest="models",
        ),
        arg("--name", "NAME", "name of the run; default: the model"),
        example="regraft evals run eval.json --model gpt-4o --model ft:SmolLM2-135M-Instruct:acme::1a2b3c4d",
    ),
    Command(
        "compare",
        "compare two runs of an eval, row by row",
        "eval_id",
        arg("first", "FIRST"),
        arg("second", "SECOND"),
    ),
    Command(
        "gate",
        "exit with 1 unless a run is good enough",
        "eval_id",
        "run_id",
        arg("--min-pass-rate", "RATE", "lowest pass rate, from 0 to 1"),
        arg("--baseline", "RUN", "fail if the run is worse than this one beyond chance"),
        arg("--max-drop", "RATE", "with --baseline: largest allowed drop instead"),
        arg("--allow-errors", "N", "items that may be without a grade (default: 0)", default=0),
        example="regraft evals gate eval_1a2b evalrun_3c4d --min-pass-rate 0.8 --baseline evalrun_5e6f",
    ),
    Command("import", "create the evals of an export, with their runs", arg("folder", "DIR")),
)

AGENTS = Group(
    "agents",
    "play the episodes of a job with your own agent",
    Command(
        "run",
        "play episodes with a function until the job ends",
        "job_id",
        arg("function", "MODULE:FUNCTION", "plays one episode and returns its reward, or None"),
        arg("--concurrency", "N", "episodes at once", default=32),
        example="regraft agents run ftjob-abc my_agent:play",
    ),
    Command(
        "try",
        "play episodes with a model that is served, without a job",
        arg("function", "MODULE:FUNCTION", "plays one episode, as of agents run"),
        arg("--model", "NAME", "the model that answers", required=True),
        arg("--rows", "FILE", "JSONL of training rows (default: one episode without a row)"),
        arg("--limit", "N", "play the first N rows; 0: all", default=1),
        example="regraft agents try my_agent:play --model qwen3-8b --rows train.jsonl",
    ),
)

PIPELINES = Group(
    "pipelines",
    "run stages of jobs and files, each on the results of others",
    Command(
        "create",
        "create a pipeline from a file and upload its local files",
        arg("-f --file", "PIPELINE", ".toml, .json or .yaml", required=True),
        arg("--wait", help="wait until it ends"),
        example="regraft pipelines create -f pipeline.toml --wait",
    ),
    Command(
        "list",
        "list pipelines, newest first",
        LIMIT,
        columns={
            "id": "id",
            "status": "status",
            "created": "created_at",
            "stages": lambda pipeline: _succeeded(pipeline.stages),
            "name": "name",
        },
    ),
    Command("show", "show the stages of a pipeline", "pipeline_id", text="pipeline"),
    Command("wait", "wait until a pipeline ends; exit with 1 if it failed", "pipeline_id"),
    Command("pause", "start no further stage, and pause the running jobs", "pipeline_id", text="pipeline"),
    Command("resume", "resume a paused pipeline", "pipeline_id", text="pipeline"),
    Command("cancel", "cancel a pipeline and its running jobs", "pipeline_id", text="pipeline"),
    Command("retry", "start failed and cancelled stages again", "pipeline_id", text="pipeline"),
    Command(
        "clone",
        "create a copy of a pipeline",
        "pipeline_id",
        arg("--from", "STAGE", "keep the results of the stages before this one", dest="first"),
        example="regraft pipelines clone ftpipe-... --from sft",
    ),
)


SWEEP = Command(
    "sweep",
    "train a job with several settings, stop the losers, and say which is best",
    arg("job", "JOB", ".toml, .json or .yaml"),
    arg(
        "--over",
        "NAME=VALUES",
        "a setting and its values, such as learning_rate=1e-5,3e-5; repeatable: every combination is a job",
        action="append",
        required=True,
    ),
    SET,
    arg("--budget", "GPU-HOURS", "of all jobs together; only the best one continues beyond it", type=float),
    arg("--keep-losers", help="let every job run to its end"),
    arg("--wait", help="wait until it ends"),
    example="regraft sweep job.toml --over learning_rate=1e-5,3e-5,1e-4 --over group_size=8,16 --wait",
)


def _succeeded(stages: Any) -> str:
    return f"{sum(stage.status == 'succeeded' for stage in stages)} of {len(stages)}"


MIGRATE = Command(
    "migrate-from-openai",
    "convert an OpenAI job to a job file and report differences, or download all evals",
    arg(
        "job",
        "FILE",
        "the request that created the job, or the job; `evals`: all evals of the key in OPENAI_API_KEY",
    ),
    arg("-o --to --out", "JOB", "the .toml file to write, or the folder of the evals", required=True),
    arg("--model", "NAME", "base model to train"),
    example="regraft migrate-from-openai job.json -o job.toml --model Qwen3-0.6B",
)

MCP = Command(
    "mcp",
    "serve tools for coding agents over the Model Context Protocol; requires regraft[mcp]",
    arg(
        "--http", "HOST:PORT", "serve streamable HTTP at /mcp, with the key of each request (default: stdio)"
    ),
    arg(
        "--root",
        "DIR",
        "folder whose files tools may use (default: the working directory; required by --http)",
    ),
    arg("--write", help="also offer tools that create or change something"),
    example="regraft mcp --root . --write",
)

SKILL = Group(
    "skill",
    "teach a coding agent to use these commands",
    Command(
        "install",
        "write SKILL.md, from rows to a promoted model, into a folder of skills",
        arg("--dir", "DIR", "folder of skills (default: .agents/skills)"),
        example="regraft skill install --dir ~/.agents/skills",
    ),
)

TABLE = (
    LOGIN, INIT, FILES, VALIDATE, CONVERT, VERIFY, GRADERS, JOBS, SWEEP, AGENTS, PREVIEWS, ROLLOUTS, PROMPTS,
    ATTRIBUTION, WHAT_IF, USAGE, WORKERS, REGRADE, REGRADES, CHECKPOINTS, EVALS, PIPELINES, MODELS, CHAT,
    MIGRATE, MCP, SKILL,
)  # fmt: skip


def build() -> argparse.ArgumentParser:
    parser = Parser(
        prog="regraft",
        description="Reinforcement fine-tuning on a regraft server.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=version_of("regraft"))
    output("text").add_to(parser)
    add_all(parser, (*TABLE, completion_of("regraft", build)))
    return parser
