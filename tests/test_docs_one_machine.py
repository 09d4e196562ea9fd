"""The settings, units and checks of the page on one machine work on real servers."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from core.settings import Settings
from tests.servers import SeaweedFS
from worker.cli import parser
from worker.cli.doctor import doctor
from worker.doctor.check import CHECKS
from worker.doctor.host import Host

HOWTO = Path(__file__).parents[1] / "docs/howto"
PAGE = (HOWTO / "one-machine.md").read_text()
[VARIABLES] = [
    dict(line.split("=", 1) for line in block.splitlines())
    for block in re.findall(r"^```ini\n(REGRAFT_.*?)^```", PAGE, re.M | re.S)
]
SHOWN = re.findall(r"^(?:ok|skipped) +(\S.*?)  +(.*)$", PAGE, re.M)
OF_OTHERS = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "FORWARDED_ALLOW_IPS", "HF_HOME"}


def test_every_variable_is_a_setting_or_one_of_a_library() -> None:
    settings = {f"REGRAFT_{name.upper()}" for name in Settings.model_fields}

    assert VARIABLES.keys() - OF_OTHERS <= settings
    assert VARIABLES.keys() >= OF_OTHERS


def test_the_units_start_commands_of_the_service_and_wait_until_they_have_stopped() -> None:
    units = re.findall(r"^ExecStart=\S+ ([^\n]+)$.*?^TimeoutStopSec=(\d+)$", PAGE, re.M | re.S)
    waits = {"worker": Settings().drain_seconds, "api": Settings().drain_requests_seconds}

    commands = [parser.build().parse_args(command.split()).command for command, _ in units]
    assert sorted(commands) == ["api", "inference", "worker"]
    for command, (_, seconds) in zip(commands, units, strict=True):
        assert int(seconds) > waits.get(command, waits["api"]), command


def test_a_unit_creates_the_folder_of_data_for_its_user() -> None:
    [unit] = re.findall(r"^```ini\n(# /etc/systemd/.*?)^```", PAGE, re.M | re.S)
    [user], [folder] = (
        re.findall(r"^User=(.+)$", unit, re.M),
        re.findall(r"^StateDirectory=(.+)$", unit, re.M),
    )

    assert VARIABLES["REGRAFT_DATA_DIR"] == f"/var/lib/{folder}"
    assert Path(VARIABLES["HF_HOME"]).is_relative_to(VARIABLES["REGRAFT_DATA_DIR"])
    assert re.search(rf"^useradd .* --home-dir /var/lib/{folder} .* {user}$", PAGE, re.M)


def test_what_is_created_and_set_on_one_machine_is_on_this_page_alone() -> None:
    """The page about several machines links to it."""
    assert lines_of_blocks(PAGE) & lines_of_blocks((HOWTO / "operations.md").read_text()) == set()


def lines_of_blocks(page: str) -> set[str]:
    """Commands that create something, and settings; a prompt stands before what anybody may call."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page, re.M | re.S)
    lines = "\n".join(blocks).splitlines()
    return {line for line in lines if line.strip() and not line.startswith("$ ")}


def test_the_inference_server_listens_where_the_api_looks() -> None:
    [port] = re.findall(r"regraft-server inference --port (\d+)", PAGE)

    assert VARIABLES["REGRAFT_INFERENCE_URL"] == f"http://127.0.0.1:{port}/v1"


@pytest.mark.server
def test_the_doctor_finds_the_services_healthy(
    migrated_postgres: str,
    redis_url: str,
    seaweed: SeaweedFS,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the variables of the page, whose addresses and credentials are those of the test's servers."""
    given = make_url(migrated_postgres).set(drivername="postgresql").render_as_string(hide_password=False)
    here: dict[str, Any] = {
        "REGRAFT_DATABASE_URL": given,
        "REGRAFT_BROKER_URL": redis_url,
        "REGRAFT_BLOB_URL": f"s3://{seaweed.new_bucket()}/all",
        "REGRAFT_S3_ENDPOINT_URL": seaweed.endpoint,
        "AWS_ACCESS_KEY_ID": seaweed.access_key,
        "AWS_SECRET_ACCESS_KEY": seaweed.secret_key,
        "REGRAFT_DATA_DIR": str(tmp_path),
        "REGRAFT_FIRST_KEY": "rg-" + 40 * "a",
        "REGRAFT_INFERENCE_KEY": "key",
    }
    for name, value in {**VARIABLES, **here}.items():
        monkeypatch.setenv(name, value)
    page = io.StringIO()

    status = doctor(Host(Settings()), CHECKS, ["services"], as_json=False, out=page)

    lines = re.findall(r"^(\w+) +(\S.*?)  +(.*)$", page.getvalue(), re.M)
    assert status == 0, page.getvalue()
    assert [state for state, _, _ in lines] == ["ok"] * 4
    assert [name for _, name, _ in lines] == [name for name, _ in SHOWN]
    alike = re.compile(r"\w+://\S+?(?=:? |$)|[+-][\d.]+")
    assert [alike.sub("", text) for _, _, text in lines] == [alike.sub("", text) for _, text in SHOWN]
