"""HTTP requests to external servers: webhooks, endpoint graders and judges.

All of them use one client. It resolves the name, checks every address against one table, connects to a checked address,
and ignores the environment: no proxy, no .netrc, no redirect.
"""

import asyncio
import fnmatch
import ipaddress
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import httpx

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Credentials of the machine itself. A name never resolves to these, even if the operator lists it as private:
# `*.internal` would include Google's metadata.google.internal. The operator can list the address itself.
_METADATA: tuple[tuple[str, str], ...] = (
    ("168.63.129.16/32", "Azure's WireServer"),
    ("169.254.0.0/16", "link-local, with the metadata services of most clouds"),
    ("192.0.0.192/32", "Oracle Cloud's metadata service"),
    ("100.100.100.200/32", "Alibaba Cloud's metadata service"),
    ("fd00:ec2::/32", "AWS's services for instances"),
    ("fd20:ce::254/128", "Google Cloud's metadata service"),
    ("fe80::/10", "link-local"),
)
# IANA's registries of special addresses as a fixed table: the addresses that `ipaddress` calls global depend on the
# Python version (3.11.9 and 3.11.10 differ), and cloud providers use addresses outside these registries.
_NOT_PUBLIC: tuple[tuple[str, str], ...] = (
    ("0.0.0.0/8", "this host (RFC 791)"),
    ("10.0.0.0/8", "private (RFC 1918)"),
    ("100.64.0.0/10", "shared by a provider's customers (RFC 6598)"),
    ("127.0.0.0/8", "loopback (RFC 1122)"),
    ("172.16.0.0/12", "private (RFC 1918)"),
    ("192.0.0.0/24", "protocol assignments (RFC 6890)"),
    ("192.0.2.0/24", "documentation (RFC 5737)"),
    ("192.31.196.0/24", "AS112 (RFC 7535)"),
    ("192.52.193.0/24", "AMT relays (RFC 7450)"),
    ("192.88.99.0/24", "6to4 relays, deprecated (RFC 7526)"),
    ("192.168.0.0/16", "private (RFC 1918)"),
    ("192.175.48.0/24", "AS112 (RFC 7534)"),
    ("198.18.0.0/15", "benchmarks (RFC 2544)"),
    ("198.51.100.0/24", "documentation (RFC 5737)"),
    ("203.0.113.0/24", "documentation (RFC 5737)"),
    ("224.0.0.0/4", "multicast (RFC 5771)"),
    ("240.0.0.0/4", "reserved and broadcast (RFC 1112)"),
    ("::/96", "unspecified, loopback and IPv4-compatible (RFC 4291)"),
    ("::ffff:0:0:0/96", "IPv4-translated, SIIT (RFC 2765)"),
    ("64:ff9b:1::/48", "translation within one network (RFC 8215)"),
    ("100::/64", "discard only (RFC 6666)"),
    ("100:0:0:1::/64", "dummy prefix (RFC 9780)"),
    ("2001::/23", "protocol assignments, Teredo and ORCHID among them (RFC 2928)"),
    ("2001:db8::/32", "documentation (RFC 3849)"),
    ("2002::/16", "6to4 (RFC 3056), which may lead to any IPv4 address"),
    ("2620:4f:8000::/48", "AS112 (RFC 7534)"),
    ("3fff::/20", "documentation (RFC 9637)"),
    ("5f00::/16", "segment routing (RFC 9602)"),
    ("fc00::/7", "private (RFC 4193)"),
    ("fec0::/10", "site-local, deprecated (RFC 3879)"),
    ("ff00::/8", "multicast (RFC 4291)"),
)
# IPv6 addresses that embed an IPv4 address in their last 32 bits are checked as that address.
_IPV4_IN_IPV6 = (ipaddress.IPv6Network("::ffff:0:0/96"), ipaddress.IPv6Network("64:ff9b::/96"))
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")


