"""Where webhooks may go: to the public internet, wherever a name may point by now, and where the operator says."""

import asyncio
import datetime
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import example, given, settings
from hypothesis import strategies as st

from core.outbound.http import Outgoing, Unreachable, UrlNotAllowed
from tests.hooks import Receiver
from tests.present import untyped
from tests.servers import reserve_port


def pointing_to(*addresses: str) -> Callable[..., list[str]]:
    """A name server that gives these for every name."""
    return lambda host: list(addresses)


def post(outgoing: Outgoing, url: str, body: bytes = b"{}", **headers: Any) -> int:
    return asyncio.run(outgoing.post(url, body, headers))


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "fd00::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "2002:7f00:1::",
        "64:ff9b::10.0.0.1",
        "64:ff9b::169.254.169.254",
        "64:ff9b:1::1",
        "168.63.129.16",
        "192.0.0.192",
        "192.0.0.9",
        "192.88.99.1",
        "100.100.100.200",
        "198.18.0.1",
        "203.0.113.1",
        "240.0.0.1",
        "::127.0.0.1",
        "::8.8.8.8",
        "::ffff:0:127.0.0.1",
        "2001::1",
        "2001:db8::1",
        "2002:808:808::",
        "3fff::1",
        "5f00::1",
        "fec0::1",
        "fd00:ec2::254",
        "4000::1",
    ],
)
def test_a_name_with_an_address_that_is_not_public_is_refused(address: str) -> None:
    for addresses in [(address,), ("8.8.8.8", address)]:
        with pytest.raises(UrlNotAllowed, match=r"not on the public internet|link-local or cloud-metadata"):
            Outgoing(resolve=pointing_to(*addresses)).check("https://hooks.example/x")


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"])
def test_a_name_with_a_public_address_is_not(address: str) -> None:
    Outgoing(resolve=pointing_to(address)).check("https://hooks.example/x")


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost/",
        "http://127.1/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0177.0.0.1/",
        "http://[::1]:8000/",
        "http://[::ffff:7f00:1]/",
    ],
)
def test_no_spelling_of_this_machine_gets_through(url: str) -> None:
    with pytest.raises(UrlNotAllowed):
        Outgoing().check(url)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://8.8.8.8/", "https://"),
        ("8.8.8.8/hook", "https://"),
        ("https:///hook", "https://"),
        ("https://user:pass@8.8.8.8/", "password"),
        ("https://8.8.8.8/a\nb", "not a URL"),
        ("https://8.8.8.8:99999/", "not a URL"),
        ("https://hooks.invalid/", "no address"),
        (f"https://{'a' * 70}.example/", "no address|not a URL"),
        ("http://xn--/", "not a URL"),
        ("http://xn--a/", "not a URL"),
        ("http://xn--a.example:80/", "not a URL"),
        ("http://\u2024\u2024/", "not a URL"),
        ("http://a\u0300\u200d.example/", "not a URL"),
    ],
)
def test_what_cannot_be_sent_to_is_refused_with_the_reason(url: str, why: str) -> None:
    def resolve(host: str) -> list[Any]:
        if host == "8.8.8.8":
            return [host]
        raise socket.gaierror("not known")

    with pytest.raises(UrlNotAllowed, match=why):
        Outgoing(resolve=resolve).check(url)


def test_a_name_that_points_elsewhere_by_now_is_refused_when_it_is_used() -> None:
    answers = [["8.8.8.8"], ["127.0.0.1"]]
    with Receiver() as receiver:
        outgoing = Outgoing(resolve=lambda host: answers.pop(0))
        url = f"http://hooks.example:{receiver.port}/"
        outgoing.check(url)

        with pytest.raises(UrlNotAllowed):
            post(outgoing, url)

    assert receiver.received == []


def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    asked = []

    def resolve(host: str) -> list[Any]:
        asked.append(host)
        return ["127.0.0.1"]

    with Receiver() as receiver:
        outgoing = Outgoing(("hooks.internal",), resolve)
        # Nobody but `resolve` knows this name: asking again would fail.
        status = post(outgoing, f"http://hooks.internal:{receiver.port}/a?b=c")

    [received] = receiver.received
    assert (status, asked) == (200, ["hooks.internal"])
    assert received.path == "/a?b=c"
    assert received.headers["host"] == f"hooks.internal:{receiver.port}"


def test_only_the_private_hosts_that_the_operator_names_are_let_through() -> None:
    outgoing = Outgoing(("*.internal",), pointing_to("10.0.0.1"))

    outgoing.check("http://hooks.internal/")
    with pytest.raises(UrlNotAllowed):
        outgoing.check("http://internal.example/")


def test_a_private_name_does_not_lead_to_the_metadata_of_the_cloud() -> None:
    outgoing = Outgoing(("*.internal", "169.254.169.254"), pointing_to("169.254.169.254"))

    with pytest.raises(UrlNotAllowed, match="as a literal IP address only"):
        outgoing.check("http://metadata.google.internal/")
    outgoing.check("http://169.254.169.254/")  # the operator has listed the address itself


