"""The three kinds of tools, as a worker runs them: classes of verl's form, functions, environments.

Each has schemas, and a life within an episode: begin, calls, end. What users' code raises is not caught here.
"""

from __future__ import annotations

import base64
import dataclasses
import inspect
import io
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from verl_like.plugins.agents.tools import text
from verl_like.plugins.agents.tools.schema import plain_schema, schema_of
from verl_like.plugins.agents.tools.tool_call import ToolOutcome, state_id
from verl_like.plugins.games.forms import settled
from verl_like.user_code import accepted, takes


class ToolSource(Protocol):
    """One tool, or several that share an object."""

    schemas: list[dict[str, Any]]
    stateful: bool  # calls of an episode need what `begin` and earlier calls left

    async def begin(self, session: str, row: Mapping[str, Any]) -> ToolOutcome: ...

    async def call(self, session: str, name: str, arguments: dict[str, Any]) -> ToolOutcome: ...

    async def end(self, session: str) -> ToolOutcome: ...


@dataclass
class _Instance:
    """Instance of a tool of verl's form, for one episode."""

    id: str
    settings: Mapping[str, Any]  # the row's tools_kwargs of this tool
    agent_data: types.SimpleNamespace

    def keywords(self, step: str) -> dict[str, Any]:
        return dict(self.settings.get(f"{step}_kwargs") or {})


class NativeTool:
    """An object with verl's `create`, `execute`, `calc_reward` and `release`, of any of verl's generations.

    One object serves all episodes of a worker; an episode has one instance from its begin to its end. Rows give
    arguments in extra_info.tools_kwargs[name]: create_kwargs, execute_kwargs, calc_reward_kwargs, release_kwargs.
    """

    stateful = True

    def __init__(self, tool: Any) -> None:
        self._tool = tool
        self.schemas = [plain_schema(tool.tool_schema)]
        self._name = self.schemas[0]["function"]["name"]
        self._instances: dict[str, _Instance] = {}

    async def begin(self, session: str, row: Mapping[str, Any]) -> ToolOutcome:
        all_settings = (row["extra_info"] or {}).get("tools_kwargs") or {}
        known = {"request_id": session, "messages": list(row["prompt"]), "tools_kwargs": all_settings}
        empty = {"extra_fields": {}, "metrics": {}, "tool_rewards": [], "turn_scores": []}
        data = types.SimpleNamespace(**known, **empty)
        instance = _Instance(session, all_settings.get(self._name) or {}, data)
        given = instance.keywords("create")
        # verl 0.5 spreads a row's create_kwargs over the arguments, later ones pass them as one: tools are written
        # for either, and are given what their signature takes.
        offered = {**given, "create_kwargs": given}
        keywords = accepted(self._tool.create, offered) if takes(self._tool.create, "create_kwargs") else given
        self._instances[session] = instance
        created = await settled(self._tool.create(session, **keywords))
        identity, response = (*created, None, None)[:2] if isinstance(created, tuple) else (created, None)
        instance.id = identity if isinstance(identity, str) and identity else session
        return ToolOutcome(text="" if response is None else text.to_text(response))

    async def call(self, session: str, name: str, arguments: dict[str, Any]) -> ToolOutcome:
        instance = self._instances[session]
        keywords = instance.keywords("execute")
        if takes(self._tool.execute, "agent_data"):
            keywords["agent_data"] = instance.agent_data
        return outcome_of(await settled(self._tool.execute(instance.id, arguments, **keywords)))

    async def end(self, session: str) -> ToolOutcome:
        instance = self._instances.pop(session, None)
        if instance is None:
            return ToolOutcome()
        try:
            reward = None
            if _is_own(self._tool, "calc_reward"):
                value = await settled(self._tool.calc_reward(instance.id, **instance.keywords("calc_reward")))
                if not isinstance(value, list | dict | str):  # verl's own give lists
                    reward = text.to_reward(value)
            return ToolOutcome(reward=reward, metrics=_named(reward, self._name))
        finally:
            if hasattr(self._tool, "release"):
                await settled(self._tool.release(instance.id, **instance.keywords("release")))


class Stateless:
    """Base of tools that live for their calls alone: no set-up when an episode begins, no state to drop at its end."""

    stateful = False

    async def begin(self, session: str, row: Mapping[str, Any]) -> ToolOutcome:
        return ToolOutcome()

    async def end(self, session: str) -> ToolOutcome:
        return ToolOutcome()


class StatelessTool(Stateless):
    """An object with verl's `execute` alone, whose class says `stateful = False`."""

    def __init__(self, tool: Any) -> None:
        self._tool = tool
        self.schemas = [plain_schema(tool.tool_schema)]

    async def call(self, session: str, name: str, arguments: dict[str, Any]) -> ToolOutcome:
        return outcome_of(await settled(self._tool.execute(session, arguments)))


class FunctionTool(Stateless):
    """A function without state."""

    def __init__(self, name: str, function: Callable[..., Any], schema: Any) -> None:
        self._function = function
        self.schemas = [plain_schema(schema)]
        self.schemas[0]["function"]["name"] = name  # a schema of the user's own may have another

    async def call(self, session: str, name: str, arguments: dict[str, Any]) -> ToolOutcome:
        return outcome_of(await settled(self._function(**arguments)))


