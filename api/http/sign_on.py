"""The user that a trusted proxy names in a header, for sessions of the console.

Only the address of the connection itself counts, not the one in X-Forwarded-For: a client that reaches the API without
the proxy could claim any. The header must be there once: a proxy that adds its own to that of a client has let the
client's through, and the service cannot tell which of the two is the proxy's.
"""

import logging
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from core.database.tables import ApiKey
from core.errors import InvalidApiKey
from core.settings import Settings
from core.tenancy import single_sign_on
from core.tenancy.single_sign_on import MAX_USER, Rule

log = logging.getLogger(__name__)

PEER = "regraft.peer"


class RecordPeer:
    """Records the address of the connection before the middleware inside changes it to that of X-Forwarded-For."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            client = scope.get("client")
            scope[PEER] = client[0] if client else None
        await self.app(scope, receive, send)


def behind_proxies(app: ASGIApp, forwarded_allow_ips: list[str] | str) -> ASGIApp:
    """The application as a server serves it: X-Forwarded-For and -Proto of these addresses are believed."""
    forwarded: Any = ProxyHeadersMiddleware(app, trusted_hosts=forwarded_allow_ips)  # type: ignore[arg-type]
    return RecordPeer(forwarded)


@dataclass(frozen=True)
class Identity:
    """A user that a proxy has authenticated, and the rule that applies."""

    user: str
    rule: Rule


def identify(request: Request, settings: Settings) -> Identity:
    """The user that the proxy names.

    Raises:
        InvalidApiKey: single sign-on is off, the request does not come from a trusted proxy, it does not name one user,
            or no rule applies to that user.
    """
    if not settings.sso_header:
        raise InvalidApiKey("Single sign-on is off here. Log in with an API key.")
    peer = request.scope.get(PEER)
    if not single_sign_on.is_trusted(peer, settings.sso_proxies):
        if settings.sso_header in request.headers:
            log.warning("%s names a user in %s and is no trusted proxy", peer, settings.sso_header)
        raise InvalidApiKey("This request did not come through the proxy of the single sign-on.")
    user = _only_header(request, settings.sso_header)
    groups: frozenset[str] = frozenset()
    if settings.sso_groups_header and settings.sso_groups_header in request.headers:
        listed = _only_header(request, settings.sso_groups_header, may_be_empty=True).split(",")
        groups = frozenset(name.strip() for name in listed if name.strip())
    if "," in user or len(user) > MAX_USER:
        raise InvalidApiKey(f"The proxy's header {settings.sso_header} does not name one user.")
    rule = single_sign_on.rule_for(settings.sso_rules, user, groups)
    if rule is None:
        raise InvalidApiKey(f"{user} has no access: the operator's rules for single sign-on name no project.")
    return Identity(user, rule)


def require_same_user(request: Request, settings: Settings, key: ApiKey) -> None:
    """Raise InvalidApiKey unless the proxy still names the user of the session, with the access that it began with."""
    if key.sso_user is None:
        return
    identity = identify(request, settings)
    rule = identity.rule
    if (identity.user, rule.project, rule.scope) != (key.sso_user, key.project_id, key.scope):
        raise InvalidApiKey("The session belongs to another user or another access. Log in again.")


def _only_header(request: Request, name: str, *, may_be_empty: bool = False) -> str:
    """The value of a header that the proxy must have set exactly once."""
    values = request.headers.getlist(name)
    if len(values) != 1:
        found = (
            "does not name a user"
            if not values
            else f"is there {len(values)} times; the proxy must replace it"
        )
        raise InvalidApiKey(f"The proxy's header {name} {found}.")
    try:
        value = values[0].encode("latin-1").decode().strip()
    except UnicodeDecodeError:
        raise InvalidApiKey(f"The proxy's header {name} is not UTF-8.") from None
    if not value.isprintable() or not (value or may_be_empty):
        raise InvalidApiKey(f"The proxy's header {name} is empty or has control characters.")
    return value
