"""README of the client, configuration: OPENAI_ORG_ID and OPENAI_PROJECT_ID of the old account are still set."""

import openai
import pytest
from openai import OpenAI

from tests.e2e.conftest import Server


@pytest.mark.parametrize("name", ["OPENAI_ORG_ID", "OPENAI_PROJECT_ID"])
def test_ids_of_openai_are_ignored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, {"OPENAI_ORG_ID": "org-hTGGabc", "OPENAI_PROJECT_ID": "proj_abc123"}[name])

    assert OpenAI().models.list().data


def test_the_organization_of_the_key_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = OpenAI().models.with_raw_response.list().headers["openai-organization"]
    monkeypatch.setenv("OPENAI_ORG_ID", mine)

    assert OpenAI().models.list().data


def test_the_key_is_sent_as_the_client_sends_it(service: Server) -> None:
    """A key without a project in it, with headers of the caller's own."""
    client = OpenAI(
        api_key=service.key,
        default_headers={"X-Client-Request-Id": "mine-1", "OpenAI-Beta": "assistants=v2"},
        max_retries=2,
    )

    assert client.models.list().data
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="none").models.list()