class Environment:
    """Objects of a user's class, one for each episode: `reset`, perhaps `get_reward` and `get_state`, and its other
    public methods, which are the tools.

    Objects are used again: making one may be expensive, and `reset` is there to begin anew.
    """

    stateful = True

    def __init__(self, make: Callable[[], Any]) -> None:
        self.schemas: list[dict[str, Any]] = []
        self._make = make
        self._live: dict[str, Any] = {}  # by session
        self._free = [make()]
        kind = type(self._free[0])
        self.gives_reward = callable(getattr(kind, "get_reward", None))
        if not callable(getattr(kind, "reset", None)):
            raise ValueError(f"{kind.__name__} has no method reset, which begins an episode")
        for name, _ in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_") and name not in ("reset", "get_reward", "get_state"):
                self.schemas.append(schema_of(getattr(self._free[0], name), name))

    async def begin(self, session: str, row: Mapping[str, Any]) -> ToolOutcome:
        thing = self._free.pop() if self._free else self._make()
        extra = {str(key): value for key, value in (row["extra_info"] or {}).items()}
        observation = await settled(thing.reset(**accepted(thing.reset, {**extra, **row})))
        self._live[session] = thing
        return ToolOutcome(text="" if observation is None else text.to_text(observation), state=await state_of(thing))

    async def call(self, session: str, name: str, arguments: dict[str, Any]) -> ToolOutcome:
        thing = self._live[session]
        value = await settled(getattr(thing, name)(**arguments))
        outcome = outcome_of(value) if text.has_reward(value) else ToolOutcome(text=text.to_text(value))
        return dataclasses.replace(outcome, state=await state_of(thing))

    async def end(self, session: str) -> ToolOutcome:
        thing = self._live.pop(session, None)
        if thing is None:
            return ToolOutcome()
        reward = text.to_reward(await settled(thing.get_reward())) if self.gives_reward else None
        if self.gives_reward and reward is None:
            raise ValueError("get_reward gave None: it must give a number")
        self._free.append(thing)  # not one that failed
        return ToolOutcome(reward=reward, metrics=_named(reward, type(thing).__name__))


async def state_of(thing: Any) -> int | None:
    """The state that the environment says it is in; None where it says nothing of it."""
    return state_id(text.to_text(await settled(thing.get_state()))) if hasattr(thing, "get_state") else None


def outcome_of(value: Any) -> ToolOutcome:
    """Convert a tool's return value to an outcome; the value is a response, or (response, reward, metrics)."""
    response, reward, metrics = text.split_value(value)
    media = media_of(response)
    said = str(response.text or "") if media else text.to_text(response)
    return ToolOutcome(text=said, media=media, reward=text.to_reward(reward), metrics=text.to_metrics(metrics))


def _named(reward: float | None, name: str) -> dict[str, float | str | None]:
    return {} if reward is None else {f"tool_reward/{name}": reward}


def _is_own(tool: Any, method: str) -> bool:
    """True where a tool overrides the method of verl's base class, which gives 0 for everything."""
    return getattr(getattr(type(tool), method, None), "__module__", "verl.tools.base_tool") != "verl.tools.base_tool"


_NAMES = ("bytes", "path", "image", "url", "image_url")  # as in the cells of data files (models/images.py)


def media_of(value: Any) -> list[tuple[str, Any]]:
    """Kind and source of the images, then of the videos, of verl's ToolResponse(image=[...], video=[...]); none of any
    other value.

    An image is one of PIL's, an array, a file's bytes, a path or URL (which every worker must be able to read), or a
    dictionary with one of these under "bytes", "path", "image", "url" or "image_url". A video is a file in one of these
    forms, its frames (a list of images, an array of all), or a dictionary with one of these under "video" or an image's
    names, and a row's options beside it (models/videos.py). Raises ValueError for anything else.
    """
    if not hasattr(value, "text"):
        return []
    images, videos = getattr(value, "image", None) or (), getattr(value, "video", None) or ()
    return [*(("image", _source(image)) for image in images), *(("video", _film(video)) for video in videos)]


def _film(video: Any) -> Any:
    if isinstance(video, dict):
        names = [name for name in ("video", *_NAMES) if video.get(name) is not None]
        if names:
            options = {key: option for key, option in video.items() if key not in ("video", "type", *_NAMES)}
            return {"video": _film(video[names[0]]), **options}
    elif isinstance(video, str | bytes):
        return _source(video)
    elif hasattr(video, "__iter__"):
        return [_source(frame) for frame in video]
    raise ValueError(
        "a tool's video must be a file's bytes, a path or a URL, a list of images, an array of frames, or a dictionary "
        f"with one of these under 'video', not {video!r:.200}"
    )


def _source(image: Any) -> str:
    while isinstance(image, dict):
        image = next((image[name] for name in _NAMES if image.get(name) is not None), None)
    if isinstance(image, str) and image:
        return image
    if not isinstance(image, bytes):
        image = _png(image)
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"  # readers look at the content, not at the type


def _png(image: Any) -> bytes:
    from PIL import Image

    from verl_like.models.images import shown

    if not isinstance(image, Image.Image):
        try:
            image = Image.fromarray(image)
        except Exception as error:  # of any kind of thing
            raise ValueError(
                f"a tool's image must be one of PIL's, an array, bytes, a path or a URL: {error}"
            ) from error
    file = io.BytesIO()
    shown(image).save(file, "PNG")
    return file.getvalue()
