"""Questions of a bank's customers and their topics, learned by a supervised job: exact match before and after.

    .venv/bin/python examples/banking77_supervised.py --data PATH     PATH holds train.csv of the Banking77 data set

The held-out questions are in no training row. Both models answer greedily.
"""

import argparse
import csv
import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import regraft
from openai import OpenAI
from service import local_service

MODEL = "SmolLM2-135M-Instruct"
HELD_OUT_PER_TOPIC = 2
TASK = "Answer with the topic of the question, in a few words and without a sentence."


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with train.csv")
    parser.add_argument("--data-dir", type=Path, default=Path(".regraft"), help="the service's own data")
    parser.add_argument("--rows-per-topic", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    start = time.monotonic()
    train, held_out = split(args.data / "train.csv", args.rows_per_topic)
    with local_service(args.data_dir.resolve()) as client:
        figures = run(client, train, held_out, args.epochs)
    print(json.dumps(figures | {"seconds": round(time.monotonic() - start)}, indent=2))
    return 0


Question = tuple[str, str]  # and its topic


def split(file: Path, rows_per_topic: int) -> tuple[list[Question], list[Question]]:
    """The same rows every time: the first ones of each topic in a shuffled order, some held out."""
    questions: dict[str, list[str]] = {}
    with file.open(newline="") as lines:
        for line in csv.DictReader(lines):
            topic = line["category"].replace("_", " ").rstrip("?").lower()
            questions.setdefault(topic, []).append(line["text"].strip())
    train, held_out = [], []
    for topic, texts in questions.items():
        random.Random(0).shuffle(texts)
        held_out += [(text, topic) for text in texts[:HELD_OUT_PER_TOPIC]]
        train += [(text, topic) for text in texts[HELD_OUT_PER_TOPIC:][:rows_per_topic]]
    return train, held_out


def messages_of(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": TASK}, {"role": "user", "content": question}]


def as_rows(questions: list[Question]) -> bytes:
    rows = [
        {"messages": [*messages_of(question), {"role": "assistant", "content": topic}]}
        for question, topic in questions
    ]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def run(client: OpenAI, train: list[Question], held_out: list[Question], epochs: int) -> dict[str, object]:
    files = [
        client.files.create(file=(f"{name}.jsonl", as_rows(rows)), purpose="fine-tune")
        for name, rows in (("train", train), ("valid", held_out))
    ]
    job = client.fine_tuning.jobs.create(
        model=MODEL,
        training_file=files[0].id,
        validation_file=files[1].id,
        suffix="banking77",
        seed=1,
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": epochs}}},
    )
    job = regraft.show(client, job.id)
    if job.status != "succeeded":
        sys.exit(f"The job {job.status}: {job.error}")
    assert job.fine_tuned_model is not None
    return {
        "model": job.fine_tuned_model,
        "rows": len(train),
        "held_out": len(held_out),
        "base_exact": exact(client, MODEL, held_out),
        "tuned_exact": exact(client, job.fine_tuned_model, held_out),
    }


def exact(client: OpenAI, model: str, questions: list[Question]) -> float:
    def is_right(question: Question) -> bool:
        answer = client.chat.completions.create(
            model=model,
            messages=messages_of(question[0]),  # type: ignore[arg-type]
            temperature=0,
            max_completion_tokens=16,
        )
        return (answer.choices[0].message.content or "").strip().lower() == question[1]

    with ThreadPoolExecutor(8) as pool:
        return sum(pool.map(is_right, questions)) / len(questions)


if __name__ == "__main__":
    sys.exit(main())
