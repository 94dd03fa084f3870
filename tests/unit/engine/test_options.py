"""Sharding, offload, prefetch and recomputation change where and when, never what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

from tests.unit.engine import options, tiny
from tests.unit.engine.options import OPTIONS
from tests.unit.engine.tiny import assert_same, build_engine
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.config.fsdp import FSDPConfig, MixedPrecisionConfig, WrapPolicyConfig
from verl_like.models.blocks import check_compiler
from verl_like.parallel.dist import ProcessInfo
from verl_like.parallel.fsdp import gather


@pytest.fixture(scope="module")
def one(process: ProcessInfo, path: str) -> dict[str, dict[str, Tensor]]:
    return options.gradients_of_all(process, path)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, path: str) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    return tiny.spawn_ranks(2, options.everything, folder / "ranks", path, str(folder / "saved"))


def default_of(name: str) -> str:
    special = name.rpartition("_")[2]
    return f"fsdp2_{special}" if special in ("tied", "lora") else "fsdp2"


@pytest.mark.parametrize("name", OPTIONS)
def test_one_rank_gives_the_default_gradient(one: dict[str, dict[str, Tensor]], name: str) -> None:
    assert_same(one[default_of(name)], one[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_two_ranks_give_the_default_gradient_of_one(
    one: dict[str, dict[str, Tensor]], two: list[dict[str, Any]], name: str
) -> None:
    for result in two:
        assert_same(one[default_of(name)], result["gradients"][name])


def test_what_an_update_of_four_micro_batches_gathers_and_reduces(
    two: list[dict[str, Any]], process: ProcessInfo, path: str
) -> None:
    """Two layers and the root. A layer is gathered for the forward and the backward pass; a rank alone reduces once."""
    assert two[0]["collectives"] == {
        "fsdp2": {"gathers": 4 * (2 + 2 + 1), "reductions": 4 * 3},
        "fsdp2_keep_gathered": {"gathers": 3, "reductions": 4 * 3},
        "fsdp2_summed_once": {"gathers": 4 * (2 + 2 + 1), "reductions": 3},
        "fsdp2_zero2_summed_once": {"gathers": 3, "reductions": 3},
    }
    assert options.collectives(process, path, {})["reductions"] == 3


def test_a_rank_alone_adds_up_in_the_precision_of_its_shards(process: ProcessInfo, path: str) -> None:
    """Gradients of bfloat16 shards would be twice as large while they wait in float32."""
    for fsdp, once in ((FSDPConfig(), True), (FSDPConfig(model_dtype="bfloat16"), False)):
        assert build_engine(process, path, fsdp=fsdp).sharding.reduces_once is once


@pytest.mark.parametrize("cpu_keeps", [True, False])
def test_a_rank_alone_on_a_cpu_keeps_its_copies(process: ProcessInfo, path: str, cpu_keeps: bool) -> None:
    """Between the micro-batches of an update; not where weights belong on the host for good (offload_policy)."""
    engine, batch = build_engine(process, path, fsdp=FSDPConfig(offload_policy=not cpu_keeps)), tiny.experience(4)
    gathered = []

    class Watching(tiny.PolicyLoss):
        def __call__(self, *arguments: Any) -> Any:
            weight = engine.model.hf.model.layers[0].mlp.up_proj.weight
            gathered.append(not isinstance(weight, DTensor))
            return super().__call__(*arguments)

    engine.train_minibatch(batch, Watching(), tiny.denominators(batch), rule=MicroBatchRule(max_sequences=1))
    assert gathered == [cpu_keeps] * 4
    assert all(isinstance(p, DTensor) for p in engine.model.parameters())


def test_adapters_have_the_same_gradient_under_sequence_parallelism(
    one: dict[str, dict[str, Tensor]], two: list[dict[str, Any]]
) -> None:
    for result in two:
        assert_same(one["fsdp2_lora"], result["lora_ulysses"])


@pytest.mark.parametrize("part", ["saved", "saved_lora", "saved_tied"])
def test_a_run_goes_on_from_its_checkpoint_and_from_one_that_fsdp1_wrote(two: list[dict[str, Any]], part: str) -> None:
    saved = two[0][part]
    assert_same(saved["uninterrupted"], saved["fsdp2"], 0.0)
    assert_same(saved["uninterrupted"], saved["fsdp1"], 0.0)


@pytest.mark.parametrize("name", options.APART)
def test_rows_without_a_backward_pass_keep_the_ranks_in_step(two: list[dict[str, Any]], name: str) -> None:
    """Collectives must match although one rank runs forward passes alone."""
    for result in two:
        assert_same(*result["apart"][name])


def test_no_gradient_stays_after_a_step(process: ProcessInfo, path: str) -> None:
    engine, batch = build_engine(process, path), tiny.experience(3)
    engine.train_minibatch(batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=tiny.ONE_BATCH)
    assert all(p.grad is None for p in engine.sharding.root.parameters())


def test_offloaded_shards_return_for_what_cannot_read_them_there(
    process: ProcessInfo, path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An export gathers from the host. (On a CPU nothing moves: the moves are counted.)"""
    engine = build_engine(process, path)
    moves: list[torch.device] = []
    monkeypatch.setattr(engine.sharding, "move_params", moves.append)
    works: list[Callable[[], object]] = [
        lambda: next(engine.export_weights(torch.float32)),
        lambda: engine.save(str(tmp_path), contents=["model", "hf_model"]),
        lambda: engine.load(str(tmp_path), contents=["model"]),
    ]
    counts = []
    for work in works:
        engine._params_offloaded = True
        work()
        counts.append(len(moves))
        moves.clear()
    assert counts == [0, 1, 1]


