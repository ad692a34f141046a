"""Attacks that a program may try against its sandbox, and things that it needs. The kernel must refuse each attack.

This module imports only the standard library and the sandbox, so that another user can also run it with another
interpreter::

    python -m tests.evaluation.sandbox.hostile    # one JSON object: program -> [as it should be, reason]
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

from sglang_kvq.evaluation import sandbox

#: The beginning of every attempt.
_HEAD = "import ctypes, glob, os, socket, stat\nlibc = ctypes.CDLL(None, use_errno=True)\n"
_CALL = """
def call(what, result):
    if result == -1:
        raise OSError(ctypes.get_errno(), what)
    return result
"""

#: Attempts that succeed in an ordinary process of the same user, as a control for the test itself. They end without an
#: OSError exactly if they reach their target.
SUCCEED_OUTSIDE = {
    "unix socket by path": "socket.socket(socket.AF_UNIX).connect({unix!r})",
    "unix socket by path, datagram pair": """
        one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        one.sendto(b"x", {unix_datagram!r})
    """,
    "unix socket, abstract": "socket.socket(socket.AF_UNIX).connect('\\0' + {abstract!r})",
    "tcp": "socket.create_connection(('127.0.0.1', {tcp}), timeout=2)",
    "udp": """
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        s.settimeout(1)
        s.sendto(b"x", ("127.0.0.1", {udp}))
        s.recv(1)
    """,
    "any socket at all": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "0600 file in the home directory": "open({home_secret!r}).read()",
    "0600 file in /tmp": "open({tmp_secret!r}).read()",
    "world-readable file": "open({readable!r}).read()",
    "name of a file": "os.stat({readable!r})",
    "/etc/passwd": "open('/etc/passwd').read()",
    "names in the home directory": "os.stat({home_secret!r})",
    "a shell": "open('/bin/sh', 'rb')",
    "parent in /proc": "os.listdir('/proc/{parent}')",
    "parent's environment": "open('/proc/{parent}/environ', 'rb').read()",
    "first process in /proc": "os.listdir('/proc/1')",
    "own processes in /proc": "os.listdir('/proc/self/fd')",
    "the machine in /sys": "os.listdir('/sys')",
    "signal to the parent": "os.kill({parent}, 0)",
    "write beside the evaluation": "open({folder!r} + '/escaped', 'w')",
    "write in /dev/shm": "open('/dev/shm/kvq_escaped', 'w'); os.remove('/dev/shm/kvq_escaped')",
    "write in /var/tmp": "open('/var/tmp/kvq_escaped', 'w'); os.remove('/var/tmp/kvq_escaped')",
    "devices beside null and urandom": "next(n for n in glob.iglob('/dev/*') if n[5:] not in ('null', 'urandom'))",
    "memory that no limit counts": "call('memfd_create', libc.syscall({memfd}, b'x', 0))",
    "shared memory of System V": "call('shmget', libc.shmget(0, 4096, 0o1600))",
    "message queue": "call('msgget', libc.msgget(0, 0o1600))",
    "a keyring of the user": "call('keyctl', libc.syscall({keyctl}, 0, -3, 0))",
}

#: Attempts that need root even outside the sandbox, or that would harm the machine if tried there.
NEVER_SUCCEED = {
    "/dev/sda": "open('/dev/sda', 'rb')",
    "the root disk": "os.mknod('disk', stat.S_IFBLK | 0o600, os.stat('/').st_dev); open('disk', 'rb')",
    "/dev/mem": "open('/dev/mem', 'rb')",
    "/dev/kmsg": "open('/dev/kmsg', 'rb')",
    "/dev/tty": "open('/dev/tty', 'rb')",
    "environment of the first process": "open('/proc/1/environ', 'rb').read()",
    "mount": "call('mount', libc.mount(b'none', b'/tmp', b'tmpfs', 0, b''))",
    "mount /proc": "os.mkdir('p'); call('mount', libc.mount(b'proc', b'/tmp/p', b'proc', 0, b''))",
    "make writable again": "call('mount', libc.mount(b'', b'/', b'', 32, b''))",
    "unmount": "call('umount', libc.umount2(b'/dev/null', 2))",
    "chroot and climb out": "os.mkdir('c'); os.chroot('c'); [os.chdir('..') for _ in range(64)]",
    "new user namespace": "call('unshare', libc.unshare(0x10000000))",
    "new user namespace by clone": "call('clone', libc.syscall({clone}, 0x10000000 | 17, 0, 0, 0, 0)) or os._exit(0)",
    "ptrace the parent": "call('ptrace', libc.ptrace(16, {parent}, 0, 0))",
    "ptrace the first process": "call('ptrace', libc.ptrace(16, 1, 0, 0))",
    "become root": "os.setuid(0)",
    "write into the standard library": "open(os.__file__, 'a')",
    "write at the root": "open('/escaped', 'w')",
    "write in /dev": "open('/dev/escaped', 'w')",
    "io_uring": "call('io_uring_setup', libc.syscall(425, 1, ctypes.create_string_buffer(120)))",
    "files beside the temporary folder's limit": """
        for n in range(10**6):
            open(f"{{n}}", "w").close()
            if n > 100000:
                break
    """,
    "a temporary folder beyond its size": "[open(str(n), 'wb').write(bytes(1 << 20)) for n in range(64)]",
}

#: Programs like those that models write for HumanEval; they pass.
ORDINARY = {
    "math": "import math; assert math.gcd(12, 18) == 6 and math.isclose(math.sqrt(2) ** 2, 2)",
    "re": "import re; assert re.findall(r'[aeiou]', 'sandbox') == ['a', 'o']",
    "collections": "from collections import Counter, deque; assert Counter('aab').most_common(1) == [('a', 2)]",
    "typing": "from typing import Any, Dict, List, Optional, Tuple\ndef f(a: List[int]) -> Optional[int]: ...",
    "hashlib": """
        import hashlib
        assert hashlib.md5(b'a').hexdigest() == '0cc175b9c0f1b6a831c399e269772661'
        assert len(hashlib.sha3_512(b'a').digest()) == 64
    """,
    "datetime": "import datetime; assert datetime.date(2024, 2, 29).weekday() == 3; datetime.datetime.now()",
    "functools": "import functools; assert functools.reduce(lambda a, b: a * b, range(1, 6)) == 120",
    "itertools": "import itertools; assert len(list(itertools.permutations(range(4)))) == 24",
    "random": "import random; assert 0 <= random.random() < 1 and random.SystemRandom().random() < 1",
    "string": "import string; assert string.ascii_lowercase[-1] == 'z'",
    "heapq": "import heapq; assert heapq.nsmallest(2, [3, 1, 2]) == [1, 2]",
    "bisect": "import bisect; assert bisect.bisect([1, 2, 3], 2) == 2",
    "copy": "import copy; a = [[1]]; assert copy.deepcopy(a)[0] is not a[0]",
    "extension modules": """
        import array, bz2, ctypes, decimal, fractions, json, lzma, sqlite3, statistics, struct, unicodedata, zlib
        assert zlib.decompress(zlib.compress(b'a')) == lzma.decompress(lzma.compress(b'a')) == b'a'
        assert decimal.Decimal('0.1') * 3 == decimal.Decimal('0.3')
    """,
    "text beyond ASCII": "print('\u00e4\u4e2d'); assert '\u00e4'.upper() == '\u00c4'",
    "a temporary file": "import tempfile; f = tempfile.TemporaryFile(); f.write(b'x')",
    "a thread": "import threading; t = threading.Thread(target=print); t.start(); t.join()",
    "a process": "import subprocess, sys; subprocess.run([sys.executable, '-I', '-c', ''], check=True)",
    "/dev/null": "open('/dev/null', 'w').write('x'); assert open('/dev/null').read() == ''",
    "no privileges": """
        import ctypes, os
        libc, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 6)()
        assert os.getuid() == os.geteuid() >= 61184 and os.getgid() >= 61184 and 0 not in os.getgroups()
        assert libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), sets) == 0 and not any(sets)
        assert not any(libc.prctl(23, c, 0, 0, 0) > 0 for c in range(64))  # PR_CAPBSET_READ
        assert libc.prctl(39, 0, 0, 0, 0) == 1  # PR_GET_NO_NEW_PRIVS
        assert libc.prctl(21, 0, 0, 0, 0) == 2  # PR_GET_SECCOMP: a filter
    """,
    "the loader's $ORIGIN": "import os, sys; assert os.readlink('/proc/self/exe') == sys.executable",
    "sixteen processes and no more": """
        import os, time
        n = 1
        try:
            while n < 64:
                if os.fork() == 0:
                    time.sleep(60)
                n += 1
        except BlockingIOError:
            pass
        assert 8 < n <= 16, n
        time.sleep(0.3)
    """,
    "no standard input, environment or other processes": """
        import os, sys
        assert sys.stdin.read() == '' and set(os.environ) <= {'LC_CTYPE'} and os.getppid() == 1
    """,
}

#: Ordinary programs that depend on their own process tree, so they run alone.
ALONE = ("sixteen processes and no more", "no standard input, environment or other processes")

#: Runs programs one after another as children of one process, each in an empty folder. Exit status 7 shows that a
#: program reached its end; 0 would not show it.
_TOGETHER = """
import os, shutil, sys, traceback
failed = {{}}
for name, text in {programs!r}.items():
    os.mkdir("its own")
    said = os.open("its own/said", os.O_CREAT | os.O_RDWR)
    child = os.fork()
    if child == 0:
        os.chdir("its own")
        os.dup2(said, 1)
        os.dup2(said, 2)
        try:
            exec(compile(text, name, "exec"), {{"__name__": "__main__"}})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(7)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != 7:
        failed[name] = (status, os.pread(said, 4096, 0)[-200:])
    os.close(said)
    shutil.rmtree("its own")
