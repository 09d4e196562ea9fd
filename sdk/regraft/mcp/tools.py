"""Every tool in one table: its name, what it does, its arguments, and the call of the client.

A tool without `writes` changes no file, and calls nothing that a key with the scope `read` may not call.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from regraft import literals
from regraft._rules.states import JOB_EDGES
from regraft.mcp import calls
from regraft.mcp.calls import JOB_FIELDS, page

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Argument:
    schema: Schema
    required: bool = False


@dataclass(frozen=True)
class Tool:
    """A tool of the server.

    Args:
        run: called with a Workspace and the arguments; its result becomes JSON.
        writes: it creates or changes something; offered only with --write.
        destroys: it may end or replace what cannot be restored.
        writes_files: it writes below the root, without asking the service; not offered over HTTP.
        quotes: its result has text that a model, a dataset, a grader or a user wrote.
    """

    name: str
    description: str
    arguments: Mapping[str, Argument]
    run: Callable[..., Awaitable[Any]]
    writes: bool = False
    destroys: bool = False
    writes_files: bool = False
    quotes: bool = True

    @property
    def input_schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {name: dict(one.schema) for name, one in self.arguments.items()},
            "required": [name for name, one in self.arguments.items() if one.required],
            "additionalProperties": False,
        }


def needed(kind: str, description: str, **more: Any) -> Argument:
    return Argument({"type": kind, "description": description, **more}, required=True)


def may(kind: str, description: str, **more: Any) -> Argument:
    return Argument({"type": kind, "description": description, **more})


def choice(description: str, values: Any, default: str | None = None) -> Argument:
    more = {} if default is None else {"default": default}
    return may("string", description, enum=list(get_args(values)), **more)


def identifier(description: str) -> Argument:
    return needed("string", description, pattern=ID)


# Of ids and of names that are part of a path of the API.
ID = r"^[\w:@-][\w.:@-]*$"
PATH = {"type": "string", "minLength": 1}
JOB = Argument(
    {
        "anyOf": [PATH, {"type": "object"}],
        "description": "Path of a job file (.toml, .json), or its content: model, training_file and validation_file "
        "(ids of uploaded files, or paths), grader, and optional fields such as hyperparameters, suffix, seed.",
    },
    required=True,
)
GRADER_SCHEMA = {
    "anyOf": [PATH, {"type": "object"}],
    "description": "Path of a .py with `def grade(sample, item)` or of a .json, .toml or job file; a specification "
    'as an object; or "stored:NAME@VERSION".',
}
GRADER, GRADER_IF_ANY = Argument(GRADER_SCHEMA, required=True), Argument(GRADER_SCHEMA)
JOB_ID = identifier("Id of the job, such as ftjob-abc.")
MODEL = needed("string", "Name of a model, as list_models has it.", minLength=1)
AFTER = may("string", "Continue after this id, the last one of the page before.")
SECONDS = may(
    "number",
    "Wait at most so long, up to 50: many clients give up after a minute.",
    minimum=0,
    maximum=50,
    default=30,
)
METHOD = choice("Method of the job that learns from the file.", literals.Method, "reinforcement")


def limit(default: int) -> Argument:
    return may("integer", "Items of the page.", minimum=1, maximum=100, default=default)


READ = (
    Tool(
        "service_status",
        "Say whether the service is ready, which models it has, and, with an operator's key, its workers and queues. "
        "A part that cannot be read has the service's error in its place.",
        {},
        calls.service_status,
        quotes=False,
    ),
    Tool(
        "list_models",
        "List base models, tuned models and aliases.",
        {},
        lambda work: work.client.models.list(),
        quotes=False,
    ),
    Tool(
        "list_jobs",
        "List jobs in short form, newest first. get_job has all fields.",
        {"limit": limit(20), "after": AFTER},
        lambda work, limit=20, **more: page(
            work.client.fine_tuning.jobs.list(limit=limit, **more), JOB_FIELDS
        ),
    ),
    Tool(
        "get_job",
        "Get a job with its request, state, estimate and result.",
        {"job_id": JOB_ID},
        lambda work, job_id: work.client.jobs.retrieve(job_id),
    ),
    Tool(
        "watch_job",
        "Wait until a job ends, is paused or has a state, or until the time is over. Then `reached` is false, and "
        "another call waits longer.",
        {
            "job_id": JOB_ID,
            "until": may("string", "Also stop at this state.", enum=list(JOB_EDGES)),
            "seconds": SECONDS,
        },
        calls.watch_job,
    ),
    Tool(
        "list_events",
        "List the events of a job, newest first: its log, warnings and errors.",
        {"job_id": JOB_ID, "limit": limit(20), "after": AFTER},
        lambda work, job_id, limit=20, **more: page(
            work.client.fine_tuning.jobs.list_events(job_id, limit=limit, **more)
        ),
    ),
    Tool(
        "get_metrics",
        "Get the metrics of a job's last steps, such as train_mean_reward and full_valid_mean_reward.",
        {
            "job_id": JOB_ID,
            "names": may(
                "array",
                "Only these metrics, such as kl or timing.step. All of a step are a few kilobytes.",
                items={"type": "string", "pattern": r"^[\w.]+$"},
            ),
            "last": may("integer", "The number of steps.", minimum=1, maximum=1000, default=5),
        },
        calls.get_metrics,
        quotes=False,
    ),
    Tool(
        "get_verdict",
        "Say whether the model of a job that has ended is better than its base on the validation rows, with an "
        "interval.",
        {"job_id": JOB_ID},
        calls.get_verdict,
        quotes=False,
    ),
    Tool(
        "list_rollouts",
        "List the answers of one step with their rows, rewards and what the grader said of them.",
        {
            "job_id": JOB_ID,
            "step": needed("integer", "Step; 0 of split valid is the base model.", minimum=0),
            "split": choice("Answers of training or of validation.", literals.Split, "train"),
            "sort": choice(
                "The value to sort by, highest first. Default: the order of the step.", literals.Sort
            ),
            "order": choice("Of the sorted value; asc: lowest first.", literals.Order),
            "graded": may("boolean", "Only answers with a score, or only those without."),
            "min_score": may("number", "Lowest score."),
            "max_score": may("number", "Highest score."),
            "q": may("string", "Text in the prompt, the row, the answer or the grader's output."),
            "limit": limit(10),
            "after": AFTER,
        },
        lambda work, job_id, limit=10, **filters: page(
            work.client.rollouts.list(job_id, limit=limit, **filters)
        ),
    ),
    Tool(
        "compare_jobs",
        "Compare the validated rewards of jobs prompt by prompt with those of the first, and their requests.",
        {
            "first": JOB_ID,
            "others": needed(
                "array",
                "Ids of other jobs.",
                items={"type": "string", "pattern": ID},
                minItems=1,
                maxItems=10,
            ),
        },
        lambda work, first, others: work.client.jobs.compare(first, *others),
    ),
    Tool(
        "validate_file",
        "Check every row of a dataset file on this machine by the service's rules; with a grader also the fields that "
        "it reads. Invalid lines are in `errors`.",
        {
            "path": needed("string", "Path of a JSONL file.", minLength=1),
            "grader": GRADER_IF_ANY,
            "split": choice("Which split it is for.", literals.Split, "train"),
            "method": METHOD,
        },
        calls.validate_file,
    ),
    Tool(
        "validate_job",
        "Check a job and its local files without creating or uploading anything.",
        {"job": JOB},
        calls.validate_job,
    ),
    Tool(
        "get_preview",
        "Get a preview: its state and, once completed, its report.",
        {"preview_id": identifier("Id of the preview.")},
        lambda work, preview_id: work.client.previews.retrieve(preview_id),
    ),
    Tool(
        "get_grader_audit",
        "Get an audit of a grader: its state and, once completed, its report.",
        {"audit_id": identifier("Id of the audit.")},
        lambda work, audit_id: work.client.grader_audits.retrieve(audit_id),
    ),
)

WRITE = (
    Tool(
        "convert_file",
        "Convert a file in another format (CSV, JSON, Parquet, Arrow; Alpaca, ShareGPT, TRL and others) to a dataset.",
        {
            "source": needed("string", "Path of the file to convert.", minLength=1),
            "to": needed(
                "string",
                "rft: rows for reinforcement, sft: for supervised, dpo: for preference jobs.",
                enum=["rft", "sft", "dpo"],
            ),
            "out": needed("string", "Path of the file to write, which ends in .jsonl.", minLength=1),
            "names": may(
                "object",
                'The field of the source for a field of the row, such as {"prompt": "question", "answer": '
                '"label"}.',
                additionalProperties={"type": "string"},
            ),
            "encoding": may("string", "Of a text file, such as cp1252. Default: UTF-8."),
            "replace": may("boolean", "Replace `out` if it exists.", default=False),
        },
        calls.convert_file,
        writes=True,
        destroys=True,
        writes_files=True,
    ),
    Tool(
        "upload_file",
        "Upload a dataset file to the service. The id that it gets is a job's training_file or validation_file.",
        {"path": needed("string", "Path of a JSONL file.", minLength=1)},
        lambda work, path: work.client.files.create(file=work.root.file(path), purpose="fine-tune"),
        writes=True,
        quotes=False,
    ),
    Tool(
        "test_grader",
        "Run a grader on answers and compare the rewards with the expected ones. The service runs it.",
        {
            "grader": GRADER,
            "cases": Argument(
                {
                    "anyOf": [
                        PATH,
                        {
                            "type": "array",
                            "items": {"type": "object"},
                            "minItems": 1,
                            "maxItems": calls.MAX_CASES,
                        },
                    ],
                    "description": 'Path of a JSONL file of cases, or the cases: {"sample": answer, "expect": reward '
                    "(optional), ...fields of the row}.",
                },
                required=True,
            ),
        },
        calls.test_grader,
        writes=True,
    ),
    Tool(
        "audit_grader",
        "Try a grader on right answers and on exploits made from rows of an uploaded file, and say whether it can be "
        "gamed. If it is in progress after the time, get_grader_audit reads it.",
        {
            "grader": GRADER,
            "training_file": identifier("Id of an uploaded file."),
            "answer": may("string", "Template of a right answer, such as {{item.answer}}."),
            "rows": may("integer", "Number of rows.", minimum=1),
            "max_tokens": may(
                "integer", "Most tokens that graders which are models may use in all.", minimum=1
            ),
            "seconds": SECONDS,
        },
        calls.audit_grader,
        writes=True,
    ),
    Tool(
        "estimate_job",
        "Estimate steps, time and cost of a job. Its local files are uploaded.",
        {"job": JOB},
        calls.estimate_job,
        writes=True,
    ),
    Tool(
        "preview_job",
        "Sample and grade a few rows with the job's model: whether some answers pass and some fail, so that there is "
        "something to learn, and what the job costs. Its local files are uploaded. If it is in progress after the "
        "time, get_preview reads it.",
        {
            "job": JOB,
            "rows": may("integer", "Rows to sample. Default: 8.", minimum=1),
            "samples": may("integer", "Answers to each row. Default: 8.", minimum=1),
            "seconds": SECONDS,
        },
        calls.preview_job,
        writes=True,
    ),
    Tool(
        "create_job",
        "Create a job, which the service then trains. Its local files are validated and uploaded first.",
        {"job": JOB},
        calls.create_job,
        writes=True,
    ),
    Tool(
        "cancel_job",
        "Cancel a job permanently.",
        {"job_id": JOB_ID},
        lambda work, job_id: work.client.jobs.cancel(job_id),
        writes=True,
        destroys=True,
    ),
    Tool(
        "chat",
        "Send one message to a base model, a tuned model or an alias, and get its answer.",
        {
            "model": MODEL,
            "prompt": needed("string", "The message."),
            "system": may("string", "A system message before it."),
            "temperature": may("number", "0: the likeliest answer.", minimum=0, maximum=2),
            "max_completion_tokens": may("integer", "Longest answer.", minimum=1),
        },
        calls.chat,
        writes=True,
    ),
    Tool(
        "promote_alias",
        "Point an alias at a model, which answers requests for the alias from then on. Creates the alias if there is "
        "none.",
        {"model": MODEL, "alias": needed("string", "Name of the alias, such as production.", minLength=1)},
        lambda work, model, alias: work.client.aliases.promote(model, alias),
        writes=True,
        destroys=True,
        quotes=False,
    ),
)
TOOLS = READ + WRITE
