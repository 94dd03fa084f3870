"""Parts of `algorithm.*` and `reward_model.*` that change a reward before advantages are computed."""

from dataclasses import dataclass
from enum import StrEnum

from verl_like.config.base import ConfigNode, at_least, key, one_of, rising_pair, such_that

_SCOPES = one_of("batch", "group", "running")


class ReweightMethod(StrEnum):
    """Method by which PF-PPO resamples responses."""

    pow = "pow"
    max_min = "max_min"
    max_random = "max_random"


class AgentNormMethod(StrEnum):
    """Method by which algorithm.agent_reward_norm changes the rewards of a group."""

    identity = "identity"
    mean = "mean"
    mean_std = "mean_std"
    asym_clip = "asym_clip"


class TruncatedRows(StrEnum):
    """Treatment of responses that were cut off, in the overlong buffer."""

    penalise = "penalise"
    zero = "zero"
    keep = "keep"


@dataclass(kw_only=True, slots=True)
class RewardNormConfig(ConfigNode):
    """`algorithm.reward_norm.*`: (reward - mean) / (std + 1e-6), each statistic over a scope of its own (ROLL)."""

    mean: str | None = key(None, _SCOPES)
    """Which mean is subtracted: batch, group (responses to one prompt) or running (all steps so far). Null: none."""
    std: str | None = key(None, _SCOPES)
    """Which standard deviation divides: batch, group or running. Null: none. Rewards without spread stay undivided."""
    kind: str | None = key(None, _SCOPES)
    """Short form: batch, group or running sets mean and std at once. Null: mean and std count."""
    shift: bool = key(False, idle="kind is null")
    """With kind: subtract the mean, divide by nothing."""
    scale: bool = key(False, idle=("kind is null", "shift is true: shift wins over it"))
    """With kind: divide by the standard deviation, subtract nothing. shift wins over it."""


@dataclass(kw_only=True, slots=True)
class RewardScalingConfig(ConfigNode):
    """`algorithm.reward_scaling.*`: division by the running standard deviation (TRL's use_score_scaling)."""

    enable: bool = False
    """Short form of reward_norm.std=running."""
    center: bool = key(False, idle="enable is false: centring belongs to scaling")
    """Also reward_norm.mean=running (TRL's use_score_norm). Nothing without enable."""


@dataclass(kw_only=True, slots=True)
class AgentRewardNormConfig(ConfigNode):
    """`algorithm.agent_reward_norm.*`: normalisation of episode rewards over groups of one's choice (RAGEN, ROLL)."""

    grouping: str = key(
        "state", such_that(bool, "name state, inductive, batch or an extra_info column"), idle="method is identity"
    )
    """Rows that are compared: state (same prompt, that is, same initial state), inductive (same data_source, that is,
    same kind of task), batch (all), or the name of an extra_info column."""
    method: AgentNormMethod = AgentNormMethod.identity
    """identity (off), mean (subtract it), mean_std (and divide), asym_clip (mean_std, then clip)."""
    clip: list[float] = key([-1.0, 3.0], rising_pair(), idle="method is not asym_clip")
    """Lowest and highest value that asym_clip lets through."""


@dataclass(kw_only=True, slots=True)
class PFPPOConfig(ConfigNode):
    """`algorithm.pf_ppo.*`: resampling of responses by score."""

    reweight_method: ReweightMethod = ReweightMethod.pow
    """Weight of a row: pow (|score| ** weight_pow), max_min (1 for the best and the worst score, 0 else) or max_random
    (0.4 for the best score, 0.1 else)."""
    weight_pow: float = key(2.0, at_least(0), idle="reweight_method is not pow")
    """Exponent of pow."""


@dataclass(kw_only=True, slots=True)
class LengthRewardConfig(ConfigNode):
    """`reward_model.length_reward.*`: a reward for length."""

    enable: bool = False
    """Add coef * response tokens / data.max_response_length to each score."""
    coef: float = key(0.0, idle="enable is false")
    """Reward of a response that uses the whole budget; below 0 punishes length."""


@dataclass(kw_only=True, slots=True)
class OverlongBufferConfig(ConfigNode):
    """`reward_model.overlong_buffer.*`: soft punishment of long responses (DAPO, arXiv 2503.14476)."""

    enable: bool = False
    """Punish responses that end in the last `len` tokens of data.max_response_length, linearly."""
    len: int = key(0, at_least(0), unit="tokens", idle="enable is false")
    """Width of the punished zone."""
    penalty_factor: float = key(0.0, at_least(0), idle="enable is false")
    """Punishment at the end of the zone, and at most."""
    log: bool = key(False, idle="enable is false")
    """Report the punishment as a metric (reward/overlong_reward/mean, reward/overlong/mean)."""
    truncated: TruncatedRows = key(TruncatedRows.penalise, idle="enable is false")
    """Responses that were cut off (finish reason length): penalise (by their length, as DAPO), zero (reward 0, as
    Colossal-RL) or keep (no punishment)."""
    only_key: str | None = key(None, idle="enable is false")
    """Punish only rows for which the reward function returned something true under this name (Colossal-RL: rows in
    which an answer was found). Null: all."""
