"""Optimizers with small states: they round without bias, follow float32's path, and take the bytes they promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.engine import tiny
from tests.unit.engine.tiny import PolicyLoss, build_engine, denominators, experience, weights
from verl_like.config import FSDPConfig, OptimConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.optim import BLOCK, LeanAdamW, dequantise, quantise, stochastic_round
from verl_like.parallel.dist import ProcessInfo

LEAN = ["adamw_bf16", "adamw_8bit"]


def noise(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def lean(parameter: nn.Parameter, bits: int, **changes: Any) -> LeanAdamW:
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01} | changes
    return LeanAdamW([parameter], **settings, bits=bits)


def test_rounding_is_right_on_average_and_exact_where_it_can_be() -> None:
    """1 + 2^-10 lies an eighth of the way from 1 to the next bfloat16, 1 + 2^-7."""
    rounded = stochastic_round(torch.full((80_000,), 1 + 2**-10), noise()).float()
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    assert float((rounded > 1).float().mean()) == pytest.approx(1 / 8, abs=0.005)
    exact = torch.tensor([0.0, 1.0, -2.5, 3e38, -1e-30]).bfloat16()
    assert torch.equal(stochastic_round(exact.float(), noise()), exact)


@pytest.mark.parametrize(("power", "signed", "gap"), [(2, True, 0.02), (4, False, 0.02)])
def test_eight_bits_by_block(power: int, signed: bool, gap: float) -> None:
    """Values come back within a small share of their block's largest, the largest exactly, signs always; a block does
    not see its neighbour's scale."""
    values = torch.randn(6, BLOCK + 40, generator=noise(1))
    values = values if signed else values.square()
    values[:, BLOCK:] *= 1e-4
    codes, scale = quantise(values, power, noise(2), signed=signed)
    assert codes.dtype == (torch.int8 if signed else torch.uint8) and scale.shape == (6, 2)
    back = dequantise(codes, scale, power)
    for part in (slice(0, BLOCK), slice(BLOCK, None)):
        top = values[:, part].abs().amax(1, keepdim=True)
        assert float(((back - values)[:, part].abs() / top).max()) < gap
        assert torch.allclose(back[:, part].abs().amax(1, keepdim=True), top)
    assert bool((back * values >= 0).all())
    assert signed or not bool((back == 0).any())  # what divides is never zero


@pytest.mark.parametrize("bits", [16, 8])
def test_the_path_is_that_of_float32(bits: int) -> None:
    """300 steps on a quadratic whose curvatures span 10,000: as low as torch's AdamW gets."""
    scale = torch.logspace(-2, 2, 8 * BLOCK).view(8, BLOCK)
    start = torch.randn(8, BLOCK, generator=noise())
    losses = []
    for make in (lambda p: torch.optim.AdamW([p], lr=1e-2, weight_decay=0.01), lambda p: lean(p, bits)):
        parameter = nn.Parameter(start.clone())
        optimizer = make(parameter)
        for _ in range(300):
            loss = (scale * parameter.square()).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float((scale * parameter.detach().square()).mean()))
    first = float((scale * start.square()).mean())
    assert losses[0] < 0.02 * first and losses[1] == pytest.approx(losses[0], rel=0.1)


def test_bfloat16_weights_move_under_a_small_learning_rate() -> None:
    """Steps of 1e-4 on weights of 1: rounded to nearest nothing would ever happen (bfloat16 has 2^-8 there)."""
    weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer, nearest = lean(weight, 16, lr=1e-4, weight_decay=0.0), torch.ones(64, 64, dtype=torch.bfloat16)
    for _ in range(50):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        nearest = (nearest.float() - 1e-4).bfloat16()
    assert float(nearest.float().mean()) == 1.0
    assert float(weight.detach().float().mean()) == pytest.approx(1 - 50e-4, abs=5e-4)


def test_replicas_round_alike_and_shards_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for shard in (0, 0, 1):
        monkeypatch.setattr("verl_like.engine.optim.shard_index", lambda parameter, shard=shard: shard)
        weight = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
        optimizer = lean(weight, 16, lr=1e-3)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        results.append(weight.detach())
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def steps(engine: FSDPEngine, seeds: range) -> dict[str, Tensor]:
    for seed in seeds:
        batch = experience(7, seed=seed)
        engine.train_minibatch(batch, PolicyLoss(), denominators(batch), rule=tiny.ONE_BATCH)
    return weights(engine)


def state_bytes(engine: FSDPEngine) -> tuple[int, int]:
    """(bytes of weights, bytes of optimizer states without step counters)."""
    assert engine.optimizer is not None
    states = [t for s in engine.optimizer.state.values() for name, t in s.items() if name != "step"]
    return sum(p.nbytes for p in engine.model.parameters()), sum(t.nbytes for t in states)


