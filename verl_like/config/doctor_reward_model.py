"""The doctor's checks of reward_model.enable: the network that scores, and the processes it runs in."""

from verl_like.config.idle import Idle
from verl_like.config.ppo import PPOConfig


def impossible_reward_model(config: PPOConfig) -> list[str]:
    """Combinations that cannot work: keys, values, fix."""
    reward = config.reward_model
    if not reward.enable:
        return []
    problems = []
    if reward.model.path is None:
        problems.append(
            "reward_model.enable=True without reward_model.model.path: name the folder of a sequence-classification "
            "model, or set enable=false"
        )
    if reward.model_weight == 0:
        problems.append(
            "reward_model.enable=True with reward_model.model_weight=0: the model's score would count for nothing; set "
            "another weight, or enable=false"
        )
    if config.custom_reward_function.path is not None and reward.rule_weight == 0:
        problems.append(
            "reward_model.enable=True with custom_reward_function.path and reward_model.rule_weight=0: the function "
            "would never be called; set rule_weight to what it counts beside the model, or leave the path out. Where "
            "the function itself asks a generative model, set enable=false (see reward_model.judge)"
        )
    return problems


_SETTINGS = (
    "model.",
    "worker_class",
    "strategy",
    "enable_resource_pool",
    "nnodes",
    "n_gpus_per_node",
    "micro_batch_size",
    "micro_batch_size_per_gpu",
    "max_length",
    "model_weight",
    "rule_weight",
    "use_dynamic_bsz",
    "forward_max_token_len_per_gpu",
    "ulysses_sequence_parallel_size",
)

REWARD_MODEL_IDLE: tuple[Idle, ...] = (
    Idle(
        tuple(f"reward_model.{name}" for name in _SETTINGS),
        lambda c: not c.reward_model.enable,
        "reward_model.enable is false",
    ),
    Idle(
        ("reward_model.nnodes", "reward_model.n_gpus_per_node"),
        lambda c: c.reward_model.enable and not c.reward_model.enable_resource_pool,
        "reward_model.enable_resource_pool is false: the reward model runs in the policy's processes",
    ),
    Idle(
        (
            *("reward_model.rule", "reward_model.rule_by_source", "reward_model.rule_kwargs"),
            *("reward_model.weights", "reward_model.judge.", "reward_model.reward_manager", "data.self_check_rows"),
        ),
        lambda c: c.reward_model.enable and c.reward_model.rule_weight == 0,
        "reward_model.rule_weight is 0 beside a reward model",
    ),
)
