"""Environments that answer the model's messages, as a worker runs them: games, adapters, classes of the user's.

    begin   -> the first observation, as text behind the instruction, or the whole prompt as messages
    respond -> what follows the model's message: an observation, or the end; its reward
    end     -> the sum of the rewards, and what became of the game

A row says in extra_info.environment what is played (see `Settings`); rows of a data file without it play
multi_turn.environment_path, seeded by extra_info.seed or their index.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from verl_like.plugins.agents.tools.kinds import state_of
from verl_like.plugins.agents.tools.tool_call import ROW_KEY, ToolOutcome
from verl_like.plugins.games.forms import Message, Step, act, begin, news, settled
from verl_like.plugins.games.games import make


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Environment that a row plays.

    tag: name of the environment in metrics.
    max_steps: moves after which the episode is truncated; None: any number.
    template: form of each user message, with ROLL's names in braces.
    history_length: number of earlier turns in each prompt, where every turn is a prompt of its own; None: the episode
        is one growing conversation.
    render: folder for a GIF of the episode.
    """

    kind: str
    tag: str
    seed: int
    split: str = "train"
    config: Mapping[str, Any] = field(default_factory=dict)
    max_steps: int | None = None
    max_tokens_per_step: int | None = None
    format_penalty: float = 0.0
    system: str | None = None
    template: str = "{observation}"
    instruction: str | None = None
    history_length: int | None = None
    render: str | None = None

    @classmethod
    def of(cls, row: Mapping[str, Any], default: str | None) -> Settings:
        """Read the settings from a row's fields.

        Raises ValueError where neither the row nor `default` names an environment.
        """
        extra = row["extra_info"] or {}
        own = {name: value for name, value in (extra.get(ROW_KEY) or {}).items() if value is not None}
        if odd := sorted(own.keys() - {each.name for each in fields(cls)}):
            raise ValueError(f"extra_info.{ROW_KEY} of row {row['index']} has {', '.join(odd)}, which is nothing of it")
        base = {"tag": str(row["data_source"]), "seed": int(extra.get("seed", row["index"])), **own}
        if default is not None:
            base.setdefault("kind", default)
        if "kind" not in base:
            raise ValueError(f"extra_info.{ROW_KEY}.kind of row {row['index']} is missing: name an environment")
        return cls(**base)


@dataclass(slots=True)
class Playing:
    """One episode. history: (observation, what the model said) of the turns so far."""

    game: Any
    settings: Settings
    observation: str = ""
    num_steps: int = 0
    num_valid: int = 0
    score: float = 0.0
    success: bool | None = None
    history: list[tuple[str, str]] = field(default_factory=list)
    frames: list[Any] = field(default_factory=list)


