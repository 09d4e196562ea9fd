"""How the broker is reached."""

import ssl

import pytest

from core.queue import open_celery


@pytest.mark.parametrize(
    ("url", "checked"),
    [
        ("rediss://redis.example.com:6379/0", ssl.CERT_REQUIRED),
        ("rediss://redis.example.com:6379/0?ssl_cert_reqs=none", ssl.CERT_NONE),
    ],
)
def test_the_certificate_of_an_encrypted_broker_is_checked_unless_its_url_says_otherwise(url, checked):
    """kombu's own default is to check none, and to warn."""
    with open_celery(url, "cpu").connection() as connection:
        assert connection.ssl == {"ssl_cert_reqs": checked}


@pytest.mark.parametrize("url", ["redis://redis.example.com:6379/0", "memory://"])
def test_a_broker_without_encryption_is_asked_for_none(url):
    with open_celery(url, "cpu").connection() as connection:
        assert not connection.ssl
