"""The images of `make images`, started as the chart starts them, until the demo's job has succeeded.

REGRAFT_TEST_ENGINE names the container engine, docker or podman, that has the images. Skipped without it.
REGRAFT_TEST_BILLS is the folder with their bills of materials.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest
from packaging.utils import canonicalize_name
from sqlalchemy import make_url

from tests.helm.charts import ROOT, Manifest, Pod, of_kind, pods, profile, render
from tests.helm.containers import Containers
from tests.packaging.test_packages import VERSION
from tests.proxies import TcpProxy
from tests.servers import Postgres, SeaweedFS, reserve_ports

ENGINE = os.environ.get("REGRAFT_TEST_ENGINE", "")
BILLS = Path(os.environ.get("REGRAFT_TEST_BILLS", "dist"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not ENGINE, reason="make images builds the images that these tests start"),
]

FIRST_KEY = "a-first-key-of-the-operators-own-choice"
STARTED = ("api", "worker", "inference")


def over_tcp(url: str) -> str:
    """The URL of a database whose server listens at a socket of the file system, which a container does not see."""
    parsed = make_url(url)
    path = f"{parsed.query['host']}/.s.PGSQL.{parsed.port or 5432}"

    def connect() -> socket.socket:
        server = socket.socket(socket.AF_UNIX)
        server.connect(path)
        return server

    own = parsed.set(drivername="postgresql", host="127.0.0.1", port=TcpProxy(connect).port, query={})
    return own.render_as_string(hide_password=False)


@pytest.fixture(scope="module")
def manifests(seaweed: SeaweedFS) -> list[Manifest]:
    """The demo's profile with servers that the tests start."""
    values = profile(
        "cpu-demo",
        bundled={name: {"enabled": False} for name in ("postgresql", "valkey", "seaweedfs")},
        database={"existingSecret": "database"},
        broker={"existingSecret": "broker"},
        firstKey={"existingSecret": "first-key"},
        inference={"existingSecret": "inference"},
        objectStore={
            "existingSecret": "s3",
            "bucket": seaweed.new_bucket(),
            "endpointUrl": seaweed.endpoint,
            "region": "us-east-1",
        },
        networkPolicy={"enabled": False},
    )
    return render(values)


@pytest.fixture(scope="module")
def containers(
    tmp_path_factory: pytest.TempPathFactory,
    postgres: Postgres,
    redis_url: str,
    manifests: list[Manifest],
) -> Containers:
    ports = dict(zip(("api", "inference"), reserve_ports(2), strict=True))
    [config] = of_kind(manifests, "ConfigMap")
    folder = tmp_path_factory.mktemp("containers")
    return Containers(
        folder,
        {
            "database": {"url": over_tcp(postgres.new_database())},
            "broker": {"url": redis_url},
            "first-key": {"key": FIRST_KEY},
            "inference": {"key": "a-key-of-our-choice"},
            "s3": {"AWS_ACCESS_KEY_ID": SeaweedFS.access_key, "AWS_SECRET_ACCESS_KEY": SeaweedFS.secret_key},
        },
        config["data"],
        ports,
        {
            "regraft-inference:8100": f"127.0.0.1:{ports['inference']}",
            "regraft-api:80": f"127.0.0.1:{ports['api']}",
        },
        engine=ENGINE,
    )


def only(manifests: list[Manifest], component: str) -> Pod:
    [pod] = pods(manifests, component)
    return pod


@pytest.fixture(scope="module")
def running(containers: Containers, manifests: list[Manifest]) -> Iterator[dict[str, "Popen[bytes]"]]:
    """The migration has run; API, worker and inference are ready."""
    migrate = only(manifests, "migrate")
    assert containers.start(migrate).wait(300) == 0, (containers.folder / "migrate.log").read_text()
    processes: dict[str, Popen[bytes]] = {}
    try:
        for component in STARTED:
            pod, begin = only(manifests, component), time.monotonic()
            processes[component] = containers.start(pod)
            containers.wait_for(pod, "readinessProbe", processes[component])
            report(f"{component} ready after {time.monotonic() - begin:.1f} s")
        yield processes
    finally:
        for component in processes:
            containers.remove(only(manifests, component))
            processes[component].wait()


