"""Hosts, ports and URLs as operators write them."""

import re
import socket
from ipaddress import IPv6Address
from pathlib import Path
from typing import Annotated, NamedTuple, Self
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


class HostPort(NamedTuple):
    """A host, without brackets, and a port. `str` has the brackets that an IPv6 address needs beside a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `host:port` or `[address]:port`.

        Raises:
            ValueError: it is neither, or the port is not between 1 and 65535.
        """
        host, colon, port = text.rpartition(":")
        if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError("must be host:port, with a port between 1 and 65535")
        if ":" in host and "/" not in host and not host.startswith("["):
            raise ValueError("write an IPv6 address in brackets: [fd00::7]:2950")
        return cls(plain_host(host), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def plain_host(text: str) -> str:
    """Return a host name or an address without the brackets of an IPv6 address. Raises ValueError if it is neither."""
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        IPv6Address(host)
    except ValueError:
        if host != text or not _NAME.fullmatch(host):
            raise ValueError("must be a host name or an address, without scheme and port") from None
    return host


def check_host_and_port(url: str) -> None:
    """Raise ValueError unless a URL has a host, and a port only of 1 to 65535. The message has nothing of the URL."""
    authority = re.split("[/?#]", url.partition("://")[2])[0]
    address = authority.rpartition("@")[2]
    if ":" in address and not address.endswith("]"):
        HostPort.parse(address)
    else:
        plain_host(address)


def check_http_url(url: str) -> None:
    """Raise PydanticCustomError unless this is a URL of HTTP whose host and port a client can use."""
    if not re.fullmatch(r"https?://[^\s/]+\S*", url):
        raise PydanticCustomError("url", "must be a URL such as http://host:8100")
    try:
        check_host_and_port(url)
    except ValueError as problem:
        raise PydanticCustomError("url", "{problem}", {"problem": f"host and port: {problem}"}) from None


def _http_url(url: str) -> str:
    check_http_url(url)
    return url


HttpUrl = Annotated[str, AfterValidator(_http_url)]
HttpUrlOrEmpty = Annotated[str, AfterValidator(lambda url: url and _http_url(url))]


def check_path(path: str | Path) -> None:
    """Raise ValueError for a path that only a shell would expand: the service would create a folder of that name."""
    if re.match(r"~|.*\$[A-Za-z_{(]", str(path)):
        raise ValueError("only a shell expands ~ and $: write the whole path")


def check_folder_or_url(text: str) -> None:
    """Raise ValueError for a URL without its slashes, such as `s3:/bucket`, and for what `check_path` refuses."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:(?!//)", text):
        raise ValueError("has a scheme without ://, as in s3://bucket/prefix or file:///folder")
    check_path(text.partition("://")[2] or text)


def family_of(host: str) -> socket.AddressFamily:
    """The address family of a socket that listens on `host`."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def check_is_meant(text: str) -> None:
    """Raise for a value that no setting has, but that other tools write. The message omits it: it may be a key."""
    if text.endswith("\r"):
        problem = "ends with a carriage return, as in a file with Windows line ends: sed -i 's/\\r$//' FILE"
    elif any(ord(char) < 32 or ord(char) == 127 for char in text):
        problem = (
            "has a line feed or another control character; `echo` adds one to a Secret, `printf` does not"
        )
    elif text != text.strip():
        problem = "begins or ends with white space"
    elif len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        problem = "is in quotes, which are a part of the value here; remove them"
    elif text.startswith("tcp://"):
        problem = (
            "is a Kubernetes Service link in the setting's place: set enableServiceLinks: false for the pod"
        )
    else:
        return
    raise PydanticCustomError("not_meant", "{problem}", {"problem": problem})


def check_is_escaped(url: str) -> None:
    """Raise ValueError if the password in a URL is not percent-encoded. The message has nothing of it."""
    user, at, _ = url.partition("://")[2].rpartition("@")
    if at and re.search(r"[/?#@\[\]\s]", user):
        raise ValueError(
            "percent-encode the password: @ is %40, / is %2F, # is %23, ? is %3F, [ is %5B and ] is %5D"
        )


# The options of rediss:// that both clients, redis-py and kombu, take and read alike, with the values of each.
TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_TLS_OPTIONS = {
    **dict.fromkeys(TLS_FILES, ".+"),
    "ssl_cert_reqs": "required|optional|none",
    "ssl_check_hostname": "true|false",
}


def check_redis_url(url: str) -> None:
    """Raise ValueError if a URL of Redis has no usable host, port or number of a database, or an unusable option.

    Unusable is an option that one of the clients refuses or ignores.
    """
    check_host_and_port(url)
    parts = urlsplit(url)
    if not re.fullmatch(r"/?\d{0,9}", parts.path):
        raise ValueError("the path must be the number of a database, as in redis://host:6379/0")
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _TLS_OPTIONS:
            raise ValueError(f"has the unknown option {name!r}; the options are {', '.join(_TLS_OPTIONS)}")
        if parts.scheme != "rediss":
            raise ValueError(f"{name} needs rediss://, which is Redis with TLS")
        if not re.fullmatch(_TLS_OPTIONS[name], value):
            allowed = "a file" if name in TLS_FILES else _TLS_OPTIONS[name].replace("|", ", ")
            raise ValueError(f"{name} must be {allowed}")


def tls_files(url: str) -> dict[str, str]:
    """The files that the options of a URL of Redis name, by option."""
    return {name: value for name, value in parse_qsl(urlsplit(url).query) if name in TLS_FILES}
