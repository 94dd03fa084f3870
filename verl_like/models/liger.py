"""Liger's Triton kernels (`model.use_liger`) for RMSNorm, rotary embedding and the gated MLP of a loaded model.

Liger's own `apply_liger_kernel_to_*` changes classes and functions inside transformers for the whole process, also
where it is given a model; rollout, reference and the oracle of the selfcheck would change with it. So its public
functions (`liger_kernel.transformers.functional`) are bound to the modules of one model instead (lean_model.py).

Its fused linear cross-entropy is not used: it gives a log-prob but no entropy, which would need the logits a second
time. `fused_kernel_options.impl_backend=triton` gives both from one pass. Source: github.com/linkedin/Liger-Kernel.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor
from transformers import PretrainedConfig

from verl_like.models import lean_ops
from verl_like.models.lean_model import KNOWN_TYPES, Functions


def check_liger(config: PretrainedConfig, device: torch.device) -> None:
    """Raises ValueError, with the fix, where the kernels cannot run on this device or do not know this model."""
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


def functions(*, products_are_kept: bool) -> Functions:
    """Liger's functions. SiLU and tanh-approximated GELU are the activations that it has kernels for.

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
