"""The policy losses, by family: base (types, registry), ratio (what all share), clipped, weighted, regularized.

`verl_like.algorithms.policy_losses` imports them all and is where users of the menu look.
"""
