"""Sets up the sandbox from inside, then becomes the program. Run as a script; imports nothing from this package.

Reads one JSON object from stdin:

    program: its source
    interpreter: path of the Python that runs it
    walls: "root" (namespaces made with root's rights), "user" (through a user namespace), or null: none
    uid: the program's user id inside; belongs to no account
    binds, covered: see layout.py
    filter: see filter.py
    disk_bytes, limits: see ``sandbox.Limits``

The working directory is an empty folder that the caller created.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x8000000, 0x10000000, 1 << 29, 1 << 30
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 8, 4096, 0x4000, 1 << 18, 2
RDONLY, NOSUID, NODEV, NOEXEC = 1, 2, 4, 8  # MOUNT_ATTR_*
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
SECCOMP_MODE_FILTER = 2
NOT_CLOSED = 97
#: Some Python builds (for an old C library) seed their hashes only from urandom and do not start without it.
DEVICES = ("/dev/null", "/dev/urandom")
#: Resources by their names in the JSON object's ``limits``; limits are set in this sequence.
LIMITS = {
    "CPU": resource.RLIMIT_CPU,
    "AS": resource.RLIMIT_AS,
    "FSIZE": resource.RLIMIT_FSIZE,
    "NPROC": resource.RLIMIT_NPROC,
    "NOFILE": resource.RLIMIT_NOFILE,
    "CORE": resource.RLIMIT_CORE,
}


def check(result: int, what: str) -> None:
    if result == -1:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = (ctypes.c_char_p(os.fsencode(word)) for word in (source, target, kind))
    result = LIBC.mount(*words, ctypes.c_ulong(flags), ctypes.c_char_p(options.encode()))
    check(result, f"mount {source} at {target}")


def set_attributes(path: str, attributes: int, recursive: int = 0) -> None:
    """Sets attributes on a mount, optionally recursively, in one call (mount_setattr(2), Linux 5.12)."""
    wanted = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)  # set, clear, propagation, userns
    arguments = (AT_FDCWD, ctypes.c_char_p(os.fsencode(path)), recursive, wanted, ctypes.c_size_t(32))
    check(LIBC.syscall(ctypes.c_long(SYS_MOUNT_SETATTR), *arguments), f"mount_setattr {path}")


def enter_namespaces(walls: str, uid: int) -> bool:
    """Enters new namespaces; this process's next child becomes their first process.

    Returns:
        True if the program can become ``uid``; otherwise the caller's own user is shown inside as ``uid``.
    """
    others = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC
    free = is_mapped("uid", uid) and is_mapped("gid", uid)
    if walls == "root":
        if not free:
            raise OSError(errno.EINVAL, f"this user namespace maps no user {uid}")
        check(LIBC.unshare(others), "unshare")
        return True
    me, my_group = os.geteuid(), os.getegid()
    # Root must not stay root: the kernel does not limit its processes in any namespace.
    if me == 0 and free:
        users, groups = f"0 0 1\n{uid} {uid} 1", f"{my_group} {my_group} 1\n{uid} {uid} 1"
        with by_another_process(lambda pid: write_maps(pid, users, groups)):
            check(LIBC.unshare(CLONE_NEWUSER | others), "unshare")
        return True
    check(LIBC.unshare(CLONE_NEWUSER | others), "unshare")
    write("/proc/self/setgroups", "deny")
    write_maps("self", f"{uid} {me} 1", f"{uid} {my_group} 1")
    return False


def is_mapped(kind: str, number: int) -> bool:
    """Returns whether the user namespace of this process maps the id."""
    with open(f"/proc/self/{kind}_map", encoding="utf-8") as file:
        ranges = [[int(word) for word in line.split()] for line in file]
    return any(first <= number < first + count for first, _, count in ranges)


def write_maps(pid: "int | str", users: str, groups: str) -> None:
    """Writes a process's maps of users and groups, each in one write, with lines "inside outside count"."""
    write(f"/proc/{pid}/gid_map", groups)
    write(f"/proc/{pid}/uid_map", users)


@contextlib.contextmanager
def by_another_process(work: "Callable[[int], None]") -> "Iterator[None]":
    """Runs ``work(id of this process)`` when the block ends, in a child process that stays in the old namespaces."""
    me, (reader, writer) = os.getpid(), os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(writer)
        try:
            if os.read(reader, 1):
                work(me)
        except OSError as error:
            print(f"sandbox: map users: {error}", flush=True)
            os._exit(NOT_CLOSED)
        os._exit(0)
    try:
        yield
        os.write(writer, b"x")
    finally:
        os.close(reader)
        os.close(writer)
        failed = os.waitpid(helper, 0)[1]
    if failed:
        os._exit(NOT_CLOSED)  # the helper has printed the reason


