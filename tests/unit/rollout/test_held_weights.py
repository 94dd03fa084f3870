"""Where the parts that ranks hold belong in whole tensors; vLLM's own modules replaced by plain ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from verl_like.parallel.checksum import Slice, checksum, checksum_of, sketch, total
from verl_like.plugins.vllm import reader
from verl_like.rollout.held_weights import Held, Layout, checksums, held_by, sketches

HEADS, KV, WIDTH, HIDDEN, VOCAB = 4, 2, 6, 8, 11  # rows of q: HEADS x 2, of k and v: KV x 2
SHAPES = {
    "embed.weight": torch.Size((VOCAB, HIDDEN)),
    "attn.q.weight": torch.Size((2 * HEADS, HIDDEN)),
    "attn.k.weight": torch.Size((2 * KV, HIDDEN)),
    "attn.q.bias": torch.Size((2 * HEADS,)),
    "attn.k.bias": torch.Size((2 * KV,)),
    "attn.o.weight": torch.Size((HIDDEN, 2 * HEADS)),
    "norm.weight": torch.Size((HIDDEN,)),
}
PACKED = {"qk": ["q", "k"]}


class Part(nn.Module):
    """Parameters, and attributes as vLLM's layers have them."""

    def __init__(self, attributes: dict[str, Any] | None = None, **parameters: Tensor) -> None:
        super().__init__()
        for name, tensor in parameters.items():
            self.register_parameter(name, nn.Parameter(tensor.clone(), requires_grad=False))
        vars(self).update(attributes or {})


def rank_model(state: dict[str, Tensor], rank: int, size: int) -> nn.Module:
    """What vLLM would hold: heads and ids split, key heads repeated where there are fewer than ranks."""

    def heads(name: str, count: int) -> Tensor:
        parts = min(size, count)
        return state[name].chunk(parts)[rank * parts // size]

    each = -(-16 // size)
    embed = torch.cat([state["embed.weight"], torch.full((16 - VOCAB, HIDDEN), 9.0)])[rank * each : (rank + 1) * each]
    start, end = min(rank * each, VOCAB), min((rank + 1) * each, VOCAB)
    indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end)
    q, k = heads("attn.q.weight", HEADS), heads("attn.k.weight", KV)
    bias = torch.cat([heads("attn.q.bias", HEADS), heads("attn.k.bias", KV)])
    model = nn.Module()
    model.embed = Part({"shard_indices": indices}, weight=embed)
    model.attn = nn.Module()
    model.attn.qk = Part({"output_partition_sizes": [len(q), len(k)]}, weight=torch.cat([q, k]), bias=bias)
    model.attn.o = Part(weight=state["attn.o.weight"].chunk(size, dim=1)[rank])
    model.norm = Part(weight=state["norm.weight"])
    vars(model)["packed_modules_mapping"] = PACKED
    return model


def told(models: list[nn.Module], monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, int]]]:
    """What each rank says, with the exchange between them replaced."""
    size = len(models)

    def ask(rank: int, everyones: list[Any] | None) -> Any:
        layout = Layout(SHAPES, rank=rank, size=size)
        sent: list[Any] = []

        def gather(into: list[Any], mine: Any, group: Any) -> None:
            sent.append(mine)
            into[:] = everyones or [mine] * size

        monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
        found = checksums(held_by(models[rank], layout, reader), layout, torch.float32, "group")
        return found if everyones else sent[0]

    everyones = [ask(rank, None) for rank in range(size)]
    return [ask(rank, everyones) for rank in range(size)]


