"""The table of model families in docs/reference/model-families.md, from what the checks at load say.

`python -m tests.families.table` writes it.
"""

import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.families.conftest import Loaded, loaded
from tests.families.vllm import RUN
from tests.families.zoo import FAMILIES, Family

PAGE = Path(__file__).parents[2] / "docs/reference/model-families.md"
BEGIN, END = "<!-- families: written by tests/families/table.py -->", "<!-- end of families -->"
# What a refusal says, and how the table says it.
REASONS: Mapping[str, str] = {
    "logits are not the output of its head": "layers between its decoder and its head",
    "PEFT loses": "PEFT does not load its adapter whole",
    "no plain linear": "no linear layers of PyTorch",
}


def short_reason(refusal: str) -> str:
    return next((short for pattern, short in REASONS.items() if re.search(pattern, refusal)), refusal)


def table(result: Callable[[Family], Loaded]) -> str:
    """The rows: how each family is computed, or why it is refused."""
    lines = [
        "| family | `model_type` | training | transformers sampler | vLLM on a CPU |",
        "|---|---|---|---|---|",
    ]
    for family in sorted(FAMILIES, key=lambda one: one.title.lower()):
        found = result(family)
        if found.verdict is None:
            columns = f"refused: {short_reason(found.refusal)} | "
        else:
            columns = f"{found.verdict.route.forward} | {found.verdict.route.decode}"
        lines.append(f"| {family.title} | `{family.model_type}` | {columns} | {RUN.get(family.title, '')} |")
    return "\n".join(lines)


def in_docs() -> str:
    text = PAGE.read_text()
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:

        def result(family: Family) -> Loaded:
            return loaded(family.save(Path(scratch) / re.sub(r"\W", "_", family.title)))

        measured = table(result)
    text = PAGE.read_text()
    head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(f"{head}\n{measured}\n{tail}")


if __name__ == "__main__":
    main()
