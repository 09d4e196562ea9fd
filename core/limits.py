"""What a project may use at most."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

# What PostgreSQL's INTEGER and BIGINT hold, less what JSON's readers round.
_INTEGER, _EXACT = 2**31 - 1, 2**53


class Limits(BaseModel):
    """Each is a maximum; None: no such limit. Stored in `Project.limits` without the Nones."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    running_jobs: int | None = Field(default=None, ge=0, le=_INTEGER)
    queued_jobs: int | None = Field(default=None, ge=0, le=_INTEGER)  # those being validated included
    storage_bytes: int | None = Field(default=None, ge=0, le=_EXACT)
    gpu_seconds_per_30_days: float | None = Field(default=None, ge=0, le=_EXACT)
    grader_tokens_per_30_days: int | None = Field(default=None, ge=0, le=_EXACT)
    requests_per_minute: int | None = Field(default=None, ge=1, le=_INTEGER)

    def given(self) -> dict[str, Any]:
        """Those that are set, by name."""
        return self.model_dump(exclude_none=True)

    def or_else(self, defaults: "Limits") -> "Limits":
        """These, and where one is not set the default's."""
        return Limits(**defaults.given() | self.given())


NO_LIMITS = Limits()
# Where the operator says nothing: far above what a team's scripts need, and below what one process can serve.
DEFAULT_LIMITS = Limits(requests_per_minute=6000)
