"""What a hostile author might try: what the code does, and what has to come of it.

As a program (`python -m tests.graders.attacks FOLDER`, as root) it becomes an unprivileged service without any
capability first, as in a restricted pod, and prints how each attack ended there.
"""

import json
import os
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from graders.sandbox import lockdown
from graders.sandbox.pool import GradeOutcome, Pool, SandboxFailed, SandboxLimits
from tests.graders import packages
from tests.present import untyped

ROOT = Path(__file__).parents[2]
SECRET = "hunter2-of-the-service"
LIMITS = SandboxLimits(wall_s=20, memory=192 << 20, file_bytes=1 << 20, threads=64, scratch_bytes=4 << 20)

DENIED = "Operation not permitted|Permission denied"
UNSEEN = f"{DENIED}|No such file|Not a directory"
FULL = "No space left|File too large"
STOPPED = ("timeout",)
# For those about time. All others have long enough for a machine that is busy with something else.
SHORT = replace(LIMITS, wall_s=1)
# A busy machine may not give an honest grade its turn in that time. What an attack has broken stays broken.
TRIES = 20


@dataclass(frozen=True)
class Attack:
    """`code` is a function body with `sample` and `item`. `kinds` and `says` (a pattern) are how it may end."""

    code: str
    kinds: tuple[str, ...]
    says: str = ""

    @property
    def source(self) -> str:
        """A grader that attacks if the row tells it to and is right otherwise: the next grade shows the damage."""
        body = textwrap.indent(textwrap.dedent(self.code).strip(), "    ")
        return (
            f"def attack(sample, item):\n{body}\n\ndef grade(sample, item):\n"
            "    if item.get('attack'):\n        return attack(sample, item)\n"
            "    return float(sample['output_text'] == '42')\n"
        )


class Pools:
    """One for attacks that are to run out of time, and one for all others."""

    def __init__(self, **kwargs: Any) -> None:
        self.long, self.short = Pool(LIMITS, size=1, **kwargs), Pool(SHORT, size=1, **kwargs)

    def close(self) -> None:
        self.long.close()
        self.short.close()


def denied(code: str, says: str = DENIED) -> Attack:
    return Attack(code, ("user_error",), says)


def stopped(code: str, says: str, kind: str) -> Attack:
    """Refused by the kernel, or ended by the sandbox where it counts itself."""
    return Attack(code, ("user_error", kind), f"{says}|it started more than")


def in_scratch(code: str, says: str) -> Attack:
    return Attack(code, ("user_error", "scratch_limit"), f"{says}|wrote more than")


RAW = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
CHECK = "\nif result != 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))\nreturn 1"

