from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_checksum_of_a_tensor_of_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = checksum(tensor)
    monkeypatch.setattr("verl_like.weight_sync.checksum._CHUNK", 96)
    assert checksum(tensor) == whole


def test_buckets_keep_order_and_size() -> None:
    stream = [(str(i), torch.zeros(n)) for i, n in enumerate([10, 10, 100, 5, 5, 5])]
    buckets = list(in_buckets(stream, 80))
    assert [[name for name, _ in bucket] for bucket in buckets] == [["0", "1"], ["2"], ["3", "4", "5"]]
    assert list(in_buckets([], 80)) == []
