from __future__ import annotations

import weakref
from dataclasses import replace

import torch

from verl_like.parallel.checksum import checksum
from verl_like.weight_sync.header import Header
from verl_like.weight_sync.ledger import WeightLedger

SENT = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
HEADER = Header(
    version=1,
    form="merged",
    dtype=torch.float32,
    shapes={name: tensor.shape for name, tensor in SENT.items()},
    checksums={name: int(checksum(tensor)) for name, tensor in SENT.items()},
)


def run(*items: tuple[str, torch.Tensor], header: Header = HEADER) -> tuple[WeightLedger, list[str]]:
    ledger = WeightLedger(header)
    passed = [name for name, _ in ledger.watch(items)]
    return ledger, passed


def test_a_whole_stream_has_no_problem() -> None:
    ledger, passed = run(*reversed(SENT.items()))
    assert passed == ["b", "a"]
    assert ledger.problems() == []
    assert (ledger.num_tensors, ledger.num_bytes) == (2, 40)


def test_cast_to_the_rollout_dtype() -> None:
    ledger = WeightLedger(replace(HEADER, dtype=torch.bfloat16, checksums=None))
    assert {t.dtype for _, t in ledger.watch(SENT.items())} == {torch.bfloat16}
    assert ledger.num_bytes == 20 and ledger.problems() == []


def test_all_problems_are_listed_and_the_stream_is_read_to_its_end() -> None:
    ledger, passed = run(("a", torch.ones(3, 2)), ("x", torch.ones(1)), ("b", SENT["b"]), ("b", SENT["b"]))
    assert passed == ["b"]
    faults = ["shape: a is (3, 2), not (2, 3)", "unexpected: x", "duplicate: b"]
    assert ledger.problems() == [*faults, "missing: a"]


def test_a_stream_of_other_numbers_than_the_shards_is_named() -> None:
    ledger, _ = run(("a", SENT["a"].flip(0)), ("b", SENT["b"]))
    assert ledger.problems() == ["differs from the trainer's shards: a"]


def test_an_engine_that_holds_other_numbers_is_named_once() -> None:
    """A tensor may be held in two places; one that nobody can tell is left out."""
    ledger, _ = run(*SENT.items())
    right = HEADER.checksums or {}
    assert ledger.differences([("a", right["a"])]) == []
    wrong = [("a", right["a"]), ("b", right["b"]), ("a", 1), ("a", 1)]
    assert ledger.differences(wrong) == ["differs in the rollout engine: a"]


def test_changes_since_an_earlier_header_are_counted() -> None:
    moved = replace(HEADER, version=2, checksums=dict(HEADER.checksums or {}) | {"b": 7})
    assert HEADER.num_changed(None) is None
    assert (moved.num_changed(HEADER), HEADER.num_changed(HEADER)) == (1, 0)
    assert replace(moved, form="adapters", checksums={"b": 7}).num_changed(HEADER) == 1
    assert HEADER.num_changed(replace(moved, form="adapters", checksums={"b": 7})) is None
    assert replace(moved, checksums=None).num_changed(HEADER) is None


def test_one_tensor_is_alive_at_a_time() -> None:
    """The one that the loader has in hand: no bucket is filled, and none is kept for its checksum."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    shapes = {str(i): torch.Size([8]) for i in range(20)}

    def stream() -> object:
        for name in shapes:
            tensor = torch.ones(8)
            alive.add(tensor)
            yield name, tensor
            del tensor

    ledger, most = WeightLedger(replace(HEADER, shapes=shapes, checksums={})), 0
    for _, tensor in ledger.watch(stream()):  # type: ignore[arg-type]
        most = max(most, len(alive))
        del tensor, _
    assert most == 1
