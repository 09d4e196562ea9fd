"""The table of model families in docs/reference/model-families.md, from what the checks at load say.

`python -m tests.families.table` writes it.
"""

import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.families.conftest import Loaded, loaded
from tests.families.zoo import FAMILIES, SHORT, Family

PAGE = Path(__file__).parents[2] / "docs/reference/model-families.md"
BEGIN, END = "<!-- families: written by tests/families/table.py -->", "<!-- end of families -->"
# What a refusal says, and how the table says it.
REASONS: Mapping[str, str] = {
    "attend to a window": "attention windows shorter than the context",
    "would change each other": "recurrent, state-space or convolution layers",
    "softcapping|soft-capped": "soft-capped logits",
    "logits_scaling|logit_scale": "scaled logits",
    "latent attention": "latent attention (MLA)",
    "sampling with a cache differ": "its layers do not pass the cache on to attention",
    "not at the attributes of current": "the layout of its classes",
    "PEFT loses": "PEFT does not load its adapter whole",
    "cannot be loaded|PEFT|no plain linear": "its layers take no other attention function, or no adapter",
    "sinks": "attention sinks",
}


def short_reason(refusal: str) -> str:
    return next((short for pattern, short in REASONS.items() if re.search(pattern, refusal)), refusal)


def table(result: Callable[[Family], Loaded]) -> str:
    """The rows: who is supported, who is on short sequences, and who is refused and why."""
    lines = ["| family | `model_type` | supported | refused because of |", "|---|---|---|---|"]
    for family in sorted(FAMILIES, key=lambda one: one.title.lower()):
        found = result(family)
        verdict, reason = "yes", ""
        if found.policy is None:
            verdict, reason = "no", short_reason(found.refusal)
            if (short := SHORT.get(family)) is not None:
                within = result(short)
                if within.policy is not None:
                    verdict = "with `context` up to its window"
                else:
                    reason = f"{reason}; {short_reason(within.refusal)}"
        lines.append(f"| {family.title} | `{family.model_type}` | {verdict} | {reason} |")
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
