"""Parts of `algorithm.*` and `reward_model.*` that change a reward before advantages are computed."""

from dataclasses import dataclass, field

from verl_like.config.base import ConfigNode, at_least, one_of, require
from verl_like.config.enums import NORM_SCOPES, AgentNormMethod, ReweightMethod, TruncatedRows


@dataclass(kw_only=True, slots=True)
class RewardNormConfig(ConfigNode):
    """`algorithm.reward_norm.*`: (reward - mean) / (std + 1e-6), each statistic over a scope of its own (ROLL)."""

    mean: str | None = None
    """Which mean is subtracted: batch, group (responses to one prompt) or running (all steps so far). Null: none."""
    std: str | None = None
    """Which standard deviation divides: batch, group or running. Null: none. Rewards without spread stay undivided."""
    kind: str | None = None
    """Short form: batch, group or running sets mean and std at once. Null: mean and std count."""
    shift: bool = False
    """With kind: subtract the mean, divide by nothing."""
    scale: bool = False
    """With kind: divide by the standard deviation, subtract nothing. shift wins over it."""

    def check(self) -> None:
        for key in ("mean", "std", "kind"):
            if getattr(self, key) is not None:
                one_of(self, key, NORM_SCOPES)


@dataclass(kw_only=True, slots=True)
class RewardScalingConfig(ConfigNode):
    """`algorithm.reward_scaling.*`: division by the running standard deviation (TRL's use_score_scaling)."""

    enable: bool = False
    """Short form of reward_norm.std=running."""
    center: bool = False
    """Also reward_norm.mean=running (TRL's use_score_norm). Nothing without enable."""


@dataclass(kw_only=True, slots=True)
class AgentRewardNormConfig(ConfigNode):
    """`algorithm.agent_reward_norm.*`: normalisation of episode rewards over groups of one's choice (RAGEN, ROLL)."""

    grouping: str = "state"
    """Rows that are compared: state (same prompt, that is, same initial state), inductive (same data_source, that is,
    same kind of task), batch (all), or the name of an extra_info column."""
    method: AgentNormMethod = AgentNormMethod.identity
    """identity (off), mean (subtract it), mean_std (and divide), asym_clip (mean_std, then clip)."""
    clip: list[float] = field(default_factory=lambda: [-1.0, 3.0])
    """Lowest and highest value that asym_clip lets through."""

    def check(self) -> None:
        legal = len(self.clip) == 2 and self.clip[0] < self.clip[1]
        require(legal, "clip", self.clip, "give two numbers, the lower one first")
        require(bool(self.grouping), "grouping", self.grouping, "name state, inductive, batch or an extra_info column")


@dataclass(kw_only=True, slots=True)
class PFPPOConfig(ConfigNode):
    """`algorithm.pf_ppo.*`: resampling of responses by score."""

    reweight_method: ReweightMethod = ReweightMethod.pow
    """Weight of a row: pow (|score| ** weight_pow), max_min (1 for the best and the worst score, 0 else) or max_random
    (0.4 for the best score, 0.1 else)."""
    weight_pow: float = 2.0
    """Exponent of pow."""

    def check(self) -> None:
        at_least(self, 0, "weight_pow")


@dataclass(kw_only=True, slots=True)
class LengthRewardConfig(ConfigNode):
    """`reward_model.length_reward.*`: a reward for length."""

    enable: bool = False
    """Add coef * response tokens / data.max_response_length to each score."""
    coef: float = 0.0
    """Reward of a response that uses the whole budget; below 0 punishes length."""


@dataclass(kw_only=True, slots=True)
class OverlongBufferConfig(ConfigNode):
    """`reward_model.overlong_buffer.*`: soft punishment of long responses (DAPO, arXiv 2503.14476)."""

    enable: bool = False
    """Punish responses that end in the last `len` tokens of data.max_response_length, linearly."""
    len: int = 0
    """[tokens] Width of the punished zone."""
    penalty_factor: float = 0.0
    """Punishment at the end of the zone, and at most."""
    log: bool = False
    """Report the punishment as a metric (reward/overlong_reward/mean, reward/overlong/mean)."""
    truncated: TruncatedRows = TruncatedRows.penalise
    """Responses that were cut off (finish reason length): penalise (by their length, as DAPO), zero (reward 0, as
    Colossal-RL) or keep (no punishment)."""
    only_key: str | None = None
    """Punish only rows for which the reward function returned something true under this name (Colossal-RL: rows in
    which an answer was found). Null: all."""

    def check(self) -> None:
        at_least(self, 0, "len", "penalty_factor")
