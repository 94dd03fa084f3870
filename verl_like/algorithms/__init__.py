"""Pure functions on tensors: advantages, losses, KL, aggregation. No process, no model, no configuration tree.

Axes as in verl_like.batch: B sequences, R padded response tokens. Reading order: masked, advantages, kl, aggregate,
policy_losses; then experience (driver side) and objectives (worker side), which put them together.
"""
