"""School mathematics, two jobs one after the other: a python grader, and a multi of mathematics and format.

    .venv/bin/python examples/gsm8k.py --data PATH     PATH holds train.jsonl and test.jsonl of GSM8K

A model of 135 M parameters solves almost none of these, so in minutes it learns only the requested format; the
mathematics needs larger models. Correctness is reported separately from the reward to show this.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import regraft
from openai import OpenAI
from service import local_service

MODEL = "SmolLM2-135M-Instruct"
TRAIN, VALID, LONGEST = 64, 24, 160  # rows, rows, characters of a question
INSTRUCTIONS = (
    "Think about the problem inside <think> </think>, then give only the number inside <answer> </answer>."
)
SHOWN = [
    {"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples has he?"},
    {"role": "assistant", "content": "<think>3 + 4 = 7</think>\n<answer>7</answer>"},
]
PYTHON = {
    "type": "python",
    "name": "tagged_number",
    "source": '''
import re

def grade(sample, item):
    """0.2 for a number in the tags, the rest if it is the right one."""
    found = re.findall(r"<answer>\\s*(-?[\\d,.]+)\\s*</answer>", sample["output_text"])
    if not found:
        return 0.0
    try:
        return 1.0 if float(found[-1].replace(",", "")) == float(item["answer"]) else 0.2
    except ValueError:
        return 0.0
''',
}
MULTI = {
    "type": "multi",
    "name": "math_and_format",
    "graders": {
        "correct": {
            "type": "math",
            "name": "correct",
            "input": "{{sample.output_text}}",
            "reference": "{{item.answer}}",
        },
        "form": {
            "type": "format",
            "name": "form",
            "input": "{{sample.output_text}}",
            "template": "think_answer",
            "credit": "partial",
        },
    },
    "calculate_output": "0.8 * correct + 0.2 * form",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--data-dir", type=Path, default=Path(".regraft"), help="the service's own data")
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()
    files = {
        "train": rows(args.data / "train.jsonl", TRAIN),
        "valid": rows(args.data / "test.jsonl", VALID),
    }
    with local_service(args.data_dir.resolve()) as client:
        ids = {
            name: client.files.create(file=(f"{name}.jsonl", data), purpose="fine-tune").id
            for name, data in files.items()
        }
        summary = {grader["type"]: run(client, ids, grader, args.epochs) for grader in (PYTHON, MULTI)}
    print(json.dumps(summary, indent=2))
    return 0


def rows(file: Path, count: int) -> bytes:
    """The first short questions of the file, as a dataset."""
    made: list[str] = []
    with file.open() as lines:
        for line in lines:
            problem = json.loads(line)
            if len(problem["question"]) > LONGEST:
                continue
            messages = [{"role": "developer", "content": INSTRUCTIONS}, *SHOWN]
            messages.append({"role": "user", "content": problem["question"]})
            answer = problem["answer"].rsplit("####", 1)[1].strip().replace(",", "")
            made.append(json.dumps({"messages": messages, "answer": answer}) + "\n")
            if len(made) == count:
                break
    return "".join(made).encode()


def run(client: OpenAI, files: dict[str, str], grader: dict[str, Any], epochs: int) -> dict[str, object]:
    start = time.monotonic()
    job = client.fine_tuning.jobs.create(
        model=MODEL,
        training_file=files["train"],
        validation_file=files["valid"],
        suffix="gsm8k",
        seed=1,
        method={
            "type": "reinforcement",
            "reinforcement": {
                "grader": grader,  # type: ignore[typeddict-item]
                "hyperparameters": {
                    "batch_size": 8,
                    "n_epochs": epochs,
                    "eval_interval": 4,
                    "advanced": {"sampling": {"group_size": 8, "max_completion_tokens": 64}},
                },
            },
        },
    )
    job = regraft.show(client, job.id)
    if job.status != "succeeded":
        sys.exit(f"The job {job.status}: {job.error}")
    steps = {step["step"]: step for step in regraft.metrics(client, job.id)}
    best = max(
        client.fine_tuning.jobs.checkpoints.list(job.id), key=lambda one: one.metrics.full_valid_mean_reward
    )
    errors = [
        sum(row[name] for name in row if name.startswith("train") and name.endswith("_count"))
        for step in steps.values()
        for row in step["errors"]["graders"]
    ]
    return {
        "base_reward": steps[0]["full_valid_mean_reward"],
        "tuned_reward": steps[best.step_number]["full_valid_mean_reward"],
        "base_correct": correct(client, job.id, 0),
        "tuned_correct": correct(client, job.id, best.step_number),
        "grader_errors": sum(errors),
        "seconds": round(time.monotonic() - start),
    }


def correct(client: OpenAI, job_id: str, step: int) -> float:
    """Share of the validation answers that both graders would call right."""
    answers = regraft.rollouts(client, job_id, step=step, split="valid")
    return sum(a["sub_scores"].get("correct", a["score"]) == 1.0 for a in answers) / len(answers)


if __name__ == "__main__":
    sys.exit(main())
