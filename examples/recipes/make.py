"""Rows for the recipes, in the folder of the recipes or in another one.

.venv/bin/python examples/recipes/make.py                          sums that the script makes up
.venv/bin/python examples/recipes/make.py --gsm8k PATH             PATH holds train.jsonl and test.jsonl of GSM8K

cold.jsonl        supervised   questions with worked solutions, thoughts and answer in tags
general.jsonl     supervised   short instructions that are no mathematics
steps.jsonl       reward_model  worked solutions in lines, some of them wrong from a line on, with labels
prompts.jsonl     reinforcement, with `answer`, `language` and `kind`
valid.jsonl       the same, other questions
cold_valid.jsonl  supervised, of the questions of valid.jsonl
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

TASK = "Think about the problem inside <think> </think>, then give only the number inside <answer> </answer>."
WORDS = "apple river stone cloud paper table garden window summer winter bread music silver orange".split()
LONGEST = 160  # characters of a question


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gsm8k", type=Path, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--to", type=Path, default=Path(__file__).parent)
    parser.add_argument("--rows", type=int, default=64, help="of each training file")
    args = parser.parse_args()
    if args.gsm8k is None:
        train, test = sums(random.Random(0)), sums(random.Random(1))
    else:
        train, test = gsm8k(args.gsm8k / "train.jsonl"), gsm8k(args.gsm8k / "test.jsonl")
    cold, prompts, valid = (
        list(islice(source, number))
        for source, number in ((train, args.rows), (train, args.rows), (test, max(10, args.rows // 4)))
    )
    write(args.to / "cold.jsonl", map(solved, cold))
    write(args.to / "steps.jsonl", labeled(cold, random.Random(3)))
    write(args.to / "general.jsonl", islice(instructions(random.Random(2)), args.rows))
    write(args.to / "prompts.jsonl", map(question, prompts))
    write(args.to / "valid.jsonl", map(question, valid))
    write(args.to / "cold_valid.jsonl", map(solved, valid))


def sums(random: random.Random) -> Iterator[tuple[str, str, str]]:
    """Question, thoughts and answer, without end and without repetition."""
    seen = set()
    while True:
        a, b = random.randint(2, 99), random.randint(2, 99)
        if (a, b) not in seen:
            seen.add((a, b))
            yield f"What is {a} + {b}?", f"{a} + {b} = {a + b}", str(a + b)


def gsm8k(file: Path) -> Iterator[tuple[str, str, str]]:
    """The short questions of the file, without the marks of its calculator."""
    for line in file.read_text().splitlines():
        row = json.loads(line)
        thoughts, _, answer = row["answer"].partition("####")
        if len(row["question"]) <= LONGEST:
            yield row["question"], re.sub(r"<<.*?>>", "", thoughts).strip(), answer.strip().replace(",", "")


def instructions(random: random.Random) -> Iterator[dict[str, Any]]:
    while True:
        word = random.choice(WORDS)
        asked, answer = random.choice(
            [
                (f"Write {word} in capitals.", word.upper()),
                (f"How many letters has the word {word}?", str(len(word))),
                (f"What is the first letter of {word}?", word[0]),
                (f"Say {word} twice.", f"{word} {word}"),
            ]
        )
        yield {
            "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}],
        }


def messages_of(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": TASK}, {"role": "user", "content": text}]


def solved(problem: tuple[str, str, str]) -> dict[str, Any]:
    text, thoughts, answer = problem
    content = f"<think>{thoughts}</think>\n<answer>{answer}</answer>"
    return {"messages": [*messages_of(text), {"role": "assistant", "content": content}]}


def labeled(problems: list[tuple[str, str, str]], random: random.Random) -> Iterator[dict[str, Any]]:
    """Each solution as it is, and with another last number in one line, which is wrong from there on."""
    for text, thoughts, answer in problems:
        lines = [*filter(str.strip, thoughts.splitlines()), f"The answer is {answer}."]
        wrong = random.randrange(len(lines))
        number = re.compile(r"\d+(?=\D*$)")
        changed = number.sub(lambda found: str(int(found[0]) + random.randint(1, 9)), lines[wrong])
        yield steps(text, lines, [1] * len(lines))
        if changed != lines[wrong]:
            labels = [int(place < wrong) for place in range(len(lines))]
            yield steps(text, [*lines[:wrong], changed, *lines[wrong + 1 :]], labels)


def steps(text: str, lines: list[str], labels: list[int]) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "\n".join(lines)}]
    return {"messages": messages, "step_labels": labels}


def question(problem: tuple[str, str, str]) -> dict[str, Any]:
    text, _, answer = problem
    return {"messages": messages_of(text), "answer": answer, "language": "en", "kind": "math"}


def write(file: Path, rows: Any) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


if __name__ == "__main__":
    main()
