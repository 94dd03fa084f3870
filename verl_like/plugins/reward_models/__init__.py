"""Models that grade: the judge behind an endpoint, scores of a reward model, and the server of one that writes text."""
