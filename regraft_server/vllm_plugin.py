"""The entry points that vLLM loads in its processes, also in those of other users of this environment."""

import os
from typing import Any

ENGINE = "REGRAFT_ENGINE"  # in the environment of an engine's processes


def register() -> None:
    """Prepare a process of an engine of ours; nothing in any other, where `worker` may be another package."""
    if ENGINE not in os.environ:
        return
    from worker.engine.plugin import register as register_engine

    register_engine()


class NoRoutes:
    """Implements vLLM's EndpointPlugin, and adds nothing to a server. vLLM skips it, since no task requires it."""

    name = "regraft"
    required_tasks = ()

    def attach_router(self, app: Any) -> None:
        return None

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        return None


def routes() -> Any:
    """Return the plugin for vLLM's HTTP server: that of a server of ours, or one without routes in any other."""
    if ENGINE not in os.environ:
        return NoRoutes()
    from worker.engine.routes import Routes

    return Routes()
