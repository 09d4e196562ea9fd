"""The defaults of other trainers on the page of recipes: accepted, and what the page says that they are."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from core.jobs.hyperparameters import Hyperparameters, Resolved, resolve
from graders.types import Grade
from worker.training.contributions import contribution_of, divisors
from worker.types import Group, Prompt, Rollout

PAGE = (Path(__file__).parents[2] / "docs/recipes.md").read_text()
SECTION = PAGE.split("## Defaults of other trainers\n")[1].split("\n## ")[0]
PRIME_RL, TRL = (json.loads(text) for text in re.findall(r"```json\n(.*?)```", SECTION, flags=re.S))


def resolved(advanced: dict[str, Any]) -> Resolved:
    asked = Hyperparameters.model_validate({"advanced": advanced})
    return resolve(asked, rows=100, parameters=1, context=4096)


def test_those_of_prime_rl_are_our_defaults_of_dppo_over_the_tokens_with_signal() -> None:
    run = resolved(PRIME_RL)
    groups = [group(1, [1, 0]), group(2, [0, 0]), group(3, [1, 1])]

    whole, std = divisors([contribution_of(one, run, str) for one in groups], run)

    assert run == resolved({"loss": {"type": "dppo", "normalize": "signal"}})
    assert std == 1.0
    assert whole == sum(
        len(answer.output_ids_T) for one in groups if len({*one.rewards_G}) > 1 for answer in one.rollouts_G
    )


def group(line: int, scores: list[int]) -> Group:
    answers = tuple(Rollout((7,) * 3, (-0.5,) * 3, "", "stop") for _ in scores)
    return Group(Prompt(line, (0,), {}), answers, tuple(Grade(float(score)) for score in scores))


def test_those_of_trl_mask_answers_by_their_product() -> None:
    run = resolved(TRL)

    assert (run.importance, run.importance_level, run.importance_cap, run.importance_floor) == (
        "mask",
        "answer",
        3,
        0,
    )
    assert run.ratio_bounds == (0.8, 1.2)
    assert (run.learning_rate_schedule, run.warmup_steps) == ("linear", 0)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:loss|importance)\.\w+)`", SECTION))))
def test_a_name_of_the_table_is_a_hyperparameter(name: str) -> None:
    group, field = name.split(".")
    variants = Hyperparameters.model_json_schema()["$defs"].values()

    assert any(field in one.get("properties", {}) and "type" in one["properties"] for one in variants), group
