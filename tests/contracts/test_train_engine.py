"""What every training engine must do, run on each backend. A backend that fails here is not offered.

Backends are (name, function(process, folder, kind) -> engine); more join as they are built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.unit.engine import tiny
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.engine.fsdp import FSDPEngine
from verl_like.parallel.dist import ProcessInfo, shutdown_distributed

Build = Callable[..., FSDPEngine]
BACKENDS = {
    "fsdp2": tiny.build_engine,
    "fsdp2_padded": lambda *a, **k: tiny.build_engine(*a, model={"use_remove_padding": False}, **k),
    "fsdp2_checkpointing": lambda *a, **k: tiny.build_engine(*a, model={"enable_gradient_checkpointing": True}, **k),
}
RULE = MicroBatchRule(max_tokens=40)


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    yield tiny.single_process()
    shutdown_distributed()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=list(BACKENDS))
def build(request: pytest.FixtureRequest) -> Build:
    return BACKENDS[request.param]


def test_forward_shapes_and_zeros(build: Build, process: ProcessInfo, path: str) -> None:
    batch = tiny.experience(6)
    outputs = build(process, path).forward(batch, want=frozenset({"log_probs", "entropy"}), rule=RULE)
    assert outputs.keys() == {"log_probs", "entropy"}
    for value in outputs.values():
        assert value.shape == batch.response_ids_T.shape
        assert value.dtype == torch.float32 and value.device.type == "cpu" and not value.requires_grad
        assert not value[~batch.response_mask_T].any()
    assert bool((outputs["log_probs"][batch.response_mask_T] < 0).all())


def test_log_probs_are_those_of_the_plain_model(build: Build, process: ProcessInfo, path: str, tmp_path: Path) -> None:
    """The exported folder, loaded by transformers, row by row: an independent second opinion."""
    engine, batch, temperature = build(process, path, tokenizer_size=None), tiny.experience(4), 0.7
    engine.export_hf(str(tmp_path / "hf"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ours = engine.forward(batch, want=frozenset({"log_probs"}), rule=RULE, temperature=temperature)["log_probs"]
    ours = batch.padded(ours)
    for i, (p, r) in enumerate(zip(batch.prompt_length_B.tolist(), batch.response_length_B.tolist(), strict=True)):
        prompt = batch.prompt_ids_BP[i, batch.prompt_ids_BP.shape[1] - p :]
        ids = torch.cat([prompt, batch.response_ids_BR[i, :r]]).long()
        with torch.no_grad():
            log_p = (plain(ids[None]).logits[0] / temperature).log_softmax(-1)
        expected = log_p[p - 1 : -1].gather(1, ids[p:, None])[:, 0] * batch.response_mask_BR[i, :r]
        torch.testing.assert_close(ours[i, :r], expected, rtol=0, atol=2e-5)


def test_names_are_accounted_for(build: Build, process: ProcessInfo, path: str) -> None:
    for kind in ("policy", "value"):
        engine = build(process, path, kind=kind)
        exported = dict(engine.export_weights(torch.bfloat16))
        assert {name: tensor.shape for name, tensor in exported.items()} == engine.weight_names()
        assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}


def test_update_changes_what_is_exported(build: Build, process: ProcessInfo, path: str) -> None:
    engine, batch = build(process, path), tiny.experience(5)
    before = tiny.weights(engine)  # type: ignore[arg-type]
    metrics = engine.train_minibatch(batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=RULE)
    assert {"grad_norm", "lr", "skipped_steps", "pg_loss"} <= metrics.keys()
    after = tiny.weights(engine)  # type: ignore[arg-type]
    assert [name for name in after if torch.equal(after[name], before[name])] == []


def test_forward_only_does_not_disturb_training(build: Build, process: ProcessInfo, path: str) -> None:
    batch, results = tiny.experience(5), []
    for peek in (False, True):
        engine = build(process, path)
        for _ in range(2):
            if peek:
                engine.forward(batch, want=frozenset({"log_probs"}), rule=RULE)
                engine.offload()
                engine.onload()
            engine.train_minibatch(batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=RULE)
        results.append(tiny.weights(engine))  # type: ignore[arg-type]
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_save_and_load(build: Build, process: ProcessInfo, path: str, tmp_path: Path, kind: str) -> None:
    contents, batch = ["model", "optimizer", "extra", "hf_model"], tiny.experience(5)
    loss: Any = tiny.PolicyLoss() if kind == "policy" else tiny.ValueLoss()
    engine = build(process, path, kind=kind)
    engine.train_minibatch(batch, loss, tiny.denominators(batch), rule=RULE)
    engine.save(str(tmp_path), contents=contents)
    other = build(process, path, kind=kind, seed=77)
    other.load(str(tmp_path), contents=contents)
    for each in (engine, other):
        each.train_minibatch(batch, loss, tiny.denominators(batch), rule=RULE)
    a, b = tiny.weights(engine), tiny.weights(other)  # type: ignore[arg-type]
    assert all(torch.equal(a[name], b[name]) for name in a)
    reader = AutoModelForCausalLM if kind == "policy" else AutoModelForTokenClassification
    assert reader.from_pretrained(tmp_path / "huggingface").config.model_type == "qwen2"
