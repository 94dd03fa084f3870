"""The GPU twin: what of the CUDA code can be shown on a machine without a card.

stand_in.py: what Python asks of torch.cuda, answered by a record of streams, events and memory.
"""
