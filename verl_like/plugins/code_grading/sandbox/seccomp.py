"""The system calls a program may make: a list of allowed ones, everything else is refused with EPERM.

Allowed is what a single Python process with threads needs for computing and for files. Not allowed, among others:
sockets (pairs of streams inside the process are), memory files (which no limit would count), starting processes or
programs, signals to others, ptrace, reading other processes' memory, mounting, namespaces, keys, BPF, io_uring,
performance counters.

Numbers: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of the kernel.
"""

from __future__ import annotations

import functools
import os
import struct

_X86_64 = (
    "read=0 write=1 open=2 close=3 stat=4 fstat=5 lstat=6 poll=7 lseek=8 mmap=9 mprotect=10 munmap=11 brk=12 "
    "rt_sigaction=13 rt_sigprocmask=14 rt_sigreturn=15 pread64=17 pwrite64=18 readv=19 writev=20 access=21 pipe=22 "
    "select=23 sched_yield=24 mremap=25 msync=26 mincore=27 madvise=28 dup=32 dup2=33 pause=34 nanosleep=35 "
    "getitimer=36 alarm=37 setitimer=38 getpid=39 sendfile=40 sendto=44 recvfrom=45 sendmsg=46 recvmsg=47 "
    "shutdown=48 getsockname=51 getpeername=52 setsockopt=54 getsockopt=55 exit=60 wait4=61 uname=63 "
    "flock=73 fsync=74 fdatasync=75 truncate=76 ftruncate=77 getdents=78 getcwd=79 chdir=80 fchdir=81 "
    "rename=82 mkdir=83 rmdir=84 creat=85 link=86 unlink=87 symlink=88 readlink=89 chmod=90 fchmod=91 umask=95 "
    "gettimeofday=96 getrlimit=97 getrusage=98 sysinfo=99 times=100 getuid=102 getgid=104 geteuid=107 getegid=108 "
    "getppid=110 getpgrp=111 getgroups=115 getresuid=118 getresgid=120 getpgid=121 getsid=124 rt_sigpending=127 "
    "rt_sigtimedwait=128 rt_sigsuspend=130 sigaltstack=131 utime=132 statfs=137 fstatfs=138 getpriority=140 "
    "sched_getparam=143 sched_getscheduler=145 sched_get_priority_max=146 sched_get_priority_min=147 arch_prctl=158 "
    "setrlimit=160 gettid=186 time=201 futex=202 sched_getaffinity=204 epoll_create=213 getdents64=217 "
    "set_tid_address=218 restart_syscall=219 fadvise64=221 clock_gettime=228 clock_getres=229 clock_nanosleep=230 "
    "exit_group=231 epoll_wait=232 epoll_ctl=233 utimes=235 waitid=247 openat=257 mkdirat=258 newfstatat=262 "
    "unlinkat=263 renameat=264 linkat=265 symlinkat=266 readlinkat=267 fchmodat=268 faccessat=269 pselect6=270 "
    "ppoll=271 set_robust_list=273 get_robust_list=274 splice=275 utimensat=280 epoll_pwait=281 eventfd=284 "
    "fallocate=285 eventfd2=290 epoll_create1=291 dup3=292 pipe2=293 preadv=295 pwritev=296 getcpu=309 renameat2=316 "
    "getrandom=318 membarrier=324 copy_file_range=326 preadv2=327 pwritev2=328 statx=332 rseq=334 "
    "close_range=436 faccessat2=439 epoll_pwait2=441 futex_waitv=449"
)
_AARCH64 = (
    "getcwd=17 eventfd2=19 epoll_create1=20 epoll_ctl=21 epoll_pwait=22 dup=23 dup3=24 flock=32 mkdirat=34 "
    "unlinkat=35 symlinkat=36 linkat=37 renameat=38 statfs=43 fstatfs=44 truncate=45 ftruncate=46 fallocate=47 "
    "faccessat=48 chdir=49 fchdir=50 fchmod=52 fchmodat=53 openat=56 close=57 pipe2=59 getdents64=61 lseek=62 read=63 "
    "write=64 readv=65 writev=66 pread64=67 pwrite64=68 preadv=69 pwritev=70 sendfile=71 pselect6=72 ppoll=73 "
    "splice=76 readlinkat=78 newfstatat=79 fstat=80 fsync=82 fdatasync=83 utimensat=88 exit=93 exit_group=94 "
    "waitid=95 set_tid_address=96 futex=98 set_robust_list=99 get_robust_list=100 nanosleep=101 getitimer=102 "
    "setitimer=103 clock_gettime=113 clock_getres=114 clock_nanosleep=115 sched_getaffinity=123 sched_yield=124 "
    "restart_syscall=128 sigaltstack=132 rt_sigsuspend=133 rt_sigaction=134 rt_sigprocmask=135 rt_sigpending=136 "
    "rt_sigtimedwait=137 rt_sigreturn=139 getpriority=141 getresuid=148 getresgid=150 times=153 getpgid=155 "
    "getsid=156 getgroups=158 uname=160 getrlimit=163 setrlimit=164 getrusage=165 umask=166 getcpu=168 "
    "gettimeofday=169 getpid=172 getppid=173 getuid=174 geteuid=175 getgid=176 getegid=177 gettid=178 sysinfo=179 "
    "getsockname=204 getpeername=205 sendto=206 recvfrom=207 setsockopt=208 getsockopt=209 "
    "shutdown=210 sendmsg=211 recvmsg=212 brk=214 munmap=215 mremap=216 mmap=222 fadvise64=223 mprotect=226 msync=227 "
    "mincore=232 madvise=233 wait4=260 renameat2=276 getrandom=278 membarrier=283 "
    "copy_file_range=285 preadv2=286 pwritev2=287 statx=291 rseq=293 close_range=436 faccessat2=439 epoll_pwait2=441 "
    "futex_waitv=449"
)
# machine -> (AUDIT_ARCH, allowed, calls whose arguments are looked at)
_MACHINES = {
    "x86_64": (
        0xC000003E,
        _X86_64,
        {"ioctl": 16, "clone": 56, "kill": 62, "prctl": 157, "tkill": 200, "tgkill": 234, "prlimit64": 302}
        | {"fork": 57, "vfork": 58, "execve": 59, "clone3": 435, "socketpair": 53, "fcntl": 72},
    ),
    "aarch64": (
        0xC00000B7,
        _AARCH64,
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
