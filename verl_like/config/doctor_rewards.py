"""The doctor's checks of everything between a score and an advantage: reward shaping, dynamic sampling."""

import math
from collections.abc import Iterator

from verl_like.config.doctor_environments import has_turns
from verl_like.config.ppo import PPOConfig
from verl_like.config.reward import REWARD_MANAGERS
from verl_like.config.reward_execution import JudgeConfig
from verl_like.config.roles import generates
from verl_like.config.rollout import runs_agent_loops
from verl_like.config.schema import Idle, idle_while

_ROLLOUT = "actor_rollout_ref.rollout"


def impossible_rewards(config: PPOConfig) -> list[str]:
    """Combinations that cannot work: keys, values, fix."""
    return [
        *_managers(config),
        *_normalisation(config),
        *_overlong(config),
        *_filter_groups(config),
        *_groups(config),
        *_estimators(config),
        *_positive(config),
        *_controller(config),
    ]


def _managers(config: PPOConfig) -> Iterator[str]:
    """Graders that are set up and would never be asked."""
    reward = config.reward_model
    own = reward.reward_manager not in REWARD_MANAGERS
    if own and reward.weights:
        yield (
            f"reward_model.reward_manager={reward.reward_manager} with reward_model.weights: a class of your own gives "
            "the whole reward; add the parts up in it, or use reward_manager=naive"
        )
    asked = any(isinstance(parts, dict) and "judge" in parts for parts in reward.weights.values())
    others = {
        "custom_reward_function.path": config.custom_reward_function.path is not None,
        f"reward_model.reward_manager={reward.reward_manager}": own,
        "reward_model.weights": bool(reward.weights),
    }
    if reward.judge.prompt_file is not None and reward.judge.prompt != JudgeConfig().prompt:
        yield (
            f"reward_model.judge.prompt_file={reward.judge.prompt_file} with reward_model.judge.prompt: leave one out"
        )
    if reward.judge.url is not None and not asked and any(others.values()):
        named = " and ".join(name for name, is_set in others.items() if is_set)
        yield (
            f"reward_model.judge.url={reward.judge.url} with {named}: the judge would never be asked; name it in "
            "reward_model.weights, as in {'*': {custom: 1.0, judge: 0.5}}, or leave its url out"
        )


def _normalisation(config: PPOConfig) -> Iterator[str]:
    algorithm = config.algorithm
    norm, agent = algorithm.reward_norm, algorithm.agent_reward_norm
    if norm.kind is not None and (norm.mean, norm.std) != (None, None):
        yield (
            f"algorithm.reward_norm.kind={norm.kind} with mean={norm.mean}, std={norm.std}: kind is short for both; "
            "leave kind null, or mean and std"
        )
    on = [
        key
        for key, is_on in (
            ("algorithm.reward_norm", (norm.kind, norm.mean, norm.std) != (None, None, None)),
            ("algorithm.reward_scaling.enable", algorithm.reward_scaling.enable),
            ("algorithm.agent_reward_norm.method", agent.method != "identity"),
        )
        if is_on
    ]
    if len(on) > 1:
        yield f"{' and '.join(on)} are both set: rewards can be normalised in one way; keep one of them"
    if agent.method != "identity" and agent.grouping == "state" and config.actor_rollout_ref.rollout.n == 1:
        yield (
            f"algorithm.agent_reward_norm.method={agent.method} with grouping=state and {_ROLLOUT}.n=1: every group is "
            f"one response, so that all rewards become 0; set {_ROLLOUT}.n to 2 or more, or grouping=batch"
        )


def _overlong(config: PPOConfig) -> Iterator[str]:
    buffer, longest = config.reward_model.overlong_buffer, config.data.max_response_length
    if buffer.enable and not 0 < buffer.len <= longest:
        yield (
            f"reward_model.overlong_buffer.len={buffer.len} with enable=True: must be 1 to data.max_response_length="
            f"{longest}"
        )


