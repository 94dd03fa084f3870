"""Memory that runs out in a micro-batch, really asked of the allocator: the same weights, smaller parts after."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.engine import broken_passes, tiny
from tests.unit.models import zoo
from verl_like.batch import Denominators, Experience, Metric, pad_rows
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.config.fsdp import FSDPConfig, WrapPolicyConfig
from verl_like.config.micro_batches import Lowered, PassTooLarge
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.rescue import Rescue
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed
from verl_like.parallel.host_memory import is_out_of_memory

LIMIT = 60  # tokens of a micro-batch that still fit
RULE = MicroBatchRule(max_tokens=200)
AXES = ("expert", "context", "tensor", "pipeline")


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    yield init_distributed(0, 1, 0, 1, "127.0.0.1", tiny.free_port(), "cpu", 60.0)
    shutdown_distributed()


def ask_for_too_much(tokens: int) -> None:
    """The real error of this machine's allocator."""
    if tokens > LIMIT:
        torch.empty(2**47)


class HungryLoss(tiny.PolicyLoss):
    """The loss itself takes the memory."""

    def __call__(
        self, outputs: dict[str, Tensor], experience: Experience, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]:
        ask_for_too_much(int(experience.num_tokens_B().sum()))
        return super().__call__(outputs, experience, denominators)


def plant(engine: FSDPEngine, where: str) -> tiny.PolicyLoss:
    """Where memory runs out: in the first or the last layer, in a layer's backward pass, in the loss."""
    layers = engine.model.hf.base_model.layers
    mlp = layers[0 if where == "first" else -1].mlp
    if where == "loss":
        return HungryLoss()
    if where == "backward":
        mlp.register_full_backward_hook(lambda _, grads, __: ask_for_too_much(grads[0].shape[1]))
    else:
        mlp.register_forward_pre_hook(lambda _, args: ask_for_too_much(args[0].shape[1]))
    return tiny.PolicyLoss()


