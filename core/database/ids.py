"""Identifiers in OpenAI's format: a prefix for the type, then random letters and digits."""

import secrets
import string

_ALPHABET = string.ascii_letters + string.digits


def new_id(prefix: str, length: int = 24) -> str:
    """`new_id("ftjob-")` -> "ftjob-" and 24 characters (143 bits) from a cryptographic source."""
    return prefix + "".join(secrets.choice(_ALPHABET) for _ in range(length))
