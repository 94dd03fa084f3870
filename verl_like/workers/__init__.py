"""Worker processes, and the roles (actor, reference, rollout, critic) that share a process's device."""
