"""What the chart's containers run, run here: the rendered commands with the rendered environment, until a job is done.

Instead of a cluster: volumes are folders of this machine, Secrets are those of servers that the tests start.
"""

import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from openai.types.fine_tuning.fine_tuning_job import FineTuningJob

from tests.e2e.conftest import Server
from tests.e2e.test_openai_client import create, method, wait
from tests.helm.charts import Pod, of_kind, pods, profile, render
from tests.helm.kubelet import Kubelet
from tests.servers import Postgres, SeaweedFS, reserve_ports
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.slow

FIRST_KEY = "a-first-key-of-the-operators-own-choice"


@pytest.fixture(scope="module")
def installed(
    tmp_path_factory: pytest.TempPathFactory, postgres: Postgres, redis_url: str, seaweed: SeaweedFS
) -> Iterator[tuple[Kubelet, dict[str, tuple[Pod, Popen[bytes]]]]]:
    """The production profile for one CPU pool: migrated by its hook, then API and worker, both ready.

    After the tests, each pod ends by itself within its grace period.
    """
    assert shutil.which("regraft-server", path=str(Path(sys.executable).parent)), (
        "the program is not installed"
    )
    folder = tmp_path_factory.mktemp("pods")
    model = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    values = profile(
        "production",
        workers=[
            {
                "name": "cpu",
                "gpus": 0,
                "gpuClass": "cpu",
                "resources": profile("cpu-demo")["workers"][0]["resources"],
            }
        ],
        objectStore={"bucket": seaweed.new_bucket(), "endpointUrl": seaweed.endpoint, "region": "us-east-1"},
        metrics={"enabled": False},  # its port is the same in all pods, which share this machine
        # Long, so that only a message over the broker can be what gets the job going.
        settings={"torch_threads": 1, "reconcile_seconds": 3600, "drain_seconds": 20},
    )
    values["models"] = {"tiny": {"path": str(model), "dtype": "float32", "context": 128}}
    manifests = render(values)
    [config] = of_kind(manifests, "ConfigMap")
    ports = dict(zip(("api", "inference"), reserve_ports(2), strict=True))
    kubelet = Kubelet(
        folder,
        {
            # Without the driver's name, as an operator would write it.
            "regraft-database": {"url": postgres.new_database().replace("+psycopg", "")},
            "regraft-broker": {"url": redis_url},
            "regraft-inference": {"key": "a-key-of-our-choice"},
            "regraft-first-key": {"key": FIRST_KEY},
            "regraft-s3": {
                "AWS_ACCESS_KEY_ID": SeaweedFS.access_key,
                "AWS_SECRET_ACCESS_KEY": SeaweedFS.secret_key,
            },
        },
        config["data"],
        ports,
        {
            "regraft-inference:8100": f"127.0.0.1:{ports['inference']}",
            "regraft-api:80": f"127.0.0.1:{ports['api']}",
        },
    )
    names = ("migrate", "api", "worker", "inference")
    [migrate], [api], [worker], [inference] = (pods(manifests, name) for name in names)
    assert kubelet.start(migrate).wait(120) == 0, (folder / "migrate.log").read_text()
    running = {pod.component: (pod, kubelet.start(pod)) for pod in (api, worker, inference)}
    try:
        kubelet.wait_for(api, "readinessProbe", running["api"][1])
        kubelet.wait_for(worker, "readinessProbe", running["worker"][1])
        yield kubelet, running
        # Only a server that has started ends with status 0.
        kubelet.wait_for(inference, "readinessProbe", running["inference"][1])
        for pod, process in reversed(running.values()):
            process.send_signal(signal.SIGTERM)
            assert process.wait(pod.spec["terminationGracePeriodSeconds"]) == 0, pod.name
    finally:
        for _, process in running.values():
            process.kill()
            process.wait()


def server_of(kubelet: Kubelet, process: Popen[bytes]) -> Server:
    """The first key is that of the Secret."""
    (kubelet.folder / "api_key").write_text(FIRST_KEY)
    return Server(process, kubelet.ports["api"], kubelet.folder)


@pytest.fixture(scope="module")
def job(installed: tuple[Kubelet, dict[str, tuple[Pod, Popen[bytes]]]]) -> FineTuningJob:
    kubelet, running = installed
    client = server_of(kubelet, running["api"][1]).client()
    return wait(client, create(client, method=method(n_epochs=1)))


def test_a_job_is_done_by_what_the_chart_starts(
    installed: tuple[Kubelet, dict[str, tuple[Pod, Popen[bytes]]]], job: FineTuningJob
) -> None:
    kubelet, running = installed
    client = server_of(kubelet, running["api"][1]).client()

    assert job.status == "succeeded"
    assert client.files.content(job.result_files[0]).text.startswith("step,")


def test_the_tuned_model_answers_through_the_api(
    installed: tuple[Kubelet, dict[str, tuple[Pod, Popen[bytes]]]], job: FineTuningJob
) -> None:
    kubelet, running = installed
    kubelet.wait_for(running["inference"][0], "readinessProbe", running["inference"][1])
    client = server_of(kubelet, running["api"][1]).client(max_retries=5)
    assert job.fine_tuned_model is not None
    answer = client.chat.completions.create(
        model=job.fine_tuned_model, messages=[{"role": "user", "content": "say it"}], max_completion_tokens=3
    )

    assert answer.model == job.fine_tuned_model
    assert (
        answer.usage is not None and answer.usage.completion_tokens > 0
    )  # the first may be the end of the answer


FIRST_KEY_OF_ANOTHER = {"regraft-first-key": {"key": "a-key-that-the-api-does-not-know"}}


@pytest.mark.parametrize(
    ("values", "secrets", "status", "message"),
    [
        ({}, {}, 0, "models: tiny"),
        ({}, FIRST_KEY_OF_ANOTHER, 1, "The API refused the first key."),
        ({"firstKey": {"existingSecret": ""}}, {}, 0, "refuses requests without a key"),
        ({"fullnameOverride": "absent"}, {}, 1, "cannot be reached"),
    ],
)
def test_helm_test_says_whether_the_api_is_ready_and_lists_its_models(
    installed: tuple[Kubelet, dict[str, tuple[Pod, Popen[bytes]]]],
    values: dict[str, Any],
    secrets: dict[str, dict[str, str]],
    status: int,
    message: str,
) -> None:
    kubelet, _ = installed
    [check] = pods(render(profile("production", **values)), "test")
    check.containers[0]["env"].append({"name": "RETRY_SECONDS", "value": "0"})  # the API is ready

    process = replace(kubelet, secrets={**kubelet.secrets, **secrets}).start(check)

    assert process.wait(60) == status
    assert message in (kubelet.folder / "test.log").read_text()


def test_every_probe_is_content_while_all_is_well(
    installed: tuple[Kubelet, dict[str, tuple[Pod, Popen[bytes]]]],
) -> None:
    kubelet, running = installed
    kubelet.wait_for(running["inference"][0], "readinessProbe", running["inference"][1])
    for pod, _ in running.values():
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert kubelet.probe(pod, kind), f"{pod.name} {kind}"