def test_one_weight_is_gathered_alone(process: ProcessInfo, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sharding, gathered = build_engine(process, path).sharding, []

    def counting(*args: Any, **kwargs: Any) -> Any:
        gathered.append(args)
        return gather(*args, **kwargs)

    monkeypatch.setattr("verl_like.parallel.fsdp.gather", counting)
    expected = dict(sharding.full_weights(torch.float32))
    gathered.clear()
    name = "hf.model.layers.1.mlp.up_proj.weight"
    found = dict(sharding.full_weights(torch.float32, lambda other: other == name))
    assert found.keys() == {name} and torch.equal(found[name], expected[name]) and len(gathered) == 1


def test_ranks_with_different_models_are_told_so(two: list[dict[str, Any]]) -> None:
    assert all("not the same on all ranks" in result["mismatch"] for result in two)


def test_bfloat16_reduction_rounds_the_gradient(process: ProcessInfo, path: str, one: dict[str, Any]) -> None:
    """mixed_precision.reduce_dtype is what gradients are added up in."""
    batch = tiny.experience(9)
    half = FSDPConfig(mixed_precision=MixedPrecisionConfig(reduce_dtype="bfloat16"))
    rounded = options.gradients(build_engine(process, path, fsdp=half), batch, batch)
    exact = one["fsdp2"]["lm_head.weight"]
    gap = float((rounded["lm_head.weight"] - exact).abs().max() / exact.abs().max())
    assert 1e-5 < gap < 2e-2


def test_buffers_get_their_precision(process: ProcessInfo, path: str) -> None:
    half = FSDPConfig(mixed_precision=MixedPrecisionConfig(buffer_dtype="bfloat16"))
    for fsdp, dtype in ((FSDPConfig(), torch.float32), (half, torch.bfloat16)):
        buffers = build_engine(process, path, fsdp=fsdp).model.buffers()
        assert {buffer.dtype for buffer in buffers if buffer.is_floating_point()} == {dtype}


def test_prefetch_asks_for_the_next_layer(process: ProcessInfo, path: str) -> None:
    for asked in (False, True):
        engine = build_engine(process, path, fsdp=FSDPConfig(forward_prefetch=asked))
        root: Any = engine.model
        first, second = root.hf.model.layers
        lists = [module._get_fsdp_state()._states_to_forward_prefetch for module in (root, first, second)]
        expected = [[first._get_fsdp_state()], [second._get_fsdp_state()], []] if asked else [[], [], []]
        assert lists == expected


def test_modules_are_wrapped_by_size(process: ProcessInfo, path: str) -> None:
    """6,144 weights in each linear layer of the MLP; embedding and head stay with the root, whatever their size."""
    engine = build_engine(process, path, fsdp=FSDPConfig(wrap_policy=WrapPolicyConfig(min_num_params=6000)))
    units = {name for name, module in engine.model.named_modules() if isinstance(module, FSDPModule)}
    expected = {f"hf.model.layers.{i}.mlp.{part}_proj" for i in (0, 1) for part in ("gate", "up", "down")}
    assert expected | {""} <= units and not units & {"hf.lm_head", "hf.model.embed_tokens"}


def test_selective_recomputation_runs_no_product_twice(process: ProcessInfo, path: str) -> None:
    """Full recomputation repeats the products of a layer's forward pass, selective repeats none."""
    counts = {}
    for name in ("fsdp2", "fsdp2_checkpointing", "fsdp2_selective"):
        engine, batch = build_engine(process, path, **OPTIONS[name]), tiny.experience(3)
        with FlopCounterMode(display=False) as counter:
            engine.train_minibatch(batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=tiny.ONE_BATCH)
        counts[name] = counter.get_total_flops()
    assert counts["fsdp2_checkpointing"] > 1.1 * counts["fsdp2"]
    assert counts["fsdp2_selective"] == counts["fsdp2"]


def test_compilation_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ValueError, match=r"use_torch_compile=True on cpu needs a C\+\+ compiler"):
        check_compiler(torch.device("cpu"))


@pytest.mark.slow
def test_compiled_layers_give_the_default_gradient(process: ProcessInfo, path: str, one: dict[str, Any]) -> None:
    batch = tiny.experience(9)
    engine = build_engine(process, path, compile_blocks=True)
    assert_same(one["fsdp2"], options.gradients(engine, batch, batch), 5e-6)


@pytest.mark.slow
def test_hybrid_sharding_on_four_ranks(
    path: str, one: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("four")
    for result in tiny.spawn_ranks(4, options.hybrid, folder, path):
        assert_same(one["fsdp2"], result["gradients"])
        assert_same(result["norms_equal"], {"norm": torch.tensor(1.0)}, 1e-5)
