"""The training engine with process.device = cuda:0: its CUDA branches run, with the numbers of the CPU path."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.twin import as_cpu, stand_in
from tests.unit.engine import tiny
from tests.unit.engine.scenarios import gradients
from verl_like.batch import Metric
from verl_like.config.fsdp import FSDPConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.models import attention_groups
from verl_like.observe.memory import PhaseMemory, allocated_bytes
from verl_like.parallel import activation_offload
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed

RULE = tiny.MicroBatchRule(max_tokens=256)
WANT = frozenset({"log_probs", "entropy"})
PLAIN = {"use_remove_padding": False, "use_fused_kernels": False}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # FSDPConfig's keys, ModelConfig's
    "plain": ({}, PLAIN),
    "packed": ({}, {}),
    "offloaded": ({"param_offload": True, "optimizer_offload": True}, PLAIN),
    "activations": ({}, {**PLAIN, "enable_activation_offload": True, "enable_gradient_checkpointing": True}),
    "packed activations": ({}, {"enable_activation_offload": True}),
    "offload policy": ({"offload_policy": True}, PLAIN),
    "lora": ({}, {**PLAIN, "lora_rank": 4}),
}


@pytest.fixture(scope="module")
def cuda() -> Iterator[ProcessInfo]:
    yield init_distributed(0, 1, 0, 1, "127.0.0.1", 0, "cuda", 60.0)
    shutdown_distributed()


@pytest.fixture(scope="module")
def cpu(cuda: ProcessInfo) -> ProcessInfo:
    """The same process, whose engines stay on the CPU."""
    return replace(cuda, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def every_wait_is_there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 1024)
    as_cpu.faults()
    yield
    assert as_cpu.faults() == []


def engine_of(process: ProcessInfo, path: str, case: str) -> FSDPEngine:
    fsdp, model = CASES[case]
    return tiny.build_engine(process, path, fsdp=FSDPConfig(dtype="float32", **fsdp), model=model)


def trained(engine: FSDPEngine) -> tuple[dict[str, Metric], dict[str, Tensor], dict[str, Tensor]]:
    """Two optimizer steps, then (metrics of the last, answers of a forward pass, weights), all on the CPU."""
    batch = tiny.experience(16, max_response=60)
    for _ in range(2):
        metrics = engine.train_minibatch(batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=RULE)
    answers = engine.forward(batch, want=WANT, rule=RULE)
    return metrics, answers, {name: tensor.cpu() for name, tensor in engine.export_weights(torch.float32)}


def untrained(engine: FSDPEngine) -> tuple[dict[str, Metric], dict[str, Tensor], dict[str, Tensor]]:
    """Metrics of the first step, answers of a forward pass before it, and the gradient, all on the CPU."""
    batch = tiny.experience(16, max_response=60)
    answers, gradient = engine.forward(batch, want=WANT, rule=RULE), gradients(engine, batch, batch)
    metrics = engine.train_minibatch(batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=RULE)
    return metrics, answers, {name: tensor.cpu() for name, tensor in gradient.items()}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_the_cpu(
    cpu: ProcessInfo, cuda: ProcessInfo, path: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last digit after training where both run the same operators; else the first step, to rounding."""
    monkeypatch.setattr(attention_groups, "_by_products", lambda key, first: False)  # the CPU's own way of attention
    ours, same = engine_of(cuda, path, case), not CASES[case][1].get("use_remove_padding", True)
    measure, tolerance = (trained, 0.0) if same else (untrained, 2e-6)
    metrics, answers, tensors = measure(ours)
    expected_metrics, expected_answers, expected = measure(engine_of(cpu, path, case))
    for name in ("pg_loss", "grad_norm"):
        assert metrics[name].value == pytest.approx(expected_metrics[name].value, rel=tolerance, abs=0), name
    tiny.assert_same(answers, expected_answers, tolerance)
    tiny.assert_same(tensors, expected, 5 * tolerance)  # keys' biases, whose gradients nearly cancel: 7e-6
    if ours._activations is not None:
        assert ours._activations.num_bytes > 0


def held_by_others(cuda: ProcessInfo) -> int:
    """Bytes of engines that other tests have left."""
    gc.collect()
    return allocated_bytes(cuda.device)


