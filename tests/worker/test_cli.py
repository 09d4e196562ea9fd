"""`regraft-server` before a command runs: help, versions and the table of commands."""

import hashlib
import inspect
import io
import json
import logging
import os
import re
import resource
import socket
import stat
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import inspect as inspected
from sqlalchemy import select, text

from core.database.engine import Database
from core.database.migrate import migrating
from core.database.tables import ApiKey
from core.passports import Signer, new_key
from core.results.passport import KEY_FILE, key_file, signer_of
from core.settings import Settings
from core.tenancy import keys
from tests.present import present, untyped
from tests.servers import SeaweedFS, reserve_port
from worker.cli import admin, configuration, main, parser, service
from worker.cli.parser import UsageError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Options such as --host set variables of the process."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


HELP = [
    ["--help"],
    ["--version"],
    *([command.name, "--help"] for command in parser.COMMANDS),
    ["admin", "project", "limits", "--help"],
]


def test_help_imports_nothing_but_the_standard_library() -> None:
    """Which is why it takes a tenth of a second: the service's own imports take three."""
    program = (
        "import json, sys; before = set(sys.modules)\n"
        "from worker.cli import main\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    try: main(argv)\n"
        "    except SystemExit as end: code = end.code\n"
        "    imported = sorted({name.split('.')[0] for name in set(sys.modules) - before})\n"
        "    print(json.dumps([argv, code, imported]))"
    )
    words = [sys.executable, "-c", program, json.dumps(HELP)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]

    assert [(argv, code) for argv, code, _ in results] == [(argv, 0) for argv in HELP]
    for argv, _, imported in results:
        assert set(imported) - set(sys.stdlib_module_names) == {"worker"}, argv


@pytest.mark.parametrize("command", parser.COMMANDS, ids=lambda command: command.name)
def test_every_command_has_a_handler(command: parser.ServerCommand) -> None:
    module, function = command.handler.split(":")

    assert callable(getattr(import_module(module), function))


def test_every_verb_of_admin_has_a_function() -> None:
    def leaves(parser: ArgumentParser, words: tuple[str, ...] = ()) -> set[str]:
        groups = [
            action for action in parser._actions if hasattr(action, "choices") and action.nargs == "A..."
        ]
        if not groups:
            return {" ".join(words)}
        return {
            leaf
            for group in groups
            for name, below in untyped(group.choices).items()
            for leaf in leaves(below, (*words, name))
        }

    known = {leaf for leaf in leaves(parser.build()) if leaf.startswith("admin ")}

    assert {leaf.removeprefix("admin ") for leaf in known} == set(admin.COMMANDS)


def test_the_scopes_are_those_of_keys() -> None:
    assert parser.SCOPES == keys.SCOPES


def fields_of(name: str) -> set[str]:
    """The settings that an attribute of Settings is, or is computed from."""
    made = getattr(Settings, name, None)
    function = getattr(made, "func", None) or getattr(made, "fget", None)
    if name in Settings.model_fields or function is None:
        return {name}
    return {
        field
        for part in re.findall(r"\bself\.(\w+)", inspect.getsource(function))
        for field in fields_of(part)
    }


@pytest.mark.parametrize(
    ("name", "sources"),
    [
        ("api", ["api"]),
        ("worker", ["worker/supervisor", "worker/training", "worker/rollout"]),
        (
            "inference",
            ["worker/serving/server.py", "worker/serving/fleet_model.py", "worker/serving/vllm_builder.py"],
        ),
        ("sampler", ["worker/serving/fleet_server.py"]),
        ("member", ["worker/members", "worker/training/launch.py"]),
    ],
)
def test_the_help_of_a_service_lists_the_settings_that_it_reads(name: str, sources: list[str]) -> None:
    """Those of `up` are all. The others' are at least what their code reads."""
    commands = {command.name: set(command.settings) for command in parser.COMMANDS}
    files = [file for source in sources for file in [ROOT / source, *(ROOT / source).rglob("*.py")]]
    texts = [file.read_text() for file in files if file.is_file()]
    named = {name for text in texts for name in re.findall(r"\bsettings\.(\w+)", text)}
    read = {field for name in named for field in fields_of(name)}

    assert commands["up"] == set(Settings.model_fields)
    assert read & commands["up"]
    assert read & commands["up"] <= commands[name]