@pytest.mark.parametrize(
    ("optimizer", "model_dtype", "weight_bytes", "state_bytes_at_most"),
    [
        ("adamw", "float32", 4, 8.0),
        ("adamw_bf16", "float32", 4, 4.0),
        ("adamw_bf16", "bfloat16", 2, 4.0),
        ("adamw_8bit", "bfloat16", 2, 2.2),  # scales: 8 bytes per row of 64 weights here, per 256 in a large model
    ],
)
def test_bytes_per_weight(
    process: ProcessInfo, path: str, optimizer: str, model_dtype: str, weight_bytes: int, state_bytes_at_most: float
) -> None:
    settings: Any = {"optimizer": optimizer, "lr": 1e-3}
    engine = build_engine(process, path, optim=OptimConfig(**settings), fsdp=FSDPConfig(model_dtype=model_dtype))
    steps(engine, range(1))
    count = sum(p.numel() for p in engine.model.parameters())
    held, states = state_bytes(engine)
    assert held == weight_bytes * count
    assert states <= state_bytes_at_most * count


@pytest.mark.parametrize("optimizer", LEAN)
@pytest.mark.parametrize("model_dtype", ["float32", "bfloat16"])
def test_a_resumed_run_goes_on_bit_for_bit(
    process: ProcessInfo, path: str, tmp_path: Path, optimizer: str, model_dtype: str
) -> None:
    settings: Any = {"optimizer": optimizer, "lr": 1e-3}
    changes: dict[str, Any] = {"optim": OptimConfig(**settings), "fsdp": FSDPConfig(model_dtype=model_dtype)}
    engine = build_engine(process, path, **changes)
    steps(engine, range(2))
    engine.save(str(tmp_path), contents=["model", "optimizer", "extra"])
    expected = steps(engine, range(2, 4))
    resumed = build_engine(process, path, **changes, seed=50)
    resumed.load(str(tmp_path), contents=["model", "optimizer", "extra"])
    actual = steps(resumed, range(2, 4))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert state_bytes(resumed) == state_bytes(engine)  # states keep their precision


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", LEAN)
def test_it_learns_as_float32_does(process: ProcessInfo, path: str, optimizer: str) -> None:
    """The same 20 steps on one batch, with bfloat16 weights too: the loss falls as far, to a tenth."""
    batch, falls = experience(9), {}
    for name, dtype in (("adamw", "float32"), (optimizer, "float32"), (optimizer, "bfloat16")):
        settings: Any = {"optimizer": name, "lr": 1e-3}
        engine = build_engine(process, path, optim=OptimConfig(**settings), fsdp=FSDPConfig(model_dtype=dtype))
        losses = [
            engine.train_minibatch(batch, PolicyLoss(), denominators(batch), rule=tiny.ONE_BATCH)["pg_loss"].value
            for _ in range(20)
        ]
        falls[name, dtype] = losses[0] - losses[-1]
    exact = falls.pop(("adamw", "float32"))
    assert exact > 0.1
    assert all(fall == pytest.approx(exact, rel=0.1) for fall in falls.values()), falls


@pytest.mark.slow
def test_two_ranks_save_and_one_goes_on(process: ProcessInfo, path: str, tmp_path: Path) -> None:
    """8-bit states are cut by rows, as weights are: a checkpoint loads on another number of ranks."""
    two = tiny.spawn_ranks(2, save_on_two, tmp_path / "ranks", path, str(tmp_path / "saved"))
    settings: Any = {"optimizer": "adamw_8bit", "lr": 1e-3}
    engine = build_engine(process, path, optim=OptimConfig(**settings), seed=50)
    engine.load(str(tmp_path / "saved"), contents=["model", "optimizer", "extra"])
    loaded = weights(engine)
    assert all(torch.equal(loaded[name], two[0]["saved"][name]) for name in loaded)
    later = steps(engine, range(2, 3))
    for name, value in later.items():  # other shards draw other random bits
        torch.testing.assert_close(value, two[0]["later"][name], rtol=0, atol=2e-4)


def save_on_two(process: ProcessInfo, path: str, folder: str) -> dict[str, Any]:
    settings: Any = {"optimizer": "adamw_8bit", "lr": 1e-3}
    engine = build_engine(process, path, optim=OptimConfig(**settings))
    for seed in range(2):
        half_step(process, engine, seed)
    engine.save(folder, contents=["model", "optimizer", "extra"])
    saved = weights(engine)
    half_step(process, engine, 2)
    return {"saved": saved, "later": weights(engine)}


def half_step(process: ProcessInfo, engine: FSDPEngine, seed: int) -> None:
    batch = experience(7, seed=seed)
    rows = batch.select(range(process.rank, len(batch), process.world_size))
    engine.train_minibatch(rows, PolicyLoss(), denominators(batch), rule=tiny.ONE_BATCH)
