"""Limits of connections: the time in which a request's header must arrive, and a number per address.

A connection costs a descriptor before anything shows who its client is. uvicorn has no limit for either. All servers of
the service have both: API, inference, sampler and metrics.
"""

import asyncio
import logging
import os
import resource
from collections import Counter
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any

from uvicorn.middleware.proxy_headers import _TrustedHosts
from uvicorn.protocols.http.h11_impl import H11Protocol

from core.settings import Settings
from core.tenancy import single_sign_on

log = logging.getLogger(__name__)

HEADER_SECONDS = 15.0
_IPV6_NETWORK = 64  # bits of the network that one client has


class ConnectionLimit:
    """At most `most` connections of an address at once; 0: no limit. Everything runs in the event loop.

    Args:
        is_exempt: Whether an address is that of a trusted proxy, whose connections are those of many clients.
    """

    def __init__(self, most: int, is_exempt: Callable[[str], bool] = lambda address: False) -> None:
        self.most, self._is_exempt = most, is_exempt
        self._open: Counter[str] = Counter()
        self._refused: set[str] = set()  # named in the log once, until they have fewer

    def enter(self, address: str) -> bool:
        """Count a connection, or return False if its client has too many."""
        client = client_of(address)
        if self.most and self._open[client] >= self.most and not self._is_exempt(address):
            if client not in self._refused:
                self._refused.add(client)
                log.warning("%s has %d connections: further ones are closed", client, self.most)
            return False
        self._open[client] += 1
        return True

    def leave(self, address: str) -> None:
        client = client_of(address)
        self._refused.discard(client)
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]


def client_of(address: str) -> str:
    """The address that counts as one client: of IPv6 the network, from which a host takes any number of addresses."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if not isinstance(parsed, IPv6Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ip_network((int(parsed), _IPV6_NETWORK), strict=False))


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol with both limits. `limited` makes the class for a server."""

    limit: ConnectionLimit
    header_seconds: float
    _counted: str | None = None  # the address, if the limit counts it
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is not None:  # a Unix socket has no address
            if not self.limit.enter(self.client[0]):
                transport.abort()
                return
            self._counted = self.client[0]
        self._await_header()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()  # the header is complete
        elif self._timer is None:
            self._await_header()  # of the next request

    def on_response_complete(self) -> None:
        super().on_response_complete()
        buffered, _ = self.conn.trailing_data
        if buffered and self._timer is None and self.cycle.response_complete:
            self._await_header()  # of a next request that began to arrive before the response was complete

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._counted is not None:
            self.limit.leave(self._counted)
        super().connection_lost(exc)

    def _await_header(self) -> None:
        self._timer = self.loop.call_later(self.header_seconds, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def limited(limit: ConnectionLimit, header_seconds: float = HEADER_SECONDS) -> type[LimitedProtocol]:
    """The `http` of a uvicorn.Config."""
    return type("Limited", (LimitedProtocol,), {"limit": limit, "header_seconds": header_seconds})


def trusted_proxies(forwarded_allow_ips: list[str] | str, settings: Settings) -> Callable[[str], bool]:
    """Whether an address is that of a proxy: one whose X-Forwarded-For is believed, or one of the single sign-on."""
    forwarding = _TrustedHosts(forwarded_allow_ips)

    def is_proxy(address: str) -> bool:
        return address in forwarding or single_sign_on.is_trusted(address, settings.sso_proxies)

    return is_proxy


def connection_options(settings: Settings) -> dict[str, Any]:
    """The options of uvicorn.Config that all servers of the service share: its limits of connections.

    One address cannot use up the descriptors of the process.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(settings.connections_per_address, descriptors // 2)
    forwarded_allow_ips = os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1")  # as uvicorn reads it
    return {
        "http": limited(ConnectionLimit(most, trusted_proxies(forwarded_allow_ips, settings))),
        "timeout_keep_alive": settings.keep_alive_seconds,
    }
