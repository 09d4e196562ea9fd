"""What `pip install` brings: both packages are built, installed outside the repository, and train a tiny job there."""

import ast
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, Server, jsonl, wait_until_ready
from tests.e2e.test_openai_client import GRADER, TRAIN, VALID
from tests.servers import reserve_port
from tests.tiny import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

UV = Path(sys.executable).with_name("uv")
SERVER_PACKAGES = ("api", "core", "graders", "worker", "migrations", "regraft_server")
INSIDE = "regraft_server/"  # the one package of the wheel, which has the others in it
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
JOB = """
model = "tiny"
training_file = "train.jsonl"
validation_file = "valid.jsonl"
seed = 1
grader = "grader.json"
[hyperparameters]
n_epochs = 1
batch_size = 4
[hyperparameters.advanced.sampling]
group_size = 4
max_completion_tokens = 3
[hyperparameters.advanced.lora]
rank = 8
"""


def environment(**more: str) -> dict[str, str]:
    """Without what would make the repository importable. uv does not read pip's setting of where else to look."""
    # The last one would have each process of the new environment compile torch anew.
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    kept = {k: v for k, v in os.environ.items() if k not in left_out}
    find_links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS", "")
    return kept | {"UV_FIND_LINKS": find_links} | more


@pytest.fixture(scope="module")
def uv() -> Callable[..., None]:
    if not UV.exists():
        pytest.skip("make setup INSTALLER=pip installs no uv")

    def run(*arguments: str | Path) -> None:
        done = subprocess.run([UV, *arguments], env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]

    return run


@pytest.fixture(scope="module")
def built(uv: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The source distribution and the wheel of each package, the wheel built from the former."""
    folder = tmp_path_factory.mktemp("dist")
    for source in (ROOT, ROOT / "sdk"):
        uv("build", "--quiet", "--out-dir", folder, source)
    files = {"server": "regraft_server", "client": "regraft"}
    return {f"{key}_wheel": folder / f"{name}-{VERSION}-py3-none-any.whl" for key, name in files.items()} | {
        f"{key}_sdist": folder / f"{name}-{VERSION}.tar.gz" for key, name in files.items()
    }


def contents(wheel: Path) -> Mapping[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def sources(folder: Path, packages: tuple[str, ...]) -> Mapping[str, bytes]:
    """What the repository has of the packages, by path: also what is new and not committed, nothing that is ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *packages]
    names = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.split("\0")
    return {name: (folder / name).read_bytes() for name in names if name and (folder / name).is_file()}


@pytest.mark.parametrize(
    ("wheel", "folder", "packages"),
    [("server_wheel", ROOT, SERVER_PACKAGES), ("client_wheel", ROOT / "sdk", ("regraft",))],
)
def test_a_wheel_has_every_file_of_its_packages_and_no_other(
    built: dict[str, Path], wheel: str, folder: Path, packages: tuple[Any, ...]
) -> None:
    """Migrations, the registry, graders' data and py.typed among them; a linked file is there with its contents."""
    expected = sources(folder, packages)
    if wheel == "server_wheel":
        expected = {INSIDE + name.removeprefix(INSIDE): data for name, data in expected.items()}

    besides = (".dist-info/", ".data/data/share/regraft/")
    got = {name: data for name, data in contents(built[wheel]).items() if not any(b in name for b in besides)}

    assert len(expected) > 20
    assert got.keys() == expected.keys()
    assert [name for name in got if got[name] != expected[name]] == []


def test_the_wheels_have_what_is_read_at_run_time(built: dict[str, Path]) -> None:
    """By name, so that a change of the folders' layout is seen here."""
    server, client = contents(built["server_wheel"]), contents(built["client_wheel"])

    read = ("core/registry.toml", "migrations/env.py", "migrations/versions/0001_first.py")
    assert {INSIDE + name for name in read} <= server.keys()
    assert {"regraft/py.typed", "regraft/_rules/datasets.py"} <= client.keys()
    assert (
        b"regraft-server = regraft_server:main"
        in server[f"regraft_server-{VERSION}.dist-info/entry_points.txt"]
    )
    assert b"regraft = regraft.cli:main" in client[f"regraft-{VERSION}.dist-info/entry_points.txt"]
    for name, files in (("regraft_server", server), ("regraft", client)):
        assert f"\nVersion: {VERSION}\n" in files[f"{name}-{VERSION}.dist-info/METADATA"].decode()
        assert f"{name}-{VERSION}.dist-info/licenses/LICENSE" in files


def test_the_servers_wheel_has_the_console_where_the_api_looks_for_it(built: dict[str, Path]) -> None:
    inside = f"regraft_server-{VERSION}.data/data/share/regraft/console/"
    files = [name.removeprefix(inside) for name in contents(built["server_wheel"]) if name.startswith(inside)]

    assert "index.html" in files
    # Pages that are loaded when they are opened have files of their own.
    assert {Path(name).suffix for name in files if name.startswith("assets/")} == {".css", ".js"}


