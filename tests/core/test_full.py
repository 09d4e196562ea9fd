"""The hyperparameters of jobs that train all weights, and their lineage."""

import pytest

from core.jobs.hyperparameters import Hyperparameters, resolve
from core.jobs.offline_hyperparameters import DpoHyperparameters, SupervisedHyperparameters
from core.jobs.offline_hyperparameters import resolve as resolve_offline
from core.results.lineage import Parent
from core.storage.manifests import is_whole_model
from tests.hyperparameters import in_groups


def test_the_automatic_learning_rate_is_a_tenth_of_that_of_an_adapter() -> None:
    def rate(train: str) -> float:
        asked = Hyperparameters.model_validate({"advanced": {"train": train}})
        return resolve(asked, rows=8, parameters=8_000_000_000, context=4096).learning_rate

    def offline(train: str) -> float:
        asked = SupervisedHyperparameters.model_validate({"advanced": {"train": train}})
        return resolve_offline("supervised", asked, rows=8, parameters=8_000_000_000).learning_rate

    assert (rate("lora"), rate("full")) == pytest.approx((4e-5, 4e-6))
    assert (offline("lora"), offline("full")) == pytest.approx((2e-4, 2e-5))


@pytest.mark.parametrize(
    ("advanced", "copies"),
    [
        ({}, 0),
        ({"kl": 0.1}, 1),
        ({"stop_above_kl": 0.5}, 1),
        ({"kl": 0.1, "reference_refresh_steps": 2}, 2),
    ],
)
def test_copies_of_the_weights_are_kept_only_if_something_compares_with_them(
    advanced: dict[str, float], copies: int
) -> None:
    for train, expected in (("full", copies), ("lora", 0)):
        asked = Hyperparameters.model_validate({"advanced": in_groups(advanced | {"train": train})})
        assert resolve(asked, rows=8, parameters=1000, context=128).reference_copies == expected


@pytest.mark.parametrize(("loss", "copies"), [("sigmoid", 1), ("simpo", 0)])
def test_preference_losses_with_a_reference_keep_a_copy(loss: str, copies: int) -> None:
    asked = DpoHyperparameters.model_validate({"advanced": {"train": "full", "loss": {"type": loss}}})

    assert resolve_offline("dpo", asked, rows=8, parameters=1000).reference_copies == copies


def test_a_parent_is_stored_with_what_its_job_trained() -> None:
    settings = {"lora_rank": 16, "lora_alpha": 32, "lora_targets": "all-linear"}
    adapter = Parent("ft:a", "ftjob-1", 4, "ckpt-1", "jobs/1", settings)
    whole = Parent("ft:a", "ftjob-1", 4, "ckpt-1", "jobs/1", settings, train="full")

    assert Parent(**whole.to_row()).is_whole and not Parent(**adapter.to_row()).is_whole


def test_a_manifest_tells_a_whole_model_from_an_adapter() -> None:
    entry = '{"name": "%s", "bytes": 1, "sha256": "00"}'
    of = '{"format": 1, "files": [%s]}'

    assert is_whole_model((of % (entry % "config.json")).encode())
    assert not is_whole_model((of % (entry % "adapter_config.json")).encode())
    assert not is_whole_model(b"damaged")
