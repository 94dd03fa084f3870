"""verl_like: PPO and GRPO training of language models on a hybrid engine (FSDP + vLLM/SGLang in the same processes)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_like.observe.run_folder import read_run as read_run
    from verl_like.trainer.compose import compose as compose
    from verl_like.trainer.library import build as build
    from verl_like.trainer.library import run as run

__version__ = "0.1.0"

importlib.import_module("verl_like.moved")  # finds modules by names that they had before
_LATER = {  # imported when first used
    "read_run": "verl_like.observe.run_folder",
    "compose": "verl_like.trainer.compose",
    "build": "verl_like.trainer.library",
    "run": "verl_like.trainer.library",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
