"""One interface over everybody's environments: how an episode begins, and what follows a message of the model's.

    Gymnasium, GEM      reset(seed=, options=) -> (observation, info);  step(action) -> five-tuple
    messages            init(**row) -> messages or text;                 step(message) -> messages, reward, done
    tinker              initial_observation() -> messages;               step(message) -> the whole conversation
    skyrl-gym           init(prompt) -> (prompt, metadata);              step(action) -> {observations, reward, done}
    OpenEnv             reset() -> an observation, or a result with one; step(action) -> the same

Told apart by what a class has and what it returns, never by its type: nothing of theirs is imported here.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl_like.rewards.reward_call import is_finite_reward
from verl_like.user_code import accepted

Message = dict[str, Any]
# What results are called: by ours, Gymnasium's and GEM's, TitanRL's, skyrl-gym's, OpenEnv's; in tinker's is everything
# that was said so far, before and after the model's message
_WHOLE = ("next_messages", "next_observation")
_SAID = (*_WHOLE, "messages", "env_messages", "observations", "observation", "init_prompt_messages", "text")
_REWARD = ("reward", "env_rewards")
_DONE = ("done", "episode_done", "terminated")
_INFO = ("info", "metadata", "metrics", "logs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Answer of an environment: plain text, or messages.

    whole: the messages are the conversation from its beginning.
    done: the episode is over.
    truncated: the episode was cut off.
    """

    text: str = ""
    messages: tuple[Message, ...] = ()
    whole: bool = False
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


def is_environment(kind: Any) -> bool:
    """True for a class that answers the model's messages, False for one whose methods are tools.

    Such a class has `step`, and `init` or `initial_observation`, or Gymnasium's `reset(seed=...)`.
    """
    if not callable(getattr(kind, "step", None)):
        return False
    if any(callable(getattr(kind, name, None)) for name in ("init", "initial_observation")):
        return True
    reset = getattr(kind, "reset", None)
    return callable(reset) and not hasattr(kind, "get_reward") and "seed" in inspect.signature(reset).parameters


async def begin(game: Any, row: Mapping[str, Any], seed: int, split: str) -> Step:
    """The first observation: text that follows the instruction, or the whole prompt as messages."""
    if callable(start := getattr(game, "initial_observation", None)):
        return first_of(await settled(start()))
    if callable(init := getattr(game, "init", None)):
        return first_of(await settled(init(**accepted(init, {**row, "seed": seed, "split": split}))))
    given = accepted(game.reset, {"seed": seed, "options": {"split": split}})
    return first_of(await settled(game.reset(**given)))


async def act(game: Any, message: Message) -> Step:
    """Play the model's message: the message itself where `step` has such a parameter, its text otherwise."""
    wants_message = "message" in inspect.signature(game.step).parameters
    return step_of(await settled(game.step(message if wants_message else message["content"])))


def first_of(value: Any) -> Step:
    """Convert the value of `reset` or `init` to a Step. Raises TypeError for an unknown form."""
    if isinstance(value, tuple) and len(value) == 2:  # and an info, or tools, or metadata
        value = value[0]
    if isinstance(value, str | list) or value is None:
        return _said(value)
    return _named(value, ended=False)


def step_of(value: Any) -> Step:
    """Convert the value of `step` to a Step.

    Raises TypeError for an unknown form, ValueError for a reward that is not finite or content that is not text.
    """
    if isinstance(value, Step):
        return value
    if isinstance(value, tuple) and len(value) in (4, 5):
        observation, reward, done, *rest = value
        truncated, info = (rest[0], rest[1]) if len(rest) == 2 else (False, rest[0])
        said = _said(observation)
        return _step(said, reward, bool(done) or bool(truncated), bool(truncated) and not done, info)
    if isinstance(value, tuple) and len(value) == 3:
        return _step(_said(value[0]), value[1], bool(value[2]), False, {})
    return _named(value, ended=True)


