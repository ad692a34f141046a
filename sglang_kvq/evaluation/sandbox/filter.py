"""Builds the sandbox's seccomp filter (classic BPF), which refuses system calls that programs may not make.

Namespaces and the closed root already leave nothing that these calls could reach. The filter also protects if the
kernel's code for these calls is flawed.
"""

from __future__ import annotations

import os

from sglang_kvq.errors import KVQuantError

#: Each machine's AUDIT_ARCH_* constant, and its index into the numbers of ``_REFUSED``.
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
#: System calls refused with EPERM: numbers on x86_64 and aarch64 (one if they agree).
_REFUSED = {
    # sockets of any family, and socket pairs, because a datagram pair may send to a path
    "socket": (41, 198),
    "socketpair": (53, 199),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438,),
    # mounts and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428,),
    "move_mount": (429,),
    "fsopen": (430,),
    "fsconfig": (431,),
    "fsmount": (432,),
    "fspick": (433,),
    "mount_setattr": (442,),
    "open_tree_attr": (467,),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # kernel keys, which no namespace separates
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # memory that neither RLIMIT_AS nor the limit on /tmp covers
    "memfd_create": (319, 279),
    "memfd_secret": (447,),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    # large parts of the kernel
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425,),
    "io_uring_enter": (426,),
    "io_uring_register": (427,),
}
_CLONE, _CLONE3 = (56, 220), 435
#: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_NEW_NAMESPACES = 0x7E020000
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x50000 | 1, 0x50000 | 38


def instructions(machine: str | None = None) -> list[tuple[int, int, int, int]]:
    """Returns the filter for a machine: (code, jump if true, jump if false, k) of each ``struct sock_filter``.

    Raises:
        KVQuantError: the machine's system call numbers are not known.
    """
    machine = machine or os.uname().machine
    if machine not in _MACHINES:
        raise KVQuantError(
            f"generated programs cannot be sandboxed on {machine!r}: the numbers of its system calls are known for "
            f"{' and '.join(_MACHINES)} only. Run the humaneval task on one of these."
        )
    architecture, column = _MACHINES[machine]
    filter_ = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL)]
    filter_ += [(_LOAD, 0, 0, _NUMBER)]
    if machine == "x86_64":  # x32 has the same calls under other numbers
        filter_ += _answer(_AT_LEAST, _X32, _ENOSYS)
    for numbers in _REFUSED.values():
        filter_ += _answer(_EQUAL, numbers[column % len(numbers)], _EPERM)
    # clone3's flags are in memory, which the filter cannot read; the C library falls back to clone.
    filter_ += _answer(_EQUAL, _CLONE3, _ENOSYS)
    filter_ += [(_EQUAL, 1, 0, _CLONE[column]), (_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    return [*filter_, *_answer(_ANY_BIT, _NEW_NAMESPACES, _EPERM), (_RETURN, 0, 0, _ALLOW)]


def _answer(test: int, value: int, result: int) -> list[tuple[int, int, int, int]]:
    """Returns instructions that end the filter with ``result`` if the test holds, and continue otherwise."""
    return [(test, 0, 1, value), (_RETURN, 0, 0, result)]
