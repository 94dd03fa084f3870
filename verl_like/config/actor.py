"""`actor_rollout_ref.{actor,ref}.*`: the policy's update and the frozen reference."""

from dataclasses import dataclass
from enum import StrEnum

from verl_like.config.base import ConfigNode, above, at_least, between, key, on_menu, one_of, require, section
from verl_like.config.fsdp import FSDPConfig, Strategy
from verl_like.config.menus import AGGREGATIONS, KL_KINDS, KL_MENU, LOSSES, Loss
from verl_like.config.optim import OptimConfig
from verl_like.config.profiler import CheckpointConfig, ProfilerConfig

_FUSED = "actor_rollout_ref.model.use_fused_kernels is true: it makes no [tokens x vocabulary] tensor"


class RatioLevel(StrEnum):
    """Unit of a probability ratio: a whole row, or each token."""

    seq = "seq"
    token = "token"


class RewardSource(StrEnum):
    """Quantity that topr takes as the reward of a row."""

    advantage = "advantage"
    score = "score"


class WeightScope(StrEnum):
    """Over which rows sample weights are computed and normalised."""

    mini_batch = "mini_batch"
    batch = "batch"


class OldLogProbs(StrEnum):
    """Source of the log-probabilities of the policy before the update."""

    auto = "auto"
    recompute = "recompute"
    rollout = "rollout"
    detach = "detach"


@dataclass(kw_only=True, slots=True)
class ToprConfig(ConfigNode):
    """`actor.policy_loss.topr.*`."""

    positive_weight: float = key(1.0, at_least(0))
    """Weight of rows (or tokens) with a reward of 0 or more."""
    negative_weight: float = key(1.0, at_least(0))
    """Weight of the others, times their ratio cut at 1."""
    ratio_level: RatioLevel = RatioLevel.seq
    """seq: one ratio and one sign for the row, as published; token: each token its own."""
    reward_source: RewardSource = RewardSource.advantage
    """advantage: of adv_estimator; score: the row's score as graded, without baseline."""


@dataclass(kw_only=True, slots=True)
class SampleWeightConfig(ConfigNode):
    """`actor.sample_weight.*`: weights of rows in the policy loss; their mean over the scope is 1."""

    difficulty: bool = False
    """Weight 0.5 + 1.5 x difficulty, the row's difficulty cut to [0, 1]."""
    length: bool = False
    """Weight from 1.5 for the shortest response down to 0.5 for the longest."""
    difficulty_key: str = key("difficulty", idle="difficulty is false")
    """Name of the number in a dataset row's extra_info that says how difficult it is."""
    scope: WeightScope = WeightScope.mini_batch
    """Rows over which lengths are compared and weights normalised: mini_batch (one optimizer step) or batch (the whole
    rollout batch)."""


class BalanceForm(StrEnum):
    """Tokens over which the load of experts is compared in the balance loss."""

    batch = "batch"
    sequence = "sequence"


@dataclass(kw_only=True, slots=True)
class RouterConfig(ConfigNode):
    """`actor.router.*`: routers of mixtures of experts."""

    balance_loss_coef: float = key(0.0, at_least(0))
    """Weight of the load-balancing loss: 1 in a layer whose experts all get as many tokens. 0: off."""
    balance_loss_form: BalanceForm = key(BalanceForm.batch, idle="balance_loss_coef is 0")
    """batch: loads over the whole mini-batch and all processes, counted in a forward pass of its own; sequence: of each
    sequence, as DeepSeek-V3."""
    z_loss_coef: float = key(0.0, at_least(0))
    """Weight of the mean square of log(sum(exp(logits))), which keeps routers' logits small. 0: off."""
    bias_update_rate: float = key(0.0, at_least(0))
    """Step of the bias of routers that have one (DeepSeek-V3, GLM-4.5), after each update: up for experts with fewer
    tokens than the mean, down for others. 0: the bias stays as it was loaded."""

    @property
    def has_losses(self) -> bool:
        """True where a loss of the routers is added to the policy's."""
        return self.balance_loss_coef > 0 or self.z_loss_coef > 0

    @property
    def counts_tokens(self) -> bool:
        """True where it matters how often a token is computed: tokens that are there once depend on the cut of rows."""
        return self.has_losses or self.bias_update_rate > 0


class ReplayMode(StrEnum):
    """Pass whose routes the updates replay."""

    disabled = "disabled"
    R2 = "R2"
    R3 = "R3"


@dataclass(kw_only=True, slots=True)
class RouterReplayConfig(ConfigNode):
    """`actor.router_replay.*`: experts chosen earlier, in place of those a router would choose now."""

    mode: ReplayMode = ReplayMode.disabled
    """R2: those of the pass of old log-probs, in the updates; R3: the rollout engine's, in that pass and the updates
    (rollout.enable_rollout_routing_replay). Scores of the chosen experts stay the router's own, with their gradient."""


