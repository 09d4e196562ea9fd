"""How the examples of docs/ are run: commands as a shell would, and a library's examples one after the other."""

import ast
import asyncio
import importlib.util
import inspect
import io
import json
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

import pytest
from regraft.cli import main

from tests.e2e.conftest import ROOT, jsonl
from tests.e2e.test_openai_client import GRADER, TRAIN, VALID
from tests.present import present

DOCS = ROOT / "docs"
# The command line, and what it does with the job of another service.
CLI = "".join((DOCS / f"howto/{name}.md").read_text() for name in ("cli", "migrating"))
# What a real model would not need: answers of three tokens, and steps that are large enough for so few of them.
QUICKLY = """max_completion_tokens = 3

[hyperparameters.advanced.optimizer]
learning_rate = 0.02
step_kl = 0

[hyperparameters.advanced.lora]
rank = 8
"""
OPENAIS = {
    "model": "o4-mini-2025-04-16",
    "training_file": "file-BK7bz",
    "validation_file": "file-Cc9dz",
    "method": {
        "type": "reinforcement",
        "reinforcement": {
            "grader": {
                "type": "python",
                "name": "py",
                "source": "def grade(sample, item):\n    return 1.0\n",
            },
            "hyperparameters": {
                "reasoning_effort": "medium",
                "n_epochs": 2,
                "batch_size": 4,
                "learning_rate_multiplier": 1.0,
                "compute_multiplier": 1.0,
                "eval_interval": 1,
                "eval_samples": 1,
            },
        },
    },
}
BROKEN = """def grade(sample, item):
    print("comparing with", item["answer"])
    return float(sample["output_text"] == item["nope"])
"""
CASES = [("yes", 1), ("no", 0), ("yess", 1)]
BAD: Any = [
    {"messages": [{"role": "user", "content": "hi"}]},
    {"messages": [{"role": "assistant", "content": "hi"}], "answer": "yes"},
]
ID = re.compile(r"\b(?:ftjob-|file-|ftckpt_)\w{20,}|\bft:tiny:[\w:.-]+")


def lay_out(folder: Path) -> None:
    """The files that the documents are about."""
    (folder / "train.jsonl").write_bytes(jsonl(TRAIN))
    (folder / "valid.jsonl").write_bytes(jsonl(VALID))
    (folder / "bad.jsonl").write_bytes(jsonl(BAD))
    cases = [{"sample": said, "answer": "yes", "expect": expect} for said, expect in CASES]
    (folder / "cases.jsonl").write_bytes(jsonl(cases))
    (folder / "questions.csv").write_text("question,label\nIs water wet?,yes\nIs fire cold?,no\n")
    (folder / "grader.json").write_text(json.dumps(GRADER))
    (folder / "broken.py").write_text(BROKEN)
    (folder / "openai.json").write_text(json.dumps(OPENAIS))
    (folder / "job.toml").write_text(present(re.search(r"```toml\n(.*?)```", CLI, flags=re.S))[1] + QUICKLY)


def shown_commands() -> Iterator[tuple[str, list[str]]]:
    """Each command of the pages, and the lines below it."""
    for block in re.findall(r"```console\n(.*?)```", CLI, flags=re.S):
        for one in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, *lines = one.splitlines()
            yield command, lines


class Terminal(io.TextIOWrapper):
    """One that remembers what was written."""

    def __init__(self, typed: str = "") -> None:
        self.memory = io.BytesIO(typed.encode())
        super().__init__(self.memory, encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        """What is left to be seen."""
        written = self.memory.getvalue().decode()
        return [line.split("\r\x1b[K")[-1] for line in written.removesuffix("\n").split("\n")]


def entered(command: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    """What a shell does with it: the exit code, and what is then on the screen. Questions are answered with no."""
    words, screen = shlex.split(command), Terminal()
    stdin: TextIO = Terminal("n\n")
    out: TextIO = screen
    if words[-2] in "<>":
        *words, direction, name = words
        path = Path(name).expanduser()
        if direction == "<":
            stdin = path.open()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            out = path.open("w")
    monkeypatch.setattr("sys.stdin", stdin)
    with redirect_stdout(out), redirect_stderr(screen):
        try:
            code = main(words[1:])
        except SystemExit as ended:  # while it read its words, as for `completion`
            assert isinstance(ended.code, int)
            code = ended.code
    if out is not screen:
        out.close()
    return code, screen.lines


def alike(line: str, desk: Path) -> str:
    """Without what is different each time."""
    line = ID.sub(lambda found: found[0][:4], line.replace(str(desk), "~"))
    line = re.sub(r"[▁-█░]+", "▅", line)
    line = re.sub(
        r"\b(\d+ h )?\d+ min( \d+ s)?\b", "0 s", line
    )  # a busy machine takes minutes for what took seconds
    # What a model says, and which checkpoint is the best.
    line = re.sub(r" (length|stop) .*|  best  ", r" \1 ", line)
    return re.sub(r"\s+", " ", re.sub(r"\d+(?:\.\d+)?", "0", line)).strip()


def run_examples(path: Path, names: dict[str, object]) -> int:
    """Run the document's Python, where `await` may stand as in a notebook; returns how many blocks there were."""
    text, ran = path.read_text(), 0
    for found in re.finditer(r"```python\n(.*?)```", text, flags=re.S):
        if "pandas" in found[1] and importlib.util.find_spec("pandas") is None:
            continue
        lines = "\n" * text[: found.start(1)].count("\n")  # so that a traceback names the document's line
        code = compile(lines + found[1], str(path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(eval(code, names))
        else:
            exec(code, names)
        ran += 1
    return ran
