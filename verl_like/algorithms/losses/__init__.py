"""The policy losses, by family: base (types, registry), ratio (what all share), clipped, weighted, regularized.

`verl_like.config.menus` says which there are; `verl_like.algorithms.policy_losses` is where users of the menu look.
"""