def is_passing(status: int) -> bool:
    """Whether another server's HTTP status says that a repetition may succeed."""
    return status in (408, 425, 429) or status >= 500


def is_away(status: int) -> bool:
    """Whether the status is that of a server which is unavailable: it stops, or a proxy does not reach it.

    It may also be a server's own answer to one request: where that matters, see whether the body is in its format.
    """
    return status in (502, 503, 504)


class UrlNotAllowed(Exception):
    """A disallowed URL; the message is for its author."""


class NoAddress(UrlNotAllowed):
    """The name does not resolve now; it may later."""


class Unreachable(Exception):
    """No response."""


def resolve_host(host: str) -> Sequence[str]:
    """Resolve a host name to all of its addresses, in the order to try them."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # slower than a request, so created only once


def trusted_client() -> httpx.AsyncClient:
    """A client for URLs from the operator's configuration, without address checks. It reuses connections.

    Ignores the environment: no proxy, no .netrc. The caller limits the connections.
    """
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(verify=_tls(), trust_env=False, follow_redirects=False, limits=limits)


@dataclass(frozen=True)
class Outgoing:
    """Sends to public addresses, and to hosts that the operator allows regardless of their address.

    Args:
        private_hosts: Host names and addresses as in a URL; `*` matches any run of characters.
        setting: Name of the setting that lists them, for messages.
        timeout_s: Limit of a `post`, from the DNS lookup to the response.
    """

    private_hosts: Sequence[str] = ()
    resolve: Callable[[str], Sequence[str]] = resolve_host
    tls: Callable[[], ssl.SSLContext] = _tls
    timeout_s: float = 10.0
    setting: str = "REGRAFT_WEBHOOK_PRIVATE_HOSTS"

    def check(self, url: str) -> None:
        """Raise Refused unless `post` would currently send to this URL. Resolves the name, so it may block."""
        self.addresses(parse(url))

    def client(self) -> httpx.AsyncClient:
        """A client that checks each request and connects to a checked address.

        Its requests raise Refused in addition to httpx's errors. Connections are not reused: names that share an
        address
        must not share a connection, whose certificate was verified for the first name.
        """
        transport = _Checked(
            self, httpx.AsyncHTTPTransport(verify=self.tls(), trust_env=False, limits=_KEEP_NONE)
        )
        return httpx.AsyncClient(transport=transport, trust_env=False, follow_redirects=False)

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> int:
        """Send a request and return the status of the response, whose body is not read. Redirects are not followed.

        Raises:
            Refused: see `check`. The host is checked again here, since DNS may have changed.
            Unreachable: no connection, or no response within `timeout_s` in total.
        """
        parse(url)
        timeout = httpx.Timeout(
            self.timeout_s, connect=self.timeout_s / 2
        )  # leaves time to try another address
        try:
            async with asyncio.timeout(self.timeout_s), self.client() as client:
                request = client.build_request("POST", url, content=body, headers=headers, timeout=timeout)
                answer = await client.send(request, stream=True)
                await answer.aclose()
                return answer.status_code
        except TimeoutError:
            raise Unreachable(f"no response within {self.timeout_s:g} seconds") from None
        except (httpx.HTTPError, httpx.InvalidURL) as cause:
            raise Unreachable(str(cause) or type(cause).__name__) from cause

    def addresses(self, target: httpx.URL) -> Sequence[str]:
        """Resolve the host of the URL to all of its addresses.

        Raises:
            Refused: it does not resolve, or an address is neither public nor allowed.
        """
        host = host_of(target)
        try:
            addresses = self.resolve(host)
        except (OSError, ValueError) as cause:  # UnicodeError is a ValueError
            raise NoAddress(f"the host '{host}' has no address ({cause})") from cause
        if not addresses:
            raise NoAddress(f"the host '{host}' has no address")
        for address in addresses:
            self._check_address(host, ipaddress.ip_address(address))
        return addresses

    def _check_address(self, host: str, address: Address) -> None:
        if special(address, _METADATA) is not None:
            if is_address(host) and host in self.private_hosts:
                return
            raise UrlNotAllowed(
                f"'{host}' resolves to a link-local or cloud-metadata address. {self.setting} accepts such a host as a "
                "literal IP address only"
            )
        if not is_public(address) and not matches(host, self.private_hosts):
            raise UrlNotAllowed(
                f"the host '{host}' is not on the public internet. The operator of this service can allow it in "
                f"{self.setting}"
            )


_KEEP_NONE = httpx.Limits(max_keepalive_connections=0)


class _Checked(httpx.AsyncBaseTransport):
    """Sends each request to a checked address of its host, trying one after the other."""

    def __init__(self, outgoing: Outgoing, inner: httpx.AsyncBaseTransport) -> None:
        self._outgoing = outgoing
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        target = request.url
        addresses = await asyncio.to_thread(self._outgoing.addresses, target)
        for number, address in enumerate(addresses, 1):
            to_address = httpx.Request(
                request.method,
                target.copy_with(host=address),
                headers=request.headers,  # with the name in `host`
                stream=request.stream,
                # Verify the certificate for the name, not for the address.
                extensions={**request.extensions, "sni_hostname": host_of(target)},
            )
            try:
                return await self._inner.handle_async_request(to_address)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if number == len(addresses):
                    raise
        raise AssertionError("a name that resolves has an address")

    async def aclose(self) -> None:
        await self._inner.aclose()


def parse(url: str) -> httpx.URL:
    """Parse the URL with httpx, so that the checked URL is the one that is used.

    Raises:
        Refused: it is not an http or https URL, or contains credentials.
    """
    try:
        parsed = httpx.URL(url)
        # httpx decodes A-labels ("xn--…") on sending, and fails there on invalid ones.
        host, port = parsed.host, parsed.port
    except (httpx.InvalidURL, ValueError) as invalid:  # UnicodeError is a ValueError
        raise UrlNotAllowed(f"it is not a URL: {invalid}") from None
    if parsed.scheme not in ("https", "http") or not host:
        raise UrlNotAllowed("expected a URL that starts with https:// or http://")
    if port is not None and not 0 < port < 65536:
        raise UrlNotAllowed(f"it is not a URL: {port} is not a port")
    if parsed.userinfo:
        raise UrlNotAllowed("it must not contain a user name or password")
    return parsed


def host_of(url: httpx.URL) -> str:
    """The host in ASCII, as it is resolved: international names as A-labels, IPv6 addresses without brackets."""
    return url.raw_host.decode("ascii").lower()


def matches(host: str, patterns: Sequence[str]) -> bool:
    """Whether an ASCII host matches one of the names and addresses, in which `*` matches any run of characters."""
    return any(fnmatch.fnmatchcase(host, pattern.lower()) for pattern in patterns)


def is_public(address: Address) -> bool:
    """Whether the address is globally reachable and belongs to a server."""
    if isinstance(address, ipaddress.IPv6Address):
        if any(address in network for network in _IPV4_IN_IPV6):
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address not in _GLOBAL_UNICAST:
            return False
    return special(address, _NOT_PUBLIC) is None and special(address, _METADATA) is None


def special(address: Address, table: tuple[tuple[str, str], ...]) -> str | None:
    """The description of the network in the table that contains the address or its embedded IPv4 address, or None."""
    if isinstance(address, ipaddress.IPv6Address) and any(address in network for network in _IPV4_IN_IPV6):
        address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return next((reason for network, reason in _networks(table) if address in network), None)


@lru_cache
def _networks(table: tuple[tuple[str, str], ...]) -> tuple[tuple[Network, str], ...]:
    return tuple((ipaddress.ip_network(network), reason) for network, reason in table)


def is_address(host: str) -> bool:
    """Whether a host is an IP address rather than a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
