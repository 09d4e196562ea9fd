"""The graders of a job whose metrics are shown by name."""

from graders.spec import GraderSpec, LabelModelSpec, MathSpec, ScoreModelSpec, parts_of
from worker.types import GraderPart


def grader_parts(spec: GraderSpec | None) -> tuple[GraderPart, ...]:
    """Those inside a multi or a select, or the only one. Empty for None: a teacher scores the answers."""
    if spec is None:
        return ()
    return tuple(
        GraderPart(
            key,
            part.name,
            part.type,
            part.model if isinstance(part, ScoreModelSpec | LabelModelSpec) else None,
            _compares_numbers(part),
        )
        for key, part in parts_of(spec).items() or [(None, spec)]
    )


def _compares_numbers(spec: GraderSpec) -> bool:
    return isinstance(spec, MathSpec) or any(map(_compares_numbers, parts_of(spec).values()))
