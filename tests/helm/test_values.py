"""A wrong value is refused with its name and what would do."""

from typing import Any

import pytest

from tests.helm.charts import CHART, FLEET, ONE_GPU, SERVER, VARIATIONS, helm, pods, profile, render, scaled

POOL = profile("cpu-demo")["workers"][0]

WRONG_TYPE_OR_BOUND: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"imagee": {}}, "imagee"),
    "unknown, deeper": ({"api": {"replica": 2}}, "'/api'.*replica"),
    "text for a number": ({"api": {"replicas": "two"}}, "/api/replicas.*want integer"),
    "a number below its bound": ({"api": {"replicas": 0}}, "/api/replicas.*minimum"),
    "not one of the choices": ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy.*'IfNotPresent'"),
    "a moving tag": ({"image": {"tag": "latest"}}, "/image/tag"),
    "a server's moving tag": ({"bundled": {"valkey": {"image": "valkey/valkey"}}}, "/bundled/valkey/image"),
    "no quantity": ({"cache": {"size": "20 GB"}}, "/cache/size"),
    "a setting of that name": ({"settings": {"drain": 3}}, "'/settings'.*drain"),
    "a setting's bound": ({"settings": {"drain_seconds": -1}}, "/settings/drain_seconds.*minimum"),
    "a setting's type": ({"settings": {"max_failures": "many"}}, "/settings/max_failures.*want integer"),
    "a setting's choices": ({"settings": {"sampler": "sglang"}}, "/settings/sampler.*'vllm'"),
    "a setting that the chart makes": ({"settings": {"database_url": "x"}}, "'/settings'.*database_url"),
    "a number as environment": ({"extraEnv": {"X": 1}}, "/extraEnv/X.*want string"),
    "a folder of the node": (
        {"extraVolumes": [{"name": "ca", "hostPath": {"path": "/etc/ssl"}}]}, "/extraVolumes/0.*hostPath"
    ),
    "a volume from nowhere": ({"extraVolumes": [{"name": "ca"}]}, "/extraVolumes/0.*minProperties"),
    "a secret by its wrong name": (
        {"extraVolumes": [{"name": "ca", "secret": {"name": "ca"}}]}, "/extraVolumes/0/secret.*secretName"
    ),
    "a mount that is nowhere": (
        {"extraVolumeMounts": [{"name": "ca", "mountPath": "ca"}]}, "/extraVolumeMounts/0/mountPath"
    ),
    "a model's field": ({"models": {"m": {"hub": "a/b", "dtype": "int4"}}}, "/models/m/dtype.*'bfloat16'"),
    "a judge's address": ({"graders": {"judges": {"j": {"baseUrl": "judge"}}}}, "/graders/judges/j/baseUrl"),
    "no pools": ({"workers": []}, "/workers"),
    "a pool without limits": ({"workers": [POOL | {"resources": {"requests": {}}}]}, "/workers/0/resources.*limits"),
    "more GPUs than a node has": ({"workers": [POOL | {"gpus": 17}]}, "/workers/0/gpus.*maximum"),
    "a setting that all pools share": ({"workers": [POOL | {"settings": {"sampler": "vllm"}}]}, "settings'.*sampler"),
    "no address of a proxy": ({"api": {"trustedProxies": ["proxy"]}}, "/api/trustedProxies/0"),
    "names of the console beside the chart's": ({"settings": {"console_hosts": ["a"]}}, "'/settings'.*console_hosts"),
    "ranks beside the GPUs": ({"settings": {"ranks": 2}}, "'/settings'.*ranks"),
    "no machine": ({"workers": [POOL | {"nodes": 0}]}, "/workers/0/nodes.*minimum"),
    "machines beside the pool's": ({"settings": {"nodes": 2}}, "'/settings'.*nodes"),
    "a queue's name": ({"workers": [POOL | {"gpuClass": "H100 80GB"}]}, "/workers/0/gpuClass"),
    "an open door": ({"networkPolicy": {"workerEgress": [{"ports": [{"port": 443}]}]}}, "workerEgress/0.*'to'"),
    "no network": ({"networkPolicy": {"database": {"to": [{"ipBlock": {"cidr": "db"}}]}}}, "to/0/ipBlock/cidr"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_TYPE_OR_BOUND)
