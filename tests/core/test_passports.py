"""Signing and verifying statements, and the files beside them."""

import base64
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core import passports
from core.passports import InvalidPassport, Signer

SEED = base64.b64encode(bytes(range(32))).decode()
SIGNER = Signer.parse(SEED)
STATEMENT = {
    "type": "regraft.passport",
    "version": 1,
    "model": "ft:tiny:acme::1",
    "verdict": {"outcome": "improved", "ci_low": 0.1, "ci_high": None, "held_out": True},
    "alarms": [{"rule": "kl_jump", "step": 3}],
    "cost": 0.0,
    "seed": 1,
    "text": 'quote " line\n, é, \N{GRINNING FACE}, and half of one: \ud83d',
    "export": {"format": "peft", "files": []},
}


def signed(**changes: Any) -> dict[str, Any]:
    return SIGNER.sign(STATEMENT | changes)


def test_the_signature_is_the_one_of_rfc_8032() -> None:
    """By the first vector of its section 7.1, with the private key as the passports' own."""
    seed = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    signer = Signer.parse(base64.b64encode(seed).decode())

    public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert base64.b64decode(signer.public_key).hex() == public
    assert signer.fingerprint == "21fe31dfa154a261626bf854046fd2271b7bed4b6abe45aa58877ef47f9721b9"


def test_a_passport_is_read_with_its_statement_and_the_fingerprint_of_its_key() -> None:
    passport = passports.read(passports.render(signed()))

    assert (passport.statement, passport.fingerprint) == (STATEMENT, SIGNER.fingerprint)


def test_equal_statements_have_equal_bytes_whatever_their_order() -> None:
    shuffled = dict(reversed(STATEMENT.items()))

    assert passports.render(SIGNER.sign(shuffled)) == passports.render(signed())
    assert passports.canonical({"b": 1.0, "a": [None, "\ud83d"]}) == b'{"a":[null,"\\ud83d"],"b":1.0}'


def test_numbers_that_are_not_finite_cannot_be_signed() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        signed(cost=float("nan"))


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*place, key))
    elif isinstance(value, list) and value:
        for key, inner in enumerate(value):
            yield from leaves(inner, (*place, key))
    else:
        yield place


def changed(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return float(value)
        case float():
            return value + 1e-9
        case str():
            return value + " "
        case list():
            return ["more"]
        case _:
            return 0


@pytest.mark.parametrize("place", list(leaves(signed())), ids=str)
def test_a_change_of_any_field_is_found(place: tuple[Any, ...]) -> None:
    """Also one that many readers would not see: 1 for 1.0, a space at the end, true for false."""
    passport = copy.deepcopy(signed())
    *path, last = place
    inside: Any = passport
    for key in path:
        inside = inside[key]
    inside[last] = changed(inside[last])

    with pytest.raises(InvalidPassport, match=r"signature|base64"):
        passports.read(passports.render(passport))


@pytest.mark.parametrize(
    "place", [("statement", "model"), ("statement", "verdict", "ci_high"), ("signature",)]
)
def test_a_field_that_is_left_out_is_found(place: tuple[str, ...]) -> None:
    passport: Any = copy.deepcopy(signed())
    inside = passport
    for key in place[:-1]:
        inside = inside[key]
    del inside[place[-1]]

    with pytest.raises(InvalidPassport):
        passports.read(passports.render(passport))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (json.dumps(signed() | {"note": "unsigned"}), "no others"),
        (json.dumps(signed()).replace('"seed": 1', '"seed": 2, "seed": 1'), "occurs twice"),
        (json.dumps(signed()).replace('"seed": 1', '"seed": NaN'), "NaN"),
        (json.dumps(signed()).replace('"cost": 0.0', '"cost": 1e999'), "1e999"),
        (json.dumps(signed()).replace('"cost": 0.0', '"cost": 0.00'), "0.00"),
        (json.dumps(signed()).replace('"ci_low": 0.1', '"ci_low": 0.10000000000000000001'), "as a passport"),
        (json.dumps(signed()).replace('"seed": 1', '"seed": ' + "1" * 5000), "not valid JSON"),
        (json.dumps(signed()).replace('"seed": 1', '"seed": -0'), "-0"),
        (json.dumps(signed() | {"signature": [signed()["signature"]] * 2}), "base64"),
        (json.dumps(signed()) * 2, "not valid JSON"),
        (json.dumps({"statement": STATEMENT}), "not a passport"),
        (json.dumps(signed() | {"signature": ""}), "signature"),
        (json.dumps(signed() | {"signature": None}), "base64"),
        (json.dumps(SIGNER.sign({"type": "other", "version": 1})), "not of the type"),
        (json.dumps(signed(version=2)), "version 1"),
        (json.dumps(SIGNER.sign({})), "not of the type"),
        (json.dumps(signed(export=None)), "does not list the files"),
        (json.dumps(signed(export={"files": [{"name": 7, "sha256": ""}]})), "does not list the files"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "not a passport"),
        (json.dumps(signed() | {"public_key": "AAAA"}), "signature"),
        (json.dumps(signed() | {"public_key": 7}), "base64"),
    ],
)
def test_what_is_no_passport_is_refused_with_the_reason(content: str, problem: str) -> None:
    with pytest.raises(InvalidPassport, match=problem):
        passports.read(content.encode())


