"""Sessions of a coding agent with `regraft mcp`: the reference client, and what its calls return."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters

SDK = Path(__file__).parents[1] / "sdk"


def environment(base_url: str, key: str, folder: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": str(SDK),
        "REGRAFT_BASE_URL": base_url,
        "REGRAFT_API_KEY": key,
        "REGRAFT_CONFIG": str(folder.parent / "config.toml"),
    }


def over_stdio(
    base_url: str, key: str, folder: Path, session: Callable[[Client], Awaitable[Any]], *options: str
) -> Any:
    """Start `regraft mcp` in a folder, and return what a session with it returns."""
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "regraft", "mcp", *options],
        cwd=folder,
        env=environment(base_url, key, folder),
    )

    async def talk() -> Any:
        async with Client(server) as client:
            return await session(client)

    return asyncio.run(talk())


async def call(client: Client, name: str, **arguments: Any) -> Any:
    """The result of a tool as it is in its text."""
    result: Any = await client.call_tool(name, arguments)
    assert not result.is_error, result.content[0].text
    assert json.loads(result.content[0].text) == result.structured_content
    return result.structured_content


async def refused(client: Client, name: str, **arguments: Any) -> str:
    result: Any = await client.call_tool(name, arguments)
    assert result.is_error, result.content[0].text
    return str(result.content[0].text)
