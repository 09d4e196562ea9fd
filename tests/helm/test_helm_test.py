"""The pod of `helm test`: what the chart renders, and how its script reacts to an API that starts or fails.

tests/helm/test_smoke.py runs it against a whole service.
"""

import os
import subprocess
from contextlib import AbstractContextManager
from typing import Any

from tests.graders.servers import serving
from tests.helm.charts import CHART, VARIATIONS, environment, pods, profile, render
from tests.servers import reserve_ports

SCRIPT = CHART / "files/smoke_test.py"
SIDECAR = {"name": "proxy", "image": "proxy:1.2"}


def words(variation: dict[str, Any]) -> list[str]:
    [pod] = pods(render(variation), "test")
    command: list[str] = pod.containers[0]["command"]
    return command


def test_the_pod_runs_the_script() -> None:
    assert words(VARIATIONS["production"]) == ["python", "-c", SCRIPT.read_text()]


def test_the_pod_has_no_sidecar_which_would_keep_it_running() -> None:
    spec = {"containers": [SIDECAR], "schedulerName": "kai-scheduler"}
    [pod] = pods(render(profile("production", podTemplate={"spec": spec})), "test")

    assert [container["name"] for container in pod.containers] == ["test"]
    assert pod.spec["schedulerName"] == "kai-scheduler"


def test_the_pod_ends_before_kubernetes_ends_it() -> None:
    [pod] = pods(render(VARIATIONS["production"]), "test")

    assert float(environment(pod)["RETRY_SECONDS"]) < pod.spec["activeDeadlineSeconds"] / 2


def api(statuses: list[int]) -> AbstractContextManager[str]:
    """The address of an API that responds with these statuses, and then with 200."""
    return serving(lambda path, body: (statuses.pop(0) if statuses else 200, '{"data": [{"id": "tiny"}]}'))


def check(url: str, retry_seconds: int) -> "subprocess.CompletedProcess[str]":
    variables = {"API_URL": url, "API_KEY": "a-key", "RETRY_SECONDS": str(retry_seconds)}
    words_here = ["python3", *words(VARIATIONS["production"])[1:]]
    return subprocess.run(words_here, env=os.environ | variables, capture_output=True, text=True)


def test_an_api_that_is_not_ready_yet_is_retried() -> None:
    with api([503]) as url:
        done = check(url, 60)

    assert (done.returncode, done.stdout) == (0, "The API is ready and lists 1 models: tiny\n")


def test_an_api_that_is_not_ready_in_time_fails() -> None:
    with api([503]) as url:
        done = check(url, 0)

    assert done.returncode == 1
    assert "/readyz returned 503" in done.stderr


def test_an_error_that_waiting_does_not_mend_fails_at_once() -> None:
    with api([200, 500]) as url:
        done = check(url, 60)

    assert done.returncode == 1
    assert "/v1/models returned 500" in done.stderr


def test_an_address_where_nothing_listens_fails_in_time() -> None:
    [port] = reserve_ports(1)
    done = check(f"http://127.0.0.1:{port}", 0)

    assert done.returncode == 1
    assert "cannot be reached" in done.stderr
