"""What a fork server imports on a machine without a free process: its forks fail."""

import errno
import os
from typing import NoReturn


def _fail() -> NoReturn:
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


os.fork = _fail
