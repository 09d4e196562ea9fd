"""The base of all models that requests are parsed with."""

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from core.errors import UnsupportedValue


class StrictModel(BaseModel):
    """A component of a request: strict, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def only(*supported: str) -> BeforeValidator:
    """Refuse the other texts that OpenAI's API has, or will have, in a field, as unsupported."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and value not in supported:
            values = ", ".join(map(repr, supported))
            raise UnsupportedValue(f"{value[:100]!r} is not supported by this server. Supported: {values}")
        return value

    return BeforeValidator(check)
