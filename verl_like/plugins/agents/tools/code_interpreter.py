"""A Python interpreter in the sandbox, whose names last from one call of an episode to the next.

A run in the sandbox is a new process, whose memory and files are gone after it. So the earlier calls of the episode run
again before the new one, silently and with the same random numbers: that makes the same state unless a program reads
the clock, and takes their time again, which counts. Calls that were cut off are not repeated.
"""

from __future__ import annotations

import json
import resource
from typing import Any

from verl_like.plugins.agents.tools.schema import texts_schema
from verl_like.plugins.code_grading.sandbox import probe
from verl_like.plugins.code_grading.sandbox.client import Jail
from verl_like.plugins.code_grading.sandbox.settings import SandboxError, SandboxSettings

SCHEMA = texts_schema(
    "code_interpreter",
    "Runs Python code and returns what it prints, and the value of its last expression.",
    code="Python code. Names last until the next call.",
)
_PROGRAM = """
import ast, contextlib, io, json, random, sys, traceback


def run(code, file, names):
    body = ast.parse(code, file).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), file, "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), file, "eval"), names)
        if value is not None:
            print(repr(value))


def main():
    order = json.load(sys.stdin)
    random.seed(0)
    names = {"__name__": "__main__"}
    for number, code in enumerate(order["past"], start=1):
        silent = io.StringIO()
        with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
            with contextlib.suppress(BaseException):
                run(code, f"<call {number}>", names)
    file = f"<call {len(order['past']) + 1}>"
    try:
        run(order["code"], file, names)
    except SystemExit:
        pass
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != file:
            trace = trace.tb_next
        sys.stdout.flush()
        traceback.print_exception(type(error), error, trace)
        sys.exit(1)


main()
"""
_ENDS = {
    "timeout": "it took longer than {timeout:g} s",
    "output": "it printed too much",
    "killed": "it was killed, perhaps for its memory",
}
_RUNS_PER_JAIL = 200


def _require_memory(settings: SandboxSettings) -> None:
    """Raise ValueError where a program may have more memory than the worker that starts it."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY and settings.memory_limit_mb * 1024**2 > most:
        raise ValueError(
            f"code_interpreter: config.memory_limit_mb={settings.memory_limit_mb} is more than the {most // 1024**2} "
            "MiB that a tool worker may have; lower it, or raise the workers' limit"
        )


class CodeInterpreter:
    """The tool, in verl's form.

    config: `keep_state` (true), and fields of SandboxSettings: timeout [s] of one call, memory_limit_mb, min_level ...
    Making it raises a ValueError for an unknown one, and where this machine locks programs up less than min_level.
    """

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        self.tool_schema = tool_schema or SCHEMA
        chosen = {key: value for key, value in config.items() if key not in ("type", "keep_state")}
        self._keeps_state = bool(config["keep_state"]) if "keep_state" in config else True
        try:
            self._settings = SandboxSettings(**chosen)
            _require_memory(self._settings)
            probe.require(self._settings, key="min_level")
        except (TypeError, SandboxError) as error:
            raise ValueError(f"code_interpreter: {error}") from error
        self._past: dict[str, list[str]] = {}
        self._jail: Jail | None = None
        self._num_runs = 0

    async def create(self, instance_id: str, **kwargs: Any) -> str:
        self._past[instance_id] = []
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[str, None, dict]:
        """Run the code and return what it printed, errors included. Metrics: errors, seconds."""
        code, past = str(parameters.get("code", "")), self._past[instance_id]
        reply = self._ready().run_program(_PROGRAM, json.dumps({"past": past, "code": code}))
        said = reply["stdout"] + reply["stderr"]
        if reply["status"] in _ENDS:
            why = _ENDS[reply["status"]].format(timeout=self._settings.timeout)
            said = f"{reply['stdout']}\nThe program was stopped: {why}. What it did is forgotten.".lstrip()
        elif self._keeps_state:
            past.append(code)
        return said, None, {"errors": float(reply["status"] != "ok"), "seconds": reply["seconds"]}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._past.pop(instance_id, None)

    def _ready(self) -> Jail:
        self._num_runs += 1
        if self._jail is not None and self._num_runs % _RUNS_PER_JAIL == 0:
            self._jail.close()
        if self._jail is None or self._jail.closed:
            self._jail = Jail(self._settings)
        return self._jail
