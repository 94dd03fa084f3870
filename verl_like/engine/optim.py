"""AdamW and verl's learning-rate schedules: warm-up, then constant or cosine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from verl_like.engine.lean_optim import LeanAdamW

if TYPE_CHECKING:
    from verl_like.config import OptimConfig


def build_optimizer(parameters: Iterable[nn.Parameter], optim: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of `optim.optimizer` over the shards; weight decay on every parameter, as verl."""
    settings: dict[str, Any] = {
        "lr": optim.lr,
        "betas": (optim.betas[0], optim.betas[1]),
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
    }
    groups = [{"params": alike} for alike in _by_mesh(parameters)]
    if optim.optimizer == "adamw":
        return torch.optim.AdamW(groups, **settings, fused=True)
    return LeanAdamW(groups, **settings, bits=_BITS[optim.optimizer])


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters that are sharded over the same ranks together: one fused step takes no others."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())


_BITS = {"adamw_bf16": 16, "adamw_8bit": 8}


class Schedule:
    """Learning rate as a function of the training steps done: rollout batches, as in verl, not mini-batches.

    Its length is `optim.total_training_steps` where set, else `num_schedule_steps` (the batch plan's).
    """

    def __init__(self, optim: OptimConfig, num_schedule_steps: int | None) -> None:
        self.total = optim.total_training_steps if optim.total_training_steps > 0 else num_schedule_steps
        self.optim = optim
        self.warmup = _warmup_steps(optim, self.total)
        self.steps_done = 0
        if optim.warmup_style not in ("constant", "cosine"):
            raise ValueError(f"optim.warmup_style={optim.warmup_style!r}: use 'constant' or 'cosine'")
        if optim.warmup_style == "cosine" and self.total is None:
            raise ValueError("optim.warmup_style=cosine needs the number of steps: set trainer.total_training_steps")

    def rate(self) -> float:
        """Learning rate of the next step."""
        if self.optim.warmup_style == "constant":
            return self.optim.lr * min(1.0, self.steps_done / max(1, self.warmup)) if self.warmup else self.optim.lr
        assert self.total is not None
        floor = self.optim.min_lr_ratio or 0.0
        cycles = self.optim.num_cycles
        return self.optim.lr * cosine_factor(self.steps_done, self.warmup, self.total, floor, cycles)


def cosine_factor(step: int, warmup: int, total: int, min_ratio: float, num_cycles: float) -> float:
    """Linear from min_ratio to 1 during warm-up, then a cosine from 1 down to min_ratio (num_cycles 0.5)."""
    if step < warmup:
        return min_ratio + (1.0 - min_ratio) * step / max(1, warmup)
    progress = (step - warmup) / max(1, total - warmup)
    wave = math.cos(math.pi * num_cycles * 2.0 * progress)
    return max(min_ratio, wave * (1.0 - min_ratio) / 2 + (1.0 + min_ratio) / 2)


def _warmup_steps(optim: OptimConfig, total: int | None) -> int:
    """lr_warmup_steps counts training steps; negative or none means lr_warmup_steps_ratio of all of them."""
    if optim.lr_warmup_steps >= 0:
        return optim.lr_warmup_steps
    if not optim.lr_warmup_steps_ratio:
        return 0
    if total is None:
        raise ValueError("optim.lr_warmup_steps_ratio needs the number of steps: set trainer.total_training_steps")
    return int(optim.lr_warmup_steps_ratio * total)
