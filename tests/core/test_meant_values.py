"""A value that no operator can have meant is refused by the name of its variable, whichever setting it is."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError
from pydantic_settings import SettingsError

from core.addresses import HostPort, check_is_escaped
from core.settings import Settings, problems, unknown_variables
from tests.present import untyped
from worker.cli import service
from worker.cli.parser import UsageError

SETTINGS = sorted(Settings.model_fields)
# Each setting that is a URL or has URLs, with a valid value. database_url is read by its drivers, when they connect.
URLS = {
    "broker_url": "redis://{}/0",
    "inference_url": "http://{}/v1",
    "otlp_endpoint": "http://{}",
    "s3_endpoint_url": "http://{}",
    "samplers": '{{"qwen": ["http://{}"]}}',
}
PATHS = [name for name, field in Settings.model_fields.items() if "Path" in str(field.annotation)]


def numbers(model: type[BaseModel]) -> Iterator[str]:
    """The settings that may be a number, and those of a JSON object as `setting.part`."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from (f"{name}.{part}" for part in numbers(field.annotation))
        elif re.search(r"\b(int|float)\b", str(field.annotation)):
            yield name


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    "value",
    ["8000\r", "8000\n", " 8000", "'8000'", '"8000"', "tcp://10.96.0.12:8000", '"tcp://10.96.0.12:8000"'],
    ids=["carriage return", "line feed", "white space", "quotes", "double quotes", "service link", "both"],
)
def test_what_other_tools_make_of_a_value_is_refused_by_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"REGRAFT_{name.upper()}", value)

    with pytest.raises((ValidationError, SettingsError)) as invalid:
        Settings()

    said = problems(untyped(invalid.value))
    assert said.startswith((f"REGRAFT_{name.upper()}: ", f"REGRAFT_{name.upper()}.")) and value not in said


def test_every_setting_that_is_a_url_is_in_the_table_of_urls() -> None:
    named = {name for name in SETTINGS if name.endswith(("_url", "endpoint"))}

    assert (
        named - {"database_url", "blob_url"} <= URLS.keys()
    )  # a blob store's host is a bucket, without a port


@pytest.mark.parametrize("name", URLS)
@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("host:port", "a port between 1 and 65535"),
        ("host:99999", "a port between 1 and 65535"),
        ("host:", "a port between 1 and 65535"),
        ("::1:8100", "write an IPv6 address in brackets"),
        ("::1", "write an IPv6 address in brackets"),
        ("[host]:8100", "must be a host name or an address"),
    ],
)
def test_a_url_with_an_impossible_host_or_port_is_refused_by_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, address: str, said: str
) -> None:
    monkeypatch.setenv(f"REGRAFT_{name.upper()}", URLS[name].format(address))

    with pytest.raises(ValidationError) as invalid:
        Settings()

    reported = problems(untyped(invalid.value))
    assert reported.startswith(f"REGRAFT_{name.upper()}") and said in reported


@pytest.mark.parametrize("name", URLS)
@pytest.mark.parametrize("address", ["host:8100", "host", "[fd00::7]:8100", "10.0.0.7:1", "a_b.example.com"])
def test_a_url_with_a_name_or_an_address_and_perhaps_a_port_is_accepted(
    monkeypatch: pytest.MonkeyPatch, name: str, address: str
) -> None:
    monkeypatch.setenv("REGRAFT_INFERENCE_KEY", "secret")
    monkeypatch.setenv("REGRAFT_SAMPLERS_KEY", "secret")
    monkeypatch.setenv(f"REGRAFT_{name.upper()}", URLS[name].format(address))

    assert address in str(getattr(Settings(), name))


@pytest.mark.parametrize("name", [*PATHS, "blob_url", "database_url"])
@pytest.mark.parametrize("path", ["~/x", "~ana/x", "$HOME/x", "/data/${DATA}", "$(pwd)/x"])
def test_a_path_that_only_a_shell_would_expand_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, path: str
) -> None:
    monkeypatch.setenv(f"REGRAFT_{name.upper()}", f"sqlite:///{path}" if name == "database_url" else path)

    with pytest.raises(ValidationError) as invalid:
        Settings()

    assert problems(untyped(invalid.value)) == (
        f"REGRAFT_{name.upper()}: only a shell expands ~ and $: write the whole path"
    )


@pytest.mark.parametrize("url", ["s3:/bucket", "s3:bucket/prefix", "file:/x/y", "gs:/bucket"])
def test_a_blob_url_without_its_slashes_is_no_folder_of_that_name(url: str) -> None:
    with pytest.raises(ValidationError, match=r"has a scheme without ://"):
        Settings(blob_url=url)


@pytest.mark.parametrize("url", ["blobs", "/data/blobs", "a b:c", "s3://bucket/prefix", "file:///data/a$5"])
def test_a_folder_and_a_url_are_blob_stores(url: str) -> None:
    assert Settings(blob_url=url).blobs == url


@pytest.mark.parametrize("name", SETTINGS)
def test_an_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(f"REGRAFT_{name.upper()}", raising=False)
    unset = Settings()

    monkeypatch.setenv(f"REGRAFT_{name.upper()}", "")

    assert Settings() == unset


@pytest.mark.parametrize("number", ["Infinity", "NaN", "-1"])
@pytest.mark.parametrize("name", [*numbers(Settings)])
def test_no_number_is_negative_infinite_or_undefined(
    monkeypatch: pytest.MonkeyPatch, name: str, number: str
) -> None:
    setting, _, part = name.partition(".")
    monkeypatch.setenv(f"REGRAFT_{setting.upper()}", f'{{"{part}": {number}}}' if part else number)

    with pytest.raises((ValidationError, SettingsError)) as invalid:
        Settings()

    assert problems(untyped(invalid.value)).startswith(f"REGRAFT_{setting.upper()}{name[len(setting) :]}: ")


