"""make demo: from a dataset to a better adapter, on this machine, through OpenAI's own client.

Starts the service on its embedded default (SQLite, a folder, no broker), trains SmolLM2-135M-Instruct to send
a library's visitors to the right desk, shows what it learned on questions it was not trained on, and asks it one more.
With --url it uses a service that is running elsewhere, with the key in REGRAFT_API_KEY.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import regraft
from openai import OpenAI
from service import local_service

DATA = Path(__file__).parent / "support_desk"
GRADER = {
    "type": "multi",
    "name": "desk",
    "graders": {
        "exact": {
            "type": "string_check",
            "name": "exact",
            "input": "{{sample.output_text}}",
            "reference": "{{item.desk}}",
            "operation": "eq",
        },
        # Partial credit: exact match alone is all zeros at first, and a zero-variance group has no gradient.
        "close": {
            "type": "text_similarity",
            "name": "close",
            "input": "{{sample.output_text}}",
            "reference": "{{item.desk}}",
            "evaluation_metric": "fuzzy_match",
        },
    },
    "calculate_output": "0.5 * exact + 0.5 * close",
}
HYPERPARAMETERS = {
    "batch_size": 8,
    "n_epochs": 4,
    "eval_interval": 6,
    "advanced": {"sampling": {"group_size": 8, "max_completion_tokens": 8}},
}
ONE_MORE = "Somebody else needs the book that I have had for too long. What do I owe?"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=Path(".regraft"))
    parser.add_argument("--url", help="address of a running service, such as http://127.0.0.1:8000/v1")
    args = parser.parse_args()
    start = time.monotonic()
    folder = args.data_dir.resolve()
    if args.url:
        # Its inference server may still be loading the model.
        client = OpenAI(base_url=args.url, api_key=os.environ["REGRAFT_API_KEY"], max_retries=10)
        return train_and_show(client, folder, start)
    with local_service(folder) as client:
        status = train_and_show(client, folder, start)
        if sys.stdin.isatty() and sys.stdout.isatty():
            console = str(client.base_url).removesuffix("v1/")
            input(
                f"\nThe console is at {console} until you press Enter. The key is in {folder / 'api_key'}\n"
            )
        else:
            print(f"Console REGRAFT_DATA_DIR={folder} {Path(sys.executable).parent / 'regraft-server'} up")
    return status


def count(split: str) -> int:
    return len((DATA / f"{split}.jsonl").read_text().splitlines())


def train_and_show(client: OpenAI, folder: Path, start: float) -> int:
    train, valid = (
        client.files.create(file=DATA / f"{name}.jsonl", purpose="fine-tune") for name in ("train", "valid")
    )
    job = client.fine_tuning.jobs.create(
        model="SmolLM2-135M-Instruct",
        training_file=train.id,
        validation_file=valid.id,
        suffix="desk",
        seed=1,
        method={
            "type": "reinforcement",
            "reinforcement": {"grader": GRADER, "hyperparameters": HYPERPARAMETERS},
        },
    )
    print(
        f"Job {job.id}: {job.model}, {count('train')} questions to learn from, {count('valid')} to be tested on\n"
    )
    job = regraft.show(client, job.id)
    if job.status != "succeeded":
        print(f"The job {job.status}: {job.error}", file=sys.stderr)
        return 1

    best = max(
        client.fine_tuning.jobs.checkpoints.list(job.id), key=lambda one: one.metrics.full_valid_mean_reward
    )
    before = regraft.rollouts(client, job.id, step=0, split="valid")
    after = regraft.rollouts(client, job.id, step=best.step_number, split="valid")
    base_reward, tuned_reward = (
        sum(a["score"] for a in answers) / len(answers) for answers in (before, after)
    )

    print("\nQuestions it was not trained on\n")
    for old, new in list(zip(before, after, strict=True))[:: len(before) // 5][:5]:
        question = old["messages"][-1]["content"]
        print(f"  {question}")
        for when, answer in (("before", old), ("after ", new)):
            print(f"    {when}  {answer['score']:.2f}  {answer['output_text']!r}")

    print(f"\nOne more, through /v1/chat/completions\n\n  {ONE_MORE}")
    messages = [*before[0]["messages"][:-1], {"role": "user", "content": ONE_MORE}]
    for when, model in (("before", job.model), ("after ", job.fine_tuned_model)):
        said = client.chat.completions.create(
            model=model, messages=messages, temperature=0, max_completion_tokens=8
        )
        print(f"    {when}  {said.choices[0].message.content!r}")

    summary = {
        "base_reward": base_reward,
        "tuned_reward": tuned_reward,
        "seconds": time.monotonic() - start,
        "adapter": best.adapter,  # type: ignore[attr-defined]
        "model": job.fine_tuned_model,
    }
    (folder / "demo.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(
        f"\nReward  {base_reward:.2f} -> {tuned_reward:.2f} (step {best.step_number} is the best checkpoint)"
    )
    print(f"Model   {job.fine_tuned_model}\nAdapter {best.adapter}\nTime    {summary['seconds']:.0f} s")  # type: ignore[attr-defined]
    return 0


if __name__ == "__main__":
    sys.exit(main())
