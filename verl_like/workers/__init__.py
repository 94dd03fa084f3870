"""What one process does: the roles (actor, reference, rollout, critic) that share its device."""