def write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def enter_root(interpreter: str, binds: "list[list[str]]", covered: "list[str]", disk_bytes: int) -> None:
    """Enters a read-only root with the listed files, two devices and a bounded /tmp; nothing else is reachable."""
    root = os.getcwd()
    temporary, empty = f"{root}/tmp", f"{root}/empty"
    mount("none", "/", "none", MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=64k,nr_inodes=1k,mode=0755")
    for folder in (temporary, empty):
        os.mkdir(folder)
    for source, target in [*binds, *([empty, folder] for folder in covered)]:
        make_mount_point(root + target, os.path.isdir(source))
        mount(source, root + target, "none", MS_BIND)
    os.makedirs(f"{root}/proc/self")
    # The loader reads this link to resolve $ORIGIN in the interpreter's own library paths.
    os.symlink(interpreter, f"{root}/proc/self/exe")
    for device in DEVICES:
        make_mount_point(root + device, False)
    set_attributes(root, RDONLY | NOSUID | NODEV, AT_RECURSIVE)
    for device in DEVICES:
        if not stat.S_ISCHR(os.stat(device).st_mode):
            raise OSError(errno.ENODEV, f"{device} is no device")
        mount(device, root + device, "none", MS_BIND)
        set_attributes(root + device, RDONLY | NOSUID | NOEXEC)  # a read-only mount does not stop writes to a device
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    mount("tmpfs", temporary, "tmpfs", flags, f"size={disk_bytes},nr_inodes=1k,mode=0700")
    os.chdir(root)
    # The old root is now mounted over the new one; unmounting it also unmounts everything in it.
    check(LIBC.syscall(ctypes.c_long(SYS_PIVOT_ROOT[os.uname().machine]), b".", b"."), "pivot_root")
    check(LIBC.umount2(b".", MNT_DETACH), "umount the old root")
    os.chdir("/tmp")


def make_mount_point(path: str, folder: bool) -> None:
    """Creates the file or folder that a mount needs."""
    os.makedirs(path if folder else os.path.dirname(path), exist_ok=True)
    if not folder:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))


def give_up_privileges(uid: "int | None") -> None:
    """Drops all capabilities, also for executed programs; becomes ``uid``."""
    capability = 0
    while LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    if ctypes.get_errno() != errno.EINVAL:  # EINVAL: past the last one
        check(-1, "drop capabilities")
    if uid is not None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # version 3
    check(LIBC.capset(header, nothing), "drop capabilities")


def install_filter(instructions: "list[list[int]]") -> None:
    class Instruction(ctypes.Structure):
        _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(Instruction))]

    array = (Instruction * len(instructions))(*(Instruction(*one) for one in instructions))
    program = Program(len(instructions), array)
    check(LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0), "seccomp filter")


def fork_and_follow() -> None:
    """Forks and returns in the child. The parent waits and exits with the child's status, as a shell would."""
    child = os.fork()
    if child == 0:
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a namespace's first process ignores signals without a handler
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def main() -> None:
    order = json.loads(sys.stdin.buffer.read())
    walls, uid = order["walls"], None
    os.umask(0o022)
    if walls:
        if enter_namespaces(walls, order["uid"]):
            uid = order["uid"]
        fork_and_follow()
        check(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "die with the caller")
        enter_root(order["interpreter"], order["binds"], order["covered"], order["disk_bytes"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    write("program.py", order["program"])
    if uid is not None:
        for path in (".", "program.py"):
            os.chown(path, uid, uid)
    fork_and_follow()
    if walls:
        give_up_privileges(uid)
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    for name, number in LIMITS.items():
        value = order["limits"].get(name)
        if value is not None:
            # SIGXCPU at the soft limit reports the reason; a program that ignores it is killed a second later.
            hard = value + 1 if name == "CPU" else value
            resource.setrlimit(number, (value, hard))
    if walls:
        install_filter(order["filter"])
    os.execve(order["interpreter"], [order["interpreter"], "-I", "program.py"], {})


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        print(f"sandbox: {error}", flush=True)
        os._exit(NOT_CLOSED)
