"""Rules of everything between a response and its advantage: graders, reward models, shaping, estimators."""

import math

from verl_like.config.engines import SERVERS
from verl_like.config.placement import is_apart
from verl_like.config.ppo import PPOConfig
from verl_like.config.reward import REWARD_MANAGERS
from verl_like.config.reward_execution import JudgeConfig
from verl_like.config.roles import REWARD, classifies, generates, needs_critic
from verl_like.config.rule import Findings, idle, rule
from verl_like.config.rules.rollout import LOOP_KEYS, TURN_KEYS, turns_by
from verl_like.config.schema import get_value

_ESTIMATOR, _JUDGE, _SERVER = "algorithm.adv_estimator", "reward_model.judge", "reward_model.rollout"
_FUNCTION, _SCALING = "custom_reward_function.path", "algorithm.reward_scaling.enable"
_NORMS = ("algorithm.reward_norm.kind", "algorithm.reward_norm.mean", "algorithm.reward_norm.std")
_AGENT = "algorithm.agent_reward_norm.method"


def _generates(config: PPOConfig) -> bool:
    return generates(config.reward_model, config.custom_reward_function)


def _classifies(config: PPOConfig) -> bool:
    return classifies(config.reward_model, config.custom_reward_function)


@rule("reward_model.reward_manager", "weights")
def managers_give_the_whole_reward(config: PPOConfig) -> Findings:
    """A reward manager of one's own gives the whole reward."""
    if config.reward_model.reward_manager not in REWARD_MANAGERS and config.reward_model.weights:
        return "a class of your own gives the whole reward; add the parts up in it, or use reward_manager=naive"


@rule(f"{_JUDGE}.prompt_file", "prompt")
def one_prompt_of_the_judge(config: PPOConfig) -> Findings:
    """The judge has one prompt."""
    judge = config.reward_model.judge
    if judge.prompt_file is not None and judge.prompt != JudgeConfig().prompt:
        return ("prompt_file",), f"{_JUDGE}.prompt is set as well; leave one out"


@rule(f"{_JUDGE}.url", _FUNCTION, "reward_model.reward_manager", "reward_model.weights")
def judge_is_asked(config: PPOConfig) -> Findings:
    """A judge is asked: weights name it, or nobody else grades."""
    reward, graders = config.reward_model, (_FUNCTION, "reward_model.reward_manager", "reward_model.weights")
    is_set = (config.custom_reward_function.path is not None, reward.reward_manager not in REWARD_MANAGERS)
    others = [key for key, other in zip(graders, (*is_set, bool(reward.weights)), strict=True) if other]
    asked = any(isinstance(parts, dict) and "judge" in parts for parts in reward.weights.values())
    if reward.judge.url is not None and not asked and others:
        fix = "name it in reward_model.weights, as in {'*': {custom: 1.0, judge: 0.5}}, or leave its url out"
        return (f"{_JUDGE}.url", *others), f"the judge would never be asked; {fix}"


@rule("reward_model.enable", "reward_model.model.path", "model_weight", "rule_weight", _FUNCTION)
def reward_model_counts(config: PPOConfig) -> Findings:
    """A reward model has a path, and neither its score nor the function beside it counts for nothing."""
    reward, on = config.reward_model, "reward_model.enable"
    if reward.enable and reward.model.path is None:
        yield (on, "reward_model.model.path"), "name the folder of a reward model, or set enable=false"
    if _classifies(config) and reward.model_weight == 0:
        yield (on, "model_weight"), "the model's score would count for nothing; set another weight, or enable=false"
    if _classifies(config) and config.custom_reward_function.path is not None and reward.rule_weight == 0:
        fix = "set rule_weight to what it counts beside the model, or leave the path out"
        served = "Where the function itself asks a model that writes text, set reward_model.rollout.name=vllm"
        yield (on, _FUNCTION, "rule_weight"), f"the function would never be called; {fix}. {served}"


