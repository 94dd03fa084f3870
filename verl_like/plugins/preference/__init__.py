"""Training on preferences: what makes one answer better than another, for a policy or a reward model."""
