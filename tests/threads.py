"""A system that has no other thread for a while."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_free_thread() -> Iterator[None]:
    """No thread can be started during the context: its stack would be larger than the address space."""
    usual = threading.stack_size(1 << 47)
    try:
        yield
    finally:
        threading.stack_size(usual)
