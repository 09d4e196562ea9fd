"""HTTP requests to addresses that users name, which must not reach what only this machine can."""

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

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class Refused(Exception):
    """A URL we do not send to; the message is for whoever gave it."""


class Unreachable(Exception):
    """There was no answer."""


def _resolve(host: str) -> Sequence[str]:
    """Every address of a host name, those to try first in front."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # takes longer than a request, so not once a request


@dataclass(frozen=True)
class Outgoing:
    """Leave to send to public addresses, and to the `private_hosts` that the operator names (`*` is any run of
    characters), wherever those are."""

    private_hosts: Sequence[str] = ()
    resolve: Callable[[str], Sequence[str]] = _resolve
    tls: Callable[[], ssl.SSLContext] = _tls
    timeout_s: float = 10.0

    def check(self, url: str) -> None:
        """Raise Refused unless `post` would send to this URL now. Asks a name server, so it may take a while."""
        self._addresses(_parsed(url))

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> int:
        """The status of the answer, whose body is not read. A redirect is an answer; it is not followed.

        Raises:
            Refused: see `check`. It is asked again here, and the connection goes to an address that was checked:
                a name may point elsewhere by now.
            Unreachable: no connection, or no answer within `timeout_s` of all.
        """
        target = _parsed(url)
        try:
            async with asyncio.timeout(self.timeout_s):
                addresses = await asyncio.to_thread(self._addresses, target)
                return await self._post_to_first(addresses, target, body, headers)
        except TimeoutError:
            raise Unreachable(f"no answer within {self.timeout_s:g} seconds") from None
        except (httpx.HTTPError, httpx.InvalidURL) as cause:
            raise Unreachable(str(cause) or type(cause).__name__) from cause

    async def _post_to_first(
        self, addresses: Sequence[str], target: httpx.URL, body: bytes, headers: Mapping[str, str]
    ) -> int:
        timeout = httpx.Timeout(self.timeout_s, connect=self.timeout_s / 2)  # leaves time for another address
        # trust_env would bring in proxies, which resolve names themselves, and passwords from a .netrc.
        async with httpx.AsyncClient(verify=self.tls(), trust_env=False, timeout=timeout) as client:
            for number, address in enumerate(addresses, 1):
                request = client.build_request(
                    "POST",
                    target.copy_with(host=address),
                    content=body,
                    headers={**headers, "host": target.netloc.decode()},
                    # The certificate must be that of the name, not of the address.
                    extensions={"sni_hostname": target.raw_host.decode()},
                )
                try:
                    answer = await client.send(request, stream=True)
                except (httpx.ConnectError, httpx.ConnectTimeout):
                    if number == len(addresses):
                        raise
                    continue
                await answer.aclose()
                return answer.status_code
        raise AssertionError("a name that resolves has an address")

    def _addresses(self, target: httpx.URL) -> Sequence[str]:
        host = target.raw_host.decode()
        try:
            addresses = self.resolve(host)
        except (OSError, UnicodeError) as cause:
            raise Refused(f"the host '{host}' has no address ({cause})") from cause
        allowed = any(fnmatch.fnmatchcase(host, pattern) for pattern in self.private_hosts)
        if not allowed and not all(_is_public(ipaddress.ip_address(address)) for address in addresses):
            raise Refused(
                f"the host '{host}' is not on the public internet. Whoever runs this service can allow it in "
                "REGRAFT_WEBHOOK_PRIVATE_HOSTS"
            )
        return addresses


def _parsed(url: str) -> httpx.URL:
    """httpx's own reading of the URL, so that what is checked is what is connected to."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as invalid:
        raise Refused(f"it is no URL: {invalid}") from None
    if parsed.scheme not in ("https", "http") or not parsed.host:
        raise Refused("expected a URL that starts with https:// or http://")
    if parsed.port is not None and not 0 < parsed.port < 65536:
        raise Refused(f"it is no URL: there is no port {parsed.port}")
    if parsed.userinfo:
        raise Refused("it must not hold a user name or password; deliveries are signed")
    return parsed


def _is_public(address: Address) -> bool:
    """Reachable by everybody. An IPv6 address that stands for an IPv4 one is judged by that."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return _is_public(inner)
    return address.is_global and not address.is_multicast
