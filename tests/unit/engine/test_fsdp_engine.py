from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.engine import tiny
from tests.unit.engine.scenarios import gradients
from tests.unit.engine.tiny import PolicyLoss, ValueLoss, build_engine, denominators, experience, weights
from verl_like.batch import Experience, Metric
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.config.fsdp import FSDPConfig
from verl_like.config.model import FusedBackend, FusedKernelConfig
from verl_like.config.optim import OptimConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.parallel.dist import ProcessInfo


def step(engine: FSDPEngine, batch: Experience, **settings: Any) -> dict[str, Any]:
    settings = {"rule": MicroBatchRule(max_tokens=30), "loss_fn": PolicyLoss()} | settings
    return engine.train_minibatch(batch, denominators=denominators(batch), **settings)


@pytest.mark.parametrize("rule", [MicroBatchRule(max_tokens=15), MicroBatchRule(max_sequences=2)])
def test_micro_batch_cut_does_not_matter(
    process: ProcessInfo, path: str, rule: MicroBatchRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, batch = build_engine(process, path), experience(9)
    want = frozenset({"log_probs", "entropy"})
    whole = engine.forward(batch, want=want, rule=tiny.ONE_BATCH)
    for name, value in engine.forward(batch, want=want, rule=rule).items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=5e-6)
        assert not value[~batch.response_mask_T].any()
    monkeypatch.setattr("tests.unit.engine.scenarios.RULE", tiny.ONE_BATCH)
    expected = gradients(engine, batch, batch)
    monkeypatch.setattr("tests.unit.engine.scenarios.RULE", rule)
    for name, gradient in gradients(engine, batch, batch).items():
        scale = float(expected[name].abs().max()) + 1e-12
        assert float((gradient - expected[name]).abs().max()) / scale < 5e-6, name


def test_shared_prompts_change_no_gradient(process: ProcessInfo, path: str) -> None:
    """Groups of four: with what rows begin with once a micro-batch, at least the prompt, and with whole rows."""
    batch, results = experience(12, rows_per_prompt=4), []
    for share in (True, False):
        engine = build_engine(process, path, model={"share_prompts": share})
        results.append(gradients(engine, batch, batch))
        metrics = step(engine, batch, rule=tiny.ONE_BATCH)
        saved = sum(int(n) for n in batch.prompt_length_B) - int(batch.prompt_length_B[::4].sum())
        if share:
            total, share_of = int(batch.num_tokens_B().sum()), metrics["perf/shared_token_share"].value
            assert saved <= share_of * total < saved + len(batch)
        else:
            assert "perf/shared_token_share" not in metrics
    for name, gradient in results[0].items():
        scale = float(results[1][name].abs().max()) + 1e-12
        assert float((gradient - results[1][name]).abs().max()) / scale < 5e-6, name


