"""What is wrong with the environment is said by the names of its variables."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_settings import SettingsError

from core.hardware import GpuClass, JobSizes
from core.jobs import devices
from core.settings import Settings, problems, unknown_variables
from tests.hardware import hardware_file
from tests.present import untyped
from worker.cli import main

SECRET = "hunter22"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
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
        ("DEFAULT_LIMITS", '{"running', "REGRAFT_DEFAULT_LIMITS: is not JSON: "),
        ("PORT", "80000", "REGRAFT_PORT: Input should be less than or equal to 65535"),
        ("BROKER_URL", "amqp://broker", "REGRAFT_BROKER_URL: must begin with redis://"),
        ("S3_ENDPOINT_URL", "127.0.0.1:9000", "REGRAFT_S3_ENDPOINT_URL: must be a URL such as"),
        ("KV_CACHE_GIB", "0", "REGRAFT_KV_CACHE_GIB: Input should be greater than 0, or 'auto'"),
        ("TRAIN_TOKEN_BUDGET", "some", "REGRAFT_TRAIN_TOKEN_BUDGET: Input should be a valid integer"),
        ("INFERENCE_URL", "http://inference:8100/v1", "REGRAFT_INFERENCE_URL needs REGRAFT_INFERENCE_KEY"),
        (
            "SSO_HEADER",
            "X-User",
            "REGRAFT_SSO_HEADER, REGRAFT_SSO_PROXIES and REGRAFT_SSO_RULES belong together",
        ),
        ("SSO_HEADER", "Cookie", "REGRAFT_SSO_HEADER: Cookie has another meaning"),
        ("SSO_HEADER", "X User", "REGRAFT_SSO_HEADER: String should match pattern"),
        ("SSO_PROXIES", '["0.0.0.0/0"]', "REGRAFT_SSO_PROXIES.0: every address is in it"),
        ("SSO_PROXIES", '["::/0"]', "REGRAFT_SSO_PROXIES.0: every address is in it"),
        ("SSO_PROXIES", '["::ffff:10.0.0.7"]', "REGRAFT_SSO_PROXIES.0: write the IPv4 address itself"),
        ("SSO_PROXIES", '["10.0.0.7/24"]', "REGRAFT_SSO_PROXIES.0: 10.0.0.7/24 has host bits set"),
        ("SSO_PROXIES", '["proxy"]', "REGRAFT_SSO_PROXIES.0: 'proxy' does not appear to be an IPv4 or IPv6"),
        ("SSO_RULES", '[{"user": "a", "project": "p"}]', "REGRAFT_SSO_RULES.0.scope: Field required"),
        (
            "SSO_RULES",
            '[{"user": "a", "group": "b", "project": "p", "scope": "read"}]',
            "REGRAFT_SSO_RULES.0: Value error, a rule has either a user or a group",
        ),
        ("SAMPLERS", '{"m": ["http://gpu-1:8300"]}', "REGRAFT_SAMPLERS needs REGRAFT_SAMPLERS_KEY"),
        ("INFERENCE_URL", "gpu-1:8100", "REGRAFT_INFERENCE_URL: is neither an address such as http"),
        (
            "INFERENCE_URL",
            '{"small": "http://a/v1"',
            "REGRAFT_INFERENCE_URL: is neither an address such as http",
        ),
        (
            "INFERENCE_URL",
            '{"small": "gpu-1"}',
            "REGRAFT_INFERENCE_URL: the server of small is not an address",
        ),
        ("INFERENCE_URL", "{}", "REGRAFT_INFERENCE_URL: the map has no servers"),
        (
            "INFERENCE_URL",
            '{"small": 8100}',
            "REGRAFT_INFERENCE_URL: the server of small is not an address such as http://host:8100/v1: must be",
        ),
        ("EPISODES_HOST", "0.0.0.0", "REGRAFT_EPISODES_HOST: must be an address of this machine"),
        ("EPISODES_HOST", "[::]", "REGRAFT_EPISODES_HOST: must be an address of this machine"),
    ],
)
def test_a_wrong_variable_is_named(
    environment: Callable[..., None], name: str, value: str, said: str
) -> None:
    environment(**{name: value})

    with pytest.raises((ValidationError, SettingsError)) as invalid:
        Settings()

    assert problems(untyped(invalid.value)).startswith(said)


@pytest.mark.parametrize("name", Settings.model_fields)
def test_settings_are_printed_without_secrets(name: str) -> None:
    """A setting may have a URL with a password, or be a key itself."""
    url = f"https://user:{SECRET}@host:1/name?sslmode=require&password={SECRET}"
    of_any_type: list[Any] = [url, {"*": url}, (url,), {"tiny": (url, url)}]
    of_any_type += [SECRET] if name.endswith(("key", "secret", "password", "token")) else []

    printed = [f"{settings!r} {settings}" for value in of_any_type for settings in [_with(name, value)]]

    assert all(SECRET not in text for text in printed)


def test_printed_settings_show_their_other_values() -> None:
    printed = repr(
        Settings(database_url=f"postgresql://ana:{SECRET}@db/x", broker_url=f"redis://:{SECRET}@r")
    )

    assert "database_url='postgresql://***@db/x', " in printed
    assert "broker_url='redis://***@r', " in printed
    assert "lease_seconds=60.0, " in printed


def _with(name: str, value: Any) -> Settings:
    """Settings of which one is unchecked."""
    return Settings().model_copy(update={name: value})


def test_a_misspelled_variable_is_named_with_the_setting_that_is_meant() -> None:
    environment = {"REGRAFT_LEAS_SECONDS": "5", "REGRAFT_LEASE_SECONDS": "5", "REGRAFT_ANYTHING": "x"}

    assert unknown_variables(environment) == [
        "REGRAFT_ANYTHING is not a setting and has no effect",
        "REGRAFT_LEAS_SECONDS is not a setting and has no effect; did you mean REGRAFT_LEASE_SECONDS?",
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("REGRAFT_API_KEY", "rg-1"),
        ("REGRAFT_PYTHON_GRADERS", "insecure"),
        ("REGRAFT_API_SERVICE_HOST", "10.0.0.1"),
        ("REGRAFT_API_PORT", "tcp://10.0.0.1:80"),
    ],
)
def test_variables_of_the_client_the_sandbox_and_kubernetes_are_known(name: str, value: str) -> None:
    assert unknown_variables({name: value}) == []


def test_a_base_model_of_the_inference_servers_that_does_not_exist_ends_the_command(
    environment: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    environment(
        INFERENCE_URL='{"none": "http://gpu-1:8100/v1"}',
        INFERENCE_KEY="secret",
        BROKER_URL="redis://127.0.0.1:9/0",
    )

    with pytest.raises(SystemExit) as ended:
        main(["api"])

    assert ended.value.code == 2
    assert "REGRAFT_INFERENCE_URL: none is not a base model" in capsys.readouterr().err


def test_all_wrong_variables_are_named_at_once(environment: Callable[..., None]) -> None:
    environment(PORT="http", LEASE_SECONDS="some")

    with pytest.raises(ValidationError) as invalid:
        Settings()

    assert "REGRAFT_PORT" in problems(untyped(invalid.value))
    assert "REGRAFT_LEASE_SECONDS" in problems(untyped(invalid.value))


def test_the_command_ends_with_the_reason(
    environment: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    environment(INFERENCE_URL="http://inference:8100/v1")

    with pytest.raises(SystemExit) as ended:
        main(["api"])

    assert ended.value.code == 2
    assert "error: REGRAFT_INFERENCE_URL needs REGRAFT_INFERENCE_KEY" in capsys.readouterr().err


def said_by(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The line below the usage with which the command ends."""
    with pytest.raises(SystemExit) as ended:
        main([command])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said.split("regraft-server: error: ")[1].removesuffix("\n")


