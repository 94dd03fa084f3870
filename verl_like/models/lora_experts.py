"""LoRA on what is no linear layer: the stacks of experts, and routers. Tensors have the names and shapes of peft.

transformers keeps the experts of a layer in two parameters, [experts, out, in] (or [experts, in, out]: gpt_oss). peft
adapts a parameter E experts high by A [E x rank, in] and B [out, rank x E], in which rows of A go expert by expert and
columns of B rank by rank (peft 0.21, tuners/lora/layer.py, ParamWrapper). It wraps the module twice, first for
gate_up_proj, whose tensors so are in `experts.base_layer`, then for down_proj. Only both together are adapted here.
peft adds B A to the weights before each pass; here tokens go through A and B beside the frozen stack, expert by expert,
so that no gradient of a whole stack is made.

Letters: T tokens, k experts of each, S = T x k, E experts, r rank, I inputs, O outputs.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import _grouped_linear

from verl_like.parallel.experts import count_each

GATE_UP, DOWN = "gate_up_proj", "down_proj"
_INNER = "base_layer"
_ALIGNED = 8  # numbers of a row: grouped products want 16 bytes
_STACKS = {f".experts.{_INNER}": f".experts.{GATE_UP}", ".experts": f".experts.{DOWN}"}  # adapter: its base


def base_name(adapter: str) -> str:
    """Name of the weight that an adapter is added to, from the adapter's."""
    end = next((end for end in _STACKS if adapter.endswith(end)), None)
    return f"{adapter}.weight" if end is None else adapter.removesuffix(end) + _STACKS[end]


def adapter_name(base: str) -> str | None:
    """Inverse of `base_name`; None for a name that can have no adapter."""
    end = next((end for end, stack in _STACKS.items() if base.endswith(stack)), None)
    if end is not None:
        return base.removesuffix(_STACKS[end]) + end
    return base.removesuffix(".weight") if base.endswith(".weight") else None


def change(b: Tensor, a: Tensor, shape: torch.Size, *, transposed: bool) -> Tensor:
    """Compute B A in the shape of the base weight. transposed: a stack is [experts, in, out]."""
    if len(shape) == 2:
        return b @ a
    a_EIr, b_EOr = _by_expert(a, shape[0]).transpose(1, 2), _ranks_last(b, shape[0])
    return a_EIr @ b_EOr.transpose(1, 2) if transposed else b_EOr @ a_EIr.transpose(1, 2)


def _by_expert(a: Tensor, experts: int) -> Tensor:
    return a.view(experts, -1, a.shape[-1])  # [E, r, I]


def _ranks_last(b: Tensor, experts: int) -> Tensor:
    return b.view(b.shape[0], -1, experts).permute(2, 0, 1)  # [E, O, r]


class ParameterAdapter:
    """Adapter of a parameter: a stack of experts, or a router's weight. Its two layers are in the module tree.

    experts: matrices in the parameter; 1 of a router.
    """

    def __init__(self, inputs: int, outputs: int, experts: int, rank: int, scale: float, like: Tensor) -> None:
        options: dict[str, Any] = {"bias": False, "device": like.device, "dtype": like.dtype}
        self.lora_A = nn.Linear(inputs, rank * experts, **options)
        self.lora_B = nn.Linear(rank * experts, outputs, **options)
        self.experts, self.scale, self.enabled = experts, scale, True
        if like.device.type != "meta":
            nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))  # as peft
            nn.init.zeros_(self.lora_B.weight)

    def added(self, x_SI: Tensor, ends_E: Tensor) -> Tensor:
        """Compute scale B A x, each row with the factors of its expert. ends_E: the row behind each expert's last."""
        a_ErI, b_EOr = _by_expert(self.lora_A.weight, self.experts), _ranks_last(self.lora_B.weight, self.experts)
        missing = -a_ErI.shape[1] % _ALIGNED
        a_ErI, b_EOr = functional.pad(a_ErI, (0, 0, 0, missing)), functional.pad(b_EOr, (0, missing)).contiguous()
        return _grouped_linear(_grouped_linear(x_SI, a_ErI, ends_E), b_EOr, ends_E) * self.scale


