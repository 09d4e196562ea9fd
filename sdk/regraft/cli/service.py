"""The commands of usage, and of workers and queues."""

import argparse
from collections.abc import Sequence

from regraft.cli.output import answer, duration, table, when
from regraft.cli.shared import connect, money
from regraft.literals import Projects
from regraft.progress import doing_now
from regraft.types import Queue, UsageReport, UsageRow, Worker

GIB = 2**30


def usage(arguments: argparse.Namespace) -> int:
    projects: Projects = "all" if arguments.all_projects else "own"
    found = connect().service.usage(by=arguments.by, days=arguments.days, projects=projects)
    return answer(arguments, found, lambda: _usage(found))


def _usage(found: UsageReport) -> str:
    head = [*found.by, "GPU time", "sampled tokens", "unused", "trained tokens", "grader tokens", "cost"]
    rows = [
        [
            *(_group(row, name) for name in found.by),
            duration(row.gpu_seconds),
            row.sampled_tokens,
            row.unused_tokens,
            row.trained_tokens,
            row.grader_tokens,
            money(row.cost),
        ]
        for row in found.data
    ]
    return table(head, rows)


def _group(row: UsageRow, name: str) -> str:
    known = {"day": row.day, "model": row.model, "project": row.project_name}[name]
    return known or "unknown"


def workers(arguments: argparse.Namespace) -> int:
    service = connect().service
    found, queues = service.workers(), service.queues()
    return answer(
        arguments,
        {"workers": found, "queues": queues},
        lambda: "\n".join([_workers(found), "", _queues(queues)]),
    )


def _workers(found: Sequence[Worker]) -> str:
    rows = [
        [
            one.name,
            one.gpu_class,
            one.status if one.status != "silent" else f"silent for {duration(one.silent_seconds)}",
            _gpus(one),
            _of(one.memory_used_bytes, one.memory_total_bytes),
            _doctor(one),
            _tasks(one),
            when(one.started_at),
            one.version,
        ]
        for one in found
    ]
    return table(
        ["worker", "class", "status", "GPUs", "memory", "doctor", "works on", "started", "version"], rows
    )


def _gpus(worker: Worker) -> str:
    shown = [_of(gpu.memory_used_bytes, gpu.memory_total_bytes) for gpu in worker.gpus]
    return ", ".join(shown) or "-"


def _doctor(worker: Worker) -> str:
    bad = [f"{one.check} {one.state}" for one in worker.findings if one.state in ("failed", "warning")]
    return ", ".join(bad) or ("all well" if worker.findings else "not run")


def _of(used: int | None, total: int | None) -> str:
    return "-" if used is None or total is None else f"{used / GIB:.1f}/{total / GIB:.1f} GiB"


def _tasks(worker: Worker) -> str:
    shown = [
        task.id + (f" {doing_now(task.progress)}" if task.progress else f" ({task.kind})")
        for task in worker.tasks
    ]
    return ", ".join(shown) or "-"


def _queues(found: Sequence[Queue]) -> str:
    rows = [
        [
            one.gpu_class or one.kind,
            one.length,
            duration(one.oldest_seconds) if one.length else "-",
            one.running,
            one.held_back + one.backing_off,
            one.workers,
            one.reason or "-",
        ]
        for one in found
    ]
    return table(["queue", "waiting", "oldest", "running", "held back", "workers", "reason"], rows)