def test_reference_path_gives_the_same_update(process: ProcessInfo, path: str) -> None:
    """Padded rows with full logits, against packed rows with the fused function."""
    batch, results = experience(9), []
    for packed in (True, False):
        engine = build_engine(process, path, model={"use_remove_padding": packed, "use_fused_kernels": packed})
        results.append((step(engine, batch)["grad_norm"].value, weights(engine)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    for name, value in results[0][1].items():
        torch.testing.assert_close(value, results[1][1][name], rtol=0, atol=1e-5)


def test_bfloat16_compute_keeps_float32_weights(process: ProcessInfo, path: str) -> None:
    batch, want = experience(9), frozenset({"log_probs"})
    half = build_engine(process, path, fsdp=FSDPConfig(dtype="bfloat16"))
    exact = build_engine(process, path).forward(batch, want=want, rule=tiny.ONE_BATCH)["log_probs"]
    gap = (half.forward(batch, want=want, rule=tiny.ONE_BATCH)["log_probs"] - exact).abs()
    assert 0 < gap.mean() < 0.05
    step(half, batch)
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}
    reference = build_engine(process, path, fsdp=FSDPConfig(dtype="bfloat16"), optim=None)
    assert {p.dtype for p in reference.model.parameters()} == {torch.bfloat16}


def test_training_lowers_the_loss_and_metrics_are_joined(process: ProcessInfo, path: str) -> None:
    engine, batch = build_engine(process, path), experience(9)
    values = [step(engine, batch, rule=MicroBatchRule(max_sequences=4)) for _ in range(6)]
    losses = [metrics["pg_loss"].value for metrics in values]
    assert losses[-1] < losses[0]
    whole = build_engine(process, path)
    assert step(whole, batch, rule=tiny.ONE_BATCH)["pg_loss"].value == pytest.approx(losses[0], rel=1e-5)


def test_value_engine_learns(process: ProcessInfo, path: str) -> None:
    engine, batch = build_engine(process, path, kind="value"), experience(9)
    losses = [step(engine, batch, loss_fn=ValueLoss())["vf_loss"].value for _ in range(8)]
    assert losses[-1] < losses[0]
    values = engine.forward(batch, want=frozenset({"values"}), rule=tiny.ONE_BATCH)["values"]
    assert values.shape == batch.response_ids_T.shape and bool((values != 0).all())


def test_clip_and_reported_norm(process: ProcessInfo, path: str) -> None:
    """With SGD-like AdamW settings the step shrinks with the clip, and the norm reported is the one before it."""
    batch = experience(6)
    optim = OptimConfig(lr=1.0, betas=[0.0, 0.0], eps=1e6, weight_decay=0.0)  # step = gradient / 1e6
    moved = []
    for clip in (1e9, 1e-3):
        engine = build_engine(process, path, grad_clip=clip, optim=optim)
        exact = gradients(engine, batch, batch)
        norm = torch.stack([g.norm() for g in exact.values()]).norm().item()
        state = {name: p.detach().full_tensor().double().clone() for name, p in engine.model.named_parameters()}
        assert step(engine, batch)["grad_norm"].value == pytest.approx(norm, rel=1e-5)
        after = {name: p.detach().full_tensor().double() for name, p in engine.model.named_parameters()}
        moved.append(torch.stack([(after[n] - state[n]).norm() for n in state]).norm().item())
    assert moved[0] / moved[1] > 100


def test_non_finite_step_is_skipped(process: ProcessInfo, path: str, caplog: pytest.LogCaptureFixture) -> None:
    engine, batch = build_engine(process, path), experience(4)
    before = weights(engine)
    with caplog.at_level(logging.WARNING):
        metrics = step(engine, batch, loss_fn=PolicyLoss(float("inf")))
    assert metrics["skipped_steps"].value == 1 and "step skipped" in caplog.text
    assert all(torch.equal(value, before[name]) for name, value in weights(engine).items())


def test_no_rows_at_all(process: ProcessInfo, path: str) -> None:
    """An empty mini-batch on every rank: nothing to forward, nothing to learn, no crash."""
    engine, nothing = build_engine(process, path), experience(3).select([])
    outputs = engine.forward(nothing, want=frozenset({"log_probs"}), rule=tiny.ONE_BATCH)
    assert outputs["log_probs"].shape[0] == 0
    assert step(engine, nothing)["grad_norm"].value == 0.0


def test_rows_without_any_selected_token(process: ProcessInfo, path: str) -> None:
    batch = experience(3)
    masked = batch.replace(response_mask_BR=torch.zeros_like(batch.response_mask_BR))
    counts = denominators(batch)
    metrics = build_engine(process, path).train_minibatch(masked, PolicyLoss(), counts, rule=tiny.ONE_BATCH)
    assert metrics["grad_norm"].value == 0.0 and metrics["skipped_steps"].value == 0


def run_steps(engine: FSDPEngine, seeds: range) -> dict[str, Tensor]:
    for seed in seeds:
        step(engine, experience(5, seed=seed))
        engine.advance_schedule()
    return weights(engine)


def test_resume_equals_uninterrupted_bit_for_bit(process: ProcessInfo, path: str, tmp_path: Path) -> None:
    optim = OptimConfig(lr=1e-2, lr_warmup_steps=2, warmup_style="cosine")
    settings = {"optim": optim, "num_schedule_steps": 6, "model": {"override_config": {"attention_dropout": 0.2}}}
    contents = ["model", "optimizer", "extra"]
    engine = build_engine(process, path, **settings)
    run_steps(engine, range(3))
    engine.save(str(tmp_path), contents=contents)
    expected, expected_rate = run_steps(engine, range(3, 6)), engine.schedule and engine.schedule.rate()
    resumed = build_engine(process, path, **settings)
    resumed.load(str(tmp_path), contents=contents)
    torch.manual_seed(1234)  # dropout does not depend on what else draws from the global generator
    state = torch.get_rng_state()
    actual = run_steps(resumed, range(3, 6))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    other = build_engine(process, path, **(settings | {"seed": 50}))
    other.load(str(tmp_path), contents=contents)
    different = run_steps(other, range(3, 6))
    assert not any(torch.equal(different[name], expected[name]) for name in expected)
    assert resumed.schedule is not None and resumed.schedule.rate() == expected_rate


def test_checkpoint_of_an_engine_that_never_stepped(process: ProcessInfo, path: str, tmp_path: Path) -> None:
    contents = ["model", "optimizer", "extra"]
    engine = build_engine(process, path)
    engine.save(str(tmp_path), contents=contents)
    resumed = build_engine(process, path, seed=8)
    resumed.load(str(tmp_path), contents=contents)
    actual, expected = run_steps(resumed, range(2)), run_steps(engine, range(2))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_missing_part_of_a_checkpoint_is_named(process: ProcessInfo, path: str, tmp_path: Path) -> None:
    engine = build_engine(process, path)
    engine.save(str(tmp_path), contents=["model"])
    with pytest.raises(ValueError, match="load_contents"):
        engine.load(str(tmp_path), contents=["model", "optimizer"])


def test_refusals(process: ProcessInfo, path: str) -> None:
    engine = build_engine(process, path, optim=None)
    batch = experience(3)
    with pytest.raises(ValueError, match="forward only"):
        step(engine, batch)
    with pytest.raises(ValueError, match="a policy engine gives"):
        engine.forward(batch, want=frozenset({"values"}), rule=tiny.ONE_BATCH)
    with pytest.raises(ValueError, match="token id 60, but the tokenizer knows only 50"):
        bad = batch.replace(response_ids_BR=torch.full_like(batch.response_ids_BR, 60))
        build_engine(process, path, tokenizer_size=50).forward(bad, want=frozenset({"log_probs"}), rule=tiny.ONE_BATCH)
    with pytest.raises(ValueError, match="impl_backend=triton needs a CUDA device"):
        options = FusedKernelConfig(impl_backend=FusedBackend.triton)
        build_engine(process, path, model={"fused_kernel_options": options})
    with pytest.raises(ValueError, match="ulysses_sequence_parallel_size=2 does not divide the 1 ranks"):
        build_engine(process, path, ulysses=2)


@pytest.mark.parametrize("fault", ["segments run together", "a shared prompt is not seen"])
def test_leaking_model_is_refused_packing(
    process: ProcessInfo, path: str, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Planted faults: attention that ignores where segments end, or what rows share."""
    from verl_like.models import attention
    from verl_like.models.packing import Segments

    real = attention.packed_attention

    def leaking(*args: Any, segments: Segments, **kwargs: Any) -> Any:
        own = segments.own_lengths
        lengths = [sum(own)] if fault == "segments run together" else own
        return real(*args, segments=Segments(lengths, torch.device("cpu")), **kwargs)

    monkeypatch.setattr(attention, "packed_attention", leaking)
    with pytest.raises(ValueError, match=r"'qwen2'.*use_remove_padding=False"):
        build_engine(process, path)
    monkeypatch.undo()
    build_engine(process, path)


class CountsRows:
    """Policy gradient without any other term; it counts the rows it sees."""

    wants = frozenset({"log_probs"})

    def __call__(self, outputs: dict[str, Tensor], experience: Experience, denominators: Any) -> Any:
        terms_BR = -experience.advantages_BR * outputs["log_probs"] * experience.response_mask_BR
        rows = Metric(value=float(len(experience)), reduction="sum")
        return terms_BR.sum() / denominators.num_tokens, {"rows": rows}


@pytest.mark.parametrize("apart", [[1, 4, 5], [], list(range(9))], ids=["some", "none", "all"])
def test_rows_without_gradient_are_seen_but_not_learnt_from(process: ProcessInfo, path: str, apart: list[int]) -> None:
    """The same weights as with a backward pass through them, and metrics of every row."""
    batch = experience(9)
    scale = torch.ones(9)
    scale[apart] = 0.0
    batch = batch.replace(advantages_BR=batch.advantages_BR * scale[:, None])
    mask_B = scale == 0
    results = []
    for without in (None, mask_B):
        engine = build_engine(process, path)
        metrics = step(engine, batch, loss_fn=CountsRows(), without_gradient_B=without)
        results.append((weights(engine), metrics))
    (whole, expected), (spared, got) = results
    for name, value in whole.items():
        torch.testing.assert_close(spared[name], value, rtol=0, atol=1e-6)
    assert got["rows"].value == expected["rows"].value == 9
    assert got["grad_norm"].value == pytest.approx(expected["grad_norm"].value, rel=1e-4, abs=1e-9)
    share = int(batch.num_tokens_B()[mask_B].sum()) / int(batch.num_tokens_B().sum())
    assert got["perf/forward_only_share"].value == pytest.approx(share) and "perf/forward_only_share" not in expected