def test_the_servers_wheel_has_the_documentation_site_where_the_api_looks_for_it(
    built: dict[str, Path],
) -> None:
    inside = f"regraft_server-{VERSION}.data/data/share/regraft/docs/"
    site = {name.removeprefix(inside) for name in contents(built["server_wheel"]) if name.startswith(inside)}

    assert {"index.html", "search.json", "reference/settings.html", "llms.txt", "llms-full.txt"} <= site
    assert not {name for name in site if name.endswith(".py")}


@pytest.mark.parametrize(
    ("wheel", "package"), [("server_wheel", "regraft_server"), ("client_wheel", "regraft")]
)
def test_a_wheel_installs_one_package_whose_name_is_its_own(
    built: dict[str, Path], wheel: str, package: str
) -> None:
    """A folder `api` or `core` would be shared with other packages of a user's environment."""
    tops = {name.split("/")[0] for name in contents(built[wheel])}

    assert {top for top in tops if not top.endswith((".dist-info", ".data"))} == {package}


@pytest.mark.parametrize("sdist", ["server_sdist", "client_sdist"])
def test_a_source_distribution_has_no_links(built: dict[str, Path], sdist: str) -> None:
    with tarfile.open(fileobj=io.BytesIO(built[sdist].read_bytes())) as archive:
        members = archive.getmembers()

    assert [member.name for member in members if not member.isfile()] == []


@pytest.mark.parametrize("wheel", ["server_wheel", "client_wheel"])
def test_nothing_installed_imports_what_stays_in_the_repository(built: dict[str, Path], wheel: str) -> None:
    def imports(source: bytes) -> set[str]:
        nodes = list(ast.walk(ast.parse(source)))
        plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        return plain | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}

    files = {name: data for name, data in contents(built[wheel]).items() if name.endswith(".py")}

    tops = {(name, module.split(".")[0]) for name, data in files.items() for module in imports(data)}

    assert {(name, top) for name, top in tops if top in ("tests", "examples", "bench", "helm")} == set()


@pytest.fixture
def installed(built: dict[str, Path], uv: Callable[..., None], tmp_path: Path) -> Iterator[Path]:
    """The folder of the programs of an environment that has the two wheels and what they depend on."""
    prefix = tmp_path / "venv"
    uv("venv", "--quiet", "--python", sys.executable, prefix)
    server = f"regraft-server[train] @ {built['server_wheel'].as_uri()}"
    client = f"regraft @ {built['client_wheel'].as_uri()}"
    pins = ROOT / "constraints" / "all.txt"
    uv("pip", "install", "--quiet", "--python", prefix / "bin/python", "-c", pins, server, client)
    yield prefix / "bin"
    shutil.rmtree(prefix)  # a gigabyte, where it could not be linked


def test_the_installed_packages_train_a_job(installed: Path, tmp_path: Path) -> None:
    """`regraft-server up` and `regraft`, in a folder that has nothing of the repository."""
    desk, data = tmp_path / "desk", tmp_path / "data"
    desk.mkdir()
    data.mkdir()
    model = make_tiny_model(tmp_path / "model")
    registry = f'[models.tiny]\npath = "{model}"\ndtype = "float32"\ncontext = 128\n'
    (desk / "models.toml").write_text(registry)
    (desk / "train.jsonl").write_bytes(jsonl(TRAIN))
    (desk / "valid.jsonl").write_bytes(jsonl(VALID))
    (desk / "grader.json").write_text(json.dumps(GRADER))
    (desk / "job.toml").write_text(JOB)
    port = reserve_port()
    settings = environment(
        PATH=f"{installed}:/usr/bin:/bin",
        REGRAFT_DATA_DIR=str(data),
        REGRAFT_MODELS_FILE=str(desk / "models.toml"),
        REGRAFT_PORT=str(port),
        REGRAFT_TORCH_THREADS="1",
        REGRAFT_CONFIG=str(desk / "config.toml"),
    )

    def regraft(*arguments: str, stdin: str | None = None) -> str:
        command: list[str | Path] = [installed / "regraft", *arguments]
        done = subprocess.run(command, cwd=desk, env=settings, capture_output=True, text=True, input=stdin)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    with (data / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [installed / "regraft-server", "up"],
            cwd=desk,
            env=settings,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    server = Server(process, port, data)
    try:
        wait_until_ready(server)
        assert regraft("--version") == f"regraft {VERSION}\n"
        regraft("login", "--base-url", server.base_url, stdin=server.key)
        regraft("jobs", "create", "-f", "job.toml", "--watch")
        (job,) = json.loads(regraft("jobs", "list", "--output", "json"))
    finally:
        status = server.stop()

    assert job["status"] == "succeeded"
    assert job["fine_tuned_model"].startswith("ft:tiny:")
    assert status == 0
    assert f"regraft login --base-url http://127.0.0.1:{port} < " in (data / "server.log").read_text()
