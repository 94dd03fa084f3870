"""Rewards: graders, the user's own reward function, and the killable processes they run in.

Nothing is imported here: a reward worker imports this package and must start fast, without torch.
"""
