"""The styles of the console: its custom properties."""

import re
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "console/src"
STYLED = [path for path in SOURCES.rglob("*") if path.suffix in (".css", ".svelte", ".ts")]


def test_each_custom_property_that_a_style_reads_is_defined() -> None:
    """A browser ignores a declaration with a property that is not defined: it is no error anywhere."""
    texts = [path.read_text() for path in STYLED]
    defined = {name for text in texts for name in re.findall(r"(--[\w-]+):", text)}
    read = {name for text in texts for name in re.findall(r"var\((--[\w-]+)", text)}

    assert defined
    assert read - defined == set()
