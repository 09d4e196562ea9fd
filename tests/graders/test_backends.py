import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from core.inference import address_of
from graders.backends import Backends, Inference, InvalidBackends
from graders.build import NotConfigured
from graders.spec import GraderSpec, InvalidGrader, parse_grader
from graders.types import Grade, Sample
from tests.graders.servers import Reply, ScriptedServer, verdict

SCORE = {"type": "score_model", "name": "s", "model": "wise", "input": [{"role": "user", "content": "?"}]}
ENDPOINT = {"type": "endpoint", "name": "e", "url": "https://score.example.com/g"}


def written(folder: Path, text: str) -> Path:
    file = folder / "graders.toml"
    file.write_text(text)
    return file


def test_without_a_file_nobody_can_be_asked() -> None:
    backends = Backends.load(None)

    for raw, param in ((SCORE, "grader.model"), (ENDPOINT, "grader.type")):
        with pytest.raises(NotConfigured, match="REGRAFT_GRADERS_FILE") as refused:
            backends.check(parse_grader(raw))
        assert refused.value.param == param


def test_a_judge_is_asked_under_its_own_name_with_its_key_at_its_address(tmp_path: Path) -> None:
    server = ScriptedServer([verdict(0.5)])

    async def grade() -> Grade:
        async with server as url:
            file = written(
                tmp_path,
                f'[judges.wise]\nbase_url = "{url}/v1"\napi_key_env = "KEY"\nserved_as = "judge-7b"\n',
            )
            async with Backends.load(file, None, {"KEY": "sk-1"}).open(parse_grader(SCORE)) as grader:
                return await grader.grade(Sample("hi"), {})

    assert asyncio.run(grade()).score == 0.5
    assert server.paths == ["/v1/chat/completions"]
    assert server.requests[0]["model"] == "judge-7b"
    assert server.headers[0]["authorization"] == "Bearer sk-1"


def test_a_judge_of_the_registry_is_asked_where_those_are_served(tmp_path: Path) -> None:
    server = ScriptedServer([verdict(0.5)])

    async def grade() -> Grade:
        async with server as url:
            file = written(tmp_path, '[judges.wise]\nmodel = "Small-1B"\nexplains = false\n')
            backends = Backends.load(file, Inference(lambda model: f"{url}/v1", "k1"))
            assert backends.registry_models == {"Small-1B"}
            async with backends.open(parse_grader(SCORE)) as grader:
                return await grader.grade(Sample("hi"), {})

    assert asyncio.run(grade()).score == 0.5
    assert server.requests[0]["model"] == "Small-1B"
    assert server.headers[0]["authorization"] == "Bearer k1"
    schema = server.requests[0]["response_format"]["json_schema"]["schema"]
    assert list(schema["properties"]) == schema["required"] == ["result"]


def test_a_judge_of_the_registry_is_asked_at_the_server_of_its_base_model(tmp_path: Path) -> None:
    file = written(tmp_path, '[judges.a]\nmodel = "small"\n[judges.b]\nmodel = "large"\n')
    servers = {"small": "http://one/v1", "*": "http://two/v1/"}

    judges = Backends.load(file, Inference(partial(address_of, servers))).judges

    assert [judges[name].base_url for name in ("a", "b")] == ["http://one/v1", "http://two/v1"]
    with pytest.raises(
        InvalidBackends, match=r"\[judges.b\] large is a model of the registry; set REGRAFT_INFERENCE_URL"
    ):
        Backends.load(file, Inference(partial(address_of, {"small": "http://one/v1"})))