LABEL = st.one_of(
    st.text(max_size=12),
    st.text(alphabet="abz019-", max_size=12).map(lambda tail: f"xn--{tail}"),
    st.text(alphabet="aäß\u0131\u0130漢字\u0640\u200c\u200d\u0300\u3002\uff0e\ud7ff", max_size=8),
)
HOST = st.lists(LABEL, min_size=1, max_size=4).map(".".join)


@given(host=HOST, scheme=st.sampled_from(["http", "https"]), port=st.sampled_from([":1", ":0", ":99999"]))
@example(host="xn--", scheme="http", port=":1")
@example(host="xn--a", scheme="http", port=":1")
@example(host="xn--a.xn--", scheme="https", port=":1")
@settings(max_examples=50, deadline=None)
def test_whatever_the_host_is_called_it_is_sent_to_or_refused(host: Any, scheme: Any, port: Any) -> None:
    url = f"{scheme}://{host}{port}/x"
    # What `socket.getaddrinfo` does with a name before it asks anybody; nobody listens at port 1.
    outgoing = Outgoing(("*",), lambda name: ["127.0.0.1" if name.encode("idna") else ""], timeout_s=5.0)
    try:
        outgoing.check(url)
    except UrlNotAllowed as refused:
        assert str(refused)
    else:
        with pytest.raises(Unreachable):
            post(outgoing, url)


@pytest.mark.parametrize("host", ["xn--bcher-kva.example", "b\xfccher.example", "A.EXAMPLE"])
def test_an_international_name_is_sent_to_in_ascii(host: str) -> None:
    with Receiver() as receiver:
        outgoing = Outgoing(("*",), pointing_to("127.0.0.1"))

        assert post(outgoing, f"http://{host}:{receiver.port}/") == 200

    assert receiver.received[0].headers["host"].isascii()


def test_the_next_address_is_tried_when_nobody_listens_at_the_first() -> None:
    with Receiver() as receiver:
        outgoing = Outgoing(("hooks.internal",), pointing_to("127.0.0.2", "127.0.0.1"))

        assert post(outgoing, f"http://hooks.internal:{receiver.port}/") == 200


def test_a_redirect_is_an_answer_and_is_not_followed() -> None:
    with Receiver([302]) as receiver:
        assert post(Outgoing(("127.0.0.1",)), receiver.url) == 302

    assert [one.path for one in receiver.received] == ["/"]


def test_nothing_but_what_it_was_given_is_sent_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")

    with Receiver() as receiver:
        post(Outgoing(("127.0.0.1",)), receiver.url, **untyped({"webhook-id": "wh_1"}))

    [received] = receiver.received
    assert "authorization" not in received.headers and "cookie" not in received.headers
    assert received.headers["webhook-id"] == "wh_1"


@pytest.mark.slow
def test_who_does_not_answer_in_time_is_unreachable() -> None:
    with Receiver([0]) as receiver, pytest.raises(Unreachable, match=r"no response within 0\.2 seconds"):
        post(Outgoing(("127.0.0.1",), timeout_s=0.2), receiver.url)

    assert len(receiver.received) == 1


@pytest.mark.slow
def test_an_answer_that_trickles_in_does_not_take_longer_than_one_that_hangs() -> None:
    done = threading.Event()

    def trickle(listener: Any) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\n")
            while not done.wait(0.02):
                connection.sendall(b"x: y\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=trickle, args=[listener])
        thread.start()
        with pytest.raises(Unreachable, match="no response within"):
            post(Outgoing(("127.0.0.1",), timeout_s=0.3), f"http://127.0.0.1:{listener.getsockname()[1]}/")
        done.set()
        thread.join()


def test_nobody_listening_is_unreachable() -> None:
    with pytest.raises(Unreachable):
        post(Outgoing(("127.0.0.1",)), f"http://127.0.0.1:{reserve_port()}/")


@pytest.fixture
def tls(tmp_path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A certificate for hooks.internal: the side that shows it, and the side that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hooks.internal")])
    today = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("hooks.internal")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path / "hooks.pem"
    file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(file)
    return server, ssl.create_default_context(cafile=file)


def test_https_asks_for_the_certificate_of_the_name_and_not_of_the_address(
    tls: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    server, trusting = tls
    with Receiver(tls=server) as receiver:
        resolve = pointing_to("127.0.0.1")
        outgoing = Outgoing(("*.internal",), resolve, lambda: trusting)

        assert post(outgoing, f"https://hooks.internal:{receiver.port}/") == 200
        with pytest.raises(Unreachable, match=r"(?i)certificate"):
            post(outgoing, f"https://other.internal:{receiver.port}/")

    assert len(receiver.received) == 1
