"""Questions to vLLM's modules about the weights they hold (held_weights.Reader): names, fused parts, packed numbers."""

from __future__ import annotations

import functools
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn


def fused_parts(model: nn.Module) -> dict[str, list[str]]:
    """Map modules that hold several Hugging Face modules to these, e.g. qkv_proj: [q_proj, k_proj, v_proj]."""
    found = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}  # StableLM says none
    for module in model.modules():  # of a vision-language model, the language model's own
        found |= getattr(module, "packed_modules_mapping", None) or {}
    if hasattr(model, "visual"):
        found |= {"qkv": ["qkv"]}
    if any(hasattr(module, "mamba_type") for module in model.modules()):  # files hold these fused, in the same order
        found |= {"conv1d": ["conv1d"], "in_proj": ["in_proj"]}
    return found


# Where vLLM has tensors, and files do: convolutions, routers' bias (LFM2); a wrapped mixer (Falcon-H1); routers, shared
# experts of experts (dots.llm1)
_MOVED = (
    (".short_conv.", ".conv."),
    (".feed_forward.gate.e_score_correction_bias", ".feed_forward.expert_bias"),
    (".mamba.mamba.", ".mamba."),
    (".experts.gate.", ".gate."),
    (".experts._shared_experts._layer.shared_experts.", ".shared_experts."),
)


def stored_name(model: nn.Module, name: str, stored: Container[str]) -> str:
    """Translate a parameter's name, or its beginning, to the checkpoint's.

    vLLM holds the language model of a vision-language model in another place. Files of Qwen2-VL and Qwen2.5-VL have
    names of their own (transformers saves these too). Source: hf_to_vllm_mapper of vLLM's Qwen-VL models.
    """
    if not hasattr(model, "visual"):
        for here, there in _MOVED:
            name = name.replace(here, there)
        router = name.replace(".block_sparse_moe.gate.", ".block_sparse_moe.router.layer.")  # GraniteMoE's
        return router if router in stored or f"{router}weight" in stored else name
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    old = "model.embed_tokens.weight" in stored
    if name.startswith("language_model.model."):
        return ("model." if old else "model.language_model.") + name.removeprefix("language_model.model.")
    return name if old else f"model.{name}"


def unpacked_linear(module: nn.Module) -> Tensor | None:
    """Unpack the weight [outputs, inputs] that a linear layer on CPU computes with; None without a packed copy.

    The kernel's own format is opaque. What it makes of the identity is the weight, bit for bit: each output is one
    product with 1 and sums of 0 (only -0 becomes 0). Of a convolution [channels, 1, width]: in bfloat16 it is packed.
    """
    if hasattr(module, "_cpu_unpacked_conv_weight"):  # not read itself: nothing computes with that copy
        packed_CW: Any = module._parameters["weight"]
        return _unpacked(packed_CW.detach()[None], _CONVOLUTION).permute(1, 0, 2)
    linear: Any = vars(module).get("cpu_linear")
    weight = module._parameters["weight"]
    if linear is None or weight is None or weight.is_meta:
        return None
    packed: Any = module
    inputs = weight.shape[1] if weight.ndim == 2 else vars(packed).get("input_size_per_partition", packed.input_size)
    identity = torch.eye(inputs, dtype=weight.dtype)
    with torch.no_grad():
        return torch.cat([linear(rows, weight, None).t() for rows in identity.split(_IDENTITY_ROWS)], dim=1)


_IDENTITY_ROWS = 1024
_CONVOLUTION = "convolution"


def unpacked_experts(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Unpack a layer's experts on CPU: gate and up in one, and down, their width padded; None elsewhere."""
    packed: Any = module
    kernel = getattr(packed.quant_method, "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    isa = getattr(experts, "isa", None)
    if packed.w2_weight.device.type != "cpu" or experts is None or isa is None or experts._use_zentorch:
        return None
    return _unpacked(packed.w13_weight.detach(), isa), _unpacked(packed.w2_weight.detach(), isa)


def _unpacked(packed_EON: Tensor, isa: str) -> Tensor:
    """Restore matrices whose numbers vLLM's kernel has moved about."""
    flat = packed_EON.flatten(1)
    plain = torch.empty_like(flat)
    plain[:, _packed_order(packed_EON.shape[1:], packed_EON.dtype, isa)] = flat
    return plain.view_as(packed_EON)


@functools.lru_cache(maxsize=16)
def _packed_order(shape: torch.Size, dtype: torch.dtype, isa: str) -> Tensor:
    """Find the origin of each number of a packed matrix: numbered matrices, packed 15 bits at a time (no NaN)."""
    import vllm._custom_ops as ops

    def pack(matrix: Tensor) -> Tensor:
        packs: Any = ops.causal_conv1d_weight_pack  # which 0.26 does not have
        return packs(matrix) if isa == _CONVOLUTION else ops.cpu_prepack_moe_weight(matrix[None], isa)

    with torch.inference_mode(False):
        bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        number, order = torch.arange(shape.numel()), torch.zeros(shape.numel(), dtype=torch.int64)
        for shift in range(0, number.numel().bit_length(), 15):
            digits = ((number >> shift) & 0x7FFF).to(bits).view(dtype).view(shape)
            order |= pack(digits).view(bits).flatten().to(torch.int64) << shift
        return order
