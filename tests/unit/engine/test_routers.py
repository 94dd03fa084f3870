"""Routers of mixtures of experts: biases that correct them as state, the load rule, and losses beside the objective."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.contracts.engine_ends import within
from tests.unit.engine import tiny
from tests.unit.engine.test_router_replay import CUT, R2, moved, noted
from tests.unit.engine.tiny import PolicyLoss, assert_same, build_engine, denominators, experience
from tests.unit.models import zoo
from tests.unit.rollout.tiny import build_for
from verl_like.config import ModelConfig, RolloutConfig
from verl_like.config.actor import RouterConfig
from verl_like.config.fsdp import FSDPConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.kit.selfcheck.check import minibatch_gradients
from verl_like.parallel.dist import ProcessInfo
from verl_like.parallel.sharding import saved_buffers

RATE = RouterConfig(bias_update_rate=0.3)
LOSSES = {
    "batch": RouterConfig(balance_loss_coef=0.7, z_loss_coef=0.05),
    "sequence": RouterConfig(balance_loss_coef=0.7, balance_loss_form="sequence"),  # type: ignore[arg-type]
}
TYPES = ("deepseek_v3", "minimax_m2", "qwen3_moe")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: zoo.folder(tmp_path_factory.mktemp("models"), name) for name in TYPES}


def biases(engine: FSDPEngine) -> dict[str, Tensor]:
    return {name.removeprefix("hf."): bias.clone() for name, bias in saved_buffers(engine.model)}


def stepped(process: ProcessInfo, path: str, **settings: Any) -> FSDPEngine:
    engine, batch = build_engine(process, path, **settings), experience(9)
    mine = batch if process.world_size == 1 else batch.select(range(process.rank, 9, 2))
    engine.train_minibatch(mine, PolicyLoss(), denominators(batch), rule=tiny.ONE_BATCH)
    return engine


def of_two_ranks(process: ProcessInfo, paths: dict[str, str], folder: str) -> dict[str, Any]:
    """What a step makes of biases, saved by all ranks; the gradients of losses, over few rows and none."""
    engine = stepped(process, paths["deepseek_v3"], router=RATE)
    engine.save(folder, contents=["model", "hf_model"])
    found: dict[str, Any] = {"biases": biases(engine), "weights": tiny.weights(engine)}
    batch = experience(9)
    for form, router in LOSSES.items():
        engine = build_engine(process, paths["qwen3_moe"], router=router)
        mine = batch.select(range(9) if process.rank == 0 else [])  # the other rank has no rows
        found[form] = minibatch_gradients(engine, mine, PolicyLoss(), denominators(batch), rule=tiny.ONE_BATCH)
    chunks = FSDPConfig(context_parallel_size=process.world_size)
    for name, sharing in {"replayed": {"ulysses": process.world_size}, "chunks": {"fsdp": chunks}}.items():
        engine = build_engine(process, paths["qwen3_moe"], **sharing, **R2)
        rows = noted(engine, batch)  # each rank has a part of its tokens
        found[f"{name}_routes"] = rows.routes_T
        found[name] = minibatch_gradients(moved(engine), rows, PolicyLoss(), denominators(rows), rule=CUT)
    return found


def test_the_load_rule_moves_a_bias_by_its_rate(process: ProcessInfo, paths: dict[str, str]) -> None:
    """Up for experts below the mean, as counted by hooks of our own; without the key nothing moves."""
    for name in ("deepseek_v3", "minimax_m2"):
        engine, batch, counts = build_engine(process, paths[name], router=RATE), experience(9), list[Tensor]()
        experts = [part for part in engine.model.modules() if hasattr(part, "gate_up_proj")]
        for part in experts:
            part.register_forward_pre_hook(partial(note_counts, counts))
        engine.train_minibatch(batch, PolicyLoss(), denominators(batch), rule=tiny.ONE_BATCH)
        expected = [0.3 * (count.double().mean() - count).sign() for count in counts[-len(experts) :]]
        found = biases(engine)
        assert len(found) == 2 and any(float(bias.min()) < 0 < float(bias.max()) for bias in expected)
        for bias, wanted in zip(found.values(), expected, strict=True):
            torch.testing.assert_close(bias, wanted.float(), rtol=0, atol=1e-7)
    assert all(float(bias.abs().max()) == 0 for bias in biases(stepped(process, paths["deepseek_v3"])).values())


@pytest.mark.parametrize("name", ["deepseek_v3", "minimax_m2"])
def test_a_bias_is_sent_proved_and_kept_exactly(
    process: ProcessInfo, paths: dict[str, str], tmp_path: Path, name: str
) -> None:
    """In bfloat16 everywhere else: rounded, a bias would choose other experts. One that is lost is named."""
    engine = stepped(process, paths[name], router=RouterConfig(bias_update_rate=0.1003))
    config = ModelConfig(path=paths[name])
    rollout = build_for("hf", config, process, tokenizer_size=tiny.VOCAB, dtype="bfloat16")
    report = within(engine, rollout, RolloutConfig(), process)(1)
    assert report.num_read_back == report.num_tensors == len(engine.weight_names())
    stored = [key for key in engine.weight_names() if key.endswith("e_score_correction_bias")]
    held = dict(rollout.weight_checksums(engine.weight_names()))
    sent = engine.weight_checksums(torch.bfloat16)
    assert len(stored) == 2 and all(held[key] == sent[key] for key in stored)
    rollout.shutdown()
    engine.save(str(tmp_path), contents=["model", "hf_model"])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface", dtype=torch.float32)
    assert_same({key: theirs.get_buffer(key) for key in biases(engine)}, biases(engine), 0.0)
    assert stored[0] in load_file(tmp_path / "huggingface" / "model.safetensors")
    reference = build_engine(process, str(tmp_path / "huggingface"), optim=None)  # computes in its own precision
    resumed = build_engine(process, paths[name], seed=77)
    resumed.load(str(tmp_path), contents=["model"])
    assert_same(biases(reference), biases(engine), 0.0)
    assert_same(biases(resumed), biases(engine), 0.0)
    assert_same(tiny.weights(resumed), tiny.weights(engine), 0.0)


def test_two_ranks_are_one(process: ProcessInfo, paths: dict[str, str], tmp_path: Path) -> None:
    """Biases and losses, of one rank's gradients too; routes noted and replayed on slices and chunks of rows."""
    two = tiny.spawn_ranks(2, of_two_ranks, tmp_path / "ranks", paths, str(tmp_path / "saved"))
    one = of_two_ranks(process, paths, str(tmp_path / "alone"))
    for result in two:
        assert_same(result["biases"], one["biases"], 0.0)
        for name in ("replayed_routes", "chunks_routes"):
            assert torch.equal(result[name], one[name])
        for form in (*LOSSES, "replayed", "chunks"):
            assert_same(result[form], one[form], 2e-5)
    resumed = build_engine(process, paths["deepseek_v3"], seed=77)
    resumed.load(str(tmp_path / "saved"), contents=["model"])
    assert_same(tiny.weights(resumed), two[0]["weights"], 0.0)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("form", LOSSES)
