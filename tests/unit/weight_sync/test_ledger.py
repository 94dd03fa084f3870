from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_like.weight_sync import checksum as checksums
from verl_like.weight_sync.checksum import checksum
from verl_like.weight_sync.ledger import WeightLedger
from verl_like.weight_sync.transport import in_buckets

EXPECTED = {"a": torch.Size([2, 3]), "b": torch.Size([4])}


def _run(*items: tuple[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> tuple[WeightLedger, list[str]]:
    ledger = WeightLedger(EXPECTED, dtype, with_checksums=True)
    passed = [name for name, _ in ledger.watch(items)]
    return ledger, passed


def test_a_whole_stream_has_no_problem() -> None:
    ledger, passed = _run(("b", torch.ones(4)), ("a", torch.ones(2, 3)))
    assert passed == ["b", "a"]
    assert ledger.faults() + ledger.missing() == []
    assert (ledger.num_tensors, ledger.num_bytes) == (2, 40)


def test_cast_to_the_rollout_dtype() -> None:
    ledger = WeightLedger(EXPECTED, torch.bfloat16, with_checksums=False)
    assert {t.dtype for _, t in ledger.watch([("a", torch.ones(2, 3)), ("b", torch.ones(4))])} == {torch.bfloat16}
    assert ledger.num_bytes == 20


def test_all_problems_are_listed_and_the_stream_is_read_to_its_end() -> None:
    ledger, passed = _run(("a", torch.ones(3, 2)), ("x", torch.ones(1)), ("b", torch.ones(4)), ("b", torch.ones(4)))
    assert passed == ["b"]
    assert ledger.faults() == ["shape: a is (3, 2), not (2, 3)", "unexpected: x", "duplicate: b"]
    assert ledger.missing() == ["missing: a"]


def test_differences_are_named() -> None:
    sent = torch.arange(6.0).reshape(2, 3)
    ledger, _ = _run(("a", sent), ("b", torch.ones(4)))
    assert ledger.differences({"a": sent.clone(), "b": torch.ones(4)}) == []
    swapped = sent.flip(0)
    assert ledger.differences({"a": swapped, "b": torch.ones(4)}) == ["differs in the rollout engine: a"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=40), st.data())
def test_checksum_sees_position_and_value(values: list[float], data: st.DataObject) -> None:
    tensor = torch.tensor(values)
    i, j = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, len(values) - 1))
    changed = tensor.clone()
    changed[i], changed[j] = tensor[j].clone(), tensor[i].clone()
    same_bits = torch.equal(tensor.view(torch.int32), changed.view(torch.int32))
    assert (checksum(changed) == checksum(tensor)) == same_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_checksum_does_not_depend_on_layout(dtype: torch.dtype) -> None:
    tensor = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    transposed = tensor.t().contiguous().t()
    assert not transposed.is_contiguous()
    assert checksum(transposed) == checksum(tensor)
    assert checksum(tensor.t()) != checksum(tensor)


@pytest.mark.parametrize("numel", [0, 1, 4096, 3 * 4096 + 5])
def test_checksum_is_the_sum_by_hand(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's whole numbers; and cut into blocks of rows."""
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(0)).bfloat16()
    bits = tensor.view(torch.int16).tolist()

    def weight(number: int, step: int) -> int:
        product = (number * step + 2**63) % 2**64 - 2**63
        return (product ^ (product >> 29)) | 1

    rows, columns = ([weight(n + 1, step) for n in range(4096)] for step in (checksums._STEP, checksums._TURN))
    total = sum(bit * rows[i // 4096] * columns[i % 4096] for i, bit in enumerate(bits))
    assert int(checksum(tensor)) % 2**64 == total % 2**64
    monkeypatch.setattr(checksums, "_ROWS", 2)
    assert int(checksum(tensor)) % 2**64 == total % 2**64


def test_checksum_sees_exchanged_rows_and_columns_of_its_own_table() -> None:
    tensor = torch.randn(8, 4096, generator=torch.Generator().manual_seed(0))
    for other in (tensor.flip(0), tensor.flip(1), tensor.roll(1, 0), tensor.roll(1, 1)):
        assert checksum(other) != checksum(tensor)


def test_buckets_keep_order_and_size() -> None:
    stream = [(str(i), torch.zeros(n)) for i, n in enumerate([10, 10, 100, 5, 5, 5])]
    buckets = list(in_buckets(stream, 80))
    assert [[name for name, _ in bucket] for bucket in buckets] == [["0", "1"], ["2"], ["3", "4", "5"]]
    assert list(in_buckets([], 80)) == []
