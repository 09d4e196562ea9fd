"""The commands of jobs and their previews."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from openai.types.fine_tuning import FineTuningJob

from regraft.cli.output import (
    amount,
    answer,
    answer_cell,
    duration,
    expected_costs,
    page_of,
    plain,
    print_json,
    print_json_line,
    say,
    say_quarters,
    shortened,
    table,
    when,
)
from regraft.cli.shared import DONE, NO, WIDE, Refused, connect, method_of, money, number, signed, value_text
from regraft.display import Waiting
from regraft.jobs import grader_of, result_of, verdict_of
from regraft.progress import FINAL, Marks, axis_of, doing_now, marks_for, queued_text, sparkline
from regraft.routes import route
from regraft.saving import atomic_file
from regraft.sync.client import Regraft
from regraft.types import ComparedPair, JobResult, LedgerBucket, Preview, PreviewProgress

SLOW_START_S = 300.0  # weights of tens of gigabytes and an engine's start take minutes


def jobs_create(arguments: argparse.Namespace) -> int:
    if not arguments.preview and (arguments.yes or arguments.rows or arguments.samples):
        raise Refused("--rows, --samples and --yes require --preview.")
    client = connect()
    body = client.jobs.prepare(arguments.file, set=arguments.changes)
    if arguments.estimate:
        estimate = client.estimate(body)
        return answer(arguments, estimate, lambda: estimate_text(plain(estimate)))
    if arguments.preview:
        return _previewed(arguments, client, body)
    return _created(arguments, client.jobs.submit(body))


def _previewed(arguments: argparse.Namespace, client: Regraft, body: dict[str, Any]) -> int:
    """Show the preview, and create the job after confirmation or with --yes."""
    with Waiting(sys.stderr, "the preview") as waiting:
        preview = client.preview(
            body, rows=arguments.rows, samples=arguments.samples, progress=_preview_progress(waiting.say)
        )
    if arguments.output == "json":
        if arguments.yes and arguments.watch:
            print_json_line(preview)
            return _watch(arguments, client.jobs.submit(body).id)
        print_json({"preview": preview, "job": client.jobs.submit(body) if arguments.yes else None})
        return DONE
    if arguments.yes:
        say(_preview(plain(preview)))  # stdout is reserved for the id of the job
    else:
        print(_preview(plain(preview)))
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            say("Nothing was created; pass --yes to create the job.")
            return DONE
        if input("Create the job? [y/N] ").strip().lower() not in ("y", "yes"):
            return DONE
    return _created(arguments, client.jobs.submit(body))


def preview_text(preview: Preview) -> str:
    if preview.report is not None:
        return _preview(plain(preview.report))
    if preview.error is not None:
        return f"failed: {preview.error.message}"
    return f"{preview.status}: {_doing(preview.progress)}"


def previews_answers(arguments: argparse.Namespace) -> int:
    answers = list(connect().previews.answers(arguments.preview_id))
    rows = [
        [
            one.line,
            "none" if one.score is None else f"{one.score:.2f}",
            answer_cell(one.output_text, 60, sys.stdout.encoding),
        ]
        for one in answers
    ]
    return answer(arguments, answers, lambda: table(["line", "score", "answer"], rows))


def _doing(now: PreviewProgress) -> str:
    done = now.graded if now.phase == "grading" else now.sampled
    doing = {"loading": "loading the model", "sampling": "sampling", "grading": "grading"}[now.phase]
    return doing if now.phase == "loading" else f"{doing}: {done} of {now.of} answers"


def _preview_progress(say: Callable[[str], None]) -> Callable[[PreviewProgress], None]:
    """Say each phase when it begins, and each quarter of its answers."""
    say_quarter = say_quarters(say)

    def print_progress(now: PreviewProgress) -> None:
        done = now.graded if now.phase == "grading" else now.sampled
        say_quarter(now.phase, done / now.of, _doing(now))

    return print_progress


def jobs_clone(arguments: argparse.Namespace) -> int:
    job = connect().jobs.clone(arguments.job_id, set=arguments.changes, grader=arguments.grader)
    return _created(arguments, job)


def _created(arguments: argparse.Namespace, job: FineTuningJob) -> int:
    if arguments.watch:
        say(f"{job.id}: {job.model}")
        return _watch(arguments, job.id)
    return answer(arguments, job, lambda: job.id)


def jobs_list(arguments: argparse.Namespace) -> int:
    limit = arguments.limit
    found = list(islice(connect().fine_tuning.jobs.list(limit=page_of(limit + 1)), limit + 1))
    listed = found[:limit]
    if len(found) > limit:
        say(f"The newest {limit} jobs; --limit N lists more.")
    rows = [
        [
            job.id,
            job.status,
            _now(job),
            str(result_of(job) or "-"),
            when(job.created_at),
            job.model,
            job.fine_tuned_model or "-",
        ]
        for job in listed
    ]
    head = ["id", "status", "now", "result", "created", "model", "tuned model"]
    return answer(arguments, listed, lambda: table(head, rows))


def _now(job: FineTuningJob) -> str:
    """The work of a running job inside of its step, why one waits or has failed, in a few words."""
    if job.error is not None and job.error.message:
        return shortened(job.error.message, WIDE)
    if (queue := getattr(job, "queue", None)) is not None:
        return queued_text(queue)
    now = getattr(job, "progress", None)
    return "-" if now is None else doing_now(now)


def jobs_show(arguments: argparse.Namespace) -> int:
    client = connect()
    job = client.jobs.retrieve(arguments.job_id)
    return answer(arguments, job, lambda: _job(job, client.jobs.metrics(job.id, frame=False)))


def jobs_watch(arguments: argparse.Namespace) -> int:
    return _watch(arguments, arguments.job_id)


def _watch(arguments: argparse.Namespace, job_id: str) -> int:
    """With JSON output every event is one line, and the job is the last one."""
    client = connect()
    if arguments.output == "json":
        for event in client.jobs.watch(job_id):
            print_json_line(event)
        job = client.jobs.retrieve(job_id)
        print_json_line(job)
        return NO if job.status in ("failed", "cancelled") or _is_worse(job) else DONE
    job = client.jobs.wait(job_id, progress=sys.stdout)
    if job.status in FINAL:
        if (found := verdict_of(job) or result_of(job)) is not None:
            say(str(found))
        print(job.fine_tuned_model)
    else:
        say(f"The job is {job.status}; `regraft jobs resume {job.id}` resumes it.")
    return NO if _is_worse(job) else DONE


def _is_worse(job: FineTuningJob) -> bool:
    verdict = verdict_of(job)
    return verdict is not None and verdict.outcome == "worse"


def jobs_compare(arguments: argparse.Namespace) -> int:
    found = connect().jobs.compare(arguments.first, *arguments.others)

    def text() -> str:
        jobs: list[list[object]] = [
            [one.job_id, one.model, one.step, duration(one.gpu_seconds), money(one.cost)]
            for one in found.jobs
        ]
        parts = [table(["job", "model", "validated at step", "GPU time", "cost"], jobs)]
        missing = {one.job_id for one in found.jobs if one.step is None}
        parts += [line for pair in found.pairs for line in _pair(found.jobs[0].job_id, pair, missing)]
        if any(bucket.tokens or bucket.gpu_seconds for one in found.jobs for bucket in one.ledger):
            parts.append(_ledgers({one.job_id: one.ledger for one in found.jobs}))
        if found.config:
            changed = [[one.field, *map(value_text, one.values)] for one in found.config]
            parts.append(table(["field", *(one.job_id for one in found.jobs)], changed))
        return "\n".join(parts)

    return answer(arguments, found, text)


def _pair(first: str, pair: ComparedPair, missing: Collection[str]) -> list[str]:
    """Sentences about a pair. `missing`: the jobs without a stored validation."""
    one = pair.reward
    if one is None:
        lacking = [name for name in (first, pair.job_id) if name in missing]
        return [f"{' and '.join(lacking)} {'has' if len(lacking) == 1 else 'have'} no stored validation."]
    interval = "" if one.ci_low is None else f" ({one.ci_low:+.3f} to {signed(one.ci_high)})"
    lines = [
        f"{pair.job_id} against {first}, {pair.prompts} prompts in both: {number(one.second)} and "
        f"{number(one.first)}, difference {signed(one.difference)}{interval}; better on {one.wins}, worse on "
        f"{one.losses}, equal on {one.ties}"
    ]
    if pair.unpaired:
        lines.append(f"{pair.unpaired} prompts are in one of them only.")
    if not pair.same_grader:
        lines.append("Their graders differ, so the rewards may not be on one scale.")
    return lines


def jobs_ledger(arguments: argparse.Namespace) -> int:
    client = connect()
    if arguments.csv:
        if arguments.output == "json":
            raise Refused("--csv and --output json exclude each other.")
        sys.stdout.write(client.jobs.ledger_csv(arguments.job_id))
        return DONE
    found = client.jobs.ledger(arguments.job_id)

    def text() -> str:
        rows: list[list[object]] = [
            [
                one.title,
                one.tokens,
                f"{one.tokens_percent:.1f} %",
                duration(one.gpu_seconds),
                f"{one.time_percent:.1f} %",
                money(one.cost),
            ]
            for one in found.buckets
            if one.tokens or one.gpu_seconds
        ]
        if not rows:
            return "No step is recorded yet."
        in_all = duration(found.gpu_seconds)
        rows.append(
            ["All", found.tokens, "100.0 %" if found.tokens else "-", in_all, "100.0 %", money(found.cost)]
        )
        return table(["taught", "tokens", "of the tokens", "GPU time", "of the time", "cost"], rows)

    return answer(arguments, found, text)


def _ledgers(buckets_of: Mapping[str, Sequence[LedgerBucket]]) -> str:
    """The shares of tokens and of time, of the buckets that a job has."""
    rows = [
        [buckets[0].title, *(f"{one.tokens_percent:.1f} % / {one.time_percent:.1f} %" for one in buckets)]
        for buckets in zip(*buckets_of.values(), strict=True)
        if any(one.tokens or one.gpu_seconds for one in buckets)
    ]
    return table(["share of tokens / of time", *buckets_of], rows)


def jobs_passport(arguments: argparse.Namespace) -> int:
    passport = connect().jobs.passport(arguments.job_id, checkpoint_id=arguments.checkpoint_id)
    # ASCII: the file has the signed values whatever the encoding of the terminal is.
    text = json.dumps(passport, indent=2, sort_keys=True)
    if arguments.to is None:
        print(text)
        return DONE
    with atomic_file(Path(arguments.to)) as file:
        file.write((text + "\n").encode())
    return answer(arguments, {"path": arguments.to}, lambda: str(arguments.to))


def jobs_attempts(arguments: argparse.Namespace) -> int:
    response: Any = connect().get(route("/regraft/jobs", arguments.job_id, "attempts"), cast_to=object)

    def text() -> str:
        rows: list[list[object]] = []
        for one in response["data"]:
            end = one["ended_at"]
            lasted = "-" if end is None else duration(end - one["started_at"])
            start, outcome = when(int(one["started_at"])), one["outcome"] or "running"
            why = shortened(one["reason"] or "", WIDE)
            rows.append([one["number"], one["kind"], start, lasted, outcome, one["resumed_from_step"], why])
        head = ["attempt", "kind", "started", "lasted", "outcome", "resumed from step", "reason"]
        return table(head, rows)

    return answer(arguments, response["data"], text)


def jobs_logs(arguments: argparse.Namespace) -> int:
    log = connect().get(route("/regraft/jobs", arguments.job_id, "logs"), cast_to=str)
    return answer(arguments, {"log": log}, lambda: log.rstrip("\n"))


def jobs_budget(arguments: argparse.Namespace) -> int:
    client, asked = connect(), None
    if (arguments.amount is None) != (arguments.currency is None):
        raise Refused("--amount and --currency belong together.")
    if arguments.gpu_hours is not None:
        asked = {"gpu_seconds": 3600 * arguments.gpu_hours}
    elif arguments.amount is not None:
        asked = {"amount": arguments.amount, "currency": arguments.currency}
    job: Any
    if asked is None and not arguments.none:
        job = client.jobs.retrieve(arguments.job_id)
    else:
        path = route("/fine_tuning/jobs", arguments.job_id, "budget")
        job = client.post(path, body={"budget": asked}, cast_to=FineTuningJob)

    def text() -> str:
        budget = getattr(job, "budget", None)
        if budget is None:
            return f"{job.id} has no budget."
        names = ("used_gpu_seconds", "remaining_gpu_seconds", "gpu_seconds")
        used, left, cap = (duration(budget[name]) for name in names)
        return f"{job.id}: {used} of GPU time used, {left} left of {cap}"

    return answer(arguments, job, text)


# Of jobs that learn from the answers in a file, and of those that learn from a teacher.
COURSES = (
    ("train loss", "train_loss"),
    ("valid loss", "full_valid_loss"),
    ("train accuracy", "train_mean_reward_accuracy"),
    ("valid accuracy", "full_valid_mean_reward_accuracy"),
    ("train margin", "train_mean_reward_margin"),
    ("valid margin", "full_valid_mean_reward_margin"),
    ("train KL to the teacher", "teacher_kl"),
    ("valid KL to the teacher", "full_valid_teacher_kl"),
)


def _lasting(now: Mapping[str, Any], seconds: float) -> str:
    """Describe the work of a run and how long it has lasted."""
    slow = now["phase"] in ("loading", "starting the sampler") and seconds >= SLOW_START_S
    unusual = ": unusually long; `regraft jobs logs` may say why" if slow else ""
    return f"{doing_now(now)}, for {duration(seconds)}{unusual}"


def _job(job: FineTuningJob, steps: list[dict[str, Any]]) -> str:
    shown = {
        "id": job.id,
        "status": job.status,
        "model": job.model,
        "tuned model": job.fine_tuned_model or "-",
        "created": when(job.created_at),
        "finished": when(job.finished_at),
        "method": method_of(job),
        "files": ", ".join(filter(None, (job.training_file, job.validation_file))),
        "seed": str(job.seed),
    }
    if queue := getattr(job, "queue", None):
        shown["queue"] = queued_text(queue)
    if job.error and job.error.message:
        shown["error"] = f"{job.error.message} ({job.error.code})"
    if steps:
        shown["step"] = f"{steps[-1]['step']} of {steps[-1]['total_steps']}"
    if now := getattr(job, "progress", None):
        shown["now"] = _lasting(now, max(0.0, time.time() - now["since"]))
    estimate = getattr(job, "estimate", None)
    if estimate and job.estimated_finish is not None and job.status not in FINAL:
        shown |= expected_costs(estimate, job.estimated_finish, time.time())
    elif used := getattr(job, "usage_metrics", None):
        shown["GPU time"] = duration(used.get("gpu_seconds", 0.0))
        if cost := used.get("cost"):
            shown["cost"] = f"{amount(cost['amount'])} {cost['currency']}"
    if (result := result_of(job)) is not None:
        shown["result"] = str(result)
        steps = _until(steps, result)
    marks, axis = marks_for(sys.stdout.encoding), axis_of(grader_of(job))
    for name, key in (("train reward", "train_mean_reward"), ("valid reward", "full_valid_mean_reward")):
        values = [step[key] for step in steps if step.get(key) is not None]
        if values:
            shown[name] = _course(values, marks, axis)
    for name, key in COURSES:
        values = [step[key] for step in steps if step.get(key) is not None]
        if values:
            top = 1.0 if key.endswith("accuracy") else max(values)
            shown[name] = _course(values, marks, (min(0.0, *values), top or 1.0))
    errors = [step["full_valid_stderr"] for step in steps if step.get("full_valid_stderr") is not None]
    if errors and "valid reward" in shown:
        shown["valid reward"] += f" {marks.plus_minus}{errors[-1]:.2f}"
    if (verdict := verdict_of(job)) is not None:
        shown["verdict"] = str(verdict)
    width = max(map(len, shown))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in shown.items())


def _until(steps: Sequence[dict[str, Any]], result: JobResult) -> list[dict[str, Any]]:
    """The steps without the validations after the delivered checkpoint, whose validation has the result's number."""
    shown: list[dict[str, Any]] = []
    for step in steps:
        if step["step"] > result.step:
            step = {name: value for name, value in step.items() if not name.startswith("full_valid_")}
        elif step["step"] == result.step:
            step = step | {result.metric: result.value}
        shown.append(step)
    return shown


