from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.models.memory import PeakBytes
from verl_like.models import fused_linear
from verl_like.models.fused_linear import Head, Reference, full_logits_reductions, fused_reductions

ALL = frozenset(fused_linear.REDUCTIONS) - {"jsd", "chosen_log_probs"}
BOTH = frozenset({"log_probs", "entropy"})
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(n: int, v: int, h: int, dtype: torch.dtype = torch.float64) -> Inputs:
    """(hidden, weight, bias, targets)"""
    g = torch.Generator().manual_seed(n + v)
    hidden, weight, bias = (
        torch.randn(shape, generator=g, dtype=dtype, requires_grad=True) for shape in ((n, h), (v, h), (v,))
    )
    return hidden, weight, bias, torch.randint(v, (n,), generator=g)


def reference(n: int, v: int, h: int, dtype: torch.dtype = torch.float64, **head: Any) -> Reference:
    g = torch.Generator().manual_seed(99)
    weight = torch.randn(v, h, generator=g, dtype=dtype)
    return Reference(hidden_NH=torch.randn(n, h, generator=g, dtype=dtype), head=Head(weight_VH=weight, **head))


def test_hand_values() -> None:
    """Logits 0, log 3 at temperature 1 are probabilities 1/4, 3/4; at temperature 0.5 they are 1/10, 9/10."""
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [math.log(3)]])
    even = Reference(hidden_NH=torch.ones(2, 1), head=Head(weight_VH=torch.zeros(2, 1)))
    for temperature, p in ((1.0, 0.75), (0.5, 0.9)):
        out = fused_reductions(
            hidden, Head(weight_VH=weight), torch.tensor([1, 0]), ALL, temperature=temperature, references=(even,)
        )
        entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
        assert out["log_probs"].tolist() == pytest.approx([math.log(p), math.log(1 - p)])
        assert out["entropy"].tolist() == pytest.approx([entropy] * 2)
        assert out["sum_pi_squared"].tolist() == pytest.approx([p * p + (1 - p) * (1 - p)] * 2)
        assert out["full_kl"].tolist() == pytest.approx([math.log(2) - entropy] * 2)


