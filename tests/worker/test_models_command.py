"""`regraft-server models`: what it says of a model, and the entry that it writes."""

import json
from pathlib import Path

import pytest

from core.registry import Registry
from tests.families.templates import DEFECTS, make_turn_model
from tests.families.zoo import FAMILIES
from worker.cli import main


@pytest.fixture
def models_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "models.toml"
    monkeypatch.setenv("REGRAFT_MODELS_FILE", str(file))
    monkeypatch.setenv("REGRAFT_DATA_DIR", str(tmp_path / "data"))
    return file


@pytest.mark.slow
def test_a_model_is_tried_and_added(
    models_file: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["models", "add", str(tiny_model), "--name", "tiny", "--context", "128", "--dtype", "float32"]

    assert main(arguments) == 0

    entry = Registry.load(models_file).models["tiny"]
    assert (entry.path, entry.context, entry.dtype) == (tiny_model, 128, "float32")
    said = capsys.readouterr().out
    assert "forward        packed" in said
    assert "serving        by regraft's own engine, or by vLLM" in said


def windowed(folder: Path) -> Path:
    """A tiny Mistral that attends to 16 tokens and has 64 positions."""
    [family] = [one for one in FAMILIES if one.title == "Mistral"]
    family.save(folder)
    config = json.loads((folder / "config.json").read_text())
    changed = config | {"sliding_window": 16, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(changed))
    return folder


@pytest.mark.slow
def test_it_says_that_only_vllm_serves_a_model_and_keeps_to_its_positions(
    models_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(windowed(tmp_path / "model"))

    with pytest.raises(SystemExit):
        main(["models", "add", source, "--name", "tiny", "--dtype", "float32", "--context", "65"])
    assert "The model has 64 positions (max_position_embeddings): lower --context" in capsys.readouterr().err
    assert main(["models", "add", source, "--name", "tiny", "--dtype", "float32"]) == 0

    assert Registry.load(models_file).models["tiny"].context == 64
    said = capsys.readouterr().out
    assert "serving        by vLLM only. MistralForCausalLM is not served by regraft's own engine" in said
    assert "(sliding_window = 16)" in said


@pytest.mark.slow
def test_what_a_check_found_can_be_read_by_a_program(
    models_file: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models_file.write_text(f'[models.tiny]\npath = "{tiny_model}"\ndtype = "float32"\ncontext = 128\n')

    assert main(["models", "check", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert (found["forward"], found["decode"]) == ("packed", "shared")
    assert found["largest_difference"] < 1e-4
    assert found["adapted_modules"] == 14
    assert list(found["memory"]) == ["128"]
    assert found["template"]["generation_prompt"] is True


@pytest.mark.slow
def test_a_check_shows_the_chat_template_and_what_is_wrong_with_it(
    models_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_turn_model(tmp_path / "model", DEFECTS["no generation prompt"])
    models_file.write_text(f'[models.turns]\npath = "{model}"\ndtype = "float32"\ncontext = 128\n')

    assert main(["models", "check"]) == 0

    said = capsys.readouterr().out
    assert "template       answers end with '<end>', NO generation prompt" in said
    assert "warning        The model's chat template writes nothing before an answer" in said


def test_a_folder_without_a_model_is_not_added(
    models_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(SystemExit) as ended:
        main(["models", "add", str(tmp_path / "empty")])

    assert ended.value.code == 2
    assert "not added. The model's folder has no config.json." in capsys.readouterr().err
    assert not models_file.exists()


@pytest.mark.slow
def test_a_model_that_is_added_to_a_file_of_aliases_keeps_the_included_one(
    models_file: Path, tiny_model: Path
) -> None:
    models_file.write_text('[aliases]\n"o4-mini" = "SmolLM2-135M-Instruct"\n')

    assert (
        main(["models", "add", str(tiny_model), "--name", "tiny", "--dtype", "float32", "--context", "128"])
        == 0
    )

    registry = Registry.load(models_file)
    assert registry.names == ["SmolLM2-135M-Instruct", "tiny", "o4-mini"]
    assert registry.models["SmolLM2-135M-Instruct"] == Registry.load(None).models["SmolLM2-135M-Instruct"]


def test_a_name_that_is_taken_is_not_written_twice(
    models_file: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models_file.write_text(f'[models.tiny]\npath = "{tiny_model}"\n')

    with pytest.raises(SystemExit):
        main(["models", "add", str(tiny_model), "--name", "tiny"])

    assert "has 'tiny' already" in capsys.readouterr().err
