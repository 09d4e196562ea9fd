"""Written by .ci/sync_client.py from regraft.resources.aliases; do not edit."""

from openai import OpenAI
from openai.pagination import SyncCursorPage

from regraft.resources.aliases import PATH, _listed
from regraft.routes import route
from regraft.types import Alias, AliasChange


class Aliases:
    def __init__(self, client: OpenAI) -> None:
        self._client = client

    def promote(self, model: str, name: str) -> Alias:
        """Point the alias `name` at `model`, which answers requests for the alias from then on.

        An alias that does not exist is created.
        """
        return self._client.post(PATH, body={"name": name, "model": model}, cast_to=Alias)

    def list(self, *, after: str | None = None, limit: int = 20) -> SyncCursorPage[Alias]:
        """Newest first."""
        options = _listed(after, limit)
        return self._client.get_api_list(PATH, page=SyncCursorPage[Alias], model=Alias, options=options)

    def retrieve(self, name: str) -> Alias:
        return self._client.get(route(PATH, name), cast_to=Alias)

    def history(self, name: str, *, after: str | None = None, limit: int = 20) -> SyncCursorPage[AliasChange]:
        """Who pointed it from which model at which, newest first; also of a deleted alias."""
        return self._client.get_api_list(
            route(PATH, name, "history"),
            page=SyncCursorPage[AliasChange],
            model=AliasChange,
            options=_listed(after, limit),
        )

    def rollback(self, name: str) -> Alias:
        """Point an alias at its previous model again. A second rollback undoes the first."""
        return self._client.post(route(PATH, name, "rollback"), cast_to=Alias)

    def delete(self, name: str) -> None:
        """Delete an alias. Its model is kept."""
        self._client.delete(route(PATH, name), cast_to=object)
