"""The pages on how to add something are true: followed in a copy of the repository, they make what they say work.

At night each page is followed alone, too, and each of its blocks is left out once, after which its commands must fail:
it names no file in vain.
"""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs/contribute"
PYTHON = ".venv/bin/python"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Step:
    """A block with the name of a file: the whole file, or with the language `diff` a change of it."""

    language: str
    path: str
    text: str

    def follow(self, folder: Path) -> None:
        file = folder / self.path
        if self.language == "diff":
            file.write_text(changed(file.read_text(), self.text))
        else:
            assert not file.exists(), f"{self.path} is there already: the page must show a change of it"
            file.write_text(self.text)


def changed(text: str, diff: str) -> str:
    """Apply a diff without line numbers: the old lines of each of its places must be there once, and only once."""
    for place in re.split(r"^@@\n", diff, flags=re.M):
        lines = place.splitlines(keepends=True)
        assert all(line[0] in " +-\n" for line in lines), place
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert f"\n{text}".count(f"\n{old}") == 1, f"not one place, but {text.count(old)}:\n{old}"
        text = f"\n{text}".replace(f"\n{old}", f"\n{new}")[1:]
    return text


def steps_of(page: str) -> list[Step]:
    blocks = re.findall(r'^```(\w+) title="(.+?)"\n(.*?)^```$', (PAGES / page).read_text(), flags=re.M | re.S)
    return [Step(*block) for block in blocks]


def commands_of(page: str) -> list[list[str]]:
    [block] = re.findall(r"^```sh\n(.*?)^```$", (PAGES / page).read_text(), flags=re.M | re.S)
    return [shlex.split(line) for line in block.replace("\\\n", "").splitlines()]


ALL = sorted(path.name for path in PAGES.glob("*.md") if path.name not in ("index.md", "testing.md"))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the repository has, as it is now: also what is new and not committed, nothing that is ignored but bytecode.

    Without the bytecode each process of each page would compile all that it imports.
    """
    folder = tmp_path_factory.mktemp("original")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists() and not name.startswith(("console/", "bench/results/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    for copied in [path for path in folder.rglob("*") if path.is_dir()]:
        cache = copied.relative_to(folder) / "__pycache__"
        if (ROOT / cache).is_dir():
            shutil.copytree(ROOT / cache, folder / cache)
    return folder


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy", symlinks=True))


def run(folder: Path, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    words = [sys.executable if word == PYTHON else word for word in command]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True)


def python_files(steps: Sequence[Step]) -> list[str]:
    return [step.path for step in steps if step.path.endswith(".py")]


def assert_works(folder: Path, steps: Sequence[Step], commands: Sequence[Sequence[str]]) -> None:
    for step in steps:
        step.follow(folder)
    files = python_files(steps)
    for command in (
        [PYTHON, "-m", "ruff", "format", "--check", *files],
        [PYTHON, "-m", "ruff", "check", *files],
        [PYTHON, ".ci/english.py", *files],
        *commands,
    ):
        done = run(folder, command)
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-4000:]}{done.stderr[-2000:]}"


def together(commands: Sequence[Sequence[str]]) -> list[str]:
    """One run of pytest for those of several pages, each `python -m pytest FILES -k TESTS`."""
    files: list[str] = []
    tests: list[str] = []
    for command in commands:
        *start, option, expression = command
        assert (start[:3], option) == ([PYTHON, "-m", "pytest"], "-k"), command
        files += [file for file in start[3:] if file not in files]
        tests.append(f"({expression})")
    return [PYTHON, "-m", "pytest", *files, "-k", " or ".join(tests)]


def test_what_the_pages_add_works_and_is_written_as_the_rest(copy: Path) -> None:
    """All in one copy, because each run of pytest imports torch and transformers."""
    steps = [step for page in ALL for step in steps_of(page)]

    assert_works(copy, steps, [together([command for page in ALL for command in commands_of(page)])])


@pytest.mark.thorough
@pytest.mark.parametrize("page", ALL)
def test_what_a_page_adds_works_without_the_other_pages(copy: Path, page: str) -> None:
    assert_works(copy, steps_of(page), commands_of(page))


LEFT_OUT = [(page, number) for page in ALL for number in range(len(steps_of(page)))]


@pytest.mark.parametrize(
    ("page", "number"), LEFT_OUT, ids=[f"{page}-{steps_of(page)[number].path}" for page, number in LEFT_OUT]
)
@pytest.mark.thorough
def test_a_page_names_no_file_that_is_not_needed(copy: Path, page: str, number: int) -> None:
    steps = steps_of(page)
    for step in [*steps[:number], *steps[number + 1 :]]:
        step.follow(copy)

    assert any(run(copy, command).returncode != 0 for command in commands_of(page))


def test_a_change_is_made_where_its_lines_are() -> None:
    assert changed("a\nb\nc\n", " a\n-b\n+B\n@@\n c\n+d\n") == "a\nB\nc\nd\n"


@pytest.mark.parametrize("diff", [" x\n+y\n", " a\n+y\n"], ids=["missing", "twice"])
def test_a_change_of_lines_that_are_missing_or_there_twice_is_refused(diff: str) -> None:
    with pytest.raises(AssertionError, match="not one place"):
        changed("a\nb\na\n", diff)
