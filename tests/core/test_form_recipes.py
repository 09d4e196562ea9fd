"""The recipes that the console's form offers are those of examples/recipes, without the sizes of a demonstration."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from core.jobs.hyperparameters import Hyperparameters

ROOT = Path(__file__).parents[2]
RECIPES: list[dict[str, Any]] = json.loads((ROOT / "console/src/lib/recipes.json").read_text())


@pytest.mark.parametrize("recipe", RECIPES, ids=[one["recipe"] for one in RECIPES])
def test_a_recipe_of_the_form_is_that_of_its_file(recipe: dict[str, Any]) -> None:
    stages = tomllib.loads((ROOT / f"examples/recipes/{recipe['recipe']}.toml").read_text())["stages"]
    [stage] = [one for one in stages if one["name"] == recipe["stage"]]
    expected = stage["job"]["hyperparameters"]["advanced"]
    expected.get("overlong", {}).pop(
        "buffer", None
    )  # of answers of 128 tokens; by itself a fifth of their limit
    sampling = {name: value for name, value in expected.pop("sampling").items() if name == "chat_template"}

    assert recipe["advanced"] == expected | ({"sampling": sampling} if sampling else {})
    Hyperparameters.model_validate({"advanced": recipe["advanced"]})
