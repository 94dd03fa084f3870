"""Environments of others' packages, by a prefix and a name: `gymnasium:FrozenLake-v1`. Nothing is imported before it
is asked for; what is missing says which extra brings it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl_like.plugins.games.actions import ANSWER, WHOLE, said
from verl_like.plugins.games.openenv import OpenEnv


def need(module: str, package: str) -> Any:
    """The module. Raises ValueError, which says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"this environment needs the package {package}, which is not installed ({error})") from error


class GymnasiumText:
    """Environment of Gymnasium (`gymnasium:ID`): text or ANSI pictures are read, other observations as str() has them.

    Raises ValueError for actions that are none, or that are needed and missing.

    actions: word -> action; without it the text itself, where the space is text, or else the number in it.
    pattern: regular expression that finds the word.
    invalid_reward: reward of text that names no action, for which no step is made.
    kwargs: arguments of `gymnasium.make`.
    """

    def __init__(
        self,
        name: str,
        actions: Mapping[str, Any] | None = None,
        pattern: str = WHOLE,
        invalid_reward: float = 0.0,
        instruction: str = "",
        **kwargs: Any,
    ) -> None:
        gymnasium = need("gymnasium", "gymnasium")
        space = gymnasium.spaces
        spec = gymnasium.spec(name)
        # A picture in characters is something to read; where there is none, observations are text anyhow.
        modes = getattr(gymnasium.envs.registration.load_env_creator(spec.entry_point), "metadata", {}) if spec else {}
        if "render_mode" not in kwargs and "ansi" in modes.get("render_modes", ()):
            kwargs["render_mode"] = "ansi"
        self.env = gymnasium.make(name, **kwargs)
        self._ansi = self.env.render_mode == "ansi"
        self._is_text = isinstance(self.env.action_space, space.Text)
        self._actions = {str(word).lower(): action for word, action in (actions or {}).items()}
        takes = self.env.action_space
        if odd := [word for word, action in self._actions.items() if not takes.contains(action)]:
            raise ValueError(f"config.actions: {', '.join(odd)} is no action of {name}, whose actions are {takes}")
        if not actions and not isinstance(takes, space.Text | space.Discrete):
            raise ValueError(f"the actions of {name} are {takes}: name some in config.actions (word -> action)")
        self._pattern, self._invalid_reward = pattern, invalid_reward
        words = f" Answer with one of: {', '.join(actions)}." if actions else ""
        self.instruction = instruction or f"You are playing {name}.{words}"
        self._last = ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        observation, info = self.env.reset(seed=None if seed is None else seed % 2**31)
        self._last = self._read(observation)
        return self._last, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        chosen = self._action(said(action, self._pattern))
        if chosen is None or not self.env.action_space.contains(chosen):
            return self._last, self._invalid_reward, False, False, {"action_is_valid": False}
        observation, reward, terminated, truncated, info = self.env.step(chosen)
        self._last = self._read(observation)
        return self._last, float(reward), terminated, truncated, {**info, "action_is_valid": True}

    def get_state(self) -> str:
        return self._last

    def render(self) -> Any:
        return None if self._ansi else self.env.render()

    def _action(self, word: str) -> Any:
        if self._actions:
            return self._actions.get(word.lower())
        if self._is_text:
            return word
        number = re.search(r"-?\d+", word)
        return None if number is None else int(number[0])

    def _read(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        if self._ansi:
            return re.sub(r"\x1b\[41m(.)\x1b\[0m", r"[\1]", str(self.env.render()))  # where the player stands is red
        return str(observation)


class SkyrlText:
    """Environment that is registered with skyrl-gym (`skyrl:ID`).

    It is made anew for each episode: its constructor takes the row's answer.

    env_config: its own configuration.
    extras: more of what rows give it there (max_turns, say).
    """

    def __init__(
        self, name: str, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None
    ) -> None:
        self._gym, self._name = need("skyrl_gym", "skyrl-gym"), name
        self._gym.spec(name)  # an unknown one is told now
        self._config, self._extras = dict(env_config or {}), dict(extras or {})
        self.env: Any = None

    def init(self, prompt: list[dict[str, Any]], **row: Any) -> Any:
        """The prompt. The row's ground_truth is its answer."""
        given = {**(row.get("extra_info") or {}), **self._extras}
        given["reward_spec"] = {"method": "rule", "ground_truth": row.get("ground_truth")}
        self.env = self._gym.make(self._name, env_config=self._config, extras=given)
        return self.env.init(list(prompt))

    def step(self, action: str) -> Any:
        return self.env.step(action)

    def end_episode(self) -> None:
        """The episode's own environment is closed."""
        self.env.close()


class ReasoningGym:
    """One question of a data set of reasoning-gym (`reasoning_gym:NAME`), scored by it.

    success_above: scores above it count as right. Other arguments are the data set's.
    """

    instruction = ""

    def __init__(self, name: str, pattern: str = ANSWER, success_above: float = 0.99, **options: Any) -> None:
        self._gym, self._name, self._options = need("reasoning_gym", "reasoning-gym"), name, options
        self._pattern, self._success_above = pattern, success_above
        self._data: Any = self._gym.create_dataset(name, size=1, seed=0, **options)  # a mistake is told now
        self._entry: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self._data = self._gym.create_dataset(self._name, size=1, seed=(seed or 0) % 2**31, **self._options)
        self._entry = self._data[0]
        return str(self._entry["question"]), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        answer = said(action, self._pattern)
        score = float(self._data.score_answer(answer=answer, entry=self._entry)) if answer else 0.0
        return "", score, True, False, {"action_is_valid": bool(answer), "success": score > self._success_above}


class Conversation(list[dict[str, Any]]):
    """Messages where tinker-cookbook has tokens. length: of nothing, so that no limit of tokens is reached there."""

    length = 0


class TextRenderer:
    """Replacement of a renderer of tinker-cookbook's, for its environments of tokens (`Env`, `ProblemEnv`).

    What they render stays messages, and what they parse is the text that the model wrote.
    """

    def build_generation_prompt(self, messages: Sequence[dict[str, Any]], **_: Any) -> Conversation:
        return Conversation(messages)

    def get_stop_sequences(self) -> list[str]:
        return []

    def parse_response(self, response: str) -> tuple[dict[str, Any], Any]:
        """Return the response as an answer that has ended, also one that was cut off."""
        ended = need("tinker_cookbook.renderers", "tinker-cookbook").ParseTermination.STOP_SEQUENCE
        return {"role": "assistant", "content": response}, ended


ADAPTERS: dict[str, Any] = {
    "gymnasium": GymnasiumText,
    "openenv": OpenEnv,
    "reasoning_gym": ReasoningGym,
    "skyrl": SkyrlText,
}
