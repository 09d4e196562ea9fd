"""The documentation site builds, names every page in its navigation, and loads nothing from another host."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LOADED = re.compile(r"""(?:\bsrc=|<link[^>]*\bhref=|url\(|@import\s)\s*["']?((?:https?:)?//[^"')\s>]+)""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages, from a copy: what is in the checkout's site/ may be older."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(DOCS, folder / "docs")
    shutil.copy(ROOT / "zensical.toml", folder)
    command: list[str | Path] = [sys.executable, ROOT / "hatch_build.py", "site"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def pages_of(nav: Any) -> Iterator[Any]:
    for entry in nav:
        for target in entry.values():
            yield from [target] if isinstance(target, str) else pages_of(target)


def test_the_navigation_names_every_page() -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]

    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    decisions = {page for page in pages if re.match(r"adr/\d", page)}  # adr/index.md lists them
    assert sorted(pages_of(nav)) == sorted(pages - decisions)


def test_the_index_links_to_every_page_of_the_navigation() -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    linked = re.findall(r"\]\(([\w/-]+\.md)", (DOCS / "index.md").read_text())

    assert [page for page in pages_of(nav) if page not in {"index.md", *linked}] == []


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    texts = {path: path.read_text() for path in [*site.rglob("*.html"), *site.rglob("*.css")]}

    assert len(texts) > len(list(DOCS.rglob("*.md")))
    assert {str(path): found for path, text in texts.items() if (found := LOADED.findall(text))} == {}


def test_search_needs_no_server(site: Path) -> None:
    """The index is a file beside the pages, with all of them in it."""
    index = (site / "search.json").read_text()

    for page in DOCS.rglob("*.md"):
        assert f'"{page.relative_to(DOCS).with_suffix(".html")}' in index, page


def test_links_into_a_page_lead_to_one_of_its_headings(site: Path) -> None:
    """The strict build checks that a page exists, this its anchors."""
    wrong = []
    for page in site.rglob("*.html"):
        for target, anchor in re.findall(r'href="([^":#]*)#([^"]+)"', page.read_text()):
            there = (page.parent / target) if target else page
            if there.suffix == ".html" and f'id="{anchor}"' not in there.read_text():
                wrong.append(f"{page.relative_to(site)}: {target}#{anchor}")
    assert wrong == []


LINK_OF_THE_SERVICE = re.compile(r"""(?:["'`]|%s)/docs/([^"'`\s#]*)(?:#([\w-]+))?""")


def test_links_of_the_console_and_of_alerts_lead_to_a_page_and_its_heading(site: Path) -> None:
    """Under /docs, where the API serves the site."""
    files = [
        *(ROOT / "console/src").rglob("*.svelte"),
        *(ROOT / "console/src").rglob("*.ts"),
        *(ROOT / "helm/regraft/templates").rglob("*.yaml"),
    ]
    links = [link for file in files for link in LINK_OF_THE_SERVICE.findall(file.read_text())]

    assert {"howto/observability.html", "howto/datasets.html"} <= {page for page, _ in links}
    for page, anchor in links:
        there = site / (page or "index.html")
        assert there.is_file(), page
        assert f'id="{anchor}"' in there.read_text() or not anchor, f"{page}#{anchor}"


def test_llms_txt_lists_every_page_of_the_navigation_with_its_markdown_and_a_sentence(site: Path) -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    index = (site / "llms.txt").read_text()
    listed = re.findall(r"^- \[.+?\]\((.+?)\): (.+)$", index, flags=re.M)

    assert [page for page, _ in listed] == list(pages_of(nav))
    assert all((site / page).read_text() == (DOCS / page).read_text() for page, _ in listed)
    assert [said for _, said in listed if len(said) < 20 or said[-1] not in ".:"] == []
    assert "- [Kubernetes in production](howto/kubernetes-production.md): " in index
    assert "(measured/h200.md): Times, memory and numerical differences" in index
    assert re.findall(r"^## (.+)$", index, flags=re.M) == [title for entry in nav for title in entry][1:]


def test_llms_full_txt_has_the_text_of_every_page(site: Path) -> None:
    text = (site / "llms-full.txt").read_text()
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]

    assert re.findall(r"^<!-- (.+) -->$", text, flags=re.M) == list(pages_of(nav))
    assert (DOCS / "howto/datasets.md").read_text() in text