def _named(value: Any, *, ended: bool) -> Step:
    """A dictionary, or an object with attributes of these names."""
    get: Callable[[str], Any] = value.get if isinstance(value, Mapping) else lambda name: getattr(value, name, None)
    found = [[each for name in names if (each := get(name)) is not None] for names in (_SAID, _REWARD, _DONE, _INFO)]
    said, rewards, done, info = found
    is_whole = any(get(name) is not None for name in _WHOLE)
    if not said and hasattr(value, "model_dump"):  # an observation of OpenEnv's, which has its own names
        said = [readable(value)]
    if not said and not (ended and done):
        what = "step must return (observation, reward, terminated, truncated, info), or a result with these names"
        raise TypeError(f"{what if ended else 'reset or init must return text or messages'}, not {value!r:.200}")
    reward = rewards[0] if rewards else 0.0
    reward = (
        sum(reward.values()) if isinstance(reward, Mapping) else sum(reward) if isinstance(reward, list) else reward
    )
    truncated = bool(get("truncated"))
    is_over = bool(done and done[0]) or truncated
    step = _step(_said(said[0] if said else None), reward, is_over, truncated, info[0] if info else {})
    return replace(step, whole=is_whole)


def _step(said: Step, reward: Any, done: bool, truncated: bool, info: Any) -> Step:
    number = math.nan if reward is None or isinstance(reward, str | bytes) else float(reward)
    if not is_finite_reward(number):
        raise ValueError(f"step gave the reward {reward!r:.200}: it must be a finite number, also as a 32-bit float")
    known = dict(info) if isinstance(info, Mapping) else {}
    return Step(text=said.text, messages=said.messages, reward=number, done=bool(done), truncated=truncated, info=known)


def _said(value: Any) -> Step:
    """Text, messages, or an object of OpenEnv's or GEM's with text in it."""
    if value is None or isinstance(value, str):
        return Step(text=value or "")
    if isinstance(value, Sequence) and all(isinstance(each, Mapping) and "role" in each for each in value):
        return Step(messages=tuple({**each, "content": text_of(each.get("content"))} for each in value))
    if isinstance(value, Mapping) and "role" in value:
        return _said([value])
    return Step(text=readable(value))


def text_of(content: Any) -> str:
    """The text of a message, which may be parts of text (and thoughts, which are left out).

    Raises ValueError for others.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        raise ValueError(f"the content of a message must be text, or parts of text, not {content!r:.100}")
    if odd := [part for part in content if part.get("type") not in ("text", "thinking")]:
        raise ValueError(f"a message of the environment has a part that is no text: {odd[0]!r:.100}")
    return "".join(str(part["text"]) for part in content if part["type"] == "text")


def readable(value: Any) -> str:
    """An observation as the model reads it: a text, what is called so in it, its only field, or all of them as JSON;
    without OpenEnv's done, reward and metadata."""
    if isinstance(value, str):
        return value
    for name in ("text", "content", "result", "message", "observation"):
        part = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        if isinstance(part, str):
            return part
    fields = value if isinstance(value, Mapping) or not hasattr(value, "model_dump") else value.model_dump()
    if not isinstance(fields, Mapping):
        return str(value)
    kept = {name: each for name, each in fields.items() if name not in ("done", "reward", "metadata")}
    (only,) = kept.values() if len(kept) == 1 else (None,)
    return only if isinstance(only, str) else json.dumps(kept, ensure_ascii=False, default=str)


def news(before: Sequence[Message], whole: Sequence[Message]) -> list[Message] | None:
    """Return the messages that a whole conversation has behind `before`, which ends with the model's message.

    None where the conversation does not begin with `before`. The model may have another role in it.
    """
    same = [
        one["role"] in ("assistant", other["role"]) and text_of(one["content"]).strip() == other["content"].strip()
        for one, other in zip(before, whole, strict=False)
    ]
    return [*whole[len(before) :]] if len(whole) > len(before) and all(same) else None


async def settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
