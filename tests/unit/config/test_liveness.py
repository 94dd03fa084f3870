"""Every key is alive: setting it changes the configuration, and some module reads it, or a table says why not."""

import ast
import typing
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any

import pytest

from verl_like.config.outcomes import GRADED, LOST
from verl_like.config.schema import Key, get_value, keys
from verl_like.config.spellings import Change, deprecated, no_effect, not_yet
from verl_like.kit.docs.configuration import with_tables
from verl_like.kit.docs.readers import PACKAGE, _attribute_types, _Nodes, _Scope, _scopes, readers
from verl_like.trainer.compose import _apply, _base, to_config

# Where the rules of `sample` do not give a legal value.
SAMPLES: dict[str, Any] = {
    "distillation.distillation_loss.loss_mode": "k1",
    "distillation.distillation_loss.policy_loss_mode": "gspo",
    "distillation.teacher_models": {"math": {"key": "gsm8k", "num_replicas": 2}},
    "distillation.teacher_model.inference.dtype": "float16",
    "distillation.teacher_model.inference.name": "sglang",
    "trainer.n_gpus_per_node": 2,
    "trainer.placement": {"values": {"roles": ["critic"], "n_gpus_per_node": 2}},
    **{
        f"{section}.fsdp_config.pipeline_schedule": "gpipe"
        for section in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic.model", "reward_model.model")
    },
    "data.chat_template": "chatml",
    "trainer.logger": ["console", "tensorboard"],
    "trainer.full_determinism": True,
    "trainer.log_format": "json",
    "trainer.mode": "colocate_async",
    "trainer.objective": "sft",
    "preference.loss": "kto",
    "serve.isolation": "shared",
    "async_training.beyond": "drop",
    "trainer.prometheus_host": "0.0.0.0",
    "trainer.prometheus_port": 9090,
    "trainer.health": {"failed_rewards": "stop"},
    "trainer.logger_kwargs": {"wandb": {"tags": ["a"]}},
    "actor_rollout_ref.actor.optim.betas": [0.8, 0.95],
    "critic.optim.betas": [0.8, 0.95],
    "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum",
    "critic.loss_agg_mode": "seq-mean-token-sum",
    "algorithm.reward_norm.mean": "group",
    "algorithm.reward_norm.std": "batch",
    "algorithm.reward_norm.kind": "running",
    "algorithm.agent_reward_norm.clip": [-2.0, 2.0],
    "algorithm.filter_groups.range": [0.1, 0.9],
    "algorithm.gdpo_reward_weights": [2.0],
    "actor_rollout_ref.rollout.mode": "async",
    "actor_rollout_ref.rollout.speculative.method": "history",
    "actor_rollout_ref.rollout.scheduler.mode": "batch",
    "actor_rollout_ref.rollout.scheduler.additional_prompts.aborted": "wait",
    "actor_rollout_ref.rollout.max_model_len": 4096,
    "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side": "left",
    "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode": "disable",
    "actor_rollout_ref.rollout.multi_turn.malformed_calls": "end",
    **{f"actor_rollout_ref.rollout.outcomes.{name}": "mask" for name in GRADED},
    **{f"actor_rollout_ref.rollout.outcomes.{name}": "retry" for name in LOST},
    "algorithm.rollout_correction.rollout_is": "token",
    "algorithm.rollout_correction.rollout_is_threshold": "0.5_5.0",
    "algorithm.rollout_correction.rollout_rs": "token_k1,seq_max_k2",
    "algorithm.rollout_correction.rollout_rs_threshold": "0.5_2.0,3",
    "algorithm.rollout_correction.loss_type": "reinforce",
    "algorithm.adv_estimator": "grpo",
    **{f"env.{split}.tags": ["bandit"] for split in ("train", "val")},
    **{f"env.{split}.num_groups": 3 for split in ("train", "val")},  # the sum of groups_per_tag
    "env.custom": {"bandit": {"max_steps": 1}},
    "env.worker_cls": "mine.py:Worker",
    "actor_rollout_ref.rollout.gateway.path": "mine.py:run",
    "actor_rollout_ref.rollout.gateway.forced_tool_choice": "auto",
    "actor_rollout_ref.actor.ratio_skip_threshold": 20.0,
    "distillation.distillation_loss.log_prob_min_clamp": -10.0,
    "actor_rollout_ref.actor.policy_loss.loss_mode": "gspo",
    "actor_rollout_ref.model.target_modules": ["q_proj"],
    "critic.model.target_modules": ["q_proj"],
    "actor_rollout_ref.actor.kl_loss_type": "k3",
    "algorithm.kl_penalty": "k3",
    "reward_model.reward_manager": "prime",
    "reward_model.rollout.name": "vllm",
    "reward_model.model_type": "generative",
    "actor_rollout_ref.rollout.quantization": "int8",
    "reward_model.judge.parser": "boxed",
    "reward_model.worker_class": "mine.py:Worker",
    "trainer.trainer_class": "mine.py:Trainer",
    "trainer.best_mode": "min",
    "reward_model.judge.score_pattern": r"\[(\d+)\]",
    "custom_reward_function.memory_limit_mb": 512,
    "data.curriculum.prior": [1.0, 2.0],
    "trainer.controller_nsight_options": {"trace": "cuda"},
    "trainer.worker_nsight_options": {"trace": "cuda"},
}


