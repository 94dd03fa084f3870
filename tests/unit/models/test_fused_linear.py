from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from verl_like.models.fused_linear import full_logits_log_prob, linear_log_prob


def inputs(n: int, v: int, h: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(n + v)
    hidden = torch.randn(n, h, generator=g, dtype=dtype, requires_grad=True)
    weight = torch.randn(v, h, generator=g, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(v, (n,), generator=g)


def test_hand_values() -> None:
    """Logits 0, log 3 at temperature 1 are probabilities 1/4, 3/4; at temperature 0.5 they are 1/10, 9/10."""
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [math.log(3)]])
    for temperature, p in ((1.0, 0.75), (0.5, 0.9)):
        log_prob, entropy = linear_log_prob(
            hidden, weight, torch.tensor([1, 0]), temperature=temperature, with_entropy=True
        )
        assert log_prob.tolist() == pytest.approx([math.log(p), math.log(1 - p)])
        assert entropy is not None
        assert entropy.tolist() == pytest.approx([-p * math.log(p) - (1 - p) * math.log(1 - p)] * 2)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(0, 9),
    v=st.integers(2, 40),
    cut=st.integers(0, 3),
    chunk=st.integers(1, 200),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    with_entropy=st.booleans(),
)
def test_equals_full_logits(n: int, v: int, cut: int, chunk: int, temperature: float, with_entropy: bool) -> None:
    vocab = max(1, v - cut)
    hidden, weight, targets = inputs(n, v, 5, torch.float64)
    targets = targets.clamp(max=vocab - 1)
    gradients = []
    for function, extra in ((linear_log_prob, {"chunk_elements": chunk}), (full_logits_log_prob, {})):
        log_prob, entropy = function(
            hidden, weight, targets, temperature=temperature, vocab_size=vocab, with_entropy=with_entropy, **extra
        )
        g = torch.Generator().manual_seed(7)
        total = (log_prob * torch.randn(n, generator=g)).sum()
        if entropy is not None:
            total = total + (entropy * torch.randn(n, generator=g)).sum()
        gradients.append((log_prob, *torch.autograd.grad(total, [hidden, weight])))
    for ours, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-12)


def test_gradcheck() -> None:
    hidden, weight, targets = inputs(5, 7, 3, torch.float64)

    def function(h: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        log_prob, entropy = linear_log_prob(h, w, targets, temperature=0.8, with_entropy=True, chunk_elements=14)
        assert entropy is not None
        return log_prob, entropy

    assert torch.autograd.gradcheck(function, (hidden, weight))


def test_bfloat16_is_close_and_accumulates_in_float32() -> None:
    """Many chunks of tiny gradient: summed in bfloat16 they would be lost."""
    hidden, weight, targets = inputs(4096, 16, 8)
    half = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    exact = [t.detach().float().requires_grad_() for t in half]
    grads = []
    for (h, w), chunk in ((half, 16), (exact, 2**20)):
        log_prob, _ = linear_log_prob(h, w, targets, chunk_elements=chunk)
        assert log_prob.dtype == torch.float32
        grads.append(torch.autograd.grad(log_prob.sum(), [w])[0].float())
    error = (grads[0] - grads[1]).norm() / grads[1].norm()
    assert error < 0.01


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor):
                self.largest = max(self.largest, t.numel())
        return out


@pytest.mark.parametrize("fused", [True, False])
def test_no_logits_tensor(fused: bool) -> None:
    """Forward and backward hold no tensor of tokens x vocabulary; the reference path shows that the probe sees one."""
    n, v, h = 300, 500, 4
    hidden, weight, targets = inputs(n, v, h)
    with LargestTensor() as probe:
        if fused:
            log_prob, entropy = linear_log_prob(hidden, weight, targets, with_entropy=True, chunk_elements=10 * v)
        else:
            log_prob, entropy = full_logits_log_prob(hidden, weight, targets, with_entropy=True)
        assert entropy is not None
        (log_prob.sum() + entropy.sum()).backward()
    assert (probe.largest <= 10 * v) if fused else (probe.largest >= n * v)
