"""Build the images api and worker-cpu, then start them as the chart does and run the demo's job: `make images`.

python .ci/images.py             build and test
python .ci/images.py --gpu       also build worker-gpu, which is not started
python .ci/images.py --no-test   build only

The engine is docker or podman (whose `build` is buildah), or that of ENGINE. Variables named like build arguments
set these (docs/howto/kubernetes-images.md, Images behind a mirror). NETRC, NPMRC and APT_AUTH are the paths of secrets.
OPTIONS are further options of the engine's `build`, such as `--network host`.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / ".ci"))
import release  # noqa: E402

ENGINES = ("docker", "podman")
NO_ENGINE = (
    "No container engine: neither docker, with its daemon, nor podman answers `info`. Install one of them. If both are "
    "there, ENGINE=podman chooses. buildah alone cannot start an image read-only; podman builds with it.\n"
)
# The variable with the path of each secret of the Dockerfiles.
SECRETS = {"netrc": "NETRC", "npmrc": "NPMRC", "apt-auth": "APT_AUTH"}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Build the images, start them as the chart does, run a job.")
    parser.add_argument("--gpu", action="store_true", help="also build worker-gpu")
    parser.add_argument("--no-test", action="store_true", help="build only")
    chosen = parser.parse_args(arguments)
    engine = find_engine(os.environ)
    if engine is None:
        sys.stderr.write(NO_ENGINE)
        return 1
    images = ["api", "worker-cpu", *(["worker-gpu"] if chosen.gpu else [])]
    for image in images:
        start = time.monotonic()
        subprocess.run(build_command(engine, image, os.environ), cwd=ROOT, check=True)
        sys.stdout.write(f"{image}: built in {time.monotonic() - start:.0f} s, {size(engine, image)} MB\n")
        sys.stdout.flush()
    return 0 if chosen.no_test else test(engine)


def find_engine(environment: Mapping[str, str]) -> str | None:
    """Return the first engine that answers. The client of docker may be installed where no daemon runs."""
    chosen = environment.get("ENGINE")
    return next((name for name in ENGINES if chosen in (None, "", name) and answers(name)), None)


def answers(engine: str) -> bool:
    return (
        shutil.which(engine) is not None
        and subprocess.run([engine, "info"], capture_output=True).returncode == 0
    )


def build_command(engine: str, image: str, environment: Mapping[str, str]) -> list[str]:
    """The engine's command for an image, with the build arguments and secrets that the environment has."""
    dockerfile = ROOT / f"docker/{image}.Dockerfile"
    declared = re.findall(r"^ARG (\w+)", dockerfile.read_text(), re.MULTILINE)
    given = {
        "VERSION": release.version_of(ROOT),
        "REVISION": release.output(ROOT, "git", "rev-parse", "HEAD"),
    }
    given |= {name: environment[name] for name in declared if is_for_build(name, environment.get(name, ""))}
    command = [engine, "build", *shlex.split(environment.get("OPTIONS", "")), "--file", str(dockerfile)]
    for name, value in given.items():
        command += ["--build-arg", f"{name}={value}"]
    for secret, variable in SECRETS.items():
        if environment.get(variable):
            command += ["--secret", f"id={secret},src={environment[variable]}"]
    return [*command, "--tag", name_of(image), "."]


def is_for_build(name: str, value: str) -> bool:
    """Whether a variable is an argument of the build. A build does not see folders of this machine."""
    return bool(value) and (name != "UV_FIND_LINKS" or value.startswith(("https://", "http://")))


def name_of(image: str) -> str:
    return f"regraft/{image}:{release.version_of(ROOT)}"


def size(engine: str, image: str) -> int:
    """In MB, on this machine's disk."""
    listed = json.loads(release.output(ROOT, engine, "image", "inspect", name_of(image)))
    return int(listed[0]["Size"]) // 10**6


def test(engine: str) -> int:
    """Compare the images to their bills of materials, start them, and run the demo's job.

    The bills are built anew: those in dist/ may be signed already.
    """
    with tempfile.TemporaryDirectory() as bills:
        release.build_sboms(ROOT, release.version_of(ROOT), Path(bills))
        command = [sys.executable, "-m", "pytest", "tests/helm/test_containers.py", "--capture=no"]
        variables = {"REGRAFT_TEST_ENGINE": engine, "REGRAFT_TEST_BILLS": bills}
        return subprocess.run(command, cwd=ROOT, env=os.environ | variables).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
