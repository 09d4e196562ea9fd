"""The user's server of a tool, and how its answers are quoted without the secrets that it was sent."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from core.masking import hide_in_error, mask_values, secrets_of, secrets_of_headers
from graders.calls import NoAnswer, quoted_reply


@dataclass(frozen=True)
class ToolServer:
    """A server, as a tool in a job's body names it."""

    url: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "ToolServer":
        """`row`: a tool of a job."""
        return cls(row["server_url"], row.get("headers") or {})

    def quoted(self, text: str) -> str:
        """An answer of the server in a reason for an error."""
        return quoted_reply(text, *self._secrets)

    def no_answer(self, cause: NoAnswer) -> str:
        """The reason why the server gave no answer."""
        return f"no answer: {mask_values(hide_in_error(str(cause)), self._secrets)}"

    def for_model(self, text: str) -> str:
        """The text with keys masked, for the model. Other headers may have words that occur in any text."""
        return mask_values(text, [*secrets_of_headers(self.headers), *secrets_of(self.url)])

    @property
    def _secrets(self) -> list[str]:
        """Every value that only the user may see."""
        return [*self.headers.values(), *secrets_of(self.url)]