def _filter_groups(config: PPOConfig) -> Iterator[str]:
    rules, data, n = config.algorithm.filter_groups, config.data, config.actor_rollout_ref.rollout.n
    if not rules.enable:
        return
    if n == 1:
        yield (
            f"algorithm.filter_groups.enable=True with {_ROLLOUT}.n=1: one response cannot differ from others; set "
            f"{_ROLLOUT}.n to 2 or more, or enable=false"
        )
    if rules.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        yield (
            "algorithm.filter_groups.metric=seq_final_reward with algorithm.use_kl_in_reward=True: groups are chosen "
            "before log-probs are known; use metric=seq_reward"
        )
    draw = data.gen_batch_size or data.train_batch_size
    if rules.resample and 0 < rules.max_num_gen_batches * draw < data.train_batch_size:
        yield (
            f"algorithm.filter_groups.max_num_gen_batches={rules.max_num_gen_batches} draws of data.gen_batch_size="
            f"{draw} can never fill data.train_batch_size={data.train_batch_size}; raise one of the two"
        )


def _groups(config: PPOConfig) -> Iterator[str]:
    rollout, least = config.actor_rollout_ref.rollout, config.algorithm.min_group_size
    extra, batch = rollout.scheduler.additional_prompts, config.data.train_batch_size
    if least is not None and least > rollout.n:
        yield (
            f"algorithm.min_group_size={least} with {_ROLLOUT}.n={rollout.n}: no group is so "
            "large; lower it, or raise n"
        )
    if extra.enable and extra.max > batch:
        yield (
            f"{_ROLLOUT}.scheduler.additional_prompts.max={extra.max} with data.train_batch_size={batch}: a prompt "
            "could be aborted step after step; lower it to the batch size or less"
        )
    if extra.enable and config.algorithm.filter_groups.enable and not config.algorithm.filter_groups.resample:
        yield (
            f"{_ROLLOUT}.scheduler.additional_prompts.enable=True with algorithm.filter_groups.resample=False: the "
            "batch is to keep groups without a signal; set one of the two to its default"
        )
    if extra.enable and config.algorithm.filter_groups.enable and scored_together(config):
        yield (
            f"{_ROLLOUT}.scheduler.additional_prompts.enable=True with algorithm.filter_groups.enable=True: a group is "
            f"chosen as soon as it ends, but {scored_together(config)} gives scores to whole batches; disable one of "
            "them"
        )


def scored_together(config: PPOConfig) -> str:
    """The setting by which responses get their scores as a batch; empty where each gets its own."""
    if config.actor_rollout_ref.rollout.scheduler.mode == "batch":
        return f"{_ROLLOUT}.scheduler.mode=batch"
    if config.reward_model.enable:
        return "reward_model.enable=True"
    return "reward_model.reward_manager=batch" if config.reward_model.reward_manager == "batch" else ""


def _estimators(config: PPOConfig) -> Iterator[str]:
    algorithm = config.algorithm
    estimator, keys, weights = algorithm.adv_estimator, algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if algorithm.estimator.turns and not has_turns(config):
        yield (
            f"algorithm.adv_estimator={estimator} needs the turns of multi-turn rollout, but {_ROLLOUT}.multi_turn."
            "enable=False: responses have one turn; use grpo or reinforce"
        )
    if estimator == "gdpo" and not keys:
        yield (
            "algorithm.adv_estimator=gdpo with algorithm.gdpo_reward_keys=[]: name the rewards to compare, for "
            "instance [score,acc]"
        )
    if weights and len(weights) != len(keys):
        yield (
            f"algorithm.gdpo_reward_weights={weights} with algorithm.gdpo_reward_keys={keys}: give one weight for each "
            "key, or none"
        )
    if estimator == "gdpo" and algorithm.use_kl_in_reward and "score" not in keys:
        yield (
            f"algorithm.use_kl_in_reward=True with algorithm.gdpo_reward_keys={keys}: the penalty is part of score; "
            "add score to the keys, or use actor_rollout_ref.actor.use_kl_loss=true"
        )


def _positive(config: PPOConfig) -> Iterator[str]:
    """maxrl divides by a group's mean reward: what surely makes rewards negative is refused at the start."""
    algorithm = config.algorithm
    if algorithm.adv_estimator != "maxrl":
        return
    norm, scaling = algorithm.reward_norm, algorithm.reward_scaling
    centred = norm.mean is not None or (norm.kind is not None and (norm.shift or not norm.scale))
    signed = (
        ("algorithm.use_kl_in_reward=True", algorithm.use_kl_in_reward, "actor_rollout_ref.actor.use_kl_loss=true"),
        ("algorithm.reward_norm with a mean", centred, "reward_norm.std alone, or none"),
        ("algorithm.reward_scaling.center=True", scaling.enable and scaling.center, "center=false"),
        ("algorithm.agent_reward_norm", algorithm.agent_reward_norm.method != "identity", "method=identity"),
        ("algorithm.whiten_rewards=True", algorithm.whiten_rewards, "whiten_rewards=false"),
    )
    for what, is_on, instead in signed:
        if is_on:
            yield f"{what} with algorithm.adv_estimator=maxrl: maxrl needs rewards of 0 or more; use {instead}"


