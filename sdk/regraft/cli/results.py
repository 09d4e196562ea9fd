"""The commands of rollouts, regrades and checkpoints."""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from itertools import islice
from textwrap import indent
from typing import Any

from openai.types.fine_tuning.jobs import FineTuningJobCheckpoint

from regraft.cli.output import answer, answer_cell, print_json, say, shortened, table
from regraft.cli.shared import DONE, NO, WIDE, Refused, connect, method_of, number, signed, value_text
from regraft.progress import FINAL
from regraft.resources.checkpoints import best
from regraft.resources.rollouts import Filters
from regraft.sync.client import Regraft
from regraft.types import ComparedScores, Rewards, Rollout, WhatIf


def rollouts(arguments: argparse.Namespace) -> int:
    if arguments.to is not None:
        return _rollouts_file(arguments)
    if arguments.format is not None:
        raise Refused("--format requires --to FILE.")
    client = connect()
    filters = {name: getattr(arguments, name) for name in Filters.__annotations__}
    over_steps = filters["step_from"] is not None or filters["step_to"] is not None
    if not over_steps:
        filters["split"] = filters["split"] or "train"
        if filters["step"] is None:
            filters["step"] = _last_step(client, arguments.job_id, filters["split"])
    limit = 20 if arguments.limit is None else arguments.limit
    in_full = not over_steps or arguments.worst or limit == 0 or arguments.output == "json"
    sorting: Any = {} if arguments.sort is None else {"sort": arguments.sort, "order": "desc"}
    listed = client.rollouts.list(arguments.job_id, limit=1000 if over_steps else None, **sorting, **filters)
    answers = list(listed if in_full else islice(listed, limit + 1))
    if arguments.worst:
        # Ungraded answers sort last, but must not be hidden by the limit.
        answers.sort(key=lambda one: (one.score is not None, one.score or 0.0))
    if arguments.output == "json":
        print_json(answers)
        return DONE
    shown = answers[:limit] if limit else answers
    if arguments.full:
        print("\n\n".join(_in_full(one) for one in shown))
        return DONE
    _print_answers(shown, sort=arguments.sort, over_steps=over_steps)
    if in_full or len(answers) <= limit:
        where = "" if over_steps else f"step {filters['step']}, {filters['split']}: "
        say(f"{where}{len(shown)} of {len(answers)} answers")
    else:
        say(f"the first {limit} answers; --limit 0 shows all")
    return DONE


def _print_answers(answers: list[Rollout], *, sort: str | None, over_steps: bool) -> None:
    """Print a table of answers, and one of their prompts."""
    places = [[one.step, one.split] if over_steps else [] for one in answers]
    sorted_by = [sort] if sort and sort != "score" else []
    rows = [
        [
            *place,
            one.line,
            one.member,
            one.score if one.score is None else float(one.score),
            *(getattr(one, name) for name in sorted_by),
            one.finish_reason,
            answer_cell(one.output_text, WIDE, sys.stdout.encoding),
            shortened("; ".join(filter(None, (_sub_scores(one), one.reason))), WIDE),
        ]
        for place, one in zip(places, answers, strict=True)
    ]
    head = ["line", "member", "reward", *sorted_by, "finish", "answer", "why"]
    print(table(["step", "split", *head] if over_steps else head, rows))
    # Each prompt once: a judgment of the scores needs the question and the expected answer.
    prompts = {one.line: [one.line, shortened(_question(one), WIDE), _expected(one)] for one in answers}
    if prompts:
        print()
        print(table(["line", "question", "expected"], [prompts[line] for line in sorted(prompts)]))


def _question(rollout: Rollout) -> str:
    """The text of the last message."""
    content = rollout.messages[-1].get("content") if rollout.messages else None
    if isinstance(content, list):
        return " ".join(part["text"] for part in content if isinstance(part.get("text"), str))
    return content or ""


def _expected(rollout: Rollout) -> str:
    """The other fields of the row: without its name if there is only one."""
    fields = {name: value_text(value) for name, value in (rollout.item or {}).items() if name != "messages"}
    if len(fields) == 1:
        return next(iter(fields.values()))
    return shortened(", ".join(f"{name}: {value}" for name, value in fields.items()), WIDE)


def _sub_scores(rollout: Rollout) -> str:
    """Such as `format 1.000, answer 0.500`; empty without a multi grader."""
    return ", ".join(f"{name} {number(score)}" for name, score in (rollout.sub_scores or {}).items())


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function") or {}
    return f"{function.get('name')}({function.get('arguments')})"


def _message_text(message: Mapping[str, Any]) -> str:
    """The text of a message, and its calls."""
    calls = map(_call, message.get("tool_calls") or [])
    return "\n".join([part for part in (_text(message.get("content")), *calls) if part])


