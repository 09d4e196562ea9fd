"""Where the parts of each page stand, in widths from a telephone to a large screen.

A picture of a page depends on the fonts and the rasterizer of the machine, and would differ on every other one. The
places and widths of the parts in pixels come from the style sheets alone, so `layout.json` has these, with a tolerance.
`make screenshots` writes it anew. The pages are those of a project without data, which are the same in every run.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, TimeoutError

SNAPSHOT = Path(__file__).parent / "layout.json"
WIDTHS = (390, 768, 1440, 2560)
TOLERANCE_PX = (
    12  # such as a scroll bar or a word beside a part; a part that moves to another column moves further
)
PAGES = (
    *("jobs", "new", "pipelines", "compare", "graders", "audits", "models", "arena"),
    *("files", "usage", "keys", "webhooks", "audit"),
)

# The parts of a page from the first to the last: what it is, its left edge and its width. Those in a closed `details`
# have rectangles, but are not visible.
PARTS = """() =>
  [...document.querySelectorAll("header.side, main, main :is(.head, section, form, fieldset, table)")]
  .filter((part) => part.checkVisibility())
  .map((part) => {
    const { x, width } = part.getBoundingClientRect();
    const title = part.getAttribute("aria-label") ?? part.querySelector("h1, h2, h3, legend")?.textContent ?? "";
    return [`${part.localName} ${title.trim()}`.trim(), Math.round(x), Math.round(width)];
  })"""
# Whether they are those of the snapshot, within the tolerance.
ARE_AS = f"""([expected, tolerance]) => {{
  const parts = ({PARTS})();
  return parts.length === expected.length && parts.every(([name, x, width], index) => {{
    const [otherName, otherX, otherWidth] = expected[index];
    return name === otherName && Math.abs(x - otherX) <= tolerance && Math.abs(width - otherWidth) <= tolerance;
  }});
}}"""
# Whether nothing has changed between two looks half a second apart, and nothing is loading.
IS_SETTLED = f"""() => {{
  const now = JSON.stringify(({PARTS})());
  const isSame = window.lastParts === now && !document.querySelector("main [aria-busy=true], main .skeleton");
  window.lastParts = now;
  return isSame;
}}"""

Parts = list[list[Any]]


def open_page(page: Page, name: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"/#/{name}")
    page.locator("main h1").first.wait_for()


def differences(parts: Parts, expected: Parts) -> list[str]:
    """The parts that are not in both, or elsewhere, as lines."""
    now, snapshot = (
        [f"{name} at {x}, {width} wide" for name, x, width in side] for side in (parts, expected)
    )
    return [
        *(f"only now: {line}" for line in now if line not in snapshot),
        *(f"only in the snapshot: {line}" for line in snapshot if line not in now),
    ]


@pytest.mark.skipif("REGRAFT_SCREENSHOTS" not in os.environ, reason="`make screenshots` writes the snapshot")
def test_the_snapshot_is_written_with_pictures_of_the_pages(logged_in: Page) -> None:
    written: dict[str, Parts] = {}
    for name in PAGES:
        for width in WIDTHS:
            open_page(logged_in, name, width)
            logged_in.wait_for_function(IS_SETTLED, polling=500)
            written[f"{name} {width}"] = logged_in.evaluate(PARTS)
            logged_in.screenshot(path=Path(os.environ["REGRAFT_SCREENSHOTS"]) / f"layout-{name}-{width}.png")
    lines = [f"  {json.dumps(key)}: {json.dumps(parts)}" for key, parts in written.items()]
    SNAPSHOT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


@pytest.mark.skipif("REGRAFT_SCREENSHOTS" in os.environ, reason="the snapshot is written")
def test_the_parts_of_each_page_stand_where_the_snapshot_has_them_and_none_scrolls_sideways(
    logged_in: Page,
) -> None:
    expected: dict[str, Parts] = json.loads(SNAPSHOT.read_text())

    for name in PAGES:
        for width in WIDTHS:
            open_page(logged_in, name, width)
            key = f"{name} {width}"
            try:
                logged_in.wait_for_function(ARE_AS, arg=[expected[key], TOLERANCE_PX])
            except TimeoutError:
                pytest.fail("\n".join([key, *differences(logged_in.evaluate(PARTS), expected[key])]))
            assert logged_in.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
                f"{key} scrolls sideways"
            )