def test_the_numbers_include_those_beside_a_word_and_those_in_json() -> None:
    assert {"port", "lease_seconds", "kv_cache_gib", "max_upload_bytes"} <= {*numbers(Settings)}
    assert {"default_limits.running_jobs", "warnings.kl_jump"} <= {*numbers(Settings)}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("broker_url", "sentinel://a:26379", "Redis Sentinel and Redis Cluster are not supported"),
        ("broker_url", "redis+sentinel://a:26379/0", "Redis Sentinel and Redis Cluster are not supported"),
        ("broker_url", "redis+cluster://a:6379", "Redis Sentinel and Redis Cluster are not supported"),
        ("broker_url", "redis+socket:///run/redis.sock", "must begin with redis://"),
        ("broker_url", "amqp://broker", "must begin with redis://"),
        ("broker_url", "redis://:p@ss/w#rd@host:6379/0", "percent-encode the password"),
        ("broker_url", "redis://host:6379/abc", "the number of a database"),
        ("broker_url", "redis:///0", "must be a host name or an address"),
        ("broker_url", "memory://host:port", "a port between 1 and 65535"),
        ("inference_url", "/abc", "is neither an address such as"),
        ("otlp_endpoint", "/abc", "must be a URL such as"),
        ("s3_endpoint_url", "/abc", "must be a URL such as"),
        ("s3_endpoint_url", "http://host/abc", "String should match pattern"),
        ("broker_url", "rediss://host:6379/0?socket_timeout=3", "the unknown option 'socket_timeout'"),
        ("broker_url", "rediss://host:6379/0?ssl_cert_reqs=CERT_NONE", "required, optional, none"),
        ("broker_url", "rediss://host:6379/0?ssl_check_hostname=0", "must be true, false"),
        ("broker_url", "rediss://host:6379/0?ssl_ca_certs=", "ssl_ca_certs must be a file"),
        ("broker_url", "redis://host:6379/0?ssl_ca_certs=/ca.pem", "needs rediss://"),
        ("host", "http://0.0.0.0", "must be a host name or an address"),
        ("host", "0.0.0.0:8000", "must be a host name or an address"),
        ("rendezvous", "gpu-1", "String should match pattern"),
        ("rendezvous", "gpu-1:0", "a port between 1 and 65535"),
        ("rendezvous", "::1:2950", "write an IPv6 address in brackets"),
        ("rendezvous", "http://gpu-1:2950", "without scheme"),
    ],
)
def test_an_address_that_the_service_cannot_use_is_refused_with_what_to_write(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(f"REGRAFT_{name.upper()}", value)

    with pytest.raises(ValidationError) as invalid:
        Settings()

    reported = problems(untyped(invalid.value))
    assert reported.startswith(f"REGRAFT_{name.upper()}: ") and said in reported
    assert "ss/w" not in reported


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://u:p@ss/w#rd@host/name", "percent-encode the password"),
        ("postgresql+psycopg2://u:secret@host/name", "use postgresql://"),
        ("postgresql+asyncpg://u:secret@host/name", "use postgresql://"),
        ("sqlite+aiosqlite:////folder/regraft.db", "use sqlite://"),
        ("postgresql://u:secret@127.0.0.1:1/name?pool_size=3", 'invalid connection option "pool_size"'),
    ],
)
def test_a_database_url_for_another_driver_or_with_a_bare_password_is_one_sentence_without_it(
    tmp_path: Path, url: str, said: str
) -> None:
    with pytest.raises(UsageError) as refused:
        service.prepare(Settings(data_dir=tmp_path, database_url=url))

    assert str(refused.value).startswith("REGRAFT_DATABASE_URL: ") and said in str(refused.value)
    assert "secret" not in str(refused.value) and "ss/w" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["redis://:a%40b%2Fc@host:6379/0", "postgresql://user@host/name", "redis://host"]
)
def test_an_encoded_password_and_none_are_accepted(url: str) -> None:
    check_is_escaped(url)


@pytest.mark.parametrize(
    ("text", "host", "port"), [("gpu-1:2950", "gpu-1", 2950), ("[fd00::7]:2950", "fd00::7", 2950)]
)
def test_a_host_and_its_port_are_read_and_written_alike(text: str, host: str, port: int) -> None:
    assert HostPort.parse(text) == (host, port)
    assert str(HostPort.parse(text)) == text


@pytest.mark.parametrize("host", ["::", "[::]"])
def test_the_host_may_be_an_ipv6_address_with_or_without_brackets(host: str) -> None:
    settings = Settings(host=host)

    assert settings.host == "::"
    assert service.login_command(settings).startswith("regraft login --base-url http://127.0.0.1:")


def test_a_service_link_of_a_service_named_regraft_is_no_misspelled_setting() -> None:
    links = {
        "REGRAFT_SERVICE_HOST": "10.96.0.12",
        "REGRAFT_SERVICE_PORT": "80",
        "REGRAFT_PORT_80_TCP_PORT": "80",
    }

    assert unknown_variables(links) == []


def test_samplers_have_ipv6_addresses_too() -> None:
    settings = Settings(samplers={"m": ("http://[fd00::7]:8300",)}, samplers_key="secret")

    assert settings.samplers == {"m": ("http://[fd00::7]:8300",)}
