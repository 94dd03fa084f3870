"""The jail process: puts up what protection this machine allows, then serves runs (`supervisor`).

    reward worker -> jail (outside the new namespaces; waits) -> zygote (process 1 inside) -> supervisor, programs

Started by `client.Jail` as a fresh interpreter with an empty environment, without site packages. Nothing here is
trusted to have worked: `probe` tries the escapes from inside and reports which of them succeed.
"""

from __future__ import annotations

import os
import resource
import sys

from verl_like.plugins.code_grading.sandbox import supervisor, zygote
from verl_like.plugins.code_grading.sandbox.settings import SandboxError, SandboxSettings
from verl_like.services import kernel

_NAMESPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
_FIRST_UID = 1_700_000_000  # far above any user's; each jail takes its own, so that process limits are its own too
_NOBODY = 65534
_MAX_TASKS = 64  # processes and threads of a jail, where the kernel counts them


def main(settings_json: str, scratch: str, requests: int, replies: int, parent: int) -> None:
    """Entry point. `requests` and `replies` are this end's pipes, `scratch` an empty folder of our own."""
    settings = SandboxSettings.from_json(settings_json)
    kernel.die_with_parent()
    if os.getppid() != parent:
        return
    layers: list[str] = []
    if os.geteuid() == 0 and _enter(_NAMESPACES):
        _become_first_process()
        uid = _FIRST_UID + parent % 100_000_000
        _build_root(settings, scratch, uid)
        _change_user(uid)
        layers += ["namespaces", "own user"]
    elif _enter_as_user():
        _become_first_process()
        _build_root(settings, scratch, None)
        layers.append("namespaces")
    else:
        if os.geteuid() == 0 and (uid := _readable_uid(parent)) is not None:
            os.chown(scratch, uid, uid)
            _change_user(uid)
            layers.append("own user")
        if kernel.landlock_abi() > 0:
            kernel.set_no_new_privileges()
            kernel.landlock_files(_readable(settings), [scratch, "/dev/null"])
            layers.append("landlock")
        if settings.max_processes > 1:
            raise SandboxError("max_processes > 1 needs namespaces, which this machine does not allow")
        kernel.adopt_orphans()
    kernel.drop_capabilities()
    kernel.set_no_new_privileges()
    kernel.set_dumpable(False)
    _limit_everything(settings)
    os.chdir("/tmp" if "namespaces" in layers else scratch)
    supervisor.serve(settings, zygote.split(settings, requests, replies), requests, replies, layers)


def _enter(flags: int) -> bool:
    try:
        kernel.unshare(flags)
    except OSError:
        return False
    return True


def _enter_as_user() -> bool:
    """New namespaces without privileges: inside a user namespace of our own."""
    uid, gid = os.geteuid(), os.getegid()
    if not _enter(kernel.CLONE_NEWUSER | _NAMESPACES):
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"{_NOBODY} {uid} 1"), ("gid_map", f"{_NOBODY} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return True


def _become_first_process() -> None:
    """Go on as process 1 of the new process namespace: when it ends, the kernel kills everything in there."""
    child = os.fork()
    if child:
        os.close(0)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    kernel.die_with_parent()


def _build_root(settings: SandboxSettings, scratch: str, uid: int | None) -> None:
    """A file system of the Python library, the system's shared libraries and an empty /tmp; no /proc, no /dev."""
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("jail", scratch, "tmpfs", flags, "size=1m,mode=755")
    for path in _readable(settings):
        if os.path.islink(path) or not os.path.isdir(path):
            continue
        os.makedirs(scratch + path, exist_ok=True)
        kernel.bind_read_only(path, scratch + path)
    for path in ("/lib", "/lib64", "/usr/lib64"):
        if os.path.islink(path) and not os.path.lexists(scratch + path):
            os.makedirs(os.path.dirname(scratch + path), exist_ok=True)
            os.symlink(os.readlink(path), scratch + path)
    os.makedirs(scratch + "/tmp", exist_ok=True)
    owner = f",uid={uid},gid={uid}" if uid is not None else ""
    size = f"size={settings.scratch_mb}m,nr_inodes=4096,mode=700{owner}"
    kernel.mount("scratch", scratch + "/tmp", "tmpfs", flags, size)
    kernel.pivot_root(scratch)
    kernel.mount(None, "/", None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | flags)


def _readable(settings: SandboxSettings) -> list[str]:
    """Folders that programs may read: outermost ones only."""
    library = os.path.dirname(os.path.dirname(os.path.realpath(os.__file__)))
    wanted = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", library, *map(os.path.realpath, settings.python_path)]
    found = sorted({path for path in wanted if os.path.isdir(path)})
    return [p for p in found if os.path.islink(p) or not any(p.startswith(f + "/") for f in found)]


def _change_user(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    kernel.die_with_parent()


def _readable_uid(parent: int) -> int | None:
    """Find a user without any rights that can still read the Python library; None if there is none."""
    for uid in (_FIRST_UID + parent % 100_000_000, _NOBODY):
        child = os.fork()
        if not child:
            status = 1
            try:
                _change_user(uid)
                os.listdir(os.path.dirname(os.__file__))
                status = 0
            except OSError:
                pass
            finally:
                os._exit(status)
        if os.waitpid(child, 0)[1] == 0:
            return uid
    return None


def _limit_everything(settings: SandboxSettings) -> None:
    """Limits that hold for all runs of this jail together or alike; `child` adds those of one run."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_NOFILE, 256)
    _lower(resource.RLIMIT_FSIZE, settings.scratch_mb * 1024**2)
    _lower(resource.RLIMIT_MSGQUEUE, 0)
    if os.getpid() == 1 or os.geteuid() >= _FIRST_UID:  # elsewhere it would count the trainer's processes too
        _lower(resource.RLIMIT_NPROC, _MAX_TASKS + settings.max_processes)


def _lower(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