def test_a_key_that_is_not_in_the_environment_is_missed_at_the_start(tmp_path: Path) -> None:
    file = written(tmp_path, '[judges.wise]\nbase_url = "https://x/v1"\napi_key_env = "KEY"\n')

    with pytest.raises(InvalidBackends, match=r"\[judges.wise\].*KEY, which is not set"):
        Backends.load(file, None, {})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[judges", "Expected"),
        ("[judges.a]\n", r"\[judges.a\].*either base_url or model"),
        ('[judges.a]\nmodel = "m"\nbase_url = "https://x/v1"\n', r"\[judges.a\].*either"),
        ('[judges.a]\nmodel = "m"\napi_key_env = "KEY"\n', r"\[judges.a\].*require base_url"),
        ('[judges.a]\nmodel = "m"\n', r"\[judges.a\].*REGRAFT_INFERENCE_URL"),
        ('[judges.a]\nbase_url = "x"\n', "judges.a.base_url"),
        ('[judges.a]\nbase_url = "https://x/v1"\nkey = "sk"\n', "judges.a.key"),
        ('[judges.a]\nbase_url = "https://x/v1"\nmax_concurrency = 0\n', "judges.a.max_concurrency"),
        ("[endpoints]\nhosts = []\n", "endpoints.hosts"),
        ("[judge]\n", "judge"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, names: str) -> None:
    with pytest.raises(InvalidBackends, match=names):
        Backends.load(written(tmp_path, text), None, {})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidBackends, match=r"absent\.toml"):
        Backends.load(tmp_path / "absent.toml", None, {})


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://score.example.com/g", True),
        ("https://SCORE.example.com/g", True),
        ("https://example.com/g", False),
        ("https://example.com.evil.org/g", False),
        ("https://evil.org/score.example.com", False),
        ("https://169.254.169.254/latest", False),
        ("http://127.0.0.1:8000/v1", False),
    ],
)
def test_only_hosts_that_the_operator_named_are_called(tmp_path: Path, url: str, allowed: bool) -> None:
    backends = Backends.load(written(tmp_path, '[endpoints]\nhosts = ["*.Example.com"]\n'), None, {})
    spec = parse_grader(ENDPOINT | {"url": url})

    if allowed:
        backends.check(spec)
    else:
        with pytest.raises(NotConfigured) as refused:
            backends.check(spec, "method.grader")
        assert refused.value.param == "method.grader.url"


def test_an_endpoint_is_sent_the_trace_id_it_is_given(tmp_path: Path) -> None:
    backends = Backends.load(written(tmp_path, '[endpoints]\nhosts = ["127.0.0.1"]\n'), None, {})
    server = ScriptedServer([Reply(200, json.dumps({"score": 1}))])

    async def grade(trace_id: str | None) -> Grade:
        async with server as url:
            spec = parse_grader(ENDPOINT | {"url": url})
            async with backends.open(spec, trace_id=trace_id) as grader:
                return await grader.grade(Sample("hi"), {})

    asyncio.run(grade("trace_mine"))
    asyncio.run(grade(None))

    assert server.requests[0]["trace_id"] == "trace_mine"
    assert server.requests[1]["trace_id"].startswith("trace_")


IMAGE = {"type": "input_image", "image_url": "{{item.picture}}"}
AUDIO = {"type": "input_audio", "input_audio": {"data": "{{item.sound}}", "format": "wav"}}


@pytest.mark.parametrize(("part", "what"), [(IMAGE, "images"), (AUDIO, "audio")])
@pytest.mark.parametrize("kind", ["score_model", "label_model", "multi"])
def test_images_and_audio_are_refused_for_a_judge_of_this_service_and_not_for_others(
    tmp_path: Path, kind: str, part: dict[str, Any], what: str
) -> None:
    file = written(
        tmp_path, '[judges.ours]\nmodel = "small"\n[judges.theirs]\nbase_url = "http://judge.example/v1"\n'
    )
    backends = Backends.load(file, Inference(lambda model: "http://127.0.0.1:1/v1"))

    def spec(model: str) -> GraderSpec:
        message = {"role": "user", "content": [{"type": "input_text", "text": "Good?"}, part]}
        judge: dict[str, Any] = {"type": "score_model", "name": "j", "model": model, "input": [message]}
        if kind == "label_model":
            judge |= {"type": kind, "labels": ["yes", "no"], "passing_labels": ["yes"]}
        if kind == "multi":
            judge = {"type": kind, "name": "m", "graders": {"j": judge}, "calculate_output": "j"}
        return parse_grader(judge)

    backends.check(spec("theirs"))
    with pytest.raises(InvalidGrader, match=f"{what} .* are not supported by this server") as refused:
        backends.check(spec("ours"), "testing_criteria[0]")
    within = "testing_criteria[0].graders.j" if kind == "multi" else "testing_criteria[0]"
    assert refused.value.param == f"{within}.input[0].content"
