"""Passports: signed statements about tuned models, and how they are verified (docs/howto/passports.md).

The signature is Ed25519 (RFC 8032) over PREFIX and the canonical JSON of the statement. This module imports nothing of
ours, so that the client verifies passports by the same rules, without a server.
"""

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

FILE = "passport.json"
TYPE, VERSION = "regraft.passport", 1
# A signature of this key over another kind of content is none over a passport.
PREFIX = b"regraft passport 1\n"
_PARTS = ("statement", "public_key", "signature")


class InvalidPassport(Exception):
    """The content is no passport, or its signature does not match."""


def canonical(value: Any) -> bytes:
    """JSON with sorted keys, without white space, in ASCII: equal values have equal bytes.

    Numbers are as Python writes them: 1 and 1.0 differ. Lone surrogates are escaped, as all characters beyond ASCII.

    Raises:
        ValueError: a number is not finite.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(value: Any) -> str:
    """The SHA-256 of the canonical JSON."""
    return hashlib.sha256(canonical(value)).hexdigest()


def fingerprint(public_key: bytes) -> str:
    """The SHA-256 of the 32 bytes of a public key, by which people compare keys."""
    return hashlib.sha256(public_key).hexdigest()


@dataclass(frozen=True)
class Signer:
    """The private key of a deployment."""

    private: Ed25519PrivateKey

    @classmethod
    def parse(cls, text: str) -> Self:
        """The key from its 32 bytes in base64, as `openssl rand -base64 32` prints them.

        Raises:
            ValueError: the text is something else.
        """
        try:
            seed = base64.b64decode(text.strip(), validate=True)
        except (binascii.Error, ValueError):
            seed = b""
        if len(seed) != 32:
            raise ValueError("must be 32 bytes in base64, as `openssl rand -base64 32` prints them")
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @property
    def public_key(self) -> str:
        """The 32 bytes of the public key in base64."""
        return base64.b64encode(self.private.public_key().public_bytes_raw()).decode()

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.private.public_key().public_bytes_raw())

    def sign(self, statement: Mapping[str, Any]) -> dict[str, Any]:
        """The passport of a statement. The same statement gives the same bytes: Ed25519 draws nothing."""
        signature = self.private.sign(PREFIX + canonical(statement))
        return {
            "statement": dict(statement),
            "public_key": self.public_key,
            "signature": base64.b64encode(signature).decode(),
        }


def new_key() -> str:
    """A new private key as `Signer.parse` reads it."""
    return base64.b64encode(Ed25519PrivateKey.generate().private_bytes_raw()).decode()


def render(passport: Mapping[str, Any]) -> bytes:
    """The file of a passport: indented, sorted ASCII JSON."""
    return (json.dumps(passport, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


@dataclass(frozen=True)
class SignedFile:
    """A file of the export that a passport travels with. Its name has no folder."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Passport:
    """A statement whose signature matches the key in it. Whose key that is, the fingerprint must tell."""

    statement: Mapping[str, Any]
    fingerprint: str
    files: Sequence[SignedFile]


def read(content: bytes) -> Passport:
    """Parse a passport and verify its signature.

    Raises:
        InvalidPassport: it is no passport of this version, or its signature does not match. Nothing may be added to it,
            so parts that are not signed are refused, and names that occur twice in an object. 0.50 for 0.5 is refused
            too: other readers may show other digits.
    """
    try:
        # Of bytes, json.loads would also take UTF-16, and raw halves of surrogate pairs.
        parsed = json.loads(
            content.decode(),
            object_pairs_hook=_object,
            parse_constant=_refuse,
            parse_float=_float,
            parse_int=_int,
        )
    except (ValueError, RecursionError) as cause:
        raise InvalidPassport(f"It is not valid JSON: {cause}") from cause
    if not isinstance(parsed, dict) or sorted(parsed) != sorted(_PARTS):
        raise InvalidPassport(f"It is not a passport: one has the keys {', '.join(_PARTS)}, and no others.")
    statement = parsed["statement"]
    public_key, signature = (_bytes(parsed[name], name) for name in ("public_key", "signature"))
    try:
        key = Ed25519PublicKey.from_public_bytes(public_key)
        key.verify(signature, PREFIX + canonical(statement))
    except (InvalidSignature, ValueError, RecursionError) as cause:
        raise InvalidPassport(
            "The signature does not match: the statement, the key or the signature was changed."
        ) from cause
    if not isinstance(statement, dict) or (statement.get("type"), statement.get("version")) != (
        TYPE,
        VERSION,
    ):
        raise InvalidPassport(f"The statement is not of the type {TYPE}, version {VERSION}.")
    return Passport(statement, fingerprint(public_key), tuple(_files(statement)))


def _files(statement: Mapping[str, Any]) -> Iterator[SignedFile]:
    try:
        for file in statement["export"]["files"]:
            name, sha256 = file["name"], file["sha256"]
            if not (isinstance(name, str) and isinstance(sha256, str)):
                raise TypeError
            if not re.fullmatch(r"[^/\\\0]+", name) or name in (".", ".."):
                raise InvalidPassport(f"It names the file {name!r}, which is not beside it.")
            yield SignedFile(name, sha256)
    except (KeyError, TypeError) as cause:
        raise InvalidPassport("The statement does not list the files of an export.") from cause


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in an object")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number of JSON")


def _float(text: str) -> float:
    number = float(text)
    if repr(number) != text:
        raise ValueError(f"{text} is not a number as a passport writes it")
    return number


def _int(text: str) -> int:
    number = int(text)
    if str(number) != text:
        raise ValueError(f"{text} is not a number as a passport writes it")
    return number


def _bytes(value: Any, name: str) -> bytes:
    try:
        decoded = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError, TypeError) as cause:
        raise InvalidPassport(f"Its {name} is not base64.") from cause
    if base64.b64encode(decoded).decode() != value:  # the last character may have bits that decoding ignores
        raise InvalidPassport(f"Its {name} is not base64 as a passport writes it.")
    return decoded


def listed(folder: Path) -> list[dict[str, Any]]:
    """The files of a folder as a statement lists them, by name, without the passport itself."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != FILE)
    return [{"name": path.name, "bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files]


def problems_of_files(passport: Passport, folder: Path) -> list[str]:
    """One sentence for each difference between the files of an export and those of a folder.

    A file that the passport does not list is one: a loader may read it in place of, or beside, those that were signed.
    """
    found = []
    for file in passport.files:
        path = folder / file.name
        if not path.is_file():
            found.append(f"{file.name} is missing.")
        elif _sha256(path) != file.sha256:
            found.append(f"{file.name} does not have the content that was signed.")
    known = {FILE, *(file.name for file in passport.files)}
    more = sorted(path.name for path in folder.iterdir() if path.name not in known)
    return found + [f"{name} is not in the passport: move it out of the folder." for name in more]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
