"""The trainer's side of agent loops: an EpisodeRunner that samples what users' coroutines ask for.

    start -> [asked: contexts -> policy -> resume with answers] ... -> rows          one session of the pool per episode

The policy is waited for here, outside of any call to a worker: only a loop's own code uses up its time. Several
requests of an episode may be with the policy at a time. Whatever a loop does wrong loses its episode, not the run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Collection
from typing import Any

from verl_like.batch import Prompt, PromptRow
from verl_like.episodes.episode import Ask, Episode, EpisodeFailure, EpisodeRunner, Turn
from verl_like.episodes.first_n import end
from verl_like.plugins.agents.tools.toolbox import fields_of
from verl_like.plugins.verl_agents.messages import AgentLoopSpec, AgentReply, AgentRequest, Answered, Asked
from verl_like.plugins.verl_agents.turns import turns_of
from verl_like.rollout.rollout_engine import NOTHING, Completion, SamplingParams
from verl_like.services.pool import WorkerPool

# While the policy is at work: whether the loop asks more beside it, after three times as long each time
_POLL_S, _LONGEST_POLL_S = 0.05, 30.0
_START_S = 600.0  # a worker imports transformers, and what the user's files import


class AgentLoops:
    """Runner of the rows whose agent_name is in `names`; rows without one are `default`'s, all others for `others`.

    A request with its answer has at most prompt + response tokens, an answer at most `response`. Raises AgentLoopError
    where a loop cannot be loaded.

    prompt: data.max_prompt_length.
    response: data.max_response_length.
    turn_rewards: see `turns_of`.
    """

    def __init__(
        self,
        spec: AgentLoopSpec,
        *,
        num_workers: int,
        names: Collection[str],
        default: str,
        others: EpisodeRunner,
        prompt: int,
        response: int,
        turn_rewards: bool = False,
    ) -> None:
        self._names, self._default, self._others, self._turn_rewards = names, default, others, turn_rewards
        self._response, self._total = response, prompt + response
        self._numbers = itertools.count()
        self._pool: WorkerPool[AgentRequest, AgentReply] = WorkerPool(
            spec, num_workers=num_workers, start_timeout=_START_S
        )
        try:
            self._pool.start()
        except BaseException:
            self._pool.close()
            raise

    async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
        """Run the agent loop that the prompt's row names, or the default one, and convert its result to an episode.

        Rows whose agent is no loop go to the other runner.
        """
        name = prompt.row.agent or self._default
        if name not in self._names:
            return await self._others.run(prompt, sample, ask)
        episode = _Running(self._pool, f"agent-{next(self._numbers)}", ask, self._response, self._total)
        try:
            found = await episode.drive(name, prompt.row)
        finally:
            await episode.end()
        if isinstance(found, EpisodeFailure):
            return _lost(prompt, found)
        return self._episode(prompt, found, episode.record)

    def close(self) -> None:
        """Kill the workers. Safe to call twice."""
        self._pool.close()

    def worker_pids(self) -> list[int]:
        """Process ids of the live workers."""
        return self._pool.worker_pids()

    def _episode(self, prompt: Prompt, end: AgentReply, record: list[tuple[list[int], Completion]]) -> Episode:
        rows = list(end.rows or ())
        try:
            bounds = {"response": self._response, "total": self._total}
            turns, counts = turns_of(rows, record, **bounds, turn_rewards=self._turn_rewards)
        except ValueError as error:
            return _lost(prompt, EpisodeFailure(kind="agent_loop_output", message=str(error)))
        last = rows[-1]  # of several, it has the score and what graders read, as in verl
        info: dict[str, Any] = {**last.extra, "num_turns": last.num_turns or 2 * len(turns)}
        seconds = {f"agent_loop_s/{name}": sum(row.metrics.get(name, 0.0) for row in rows) for name in last.metrics}
        return Episode(turns=tuple(turns), reward=last.reward, info=info, counts={**counts, **seconds})


class _Running:
    """One episode. record: contexts that were sent, and what came back."""

    def __init__(self, pool: WorkerPool[AgentRequest, AgentReply], session: str, ask: Ask, response: int, total: int):
        self.record: list[tuple[list[int], Completion]] = []
        self._pool, self._session, self._ask = pool, session, ask
        self._response, self._total = response, total
        self._sampling: dict[asyncio.Task[Completion], Asked] = {}

    async def drive(self, name: str, row: PromptRow) -> AgentReply | EpisodeFailure:
        """The reply with the rows that the loop returned, or what went wrong."""
        sampling, patience = _shown(self._ask.sampling), _POLL_S
        reply = await self._send("start", name=name, fields=_columns(row), sampling=sampling)
        while reply.kind is None and reply.rows is None:
            for asked in reply.asked:
                self._sampling[asyncio.ensure_future(self._sampled(asked))] = asked
            patience = _POLL_S if reply.asked else min(3 * patience, _LONGEST_POLL_S)
            try:
                answers = await self._answers(patience)
            except ValueError as error:  # what the engine refuses: ids that it does not know, say
                return EpisodeFailure(kind="agent_loop_request", message=str(error))
            reply = await self._send("resume", answers=answers)
        if reply.kind is not None:
            return EpisodeFailure(kind=f"agent_loop_{reply.kind}", message=f"{name}: {reply.message}")
        return reply

    async def end(self) -> None:
        """Cancel the requests in flight, and let the worker forget the episode."""
        self._pool.submit([AgentRequest(action="end", session=self._session)], session=self._session)
        self._pool.end_session(self._session)
        await end(self._sampling)

    async def _send(self, action: str, **fields: Any) -> AgentReply:
        request = AgentRequest(action=action, session=self._session, **fields)
        return await asyncio.wrap_future(self._pool.submit([request], session=self._session)[0])

    async def _answers(self, patience: float) -> tuple[Answered, ...]:
        """Collect the completions that have arrived, in the order of asking.

        patience: seconds to wait at most for the first one; none may arrive.
        """
        if not self._sampling:  # the loop does not wait for the policy
            return ()
        done, _ = await asyncio.wait(self._sampling, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        answers = []
        for task in [task for task in self._sampling if task in done]:
            asked, completion = self._sampling.pop(task), task.result()
            self.record.append((asked.context_ids.tolist(), completion))
            ids, log_probs = completion.sampled.token_ids, completion.sampled.log_probs
            reason = completion.finish_reason
            answers.append(Answered(number=asked.number, token_ids=ids, log_probs=log_probs, finish_reason=reason))
        return tuple(answers)

    async def _sampled(self, asked: Asked) -> Completion:
        context_ids = asked.context_ids.tolist()
        room = min(self._response, self._total - len(context_ids))
        if room < 1:  # the loop finds out by itself that its budget is used up
            return Completion(request_id="", sampled=NOTHING, finish_reason="length")
        sampling = _changed(self._ask.sampling, asked.sampling) if asked.sampling else None
        return await self._ask(context_ids, sampling, max_tokens=room)


def _changed(base: SamplingParams, wanted: dict[str, Any]) -> SamplingParams:
    """The run's parameters with a loop's; what ends a response of the run also ends these."""
    fields = dict(wanted)
    for name in ("stop", "stop_token_ids"):
        if name in fields:
            fields[name] = tuple(dict.fromkeys([*getattr(base, name), *fields[name]]))
    if "temperature" in fields:
        fields["do_sample"] = fields["temperature"] > 0
        fields["temperature"] = fields["temperature"] or base.temperature
    if "max_tokens" in fields:
        fields["max_tokens"] = min(fields["max_tokens"], base.max_tokens)
    changed = dataclasses.replace(base, **fields)
    if changed.min_tokens > changed.max_tokens:
        raise ValueError(f"sampling_params: min_tokens={changed.min_tokens}, but max_tokens={changed.max_tokens}")
    return changed


def _shown(sampling: SamplingParams) -> dict[str, Any]:
    """Convert the sampling parameters to the `sampling_params` that verl's loops are given."""
    greedy = sampling.greedy
    return {
        "temperature": 0.0 if greedy else sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": -1 if greedy else sampling.top_k,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": True,
    }


def _columns(row: PromptRow) -> dict[str, Any]:
    """A row as verl's data set gives it to loops."""
    fields = fields_of(row)
    nested = {name: row.extra_info.get(name) or {} for name in ("tools_kwargs", "interaction_kwargs")}
    return {**fields, **nested, "raw_prompt": fields["prompt"], "agent_name": row.agent}


def _lost(prompt: Prompt, failure: EpisodeFailure) -> Episode:
    nothing = Turn(observation_ids=prompt.ids, sampled=NOTHING, finish_reason="stop")
    return Episode(turns=(nothing,), failure=failure, info={"num_turns": 0})