def _in_full(rollout: Rollout) -> str:
    """The whole prompt, row, answer and grade."""
    fields = {name: value for name, value in (rollout.item or {}).items() if name != "messages"}
    parts = [
        *((str(one.get("role")), _text(one.get("content"))) for one in rollout.messages),
        *((name, _text(value)) for name, value in fields.items()),
        ("thought", rollout.output_reasoning),
        ("answer", rollout.output_text),
        *((f"then {one.get('role')}", _message_text(one)) for one in rollout.conversation or []),
        ("calls", "\n".join(map(_call, rollout.output_tools or []))),
        ("calls that cannot be read", rollout.output_tools_error),
        ("reward", number(rollout.score)),
        ("sub-scores", _sub_scores(rollout)),
        ("reason", rollout.reason),
        *((f"reason of {name}", text) for name, text in (rollout.sub_reasons or {}).items()),
        ("printed", rollout.output),
        *((f"printed by {name}", text) for name, text in (rollout.sub_outputs or {}).items()),
    ]
    place = f"step {rollout.step}, {rollout.split}, line {rollout.line}, member {rollout.member}"
    lines = [f"{place}, {rollout.finish_reason}, {rollout.completion_tokens} tokens"]
    lines += [f"{title}:\n{indent(text.rstrip(), '  ')}" for title, text in parts if text]
    return "\n".join(lines)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _last_step(client: Regraft, job_id: str, split: str) -> int:
    steps = client.jobs.metrics(job_id, frame=False)
    key = "train_mean_reward" if split == "train" else "full_valid_mean_reward"
    with_answers: list[int] = [one["step"] for one in steps if one.get(key) is not None]
    if not with_answers:
        job = client.fine_tuning.jobs.retrieve(job_id)
        if job.status in FINAL:
            raise Refused(
                f"The job has ended without {split} rollouts. Only jobs that sample answers have them, and its "
                f"method is '{method_of(job)}'."
            )
        raise Refused(f"The job has no {split} rollouts yet.")
    return with_answers[-1]


def _rollouts_file(arguments: argparse.Namespace) -> int:
    if arguments.worst or arguments.full or arguments.sort is not None or arguments.limit is not None:
        raise Refused(
            "--worst, --full, --sort and --limit are for the table; a file has all matching answers by step."
        )
    asked: Any = {name: getattr(arguments, name) for name in Filters.__annotations__}
    form: Any = arguments.format or "jsonl"
    path = connect().rollouts.download(arguments.job_id, arguments.to, format=form, **asked)
    size = path.stat().st_size
    return answer(arguments, {"path": str(path), "bytes": size}, lambda: f"{path}: {size} bytes")


def prompts(arguments: argparse.Namespace) -> int:
    limit = arguments.limit
    page = connect().rollouts.prompts(
        arguments.job_id,
        split=arguments.split,
        step_from=arguments.step_from,
        step_to=arguments.step_to,
        line=arguments.line,
        outcome=arguments.outcome,
        pass_threshold=arguments.pass_threshold,
        sort=arguments.sort,
        limit=min(limit, 1000) if limit else 1000,
    )
    listed = list(islice(page, limit) if limit else page)

    def text() -> str:
        rows = [
            [
                one.line,
                one.outcome if one.reason is None else f"{one.outcome}: {one.reason}",
                one.first_mean,
                one.last_mean,
                signed(one.change),
                len(one.steps),
                shortened(one.text or "", WIDE),
            ]
            for one in listed
        ]
        return table(["line", "outcome", "first", "last", "change", "steps", "prompt"], rows)

    done = answer(arguments, listed, text)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in page.outcomes.items() if count)
    say(f"{counts or 'no prompts'}; a prompt is solved from a mean reward of {page.pass_threshold:g}")
    return done


def attribution(arguments: argparse.Namespace) -> int:
    found = connect().rollouts.attribution(
        arguments.job_id,
        step=arguments.step,
        step_from=arguments.step_from,
        step_to=arguments.step_to,
        limit=arguments.limit,
    )

    def text() -> str:
        groups: list[list[object]] = [
            [
                one.step,
                one.group,
                one.line,
                f"{one.share:.1%}",
                f"{one.with_advantage} of {one.answers}",
                one.mean_reward,
                shortened(one.text or "", WIDE),
            ]
            for one in found.largest
        ]
        parts: list[list[object]] = [[one.name, f"{one.share:.1%}"] for one in found.parts or ()]
        tables = [table(["step", "group", "line", "share", "with advantage", "mean", "prompt"], groups)]
        if parts:
            tables.append(table(["part of the grader", "share"], parts))
        counts = f"{found.with_advantage} of {found.answers} answers have an advantage"
        half = f"; {found.groups_of_half} of {found.groups} groups make half of the updates"
        return "\n\n".join([*tables, counts + (half if found.with_advantage else "")])

    return answer(arguments, found, text)


