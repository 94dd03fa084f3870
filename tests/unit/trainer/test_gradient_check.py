"""The self-check passes on a sound trainer, and finds each of the faults that trainers of this kind have had."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.unit.engine import tiny
from tests.unit.models import zoo
from verl_like.algorithms.masked import masked_mean, masked_var
from verl_like.algorithms.minibatch import denominators_of
from verl_like.algorithms.objectives import PolicyObjective
from verl_like.batch import Denominators, Experience
from verl_like.cli.main import main
from verl_like.config import PPOConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.models import families, packing
from verl_like.models.loading import load_tokenizer
from verl_like.parallel.dist import ProcessInfo, shutdown_distributed
from verl_like.trainer.compose import compose
from verl_like.trainer.gradient_check import SelfCheck, table

SETTINGS = ["data.train_files=x.parquet", "actor_rollout_ref.actor.use_kl_loss=True", "algorithm.adv_estimator=grpo"]


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    yield tiny.single_process()
    shutdown_distributed()


@pytest.fixture
def config(tiny_model: Path) -> PPOConfig:
    return compose([*SETTINGS, "actor_rollout_ref.rollout.n=2", f"actor_rollout_ref.model.path={tiny_model}"])


class MeanOfMeans(PolicyObjective):
    """Divides by what the micro-batch holds."""

    def __call__(self, outputs: dict[str, Tensor], experience: Experience, denominators: Denominators) -> Any:
        return super().__call__(outputs, experience, denominators_of(experience, denominators.max_response_length))


class WhitenedInside(PolicyObjective):
    """Normalises advantages over the micro-batch."""

    def __call__(self, outputs: dict[str, Tensor], experience: Experience, denominators: Denominators) -> Any:
        advantages, mask = experience.advantages_BR, experience.response_mask_BR
        white = (advantages - masked_mean(advantages, mask)) / (masked_var(advantages, mask).sqrt() + 1e-6)
        return super().__call__(outputs, experience.replace(advantages_BR=white), denominators)


def local_counts(whole: Experience, mine: Experience, max_response_length: int) -> Denominators:
    """Each rank divides by its own rows: a mean of means over the ranks."""
    return denominators_of(mine, max_response_length)


def failures(check: SelfCheck, process: ProcessInfo) -> set[str]:
    return {finding.name for finding in check.findings(check.on_rank(process)) if not finding.passed}


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "actor_rollout_ref.actor.entropy_coeff=0.1"],
        ["actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov", "actor_rollout_ref.actor.loss_agg_mode=token-sum"],
        ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.kl_loss_type=full"],
        ["actor_rollout_ref.model.use_remove_padding=False", "actor_rollout_ref.actor.sample_weight.length=True"],
        ["actor_rollout_ref.actor.strategy=fsdp"],
    ],
    ids=["plain", "gspo", "kl_cov", "lora", "padded", "fsdp1"],
)
def test_a_sound_trainer_passes(process: ProcessInfo, tiny_model: Path, settings: list[str]) -> None:
    model = f"actor_rollout_ref.model.path={tiny_model}"
    check = SelfCheck(config=compose([*SETTINGS, "actor_rollout_ref.rollout.n=2", model, *settings]), num_rows=6)
    findings = check.findings(check.on_rank(process))
    assert all(finding.passed for finding in findings) and len(findings) == 5
    assert (
        0 < max(finding.difference for finding in findings) < 1e-5
    )  # rounding, not a comparison of a thing with itself


@pytest.mark.parametrize(
    ("name", "way"), [("qwen3_moe", "padded rows, full logits"), ("lfm2", "padded rows, fused head")]
)
def test_experts_and_layers_with_state_pass(
    process: ProcessInfo, tiny_model: Path, tmp_path: Path, name: str, way: str
) -> None:
    """Where packing is impossible the other way is another head on padded rows."""
    tokenizer = load_tokenizer(str(tiny_model))
    folder = zoo.folder(tmp_path, name, vocab_size=len(tokenizer), initializer_range=0.05)
    tokenizer.save_pretrained(folder)
    settings = [f"actor_rollout_ref.model.path={folder}", "actor_rollout_ref.rollout.n=2"]
    settings.append(f"actor_rollout_ref.model.use_remove_padding={families.FAMILIES[name].packed}")
    check = SelfCheck(config=compose([*SETTINGS, *settings]), num_rows=6)
    findings = check.findings(check.on_rank(process))
    assert way in {finding.name for finding in findings}
    assert all(finding.passed for finding in findings), table(findings)


def test_mean_of_micro_batch_means_is_found(process: ProcessInfo, config: PPOConfig) -> None:
    found = failures(SelfCheck(config=config, make_loss=MeanOfMeans), process)
    assert {"micro-batches of a few rows", "micro-batches of one row"} <= found


def test_a_statistic_of_the_micro_batch_is_found(process: ProcessInfo, config: PPOConfig) -> None:
    found = failures(SelfCheck(config=config, make_loss=WhitenedInside), process)
    assert {"micro-batches of a few rows", "micro-batches of one row"} <= found


def test_a_leaked_segment_is_found(process: ProcessInfo, config: PPOConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that sees all of a packed micro-batch; the engine's own check at its start is switched off."""
    pack = packing.pack

    def one_segment(*args: Any, **kwargs: Any) -> Any:
        inputs = pack(*args, **kwargs)
        segments = packing.Segments([inputs.input_ids.shape[1]], inputs.input_ids.device)
        return dataclasses.replace(inputs, segments=segments)

    monkeypatch.setattr("verl_like.engine.packing_check.check_packing", lambda *args: None)
    monkeypatch.setattr(packing, "pack", one_segment)
    found = failures(SelfCheck(config=config), process)
    assert {"micro-batches of one row", "padded rows, full logits", "log-probs of a plain forward pass"} <= found


def test_a_missing_temperature_is_found(
    process: ProcessInfo, config: PPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = FSDPEngine._answers

    def without(self: FSDPEngine, rows: Any, want: Any, temperature: float, *rest: Any) -> Any:
        return answers(self, rows, want, 1.0, *rest)

    monkeypatch.setattr(FSDPEngine, "_answers", without)
    assert failures(SelfCheck(config=config), process) == {"log-probs of a plain forward pass"}


def test_a_mean_of_means_over_ranks_is_found(config: PPOConfig) -> None:
    """One rank is right; two are not."""
    names = {f.name for f in SelfCheck(config=config, count=local_counts, num_rows=7).run() if not f.passed}
    assert names and all(name.startswith("2 processes: ") for name in names)


def test_the_command_prints_the_largest_difference(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["selfcheck", "--rows", "5", *SETTINGS, f"actor_rollout_ref.model.path={tiny_model}"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("largest relative difference") and lines[-1].endswith("passed")
    assert sum(line.endswith("ok") for line in lines) == 8


def test_a_difference_is_named_and_fails() -> None:
    from verl_like.trainer.gradient_check import Finding

    text = table([Finding(name="a", difference=1e-7), Finding(name="b", difference=0.5)])
    assert "b" in text.splitlines()[1] and "DIFFERENT" in text.splitlines()[1] and text.endswith("FAILED")