@pytest.fixture
def quiet_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An environment in which services start. Returns their data folder, which does not exist."""
    environment = {
        "DATA_DIR": str(tmp_path / "data"),
        "BROKER_URL": "memory://",
        "PORT": "0",
        "METRICS_PORT": "0",
        "INFERENCE_URL": "http://127.0.0.1:9/v1",
        "INFERENCE_KEY": "secret",
        "SAMPLERS_KEY": "secret",
    }
    for name, value in environment.items():
        monkeypatch.setenv(f"REGRAFT_{name}", value)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield tmp_path / "data"
    root.handlers[:] = handlers
    root.setLevel(level)


def refused(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of a command that is used wrongly, whose other lines are its usage."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert "http://" not in printed.err, "no address is printed of a service that does not start"
    return printed.err.splitlines()[-1]


SERVICES = {
    "up": ["up"],
    "api": ["api"],
    "worker": ["worker"],
    "inference": ["inference", "--port", "0"],
    "sampler": ["sampler", "--model", "m", "--port", "0"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [["up"], ["worker"], ["worker", "--jobs", "1", "--exit-when-idle", "1"]],
    ids=["up", "worker", "worker --jobs"],
)
def test_no_process_with_a_worker_starts_where_its_gpu_cannot_be_used(
    command: list[str],
    quiet_start: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("REGRAFT_DEVICE", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("REGRAFT_BROKER_URL", f"redis://127.0.0.1:{reserve_port()}")

    assert "To compute on the CPU, set REGRAFT_DEVICE=cpu" in refused(command, capsys)
    assert not (quiet_start / "regraft.db").exists()


@pytest.mark.parametrize("command", ["api", "worker"])
def test_a_process_without_a_broker_is_refused_before_it_makes_or_binds_anything(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REGRAFT_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("REGRAFT_BROKER_URL", "memory://")
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("REGRAFT_METRICS_PORT", str(other.getsockname()[1]))

        assert "memory:// works only within one process" in refused([command], capsys)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.parametrize("option", ["--port", "--metrics-port"])
def test_a_port_in_use_ends_the_start_before_anything_else(
    name: str,
    option: str,
    quiet_start: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if name in ("api", "worker"):
        monkeypatch.setenv("REGRAFT_BROKER_URL", "redis://127.0.0.1:9/0")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        argv = SERVICES[name]
        if option == "--metrics-port":
            variable = "REGRAFT_METRICS_PORT"
            monkeypatch.setenv(variable, port)
        elif "--port" in argv:
            variable, argv = option, [*argv, option, port]
        elif name == "worker":
            pytest.skip("a worker has no other port")
        else:
            variable = "REGRAFT_PORT"
            monkeypatch.setenv(variable, port)

        said = refused(argv, capsys)

    assert said.endswith(f"{variable}: port {port} of 127.0.0.1 is in use; choose another port with {option}")
    assert not quiet_start.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "other"], "--model: other is not a base model of the registry"),
        (["--tensor-parallel", "2"], "--tensor-parallel is for --model"),
    ],
)
def test_an_inference_server_of_one_model_names_what_it_cannot_serve(
    words: list[str],
    said: str,
    quiet_start: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("REGRAFT_INFERENCE_KEY", "key")

    assert said in refused([*SERVICES["inference"], *words], capsys)


def test_an_address_that_this_machine_does_not_have_is_named_by_its_variable(
    quiet_start: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REGRAFT_HOST", "192.0.2.1")

    assert "REGRAFT_HOST: cannot listen on '192.0.2.1'" in refused(["up"], capsys)


def test_a_data_folder_in_use_ends_the_start_before_an_address_is_printed(
    quiet_start: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with service.sole_owner(Settings()):
        said = refused(["up"], capsys)

    assert f"another `regraft-server up` is using {quiet_start}" in said
    assert [path.name for path in quiet_start.iterdir()] == ["lock"]


def test_options_replace_the_variables_that_api_and_worker_share(quiet_start: Path) -> None:
    """Also for child processes. Else a worker could not have the environment file of the API beside it."""
    words = ["worker", "--host", "::1", "--metrics-port", "9101", "--data-dir", "elsewhere"]

    settings = service.configured(parser.build().parse_args(words))

    assert (settings.host, settings.metrics_port, settings.data_dir) == ("::1", 9101, Path("elsewhere"))
    assert os.environ["REGRAFT_METRICS_PORT"] == "9101"


def test_a_service_says_in_a_terminal_that_it_starts(
    quiet_start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its imports, which take seconds."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("REGRAFT_PORT", "none")

    with pytest.raises(SystemExit):
        main(["up"])

    assert terminal.getvalue().startswith("Starting `regraft-server up` ...\n")
    assert "REGRAFT_PORT" in terminal.getvalue()


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.parametrize("option", ["--port", "--metrics-port"])
def test_a_number_that_is_no_port_is_refused(
    name: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if (name, option) == ("worker", "--port"):
        pytest.skip("a worker has no other port")

    assert f"argument {option}: '70000' is no port" in refused([*SERVICES[name], option, "70000"], capsys)


def test_a_misspelled_command_gets_the_one_that_it_may_mean(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'worker'?" in refused(["wrker"], capsys)
    assert "did you mean 'environments'?" in refused(["env"], capsys)
    assert "did you mean 'up'?" in refused(["uo"], capsys)
    assert "argument --port: 'abc' is no port" in refused(["up", "--port", "abc"], capsys)
    assert "did you mean --port?" in refused(["up", "--prot", "8650"], capsys)


def test_bash_completes_the_commands_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["completion", "bash"])
    ask = "COMP_WORDS=(regraft-server up --m); COMP_CWORD=2; _regraft_server; echo ${COMPREPLY[@]}"
    words = ["bash", "-c", f"{capsys.readouterr().out}\n{ask}"]

    assert (
        subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() == "--metrics-port"
    )


def test_the_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])

    assert ended.value.code == 0
    assert capsys.readouterr().out == f"regraft-server {version('regraft-server')}\n"


def test_the_login_command_names_the_server_and_its_key_file(tmp_path: Path) -> None:
    folder = tmp_path / "my data"
    folder.mkdir()
    settings = Settings(data_dir=folder, host="0.0.0.0", port=8123)

    assert service.login_command(settings) == "regraft login --base-url http://127.0.0.1:8123"
    (folder / "api_key").write_text("k")
    assert service.login_command(settings).endswith(f":8123 < '{folder}/api_key'")


def keys_of(settings: Settings) -> Sequence[ApiKey]:
    database = Database(settings.database)
    with database.read() as session:
        found = session.scalars(select(ApiKey)).all()
    database.close()
    return found


def test_without_a_terminal_the_first_key_is_in_its_file_and_in_no_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(data_dir=tmp_path)

    service.prepare(settings)

    key = (tmp_path / "api_key").read_text().strip()
    assert (tmp_path / "api_key").stat().st_mode & 0o777 == 0o600
    printed = "".join(capfd.readouterr())
    assert str(tmp_path / "api_key") in printed and key not in printed


def test_a_service_may_use_as_many_descriptors_as_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
    try:
        service.raise_descriptor_limit()

        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_login_address_of_the_console_is_printed_to_a_terminal_only(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("")
    settings = Settings(data_dir=tmp_path, console_site=tmp_path, database_url=f"sqlite:///{tmp_path}/a.db")
    service.prepare(settings)
    terminal, log = Terminal(), io.StringIO()

    service.print_console_address(settings, terminal)
    service.print_console_address(settings, log)

    assert re.search(r"http://127\.0\.0\.1:8000/\?t=\S{40}", terminal.getvalue())
    assert log.getvalue() == ""


def test_a_new_data_folder_is_its_owners_only(tmp_path: Path) -> None:
    folder = tmp_path / "data"

    service.prepare(Settings(data_dir=folder))

    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "regraft.db").stat().st_mode & 0o777 == 0o600


def test_the_mode_of_a_data_folder_that_exists_is_kept(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)

    service.prepare(Settings(data_dir=tmp_path))

    assert tmp_path.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("database_url", "postgresql://regraft:secret@127.0.0.1:1/regraft"),
        ("data_dir", "/proc/regraft"),
    ],
)
def test_a_start_without_its_database_or_folder_names_the_variable_and_no_password(
    tmp_path: Path, setting: str, value: str
) -> None:
    with pytest.raises(UsageError) as ended:
        service.prepare(Settings.model_validate({"data_dir": tmp_path, setting: value}))

    assert str(ended.value).startswith(f"REGRAFT_{setting.upper()}: ")
    assert "secret" not in str(ended.value)


@pytest.mark.parametrize("name", ["regraft.db-wal", "regraft.db.migrate.lock", "regraft.db"])
@pytest.mark.parametrize("setting", ["data_dir", "database_url"])
def test_a_start_without_a_file_that_sqlite_needs_names_the_folder_and_the_remedy(
    tmp_path: Path, setting: str, name: str
) -> None:
    """The database, its log or its lock is a folder, so that the system refuses to open it."""
    (tmp_path / name).mkdir()
    url = f"sqlite:///{tmp_path / 'regraft.db'}" if setting == "database_url" else ""

    with pytest.raises(UsageError) as ended:
        service.prepare(Settings(data_dir=tmp_path, database_url=url))

    said = str(ended.value)
    assert said.startswith(f"REGRAFT_{setting.upper()}: SQLite at {tmp_path / 'regraft.db'}: ")
    assert "with locks and shared memory" in said and "PostgreSQL" in said


@pytest.mark.parametrize(
    "url",
    ["sqlite:////folder/regraft.db?nolock=1", "sqlite:///file:/folder/regraft.db?vfs=unix-none&uri=true"],
)
def test_options_of_sqlite_that_could_switch_off_its_locks_are_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(UsageError, match=r"^REGRAFT_DATABASE_URL: a URL of SQLite has a path and no options"):
        service.prepare(Settings(data_dir=tmp_path, database_url=url))


@pytest.mark.parametrize(
    ("setting", "value", "extra"),
    [
        ("database_url", "postgresql://127.0.0.1/regraft", "postgres"),
        ("broker_url", "rediss://127.0.0.1:6379/0", "redis"),
    ],
)
def test_an_extra_that_a_setting_needs_is_named(setting: str, value: str, extra: str) -> None:
    settings = Settings.model_validate({setting: value})
    configuration.check_packages(settings, version=lambda package: "1")

    with pytest.raises(UsageError, match=rf"^REGRAFT_{setting.upper()} .*'regraft-server\[{extra}\]'"):
        configuration.check_packages(settings, version=lambda package: None)
    configuration.check_packages(Settings(), version=lambda package: None)


def test_a_worker_with_a_gpu_and_without_vllm_names_the_command_that_installs_it(tmp_path: Path) -> None:
    gpu = tmp_path / "nvidiactl"
    gpu.touch()

    def warning(settings: Settings, *, installed: bool = False, file: Path = gpu) -> str | None:
        return configuration.worker_without_vllm(settings, lambda: "0.1" if installed else None, [file], {})

    assert "pip install 'regraft-server[vllm]'" in (warning(Settings()) or "")
    assert warning(Settings(), installed=True) is None
    assert warning(Settings(), file=tmp_path / "none") is None
    assert warning(Settings(sampler="transformers")) is None
    assert warning(Settings(device="cpu")) is None


def test_a_blob_store_that_cannot_be_one_is_named() -> None:
    with pytest.raises(UsageError, match=r"^REGRAFT_BLOB_URL: 'ftp://host' names no blob store"):
        service.check_store(Settings(blob_url="ftp://host"))


def test_a_blob_store_that_refuses_the_credentials_ends_the_start(
    seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker would claim jobs and fail each of them."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweed.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    stored_in = f"s3://{seaweed.new_bucket()}"

    with pytest.raises(
        UsageError, match=r"^REGRAFT_BLOB_URL: s3://.* refuses the service, .*SignatureDoesNotMatch"
    ):
        service.check_store(
            Settings(blob_url=stored_in, s3_endpoint_url=seaweed.endpoint, s3_region="us-east-1")
        )


def test_a_blob_store_that_does_not_respond_delays_no_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")

    service.check_store(Settings(blob_url="s3://bucket", s3_endpoint_url="http://127.0.0.1:1"))

    assert "the blob store s3://bucket does not respond" in caplog.text


def test_a_first_key_that_cannot_be_written_is_not_made(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    (tmp_path / "api_key").mkdir()

    with pytest.raises(UsageError, match="api_key"):
        service.prepare(settings)
    assert keys_of(settings) == []

    (tmp_path / "api_key").rmdir()
    service.prepare(settings)
    [key] = keys_of(settings)
    assert key.sha256 == hashlib.sha256((tmp_path / "api_key").read_bytes().strip()).hexdigest()


def test_up_makes_the_key_of_passports_once_and_for_its_user_alone(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)

    service.make_passport_key(settings)
    made = key_file(settings).read_text()
    service.make_passport_key(settings)

    assert key_file(settings).read_text() == made
    assert stat.S_IMODE(key_file(settings).stat().st_mode) == 0o600
    assert signer_of(settings) is not None
    assert [path.name for path in tmp_path.iterdir()] == [KEY_FILE], "nothing else"


def test_a_key_of_passports_that_the_operator_gives_needs_no_file(tmp_path: Path) -> None:
    given = new_key()
    settings = Settings(data_dir=tmp_path, passport_key=given)

    service.make_passport_key(settings)

    assert not key_file(settings).exists()
    assert present(signer_of(settings)).fingerprint == Signer.parse(given).fingerprint
    assert given not in repr(settings)


def test_a_damaged_key_of_passports_is_an_error_that_names_its_file(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    key_file(settings).write_text("half-a-secret")

    with pytest.raises(UsageError, match="32 bytes in base64") as refused:
        service.check_passport_key(settings)
    assert str(key_file(settings)) in str(refused.value)
    assert "half-a-secret" not in str(refused.value)


def test_the_first_key_is_the_one_that_the_operator_gives(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once: later starts change nothing, whatever it is by then."""
    for token in ("first" * 8, "other" * 8):
        service.prepare(Settings(data_dir=tmp_path, first_key=token))

    [key] = keys_of(Settings(data_dir=tmp_path))
    assert key.sha256 == hashlib.sha256(("first" * 8).encode()).hexdigest()
    assert not (tmp_path / "api_key").exists()
    assert "first" * 8 not in "".join(capfd.readouterr())


