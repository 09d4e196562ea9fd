"""Checks of the database, the broker and the blob store."""

from sqlalchemy import select
from sqlalchemy.exc import DBAPIError

from core.database.engine import READ_ONLY, db_now
from core.database.migrate import InvalidDatabaseUrl, SchemaNotReady, backend_of, open_unchanged
from core.jobs.queue import open_celery
from core.masking import hide_secrets
from core.storage import self_test
from core.storage.store import blobs_of
from worker.doctor.check import Diagnosis, check, failed, ok, skipped, warning
from worker.doctor.host import Host

CLOCK_SECONDS = 5.0  # as the reconciler (worker/supervisor/reconciler.py), which takes more for a jump


@check("database", "services", remedy="REGRAFT_DATABASE_URL: see the text; docs/howto/operations.md")
def database(host: Host) -> Diagnosis:
    """The database answers, has this version's schema and accepts writes."""
    url = host.settings.database
    try:
        opened = open_unchanged(url)
    except InvalidDatabaseUrl as invalid:
        return failed(f"REGRAFT_DATABASE_URL: {invalid}")
    except SchemaNotReady as cause:
        return warning(
            str(cause), "the first start creates it: `regraft-server up`, or `regraft-server migrate`"
        )
    except DBAPIError as cause:
        return failed(str(cause.orig).strip().partition("\n")[0])
    try:
        return (
            ok(f"{backend_of(url)}, with this version's schema")
            if opened.accepts_writes()
            else failed(READ_ONLY)
        )
    finally:
        opened.close()


@check("clock", "services", remedy="synchronize the clocks of all machines (chrony, systemd-timesyncd)")
def clock(host: Host) -> Diagnosis:
    """This machine's clock is the database's: leases, links and logs compare them."""
    if backend_of(host.settings.database) == "sqlite":
        return skipped("SQLite has this machine's clock")
    opened = open_unchanged(host.settings.database)
    try:
        with opened.read() as session:
            started = host.clock()
            theirs = session.scalar(select(db_now())) or 0.0
            ours = (started + host.clock()) / 2
    finally:
        opened.close()
    text = f"{ours - theirs:+.2f} s from the database's"
    return ok(text) if abs(ours - theirs) <= CLOCK_SECONDS else failed(text)


@check(
    "broker", "services", remedy="REGRAFT_BROKER_URL: start Redis there, and check address, password and TLS"
)
def broker(host: Host) -> Diagnosis:
    """The broker answers."""
    if host.settings.embedded:
        return skipped("memory://: inside the one process of `up`")
    app = open_celery(host.settings.broker_url, host.settings.gpu_class)
    with app.connection_for_write() as connection:
        connection.ensure_connection(max_retries=0, timeout=5)
    return ok(hide_secrets(host.settings.broker_url))


@check("blob store", "services", remedy="REGRAFT_BLOB_URL and its credentials: docs/howto/storage.md")
def blob_store(host: Host) -> Diagnosis:
    """The store keeps a small object and one in parts, with the checksums that the service sends."""
    blobs = blobs_of(host.settings, attempts=1)
    result = self_test.self_test(blobs, self_test.new_key())
    if result.cause is not None:
        return failed(f"{result.action} fails: {result.cause}", result.setting(host.settings) or "")
    result = self_test.in_parts(blobs, self_test.new_key())
    if result.cause is not None:
        return failed(
            f"an object in parts: {result.action} fails: {result.cause}",
            "REGRAFT_S3_CHECKSUMS=when_required is for stores without checksums",
        )
    shown = hide_secrets(host.settings.blobs)
    if result.undeleted is not None:
        return warning(f"{shown}, which deletes nothing: {result.undeleted}", "allow s3:DeleteObject")
    return ok(f"{shown}: an object and one in parts, read back")
