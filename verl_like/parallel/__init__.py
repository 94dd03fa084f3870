"""Processes, device meshes, FSDP wrapping, offload and load balancing."""