def test_offload_leaves_nothing_on_the_device(cuda: ProcessInfo, path: str) -> None:
    others, engine = held_by_others(cuda), engine_of(cuda, path, "plain")
    trained(engine)
    resident = held_by_others(cuda) - others
    engine.offload()
    assert held_by_others(cuda) - others < 1000 < resident  # the optimizer's counters of steps stay where they are
    engine.onload()
    assert held_by_others(cuda) - others == resident


def test_phases_have_the_cards_memory(cuda: ProcessInfo, path: str) -> None:
    engine, memory = engine_of(cuda, path, "plain"), PhaseMemory(cuda.device)
    held = allocated_bytes(cuda.device)
    with memory.phase("update"):
        trained(engine)
    with memory.phase("idle", without=held):
        pass
    peaks = memory.take()
    assert peaks["perf/memory_peak/update"] * 2**30 > held > 0


@pytest.mark.parametrize("case", ["plain", "packed activations"])
@pytest.mark.parametrize("backward", [False, True])
def test_out_of_memory_is_rescued(cuda: ProcessInfo, path: str, case: str, backward: bool) -> None:
    """One allocation of the pass is refused: the step comes out as one of smaller micro-batches."""
    batch, card, left = tiny.experience(16, max_response=60), stand_in.card(), [0]

    def refuses(where: str, size: int) -> bool:
        counts = size > 1000 and (torch._C._current_graph_task_id() >= 0) == backward
        left[0] -= counts
        return counts and left[0] == 0

    results, usual = [], card.refuses
    for refused in (False, True):
        engine, left[0] = engine_of(cuda, path, case), 20
        before = card.calls["empty_cache"]
        card.refuses = refuses if refused else usual
        try:
            metrics = engine.train_minibatch(
                batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=tiny.MicroBatchRule(max_tokens=512)
            )
        finally:
            card.refuses = usual
        weights = {name: tensor.cpu() for name, tensor in engine.export_weights(torch.float32)}
        results.append((metrics, weights, card.calls["empty_cache"] - before))
    (plain, expected, _), (rescued, weights, emptied) = results
    assert rescued["perf/micro_batches"].value > plain["perf/micro_batches"].value and emptied > 0
    assert rescued["grad_norm"].value == pytest.approx(plain["grad_norm"].value, rel=1e-5)
    tiny.assert_same(weights, expected, 1e-3)


def test_a_checkpoint_of_the_device_is_read_by_a_cpu(
    cuda: ProcessInfo, cpu: ProcessInfo, path: str, tmp_path: Path
) -> None:
    contents, batch = ["model", "optimizer", "extra"], tiny.experience(9)
    saved = engine_of(cuda, path, "plain")
    trained(saved)
    saved.save(str(tmp_path / "there"), contents=contents)
    results = []
    for process in (cuda, cpu):
        engine = engine_of(process, path, "plain")
        engine.load(str(tmp_path / "there"), contents=contents)
        engine.train_minibatch(batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=RULE)
        results.append({name: tensor.cpu() for name, tensor in engine.export_weights(torch.float32)})
    tiny.assert_same(results[0], results[1], 0.0)


def no_wait(*_: Any) -> None:
    """In place of a wait."""


PLANTED: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "the copy does not wait for the computation": (stand_in.Lane, "wait_stream", no_wait, "is read"),
    "the copy back does not wait for the copy": (stand_in.Event, "synchronize", no_wait, "is read"),
    "memory under copy is given to others": (Tensor, "record_stream", no_wait, "is given to others"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_of_the_offload_is_told(
    cuda: ProcessInfo, path: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, instead, told = PLANTED[fault]
    engine = engine_of(cuda, path, "packed activations")
    monkeypatch.setattr(owner, name, instead)
    trained(engine)
    found = as_cpu.faults()
    monkeypatch.undo()
    as_cpu.forget()
    assert any(told in line for line in found), found[:5]


def test_an_offload_that_keeps_a_reference_is_told(cuda: ProcessInfo, path: str) -> None:
    others, engine = held_by_others(cuda), engine_of(cuda, path, "plain")
    trained(engine)
    kept = [parameter.detach() for parameter in engine.model.parameters()]
    engine.offload()
    assert held_by_others(cuda) - others >= sum(tensor.nbytes for tensor in kept) > 200_000
    kept.clear()
    assert held_by_others(cuda) - others < 1000
