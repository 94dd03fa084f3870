"""Policy losses: the contribution of each sampled token. One function each, chosen by actor.policy_loss.loss_mode.

To add one: write `f(batch, actor) -> TokenLoss` in the file of its family (losses/clipped.py, weighted.py,
regularized.py) and its row in config/menus.txt; CONTRIBUTING.md has all steps. For a run of one's own
actor.policy_loss.loss_mode=file.py:name does. A loss that prescribes how tokens are joined says so in its row
(`aggregation=seq-mean-token-mean`); otherwise actor.loss_agg_mode decides, or, where that is null, the row's
`default_aggregation`. Ratio, clamp and clip metrics have one implementation each, in losses/ratio.py: reuse them. What
all losses report (ppo_kl) is the objective's business.
"""

from __future__ import annotations

from verl_like.algorithms.losses.base import (
    POLICY_LOSSES,
    PolicyBatch,
    PolicyLoss,
    PolicyLossFunction,
    TokenLoss,
    register_policy_loss,
)
from verl_like.algorithms.losses.ratio import bounded_exp, clip_range, log_difference, log_ratio, token_ratio

__all__ = ["POLICY_LOSSES", "PolicyBatch", "PolicyLoss", "PolicyLossFunction", "TokenLoss", "register_policy_loss"]
__all__ += ["bounded_exp", "clip_range", "log_difference", "log_ratio", "token_ratio"]