def step(
    engine: FSDPEngine, loss: tiny.PolicyLoss, rows: list[int], rule: MicroBatchRule = RULE
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Two updates and a forward pass between them; weights and metrics."""
    batch = tiny.experience(24, seed=1)
    for _ in range(2):
        metrics = engine.train_minibatch(batch.select(rows), loss, tiny.denominators(batch), rule=rule)
    found = engine.forward(batch.select(rows), want=frozenset({"log_probs"}), rule=rule)
    return tiny.weights(engine) | found, {name: metric.value for name, metric in metrics.items()}


def both(process: ProcessInfo, path: str, where: str, rows: list[int], planted: bool, **keys: Any) -> Any:
    """(without, with the fault)."""
    plain = step(tiny.build_engine(process, path, **keys), tiny.PolicyLoss(), rows)
    engine = tiny.build_engine(process, path, **keys)
    loss = plant(engine, where) if planted else tiny.PolicyLoss()
    return plain, step(engine, loss, rows)


def check(plain: Any, rescued: Any) -> None:
    tiny.assert_same(plain[0], rescued[0], 1e-4)
    assert rescued[1]["grad_norm"] == pytest.approx(plain[1]["grad_norm"], rel=1e-5)
    assert rescued[1]["pg_loss"] == pytest.approx(plain[1]["pg_loss"], rel=1e-5)
    assert "perf/out_of_memory" not in plain[1] and rescued[1]["perf/out_of_memory"] >= 1
    assert rescued[1]["perf/lowered_micro_batch"] <= LIMIT
    assert rescued[1]["perf/micro_batches"] > plain[1]["perf/micro_batches"]


@pytest.mark.parametrize("where", ["first", "backward", "loss"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_rank(process: ProcessInfo, tmp_path: Path, where: str, checkpointing: bool) -> None:
    path = tiny.model_folder(tmp_path)
    keys = {"model": {"enable_gradient_checkpointing": checkpointing}}
    check(*both(process, path, where, list(range(24)), True, **keys))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_gradients_of_what_went_before_count_once(process: ProcessInfo, tmp_path: Path, where: str) -> None:
    """Memory runs out in the third micro-batch: the gradients of two are there, and all is repeated."""
    path, rule, calls = tiny.model_folder(tmp_path), MicroBatchRule(max_tokens=LIMIT), 0

    def fail_once(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            ask_for_too_much(LIMIT + 1)

    plain = step(tiny.build_engine(process, path), tiny.PolicyLoss(), list(range(24)), rule)
    engine = tiny.build_engine(process, path)
    mlp = engine.model.hf.base_model.layers[0].mlp
    if where == "forward":
        mlp.register_forward_pre_hook(fail_once)
    else:
        mlp.register_full_backward_hook(fail_once)
    check(plain, step(engine, tiny.PolicyLoss(), list(range(24)), rule))


def turns_of_an_agent() -> Experience:
    """Ten rows of 15, 20 ... 60 tokens, each of which goes on from the one before: 60 tokens in all, 375 in rows."""
    story = torch.randint(1, 61, (60,), generator=torch.Generator().manual_seed(0), dtype=torch.int32).tolist()
    ends = range(15, 61, 5)
    response_ids_BR = torch.tensor([story[end - 5 : end] for end in ends], dtype=torch.int32)
    return Experience(
        prompt_ids_BP=pad_rows([story[: end - 5] for end in ends], side="left", dtype=torch.int32),
        prompt_length_B=torch.tensor([end - 5 for end in ends]),
        response_ids_BR=response_ids_BR,
        response_length_B=torch.full((10,), 5),
        response_mask_BR=torch.ones_like(response_ids_BR, dtype=torch.bool),
        group_B=torch.zeros(10, dtype=torch.int64),
        advantages_BR=torch.linspace(-1, 1, 50).view(10, 5),
    )


def test_rows_that_share_tokens_are_taken_apart(process: ProcessInfo, tmp_path: Path) -> None:
    """A budget of the longest row's tokens holds all turns of an agent: what is left to lower is what they share."""
    path, batch, found = tiny.model_folder(tmp_path), turns_of_an_agent(), []
    for loss in (tiny.PolicyLoss(), HungryLoss()):
        engine = tiny.build_engine(process, path)
        metrics = engine.train_minibatch(batch, loss, tiny.denominators(batch), rule=RULE)
        found.append((tiny.weights(engine), metrics))
    tiny.assert_same(found[0][0], found[1][0], 1e-4)
    assert found[0][1]["perf/micro_batches"].value == 1
    assert found[1][1]["perf/micro_batches"].value >= 375 / LIMIT
    assert found[1][1]["grad_norm"].value == pytest.approx(found[0][1]["grad_norm"].value, rel=1e-5)


def test_a_single_row_that_does_not_fit_is_told(process: ProcessInfo, tmp_path: Path) -> None:
    engine = tiny.build_engine(process, tiny.model_folder(tmp_path))
    batch = tiny.experience(2, seed=1, max_response=200)
    with pytest.raises(torch.OutOfMemoryError, match=r"one row in a micro-batch.*data.max_response_length"):
        engine.train_minibatch(batch, plant(engine, "first"), tiny.denominators(batch), rule=RULE)


def test_other_errors_go_on(process: ProcessInfo, tmp_path: Path) -> None:
    engine = tiny.build_engine(process, tiny.model_folder(tmp_path))
    engine.model.hf.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    batch = tiny.experience(4)
    with pytest.raises(ZeroDivisionError):
        engine.train_minibatch(batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=RULE)


def test_what_counts_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as found:
        torch.empty(2**47)
    assert is_out_of_memory(found.value) and is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes")) and not is_out_of_memory(ValueError("not enough memory"))


KEYS = {
    "update": (r"smaller actor_rollout_ref\.actor\.ppo_max_token_len_per_gpu \(or ppo_micro_batch_size_per_gpu",),
    "forward pass": (
        r"smaller log_prob_max_token_len_per_gpu of actor_rollout_ref\.rollout and \.ref",
        r"the critic and the reward model have forward_max_token_len_per_gpu",
    ),
}


def told_of(kind: str, rule: MicroBatchRule, sizes: Lowered, batch: Experience, shares: bool) -> PassTooLarge:
    """What a rank that others wait for tells when memory runs out in the model."""
    rescue = Rescue(None, sizes, alone=False, shares=shares)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PassTooLarge) as caught:
        rescue.repeated(kind, rule, batch, lambda rule: ask_for_too_much(LIMIT + 1))
    return caught.value


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("shares", [False, True])
def test_a_new_start_halves_until_rows_are_single(kind: str, shares: bool) -> None:
    """Each start goes on with what the one before has told, other kinds of pass with what they had."""
    batch, sizes = tiny.experience(6, seed=1, max_response=20), Lowered(role="critic", most={"other": 7}, count=1)
    longest, seen = int(batch.num_tokens_B().max()), list[str]()
    with pytest.raises(torch.OutOfMemoryError, match=f"one row in a micro-batch.*longest has {longest} tokens"):
        while True:
            told = told_of(kind, RULE, sizes, batch, shares)
            sizes = told.lowered
            assert all(re.search(key, str(told)) for key in KEYS[kind]) and "trainer.max_restarts" in str(told)
            seen += re.findall(r"newest checkpoint, with ([^;]*)", str(told))
            assert "can't allocate memory" in str(told)
    halves = [size for size in (100, 50, 25, 12, 6) if size > longest] + [longest]
    assert seen == [f"{size} tokens" for size in halves] + [f"{longest} tokens of whole rows"] * shares
    assert sizes == Lowered(
        role="critic",
        most={"other": 7, kind: longest},
        apart=frozenset({kind} if shares else ()),
        count=1 + len(seen),
    )
    by_count = told_of(kind, MicroBatchRule(max_sequences=5), Lowered(role="critic"), batch, shares)
    assert by_count.lowered.most == {f"{kind} by sequences": 2} and "with 2 sequences" in str(by_count)
    by_tokens = told_of(kind, RULE, by_count.lowered, batch, shares)  # of another role with the same engine
    assert by_tokens.lowered.most == {f"{kind} by sequences": 2, kind: 100}
    assert str(pickle.loads(pickle.dumps(by_tokens))) == str(by_tokens)


