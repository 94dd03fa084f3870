"""Games and tasks that an episode is played in, and what makes those of others playable.

games.py      by name: ROLL's tags, our kinds, a class of the user's    forms.py    one interface over everybody's
frozen_lake.py, sokoban.py, bandit.py, countdown.py                    drawing.py  frames, and GIFs of them
adapters.py   Gymnasium, reasoning-gym, skyrl-gym, each by a prefix; tinker's renderer    openenv.py  OpenEnv's servers

A game is Gymnasium's five-tuple on text: `reset(seed=, options=) -> (observation, info)`, `step(action) ->
(observation, reward, terminated, truncated, info)`. info["action_is_valid"] says whether the text named a move,
info["success"] whether the game is won. Nothing here imports torch.
"""
