"""Every command and its options. Imports nothing of the client: `--help` and completion are instant."""

import argparse
from pathlib import Path
from typing import Any

EXIT_CODES = """exit codes:
  0  done; a job that was waited for has succeeded or is paused
  1  no: a job failed, was cancelled or is worse than its base; a file has bad rows; a grader's test did not pass
  2  the command, a file it names or the request is wrong
  3  there is no such job, file, model or checkpoint
  4  no server or key is configured, or the key is refused
  5  the server cannot be reached, or has an error
  6  a quota is used up, or there are too many requests
130  interrupted; a job that was being watched goes on
"""


class Commands:
    """A group of commands on one level."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(self, name: str, summary: str, run: str = "", *, example: str = "") -> argparse.ArgumentParser:
        """A command, or without `run` a group. `run` names its function in regraft.cli.commands."""
        parser = self._commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=f"example:\n  {example}" if example else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if run:
            parser.set_defaults(run=run)
            # Without a default of its own: it would take the place of what stands in front of the command.
            _output(parser, default=argparse.SUPPRESS)
        return parser

    def group(self, name: str, summary: str) -> "Commands":
        return Commands(self.add(name, summary))


class Version(argparse.Action):
    """`--version`. Reads the version of the installed package only when it is asked for."""

    def __init__(self, option_strings: list[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        from importlib.metadata import version  # 30 ms, which --help need not wait for

        print(f"regraft {version('regraft')}")
        parser.exit()


def build() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="regraft",
        description="Reinforcement fine-tuning on a regraft server.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=Version)
    _output(parser, default="text")
    top = Commands(parser)
    for add in (_account, _data, _graders, _jobs, _results, _models, _others):
        add(top)
    return parser


def _account(top: Commands) -> None:
    login = top.add(
        "login",
        "save a server's address and a key for it, after trying them",
        "login",
        example="regraft login --base-url http://127.0.0.1:8000 < key.txt",
    )
    login.add_argument("--base-url", metavar="URL", help="the server; else REGRAFT_BASE_URL, or it asks")


def _data(top: Commands) -> None:
    files = top.group("files", "upload, list, download and delete files")
    upload = files.add("upload", "upload files to train on", "files_upload")
    upload.add_argument("paths", nargs="+", type=Path, metavar="FILE")
    files.add("list", "list the project's files, newest first", "files_list")
    _id(files.add("show", "describe a file", "files_show"), "file_id")
    download = files.add("download", "write a file's contents to stdout or to a file", "files_download")
    _id(download, "file_id")
    download.add_argument("-o", "--to", type=Path, metavar="FILE")
    _id(files.add("delete", "delete a file", "files_delete"), "file_id")

    validate = top.add(
        "validate",
        "check datasets and job files by the rules that creating a job applies",
        "validate",
        example="regraft validate train.jsonl --grader grader.json",
    )
    validate.add_argument("files", nargs="+", type=Path, metavar="FILE")
    validate.add_argument("--grader", type=Path, metavar="FILE", help="also check the fields that it reads")
    validate.add_argument(
        "--split",
        choices=("train", "valid"),
        default="train",
        help="which split to validate against (sets the row limit)",
    )


def _graders(top: Commands) -> None:
    graders = top.group("graders", "try a grader before a job depends on it")
    validate = graders.add("validate", "check a grader without running it", "graders_validate")
    validate.add_argument("grader", type=Path, metavar="FILE", help=".py, .json, .toml, .yaml, or a job file")
    run = graders.add(
        "run",
        "grade one answer, or every row of a JSONL file",
        "graders_run",
        example='regraft graders run --grader grader.py --sample "42" --item \'{"answer": "42"}\'\n'
        "  regraft graders run --grader grader.py cases.jsonl",
    )
    run.add_argument("--grader", type=Path, required=True, metavar="FILE", help="as for validate")
    run.add_argument("--sample", metavar="TEXT", help="the answer to grade")
    run.add_argument("--item", metavar="JSON", help="the row that it answers")
    run.add_argument(
        "cases",
        nargs="?",
        type=Path,
        metavar="CASES",
        help='JSONL: {"sample": answer, "expect": its reward, if known, ...the row}',
    )


def _jobs(top: Commands) -> None:
    jobs = top.group("jobs", "create, follow and steer jobs")
    create = jobs.add(
        "create",
        "create a job from a job file; local files in it are uploaded",
        "jobs_create",
        example="regraft jobs create -f job.toml --set seed=1 --watch",
    )
    create.add_argument("-f", "--file", type=Path, required=True, metavar="JOB", help=".toml, .json or .yaml")
    _set(create)
    first = create.add_mutually_exclusive_group()
    first.add_argument("--estimate", action="store_true", help="only say what it would take")
    first.add_argument(
        "--preview",
        action="store_true",
        help="let the base model try a few rows first, and ask; in a pipe nothing is created without --yes",
    )
    create.add_argument("--rows", type=int, metavar="N", help="how many rows a preview tries (8)")
    create.add_argument("--samples", type=int, metavar="N", help="how many answers to each (8)")
    create.add_argument("--yes", action="store_true", help="create it after the preview without asking")
    create.add_argument("--watch", action="store_true", help="follow it to its end")
    listing = jobs.add("list", "list jobs, newest first", "jobs_list")
    listing.add_argument("--limit", type=int, default=20, metavar="N")
    _id(jobs.add("show", "describe a job", "jobs_show"), "job_id")
    watch = jobs.add("watch", "follow a job until it ends or is paused", "jobs_watch")
    _id(watch, "job_id")
    _id(jobs.add("pause", "stop a job at its next checkpoint, to be resumed", "jobs_pause"), "job_id")
    _id(jobs.add("resume", "go on with a paused job", "jobs_resume"), "job_id")
    _id(jobs.add("cancel", "stop a job for good", "jobs_cancel"), "job_id")
    clone = jobs.add(
        "clone",
        "create the same job once more, with changes",
        "jobs_clone",
        example="regraft jobs clone ftjob-... --set hyperparameters.n_epochs=2",
    )
    _id(clone, "job_id")
    _set(clone)
    clone.add_argument("--grader", type=Path, metavar="FILE", help="another grader")
    clone.add_argument("--watch", action="store_true", help="follow it to its end")


def _results(top: Commands) -> None:
    rollouts = top.add(
        "rollouts",
        "show the graded answers of a step or of several, or write them to a file",
        "rollouts",
        example="regraft rollouts ftjob-... --step 10 --worst\n"
        "  regraft rollouts ftjob-... --step-from 5 --max-score 0.2\n"
        "  regraft rollouts ftjob-... --to rollouts.parquet --format parquet",
    )
    _id(rollouts, "job_id")
    rollouts.add_argument("--step", type=int, metavar="N", help="default: latest step (all steps of a file)")
    rollouts.add_argument("--step-from", type=int, metavar="N", help="the first of several")
    rollouts.add_argument("--step-to", type=int, metavar="N", help="the last of several")
    rollouts.add_argument(
        "--split", choices=("train", "valid"), help="of one step train unless given, else both"
    )
    rollouts.add_argument("--line", type=int, metavar="N", help="of the dataset file")
    rollouts.add_argument("--finish-reason", choices=("stop", "length"))
    graded = rollouts.add_mutually_exclusive_group()
    graded.add_argument("--graded", action="store_true", default=None, help="only those with a score")
    graded.add_argument(
        "--ungraded", action="store_false", dest="graded", default=None, help="only those without"
    )
    rollouts.add_argument("--error", metavar="KIND", help="why they could not be graded")
    rollouts.add_argument(
        "--grader", metavar="NAME", help="a part of a multi grader: scores are those it gave"
    )
    rollouts.add_argument("--min-score", type=float, metavar="X")
    rollouts.add_argument("--max-score", type=float, metavar="X")
    rollouts.add_argument("--worst", action="store_true", help="those with the lowest reward first")
    rollouts.add_argument("--limit", type=int, metavar="N", help="20; 0 shows all, and JSON always has all")
    rollouts.add_argument("-o", "--to", type=Path, metavar="FILE", help="write all of them to a file")
    rollouts.add_argument("--format", choices=("jsonl", "parquet"), help="of the file: jsonl unless given")
    checkpoints = top.group("checkpoints", "list and download what a job has made")
    _id(checkpoints.add("list", "list the kept checkpoints, newest first", "checkpoints_list"), "job_id")
    download = checkpoints.add("download", "download an adapter in PEFT's format", "checkpoints_download")
    _id(download, "job_id")
    download.add_argument("checkpoint_id", nargs="?", metavar="CHECKPOINT", help="the best one, unless given")
    download.add_argument("-o", "--to", type=Path, required=True, metavar="FOLDER", help="a new folder")


def _models(top: Commands) -> None:
    models = top.group("models", "list and delete models")
    models.add("list", "list what can be trained, and what training has made", "models_list")
    _id(models.add("delete", "delete a tuned model", "models_delete"), "model")
    chat = top.add(
        "chat", "talk to a model", "chat", example='regraft chat ft:tiny:default::1a2b3c4d "Hello"'
    )
    chat.add_argument("model", metavar="MODEL")
    chat.add_argument("prompt", nargs="?", metavar="TEXT", help="else a conversation, or what stdin holds")
    chat.add_argument("--system", metavar="TEXT")
    chat.add_argument("--temperature", type=float, metavar="T")
    chat.add_argument("--max-tokens", type=int, metavar="N")


def _others(top: Commands) -> None:
    migrate = top.add(
        "migrate-from-openai",
        "make a job file of an OpenAI job's parameters, and say what differs",
        "migrate",
        example="regraft migrate-from-openai job.json -o job.toml --model Qwen3-0.6B",
    )
    migrate.add_argument(
        "job", type=Path, metavar="FILE", help="what was sent to create it, or the job itself"
    )
    migrate.add_argument("-o", "--to", type=Path, required=True, metavar="JOB", help="the .toml to write")
    migrate.add_argument("--model", metavar="NAME", help="what to train instead")
    completion = top.add(
        "completion",
        "print a script that completes commands in a shell",
        "completion",
        example="regraft completion bash > ~/.local/share/bash-completion/completions/regraft",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))


def _output(parser: argparse.ArgumentParser, *, default: str) -> None:
    parser.add_argument(
        "--output",
        choices=("text", "json"),
        default=default,
        help="text for people (the default), or one JSON document for programs",
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
        help="change a field, as hyperparameters.n_epochs=2; may be repeated",
    )
