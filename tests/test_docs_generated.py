"""The generated pages of docs/ are those of today's code."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_generated_pages_are_current() -> None:
    pages = runpy.run_path(str(ROOT / ".ci/reference.py"))["generated"]()

    due = [str(path.relative_to(ROOT)) for path, text in pages.items() if path.read_text() != text]
    assert due == [], "run `make docs`"