def _controller(config: PPOConfig) -> Iterator[str]:
    """A step moves the adaptive coefficient by up to 0.2 x sequences / horizon: at 1 it reaches 0."""
    control = config.algorithm.kl_ctrl
    sequences = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    adapts = config.algorithm.use_kl_in_reward and control.type == "adaptive"
    if adapts and 0.2 * sequences >= control.horizon:
        yield (
            f"algorithm.kl_ctrl.horizon={control.horizon} with type=adaptive and {sequences} sequences a step (data."
            f"train_batch_size x {_ROLLOUT}.n): one step could take the coefficient to 0 or below; set horizon above "
            f"{math.ceil(0.2 * sequences)}"
        )


def risky_rewards(config: PPOConfig) -> Iterator[str]:
    """Terms that are switched on and add nothing."""
    length, buffer = config.reward_model.length_reward, config.reward_model.overlong_buffer
    if length.enable and length.coef == 0:
        yield (
            "reward_model.length_reward.enable=True with coef=0.0 adds nothing; set reward_model.length_reward.coef, "
            "below 0 for shorter responses"
        )
    if buffer.enable and buffer.penalty_factor == 0 and buffer.truncated != "zero":
        yield (
            "reward_model.overlong_buffer.enable=True with penalty_factor=0.0 punishes nothing; set "
            "reward_model.overlong_buffer.penalty_factor (DAPO: 1.0)"
        )
    model = config.reward_model
    if model.enable and model.rule_weight == 0 and runs_agent_loops(config.actor_rollout_ref.rollout):
        yield (
            "reward_model.enable=True with rule_weight=0.0 and agent loops: a reward_score that a loop returns counts "
            "nothing beside the reward model; set reward_model.rule_weight to what it counts"
        )


REWARD_IDLE: tuple[Idle, ...] = (
    Idle(
        (
            *(f"algorithm.{name}" for name in ("reward_norm.", "reward_scaling.", "agent_reward_norm.", "reward_clip")),
            *("algorithm.token_reward_clip", "algorithm.whiten_rewards"),
            *("reward_model.length_reward.", "reward_model.overlong_buffer."),
        ),
        lambda c: c.algorithm.adv_estimator == "gdpo" and "score" not in c.algorithm.gdpo_reward_keys,
        "algorithm.gdpo_reward_keys leaves out score, which it changes",
    ),
    Idle(
        ("reward_model.reward_kwargs",),
        lambda c: c.reward_model.reward_manager in REWARD_MANAGERS,
        "reward_model.reward_manager is built in: only a class of your own takes arguments",
    ),
    Idle(
        ("reward_model.judge.",),
        lambda c: c.reward_model.judge.url is None and not generates(c.reward_model, c.custom_reward_function),
        "reward_model.judge.url is not set",
    ),
    Idle(("algorithm.reward_clip",), lambda c: not c.algorithm.reward_clip, "0 means off"),
    Idle(("algorithm.token_reward_clip",), lambda c: not c.algorithm.token_reward_clip, "0 means off"),
    Idle(("algorithm.advantage_clip",), lambda c: not c.algorithm.advantage_clip, "0 means off"),
    idle_while(
        "algorithm.filter_groups.enable",
        "false",
        *(
            f"algorithm.filter_groups.{name}"
            for name in ("metric", "range", "std_threshold", "resample", "max_num_gen_batches")
        ),
    ),
    Idle(
        ("data.gen_batch_size",),
        lambda c: not c.algorithm.filter_groups.enable,
        "only dynamic sampling draws more than once a step, and algorithm.filter_groups.enable is false",
    ),
    idle_while(
        "algorithm.filter_groups.resample",
        "false: prompts are drawn once a step",
        "data.gen_batch_size",
        "algorithm.filter_groups.max_num_gen_batches",
    ),
    Idle(
        ("reward_model.launch_reward_fn_async",),
        lambda c: c.algorithm.filter_groups.enable,
        "algorithm.filter_groups chooses groups by their scores, so grading ends before log-probs are computed",
    ),
)
