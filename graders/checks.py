"""Checks of a spec that compute on what the user wrote: in the hazard pool, so never in an event loop."""

from __future__ import annotations

from graders import complaints
from graders.format_check import pattern_problem
from graders.hazards.pool import HazardPool, shared
from graders.spec import FormatSpec, GraderSpec, InvalidGrader, MultiSpec


def check_patterns(spec: GraderSpec, param: str = "grader", pool: HazardPool | None = None) -> None:
    """Compile the regular expressions of a spec.

    Raises:
        InvalidGrader: one is none, or takes too long or too much memory to compile.
        HazardFailed: the pool broke.
    """
    if isinstance(spec, MultiSpec):
        for key, sub in spec.graders.items():
            check_patterns(sub, f"{param}.graders.{key}", pool)
    if not isinstance(spec, FormatSpec) or spec.pattern is None:
        return
    if why := pattern_problem(spec.pattern, pool or shared()):
        mistake = complaints.invalid_value(f"{param}.pattern", f"{why}.")
        raise InvalidGrader(mistake.message, mistake.param, mistake.code)
