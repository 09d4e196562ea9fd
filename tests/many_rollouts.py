"""Pages with many stored samples, as workers write them."""

import json
import random
from collections.abc import Iterator
from typing import Any

from core.database.tables import RolloutPage
from core.results import rollouts
from core.results.rollouts import SCHEMA, Row
from core.storage.store import BlobStore

GROUP_SIZE = 8
LINES = 2000
# One sample, in the middle, has a text that no other has.
NEEDLE = "Haystack Needle"
_WORDS = tuple(
    "".join(pair) for pair in zip("abcdefghijklmnopqrstuvwxyz" * 40, "zyxwvutsrqponm" * 75, strict=False)
)


def pages(
    blobs: BlobStore, job_id: str, *, steps: int, groups: int, validations: bool = False
) -> Iterator[RolloutPage]:
    """Store `groups` groups of GROUP_SIZE samples for each step, and yield the pages for the database.

    With `validations` every step is a validation of the same `groups` lines.
    """
    split = "valid" if validations else "train"
    drawn = random.Random(f"{steps} {groups} {split}")
    for step in range(1, steps + 1):
        rows = list(_rows(drawn, step, split, groups, has_needle=step == (steps + 1) // 2))
        key = f"many/{job_id}/{split}-{step:06d}.parquet"
        size = blobs.put_bytes(key, rollouts.encode(rows, len(rows))).size
        yield RolloutPage(
            job_id=job_id,
            step=step,
            split=split,
            epoch=1,
            blob_key=key,
            samples=len(rows),
            total=len(rows),
            bytes=size,
        )


def _rows(drawn: random.Random, step: int, split: str, groups: int, *, has_needle: bool) -> Iterator[Row]:
    for group in range(groups):
        line = group + 1 if split == "valid" else drawn.randint(1, LINES)
        question = json.dumps([{"role": "user", "content": _text(drawn, 40)}])
        scores = [drawn.random() for _ in range(GROUP_SIZE)]
        mean = sum(scores) / GROUP_SIZE
        for member, score in enumerate(scores):
            is_needle = has_needle and (group, member) == (groups // 2, 0)
            known: dict[str, Any] = {
                "step": step,
                "split": split,
                "group": group,
                "member": member,
                "line": line,
                "messages": question,
                "item": json.dumps({"answer": "4"}),
                "output_text": f"{_text(drawn, 60)} {NEEDLE if is_needle else ''}",
                "prompt_tokens": 50,
                "completion_tokens": 80,
                "finish_reason": "stop",
                "score": score,
                "reason": "",
                "output": "",
                "sub_scores": {"a": score, "b": 1 - score},
                "sub_reasons": {},
                "sub_errors": {},
                "sub_outputs": {},
                "centered_reward": score - mean,
                "advantage": None if split == "valid" else score - mean,
                "trained": split == "train",
                "replacement": False,
                "steps": [],
            }
            yield dict.fromkeys(SCHEMA.names) | known


def _text(drawn: random.Random, words: int) -> str:
    return " ".join(drawn.choices(_WORDS, k=words))
