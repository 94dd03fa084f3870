"""Orders of training prompts other than one after the other: the user's own, or by weight of their sources."""
