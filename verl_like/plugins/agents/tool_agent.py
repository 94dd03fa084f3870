"""Conversations with tools: the model calls them, they answer, until it calls no more.

    prompt -> [turn: sampled tokens -> calls -> tools -> observation] ... -> last turn without a call
                                    no call -> simulated user, where the row has one -> observation, or the end
                                    an environment that answers messages is asked after every turn

The model's tokens stay what it sampled (`Transcript`); tool text is observation: the model reads it and is not trained
on it. A call that cannot be read or carried out is answered with what is wrong, so that the model can try again; a tool
whose process died or gave no answer in time ends the episode, which is then left out of training.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_like.batch import MediaHandle, Prompt
from verl_like.data.chat import Messages, PromptEncoder
from verl_like.data.dataset import SINGLE_TURN
from verl_like.episodes.episode import Ask, Episode, EpisodeFailure, SingleTurn, Turn
from verl_like.episodes.transcript import Transcript, without_end
from verl_like.models.images import MediaError
from verl_like.models.videos import look_through
from verl_like.models.vision import VisionProcessor
from verl_like.plugins.agents.tool_calls.call import Parsed, ToolCall, ToolCallParser
from verl_like.plugins.agents.tools.tool_call import LOST, ROW_KEY, ToolOutcome, state_id
from verl_like.plugins.agents.tools.toolbox import Toolbox
from verl_like.rollout.rollout_engine import Completion, Sampled

_THINK, _TAIL_TOKENS = "<think>", 8
_TOOL_REWARD = "tool_reward/"
_BEGIN = 0  # the state before the first turn, where no environment tells it


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of a conversation.

    prompt: tokens of a prompt, with everything that an environment adds to it.
    response: tokens of all turns and all tool text; a request with its answer has at most prompt + response.
    turns: turns of the model; None: any number.
    observations: turns of the tools; None: any number.
    calls: tool calls of one turn that are carried out; the model is told of the others.
    """

    prompt: int
    response: int
    turns: int | None = None
    observations: int | None = None
    calls: int = 1


@dataclass(slots=True)
class _Progress:
    """Turns, counts and rewards of one episode so far."""

    turns: list[Turn] = field(default_factory=list)
    used: int = 0  # tokens after the prompt
    num_calls: int = 0
    state_id: int = 0  # before the next turn
    num_media: int = 0  # images and videos of tools
    counts: Counter[str] = field(default_factory=Counter)
    rewards: dict[str, list[float]] = field(default_factory=dict)  # of each tool's calls
    turn_scores: list[float] = field(default_factory=list)  # by a simulated user


