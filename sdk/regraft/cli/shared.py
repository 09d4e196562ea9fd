"""What several modules of commands share: exit codes, the client, and texts of numbers."""

import json
import os
from functools import cache

from openai.types.fine_tuning import FineTuningJob

from regraft.cli.output import amount, shortened
from regraft.sync.client import Regraft
from regraft.types import Money

DONE, NO, USAGE, NOT_FOUND, AUTH, UNREACHABLE, QUOTA, INTERRUPTED = 0, 1, 2, 3, 4, 5, 6, 130
BY_STATUS = {401: AUTH, 403: AUTH, 404: NOT_FOUND, 408: UNREACHABLE, 429: QUOTA}
WIDE = 72


class Refused(Exception):
    """The arguments of a command are invalid."""


@cache
def _client_for(environment: tuple[str | None, ...]) -> Regraft:
    return Regraft()


def connect() -> Regraft:
    # Once per command. The environment is part of the key, because a program may change it between calls of main().
    names = ("REGRAFT_BASE_URL", "REGRAFT_API_KEY", "REGRAFT_CONFIG")
    return _client_for(tuple(os.environ.get(name) for name in names))


def money(cost: Money | None) -> str:
    return "-" if cost is None else f"{amount(cost.amount)} {cost.currency}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def value_text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return "-" if value is None else shortened(text, WIDE)


def method_of(job: FineTuningJob) -> str:
    return "supervised" if job.method is None else str(job.method.type)


def signed(difference: float | None) -> str:
    return "-" if difference is None else f"{difference:+.3f}"
