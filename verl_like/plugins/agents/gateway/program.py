"""Worker of the gateway: runs users' programs, many at a time, each with a base URL and an API key of its own.

    async def run(data, base_url, api_key, **more) -> float | dict | None      # or def: then it has a thread of its own

or a command line, whose environment has the URL and the key under the names that the official clients read.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar

from verl_like.plugins.agents.tools.service import PRINTED_CHARS, Limited
from verl_like.plugins.agents.tools.text import to_reward
from verl_like.services.service import Outcome, OwnSpec, ServiceError
from verl_like.user_code import check_call, load, takes

KEYS = "actor_rollout_ref.rollout.gateway."
_WAIT_S = 0.5  # of a call that asks whether a program has ended
_CHARS = 2000
_ENDING_S = 2.0


class ProgramError(ServiceError):
    """The program cannot be used at all: no such file or function, a failing import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramReply(Outcome):
    """State of a program.

    ended: the program has finished.
    reward: the reward it returned; None if it returned none.
    info: everything else it returned, for the graders.
    """

    ended: bool = False
    reward: float | None = None
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRequest:
    """One message to a worker. action: start, wait, end."""

    action: str
    session: str
    data: dict[str, Any] = field(default_factory=dict)
    url: str = ""
    key: str = ""
    episode: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSpec(OwnSpec):
    """Program that a worker runs: a function or a command line, one of both.

    path: file.py:function.
    command: a command line.
    """

    factory: str = "verl_like.plugins.agents.gateway.program:ProgramService"
    concurrency: int = 1024
    noun: str = "agent program"
    section: str = "actor_rollout_ref.rollout.multi_turn.tool_"  # tool_timeout, tool_memory_limit_mb

    path: str | None = None
    command: str | None = None

    outcome: ClassVar[type[Outcome]] = ProgramReply
    error: ClassVar[type[ServiceError]] = ProgramError
    payload_name: ClassVar[str] = "the row"

    @property
    def source(self) -> str:
        return f"{KEYS}path={self.path}" if self.path else f"{KEYS}command={self.command}"


class ProgramService:
    """The service of the workers. Making one raises an error that names the key to change."""

    is_async = True

    def __init__(self, spec: ProgramSpec) -> None:
        self._printed = [Limited(sys.stdout, 1), Limited(sys.stderr, 2)]
        sys.stdout, sys.stderr = self._printed
        self._command = None if spec.command is None else _program(spec.command)
        self._run = None if spec.path is None else load(spec.path, f"{KEYS}path")
        if self._run is not None:
            given = dict.fromkeys(("data", "base_url", "api_key", *_named(self._run)), "")
            check_call(self._run, f"{KEYS}path={spec.path}", keywords=given)
            if isinstance(self._run, type):
                raise ProgramError(f"{KEYS}path={spec.path} is a class; name a function run(data, base_url, api_key)")
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    async def call(self, payload: ProgramRequest) -> ProgramReply:
        """Start, end or poll a program; a poll waits a moment for its result, then reports the program's state."""
        for stream in self._printed:
            stream.left = PRINTED_CHARS
        if payload.action == "start":
            work = self._function(payload) if self._run is not None else self._process(payload)
            self._tasks[payload.session] = asyncio.create_task(work)
        if payload.action == "end":
            return await self._end(payload.session)
        task = self._tasks[payload.session]
        await asyncio.wait({task}, timeout=_WAIT_S)
        if not task.done():
            return ProgramReply()
        try:
            reward, info = _result(task.result())
            return ProgramReply(ended=True, reward=reward, info=info)
        except MemoryError:
            raise
        except BaseException as error:  # of users' code: SystemExit would end the worker
            return ProgramReply(kind="exception", message="".join(traceback.format_exception(error))[-_CHARS:])

    async def _function(self, request: ProgramRequest) -> Any:
        run = self._run
        assert run is not None
        given = {"data": request.data, "base_url": f"{request.url}/v1", "api_key": request.key}
        more = {"anthropic_base_url": request.url, "episode": request.episode}
        given |= {name: more[name] for name in _named(run)}
        try:
            return await (run(**given) if inspect.iscoroutinefunction(run) else _in_thread(run, given))
        except (SystemExit, KeyboardInterrupt) as error:  # they would stop the event loop
            raise RuntimeError(f"the program tried to end the process: {error!r}") from error

    async def _process(self, request: ProgramRequest) -> Any:
        assert self._command is not None
        url, key = request.url, request.key
        with (
            tempfile.TemporaryFile() as output,
            tempfile.TemporaryFile() as errors,
            tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as data,
        ):
            json.dump(request.data, data, default=str)
            data.flush()
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,  # no pipe: its end would wait for whatever the command left in the background
                stderr=errors,
                start_new_session=True,
                env={
                    **os.environ,
                    **{"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": key},
                    **{"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key},
                    "VERL_LIKE_EPISODE": request.episode,
                    "VERL_LIKE_DATA_FILE": data.name,  # a string of an environment has at most 128 KiB
                },
            )
            try:
                await process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):  # nothing is left of its group
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            if process.returncode != 0:
                errors.seek(0)
                said = errors.read()[-_CHARS:].decode(errors="replace")
                raise RuntimeError(f"the command ended with {process.returncode}: {said}")
            output.seek(0)
            out = output.read()
        last = out.strip().rpartition(b"\n")[2].decode(errors="replace")
        try:
            return json.loads(last) if last else None
        except ValueError:  # it says something else last, and leaves the reward to the graders
            return None

    async def _end(self, session: str) -> ProgramReply:
        task = self._tasks.pop(session, None)
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_ENDING_S)
        return ProgramReply(ended=True)


def _program(command: str) -> list[str]:
    """The words of a command line. Raises ProgramError where its first is no program here."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ProgramError(f"{KEYS}command={command!r}: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise ProgramError(f"{KEYS}command={command!r}: there is no program {words[:1] or ''} here; name one to run")
    return words


def _named(run: Callable[..., Any]) -> list[str]:
    """List the optional keyword arguments that the function accepts."""
    try:
        return [name for name in ("anthropic_base_url", "episode") if takes(run, name)]
    except (TypeError, ValueError):  # nothing that can be called, as check_call says; some compiled functions
        return []


async def _in_thread(run: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Run the program in a thread of its own.

    In a pool's threads, programs would wait for those that hang, and nothing can end these.
    """
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # from here on it cannot be cancelled under the thread

    def work() -> None:
        try:
            future.set_result(run(**given))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return await asyncio.wrap_future(future)


def _result(value: Any) -> tuple[float | None, dict[str, Any]]:
    """The reward, and the rest of a dictionary. Raises TypeError for anything else."""
    if isinstance(value, Mapping):
        info = {str(name): item for name, item in value.items() if name != "reward"}
        return to_reward(value.get("reward")), json.loads(json.dumps(info, default=str))
    if value is None or isinstance(value, bool | int | float):
        return to_reward(value), {}
    raise TypeError(f"the program returned {value!r:.200}: give a number, a dictionary with `reward`, or nothing")