def test_a_first_key_that_is_short_enough_to_guess_is_refused() -> None:
    with pytest.raises(ValidationError):
        Settings(first_key="password")


def test_a_migration_of_the_schema_alone_makes_no_key(tmp_path: Path) -> None:
    service.prepare(Settings(data_dir=tmp_path), first_key=False)

    assert keys_of(Settings(data_dir=tmp_path)) == []


def test_a_pod_waits_until_another_process_has_migrated_the_database(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, database_url=f"sqlite:///{tmp_path}/later.db")
    waited = []

    def another_migrates(seconds: float) -> bool:
        waited.append(seconds)
        if len(waited) == 2:
            service.prepare(settings, first_key=False)
        return False

    assert service.wait_for_schema(settings, 60, another_migrates)
    assert len(waited) == 2
    assert service.wait_for_schema(settings, 60, another_migrates)
    assert len(waited) == 2, "a schema that is there is not waited for"


@pytest.mark.parametrize(
    "url", ["sqlite:///{folder}/none.db", "postgresql://regraft:secret@127.0.0.1:1/regraft"]
)
def test_a_wait_for_a_migration_that_nobody_runs_ends_and_creates_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, url: str
) -> None:
    settings = Settings(data_dir=tmp_path, database_url=url.format(folder=tmp_path))

    assert not service.wait_for_schema(settings, 0, lambda seconds: False)
    assert "no process has migrated the database within 0 s" in caplog.text
    assert not service.wait_for_schema(settings, 60, lambda seconds: True), "SIGTERM ends it"
    assert list(tmp_path.iterdir()) == []
    assert "secret" not in caplog.text


