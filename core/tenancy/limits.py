"""Limits of a project."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

# The ranges of PostgreSQL's INTEGER and BIGINT, the latter reduced to what JSON parsers represent exactly.
_INTEGER, _EXACT = 2**31 - 1, 2**53


class Limits(BaseModel):
    """Maxima; None: unlimited. Stored in `Project.limits` without the Nones."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    running_jobs: int | None = Field(default=None, ge=0, le=_INTEGER)
    queued_jobs: int | None = Field(default=None, ge=0, le=_INTEGER)  # includes those being validated
    running_eval_runs: int | None = Field(default=None, ge=0, le=_INTEGER)
    queued_eval_runs: int | None = Field(default=None, ge=0, le=_INTEGER)
    storage_bytes: int | None = Field(default=None, ge=0, le=_EXACT)
    gpu_seconds_per_30_days: float | None = Field(default=None, ge=0, le=_EXACT)
    grader_tokens_per_30_days: int | None = Field(default=None, ge=0, le=_EXACT)
    requests_per_minute: int | None = Field(default=None, ge=1, le=_INTEGER)

    def set_limits(self) -> dict[str, Any]:
        """The limits that are set, by name."""
        return self.model_dump(exclude_none=True)

    def or_else(self, defaults: "Limits") -> "Limits":
        """These limits, with unset ones taken from the defaults."""
        return Limits(**defaults.set_limits() | self.set_limits())


NO_LIMITS = Limits()
# The built-in default: above the needs of a team's scripts, and below the capacity of one process.
DEFAULT_LIMITS = Limits(requests_per_minute=6000)
