"""Random legal configurations for the proof of steps: `python -m tests.unit.selfcheck.random_steps FIRST LAST [RANKS]`.

Number i is the same everywhere. Prints a line for each, and the table of one that differs: the program being sound, a
false alarm.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

from tests.unit.models import zoo
from verl_like.config import PPOConfig
from verl_like.config.errors import ConfigError
from verl_like.kit.selfcheck.report import table
from verl_like.kit.selfcheck.step_proof import prove_step
from verl_like.kit.selfcheck.tiny import write_tiny_model
from verl_like.models.loading import load_tokenizer
from verl_like.trainer.compose import compose

_ACTOR, _POLICY = "actor_rollout_ref.actor", "actor_rollout_ref"
FAMILIES = ("", "", "", "qwen3_moe", "gemma2", "olmo2")  # "": the tiny model of `verl-like selfcheck`
# Each axis: lists of keys, one of which is drawn.
AXES: tuple[tuple[str, ...], ...] = (
    tuple(
        f"algorithm.adv_estimator={each}" for each in ("grpo", "gae", "rloo", "dr_grpo", "reinforce_plus_plus", "opo")
    ),
    ("", "", f"{_ACTOR}.loss_agg_mode=seq-mean-token-mean", f"{_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"),
    ("", "", f"{_ACTOR}.policy_loss.loss_mode=gspo", f"{_ACTOR}.policy_loss.loss_mode=clip_cov"),
    ("", "", f"{_ACTOR}.use_kl_loss=True", f"{_ACTOR}.use_kl_loss=True {_ACTOR}.kl_loss_type=full"),
    ("", "", "algorithm.use_kl_in_reward=True"),
    ("", f"{_ACTOR}.entropy_coeff=0.05"),
    ("", "", f"{_ACTOR}.clip_ratio_c=2.0", f"{_ACTOR}.ratio_skip_threshold=3.0"),
    ("", "", "algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is=sequence"),
    (f"{_POLICY}.rollout.n=4", f"{_POLICY}.rollout.n=3", f"{_POLICY}.rollout.n=1"),
    ("", f"{_ACTOR}.ppo_epochs=2", f"{_ACTOR}.shuffle=True"),
    (f"{_ACTOR}.ppo_mini_batch_size=4", f"{_ACTOR}.ppo_mini_batch_size=8"),
    ("", "", f"{_POLICY}.model.lora_rank=4"),
    # How rows lie in micro-batches: trees of prompts and of what responses begin with, or every row for itself.
    (
        "",
        f"{_ACTOR}.use_dynamic_bsz=True",
        f"{_ACTOR}.use_dynamic_bsz=True",
        f"{_POLICY}.model.use_remove_padding=False",
    ),
    ("", "", f"{_POLICY}.model.share_prompts=False critic.model.share_prompts=False"),
    # Meshes.
    (
        "",
        "",
        f"{_ACTOR}.ulysses_sequence_parallel_size=2",
        f"{_ACTOR}.fsdp_config.context_parallel_size=2",
        f"{_ACTOR}.fsdp_config.context_parallel_size=2 critic.model.fsdp_config.context_parallel_size=2",
        f"{_ACTOR}.fsdp_config.expert_parallel_size=2",
    ),
)
_COMMON = (
    "data.train_files=x.parquet data.train_batch_size=8 data.max_prompt_length=24 data.max_response_length=24 "
    "critic.ppo_mini_batch_size=4"
)


def drawn(number: int, tiny: Path, folder: Path, ranks: int) -> tuple[PPOConfig, str]:
    """Draw until the configuration is legal; return it and the keys that were drawn. Needs a mesh of `ranks`."""
    chance = random.Random(number)
    while True:
        family, keys = chance.choice(FAMILIES), [chance.choice(axis) for axis in AXES]
        model = tiny
        if family:
            model = Path(zoo.folder(folder / f"{number}-{family}", family))
            load_tokenizer(str(tiny)).save_pretrained(model)
        words = " ".join(keys).split()
        meshes = "parallel_size=2" in keys[-1]
        own = [f"{_POLICY}.model.path={model}", f"critic.model.path={model}", "trainer.n_gpus_per_node=2"]
        if meshes > (ranks > 1):
            continue
        try:
            return compose([*_COMMON.split(), *own, *words]), " ".join([family or "tiny", *words])
        except ConfigError:
            continue


def main(first: int, last: int, ranks: int = 1) -> None:
    """Prove one configuration after the other; exit status 1 where one differs."""
    alarms = 0
    with tempfile.TemporaryDirectory() as folder:
        tiny = Path(write_tiny_model(Path(folder) / "tiny"))
        for number in range(first, last):
            config, keys = drawn(number, tiny, Path(folder), ranks)
            begun = time.monotonic()
            findings, notes = prove_step(config, ranks=ranks)
            sound = all(each.passed for each in findings)
            alarms += not sound
            print(
                f"{number} {'ok' if sound else 'DIFFERENT'} {time.monotonic() - begun:.0f} s {keys} {notes}", flush=True
            )
            if not sound:
                print(table(findings), flush=True)
    sys.exit(alarms > 0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
