"""The trainer's side of the gateway: an EpisodeRunner whose episodes are programs that talk to a base URL."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

from verl_like.batch import Prompt
from verl_like.episodes.episode import Ask, Episode, EpisodeFailure
from verl_like.plugins.agents.gateway.program import KEYS, ProgramError, ProgramReply, ProgramRequest, ProgramSpec
from verl_like.plugins.agents.gateway.server import GatewayServer
from verl_like.plugins.agents.gateway.session import Rules, Session
from verl_like.plugins.agents.tools.toolbox import fields_of
from verl_like.services.pool import WorkerPool

_START_S = 600.0  # a worker imports what the user's file imports


class Gateway:
    """Runner of episodes that runs every row as a program of the user's.

    Raises ProgramError where the program cannot be loaded.

    timeout: seconds that it may take between two requests; waiting for the policy is not counted.
    """

    def __init__(
        self, spec: ProgramSpec, rules: Rules, *, num_workers: int, host: str, port: int, timeout: float
    ) -> None:
        self._rules, self._timeout = rules, timeout
        self._numbers = itertools.count()
        try:
            self.server = GatewayServer(host, port)
        except OSError as error:
            raise ProgramError(
                f"{KEYS}host={host}, port={port}: {error}; choose an address of this machine and a free port (0: any)"
            ) from error
        self._pool: WorkerPool[ProgramRequest, ProgramReply] = WorkerPool(
            spec, num_workers=num_workers, start_timeout=_START_S
        )
        try:
            self._pool.start()
        except BaseException:
            self.close()
            raise

    async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
        """Run one program against a session of its own, and return the episode that its requests made.

        Raises the error that ended the session, EpisodeAborted for one. Program and session are ended in every case.
        """
        await self.server.start()
        session, name = Session(self._rules, ask), f"program-{next(self._numbers)}"
        key = self.server.open(session)
        try:
            end = await self._drive(prompt, session, name, key)
        finally:
            self.server.end(key)
            self._pool.submit([ProgramRequest(action="end", session=name)], session=name)
            self._pool.end_session(name)
        if session.failure is not None:
            raise session.failure
        return _episode(prompt, session, end)

    def close(self) -> None:
        """Kill the workers, stop listening. Safe to call twice."""
        self._pool.close()
        self.server.close()

    async def _drive(self, prompt: Prompt, session: Session, name: str, key: str) -> ProgramReply:
        row = fields_of(prompt.row)
        row["messages"] = row.pop("prompt")
        given: dict[str, Any] = {"data": row, "url": self.server.url, "key": key, "episode": session.episode}
        reply = await self._send("start", name, **given)
        session.touched_s = time.monotonic()  # it may have waited for a busy worker before it began
        while reply.kind is None and not reply.ended and session.failure is None:
            if not session.waiting and time.monotonic() - session.touched_s > self._timeout:
                what = f"it asked nothing and did not end within multi_turn.tool_timeout={self._timeout:g} s"
                return ProgramReply(kind="timeout", message=what)
            reply = await self._send("wait", name)
        return reply

    async def _send(self, action: str, name: str, **fields: Any) -> ProgramReply:
        request = ProgramRequest(action=action, session=name, **fields)
        return await asyncio.wrap_future(self._pool.submit([request], session=name)[0])


def _episode(prompt: Prompt, session: Session, end: ProgramReply) -> Episode:
    if end.kind is not None:
        return _lost(prompt, EpisodeFailure(kind=f"agent_program_{end.kind}", message=end.message))
    turns = session.turns()
    if not turns:
        return _lost(prompt, EpisodeFailure(kind="agent_program_output", message="it asked the policy nothing"))
    info = {**end.info, "num_turns": 2 * len(turns)}
    return Episode(turns=tuple(turns), reward=end.reward, info=info, counts=dict(session.counts))


def _lost(prompt: Prompt, failure: EpisodeFailure) -> Episode:
    return Episode(turns=Episode.lost(prompt, failure).turns, failure=failure, info={"num_turns": 0})