def test_hand_values_of_a_soft_cap() -> None:
    """cap(x) = c tanh(x / c) with c = 2 before the temperature: logits 0 and 5 become 0 and 2 tanh(2.5)."""
    z = 2 * math.tanh(2.5) / 0.5
    head = Head(weight_VH=torch.tensor([[0.0], [2.0]]), bias_V=torch.tensor([0.0, 0.5]), scale=2.0, softcap=2.0)
    out = fused_reductions(torch.ones(1, 1), head, torch.tensor([1]), frozenset({"log_probs"}), temperature=0.5)
    assert out["log_probs"].item() == pytest.approx(z - math.log(1 + math.exp(z)), rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 9),
    v=st.integers(2, 40),
    cut=st.integers(0, 3),
    chunk=st.integers(1, 200),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    want=st.sets(st.sampled_from([*sorted(ALL), "chosen_log_probs"]), min_size=1),
    jensen=st.booleans(),
    teachers=st.integers(1, 3),
    head=st.fixed_dictionaries({"softcap": st.sampled_from([None, 3.0]), "scale": st.sampled_from([1.0, 0.4])}),
    with_bias=st.booleans(),
    kept=st.booleans(),
)
def test_equals_full_logits(
    n: int,
    v: int,
    cut: int,
    chunk: int,
    temperature: float,
    want: set[str],
    jensen: bool,
    teachers: int,
    head: dict[str, Any],
    with_bias: bool,
    kept: bool,
) -> None:
    """Values and gradients of every mixture of reductions, with the logits kept for the backward pass and not."""
    want = {"jsd" if jensen and name == "full_kl" else name for name in want}
    vocab = max(1, v - cut)
    hidden, weight, bias, targets = inputs(n, v, 5)
    others = [reference(n, v, 3 + i, vocab_size=vocab, **head) for i in range(teachers)]
    if teachers > 1:  # each of every third token, say
        others = [replace(other, mine_N=torch.arange(n) % teachers == i) for i, other in enumerate(others)]
    ours = Head(weight_VH=weight, bias_V=bias if with_bias else None, vocab_size=vocab, **head)
    chosen = torch.stack([targets.clamp(max=vocab - 1), targets * 0], 1)
    settings_ = {"temperature": temperature, "references": tuple(others), "chosen_NK": chosen}
    results = []
    for function, extra in ((fused_reductions, {"chunk_elements": chunk}), (full_logits_reductions, {})):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fused_linear, "KEEP_ELEMENTS", 2**20 if kept else 0)
            out = function(hidden, ours, targets.clamp(max=vocab - 1), frozenset(want), **settings_, **extra)
        g = torch.Generator().manual_seed(7)
        total = sum((out[n] * torch.randn(out[n].shape, generator=g, dtype=torch.float64)).sum() for n in sorted(want))
        leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
        results.append([*(out[name] for name in sorted(want)), *torch.autograd.grad(total, leaves)])  # type: ignore[arg-type]
    for fused, naive in zip(*results, strict=True):
        torch.testing.assert_close(fused, naive, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("want", [ALL, frozenset({"jsd", "chosen_log_probs", "entropy"})], ids=["full_kl", "jsd"])
@pytest.mark.parametrize("keep", [0, 2**20])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradcheck(monkeypatch: pytest.MonkeyPatch, keep: int, softcap: float | None, want: frozenset[str]) -> None:
    """Against finite differences, all reductions at once."""
    ids = torch.arange(10).view(5, 2) % 7
    monkeypatch.setattr(fused_linear, "KEEP_ELEMENTS", keep)
    hidden, weight, bias, targets = inputs(5, 7, 3)
    other = reference(5, 7, 2)

    def function(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        head = Head(weight_VH=w, bias_V=b, scale=0.7, softcap=softcap)
        options: dict[str, Any] = {"chunk_elements": 14 if keep == 0 else 100}
        return tuple(
            fused_reductions(
                h, head, targets, want, temperature=0.8, references=(other,), **options, chosen_NK=ids
            ).values()
        )

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


@pytest.mark.parametrize("keep", [0, 2**20])
def test_a_graph_can_be_walked_twice(monkeypatch: pytest.MonkeyPatch, keep: int) -> None:
    """What is kept for the backward pass is not overwritten by it."""
    monkeypatch.setattr(fused_linear, "KEEP_ELEMENTS", keep)
    hidden, weight, _, targets = inputs(5, 7, 3)
    out = fused_reductions(hidden, Head(weight_VH=weight), targets, ALL, references=(reference(5, 7, 2),))
    total = sum(value.sum() for value in out.values())
    first, second = (torch.autograd.grad(total, [hidden, weight], retain_graph=True) for _ in range(2))  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_kl_to_itself_is_zero_and_no_gradient_enters_the_reference() -> None:
    hidden, weight, _, targets = inputs(6, 50, 8, torch.float32)
    same = Reference(hidden_NH=hidden, head=Head(weight_VH=weight))
    kl = fused_reductions(hidden, Head(weight_VH=weight), targets, frozenset({"full_kl"}), references=(same,))[
        "full_kl"
    ]
    assert not kl.any()
    for gradient in torch.autograd.grad(kl.sum(), [hidden, weight]):
        assert gradient.abs().max() < 1e-6


def test_bfloat16_is_close_and_accumulates_in_float32() -> None:
    """Many chunks of tiny gradient: summed in bfloat16 they would be lost."""
    hidden, weight, _, targets = inputs(4096, 16, 8, torch.float32)
    half = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    exact = [t.detach().float().requires_grad_() for t in half]
    grads = []
    for (h, w), chunk in ((half, 16), (exact, 2**20)):
        out = fused_reductions(h, Head(weight_VH=w), targets, frozenset({"log_probs"}), chunk_elements=chunk)
        assert out["log_probs"].dtype == torch.float32
        grads.append(torch.autograd.grad(out["log_probs"].sum(), [w])[0].float())
    error = (grads[0] - grads[1]).norm() / grads[1].norm()
    assert error < 0.01


def test_refusals() -> None:
    hidden, weight, _, targets = inputs(3, 7, 2)
    head = Head(weight_VH=weight)
    with pytest.raises(ValueError, match=r"unknown reductions \['perplexity'\]"):
        fused_reductions(hidden, head, targets, frozenset({"perplexity"}))
    with pytest.raises(ValueError, match="needs the reference model's"):
        fused_reductions(hidden, head, targets, frozenset({"full_kl"}))
    with pytest.raises(ValueError, match="7 logits and the reference 6"):
        fused_reductions(hidden, head, targets, frozenset({"full_kl"}), references=(reference(3, 6, 2),))


def peak(n: int, v: int, h: int, dtype: torch.dtype, want: frozenset[str], chunk: int | None) -> int:
    """Largest number of bytes that forward and backward hold beyond their inputs; chunk None: full logits."""
    hidden, weight, _, targets = inputs(n, v, h, dtype)
    other = (reference(n, v, h, dtype),) if want & {"full_kl", "jsd"} else ()
    with PeakBytes() as probe:
        if chunk is None:
            out = full_logits_reductions(hidden, Head(weight_VH=weight), targets, want, references=other)
        else:
            out = fused_reductions(
                hidden, Head(weight_VH=weight), targets, want, references=other, chunk_elements=chunk
            )
        torch.stack([value.sum() for value in out.values()]).sum().backward()
        del out
    return probe.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("want", [BOTH, ALL])
def test_peak_memory(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, want: frozenset[str]) -> None:
    """16k tokens x 152k vocabulary x hidden 1,536 with its chunk of 2^26 logits, every side divided by 16.

    Allowed: under 2 GB / 256 in all, the weight's gradient in float32 (0.93 GB / 256) included. That gradient and the
    chunks scale with 1/256, the hidden states' gradient too. The full logits need ten times as much.
    """
    monkeypatch.setattr(fused_linear, "KEEP_ELEMENTS", 0)
    monkeypatch.setattr(fused_linear, "_SLAB_ELEMENTS", 2**24 // 256)
    n, v, h = 16_384 // 16, 151_936 // 16, 1536 // 16
    limit = 2_000_000_000 // 256
    assert peak(n, v, h, dtype, want, chunk=2**26 // 256) < limit
    assert peak(n, v, h, dtype, want, chunk=None) > 5 * limit


def test_a_reduction_outside_the_loss_costs_no_backward_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entropy is usually a metric alone: the gradient then is the plain one of the log-probs."""
    hidden, weight = (torch.randn(n, 6, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in (9, 37))
    targets = torch.arange(9)
    alone = fused_reductions(hidden, Head(weight_VH=weight), targets, frozenset({"log_probs"}))["log_probs"]
    expected = torch.autograd.grad(alone.sum(), [hidden, weight])
    monkeypatch.setattr("verl_like.models.fused_chunks._mixture", None)
    both = fused_reductions(hidden, Head(weight_VH=weight), targets, frozenset({"log_probs", "entropy"}))
    for ours, plain in zip(torch.autograd.grad(both["log_probs"].sum(), [hidden, weight]), expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=0)


def test_verls_entropy_keys_change_memory_and_no_number() -> None:
    """entropy_from_logits_with_chunking and entropy_checkpointing on full logits, in [N, V] tensors."""
    n, v = 4096, 64
    hidden, weight, _, targets = inputs(n, v, 8, torch.float32)
    kept: dict[tuple[int | None, bool], float] = {}
    peak, values = dict[tuple[int | None, bool], float](), list[list[Tensor]]()
    for way in ((None, False), (None, True), (512, False), (512, True)):
        options: Any = {"entropy_rows": way[0], "recompute_entropy": way[1]}
        with PeakBytes() as probe:
            out = full_logits_reductions(hidden, Head(weight_VH=weight), targets, BOTH, **options)
            kept[way] = probe._now / (n * v * 4)
            gradients = torch.autograd.grad((out["entropy"].square() + out["log_probs"]).sum(), (hidden, weight))
        peak[way] = probe.peak / (n * v * 4)
        values.append([out["entropy"].detach(), *gradients])
    for other in values[1:]:
        for mine, expected in zip(other, values[0], strict=True):
            assert torch.allclose(mine, expected, rtol=1e-4, atol=1e-4)
    assert kept[None, False] - kept[None, True] > 0.9 < kept[512, False] - kept[512, True]  # p
    assert peak[None, False] - peak[512, False] > 0.9 < peak[None, True] - peak[512, True]  # p log p and its gradient
