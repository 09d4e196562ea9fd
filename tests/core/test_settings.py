"""What is wrong with the environment is said by the names of its variables."""

import pytest
from pydantic import ValidationError
from pydantic_settings import SettingsError

from core.settings import Settings, problems
from worker import cli


@pytest.fixture
def environment(monkeypatch):
    def environment(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(f"REGRAFT_{name}", value)

    return environment


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PORT", "http", "REGRAFT_PORT: Input should be a valid integer"),
        (
            "DEFAULT_LIMITS",
            '{"running_jobs": -1}',
            "REGRAFT_DEFAULT_LIMITS.running_jobs: Input should be greater",
        ),
        ("DEFAULT_LIMITS", '{"running', 'error parsing value for field "default_limits"'),
        ("INFERENCE_URL", "http://inference:8100/v1", "REGRAFT_INFERENCE_URL needs REGRAFT_INFERENCE_KEY"),
    ],
)
def test_a_wrong_variable_is_named(environment, name, value, said):
    environment(**{name: value})

    with pytest.raises((ValidationError, SettingsError)) as invalid:
        Settings()

    assert problems(invalid.value).startswith(said)


def test_all_wrong_variables_are_named_at_once(environment):
    environment(PORT="http", CURRENCY="euros")

    with pytest.raises(ValidationError) as invalid:
        Settings()

    assert "REGRAFT_PORT" in problems(invalid.value)
    assert "REGRAFT_CURRENCY" in problems(invalid.value)


def test_the_command_ends_with_the_reason(environment, monkeypatch, capsys):
    environment(INFERENCE_URL="http://inference:8100/v1")
    monkeypatch.setattr("sys.argv", ["regraft-server", "api"])

    with pytest.raises(SystemExit) as ended:
        cli.main()

    assert ended.value.code == 2
    assert "error: REGRAFT_INFERENCE_URL needs REGRAFT_INFERENCE_KEY" in capsys.readouterr().err
