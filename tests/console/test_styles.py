"""The custom properties and classes of the console. A browser ignores one that means nothing, without an error."""

import re
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "console/src"
TEXTS = [path.read_text() for path in SOURCES.rglob("*") if path.suffix in (".css", ".svelte", ".ts")]
PARTS = [path.read_text() for path in SOURCES.rglob("*.svelte")]
SHARED = (SOURCES / "style.css").read_text()
DEFINED = {name for text in TEXTS for name in re.findall(r"(--[\w-]+):", text)}


def classes(style: str) -> set[str]:
    """The classes in the selectors of a style sheet."""
    return {
        name for chosen in re.findall(r"([^{}]+)\{", style) for name in re.findall(r"\.([a-z][\w-]*)", chosen)
    }


def test_each_custom_property_that_a_style_reads_is_defined() -> None:
    read = {name for text in TEXTS for name in re.findall(r"var\((--[\w-]+)", text)}

    assert DEFINED
    assert read - DEFINED == set()


def test_each_custom_property_is_read() -> None:
    named = {name for text in TEXTS for name in re.findall(r"(--[\w-]+)(?![\w-]*:)", text)}

    assert DEFINED - named == set()


def test_each_class_of_the_shared_styles_is_on_a_page() -> None:
    markup = " ".join(
        re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL) for text in TEXTS if text != SHARED
    )

    assert {name for name in classes(SHARED) if not re.search(rf"(?<![\w-]){name}(?![\w-])", markup)} == set()


def test_each_class_of_a_page_has_a_style() -> None:
    for part in PARTS:
        markup, _, own = part.partition("<style>")
        used = {name for value in re.findall(r'class="([^"{}]*)"', markup) for name in value.split()}

        assert used - classes(own) - classes(SHARED) == set()


def test_numbers_and_money_are_written_by_one_function_each() -> None:
    """`count`, `share` and `money` of console/src/lib/format.ts."""
    own = [
        found
        for text in PARTS
        for found in re.findall(r"toLocaleString|\.toFixed\(1\)\} %|\{[\w.?]*currency\}", text)
    ]

    assert own == []
