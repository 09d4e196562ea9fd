"""Secrets that users store are in no answer of any route that reads, and a mask cannot be stored in their place.

The requests are the examples of tests/api/test_any_text.py, which has one for each route with a body, with each grader
replaced by a call of an endpoint, and each URL by one with a secret.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from httpx2 import Response
from starlette.testclient import TestClient

from core.database.tables import WebhookDelivery
from core.masking import hide_addresses, hide_in_error, hide_in_foreign, hide_secrets, masked_path
from graders.backends import Backends
from graders.calls import quoted_reply
from graders.endpoint import Endpoints
from tests.api.conftest import GRADER, House
from tests.api.test_any_text import EXAMPLES, QUERIES, REFUSED, Walk, furnished
from tests.api.test_schema import DOCUMENT

ROOT = Path(__file__).parents[2]
SECRET = "not-for-readers"
TOKEN = "aB3" * 12
URL = f"https://8.8.8.8/hook?version=1&api_key={SECRET}"
ENDPOINT = {"type": "endpoint", "name": "exact", "url": URL, "headers": {"X-Key": SECRET}}
# They need answers that are graded at once, by an endpoint on the internet.
NOT_CALLED = {
    ("post", "/v1/fine_tuning/alpha/graders/run"),
    ("post", "/v1/regraft/graders/{grader_name}/check"),
}


def with_secrets(example: Any) -> Any:
    """The example with an endpoint for each grader, and a secret in each URL."""
    if isinstance(example, dict):
        if example.get("type") == GRADER["type"]:
            return ENDPOINT | {"name": example["name"]}
        return {name: URL if name == "url" else with_secrets(inner) for name, inner in example.items()}
    return [with_secrets(inner) for inner in example] if isinstance(example, list) else example


@pytest.fixture
def answers(api: TestClient) -> list[str]:
    """The texts of all answers so far, streams excepted."""
    texts: list[str] = []

    def keep(answer: Response) -> None:
        if answer.headers.get("content-type") == "application/json":
            texts.append(answer.read().decode())

    api.event_hooks = {"response": [keep]}
    return texts


@pytest.fixture
def walk(house: House, api: TestClient, answers: list[str]) -> Walk:
    house.app.state.service = replace(
        house.app.state.service, all_backends=Backends({}, Endpoints(("8.8.8.8",)))
    )
    examples = {
        operation: (with_secrets(example), keeps)
        for operation, (example, keeps) in EXAMPLES.items()
        if operation not in NOT_CALLED | REFUSED
    }
    walk = furnished(house, api, examples, grader=ENDPOINT)
    error = f"503 of {URL}, sent with Authorization: Bearer {SECRET}"
    with house.database.write() as session:
        endpoint = walk.known["webhook_endpoint_id"]
        session.add(WebhookDelivery(endpoint_id=endpoint, job_id="j", type="t", body="{}", last_error=error))
    return walk


@pytest.mark.both_databases
def test_no_route_answers_with_the_secrets_of_a_grader_or_an_endpoint(
    house: House, walk: Walk, answers: list[str]
) -> None:
    house.app.state.service.shutdown.begin()  # ends the streams

    for path in (path for path, found in DOCUMENT["paths"].items() if "get" in found):
        answer = walk.send("get", path.format_map(walk.known), params=walk.named(QUERIES.get(path)))
        assert SECRET not in answer.text, path

    assert [text for text in answers if SECRET in text] == []
    assert sum("***" in text for text in answers) >= 20, "or the routes show nothing of what is stored"


def test_a_mask_in_a_url_is_not_stored(house: House, api: TestClient, walk: Walk) -> None:
    shown = api.get(f"/v1/webhook_endpoints/{walk.known['webhook_endpoint_id']}").json()["url"]
    grader = ENDPOINT | {"url": shown, "headers": {}}

    answers = [
        api.post("/v1/webhook_endpoints", json=EXAMPLES["post", "/v1/webhook_endpoints"][0] | {"url": shown}),
        api.post("/v1/regraft/graders", json={"name": "new", "grader": grader}),
    ]

    assert shown == URL.replace(SECRET, "***")
    assert [(one.status_code, one.json()["error"]["param"]) for one in answers] == [
        (400, "url"),
        (400, "grader.url"),
    ]


@pytest.mark.parametrize(
    "plain",
    [
        {"input": "Is the password: hunter22?", "reference": "***", "max_tokens": 5},
        {"type": "multi", "graders": {"token": GRADER, "headers": GRADER}, "calculate_output": "token"},
        {"source": "def grade(sample, item):\n    return open('https://me:secret@a.example')"},
        {"url": "https://a.example/grade?version=1&keyword=a"},
        {"schema": {"properties": {"api_key": {"type": "string"}}, "required": ["api_key"]}},
        {"schema": {"properties": {"credentials": {"type": "object", "title": "Keys"}}}},
        {"$defs": {"credentials": {"type": "object"}}, "definitions": {"auth": {"title": "Keys"}}},
        {"patternProperties": {"secrets": {"type": "object"}}, "dependentSchemas": {"auth": {"title": "x"}}},
    ],
)
def test_what_is_no_secret_is_shown_and_can_be_sent_again(plain: dict[str, Any]) -> None:
    assert hide_secrets(plain) == plain
    assert masked_path(plain, "grader") is None


@pytest.mark.parametrize(
    ("secret", "path"),
    [
        ({"headers": {"X.Key": SECRET}}, "grader.headers.X.Key"),
        ({"graders": {"a": {"headers": {"x": SECRET}}}}, "grader.graders.a.headers.x"),
        ({"graders": [{"url": URL}]}, "grader.graders[0].url"),
        ({"url": f"https://me:{SECRET}@a.example"}, "grader.url"),
        ({"bearer_token": SECRET}, "grader.bearer_token"),
        ({"credentials": {"user": "ana", "id": SECRET}}, "grader.credentials.user"),
        ({"properties": {"password": SECRET}}, "grader.properties.password"),
    ],
)
def test_each_mask_is_found_where_it_stands(secret: dict[str, Any], path: str) -> None:
    assert masked_path(secret, "grader") is None
    assert masked_path(hide_secrets(secret), "grader") == path


def test_a_mask_is_found_beside_the_scheme_of_a_header() -> None:
    assert (
        masked_path({"headers": {"Authorization": "Bearer ***"}}, "grader") == "grader.headers.Authorization"
    )


def test_an_error_keeps_all_but_its_secrets() -> None:
    plain = "line 3: unexpected token: a; see https://a.example/help?page=2, or ask ana@a.example"
    said = {"code": "c", "message": plain, "param": None}

    assert hide_in_error(said) == said
    assert hide_in_error(f"token={SECRET}, {plain}") == f"token=***, {plain}"


@pytest.mark.parametrize(
    "said",
    [
        f"Authorization: Basic {SECRET}",
        f"Proxy-Authorization: Token {SECRET} was refused",
        f"Cookie: lang=en-US; session={SECRET}",
        f"password: 'correct horse {SECRET}'",
        f"password=ab;{SECRET}",
        f"redis://:pa/{SECRET}@h:6379/0 refused",
        f"sent {{'headers': {{'X-Mine': '{SECRET}'}}}}",
        f"Incorrect API key provided: sk-{SECRET}",
        f"glpat-{SECRET}",
        f"github_pat_11AB_{SECRET}",
        f"eyJhbGciOiJIUzI1NiJ9.{SECRET}.c2lnbmF0dXJl",
        f"-----BEGIN EC PRIVATE KEY-----\n{SECRET}\n-----END EC PRIVATE KEY----- was refused",
        f"key -----BEGIN PRIVATE KEY-----\n{SECRET}",
        f"curl --api-key {SECRET}",
        f'curl --admin-token "{SECRET}"',
        "curl --password " + SECRET[:9] + "7 failed",
        f"gsk_{TOKEN}",
        f"sk_live_{TOKEN}",
        f"pypi-AgEIcHlwaS5vcmc{TOKEN}",
        f"SG.{TOKEN}.{TOKEN}",
    ],
)
def test_no_way_to_write_a_secret_in_an_error_shows_it(said: str) -> None:
    for shown in (hide_in_error(said), hide_in_error({"message": said})["message"]):
        assert not any(secret in shown for secret in (SECRET[:9], TOKEN))


@pytest.mark.parametrize(
    "plain",
    [
        "pass --api-key instead of --token",
        "The option --password requires a value",
        ["--token", "--password", "--api-key"],
        ["--max-tokens", "50"],
        {"properties": {"credentials": {"type": "object", "description": "who"}}},
        {"tools": [{"parameters": {"properties": {"secret": {"type": "object"}, "headers": {"a": "b"}}}}]},
        "gsk_config_cache_of_packages, pypi-package-of-a-long-name and SG.module.function",
    ],
)
def test_an_error_keeps_sentences_about_options_and_schemas_with_names_of_secrets(plain: Any) -> None:
    assert hide_in_error(plain) == hide_in_foreign(plain) == plain


@pytest.mark.parametrize("option", ["--api-key", "--password", "--admin-token"])
def test_the_value_after_an_option_in_the_list_of_a_command_is_masked(option: str) -> None:
    command = {"args": ["-y", "server", option, "abcdefghij", "--verbose"]}

    assert hide_in_error(command) == {"args": ["-y", "server", option, "***", "--verbose"]}


@pytest.mark.parametrize(
    "name",
    "answer_key primary_key foreignKey sort_key cache_key partition_key prompt_cache_key monkey hockey turkey".split(),
)
def test_a_key_that_is_no_secret_is_shown_in_objects_of_other_services(name: str) -> None:
    plain = {name: "B", "of": [{name: "user-20481-of-maps"}, {"name": name, "value": "id"}]}

    assert hide_in_foreign(plain) == plain


@pytest.mark.parametrize(
    "name",
    "openai_key openaiKey AZURE-OPENAI-KEY hf_key aws.key my_client_key service-key accountKey auth_key X-Key".split(),
)
def test_a_key_of_a_service_or_an_account_is_masked_in_objects_of_other_services(name: str) -> None:
    assert hide_in_foreign({name: "abc"}) == {name: "***"}


def test_a_key_of_npm_is_masked_and_a_setting_of_npm_is_not() -> None:
    key = f"npm_{TOKEN}"

    assert (
        hide_in_error(f"{key} for npm_config_cache_of_packages") == "npm_*** for npm_config_cache_of_packages"
    )


@pytest.mark.parametrize(
    "plain",
    [
        {"error": {"code": "a", "message": "failed"}},
        {"usage": {"max_tokens": 5, "token": 3, "pass": {"count": 3}}, "key": {"id": 5}},
        {"name": "pass", "value": 0.5},
        {"name": "answer", "value": "the pass of the key"},
        {"response_format": {"properties": {"token": {"type": "string"}, "openai_key": {"type": "string"}}}},
        {"passed": "yes", "author": "ana", "keyword": "a", "passage": "b", "monkeys": "c"},
        {"note": "Basic understanding of tokens: see --max-tokens 500000 and -----BEGIN CERTIFICATE-----"},
        {"note": "eyJ is how a token begins. An eyJ. And so on."},
    ],
)
def test_what_is_no_secret_of_another_service_is_shown(plain: dict[str, Any]) -> None:
    assert hide_in_foreign(plain) == plain


LONG = (
    "a",
    "://",
    "://:",
    "?",
    "?a=",
    "headers",
    "headers={",
    "token='",
    'token="',
    "Bearer ",
    "authorization: ",
    "sk-",
    "--token ",
    "--token '",
    "-----BEGIN ",
    "-----BEGIN PRIVATE KEY-----",
    "eyJ",
    "eyJaaaaaaaa.",
    "npm_",
    "SG.",
    "SG.aaaaaaaaaaaaaaaa.",
    "pypi-AgE",
    "@",
    " ",
)


def test_a_megabyte_of_anything_is_masked_in_little_time() -> None:
    """In a process, because a pattern that takes for ever lets nothing else run in its own."""
    code = f"""
