"""What the actor's options do to whole batches before they are cut up and sent to the ranks. Pure, on the driver.

Everything here is a statistic of, or a choice among, the rows of a rollout batch or of a mini-batch: micro-batches and
ranks are cut afterwards and cannot change it.
"""

from __future__ import annotations

from torch import Tensor

from verl_like.algorithms.sample_weights import sample_weights
from verl_like.algorithms.selection import Seed, select_tokens
from verl_like.batch import Experience
from verl_like.config import ActorConfig


def prepare_batch(experience: Experience, actor: ActorConfig) -> Experience:
    """Sample weights whose scope is the rollout batch. Rows that mask_truncated will leave out have none."""
    if actor.sample_weight.scope != "batch":
        return experience
    trained_B = ~_left_out(experience, actor)
    weight_B = sample_weights(experience.select(trained_B), actor.sample_weight)
    if weight_B is None:
        return experience
    return experience.replace(sample_weight_B=weight_B.new_zeros(len(experience)).masked_scatter(trained_B, weight_B))


def prepare_minibatch(rows: Experience, actor: ActorConfig, seed: Seed) -> Experience:
    """The rows of one optimizer step: truncated ones left out, weights of scope mini_batch, selected tokens.

    No row may be left. `seed` must differ between mini-batches and not depend on ranks.
    """
    rows = rows.select(~_left_out(rows, actor))
    weight_B = rows.sample_weight_B
    if actor.sample_weight.scope == "mini_batch":
        weight_B = sample_weights(rows, actor.sample_weight)
    return rows.replace(sample_weight_B=weight_B, selected_T=select_tokens(rows, actor, seed) if len(rows) else None)


def _left_out(rows: Experience, actor: ActorConfig) -> Tensor:
    """bool [B]: rows that the update must not see."""
    if not actor.mask_truncated:
        return rows.response_mask_T.new_zeros(len(rows))
    if rows.truncated_B is None:
        raise ValueError("actor_rollout_ref.actor.mask_truncated=True needs finish reasons, but the batch has none")
    return rows.truncated_B
