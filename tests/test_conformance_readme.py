"""The table of tests/conformance/README.md is true."""

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent / "conformance"
README = (FOLDER / "README.md").read_text()


def scripts(file: Path) -> int:
    functions = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    return sum(function.name.startswith("test_") for function in functions)


def test_every_flow_has_its_row_with_its_count() -> None:
    rows = re.findall(r"`(test_\w+\.py)` \|[^|]*\| (\d+) \|", README)

    assert {file: int(count) for file, count in rows} == {
        file.name: scripts(file) for file in FOLDER.glob("test_*.py")
    }


def test_the_total_is_the_sum_of_the_rows() -> None:
    found = [scripts(file) for file in FOLDER.glob("test_*.py")]

    assert f"{len(found)} flows, {sum(found)} scripts:" in README