if failed:
    sys.exit(str(failed))
"""

_NUMBERS = {
    "x86_64": {"keyctl": 250, "clone": 56, "memfd": 319},
    "aarch64": {"keyctl": 219, "clone": 220, "memfd": 279},
}


def together(programs: dict[str, str]) -> str:
    """Returns one program that passes exactly if all of these do; it names those that do not."""
    return _TOGETHER.format(programs=programs)


def attempts(facts: dict) -> str:
    return together({name: program(name, facts) for name in (*SUCCEED_OUTSIDE, *NEVER_SUCCEED)})


def ordinary() -> dict[str, str]:
    """Returns the ordinary programs: those that must run alone, and one that runs all the others."""
    texts = {name: textwrap.dedent(text) for name, text in ORDINARY.items()}
    alone = {name: texts.pop(name) for name in ALONE}
    return {"together": together(texts), **alone}


def program(attempt: str, facts: dict) -> str:
    """Returns a program that passes exactly if the kernel refuses the attempt; any other error fails."""
    return (
        f"{_HEAD}{_CALL}\ntry:\n{textwrap.indent(body(attempt, facts), '    ')}\n"
        "except (OSError, StopIteration):\n    pass\nelse:\n    raise SystemExit('escaped')\n"
    )


def outside(attempt: str, facts: dict) -> str:
    """Returns a program that passes exactly if the attempt succeeds."""
    return f"{_HEAD}{_CALL}\n{body(attempt, facts)}\n"


def body(attempt: str, facts: dict) -> str:
    text = SUCCEED_OUTSIDE.get(attempt) or NEVER_SUCCEED[attempt]
    return textwrap.dedent(text).strip().format(**facts, **_NUMBERS[os.uname().machine])


@contextlib.contextmanager
def targets(tmp: str = "/tmp", var_tmp: str = "/var/tmp") -> Iterator[dict]:
    """Yields sockets that listen and files that exist, all owned by the current user.

    `tmp` and `var_tmp` are folders that this user may write to, in /tmp and outside it. Some machines deny users both.
    """
    home = Path.home() if os.access(Path.home(), os.W_OK) else Path(var_tmp)
    with contextlib.ExitStack() as stack:
        # Outside /tmp and open to everybody: the sandbox must keep a program out, not a permission.
        folder = Path(tempfile.mkdtemp(prefix="kvq-targets-", dir=var_tmp))
        stack.callback(shutil.rmtree, folder)
        folder.chmod(0o755)
        home_secret = home / f".kvq-{secrets.token_hex(4)}"
        tmp_secret = Path(tmp) / home_secret.name
        for name in (home_secret, tmp_secret, folder / "readable"):
            stack.callback(name.unlink, missing_ok=True)
            name.write_text("secret")
            name.chmod(0o644 if name.name == "readable" else 0o600)
        listeners = [socket.socket(socket.AF_UNIX) for _ in range(2)] + [socket.socket()]
        packets = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), socket.socket(type=socket.SOCK_DGRAM)]
        for one in listeners + packets:
            stack.enter_context(one)
        abstract = f"kvq-{secrets.token_hex(8)}"
        for one, address in zip(listeners, (str(folder / "unix"), "\0" + abstract, ("127.0.0.1", 0))):
            one.bind(address)
            one.listen(64)
        packets[0].bind(str(folder / "unix_datagram"))
        for name in ("unix", "unix_datagram"):
            (folder / name).chmod(0o666)
        packets[1].bind(("127.0.0.1", 0))
        threading.Thread(target=_echo, args=(packets[1],), daemon=True).start()
        yield {
            "unix": str(folder / "unix"),
            "unix_datagram": str(folder / "unix_datagram"),
            "abstract": abstract,
            "tcp": listeners[2].getsockname()[1],
            "udp": packets[1].getsockname()[1],
            "home_secret": str(home_secret),
            "tmp_secret": str(tmp_secret),
            "readable": str(folder / "readable"),
            "folder": str(folder),
            "parent": os.getpid(),
        }


def _echo(udp: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed when the test ends
        while True:
            data, sender = udp.recvfrom(16)
            udp.sendto(data, sender)


def main() -> None:
    sandbox.require(allow_unsandboxed=False)
    with targets(*sys.argv[1:]) as facts:
        verdicts = {name: sandbox.run(text) for name, text in {"attempts": attempts(facts), **ordinary()}.items()}
    json.dump({name: [one.passed, one.reason] for name, one in verdicts.items()}, sys.stdout)


if __name__ == "__main__":
    main()