@dataclass(kw_only=True, slots=True)
class PolicyLossConfig(ConfigNode):
    """`actor.policy_loss.*`."""

    loss_mode: str = key("vanilla", on_menu("actor_rollout_ref.actor.policy_loss.loss_mode", *LOSSES))
    """Policy loss ([formulas](algorithms.md#policy-losses-actorpolicy_lossloss_mode)); vanilla is PPO's clipped one. Or
    a function of your own, file.py:name."""
    clip_cov_ratio: float = key(0.0002, between(0, 1), unit="share of tokens")
    """clip_cov: tokens of a mini-batch whose gradient is detached, at least one; 0: none."""
    clip_cov_lb: float = 1.0
    """clip_cov: lower bound of the covariance window."""
    clip_cov_ub: float = 5.0
    """clip_cov: upper bound of the covariance window."""
    kl_cov_ratio: float = key(0.0002, between(0, 1), unit="share of tokens")
    """kl_cov: tokens of a mini-batch that get a KL penalty, at least one; 0: none."""
    ppo_kl_coef: float = key(0.1, at_least(0))
    """kl_cov: weight of that penalty."""
    dro_beta: float = key(0.1, above(0))
    """dro: weight of the squared distance from the old log-probs."""
    kimi_tau: float = key(0.1, above(0))
    """kimi: weight of the squared distance of a row's log-prob from the old one."""
    vespo_k_pos: float = key(2.0, at_least(0))
    """vespo: exponent of the row's ratio where the advantage is 0 or more."""
    vespo_lambda_pos: float = key(3.0, at_least(0))
    """vespo: decay with the row's ratio where the advantage is 0 or more."""
    vespo_k_neg: float = key(3.0, at_least(0))
    """vespo: exponent elsewhere."""
    vespo_lambda_neg: float = key(2.0, at_least(0))
    """vespo: decay elsewhere."""
    topr: ToprConfig = section(ToprConfig)
    """Options of topr."""

    def check(self) -> None:
        lb, ub = self.clip_cov_lb, self.clip_cov_ub
        require(lb < ub, "clip_cov_lb", lb, f"must be below clip_cov_ub={ub!r}")

    @property
    def loss(self) -> Loss:
        """Row of loss_mode: what it reads and needs; of code of the user's own nothing is known."""
        return LOSSES.get(self.loss_mode) or Loss(name=self.loss_mode)


