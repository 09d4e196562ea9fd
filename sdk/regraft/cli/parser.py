"""Every command and its options. Does not import the client, so `--help` and completion are instant."""

import argparse
from pathlib import Path
from typing import Any

from regraft._rules.command_line import SHELLS, Parser
from regraft.starters import KINDS

EXIT_CODES = """exit codes:
  0  done; a job that was waited for has succeeded or is paused
  1  no: a job failed, was cancelled or is worse than its base; rows are bad; a test or eval failed; evals are left out
  2  the command, a file it names or the request is wrong
  3  there is no such job, file, model, checkpoint, grader, eval or run
  4  no server or key is configured, or the key is refused
  5  the server cannot be reached, or has an error
  6  a quota is used up, or there are too many requests
130  interrupted; a job that was being watched goes on
"""


GRADER = ".py, .json, .toml, .yaml, a job file, or stored:NAME@VERSION"


class Commands:
    """A group of commands on one level."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(self, name: str, summary: str, run: str = "", *, example: str = "") -> argparse.ArgumentParser:
        """Add a command, or a group if `run` is empty. `run` names a function in regraft.cli.commands."""
        parser = self._commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=f"example:\n  {example}" if example else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if run:
            parser.set_defaults(run=run)
            # SUPPRESS: a default here would override an --output given before the command.
            _output(parser, default=argparse.SUPPRESS)
        return parser

    def group(self, name: str, summary: str) -> "Commands":
        return Commands(self.add(name, summary))


class Version(argparse.Action):
    """`--version`. Reads the version of the installed package only when the option is used."""

    def __init__(self, option_strings: list[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        from importlib.metadata import version  # takes 30 ms, which would slow down --help

        print(f"regraft {version('regraft')}")
        parser.exit()


def build() -> argparse.ArgumentParser:
    parser = Parser(
        prog="regraft",
        description="Reinforcement fine-tuning on a regraft server.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=Version)
    _output(parser, default="text")
    top = Commands(parser)
    for add in (_account, _data, _graders, _jobs, _previews, _results, _evals, _pipelines, _models, _others):
        add(top)
    return parser


def _account(top: Commands) -> None:
    login = top.add(
        "login",
        "save a server's URL and API key after verifying them",
        "login",
        example="regraft login --base-url http://127.0.0.1:8000 < key.txt",
    )
    login.add_argument("--base-url", metavar="URL", help="default: REGRAFT_BASE_URL, else a prompt")


def _data(top: Commands) -> None:
    init = top.add(
        "init",
        "write a small task to begin with: rows, a grader, golden cases and a job file",
        "init",
        example="regraft init classify --to first-job",
    )
    init.add_argument("kind", choices=KINDS, metavar="KIND", help="%(choices)s")
    init.add_argument("--to", type=Path, metavar="FOLDER", help="default: a folder with the name of the kind")

    files = top.group("files", "upload, list, download and delete files")
    upload = files.add("upload", "upload files to train on", "files_upload")
    upload.add_argument("paths", nargs="+", type=Path, metavar="FILE")
    files.add("list", "list the project's files, newest first", "files_list")
    _id(files.add("show", "describe a file", "files_show"), "file_id")
    download = files.add("download", "write a file's contents to stdout or to a file", "files_download")
    _id(download, "file_id")
    download.add_argument("-o", "--to", type=Path, metavar="FILE")
    _id(files.add("delete", "delete a file", "files_delete"), "file_id")
    profile = files.add(
        "profile",
        "describe the rows of a dataset: token lengths, duplicates, fields, overlap with a validation file",
        "files_profile",
        example="regraft files profile file-abc --model SmolLM2-135M-Instruct --grader grader.json "
        "--validation-file file-def",
    )
    _id(profile, "file_id")
    profile.add_argument("--model", metavar="MODEL", help="count tokens with the tokenizer of this model")
    profile.add_argument(
        "--grader", type=Path, metavar="FILE", help="list the rows that lack a field that this grader reads"
    )
    profile.add_argument(
        "--validation-file", metavar="ID", help="count its prompts that this file has as well"
    )
    profile.add_argument(
        "--method",
        choices=("supervised", "dpo", "reward_model", "reinforcement"),
        help="which method's rows the file has (default: by its first row)",
    )
    profile.add_argument(
        "--max-completion-tokens", type=int, metavar="N", help="room for an answer (default: as a job's)"
    )

    validate = top.add(
        "validate",
        "validate datasets and job files as the server does on job creation",
        "validate",
        example="regraft validate train.jsonl --grader grader.json",
    )
    validate.add_argument("files", nargs="+", type=Path, metavar="FILE")
    validate.add_argument(
        "--grader", type=Path, metavar="FILE", help="also check the fields that this grader reads"
    )
    validate.add_argument(
        "--split",
        choices=("train", "valid"),
        default="train",
        help="which split to validate against (sets the row limit)",
    )
    validate.add_argument(
        "--method",
        choices=("supervised", "dpo", "reward_model", "reinforcement", "distillation"),
        default="reinforcement",
        help="which method's rows the files have (default: reinforcement; a job without a method is supervised)",
    )

    convert = top.add(
        "convert",
        "convert a file in another format to a dataset: JSON, CSV, Parquet, Arrow; Alpaca, ShareGPT, TRL and others",
        "convert",
        example="regraft convert questions.csv --to rft --map prompt=question --map answer=label",
    )
    convert.add_argument("source", type=Path, metavar="FILE")
    convert.add_argument(
        "--to",
        dest="target",
        choices=("rft", "sft", "dpo"),
        required=True,
        help="rows for reinforcement (rft), supervised (sft) or preference jobs (dpo)",
    )
    convert.add_argument(
        "--map",
        dest="names",
        action="append",
        default=[],
        metavar="NAME=FIELD",
        help="the field of the file that becomes NAME: prompt, answer, chosen, rejected, system or another field",
    )
    convert.add_argument(
        "--encoding",
        metavar="NAME",
        help="of a text file, such as cp1252, gbk or shift_jis (default: UTF-8, UTF-16 or UTF-32, by its start)",
    )
    convert.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FILE",
        help="default: FILE.TARGET.jsonl, such as questions.rft.jsonl",
    )


def _graders(top: Commands) -> None:
    graders = top.group("graders", "test graders, and store them with versions and golden cases")
    validate = graders.add("validate", "validate a grader without running it", "graders_validate")
    validate.add_argument("grader", type=Path, metavar="FILE", help=GRADER)
    run = graders.add(
        "run",
        "grade one answer, or every row of a JSONL file",
        "graders_run",
        example='regraft graders run --grader grader.py --sample "42" --item \'{"answer": "42"}\'\n'
        "  regraft graders run --grader grader.py cases.jsonl",
    )
    run.add_argument("--grader", type=Path, required=True, metavar="FILE", help=GRADER)
    run.add_argument("--sample", metavar="TEXT", help="the answer to grade")
    run.add_argument("--item", metavar="JSON", help="the dataset row that it answers")
    run.add_argument(
        "cases",
        nargs="?",
        type=Path,
        metavar="CASES",
        help='JSONL: {"sample": answer, "expect": reward (optional), ...fields of the row}',
    )
    save = graders.add(
        "save",
        "store a grader under a name; other content than before is a new version",
        "graders_save",
        example='regraft graders save close --grader grader.py --note "partial credit for the unit"',
    )
    _id(save, "name")
    save.add_argument("--grader", type=Path, required=True, metavar="FILE", help=GRADER)
    save.add_argument("--note", default="", metavar="TEXT", help="what this version changes")
    graders.add("list", "list the stored graders, newest first", "graders_list")
    show = graders.add(
        "show",
        "print the specification of a stored grader as JSON",
        "graders_show",
        example="regraft graders show close@3f2a91c0 > grader.json",
    )
    show.add_argument("name", metavar="NAME[@VERSION]")
    _id(
        graders.add("versions", "list the versions of a stored grader, newest first", "graders_versions"),
        "name",
    )
    diff = graders.add("diff", "show the differences between two versions of a stored grader", "graders_diff")
    _id(diff, "name")
    diff.add_argument("version", metavar="VERSION")
    diff.add_argument("other", nargs="?", metavar="OTHER", help="default: the current version")
    delete = graders.add("delete", "delete a stored grader, or one version of it", "graders_delete")
    delete.add_argument("name", metavar="NAME[@VERSION]")
    cases = graders.add(
        "cases",
        "list the golden cases of a stored grader, after adding or deleting some",
        "graders_cases",
        example="regraft graders cases close --add cases.jsonl",
    )
    _id(cases, "name")
    cases.add_argument(
        "--add",
        type=Path,
        metavar="CASES",
        help='JSONL: {"sample": answer, "expect": score or {"min": ..., "max": ...}, ...fields of the row}',
    )
    cases.add_argument("--delete", action="append", default=[], metavar="CASE", help="may be repeated")
    check = graders.add(
        "check",
        "run a stored grader, or a file in its place, on its golden cases",
        "graders_check",
        example="regraft graders check close --grader grader.py",
    )
    check.add_argument("name", metavar="NAME[@VERSION]")
    check.add_argument(
        "--grader",
        type=Path,
        metavar="FILE",
        help="a grader that is not saved",
    )


def _jobs(top: Commands) -> None:
    jobs = top.group("jobs", "create, watch and control jobs")
    create = jobs.add(
        "create",
        "create a job from a job file and upload its local files",
        "jobs_create",
        example="regraft jobs create -f job.toml --set seed=1 --watch",
    )
    create.add_argument("-f", "--file", type=Path, required=True, metavar="JOB", help=".toml, .json or .yaml")
    _set(create)
    first = create.add_mutually_exclusive_group()
    first.add_argument("--estimate", action="store_true", help="only estimate time and cost")
    first.add_argument(
        "--preview",
        action="store_true",
        help="sample a few rows with the model, then ask for confirmation (without a terminal: --yes)",
    )
    create.add_argument("--rows", type=int, metavar="N", help="rows of the preview (default: 8)")
    create.add_argument(
        "--samples", type=int, metavar="N", help="answers per row of the preview (default: 8)"
    )
    create.add_argument(
        "--yes", action="store_true", help="create the job after the preview without confirmation"
    )
    create.add_argument("--watch", action="store_true", help="watch the job until it ends")
    listing = jobs.add("list", "list jobs, newest first", "jobs_list")
    listing.add_argument("--limit", type=int, default=20, metavar="N")
    _id(jobs.add("show", "describe a job", "jobs_show"), "job_id")
    watch = jobs.add("watch", "watch a job until it ends or is paused", "jobs_watch")
    _id(watch, "job_id")
    _id(jobs.add("pause", "pause a job at its next checkpoint", "jobs_pause"), "job_id")
    _id(jobs.add("resume", "resume a paused job", "jobs_resume"), "job_id")
    _id(jobs.add("cancel", "cancel a job permanently", "jobs_cancel"), "job_id")
    compare = jobs.add(
        "compare",
        "compare the validated rewards of jobs prompt by prompt with those of the first, and their requests",
        "jobs_compare",
        example="regraft jobs compare ftjob-1 ftjob-2 ftjob-3",
    )
    compare.add_argument("first", metavar="FIRST")
    compare.add_argument("others", metavar="OTHER", nargs="+")
    _id(jobs.add("attempts", "list the attempts of a job, oldest first", "jobs_attempts"), "job_id")
    _id(jobs.add("logs", "print the logs of a job's runs", "jobs_logs"), "job_id")
    budget = jobs.add(
        "budget",
        "show or change the budget of a job",
        "jobs_budget",
        example="regraft jobs budget ftjob-... --gpu-hours 2\n"
        "  regraft jobs budget ftjob-... --amount 10 --currency EUR",
    )
    _id(budget, "job_id")
    cap = budget.add_mutually_exclusive_group()
    cap.add_argument("--gpu-hours", type=float, metavar="N", help="pause the job when it has used these")
    cap.add_argument("--amount", type=float, metavar="X", help="the same in money, at the server's price")
    cap.add_argument("--none", action="store_true", help="remove the budget")
    budget.add_argument("--currency", metavar="CODE", help="of the amount, such as EUR")
    clone = jobs.add(
        "clone",
        "create a copy of a job, with changes",
        "jobs_clone",
        example="regraft jobs clone ftjob-... --set hyperparameters.n_epochs=2",
    )
    _id(clone, "job_id")
    _set(clone)
    clone.add_argument("--grader", type=Path, metavar="FILE", help="replace the grader")
    clone.add_argument("--watch", action="store_true", help="watch the job until it ends")


def _previews(top: Commands) -> None:
    previews = top.group("previews", "show the previews of jobs (regraft jobs create --preview makes one)")
    listing = previews.add("list", "list previews, newest first", "previews_list")
    listing.add_argument("--limit", type=int, default=20, metavar="N")
    _id(previews.add("show", "show the report of a preview", "previews_show"), "preview_id")
    answers = previews.add("answers", "print the answers and grades of a preview", "previews_answers")
    _id(answers, "preview_id")
    _id(previews.add("cancel", "cancel a preview", "previews_cancel"), "preview_id")
    _id(previews.add("delete", "delete a preview and its answers", "previews_delete"), "preview_id")


def _results(top: Commands) -> None:
    rollouts = top.add(
        "rollouts",
        "show graded answers, or write them to a file",
        "rollouts",
        example="regraft rollouts ftjob-... --step 10 --worst\n"
        "  regraft rollouts ftjob-... --step-from 5 --max-score 0.2\n"
        "  regraft rollouts ftjob-... --to rollouts.parquet --format parquet",
    )
    _id(rollouts, "job_id")
    rollouts.add_argument("--step", type=int, metavar="N", help="default: latest step (all steps with --to)")
    rollouts.add_argument("--step-from", type=int, metavar="N", help="first step of a range")
    rollouts.add_argument("--step-to", type=int, metavar="N", help="last step of a range")
    rollouts.add_argument(
        "--split", choices=("train", "valid"), help="default: train for a single step, otherwise both"
    )
    rollouts.add_argument("--line", type=int, metavar="N", help="line of the dataset file")
    rollouts.add_argument("--group", type=int, metavar="N", help="index of the prompt in its step")
    rollouts.add_argument("--finish-reason", choices=("stop", "length"))
    graded = rollouts.add_mutually_exclusive_group()
    graded.add_argument("--graded", action="store_true", default=None, help="only answers with a score")
    graded.add_argument(
        "--ungraded", action="store_false", dest="graded", default=None, help="only answers without a score"
    )
    rollouts.add_argument("--error", metavar="KIND", help="kind of the grading error")
    rollouts.add_argument("--grader", metavar="NAME", help="part of a multi grader whose scores are filtered")
    rollouts.add_argument("--min-score", type=float, metavar="X")
    rollouts.add_argument("--max-score", type=float, metavar="X")
    rollouts.add_argument(
        "--has-tokens",
        action="store_true",
        default=None,
        help="only answers with the log-probability and advantage of each token",
    )
    rollouts.add_argument(
        "--search",
        dest="q",
        metavar="TEXT",
        help="text in the prompt, the dataset row, the answer or the grader's output, in any case",
    )
    order = rollouts.add_mutually_exclusive_group()
    order.add_argument(
        "--worst", action="store_true", help="sort by reward, lowest first, ungraded answers before"
    )
    order.add_argument(
        "--sort",
        choices=("score", "advantage", "centered_reward", "completion_tokens"),
        help="sort by a field, highest first, answers without it last",
    )
    rollouts.add_argument(
        "--limit", type=int, metavar="N", help="default: 20; 0: all. JSON output always has all"
    )
    rollouts.add_argument(
        "--full",
        action="store_true",
        help="print the whole prompt, row, answer and grade of each instead of a table",
    )
    rollouts.add_argument(
        "-o", "--to", type=Path, metavar="FILE", help="write all matching answers to a file"
    )
    rollouts.add_argument(
        "--format", choices=("jsonl", "parquet"), help="format of the file (default: jsonl)"
    )
    prompts = top.add(
        "prompts",
        "show the mean reward of each prompt over the steps",
        "prompts",
        example="regraft prompts ftjob-... --outcome forgotten\n"
        "  regraft prompts ftjob-... --split train --sort change --step-from 10",
    )
    _id(prompts, "job_id")
    prompts.add_argument("--split", choices=("train", "valid"), default="valid")
    prompts.add_argument("--step-from", type=int, metavar="N", help="first step of a range")
    prompts.add_argument("--step-to", type=int, metavar="N", help="last step of a range")
    prompts.add_argument("--line", type=int, metavar="N", help="line of the dataset file")
    prompts.add_argument("--outcome", choices=("learned", "kept", "forgotten", "stuck", "ungraded"))
    prompts.add_argument(
        "--pass-threshold",
        type=float,
        metavar="X",
        help="mean reward of a solved prompt; default: as in evals",
    )
    prompts.add_argument(
        "--sort", choices=("line", "change", "last_mean"), default="line", help="lowest first (default: line)"
    )
    prompts.add_argument("--limit", type=int, default=20, metavar="N", help="default: 20; 0: all")
    what_if = top.add(
        "what-if",
        "score stored answers by another formula over the parts of the job's multi grader",
        "what_if",
        example='regraft what-if ftjob-... "0.8 * correct + 0.2 * format"',
    )
    _id(what_if, "job_id")
    what_if.add_argument("formula", metavar="FORMULA", help="as calculate_output of a multi grader")
    what_if.add_argument("--pass-threshold", type=float, metavar="X", help="default: as in evals of the job")
    what_if.add_argument(
        "--advantage-scale",
        choices=("none", "group", "batch"),
        help="divide advantages by the std of the group or of the step, as losses do (default: none)",
    )
    what_if.add_argument("--split", choices=("train", "valid"))
    what_if.add_argument("--step-from", type=int, metavar="N", help="first step of a range")
    what_if.add_argument("--step-to", type=int, metavar="N", help="last step of a range")
    usage = top.add(
        "usage",
        "sum GPU time, tokens and cost by day, model or project",
        "usage",
        example="regraft usage --by day,model --days 7",
    )
    usage.add_argument(
        "--by",
        default="day",
        metavar="WHAT",
        help="day, model, project, or several, separated by commas (default: day)",
    )
    usage.add_argument(
        "--days", type=int, default=30, metavar="N", help="today and the days before (default: 30)"
    )
    usage.add_argument(
        "--all-projects", action="store_true", help="of all projects; requires an operator's key"
    )
    top.add("workers", "list the workers and queues of the service; requires an operator's key", "workers")
    regrade = top.add(
        "regrade",
        "score stored answers of a job by another grader, and show what changes",
        "regrade",
        example="regraft regrade ftjob-... --grader grader.py --split valid\n"
        "  regraft regrade ftjob-... --grader judge.json --step-from 90 --max-tokens 200000",
    )
    _id(regrade, "job_id")
    regrade.add_argument("--grader", type=Path, required=True, metavar="FILE", help=GRADER)
    regrade.add_argument("--name", help="shown in lists")
    regrade.add_argument("--split", choices=("train", "valid"))
    regrade.add_argument("--step-from", type=int, metavar="N", help="first step of a range")
    regrade.add_argument("--step-to", type=int, metavar="N", help="last step of a range")
    regrade.add_argument("--max-tokens", type=int, metavar="N", help="tokens of judges before it fails")
    regrade.add_argument("--no-wait", action="store_true", help="print its id and return")
    regrades = top.add("regrades", "list the regrades of a job, newest first", "regrades")
    _id(regrades, "job_id")
    checkpoints = top.group("checkpoints", "list and download the checkpoints of a job")
    _id(checkpoints.add("list", "list the checkpoints of a job, newest first", "checkpoints_list"), "job_id")
    download = checkpoints.add("download", "download an adapter or a whole model", "checkpoints_download")
    _id(download, "job_id")
    download.add_argument(
        "checkpoint_id", nargs="?", metavar="CHECKPOINT", help="default: the best checkpoint"
    )
    download.add_argument("-o", "--to", type=Path, required=True, metavar="FOLDER", help="folder to create")


def _models(top: Commands) -> None:
    models = top.group("models", "list and delete models, and give them aliases")
    models.add("list", "list base models and tuned models", "models_list")
    _id(models.add("delete", "delete a tuned model", "models_delete"), "model")
    promote = models.add(
        "promote",
        "point an alias at a model, which answers requests for the alias from then on",
        "models_promote",
        example="regraft models promote ft:tiny:default::1a2b3c4d --as production",
    )
    _id(promote, "model")
    promote.add_argument(
        "--as", dest="alias", required=True, metavar="NAME", help="created if it does not exist"
    )
    rollback = models.add("rollback", "point an alias at its previous model again", "models_rollback")
    rollback.add_argument("alias", metavar="NAME")
    history = models.add("history", "list the changes of an alias, newest first", "models_history")
    history.add_argument("alias", metavar="NAME")
    aliases = models.add("aliases", "list the aliases, newest first, after deleting some", "models_aliases")
    aliases.add_argument("--delete", action="append", default=[], metavar="NAME", help="may be repeated")
    chat = top.add(
        "chat", "chat with a model", "chat", example='regraft chat ft:tiny:default::1a2b3c4d "Hello"'
    )
    chat.add_argument("model", metavar="MODEL")
    chat.add_argument(
        "prompt", nargs="?", metavar="TEXT", help="default: stdin, or a conversation in a terminal"
    )
    chat.add_argument("--system", metavar="TEXT")
    chat.add_argument("--temperature", type=float, metavar="T")
    chat.add_argument("--max-tokens", type=int, metavar="N")


def _evals(top: Commands) -> None:
    evals = top.group("evals", "run evals, compare runs, and decide whether a model is good enough")
    run = evals.add(
        "run",
        "run an eval from a configuration file, and wait for it",
        "evals_run",
        example="regraft evals run eval.json --model gpt-4o --model ft:SmolLM2-135M-Instruct:acme::1a2b3c4d",
    )
    run.add_argument("config", type=Path, metavar="FILE", help="a JSON, TOML or YAML file")
    run.add_argument(
        "--model",
        action="append",
        default=[],
        dest="models",
        metavar="NAME",
        help="the model to sample from; repeatable: each one is compared with the first",
    )
    run.add_argument("--name", metavar="NAME", help="name of the run; default: the model")
    compare = evals.add("compare", "compare two runs of an eval, row by row", "evals_compare")
    _id(compare, "eval_id")
    compare.add_argument("first", metavar="FIRST")
    compare.add_argument("second", metavar="SECOND")
    gate = evals.add(
        "gate",
        "exit with 1 unless a run is good enough",
        "evals_gate",
        example="regraft evals gate eval_1a2b evalrun_3c4d --min-pass-rate 0.8 --baseline evalrun_5e6f",
    )
    _id(gate, "eval_id")
    _id(gate, "run_id")
    gate.add_argument("--min-pass-rate", type=float, metavar="RATE", help="lowest pass rate, from 0 to 1")
    gate.add_argument(
        "--baseline", metavar="RUN", help="fail if the run is worse than this one beyond chance"
    )
    gate.add_argument(
        "--max-drop", type=float, metavar="RATE", help="with --baseline: largest allowed drop instead"
    )
    gate.add_argument(
        "--allow-errors",
        type=int,
        default=0,
        metavar="N",
        help="items that may be without a grade (default: 0)",
    )
    imported = evals.add("import", "create the evals of an export, with their runs", "evals_import")
    imported.add_argument("folder", type=Path, metavar="DIR")


def _pipelines(top: Commands) -> None:
    pipelines = top.group("pipelines", "run stages of jobs and files, each on the results of others")
    create = pipelines.add(
        "create",
        "create a pipeline from a file and upload its local files",
        "pipelines_create",
        example="regraft pipelines create -f pipeline.toml --wait",
    )
    create.add_argument(
        "-f", "--file", type=Path, required=True, metavar="PIPELINE", help=".toml, .json or .yaml"
    )
    create.add_argument("--wait", action="store_true", help="wait until it ends")
    listing = pipelines.add("list", "list pipelines, newest first", "pipelines_list")
    listing.add_argument("--limit", type=int, default=20, metavar="N")
    _id(pipelines.add("show", "show the stages of a pipeline", "pipelines_show"), "pipeline_id")
    _id(
        pipelines.add("wait", "wait until a pipeline ends; exit with 1 if it failed", "pipelines_wait"),
        "pipeline_id",
    )
    _id(
        pipelines.add("pause", "start no further stage, and pause the running jobs", "pipelines_pause"),
        "pipeline_id",
    )
    _id(pipelines.add("resume", "resume a paused pipeline", "pipelines_resume"), "pipeline_id")
    _id(pipelines.add("cancel", "cancel a pipeline and its running jobs", "pipelines_cancel"), "pipeline_id")
    _id(pipelines.add("retry", "start failed and cancelled stages again", "pipelines_retry"), "pipeline_id")
    clone = pipelines.add(
        "clone",
        "create a copy of a pipeline",
        "pipelines_clone",
        example="regraft pipelines clone ftpipe-... --from sft",
    )
    _id(clone, "pipeline_id")
    clone.add_argument(
        "--from", dest="first", metavar="STAGE", help="keep the results of the stages before this one"
    )


def _others(top: Commands) -> None:
    migrate = top.add(
        "migrate-from-openai",
        "convert an OpenAI job to a job file and report differences, or download all evals",
        "migrate",
        example="regraft migrate-from-openai job.json -o job.toml --model Qwen3-0.6B",
    )
    migrate.add_argument(
        "job",
        type=Path,
        metavar="FILE",
        help="the request that created the job, or the job; `evals`: all evals of the key in OPENAI_API_KEY",
    )
    migrate.add_argument(
        "-o",
        "--to",
        "--out",
        type=Path,
        required=True,
        metavar="JOB",
        help="the .toml file to write, or the folder of the evals",
    )
    migrate.add_argument("--model", metavar="NAME", help="base model to train")
    completion = top.add(
        "completion",
        "print a shell completion script",
        "completion",
        example="regraft completion bash > ~/.local/share/bash-completion/completions/regraft",
    )
    completion.add_argument("shell", choices=SHELLS)


def _output(parser: argparse.ArgumentParser, *, default: str) -> None:
    parser.add_argument(
        "--output",
        choices=("text", "json"),
        default=default,
        help="text (default) or one JSON document",
    )


def _id(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(name, metavar=name.removesuffix("_id").upper())


def _set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        dest="changes",
        help="override a field, such as hyperparameters.n_epochs=2; repeatable",
    )
