"""Service of a worker that runs agent loops: their coroutines, many at a time, each until it needs the policy."""

from __future__ import annotations

import asyncio
import importlib
import pickle
import sys
import traceback
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from verl_like.data.chat import PromptEncoder
from verl_like.plugins.agents.tools.service import PRINTED_CHARS, Limited
from verl_like.plugins.agents.tools.text import MOST_CHARS, to_reward
from verl_like.plugins.verl_agents.callback_loop import load_callback
from verl_like.plugins.verl_agents.loading import all_loops
from verl_like.plugins.verl_agents.messages import AgentLoopError, AgentLoopSpec, AgentReply, AgentRequest, LoopRow
from verl_like.plugins.verl_agents.policy import Policy
from verl_like.user_code import accepted, find_stand_ins

_TRACEBACK_CHARS = 2000
_IDLE_S = 0.01  # without news, while the policy is at work: then the trainer is told that there is none
_CANCEL_S = 1.0
# Keys of newer verl that its loops read
_NEWER = {"actor_rollout_ref": {"rollout": {"full_determinism": False}}, "data": {"mm_processor_kwargs": {}}}


@dataclass
class _Session:
    """One episode. failure: what its coroutine raised."""

    policy: Policy = field(default_factory=Policy)
    task: asyncio.Task[tuple[LoopRow, ...] | None] | None = None
    failure: BaseException | None = None


class AgentLoopService:
    """The service of agent loop workers. Making one raises an AgentLoopError that names the key to change."""

    is_async = True

    def __init__(self, spec: AgentLoopSpec) -> None:
        self._printed = [Limited(sys.stdout, 1), Limited(sys.stderr, 2)]
        sys.stdout, sys.stderr = self._printed
        find_stand_ins()
        encoder = pickle.loads(spec.encoder)
        self._tokenizer = encoder.tokenizer
        # verl's parsers of tool calls are given the tokenizer alone
        self._tokenizer.end_ids = frozenset(spec.end_ids) or {self._tokenizer.eos_token_id}
        self._tokenizer.chat_template = encoder.template_kwargs.get("chat_template", self._tokenizer.chat_template)
        self._tokenizer.apply_chat_template = partial(_templated, encoder, self._tokenizer.apply_chat_template)
        self._config: Any = OmegaConf.merge(_NEWER, spec.settings)
        self._model_type = spec.model_type
        self._loops = all_loops(spec.config_path, spec.callback)
        self._classes = {name: entry.load() for name, entry in self._loops.items()}
        if spec.callback is not None:
            load_callback(spec.callback)  # a missing one is told now
        self._tools = self._load_tools()
        self._sessions: dict[str, _Session] = {}

    def _load_tools(self) -> SimpleNamespace:
        """Load the tools as verl 0.9 gives them to loops: an object with `tools`. Raises AgentLoopError."""
        turns = self._config.actor_rollout_ref.rollout.multi_turn
        paths = {name: turns[name] for name in ("tool_config_path", "function_tool_path")}
        if not any(paths.values()):
            return SimpleNamespace(tools=[])
        try:
            return SimpleNamespace(tools=importlib.import_module("verl.tools.tool_registry").load_all_tools(**paths))
        except Exception as error:
            tail = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARS:]
            raise AgentLoopError(f"the tools of the agent loops, {paths}, cannot be loaded:\n{tail}") from error

    async def call(self, payload: AgentRequest) -> AgentReply:
        """Start, resume or end a loop, and report its state.

        A reply comes when the loop needs the policy, has ended or, while the policy is at work, does nothing.
        """
        for stream in self._printed:
            stream.left = PRINTED_CHARS
        match payload.action:
            case "start":
                session = self._sessions[payload.session] = _Session()
                session.task = asyncio.create_task(self._run(payload, session))
                session.task.add_done_callback(lambda _: session.policy.news.set())
            case "resume":
                session = self._sessions[payload.session]
                for answer in payload.answers:
                    session.policy.answer(answer)
            case _:
                return await self._end(payload.session)
        return await self._progress(session)

    async def _run(self, request: AgentRequest, session: _Session) -> tuple[LoopRow, ...] | None:
        """Run the loop and convert its result.

        Every error of the user's code is kept: SystemExit would end the worker.
        """
        try:
            loop = self._make(request.name, session.policy)
            fields = request.fields
            if "messages" in signature(loop.run).parameters:  # verl 0.5
                output = await loop.run(fields["raw_prompt"], dict(request.sampling))
            else:
                output = await loop.run(dict(request.sampling), **accepted(loop.run, fields))
            outputs = output if isinstance(output, list | tuple) else [output]
            if not outputs:
                raise ValueError("run() returned an empty list instead of an AgentLoopOutput")
            return tuple(map(_row, outputs))
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            session.failure = error
            return None

    def _make(self, name: str, policy: Policy) -> Any:
        """A loop of its own for each episode, as in verl."""
        make, data = self._classes[name], self._config.data
        given = {
            "trainer_config": SimpleNamespace(config=self._config),
            "server_manager": policy,
            "tokenizer": self._tokenizer,
            "processor": None,
            "dataset_cls": None,
            "dataset_config": data,
            "data_config": SimpleNamespace(config=data),
            "hf_model_type": self._model_type,
            "tools": self._tools,
        }
        return make(**accepted(make, given), **self._loops[name].arguments)

    async def _progress(self, session: _Session) -> AgentReply:
        policy, task = session.policy, session.task
        assert task is not None
        while not task.done() and not policy.asked:
            policy.news.clear()
            try:
                await asyncio.wait_for(policy.news.wait(), _IDLE_S if policy.is_busy else None)
            except TimeoutError:
                break
        if not task.done():
            for _ in range(3):  # what the loop asks at the same time comes along
                await asyncio.sleep(0)
        if isinstance(session.failure, MemoryError):
            raise session.failure
        if session.failure is not None:
            message = "".join(traceback.format_exception(session.failure))[-_TRACEBACK_CHARS:]
            return AgentReply(kind="exception", message=message)
        if task.done():
            return AgentReply(rows=task.result())
        asked, policy.asked = policy.asked, []
        return AgentReply(asked=tuple(asked))

    async def _end(self, name: str) -> AgentReply:
        session = self._sessions.pop(name, None)
        if session is not None and session.task is not None and not session.task.done():
            session.task.cancel()
            await asyncio.wait({session.task}, timeout=_CANCEL_S)
        return AgentReply()


