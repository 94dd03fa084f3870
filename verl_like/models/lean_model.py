"""Replacement of functions in a loaded model's own modules, never in transformers: norms, rotary embedding, gated MLPs.

Known classes alone are touched; everything else keeps transformers' code. Where an input or a weight is a DTensor
(tensor parallelism) the module's own forward answers.

The functions are lean_ops.py's, or Liger's Triton kernels (`model.use_liger`). Liger's own `apply_liger_kernel_to_*`
changes classes and functions inside transformers for the whole process, also where it is given a model; rollout,
reference and the oracle of the selfcheck would change with it. So its public functions
(`liger_kernel.transformers.functional`) are put into one model here. Its fused linear cross-entropy is not used: it
gives a log-prob but no entropy, which would need the logits a second time. `fused_kernel_options.impl_backend=triton`
gives both from one pass. Source: github.com/linkedin/Liger-Kernel.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from verl_like.models import lean_ops

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Class -> (name of its epsilon, whether the scale is one plus the weight)
_NORMS = {
    **dict.fromkeys(("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"), ("variance_epsilon", False)),
    **dict.fromkeys(("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm"), ("eps", True)),
}
_NAMES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3")
_ATTENTIONS = {f"{name}Attention" for name in _NAMES}
_GATED_MLPS = {f"{name}MLP" for name in _NAMES}
KNOWN_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")  # config.model_type
_ROTARY = "apply_rotary_pos_emb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Functions:
    """Functions to put into a model.

    `gated`: class name of an MLP's activation -> f(gate, up); other activations stay as they are.
    """

    rms_norm: Callable[..., Tensor] = lean_ops.rms_norm  # (x, weight, eps, *, one_plus)
    rotary: Callable[..., tuple[Tensor, Tensor]] = lean_ops.apply_rotary  # (q, k, cos, sin, unsqueeze_dim)
    gated: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """Number of modules that got each function."""

    norms: int = 0
    rotaries: int = 0
    mlps: int = 0


def put_in(hf: PreTrainedModel, functions: Functions) -> Replaced:
    """Exchange the forward of this model's norms, attentions (rotary embedding alone) and gated MLPs, in place."""
    counts = {"norms": 0, "rotaries": 0, "mlps": 0}
    for module in hf.modules():
        found = _forward_of(module, functions)
        if found is not None:
            kind, forward = found
            module.forward = MethodType(forward, module)
            counts[kind] += 1
    return Replaced(**counts)


def _forward_of(module: nn.Module, functions: Functions) -> tuple[str, Callable[..., Any]] | None:
    kind = type(module)
    if not kind.__module__.startswith("transformers.models."):
        return None
    if kind.__name__ in _NORMS:
        eps_name, one_plus = _NORMS[kind.__name__]
        return "norms", _norm_forward(module, float(getattr(module, eps_name)), one_plus, functions.rms_norm)
    if kind.__name__ in _ATTENTIONS and _calls_rotary(kind):
        return "rotaries", _rotary_forward(kind, functions.rotary)
    if kind.__name__ in _GATED_MLPS:
        gated = functions.gated.get(type(module.act_fn).__name__)
        return None if gated is None else ("mlps", _mlp_forward(gated))
    return None


def _norm_forward(
    module: nn.Module, eps: float, one_plus: bool, rms_norm: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    own = type(module).forward

    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        weight: Tensor = self.weight  # pyright: ignore[reportAssignmentType]
        if isinstance(hidden_states, DTensor) or isinstance(weight, DTensor):
            return own(self, hidden_states)
        return rms_norm(hidden_states, weight, eps, one_plus=one_plus)

    return forward


def _mlp_forward(gated: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(self.act_fn(gate) * up if isinstance(gate, DTensor) else gated(gate, up))

    return forward


def _calls_rotary(attention: type[nn.Module]) -> bool:
    """True where the forward of this class is a plain function that calls transformers' rotary function by its name."""
    forward = attention.forward
    plain = isinstance(forward, FunctionType) and not hasattr(forward, "__wrapped__")
    return plain and _ROTARY in forward.__code__.co_names and _ROTARY in forward.__globals__


def _rotary_forward(attention: type[nn.Module], other: Callable[..., tuple[Tensor, Tensor]]) -> FunctionType:
    """Copy the class's own forward, with one name of its globals bound to the other function."""
    own = attention.forward
    usual = own.__globals__[_ROTARY]

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        fits = not isinstance(q, DTensor) and cos.shape[-1] == q.shape[-1]
        return (other if fits else usual)(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    forward = FunctionType(
        own.__code__, own.__globals__ | {_ROTARY: rotary}, own.__name__, own.__defaults__, own.__closure__
    )
    forward.__kwdefaults__ = own.__kwdefaults__
    return forward


def check_liger(config: PretrainedConfig, device: torch.device) -> None:
    """Check that Liger's kernels run on this device and know this model; raises ValueError, with the fix, otherwise."""
    if device.type != "cuda":
        raise ValueError("model.use_liger=True needs a CUDA device: set it to False")
    if importlib.util.find_spec("liger_kernel") is None:
        raise ValueError("model.use_liger=True needs the package liger-kernel: pip install 'verl_like[liger]'")
    name = config.get_text_config().model_type
    if name not in KNOWN_TYPES:
        raise ValueError(
            f"model.use_liger=True is not available for model type {name!r} (only for {', '.join(KNOWN_TYPES)}): "
            "set it to False"
        )


def liger_functions(*, products_are_kept: bool) -> Functions:
    """Collect Liger's functions. SiLU and tanh-approximated GELU are the activations that it has kernels for.

    products_are_kept: selective recomputation keeps the results of matrix products for the backward pass. Liger rotates
    queries and keys in place, and where nothing is recomputed nobody notices; here the kept projections would be
    rotated once more. The lean function writes new tensors.
    """
    from liger_kernel.transformers import functional

    return Functions(
        rms_norm=_rms_norm,
        rotary=lean_ops.apply_rotary if products_are_kept else functional.liger_rope,
        gated={
            "SiLU": functional.liger_swiglu,
            "SiLUActivation": functional.liger_swiglu,
            "GELUTanh": functional.liger_geglu,
        },
    )


def _rms_norm(x: Tensor, weight: Tensor, eps: float, *, one_plus: bool) -> Tensor:
    from liger_kernel.transformers.functional import liger_rms_norm

    # in_place would write the gradient over the incoming one, which somebody else may hold (Gemma's norms after blocks)
    return liger_rms_norm(x, weight, eps, float(one_plus), "gemma" if one_plus else "llama", False)
