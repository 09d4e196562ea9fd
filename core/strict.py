"""The base of all models that requests are parsed with."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """A component of a request: strict, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
