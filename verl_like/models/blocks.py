"""Changes to a model's layers before they are sharded: gradient checkpointing and compilation."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Results that cost a matrix product to compute again: kept by selective checkpointing.
_PRODUCTS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
    "aten::_grouped_mm",
    "transformers::grouped_mm_fallback",
    "flash_attn::_flash_attn_varlen_forward",
)


def enable_checkpointing(hf: PreTrainedModel, *, selective: bool) -> None:
    """Compute a layer's activations again in the backward pass.

    selective: all but the results of matrix products and attention; otherwise all of them.
    """
    settings: dict[str, Any] = {"use_reentrant": False}
    if selective:
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def _keep_products(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    name = getattr(operator, "name", lambda: "")().split(".")[0]  # "aten::mm", without the overload
    return CheckpointPolicy.MUST_SAVE if name in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def compile_blocks(layers: Sequence[nn.Module], device: torch.device) -> None:
    """Compile each layer with torch.compile, for any number of tokens. Raises ValueError without a compiler."""
    check_compiler(device)
    for layer in layers:
        layer.compile(dynamic=True)


def check_compiler(device: torch.device) -> None:
    """Check that torch.compile can make code for this device here; raises ValueError otherwise."""
    if device.type == "cuda":
        found, needs = importlib.util.find_spec("triton") is not None, "the triton package"
    else:
        names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
        found, needs = any(shutil.which(name) for name in names if name), "a C++ compiler (g++ or clang++)"
    if not found:
        raise ValueError(f"use_torch_compile=True on {device.type} needs {needs}: install it, or set it to False")