@pytest.fixture
def state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_of_all_ranks_are_the_whole(state: dict[str, Tensor], size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for found in told([rank_model(state, rank, size) for rank in range(size)], monkeypatch):
        assert dict(found) == {name: int(checksum(tensor)) for name, tensor in state.items()}
        assert len(found) == len(SHAPES)


@pytest.mark.parametrize("rank", range(4))
def test_a_fault_on_one_rank_is_seen(state: dict[str, Tensor], rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By every rank where it holds a part of its own; by itself where another holds the same."""
    models = [rank_model(state, r, 4) for r in range(4)]
    with torch.no_grad():
        models[rank].attn.qk.weight[-1] *= -1  # type: ignore[union-attr, operator]
        models[rank].norm.weight[0] += 1  # type: ignore[union-attr, operator]
        models[rank].attn.o.weight[0, 0] += 1  # type: ignore[union-attr, operator]
    right = {name: int(checksum(tensor)) for name, tensor in state.items()}
    found = [dict(one) for one in told(models, monkeypatch)]
    wrong = [{name for name in SHAPES if one[name] != right[name]} for one in found]
    assert wrong[rank] == {"attn.k.weight", "norm.weight", "attn.o.weight"}
    assert all("attn.o.weight" in one for one in wrong)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_sketches_its_own_copy(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that two ranks hold alike: one of them may be wrong."""
    right = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    layout = Layout({"k.weight": right.shape}, rank=rank, size=2)
    everyones = [{"k.weight": {(0, 0, 4, 6): sketch(Slice(values, 0, 0))}} for values in (right * 3, right)]

    def gather(into: list[Any], mine: Any, group: Any) -> None:
        into[:] = everyones

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    held = Held("k.weight", "k", Slice((right * 3, right)[rank], 0, 0))
    ((_, found),) = sketches(iter([held]), layout, "group")
    torch.testing.assert_close(found, sketch(Slice((right * 3, right)[rank], 0, 0)))


def test_what_is_no_equal_part_is_left_out() -> None:
    layout = Layout({"a": torch.Size((9, 4))}, rank=1, size=2)
    assert layout.held("a", "p", torch.zeros(4, 4)) is None  # 9 is no 2 x 4
    assert layout.held("a", "p", torch.zeros(3, 4)) is None  # three parts on two ranks
    assert layout.held("a", "p", torch.zeros(9, 4, 1)) is None
    found = layout.held("a", "p", torch.zeros(9, 2))
    assert found is not None and (found.part.row, found.part.column) == (0, 2)
    padded = Layout(layout.shapes, rank=0, size=1).held("a", "p", torch.zeros(16, 4))
    assert padded is not None and padded.part.values.shape == (9, 4)  # one rank has the whole, and rows without meaning


@pytest.mark.parametrize(
    "listed, sizes, told",
    [
        (["qkv"], [4, 4, 4], 1),
        (["q", "k", "v"], [4, 4, 4], 1),  # of the engine's other types; this one's files hold them fused (GLM-4)
        ([], [4, 4, 4], 0),
        (["qkv"], [2, 2, 2], 3),
        (["q", "k", "v"], [2, 2, 2], 0),
        (["qkv"], [4, 1, 1], 0),
    ],
)
def test_a_fused_tensor_of_the_hub_counts_where_its_rows_are_known(
    listed: list[str], sizes: list[int], told: int
) -> None:
    """Whole, or each rank with as many rows of every part."""
    whole, ranks = torch.randn(12, 4), 12 // sum(sizes)
    total = torch.zeros((), dtype=torch.int64)
    for rank in range(ranks):
        layout = Layout({"a.qkv.weight": whole.shape}, rank=rank, size=ranks)
        model = nn.Module()
        model.a = nn.Module()
        rows = [part[rank * size : (rank + 1) * size] for part, size in zip(whole.chunk(3), sizes, strict=True)]
        model.a.qkv = Part({"output_partition_sizes": sizes}, weight=torch.cat(rows))
        vars(model)["packed_modules_mapping"] = {"qkv": listed} if listed else {}
        held = list(held_by(model, layout, reader))
        assert len(held) == told
        total += sum(checksum_of(item.part) for item in held)
    assert bool(total == checksum(whole)) == bool(told)


def test_a_tensor_held_in_another_precision_must_lose_nothing() -> None:
    layout = Layout({"b.bias": torch.Size((8,))}, rank=0, size=1)
    sent = torch.randn(8, generator=torch.Generator().manual_seed(0)).bfloat16()
    model = nn.Module()
    model.b = Part(bias=sent.float())
    assert checksums(held_by(model, layout, reader), layout, torch.bfloat16, None) == [("b.bias", int(checksum(sent)))]
    model.b.bias.data[0] *= 1 + 1e-5
    ((_, number),) = checksums(held_by(model, layout, reader), layout, torch.bfloat16, None)
    assert number != int(checksum(sent))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs, inputs", [(96, 64), (10, 7)])
def test_a_packed_layer_is_unpacked_bit_for_bit(
    dtype: torch.dtype, outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel sees the weight alone; here a product stands for it. Cut into blocks of the identity's rows."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[0, 0], weight[1, 1] = -0.0, torch.finfo(dtype).max
    layer = Part(
        {"cpu_linear": lambda x, _, bias: x @ weight.t(), "input_size": inputs}, weight=torch.empty(0).to(dtype)
    )
    monkeypatch.setattr(reader, "_IDENTITY_ROWS", 5)
    unpacked = reader.unpacked_linear(layer)
    assert unpacked is not None and torch.equal(unpacked, weight)
    assert checksum(unpacked) == checksum(weight)


def test_a_tied_head_is_told_by_the_name_of_the_embedding() -> None:
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    old = torch.zeros(6, 4)
    model = nn.Module()
    model.embed = Part(weight=weight)
    model.head = Part({"cpu_linear": lambda x, _, bias: x @ old.t()})
    model.head.register_parameter("weight", model.embed.weight)
    layout = Layout({"embed.weight": weight.shape}, rank=0, size=1)
    parts = list(held_by(model, layout, reader))
    assert {part.name for part in parts} == {"embed.weight"}
    assert {int(checksum_of(part.part)) for part in parts} == {int(checksum(weight)), int(checksum(old))}
    assert len(checksums(iter(parts), layout, torch.float32, None)) == len(parts)


def test_packed_experts_are_put_in_order() -> None:
    pytest.importorskip("vllm")
    from vllm._custom_ops import cpu_prepack_moe_weight

    for dtype in (torch.float32, torch.bfloat16):
        plain = torch.randn(3, 96, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
        packed = cpu_prepack_moe_weight(plain, "vec")
        assert not torch.equal(packed, plain)
        assert torch.equal(reader._unpacked(packed, "vec"), plain)


@pytest.mark.parametrize("size", [1, 2])
def test_experts_and_router_are_found_as_two_tensors_and_one(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """GraniteMoE's files, whatever the engine pads a rank's width to."""
    num, hidden, width, padding = 3, 4, 6, 2
    above = "layers.0.block_sparse_moe"
    whole = {
        f"{above}.input_linear.weight": torch.randn(num, 2 * width, hidden),
        f"{above}.output_linear.weight": torch.randn(num, hidden, width),
        f"{above}.router.layer.weight": torch.randn(num, hidden),
    }
    gate_up, down, router = whole.values()
    sums = dict.fromkeys(whole, 0)
    for rank in range(size):
        mine = slice(rank * width // size, (rank + 1) * width // size)
        zeros = torch.zeros(num, padding, hidden)
        gate, up = (half[:, mine] for half in gate_up.chunk(2, dim=1))
        packed = torch.cat([gate, zeros, up, zeros], dim=1), torch.cat([down[..., mine], zeros.mT], dim=2)
        monkeypatch.setattr(reader, "unpacked_experts", lambda module, packed=packed: packed)
        experts = Part(w13_weight=packed[0], w2_weight=packed[1])
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"block_sparse_moe": nn.ModuleDict()})])})
        block: Any = model["layers"][0]["block_sparse_moe"]  # pyright: ignore[reportIndexIssue]
        block.update({"experts": experts, "gate": Part(weight=router)})
        layout = Layout({name: tensor.shape for name, tensor in whole.items()}, rank=rank, size=size)
        for held in held_by(model, layout, reader):
            sums[held.name] += int(checksum_of(held.part)) if held.name in list(whole)[:2] or rank == 0 else 0
    for name, tensor in whole.items():
        assert sums[name] % 2**64 == int(checksum(tensor)) % 2**64, name


def test_totals_do_not_depend_on_who_adds() -> None:
    assert total([2**62, 2**62, 2**62]) == -(2**62)
