"""Images in the main job: small, and (slow) the vision recipe whole, with its control."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, metrics_of, run_script
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from verl_like.cli.main import main
from verl_like.kit.replaying import replay

RECIPE = ROOT / "recipes" / "vision"


def run(folder: Path, out: Path, *arguments: str, timeout: float, **variables: str) -> list[dict[str, Any]]:
    """The recipe's script; the metrics."""
    own = (f"trainer.default_local_dir={out}", "trainer.report_freq=-1")
    done = run_script(RECIPE / "run.sh", *own, *arguments, timeout=timeout, OUT=str(folder), **variables)
    assert done.returncode == 0, done.stdout
    return metrics_of(out)


def accuracy(metrics: list[dict[str, Any]]) -> list[float]:
    return [step["val-core/disc_color/acc/mean@1"] for step in metrics if "val-core/disc_color/acc/mean@1" in step]


@pytest.mark.parametrize("engine", ["hf", pytest.param("sglang", marks=[pytest.mark.engines, pytest.mark.sglang])])
def test_the_main_job_looks_at_images(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that differ in their pictures alone; what is saved is a whole model folder; a recorded step is made again
    from its pictures, with the same loss and gradient norm; and the saved model answers as in the run."""
    monkeypatch.syspath_prepend(str(RECIPE))
    for module in ("prepare", "scene"):  # other recipes have files of that name
        monkeypatch.delitem(sys.modules, module, raising=False)
    prepare, scene = __import__("prepare"), __import__("scene")
    rng = random.Random(1)
    for split in ("train", "val"):
        prepare.write(tmp_path / "data", split, prepare.draw_rows(16, split, rng), rng)
    tokenizer = scene.build_tokenizer()
    scene.save(tmp_path / "model", scene.build_model(tokenizer, 1), tokenizer)
    (tmp_path / "prepared.json").write_text('{"seed": 1}')
    settings = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.save_freq=1"]
    settings += ["trainer.record_freq=1"]
    settings += ["actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]", "trainer.total_training_steps=2"]
    metrics = run(tmp_path, tmp_path / "out", *settings, timeout=200, ROLLOUT=engine)
    found = replay(tmp_path / "out", 2, [], 1e-6)
    assert {each.where for each in found} >= {"media", "actor/grad_norm", "advantages_T"}
    assert all(each.same for each in found), [each for each in found if not each.same]
    gaps = [step[name] for step in metrics if (name := "training/rollout_probs_diff_max") in step]
    assert len(gaps) == 2 and max(gaps) < 1e-4
    saved = tmp_path / "out" / "global_step_2" / "actor" / "huggingface"
    AutoModelForImageTextToText.from_pretrained(saved)
    assert AutoImageProcessor.from_pretrained(saved, backend="pil").patch_size == 14
    keys = [f"data.val_files={tmp_path / 'data' / 'val.parquet'}", "data.max_prompt_length=16"]
    keys += [f"custom_reward_function.path={RECIPE.parent / 'quickstart' / 'reward.py'}", "data.max_response_length=3"]
    main(["eval", str(saved), *keys, "actor_rollout_ref.rollout.name=hf", "--json", str(tmp_path / "all.json")])
    assert json.loads((tmp_path / "all.json").read_text())["val-core/disc_color/acc/mean@1"] == accuracy(metrics)[-1]


@pytest.mark.slow
def test_a_model_learns_what_it_sees(tmp_path: Path) -> None:
    """Over 0.9; with the pictures dealt to other rows it stays where guessing is, one in six."""
    learned = accuracy(run(tmp_path, tmp_path / "out", timeout=900, ROLLOUT="hf"))
    assert learned[0] < 0.3 < 0.9 < learned[-1]
    control = accuracy(run(tmp_path, tmp_path / "control", timeout=900, ROLLOUT="hf", CONTROL="1"))
    assert max(control) < 0.35