class ToolAgent:
    """Runner of conversations with tools: the EpisodeRunner of rollout.multi_turn.

    Rows with agent_name single_turn_agent have one turn.

    end_ids: tokens that end a turn.
    follow_template: see Transcript.
    malformed_end: a call that cannot be read ends the episode, instead of being answered with what is wrong.
    environment: its reward, where it gives one, is the score; otherwise graders score, and find the tools' rewards in
        extra_info["rollout_reward_scores"].
    vision: processor of a model that looks at images and videos, which sees those that tools return, up to
        max_megapixels; another model is told how many they were.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        toolbox: Toolbox,
        parser: ToolCallParser,
        bounds: Bounds,
        *,
        end_ids: Sequence[int],
        follow_template: bool,
        malformed_end: bool = False,
        turn_rewards: bool = False,
        environment: bool = False,
        vision: VisionProcessor | None = None,
        max_megapixels: float = math.inf,
    ) -> None:
        self._vision, self._max_megapixels = vision, max_megapixels
        self._encoder, self._toolbox, self._parser, self._bounds = encoder, toolbox, parser, bounds
        self._end_ids, self._follow_template = frozenset(end_ids), follow_template
        self._malformed_end, self._turn_rewards, self._environment = malformed_end, turn_rewards, environment
        self._numbers = itertools.count()

    async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
        """Play one episode: begin it in a tool worker, let model and tools converse, and end it there in any case."""
        if prompt.row.agent == SINGLE_TURN:
            episode = await SingleTurn().run(prompt, sample, ask)
            return dataclasses.replace(episode, turns=(dataclasses.replace(episode.turns[0], state_id=_BEGIN),))
        session, progress = f"episode-{next(self._numbers)}", _Progress()
        open_here = True
        try:
            start = await asyncio.wrap_future(self._toolbox.begin(session, prompt.row))
            failure = _failure(start, "the begin of the episode")
            if failure is None:
                progress.state_id = start.state or _BEGIN
                failure = await self._converse(prompt, start, ask, session, progress)
            open_here = False
            end = await asyncio.wrap_future(self._toolbox.end(session, _label(prompt, sample, progress)))
        finally:
            if open_here:  # an error, or nobody wants the episode any more
                self._toolbox.end(session)
        return self._episode(prompt, progress, end, failure or _failure(end, "the end of the episode"))

    def _start(self, prompt: Prompt, start: ToolOutcome) -> tuple[list[int], Messages, list[MediaHandle]]:
        """The prompt: an environment's own, or the row's with what an environment says first at its end."""
        row, messages = prompt.row, list(prompt.row.messages)
        if start.messages:
            messages = list(start.messages)
        elif start.text:
            place = -2 if row.begun else -1  # not in an answer that the policy goes on with
            content, said = messages[place]["content"], f"\n\n{start.text}"
            whole = content + said if isinstance(content, str) else [*content, {"type": "text", "text": said}]
            messages[place] = messages[place] | {"content": whole}
        else:
            return prompt.ids, messages, row.media
        (ids,) = self._encoder.encode([(messages, row.tools)])
        if start.messages or not row.media:
            return ids, messages, []
        ids, media = self._expand(ids, row.media)
        return ids, messages, media

    def _expand(self, ids: list[int], media: Sequence[MediaHandle]) -> tuple[list[int], list[MediaHandle]]:
        assert self._vision is not None
        return self._vision.expand(ids, media, self._max_megapixels)

    async def _converse(
        self, prompt: Prompt, start: ToolOutcome, ask: Ask, session: str, progress: _Progress
    ) -> EpisodeFailure | None:
        """Turns until the model calls no tool, or a bound is reached. What was lost, if something was."""
        try:
            ids, messages, media = self._start(prompt, start)
        except ValueError as error:  # what the environment said first is refused
            return EpisodeFailure(kind="template", message=str(error))
        if (start.text or start.messages) and len(ids) > self._bounds.prompt:
            what = f"{len(ids)} tokens with what reset said, more than data.max_prompt_length={self._bounds.prompt}"
            return EpisodeFailure(kind="prompt_too_long", message=what)
        options: dict[str, Any] = {"follow_template": self._follow_template, "media": media, "expand": self._expand}
        transcript = Transcript(self._encoder, ids, messages, prompt.row.tools, **options)
        has_user, acts = self._toolbox.has_user(prompt.row), self._toolbox.acts
        per_turn = (prompt.row.extra_info.get(ROW_KEY) or {}).get("max_tokens_per_step")
        observation_ids, new_row = ids, False
        while (room := self._room(transcript, progress)) > 0:
            most = min(room, per_turn or room)
            completion = await ask(transcript.context_ids, max_tokens=most, media=transcript.media)
            turn = Turn.of(observation_ids, completion, new_row=new_row, media=media, state_id=progress.state_id)
            progress.turns.append(turn)
            progress.used += len(completion.sampled)
            parsed = self._parsed(transcript, completion, as_text=acts)
            calls_something = bool(parsed.calls or parsed.malformed)
            cut_off = completion.finish_reason == "length" and (not acts or len(completion.sampled) == room)
            if cut_off or not (calls_something or has_user):
                return None
            if parsed.malformed and self._malformed_end:
                progress.counts["malformed_calls"] += len(parsed.malformed)
                return None
            is_last = len(progress.turns) == self._bounds.turns or len(progress.turns) - 1 == self._bounds.observations
            progress.counts["out_of_turns"] += is_last
            if is_last and not acts:  # an environment sees the last move too
                return None
            calls = _numbered(parsed, progress.num_calls)
            progress.num_calls += len(calls)
            transcript.wrote(completion.sampled.token_ids.tolist(), _message(parsed, calls), whole=True)
            shown: list[MediaHandle] = []
            if calls_something:
                answers, shown, failure = await self._answers(parsed, calls, session, progress)
            else:
                answers, failure, anew = await self._reply(transcript.messages, session, progress)
                if anew and answers and failure is None and not is_last:
                    try:
                        (ids,) = self._encoder.encode([(answers, prompt.row.tools)])
                    except ValueError as error:
                        return EpisodeFailure(kind="template", message=str(error))
                    transcript = Transcript(self._encoder, ids, answers, prompt.row.tools, follow_template=False)
                    observation_ids, new_row, media = ids, True, []
                    progress.counts["new_rows"] += 1
                    continue
            if failure is not None or not answers or is_last:
                return failure
            try:
                observation = transcript.observe(answers, shown)
            except ValueError as error:  # a good call is refused at the start of the run: only this answer is to blame
                whole = calls or not calls_something  # a simulated user's words are no fault of the model's either
                return EpisodeFailure(kind="template", message=str(error)) if whole else None
            observation_ids, new_row, media = observation.ids, observation.new_row, observation.media
            progress.used += 0 if new_row else len(observation_ids)
            progress.counts["new_rows"] += new_row
        progress.counts["out_of_tokens"] += 1
        if not progress.turns and acts:
            return EpisodeFailure(kind="prompt_too_long", message="the first observation leaves no room for an answer")
        if progress.turns:  # the budget ended it, though the model had ended its turn
            progress.turns[-1] = dataclasses.replace(progress.turns[-1], finish_reason="length")
        return None

    def _room(self, transcript: Transcript, progress: _Progress) -> int:
        """Tokens that the next turn may have."""
        bounds = self._bounds
        return min(bounds.response - progress.used, bounds.prompt + bounds.response - len(transcript.context_ids))

    def _parsed(self, transcript: Transcript, completion: Completion, *, as_text: bool) -> Parsed:
        ids = without_end(completion.sampled.token_ids.tolist(), self._end_ids)
        tokenizer = self._encoder.tokenizer
        text = transcript.begun + tokenizer.decode(ids, skip_special_tokens=False)
        if as_text:
            return Parsed(content=text)
        before = tokenizer.decode(transcript.context_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
        opened = not transcript.begun and before.rstrip().endswith(_THINK)  # by the template: thinking is no call
        return self._parser.parse(_THINK + text if opened else text)

    async def _answers(
        self, parsed: Parsed, calls: Sequence[tuple[str, ToolCall]], session: str, progress: _Progress
    ) -> tuple[list[dict[str, Any]], list[MediaHandle], EpisodeFailure | None]:
        """One message for each call, in their order, and one for each that could not be read; and their images."""
        allowed, rewards, state = calls[: self._bounds.calls], [], None
        running = [self._toolbox.call(session, call.name, call.arguments) for _, call in allowed]
        outcomes = [await asyncio.wrap_future(future) for future in running]
        answers, shown = [], list[MediaHandle]()
        for (number, call), outcome in zip(allowed, outcomes, strict=True):
            progress.counts["calls"] += 1
            progress.counts["failed_calls"] += outcome.kind is not None
            if outcome.kind in LOST:
                where = "environment_error" if call.name in self._toolbox.of_environment else "tool_error"
                return [], [], _failure(outcome, call.name, where)
            if outcome.reward is not None:
                progress.rewards.setdefault(call.name, []).append(outcome.reward)
                rewards.append(outcome.reward)
            state = state if outcome.state is None else outcome.state
            content, media = await self._content(outcome, call.name, progress.num_media)
            progress.num_media += len(media)
            shown += media
            answers.append(_answer(number, call.name, content))
        for number, call in calls[self._bounds.calls :]:
            what = f"not run: at most {self._bounds.calls} call(s) at once"
            answers.append(_answer(number, call.name, what))
        for place, what in enumerate(parsed.malformed):
            progress.counts["malformed_calls"] += 1
            answers.append(_answer(f"broken{place:03d}", "unreadable", f"this call could not be read: {what}"))
        if self._turn_rewards and rewards:
            progress.turns[-1] = dataclasses.replace(progress.turns[-1], reward=sum(rewards))
        # Where no environment tells its state, turns that read the same began alike (GiGPO's anchor observations).
        read = [str(each["content"]) for each in answers] + [str(handle.source) for handle in shown]
        progress.state_id = state_id("\n".join(read)) if state is None else state
        return answers, shown, None

    async def _content(self, outcome: ToolOutcome, name: str, number: int) -> tuple[Any, list[MediaHandle]]:
        """Convert a tool's answer to message content: a text, or parts with images and videos before the text.

        outcome: the answer. Media that cannot be used become an error of the tool in the text that the model reads.
        name: name of the tool, for that error.
        number: number of the first image or video in the episode.
        """
        said, media = outcome.text, outcome.media
        if media and self._vision is None:
            kinds = Counter(kind for kind, _ in media)
            return "\n".join([*([said] if said else []), *(f"[{count} {kind}]" for kind, count in kinds.items())]), []
        found = [
            MediaHandle(kind=kind, path=name, column=kind, row=0, number=number + place, source=source)
            for place, (kind, source) in enumerate(media)
        ]
        if not found:
            return said, []
        try:
            await asyncio.to_thread(look_through, found, self._max_megapixels)
        except MediaError as error:
            return f"Error executing tool '{name}': {error}", []
        parts = [{"type": handle.kind} for handle in found] + ([{"type": "text", "text": said}] if said else [])
        return parts, found

    async def _reply(
        self, messages: Messages, session: str, progress: _Progress
    ) -> tuple[list[dict[str, Any]], EpisodeFailure | None, bool]:
        """The simulated user's message, or the environment's; none where it has ended the conversation. Whether they
        are the whole context of what follows."""
        outcome = await asyncio.wrap_future(self._toolbox.respond(session, messages))
        if outcome.kind is not None:
            return [], _failure(outcome, "the environment" if self._toolbox.acts else "the simulated user"), False
        if outcome.reward is not None:
            progress.turn_scores.append(outcome.reward)
            if self._turn_rewards:
                progress.turns[-1] = dataclasses.replace(progress.turns[-1], reward=outcome.reward)
        progress.state_id = state_id(outcome.text) if outcome.state is None else outcome.state
        progress.counts["out_of_turns"] += outcome.truncated
        said = outcome.messages or [{"role": "user", "content": outcome.text}]
        return [] if outcome.done else said, None, outcome.anew

    def _episode(
        self, prompt: Prompt, progress: _Progress, end: ToolOutcome, failure: EpisodeFailure | None
    ) -> Episode:
        nothing = Turn(observation_ids=prompt.ids, sampled=Sampled.of([], [], 0), finish_reason="stop")
        info: dict[str, Any] = {"num_turns": 2 * len(progress.turns)}  # as verl counts: the prompt, and tool text
        metrics = {name: value for name, value in end.metrics.items() if name.startswith(_TOOL_REWARD)}
        scores = {name.removeprefix(_TOOL_REWARD): value for name, value in metrics.items()}
        if scores or progress.rewards:
            info["rollout_reward_scores"] = {n: sum(rewards) for n, rewards in progress.rewards.items()} | scores
        played = {n: v for n, v in end.metrics.items() if n.startswith("env/") and isinstance(v, float)}
        won = [bool(value) for name, value in played.items() if name.endswith("/success")]
        if won:
            info["success"] = won[0]
        if self._toolbox.acts and self._turn_rewards and progress.turns:
            # The score is the sum of these rewards, and stands at the end: they say how much of it belongs elsewhere.
            *earlier, last = progress.turns
            elsewhere = sum(turn.reward or 0.0 for turn in earlier)
            progress.turns[-1] = dataclasses.replace(last, reward=-elsewhere)
        if progress.turn_scores:  # under the names of verl 0.7 and of 0.5
            info["turn_scores"] = progress.turn_scores
            info.setdefault("rollout_reward_scores", {})["user_turn_rewards"] = progress.turn_scores
        return Episode(
            turns=tuple(progress.turns) or (nothing,),
            reward=end.reward if self._environment else None,
            failure=failure,
            info=info,
            counts={**progress.counts, **played},
        )


def _label(prompt: Prompt, sample: int, progress: _Progress) -> str:
    """Name the picture of an episode by policy version, row and sample; "" where nothing was sampled."""
    versions = [int(version) for turn in progress.turns[-1:] for version in turn.sampled.weight_versions[-1:]]
    return f"weights_{versions[0]:06d}/{prompt.row.index}-{sample}" if versions else ""


def _failure(outcome: ToolOutcome, what: str, where: str = "environment_error") -> EpisodeFailure | None:
    if outcome.kind is None:
        return None
    return EpisodeFailure(kind=f"tool_{outcome.kind}", message=f"{what}: {outcome.message}", outcome=where)


def _numbered(parsed: Parsed, before: int) -> list[tuple[str, ToolCall]]:
    """Calls with ids of nine letters and digits, which is what Mistral's templates ask for."""
    return [(f"call{before + place:05d}", call) for place, call in enumerate(parsed.calls)]


def _message(parsed: Parsed, calls: Sequence[tuple[str, ToolCall]]) -> dict[str, Any]:
    """The assistant's message in the form of OpenAI's chat interface."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if calls:
        message["tool_calls"] = [
            {"id": number, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for number, call in calls
        ]
    return message


def _answer(number: str, name: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": number, "name": name, "content": content}