def _templated(encoder: PromptEncoder, template: Any, conversation: Any, *given: Any, **options: Any) -> Any:
    """The tokenizer's apply_chat_template as loops know it: ids, where transformers 5 would give a dictionary. After an
    answer that the row has begun there is no generation prompt: the policy goes on with it."""
    if options.get("add_generation_prompt") and encoder.begun(conversation):
        options |= {"add_generation_prompt": False, "continue_final_message": True}
    return template(conversation, *given, **{"return_dict": False, **options})


def _row(output: Any) -> LoopRow:
    """An AgentLoopOutput of any of verl's versions. ValueError, TypeError tell what is wrong with it."""
    if not hasattr(output, "response_mask"):
        raise TypeError(f"run() must return an AgentLoopOutput or a list of them, not {type(output).__name__}")
    if any((getattr(output, "multi_modal_data", None) or {}).values()):
        raise ValueError("AgentLoopOutput.multi_modal_data: agent loops are text only here")
    prompt_P, response_R, mask_R = (
        np.asarray(getattr(output, name), dtype=np.int64).reshape(-1)
        for name in ("prompt_ids", "response_ids", "response_mask")
    )
    if len(response_R) != len(mask_R) or not np.isin(mask_R, (0, 1)).all():
        lengths = f"{len(response_R)} response_ids, {len(mask_R)} values in response_mask"
        raise ValueError(f"AgentLoopOutput: response_mask must have a 0 or 1 for each response id ({lengths})")
    if not len(prompt_P):
        raise ValueError("AgentLoopOutput.prompt_ids is empty")
    metrics = getattr(output, "metrics", None) or {}
    named = metrics if isinstance(metrics, dict) else dict(metrics)
    return LoopRow(
        prompt_ids_P=prompt_P.astype(np.int32),
        response_ids_R=response_R.astype(np.int32),
        mask_R=mask_R.astype(bool),
        reward=to_reward(getattr(output, "reward_score", None)),
        num_turns=int(getattr(output, "num_turns", 0)),
        metrics={name: float(named[name]) for name in ("generate_sequences", "tool_calls") if named.get(name)},
        extra={str(key): _plain(value) for key, value in (getattr(output, "extra_fields", None) or {}).items()},
    )


def _plain(value: Any) -> Any:
    """Convert a value to plain data that can leave the worker; objects of other types become their text."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value[:MOST_CHARS]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy, torch
        return _plain(value.tolist())
    return str(value)[:MOST_CHARS]
