"""`algorithm.*`: advantages and the KL penalty in the reward."""

from dataclasses import dataclass
from enum import StrEnum

from verl_like.config.base import ConfigNode, above, at_least, between, key, on_menu, rising_pair, section
from verl_like.config.correction import RolloutCorrectionConfig
from verl_like.config.menus import ESTIMATORS, KL_KINDS, KL_MENU, Estimator
from verl_like.config.shaping import AgentRewardNormConfig, PFPPOConfig, RewardNormConfig, RewardScalingConfig


class KLControlType(StrEnum):
    """Control of the coefficient of the KL penalty in the reward."""

    fixed = "fixed"
    adaptive = "adaptive"


@dataclass(kw_only=True, slots=True)
class KLControlConfig(ConfigNode):
    """`algorithm.kl_ctrl.*`: coefficient of the KL penalty in the reward."""

    type: KLControlType = KLControlType.fixed
    """fixed, or adaptive (moves the coefficient towards target_kl)."""
    kl_coef: float = key(0.001, at_least(0))
    """Coefficient, or its start."""
    horizon: int = key(10000, at_least(1), unit="sequences", idle="type is fixed")
    """Time constant of the adaptive controller."""
    target_kl: float = key(0.1, above(0), unit="nats", idle="type is fixed")
    """KL the adaptive controller aims at."""


@dataclass(kw_only=True, slots=True)
class GiGPOConfig(ConfigNode):
    """`algorithm.gigpo.*`: weights of the two advantages of gigpo."""

    episode_weight: float = key(1.0, at_least(0))
    """Weight of the advantage of the whole response."""
    step_weight: float = key(1.0, at_least(0))
    """Weight of the advantage of the turn."""


@dataclass(kw_only=True, slots=True)
class FilterGroupsConfig(ConfigNode):
    """`algorithm.filter_groups.*`: dynamic sampling, drops groups whose responses all score the same (DAPO)."""

    enable: bool = False
    """Train on groups with a signal only: draw prompts until train_batch_size such groups are found."""
    metric: str | None = key(None, idle="enable is false")
    """What is compared: score (null means that), seq_reward or seq_final_reward (score with length reward and overlong
    punishment), or a number that the reward function returns, such as acc."""
    range: list[float] | None = key(None, rising_pair(), idle="enable is false")
    """Keep groups whose mean lies strictly between these two numbers (Colossal-RL: [0.01,0.99] of acc). Null: any."""
    std_threshold: float | None = key(None, at_least(-1), idle="enable is false")
    """Keep groups whose standard deviation is above this. Null: 0, or no such condition when range is set."""
    resample: bool = key(True, idle="enable is false")
    """true: draw again for groups that were dropped. false: draw once, keep them and mask their loss (Colossal-RL)."""
    max_num_gen_batches: int = key(
        0, at_least(0), unit="draws", idle=("enable is false", "resample is false: prompts are drawn once a step")
    )
    """Most draws for one step, then the run stops. 0: as many as give every training prompt ten times."""


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig(ConfigNode):
    """`algorithm.*`."""

    adv_estimator: str = key("gae", on_menu("algorithm.adv_estimator", *ESTIMATORS))
    """Advantage estimator ([formulas](algorithms.md#advantage-estimators-algorithmadv_estimator)); gae has a critic. Or
    a function of your own, file.py:name."""
    gamma: float = key(1.0, between(0, 1))
    """Discount of future rewards, per token."""
    lam: float = key(1.0, between(0, 1))
    """Trade between bias and variance in gae."""
    norm_adv_by_std_in_grpo: bool = True
    """grpo, grpo_passk, gdpo, gigpo: divide advantages by the group's standard deviation (false: Dr. GRPO)."""
    gdpo_reward_keys: list[str] = key([])
    """gdpo: rewards that are normalised one by one. score is the response's reward; others as the reward function names
    them, such as acc."""
    gdpo_reward_weights: list[float] = key([])
    """gdpo: weight of each of them. Empty: 1."""
    step_reward_gamma: float = key(0.95, between(0, 1))
    """gigpo, step_reinforce: discount of future rewards, per turn."""
    gigpo: GiGPOConfig = section(GiGPOConfig)
    """Weights of gigpo."""
    use_kl_in_reward: bool = False
    """Subtract a KL penalty against the reference from the token rewards."""
    kl_penalty: str = key("kl", on_menu(KL_MENU, *KL_KINDS), idle="use_kl_in_reward is false")
    """Estimator of that penalty: kl (k1), abs, mse (k2), low_var_kl (k3), or full (exact, over the vocabulary); or a
    function of your own, file.py:name."""
    kl_ctrl: KLControlConfig = section(KLControlConfig, idle="use_kl_in_reward is false")
    """Coefficient of that penalty."""
    reward_norm: RewardNormConfig = section(RewardNormConfig)
    """Normalisation of the rewards of responses."""
    reward_scaling: RewardScalingConfig = section(RewardScalingConfig)
    """Short forms of reward_norm over all steps."""
    agent_reward_norm: AgentRewardNormConfig = section(AgentRewardNormConfig)
    """Normalisation over groups of one's choice, in place of reward_norm."""
    reward_clip: float | None = key(None, at_least(0), idle="reward_clip is 0: off")
    """Clip the reward of a response to +- this, after normalisation. Null or 0: off."""
    token_reward_clip: float | None = key(None, at_least(0), idle="token_reward_clip is 0: off")
    """Clip the reward of each token to +- this, after the KL penalty. Null or 0: off."""
    whiten_rewards: bool = False
    """Whiten token rewards over all sampled tokens, before advantages: tokens without a reward get one too."""
    whiten_advantages: bool = False
    """Whiten advantages over all sampled tokens."""
    advantage_clip: float | None = key(None, at_least(0), idle="advantage_clip is 0: off")
    """Clip advantages to +- this, after whitening. Null or 0: off."""
    use_pf_ppo: bool = False
    """Resample responses by score, after advantages (PF-PPO)."""
    pf_ppo: PFPPOConfig = section(PFPPOConfig, idle="use_pf_ppo is false")
    """Options of PF-PPO."""
    min_group_size: int | None = key(None, at_least(1), unit="responses")
    """A prompt's responses are trained on where at least so many have a score; the others of the batch are counted
    (groups/too_small). With filter_groups another prompt is drawn instead. Null: any number."""
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig)
    """Dynamic sampling."""
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)
    """Weights and rejections against the mismatch of trainer and rollout engine."""

    @property
    def estimator(self) -> Estimator:
        """Row of adv_estimator: what it reads and needs; of code of the user's own nothing is known."""
        return ESTIMATORS.get(self.adv_estimator) or Estimator(name=self.adv_estimator)
