"""`regraft-server backup` and `restore` (docs/howto/restore.md)."""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from core.masking import hide_secrets
from core.outages import Resource, outage
from core.settings import Settings
from core.storage import backup
from core.storage.store import setting_of
from core.system_errors import file_problem
from worker.cli.parser import UsageError
from worker.cli.service import configured, open_blobs_of, print_findings, refusing_database


def back_up(arguments: argparse.Namespace) -> int:
    settings = configured()
    folder = Path(arguments.folder).absolute()
    with _refusals(settings):
        made = backup.back_up(settings.database, open_blobs_of(settings), folder, time=time.time())
    print(
        f"{folder}: {sum(made.rows.values())} rows, {made.blobs} blobs of {made.size} bytes.", file=sys.stderr
    )
    return 0


def restore(arguments: argparse.Namespace) -> int:
    """Restore a backup. The exit status is 1 if `--verify` finds a difference or a damaged blob."""
    settings = configured()
    folder = Path(arguments.folder).absolute()
    blobs = open_blobs_of(settings)
    with _refusals(settings):
        manifest = backup.restore(folder, settings.database, blobs)
        taken = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest.time))
        print(f"Restored the backup of {taken}.", file=sys.stderr)
        if not arguments.verify:
            return 0
        different = backup.differences(manifest, settings.database, blobs)
    for line in different:
        print(line, flush=True)
    return max(print_findings(settings), int(bool(different)))


@contextmanager
def _refusals(settings: Settings) -> Iterator[None]:
    with refusing_database(settings):
        try:
            yield
        except backup.BackupFailed as refused:
            raise UsageError(str(refused)) from refused
        except OSError as cause:
            raise UsageError(file_problem(cause)) from cause
        except Exception as cause:  # of S3's library
            setting = setting_of(cause, settings)
            if setting is None and outage(cause) is not Resource.BLOB_STORE:
                raise
            raise UsageError(
                f"{setting or 'REGRAFT_BLOB_URL'}: {hide_secrets(settings.blobs)}: {cause}"
            ) from cause
