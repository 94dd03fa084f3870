"""The doctor's checks of reward_model.enable: the model that scores, and the processes it runs in."""

from collections.abc import Iterator

from verl_like.config.engines import SERVERS
from verl_like.config.placement import is_apart
from verl_like.config.ppo import PPOConfig
from verl_like.config.reward import REWARD_MANAGERS
from verl_like.config.roles import REWARD, classifies, generates
from verl_like.config.schema import Idle, idle_while


def impossible_reward_model(config: PPOConfig) -> Iterator[str]:
    """Combinations that cannot work: keys, values, fix."""
    reward = config.reward_model
    if not reward.enable:
        return
    if reward.model.path is None:
        yield (
            "reward_model.enable=True without reward_model.model.path: name the folder of a sequence-classification "
            "model, or set enable=false"
        )
    if _generates(config):
        yield from _generative(config)
        return
    if reward.model_weight == 0:
        yield (
            "reward_model.enable=True with reward_model.model_weight=0: the model's score would count for nothing; set "
            "another weight, or enable=false"
        )
    if config.custom_reward_function.path is not None and reward.rule_weight == 0:
        yield (
            "reward_model.enable=True with custom_reward_function.path and reward_model.rule_weight=0: the function "
            "would never be called; set rule_weight to what it counts beside the model, or leave the path out. Where "
            "the function itself asks a model that writes text, set reward_model.rollout.name=vllm"
        )


def _generates(config: PPOConfig) -> bool:
    return generates(config.reward_model, config.custom_reward_function)


def _generative(config: PPOConfig) -> Iterator[str]:
    """Problems of a reward model that writes text, on a server of its own."""
    reward, rollout = config.reward_model, config.reward_model.rollout
    if rollout.name is None:
        yield "reward_model.model_type=generative without reward_model.rollout.name: set it to vllm or sglang"
    if rollout.free_cache_engine:
        yield (
            "reward_model.rollout.free_cache_engine=True: not available yet; set it to false: responses are graded "
            "while others are sampled; gpu_memory_utilization shares out the memory"
        )
    if reward.judge.url is not None:
        yield (
            f"reward_model.judge.url={reward.judge.url} with a reward model that the run serves (reward_model."
            "rollout.name): the judge would be two; leave the url out, or set reward_model.enable=false"
        )
    if reward.reward_manager not in REWARD_MANAGERS:
        yield (
            f"reward_model.reward_manager={reward.reward_manager} with reward_model.rollout.name={rollout.name}: a "
            "class of your own is not told where the server is; use custom_reward_function.path"
        )
    if config.custom_reward_function.path is None and reward.judge.max_tokens > rollout.response_length:
        yield (
            f"reward_model.judge.max_tokens={reward.judge.max_tokens} is more than the server's reward_model.rollout."
            f"response_length={rollout.response_length}; raise that"
        )
    policy = config.actor_rollout_ref.rollout
    together = rollout.gpu_memory_utilization + policy.gpu_memory_utilization
    if not is_apart(config, REWARD) and policy.name in SERVERS and together > 1:
        yield (
            f"reward_model.rollout.gpu_memory_utilization={rollout.gpu_memory_utilization} and actor_rollout_ref."
            f"rollout.gpu_memory_utilization={policy.gpu_memory_utilization} are more than 1 together, on the same "
            "devices: lower them, or give the reward model its own (reward_model.enable_resource_pool)"
        )


_FORWARD = (
    "worker_class", "strategy", "micro_batch_size", "micro_batch_size_per_gpu", "max_length", "model_weight",
    "rule_weight", "use_dynamic_bsz", "forward_max_token_len_per_gpu", "ulysses_sequence_parallel_size",
)  # fmt: skip
_NETWORK = ("input_tokenizer", "external_lib", "use_shm", "use_remove_padding", "fsdp_config.")
_SETTINGS = (
    "model.", "rollout.", "model_type", "enable_resource_pool", "nnodes", "n_gpus_per_node", *_FORWARD,
)  # fmt: skip

REWARD_MODEL_IDLE: tuple[Idle, ...] = (
    idle_while("reward_model.enable", "false", *(f"reward_model.{name}" for name in _SETTINGS)),
    idle_while(
        "reward_model.enable_resource_pool",
        "false: the reward model runs in the policy's processes",
        "reward_model.nnodes",
        "reward_model.n_gpus_per_node",
    ),
    Idle(
        (
            *("reward_model.rule", "reward_model.rule_by_source", "reward_model.rule_kwargs"),
            *("reward_model.weights", "reward_model.judge.", "reward_model.reward_manager", "data.self_check_rows"),
        ),
        lambda c: classifies(c.reward_model, c.custom_reward_function) and c.reward_model.rule_weight == 0,
        "reward_model.rule_weight is 0 beside a reward model",
    ),
    Idle(
        tuple(f"reward_model.{name}" for name in _FORWARD) + tuple(f"reward_model.model.{name}" for name in _NETWORK),
        _generates,
        "the reward model writes text: its server (reward_model.rollout) and its grader say how",
    ),
    Idle(
        ("reward_model.rollout.",),
        lambda c: classifies(c.reward_model, c.custom_reward_function),
        "the reward model is a sequence classifier, which scores in one forward pass in the trainer's processes; "
        "reward_model.model_type=generative serves one that writes text",
    ),
)
