"""No regular expression of the product takes more than linear time, whatever the text.

Texts come from users, models, graders and other services, and a search holds the lock of the interpreter: a megabyte of
one word stopped a whole service while core/masking.py had such a pattern.
"""

import json
import re
import subprocess
import sys

import pytest

from tests.patterns import ROOT, Used, slow_among

# Patterns that are made only when they are used, which `tests.patterns` cannot find.
MADE_LATER = {
    "core/addresses.py: _TLS_OPTIONS[name]": "alternatives of plain words, for an option of the operator",
    "core/database/ids.py: f'(org-|proj_)[A-Za-z0-9]{{{TENANT_LENGTH}}}'": "a fixed length",
    "core/special_tokens.py: f'{nonce}x([0-9]+)z'": "begins with a random text",
    "core/storage/message_rows.py: TOOL_NAME": "a bounded length",
    "core/stored_graders.py: VERSION": "a bounded length",
    "graders/builtin/format_check.py: pattern": "the user's, in the hazard pool, which limits its time",
    "worker/model/targets.py: pattern": "alternatives of plain words",
    "worker/model/packed_formats.py: one.removeprefix('re:')": "of the files of a model that the operator registered",
    "worker/model/packed.py: one": "transformers' own, of tensors that a model does not load",
    "worker/supervisor/probes.py: pattern": "the operator's, with a timeout",
}
SLOW = {
    "search": [
        r"[\w.-]*(?:token|api[-_]?key)\s*[:=]",
        r"<tool_call>\s*(.*?)\s*</tool_call>",
        r"<think>.*</think>\s*<answer>.*</answer>",
        r'"(?:[^"\\]|\\.)*"',
        r"(?:proxy-)?auth\s*:\s*\S+\s*;",
        r"\s+$",
        r"[a-z]+://\S+@",
    ],
    "fullmatch": [r"(a+)+", r"(\w+)=(\w*)(\d*);", r"(.*?),(.*?),(.*?)x", r"a*b?a*"],
}
LINEAR = {
    "search": [r"(?<![\w.-])[\w.-]*headers\s*[:=]", r"//[^/@\s]+@", r"\w+|[^\w\s]"],
    "fullmatch": [r"[\w.-]*(?:token|api[-_]?key)\s*", r'"(?:[^"\\]|\\.)*"', r"(?:x\s*|y)*z"],
}


def used(function: str, pattern: str) -> Used:
    return Used("example", re.compile(pattern), frozenset({function}))


def test_no_pattern_of_the_product_is_slow_for_any_text() -> None:
    command = [sys.executable, "-m", "tests.patterns"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    report = json.loads(found.stdout)

    assert report["slow"] == []
    assert set(report["made_later"]) == MADE_LATER.keys()
    assert report["count"] > 80


@pytest.mark.parametrize(("function", "pattern"), [(name, one) for name, all in SLOW.items() for one in all])
def test_a_pattern_that_looks_at_a_text_again_and_again_is_found(function: str, pattern: str) -> None:
    found = slow_among([used(function, pattern)])

    assert len(found) == 1
    assert repr(pattern) in found[0]


@pytest.mark.parametrize(
    ("function", "pattern"), [(name, one) for name, all in LINEAR.items() for one in all]
)
def test_a_linear_pattern_is_not_reported(function: str, pattern: str) -> None:
    assert slow_among([used(function, pattern)]) == []