def test_an_engine_begins_with_what_an_earlier_start_had_to_lower(process: ProcessInfo, tmp_path: Path) -> None:
    """As if the keys of the update had been so small; the sizes go on to be told."""
    path, rows = tiny.model_folder(tmp_path), list(range(24))
    small = step(tiny.build_engine(process, path), tiny.PolicyLoss(), rows, MicroBatchRule(max_tokens=30))
    lowered = Lowered(role="actor", most={"update": 30}, count=3)
    later = step(tiny.build_engine(process, path, lowered=lowered), tiny.PolicyLoss(), rows)
    tiny.assert_same(small[0], later[0], 1e-6)
    assert later[1]["perf/micro_batches"] == small[1]["perf/micro_batches"]
    assert (later[1]["perf/out_of_memory"], later[1]["perf/lowered_micro_batch"]) == (3, 30)


def on_two_ranks(process: ProcessInfo, path: str) -> tuple[Any, list[Any], dict[str, Any]]:
    """(without a fault, with one in rank 1's forward pass or loss, with those of `broken_passes.CASES`)."""
    rows, found = list(range(24))[process.rank :: 2], []
    plain = step(tiny.build_engine(process, path), tiny.PolicyLoss(), rows)
    for where in ("first", "last", "loss"):
        engine = tiny.build_engine(process, path)
        loss = plant(engine, where) if process.rank == 1 else tiny.PolicyLoss()
        found.append(step(engine, loss, rows))
    return plain, found, broken_passes.run_cases(process, path, broken_passes.CASES)


def test_one_of_two_ranks(tmp_path: Path) -> None:
    """Rank 1 runs out of memory in its first layer, its last, its loss; one rank or both in a backward pass: both
    repeat, and hold the same weights, or gradients."""
    path = tiny.model_folder(tmp_path, num_hidden_layers=broken_passes.NUM_LAYERS)
    ranks = tiny.spawn_ranks(2, on_two_ranks, tmp_path, path)
    for plain, forward, _ in ranks:
        for rescued in forward:
            check(plain, rescued)
    broken_passes.check(broken_passes.CASES, [backward for _, _, backward in ranks])