@dataclass(kw_only=True, slots=True)
class ActorConfig(ConfigNode):
    """`actor_rollout_ref.actor.*`."""

    strategy: Strategy = Strategy.fsdp2
    """Sharding backend; `fsdp` is another name of fsdp2."""
    ppo_mini_batch_size: int = key(256, at_least(1), unit="prompts")
    """Prompts of one optimizer step (x rollout.n sequences), over all processes."""
    ppo_micro_batch_size: int | None = key(None, at_least(1), unit="sequences, all processes")
    """Deprecated: divided by the data-parallel size. Use ppo_micro_batch_size_per_gpu."""
    ppo_micro_batch_size_per_gpu: int | None = key(None, at_least(1), unit="sequences")
    """Sequences of one forward and backward on one process."""
    use_dynamic_bsz: bool | None = None
    """Cut micro-batches by tokens (ppo_max_token_len_per_gpu), not by number of sequences. Null: by tokens, unless a
    micro-batch size is given."""
    ppo_max_token_len_per_gpu: int = key(16384, at_least(1), unit="tokens")
    """Token budget of one micro-batch on one process."""
    grad_clip: float = key(1.0, above(0))
    """Largest gradient norm; larger gradients are scaled down."""
    clip_ratio: float = key(0.2, at_least(0))
    """PPO clip range of the probability ratio, both sides."""
    clip_ratio_low: float | None = key(None, at_least(0))
    """Lower side of the clip range. Null: clip_ratio."""
    clip_ratio_high: float | None = key(None, at_least(0))
    """Upper side of the clip range. Null: clip_ratio."""
    clip_ratio_c: float | None = key(3.0, above(1))
    """Dual clip: for negative advantages the loss is capped at this ratio. Null: no dual clip."""
    tau_pos: float = key(1.0, above(0))
    """sapo: steepness of the gate where the advantage is positive."""
    tau_neg: float = key(1.05, above(0))
    """sapo: steepness of the gate elsewhere."""
    loss_agg_mode: str | None = key(None, one_of(*AGGREGATIONS))
    """How token losses become one number. Null: token-mean; with gspo and gspo_token as published,
    seq-mean-token-mean."""
    loss_scale_factor: float | None = key(
        None, above(0), unit="tokens", idle="loss_agg_mode is not seq-mean-token-sum-norm"
    )
    """Divisor of seq-mean-token-sum-norm. Null: data.max_response_length."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add a KL term against the reference model to the loss."""
    kl_loss_coef: float = key(0.001, at_least(0), idle="use_kl_loss is false")
    """Weight of that KL term."""
    kl_loss_type: str = key("low_var_kl", on_menu(KL_MENU, *KL_KINDS), idle="use_kl_loss is false")
    """Estimator of that KL term: kl (k1), abs, mse (k2), low_var_kl (k3), or full (exact, over the vocabulary); with +
    its value and the gradient of k2; or a function of your own, file.py:name."""
    use_unbiased_kl: bool = key(False, idle="use_kl_loss is false")
    """Multiply that KL term by the probability ratio: value and gradient then hold for off-policy rows too. With
    kl (k1) and low_var_kl (k3) only."""
    rl_loss_coef: float = key(1.0, at_least(0))
    """Weight of policy loss and KL term together; entropy and sft terms keep their own."""
    sft_loss_coef: float = key(0.0, at_least(0))
    """Weight of -log_prob on rows with a score above 0 (imitation of good responses); 0: off."""
    sample_weight: SampleWeightConfig = section(SampleWeightConfig)
    """Weights of rows in the policy loss."""
    # Below 1 it would skip rows that the policy sampled itself
    ratio_skip_threshold: float | None = key(None, at_least(1), unit="ratio")
    """Rows whose mean token ratio is above it (1 or more) add nothing to the loss. Null: none is skipped."""
    mask_truncated: bool = False
    """Leave cut-off responses (finish reason length) out of the actor's update; their scores count in the baseline."""
    router: RouterConfig = section(RouterConfig)
    """Losses and biases of routers, all off."""
    router_replay: RouterReplayConfig = section(RouterReplayConfig)
    """Replay of routes in mixtures of experts."""
    freeze_vision_tower: bool = False
    """Vision-language models: train the language model alone; the tower then keeps no activations."""
    use_torch_compile: bool = False
    """Compile the model's layers with torch.compile."""
    ppo_epochs: int = key(1, at_least(1))
    """Passes over the rollout batch in each step."""
    shuffle: bool = False
    """Shuffle prompts before cutting mini-batches, by seed and epoch."""
    old_log_probs: OldLogProbs = OldLogProbs.auto
    """Log-probs before the update: recompute (a forward pass), rollout (the sampler's), detach (the first forward of
    the update, exact with one update per step), auto (detach with one update per step, else recompute)."""
    policy_loss: PolicyLossConfig = section(PolicyLossConfig)
    """Which policy loss."""
    ulysses_sequence_parallel_size: int = key(1, at_least(1), unit="processes")
    """Processes that share one sequence."""
    entropy_from_logits_with_chunking: bool = key(False, idle=f"{_FUSED}, and computes entropy in chunks")
    """Entropy from full logits (model.use_fused_kernels=false) 2,048 tokens at a time."""
    entropy_checkpointing: bool = key(False, idle=f"{_FUSED}, and recomputes it in the backward pass")
    """Entropy from full logits (model.use_fused_kernels=false) again in the backward pass, for which it keeps less."""
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    """What checkpoints hold."""
    optim: OptimConfig = section(OptimConfig)
    """Optimizer and schedule."""
    fsdp_config: FSDPConfig = section(FSDPConfig)
    """Sharding of the actor."""
    profiler: ProfilerConfig = section(ProfilerConfig)
    """Profiling of the actor."""

    def check(self) -> None:
        not_both(self, "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu")


@dataclass(kw_only=True, slots=True)
class RefConfig(ConfigNode):
    """`actor_rollout_ref.ref.*`: the frozen reference, present with use_kl_loss or use_kl_in_reward."""

    strategy: Strategy = Strategy.fsdp2
    """Sharding backend; follows the actor's."""
    log_prob_micro_batch_size: int | None = key(None, at_least(1), unit="sequences, all processes")
    """Deprecated: divided by the data-parallel size. Use the per_gpu key."""
    log_prob_micro_batch_size_per_gpu: int | None = key(None, at_least(1), unit="sequences")
    """Sequences of one forward. Null: the actor's, where micro-batches are not cut by tokens."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Cut micro-batches by tokens; follows the actor's. Null: unless a size is given here, or else the actor's way."""
    log_prob_max_token_len_per_gpu: int = key(16384, at_least(1), unit="tokens")
    """Token budget of one forward; follows the actor's."""
    ulysses_sequence_parallel_size: int = key(1, at_least(1), unit="processes")
    """Processes that share one sequence; follows the actor's."""
    use_torch_compile: bool = False
    """Compile the reference's layers; follows the actor's."""
    entropy_from_logits_with_chunking: bool = False
    """Accepted: the reference's entropy is not computed."""
    entropy_checkpointing: bool = False
    """Accepted: the reference's entropy is not computed."""
    fsdp_config: FSDPConfig = section(FSDPConfig)
    """Sharding of the reference."""
    profiler: ProfilerConfig = section(ProfilerConfig)
    """Profiling of the reference."""

    def check(self) -> None:
        not_both(self, "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu")


def not_both(node: ConfigNode, deprecated: str, key: str) -> None:
    """A global micro-batch size and its per-process successor exclude each other."""
    old, new = getattr(node, deprecated), getattr(node, key)
    require(old is None or new is None, deprecated, old, f"{key}={new!r} is set as well; remove {deprecated}")
