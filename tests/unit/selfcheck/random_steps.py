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
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.errors import ConfigError
from verl_like.kit.selfcheck.real_step import small
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
# What landed last: number i has entry i of these (family, keys), so that some numbers in a row have them all.
_ROUTES = f"{_POLICY}.rollout.enable_rollout_routing_replay"
_STAGES = f"{_ACTOR}.fsdp_config.pipeline_parallel_size=2"
LATE: tuple[tuple[str, str], ...] = (
    ("tiny", _STAGES),
    (
        "tiny",
        f"{_STAGES} {_ACTOR}.fsdp_config.pipeline_schedule=gpipe critic.model.fsdp_config.pipeline_parallel_size=2",
    ),
    ("qwen3_moe", _STAGES),
    ("tiny", f"{_ACTOR}.fsdp_config.context_parallel_size=2 critic.model.fsdp_config.context_parallel_size=2"),
    ("qwen3_moe", f"{_ACTOR}.fsdp_config.context_parallel_size=2"),
    ("qwen3_moe", f"{_ACTOR}.fsdp_config.tensor_parallel_size=2"),
    ("tiny", f"{_ACTOR}.fsdp_config.tensor_parallel_size=2 critic.model.fsdp_config.tensor_parallel_size=2"),
    ("qwen3_moe", f"{_ACTOR}.fsdp_config.expert_parallel_size=2"),
    ("qwen3_moe", f"{_ACTOR}.fsdp_config.expert_parallel_size=2 {_ACTOR}.router_replay.mode=R2"),
    ("qwen3_moe", f"{_ACTOR}.router_replay.mode=R3 {_ROUTES}=True {_POLICY}.rollout.name=hf"),
    ("tiny", f"trainer.parity=exact {_POLICY}.rollout.name=hf"),
    ("tiny", f"trainer.parity=exact {_POLICY}.rollout.name=hf {_ACTOR}.use_dynamic_bsz=True"),
    ("tiny", f"{_POLICY}.rollout.name=auto {_ACTOR}.use_dynamic_bsz=True {_POLICY}.rollout.n=4"),
    ("tiny", f"trainer.mode=colocate_async {_POLICY}.rollout.name=hf"),
    ("qwen3_moe", f"{_ACTOR}.fsdp_config.tensor_parallel_size=2 {_ACTOR}.fsdp_config.expert_parallel_size=2"),
    ("", f"trainer.mode=colocate_async {_POLICY}.rollout.name=auto {_ACTOR}.ulysses_sequence_parallel_size=2"),
)
# On more than two ranks, one of these too: copies of two ranks each, two ways of cutting rows, pools of their own.
_FSDP = f"{_ACTOR}.fsdp_config"
WIDE = (
    f"{_FSDP}.fsdp_size=2",
    f"{_FSDP}.fsdp_size=1",
    f"{_ACTOR}.ulysses_sequence_parallel_size=2 {_FSDP}.tensor_parallel_size=2",
    f"{_FSDP}.context_parallel_size=2 {_FSDP}.tensor_parallel_size=2",
    "trainer.placement={apart:{roles:[critic,ref],n_gpus_per_node:2}}",
    "trainer.placement={critic:2,ref:2}",
)
_COMMON = (
    "trainer.prove_step=True data.train_files=x.parquet data.train_batch_size=8 data.max_prompt_length=24 "
    "data.max_response_length=24 critic.ppo_mini_batch_size=4"
)


def ranks_of(number: int) -> int:
    """Ranks that the last entry of a number needs."""
    return 2 if "parallel_size=2" in LATE[number % len(LATE)][1] else 1


def drawn(number: int, tiny: Path, folder: Path, ranks: int) -> tuple[PPOConfig, str]:
    """Draw until the configuration is legal; return it and the keys that were drawn. Needs a mesh of `ranks`."""
    chance, (late, keys_of_late) = random.Random(number), LATE[number % len(LATE)]
    while True:
        family, keys = late or chance.choice(FAMILIES) or "tiny", [chance.choice(axis) for axis in AXES]
        model = tiny
        if family != "tiny":
            model = Path(zoo.folder(folder / f"{number}-{family}", family))
            load_tokenizer(str(tiny)).save_pretrained(model)
        wide = chance.choice(WIDE) if ranks > 2 else ""
        words = [*" ".join(keys).split(), *keys_of_late.split(), *wide.split()]
        meshes = any("parallel_size=2" in word for word in words)
        alone = f"{_POLICY}.rollout.n=1" in words and not keys[0].endswith(("gae", "reinforce_plus_plus"))
        own = [f"{_POLICY}.model.path={model}", f"critic.model.path={model}", f"trainer.n_gpus_per_node={ranks}"]
        sliced = any("context" in word or "ulysses" in word for word in words)
        padded = any("use_remove_padding=False" in word for word in words)
        dense = "moe" not in family and any("expert" in word for word in words)
        if meshes > (ranks > 1) or alone:  # without a group, there would be no gradient
            continue
        if (sliced and padded) or dense:  # a start refuses these by the facts of the model
            continue
        try:
            config = compose([*_COMMON.split(), *own, *words])
            if wide:  # a pool may have fewer ranks than a mesh
                BatchPlan.build(small(config, ranks, ""), ranks)
            return config, " ".join([family, *words])
        except ConfigError:
            continue


def main(first: int, last: int, ranks: int = 0) -> None:
    """Prove one configuration after the other, each on as many ranks as it needs; exit status 1 for an alarm."""
    alarms = 0
    with tempfile.TemporaryDirectory() as folder:
        tiny = Path(write_tiny_model(Path(folder) / "tiny"))
        for number in range(first, last):
            size = ranks or ranks_of(number)
            config, keys = drawn(number, tiny, Path(folder), size)
            begun = time.monotonic()
            findings, notes = prove_step(config, ranks=size)
            sound = all(each.passed for each in findings)
            alarms += not sound
            told = f"{'ok' if sound else 'DIFFERENT'} {len(findings)} lines, {time.monotonic() - begun:.0f} s"
            print(f"{number} {told} {keys} {notes}", flush=True)
            if not sound:
                print(table(findings), flush=True)
    sys.exit(alarms > 0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
