"""Reward model as the trainer uses it: its check, its scores, its servers."""

from __future__ import annotations

from functools import partial
from typing import Any

from verl_like.cluster.worker_group import WorkerDied
from verl_like.config import ModelConfig, PPOConfig
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.roles import REWARD, classifies, generates, reward_network
from verl_like.models.loading import end_token_ids, load_hf_config, load_tokenizer
from verl_like.registry import part
from verl_like.rewards.grading import ServedModel
from verl_like.rewards.manager import RewardManager
from verl_like.trainer.roles import RewardModelHandle
from verl_like.trainer.workers import Pools

_PATH = "reward_model.model.path"


def load_reward_model(config: PPOConfig) -> tuple[Any, Any] | None:
    """Check that the reward model can read and write what it must, where there is one.

    Returns the two tokenizers of reward_model.model.input_tokenizer, None without it.
    """
    section, key = config.reward_model, _PATH
    network, model = reward_network(section), section.model
    if generates(section, config.custom_reward_function):
        _end_ids(network)
    if not classifies(section, config.custom_reward_function) or model.input_tokenizer is None:
        return None
    policy = load_tokenizer(model.input_tokenizer, model.trust_remote_code, "reward_model.model.input_tokenizer")
    own = load_tokenizer(network.path, model.trust_remote_code, key)
    if own.chat_template is None:
        raise ValueError(
            f"reward_model.model.input_tokenizer={model.input_tokenizer}: the reward model's own tokenizer ({key}="
            f"{network.path}) has no chat template to write answers with; leave input_tokenizer null"
        )
    return policy, own


def _end_ids(network: ModelConfig) -> tuple[int, ...]:
    """Ids that end the answers of a reward model that writes text."""
    tokenizer = load_tokenizer(network.path, network.trust_remote_code, _PATH)
    return end_token_ids(tokenizer, load_hf_config(network, _PATH), network.path, _PATH)


def use_reward_model(
    config: PPOConfig, plan: BatchPlan, pools: Pools, rewards: RewardManager, tokenizers: tuple[Any, Any]
) -> None:
    """Give the graders the reward model of these workers, where there is one.

    tokenizers: of the policy's texts, and of the reward model where these differ (None: it reads the policy's tokens).
    """
    section, timeout_s = config.reward_model, config.trainer.rpc_timeout
    if rewards.awaits_servers:
        found = pools.of(REWARD).call_all(f"{REWARD}.where").wait(timeout=timeout_s)
        lost = partial(WorkerDied, rank=0, method="where")  # as a worker is: trainer.max_restarts begins again
        ends = _end_ids(reward_network(section))
        places = [place for place in found if place is not None]
        rewards.use_servers(ServedModel(path=section.model.path or "", places=places, lost=lost, end_ids=ends))
    elif REWARD in plan.roles:
        scorer = RewardModelHandle(pools.of(REWARD), plan, balance=True, timeout_s=timeout_s)
        policy, own = tokenizers
        model_score = part("reward_model", "score")
        rewards.use_model(model_score(section, scorer.scores, policy_tokenizer=policy, own_tokenizer=own))