@rule(f"{_SERVER}.name", "free_cache_engine", "response_length", f"{_JUDGE}.url", f"{_JUDGE}.max_tokens", _FUNCTION)
def served_reward_model(config: PPOConfig) -> Findings:
    """A reward model that writes text has an engine, and one judge or function asks it."""
    reward, rollout, name = config.reward_model, config.reward_model.rollout, f"{_SERVER}.name"
    if not _generates(config):
        return
    if rollout.name is None:
        yield ("reward_model.model_type", name), "set rollout.name to vllm or sglang"
    if rollout.free_cache_engine:
        why = "responses are graded while others are sampled; gpu_memory_utilization shares out the memory"
        yield (f"{_SERVER}.free_cache_engine",), f"not available yet; set it to false: {why}"
    if reward.judge.url is not None:
        fix = "leave the url out, or set reward_model.enable=false"
        yield (f"{_JUDGE}.url", name), f"the run serves the model that judges, and the judge would be two; {fix}"
    if reward.reward_manager not in REWARD_MANAGERS:
        fix = f"use {_FUNCTION}"
        yield ("reward_model.reward_manager", name), f"a class of your own is not told where the server is; {fix}"
    if config.custom_reward_function.path is None and reward.judge.max_tokens > rollout.response_length:
        yield (f"{_JUDGE}.max_tokens", f"{_SERVER}.response_length"), "more than the server writes; raise that"


@rule(f"{_SERVER}.gpu_memory_utilization", "actor_rollout_ref.rollout.gpu_memory_utilization")
def engines_share_memory(config: PPOConfig) -> Findings:
    """The engines of policy and reward model have room on the same devices."""
    served, policy = config.reward_model.rollout, config.actor_rollout_ref.rollout
    together = served.gpu_memory_utilization + policy.gpu_memory_utilization
    if _generates(config) and not is_apart(config, REWARD) and policy.name in SERVERS and together > 1:
        fix = "lower them, or give the reward model its own (reward_model.enable_resource_pool)"
        return f"they are more than 1 together, on the same devices: {fix}"


@rule("reward_model.enable", "rule_weight", *LOOP_KEYS, kind="risky")
def scores_of_agent_loops_count(config: PPOConfig) -> Findings:
    """Scores that agent loops return count beside a reward model."""
    if config.reward_model.enable and config.reward_model.rule_weight == 0 and (loops := turns_by(config, *LOOP_KEYS)):
        why = "a reward_score that a loop returns counts nothing beside the reward model"
        return ("reward_model.enable", "rule_weight", *loops), f"{why}; set rule_weight to what it counts"


@rule("reward_model.length_reward.enable", "coef", kind="risky")
def length_reward_counts(config: PPOConfig) -> Findings:
    """A length reward has a coefficient."""
    if config.reward_model.length_reward.enable and config.reward_model.length_reward.coef == 0:
        return "it adds nothing; set coef, below 0 for shorter responses"


@rule("reward_model.overlong_buffer.enable", "penalty_factor", kind="risky", reads=("truncated",))
def overlong_punishment_counts(config: PPOConfig) -> Findings:
    """A punishment of long responses has a factor."""
    buffer = config.reward_model.overlong_buffer
    if buffer.enable and buffer.penalty_factor == 0 and buffer.truncated != "zero":
        return "it punishes nothing; set penalty_factor (DAPO: 1.0)"


@rule("reward_model.overlong_buffer.len", "enable", "data.max_response_length")
def overlong_zone(config: PPOConfig) -> Findings:
    """The punished zone is a part of the response."""
    buffer, longest = config.reward_model.overlong_buffer, config.data.max_response_length
    if buffer.enable and not 0 < buffer.len <= longest:
        return f"must be 1 to data.max_response_length={longest}"


@rule(*_NORMS)
def kind_is_short_for_both(config: PPOConfig) -> Findings:
    """A kind of normalisation is short for mean and std."""
    norm = config.algorithm.reward_norm
    if norm.kind is not None and (norm.mean, norm.std) != (None, None):
        return "kind is short for both; leave kind null, or mean and std"


