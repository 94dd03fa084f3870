"""Killable CPU processes for graders, tools, environments and agents: one pool for all.

Nothing is imported here: a worker imports this package and must start fast, without torch.
"""