@pytest.mark.parametrize("command", ["up", "api", "worker", "inference"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[models.a]\nhub = "a/b"\n[aliases]\no4 = "b"\n', "alias 'o4' leads to 'b', which is not a model"),
        ('[models.a]\nhub = "a/b"\ndtype = "int8"\n', "[models.a.dtype] Input should be 'float32' or"),
        ('[models.a]\nhub = "a/b"\npath = "c"\n', "[models.a] give exactly one of path"),
        ('[models.a]\nhub = "a/b"\nchat_template = "none.jinja"\n', "[models.a] chat_template is 'plain'"),
        ("[models.a\n", "Expected ']' at the end of a table declaration (at line 1"),
        ("\ufffe", "Invalid"),
        (None, "does not exist; check the path"),
    ],
)
def test_a_mistake_in_the_models_file_is_told_in_one_line(
    environment: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    text: str | None,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "models.toml"
    if text is not None:
        file.write_text(text)
    environment(
        MODELS_FILE=str(file),
        BROKER_URL="redis://127.0.0.1:9/0",
        INFERENCE_URL="http://127.0.0.1:9/v1",
        INFERENCE_KEY="k",
    )

    line = said_by(command, capsys)

    assert line.startswith(f"REGRAFT_MODELS_FILE: {file}")
    assert said in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite://", "SQLite in memory is not supported"),
        ("my secret", "it is not a database URL"),
        ("postgresql://me:secret@host:port/name", "it is not a database URL"),
        ("mysql://me:secret@host/name", "mysql is not supported"),
    ],
)
@pytest.mark.parametrize("command", ["migrate", "up", "api", "worker"])
def test_a_mistake_in_the_databases_url_is_told_in_one_line_and_without_it(
    environment: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    url: str,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    environment(
        DATABASE_URL=url,
        BROKER_URL="memory://" if command == "up" else "redis://127.0.0.1:9/0",
        INFERENCE_URL="http://127.0.0.1:9/v1",
        INFERENCE_KEY="k",
    )

    line = said_by(command, capsys)

    assert line.startswith(f"REGRAFT_DATABASE_URL: {said}")
    assert "\n" not in line and "secret" not in line


def test_sizes_are_automatic_unless_they_are_numbers(environment: Callable[..., None]) -> None:
    assert (Settings().kv_cache_gib, Settings().train_token_budget) == ("auto", "auto")
    environment(KV_CACHE_GIB="24", TRAIN_TOKEN_BUDGET="4096", INFERENCE_KV_CACHE_GIB="0.5")

    settings = Settings()

    assert (settings.kv_cache_gib, settings.train_token_budget) == (24.0, 4096)
    assert settings.inference_kv_cache_gib == 0.5


def test_what_is_set_for_a_gpu_class_holds_for_it_alone(tmp_path: Path) -> None:
    h100 = GpuClass(gpu_memory_gib=78, kv_cache_gib="auto", sampler="transformers")
    settings = Settings(kv_cache_gib=24, hardware_file=hardware_file(tmp_path, {"h100": h100}))

    there, elsewhere = settings.of_class("h100"), settings.of_class("a100")
    assert (there.kv_cache_gib, there.sampler, there.train_token_budget) == ("auto", "transformers", "auto")
    assert (elsewhere.kv_cache_gib, elsewhere.sampler) == (24.0, "registry")
    assert settings.hardware.of("h100").gpu_memory_gib == 78
    assert settings.hardware.of("a100").gpu_memory_gib is None


def test_a_job_that_chose_its_gpus_has_other_ranks_than_its_class(tmp_path: Path) -> None:
    """The others sample."""
    classes = {"h100": GpuClass(ranks=3, sizes=JobSizes(gpus=4, max_gpus=8)), "a100": GpuClass(ranks=2)}
    settings = Settings(hardware_file=hardware_file(tmp_path, classes))

    assert (settings.of_class("h100").ranks, settings.of_class("h100", gpus=8).ranks) == (3, 7)
    assert settings.of_class("a100").ranks == 2
    assert settings.hardware.of("a100").sizes is None


@pytest.mark.parametrize(
    ("classes", "broker", "has_gpu", "device"),
    [
        ({"cpu": GpuClass(gpu_memory_gib=24)}, "memory://", False, "cuda"),
        ({"cpu": GpuClass(gpu_memory_gib=0)}, "memory://", True, "cpu"),
        ({}, "memory://", True, "cuda"),
        ({}, "memory://", False, "cpu"),
        ({}, "redis://other", True, None),
    ],
)
def test_the_device_of_a_class_is_stated_or_that_of_an_embedded_service(
    tmp_path: Path,
    classes: dict[str, GpuClass],
    broker: str,
    has_gpu: bool,
    device: str | None,
) -> None:
    settings = Settings(broker_url=broker, hardware_file=hardware_file(tmp_path, classes))
    gpu_file = tmp_path if has_gpu else tmp_path / "none"

    assert devices.device_of(settings, "cpu", {}, [gpu_file]) == device


@pytest.mark.parametrize(
    ("value", "device"), [(None, "cpu"), ("void", "cpu"), ("none", "cpu"), ("all", "cuda"), ("GPU-1", "cuda")]
)
def test_a_container_with_gpus_is_known_by_its_variable(value: str | None, device: str) -> None:
    environ = {} if value is None else {"NVIDIA_VISIBLE_DEVICES": value}

    assert devices.expected_device(Settings(), environ, []) == device
    assert devices.expected_device(Settings(device="cpu"), environ, []) == "cpu"


def test_a_key_that_is_refused_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGRAFT_FIRST_KEY", "too-short")

    with pytest.raises(ValueError, match="first_key") as refused:
        Settings()

    assert "too-short" not in str(refused.value)


@pytest.mark.parametrize("text", ["secret", "A" * 43, "A" * 45])
def test_a_key_of_passports_of_another_form_is_refused_without_its_text(text: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Settings(passport_key=text)

    said = problems(refused.value)
    assert "REGRAFT_PASSPORT_KEY: must be 32 bytes in base64" in said
    assert text not in said
