"""Child of the supervisor: becomes the program itself, the code under test, or the tests.

Everything here runs in the same process as untrusted code (but for `test`), so nothing of it decides anything: it
produces output, or plain data, which is compared elsewhere.
"""

from __future__ import annotations

import atexit
import builtins
import fcntl
import gc
import json
import os
import resource
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

from verl_like.plugins.code_grading.sandbox import seccomp, testing, wire
from verl_like.plugins.code_grading.sandbox.settings import SandboxSettings
from verl_like.services import kernel

_STACK_BYTES = 64 * 1024**2  # contest programs recurse deeply
_MAIN = types.ModuleType("__main__")  # of the program
_ENVIRONMENT = {"HOME": "/tmp", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def become(settings: SandboxSettings, descriptors: dict[int, int], body: Callable[[], None]) -> None:
    """Turn this fresh fork into a limited process that runs `body` and ends."""
    status = 70
    try:
        os.setpgid(0, 0)
        kernel.die_with_parent()
        _take_descriptors(descriptors)
        _limit(settings)
        sys.path.extend(settings.python_path)
        os.environ.clear()
        os.environ.update(_ENVIRONMENT)
        gc.enable()
        atexit._clear()
        if seccomp.supported():
            kernel.install_filter(seccomp.build(own_pid=os.getpid(), may_fork=settings.max_processes > 1))
        status = _exit_status(body)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _take_descriptors(descriptors: dict[int, int]) -> None:
    """Keep only these, under their new numbers."""
    high = {target: fcntl.fcntl(source, fcntl.F_DUPFD, 200) for target, source in descriptors.items()}
    for target, source in high.items():
        os.dup2(source, target, inheritable=False)
    first_free = max(descriptors) + 1
    os.closerange(first_free, 256)


def _limit(settings: SandboxSettings) -> None:
    size = settings.memory_limit_mb * 1024**2
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    seconds = int(settings.timeout) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    stack = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(hard, _STACK_BYTES)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))


def _exit_status(body: Callable[[], None]) -> int:
    """Run as the interpreter would run a program: its exit status."""
    status = 0
    try:
        try:
            body()
        finally:
            threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # wait for its threads
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
        status = end.code & 0xFF if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    return status if _finish() else status or 1


def _finish() -> bool:
    """End the program as an interpreter would: run exit functions, close forgotten files. True if all was written."""
    atexit._run_exitfuncs()
    written = _flush()
    vars(_MAIN).clear()
    return _flush() and written


def _flush() -> bool:
    written = True
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except Exception:  # the program closed what is below it
            written = False
    return written


def _order(descriptor: int) -> dict[str, Any]:
    """Receive the task of this process: the one message of a pipe."""
    message = wire.receive(descriptor)
    os.close(descriptor)
    return message


def _execute(code: str) -> dict[str, Any]:
    """Run a program's text as the main module; its names."""
    sys.modules["__main__"] = _MAIN
    sys.argv = ["solution.py"]
    exec(compile(code, "solution.py", "exec"), vars(_MAIN))
    return vars(_MAIN)


def run() -> None:
    """A program's text (read from descriptor 4); then, if one is named, a function of it: its result goes to 3."""
    request = _order(4)
    names = _execute(request["code"])
    if "function" in request:
        function = _function(names, request["function"])
        result = function(*[wire.decode(argument) for argument in request["arguments"]])
        with os.fdopen(3, "w") as file:
            json.dump(wire.encode(result), file)


def _function(names: dict[str, Any], name: str) -> Callable[..., Any]:
    """The function of that name, or LeetCode's form of it: a method of class Solution."""
    if name not in names and isinstance(names.get("Solution"), type):
        return getattr(names["Solution"](), name)
    if name not in names:
        raise NameError(f"the program defines no function {name!r}")
    return names[name]


def answer() -> None:
    """The code under test (read from descriptor 5): its names, then calls of what is asked for (3 out, 4 in)."""
    names = _execute(_order(5)["code"])
    handles = wire.Handles()
    wire.send(3, {"names": [name for name in names if isinstance(name, str)]})
    while (call := wire.receive(4)) is not None:
        wire.send(3, _answer_one(names, handles, call))


def _answer_one(names: dict[str, Any], handles: wire.Handles, call: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = [wire.decode(item, handles.take) for item in call["arguments"]]
        keywords = {key: wire.decode(item, handles.take) for key, item in call["keywords"].items()}
        value = _function(names, call["name"])(*arguments, **keywords)
        return {
            "value": wire.encode(value, handles.give),
            "arguments": [wire.encode(a, handles.give) for a in arguments],
        }
    except Exception as error:
        return {"error": [type(error).__name__, str(error)[:500]]}


def test() -> None:
    """The tests (read from descriptor 6) in a process without untrusted code. Reports on descriptor 5."""
    request = _order(6)
    first = wire.receive(4)
    offered = first["names"] if isinstance(first, dict) else []
    with os.fdopen(5, "w") as report:
        if first is None:
            report.write(json.dumps({"error": "the code under test could not be run"}) + "\n")
            return
        for line in _outcomes(request, [name for name in offered if isinstance(name, str)]):
            report.write(json.dumps(line) + "\n")
            report.flush()


def _outcomes(request: dict[str, Any], offered: list[str]) -> Iterator[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    script = testing.Script(request["tests"], on_check=lines.append)
    names: dict[str, Any] = {"__name__": "tests"}
    exec(compile(request["setup"], "setup.py", "exec"), names)
    for name in script.names & set(offered) - set(names) - set(vars(builtins)) | {request["entry"]} - {""}:
        names[name] = testing.Remote(name, ask)
    try:
        script.run(names, request["entry"])
    except Exception as error:
        lines.append({"error": f"{type(error).__name__}: {error}"[:500]})
    yield from lines
    yield {"done": True}


def ask(message: dict[str, Any]) -> Any:
    """Send one call to the code under test and wait for its answer."""
    wire.send(3, message)
    return wire.receive(4)
