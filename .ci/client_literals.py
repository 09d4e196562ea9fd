"""The strings that the client library's parameters may have, sdk/regraft/literals.py, from sdk/openapi.json.

`make docs` writes them. The command line offers them as choices, so the module imports nothing but typing.
"""

import json
from collections.abc import Mapping
from typing import Any

from schemas import ROOT, Document

GENERATED = ROOT / "sdk/regraft/literals.py"
HEAD = '''"""The strings that parameters of the server may have.

Written by .ci/client_literals.py from the OpenAPI document; do not edit.
"""

from typing import Literal

'''
ROLLOUTS = "/v1/regraft/jobs/{job_id}/rollouts"
# Name -> the parameter: "PATH PARAMETER" of a GET request, or "SCHEMA FIELD".
PARAMETERS = {
    "AdvantageScale": f"{ROLLOUTS}/what-if advantage_scale",
    "Change": "/v1/regraft/jobs/{job_id}/regrades/{regrade_id}/answers change",
    "FileMethod": "ProfileCreate method",
    "FinishReason": f"{ROLLOUTS} finish_reason",
    "Format": f"{ROLLOUTS}/download format",
    "Method": "Method type",
    "Order": f"{ROLLOUTS} order",
    "Outcome": f"{ROLLOUTS}/prompts outcome",
    "Projects": "/v1/regraft/usage projects",
    "PromptSort": f"{ROLLOUTS}/prompts sort",
    "Sort": f"{ROLLOUTS} sort",
    "Split": f"{ROLLOUTS} split",
}


def generated(document: Document) -> str:
    lines = (
        f"{name} = Literal{json.dumps(values_of(document, parameter))}\n"
        for name, parameter in PARAMETERS.items()
    )
    return HEAD + "".join(lines)


def values_of(document: Document, parameter: str) -> list[str]:
    place, name = parameter.split()
    if not place.startswith("/"):
        return enum_of(document["components"]["schemas"][place]["properties"][name])
    [schema] = [
        below["schema"] for below in document["paths"][place]["get"]["parameters"] if below["name"] == name
    ]
    return enum_of(schema)


def enum_of(schema: Mapping[str, Any]) -> list[str]:
    [values] = [below["enum"] for below in (schema, *schema.get("anyOf", ())) if "enum" in below]
    return list(values)