def _by_norm(config: PPOConfig) -> list[str]:
    """The first key by which reward_norm does something."""
    return [key for key in _NORMS if get_value(config, key) is not None][:1]


@rule(*_NORMS, _SCALING, _AGENT)
def one_normalisation(config: PPOConfig) -> Findings:
    """Rewards are normalised in one way."""
    algorithm = config.algorithm
    on = [*_by_norm(config), *([_SCALING] if algorithm.reward_scaling.enable else [])]
    on += [_AGENT] if algorithm.agent_reward_norm.method != "identity" else []
    if len(on) > 1:
        return on, "rewards can be normalised in one way; keep one of them"


@rule(_AGENT, "grouping", "actor_rollout_ref.rollout.n")
def states_have_several_responses(config: PPOConfig) -> Findings:
    """Normalisation over the responses to one state needs two of them."""
    agent, n = config.algorithm.agent_reward_norm, config.actor_rollout_ref.rollout.n
    if agent.method != "identity" and agent.grouping == "state" and n == 1:
        return "every group is one response, so that all rewards become 0; set n to 2 or more, or grouping=batch"


@rule("critic.enable", _ESTIMATOR)
def values_need_a_critic(config: PPOConfig) -> Findings:
    """An estimator that needs values (gae) needs a critic."""
    if config.algorithm.estimator.critic and config.critic.enable is False:
        return f"{config.algorithm.adv_estimator} needs values; set algorithm.adv_estimator=grpo or critic.enable=true"


@rule("trainer.critic_warmup", _ESTIMATOR, "critic.enable")
def warm_up_needs_a_critic(config: PPOConfig) -> Findings:
    """A warm-up of the critic needs a critic."""
    if config.trainer.critic_warmup > 0 and _no_critic(config):
        return "there is no critic: nothing would be trained; set critic_warmup=0"


@rule(_ESTIMATOR, *TURN_KEYS)
def estimators_of_turns(config: PPOConfig) -> Findings:
    """An estimator of steps needs the turns of multi-turn rollout."""
    if (estimator := config.algorithm.estimator).turns and not turns_by(config):
        why = f"{estimator.name} needs the turns of multi-turn rollout, but responses have one turn"
        return (_ESTIMATOR, TURN_KEYS[0]), f"{why}; use grpo or reinforce"


@rule(_ESTIMATOR, "gdpo_reward_keys", "gdpo_reward_weights", "use_kl_in_reward")
def rewards_of_gdpo(config: PPOConfig) -> Findings:
    """gdpo is told rewards, and a weight for each or none; score, to which a KL penalty belongs, is among them."""
    algorithm, names, is_gdpo = config.algorithm, "gdpo_reward_keys", config.algorithm.adv_estimator == "gdpo"
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if is_gdpo and not keys:
        yield (_ESTIMATOR, names), "name the rewards to compare, for instance [score,acc]"
    if weights and len(weights) != len(keys):
        yield ("algorithm.gdpo_reward_weights", names), "give one weight for each key, or none"
    if is_gdpo and algorithm.use_kl_in_reward and "score" not in keys:
        fix = "add score to the keys, or use actor_rollout_ref.actor.use_kl_loss=true"
        yield ("algorithm.use_kl_in_reward", names), f"the penalty is part of score; {fix}"