from core.masking import hide_in_foreign, hide_secrets, masked_path
for part in {LONG!r}:
    text = part * (1_000_000 // len(part))
    hide_in_foreign(dict(name=text)), hide_secrets(dict(url="https://a.example/?" + text))
    hide_secrets({{text: text}}), masked_path({{text: text}}, "grader")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT)


def test_a_server_that_repeats_the_key_that_it_was_sent_is_quoted_without_it() -> None:
    assert quoted_reply(f"Incorrect key provided: {SECRET}.", SECRET) == "'Incorrect key provided: ***.'"


@pytest.mark.parametrize(
    "name", ["api_key", "api%5Fkey", "subscription-key", "x-functions-key", "auth[token]", "jwt"]
)
@pytest.mark.parametrize("value", [SECRET, f"'{SECRET}'", f"a;{SECRET}", f"%22{SECRET}"])
def test_each_parameter_of_a_url_with_the_name_of_a_secret_is_masked(name: str, value: str) -> None:
    assert (
        hide_secrets(f"https://a.example/?page=2&{name}={value}&b=1")
        == f"https://a.example/?page=2&{name}=***&b=1"
    )


def test_an_error_names_a_route_of_the_api_and_no_file_or_address_of_a_machine() -> None:
    said = "'/v1/completions' and POST /v1/regraft/jobs/ftjob-1/logs: /srv/models/v1/a.bin at 10.0.0.7:8000"

    assert hide_addresses(said) == "'/v1/completions' and POST /v1/regraft/jobs/ftjob-1/logs: *** at ***"