ATTACKS: dict[str, Attack] = {
    # the network
    "open a socket": denied("import socket; socket.create_connection(('127.0.0.1', 80))"),
    "send a datagram": denied("import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)"),
    "resolve a name": denied(
        "import socket; socket.getaddrinfo('example.com', 80)", f"{DENIED}|name resolution|not known"
    ),
    "connect to an abstract unix socket": denied(
        "import socket; socket.socket(socket.AF_UNIX).connect('\\0service')"
    ),
    "make a socket pair": denied("import socket; socket.socketpair()"),
    # files
    "read /etc/passwd": denied("open('/etc/passwd').read()", UNSEEN),
    "read /etc/shadow": denied("open('/etc/shadow').read()", UNSEEN),
    "read the environment of process 1": denied("open('/proc/1/environ').read()", UNSEEN),
    "read the environment of its parent": denied(
        "import os; open(f'/proc/{os.getppid()}/environ').read()", UNSEEN
    ),
    "look into its own /proc": denied("open('/proc/self/maps').read()", UNSEEN),
    "list all processes": denied("import os; os.listdir('/proc')", UNSEEN),
    "list the root folder": denied("import os; os.listdir('/')", UNSEEN),
    "read the service's database": denied("open(item['database']).read()", UNSEEN),
    "climb to the service's database": denied("open('../../../../../..' + item['database']).read()", UNSEEN),
    "change the service's database": denied("open(item['database'], 'w')", UNSEEN + "|Read-only"),
    "find a secret in the environment": denied(
        "import os; raise ValueError(f'seen: {dict(os.environ)}')", r"seen: \{"
    ),
    "find a secret in memory by the garbage collector": denied(
        f"import gc\nhits = [o for o in gc.get_objects() if isinstance(o, dict) and {SECRET[:7]!r} + 'x' in o]\n"
        "raise ValueError(f'seen: {hits}')",
        r"seen: \[\]",
    ),
    "write outside its scratch": denied("open('/tmp/mark', 'w')", UNSEEN + "|Read-only"),
    "write into the standard library": denied("import json; open(json.__file__, 'w')", UNSEEN + "|Read-only"),
    "write to /dev/shm": denied("open('/dev/shm/mark', 'w')", UNSEEN + "|Read-only"),
    "make a file in memory": denied("import os; os.memfd_create('x')"),
    "fill the disk with one file": in_scratch(
        "f = open('big', 'wb')\nwhile True: f.write(b'x' * 65536)", FULL
    ),
    "fill the disk with many files": in_scratch(
        "for n in range(1000): open(str(n), 'wb').write(b'x' * 65536)", FULL
    ),
    "use up all inodes": in_scratch("for n in range(10**6): open(str(n), 'w').close()", FULL),
    "leave a deep tree behind": in_scratch(
        "import os\npath = '.'\nfor n in range(10**6):\n    path += '/d'\n    os.mkdir(path)",
        FULL + "|File name too long",
    ),
    "load a shared object from scratch": in_scratch(
        "import ctypes, _ctypes\nopen('x.so', 'wb').write(open(_ctypes.__file__, 'rb').read())\n"
        "ctypes.CDLL('./x.so')",
        "failed to map|Operation not permitted|cannot open",
    ),
    "point a link out of its scratch": in_scratch("import os; os.symlink('/etc/passwd', 'x')", DENIED),
    "make a hard link to a library": in_scratch("import os, json; os.link(json.__file__, 'x')", DENIED),
    "rename a library into scratch": in_scratch(
        "import os, json; os.rename(json.__file__, 'x')", f"{DENIED}|cross-device|Read-only"
    ),
    # processes
    "fork": denied("import os\nwhile True: os.fork()"),
    "bomb with threads": stopped(
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "can't start new thread",
        "thread_limit",
    ),
    "start a process pool": denied(
        "import multiprocessing as m; m.Pool(4)", UNSEEN + "|not implemented|Errno"
    ),
    "exec /bin/sh": denied("import os; os.execv('/bin/sh', ['sh', '-c', 'true'])", UNSEEN),
    "spawn a shell": denied("import subprocess; subprocess.run(['/bin/sh', '-c', 'id'], check=True)", UNSEEN),
    "become a daemon": denied("import os; os.setsid()"),
    "kill its parent": denied("import os, signal; os.kill(os.getppid(), signal.SIGKILL)"),
    "kill everyone": denied("import os, signal; os.kill(-1, signal.SIGKILL)"),
    "send a signal to process 1": denied("import os; os.kill(1, 15)"),
    "have the kernel kill its parent": denied(
        "import fcntl, os\nread, write = os.pipe()\nfcntl.fcntl(read, fcntl.F_SETOWN, os.getppid())"
    ),
    "ask for signals about a pipe": denied(
        "import fcntl, os\nread, write = os.pipe()\nfcntl.fcntl(read, fcntl.F_SETFL, os.O_NONBLOCK)\n"
        "fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC)"
    ),
    "lock a library for another grader to see": denied(
        "import fcntl, json\nfcntl.lockf(open(json.__file__), fcntl.LOCK_SH | fcntl.LOCK_NB, 7, 3)"
    ),
    "use any other command of fcntl": denied(
        "import fcntl, os\nread, write = os.pipe()\nallowed = []\n"
        "for command in {*range(64), *range(1024, 1088)} - {0, 1, 2, 3, 4, 1030}:\n"
        "    try: allowed.append((command, fcntl.fcntl(read, command, 0)))\n"
        "    except OSError as cause:\n        if cause.errno != 1: allowed.append((command, cause))\n"
        "raise ValueError(f'allowed: {allowed}')",
        r"allowed: \[\]",
    ),
    "trace its parent": denied(f"{RAW}result = libc.ptrace(16, os.getppid(), 0, 0){CHECK}"),
    "read its parent's memory": denied(
        f"{RAW}result = libc.process_vm_readv(os.getppid(), None, 0, None, 0, 0){CHECK}"
    ),
    "become root": denied("import os; os.setuid(0)"),
    "change its groups": denied("import os; os.setgroups([0])"),
    "raise its own limits": denied(
        "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (999, 999))", f"{DENIED}|not allowed"
    ),
    "limit another process": denied(
        "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))"
    ),
    "make namespaces": denied(f"{RAW}result = libc.unshare(0x10000000){CHECK}"),
    "mount": denied(f"{RAW}result = libc.mount(b'none', b'/', b'tmpfs', 0, None){CHECK}"),
    "leave by chroot": denied("import os; os.chroot('/')"),
    "load a BPF program": denied(
        f"{RAW}result = libc.syscall(321 if os.uname()[4] == 'x86_64' else 280){CHECK}"
    ),
    "set up io_uring": denied(f"{RAW}result = libc.syscall(425, 8, None){CHECK}"),
    "open a socket by its number": denied(
        f"{RAW}result = libc.syscall(41 if os.uname()[4] == 'x86_64' else 198, 2, 1, 0){CHECK}"
    ),
    "fork by clone3": denied(
        f"{RAW}result = libc.syscall(435, (ctypes.c_uint64 * 8)(), 64){CHECK}", "not implemented"
    ),
    "push text into the terminal": denied("import fcntl; fcntl.ioctl(1, 0x5412, b'x')"),
    "use the numbers of x32": Attack(
        f"{RAW}libc.syscall(0x40000000 + 41, 2, 1, 0)\nreturn 1", ("crash",), "signal 31"
    ),
    # resources
    "bomb with memory": Attack("x = []\nwhile True: x.append(bytearray(1 << 24))", ("memory",), "memory"),
    "unpack a zip bomb": Attack(
        "import zlib\npacker, chunk, bomb = zlib.compressobj(), bytes(1 << 20), []\n"
        "for _ in range(100): bomb.append(packer.compress(chunk))\n"
        "inner = b''.join(bomb) + packer.flush()\n"
        "return len([zlib.decompress(inner) for _ in range(40)])",
        ("memory", "timeout"),
    ),
    "make a number too large to compute": Attack("return len(str(9 ** 9 ** 9))", ("timeout", "memory")),
    "loop for ever": Attack("while True: pass", STOPPED),
    "sleep past the limit": Attack("import time; time.sleep(100)", STOPPED),
    "ignore SIGTERM": Attack(
        "import signal, time\n"
        "for n in set(range(1, 32)) - {9, 19}: signal.signal(n, signal.SIG_IGN)\ntime.sleep(100)",
        STOPPED,
    ),
    "block every signal": Attack(
        "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\ntime.sleep(100)",
        STOPPED,
    ),
    "catch the timeout": Attack(
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass", STOPPED
    ),
    "hide in a regular expression": Attack(
        "import re; return bool(re.match('(a+)+$', 'a' * 40 + 'b'))", STOPPED
    ),
    "close its pipes and stay": Attack("import os\nos.closerange(0, 30)\nwhile True: pass", STOPPED),
    "print a gigabyte": Attack(
        "for _ in range(1 << 14): print('x' * 65536)\nreturn 1", ("output_limit",), "too much output"
    ),
    "write a gigabyte to stderr": Attack(
        "import os\nwhile True: os.write(2, b'x' * 65536)", ("output_limit",), "too much output"
    ),
    "write a gigabyte as the result": Attack(
        "import os\nwhile True: os.write(3, b'x' * 65536)", ("output_limit",)
    ),
    "raise with a huge message": denied("raise ValueError('x' * (1 << 24))", "x{100}"),
    "raise what cannot be shown": denied(
        "class E(Exception):\n    def __str__(self): raise E\nraise E", "str\\(\\) failed|could not be shown"
    ),
    "recurse without end": denied("def f(): f()\nf()", "RecursionError"),
    "recurse without a limit": Attack(
        "import sys\nsys.setrecursionlimit(1 << 30)\nclass A:\n    def __getattr__(self, n): return getattr(self, n)\n"
        "A().x",
        ("crash", "memory", "timeout"),
    ),
    "crash the interpreter": Attack("import ctypes; ctypes.string_at(0)", ("crash",), "signal 11"),
    "leave by os._exit": Attack("import os; os._exit(0)", ("crash",), "without a grade"),
    "leave with a status": Attack("import os; os._exit(7)", ("crash",), "status 7"),
    "leave by sys.exit": denied("import sys; sys.exit(0)", "SystemExit"),
    # the score
    "return NaN": Attack("return float('nan')", ("bad_result",), "finite"),
    "return infinity": Attack("return -float('inf')", ("bad_result",), "finite"),
    "return a huge integer": Attack("return 10 ** 400", ("bad_result",), "above 1e\\+15"),
    "return a string": Attack("return '1.0'", ("bad_result",), "not str"),
    "return nothing": Attack("return None", ("bad_result",), "not NoneType"),
    "return an object with a hostile __float__": Attack(
        "class X:\n    def __float__(self):\n        while True: pass\nreturn X()", ("bad_result",), "not X"
    ),
    "return a float that lies": Attack(
        "class X(float):\n    def __float__(self): return float('nan')\nreturn X(1)", ("bad_result",), "not X"
    ),
    "forge the result on every descriptor": Attack(
        "import os\nfor fd in range(64):\n"
        "    try: os.write(fd, b'{\"score\": 9.0}\\n')\n    except OSError: pass\nreturn 1",
        ("bad_result",),
    ),
    "blame the service": Attack(
        "import json, os\nfor fd in range(3, 32):\n"
        "    try: os.write(fd, json.dumps({'error': 'sandbox', 'text': 'ours'}).encode())\n"
        "    except OSError: pass\nos._exit(0)",
        ("bad_result",),
        "not one that grade",
    ),
    "say that a layer failed": Attack(
        "import os\nfor fd in range(3, 32):\n"
        "    try: os.write(fd, b'a layer failed: ours')\n    except OSError: pass\nos._exit(0)",
        ("bad_result",),
        "not one that grade",
    ),
    "forge an infinite result": Attack(
        "import os\nos.write(3, b'{\"score\": 1e999}')\nos._exit(0)", ("bad_result",)
    ),
    "forge a deeply nested result": Attack(
        "import os\nos.write(3, b'[' * 60000)\nos._exit(0)", ("bad_result",)
    ),
    "return steps that never end": Attack(
        "return {'score': 1, 'steps': [{'end': 1, 'score': 1}] * 10 ** 6}", ("bad_result",), "at most 256"
    ),
    "return steps with hostile keys": Attack(
        "class K:\n    def __hash__(self): return hash('score')\n"
        "    def __eq__(self, other):\n        while True: pass\n"
        "return {'steps': [{K(): 1, 'end': 1}], 'score': 1}",
        ("bad_result",),
        "step 0",
    ),
    "return a dict with hostile keys": Attack(
        "class K(str):\n    __hash__ = str.__hash__\n    def __eq__(self, other):\n        while True: pass\n"
        "return {K('score'): 1, 'steps': []}",
        ("bad_result",),
        "'score' and 'steps'",
    ),
    "forge too many steps": Attack(
        "import json, os\nsteps = [{'end': n, 'score': 1.0} for n in range(1, 400)]\n"
        "os.write(3, json.dumps({'score': 1.0, 'steps': steps}).encode())\nos._exit(0)",
        ("bad_result",),
    ),
    "forge a step that is infinitely good": Attack(
        'import os\nos.write(3, b\'{"score": 1.0, "steps": [{"end": 1, "score": 1e999}]}\')\nos._exit(0)',
        ("bad_result",),
    ),
    "forge a step beyond the text": Attack(
        'import os\nos.write(3, b\'{"score": 1.0, "steps": [{"end": 999, "score": 1.0}]}\')\nos._exit(0)',
        ("bad_result",),
    ),
    # the next grade
    "patch the builtins": Attack(
        "import builtins, json, os\nbuiltins.float = builtins.isinstance = lambda *a: 0.123\n"
        "json.dumps = lambda *a: '{\"score\": 7.0}'\nos.fork = None\nreturn 1",
        ("ok", "bad_result", "user_error"),
    ),
    "change the sample": Attack("sample.clear(); item.clear(); return 0.5", ("ok",)),
    "leave threads behind": Attack(
        "import threading\ndef spin():\n    while True: pass\n"
        "for _ in range(4): threading.Thread(target=spin).start()\nreturn 0.5",
        ("ok",),
    ),
    "leave work for the exit": Attack(
        "import atexit, time\natexit.register(time.sleep, 100)\nreturn 0.5", ("ok",)
    ),
    "leave a file for the next": Attack("open('left', 'w').write('x'); return 0.5", ("ok",)),
    "reach the runner by its frames": Attack(
        "import sys\nframe = sys._getframe()\nwhile frame:\n    frame.f_globals.clear()\n    frame = frame.f_back\n"
        "return 1",
        ("user_error", "crash", "ok"),
    ),
}


