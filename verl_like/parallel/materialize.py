"""Give every rank the weights that rank 0 has loaded, one sharding unit at a time, before the unit is sharded.

Rank 0 holds the model on the CPU, the others hold it on the meta device (names and shapes, no memory). So one machine
never holds more than one whole model in host memory, and a device holds one unsharded unit beside its shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl_like.parallel.mesh import SplitAxis

Specs = list[tuple[str, tuple[int, ...], torch.dtype]]


class Materializer:
    """Filler of one model's modules; each module and each shared (tied) parameter once. All calls are collective.

    device: where weights go.
    buffer_device: where buffers go; under CPU offload only the weights stay on the host.
    buffer_dtype: precision of floating-point buffers; None keeps the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        buffer_device: torch.device,
        buffer_dtype: torch.dtype | None = None,
    ) -> None:
        self._device, self._buffer_device, self._buffer_dtype = device, buffer_device, buffer_dtype
        self._done: set[int] = set()
        owners = Counter(id(p) for part in model.modules() for p in part._parameters.values() if p is not None)
        self._tied = {id(p): p for p in model.parameters() if owners[id(p)] > 1}  # also keeps their ids taken
        self._filled: dict[int, nn.Parameter] = {}

    def fill(self, module: nn.Module, experts: SplitAxis | None = None) -> None:
        """Replace the parameters and buffers of `module` (sub-modules included) by filled ones on the device.

        experts: axis along which its parameters, stacks of experts, are split; a rank then holds one more part of one
        at a time beside its own.

        Raises ValueError on every rank when a rank's tensors have other names or shapes than rank 0's.
        """
        parts = [(name, part) for name, part in module.named_modules() if self._is_new(part)]
        self._done |= {id(part) for _, part in parts}
        dtypes = _agreed_dtypes(_specs(parts))
        for _, part in parts:
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    dtype = next(dtypes)
                    part._parameters[name] = (
                        self._filled_parameter(parameter, dtype)
                        if experts is None
                        else self._own_experts(parameter, dtype, experts)
                    )
            for name, buffer in part._buffers.items():
                if buffer is not None:  # one that is saved is state, and keeps its precision
                    saved = name not in part._non_persistent_buffers_set
                    part._buffers[name] = self._filled_buffer(buffer, next(dtypes), cast=not saved)

    def _is_new(self, part: nn.Module) -> bool:
        return id(part) not in self._done

    def _filled_parameter(self, parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        key = id(parameter)
        if key in self._filled:
            return self._filled[key]
        weight = _from_rank_0(parameter.detach(), self._device, dtype)
        filled = nn.Parameter(weight, requires_grad=parameter.requires_grad)
        if key in self._tied:
            self._filled[key] = filled
        return filled

    def _own_experts(self, parameter: nn.Parameter, dtype: torch.dtype, axis: SplitAxis) -> nn.Parameter:
        chunks, mine = parameter.detach().chunk(axis.group.size, 0), torch.empty(0)
        for number, chunk in enumerate(chunks):
            sent = _from_rank_0(chunk, self._device, dtype)
            mine = sent.clone() if number == axis.group.rank else mine
        return axis.parameter(mine, 0, requires_grad=parameter.requires_grad)

    def _filled_buffer(self, buffer: Tensor, dtype: torch.dtype, *, cast: bool) -> Tensor:
        filled = _from_rank_0(buffer, self._buffer_device, dtype)
        return filled.to(self._buffer_dtype) if cast and self._buffer_dtype and filled.is_floating_point() else filled


def _specs(parts: list[tuple[str, nn.Module]]) -> Specs:
    return [
        (f"{path}.{name}", tuple(tensor.shape), tensor.dtype)
        for path, part in parts
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]
        if tensor is not None
    ]


def _agreed_dtypes(mine: Specs) -> Iterator[torch.dtype]:
    """Yield rank 0's precisions (a checkpoint may keep modules in another one), after a look at names and shapes."""
    if dist.get_world_size() == 1:
        return iter([dtype for _, _, dtype in mine])
    first: list[Specs | None] = [mine]
    dist.broadcast_object_list(first, src=0)
    assert first[0] is not None
    differs = [a for a, b in zip(mine, first[0], strict=False) if a[:2] != b[:2]] or mine[len(first[0]) :]
    anywhere = torch.tensor(int(bool(differs) or len(mine) != len(first[0])))
    dist.all_reduce(anywhere)
    if anywhere:
        raise ValueError(f"the model's tensors are not the same on all ranks: {differs[:4] or 'on another rank'}")
    return iter([dtype for _, _, dtype in first[0]])


def _from_rank_0(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if tensor.device.type == "meta":
        tensor = torch.empty(tensor.shape, dtype=dtype, device=device)
    else:
        tensor = tensor.to(device=device, dtype=dtype)
    tensor = tensor.contiguous()
    if dist.get_world_size() > 1:
        dist.broadcast(tensor, src=0)
    return tensor