def what_if(arguments: argparse.Namespace) -> int:
    found = connect().rollouts.what_if(
        arguments.job_id,
        arguments.formula,
        pass_threshold=arguments.pass_threshold,
        advantage_scale=arguments.advantage_scale,
        split=arguments.split,
        step_from=arguments.step_from,
        step_to=arguments.step_to,
    )
    before, after = found.advantages_before, found.advantages_after
    sizes: list[list[object]] = [
        [f"mean size of advantages, scale {found.advantage_scale}", before.mean, after.mean],
        ["largest advantage", before.largest, after.largest],
    ]

    return answer(
        arguments,
        found,
        lambda: _compared(found, "with the formula", f"passed, from {found.pass_threshold:g}", sizes),
    )


def _compared(
    found: ComparedScores | WhatIf, new: str, passed: str, more: Iterable[list[object]] = ()
) -> str:
    """The stored scores beside the new ones; `new` and `passed` name a column and a row, `more` are further rows."""
    before, after = found.before, found.after
    rows: list[list[object]] = [
        ["mean reward", before.mean, after.mean],
        ["graded answers", before.graded, after.graded],
        [passed, before.passed, after.passed],
        [f"groups with signal, of {found.groups}", before.groups_with_signal, after.groups_with_signal],
        *_by_group_size(before, after),
        *more,
    ]
    cosine = (
        "" if found.centered_cosine is None else f", cosine with the stored ones {found.centered_cosine:.3f}"
    )
    correlation = "" if found.rank_correlation is None else f", rank correlation {found.rank_correlation:.3f}"
    return (
        table([f"{found.answers} answers", "stored", new], rows)
        + f"\n{found.higher} higher, {found.lower} lower, {found.same} the same; {found.now_passed} now pass, "
        f"{found.now_failed} now fail; {found.changed_signs} would be learned the other way{cosine}{correlation}"
    )


def _by_group_size(before: Rewards, after: Rewards) -> list[list[object]]:
    """How often a group would have signal, by its number of answers."""
    shares = [
        (size, share, after.signal_by_group_size.get(size))
        for size, share in before.signal_by_group_size.items()
    ]
    return [
        [f"expected with signal, of groups of {size}", f"{old:.0%}", "-" if new is None else f"{new:.0%}"]
        for size, old, new in shares
    ]


def regrade(arguments: argparse.Namespace) -> int:
    """Exit code 1: it did not complete."""
    client = connect()
    made = client.regrades.create(
        arguments.job_id,
        arguments.grader,
        split=arguments.split,
        step_from=arguments.step_from,
        step_to=arguments.step_to,
        name=arguments.name,
        max_tokens=arguments.max_tokens,
    )
    if arguments.no_wait:
        return answer(arguments, made, lambda: made.id)
    say(f"{made.id}: {made.answers} answers")
    ended = client.regrades.wait(
        made.job_id, made.id, progress=lambda one: say(f"{one.status}: {one.graded} of {one.answers} graded")
    )

    def text() -> str:
        if ended.comparison is None:
            why = f": {ended.error['message']}" if ended.error else ""
            return f"{ended.status} after {ended.graded} of {ended.answers} answers{why}"
        return _compared(ended.comparison, "with the grader", "passed")

    answer(arguments, ended, text)
    return DONE if ended.status == "completed" else NO


def checkpoints_list(arguments: argparse.Namespace) -> int:
    listed = connect().checkpoints.list(arguments.job_id)

    def text() -> str:
        chosen = best(listed, arguments.job_id).id if listed else ""
        rows = [
            [
                one.id,
                one.step_number,
                getattr(one.metrics, "full_valid_mean_reward", None),
                signed(_difference(one)),
                _mark(one) if one.id == chosen else "",
                one.fine_tuned_model_checkpoint or "-",
            ]
            for one in listed
        ]
        if all(reward is None for _, _, reward, *_ in rows):  # of a supervised or dpo job
            losses = [getattr(one.metrics, "full_valid_loss", None) for one in listed]
            named = [[row[0], row[1], loss, row[5]] for row, loss in zip(rows, losses, strict=True)]
            return table(["id", "step", "valid loss", "model"], named)
        return table(["id", "step", "valid reward", "vs base", "", "model"], rows)

    return answer(arguments, listed, text)


def _difference(checkpoint: FineTuningJobCheckpoint) -> float | None:
    """Validation reward minus the base model's, paired by row; None if they were not compared."""
    return getattr(checkpoint.metrics, "full_valid_difference", None)


def _mark(best: FineTuningJobCheckpoint) -> str:
    return "best, below base" if (_difference(best) or 0.0) < 0 else "best"


def checkpoints_download(arguments: argparse.Namespace) -> int:
    folder = connect().checkpoints.download(arguments.job_id, arguments.checkpoint_id, to=arguments.to)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    shown = {"folder": str(folder), "files": files}
    return answer(
        arguments,
        shown,
        lambda: table(["bytes", "file"], [[size, folder / name] for name, size in files.items()]),
    )
