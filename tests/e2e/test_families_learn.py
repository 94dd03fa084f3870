"""GRPO on tiny models of the types people train now, random weights, three seeds each: every sync is proved, the reward
rises, and it does not where nothing can be learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import metrics_of, overrides, write_task
from transformers import AutoTokenizer

from tests.contracts.test_families_rollout import HEADS, OWN
from tests.unit.models import zoo
from verl_like.trainer.compose import compose
from verl_like.trainer.run import run as train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# vLLM's CPU build, or hf where it has no kernel in float32 (docs/models.md)
ENGINES = {"gpt_oss": "hf", "qwen3_next": "hf", "qwen3_5_text": "hf", "glm4_moe": "vllm", "deepseek_v3": "vllm"}
STEPS, RISE = 12, 0.3  # of the share of sevens, between the means of the first and of the last three steps
SHUFFLED = """
BEFORE = [0.0]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    BEFORE.append(solution_str.count(ground_truth) / 6)
    return BEFORE[-2]
"""


def rise(folder: Path, tiny_model: Path, name: str, seed: int, *, reward: str = "", **settings: Any) -> float:
    """Train a tiny model of this type from random weights, with another reward file if one is given; the rise."""
    engine, task, tokenizer = ENGINES[name], write_task(folder), AutoTokenizer.from_pretrained(tiny_model)
    pytest.importorskip("vllm" if engine == "vllm" else "torch")
    changes = OWN.get(name, HEADS) if engine == "vllm" else {}
    model = Path(zoo.folder(folder, name, vocab_size=len(tokenizer), initializer_range=0.05, **changes))
    tokenizer.save_pretrained(model)
    if reward:
        (folder / "reward.py").write_text(reward)
    settings = {
        "trainer.total_training_steps": STEPS,
        "trainer.seed": seed,
        "actor_rollout_ref.rollout.name": engine,
        "actor_rollout_ref.rollout.enforce_eager": True,
        **settings,
    }
    train(compose(overrides(task, model, folder / "out", **settings)))
    records = metrics_of(folder / "out")
    assert len(records) == STEPS
    gap = max(record["weight_sync/probe_gap"] for record in records)
    tokens = max(record["training/rollout_probs_diff_max"] for record in records)
    scores = [record["critic/score/mean"] for record in records]
    early, late = sum(scores[:3]) / 3, sum(scores[-3:]) / 3
    print(f"{name} {engine} seed {seed}: {early:.2f} to {late:.2f}, probe {gap:.1e}, tokens {tokens:.1e}", flush=True)
    assert gap < 1e-3 and tokens < 1e-3
    return late - early


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", ENGINES)
def test_the_reward_rises(tmp_path: Path, tiny_model: Path, name: str, seed: int) -> None:
    assert rise(tmp_path, tiny_model, name, seed) > RISE


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("fault", ["no learning rate", "the reward of the answer before"])
def test_it_does_not_where_nothing_is_learned(tmp_path: Path, tiny_model: Path, name: str, fault: str) -> None:
    """Planted: a run in which the test above must fail."""
    settings: dict[str, Any] = {"actor_rollout_ref.actor.optim.lr": 0.0} if fault == "no learning rate" else {}
    reward = "" if settings else SHUFFLED
    assert abs(rise(tmp_path, tiny_model, name, 1, reward=reward, **settings)) < RISE