@pytest.mark.slow
def test_all_breaks(tmp_path: Path) -> None:
    """Backward passes at each place, with each kind of sharding and recomputation."""
    path, cases = tiny.model_folder(tmp_path, num_hidden_layers=broken_passes.NUM_LAYERS), broken_passes.all_cases()
    broken_passes.check(cases, tiny.spawn_ranks(2, broken_passes.run_cases, tmp_path, path, cases))


UNITS = {"wrap_policy": WrapPolicyConfig(transformer_layer_cls_to_wrap=["Qwen2MLP"])}
NOT_RESCUED: dict[str, tuple[str, dict[str, Any]]] = {  # what is no rescue's: where memory runs out, fsdp_config
    "parts of layers": ("backward", UNITS),
    **{f"{axis}, {where}": (where, {f"{axis}_parallel_size": 2}) for axis in AXES for where in ("last", "backward")},
}


def not_rescued(process: ProcessInfo, paths: dict[str, str], name: str) -> str:
    """What the error of rank 1 says, and that of rank 0, which it leaves waiting."""
    where, keys = NOT_RESCUED[name]
    path, shared = paths["experts" if "expert" in name else "plain"], name.startswith(("context", "tensor", "pipeline"))
    engine = tiny.build_engine(process, path, fsdp=FSDPConfig(**keys))
    loss = plant(engine, where) if process.rank == 1 else tiny.PolicyLoss()
    try:
        step(engine, loss, list(range(24)) if shared else list(range(24))[process.rank :: 2])
    except PassTooLarge as error:
        return f"{error} {error.lowered}"
    except RuntimeError as error:  # of rank 0: rank 1 has gone
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_RESCUED)
def test_what_is_not_rescued_ends_both_ranks(tmp_path: Path, name: str) -> None:
    """The error names the key to lower, and holds the size that a new start goes on with."""
    plain = tiny.model_folder(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    paths = {"plain": plain, "experts": zoo.folder(tmp_path / "experts", "qwen3_moe")}
    told = tiny.spawn_ranks(2, not_rescued, tmp_path, paths, name)
    assert re.search(r"The other ranks wait .* with 100 tokens; .* smaller \S*ppo_max_token_len_per_gpu", told[1])
    assert "most={'update': 100}" in told[1] and "count=1" in told[1] and told[0]


def loss_on_an_axis(process: ProcessInfo, paths: dict[str, str], axis: str) -> tuple[Any, Any]:
    """(without, with a fault in the loss of rank 1)."""
    path, keys = paths["experts" if axis == "expert" else "plain"], {f"{axis}_parallel_size": 2}
    rows = list(range(24))[process.rank :: 2] if axis == "expert" else list(range(24))
    plain = step(tiny.build_engine(process, path, fsdp=FSDPConfig(**keys)), tiny.PolicyLoss(), rows)
    loss = HungryLoss() if process.rank == 1 else tiny.PolicyLoss()
    return plain, step(tiny.build_engine(process, path, fsdp=FSDPConfig(**keys)), loss, rows)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["expert", "context", "tensor"])
def test_memory_that_a_loss_lacks_is_rescued_on_an_axis(tmp_path: Path, axis: str) -> None:
    """Behind the model, where none of the axis's collectives waits."""
    plain = tiny.model_folder(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    paths = {"plain": plain, "experts": zoo.folder(tmp_path / "experts", "qwen3_moe")}
    found = tiny.spawn_ranks(2, loss_on_an_axis, tmp_path, paths, axis)
    for before, after in found:
        tiny.assert_same(before[0], after[0], 1e-4)
        assert after[1]["grad_norm"] == pytest.approx(before[1]["grad_norm"], rel=1e-5)
        assert "perf/out_of_memory" not in before[1] and after[1]["perf/out_of_memory"] >= 1
