"""Users reach the console under the names of the Ingress or the Gateway, with a cookie that is for TLS only."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from api.app import create_app
from api.http.sign_on import behind_proxies
from core.database.engine import Database
from core.settings import Settings
from tests.api.conftest import House, open_house
from tests.api.test_sessions import OWN
from tests.helm.charts import VARIATIONS, helm, merged, of_kind, pods, profile, render
from tests.helm.test_service import environment

CONTROLLER, STRANGER = "10.244.3.7", "10.9.9.9"


@pytest.fixture
def house(sqlite_database: Database, tmp_path: Path) -> Iterator[House]:
    with open_house(sqlite_database, tmp_path) as house:
        yield house


def logged_in(house: House, values: dict[str, Any], host: str, peer: str = CONTROLLER) -> Any:
    """The answer to a login in a browser at `host`, sent on by a proxy at `peer` to the API of these values."""
    [pod] = pods(render(values), "api")
    given = environment(pod)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("REGRAFT_CONSOLE_HOSTS", given.get("REGRAFT_CONSOLE_HOSTS", "[]"))
        settings = Settings(data_dir=house.folder)
    service = house.app.state.service
    app = create_app(settings, house.database, house.blobs, service.registry, service.backends, service.send)
    served = behind_proxies(app, given.get("FORWARDED_ALLOW_IPS", "127.0.0.1"))
    headers = OWN | {"host": host, "x-forwarded-proto": "https", "x-forwarded-for": "203.0.113.5"}
    client = TestClient(served, base_url="http://10.244.0.4:8000", headers=headers, client=(peer, 50000))
    client.portal = house.portal
    return client.post("/v1/regraft/session", json={"api_key": house.key})


@pytest.mark.parametrize("entry", ["production", "gateway"])
def test_the_console_is_served_under_the_name_of_the_entry(house: House, entry: str) -> None:
    answer = logged_in(house, VARIATIONS[entry], "regraft.example.com")

    assert answer.status_code == 200, answer.text
    assert "Secure" in answer.headers["set-cookie"]


def test_every_host_of_the_ingress_leads_to_the_api_and_to_the_console(house: House) -> None:
    hosts = ["regraft.example.com", "regraft.internal"]
    values = profile("production", ingress={"hosts": hosts, "tlsSecret": "tls"})
    [ingress] = of_kind(render(values), "Ingress")

    assert [rule["host"] for rule in ingress["spec"]["rules"]] == hosts
    assert ingress["spec"]["tls"] == [{"hosts": hosts, "secretName": "tls"}]
    assert logged_in(house, values, "regraft.internal").status_code == 200


def test_a_route_cuts_no_request_unless_the_operator_says_so() -> None:
    """Gateways have defaults of their own, such as 15 s, and an answer may take minutes."""
    [route] = of_kind(render(VARIATIONS["gateway"]), "HTTPRoute")
    [plain] = of_kind(render(merged(VARIATIONS["gateway"], {"gateway": {"timeouts": None}})), "HTTPRoute")

    assert route["spec"]["rules"][0]["timeouts"] == {"request": "0s"}
    assert "timeouts" not in plain["spec"]["rules"][0]


def test_other_names_of_the_console_are_listed(house: House) -> None:
    values = profile("production", api={"consoleHosts": ["regraft.internal"]})

    assert logged_in(house, values, "regraft.internal").status_code == 200
    assert logged_in(house, values, "regraft.example.com").status_code == 200
    assert logged_in(house, values, "evil.example.com").status_code == 401


def test_headers_of_other_peers_than_the_proxies_are_ignored(house: House) -> None:
    answer = logged_in(house, VARIATIONS["production"], "regraft.example.com", STRANGER)

    assert answer.status_code == 200
    assert "Secure" not in answer.headers["set-cookie"]


def test_a_wildcard_is_no_name_of_the_console() -> None:
    [pod] = pods(render(profile("production", ingress={"hosts": ["*.example.com"]})), "api")

    assert "REGRAFT_CONSOLE_HOSTS" not in environment(pod)


def test_single_sign_on_needs_a_policy_that_names_the_proxy() -> None:
    sso = {
        "sso_header": "X-Auth-Request-Email",
        "sso_proxies": ["10.244.0.0/16"],
        "sso_rules": [{"user": "*", "project": "proj_1", "scope": "read"}],
    }
    render(profile("production", settings=sso))

    with pytest.raises(helm.HelmRenderError, match=r"networkPolicy\.apiFrom: with settings"):
        render(profile("production", settings=sso, networkPolicy={"apiFrom": []}))
