"""The functions of untrusted sources that the sandbox calls. Also imported inside of the sandbox."""

from __future__ import annotations

from typing import NamedTuple


class SandboxEntry(NamedTuple):
    """A function that a source must define at its top level."""

    name: str
    parameters: tuple[str, ...]  # positional; keys of a request
    result_bytes: int  # of the result as the sandbox writes it, before the process is killed


GRADE = SandboxEntry("grade", ("sample", "item"), 64 * 1024)
# A result of 1 MB and a state of 1 MB, in JSON, which writes a character as up to six bytes.
CALL = SandboxEntry("call", ("arguments", "item", "state"), 14 << 20)
ENTRIES = {entry.name: entry for entry in (GRADE, CALL)}
