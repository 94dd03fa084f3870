"""Simulated users of verl's form: they answer the model where it calls no tool, until they end the conversation.

    interaction:                                       # the YAML file
      - name: gsm8k                                    # without one: the class's, less "Interaction"
        class_name: my_package.module.MyInteraction    # or file.py:MyInteraction
        config: {}

A row chooses in extra_info.interaction_kwargs: `name`, and arguments of start_interaction and generate_response.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from verl_like.plugins.agents.tools import text
from verl_like.plugins.agents.tools.tool_call import ToolOutcome
from verl_like.plugins.agents.tools.yaml_files import load_yaml
from verl_like.user_code import load_dotted

_METHODS = ("start_interaction", "generate_response", "finalize_interaction")


def load_interactions(path: str, key: str) -> dict[str, Any]:
    """The objects of a file by name. Raises ValueError, which names key, file and entry."""
    content = load_yaml(path, key)
    entries = content.get("interaction") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{key}={path}: the file must hold a list `interaction`, each with name, class_name, config")
    users: dict[str, Any] = {}
    for place, entry in enumerate(entries):
        where = f"{key}={path}: interaction[{place}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
            raise ValueError(f"{where} has no class_name")
        reference = entry["class_name"]
        make = load_dotted(reference, f"{where}.class_name")
        if missing := [method for method in _METHODS if not callable(getattr(make, method, None))]:
            raise ValueError(f"{where}: {reference} has no {', '.join(missing)}: derive it from BaseInteraction")
        name = entry.get("name") or (make.__name__.removesuffix("Interaction") or make.__name__).lower()
        if name in users:
            raise ValueError(f"{where}: a second interaction is called {name}; rename one")
        users[name] = make(config={**(entry.get("config") or {}), "name": name})
    return users


class Interactions:
    """All simulated users of a run, as a source of tools without tools. An object serves all episodes of a worker."""

    stateful = True

    def __init__(self, users: Mapping[str, Any]) -> None:
        self.schemas: list[dict[str, Any]] = []
        self.names = list(users)
        self._users = users
        self._live: dict[str, tuple[Any, dict[str, Any]]] = {}  # by session: the user, and the row's arguments

    async def begin(self, session: str, row: Mapping[str, Any]) -> ToolOutcome:
        """Begin the simulated user of a row, if it has interaction_kwargs. Raises ValueError for an unknown name."""
        if settings := interaction_kwargs(row["extra_info"] or {}):
            user = self._users[chosen(settings, self.names)]
            self._live[session] = user, settings
            await user.start_interaction(session, **settings)
        return ToolOutcome()

    async def call(self, session: str, name: str, arguments: dict[str, Any]) -> ToolOutcome:
        raise ValueError(f"simulated users have no tool, also none that is called {name}")

    async def respond(self, session: str, messages: list[dict[str, Any]]) -> ToolOutcome:
        """Return the simulated user's answer to the last message, and its reward.

        Raises TypeError for another form of answer.
        """
        user, settings = self._live[session]
        value = await user.generate_response(session, messages, **settings)
        if not isinstance(value, tuple) or len(value) != 4:
            raise TypeError(f"generate_response must return (ends, text, reward, metrics), not {value!r:.200}")
        ends, said, reward, metrics = value
        return ToolOutcome(
            text=text.to_text(said), done=bool(ends), reward=text.to_reward(reward), metrics=text.to_metrics(metrics)
        )

    async def end(self, session: str) -> ToolOutcome:
        if live := self._live.pop(session, None):
            finalize = live[0].finalize_interaction  # verl's own base class has it without arguments
            await (finalize(session) if inspect.signature(finalize).parameters else finalize())
        return ToolOutcome()


def interaction_kwargs(extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """Collect a row's arguments for its simulated user; empty where it has none.

    None values are left out: a table's column has them for keys that only other rows use.
    """
    return {name: value for name, value in (extra_info.get("interaction_kwargs") or {}).items() if value is not None}


def chosen(settings: Mapping[str, Any], names: Sequence[str]) -> str:
    """The interaction of a row's interaction_kwargs. Raises ValueError for an unknown one, and for none of several."""
    name = settings.get("name") or (names[0] if len(names) == 1 else None)
    if name is None or name not in names:
        raise ValueError(f"extra_info.interaction_kwargs.name={name!r}: there are {', '.join(names)}")
    return name
