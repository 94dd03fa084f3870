"""Agent loops of verl's form (`AgentLoopBase`): users' coroutines in worker processes, the policy in the trainer.

runner.py      the trainer's side, an EpisodeRunner: samples what a loop asks for, makes turns of what it returns
messages.py    what travels between the two
service.py     the worker's side; policy.py: what a loop has as server_manager; loading.py: where loops come from
turns.py       what a loop returned as turns, none of them tokenised again; tokens.py: verl's token helpers
"""