@rule(_ESTIMATOR, "use_kl_in_reward", "whiten_rewards", *_NORMS, "algorithm.reward_scaling.center", _AGENT)
def rewards_of_maxrl(config: PPOConfig) -> Findings:
    """maxrl divides by a group's mean reward: what surely makes rewards negative is refused."""
    algorithm, norm, scaling = config.algorithm, config.algorithm.reward_norm, config.algorithm.reward_scaling
    centred = norm.mean is not None or (norm.kind is not None and (norm.shift or not norm.scale))
    signed = {
        "algorithm.use_kl_in_reward": (algorithm.use_kl_in_reward, "actor_rollout_ref.actor.use_kl_loss=true"),
        **dict.fromkeys(_by_norm(config), (centred, "reward_norm.std alone, or none")),
        "algorithm.reward_scaling.center": (scaling.enable and scaling.center, "center=false"),
        _AGENT: (algorithm.agent_reward_norm.method != "identity", "method=identity"),
        "algorithm.whiten_rewards": (algorithm.whiten_rewards, "whiten_rewards=false"),
    }
    for key, (is_on, instead) in signed.items() if algorithm.adv_estimator == "maxrl" else ():
        if is_on:
            yield (key, _ESTIMATOR), f"maxrl needs rewards of 0 or more; use {instead}"


@rule("algorithm.kl_ctrl.horizon", "data.train_batch_size", "actor_rollout_ref.rollout.n", reads=("type",))
def horizon_of_the_controller(config: PPOConfig) -> Findings:
    """A step moves the adaptive coefficient by up to 0.2 x sequences / horizon: at 1 it reaches 0."""
    control, n = config.algorithm.kl_ctrl, config.actor_rollout_ref.rollout.n
    moves = 0.2 * config.data.train_batch_size * n
    if config.algorithm.use_kl_in_reward and control.type == "adaptive" and moves >= control.horizon:
        why = "a step of so many sequences could take the coefficient to 0 or below"
        return f"{why}; set horizon above {math.ceil(moves)}"


def _no_critic(config: PPOConfig) -> bool:
    return not needs_critic(config.critic, config.algorithm)


_RULES = ("reward_model.rule", "rule_by_source", "rule_kwargs")
_OF_CLASSIFIERS = (
    *("reward_model.worker_class", "strategy", "micro_batch_size", "micro_batch_size_per_gpu", "max_length"),
    *("model_weight", "rule_weight", "use_dynamic_bsz", "forward_max_token_len_per_gpu"),
    *("ulysses_sequence_parallel_size", "reward_model.model.input_tokenizer", "reward_model.model.external_lib"),
    *("reward_model.model.use_shm", "reward_model.model.use_remove_padding", "reward_model.model.fsdp_config."),
)
idle("critic.", when=_no_critic, why="there is no critic (algorithm.adv_estimator is not gae)")
idle(
    *("algorithm.reward_norm.", "algorithm.reward_scaling.", "algorithm.agent_reward_norm.", "algorithm.reward_clip"),
    *("algorithm.token_reward_clip", "algorithm.whiten_rewards"),
    *("reward_model.length_reward.", "reward_model.overlong_buffer."),
    when=lambda c: c.algorithm.adv_estimator == "gdpo" and "score" not in c.algorithm.gdpo_reward_keys,
    why="algorithm.gdpo_reward_keys leaves out score, which it changes",
)
idle(
    *_RULES,
    when=lambda c: c.custom_reward_function.path is not None and not c.reward_model.weights,
    why="custom_reward_function.path grades all rows",
)
idle(
    *(*_RULES, "weights", "reward_model.judge.", "reward_manager", "data.self_check_rows"),
    when=lambda c: _classifies(c) and c.reward_model.rule_weight == 0,
    why="reward_model.rule_weight is 0 beside a reward model",
)
idle(
    *_OF_CLASSIFIERS,
    when=_generates,
    why="the reward model writes text: its server (reward_model.rollout) and its grader say how",
)
idle(
    "reward_model.rollout.",
    when=_classifies,
    why="the reward model is a sequence classifier, which scores in one forward pass in the trainer's processes; "
    "reward_model.model_type=generative serves one that writes text",
)
idle(
    "reward_model.reward_kwargs",
    when=lambda c: c.reward_model.reward_manager in REWARD_MANAGERS,
    why="reward_model.reward_manager is built in: only a class of your own takes arguments",
)
idle(
    "reward_model.judge.",
    when=lambda c: c.reward_model.judge.url is None and not _generates(c),
    why="reward_model.judge.url is not set",
)