def run(pools: Pools, attack: Attack, database: str) -> tuple[GradeOutcome, GradeOutcome]:
    """How the attack ended, and how the honest grade after it did, by the same source."""
    sample = {"output_text": "42"}
    row = {"attack": True, "database": database}
    pool = pools.short if "timeout" in attack.kinds else pools.long
    attacked, honest = (pool.submit(attack.source, sample, item).result() for item in (row, {}))
    tries = TRIES
    while honest.kind == "timeout" and (tries := tries - 1):
        honest = pool.submit(attack.source, sample, {}).result()
    return attacked, honest


def drop_rights(folder: str) -> None:
    """Become a service without rights. It has /proc and a temporary folder, as a pod has."""
    environment = Path(sys.executable).parents[1].resolve()
    system = [
        "/proc",
        "/lib",
        "/lib64",
        "/usr/lib",
        "/usr/lib64",
        "/dev/null",
        "/etc/ld.so.cache",
        "/etc/passwd",
    ]
    seen = [*system, sys.base_prefix, str(environment), str(ROOT), folder]
    lockdown.private_root(
        sorted({path for path in seen if Path(path).exists()}, key=len),
        "/writable",
        64 << 20,
        root="/sys",
    )
    tempfile.tempdir = "/writable"
    lockdown.become_nobody()
    lockdown.no_new_privs()


def unprivileged(folder: str) -> Iterator[tuple[str, list[dict[str, object]]]]:
    """Every attack on a service without rights."""
    drop_rights(folder)
    pools = Pools()
    yield "layers", [untyped(pools.long.layers())]
    for name, attack in ATTACKS.items():
        try:
            ends = run(pools, attack, f"{folder}/regraft.db")
            yield name, [asdict(end) for end in ends]
        except SandboxFailed as failed:
            yield name, [{"kind": f"SandboxFailed: {failed}"}]
    pools.close()
    pool = Pool(size=1)
    for name in packages.USES:
        yield name, [asdict(pool.submit(packages.SOURCE, {}, {"package": name}).result())]
    pool.close()
    yield "left behind", [{"name": path.name} for path in Path("/writable").iterdir()]


if __name__ == "__main__":
    os.environ["REGRAFT_SECRET"] = SECRET
    print(json.dumps(dict(unprivileged(sys.argv[1]))))  # noqa: T201 - a script: the test reads what it prints