@pytest.fixture
def fsck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """The exit status of `regraft-server fsck` on this data folder, and what it prints to stderr."""
    monkeypatch.setenv("REGRAFT_DATA_DIR", str(tmp_path))

    def run() -> tuple[int, str]:
        try:
            status: Any = main(["fsck"])
        except SystemExit as refused:
            status = refused.code
        return status, capsys.readouterr().err

    return run


def test_fsck_makes_no_database_and_no_key(tmp_path: Path, fsck: Callable[..., tuple[int, str]]) -> None:
    status, printed = fsck()

    assert status == 2 and "There is no database" in printed
    assert list(tmp_path.iterdir()) == []


def test_fsck_refuses_a_database_without_the_schema_and_leaves_it(
    tmp_path: Path, fsck: Callable[..., tuple[int, str]]
) -> None:
    settings = Settings(data_dir=tmp_path)
    with migrating(settings.database) as connection:
        connection.execute(text("create table of_others (id integer)"))

    status, printed = fsck()

    assert status == 2 and "regraft-server migrate" in printed
    with migrating(settings.database) as connection:
        assert inspected(connection).get_table_names() == ["of_others"]


def test_fsck_of_a_service_without_blobs_finds_nothing(
    tmp_path: Path, fsck: Callable[..., tuple[int, str]]
) -> None:
    service.prepare(Settings(data_dir=tmp_path), first_key=False)

    assert fsck() == (0, "0 findings.\n")
    assert keys_of(Settings(data_dir=tmp_path)) == []
