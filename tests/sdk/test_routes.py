"""Ids in paths: each stays one segment."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from regraft import Regraft
from regraft.routes import InvalidId, route

SDK = Path(__file__).parents[2] / "sdk/regraft"
HOSTILE = "../../models?x="

CALLS: dict[str, Callable[[Regraft, str], Any]] = {
    "aliases.retrieve": lambda client, text: client.aliases.retrieve(text),
    "aliases.history": lambda client, text: client.aliases.history(text),
    "aliases.rollback": lambda client, text: client.aliases.rollback(text),
    "aliases.delete": lambda client, text: client.aliases.delete(text),
    "grader_audits.retrieve": lambda client, text: client.grader_audits.retrieve(text),
    "grader_audits.cancel": lambda client, text: client.grader_audits.cancel(text),
    "graders.retrieve": lambda client, text: client.graders.retrieve(text),
    "jobs.compare": lambda client, text: client.jobs.compare(text, text),
    "jobs.curves": lambda client, text: client.jobs.curves([text]),
    "jobs.ledger": lambda client, text: client.jobs.ledger(text),
    "jobs.metrics": lambda client, text: client.jobs.metrics(text, frame=False),
    "jobs.retrieve": lambda client, text: client.jobs.retrieve(text),
    "pipelines.retrieve": lambda client, text: client.pipelines.retrieve(text),
    "pipelines.pause": lambda client, text: client.pipelines.pause(text),
    "previews.retrieve": lambda client, text: client.previews.retrieve(text),
    "previews.answers": lambda client, text: client.previews.answers(text),
    "profile": lambda client, text: client.profile(text),
    "regrades.retrieve": lambda client, text: client.regrades.retrieve(text, text),
    "rollouts.list": lambda client, text: client.rollouts.list(text),
    "rollouts.tokens": lambda client, text: client.rollouts.tokens(text, text),
    "evals.compare": lambda client, text: client.evals.compare(text, text, text),
}


def client_with(seen: list[bytes]) -> Regraft:
    def note(request: httpx2.Request) -> httpx2.Response:
        seen.append(request.url.raw_path)
        return httpx2.Response(200, json={"data": []})

    http_client = httpx2.Client(transport=httpx2.MockTransport(note))
    return Regraft(base_url="http://service/v1", api_key="key", http_client=http_client)


@pytest.mark.parametrize("name", CALLS)
def test_an_id_with_slashes_leads_to_no_other_route(name: str) -> None:
    seen: list[bytes] = []

    try:
        CALLS[name](client_with(seen), HOSTILE)
    except ValueError as refusal:  # openai's own resources refuse some of them
        assert "dot-segment" in str(refusal)

    paths = [one.partition(b"?")[0] for one in seen]
    queries = [one.partition(b"?")[2] for one in seen]
    assert not any(b".." in path.split(b"/") or path.endswith(b"/models") for path in paths)
    assert not any(b"x=" in query or b"?" in query for query in queries)


@pytest.mark.parametrize("text", ["", ".", ".."])
def test_what_a_path_would_drop_is_no_id(text: str) -> None:
    with pytest.raises(InvalidId, match="is not an id"):
        route("/regraft/jobs", text)


def test_a_version_of_a_model_stays_readable() -> None:
    assert route("/regraft/aliases", "ft:tiny@2", "a b/c") == "/regraft/aliases/ft:tiny@2/a%20b%2Fc"


def pastes(path: Path) -> list[str]:
    """The f-strings of a file that put a value behind the slash of a path of the API."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            text = ast.unparse(node)
            is_route = text[2:].startswith(("/regraft/", "/fine_tuning/", "{PATH}/", "{_path("))
            if is_route and "/{" in text.partition("?")[0]:
                found.append(text)
    return found


def test_no_path_has_an_id_that_is_not_quoted() -> None:
    files = [one for one in SDK.rglob("*.py") if "starters" not in one.parts]

    assert {str(one.relative_to(SDK)): pastes(one) for one in files if pastes(one)} == {}