class EnvironmentWorker:
    """A source of tools without tools. env.worker_cls names a subclass; `first` and `move` are there to be overridden:
    what they get is one episode's."""

    stateful = True

    def __init__(self, default: str | None = None) -> None:
        self.schemas: list[dict[str, Any]] = []
        self._default = default
        self._live: dict[str, Playing] = {}  # by session
        self._free: dict[str, list[Any]] = {}  # games that have ended, by kind and configuration

    async def first(self, playing: Playing, row: Mapping[str, Any]) -> Step:
        """Begin the game."""
        return await begin(playing.game, row, playing.settings.seed, playing.settings.split)

    async def move(self, playing: Playing, message: Message) -> Step:
        """Play the model's message."""
        return await act(playing.game, message)

    async def begin(self, session: str, row: Mapping[str, Any]) -> ToolOutcome:
        settings = Settings.of(row, self._default)
        free = self._free.setdefault(_pool_of(settings), [])
        game = free.pop() if free else make(settings.kind, settings.config, f"extra_info.{ROW_KEY}.kind")
        playing = Playing(game, settings)
        step = await self.first(playing, row)
        self._live[session] = playing
        self._draw(playing)
        playing.observation = step.text
        if step.messages:
            return ToolOutcome(messages=list(step.messages), state=await state_of(game))
        if ROW_KEY not in (row["extra_info"] or {}):  # the row has a prompt of its own
            return ToolOutcome(text=step.text, state=await state_of(game))
        return ToolOutcome(messages=_prompt(playing), state=await state_of(game))

    async def call(self, session: str, name: str, arguments: dict[str, Any]) -> ToolOutcome:
        raise ValueError(f"the environment answers messages and has no tool, also none that is called {name}")

    async def respond(self, session: str, messages: list[Message]) -> ToolOutcome:
        """Play the model's last message as a move, and return the environment's answer with the move's reward."""
        playing = self._live[session]
        settings, message = playing.settings, messages[-1]
        step = await self.move(playing, message)
        is_valid = step.info.get("action_is_valid", (step.info.get("metrics") or {}).get("action_is_valid", True))
        reward = step.reward + (0.0 if is_valid else settings.format_penalty)
        playing.num_steps += 1
        playing.num_valid += bool(is_valid)
        playing.score += reward
        if "success" in step.info:
            playing.success = bool(step.info["success"])
        playing.history.append((playing.observation, str(message["content"])))
        playing.observation = step.text
        self._draw(playing)
        truncated = step.truncated or (playing.num_steps == settings.max_steps and not step.done)
        said: dict[str, Any] = {"messages": list(step.messages)}
        if step.whole and not step.done:
            after = news(messages, step.messages)
            said = {"messages": list(step.messages), "anew": True} if after is None else {"messages": after}
        if not step.messages and settings.history_length is not None:
            said = {"messages": _prompt(playing), "anew": True}
        elif not step.messages:
            said = {"text": _filled(playing)}
        done, state = step.done or truncated, await state_of(playing.game)
        return ToolOutcome(**said, done=done, truncated=truncated, reward=reward, state=state)

    async def end(self, session: str, label: str = "") -> ToolOutcome:
        playing = self._live.pop(session, None)
        if playing is None:
            return ToolOutcome()
        if callable(close := getattr(playing.game, "end_episode", None)):
            await settled(close())
        settings, name = playing.settings, f"env/{playing.settings.tag}"
        self._free[_pool_of(settings)].append(playing.game)  # not one that failed
        counts = {"episodes": 1.0, "steps": float(playing.num_steps), "valid": float(playing.num_valid)}
        if playing.success is not None:
            counts["success"] = float(playing.success)
        if playing.frames and label:
            _save(playing, label)
        return ToolOutcome(reward=playing.score, metrics={f"{name}/{key}": value for key, value in counts.items()})

    def _draw(self, playing: Playing) -> None:
        if playing.settings.render is None:
            return
        from verl_like.plugins.games.drawing import frame_of  # here: most workers draw nothing, and need no numpy

        if (frame := frame_of(playing.game)) is not None:
            playing.frames.append(frame)


def _pool_of(settings: Settings) -> str:
    return json.dumps([settings.kind, settings.config], sort_keys=True, default=str)


def _prompt(playing: Playing) -> list[Message]:
    """The beginning of a conversation, or, with a history, of the turn."""
    settings = playing.settings
    told = settings.instruction
    told = getattr(playing.game, "instruction", "") if told is None else told
    body = _filled(playing)
    if told and "{env_instruction}" not in settings.template:
        body = f"{told}\n\n{body}"
    system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
    return [*system, {"role": "user", "content": body}]


def _filled(playing: Playing) -> str:
    """The template, with ROLL's names. Raises ValueError for a name that it does not have."""
    settings, count = playing.settings, playing.num_steps
    shown = playing.history[-settings.history_length :] if settings.history_length else []
    first = count - len(shown) + 1
    values = {
        "observation": playing.observation,
        "current_observation": playing.observation,
        "turn_idx": count + 1,
        "current_step": count + 1,
        "step_count": count,
        "actions_left": "any number of" if settings.max_steps is None else settings.max_steps - count,
        "max_response_length": settings.max_tokens_per_step or "any number of",
        "env_instruction": settings.instruction or getattr(playing.game, "instruction", ""),
        "history_length": len(shown),
        "history": "; ".join(f"(step {first + n}: {seen} -> {said})" for n, (seen, said) in enumerate(shown)),
    }
    try:
        return settings.template.format(**values)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"template={settings.template!r:.200}: {error!r}; it may name {', '.join(values)}") from error


def _save(playing: Playing, label: str) -> None:
    """Write the GIF; a full disk must not cost an episode."""
    from verl_like.plugins.games.drawing import gif

    path = Path(f"{playing.settings.render}/{label}_{playing.settings.tag}_{playing.score:.1f}.gif")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gif(playing.frames))
    except OSError as error:
        print(f"env.render_save_dir: {path} could not be written: {error}", file=sys.stderr)
