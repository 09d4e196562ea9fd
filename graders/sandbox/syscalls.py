"""Build the seccomp filter that allow-lists the system calls of a grader. All others return EPERM."""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterable
from typing import NamedTuple

_X86_64 = {
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8,
    "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14,
    "rt_sigreturn": 15, "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "pipe": 22,
    "select": 23, "sched_yield": 24, "mremap": 25, "madvise": 28, "dup": 32, "dup2": 33, "pause": 34,
    "nanosleep": 35, "getitimer": 36, "alarm": 37, "setitimer": 38, "getpid": 39, "exit": 60, "uname": 63,
    "fsync": 74, "fdatasync": 75, "ftruncate": 77, "getdents": 78, "getcwd": 79, "rename": 82,
    "mkdir": 83, "rmdir": 84, "unlink": 87, "readlink": 89, "umask": 95, "gettimeofday": 96, "getrusage": 98,
    "sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108,
    "getppid": 110, "sigaltstack": 131, "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204,
    "getdents64": 217, "set_tid_address": 218, "restart_syscall": 219, "fadvise64": 221,
    "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231, "mbind": 237,
    "openat": 257, "mkdirat": 258, "newfstatat": 262, "unlinkat": 263, "renameat": 264, "readlinkat": 267,
    "faccessat": 269, "pselect6": 270, "ppoll": 271, "set_robust_list": 273, "dup3": 292, "pipe2": 293,
    "preadv": 295, "renameat2": 316, "getrandom": 318, "membarrier": 324, "statx": 332, "rseq": 334,
    "faccessat2": 439,
}  # fmt: skip
_AARCH64 = {
    "getcwd": 17, "dup": 23, "dup3": 24, "mkdirat": 34, "unlinkat": 35, "renameat": 38,
    "ftruncate": 46, "faccessat": 48, "openat": 56, "close": 57, "pipe2": 59, "getdents64": 61, "lseek": 62,
    "read": 63, "write": 64, "readv": 65, "writev": 66, "pread64": 67, "pwrite64": 68, "preadv": 69,
    "pselect6": 72, "ppoll": 73, "readlinkat": 78, "newfstatat": 79, "fstat": 80, "fsync": 82,
    "fdatasync": 83, "exit": 93, "exit_group": 94, "set_tid_address": 96, "futex": 98,
    "set_robust_list": 99, "nanosleep": 101, "getitimer": 102, "setitimer": 103, "clock_gettime": 113,
    "clock_getres": 114, "clock_nanosleep": 115, "sched_getaffinity": 123, "sched_yield": 124,
    "restart_syscall": 128, "sigaltstack": 132, "rt_sigaction": 134, "rt_sigprocmask": 135,
    "rt_sigreturn": 139, "times": 153, "uname": 160, "getrusage": 165, "umask": 166, "gettimeofday": 169,
    "getpid": 172, "getppid": 173, "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177,
    "gettid": 178, "sysinfo": 179, "brk": 214, "munmap": 215, "mremap": 216, "mmap": 222, "fadvise64": 223,
    "mprotect": 226, "madvise": 233, "mbind": 235, "renameat2": 276, "getrandom": 278, "membarrier": 283,
    "statx": 291, "rseq": 293, "faccessat2": 439,
}  # fmt: skip


class SyscallTable(NamedTuple):
    """The system calls of one architecture.

    Attributes:
        arch: AUDIT_ARCH_* of the kernel.
        allowed: Numbers of the calls that are allowed with any arguments, by name.
        clone, ioctl, fcntl: Numbers of the calls that are allowed with certain arguments only.
    """

    arch: int
    allowed: dict[str, int]
    clone: int
    ioctl: int
    fcntl: int


TABLES = {
    "x86_64": SyscallTable(0xC000003E, _X86_64, clone=56, ioctl=16, fcntl=72),
    "aarch64": SyscallTable(0xC00000B7, _AARCH64, clone=220, ioctl=29, fcntl=25),
}

_CLONE3 = 435  # takes its flags by pointer, which a filter cannot dereference; glibc falls back to clone
_CLONE_THREAD = 0x00010000
# TCGETS, FIONCLEX, FIOCLEX, FIONREAD: used by open() and isatty()
_IOCTLS = (0x5401, 0x5450, 0x5451, 0x541B)
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC. Excluded: F_SETOWN and F_SETSIG, which make the kernel send any
# signal to any process of the user; locks, leases and F_NOTIFY, which are a channel between graders via shared files.
_FCNTLS = (0, 1, 2, 3, 1030)
_F_SETFL = 4
_O_ASYNC = 0x2000  # signals to the owner
_X32_BIT = 0x40000000

_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# Offsets into struct seccomp_data; the low half of an argument comes first on both machines.
_NUMBER, _ARCH, _ARG0, _ARG1, _ARG2 = 0, 4, 16, 24, 32

_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand
_REFUSE: _Instruction = (_RETURN, 0, 0, _ERRNO | errno.EPERM)


def grader_filter(machine: str = "") -> bytes:
    """Build the filter for `machine` (default: this one) as classic BPF. Raises OSError for an unknown architecture.

    The filter blocks sockets, new processes (but not threads), exec, signals, ptrace and privilege escalation.
    """
    machine = machine or platform.machine()
    if machine not in TABLES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine!r}")
    table = TABLES[machine]
    program = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, table.arch),
        (
            _RETURN,
            0,
            0,
            _KILL,
        ),  # 32-bit calls have different numbers: an allowed number would be a different call
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _KILL),
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        *_call(table.clone, [(_LOAD, 0, 0, _ARG0), *_allow(_ANY_BIT, _CLONE_THREAD)]),
        *_call(table.ioctl, [(_LOAD, 0, 0, _ARG1), *_allow_each(_IOCTLS)]),
        *_call(table.fcntl, [(_LOAD, 0, 0, _ARG1), *_allow_each(_FCNTLS), *_SET_FLAGS]),
        *_allow_each(sorted(table.allowed.values())),
        _REFUSE,
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _call(number: int, body: list[_Instruction]) -> list[_Instruction]:
    """Filter one call by its arguments: return EPERM unless `body` allows it."""
    return [(_EQUAL, 0, len(body) + 1, number), *body, _REFUSE]


def _allow(test: int, operand: int) -> list[_Instruction]:
    return [(test, 0, 1, operand), (_RETURN, 0, 0, _ALLOW)]


def _allow_each(values: Iterable[int]) -> list[_Instruction]:
    return [instruction for value in values for instruction in _allow(_EQUAL, value)]


_SET_FLAGS: list[_Instruction] = [
    (_EQUAL, 0, 3, _F_SETFL),
    (_LOAD, 0, 0, _ARG2),
    (_ANY_BIT, 1, 0, _O_ASYNC),
    (_RETURN, 0, 0, _ALLOW),
]