def report(line: str) -> None:
    """Print a measurement. `make images` runs pytest without capturing."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@pytest.mark.parametrize("component", STARTED)
def test_a_container_can_write_to_its_volumes_only(
    running: dict[str, "Popen[bytes]"], containers: Containers, manifests: list[Manifest], component: str
) -> None:
    pod = only(manifests, component)
    code = (
        "import os, sys, tempfile\n"
        "assert os.getuid() == os.getgid() == 10001, (os.getuid(), os.getgid())\n"
        "tempfile.TemporaryFile(dir='/tmp').close()\n"
        "try:\n    open(os.path.join(sys.prefix, 'new'), 'w')\n"
        "except OSError as error:\n    assert error.errno == 30, error\n"
        "else:\n    sys.exit('the root is writable')"
    )

    done = subprocess.run(containers.executing(pod, ["python", "-c", code]), capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


def test_the_demos_job_succeeds_and_its_model_answers(
    running: dict[str, "Popen[bytes]"], containers: Containers, tmp_path: Path
) -> None:
    demo = [sys.executable, str(ROOT / "examples/demo.py"), "--data-dir", str(tmp_path)]
    url = f"http://127.0.0.1:{containers.ports['api']}/v1"

    done = subprocess.run([*demo, "--url", url], env=os.environ | {"REGRAFT_API_KEY": FIRST_KEY})

    assert done.returncode == 0, {
        name: (containers.folder / f"{name}.log").read_text()[-3000:] for name in STARTED
    }
    summary = json.loads((tmp_path / "demo.json").read_text())
    report(f"demo: {summary['seconds']:.0f} s")
    assert summary["tuned_reward"] > summary["base_reward"]


def test_helm_test_passes(
    running: dict[str, "Popen[bytes]"], containers: Containers, manifests: list[Manifest]
) -> None:
    check = containers.start(only(manifests, "test"))

    status, log = check.wait(120), (containers.folder / "test.log").read_text()
    assert (status, "The API is ready and lists " in log) == (0, True), log


# Of the last one the client of Redis has need below Python 3.11.3, which a base of your own may have.
NOT_OF_THE_BILL = {"regraft-server", "async-timeout"}


@pytest.mark.parametrize("image", ["api", "worker-cpu"])
def test_an_image_has_the_packages_of_its_bill_of_materials(image: str, manifests: list[Manifest]) -> None:
    code = (
        "import json; from importlib.metadata import distributions;"
        "print(json.dumps({d.name: d.version for d in distributions()}))"
    )
    name = next(
        container["image"]
        for pod in pods(manifests)
        for container in pod.containers
        if f"/{image}:" in container["image"]
    )

    done = subprocess.run(
        [ENGINE, "run", "--rm", "--pull", "never", "--network", "none", name, "python", "-c", code],
        capture_output=True,
        check=True,
        text=True,
    )

    packages = {
        canonicalize_name(package): without_build(version)
        for package, version in json.loads(done.stdout).items()
    }
    bill = json.loads((BILLS / f"regraft-server-{VERSION}-{image}.cdx.json").read_text())
    expected = {canonicalize_name(part["name"]): part["version"] for part in bill["components"]}
    assert {one: packages[one] for one in packages.keys() - NOT_OF_THE_BILL} == expected


def without_build(version: str) -> str:
    """A version without its local part, such as the +cpu of torch's builds for processors."""
    return re.sub(r"\+\w+$", "", version)


def test_a_worker_ends_by_itself_on_sigterm(
    running: dict[str, "Popen[bytes]"], containers: Containers, manifests: list[Manifest]
) -> None:
    pod = only(manifests, "worker")
    containers.stop(pod)

    assert running["worker"].wait(pod.spec["terminationGracePeriodSeconds"]) == 0
