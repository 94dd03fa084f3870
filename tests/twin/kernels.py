"""Operators of torch that only CUDA has, for the CPU, in plain arithmetic: FlashAttention's, and products into float32.

Only so that everything around the kernel runs with its real arguments; of the kernel itself nothing is shown.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

_registered: list[torch.library.Library] = []


def register() -> None:
    """Give the operators an implementation for CPU tensors, for the life of this process."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    library.impl("mm.dtype", lambda a, b, dtype: torch.mm(a.to(dtype), b.to(dtype)), "CPU")
    _registered.append(library)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *rest: Any, **how: Any
) -> tuple[Tensor, ...]:
    dropout, causal = rest[:2]
    assert dropout == 0 and cu_q.dtype == cu_k.dtype == torch.int32, "as the kernel wants it"
    assert q.dtype in (torch.bfloat16, torch.float16) and q.dtype == k.dtype == v.dtype, "of half precision alone"
    assert max_q == int(cu_q.diff().max()) and max_k == int(cu_k.diff().max())
    assert int(cu_q[-1]) == len(q) and int(cu_k[-1]) == len(k) == len(v)
    output, lse, nothing = torch.empty_like(q), torch.empty(q.shape[1], len(q)), torch.empty(0)
    for own, keys in _segments(cu_q, cu_k):
        scores = _scores(q[own], k[keys], causal, **how)
        lse[:, own] = scores.logsumexp(-1)
        output[own] = (scores.softmax(-1) @ _heads(v[keys], q.shape[1])).transpose(0, 1).to(q.dtype)
    return output, lse, torch.zeros(2, dtype=torch.uint64), nothing, nothing


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    *rest: Any,
    scale: float | None = None,
    **how: Any,
) -> tuple[Tensor, ...]:
    """Of lse and the output it makes the weights and their gradients' mean, as the kernel does: others give others."""
    grads, factor = [torch.zeros_like(t) for t in (q, k, v)], q.shape[-1] ** -0.5 if scale is None else scale
    for own, keys in _segments(cu_q, cu_k):
        slopes, mean = (t[own].float().transpose(0, 1) for t in (grad, grad.float() * out.float()))
        weights = torch.exp(_scores(q[own], k[keys], causal, scale, **how) - lse[:, own, None])
        of_weights = slopes @ _heads(v[keys], q.shape[1]).transpose(1, 2)
        of_scores = factor * weights * (of_weights - mean.sum(-1, keepdim=True))
        found = (of_scores @ _heads(k[keys], q.shape[1]), of_scores.transpose(1, 2) @ _heads(q[own], q.shape[1]))
        for target, part, value in zip(
            grads, (own, keys, keys), (*found, weights.transpose(1, 2) @ slopes), strict=True
        ):
            target[part] = value.unflatten(0, (target.shape[1], -1)).sum(1).transpose(0, 1).to(target.dtype)
    return tuple(grads)


def _segments(cu_q: Tensor, cu_k: Tensor) -> list[tuple[slice, slice]]:
    bounds = [(itertools.starmap(slice, itertools.pairwise(bounds.tolist()))) for bounds in (cu_q, cu_k)]
    return list(zip(*bounds, strict=True))


def _heads(t: Tensor, heads: int) -> Tensor:
    """[T, fewer heads, head_dim] as float32 [heads, T, head_dim]."""
    return t.float().repeat_interleave(heads // t.shape[1], 1).transpose(0, 1)


def _scores(
    q: Tensor,
    k: Tensor,
    causal: bool,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **_: Any,
) -> Tensor:
    """Scores [heads, queries, keys] of one sequence, -inf where hidden; the last query is aligned with the last key."""
    left = -1 if window_size_left is None else window_size_left
    right = 0 if causal or window_size_right is None else window_size_right
    behind = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    hidden = (behind < -right) | ((behind > left) if left >= 0 else False)
    scores = _heads(q, q.shape[1]) @ _heads(k, q.shape[1]).transpose(1, 2)
    return (scores * (q.shape[-1] ** -0.5 if scale is None else scale)).masked_fill(hidden, float("-inf"))
