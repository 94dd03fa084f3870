"""The rollout engines, a row each: where an engine's code is, and what is asked of it before it is imported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """One engine that samples with weights of ours. All places are `module:name`, see `user_code.load`.

    code: its class, made of an `EngineSpec`. installed: raises ValueError, saying what to install, where it is not.
    around_start: makes the context in which its process is started, from the device and whether it sleeps.
    own_process: it cannot live in the trainer's process.
    """

    code: str
    installed: str | None = None
    around_start: str | None = None
    own_process: bool = False


_SGLANG, _VLLM = "verl_like.plugins.sglang", "verl_like.plugins.vllm"
ENGINES = {
    "hf": EngineKind(code="verl_like.rollout.hf:HFRolloutEngine"),
    "vllm": EngineKind(code=f"{_VLLM}.engine:VLLMRolloutEngine", installed=f"{_VLLM}.versions:require_installed"),
    "sglang": EngineKind(
        code=f"{_SGLANG}.engine:SGLangRolloutEngine",
        installed=f"{_SGLANG}.compat:require_installed",
        around_start=f"{_SGLANG}.compat:starting",
        own_process=True,
    ),
}
