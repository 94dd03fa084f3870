"""Where a run's models and tokenizers lie: the keys that say so, and what can be said of them without looking."""

from verl_like.config.ppo import PPOConfig
from verl_like.config.roles import needs_critic


def model_paths(config: PPOConfig) -> dict[str, str]:
    """Key -> path of every model and tokenizer that this run loads; a path that follows another key counts once."""
    reward = config.reward_model
    named = {
        "actor_rollout_ref.model.path": config.actor_rollout_ref.model.path,
        "data.tokenizer": config.data.tokenizer,
        "critic.model.path": config.critic.model.path if needs_critic(config.critic, config.algorithm) else None,
        "reward_model.model.path": reward.model.path if reward.enable else None,
        "reward_model.model.input_tokenizer": reward.model.input_tokenizer if reward.enable else None,
    }
    keys_by_path: dict[str, str] = {}
    for key, path in named.items():
        if path is not None:
            keys_by_path.setdefault(path, key)
    return {key: path for path, key in keys_by_path.items()}


def impossible_paths(config: PPOConfig) -> list[str]:
    """Paths that name nothing on this machine and nothing on the Hugging Face hub: key, value, fix."""
    problems = []
    for key, path in model_paths(config).items():
        if not path.strip():
            problems.append(f"{key}={path!r} is empty (an unset shell variable?): name a folder or a model on the hub")
    return problems
