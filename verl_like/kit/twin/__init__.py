"""The GPU twin: what of the CUDA code can be shown on a machine without a card.

stand_in.py: what Python asks of torch.cuda, answered by a record of streams, events and memory.
native.cpp, native.py: what torch's C++ asks of CUDA. mode.py: fake tensors, and counts of what the device would do.
world.py: ranks that are fake, or a few that agree for real. tests/twin drives whole steps with them.
"""
