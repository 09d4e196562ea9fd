"""client.aliases."""

import asyncio
from collections.abc import Callable

import pytest
import regraft
from regraft import AsyncRegraft, Regraft

from tests.sdk.conftest import House

MODEL = "ft:tiny:acme::1"


def test_an_alias_is_pointed_at_models_rolled_back_and_deleted(client: Regraft, house: House) -> None:
    house.tuned(MODEL)
    client.aliases.promote("tiny", "production")
    second = client.aliases.promote(MODEL, "production")

    assert (second.model, second.previous_model) == (MODEL, "tiny")
    assert client.aliases.retrieve("production") == second
    assert [one.name for one in client.aliases.list(limit=1)] == ["production"]
    assert client.aliases.rollback("production").model == "tiny"
    client.aliases.delete("production")
    changes = [(one.previous_model, one.model) for one in client.aliases.history("production", limit=2)]
    assert changes == [("tiny", None), (MODEL, "tiny"), ("tiny", MODEL), (None, "tiny")]
    with pytest.raises(regraft.AliasNotFound):
        client.aliases.retrieve("production")


def test_the_asynchronous_client_does_the_same(make_async: Callable[[], AsyncRegraft], house: House) -> None:
    house.tuned(MODEL)

    async def all_of_it() -> tuple[list[str], str]:
        async with make_async() as client:
            await client.aliases.promote("tiny", "production")
            second = await client.aliases.promote(MODEL, "production")
            assert await client.aliases.retrieve("production") == second
            models = [one.model async for one in client.aliases.list()]
            back = await client.aliases.rollback("production")
            await client.aliases.delete("production")
            changes = [one.model async for one in client.aliases.history("production")]
            assert changes == [None, "tiny", MODEL, "tiny"]
            return models, back.model

    assert asyncio.run(all_of_it()) == ([MODEL], "tiny")
