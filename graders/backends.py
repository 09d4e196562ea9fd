"""The operator's TOML file: judge models, hosts that endpoint graders may call, and other models on servers."""

from __future__ import annotations

import asyncio
import os
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError, model_validator

from core.system_errors import file_problem
from graders import complaints
from graders.build import build, judge_parts, python_parts
from graders.calls import CallRetryPolicy
from graders.checks import check_patterns
from graders.endpoint import Endpoints
from graders.environments.catalog import DEFAULT, default_folder, find
from graders.judge.judges import HttpJudges, JudgeModel
from graders.judge.usage import TokenLedger
from graders.prompts import refuse_media
from graders.sandbox.entries import GRADE, SandboxEntry
from graders.sandbox.pool import shared
from graders.spec import GraderSpec, InvalidGrader
from graders.types import Grader


class InvalidBackends(ValueError):
    """The operator's file is invalid; the message names the file, the table and the fix."""


class JudgeEntry(BaseModel, extra="forbid", frozen=True, strict=True):
    """[judges.NAME]: a judge model that specs refer to as NAME, either on a server or in the model registry.

    The API key is read from the environment variable `api_key_env`, never from the file.
    """

    model: str | None = None
    base_url: str | None = Field(default=None, pattern=r"^https?://[^\s/]+.*$")  # ends with /v1
    api_key_env: str | None = None
    served_as: str | None = None
    explains: bool = (
        True  # whether it writes reasoning steps before its verdict; they make small models less accurate
    )
    max_concurrency: int = Field(default=8, ge=1)
    requests_per_second: float | None = Field(default=None, gt=0)
    timeout_seconds: float = Field(default=120.0, gt=0)

    @model_validator(mode="after")
    def _one_place(self) -> JudgeEntry:
        if (self.model is None) == (self.base_url is None):
            raise ValueError("set either base_url or model, the name of a model in the registry")
        if self.model is not None and (self.api_key_env or self.served_as):
            raise ValueError("api_key_env and served_as require base_url")
        return self


class ModelEntry(BaseModel, extra="forbid", frozen=True, strict=True):
    """[models.NAME]: a model on an OpenAI-compatible server, which eval runs may sample from and which may teach."""

    base_url: str = Field(pattern=r"^https?://[^\s/]+.*$")  # ends with /v1
    api_key_env: str | None = None
    served_as: str | None = None
    max_concurrency: int = Field(default=8, ge=1)
    requests_per_second: float | None = Field(default=None, gt=0)
    timeout_seconds: float = Field(default=600.0, gt=0)


@dataclass(frozen=True)
class Inference:
    """The inference servers of the registry's models, and their API key."""

    address_of: Callable[[str], str]  # base model -> address; empty if there is none
    key: str = field(default="", repr=False)


class EndpointRules(BaseModel, extra="forbid", frozen=True, strict=True):
    """[endpoints]: the hosts that endpoint graders may call. `*` matches any run of characters.

    `private_hosts` lists those of `hosts` that may resolve to private addresses.
    """

    hosts: list[str] = Field(min_length=1)
    private_hosts: list[str] = []


class _File(BaseModel, extra="forbid", frozen=True, strict=True):
    judges: dict[str, JudgeEntry] = {}
    models: dict[str, ModelEntry] = {}
    endpoints: EndpointRules | None = None