def sample(key: Key) -> Any:
    """A legal value other than the default."""
    if key.path in SAMPLES:
        return SAMPLES[key.path]
    kinds = typing.get_args(key.type) if isinstance(key.type, UnionType) else (key.type,)
    kind = next(k for k in kinds if k is not type(None))
    if key.name == "url":
        return "http://host"
    if key.name in ("save_contents", "load_contents"):
        return ["model"]
    if key.name in ("dtype", "model_dtype", "reduce_dtype", "buffer_dtype"):
        return "bfloat16"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(member.value for member in kind if member != key.default)
    if typing.get_origin(kind) is list:
        return [3] if typing.get_args(kind)[0] is int else ["other"]
    if typing.get_origin(kind) is dict:
        return {"name": 1}
    if kind is bool:
        return not key.default
    if kind is int:
        return (key.default or 1) + 1 if key.default != -1 else 2
    if kind is float:
        return (key.default or 0.25) / 2 if key.default not in (1, -1, 3) else 2.0
    return "other"


ONLY_BELOW_ONE = ("gamma", "lam", "top_p")  # 1 is the largest value


ONLY_ALONE = set(deprecated())  # a global size and its successor exclude each other


@cache
def changed_config(alone: bool):
    """All keys set at once (the deprecated ones in a run of their own), as a user's file would: no quoting."""
    tree = _base([])
    for path, key in keys().items():
        if (path in ONLY_ALONE) == alone:
            value = 0.5 if key.name in ONLY_BELOW_ONE else sample(key)
            assert _apply(tree, Change(path, value)) is None, path
    return to_config(tree)


@pytest.mark.parametrize("path", keys())
def test_setting_a_key_changes_the_configuration(path):
    assert get_value(changed_config(path in ONLY_ALONE), path) != keys()[path].default


def test_setting_one_key_changes_that_key_alone():
    """Guards the test above: what it sees comes from the key, not from its neighbours."""
    tree = _base([])
    assert _apply(tree, Change("trainer.seed", 7)) is None
    changed, default = to_config(tree), to_config(_base([]))
    assert [path for path in keys() if get_value(changed, path) != get_value(default, path)] == ["trainer.seed"]


@cache
def read_by() -> dict[str, list[str]]:
    return readers()


def legal_without_reader() -> set[str]:
    return {*not_yet(), *no_effect()}


def test_every_key_is_read_or_accounted_for():
    table = read_by()
    assert set(table) == set(keys())
    silent = [key for key, modules in table.items() if not modules and key not in legal_without_reader()]
    assert silent == [], "keys that nobody reads: read them, or give them a row in verl_like/config/names/verl.txt"


def test_no_effect_keys_are_really_not_read():
    table = read_by()
    assert {key: table[key] for key in no_effect() if table[key]} == {}


def reads_of(source: str) -> set[tuple[str, str]]:
    tree = ast.parse(source)
    scopes = [_Nodes.of(scope) for scope in _scopes(tree)]
    types = _attribute_types({PACKAGE / "x.py": tree}, {PACKAGE / "x.py": scopes})
    return {(owner.__name__, field) for nodes in scopes for owner, field in _Scope(nodes, types).reads()}


@pytest.mark.parametrize(
    ("source", "read"),
    [
        ("def f(config: PPOConfig): return config.trainer.seed", ("TrainerConfig", "seed")),
        ("def f(o: OptimConfig | None): return o.lr", ("OptimConfig", "lr")),
        ("def f(c: 'PPOConfig'):\n a, r = c.actor_rollout_ref.actor, c.critic\n return a.shuffle",
         ("ActorConfig", "shuffle")),
        ("class W:\n def __init__(self, r: RolloutConfig): self.r = r\n def g(self): return self.r.n",
         ("RolloutConfig", "n")),
        ("class S:\n config: PPOConfig\ndef f(spec): return spec.config.data.prompt_key", ("DataConfig", "prompt_key")),
    ],
)  # fmt: skip
def test_the_scan_follows_types(source, read):
    assert read in reads_of(source)


def test_the_scan_does_not_guess_from_names_alone():
    assert reads_of("def f(x): return x.lr, x.seed, x.trainer.seed") == set()
    assert ("OptimConfig", "eps") not in reads_of("def f(o: OptimConfig): return o.lr")


def test_the_documentation_page_is_current():
    """Names, meanings and defaults; who reads a key may change from commit to commit without a new page."""
    text = (PACKAGE.parent / "docs" / "configuration.md").read_text()
    missing = [path for path, key in keys().items() if key.doc.replace("|", "\\|") not in text]
    assert missing == [], "run python -m verl_like.kit.docs.configuration"
    assert "**nobody**" not in text


def test_the_tables_of_the_algorithms_are_current():
    page = (PACKAGE.parent / "docs" / "algorithms.md").read_text()
    assert with_tables(page) == page, "run python -m verl_like.kit.docs.configuration"
    with pytest.raises(ValueError, match="lacks <!-- begin table kl"):
        with_tables(page.replace("begin table kl", "table kl"))
    assert with_tables(page.replace("| `rloo` | s_i - mean", "| `rloo` | s_i + mean")) == page
