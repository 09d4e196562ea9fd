"""Build the documentation site into the wheel, where the API finds it (`Settings.docs_site`)."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Below sys.prefix once the wheel is installed.
INSTALLED = "share/regraft/docs"


class DocumentationSite(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the site. An editable install and an image of a worker, which has no docs/, are without it."""
        root = Path(self.root)
        if version == "editable" or not (root / "docs").is_dir():
            return
        zensical = Path(sys.executable).with_name("zensical")
        subprocess.run([zensical, "build", "--strict", "--clean"], cwd=root, check=True)
        build_data["shared_data"][str(root / "site")] = INSTALLED
