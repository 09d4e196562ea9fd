"""Identifiers in OpenAI's format: a prefix for the type, then random letters and digits."""

import re
import secrets
import string

_ALPHABET = string.ascii_letters + string.digits
# Random characters of an organization's or a project's id. OpenAI's ids have 24, which distinguishes the two.
TENANT_LENGTH = 28


def new_id(prefix: str, length: int = 24) -> str:
    """`new_id("ftjob-")` -> "ftjob-" and 24 characters (143 bits) from a cryptographic source."""
    return prefix + "".join(secrets.choice(_ALPHABET) for _ in range(length))


def is_tenant_id(text: str) -> bool:
    """Whether the text has the form of the id of an organization or a project of a service like this one."""
    return re.fullmatch(rf"(org-|proj_)[A-Za-z0-9]{{{TENANT_LENGTH}}}", text) is not None
