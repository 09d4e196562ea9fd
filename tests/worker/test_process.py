"""Conventions between a process and its child."""

import gc
from contextlib import suppress

from worker.process import importing


def test_the_garbage_collector_rests_while_libraries_are_imported_and_passes_over_them_later() -> None:
    before = gc.get_freeze_count()
    library = [[object()] for _ in range(1000)]

    with importing():
        assert not gc.isenabled()

    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(library)


def test_a_failed_import_leaves_the_garbage_collector_on() -> None:
    with suppress(ImportError), importing():
        raise ImportError("no such library")

    assert gc.isenabled()
