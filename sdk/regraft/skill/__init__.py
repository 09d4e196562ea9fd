"""The skill for coding agents: SKILL.md, from rows to a promoted model (`regraft skill install`)."""

from pathlib import Path

SKILL = Path(__file__).with_name("SKILL.md")


def install(folder: Path) -> Path:
    """Write the skill into a folder of skills, in place of an earlier version."""
    path = folder / "regraft" / SKILL.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(SKILL.read_bytes())
    return path
