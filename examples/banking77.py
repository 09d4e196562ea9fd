"""Real customer questions of a bank, each to be given its topic: base against tuned on questions not trained on.

    .venv/bin/python examples/banking77.py --data PATH     PATH holds train.csv of the Banking77 data set

The grader gives half for the exact topic and half for similarity; exact-match accuracy is reported beside it.
"""

import argparse
import csv
import json
import random
import sys
import time
from pathlib import Path

import regraft
from openai import OpenAI
from service import local_service

# Topics whose names a question's own words suggest, so that a small model has something to go by.
TOPICS = [
    "lost or stolen card",
    "exchange rate",
    "change pin",
    "cancel transfer",
    "top up limits",
    "age limit",
]
TRAIN_PER_TOPIC, VALID_PER_TOPIC = 24, 8
GRADER = {
    "type": "multi",
    "name": "topic",
    "graders": {
        "exact": {
            "type": "string_check",
            "name": "exact",
            "input": "{{sample.output_text}}",
            "reference": "{{item.topic}}",
            "operation": "eq",
        },
        "close": {
            "type": "text_similarity",
            "name": "close",
            "input": "{{sample.output_text}}",
            "reference": "{{item.topic}}",
            "evaluation_metric": "fuzzy_match",
        },
    },
    "calculate_output": "0.5 * exact + 0.5 * close",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with train.csv")
    parser.add_argument("--data-dir", type=Path, default=Path(".regraft"), help="the service's own data")
    parser.add_argument("--topics", type=int, default=4, help="how many of the topics to use")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    start = time.monotonic()
    train, valid = rows(args.data / "train.csv", TOPICS[: args.topics])
    with local_service(args.data_dir.resolve()) as client:
        summary = run(client, train, valid, args.epochs)
    print(json.dumps(summary | {"seconds": round(time.monotonic() - start)}, indent=2))
    return 0


def rows(file: Path, topics: list[str]) -> tuple[list[bytes], list[bytes]]:
    """The same rows every time: the first ones of each topic in a shuffled order, some kept for validation."""
    questions: dict[str, list[str]] = {topic: [] for topic in topics}
    with file.open(newline="") as lines:
        for line in csv.DictReader(lines):
            topic = line["category"].replace("_", " ").rstrip("?")
            if topic in questions:
                questions[topic].append(line["text"].strip())
    train, valid = [], []
    for topic, texts in questions.items():
        random.Random(0).shuffle(texts)
        used = [row(text, topic, topics) for text in texts[: TRAIN_PER_TOPIC + VALID_PER_TOPIC]]
        train += used[VALID_PER_TOPIC:]
        valid += used[:VALID_PER_TOPIC]
    return train, valid


def row(question: str, topic: str, topics: list[str]) -> bytes:
    """The topics once as an example conversation: the model then knows the form, and has to learn the matching."""
    messages = [{"role": "developer", "content": f"Give the topic of each question: {', '.join(topics)}."}]
    for example in topics:
        messages += [{"role": "user", "content": f"I have a question about my {example}."}]
        messages += [{"role": "assistant", "content": example}]
    messages.append({"role": "user", "content": question})
    return json.dumps({"messages": messages, "topic": topic}).encode() + b"\n"


def run(client: OpenAI, train: list[bytes], valid: list[bytes], epochs: int) -> dict[str, object]:
    files = [
        client.files.create(file=(f"{name}.jsonl", b"".join(data)), purpose="fine-tune")
        for name, data in (("train", train), ("valid", valid))
    ]
    job = client.fine_tuning.jobs.create(
        model="SmolLM2-135M-Instruct",
        training_file=files[0].id,
        validation_file=files[1].id,
        suffix="banking77",
        seed=1,
        method={
            "type": "reinforcement",
            "reinforcement": {
                "grader": GRADER,
                "hyperparameters": {
                    "batch_size": 8,
                    "n_epochs": epochs,
                    "eval_interval": 6,
                    "advanced": {"sampling": {"group_size": 8, "max_completion_tokens": 8}},
                },
            },
        },
    )
    job = regraft.show(client, job.id)
    if job.status != "succeeded":
        sys.exit(f"The job {job.status}: {job.error}")
    best = max(
        client.fine_tuning.jobs.checkpoints.list(job.id), key=lambda one: one.metrics.full_valid_mean_reward
    )
    figures: dict[str, object] = {"model": job.fine_tuned_model, "best_step": best.step_number}
    for name, step in (("base", 0), ("tuned", best.step_number)):
        answers = regraft.rollouts(client, job.id, step=step, split="valid")
        figures[f"{name}_reward"] = sum(a["score"] for a in answers) / len(answers)
        figures[f"{name}_exact"] = sum(a["sub_scores"]["exact"] for a in answers) / len(answers)
    return figures


if __name__ == "__main__":
    sys.exit(main())
