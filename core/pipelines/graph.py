"""The graph of a pipeline: which stage needs which, by the references in what was requested.

    {"name": "sft", "job": {"model": "{{stages.rl.model}}", "training_file": "{{stages.best.file}}", ...}}

A reference is a whole string. A job and a sweep have a `model`, every other stage has a `file`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from core.errors import InvalidRequest

Kind = Literal["job", "sweep", "sample", "select", "mix"]
KINDS: tuple[Kind, ...] = ("job", "sweep", "sample", "select", "mix")
MAX_STAGES = 64
_REFERENCE = re.compile(r"\{\{\s*stages\.([A-Za-z0-9_-]+)\.([A-Za-z_]+)\s*\}\}")


@dataclass(frozen=True)
class StageReference:
    stage: str
    result: str  # model or file


@dataclass(frozen=True)
class PlannedStage:
    """A stage as requested; `spec` is the body of the job, or of what makes the file."""

    name: str
    kind: Kind
    spec: Mapping[str, Any]
    after: Sequence[str] = ()

    @property
    def result(self) -> str:
        return "model" if self.kind in ("job", "sweep") else "file"


def references(value: Any, path: str = "") -> Iterator[tuple[str, StageReference]]:
    """Yield (path, reference) for each string anywhere in `value` that is one."""
    for place, text in _texts(value, path):
        if found := _REFERENCE.fullmatch(text.strip()):
            yield place, StageReference(found[1], found[2])


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The strings in a value of JSON, with their paths."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(inner, f"{path}.{key}")
    elif isinstance(value, Sequence):
        for index, inner in enumerate(value):
            yield from _texts(inner, f"{path}[{index}]")


def filled(value: Any, results: Mapping[StageReference, str]) -> Any:
    """`value` with every reference replaced by its result. Raises KeyError without one."""
    if isinstance(value, str):
        found = _REFERENCE.fullmatch(value.strip())
        return results[StageReference(found[1], found[2])] if found else value
    if isinstance(value, Mapping):
        return {key: filled(inner, results) for key, inner in value.items()}
    if isinstance(value, Sequence):
        return [filled(inner, results) for inner in value]
    return value


def needs(stage: PlannedStage) -> list[str]:
    """The stages that must have succeeded before this one, without repetition."""
    named = [reference.stage for _, reference in references(stage.spec)]
    return list(dict.fromkeys([*named, *stage.after]))


def check(stages: Sequence[PlannedStage]) -> None:
    """Refuse stages that cannot all run.

    Raises:
        InvalidRequest: a name is used twice, a reference names no stage or no result of it, or stages wait for each
            other in a circle.
    """
    kinds = {stage.name: stage for stage in stages}
    for number, stage in enumerate(stages):
        where = f"stages[{number}]"
        if kinds[stage.name] is not stage:
            raise InvalidRequest(
                f"Invalid value for '{where}.name': '{stage.name}' is already the name of another stage.",
                param=f"{where}.name",
            )
        for path, reference in references(stage.spec):
            param = f"{where}.{stage.kind}{path}"
            if reference.stage not in kinds:
                raise InvalidRequest(
                    f"Invalid value for '{param}': there is no stage '{reference.stage}'.", param=param
                )
            if reference.result != (has := kinds[reference.stage].result):
                raise InvalidRequest(
                    f"Invalid value for '{param}': the stage '{reference.stage}' has a '{has}' and no "
                    f"'{reference.result}'.",
                    param=param,
                )
        for path, text in _texts(stage.spec):
            if _REFERENCE.search(text) and not _REFERENCE.fullmatch(text.strip()):
                param = f"{where}.{stage.kind}{path}"
                raise InvalidRequest(
                    f"Invalid value for '{param}': a reference to a stage must be the whole text.",
                    param=param,
                )
        for index, name in enumerate(stage.after):
            if name not in kinds:
                param = f"{where}.after[{index}]"
                raise InvalidRequest(f"Invalid value for '{param}': there is no stage '{name}'.", param=param)
    _refuse_circle(stages)


def _refuse_circle(stages: Sequence[PlannedStage]) -> None:
    waiting = {stage.name: set(needs(stage)) for stage in stages}
    while ready := [name for name, missing in waiting.items() if not missing]:
        for name in ready:
            del waiting[name]
        for missing in waiting.values():
            missing.difference_update(ready)
    if waiting:
        raise InvalidRequest(
            f"The stages {', '.join(sorted(waiting))} wait for each other in a circle.", param="stages"
        )


def behind(stages: Sequence[PlannedStage], name: str) -> set[str]:
    """The stage and all stages that need it, directly or through others."""
    found = {name}
    while more := {s.name for s in stages if s.name not in found and not found.isdisjoint(needs(s))}:
        found |= more
    return found
