"""What an installation lets graders call: judge models and hosts of endpoints, from a TOML file of its operator."""

from __future__ import annotations

import os
import tomllib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from graders.build import build
from graders.endpoint import Endpoints
from graders.judge import HttpJudges, JudgeModel
from graders.spec import GraderSpec
from graders.types import Grader


class InvalidBackends(ValueError):
    """The operator's file cannot be used; the message names it, the table and what to do."""


class JudgeEntry(BaseModel, extra="forbid", frozen=True, strict=True):
    """[judges.NAME]: users ask for NAME. The key itself stays in the environment, out of the file."""

    base_url: str = Field(pattern=r"^https?://[^\s/]+.*$")  # up to and with /v1
    api_key_env: str | None = None
    served_as: str | None = None
    max_concurrency: int = Field(default=8, ge=1)
    requests_per_second: float | None = Field(default=None, gt=0)
    timeout_seconds: float = Field(default=120.0, gt=0)


class EndpointRules(BaseModel, extra="forbid", frozen=True, strict=True):
    """[endpoints]: which hosts endpoint graders may call. `*` stands for any run of characters."""

    hosts: list[str] = Field(min_length=1)


class _File(BaseModel, extra="forbid", frozen=True, strict=True):
    judges: dict[str, JudgeEntry] = {}
    endpoints: EndpointRules | None = None


@dataclass(frozen=True)
class Backends:
    """Nothing by default: then graders that ask somebody else are refused when they are created."""

    judges: Mapping[str, JudgeModel]
    endpoints: Endpoints | None = None

    @classmethod
    def none(cls) -> Backends:
        return cls({})

    @classmethod
    def load(cls, file: Path | None, environment: Mapping[str, str] = os.environ) -> Backends:
        """Read `file`; none without one.

        Raises:
            InvalidBackends: the file cannot be read, or a key that it names is not in the environment.
        """
        if file is None:
            return cls.none()
        try:
            read = _File.model_validate(tomllib.loads(file.read_text()))
        except (OSError, tomllib.TOMLDecodeError) as cause:
            raise InvalidBackends(f"{file}: {cause}") from cause
        except ValidationError as invalid:
            first = invalid.errors()[0]
            where = ".".join(str(step) for step in first["loc"])
            raise InvalidBackends(f"{file}: [{where}] {first['msg']}") from None
        judges = {}
        for name, entry in read.judges.items():
            key = environment.get(entry.api_key_env, "") if entry.api_key_env else ""
            if entry.api_key_env and not key:
                raise InvalidBackends(
                    f"{file}: [judges.{name}] reads its key from the environment variable "
                    f"{entry.api_key_env}, which is not set"
                )
            judges[name] = JudgeModel(
                entry.base_url,
                key,
                entry.served_as,
                entry.max_concurrency,
                entry.requests_per_second,
                entry.timeout_seconds,
            )
        hosts = read.endpoints.hosts if read.endpoints else None
        return cls(judges, Endpoints(hosts=tuple(hosts)) if hosts else None)

    def check(self, spec: GraderSpec, param: str = "grader") -> None:
        """Raise NotConfigured, a kind of InvalidGrader, if this installation cannot run the grader."""
        build(spec, HttpJudges(self.judges), self.endpoints, param=param)

    @asynccontextmanager
    async def open(self, spec: GraderSpec, *, trace_id: str | None = None) -> AsyncIterator[Grader]:
        """The grader, ready for use in the running event loop. `trace_id` goes to endpoints instead of a new one."""
        endpoints = self.endpoints
        if endpoints is not None and trace_id is not None:
            endpoints = replace(endpoints, new_trace_id=lambda: trace_id)
        async with HttpJudges(self.judges) as judges:
            yield build(spec, judges, endpoints)
