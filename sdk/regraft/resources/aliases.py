"""client.aliases: names that a project gives to models."""

from typing import Any

from openai import AsyncOpenAI
from openai._base_client import AsyncPaginator
from openai.pagination import AsyncCursorPage

from regraft.routes import route
from regraft.types import Alias, AliasChange

PATH = "/regraft/aliases"


class AsyncAliases:
    def __init__(self, client: AsyncOpenAI) -> None:
        self._client = client

    async def promote(self, model: str, name: str) -> Alias:
        """Point the alias `name` at `model`, which answers requests for the alias from then on.

        An alias that does not exist is created.
        """
        return await self._client.post(PATH, body={"name": name, "model": model}, cast_to=Alias)

    def list(
        self, *, after: str | None = None, limit: int = 20
    ) -> AsyncPaginator[Alias, AsyncCursorPage[Alias]]:
        """Newest first."""
        options = _listed(after, limit)
        return self._client.get_api_list(PATH, page=AsyncCursorPage[Alias], model=Alias, options=options)

    async def retrieve(self, name: str) -> Alias:
        return await self._client.get(route(PATH, name), cast_to=Alias)

    def history(
        self, name: str, *, after: str | None = None, limit: int = 20
    ) -> AsyncPaginator[AliasChange, AsyncCursorPage[AliasChange]]:
        """Who pointed it from which model at which, newest first; also of a deleted alias."""
        return self._client.get_api_list(
            route(PATH, name, "history"),
            page=AsyncCursorPage[AliasChange],
            model=AliasChange,
            options=_listed(after, limit),
        )

    async def rollback(self, name: str) -> Alias:
        """Point an alias at its previous model again. A second rollback undoes the first."""
        return await self._client.post(route(PATH, name, "rollback"), cast_to=Alias)

    async def delete(self, name: str) -> None:
        """Delete an alias. Its model is kept."""
        await self._client.delete(route(PATH, name), cast_to=object)


def _listed(after: str | None, limit: int) -> Any:
    options = {"after": after, "limit": limit}
    return {"params": {name: value for name, value in options.items() if value is not None}}
