"""Training engines: forward, backward, optimizer step, weight export, checkpoints of one model."""
