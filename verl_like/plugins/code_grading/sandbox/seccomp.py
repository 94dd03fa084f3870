"""The system calls a program may make: a list of allowed ones, everything else is refused with EPERM.

Allowed is what a single Python process with threads needs for computing and for files. Not allowed, among others:
sockets (pairs of streams inside the process are), memory files (which no limit would count), starting processes or
programs, signals to others, ptrace, reading other processes' memory, mounting, namespaces, keys, BPF, io_uring,
performance counters.

The list, with the calls' numbers: syscalls.txt.
"""

from __future__ import annotations

import functools
import os
import struct
from pathlib import Path

from verl_like.text import table_rows

# machine -> the calls of syscalls.txt, as name=number
_ALLOWED = dict(table_rows(Path(__file__).with_name("syscalls.txt").read_text(encoding="utf-8")))
# machine -> (AUDIT_ARCH, allowed, calls whose arguments are looked at)
_MACHINES = {
    "x86_64": (
        0xC000003E,
        _ALLOWED["x86_64"],
        {"ioctl": 16, "clone": 56, "kill": 62, "prctl": 157, "tkill": 200, "tgkill": 234, "prlimit64": 302}
        | {"fork": 57, "vfork": 58, "execve": 59, "clone3": 435, "socketpair": 53, "fcntl": 72},
    ),
    "aarch64": (
        0xC00000B7,
        _ALLOWED["aarch64"],
        {"ioctl": 29, "tkill": 130, "kill": 129, "tgkill": 131, "prctl": 167, "clone": 220, "prlimit64": 261}
        | {"execve": 221, "clone3": 435, "socketpair": 199, "fcntl": 25},
    ),
}
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOTTY, _ENOSYS = 1, 25, 38
_LOAD, _JEQ, _JSET, _RETURN = 0x20, 0x15, 0x45, 0x06  # BPF: absolute word; jump if equal / any bit set; return
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data (arguments: low words, little endian)
_OWN_PID = 0x7FFFFFFF  # stands for it in the template: no process has this number
_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACES = 0x7E020080
_PR_SET_NAME, _PR_GET_NAME = 15, 16
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_HARMLESS_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# Duplicates, flags, locks, pipe sizes and seals. Not F_SETOWN, F_SETSIG, F_SETLEASE and F_NOTIFY: with these the kernel
# sends any signal to any process of the same user when something happens to a file.
_HARMLESS_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032, 1034)
# SOCK_STREAM, also with SOCK_CLOEXEC and SOCK_NONBLOCK: an end of such a pair cannot send to any other address
_STREAM_PAIRS = tuple(1 | cloexec | nonblock for cloexec in (0, 0x80000) for nonblock in (0, 0x800))


def supported() -> bool:
    """True where there is a filter for this machine's architecture."""
    return os.uname().machine in _MACHINES


def build(*, own_pid: int, may_fork: bool) -> bytes:
    """The filter of one process. KeyError on a machine that `supported` denies."""
    return _template(may_fork).replace(_op(_JEQ, _OWN_PID, 0, 1), _op(_JEQ, own_pid, 0, 1))


@functools.cache  # the zygote makes it, for all programs
def _template(may_fork: bool) -> bytes:
    arch, allowed, special = _MACHINES[os.uname().machine]
    program = [_op(_LOAD, _ARCH), _op(_JEQ, arch, 1, 0), _op(_RETURN, _KILL), _op(_LOAD, _NUMBER)]
    for entry in allowed.split():
        program += [_op(_JEQ, int(entry.partition("=")[2]), 0, 1), _op(_RETURN, _ALLOW)]
    pids = dict.fromkeys(("kill", "tgkill"), (_OWN_PID,)) | {"prlimit64": (0, _OWN_PID)}
    for name, accepted in pids.items():
        program += _on(special[name], _argument_is(0, accepted))
    program += _on(special["socketpair"], _argument_is(1, _STREAM_PAIRS))
    program += _on(special["prctl"], _argument_is(0, (_PR_SET_NAME, _PR_GET_NAME)))
    program += _on(special["fcntl"], _argument_is(1, _HARMLESS_FCNTLS))
    program += _on(special["ioctl"], _argument_is(1, _HARMLESS_IOCTLS, otherwise=_ENOTTY))
    program += _on(special["clone3"], [_op(_RETURN, _ERRNO | _ENOSYS)])  # the C library then uses clone
    program += _on(special["clone"], _clone(may_fork))
    if may_fork:
        for name in ("fork", "vfork", "execve"):
            if name in special:
                program += _on(special[name], [_op(_RETURN, _ALLOW)])
    program.append(_op(_RETURN, _ERRNO | _EPERM))
    return b"".join(program)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _on(number: int, then: list[bytes]) -> list[bytes]:
    """Build the branch of one system call: `then`, which must end in a return."""
    return [_op(_JEQ, number, 0, len(then)), *then]


def _argument_is(index: int, accepted: tuple[int, ...], otherwise: int = _EPERM) -> list[bytes]:
    program = [_op(_LOAD, _ARGUMENTS + 8 * index)]
    for value in accepted:
        program += [_op(_JEQ, value, 0, 1), _op(_RETURN, _ALLOW)]
    return [*program, _op(_RETURN, _ERRNO | otherwise)]


def _clone(may_fork: bool) -> list[bytes]:
    """Threads always; processes if allowed; new namespaces never."""
    program = [_op(_LOAD, _ARGUMENTS)]
    program += [_op(_JSET, _CLONE_NAMESPACES, 0, 1), _op(_RETURN, _ERRNO | _EPERM)]
    if not may_fork:
        program += [_op(_JSET, _CLONE_THREAD, 1, 0), _op(_RETURN, _ERRNO | _EPERM)]
    return [*program, _op(_RETURN, _ALLOW)]