def adapt_experts(experts: Any, rank: int, scale: float, dtype: torch.dtype) -> list[ParameterAdapter]:
    """Put adapters into a module of stacked experts, in place: of gate_up_proj, and of down_proj."""
    adapters = []
    for stack in (experts.gate_up_proj, experts.down_proj):
        inputs, outputs = stack.shape[1:] if experts.is_transposed else stack.shape[:0:-1]
        like = torch.empty(0, dtype=dtype, device=stack.device)
        adapters.append(ParameterAdapter(inputs, outputs, stack.shape[0], rank, scale, like))
    inner = nn.Module()
    for owner, adapter in zip((inner, experts), adapters, strict=True):
        owner.lora_A, owner.lora_B = adapter.lora_A, adapter.lora_B
    setattr(experts, _INNER, inner)
    experts.forward = partial(_forward_experts, experts, *adapters)
    return adapters


def _forward_experts(
    experts: Any, gate_up: ParameterAdapter, down: ParameterAdapter, hidden_TH: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """Compute what transformers' experts do, with adapters: tokens in the order of their experts."""
    if not gate_up.enabled:
        return type(experts).forward(experts, hidden_TH, chosen, weights)
    expert_S, order_S = torch.sort(chosen.flatten(), stable=True)
    ends_E = count_each(expert_S, gate_up.experts).cumsum(0).to(torch.int32)
    x = hidden_TH[order_S // chosen.shape[1]]
    for name, adapter in ((GATE_UP, gate_up), (DOWN, down)):
        bias = getattr(experts, f"{name}_bias")[expert_S] if experts.has_bias else None
        base = _grouped_linear(x, getattr(experts, name), ends_E, bias=bias, is_transposed=experts.is_transposed)
        y = base + adapter.added(x, ends_E)
        x = experts._apply_gate(y) if name == GATE_UP else y
    back_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=order_S.device))
    weighted = (x * weights.flatten()[order_S, None])[back_S]
    return weighted.view(*chosen.shape, -1).sum(1).to(hidden_TH.dtype)


def adapt_router(router: Any, rank: int, scale: float, dtype: torch.dtype) -> ParameterAdapter:
    """Put an adapter into a router, in place. Its matrix is small: B A is added to it before each pass."""
    outputs, inputs = router.weight.shape
    like = torch.empty(0, dtype=dtype, device=router.weight.device)
    adapter = ParameterAdapter(inputs, outputs, 1, rank, scale, like)
    router.lora_A, router.lora_B = adapter.lora_A, adapter.lora_B
    router.forward = partial(_forward_router, router, adapter)
    return adapter


def _forward_router(router: Any, adapter: ParameterAdapter, *inputs: Tensor) -> Any:
    base = router.weight
    if not adapter.enabled:
        return type(router).forward(router, *inputs)
    added = adapter.lora_B.weight @ adapter.lora_A.weight * adapter.scale
    router._parameters["weight"] = base + added
    try:
        return type(router).forward(router, *inputs)
    finally:
        router._parameters["weight"] = base


def stacks_of(hf: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Find what can be adapted beside linear layers: (modules of stacked experts, their routers), by name.

    A router stands beside its experts, and has a matrix with a row for each of them.
    """
    experts = {
        name: part
        for name, part in hf.named_modules()
        if name.endswith(".experts") and hasattr(part, "is_transposed") and {GATE_UP, DOWN} <= part._parameters.keys()
    }
    routers: dict[str, Any] = {}
    for name, part in experts.items():
        block = name.rpartition(".")[0]
        for leaf, beside in hf.get_submodule(block).named_children():
            weight = beside._parameters.get("weight")
            is_router = weight is not None and weight.ndim == 2 and weight.shape[0] == part.gate_up_proj.shape[0]
            if is_router and not isinstance(beside, nn.Linear):
                routers[f"{block}.{leaf}"] = beside
    return experts, routers
