"""The sandbox layers: each is an irreversible call that takes effect or raises OSError. Pure ctypes."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

NOBODY = 65534
SCOPES = 6  # the first version of Landlock that scopes signals: Linux 6.12
NICE = 10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x40000000
_CLONE_NEWPID = 0x20000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same on all architectures
_READ_FILE, _READ_DIR, _TRUNCATE = 1 << 2, 1 << 3, 1 << 14
# write_file, remove_dir, remove_file, make_dir, make_reg, and renames from one folder to another; no links, sockets,
# pipes or devices
_MODIFY = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 13


def no_new_privs() -> None:
    """Disable privilege escalation by set-uid programs; the kernel requires it for seccomp."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def first_to_be_killed() -> None:
    """Make this process and its forks the first victims of the OOM killer. Needs no privileges."""
    with suppress(OSError):  # /proc is missing or read-only
        Path("/proc/self/oom_score_adj").write_text("1000")


def low_priority() -> None:
    """Lower the priority below the service's threads. Needs no privileges, and has no cost on an idle core."""
    os.nice(NICE)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def private_processes() -> None:
    """Make the next fork the first process of a new PID namespace, which ends with that process. Needs root.

    Processes in the namespace have no PIDs of processes outside, and cannot signal the first one inside.
    """
    _checked(_libc.unshare(_CLONE_NEWPID))


def die_with(parent: int) -> None:
    """Kill this process when its parent ends. Call it after a change of uid, which resets it.

    `parent` is 0 if it is outside of this process's PID namespace. The kernel watches the thread that forked this
    process and not the whole parent, so that thread must outlive this process.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(0)


def undumpable() -> None:
    """Disable core dumps, and access to this process's memory by other processes of the same user."""
    _prctl(_PR_SET_DUMPABLE, 0)


def become_nobody() -> None:
    become(NOBODY)


def become(user: int) -> None:
    """Drop all groups, then root. Call it before a user namespace, in which the mapped user would still be root."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def rlimits(memory: int, cpu_s: int, file_bytes: int, threads: int | None = None) -> None:
    """Set resource limits. The memory limit is per process, which suffices because seccomp forbids new processes.

    `threads` counts all threads of the user, so pass it only if the user has no other process.
    """
    for what, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_NPROC, threads),
        (resource.RLIMIT_CORE, 0),
    ):
        if limit is None:
            continue
        hard = resource.getrlimit(what)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (limit, limit))


def seccomp(program: bytes) -> None:
    """Load a filter made by graders.sandbox.syscalls. Needs no_new_privs."""
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.create_string_buffer(header, len(header)))


def applied(apply: Callable[[], object], is_turned_off: bool) -> str:
    """Apply a layer of the sandbox, and return why it is missing; empty: it is there."""
    if is_turned_off:
        return "turned off"
    try:
        apply()
    except OSError as cause:
        return str(cause) or type(cause).__name__
    return ""


def landlock_version() -> int:
    """Return the kernel's Landlock ABI version. Raises OSError if Landlock is missing or disabled."""
    return _checked(_libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))


def landlock(readable: Iterable[str], listed: Iterable[str] = ()) -> None:
    """Restrict file access to these files and folders, as in `ruleset`. Needs no_new_privs."""
    made = ruleset(readable, listed=listed)
    try:
        restrict(made)
    finally:
        os.close(made)


def restrict(ruleset: int) -> None:
    """Restrict this process to a ruleset, in addition to earlier ones."""
    _checked(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0))


def ruleset(
    readable: Iterable[str], writable: Iterable[str] = (), listed: Iterable[str] = (), scoped: bool = True
) -> int:
    """Create a Landlock ruleset that allows access to these files and folders only, and return its descriptor.

    Args:
        readable: Files and folders that can be read.
        writable: Folders that can be read and modified.
        listed: Folders whose entries can be listed. Only entries that are also `readable` can be read.
        scoped: Block signals to processes outside, if the Landlock version is SCOPES or later.
    """
    version = landlock_version()
    files = (1 << 13) - 1
    files |= 1 << 13 if version >= 2 else 0
    files |= _TRUNCATE if version >= 3 else 0
    files |= 1 << 15 if version >= 5 else 0
    network = 3 if version >= 4 else 0  # bind and connect
    scopes = 3 if version >= SCOPES and scoped else 0  # abstract sockets and signals
    size = 24 if version >= SCOPES else 16 if version >= 4 else 8
    attributes = struct.pack("=QQQ", files, network, scopes)[:size]
    made = _checked(_libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), 0))
    try:
        for path in readable:
            _allow(made, path, _READ_FILE | _READ_DIR)
        for path in listed:
            _allow(made, path, _READ_DIR)
        for path in writable:
            _allow(made, path, (_READ_FILE | _READ_DIR | _MODIFY | _TRUNCATE) & files)
    except BaseException:
        os.close(made)
        raise
    return made


def private_root(
    readable: Iterable[str],
    scratch: str = "",
    scratch_bytes: int = 0,
    user: int = NOBODY,
    root: str = "/proc",
) -> None:
    """Enter new mount, network, IPC and UTS namespaces whose root has only `readable`, read-only. Needs root.

    Files in a folder that the next user cannot enter on the host, such as a home directory, are accessible here.
    `root` is the mount point of the new root: any folder that contains nothing `readable`. /proc always exists.
    """
    _checked(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS))
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID, "mode=755,size=1m")
    for path in readable:
        _bind(path, root + path)
    if scratch:
        Path(root + scratch).mkdir(parents=True)
        # noexec also prevents the loader from mapping a shared object that the grader wrote.
        options = f"mode=700,uid={user},gid={user},size={scratch_bytes},nr_inodes=1024"
        _mount("tmpfs", root + scratch, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, options)
    os.chdir(root)
    _checked(_libc.syscall(_PIVOT_ROOT[platform.machine()], b".", b"."))
    _checked(_libc.umount2(b".", _MNT_DETACH))
    os.chdir("/")
    _mount(None, "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID)


def _bind(path: str, target: str) -> None:
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    if Path(path).is_symlink():  # such as /lib on most systems
        Path(target).symlink_to(Path(path).readlink())
        return
    if Path(path).is_dir():
        Path(target).mkdir(exist_ok=True)
    else:
        Path(target).touch()
    _mount(path, target, None, _MS_BIND)
    _mount(None, target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID)


def _allow(ruleset: int, path: str, access: int) -> None:
    if Path(path).is_symlink() and Path(path).is_dir():
        return  # such as /lib: a rule for the link would allow all of its target folder
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return  # a missing or inaccessible path needs no rule
    try:
        access = access if Path(path).is_dir() else access & _READ_FILE
        rule = struct.pack("=Qi", access, opened)
        _checked(_libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0))
    finally:
        os.close(opened)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    _checked(_libc.mount(*encoded, ctypes.c_ulong(flags), options.encode()))


def _prctl(option: int, value: object, argument: object = 0) -> None:
    words = [ctypes.c_ulong(word) if isinstance(word, int) else word for word in (value, argument, 0, 0)]
    _checked(_libc.prctl(option, *words))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno() or errno.EIO
        raise OSError(number, os.strerror(number))
    return result
