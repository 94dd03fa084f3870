"""AdamW (arXiv 1711.05101) whose states take half or a quarter of float32's memory: larger models train in full.

Averages are stored in bfloat16, or in 8 bits with one scale per block of a row (block-wise quantisation as in arXiv
2110.02861; the code here is a power law: 255 steps of the square root of the gradient's average, of the fourth root of
its square's). Every step works on float32 copies of a few million elements and rounds what it stores stochastically:
an average that moves by 0.1% a step, or a bfloat16 weight under a learning rate of 1e-6, would otherwise never move.

The random bits depend on step, parameter and shard alone: replicas of a shard stay equal, a resumed run goes on as the
uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl_like.parallel.sharding import local_tensor, shard_index

BLOCK = 256  # entries of a row that share one scale
_CHUNK = 2**23  # elements whose float32 copies exist at a time
_SEED_STEP, _SEED_PARAMETER, _SEED_SHARD = 1_000_003, 8_191, 2_147_483_647


class LeanAdamW(torch.optim.Optimizer):
    """bits: 16 (bfloat16) or 8, per entry of each average; weights keep their own precision.

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
        """States of a parameter before its first step, all zero."""
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
        """One step with the gradients at hand; `closure` is not supported."""
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
    """float32 -> bfloat16, up or down with the probability that makes the expectation exact."""
    random = torch.randint(1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=noise)
    return (values.contiguous().view(torch.int32) + random).bitwise_and_(-65536).view(torch.float32).bfloat16()


def quantise(values: Tensor, power: int, noise: torch.Generator, *, signed: bool) -> tuple[Tensor, Tensor]:
    """float32 [r, c] -> 8-bit codes [r, c] and a scale per block [r, ceil(c / BLOCK)]: see `dequantise`."""
    top = 127.0 if signed else 255.0
    blocks = nn.functional.pad(values.abs(), (0, -values.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    scale = blocks.amax(-1)
    level = _root_(blocks / scale.clamp(min=1e-38)[..., None], power).mul_(top)
    level = level.add_(torch.rand(level.shape, device=level.device, generator=noise)).floor_().clamp_(max=top)
    codes = level.flatten(1)[:, : values.shape[1]]
    return (codes.copysign(values).to(torch.int8), scale) if signed else (codes.to(torch.uint8), scale)


def dequantise(codes: Tensor, scale: Tensor, power: int) -> Tensor:
    """scale x (code / top) ^ power with the code's sign. An unsigned 0 reads as half a step, not as nothing: the square
    root of it divides."""
    signed = codes.dtype == torch.int8
    level = codes.float().abs_() / 127.0 if signed else codes.float().clamp_(min=0.5) / 255.0
    wide = scale.repeat_interleave(BLOCK, dim=1)[:, : codes.shape[1]]
    values = _raise_(level, power).mul_(wide)
    return values.copysign_(codes.float()) if signed else values


def _root_(values: Tensor, power: int) -> Tensor:
    """The second or fourth root, in place: pow_ is many times slower."""
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
