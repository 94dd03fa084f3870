"""The trainer's side of tools: it knows their schemas, and has them run in a pool of worker processes.

    toolbox.begin("7-0", row)                          -> first observation of an environment, if there is one
    toolbox.call("7-0", "calculator", {"expression": "6*7"})   -> text for the model, reward of the step
    toolbox.end("7-0")                                 -> reward of the episode; the session is forgotten

No code of users' is imported here, and nothing that a tool does is an exception here.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import defaultdict
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from verl_like.plugins.agents.tools.interactions import interaction_kwargs
from verl_like.plugins.agents.tools.schema import bad_arguments, typed
from verl_like.plugins.agents.tools.text import SIDES
from verl_like.plugins.agents.tools.tool_call import KEYS, ToolError, ToolOutcome, ToolRequest, ToolSpec
from verl_like.services.pool import WorkerPool

if TYPE_CHECKING:  # it brings torch
    from verl_like.batch import PromptRow

logger = logging.getLogger(__name__)
_SHOWN_CHARS = 200
_STEPS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")


class Toolbox:
    """All tools of a run, in `num_workers` processes. Raises ToolError if they cannot be used.

    A session is an episode: its calls go to one worker, one after the other, because its state is there. When that
    worker is replaced, the session is lost: its calls fail with kind "crash", until `end`. Functions have no state:
    theirs go to any worker. Safe to use from any thread; the calls of one session are the caller's to order.
    """

    def __init__(self, spec: ToolSpec, *, num_workers: int = 1) -> None:
        if spec.truncate_side not in SIDES:
            raise ToolError(f"{KEYS}tool_response_truncate_side={spec.truncate_side!r}: one of {SIDES}")
        self._pool: WorkerPool[ToolRequest, ToolOutcome] = WorkerPool(spec, num_workers=num_workers)
        try:
            self._pool.start()
            described = self._pool.submit([ToolRequest(action="describe")])[0].result()
            if described.kind is not None:
                raise ToolError(f"{spec.source}: {described.message}")
        except BaseException:
            self._pool.close()
            raise
        tools, self._stateful, self.gives_reward, names, self.acts = json.loads(described.text)
        self.interactions: list[str] = names
        self.schemas: list[dict[str, Any]] = [schema for schema, *_ in tools]
        self._schemas = {schema["function"]["name"]: schema for schema in self.schemas}
        self._with_state = {schema["function"]["name"] for schema, stateful, _ in tools if stateful}
        self.of_environment = {schema["function"]["name"] for schema, _, environment in tools if environment}
        self._usage = ToolUsage()
        self._allowed: dict[str, tuple[str, ...]] = {}  # of sessions: the tools that they may call
        self._warned: set[str] = set()

    def schemas_for(self, row: PromptRow) -> list[dict[str, Any]] | None:
        """The schemas of the tools that a row's episodes may call, for the chat template; None where there is none.

        extra_info.tool_selection: their names, where not all (verl's rule: unknown names are left out).
        """
        return [self._schemas[name] for name in self._names_for(row)] or None

    def begin(self, session: str, row: PromptRow) -> Future[ToolOutcome]:
        """Begin an episode. text: the first observation of an environment, or what tools say at their creation."""
        names = self._names_for(row)
        self._allowed[session] = names
        if not self._stateful:
            return _answered(ToolOutcome())
        return self._submit(ToolRequest(action="begin", session=session, names=names, row=fields_of(row)))

    def take_usage(self) -> dict[str, float]:
        """Report the calls that ended since the last time: tool/<name>/{calls,errors,timeouts}, /seconds/{mean,max}."""
        return self._usage.take()

    def call(self, session: str, name: str, arguments: dict[str, Any] | str) -> Future[ToolOutcome]:
        """Call a tool.

        What the model got wrong is answered at once: kind "unknown_tool" or "bad_arguments", with a text that tells it.

        arguments: as the model wrote them, a JSON object or its text.
        """
        future = self._call(session, name, arguments)
        if name in self._schemas:
            self._usage.watch(name, future)
        return future

    def _call(self, session: str, name: str, arguments: dict[str, Any] | str) -> Future[ToolOutcome]:
        begun = self._allowed.get(session)
        allowed = tuple(self._schemas) if begun is None else begun
        if name not in allowed:
            return _refused(
                "unknown_tool", f"Unknown function '{str(name)[:_SHOWN_CHARS]}'. Available tools: {[*allowed]}"
            )
        problem = ""
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                problem = f"Invalid JSON in arguments for '{name}': {str(error)[:_SHOWN_CHARS]}"
        problem = problem or bad_arguments(self._schemas[name], arguments)
        if problem or not isinstance(arguments, dict):
            return _refused("bad_arguments", problem)
        if begun is None and name in self._with_state:
            return _refused(
                "exception", f"Error executing tool '{name}': the episode {session} has not begun, or has ended"
            )
        given = typed(self._schemas[name], arguments)
        request = ToolRequest(action="call", session=session, name=name, arguments=given)
        return self._submit(request, stateful=name in self._with_state)

    def has_user(self, row: PromptRow) -> bool:
        """True where a simulated user, or an environment (`acts`), answers the model in this row's episodes."""
        return self.acts or bool(self.interactions and interaction_kwargs(row.extra_info))

    def respond(self, session: str, messages: list[dict[str, Any]]) -> Future[ToolOutcome]:
        """Ask the simulated user for the answer to a conversation that ends with the model's message."""
        return self._submit(ToolRequest(action="respond", session=session, messages=messages))

    def end(self, session: str, label: str = "") -> Future[ToolOutcome]:
        """End an episode: return its reward, then release its state. Also for one that failed, or was given up.

        label: name of its picture.
        """
        begun = self._allowed.pop(session, None) is not None
        if not begun or not self._stateful:
            return _answered(ToolOutcome())
        future = self._submit(ToolRequest(action="end", session=session, label=label))
        self._pool.end_session(session)  # the call above still runs
        return future

    def worker_pids(self) -> list[int]:
        """Process ids of the live workers."""
        return self._pool.worker_pids()

    def close(self) -> None:
        """Kill the workers. Futures that still wait get a RuntimeError. Safe to call twice."""
        self._pool.close()

    def _submit(self, request: ToolRequest, *, stateful: bool = True) -> Future[ToolOutcome]:
        return self._pool.submit([request], session=request.session if stateful else None)[0]

    def _names_for(self, row: PromptRow) -> tuple[str, ...]:
        selection = row.extra_info.get("tool_selection")
        if row.extra_info.get("need_tools_kwargs") and not row.extra_info.get("tools_kwargs"):
            self._warn_once("rows with extra_info.need_tools_kwargs have no extra_info.tools_kwargs")
        given = row.extra_info.get("tools_kwargs")
        for name, settings in given.items() if isinstance(given, dict) else ():
            if name not in self._schemas:
                self._warn_once(f"extra_info.tools_kwargs names {name!r}, which is none of {list(self._schemas)}")
            for step in settings if isinstance(settings, dict) else ():
                if step not in _STEPS:
                    self._warn_once(f"extra_info.tools_kwargs.{name} has {step!r}, which is none of {_STEPS}")
        if selection is None or len(selection) == 0:
            return tuple(self._schemas)
        for name in selection:
            if name not in self._schemas:
                self._warn_once(f"extra_info.tool_selection names {name!r}, which is none of {list(self._schemas)}")
        return tuple(dict.fromkeys(name for name in selection if name in self._schemas))

    def _warn_once(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s", what)


def fields_of(row: PromptRow) -> dict[str, Any]:
    """A row in the columns of verl's schema: what travels, as the row's class brings torch."""
    return {
        "index": row.index,
        "data_source": row.data_source,
        "prompt": row.messages,
        "ability": row.ability,
        "ground_truth": row.ground_truth,
        "reward_model": {"style": row.style, "ground_truth": row.ground_truth},
        "extra_info": row.extra_info,
    }


def _answered(outcome: ToolOutcome) -> Future[ToolOutcome]:
    future: Future[ToolOutcome] = Future()
    future.set_result(outcome)
    return future


def _refused(kind: str, said: str) -> Future[ToolOutcome]:
    return _answered(ToolOutcome(kind=kind, text=said, message=said))


class ToolUsage:
    """Calls that have ended, by tool: also those of episodes that nobody waits for any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: defaultdict[str, list[tuple[str | None, float]]] = defaultdict(list)  # kind, seconds in the tool

    def watch(self, name: str, future: Future[ToolOutcome]) -> None:
        """Count this call when it ends."""
        future.add_done_callback(partial(self._add, name))

    def _add(self, name: str, future: Future[ToolOutcome]) -> None:
        if future.cancelled() or future.exception() is not None:  # the pool was closed: no outcome of the tool's
            return
        outcome = future.result()
        with self._lock:
            self._ended[name].append((outcome.kind, outcome.seconds))

    def take(self) -> dict[str, float]:
        """Metrics tool/<name>/*; what they are of is forgotten."""
        with self._lock:
            ended, self._ended = self._ended, defaultdict(list)
        metrics: dict[str, float] = {}
        for name, calls in sorted(ended.items()):
            kinds, seconds = zip(*calls, strict=True)
            metrics |= {
                f"tool/{name}/calls": float(len(calls)),
                f"tool/{name}/errors": float(sum(kind is not None for kind in kinds)),
                f"tool/{name}/timeouts": float(kinds.count("timeout")),
                f"tool/{name}/seconds/mean": sum(seconds) / len(calls),
                f"tool/{name}/seconds/max": max(seconds),
            }
        return metrics