def test_a_wrong_value_is_named(case: str) -> None:
    changes, words = WRONG_TYPE_OR_BOUND[case]

    with pytest.raises(helm.HelmError, match=f"(?s){words}"):
        render(profile("cpu-demo", **changes))


SCALED = {key: value for key, value in POOL.items() if key != "replicas"} | {"mode": "job", "maxReplicas": 2}
WARM = {"name": "b", "gpuClass": "b", "mode": "warm"}
WITH_METRICS = {"metrics": {"enabled": True}}
SERVED = {
    "models": {"Qwen3-14B": {"hub": "Qwen/Qwen3-14B", "tensorParallel": 2, "gpuClass": "b"}},
    "cache": {"size": "40Gi"},
    "workers": [POOL, POOL | WARM | {"gpus": 2}],
}
WRONG_TOGETHER: dict[str, tuple[dict[str, Any], str]] = {
    "no database": ({"bundled": {"postgresql": {"enabled": False}}}, "database.existingSecret: name the Secret"),
    "no broker": ({"bundled": {"valkey": {"enabled": False}}}, "broker.existingSecret: name the Secret"),
    "no bucket": ({"bundled": {"seaweedfs": {"enabled": False}}}, "objectStore.bucket: name your bucket"),
    "a database nobody may reach": (
        {"bundled": {"postgresql": {"enabled": False}}, "database": {"existingSecret": "db"}},
        "networkPolicy.database.to: list its peers",
    ),
    "pools of one name": ({"workers": [POOL, POOL]}, "two pools are named cpu"),
    "a model that no pool trains": ({"models": {"m": {"hub": "a/b", "gpuClass": "h100"}}}, "m needs the gpuClass h100"),
    "a model from nowhere": ({"models": {"m": {"context": 512}}}, "models: m needs exactly one of path"),
    "a model larger than the cache": (
        {"models": {"m": {"hub": "Qwen/Qwen3-14B"}}},
        "cache.size: Qwen/Qwen3-14B has about 28 GB of weights by its name, and 20Gi are 21 GB",
    ),
    "a mixture larger than the cache": (
        {"models": {"m": {"hub": "mistralai/Mixtral-8x7B-v0.1"}}},
        "cache.size: mistralai/Mixtral-8x7B-v0.1 has about 90 GB of weights by its name",
    ),
    "an alias of nothing": ({"modelAliases": {"o4": "m"}}, "modelAliases: o4 refers to m, which is not in models"),
    "aliases of each other": (
        {"modelAliases": {"a": "b", "b": "a"}}, "modelAliases: a refers to itself through b"
    ),
    "models that share a cache too small for all": (
        {"models": {name: {"hub": f"Qwen/{name}"} for name in ("Qwen3-8B", "Qwen3-4B")}},
        "cache.size: a pod of inference downloads models with about 24 GB of weights, one after the other",
    ),
    "a pool whose cache is too small": (
        {"models": {"m": {"hub": "Qwen/Qwen3-14B"}}, "cache": {"existingClaim": "shared"},
         "workers": [POOL | {"cache": {"size": "20Gi"}}]},
        "workers: the cache of cpu: Qwen/Qwen3-14B has about 28 GB of weights by its name, and 20Gi are 21 GB",
    ),
    "weights on no claim": (
        {"models": {"m": {"path": "/models/m"}}}, "weights.existingClaim: name the claim with the weights of m"
    ),
    "a dispatcher whose rights all pods would have": (
        {"dispatcher": {"enabled": True, "serviceAccount": {"create": False}}},
        "dispatcher.serviceAccount.name: name an account other than `default`",
    ),
    "one account that two components create": (
        {"api": {"serviceAccount": {"create": True, "name": "ours"}},
         "worker": {"serviceAccount": {"create": True, "name": "ours"}}},
        "serviceAccount.create: api and worker would each create the account ours",
    ),
    "graders with the account of the dispatcher": (
        {"dispatcher": {"enabled": True, "serviceAccount": {"name": "ours"}},
         "worker": {"serviceAccount": {"name": "ours"}}},
        "dispatcher.serviceAccount.name: the pods of worker have the account ours, too",
    ),
    "sampling GPUs of further nodes": (
        WITH_METRICS | {
            "workers": [POOL, SCALED | {"name": "b", "gpus": 8, "samplingGpus": 3, "nodes": 2, "gpuClass": "b"}]
        },
        "the pool b has samplingGpus and several nodes, .*: 3 GPUs of each other node would be idle",
    ),
    "a topology without Kueue": (
        {"workers": [POOL | {"kueueTopology": {"preferred": "rack"}}]}, "has a kueueTopology and no kueueQueue"
    ),
    "an alias that hides a model": (
        {"models": {"m": {"hub": "a/b"}}, "modelAliases": {"m": "m"}},
        "modelAliases: m is the name of a model",
    ),
    "a model from two places": ({"models": {"m": {"hub": "a/b", "path": "/models/b"}}}, "m needs exactly one of"),
    "a judge from nowhere": ({"graders": {"judges": {"j": {"explains": False}}}}, "j needs either baseUrl or model"),
    "a judge that nobody serves": (
        {"graders": {"judges": {"j": {"model": "m"}}}, "inference": {"enabled": False}},
        "set inference.url to a server",
    ),
    "nobody left to look after the rows": (WITH_METRICS | {"workers": [SCALED]}, "no pool has a worker that stays"),
    "a number of workers of a pool of Jobs": (
        WITH_METRICS | {"workers": [POOL, SCALED | {"name": "b", "replicas": 1}]},
        "the pool b has replicas and is a pool of Jobs; set maxReplicas instead",
    ),
    "a pool of Jobs without a bound": (
        WITH_METRICS | {"workers": [POOL, POOL | {"name": "b", "mode": "job", "replicas": 2}]},
        "the pool b has replicas and is a pool of Jobs",
    ),
    "two pools that start Jobs for the same queue": (
        WITH_METRICS | {"workers": [POOL, *(SCALED | {"name": name, "gpuClass": "h100"} for name in ("a", "b"))]},
        "the pools a and b both start Jobs for the gpuClass h100",
    ),
    "a bound of a Deployment": (
        {"workers": [POOL | {"maxReplicas": 1}]}, "the pool cpu has maxReplicas and is a Deployment; set replicas"
    ),
    "a Deployment on several nodes": (
        {"workers": [POOL, POOL | {"name": "b", "nodes": 2}]}, "the pool b has nodes, which only pools of Jobs may have"
    ),
    "a queue that KEDA cannot read": (
        {"workers": [POOL, SCALED | {"name": "b"}]}, r"metrics\.enabled: set it, because KEDA reads .* the pool b"
    ),
    "a Kubernetes API that the dispatcher may not reach": (
        {"dispatcher": {"enabled": True}, "workers": [POOL, SCALED | {"name": "b"}]},
        r"networkPolicy\.kubernetesApi\.to: list the addresses",
    ),
    "a dispatcher without a pool of Jobs": ({"dispatcher": {"enabled": True}}, "no pool has the mode job"),
    "a dispatched pod with several jobs": (
        {
            "dispatcher": {"enabled": True},
            "workers": [POOL, SCALED | {"name": "b", "settings": {"jobs_per_worker": 2}}],
        },
        "the pool b has jobs_per_worker, and the dispatcher starts a pod for each job",
    ),
    "GPUs that jobs choose without a dispatcher": (
        WITH_METRICS | {"workers": [POOL, SCALED | {"name": "b", "gpus": 1, "maxGpus": 4}]},
        "the pool b has maxGpus or maxNodes, up to which jobs choose theirs; only a pool of Jobs with gpus and with "
        r"dispatcher\.enabled",
    ),
    "a choice of fewer GPUs than jobs have": (
        {"dispatcher": {"enabled": True}, "workers": [POOL, SCALED | {"name": "b", "gpus": 4, "maxGpus": 2}]},
        "maxGpus and maxNodes of the pool b must not be below its gpus and nodes",
    ),
    "a number of engines for any number of GPUs": (
        {
            "dispatcher": {"enabled": True},
            "workers": [POOL, SCALED | {"name": "b", "gpus": 1, "maxGpus": 2, "settings": {"engines": 2}}],
        },
        "the pool b has a number of engines, and jobs choose their GPUs",
    ),
    "slices of GPUs that jobs choose": (
        {
            "dispatcher": {"enabled": True},
            "workers": [
                POOL,
                SCALED | {"name": "b", "gpus": 1, "maxGpus": 2, "gpuResource": "nvidia.com/mig-3g.40gb"},
            ],
        },
        "the pool b has maxGpus and the gpuResource nvidia.com/mig-3g.40gb, and a process uses one slice",
    ),
    "a TrainJob that nobody creates": (
        WITH_METRICS | {"workers": [POOL, SCALED | {"name": "b", "trainingRuntime": {"name": "r"}}]},
        r"the pool b has a trainingRuntime, .* set dispatcher\.enabled",
    ),
    "a runtime of a Deployment": (
        {"workers": [POOL, POOL | {"name": "b", "trainingRuntime": {"name": "r"}}]},
        "the pool b has a trainingRuntime and is a Deployment",
    ),
    "a sampler's port twice": ({"metrics": {"enabled": True, "port": 8300}}, "metrics.port: is a sampler's port"),
    "a patch of a container that is not there": (
        {"api": {"podTemplate": {"spec": {"containers": [{"name": "apii", "env": []}]}}}},
        r"podTemplate: the container apii has no image, .* \(api\)",
    ),
    "a port twice": ({"metrics": {"enabled": True, "port": 29400}}, "metrics.port: is a group's port"),
    "a pool in which no GPU learns": (
        {"workers": [POOL, POOL | {"name": "b", "mode": "warm", "gpus": 2, "samplingGpus": 2}]},
        "the pool b has 2 samplingGpus, which must be below its gpus, 2",
    ),
    "an engine larger than its pool": (
        {"models": {"m": {"hub": "a/b", "tensorParallel": 2, "gpuClass": "b"}},
         "workers": [POOL, POOL | {"name": "b", "mode": "warm", "gpus": 1, "gpuClass": "b"}]},
        "an engine of m uses its tensorParallel, 2, and the pool b has 1 GPUs that sample",
    ),
    "a model that no pod of inference can serve": (
        {"models": {"m": {"hub": "a/b", "tensorParallel": 2, "gpuClass": "b"}},
         "workers": [POOL, POOL | WARM | {"gpus": 2}]},
        "inference.models: m has tensorParallel 2 and nothing that serves it",
    ),
    "a model on several GPUs beside the servers of others": (
        {"models": {"m": {"hub": "a/b", "tensorParallel": 2, "gpuClass": "b"}, "Qwen3-14B": {"hub": "a/c"}},
         "inference": {"enabled": False, "models": [SERVER | ONE_GPU]},
         "workers": [POOL, POOL | WARM | {"gpus": 2}]},
        "inference.models: m has tensorParallel 2 and nothing that serves it",
    ),
    "a server of no model": ({"inference": {"models": [SERVER]}}, "inference.models: Qwen3-14B is not in models"),
    "two servers of a model": (
        SERVED | {"inference": {"models": [SERVER, SERVER | {"name": "more"}]}}, "two entries serve Qwen3-14B"
    ),
    "a server with other GPUs than its model": (
        SERVED | {"inference": {"models": [SERVER | {"gpus": 1}]}},
        "large has 1 gpus, and an engine of Qwen3-14B uses its tensorParallel, 2",
    ),
    "a server beside one's own": (
        SERVED | {"inference": {"enabled": False, "models": [SERVER], "url": {"Qwen3-14B": "http://own/v1"}}},
        "inference.url: has an address for Qwen3-14B, which the entry large of inference.models serves",
    ),
    "a server without room for its model": (
        SERVED | {"inference": {"models": [SERVER | {"cache": {"size": "20Gi"}}]}},
        "the cache of large, 20Gi, has no room for the weights of Qwen/Qwen3-14B",
    ),
    "a scaler upside down": (
        SERVED | WITH_METRICS | {"inference": {"models": [scaled(SERVER, minReplicas=9)]}},
        "inference.models: minReplicas of the autoscaling is above maxReplicas",
    ),
    "a scaler without metrics": (
        SERVED | {"inference": {"models": [scaled(SERVER)]}}, r"metrics\.enabled: set it, because the autoscaling in "
    ),
    "a scaler of an engine without its metrics": (
        SERVED | WITH_METRICS | {"inference": {"sampler": "transformers", "models": [scaled(SERVER)]}},
        "large has autoscaling, which reads metrics of vLLM, and its pods run transformers",
    ),
    "replicas beside a scaler": (
        SERVED | WITH_METRICS | {"inference": {"models": [scaled(SERVER) | {"replicas": 2}]}},
        "inference.models: large has replicas and autoscaling",
    ),
    "an engine larger than what samples": (
        {"models": {"m": {"hub": "a/b", "tensorParallel": 2, "gpuClass": "b"}},
         "workers": [POOL, POOL | {"name": "b", "mode": "warm", "gpus": 4, "samplingGpus": 1, "gpuClass": "b"}]},
        "the pool b has 1 GPUs that sample",
    ),
    "more engines than a pool has room for": (
        {"models": {"m": {"hub": "a/b", "tensorParallel": 2, "gpuClass": "b"}},
         "workers": [POOL, POOL | WARM | {"gpus": 4, "settings": {"engines": 3}}]},
        "the pool b has 4 gpus, and 3 engines of m use 6",
    ),
    "proxies beside the chart's": ({"extraEnv": {"FORWARDED_ALLOW_IPS": "*"}}, "must be set in api.trustedProxies"),
    "a setting as other environment": ({"extraEnv": {"REGRAFT_PORT": "1"}}, "REGRAFT_PORT must be set in settings"),
    "a mount of nothing": (
        {"extraVolumeMounts": [{"name": "ca", "mountPath": "/ca"}]},
        "extraVolumeMounts: ca is not a name in extraVolumes",
    ),
    "a volume of the chart's own name": (
        {"extraVolumes": [{"name": "cache", "configMap": {"name": "ca"}}]}, "extraVolumes: the name cache is taken"
    ),
    "a mount over the chart's own": (
        {
            "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
            "extraVolumeMounts": [{"name": "ca", "mountPath": "/tmp/"}],
        },
        "/tmp/ is already a mount path",
    ),
    "a variable of the chart": ({"extraEnv": {"HF_HOME": "/models"}}, "HF_HOME is a folder or user of the chart"),
    "a token in the open": ({"extraEnv": {"HF_TOKEN": "x"}}, "named by weights.hubSecret"),
    "a secret in the open": ({"extraEnv": {"AWS_SECRET_ACCESS_KEY": "x"}}, "belongs into a Secret"),
    "a server of models without its key": (
        {"inference": {"enabled": False, "url": "http://other/v1", "existingSecret": ""}},
        "inference.existingSecret: name the Secret with the key of the server",
    ),
    "a server of an unknown model": (
        {"inference": {"enabled": False, "url": {"m": "http://other/v1"}, "existingSecret": "key"}},
        "inference.url: m is not in models",
    ),
    "a judge without a server": (
        {
            "models": {"m": {"hub": "a/b"}, "n": {"hub": "a/c"}},
            "graders": {"judges": {"j": {"model": "n"}}},
            "inference": {"enabled": False, "url": {"m": "http://other/v1"}, "existingSecret": "key"},
        },
        "j is the model n, for which inference.url and inference.models have no server",
    ),
    "two servers of models": ({"inference": {"url": "http://other/v1"}}, "set either it or inference.enabled"),
    "a fleet of an unknown model": (
        {"samplers": {"fleets": [FLEET], "existingSecret": "key"}},
        "samplers.fleets: Qwen3-4B is not in models",
    ),
    "a fleet without a key": (
        {"models": {"Qwen3-4B": {"hub": "a/b"}}, "samplers": {"fleets": [FLEET]}},
        "samplers.existingSecret: name the Secret",
    ),
    "two fleets of a model": (
        {
            "models": {"Qwen3-4B": {"hub": "a/b"}},
            "samplers": {"fleets": [FLEET, FLEET | {"name": "more"}], "existingSecret": "key"},
        },
        "two fleets sample Qwen3-4B",
    ),
    "a fleet with other GPUs than its model": (
        {
            "models": {"Qwen3-4B": {"hub": "a/b", "tensorParallel": 2}},
            "samplers": {"fleets": [FLEET], "existingSecret": "key"},
        },
        "small has 1 gpus, and a sampler of Qwen3-4B uses its tensorParallel, 2",
    ),
    "an entry for no host": ({"ingress": {"enabled": True}}, "ingress.hosts: name the hosts"),
    "a route to no gateway": ({"gateway": {"enabled": True}}, "gateway.parentRefs: name the Gateway"),
    "an API upside down": ({"api": {"autoscaling": {"minReplicas": 9}}}, "api.autoscaling.minReplicas"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_TOGETHER)
def test_values_that_do_not_fit_together_are_named(case: str) -> None:
    changes, words = WRONG_TOGETHER[case]

    with pytest.raises(helm.HelmRenderError, match=words):
        render(profile("cpu-demo", **changes))


@pytest.mark.parametrize(
    ("hub", "cache"),
    [
        ("Qwen/Qwen3-8B", {}),
        ("Qwen/Qwen3-14B", {"size": "30Gi"}),
        ("Qwen/Qwen3-14B", {"size": "28G"}),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", {"size": "1Ti"}),
        ("meta-llama/Llama-3.3-70B-Instruct", {"existingClaim": "cache"}),
        ("an-organization/a-model-of-unknown-size", {"size": "1Gi"}),
        ("HuggingFaceTB/SmolLM2-135M", {"size": "1Gi"}),
    ],
)
def test_a_model_that_may_fit_into_the_cache_is_accepted(hub: str, cache: dict[str, Any]) -> None:
    render(profile("cpu-demo", models={"m": {"hub": hub}}, cache=cache))


WEIGHTS_MOUNT = {"name": "ours", "mountPath": "/models/ours"}
WEIGHTS_VOLUME = {"name": "ours", "persistentVolumeClaim": {"claimName": "our-weights"}}


@pytest.mark.parametrize(
    "mounted",
    [
        {"extraVolumes": [WEIGHTS_VOLUME], "extraVolumeMounts": [WEIGHTS_MOUNT]},
        {
            "workers": [
                POOL
                | {
                    "podTemplate": {
                        "spec": {
                            "volumes": [WEIGHTS_VOLUME],
                            "containers": [{"name": "worker", "volumeMounts": [WEIGHTS_MOUNT]}],
                        }
                    }
                }
            ]
        },
    ],
    ids=["extraVolumeMounts", "podTemplate"],
)
def test_weights_in_a_mount_of_the_operator_need_no_claim_of_the_chart(mounted: dict[str, Any]) -> None:
    render(profile("cpu-demo", models={"m": {"path": "/models/ours/m"}}, **mounted))

    with pytest.raises(helm.HelmRenderError, match=r"weights\.existingClaim: name the claim"):
        render(profile("cpu-demo", models={"m": {"path": "/models/ours-too/m"}}, **mounted))


def test_what_is_wrong_for_several_pods_is_told_once() -> None:
    """The cache of all pods is too small for each of two pools."""
    pools = [POOL, POOL | WARM | {"gpuClass": POOL["gpuClass"]}]
    with pytest.raises(helm.HelmRenderError) as refused:
        render(profile("cpu-demo", models={"m": {"hub": "Qwen/Qwen3-14B"}}, workers=pools))

    assert str(refused.value).count("cache.size: Qwen/Qwen3-14B has about 28 GB") == 1


def test_a_group_whose_pods_would_have_names_too_long_is_refused() -> None:
    """KEDA appends six characters for the name of a Job, and Kubernetes eight more for those of its pods."""
    values = profile(
        "cpu-demo", **WITH_METRICS, workers=[POOL, SCALED | {"name": "b", "nodes": 2, "gpuClass": "b"}]
    )
    render(values, name="a-regraft-of-34-characters-in-full")

    long = values | {
        "workers": [POOL, SCALED | {"nodes": 2, "name": "a-pool-with-20-chars", "gpuClass": "b"}]
    }
    with pytest.raises(helm.HelmRenderError, match=r"the pool a-pool-with-20-chars has nodes.*shorten"):
        render(long, name="a-regraft-of-34-characters-in-full")


def test_everything_that_is_missing_is_told_at_once() -> None:
    with pytest.raises(
        helm.HelmRenderError, match=r"(?s)database\.existing.*broker\.existing.*objectStore\.bucket"
    ):
        render({})


def test_the_values_of_the_chart_itself_follow_its_schema() -> None:
    helm.Chart.load(CHART).validate_schema({})


@pytest.mark.parametrize(
    ("hub", "size"),
    [
        ("Qwen/Qwen3-14B-FP8", "20Gi"),
        ("openai/gpt-oss-20b", "20Gi"),
        ("openai/gpt-oss-120b", "70Gi"),
        ("mistralai/Mixtral-8x7B-v0.1", "100Gi"),
        ("Qwen/Qwen3-32B", "1Pi"),
    ],
)
def test_a_model_that_the_cache_has_room_for_is_rendered(hub: str, size: str) -> None:
    assert render(profile("cpu-demo", models={"m": {"hub": hub}}, cache={"size": size}))


@pytest.mark.parametrize("variation", ["every corner", "dispatched", "fleets"])
def test_no_volume_of_the_chart_may_be_given_a_second_time(variation: str) -> None:
    given = VARIATIONS[variation] | {"extraVolumes": [], "extraVolumeMounts": []}
    own = [pod.spec for pod in pods(render(given))]
    names = {one["name"] for spec in own for one in spec["volumes"]}
    paths = {
        one["mountPath"]
        for spec in own
        for container in spec["containers"]
        for one in container.get("volumeMounts", ())
    }
    taken = {
        "extraVolumes": [{"name": name, "configMap": {"name": "ca"}} for name in sorted(names)],
        "extraVolumeMounts": [{"name": "tmp", "mountPath": path} for path in sorted(paths)],
    }

    with pytest.raises(helm.HelmRenderError) as refusal:
        render(given | taken)
    for name in names:
        assert f"the name {name} is taken" in str(refusal.value)
    for path in paths:
        assert f"{path} is already a mount path" in str(refusal.value)
