"""Finds agent loops: their names in the trainer, their classes in a worker."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_like.plugins.agents.tools.yaml_files import load_yaml
from verl_like.plugins.verl_agents.callback_loop import KEY as CALLBACK_KEY
from verl_like.plugins.verl_agents.callback_loop import NAME, CompletionCallbackLoop
from verl_like.plugins.verl_agents.messages import KEY, AgentLoopError
from verl_like.user_code import load_dotted


@dataclass(frozen=True)
class LoopEntry:
    """One entry of the file: what to call, and with which arguments of the user's."""

    target: str
    arguments: dict[str, Any]
    where: str  # for messages

    def load(self) -> Callable[..., Any]:
        """The class. UserCodeError, AgentLoopError say what is wrong with it."""
        found = load_dotted(self.target, f"{self.where}._target_")
        run: Any = getattr(found, "run", None)
        if not inspect.iscoroutinefunction(inspect.unwrap(run)):
            raise AgentLoopError(f"{self.where}: {self.target} has no `async def run`: derive it from AgentLoopBase")
        return found


def all_loops(path: str | None, callback: str | None) -> dict[str, LoopEntry]:
    """Collect the agent loops of the file, and the completion callback."""
    loops = read_loops(path) if path else {}
    if callback is not None:
        target = f"{CompletionCallbackLoop.__module__}:{CompletionCallbackLoop.__name__}"
        loops[NAME] = LoopEntry(target, {"callback": callback}, CALLBACK_KEY)
    return loops


def read_loops(path: str) -> dict[str, LoopEntry]:
    """The loops of a YAML file by name, nothing of them imported.

    Raises AgentLoopError, which names the file and the entry.
    """
    entries = OmegaConf.create(load_yaml(path, KEY))
    if not isinstance(entries, ListConfig) or not entries:
        raise AgentLoopError(f"{KEY}={path}: the file must hold a list of loops, each with name and _target_")
    loops: dict[str, LoopEntry] = {}
    for place, entry in enumerate(entries):
        where = f"{KEY}={path}: [{place}]"
        if not isinstance(entry, DictConfig) or not all(isinstance(entry.get(k), str) for k in ("name", "_target_")):
            raise AgentLoopError(f"{where} needs name and _target_ (package.module.Class or file.py:Class)")
        if odd := [key for key in map(str, entry) if key.startswith("_") and key != "_target_"]:
            raise AgentLoopError(f"{where} ({entry.name}): {', '.join(odd)} is not supported; leave it out")
        if entry.name in loops:
            raise AgentLoopError(f"{where}: a second loop is called {entry.name}; rename one")
        arguments = {str(key): entry[key] for key in entry if key not in ("name", "_target_")}
        loops[entry.name] = LoopEntry(entry["_target_"], arguments, f"{where} ({entry.name})")
    return loops
