"""The proof of quantised weights: it passes what the formats round, and names what is wrong by little."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from verl_like.parallel.checksum import WIDTH, Slice, sketch
from verl_like.rollout.held_weights import dequantised
from verl_like.rollout.int8 import Int8Linear
from verl_like.weight_sync import ledger
from verl_like.weight_sync.ledger import QuantisedLedger

NAME = "model.layers.0.mlp.up_proj.weight"
SHAPES = [(64, 96), (3, 512), (200, 7), (1, 1)]


def weight(shape: tuple[int, int], kind: str) -> Tensor:
    """Ordinary numbers, or rows of very different sizes with outliers, a row of zeros, and equal numbers."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.02
    if kind == "outliers":
        made *= torch.logspace(-3, 1, shape[0])[:, None]
        made[0, 0], made[-1] = 30.0, 0.0
    return made if kind != "equal" else torch.full(shape, 0.5)


def int8(matrix: Tensor) -> Tensor:
    linear = Int8Linear(nn.Linear(matrix.shape[1], matrix.shape[0], bias=False))
    linear.take(matrix)
    assert torch.equal(linear(torch.eye(matrix.shape[1])), linear.dequantised().t())
    return linear.dequantised()


def fp8(matrix: Tensor) -> Tensor:
    """As vLLM does online: one scale for the tensor, the matrix kept the other way round; torch's own rounding."""
    module = nn.Module()
    scale = (matrix.abs().max() / 448).clamp(min=1e-12)
    module.weight = nn.Parameter((matrix / scale).to(torch.float8_e4m3fn).t(), requires_grad=False)
    module.weight_scale = nn.Parameter(scale, requires_grad=False)
    found = dequantised(module)
    assert found is not None
    return found


def problems(kind: str, sent: Tensor, held: Tensor) -> list[str]:
    ledger = QuantisedLedger(kind)
    assert len(list(ledger.watch([(NAME, sent), ("model.norm.weight", torch.ones(3))]))) == 2
    return ledger.differences([(NAME, sketch(Slice(held, 0, 0)))])


@pytest.mark.parametrize("numbers", ["ordinary", "outliers", "equal"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "quantise"), [("int8", int8), ("fp8", fp8)])
def test_rounding_passes(kind: str, quantise: Callable[[Tensor], Tensor], shape: tuple[int, int], numbers: str) -> None:
    sent = weight(shape, numbers)
    assert problems(kind, sent, quantise(sent)) == []
    assert problems(kind, sent.bfloat16(), quantise(sent.bfloat16().float())) == []


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "another scale for all": lambda held: held * 1.02,
    "another scale for one row": lambda held: torch.cat([held[:1] * 1.5, held[1:]]),
    "scales of other rows": lambda held: held.roll(1, 0),
    "one row of zeros": lambda held: torch.cat([held[:1] * 0, held[1:]]),
    "columns exchanged": lambda held: held.roll(1, 1),
    "old weights": lambda held: held + 0.01,
    "NaN": lambda held: held * float("nan"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("kind", "quantise"), [("int8", int8), ("fp8", fp8)])
def test_what_is_wrong_is_named(kind: str, quantise: Callable[[Tensor], Tensor], fault: str) -> None:
    sent = weight((256, 192), "ordinary")
    (problem,) = problems(kind, sent, FAULTS[fault](quantise(sent)))
    assert problem.startswith(f"{kind} weights differ in the rollout engine: {NAME}, dequantised, is")


def test_an_engine_that_tells_nothing_proves_nothing() -> None:
    ledger = QuantisedLedger("fp8")
    assert ledger.differences([]) == ["quantization=fp8: no quantised weight of the rollout engine could be read back"]


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix is read in blocks of rows: copies of a whole embedding in float64 would not fit beside a model."""
    sent = weight((67, 40), "outliers")
    whole = sketch(Slice(sent, 0, 0)), ledger._deviation(sent, "fp8"), ledger._deviation(sent, "int8")
    seen, real = [], Tensor.double
    monkeypatch.setattr("verl_like.parallel.checksum._BLOCK", 200)
    monkeypatch.setattr(Tensor, "double", lambda each: seen.append(each.numel()) or real(each))
    parts = sketch(Slice(sent, 0, 0)), ledger._deviation(sent, "fp8"), ledger._deviation(sent, "int8")
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
    assert max(seen) <= 40 * WIDTH


def test_sketches_add_up_over_parts() -> None:
    whole = weight((10, 300), "ordinary")
    left, right = (sketch(Slice(whole[:, a:b], 0, a)) for a, b in ((0, 120), (120, 300)))
    assert left.shape == (10, WIDTH)
    torch.testing.assert_close(left + right, sketch(Slice(whole, 0, 0)), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(sketch(Slice(whole[3:5], 3, 0)), sketch(Slice(whole, 0, 0))[3:5])
