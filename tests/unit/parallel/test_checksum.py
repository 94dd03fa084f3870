from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_like.parallel import checksum as module
from verl_like.parallel.checksum import Slice, as_matrix, checksum, checksum_of, total

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=40), st.data())
def test_checksum_sees_position_and_value(values: list[float], data: st.DataObject) -> None:
    tensor = torch.tensor(values)
    i, j = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, len(values) - 1))
    changed = tensor.clone()
    changed[i], changed[j] = tensor[j].clone(), tensor[i].clone()
    tiny = torch.finfo(torch.float32).tiny
    same = [0.0 if abs(v) < tiny else v for v in tensor.tolist()] == [
        0.0 if abs(v) < tiny else v for v in changed.tolist()
    ]
    assert (checksum(changed) == checksum(tensor)) == same


@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_in_memory_plays_no_part(dtype: torch.dtype) -> None:
    tensor = randn(64, 48).to(dtype)
    transposed = tensor.t().contiguous().t()
    assert not transposed.is_contiguous()
    assert checksum(transposed) == checksum(tensor)
    assert checksum(tensor.t()) != checksum(tensor)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 7), (2, 3, 5), (0, 4)])
def test_checksum_is_the_sum_by_hand(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's whole numbers; and cut into blocks of rows."""
    tensor = randn(*shape).bfloat16()
    table = as_matrix(tensor)

    def weight(number: int, step: int) -> int:
        product = ((number + 1) * step + 2**63) % 2**64 - 2**63
        return (product ^ (product >> 29)) | 1

    bits = table.view(torch.int16).tolist()
    entries = [
        bit * weight(r, module._STEP) * weight(c, module._TURN)
        for r, row in enumerate(bits)
        for c, bit in enumerate(row)
    ]
    assert int(checksum(tensor)) == total(entries)
    monkeypatch.setitem(module._AT_ONCE, "cpu", 8)
    assert int(checksum(tensor)) == total(entries)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_change_of_a_value_is_seen(dtype: torch.dtype) -> None:
    """Rows negated, flipped, exchanged, rolled; single bits of every entry of a row."""
    tensor = randn(64, 96).to(dtype)
    told = checksum(tensor)
    for row in range(64):
        for spoil in (torch.neg, lambda t: t.flip(0), lambda t: t * 0, lambda t: t.roll(1), lambda t: t * 1.01):
            other = tensor.clone()
            other[row] = spoil(tensor[row])
            assert checksum(other) != told
    for other in (-tensor, tensor.flip(0), tensor.flip(1), tensor.roll(1, 0), tensor.roll(1, 1)):
        assert checksum(other) != told
    kind = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    for bit in range(8 * dtype.itemsize - 1):
        other = tensor.clone()
        other.view(kind)[3, 5] ^= 1 << bit
        assert checksum(other) != told


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_kernels_take_for_zero_is_zero(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    zeros = torch.zeros(4, dtype=dtype)
    largest_below = torch.tensor(limits.tiny, dtype=dtype) * (1 - limits.eps)
    small = torch.stack([-zeros[0], largest_below, -largest_below, zeros[0]])
    assert 0 < float(largest_below) < limits.tiny
    assert checksum(small) == checksum(zeros)
    assert checksum(torch.full((4,), limits.tiny, dtype=dtype)) != checksum(zeros)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_add_up(dtype: torch.dtype) -> None:
    """Rectangles in any order; runs of the flat tensor, empty ones too."""
    tensor = randn(13, 7).to(dtype)
    told = int(checksum(tensor))
    boxes = [Slice(tensor[r : r + 5, c : c + 3], r, c) for r in range(0, 13, 5) for c in range(0, 7, 3)]
    assert total([int(checksum_of(box)) for box in reversed(boxes)]) == told


def test_sums_wrap_as_int64() -> None:
    assert total([2**63 - 1, 1]) == -(2**63)
    assert total([-(2**63), -1]) == 2**63 - 1
    assert total([]) == 0
