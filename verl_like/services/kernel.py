"""Linux calls that Python 3.11 has no function for, through ctypes. Errors are OSError.

Numbers and structures: the kernel's uapi headers (linux/prctl.h, sched.h, mount.h, landlock.h; man 2 of each call).
"""

from __future__ import annotations

import ctypes
import os
import signal

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_MOUNT_SETATTR = 442
_AT_RECURSIVE, _AT_FDCWD, _MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 0x8000, -100, 1, 2, 4
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_PR_SET_CHILD_SUBREAPER = 36
_SYS_LANDLOCK = (444, 445, 446)  # create_ruleset, add_rule, restrict_self: the same on all architectures
_LANDLOCK_OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15  # execute, write, read, truncate, ioctl
_LANDLOCK_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read_file, read_dir

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, argument: int = 0) -> None:
    """Call prctl with one argument."""
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(option, ctypes.c_ulong(argument), zero, zero, zero), f"prctl({option})")


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent ends.

    A change of user clears the request: call this after it.
    """
    prctl(_PR_SET_PDEATHSIG, number)


def set_dumpable(dumpable: bool) -> None:
    """Allow or forbid other processes of the same user to look into this one."""
    prctl(_PR_SET_DUMPABLE, int(dumpable))


def set_no_new_privileges() -> None:
    """Keep set-uid programs from giving this process any privilege from now on."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ended."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def drop_capabilities() -> None:
    """Give up all capabilities, for this process and everything it becomes."""
    for capability in range(64):
        try:
            prctl(_PR_CAPBSET_DROP, capability)
        except OSError:  # past the kernel's last one, or not permitted: then there is none to lose
            break
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def unshare(flags: int) -> None:
    """Leave the namespaces named by `flags` for new ones."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Call mount(2)."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _check(_libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def bind_read_only(source: str, target: str) -> None:
    """Show `source`, with all that is mounted below it, at `target`; nothing of it can be written."""
    mount(source, target, None, MS_BIND | MS_REC)
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        os.fsencode(target),
        ctypes.c_uint(_AT_RECURSIVE),
        attributes,
        ctypes.c_size_t(32),
    )
    if result < 0:  # kernels before 5.12: the top mount alone
        flags = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | 8 | 1024 | 2048)  # what is locked must stay set
        mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags)


def pivot_root(new_root: str) -> None:
    """Make the mount `new_root` the root of everything, and detach the old one."""
    os.chdir(new_root)
    number = _SYS_PIVOT_ROOT[os.uname().machine]
    _check(_libc.syscall(ctypes.c_long(number), b".", b"."), "pivot_root")  # the old root now lies over the new one
    _check(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")


def landlock_abi() -> int:
    """Version of Landlock in this kernel; 0: none."""
    version = _libc.syscall(ctypes.c_long(_SYS_LANDLOCK[0]), None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    return max(0, version)


def landlock_files(read_only: list[str], writable: list[str]) -> None:
    """Allow this process and its descendants only these folders and files (kernel 5.13 and later)."""
    abi = landlock_abi()
    every = (1 << (13 + (abi >= 2) + (abi >= 3) + (abi >= 5))) - 1
    if abi == 4:
        every = (1 << 15) - 1
    attributes = (ctypes.c_uint64 * 3)(every, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)  # files, TCP, signals
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _check(
        _libc.syscall(ctypes.c_long(_SYS_LANDLOCK[0]), attributes, ctypes.c_size_t(size), ctypes.c_uint32(0)),
        "landlock_create_ruleset",
    )
    for paths, access in ((read_only, _LANDLOCK_READ), (writable, every)):
        for path in paths:
            _landlock_allow(ruleset, path, access)
    _check(_libc.syscall(ctypes.c_long(_SYS_LANDLOCK[2]), ctypes.c_int(ruleset), ctypes.c_uint32(0)), "landlock")
    os.close(ruleset)


def _landlock_allow(ruleset: int, path: str, access: int) -> None:
    if not os.path.isdir(path):
        access &= _LANDLOCK_OF_FILES
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = access.to_bytes(8, "little") + descriptor.to_bytes(4, "little")
        call = ctypes.c_long(_SYS_LANDLOCK[1])
        flags = ctypes.c_uint32(0)
        _check(_libc.syscall(call, ctypes.c_int(ruleset), ctypes.c_int(1), rule, flags), f"landlock {path}")
    finally:
        os.close(descriptor)


def install_filter(program: bytes) -> None:
    """Put this thread, and what it starts, under a seccomp filter; `no_new_privs` must be set."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    buffer = ctypes.create_string_buffer(program, len(program))
    packed = Program(len(program) // 8, ctypes.cast(buffer, ctypes.c_char_p))
    pr_set_seccomp, mode_filter = 22, 2
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(pr_set_seccomp, ctypes.c_ulong(mode_filter), ctypes.byref(packed), zero, zero), "seccomp")