def _course(values: list[float], marks: Marks, axis: tuple[float, float]) -> str:
    """`0.20 ▂▃▅▆ 0.71`; a single value without the sparkline."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{values[0]:.2f} {sparkline(values, 40, marks.blocks, axis)} {values[-1]:.2f}"


def estimate_text(estimate: dict[str, Any]) -> str:
    group_size = estimate["group_size"]
    of_a_step = (
        f"{estimate['batch_size']} rows per step"
        if group_size is None
        else f"{estimate['batch_size']} prompts per step, {group_size} answers per prompt"
    )
    lines = [
        f"{estimate['training_rows']} training rows, {estimate['validation_rows']} validation rows",
        f"{estimate['total_steps']} steps: {estimate['n_epochs']} epochs, {of_a_step}",
    ]
    warnings = [f"warning: {one}" for one in estimate.get("warnings", ())]
    known = estimate.get("estimate")
    if not known:
        return "\n".join([*lines, f"time and cost are unknown: {estimate.get('reason')}", *warnings])
    seconds = known["remaining_seconds"]
    lines.append(
        f"{duration(seconds['expected'])}, between {duration(seconds['low'])} and {duration(seconds['high'])}"
        + (f", based on {known['based_on']}" if known.get("based_on") else "")
    )
    if upper_end := known.get("upper_end"):
        lines.append(upper_end)
    if cost := known.get("cost"):
        between = f"between {amount(cost['low'])} and {amount(cost['high'])}"
        lines.append(f"{amount(cost['expected'])}, {between} {cost['currency']}")
    return "\n".join(lines + warnings)


def _preview(preview: dict[str, Any]) -> str:
    """The results, the estimate of the job, and the advice."""
    lines = [f"{len(preview['prompts'])} rows sampled, {preview['answers']} answers"]
    if rate := preview["pass_rate"]:
        lines.append(
            f"{preview['passed']} pass (reward {preview['pass_threshold']:g} or more): {_between(rate)}; "
            f"mean reward {preview['mean_reward']:.2f}"
        )
    groups = [
        [
            str(row["group_size"]) + (" (the job's)" if row["group_size"] == preview["group_size"] else ""),
            ("at least " if row["at_least"] else "") + _between(row["share"]),
        ]
        for row in preview["signal"]
    ]
    lines.append(table(["answers per prompt", "groups with signal"], groups))
    tokens, room = preview["completion_tokens"], preview["max_completion_tokens"]
    lines.append(
        f"{tokens['mean']:.0f} tokens per answer, at most {tokens['max']:.0f}; {preview['cut_off']} cut off at {room}"
    )
    grading = preview["grading"]
    lines.append(
        f"{grading['failed']} could not be graded; a grade takes {grading['seconds']['mean']:.3f} s"
        + (f" and {grading['tokens']} tokens of judges were used" if grading["tokens"] else "")
    )
    return "\n".join([*lines, "", estimate_text(preview), "", preview["recommendation"]])


def _between(share: dict[str, float]) -> str:
    expected, low, high = (f"{100 * share[name]:.0f} %" for name in ("expected", "low", "high"))
    return f"{expected}, between {low} and {high}"
