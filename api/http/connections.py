"""Limits of connections: the time in which a request's header must arrive, and a number per address.

A connection costs a descriptor before anything shows who its client is. uvicorn has no limit for either.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address, ip_network

from uvicorn.protocols.http.h11_impl import H11Protocol

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