def test_bytes_that_are_not_utf_8_are_refused() -> None:
    """Readers disagree about a raw half of a surrogate pair."""
    content = passports.render(signed())

    for changed_content in (content.replace(b"\\ud83d", b"\xed\xa0\xbd"), content.decode().encode("utf-16")):
        with pytest.raises(InvalidPassport, match="not valid JSON"):
            passports.read(changed_content)


def test_other_base64_of_the_same_signature_is_refused() -> None:
    passport = signed()
    *start, last, _, _ = passport["signature"]
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    other = "".join([*start, alphabet[alphabet.index(last) + 1], "=="])
    assert base64.b64decode(other) == base64.b64decode(passport["signature"])

    with pytest.raises(InvalidPassport, match="base64 as a passport writes it"):
        passports.read(passports.render(passport | {"signature": other}))


def test_a_signature_over_the_same_json_for_another_purpose_is_none() -> None:
    bare = SIGNER.private.sign(passports.canonical(STATEMENT))

    with pytest.raises(InvalidPassport, match="signature"):
        passports.read(passports.render(signed() | {"signature": base64.b64encode(bare).decode()}))


def test_another_deployments_signature_has_another_fingerprint() -> None:
    other = Signer.parse(passports.new_key())

    assert passports.read(passports.render(other.sign(STATEMENT))).fingerprint != SIGNER.fingerprint


@pytest.mark.parametrize("text", ["", "short", "A" * 44, base64.b64encode(bytes(31)).decode(), "ü" * 44])
def test_a_key_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="32 bytes in base64"):
        Signer.parse(text)


def test_files_beside_a_passport_are_compared_with_it(tmp_path: Path) -> None:
    for name, content in {"a.bin": b"weights", "b.json": b"{}", "c.txt": b"c"}.items():
        (tmp_path / name).write_bytes(content)
    passport = passports.read(
        passports.render(signed(export={"format": "gguf", "files": passports.listed(tmp_path)}))
    )
    assert passports.problems_of_files(passport, tmp_path) == []

    (tmp_path / "a.bin").write_bytes(b"Weights")
    (tmp_path / "b.json").unlink()
    (tmp_path / "more.py").write_text("")

    assert passports.problems_of_files(passport, tmp_path) == [
        "a.bin does not have the content that was signed.",
        "b.json is missing.",
        "more.py is not in the passport: move it out of the folder.",
    ]


@pytest.mark.parametrize("name", ["../secret", "a/b", "a\\b", "..", ".", ""])
def test_a_passport_names_no_file_outside_its_folder(name: str) -> None:
    files = [{"name": name, "bytes": 1, "sha256": "0" * 64}]

    with pytest.raises(InvalidPassport, match="not beside it"):
        passports.read(passports.render(signed(export={"format": "peft", "files": files})))