@dataclass(frozen=True)
class Backends:
    """Services that graders may call. Empty by default, so creating a grader that calls a service is rejected."""

    judges: Mapping[str, JudgeModel]
    endpoints: Endpoints | None = None
    registry_models: frozenset[str] = frozenset()  # the models that judges use
    environments: Path = field(default_factory=default_folder)  # folder of the environments of python graders
    models: Mapping[str, JudgeModel] = field(
        default_factory=dict
    )  # on servers, for eval runs and as teachers

    @classmethod
    def none(cls) -> Backends:
        return cls({})

    @classmethod
    def load(
        cls,
        file: Path | None,
        inference: Inference | None = None,
        environment: Mapping[str, str] = os.environ,
        environments: Path | None = None,
    ) -> Backends:
        """Load the operator's file.

        Args:
            file: The TOML file; None allows no services.
            inference: The server for judges that are models of the registry.
            environment: The environment variables that hold API keys.
            environments: Folder of the python graders' environments; default: the one of this installation.

        Raises:
            InvalidBackends: The file cannot be read or is invalid, or an environment variable that it names is unset.
        """
        environments = environments or default_folder()
        if file is None:
            return cls({}, environments=environments)
        try:
            read = _File.model_validate(tomllib.loads(file.read_text()))
        except OSError as cause:
            raise InvalidBackends(file_problem(cause)) from cause
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as cause:
            raise InvalidBackends(f"{file}: {cause}") from cause
        except ValidationError as invalid:
            first = invalid.errors()[0]
            where = ".".join(str(step) for step in first["loc"])
            raise InvalidBackends(f"{file}: [{where}] {first['msg']}") from None
        judges = {}
        for name, entry in read.judges.items():
            try:
                judges[name] = _judge(entry, inference, environment)
            except InvalidBackends as cause:
                raise InvalidBackends(f"{file}: [judges.{name}] {cause}") from None
        endpoints = None
        if (rules := read.endpoints) is not None:
            endpoints = Endpoints(hosts=tuple(rules.hosts), private_hosts=tuple(rules.private_hosts))
        registry_models = frozenset(entry.model for entry in read.judges.values() if entry.model)
        models = {}
        for name, model in read.models.items():
            try:
                models[name] = JudgeModel(
                    model.base_url,
                    _key(model.api_key_env, environment),
                    model.served_as,
                    max_concurrency=model.max_concurrency,
                    requests_per_second=model.requests_per_second,
                    timeout_s=model.timeout_seconds,
                )
            except InvalidBackends as cause:
                raise InvalidBackends(f"{file}: [models.{name}] {cause}") from None
        return cls(judges, endpoints, registry_models, environments, models)

    def check(self, spec: GraderSpec, param: str = "grader") -> None:
        """Run the checks that need this installation. Blocks on the hazard pool, so do not call it in an event loop.

        Raises:
            InvalidGrader: a regular expression does not compile, a judge that reads text only gets images or audio, or
                (NotConfigured) this installation cannot run it.
            EnvironmentNotBuilt: the environment of a python grader has not been built.
        """
        check_patterns(spec, param)
        build(spec, HttpJudges(self.judges), self.endpoints, self.environments, param=param)
        for where, part in judge_parts(spec, param):
            if self.judges[part.model].is_of_registry:
                refuse_media(part.input, f"{where}.input")

    async def compile(self, spec: GraderSpec, owner: str = "", param: str = "grader") -> None:
        """Raise what `compile_source` does for the source of a python grader. Call `check` first."""
        for where, part in python_parts(spec, param):
            await self.compile_source(part.source, f"{where}.source", owner, part.image_tag or DEFAULT)

    async def compile_source(
        self, source: str, param: str, owner: str, tag: str = DEFAULT, entry: SandboxEntry = GRADE
    ) -> None:
        """Raise InvalidGrader if the source does not compile.

        The sandbox compiles the source and caches the result for this owner's calls. Cancelling this call aborts the
        compilation.

        Raises:
            EnvironmentNotBuilt: there is no environment of this tag.
            SandboxUnavailable, SandboxFailed: The sandbox could not check the source.
        """
        environment = find(self.environments, tag)
        error = await asyncio.wrap_future(shared().compile_error(source, environment, owner, entry))
        if error:
            mistake = complaints.invalid_value(param, error)
            raise InvalidGrader(mistake.message, mistake.param, mistake.code)

    def patient(self, patience: CallRetryPolicy | None) -> Backends:
        """These backends with another patience for endpoints; None: as they are."""
        if self.endpoints is None or patience is None:
            return self
        return replace(self, endpoints=replace(self.endpoints, patience=patience))

    @asynccontextmanager
    async def open(
        self,
        spec: GraderSpec,
        *,
        owner: str = "",
        trace_id: str | None = None,
        patience: CallRetryPolicy | None = None,
        ledger: TokenLedger | None = None,
    ) -> AsyncIterator[Grader]:
        """Build the grader for use in the running event loop.

        Args:
            owner: The project. The sandbox does not share processes between owners.
            trace_id: Sent to endpoint graders; default: a new one for each call.
            patience: With the servers of judges and endpoints; default: a few retries within seconds.
            ledger: Counts the tokens of judges.
        """
        endpoints = self.patient(patience).endpoints
        if endpoints is not None and trace_id is not None:
            endpoints = replace(endpoints, new_trace_id=lambda: trace_id)
        async with HttpJudges(self.judges, patience=patience, ledger=ledger) as judges:
            yield build(spec, judges, endpoints, self.environments, owner=owner)


def _judge(entry: JudgeEntry, inference: Inference | None, environment: Mapping[str, str]) -> JudgeModel:
    if entry.base_url is not None:
        url, served_as, key = entry.base_url, entry.served_as, _key(entry.api_key_env, environment)
    else:
        url = inference.address_of(entry.model or "") if inference else ""
        if inference is None or not url:
            raise InvalidBackends(
                f"{entry.model} is a model of the registry; set REGRAFT_INFERENCE_URL to its server "
                "(`regraft-server up` starts one itself)"
            )
        served_as, key = entry.model, inference.key
    return JudgeModel(
        url,
        key,
        served_as,
        max_concurrency=entry.max_concurrency,
        requests_per_second=entry.requests_per_second,
        timeout_s=entry.timeout_seconds,
        explains=entry.explains,
        is_of_registry=entry.model is not None,
    )


def _key(variable: str | None, environment: Mapping[str, str]) -> str:
    key = environment.get(variable, "") if variable else ""
    if variable and not key:
        raise InvalidBackends(f"reads its key from the environment variable {variable}, which is not set")
    return key
