"""Lean functions (lean_ops.py) put into a loaded model: into its own modules, never into transformers.

Known classes alone are touched; everything else keeps transformers' code. Where an input or a weight is a DTensor
(tensor parallelism) the module's own forward answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from verl_like.models import lean_ops

# Class -> (name of its epsilon, whether the scale is one plus the weight)
_NORMS = {
    **dict.fromkeys(("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"), ("variance_epsilon", False)),
    **dict.fromkeys(("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm"), ("eps", True)),
}
_ATTENTIONS = {f"{family}Attention" for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3")}
_ROTARY = "apply_rotary_pos_emb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """How many modules got which function."""

    norms: int
    rotaries: int


def make_lean(hf: PreTrainedModel) -> Replaced:
    """Exchange the forward of this model's norms and rotary embeddings, in place."""
    counts = {"norms": 0, "rotaries": 0}
    for module in hf.modules():
        name = type(module).__name__
        if not type(module).__module__.startswith("transformers.models."):
            continue
        if name in _NORMS:
            kind, forward = "norms", _norm_forward(module, *_NORMS[name])
        elif name in _ATTENTIONS and uses_rotary(type(module)):
            kind, forward = "rotaries", _rotary_forward(type(module))
        else:
            continue
        module.forward = MethodType(forward, module)
        counts[kind] += 1
    return Replaced(**counts)


def uses_rotary(attention: type[nn.Module]) -> bool:
    """Whether the forward of this class is a plain function that calls transformers' rotary function by its name."""
    forward = attention.forward
    plain = isinstance(forward, FunctionType) and not hasattr(forward, "__wrapped__")
    return plain and _ROTARY in forward.__code__.co_names and _ROTARY in forward.__globals__


def _norm_forward(module: nn.Module, eps_name: str, one_plus: bool) -> Callable[..., Tensor]:
    eps, own = float(getattr(module, eps_name)), type(module).forward

    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        weight: Tensor = self.weight  # pyright: ignore[reportAssignmentType]
        if isinstance(hidden_states, DTensor) or isinstance(weight, DTensor):
            return own(self, hidden_states)
        return lean_ops.rms_norm(hidden_states, weight, eps, one_plus=one_plus)

    return forward


def _rotary_forward(attention: type[nn.Module]) -> FunctionType:
    """The class's own code, with one name of its globals bound to the lean function."""
    own = attention.forward
    usual = own.__globals__[_ROTARY]

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        lean = not isinstance(q, DTensor) and cos.shape[-1] == q.shape[-1]
        return (lean_ops.apply_rotary if lean else usual)(q, k, cos, sin, unsqueeze_dim)

    forward = FunctionType(
        own.__code__, own.__globals__ | {_ROTARY: rotary}, own.__name__, own.__defaults__, own.__closure__
    )
    forward.__kwdefaults__ = own.__kwdefaults__
    return forward
