"""Knobs that each policy loss reads, aggregations that some prescribe, and losses that select tokens beforehand.

The doctor warns by these tables; tests/unit/algorithms/test_loss_knobs.py proves them against the losses themselves.
"""

_RATIO_BOUNDS = ("vanilla", "gspo", "gspo_token", "luspo", "geo_mean", "clip_cov", "cispo", "dppo_tv", "dppo_kl")

# Key below actor_rollout_ref.actor -> the losses whose numbers depend on it.
READ_BY: dict[str, tuple[str, ...]] = {
    "clip_ratio": _RATIO_BOUNDS,
    "clip_ratio_low": _RATIO_BOUNDS,
    "clip_ratio_high": _RATIO_BOUNDS,
    "clip_ratio_c": ("vanilla", "dppo_tv", "dppo_kl"),
    "tau_pos": ("sapo",),
    "tau_neg": ("sapo",),
    "policy_loss.clip_cov_ratio": ("clip_cov",),
    "policy_loss.clip_cov_lb": ("clip_cov",),
    "policy_loss.clip_cov_ub": ("clip_cov",),
    "policy_loss.kl_cov_ratio": ("kl_cov",),
    "policy_loss.ppo_kl_coef": ("kl_cov",),
    "policy_loss.dro_beta": ("dro",),
    "policy_loss.kimi_tau": ("kimi",),
    "policy_loss.vespo_k_pos": ("vespo",),
    "policy_loss.vespo_lambda_pos": ("vespo",),
    "policy_loss.vespo_k_neg": ("vespo",),
    "policy_loss.vespo_lambda_neg": ("vespo",),
    "policy_loss.topr.positive_weight": ("topr",),
    "policy_loss.topr.negative_weight": ("topr",),
    "policy_loss.topr.ratio_level": ("topr",),
    "policy_loss.topr.reward_source": ("topr",),
}

# Of those, the ones that change no gradient while every ratio is 1.
IDLE_AT_RATIO_ONE = (
    "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg", "policy_loss.dro_beta",
    "policy_loss.kimi_tau", "policy_loss.vespo_k_pos", "policy_loss.vespo_lambda_pos", "policy_loss.vespo_k_neg",
    "policy_loss.vespo_lambda_neg",
)  # fmt: skip

# These say themselves how tokens are joined; loss_agg_mode then joins entropy, KL and sft terms alone.
FIXED_AGGREGATION: dict[str, str] = {
    "geo_mean": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
    "vespo": "token-mean",
}

# The driver chooses tokens for them over the whole mini-batch, from the old log-probs.
SELECTING_LOSSES = ("clip_cov", "kl_cov")

# Estimators whose value is unbiased on samples of the policy: those that a ratio carries over to other samples.
UNBIASED_KL_KINDS = ("kl", "k1", "low_var_kl", "k3")