def test_losses_are_those_of_the_formula_however_rows_are_cut(
    process: ProcessInfo, paths: dict[str, str], tmp_path: Path, name: str, form: str
) -> None:
    """Gradients of a policy loss of zero: of transformers' own logits, each row alone, in a formula written out."""
    router, batch = LOSSES[form], experience(8, rows_per_prompt=2)
    settings = {"enable_gradient_checkpointing": True}
    engine = build_engine(process, paths[name], router=router, model=settings)
    engine.export_hf(str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = written_out(model, batch, router, sigmoid=name == "deepseek_v3")
    for rule in (tiny.ONE_BATCH, tiny.MicroBatchRule(max_tokens=24)):
        found = minibatch_gradients(engine, batch, PolicyLoss(0.0), denominators(batch), rule=rule)
        touched = {key: g for key, g in found.items() if float(g.abs().max()) > 0}
        assert_same(touched, {key: expected[key.removeprefix("hf.")] for key in touched}, 2e-4)
        assert any("gate.weight" in key for key in touched)


def note_counts(counts: list[Tensor], _: Any, given: tuple[Tensor, ...]) -> None:
    counts.append(torch.bincount(given[1].flatten(), minlength=8))


def note_scores(noted: list[tuple[Tensor, Tensor]], _: Any, __: Any, output: tuple[Tensor, ...]) -> None:
    noted.append((output[0], output[2]))


def written_out(model: Any, batch: tiny.Experience, router: RouterConfig, *, sigmoid: bool) -> dict[str, Tensor]:
    model.zero_grad()
    rows: list[list[tuple[Tensor, Tensor]]] = []
    gates = [part for part in model.modules() if type(part).__name__.lower().endswith("topkrouter")]
    for row in batch.split([1] * len(batch)):
        noted: list[tuple[Tensor, Tensor]] = []
        hooks = [part.register_forward_hook(partial(note_scores, noted)) for part in gates]
        ids = torch.cat([row.prompt_ids_T, row.response_ids_T]).long()[None, :-1]
        model.base_model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False)
        rows.append(noted)
        for hook in hooks:
            hook.remove()
    total = torch.zeros(())
    for layers in zip(*rows, strict=True):
        logits = [each for each, _ in layers]
        share = [x.sigmoid() / x.sigmoid().sum(-1, keepdim=True) if sigmoid else x.softmax(-1) for x in logits]
        load = [torch.nn.functional.one_hot(chosen, 8).sum(1).float() for _, chosen in layers]
        if router.balance_loss_form == "batch":
            share, load = [torch.cat(share)], [torch.cat(load)]
        means = torch.stack([8 / 2 * (s.mean(0) * f.mean(0)).sum() for s, f in zip(share, load, strict=True)])
        z = torch.cat(logits).logsumexp(-1).square().mean()
        total = total + router.balance_loss_coef * means.mean() + router.z_loss_coef * z
    total.backward()
    return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


def test_what_a_model_cannot_do_is_refused(process: ProcessInfo, paths: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bias_update_rate=0.3: no router of model type 'qwen3_moe' has a bias"):
        build_engine(process, paths["qwen3_moe"], router=RATE)
    with pytest.raises(ValueError, match=r"actor.router: model type 'qwen2' has no routers: set balance_loss_coef=0"):
        build_engine(process, tiny.model_folder(tmp_path), router=LOSSES["batch"])
