"""Inside the sandbox: closes the walls, then becomes the program. Run as a script; imports nothing of the package.

Reads one JSON object from stdin: ``program`` (source), ``isolate`` (this process is in fresh namespaces),
``uid`` (become this user; None keeps the present one), and the limits of ``sandbox.Limits``.
"""

import ctypes
import json
import os
import resource
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
MS_NOSUID, MS_NODEV, MS_BIND = 2, 4, 4096
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
WORK, PYTHON = "/tmp/work", "/tmp/python"


def check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    words = (ctypes.c_char_p(w.encode()) for w in (source, target, kind))
    check(LIBC.mount(*words, ctypes.c_ulong(flags), ctypes.c_char_p(options.encode())), f"mount {target}")


def read_only_root() -> None:
    """Every mount read-only at once (mount_setattr(2), Linux 5.12)."""

    class Attributes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]

    wanted = Attributes(MOUNT_ATTR_RDONLY, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(wanted))
    arguments = (AT_FDCWD, ctypes.c_char_p(b"/"), AT_RECURSIVE, ctypes.byref(wanted), size)
    check(LIBC.syscall(ctypes.c_long(SYS_MOUNT_SETATTR), *arguments), "read-only file system")


def close_walls(uid: "int | None", disk_bytes: int) -> str:
    """A read-only file system but for an empty /tmp/work, an empty /proc; the interpreter to use in there."""
    prefix, interpreter = sys.base_prefix, os.path.realpath(sys.executable)
    # Opened now, because the new /tmp may cover it; bound below, because its path may be another user's secret.
    held = os.open(prefix, os.O_PATH | os.O_DIRECTORY)
    read_only_root()
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk_bytes},mode=0755")
    if not prefix.startswith("/usr"):
        os.mkdir(PYTHON)
        mount(f"/proc/self/fd/{held}", PYTHON, "none", MS_BIND, "")
        interpreter = os.path.join(PYTHON, os.path.relpath(interpreter, os.path.realpath(prefix)))
    os.close(held)
    mount("tmpfs", "/proc", "tmpfs", MS_NOSUID | MS_NODEV, "size=4096,mode=0555")
    os.mkdir(WORK, 0o700)
    if uid is not None:
        os.chown(WORK, uid, uid)
    os.chdir(WORK)
    return interpreter


def wait_for(program: int) -> None:
    """Stays the namespace's first process (which no default signal ends) and exits as a shell would."""
    while True:
        ended, status = os.wait()
        if ended == program:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def main() -> None:
    order = json.loads(sys.stdin.buffer.read())
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    interpreter, uid = sys.executable, order["uid"]
    if order["isolate"]:
        interpreter = close_walls(uid, order["disk_bytes"])
    with open("program.py", "w", encoding="utf-8") as file:
        file.write(order["program"])
    program = os.fork()
    if program:
        wait_for(program)
    if uid is not None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    for capability in range(64):  # root of a user namespace has them all; EINVAL past the last one
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    for name in ("CPU", "AS", "FSIZE", "NPROC", "NOFILE", "CORE"):
        value = order["limits"].get(name)
        if value is not None:
            # SIGXCPU at the soft limit tells what happened; whoever ignores it dies a second later.
            hard = value + 1 if name == "CPU" else value
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, hard))
    os.execve(interpreter, [interpreter, "-I", "program.py"], {})


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        print(f"sandbox: {error}", flush=True)
        os._exit(97)
