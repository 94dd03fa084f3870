"""Probe of the sandbox: measures how well it locks programs up on this machine, by trying to get out."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from verl_like.plugins.code_grading.sandbox.client import Jail
from verl_like.plugins.code_grading.sandbox.settings import LEVELS, SandboxError, SandboxSettings

# What must be impossible for a level, on top of what the weaker ones ask for.
_DEMANDS = {
    "limits": ("memory",),
    "filtered": ("network", "fork", "signals", "ptrace"),
    "isolated": ("read files", "write files", "see processes"),
}
_ESCAPES = """
import ctypes, json, os, socket
plan = json.loads(input())
def connect():
    socket.create_connection(("127.0.0.1", plan["port"]), timeout=2)
def fork():
    if os.fork() == 0: os._exit(0)
def ptrace():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(16, plan["pid"], 0, 0) != 0: raise OSError(ctypes.get_errno())
def processes():
    open("/proc/%d/environ" % plan["pid"], "rb").read(1)
attempts = {
    "memory": lambda: bytearray(plan["too_much"]),
    "network": connect,
    "fork": fork,
    "signals": lambda: os.kill(plan["pid"], 0),
    "ptrace": ptrace,
    "read files": lambda: open(plan["file"]).read(),
    "write files": lambda: open(plan["file"] + ".new", "w").write("x"),
    "see processes": processes,
}
found = {}
for name, attempt in attempts.items():
    try:
        attempt()
        found[name] = "possible"
    except BaseException as error:
        found[name] = type(error).__name__
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Assessment:
    """Strength of the sandbox on this machine.

    escapes: for each attempt to get out, "possible" or the error that stopped it.
    """

    level: str  # one of LEVELS, or "none"
    layers: tuple[str, ...]
    escapes: dict[str, str]

    def summary(self) -> str:
        open_doors = [name for name, outcome in self.escapes.items() if outcome == "possible"]
        return f"level {self.level} ({', '.join(self.layers)}); still possible: {', '.join(open_doors) or 'nothing'}"


def assess(settings: SandboxSettings) -> Assessment:
    """Start a jail and try its walls from inside. Raises SandboxError if it does not even start."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
        Jail(settings) as jail,
    ):
        bait = Path(folder) / "bait"
        bait.write_text("secret")
        bait.chmod(0o644)
        Path(folder).chmod(0o777)
        plan = {
            "port": server.getsockname()[1],
            "pid": os.getpid(),
            "file": str(bait),
            "too_much": 2 * settings.memory_limit_mb * 1024**2,
        }
        layers = jail.wait_until_ready()
        reply = jail.run_program(_ESCAPES, json.dumps(plan))
    if reply["status"] != "ok":
        raise SandboxError(f"the sandbox cannot run a program here: {reply['status']}: {reply['stderr']}")
    escapes = json.loads(reply["stdout"])
    if settings.max_processes > 1:
        escapes["fork"] = "allowed by max_processes"
    return Assessment(_level(escapes), tuple(layers), escapes)


def require(settings: SandboxSettings, key: str = "reward_model.sandbox.min_level") -> Assessment:
    """Assess the sandbox. Raises SandboxError, which says what is missing, if it is weaker than settings.min_level."""
    found = assess(settings)
    if _rank(found.level) < _rank(settings.min_level):
        raise SandboxError(
            f"{key}={settings.min_level}, but the sandbox reaches only {found.summary()}. Give the process user "
            "namespaces (in a container: a seccomp profile that allows unshare), a kernel with Landlock (5.13 or "
            f"later), or accept less: {found.level if found.level in LEVELS else LEVELS[0]}; see docs/security.md"
        )
    return found


def _rank(level: str) -> int:
    return LEVELS.index(level) if level in LEVELS else -1


def _level(escapes: dict[str, str]) -> str:
    reached = "none"
    for level in LEVELS:
        if any(escapes[name] == "possible" for name in _DEMANDS[level]):
            break
        reached = level
    return reached
