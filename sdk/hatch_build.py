"""Makes the source distribution self-contained.

`regraft/_rules` holds links to files of the server, so that client and server apply one set of rules without a copy in
the repository; to share another file, add a link. A source distribution must not have links that leave it, so each
becomes the file that it points to, and the repository's license is added. Wheels and editable installs read through
the links.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LinkedFiles(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        links = [path for path in (root / "regraft").rglob("*") if path.is_symlink()]
        sources = {path.resolve(strict=True): path.relative_to(root) for path in links}
        if not (root / "LICENSE").exists():  # it does in an unpacked source distribution
            sources[root.parent / "LICENSE"] = Path("LICENSE")
        build_data["force_include"] |= {str(source): str(target) for source, target in sources.items()}
