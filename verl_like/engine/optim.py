"""AdamW, a lean AdamW, verl's learning-rate schedules (warm-up, then constant or cosine), and the scale of the loss.

Lean is AdamW (arXiv 1711.05101) whose states take half or a quarter of float32's memory: larger models train in full.
Averages are stored in bfloat16, or in 8 bits with one scale per block of a row (block-wise quantisation as in arXiv
2110.02861; the code here is a power law: 255 steps of the square root of the gradient's average, of the fourth root of
its square's). Every step works on float32 copies of a few million elements and rounds what it stores stochastically:
an average that moves by 0.1% a step, or a bfloat16 weight under a learning rate of 1e-6, would otherwise never move.

The random bits depend on step, parameter and shard alone: replicas of a shard stay equal, a resumed run goes on as the
uninterrupted one.

Loss scaling: without it the small gradients of float16 become 0. The loss is multiplied by a power of two, and the
gradients are divided by it before anything reads them. Where they overflow the step is left out, on all ranks alike,
and the power halved; after 2,000 steps without it is doubled, as torch.amp.GradScaler does. Source: Micikevicius et
al., "Mixed precision training" (arXiv 1710.03740).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl_like.batch import Metric
from verl_like.engine.muon import Muon
from verl_like.parallel.sharding import local_tensor, shard_index

if TYPE_CHECKING:
    from verl_like.config import OptimConfig

BLOCK = 256  # entries of a row that share one scale
_CHUNK = 2**23  # elements whose float32 copies exist at a time
_SEED_STEP, _SEED_PARAMETER, _SEED_SHARD = 1_000_003, 8_191, 2_147_483_647


class LeanAdamW(torch.optim.Optimizer):
    """AdamW whose averages take 16 bits (bfloat16) or 8 bits an entry (`bits`); weights keep their own precision.

    One-dimensional parameters (norms, biases) keep bfloat16 averages with 8 bits too.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        bits: int,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._bits = bits

    def init_state(self, parameter: nn.Parameter, state: dict[str, Tensor]) -> None:
        """Fill `state` with the states of a parameter before its first step, all zero."""
        state["step"] = torch.zeros((), dtype=torch.float32)
        if self._bits == 8 and parameter.ndim == 2:
            for name, dtype in (("exp_avg", torch.int8), ("exp_avg_sq", torch.uint8)):
                state[name] = torch.zeros_like(parameter, dtype=dtype)
                state[f"{name}_scale"] = _zero_scales(parameter)
        else:
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step with the gradients at hand; `closure` is not supported."""
        assert closure is None
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                number += 1
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        self.init_state(parameter, state)
                    state["step"] += 1
                    self._update(parameter, state, group, number)

    def _update(self, parameter: nn.Parameter, state: dict[str, Tensor], group: dict[str, Any], number: int) -> None:
        weight, gradient = local_tensor(parameter.detach()), local_tensor(parameter.grad)
        if weight.numel() == 0:
            return
        step = int(state["step"])
        noise = torch.Generator(weight.device)
        noise.manual_seed((step * _SEED_STEP + number * _SEED_PARAMETER + shard_index(parameter)) % _SEED_SHARD)
        tensors = {name: local_tensor(value) for name, value in state.items() if name != "step"}
        for rows in _row_chunks(weight):
            part = {name: value[rows] for name, value in tensors.items()}
            self._update_rows(weight[rows], gradient[rows].float(), part, group, step, noise)

    def _update_rows(
        self,
        weight: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        group: dict[str, Any],
        step: int,
        noise: torch.Generator,
    ) -> None:
        beta1, beta2 = group["betas"]
        average, square = _read(state, "exp_avg", 2), _read(state, "exp_avg_sq", 4)
        average.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        scale = square.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        new = weight.float().mul_(1 - group["lr"] * group["weight_decay"])
        new.addcdiv_(average, scale, value=-group["lr"] / (1 - beta1**step))
        weight.copy_(stochastic_round(new, noise) if weight.dtype == torch.bfloat16 else new)
        _write(state, "exp_avg", average, 2, noise)
        _write(state, "exp_avg_sq", square, 4, noise)


def stochastic_round(values: Tensor, noise: torch.Generator) -> Tensor:
    """Round float32 to bfloat16, up or down with the probability that makes the expectation exact."""
    random = torch.randint(1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=noise)
    return (values.contiguous().view(torch.int32) + random).bitwise_and_(-65536).view(torch.float32).bfloat16()


def quantise(values: Tensor, power: int, noise: torch.Generator, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantise float32 [r, c] to 8-bit codes [r, c] and a scale per block [r, ceil(c / BLOCK)]: see `dequantise`."""
    top = 127.0 if signed else 255.0
    blocks = nn.functional.pad(values.abs(), (0, -values.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    scale = blocks.amax(-1)
    level = _root_(blocks / scale.clamp(min=1e-38)[..., None], power).mul_(top)
    level = level.add_(torch.rand(level.shape, device=level.device, generator=noise)).floor_().clamp_(max=top)
    codes = level.flatten(1)[:, : values.shape[1]]
    return (codes.copysign(values).to(torch.int8), scale) if signed else (codes.to(torch.uint8), scale)


def dequantise(codes: Tensor, scale: Tensor, power: int) -> Tensor:
    """Restore values: scale x (code / top) ^ power with the code's sign.

    An unsigned 0 reads as half a step, not as 0: the square root of it divides.
    """
    signed = codes.dtype == torch.int8
    level = codes.float().abs_() / 127.0 if signed else codes.float().clamp_(min=0.5) / 255.0
    wide = scale.repeat_interleave(BLOCK, dim=1)[:, : codes.shape[1]]
    values = _raise_(level, power).mul_(wide)
    return values.copysign_(codes.float()) if signed else values


def _root_(values: Tensor, power: int) -> Tensor:
    """Take the second or fourth root, in place: pow_ is many times slower."""
    return values.sqrt_() if power == 2 else values.sqrt_().sqrt_()


def _raise_(values: Tensor, power: int) -> Tensor:
    return values.square_() if power == 2 else values.square_().square_()


def _read(state: dict[str, Tensor], name: str, power: int) -> Tensor:
    scale = state.get(f"{name}_scale")
    return state[name].float() if scale is None else dequantise(state[name], scale, power)


def _write(state: dict[str, Tensor], name: str, values: Tensor, power: int, noise: torch.Generator) -> None:
    if f"{name}_scale" not in state:
        state[name].copy_(stochastic_round(values, noise))
        return
    codes, scale = quantise(values, power, noise, signed=state[name].dtype == torch.int8)
    state[name].copy_(codes)
    state[f"{name}_scale"].copy_(scale)


def _zero_scales(parameter: nn.Parameter) -> Tensor:
    """A scale per block of each row, sharded by rows like the parameter."""
    local = local_tensor(parameter.detach())
    columns = -(-local.shape[1] // BLOCK)
    scales = torch.zeros(local.shape[0], columns, dtype=torch.float32, device=local.device)
    if not isinstance(parameter, DTensor):
        return scales
    total = columns * (parameter.shape[1] // local.shape[1])  # columns too are split, by tensor parallelism
    shape = torch.Size((parameter.shape[0], total))
    return DTensor.from_local(
        scales, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=(total, 1)
    )


def _row_chunks(tensor: Tensor) -> Iterator[slice]:
    rows = max(1, _CHUNK // max(1, tensor[0].numel()))
    for start in range(0, tensor.shape[0], rows):
        yield slice(start, start + rows)


def build_optimizer(
    parameters: Iterable[nn.Parameter], optim: OptimConfig, matrices: Iterable[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """Build the optimizer of `optim.optimizer` over the shards; weight decay on every parameter, as verl.

    matrices: those among the parameters that Muon would step.
    """
    settings: dict[str, Any] = {
        "lr": optim.lr,
        "betas": (optim.betas[0], optim.betas[1]),
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
    }
    # A stage of a pipeline may hold nothing that is trained: no adapter, of those that target_modules names.
    groups = [{"params": alike} for alike in _by_mesh(parameters) or [[]]]
    if optim.optimizer == "muon":
        chosen = {id(matrix) for matrix in matrices}
        groups = [
            {"params": kind, "momentum": momentum}
            for alike in groups
            for momentum in (optim.muon_momentum, None)
            if (kind := [p for p in alike["params"] if (id(p) in chosen) == (momentum is not None)])
        ]
        return Muon(groups, **settings, fused=True)
    if optim.optimizer == "adamw":
        return torch.optim.AdamW(groups, **settings, fused=True)
    return LeanAdamW(groups, **settings, bits=_BITS[optim.optimizer])


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters that are sharded over the same ranks: one fused step takes no others."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())


_BITS = {"adamw_bf16": 16, "adamw_8bit": 8}


class Schedule:
    """Learning rate as a function of the training steps done: rollout batches, as in verl, not mini-batches.

    The schedule's length is `optim.total_training_steps` where set, else `num_schedule_steps` (the batch plan's).
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
    """Number of warm-up steps: lr_warmup_steps; where negative or null, lr_warmup_steps_ratio of all training steps."""
    if optim.lr_warmup_steps >= 0:
        return optim.lr_warmup_steps
    if not optim.lr_warmup_steps_ratio:
        return 0
    if total is None:
        raise ValueError("optim.lr_warmup_steps_ratio needs the number of steps: set trainer.total_training_steps")
    return int(optim.lr_warmup_steps_ratio * total)


log = logging.getLogger(__name__)

_FIRST, _LARGEST = 16, 24  # exponents of two
_STEPS_TO_DOUBLE = 2000


class LossScale:
    """Scale of one model's loss under float16. In other precisions nothing is scaled."""

    def __init__(self, compute_dtype: torch.dtype) -> None:
        self._scales = compute_dtype == torch.float16
        self.exponent, self._good_steps = (_FIRST, 0) if self._scales else (0, 0)

    def of(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, from which the backward pass starts."""
        return loss * 2.0**self.exponent if self._scales else loss

    @property
    def settles(self) -> bool:
        """True where the scale may have caused a gradient that is not finite, which a smaller scale puts right."""
        return self._scales and self.exponent > 0

    @torch.no_grad()
    def undo(self, parameters: Iterable[nn.Parameter]) -> None:
        """Turn the gradients of scaled losses into those of the losses; a power of two loses no bit of float32."""
        for parameter in parameters if self._scales else ():
            if parameter.grad is not None:
                parameter.grad.mul_(2.0**-self.exponent)

    def stepped(self, finite: bool) -> dict[str, Metric]:
        """Adapt the scale after an optimizer step, or one that was left out; return the old scale as a metric."""
        if not self._scales:
            return {}
        overflow = float(self.settles and not finite)
        if overflow:
            log.info("float16 gradients overflow, as expected of 2**%d: the step is left out", self.exponent)
        told = {"loss_scale": Metric(value=2.0**self.exponent), "loss_scale_overflows": Metric(value=overflow)}
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.exponent -= 1
        elif self._good_steps == _STEPS_TO_DOUBLE:
            self.exponent, self._good_steps = min(self.exponent + 1, _LARGEST), 0
        return told

    def counters(self) -> dict[str, int]:
        """Return the counters for a checkpoint."""
        return {"loss_scale_exponent": self.exponent, "loss_scale_steps": self._good_steps} if self._scales else {}

    def restore(self, counters: dict[str, int]) -> None:
        """Restore the counters of a checkpoint, which may have been written in another precision."""
        if self._scales and "loss_scale_exponent" in counters:
            self.exponent, self._good_steps = counters["loss_scale_exponent"], counters["loss_scale_steps"]
