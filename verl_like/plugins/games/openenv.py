"""Environments that an OpenEnv server plays (`openenv:http://HOST:PORT`), asked over its own WebSocket.

The package is needed where the server runs, not here: it pins versions that others of ours do not take.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl_like.plugins.games.actions import WHOLE, said
from verl_like.plugins.games.forms import readable

if TYPE_CHECKING:  # most workers ask no server
    import aiohttp

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as the WebSocket, which asks no proxy
_PATIENCE_S = 60.0  # to reach the server; what it takes to answer is the worker's limit


class OpenEnv:
    """Environment on an OpenEnv server, with a session of its own for each episode.

    The server needs `max_concurrent_envs` of as many as are played at once. Raises ValueError where no server answers,
    or its action has no such field.

    field: field of the server's action that gets the model's text (a number in it, where the field is one); left out:
        the only one that is required.
    action: values of its other fields.
    actions: word -> value of the field, or all fields.
    pattern: regular expression that finds the word.
    read: field of observations that is shown; left out: all of them, as JSON.
    reset: more arguments of the server's reset.
    invalid_reward: reward of text that is no action, for which no step is made.
    """

    def __init__(
        self,
        name: str,
        field: str | None = None,
        action: Mapping[str, Any] | None = None,
        actions: Mapping[str, Any] | None = None,
        pattern: str = WHOLE,
        read: str | None = None,
        reset: Mapping[str, Any] | None = None,
        invalid_reward: float = 0.0,
        instruction: str = "",
    ) -> None:
        self._url, self._pattern, self._read = name.rstrip("/"), pattern, read
        self._action, self._reset, self._invalid_reward = dict(action or {}), dict(reset or {}), invalid_reward
        self._actions = {str(word).lower(): value for word, value in (actions or {}).items()}
        schema = _schema(self._url)
        self._field = field or _only_field(schema, self._action)
        if odd := sorted({self._field, *self._action} - schema["properties"].keys()):
            raise ValueError(f"{', '.join(odd)}: the action of {self._url} has {', '.join(schema['properties'])}")
        self._kind = schema["properties"][self._field].get("type")
        words = f" Answer with one of: {', '.join(actions)}." if actions else ""
        self.instruction = instruction + words
        self._last = ""
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """A new session. Raises OSError, RuntimeError where the server refuses it."""
        import aiohttp

        await self.end_episode()
        self._http = http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, connect=_PATIENCE_S))
        self._socket = await http.ws_connect(f"{self._url}/ws", max_msg_size=0)
        given = {} if seed is None else {"seed": seed % 2**31}
        self._last = self._shown(await self._ask("reset", given | self._reset))
        return self._last, {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        chosen = self._chosen(said(action, self._pattern))
        result = None if chosen is None else await self._ask("step", self._action | chosen)
        if result is None:
            return self._last, self._invalid_reward, False, False, {"action_is_valid": False}
        self._last = self._shown(result)
        info = {**(result.get("metadata") or {}), "action_is_valid": True}
        return self._last, float(result.get("reward") or 0.0), bool(result.get("done")), False, info

    async def end_episode(self) -> None:
        """The session ends, and makes room for another."""
        http, self._http, self._socket = self._http, None, None
        if http is not None:
            await http.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any] | None:
        """The server's result; None for an action that it does not take. After anything else the session is over: a
        late answer would be taken for that of the next question."""
        socket = self._socket
        if socket is None:
            raise RuntimeError(f"{self._url}: the session is over")
        try:
            await socket.send_json({"type": kind, "data": dict(data)})
            received = await socket.receive()
            if not isinstance(received.data, str):
                raise ConnectionError(f"{self._url} has closed the session")
            answer = json.loads(received.data)
            told = answer["data"]
            if answer["type"] == "error":
                if told.get("code") == "VALIDATION_ERROR" and kind == "step":
                    return None
                raise RuntimeError(f"{self._url} says: {told.get('message')} ({told.get('code')})")
            return told
        except BaseException:
            await self.end_episode()
            raise

    def _chosen(self, word: str) -> dict[str, Any] | None:
        """The action's fields that the word stands for; None for a word that is none."""
        value: Any = word
        if self._actions:
            value = self._actions.get(word.lower())
        elif self._kind in ("integer", "number"):
            number = re.search(r"-?\d+(\.\d+)?" if self._kind == "number" else r"-?\d+", word)
            value = None if number is None else float(number[0]) if self._kind == "number" else int(number[0])
        if value is None:
            return None
        return dict(value) if isinstance(value, Mapping) else {self._field: value}

    def _shown(self, result: Mapping[str, Any] | None) -> str:
        observation = (result or {}).get("observation")
        if self._read is None:
            return readable(observation)
        if not isinstance(observation, Mapping) or self._read not in observation:
            raise ValueError(f"read={self._read}: {self._url} observes {observation!r:.200}")
        return readable(observation[self._read])


def _schema(url: str) -> dict[str, Any]:
    """Fetch the JSON schema of the server's action. Raises ValueError where no OpenEnv server answers."""
    try:
        with _DIRECT.open(f"{url}/schema", timeout=_PATIENCE_S) as answer:
            found = json.load(answer)["action"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"openenv:{url}: no OpenEnv server answers there ({error})") from error
    return {"properties": {}, "required": [], **found}


def _only_field(schema: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    wanted = [name for name in schema["required"] if name not in given]
    if len(wanted) != 1:
        what = f"one of {', '.join(schema['properties'])}" if schema["properties"] else "the server's action has none"
        raise ValueError(f"config.field: name the field of the action that the model's text is: {what}")
    return wanted[0]
